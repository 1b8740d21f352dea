"""The course: right solutions get all points however they are written, and wrong ones do not."""

import json
import os
import re
import subprocess
import sys
from unittest.mock import patch

import exercises
import pytest
import torch
from conftest import ROOT

course = pytest.importorskip("course", reason="students have no teacher's file")
import mutants
from worker import take_apart


@pytest.fixture(scope="session")
def checks():
    return course.make_checks(seed=1)


def submit(folder, number, old="", new=""):
    """The file of an exercise, with new in place of old. Changes of one file add up."""
    path = folder / course.EXERCISES[number].file
    source = (path if path.exists() else ROOT / course.EXERCISES[number].file).read_text()
    assert source.count(old) == 1 or not old, (number, old)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source.replace(old, new))


# --- What gets the points -------------------------------------------------------------------------

def test_right_solutions_get_all_points_however_they_are_written(tmp_path, checks):
    """The project's own functions; one has keys of the other sign, and one prints."""
    for number in course.EXERCISES:
        submit(tmp_path, number)
    submit(tmp_path, 5, ".double() / 2**0.5", ".double() / -2**0.5")
    submit(tmp_path, 7, "right.all(1)\n", "right.all(1)\n    print(perfect, flush=True)\n")
    results = exercises.grade(tmp_path, course.EXERCISES, checks)
    for result in results:
        assert result["output"] == "all checks passed", result["name"]
    assert sum(result["score"] for result in results) == 20


# In the order of the exercises: what each says, what it would say, and what the student reads.
WRONG = [
    (1, "(self.elements[g], self.elements[h], -1)", "(self.elements[h], self.elements[g], -1)",
     'name, g, h = "S3", 1, 3'),
    (2, "state_KV = state_KV + k_K", "state_KV += k_K", "in-place operation"),
    (3, "solve_triangular(L_NCC, rhs, upper=False, unitriangular=True)",
     "solve(torch.eye(L_NCC.shape[-1]) + L_NCC, rhs)", "L, rhs = normal(2, 2), normal(2, 1)"),
    (4, "q_NCK @ start_NKV +", "q_NCK @ start_NKV[..., :1, :, :] +", "= (), 2, 1, 2, 1"),
    (5, "exchange_key(place, commands + n,", "exchange_key(commands, commands + n,",
     "after_each_name: expected"),
    (6, "G_NKV = torch.stack(G[::-1], -3)", "G_NKV = torch.stack(G, -3)", "= (), 2, 1, 2, 1"),
    (7, "right.mean(0).tolist()", "right.mean(0)", "[[True, True], [False, True]]"),
    (8, "survived / evidence[:, None]", "survived", "after: expected"),
    (9, "perms = nearest(self.read(states))", "perms = self.read(states).argmax(-1)",
     "n, heads = 3"),
    (10, "assert (pieces - whole).abs().max() < 1e-5", "assert True", "expected 'an assert fails'"),
]


def test_wrong_solutions_get_no_points_and_are_told_the_smallest_case(tmp_path, checks):
    for number, old, new, _ in WRONG:
        submit(tmp_path, number, old, new)
    results = exercises.grade(tmp_path, course.EXERCISES, checks)
    for result, (*_, told) in zip(results, WRONG, strict=True):
        assert result["score"] == 0
        assert told in result["output"], result["output"]


RIGHT = {"a": 1, "b": [torch.tensor([1.0, 2.0])]}


@pytest.mark.parametrize("found, right", [
    ({"b": (torch.tensor([1.0, 2.0]),), "a": 1}, True),
    (RIGHT | {"a": 2}, False),
    (RIGHT | {"a": True}, False),
    (RIGHT | {"b": [torch.tensor([1.0, torch.nan])]}, False),
    (RIGHT | {"b": [torch.tensor([[1.0, 2.0]])]}, False),
    (RIGHT | {"b": [torch.tensor([1.0, 2.0]).double()]}, False),
    ({"a": 1}, False)])
def test_an_answer_has_the_type_the_shape_and_the_numbers_expected(found, right):
    check = {"expected": {"x": take_apart(RIGHT)}}
    answer = json.dumps({"values": {"x": take_apart(found)}})
    assert (exercises.judge(check, answer) is None) == right


@pytest.mark.parametrize("answer", ["", "{}", '{"values": {"x": ["float", ["one"]]}}',
                                    '{"values": {"x": ["float", []]}}'])
def test_an_answer_that_cannot_be_read_is_wrong(answer):
    assert "cannot be read" in exercises.judge({"expected": {"x": ["float", [0.5]]}}, answer)


# --- What does not --------------------------------------------------------------------------------

def test_the_process_is_not_told_what_is_expected(tmp_path, checks):
    """Nor where the teacher's files are. It may run as a user who cannot read them."""
    ended = subprocess.CompletedProcess([], 0, b"")
    with patch.object(exercises.subprocess, "run", return_value=ended) as run:
        exercises.ask(tmp_path, checks, "nobody")
    seen = run.call_args.kwargs
    assert all(question.keys() == {"code", "names"} for question in json.loads(seen["input"]))
    assert not any(str(ROOT) in value for value in seen["env"].values())
    assert seen["cwd"] == tmp_path
    assert seen["user"] == seen["group"] == "nobody" and seen["extra_groups"] == []


