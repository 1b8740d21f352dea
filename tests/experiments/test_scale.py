"""The rule for large groups, and the certificate by random states.

Oracles: the real interpreter, the head built by hand, and data.py's own groups.
"""

import json

import numpy as np
import pytest
import torch
from conftest import session, typed_lines
from machine import SwapMachine

import train
from data import Group, ReplTask, generator
from experiments import scale
from experiments.scale import AblatedTask


def config_of(*words):
    return train.config_of(train.make_parser().parse_args(words))[0]


@pytest.mark.parametrize("n", range(2, 27))
def test_the_rule_yields_a_model_that_can_hold_the_construction(n):
    """2n orthogonal directions in each key; the convolution sees a side of a command and more."""
    options = config_of("--group", f"S{n}")["options"]
    assert options["d_model"] // options["heads"] >= 2 * n and options["conv_width"] >= n + 2
    assert config_of("--group", f"S{n}", "--model", "lstm")["options"].keys() == {
        "d_model", "layers", "conv_width"}


def test_the_rule_leaves_small_groups_as_they_were_and_lowers_the_rate_of_large_ones():
    assert config_of("--group", "S7")["options"] == {
        "d_model": 64, "heads": 4, "layers": 1, "beta_max": 2.0, "householders": 1,
        "conv_width": 10}
    assert config_of("--group", "S5")["lr"] == config_of("--group", "S2")["lr"] == 4e-3
    assert config_of("--group", "S5")["matrix_lr"] == 0.02
    large = config_of("--group", "S20")
    assert large["lr"] == 1e-3 and large["matrix_lr"] == 0.01
    chosen = config_of("--group", "S20", "--lr", "0.5", "--matrix-lr", "0.25")
    assert (chosen["lr"], chosen["matrix_lr"]) == (0.5, 0.25)
    for name, commands in [("S7", "full"), ("S5", "swap"), ("A5", "full")]:
        task = ReplTask(Group(name), commands)
        drawn, plain = (make(3, 8, 1, generator(5, "train", 0))
                        for make in (task.training_batch, task.test_batch))
        assert all((x == y).all() for x, y in zip(drawn[:3], plain[:3]))


@pytest.mark.parametrize("name, commands, spacing", [
    ("S8", "full", 1), ("S8", "full", 2), ("S26", "full", 1), ("S26", "swap", 1), ("A9", "full", 1),
    ("S4xS5", "full", 1), ("D26", "full", 4)])
