"""A run is what its recipe says, it survives interruption, and a resumed run is the run, bit for
bit."""

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import eval as evaluation
import models
import numpy as np
import pytest
import torch
import train as trainer
from conftest import EARLY, ROOT, SMALL
from data import Batch, Group, ReplTask, UserError, generator
from filelock import FileLock
from models import LanguageModel, LinRNN
from test_models import GRUBlock
from torch import nn
from train import Progress, Recipe, fall_in_last_stage, main, next_token_loss, train, warm_up

LONGER = [*SMALL, "--last-steps", "12", "--save-every", "4"]  # 15 steps
S3 = ReplTask(Group("S3"))  # 16 symbols


def small_recipe(**changes):
    """That of SMALL, but for its 12 last steps."""
    return Recipe(**{"curriculum": [(2, 1), (4, 2)], "batch": 2, "advance": -1.0, "last_steps": 12}
                  | changes)


def small_model():
    torch.manual_seed(0)
    return LinRNN(16, d_model=8, heads=2)


def checkpoint_of(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def same(one, other):
    """Whether two nested structures of tensors and numbers, such as state_dicts, are equal."""
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def without_times(log):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in log]


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


def test_the_rates_rise_once_in_a_run_and_may_fall_in_its_last_stage():
    """In step i of the first 50 the rate is i / 50 of its peak, whatever the stage; then it stays,
    or falls from all to nothing over the steps of the last stage."""
    recipe = Recipe(curriculum=[(2, 1), (4, 1)], last_steps=10)
    for step, stage_step, stage in itertools.product((0, 20, 49, 50, 400), (0, 5, 9), (0, 1)):
        progress = Progress(step=step, stage_step=stage_step, stage=stage)
        rise = min(1, (step + 1) / 50)
        assert warm_up(recipe, progress) == rise
        left = 1 - stage_step / 10 if stage else 1
        assert abs(fall_in_last_stage(recipe, progress) - rise * left) < 1e-12
    fixed = Recipe(curriculum=[(2, 1), (4, 1)], stage_steps=[7, 20])
    assert fall_in_last_stage(fixed, Progress(step=99, stage=1, stage_step=5)) == 0.75


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("optimizer, kind", [("muon", torch.optim.Muon),
                                             ("adamw", torch.optim.AdamW)])
def test_each_parameter_is_in_one_optimizer_and_muon_has_inner_matrices_only(name, optimizer, kind):
    """Embedding and unembedding are tables of vectors, not inner matrices."""
    model = models.build(name, 22)
    outer = {model.embedding.weight, model.unembedding.weight}
    inner = [id(x) for x in model.parameters() if x.ndim == 2 and x not in outer]

    optimizers = trainer.make_optimizers(model, Recipe(optimizer=optimizer, lr=0.1, matrix_lr=0.2))
    given = [(group["lr"], type(made), id(weight)) for made in optimizers
             for group in made.param_groups for weight in group["params"]]
    assert sorted(weight for *_, weight in given) == sorted(map(id, model.parameters()))
    assert [row for row in given if row[0] == 0.2] == [(0.2, kind, weight) for weight in inner]


# --- A step ---------------------------------------------------------------------------------------

def test_the_loss_is_that_of_all_tokens_and_the_weighted_one_of_the_reveals():
    model = small_model()
    batch = trainer.to_tensors(S3.training_batch(2, 4, 2, np.random.default_rng(0)), "cpu")
    log_p = model(batch.inputs).log_softmax(-1)
    losses = -log_p.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
    reveal_loss = losses[batch.reveals].mean().item()
    right = (log_p.argmax(-1) == batch.targets)[batch.reveals].float().mean().item()

    objective, metrics = next_token_loss(model, batch, Recipe(reveal_weight=9.0))
    assert abs(objective.item() - losses.mean().item() - 9 * reveal_loss) < 1e-4
    expected = {"loss": losses.mean().item(), "reveal_loss": reveal_loss, "reveal_accuracy": right}
    assert metrics == pytest.approx(expected, abs=1e-5)

    best = np.array([[[0.5, 0.5]], [[0.1, 0.9]]])
    _, metrics = next_token_loss(model, batch._replace(best=best), Recipe())
    assert metrics["bayes_accuracy"] == 0.7


