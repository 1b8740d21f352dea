"""A course of eleven exercises: functions left blank, and the project's own tests as the grader.

    python tests/exercises.py make OUT                            the students' copy
    python tests/exercises.py grade DIR [--only 3,4] [--json F]   points for the functions in DIR
    python tests/exercises.py mutants [--only WORD]               wrong variants, and who kills them

A solution stands in its function. The grader puts that function, and nothing else of the student's
file, into a fresh copy of the project, and runs the tests that the table names. So a mistake costs
its own exercise only. Points are feedback: the solutions are public (experiments/TEACHING.md).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
KEPT_BACK = shutil.ignore_patterns(  # what is not in the students' copy
    ".git", ".ci", "runs", "__pycache__", ".pytest_cache", "TEACHING.md", "mutants.py",
    "test_readme.py", "test_exercises.py")


# --- 1. The exercises -----------------------------------------------------------------------------

class Exercise(NamedTuple):
    file: str
    functions: str  # whose bodies are blank, parted by blanks
    points: int
    tests: str  # the file of the tests that grade it,
    words: str  # and which of them, as for pytest -k
    statement: str
    hidden: tuple = ()  # the first and the last line of a comment that gives the solution away
    until_then: str = ""  # what stands in the body at first, if the project cannot do without


NAN_ROW = """\
nan = float("nan")
return {"reveals": right.size, "all": nan, "final": nan, "perfect": nan, "perfect_low": nan,
        "perfect_high": nan, "by_position": []}"""

EXERCISES = {
    # Trap: h[g[i]] in place of g[h[i]], the same where elements commute.
    1: Exercise(
        "experiments/groups.py", "compose", 1,
        "tests/experiments/test_course.py", "numbers_compose",
        "Numbers in, numbers out: index() and group.elements go from one to the other. g and h may "
        "be single numbers, or arrays whose shapes broadcast."),
    # Traps: beta scales v alone, not v - S^T k; `state +=` writes into the caller's state.
    2: Exercise(
        "scan.py", "delta_rule_recurrent", 2,
        "tests/experiments/test_course.py", "loop_alone",
        "A loop over time, (1) and (2). check_inputs gives the state to begin with."),
    # Traps: the diagonal of (8); D wants the state before the chunk.
    3: Exercise(
        "scan.py", "chunked_forward", 3,
        "tests/test_scan.py", "delta_product or inverse_of_a_chunk",
        "(4) and (5) for all chunks at once, a loop for (6) and (7), then (8). The triangle is "
        "solved, not inverted; its inverse is among the results."),
    # Trap: y' is exchanged with y, and every command does nothing.
    4: Exercise(
        "scan.py", "exchange_key swap_machine_keys", 2,
        "tests/test_scan.py", "swap_machine_tracks",
        "Find 2n exchanges, one for each name of a command, that execute it. The key of a name may "
        "depend on that name and on its place in the line, on no other name. A reader checks that "
        "the left-hand names put all values into the spare slots.",
        ("# A permutation is a product of exchanges", "# depends on a token and its place")),
    # Traps: M has a minus and no diagonal; G_n belongs to the state AFTER chunk n.
    5: Exercise(
        "scan.py", "chunked_backward", 4,
        "tests/experiments/test_course.py", "gradcheck",
        "Derive (12) to (16) from (4), (7) and (8) by hand, and write (9) to (16), from the last "
        "chunk to the first, without autograd.",
        ("# Read (4) as B =", "#     g(beta)   = row sums")),
    # Trap: perfect is a share of traces, all others are shares of reveals. numpy's numbers will do.
    6: Exercise(
        "eval.py", "score", 2,
        "tests/test_eval.py", "stops_tracking or wrong_word",
        "The keys: reveals, how many; all, final and perfect; perfect_low and perfect_high, by "
        "wilson(); by_position, a list. Until this is done, the table of train.py says nan.",
        until_then=NAN_ROW),
    # Traps: it reveals first and moves then; delta[symbol, new, old] stands left of a belief.
    7: Exercise(
        "experiments/beliefs.py", "PFSA.step", 2,
        "tests/experiments/test_beliefs.py", "exact_filter or rescaled_scan",
        "The formula above, for a batch of beliefs with a symbol each."),
    # Traps: the order of the axes of k, [T, R, H, K]; gamma scales v, and beta not.
    8: Exercise(
        "models.py", "DeltaBlock.inputs_of_scan", 2,
        "tests/test_models.py", "delta_block",
        "Split the projection of norm(x) by self.sizes. Unit queries and keys, beta up to "
        "beta_max, values scaled by gamma: hard sigmoids both. Heads stand ahead of tokens."),
    # Traps: the largest entry of each row need not be a permutation; a mean has a sign.
    9: Exercise(
        "experiments/inside.py", "LinearImage.correct", 2,
        "tests/experiments/test_inside.py", "linear_image or nearest_permutation",
        "read() gives P, nearest() a permutation, and (1) its image: add the mean of the states, "
        "subtract the average of P, and compute in the type of the states."),
    # Trap: a search that begins at one point only may get stuck, and proves nothing.
    10: Exercise(
        "tests/experiments/test_course.py", "nearest_to_an_exchange", 2,
        "tests/experiments/test_course.py", "no_product_of_steps",
        "Search by gradient descent, from many random starts at once. Then prove what you see: "
        "which sign has the determinant of a step, and which that of an exchange?",
        ("# Why. A step has the determinant", "# no product comes nearer")),
    # Traps: two pieces are too few, and a last piece of one token hides a mask that looks ahead.
    11: Exercise(
        "tests/experiments/test_course.py", "test_attention_reads_in_pieces_what_it_reads_at_once",
        2, "tests/experiments/test_course.py", "own_test_passes",
        "Write a test that models.py passes. Wrong variants of AttentionBlock, which handle the "
        "past wrongly, must fail it by an assert. They come in as the argument `models`: use "
        "nothing else of models.py."),
}


# --- 2. The students' copy ------------------------------------------------------------------------

def place_of(lines, function):
    """The place of `name` or `Class.name` in a file: its first line, and the one behind its last.

    By indentation, not by ast: the rest of the file need not be Python.
    """
    start = -1
    for part in function.split("."):
        head = re.compile(rf" *(def|class) {part}\b")
        start = next((i for i in range(start + 1, len(lines)) if head.match(lines[i])), None)
        if start is None:
            raise ValueError(f"there is no function {function}")

    deeper = re.match(" *", lines[start])[0] + " "
    end = start + 1
    for i in range(start + 1, len(lines)):
        if lines[i].startswith(deeper):
            end = i + 1
        elif lines[i].strip() and lines[i].strip()[0] not in "#)":  # the end of a signature
            break
    return start, end


def blank(lines, number, exercise, function):
    """Take out the body of a function. Its docstring stays, and a comment asks."""
    start, end = place_of(lines, function)
    first = start
    quotes = 0
    while quotes < 2:  # up to the line where the docstring ends
        quotes += lines[first].count('"""')
        first += 1

    asked = textwrap.wrap(f"Exercise {number} ({exercise.points} points). {exercise.statement}", 88)
    body = [f"# {line}" for line in asked]
    until_then = exercise.until_then or f'raise NotImplementedError("exercise {number}")'
    body += until_then.split("\n")
    indent = " " * (8 if "." in function else 4)
    lines[first:end] = [indent + line for line in body]


