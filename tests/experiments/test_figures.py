"""The pictures can be read, titles are findings, and the records are what they claim to be."""

import json
import re

import numpy as np
import pytest
import torch
from conftest import ROOT
from matplotlib.text import Text

from experiments import figures
from experiments.figures import records, setting

RESULTS = ROOT / "experiments" / "results"
NAMES = sorted(path.stem for path in RESULTS.glob("*.jsonl"))
HEADER = ["file", "runs", "seeds", "commits", "threads", "hours", "made by", "shown in"]


def full_S5(run):
    return (setting(run, "group"), setting(run, "commands")) == ("S5", "full")


def drawn(name):
    """The figure of this name, from the committed records or from made-up states and keys."""
    if name == "beta":
        return figures.beta(np.linspace(0, 2, 65).reshape(5, 13), [f"seed {i}" for i in range(5)])
    if name == "keys":
        return figures.keys({f"seed {i}": torch.randn(5, 5, 16) for i in range(6)})
    beliefs = [run for run in records("adversary") if run["uncertain"] == 0.25
               and run["shown"] == "one" and figures.arm(run) in figures.MORE_COLOURS]
    title = "A sentence of seven words or more stands here"
    easier = [("S3", "swap"), ("S3", "full"), ("S5", "swap")]
    return {"tracking": lambda: figures.tracking(title, figures.arm_runs(("S5", "full"))),
            "easier": lambda: figures.tracking(title, figures.arm_runs(*easier)),
            "learning": lambda: figures.learning(figures.arm_runs(("S5", "full"))),
            "spacing": lambda: figures.spacing(title, records("arms_spacing")),
            "ladder": lambda: figures.ladder(records("ladder")),
            "beliefs": lambda: figures.beliefs(title, beliefs, "random", "last_steps"),
            "cycles": lambda: figures.beliefs(title, beliefs, "adversarial", "cycles"),
            "householders": lambda: figures.householders(records("word"), records("word_long")),
            "drift": lambda: figures.drift(records("length"), filter(full_S5, records("extract"))),
            "snapping": lambda: figures.snapping(filter(full_S5, records("snap"))),
            "curves": lambda: figures.curves("Three curves that end at one place keep their names "
                                             "apart", {c: ([1, 2], [[0, 0.2]], c) for c in "rgb"},
                                             chance=0.2, ylim=(0, 1))}[name]()


FIGURES = ["beta", "keys", "beliefs", "cycles", "tracking", "easier", "learning", "spacing",
           "ladder", "householders", "drift", "snapping", "curves"]


@pytest.mark.parametrize("name", FIGURES)
def test_a_title_is_a_sentence_and_no_two_texts_overlap(name):
    """Drawn as the notebook shows it, 7 to 9 inches wide, with letters of 9 points or more."""
    figure = drawn(name)
    assert 7 <= figure.get_figwidth() <= 9
    assert len(figure.get_suptitle().split()) >= 7
    figure.draw_without_rendering()
    ticks = {label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)
             for tick in axis.get_major_ticks() + axis.get_minor_ticks()
             for label in (tick.label1, tick.label2)}
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text not in ticks]
    assert min(text.get_fontsize() for text in texts) >= 9
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    width = figure.bbox.width
    for i, (text, box) in enumerate(boxes):
        assert -1 <= box.x0 and box.x1 <= width + 1, f"{text!r} is cut off"
        for other, second in boxes[:i]:
            apart = max(box.x0 - second.x1, second.x0 - box.x1, box.y0 - second.y1,
                        second.y0 - box.y1)
            assert apart > -1, f"{text!r} lies on {other!r}"


def test_the_same_model_has_the_same_colour_everywhere():
    assert len(set(figures.MORE_COLOURS.values())) == len(figures.MORE_COLOURS) == 5
    for name, colours in [("tracking", figures.COLOURS), ("beliefs", figures.MORE_COLOURS)]:
        labels = {text.get_text(): text.get_color() for axes in drawn(name).axes
                  for text in axes.texts}
        assert {arm: labels[arm] for arm in colours} == colours


