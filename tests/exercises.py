"""A course of twelve exercises: functions left blank, graded by the tests of the project.

    python tests/exercises.py make OUT                    write the students' copy
    python tests/exercises.py grade DIR [--only 3 4]      grade the functions in DIR

The grader takes the function of an exercise alone, puts it into a fresh copy of the project, and
runs the tests of that exercise there. So a mistake costs its own exercise only.
"""

import ast
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data import make_parser, run_cli  # no exercise is in data.py

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
    1: Exercise("experiments/groups.py", "compose", 1, "The leading axes may differ."),
    2: Exercise("scan.py", "scan_recurrent", 2,
                "check_inputs returns all inputs in one precision, and the initial state."),
    3: Exercise("scan.py", "chunked_forward", 3,
                "(5) and (6) for all chunks at once, a loop for (7) and (8), then (9). Invert "
                "I + L by torch.linalg.solve_triangular: the inverse is among the results."),
    4: Exercise(COURSE, "keys_of_sources_first", 2,
                "One swap per name, like the swap machine of scan.py. Its swaps in reverse order "
                "are wrong: which permutation would they execute?"),
    5: Exercise("scan.py", "chunked_backward", 4,
                "Derive (13) to (16) from (5), (8) and (9) on paper. Then write (10) to (16), "
                "without autograd."),
    6: Exercise("eval.py", "score", 2,
                "The keys: reveals, a count; all, final, perfect; perfect_low and perfect_high, by "
                "wilson(); by_position, a list."),
    7: Exercise("experiments/beliefs.py", "PFSA.step", 2, "Each trace has its own symbol."),
    8: Exercise("models.py", "DeltaBlock.inputs_of_scan", 2,
                "Split the projection of norm(x) by self.sizes; upcast() it first, so that all "
                "else is in float32. Per token, k and v are [R, H, K], and the strengths, hard "
                "sigmoids, [2, R, H], beta first."),
    9: Exercise("experiments/inside.py", "LinearImage.project", 2,
                "read() returns P, nearest() a permutation, and (1) its image. Mind both means, "
                "and return the precision of the states."),
    10: Exercise(COURSE, "best_flip", 2,
                 "How near to a swap can m steps with beta <= 1 come, and why no nearer? Search by "
                 "gradient, from many random starts at once, for m = 1, 2, 3. Then prove, in a "
                 "comment above, that <-x, P x> is at most cos^(m+1)(pi / (m+1)): how much of its "
                 "norm does a vector lose in a step that turns it by an angle?"),
    11: Exercise(COURSE, "test_attention_reads_in_pieces_what_it_reads_at_once", 2,
                 "Write a test that models.py passes. The argument `models` may also be a wrong "
                 "variant of it, in which AttentionBlock must fail an assert of yours."),
    12: Exercise(COURSE, "undo", 2,
                 "What is the inverse of I - beta k k^T? With one beta a step is its own inverse, "
                 "and with one it has none. Mind the order, and what was written."),
}

# In scan.py, what else gives solutions away: the gradients of 5, and the proofs of section 8.
HIDDEN = r"(?<=^#     g\([VKBQ]\) =).*?(?= +\(1[3-6]\))|(?<=8\. Two proofs -{80}\n#)(\n#.*)+"


# --- The students' copy ---------------------------------------------------------------------------

def make(out):
    """Write the project without the solutions and without the teacher's half of TEACHING.md."""
    copy_project(out)
    for number, exercise in EXERCISES.items():
        path = out / exercise.file
        path.write_text(blank(read(path), number), encoding="utf-8")
    scan = out / "scan.py"
    scan.write_text(re.sub(HIDDEN, " ?", read(scan), flags=re.MULTILINE), encoding="utf-8")

    teaching = out / "experiments" / "TEACHING.md"
    teaching.write_text(read(teaching).partition("## For the teacher")[0], encoding="utf-8")
    readme = out / "README.md"
    readme.write_text("*Twelve functions are left blank here: see experiments/TEACHING.md*\n\n"
                      + read(readme), encoding="utf-8")


