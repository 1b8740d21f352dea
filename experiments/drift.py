"""Why does a state drift?  Every command adds an error, and no command takes one away.

A command that training never showed is no difficulty (unseen.py), but a long trace is. Errors of
random commands point in random directions and partly cancel: they grow like the root of the number
of commands. Errors of a repeated command point the same way and add up. So loops break first: after
128 commands, a loop of ten has kept 85 to 97% of the values, and one repeated command 33 to 58%.

A line that shows a value ends the error of that variable, if the model writes the value into its
state. But test traces begin with 1, 2, ..., and a model that counts on that need not read. Three
parts of train.py's dense batches make a model read: more reveals, random first values, and
literals, as in `b = 3`. Without literals a model keeps 32 to 50% of the values that they set, and
without random first values 66 to 87% of first values. Without more reveals, one of three models
keeps 28% of the values that literals set. With all three parts a model follows even a session that
it *joins late*, whose first lines it never sees: of the reveals 25 to 48 it answers at least 99%
(with any two parts, at least 98).

    python -m experiments.drift [--run]    the table; --run: four minutes per missing run
    python -m experiments.drift DIR        the same table for your own run (see DIR --help)

Source: ours. (Affine recurrences cannot correct errors: arXiv 2605.07755.)
Next: snap.py.
"""

import copy
from dataclasses import asdict

import numpy as np
import torch
import torch.nn.functional as F

from data import ReplTask, draw_commands, generator, run_cli
from eval import evaluate, make, predict
from experiments import Study, chapter, grid, min_max, number, records, summary, table
from experiments.groups import compose, run_commands
from experiments.inside import Untracked, fit_image, read_heads
from experiments.plots import BLUE, GREY, RED, canvas, draw_lines, ticks_at
from experiments.reading import answers_correctly, follow, read
from train import Config, train

# --- 1. What a model knows ------------------------------------------------------------------------

TESTS = [(64, 8), (128, 1), (128, 16), (256, 1), (256, 32), (512, 64), (1024, 128)]


