"""A course of eleven exercises: functions left blank, graded by tests.

    python tests/exercises.py make OUT                            write the students' copy
    python tests/exercises.py grade DIR [--only 3,4] [--json F]   grade the functions in DIR
    python tests/exercises.py mutants [--only WORD]               run wrong variants of the project

The grader takes the function of an exercise alone, puts it into a fresh copy of the project, and
runs the tests of that exercise. So a mistake costs its own exercise only, as long as Python can
parse the file. In a students' copy the fresh copy is what was handed out, and the points are the
same. They are feedback, not marks: the solutions are public.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tokenize
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data import UserError, make_parser, run_cli  # no exercise is in data.py

# Only a students' copy has this file: everything as it was handed out.
HANDED_OUT = ROOT / "tests" / "handed_out.zip"

# The mutants contain solutions. The two tests are about this project, not about a copy.
LEFT_OUT = [".ci/run", "tests/mutants.py", "tests/test_readme.py",
            "tests/experiments/test_exercises.py"]

WITHOUT_GIT = ["README.md", "requirements.txt", "analysis.ipynb", "data.py", "scan.py",
               "models.py", "eval.py", "train.py", "experiments/**/*", "tests/**/*"]


# --- 1. The exercises -----------------------------------------------------------------------------

class Exercise(NamedTuple):
    file: str
    function: str
    points: int
    task: str
    hidden: str = ""  # how a comment begins that gives the solution away
    placeholder: str = ""  # the body until the exercise is done, if not NOT_DONE


NOT_DONE = """\
raise NotImplementedError("exercise {0} is not done yet; to test your work: "
                          "python tests/exercises.py grade . --only {0}")"""


COURSE = "tests/experiments/test_course.py"  # test_exercise_1_... grades exercise 1
TESTS = {"scan.py": "tests/test_scan.py", "models.py": "tests/test_models.py"}  # others: COURSE
EXERCISES = {
    1: Exercise("experiments/groups.py", "compose", 1,
                "g and h are arrays, and their leading axes may differ as long as they broadcast."),
    2: Exercise("scan.py", "scan_recurrent", 2,
                "Equations (1) and (2), then the read. check_inputs returns all inputs in one "
                "precision, and the initial state."),
    3: Exercise("scan.py", "chunked_forward", 3,
                "(5) and (6) for all chunks at once, a loop for (7) and (8), then (9). Solve the "
                "triangular system for the identity: its inverse is among the results."),
    4: Exercise(COURSE, "keys_of_sources_first", 2,
                "One swap per name, like the swap machine of scan.py. Its swaps in reverse order "
                "are wrong: which permutation would they execute?"),
    5: Exercise("scan.py", "chunked_backward", 4,
                "Derive (13) to (16) from (5), (8) and (9) on paper. Then write (10) to (16), "
                "without autograd.", hidden="#     g(V) = X"),
    6: Exercise("eval.py", "score", 2,
                "The keys: reveals, a count; all, final, perfect; perfect_low and perfect_high, by "
                "wilson(); by_position, a list.",
                placeholder='names = ["all", "final", "perfect", "perfect_low", "perfect_high"]\n'
                            'return dict.fromkeys(names, np.nan) | {"by_position": []}'),
    7: Exercise("experiments/beliefs.py", "PFSA.step", 2,
                "Bayes' rule for a batch, by the formula in the docstring of the class."),
    8: Exercise("models.py", "DeltaBlock.inputs_of_scan", 2,
                "Split the projection of norm(x) by self.sizes. Per token, k and v are [R, H, K], "
                "and the strengths [2, R, H], beta first; they are hard sigmoids. The scan wants "
                "heads before tokens, and float32 at least."),
    9: Exercise("experiments/inside.py", "LinearImage.project", 2,
                "read() returns P, nearest() a permutation, and (1) its image. Mind both means, "
                "and return the precision of the states."),
    10: Exercise(COURSE, "nearest_product", 2,
                 "Search by gradient descent, from many random starts at once. Then prove that no "
                 "product of steps with beta <= 1 is a swap, with spare slots as well: which "
                 "vectors keep their norm in a step? (The sign of the determinant proves too "
                 "little, since two swaps have +1.)", hidden="# Why. A step with beta"),
    11: Exercise(COURSE, "test_attention_reads_in_pieces_what_it_reads_at_once", 2,
                 "Write a test that models.py passes. The argument `models` may also be a wrong "
                 "variant of it, in which AttentionBlock must fail an assert of yours."),
}


# --- 2. The students' copy ------------------------------------------------------------------------

README = """\
# Exercises

