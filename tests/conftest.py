"""The modules under test lie one folder up; nothing is installed."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)  # the tensors of the tests are small: a second thread would mostly wait


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def refused(capsys):
    """Runs a main(argv) that must refuse: exit code 2, nothing but one clear line and the usage
    on stderr."""
    def run(main, argv, *words):
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in argv])
        message = capsys.readouterr().err.strip().splitlines()[-1]
        assert stop.value.code == 2, message
        assert "error: " in message and "Traceback" not in message
        for word in words:
            assert word in message, message
    return run
