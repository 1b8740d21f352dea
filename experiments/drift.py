"""Why does a state drift?  Every command adds an error, and no command takes one away.

Errors of random commands point in random directions and partly cancel. Errors of a repeated command
point the same way and add up, so loops break first.

A value that is read ends the errors of its variable, if the model writes it into its state. But
where all traces begin with 1, 2, ..., no model need read values. So a quarter of the batches in
train.py have *dense reveals*, more than their stage asks for, and random values in the first lines;
half of them also have literals, as in `b = 3`. The table has a column for training without each. A
session *joined late*, without first lines, is a control: no training trace begins like it.

    python -m experiments.drift [--run]    the table; --run: five minutes per missing run
    python -m experiments.drift DIR        the same table for your own run

Source: ours. (Affine recurrences cannot correct errors: arXiv 2605.07755.)
Next: snap.py.
"""

import copy
from dataclasses import asdict

import numpy as np
import torch
import torch.nn.functional as F

from data import Group, ReplTask, draw_commands, generator, run_cli
from eval import evaluate, make, predict
from experiments import Study, chapter, grid, min_max, number, records, summary, table
from experiments.groups import all_commands, run_commands
from experiments.inside import Untracked, fit_image, read_heads
from experiments.plots import BLUE, GREY, RED, canvas, draw_lines, ticks_at
from experiments.reading import follow, is_right, read
from train import Config, train

# --- 1. What a model knows ------------------------------------------------------------------------

def loops_of(task, length, total=128):
    """120 programs that repeat `length` random commands: [120, total, n]."""
    loops = draw_commands(task.group, task.commands, (120, length), generator(0, "test", length))
    return np.tile(loops, (1, total, 1))[:, :total]


def right_after(model, task, commands):
    """Which values are right after commands [B, L, n], without a reveal: bool [B, n]."""
    *_, state = follow(model, task, commands)
    return is_right(model, task, state, run_commands(commands)[:, -1])


def first_values(model, task, repeats, times=(0, 1, 8), traces=240):
    """The fraction of values that are right so many random commands after first lines with any
    values: {time: fraction}.  repeats: whether two of them may be equal.
    """
    n = task.group.degree
    rng = generator(0, "test", n)
    orders = rng.random((traces, n)).argsort(1)
    values = rng.integers(n, size=(traces, n)) if repeats else orders
    _, state = read(model, task, map(task.start_lines, values))
    return {time: right.mean() for time, right, _ in later(model, task, state, values, times, rng)}


def overwritten(model, task, lines, times=(0, 8, 32), length=32, traces=240):
    """After random commands a line gives a variable another value: task.literal_line, or a false
    task.reveal_lines. Is it right so many commands later, and the others? {time: two fractions}.
    """
    rng = generator(1, "test", length)
    commands = draw_commands(task.group, task.commands, (traces, length), rng)
    *_, state = follow(model, task, commands)
    values = run_commands(commands)[:, -1]

    n = task.group.degree
    rows = np.arange(traces)
    shown = rng.integers(n, size=traces)
    values[rows, shown] = (values[rows, shown] + rng.integers(1, n, size=traces)) % n
    _, state = read(model, task, map(lines, shown, values[rows, shown]), state)
    values[rows, shown] += n  # this marks it, wherever commands bring it
    return {time: (right[marked].mean(), right[~marked].mean())
            for time, right, marked in later(model, task, state, values, times, rng)}


def later(model, task, state, values, times, rng):
    """Let it read random commands. Yields time, which values are right, which are marked (>= n)."""
    n = task.group.degree
    for time in range(times[-1] + 1):
        if time in times:
            yield time, is_right(model, task, state, values % n), values >= n
        g = draw_commands(task.group, task.commands, (len(values),), rng)
        _, state = read(model, task, map(task.command_line, g.tolist()), state)
        values = np.take_along_axis(values, g, 1)


def join_late(model, task, traces=256, missed=16, heard=48):
    """The accuracy at reveals 1 to `heard` of sessions whose first lines and commands are missing.
    (After 16 commands the values are nearly uniform, so only reveals can tell them.)
    """
    rng = generator(0, "test", missed, heard)
    commands = draw_commands(task.group, task.commands, (traces, missed + heard), rng)
    asked = rng.integers(task.group.degree, size=commands.shape[:2])  # after every command
    first = task.group.degree + 3 * missed  # lines; a reveal has two
    batch = task.batch_of("".join(task.trace(*each).splitlines(keepends=True)[first:])
                          for each in zip(commands.tolist(), asked.tolist()))
    correct = (predict(model, batch.inputs) == batch.targets)[batch.reveals]
    return correct.reshape(traces, heard).mean(0)


# --- 2. The law of the errors ---------------------------------------------------------------------
#
# A state is a linear image of the permutation matrix P (inside.py, equation 1). Off a drifted state
# we read
#
#     1/n + scale (P - 1/n + E)                                                                 (1)
#
# where E is orthogonal to P. E confuses two values once two of its entries differ by 1. Every
# command adds an error to it and carries the earlier ones along. The errors of random commands add
# up like a random walk. A repeated command adds the same error every time: the parts of it along
# eigenvalues 1 of the command stay where they are, and add up in proportion.

def errors(model, task, image, commands):
    """The largest entry of E after each command: [B, L, n] -> [B, L]."""
    # A command has settled once the next line has named its left-hand side (inside.py).
    settling = task.command_line(range(image.n)).split(" = ")[0] + " = "
    seen = []
    for state in follow(model, task, commands):
        if task.commands == "full":
            _, state = read(model, task, [settling] * len(commands), state)
        seen.append(image.read(read_heads(state, image.heads)) - 1 / image.n)

    seen = torch.stack(seen, 1)
    P = F.one_hot(torch.from_numpy(run_commands(commands)), image.n) - 1 / image.n
    scale = (seen * P).sum((-2, -1)) / P.square().sum((-2, -1))
    E = seen / scale[..., None, None] - P
    return E.abs().flatten(-2).amax(-1).numpy()


