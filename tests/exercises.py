"""A course made of this repository: the students' copy, the grader, and the mutants.

    python tests/exercises.py make OUT [--only 3,4]      write the students' copy
    python tests/exercises.py grade [DIR] [--json FILE]  grade the solutions in DIR
    python tests/exercises.py mutants [--only WORD]      wrong variants, each with a test that fails

The exercises and what a solution must do stand in tests/experiments/course.py, the teacher's file.
`make` blanks whole functions, and leaves in each a comment that says what is asked.

`grade` never imports a submission. Its files are laid over a copy. There a process of its own,
tests/worker.py, answers check after check with values. The verdict is made here: an exercise is
passed if each of its checks has come back right. An exit code, or a missing answer, counts for
nothing.
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "experiments"))

# What students get. Left out are experiments/TEACHING.md and the tests, which quote solutions.
COPIED = ["data.py", "scan.py", "models.py", "eval.py", "train.py", "README.md", "requirements.txt",
          "analysis.ipynb", ".gitignore", "experiments/*.py", "experiments/results/**/*",
          "tests/exercises.py", "tests/worker.py", "tests/experiments/test_your_own.py"]
CHECKS = ROOT / "tests" / "checks.json"  # in the students' copy only
SECONDS = 120  # for all checks together; a submission needs five
TOLERANCE = 1e-8  # of float64


class Refused(ValueError):
    """Bad input: one line, exit code 2."""


class Exercise(NamedTuple):
    file: str
    function: str   # as in Group.compose; its whole body is blank in the students' copy
    points: int
    statement: str  # what is asked; it stands in the blank function


# --- The students' copy ---------------------------------------------------------------------------

def blank(source, number, exercise):
    """The source without the body of one function. Its docstring stays, and a comment asks."""
    node = ast.parse(source)
    for part in exercise.function.split("."):
        node, = [child for child in node.body if getattr(child, "name", None) == part]
    docstring = node.body[0]
    indent = " " * docstring.col_offset

    points = "1 point" if exercise.points == 1 else f"{exercise.points} points"
    asked = textwrap.wrap(f"Exercise {number} ({points}). {exercise.statement}",
                          100 - len(indent) - len("# "))
    body = [f"{indent}# {line}" for line in asked]
    body.append(f'{indent}raise NotImplementedError("exercise {number} is not done yet")')

    lines = source.splitlines()
    lines[docstring.end_lineno:node.end_lineno] = body
    return "\n".join(lines) + "\n"


def make(out, exercises):
    """Writes the students' copy. These exercises are blank in it."""
    for pattern in COPIED:
        for path in ROOT.glob(pattern):
            place = out / path.relative_to(ROOT)
            if path.is_file():
                place.parent.mkdir(parents=True, exist_ok=True)
                # Without its rights: a grader's user may read the copy, and not the original.
                shutil.copyfile(path, place)

    for number, exercise in exercises.items():
        path = out / exercise.file
        source = blank(path.read_text(encoding="utf-8"), number, exercise)
        path.write_text(source, encoding="utf-8")


# --- The submission's process ---------------------------------------------------------------------

def take_files(folder, place, exercises):
    """Lays a submission over the copy. Returns {exercise: why it cannot be graded}."""
    refused = {}
    for number, exercise in exercises.items():
        path = folder / exercise.file
        if not path.is_file():
            path = folder / path.name  # uploads lie side by side

        # A link could name a file of the teacher's, which the submission itself cannot read.
        if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
            refused[number] = f"{exercise.file} is missing"
            continue

        source = path.read_bytes()
        try:
            ast.parse(source, exercise.file)  # it executes nothing
        except Exception as error:  # no Python, or not even text
            refused[number] = f"{type(error).__name__}: {error}"
        else:
            (place / exercise.file).write_bytes(source)
    return refused


def ask(place, checks, user=None):
    """The answers of one process to the checks, as many as it gave, and how it ended.

    user: the process can read only what this user, and the group of that name, can.
    """
    # What is expected stays here, and so does the place of the teacher's files.
    questions = [{"code": check["code"], "names": [*check["expected"]]} for check in checks]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
                   "SYSTEMROOT": os.environ.get("SYSTEMROOT", "")}
    rights = {"user": user, "group": user, "extra_groups": []} if user else {}
    try:
        done = subprocess.run(
            [sys.executable, str(place / "tests" / "worker.py")],
            input=json.dumps(questions).encode(), stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, cwd=place, env=environment, timeout=SECONDS, **rights)
        answers = done.stdout
        how = f"the process ended without an answer, with exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        answers = error.stdout or b""
        how = f"not done after {SECONDS} seconds"
    return answers.splitlines(), how


def ask_all(place, checks, user=None):
    """An answer to each check. Where the process ends, the rest of that exercise has failed, and a
    new process goes on with the next exercise."""
    answers = []
    while len(answers) < len(checks):
        found, how = ask(place, checks[len(answers):], user)
        answers += found
        if len(answers) < len(checks):
            number = checks[len(answers)]["exercise"]
            rest = [check for check in checks[len(answers):] if check["exercise"] == number]
            answers += [json.dumps({"error": how})] * len(rest)
    return answers


# --- The verdict ----------------------------------------------------------------------------------

