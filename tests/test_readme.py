"""README tells the truth: its code and commands run, its numbers are those of the records."""

import importlib
import json
import re
import shlex
from pathlib import Path

import eval as evaluation
import train
from conftest import ROOT, session, typed_lines

from models import MODELS

README = (ROOT / "README.md").read_text(encoding="utf-8")
TEACHING = (ROOT / "experiments" / "TEACHING.md").read_text(encoding="utf-8")
BLOCKS = ["".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))  # of a page: one session
          for page in (README, TEACHING)]
COMMANDS = re.findall(r"python (\w+\.py\b[^\n`|&#]*)", README)  # those of the five files


def test_the_blocks_and_the_commands_of_the_five_files_run_in_their_order(tmp_path, monkeypatch):
    """Those of README and of TEACHING.md, in an empty folder. A run has a few steps here, and a
    table a few traces."""
    def few_steps(config, **options):
        initialise(config, **options)
        config.max_curriculum_steps, config.final_steps, config.batch = 2, 1, 2

    initialise = train.Config.__init__
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.Config, "__init__", few_steps)
    monkeypatch.setattr(evaluation.evaluate_and_print, "__defaults__", (2, 0))  # traces, seed
    monkeypatch.setitem(MODELS, "gru", None)  # a block replaces it, until this test is over

    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    texts = [json.loads(line)["text"] for line in Path("traces.jsonl").read_text().splitlines()]
    assert len({*texts}) == 1000 and session(typed_lines(texts[0])) == texts[0]
    for script, *arguments in map(shlex.split, COMMANDS):
        if script in ("train.py", "eval.py"):
            arguments += ["--traces", "2"]
        importlib.import_module(script.removesuffix(".py")).main(arguments)


def test_the_comments_of_the_block_to_paste_are_true():
    """A text in pieces has the logits of the whole, and gradients reach the first piece."""
    names = {}
    exec(BLOCKS[0], names)
    assert "experiments" not in BLOCKS[0]
    model, tokens, logits = names["model"], names["tokens"], names["logits"]
    assert (model(tokens)[:, 60:] - logits).abs().max() < 1e-4
    logits.square().sum().backward()
    only_first = list({*tokens[:, :60].flatten().tolist()} - {*tokens[:, 60:].flatten().tolist()})
    assert model.embedding.weight.grad[only_first].norm(dim=-1).min() > 0


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


def test_the_files_and_pictures_of_the_readme_exist():
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    for path in links + re.findall(r"`([\w/.-]+\.(?:py|md|ipynb|txt))`", README):
        assert (ROOT / path).exists(), path


def test_the_five_files_import_no_chapter():
    for name in ("data", "scan", "models", "eval", "train"):
        source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
        assert not re.search(r"^\s*(from|import) experiments", source, re.MULTILINE)
