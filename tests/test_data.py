"""Traces are real Python, groups are groups. Oracle: the interpreter that runs the tests."""

import io
import itertools
import math
import re
import subprocess
import sys
import zlib

import data
import numpy as np
import pytest
from conftest import ROOT, session, typed_lines
from data import Group, ReplTask, UserError, generator
from numpy.random import default_rng


def near_uniform(counts):
    """Whether these counts of equally likely things are within six deviations of their mean."""
    return np.abs(counts - counts.mean()).max() < 6 * counts.mean()**0.5


# --- Groups ---------------------------------------------------------------------------------------

def elements_by_rule(letter, n):
    """By loops: a permutation is an element if it is even, or if it keeps a circle's arcs."""
    for g in itertools.permutations(range(n)):
        inversions = sum(g[i] > g[j] for i, j in itertools.combinations(range(n), 2))
        turns = {(g[(i + 1) % n] - g[i]) % n for i in range(n)}  # of the neighbours on a circle
        if {"S": True, "A": inversions % 2 == 0, "Z": turns == {1},
                "D": turns in ({1}, {n - 1})}[letter]:
            yield g


@pytest.mark.parametrize("name", ["S2", "S5", "A3", "A5", "Z7", "D3", "D6"])
def test_a_group_lists_its_elements_in_order_and_draws_them_uniformly(name):
    group = Group(name)
    expected = [*elements_by_rule(name[0], int(name[1:]))]
    assert [*map(tuple, group.elements.tolist())] == expected  # permutations() are in order
    assert group.order == len(expected) and group.chance == 1 / group.degree

    drawn = group.draw((2, 100 * group.order), default_rng(3)).reshape(-1, group.degree)
    found, counts = np.unique(drawn, axis=0, return_counts=True)
    assert (found == group.elements).all() and near_uniform(counts)


