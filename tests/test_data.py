"""Traces are real Python, groups are groups. Oracle: the interpreter that runs the tests."""

import itertools
import math
import re
import time
from argparse import ArgumentTypeError
from unittest.mock import Mock

import data
import numpy as np
import pytest
from conftest import session, typed_lines
from data import Group, ReplTask, UserError, compose, draw_commands, generator
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


@pytest.mark.parametrize("name", ["S2", "S5", "A5", "Z7", "D3", "D6"])
def test_a_group_has_its_elements_in_order_and_draws_them_uniformly(name):
    group = Group(name)
    expected = [*elements_by_rule(name[0], int(name[1:]))]
    assert [*map(tuple, group.elements.tolist())] == expected  # permutations() goes in order, too
    assert group.order == len(expected) and group.chance == 1 / group.degree

    drawn = group.draw((2, 100 * group.order), default_rng(3)).reshape(-1, group.degree)
    found, counts = np.unique(drawn, axis=0, return_counts=True)
    assert (found == group.elements).all() and near_uniform(counts)


def test_compose_means_first_g_then_h():
    """The command g, and after it the command h, are the command compose(g, h): on any state, and
    for whole arrays. run_commands composes from left to right."""
    letters = np.arange(5) + 10
    g, h = Group("S5").draw((2, 3, 4), default_rng(0))
    both = compose(g, h)
    for at in np.ndindex(3, 4):
        assert (letters[g[at]][h[at]] == letters[both[at]]).all()
    assert (data.run_commands(np.stack([g, h], 2)[0])[:, 1] == both[0]).all()


def test_a_group_of_ones_own_is_checked_and_named_by_what_is_broken():
    """The eight elements that the quaternions i and j generate, in any order and twice."""
    i = np.array([1, 4, 3, 6, 5, 0, 7, 2])  # i times 1, i, j, k, -1, -i, -j, -k
    j = np.array([2, 7, 4, 1, 6, 3, 0, 5])
    powers = [np.arange(8), i, i[i], i[i][i]]
    Q8 = [g.tolist() for g in (*powers, *[power[j] for power in powers])]
    group = Group("Q8", [*reversed(Q8), *Q8])
    assert (group.order, group.degree, group.chance) == (8, 8, 1 / 8)
    assert group.elements.tolist() == sorted(Q8)
    assert {*map(tuple, group.draw((300,), default_rng(0)))} == {*map(tuple, Q8)}

    for elements, rule in [
            ([[1, 2, 3], [2, 3, 1], [3, 1, 2]], "a permutation of 0 to 2"),
            ([*Q8[:7], [0] * 8], "a permutation of 0 to 7"),
            (Q8[:7], "not closed"), (sorted(Q8)[1:], "lacks the identity"),
            ([], "a list of permutations"), ([Q8], "a list of permutations"), (["ab"], "float"),
            ([[0, 1], [0]], "sequence"), ([[0, 1.5], [1.5, 0]], "a permutation of 0 to 1"),
            ([[0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 3, 2], [1, 0, 3, 2]], "not transitive"),
            (data.list_cyclic(27), "at most 26")]:
        with pytest.raises(UserError, match=rule):
            Group("mine", elements)


def products_of(*generators):
    """All products of permutations, by a loop."""
    found = [(*range(len(generators[0])),)]
    for first in found:  # the list grows while it is read
        for then in generators:
            product = tuple(first[i] for i in then)
            if product not in found:
                found.append(product)
    return found


def test_a_list_that_is_closed_under_some_of_its_elements_only_is_no_group():
    """A subgroup H, and all products of one g and then an element of H: nothing in H leads out of
    this list, but g does. In the last two cases H needs two and three generators."""
    for generators, g in [([[1, 2, 3, 0]], [0, 1, 3, 2]), ([[0, 1, 3, 2]], [1, 2, 3, 0]),
                          ([[0, 1, 3, 2, 4], [0, 1, 2, 4, 3]], [1, 2, 3, 4, 0]),
                          ([[0, 1, 2, 3, 5, 4], [0, 1, 3, 2, 4, 5], [0, 1, 2, 4, 3, 5]],
                           [1, 2, 3, 4, 5, 0])]:
        H = products_of(*generators)
        coset = [tuple(g[i] for i in h) for h in H]
        with pytest.raises(UserError, match="not closed"):
            Group("mine", H + coset)


def test_a_group_of_thousands_is_checked_by_a_few_of_its_elements():
    """A7: its 2,520 elements have six million products of two, more than a second has time for. An
    element less, or one that is none of it, is noticed."""
    elements = Group("A7").elements
    start = time.process_time()
    assert (Group("mine", elements[::-1]).elements == elements).all()
    odd = [1, 0, 2, 3, 4, 5, 6]
    for wrong in (elements[:-1], np.delete(elements, 700, 0), [*elements, odd],
                  [*elements[1:], odd]):
        with pytest.raises(UserError, match="closed"):
            Group("mine", wrong)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("name", ["S5x", "xS5", "S27", "D27", "S", "S05", "A2", "Z1", "s5", "S5 "])
