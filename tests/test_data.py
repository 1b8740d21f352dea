"""The traces are real Python, the groups are groups. Oracle: the interpreter that runs these
tests."""

import code
import contextlib
import io
import time
from collections import Counter

import numpy as np
import pytest
from data import (COMMANDS, TASKS, Group, ReplTask, WordTask, draw_commands, main, parse_stages,
                  run_commands, stream)

GROUPS = ["S2", "S3", "S4", "S5", "A3", "A4", "A5", "Z2", "Z7", "D3", "D4", "D6", "A4xZ5", "S3xS4",
          "S26", "D26"]
SMALL = ["S2", "S4", "A4", "A5", "Z7", "D3", "D6", "A4xZ5", "Z2xS3xD3"]
PAIRS = [(name, commands) for name in GROUPS for commands in COMMANDS
         if commands == "full" or all(kind == "S" for kind, _ in Group(name).factors)]


def session(inputs):
    """What an interactive Python shows: each input after its prompt, then what it prints."""
    interpreter, shown = code.InteractiveInterpreter(), []
    for line in inputs:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert interpreter.runsource(line, symbol="single") is False, line
        shown.append(f">>> {line}\n{out.getvalue()}")
    return "".join(shown)


@pytest.mark.parametrize("name, commands", PAIRS)
def test_a_real_interpreter_prints_exactly_what_a_trace_shows(name, commands):
    """Re-executing the inputs of a trace gives the trace, to the letter; so does encoding and
    decoding it."""
    task = ReplTask(Group(name), commands)
    tokens, reveals = task.sample(3, 12, 3, np.random.default_rng(1))
    for row, shown in zip(tokens, reveals):
        text = task.decode(row)
        assert session([line[4:] for line in text.splitlines() if line.startswith(">>> ")]) == text
        assert task.encode(text) == row.tolist()
        assert [task.vocab[i] for i in row[shown]] == [line.split()[1] for line in text.splitlines()
                                                      if not line.startswith(">>> ")]


def test_no_command_is_missing_from_the_executed_traces():
    """All 120 full commands and all 10 swaps of S5, each executed once from a scrambled state."""
    for commands in COMMANDS:
        task = ReplTask(Group("S5"), commands)
        alphabet = task.group.elements if commands == "full" else task.group.transpositions
        first = alphabet[np.random.default_rng(0).permutation(len(alphabet))]
        lines = np.stack([first, alphabet], 1).repeat(5, 0)
        tokens, _ = task.write(lines, np.tile(np.arange(5), len(alphabet))[:, None])
        for row in tokens[::7]:
            text = task.decode(row)
            inputs = [line[4:] for line in text.splitlines() if line.startswith(">>> ")]
            assert session(inputs) == text


@pytest.mark.parametrize("name", SMALL)
def test_the_elements_form_a_group_of_the_stated_order(name):
    """Distinct, closed, associative, identity first, an inverse each."""
    group = Group(name)
    assert group.elements.shape == (group.order, group.degree)
    assert len(set(map(tuple, group.elements))) == group.order
    everyone = np.arange(group.order)
    table = group.compose(everyone[:, None], everyone)
    assert (np.sort(table, 0) == everyone[:, None]).all() and (np.sort(table, 1) == everyone).all()
    assert (table[0] == everyone).all() and (table[:, 0] == everyone).all()
    f, g, h = np.random.default_rng(0).integers(group.order, size=(3, 500))
    assert (table[table[f, g], h] == table[f, table[g, h]]).all()


@pytest.mark.parametrize("name", ["S5", "A4xZ5"])
def test_compose_means_first_g_then_h(name):
    """Executing the command g and then the command h, on plain lists, is the command
    compose(g, h)."""
    group, rng = Group(name), np.random.default_rng(2)
    for g, h in rng.integers(group.order, size=(200, 2)):
        state = list("abcdefghi")[:group.degree]
        after_g = [state[i] for i in group.elements[g]]
        after_both = [after_g[i] for i in group.elements[h]]
        assert after_both == [state[i] for i in group.elements[group.compose(g, h)]]


def test_each_family_is_what_its_name_says():
    """A: determinant +1. Z: shifts. D: neighbours on the circle stay neighbours. S: everything."""
    assert all(round(np.linalg.det(np.eye(5)[g])) == 1 for g in Group("A5").elements)
    assert {tuple(np.diff(g) % 7) for g in Group("Z7").elements} == {(1,) * 6}
    assert {tuple(np.diff(g) % 6) for g in Group("D6").elements} == {(1,) * 5, (5,) * 5}
    assert [Group(name).order for name in ("S5", "A5", "D6", "A4xZ5")] == [120, 60, 12, 60]


@pytest.mark.parametrize("name", SMALL)
def test_draws_are_uniform_over_the_group(name):
    """Every element within six standard deviations of its expected count, and none from outside."""
    group = Group(name)
    drawn = group.draw((200 * group.order,), np.random.default_rng(3))
    numbers = group.index(drawn)
    assert (group.elements[numbers] == drawn).all()
    counts = np.bincount(numbers, minlength=group.order)
    assert np.abs(counts - 200).max() < 6 * 200**0.5


def test_words_are_labelled_with_the_running_product():
    """Label t = compose(label t-1, token t), starting from the identity."""
    for commands in COMMANDS:
        task = WordTask(Group("S4"), commands)
        inputs, targets, reveals = task.training_batch(4, 11, 1, np.random.default_rng(4))
        assert reveals.all() and targets.dtype == np.int64
        product = np.zeros(4, int)
        for t in range(11):
            product = task.group.compose(product, inputs[:, t])
            assert (product == targets[:, t]).all()


