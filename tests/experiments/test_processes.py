"""Several processes make the steps of one."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SMALL

import train
from data import Group, ReplTask, UserError, generator
from experiments import processes
from experiments.scale import ManyVariables
from models import LinRNN
from train import Recipe

# What each process does: a whole run; one that is cut in its seventh step; the rest of that one.
DRIVER = """
import sys
import torch
sys.path.insert(0, {root!r})
import train
from experiments import processes

# Three runs in one launch, so they keep the group that is made here.
others = processes.others
others.init_process_group("gloo")
others.init_process_group = others.destroy_process_group = lambda *_: None

torch.set_default_dtype(torch.float64)
train.SAVE_EVERY = 4
command = {command!r}
processes.main([*command, "--out", {folder!r} + "/whole"])

real, calls = train.to_tensors, []
def cut(*arguments):
    calls.append(arguments)
    if len(calls) == 7:
        raise KeyboardInterrupt
    return real(*arguments)

train.to_tensors = cut
try:
    processes.main([*command, "--out", {folder!r} + "/cut"])
except KeyboardInterrupt:
    pass
train.to_tensors = real
assert torch.load({folder!r} + "/cut/model.pt")["progress"]["step"] == 4
processes.main(["--resume", {folder!r} + "/cut"])
"""


def test_two_processes_make_the_ten_steps_of_one_and_go_on_where_they_were_cut(tmp_path):
    """In float64, since an optimiser may turn a difference in rounding into another step. One of
    them writes and prints, and all tokens of a batch are counted."""
    command = [*SMALL, "--batch", "4", "--last-steps", "7"]
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.format(root=str(ROOT), command=command, folder=str(tmp_path)))
    shown = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(driver)], env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"}, capture_output=True,
        text=True, check=True).stdout
    assert shown.count("trained 10 steps") == 2 and shown.count("parameters") == 3

    torch.set_default_dtype(torch.float64)
    try:
        train.main([*command, "--out", str(tmp_path / "one")])
    finally:
        torch.set_default_dtype(torch.float32)

    one = torch.load(tmp_path / "one" / "model.pt")
    assert one["model"]["embedding.weight"].dtype == torch.float64
    for name in ("whole", "cut"):
        two = torch.load(tmp_path / name / "model.pt")
        for part in ("model", "weights", "average"):
            torch.testing.assert_close(one[part], two[part], rtol=0, atol=1e-10)
        for metric in ("loss", "reveal_loss", "reveal_accuracy", "tokens", "gradient_norm"):
            assert abs(one["log"][-1][metric] - two["log"][-1][metric]) < 1e-10, metric
        assert json.loads((tmp_path / name / "results.json").read_text())["steps"] == 10


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_process_reads_its_rows_alone(monkeypatch, rank):
    """The third of three reads the rows 2 and 5 of six. If each read all, the steps would be right,
    and nothing would be gained."""
    monkeypatch.setattr(processes.others, "get_rank", lambda: rank)
    monkeypatch.setattr(processes.others, "get_world_size", lambda: 3)
    monkeypatch.setattr(processes.others, "all_reduce", lambda numbers: numbers.mul_(3))
    task = ReplTask(Group("S3"))
    drawn = task.training_batch(6, 2, 1, generator(0, "train"))
    model = LinRNN(len(task.vocab), 8, 2)
    read = []
    model.register_forward_pre_hook(lambda module, inputs: read.append(*inputs))
    processes.loss_of_rows(model, train.to_tensors(drawn, "cpu"), Recipe())
    assert (read[0].numpy() == drawn.inputs[[rank, rank + 3]]).all()


@pytest.mark.parametrize("task, length, shared_by, refused", [
    (ReplTask(Group("S5")), 128, [1, 2, 16], [3, 32]),
    (ManyVariables(Group("S13")), 128, [1, 2, 8], [3, 16]),
    (ManyVariables(Group("S13")), 256, [1, 2, 4], [3, 8])])
def test_a_batch_without_equal_shares_is_refused_before_the_first_step(task, length, shared_by,
                                                                       refused):
    """The smaller ones of long traces, too: ManyVariables has 8 of 128 commands, and 4 of 256."""
    recipe = Recipe(curriculum=[(2, 1), (length, 8)])
    for number in shared_by:
        processes.check_shares(task, recipe, number)
    for number in refused:
        with pytest.raises(UserError, match=f"shared by {number} processes"):
            processes.check_shares(task, recipe, number)
