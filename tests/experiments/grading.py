"""What tests/exercises.py does with tests: it grades solutions, and it lets mutants be killed."""

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARKS = {i: f"exercise_{i if i < 10 else 'ten'}" for i in range(1, 11)}
TESTS = "tests/experiments/test_exercises.py"
SECONDS = 60  # the time limit of an exercise


def check_folder(folder, exercises, json_file):
    """Raises: ValueError if the folder lacks a file, OSError if json_file cannot be written."""
    for path in {exercise.path for exercise in exercises.values()}:
        if not (folder / path).exists():
            raise ValueError(f"{folder} is no copy of this project: it lacks {path.as_posix()}")
    if json_file:
        open(json_file, "a").close()


def grade(copy, exercises, folder, json_file=None):
    """Prints a line an exercise. Returns whether all solutions in folder pass.

    copy: a copy of the project. Its own tests are run: only the files with exercises are taken from
    folder, and the copy is spoilt. json_file: written as the results.json of Gradescope.
    """
    results = []
    for path in {exercise.path for exercise in exercises.values()}:
        shutil.copy(folder / path, copy / path)
    for number, (path, function, most, _) in exercises.items():
        command = [sys.executable, "-m", "pytest", "-qx", "-rfE", "-p", "no:cacheprovider", "-m",
                   MARKS[number], TESTS]
        try:
            done = subprocess.run(command, cwd=copy, timeout=SECONDS, capture_output=True,
                                  text=True, env=os.environ | {"COLUMNS": "160"})
            failed = re.findall(r"^(?:FAILED|ERROR) (?:.*?::)?(.*)", done.stdout, re.M)
            said = f"failed: {(failed or ['no test was run'])[0]}" if done.returncode else "passed"
        except subprocess.TimeoutExpired:
            said = f"failed: not done after {SECONDS} seconds"
        points = most if said == "passed" else 0
        print(f"{number:>2}  {f'{path.as_posix()}: {function}':<46.46}  {points}/{most}  {said}",
              flush=True)
        results.append({"name": f"{number} {function}", "score": points, "max_score": most,
                        "output": said, "status": said.split(":")[0]})
    score, most = (sum(result[key] for result in results) for key in ("score", "max_score"))
    print(f"{score} of {most} points")
    if json_file:
        json_file.write_text(json.dumps({"score": score, "tests": results}, indent=1))
    return score == most


def run_tests(folder, *arguments):
    """pytest in this process, on the code in folder as it is now: {test: passed, failed, skipped}.

    torch stays imported. The modules of the project are forgotten before each run.
    """
    import pytest

    class Watch:
        @staticmethod
        def pytest_runtest_logreport(report):
            if report.when == "call" or not report.passed:
                outcomes[report.nodeid] = report.outcome

        @staticmethod
        def pytest_collectreport(report):
            if report.failed:
                outcomes[report.nodeid] = "failed"

    outcomes = {}
    for name, module in [*sys.modules.items()]:
        path = Path(getattr(module, "__file__", None) or "")
        of_tests = ROOT / "tests" in path.parents and name != "__main__"
        if folder in path.parents or of_tests or path.parent in (ROOT, ROOT / "experiments"):
            del sys.modules[name]
    # Written by a mutant of the same size in the same second, a .pyc file would be taken for new.
    sys.dont_write_bytecode = True
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["-q", "-p", "no:cacheprovider", f"--rootdir={folder}", *arguments],
                    plugins=[Watch])
    return outcomes


def read_table(path, word=""):
    """The mutants with this word. Raises: ValueError unless each stands once in its file."""
    if not path.exists():
        raise ValueError(f"{path.name} is missing; students have no table of mutants")
    table = [mutant for mutant in runpy.run_path(str(path))["MUTANTS"]
             if word in mutant.file or word in mutant.law]
    if not table:
        raise ValueError(f"no mutant has {word!r} in its file or its law")
    for mutant in table:
        count = (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old)
        if count != 1:
            raise ValueError(f"{mutant.file} says {count} times, and not once: {mutant.old!r}")
    return table


def survivors(copy, table):
    """Each mutant in turn takes its place in the copy. How many are noticed by no test?"""
    begin, alive = time.monotonic(), 0
    for where in sorted({mutant.tests for mutant in table}):
        failed = [test for test, how in run(copy, where).items() if how == "failed"]
        assert not failed, f"these tests fail without any mutant: {failed}"
    for mutant in table:
        path = copy / mutant.file
        source = path.read_text(encoding="utf-8")
        path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        killers = [test for test, how in run(copy, mutant.tests, "-x").items() if how == "failed"]
        path.write_text(source, encoding="utf-8")
        alive += not killers
        print(f"{'killed' if killers else 'SURVIVES':<8}  {mutant.file}: {mutant.law}\n"
              f"          {killers[0] if killers else mutant.tests}", flush=True)
    print(f"{len(table) - alive} of {len(table)} killed in {time.monotonic() - begin:.0f} seconds")
    return alive


def run(copy, where, *more):
    """where: a test file, and after ` -k ` an expression."""
    file, _, names = where.partition(" -k ")
    return run_tests(copy, str(copy / file), *(["-k", names] if names else []), *more)
