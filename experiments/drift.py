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
keeps 28% of the values that literals set.

    python -m experiments.drift [--run]    the tables; --run: four minutes per missing run
    python -m experiments.drift DIR        the same tables for your own run

Source: ours. (Affine recurrences cannot correct errors: arXiv 2605.07755.)
Next: snap.py.
"""

import copy
from dataclasses import asdict

import numpy as np
import torch
import torch.nn.functional as F

from data import ReplTask, generator, run_cli
from eval import evaluate, make
from experiments import Study, chapter, grid, records, summary, table
from experiments.groups import compose, run_commands
from experiments.inside import fit_image, settled_states
from experiments.plots import BLUE, GREY, RED, canvas, draw_lines, ticks_at
from experiments.reading import answers_correctly, follow, read
from train import Config, train

# --- 1. What a model knows ------------------------------------------------------------------------

TESTS = [(128, 1), (128, 16), (256, 32), (1024, 128)]


def measure(model, task):
    """What a record says of a model: fractions of values or reveals that are correct, and the law.

    Raises: UserError if no head of the model tracks the state.
    """
    rng = generator(0, "test")

    def draw(*shape):
        return task.group.draw(shape, rng)

    kinds = {"random": draw(60, 128), "repeated": repeat(draw(60, 1), 128)}
    found = {"law": law(model, task, kinds)}
    found["repeats 8"] = first_values(model, task, draw(240, 8), rng).mean()
    before, after = draw(240, 32), draw(240, 8)
    _, found["literal 8"] = told_values(model, task, task.literal_line, before, after, rng)
    found["false reveals"], _ = told_values(model, task, task.reveal_lines, before, after, rng)
    found["whole"] = correct_after(model, task, draw(96, 256)).all(1).mean()
    for k in (1, 10):
        found[f"loop {k}"] = correct_after(model, task, repeat(draw(120, k), 128)).mean()
    for L, S in TESTS:  # fewer of the long traces
        found[f"({L},{S})"] = evaluate(model, task, L, S, min(256, 2**15 // L))["all"]
    return found


def correct_after(model, task, commands, values=None, state=None):
    """Which values are correct after commands [B, L, n], without a reveal: bool [B, n].

    values [B, n], state: what they begin with, by default 1, 2, ... and the first lines.
    """
    *_, state = follow(model, task, commands, state)
    values = np.arange(task.group.degree) if values is None else values
    return answers_correctly(model, task, state, compose(values, run_commands(commands)[:, -1]))


def repeat(commands, total):
    """The commands [B, k, n] repeatedly, `total` of them: [B, total, n]."""
    return np.tile(commands, (1, total, 1))[:, :total]


def first_values(model, task, commands, rng):
    """Which of random first values are correct after commands [B, L, n]: bool [B, n]."""
    values = rng.integers(task.group.degree, size=commands[:, 0].shape)
    _, state = read(model, task, map(task.start_lines, values))
    return correct_after(model, task, commands, values, state)


def told_values(model, task, line, before, after, rng):
    """Commands, then a line that gives one variable another value, then commands: [B, L, n] each.

    line: task.literal_line, or task.reveal_lines, which then are false.
    Returns: the accuracy of this value right after the line and at the end.
    """
    n = task.group.degree
    *_, state = follow(model, task, before)
    values = run_commands(before)[:, -1]
    told = rng.integers(n, size=(len(before), 1)) == np.arange(n)  # one variable of each trace
    values[told] = (values[told] + rng.integers(1, n, size=len(before))) % n
    _, state = read(model, task, map(line, told.argmax(1), values[told]), state)

    moved = compose(told, run_commands(after)[:, -1])  # where commands have brought this value
    return (answers_correctly(model, task, state, values)[told].mean(),
            correct_after(model, task, after, values, state)[moved].mean())


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
    seen = image.read(settled_states(model, task, image.heads, commands)) - 1 / image.n
    P = F.one_hot(torch.from_numpy(run_commands(commands)), image.n) - 1 / image.n
    scale = (seen * P).sum((-2, -1)) / P.square().sum((-2, -1))
    E = seen / scale[..., None, None] - P
    return E.abs().flatten(-2).amax(-1).numpy()


def law(model, task, commands):
    """The median error after 1, 2, ... commands: {kind: [B, L, n]} -> {kind: [L]}."""
    model = copy.deepcopy(model).double()  # rounding in float32 is not the question
    image, _ = fit_image(model, task, random_values=False)
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

    def trace(self, program, values=None):
        values = None if self.recipe == "no random first values" else values
        if self.recipe == "no literals":
            program = [event for event in program if event[0] != "literal"]
        return super().trace(program, values)


def run(setting, folder):
    config = Config(seed=setting["seed"])
    task, model = make(asdict(config))
    recipe = Recipe(task.group, setting["recipe"])
    model, log = train(model, recipe, config, folder, resume=True)
    return summary(model, log) | measure(model, task)


STUDIES = [Study("drift", SETTINGS, run)]


# --- 4. The tables and the picture ----------------------------------------------------------------

READS = {"first values": "repeats 8", "a literal": "literal 8", "false reveals": "false reveals"}
DRIFTS = {"one command": "loop 1", "loop of ten": "loop 10", "random": "whole",
          "(128,16)": "(128,16)", "(256,32)": "(256,32)", "(1024,128)": "(1024,128)"}


def show(rows=None):
    """The tables of these records, or else of the study's."""
    def in_percent(names):
        return {head: lambda row, name=name: 100 * row[name] for head, name in names.items()}

    rows = rows or records("drift")
    exponents = {"exponents": lambda row: exponent(row["law"]["random"]),
                 "": lambda row: exponent(row["law"]["repeated"])}
    table("What is read, by what training lacked: random first values, and the value of a\n"
          "literal, 8 commands later; false reveals that are believed; in % (chance is 20)",
          rows, ["recipe"], in_percent(READS))
    table("What drifts: values correct after 128 commands without a reveal, one command or a\n"
          "loop of ten; traces with all values correct after 256 random ones; reveals; in %; and\n"
          "the exponents with which errors of random and of repeated commands grow", rows,
          ["recipe"], in_percent(DRIFTS) | exponents)


def picture():
    """The error by the number of commands, for the seeds of the default recipe."""
    figure, ((axes,),) = canvas("Errors of random commands grow as the root of their number,\n"
                                "errors of a repeated command grow faster")
    laws = [row["law"] for row in records("drift", recipe="default")]
    axes.set(yscale="log", xlabel="commands", ylabel="error in the table (0.5: a value is misread)")
    axes.axhline(0.5, color=GREY, linestyle="--", linewidth=0.9)
    draw_lines(axes, {f"{kind} commands": (range(1, 129), [law[kind] for law in laws], colour)
                      for kind, colour in (("random", BLUE), ("repeated", RED))}, trained=64)
    ticks_at(axes, [1, 4, 16, 64, 128])
    return figure


def show_run(task, model):
    show([{"recipe": "your run"} | measure(model, task)])


def main(argv=None):
    chapter(__doc__, show, STUDIES, argv, show_run)


if __name__ == "__main__":
    run_cli(main)
