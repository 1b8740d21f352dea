"""A run is what its recipe says, and a resumed run is the run, bit for bit."""

import itertools
import json
import os
import pty
import re
import sys
from dataclasses import asdict, fields
from unittest.mock import Mock

import eval as evaluation
import pytest
import torch
import train as trainer
from conftest import SMALL
from data import Group, ReplTask, UserError, generator
from models import LinRNN
from torch import nan, nn
from train import Config, Progress, Recipe, main, train

S3 = ReplTask(Group("S3"))  # 16 tokens


def small_model():
    torch.manual_seed(0)
    return LinRNN(16, d_model=8, heads=2)


def train_small(changes={}, model=None, kind=Recipe, **more):
    recipe = kind(**{"curriculum": [(2, 1), (4, 2)], "batch": 2, "pass_accuracy": 0.0,
                     "final_steps": 12} | changes)
    return train(model or small_model(), S3, recipe, **more)


def config_of(argv):
    return Config(**vars(trainer.make_parser(Config).parse_args(argv.split())))


def checkpoint_of(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# --- The curriculum -------------------------------------------------------------------------------

DENSE = 10  # added to the accuracy of a batch that does not count


@pytest.mark.parametrize("changes, accuracies, stages, learned", [
    ({}, (1, 1, .9, 1, 1, 1, 0, 0), [0] * 6 + [1] * 2, 1),
    ({}, (1, 1, .95, 0, 0), [0] * 3 + [1] * 2, 1),
    ({}, (1, None, 1, None, 1, 0, 0), [0] * 5 + [1] * 2, 1),
    ({}, (1, 1, DENSE, DENSE + 1, 1, 0, 0), [0] * 5 + [1] * 2, 1),
    ({"max_curriculum_steps": 4}, (DENSE + 1,) * 4, [0] * 4, 0),
    ({"final_steps": 4}, (1, 1, 1, 1, 1, 1, 0), [0] * 3 + [1] * 4, 2),
    ({"final_steps": 4}, (1, 1, 1, 1, 1, 0, 1), [0] * 3 + [1] * 4, 1),
    ({"final_steps": 4}, (1, 1, 1, 1, 1, DENSE + 1, 1), [0] * 3 + [1] * 4, 2),
    ({"max_curriculum_steps": 4}, (1, 1, 0, 1), [0] * 4, 0),
    ({"max_curriculum_steps": 3}, (1, 1, 1, 0, 1), [0] * 3 + [1] * 2, 1)])
def test_a_stage_ends_as_the_recipe_says(changes, accuracies, stages, learned, monkeypatch):
    """The accuracies come from a hand-made loss. A dense batch neither passes a stage nor breaks a
    series of good batches, and nor does a batch without an accuracy."""
    monkeypatch.setattr(trainer, "LOG_EVERY", 1)
    monkeypatch.setattr(trainer, "choose", lambda *_: "last")
    remaining = iter(accuracies)

    class HandMade(Recipe):
        def draw(self, task, progress, rng):
            batch, _ = super().draw(task, progress, rng)
            return batch, (accuracies[progress.step] or 0) < DENSE

        def loss(self, model, batch):
            objective, metrics = super().loss(model, batch)
            value = next(remaining)
            return objective, metrics | {"reveal_accuracy": value and value % DENSE}

    _, log = train_small({"pass_accuracy": 0.95, "final_steps": 2} | changes, kind=HandMade)
    assert [row["stage"] for row in log] == stages and next(remaining, "none") == "none"
    assert log[-1]["learned"] == learned and log[-1]["finished"]


def test_the_log_and_the_output_say_where_each_stage_was_left_and_what_was_not_learned(capsys):
    _, log = train_small({"curriculum": [(2, 1), (4, 2), (8, 4)], "batch": 50,
                          "pass_patience": 2, "final_steps": 2})
    left = [2 * 50 * 54, (2 * 54 + 2 * 72) * 50]
    assert log[-1]["left"] == left and log[-1]["tokens"] == left[1] + 2 * 50 * 108
    train_small({"pass_accuracy": 1.0, "max_curriculum_steps": 3})
    assert capsys.readouterr().out.splitlines() == [
        "(2,1) passed after 2 steps, 0.01 million tokens",
        "(4,2) passed after 4 steps, 0.01 million tokens",
        "NOT LEARNED: stopped in stage 1 of 2"]


# --- A step ---------------------------------------------------------------------------------------

def test_a_fraction_of_the_batches_is_dense_and_does_not_count():
    """A dense batch has as many traces and commands, and more reveals; (2,1) cannot be denser."""
    recipe = Recipe(curriculum=[(2, 1), (12, 6)], dense_fraction=0.25, batch=3)
    reveals = {True: [], False: []}
    for step in range(400):
        batch, counts = recipe.draw(S3, Progress(stage=1), generator(1, "train", step))
        assert (batch.inputs == S3.ids[" = "]).sum() >= 3 * 12
        reveals[counts] += batch.reveals.sum(1).tolist()
    assert {*reveals[True]} == {2} and {*reveals[False]} == {3, 6, 12}
    assert abs(len(reveals[False]) / 1200 - 0.25) < 0.13  # six deviations of 400 coins
    assert all(recipe.draw(S3, Progress(), generator(1, "train", step))[1] for step in range(40))


def test_the_learning_rates_warm_up_once_in_a_run_and_stay():
    scales = [Recipe().lr_scale(Progress(step=step, stage=1)) for step in (0, 24, 49, 400)]
    assert scales == [0.02, 0.5, 1, 1]


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential, nn.DataParallel])
@pytest.mark.parametrize("optimizer, kind", [("muon", torch.optim.Muon),
                                             ("adamw", torch.optim.AdamW)])
