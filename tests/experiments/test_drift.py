"""What a model knows after a trace is measured, and the law by which errors grow."""

import itertools
import re
from dataclasses import asdict

import numpy as np
import pytest
import torch
import train as trainer
from machine import SwapMachine

from data import Group, ReplTask, generator
from eval import make
from experiments import drift
from experiments.drift import (Recipe, correct_after, errors, exponent, first_values, join_late,
                               repeat, told_values)
from experiments.inside import LinearImage, collect_states, fit_image
from experiments.reading import read
from train import Config, Progress

HEADS = [(0, 0)]  # of a SwapMachine


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
def test_a_loop_repeats_its_commands_and_ends_after_just_so_many(length):
    """Also in the middle of a round. The machine forgets in command 7."""
    machine = Forgetful("S3", 7)
    drawn = machine.task.group.draw((20, length), rng(0))
    for total, known in ((6, True), (7, False)):
        loops = repeat(drawn, total)
        assert loops.shape == (20, total, 3) and (loops[:, :length] == drawn).all()
        assert (loops[:, length:] == loops[:, :-length]).all()
        assert (correct_after(machine, machine.task, loops) == known).all()


@pytest.mark.parametrize("kind, number", [("orders", 6), ("repeats", 27)])
def test_first_values_are_any_and_known_to_who_reads_them(kind, number, monkeypatch):
    """All orders of 1, 2, 3, or all triples. A machine that forgets tells how many commands."""
    heard = []
    monkeypatch.setattr(drift, "read", lambda model, task, texts, *state: (
        heard.append([*texts]) or read(model, task, heard[-1], *state)))
    commands = Group("S3").draw((240, 4), rng(1))
    for last, known in [(0, [0, 0]), (4, [1, 0]), (5, [1, 1])]:
        machine = Forgetful("S3", last, believes=True)
        assert first_values(machine, machine.task, kind, commands, rng(0)) == known
    assert len({*heard[0]}) == number
    blind = first_values(SwapMachine("S3"), machine.task, kind, commands, rng(0))
    assert all(abs(accuracy - 1 / 3) < 0.1 for accuracy in blind)


@pytest.mark.parametrize("line", ["literal_line", "reveal_lines"])
def test_a_value_that_was_told_is_followed_wherever_commands_bring_it(line):
    """One machine writes it, the other keeps the old value; both know all others."""
    before, after = [Group("S4").draw((20, length), rng(2)) for length in (5, 3)]
    for believes in (True, False):
        machine = SwapMachine("S4", believes=believes)
        found = told_values(machine, machine.task, getattr(machine.task, line), before, after,
                            rng(0))
        assert found == [(believes, 1), (believes, 1)]


def test_who_joins_late_guesses_until_reveals_have_told_it_the_values():
    """A machine that counts on the first values 1 2 3 guesses to the end, unless it believes."""
    commands = Group("S3").draw((60, 48), rng(3))
    for believes, later in [(False, 1 / 3), (True, 1)]:
        machine = SwapMachine("S3", believes=believes)
        found = join_late(machine, machine.task, commands, rng(0))
        assert abs(found[0] - 1 / 3) < 0.2 and abs(found[20:].mean() - later) < 0.05


def test_a_recipe_lacks_one_part_of_the_dense_batches():
    """By default they are those of train.py, to the bit. The others are dense in the same steps."""
    usual_task, _ = make(asdict(Config()))
    parts = {recipe: [set(), set(), set()] for recipe in drift.RECIPES}
    for step, stage in itertools.product(range(40), (0, 3)):
        usual, usually = trainer.draw(usual_task, Config(batch=2), Progress(stage=stage),
                                      generator(1, "train", step))
        for recipe, (dense, other, literals) in parts.items():
            task = Recipe(Group("S5"), recipe)
            batch, counts = trainer.draw(task, Config(batch=2), Progress(stage=stage),
                                         generator(1, "train", step))
            assert counts == usually
            if counts or recipe == "default":
                assert np.array_equal(batch.inputs, usual.inputs)
            if not counts:
                text = task.decode(batch.inputs[0])
                dense.add(batch.reveals[0].sum() > 32 / 4)
                other.add(not text.startswith(task.start_lines()))
                literals.add(len(re.findall(r" = \d", text)) > 5)
    some = {True, False}
    assert [*parts.values()] == [[{True}, {True}, some], [{True}, {True}, {False}],
                                 [{True}, {False}, some], [{False}, {True}, some]]


# --- The law --------------------------------------------------------------------------------------

