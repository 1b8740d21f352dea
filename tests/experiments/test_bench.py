"""All that is timed is the delta rule, and what is printed about it is true."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import scan
import train
from experiments import bench
from experiments.bench import FORMS, largest_error, main, measure, random_inputs
from scan import delta_rule_recurrent

SMALL_BENCH = "--batch 2 --heads 1 --width 4 --rounds 1".split()


def test_the_forms_compute_values_and_gradients_of_the_delta_rule():
    """Against the loop in float64, T = 45 not a multiple of any chunk. The gradients are those of
    the weighted sum of the output."""
    inputs, g_out = random_inputs((2, 3, 45, 7), "cpu")
    inputs, g_out = [x.detach().double().requires_grad_() for x in inputs], g_out.double()
    out, _ = delta_rule_recurrent(*inputs)
    expected = [out, *torch.autograd.grad((out * g_out).sum(), inputs)]
    for name in ("loop", "textbook", "autograd", "C=16", "C=32", "C=64"):
        _, results = measure(FORMS[name], inputs, g_out)
        assert len(results) == 5 and largest_error(results, expected) < 1e-10


def test_the_gradient_of_the_output_is_a_dense_tensor():
    """That of out.sum() is one number, expanded: a form could gain from it."""
    inputs, g_out = random_inputs((2, 3, 45, 7), "cpu")
    assert g_out.shape == (2, 3, 45, 7) and g_out.is_contiguous() and g_out.unique().numel() > 1800
    assert all(x.requires_grad for x in inputs)


def test_a_wrong_form_ends_the_program_in_one_line(capsys, monkeypatch):
    """Chunks that run backwards, and a nan in one gradient alone."""
    main([*SMALL_BENCH, "--lengths", "9", "33"])
    assert capsys.readouterr().out.count("times_faster") == 12

    def nan_in_q(q, k, v, beta):
        out, state = delta_rule_recurrent(q, k, v, beta)
        return out + 0 * (q - q.detach()).sqrt(), state  # 0 times an infinite slope

    monkeypatch.setitem(FORMS, "autograd", nan_in_q)
    with pytest.raises(SystemExit, match="autograd disagrees with the loop at T = 9"):
        main([*SMALL_BENCH, "--lengths", "9"])
    monkeypatch.undo()
    monkeypatch.setattr(scan, "in_chunks", lambda x, C: x.flip(-2).unsqueeze(-3))
    with pytest.raises(SystemExit, match="C=16 disagrees with the loop at T = 9"):
        main([*SMALL_BENCH, "--lengths", "9"])


def test_a_bug_is_not_taken_for_a_disagreement(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("experiments.bench.arithmetic_bound", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main(SMALL_BENCH)


def test_time_and_memory_are_recorded(tmp_path):
    """A row for each form at each length, as JSON. The loop keeps a K x V state for each token, at
    least; the chunks do with less."""
    path = tmp_path / "bench.jsonl"
    main(["--batch", "2", "--heads", "1", "--lengths", "200", "--rounds", "1",
          "--record", str(path)])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["form"] for row in rows] == ["loop", "textbook", "autograd", "C=16", "C=32", "C=64"]
    assert rows[0]["peak"] >= 2 * 200 * 32 * 32 * 4 / 2**20 > rows[4]["peak"]
    assert rows[0]["times_faster"] == 1
    assert all(row["tokens/s"] == pytest.approx(400e3 / row["with_backward"]) for row in rows)
    assert rows[0]["command"].startswith("python -m experiments.bench --batch 2")


def test_traces_too_long_for_the_loop_are_timed_by_chunks_alone(monkeypatch, capsys):
    monkeypatch.setattr("experiments.bench.LONGEST_LOOP", 32)
    main([*SMALL_BENCH, "--lengths", "33"])
    shown = capsys.readouterr().out
    assert shown.count("form C=") == 3 == shown.count("form ") and "times_faster" not in shown


def test_torch_compile_is_one_form_more_and_only_if_asked_for(monkeypatch, capsys):
    """The form itself, with a compiler that does nothing: a real one takes half a minute."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled.append(f) or f)
    main([*SMALL_BENCH, "--lengths", "9"])
    assert not compiled
    main([*SMALL_BENCH, "--lengths", "9", "--compile"])
    assert set(compiled) == {bench.delta_rule_chunked}
    assert "form compiled" in capsys.readouterr().out


def test_the_steps_of_train_are_timed_stage_by_stage_eager_and_compiled(monkeypatch, tmp_path):
    """With a compiler that does nothing the same weights give the same loss. They are the same at
    the first step of each stage, though here the compiled model is spoiled after each step."""
    made, step = [], train.train_step

    def spoiling(model, *rest):
        found = step(model, *rest)
        if "stream" in vars(model):  # compile() has put it there
            model.head.weight.data *= 1.1
        return found

    monkeypatch.setattr(train, "train_step", spoiling)
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: made.append(f) or f)
    monkeypatch.setattr("data.ReplTask.default_curriculum", "2:1,4:2")
    main(["--steps", "--rounds", "1", "--record", str(tmp_path / "steps.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(row["length"], row["spacing"], row["T"]) for row in rows] == [(2, 1, 72), (4, 2, 98)]
    assert len(made) == 1 and all(row["difference"] == 0 for row in rows)
    assert all(row["ratio"] == row["compiled"] / row["eager"] for row in rows)


def test_what_a_user_can_get_wrong_is_refused_in_one_line(refused, tmp_path):
    refused(main, ["--width", 0], "must lie in [1,")
    refused(main, ["--seed", -1], "must lie in [0,")
    refused(main, ["--lengths", "many"], "invalid int")
    refused(main, ["--record", tmp_path], "directory")
    refused(main, ["--device", "cuda"], "cuda is not there")  # conftest.py hides it


@pytest.mark.skipif(not (torch.backends.cuda.is_built() and shutil.which("nvidia-smi")),
                    reason="needs an NVIDIA GPU and a torch that is built for it")
def test_on_a_gpu_all_forms_agree_with_the_loop(tmp_path):
    """In a process of its own, since conftest.py hides the GPUs from this one."""
    path, shown = tmp_path / "bench.jsonl", os.environ.copy()
    del shown["CUDA_VISIBLE_DEVICES"]
    subprocess.run([sys.executable, "-m", "experiments.bench", "--device", "cuda", "--lengths",
                    "45", "300", "--rounds", "1", "--record", path],
                   cwd=ROOT, env=shown, check=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 12 and all(row["device"] == "cuda" for row in rows)
