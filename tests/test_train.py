"""A run is what its recipe says. It survives interruption, and a resumed run is the run, bit for
bit."""

import itertools
import json
import math
import os
import random
import resource
import subprocess
import sys
from functools import partial
from unittest.mock import Mock

import data
import eval as evaluation
import pytest
import torch
import train as trainer
from conftest import ROOT, SMALL
from data import Group, ReplTask, UserError, generator
from models import MODELS, LinRNN
from torch import nn
from train import Progress, Recipe, main, next_token_loss, share_of_peak, train

S3 = ReplTask(Group("S3"))  # 16 symbols


def small_recipe(**changes):
    """That of SMALL, but for its 12 last steps: 15 steps in all."""
    return Recipe(**{"curriculum": [(2, 1), (4, 2)], "batch": 2, "advance": -1.0, "last_steps": 12}
                  | changes)


def small_model():
    torch.manual_seed(0)
    return LinRNN(16, d_model=8, heads=2)


def train_small(**changes):
    return train(small_model(), S3, small_recipe(**changes), quiet=True)


def checkpoint_of(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def same(one, other):
    """Whether two checkpoints are equal bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


# --- The recipe -----------------------------------------------------------------------------------

@pytest.mark.parametrize("changes, accuracies, stages, learned", [
    ({}, (1, 1, .5, 1, 1, 1, 0, 0), [0] * 6 + [1] * 2, 1),  # after three good batches; then a count
    ({}, (1, 1, .9, 1, 1, 1, 0, 0), [0] * 6 + [1] * 2, 1),  # 0.9 is not above 0.9
    ({}, (1, None, 1, None, 1, 0, 0), [0] * 5 + [1] * 2, 1),  # None neither adds nor ends
    ({"last_steps": 4}, (1, 1, 1, 1, 1, 1, 0), [0] * 3 + [1] * 4, 2),  # the last one, too
    ({"last_steps": 4}, (1, 1, 1, 1, 1, 0, 1), [0] * 3 + [1] * 4, 1),  # a streak begins anew
    ({"max_steps": 4}, (1, 1, 0, 1), [0] * 4, 0),  # not passed
    ({"max_steps": 3}, (1, 1, 1, 0, 1), [0] * 3 + [1] * 2, 1),  # passed at the last moment
    ({"stage_steps": [5, 1], "max_steps": 2}, (1, 1, 1, 1, 0, 1), [0] * 5 + [1], 1),
    ({"stage_steps": [2, 3]}, (1, 1, 1, 1, 1), [0] * 2 + [1] * 3, 2)])
def test_a_stage_ends_as_the_recipe_says(changes, accuracies, stages, learned):
    """learned is the number, from 1, of the last stage that has had its streak."""
    recipe = Recipe(**{"curriculum": [(2, 1), (4, 1)], "advance": 0.9, "last_steps": 2,
                       "max_steps": 100} | changes)
    progress = Progress()
    for step, (accuracy, stage) in enumerate(zip(accuracies, stages, strict=True)):
        assert not progress.finished and (progress.step, progress.stage) == (step, stage)
        progress.advance(recipe, accuracy)
    assert progress.finished and progress.learned == learned


def test_the_rates_rise_once_in_a_run_and_stay():
    """In step i of the first 50 the rate is i / 50 of its peak, whatever the stage."""
    for step, stage in itertools.product((0, 24, 49, 400), (0, 1)):
        progress = Progress(step=step, stage=stage)
        assert share_of_peak(Recipe(), progress) == min(1, (step + 1) / 50)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer, kind", [("muon", torch.optim.Muon),
                                             ("adamw", torch.optim.AdamW)])
def test_each_parameter_is_in_one_optimizer_and_muon_has_inner_matrices_only(name, optimizer, kind):
    """Embedding and unembedding are tables of vectors, not inner matrices. Both optimisers shrink
    the weights, and AdamW forgets its squares after some twenty steps."""
    model = MODELS[name](22)
    tables = {model.embedding.weight, model.unembedding.weight}
    recipe = Recipe(optimizer=optimizer, lr=0.1, matrix_lr=0.2, weight_decay=0.3)
    matrices, others = trainer.make_optimizers(model, recipe)
    assert type(matrices) is kind and type(others) is torch.optim.AdamW

    (inner,), (outer,) = matrices.param_groups, others.param_groups
    assert {*inner["params"]} == {x for x in model.parameters() if x.ndim == 2} - tables
    assert {*outer["params"]} == {*model.parameters()} - {*inner["params"]}

    assert (inner["lr"], outer["lr"]) == (0.2, 0.1)
    assert inner["weight_decay"] == outer["weight_decay"] == 0.3
    for group in (inner, outer):
        assert group.get("betas", (0.9, 0.95)) == (0.9, 0.95)


# For each option a value that no run has by default: as it is typed, and what it means.
ANOTHER = {"model": "lstm", "group": "Z7", "commands": "swap", "optimizer": "adamw",
           "curriculum": "6:3", "stage_steps": "3,4,5,6,7"}
MEANT = {"curriculum": [(6, 3)], "stage_steps": [3, 4, 5, 6, 7], "compile": True}


def typed_differently(config):
    """Of each option that determines a run: its name, what is typed, and the value it then has."""
    names = {**config, **config["options"]}.keys()
    for name in names - {"task", "options", "lengths", "traces"}:
        words = [f"--{name.replace('_', '-')}"]
        if name != "compile":
            words.append(ANOTHER.get(name, "7"))
        yield name, words, MEANT.get(name, ANOTHER.get(name, 7))


def test_what_the_user_types_wins_over_every_default(monkeypatch):
    """Each option of the model, of the task and of the recipe, on S6, whose rates and whose local
    block are not those of S5. What is not typed is the default."""
    found = []
    monkeypatch.setattr(trainer, "make", lambda config: ())
    monkeypatch.setattr(trainer, "train_run", lambda config, typed: found.append(config))

    def config_of(*words):
        main(words)
        return found.pop()

    default = config_of("--group", "S6")
    assert default["options"] == {"d_model": 64, "heads": 4, "layers": 1, "beta_max": 2.0,
                                  "householders": 1, "conv_width": 9}
    for name, words, value in typed_differently(default):
        config = config_of("--group", "S6", *words)
        if name in ("model", "group"):  # other defaults depend on these
            assert config[name] == value
        elif name in default["options"]:
            assert config == default | {"options": default["options"] | {name: value}}
        else:
            assert config == default | {name: value}

    for name, fall in (("S3", 1), ("S5", 1), ("S6", 5 / 6), ("S7", 5 / 7)):
        config = config_of("--group", name)
        rates = [config["lr"], config["matrix_lr"]]
        assert rates == pytest.approx([4e-3 * fall, 0.02 * fall**0.5])


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
    recipe = small_recipe(stage_steps=[1, 2], seed=7, reveal_weight=9.0)
    result, log = train(small_model(), S3, recipe, rate_of=lambda *_: 0.5,
                        averaged=lambda *_: False, quiet=True)

    model = small_model()
    weights = [*model.parameters()]
    rates = [0.5] + [0.2] * (len(weights) - 1)
    for step, stage in enumerate([(2, 1), (4, 2), (4, 2)]):
        batch = S3.training_batch(2, *stage, generator(7, "train", step))
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


@pytest.mark.parametrize("changes, hooks, first", [
    ({}, {}, 3), ({"curriculum": [(4, 2)]}, {}, 3),
    ({"curriculum": [(2, 1), (2, 1), (4, 2)]}, {}, 6),
    ({"advance": 2.0, "curriculum": [(4, 2)]}, {}, -1),
    ({}, {"averaged": lambda recipe, progress: progress.step >= 9}, 9),
    ({}, {"averaged": lambda recipe, progress: False}, -1)])
def test_the_result_is_the_mean_of_the_last_stages_weights_once_a_stage_is_learned(
        changes, hooks, first):
    """Each step counts equally. The model itself holds the last weights. A hook says otherwise."""
    weights = []

    def loss_of(model, batch, recipe):
        weights.append(model.unembedding.weight.detach().clone())
        return next_token_loss(model, batch, recipe)

    model = small_model()
    result, log = train(model, S3, small_recipe(**changes), loss_of=loss_of, quiet=True, **hooks)
    after = [*weights[1:], model.unembedding.weight.detach()]
    assert len(after) == log[-1]["step"] and not result.training
    expected = torch.stack(after[first:]).mean(0)
    assert (result.unembedding.weight - expected).abs().max() < 1e-6


def test_a_run_ends_with_the_step_that_reaches_the_most_tokens_and_logs_each_tenth(
        tmp_path, monkeypatch):
    """On a clock by which each step takes a minute; all of them count. What was learned till then
    is saved. The model has no name, so eval.load cannot make it, nor --resume."""
    ticks = itertools.count()
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: 60.0 * next(ticks))
    tokens = 2 * (15 + 9 * 4 + 22 - 1)  # of a step
    recipe = small_recipe(curriculum=[(4, 2)], last_steps=99)
    _, log = train(small_model(), S3, recipe, tmp_path, max_tokens=23 * tokens, quiet=True)
    rows = [(row["step"], row["seconds"], row["tokens"], row["finished"]) for row in log]
    assert rows == [(step, 60 * step, step * tokens, False) for step in (10, 20, 23)]
    checkpoint = checkpoint_of(tmp_path)
    assert checkpoint["log"] == log and checkpoint["progress"]["step"] == 23
    for read in (evaluation.load, lambda folder: main(["--resume", str(folder)])):
        with pytest.raises(UserError):
            read(tmp_path)


def test_a_gradient_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(
        tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "SAVE_EVERY", 4)
    with pytest.raises(UserError, match="step 6: the gradient is not finite"):
        train(small_model(), S3, small_recipe(), tmp_path, quiet=True,
              rate_of=lambda recipe, progress: math.nan if progress.step == 5 else 1.0)
    checkpoint = checkpoint_of(tmp_path)
    assert checkpoint["progress"]["step"] == 4
    assert all(weight.isfinite().all() for weight in checkpoint["weights"].values())


# --- The run folder -------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("owner, function", [
    pytest.param(trainer, "to_tensors", id="Ctrl-C"), pytest.param(os, "fsync", id="power cut")])
def test_a_run_that_was_cut_and_resumed_is_that_of_the_library_bit_for_bit(
        owner, function, seed, tmp_path, monkeypatch):
    """Cut at a random step, or while a checkpoint is written: in the end the weights, their mean,
    the optimisers and the log of a run never cut. To resume it once more changes nothing. And
    train() alone has this result and this log, in memory."""
    monkeypatch.setattr(trainer, "SAVE_EVERY", 4)
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: 0.0)  # the clock is not the run
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    command = [*SMALL, *f"--seed {seed} --last-steps 12 --out".split()]  # 15 steps
    main([*command, str(whole)])

    real, counter = getattr(owner, function), itertools.count(1)
    calls = random.Random(seed).randint(2, 15 if owner is trainer else 5)

    def cut(*arguments):
        if next(counter) == calls:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, function, cut)
        main([*command, str(resumed)])
    assert not checkpoint_of(resumed)["progress"]["finished"]

    for _ in range(2):
        main(["--resume", str(resumed), *"--lengths 4:2 --traces 4".split()])
        one = checkpoint_of(whole)
        assert same(one, checkpoint_of(resumed))
        assert results_of(whole) == results_of(resumed)

    torch.manual_seed(seed)
    model = LinRNN(len(S3.vocab), d_model=8, heads=2, conv_width=S3.conv_width)
    model, log = train(model, S3, small_recipe(seed=seed), quiet=True)
    assert same(dict(model.state_dict()), dict(one["model"])) and log == one["log"]


def test_the_library_resumes_what_is_there_and_overwrites_nothing(tmp_path):
    """resume=True starts a folder that has no run. Without it a run is never overwritten, and a
    recipe that differs is refused."""
    _, log = train(small_model(), S3, small_recipe(), tmp_path, resume=True, quiet=True)
    whole = (tmp_path / "model.pt").read_bytes()
    with pytest.raises(UserError, match="holds a run already"):
        train(small_model(), S3, small_recipe(), tmp_path, quiet=True)
    with pytest.raises(UserError, match="another lr"):
        train(small_model(), S3, small_recipe(lr=0.1), tmp_path, resume=True, quiet=True)
    assert (tmp_path / "model.pt").read_bytes() == whole
    assert train(small_model(), S3, small_recipe(), tmp_path, resume=True, quiet=True)[1] == log


def test_the_same_command_twice_makes_two_folders(tmp_path, monkeypatch, refused):
    """Nothing is lost, and nothing refused; a folder of one's own choice must be new."""
    monkeypatch.chdir(tmp_path)
    main(SMALL)
    first = (tmp_path / "runs/linrnn-S3-seed0/model.pt").read_bytes()
    main(SMALL)
    main([*SMALL, "--model", "linrnn", "--seed", "1"])
    names = [f"linrnn-S3-seed{name}" for name in ("0", "0-2", "1")]
    assert sorted(path.name for path in tmp_path.glob("runs/*")) == names
    assert (tmp_path / "runs/linrnn-S3-seed0/model.pt").read_bytes() == first
    assert {path.name for path in tmp_path.glob("runs/*/*")} == {"model.pt", "results.json"}
    refused(main, [*SMALL, "--out", tmp_path], str(tmp_path), "--resume")


def test_resume_compares_every_option_that_determines_a_run(small_run, refused, capsys):
    """Each option but those of the closing table and of the device is refused, by name, where it
    differs from the run's; an equal one is not."""
    for name, words, _ in typed_differently(checkpoint_of(small_run)["config"]):
        refused(main, ["--resume", small_run, *words], name)
    refused(main, ["--resume", small_run, "--out", "elsewhere"], "out")

    main([*SMALL, "--resume", str(small_run), *"--lengths 6:3 --traces 3".split()])
    assert "(6,3)" in capsys.readouterr().out


@pytest.mark.parametrize("options", [
    "--model transformer", "--model lstm --commands swap", "--optimizer adamw --beta-max 1",
    "--householders 2 --stage-steps 4,5"])
def test_one_loop_trains_every_model_and_its_folder_tells_what_came_out(options, tmp_path, capsys):
    """A finished run that is resumed prints its table again, and changes nothing."""
    small = " ".join(SMALL).replace("--heads 2", "").split()
    folder = tmp_path / "run"
    main([*small, *options.split(), "--out", str(folder)])
    first, whole = capsys.readouterr().out, checkpoint_of(folder)
    assert "(4,2)" in first and f"run folder {folder}" in first

    task, model = evaluation.load(folder)
    result = results_of(folder)
    assert result["config"] == json.loads(json.dumps(whole["config"]))
    assert result["results"] == [evaluation.evaluate(model, task, 4, 2, 4)]
    assert result["steps"] == whole["progress"]["step"] == (9 if "steps" in options else 6)
    assert result["learned"] == 2 and "NOT LEARNED" not in first
    assert result["parameters"] == sum(weight.numel() for weight in model.parameters())

    main(["--resume", str(folder), *"--lengths 4:2 --traces 4 --device cpu".split()])
    assert capsys.readouterr().out == first
    assert same(checkpoint_of(folder), whole)
    assert results_of(folder) == result


@pytest.mark.parametrize("options, stage", [
    ("--advance 2 --max-steps 3", "1 of 2"), ("--stage-steps 3,2", "2 of 2"),
    ("--stage-steps 2,2", "1 of 2")])
def test_a_run_that_has_not_learned_a_stage_says_so(options, stage, tmp_path, capsys):
    """The last stage, too: at 2 steps no stage can have a streak of 3."""
    main([*SMALL, *options.split(), "--out", str(tmp_path / "run")])
    assert capsys.readouterr().out.splitlines()[-1] == f"NOT LEARNED: stage {stage}"


def test_a_full_disk_leaves_the_checkpoint_that_was_there(tmp_path, monkeypatch, capsys):
    """A write that really fails, in the midst of the file of step 8: the run goes on from that of
    step 4."""
    monkeypatch.setattr(trainer, "SAVE_EVERY", 4)
    folder = tmp_path / "run"
    real, counter = trainer.replace_file, itertools.count()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def replace_file(path, content):
        size = 10_000 if next(counter) == 2 else limits[0]  # a checkpoint has some 80,000 bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            real(path, content)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(trainer, "replace_file", replace_file)
    with pytest.raises(SystemExit, match="2"):
        data.run(lambda: main([*SMALL, "--last-steps", "9", "--out", str(folder)]))
    assert "error: [Errno 27] File too large" in capsys.readouterr().err
    assert checkpoint_of(folder)["progress"]["step"] == 4
    main(["--resume", str(folder), "--traces", "2"])
    assert checkpoint_of(folder)["progress"]["step"] == 12


# --- Refusals, Ctrl-C, a closed pipe --------------------------------------------------------------

@pytest.mark.parametrize("command", [
    "train.py --gruop S5", "train.py --group ''", "train.py --group S27", "train.py --group A2",
    "train.py --group S5x", "train.py --group A5 --commands swap", "train.py --heads 5",
    "train.py --model transformer --d-model 12", "train.py --beta-max 3",
    "train.py --model lstm --beta-max 1", "train.py --curriculum 10:4", "train.py --curriculum x",
    "train.py --stage-steps 5,5", "train.py --lengths 4:0", "train.py --device cuda",
    "train.py --device sofa", "train.py --resume nowhere", "eval.py nowhere",
    "eval.py RUN --lengths 10:4", "eval.py RUN --plot x.txt", "eval.py RUN --plot no/where.png",
    "data.py --length 5", "data.py --group Q8"])
def test_what_a_user_can_get_wrong_is_refused_in_one_line(command, small_run, refused, tmp_path,
                                                          monkeypatch):
    """By exit code 2, before any work, and without a trace on the disk."""
    monkeypatch.chdir(tmp_path)
    script, *words = command.replace("''", "EMPTY").replace("RUN", str(small_run)).split()
    function = {"train.py": main, "eval.py": evaluation.main, "data.py": data.main}[script]
    refused(function, ["" if word == "EMPTY" else word for word in words])
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("content", [
    b"", b"\x80\x02}", b"thesis", [1, 2], {"model": {}}, {"config": {"seed": 0}, "model": {}},
    {"config": {"task": "words"}, "model": {}}, "cut", "result only"])
def test_a_checkpoint_that_is_cut_or_foreign_is_refused_in_one_line(content, small_run, tmp_path,
                                                                    refused):
    """Both by eval.py and by --resume. A result without what training needs can be evaluated."""
    path = tmp_path / "model.pt"
    if content == "cut":
        path.write_bytes((small_run / "model.pt").read_bytes()[:-1000])
    elif content == "result only":
        whole = checkpoint_of(small_run)
        torch.save({"config": whole["config"], "model": whole["model"]}, path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)

    before = path.read_bytes()
    refused(main, ["--resume", tmp_path])
    if content != "result only":
        refused(evaluation.main, [tmp_path])
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def test_a_closed_pipe_ends_a_program_in_silence_and_loses_no_results(tmp_path):
    """As `| head -1` does."""
    for words in (["data.py"], ["scan.py"], ["train.py", *SMALL, "--out", str(tmp_path / "run")]):
        talker = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True)
        if words[0] == "train.py":  # its first line is there at once; the others flush at their end
            assert "parameters" in talker.stdout.readline()
        talker.stdout.close()
        told = talker.stderr.read()
        talker.stderr.close()
        assert talker.wait() == 1 and "Traceback" not in told and "Broken" not in told, told
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


