"""The course: right solutions get all points however they are written, and wrong ones do not."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import exercises
import pytest
import torch
from conftest import ROOT

course = pytest.importorskip("course", reason="students have no teacher's file")
import mutants
from worker import to_json


@pytest.fixture(scope="session")
def checks():
    return course.make_checks(seed=1)


def submit(folder, number, old, new):
    """The file of an exercise with one change. If old is empty, new is added at its end."""
    path = folder / course.EXERCISES[number].file
    source = (path if path.exists() else ROOT / course.EXERCISES[number].file).read_text()
    assert source.count(old) == 1 or not old, (number, old)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source.replace(old, new) if old else f"{source}\n\n{new}")


def graded(folder, checks, numbers, user=None):
    """{exercise: its result}, for some of the exercises."""
    chosen = {number: course.EXERCISES[number] for number in numbers}
    own = [check for check in checks if check["exercise"] in chosen]
    return dict(zip(chosen, exercises.grade(folder, chosen, own, user)))


# --- What gets the points -------------------------------------------------------------------------

# Where nothing is said here, the project's own function is the solution.
OTHER_SOLUTIONS = {
    # scatter, name by name, and keys of the other sign
    5: """
def swap_machine_keys(commands):
    *lead, length, n = commands.shape
    keys = torch.zeros(*lead, length, 2 * n, 2 * n, dtype=torch.float64)
    for i in range(n):
        keys[..., i, i] = -(0.5 ** 0.5)
        keys[..., i, n + i] = 0.5 ** 0.5
        keys[..., n + i, i] = -(0.5 ** 0.5)
        keys[..., n + i, :].scatter_(-1, commands[..., i:i + 1] + n, 0.5 ** 0.5)
    return keys.flatten(-3, -2)
""",
    # chunk by chunk, and g(beta) from D, which divides by beta
    6: """
def chunked_backward(q_NCK, k_NCK, v_NCV, beta_NC1, start_NKV, d_NCV, w_NCK, g_out_NCV, G_KV):
    found = []
    for n in reversed(range(k_NCK.shape[-3])):
        q, k, v, b, S, d, w, g = [x[..., n, :, :] for x in (
            q_NCK, k_NCK, v_NCV, beta_NC1, start_NKV, d_NCV, w_NCK, g_out_NCV)]
        g_d = (q @ k.mT).tril().mT @ g + k @ G_KV
        X = torch.linalg.inv(torch.eye(k.shape[-2]) + (b * k @ k.mT).tril(-1)).mT @ g_d
        M = -(X @ d.mT).tril(-1)
        P = (g @ d.mT).tril()
        g_k = M.mT @ (b * k) + P.mT @ q + d @ G_KV.mT + b * (M @ k - X @ S.mT)
        found.append((g @ S.mT + P @ k, g_k, b * X, (X * d / b).sum(-1, keepdim=True)))
        G_KV = G_KV + q.mT @ g - w.mT @ g_d
    return (*(torch.stack(x[::-1], -3) for x in zip(*found)), G_KV)
""",
    # token by token, without one head
    10: """
def test_attention_reads_in_pieces_what_it_reads_at_once(models=models):
    block = models.AttentionBlock(8, 2)
    x = torch.randn(1, 6, 8)
    state, pieces = None, []
    for t in range(6):
        piece, state = block(x[:, t:t + 1], state)
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, 1), block(x)[0], atol=1e-4, rtol=1e-4)
""",
}


def test_right_solutions_get_all_points_however_they_are_written(tmp_path, checks):
    """Loops, scatter, a division: values count, not the way to them."""
    for number in course.EXERCISES:
        submit(tmp_path, number, "", OTHER_SOLUTIONS.get(number, ""))
    results = graded(tmp_path, checks, course.EXERCISES)
    for number, result in results.items():
        assert result["status"] == "passed", result["output"]
    assert sum(result["score"] for result in results.values()) == 20


AUTOGRAD = """
def chunked_backward(q_NCK, k_NCK, v_NCV, beta_NC1, start_NKV, d_NCV, w_NCK, g_out_NCV, G_KV):
    with torch.inference_mode(False):
        inputs = [x.clone().requires_grad_() for x in (
            q_NCK, k_NCK, v_NCV, beta_NC1, start_NKV.select(-3, 0))]
        out, last, *_ = chunked_forward(*inputs)
        return torch.autograd.grad((out, last), inputs, (g_out_NCV, G_KV))
