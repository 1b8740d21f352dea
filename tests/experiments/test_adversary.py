"""Repetitions are real programs with an exact filter; what counts in training; the hand-built head;
the study and its table."""

import numpy as np
import pytest
import torch
from test_beliefs import check_traces

import experiments
from data import Group, UserError
from experiments import adversary
from experiments.adversary import (IGNORED, KEPT, RepetitionTask, cells, column_of, count_read_off,
                                   hold_pair, make_cell, only_last_reveal)
from models import LSTM, LinRNN
from train import Recipe, next_token_loss, to_tensors


def task_of(group="S3", **options):
    return RepetitionTask(Group(group), "swap", **options)


# --- The traces -----------------------------------------------------------------------------------

@pytest.mark.parametrize("schedule", ["honest", "against", "forced"])
def test_a_repetition_is_a_python_session_with_an_exact_filter(schedule, monkeypatch):
    task = task_of("S4", uncertain=0.75)
    check_traces(task, task.draw(3, 5, 1, np.random.default_rng(2), schedule), monkeypatch)


def test_coins_fall_as_the_schedule_says():
    """Honest coins fall half of the time; forced ones never, but for the last, which is honest;
    those of `against` always on their less likely side, and nothing else differs from `random`."""
    task = task_of(uncertain=0.5)
    honest = task.draw(500, 9, 1, np.random.default_rng(4), "honest")
    assert honest.executed[:, 0].all()
    assert abs(honest.executed[:, 1:].mean() - 0.5) < 6 * 0.5 / 4000**0.5

    forced = task.draw(500, 9, 1, np.random.default_rng(4), "forced")
    assert forced.executed[:, 0].all() and not forced.executed[:, 1:-1].any()
    assert abs(forced.executed[:, -1].mean() - 0.5) < 6 * 0.5 / 500**0.5

    usual = task.draw(500, 8, 2, np.random.default_rng(5))
    against = task.draw(500, 8, 2, np.random.default_rng(5), "against")
    p = against.probability
    assert (p == usual.probability).all()
    assert against.executed[p == 0.25].all() and not against.executed[p == 0.75].any()
    same = (p == 0.5) | (p == 1)
    assert (against.executed[same] == usual.executed[same]).all()


# --- What training shows --------------------------------------------------------------------------

def test_other_repetitions_are_refused():
    with pytest.raises(UserError, match="honest, forced or half"):
        RepetitionTask(Group("S3"), "swap", repetitions="honset")


