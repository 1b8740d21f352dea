"""The house of the chapters: who imports whom, what a chapter prints, and how a study is made."""

import ast
import hashlib
import importlib
import re
import sys

import pytest
import torch
from conftest import ROOT
from torch import nn

import experiments
from data import Batch, Group, ReplTask
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
    """The modules that a file imports; of the package `experiments` the names behind the dot."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "experiments":
            found |= {f"experiments.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


# --- The house ------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", CHAPTERS)
def test_chapters_stand_side_by_side_on_the_spine(name):
    """Four arrows run from a chapter to another. groups reads data alone, plots nothing of ours."""
    allowed = SPINE | PACKAGES | sys.stdlib_module_names
    if name == "groups":
        allowed = {"data", "numpy"}
    if name == "plots":
        allowed = PACKAGES
    for module in imports_of(CHAPTERS[name]):
        package, _, other = module.partition(".")
        if package != "experiments":
            assert package in allowed, module
        elif other in CHAPTERS and other not in SHARED:
            assert (name, other) in ARROWS, module
        else:
            assert name not in SHARED, module


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

def test_a_grid_has_every_combination_once_the_last_key_fastest():
    assert grid(arm=["a", "b"], seed=range(2)) == [
        {"arm": "a", "seed": 0}, {"arm": "a", "seed": 1},
        {"arm": "b", "seed": 0}, {"arm": "b", "seed": 1}]


def test_what_has_no_row_is_made_once_and_recorded(tmp_path, monkeypatch):
    """With its tests in order. A cell that has a row is neither trained nor changed."""
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    monkeypatch.chdir(tmp_path)
    planned = []

    def plan(cell):
        planned.append(cell)
        task = ReplTask(Group("S3"))
        recipe = Recipe(curriculum=[(2, 1)], last_steps=2, batch=2, seed=cell["seed"])
        return task, lambda: LinRNN(len(task.vocab), 8, 2), recipe, [(4, 2), (2, 1)]

    cells = grid(seed=[3, 4])
    make("study", cells[:1], plan)
    make("study", cells, plan)
    assert planned == cells

    rows = records("study")
    assert [row["seed"] for row in rows] == [3, 4] and rows[0]["steps"] == 2
    assert [result["length"] for result in rows[0]["results"]] == [4, 2]
    torch.manual_seed(3)
    weights = sum(weight.numel() for weight in LinRNN(16, 8, 2).parameters())
    assert rows[0]["parameters"] == weights and rows[0]["finished"]


def test_a_cell_ends_at_its_millions_of_tokens(tmp_path, monkeypatch):
    class Constant(nn.Module):
        """A model with one weight, which every logit is."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, tokens):
            return self.weight.expand(*tokens.shape, 2)

    class Zeros:
        vocab = ["0", "1"]
        chance = 1

        def training_batch(self, batch, length, spacing, rng):
            zeros = rng.integers(1, size=(batch, 50))
            return Batch(zeros, zeros, zeros == 0)

    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    monkeypatch.chdir(tmp_path)
    recipe = Recipe(curriculum=[(2, 1)], last_steps=1000, batch=2)
    make("study", [{"millions": 0.00035}], lambda cell: (Zeros(), Constant, recipe, []))
    row, = records("study")
    assert row["tokens"] == 400 and not row["finished"]


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

MODEL = str(RESULTS / "models" / "linrnn-S5-seed0")
REFUSED = [
    "arms --arm linrnn", "words train S27", "words train Q3", "words eval " + MODEL,
    "words train S5 --resume nowhere", "scale train S27", "scale train A5x",
    "beliefs train --group S6", "beliefs eval " + MODEL, "snap --lengths 64:8", "snap nowhere", "unseen certify nowhere",
    "play nowhere", "programs " + MODEL + " nowhere.py", "actions --arm linrnn", "bench --record yes"]


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_done_is_refused_in_one_line(command, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, *argv = command.split()
    refused(importlib.import_module(f"experiments.{name}").main, argv)
    assert not list(tmp_path.iterdir())
