"""Traces are real Python, groups are groups. Oracle: the interpreter that runs the tests."""

import argparse
import itertools
import re
import subprocess
import sys

import data
import numpy as np
import pytest
from conftest import ROOT, session, typed_lines
from data import FAMILIES, Family, Group, ReplTask, UserError, WordTask, generator, rule_for
from numpy.random import default_rng

GROUPS = "S2 S3 S4 S5 A3 A4 A5 Z2 Z7 D3 D4 D6 A4xZ5 S3xS4 S26 D26".split()
LANGUAGES = [(name, "full") for name in GROUPS] + [
    (name, "swap") for name in ("S2", "S3", "S4", "S5", "S3xS4", "S26")]


# --- Groups ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, order", [
    ("S2", 2), ("S5", 120), ("A4", 12), ("A5", 60), ("Z7", 7), ("D3", 6), ("D6", 12), ("A4xZ5", 60),
    ("Z2xS3xD3", 72)])
def test_the_elements_form_a_group_of_the_stated_order_and_are_drawn_uniformly(name, order):
    """Distinct, closed, associative, in lexicographic order, so identity first, an inverse each. Of
    200 draws per element none is from outside, and each count is within six deviations."""
    group = Group(name)
    everyone, elements = np.arange(group.order), group.elements
    assert group.order == order
    assert [*map(tuple, elements)] == sorted({*map(tuple, elements)})
    table = group.compose(everyone[:, None], everyone)
    assert (np.sort(table, 0) == everyone[:, None]).all() and (np.sort(table, 1) == everyone).all()
    assert (table[0] == everyone).all() and (table[:, 0] == everyone).all()
    f, g, h = default_rng(0).integers(order, size=(3, 500))
    assert (table[table[f, g], h] == table[f, table[g, h]]).all()

    drawn = group.draw((200 * order,), default_rng(3))
    numbers = group.index(drawn)
    assert (elements[numbers] == drawn).all()
    assert np.abs(np.bincount(numbers, minlength=order) - 200).max() < 6 * 200**0.5
    guesses = (drawn == np.arange(group.degree)).mean()  # each variable's value at the start
    assert abs(guesses - group.chance) < 0.05


@pytest.mark.parametrize("seed", range(5))
def test_compose_means_first_g_then_h(seed):
    """On plain lists, the command g and after it the command h are the command compose(g, h); and
    run_commands does the same, from any state."""
    rng = default_rng(seed)
    group = Group(["A4xZ5", "S4", "D5", "A5", "S3xS2"][seed])
    letters = np.arange(group.degree) + 10
    for g, h in rng.integers(group.order, size=(40, 2)):
        after_g = [letters[i] for i in group.elements[g]]
        after_both = [after_g[i] for i in group.elements[h]]
        assert after_both == [letters[i] for i in group.elements[group.compose(g, h)]]
        states = data.run_commands(group.elements[[[g, h]]], letters[None])
        assert states.tolist() == [[after_g, after_both]]


@pytest.mark.parametrize("name, commands, counts", [
    ("S3", "full", [1, 5]), ("D4", "full", [1, 7]), ("S4", "swap", [1, 6, 11, 6]),
    ("S3xS2", "swap", [1, 4, 5, 2])])
def test_a_shortest_word_leads_to_its_element(name, commands, counts):
    """So many elements need 0, 1, 2, ... commands: by swaps, the Stirling numbers."""
    task = ReplTask(Group(name), commands)
    words = task.group.shortest_words(task.alphabet)
    assert np.bincount([*map(len, words.values())]).tolist() == counts
    for element, word in words.items():
        state = np.arange(task.group.degree)
        for command in word:
            state = state[command]
        assert (state == task.group.elements[element]).all()