def make(out):
    """Write the project without the solutions, and a README of the course."""
    shutil.copytree(ROOT, out, ignore=KEPT_BACK)
    listed = []
    for number, exercise in EXERCISES.items():
        path = out / exercise.file
        lines = path.read_text(encoding="utf-8").splitlines()
        for function in exercise.functions.split():
            blank(lines, number, exercise, function)
        if exercise.hidden:
            first, last = [starting_with(lines, text) for text in exercise.hidden]
            lines[first:last + 1] = [f"# (What stood here is exercise {number}.)"]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        listed.append(f"| {number} | {exercise.points} | `{exercise.file}` | "
                      f"`{exercise.functions}` |")

    (out / "README.md").write_text(README.format("\n".join(listed)), encoding="utf-8")


def starting_with(lines, text):
    """The number of the one line that starts with this text.  Raises: ValueError without it."""
    number, = [i for i, line in enumerate(lines) if line.startswith(text)]
    return number


# It takes the place of the project's, which names what is not there.
README = """\
# Exercises

Read `data.py`, `scan.py`, `models.py`, `eval.py`, `train.py`, in this order. What each exercise
asks stands in its function. These run from the first day on:

    python data.py
    python train.py --model transformer --group S3

| | points | file | functions |
|---|---|---|---|
{}

    python tests/exercises.py grade . --only 2

grades what you have. Do 1 before 7, and 3 before 4, 5 and 8: their tests need it.
"""


