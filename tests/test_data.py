"""Groups are groups, traces are real Python. Oracle: the interpreter that runs the tests."""

import itertools
import math
import re
import zlib
from argparse import ArgumentTypeError
from functools import partial

import data
import numpy as np
import pytest
from conftest import session, typed_lines
from data import Group, ReplTask, generator
from numpy.random import default_rng


def are_uniform(drawn, kinds):
    """Whether these are so many kinds of things, each within six deviations of the mean count."""
    found, counts = np.unique(drawn, axis=0, return_counts=True)
    return len(found) == kinds and np.abs(counts - counts.mean()).max() < 6 * counts.mean()**0.5


# --- 1. Traces ------------------------------------------------------------------------------------

@pytest.mark.parametrize("draw", ["test_batch", "dense_batch"])
@pytest.mark.parametrize("name, commands", [
    *[(name, "full") for name in ("S2", "S5", "A9", "S26")], ("S2", "swap"), ("S5", "swap")])
def test_a_real_interpreter_prints_exactly_what_a_trace_shows(name, commands, draw):
    """Re-executing the typed lines of a trace gives the trace, and so does encoding and decoding.
    The targets are the inputs one later; those marked are the printed values. The number of tokens
    is that of ReplTask's docstring, and 5 for each literal."""
    task = ReplTask(Group(name), commands, literal_fraction=1)
    n = task.group.degree
    inputs, targets, reveals = getattr(task, draw)(3, 12, 4, default_rng(1))
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    T = 5 * n + 12 * (2 * n + 3 if commands == "full" else 7) + 3 * 11
    T += 3 * 5 * (draw == "dense_batch")
    assert inputs.shape == targets.shape == reveals.shape == (3, T - 1)

    for row, shown in zip(np.hstack([inputs[:, :1], targets]), reveals):
        text = task.decode(row)
        assert session(typed_lines(text)) == text
        assert task.encode(text) == row.tolist()
        printed = [line.split()[1] for line in text.splitlines() if not line.startswith(">>>")]
        assert [task.vocab[i] for i in row[1:][shown]] == printed and len(printed) == 3


@pytest.mark.parametrize("values", [None, [2, 2, 0, 1, 4]])
def test_a_trace_is_a_program_that_python_executes(values):
    """60 commands, literals and reveals in any order. The first values are 1, 2, ... or as told."""
    task, rng = ReplTask(Group("S5")), default_rng(2)
    program, lines = [], [f"{x} = {v + 1}" for x, v in zip("abcde", values or range(5))]
    for _ in range(60):
        g, (x, v) = task.group.draw((), rng), rng.integers(5, size=2)
        event, line = [
            (("command", g), "a, b, c, d, e = " + ", ".join("abcde"[i] for i in g)),
            (("literal", x, v), f"{'abcde'[x]} = {v + 1}"),
            (("reveal", x), f"print('{'abcde'[x]}', {'abcde'[x]})")][rng.integers(3)]
        program.append(event)
        lines.append(line)
    text = task.trace(program, values)
    assert typed_lines(text) == lines and session(lines) == text


def test_each_reveal_asks_any_variable_whatever_the_others_ask():
    """And each command is uniform. If one variable were never asked for, a model need not track
    it."""
    task = ReplTask(Group("S4"))
    inputs, _, reveals = task.test_batch(4000, 2, 1, default_rng(0))
    traces, positions = reveals.nonzero()
    asked = inputs[traces, positions - 1].reshape(-1, 2)  # `b` of `b 3`
    commands = inputs[:, 5 * 4 + 6:][:, :4]  # the right-hand side of the first
    assert are_uniform(asked, 16) and are_uniform(commands, 24)


