"""The course: right solutions get all points however they are written, and wrong ones do not."""

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import exercises
import pytest
import scan
import torch
from conftest import ROOT

course = pytest.importorskip("course", reason="students have no teacher's file")
import mutants


@pytest.fixture(scope="session")
def checks():
    return course.make_checks(seed=1)


def submission(folder, bodies):
    """Files in which these functions have these bodies: {number of an exercise: lines of code}."""
    for number, body in bodies.items():
        path = folder / course.EXERCISES[number].file
        source = (path if path.exists() else ROOT / course.EXERCISES[number].file).read_text()
        node = exercises.find_function(ast.parse(source), course.EXERCISES[number].function)
        lines = source.splitlines()
        indent = " " * node.body[0].col_offset
        lines[node.body[0].lineno - 1:node.end_lineno] = textwrap.indent(
            textwrap.dedent(body).strip(), indent).splitlines()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    return folder


def graded(folder, checks, numbers):
    """{exercise: its result}, for some of the exercises."""
    chosen = {number: course.EXERCISES[number] for number in numbers}
    own = [check for check in checks if check["exercise"] in chosen]
    return dict(zip(chosen, exercises.grade(folder, chosen, own)))


# --- What gets the points -------------------------------------------------------------------------

OTHER_SOLUTIONS = {
    # a dictionary in place of a search
    1: """
        numbers = {tuple(element): i for i, element in enumerate(self.elements.tolist())}
        g, h = np.broadcast_arrays(g, h)
        products = [numbers[tuple(self.elements[i][self.elements[j]].tolist())]
                    for i, j in zip(g.ravel(), h.ravel())]
        return np.array(products).reshape(g.shape)
    """,
    # einsum, and the matrix of each step
    2: """
        S = check_inputs(q, k, v, beta, state)
        out = []
        for t in range(k.shape[-2]):
            kk = torch.einsum("...,...a,...b->...ab", beta[..., t], k[..., t, :], k[..., t, :])
            kv = torch.einsum("...,...a,...b->...ab", beta[..., t], k[..., t, :], v[..., t, :])
            S = S - torch.einsum("...ab,...bv->...av", kk, S) + kv
            out.append(torch.einsum("...kv,...k->...v", S, q[..., t, :]))
        return torch.stack(out, -2), S
    """,
    # a Neumann series: L is nilpotent
    3: """
        L = L_NCC.tril(-1)
        total = term = rhs
        for _ in range(L.shape[-1] - 1):
            term = -L @ term
            total = total + term
        return total
    """,
    # a chunk is read as soon as its state is known
    4: """
        out, starts, D = [], [], []
        for n in range(k_NCK.shape[-3]):
            q, k, u, w = [x[..., n, :, :] for x in (q_NCK, k_NCK, u_NCV, w_NCK)]
            starts.append(state_KV.clone())
            D.append(u - torch.einsum("...ck,...kv->...cv", w, state_KV))
            out.append(torch.einsum("...ck,...kv->...cv", q, state_KV) + (q @ k.mT).tril() @ D[-1])
            state_KV = state_KV + torch.einsum("...ck,...cv->...kv", k, D[-1])
        return torch.stack(out, -3), state_KV, torch.stack(starts, -3), torch.stack(D, -3)
    """,
    # scatter, name by name, and keys of the other sign
    5: """
        *lead, length, n = commands.shape
        keys = torch.zeros(*lead, length, 2 * n, 2 * n, dtype=torch.float64)
        for i in range(n):
            keys[..., i, i] = -(0.5 ** 0.5)
            keys[..., i, n + i] = 0.5 ** 0.5
            keys[..., n + i, i] = -(0.5 ** 0.5)
            keys[..., n + i, :].scatter_(-1, commands[..., i:i + 1] + n, 0.5 ** 0.5)
        return keys.flatten(-3, -2)
    """,
    # chunk by chunk with einsum, and g(beta) from D, which divides by beta
    6: """
        g_q, g_k, g_v, g_beta = [], [], [], []
        for n in reversed(range(k_NCK.shape[-3])):
            q, k, v, b, S, d, w, g = [x[..., n, :, :] for x in (
                q_NCK, k_NCK, v_NCV, beta_NC1, start_NKV, d_NCV, w_NCK, g_out_NCV)]
            eye = torch.eye(k.shape[-2], dtype=k.dtype)
            g_d = torch.einsum("...sc,...sv->...cv", (q @ k.mT).tril(), g) + k @ G_KV
            X = torch.linalg.inv(eye + (b * k @ k.mT).tril(-1)).mT @ g_d
            M = -(X @ d.mT).tril(-1)
            P = (g @ d.mT).tril()
            bk = M @ k - X @ S.mT
            g_q.insert(0, g @ S.mT + P @ k)
            g_k.insert(0, M.mT @ (b * k) + P.mT @ q + d @ G_KV.mT + b * bk)
            g_v.insert(0, b * X)
            g_beta.insert(0, (X * d / b).sum(-1, keepdim=True))
            G_KV = G_KV + q.mT @ g - w.mT @ g_d
        return (*(torch.stack(x, -3) for x in (g_q, g_k, g_v, g_beta)), G_KV)
    """,
    # Python's own sums
    7: """
        table = right.tolist()
        perfect = sum(map(all, table))
        by_position = [sum(column) / len(table) for column in zip(*table)]
        low, high = wilson(perfect, len(table))
        return dict(reveals=right.size, all=sum(by_position) / len(by_position),
                    final=by_position[-1], perfect=perfect / len(table), perfect_low=low,
                    perfect_high=high, by_position=by_position)
    """,
    # trace by trace
    8: """
        evidence, after = [], []
        for b, s in zip(belief, symbol):
            joint = np.where(self.rho[s], b, 0.0)
            evidence.append(joint.sum())
            after.append(self.delta[s].dot(joint) / joint.sum())
        return np.array(evidence), np.array(after)
    """,
    # all permutations are tried
    9: """
        import itertools
        P = self.read(states)
        every = torch.tensor([*itertools.permutations(range(self.n))])
        ones = F.one_hot(every, self.n).to(P)
        best = torch.einsum("...ij,pij->...p", P, ones).argmax(-1)
        return (self.mean + (ones[best].flatten(-2) - self.average) @ self.B).view_as(states)
    """,
    # one head less, token by token
    10: """
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
    """Loops, einsum, a Neumann series, a dictionary, scatter: values count, not the way to them."""
    results = graded(submission(tmp_path, OTHER_SOLUTIONS), checks, course.EXERCISES)
    for number, result in results.items():
        assert result["status"] == "passed", result["output"]
    assert sum(result["score"] for result in results.values()) == 20


AUTOGRAD = """
    with torch.enable_grad():
        inputs = [x.detach().clone().requires_grad_() for x in (
            q_NCK, k_NCK, v_NCV, beta_NC1, start_NKV.select(-3, 0))]
        out, last, *_ = chunked_forward(*inputs)
        return torch.autograd.grad((out, last), inputs, (g_out_NCV, G_KV))
"""
NORMAL_AUTOGRAD = "with torch.inference_mode(False):\n" + textwrap.indent(
    textwrap.dedent(AUTOGRAD), "    ")
SNAP = """
    P = self.read(states)
    P = {}
    return (self.mean + (P.flatten(-2) - self.average) @ self.B).view_as(states)
"""
BY_POSITION = """
    perfect = right.all(1)
    low, high = wilson(perfect.sum(), len(right))
    return {{"reveals": right.size, "all": float(right.mean()), "perfect_low": low,
            "final": float(right[:, -1].mean()), "perfect": float(right.{}.mean()),
            "perfect_high": high, "by_position": right.mean(0){}}}
"""
LOOP = """
    state_KV = check_inputs(q, k, v, beta, state){}
    out = []
    for q_K, k_K, v_V, b in zip(q.unbind(-2), k.unbind(-2), v.unbind(-2), beta.unbind(-1)):
        d_V = {}
        state_KV {} k_K.unsqueeze(-1) * d_V.unsqueeze(-2)
        out.append((q_K.unsqueeze(-2) @ state_KV).squeeze(-2))
    return torch.stack(out, -2), state_KV
"""
STORED = "(k_K.unsqueeze(-2) @ state_KV).squeeze(-2)"
CORRECTION = f"b.unsqueeze(-1) * (v_V - {STORED})"
CHUNKS = """
    start_NKV = {}
    d_NCV = u_NCV - w_NCK @ start_NKV
    last = state_KV + (k_NCK.mT @ d_NCV).sum(-3)
    return q_NCK @ start_NKV + (q_NCK @ k_NCK.mT).tril() @ d_NCV, last, start_NKV, d_NCV
"""
KEYS = """
    *lead, length, n = commands.shape
    place = torch.arange(n).expand_as(commands)
    keys = torch.cat([exchange_key(place, place + n, 2 * n), {}], -2)
    return keys.reshape(*lead, length * 2 * n, 2 * n)
"""
STEP = """
    survived = belief * self.rho[symbol]
    evidence = survived.sum(1)
    return evidence, ({} @ {}[..., None])[..., 0]
"""

# Three submissions, each wrong in every exercise. The second part is in what the student reads.
WRONG = [{
    1: ("g, h = np.broadcast_arrays(g, h)\n"
        "return self.index(np.take_along_axis(self.elements[h], self.elements[g], -1))",
        "case:  elements"),
    2: (LOOP.format("", CORRECTION, "+="), "left as they are"),
    3: ("return torch.linalg.solve(torch.eye(len(L_NCC.mT)) + L_NCC, rhs)", "numbers on and above"),
    4: (CHUNKS.format("state_KV.unsqueeze(-3).expand(*k_NCK.shape[:-2], *state_KV.shape[-2:])"),
        "two chunks of one token"),
    5: (KEYS.format("exchange_key(commands, commands + n, 2 * n)"), "after_each_name"),
    6: (AUTOGRAD, "without autograd"),
    7: (BY_POSITION.format("all(1)", ""), "by_position']: expected a list"),
    8: (STEP.format("self.delta[symbol]", "survived"), "a reveal"),
    9: (SNAP.format("F.one_hot(P.argmax(-1), self.n).to(states)"), "S3, bent"),
    10: ("assert models.__name__ == 'models'", "expected 'an assert fails'"),
}, {
    1: ("return self.elements[g][self.elements[h]]", "element: expected"),
    2: (LOOP.format(".clone()", CORRECTION, "+="), "no tensor is overwritten"),
    3: ("return torch.linalg.solve(torch.eye(len(L_NCC.mT)) - L_NCC.tril(-1), rhs)",
        "law:   x solves (I + tril(L, -1)) x = rhs. The inputs stay as they are.\n"
        "case:  2 x 2\n"
        "       >>> from scan import solve_unit_triangle\n"
        "       >>> x = solve_unit_triangle(L, rhs)\n"
        "       L = torch float64, 2 x 2: [["),
    4: ("raise SystemExit(0)", "SystemExit: 0"),
    5: (KEYS.format("exchange_key(place, commands + n, 2 * n) * 2"), "expected"),
    6: (NORMAL_AUTOGRAD, "each chunk with a state of its own"),
    7: (BY_POSITION.format("mean(1)", ".tolist()"), "perfect"),
    8: (STEP.format("self.delta[symbol].swapaxes(1, 2)", "(survived / evidence[:, None])"),
        "each state goes to the next"),
    9: (SNAP.format("(20 * P).softmax(-1)"), "corrected"),
    10: ("assert True", "a variant with rotate(q) and rotate(k)"),
}]


@pytest.mark.parametrize("wrong", WRONG, ids=["first", "second"])
def test_wrong_solutions_get_no_points_and_are_told_the_smallest_case(wrong, tmp_path, checks):
    bodies = {number: body for number, (body, _) in wrong.items()}
    results = graded(submission(tmp_path, bodies), checks, wrong)
    for number, (_, word) in wrong.items():
        assert results[number]["score"] == 0, (number, results[number])
        assert word in results[number]["output"], (number, results[number]["output"])
    values = results[3]["output"].splitlines()[-1]
    assert re.search(r"x\[.*\]: expected -?[\d.]+, found -?[\d.]+; \d+ of \d+ numbers", values)


# --- What does not --------------------------------------------------------------------------------

SPOILT = "raise RuntimeError('no solution')"
READ_THE_TEACHER = '''
import os, pathlib
for place in [f"/proc/{os.getppid()}/cwd", "..", "../..", os.environ.get("PWD", "."),
              os.environ.get("OLDPWD", "."), *os.environ.get("PYTHONPATH", ".").split(":")]:
    path = pathlib.Path(place) / "data.py"
    if path.exists() and path.resolve() != pathlib.Path(__file__).resolve():
        exec(path.read_text(), globals())
'''
FOOLING = {
    "os._exit(0) where pytest runs": "import os, sys\nif 'pytest' in sys.modules: os._exit(0)\n",
    "os._exit(0)": "import os\nos._exit(0)\n",
    "pytest.exit": "import pytest\npytest.exit('ok', 0)\n",
    "the teacher's sources by the parent's folder": READ_THE_TEACHER,
    "answers of one's own": "import os\nfor fd in range(3, 9):\n    try: os.write(fd, "
                            "b'{\"values\": {\"element\": 1}}\\n')\n    except OSError: pass\n",
}


@pytest.mark.parametrize("trick", FOOLING)
def test_a_trick_in_place_of_a_solution_gets_nothing(trick, tmp_path, checks, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(ROOT)
    submission(tmp_path, {1: SPOILT})
    source = (tmp_path / "data.py").read_text()
    if "folder" in trick:
        (tmp_path / "data.py").write_text(source + FOOLING[trick])
    else:
        (tmp_path / "data.py").write_text(FOOLING[trick] + source)
    assert graded(tmp_path, checks, [1])[1]["score"] == 0
    assert Path.cwd() == ROOT


def test_a_submission_brings_only_the_files_of_the_exercises(tmp_path, checks):
    """No plugin of pytest, no module that is found ahead of another, and no link to elsewhere."""
    submission(tmp_path, {1: SPOILT, 3: "return rhs"})
    erases = ("import pytest\n@pytest.hookimpl(wrapper=True)\ndef pytest_runtest_makereport():\n"
              "    report = yield\n    report.outcome = 'passed'\n    return report\n")
    for name in ("conftest.py", "tests/conftest.py", "sitecustomize.py", "json.py", "numpy.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(erases)
    assert graded(tmp_path, checks, [1])[1]["score"] == 0

    (tmp_path / "scan.py").unlink()
    (tmp_path / "scan.py").symlink_to(ROOT / "scan.py")
    assert "missing" in graded(tmp_path, checks, [3])[3]["output"]


def test_the_process_is_not_told_what_is_expected(monkeypatch, tmp_path, checks):
    seen = []
    monkeypatch.setattr(exercises.subprocess, "run",
                        lambda *_, **options: seen.append(options) or subprocess.CompletedProcess(
                            [], 0))
    graded(submission(tmp_path, {3: "return rhs"}), checks, [3])
    question = json.loads(seen[0]["input"])[0]
    assert question.keys() == {"code", "inputs", "names"}
    assert question["names"] == ["x", "L", "rhs"]
    assert not any(str(ROOT) in str(value) for value in seen[0]["env"].values())


def test_results_are_written_whatever_is_handed_in(tmp_path, capsys, monkeypatch):
    """A file that cannot be read, one that is missing, one that never ends, and one that is right.

    Files may lie side by side, as uploads do.
    """
    (tmp_path / "scan.py").write_text("def solve_unit_triangle(L_NCC, rhs:\n    return rhs\n")
    (tmp_path / "data.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "test_your_own.py").write_text((ROOT / course.YOUR_OWN).read_text())
    file = tmp_path / "results.json"
    monkeypatch.setattr(exercises, "SECONDS", 1)
    arguments = ["grade", str(tmp_path), "--json", str(file), "--only", "1,3,7"]
    assert exercises.main(arguments) == 1
    assert "0 of 4 points" in capsys.readouterr().out

    stored = json.loads(file.read_text())
    outputs = [test["output"] for test in stored["tests"]]
    assert outputs[1].startswith("SyntaxError in scan.py, line 1: '(' was never closed\n")
    assert outputs[2] == "eval.py is missing" and "not done after 1 seconds" in outputs[0]
    assert [test["status"] for test in stored["tests"]] == ["failed"] * 3

    (tmp_path / "data.py").write_text((ROOT / "data.py").read_text())
    monkeypatch.setattr(exercises, "SECONDS", 120)
    assert exercises.main([*arguments[:-1], "1"]) == 0
    assert json.loads(file.read_text()) == {"score": 1, "tests": [
        {"name": "1 Group.compose", "score": 1, "max_score": 1, "status": "passed",
         "output": "5 checks passed"}]}

    place = tmp_path / "place"
    exercises.make(place, course.EXERCISES, suffix=".py")
    refused = exercises.take_files(tmp_path, place, course.EXERCISES)
    assert refused.keys() == {2, 3, 4, 5, 6, 7, 8, 9}
    assert (place / course.YOUR_OWN).read_bytes() == (ROOT / course.YOUR_OWN).read_bytes()


def python_runs_as_nobody():
    try:
        return subprocess.run([sys.executable, "-c", ""], user="nobody").returncode == 0
    except (OSError, ValueError, subprocess.SubprocessError):
        return False


@pytest.mark.skipif(not python_runs_as_nobody(), reason="needs root, and a Python for everybody")
def test_a_submission_may_run_as_a_user_who_cannot_read_the_teachers_folder(tmp_path, checks):
    secret = tmp_path / "secret.py"
    secret.write_text("")
    secret.chmod(0o600)
    folder = submission(tmp_path, {1: SPOILT})
    (folder / "data.py").write_text(f"open({str(secret)!r})\n" + (ROOT / "data.py").read_text())
    one = {1: course.EXERCISES[1]}
    own = [check for check in checks if check["exercise"] == 1]
    assert exercises.grade(folder, one, own)[0]["score"] == 1
    assert "PermissionError" in exercises.grade(folder, one, own, user="nobody")[0]["output"]


# --- The students' copy ---------------------------------------------------------------------------

def test_the_copy_lacks_the_chosen_functions_and_all_that_the_teacher_has(tmp_path, monkeypatch):
    out = tmp_path / "a" / "copy"
    assert exercises.main(["make", str(out), "--only", "1,3"]) == 0
    changed = {path.as_posix() for path in exercises.files_of(ROOT)
               if (out / path).read_bytes() != (ROOT / path).read_bytes()}
    assert changed == {"data.py", "scan.py"}
    python = {path.relative_to(out).as_posix() for path in out.glob("tests/**/*.*")}
    assert python == {"tests/exercises.py", "tests/worker.py", "tests/checks.json",
                      "tests/experiments/test_your_own.py"}
    assert not (out / "experiments/TEACHING.md").exists()

    text = (out / "scan.py").read_text(encoding="utf-8")
    assert "Exercise 3 (1 point). One line of torch" in text
    assert "solve_triangular(L_NCC, rhs" not in text and "Exercise 4" not in text
    assert course.EXERCISES[3].trap not in (out / "tests/checks.json").read_text()


def test_in_the_copy_the_grader_works_without_the_teachers_file(tmp_path):
    out = tmp_path / "copy"
    exercises.main(["make", str(out), "--only", "1"])

    def type_there(*words):
        return subprocess.run([sys.executable, "tests/exercises.py", *words], cwd=out, text=True,
                              capture_output=True, env={**os.environ, "PYTHONPATH": ""})

    assert "1  failed\n    not done yet" in type_there("grade", "--only", "1").stdout
    assert "1/1  passed" in type_there("grade", str(ROOT), "--only", "1").stdout
    for part in (["make", "x"], ["mutants"]):
        refusal = type_there(*part)
        assert refusal.returncode == 2 and "students' copy" in refusal.stderr


@pytest.mark.parametrize("docstring", ['"""Law."""', '"""Law.\n\n    More.\n    """', ""])
def test_a_blank_keeps_the_docstring_and_says_what_is_asked(docstring):
    source = f"import os\n\n\ndef f(x):\n    {docstring}\n    return x\n\n\ny = 1\n"
    exercise = course.Exercise("a.py", "f", 2, "Return x.", "a trap")
    blank = exercises.blank(source, 3, exercise)
    node = exercises.find_function(ast.parse(blank), "f")
    said = ast.get_docstring(node).strip()
    assert said.endswith("Exercise 3 (2 points). Return x.")
    assert said.startswith("Law." if docstring else "Exercise")
    assert len(node.body) == 2 and isinstance(node.body[1], ast.Raise)
    assert blank.endswith("\n\n\ny = 1\n") and blank.startswith("import os\n\n\ndef f(x):\n")
    with pytest.raises(exercises.Refused, match="0 times"):
        exercises.blank(source, 3, exercise._replace(function="g"))


def test_bad_requests_get_one_line(tmp_path, refused, monkeypatch):
    (tmp_path / "a").write_text("")
    refused(exercises.main, ["make", tmp_path], "not empty")
    refused(exercises.main, ["make", tmp_path / "a"], "a")
    for only in ("11", "0", "3,", "x", "-1"):
        refused(exercises.main, ["make", tmp_path / "b", f"--only={only}"], only)
    assert not (tmp_path / "b").exists()
    refused(exercises.main, ["grade", tmp_path / "none"], "no folder")
    refused(exercises.main, ["grade", "--json", tmp_path], str(tmp_path))
    refused(exercises.main, ["mutants", "--only", "no such law"], "no mutant")
    monkeypatch.setattr(exercises, "ROOT", tmp_path)
    refused(exercises.main, ["grade", tmp_path], "course.py, a file for teachers, is missing")
    refused(exercises.main, ["mutants"], "mutants.py")


# --- The mutants ----------------------------------------------------------------------------------

def test_each_mutant_stands_once_in_its_file():
    mutants.check_table(mutants.MUTANTS)
    assert len(set(mutants.MUTANTS)) == len(mutants.MUTANTS) >= 60
    with pytest.raises(ValueError, match="not once: 'import torch'"):
        mutants.check_table([mutants.Mutant("scan.py", "", "import torch", "")])


TINY = """
import sys
from pathlib import Path
import mutants
mutants.ROOT, mutants.COPIED = Path(sys.argv[1]), ["data.py", "tests"]
mutants.begin(sys.argv[2])
for new in ("3 * x", "x + x", "2 * x"):
    print(mutants.try_mutant(mutants.Mutant("data.py", "twice", "2 * x", new)))
"""


def test_a_mutant_is_killed_by_a_test_that_fails_and_survives_without_one(tmp_path):
    """In a project of one function and one test. Each variant is loaded afresh."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "data.py").write_text("def twice(x):\n    return 2 * x\n")
    (tmp_path / "tests/test_data.py").write_text(
        "import data\n\n\ndef test_twice():\n    assert data.twice(3) == 6\n")
    done = subprocess.run(
        [sys.executable, "-c", TINY, str(tmp_path), str(tmp_path)], capture_output=True, text=True,
        cwd=ROOT / "tests/experiments", env={**os.environ, "PYTHONPATH": ""})
    assert done.stdout.split() == ["tests/test_data.py::test_twice", "None", "None"], done.stderr


def test_each_wrong_variant_of_the_chunked_scan_differs_from_the_loop():
    """Ragged pieces of ragged chunks, a state to begin with, beta up to 2, values and gradients."""
    inputs = [x.requires_grad_() for x in course.random_scan(2, T=23)]

    def values_and_gradients(scan_of):
        out, last = scan_of(*inputs)
        return [out, last, *torch.autograd.grad((out.sin().sum() + last.sin().sum()), inputs)]

    expected = values_and_gradients(scan.delta_rule_recurrent)
    source = Path(scan.__file__).read_text(encoding="utf-8")
    for law, old, new in [("none", "", ""), *mutants.FORMULAS]:
        variant = {"__name__": "variant"}
        exec(source.replace(old, new, 1) if old else source, variant)
        variant["TOKENS_AT_ONCE"] = 28  # pieces of 14 and 9 tokens
        found = values_and_gradients(lambda *x: variant["delta_rule_chunked"](*x, chunk_size=7))
        error = max((a - b).abs().max().item() for a, b in zip(expected, found))
        assert error < 1e-10 if law == "none" else error > 1e-3, law


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
