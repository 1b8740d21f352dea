"""Do several processes train as one?  Yes: each takes its share of every batch.

The gradient of a mean over a batch is the mean of the gradients over equal shares of it. So every
process draws the same traces, keeps its own rows, and averages each gradient with those of the
other processes as soon as backward() has made it. Then all take the same step. After ten steps in
float64, the parameters of two processes and of one differ by less than 1e-10.

    python -m experiments.processes                  minutes with one and two processes
    python -m torch.distributed.run --nproc-per-node 2 -m experiments.processes --group S5

The options are those of train.py, on the CPU. The first process alone prints, and writes the run,
which eval.py and play read as any other. With --resume, all processes read it and go on.
"""

import json
import os
import sys
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path

import torch
from torch import distributed

import train
from data import UserError, run_cli
from eval import evaluate_and_print, make
from experiments import chapter, records, table


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
    numbers = torch.tensor([*metrics.values()], device=objective.device, dtype=torch.float64)
    average(numbers)
    return objective, dict(zip(metrics, numbers.tolist()))


def train_share(config, folder=None, resume=False):
    """Train as one of several processes.  Returns: the task, the model and the log."""
    torch.manual_seed(config.seed)
    task, model = make(asdict(config))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: average(parameter.grad))
    return task, *train.train(model, task, config, folder, resume, loss=loss_of_own_rows)


def show():
    table("Minutes of the same steps on two cores, quiet or busy with two more programs",
          records("processes"), ["processes", "threads"],
          {"quiet": itemgetter("default, quiet"), "busy": itemgetter("default, busy")}, 2)


def main(argv=None):
    if "WORLD_SIZE" not in os.environ:  # torch.distributed.run tells how many processes there are
        return chapter(__doc__, show, argv=argv)
    config, args = train.parse(argv)
    if args.device != "cpu":
        raise UserError(f"several processes train on the CPU, not on {args.device}")
    default = f"runs/{config.model}-{config.group}-seed{config.seed}"
    folder = Path(args.resume or args.out or default)
    folder = folder.parent if folder.is_file() else folder  # of RUN/model.pt

    distributed.init_process_group("gloo")
    others = distributed.get_rank() > 0
    if others:  # one process speaks and writes for all
        sys.stdout = open(os.devnull, "w")
        train.save = lambda *run: None
    task, model, log = train_share(config, folder, bool(args.resume))
    distributed.destroy_process_group()
    if others:
        return

    rows = evaluate_and_print(model, task, args.lengths, args.traces)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    result = {"config": asdict(config), "results": rows, **log[-1], "parameters": parameters}
    (folder / "results.json").write_text(json.dumps(result))


if __name__ == "__main__":
    run_cli(main)
