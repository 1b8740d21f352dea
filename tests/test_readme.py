"""README tells the truth: its code and commands run, its numbers are those of the records."""

import argparse
import importlib
import io
import json
import re
import shlex
import textwrap
from pathlib import Path

import eval as evaluation
import pytest
import train
from conftest import ROOT, session, typed_lines

from models import MODELS

README = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
CHAPTERS = (ROOT / "experiments").is_dir()  # .ci/run also tests the five files alone
TEACHING = ROOT / "experiments" / "TEACHING.md"
BLOCKS = ["".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))  # of a page: one session
          for page in [README, TEACHING.read_text("utf-8") if CHAPTERS else ""]]
COMMANDS = re.findall(r"python ((?:-m experiments\.|tests/)?\w+(?:\.py)?\b[^\n`|&#]*)", README)
OF_THE_SPINE = [command for command in COMMANDS if re.match(r"\w+\.py", command)]


def test_the_code_and_the_commands_of_the_spine_run_in_their_order(tmp_path, monkeypatch):
    """In an empty folder. A run has a few steps here, and a table a few traces."""
    def few_steps(config, **options):
        initialise(config, **options)
        config.max_curriculum_steps, config.final_steps, config.batch = 2, 1, 2

    initialise = train.Config.__init__
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr(train.Config, "__init__", few_steps)
    monkeypatch.setattr(evaluation.evaluate_and_print, "__defaults__", (2, 0))  # traces, seed

    for name in ("gru", "gated"):
        monkeypatch.setitem(MODELS, name, None)  # a block replaces it
    for block in BLOCKS:
        names = {"__name__": "__main__"}
        exec(compile(block, "README.md", "exec"), names)
    if CHAPTERS:
        lines = Path("traces.jsonl").read_text().splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        assert len({*texts}) == 1000 and session(typed_lines(texts[0])) == texts[0]
    for script, *arguments in map(shlex.split, OF_THE_SPINE):
        if script in ("train.py", "eval.py") and "--resume" not in arguments:
            arguments += ["--traces", "2"]
        importlib.import_module(script.removesuffix(".py")).main(arguments)


def test_the_block_to_paste_needs_no_chapter_and_its_comments_are_true():
    """A text in pieces has the logits of the whole, and gradients reach the first piece."""
    names = {}
    exec(BLOCKS[0], names)
    assert "experiments" not in BLOCKS[0] and names["out"].shape == names["v"].shape
    model, tokens, logits = names["model"], names["tokens"], names["logits"]
    assert (model(tokens)[:, 60:] - logits).abs().max() < 1e-4
    logits.square().sum().backward()
    only_first = list({*tokens[:, :60].flatten().tolist()} - {*tokens[:, 60:].flatten().tolist()})
    assert model.embedding.weight.grad[only_first].norm(dim=-1).min() > 0


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {*OF_THE_SPINE}))
def test_the_other_commands_parse(command, monkeypatch):
    """Their own parser accepts them; an option that is not there would be refused."""
    script, *arguments = shlex.split(command.removeprefix("-m "))
    if "experiments" in script and not CHAPTERS:
        pytest.skip("the chapters are not here")
    main = importlib.import_module(script.removeprefix("tests/").removesuffix(".py")).main
    real = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, argv=None):
        real(parser, argv)
        raise InterruptedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    with pytest.raises(InterruptedError):
        main(arguments)


@pytest.mark.skipif(not CHAPTERS, reason="the chapters are not here")
def test_the_numbers_of_a_table_are_printed_by_the_first_chapter_that_is_named_after_it():
    from test_chapters import ORDER, printed
    rule = r"\n\|[-|]+\|\n"  # below the head of a table
    tables = re.findall(rf"{rule}((?:\|[^\n]*\n)+)(.*?)(?={rule}|\Z)", README, re.DOTALL)
    checked = 0
    for rows, text in tables:
        for row in rows.replace("*", "").splitlines():
            numbers = re.findall(r"(?<=\| )[\d.-]+(?= \|)", row)
            if len(numbers) > 1:
                chapter = next(name for name in re.findall(r"[`.](\w+)`", text) if name in ORDER)
                lines = [" ".join(line.split()) for line in printed(chapter).splitlines()]
                assert any(" ".join(numbers) in line for line in lines), row
                checked += 1
    assert checked


@pytest.mark.skipif(not CHAPTERS, reason="the chapters are not here")
def test_the_notebook_can_be_read_in_a_terminal(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = TEACHING.read_text("utf-8")
    exec(textwrap.dedent("    " + re.search(r'"(import json, pathlib.*?)"\n', page, re.S)[1]))
    shown = capsys.readouterr().out
    assert shown.startswith("# The shell game") and "exact.certify(model)" in shown


def test_the_files_and_pictures_of_the_readme_exist():
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    for path in links + re.findall(r"`([\w/.-]+\.(?:py|md|ipynb|txt))`", README):
        if CHAPTERS or not path.startswith(("experiments", "analysis")):
            assert (ROOT / path).exists(), path