def test_all_swaps_are_equally_likely_and_written_in_order():
    """`a, b = b, a`, and never `b, a = a, b`. The command that changes nothing names all."""
    task = ReplTask(Group("S4"), "swap")
    inputs, _, _ = task.test_batch(20, 300, 300, default_rng(0))
    swaps = []
    for row in inputs:
        swaps += re.findall(r">>> (\w), (\w) = (\w), (\w)\n", task.decode(row))
    assert len(swaps) == 20 * 300 and are_uniform(swaps, 6)
    assert {*swaps} == {(x, y, y, x) for x, y in itertools.combinations("abcd", 2)}
    assert task.command_line((0, 1, 2, 3)) == ">>> a, b, c, d = a, b, c, d\n"


def test_dense_traces_begin_with_any_values_and_a_fraction_of_batches_has_literals():
    """A literal gives any variable any value, at any place among the commands before a reveal."""
    firsts, literals = [], []

    class Recorder(ReplTask):
        def trace(self, program, values):
            firsts.append(values[:2])
            literals.append([(i % 4, *event[1:]) for i, event in enumerate(program)
                             if event[0] == "literal"])
            return super().trace(program, values)

    for seed in range(400):
        Recorder(Group("S4"), literal_fraction=0.25).dense_batch(2, 8, 2, default_rng(seed))
    numbers = [*map(len, literals)]
    assert numbers[::2] == numbers[1::2] and {*numbers} == {0, 4}
    assert abs(np.mean(numbers) / 4 - 0.25) < 0.13  # six deviations of 400 coins
    assert are_uniform(firsts, 4 * 4) and are_uniform(sum(literals, []), 3 * 4 * 4)


# --- 2. Groups ------------------------------------------------------------------------------------

def elements_by_rule(letter, n):
    """By loops: a permutation is an element if it is even, or if it keeps a circle's arcs."""
    for g in itertools.permutations(range(n)):  # they are in order
        inversions = sum(x > y for x, y in itertools.combinations(g, 2))
        turns = {(g[(i + 1) % n] - g[i]) % n for i in range(n)}  # of the neighbours on a circle
        if {"S": True, "A": inversions % 2 == 0, "Z": turns == {1},
                "D": turns in ({1}, {n - 1})}[letter]:
            yield g


@pytest.mark.parametrize("name", ["S2", "S5", "A3", "A5", "Z7", "D3", "D6"])
def test_a_group_lists_its_elements_in_order_and_draws_them_uniformly(name):
    group = Group(name)
    expected = [*elements_by_rule(name[0], int(name[1:]))]
    assert [*map(tuple, group.elements.tolist())] == expected
    assert group.order == len(expected) and group.chance == 1 / group.degree
    drawn = group.draw((2, 100 * group.order), default_rng(3)).reshape(-1, group.degree)
    assert are_uniform(drawn, group.order)


def test_26_variables_need_no_list_of_their_elements():
    drawn = Group("A26").draw((50,), default_rng(0))
    assert (np.sort(drawn) == np.arange(26)).all() and (np.linalg.det(np.eye(26)[drawn]) > 0).all()
    assert Group("A26").order == math.factorial(26) // 2


@pytest.mark.parametrize("collect", [np.array, iter, lambda given: {*map(tuple, given)}])
def test_permutations_make_the_group_of_their_products(collect):
    """The eight quaternions, from two of them, in whatever collection."""
    i = np.array([1, 4, 3, 6, 5, 0, 7, 2])  # times 1, i, j, k, -1, -i, -j, -k
    j = np.array([2, 7, 4, 1, 6, 3, 0, 5])
    powers = [np.arange(8), i, i[i], i[i][i]]
    group = Group("Q8", collect([i, j]))
    assert (group.order, group.degree, group.chance) == (8, 8, 1 / 8)
    assert group.elements.tolist() == sorted(g.tolist() for g in [*powers, *(p[j] for p in powers)])


# --- 3. Random streams ----------------------------------------------------------------------------

