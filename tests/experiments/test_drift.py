"""A loop is misread after the round with a wrong answer; what is left of a state is measured."""

import re

import numpy as np
import pytest
import torch
from machine import SwapMachine

from data import Group, ReplTask, generator
from experiments import drift
from experiments.drift import (believed, errors, first_misread, follow, loops_of, places_of,
                               rows_left, whole_states)
from experiments.inside import LinearImage, collect_states

HEADS = [(0, 0)]  # of a SwapMachine


class Forgetful(SwapMachine):
    """Holds nothing from the end of command number `last` on."""

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


class Trusting(SwapMachine):
    """Writes each revealed value into the row of its variable, like a reader who believes it."""

    def stream(self, tokens, state=None):
        logits, (S, line, command) = super().stream(tokens, state)
        text = [self.task.decode(row) for row in tokens.tolist()]
        for trace, lines in enumerate(text):
            last = lines.splitlines()[-1]
            if len(last) == 3 and lines.endswith("\n"):  # `b 3`
                S[trace, 0, self.task.names.index(last[0])] = torch.eye(self.n)[int(last[2]) - 1]
        return logits, [S, line, command]


@pytest.mark.parametrize("spacing", [1, 2, 6])
def test_a_model_reads_the_trace_of_these_commands_and_reveals(spacing):
    """To the letter, and it stops after each command and its reveal."""
    task = ReplTask(Group("S4"))
    commands = task.group.draw((3, 6), generator(0, "test"))
    asked = generator(1, "test").integers(4, size=(3, 6))
    places = np.arange(1, 7) % spacing == 0

    class Listener(torch.nn.Module):
        def stream(self, tokens, state=None):
            return None, [before + task.decode(row) for before, row in
                          zip(state or [""] * len(tokens), tokens.tolist())]

    texts = [*follow(Listener(), task, commands, asked, places)]
    assert texts[-1] == [*map(task.trace, commands.tolist(), asked[:, places].tolist())]
    assert [text[0].count(" = ") for text in texts] == [*range(4 + 1, 4 + 7)]


@pytest.mark.parametrize("last, kind, most, found", [
    (1, "repeated", 12, 1), (7, "repeated", 12, 7), (7, "of 2", 12, 8), (7, "of 5", 12, 10),
    (7, "inverse", 12, 8), (7, "repeated", 7, 7), (7, "repeated", 6, 7), (99, "repeated", 20, 21)])
def test_a_model_that_forgets_is_misread_in_that_round(last, kind, most, found):
    """And not before: a question that the model remembered would be part of its next line."""
    machine = Forgetful("S3", last)
    first = first_misread(machine, machine.task, loops_of(machine.task)[kind], most)
    assert (first == found).all()


def test_one_misread_variable_is_enough_and_each_loop_has_its_number():
    """A machine that errs in every command of S3 but the identity."""
    class Wrong(SwapMachine):
        def execute(self, commands, S):
            moves = (commands != torch.arange(3)).any(-1)
            return torch.where(moves[:, None, None, None], S, super().execute(commands, S))

    machine = Wrong("S3")
    loops = loops_of(machine.task)["repeated"]
    assert first_misread(machine, machine.task, loops, 9).tolist() == [10, 1, 1, 1, 1, 1]


def test_loops_are_commands_of_the_group_and_an_inverse_undoes():
    for task in (ReplTask(Group("S5")), ReplTask(Group("S5"), "swap"), ReplTask(Group("Z7"))):
        loops = loops_of(task)
        assert task.commands == "swap" or (loops["repeated"][:, 0] == task.group.elements).all()
        for kind, length in zip(drift.LOOPS, (1, 2, 2, 5)):
            assert loops[kind].shape[1:] == (length, task.group.degree)
            assert (loops[kind] == loops_of(task)[kind]).all()
        there, back = np.moveaxis(loops["inverse"], 1, 0)
        assert (np.take_along_axis(there, back, 1) == np.arange(task.group.degree)).all()


def test_reveals_are_where_their_name_says():
    assert [places_of(name).sum() for name in drift.PLACES] == [0, 16, 64, 256, 64]
    assert places_of("one in 16").nonzero()[0].tolist() == [*range(15, 256, 16)]


