"""Copies and sums: the layer, both tasks with Python as the judge, the study and the commands."""

import io
import json
import re

import numpy as np
import pytest
import torch
from conftest import session, typed_lines

from experiments import RESULTS, assign, play, records
from experiments.assign import (FUNCTIONS, HeldBlock, InvertibleTask, NumberTask, ReadKeyBlock,
                                ShuffleTask, best_of_last_line, by_copies, clues, is_copy, sessions)
from models import DeltaBlock


# --- The layer ------------------------------------------------------------------------------------

def test_the_block_begins_as_the_delta_rule_and_reads_elsewhere_once_it_learns():
    x = torch.randn(2, 11, 12).double()
    block = ReadKeyBlock(12, 3).double()
    plain = DeltaBlock(12, 3, 2.0, 1).double()
    plain.load_state_dict(block.state_dict(), strict=False)
    out, state = block(x)
    assert (out - plain(x)[0]).abs().max() < 1e-10 and (state - plain(x)[1]).abs().max() < 1e-10

    out.square().sum().backward()
    assert block.read.weight.grad.abs().max() > 0


@pytest.mark.parametrize("block_class", [ReadKeyBlock, HeldBlock])
def test_a_step_writes_along_one_key_and_reads_another(block_class):
    """By explicit matrices, S <- (1 - b r^T) S + b v^T. Held, no eigenvalue 1 - b.r leaves [0, 1];
    else some do."""
    block = block_class(12, 3).double()
    torch.nn.init.normal_(block.read.weight)
    x = torch.randn(2, 11, 12).double()
    q, r, b, v = block.four_inputs(x)
    assert (r.norm(dim=-1) - 1).abs().max() < 1e-10 and (r * b / b.norm(dim=-1, keepdim=True)
                                                         ).sum(-1).abs().min() < 0.9
    eigenvalues = 1 - (b * r).sum(-1)
    held = eigenvalues.min() > -1e-10 and eigenvalues.max() < 1 + 1e-10
    assert held == (block_class is HeldBlock) and b.norm(dim=-1).max() <= 2 + 1e-10

    S = torch.zeros(2, 3, 4, 4).double()
    for t in range(11):
        step = torch.eye(4) - b[:, :, t, :, None] * r[:, :, t, None, :]
        S = step @ S + b[:, :, t, :, None] * v[:, :, t, None, :]
    assert (block(x)[1] - S).abs().max() < 1e-10


# --- Both tasks -----------------------------------------------------------------------------------

@pytest.mark.parametrize("task_class", assign.TASKS.values())
def test_python_shows_what_a_trace_shows_and_every_revealed_value_is_marked(task_class):
    task = task_class()
    batch = task.test_batch(40, 12, 3, np.random.default_rng(4))
    kinds = set()
    for inputs, targets, reveals in zip(*batch):
        text = task.decode([*inputs, targets[-1]])
        trace = text.rstrip("\n") + "\n"
        assert set(text[len(trace):]) <= {"\n"} and session(typed_lines(trace)) == trace
        answers = [line.split()[1] for line in trace.splitlines() if line[0] != ">"]
        assert [task.vocab[token] for token in targets[reveals]] == answers
        kinds |= {re.sub("[abcde]", "x", re.sub(r"-?\d", "n", line)) for line in typed_lines(trace)}
    numbers = {"x = x", "x = n", "x = x + x", "x = x - x", "x = n - x", "x = x - n", "x = x + n",
               "x = n + x"}
    assert task_class is ShuffleTask or numbers <= kinds
    assert task.encode(text) == [*inputs, targets[-1]]


def test_a_third_of_the_lines_show_a_name_twice_and_half_of_them_a_value():
    """Of the copies some are hit by the value. A copy onto itself is none: 1 in 5."""
    commands = ShuffleTask().draw((100, 1000), np.random.default_rng(5)).reshape(-1, 5)
    assert abs((commands >= 5).any(1).mean() - 0.5) < 0.01
    assert abs(is_copy(commands).mean() - 0.4 * (1 - 0.5 * 2 / 5)) < 0.01