This is the project described below, with eleven functions left blank. Each blank says what to do.
`experiments/TEACHING.md` has the calendar and the questions, and says what runs from day one.

{}

"""


def make(out):
    """Write the project without the solutions, and list the exercises.  Raises: UserError."""
    if HANDED_OUT.exists():
        raise UserError("this is a students' copy: make another one from the project itself")
    if out.exists():
        raise UserError(f"{out} already exists: name a new folder for the students' copy")

    # All texts are ready before the first write, so no solution is ever in `out`.
    calendar, _, _ = read_source(ROOT / "experiments" / "TEACHING.md").partition("## Grading")
    texts = {"experiments/TEACHING.md": calendar}
    listed = ""
    for number, exercise in EXERCISES.items():
        source = texts.get(exercise.file) or read_source(ROOT / exercise.file)
        texts[exercise.file] = blank(source, number, exercise)
        listed += f"{number}. `{exercise.function}` in `{exercise.file}`\n"
    texts["README.md"] = README.format(listed) + read_source(ROOT / "README.md")

    copy_project(out, texts)
    with tempfile.TemporaryDirectory() as place:
        archive = shutil.make_archive(Path(place, "copy"), "zip", out)
        shutil.copyfile(archive, out / HANDED_OUT.relative_to(ROOT))


def copy_project(out, texts={}):
    """Copy what is handed out.  texts: {name of a file: what to write instead}."""
    for name in project_files():
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name in texts:
            target.write_text(texts[name], encoding="utf-8")
        else:
            shutil.copyfile(ROOT / name, target)  # without its mode, which may be read-only


def project_files():
    """The files that git tracks, or a short list without git, as names relative to ROOT."""
    names = []
    if (ROOT / ".git").exists() and shutil.which("git"):
        told = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
        names = told.stdout.split("\0")[:-1]
    if not names:
        found = [path.relative_to(ROOT) for part in WITHOUT_GIT for path in ROOT.glob(part)]
        names = [path.as_posix() for path in found if "__pycache__" not in path.parts]
    return [name for name in names if name not in LEFT_OUT and (ROOT / name).is_file()]


def blank(source, number, exercise):
    """The source without the body of the function. Its docstring stays, and a comment is added."""
    task = (f"Exercise {number} (points: {exercise.points}). {exercise.task} (Only this function "
            "is graded: helpers go inside.)")
    comment = textwrap.fill(task, 90, initial_indent="# ", subsequent_indent="# ")
    indent = " " * (8 if "." in exercise.function else 4)
    body = textwrap.indent(f"{comment}\n{exercise.placeholder or NOT_DONE.format(number)}", indent)

    lines = source.split("\n")
    _, documented, last = place_of(source, exercise.function)
    lines[documented:last] = body.split("\n")

    if exercise.hidden:
        first, = [i for i, line in enumerate(lines) if line.startswith(exercise.hidden)]
        while lines[first].startswith("#"):
            del lines[first]
    return "\n".join(lines)


def place_of(source, function):
    """The lines of `name` or `Class.name`: its first, the last of its docstring, its last."""
    node = ast.parse(source)
    for name in function.split("."):
        node = {getattr(child, "name", None): child for child in node.body}[name]
    return node.lineno, node.body[0].end_lineno, node.end_lineno


def read_source(path):
    """A file as Python reads it, with its byte order mark, encoding and ends of lines."""
    with tokenize.open(path) as file:
        return file.read()


# --- 3. The grader --------------------------------------------------------------------------------

def grade(folder, numbers):
    """Print the points, and return them in the form of Gradescope."""
    rows = []
    for number in numbers:
        exercise = EXERCISES[number]
        reason = grade_one(folder, number)
        points = 0 if reason else exercise.points
        name = f"{number} {exercise.function}"
        print(f"{name}: {points} of {exercise.points}\n{reason or ''}", flush=True)
        rows.append({"name": name, "score": points, "max_score": exercise.points,
                     "output": reason or "all tests passed"})
    print(f"{sum(row['score'] for row in rows)} of {sum(row['max_score'] for row in rows)} points")
    return {"tests": rows}


def grade_one(folder, number):
    """None if the function in `folder` passes its tests, else the reason."""
    exercise = EXERCISES[number]
    try:
        theirs = read_source(folder / exercise.file)
        place_of(theirs, exercise.function)
    except (OSError, ValueError, SyntaxError, KeyError) as error:  # the last: it is not defined
        return f"{exercise.file}, {exercise.function}: {type(error).__name__}: {error}"
    return failure(exercise.file, lambda ours: transplant(ours, theirs, exercise.function),
                   TESTS.get(exercise.file, COURSE), f"exercise_{number}_")


def transplant(ours, theirs, function):
    """Our source with their definition of the function."""
    # Lines end where Python ends them. str.splitlines() also cuts at a form feed or U+2028.
    start, _, end = place_of(theirs, function)
    first, _, last = place_of(ours, function)
    lines = ours.split("\n")
    lines[first - 1:last] = theirs.split("\n")[start - 1:end]
    return "\n".join(lines)


def failure(file, change, tests, words):
    """None if tests pass in a fresh copy after change(source) of a file, else the reason."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, "copy")
        if HANDED_OUT.exists():
            shutil.unpack_archive(HANDED_OUT, copy)
        else:
            copy_project(copy)
        (copy / file).write_text(change(read_source(copy / file)), encoding="utf-8")

        report = Path(place, "report.xml")
        command = [sys.executable, "-m", "pytest", "-xq", "--tb=short", "--assert=plain",
                   f"--junitxml={report}", tests, "-k", f"({words}) and not cuda"]
        environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
        try:
            told = subprocess.run(command, cwd=copy, env=environment, timeout=300,
                                  capture_output=True, encoding="utf-8", errors="replace")
            suite = xml.parse(report).find("testsuite")
        except (OSError, subprocess.TimeoutExpired, xml.ParseError) as error:
            return f"the tests left no report: {error}"  # as after os._exit(0)

    count = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    passed = count["tests"] and not count["failures"] + count["errors"] + count["skipped"]
    return None if passed else told.stdout[-2000:]


