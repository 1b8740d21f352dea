"""A run is a folder that survives interruption, and a resumed run is the run, bit for bit."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import train
from conftest import ROOT
from train import Run, load_run, main

SMALL = ["--group", "S3", "--curriculum", "2:1,4:2", "--d-model", "8", "--heads", "2",
         "--batch", "4", "--advance", "-1", "--last-steps", "12", "--save-every", "4"]


def weights(folder):
    return torch.load(folder / "model.pt", weights_only=True)["model"]


def assert_identical(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def steps_logged(folder):
    return [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture
def quick(monkeypatch):
    """Skip the closing evaluation, which the tests of eval.py cover."""
    monkeypatch.setattr("eval.evaluate_and_print", lambda *_, **__: [])


@pytest.mark.parametrize("how, options", [
    ("SIGINT", []), ("SIGTERM", []), ("SIGINT", ["--codes", "4", "--curriculum", "2:1,8:2"])])
def test_an_interrupted_and_resumed_run_is_bit_identical(how, options, tmp_path, quick,
                                                         monkeypatch):
    """Stopped by a signal in the middle of a stage, resumed: the weights and the log of a run never
    stopped, the noise that a CleanUp learns from included."""
    small = [*SMALL, *options]
    main([*small, "--out", str(tmp_path / "whole")])

    real_step, made = train.train_step, []

    def step_then_signal(*args):
        made.append(1)
        if len(made) == 6:
            os.kill(os.getpid(), getattr(signal, how))
        return real_step(*args)

    monkeypatch.setattr(train, "train_step", step_then_signal)
    with pytest.raises(SystemExit) as stop:
        main([*small, "--out", str(tmp_path / "cut")])
    assert stop.value.code == 130 and len(made) == 6
    main([*small, "--out", str(tmp_path / "cut"), "--resume"])
    assert len(made) == 15
    assert_identical(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    assert steps_logged(tmp_path / "cut") == steps_logged(tmp_path / "whole") == [10, 15]


def test_a_memory_learns_in_the_last_stage_from_the_mean_model_and_leaves_the_network_alone(
        tmp_path, quick, monkeypatch):
    """Bit for bit the weights of the run without it; its states are those of the model that is
    saved; its loss falls; and it is no mean: the checkpoint holds the same one twice."""
    options = [*SMALL, "--curriculum", "16:2,16:4", "--last-steps", "20"]
    real_step, models = train.memory_step, []
    monkeypatch.setattr(train, "memory_step",
                        lambda model, *args: models.append(model) or real_step(model, *args))
    main([*options, "--out", str(tmp_path / "plain")])
    main([*options, "--codes", "4", "--out", str(tmp_path / "codes")])
    plain, codes = weights(tmp_path / "plain"), weights(tmp_path / "codes")
    memory = {name for name in codes if "clean_up" in name}
    assert len(models) == 20
    assert_identical(models[-1].state_dict(), codes)
    assert_identical(plain, {name: codes[name] for name in codes if name not in memory})
    last = torch.load(tmp_path / "codes" / "model.pt", weights_only=True)["resume"]["model"]
    assert len(memory) == 5 and all(torch.equal(last[name], codes[name]) for name in memory)
    log = [json.loads(line) for line in (tmp_path / "codes" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["denoising_loss"] < log[0]["denoising_loss"]


def test_a_killed_run_resumes_from_its_last_checkpoint(tmp_path, quick):
    """kill -9 loses at most the steps since the last checkpoint, and none of the result."""
    long = [*SMALL, "--last-steps", "60"]
    process = subprocess.Popen(
        [sys.executable, "train.py", *long, "--out", str(tmp_path / "cut")], cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # as here: the bits depend on it
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "cut" / "log.jsonl").exists() or not steps_logged(tmp_path / "cut"):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    process.kill()
    process.wait()
    step = torch.load(tmp_path / "cut" / "model.pt", weights_only=True)["progress"]["step"]
    assert step % 4 == 0 and 8 <= step < 63
    main([*long, "--out", str(tmp_path / "cut"), "--resume"])
    main([*long, "--out", str(tmp_path / "whole")])
    assert_identical(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    assert steps_logged(tmp_path / "cut") == steps_logged(tmp_path / "whole")


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(
        tmp_path, quick, monkeypatch, refused):
    """Weights ruined before step 7: its loss tells, and they are not saved."""
    real_step, made = train.train_step, []

    def ruin_then_step(model, *rest):
        made.append(1)
        if len(made) == 7:
            model.head.weight.data.fill_(math.nan)
        return real_step(model, *rest)

    monkeypatch.setattr(train, "train_step", ruin_then_step)
    refused(main, [*SMALL, "--out", tmp_path / "run"],
            "the loss is nan", "step 7", "last good one", "--lr")
    assert torch.load(tmp_path / "run" / "model.pt", weights_only=True)["progress"]["step"] == 4
    assert all(w.isfinite().all() for w in weights(tmp_path / "run").values())


def test_a_crash_while_saving_leaves_the_old_checkpoint(tmp_path, quick, monkeypatch):
    """The file is replaced by a rename: half a file is never called model.pt."""
    main([*SMALL, "--out", str(tmp_path)])
    before = (tmp_path / "model.pt").read_bytes()

    def half(_, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        Run(load_run(tmp_path)[0], tmp_path, "cpu").save()
    monkeypatch.undo()
    monkeypatch.setattr(os, "replace", lambda side, path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Run(load_run(tmp_path)[0], tmp_path, "cpu").save()
    assert (tmp_path / "model.pt").read_bytes() == before


def test_a_model_without_its_optimisers_is_evaluated_but_not_resumed(tmp_path, quick, refused):
    main([*SMALL, "--out", str(tmp_path)])
    checkpoint = torch.load(tmp_path / "model.pt", weights_only=True)
    checkpoint.pop("resume")
    torch.save(checkpoint, tmp_path / "model.pt")
    load_run(tmp_path)
    refused(main, [*SMALL, "--out", tmp_path, "--resume"], "not resumed", str(tmp_path))


def test_a_run_of_a_version_without_an_option_is_refused_by_its_name(tmp_path, quick):
    main([*SMALL, "--out", str(tmp_path)])
    checkpoint = torch.load(tmp_path / "model.pt", weights_only=True)
    checkpoint["config"].pop("hold_out_pairs")
    torch.save(checkpoint, tmp_path / "model.pt")
    (tmp_path / "config.json").write_text(json.dumps(checkpoint["config"]))
    with pytest.raises(ValueError, match="hold_out_pairs"):
        load_run(tmp_path)


@pytest.mark.parametrize("options", [
    ["--model", "transformer"], ["--model", "lstm"],
    ["--format", "word", "--curriculum", "2:1,4:1"], ["--commands", "swap"],
    ["--householders", "2"], ["--beta-max", "1"], ["--codes", "4"]])
def test_one_loop_trains_every_model_and_format(options, tmp_path, capsys):
    """Trained, evaluated and recorded in one call; the record says how to make the run again."""
    record = tmp_path / "results.jsonl"
    sizes = ["--group", "S3", "--curriculum", "2:1,4:2", "--batch", "4", "--advance", "-1",
             "--last-steps", "3", "--d-model", "16"]
    main([*sizes, *options, "--out", str(tmp_path / "run"), "--record", str(record),
          "--test-lengths", "8:1", "--traces", "8"])
    shown = capsys.readouterr().out
    assert "chance" in shown and "(8,1)" in shown
    line = json.loads(record.read_text())
    assert line["steps"] == 6 and line["torch"] == torch.__version__
    assert line["results"][0]["length"] == 8
    assert line["command"].startswith("python train.py --group S3") and line["seed"] == 0


def test_a_record_names_the_commit_and_only_changed_code_makes_it_dirty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for name in ("code.py", "records.jsonl"):
        (tmp_path / name).touch()
    for ask in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *ask], check=True)
    commits = []
    for changed in ("records.jsonl", "code.py"):
        (tmp_path / changed).write_text("# changed\n")
        train.append_record("records.jsonl", ["train.py"], {})
        commits.append(json.loads((tmp_path / "records.jsonl").read_text().splitlines()[-1]))
    clean, dirty = [line["commit"] for line in commits]
    assert len(clean) >= 7 and dirty == f"{clean}-dirty"


def test_a_stage_is_left_after_three_good_batches_and_the_last_by_count():
    config = {"curriculum": [[2, 1], [4, 1]], "advance": 0.9, "last_steps": 2, "max_steps": 100,
              "stage_steps": None}
    assert stages_of(config, (1, 1, 0.5, 1, 1, 1, 0, 0)) == [0] * 6 + [1, 1]


def test_with_stage_steps_the_accuracy_decides_nothing():
    config = {"curriculum": [[2, 1], [4, 1], [8, 1]], "advance": 0.9, "last_steps": 9,
              "max_steps": 2, "stage_steps": [4, 1, 3]}
    assert stages_of(config, (1, 1, 1, 0, 0, 1, 0, 1)) == [0] * 4 + [1] + [2] * 3


def stages_of(config, accuracies):
    """The stage of each step, given the accuracy it measures; finished after the last, not before.
    """
    progress = {"step": 0, "stage": 0, "stage_step": 0, "streak": 0, "finished": False}
    stages = []
    for accuracy in accuracies:
        assert not progress["finished"]
        stages.append(progress["stage"])
        train.advance(config, progress, accuracy)
    assert progress["finished"]
    return stages


def test_a_task_that_is_not_learned_ends_after_max_steps(tmp_path, quick, capsys):
    main(["--group", "S3", "--curriculum", "2:1,4:2", "--d-model", "8", "--heads", "2",
          "--batch", "2", "--advance", "1.0", "--max-steps", "5", "--out", str(tmp_path)])
    assert "NOT LEARNED: stage 1 was not passed in 5 steps" in capsys.readouterr().out


def test_bad_input_gets_one_line_and_exit_code_2(tmp_path, quick, refused):
    out = ["--out", tmp_path / "run"]
    for options, words in [
            (["--group", "Q8"], ["unknown group 'Q8'"]), (["--group", "S27"], ["27", "26"]),
            (["--curriculum", "10:4"], ["multiple"]), (["--curriculum", "8"], ["LENGTH:SPACING"]),
            (["--beta-max", "2.5"], ["[0, 2]"]), (["--heads", "5"], ["heads must divide d_model"]),
            (["--model", "lstm", "--beta-max", "1"], ["lstm has no --beta-max"]),
            (["--model", "gru"], ["invalid choice"]), (["--speed", "9"], ["unrecognized"]),
            (["--device", "tpu"], ["tpu is not there", "cpu"]),
            (["--batch", "0"], ["must be positive", "got 0"]), (["--lr", "x"], ["--lr"]),
            (["--seed", "-1"], ["negative"]),
            (["--stage-steps", "5,5"], ["each of the 5 stages", "got 5,5"]),
            (["--hold-out-pairs", "1"], ["at least one on either side", "120"]),
            (["--hold-out-pairs", "inf"], ["at least one on either side"]),
            (["--hold-out-pairs", "0.1", "--format", "word"], ["--hold-out-pairs", "word"]),
            (["--group", "A5", "--commands", "swap"], ["transpositions"]),
            (["--format", "word", "--curriculum", "8:2"], ["spacing must be 1"]),
            (["--record", tmp_path], ["is a folder"]),
            (["--resume"], ["config.json is missing"])]:
        refused(main, [*options, *out], *words)
        assert not (tmp_path / "run").exists()


def test_a_run_is_never_overwritten_or_mistaken_for_another(tmp_path, quick, refused):
    """Another run's folder, other options, a truncated file, another run's weights: each refused,
    nothing lost."""
    run, other = tmp_path / "run", tmp_path / "other"
    main([*SMALL, "--out", str(run)])
    main([*SMALL, "--seed", "1", "--out", str(other)])
    whole = (run / "model.pt").read_bytes()
    refused(main, [*SMALL, "--out", run], "not empty", "--resume", "--out")
    refused(main, [*SMALL, "--out", run, "--resume", "--seed", "1"],
            "other options", "seed 0 against 1")
    assert (run / "model.pt").read_bytes() == whole
    for damage, words in [(whole[:len(whole) // 2], "truncated"), (b"", "truncated"),
                          ((other / "model.pt").read_bytes(), "seed 1 against 0")]:
        (run / "model.pt").write_bytes(damage)
        with pytest.raises(ValueError, match=words):
            load_run(run)
        refused(main, [*SMALL, "--out", run, "--resume"], words)
    (run / "model.pt").unlink()
    refused(main, [*SMALL, "--out", run, "--resume"], "model.pt is missing")


def test_the_model_of_a_run_is_the_mean_of_the_weights_of_its_last_stage(
        tmp_path, quick, monkeypatch):
    """All steps of the last stage count equally, and none of those before."""
    seen, real_step = [], train.train_step

    def remember(model, *rest):
        metrics = real_step(model, *rest)
        seen.append(model.head.weight.detach().clone())
        return metrics

    monkeypatch.setattr(train, "train_step", remember)
    main([*SMALL, "--out", str(tmp_path)])
    assert len(seen) == 15
    assert (weights(tmp_path)["head.weight"] - torch.stack(seen[3:]).mean(0)).abs().max() < 1e-6


def test_the_default_folder_names_what_differs_from_the_defaults(tmp_path, quick, monkeypatch):
    """Two arms of one comparison never meet in one folder."""
    monkeypatch.chdir(tmp_path)
    main([*SMALL, "--beta-max", "1", "--seed", "3"])
    main([*SMALL, "--seed", "3"])
    first, second = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert first.startswith("linrnn-S3-beta_max_1.0-") and first.endswith("-seed3")
    assert second == first.replace("beta_max_1.0-", "")


def test_every_step_draws_fresh_traces_and_the_reveal_weight_counts(tmp_path, quick, monkeypatch):
    """No batch is seen twice in a run; runs with another weight in the loss see the same ones."""
    seen, real_step = [], train.train_step

    def remember(model, optimizers, inputs, *rest):
        seen.append(inputs.numpy().tobytes())
        return real_step(model, optimizers, inputs, *rest)

    monkeypatch.setattr(train, "train_step", remember)
    for weight in ("0", "1"):
        main([*SMALL, "--reveal-weight", weight, "--out", str(tmp_path / weight)])
    assert len(set(seen)) == 15 and seen[:15] == seen[15:]
    one, other = weights(tmp_path / "0"), weights(tmp_path / "1")
    assert not torch.equal(one["head.weight"], other["head.weight"])