def test_a_name_of_no_group_is_refused(name):
    with pytest.raises(UserError, match="unknown group|too small|at most 26"):
        Group(name)


@pytest.mark.parametrize("name", ["S26", "A26"])
def test_26_variables_need_no_list_of_their_elements(name):
    group = Group(name)
    drawn = group.draw((50,), default_rng(0))
    assert group.order * (1 if name == "S26" else 2) == math.factorial(26)
    assert (np.sort(drawn) == np.arange(26)).all()
    odd = np.linalg.det(np.eye(26)[drawn]) < 0
    assert odd.any() == (name == "S26") and "elements" not in vars(group)


# --- Traces ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, commands", [("S2", "full"), ("S5", "full"), ("A9", "full"),
                                            ("D4", "full"), ("S26", "full"), ("S2", "swap"),
                                            ("S5", "swap"), ("S26", "swap")])
def test_a_real_interpreter_prints_exactly_what_a_trace_shows(name, commands):
    """Re-executing the inputs of a trace gives the trace, to the letter; so does encoding and
    decoding it. The marked targets are the printed values. The number of tokens is that of
    ReplTask's docstring."""
    task = ReplTask(Group(name), commands)
    n, L, S = task.group.degree, 12, 3
    inputs, targets, reveals = task.test_batch(3, L, S, default_rng(1))
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    T = 5 * n + L * (2 * n + 3 if commands == "full" else 7) + 11 * L // S - 1
    assert inputs.shape == targets.shape == reveals.shape == (3, T)
    assert inputs.dtype == targets.dtype == np.int64 and reveals.dtype == bool

    for row, shown in zip(np.hstack([inputs[:, :1], targets]), reveals):
        text = task.decode(row)
        assert session(typed_lines(text)) == text
        assert task.encode(text) == row.tolist()
        printed = [line.split()[1] for line in text.splitlines() if not line.startswith(">>>")]
        assert [task.vocab[i] for i in row[1:][shown]] == printed
        assert len(printed) == L // S
    with pytest.raises(UserError, match="is made of symbols"):
        task.encode(">>> a += 1")


@pytest.mark.parametrize("draw", ["test_batch", "training_batch"])
def test_each_reveal_asks_any_variable_whatever_the_others_ask(draw):
    """All 16 pairs of what two reveals of a trace ask are equally likely, and so are the commands.
    If one variable were never asked for, a model need not track it."""
    task = ReplTask(Group("S4"))
    inputs, targets, reveals = getattr(task, draw)(4000, 2, 1, default_rng(0))
    traces, places = reveals.nonzero()
    asked = inputs[traces, places - 1].reshape(-1, 2)  # `b` of `b 3`
    commands = inputs[:, 5 * 4 + 6:][:, :4]  # the right-hand side of the first
    for drawn, count in ((asked, 16), (commands, 24)):
        found, counts = np.unique(drawn, axis=0, return_counts=True)
        assert len(found) == count and near_uniform(counts)


def test_swaps_are_all_exchanges_of_two_variables_equally_likely():
    group = Group("S5")
    drawn = draw_commands(group, "swap", (20, 500), default_rng(0)).reshape(-1, 5)
    found, counts = np.unique(drawn, axis=0, return_counts=True)
    assert ((found != np.arange(5)).sum(1) == 2).all() and len(found) == 10
    assert near_uniform(counts)
    assert (ReplTask(group, "swap").alphabet == group.transpositions).all()
    assert (ReplTask(group).alphabet == group.elements).all()


def test_swaps_are_written_in_order_and_values_begin_at_one():
    """`a, b = b, a`, and never `b, a = a, b`. Variable number i begins with the value i + 1."""
    task = ReplTask(Group("S4"), "swap")
    inputs, targets, _ = task.test_batch(20, 3, 3, default_rng(0))
    for row, rest in zip(inputs, targets):
        text = task.decode([row[0], *rest])
        assert text.startswith(">>> a = 1\n>>> b = 2\n>>> c = 3\n>>> d = 4\n>>> ")
        pairs = re.findall(r">>> (\w), (\w) = (\w), (\w)\n", text)
        assert len(pairs) == 3 and all(x < y and (x, y) == (v, u) for x, y, u, v in pairs)