@pytest.mark.parametrize("name, order", [("S26", math.factorial(26)),
                                         ("A26", math.factorial(26) // 2)])
def test_26_variables_need_no_list_of_their_elements(name, order):
    group = Group(name)
    drawn = group.draw((50,), default_rng(0))
    assert group.order == order and (np.sort(drawn) == np.arange(26)).all()
    odd = np.linalg.det(np.eye(26)[drawn]) < 0
    assert odd.any() == (name == "S26") and "elements" not in vars(group)


I = np.array([1, 4, 3, 6, 5, 0, 7, 2])  # the quaternion i times 1, i, j, k, -1, -i, -j, -k
J = np.array([2, 7, 4, 1, 6, 3, 0, 5])
POWERS = [np.arange(8), I, I[I], I[I][I]]
Q8 = [g.tolist() for g in (*POWERS, *[power[J] for power in POWERS])]


@pytest.mark.parametrize("generators", [[I, J], [*reversed(Q8), *Q8], Q8[1:7]])
def test_permutations_make_the_group_of_their_products(generators):
    group = Group("Q8", generators)
    assert (group.order, group.degree, group.chance) == (8, 8, 1 / 8)
    assert group.elements.tolist() == sorted(Q8)
    assert {*map(tuple, group.draw((300,), default_rng(0)))} == {*map(tuple, Q8)}


@pytest.mark.parametrize("generators, words", [
    ([], "list the positions"),
    ([[0.0, 1.0], [1.0, 0.0]], "list the positions"), ([[0, 0], [1, 1]], "list the positions"),
    ([[0, -1], [-1, 0]], "list the positions"),
    ([[1, 2, 3], [2, 3, 1], [3, 1, 2]], "positions 0, 1, ... in some order; got"),
    ([np.roll(range(27), 1)], "letters"),
    ([[0, 1, 2], [1, 0, 2]], "not transitive"), ([[0, 1, 2], [0, 2, 1]], "not transitive")])
def test_permutations_that_make_no_transitive_group_are_refused(generators, words):
    with pytest.raises(UserError, match=words):
        Group("mine", generators)


@pytest.mark.parametrize("name", "S5x,xS5,S27,S05,S0,A2,Z1,s5,".split(","))
def test_a_name_that_is_not_a_group_is_refused(name):
    Group("S10"), Group("A10")
    with pytest.raises(UserError, match="unknown group|letters"):
        Group(name)


# --- Traces ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("draw", ["test_batch", "dense_batch"])
@pytest.mark.parametrize("name, commands", [
    *[(name, "full") for name in ("S2", "S5", "A9", "D4", "S26")],
    *[(name, "swap") for name in ("S2", "S5", "S26")]])
def test_a_real_interpreter_prints_exactly_what_a_trace_shows(name, commands, draw):
    """Re-executing the typed lines of a trace gives the trace, and so does encoding and decoding.
    The targets are the inputs one later; those marked are the printed values. The number of tokens
    is that of ReplTask's docstring, and 5 for each literal."""
    task = ReplTask(Group(name), commands, literal_fraction=1)
    n, L, S = task.group.degree, 12, 3
    inputs, targets, reveals = getattr(task, draw)(3, L, S, default_rng(1))
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    T = 5 * n + L * (2 * n + 3 if commands == "full" else 7) + 11 * L // S - 1
    T += 5 * (L // S) * (draw == "dense_batch")
    assert inputs.shape == targets.shape == reveals.shape == (3, T)
    assert inputs.dtype == targets.dtype == np.int64 and reveals.dtype == bool

    for row, shown in zip(np.hstack([inputs[:, :1], targets]), reveals):
        text = task.decode(row)
        assert session(typed_lines(text)) == text
        assert task.encode(text) == row.tolist()
        printed = [line.split()[1] for line in text.splitlines() if not line.startswith(">>>")]
        assert [task.vocab[i] for i in row[1:][shown]] == printed and len(printed) == L // S
    with pytest.raises(UserError, match="not tokens"):
        task.encode(">>> a;")


@pytest.mark.parametrize("draw", ["test_batch", "training_batch"])
def test_each_reveal_asks_any_variable_whatever_the_others_ask(draw):
    """All 16 pairs of variables are equally likely in the two reveals of a trace, and so are the
    commands. If one variable were never asked for, a model need not track it."""
    task = ReplTask(Group("S4"))
    inputs, _, reveals = getattr(task, draw)(4000, 2, 1, default_rng(0))
    traces, positions = reveals.nonzero()
    asked = inputs[traces, positions - 1].reshape(-1, 2)  # `b` of `b 3`
    commands = inputs[:, 5 * 4 + 6:][:, :4]  # the right-hand side of the first
    for drawn, count in ((asked, 16), (commands, 24)):
        found, counts = np.unique(drawn, axis=0, return_counts=True)
        assert len(found) == count and near_uniform(counts)


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
    with pytest.raises(ValueError, match="unknown event"):
        task.trace([("reveals", 0)])


def test_dense_traces_begin_with_any_values_and_a_fraction_of_batches_has_literals():
    """Two first values, of one trace or of two, are any pair. A literal gives any variable any
    value, at any place among the commands before a reveal. All traces of a batch have literals, or
    none; half repeat commands."""
    drawn = []

    class Recorder(ReplTask):
        def trace(self, program, values):
            commands = [what[0] for kind, *what in program if kind == "command"]
            # Each block of two commands has one literal, and ends with a reveal.
            assert [event[0] for event in program if event[0] != "literal"] == 4 * [
                "command", "command", "reveal"]
            literals = [(i % 4, *event[1:]) for i, event in enumerate(program)
                        if event[0] == "literal"]
            drawn.append((commands, values, literals))
            return super().trace(program, values)

    for seed in range(400):
        Recorder(Group("S4"), literal_fraction=0.25).dense_batch(2, 8, 2, default_rng(seed))
    commands, values, literals = zip(*drawn)
    repeats = (np.diff(commands, axis=1) == 0).all(-1).mean(1)
    assert repeats[::2].mean() > 0.7 and repeats[1::2].mean() < 0.2
    assert any(one and one != other for one, other in zip(literals[::2], literals[1::2]))
    numbers = [*map(len, literals)]
    assert numbers[::2] == numbers[1::2] and {*numbers} == {0, 4}
    assert abs(np.mean(numbers) / 4 - 0.25) < 0.13  # six deviations of 400 coins
    beside = [(one[0], other[0]) for one, other in zip(values[::2], values[1::2])]
    firsts = [pair for row in values for pair in itertools.combinations(row, 2)]
    given = [one for each in literals for one in each]
    for some, kinds in [(beside, 16), (firsts, 16), (given, 3 * 16)]:
        found, counts = np.unique(some, axis=0, return_counts=True)
        assert len(found) == kinds and near_uniform(counts)


def test_all_swaps_are_equally_likely_and_written_in_order():
    """`a, b = b, a`, and never `b, a = a, b`. The first variable begins with the value 1."""
    task = ReplTask(Group("S4"), "swap")
    inputs, _, _ = task.test_batch(20, 300, 300, default_rng(0))
    swaps = []
    for row in inputs:
        text = task.decode(row)
        assert text.startswith(">>> a = 1\n>>> b = 2\n>>> c = 3\n>>> d = 4\n>>> ")
        swaps += re.findall(r">>> (\w), (\w) = (\w), (\w)\n", text)
    found, counts = np.unique(swaps, axis=0, return_counts=True)
    assert counts.sum() == 20 * 300 and near_uniform(counts)
    assert found.tolist() == [[x, y, y, x] for x, y in itertools.combinations("abcd", 2)]


@pytest.mark.parametrize("name, commands, words", [
    *[(name, "swap", "S<n>") for name in ("A4", "Z3", "D4")], ("S5", "swaps", "full or swap")])
def test_a_task_that_cannot_be_drawn_is_refused(name, commands, words):
    """Swaps need S<n>, by its name or by generators."""
    ReplTask(Group("mine", [[1, 2, 3, 0], [1, 0, 2, 3]]), "swap")
    with pytest.raises(UserError, match=words):
        ReplTask(Group(name), commands)


# --- Repeated commands ----------------------------------------------------------------------------

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
    found, counts = np.unique(drawn[:100, 1:][~equal[:100]], axis=0, return_counts=True)
    assert len(found) == 120 and near_uniform(counts)


def test_test_traces_and_short_training_traces_do_not_repeat_commands():
    """They are those of a task without repeats, to the bit; from 8 commands on, only half are."""
    plain, repeats = ReplTask(Group("S5"), repeat_fraction=0), ReplTask(Group("S5"))
    for draw, length in [(plain.training_batch, 64), (repeats.test_batch, 64),
                         *[(repeats.training_batch, length) for length in (2, 7, 8)]]:
        drawn, expected = [some(16, length, length, default_rng(3)).inputs
                           for some in (draw, plain.test_batch)]
        assert (drawn == expected).all() == (length != 8), length


# --- Random streams -------------------------------------------------------------------------------

def test_a_generator_is_independent_for_each_seed_purpose_and_key():
    lengths = [(), (0,), (1,), (8, 16), (16, 8), (8, 4)]
    keys = [*itertools.product((0, 1), data.PURPOSES, lengths)]
    drawn, again = [[generator(seed, purpose, *key).integers(2**62) for seed, purpose, key in keys]
                    for _ in range(2)]
    assert drawn == again and len({*drawn}) == len(keys)
    inputs = ReplTask(Group("S5")).test_batch(2, 8, 2, generator(0, "test", 8, 2)).inputs
    assert zlib.crc32(inputs.tobytes()) == 477685220  # the traces of all published tables


# --- The command line -----------------------------------------------------------------------------

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


def test_what_a_console_cannot_show_is_escaped(monkeypatch):
    """As on Windows, if the output goes to a file."""
    console = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", console)
    data.run_cli(lambda: print("β ≤ 2"))
    assert console.buffer.getvalue().split() == [rb"\u03b2", rb"\u2264", b"2"]


@pytest.mark.parametrize("piped, first", [
    ("--length 4000 | head -1", "120 states"), ("| true", "")])
def test_a_reader_who_has_seen_enough_ends_the_demo_quietly(piped, first):
    """While it prints, and at its end, when the last lines leave Python's buffer."""
    command = f"'{sys.executable}' data.py {piped}"
    shown = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert shown.stdout.startswith(first) and not shown.stderr
