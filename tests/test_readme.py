"""README tells the truth: its code and its commands run as they stand; what it names is there."""

import argparse
import importlib
import io
import re
import shlex

import data
import eval as evaluation
import models
import pytest
import train
from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"python ((?:-m experiments\.|tests/)?\w+(?:\.py)?\b[^\n`|&#]*)", README)

NAMES = """
import data, models
data.TASKS["parity"] = Parity
models.MODELS["gru"] = lambda vocab_size, d_model=8: LanguageModel(
    vocab_size, d_model, 1, 8, lambda: GRUBlock(d_model))
"""
NAMED = ["train.py --plugin mine.py --model gru --format parity --out runs/mine",
         "eval.py runs/mine --plugin mine.py"]


@pytest.fixture
def in_a_second(tmp_path, monkeypatch, registries):
    """A folder to type README in. A run has a few steps, and a table a few traces; all else is as
    it stands."""
    evaluate = evaluation.evaluate

    def few_steps(recipe):
        recipe.max_steps, recipe.last_steps, recipe.batch = 2, 1, 2
        if recipe.stage_steps:
            recipe.stage_steps = [1] * len(recipe.curriculum)

    def few_traces(model, task, length, spacing, *_):
        return evaluate(model, task, length, spacing, traces=2)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr(train.Recipe, "__post_init__", few_steps)
    monkeypatch.setattr(evaluation, "evaluate", few_traces)
    return tmp_path


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_each_block_of_code_runs_as_it_stands(block, in_a_second, capsys):
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    assert "(L,S)" in capsys.readouterr().out  # each ends with a table


def test_the_commands_of_the_spine_run_in_their_order(in_a_second, capsys, monkeypatch):
    """In an empty folder. The blocks of code are the file that is handed over as a plugin. Of the
    certificate only two states are asked."""
    words = data.Group.shortest_words
    monkeypatch.setattr(data.Group, "shortest_words", lambda self, alphabet: dict(
        list(words(self, alphabet).items())[:2]))
    (in_a_second / "mine.py").write_text("\n".join([*BLOCKS, NAMES]))

    typed = [shlex.split(command) for command in [*COMMANDS, *NAMED]]
    typed = [words for words in typed if words[0] in ("data.py", "scan.py", "eval.py", "train.py")]
    assert len(typed) >= 10
    for script, *arguments in typed:
        importlib.import_module(script.removesuffix(".py")).main(arguments)

    shown = capsys.readouterr().out
    assert "of 240 (state, command) pairs right" in shown and "exchange a and a'" in shown
    assert {"s5.png", "linrnn-S5-seed0"} < {path.name for path in in_a_second.glob("runs/*")}


@pytest.mark.parametrize("command", [words for words in COMMANDS if "/" in words.split()[0]
                                     or words.startswith("-m")])
def test_the_other_commands_parse(command, monkeypatch):
    """Their own parser accepts them; an option that is not there would exit with 2."""
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
    """Each is named, and is there; CI runs the test command."""
    assert all(f"`{name}`" in README for name in models.MODELS)
    assert all(f"`{name}.py`" in README for name in ("data", "scan", "models", "eval", "train"))
    if (ROOT / "experiments").is_dir():
        for path in re.findall(r"!\[.*?\]\((.*?)\)|`((?:experiments|tests)/[\w/.]+)`", README):
            assert (ROOT / "".join(path)).exists(), path
    command = re.search(r"python -m pytest[^\n`#]*", README)[0].strip()
    assert command in (ROOT / ".ci" / "run").read_text()
