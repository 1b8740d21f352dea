"""Several processes take the steps of one, and leave its run."""

import contextlib
import os
from datetime import timedelta
from functools import partial

import torch
import train as trainer
from conftest import SMALL
from torch import distributed

from eval import read_run
from experiments import processes

TEN_STEPS = [*SMALL, *"--batch 4 --final-steps 7".split()]


def work(rank, folder):
    """What each of two processes does. In float64, since an optimiser may turn a difference in
    rounding into another step."""
    torch.set_default_dtype(torch.float64)
    os.environ["RANK"] = str(rank)
    if rank:
        torch.save = None  # it may not write
    distributed.init_process_group = partial(
        distributed.init_process_group, init_method=f"file://{folder}/store",
        timeout=timedelta(seconds=60), world_size=2, rank=rank)
    with contextlib.suppress(SystemExit):  # of all but the first
        processes.main([*TEN_STEPS, "--out", str(folder / "two")])
    os._exit(0)  # on a loaded machine, gloo's threads may abort a normal exit


def test_two_processes_write_the_run_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(work, (tmp_path,), nprocs=2)
    torch.set_default_dtype(torch.float64)
    try:
        trainer.main([*TEN_STEPS, "--out", str(tmp_path / "one")])
    finally:
        torch.set_default_dtype(torch.float32)

    two, one = read_run(tmp_path / "two"), read_run(tmp_path / "one")
    assert two["progress"]["step"] == 10
    for part in ("model", "last"):
        torch.testing.assert_close(two[part], one[part], rtol=0, atol=1e-10)
    for metric in ("loss", "reveal_loss", "reveal_accuracy", "tokens"):
        assert abs(two["log"][-1][metric] - one["log"][-1][metric]) < 1e-10, metric
