"""What all tests share. The modules under test lie one folder up; nothing is installed."""

import ast
import code
import contextlib
import io
import os
import sys
from pathlib import Path
from unittest.mock import patch

if "CUDA_TESTS" not in os.environ:  # bits and tolerances of the other tests are those of a CPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # the tensors are small: a second thread would mostly wait

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PACKAGES = {"torch", "numpy", "tqdm", "matplotlib", "filelock"}

# A run that is over in a second. It learns nothing.
SMALL = ("--group S3 --curriculum 2:1,4:2 --d-model 8 --heads 2 --batch 2 --advance -1 "
         "--last-steps 3 --test-lengths 4:2 --traces 4 --device cpu").split()

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="with a CUDA device: "
                                "CUDA_TESTS=1 python -m pytest tests -k cuda")


# --- Processes that run beside the tests ----------------------------------------------------------

EARLY = {}  # name of a test: what starts the process that it waits for -> (its folder, process)


def pytest_collection_finish(session):
    """There is a second core: such processes run there, and the tests that wait for them last."""
    session.items.sort(key=lambda item: item.name in EARLY)
    for item in session.items:
        if item.name in EARLY and not session.config.option.collectonly:
            EARLY[item.name] = EARLY[item.name]()


# --- Fixtures -------------------------------------------------------------------------------------

@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """The folder of a SMALL run, for tests that only read it."""
    import train
    folder = tmp_path_factory.mktemp("runs") / "small"
    train.main([*SMALL, "--out", str(folder)])
    return folder


@pytest.fixture
def registries():
    """What a test adds to the tables of groups, tasks and models is forgotten afterwards."""
    import data
    import models
    with patch.dict(data.FAMILIES), patch.dict(data.TASKS), patch.dict(models.MODELS):
        yield


@pytest.fixture
def refused(capsys):
    """Runs a main(argv) that must refuse: exit code 2, and only the usage and one line to read."""
    def run(main, argv, *words):
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in argv])
        message = capsys.readouterr().err.strip().splitlines()[-1]
        assert stop.value.code == 2, message
        assert "error: " in message and "Traceback" not in message
        for word in words:
            assert word in message, message
    return run


# --- Python sessions, by the interpreter that runs the tests --------------------------------------

def session(lines):
    """What an interactive Python shows: each line after its prompt, then what it prints."""
    console = code.InteractiveConsole()
    shown, prompt = "", ">>> "
    for line in lines:
        shown += f"{prompt}{line}\n"
        with contextlib.redirect_stdout(io.StringIO()) as out:
            unfinished = console.push(line)
        shown += out.getvalue()
        prompt = "... " if unfinished else ">>> "
    return shown


def typed_lines(text):
    """What the user types in a trace: the lines after a prompt."""
    return [line[4:] for line in text.splitlines() if line[:4] in (">>> ", "... ")]


# --- Sources --------------------------------------------------------------------------------------

def imports_of(path):
    """The modules that a file imports, with dots. What comes out of the package `experiments`
    itself, a function or a chapter, has its name behind the dot."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module == "experiments":
            found |= {f"experiments.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found