def test_results_are_written_whatever_is_handed_in(tmp_path, capsys):
    """Side by side, as uploads lie: a file that ends the process, one that is right, a link to
    elsewhere, and one that cannot be read."""
    (tmp_path / "data.py").write_text("import os\nos._exit(0)\n")
    (tmp_path / "scan.py").write_text((ROOT / "scan.py").read_text())
    (tmp_path / "eval.py").symlink_to(ROOT / "eval.py")
    (tmp_path / "beliefs.py").write_text("class PFSA:\n    def step(self, belief, symbol:\n")
    file = tmp_path / "results.json"
    assert exercises.main(["grade", str(tmp_path), "--json", str(file), "--only", "1,3,7,8"]) == 1
    assert "1 of 6 points" in capsys.readouterr().out

    results = json.loads(file.read_text())
    assert results["score"] == 1
    ends, right, link, unreadable = [test["output"] for test in results["tests"]]
    assert "without an answer, with exit code 0" in ends
    assert right == "all checks passed"
    assert link == "eval.py is missing"
    assert "SyntaxError" in unreadable


def test_a_file_that_never_ends_gets_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exercises, "SECONDS", 1)
    (tmp_path / "data.py").write_text("while True:\n    pass\n")
    assert exercises.main(["grade", str(tmp_path), "--only", "1"]) == 1
    assert "not done after 1 seconds\n0 of 1 points" in capsys.readouterr().out


# --- The students' copy ---------------------------------------------------------------------------

def test_the_copy_lacks_what_the_teacher_has_and_grades_without_it(tmp_path):
    out = tmp_path / "a" / "copy"
    assert exercises.main(["make", str(out), "--only", "1,3"]) == 0
    copied = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    copied.remove("tests/checks.json")
    assert {name for name in copied if (out / name).read_bytes() != (ROOT / name).read_bytes()} == {
        "data.py", "scan.py"}
    assert {name for name in copied if name.startswith("tests/")} == {
        "tests/exercises.py", "tests/worker.py", "tests/experiments/test_your_own.py"}
    assert "experiments/TEACHING.md" not in copied

    # The docstring stays, and a comment asks.
    assert re.search(r'    """\n    # Exercise 3 \(1 point\)\. One line of torch.*\n'
                     r'    raise NotImplementedError\("exercise 3 is .*"\)\n\n\ndef',
                     (out / "scan.py").read_text(encoding="utf-8"))

    def type_there(*words):
        return subprocess.run([sys.executable, "tests/exercises.py", *words], cwd=out, text=True,
                              capture_output=True, env={**os.environ, "PYTHONPATH": ""}).stdout

    assert "1 Group.compose: 0/1\n    not done" in type_there("grade", "--only", "1")
    assert "1 Group.compose: 1/1" in type_there("grade", str(ROOT), "--only", "1")


def test_bad_requests_get_one_line(tmp_path, refused):
    (tmp_path / "a").write_text("")
    refused(exercises.main, ["make", tmp_path], "not empty")
    for only in ("11", "3,", "x"):
        refused(exercises.main, ["make", tmp_path / "b", f"--only={only}"], only)
    assert not (tmp_path / "b").exists()
    refused(exercises.main, ["grade", tmp_path / "none"], "no folder")


# --- The mutants ----------------------------------------------------------------------------------

def test_each_mutant_stands_once_in_its_file():
    mutants.check_table(mutants.MUTANTS)
    with pytest.raises(ValueError, match="not once: 'import torch'"):
        mutants.check_table([mutants.Mutant("scan.py", "", "import torch", "")])


def test_a_mutant_is_killed_by_a_test_that_fails_and_survives_without_one(
        tmp_path, monkeypatch, capsys):
    """In a project of one function and one test."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "data.py").write_text("def twice(x):\n    return 2 * x\n")
    (tmp_path / "tests/test_data.py").write_text(
        "import data\n\n\ndef test_twice():\n    assert data.twice(3) == 6\n")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    table = [mutants.Mutant("data.py", "twice", "2 * x", new) for new in ("3 * x", "x + x")]
    assert mutants.survivors(table) == 1
    said = capsys.readouterr().out
    assert "killed    data.py: twice\n          tests/test_data.py::test_twice" in said
    assert "SURVIVES  data.py: twice" in said and "1 of 2 killed" in said


# --- The teacher's page ---------------------------------------------------------------------------

def test_the_teachers_page_has_the_points_of_the_table_and_commands_that_exist():
    page = (ROOT / "experiments/TEACHING.md").read_text(encoding="utf-8")
    stated = re.findall(r"(\d+) [a-z0-9 ]+, (\d), \d+(?=;| \|)", page)
    assert sorted((int(number), int(points)) for number, points in stated) == [
        (number, exercise.points) for number, exercise in course.EXERCISES.items()]
    for name in re.findall(r"-m experiments\.(\w+)", page):
        assert (ROOT / "experiments" / f"{name}.py").exists()