def image_of_machine(group):
    exact = SwapMachine(group, believes=True)
    states, values = collect_states(exact, exact.task, HEADS, 64, 4, generator(0, "valid"))
    return LinearImage(HEADS, states, values)


@pytest.mark.parametrize("left_behind", [0.1, -0.1])
def test_the_error_of_a_state_is_its_largest_entry_beside_the_permutation(left_behind):
    """By hand, for a head that keeps 0.9 of the values and leaves a part of them behind."""
    class Leaving(SwapMachine):
        def execute(self, commands, S):
            return 0.9 * super().execute(commands, S) + left_behind * S

    E = errors(Leaving("S4"), ReplTask(Group("S4")), image_of_machine("S4"),
               np.array([[[1, 0, 2, 3]]]))
    P = np.eye(4)[[1, 0, 2, 3]] - 0.25
    seen = 0.9 * P + left_behind * (np.eye(4) - 0.25)
    scale = (seen * P).sum() / (P * P).sum()
    assert E.item() == pytest.approx(np.abs(seen / scale - P).max())


def test_errors_of_a_repeated_command_grow_faster():
    """The law is the median over the traces."""
    machine = SwapMachine("S4", 0.01)
    drawn = Group("S4").draw((60, 32), rng(0))
    commands = {"random": drawn, "repeated": repeat(drawn[:, :1], 32)}
    found = drift.law(machine, machine.task, commands, HEADS)
    assert exponent(found["random"], 32) < 0.7 < exponent(found["repeated"], 32)
    image, _ = fit_image(machine, machine.task, HEADS, random_values=False)
    assert np.allclose(found["random"], np.median(errors(machine, machine.task, image, drawn), 0))


def test_the_exponent_of_a_root_is_a_half():
    assert abs(exponent(3 * np.arange(1, 65) ** 0.5) - 0.5) < 1e-10


# --- The table ------------------------------------------------------------------------------------

def test_a_record_names_what_is_measured(monkeypatch):
    """A machine that counts on 1, 2, 3 and reads no value is correct wherever none is shown."""
    for name, value in {
            "TESTS": [(4, 2)], "law": lambda *_: {}, "join_late": lambda *_: np.arange(48) >= 24,
            "correct_after": lambda *_: np.array([[True, False]]),
            "told_values": lambda model, task, line, *_: [(line.__name__, 2), (3, 4)]}.items():
        monkeypatch.setattr(drift, name, value)
    machine = SwapMachine("S3")
    found = drift.measure(machine, machine.task)
    for name in ("orders 0", "orders 8", "repeats 0", "repeats 8"):
        assert abs(found.pop(name) - 1 / 3) < 0.1
    assert found == {
        "literal 0": "literal_line", "beside 0": 2, "literal 8": 3, "beside 8": 4,
        "false reveals": "reveal_lines", "joined late": 1, "whole": 0, "loop 1": 0.5, "loop 2": 0.5,
        "loop 5": 0.5, "loop 10": 0.5, "(4,2)": 1, "law": {}}


def test_the_traces_of_a_test_depend_on_its_seed(monkeypatch):
    for name, value in {
            "TESTS": [(4, 2)], "law": lambda model, task, commands: commands["random"].tolist(),
            "evaluate": lambda *given: {"all": given[-1]},
            "correct_after": lambda model, task, commands: commands > 0}.items():
        monkeypatch.setattr(drift, name, value)
    machine = SwapMachine("S3")
    first, again, other = [drift.measure(machine, machine.task, seed) for seed in (0, 0, 1)]
    assert first == again
    for name in ("orders 0", "repeats 0", "joined late", "(4,2)", "law"):
        assert first[name] != other[name]


def test_the_table_has_the_median_and_range_of_each_recipe_and_your_own_run(small_run, capsys,
                                                                            monkeypatch):
    """No head of an untrained model tracks, so it has no law."""
    monkeypatch.setattr(drift, "SHOWN", {"reads": "it reads"})
    drift.show([{"recipe": recipe, "reads": accuracy, "law": {"x": np.arange(1.0, 65) ** 2}}
                for recipe, accuracy in [("a", 0.5), ("a", 1), ("a", 0.6), ("b", 0.25)]])
    monkeypatch.setattr(drift, "measure", lambda model, task, seed: {
        "reads": 0.5 + seed / 100, "law": drift.law(model, task, {})})
    drift.main([str(small_run), "--seed", "7"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert lines[2:5] == [["correct", "a", "b"],
                          ["it", "reads", "60.0", "(50.0-100)", "25.0"],
                          ["exponent,", "x", "commands", "2.0", "2.0"]]
    assert lines[7:] == [["correct", "your", "run"], ["it", "reads", "57.0"]]