"""

# In the order of the exercises: what each says, what it would say, and what the student reads.
WRONG = [
    (1, "(self.elements[g], self.elements[h], -1)", "(self.elements[h], self.elements[g], -1)",
     "case:  elements"),
    (2, "state_KV = state_KV + k_K", "state_KV += k_K", "state[0][0]: expected"),
    (3, "solve_triangular(L_NCC, rhs, upper=False, unitriangular=True)",
     "solve(torch.eye(L_NCC.shape[-1]) + L_NCC, rhs)",
     "law:   x solves (I + tril(L, -1)) x = rhs. The inputs stay as they are.\n"
     "case:  2 x 2, numbers on and above the diagonal\n"
     "       >>> from scan import solve_unit_triangle\n"
     "       >>> x = solve_unit_triangle(L, rhs)\n"
     "       L = torch float64 [2, 2]: [["),
    (4, "q_NCK @ start_NKV +", "q_NCK @ start_NKV[..., :1, :, :] +", "two chunks of one token"),
    (5, "exchange_key(place, commands + n,", "exchange_key(commands, commands + n,",
     "after_each_name[2][0][0]: expected"),
    (6, "", AUTOGRAD, "two chunks of one token"),
    (7, "perfect = right.all(1)", "import os; os._exit(0)", "ended without an answer, with exit"),
    (8, "survived = belief * self.rho[symbol]", "raise SystemExit(0)", "SystemExit: 0"),
    (9, "perms = nearest(self.read(states))", "perms = self.read(states).argmax(-1)", "S3, bent"),
    (10, "assert (pieces - whole).abs().max() < 1e-5", "assert True", "variant with rotate(q)"),
]


def test_wrong_solutions_get_no_points_and_are_told_the_smallest_case(tmp_path, checks):
    """Also if the process has ended on the way: a new one goes on with the next exercise."""
    for number, old, new, _ in WRONG:
        submit(tmp_path, number, old, new)
    results = graded(tmp_path, checks, course.EXERCISES)
    for number, _, _, told in WRONG:
        assert results[number]["score"] == 0
        assert told in results[number]["output"], (number, results[number]["output"])


EXPECTED = {"a": 1, "b": [torch.tensor([1.0, 2.0])]}


@pytest.mark.parametrize("found, told", [
    ({"b": [torch.tensor([1.0, 2.0])], "a": 1.0 + 1e-9}, None),
    (EXPECTED | {"a": True}, "x['a']: expected 1, found True"),
    (EXPECTED | {"b": [torch.tensor([1.0, torch.nan])]}, "x['b'][0][1]: expected 2.0, found nan"),
    (EXPECTED | {"b": [torch.tensor([[1.0, 2.0]])]}, "x['b'][0]: expected 'torch float32 [2]'"),
    (EXPECTED | {"b": [torch.tensor([1.0, 2.0]).double()]}, "x['b'][0]: expected"),
    (EXPECTED | {"b": [[1.0, 2.0]]}, "x['b'][0]: expected"),
    (EXPECTED | {"b": []}, "x['b']: expected '1 items', found '0 items'"),
    ({"a": 1}, "x: expected \"a dict with the keys ['a', 'b']\", found"),
    (object(), "x: expected \"a dict with the keys ['a', 'b']\", found {'other': 'object'}"),
])
def test_an_answer_has_the_type_the_shape_and_the_numbers_expected(found, told):
    check = {"expected": {"x": to_json(EXPECTED)}}
    problem = exercises.judge(check, {"values": {"x": to_json(found)}})
    assert problem is None if told is None else problem.startswith(told), problem


@pytest.mark.parametrize("answer", [
    None, 1, [], {}, {"values": None}, {"values": {}}, {"values": {"x": 10**400}},
    {"values": {"x": {"array": 1}}}, {"values": {"x": {"dict": 1}}}])
def test_an_answer_that_cannot_be_read_is_wrong(answer):
    assert "cannot be read" in exercises.judge({"expected": {"x": 0.5}}, answer)


# --- What does not --------------------------------------------------------------------------------

TRICKS = {
    "os._exit": "import os\nos._exit(0)\n",
    "pytest is patched": """
import pytest
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    report.outcome = "passed"
    return report
""",
    "answers of one's own": """
import os
for fd in range(3, 9):
    try:
        os.write(fd, b'{"values": {"element": 1}}\\n')
    except OSError:
        pass
""",
    "the teacher's sources": """
import os, pathlib
for place in [f"/proc/{os.getppid()}/cwd", "..", "../..", os.environ.get("PWD", "."),
              os.environ.get("OLDPWD", "."), *os.environ.get("PYTHONPATH", ".").split(":")]:
    path = pathlib.Path(place) / "data.py"
    if path.exists() and path.resolve() != pathlib.Path(__file__).resolve():
        exec(path.read_text(), globals())
""",
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_in_place_of_a_solution_gets_nothing(trick, tmp_path, checks, monkeypatch):
    """It stands in the file of the exercise, and in a plugin of pytest beside it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(ROOT)
    (tmp_path / "conftest.py").write_text(TRICKS[trick])
    submit(tmp_path, 1, "", "Group.compose = None\n" + TRICKS[trick])
    assert graded(tmp_path, checks, [1])[1]["score"] == 0
    assert Path.cwd() == ROOT


def test_the_process_is_not_told_what_is_expected(monkeypatch, tmp_path, checks):
    """Nor where the teacher's files are. It may run as a user who cannot read them."""
    pytest.importorskip("pwd", reason="Windows has no users to choose from")
    seen = []
    monkeypatch.setattr(exercises.subprocess, "run",
                        lambda *_, **options: seen.append(options) or subprocess.CompletedProcess(
                            [], 0))
    submit(tmp_path, 3, "", "")
    graded(tmp_path, checks, [3], user="nobody")
    question = json.loads(seen[0]["input"])[0]
    assert question.keys() == {"code", "inputs", "names"}
    assert question["names"] == ["x", "L", "rhs"]
    assert not any(str(ROOT) in str(value) for value in seen[0]["env"].values())
    assert seen[0]["user"] == "nobody" and seen[0]["extra_groups"] == []


