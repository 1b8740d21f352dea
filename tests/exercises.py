"""A course of eleven exercises: functions left blank, and the project's own tests as the grader.

    python tests/exercises.py make OUT                            the students' copy
    python tests/exercises.py grade DIR [--only 3,4] [--json F]   points for the functions in DIR
    python tests/exercises.py mutants [--only WORD]               wrong variants, and who kills them

A solution stands in its function. The grader puts that function, and nothing else of the student's
file, into a fresh copy of the project, and runs the tests that the table names. A mistake costs its
own exercise only, in a file that Python can parse. Points are feedback: solutions are public.
"""

import ast
import json
import shutil
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data import Parser, UserError, run  # no exercise stands in data.py

# one_page and the mutants have solutions. The two tests are of the project, not of a copy.
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".ci", ".venv", "venv", "runs", "__pycache__", ".pytest_cache", "mutants.py",
    "one_page.py", "test_one_page.py", "test_readme.py", "test_exercises.py")


# --- 1. The exercises -----------------------------------------------------------------------------

class Exercise(NamedTuple):
    file: str
    function: str
    points: int
    tests: str  # the file of the tests that grade it,
    words: str  # and which of them, as for pytest -k
    asked: str
    hidden: str = ""  # how a comment begins that gives the solution away
    until_then: str = ""  # what stands in the body at first, if not NOT_DONE


NOT_DONE = """\
raise NotImplementedError("exercise {0} is not done yet: "
                          "python tests/exercises.py grade . --only {0}")"""


COURSE = "tests/experiments/test_course.py"
EXERCISES = {
    1: Exercise("experiments/groups.py", "compose", 1, COURSE, "numbers_compose",
                "Numbers in, numbers out: index() and group.elements go from one to the other. g "
                "and h may be single numbers, or arrays whose shapes broadcast."),
    2: Exercise("scan.py", "scan_recurrent", 2, "tests/test_scan.py", "writes_along_another",
                "A loop over time, (1) and (2). check_inputs gives all inputs in one type, and the "
                "state to begin with."),
    3: Exercise("scan.py", "chunked_forward", 3, "tests/test_scan.py",
                "delta_product or inverse_of_a_chunk or what_is_sequential",
                "(5) and (6) for all chunks at once, a loop for (7) and (8), then (9). Solve the "
                "triangle with unit vectors: its inverse is among the results."),
    4: Exercise(COURSE, "keys_of_sources_first", 2, COURSE, "sources_first",
                "Find one exchange for each name, as the swap machine of scan.py has. To turn its "
                "order round does not do: which permutation would that be?"),
    5: Exercise("scan.py", "chunked_backward", 4, "tests/test_scan.py",
                "backward_by_hand or finite_differences",
                "Derive (13) to (16) from (5), (8) and (9) by hand. Write (10) to (16), from the "
                "last chunk to the first, without autograd.",
                hidden="# V stands in Z alone"),
    6: Exercise("eval.py", "score", 2, "tests/test_eval.py", "stops_tracking or wrong_word",
                "The keys: reveals, how many; all, final and perfect; perfect_low and "
                "perfect_high, by wilson(); by_position, a list. Until then tables say nan.",
                until_then='shares = ["all", "final", "perfect", "perfect_low", "perfect_high"]\n'
                           'return dict.fromkeys(shares, np.nan) | {"by_position": []}'),
    7: Exercise("experiments/beliefs.py", "PFSA.step", 2, "tests/experiments/test_beliefs.py",
                "exact_filter",
                "The formula above, for a batch of beliefs with a symbol each."),
    8: Exercise("models.py", "DeltaBlock.inputs_of_scan", 2, "tests/test_models.py", "delta_block",
                "Split the projection of norm(x) by self.sizes. Unit queries and keys, beta up to "
                "beta_max, values scaled by gamma: hard sigmoids both. Heads ahead of tokens."),
    9: Exercise("experiments/image.py", "LinearImage.correct", 2,
                "tests/experiments/test_image.py", "linear_image or nearest_permutation",
                "read() gives P, nearest() a permutation, and (1) its image: mind both means, and "
                "compute in the type of the states."),
    10: Exercise(COURSE, "nearest_product", 2, COURSE, "no_product_of_steps",
                 "Search by gradient descent, from many random starts at once. Then prove what you "
                 "see: which sign has the determinant of a step, and which that of an exchange?",
                 hidden="# Why. A step has the determinant"),
    11: Exercise(COURSE, "test_attention_reads_in_pieces_what_it_reads_at_once", 2, COURSE,
                 "own_test_passes",
                 "Write a test that models.py passes. Wrong variants of AttentionBlock come in as "
                 "the argument `models`, and must fail it by an assert."),
}


# --- 2. The students' copy ------------------------------------------------------------------------

README = """\
# Exercises

This is the project below, in which the functions of eleven exercises are blank. What is asked
stands in each of them. The calendar, and the written questions, stand in `experiments/TEACHING.md`.

{exercises}
Do 1 before 7, and 3 before 5 and 8: their tests need it. `python tests/exercises.py grade . --only
2` tells which test fails, and `python -m pytest -q tests` is green once all is done.

The linear RNN cannot run before 3 and 8 are done: a command then says which exercise is missing.
`--model transformer` and `--model lstm` run from the first day on. Until 6 is done tables say nan.


"""


