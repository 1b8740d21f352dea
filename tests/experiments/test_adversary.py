"""Repetitions are real programs; what counts in training; the hand-built head; the study."""

import numpy as np
import pytest
import torch
from test_beliefs import check_traces

from data import Group
from experiments import adversary, records, where
from experiments.adversary import CELLS, RepetitionTask, hold_pair, only_last_reveal
from experiments.beliefs import loss_of
from models import LinRNN
from train import Recipe, to_tensors


def task_of(group="S3", **options):
    return RepetitionTask(Group(group), "swap", **options)


@pytest.mark.parametrize("schedule, share, last", [("adversarial", 0, 0), ("honest", 0.5, 0.5),
                                                   ("forced", 0, 0.5)])
def test_a_repetition_shows_the_first_variable_of_one_exchange_behind_fair_coins(
        schedule, share, last, monkeypatch):
    """The belief ahead of each reveal is half of each value of the pair. Training does not read the
    schedule."""
    task = RepetitionTask(Group("S4"), "full", 0.5)
    check_traces(task, task.draw(3, 6, 2, np.random.default_rng(2), schedule), monkeypatch)

    task.schedule = schedule
    program = task.draw(500, 12, 3, np.random.default_rng(18), schedule)
    assert (program.probability == np.where(np.arange(12) < 3, 1, 0.5)).all()
    cycle = program.commands[:, 3:]
    moved = cycle[:, 0] != np.arange(4)
    assert (cycle == cycle[:, :1]).all() and len(np.unique(moved, axis=0)) == 6
    assert (moved.sum(-1) == 2).all() and (program.asked == moved.argmax(1)[:, None]).all()

    assert program.executed[:, :3].all()
    assert abs(program.executed[:, 3:-1].mean() - share) <= 6 * share / 4000**0.5
    assert abs(program.executed[:, -1].mean() - last) <= 6 * last / 500**0.5
    best = task.test_batch(500, 12, 3, np.random.default_rng(18)).best
    assert (best == task.best_predictions(program)).all()
    assert (best[:, 1:] == best[:, 1:2]).all() and ((best[:, 1:] == 0.5).sum(-1) == 2).all()
    assert task.training_batch(500, 12, 1, np.random.default_rng(18)).best.max() == 1


@pytest.mark.parametrize("repetitions, expected", [("honest", {4, 7}), ("half", {1, 4, 7}),
                                                   ("forced", {1, 4})])
def test_a_quarter_of_the_batches_of_sparse_stages_are_repetitions(repetitions, expected):
    """Honest ones have 6 cycles; of forced ones, of 1 to 6 and an honest one, the last counts. None
    of them counts for a stage."""
    task, rng = task_of(cycles=6, repetitions=repetitions), np.random.default_rng(5)
    made = [task.training_batch(1, 16, 4, rng) for _ in range(200)]
    counts = np.array([batch.reveals.sum() for batch in made])  # of reveals; random ones have 4
    assert set(counts) == expected
    assert [batch.best is None for batch in made] == (counts != 4).tolist()
    assert abs(np.mean(counts != 4) - 0.25) < 6 * (0.25 * 0.75 / 200)**0.5

    tokens = {made[i].inputs.shape[1] for i in np.flatnonzero(counts == 1)}
    possible = [task.draw(1, 2 + cycles, 1, rng, "forced") for cycles in range(1, 7)]
    assert not tokens or tokens == {task.batch_of(one).inputs.shape[1] for one in possible}
    assert {task.training_batch(2, 8, 1, rng).reveals.sum() for _ in range(20)} == {16}


def test_only_the_last_reveal_of_a_forced_repetition_counts_in_the_loss():
    """There the coin is honest. All tokens but the forced reveals count as ever."""
    task = task_of()
    traces = task.batch_of(task.draw(5, 5, 1, np.random.default_rng(6), "forced"))
    places = traces.reveals[0].nonzero()[0]
    model = LinRNN(len(task.vocab), d_model=8, heads=2).double()
    log_q = model(torch.from_numpy(traces.inputs)).log_softmax(-1)
    losses = -log_q.gather(2, torch.from_numpy(traces.targets).unsqueeze(2)).squeeze(2)
    kept = np.delete(np.arange(losses.shape[1]), places[:-1])
    last = losses[:, places[-1]].mean()

    objective, metrics = loss_of(model, to_tensors(only_last_reveal(traces), "cpu"), Recipe())
    assert abs(metrics["reveal_loss"] - last.item()) < 1e-10
    assert (objective - losses[:, kept].sum() / losses.numel() - last).abs() < 1e-10


def test_a_hand_built_head_keeps_the_belief_about_a_pair_for_500_cycles():
    """Ahead of each reveal it reads [1/2, 1/2, 0], the filter's own prediction, whatever was shown
    before. After a reveal it reads 1 for the value shown, and 1/2 for the other of the pair."""
    task = task_of()
    program = task.draw(20, 1 + 500, 1, np.random.default_rng(7), "honest")
    best = torch.from_numpy(task.best_predictions(program))
    shown = torch.from_numpy(task.program_answers(program))
    for b in np.flatnonzero((program.commands[:, 1] == [1, 0, 2]).all(1)):  # a and b are the pair
        start = torch.from_numpy(program.commands[b, 0])  # the state after the certain command
        ahead, after = hold_pair(shown[b, 1:], start)
        assert (ahead - best[b, 1:]).abs().max() < 1e-10
        expected = best[b, 1:].scatter(1, shown[b, 1:, None], 1.0)
        assert (after - expected).abs().max() < 1e-10


def test_a_run_that_has_not_learned_keeps_nothing():
    def row(random, cycle_64):
        by_position = [0.0] * 64 + [cycle_64]
        return {"results": [{"schedule": "random", "kl": random},
                            {"schedule": "adversarial", "kl_by_position": by_position}]}

    rows = [row(0.09, 0.04), row(0.09, 0.06), row(0.11, 0.01)]
    assert adversary.kept(rows) == "1 of 2" and not adversary.keeps(rows[2])


def test_the_records_are_the_cells_of_the_study():
    rows = records("adversary")
    assert len(rows) == len(CELLS)
    for cell in CELLS:
        assert len(where(rows, **cell)) == 1


def test_each_test_of_a_run_reads_its_own_schedule():
    """Where the pair is known but its order is not, a guess is log 3 - log 2 from the filter."""
    task, _, _, tests = adversary.plan(CELLS[0])
    few = [(schedule, stage, 3) for schedule, stage, _ in tests]
    results = adversary.measure(LinRNN(len(task.vocab), 8, 2), task, few)
    assert [row["schedule"] for row in results] == ["random", "adversarial", "honest"]
    assert [row["guess"] > 0.5 for row in results] == [True, False, False]
