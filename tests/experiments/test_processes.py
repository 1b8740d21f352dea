"""Several processes take the steps of one."""

import multiprocessing
from datetime import timedelta

import torch
from torch import distributed

from experiments import processes
from train import Config, train
from eval import make

SMALL = {"group": "S3", "curriculum": ((2, 1), (4, 2)), "d_model": 8, "heads": 2, "batch": 4,
         "pass_accuracy": 0.0, "final_steps": 7}


def train_as(rank, folder):
    """In float64, since an optimiser may turn a difference in rounding into another step."""
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=60), 2, rank)
    _, model, log = processes.train_share(Config(**SMALL))
    torch.save((model.state_dict(), log), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_two_processes_take_the_ten_steps_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    run = multiprocessing.get_context("spawn").Process
    both = [run(target=train_as, args=(rank, tmp_path)) for rank in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
        assert one.exitcode == 0

    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        task, model = make(vars(Config(**SMALL)))
        model, log = train(model, task, Config(**SMALL))
    finally:
        torch.set_default_dtype(torch.float32)
    for rank in range(2):
        parameters, others = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(model.state_dict(), parameters, rtol=0, atol=1e-10)
        assert len(others) == len(log) == 2 and log[-1]["step"] == 10
        for metric in ("loss", "reveal_loss", "reveal_accuracy", "tokens", "gradient_norm"):
            assert abs(log[-1][metric] - others[-1][metric]) < 1e-10, metric
