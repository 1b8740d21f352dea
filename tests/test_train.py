"""A run is what its config says, and a resumed run is the run, bit for bit."""

import itertools
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
import train as trainer
from conftest import SMALL
from data import Group, ReplTask, UserError, generator
from eval import evaluate, load, make, read_run
from models import LinRNN
from torch import nn
from train import Config, Progress, main, train

S3 = ReplTask(Group("S3"))  # 16 tokens


def small_model():
    torch.manual_seed(0)
    return LinRNN(16, d_model=8, heads=2)


def small_config(**changes):
    return Config(**{"curriculum": [(2, 1), (4, 2)], "batch": 2, "pass_accuracy": 0.0,
                     "final_steps": 12} | changes)


def train_small(changes={}, model=None, **more):
    return train(model or small_model(), S3, small_config(**changes), **more)


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# --- 1. The config --------------------------------------------------------------------------------

def test_every_field_is_an_option_and_what_is_typed_is_stored(monkeypatch, tmp_path, capsys):
    """The model and the task get it, and --help shows it."""
    typed = {"group": "S4", "commands": "swap", "repeat_fraction": 0.25, "d_model": 16, "layers": 2,
             "heads": 2, "beta_max": 1.5, "householders": 3, "conv_width": 1, "model": "linrnn",
             "curriculum": ((6, 3), (12, 4)), "batch": 2, "dense_fraction": 0.75,
             "literal_fraction": 0.125, "pass_accuracy": 0.5, "pass_patience": 2,
             "max_curriculum_steps": 1, "final_steps": 1, "average": False, "optimizer": "adamw",
             "matrix_lr": 0.02, "lr": 0.01, "warmup": 3, "weight_decay": 0.0, "reveal_weight": 2.0,
             "seed": 9, "compile": True}
    assert typed.keys() == asdict(Config()).keys()
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"    {name}: " in shown for name in typed)

    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: compiled.append(model) or model)
    argv = ["--curriculum", "6:3,12:4", "--no-average", "--compile"]
    for name, value in typed.items():
        if not isinstance(value, (tuple, bool)):
            argv += [f"--{name.replace('_', '-')}", str(value)]
    main([*argv, *"--lengths 4:2 --traces 3 --out".split(), str(tmp_path)])
    assert read_run(tmp_path)["config"] == typed and len(compiled) == 1

    task, model = load(tmp_path)
    assert (task.repeat_fraction, task.literal_fraction, task.commands) == (0.25, 0.125, "swap")
    assert [block.beta_max for block in model.blocks[::2]] == [1.5, 1.5]
    assert (model.blocks[0].householders, model.blocks[0].heads) == (3, 2)


def test_sizes_that_are_not_given_are_those_of_the_model_and_the_group():
    _, model = make(asdict(Config()))
    assert (model.blocks[1].beta_max, model.blocks[1].heads) == (2, 4)
    assert sum(parameter.numel() for parameter in model.parameters()) == 73_688
    assert make(asdict(Config(group="S7")))[1].blocks[0].conv.kernel_size == (10,)
    assert make(asdict(Config(model="lstm")))[1].embedding.embedding_dim == 60


def test_a_config_holds_the_learning_rates_of_its_model_or_those_that_are_typed():
    """A model that the table does not list gets linrnn's. Those of Muon do not suit AdamW."""
    def rates(**typed):
        config = Config(**typed)
        return config.optimizer, config.matrix_lr, config.lr

    assert rates() == rates(model="transformer") == rates(model="mine") == ("muon", 0.01, 2e-3)
    assert rates(model="lstm", lr=0.5) == ("adamw", 4e-3, 0.5)
    assert rates(optimizer="adamw", matrix_lr=0.1) == ("adamw", 0.1, 2e-3)
    for typed in ({"optimizer": "adamw"}, {"optimizer": "sgd"}):
        with pytest.raises(UserError):
            Config(**typed)


# --- 2. What train() asks at every step -----------------------------------------------------------