def quaternions(n):
    """The eight quaternions +-1, +-i, +-j, +-k, each as what multiplying by it does to them."""
    i = [2, 3, 1, 0, 6, 7, 5, 4]  # 1 -1 i -i j -j k -k: i * 1 = i, i * -1 = -i, i * i = -1, ...
    j = [4, 5, 7, 6, 1, 0, 2, 3]
    elements = {tuple(range(8))}
    while len(elements) < 8:
        elements |= {tuple(g[x] for x in h) for g in (i, j, *elements) for h in (i, j)}
    return np.array(sorted(elements))


def test_a_family_of_groups_is_one_registration(monkeypatch):
    """It is listed, drawn, multiplied with others, written and executed as all others."""
    monkeypatch.setitem(FAMILIES, "Q", Family(8, lambda n: 8, quaternions))
    group = Group("Q8xZ2")
    assert (group.order, group.degree, group.chance) == (16, 10, 0.2)
    assert {*group.index(group.draw((500,), default_rng(0)))} == {*range(16)}
    tokens, _ = ReplTask(group).sample(2, 6, 3, default_rng(0))
    for row in tokens:
        text = ReplTask(group).decode(row)
        assert session(typed_lines(text)) == text


@pytest.mark.parametrize("broken, rule", [
    ({"order": lambda n: 9}, "9 elements of 8 points"),
    ({"elements": lambda n: quaternions(n)[:3], "order": lambda n: 3}, "product of two"),
    ({"elements": lambda n: np.vstack([quaternions(n)[:-1], [0] * 8])}, "permutation"),
    ({"elements": lambda n: np.vstack([quaternions(n)[:-1]] * 2)[:8]}, "8 elements"),
    ({"elements": lambda n: np.array([[*range(8)], [1, 0, *range(2, 8)]]), "order": lambda n: 2},
     "every point must reach"),
    ({"draw": data.draw_symmetric}, "draws is not in its list"),
    ({"smallest": 9}, "needs n >= 9")])
def test_a_family_that_is_no_group_or_registered_by_half_is_refused(broken, rule, monkeypatch):
    right = {"smallest": 8, "order": lambda n: 8, "elements": quaternions}
    monkeypatch.setitem(FAMILIES, "W", Family(**right))
    assert Group("W8").order == 8
    monkeypatch.setitem(FAMILIES, "W", Family(**right | broken))
    with pytest.raises(UserError, match=rule):
        Group("W8")


