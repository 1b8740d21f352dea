"""Uncertain programs and their exact filter; its two linear representations, and how they end."""

import itertools
import json
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import session, typed_lines

from data import Group
from experiments.beliefs import (COINS, PFSA, CoinTask, Program, flip_coin, joint_matrices, main,
                                 marginal_predictions, rescaled_scan, show_value, sinkhorn)
from scan import delta_rule_recurrent, exchange_key


def test_an_impossible_reveal_is_refused():
    """Two states that stay: a trace that reveals one and then the other."""
    reveals = np.array([[True, False], [False, True], [True, True]])
    automaton = PFSA(np.stack([np.eye(2)] * 3), reveals, np.array([0.5, 0.5]))
    with pytest.raises(ValueError, match="symbol 2 of a trace fits no state"):
        automaton.filter(np.array([[2, 2, 2, 2], [0, 2, 1, 2]]))


# --- The traces and their filter ------------------------------------------------------------------

def by_enumeration(task, program, b):
    """Every way that the coins of trace b can fall, with its probability, in exact fractions.

    -> the predictions at the reveals, n fractions each, and the probability of all reveals.
    """
    one = Program(*(part[b:b + 1].copy() for part in program))
    truth = task.program_answers(one)[0]
    coins = np.flatnonzero(one.probability[0] < 1)

    # Of each reveal: the probability that it shows this value after all those before it.
    mass = np.full((len(truth), task.group.degree), Fraction(0))
    for falls in itertools.product([True, False], repeat=len(coins)):
        one.executed[0, coins] = falls
        weight = Fraction(1)
        for fell, p in zip(falls, one.probability[0, coins].tolist()):
            weight *= Fraction(p) if fell else 1 - Fraction(p)
        answers = task.program_answers(one)[0]
        for reveal, answer in enumerate(answers):
            if (answers[:reveal] == truth[:reveal]).all():
                mass[reveal, answer] += weight
    return mass / mass.sum(1, keepdims=True), mass[-1, truth[-1]]


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

    best = task.best_predictions(program)
    _, log_evidence = task.automaton.filter(task.symbols(program))
    for b in range(len(tokens)):
        predicted, evidence = by_enumeration(task, program, b)
        assert np.abs(best[b] - predicted.astype(float)).max() < 1e-12
        assert abs(np.exp(log_evidence[b].sum()) / float(evidence) - 1) < 1e-12


@pytest.mark.parametrize("name, commands, share, schedule", [
    ("S3", "swap", 0.0, "random"), ("S4", "swap", 0.75, "adversarial"),
    ("S5", "full", 0.25, "random"), ("D4", "full", 0.75, "random"),
    ("A4xZ5", "full", 1.0, "random")])
def test_a_trace_is_a_python_session_with_an_exact_filter(name, commands, share, schedule,
                                                          monkeypatch):
    task = CoinTask(Group(name), commands, share)
    check_traces(task, task.draw(3, 8, 2, np.random.default_rng(5), schedule), monkeypatch)


def test_the_share_of_uncertain_commands_is_p_and_each_coin_falls_as_its_number_says():
    """Equally many in every trace where P L is whole; executed with the probability shown."""
    task = CoinTask(Group("S3"), "swap", 0.25)
    program = task.draw(4000, 16, 4, np.random.default_rng(4))
    assert ((program.probability < 1).sum(1) == 4).all()
    for coin in COINS:
        fell = program.executed[program.probability == coin]
        assert abs(len(fell) - 16000 / 3) < 6 * 16000**0.5 / 2
        assert abs(fell.mean() - coin) < 6 * (coin * (1 - coin) / len(fell))**0.5
    assert program.executed[program.probability == 1].all()


def test_the_adversary_reveals_one_variable_of_the_swap_that_never_happens():
    """The filter's belief ahead of each reveal is the same: half of each value of the pair."""
    task = CoinTask(Group("S3"), "full", 0.5)
    program = task.draw(50, 12, 3, np.random.default_rng(18), "adversarial")
    assert (program.asked == program.asked[:, :1]).all() and len(np.unique(program.asked)) > 1
    certain = np.arange(12) < 3
    assert (program.probability == np.where(certain, 1, 0.5)).all()
    assert (program.executed == certain).all()
    cycle = program.commands[:, 3:]
    assert (cycle == cycle[:, :1]).all() and ((cycle != np.arange(3)).sum(-1) == 2).all()
    best = task.best_predictions(program)[:, 1:]
    assert (best == best[:, :1]).all() and ((best == 0.5).sum(-1) == 2).all()


def test_a_batch_carries_what_the_filter_predicts_and_only_a_test_knows_a_schedule():
    """best: the filter at the values, 0 elsewhere."""
    task = CoinTask(Group("S3"), "swap", 0.5)
    task.schedule = "adversarial"
    for make, schedule in [(task.training_batch, "random"), (task.test_batch, "adversarial")]:
        batch = make(7, 8, 2, np.random.default_rng(5))
        program = task.draw(7, 8, 2, np.random.default_rng(5), schedule)
        assert (batch.inputs == task.write_program(program)[0][:, :-1]).all()
        assert (batch.best[..., task.value_tokens] == task.best_predictions(program)).all()
        assert np.abs(batch.best.sum(-1) - 1).max() < 1e-12