def test_a_fraction_of_the_batches_is_dense_and_does_not_count():
    """A dense batch has as many traces and commands, more reveals, and random first values. Half of
    them have a reveal after every command. (2,1) cannot be denser."""
    config = Config(curriculum=[(2, 1), (12, 6)], batch=3, dense_fraction=0.75)
    reveals = {True: [], False: []}
    for step in range(500):
        batch, counts = trainer.draw(S3, config, Progress(stage=1), generator(1, "train", step))
        literals = (batch.inputs == S3.ids[" = "]).sum() - 3 * (12 + 3)
        assert literals in ([0] if counts else [0, batch.reveals.sum()])
        assert all(S3.decode(row).startswith(S3.start_lines()) for row in batch.inputs) == counts
        reveals[counts] += batch.reveals.sum(1).tolist()
        assert trainer.draw(S3, config, Progress(stage=0), generator(1, "train", step))[1]
    assert {*reveals[True]} == {2} and {*reveals[False]} == {3, 6, 12}
    assert abs(len(reveals[False]) / 1500 - 0.75) < 0.12  # six deviations of 500 coins
    assert abs(np.mean(np.array(reveals[False]) == 12) - 0.5) < 0.16


def test_the_learning_rates_warm_up_once_in_a_run_and_stay():
    scales = [trainer.lr_scale(Config(), Progress(step=step, stage=1)) for step in (0, 24, 49, 400)]
    assert scales == [0.02, 0.5, 1, 1]


# --- 3. The training loop -------------------------------------------------------------------------

DENSE = 10  # added to the accuracy of a batch that does not count


@pytest.mark.parametrize("changes, accuracies, stages", [
    ({}, (1, 1, .9, 1, 1, 1, 0, 0), [0] * 6 + [1] * 2),
    ({}, (1, 1, .95, 0, 0), [0] * 3 + [1] * 2),
    ({}, (1, 1, DENSE, DENSE + 1, 1, 0, 0), [0] * 5 + [1] * 2),
    ({"max_curriculum_steps": 4}, (DENSE + 1,) * 4, [0] * 4),
    ({"max_curriculum_steps": 4}, (1, 1, 0, 1), [0] * 4),
    ({"max_curriculum_steps": 3}, (1, 1, 1, 0, 1), [0] * 3 + [1] * 2),
    ({"curriculum": [(2, 1, 4), (4, 2)], "max_curriculum_steps": 2}, (1, 1, 1, 1, 0, 0),
     [0] * 4 + [1] * 2)])
def test_a_stage_ends_as_the_config_says(changes, accuracies, stages, monkeypatch):
    """The accuracies come from a hand-made loss. A batch that does not count neither passes a stage
    nor breaks a series of good batches; a stage with a number of steps takes just them."""
    monkeypatch.setattr(trainer, "LOG_EVERY", 1)
    remaining = iter(accuracies)

    def draw(task, config, now, rng):
        batch, _ = trainer.draw(task, config, now, rng)
        return batch, accuracies[now.step] < DENSE

    def loss(model, batch, config):
        objective, metrics = trainer.loss(model, batch, config)
        return objective, metrics | {"reveal_accuracy": next(remaining) % DENSE}

    _, log = train_small({"pass_accuracy": 0.95, "final_steps": 2} | changes, draw=draw, loss=loss)
    assert [row["stage"] for row in log] == stages and next(remaining, "none") == "none"
    assert log[-1]["finished"]


def test_the_log_and_the_output_say_where_each_stage_ended_and_what_was_not_learned(capsys):
    _, log = train_small({"batch": 50, "pass_patience": 2, "dense_fraction": 0})
    assert log[-1]["stage_ends"] == [2 * 50 * 54]
    assert log[-1]["tokens"] == 2 * 50 * 54 + 12 * 50 * 72
    assert [row["step"] for row in log] == [1, 10, 14]
    train_small({"pass_accuracy": 1.0, "max_curriculum_steps": 3})
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" loss")[0] for line in lines] == [
        "step 1: (2,1)", "(2,1) passed after 2 steps, 0.01 million tokens", "step 14: (4,2)",
        "step 1: (2,1)", "step 3: (2,1)", "NOT LEARNED: stopped in stage 1 of 2"]


