"""A run is what its recipe says, and a resumed run is the run, bit for bit."""

import ast
import itertools
import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
import types
from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import data
import eval as evaluation
import numpy as np
import pytest
import torch
import train as trainer
from conftest import ROOT, SMALL
from data import Group, ReplTask, UserError, generator
from models import LinRNN
from torch import nn
from train import Progress, Recipe, main, next_token_loss, read_options, share_of_peak, train

S3 = ReplTask(Group("S3"))  # 16 symbols


def small_model():
    torch.manual_seed(0)
    return LinRNN(16, d_model=8, heads=2)


def train_small(changes={}, model=None, **more):
    """As SMALL, but for its 12 last steps: 15 steps in all. more: for train()."""
    recipe = Recipe(**{"curriculum": [(2, 1), (4, 2)], "batch": 2, "pass_share": -1.0,
                       "last_steps": 12} | changes)
    return train(model or small_model(), S3, recipe, quiet=True, **more)


def checkpoint_of(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def same(one, other):
    """Whether two checkpoints are equal bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# --- The recipe -----------------------------------------------------------------------------------

@pytest.mark.parametrize("changes, accuracies, stages, learned", [
    ({}, (1, 1, .9, 1, 1, 1, 0, 0), [0] * 6 + [1] * 2, 1),  # three above 0.9 in a row
    ({}, (1, None, 1, None, 1, 0, 0), [0] * 5 + [1] * 2, 1),  # None neither adds nor ends
    ({"last_steps": 4}, (1, 1, 1, 1, 1, 1, 0), [0] * 3 + [1] * 4, 2),  # the last one, too
    ({"last_steps": 4}, (1, 1, 1, 1, 1, 0, 1), [0] * 3 + [1] * 4, 1),  # a streak begins anew
    ({"max_steps": 4}, (1, 1, 0, 1), [0] * 4, 0),  # not passed
    ({"max_steps": 3}, (1, 1, 1, 0, 1), [0] * 3 + [1] * 2, 1),  # passed at the last moment
    ({"stage_steps": [5, 1], "max_steps": 2}, (1, 1, 1, 1, 0, 1), [0] * 5 + [1], 1),
    ({"curriculum": [(2, 1), (4, 1), (8, 1)], "stage_steps": [0, 2, 1]}, (1, 1, 1, 0, 0, 1),
     [0] * 3 + [1] * 2 + [2], 1),  # 0: until it is learned
    ({"stage_steps": [0, 2], "max_steps": 4}, (1, 1, 0, 1), [0] * 4, 0)])
def test_a_stage_ends_as_the_recipe_says(changes, accuracies, stages, learned):
    """learned is the number, from 1, of the last stage that has had its streak. The bar's total is
    never too small, and exact in the last stage."""
    recipe = Recipe(**{"curriculum": [(2, 1), (4, 1)], "pass_share": 0.9, "last_steps": 2,
                       "max_steps": 100} | changes)
    progress = Progress()
    for step, (accuracy, stage) in enumerate(zip(accuracies, stages, strict=True)):
        assert not progress.finished and (progress.step, progress.stage) == (step, stage)
        expected = trainer.total_steps(recipe, progress)
        assert expected == len(stages) if stage == recipe.last_stage else expected >= len(stages)
        progress.count_step(recipe, accuracy)
    assert progress.finished and progress.learned == learned


def test_the_rates_rise_once_in_a_run_and_stay():
    for step, share in ((0, 0.02), (24, 0.5), (49, 1), (400, 1)):
        assert share_of_peak(Recipe(), Progress(step=step, stage=1)) == share


@pytest.mark.parametrize("optimizer, kind", [("muon", torch.optim.Muon),
                                             ("adamw", torch.optim.AdamW)])
def test_each_parameter_is_in_one_optimizer_and_muon_has_inner_matrices_only(optimizer, kind):
    """Both shrink the weights, and AdamW forgets its squares after some twenty steps."""
    model = LinRNN(22)
    recipe = Recipe(optimizer=optimizer, lr=0.1, matrix_lr=0.2, weight_decay=0.3)
    matrices, others = trainer.make_optimizers(model, recipe)
    assert type(matrices) is kind and type(others) is torch.optim.AdamW

    (inner,), (outer,) = matrices.param_groups, others.param_groups
    tables = {model.embedding.weight, model.unembedding.weight}
    assert {*inner["params"]} == {x for x in model.parameters() if x.ndim == 2} - tables
    assert {*outer["params"]} == {*model.parameters()} - {*inner["params"]}

    assert (inner["lr"], outer["lr"]) == (0.2, 0.1)
    for group in (inner, outer):
        assert group["weight_decay"] == 0.3 and group.get("betas", (0.9, 0.95)) == (0.9, 0.95)


def test_what_the_user_types_wins_over_every_default():
    """On S6, whose rates and whose local block are not those of S5."""
    _, default = read_options(["--group", "S6"])
    assert default["options"]["conv_width"] == 9
    words = {"commands": "swap", "optimizer": "adamw", "curriculum": "6:3,12:4",
             "stage_steps": "0,7"}
    numbers = {"beta_max": 1.5, "pass_share": 0.5, "runs": 0.25}
    argv = ["--group", "S6"]
    expected = {}
    for number, name in enumerate(
            ["commands", "runs", *default["options"], *asdict(Recipe())], 21):
        option = f"--{name.replace('_', '-')}"
        argv += [option] if name == "compile" else [option, str(words.get(name, numbers.get(
            name, number)))]
        expected[name] = words.get(name, numbers.get(name, number))
    expected |= {"curriculum": [(6, 3), (12, 4)], "stage_steps": [0, 7], "compile": True}
    _, config = read_options(argv)
    assert {**config, **config["options"]}.items() >= expected.items()

    for name, fall in (("S3", 1), ("S5", 1), ("S7", 5 / 7)):
        _, config = read_options(["--group", name])
        rates = [config["lr"], config["matrix_lr"]]
        assert rates == pytest.approx([2e-3 * fall, 0.01 * fall**0.5])


@pytest.mark.parametrize("argv, runs", [([], 0.5), (["--curriculum", "8:1,16:2"], 0.0),
                                        (["--curriculum", "8:1", "--runs", "0.25"], 0.25)])
def test_the_default_curriculum_has_runs_and_another_one_what_was_typed(argv, runs):
    """A config of before there were runs, as that of an old folder, has none."""
    _, config = read_options(argv)
    task, _ = evaluation.make(config)
    assert config["runs"] == task.runs == runs
    del config["runs"]
    assert evaluation.make(config)[0].runs == 0


def test_the_default_is_the_model_of_readme_and_what_is_typed_reaches_model_and_task():
    """beta up to 2 is the thesis of the project. Swaps are seven tokens each."""
    task, model = evaluation.make(read_options([])[1])
    assert (model.blocks[1].beta_max, model.blocks[1].heads) == (2, 4)
    assert sum(weight.numel() for weight in model.parameters()) == 73_688
    assert (task.group.name, task.commands) == ("S5", "full")
    assert len(LinRNN(11, conv_width=1).blocks) == 2  # without a local block

    argv = "--group S4 --commands swap --beta-max 1 --layers 2 --householders 3 --conv-width 1"
    task, model = evaluation.make(read_options(argv.split())[1])
    assert task.test_batch(1, 8, 8, generator(0, "test")).inputs.shape == (1, 5 * 4 + 8 * 7 + 10)
    assert [block.beta_max for block in model.blocks[::2]] == [1, 1]
    assert model.blocks[0].householders == 3


@pytest.mark.parametrize("name, told", [("S7", 0), ("D8", 1), ("S12", 1)])
def test_above_seven_variables_the_defaults_are_said_to_be_a_guess(name, told, capsys):
    read_options(["--group", name])
    assert capsys.readouterr().out.count("up to seven variables") == told


def test_a_recipe_holds_plain_numbers_and_lists_of_its_own():
    """Whatever they were: numbers of numpy, lists from JSON."""
    numbers = asdict(Recipe(stage_steps=[5, 0, 0, 0, 7]))
    strange = {name: np.float32(value) if name == "weight_decay" else np.array(value)[()]
               for name, value in numbers.items() if name not in ("curriculum", "stage_steps")}
    strange |= {"weight_decay": np.float64(0.01), "curriculum": np.array(numbers["curriculum"]),
                "stage_steps": np.array(numbers["stage_steps"])}
    for again in (strange, json.loads(json.dumps(numbers))):
        recipe = Recipe(**again)
        assert asdict(recipe) == numbers
        assert [*map(type, asdict(recipe).values())] == [*map(type, numbers.values())]
        assert {type(part) for stage in recipe.curriculum for part in stage} == {int}
        assert {*map(type, recipe.stage_steps)} == {int}

    mine = [(2, 1)]
    recipe = Recipe(curriculum=mine)
    recipe.curriculum.append((4, 1))
    Recipe().curriculum.append((4, 1))
    assert mine == [(2, 1)] and len(Recipe().curriculum) == 5


@pytest.mark.parametrize("changes", [
    {"optimizer": "sgd"}, {"optimizer": None}, {"lr": math.nan}, {"lr": -1.0}, {"lr": "fast"},
    {"matrix_lr": math.inf}, {"seed": -1}, {"seed": 1.5}, {"batch": 0}, {"batch": None},
    {"last_steps": -3}, {"pass_batches": 0}, {"max_steps": 0}, {"pass_share": math.nan},
    {"compile": 2}, {"stage_steps": [-5] * 5}, {"stage_steps": [1]}, {"curriculum": []},
    {"curriculum": [(4, 0)]}, {"curriculum": [(2.5, 1)]}])
def test_a_recipe_that_cannot_be_trained_is_refused_by_name(changes):
    with pytest.raises(UserError, match=[*changes][0]):
        Recipe(**changes)


# --- A step ---------------------------------------------------------------------------------------

def test_a_step_is_made_in_training_mode_and_a_loss_of_ones_own_may_tell_little(capsys):
    """Without an accuracy no stage is passed; it ends where its steps do."""
    modes = []

    def loss_of(model, batch, recipe):
        modes.append(model.training)
        objective, _ = next_token_loss(model, batch, recipe)
        return objective, {}

    recipe = Recipe(curriculum=[(2, 1), (4, 2)], stage_steps=[2, 1], batch=2)
    _, log = train(small_model().eval(), S3, recipe, loss_of=loss_of)
    assert modes == [True] * 3 and log[-1]["reveal_accuracy"] is None
    assert (log[-1]["stage"], log[-1]["learned"]) == (1, 0)
    assert trainer.stages_learned(small_model(), S3, recipe, log[-1], loss_of) == 0


def test_a_line_says_where_a_stage_was_left_and_none_if_quiet(capsys):
    """Its (L,S), its last step, and the tokens so far: 54 in a trace of (2,1), 72 in one of (4,2).
    The last stage is the closing table's to tell of."""
    recipe = Recipe(curriculum=[(2, 1), (4, 2), (8, 4)], stage_steps=[2, 3, 1], batch=100)
    train(small_model(), S3, recipe, quiet=True)
    assert capsys.readouterr().out == ""
    train(small_model(), S3, recipe)
    assert capsys.readouterr().out.splitlines() == [
        f"(2,1) is left after step 2 and {2 * 100 * 54 / 1e6:.2f} million tokens",
        f"(4,2) is left after step 5 and {(2 * 54 + 3 * 72) * 100 / 1e6:.2f} million tokens"]


def test_a_batch_without_a_reveal_is_refused(monkeypatch):
    blind = Mock(wraps=S3, training_batch=lambda *_: S3.test_batch(*_)._replace(
        reveals=np.zeros((2, 54), bool)))
    with pytest.raises(UserError, match="without a reveal"):
        train(small_model(), blind, Recipe(curriculum=[(2, 1)], batch=2), quiet=True)


def test_steps_follow_the_clipped_gradient_of_the_loss_on_fresh_traces_of_the_seed(monkeypatch):
    """By hand. The loss is that of all tokens, and the weighted one of the reveals. Its gradient,
    clipped to the norm 1, is followed at half the peak rate of each optimiser."""
    def two(model, recipe):
        first, *others = model.parameters()
        return [torch.optim.SGD([first], lr=1.0), torch.optim.SGD(others, lr=0.4)]

    monkeypatch.setattr(trainer, "make_optimizers", two)
    result, log = train_small({"stage_steps": [1, 2], "seed": 7, "reveal_weight": 9.0},
                              rate_of=lambda *_: 0.5, averaged=lambda *_: False)

    model = small_model()
    weights = [*model.parameters()]
    rates = [0.5] + [0.2] * (len(weights) - 1)
    for step, stage in enumerate([(2, 1), (4, 2), (4, 2)]):
        batch = map(torch.from_numpy, S3.training_batch(2, *stage, generator(7, "train", step)))
        inputs, targets, reveals = batch
        log_p = model(inputs).log_softmax(-1)
        losses = -log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        reveal_loss = losses[reveals].mean()
        gradients = torch.autograd.grad(losses.mean() + 9 * reveal_loss, weights)
        norm = nn.utils.get_total_norm(gradients)
        assert norm > 1
        for weight, gradient, rate in zip(weights, gradients, rates):
            weight.data -= rate * gradient / norm

    torch.testing.assert_close([*result.parameters()], weights)
    right = (log_p.argmax(-1) == targets)[reveals].float().mean()
    for name, expected in [("loss", losses.mean()), ("reveal_loss", reveal_loss),
                           ("reveal_accuracy", right), ("gradient_norm", norm)]:
        assert log[-1][name] == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("changes, hooks, first", [
    ({"curriculum": [(4, 2)]}, {}, 3), ({"curriculum": [(2, 1), (2, 1), (4, 2)]}, {}, 6),
    ({"pass_share": 2.0, "curriculum": [(4, 2)]}, {}, -1),
    ({}, {"averaged": lambda recipe, progress: progress.step >= 9}, 9)])
def test_the_result_is_the_mean_of_the_last_stages_weights_once_a_stage_is_learned(
        changes, hooks, first):
    """Each step counts equally. The model itself holds the last weights. A hook says otherwise."""
    weights = []

    def loss_of(model, batch, recipe):
        weights.append(model.unembedding.weight.detach().clone())
        return next_token_loss(model, batch, recipe)

    model = small_model()
    result, log = train_small(changes, model, loss_of=loss_of, **hooks)
    after = [*weights[1:], model.unembedding.weight.detach()]
    assert len(after) == log[-1]["step"] and not result.training
    expected = torch.stack(after[first:]).mean(0)
    assert (result.unembedding.weight - expected).abs().max() < 1e-6


# --- The run folder -------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("owner, function", [(trainer, "to_tensors"), (os, "fsync")])
def test_a_run_that_was_cut_and_resumed_has_the_bits_of_the_run(owner, function, seed, tmp_path,
                                                                monkeypatch):
    """Cut at a random step, or while a checkpoint is written: in the end the weights, their mean,
    the optimisers and the log of a run never cut."""
    monkeypatch.setattr(trainer, "SAVE_EVERY", 4)
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: 0.0)  # the clock is not the run
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    command = [*SMALL, *f"--seed {seed} --last-steps 12 --out".split()]  # 15 steps
    main([*command, str(whole)])

    real, counter = getattr(owner, function), itertools.count(1)
    last_call = random.Random(seed).randint(2, 15 if owner is trainer else 5)

    def cut(*arguments):
        if next(counter) == last_call:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, function, cut)
        main([*command, str(resumed)])
    assert not checkpoint_of(resumed)["progress"]["finished"]

    main(["--resume", str(resumed)])
    assert same(checkpoint_of(whole), checkpoint_of(resumed))
    assert results_of(whole) == results_of(resumed)


