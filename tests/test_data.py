"""Traces are real Python, groups are groups. Oracle: the interpreter that runs the tests."""

import argparse
import itertools
import subprocess
import sys
from unittest.mock import Mock

import data
import numpy as np
import pytest
from conftest import ROOT, session, typed_lines
from data import FAMILIES, Family, Group, ReplTask, UserError, WordTask, generator
from numpy.random import default_rng

# --- Groups ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, order", [
    ("S5", 120), ("A5", 60), ("Z7", 7), ("D3", 6), ("D6", 12), ("A4xZ5", 60), ("Z2xS3xD3", 72)])
def test_the_elements_form_a_group_of_the_stated_order_and_are_drawn_uniformly(name, order):
    """Distinct, in lexicographic order, closed, an inverse each. Of 200 draws per element none is
    from outside, and each count is within six deviations."""
    group = Group(name)
    everyone, elements = np.arange(order), group.elements
    assert group.order == order
    assert [*map(tuple, elements)] == sorted({*map(tuple, elements)})
    table = group.compose(everyone[:, None], everyone)
    assert (np.sort(table, 0) == everyone[:, None]).all() and (np.sort(table, 1) == everyone).all()

    drawn = group.draw((200 * order,), default_rng(3))
    numbers = group.index(drawn)
    assert (elements[numbers] == drawn).all()
    assert np.abs(np.bincount(numbers, minlength=order) - 200).max() < 6 * 200**0.5
    guesses = (drawn == np.arange(group.degree)).mean()  # each variable's value at the start
    assert abs(guesses - group.chance) < 0.05


@pytest.mark.parametrize("name", ["A4xZ5", "S4", "D5"])
def test_compose_means_first_g_then_h(name):
    """On any state, the command g and after it the command h are the command compose(g, h)."""
    group = Group(name)
    letters = np.arange(group.degree) + 10
    for g, h in default_rng(0).integers(group.order, size=(40, 2)):
        after_g = letters[group.elements[g]]
        after_both = letters[group.elements[group.compose(g, h)]]
        assert (after_g[group.elements[h]] == after_both).all()


def test_a_shortest_word_leads_to_its_element():
    """By swaps, the elements of S4 that need 0, 1, 2, 3 of them are the Stirling numbers."""
    group = Group("S4")
    words = group.shortest_words(group.transpositions)
    assert np.bincount([*map(len, words.values())]).tolist() == [1, 6, 11, 6]
    for element, word in words.items():
        state = np.arange(4)
        for command in word:
            state = state[command]
        assert (state == group.elements[element]).all()


ROTATIONS = data.list_cyclic(8)


@pytest.mark.parametrize("broken, rule", [
    ({"order": lambda n: 9}, "9 elements of 8 points"),
    ({"elements": lambda n: ROTATIONS[:3], "order": lambda n: 3}, "product of two"),
    ({"elements": lambda n: np.vstack([ROTATIONS[:-1], [0] * 8])}, "permutation"),
    ({"elements": lambda n: np.vstack([ROTATIONS[:4]] * 2)}, "8 elements"),
    ({"elements": lambda n: ROTATIONS[::4], "order": lambda n: 2}, "every point must reach"),
    ({"draw": data.draw_symmetric}, "draws is not in its list"),
    ({"smallest": 9}, "needs n >= 9")])
def test_a_family_that_is_no_group_or_registered_by_half_is_refused(broken, rule, monkeypatch):
    right = {"smallest": 8, "order": lambda n: 8, "elements": lambda n: ROTATIONS}
    monkeypatch.setitem(FAMILIES, "W", Family(**right))
    assert Group("W8").order == 8
    monkeypatch.setitem(FAMILIES, "W", Family(**right | broken))
    with pytest.raises(UserError, match=rule):
        Group("W8")


# --- Tasks ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("commands, name", [
    *itertools.product(["full"], ["S2", "S5", "A9", "D4", "A4xZ5", "S26"]),
    *itertools.product(["swap"], ["S2", "S5", "S3xS4", "S26"])])
def test_a_real_interpreter_prints_exactly_what_a_trace_shows(commands, name):
    """Re-executing the inputs of a trace gives the trace, to the letter; so does encoding and
    decoding it. The marked targets are the printed values, in training as in a test. A trace has
    5n + (2n + 3) L tokens, or 5n + 7 L for swaps, and 11 for each reveal."""
    task = ReplTask(Group(name), commands)
    n = task.group.degree
    for draw, L, S in ((task.test_batch, 12, 3), (task.training_batch, 5, 1)):
        inputs, targets, reveals, best = draw(3, L, S, default_rng(1))
        assert (inputs[:, 1:] == targets[:, :-1]).all() and best is None
        T = 5 * n + L * (2 * n + 3 if commands == "full" else 7) + 11 * reveals[0].sum() - 1
        assert inputs.shape == targets.shape == reveals.shape == (3, T)
        assert inputs.dtype == targets.dtype == np.int64 and reveals.dtype == bool

        for row, shown in zip(np.hstack([inputs[:, :1], targets]), reveals):
            text = task.decode(row)
            assert session(typed_lines(text)) == text
            assert task.encode(text) == row.tolist()
            printed = [line.split()[1] for line in text.splitlines() if not line.startswith(">>>")]
            assert [task.vocab[i] for i in row[1:][shown]] == printed