# --- Two linear representations -------------------------------------------------------------------

def test_a_reveal_settles_one_row_and_one_column_of_the_marginals():
    """(3): variable i holds j and nothing else, no other variable holds j; the rest is kept."""
    H = torch.rand(4, 4, dtype=torch.float64)
    for i, j in itertools.product(range(4), repeat=2):
        expected = H.clone()
        expected[i], expected[:, j] = 0, 0
        expected[i, j] = 1
        assert (show_value(H, torch.tensor(i), torch.tensor(j)) == expected).all()


def test_a_coin_flip_of_an_exchange_is_a_delta_step_with_beta_2p():
    """(1 - p) I + p P_g = I - 2p k k^T: equation (2) is the delta rule, for any H and p."""
    p = torch.rand(7, dtype=torch.float64)
    H = torch.rand(5, 4, dtype=torch.float64)
    k = exchange_key(torch.tensor(1), torch.tensor(3), 5).expand(7, 5)
    _, ours = delta_rule_recurrent(k, k, torch.zeros(7, 4).double(), 2 * p, H)
    for coin in p:
        H = flip_coin(H, torch.tensor([0, 3, 2, 1, 4]), coin)
    assert (ours - H).abs().max() < 1e-12


def test_marginals_and_sinkhorn_have_a_gap_to_the_filter_in_exact_arithmetic():
    """Exact up to the first reveal and for certain commands. After it they are off, and never rule
    out what can happen: marginals say nothing of how the variables depend on each other."""
    for share in (0.0, 0.5):
        task = CoinTask(Group("S4"), "swap", share)
        program = task.draw(30, 12, 2, np.random.default_rng(12))
        best, marginal = task.best_predictions(program), marginal_predictions(task, program)
        gap = np.abs(marginal - best).max((0, 2))  # at each reveal
        assert gap[0] < 1e-9 and (marginal[best > 0] > 0).all()
        assert gap.max() > 0.01 if share else gap.max() < 1e-9
    H = sinkhorn(torch.rand(5, 4, 4, dtype=torch.float64))
    assert (H.sum(-1) - 1).abs().max() < 1e-8 and (H.sum(-2) - 1).abs().max() < 1e-8


# --- The rescaled scan ----------------------------------------------------------------------------

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
    beliefs, log_evidence = automaton.filter(symbols)
    ours, evidence = rescaled_scan(joint_matrices(automaton, symbols[0, :-1]),
                                   torch.from_numpy(automaton.start))
    assert np.abs(ours.numpy() - beliefs[0, 1:]).max() < 1e-10
    assert np.abs(evidence.numpy() - log_evidence[0, :-1].cumsum()).max() < 1e-10 * length


def test_a_beginning_that_fits_badly_keeps_a_scale_of_its_own():
    """Two states that never meet: one survives each step with probability 1/2, the other always.
    One scale for the whole matrix would let the first column underflow in float32."""
    A = torch.diag(torch.tensor([0.5, 1.0])).expand(10_000, 2, 2)
    belief, evidence = rescaled_scan(A, torch.tensor([1.0, 0.0]))
    assert (belief == torch.tensor([1.0, 0.0])).all()
    assert abs(evidence[-1] / (10_000 * math.log(0.5)) - 1) < 1e-12


# --- The command line -----------------------------------------------------------------------------

def test_an_uncertain_run_is_trained_and_read_back_as_its_task(tmp_path, capsys, monkeypatch):
    """The filter's columns stand in the JSON. The same command goes on with the run."""
    monkeypatch.setattr(CoinTask, "test_lengths", [(4, 2)])
    train = ["train", "--commands", "swap", "--uncertain", "0.5", "--curriculum", "2:1,4:2",
             "--max-steps", "3", "--last-steps", "2", "--device", "cpu", "--out", str(tmp_path)]
    main(train)
    main(train)
    assert "from step 3" in capsys.readouterr().out

    main(["eval", str(tmp_path), "--traces", "4", "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    wanted = {"format": "coins", "group": "S3", "commands": "swap", "uncertain": 0.5}
    assert wanted.items() <= found["config"].items()
    assert found["results"][0]["kl"] > 0


def test_the_command_shows_how_both_representations_end(capsys, monkeypatch):
    """Halving passes the smallest number 2^-m, and the tie 2^-(m + 1) is rounded to the even 0.
    Figure 9 of the paper begins at 1/2, figure 10 at 1."""
    monkeypatch.setattr("experiments.beliefs.LONG", 1000)
    monkeypatch.setattr(CoinTask, "test_lengths", [(8, 2)])
    main(["linear"])
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    for name, m in [("float64", 1074), ("float32", 149), ("bfloat16", 133), ("float16", 24)]:
        assert [name, str(m), str(m + 1)] in rows
    assert "belief [0.3, 0.35, 0.35], exactly [0.3, 0.35, 0.35]" in shown
    assert "\nS5 (8,2)  0." in shown