def make(out):
    """Write the project without the solutions; a list of the exercises stands above its README.

    Raises: UserError if there is something of that name.
    """
    if out.exists():
        raise UserError(f"{out} is there already: name a new folder for the students' copy")
    shutil.copytree(ROOT, out, ignore=LEFT_OUT)
    for number, exercise in EXERCISES.items():
        path = out / exercise.file
        path.write_text(blank(path.read_text(encoding="utf-8"), number, exercise), encoding="utf-8")

    # The project's own page without the chapter that is left out, and the calendar without what is
    # for teachers alone.
    page = (ROOT / "README.md").read_text(encoding="utf-8").splitlines(keepends=True)
    page = "".join(line for line in page if "one_page" not in line)
    exercises = "".join(f"{number}. `{exercise.function}` in `{exercise.file}`\n"
                        for number, exercise in EXERCISES.items())
    (out / "README.md").write_text(README.format(exercises=exercises) + page, encoding="utf-8")

    calendar = out / "experiments" / "TEACHING.md"
    for_students, _, _ = calendar.read_text(encoding="utf-8").partition("## Grading")
    calendar.write_text(for_students, encoding="utf-8")


def blank(source, number, exercise):
    """The source without the body of the function. Its docstring stays, and a comment asks."""
    asked = textwrap.fill(f"Exercise {number} ({exercise.points} points). {exercise.asked}", 90,
                          initial_indent="# ", subsequent_indent="# ")
    indent = " " * (8 if "." in exercise.function else 4)
    until_then = exercise.until_then or NOT_DONE.format(number)
    body = textwrap.indent(f"{asked}\n{until_then}", indent)

    lines = source.splitlines()
    _, documented, last = place_of(source, exercise.function)
    lines[documented:last] = body.splitlines()

    if exercise.hidden:
        first, = [i for i, line in enumerate(lines) if line.startswith(exercise.hidden)]
        while lines[first].startswith("#"):
            del lines[first]
    return "\n".join(lines) + "\n"


def place_of(source, function):
    """The lines of `name` or `Class.name`: its first, the last of its docstring, its last."""
    node = ast.parse(source)
    for name in function.split("."):
        node = {getattr(child, "name", None): child for child in node.body}[name]
    return node.lineno, node.body[0].end_lineno, node.end_lineno


# --- 3. The grader --------------------------------------------------------------------------------

def grade(folder, numbers):
    """Print the points, and return them as Gradescope reads them."""
    rows = []
    for number in numbers:
        exercise = EXERCISES[number]
        reason = grade_one(folder, exercise)
        points = 0 if reason else exercise.points
        name = f"{number} {exercise.function}"
        print(f"{name}: {points} of {exercise.points}\n{reason or ''}", flush=True)
        rows.append({"name": name, "score": points, "max_score": exercise.points,
                     "output": reason or "all tests passed"})
    return {"tests": rows}


def grade_one(folder, exercise):
    """None if the function in folder passes its tests, else the reason."""
    ours = (ROOT / exercise.file).read_text(encoding="utf-8")
    try:
        theirs = (folder / exercise.file).read_text(encoding="utf-8")
        start, _, end = place_of(theirs, exercise.function)
    except (OSError, ValueError, SyntaxError, KeyError) as error:
        return f"{type(error).__name__}: {error}"

    first, _, last = place_of(ours, exercise.function)
    lines = ours.splitlines()
    lines[first - 1:last] = theirs.splitlines()[start - 1:end]
    return failure(exercise.file, "\n".join(lines) + "\n", exercise.tests, exercise.words)


def failure(file, source, tests, words):
    """None if tests pass in a copy of the project where a file has this source, else the reason."""
    with tempfile.TemporaryDirectory() as place:
        copy = shutil.copytree(ROOT, Path(place) / "copy", ignore=LEFT_OUT)
        (copy / file).write_text(source, encoding="utf-8")
        report = Path(place) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-xq", "--tb=short", f"--junitxml={report}",
                   tests, "-k", words]
        try:
            told = subprocess.run(command, cwd=copy, timeout=300, text=True, capture_output=True)
            suite = xml.parse(report).find("testsuite")
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"no report of the tests: {error}"  # as after os._exit(0)

    count = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    passed = count["tests"] > count["skipped"] and not count["failures"] + count["errors"]
    return None if passed else told.stdout[-2000:]


# --- 4. The command line --------------------------------------------------------------------------

def main(argv=None):
    parser = Parser(__doc__)
    parser.add_argument("what", choices=["make", "grade", "mutants"])
    parser.add_argument("folder", type=Path, nargs="?", default=".")
    parser.add_argument("--only", default="", help="grade: numbers, as 3,4; mutants: a word")
    parser.add_argument("--json", type=Path, help="where to write Gradescope's results.json")
    args = parser.parse_args(argv)

    if args.what == "make":
        make(args.folder)
    elif args.what == "grade":
        # Refuse, before the work, what cannot be read or written.
        numbers = numbers_of(args.only) if args.only else EXERCISES
        if not args.folder.is_dir():
            raise UserError(f"{args.folder} is no folder")
        if args.json:
            open(args.json, "a").close()

        points = grade(args.folder, numbers)
        if args.json:
            args.json.write_text(json.dumps(points))
    else:
        if not (ROOT / "tests" / "mutants.py").exists():
            raise UserError("the mutants are not in the students' copy: they have solutions")
        from mutants import survivors
        sys.exit(1 if survivors(args.only) else 0)


def numbers_of(text):
    """'3,4' -> [3, 4].  Raises: UserError unless all of them are exercises."""
    numbers = []
    for part in text.split(","):
        if part not in map(str, EXERCISES):
            raise UserError(f"there is no exercise {part!r}, but 1 to {len(EXERCISES)}: --only 3,4")
        numbers.append(int(part))
    return numbers


if __name__ == "__main__":
    run(main)