def test_muon_gets_the_matrices_between_embedding_and_unembedding(optimizer, kind, wrap):
    model = LinRNN(22)
    recipe = Recipe(optimizer=optimizer, lr=0.1, matrix_lr=0.2, weight_decay=0.3)
    matrices, others = trainer.make_optimizers(wrap(model), recipe)
    assert type(matrices) is kind and type(others) is torch.optim.AdamW
    (inner,), (outer,) = matrices.param_groups, others.param_groups
    ends = {model.embedding.weight, model.unembedding.weight}
    assert {*inner["params"]} == {x for x in model.parameters() if x.ndim == 2} - ends
    assert {*outer["params"]} == {*model.parameters()} - {*inner["params"]}
    assert [group[name] for group in (inner, outer) for name in ("lr", "weight_decay")] == [
        0.2, 0.3, 0.1, 0.3]


def test_steps_follow_the_clipped_gradient_of_the_loss_on_fresh_traces_of_the_seed(monkeypatch):
    def two(model, recipe):
        first, *others = model.parameters()
        return [torch.optim.SGD([first], lr=1.0), torch.optim.SGD(others, lr=0.4)]

    class Half(Recipe):
        lr_scale = lambda *_: 0.5
        averages = lambda *_: False

    monkeypatch.setattr(trainer, "make_optimizers", two)
    result, log = train_small({"pass_patience": 1, "final_steps": 2, "seed": 7,
                               "reveal_weight": 9.0}, kind=Half)
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


# --- What train returns ---------------------------------------------------------------------------

@pytest.mark.parametrize("changes, first", [
    ({"curriculum": [(4, 2)]}, 3), ({"curriculum": [(2, 1), (2, 1), (4, 2)]}, 6),
    ({"pass_accuracy": 1.0, "curriculum": [(4, 2)]}, 11)])
def test_the_average_is_that_of_the_last_stage_once_a_stage_is_learned(changes, first,
                                                                       monkeypatch):
    """Without a learned stage, the last parameters are returned."""
    monkeypatch.setattr(trainer, "choose", Mock(return_value="average"))
    seen = []

    class Watched(Recipe):
        def lr_scale(self, progress):
            seen.append(model.unembedding.weight.detach().clone())
            return super().lr_scale(progress)

    model = small_model()
    result, log = train_small(changes, model, kind=Watched)
    steps = [*seen[2::2], model.unembedding.weight.detach()]  # it is asked by two optimisers
    assert len(steps) == log[-1]["step"]
    expected = torch.stack(steps[first:]).mean(0)
    assert (result.unembedding.weight - expected).abs().max() < 1e-6


def answering(accuracy, loss):
    """Not a network: it knows its accuracy and its loss."""
    model = nn.Module()
    model.metrics = {"reveal_accuracy": accuracy, "loss": loss}
    return model


