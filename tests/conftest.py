"""What all tests share. The modules under test lie one folder up; nothing is installed."""

import code
import contextlib
import io
import os
import re
import sys
from pathlib import Path

if "CUDA_TESTS" not in os.environ:  # bits and tolerances of the other tests are those of a CPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # the tensors are small: a second thread would mostly wait

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# A run that is over in a second. It learns nothing.
SMALL = ("--group S3 --curriculum 2:1,4:2 --d-model 8 --heads 2 --batch 2 --advance -1 "
         "--last-steps 3 --test-lengths 4:2 --traces 4 --device cpu").split()
TO_DO = any('raise NotImplementedError("exercise ' in path.read_text(encoding="utf-8")
            for path in [*ROOT.glob("*.py"), *ROOT.glob("experiments/*.py")])

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="with a CUDA device: "
                                "CUDA_TESTS=1 python -m pytest tests -k cuda")
EARLY = {}  # name of a test: what starts the process that it waits for -> (its folder, process)


def pytest_collection_finish(session):
    """There is a second core: such processes run there, and the tests that wait for them last."""
    session.items.sort(key=lambda item: item.name in EARLY)
    for item in session.items:
        if item.name in EARLY and not session.config.option.collectonly:
            _, process = EARLY[item.name] = EARLY[item.name]()
            if hasattr(os, "setpriority"):  # not in Windows
                os.setpriority(os.PRIO_PROCESS, process.pid, 10)


def pytest_configure(config):
    for name in [*range(1, 10), "ten"]:  # exercise_10 would contain exercise_1, and -k take both
        config.addinivalue_line("markers", f"exercise_{name}: the tests that grade it")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """In a students' copy, what needs an exercise is skipped until that is done."""
    report = yield
    shown = " ".join([report.longreprtext, *(text for _, text in report.sections)])
    needed = TO_DO and report.failed and re.search(r"exercise \d+: see the docstring", shown)
    if needed and not any(mark.name.startswith("exercise_") for mark in item.iter_markers()):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"needs {needed[0]}")
    return report


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """The folder of such a run, for tests that only read it."""
    import train
    folder = tmp_path_factory.mktemp("runs") / "small"
    try:
        train.main([*SMALL, "--out", str(folder)])
    except SystemExit as stop:  # pytest does not remember a fixture that ends like this
        raise RuntimeError("there is no small run") from stop
    return folder


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


def session(lines):
    """What an interactive Python shows: each line after its prompt, then what it prints."""
    interpreter, shown, source = code.InteractiveInterpreter(), "", ""
    for line in lines:
        shown += f"{'... ' if source else '>>> '}{line}\n"
        # An `if` goes on until an empty line, any other statement ends at once.
        source += f"{line}\n" if source or line.startswith("if") else line
        with contextlib.redirect_stdout(io.StringIO()) as out:
            unfinished = interpreter.runsource(source.removesuffix("\n") if line else source)
        shown, source = shown + out.getvalue(), source if unfinished else ""
    return shown


def typed_lines(text):
    """What the user types in a trace: the lines after a prompt."""
    return [line[4:] for line in text.splitlines() if line[:4] in (">>> ", "... ")]
