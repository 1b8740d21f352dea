"""Exercises and mutants: each blank is noticed by its own tests, and each fence out of place."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import exercises
import grading
import pytest
import scan
import test_exercises
import test_your_own
from conftest import EARLY, ROOT, SMALL
from test_scan import error, inputs

mutants = pytest.importorskip("mutants", reason="students get no table of mutants")

EXERCISES = exercises.find_exercises(ROOT)
IN_ONE_PROCESS = """
import json, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
import exercises, grading, mutants
copy, found = Path(sys.argv[3]), exercises.find_exercises(exercises.ROOT)
exercises.make(copy, found)
say = lambda *words: print("RESULT", json.dumps(words))
for number, (path, *_) in found.items():
    whole = (copy / path).read_text(encoding="utf-8")
    exercises.make(copy, found, [number])
    outcomes = grading.run_tests(copy, *(str(copy / file) for file in sys.argv[4].split()))
    say(number, outcomes)
    if number == 4:
        import train
        try:
            train.main(sys.argv[5:])
        except SystemExit as stop:
            say("train", stop.code)
    (copy / path).write_text(whole, encoding="utf-8")
mutant = mutants.DATA[0]
harmless = mutant._replace(new=mutant.old.replace(" ", "  "))
say("survivors", grading.survivors(copy, [mutant, harmless]))
"""


def blank_each():
    """Each exercise in turn, in one process that imports torch once."""
    place = tempfile.TemporaryDirectory()
    folder = Path(place.name).resolve()
    return place, subprocess.Popen(
        [sys.executable, "-c", IN_ONE_PROCESS, str(ROOT / "tests"), str(ROOT / "tests/experiments"),
         str(folder / "copy"), f"{grading.TESTS} tests/experiments/test_your_own.py", *SMALL,
         "--out", str(folder / "run")],
        env=os.environ | {"PYTHONPATH": ""}, stdout=open(folder / "out", "w"),
        stderr=open(folder / "err", "w"))


EARLY["test_a_blank_fails_its_own_tests_and_no_others"] = blank_each


def test_a_blank_fails_its_own_tests_and_no_others():
    """The main job says in a line which exercise is missing. And of two mutants the one that
    changes nothing survives."""
    place, process = EARLY["test_a_blank_fails_its_own_tests_and_no_others"]
    process.wait()
    shown, errors = ((Path(place.name) / name).read_text() for name in ("out", "err"))
    place.cleanup()
    results = [json.loads(line[7:]) for line in shown.splitlines() if "RESULT" in line]
    assert [row[0] for row in results if row[0] in EXERCISES] == [*range(1, 11)], errors
    marked = {name: {mark.name for mark in test.pytestmark}
              for name, test in (vars(test_exercises) | vars(test_your_own)).items()
              if hasattr(test, "pytestmark")}
    for number, outcomes in [row for row in results if row[0] in EXERCISES]:
        for test, how in outcomes.items():
            own = grading.MARKS[number] in marked[test.split("::")[1].split("[")[0]]
            assert how == ("failed" if own else "passed"), (number, test)
        assert len(outcomes) > 20 and "failed" in outcomes.values()
    assert ["train", 2] in results and ["survivors", 1] in results
    assert "error: exercise 4: see the docstring after step 0" in errors


def test_there_are_ten_exercises_with_points():
    assert [*EXERCISES] == [*range(1, 11)] and all(x.points > 0 for x in EXERCISES.values())


STATED = 'def f():\n    """Exercise {} (1 point, 1 line): f."""\n'.format(3)
BEGIN, END = "    ### BEGIN SOLUTION\n", "    ### END SOLUTION\n"


@pytest.mark.parametrize("text", [
    STATED, STATED + BEGIN, STATED + END, STATED + BEGIN + BEGIN + END + END,
    2 * (STATED + BEGIN + END), STATED + 2 * (BEGIN + END), BEGIN + END,
    STATED + BEGIN + STATED.replace("3", "4") + BEGIN + END])
def test_a_fence_out_of_place_is_an_error(text, tmp_path):
    (tmp_path / "scan.py").write_text(STATED + BEGIN + "    return 1\n" + END)
    (found, exercise), = exercises.find_exercises(tmp_path).items()
    assert (found, exercise) == (3, (Path("scan.py"), "f", 1, slice(3, 4)))
    (tmp_path / "scan.py").write_text(text)
    with pytest.raises(ValueError, match="scan.py"):
        exercises.find_exercises(tmp_path)


def test_make_writes_a_blank_for_each_chosen_exercise(tmp_path, monkeypatch, refused):
    """--only 3,4: the rest is as it was, but for README's count of lines and the table."""
    out = tmp_path / "a" / "copy"
    exercises.main(["make", str(out), "--only", "3,4"])
    for path in exercises.files_of(ROOT):
        if path.name in ("scan.py", "README.md", "mutants.py"):
            continue
        assert (out / path).read_bytes() == (ROOT / path).read_bytes(), path
    assert not (out / exercises.MUTANTS).exists() and not (out / "runs").exists()
    text = (out / "scan.py").read_text(encoding="utf-8")
    for number in EXERCISES:
        raises = f'    raise NotImplementedError("exercise {number}: see the docstring")\n'
        assert text.count(f"{BEGIN}{raises}{END}") == (number in (3, 4))
    assert f"| `scan.py` | {len(text.splitlines())} |" in (out / "README.md").read_text("utf-8")
    refused(exercises.main, ["make", out], "not empty")
    refused(exercises.main, ["make", out / "scan.py"], "scan.py")
    for only in ("11", "0", "3,", "x", "-1"):
        refused(exercises.main, ["make", tmp_path / "b", f"--only={only}"], only.strip(","))
    assert not (tmp_path / "b").exists()
    refused(exercises.main, ["grade", tmp_path], "no copy of this project")
    refused(exercises.main, ["grade", "--json", tmp_path], str(tmp_path))
    refused(exercises.main, ["mutants", "--only", "no such law"], "no mutant")
    monkeypatch.setattr(exercises, "MUTANTS", Path("missing.py"))
    refused(exercises.main, ["mutants"], "missing.py")


