"""The house of the chapters: who imports whom, what a chapter prints, and how a study is made."""

import ast
import contextlib
import hashlib
import importlib
import io
import os
import re
import sys
import tempfile
from functools import cache

import pytest
import torch
from conftest import ROOT

import experiments
from data import Group, ReplTask
from experiments import RESULTS, falls_at_the_end, grid, k_of_n, make, records, span, table
from experiments.inside import STORED
from models import LinRNN
from train import Progress, Recipe

SPINE = {"data", "scan", "models", "eval", "train"}
PACKAGES = {"torch", "numpy", "tqdm", "matplotlib"}
SHARED = {"groups", "plots"}
CHAPTERS = {path.stem: path for path in (ROOT / "experiments").glob("[a-z]*.py")}
ARROWS = {("adversary", "beliefs"), ("snap", "inside"), ("programs", "snap"),
          ("repeats", "arms"), ("repeats", "inside"), ("repeats", "snap"), ("assign", "arms"),
          ("assign", "programs"), ("assign", "supervision"), ("play", "assign")}
WITH_A_TABLE = sorted(set(CHAPTERS) - SHARED - {"play", "one_page"})


def imports_of(path):
    """The modules that a file imports, and the names that it takes from them, behind a dot."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


# --- The house ------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", CHAPTERS)
def test_chapters_stand_side_by_side_on_the_spine(name):
    """Few arrows run from a chapter to another. groups reads data alone, plots none of ours."""
    allowed = SPINE | PACKAGES | sys.stdlib_module_names
    allowed = {"groups": {"data", "numpy"}, "plots": PACKAGES}.get(name, allowed)
    for module in imports_of(CHAPTERS[name]):
        package, other = f"{module}.".split(".")[:2]
        if package != "experiments":
            assert package in allowed, module
        elif other in CHAPTERS:
            assert name not in SHARED and (other in SHARED or (name, other) in ARROWS), module


def test_the_page_of_chapters_and_their_help_ask_the_same_questions():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    asked = dict(re.findall(r"^\| `(\w+)` \| ([^|]+\?) \|", readme, re.MULTILINE))
    assert asked.keys() == CHAPTERS.keys() - SHARED
    for name, question in asked.items():
        assert importlib.import_module(f"experiments.{name}").__doc__.startswith(question)


def digests():
    """Of all records and pictures."""
    files = sorted(path for path in RESULTS.rglob("*") if path.is_file())
    return [hashlib.sha256(path.read_bytes()).digest() for path in files]


@cache
def printed(name):
    """What a chapter prints without arguments, and the files that it has made or changed.

    `inside` has one of its five stored models here, for it asks them all anew.
    """
    before = digests()
    with (pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place,
          contextlib.redirect_stdout(io.StringIO()) as out):
        patch.setattr("experiments.inside.STORED", STORED[:1])
        patch.chdir(place)
        importlib.import_module(f"experiments.{name}").main([])
        made = os.listdir(place)
    return out.getvalue(), made + ["results"] * (digests() != before)


@pytest.mark.parametrize("name", WITH_A_TABLE)
def test_a_chapter_without_arguments_prints_numbers_and_changes_no_file(name):
    shown, changed = printed(name)
    assert len(shown.splitlines()) > 4 and re.search(r"\d", shown)
    assert not re.search(r"\bnan\b|\bNone of\b|\{\}", shown)
    assert not changed


def test_a_command_line_without_docstrings_has_its_help(capsys):
    """Under `python -OO` there is no docstring."""
    with pytest.raises(SystemExit, match="0"):
        experiments.chapter(None, None, argv=["--help"])
    assert "--help" in capsys.readouterr().out


def test_no_check_disappears_without_assertions():
    """Under `python -O` an assert is not executed. So nothing that a user relies on is one."""
    for path in [*ROOT.glob("*.py"), *CHAPTERS.values()]:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        assert not [node.lineno for node in nodes if isinstance(node, ast.Assert)], path


# --- The convention -------------------------------------------------------------------------------

def test_what_has_no_row_is_made_once_and_recorded(tmp_path, monkeypatch):
    """With its tests in order. A cell that has a row is neither trained nor changed, and one with
    `millions` ends with the step that reaches so many tokens."""
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    monkeypatch.chdir(tmp_path)
    planned, drawn = [], []

    def plan(cell):
        planned.append(cell)
        task = ReplTask(Group("S3"))
        recipe = Recipe(curriculum=[(2, 1)], last_steps=1000, batch=2, seed=cell["seed"])

        def make_model():
            model = LinRNN(len(task.vocab), 8, 2)
            drawn.append(model.embedding.weight.detach().clone())
            return model
        return task, make_model, recipe, [(4, 2), (2, 1)]

    cells = grid(millions=[0.001], seed=[3, 4])
    make("study", cells[:1], plan)
    make("study", cells, plan)
    assert planned == cells == [{"millions": 0.001, "seed": 3}, {"millions": 0.001, "seed": 4}]

    for seed, weight in zip((3, 4), drawn, strict=True):  # a cell's seed decides its weights
        torch.manual_seed(seed)
        assert torch.equal(weight, LinRNN(16, 8, 2).embedding.weight)

    rows = records("study")
    assert [row["seed"] for row in rows] == [3, 4] and not rows[0]["finished"]
    assert [result["length"] for result in rows[0]["results"]] == [4, 2]
    tokens_a_step = rows[0]["tokens"] / rows[0]["steps"]
    assert 1000 <= rows[0]["tokens"] < 1000 + tokens_a_step
    weights = sum(weight.numel() for weight in LinRNN(16, 8, 2).parameters())
    assert rows[0]["parameters"] == weights


def test_a_study_seeds_the_first_weights_of_each_cell_and_nothing_else_does(tmp_path, monkeypatch):
    """Cells of one seed begin with the same weights, whatever was made before; those of another do
    not."""
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    monkeypatch.chdir(tmp_path)
    task, first = ReplTask(Group("S3")), []

    def make_model():
        model = LinRNN(len(task.vocab), 8, 2)
        first.append(model.embedding.weight.detach().clone())
        return model

    def plan(cell):
        recipe = Recipe(curriculum=[(2, 1)], last_steps=1, batch=2, seed=cell["seed"])
        return task, make_model, recipe, [(2, 1)]

    make("study", grid(seed=[3], again=[0, 1]) + grid(seed=[4]), plan)
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])


@pytest.mark.parametrize("changes", [{"last_steps": 10}, {"stage_steps": [7, 10]}])
def test_rates_that_fall_do_so_in_the_last_stage_only(changes):
    """They rise over 50 steps, whatever the stage, and fall from all to nothing in the last one."""
    recipe = Recipe(curriculum=[(2, 1), (4, 1)], **changes)
    for step, stage_step, stage in ((0, 5, 0), (49, 0, 1), (400, 5, 1), (400, 9, 1)):
        progress = Progress(step=step, stage_step=stage_step, stage=stage)
        expected = min(1, (step + 1) / 50) * (1 - stage_step / 10 if stage else 1)
        assert abs(falls_at_the_end(recipe, progress) - expected) < 1e-12


def test_a_table_has_a_line_for_the_seeds_of_each_cell(capsys):
    rows = [{"arm": arm, "seed": seed, "x": x}
            for arm, seed, x in (("a", 0, 1.04), ("b", 0, 2.0), ("a", 1, 3.0))]
    table("title", rows, ["arm"], {
        "x": lambda rows: span([row["x"] for row in rows]),
        "big": k_of_n(lambda row: row["x"] > 1.5)})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert lines == [["arm", "x", "big"], ["a", "1.0-3.0", "1", "of", "2"],
                     ["b", "2.0", "1", "of", "1"]]


# --- The pages ------------------------------------------------------------------------------------

def tables_of(name):
    """What a chapter prints, in parts between empty lines; those of at least three lines."""
    parts = printed(name)[0].strip("\n").split("\n\n")
    return [part for part in parts if part.count("\n") >= 2]


@pytest.mark.parametrize("name", sorted(set(WITH_A_TABLE) - {"beliefs", "inside"}))
def test_the_page_of_records_contains_the_tables_that_a_chapter_prints(name):
    page = (RESULTS / "README.md").read_text(encoding="utf-8").replace("\n    ", "\n")
    for part in tables_of(name):
        assert part in page, f"run `python -m experiments.{name}` and paste what it prints"


IN_WORDS = {"linear RNN, −1 allowed": "linrnn", "the same without −1": "linrnn-beta1",
            "Transformer, two layers": "transformer", "Transformer, four layers": "transformer-4",
            "LSTM": "lstm", "linear RNN with a decay gate": "gated"}


def test_the_first_page_shows_the_numbers_of_the_arms():
    """With names in words: each row has numbers of one row of `arms`, in their order."""
    shown = [line.split() for line in printed("arms")[0].splitlines()]
    found = []
    before = None
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        for words, arm in IN_WORDS.items():
            if line.startswith(f"    {words}  "):
                arm = "gated-beta1" if before == "gated" else arm  # "the same" as the row above
                numbers = line.replace(words, "").split()
                rows = [iter(row) for row in shown if row[:1] == [arm]]
                assert any(all(number in row for number in numbers) for row in rows), line
                found.append(arm)
                before = arm
    assert len(found) == 11 and len({*found}) == 7


# --- What cannot be done is refused in one line ---------------------------------------------------

MODEL = RESULTS / "models" / "linrnn-S5-seed0"
REFUSED = [
    "arms --arm linrnn", "words train S27", "words train Q3", f"words eval {MODEL}",
    "words train S5 --resume nowhere", "words train S5 --householders 0", "words train --seed -1",
    "words train --traces 0", "words train --resume nowhere", "scale train S27",
    "scale train A5x", "scale train S8 --seed -1", "scale train S8 --traces 0",
    "beliefs train --group S6", "beliefs train --uncertain 2", "beliefs train --uncertain -0.1",
    "beliefs train --uncertain nan", "beliefs train --traces 0", "beliefs train --seed -1",
    f"beliefs eval {MODEL} --traces 0", f"words eval {MODEL} --lengths 4:3",
    "processes --group S5", f"beliefs eval {MODEL}", "snap --lengths 64:8", "snap nowhere",
    "unseen certify nowhere", "repeats nowhere", "play nowhere", f"programs {MODEL} nowhere.py",
    "actions --arm linrnn", "bench --record yes", f"inside {MODEL} --movie",
    *(f"snap {MODEL} {option}" for option in (
        "--interval 0", "--interval -1", "--traces 0", "--seed -1", "--seed 1e3", "--lengths 0:1",
        "--lengths 5:2", "--lengths 8", "--lengths 8:0")),
    *(f"unseen certify {MODEL} {option}" for option in (
        "--states 0", "--states 2.5", "--depth 0", "--depth -1", "--seed -1")),
    f"words eval {MODEL} --lengths 8:-1", "assign train --seed -1", "assign train --traces 0",
    "assign train --task floats", "assign train --resume nowhere", "assign eval nowhere",
    f"assign eval {MODEL}", f"assign eval {MODEL} --traces 0", f"assign eval {MODEL} --lengths 4:3"]


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_done_is_refused_in_one_line(command, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, *argv = command.split()
    if " --" in command and str(MODEL) in command:  # a number is refused before a run is read
        monkeypatch.setattr("eval.read_checkpoint", None)
    refused(importlib.import_module(f"experiments.{name}").main, argv)
    assert not list(tmp_path.iterdir())