def test_a_real_interpreter_prints_what_a_training_batch_of_a_large_group_shows(
        name, commands, spacing):
    """n // 4 reveals in a row. Between them stand commands of the group; exchanges have no more."""
    task = ReplTask(Group(name), commands)
    batch = task.training_batch(3, 4, spacing, generator(1, "train", 0))
    row = task.group.degree // 4
    assert batch.reveals.sum(1).tolist() == 3 * [4 // spacing * row]
    for inputs, targets, reveals in zip(*batch[:3]):
        text = task.decode([inputs[0], *targets])
        assert session(typed_lines(text)) == text
        shown = [line.split() for line in text.splitlines() if not line.startswith(">>> ")]
        assert [task.vocab[i] for i in targets[reveals]] == [value for _, value in shown]
        lines = text.splitlines()[task.group.degree:]
        assert ["print" in line for line in lines if line.startswith(">>> ")] == (
            spacing * [False] + row * [True]) * (4 // spacing)


@pytest.mark.parametrize("spacing, exchanges, low, high", [
    (1, 1, 0.4, 0.6), (2, 1, 0.03, 0.06), (1, 0, 0.03, 0.06)])
def test_the_first_commands_leave_some_variables_where_they_are(spacing, exchanges, low, high):
    """Products of 1 to n exchanges: from n - 2 variables stay down to what chance leaves, 1 of n.
    From S = 2 on, and without this part of the rule, all commands are random."""
    task = AblatedTask(Group("S24"), reveals=0, exchanges=exchanges)
    batch = task.training_batch(16, 32, spacing, generator(2, "train", 0))
    prompt, first = task.encode(">>> a")
    starts = 5 * 24 + np.arange(0, 32 // spacing) * (51 * spacing + 11)
    tokens = np.hstack([batch.inputs, batch.targets[:, -1:]])
    left, right = (np.stack([tokens[:, t + shift:t + shift + 24] for t in starts], 1)
                   for shift in (1, 26))
    assert (tokens[:, starts] == prompt).all() and (left[..., 0] == first).all()
    stays = (left == right).mean(-1)
    assert low < stays.mean() < high
    if spacing == exchanges == 1:
        assert stays.max() == 22 / 24 and stays.min() < 0.1
    else:
        assert stays.max() < 0.5


def test_the_traces_of_a_test_are_not_made_easier():
    task = ReplTask(Group("S12"))
    batch = task.test_batch(3, 8, 1, generator(4, "test", 8, 1))
    tokens, reveals = task.sample(3, 8, 1, generator(4, "test", 8, 1))
    assert (batch.targets == tokens[:, 1:]).all() and (batch.reveals == reveals[:, 1:]).all()
    assert (batch.inputs == tokens[:, :-1]).all() and batch.reveals.sum() == 3 * 8


def test_each_part_of_the_rule_can_be_left_out():
    """With all parts the batches are those of train.py, to the bit; without, those of a test."""
    group, rngs = Group("S12"), lambda: generator(3, "train", 0)
    whole, plain = AblatedTask(group), AblatedTask(group, reveals=0, exchanges=0)
    for ours, theirs, S in [(whole.training_batch, ReplTask(group).training_batch, 1),
                            (whole.training_batch, ReplTask(group).training_batch, 2),
                            (plain.training_batch, plain.test_batch, 1)]:
        assert all((x == y).all() for x, y in zip(ours(2, 4, S, rngs())[:3],
                                                  theirs(2, 4, S, rngs())[:3]))
    assert AblatedTask(group, reveals=0).training_batch(2, 4, 1, rngs()).reveals.sum() == 8


def test_a_run_records_the_options_that_the_rule_chose(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scale, "LENGTHS", "2:1")
    words = "run --group S8 --curriculum 2:1 --millions 0.001 --record r.jsonl".split()
    for without in ([], ["--without", "width"], ["--without", "all"]):
        scale.main([*words, *without])
    rule, narrow, none = map(json.loads, open("r.jsonl"))
    assert (rule["options"]["heads"], narrow["options"]["heads"]) == (2, 4)
    assert rule["lr"] == narrow["lr"] == 2.5e-3 and none["lr"] == 4e-3
    assert rule["tokens"] > none["tokens"] > 0 and none["without"] == "all"
    assert rule["command"] == "python -m experiments.scale " + " ".join(words)
    refused(scale.main, ["run", "--group", "A8", "--without", "all"], "S8 to S26")
    refused(scale.main, ["run", "--group", "S7", "--without", "rate"], "S8 to S26")


@pytest.mark.parametrize("name", ["S2", "S5", "A3", "A5", "Z7", "D6", "S3xZ4", "A4xD5"])
def test_the_generators_reach_every_element_of_their_group(name):
    group = Group(name)
    assert len(group.shortest_words(scale.generators(ReplTask(group)))) == group.order


def test_the_swaps_of_neighbours_generate_and_are_few_where_nothing_can_be_listed():
    generators = scale.generators(ReplTask(Group("S26")))
    moved = generators != np.arange(26)
    assert generators.shape == (25, 26) and (moved.sum(1) == 2).all()
    assert moved.any(0).all() and moved[:, :-1].sum() == moved[:, 1:].sum()


@pytest.mark.parametrize("name", ["S4", "S12"])
def test_the_head_built_by_hand_passes_with_every_generator(name):
    machine = SwapMachine(name)
    right, visited = scale.certify(machine, machine.task, 6, 3, generator(0, "test"))
    assert right.shape == (6, machine.n - 1) and right.all()
    assert visited <= 6 * machine.n and (name == "S4" or visited == 6 * machine.n)


def test_a_machine_that_misreads_some_commands_fails_with_those_generators_only():
    """It exchanges the last two names if the last is d: the generators that leave d there fail."""
    machine = SwapMachine("S4")
    execute = machine.execute
    machine.execute = lambda commands, S: execute(
        torch.where(commands[:, 3:] == 3, commands[:, [0, 1, 3, 2]], commands), S)
    # With no command ahead nothing but the generator can go wrong.
    right, visited = scale.certify(machine, machine.task, 5, 0, generator(0, "test"))
    stays = np.array([g[3] == 3 for g in scale.generators(machine.task)])
    assert stays.tolist() == [True, True, False] and (right == ~stays).all() and visited == 4


def test_states_and_depth_are_bounded_together_and_words_are_refused(small_run, refused):
    refused(scale.main, ["certify", small_run, "--states", "100000", "--depth", "100000"],
            "at most 1,048,576")
