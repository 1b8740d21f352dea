"""Why does a state drift?  Every command adds an error, and no command takes one away.

Commands that training never showed are not difficult (unseen.py); long traces are. The errors of
random commands point in random directions and partly cancel: they grow like the root of the number
of commands. The errors of a repeated command point the same way and add up. So loops break first:
after 128 commands, a loop of ten has kept 82 to 97% of the values, and one repeated command 32 to
58%.

A line that shows a value ends the error of that variable, if the model writes the value into its
state. That takes training in which models must read (parts.py). Such a model can even *join late*,
without the first lines: of the reveals 25 to 48 it then answers at least 99.9%.

    python -m experiments.drift [--run]    the tables; --run: four minutes per missing run
    python -m experiments.drift DIR        the same tables for your own run

Source: ours. (Affine recurrences cannot correct errors: arXiv 2605.07755.)
Next: snap.py.
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F

from data import generator, run_cli
from eval import evaluate, predict
from experiments import Study, chapter, grid, records, summary, table
from experiments.groups import run_commands
from experiments.inside import fit_image, settled_states
from experiments.parts import trained
from experiments.plots import BLUE, GREY, RED, canvas, draw_lines, ticks_at
from experiments.reading import correct_after, first_values, repeat, told_values

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
    found["joined late"] = join_late(model, task, draw(256, 48), rng)
    return found


def join_late(model, task, commands, rng):
    """The accuracy in the second half of traces without first lines, a reveal after each command.

    commands [B, L, n]: they begin with the values 1, 2, ... in a random order.
    """
    batch, length, _ = commands.shape
    values = task.group.draw((batch,), rng).tolist()
    traces = map(task.trace, task.with_reveals(commands.tolist(), 1, rng), values)
    skipped = len(task.encode(task.start_lines()))
    inputs, targets, reveals = [part[:, skipped:] for part in task.batch_of(traces)]
    correct = (predict(model, inputs) == targets)[reveals].reshape(batch, length)
    return correct[:, length // 2:].mean()


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

def run(setting, folder):
    task, model, log = trained(setting, folder)
    return summary(model, log) | measure(model, task)


SETTINGS = [*grid(part=["the default"], seed=[*range(290, 310), *range(340, 360)]),
            # On three seeds, what these lack seemed to buy nothing (parts.py).
            *grid(part=["no write gate", "convolution of 4", "no clipping", "no repeated commands"],
                  seed=range(340, 360))]
STUDIES = [Study("drift", SETTINGS, run)]


# --- 4. The tables and the picture ----------------------------------------------------------------

READS = {"first values": "repeats 8", "a literal": "literal 8", "false reveals": "false reveals",
         "joined late": "joined late"}
DRIFTS = {"one command": "loop 1", "loop of ten": "loop 10", "random": "whole",
          "(128,16)": "(128,16)", "(256,32)": "(256,32)", "(1024,128)": "(1024,128)"}


def show(rows=None):
    """The tables of these records, or else of the study's."""
    def in_percent(names):
        return {head: lambda row, name=name: 100 * row[name] for head, name in names.items()}

    rows = rows or records("drift")
    exponents = {"exponents": lambda row: exponent(row["law"]["random"]),
                 "": lambda row: exponent(row["law"]["repeated"])}
    table("What is read: random first values, and the value of a literal, 8 commands later; false\n"
          "reveals that are believed; the last 24 of 48 reveals of a trace without its first\n"
          "lines; in % (chance is 20)", rows, ["part"], in_percent(READS))
    table("What drifts: values correct after 128 commands without a reveal, one command or a\n"
          "loop of ten; traces with all values correct after 256 random ones; reveals; in %; and\n"
          "the exponents with which errors of random and of repeated commands grow", rows, ["part"],
          in_percent(DRIFTS) | exponents)


def picture():
    """The error by the number of commands."""
    figure, ((axes,),) = canvas("Errors of random commands grow as the root of their number,\n"
                                "errors of a repeated command grow faster")
    laws = [row["law"] for row in records("drift", part="the default")]
    axes.set(yscale="log", xlabel="commands", ylabel="error in the table (0.5: a value is misread)")
    axes.axhline(0.5, color=GREY, linestyle="--", linewidth=0.9)
    draw_lines(axes, {f"{kind} commands": (range(1, 129), [law[kind] for law in laws], colour)
                      for kind, colour in (("random", BLUE), ("repeated", RED))}, trained=64)
    ticks_at(axes, [1, 4, 16, 64, 128])
    return figure


def show_run(task, model):
    show([{"part": "your run"} | measure(model, task)])


def main(argv=None):
    chapter(__doc__, show, STUDIES, argv, show_run)


if __name__ == "__main__":
    run_cli(main)
