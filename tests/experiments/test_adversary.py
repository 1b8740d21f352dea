"""Repetitions are real programs with an exact filter; what counts in training; the hand-built head;
the study."""

import numpy as np
import pytest
import torch
from test_beliefs import check_traces

from data import Group
from experiments import adversary, records, where
from experiments.adversary import (CELLS, COLUMNS, RepetitionTask, hold_pair, measure,
                                   nats, only_last_reveal)
from experiments.beliefs import loss_of
from models import LinRNN
from train import Recipe, to_tensors


def task_of(group="S3", **options):
    return RepetitionTask(Group(group), "swap", **options)


@pytest.mark.parametrize("schedule", ["honest", "forced", "adversarial"])
def test_a_repetition_is_a_python_session_with_an_exact_filter(schedule, monkeypatch):
    task = task_of("S4", uncertain=0.75)
    check_traces(task, task.draw(3, 6, 2, np.random.default_rng(2), schedule), monkeypatch)


@pytest.mark.parametrize("schedule, share, last", [("adversarial", 0, 0), ("honest", 0.5, 0.5),
                                                   ("forced", 0, 0.5)])
def test_a_repetition_shows_the_first_variable_of_one_exchange_behind_fair_coins(schedule, share,
                                                                                last):
    """The filter's belief ahead of each reveal is the same: half of each value of the pair. Only a
    test knows the schedule."""
    task = RepetitionTask(Group("S3"), "full", 0.5)
    task.schedule = schedule
    program = task.draw(500, 12, 3, np.random.default_rng(18), schedule)
    certain = np.arange(12) < 3
    assert (program.probability == np.where(certain, 1, 0.5)).all()
    cycle = program.commands[:, 3:]
    moved = cycle[:, 0] != np.arange(3)
    assert (cycle == cycle[:, :1]).all() and len(np.unique(moved, axis=0)) == 3
    assert (moved.sum(-1) == 2).all() and (program.asked == moved.argmax(1)[:, None]).all()

    assert program.executed[:, certain].all()
    assert abs(program.executed[:, 3:-1].mean() - share) <= 6 * share / 4000**0.5
    assert abs(program.executed[:, -1].mean() - last) <= 6 * last / 500**0.5
    best = task.test_batch(500, 12, 3, np.random.default_rng(18)).best
    assert (best == task.best_predictions(program)).all()
    assert (best[:, 1:] == best[:, 1:2]).all() and ((best[:, 1:] == 0.5).sum(-1) == 2).all()
    assert task.training_batch(500, 12, 1, np.random.default_rng(18)).best.max() == 1


@pytest.mark.parametrize("repetitions, share", [("honest", 0), ("half", 0.5), ("forced", 1)])
def test_a_quarter_of_the_batches_of_sparse_stages_are_repetitions(repetitions, share):
    """None of the others. Of the repetitions none, half or all are forced; those have 1 to 6 cycles
    equally often, and an honest one; honest ones always have 6. None of them counts for a stage."""
    task, rng = task_of(cycles=6, repetitions=repetitions), np.random.default_rng(5)
    made = [task.training_batch(1, 16, 4, rng) for _ in range(200)]
    counts = np.array([batch.reveals.sum() for batch in made])  # random: 4, honest: 7, forced: 1
    assert set(counts) <= {1, 4, 7}
    assert [batch.best is None for batch in made] == (counts != 4).tolist()
    assert abs(np.mean(counts != 4) - 0.25) < 6 * (0.25 * 0.75 / 200)**0.5
    repeated = counts[counts != 4]
    assert abs(np.mean(repeated == 1) - share) <= 6 * 0.5 / len(repeated)**0.5 * (share == 0.5)

    tokens = {made[i].inputs.shape[1] for i in np.flatnonzero(counts == 1)}
    possible = [task.draw(1, 2 + cycles, 1, rng, "forced") for cycles in range(1, 7)]
    assert not share or tokens == {task.batch_of(one).inputs.shape[1] for one in possible}
    assert {task.training_batch(2, 8, 1, rng).reveals.sum() for _ in range(20)} == {16}


def test_only_the_last_reveal_of_a_forced_repetition_counts_in_the_loss():
    """There the coin is honest. All tokens but the forced reveals count as ever."""
    task = task_of(cycles=3)
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


@pytest.mark.parametrize("schedule", ["adversarial", "honest"])
def test_a_hand_built_head_keeps_the_belief_about_a_pair_for_500_cycles(schedule):
    """Ahead of each reveal it reads [1/2, 1/2, 0], the filter's own prediction, whatever was shown
    before. After a reveal it reads 1 for the value shown, and 1/2 for the other of the pair."""
    task = task_of()
    program = task.draw(1, 1 + 500, 1, np.random.default_rng(7), schedule)
    x = program.asked[0, 0]
    y = program.commands[0, 1, x]
    start = torch.from_numpy(program.commands[0, 0])  # the state after the certain command
    shown = torch.from_numpy(task.program_answers(program)[0, 1:])

    ahead, after = hold_pair(shown, start, x, y)
    best = torch.from_numpy(task.best_predictions(program)[0, 1:])
    assert (ahead - best).abs().max() < 1e-10
    assert sorted(best[-1].tolist()) == [0, 0.5, 0.5]
    assert (after - best.scatter(1, shown.unsqueeze(1), 1.0)).abs().max() < 1e-10


def test_each_column_reads_the_test_of_its_schedule():
    """A uniform guess of one of three values is log 3 - log 2 nats from a pair, at each cycle."""
    guessed = adversary.guess()
    for title in ("cycle 64", "cycle 256", "honest 64"):
        assert abs(nats(guessed, *COLUMNS[title]) - np.log(3 / 2)) < 1e-12
    assert np.log(3 / 2) < nats(guessed, *COLUMNS["(16,4)"]) < np.log(3)

    task = task_of()
    tests = [("random", (4, 2), 20), ("adversarial", (7, 1), 3), ("honest", (5, 1), 3)]
    results = measure(LinRNN(len(task.vocab), d_model=8, heads=2), task, tests)
    for row, (schedule, (length, spacing), _) in zip(results, tests):
        assert row["schedule"] == schedule and len(row["kl_by_position"]) == length // spacing
        assert (row["guess"] > 0.8) == (schedule == "random")


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