def test_steps_follow_the_clipped_gradient_on_fresh_traces_of_the_seed(monkeypatch):
    """By hand: steps along the gradient alone, clipped to the norm 1, each at half the peak rate of
    its optimiser, nothing left over from the step before; the traces of step i are those of
    generator(seed, "train", i)."""
    def two(model, recipe):
        first, *others = model.parameters()
        return [torch.optim.SGD([first], lr=1.0), torch.optim.SGD(others, lr=0.4)]

    monkeypatch.setattr(trainer, "make_optimizers", two)
    recipe = small_recipe(curriculum=[(4, 2)], last_steps=3, average=False, seed=7)
    result, log = train(small_model(), S3, recipe, rate_of=lambda *_: 0.5, quiet=True)

    model = small_model()
    weights = [*model.parameters()]
    rates = [0.5] + [0.2] * (len(weights) - 1)
    for step in range(3):
        batch = S3.training_batch(2, 4, 2, generator(7, "train", step))
        objective, _ = next_token_loss(model, trainer.to_tensors(batch, "cpu"), recipe)
        gradients = torch.autograd.grad(objective, weights)
        norm = nn.utils.get_total_norm(gradients)
        assert norm > 1
        with torch.no_grad():
            for weight, gradient, rate in zip(weights, gradients, rates):
                weight -= rate * gradient / norm
    torch.testing.assert_close([*result.parameters()], weights)
    assert abs(log[-1]["gradient_norm"] - norm.item()) < 1e-4


@pytest.mark.parametrize("changes, first", [
    ({}, 3), ({"curriculum": [(4, 2)]}, 3), ({"advance": 2.0, "curriculum": [(4, 2)]}, -1),
    ({"average": False}, -1)])
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

def test_a_loss_of_ones_own_measures_what_it_likes():
    """Where it knows the best accuracy, `advance` is a share of that. Fields of a batch beside the
    three tensors stay as the task made them."""
    class Marked(ReplTask):
        def training_batch(self, *arguments):
            return super().training_batch(*arguments)._replace(best="the task's own")

    def loss_of(model, batch, recipe):
        assert torch.is_tensor(batch.reveals) and batch.best == "the task's own"
        return model(batch.inputs).square().mean(), {
            "loss": 1.0, "reveal_accuracy": 0.6, "bayes_accuracy": 0.6}

    recipe = small_recipe(advance=0.97, last_steps=2)
    _, log = train(small_model(), Marked(Group("S3")), recipe, loss_of=loss_of, quiet=True)
    assert log[-1]["step"] == 5 and log[-1]["finished"] and log[-1]["bayes_accuracy"] == 0.6


def test_a_run_ends_with_the_step_that_reaches_the_most_tokens(tmp_path):
    """So many tokens are read, and what was learned till then is saved."""
    tokens = 5 * 2 * (15 + 9 * 4 + 22 - 1)  # of five steps
    recipe = small_recipe(curriculum=[(4, 2)], last_steps=99)
    _, log = train(small_model(), S3, recipe, tmp_path, max_tokens=tokens, quiet=True)
    assert (log[-1]["step"], log[-1]["tokens"], log[-1]["finished"]) == (5, tokens, False)
    assert checkpoint_of(tmp_path)["progress"]["step"] == 5


