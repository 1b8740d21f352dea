"""A run is what its recipe says, it survives interruption, and a resumed run is the run, bit for
bit."""

import itertools
import json
import math
import os
import subprocess
import sys
from functools import partial
from unittest.mock import Mock

import eval as evaluation
import models
import pytest
import torch
import train as trainer
from conftest import ROOT, SMALL
from data import Group, ReplTask, UserError, generator
from filelock import FileLock
from models import LinRNN
from torch import nn
from train import Progress, Recipe, main, next_token_loss, share_of_peak, train, traces_per_step

S3 = ReplTask(Group("S3"))  # 16 symbols


def small_recipe(**changes):
    """That of SMALL, but for its 12 last steps: 15 steps in all."""
    return Recipe(**{"curriculum": [(2, 1), (4, 2)], "batch": 2, "advance": -1.0, "last_steps": 12}
                  | changes)


def small_model():
    torch.manual_seed(0)
    return LinRNN(16, d_model=8, heads=2)


def checkpoint_of(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


# --- The recipe -----------------------------------------------------------------------------------

@pytest.mark.parametrize("changes, accuracies, stages", [
    ({}, (1, 1, 0.5, 1, 1, 1, 0, 0), [0] * 6 + [1] * 2),  # after three good batches; then by count
    ({}, (1, 1, 0.9, 1, 1, 1, 0, 0), [0] * 6 + [1] * 2),  # 0.9 is not above 0.9
    ({"max_steps": 4}, (1, 1, 0, 1), [0] * 4),  # not passed
    ({"max_steps": 3}, (1, 1, 1, 0, 1), [0] * 3 + [1] * 2),  # passed at the last moment
    ({"stage_steps": [4, 1], "max_steps": 2}, (1, 1, 1, 0, 1), [0] * 4 + [1])])
def test_a_stage_ends_as_the_recipe_says(changes, accuracies, stages):
    recipe = Recipe(**{"curriculum": [(2, 1), (4, 1)], "advance": 0.9, "last_steps": 2,
                       "max_steps": 100} | changes)
    progress = Progress()
    for step, (accuracy, stage) in enumerate(zip(accuracies, stages, strict=True)):
        assert not progress.finished and (progress.step, progress.stage) == (step, stage)
        progress.advance(recipe, accuracy)
    assert progress.finished


@pytest.mark.parametrize("changes", [{"last_steps": 10}, {"stage_steps": [7, 10]}])
def test_the_rates_rise_once_in_a_run_and_fall_in_its_last_stage_without_a_mean(changes):
    """In step i of the first 50 the rate is i / 50 of its peak, whatever the stage; then it stays,
    or falls from all to nothing over the steps of the last stage."""
    for step, stage_step, stage in itertools.product((0, 49, 400), (0, 5, 9), (0, 1)):
        progress = Progress(step=step, stage_step=stage_step, stage=stage)
        rise = min(1, (step + 1) / 50)
        left = 1 - stage_step / 10 if stage else 1
        for average, expected in ((True, rise), (False, rise * left)):
            recipe = Recipe(curriculum=[(2, 1), (4, 1)], average=average, **changes)
            assert abs(share_of_peak(recipe, progress) - expected) < 1e-12


def test_a_level_recipe_reads_as_many_commands_in_each_step_by_whole_batches():
    recipe = Recipe(curriculum=[(3, 1), (8, 1), (16, 2)], batch=3, level=True)
    assert [traces_per_step(recipe, length) for length in (3, 8, 16)] == [15, 6, 3]
    recipe.level = False
    assert traces_per_step(recipe, 3) == 3


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("optimizer, kind", [("muon", torch.optim.Muon),
                                             ("adamw", torch.optim.AdamW)])
def test_each_parameter_is_in_one_optimizer_and_muon_has_inner_matrices_only(name, optimizer, kind):
    """Embedding and unembedding are tables of vectors, not inner matrices."""
    model = models.build(name, 22)
    tables = {model.embedding.weight, model.unembedding.weight}
    recipe = Recipe(optimizer=optimizer, lr=0.1, matrix_lr=0.2)
    matrices, others = trainer.make_optimizers(model, recipe)
    assert type(matrices) is kind and type(others) is torch.optim.AdamW

    (inner,), (outer,) = matrices.param_groups, others.param_groups
    assert inner["lr"] == 0.2 and outer["lr"] == 0.1
    assert {*inner["params"]} == {x for x in model.parameters() if x.ndim == 2} - tables
    assert {*outer["params"]} == {*model.parameters()} - {*inner["params"]}


# --- A step ---------------------------------------------------------------------------------------

def test_steps_follow_the_clipped_gradient_of_the_loss_on_fresh_traces_of_the_seed(monkeypatch):
    """By hand. The loss is that of all tokens, and the weighted one of the reveals. A step goes
    along its gradient alone, clipped to the norm 1, at half the peak rate of each optimiser, with
    nothing left over from the step before. The traces of step i are those of
    generator(seed, "train", i)."""
    def two(model, recipe):
        first, *others = model.parameters()
        return [torch.optim.SGD([first], lr=1.0), torch.optim.SGD(others, lr=0.4)]

    monkeypatch.setattr(trainer, "make_optimizers", two)
    recipe = small_recipe(curriculum=[(4, 2)], last_steps=3, average=False, seed=7,
                          reveal_weight=9.0)
    result, log = train(small_model(), S3, recipe, rate_of=lambda *_: 0.5, quiet=True)

    model = small_model()
    weights = [*model.parameters()]
    rates = [0.5] + [0.2] * (len(weights) - 1)
    for step in range(3):
        batch = S3.training_batch(2, 4, 2, generator(7, "train", step))
        batch = trainer.to_tensors(batch, "cpu")
        log_p = model(batch.inputs).log_softmax(-1)
        losses = -log_p.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
        reveal_loss = losses[batch.reveals].mean()
        gradients = torch.autograd.grad(losses.mean() + 9 * reveal_loss, weights)
        norm = nn.utils.get_total_norm(gradients)
        assert norm > 1
        with torch.no_grad():
            for weight, gradient, rate in zip(weights, gradients, rates):
                weight -= rate * gradient / norm

    torch.testing.assert_close([*result.parameters()], weights)
    right = (log_p.argmax(-1) == batch.targets)[batch.reveals].float().mean()
    for name, expected in [("loss", losses.mean()), ("reveal_loss", reveal_loss),
                           ("reveal_accuracy", right), ("gradient_norm", norm)]:
        assert log[-1][name] == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("changes, first", [
    ({}, 3), ({"curriculum": [(4, 2)]}, 3), ({"curriculum": [(2, 1), (2, 1), (4, 2)]}, 6),
    ({"advance": 2.0, "curriculum": [(4, 2)]}, -1), ({"average": False}, -1)])
def test_the_result_is_the_mean_of_the_last_stages_weights_once_a_stage_is_learned(changes, first):
    """Each step of the last stage counts equally. The model itself holds the last weights."""
    weights = []

    def loss_of(model, batch, recipe):
        weights.append(model.unembedding.weight.detach().clone())
        return next_token_loss(model, batch, recipe)

    model = small_model()
    result, log = train(model, S3, small_recipe(**changes), loss_of=loss_of, quiet=True)
    after = [*weights[1:], model.unembedding.weight.detach()]
    assert len(after) == log[-1]["step"] and not result.training
    expected = torch.stack(after[first:]).mean(0)
    assert (result.unembedding.weight - expected).abs().max() < 1e-6


# --- What a chapter or a fork changes -------------------------------------------------------------

def test_where_a_loss_knows_the_best_accuracy_advance_is_a_share_of_it():
    def loss_of(model, batch, recipe):
        metrics = {"loss": 1.0, "reveal_accuracy": 0.6, "bayes_accuracy": 0.6}
        return model(batch.inputs).square().mean(), metrics

    recipe = small_recipe(advance=0.97, last_steps=2)
    _, log = train(small_model(), S3, recipe, loss_of=loss_of, quiet=True)
    assert log[-1]["step"] == 5 and log[-1]["finished"]


def test_a_run_ends_with_the_step_that_reaches_the_most_tokens_and_logs_each_tenth(
        tmp_path, monkeypatch):
    """On a clock by which each step takes a minute; all of them count. What was learned till then
    is saved. The model has no name, so load_run cannot make it."""
    ticks = itertools.count()
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: 60.0 * next(ticks))
    tokens = 2 * (15 + 9 * 4 + 22 - 1)  # of a step
    recipe = small_recipe(curriculum=[(4, 2)], last_steps=99)
    _, log = train(small_model(), S3, recipe, tmp_path, max_tokens=23 * tokens, quiet=True)
    rows = [(row["step"], row["seconds"], row["tokens"], row["finished"]) for row in log]
    assert rows == [(step, 60 * step, step * tokens, False) for step in (10, 20, 23)]
    assert log_of(tmp_path) == log and checkpoint_of(tmp_path)["progress"]["step"] == 23
    with pytest.raises(UserError, match="load_weights"):
        evaluation.load_run(tmp_path)


