"""A run is what its config says, and a resumed run is the run, bit for bit."""

import json
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest
import torch
import train as trainer
from conftest import SMALL
from data import Group, ReplTask, UserError, generator
from eval import evaluate, load, read_run
from models import LinRNN
from torch import nn
from train import Config, Progress, main, train

S3 = ReplTask(Group("S3"))  # 16 tokens


def small_model():
    torch.manual_seed(0)
    return LinRNN(16, d_model=8, heads=2)


def small_config(**changes):
    return Config(**{"curriculum": ((2, 1), (4, 2)), "batch": 2, "pass_accuracy": 0.0,
                     "final_steps": 12} | changes)


# --- 1. The config --------------------------------------------------------------------------------

def test_every_field_is_an_option_and_what_is_typed_is_stored(monkeypatch, tmp_path, capsys):
    """The model and the task get it, and --help shows it."""
    typed = {"group": "S4", "commands": "swap", "repeat_fraction": 0.25, "d_model": 16, "layers": 2,
             "heads": 2, "beta_max": 1.5, "householders": 3, "conv_width": 1, "model": "linrnn",
             "curriculum": ((6, 3), (12, 4)), "batch": 2, "dense_fraction": 0.75,
             "literal_fraction": 0.125, "pass_accuracy": 0.5, "pass_patience": 2,
             "max_curriculum_steps": 1, "final_steps": 1, "optimizer": "adamw",
             "matrix_lr": 0.02, "lr": 0.01, "warmup": 3, "weight_decay": 0.0, "reveal_weight": 2.0,
             "seed": 9, "compile": True}
    assert typed.keys() == asdict(Config()).keys()
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"    {name}: " in shown for name in typed)

    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: compiled.append(model) or model)
    argv = ["--curriculum", "6:3,12:4", "--compile"]
    for name, value in typed.items():
        if not isinstance(value, (tuple, bool)):
            argv += [f"--{name.replace('_', '-')}", str(value)]
    main([*argv, *"--lengths 4:2 --traces 3 --out".split(), str(tmp_path)])
    assert read_run(tmp_path)["config"] == typed and len(compiled) == 1

    task, model = load(tmp_path)
    assert (task.repeat_fraction, task.literal_fraction, task.commands) == (0.25, 0.125, "swap")
    assert [block.beta_max for block in model.blocks[::2]] == [1.5, 1.5]
    assert (model.blocks[0].householders, model.blocks[0].heads) == (3, 2)


def test_a_config_holds_what_suits_its_model_or_what_is_typed():
    """A model that the table does not list gets linrnn's. The rates of Muon do not suit AdamW."""
    def own(**typed):
        config = Config(**typed)
        return config.optimizer, config.matrix_lr, config.lr, config.final_steps

    assert own() == own(model="transformer") == own(model="mine") == ("muon", 0.01, 2e-3, 350)
    assert own(model="lstm", lr=0.5) == ("adamw", 4e-3, 0.5, 350)
    assert own(optimizer="adamw", matrix_lr=0.1, final_steps=7) == ("adamw", 0.1, 2e-3, 7)
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


def test_the_learning_rates_warm_up_and_are_zero_when_training_is_over():
    """After the last stage, or if it is not reached in time."""
    config = Config(curriculum=((2, 1),) * 5, final_steps=100, max_curriculum_steps=900)
    for now, scale in [((0, 0), 0.02), ((24, 0), 0.5), ((49, 1), 1), ((899, 3), 1), ((900, 3), 0),
                       ((900, 4, 0), 1), ((999, 4, 99), 1), ((1000, 4, 100), 0)]:
        assert trainer.schedule(config, Progress(*now)) == scale


# --- 3. The training loop -------------------------------------------------------------------------

DENSE = 10  # added to the accuracy of a batch that does not count


@pytest.mark.parametrize("changes, accuracies, stages", [
    ({}, (1, 1, .9, 1, 1, 1, 0, 0), [0] * 6 + [1] * 2),
    ({}, (1, 1, .95, 0, 0), [0] * 3 + [1] * 2),
    ({}, (1, 1, DENSE, DENSE + 1, 1, 0, 0), [0] * 5 + [1] * 2),
    ({"max_curriculum_steps": 4}, (DENSE + 1,) * 4, [0] * 4),
    ({"max_curriculum_steps": 4}, (1, 1, 0, 1), [0] * 4),
    ({"max_curriculum_steps": 3}, (1, 1, 1, 0, 1), [0] * 3 + [1] * 2)])
