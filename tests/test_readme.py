"""README tells the truth: commands parse, tables agree with results/, line counts and layout are
what they are."""

import argparse
import json
import re
import shlex
from statistics import median

import data
import eval as evaluation
import pytest
import scan
import train
from conftest import ROOT
from models import MODELS

README = (ROOT / "README.md").read_text()
COMMANDS = sorted(set(re.findall(r"python (\w+\.py[^\n`|&]*)", README)))
LINES = [json.loads(line) for path in sorted((ROOT / "results").glob("*.jsonl"))
         for line in path.read_text().splitlines()]
RECORDS = [line for line in LINES if "command" in line]  # runs of train.py
PARSED = {"data.py": data.main, "scan.py": scan.main, "train.py": train.main,
          "eval.py": evaluation.main}


def options(command):
    """A command's script and arguments as a comparable set, without what does not change the
    result."""
    words = re.sub(r"--(seed|record|out|traces|test-lengths) \S+", "", command.split("#")[0])
    return frozenset(re.findall(r"\w+\.py|--[a-z-]+(?: [^-\s]\S*)?", words))


def in_percent(values):
    """Median (least-greatest), or the one value."""
    percent = [100 * value for value in values]
    return f"{median(percent):.1f}" + (f" ({min(percent):.1f}-{max(percent):.1f})"
                                       if len(percent) > 1 else "")


def at(run, length, spacing):
    return next(row for row in run["results"]
                if (row["length"], row["spacing"]) == (length, spacing))


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
    """Seeds solved, minutes and accuracies of all runs of that command, to the printed digit."""
    rows = [line.split("|")[1:-1] for line in README.splitlines()
            if line.startswith("| `train.py --")]
    assert len(rows) >= 6
    for command, solved, minutes, *accuracies in rows:
        runs = [run for run in RECORDS if options(run["command"]) == options(command.strip(" `"))]
        assert len(runs) == len({run["seed"] for run in runs}) > 0, command
        right = sum(at(run, 128, 16)["all"] >= 0.995 for run in runs)
        assert solved.strip() == f"{right} of {len(runs)}", command
        low, high = min(run["minutes"] for run in runs), max(run["minutes"] for run in runs)
        assert minutes.strip() in (f"{low:.1f}", f"{low:.1f}-{high:.1f}"), command
        for size, cell in zip([(64, 8), (128, 16), (256, 32)], accuracies, strict=True):
            assert cell.strip() == in_percent(at(run, *size)["all"] for run in runs), command


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


def test_what_is_said_of_the_memory_is_what_results_recorded():
    """In how many traces of 8,192 commands every reveal is right, seed by seed, of each kind."""
    text, memory = " ".join(README.split()), [run for run in RECORDS if "--codes" in run["command"]]
    for together, steps, seeds in [(False, 150, [0, 1, 2, 3, 4]), (False, 300, [0, 2]),
                                   (True, 300, [0, 1, 2, 3, 4])]:
        rows = {run["seed"]: at(run, 8192, 1024) for run in memory
                if (run["commit"] == "4cae00f") == together
                and f"--last-steps {steps} " in run["command"]}
        right = [str(round(rows[seed]["every"] * rows[seed]["traces"])) for seed in sorted(rows)]
        traces, = {row["traces"] for row in rows.values()}
        assert sorted(rows) == seeds
        assert f"{', '.join(right[:-1])} and {right[-1]} of {traces} traces" in text


def test_records_name_no_machine_and_a_committed_state():
    """A command is one that a reader can repeat; a result from edited files would be none."""
    for run in RECORDS:
        assert not re.search(r"(^|[ =])/", run["command"]), run["command"]
        assert run["commit"] and not run["commit"].endswith("-dirty"), run["command"]


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
