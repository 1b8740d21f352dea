"""How far does a trained model track?  python eval.py runs/linrnn-S5-seed0

For each (length L, spacing S), on fresh traces:
    chance   accuracy of a guess that knows the variable but not the state
    all      accuracy over all reveals
    final    accuracy at the last reveal of each trace
    perfect  fraction of traces with EVERY reveal correct, with its 95% Wilson interval
and below, `along it`: the accuracy at up to eight reveals along the trace, evenly spaced.

The model reads the whole true trace and is scored on the revealed values only. Since each earlier
reveal tells it one variable, at a small spacing `final` exceeds chance even if the state is lost.

Next: train.py, which makes the runs that this file reads.
"""

import argparse
import inspect
import os
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data import Group, ReplTask, UserError, generator, make_parser, run_cli, stages
from models import MODELS

LENGTHS = ((64, 8), (128, 1), (128, 16), (256, 32))
SIZES = ("d_model", "layers", "heads", "beta_max", "householders", "conv_width")
TOKENS_AT_ONCE = 2**17  # in one forward pass; this bounds the memory


# --- 1. The table ---------------------------------------------------------------------------------

@torch.no_grad()
def predict(model, inputs):
    """The most likely token of the whole vocabulary at each position: inputs [B, T] -> [B, T].

    model: any module, tokens [B, T] -> logits [B, T, vocabulary].
    """
    tokens = torch.from_numpy(inputs).to(device_of(model))
    pieces = tokens.split(max(1, TOKENS_AT_ONCE // tokens.shape[1]))
    training = model.training
    model.eval()
    bar = tqdm(pieces, leave=False, disable=None)  # only on a terminal
    best = torch.cat([model(piece).argmax(-1) for piece in bar])
    model.train(training)
    return best.cpu().numpy()


def evaluate_and_print(model, task, lengths=LENGTHS, traces=256, seed=0):
    """The table described above, printed and returned: a dict for each (length, spacing)."""
    return print_table(evaluate(model, task, length, spacing, traces, seed)
                       for length, spacing in lengths)


def evaluate(model, task, length, spacing, traces=256, seed=0, predict=predict):
    """One row of the table.  task: see data.py.  predict: how the model reads the traces."""
    # The traces depend on these numbers only, so every model reads the same ones.
    rng = generator(seed, "test", length, spacing)
    batch = task.test_batch(traces, length, spacing, rng)
    correct = predict(model, batch.inputs) == batch.targets
    # Row by row: stack refuses traces with different numbers of reveals.
    correct = np.stack([row[mask] for row, mask in zip(correct, batch.reveals)])
    return {"length": length, "spacing": spacing, "chance": task.chance} | score(correct)


def score(correct):
    """The accuracies of a row: bool [traces, reveals] -> a dict of plain numbers, for json."""
    perfect = correct.all(1)
    low, high = wilson(perfect.sum(), len(correct))
    return {"reveals": correct.size, "all": float(correct.mean()),
            "final": float(correct[:, -1].mean()),
            "perfect": float(perfect.mean()), "perfect_low": low, "perfect_high": high,
            "by_position": correct.mean(0).tolist()}


def wilson(hits, total, z=1.96):
    """The 95% Wilson score interval of a proportion (Wilson 1927)."""
    # The naive interval p +- 1.96 SE has zero width at 100%.
    p = hits / total
    shrink = z * z / total

    centre = (p + shrink / 2) / (1 + shrink)
    half = z * np.sqrt(p * (1 - p) / total + shrink / total / 4) / (1 + shrink)
    return float(max(0.0, centre - half)), float(min(1.0, centre + half))


def print_table(rows):
    """Print each row as soon as it is there, and return them all: a list.

    A row has two lines: the columns, then the accuracy along the trace.
    """
    columns = ("chance", "all", "final", "perfect")
    print("\n     (L,S)" + "".join(f"{name:>9}" for name in columns) + "   95% of perfect")
    printed = []
    for row in rows:
        printed.append(row)
        name = f"({row['length']},{row['spacing']})"
        print(f"{name:>10}" + "".join(digits(row[column]) for column in columns)
              + f"   {row['perfect_low']:.4f}-{row['perfect_high']:.4f}")

        # Where along the trace is the state lost?
        by_position = row["by_position"]
        shown = by_position[::-(-len(by_position) // 8)]
        print("  along it" + "".join(map(digits, shown)), flush=True)
    return printed


def digits(accuracy):
    """Four digits. Only 1 is printed as 1.0000."""
    return f"{accuracy if accuracy == 1 else min(accuracy, 0.9999):9.4f}"


def plot(rows, path, title, trained):
    """Accuracy against the commands read before a reveal, one curve for each (length, spacing).

    trained: the number of commands in the longest training trace, marked by a line.
    """
    from matplotlib.figure import Figure  # imported here: it takes a second
    axes = Figure(layout="constrained").subplots()
    for row in rows:
        # The first reveal of a trace comes after `spacing` commands, not after none.
        commands_read = np.arange(1, len(row["by_position"]) + 1) * row["spacing"]
        axes.plot(commands_read, row["by_position"], ".-",
                  label=f"({row['length']},{row['spacing']})")

    axes.axhline(rows[0]["chance"], color="grey", label="chance")
    axes.axvline(trained, color="grey", linestyle=":", label="longest training trace")
    axes.set(title=title, xlabel="commands read before the reveal", ylabel="accuracy",
             ylim=(0, 1.05))
    axes.set_xscale("log", base=2)  # 64 commands and 1,024 fit into one picture
    axes.xaxis.set_major_formatter("{x:g}")
    axes.figure.legend(loc="outside lower center", ncols=4,  # where no curve passes
                       title="(commands, commands per reveal)")
    axes.figure.savefig(path)


# --- 2. Reading a run -----------------------------------------------------------------------------

def load(folder, device="cpu"):
    """The task and the trained model of a run folder, as its config describes them."""
    run = read_run(folder)
    task, model = make(run["config"])
    model.load_state_dict(run["model"])
    return task, model.to(device).eval()


def read_run(folder):
    """The contents of model.pt: `config`, `model` (the parameters), and more (train.save)."""
    path = Path(folder) / "model.pt"
    if not path.exists():
        raise UserError(f"there is no run in {folder}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)  # executes no code
    except Exception as error:  # torch raises many kinds
        raise UserError(f"{path} is damaged, or no run of train.py") from error


def make(config):
    """The task of a config (the fields of train.Config, as a dict), and its untrained model."""
    task = ReplTask(Group(config["group"]), config["commands"], config["repeat_fraction"],
                    config["literal_fraction"])
    name = config["model"]
    if name not in MODELS:
        raise UserError(f"model must be one of {', '.join(MODELS)}; got {name!r}")

    # The sizes: the defaults of the model, and over them those of the config.
    own = inspect.signature(MODELS[name]).parameters
    sizes = {size: own[size].default for size in SIZES if size in own}
    if "conv_width" in sizes:
        sizes["conv_width"] = task.group.degree + 3  # a token sees its place in the command
    given = {size: config[size] for size in SIZES if config[size] is not None}
    if unknown := given.keys() - sizes:
        raise UserError(f"{name} has no {', '.join(unknown)}")
    sizes |= given

    if sizes["d_model"] % sizes.get("heads", 1):
        raise UserError("d_model must be a multiple of heads; got {d_model} and {heads}"
                        .format(**sizes))
    if not 0 <= sizes.get("beta_max", 2) <= 2:
        raise UserError(f"beta_max must be in [0, 2], or states grow; got {sizes['beta_max']:g}")
    return task, MODELS[name](len(task.vocab), **sizes)


def device_of(model):
    """The device of the parameters, or the CPU for a model without any."""
    return next(model.parameters(), torch.zeros(0)).device


# --- 3. The command line --------------------------------------------------------------------------

def limit_threads():
    """One thread, unless OMP_NUM_THREADS says otherwise: of small tensors, others mostly wait."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))


def positive(text):
    """A type for argparse: a whole number from 1 on."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def device(name):
    """A type for argparse: a device that this machine has."""
    try:
        return torch.zeros(1, device=name).device
    except Exception:  # torch raises many kinds
        raise argparse.ArgumentTypeError(f"there is no {name!r} here; try cpu") from None


def add_table_options(parser):
    """The options of eval.py that train.py has as well."""
    add = parser.add_argument
    add("--lengths", type=stages, default=LENGTHS,
        help="rows LENGTH:SPACING,... of the table (default 64:8,128:1,128:16,256:32)")
    add("--traces", type=positive, default=256, help="fresh traces for each row (default 256)")
    add("--device", type=device, default="cpu", help="cpu (default), cuda, ...")


def main(argv=None):
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="a run folder made by train.py")
    add_table_options(parser)
    add("--seed", type=int, default=0, help="seed of the test traces (default 0)")
    add("--plot", metavar="FILE", help="write a figure (.png, .pdf or .svg)")
    args = parser.parse_args(argv)
    limit_threads()
    task, model = load(args.run, args.device)
    rows = evaluate_and_print(model, task, args.lengths, args.traces, args.seed)
    if args.plot:
        curriculum = read_run(args.run)["config"]["curriculum"]
        plot(rows, args.plot, args.run, trained=max(length for length, _ in curriculum))


if __name__ == "__main__":
    run_cli(main)
