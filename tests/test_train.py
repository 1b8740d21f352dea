"""A run is a folder that survives interruption, and a resumed run is the run, bit for bit."""

import itertools
import json
import math
import os
import signal
from unittest.mock import Mock

import data
import eval as evaluation
import models
import numpy as np
import pytest
import torch
import train
from conftest import SMALL

LONGER = [*SMALL, "--last-steps", "12", "--save-every", "4"]  # 15 steps
ANY_MODEL = " ".join(SMALL).replace("--heads 2", "").split()


def checkpoint_of(folder):
    return torch.load(folder / "model.pt", weights_only=True)


@pytest.fixture
def before_each_step(monkeypatch):
    """Sets what is called with (number of the step, model, inputs) ahead of it."""
    def watch(look):
        real_step, number = train.train_step, itertools.count(1)

        def step(model, optimizers, inputs, *rest):
            look(next(number), model, inputs)
            return real_step(model, optimizers, inputs, *rest)

        monkeypatch.setattr(train, "train_step", step)
    return watch


@pytest.mark.parametrize("options", [
    "--model transformer", "--model lstm", "--commands swap", "--householders 2", "--beta-max 1",
    "--format word --curriculum 2:1,4:1 --test-lengths 4:1"])
def test_one_loop_trains_every_model_and_format(options, tmp_path, capsys):
    run, record = tmp_path / "run", tmp_path / "results.jsonl"
    train.main([*ANY_MODEL, *options.split(), "--out", str(run), "--record", str(record)])
    line, shown = json.loads(record.read_text()), capsys.readouterr().out
    assert line["steps"] == 6 and line["seed"] == 0 and line["torch"] == torch.__version__
    assert line["results"][0]["length"] == 4 and "chance" in shown and "(4," in shown
    assert line["command"].startswith("python train.py --group S3") and options in line["command"]
    assert json.loads((run / "config.json").read_text()) == checkpoint_of(run)["config"]