# --- Interruption ---------------------------------------------------------------------------------

@pytest.mark.parametrize("owner, function, calls", [
    pytest.param(trainer, "to_tensors", 12, id="Ctrl-C"),
    pytest.param(os, "fsync", 6, id="power cut")])
def test_a_run_that_was_cut_and_resumed_is_that_of_the_library_bit_for_bit(
        owner, function, calls, tmp_path, monkeypatch):
    """Cut by Ctrl-C in step 12, or by a power cut while the checkpoint after it is written: in the
    end the weights, the optimisers and the log of a run never cut. To resume it once more changes
    nothing. And train() alone has these weights and this log, in memory."""
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: 0.0)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    command = [*SMALL, *"--seed 3 --last-steps 12 --save-every 4 --out".split()]  # 15 steps
    main([*command, str(whole)])

    real, counter = getattr(owner, function), itertools.count(1)

    def cut(*arguments):
        if next(counter) == calls:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, function, cut)
        main([*command, str(resumed)])
    assert checkpoint_of(resumed)["progress"]["step"] == 8
    with open(resumed / "log.jsonl", "a") as log:
        log.write('{"step": 12, "los')

    for _ in range(2):
        main([*command, str(resumed), "--resume"])
        one, other = checkpoint_of(whole), checkpoint_of(resumed)
        assert one["config"] == other["config"] and one["progress"] == other["progress"]
        for part in ("model", "resume"):
            torch.testing.assert_close(one[part], other[part], rtol=0, atol=0)
        assert log_of(whole) == log_of(resumed)

    torch.manual_seed(3)
    model = LinRNN(len(S3.vocab), d_model=8, heads=2, **S3.model_options)
    model, log = train(model, S3, small_recipe(seed=3, **S3.recipe_options), quiet=True)
    torch.testing.assert_close(model.state_dict(), one["model"], rtol=0, atol=0)
    assert log == log_of(whole)