def test_a_quarter_of_the_batches_of_shuffles_asks_after_every_line():
    """With as many prints as the others. What is tested is the length that was named."""
    task, rng = ShuffleTask(), np.random.default_rng(7)
    lines = [task.decode(task.training_batch(1, 8, 4, rng).inputs[0]).count(">>> a, b")
             for _ in range(400)]
    assert {*lines} == {2, 8} and abs(lines.count(2) / 400 - 0.25) < 0.07
    tested = task.test_batch(1, 8, 4, rng)
    assert task.decode(tested.inputs[0]).count(">>> a, b") == 8 and tested.reveals.sum() == 2


@pytest.mark.parametrize("task_class", assign.TASKS.values())
def test_the_guess_beside_the_scores_is_that_of_the_best_reader_of_the_last_line(task_class):
    """Of a shuffle it knows one value in ten, and one in five of the others by luck."""
    task = task_class()
    best = best_of_last_line(task)
    inputs, targets, _ = task.test_batch(2000, 32, 1, np.random.default_rng(6))
    right = []
    for row in np.hstack([inputs, targets[:, -1:]]):
        right += [best.get(clue) == value for clue, value in clues(task, task.decode(row))[16:]]
    assert abs(np.mean(right) - task.chance) < 0.012

    if task_class is ShuffleTask:
        assert task.chance == pytest.approx(0.1 + 0.9 / 5)
        assert best[task.clue("a, b, c, d, e = c, 4, b, c, d", "b")] == "4"
    else:
        assert best[task.clue("b = -4", "b")] == "-4" and best[task.clue("b = c - c", "b")] == "0"


# --- Real functions -------------------------------------------------------------------------------

@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_straight_lines_of_a_function_are_lines_of_the_task(function):
    """Twenty different ones. Python gives what the function returns."""
    task = NumberTask()
    found = sessions(function)
    assert len({tuple(lines) for lines, _, _ in found}) == len(found) == 20
    for lines, asked, value in found:
        python = {}
        for line in lines:
            exec(line, {}, python)
            assert all(-9 <= number <= 9 for number in python.values())
            assert re.fullmatch(r"[abc] = (-?\d|[abc]|([abc] [+-] \d)|(\d [+-] [abc])|"
                                r"([abc] [+-] [abc]))", line), line
        assert str(python[asked]) == value
        task.encode("".join(f">>> {line}\n" for line in lines))


# --- The study ------------------------------------------------------------------------------------

def test_an_arm_is_studied_by_its_best_rates_and_all_arms_get_the_same_steps(monkeypatch):
    """The rates of another arm do not count, even if they are better."""
    rows = [{"arm": arm, "factor": factor, "results": [{"all": share}, {"all": 0.5}]}
            for arm, factor, share in [("delta rule", 0.5, 0.6), ("delta rule", 2, 0.7),
                                       ("delta rule", 1, 0.3), ("LSTM", 1, 0.9)]]
    monkeypatch.setattr(assign, "records",
                        lambda name, **of: [row for row in rows if of.items() <= row.items()])
    cells = [{"task": task, "arm": arm, "seed": 7}
             for task in assign.STEPS for arm in ("delta rule", "LSTM")]
    recipes = [assign.plan(cell)[2] for cell in cells]
    assert [(recipe.optimizer, recipe.lr, recipe.matrix_lr) for recipe in recipes] == 2 * [
        ("muon", 4e-3, 0.02), ("adamw", 4e-3, 4e-3)]
    assert [recipe.stage_steps for recipe in recipes[::2]] == [*assign.STEPS.values()]
    assert recipes[0].stage_steps == recipes[1].stage_steps and recipes[0].seed == 7
    assert assign.plan_rates(cells[0] | {"factor": 1})[2].stage_steps[:-1] == \
        recipes[0].stage_steps[:-1]


def test_a_line_with_an_inverse_has_one_value_ahead_of_it_for_each_value_after_it():
    """Undone from the last line on, a program ends at its first values."""
    for seed in range(50):
        first, *lines = InvertibleTask().program(6, np.random.default_rng(seed))
        values = {}
        exec(first, {}, values)
        after = dict(values)
        exec("\n".join(lines), {}, after)
        for line in reversed(lines):
            target, expression = line.split(" = ")
            before = [x for x in range(-40, 41)
                      if eval(expression, {}, after | {target: x}) == after[target]]
            assert len(before) == 1, line
            after[target] = before[0]
        assert after == values


