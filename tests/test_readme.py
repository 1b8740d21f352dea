"""README tells the truth: commands parse, tables agree with results/, line counts and layout are
what they are."""

import argparse
import json
import re
import shlex

import data
import eval as evaluation
import pytest
import scan
import train
from conftest import ROOT
from models import MODELS

README = (ROOT / "README.md").read_text()
COMMANDS = sorted(set(re.findall(r"python (\w+\.py[^\n`|&]*)", README)))
RECORDS = [json.loads(line) for path in sorted((ROOT / "results").glob("*.jsonl"))
           for line in path.read_text().splitlines()]
PARSED = {"data.py": data.main, "scan.py": scan.main, "train.py": train.main,
          "eval.py": evaluation.main}


def options(command):
    """A command's script and arguments as a comparable set, without what does not change the
    result."""
    words = re.sub(r"--(seed|record|out|traces) \S+", "", command.split("#")[0])
    return frozenset(re.findall(r"\w+\.py|--[a-z-]+(?: [^-\s]\S*)?", words))


def in_percent(values):
    return " ".join(f"{100 * value:.1f}" for value in sorted(values))


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_of_the_readme_parses(command, monkeypatch):
    """The script's own parser accepts it; an option that is not there would exit with 2."""
    script, *arguments = shlex.split(command.split("#")[0])
    real = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, argv=None):
        real(parser, argv)
        raise StopIteration

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    with pytest.raises(StopIteration):
        modules = {"data.py": data, "scan.py": scan, "train.py": train, "eval.py": evaluation}
        modules[script].main(arguments)


def test_each_row_of_the_readme_is_what_results_recorded():
    """Seeds, minutes, steps and the sorted accuracies of every run of that command, to the printed
    digit."""
    rows = [line.split("|")[1:-1] for line in README.splitlines()
            if line.startswith("| `train.py --")]
    assert len(rows) >= 6
    for command, seeds, minutes, *accuracies in rows:
        runs = [run for run in RECORDS if options(run["command"]) == options(command.strip(" `"))]
        assert int(seeds) == len(runs) == len({run["seed"] for run in runs}), command
        low, high = min(run["minutes"] for run in runs), max(run["minutes"] for run in runs)
        assert minutes.strip() in (f"{low:.1f}", f"{low:.1f}-{high:.1f}"), command
        for i, cell in enumerate(accuracies):
            assert cell.strip() == in_percent(run["results"][i]["all"] for run in runs), command


def test_the_recorded_lengths_are_those_of_the_table():
    for run in RECORDS:
        if "train.py" not in run["command"]:
            continue
        lengths = [(row["length"], row["spacing"]) for row in run["results"]]
        assert lengths == [(64, 8), (128, 16), (256, 32)]


def test_what_is_said_of_snapping_and_extraction_is_what_results_recorded():
    """Every reveal right at 8,192 commands, on five seeds of S5 and one of each other; the table of
    each extracted automaton is exact; both as often as README says."""
    snapped = {(run["config"]["group"], run["config"]["commands"], run["seed"]): row
               for run in RECORDS if "--snap auto" in run["command"]
               and "--snap-every" not in run["command"]
               for row in run["results"] if row["length"] == 8192}
    assert len(snapped) == 8 and all(row["every"] == 1 for row in snapped.values())
    assert "64 of 64 traces" in README and all(row["traces"] == 64 for row in snapped.values())
    extracted = [run["extract"] for run in RECORDS if "--extract" in run["command"]]
    assert len(extracted) == 10 and all(found["isomorphic"] for found in extracted)
    reach = max(found["reach"] for found in extracted)
    assert f"at most {reach:.0%} of the way" in " ".join(README.split())


def test_line_counts_are_true():
    stated = dict(re.findall(r"\| `(\w+\.py)` \| (\d+) \|", README))
    actual = {name: len((ROOT / name).read_text().splitlines()) for name in stated}
    assert len(stated) == 5 and {name: int(count) for name, count in stated.items()} == actual


def test_every_model_is_named_and_the_layout_is_the_stated_one():
    for name in MODELS:
        assert f"`{name}`" in README
    allowed = {"README.md", "requirements.txt", "data.py", "models.py", "scan.py", "train.py",
               "eval.py", "analysis.ipynb", "tests", "results", "runs", "__pycache__"}
    assert {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} <= allowed


def test_ci_runs_the_readme_test_command():
    command = re.search(r"python -m pytest[^\n`]*", README)[0].split("#")[0].strip()
    assert command in (ROOT / ".ci" / "run").read_text()


def test_results_were_made_with_the_pinned_torch():
    pinned = re.search(r"torch==(\S+)", (ROOT / "requirements.txt").read_text())[1]
    assert RECORDS and all(run["torch"].split("+")[0] == pinned for run in RECORDS)
