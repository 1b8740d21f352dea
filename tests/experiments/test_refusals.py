"""Every option of every script is handed what it cannot take: exit code 2, one line, nothing left.

The parsers are the list. An option or a chapter that is added is walked, too; one that is neither a
number, a list, a file nor a choice fails the test until somebody says here what it is.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import data
import eval as evaluation
import pytest
import scan
import torch
import train
from conftest import EARLY, ROOT, SMALL

from experiments import (actions, adversary, arms, beliefs, bench, cycle, figures, inside, ladder,
                         pairs, programs, scale, snap, supervision, underflow, unseen)

VALUES = ["nan", "inf", "-inf", "-1", "0", "1000000000", "1e400", "text", ""]
NO_OUT = [word for word in SMALL if word not in ("--device", "cpu")]
WORDS = ("--group S3 --format word --curriculum 2:1 --d-model 8 --batch 2 --last-steps 3 "
         "--test-lengths 4:1 --traces 4 --device cpu").split()
PLAIN = ["--lengths", "4:2", "--traces", "2", "--device", "cpu"]


def part(main, name):
    return lambda argv: main([name, *argv])


SCRIPTS = {  # name: main, and a command line that is over in a moment; RUN stands for a run folder
    "data": (data.main, []),
    "scan": (scan.main, []),
    "train": (train.main, [*SMALL, "--out", "out"]),
    "eval": (evaluation.main, ["RUN", *PLAIN]),
    "pairs train": (part(pairs.main, "train"), [*SMALL, "--hold-out-pairs", "0.3", "--out", "out"]),
    "pairs eval": (part(pairs.main, "eval"), ["PAIRS", *PLAIN]),
    "unseen train": (part(unseen.main, "train"), [*SMALL, "--seen", "4", "--out", "out"]),
    "unseen eval": (part(unseen.main, "eval"), ["UNSEEN", *PLAIN]),
    "unseen study": (part(unseen.main, "study"), ["--record", "r.jsonl"]),
    "beliefs show": (part(beliefs.main, "show"), []),
    "beliefs train": (part(beliefs.main, "train"), [*SMALL, "--out", "out"]),
    "beliefs eval": (part(beliefs.main, "eval"), ["COINS", *PLAIN]),
    "underflow": (underflow.main, ["--marginals", "--lengths", "4:2", "--traces", "2"]),
    "snap": (snap.main, ["RUN", *PLAIN]),
    "inside": (inside.main, ["RUN", "--traces", "2"]),
    "bench": (bench.main, ["--batch", "1", "--heads", "1", "--width", "4", "--lengths", "8",
                           "--rounds", "1"]),
    "arms run": (part(arms.main, "run"), ["lstm", "--group", "S3", "--millions", "0.001",
                                          "--record", "r.jsonl"]),
    "adversary run": (part(adversary.main, "run"), ["linrnn", *SMALL, "--record", "r.jsonl"]),
    "actions run": (part(actions.main, "run"), ["lstm", "--group", "S3", "--millions", "0.001",
                                                "--traces", "2", "--record", "r.jsonl"]),
    "actions eval": (part(actions.main, "eval"), ["ACTIONS", *PLAIN]),
    "actions cost": (part(actions.main, "cost"), []),
    "supervision run": (part(supervision.main, "run"),
                        "parity next --length 2 --d-model 8 --budget 4 --traces 4 --device cpu "
                        "--out out --record r.jsonl".split()),
    "cycle": (cycle.main, ["CYCLE", "--record", "r.jsonl"]),
    "ladder run": (part(ladder.main, "run"), ["--group", "S2", "--millions", "0.001",
                                              "--record", "r.jsonl"]),
    "scale certify": (part(scale.main, "certify"), ["RUN", "--states", "2", "--depth", "2"]),
    "scale run": (part(scale.main, "run"), ["--group", "S2", "--millions", "0.001", "--record",
                                            "r.jsonl"]),
    "programs": (programs.main, ["RUN", str(ROOT / "experiments/results/programs/josephus.py")]),
    "ladder count": (part(ladder.main, "count"), ["DIAGONAL", "--record", "r.jsonl"])}
NO_COMMAND_LINE = {"automata", "extract", "heads", "listings", "sessions", "states", "unroll",
                   "__init__"}
NO_NUMBERS = {"figures"}  # one option, a folder
LISTS = {"curriculum", "lengths", "test_lengths", "stage_steps", "counts", "seeds"}
TEXTS = {"group", "device", "arm", "part"}
FILES = {"run", "file", "out", "record", "plot"}
MEANT = {  # the values among VALUES that an option takes
    "seed": {"0"}, "beta_max": {"0"}, "advance": {"-1", "0"}, "reveal_weight": {"0"},
    "uncertain": {"0"}, "repeat": {"0"}}


@pytest.fixture(scope="session")
def runs(small_run, tmp_path_factory):
    """A run for each word in capitals."""
    folder = tmp_path_factory.mktemp("chapters")
    pairs.main(["train", *SMALL, "--hold-out-pairs", "0.3", "--out", str(folder / "pairs")])
    unseen.main(["train", *SMALL, "--seen", "4", "--out", str(folder / "unseen")])
    beliefs.main(["train", *SMALL, "--out", str(folder / "coins")])
    train.main([*SMALL, "--format", "repetitions", "--out", str(folder / "cycle")],
               adversary.make_parser())
    train.main([*SMALL, "--out", str(folder / "actions")], actions.make_parser())
    train.main([*WORDS, "--model", "diagonal", "--out", str(folder / "diagonal")])
    return {"RUN": small_run, "PAIRS": folder / "pairs", "UNSEEN": folder / "unseen",
            "COINS": folder / "coins", "CYCLE": folder / "cycle", "DIAGONAL": folder / "diagonal",
            "ACTIONS": folder / "actions"}


@pytest.fixture
def outcome(tmp_path, monkeypatch, capsys, runs):
    """Runs a script in an empty folder; the exit code, its last line of errors, what it left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arms, "LENGTHS", "2:1")
    monkeypatch.setattr(scale, "LENGTHS", "2:1")
    monkeypatch.setattr(adversary, "TESTS", {"random": [(4, 2)]})
    monkeypatch.setattr(actions, "LENGTHS", "4:{0}")
    monkeypatch.setattr(ladder, "LADDER", {"lstm": "--model lstm"})

    def run(script, *more):
        main, plain = SCRIPTS[script]
        argv = [str(runs.get(word, word)) for word in [*plain, *more]]
        before, code = {*Path().rglob("*")}, 0
        with monkeypatch.context() as patch:
            if script == "unseen study":  # it would train twelve networks
                patch.setattr(unseen, "train_unseen", lambda argv: sys.exit(0))
            try:
                main(argv)
            except SystemExit as stop:
                code = stop.code
        shown = capsys.readouterr().err
        left = {*Path().rglob("*")} - before
        for path in sorted(left, reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        assert code in (0, 2) and "Traceback" not in shown and "\x1b" not in shown, (argv, shown)
        return code, shown.strip().split("\n")[-1] if code else "", left
    return run


def parser_of(script, runs):
    """The parser that the script builds, taken from it when it is about to parse."""
    found, real = [], argparse.ArgumentParser.parse_args

    def look(parser, argv=None, namespace=None):
        if parser.prog.endswith(script.split()[0]) and parser._actions[-1].dest == "part":
            return real(parser, argv, namespace)  # of a chapter with parts: go on to the part
        found.append(parser)
        raise InterruptedError

    main, plain = SCRIPTS[script]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(argparse.ArgumentParser, "parse_args", look)
        main(plain)
    return found[0]


def actions_of(script, runs):
    """Its options that take a value. A chapter shares most options with another: only its own."""
    base = {"train": "train", "eval": "pairs eval"}.get(script.split()[-1], script)
    base = "train" if script in ("adversary run", "supervision run") else base
    shared = {x.dest for x in parser_of(base, runs)._actions} if base != script != "eval" else ()
    return [action for action in parser_of(script, runs)._actions
            if action.nargs != 0 and not action.choices and action.dest not in shared]


def test_every_chapter_is_walked_and_every_option_is_of_a_known_kind(runs):
    chapters = {path.stem for path in (ROOT / "experiments").glob("*.py")}
    walked = {script.split()[0] for script in SCRIPTS} | NO_COMMAND_LINE | NO_NUMBERS
    assert chapters <= walked
    for script in SCRIPTS:
        for action in actions_of(script, runs):
            kind = getattr(action.type, "__name__", None)
            assert kind in ("int", "float") or action.dest in LISTS | TEXTS | FILES, action


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_number_that_is_none_or_too_large_gets_one_line_and_leaves_nothing(
        script, runs, outcome):
    count = 0
    for action in actions_of(script, runs):
        if getattr(action.type, "__name__", None) not in ("int", "float"):
            continue
        for value in VALUES:
            code, line, left = outcome(script, f"{action.option_strings[0]}={value}")
            meant = value in MEANT.get(action.dest, ())
            meant &= "no head of this model tracks" not in line  # the small run is untrained
            assert code == (0 if meant else 2), (script, action.dest, value, line)
            assert meant or ("error: " in line and not left), (script, action.dest, value, left)
            count += 1
    print(f"{script}: {count} values")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_list_a_text_or_an_empty_option_is_refused_in_the_same_way(script, runs, outcome):
    for action in actions_of(script, runs):
        numeric = getattr(action.type, "__name__", None) in ("int", "float")
        if numeric or action.dest in ("run", "file", "arm", "part"):
            continue
        option = action.option_strings[0]
        values = [""]
        if action.dest in LISTS:
            values = [*VALUES, *(f"{value}:1" for value in VALUES), "1000000000:1000000000",
                      "4:0", "4:3", "2:1,,4:2", "1" * 5000]
        if action.dest in ("group", "device"):
            values = [*VALUES, "S1000000000", "S99999999999999999999", "A2", "D", "xS3"]
        for value in values:
            code, line, left = outcome(script, f"{option}={value}")
            if action.dest in ("counts", "seeds") and value == "0":
                continue
            assert code == 2 and "error: " in line and not left, (script, option, value, line)


def test_what_fits_alone_and_not_together_is_refused_before_anything_is_made(outcome):
    for options in ("--batch 60000 --curriculum 64:8", "--batch 1 --curriculum 100000:1",
                    "--d-model 4096 --conv-width 4096", "--d-model 4096 --layers 9",
                    "--d-model 4096 --householders 4096", "--layers 4097",
                    "--traces 100000 --test-lengths 64:8", "--format word --group S10",
                    "--stage-steps 100000000,1"):
        code, line, left = outcome("train", *options.split())
        assert code == 2 and "error: " in line and not left, (options, line)
    assert outcome("eval", "--lengths", "5000000:1")[0] == 2
    assert outcome("bench", "--batch", "10000", "--lengths", "1048576")[0] == 2


# --- Files ----------------------------------------------------------------------------------------

READERS = ["eval", "snap", "inside", "pairs eval", "unseen eval", "beliefs eval", "actions eval"]


def spoil(path, how, whole):
    """Puts in place of a file what the word says."""
    if how == "folder":
        path.mkdir()
    if how == "foreign":
        path.write_text("not what you think\n")
    if how == "other":
        torch.save([1, {"config": 2}], path)
    if how == "cut":
        path.write_bytes(whole[:len(whole) // 2])
    if how == "empty":
        path.write_bytes(b"")
    if how == "flipped":
        at = len(whole) // 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
    if how == "code":
        torch.save([partial(print, "run")], path)


HOW = ["missing", "folder", "foreign", "other", "cut", "empty", "flipped", "code"]


@pytest.mark.parametrize("script", READERS)
def test_a_run_folder_that_cannot_be_read_gets_one_line(script, runs, outcome, tmp_path):
    main, (word, *_) = SCRIPTS[script]
    whole = (runs[word] / "model.pt").read_bytes()
    for how in HOW:
        folder = tmp_path / how
        folder.mkdir()
        spoil(folder / "model.pt", how, whole)
        code, line, left = outcome_of(outcome, script, word, folder)
        assert code == 2 and "model.pt is missing, truncated or foreign" in line, (how, line)
        assert not left and "two options" not in line


def outcome_of(outcome, script, word, folder):
    """The outcome of a script with this folder in place of its run."""
    main, plain = SCRIPTS[script]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCRIPTS, script, (main, [folder if x == word else x for x in plain]))
        return outcome(script)


def test_a_flipped_byte_is_found_or_harms_nothing(small_run, tmp_path):
    """60 places all over the file: refused in a line, or the same weights, bit for bit."""
    whole, rng = (small_run / "model.pt").read_bytes(), random.Random(0)
    truth, refused = evaluation.load_run(small_run)[0], 0
    for _ in range(60):
        at = rng.randrange(len(whole))
        flipped = bytes([whole[at] ^ 1 << rng.randrange(8)])
        (tmp_path / "model.pt").write_bytes(whole[:at] + flipped + whole[at + 1:])
        try:
            checkpoint, _, _ = evaluation.load_run(tmp_path)
        except ValueError as error:
            assert "model.pt is missing, truncated or foreign" in str(error)
            refused += 1
        else:
            assert all(weight.equal(truth["model"][name])
                       for name, weight in checkpoint["model"].items())
            assert checkpoint["config"] == truth["config"]
    assert refused > 40


def changed(checkpoint, path, value):
    """A copy of it in which the entry under this path is another."""
    if not path:
        return value
    return {**checkpoint, path[0]: changed(checkpoint[path[0]], path[1:], value)}


STRANGE = [None, -1, 10**9, 10**30, float("nan"), "text", [[1]], {"a": 1}]


def test_a_whole_file_of_strange_content_gets_one_line(small_run, tmp_path, monkeypatch, refused):
    """Each entry of config and options in turn is of another type or size. Nothing large is built:
    a model of 10^9 layers is refused as fast as one of 5."""
    truth = torch.load(small_run / "model.pt", weights_only=True)
    entries = [("config",), ("model",), *(("config", key) for key in truth["config"]),
               *(("config", "options", key) for key in truth["config"]["options"])]
    tried = 0
    for i, entry in enumerate(entries):
        for value in (STRANGE * 2)[i % 8:i % 8 + 3]:
            torch.save(changed(truth, entry, value), tmp_path / "model.pt")
            try:
                evaluation.load_run(tmp_path)
            except ValueError as error:
                assert "model.pt is missing, truncated or foreign" in str(error)
            tried += 1
    print(f"{tried} files")
    refused(train.main, [*SMALL, "--out", tmp_path, "--resume"], "model.pt")


def test_a_file_that_another_process_holds_open_is_tried_again(tmp_path, monkeypatch):
    """Windows refuses to replace it: four tries, then the error shows, and the old file stands."""
    path, waits, busy, replace = tmp_path / "model.pt", [], [True, True], Path.replace
    path.write_bytes(b"old")

    def held_open(side, target):
        if busy and busy.pop():
            raise PermissionError(13, "Permission denied", str(target))
        return replace(side, target)

    monkeypatch.setattr(Path, "replace", held_open)
    monkeypatch.setattr(evaluation.time, "sleep", waits.append)
    evaluation.replace_file(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new" and len(waits) == 2
    busy[:] = [True] * 4
    with pytest.raises(PermissionError):
        evaluation.replace_file(path, lambda file: file.write(b"newer"))
    assert path.read_bytes() == b"new" and [*tmp_path.iterdir()] == [path] and not busy


def test_a_resume_from_optimisers_that_do_not_fit_is_refused(small_run, tmp_path, refused, runs):
    """Those of another task, none, or something else in their place."""
    truth = torch.load(small_run / "model.pt", weights_only=True)
    coins = torch.load(runs["COINS"] / "model.pt", weights_only=True)["resume"]
    (tmp_path / "run").mkdir()
    for part_of in [coins, *STRANGE]:
        torch.save({**truth, "resume": part_of}, tmp_path / "run" / "model.pt")
        refused(train.main, [*SMALL, "--out", tmp_path / "run", "--resume"], "cannot be resumed")


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in ("data", "scan",
                                                                            "beliefs show")])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(script, runs, outcome, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for action in actions_of(script, runs):
        if action.dest not in ("record", "plot", "out"):
            continue
        end = ".png" if action.dest == "plot" else ""
        if action.dest == "record":
            for text in ("{\n", "a,b\n", "[1]"):
                (tmp_path / "foreign").write_text(text)
                code, line, left = outcome(script, f"--record={tmp_path / 'foreign'}")
                assert code == 2 and not left, (script, line)
                assert "holds no records" in line or script == "programs", line  # S3 has no d
                assert (tmp_path / "foreign").read_text() == text
        for path in (f"file/below{end}", f"missing/below{end}", "folder", "x" * 300 + end):
            if action.dest == "out" and path in ("folder", "missing/below"):
                continue  # an empty folder will do, and a folder is made
            code, line, left = outcome(script, f"--{action.dest}={path}")
            assert code == 2 and "error: " in line and not left, (script, action.dest, path, line)


# --- A run folder ---------------------------------------------------------------------------------

def weights_of(folder):
    return torch.load(Path(folder) / "model.pt", weights_only=True)["model"]


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_run_stopped_in_its_first_seconds_starts_over(small_run, tmp_path, resume):
    """Whatever such a run can leave, a start or a resume brings the run; other files stay alone."""
    for i, names in enumerate([["lock-journal", "lock", ".DS_Store"], ["config.json.partial"],
                               ["config.json", "log.jsonl", "model.pt.partial"]]):
        folder = tmp_path / str(i)
        folder.mkdir()
        for name in names:
            (folder / name).write_text('{"step": 10, "x": 1}\n')
        (folder / "lock").write_text("")
        train.main([*SMALL, "--out", str(folder), *resume])
        ours, truth = weights_of(folder), weights_of(small_run)
        assert all(ours[name].equal(truth[name]) for name in truth)
        assert not [*folder.glob("model.pt.partial")]
        assert json.loads((folder / "log.jsonl").read_text().splitlines()[0])["step"] == 6


def test_a_folder_of_other_files_is_left_alone(tmp_path, refused):
    (tmp_path / "config.json").write_text("mine")
    (tmp_path / "essay.txt").write_text("mine")
    for more in ([], ["--resume"]):
        refused(train.main, [*SMALL, "--out", tmp_path, *more], "not empty", "--out")
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "essay.txt"}


def test_a_damaged_log_and_config_are_mended_by_a_resume(small_run, tmp_path):
    shutil.copytree(small_run, tmp_path / "run")
    config = (small_run / "config.json").read_text()
    for damage in (None, "", "{", "[1]", "\x00" * 9):
        log = tmp_path / "run" / "log.jsonl"
        log.write_bytes(b'no JSON\n{"step": "x"}\n\xff\xfe\n' + log.read_bytes() + b'{"step": 9')
        if damage is None:
            (tmp_path / "run" / "config.json").unlink()
        else:
            (tmp_path / "run" / "config.json").write_text(damage)
        train.main([*SMALL, "--out", str(tmp_path / "run"), "--resume"])
        assert (tmp_path / "run" / "config.json").read_text() == config
        assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [6]


def test_two_processes_on_one_folder(tmp_path, refused):
    """While a process trains, neither a start nor a resume gets in; once it is killed, both do."""
    folder = tmp_path / "run"
    command = [*SMALL, "--last-steps", "5000", "--save-every", "9999", "--out", str(folder)]
    other = subprocess.Popen([sys.executable, "train.py", *command], cwd=ROOT,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert "from step 0" in other.stdout.readline()
        refused(train.main, [*command, "--resume"], "another process")
        (folder / "model.pt").rename(folder / "model.pt.partial")  # as in its first seconds
        refused(train.main, command, "another process")
    finally:
        other.kill()
        other.wait()
    train.main([*SMALL, "--out", str(folder)])
    assert weights_of(folder)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"),
                                   OSError(30, "Read-only file system")])