def law(model, task, heads=None, length=128):
    """The median error of 60 traces (S5) after 1, 2, ... commands, random ones or one that repeats:
    {kind: [length]}, or {} if no head of the model tracks the state.
    """
    model = copy.deepcopy(model).double()  # rounding in float32 is not the question
    try:
        image, _ = fit_image(model, task, heads)
    except Untracked:
        return {}
    same = all_commands(task)[::2, None].repeat(length, 1)
    fresh = draw_commands(task.group, task.commands, same.shape[:2], generator(0, "test", length))
    return {kind: np.median(errors(model, task, image, commands), 0).tolist()
            for kind, commands in [("random commands", fresh), ("one command repeated", same)]}


# --- 3. The study ---------------------------------------------------------------------------------

RECIPES = ["default", "no literals", "no other values", "no dense reveals"]
SETTINGS = [*grid(recipe=RECIPES[:1], seed=range(290, 310)),
            *grid(recipe=RECIPES[1:], seed=range(290, 293))]
TESTS = [(128, 1), (128, 16), (256, 1), (256, 32), (512, 64), (1024, 128)]


class Recipe(ReplTask):
    """ReplTask, without one of the three differences of a dense batch, or as it is."""

    def __init__(self, group, recipe="default"):
        super().__init__(group, literal_fraction=0 if recipe == "no literals" else 0.5)
        self.recipe = recipe

    def dense_batch(self, batch, length, spacing, rng):
        if self.recipe == "no dense reveals":
            spacing = dict(Config.curriculum)[length]  # that of the stage
        return super().dense_batch(batch, length, spacing, rng)

    def trace(self, commands, asked, values=None, literals=None):
        values = None if self.recipe == "no other values" else values
        return super().trace(commands, asked, values, literals)


def run(setting, folder):
    config = Config(seed=setting["seed"])
    task = Recipe(Group(config.group), setting["recipe"])
    _, model = make(asdict(config))
    model, log = train(model, task, config, folder, resume=True)
    return summary(model, log) | measure(model, task)


def measure(model, task):
    """What a record says of a model, trained or loaded: fractions by name, and the law."""
    found = {}
    for kind, repeats in [("in any order", False), ("with repeats", True)]:
        for time, right in first_values(model, task, repeats).items():
            found[f"first values {kind}, {time} command{'s' * (time != 1)} later"] = right
    for time, (it, others) in overwritten(model, task, task.literal_line).items():
        found[f"an overwritten variable, {time} commands later"] = it
        found[f"the other variables, {time} commands later"] = others
    found["false reveals believed"] = overwritten(model, task, task.reveal_lines, [0])[0][0]
    found["joined late: reveals 25 to 48"] = join_late(model, task)[24:].mean()
    commands = draw_commands(task.group, task.commands, (96, 256), generator(0, "test", 256))
    found["whole states after 256 commands"] = right_after(model, task, commands).all(1).mean()
    for k in (1, 2, 5, 10):
        found[f"128 commands, a loop of {k}"] = right_after(model, task, loops_of(task, k)).mean()
    for L, S in TESTS:  # fewer of the long traces
        found[f"reveals of ({L},{S})"] = evaluate(model, task, L, S, min(256, 2**15 // L))["all"]
    return {"found": found, "law": law(model, task)}


STUDIES = [Study("drift", SETTINGS, run)]


# --- 4. The table and the picture -----------------------------------------------------------------

def show(rows=None):
    """The table of these records, or else of the study's."""
    rows = rows or [row for setting in SETTINGS for row in records("drift", **setting)]
    recipes = dict.fromkeys(row["recipe"] for row in rows)
    cells = [{"values": name, row["recipe"]: 100 * fraction}
             for row in rows for name, fraction in row["found"].items()]
    cells += [{"values": f"exponent of the error, {kind}", row["recipe"]: slope(error)}
              for row in rows for kind, error in row["law"].items()]
    table("Values correct in % (chance is 20): median of the seeds (min-max)", cells, ["values"],
          {recipe: lambda cell, recipe=recipe: cell.get(recipe) for recipe in recipes},
          spread=median_and_range)


def slope(error, end=64):
    """The exponent with which an error grows from 1 command to `end`, by least squares."""
    return np.polyfit(np.log(range(1, end + 1)), np.log(error[:end]), 1)[0]


def median_and_range(values, digits):
    """99.8 (98.7-100.0); a single value as it is."""
    median = number(float(np.median(values)), digits)
    return f"{median} ({min_max(values, digits)})" if len(values) > 1 else median


def picture():
    """The error by the number of commands, for the seeds of the default recipe."""
    figure, ((axes,),) = canvas("Errors of random commands grow as the root of their number,\n"
                                "errors of a repeated command in proportion")
    laws = [row["law"] for row in records("drift", recipe="default") if row["law"]]
    axes.set(yscale="log", xlabel="commands", ylabel="error in the table (0.5: a value is misread)")
    axes.axhline(0.5, color=GREY, linestyle="--", linewidth=0.9)
    draw_lines(axes, {kind: (range(1, 129), [found[kind] for found in laws], colour)
                      for law in laws[:1] for kind, colour in zip(law, (BLUE, RED))}, trained=64)
    ticks_at(axes, [1, 4, 16, 64, 128])
    return figure


def show_run(task, model):
    """The same table for your own run."""
    show([{"recipe": "your run", **measure(model, task)}])


def main(argv=None):
    chapter(__doc__, show, STUDIES, argv, show_run)


if __name__ == "__main__":
    run_cli(main)
