"""The house of the chapters: who imports whom, what a chapter prints, and how a study is made."""

import ast
import hashlib
import importlib
import re
import sys

import pytest
import torch
from conftest import ROOT

import experiments
from data import Group, ReplTask
from experiments import RESULTS, falls_at_the_end, grid, k_of_n, make, records, span, table
from models import LinRNN
from train import Progress, Recipe

SPINE = {"data", "scan", "models", "eval", "train"}
PACKAGES = {"torch", "numpy", "tqdm", "matplotlib"}
SHARED = {"groups", "plots"}
CHAPTERS = {path.stem: path for path in (ROOT / "experiments").glob("[a-z]*.py")}
ARROWS = {("adversary", "beliefs"), ("snap", "inside"), ("programs", "snap"), ("arms", "scale")}
WITH_A_TABLE = sorted(set(CHAPTERS) - SHARED - {"play"})


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
    """Four arrows run from a chapter to another. groups reads data alone, plots nothing of ours."""
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


@pytest.mark.parametrize("name", WITH_A_TABLE)
def test_a_chapter_without_arguments_prints_numbers_and_changes_no_file(name, capsys, monkeypatch,
                                                                        tmp_path):
    monkeypatch.chdir(tmp_path)
    before = digests()
    importlib.import_module(f"experiments.{name}").main([])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) > 4 and re.search(r"\d", shown)
    assert not re.search(r"\bnan\b|\bNone of\b|\{\}", shown)
    assert digests() == before and not list(tmp_path.iterdir())


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

def tables_of(name, capsys):
    """What a chapter prints, in parts between empty lines; those of at least three lines."""
    importlib.import_module(f"experiments.{name}").main([])
    parts = capsys.readouterr().out.strip("\n").split("\n\n")
    return [part for part in parts if part.count("\n") >= 2]


@pytest.mark.parametrize("name", sorted(set(WITH_A_TABLE) - {"beliefs", "inside"}))
def test_the_page_of_records_contains_the_tables_that_a_chapter_prints(name, capsys):
    page = (RESULTS / "README.md").read_text(encoding="utf-8").replace("\n    ", "\n")
    for part in tables_of(name, capsys):
        assert part in page, f"run `python -m experiments.{name}` and paste what it prints"


def test_the_first_page_shows_the_table_of_the_arms(capsys):
    page = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n    ", "\n")
    assert any(part in page for part in tables_of("arms", capsys))


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
    "unseen certify nowhere", "play nowhere", f"programs {MODEL} nowhere.py",
    "actions --arm linrnn", "bench --record yes"]


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_done_is_refused_in_one_line(command, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, *argv = command.split()
    refused(importlib.import_module(f"experiments.{name}").main, argv)
    assert not list(tmp_path.iterdir())
