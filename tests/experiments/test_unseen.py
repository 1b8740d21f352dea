"""Unseen commands are those that training never shows, read from the text of the traces; and a
certificate is complete for the head built by hand, until one transition of it is broken.
"""

import numpy as np
import pytest
import torch
from conftest import session, typed_lines
from machine import SwapMachine

import experiments
from data import Group, ReplTask, generator
from experiments import unseen
from experiments.unseen import UnseenTask, certify, generators


def commands_in(task, batch):
    """The command lines of a batch, as typed."""
    found = set()
    for row in batch.inputs:
        lines = typed_lines(task.decode(row))
        found.update(line for line in lines if ", " in line and "print" not in line)
    return found


def test_training_shows_the_seen_commands_and_the_test_all_others():
    """Two sets that share nothing and together are the alphabet; the traces are Python's own."""
    task = UnseenTask(Group("S4"), 15)
    training = task.training_batch(200, 20, 4, np.random.default_rng(0))
    test = task.test_batch(200, 20, 4, np.random.default_rng(0))
    shown, asked = commands_in(task, training), commands_in(task, test)
    assert len(shown) == 15 and len(asked) == 24 - 15 and not shown & asked

    text = task.decode(np.append(test.inputs[0], test.targets[0, -1]))
    assert session(typed_lines(text)) == text


@pytest.mark.parametrize("name, count", [("S5", 4), ("A5", 3), ("D6", 2), ("S3xZ4", 3)])
def test_a_few_generators_reach_every_element_of_their_group(name, count):
    group = Group(name)
    found = generators(ReplTask(group))
    assert len(found) == count and len(group.shortest_words(found)) == group.order


class OneBroken(SwapMachine):
    """After `a, b, c = b, a, c` it is wrong if the values ahead of it were 3, 1, 2."""

    def execute(self, commands, S):
        after = super().execute(commands, S)
        values = S[:, 0, :3].argmax(-1)
        broken = (values == torch.tensor([2, 0, 1])) & (commands == torch.tensor([1, 0, 2]))
        broken = broken.all(-1)
        after[broken] = after[broken].roll(1, -1)
        return after


def test_the_certificate_of_a_perfect_reader_is_complete_and_finds_one_broken_transition():
    """Of 30 random states all but those with a = 3, b = 1, c = 2 pass, with one generator."""
    machine = SwapMachine("S3")
    right = certify(machine, machine.task, 30, 2, generator(0, "test"))
    assert right.shape == (30, 2) and right.all()

    right = certify(OneBroken("S3"), machine.task, 30, 1, generator(0, "test"))
    assert right[:, 1].all()
    assert 0 < (~right[:, 0]).sum() < 15  # a sixth of 30, by chance


def test_a_study_counts_the_pairs_with_an_unseen_command_apart(tmp_path, monkeypatch):
    """Two of the six commands are unseen, from six states each. One is wrong from two states."""
    def exhaustive(_, task):
        wrong = [task.seen[0], task.unseen[1], task.unseen[1]]
        return 36, [(state, command, None, None) for state, command in enumerate(wrong)]

    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    monkeypatch.setattr(unseen, "GROUP", "S3")
    monkeypatch.setattr(unseen, "SEEDS", {4: 1})
    monkeypatch.setattr(unseen, "train_arm", lambda *_: (None, {"seed": 0}))
    monkeypatch.setattr(unseen, "evaluate_and_print", lambda *_: [])
    monkeypatch.setattr(unseen, "exhaustive", exhaustive)
    unseen.main(["--run"])
    row, = experiments.records("unseen")
    assert row["exhaustive"] == {"unseen": 12, "unseen_right": 10}


def test_the_sentences_about_the_records_are_true():
    """Those of the chapter's first lines, and of the notebook."""
    for seen, seeds, lowest, highest in [(108, 5, 94, 100), (60, 3, 54, 97)]:
        rows = experiments.records("unseen", kind="unseen", seen=seen)
        right = [round(100 * row["results"][1]["all"]) for row in rows]
        assert (len(rows), min(right), max(right)) == (seeds, lowest, highest)
        for row in rows:
            assert row["exhaustive"]["unseen_right"] == row["exhaustive"]["unseen"]
    for seen, low, high in [(30, 0.9, 1), (12, 0, 0.21), (5, 0, 0.21)]:
        for row in experiments.records("unseen", kind="unseen", seen=seen):
            pairs = row["exhaustive"]
            assert low < pairs["unseen_right"] / pairs["unseen"] < high

    passed = {}
    for row in experiments.records("unseen", kind="certificate", depth=16, commands="full"):
        key = row["group"] + row.get("without", "")
        passed.setdefault(key, []).append(row["passed"])
    assert min(min(passed[f"S{n}"]) for n in (5, 8, 12, 16, 20, 26)) == 247
    assert passed["S26rehearsal"] == [0, 0]
    for row in experiments.records("unseen", kind="certificate", group="S26", commands="swap"):
        assert row["generators"] == 325 and row["passed"] == row["states"] == 64


def test_certify_reads_a_run_and_records_how_many_states_pass(small_run, tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    unseen.main(["certify", str(small_run), "--states", "3", "--depth", "2", "--record"])
    row, = experiments.records("unseen")
    assert (row["group"], row["states"], row["generators"]) == ("S3", 3, 2)
    assert 0 <= row["passed"] <= 3