@pytest.mark.parametrize("ruined, told, kept", [
    (5, "step 6: the loss is nan", 4), (14, "the weights are not all finite", 12)])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(
        ruined, told, kept, tmp_path, refused, monkeypatch):
    """Weights ruined in a step tell by the loss of the next one; those that only the last step has
    ruined are not saved."""
    def rate_of(recipe, progress):
        return math.nan if progress.step == ruined else 1.0

    with pytest.raises(FloatingPointError, match=told):
        train(small_model(), S3, small_recipe(), tmp_path, rate_of=rate_of, save_every=4,
              quiet=True)
    checkpoint = checkpoint_of(tmp_path)
    assert checkpoint["progress"]["step"] == kept
    assert all(weight.isfinite().all() for weight in checkpoint["model"].values())
    monkeypatch.setattr(trainer, "train", Mock(side_effect=FloatingPointError(told)))
    refused(main, SMALL, told, "last good one", "--lr")


# --- The command line -----------------------------------------------------------------------------

@pytest.mark.parametrize("options", [
    "--model transformer", "--model lstm --commands swap", "--optimizer adamw --beta-max 1",
    "--format word --householders 2 --curriculum 2:1,4:1 --streak 3"])
def test_one_loop_trains_every_model_and_format(options, tmp_path):
    """The folder tells what was run, and what came out."""
    small = " ".join(SMALL).replace("--heads 2", "").split()
    main([*small, *options.split(), "--out", str(tmp_path)])
    checkpoint, task, model = evaluation.load_run(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == checkpoint["config"]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["results"] == [evaluation.evaluate(model, task, 4, 2, 4)]
    assert result["steps"] == 6 and result["stage_reached"] == result["stages"] == 2
    assert result["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert result["command"].startswith("python train.py --group S3")
    assert options in result["command"]


def test_a_run_is_never_overwritten_or_mistaken_for_another(small_run, tmp_path, refused):
    """Other options, a result that training cannot go on from, a folder of something else: each
    refused, nothing lost."""
    command = [*SMALL, "--out", small_run]
    whole = (small_run / "model.pt").read_bytes()
    refused(main, command, "not empty", "--resume", "--out")
    refused(main, [*command, "--resume", "--seed", "1"], "other options", "seed 0 against 1")
    assert (small_run / "model.pt").read_bytes() == whole

    checkpoint = checkpoint_of(small_run)
    del checkpoint["resume"]
    torch.save(checkpoint, tmp_path / "model.pt")
    refused(main, [*SMALL, "--out", tmp_path, "--resume"], "cannot be resumed")

    (tmp_path / "model.pt").rename(tmp_path / "thesis.tex")
    for more in ([], ["--resume"]):
        refused(main, [*SMALL, "--out", tmp_path, *more], "not empty")


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path, refused):
    """As long as it does: its lock goes with it. A run stopped in its first seconds starts over."""
    with FileLock(tmp_path / "lock"):
        refused(main, [*SMALL, "--out", tmp_path], "another process trains in", "--out")
        assert {path.name for path in tmp_path.iterdir()} <= {"lock"}
    (tmp_path / "log.jsonl").write_text('{"step": 1')
    (tmp_path / "model.pt.partial").write_text("cut")
    main([*SMALL, "--out", str(tmp_path)])
    assert checkpoint_of(tmp_path)["progress"]["finished"]


# --- Whole runs, and other ways to run ------------------------------------------------------------

@pytest.mark.parametrize("beta_max, least, most", [("2", 0.95, 1), ("1", 0, 0.65)])
def test_three_variables_are_learned_with_beta_up_to_two_only(beta_max, least, most, tmp_path):
    """README's ten seconds. All reveals are right with eigenvalues down to -1; with eigenvalues
    from 0 they are near chance, 33%."""
    main(["--beta-max", beta_max, "--out", str(tmp_path), *(
        "--group S3 --d-model 32 --heads 2 --curriculum 2:1,8:2,16:4 --stage-steps 150,50,50 "
        "--test-lengths 32:8 --traces 64 --device cpu").split()])
    row, = json.loads((tmp_path / "result.json").read_text())["results"]
    assert least <= row["all"] <= most


def test_two_processes_train_as_one(tmp_path):
    """Each takes its rows of the same batches: ten steps have the same losses and weights. In
    float64, since an optimiser may turn a difference in rounding into another step. One of the two
    writes and prints."""
    double = tmp_path / "double.py"
    double.write_text("import torch\ntorch.set_default_dtype(torch.float64)\n")
    processes = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    logs, weights = [], []
    for launcher in ([], processes):
        out = tmp_path / f"run{len(logs)}"
        shown = subprocess.run(
            [sys.executable, *launcher, "train.py", *SMALL, "--batch", "4", "--last-steps", "7",
             "--plugin", str(double), "--out", str(out)], cwd=ROOT,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"}, capture_output=True, text=True,
            check=True).stdout
        assert shown.count("trained 10 steps") == 1 and shown.count("(4,2)") == 1
        logs.append(log_of(out)[-1])
        weights.append(checkpoint_of(out)["model"])

    for name in ("loss", "reveal_loss", "reveal_accuracy", "tokens", "gradient_norm"):
        assert abs(logs[0][name] - logs[1][name]) < 1e-10, name
    torch.testing.assert_close(*weights, rtol=0, atol=1e-10)


def test_compiled_training_is_the_same(monkeypatch):
    """The graphs are run as they are, bit for bit: to compile them takes half a minute."""
    compiler = Mock(side_effect=partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch, "compile", compiler)
    plain, _ = train(small_model(), S3, small_recipe(last_steps=1), quiet=True)
    assert not compiler.called
    compiled, _ = train(small_model(), S3, small_recipe(last_steps=1, compile=True), quiet=True)
    assert compiler.called
    torch.testing.assert_close(plain.state_dict(), compiled.state_dict(), rtol=0, atol=0)


def test_a_batch_that_the_processes_cannot_share_is_refused(monkeypatch):
    """Unequal shares would make another mean."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    with pytest.raises(UserError, match="batch of 16 traces cannot be shared by 3 processes"):
        train(small_model(), S3, small_recipe(batch=16), quiet=True)
