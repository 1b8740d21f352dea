"""What all tests share. The modules under test are one folder up; nothing is installed."""

import code
import contextlib
import io
import os
import sys
from pathlib import Path

if "CUDA_TESTS" not in os.environ:  # the other tests compare bits and tolerances of a CPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # the tensors are small, so a second thread would mostly wait

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
# With --import-mode=importlib, pytest does not add these folders.
sys.path[:0] = map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "experiments"))

# A run that takes a second and learns nothing.
SMALL = ("--group S3 --curriculum 2:1,4:2 --d-model 8 --heads 2 --batch 2 --pass-accuracy 0 "
         "--final-steps 3 --lengths 4:2 --traces 4 --device cpu").split()

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="with a CUDA device: "
                                "CUDA_TESTS=1 python -m pytest tests -k cuda")


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
def refused(capsys):
    """Runs a main(argv) that must refuse: exit code 2, and one line to read."""
    import data

    def run(main, argv, *words):
        capsys.readouterr()
        with pytest.raises(SystemExit, match="^2$"):
            data.run_cli(lambda: main([*map(str, argv)]))
        printed, errors = capsys.readouterr()
        line, = errors.splitlines()
        for word in words:
            assert word in line
        return printed
    return run


# --- Results by name ------------------------------------------------------------------------------

def check(outputs, expected, tolerance=1e-10):
    """Fail with the name of each output that is wrong.  expected: {name: tensor}."""
    assert len(outputs) == len(expected), f"return {', '.join(expected)}"
    wrong = []
    for output, (name, right) in zip(outputs, expected.items()):
        if (output.shape, output.dtype) != (right.shape, right.dtype):
            wrong.append(f"{name} is {output.dtype} {tuple(output.shape)}, "
                         f"not {right.dtype} {tuple(right.shape)}")
        elif not (output - right).abs().max() < tolerance:  # also if it is NaN
            wrong.append(f"{name} is off by {(output - right).abs().max():.0e}")
    assert not wrong, "; ".join(wrong)


def call(function, *given):
    """What the function returns.  Fail if it changes an argument in place."""
    before = [x.clone() for x in given]
    results = function(*given)
    changed = [i for i, (x, y) in enumerate(zip(given, before), 1) if not torch.equal(x, y)]
    assert not changed, f"arguments {changed} are changed in place"
    return results


# --- Permutations ---------------------------------------------------------------------------------

def run_commands(commands):
    """The state after each command, by a loop: [B, L, n] -> [B, L, n]."""
    states = [np.tile(np.arange(commands.shape[2]), (len(commands), 1))]
    for g in commands.swapaxes(0, 1):
        states.append(np.take_along_axis(states[-1], g, -1))
    return np.stack(states[1:], 1)


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