def test_a_stage_ends_as_the_config_says(changes, accuracies, stages, capsys):
    """The accuracies come from a hand-made loss. A batch that does not count neither passes a stage
    nor breaks a series of good batches."""
    remaining = iter(accuracies)

    def draw(task, config, now, rng):
        batch, _ = trainer.draw(task, config, now, rng)
        return batch, accuracies[now.step] < DENSE

    def loss(model, batch, config):
        objective, metrics = trainer.loss(model, batch, config)
        return objective, metrics | {"reveal_accuracy": next(remaining) % DENSE}

    config = small_config(pass_accuracy=0.95, final_steps=2, **changes)
    _, log = train(small_model(), S3, config, draw=draw, loss=loss)
    assert [row["stage"] for row in log] == stages and next(remaining, "none") == "none"
    shown = capsys.readouterr().out
    assert ("NOT LEARNED: stopped in stage 1 of 2" in shown) == (1 not in stages)
    assert (f"(2,1) passed after {stages.count(0)} steps" in shown) == (1 in stages)


def test_steps_follow_the_clipped_gradient_of_the_loss_on_fresh_traces_of_the_seed(monkeypatch):
    def plain(model, config):
        first, *others = model.parameters()
        return torch.optim.SGD([first], lr=9.0), torch.optim.SGD(others, lr=9.0)

    monkeypatch.setattr(trainer, "make_optimizers", plain)
    trained = small_model()
    config = small_config(pass_patience=1, seed=7, dense_fraction=0, reveal_weight=9.0,
                          matrix_lr=1.0, lr=0.4)
    _, log = train(trained, S3, config, schedule=lambda config, now: 0.5 * (now.step < 3))
    model = small_model()
    parameters = [*model.parameters()]
    rates = [0.5] + [0.2] * (len(parameters) - 1)
    tokens = 0
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
        tokens += inputs.numel()

    torch.testing.assert_close([*trained.parameters()], parameters)
    assert [row["step"] for row in log] == [1, 2, 3]
    for name, expected in [("loss", losses.mean().item()), ("reveal_loss", reveal_loss.item()),
                           ("tokens", tokens)]:
        assert log[-1][name] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("changes, first", [
    ({}, 3), ({"curriculum": [(2, 1), (2, 1), (4, 2)]}, 6), ({"curriculum": [(4, 2)]}, 11),
    ({"pass_accuracy": 1.1, "max_curriculum_steps": 5}, 4)])
def test_the_average_is_that_of_the_last_of_several_stages(changes, first):
    """Else it is the last parameters: of a single stage, and if the last is not reached."""
    seen = []

    def schedule(config, now):
        seen.append(model.unembedding.weight.detach().clone())
        return trainer.schedule(config, now)

    model = small_model()
    average, log = train(model, S3, small_config(**changes), schedule=schedule)
    assert len(seen) == 1 + log[-1]["step"]
    expected = torch.stack(seen[1 + first:]).mean(0)
    assert (average.unembedding.weight - expected).abs().max() < 1e-6 and not average.training


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

def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("owner, function, call, step", [
    (trainer, "draw", 7, 4), (trainer, "draw", 14, 12), (torch, "save", 3, 8)])
def test_a_run_that_was_cut_and_resumed_has_the_bits_of_the_run(owner, function, call, step,
                                                                tmp_path, monkeypatch):
    """It is cut while it draws one of 15 batches, or while it saves. A finished run stays as it
    is."""
    monkeypatch.setattr(trainer, "SAVE_EVERY", 4)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    command = [*SMALL, "--final-steps", "12", "--out"]
    main([*command, str(whole)])
    real, calls = getattr(owner, function), []

    def cut(*arguments):
        calls.append(arguments)
        if len(calls) < call:
            return real(*arguments)
        if owner is torch:
            arguments[1].write_bytes(b"half a file")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(UserError, match="--resume"):
        patch.setattr(owner, function, cut)
        hooked = partial(train, **({"draw": cut} if owner is trainer else {}))
        main([*command, str(resumed)], hooked)
    assert read_run(resumed)["progress"]["step"] == step
    for _ in range(2):
        main(["--resume", str(resumed), *"--lengths 4:2 --traces 4".split()])
        assert same(read_run(whole), read_run(resumed))
        assert (whole / "results.json").read_text() == (resumed / "results.json").read_text()


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


@pytest.mark.parametrize("options, words", [
    ("--group A2", "unknown group"), ("--model gru", "linrnn, deltanet"),
    ("--curriculum 10:4", "multiple"), ("--lengths 8", "LENGTH:SPACING"),
    ("--traces 0", "invalid positive value"), ("--warmup 0", "invalid positive value"),
    ("--device none", "there is no 'none' here"), ("--heads 3", "d_model must be a multiple"),
    ("--beta-max 3", "beta_max must be"), ("--model lstm --beta-max 1", "lstm has no"),
    ("--out RUN", "already holds a run"), ("--resume nowhere", "there is no run in nowhere"),
    ("--resume RUN --out x", "not allowed with"), ("--resume RUN --beta-max 1", "beta_max"),
    ("--repeat-fraction 3", "repeat-fraction")])
def test_bad_input_is_refused_in_one_line_before_the_first_write(options, words, small_run, refused,
                                                                 tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = (small_run / "model.pt").read_bytes()
    refused(main, [*SMALL, *options.replace("RUN", str(small_run)).split()], words)
    assert not [*tmp_path.iterdir()] and (small_run / "model.pt").read_bytes() == before


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
