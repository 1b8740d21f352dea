"""Unseen commands are those that training never shows, read from the text of the traces."""

import json

import numpy as np
import pytest
from conftest import SMALL, session, typed_lines
from data import Group
from experiments import unseen


def commands_in(task, batch):
    """The command lines of a batch, as typed."""
    texts = [task.decode(row) for row in batch.inputs]
    return {line for text in texts for line in typed_lines(text) if ", " in line
            and "print" not in line}


@pytest.mark.parametrize("commands, seen", [("full", 15), ("swap", 4)])
def test_training_shows_the_seen_commands_and_the_test_all_others(commands, seen):
    """Two sets that share nothing and together are the alphabet; the traces are Python's own."""
    task = unseen.UnseenTask(Group("S4"), commands, seen)
    training, test = (make(200, 20, 4, np.random.default_rng(0))
                      for make in (task.training_batch, task.test_batch))
    shown = [commands_in(task, batch) for batch in (training, test)]
    assert [len(lines) for lines in shown] == [seen, len(task.alphabet) - seen]
    assert not shown[0] & shown[1]
    text = task.decode(np.append(test.inputs[0], test.targets[0, -1]))
    assert session(typed_lines(text)) == text


def test_the_same_commands_are_seen_in_every_run():
    first, again = (unseen.UnseenTask(Group("S4"), "full", 12) for _ in range(2))
    assert (first.seen == again.seen).all()


def test_a_split_that_cannot_be_is_refused(refused, tmp_path):
    for count in (0, 24, 25):
        refused(unseen.main, ["train", "--group", "S4", "--seen", count, "--out", tmp_path / "run"],
                "of the 24 commands", str(count))
    refused(unseen.main, ["train", "--group", "S4", "--seen", 1, "--out", tmp_path / "run"],
            "of the 24 states")


def test_a_study_trains_reads_and_certifies_each_cell(tmp_path, monkeypatch):
    """An untrained model: few pairs are right, and those of unseen commands are counted apart."""
    monkeypatch.chdir(tmp_path)
    train = unseen.train_unseen
    monkeypatch.setattr(unseen, "train_unseen", lambda argv: train([*SMALL, *argv]))
    monkeypatch.setattr(unseen, "evaluate_and_print", lambda *_: [])
    unseen.main(["study", "--counts", "4", "--seeds", "0,1", "--record", "r.jsonl"])
    lines = [json.loads(line) for line in open("r.jsonl")]
    assert [(line["seen"], line["seed"]) for line in lines] == [(4, 0), (4, 1)]
    for line in lines:
        found = line["exhaustive"]
        assert found["pairs"] == 36 and found["unseen"] == 12
        assert 0 <= found["unseen_right"] <= min(found["right"], 12)