@pytest.mark.parametrize("repetitions, share", [("honest", 0), ("half", 0.5), ("forced", 1)])
def test_a_quarter_of_the_batches_of_sparse_stages_are_repetitions(repetitions, share):
    """None of the others. Of the repetitions none, half or all are forced; those have 1 to 6 cycles
    equally often, and an honest one; honest ones always have 6."""
    task, rng = task_of(cycles=6, repetitions=repetitions), np.random.default_rng(5)
    made = [task.training_batch(1, 16, 4, rng) for _ in range(400)]
    counts = np.array([batch.reveals.sum() for batch in made])  # random: 4, honest: 7, forced: 1
    assert set(counts) <= {1, 4, 7}
    assert abs(np.mean(counts != 4) - 0.25) < 6 * (0.25 * 0.75 / 400)**0.5
    repeated = counts[counts != 4]
    assert abs(np.mean(repeated == 1) - share) <= 6 * 0.5 / len(repeated)**0.5 * (share == 0.5)

    lengths = np.array([batch.inputs.shape[1] for batch in made])[counts == 1]
    shown = np.unique((lengths - lengths.min()) // 22) if share else np.arange(6)
    assert shown.tolist() == [0, 1, 2, 3, 4, 5]  # a cycle has 22 tokens
    assert {task.training_batch(2, 8, 1, rng).reveals.sum() for _ in range(20)} == {16}


def test_only_the_last_reveal_of_a_forced_repetition_counts_in_the_loss():
    """There the coin is honest. Other values at the forced reveals leave both losses as they are:
    the target is IGNORED. All other tokens count as ever."""
    task = task_of(cycles=3)
    traces = task.batch_of(task.draw(5, 5, 1, np.random.default_rng(6), "forced"))
    batch = only_last_reveal(traces)
    places = traces.reveals[0].nonzero()[0]
    kept = np.delete(np.arange(batch.targets.shape[1]), places[:-1])
    assert batch.reveals.sum() == 5 and batch.reveals[:, places[-1]].all()
    assert (batch.targets[:, places[:-1]] == IGNORED).all()
    assert (batch.best[:, 0] == traces.best[:, -1]).all()

    model = LinRNN(len(task.vocab), d_model=8, heads=2).double()
    objective, metrics = next_token_loss(model, to_tensors(batch, "cpu"), Recipe())
    log_q = model(torch.from_numpy(traces.inputs)).log_softmax(-1)
    losses = -log_q.gather(2, torch.from_numpy(traces.targets).unsqueeze(2)).squeeze(2)
    last = losses[:, places[-1]].mean()
    assert abs(metrics["reveal_loss"] - last.item()) < 1e-10
    assert (objective - losses[:, kept].sum() / losses.numel() - last).abs() < 1e-10


# --- A linear recurrence can keep a belief, and a probe shows little ------------------------------

@pytest.mark.parametrize("schedule", ["adversarial", "honest"])
def test_a_hand_built_head_keeps_the_belief_about_a_pair_for_4096_cycles(schedule):
    """Ahead of each reveal it reads [1/2, 1/2, 0], the filter's own prediction, whatever was shown
    before. After a reveal it reads 1 for the value shown, and 1/2 for the other of the pair."""
    task = task_of()
    program = task.draw(1, 1 + 4096, 1, np.random.default_rng(7), schedule)
    x = program.asked[0, 0]
    y = program.commands[0, 1, x]
    start = torch.from_numpy(program.commands[0, 0])  # the state after the certain command
    shown = torch.from_numpy(task.program_answers(program)[0, 1:])

    ahead, after = hold_pair(shown, start, x, y)
    best = torch.from_numpy(task.best_predictions(program)[0, 1:])
    assert (ahead - best).abs().max() < 1e-10
    assert sorted(best[-1].tolist()) == [0, 0.5, 0.5]
    assert (after - best.scatter(1, shown.unsqueeze(1), 1.0)).abs().max() < 1e-10


def test_the_number_of_the_cycle_can_be_read_off_a_linear_rnn_that_was_never_trained():
    """So reading it off a trained one, R^2 = 1.000, is no evidence that training made a counter."""
    task = task_of()
    for model_class, low, high in [(LinRNN, 0.99, 1), (LSTM, 0, 0.9)]:
        model = model_class(len(task.vocab), **task.model_options)
        assert low < count_read_off(model, task, cycles=24) < high


# --- The study ------------------------------------------------------------------------------------

def test_a_cell_is_trained_recorded_and_not_made_again(tmp_path, monkeypatch, capsys):
    """The row has each test; the table shows it; a second call trains nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    monkeypatch.setattr(adversary, "CURRICULUM", [(2, 1), (4, 2)])
    monkeypatch.setattr(adversary, "ARMS", {"linrnn": (LinRNN, {"d_model": 8, "heads": 2})})
    monkeypatch.setattr(adversary, "RECIPE", {"advance": -1.0, "batch": 2, "average": False})
    monkeypatch.setattr(adversary, "TESTS", [
        ("random", [(4, 2)], 20), ("adversarial", [(65, 1)], 3), ("against", [(4, 2)], 20)])
    cell = cells()[0] | {"last_steps": 3, "cycles": 2, "repetitions": "half"}
    make_cell(cell)
    make_cell(cell)
    row, = experiments.records("adversary")
    assert cell.items() <= row.items()
    assert row["finished"]
    assert column_of(row, "random", None) != column_of(row, "against", None)
    by_cycle = row["results"]["adversarial"][0]["kl_by_position"]
    assert column_of(row, "adversarial", 16) == by_cycle[16]
    assert column_of(row, "adversarial", 256) is None

    capsys.readouterr()
    adversary.main([])
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last[:6] == ["S3", "0.25", "3", "half", "2", "linrnn"]


def test_the_finding_says_what_is_recorded():
    """k of n runs keep the belief to cycle 64, and whom the last sentence rests on."""
    def kept(arm, repetitions, longest, seeds=range(15), cycle=64, group="S3"):
        cell = adversary.USUAL | {"arm": arm, "repetitions": repetitions, "group": group}
        found = []
        for row in experiments.records("adversary", **cell):
            if row["cycles"] in longest and row["seed"] in seeds:
                found.append(column_of(row, "adversarial", cycle) <= KEPT)
        return sum(found), len(found)

    assert kept("linrnn", "honest", [1, 4, 16, 32, 64]) == (0, 23)
    assert kept("lstm", "honest", [32]) == (5, 5)
    new = range(10, 15)  # after other seeds had set the question
    forced = kept("linrnn", "forced", [32], new)
    half = kept("linrnn", "half", [16, 32, 64], new)
    assert (forced[0] + half[0], forced[1] + half[1]) == (15, 16)
    assert kept("linrnn", "half", [4], new) == (0, 3)
    assert kept("linrnn", "half", [64], new, cycle=256) == (3, 3)
    for arm, group in [("linrnn-beta1", "S3"), ("linrnn-1-head", "S3"), ("linrnn-1-head", "S4")]:
        assert kept(arm, "half", [32], new, group=group) == (3, 3)
