"""Several processes take the steps of one."""

from datetime import timedelta

import torch
from torch import distributed

from eval import make
from experiments import processes
from train import Config, train

CONFIG = Config(group="S3", curriculum=((2, 1), (4, 2)), d_model=8, heads=2, batch=4,
                pass_accuracy=0.0, final_steps=7)


def train_as(rank, folder):
    """In float64, since an optimiser may turn a difference in rounding into another step."""
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=60), 2, rank)
    _, model, log = processes.train_share(CONFIG)
    torch.save((model.state_dict(), log[-1]), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_two_processes_take_the_ten_steps_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(train_as, (tmp_path,), nprocs=2)

    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(CONFIG.seed)
        task, model = make(vars(CONFIG))
        model, log = train(model, task, CONFIG)
    finally:
        torch.set_default_dtype(torch.float32)
    for rank in range(2):
        parameters, last = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(model.state_dict(), parameters, rtol=0, atol=1e-10)
        assert last["step"] == 10
        for metric in ("loss", "reveal_loss", "reveal_accuracy", "tokens", "gradient_norm"):
            assert abs(log[-1][metric] - last[metric]) < 1e-10, metric