def test_the_library_goes_on_with_what_is_there_and_overwrites_nothing(tmp_path, monkeypatch):
    """A run ends with the step that reaches the most tokens, or with a gradient that is not finite,
    which leaves a good checkpoint. It goes on with resume=True."""
    monkeypatch.setattr(trainer, "SAVE_EVERY", 4)
    tokens = 2 * (15 + 9 * 4 + 22 - 1)  # of a step
    resumed = partial(train_small, {"curriculum": [(4, 2)]}, folder=tmp_path, resume=True)
    resumed(max_tokens=3 * tokens)
    with pytest.raises(UserError, match="step 6: the gradient is not finite"):
        resumed(rate_of=lambda recipe, progress: math.nan if progress.step == 5 else 1.0)
    assert checkpoint_of(tmp_path)["progress"]["step"] == 4
    _, log = resumed()
    rows = [(row["step"], row["tokens"], row["finished"]) for row in log]
    assert rows == [(3, 3 * tokens, False), (10, 10 * tokens, False), (12, 12 * tokens, True)]

    whole = checkpoint_of(tmp_path)
    assert whole["log"] == log
    for changes, resume, words in (({}, False, "holds a run already"), ({"lr": 0.1}, True, "lr")):
        with pytest.raises(UserError, match=words):
            train_small({"curriculum": [(4, 2)], **changes}, folder=tmp_path, resume=resume)
    assert same(checkpoint_of(tmp_path), whole)