def test_the_log_has_each_tenth_step_and_the_last_and_counts_all_the_time(tmp_path, monkeypatch):
    """By a clock on which each step takes a minute. So have the checkpoint and the result."""
    ticks = itertools.count()
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: 60.0 * next(ticks))
    _, log = train(small_model(), S3, small_recipe(last_steps=20), quiet=True)
    assert [row["step"] for row in log] == [10, 20, 23]
    assert [row["seconds"] for row in log] == [600, 1200, 23 * 60]
    assert [row["stage"] for row in log] == [1, 1, 1] and log[0]["length"] == 4
    assert [row["finished"] for row in log] == [False, False, True]
    main([*LONGER, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["minutes"] == result["steps"] == 15
    assert checkpoint_of(tmp_path)["progress"]["seconds"] == 900


class Parity:
    """A task of one's own: its four members and nothing else."""
    vocab = ["0", "1"]
    chance = 0.5

    def training_batch(self, batch, length, spacing, rng):
        bits = rng.integers(2, size=(batch, length))
        marks = np.tile(np.arange(1, length + 1) % spacing == 0, (batch, 1))
        return Batch(bits, bits.cumsum(1) % 2, marks)

    test_batch = training_batch


def test_a_task_and_a_mixer_of_ones_own_train_evaluate_and_are_read_back(tmp_path, capsys):
    """No registry, and a task of four members. The run learns: parity is easy for a GRU."""
    def make():
        torch.manual_seed(0)
        return LanguageModel(2, 16, 1, 1, lambda: GRUBlock(16))

    recipe = Recipe(curriculum=[(2, 1), (4, 1), (8, 1)], last_steps=30)
    model, log = train(make(), Parity(), recipe, tmp_path)
    row, = evaluation.evaluate_and_print(model, Parity(), [(16, 1)], traces=64)
    assert row["chance"] == 0.5 and row["all"] > 0.99 and log[-1]["finished"]
    again = evaluation.load_weights(make(), tmp_path)
    assert evaluation.evaluate(again, Parity(), 16, 1, 64) == row
    with pytest.raises(UserError, match="load_weights"):
        evaluation.load_run(tmp_path)
    assert "chance 0.500" in capsys.readouterr().out


PLUGIN = """
import numpy as np
from test_models import GRUBlock
from test_train import Parity
from data import FAMILIES, TASKS, Family, UserError
from models import MODELS, LanguageModel

class GRU(LanguageModel):
    def __init__(self, vocab_size, d_model=8):
        if d_model == 13:
            raise ValueError("a bug of the fork")
        if d_model == 14:
            raise UserError("14 is not wanted")
        super().__init__(vocab_size, d_model, 1, 4, lambda: GRUBlock(d_model))

TASKS["parity"] = Parity
MODELS["gru"] = GRU
FAMILIES["W"] = Family(2, lambda n: n, lambda n: (np.arange(n) + np.arange(n)[:, None]) % n)
"""


@pytest.fixture
def plugin(tmp_path, registries):
    """A file that brings a group, a task and a model."""
    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN)
    return str(path)


@pytest.mark.parametrize("names", ["--model gru --format parity", "--group W3xS2 --heads 2"])
def test_one_file_brings_a_group_a_task_and_a_model_to_both_commands(
        names, plugin, tmp_path, capsys, refused, registries):
    folder = str(tmp_path / "run")
    small = ("--curriculum 2:1,4:2 --d-model 8 --batch 2 --advance -1 --last-steps 3 --traces 4 "
             "--test-lengths 4:2 --device cpu").split()
    main(["--plugin", plugin, *names.split(), *small, "--out", folder])
    trained = capsys.readouterr().out.splitlines()[-2:]
    evaluation.main([folder, "--lengths", "4:2", "--traces", "4", "--plugin", plugin])
    assert capsys.readouterr().out.splitlines()[-2:] == trained

    for table, name in zip(registries, ["W", "parity", "gru"]):
        del table[name]
    refused(evaluation.main, [folder])


def test_an_error_of_the_user_is_one_line_and_a_bug_of_a_fork_has_its_traceback(
        plugin, tmp_path, refused):
    command = ["--plugin", plugin, "--model", "gru", "--out", str(tmp_path / "run")]
    refused(main, [*command, "--d-model", "14"], "14 is not wanted")
    with pytest.raises(ValueError, match="a bug of the fork"):
        main([*command, "--d-model", "13"])
    assert not (tmp_path / "run").exists()


# --- Interruption ---------------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["Ctrl-C", "power cut"])
def test_a_run_that_was_cut_and_resumed_is_bit_identical(how, tmp_path, monkeypatch):
    """Cut in step 12, or while the checkpoint after it is written: the weights, the optimisers, the
    log and the table of a run never cut. The steps after the last whole checkpoint are made again,
    and of a finished run none.
    """
    whole, resumed, made = tmp_path / "whole", tmp_path / "resumed", []
    main([*LONGER, "--out", str(whole)])
    real, fsync = trainer.to_tensors, os.fsync

    def begin(*arguments):
        made.append(arguments)
        if len(made) == 12 and how == "Ctrl-C":
            raise KeyboardInterrupt
        if len(made) == 12:
            monkeypatch.setattr(os, "fsync", Mock(side_effect=RuntimeError(how)))
        return real(*arguments)

    monkeypatch.setattr(trainer, "to_tensors", begin)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        main([*LONGER, "--out", str(resumed)])
    monkeypatch.setattr(os, "fsync", fsync)
    assert checkpoint_of(resumed)["progress"]["step"] == 8
    with open(resumed / "log.jsonl", "a") as log:
        log.write('{"step": 12, "los')

    one = checkpoint_of(whole)
    for _ in range(2):
        main([*LONGER, "--out", str(resumed), "--resume"])
        assert len(made) == 12 + 7
        other = checkpoint_of(resumed)
        other["progress"]["seconds"] = one["progress"]["seconds"]
        assert same(one, other)
    logs = [[json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
            for folder in (whole, resumed)]
    assert without_times(logs[0]) == without_times(logs[1]) and len(logs[0]) == 2
    results = [json.loads((folder / "result.json").read_text()) for folder in (whole, resumed)]
    assert results[0]["results"] == results[1]["results"]


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
    "--format word --householders 2 --curriculum 2:1,4:1 --test-lengths 4:1"])
