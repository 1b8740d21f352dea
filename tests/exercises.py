"""A course of eight exercises: functions left blank, graded by the tests of the project.

    python tests/exercises.py make OUT                    write the students' copy
    python tests/exercises.py grade DIR [--only 3 4]      grade the functions in DIR

The grader takes the function of an exercise alone, puts it into a fresh copy of the project, and
runs the tests of that exercise there. So a mistake costs its own exercise only.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data import UserError, make_parser, run_cli  # no exercise is in data.py

PROJECT = ["README.md", "LICENSE", "requirements.txt", "data.py", "models.py", "scan.py",
           "train.py", "eval.py", "analysis.ipynb", "tests", "experiments"]
COURSE = "tests/experiments/test_exercises.py"


class Exercise(NamedTuple):
    file: str
    function: str
    points: int
    task: str  # what the docstring of the function does not say


# test_exercise_3_... grades exercise 3, in the test file of its module, here tests/test_scan.py.
EXERCISES = {
    1: Exercise("eval.py", "score", 2,
                "The keys: reveals, a count; all, final, perfect; perfect_low and perfect_high, by "
                "wilson(); by_position, a list: the accuracy at the first reveal, the second, ..."),
    2: Exercise("scan.py", "scan_recurrent", 2,
                "check_inputs returns all inputs in one precision, and the initial state."),
    3: Exercise("scan.py", "swap_machine_keys", 2,
                "One swap_key() per name. At the left-hand names its slots are known, and at the "
                "right-hand names commands gives one of them."),
    4: Exercise(COURSE, "best_flip", 2,
                "How near to a swap can m steps with beta <= 1 come, and why no nearer? Search by "
                "gradient, from many random starts at once, for m = 1, 2, 3. Then prove, in a "
                "comment above, that <-x, P x> is at most cos^(m+1)(pi / (m+1)): how much of its "
                "norm does a vector lose in a step that turns it by an angle?"),
    5: Exercise("scan.py", "chunked_forward", 3,
                "(5) and (6) for all chunks at once, a loop for (7) and (8), then (9). Invert "
                "I + M by torch.linalg.solve_triangular: the inverse is among the results."),
    6: Exercise("scan.py", "chunked_backward", 4,
                "Derive (13) to (16) from (5), (8) and (9) on paper. Then write (10) to (16), "
                "without autograd."),
    7: Exercise("models.py", "DeltaBlock.inputs_of_scan", 2,
                "Split the projection of norm(x) by self.sizes; upcast() it first, so that all "
                "else is in float32. Per token, k and v are [R, H, K], and the gates "
                "[2, R, H], beta first. gated() wants them as [B, H, T, R] and as "
                "[B, H, T, R, 1]."),
    8: Exercise(COURSE, "test_attention_reads_in_pieces_what_it_reads_at_once", 2,
                "Write a test that models.py passes. The argument `models` may also be a wrong "
                "variant of it, in which AttentionBlock must fail an assert of yours."),
}

# In scan.py, what else gives exercise 6 away.
GRADIENTS = r"^(#     g\([VKBQ]\) =).*?( +\(1[3-6]\))"


# --- The students' copy ---------------------------------------------------------------------------

def make(out):
    """Write the project without the solutions and the answers."""
    copy_project(out)
    for number, exercise in EXERCISES.items():
        path = out / exercise.file
        path.write_text(blank(path.read_text(encoding="utf-8"), number), encoding="utf-8")
    scan = out / "scan.py"
    scan.write_text(re.sub(GRADIENTS, r"\1 ?\2", scan.read_text(encoding="utf-8"), flags=re.M),
                    encoding="utf-8")
    (out / "experiments/ANSWERS.md").unlink()


def copy_project(out):
    """Copy what belongs to the project."""
    out.mkdir(parents=True)
    for part in PROJECT:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, out / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(ROOT / part, out / part)


def blank(source, number):
    """The source with a comment and an error in place of the body below the docstring."""
    exercise = EXERCISES[number]
    lines = source.split("\n")
    function = find(ast.parse(source), exercise.function)
    docstring = function.body[0]
    task = f"Exercise {number} (points: {exercise.points}). {exercise.task}"
    body = [*textwrap.wrap(task, 90, initial_indent="# ", subsequent_indent="# "),
            f"# To test it: python tests/exercises.py grade . --only {number}",
            f'raise NotImplementedError("exercise {number} is not done")']
    indent = docstring.col_offset * " "
    lines[docstring.end_lineno:function.end_lineno] = [indent + line for line in body]
    return "\n".join(lines)


def find(tree, function):
    """The definition of `name` or `Class.name` in a module.  Raises: KeyError."""
    for name in function.split("."):
        tree = {getattr(node, "name", None): node for node in tree.body}[name]
    return tree


# --- The grader -----------------------------------------------------------------------------------

def grade(folder, number):
    """None if the function in `folder` passes its tests, else what the student should read."""
    exercise = EXERCISES[number]
    try:
        theirs = find(ast.parse((folder / exercise.file).read_bytes()), exercise.function)
        source = (ROOT / exercise.file).read_text(encoding="utf-8")
        source = with_function(source, exercise.function, theirs)
    except (OSError, ValueError, SyntaxError, KeyError, AttributeError) as error:
        return f"{exercise.file}, {exercise.function}: {type(error).__name__}: {error}"

    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, "copy")
        copy_project(copy)
        (copy / exercise.file).write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-xq", "--tb=short", "--assert=plain",
                   "--color=no", tests_of(exercise.file), "-k", f"exercise_{number}_"]
        try:
            ran = subprocess.run(command, cwd=copy, timeout=300, capture_output=True,
                                 env={**os.environ, "PYTEST_ADDOPTS": ""},
                                 stdin=subprocess.DEVNULL, encoding="utf-8", errors="replace")
        except subprocess.TimeoutExpired:
            return "the tests took more than 300 seconds"
    if ran.returncode or not re.search(r"^\d+ passed(, \d+ deselected)? in ", ran.stdout, re.M):
        return (ran.stdout + ran.stderr)[-2000:] or f"exit code {ran.returncode}"


def with_function(source, function, theirs):
    """The source with another tree in place of a function: it may be indented in any way."""
    tree = ast.parse(source)
    ours = find(tree, function)
    ours.args, ours.body, ours.decorator_list = theirs.args, theirs.body, theirs.decorator_list
    return ast.unparse(tree)


def tests_of(file):
    """The test file of a module; a test file is its own."""
    return file if file.startswith("tests") else f"tests/test_{file}"


def main(argv=None):
    parser = make_parser("Make the students' copy, or grade one.")
    add = parser.add_argument
    add("what", choices=["make", "grade"])
    add("folder", type=Path, help="make: a new folder; grade: the folder of a student")
    add("--only", type=int, nargs="+", choices=EXERCISES, default=EXERCISES, metavar="NUMBER",
        help="grade: these exercises")
    args = parser.parse_args(argv)
    if args.what == "make":
        make(args.folder)
        print(f"{args.folder} is the students' copy; search it for '# Exercise 1' to "
              f"'# Exercise {len(EXERCISES)}'")
        return
    if not args.folder.is_dir():
        raise UserError(f"there is no folder {args.folder}")

    reached = 0
    for number in args.only:
        _, function, points, *_ = EXERCISES[number]
        reason = grade(args.folder, number)
        reached += 0 if reason else points
        print(f"{number} {function}: {0 if reason else points} of {points}\n{reason or ''}")
    print(f"{reached} of {sum(EXERCISES[number].points for number in args.only)} points")


if __name__ == "__main__":
    run_cli(main)
