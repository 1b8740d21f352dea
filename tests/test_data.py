"""Traces are real Python, groups are groups. Oracle: the interpreter that runs the tests."""

import numpy as np
import pytest
from conftest import session, typed_lines
from data import COMMANDS, TASKS, Group, ReplTask, WordTask, generator, main, parse_stages
from numpy.random import default_rng as rng

GROUPS = "S2 S3 S4 S5 A3 A4 A5 Z2 Z7 D3 D4 D6 A4xZ5 S3xS4 S26 D26".split()
LANGUAGES = [(name, "full") for name in GROUPS] + [
    (name, "swap") for name in ("S2", "S3", "S4", "S5", "S3xS4", "S26")]


@pytest.mark.parametrize("name, order", [
    ("S2", 2), ("S5", 120), ("A4", 12), ("A5", 60), ("Z7", 7), ("D3", 6), ("D6", 12), ("A4xZ5", 60),
    ("Z2xS3xD3", 72)])
def test_the_elements_form_a_group_of_the_stated_order_and_are_drawn_uniformly(name, order):
    """Distinct, closed, associative, identity first, an inverse each. Of 200 draws per element,
    none is from outside, and each element's count is within six standard deviations."""
    group = Group(name)
    everyone, elements = np.arange(order), group.elements
    assert np.unique(elements, axis=0).shape == elements.shape == (order, group.degree)
    table = group.compose(everyone[:, None], everyone)
    assert (np.sort(table, 0) == everyone[:, None]).all() and (np.sort(table, 1) == everyone).all()
    assert (table[0] == everyone).all() and (table[:, 0] == everyone).all()
    f, g, h = rng(0).integers(order, size=(3, 500))
    assert (table[table[f, g], h] == table[f, table[g, h]]).all()
    drawn = group.draw((200 * order,), rng(3))
    numbers = group.index(drawn)
    assert (elements[numbers] == drawn).all()
    assert np.abs(np.bincount(numbers, minlength=order) - 200).max() < 6 * 200**0.5
    guesses = (drawn == np.arange(group.degree)).mean()  # each variable's value at the start
    assert abs(guesses - group.chance) < 0.05


def test_compose_means_first_g_then_h():
    """On plain lists, the command g and after it the command h are the command compose(g, h)."""
    group = Group("A4xZ5")
    for g, h in rng(2).integers(group.order, size=(200, 2)):
        after_g = ["abcdefghi"[i] for i in group.elements[g]]
        after_both = [after_g[i] for i in group.elements[h]]
        assert after_both == ["abcdefghi"[i] for i in group.elements[group.compose(g, h)]]


@pytest.mark.parametrize("name, commands", LANGUAGES)
def test_a_real_interpreter_prints_exactly_what_a_trace_shows(name, commands):
    """Re-executing the inputs of a trace gives the trace, to the letter; so does encoding and
    decoding it."""
    task = ReplTask(Group(name), commands)
    tokens, reveals = task.sample(3, 12, 3, rng(1))
    for row, shown in zip(tokens, reveals):
        text = task.decode(row)
        assert session(typed_lines(text)) == text
        assert task.encode(text) == row.tolist()
        assert [task.vocab[i] for i in row[shown]] == [line.split()[1] for line in text.splitlines()
                                                      if not line.startswith(">>> ")]


@pytest.mark.parametrize("commands, per_command", [("full", 13), ("swap", 7)])
def test_a_batch_has_the_stated_length_and_asks_for_the_token_that_comes_next(
        commands, per_command):
    """T = 5n + (2n + 3) L + 11 L/S, or 7 L for swaps. The last value is the last token but one."""
    task = ReplTask(Group("S5"), commands)
    tokens, reveals = task.sample(2, 64, 8, rng(5))
    inputs, targets, marked, best = task.training_batch(2, 64, 8, rng(5))
    assert tokens.shape == reveals.shape == (2, 25 + per_command * 64 + 11 * 8)
    assert (reveals.sum(1) == 8).all() and reveals[:, -2].all() and best is None
    assert (inputs == tokens[:, :-1]).all() and (targets == tokens[:, 1:]).all()
    assert (marked == reveals[:, 1:]).all() and {*targets[marked]} <= {*task.value_tokens}
    assert tokens.dtype == np.int64 and reveals.dtype == bool


def test_words_are_labelled_with_the_running_product():
    """Label t = compose(label t-1, token t), starting from the identity."""
    for commands in COMMANDS:
        task = WordTask(Group("S4"), commands)
        inputs, targets, reveals, _ = task.training_batch(4, 12, 3, rng(4))
        assert (reveals == [False, False, True] * 4).all() and targets.dtype == np.int64
        product = np.zeros(4, int)
        for t in range(12):
            product = task.group.compose(product, inputs[:, t])
            assert (product == targets[:, t]).all()


def test_generators_are_reproducible_and_disjoint():
    """Equal arguments give equal traces; any other seed, purpose, step or length shares none."""
    task, seen = ReplTask(Group("S5")), set()
    for seed in (0, 1):
        for key in [("train", 0), ("train", 1), ("valid", 0), ("test", 8, 8), ("test", 16, 8),
                    ("test", 8, 16)]:
            first, again = (task.sample(64, 8, 8, generator(seed, *key))[0] for _ in range(2))
            traces = {row.tobytes() for row in first}
            assert (first == again).all() and len(traces) == 64 and not traces & seen
            seen |= traces


def test_bad_requests_are_refused_with_the_rule(refused):
    s5 = ReplTask(Group("S5"))
    for rule, request, *arguments in [
            ("multiple of the spacing.*length 10, spacing 4", s5.sample, 1, 10, 4, rng(0)),
            ("multiple of the spacing", WordTask(s5.group).training_batch, 1, 8, 3, rng(0)),
            ("not all of '>>> a [+]= 1' is made of", s5.encode, ">>> a += 1"),
            ("refused", getattr, Group("S12"), "elements"),
            *[("transpositions", task, Group("A5"), "swap") for task in (ReplTask, WordTask)],
            *[("group|small", Group, name) for name in
              ("S", "Q8", "S5x", "s5", "S0", "A2", "D2", "S27", "S20xS7", "")],
            *[("expected LENGTH:SPACING", parse_stages, text, s5) for text in
              ("8", "8:1,", "8:1;16:2", "", "-8:1")]]:
        with pytest.raises(ValueError, match=rule):
            request(*arguments)
    refused(main, ["--group", "Q8"], "Q8", "expected S<n>")
    refused(main, ["--length", 3, "--spacing", 2], "multiple")
    assert parse_stages("8:1,16:2", s5) == [[8, 1], [16, 2]]