@pytest.mark.parametrize("average, last, chosen", [
    ((0.5, 1.0), (0.52, 1.0), "last"), ((0.5, 1.0), (0.508, 0.1), "average"),
    ((0.9, 1.0), (0.5, 1.0), "average"), ((0.5, 1.0), (0.5, 0.5), "average"),
    ((None, 1.0), (None, 0.98), "last"), ((None, 1.0), (None, 0.995), "average"),
    ((None, 1.0), (None, 2.0), "average")])
def test_the_last_parameters_are_returned_if_they_do_clearly_better(average, last, chosen):
    """By a point of accuracy, or by 1% of the loss where there is no accuracy; both are asked on
    the same 8 batches of the stream "valid", of the last stage, without dropout."""
    drawn = []

    class Asked(Recipe):
        def draw(self, task, progress, rng):
            drawn.append((progress.stage, rng.random()))
            return S3.test_batch(2, 2, 1, rng), True

        def loss(self, model, batch):
            assert not model.training and not torch.is_grad_enabled()
            return None, model.metrics

    models = answering(*last), answering(*average)
    assert trainer.choose(*models, S3, Asked(seed=3), Progress(stage=4, averaged=2)) == chosen
    expected = [(4, generator(3, "valid", i).random()) for i in range(8)]
    assert drawn[:8] == drawn[8:] == expected
    assert trainer.choose(*models, S3, Asked(), Progress()) == "last"  # no step was averaged


@pytest.mark.parametrize("chosen", ["average", "last"])
def test_the_chosen_parameters_are_returned_stored_and_named_in_the_log(chosen, monkeypatch,
                                                                        tmp_path):
    monkeypatch.setattr(trainer, "choose", Mock(return_value=chosen))
    model = small_model()
    result, log = train_small({"final_steps": 3}, model, folder=tmp_path)
    assert log[-1]["returned"] == chosen
    assert (result is model) == (chosen == "last") and not result.training
    assert same(result.state_dict(), checkpoint_of(tmp_path)["model"])

    again, log = train_small({"final_steps": 3}, folder=tmp_path, resume=True)
    assert same(again.state_dict(), result.state_dict()) and log[-1]["step"] == 6


# --- The recipe and the config --------------------------------------------------------------------

@pytest.mark.parametrize("name, value", [
    ("lr", nan), ("lr", -1.0), ("matrix_lr", torch.inf), ("seed", -1), ("seed", 2**64),
    ("batch", 0), ("batch", 2.5), ("dense_fraction", 25), ("pass_accuracy", 97),
    ("optimizer", "sgd")])
def test_a_recipe_that_cannot_be_trained_is_refused_by_name(name, value):
    with pytest.raises(UserError, match=name):
        Recipe(**{name: value})


def test_every_typed_option_wins_over_the_default():
    typed = {"curriculum": "6:3,12:4", "lengths": "4:2", "group": "S6", "model": "linrnn",
             "commands": "swap", "optimizer": "adamw", "pass_accuracy": "0.5", "beta_max": "1.5",
             "repeat_fraction": "0.25", "dense_fraction": "0.75", "compile": ""}
    numbers = {part.name: part.type(number) for number, part in enumerate(fields(Config), 21)
               if part.type in (int, float)}
    expected = numbers | typed | {"curriculum": ((6, 3), (12, 4)), "lengths": ((4, 2),),
                                  "pass_accuracy": 0.5, "beta_max": 1.5, "repeat_fraction": 0.25,
                                  "dense_fraction": 0.75, "compile": True, "chapter": ""}
    argv = [f"--{name.replace('_', '-')} {value}" for name, value in (numbers | typed).items()]
    assert asdict(config_of(" ".join(argv))) == expected


@pytest.mark.parametrize("argv, fractions", [
    ("", (0.5, 0.25)), ("--curriculum 8:1,16:2", (0, 0)),
    ("--curriculum 8:1 --repeat-fraction 0.25", (0.25, 0)), ("--dense-fraction 0", (0.5, 0))])
def test_your_own_curriculum_has_no_repeats_and_no_dense_batches_unless_typed(argv, fractions):
    config = config_of(argv)
    assert (config.repeat_fraction, config.dense_fraction) == fractions
    assert evaluation.make(asdict(config))[0].repeat_fraction == fractions[0]


