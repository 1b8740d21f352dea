"""README tells the truth: its commands parse, and it names what is there."""

import argparse
import importlib
import re
import shlex

import pytest
from conftest import ROOT
from models import MODELS

README = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
COMMANDS = re.findall(r"python ((?:-m experiments\.)?\w+(?:\.py)?\b[^\n`|&#]*)", README)


@pytest.mark.parametrize("command", sorted({*COMMANDS}))
def test_each_command_of_the_readme_parses(command, monkeypatch):
    """The script's own parser accepts it; an option that is not there would exit with 2."""
    script, *arguments = shlex.split(command.removeprefix("-m "))
    if "experiments" in script and not (ROOT / "experiments").is_dir():
        pytest.skip("the chapters are not here")
    main = importlib.import_module(script.removeprefix("tests/").removesuffix(".py")).main
    real = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, argv=None):
        real(parser, argv)
        raise InterruptedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    with pytest.raises(InterruptedError):
        main(arguments)


def test_what_the_readme_says_of_files_models_and_tests_is_so():
    """Each is named, line counts are true, and CI runs the test command."""
    assert all(f"`{name}`" in README for name in MODELS)
    for name in "data.py scan.py models.py eval.py train.py".split():
        count, = re.findall(rf"`{name}` *\| *(\d+)", README)
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) == int(count), name
    command = re.search(r"python -m pytest[^\n`#]*", README)[0].strip()
    assert command in (ROOT / ".ci" / "run").read_text()
