"""README tells the truth: its code and commands run, its numbers are those of the records."""

import argparse
import importlib
import io
import re
import shlex

import eval as evaluation
import pytest
import train
from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
CHAPTERS = (ROOT / "experiments").is_dir()  # .ci/run also tests the spine alone
TEACHING = ROOT / "experiments" / "TEACHING.md"
TEXTS = README + (TEACHING.read_text(encoding="utf-8") if CHAPTERS else "")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXTS, re.DOTALL)
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

    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    for script, *arguments in map(shlex.split, OF_THE_SPINE):
        if script in ("train.py", "eval.py") and "--resume" not in arguments:
            arguments += ["--traces", "2"]
        importlib.import_module(script.removesuffix(".py")).main(arguments)


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
                chapter = next(name for name in re.findall(r"`(\w+)`", text) if name in ORDER)
                lines = [" ".join(line.split()) for line in printed(chapter).splitlines()]
                assert any(" ".join(numbers) in line for line in lines), row
                checked += 1
    assert checked


def test_the_files_and_pictures_of_the_readme_exist():
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    for path in links + re.findall(r"`([\w/.-]+\.(?:py|md|ipynb|txt))`", README):
        if CHAPTERS or not path.startswith(("experiments", "analysis")):
            assert (ROOT / path).exists(), path
