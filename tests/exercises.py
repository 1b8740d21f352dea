"""A course made of this repository: the students' copy, the grader, and the mutants.

    python tests/exercises.py make OUT [--only 3,4]      write the students' copy
    python tests/exercises.py grade [DIR] [--json FILE]  grade the solutions in DIR
    python tests/exercises.py mutants [--only WORD]      wrong variants, each with a test that fails

The exercises and what a solution must do stand in tests/experiments/course.py, the teacher's file.
`make` blanks whole functions and adds what is asked to their docstrings.

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

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "experiments"))

TREE = ["data.py", "scan.py", "models.py", "eval.py", "train.py", "README.md", "requirements.txt",
        "analysis.ipynb", ".gitignore", "experiments", "tests/exercises.py", "tests/worker.py",
        "tests/experiments/test_your_own.py"]
TEACHERS = ["experiments/TEACHING.md"]  # as all tests that TREE does not name: they quote solutions
CHECKS = ROOT / "tests" / "checks.json"  # in the students' copy only
SECONDS = 120  # for all checks together; a submission needs five
TOLERANCE = 1e-8  # of float64


class Refused(ValueError):
    """Bad input: one line, exit code 2."""


# --- The students' copy ---------------------------------------------------------------------------

def files_of(root):
    """The files of the students' copy, relative to root."""
    found = []
    for name in TREE:
        for path in [root / name, *sorted((root / name).rglob("*"))]:
            relative = path.relative_to(root)
            hidden = {"__pycache__", ".ipynb_checkpoints"}.intersection(relative.parts)
            if path.is_file() and not hidden and relative.as_posix() not in TEACHERS:
                found.append(relative)
    return found


def find_function(tree, name):
    """The node of a function, called as in Group.compose.  Raises: Refused."""
    node = tree
    for part in name.split("."):
        inner = [child for child in node.body if getattr(child, "name", None) == part]
        if len(inner) != 1:
            raise Refused(f"{name} is defined {len(inner)} times, and not once")
        node = inner[0]
    return node


def blank(source, number, exercise):
    """The source without the body of one function. Its docstring stays, and says what is asked."""
    node = find_function(ast.parse(source), exercise.function)
    indent = " " * node.body[0].col_offset
    lines = source.splitlines()

    # What stands in the docstring, without the quotes.
    first, end = node.body[0].lineno - 1, node.end_lineno
    kept = []
    if ast.get_docstring(node) is not None:
        kept = lines[first:node.body[0].end_lineno]
        kept[0] = kept[0].strip().removeprefix('"""')
        kept[-1] = kept[-1].rstrip().removesuffix('"""').rstrip()
        while not kept[-1]:
            kept.pop()
        kept.append("")

    points = "1 point" if exercise.points == 1 else f"{exercise.points} points"
    asked = textwrap.wrap(f"Exercise {number} ({points}). {exercise.statement}", 100 - len(indent))
    text = [*kept, *(indent + line for line in asked)]
    text[0] = f'{indent}"""{text[0].strip()}'
    body = [*text, f'{indent}"""', f'{indent}raise NotImplementedError("exercise {number} is not '
            'done yet: see the docstring")']
    lines[first:end] = body
    return "\n".join(lines) + "\n"


def make(out, exercises, only=None, suffix=""):
    """The students' copy, or its files with this suffix. `only`: the exercises to leave out."""
    for path in files_of(ROOT):
        if path.name.endswith(suffix):
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, out / path)

    for number, exercise in exercises.items():
        if only is None or number in only:
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
            ast.parse(source)  # it executes nothing
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            where = f", line {error.lineno}" if getattr(error, "lineno", None) else ""
            line = (getattr(error, "text", None) or "").strip()
            refused[number] = (f"{type(error).__name__} in {exercise.file}{where}: "
                               f"{getattr(error, 'msg', error)}\n    {line}").rstrip()
            continue
        (place / exercise.file).write_bytes(source)
    return refused


def ask(place, checks, user=None):
    """The answers of one process to the checks, as many as it gave, and how it ended."""
    # What is expected stays here.
    questions = [{"code": check["code"], "inputs": check["inputs"], "names": [*check["expected"]]}
                 for check in checks]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("PATH", "SYSTEMROOT", "LANG"):
        if name in os.environ:
            environment[name] = os.environ[name]

    with tempfile.TemporaryFile() as answers:
        try:
            done = subprocess.run(
                [sys.executable, str(place / "tests" / "worker.py")], input=json.dumps(questions),
                stdout=answers, stderr=subprocess.DEVNULL, cwd=place, env=environment, text=True,
                timeout=SECONDS, **as_user(user))
            how = f"the process ended without an answer, with exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            how = f"not done after {SECONDS} seconds"
        answers.seek(0)
        lines = answers.read().decode("utf-8", "replace").splitlines()

    found = []
    for line in lines[:len(checks)]:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found, how


def as_user(name):
    """Arguments of subprocess.run: the process can read only what this user can."""
    if name is None:
        return {}
    import pwd  # not in Windows
    return {"user": name, "group": pwd.getpwnam(name).pw_gid, "extra_groups": []}


