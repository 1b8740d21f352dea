"""Traces are real Python, groups are groups. Oracle: the interpreter that runs the tests."""

import itertools
import math
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
            (Q8[:7], "not closed"),
            ([[0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 3, 2], [1, 0, 3, 2]], "not transitive"),
            (data.list_cyclic(27), "at most 26")]:
        with pytest.raises(UserError, match=rule):
            Group("mine", elements)


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