# --- The commands ---------------------------------------------------------------------------------

SMALL = {"curriculum": [(2, 1), (4, 2)], "stage_steps": [2, 2], "batch": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each task that is over in a second: {task: its folder}. It learns nothing."""
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assign, "RECIPES", dict.fromkeys(assign.TASKS, SMALL))
        for task in assign.TASKS:
            folders[task] = tmp_path_factory.mktemp("runs") / task
            assign.main(["train", "--task", task, "--seed", "3", "--out", str(folders[task]),
                         "--lengths", "4:2", "--traces", "4"])
    return folders


def test_the_delta_rule_is_trained_by_the_same_recipe(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(assign, "RECIPES", {"shuffles": SMALL})
    assign.main(["train", "--task", "shuffles", "--model", "linrnn", "--out", str(tmp_path / "run"),
                 "--lengths", "4:2", "--traces", "4"])
    blocks = [[type(block) for block in assign.load(run)[1].blocks]
              for run in (tmp_path / "run", runs["shuffles"])]
    assert blocks[0].count(DeltaBlock) == blocks[1].count(ReadKeyBlock) == 1
    assert ReadKeyBlock not in blocks[0]


@pytest.mark.parametrize("task", assign.TASKS)
def test_a_run_is_read_back_by_eval_and_by_play(task, runs, capsys, monkeypatch):
    result = json.loads((runs[task] / "results.json").read_text())
    assert result["config"]["seed"] == 3 and result["steps"] == 4
    capsys.readouterr()
    assign.main(["eval", str(runs[task]), "--lengths", "4:2", "--traces", "4", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["results"] == result["results"]

    monkeypatch.setattr("sys.stdin", io.StringIO("a = b\nprint('a', a)\n"))
    play.main([str(runs[task])])
    assert "Python: 2; 1 commands" in capsys.readouterr().out


@pytest.mark.parametrize("task, typed, shown", [
    ("integers", "a = 9; a = a + b; print('a', a)", ["from -9 to 9", "Python: 9; 1 commands"]),
    ("integers", "c=a-2; a, b = b, a; a = b * 2; print('c', c)", ["c = a - 2\n", "Python: -1; 1"]),
    ("shuffles", "b, a = 4, c; f = a; print('b', b)", ["a, b, c, d, e = c, 4, c, d, e", "4; 1"])])
def test_a_session_takes_what_a_task_can_say(task, typed, shown, runs, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed.replace("; ", "\n")))
    play.main([str(runs[task])])
    out = capsys.readouterr().out
    assert all(text in out for text in shown), out


def test_what_is_no_run_of_these_tasks_is_refused(refused):
    model = RESULTS / "models" / "linrnn-S5-seed0"
    refused(assign.main, ["eval", model], "use the command that made it")
    refused(assign.main, ["train", "--task", "floats"])
    refused(assign.main, ["train", "--seed", "-1"])


def test_lines_that_copy_are_counted():
    commands = np.array([[0, 1, 2, 3, 4], [0, 0, 2, 3, 4], [5, 1, 2, 3, 5], [5, 1, 1, 6, 0]])
    assert is_copy(commands).tolist() == [False, True, False, True]

    class Blind(torch.nn.Module):
        def forward(self, tokens):
            logits = torch.zeros(*tokens.shape, len(task.vocab))
            logits[..., task.value_tokens[2]] = 1
            return logits

    task = ShuffleTask()
    counts = np.array(by_copies(Blind(), task, length=4, traces=1000))
    assert counts.shape == (5, 2) and counts[:, 1].sum() == 1000
    assert abs(counts[:, 0].sum() / 1000 - 0.2) < 0.05


def test_each_cell_has_one_record_and_each_record_its_cell():
    for name, cells in (("assign", assign.CELLS), ("assign_goals", assign.GOALS),
                        ("assign_rates", assign.RATE_CELLS), ("assign_told", assign.TOLD_CELLS)):
        assert {len(records(name, **cell)) for cell in cells} == {1}
        assert len(records(name)) == len(cells)