def ask_all(place, checks, user=None):
    """An answer to each check. Where the process ends, the rest of that exercise has failed, and a
    new process goes on with the next exercise."""
    answers = []
    while len(answers) < len(checks):
        found, how = ask(place, checks[len(answers):], user)
        answers += found
        if len(answers) < len(checks):
            number = checks[len(answers)]["exercise"]
            while len(answers) < len(checks) and checks[len(answers)]["exercise"] == number:
                answers.append({"error": how})
    return answers


# --- The verdict ----------------------------------------------------------------------------------

def difference(name, expected, found):
    """The first place at which two values differ, in words; None if there is none."""
    if isinstance(expected, dict) and "dict" in expected:
        if not isinstance(found, dict) or "dict" not in found:
            return f"{name}: expected a dict, found {show(found)}"
        expected, found = expected["dict"], found["dict"]
        if expected.keys() != found.keys():
            return f"{name}: expected the keys {[*expected]}, found {[*found]}"
        parts = [(f"{name}[{key!r}]", expected[key], found[key]) for key in expected]
    elif isinstance(expected, list):
        if not isinstance(found, list):
            return f"{name}: expected a list, found {show(found)}"
        if len(expected) != len(found):
            return f"{name}: expected {len(expected)} items, found {len(found)}"
        parts = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(expected, found))]
    elif isinstance(expected, dict):
        return array_difference(name, expected, found)
    else:
        return number_difference(name, expected, found)

    for part in parts:
        problem = difference(*part)
        if problem:
            return problem
    return None


def number_difference(name, expected, found):
    """As difference, for what is no list, dict or array."""
    numbers = (int, float)
    if type(expected) in numbers and type(found) in numbers:
        same = abs(expected - found) <= TOLERANCE
    else:
        same = type(expected) is type(found) and expected == found
    return None if same else f"{name}: expected {show(expected)}, found {show(found)}"


def array_difference(name, expected, found):
    """As difference, for arrays and tensors."""
    one_number = expected["shape"] == [] and type(found) in (int, float)
    if one_number:
        found = expected | {"array": found}
    if not isinstance(found, dict) or found.get("of") != expected["of"]:
        return f"{name}: expected {show(expected)}, found {show(found)}"
    if found["shape"] != expected["shape"]:
        return f"{name}: expected the shape {expected['shape']}, found {found['shape']}"
    floating = expected["dtype"].startswith("float") or found["dtype"].startswith("float")
    if floating and found["dtype"] != expected["dtype"]:
        return f"{name}: expected the type {expected['dtype']}, found {found['dtype']}"

    truth = np.array(expected["array"])
    values = np.array(found["array"])
    wrong = ~(np.abs(values - truth) <= TOLERANCE * (1 + np.abs(truth)))  # NaN is wrong, too
    if not wrong.any():
        return None
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    where = f"{name}[{', '.join(map(str, place))}]" if place else name
    return (f"{where}: expected {truth[place]:.6g}, found {values[place]:.6g}; "
            f"{wrong.sum()} of {wrong.size} numbers differ")


def show(value, most=16):
    """A value in a line: small ones in full, of others the type and the shape."""
    if not isinstance(value, dict):
        text = repr(value)
        return text if len(text) < 100 else f"{type(value).__name__} of {len(text)} characters"
    if "other" in value or "dict" in value:
        return f"a {value.get('other', 'dict')}"
    shape = " x ".join(map(str, value["shape"])) or "a number"
    text = f"{value['of']} {value['dtype']}, {shape}"
    if np.prod(value["shape"]) <= most:
        numbers = np.array(value["array"])
        if value["dtype"].startswith("float"):
            numbers = numbers.round(4)
        text += f": {numbers.tolist()}"
    return text


def explain(check, problem):
    """What a student learns from the first check that fails."""
    lines = [f"law:   {check['law']}", f"case:  {check['case']}"]
    lines += [f"       >>> {line}" for line in check["code"].splitlines()]
    for name, value in check["inputs"].items():
        lines.append(f"       {name} = {show(value)}")
    return "\n".join([*lines, f"       {problem}"])


def judge(check, answer):
    """What is wrong with an answer, or None."""
    if not isinstance(answer, dict) or "values" not in answer:
        error = answer.get("error") if isinstance(answer, dict) else None
        return error or "the process gave an answer that cannot be read"
    try:
        for name, expected in check["expected"].items():
            problem = difference(name, expected, answer["values"][name])
            if problem:
                return problem
    except (TypeError, ValueError, KeyError, AttributeError, IndexError):
        return "the process gave an answer that cannot be read"
    return None