def test_a_state_is_whole_only_if_all_variables_are_read_correctly():
    """The machine that forgets in its last command is right about none of 6 states, and before
    that about all of them."""
    nowhere = np.zeros(8, bool)
    for machine, places, share in [
            (Forgetful("S3", 8), nowhere, 0), (Forgetful("S3", 9), nowhere, 1),
            (SwapMachine("S3"), ~nowhere, 1)]:
        assert whole_states(machine, machine.task, places, 8, 6) == share


def test_a_false_reveal_is_believed_by_a_model_that_writes_it_and_by_no_other():
    for kind, share in [(SwapMachine, 0.0), (Trusting, 1.0)]:
        machine = kind("S4")
        assert believed(machine, machine.task, 3, 5) == share


def test_a_reveal_that_is_believed_renews_its_row_and_no_other():
    """A command leaves 0.8 of all rows, and a reveal writes 1 into its row. What is read off has
    rows and columns that sum to 0, so the row gets 3/4 of that and the others 1/60 each. For a
    machine that ignores reveals nothing changes."""
    class Shrinking(Trusting):
        def execute(self, commands, S):
            return 0.8 * super().execute(commands, S)

    image = image_of_machine("S4")
    for machine, named, others in [
            (Shrinking("S4"), ["0.80", "0.95", "-0.05"], ["0.80", "0.82", "0.82"]),
            (SwapMachine("S4"), ["1.00"] * 3, ["1.00"] * 3)]:
        lines = rows_left(machine, machine.task, image, 1, 9)
        assert [[*line.values()] for line in lines] == [["named", *named], ["others", *others]]


def image_of_machine(group):
    exact = SwapMachine(group)
    states, perms = collect_states(exact, exact.task, HEADS, 64, 4, generator(0, "valid"))
    return LinearImage(HEADS, states, perms)


def test_the_norm_that_is_left_and_the_error_are_told_apart():
    """A head that loses a tenth of its norm with each command has alpha = 0.9^t and E = 0. One that
    leaves a tenth of the values behind has an E, by hand."""
    class Leaving(SwapMachine):
        left = 0.1

        def execute(self, commands, S):
            return 0.9 * super().execute(commands, S) + self.left * S

    class Shrinking(Leaving):
        left = 0

    task = ReplTask(Group("S4"))
    image = image_of_machine("S4")
    commands = Group("S4").draw((5, 8), generator(0, "test"))
    for reveals in (False, True):
        alpha, E = errors(Shrinking("S4"), task, image, commands, reveals)
        assert alpha.shape == E.shape == (5, 8) and E.max() < 1e-10
        assert np.abs(alpha - 0.9 ** np.arange(1, 9)).max() < 1e-10

    swap = np.array([[[1, 0, 2, 3]]])
    alpha, E = errors(Leaving("S4"), task, image, swap)
    P = np.eye(4)[[1, 0, 2, 3]] - 0.25
    seen = 0.9 * P + 0.1 * (np.eye(4) - 0.25)
    expected = (seen * P).sum() / (P * P).sum()
    assert alpha.item() == pytest.approx(expected)
    assert E.item() == pytest.approx(np.abs(seen / expected - P).max())


def test_errors_grow_fastest_if_a_command_repeats_and_slowest_if_reveals_are_written():
    machine = Trusting("S4", 0.01)
    rows = drift.law(machine, machine.task, HEADS, 32)
    random, repeated, revealed = [drift.slope(row["error"], 32) for row in rows]
    assert random < 0.7 < repeated
    assert revealed < random - 0.1  # each reveal renews a row
    assert abs(drift.slope(3 * np.arange(1, 65) ** 0.5) - 0.5) < 1e-10


def test_your_own_run_is_measured(small_run, capsys, monkeypatch):
    """An untrained model misreads nearly all of the six commands of S3."""
    monkeypatch.setattr(drift, "whole_states", lambda *_: 0.5)
    monkeypatch.setattr(drift, "loops_of", lambda task: {"repeated": loops_of(task)["repeated"]})
    drift.main([str(small_run)])
    out = capsys.readouterr().out
    loops, *within = re.search(r"repeated +(\d+) +(\d+) +(\d+) +(\d+)", out).groups()
    assert loops == "6" and int(within[-1]) > 3 and "no head of this model tracks" in out