@pytest.mark.parametrize("task, spacing, sparse", [
    (ReplTask(Group("S7")), 1, 0),
    (ReplTask(Group("S12")), 1, 20),
    (ReplTask(Group("S12")), 4, 2),
    (ReplTask(Group("S12"), sparse=False), 1, 0),
    (ReplTask(Group("S12"), "swap"), 1, 0),  # exchanges already
    (ReplTask(Group("A12")), 1, 0)])  # a product of exchanges may be no command of this one
def test_many_variables_are_trained_on_easier_traces_and_tested_on_the_same_as_few(
        task, spacing, sparse, monkeypatch):
    """From eight variables on, in training only: n // 4 reveals in a row, and sparse commands, in
    all traces where S = 1, else in one of sixteen."""
    draw = Mock(side_effect=data.draw_sparse_commands)
    monkeypatch.setattr(data, "draw_sparse_commands", draw)
    for draws, reveals in ((task.test_batch, 1), (task.training_batch, task.group.degree // 4)):
        batch = draws(20, 4, spacing, default_rng(0))
        assert (batch.reveals.sum(1) == reveals * 4 // spacing).all()
        asked = [call.args[1] for call in draw.call_args_list]
        assert asked == ([(sparse, 4)] if sparse and draws == task.training_batch else [])


def test_sparse_commands_leave_many_variables_alone():
    """A uniform permutation of 12 points moves 11 of them."""
    commands = data.draw_sparse_commands(Group("S12"), (40, 4), default_rng(0))
    assert (np.sort(commands) == np.arange(12)).all()
    moved = data.points_moved(commands)
    assert moved.mean() < 9 and moved.min() < 4 and moved.max() > 9


@pytest.mark.parametrize("length, easy, easier", [(16, True, True), (32, True, False),
                                                  (16, False, False)])
def test_short_training_traces_of_words_move_fewer_points(length, easy, easier):
    """Up to 16 words each is the easier of two; else they are uniform, as in every test."""
    task = WordTask(Group("A5"), easy=easy)
    elements = task.group.elements
    moved = [data.points_moved(elements[draw(4000, length, 1, default_rng(3)).inputs]).mean()
             for draw in (task.training_batch, task.test_batch)]
    of_all = data.points_moved(elements)
    of_two = np.minimum(of_all, of_all[:, None])
    assert abs(moved[0] - (of_two if easier else of_all).mean()) < 0.03
    assert abs(moved[1] - of_all.mean()) < 0.03


def test_few_words_are_left_later():
    """By the task's own recipe, which the tasks of other groups do not share."""
    streaks = [WordTask(Group(name)).recipe_options["streak"] for name in ("S3", "S4", "A5")]
    assert streaks == [10, 10, 1]


@pytest.mark.parametrize("commands", data.COMMANDS)
def test_words_are_labelled_with_the_running_product(commands):
    """Label t = compose(label t-1, token t), from the identity; each S-th label counts."""
    task = WordTask(Group("S4"), commands)
    assert task.chance == 1 / 24 and len(task.vocab) == 24 and task.vocab[1] == "abdc"
    for draw in (task.training_batch, task.test_batch):
        inputs, targets, reveals, best = draw(4, 12, 3, default_rng(4))
        assert (reveals == [False, False, True] * 4).all() and best is None
        product = np.zeros(4, int)
        for t in range(12):
            product = task.group.compose(product, inputs[:, t])
            assert (product == targets[:, t]).all()


# --- Random numbers -------------------------------------------------------------------------------

def test_a_generator_is_its_own_for_each_seed_purpose_and_key():
    """Equal arguments draw the same; another seed, purpose, step or length draws something else."""
    lengths = [(), (0,), (1,), (8, 16), (16, 8)]
    keys = [*itertools.product((0, 1), data.PURPOSES, lengths)]

    def draw():
        return [generator(seed, purpose, *key).integers(2**62) for seed, purpose, key in keys]

    assert draw() == draw() and len({*draw()}) == len(keys)


# --- What the command lines share -----------------------------------------------------------------

BAD_REQUESTS = [
    ("length 10, spacing 4", lambda: ReplTask(Group("S5")).sample(1, 10, 4, default_rng(0))),
    ("not all of '>>> a [+]= 1' is made of", lambda: ReplTask(Group("S5")).encode(">>> a += 1")),
    ("refused above 1,000,000", lambda: Group("S12").elements),
    ("transpositions", lambda: WordTask(Group("A5"), "swap")),
    ("unknown group 's5'", lambda: Group("s5")),
    ("permutes 27 points", lambda: Group("S20xS7")),
    ("must lie in", lambda: data.number(0, 2, float)("nan"))]


@pytest.mark.parametrize("rule, ask", BAD_REQUESTS)
def test_bad_requests_are_refused_with_the_rule(rule, ask):
    with pytest.raises((UserError, argparse.ArgumentTypeError), match=rule):
        ask()


def test_ctrl_c_and_a_closed_pipe_end_a_program_in_silence():
    with pytest.raises(SystemExit, match="130"):
        data.run(Mock(side_effect=KeyboardInterrupt))

    # This trace has more text than a pipe can hold.
    words = [sys.executable, *"data.py --group S26 --length 100 --spacing 1".split()]
    talker = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    talker.stdout.readline()
    talker.stdout.close()
    assert talker.wait() == 1 and not talker.stderr.read()