def test_a_disk_that_fails_in_the_middle_leaves_the_last_good_checkpoint(
        error, tmp_path, monkeypatch, refused):
    """In the second checkpoint: one line, no side file, and the resumed run is the run."""
    command, calls, fsync = [*SMALL, "--save-every", "2", "--out"], [], evaluation.os.fsync
    train.main([*command, str(tmp_path / "whole")])

    def fail(file):
        calls.append(file)
        if len(calls) == 4:  # config.json, model.pt at the steps 0, 2, 4
            raise error
        fsync(file)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation.os, "fsync", fail)
        refused(train.main, [*command, tmp_path / "run"], str(error), "after step 4", "last good")
    assert not [*(tmp_path / "run").glob("*.partial")]
    checkpoint = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    assert checkpoint["progress"]["step"] == 2
    train.main([*command, str(tmp_path / "run"), "--resume"])
    ours, truth = weights_of(tmp_path / "run"), weights_of(tmp_path / "whole")
    assert all(ours[name].equal(truth[name]) for name in truth)


@pytest.mark.parametrize("which", ["model", "mean"])
def test_weights_that_are_not_finite_are_never_saved(which, tmp_path, monkeypatch, refused):
    """Ruined by the last update, when no loss is left to tell."""
    real = train.advance

    def ruin(config, progress, accuracy):
        real(config, progress, accuracy)
        if progress["finished"]:
            model = run.model if which == "model" else run.average.module
            model.head.weight.data[0, 0] = float("inf")

    class Watched(train.Run):
        def __init__(self, *args):
            nonlocal run
            super().__init__(*args)
            run = self

    run = None
    monkeypatch.setattr(train, "Run", Watched)
    monkeypatch.setattr(train, "advance", ruin)
    refused(train.main, [*SMALL, "--save-every", "2", "--out", tmp_path / "run"], "not all finite",
            "after step 6", "last good")
    checkpoint = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    assert checkpoint["progress"]["step"] == 4
    assert all(weight.isfinite().all() for weight in checkpoint["model"].values())