@pytest.mark.parametrize("config", [
    {"temperature": np.float64(1.0)}, {"where": Path("runs")}, {"task": {1, 2}, "call": print}])
def test_what_could_be_written_but_not_be_read_is_refused_before_the_first_step(config, tmp_path):
    """And nothing lies on the disk."""
    with pytest.raises(UserError, match="not be read"):
        train_small(folder=tmp_path / "run", config=config,
                    loss_of=lambda *_: pytest.fail("a step was made"))
    assert not [*tmp_path.iterdir()]


def test_a_recipe_from_numpy_or_json_goes_on_with_the_run(tmp_path):
    """Its run can be read, too."""
    recipe = {"curriculum": [[2, 1], [4, 2]], "batch": np.int64(2), "pass_share": np.float32(-1),
              "last_steps": 3, "seed": np.int64(1)}
    train_small(recipe, folder=tmp_path, max_tokens=100)
    assert not checkpoint_of(tmp_path)["progress"]["finished"]
    train_small(json.loads(json.dumps(asdict(Recipe(**recipe)))), folder=tmp_path, resume=True)
    assert checkpoint_of(tmp_path)["progress"]["step"] == 6


@pytest.mark.parametrize("accuracy, stage, streaks, expected", [
    (1.0, 1, 0, 2), (0.9, 1, 2, 1), (0.9, 1, 0, 0), (1.0, 0, 0, 0)])
