"""What if a line comes again and again?

    >>> a, b, c, d, e = c, e, b, a, d        typed once,
    >>> a, b, c, d, e = c, e, b, a, d        and again, and again: when is a variable misread?

The tests of the other chapters draw fresh lines. But a program has loops, and a line that comes
again brings the same small error again. Here one line, or a loop of a few, repeats without a print.
After each round every variable is asked for, from a branch of the state, so that no answer tells
the model anything.

FINDING

    python -m experiments.repeats          the tables, from the records
    python -m experiments.repeats --run    first makes what has no record; 1 to 3 minutes a run
    python -m experiments.repeats DIR      the loops of a run of one's own (ten seconds)

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
from eval import LENGTHS, device_of, evaluate, find_device, load, load_weights, predict, score
from experiments import (FALLING, OLD, RATES, at, chapter, grid, make, make_arm,
                         millions, percent, record, records, span, table, where)
from experiments.arms import ARMS, FACTORS, STAGES, cosine, in_last_tenth
from experiments.inside import STORED, fit_image, settled_states, tracking_heads
from experiments.plots import BLUE, GREY, RED, canvas, draw, ticks_at
from experiments.snap import Snapped
from models import LinRNN
from train import RUNS, Recipe


LOOPS = [1, 2, 3, 5]  # lines of a loop
MOST = 64  # lines, as many as training has


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
        wrong = (read_variables(model, task, state, batch) != task.value_tokens[perms]).any(1)
        first[wrong & (first > most)] = line
    return first


def read_variables(model, task, state, batch):
    """What the model answers to a print of each variable, all from this state: [B, n]."""
    said = []
    for variable in range(task.group.degree):
        asked = np.full(batch, variable)
        question = task.reveal_tokens(asked, asked)[:, :-2]  # the value is left out
        logits, _ = model.stream(torch.from_numpy(question).to(device_of(model)), state)
        said.append(logits[:, -1].argmax(-1).cpu().numpy())
    return np.stack(said, 1)


def repeated_programs(model, task, length, spacing):
    """The row of eval.py for programs in which one line repeats, with prints: each line once."""
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


def law(model, task, heads, lines=200):
    """Both numbers by the number of lines, medians of 120 programs; uniform lines and the same."""
    model = copy.deepcopy(model).double()  # what float32 rounds off is not the question
    image, _ = fit_image(model, task, heads)
    alphabet = task.alphabet
    rng = generator(0, "test", lines, lines)
    uniform = alphabet[rng.integers(len(alphabet), size=(len(alphabet), lines + 1))]
    same = alphabet[:, None].repeat(lines + 1, 1)

    row = {}
    for name, commands in [("uniform", uniform), ("same", same)]:
        alpha, E = drift(model, task, image, commands)
        row[name] = {"alpha": np.median(alpha, 0).tolist(), "error": np.median(E, 0).tolist()}
    return row


def slope(errors, begin=1, end=64):
    """The exponent of the growth between these numbers of lines, by least squares."""
    lines = np.arange(begin, end + 1)
    return np.polyfit(np.log(lines), np.log(errors[begin - 1:end]), 1)[0]


# --- 3. The study ---------------------------------------------------------------------------------
#
# `default` has the default command of train.py, on twenty seeds. `repeats` has other recipes, other
# mixers, and what the heads of ten models hold (kind: recipe, arm, inside).

DEFAULT_CELLS = grid(seed=range(80, 100))
OLD_CELLS = grid(kind=["recipe"], recipe=["old"], seed=range(80, 85))
LONG_CELLS = grid(kind=["recipe"], recipe=["to 256"], seed=range(80, 83))
ARM_CELLS = grid(kind=["arm"], arm=["linrnn", "linrnn-beta1", "transformer", "lstm"],
                 runs=[0.0, RUNS], millions=[5], seed=[80])
INSIDE_CELLS = [*grid(kind=["inside"], recipe=["default"], seed=range(5)),
                *grid(kind=["inside"], recipe=["old"], seed=range(80, 85))]

TESTS = [*LENGTHS, (512, 64), (1024, 128)]
INTERVALS = [0, 1, 8, 16, 32, 64]  # lines from one snap to the next; 0: the model alone


def plan_recipe(cell):
    """The run of `python train.py --model linrnn --group S5 --seed N`, or another recipe."""
    name = cell.get("recipe", "default")
    recipe = {"default": {}, "old": OLD, "to 256": TO_256}[name]
    runs = 0.0 if name == "old" else RUNS
    task = LongTraces(Group("S5"), runs=runs)
    return task, partial(make_arm, LinRNN, task), Recipe(seed=cell["seed"], **recipe), TESTS


# In the last stage the rates fall to 0 (FALLING).
TO_256 = {"curriculum": [*Recipe().curriculum, (256, 32)], "stage_steps": [0, 0, 0, 0, 100, 150]}


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


def plan_arm(cell):
    """An arm of the chapter `arms`, with its rates, on uniform commands or on runs."""
    rates = RATES[cell["arm"]]
    factor = FACTORS[cell["arm"]]
    task = Mix(Group("S5"), runs=cell["runs"])
    recipe = Recipe(curriculum=[STAGES[-1]], last_steps=10**6, seed=cell["seed"],
                    optimizer=rates["optimizer"], lr=factor * rates["lr"],
                    matrix_lr=factor * rates["matrix_lr"])
    return task, partial(make_arm, ARMS[cell["arm"]], task), recipe, [(8, 1), (64, 8), (128, 16)]


def measure(model, task, tests):
    """A row of eval.py for each test, with fewer traces where they are long; and one for each loop.
    """
    rows = []
    for length, spacing in tests:
        rows.append(evaluate(model, task, length, spacing, traces=min(256, 2**16 // length)))
    for lines in LOOPS:
        first = first_misread(model, task, loops_of(task, lines))
        rows.append({"loop": lines, "first": first.tolist()})
    return rows


def measure_inside(model, task):
    """The law, and programs of one line, put back after some lines; those with prints alone."""
    image, _ = fit_image(model, task, tracking_heads(model, task))
    rows = []
    for interval in INTERVALS:
        reader = Snapped(model, task, image, interval) if interval else model
        rows.append({"interval": interval, **repeated_programs(reader, task, 256, 16)})
    return {"law": law(model, task, image.heads), "put back": rows,
            "prints": repeated_programs(model, task, 128, 8)}


def make_missing():
    make("default", DEFAULT_CELLS, plan_recipe, measure)
    make("repeats", OLD_CELLS, plan_recipe, measure)
    make("repeats", LONG_CELLS, plan_recipe, measure, **FALLING)
    for cell in ARM_CELLS:
        cap = 1e6 * cell["millions"]
        make("repeats", [cell], plan_arm, measure, rate_of=partial(cosine, cap=cap),
             averaged=partial(in_last_tenth, cap=cap))

    for cell in INSIDE_CELLS:
        if not records("repeats", **cell):
            print(f"missing: {cell}", flush=True)
            record("repeats", cell | measure_inside(*reversed(model_of(cell))))


def model_of(cell):
    """The task and the model of a cell: a stored one, or one of OLD_CELLS."""
    if cell["recipe"] == "default":
        return load(STORED[cell["seed"]])
    task, make_model, _, _ = plan_recipe(cell)
    return task, load_weights(make_model(), f"runs/repeats/recipe-old-{cell['seed']}")


# --- 4. The tables --------------------------------------------------------------------------------

def first_of(row, lines=1):
    """The lines after which the loops of so many lines are first misread: an array."""
    return np.array(next(result["first"] for result in row["results"]
                         if result.get("loop") == lines))


def misread(within, lines=1):
    """A column of a table: how many of the 120 loops are misread within so many lines."""
    return lambda rows: span([(first_of(row, lines) <= within).sum() for row in rows], 0)


def least(rows):
    """A column of a table: the number of lines after which the first of all loops is misread."""
    return span([first_of(row).min() for row in rows], 0)


def show():
    rows = recipes()
    right = {f"({length},{S})": percent(length) for length, S in TESTS[1:]}
    table("Three recipes: reveals right in % (a guess has 20), and how many of the 120 lines, each "
          "typed\nagain and again, are misread within 16, 32 and 64; least-greatest of the seeds",
          rows, ["recipe"], {
              "runs": lambda rows: str(len(rows)), "million": millions, **right,
              "16": misread(16), "32": misread(32), "64": misread(64)})

    print("\nThe default command, twenty seeds, each list sorted\n")
    default = where(rows, recipe="default")
    for length, S in TESTS:
        print_sorted(f"({length},{S})", [100 * at(row, length)["all"] for row in default], 2)
    for within in (32, MOST):
        counts = [(first_of(row) <= within).sum() for row in default]
        print_sorted(f"misread within {within}", counts, 0)

    table("Loops of several lines: how many of 120 are misread within 64 lines",
          rows, ["recipe"], {f"{lines} lines": misread(MOST, lines) for lines in LOOPS})

    table("Other mixers, 5 million tokens of the mix of `arms`, one seed each: reveals right in %, "
          "and\nhow many of the 120 lines are misread within 4, 8, 16, 32 and 64",
          records("repeats", kind="arm"), ["arm", "runs"], {
              "(8,1)": percent(8), "(64,8)": percent(64), "(128,16)": percent(128),
              **{str(within): misread(within) for within in (4, 8, 16, 32, 64)}})

    inside = records("repeats", kind="inside")
    lines = [4, 16, 64, 128]
    for kind, name in [("uniform", "uniform lines"), ("same", "the same line")]:
        table(f"What five heads hold after {name}: alpha, the length that is left; the largest "
              "entry of\nthe error E; and the exponent of its growth from 1 to 64 lines", inside,
              ["recipe"], {
                  **{f"alpha {k}": held(kind, "alpha", k) for k in lines},
                  **{f"E {k}": held(kind, "error", k) for k in lines},
                  "exponent": exponent(kind)})

    table("One line, 256 times, a print after every 16, the state put back after every so many "
          "lines:\nprograms without an error, of 120 each of five models (0: never put back)",
          inside, ["recipe"], {str(interval): whole(interval) for interval in INTERVALS})
    table("One line, 128 times, a print after every 8: reveals right in %, whole programs of 120",
          inside, ["recipe"], {
              "right": lambda rows: span([100 * row["prints"]["all"] for row in rows]),
              "whole": lambda rows: span([120 * row["prints"]["perfect"] for row in rows], 0)})


def recipes():
    """The runs of the three recipes, the old one first."""
    default = [row | {"recipe": "default"} for row in records("default")]
    return [*records("repeats", recipe="old", kind="recipe"), *default,
            *records("repeats", recipe="to 256")]


def print_sorted(name, values, digits):
    """A line of numbers, from the least to the greatest."""
    text = " ".join(f"{value:.{digits}f}" for value in sorted(values))
    print(fill(text, 100, initial_indent=f"{name:>18}  ", subsequent_indent=" " * 20))


def held(kind, name, lines):
    """A column of a table: a number of the law after so many lines."""
    return lambda rows: span([row["law"][kind][name][lines - 1] for row in rows], 2)


def exponent(kind):
    """A column of a table: the exponent with which the error grows."""
    return lambda rows: span([slope(row["law"][kind]["error"]) for row in rows], 2)


def whole(interval):
    """A column of a table: programs without an error, of all models."""
    def count_whole(rows):
        found = [where(row["put back"], interval=interval)[0] for row in rows]
        right = sum(round(120 * row["perfect"]) for row in found)
        return f"{right} of {120 * len(found)}"
    return count_whole


def picture():
    """The error by the number of lines, and the lines that are still right."""
    inside = records("repeats", kind="inside", recipe="default")
    figure, ((left, right),) = canvas(
        "Errors of fresh lines add up as a root, those of one line in proportion;\n"
        "training on runs of one line makes a line exact", 1, 2, (9.5, 4.2))

    lines = np.arange(1, 201)
    found = {}
    for kind, name, colour in [("uniform", "fresh lines", BLUE), ("same", "the same line", RED)]:
        found[name] = lines, [row["law"][kind]["error"] for row in inside], colour
    left.set(xscale="log", yscale="log", xlabel="lines", ylabel="largest entry of the error E")
    draw(left, found, trained=64)

    found = {}
    for recipe, name, colour in [("old", "no runs", GREY), ("default", "runs", BLUE)]:
        first = [first_of(row) for row in where(recipes(), recipe=recipe)]
        alive = [[(of_run > k).mean() for k in range(1, MOST + 1)] for of_run in first]
        found[name] = lines[:MOST], alive, colour
    right.set(ylim=(0, 1.02), xlabel="times that one line is repeated",
              ylabel="of 120 lines, still right")
    draw(right, found)
    ticks_at(left, [1, 4, 16, 64, 200])
    return figure


# --- 5. The command line --------------------------------------------------------------------------

def of_run(argv):
    """What `python -m experiments.repeats DIR` does."""
    parser = Parser(prog="python -m experiments.repeats", description="The loops of one run.")
    parser.add_argument("DIR", help="a run folder of traces")
    args = parser.parse_args(argv)

    task, model = load(args.DIR, find_device())
    rows = []
    for lines in LOOPS:
        first = first_misread(model, task, loops_of(task, lines))
        rows.append({"lines of the loop": lines, "loops": len(first), **{
            f"within {within}": int((first <= within).sum()) for within in (16, 32, 64)}})
    table("Loops that are misread within so many lines", rows, [*rows[0]], {})


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if {*argv} - {"--run", "-h", "--help"}:
        return of_run(argv)
    chapter(__doc__, show, make_missing, {"DIR": of_run}, argv)  # DIR: for its help


if __name__ == "__main__":
    run(main)