# --- Records, pipes and interrupts ----------------------------------------------------------------

@pytest.mark.skipif(not shutil.which("git"), reason="without git a record names no commit")
def test_a_record_names_the_commit_of_the_code_wherever_it_is_run(tmp_path, monkeypatch):
    """Run from another repository, with git's variables pointing there, and from a folder of code
    that lies inside a repository which is not its own."""
    def git(folder, *words):
        return subprocess.run(["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=b",
                               *words], check=True, capture_output=True, text=True).stdout.strip()

    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text(name)
        git(tmp_path / name, "init", "-q")
        git(tmp_path / name, "add", ".")
        git(tmp_path / name, "commit", "-q", "-m", name)
    (tmp_path / "theirs" / "copy").mkdir()
    commits = {}
    for where in ("ours", "theirs/copy"):
        monkeypatch.setattr(evaluation, "__file__", str(tmp_path / where / "code.py"))
        monkeypatch.chdir(tmp_path / "theirs")
        monkeypatch.setenv("GIT_DIR", str(tmp_path / "theirs" / ".git"))
        evaluation.append_record(tmp_path / "r.jsonl", "command", {})
        monkeypatch.delenv("GIT_DIR")
        commits[where] = json.loads((tmp_path / "r.jsonl").read_text().splitlines()[-1])["commit"]
    assert commits == {"ours": git(tmp_path / "ours", "describe", "--always"), "theirs/copy": ""}