def test_defaults_follow_group_and_model_and_what_is_typed_reaches_them():
    for n, shrink in ((3, 1), (5, 1), (7, 5 / 7)):
        config = config_of(f"--group S{n}")
        assert config.conv_width == n + 3
        assert [config.lr, config.matrix_lr] == pytest.approx([2e-3 * shrink, 0.01 * shrink**0.5])
    _, model = evaluation.make(asdict(Config()))
    assert (model.blocks[1].beta_max, model.blocks[1].heads) == (2, 4)
    assert sum(parameter.numel() for parameter in model.parameters()) == 73_688
    assert config_of("--model lstm").d_model == 60

    task, model = evaluation.make(asdict(config_of(
        "--group S4 --commands swap --beta-max 1 --layers 2 --householders 3 --conv-width 1")))
    assert task.test_batch(1, 8, 8, generator(0, "test")).inputs.shape == (1, 5 * 4 + 8 * 7 + 10)
    assert [block.beta_max for block in model.blocks[::2]] == [1, 1]
    assert model.blocks[0].householders == 3


def test_each_default_that_help_shows_is_accepted(capsys):
    parser = trainer.make_parser(Config)
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.partition("options:")[2].split())
    shown = [(entry.split()[0], value) for entry in re.split(r" (?=--)", text)
             for value in re.findall(r"\(default ([^\s;)]+)", entry)]
    assert {"--curriculum", "--lengths", "--batch", "--group", "--lr"} < {*dict(shown)}
    for option, value in shown:
        if option not in ("--conv-width", "--device", "--out"):  # these describe their default
            parser.parse_args([option, value.rstrip(",")])


# --- The run folder -------------------------------------------------------------------------------

@pytest.mark.parametrize("owner, function, call", [
    (trainer, "to_tensors", 7), (trainer, "to_tensors", 22), (torch, "save", 3)])
def test_a_run_that_was_cut_and_resumed_has_the_bits_of_the_run(owner, function, call, tmp_path,
                                                                monkeypatch):
    """It is cut while it draws one of 15 batches, or 16 more for the choice, or while it saves."""
    monkeypatch.setattr(trainer, "SAVE_EVERY", 4)
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: 0.0)  # the clock is not the run
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
    assert not checkpoint_of(resumed)["progress"]["finished"]
    main(["--resume", str(resumed)])
    assert same(checkpoint_of(whole), checkpoint_of(resumed))
    assert (whole / "results.json").read_text() == (resumed / "results.json").read_text()


def test_the_library_overwrites_no_run_and_resumes_only_the_same_recipe(tmp_path, monkeypatch):
    """A first step that fails leaves nothing behind."""
    monkeypatch.setattr(trainer, "SAVE_EVERY", 4)
    with pytest.raises(IndexError):
        train_small(model=LinRNN(5, d_model=8, heads=2), folder=tmp_path / "x")  # of 16 tokens
    assert not [*tmp_path.iterdir()]

    def train_one_stage(broken_step=None, lr=0.1, **more):
        class Breaks(Recipe):
            def lr_scale(self, progress):
                return nan if progress.step == broken_step else 1.0
        return train_small({"curriculum": [(4, 2)], "lr": lr}, kind=Breaks, folder=tmp_path, **more)

    with pytest.raises(UserError, match="step 7: the gradient is not finite"):
        train_one_stage(broken_step=6)
    cut = checkpoint_of(tmp_path)
    assert cut["progress"]["step"] == 5
    for more, words in [({}, "already holds a run"), ({"lr": 0.2, "resume": True}, "another run")]:
        with pytest.raises(UserError, match=words):
            train_one_stage(**more)
        assert same(checkpoint_of(tmp_path), cut)
    _, log = train_one_stage(resume=True)
    assert [row["step"] for row in log] == [10, 12]