@pytest.mark.parametrize("commands, per_command", [("full", 13), ("swap", 7)])
def test_a_trace_has_the_stated_number_of_tokens_and_reveals(commands, per_command):
    """T = 5n + (2n + 3) L + 11 L/S, or 7 L for swaps; the last token but one is the last value."""
    tokens, reveals = ReplTask(Group("S5"), commands).sample(2, 64, 8, np.random.default_rng(5))
    assert tokens.shape == reveals.shape == (2, 25 + per_command * 64 + 11 * 8)
    assert tokens.dtype == np.int64 and reveals.dtype == bool
    assert (reveals.sum(1) == 8).all() and reveals[:, -2].all()


@pytest.mark.parametrize("commands", COMMANDS)
def test_training_never_shows_a_held_out_pair_and_the_test_shows_no_other(commands):
    """Read from the text: the pairs of consecutive commands, reveals between them or not, fall into
    two sets that share nothing and are complete, a tenth of them held out; no command is rare."""
    task = ReplTask(Group("S5"), commands, hold_out=0.1)
    count = len(task.pairs.alphabet)
    pairs = {}
    for held_out in (False, True):
        tokens, _ = task.sample(600, 400, 5, np.random.default_rng(held_out), held_out)
        texts = [task.decode(row).splitlines() for row in tokens]
        lines = [[line for line in text if ", " in line and "print" not in line] for text in texts]
        pairs[held_out] = {pair for row in lines for pair in zip(row, row[1:])}
        frequency = Counter(line for row in lines for line in row)
        assert len(frequency) == count
        assert max(abs(seen * count / 240_000 - 1) for seen in frequency.values()) < 0.2
    assert not pairs[False] & pairs[True]
    assert len(pairs[False]) == 9 * len(pairs[True]) == 0.9 * count**2


def test_a_task_with_held_out_pairs_trains_on_the_others_and_is_tested_on_them():
    task = ReplTask(Group("S3"), hold_out=1 / 6)
    for make, held_out in [(task.training_batch, False), (task.test_batch, True)]:
        inputs, _, _ = make(8, 6, 2, np.random.default_rng(0))
        tokens, _ = task.sample(8, 6, 2, np.random.default_rng(0), held_out)
        assert (inputs == tokens[:, :-1]).all()


def test_streams_are_reproducible_and_disjoint():
    """Equal arguments give equal traces; any other seed, purpose, step or length shares none."""
    task, seen = ReplTask(Group("S5")), set()
    keys = [(seed, *key) for seed in (0, 1) for key in
            [("train", 0), ("train", 1), ("valid", 0), ("test", 8, 8), ("test", 16, 8),
             ("test", 8, 16)]]
    for key in keys:
        traces = {row.tobytes() for row in task.sample(64, 8, 8, stream(*key))[0]}
        assert traces == {row.tobytes() for row in task.sample(64, 8, 8, stream(*key))[0]}
        assert len(traces) == 64 and not traces & seen
        seen |= traces


def test_a_training_batch_takes_well_under_50_ms():
    """32 traces at (64,8), best of five."""
    task, best = ReplTask(Group("S5")), 1.0
    for step in range(5):
        start = time.perf_counter()
        task.sample(32, 64, 8, stream(0, "train", step))
        best = min(best, time.perf_counter() - start)
    assert best < 0.05


def test_chance_is_what_guessing_reaches():
    """Answering a fixed value of the variable's orbit is right as often as .chance says."""
    for name in ("S5", "A4xZ5"):
        group = Group(name)
        hits = (group.draw((20000,), np.random.default_rng(6)) == np.arange(group.degree)).mean()
        assert abs(hits - group.chance) < 0.01


def test_run_commands_goes_on_from_a_given_state():
    """Splitting the commands and passing the state on changes nothing."""
    commands = draw_commands(Group("S5"), "full", (3, 9), np.random.default_rng(7))
    whole = run_commands(commands)
    assert (run_commands(commands[:, 4:], whole[:, 3]) == whole[:, 4:]).all()


@pytest.mark.parametrize("name", ["S", "Q8", "S5x", "s5", "S0", "A2", "D2", "S27", "S20xS7", ""])
def test_a_name_that_is_no_group_is_refused(name):
    with pytest.raises(ValueError, match="group|small"):
        Group(name)


def test_bad_requests_are_refused_with_the_rule(refused):
    with pytest.raises(ValueError, match="multiple of the spacing.*length 10, spacing 4"):
        ReplTask(Group("S5")).sample(1, 10, 4, np.random.default_rng(0))
    with pytest.raises(ValueError, match="spacing must be 1"):
        WordTask(Group("S5")).training_batch(1, 8, 2, np.random.default_rng(0))
    with pytest.raises(ValueError, match="no symbol of S5 traces begins at character 6"):
        ReplTask(Group("S5")).encode(">>> a += 1")
    with pytest.raises(ValueError, match="refused"):
        Group("S12").elements
    for task in TASKS.values():
        with pytest.raises(ValueError, match="transpositions"):
            task(Group("A5"), "swap")
    refused(main, ["--group", "Q8"], "Q8", "expected S<n>")
    refused(main, ["--length", 3, "--spacing", 2], "multiple")


def test_the_sample_shown_to_a_reader_is_a_trace(capsys):
    main(["--group", "S3", "--length", "2"])
    assert ">>> a, b, c = " in capsys.readouterr().out


def test_a_curriculum_is_read_as_written():
    assert parse_stages("8:1,16:2", ReplTask) == [[8, 1], [16, 2]]
    for text in ("8", "8:1,", "8:1;16:2", "", "-8:1"):
        with pytest.raises(ValueError, match="expected LENGTH:SPACING"):
            parse_stages(text, ReplTask)