def test_a_failed_plot_or_record_loses_nothing(small_run, tmp_path, monkeypatch, refused, capsys):
    """The record stands before the plot is drawn; a full disk is one line, after the table."""
    monkeypatch.setattr(evaluation, "plot", lambda *_: open("/no/such/folder", "w"))
    refused(evaluation.main, [small_run, *PLAIN, "--plot", tmp_path / "p.png", "--record",
                              tmp_path / "r.jsonl"], "/no/such/folder")
    assert json.loads((tmp_path / "r.jsonl").read_text())["results"]
    if Path("/dev/full").exists():  # it holds zeros, and so is no file of records
        monkeypatch.setattr(evaluation, "check_record", str)
        monkeypatch.setattr(train, "check_record", str)
        refused(evaluation.main, [small_run, *PLAIN, "--record", "/dev/full"], "No space left")
        refused(train.main, [*SMALL, "--out", tmp_path / "run", "--record", "/dev/full"],
                "No space left", "last good one", str(tmp_path / "run"))
        assert weights_of(tmp_path / "run")


def test_an_interrupt_between_training_and_evaluation_keeps_the_run_and_names_it(
        tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "evaluate_and_print", interrupt)
    with pytest.raises(SystemExit, match="130"):
        train.main([*SMALL, "--out", str(tmp_path / "run")])
    assert f"interrupted after step 6; {tmp_path / 'run'} keeps it" in capsys.readouterr().out
    assert weights_of(tmp_path / "run")


