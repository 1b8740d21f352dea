"""The diagonal mixer is its recurrence, and a study of an arm says what it measured."""

import json

import eval as evaluation
import pytest
import torch
from conftest import SMALL
from data import Group, ReplTask, generator
from experiments import arms
from models import LocalBlock, build


def few_traces(model, task, lengths, traces):
    return evaluation.evaluate_and_print(model, task, lengths, 2)


def test_a_cap_ends_a_run_and_a_higher_cap_goes_on_from_there(tmp_path):
    """The curve counts all tokens that were read; the run in two parts has the steps of one."""
    options = [word for word in SMALL if word not in ("--advance", "-1")]
    options += ["--advance", "1.1", "--max-steps", "1000"]
    steps = []
    for millions in (0.004, 0.008):
        run, curve = arms.learn(options, tmp_path / "parts", millions)
        steps.append(run.progress["step"])
        assert 1e6 * millions <= run.progress["tokens"] < 1e6 * millions + 200
        assert not run.progress["finished"]
    whole, _ = arms.learn(options, tmp_path / "whole", 0.008)
    assert 0 < curve[-1][0] <= run.progress["tokens"] and curve[-1][1] == 2
    assert steps[0] < steps[1] == whole.progress["step"]
    assert torch.equal(run.model.head.weight, whole.model.head.weight)


def test_each_arm_is_run_and_recorded_with_its_curve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arms, "LENGTHS", "2:1")
    monkeypatch.setattr(arms, "evaluate_and_print", few_traces)
    for arm in arms.ARMS:
        arms.main(["run", arm, "--group", "S3", "--millions", "0.01", "--record", "r.jsonl"])
    lines = [json.loads(line) for line in open("r.jsonl")]
    assert [line["arm"] for line in lines] == list(arms.ARMS)
    assert all(line["results"][0]["length"] == 2 and line["tokens"] >= 1e4 for line in lines)


def test_spacing_changes_the_reveals_only(tmp_path, monkeypatch):
    """The commands of step 0 are the same for all S; each cell is recorded with its spacing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arms, "evaluate_and_print", few_traces)
    arms.main(["spacing", "linrnn", "--group", "S3", "--millions", "0.003", "--record", "r.jsonl"])
    lines = [json.loads(line) for line in open("r.jsonl")]
    assert [(line["first"], line["spacing"]) for line in lines] == [
        (first, S) for first in ("", "2:1,") for S in (1, 2, 4, 8)]
    task, texts = ReplTask(Group("S3")), set()
    for S in (1, 2, 4, 8):
        tokens = task.training_batch(4, 8, S, generator(0, "train", 0)).inputs[2]
        texts.add("".join(line for line in task.decode(tokens).splitlines() if " = " in line))
    assert len(texts) == 1


def test_the_best_of_a_grid_passed_with_the_fewest_tokens():
    """Two that passed, by tokens; then those that did not, by what they know at the end."""
    rows = [{"finished": False, "tokens": 9, "last_accuracy": 0.6},
            {"finished": False, "tokens": 9, "last_accuracy": 0.7},
            {"finished": True, "tokens": 8, "last_accuracy": 0.9},
            {"finished": True, "tokens": 5, "last_accuracy": 0.8}]
    assert sorted(rows, key=arms.place) == rows[::-1]


@pytest.mark.parametrize("name", ["linrnn", "transformer", "lstm"])
def test_conv_width_1_takes_the_local_block_from_every_arm_and_nothing_else(name):
    """The ablation: without the block a logit depends on its own token and the mixer alone."""
    bare, whole = (build(name, 7, conv_width=width).blocks for width in (1, 4))
    assert not any(isinstance(block, LocalBlock) for block in bare)
    assert isinstance(whole[0], LocalBlock)
    assert [type(block) for block in bare] == [type(block) for block in whole[1:]]


def test_an_evaluation_draws_from_the_test_generator_alone(monkeypatch):
    """No test trace comes from the generators of training or of validation."""
    asked, real = [], evaluation.generator
    monkeypatch.setattr(evaluation, "generator", lambda *key: asked.append(key) or real(*key))
    task = ReplTask(Group("S3"))
    evaluation.evaluate(build("lstm", len(task.vocab), d_model=8), task, 4, 2, traces=2, seed=7)
    assert asked == [(7, "test", 4, 2)]