def test_steps_follow_the_clipped_gradient_of_the_loss_on_fresh_traces_of_the_seed(monkeypatch):
    def two(model, config):
        first, *others = model.parameters()
        return [torch.optim.SGD([first], lr=1.0), torch.optim.SGD(others, lr=0.4)]

    monkeypatch.setattr(trainer, "make_optimizers", two)
    result, log = train_small({"pass_patience": 1, "final_steps": 2, "seed": 7, "dense_fraction": 0,
                               "reveal_weight": 9.0, "average": False}, lr_scale=lambda *_: 0.5)
    model = small_model()
    parameters = [*model.parameters()]
    rates = [0.5] + [0.2] * (len(parameters) - 1)
    for step, stage in enumerate([(2, 1), (4, 2), (4, 2)]):
        batch = S3.training_batch(2, *stage, generator(7, "train", step))
        inputs, targets, reveals = map(torch.from_numpy, batch)
        log_p = model(inputs).log_softmax(-1)
        losses = -log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        reveal_loss = losses[reveals].mean()
        gradients = torch.autograd.grad(losses.mean() + 9 * reveal_loss, parameters)
        norm = nn.utils.get_total_norm(gradients)
        assert norm > 1
        for parameter, gradient, rate in zip(parameters, gradients, rates):
            parameter.data -= rate * gradient / norm

    torch.testing.assert_close([*result.parameters()], parameters)
    for name, expected in [("loss", losses.mean()), ("reveal_loss", reveal_loss),
                           ("gradient_norm", norm)]:
        assert log[-1][name] == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("changes, first", [
    ({}, 3), ({"curriculum": [(2, 1), (2, 1), (4, 2)]}, 6), ({"average": False}, 14),
    ({"curriculum": [(4, 2)]}, 11), ({"pass_accuracy": 1.0, "max_curriculum_steps": 5}, 4)])
def test_the_average_is_that_of_the_last_of_several_stages(changes, first):
    """Else the last parameters are returned: of a single stage, and if the last is not reached."""
    seen = []

    def scale(config, now):
        seen.append(model.unembedding.weight.detach().clone())
        return 1.0

    model = small_model()
    result, log = train_small(changes, model, lr_scale=scale)
    steps = [*seen[2::2], model.unembedding.weight.detach()]  # it is asked by two optimisers
    assert len(steps) == log[-1]["step"]
    expected = torch.stack(steps[first:]).mean(0)
    assert (result.unembedding.weight - expected).abs().max() < 1e-6 and not result.training


def test_the_average_has_the_newest_buffers():
    average, model = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    model(torch.randn(5, 3))
    trainer.update_mean(average, model, 2)
    assert all(map(torch.equal, average.buffers(), model.buffers()))


def test_a_gradient_that_is_not_finite_ends_the_training():
    """As in a task without reveals, whose mean loss is 0 / 0."""
    def draw(task, config, now, rng):
        batch, counts = trainer.draw(task, config, now, rng)
        return batch._replace(reveals=np.zeros_like(batch.reveals)), counts

    with pytest.raises(UserError, match="step 1: the gradient is not finite"):
        train_small(draw=draw)


@pytest.mark.parametrize("optimizer, kind", [("muon", torch.optim.Muon),
                                             ("adamw", torch.optim.AdamW)])
def test_muon_gets_the_matrices_between_embedding_and_unembedding(optimizer, kind):
    model = LinRNN(22)
    config = Config(optimizer=optimizer, lr=0.1, matrix_lr=0.2, weight_decay=0.3)
    matrices, others = trainer.make_optimizers(model, config)
    assert type(matrices) is kind and type(others) is torch.optim.AdamW
    (inner,), (outer,) = matrices.param_groups, others.param_groups
    ends = {model.embedding.weight, model.unembedding.weight}
    assert {*inner["params"]} == {x for x in model.parameters() if x.ndim == 2} - ends
    assert {*outer["params"]} == {*model.parameters()} - {*inner["params"]}
    assert [group[name] for group in (inner, outer) for name in ("lr", "weight_decay")] == [
        0.2, 0.3, 0.1, 0.3]
    betas = (0.9, 0.95)
    assert outer["betas"] == betas and (optimizer == "muon" or inner["betas"] == betas)


# --- 4. The run folder ----------------------------------------------------------------------------

@pytest.mark.parametrize("owner, function, call", [
    (trainer, "to_tensors", 7), (trainer, "to_tensors", 14), (torch, "save", 3)])