def test_whether_the_last_stage_is_learned_is_asked_of_the_result(accuracy, stage, streaks,
                                                                  expected):
    """Of a run that came to it; of the stages before it their streaks tell."""
    recipe = Recipe(curriculum=[(2, 1), (4, 2)], pass_share=0.95)
    found = trainer.stages_learned(small_model(), S3, recipe, {"stage": stage, "learned": streaks},
                                   lambda *_: (None, {"reveal_accuracy": accuracy}))
    assert found == expected


@pytest.mark.parametrize("stage, reveals", [((64, 8), 256), ((4, 2), 256), ((9, 3), 258),
                                            ((6, 6), 256), ((512, 1), 1024)])
def test_it_is_asked_of_at_least_256_reveals(stage, reveals):
    """And of no fewer traces than a step has."""
    def count(model, batch, recipe):
        assert batch.reveals.sum() == reveals
        return None, {"reveal_accuracy": 1.0}

    recipe = Recipe(curriculum=[stage], batch=2)
    trainer.stages_learned(small_model(), S3, recipe, {"stage": 0, "learned": 0}, count)


def test_the_same_command_twice_makes_two_folders(tmp_path, monkeypatch, refused):
    """Nothing is lost, and nothing refused; a folder of one's own choice must be new."""
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/linrnn-S3-seed0", "runs/linrnn-S3-seed0-2"):
        before = {*tmp_path.glob("runs/*")}
        main(SMALL)
        assert {*tmp_path.glob("runs/*")} - before == {tmp_path / folder}
    refused(main, [*SMALL, "--out", tmp_path], str(tmp_path), "--resume")


