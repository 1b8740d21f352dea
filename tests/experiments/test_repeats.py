"""A loop is misread after the round with a wrong answer; what is left of a state is read off."""

import re

import numpy as np
import pytest
import torch
from machine import SwapMachine

from data import Group, ReplTask, generator
from experiments import records, repeats
from experiments.inside import LinearImage, collect_states
from experiments.repeats import drift, first_misread, law, loops_of, repeated_programs, slope

HEADS = [(0, 0)]  # of a SwapMachine


class Forgetful(SwapMachine):
    """From the end of its line number `last` on it holds nothing."""

    def __init__(self, group, last):
        super().__init__(group)
        self.last = last

    def stream(self, tokens, state=None):
        inner, lines = state or (None, -self.n)  # the first n lines set the values
        logits, inner = super().stream(tokens, inner)
        lines += (tokens[0] == self.task.vocab.index("\n")).sum().item()
        if lines >= self.last:
            inner[0] = torch.zeros_like(inner[0])
        return logits, (inner, lines)


def test_the_head_built_by_hand_misreads_no_line_of_a_thousand():
    """Asked after each of 30 lines, and after each tenth of 1,000. A question that the model
    remembered would be part of its next line."""
    machine = SwapMachine("S3")
    loops = loops_of(machine.task, 1)
    assert loops.tolist() == Group("S3").elements[:, None].tolist()
    assert (first_misread(machine, machine.task, loops, 30) == 31).all()
    assert (first_misread(machine, machine.task, loops.repeat(10, 1), 1000) == 1001).all()


@pytest.mark.parametrize("last, lines, most, found", [
    (1, 1, 64, 1), (7, 1, 64, 7), (7, 2, 64, 8), (7, 5, 64, 10), (7, 1, 7, 7), (7, 1, 6, 7),
    (7, 4, 7, 8)])
def test_a_model_that_forgets_is_misread_in_the_round_in_which_it_does(last, lines, most, found):
    """At once, or later. A round that would end after the most lines is not read."""
    machine = Forgetful("S3", last)
    loops = loops_of(machine.task, lines)
    assert (first_misread(machine, machine.task, loops, most) == found).all()


def test_one_misread_variable_is_enough_and_each_loop_has_its_own_number():
    """A machine that exchanges two values in every line but `a, b, c = a, b, c` of three."""
    class Wrong(SwapMachine):
        def execute(self, commands, S):
            moves = (commands != torch.arange(3)).any(-1)
            return torch.where(moves[:, None, None, None], S, super().execute(commands, S))

    machine = Wrong("S3")
    assert first_misread(machine, machine.task, loops_of(machine.task, 1), 9).tolist() == [
        10, 1, 1, 1, 1, 1]


def test_loops_are_programs_of_the_group():
    """Each command alone where the group is small; else 120 loops, the same in every call."""
    for task, lines, shape in [(ReplTask(Group("S5")), 1, (120, 1, 5)),
                               (ReplTask(Group("S5"), "swap"), 1, (10, 1, 5)),
                               (ReplTask(Group("S12")), 1, (120, 1, 12)),
                               (ReplTask(Group("S5")), 3, (120, 3, 5))]:
        loops = loops_of(task, lines)
        assert loops.shape == shape and (loops == loops_of(task, lines)).all()
        assert (np.sort(loops) == np.arange(shape[-1])).all()


def test_programs_of_one_line_have_each_line_once_and_are_right_on_the_head_built_by_hand(
        monkeypatch):
    machine = SwapMachine("S3")
    row = repeated_programs(machine, machine.task, 8, 4)
    assert row["reveals"] == 6 * 2 and row["all"] == row["perfect"] == 1

    read = []
    monkeypatch.setattr(repeats, "predict", lambda _, inputs: read.append(inputs) or inputs)
    repeated_programs(machine, machine.task, 8, 4)
    lines = [re.findall("a, b, c = .*", machine.task.decode(row)) for row in read[0]]
    assert all(len(text) == 8 and len({*text}) == 1 for text in lines)
    assert len({text[0] for text in lines}) == 6


def test_the_length_that_is_left_and_the_error_are_told_apart(monkeypatch):
    """A head that loses a tenth of its length with each command: alpha = 0.9^t, and E = 0. With a
    small turn towards another permutation P', so that it holds P + 0.1 P', E is read, too."""
    class Shrinking(SwapMachine):
        def execute(self, commands, S):
            return 0.9 * super().execute(commands, S)

    exact, shrinking = SwapMachine("S4"), Shrinking("S4")
    states, perms = collect_states(exact, exact.task, HEADS, 64, 4, generator(0, "valid"))
    image = LinearImage(HEADS, states, perms)
    commands = Group("S4").draw((5, 9), generator(0, "test"))
    alpha, E = drift(shrinking, exact.task, image, commands)
    assert alpha.shape == E.shape == (5, 8) and E.max() < 1e-10
    assert np.abs(alpha - 0.9 ** np.arange(1, 9)).max() < 1e-10

    # An exchange of a and b, of which a tenth is left behind: S = 0.9 P + 0.1.
    held = 0.9 * torch.eye(4)[[1, 0, 2, 3]] + 0.1 * torch.eye(4)
    held = torch.cat([held, torch.zeros(4, 4)]).double()
    monkeypatch.setattr(repeats, "settled_states", lambda *_: held.view(1, 1, 1, 8, 4))
    swap = np.array([[[1, 0, 2, 3], [0, 1, 2, 3]]])
    alpha, E = drift(exact, exact.task, image, swap)
    P = np.eye(4)[[1, 0, 2, 3]] - 0.25
    read = held[:4].numpy() - 0.25
    expected = (read * P).sum() / (P * P).sum()
    assert alpha.item() == pytest.approx(expected)
    assert E.item() == pytest.approx(np.abs(read / expected - P).max())


def test_the_errors_of_equal_lines_add_up_sooner_than_those_of_fresh_ones():
    """In a noisy head; and the exponent is that of a power."""
    machine = SwapMachine("S4", 0.01)
    fresh, same = [slope(row["error"], 40) for row in law(machine, machine.task, HEADS, 40)]
    assert fresh < 0.7 < same
    assert abs(slope(3 * np.arange(1, 65) ** 0.5) - 0.5) < 1e-10


def test_a_run_of_ones_own_is_measured_and_every_cell_has_its_record(small_run, capsys):
    """The six lines of S3, and 120 loops of 2, 3 and 5: an untrained model misreads nearly all."""
    repeats.main([str(small_run)])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-4:]]
    assert [row[:2] for row in rows] == [["1", "6"], ["2", "120"], ["3", "120"], ["5", "120"]]
    assert all(int(row[-1]) > 0.8 * int(row[1]) for row in rows)

    for name, cells in [("default", repeats.DEFAULT_CELLS), ("repeats", repeats.OLD_CELLS)]:
        for cell in cells:
            row, = records(name, **cell)
            assert len(repeats.part(row, loop=1)["first"]) == 120