def judge(check, answer):
    """What is wrong with an answer, or None."""
    try:
        answer = json.loads(answer)
        if "error" in answer:
            return str(answer["error"])
        for name, (kind, numbers) in check["expected"].items():
            found_kind, found = answer["values"][name]
            if found_kind != kind:
                return f"{name}: expected {kind}, found {found_kind}"
            for i, (wanted, got) in enumerate(zip(numbers, found, strict=True)):
                if not abs(got - wanted) <= TOLERANCE * (1 + abs(wanted)):  # NaN is wrong, too
                    return (f"{name}: expected {wanted:.6g}, found {got:.6g}, as number {i} of "
                            f"{kind}")
    except Exception:  # a submission can answer anything, and the others still get their results
        return "the process gave an answer that cannot be read"
    return None


def grade(folder, exercises, checks, user=None):
    """A result for each exercise, with what Gradescope asks for. Nothing of folder runs here."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name).resolve()
        place.chmod(0o755)
        make(place, {})  # a solution in it is laid over, or its exercise is refused
        said = take_files(folder, place, exercises)  # of each exercise that has not passed
        asked = [check for check in checks if check["exercise"] not in said]
        answers = ask_all(place, asked, user)

    for check, answer in zip(asked, answers):
        number = check["exercise"]
        problem = judge(check, answer)
        if problem and number not in said:
            # The first check that fails is the smallest case. Its code can be run as it stands.
            code = textwrap.indent(check["code"], "    ")
            said[number] = f"{textwrap.fill(check['law'], 90)}\n\n{code}\n\n{problem}"
            if f"exercise {number} is not done yet" in problem:
                said[number] = "not done yet"

    results = []
    for number, exercise in exercises.items():
        results.append({
            "name": f"{number} {exercise.function}", "max_score": exercise.points,
            "score": 0 if number in said else exercise.points,
            "output": said.get(number, "all checks passed")})
    return results


# --- The command line -----------------------------------------------------------------------------

def choose(exercises, only):
    """The exercises with these numbers, as in 3,4; all if there are none.  Raises: Refused."""
    if only is None:
        return exercises
    chosen = {number: exercises[number] for number in exercises if str(number) in only.split(",")}
    if len(chosen) < len(only.split(",")):
        raise Refused(f"--only takes numbers of exercises, such as 3,4; got {only}")
    return chosen


def main_make(args):
    import course
    if args.out.exists() and any(args.out.iterdir()):
        raise Refused(f"{args.out} is not empty")
    chosen = choose(course.EXERCISES, args.only)
    make(args.out, chosen)

    # The checks of one seed go with the copy: values in place of the code that makes them.
    stored = json.dumps({"exercises": course.EXERCISES, "checks": course.make_checks(seed=0)})
    (args.out / CHECKS.relative_to(ROOT)).write_text(stored, encoding="utf-8")
    print(f"{args.out}: exercises {', '.join(map(str, chosen))} are blank. There: "
          "python tests/exercises.py grade --only 3")
    return 0


def main_grade(args):
    if not args.dir.is_dir():
        raise Refused(f"{args.dir} is no folder")
    if CHECKS.exists():
        stored = json.loads(CHECKS.read_text(encoding="utf-8"))
        exercises = {int(number): Exercise(*row) for number, row in stored["exercises"].items()}
        checks = stored["checks"]
    else:
        import course
        exercises = course.EXERCISES
        checks = course.make_checks(seed=1)  # other numbers than students have

    exercises = choose(exercises, args.only)
    checks = [check for check in checks if check["exercise"] in exercises]
    results = grade(args.dir, exercises, checks, args.user)
    score = sum(result["score"] for result in results)
    most = sum(result["max_score"] for result in results)

    if args.json:
        args.json.write_text(json.dumps({"score": score, "tests": results}, indent=1))
    for result in results:
        print(f"{result['name']}: {result['score']}/{result['max_score']}")
        print(textwrap.indent(result["output"], "    "))
    print(f"{score} of {most} points")
    return 0 if score == most else 1


def main_mutants(args):
    import mutants
    table = [mutant for mutant in mutants.MUTANTS
             if args.only in mutant.file or args.only in mutant.law]
    return 1 if mutants.survivors(table) else 0


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python tests/exercises.py",
                                     description=__doc__.split("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)

    part = parts.add_parser("make")
    part.add_argument("out", type=Path, metavar="OUT", help="an empty or a new folder")
    part.add_argument("--only", metavar="3,4", help="the exercises to leave out (default: all)")
    part.set_defaults(run=main_make)

    part = parts.add_parser("grade")
    part.add_argument("dir", type=Path, metavar="DIR", nargs="?", default=ROOT,
                      help="default: this copy")
    part.add_argument("--only", metavar="3,4", help="the exercises to grade (default: all)")
    part.add_argument("--json", type=Path, metavar="FILE",
                      help="write the results as Gradescope's results.json")
    part.add_argument("--user", help="who runs the submission: a user, and the group of that "
                      "name, who cannot read this folder (needs root)")
    part.set_defaults(run=main_grade)

    part = parts.add_parser("mutants")
    part.add_argument("--only", metavar="WORD", default="",
                      help="those with this word in their file or law")
    part.set_defaults(run=main_mutants)

    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (Refused, OSError, ModuleNotFoundError) as error:  # students have no course, no mutants
        parser.error(str(error))


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a submission may say what has no letters
    raise SystemExit(main())
