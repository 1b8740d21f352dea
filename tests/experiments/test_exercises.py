"""The course: right functions get their points, all others none, and each costs only its own."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import exercises
import mutants
import pytest
from conftest import ROOT
from exercises import EXERCISES, GIVEN_AWAY


@pytest.fixture(scope="module")
def students(tmp_path_factory):
    folder = tmp_path_factory.mktemp("course") / "copy"
    exercises.main(["make", str(folder)])
    return folder


def points(folder):
    """Of exercise 1, by the command line."""
    exercises.main(["grade", str(folder), "--only", "1", "--json", str(folder / "points.json")])
    row, = json.loads((folder / "points.json").read_text())["tests"]
    return row["score"]


def test_in_the_students_copy_each_function_is_blank_and_says_what_is_asked(students):
    for number, exercise in [*EXERCISES.items(), *GIVEN_AWAY.items()]:
        source = (students / exercise.file).read_text()
        _, documented, last = exercises.place_of(source, exercise.function)
        body = "\n".join(source.splitlines()[documented:last])
        assert body.lstrip().startswith(f"# Exercise {number} ({exercise.points} points). ")
        assert body.endswith(exercise.until_then.splitlines()[-1])
        assert not exercise.hidden or exercise.hidden not in source


def test_a_function_has_its_points_whatever_the_rest_of_its_file_does(students, tmp_path):
    """A blank one has none, a missing one has none, and neither has one that ends the process."""
    right = (ROOT / "experiments" / "groups.py").read_text()
    folders = [tmp_path / name for name in ("elsewhere", "ends", "missing")]
    for folder, (ours, theirs) in zip(folders, [
            ("return np.searchsorted", "return wrong"),
            ("return index(group,", "import os; os._exit(0); (group,")]):
        (folder / "experiments").mkdir(parents=True)
        (folder / "experiments" / "groups.py").write_text(right.replace(ours, theirs))
    folders[-1].mkdir()

    # Each grading waits for a process of its own.
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(points, [*folders, students])] == [1, 0, 0, 0]


def test_what_the_tables_name_is_there_once():
    """A test that was renamed cannot pass by absence; a line that was changed is no mutant."""
    named = [(exercise.tests, exercise.words) for exercise in EXERCISES.values()]
    for file, rows in mutants.TABLE.items():
        for old, new, words in rows:
            assert (ROOT / file).read_text().count(old) == 1 and old != new, old
            named.append((mutants.tests_of(file), words))
    for tests, words in named:
        for word in words.split(" or "):
            assert re.search(rf"def test_\w*{word}", (ROOT / tests).read_text()), (tests, word)