def test_a_run_that_was_cut_and_resumed_has_the_bits_of_the_run(owner, function, call, tmp_path,
                                                                monkeypatch):
    """It is cut while it draws one of 15 batches, or while it saves."""
    monkeypatch.setattr(trainer, "SAVE_EVERY", 4)
    monkeypatch.setattr(trainer.time, "perf_counter", itertools.count().__next__)
    monkeypatch.setattr(trainer, "device_of", lambda _: torch.rand(1).device)  # as dropout does
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    command = [*SMALL, "--final-steps", "12", "--out"]
    main([*command, str(whole)])
    real, counter = getattr(owner, function), itertools.count(1)

    def cut(*arguments):
        if next(counter) < call:
            return real(*arguments)
        if owner is torch:
            arguments[1].write_bytes(b"half a file")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, function, cut)
        main([*command, str(resumed)])
    assert not read_run(resumed)["progress"]["finished"]
    main(["--resume", str(resumed), *"--lengths 4:2 --traces 4".split()])
    assert same(read_run(whole), read_run(resumed))
    assert read_run(whole)["progress"]["seconds"] == 15
    assert (whole / "results.json").read_text() == (resumed / "results.json").read_text()


class Other(LinRNN):
    pass


@pytest.mark.parametrize("change, resume", [
    ({}, False), ({"config": small_config(lr=0.2)}, True),
    ({"task": ReplTask(Group("S3"), "swap")}, True),
    ({"draw": lambda _, *more: trainer.draw(ReplTask(Group("A3")), *more)}, True),
    ({"model": Other(16, d_model=8, heads=2)}, True)])
def test_a_folder_that_holds_a_run_is_kept_and_only_the_same_run_can_be_resumed(change, resume,
                                                                                tmp_path):
    given = {"model": small_model(), "task": S3, "config": small_config()}
    _, log = train(**given, folder=tmp_path)
    before = (tmp_path / "model.pt").read_bytes()
    assert train(**given, folder=tmp_path, resume=True)[1] == log
    with pytest.raises(UserError, match="already holds a run"):
        train(**given | change, folder=tmp_path, resume=resume)
    assert (tmp_path / "model.pt").read_bytes() == before


# --- 5. The command line --------------------------------------------------------------------------

@pytest.mark.parametrize("options", [
    "--model transformer --optimizer adamw --matrix-lr 0.001", "--model lstm --commands swap",
    "--beta-max 1 --dense-fraction 1"])
def test_the_command_trains_every_model_and_its_folder_has_the_result(options, tmp_path):
    small = " ".join(SMALL).replace("--heads 2", "" if "lstm" in options else "--heads 2")
    main([*small.split(), *options.split(), "--out", str(tmp_path)])
    result = json.loads((tmp_path / "results.json").read_text())
    task, model = load(tmp_path)
    assert result["results"] == [evaluate(model, task, 4, 2, 4)]
    assert result["step"] == read_run(tmp_path)["progress"]["step"] == 6
    assert result["parameters"] == sum(x.numel() for x in model.parameters())


@pytest.mark.parametrize("options, words", [
    ("--group A2", "unknown group"), ("--model gru", "linrnn, transformer, lstm"),
    ("--curriculum 10:4", "multiple"), ("--lengths 8", "LENGTH:SPACING"),
    ("--traces 0", "invalid positive value"), ("--device none", "there is no 'none' here"),
    ("--resume nowhere", "there is no run in nowhere"), ("--resume RUN --seed 0", "--resume")])
def test_bad_input_is_refused_in_one_line_before_the_first_write(options, words, small_run, refused,
                                                                 tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = options.replace("RUN", str(small_run)).split()
    refused(main, argv if "--resume" in argv else [*SMALL, *argv], words)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("beta_max, least, most", [("2", 0.95, 1), ("1", 0, 0.65)])
def test_three_variables_are_learned_with_beta_up_to_two_only(beta_max, least, most, tmp_path,
                                                              monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["--beta-max", beta_max, *(
        "--group S3 --d-model 32 --heads 2 --curriculum 2:1,8:2 --final-steps 30 --lr 0.004 "
        "--matrix-lr 0.02 --max-curriculum-steps 120 --lengths 16:4 --traces 64 "
        "--dense-fraction 0 --repeat-fraction 0").split()])
    row, = json.loads((tmp_path / "runs/linrnn-S3-seed0/results.json").read_text())["results"]
    assert least <= row["all"] <= most