def test_a_generator_is_independent_for_each_seed_purpose_and_key():
    lengths = [(), (0,), (1,), (8, 16), (16, 8), (8, 4)]
    keys = [*itertools.product((0, 1), data.PURPOSES, lengths)]
    drawn, again = [[generator(seed, purpose, *key).integers(2**62) for seed, purpose, key in keys]
                    for _ in range(2)]
    assert drawn == again and len({*drawn}) == len(keys)
    inputs = ReplTask(Group("S5")).test_batch(2, 8, 2, generator(0, "test", 8, 2)).inputs
    assert zlib.crc32(inputs.tobytes()) == 477685220  # the traces of all published tables


# --- 4. Repeated commands -------------------------------------------------------------------------

def test_a_fraction_of_the_traces_repeats_a_command_with_a_probability():
    """In a quarter of 400 traces a command is the one before with probability 0.8 + 0.2 / 120, in
    the others with 1 / 120; each one that is not is uniform."""
    drawn = []

    class Recorder(ReplTask):
        def trace(self, program):
            drawn.append([event[1] for event in program if event[0] == "command"])
            return super().trace(program)

    Recorder(Group("S5"), repeat_fraction=0.25).training_batch(400, 64, 8, default_rng(0))
    drawn = np.array(drawn)
    equal = (drawn[:, 1:] == drawn[:, :-1]).all(-1)
    assert abs(equal[:100].mean() - (0.8 + 0.2 / 120)) < 0.03  # six deviations of 6,300 coins
    assert equal[100:].mean() < 0.02
    assert are_uniform(drawn[:100, 1:][~equal[:100]], 120)


@pytest.mark.parametrize("draw, length, repeats", [
    ("test_batch", 64, False), ("training_batch", 7, False), ("training_batch", 8, True)])
def test_test_traces_and_short_training_traces_do_not_repeat_commands(draw, length, repeats):
    """They are those of a task without repeats, to the bit."""
    drawn, expected = [getattr(ReplTask(Group("S5"), repeat_fraction=fraction), draw)(
        16, length, length, default_rng(3)).inputs for fraction in (0.5, 0)]
    assert (drawn == expected).all() != repeats


# --- 5. The command line --------------------------------------------------------------------------

@pytest.mark.parametrize("options", [["--group", "S4", "--length", "6", "--spacing", "3"],
                                     ["--group", "S3", "--commands", "swap"]])
def test_each_line_of_the_demo_shows_pythons_state_after_it(options, capsys):
    data.main(options)
    state, names = {}, "abcd"[:int(options[1][1])]
    shown = re.findall(r"^(.*?) +state ([\d. ]+?) +tokens (.*)$", capsys.readouterr().out, re.M)
    assert len(shown) > 10
    for line, values, tokens in shown:
        if line.startswith(">>> ") and "print" not in line:
            exec(line[4:], {}, state)
        assert values.split() == [str(state.get(name, ".")) for name in names]
        assert tokens.replace("|", "") == line


@pytest.mark.parametrize("wrong", [
    *[partial(Group, name) for name in ("S5x", "A2", "S27")],
    lambda: Group("mine", [[1, 2, 3], [2, 3, 1]]),  # counted from 1
    lambda: Group("mine", [[0, 0], [1, 1]]),
    lambda: Group("mine", [[0, 2, 1]]),  # a is always 1, so chance is not 1/3
    lambda: ReplTask(Group("S3"), "swaps"), lambda: ReplTask(Group("A4"), "swap"),
    lambda: ReplTask(Group("S3")).encode("a=1"),
    lambda: ReplTask(Group("S3")).trace([("print", 0)]),
    *[partial(data.stages, text) for text in ("8:1,6:4", "0:1", "4:-2")],
    lambda: ReplTask(Group("S3")).test_batch(1, 6, 4, default_rng(0))])
def test_what_would_be_silently_wrong_is_refused(wrong):
    with pytest.raises((ValueError, ArgumentTypeError)):
        wrong()