@pytest.mark.parametrize("name", models.MODELS)
def test_each_parameter_is_in_one_optimizer_and_muon_has_matrices_only(name):
    model = models.build(name, 22)
    optimizers = train.make_optimizers(model, {"optimizer": "muon", "lr": 1e-3, "matrix_lr": 1e-2})
    given = [(type(optimizer), parameter) for optimizer in optimizers
             for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(id(parameter) for _, parameter in given) == sorted(map(id, model.parameters()))
    assert {parameter.ndim for kind, parameter in given if kind is torch.optim.Muon} == {2}


def test_a_step_follows_the_gradient_of_the_loss_and_the_weighted_loss_of_the_reveals():
    """A step of rate 1 along the gradient, which is clipped to the norm 1."""
    model, rng = models.build("linrnn", 22, d_model=8), np.random.default_rng(0)
    batch = data.ReplTask(data.Group("S5")).training_batch(2, 4, 2, rng)
    inputs, targets, reveals = (torch.from_numpy(x) for x in batch[:3])
    losses = -model(inputs).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    total, weights = losses.mean() + 9 * losses[reveals].mean(), [*model.parameters()]
    losses.mean().backward(retain_graph=True)  # what it leaves in .grad must not be added
    gradients = torch.autograd.grad(total, weights)
    norm = torch.nn.utils.get_total_norm(gradients)
    expected = [weight.detach() - gradient / norm for weight, gradient in zip(weights, gradients)]
    right = (model(inputs).argmax(-1) == targets)[reveals].float().mean().item()
    numbers = train.train_step(model, [torch.optim.SGD(weights, 1.0)], inputs, targets, reveals, 9)
    torch.testing.assert_close([weight.detach() for weight in weights], expected)
    assert abs(numbers["loss"] + 9 * numbers["reveal_loss"] - total.item()) < 1e-4
    assert abs(numbers["reveal_accuracy"] - right) < 1e-6


@pytest.mark.parametrize("curriculum, advance, first", [
    ("2:1,4:2", "-1", 3), ("4:2", "-1", 3), ("4:2", "2", -1)])
def test_each_step_draws_fresh_traces_and_a_run_is_the_mean_of_its_last_stage(
        curriculum, advance, first, tmp_path, before_each_step):
    """No batch is seen twice. The last stage's weights count equally, once a stage is learned."""
    weights, batches = [], set()

    def look(_, model, inputs):
        weights.append(model.head.weight.detach().clone())
        batches.add(inputs.numpy().tobytes())

    before_each_step(look)
    train.main([*LONGER, "--curriculum", curriculum, "--advance", advance, "--out", str(tmp_path)])
    checkpoint = checkpoint_of(tmp_path)
    after = [*weights[1:], checkpoint["resume"]["model"]["head.weight"]]
    assert len(after) == len(batches) == checkpoint["progress"]["step"]
    mean = torch.stack(after[first:]).mean(0)
    assert (checkpoint["model"]["head.weight"] - mean).abs().max() < 1e-6


@pytest.mark.parametrize("config, accuracies, stages", [
    ({}, (1, 1, 0.5, 1, 1, 1, 0, 0), [0] * 6 + [1] * 2),  # after three good batches; then by count
    ({"max_steps": 4}, (1, 1, 0, 1), [0] * 4),  # not passed
    ({"stage_steps": [4, 1], "max_steps": 2}, (1, 1, 1, 0, 1), [0] * 4 + [1])])
def test_a_stage_ends_as_the_options_say(config, accuracies, stages):
    config = {"curriculum": [[2, 1], [4, 1]], "advance": 0.9, "last_steps": 2, "max_steps": 100,
              "stage_steps": None, **config}
    progress = dict.fromkeys(["step", "stage", "stage_step", "streak", "learned", "finished"], 0)
    for accuracy, stage in zip(accuracies, stages, strict=True):
        assert not progress["finished"] and progress["stage"] == stage
        train.advance(config, progress, accuracy)
    assert progress["finished"]


@pytest.mark.parametrize("how, steps_made", [("SIGINT", 15), ("SIGTERM", 15), ("power cut", 19)])
def test_a_run_that_was_cut_and_resumed_is_bit_identical(
        how, steps_made, tmp_path, before_each_step, monkeypatch):
    """Cut in step 12, or while the checkpoint after it is written: the weights and the log of a run
    never cut. A signal loses no step, a power cut the four since the last whole checkpoint."""
    whole, resumed, made, fsync = tmp_path / "whole", tmp_path / "resumed", [], os.fsync
    train.main([*LONGER, "--out", str(whole)])

    def cut(number, *_):
        made.append(number)
        if number == 12 and how == "power cut":
            monkeypatch.setattr(os, "fsync", Mock(side_effect=RuntimeError(how)))
        elif number == 12:
            signal.raise_signal(getattr(signal, how))

    before_each_step(cut)
    with pytest.raises((SystemExit, RuntimeError), match="130|power cut"):
        train.main([*LONGER, "--out", str(resumed)])
    monkeypatch.setattr(os, "fsync", fsync)
    with open(resumed / "log.jsonl", "a") as log:
        log.write('{"step": 12, "los')
    train.main([*LONGER, "--out", str(resumed), "--resume"])
    assert len(made) == steps_made
    for folder in (whole, resumed):
        log = (folder / "log.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in log] == [10, 15]
    one, other = checkpoint_of(whole)["model"], checkpoint_of(resumed)["model"]
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(
        tmp_path, before_each_step, refused):
    """Weights ruined before step 7: its loss tells, and they are not saved."""
    before_each_step(lambda number, model, _: number != 7 or model.head.weight.data.fill_(math.nan))
    refused(train.main, [*LONGER, "--out", tmp_path],
            "the loss is nan", "step 6", "last good one", "--lr")
    checkpoint = checkpoint_of(tmp_path)
    assert checkpoint["progress"]["step"] == 4
    assert all(weight.isfinite().all() for weight in checkpoint["model"].values())


def test_bad_input_gets_one_line_and_exit_code_2(tmp_path, refused):
    for options, *words in [
            ("--group Q8", "unknown group 'Q8'"), ("--curriculum 10:4", "multiple"),
            ("--beta-max 2.5", "[0, 2]"), ("--heads 5", "heads must divide d_model"),
            ("--model lstm --beta-max 1", "no option beta_max"), ("--layers 0", "[1,"),
            ("--model transformer --d-model 12", "must be even"), ("--heads 0", "[1,"),
            ("--device tpu", "tpu is not there", "cpu"), ("--lr x", "--lr"), ("--lr nan", "--lr"),
            ("--batch 0", "must lie in [1,", "got 0"), ("--reveal-weight -1", "[0, 100]"),
            ("--stage-steps 5,5", "takes 5 positive", "got 5,5"),
            ("--group A5 --commands swap", "transpositions"),
            (f"--record {tmp_path}", str(tmp_path))]:
        refused(train.main, [*options.split(), "--out", tmp_path / "run"], *words)
        assert not (tmp_path / "run").exists()


def test_a_run_is_never_overwritten_or_mistaken_for_another(tmp_path, refused):
    """A folder in use, other options, a truncated file, no optimisers, an older version: each
    refused, nothing lost."""
    command, path = [*SMALL, "--out", tmp_path], tmp_path / "model.pt"
    train.main([str(word) for word in command])
    whole, checkpoint = path.read_bytes(), checkpoint_of(tmp_path)
    refused(train.main, command, "not empty", "--resume", "--out")
    refused(train.main, [*command, "--resume", "--seed", "1"], "other options", "seed 0 against 1")
    assert path.read_bytes() == whole
    for damage in (whole[:len(whole) // 2], b""):
        path.write_bytes(damage)
        refused(train.main, [*command, "--resume"], "model.pt", "truncated")
    del checkpoint["resume"]
    torch.save(checkpoint, path)
    evaluation.load_run(tmp_path)
    refused(train.main, [*command, "--resume"], "cannot be resumed", str(tmp_path))
    del checkpoint["config"]["commands"]
    torch.save(checkpoint, path)
    refused(evaluation.main, [tmp_path], "model.pt", "commands")