def copy_project(out):
    """Copy what belongs to the project, without dot-files and caches."""
    out.mkdir(parents=True)
    for part in PROJECT:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, out / part, copy_function=shutil.copyfile,
                            ignore=shutil.ignore_patterns(".*", "__pycache__"))
        else:
            shutil.copyfile(ROOT / part, out / part)


def blank(source, number):
    """The source with a comment and an error in place of the body below the docstring."""
    exercise = EXERCISES[number]
    lines = source.split("\n")
    _, documented, last = place_of(source, exercise.function)
    indent = re.match(" *", lines[documented - 1])[0]
    task = f"Exercise {number} (points: {exercise.points}). {exercise.task}"
    body = [*textwrap.wrap(task, 90, initial_indent="# ", subsequent_indent="# "),
            f"# To test it: python tests/exercises.py grade . --only {number}",
            f'raise NotImplementedError("exercise {number} is not done")']
    lines[documented:last] = [indent + line for line in body]
    return "\n".join(lines)


def place_of(source, function):
    """The lines of `name` or `Class.name`: its first, the last of its docstring, its last."""
    node = ast.parse(source)
    for name in function.split("."):
        node = {getattr(child, "name", None): child for child in node.body}[name]
    return node.lineno, node.body[0].end_lineno, node.end_lineno


def read(path):
    with tokenize.open(path) as file:
        return file.read()


# --- The grader -----------------------------------------------------------------------------------

def grade(folder, number):
    """None if the function in `folder` passes its tests, else what the student should read."""
    exercise = EXERCISES[number]
    try:
        theirs = read(folder / exercise.file)
        start, _, end = place_of(theirs, exercise.function)
    except (OSError, ValueError, SyntaxError, KeyError) as error:  # the last: it is not defined
        return f"{exercise.file}, {exercise.function}: {type(error).__name__}: {error}"

    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, "copy")
        copy_project(copy)
        path = copy / exercise.file
        ours = read(path).split("\n")
        first, _, last = place_of("\n".join(ours), exercise.function)
        ours[first - 1:last] = theirs.split("\n")[start - 1:end]
        path.write_text("\n".join(ours), encoding="utf-8")

        command = [sys.executable, "-m", "pytest", "-xq", "--tb=short", "--assert=plain",
                   "--color=no", tests_of(exercise.file), "-k", f"exercise_{number}_"]
        try:
            told = subprocess.run(command, cwd=copy, timeout=300, capture_output=True,
                                  encoding="utf-8", errors="replace").stdout
        except subprocess.TimeoutExpired:
            return "the tests took more than 300 seconds"
    # Some passed, and none failed, was skipped, or was expected to fail.
    passed = re.search(r"^\d+ passed(, \d+ (deselected|warnings?))* in .*\n\Z", told, re.M)
    return None if passed else told[-2000:] or "the tests did not reach their end"


def tests_of(file):
    """The test file of a module; a test file is its own."""
    folder, _, name = file.rpartition("/")
    return file if folder.startswith("tests") else "/".join(["tests", folder, f"test_{name}"])


def main(argv=None):
    parser = make_parser("Make the students' copy, or grade one.")
    add = parser.add_argument
    add("what", choices=["make", "grade"])
    add("folder", type=Path, help="make: a new folder; grade: the folder of a student")
    add("--only", type=int, nargs="+", choices=EXERCISES, default=EXERCISES, metavar="NUMBER")
    args = parser.parse_args(argv)
    if args.what == "make":
        return make(args.folder)

    reached = 0
    for number in args.only:
        _, function, points, *_ = EXERCISES[number]
        reason = grade(args.folder, number)
        reached += 0 if reason else points
        print(f"{number} {function}: {0 if reason else points} of {points}\n{reason or ''}")
    print(f"{reached} of {sum(EXERCISES[number].points for number in args.only)} points")


if __name__ == "__main__":
    run_cli(main)