STOPPED = """import json, subprocess, sys
for command in json.loads(sys.argv[1]):
    process = subprocess.Popen([sys.executable, "-u", *command], stdout=-1, stderr=-1)
    process.stdout.close()
    closed_pipe = process.stderr.read().decode()
    process.wait()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=-1)
    try:
        process.wait(0.5)
    except subprocess.TimeoutExpired:
        process.send_signal(2)
    print(json.dumps([command[0], closed_pipe, process.stderr.read().decode()]))
    process.wait()
"""


def stop_each():
    """Unbuffered, so that every line meets the closed pipe; and interrupted half a second after the
    start, while torch is imported."""
    place, run = tempfile.TemporaryDirectory(), "experiments/results/models/linrnn-S5-seed0"
    commands = [["data.py"], ["scan.py"], ["eval.py", run, *PLAIN],
                ["train.py", *SMALL, "--out", f"{place.name}/run"],
                ["-m", "experiments.snap", run, *PLAIN]]
    return place, subprocess.Popen([sys.executable, "-c", STOPPED, json.dumps(commands)], cwd=ROOT,
                                   stdout=subprocess.PIPE, text=True)


EARLY["test_a_closed_pipe_or_ctrl_c_while_importing_leaves_no_traceback"] = stop_each


@pytest.mark.skipif(sys.platform == "win32", reason="signals and pipes of POSIX")
def test_a_closed_pipe_or_ctrl_c_while_importing_leaves_no_traceback():
    place, process = EARLY["test_a_closed_pipe_or_ctrl_c_while_importing_leaves_no_traceback"]
    told = [json.loads(line) for line in process.communicate()[0].splitlines()]
    place.cleanup()
    assert len(told) == 5
    for command, closed_pipe, interrupted in told:
        assert "Traceback" not in closed_pipe + interrupted, (command, closed_pipe, interrupted)
        assert "Exception ignored" not in closed_pipe, (command, closed_pipe)


def train_in_a_folder_called_beta():
    place = tempfile.TemporaryDirectory()
    return place, subprocess.Popen([sys.executable, "train.py", *SMALL, "--out", f"{place.name}/β"],
                                   cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": "cp1252"},
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


EARLY["test_a_terminal_that_lacks_a_letter_shows_its_number"] = train_in_a_folder_called_beta


def test_a_terminal_that_lacks_a_letter_shows_its_number():
    """cp1252 has no beta: the name of the run folder is printed with its number instead."""
    place, process = EARLY["test_a_terminal_that_lacks_a_letter_shows_its_number"]
    shown, _ = process.communicate()
    place.cleanup()
    assert process.returncode == 0 and b"\\u03b2" in shown, shown.decode()


def test_figures_are_refused_a_folder_that_is_a_file(tmp_path, refused):
    (tmp_path / "file").write_text("")
    refused(figures.main, ["--out", tmp_path / "file"], "file")
