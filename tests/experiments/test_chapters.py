"""What a chapter may do, and what the spine lets it do."""

import ast
import json
from graphlib import TopologicalSorter

import data
import eval as evaluation
import models
import numpy as np
import pytest
import torch
import train
from conftest import ROOT, SMALL
from scan import delta_rule_chunked, delta_rule_recurrent, exchange_key

CHAPTERS = {path.stem: path for path in (ROOT / "experiments").glob("*.py")}


def test_chapters_are_short_and_import_one_another_without_circles():
    imported = {name: set() for name in CHAPTERS}
    for name, path in CHAPTERS.items():
        source = path.read_text(encoding="utf-8")
        assert len(source.splitlines()) <= 300, path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                imported[name] |= {alias.name.removeprefix("experiments.") for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                imported[name] |= {node.module.removeprefix("experiments.")}
                imported[name] |= {alias.name for alias in node.names
                                   if node.module == "experiments"}
    TopologicalSorter({name: used & {*CHAPTERS} for name, used in imported.items()}).prepare()


class Riddle(data.ReplTask):
    """A task with an option of its own, whose ideal reader knows nothing."""

    def __init__(self, group, commands="full", depth=2):
        super().__init__(group, commands)
        self.depth = depth

    def training_batch(self, *request):
        batch = super().training_batch(*request)
        best = np.zeros((len(batch.inputs), batch.reveals[0].sum(), len(self.vocab)))
        best[..., self.value_tokens] = 1 / self.group.degree
        return batch._replace(best=best)

    test_batch = training_batch


class Mine(models.LinRNN):
    """A model with a block of its own."""

    class Block(models.DeltaBlock):
        pass


def test_a_chapter_brings_a_task_and_a_model_and_its_runs_need_it(
        tmp_path, monkeypatch, refused, capsys):
    """Registered, with a flag of its own. A stage is left at --advance times the accuracy of the
    best prediction, here 1/3. Without the chapter the run is refused, and the chapter named."""
    monkeypatch.setitem(data.TASKS, "riddle", Riddle)
    monkeypatch.setitem(models.MODELS, "mine", Mine)
    monkeypatch.setattr(train, "train_step", lambda *_: {"loss": 0.0, "reveal_accuracy": 0.32})
    parser, run, record = train.make_parser(), tmp_path / "run", tmp_path / "record.jsonl"
    parser.prog = "python -m experiments.riddles train"
    parser.add_argument("--depth", type=int, default=2)
    parser.set_defaults(format="riddle", chapter="experiments.riddles")
    train.main([*SMALL, "--model", "mine", "--depth", "6", "--advance", "0.95", "--out", str(run),
                "--record", str(record)], parser)
    line, (checkpoint, task, model) = json.loads(record.read_text()), evaluation.load_run(run)
    assert task.depth == checkpoint["config"]["depth"] == 6
    assert type(model) is Mine and type(model.blocks[1]) is Mine.Block
    assert line["steps"] == train.STREAK + 3  # 0.32 > 0.95 / 3, and then the last steps
    assert line["command"].startswith("python -m experiments.riddles train ")
    assert line["results"][0]["bayes"] == pytest.approx(1 / 3) and line["results"][0]["kl"] > 0
    logged = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
    assert logged["bayes_accuracy"] == pytest.approx(1 / 3)
    assert "excess" in capsys.readouterr().out
    for registry, name in ((models.MODELS, "mine"), (data.TASKS, "riddle")):
        monkeypatch.delitem(registry, name)
        refused(evaluation.main, [run], name, "experiments.riddles")


def test_in_float32_the_chunks_lose_a_few_times_what_the_loop_loses():
    """T = 4,096 exchanges by the ten swap keys of S5, in a random orthogonal basis: the error
    against the float64 loop is within 10 times that of the float32 loop."""
    pairs = torch.combinations(torch.arange(5))
    basis = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0]
    k = (exchange_key(pairs[:, 0], pairs[:, 1], 5) @ basis)[torch.randint(10, (8, 4096))]
    beta, state = k.new_full((8, 4096), 2.0), torch.eye(5).double().expand(8, 5, 5)
    exact = torch.randn_like(k), k, torch.zeros_like(k), beta, state
    rounded = [x.float() for x in exact]
    truth = delta_rule_recurrent(*exact)

    def error(results):
        return max((ours - true).abs().max() for ours, true in zip(results, truth, strict=True))

    loop = error(delta_rule_recurrent(*rounded))
    for C in (16, 32, 256):
        assert error(delta_rule_chunked(*rounded, chunk_size=C)) <= 10 * loop
