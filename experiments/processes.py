"""Do several processes train as one?  Yes: each takes its share of every batch.

The gradient of a mean over a batch is the mean of the gradients over equal shares of it. So every
process draws the same traces, keeps its rows, and averages each gradient with the others as soon as
backward() has made it. Then all take the same step. In float64 ten steps of two processes and of
one differ by less than 1e-10.

    python -m experiments.processes                  minutes with one and two processes
    python -m torch.distributed.run --nproc-per-node 2 -m experiments.processes --group S5

The options are those of train.py, --resume among them; the run is one that eval.py reads.
Source: torch.distributed; its DistributedDataParallel does the same in larger pieces.
Next: analysis.ipynb.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import torch
import torch.distributed as others

from data import UserError, run_cli
from eval import make
from experiments import chapter, records, table
from train import Config, make_parser
from train import main as train_main


@dataclass
class Shared(Config):
    """A Config whose loss is that of the rows of this process."""

    def __post_init__(self):
        super().__post_init__()
        if self.batch % others.get_world_size():
            raise UserError(f"{others.get_world_size()} processes cannot share a batch of "
                            f"{self.batch} traces equally; choose a multiple with --batch")

    def loss(self, model, batch):
        # Of two processes the first takes the rows 0, 2, 4, ...
        rows = batch._make(part[others.get_rank()::others.get_world_size()] for part in batch)
        loss, metrics = super().loss(model, rows)

        # All must see the same accuracy, or they would not leave a stage together.
        numbers = torch.tensor([*metrics.values()], device=loss.device, dtype=torch.float64)
        average(numbers)
        return loss, dict(zip(metrics, numbers.tolist()))


def make_shared(config):
    """The task and the model of a config. Its gradients are averaged over all processes."""
    task, model = make(config)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: average(parameter.grad))
    return task, model


def average(tensor):
    """The mean over all processes, in place."""
    others.all_reduce(tensor)
    tensor /= others.get_world_size()


def train_share(argv):
    """What train.py does, as one of several processes."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    others.init_process_group()
    if others.get_rank() == 0:
        train_main(argv, Shared, make_shared)
    else:
        # The others train in a folder that is thrown away, and print nothing.
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
            resumed = vars(make_parser(Shared).parse_args(argv)).get("resume")
            if resumed:
                shutil.copy(Path(resumed) / "model.pt", folder)
            there = [*argv, "--resume" if resumed else "--out", folder]  # the last one counts
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                train_main(there, Shared, make_shared, table=lambda *_: [])
    others.destroy_process_group()


def show():
    columns = ["default, quiet", "default, busy", "S26, quiet", "S26, busy"]
    table("Minutes of the same steps on two cores, quiet or busy with two more programs",
          records("processes"), ["processes", "threads"],
          {name: itemgetter(name) for name in columns}, digits=2)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    # torch.distributed.run tells each process how many there are.
    if "WORLD_SIZE" in os.environ:
        train_share(argv)
    else:
        chapter(__doc__, show, argv=argv)


if __name__ == "__main__":
    run_cli(main)