# --- Tasks ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, commands", LANGUAGES)
def test_a_real_interpreter_prints_exactly_what_a_trace_shows(name, commands):
    """Re-executing the inputs of a trace gives the trace, to the letter; so does encoding and
    decoding it. The marked tokens are the printed values."""
    task = ReplTask(Group(name), commands)
    tokens, reveals = task.sample(3, 12, 3, default_rng(1))
    for row, shown in zip(tokens, reveals):
        text = task.decode(row)
        assert session(typed_lines(text)) == text
        assert task.encode(text) == row.tolist()
        printed = [line.split()[1] for line in text.splitlines() if not line.startswith(">>> ")]
        assert [task.vocab[i] for i in row[shown]] == printed


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_has_the_stated_length_and_asks_for_the_token_that_comes_next(seed):
    """T = 5n + (2n + 3) L + 11 L/S, or 7 L for swaps, one token less for inputs and targets."""
    rng = default_rng(seed)
    commands = data.COMMANDS[seed % 2]
    group = Group(f"S{rng.integers(2, 8)}")
    n, B, S = group.degree, int(rng.integers(1, 5)), int(rng.integers(1, 5))
    L = S * int(rng.integers(1, 9))
    task = ReplTask(group, commands)

    tokens, reveals = task.sample(B, L, S, default_rng(seed))
    T = 5 * n + L * (2 * n + 3 if commands == "full" else 7) + 11 * L // S
    assert tokens.shape == reveals.shape == (B, T)
    assert tokens.dtype == np.int64 and reveals.dtype == bool
    assert (reveals.sum(1) == L // S).all() and reveals[:, -2].all()
    for draw in (task.test_batch, task.training_batch):
        inputs, targets, marked, best = draw(B, L, S, default_rng(seed))
        assert (inputs == tokens[:, :-1]).all() and (targets == tokens[:, 1:]).all()
        assert (marked == reveals[:, 1:]).all() and best is None
        assert {*targets[marked]} <= {*task.value_tokens}


def commands_of(task, batch):
    """What Python does in each command ahead of the first reveal: permutations [commands, n]."""
    found = []
    for row in batch.inputs:
        first = task.decode(row).split(">>> print")[0].split(">>> ")[1:]
        for line in first[task.group.degree:]:
            variables = dict(zip(task.names, range(task.group.degree)))
            exec(line, {}, variables)
            found.append([*variables.values()])
    return np.array(found)


def test_many_variables_are_trained_on_easier_traces_and_tested_on_the_same_as_few():
    """From eight variables on, in training only: n // 4 reveals in a row, and where S = 1 commands
    that leave many variables alone. Elsewhere a command moves nearly all of them."""
    task = ReplTask(Group("S12"))
    place = np.arange(12)
    for draw, spacing, reveals, sparse in [(task.training_batch, 1, 3, True),
                                           (task.training_batch, 4, 3, False),
                                           (task.test_batch, 1, 1, False)]:
        batch = draw(48, 4, spacing, default_rng(0))
        assert (batch.reveals.sum(1) == reveals * 4 // spacing).all()
        moved = (commands_of(task, batch) != place).mean(1)
        assert (moved.mean() < 0.75 and moved.min() < 0.3) if sparse else moved.mean() > 0.85

    # Permutations that leave many variables alone would be no commands of these.
    for name, commands in (("D12", "full"), ("A8", "full"), ("S12", "swap")):
        task = ReplTask(Group(name), commands)
        trained, tested = [commands_of(task, draw(20, 1, 1, default_rng(0)))
                           for draw in (task.training_batch, task.test_batch)]
        assert (trained == tested).all()


@pytest.mark.parametrize("n", [2, 5, 7, 8, 9, 12, 16, 20, 26])
def test_the_rule_for_many_variables_leaves_room_for_their_keys(n):
    """The convolution sees one side of a command and two tokens more. From n = 8 on a head has
    2n + 8 dimensions, rounded up to eights, and at least 32; from n = 6 on the rates fall."""
    model, recipe, reveals, sparse = rule_for(n)
    assert model["conv_width"] == n + 3 and reveals == max(1, n // 4) and sparse == (n >= 8)
    if n >= 8:
        assert model["d_model"] / model["heads"] == max(32, 8 * np.ceil((2 * n + 8) / 8))
    else:
        assert {*model} == {"conv_width"}  # all else is the model's own choice
    fall = min(1, 5 / n)
    assert np.allclose([recipe["lr"], recipe["matrix_lr"]], [0.004 * fall, 0.02 * fall**0.5])


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

def test_generators_are_reproducible_and_disjoint():
    """Equal arguments give equal traces; any other seed, purpose, step or length shares none."""
    task, seen = ReplTask(Group("S5")), set()
    keys = [(purpose, *key) for purpose in data.PURPOSES for key in [(), (0,), (1,), (8, 8)]]
    for seed, key in itertools.product((0, 1), [*keys, ("test", 16, 8), ("test", 8, 16)]):
        first, again = (task.sample(16, 8, 8, generator(seed, *key))[0] for _ in range(2))
        traces = {row.tobytes() for row in first}
        assert (first == again).all() and len(traces) == 16 and not traces & seen, key
        seen |= traces


# --- What the command lines share -----------------------------------------------------------------

BAD_REQUESTS = [
    ("multiple of the spacing.*length 10, spacing 4",
     lambda: ReplTask(Group("S5")).sample(1, 10, 4, default_rng(0))),
    ("multiple of the spacing",
     lambda: WordTask(Group("S5")).training_batch(1, 8, 3, default_rng(0))),
    ("not all of '>>> a [+]= 1' is made of", lambda: ReplTask(Group("S5")).encode(">>> a += 1")),
    ("refused above 1,000,000", lambda: Group("S12").elements),
    ("transpositions", lambda: WordTask(Group("A5"), "swap")),
    ("16,385 traces of 256 commands are too many",
     lambda: data.try_stages(ReplTask(Group("S5")), [(8, 1), (256, 1)], 16_385)),
    ("multiple of the spacing",
     lambda: data.try_stages(ReplTask(Group("S5")), [(8, 1), (9, 2)], 1)),
    *[("group|small", lambda name=name: Group(name)) for name in
      ("S", "W7", "s5", "S05", "A2", "S27", "S20xS7", "", "S5 ", "S٣")]]


@pytest.mark.parametrize("rule, ask", BAD_REQUESTS)
def test_bad_requests_are_refused_with_the_rule(rule, ask):
    with pytest.raises(UserError, match=rule):
        ask()


@pytest.mark.parametrize("read, good, bad", [
    (data.number(1, 5), {"1": 1, "5": 5}, ["0", "6", "-1"]),
    (data.number(0, 2, float), {"0": 0.0, "1e-3": 0.001}, ["nan", "inf", "-inf", "2.1"]),
    (data.stages, {"8:1": [(8, 1)], "8:1,16:2": [(8, 1), (16, 2)]},
     ["8", "8:1,", "8:1;16:2", "", "-8:1", "8:1:1", "a:b", "1e3:1", "8 :1"])])
def test_the_types_of_options_read_what_they_should_and_refuse_the_rest(read, good, bad):
    assert {text: read(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)


def test_only_errors_of_the_user_become_one_line(refused):
    """UserError and OSError, and an empty option; any other ValueError is a bug, and is shown."""
    def main_of(error=None):
        def main(argv):
            parser = argparse.ArgumentParser()
            parser.add_argument("--out")
            data.parse(parser, argv)
            with data.one_line_errors(parser):
                raise error
        return main

    refused(main_of(UserError("two\n  lines")), [], "error: two lines")
    refused(main_of(FileNotFoundError("no file")), [], "error: no file")
    refused(main_of(), ["--out", ""], "--out is empty")
    with pytest.raises(ValueError, match="a bug"):
        main_of(ValueError("a bug"))([])


CLOSED_PIPE = """import os, data
def main():
    while True:
        print("y" * 1000)
read, write = os.pipe()
os.dup2(write, 1)
os.close(write)
os.close(read)
data.run(main)
"""


def test_ctrl_c_and_a_closed_pipe_end_a_program_in_silence():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        data.run(interrupted)
    assert stop.value.code == 130
    shown = subprocess.run([sys.executable, "-c", CLOSED_PIPE], cwd=ROOT, capture_output=True)
    assert shown.returncode == 1 and not shown.stderr


@pytest.mark.parametrize("commands", data.COMMANDS)
def test_the_trace_shown_to_a_reader_runs_in_python(commands, capsys, refused):
    """Line by line, with the tokens and Python's own state beside it."""
    data.main(["--group", "S3", "--length", "4", "--spacing", "2", "--commands", commands])
    first, _, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("6 states, chance 0.333; ")
    variables, lines = {}, []
    for row in rows:
        line, state, tokens = re.fullmatch(r"(.*?) +state (.*?)   tokens (.*)", row).groups()
        assert tokens.replace("|", "") == line and "|" in tokens
        lines.append(line)
        if line.startswith(">>> ") and "print" not in line:
            exec(line[4:], {}, variables)
        assert state.split() == [str(variables.get(name, ".")) for name in "abc"]
    assert session(typed_lines("\n".join(lines))).splitlines() == lines
    refused(data.main, ["--length", 3, "--spacing", 2], "multiple")
