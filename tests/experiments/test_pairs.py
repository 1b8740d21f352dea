"""Held-out pairs of commands, read from the text of the traces."""

import json
from collections import Counter

import numpy as np
import pytest
from conftest import SMALL

from data import COMMANDS, Group, ReplTask, generator
from eval import evaluate
from experiments.pairs import PairTask, main
from models import build


def pairs_of(task, tokens):
    """The consecutive commands of each trace, reveals between them or not: a list of lists."""
    texts = [task.decode(row).splitlines() for row in tokens]
    return [[line for line in text if ", " in line and "print" not in line] for text in texts]


@pytest.mark.parametrize("commands", COMMANDS)
def test_training_never_shows_a_held_out_pair_and_the_test_shows_no_other(commands):
    """The pairs of consecutive commands fall into two sets that share nothing and are complete, a
    tenth of them held out; no command is rare."""
    task = PairTask(Group("S5"), commands, 0.1)
    count, pairs = len(task.alphabet), {}
    for make in (task.training_batch, task.test_batch):
        lines = pairs_of(task, make(600, 400, 5, np.random.default_rng(0)).inputs)
        pairs[make] = {pair for row in lines for pair in zip(row, row[1:])}
        frequency = Counter(line for row in lines for line in row)
        assert len(frequency) == count
        assert max(abs(seen * count / 240_000 - 1) for seen in frequency.values()) < 0.2
    training, test = pairs.values()
    assert not training & test
    assert len(training) == 9 * len(test) == 0.9 * count**2


def test_the_split_depends_on_no_seed_and_its_traces_are_those_of_the_plain_task():
    """The same pairs in every run; the same text, vocabulary and answers for given commands."""
    task, again, plain = (make(Group("S3")) for make in (PairTask, PairTask, ReplTask))
    assert (task.pairs.a == again.pairs.a).all() and (task.pairs.b == again.pairs.b).all()
    assert task.vocab == plain.vocab and task.model_defaults() == plain.model_defaults()
    batch = task.test_batch(8, 6, 2, np.random.default_rng(1))
    rng = np.random.default_rng(1)
    commands = task.pairs.draw((8, 6), rng, held_out=True)
    tokens, reveals = plain.write(commands, rng.integers(3, size=(8, 3)))
    assert (batch.inputs == tokens[:, :-1]).all() and (batch.targets == tokens[:, 1:]).all()
    assert (batch.reveals == reveals[:, 1:]).all() and batch.best is None


def test_an_evaluation_asks_for_held_out_pairs_only(monkeypatch):
    task, drawn = PairTask(Group("S3"), "full", 0.5), []
    monkeypatch.setattr(task, "write", lambda commands, asked: drawn.append(commands)
                        or ReplTask.write(task, commands, asked))
    evaluate(build("lstm", len(task.vocab), d_model=8), task, 8, 2, traces=4)
    numbers = task.group.index(drawn[0])
    a, b = task.pairs.a[numbers[:, :-1]], task.pairs.b[numbers[:, 1:]]
    assert ((a + b) % 6 < task.pairs.cut).all()
    unseen = {pair for row in pairs_of(task, task.write(drawn[0], np.zeros((4, 1), int))[0])
              for pair in zip(row, row[1:])}
    training = pairs_of(task, task.sample(100, 50, 1, generator(0, "train", 0))[0])
    assert not unseen & {pair for row in training for pair in zip(row, row[1:])}


def test_a_run_with_held_out_pairs_is_trained_evaluated_and_recorded(tmp_path, capsys, refused):
    main(["train", *SMALL, "--hold-out-pairs", "0.3", "--out", str(tmp_path / "run"),
          "--record", str(tmp_path / "results.jsonl")])
    record = json.loads((tmp_path / "results.jsonl").read_text())
    assert record["command"].startswith("python -m experiments.pairs train ")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["hold_out_pairs"] == 0.3 and config["chapter"] == "experiments.pairs"
    capsys.readouterr()
    main(["eval", str(tmp_path / "run"), "--lengths", "4:2", "--traces", "4", "--json",
          "--record", str(tmp_path / "evaluation.jsonl")])
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    line = json.loads((tmp_path / "evaluation.jsonl").read_text())
    assert results == record["results"] == line["results"]
    assert line["command"].startswith("python -m experiments.pairs eval ")
    refused(main, ["eval", tmp_path / "run", "--seed", "-1"], "--seed")
    refused(main, ["eval", tmp_path / "run", "--record", tmp_path], "directory")


@pytest.mark.parametrize("share", ["0", "1", "inf", "nan", "-0.1"])
def test_a_split_without_pairs_on_either_side_is_refused(share, refused, tmp_path):
    refused(main, ["train", "--hold-out-pairs", share, "--out", tmp_path / "run"],
            "at least one on either side", "120")


def test_bad_requests_get_one_line(refused, small_run, tmp_path):
    refused(main, ["eval", small_run], "format repl, not pairs")
    refused(main, ["eval", tmp_path / "nothing"], "missing")
    refused(main, ["train", "--format", "repl", "--out", tmp_path / "run"], "pairs only", "repl")
    refused(main, ["train", "--group", "S10", "--out", tmp_path / "run"], "3,628,800")
