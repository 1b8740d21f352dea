"""Several processes take the steps of one."""

import multiprocessing
from datetime import timedelta

import pytest
import torch
from conftest import SMALL

import train
from data import Group, ReplTask, UserError, generator
from experiments import processes
from experiments.processes import Shared, others
from models import LinRNN

COMMAND = [*SMALL, "--batch", "4", "--final-steps", "7"]


def train_as(rank, folder):
    """As one of two processes: a run that is cut in its seventh step, and the rest of it.

    In float64, since an optimiser may turn a difference in rounding into another step.
    """
    def cut(*arguments):
        calls.append(arguments)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return real(*arguments)

    calls = []
    real = train.to_tensors
    torch.set_default_dtype(torch.float64)
    others.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=60), 2, rank)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORLD_SIZE", "2")
            patch.setattr(others, "init_process_group", lambda: None)  # one group for both runs
            patch.setattr(others, "destroy_process_group", lambda: None)
            patch.setattr(train, "SAVE_EVERY", 4)
            patch.setattr(train, "to_tensors", cut)
            with pytest.raises(KeyboardInterrupt):
                processes.main([*COMMAND, "--out", f"{folder}/two"])
            patch.setattr(train, "to_tensors", real)
            processes.main(["--resume", f"{folder}/two"])
    finally:
        others.destroy_process_group()
        torch.set_default_dtype(torch.float32)


def test_two_processes_take_the_ten_steps_of_one_and_resume_where_they_were_cut(
        tmp_path, capfd, monkeypatch):
    """One of them writes and prints, and all tokens of a batch are counted."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    other = multiprocessing.get_context("spawn").Process(target=train_as, args=(1, tmp_path))
    other.start()
    train_as(0, tmp_path)
    other.join()
    assert other.exitcode == 0
    shown = capfd.readouterr().out
    assert shown.count("10 steps") == 1 and shown.count("parameters") == 2

    torch.set_default_dtype(torch.float64)
    try:
        train.main([*COMMAND, "--out", str(tmp_path / "one")])
    finally:
        torch.set_default_dtype(torch.float32)

    one, two = [torch.load(tmp_path / name / "model.pt") for name in ("one", "two")]
    assert one["model"]["embedding.weight"].dtype == torch.float64
    for part in ("model", "parameters"):
        torch.testing.assert_close(one[part], two[part], rtol=0, atol=1e-10)
    for metric in ("step", "loss", "reveal_loss", "reveal_accuracy", "tokens", "gradient_norm"):
        assert abs(one["log"][-1][metric] - two["log"][-1][metric]) < 1e-10, metric
    assert one["config"] == two["config"] and one["log"][-1]["step"] == 10
    assert (tmp_path / "two" / "results.json").exists()


@pytest.fixture
def rank(monkeypatch, request):
    """The rank of this process among three."""
    monkeypatch.setattr(others, "get_rank", lambda: request.param)
    monkeypatch.setattr(others, "get_world_size", lambda: 3)
    monkeypatch.setattr(others, "all_reduce", lambda numbers: numbers.mul_(3))
    return request.param


@pytest.mark.parametrize("rank", [0, 1, 2], indirect=True)
def test_each_process_reads_its_rows_alone(rank):
    """The third of three reads the rows 2 and 5 of six. If each read all, the steps would be
    correct, and nothing would be gained."""
    task = ReplTask(Group("S3"))
    drawn = task.training_batch(6, 2, 1, generator(0, "train"))
    model = LinRNN(len(task.vocab), 8, 2)
    read = []
    model.register_forward_pre_hook(lambda module, inputs: read.append(*inputs))
    Shared(batch=6).loss(model, train.to_tensors(drawn, "cpu"))
    assert (read[0].numpy() == drawn.inputs[[rank, rank + 3]]).all()


@pytest.mark.parametrize("rank", [0], indirect=True)
def test_a_batch_without_equal_shares_is_refused_before_the_first_step(rank):
    with pytest.raises(UserError, match="3 processes cannot share a batch of 16 traces"):
        Shared()