def test_results_are_written_whatever_is_handed_in(tmp_path, capsys, monkeypatch):
    """A file that never ends, one that cannot be read, a link to elsewhere, and one that is right.

    They lie side by side, as uploads do, and beside them what no exercise names.
    """
    for name in ("conftest.py", "sitecustomize.py", "json.py", "numpy.py"):
        (tmp_path / name).write_text("raise SystemExit(0)\n")
    (tmp_path / "data.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "scan.py").write_text("def solve_unit_triangle(L_NCC, rhs:\n    return rhs\n")
    (tmp_path / "eval.py").symlink_to(ROOT / "eval.py")
    (tmp_path / "beliefs.py").write_text((ROOT / "experiments/beliefs.py").read_text())
    file = tmp_path / "results.json"
    arguments = ["grade", str(tmp_path), "--json", str(file), "--only"]
    monkeypatch.setattr(exercises, "SECONDS", 1)
    assert exercises.main([*arguments, "1,3,7"]) == 1
    assert "0 of 4 points" in capsys.readouterr().out

    stored = json.loads(file.read_text())
    never_ends, unreadable, link = [test["output"] for test in stored["tests"]]
    assert "not done after 1 seconds" in never_ends
    assert unreadable == "SyntaxError: '(' was never closed (scan.py, line 1)"
    assert link == "eval.py is missing"

    monkeypatch.setattr(exercises, "SECONDS", 120)
    assert exercises.main([*arguments, "8"]) == 0
    assert json.loads(file.read_text()) == {"score": 2, "tests": [
        {"name": "8 PFSA.step", "score": 2, "max_score": 2, "status": "passed",
         "output": "3 checks passed"}]}


# --- The students' copy ---------------------------------------------------------------------------

def test_the_copy_lacks_what_the_teacher_has_and_grades_without_it(tmp_path):
    out = tmp_path / "a" / "copy"
    assert exercises.main(["make", str(out), "--only", "1,3"]) == 0
    changed = {path.as_posix() for path in exercises.files_of(ROOT)
               if (out / path).read_bytes() != (ROOT / path).read_bytes()}
    assert changed == {"data.py", "scan.py"}
    tests = {path.relative_to(out).as_posix() for path in out.glob("tests/**/*.*")}
    assert tests == {"tests/exercises.py", "tests/worker.py", "tests/checks.json",
                     "tests/experiments/test_your_own.py"}
    assert not (out / "experiments/TEACHING.md").exists()
    assert course.EXERCISES[3].trap not in (out / "tests/checks.json").read_text()

    # The docstring stays, a comment asks, and what is not to be done stays as it is.
    text = (out / "scan.py").read_text(encoding="utf-8")
    assert re.search(r'"""\(I \+ L\)\^-1 rhs[^"]*"""\n    # Exercise 3 \(1 point\)\. One line of '
                     r'torch[^"]*\n    raise NotImplementedError\("exercise 3 is .*"\)\n\n\ndef',
                     text)
    assert "Exercise 4" not in text

    def type_there(*words):
        return subprocess.run([sys.executable, "tests/exercises.py", *words], cwd=out, text=True,
                              capture_output=True, env={**os.environ, "PYTHONPATH": ""})

    assert "1  failed\n    not done yet" in type_there("grade", "--only", "1").stdout
    assert "1/1  passed" in type_there("grade", str(ROOT), "--only", "1").stdout
    for part in (["make", "x"], ["mutants"]):
        refusal = type_there(*part)
        assert refusal.returncode == 2 and "a file for teachers" in refusal.stderr


def test_bad_requests_get_one_line(tmp_path, refused):
    (tmp_path / "a").write_text("")
    refused(exercises.main, ["make", tmp_path], "not empty")
    refused(exercises.main, ["make", tmp_path / "a"], "a")
    for only in ("11", "0", "3,", "x", "-1"):
        refused(exercises.main, ["make", tmp_path / "b", f"--only={only}"], only)
    assert not (tmp_path / "b").exists()
    refused(exercises.main, ["grade", tmp_path / "none"], "no folder")
    refused(exercises.main, ["grade", "--json", tmp_path], str(tmp_path))
    refused(exercises.main, ["mutants", "--only", "no such law"], "no mutant")


# --- The mutants ----------------------------------------------------------------------------------

def test_each_mutant_stands_once_in_its_file():
    mutants.check_table(mutants.MUTANTS)
    assert len(set(mutants.MUTANTS)) == len(mutants.MUTANTS) >= 60
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
    for name in re.findall(r"`(?:experiments/)?(\w+\.py)", page):
        assert list(ROOT.glob(name)) + list(ROOT.glob(f"experiments/{name}")), name
    for name in re.findall(r"-m experiments\.(\w+)", page):
        assert (ROOT / "experiments" / f"{name}.py").exists()
