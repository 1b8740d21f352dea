"""What a model knows after a trace is measured, and the law by which errors grow."""

import numpy as np
import pytest
import torch
from machine import SwapMachine

from data import Group, ReplTask, generator
from experiments import drift, reading
from experiments.drift import errors, exponent
from experiments.inside import fit_image
from experiments.reading import correct_after, first_values, repeat


def rng(seed):
    return generator(seed, "test")


class Forgetful(SwapMachine):
    """Holds nothing from the end of line number `last` after the first lines on."""

    def __init__(self, group, last, **options):
        super().__init__(group, **options)
        self.last = last

    def stream(self, tokens, state=None):
        inner, lines = state or (None, -self.n)  # the first n lines set the values
        logits, inner = super().stream(tokens, inner)
        lines += (tokens[0] == self.task.ids["\n"]).sum().item()
        if lines >= self.last:
            inner[0] = torch.zeros_like(inner[0])
        return logits, (inner, lines)


# --- What a model knows ---------------------------------------------------------------------------

@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_loop_repeats_its_commands_and_ends_in_the_middle_of_a_round(length):
    drawn = Group("S3").draw((20, length), rng(0))
    loops = repeat(drawn, 7)
    assert loops.shape == (20, 7, 3) and (loops[:, :length] == drawn).all()
    assert (loops[:, length:] == loops[:, :-length]).all()


def test_first_values_are_all_triples(monkeypatch):
    monkeypatch.setattr(reading, "correct_after",
                        lambda model, task, commands, values, state: values)
    machine = SwapMachine("S3")
    drawn = first_values(machine, machine.task, Group("S3").draw((240, 4), rng(1)), rng(0))
    assert len(np.unique(drawn, axis=0)) == 27


def test_who_joins_late_has_read_the_values_of_half_of_the_reveals():
    """Without the first lines: a machine that reads no value is right where it holds the value by
    chance. The first half does not count: with one reveal in it, most values are not known."""
    drawn = Group("S3").draw((300, 48), rng(3))
    for believes, length, least, most in [(True, 48, 0.99, 1), (False, 48, 0.2, 0.5),
                                          (True, 2, 0.4, 0.7)]:
        machine = SwapMachine("S3", believes=believes)
        found = drift.join_late(machine, machine.task, drawn[:, :length], rng(0))
        assert least <= found <= most


RECENT = {"repeats 8", "false reveals", "joined late"}


@pytest.mark.parametrize("believes, last, correct", [
    (True, 129, RECENT | {"literal 8", "loop 1", "loop 10"}), (True, 128, RECENT | {"literal 8"}),
    (True, 32 + 1 + 4, RECENT), (True, 4, {"joined late"}),
    (False, 1000, {"loop 1", "loop 10"})])  # it counts on 1, 2, 3, and reads no value
def test_a_record_says_what_a_model_knows(believes, last, correct, monkeypatch):
    """A machine that forgets in this line after the first ones. All else is a guess."""
    def whole_traces(model, task, commands, *state):
        if commands.shape[1] == 256:
            return np.array([[True, True], [True, False]])
        return correct_after(model, task, commands, *state)

    monkeypatch.setattr(drift, "TESTS", [(4, 2)])
    monkeypatch.setattr(drift, "correct_after", whole_traces)
    monkeypatch.setattr(drift, "law", lambda model, task, given: {
        kind: (x == x[:, :1]).all() for kind, x in given.items()})
    machine = Forgetful("S3", last, believes=believes)
    found = drift.measure(machine, machine.task)
    for name, value in {"(4,2)": 1, "law": {"random": False, "repeated": True},
                        "whole": 0.5}.items():
        assert found.pop(name) == value
    known = {name for name, accuracy in found.items() if accuracy > 0.97}
    assert known == correct and all(found[name] <= 0.5 for name in found.keys() - known)
    assert believes or found["literal 8"] == 0  # it is another value than before


# --- The law --------------------------------------------------------------------------------------

@pytest.mark.parametrize("left_behind", [0.1, -0.1])
def test_the_error_of_a_state_is_its_largest_entry_beside_the_permutation(left_behind):
    """By hand, for a head that keeps 0.9 of the values and leaves a part of them behind."""
    class Leaving(SwapMachine):
        def execute(self, commands, S):
            return 0.9 * super().execute(commands, S) + left_behind * S

    task = ReplTask(Group("S4"))
    image, _ = fit_image(SwapMachine("S4", believes=True), task)
    E = errors(Leaving("S4"), task, image, np.array([[[1, 0, 2, 3]]]))
    P = np.eye(4)[[1, 0, 2, 3]] - 0.25
    seen = 0.9 * P + left_behind * (np.eye(4) - 0.25)
    scale = (seen * P).sum() / (P * P).sum()
    assert E.item() == pytest.approx(np.abs(seen / scale - P).max())


def test_errors_of_a_repeated_command_grow_faster():
    """The law is the median over the traces."""
    machine = SwapMachine("S4", 0.01)
    drawn = Group("S4").draw((60, 32), rng(0))
    commands = {"random": drawn, "repeated": repeat(drawn[:, :1], 32)}
    found = drift.law(machine, machine.task, commands)
    assert exponent(found["random"], 32) < 0.7 < exponent(found["repeated"], 32)
    image, _ = fit_image(machine, machine.task, random_values=False)
    assert np.allclose(found["random"], np.median(errors(machine, machine.task, image, drawn), 0))


# --- The tables -----------------------------------------------------------------------------------

def test_the_tables_have_a_line_for_the_records_and_for_your_own_run(small_run, capsys,
                                                                     monkeypatch):
    row = dict.fromkeys([*drift.READS.values(), *drift.DRIFTS.values()], 0.5)
    row["law"] = {"random": np.arange(1.0, 65) ** 2, "repeated": np.arange(1.0, 65)}
    drift.show([{"part": "all", **row}, {"part": "all", **row, "loop 1": 0.75}])
    monkeypatch.setattr(drift, "measure", lambda model, task: row)
    drift.main([str(small_run)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "  " in line]
    assert lines[1::2] == [["all", *["50.0"] * 4],
                           ["all", "50.0-75.0", *["50.0"] * 5, "2.0", "1.0"],
                           ["your", "run", *["50.0"] * 4],
                           ["your", "run", *["50.0"] * 6, "2.0", "1.0"]]
