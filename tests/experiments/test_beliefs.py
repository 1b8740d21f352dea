"""Uncertain programs and their exact filter; its two linear representations, and how they end."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import session, typed_lines

from data import Group, generator
from experiments import beliefs
from experiments.beliefs import COINS, PFSA, CoinTask, main
from models import LinRNN
from scan import delta_rule_recurrent, exchange_key
from train import Recipe, next_token_loss, to_tensors


def check_traces(task, program, monkeypatch):
    """Python shows each trace to the letter if its coins fall as recorded. What the filter expects
    at the last reveal is what all ways to fall say that fit the reveals before."""
    tokens, reveals = task.write_program(program)
    shown = task.program_answers(program)
    assert (tokens[reveals] == task.value_tokens[shown].ravel()).all()
    for row, probability, executed in zip(tokens, program.probability, program.executed):
        text = task.decode(row)
        # random() < p: the largest number that is still below p, or p itself
        falls = [np.nextafter(p, 0) if fell else p
                 for p, fell in zip(probability, executed) if p < 1]
        monkeypatch.setattr(random, "random", lambda: falls.pop(0))
        assert session(typed_lines(text)) == text
        assert not falls  # all coins were used

    best = task.batch_of(program).best
    for b in range(len(tokens)):
        coins = np.flatnonzero(program.probability[b] < 1)
        falls = np.array([*itertools.product([True, False], repeat=len(coins))], bool)
        ways = program._replace(**{name: np.repeat(part[b:b + 1], len(falls), 0)
                                   for name, part in program._asdict().items()
                                   if name != "spacing"})
        ways.executed[:, coins] = falls
        p = program.probability[b, coins]
        weights = np.where(falls, p, 1 - p).prod(1)
        answers = task.program_answers(ways)
        fit = (answers[:, :-1] == shown[b, :-1]).all(1)
        mass = np.bincount(answers[fit, -1], weights[fit], task.group.degree)
        assert np.abs(best[b, -1] - mass / mass.sum()).max() < 1e-12


@pytest.mark.parametrize("group, commands, share", [("S4", "swap", 0.75), ("D4", "full", 0.25)])
def test_a_trace_is_a_python_session_with_an_exact_filter(group, commands, share, monkeypatch):
    task = CoinTask(Group(group), commands, share)
    check_traces(task, task.draw(3, 8, 2, np.random.default_rng(5)), monkeypatch)


def test_the_share_of_uncertain_commands_is_p_and_each_coin_falls_as_its_number_says():
    program = CoinTask(Group("S3"), "swap", 0.25).draw(4000, 16, 4, np.random.default_rng(4))
    assert ((program.probability < 1).sum(1) == 4).all()
    for coin in [*COINS, 1]:
        fell = program.executed[program.probability == coin]
        assert len(fell) > 5000
        assert abs(fell.mean() - coin) <= 6 * (coin * (1 - coin) / len(fell))**0.5


def test_a_coin_flip_of_an_exchange_is_a_delta_step_and_a_reveal_settles_a_row_and_a_column():
    """(1 - p) I + p P_g = I - 2p k k^T: equation (2) is the delta rule, with beta = 2p."""
    p = torch.rand(7, dtype=torch.float64)
    H = torch.rand(5, 5, dtype=torch.float64)
    k = exchange_key(torch.tensor(1), torch.tensor(3), 5).expand(7, 5)
    _, expected = delta_rule_recurrent(k, k, torch.zeros(7, 5).double(), 2 * p, H)
    for coin in p:
        H = beliefs.flip_coin(H, torch.tensor([0, 3, 2, 1, 4]), coin)
    assert (H - expected).abs().max() < 1e-12

    expected = H.clone()
    expected[2], expected[:, 4] = 0, 0
    expected[2, 4] = 1
    assert (beliefs.show_value(H, torch.tensor(2), torch.tensor(4)) == expected).all()


def test_marginals_and_sinkhorn_have_a_gap_to_the_filter_in_exact_arithmetic():
    """Exact up to the first reveal and for certain commands. After it they are off, and never rule
    out what can happen: marginals say nothing of how the variables depend on each other."""
    for share in (0.0, 0.5):
        task = CoinTask(Group("S4"), "swap", share)
        program = task.draw(30, 12, 2, np.random.default_rng(12))
        best = task.best_predictions(program)
        marginal = beliefs.marginal_predictions(task, program)
        gap = np.abs(marginal - best).max((0, 2))  # at each reveal
        assert gap[0] < 1e-9 and (marginal[best > 0] > 0).all()
        assert np.abs(marginal.sum(-1) - 1).max() < 1e-8
        assert gap.max() > 0.01 if share else gap.max() < 1e-9


def test_the_rescaled_scan_is_the_filter():
    """f(A f(x)) = f(A x): it does not matter when one divides. |h|_1 is the probability of all that
    was revealed. A random automaton, whose symbols exclude one state, or none, and move then."""
    rng = np.random.default_rng(6)
    delta = rng.dirichlet([0.3] * 4, size=(5, 4)).swapaxes(1, 2)
    rho = np.arange(4) != np.arange(5)[:, None]
    start = np.array([0.4, 0.3, 0.2, 0.1])
    symbols = rng.integers(5, size=(1, 38))
    exact = PFSA(delta, rho, start).filter(symbols)[0]
    evidence = (exact * rho[symbols[0]]).sum(1)

    A = torch.from_numpy(delta * rho[:, None])[symbols[0, :-1]]
    ours, log_norm = beliefs.rescaled_scan(A, torch.from_numpy(start))
    assert np.abs(ours.numpy() - exact[1:]).max() < 1e-10
    assert np.abs(log_norm.numpy() - np.log(evidence[:-1]).cumsum()).max() < 1e-10


def test_a_beginning_that_fits_badly_keeps_a_scale_of_its_own():
    """Two states that never meet: one survives each step with probability 1/2, the other always.
    One scale for the whole matrix would let the first column underflow in float32."""
    A = torch.diag(torch.tensor([0.5, 1.0])).expand(10_000, 2, 2)
    belief, log_norm = beliefs.rescaled_scan(A, torch.tensor([1.0, 0.0]))
    assert (belief == torch.tensor([1.0, 0.0])).all()
    assert abs(log_norm[-1] / (10_000 * np.log(0.5)) - 1) < 1e-12


def test_both_representations_end_where_the_number_format_does():
    """Halving passes the smallest number 2^-m, and the tie 2^-(m + 1) is rounded to the even 0.
    Figure 9 of the paper begins at 1/2, figure 10 at 1."""
    for dtype, m in [(torch.float64, 1074), (torch.float32, 149), (torch.float16, 24)]:
        assert beliefs.underflow(dtype) == (m, m + 1)


@torch.no_grad()
def test_a_model_is_measured_by_its_kl_from_the_filter_and_a_stage_by_the_best_reader():
    """23 traces are read in parts. A batch without `best` says nothing of the stage."""
    task = CoinTask(Group("S3"), "swap", 0.5)
    model = LinRNN(len(task.vocab), d_model=8, heads=2).double()
    batch = to_tensors(task.test_batch(23, 8, 2, generator(3, "test", 8, 2)), "cpu")
    best = torch.from_numpy(batch.best)
    log_q = model(batch.inputs)[batch.reveals].log_softmax(-1)[:, task.value_tokens]
    kl = F.kl_div(log_q.view(best.shape), best, reduction="none").sum(-1)
    guess = F.kl_div(torch.full_like(best, 1 / 3).log(), best, reduction="none").sum(-1)
    bayes = best.amax(-1).mean()

    row = beliefs.evaluate(model, task, 8, 2, 23, 3)
    assert row["kl_by_position"] == pytest.approx(kl.mean(0).tolist())
    assert row["kl"] == pytest.approx(kl.mean()) and row["guess"] == pytest.approx(guess.mean())
    assert row["bayes"] == pytest.approx(bayes)

    plain_loss, plain = next_token_loss(model, batch, Recipe())
    loss, metrics = beliefs.loss_of(model, batch, Recipe())
    share = plain["reveal_accuracy"] / bayes
    assert loss == plain_loss and metrics == plain | {"reveal_accuracy": pytest.approx(share)}
    _, metrics = beliefs.loss_of(model, batch._replace(best=None), Recipe())
    assert metrics["reveal_accuracy"] is None


def test_a_run_is_trained_resumed_and_read_back_as_its_task(tmp_path, capsys, monkeypatch, refused):
    """`eval` finds the numbers that `train` has written, kl among them."""
    short = {"curriculum": [(2, 1), (4, 2)], "max_steps": 3, "last_steps": 2}
    monkeypatch.setattr(beliefs, "RECIPE", short)
    tests = ["--lengths", "4:2", "--traces", "5"]
    main(["train", "--uncertain", "0.5", "--seed", "3", *tests, "--out", str(tmp_path / "run")])
    main(["train", "--resume", str(tmp_path / "run"), *tests])
    main(["eval", str(tmp_path / "run"), *tests, "--json"])
    made = json.loads((tmp_path / "run" / "results.json").read_text())
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["results"] == made["results"] and made["results"][0]["kl"] > 0
    assert {"task": "coins", "uncertain": 0.5, "seed": 3}.items() <= made["config"].items()
    refused(main, ["train", "--resume", tmp_path / "run", "--uncertain", "0.5"], "uncertain")