def test_one_loop_trains_every_model_and_format(options, tmp_path, capsys):
    """The folder tells what was run, and what came out."""
    folder = tmp_path / "run"
    main([*" ".join(SMALL).replace("--heads 2", "").split(), *options.split(), "--out",
          str(folder)])
    shown = capsys.readouterr().out
    checkpoint, task, model = evaluation.load_run(folder)
    assert json.loads((folder / "config.json").read_text()) == checkpoint["config"]

    result = json.loads((folder / "result.json").read_text())
    stage = [int(number) for number in options[-3:].split(":")] if "word" in options else (4, 2)
    assert result["results"] == [evaluation.evaluate(model, task, *stage, 4)]
    assert result["steps"] == 6 and result["seed"] == 0 and result["torch"] == torch.__version__
    assert result["stage_reached"] == result["stages"] == 2
    assert result["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert result["command"].startswith("python train.py --group S3")
    assert options in result["command"]
    assert f"chance {task.chance:.3f}" in shown and "trained 6 steps" in shown and "(4," in shown
    assert {path.name for path in folder.iterdir()} <= trainer.PARTS


def test_the_command_line_is_the_library(tmp_path, monkeypatch):
    """The same weights and log, bit for bit, in a folder as in memory; seeds of weights and traces
    are one."""
    monkeypatch.chdir(tmp_path)
    main([*SMALL, "--seed", "3", "--last-steps", "12"])
    folder, = (tmp_path / "runs").iterdir()
    assert "linrnn-S3" in folder.name and folder.name.endswith("seed3")

    torch.manual_seed(3)
    model = LinRNN(len(S3.vocab), d_model=8, heads=2, **S3.model_options)
    recipe = small_recipe(seed=3, **S3.recipe_options)
    model, log = train(model, S3, recipe, quiet=True)
    assert same(model.state_dict(), checkpoint_of(folder)["model"])
    lines = (folder / "log.jsonl").read_text().splitlines()
    assert without_times(map(json.loads, lines)) == without_times(log)


def test_a_run_that_was_not_learned_says_so(tmp_path, capsys):
    main([*SMALL, "--advance", "2", "--max-steps", "4", "--out", str(tmp_path)])
    assert "NOT LEARNED: stage 1 of 2" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["steps"], result["stage_reached"], result["stages"]) == (4, 1, 2)