def test_grades_are_written_as_gradescope_reads_them(tmp_path, monkeypatch, capsys):
    """A wrong solution, one that is not done in time, and one that passes."""
    one, path = {1: EXERCISES[1]}, tmp_path / "results.json"
    exercises.make(tmp_path / "copy", EXERCISES)
    exercises.make(tmp_path / "student", EXERCISES)
    source = tmp_path / "student" / "data.py"
    text = source.read_text(encoding="utf-8")
    text = text.replace("elements[g], self.elements[h]", "elements[h], self.elements[g]")
    source.write_text(text, encoding="utf-8")
    assert not grading.grade(tmp_path / "copy", one, tmp_path / "student", path)
    result, = json.loads(path.read_text())["tests"]
    assert result["score"] == 0 and result["status"] == "failed"
    assert "test_compose_is_the_command_g_and_after_it_the_command_h[S4]" in result["output"]
    monkeypatch.setattr(grading, "SECONDS", 0.01)
    assert not grading.grade(tmp_path / "copy", one, ROOT)
    assert "0/1  failed: not done after 0.01 seconds" in capsys.readouterr().out
    monkeypatch.setattr(grading.subprocess, "run", lambda *_, **__: Mock(returncode=0, stdout=""))
    assert grading.grade(tmp_path / "copy", one, ROOT, path)
    assert json.loads(path.read_text()) == {"score": 1, "tests": [
        {"name": "1 compose", "score": 1, "max_score": 1, "output": "passed", "status": "passed"}]}


@pytest.mark.parametrize("mutant", mutants.FORMULAS, ids=lambda mutant: mutant.law)
def test_each_wrong_variant_of_the_chunked_algorithm_is_noticed(mutant):
    """The comparison with the loop, values and gradients, fails when one thing is wrong."""
    variant, source = {"__name__": "variant"}, Path(scan.__file__).read_text(encoding="utf-8")
    exec(source.replace(mutant.old, mutant.new), variant)
    variant["TOKENS_AT_ONCE"] = 84  # pieces of 14 and 9 tokens
    assert error(lambda *x: variant["delta_rule_chunked"](*x, chunk_size=7), inputs(T=23)) > 1e-3


def test_each_mutant_stands_once_in_its_file(tmp_path):
    table = grading.read_table(ROOT / exercises.MUTANTS)
    assert len(table) > 60 and len({(x.file, x.old, x.new) for x in table}) == len(table)
    (tmp_path / "mutants.py").write_text(
        "from types import SimpleNamespace\n"
        "MUTANTS = [SimpleNamespace(file='scan.py', law='', old='import torch', new='')]")
    with pytest.raises(ValueError, match="scan.py says 2 times, and not once: 'import torch'"):
        grading.read_table(tmp_path / "mutants.py")
