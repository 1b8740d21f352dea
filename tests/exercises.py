"""A course made of this repository: the students' copy, the grader, and the mutants.

    python tests/exercises.py make OUT [--only 3,4]      write the students' copy
    python tests/exercises.py grade [DIR] [--json FILE]  grade the solutions in DIR
    python tests/exercises.py mutants [--only WORD]      wrong variants, each with a test that fails

The exercises and what a solution must do stand in tests/experiments/course.py, the teacher's file.
`make` blanks whole functions, and leaves in each a comment that says what is asked.

`grade` never imports a submission. Its files are laid over a copy without any solution, in which a
process of their own, tests/worker.py, answers check after check with values. The comparison and
the verdict are made here. An exercise is passed if each of its checks has come back right; an exit
code, or a missing answer, counts for nothing.
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

TREE = ["data.py", "scan.py", "models.py", "eval.py", "train.py", "README.md", "requirements.txt",
        "analysis.ipynb", ".gitignore", "experiments", "tests/exercises.py", "tests/worker.py",
        "tests/experiments/test_your_own.py"]
# TEACHING.md is the teacher's, as are all tests that TREE does not name: they quote solutions.
LEFT_OUT = {"__pycache__", ".ipynb_checkpoints", "TEACHING.md"}
CHECKS = ROOT / "tests" / "checks.json"  # in the students' copy only
SECONDS = 120  # for all checks together; a submission needs five
TOLERANCE = 1e-8  # of float64


class Refused(ValueError):
    """Bad input: one line, exit code 2."""


class Exercise(NamedTuple):
    file: str
    function: str        # as in Group.compose; its whole body is blank in the students' copy
    points: int
    statement: str = ""  # what is asked; it stands in the blank function
    trap: str = ""       # for teachers: what goes wrong most often


# --- The students' copy ---------------------------------------------------------------------------

def files_of(root):
    """The files of the students' copy, relative to root."""
    found = []
    for name in TREE:
        for path in [root / name, *sorted((root / name).rglob("*"))]:
            relative = path.relative_to(root)
            if path.is_file() and not LEFT_OUT.intersection(relative.parts):
                found.append(relative)
    return found


def find_function(tree, name):
    """The node of a function, called as in Group.compose."""
    node = tree
    for part in name.split("."):
        node, = [child for child in node.body if getattr(child, "name", None) == part]
    return node


def blank(source, number, exercise):
    """The source without the body of one function. Its docstring stays, and a comment asks."""
    node = find_function(ast.parse(source), exercise.function)
    lines = source.splitlines()
    docstring = node.body[0]
    indent = " " * docstring.col_offset

    points = "1 point" if exercise.points == 1 else f"{exercise.points} points"
    asked = textwrap.wrap(f"Exercise {number} ({points}). {exercise.statement}",
                          100 - len(indent) - len("# "))
    body = [f"{indent}# {line}" for line in asked]
    body.append(f'{indent}raise NotImplementedError("exercise {number} is not done yet")')

    lines[docstring.end_lineno:node.end_lineno] = body
    return "\n".join(lines) + "\n"


def make(out, exercises, suffix=""):
    """The students' copy, or its files with this suffix. These exercises are blank in it."""
    for path in files_of(ROOT):
        if path.name.endswith(suffix):
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            # Without its rights: a grader's user may read the copy, and not the original.
            shutil.copyfile(ROOT / path, out / path)

    for number, exercise in exercises.items():
        path = out / exercise.file
        source = blank(path.read_text(encoding="utf-8"), number, exercise)
        path.write_text(source, encoding="utf-8")


# --- The submission's process ---------------------------------------------------------------------

def take_files(folder, place, exercises):
    """Lays a submission over the blank copy. Returns {exercise: why it cannot be graded}.

    A file may lie in its folder or directly in the submission, as uploads do.
    """
    refused = {}
    for number, exercise in exercises.items():
        found = [path for path in (folder / exercise.file, folder / Path(exercise.file).name)
                 if path.is_file()]
        # A link could name a file of the teacher's, which the submission itself cannot read.
        if not found or not found[0].resolve().is_relative_to(folder.resolve()):
            refused[number] = f"{exercise.file} is missing"
            continue

        source = found[0].read_bytes()
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
    return answers.splitlines()[:len(checks)], how


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

