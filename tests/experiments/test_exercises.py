"""The course: right functions get their points, all others none, and each costs only its own."""

import json
import re

import exercises
import pytest
from conftest import ROOT
from exercises import EXERCISES

mutants = pytest.importorskip("mutants", reason="the students' copy has no table of mutants")


@pytest.fixture(scope="module")
def students(tmp_path_factory):
    folder = tmp_path_factory.mktemp("course") / "copy"
    exercises.main(["make", str(folder)])
    return folder


def graded(folder, number):
    """The points of one exercise, by the command line."""
    exercises.main(["grade", str(folder), "--only", str(number), "--json", str(folder / "out")])
    row, = json.loads((folder / "out").read_text())["tests"]
    return row["score"], row["output"]


def test_in_the_students_copy_each_function_is_blank_and_what_is_named_is_there(students):
    readme = (students / "README.md").read_text()
    for number, exercise in EXERCISES.items():
        source = (students / exercise.file).read_text()
        compile(source, exercise.file, "exec")
        assert f"# Exercise {number} ({exercise.points} points). " in source
        for function in exercise.functions.split():
            lines = source.splitlines()
            start, end = exercises.place_of(lines, function)
            original = (ROOT / exercise.file).read_text().splitlines()
            first, last = exercises.place_of(original, function)
            assert lines[start] == original[first]
            body = "\n".join(lines[start:end])
            assert f'exercise {number}")' in body or body.endswith(exercise.until_then[-20:])
    for path in re.findall(r"[\w/]+\.py", readme):
        assert (students / path).exists()
    assert "exchange x   and x'" not in (students / "scan.py").read_text()


@pytest.mark.parametrize("number, old, new, points", [
    (1, "", "", 1),
    (1, "return index(group, data", "import os; os._exit(0); return index(group, data", 0),
    (7, "def filter(self", "def filter(self:  # what costs no other function", 2)])
def test_a_right_function_gets_its_points_and_one_that_ends_the_process_does_not(
        number, old, new, points, tmp_path):
    """The file may be broken elsewhere, and lie without its folder."""
    path = ROOT / EXERCISES[number].file
    source = path.read_text()
    assert source.count(old) == 1 or not old
    (tmp_path / path.name).write_text(source.replace(old, new) if old else source)
    score, output = graded(tmp_path, number)
    assert score == points, output


def test_a_blank_function_and_a_missing_file_get_nothing(students, tmp_path):
    assert graded(students, 1)[0] == 0
    score, output = graded(tmp_path, 2)
    assert score == 0 and "No such file" in output


def test_the_tests_that_the_tables_name_are_there():
    """Each of their words is in the name of a test; so a renamed test cannot pass by absence."""
    named = [(exercise.tests, exercise.words) for exercise in EXERCISES.values()]
    for file, rows in mutants.TABLE.items():
        named += [(mutants.tests_of(file), row[-1]) for row in rows]
        for old, new, _ in rows:
            assert (ROOT / file).read_text().count(old) == 1 and old != new, old
    for tests, words in named:
        for word in words.split(" or "):
            assert re.search(rf"def test_\w*{word}", (ROOT / tests).read_text()), (tests, word)
