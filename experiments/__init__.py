"""The chapters. Each is run by its name, as in `python -m experiments.scale [--run]`.

A study is a list of cells. A cell is a dict of what distinguishes a run, and results/NAME.jsonl has
a row for each cell that was made. What all chapters need stands here: to make the missing cells, to
read the rows back, to print them as a table, and the command line.
"""

import json
import math
import re
import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch

from data import Parser
from eval import device_of, evaluate
from train import share_of_peak, train

RESULTS = Path(__file__).parent / "results"

# The optimiser, its rate, and that of the hidden matrices. They come from an older grid on S5, at
# its first stage. The chapter `arms` scales them anew.
RATES = {
    "linrnn": {"optimizer": "muon", "lr": 2e-3, "matrix_lr": 0.01},
    "linrnn-beta1": {"optimizer": "muon", "lr": 1e-3, "matrix_lr": 5e-3},
    "transformer": {"optimizer": "muon", "lr": 1e-3, "matrix_lr": 5e-3},
    "lstm": {"optimizer": "adamw", "lr": 5e-4, "matrix_lr": 5e-4}}

# The recipe of train.py before its traces had runs of one command (the chapter `repeats`).
OLD = {"lr": 4e-3, "matrix_lr": 0.02, "last_steps": 150}


def make_arm(model_class, task, conv_width=None):
    """A model of random weights for a task.

    model_class: as those of models.MODELS. conv_width: what its local block sees; if it is not
    given, one side of a command, n + 1 tokens, and two to spare.
    """
    return model_class(len(task.vocab), conv_width=conv_width or task.group.degree + 3)


# --- Records --------------------------------------------------------------------------------------

def record(name, row):
    """Append one JSON line to results/NAME.jsonl: a row, and what it was measured with."""
    line = {**row, "torch": torch.__version__, "threads": torch.get_num_threads()}
    with open(RESULTS / f"{name}.jsonl", "a") as file:
        file.write(json.dumps(rounded(line)) + "\n")