@pytest.mark.parametrize("options, words", [
    ("--group W7", ["unknown group 'W7'"]), ("--curriculum 10:4", ["multiple"]),
    ("--curriculum 10", ["expected LENGTH:SPACING"]), ("--curriculum 64:1 --batch 2000", ["many"]),
    ("--test-lengths 3:2", ["multiple"]), ("--test-lengths 64:1 --traces 99999", ["too many"]),
    ("--heads 5", ["heads must divide d_model"]), ("--model lstm --beta-max 1", ["no option"]),
    ("--device tpu", ["tpu is not there", "cpu"]), ("--lr nan", ["--lr"]),
    ("--batch 0", ["must lie in [1,", "got 0"]), ("--optimizer sgd", ["--optimizer"]),
    ("--stage-steps 5,5", ["5 stages", "[5, 5]"]), ("--stage-steps 5,0", ["--stage-steps"]),
    ("--format word --group S12", ["refused"]), ("--plugin nothing.py", ["nothing.py"])])
def test_bad_input_gets_one_line_and_leaves_nothing(options, words, tmp_path, refused):
    refused(main, [*options.split(), "--out", tmp_path / "run"], *words)
    assert not (tmp_path / "run").exists()


def test_a_run_is_never_overwritten_or_mistaken_for_another(tmp_path, refused):
    """A folder in use, other options, a damaged file, a result that training cannot go on from, a
    folder of something else: each refused, nothing lost."""
    folder = tmp_path / "run"
    command, path = [*SMALL, "--out", folder], folder / "model.pt"
    main([str(word) for word in command])
    whole, checkpoint = path.read_bytes(), checkpoint_of(folder)
    refused(main, command, "not empty", "--resume", "--out")
    refused(main, [*command, "--resume", "--seed", "1"], "other options", "seed 0 against 1")
    assert path.read_bytes() == whole
    for damage in (whole[:len(whole) // 2], whole.replace(whole[2000:2020], b"\xff" * 20)):
        path.write_bytes(damage)
        refused(main, [*command, "--resume"], "model.pt", "truncated")
        assert path.read_bytes() == damage
    del checkpoint["resume"]
    torch.save(checkpoint, path)
    evaluation.load_run(folder)
    refused(main, [*command, "--resume"], "cannot be resumed", str(folder))

    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("four years")
    for more in ([], ["--resume"]):
        refused(main, [*SMALL, "--out", foreign, *more], "not empty")
    assert [path.name for path in foreign.iterdir()] == ["thesis.tex"]


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path, refused):
    """As long as it does: its lock goes with it. A run stopped in its first seconds starts over."""
    with FileLock(tmp_path / "lock"):
        refused(main, [*SMALL, "--out", tmp_path], "another process trains in", "--out")
        assert {path.name for path in tmp_path.iterdir()} <= {"lock"}
    (tmp_path / "log.jsonl").write_text('{"step": 1')
    (tmp_path / "model.pt.partial").write_text("cut")
    main([*SMALL, "--out", str(tmp_path)])
    assert checkpoint_of(tmp_path)["progress"]["finished"]


# --- Processes beside the tests -------------------------------------------------------------------

def beside(name, *words):
    """Starts a process with a temporary folder, for the test of this name."""
    def start():
        place = tempfile.TemporaryDirectory()
        argv = [word.replace("PLACE", place.name) for word in words]
        return place, subprocess.Popen(
            [sys.executable, *argv], cwd=ROOT, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            stdout=open(f"{place.name}/shown", "w"), stderr=subprocess.STDOUT)

    EARLY[name] = start


def ended(name):
    """The folder of that process, and what it has shown."""
    place, process = EARLY[name]
    code = process.wait()
    shown = Path(place.name, "shown").read_text()
    assert code == 0, shown[-2000:]
    return place, shown


TRAIN_BOTH = """import sys, train
for beta_max in "21":
    train.main([*sys.argv[2:], "--beta-max", beta_max, "--out", f"{sys.argv[1]}/{beta_max}"])
"""
# README's ten seconds: 250 steps on up to 16 commands, and then 32 commands to read.
beside("test_three_variables_are_learned_with_beta_up_to_two_only", "-c", TRAIN_BOTH, "PLACE",
       *("--group S3 --d-model 32 --heads 2 --curriculum 2:1,8:2,16:4 --stage-steps 150,50,50 "
         "--test-lengths 32:8 --traces 64 --device cpu").split())
SHARED = [*SMALL, "--batch", "4"]
beside("test_two_processes_train_as_one", "-m", "torch.distributed.run", "--standalone",
       "--nproc-per-node", "2", "train.py", *SHARED, "--out", "PLACE/run")


def test_three_variables_are_learned_with_beta_up_to_two_only():
    """All reveals right with eigenvalues down to -1; near chance, 33%, with eigenvalues from 0."""
    place, _ = ended("test_three_variables_are_learned_with_beta_up_to_two_only")
    results = [json.loads(Path(place.name, beta, "result.json").read_text()) for beta in "21"]
    two, one = (result["results"][0]["all"] for result in results)
    assert two >= 0.95 and one <= 0.65


def test_two_processes_train_as_one(tmp_path):
    """Each takes its rows of the same batches: the same losses and weights, but for rounding; and
    one of them writes and prints."""
    place, shown = ended("test_two_processes_train_as_one")
    assert shown.count("trained 6 steps") == 1 and shown.count("(4,2)") >= 1
    main([*SHARED, "--out", str(tmp_path)])
    folders = (tmp_path, Path(place.name) / "run")
    one, other = [json.loads((folder / "log.jsonl").read_text()) for folder in folders]
    for name in ("loss", "reveal_loss", "reveal_accuracy", "tokens", "gradient_norm"):
        assert abs(one[name] - other[name]) < 1e-3, name
    one, other = [checkpoint_of(folder)["model"] for folder in folders]
    assert max((one[name] - other[name]).abs().max() for name in one) < 1e-3


def test_the_shares_of_the_processes_are_the_batch(monkeypatch):
    """Each trace is in one share, with what belongs to it; a batch that cannot be shared in equal
    parts is refused."""
    batch = S3.training_batch(6, 4, 2, np.random.default_rng(0))._replace(best=np.arange(6))
    shares = [trainer.rows_of(batch, rank, 3) for rank in range(3)]
    for share in shares:
        assert len(share.best) == 2 and (batch.inputs[share.best] == share.inputs).all()
    assert sorted(np.concatenate([share.best for share in shares])) == [*range(6)]
    for name, value in (("is_initialized", True), ("get_rank", 0), ("get_world_size", 4)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    with pytest.raises(UserError, match="6 traces cannot be shared by 4 processes"):
        train(small_model(), S3, small_recipe(batch=6))


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # inside torch
def test_compiled_training_is_the_same_and_leaves_out_the_scan(monkeypatch):
    """The graphs are run as they are, bit for bit: to compile them takes half a minute."""
    graphs, compiler = [], torch.compile

    def keep(graph, _):
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiler(
        function, dynamic=dynamic, backend=keep))
    weights = []
    for flag in (False, True):
        recipe = small_recipe(curriculum=[(4, 2)], last_steps=1, compile=flag)
        model, _ = train(small_model(), S3, recipe, quiet=True)
        weights.append(model.state_dict())
        assert bool(graphs) == flag
    assert same(*weights)
    assert "conv2d" in "".join(graphs) and "solve_triangular" not in "".join(graphs)