@pytest.mark.parametrize("in_a_row", [1, 3])
def test_reveals_stand_after_each_spacing_of_the_commands_one_or_several_in_a_row(in_a_row):
    """Python answers each. A list of what is asked that does not fit the spacing is refused, for it
    would show states of other places."""
    task, rng = ReplTask(Group("S5")), default_rng(2)
    commands = task.group.draw((2, 12), rng)
    asked = rng.integers(5, size=(2, 3, in_a_row))
    if in_a_row == 1:
        assert all((x == y).all() for x, y in zip(task.write(commands, asked, 4),
                                                  task.write(commands, asked[..., 0], 4)))

    tokens, reveals = task.write(commands, asked, 4)
    for row, shown, names in zip(tokens, reveals, asked):
        text = task.decode(row)
        assert session(typed_lines(text)) == text
        lines = [line[4:] for line in text.splitlines()[5:] if line.startswith(">>> ")]
        kinds = "".join("p" if line.startswith("print") else "c" for line in lines)
        assert kinds == ("cccc" + "p" * in_a_row) * 3 and shown.sum() == 3 * in_a_row
        assert [line[7] for line in lines if line[0] == "p"] == [
            "abcde"[i] for i in names.ravel()]

    for spacing in (1, 2, 3, 12):
        with pytest.raises(UserError, match="12 commands"):
            task.write(commands, asked, spacing)


@pytest.mark.parametrize("length, spacing", [(0, 1), (4, 0), (-4, 2), (4, -2), (5, 2), (2, 4)])
def test_a_trace_has_commands_and_ends_on_a_reveal(length, spacing):
    with pytest.raises(UserError, match="multiple"):
        ReplTask(Group("S3")).test_batch(2, length, spacing, default_rng(0))


def test_swaps_need_a_group_that_exchanges_generate():
    """S<n>, by its name or by its elements: the task says so when it is made."""
    ReplTask(Group("mine", Group("S4").elements), "swap")
    for name in ("A4", "Z3", "D4"):
        with pytest.raises(UserError, match=f"S<n>.*{name}"):
            ReplTask(Group(name), "swap")


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


def test_numbers_that_are_too_small_or_no_numbers_are_refused_before_any_work(refused):
    for option, value in itertools.product(["--length", "--spacing"], ["0", "-3", "two", "2.5"]):
        refused(data.main, [option, value], option)
    refused(data.main, ["--length", "3", "--spacing", "2"], "multiple")
    assert data.at_least(0, float)("0") == 0
    for text in ("nan", "inf", "-1e-9"):
        with pytest.raises(ArgumentTypeError, match="0 or more"):
            data.at_least(0, float)(text)


# --- Runs of one command --------------------------------------------------------------------------

class Recorder(ReplTask):
    """Keeps the commands of the last batch."""

    def write(self, commands, *rest):
        self.drawn = commands
        return super().write(commands, *rest)


def test_runs_are_a_share_of_the_traces_and_a_command_stays_with_a_probability():
    """In a quarter of 400 traces a command is the one before with probability 0.8 + 0.2 / 120, in
    the others with 1 / 120; the first command is uniform, and so is each that does not stay."""
    task = Recorder(Group("S5"), runs=0.25)
    task.training_batch(400, 64, 8, default_rng(0))
    equal = (task.drawn[:, 1:] == task.drawn[:, :-1]).all(-1)
    assert abs(equal[:100].mean() - (0.8 + 0.2 / 120)) < 0.03  # six deviations of 6,300 coins
    assert equal[100:].mean() < 0.02

    # Each place of a run shows the same, and the commands of the runs are all of S5, equally often.
    begins = task.drawn[:100, 1:][~equal[:100]]
    found, counts = np.unique(begins, axis=0, return_counts=True)
    assert len(found) == 120 and near_uniform(counts)


def test_without_runs_a_training_batch_is_a_test_batch_to_the_bit_and_short_ones_have_none():
    """So are the test traces of a task with runs: what it is asked does not depend on them."""
    plain, runs = ReplTask(Group("S5")), ReplTask(Group("S5"), runs=0.5)
    for task, draw, length in [(plain, plain.training_batch, 64), (runs, runs.test_batch, 64),
                               (runs, runs.training_batch, 2), (runs, runs.training_batch, 4)]:
        expected = plain.test_batch(16, length, 2, default_rng(3))
        for ours, theirs in zip(draw(16, length, 2, default_rng(3)), expected):
            assert (ours == theirs).all(), (task.runs, length)

    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(UserError, match="from 0 to 1"):
            ReplTask(Group("S5"), runs=share)


# --- Random numbers, and Ctrl-C -------------------------------------------------------------------

def test_a_generator_is_its_own_for_each_seed_purpose_and_key():
    lengths = [(), (0,), (1,), (8, 16), (16, 8)]
    keys = [*itertools.product((0, 1), data.PURPOSES, lengths)]
    drawn, again = [[generator(seed, purpose, *key).integers(2**62) for seed, purpose, key in keys]
                    for _ in range(2)]
    assert drawn == again and len({*drawn}) == len(keys)


def test_ctrl_c_exits_with_130():
    with pytest.raises(SystemExit, match="130"):
        data.run(Mock(side_effect=KeyboardInterrupt))
