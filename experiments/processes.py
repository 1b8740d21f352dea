"""Do several processes train as one?  Yes: each takes its rows of every batch.

The gradient of a mean over a batch is the mean of the gradients over equal shares of it. So each
process draws the same traces, keeps its rows, and averages its gradient with those of the others as
soon as a weight has one. Then all make the same step. In float64 ten steps of two processes and of
one differ by less than 1e-10. The first process writes and prints.

When does it pay? Minutes of the same steps, on two cores that are quiet, or on which two more
programs compute all the time; 170 steps of the default, and 11 of S26:

    processes  threads  default, quiet  default, busy  S26, quiet  S26, busy
            1        1            0.12           0.19        0.14       0.21
            1        2            0.10           2.24        0.08       0.21
            2        1            0.09           0.12        0.07       0.11

Two processes take 50 to 75% of the time of one. Two threads gain as much on quiet cores if the
model is large, and next to nothing if it is small. On busy ones they can be twelve times as slow.

    python -m experiments.processes                  the table, from the records
    python -m torch.distributed.run --nproc-per-node 2 -m experiments.processes --group S5

Behind the name stand the options of train.py, --resume among them.
Source: torch.distributed; its DistributedDataParallel does the same in larger pieces.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as others

from data import UserError, generator, run
from eval import find_device, make
from experiments import chapter, records, table
from train import next_token_loss, read_options, recipe_of, train, train_run

# --- 1. One step by all ---------------------------------------------------------------------------

def loss_of_rows(model, batch, recipe):
    """next_token_loss of the rows of this process; the metrics are those of the whole batch.

    A hook of train(). The whole batch comes in, so that train() counts all its tokens.
    """
    if not model.training:  # the finished model is asked by the first process alone
        return next_token_loss(model, batch, recipe)

    # Of two processes the first takes the rows 0, 2, 4, ..., of all that the batch has.
    rank, processes = others.get_rank(), others.get_world_size()
    rows = batch._make(part[rank::processes] for part in batch)
    loss, metrics = next_token_loss(model, rows, recipe)

    # Each process must read the same accuracy, or they would not leave a stage together.
    numbers = torch.tensor([*metrics.values()], device=loss.device, dtype=torch.float64)
    mean_of_all(numbers)
    return loss, dict(zip(metrics, numbers.tolist()))


def mean_of_all(tensor):
    """The mean over all processes, in place."""
    others.all_reduce(tensor)
    tensor /= others.get_world_size()


def share_gradients(model):
    """From now on a gradient is averaged over all processes when backward() has made it."""
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: mean_of_all(weight.grad))


def check_shares(task, recipe, processes):
    """Raises: UserError if a batch of any stage has no equal shares, whose mean is another one."""
    for stage in recipe.curriculum:
        drawn = task.training_batch(recipe.batch, *stage, generator(recipe.seed, "valid"))
        if len(drawn.inputs) % processes:
            raise UserError(f"the {len(drawn.inputs)} traces of a batch of {stage} cannot be "
                            f"shared by {processes} processes: choose a multiple with --batch")


# --- 2. One run by all ----------------------------------------------------------------------------

def train_share(argv):
    """What train.py does, as one of several processes."""
    # The device is set before anything is allocated, or all would take memory of the first GPU.
    typed, config = read_options(argv)
    device = typed.get("device", "cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    others.init_process_group("nccl" if device.startswith("cuda") else "gloo")

    task, model = make(config)
    recipe = recipe_of(config)
    check_shares(task, recipe, others.get_world_size())
    model.to(find_device(device))
    share_gradients(model)

    if others.get_rank() == 0:
        train_run(task, model, config, typed | {"device": device}, loss_of=loss_of_rows)
    else:
        # The others read what is resumed, and what they write is thrown away.
        with tempfile.TemporaryDirectory() as folder:
            if "resume" in typed:
                shutil.copy(Path(typed["resume"]) / "model.pt", folder)
            train(model, task, recipe, folder, resume=True, config=config, loss_of=loss_of_rows,
                  quiet=True)
    others.destroy_process_group()


# --- 3. What the records say ----------------------------------------------------------------------

def minutes_of(program, cores):
    """A column: minutes of the steps of this program on quiet or on busy cores."""
    def column(row):
        if (row["program"], row["cores"]) == (program, cores):
            return f"{row['minutes']:.2f}"
    return column


def show():
    """The table, from results/processes.jsonl."""
    columns = {f"{program}, {cores}": minutes_of(program, cores)
               for program in ("default", "S26") for cores in ("quiet", "busy")}
    table("Minutes of the same steps on two cores, quiet ones or such on which two more programs "
          "compute", records("processes"), ["processes", "threads"], columns)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    # torch.distributed.run tells each process in this variable how many there are.
    if "WORLD_SIZE" in os.environ:
        train_share(argv)
    else:
        chapter(__doc__, show, argv=argv)


if __name__ == "__main__":
    run(main)
