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
        last_line = exercise.until_then.splitlines()[-1:] or [f'grade . --only {number}")']
        assert body.endswith(*last_line)
        assert not exercise.hidden or exercise.hidden not in source


def test_a_command_that_meets_a_blank_function_names_its_exercise_in_one_line(students, refused):
    """In the students' copy it ends as with any other thing that cannot be done."""
    names = {}
    exec((students / "experiments" / "groups.py").read_text(), names)
    refused(lambda argv: names["compose"](None, 0, 0), [], "exercise 1 is not done yet",
            "python tests/exercises.py grade . --only 1")


def test_the_students_copy_has_the_whole_page_below_the_exercises_and_the_calendar(students):
    """Without the chapter that is left out. What is for teachers alone stays with them."""
    page = (students / "README.md").read_text()
    ours = (ROOT / "README.md").read_text()
    begin = page.index(ours[:40])
    assert set(ours.splitlines()) - set(page[begin:].splitlines()) == {
        line for line in ours.splitlines() if "one_page" in line}
    for number, exercise in EXERCISES.items():
        assert f"{number}. `{exercise.function}` in `{exercise.file}`\n" in page[:begin]
        assert (students / exercise.file).exists()

    calendar = (students / "experiments" / "TEACHING.md").read_text()
    assert "| day |" in calendar and "written answers" not in calendar
    for path in re.findall(r"`([\w/.-]+\.(?:py|md|ipynb))`", page + calendar):
        assert (students / path).exists() or (students / "experiments" / path).exists(), path


@pytest.mark.parametrize("command, words", [
    ("grade --only 99", "no exercise '99'"), ("grade --only 1,", "no exercise ''"),
    ("grade nowhere", "nowhere is no folder"), ("grade --json nowhere/points", "nowhere/points"),
    ("make .", "is there already"), ("mutants --only nothing", "no row"),
    ("test", "invalid choice")])
def test_what_cannot_be_done_is_refused_before_any_work(
        command, words, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(exercises, "failure", None)
    refused(exercises.main, command.split(), words)
    assert not list(tmp_path.iterdir())


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
