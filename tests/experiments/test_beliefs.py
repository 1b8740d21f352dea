"""Uncertain programs and their exact filter; its two linear representations, and how they end."""

import itertools
import json
import math
import random

import numpy as np
import pytest
import torch
from conftest import session, typed_lines

from data import Group, generator
from experiments import beliefs, groups
from experiments.beliefs import COINS, PFSA, CoinTask, Program, main
from models import LinRNN
from scan import delta_rule_recurrent, exchange_key
from train import Recipe, next_token_loss, to_tensors


def by_enumeration(task, program, b):
    """Over all ways in which the coins of trace b can fall: what to expect at its reveals, and the
    probability of all that they show. All numbers are sums of quarters, so floats are exact."""
    coins = np.flatnonzero(program.probability[b] < 1)
    falls = np.array([*itertools.product([True, False], repeat=len(coins))], bool)
    ways = Program(*(np.repeat(part[b:b + 1], len(falls), 0) for part in program))
    ways.executed[:, coins] = falls

    p = program.probability[b, coins]
    weights = np.where(falls, p, 1 - p).prod(1)
    shown = task.program_answers(ways)
    predicted = []
    for reveal, value in enumerate(task.program_answers(program)[b]):
        mass = np.bincount(shown[:, reveal], weights, task.group.degree)
        predicted.append(mass / mass.sum())
        weights = weights * (shown[:, reveal] == value)
    return np.array(predicted), weights.sum()


def check_traces(task, program, monkeypatch):
    """Python shows each trace to the letter if its coins fall as recorded. The filter's predictions
    and the probability of all reveals are those of the enumeration of all coins."""
    tokens, reveals = task.write_program(program)
    assert (tokens[reveals] == task.value_tokens[task.program_answers(program)].ravel()).all()
    for row, probability, executed in zip(tokens, program.probability, program.executed):
        text = task.decode(row)
        assert task.encode(text) == row.tolist()
        # random() < p: the largest number that is still below p, or p itself
        falls = [np.nextafter(p, 0) if fell else p
                 for p, fell in zip(probability, executed) if p < 1]
        monkeypatch.setattr(random, "random", lambda: falls.pop(0))
        assert session(typed_lines(text)) == text
        assert not falls  # all coins were used

    best = task.batch_of(program).best
    _, log_evidence = task.automaton.filter(task.symbols(program))
    for b in range(len(tokens)):
        predicted, evidence = by_enumeration(task, program, b)
        assert np.abs(best[b] - predicted).max() < 1e-12
        assert abs(np.exp(log_evidence[b].sum()) / evidence - 1) < 1e-12


@pytest.mark.parametrize("group, commands, share", [
    (Group("S3"), "swap", 0.0), (Group("S4"), "swap", 0.75), (Group("D4"), "full", 0.25),
    (groups.product(Group("A4"), Group("Z5")), "full", 1.0)])
def test_a_trace_is_a_python_session_with_an_exact_filter(group, commands, share, monkeypatch):
    task = CoinTask(group, commands, share)
    check_traces(task, task.draw(3, 8, 2, np.random.default_rng(5)), monkeypatch)


def test_the_share_of_uncertain_commands_is_p_and_each_coin_falls_as_its_number_says():
    program = CoinTask(Group("S3"), "swap", 0.25).draw(4000, 16, 4, np.random.default_rng(4))
    assert ((program.probability < 1).sum(1) == 4).all()
    for coin in COINS:
        fell = program.executed[program.probability == coin]
        assert abs(len(fell) - 16000 / 3) < 6 * 16000**0.5 / 2
        assert abs(fell.mean() - coin) < 6 * (coin * (1 - coin) / len(fell))**0.5
    assert program.executed[program.probability == 1].all()


def test_a_reveal_settles_one_row_and_one_column_of_the_marginals():
    """(3): variable i holds j and nothing else, no other variable holds j; the rest is kept."""
    H = torch.rand(4, 4, dtype=torch.float64)
    for i, j in itertools.product(range(4), repeat=2):
        expected = H.clone()
        expected[i], expected[:, j] = 0, 0
        expected[i, j] = 1
        assert (beliefs.show_value(H, torch.tensor(i), torch.tensor(j)) == expected).all()


def test_a_coin_flip_of_an_exchange_is_a_delta_step_with_beta_2p():
    """(1 - p) I + p P_g = I - 2p k k^T: equation (2) is the delta rule, for any H and p."""
    p = torch.rand(7, dtype=torch.float64)
    H = torch.rand(5, 4, dtype=torch.float64)
    k = exchange_key(torch.tensor(1), torch.tensor(3), 5).expand(7, 5)
    _, ours = delta_rule_recurrent(k, k, torch.zeros(7, 4).double(), 2 * p, H)
    for coin in p:
        H = beliefs.flip_coin(H, torch.tensor([0, 3, 2, 1, 4]), coin)
    assert (ours - H).abs().max() < 1e-12


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


