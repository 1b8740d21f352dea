"""A loop is misread after the round with a wrong answer; what is left of a state is measured."""

import re
from itertools import product

import numpy as np
import pytest
import torch
import train as trainer
from machine import SwapMachine

from data import Group, ReplTask, generator
from experiments import drift
from experiments.drift import (believed, draw_batch, errors, join_late, loops_of, right_after,
                               whole_states)
from experiments.inside import LinearImage, collect_states
from train import Config, Progress

HEADS = [(0, 0)]  # of a SwapMachine


class Forgetful(SwapMachine):
    """Holds nothing from the end of line number `last` after the first lines on."""

    def __init__(self, group, last):
        super().__init__(group)
        self.last = last

    def stream(self, tokens, state=None):
        inner, lines = state or (None, -self.n)  # the first n lines set the values
        logits, inner = super().stream(tokens, inner)
        lines += (tokens[0] == self.task.ids["\n"]).sum().item()
        if lines >= self.last:
            inner[0] = torch.zeros_like(inner[0])
        return logits, (inner, lines)


# --- Loops ----------------------------------------------------------------------------------------

def test_loops_are_commands_of_the_group_and_an_inverse_undoes():
    for task in (ReplTask(Group("S5")), ReplTask(Group("S5"), "swap"), ReplTask(Group("Z7"))):
        loops = loops_of(task)
        assert task.commands == "swap" or (loops["repeated"][:, 0] == task.group.elements).all()
        for kind, length in zip(drift.LOOPS, (1, 2, 2, 5, 10)):
            assert loops[kind].shape[1:] == (length, task.group.degree)
            assert (loops[kind] == loops_of(task)[kind]).all()
        there, back = np.moveaxis(loops["inverse"], 1, 0)
        assert (np.take_along_axis(there, back, 1) == np.arange(task.group.degree)).all()


@pytest.mark.parametrize("kind", drift.LOOPS)
def test_a_loop_ends_after_just_so_many_commands(kind):
    """Also in the middle of a round. The machine forgets in command 7."""
    machine = Forgetful("S3", 7)
    loops = loops_of(machine.task)[kind]
    assert [right_after(machine, machine.task, loops, length) for length in (6, 7)] == [1, 0]


class Still(SwapMachine):
    """Moves nothing."""

    def execute(self, commands, S):
        return S


def test_the_values_of_a_loop_are_counted_one_by_one():
    """Five swaps of a and b leave one value of three where it was, four leave all."""
    machine = Still("S3")
    swap = np.array([[[1, 0, 2]]])
    assert [right_after(machine, machine.task, swap, length) for length in (5, 4)] == [1 / 3, 1]


# --- Reveals --------------------------------------------------------------------------------------

def test_a_state_is_whole_only_if_all_variables_are_read_correctly():
    """The machine that forgets in its last line is right about none of 6 states, and before that
    about all of them. A reveal after each of eight commands makes 24 lines."""
    for last, reveals, share in [(8, False, 0), (9, False, 1), (24, True, 0), (25, True, 1)]:
        machine = Forgetful("S3", last)
        assert whole_states(machine, machine.task, reveals, 8, 6) == share
    # Who moves nothing is right in some variable after 4 of the 6 commands of S3, in all after one.
    assert 0 < whole_states(Still("S3"), ReplTask(Group("S3")), False, 1) < 0.4


def test_a_false_reveal_is_believed_by_a_model_that_writes_it_and_by_no_other():
    for believes in (False, True):
        machine = SwapMachine("S4", believes=believes)
        assert believed(machine, machine.task, 3, 5) == believes


def test_who_joins_late_guesses_until_reveals_have_told_it_the_values():
    """A machine that counts on the first values 1 2 3 guesses to the end, unless it believes."""
    for believes, later in [(False, 1 / 3), (True, 1)]:
        machine = SwapMachine("S3", believes=believes)
        found = join_late(machine, machine.task, traces=60)
        assert abs(found[0] - 1 / 3) < 0.2 and abs(found[20:].mean() - later) < 0.05


def test_dense_reveals_and_late_joins_are_told_apart():
    """With both, the batches are those of train.py, to the bit. Without one of them, as many do not
    count, but they keep the spacing of their stage, or their first lines."""
    task = ReplTask(Group("S3"))
    config = Config(curriculum=[(2, 1), (16, 8)], batch=2)
    for step, stage in product(range(60), (0, 1)):
        now = Progress(stage=stage)
        usual, usually = trainer.draw(task, config, now, generator(1, "train", step))
        for dense, late in drift.RECIPES.values():
            batch, counts = draw_batch(task, config, now, generator(1, "train", step), dense, late)
            assert counts == usually
            if counts or (dense and late):
                assert np.array_equal(batch.inputs, usual.inputs)
            if not counts:
                assert (batch.reveals.sum() > 2 * 16 / 8) == dense
                assert task.decode(batch.inputs[0]).startswith(task.start_lines()) != late


# --- The law --------------------------------------------------------------------------------------

def image_of_machine(group):
    exact = SwapMachine(group)
    states, perms = collect_states(exact, exact.task, HEADS, 64, 4, generator(0, "valid"))
    return LinearImage(HEADS, states, perms)


def test_the_scale_and_the_error_of_a_state_are_told_apart():
    """A head that loses a tenth with each command has scale 0.9^t and E = 0. One that leaves a
    tenth of the values behind has an E, by hand."""
    class Leaving(SwapMachine):
        left = 0.1

        def execute(self, commands, S):
            return 0.9 * super().execute(commands, S) + self.left * S

    class Shrinking(Leaving):
        left = 0

    task = ReplTask(Group("S4"))
    image = image_of_machine("S4")
    commands = Group("S4").draw((5, 8), generator(0, "test"))
    for asked in (None, np.zeros((5, 8), int)):
        scale, E = errors(Shrinking("S4"), task, image, commands, asked)
        assert scale.shape == E.shape == (5, 8) and E.max() < 1e-10
        assert np.abs(scale - 0.9 ** np.arange(1, 9)).max() < 1e-10

    swap = np.array([[[1, 0, 2, 3]]])
    scale, E = errors(Leaving("S4"), task, image, swap)
    P = np.eye(4)[[1, 0, 2, 3]] - 0.25
    seen = 0.9 * P + 0.1 * (np.eye(4) - 0.25)
    expected = (seen * P).sum() / (P * P).sum()
    assert scale.item() == pytest.approx(expected)
    assert E.item() == pytest.approx(np.abs(seen / expected - P).max())


def test_errors_grow_fastest_if_a_command_repeats_and_slowest_if_reveals_are_written():
    machine = SwapMachine("S4", 0.01, believes=True)
    found = drift.law(machine, machine.task, HEADS, 32)
    random, repeated, revealed = [drift.slope(found[kind]["error"], 32) for kind in drift.KINDS]
    assert random < 0.7 < repeated
    assert revealed < random - 0.1  # each reveal renews a row
    assert abs(drift.slope(3 * np.arange(1, 65) ** 0.5) - 0.5) < 1e-10


def test_your_own_run_is_measured(small_run, capsys, monkeypatch):
    """No head of an untrained model tracks, so it has no law."""
    monkeypatch.setattr(drift, "TESTS", [(4, 2)])
    for slow in ("whole_states", "right_after"):
        monkeypatch.setattr(drift, slow, lambda *_: 0.5)
    drift.main([str(small_run)])
    out = capsys.readouterr().out
    assert "(4,2)" in out and re.search(r"your run(?: +50.0){5}\n", out)
