"""The chapters. Each is run by its name, as in `python -m experiments.snap RUN`.

What several chapters need stands here: to record a row of numbers, to read the rows back, and to
train an arm unless a row tells that it is done. And the rates of the four usual arms.
"""

import json
import re
from pathlib import Path

import torch

from train import train

RESULTS = Path(__file__).parent / "results"

# The optimiser, its rate, and that of the hidden matrices, as a grid on commands of S5 chose them.
RATES = {
    "linrnn": {"optimizer": "muon", "lr": 2e-3, "matrix_lr": 0.01},
    "linrnn-beta1": {"optimizer": "muon", "lr": 1e-3, "matrix_lr": 5e-3},
    "transformer": {"optimizer": "muon", "lr": 1e-3, "matrix_lr": 5e-3},
    "lstm": {"optimizer": "adamw", "lr": 5e-4, "matrix_lr": 5e-4}}


def record(name, row):
    """Append one JSON line to results/NAME.jsonl: a row, and what it was measured with."""
    line = {**row, "torch": torch.__version__, "threads": torch.get_num_threads()}
    with open(RESULTS / f"{name}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


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


def span(values, digits=1):
    """'least-greatest' of the seeds, or one number where both read the same; '' without values."""
    if not values:
        return ""
    least = f"{min(values):.{digits}f}"
    greatest = f"{max(values):.{digits}f}"
    return least if least == greatest else f"{least}-{greatest}"


def train_arm(name, cell, make_model, task, recipe, **arguments):
    """Train the model that `cell` describes, unless results/NAME.jsonl has a row of that cell.

    The run lies in runs/NAME/, so an interrupted study goes on where it was.
    cell: {what distinguishes this run: its value}; make_model(): the model, its weights random;
    arguments: of train(), such as max_tokens.
    Returns: None if the cell is recorded, else (model, summary), the summary for its record.
    """
    if records(name, **cell):
        return None

    values = "-".join(str(value) for value in cell.values())
    folder = Path("runs") / name / re.sub(r"[^\w.-]+", "_", values)
    torch.manual_seed(recipe.seed)
    model = make_model()
    model, log = train(model, task, recipe, folder, resume=True, **arguments)

    curve = []
    for begin in range(0, len(log) - 4, 5):
        five = log[begin:begin + 5]
        accuracy = sum(row["reveal_accuracy"] for row in five) / 5
        curve.append([five[-1]["tokens"], five[-1]["length"], round(accuracy, 4)])

    last = log[-1]
    return model, {
        "seed": recipe.seed, "steps": last["step"], "tokens": last["tokens"],
        "stage_reached": last["stage"] + 1, "finished": last["finished"],
        "minutes": round(last["seconds"] / 60, 3),
        "parameters": sum(weight.numel() for weight in model.parameters()), "curve": curve}