@pytest.mark.parametrize("out", ["", "logged", "~/run"])
def test_a_folder_without_a_run_is_taken_and_one_with_a_run_is_not(out, tmp_path, monkeypatch,
                                                                  refused):
    """The shell may have opened a log file there. A tilde is the home folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "logged").mkdir()
    (tmp_path / "logged/log.txt").touch()
    argv = [*SMALL, *(["--out", out] if out else [])]
    main(argv)
    folder = tmp_path / {"": "runs/linrnn-S3-seed0", "~/run": "home/run"}.get(out, out)
    before = checkpoint_of(folder)
    refused(main, argv, "already holds a run", "--resume")

    main(["--resume", out or str(folder)])
    evaluation.main([out or str(folder), "--lengths", "4:2"])
    with pytest.raises(UserError, match="already holds a run"):
        train_small(folder=out or str(folder))
    assert same(checkpoint_of(folder), before) and (folder / "results.json").exists()


@pytest.mark.parametrize("options", [
    "--model transformer --optimizer adamw", "--model lstm --commands swap",
    "--beta-max 1 --dense-fraction 1"])
def test_the_command_trains_every_model_and_its_folder_has_the_result(options, tmp_path):
    small = " ".join(SMALL).replace("--heads 2", "" if "lstm" in options else "--heads 2")
    main([*small.split(), *options.split(), "--out", str(tmp_path)])
    result = json.loads((tmp_path / "results.json").read_text())
    task, model = evaluation.load(tmp_path)
    assert result["results"] == [evaluation.evaluate(model, task, 4, 2, 4)]
    assert result["step"] == checkpoint_of(tmp_path)["progress"]["step"] == 6
    assert result["returned"] in ("last", "average")


@pytest.mark.parametrize("open_channel", [os.pipe, pty.openpty])
def test_a_closed_pipe_or_terminal_does_not_end_a_training(open_channel, tmp_path, monkeypatch):
    reader, writer = open_channel()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    main([*SMALL, "--out", str(tmp_path / "run")])
    assert json.loads((tmp_path / "run/results.json").read_text())["finished"]


# --- Refusals -------------------------------------------------------------------------------------

@pytest.mark.parametrize("options, words", [
    ("--gruop S5", "--gruop"), ("--group ''", "group"), ("--group A2", "A2"),
    ("--group A5 --commands swap", "S<n>"), ("--model gru", "--model"),
    ("--heads 5", "heads"), ("--model transformer --d-model 6", "even"), ("--model lstm", "heads"),
    ("--beta-max 3", "beta_max"), ("--conv-width 0", "conv_width"),
    ("--curriculum 10:4", "multiple"), ("--curriculum 0:1", "multiple"),
    ("--curriculum 8", "--curriculum"), ("--curriculum ''", "--curriculum"),
    ("--lengths 8:3", "multiple"), ("--lengths 8:1:1", "--lengths"), ("--batch 2.5", "--batch"),
    ("--traces 0", "traces"), ("--seed -1", "seed"), ("--seed 18446744073709551616", "seed"),
    ("--lr nan", "lr"), ("--pass-accuracy 97", "pass_accuracy"),
    ("--repeat-fraction 1.5", "repeat_fraction"), ("--device sofa", "try --device cpu"),
    ("--resume nowhere", "there is no run in nowhere"), ("--resume RUN --seed 0", "--resume"),
    ("--resume RUN --out x", "--resume"), ("--out FILE/run", "FILE")])
def test_bad_input_is_refused_in_one_line_before_the_first_write(options, words, small_run, refused,
                                                                 tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("")
    argv = ["" if word == "''" else word for word in options.replace("RUN", str(small_run)).split()]
    refused(main, argv if "--resume" in argv else [*SMALL, *argv], words)
    assert [path.name for path in tmp_path.iterdir()] == ["FILE"]


def test_a_checkpoint_that_cannot_be_resumed_is_refused_and_stays(small_run, tmp_path, refused):
    path = tmp_path / "model.pt"
    config = checkpoint_of(small_run)["config"]
    for content, words in [
            ([], "readable run"), ({"config": {}, "model": {}}, "another command"),
            ({"config": config, "model": {}}, "only the result"),
            ({"config": config | {"chapter": "words"}, "model": {}}, "experiments.words")]:
        torch.save(content, path)
        before = path.read_bytes()
        refused(main, ["--resume", tmp_path], words)
        assert path.read_bytes() == before


# --- Whole runs -----------------------------------------------------------------------------------

@pytest.mark.parametrize("beta_max, least, most", [("2", 0.95, 1), ("1", 0, 0.65)])
def test_three_variables_are_learned_with_beta_up_to_two_only(beta_max, least, most, tmp_path):
    main(["--beta-max", beta_max, "--out", str(tmp_path / "run"), *(
        "--group S3 --d-model 32 --heads 2 --curriculum 2:1,8:2 --final-steps 30 --lr 0.004 "
        "--matrix-lr 0.02 --max-curriculum-steps 120 --lengths 16:4 --traces 64").split()])
    row, = json.loads((tmp_path / "run" / "results.json").read_text())["results"]
    assert least <= row["all"] <= most
