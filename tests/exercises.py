"""A course made of this repository: the students' copy, the grader, and the mutants.

    python tests/exercises.py make OUT [--only 3,4]      write the students' copy
    python tests/exercises.py grade [DIR] [--json FILE]  a line an exercise, of DIR or of this copy
    python tests/exercises.py mutants [--only WORD]      wrong variants, each with a test that fails

An exercise is what stands between two fences, ### BEGIN SOLUTION and ### END SOLUTION, each on a
line of its own. The docstring above them states it. Its tests carry the mark of its number, as in
`python -m pytest tests -k exercise_3`. The tenth is exercise_ten: exercise_10 contains exercise_1.
"""

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "experiments")]

from data import user_errors

SPINE = ["data.py", "scan.py", "models.py", "eval.py", "train.py"]
TREE = [*SPINE, "README.md", "requirements.txt", "analysis.ipynb", ".gitignore", ".ci",
        "experiments", "tests"]
MUTANTS = Path("tests/experiments/mutants.py")  # it quotes solutions: no student gets it
ORDER = ["Exercise N (P points)", "### BEGIN SOLUTION", "### END SOLUTION"]


class Exercise(NamedTuple):
    path: Path
    function: str
    points: int
    lines: slice  # what stands between the fences


def files_of(root):
    """The project's files under this folder, found without git."""
    found = [path for name in TREE for path in [root / name, *sorted((root / name).rglob("*"))]]
    return [path.relative_to(root) for path in found if path.is_file()
            and not {"__pycache__", ".ipynb_checkpoints"}.intersection(path.parts)]


def find_exercises(root):
    """All exercises: {number: Exercise}. Raises: ValueError for a fence out of place."""
    found = {}
    for path in [path for path in files_of(root) if path.suffix == ".py"]:
        step, function = 0, ""
        for i, line in enumerate((root / path).read_text(encoding="utf-8").splitlines()):
            function = match[1] if (match := re.match(r"\s*def (\w+)", line)) else function
            statement = re.search(r"Exercise (\d+) \((\d+) points?", line)
            mark = ORDER[0] if statement else line.strip()
            if mark in ORDER and mark != ORDER[step % 3]:
                raise ValueError(f"{path.as_posix()}, line {i + 1}: {mark} where {ORDER[step % 3]} "
                                 "is due, so a fence is missing, nested or doubled")
            if mark == ORDER[0]:
                number, points, name = int(statement[1]), int(statement[2]), function
            if mark == ORDER[1]:
                begin = i + 1
            if mark == ORDER[2]:
                if number in found:
                    raise ValueError(f"{path.as_posix()}: there is another exercise {number}")
                found[number] = Exercise(path, name, points, slice(begin, i))
            step += mark in ORDER
        if step % 3:
            raise ValueError(f"{path.as_posix()} ends where {ORDER[step % 3]} is due")
    return dict(sorted(found.items()))


def make(out, exercises, chosen=()):
    """A copy of the project in which a line that raises stands for each chosen exercise."""
    for path in files_of(ROOT):
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, out / path)
    # The last exercise of a file first, so that the lines above it stay where they are.
    for i in sorted(chosen, key=lambda i: exercises[i].lines.start, reverse=True):
        path, body = out / exercises[i].path, exercises[i].lines
        lines = path.read_text(encoding="utf-8").splitlines()
        indent = re.match(" *", lines[body.start])[0]
        lines[body] = [f'{indent}raise NotImplementedError("exercise {i}: see the docstring")']
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if chosen:
        (out / MUTANTS).unlink(missing_ok=True)
        text = (out / "README.md").read_text(encoding="utf-8")
        for name in SPINE:  # README states how many lines each file has
            count = len((out / name).read_text(encoding="utf-8").splitlines())
            text = re.sub(rf"(`{name}` *\| *)\d+", rf"\g<1>{count}", text)
        (out / "README.md").write_text(text, encoding="utf-8")


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python tests/exercises.py",
                                     description=__doc__.split("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    add = parts.add_parser("make").add_argument
    add("out", type=Path, metavar="OUT", help="an empty or a new folder")
    add("--only", metavar="3,4", help="the exercises to leave out (default: all)")
    add = parts.add_parser("grade").add_argument
    add("dir", type=Path, metavar="DIR", nargs="?", default=ROOT, help="default: this copy")
    add("--json", type=Path, metavar="FILE", help="write the results as Gradescope's results.json")
    add = parts.add_parser("mutants").add_argument
    add("--only", metavar="WORD", default=".py", help="those with this word in their file or law")
    with user_errors(parser, argv) as args:
        exercises = find_exercises(ROOT)
        if args.part == "make":
            if args.out.exists() and any(args.out.iterdir()):
                raise ValueError(f"{args.out} is not empty")
            if not re.fullmatch(r"\d+(,\d+)*", args.only or "0"):
                raise ValueError(f"--only takes numbers such as 3,4; got {args.only}")
            chosen = {int(i) for i in args.only.split(",")} if args.only else {*exercises}
            if unknown := chosen - {*exercises}:
                raise ValueError(f"there is no exercise {min(unknown)}, but {[*exercises]}")
            return make(args.out, exercises, chosen)
        import grading  # not above: the spine's tests go without tests/experiments
        if args.part == "grade":
            grading.check_folder(args.dir, exercises, args.json)
        else:
            table = grading.read_table(ROOT / MUTANTS, args.only)
    with tempfile.TemporaryDirectory() as place:
        make(copy := Path(place).resolve(), exercises)
        if args.part == "grade":
            return not grading.grade(copy, exercises, args.dir, args.json)
        return grading.survivors(copy, table) > 0


if __name__ == "__main__":
    raise SystemExit(main())