# --- 3. The grader --------------------------------------------------------------------------------

def copy_project(place):
    return Path(shutil.copytree(ROOT, Path(place) / "copy", ignore=shutil.ignore_patterns(
        ".git", "runs", "__pycache__", "figures", "*.ipynb")))


def failure(copy, tests, words):
    """None if these tests all pass in a copy of the project, else what pytest says."""
    report = copy.parent / "report.xml"
    words = f"({words}) and not cuda"  # a test that is skipped would count as not passed
    try:
        told = subprocess.run(
            [sys.executable, "-m", "pytest", "-xq", "--tb=short", "-p", "no:cacheprovider",
             f"--junitxml={report}", tests, "-k", words], cwd=copy, timeout=300, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}, capture_output=True).stdout
        suite = xml.parse(report).find("testsuite")
    except (OSError, xml.ParseError, subprocess.TimeoutExpired) as error:
        return f"no report of the tests: {error}"  # as after os._exit(0)

    bad = sum(int(suite.get(key)) for key in ("failures", "errors", "skipped"))
    return None if int(suite.get("tests")) and not bad else told[-2000:]


def grade_one(folder, exercise):
    """None if the functions in folder pass, else the reason."""
    with tempfile.TemporaryDirectory() as place:
        copy = copy_project(place)
        path = copy / exercise.file
        theirs = folder / exercise.file
        if not theirs.exists():
            theirs = folder / path.name  # uploads lie side by side
        try:
            source = theirs.read_text(encoding="utf-8").splitlines()
            lines = path.read_text(encoding="utf-8").splitlines()
            for function in exercise.functions.split():
                written = source[slice(*place_of(source, function))]
                lines[slice(*place_of(lines, function))] = written
        except (OSError, ValueError) as error:
            return str(error)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return failure(copy, exercise.tests, exercise.words)


def grade(folder, numbers):
    """Print the points, and return them as Gradescope reads them."""
    rows = []
    for number in numbers:
        exercise = EXERCISES[number]
        reason = grade_one(folder, exercise)
        points = 0 if reason else exercise.points
        print(f"{number:2} {exercise.functions}: {points} of {exercise.points}\n{reason or ''}",
              flush=True)
        rows.append({"name": f"{number} {exercise.functions}", "max_score": exercise.points,
                     "score": points, "output": reason or "all tests passed"})
    print(f"{sum(row['score'] for row in rows)} of {sum(row['max_score'] for row in rows)} points")
    return {"tests": rows}


# --- 4. The command line --------------------------------------------------------------------------

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make", help="the students' copy").add_argument("out", type=Path)
    grader = commands.add_parser("grade", help="points for the functions in a folder")
    grader.add_argument("folder", type=Path)
    grader.add_argument("--only", metavar="3,4", help="these exercises")
    grader.add_argument("--json", type=Path, help="write results.json as Gradescope reads it")
    killer = commands.add_parser("mutants", help="wrong variants, and the tests that notice them")
    killer.add_argument("--only", metavar="WORD", default="", help="those with this in their row")
    args = parser.parse_args(argv)

    if args.command == "make":
        if args.out.exists():
            parser.error(f"{args.out} is there already")
        make(args.out)
    elif args.command == "grade":
        numbers = [int(part) for part in args.only.split(",")] if args.only else [*EXERCISES]
        if not EXERCISES.keys() >= set(numbers):
            parser.error(f"the exercises are 1 to {len(EXERCISES)}")
        points = grade(args.folder, numbers)
        if args.json:
            args.json.write_text(json.dumps(points))
    else:
        from mutants import survivors  # not in the students' copy
        sys.exit(1 if survivors(args.only) else 0)


if __name__ == "__main__":
    main()