def test_two_processes_train_as_one(tmp_path):
    """Each takes its rows of the same batches: ten steps have the same losses and weights. In
    float64, since an optimiser may turn a difference in rounding into another step. One of the two
    writes and prints."""
    driver = tmp_path / "double.py"
    driver.write_text(f"import sys, torch\nsys.path.insert(0, {str(ROOT)!r})\nimport train\n"
                      "torch.set_default_dtype(torch.float64)\ntrain.main()\n")
    processes = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = []
    for launcher in ([], processes):
        out = tmp_path / f"run{len(found)}"
        shown = subprocess.run(
            [sys.executable, *launcher, str(driver), *SMALL, "--batch", "4", "--last-steps", "7",
             "--out", str(out)], env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True, text=True, check=True).stdout
        assert shown.count("trained 10 steps") == 1 and shown.count("(4,2)") == 1
        found.append(checkpoint_of(out))

    one, two = found
    assert one["model"]["embedding.weight"].dtype == torch.float64
    torch.testing.assert_close(one["model"], two["model"], rtol=0, atol=1e-10)
    for name in ("loss", "reveal_loss", "reveal_accuracy", "tokens", "gradient_norm"):
        assert abs(one["log"][-1][name] - two["log"][-1][name]) < 1e-10, name


def test_a_batch_that_the_processes_cannot_share_is_refused(monkeypatch):
    """Unequal shares would make another mean."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    with pytest.raises(UserError, match="batch of 16 traces cannot be shared by 3 processes"):
        train_small(batch=16)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # inside torch
def test_compiled_training_is_the_same(monkeypatch):
    """The graphs are run as they are, bit for bit: to compile them takes half a minute."""
    compiler = Mock(side_effect=partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch, "compile", compiler)
    plain, _ = train_small(last_steps=1)
    assert not compiler.called
    compiled, _ = train_small(last_steps=1, compile=True)
    assert compiler.called
    torch.testing.assert_close(plain.state_dict(), compiled.state_dict(), rtol=0, atol=0)