def grade(folder, exercises, checks, user=None):
    """A result for each exercise, with what Gradescope asks for. Nothing of folder runs here."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name).resolve()
        place.chmod(0o755)
        make(place, exercises, only=() if CHECKS.exists() else None, suffix=".py")
        refused = take_files(folder, place, exercises)
        asked = [check for check in checks if check["exercise"] not in refused]

        # A child sees the working directory of its parent: so that, too, has no solution.
        before = os.getcwd()
        os.chdir(place)
        try:
            answers = ask_all(place, asked, user)
        finally:
            os.chdir(before)

    results = []
    for number, exercise in exercises.items():
        own = [(check, answer) for check, answer in zip(asked, answers)
               if check["exercise"] == number]
        said = refused.get(number)
        for check, answer in own:
            problem = judge(check, answer)
            if problem and not said:
                undone = f"exercise {number} is not done yet" in problem
                said = "not done yet" if undone else explain(check, problem)
        passed = said is None and len(own) > 0
        results.append({
            "name": f"{number} {exercise.function}", "score": exercise.points * passed,
            "max_score": exercise.points, "status": "passed" if passed else "failed",
            "output": f"{len(own)} checks passed" if passed else said or "no check was made"})
    return results


def report(results, exercises, json_file=None):
    """Prints the results, and writes them as Gradescope's results.json. Returns: is all right?"""
    for result, exercise in zip(results, exercises.values()):
        points = f"{result['score']}/{result['max_score']}"
        print(f"{result['name']:<26.26}  {exercise.file:<22.22}  {points}  {result['status']}")
        if result["status"] == "failed":
            print(textwrap.indent(result["output"], "    "))

    score = sum(result["score"] for result in results)
    most = sum(result["max_score"] for result in results)
    print(f"{score} of {most} points")
    if json_file:
        json_file.write_text(json.dumps({"score": score, "tests": results}, indent=1))
    return score == most


# --- The command line -----------------------------------------------------------------------------

class Stated(NamedTuple):
    """What a students' copy knows of an exercise."""
    file: str
    function: str
    points: int


def read_course(seed):
    """The exercises and their checks: of the teacher's file, or of a students' copy."""
    if CHECKS.exists():
        stored = json.loads(CHECKS.read_text(encoding="utf-8"))
        exercises = {int(number): Stated(*row) for number, row in stored["exercises"].items()}
        return exercises, stored["checks"]

    need("course.py")
    import course
    return course.EXERCISES, course.make_checks(seed)


def need(name):
    """Raises: Refused where a fork has left out the chapters and their tests."""
    if not (ROOT / "tests" / "experiments" / name).exists():
        raise Refused(f"tests/experiments/{name}, a file for teachers, is missing")


def write_checks(path, exercises, checks):
    """The checks for a students' copy, and no statement or trap."""
    rows = {number: exercise[:3] for number, exercise in exercises.items()}
    path.write_text(json.dumps({"exercises": rows, "checks": checks}), encoding="utf-8")


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


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python tests/exercises.py",
                                     description=__doc__.split("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    add = parts.add_parser("make").add_argument
    add("out", type=Path, metavar="OUT", help="an empty or a new folder")
    add("--only", metavar="3,4", help="the exercises to leave out (default: all)")
    add = parts.add_parser("grade").add_argument
    add("dir", type=Path, metavar="DIR", nargs="?", default=ROOT, help="default: this copy")
    add("--only", metavar="3,4", help="the exercises to grade (default: all)")
    add("--json", type=Path, metavar="FILE", help="write the results as Gradescope's results.json")
    add("--seed", type=int, default=1, help="of the numbers in the checks; students have 0")
    add("--user", help="who runs the submission: one who cannot read this folder (needs root)")
    add = parts.add_parser("mutants").add_argument
    add("--only", metavar="WORD", default="", help="those with this word in their file or law")
    args = parser.parse_args(argv)
    try:
        return PARTS[args.part](args)
    except (Refused, OSError) as error:
        parser.error(" ".join(str(error).split()))


def main_make(args):
    if CHECKS.exists():
        raise Refused("this is a students' copy; another is made of the whole project")
    if args.out.exists() and any(args.out.iterdir()):
        raise Refused(f"{args.out} is not empty")
    exercises, checks = read_course(seed=0)
    chosen = choose(exercises, args.only)
    make(args.out, exercises, chosen)
    write_checks(args.out / CHECKS.relative_to(ROOT), exercises, checks)
    print(f"{args.out}: exercises {', '.join(map(str, chosen))} are blank. There: "
          "python tests/exercises.py grade --only 3")
    return 0


def main_grade(args):
    if not args.dir.is_dir():
        raise Refused(f"{args.dir} is no folder")
    if args.json:
        open(args.json, "a").close()  # what cannot be written is refused before the work
    exercises, checks = read_course(args.seed)
    exercises = choose(exercises, args.only)
    checks = [check for check in checks if check["exercise"] in exercises]
    json_file = args.json and args.json.resolve()
    results = grade(args.dir.resolve(), exercises, checks, args.user)
    return 0 if report(results, exercises, json_file) else 1


def main_mutants(args):
    if CHECKS.exists():
        raise Refused("a students' copy has no table of mutants")
    need("mutants.py")
    import mutants
    table = [mutant for mutant in mutants.MUTANTS
             if args.only in mutant.file or args.only in mutant.law]
    if not table:
        raise Refused(f"no mutant has {args.only!r} in its file or its law")
    return 1 if mutants.survivors(table) else 0


PARTS = {"make": main_make, "grade": main_grade, "mutants": main_mutants}

if __name__ == "__main__":
    raise SystemExit(main())
