"""What if a line comes again and again?

    >>> a, b, c, d, e = c, e, b, a, d        typed once,
    >>> a, b, c, d, e = c, e, b, a, d        and again, and again: when is a variable misread?

The tests of the other chapters draw fresh lines. But a program has loops, and a line that comes
again brings the same small error again. Here one line, or a loop of a few, repeats without a print.
After each round every variable is asked for, from a branch of the state, so that no answer tells
the model anything.

Finding. A state is lost in two ways. With every line the table of values that a model holds gets
shorter, by some 1.2%: that ends long programs of fresh lines. And every line adds an error. Those
of fresh lines point anywhere and add up as the root of their number, those of one line in
proportion to it. So a line that comes again and again is lost within the length of training, where
hundreds of fresh lines are read. Training on runs of one line, at half the rates, makes lines more
exact: of 120 lines 16 to 43 are misread within 64, where 67 to 70 were, and at most 3 within 32,
where 16 to 27 were. A state that is put back (snap.py) after 32 lines, or sooner, loses no line.

    python -m experiments.repeats          the tables, from the records
    python -m experiments.repeats --run    first makes what has no record; two minutes a run
    python -m experiments.repeats DIR      the loops of a run of one's own

Source: the question is this project's. Affine recurrences cannot correct errors: arXiv 2605.07755.
Next: words.py.
"""

import copy
import sys
from functools import partial
from textwrap import fill

import numpy as np
import torch
import torch.nn.functional as F

from data import (Group, Parser, ReplTask, compose, draw_commands, generator, next_tokens, run,
                  run_commands)
from eval import LENGTHS, device_of, evaluate, find_device, load, predict, score
from experiments import (FALLING, OLD, RATES, at, chapter, falls_at_the_end, grid, make, make_arm,
                         millions, percent, read_rightly, records, span, table, where)
from experiments.arms import ARMS, FACTORS, STAGES, cosine, in_last_tenth
from experiments.inside import fit_image, settled_states, tracking_heads
from experiments.plots import BLUE, GREY, RED, canvas, draw, ticks_at
from experiments.snap import Snapped
from models import LinRNN
from train import RUNS, Recipe

LOOPS = [1, 2, 3, 5]  # lines of a loop
MOST = 64  # lines, as many as training has
INTERVALS = [0, 1, 8, 16, 32, 64]  # lines from one time that the state is put back to the next


# --- 1. When is a variable misread? ---------------------------------------------------------------

def loops_of(task, lines):
    """Loops of so many lines: each command alone, if it has at most 120, else 120 random loops.

    Shapes: [loops, lines, n].
    """
    if lines == 1 and task.group.order <= 120:
        return task.alphabet[:, None]
    return draw_commands(task.group, task.commands, (120, lines), generator(0, "test", lines))


@torch.no_grad()
def first_misread(model, task, loops, most=MOST):
    """The number of the line after which a variable is first misread, by loop.

    Law: after each round the model is asked for every variable, each time from the same state. A
    loop is right as long as all answers are.
    Shapes: loops [B, lines, n] -> int [B]; most + 1 where no variable is misread within `most`.
    """
    batch, lines, n = loops.shape
    device = device_of(model)
    start = np.tile(task.start_tokens(), (batch, 1))
    text = torch.from_numpy(task.command_tokens(loops).reshape(batch, -1)).to(device)
    once = run_commands(loops)[:, -1]  # what one round does

    _, state = model.stream(torch.from_numpy(start).to(device))
    perms = np.tile(np.arange(n), (batch, 1))
    first = np.full(batch, most + 1)
    for line in range(lines, most + 1, lines):
        _, state = model.stream(text, state)
        perms = compose(perms, once)
        wrong = ~read_rightly(model, task, state, perms)
        first[wrong & (first > most)] = line
    return first