def measure(model, task, seed=0):
    """What a record says of a model: fractions of values or reveals that are correct, and the law.

    seed: of the test traces.
    """
    rng = generator(seed, "test")

    def draw(*shape):
        return draw_commands(task.group, task.commands, shape, rng)

    found = {}
    for kind in ("orders", "repeats"):
        found[f"{kind} 0"], found[f"{kind} 8"] = first_values(model, task, kind, draw(240, 8), rng)

    before, after = draw(240, 32), draw(240, 8)
    told = told_values(model, task, task.literal_line, before, after, rng)
    (found["literal 0"], found["beside 0"]), (found["literal 8"], found["beside 8"]) = told
    told = told_values(model, task, task.reveal_lines, before, after, rng)
    found["false reveals"] = told[0][0]
    found["joined late"] = join_late(model, task, draw(256, 48), rng)[24:].mean()

    found["whole"] = correct_after(model, task, draw(96, 256)).all(1).mean()
    for k in (1, 2, 5, 10):
        found[f"loop {k}"] = correct_after(model, task, repeat(draw(120, k), 128)).mean()
    for L, S in TESTS:  # fewer of the long traces
        found[f"({L},{S})"] = evaluate(model, task, L, S, min(256, 2**15 // L), seed)["all"]
    return found | {"law": law(model, task, {"random": draw(60, 128),
                                             "repeated": repeat(draw(60, 1), 128)})}


def correct_after(model, task, commands):
    """Which values are correct after commands [B, L, n], without a reveal: bool [B, n]."""
    *_, state = follow(model, task, commands)
    return answers_correctly(model, task, state, run_commands(commands)[:, -1])


def repeat(commands, total):
    """The commands [B, k, n] repeatedly, `total` of them: [B, total, n]."""
    return np.tile(commands, (1, total, 1))[:, :total]


def now_and_later(model, task, state, values, commands):
    """Which values [B, n] of this state are correct, and which after commands: two bool [B, n]."""
    *_, later = follow(model, task, commands, state)
    moved = compose(values, run_commands(commands)[:, -1])
    return (answers_correctly(model, task, state, values),
            answers_correctly(model, task, later, moved))


def first_values(model, task, kind, commands, rng):
    """The accuracy of random first values, at once and after commands [B, L, n].

    kind: "orders" of 1, 2, ...; or values with "repeats", drawn independently.
    """
    values = rng.integers(task.group.degree, size=commands[:, 0].shape)
    if kind == "orders":
        values = rng.random(values.shape).argsort(1)
    _, state = read(model, task, map(task.start_lines, values))
    return [correct.mean() for correct in now_and_later(model, task, state, values, commands)]


def told_values(model, task, line, before, after, rng):
    """Commands, then a line that gives one variable another value, then commands: [B, L, n] each.

    line: task.literal_line, or task.reveal_lines, which then are false.
    Returns: the accuracy of this value and of those beside it, right after the line and at the end.
    """
    n = task.group.degree
    *_, state = follow(model, task, before)
    values = run_commands(before)[:, -1]
    told = rng.integers(n, size=(len(before), 1)) == np.arange(n)  # one variable of each trace
    values[told] = (values[told] + rng.integers(1, n, size=len(before))) % n
    _, state = read(model, task, map(line, told.argmax(1), values[told]), state)

    now, later = now_and_later(model, task, state, values, after)
    moved = compose(told, run_commands(after)[:, -1])  # where commands have brought this value
    return [(now[told].mean(), now[~told].mean()), (later[moved].mean(), later[~moved].mean())]


def join_late(model, task, commands, rng):
    """The accuracy at each reveal of sessions without first lines, a reveal after each command."""
    values = task.group.draw((len(commands),), rng)
    asked = rng.integers(task.group.degree, size=commands.shape[:2])
    batch = task.batch_of(task.trace(*each).removeprefix(task.start_lines(each[-1]))
                          for each in zip(commands.tolist(), asked.tolist(), values.tolist()))
    correct = (predict(model, batch.inputs) == batch.targets)[batch.reveals]
    return correct.reshape(asked.shape).mean(0)


# --- 2. The law of the errors ---------------------------------------------------------------------
#
# A state is a linear image of the matrix P of its values (inside.py, equation 1). Off a drifted
# state we read
#
#     1/n + scale (P - 1/n + E)                                                                 (1)
#
# where E is orthogonal to P - 1/n. E confuses two values once two of its entries differ by 1. Every
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


def law(model, task, commands, heads=None):
    """The median error after 1, 2, ... commands: {kind: [B, L, n]} -> {kind: [L]}.

    Returns: {} if no head of the model tracks the state.
    """
    model = copy.deepcopy(model).double()  # rounding in float32 is not the question
    try:
        image, _ = fit_image(model, task, heads, random_values=False)
    except Untracked:
        return {}
    return {kind: np.median(errors(model, task, image, traces), 0).tolist()
            for kind, traces in commands.items()}


def exponent(error, end=64):
    """The exponent with which an error grows from 1 command to `end`, by least squares."""
    return np.polyfit(np.log(range(1, end + 1)), np.log(error[:end]), 1)[0]


# --- 3. The study ---------------------------------------------------------------------------------

RECIPES = ["default", "no literals", "no random first values", "no dense reveals"]
SETTINGS = [*grid(recipe=RECIPES[:1], seed=range(290, 310)),
            *grid(recipe=RECIPES[1:], seed=range(290, 293))]


class Recipe(ReplTask):
    """ReplTask, without one of the three parts of a dense batch, or as it is."""

    def __init__(self, group, recipe):
        super().__init__(group, literal_fraction=Config.literal_fraction)
        self.recipe = recipe

    def dense_batch(self, batch, length, spacing, rng):
        if self.recipe == "no dense reveals":
            spacing = dict(Config.curriculum)[length]  # that of the stage
        return super().dense_batch(batch, length, spacing, rng)

    def trace(self, commands, asked, values=None, literals=None):
        values = None if self.recipe == "no random first values" else values
        literals = None if self.recipe == "no literals" else literals
        return super().trace(commands, asked, values, literals)


def run(setting, folder):
    config = Config(seed=setting["seed"])
    task, model = make(asdict(config))
    recipe = Recipe(task.group, setting["recipe"])
    model, log = train(model, recipe, config, folder, resume=True)
    return summary(model, log) | measure(model, task)


STUDIES = [Study("drift", SETTINGS, run)]


# --- 4. The table and the picture -----------------------------------------------------------------

SHOWN = {
    "repeats 0": "random first values", "repeats 8": "random first values, 8 commands later",
    "literal 0": "the value of a literal", "literal 8": "the value of a literal, 8 commands later",
    "beside 8": "the values beside it, 8 commands later", "false reveals": "false reveals believed",
    "joined late": "joined late, reveals 25 to 48", "whole": "all values after 256 commands",
    "loop 1": "after one command 128 times", "loop 10": "after 128 commands, a loop of ten",
    "(128,16)": "reveals of (128,16)", "(256,32)": "reveals of (256,32)",
    "(1024,128)": "reveals of (1024,128)"}


def show(rows=None):
    """The table of these records, or else of the study's."""
    rows = rows or [row for setting in SETTINGS for row in records("drift", **setting)]
    recipes = dict.fromkeys(row["recipe"] for row in rows)
    cells = [{"correct": name, row["recipe"]: 100 * row[key]}
             for key, name in SHOWN.items() for row in rows]
    cells += [{"correct": f"exponent, {kind} commands", row["recipe"]: exponent(error)}
              for row in rows for kind, error in row["law"].items()]
    chance = rows[0].get("chance", 20)
    table(f"What is correct, in % (chance is {chance}), by what training lacked; and the\n"
          "exponents with which errors grow: median of the seeds (min-max)", cells, ["correct"],
          {recipe: lambda cell, recipe=recipe: cell.get(recipe) for recipe in recipes},
          spread=median_and_range)


def median_and_range(values, digits):
    """99.8 (98.7-100.0), or 100.0 if all values are equal."""
    median = number(float(np.median(values)), digits)
    spread = min_max(values, digits)
    return median if median == spread else f"{median} ({spread})"


def picture():
    """The error by the number of commands, for the seeds of the default recipe."""
    figure, ((axes,),) = canvas("Errors of random commands grow as the root of their number,\n"
                                "errors of a repeated command grow faster")
    laws = [row["law"] for row in records("drift", recipe="default") if row["law"]]
    axes.set(yscale="log", xlabel="commands", ylabel="error in the table (0.5: a value is misread)")
    axes.axhline(0.5, color=GREY, linestyle="--", linewidth=0.9)
    draw_lines(axes, {f"{kind} commands": (range(1, 129), [found[kind] for found in laws], colour)
                      for law in laws[:1] for kind, colour in zip(law, (BLUE, RED))}, trained=64)
    ticks_at(axes, [1, 4, 16, 64, 128])
    return figure


def show_run(task, model, seed):
    """The same table for your own run."""
    chance = round(100 * task.chance)
    show([{"recipe": "your run", "chance": chance, **measure(model, task, seed)}])


def main(argv=None):
    chapter(__doc__, show, STUDIES, argv, show_run, seed=0)


if __name__ == "__main__":
    run_cli(main)