@pytest.mark.parametrize("length", [1, 37])
def test_the_rescaled_scan_is_the_filter(length):
    """f(A f(x)) = f(A x): it does not matter when one divides. Beliefs and log-evidence at every
    step of a random automaton, whose symbols exclude one state, or none, and move then, to 1e-10.
    """
    rng = np.random.default_rng(6)
    delta = rng.dirichlet([0.3] * 4, size=(5, 4)).swapaxes(1, 2)
    rho = np.arange(4) != np.arange(5)[:, None]
    automaton = PFSA(delta, rho, np.array([0.4, 0.3, 0.2, 0.1]))
    symbols = rng.integers(5, size=(1, length + 1))
    exact, log_evidence = automaton.filter(symbols)
    ours, evidence = beliefs.rescaled_scan(beliefs.joint_matrices(automaton, symbols[0, :-1]),
                                           torch.from_numpy(automaton.start))
    assert np.abs(ours.numpy() - exact[0, 1:]).max() < 1e-10
    assert np.abs(evidence.numpy() - log_evidence[0, :-1].cumsum()).max() < 1e-10 * length


def test_a_beginning_that_fits_badly_keeps_a_scale_of_its_own():
    """Two states that never meet: one survives each step with probability 1/2, the other always.
    One scale for the whole matrix would let the first column underflow in float32."""
    A = torch.diag(torch.tensor([0.5, 1.0])).expand(10_000, 2, 2)
    belief, evidence = beliefs.rescaled_scan(A, torch.tensor([1.0, 0.0]))
    assert (belief == torch.tensor([1.0, 0.0])).all()
    assert abs(evidence[-1] / (10_000 * math.log(0.5)) - 1) < 1e-12


def test_both_representations_end_where_the_number_format_does():
    """Halving passes the smallest number 2^-m, and the tie 2^-(m + 1) is rounded to the even 0.
    Figure 9 of the paper begins at 1/2, figure 10 at 1."""
    for dtype, m in [(torch.float64, 1074), (torch.float32, 149), (torch.float16, 24)]:
        assert beliefs.underflow(dtype) == (m, m + 1)


@torch.no_grad()
def test_the_kl_is_the_sum_over_the_values_at_each_reveal():
    """p log(p / q), one by one, of a random model and of a guess. 23 traces are read in parts."""
    task = CoinTask(Group("S3"), "swap", 0.5)
    model = LinRNN(len(task.vocab), d_model=8, heads=2).double()
    batch = task.test_batch(23, 8, 2, generator(3, "test", 8, 2))
    kl, guess = np.zeros((2, 23, 4))
    for b, r in itertools.product(range(23), range(4)):
        place = batch.reveals[b].nonzero()[0][r]
        q = model(torch.from_numpy(batch.inputs[b:b + 1]))[0, place].softmax(0)
        for value, p in enumerate(batch.best[b, r]):
            if p > 0:
                kl[b, r] += p * math.log(p / q[task.value_tokens[value]])
                guess[b, r] += p * math.log(p * 3)

    row = beliefs.evaluate(model, task, 8, 2, 23, 3)
    assert np.abs(row["kl_by_position"] - kl.mean(0)).max() < 1e-10
    expected = {"kl": kl.mean(), "guess": guess.mean(), "bayes": batch.best.max(-1).mean()}
    assert all(abs(row[name] - value) < 1e-10 for name, value in expected.items())


def test_a_stage_is_measured_by_the_best_reader_and_a_batch_without_one_says_nothing():
    task = CoinTask(Group("S3"), "swap", 1.0)
    batch = to_tensors(task.training_batch(8, 4, 2, np.random.default_rng(5)), "cpu")
    model = LinRNN(len(task.vocab), d_model=8, heads=2)
    plain_loss, plain = next_token_loss(model, batch, Recipe())
    loss, metrics = beliefs.loss_of(model, batch, Recipe())
    share = plain["reveal_accuracy"] / batch.best.max(-1).mean()
    assert loss == plain_loss and metrics == plain | {"reveal_accuracy": pytest.approx(share)}
    _, metrics = beliefs.loss_of(model, batch._replace(best=None), Recipe())
    assert metrics["reveal_accuracy"] is None


def test_a_run_is_trained_resumed_and_read_back_as_its_task(tmp_path, capsys, refused):
    """`eval` finds the numbers that `train` has written, kl among them."""
    folder = tmp_path / "run"
    tests = ["--lengths", "4:2", "--traces", "5"]
    options = "--uncertain 0.5 --curriculum 2:1,4:2 --max-steps 3 --last-steps 2 --seed 3"
    main(["train", *options.split(), *tests, "--out", str(folder)])
    main(["train", "--resume", str(folder), *tests])
    main(["eval", str(folder), *tests, "--json"])
    made = json.loads((folder / "results.json").read_text())
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["results"] == made["results"] and made["results"][0]["kl"] > 0
    assert {"task": "coins", "uncertain": 0.5, "seed": 3}.items() <= made["config"].items()
    refused(main, ["train", "--resume", folder, "--uncertain", "0.25"], "uncertain")
    refused(main, ["train", "--group", "S6"], "S6", "720")
