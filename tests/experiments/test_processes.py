"""Several processes take the steps of one, and leave its run."""

import contextlib
import json
import os
from datetime import timedelta
from functools import partial

import pytest
import torch
import train as trainer
from conftest import SMALL
from torch import distributed

from data import Batch, UserError
from eval import load, read_run
from experiments import processes
from train import Config

TEN_STEPS = [*SMALL, *"--batch 4 --final-steps 7".split()]


def work(rank, folder):
    """What each of two processes does: a run, and the same one interrupted and resumed. In float64,
    since an optimiser may turn a difference in rounding into another step."""
    torch.set_default_dtype(torch.float64)
    os.environ["RANK"] = str(rank)
    if rank:
        torch.save = None  # it may not write

    def main(store, *argv):
        distributed.init_process_group = partial(
            start, init_method=f"file://{folder}/{store}", timeout=timedelta(seconds=60),
            world_size=2, rank=rank)
        with contextlib.suppress(SystemExit):  # of all but the first
            processes.main([*map(str, argv)])

    def interrupt(*given):
        calls.append(given)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return loss(*given)

    start, loss, calls = distributed.init_process_group, trainer.loss, []
    trainer.SAVE_EVERY = 3
    main("first", *TEN_STEPS, "--out", folder / "whole")
    trainer.loss = interrupt
    with pytest.raises(KeyboardInterrupt):
        main("second", *TEN_STEPS, "--out", folder / "cut")
    distributed.destroy_process_group()
    trainer.loss = loss
    main("third", "--resume", folder / "cut" / "model.pt", *"--lengths 4:2 --traces 4".split())


def test_two_processes_write_the_run_of_one_and_resume_it_with_the_same_bits(
        tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(work, (tmp_path,), nprocs=2)
    torch.set_default_dtype(torch.float64)
    try:
        trainer.main([*TEN_STEPS, "--out", str(tmp_path / "one")])
    finally:
        torch.set_default_dtype(torch.float32)

    whole, cut, one = (read_run(tmp_path / name) for name in ("whole", "cut", "one"))
    assert whole["progress"]["step"] == cut["progress"]["step"] == 10
    for part in ("model", "last"):
        torch.testing.assert_close(whole[part], one[part], rtol=0, atol=1e-10)
        torch.testing.assert_close(whole[part], cut[part], rtol=0, atol=0)
    for metric in ("loss", "reveal_loss", "reveal_accuracy", "tokens", "gradient_norm"):
        assert abs(whole["log"][-1][metric] - one["log"][-1][metric]) < 1e-10, metric
    ours, theirs = (json.loads((tmp_path / name / "results.json").read_text())
                    for name in ("cut", "one"))
    assert ours.keys() == theirs.keys() and ours["results"] == theirs["results"]
    assert load(tmp_path / "whole")[0].group.name == "S3"


@pytest.mark.parametrize("option", ["--device meta", "--resume nowhere", "--resume RUN --seed 1"])
def test_an_option_that_does_not_fit_is_refused_before_the_processes_meet(
        option, refused, monkeypatch, small_run):
    monkeypatch.setenv("RANK", "0")
    refused(processes.main, option.replace("RUN", str(small_run)).split())


def test_unequal_shares_are_refused(monkeypatch):
    """Their gradients would have unequal weights."""
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 3)
    with pytest.raises(UserError, match="3 processes cannot share 4 traces"):
        processes.loss_of_own_rows(None, Batch(*torch.zeros(3, 4)), Config())