def repeated_programs(model, task, length=128, spacing=8):
    """The row of eval.py for programs of one line, again and again, with prints; each line once."""
    commands = task.alphabet[:, None].repeat(length, 1)
    rng = generator(0, "test", length, spacing)
    asked = rng.integers(task.group.degree, size=(len(commands), length // spacing))
    batch = next_tokens(*task.write(commands, asked, spacing))
    right = (predict(model, batch.inputs) == batch.targets)[batch.reveals]
    return {"length": length, "spacing": spacing} | score(right.reshape(len(commands), -1))


# --- 2. The law of the errors ---------------------------------------------------------------------
#
# A state is a linear image of the permutation matrix P (inside.py, equation 1). What is read off a
# drifted state is
#
#     1/n + alpha (P - 1/n + E)                                                                 (1)
#
# where alpha is the length that is left of P, and E stands at right angles to it. So a state is
# lost in two ways.
#
# alpha falls with every line, by about as much whatever the line is. A key that is a little off
# moves a part of the values into dimensions that no name reads, and they are erased there. A
# shorter P does no harm at first, because the model scales what it reads (out_norm); in the end it
# is lost in what S holds besides. No trace of 64 lines shows that to the loss.
#
# E confuses two values, once two of its entries differ by 1. Each line adds an error to it, and
# later lines carry the error along. The errors of fresh lines point anywhere, and add up like a
# random walk, as the root of the number of lines. The same line adds the same error again. It does
# not turn the parts of the error along its eigenvalues 1, so these add up in proportion.

def drift(model, task, image, commands):
    """alpha, and the largest entry of E, after each command but the last: [B, L], [B, L].

    Shapes: commands [B, L + 1, n].
    """
    n = task.group.degree
    P = F.one_hot(torch.from_numpy(run_commands(commands[:, :-1])), n) - 1 / n
    read = image.read(settled_states(model, task, image.heads, commands)) - 1 / n
    alpha = (read * P).sum((-2, -1)) / P.square().sum((-2, -1))
    E = read / alpha[..., None, None] - P
    return alpha.numpy(), E.abs().flatten(-2).amax(-1).numpy()


def law(model, task, heads, lines=128):
    """Both numbers after 1, 2, ... lines, medians of a program for each command of the alphabet.

    Returns: a dict for fresh lines, and one for the same line again and again.
    """
    model = copy.deepcopy(model).double()  # what float32 rounds off is not the question
    image, _ = fit_image(model, task, heads)
    same = task.alphabet[:, None].repeat(lines + 1, 1)
    fresh = draw_commands(task.group, task.commands, same.shape[:2], generator(0, "test", lines))

    rows = []
    for name, commands in [("fresh", fresh), ("same", same)]:
        alpha, error = drift(model, task, image, commands)
        rows.append({"lines": name, "alpha": np.median(alpha, 0).tolist(),
                     "error": np.median(error, 0).tolist()})
    return rows


def slope(errors, end=64):
    """The exponent of their growth from 1 line to so many, by least squares."""
    return np.polyfit(np.log(np.arange(1, end + 1)), np.log(errors[:end]), 1)[0]


# --- 3. The study ---------------------------------------------------------------------------------
#
# `default` has the default command of train.py, on twenty seeds. `repeats` has the same network by
# two other recipes, and other mixers. OLD is the recipe of train.py before its traces had runs.

RECIPES = {
    "old": OLD,
    "default": {},
    # A quiet end at 256 lines: the rates fall to 0. So 256 is a length of training.
    "to 256": {"curriculum": [*Recipe().curriculum, (256, 32)],
               "stage_steps": [0, 0, 0, 0, 100, 150]}}

DEFAULT_CELLS = grid(seed=range(80, 100))
OLD_CELLS = grid(recipe=["old"], seed=range(80, 83))
LONG_CELLS = grid(recipe=["to 256"], seed=[80])
ARM_CELLS = grid(arm=["linrnn-beta1", "transformer", "lstm"], runs=[0.0, RUNS], millions=[5],
                 seed=[80])


class LongTraces(ReplTask):
    """REPL traces, of which a step has no more commands than one of (64,8)."""

    def training_batch(self, batch, length, spacing, rng):
        return super().training_batch(batch * 64 // max(64, length), length, spacing, rng)


class Mix(ReplTask):
    """Every batch is of one of the six stages of `arms`, at random, in proportion to 1 / L."""

    def training_batch(self, batch, length, spacing, rng):
        shares = np.array([1 / length for length, _ in STAGES])
        stage = rng.choice(len(STAGES), p=shares / shares.sum())
        return super().training_batch(batch, *STAGES[stage], rng)


def plan(cell):
    """The run of `python train.py --model linrnn --group S5 --seed N`, or another recipe."""
    name = cell.get("recipe", "default")
    task = LongTraces(Group("S5"), runs=0.0 if name == "old" else RUNS)
    recipe = Recipe(**RECIPES[name], seed=cell["seed"])
    return task, partial(make_arm, LinRNN, task), recipe, [*LENGTHS, (512, 64), (1024, 128)]


def plan_arm(cell):
    """An arm of `arms` by its rates, on uniform commands or on runs."""
    factor = FACTORS[cell["arm"]]
    rates = RATES[cell["arm"]]
    task = Mix(Group("S5"), runs=cell["runs"])
    recipe = Recipe(curriculum=[STAGES[-1]], last_steps=10**6, seed=cell["seed"],
                    optimizer=rates["optimizer"], lr=factor * rates["lr"],
                    matrix_lr=factor * rates["matrix_lr"])
    return task, partial(make_arm, ARMS[cell["arm"]], task), recipe, [(8, 1), (64, 8)]


def measure_loops(model, task, tests):
    """A row of eval.py for each test, with fewer traces where they are long; one for each loop."""
    rows = []
    for length, spacing in tests:
        rows.append(evaluate(model, task, length, spacing, traces=min(256, 2**16 // length)))
    for lines in LOOPS:
        first = first_misread(model, task, loops_of(task, lines))
        rows.append({"loop": lines, "first": first.tolist()})
    return rows


def measure(model, task, tests):
    """The same; the law; and programs of one line, put back after so many lines (0: never)."""
    rows = measure_loops(model, task, tests)
    image, _ = fit_image(model, task, tracking_heads(model, task))
    for interval in INTERVALS:
        reader = Snapped(model, task, image, interval) if interval else model
        rows.append({"interval": interval, **repeated_programs(reader, task)})
    return [*rows, *law(model, task, image.heads)]


def quiet_end(recipe, progress):
    """As falls_at_the_end, but the last stage begins at half of the peak: at more it destroys."""
    share = falls_at_the_end(recipe, progress)
    return share if progress.stage < recipe.last_stage else share / 2


def make_missing():
    make("default", DEFAULT_CELLS[:5], plan, measure)
    make("default", DEFAULT_CELLS[5:], plan, measure_loops)
    make("repeats", OLD_CELLS, plan, measure)
    cap = 5e6
    make("repeats", ARM_CELLS, plan_arm, measure_loops, rate_of=partial(cosine, cap=cap),
         averaged=partial(in_last_tenth, cap=cap))
    make("repeats", LONG_CELLS, plan, measure, **FALLING | {"rate_of": quiet_end})


# --- 4. The tables --------------------------------------------------------------------------------

def part(row, **conditions):
    """The one result of a row in which these keys have these values."""
    return where(row["results"], **conditions)[0]


def misread(within, lines=1):
    """A column of a table: how many of the 120 loops are misread within so many lines."""
    return lambda rows: span([misread_of(row, within, lines) for row in rows], 0)


def misread_of(row, within, lines=1):
    return sum(first <= within for first in part(row, loop=lines)["first"])


def whole(interval):
    """A column of a table: programs of one line without an error, of the 120 of each run."""
    return lambda rows: span([120 * part(row, interval=interval)["perfect"] for row in rows], 0)


def after(lines, kind, name):
    """A column of a table: a number of the law after so many lines."""
    return lambda rows: span([part(row, lines=kind)[name][lines - 1] for row in rows], 2)


def exponent(kind):
    """A column of a table: the exponent with which the error grows."""
    return lambda rows: span([slope(part(row, lines=kind)["error"]) for row in rows], 2)


def recipes():
    """The runs of the three recipes."""
    default = [row | {"recipe": "default"} for row in records("default")]
    return [*records("repeats", recipe="old"), *default, *records("repeats", recipe="to 256")]


def show():
    rows = recipes()
    five = [row for row in rows if row["seed"] < 85]  # at most, of each recipe
    table("Reveals right in % (a guess has 20), least-greatest of the runs", rows, ["recipe"], {
        "runs": lambda rows: str(len(rows)), "million tokens": millions,
        **{f"({length},{length // 8})": percent(length) for length in (64, 128, 256, 512, 1024)}})

    table("Of 120 lines, each typed again and again, misread within 16, 32 and 64 lines; of 120\n"
          "loops of 2, 3 and 5 lines, misread within 64", rows, ["recipe"], {
              **{str(within): misread(within) for within in (16, 32, 64)},
              **{f"loops of {lines}": misread(MOST, lines) for lines in LOOPS[1:]}})

    table("One line, 128 times, a print after every 8: programs without an error, of 120, by the\n"
          "lines from one time that the state is put back to the next (snap.py; 0: never)",
          five, ["recipe"], {str(interval): whole(interval) for interval in INTERVALS})

    for kind in ("fresh", "same"):
        table(f"The law, {kind} lines: alpha, the length that is left; the largest entry of E; and "
              "the\nexponent of its growth from 1 to 64 lines", five, ["recipe"], {
                  **{f"alpha {k}": after(k, kind, "alpha") for k in (16, 64, 128)},
                  **{f"E {k}": after(k, kind, "error") for k in (4, 16, 64)},
                  "exponent": exponent(kind)})

    table("Other mixers, 5 million tokens of the mix of `arms`, with a share of runs: reveals\n"
          "right in %, and how many of the 120 lines are misread within 2, 4, 8, 16 and 64",
          records("repeats", millions=5), ["arm", "runs"], {
              "(8,1)": percent(8), "(64,8)": percent(64),
              **{str(within): misread(within) for within in (2, 4, 8, 16, 64)}})

    print("\nThe runs of the default command, each list from the least to the greatest\n")
    default = where(rows, recipe="default")
    for length in (256, 512, 1024):
        right = sorted(f"{100 * at(row, length)['all']:6.2f}" for row in default)
        print(fill(" ".join(right), 100, initial_indent=f"right at {length:4}   ",
                   subsequent_indent=" " * 16))
    for within in (32, MOST):
        counts = sorted(misread_of(row, within) for row in default)
        print(f"misread in {within}  ", *counts)


def picture():
    """The error by the number of lines, of five runs of the default command."""
    figure, ((axes,),) = canvas("Errors of fresh lines add up as the root of their number,\n"
                                "errors of one line in proportion to it")
    found = {}
    for kind, name, colour in [("fresh", "fresh lines", BLUE), ("same", "the same line", RED)]:
        errors = [part(row, lines=kind)["error"] for row in records("default")[:5]]
        found[name] = range(1, 1 + len(errors[0])), errors, colour
    axes.set(yscale="log", xlabel="lines", ylabel="largest entry of the error E")
    axes.axhline(0.5, color=GREY, linestyle="--", linewidth=0.9)
    axes.text(1, 0.53, "a value is misread", color=GREY)
    draw(axes, found, trained=64)
    ticks_at(axes, [1, 4, 16, 64, 128])
    return figure


# --- 5. The command line --------------------------------------------------------------------------

def of_run(argv):
    """The loops of one run."""
    parser = Parser(of_run.__doc__, prog="python -m experiments.repeats")
    parser.add_argument("DIR", help="a run folder of traces")
    task, model = load(parser.parse_args(argv).DIR, find_device())

    rows = []
    for lines in LOOPS:
        first = first_misread(model, task, loops_of(task, lines))
        rows.append({"lines": lines, "loops": len(first)} | {
            f"within {within}": (first <= within).sum() for within in (16, 32, 64)})
    table("Loops of so many lines that are misread within 16, 32 and 64 lines", rows, rows[0], {})


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if {*argv} - {"--run", "-h", "--help"}:
        return of_run(argv)
    chapter(__doc__, show, make_missing, {"DIR": of_run}, argv)  # DIR: for its help


if __name__ == "__main__":
    run(main)