def rounded(value):
    """Numbers to four digits after the point: no table shows more."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(part) for part in value]
    return round(value, 4) if isinstance(value, float) and abs(value) >= 1e-3 else value


def records(name, **conditions):
    """The rows of results/NAME.jsonl in which each of these keys has this value."""
    path = RESULTS / f"{name}.jsonl"
    if not path.exists():
        return []

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return where(rows, **conditions)


def where(rows, **conditions):
    """The rows in which each of these keys has this value."""
    return [row for row in rows if conditions.items() <= row.items()]


# --- Runs -----------------------------------------------------------------------------------------

def grid(**values):
    """Every combination of the values of each key, as a list of cells."""
    return [dict(zip(values, chosen)) for chosen in product(*values.values())]


def make(name, cells, plan, measure=None, **hooks):
    """Train, measure and record each cell of which results/NAME.jsonl has no row.

    plan(cell) -> task, make_model, recipe, tests. measure(model, task, tests) -> the results; None:
    a row of eval.py for each of the tests. hooks: of train(). A cell with `millions` ends at so
    many tokens. A run lies in runs/NAME/, so an interrupted study goes on where it was.
    """
    missing = [cell for cell in cells if not records(name, **cell)]
    for place, cell in enumerate(missing, 1):
        print(f"{name}, {place} of {len(missing)} missing: {cell}", flush=True)
        task, make_model, recipe, tests = plan(cell)
        values = "-".join(str(value) for value in cell.values())
        folder = Path("runs") / name / re.sub(r"[^\w.-]+", "_", values)
        torch.manual_seed(recipe.seed)
        model, log = train(make_model(), task, recipe, folder, resume=True,
                           max_tokens=1e6 * cell.get("millions", math.inf), **hooks)

        results = (measure or evaluate_all)(model, task, tests)
        record(name, cell | summary(model, log) | {"results": results})


@torch.no_grad()
def read_rightly(model, task, state, perms):
    """Whether a model that is asked for every variable answers all of them as perms [B, n]: [B].

    Each question starts from the same state of model.stream, so that none tells the model anything
    about another.
    """
    right = np.ones(len(perms), bool)
    for variable in range(task.group.degree):
        asked = np.full(len(perms), variable)
        question = task.reveal_tokens(asked, asked)[:, :-2]  # the value is left out
        logits, _ = model.stream(torch.from_numpy(question).to(device_of(model)), state)
        said = logits[:, -1].argmax(-1).cpu().numpy()
        right &= said == task.value_tokens[perms[:, variable]]
    return right


def evaluate_all(model, task, tests):
    """A row of eval.py for each (length, spacing)."""
    return [evaluate(model, task, *stage) for stage in tests]


def summary(model, log):
    """What a record says of a training."""
    last = log[-1]
    return {"steps": last["step"], "tokens": last["tokens"], "finished": last["finished"],
            "stage_reached": last["stage"] + 1, "minutes": round(last["seconds"] / 60, 3),
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "curve": curve(log)}


def curve(log):
    """The training in pieces of 50 steps: tokens read, length of the stage, mean accuracy."""
    points = []
    for begin in range(0, len(log) - 4, 5):
        five = log[begin:begin + 5]
        shares = [row["reveal_accuracy"] for row in five if row["reveal_accuracy"] is not None]
        if shares:
            mean = sum(shares) / len(shares)
            points.append([five[-1]["tokens"], five[-1]["length"], round(mean, 4)])
    return points


# Two hooks of train(), for runs whose rates fall: the last weights are then the result.

def falls_at_the_end(recipe, progress):
    """As share_of_peak, but over the last stage the rates fall linearly to 0."""
    share = share_of_peak(recipe, progress)
    if progress.stage < recipe.last_stage:
        return share
    return share * (1 - progress.stage_step / recipe.steps_of(progress.stage))


def never(recipe, progress):
    """No step enters the mean of the weights."""
    return False


FALLING = {"rate_of": falls_at_the_end, "averaged": never}


# --- Tables ---------------------------------------------------------------------------------------

def span(values, digits=1):
    """'least-greatest' of the seeds, or one number where both read the same; '' without values."""
    if not values:
        return ""
    least = f"{min(values):.{digits}f}"
    greatest = f"{max(values):.{digits}f}"
    return least if least == greatest else f"{least}-{greatest}"


def at(row, length):
    """The evaluation of a row in traces of that length."""
    return next(result for result in row["results"] if result["length"] == length)


def percent(length, key="all"):
    """A column of a table: what is right in traces of that length, in %."""
    return lambda rows: span([100 * at(row, length)[key] for row in rows])


def millions(rows):
    """A column of a table: million tokens read."""
    return span([row["tokens"] / 1e6 for row in rows])


def minutes(rows):
    """A column of a table: minutes of training."""
    return span([row["minutes"] for row in rows])


def k_of_n(test):
    """A column of a table: how many of the runs pass a test."""
    return lambda rows: f"{sum(map(test, rows))} of {len(rows)}"


def table(title, rows, keys, columns):
    """Print a line for each combination of values of the keys; columns: {head: rows -> text}."""
    lines = [[*keys, *columns]]
    for values in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        same = where(rows, **dict(zip(keys, values)))
        lines.append([*map(str, values), *(text(same) for text in columns.values())])

    widths = [max(map(len, column)) for column in zip(*lines)]
    print(f"\n{title}\n")
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)).rstrip())


# --- The command line -----------------------------------------------------------------------------

def chapter(doc, show, make_missing=None, commands={}, argv=None):
    """The command of a chapter: its tables, from the records; with --run it makes what is missing.

    commands: {word: function of the arguments after it}, as `train` in `words train S5`.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in commands:
        return commands[argv[0]](argv[1:])

    more = f"Commands, each with a --help: {', '.join(commands)}." if commands else None
    parser = Parser(doc, epilog=more)
    if make_missing:
        parser.add_argument("--run", action="store_true", help="first make what has no record")
    if vars(parser.parse_args(argv)).get("run"):
        make_missing()
    show()
