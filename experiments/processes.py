"""Do several processes train as one?  Yes: each takes its share of every batch.

    python -m torch.distributed.run --nproc-per-node 2 -m experiments.processes --group S5

The gradient of a mean over a batch is the mean of the gradients over equal shares of it. So every
process draws the same traces, keeps its own rows, and averages each gradient with those of the
other processes as soon as backward() has made it. Then all take the same step.

The options are those of train.py, on the CPU. The first process alone prints, and writes the run,
which eval.py and play read as any other.
"""

import os
import sys

import torch
from torch import distributed

import train
from data import UserError, run_cli


def average(tensor):
    """The mean over all processes, in place."""
    distributed.all_reduce(tensor)
    tensor /= distributed.get_world_size()


def loss_of_own_rows(model, batch, config):
    """The loss of rows 0, 2, 4, ... in the first of two processes, and the metrics of all rows."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if len(batch.inputs) % size:
        raise UserError(f"{size} processes cannot share {len(batch.inputs)} traces equally")
    objective, metrics = train.loss(model, batch._make(part[rank::size] for part in batch), config)

    # All must see the same accuracy, or they would not pass a stage together.
    numbers = torch.tensor([*metrics.values()], dtype=torch.float64)
    average(numbers)
    return objective, dict(zip(metrics, numbers.tolist()))


def train_share(model, task, config, folder=None, resume=False):
    """train(), as one of several processes. All but the first end after it."""
    distributed.init_process_group("gloo")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: average(parameter.grad))
    trained = train.train(model, task, config, folder, resume, loss=loss_of_own_rows)
    distributed.destroy_process_group()
    if os.environ["RANK"] != "0":
        sys.exit()
    return trained


def main(argv=None):
    if "RANK" not in os.environ:  # torch.distributed.run numbers the processes
        return print(__doc__)
    if os.environ["RANK"] != "0":  # one process speaks and writes for all
        sys.stdout = open(os.devnull, "w")
        train.save = lambda *run: None
    train.main(argv, train_share)


if __name__ == "__main__":
    run_cli(main)
