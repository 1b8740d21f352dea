"""The law of the house: five short files stand on their own, and imports run one way."""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from conftest import EARLY, ROOT

SPINE = {  # the most lines of each file, and what it may import from here
    "data.py": (420, {}), "scan.py": (380, {}), "models.py": (280, {"data", "scan"}),
    "eval.py": (290, {"data", "scan", "models"}),
    "train.py": (340, {"data", "scan", "models", "eval"})}


def lines_of(path):
    return path.read_text(encoding="utf-8").splitlines()


def run_the_spine_alone():
    """The five files, README and their tests, copied without all else."""
    place = tempfile.TemporaryDirectory()
    for name in ("README.md", *SPINE):
        shutil.copy(ROOT / name, place.name)
    for folder in (".ci", "tests"):
        shutil.copytree(ROOT / folder, Path(place.name) / folder,
                        ignore=shutil.ignore_patterns("experiments", "__pycache__"))
    return place, subprocess.Popen(
        [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "tests", "-k",
         "not test_house"],
        cwd=place.name, env=os.environ | {"PYTHONPATH": ""}, stdout=subprocess.PIPE, text=True)


EARLY["test_what_is_left_without_the_chapters_works"] = run_the_spine_alone


def test_what_is_left_without_the_chapters_works():
    place, process = EARLY["test_what_is_left_without_the_chapters_works"]
    told, _ = process.communicate()
    place.cleanup()
    assert process.returncode == 0, told[-3000:]


def test_imports_run_one_way_and_the_spine_names_no_chapter():
    for name, (_, ours) in SPINE.items():
        source, imported = (ROOT / name).read_text(encoding="utf-8"), set()
        allowed = {*ours, "torch", "numpy", "tqdm", "matplotlib", *sys.stdlib_module_names}
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
        assert imported <= allowed and "experiments" not in source, name


def test_the_files_are_as_short_and_the_top_level_as_bare_as_agreed():
    lengths = {name: len(lines_of(ROOT / name)) for name in SPINE}
    assert all(lengths[name] <= most for name, (most, _) in SPINE.items()), lengths
    assert sum(lengths.values()) <= 1700
    assert sum(len(lines_of(path)) for path in (ROOT / "tests").glob("*.py")) <= 1000
    assert len(readme := lines_of(ROOT / "README.md")) <= 120 and max(map(len, readme)) <= 120
    for folder in ("", "tests", "experiments", "tests/experiments"):
        for path in (ROOT / folder).glob("*.py"):
            assert all(len(line) <= 100 for line in lines_of(path)), path
    allowed = {"README.md", "requirements.txt", *SPINE, "analysis.ipynb", "tests", "experiments",
               "runs", "__pycache__"}
    assert {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} <= allowed