def test_resume_takes_no_option_of_a_run_and_each_of_its_table(small_run, refused, capsys):
    """An option that the run has is refused by name, even where it is equal."""
    config = checkpoint_of(small_run)["config"]
    typed = {"model": "linrnn", "group": "S3", "commands": "full", "optimizer": "muon",
             "curriculum": "2:1,4:2", "stage_steps": "3,4"}
    for name in ["model", "group", "commands", "out", *config["options"], *asdict(Recipe())]:
        words = [f"--{name.replace('_', '-')}", typed.get(name, "1")]
        refused(main, ["--resume", small_run, *words[:1 if name == "compile" else 2]], name)

    main(["--resume", str(small_run), *"--lengths 6:3 --traces 3 --device cpu".split()])
    assert "(6,3)" in capsys.readouterr().out


@pytest.mark.parametrize("options, steps, missed", [
    ("--model transformer", 6, ""), ("--model lstm --commands swap", 6, ""),
    ("--optimizer adamw --beta-max 1", 6, ""), ("--householders 2 --stage-steps 4,5", 9, ""),
    ("--pass-share 2 --max-steps 3", 3, "1 of 2"),
    ("--pass-share 2 --stage-steps 3,2", 5, "1 of 2")])
def test_one_loop_trains_every_model_and_its_folder_tells_what_came_out(options, steps, missed,
                                                                        tmp_path, capsys):
    """The first stage that is not learned is named. A finished run that is resumed prints its table
    again, and changes nothing."""
    folder = tmp_path / "run"
    small = " ".join(SMALL).replace("--heads 2", "").split()  # an LSTM has none
    main([*small, *options.split(), "--out", str(folder)])
    first, whole, result = capsys.readouterr().out, checkpoint_of(folder), results_of(folder)
    assert "(4,2)" in first and f"run folder {folder}" in first
    assert first.partition("NOT LEARNED: stage ")[2].strip() == missed

    task, model = evaluation.load(folder)
    assert result["config"] == json.loads(json.dumps(whole["config"]))
    assert result["results"] == [evaluation.evaluate(model, task, 4, 2, 4)]
    assert result["steps"] == whole["progress"]["step"] == steps

    main(["--resume", str(folder)])
    assert capsys.readouterr().out == re.sub(r".* is left after .*\n", "", first)
    assert same(checkpoint_of(folder), whole) and results_of(folder) == result