def test_an_option_is_read_from_the_config_or_from_the_command():
    run = {"command": "python train.py --model linrnn --beta-max 1 --lr 1e-3"}
    assert setting(run, "lr") == "1e-3" and setting(run, "group", "S5") == "S5"
    run["config"] = {"model": "linrnn", "lr": 0.01, "options": {"beta_max": 2.0}}
    assert setting(run, "lr") == 0.01 and setting(run, "beta_max") == 2.0
    assert figures.arm({"arm": "linrnn-beta1"}) == "linear RNN, β ≤ 1"


def test_the_command_writes_the_two_pictures_of_the_readme(monkeypatch, tmp_path):
    monkeypatch.setattr(figures.heads, "tracking_heads", lambda model, task: [(1, 2)])
    monkeypatch.setattr(figures.inside, "beta_by_place", lambda model, task: torch.ones(1, 4, 13))
    figures.main(["--out", str(tmp_path / "new")])
    for name in ("tracking.png", "beta.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")
        assert (RESULTS / "figures" / name).exists()


# --- The records ----------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_records_name_no_machine_and_a_committed_state(name):
    """A command is one that a reader can repeat; a result from edited files would be none."""
    for run in records(name):
        assert not re.search(r"(^|[ =])[/~]", run.get("command", "")), run["command"]
        assert run["commit"] and not run["commit"].endswith("-dirty"), run


@pytest.mark.parametrize("name", NAMES)
def test_the_keys_of_the_rows_are_those_of_eval(name):
    for run in records(name):
        for row in run.get("results", []):
            assert not [key for key in row if key.startswith("every")]
            if "all" in row:
                assert row["perfect_low"] <= row["perfect"] <= row["perfect_high"] + 1e-9
                assert row["perfect"] <= min(row["all"], row["final"])


def table_rows():
    lines = (RESULTS / "README.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [dict(zip(HEADER, row)) for row in rows if len(row) == len(HEADER)][2:]


def test_the_table_of_the_records_is_true():
    """Each file with its runs, seeds, commits, threads and hours."""
    rows = {row["file"].strip("`"): row for row in table_rows()}
    assert sorted(rows) == NAMES
    for name, row in rows.items():
        runs = records(name)
        assert int(row["runs"]) == len(runs), name
        assert sorted(row["commits"].split()) == sorted({run["commit"] for run in runs}), name
        assert row["threads"] == ", ".join(map(str, sorted({run["threads"] for run in runs}))), name
        minutes = sum(run.get("minutes", 0) for run in runs)
        assert row["hours"] == ("-" if name == "bench" else f"{minutes / 60:.2f}"), name
        seeds = sorted({run["seed"] for run in runs if "seed" in run})
        span = f"{seeds[0]}-{seeds[-1]}" if seeds[2:] or seeds[1:] == [1] else ", ".join(
            map(str, seeds))
        assert row["seeds"] == (span or "-"), name
    total = sum(run.get("minutes", 0) for name in NAMES for run in records(name)) / 60
    assert f"{total:.1f} in all" in (RESULTS / "README.md").read_text()


def test_the_commands_that_took_over_are_there():
    """Chapter and option of each `python -m experiments.NAME --option` in README of the results."""
    text = (RESULTS / "README.md").read_text()
    assert max(map(len, text.splitlines())) <= 120 and len(text.splitlines()) <= 150
    commands = re.findall(r"`python -m experiments\.(\w+)([^`]*)`((?:, `--[\w-]+`)*)", text)
    assert len(commands) >= 7
    for chapter, *options in commands:
        source = (ROOT / "experiments" / f"{chapter}.py").read_text()
        for option in re.findall(r"--[\w-]+", " ".join(options)):
            assert f'"{option}"' in source, (chapter, option)


def test_the_stored_models_are_the_recorded_runs():
    """results/models holds the runs of s5.jsonl: as many steps, the same seed."""
    steps = {run["seed"]: run["steps"] for run in records("s5") if "swap" not in run["command"]}
    for seed, count in steps.items():
        folder = RESULTS / f"models/linrnn-S5-seed{seed}"
        checkpoint = torch.load(folder / "model.pt", weights_only=True)
        assert checkpoint["progress"]["step"] == count
        assert json.loads((folder / "config.json").read_text())["seed"] == seed