def difference(name, expected, found):
    """How two values differ, in words; None if they do not. Each is [what it is, its numbers]."""
    kind, numbers = expected
    found_kind, found_numbers = found
    if found_kind != kind:
        return f"{name}: expected {kind}, found {found_kind}"

    for i, (wanted, got) in enumerate(zip(numbers, found_numbers, strict=True)):
        if not abs(got - wanted) <= TOLERANCE * (1 + abs(wanted)):  # NaN is wrong, too
            return f"{name}: expected {wanted:.6g}, found {got:.6g}, as number {i} of {kind}"
    return None


def judge(check, answer):
    """What is wrong with an answer, or None."""
    try:
        answer = json.loads(answer)
        if "error" in answer:
            return str(answer["error"])
        for name, expected in check["expected"].items():
            problem = difference(name, expected, answer["values"][name])
            if problem:
                return problem
    except Exception:  # a submission can answer anything, and the others still get their results
        return "the process gave an answer that cannot be read"
    return None


def explain(check, problem):
    """What a student learns from the first check that fails: its code can be run as it stands."""
    code = textwrap.indent(check["code"], "    ")
    return f"{textwrap.fill(check['law'], 90)}\n\n{code}\n\n{problem}"


def grade(folder, exercises, checks, user=None):
    """A result for each exercise, with what Gradescope asks for. Nothing of folder runs here."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name).resolve()
        place.chmod(0o755)
        # In the students' copy the solutions are blank, or the student's own.
        make(place, {} if CHECKS.exists() else exercises, suffix=".py")
        refused = take_files(folder, place, exercises)
        asked = [check for check in checks if check["exercise"] not in refused]
        answers = ask_all(place, asked, user)

    said = refused  # of each exercise that has not passed
    for check, answer in zip(asked, answers):
        number = check["exercise"]
        problem = judge(check, answer)
        if problem and number not in said:
            undone = f"exercise {number} is not done yet" in problem
            said[number] = "not done yet" if undone else explain(check, problem)

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
    chosen = {}
    for text in only.split(","):
        if not text.isdecimal() or int(text) not in exercises:
            raise Refused(f"--only takes numbers of exercises, such as 3,4; got {only}")
        chosen[int(text)] = exercises[int(text)]
    return chosen


def main_make(args):
    import course
    if args.out.exists() and any(args.out.iterdir()):
        raise Refused(f"{args.out} is not empty")
    chosen = choose(course.EXERCISES, args.only)
    make(args.out, chosen)

    # The checks of one seed go with the copy: no statement and no trap, and values in place of
    # the code that makes them.
    rows = {number: exercise[:3] for number, exercise in course.EXERCISES.items()}
    stored = json.dumps({"exercises": rows, "checks": course.make_checks(seed=0)})
    (args.out / CHECKS.relative_to(ROOT)).write_text(stored, encoding="utf-8")
    print(f"{args.out}: exercises {', '.join(map(str, chosen))} are blank. There: "
          "python tests/exercises.py grade --only 3")
    return 0


def main_grade(args):
    if not args.dir.is_dir():
        raise Refused(f"{args.dir} is no folder")
    if args.json:
        open(args.json, "a").close()  # what cannot be written is refused before the work

    if CHECKS.exists():
        stored = json.loads(CHECKS.read_text(encoding="utf-8"))
        exercises = {int(number): Exercise(*row) for number, row in stored["exercises"].items()}
        checks = stored["checks"]
    else:
        import course
        exercises = course.EXERCISES
        checks = course.make_checks(args.seed)

    exercises = choose(exercises, args.only)
    checks = [check for check in checks if check["exercise"] in exercises]
    results = grade(args.dir, exercises, checks, args.user)

    for result in results:
        print(f"{result['name']}: {result['score']}/{result['max_score']}")
        print(textwrap.indent(result["output"], "    "))
    score = sum(result["score"] for result in results)
    most = sum(result["max_score"] for result in results)
    print(f"{score} of {most} points")

    if args.json:
        args.json.write_text(json.dumps({"score": score, "tests": results}, indent=1))
    return 0 if score == most else 1


def main_mutants(args):
    import mutants
    table = [mutant for mutant in mutants.MUTANTS
             if args.only in mutant.file or args.only in mutant.law]
    if not table:
        raise Refused(f"no mutant has {args.only!r} in its file or its law")
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
    part.add_argument("--seed", type=int, default=1,
                      help="of the numbers in the checks; students have 0")
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
    except (Refused, OSError) as error:
        parser.error(" ".join(str(error).split()))
    except ModuleNotFoundError as error:
        parser.error(f"{error}: a file for teachers, which a students' copy or a fork leaves out")


if __name__ == "__main__":
    raise SystemExit(main())
