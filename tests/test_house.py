"""The law of the house: five files stand on their own, and imports run one way."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from conftest import EARLY, PACKAGES, ROOT, imports_of

SPINE = {  # each file, and what it may import from here
    "data.py": set(), "scan.py": set(), "models.py": {"data", "scan"},
    "eval.py": {"data", "scan", "models"}, "train.py": {"data", "scan", "models", "eval"}}


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
         "not (test_house or two_processes or beta_up_to_two or compile)"],
        cwd=place.name, env=os.environ | {"PYTHONPATH": ""}, stdout=subprocess.PIPE, text=True)


EARLY["test_what_is_left_without_the_chapters_works"] = run_the_spine_alone


def test_what_is_left_without_the_chapters_works():
    """Without experiments/, tests/experiments/ and the notebook all tests of the spine pass."""
    place, process = EARLY["test_what_is_left_without_the_chapters_works"]
    told, _ = process.communicate()
    place.cleanup()
    assert process.returncode == 0, told[-3000:]


def test_imports_run_one_way_and_the_spine_names_no_chapter():
    for name, ours in SPINE.items():
        imported = {module.split(".")[0] for module in imports_of(ROOT / name)}
        assert imported <= ours | PACKAGES | sys.stdlib_module_names, name
        assert "experiments" not in (ROOT / name).read_text(encoding="utf-8"), name


def test_the_top_level_is_bare_and_no_line_is_too_wide_to_read():
    allowed = {"README.md", "requirements.txt", *SPINE, "analysis.ipynb", "tests", "experiments",
               "runs", "__pycache__"}
    assert {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} <= allowed
    for folder in ("", "tests", "experiments", "tests/experiments"):
        for path in (ROOT / folder).glob("*.py"):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                assert len(line) <= 100, f"{path}, line {number}"