def test_a_full_disk_leaves_the_checkpoint_that_was_there(tmp_path, small_run, refused):
    whole = (small_run / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(whole)
    (tmp_path / "model.pt.partial").symlink_to("/dev/full")
    refused(main, ["--resume", tmp_path])
    assert (tmp_path / "model.pt").read_bytes() == whole


# --- Refusals, a closed pipe ----------------------------------------------------------------------

@pytest.mark.parametrize("command", [
    "train.py --gruop S5", "train.py --group ''", "train.py --group A2",
    "train.py --group A5 --commands swap", "train.py --heads 5",
    "train.py --model transformer --d-model 12", "train.py --beta-max 3",
    "train.py --model lstm --beta-max 1", "train.py --curriculum 10:4", "train.py --curriculum x",
    "train.py --stage-steps 5,5", "train.py --lengths 4:0", "train.py --device cuda",
    "train.py --device sofa", "train.py --traces 0", "train.py --last-steps -3",
    "train.py --batch 0", "train.py --seed -1", "train.py --lr nan", "train.py --heads 0",
    "train.py --d-model 0", "train.py --stage-steps=-5", "train.py --matrix-lr inf",
    "train.py --layers 0", "train.py --householders 0", "train.py --conv-width 0",
    "train.py --beta-max nan", "train.py --pass-batches 0", "train.py --reveal-weight -1",
    "train.py --max-steps 0.5", "train.py --weight-decay x", "train.py --resume RUN --seed 0",
    "eval.py RUN --lengths 10:4", "eval.py RUN --plot x.txt", "eval.py RUN --traces 0",
    "eval.py RUN --seed -1", "eval.py RUN --lengths 0:1", "eval.py RUN --plot no/where.png",
    "data.py --length 5"])
def test_what_a_user_can_get_wrong_is_refused_in_one_line(command, small_run, refused, tmp_path,
                                                          monkeypatch):
    """By exit code 2, before any work, and without a trace on the disk."""
    monkeypatch.chdir(tmp_path)
    script, *words = shlex.split(command.replace("RUN", str(small_run)))
    refused({"train.py": main, "eval.py": evaluation.main, "data.py": data.main}[script], words)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("file", sorted(path.name for path in ROOT.glob("*.py")))
def test_no_check_hangs_on_an_assert_or_on_a_docstring(file, capsys):
    """`python -O` leaves the first out, and -OO both: the help is the same without them."""
    source = (ROOT / file).read_text(encoding="utf-8")
    assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    if file in ("train.py", "eval.py"):
        names = {"__name__": f"without_{file}"}
        module = types.ModuleType(names["__name__"])
        with patch.dict(sys.modules, {module.__name__: module}), pytest.raises(SystemExit) as stop:
            exec(compile(source, file, "exec", optimize=2), vars(module))
            module.main(["--help"])
        assert stop.value.code == 0 and "--traces" in capsys.readouterr().out


def test_a_checkpoint_that_is_cut_or_foreign_is_refused_in_one_line(small_run, tmp_path, refused):
    """Both by eval.py and by --resume."""
    path = tmp_path / "model.pt"
    refused(main, ["--resume", tmp_path])
    contents = [b"", b"thesis", (small_run / "model.pt").read_bytes()[:-1000]]
    for config in ({}, {"task": "words"}, checkpoint_of(small_run)["config"]):
        torch.save({"config": config, "model": {}}, path)
        contents.append(path.read_bytes())
    for content in contents:
        path.write_bytes(content)
        refused(main, ["--resume", tmp_path])
        refused(evaluation.main, [tmp_path])
        assert path.read_bytes() == content


def test_a_closed_pipe_ends_a_program_in_silence_and_loses_no_results(tmp_path):
    training = f"train.py {' '.join(SMALL)} --out {tmp_path / 'run'} | head -1"
    running = [subprocess.Popen(f"'{sys.executable}' {command}", shell=True, cwd=ROOT, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
               for command in ("data.py | true", "scan.py | true", training)]
    for process in running:
        told = process.communicate()[1]
        assert "Traceback" not in told and "Broken" not in told, told
    assert results_of(tmp_path / "run")["steps"] == 6


# --- Whole runs, and other ways to run ------------------------------------------------------------

@pytest.mark.parametrize("beta_max, least, most", [("2", 0.95, 1), ("1", 0, 0.65)])
def test_three_variables_are_learned_with_beta_up_to_two_only(beta_max, least, most, tmp_path):
    """All reveals are right with eigenvalues down to -1; with eigenvalues from 0 they are near
    chance, 33%."""
    main(["--beta-max", beta_max, "--out", str(tmp_path / "run"), *(
        "--group S3 --d-model 32 --heads 2 --curriculum 2:1,8:2 --stage-steps 120,40 "
        "--lengths 16:4 --traces 64 --device cpu").split()])
    row, = results_of(tmp_path / "run")["results"]
    assert least <= row["all"] <= most


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # inside torch
def test_compiled_training_is_the_same(monkeypatch):
    """The graphs are run as they are, bit for bit: to compile them takes half a minute."""
    compiler = Mock(side_effect=partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch, "compile", compiler)
    plain, _ = train_small({"last_steps": 1})
    compiled, _ = train_small({"last_steps": 1, "compile": True})
    assert compiler.call_count == 1 and same(dict(plain.state_dict()), dict(compiled.state_dict()))
