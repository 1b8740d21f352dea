"""Unseen commands are those that training never shows, read from the text of the traces; and a
certificate is complete for the head built by hand, until one transition of it is broken.
"""

import json

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


@pytest.mark.parametrize("commands, seen", [("full", 15), ("swap", 4)])
def test_training_shows_the_seen_commands_and_the_test_all_others(commands, seen):
    """Two sets that share nothing and together are the alphabet; the traces are Python's own."""
    task = UnseenTask(Group("S4"), commands, seen)
    training = task.training_batch(200, 20, 4, np.random.default_rng(0))
    test = task.test_batch(200, 20, 4, np.random.default_rng(0))
    shown, asked = commands_in(task, training), commands_in(task, test)
    assert len(shown) == seen and len(asked) == len(task.alphabet) - seen
    assert not shown & asked
    assert (UnseenTask(Group("S4"), commands, seen).seen == task.seen).all()

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
    """An untrained model: few pairs are right, and those of unseen commands are among them."""
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    monkeypatch.setattr(unseen, "GROUP", "S3")
    monkeypatch.setattr(unseen, "SEEDS", {4: 1})
    monkeypatch.setattr(unseen, "LENGTHS", [(2, 1)])
    monkeypatch.setattr(unseen, "train_arm", lambda name, cell, make_model, *_, **__: (
        make_model(), {"seed": 0}))
    unseen.main(["--run"])
    row, = map(json.loads, open(tmp_path / "unseen.jsonl"))
    found = row["exhaustive"]
    assert (found["pairs"], found["unseen"]) == (36, 12)
    assert 0 <= found["unseen_right"] <= min(found["right"], 12)


def test_the_sentences_about_the_records_are_true():
    """Those of the chapter's first lines."""
    shares = {}
    for row in experiments.records("unseen", kind="unseen"):
        found = row["exhaustive"]
        shares.setdefault(row["seen"], []).append(
            (found["unseen_right"] / found["unseen"], round(100 * row["results"][1]["all"])))
    assert {seen: len(rows) for seen, rows in shares.items()} == unseen.SEEDS
    for seen, lowest, highest in [(108, 94, 100), (60, 54, 97)]:
        assert all(pairs == 1 for pairs, _ in shares[seen])
        right = [at_128 for _, at_128 in shares[seen]]
        assert (min(right), max(right)) == (lowest, highest)
    assert min(shares[30])[0] > 0.9 and max(shares[12] + shares[5])[0] < 0.21

    passed = {}
    for row in experiments.records("unseen", kind="certificate", depth=16, commands="full"):
        key = row["group"] + row.get("without", "")
        passed.setdefault(key, []).append(row["passed"])
    large = [passed[group] for group in ("S5", "S8", "S12", "S16", "S20", "S26")]
    assert [len(seeds) for seeds in large] == [5, 3, 3, 2, 2, 2]
    assert min(map(min, large)) == 254
    assert passed["S26rehearsal"] == [0, 0] and passed["S26last steps"] == [247]
    swaps, again = experiments.records("unseen", kind="certificate", group="S26", commands="swap")
    assert swaps["passed"] == again["passed"] == swaps["states"] == 64
    assert swaps["generators"] == 325


def test_certify_reads_a_run_and_records_how_many_states_pass(small_run, tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    unseen.main(["certify", str(small_run), "--states", "3", "--depth", "2", "--record"])
    row, = experiments.records("unseen")
    assert (row["group"], row["states"], row["generators"]) == ("S3", 3, 2)
    assert 0 <= row["passed"] <= 3