# --- 4. The command line --------------------------------------------------------------------------

def main(argv=None):
    parser = make_parser(description="Make the exercises, grade them, or run the mutants.")
    add = parser.add_argument
    add("what", choices=["make", "grade", "mutants"])
    add("folder", type=Path, nargs="?", default=".", help="make: a new folder; grade: a copy")
    add("--only", default="", help="grade: numbers, as in 3,4; mutants: a word of the rows")
    add("--json", type=Path, metavar="FILE", help="write the points as Gradescope reads them")
    args = parser.parse_args(argv)

    if args.what == "make":
        make(args.folder)
    elif args.what == "grade":
        # Refuse before any work what cannot be read or written.
        numbers = args.only.split(",") if args.only else [*map(str, EXERCISES)]
        if not {*numbers} <= {*map(str, EXERCISES)}:
            raise UserError(f"--only takes numbers from 1 to {len(EXERCISES)}, as in 3,4")
        if not args.folder.is_dir():
            raise UserError(f"{args.folder} is not a folder")
        if args.json:
            open(args.json, "a").close()

        points = grade(args.folder, map(int, numbers))
        if args.json:
            args.json.write_text(json.dumps(points))
    else:
        if HANDED_OUT.exists():
            raise UserError("the mutants contain solutions, so a students' copy lacks them")
        from mutants import survivors
        sys.exit(1 if survivors(args.only) else 0)


if __name__ == "__main__":
    run_cli(main)
