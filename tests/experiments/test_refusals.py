"""Every command line refuses bad values: exit code 2, one line, no traceback, nothing trained or
written. The options are read off --help, so a new option or chapter is walked, too.
"""

import importlib
import re
from functools import partial

import pytest
import torch
from conftest import ROOT, SMALL

from data import UserError
from eval import read_checkpoint

PROGRAM = ROOT / "experiments/results/programs/josephus.py"
COMMANDS = {  # a module and its part: the words that it needs; RUN is a run folder
    "data": "",
    "scan": "",
    "train": " ".join([*SMALL, "--out out"]),
    "eval": "RUN",
    "arms": "",
    "inside": "RUN",
    "beliefs linear": "",
    "beliefs train": "--curriculum 2:1,4:2 --device cpu --out out",
    "beliefs eval": "RUN",
    "adversary": "",
    "unseen certify": "RUN",
    "snap": "RUN",
    "scale": "--plan",
    "programs": f"RUN {PROGRAM}",
    "supervision": "--run",
    "actions": "--run",
    "bench": "",
    "figures": ""}

NUMBER = ["nan", "inf", "-2", "1e400", "9" * 30, "text", ""]
STAGES = ["text", "4", "4:1,", "nan:1", "-4:1", "4:1;4:1", "9999999999:1", "4:0", "4:3", ""]
VALUES = {  # what no command line takes for an option that has neither choices nor a number
    "--group": ["W7", "S0", "A2", "D", "xS3", "S", "S1000000000", "S" + "9" * 30, ""],
    "--device": ["tpu", ""],
    "--plugin": ["RUN", "nothing.py", ""],
    "--out": ["RUN/model.pt", "RUN/model.pt/below", ""],
    "--plot": ["RUN/model.pt/p.png", "nowhere/p.png", "p.xyz", ""],
    "--curriculum": STAGES,
    "--test-lengths": STAGES,
    "--lengths": STAGES,
    "--stage-steps": ["text", "5,5,5", "5,0", "5,", "-5,5", ""],
    "arms --run": ["nobody", ""],
    "bench --lengths": ["0", "-8", "nan", "text", ""]}  # counts of tokens, not stages

TOGETHER = [  # what fits alone and not together, or is too large
    ("data", "--group A5 --commands swap"),
    ("train", "--batch 1 --curriculum 100000:1"),
    ("train", "--stage-steps 100000000,1"),
    ("train", "--d-model 4096 --conv-width 4096"),
    ("train", "--model lstm --beta-max 1"),
    ("snap", "--lengths 5000000:1"),
    ("beliefs train", "--group S6")]


def main_of(command):
    """The function that a command line calls, and the words of its part."""
    name, *part = command.split()
    in_spine = (ROOT / f"{name}.py").exists()
    module = importlib.import_module(name if in_spine else f"experiments.{name}")
    return module.main, part


@pytest.fixture
def refuses(refused, small_run, tmp_path, monkeypatch):
    """Runs a command line in an empty folder: it must refuse, and train and leave nothing."""
    def trained(*_):
        raise AssertionError("it began to train")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.Tensor, "backward", trained)

    def run(command, words, expected="", folder=small_run):
        main, part = main_of(command)
        typed = [*part, *COMMANDS[command].split(), *words]
        argv = [word.replace("RUN", str(folder)) for word in typed]
        before = {*tmp_path.rglob("*")}
        refused(main, argv, expected)
        assert {*tmp_path.rglob("*")} == before, argv
    return run


def test_every_chapter_is_walked():
    chapters = {path.stem for path in (ROOT / "experiments").glob("*.py")} - {"__init__"}
    assert chapters <= {command.split()[0] for command in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_option_takes_a_value_that_means_nothing(command, refuses, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    main, part = main_of(command)
    with pytest.raises(SystemExit, match="0"):
        main([*part, "--help"])
    shown = capsys.readouterr().out
    for option, described in re.findall(r"^  (--[\w-]+) \[?(\S+)", shown, re.MULTILINE):
        # What argparse describes as {this,that} has choices.
        others = ["nobody", ""] if described.startswith("{") else NUMBER
        listed = VALUES.get(f"{command} {option}") or VALUES.get(option)
        for value in listed or others:
            refuses(command, [f"{option}={value}"], "" if listed else option.strip("-"))


@pytest.mark.parametrize("command, words", TOGETHER)
def test_what_does_not_fit_together_is_refused_before_the_work(command, words, refuses):
    refuses(command, words.split())


# --- Files ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("command", [name for name in COMMANDS if "RUN" in COMMANDS[name]])
def test_a_run_that_cannot_be_read_is_told_in_one_line(command, refuses, tmp_path):
    refuses(command, [], folder=tmp_path)


@pytest.mark.parametrize("content", ["text", [1, {"config": 2}], [partial(print, "run")]])
def test_another_content_and_code_are_refused(content, tmp_path):
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(UserError, match="model.pt is missing, truncated or foreign"):
        read_checkpoint(tmp_path)


def test_a_flipped_bit_of_a_weight_is_found(small_run, tmp_path):
    content = bytearray((small_run / "model.pt").read_bytes())
    weight, *_ = read_checkpoint(small_run)["model"].values()
    content[content.index(weight.numpy().tobytes())] ^= 1
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(UserError, match="the checksum"):
        read_checkpoint(tmp_path)
