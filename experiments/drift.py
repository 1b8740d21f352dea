"""Why does a state drift?  Commands, repeated commands, and reveals each add an error.

    >>> a, b, c, d, e = c, e, b, a, d        typed once,
    >>> a, b, c, d, e = c, e, b, a, d        and repeated: when is a variable misread?
    >>> print('b', b)                        does this help the model, or hurt it?
    b 3

Finding. A state is lost in two ways: every command shortens what is held, and every command adds an
error. Errors of random commands add up as the root of their number, those of a repeated command in
proportion, and a command in turn with its inverse is worst. Reveals are the third cause. A model
that never has to learn a value from a reveal tends to ignore it: four of five believe no false one,
each reveal shortens the state, and with one after every command no state is whole (all five values
right) after 256. So a quarter of the training batches join a session late, with dense reveals. Then
17 of 20 seeds get at least 99.5% of the reveals right at (256,1), and 15 have every state whole.
The price: without any reveal, six seeds keep less than a quarter of the states for 256 commands.

    python -m experiments.drift          the tables, from the records
    python -m experiments.drift --run    first make what has no record; two minutes a run
    python -m experiments.drift DIR      the loops and reveals of your own run

Source: the question is this project's. Affine recurrences cannot correct errors: arXiv 2605.07755.
Next: snap.py.
"""

import copy
import sys
from dataclasses import asdict

import numpy as np
import torch
import torch.nn.functional as F

import eval as evaluation
from data import draw_commands, generator, run_cli
from eval import evaluate
from experiments import (Plan, Study, ask_all, by_test, chapter, grid, in_order, load, percent,
                         read, records, table, trained, where)
from experiments.groups import alphabet, compose, run_commands
from experiments.inside import fit_image, read_heads, tracking_heads
from experiments.plots import BLUE, GREY, RED, canvas, draw, ticks_at
from train import Config

MOST = 64  # commands, as many as in training
LOOPS = ["repeated", "inverse", "of 2", "of 5"]  # inverse: a command and its inverse in turn
PLACES = {"none": 0, "one in 16": 16, "one in 4": 4, "every command": 1, "64 at random": None}
KINDS = ["random", "repeated", "revealed"]  # revealed: random commands, a reveal after each


# --- 1. Loops: when is a variable misread? --------------------------------------------------------

def loops_of(task):
    """The commands of one round, for each kind of loop: {kind: [loops, commands, n]}."""
    single = alphabet(task)[:120]
    loops = {"repeated": single[:, None], "inverse": np.stack([single, single.argsort(1)], 1)}
    for length in (2, 5):
        shape = (120, length)
        loops[f"of {length}"] = draw_commands(task.group, task.commands, shape,
                                              generator(0, "test", length))
    return loops


def first_misread(model, task, loops, most=MOST):
    """The number of commands after which some variable is first misread, for each loop.

    All variables are asked for after each round.
    Shapes: loops [B, commands, n] -> int [B]; most + 1 where nothing is misread within `most`.
    """
    batch, length, n = loops.shape
    texts = ["".join(map(task.command_line, loop)) for loop in loops.tolist()]
    once = run_commands(loops)[:, -1]  # what one round does

    _, state = read(model, task, [task.start_lines()] * batch)
    perms = np.tile(np.arange(n), (batch, 1))
    first = np.full(batch, most + 1)
    for commands in range(length, most + 1, length):
        _, state = read(model, task, texts, state)
        perms = compose(perms, once)
        wrong = (ask_all(model, task, state, batch) != perms).any(1)
        first[wrong & (first > most)] = commands
    return first


# --- 2. Reveals: does a model use them? -----------------------------------------------------------

def whole_states(model, task, places, length=256, traces=96):
    """Fraction of states in which all variables are read correctly, after `length` commands.

    places: after which commands there is a reveal, bool [length].
    """
    rng = generator(0, "test", length)
    commands = draw_commands(task.group, task.commands, (traces, length), rng)
    asked = rng.integers(task.group.degree, size=(traces, length))
    perms = run_commands(commands)

    _, state = read(model, task, [task.start_lines()] * traces)
    for t in range(length):
        texts = [task.command_line(g) for g in commands[:, t].tolist()]
        if places[t]:
            texts = [text + task.reveal_lines(i, perm[i])
                     for text, i, perm in zip(texts, asked[:, t], perms[:, t])]
        _, state = read(model, task, texts, state)
    return (ask_all(model, task, state, traces) == perms[:, -1]).all(1).mean()


def places_of(name, length=256):
    """Where the reveals are, for a name in PLACES: bool [length]."""
    if PLACES[name] is None:
        return generator(0, "valid").permutation(length) < 64
    return np.arange(1, length + 1) % (PLACES[name] or length + 1) == 0


def believed(model, task, length=32, traces=96):
    """How often a model believes a false reveal: when asked again, it repeats the false value.

    A state of `length` commands answers for itself if the model ignores reveals.
    """
    rng = generator(1, "test", length)
    commands = draw_commands(task.group, task.commands, (traces, length), rng)
    texts = [task.start_lines() + "".join(map(task.command_line, trace))
             for trace in commands.tolist()]
    _, state = read(model, task, texts)

    n = task.group.degree
    rows = np.arange(traces)
    asked = rng.integers(n, size=traces)
    false = (run_commands(commands)[rows, -1, asked] + rng.integers(1, n, size=traces)) % n
    _, state = read(model, task, map(task.reveal_lines, asked, false), state)
    return (ask_all(model, task, state, traces)[rows, asked] == false).mean()


# --- 3. The law of the errors ---------------------------------------------------------------------
#
# A state is a linear image of the permutation matrix P (inside.py, equation 1). What a drifted
# state is read as is
#
#     1/n + alpha (P - 1/n + E)                                                                 (1)
#
# where alpha is the norm that is left of P, and E is orthogonal to it. So a state is lost in two
# ways.
#
# alpha shrinks with every command. A key that is slightly off moves part of the values into
# directions that no name reads, and there they are erased. A shorter P is harmless at first, since
# the model normalises what it reads (out_norm), but in the end it is lost in whatever else S holds.
#
# E confuses two values once two of its entries differ by 1. Every command adds an error to it and
# carries the earlier ones along. The errors of random commands point anywhere and add up like a
# random walk, as the root of their number. A repeated command adds the same error every time, and
# leaves the parts of it along its eigenvalues 1 where they are: those add up in proportion.
#
# A reveal adds an error as well, unless the model writes the revealed value into its row.

def errors(model, task, image, commands, reveals=False):
    """alpha, and the largest entry of E, after each command: [B, L], [B, L].

    Shapes: commands [B, L, n].  reveals: whether each command is followed by one.
    """
    batch, length, n = commands.shape
    perms = run_commands(commands)
    asked = generator(0, "test").integers(n, size=(batch, length))

    # A network works late: a command has settled once the next one has named its left-hand side.
    settling = task.command_line(range(n)).split(" = ")[0] + " = "
    _, state = read(model, task, [task.start_lines()] * batch)
    states = []
    for t in range(length):
        texts = [task.command_line(g) for g in commands[:, t].tolist()]
        if reveals:
            texts = [text + task.reveal_lines(i, perm[i])
                     for text, i, perm in zip(texts, asked[:, t], perms[:, t])]
        _, state = read(model, task, texts, state)
        _, settled = read(model, task, [settling] * batch, state)
        states.append(read_heads(settled, image.heads))

    P = F.one_hot(torch.from_numpy(perms), n) - 1 / n
    seen = image.read(torch.stack(states, 1)) - 1 / n
    alpha = (seen * P).sum((-2, -1)) / P.square().sum((-2, -1))
    E = seen / alpha[..., None, None] - P
    return alpha.numpy(), E.abs().flatten(-2).amax(-1).numpy()


def law(model, task, heads, length=128):
    """Medians of alpha and E after 1, 2, ... commands, for three kinds of traces: a list of dicts.

    Every kind has one trace for every second command of the group.
    """
    model = copy.deepcopy(model).double()  # rounding in float32 is not the question
    image, _ = fit_image(model, task, heads)
    same = alphabet(task)[::2, None].repeat(length, 1)
    fresh = draw_commands(task.group, task.commands, same.shape[:2], generator(0, "test", length))

    rows = []
    for kind, commands, reveals in [("random", fresh, False), ("repeated", same, False),
                                    ("revealed", fresh, True)]:
        alpha, E = errors(model, task, image, commands, reveals)
        rows.append({"kind": kind, "alpha": np.median(alpha, 0).tolist(),
                     "error": np.median(E, 0).tolist()})
    return rows


def slope(error, end=64):
    """The exponent with which an error grows from 1 command to `end`, by least squares."""
    return np.polyfit(np.log(np.arange(1, end + 1)), np.log(error[:end]), 1)[0]


# --- 4. The study ---------------------------------------------------------------------------------

RECIPES = {
    "default": {},  # python train.py --model linrnn --group S5
    "no dense reveals": {"dense_fraction": 0.0, "final_steps": 250},
    "nor repeats": {"dense_fraction": 0.0, "repeat_fraction": 0.0, "final_steps": 150,
                    "lr": 4e-3, "matrix_lr": 0.02}}
CELLS = [*grid(recipe=["default"], seed=range(200, 220)),
         *grid(recipe=["no dense reveals", "nor repeats"], seed=range(5))]
TESTS = [(64, 8), (128, 1), (128, 4), (128, 16), (256, 1), (256, 32), (512, 64), (1024, 128)]


def plan(cell):
    config = Config(seed=cell["seed"], **RECIPES[cell["recipe"]])
    task, model = evaluation.make(asdict(config))
    return Plan(task, lambda: model, config, TESTS,
                measure if cell["seed"] % 100 < 3 else measure_drift)


def measure_drift(model, task, tests):
    """A row of eval.py for each test (fewer traces if they are long), each loop, each spacing."""
    rows = []
    for length, spacing in tests:
        row = evaluate(model, task, length, spacing, traces=min(256, 2**15 // length))
        del row["by_position"]
        rows.append(row)
    for loop, commands in loops_of(task).items():
        rows.append({"loop": loop, "first": first_misread(model, task, commands).tolist()})
    for name in PLACES:
        rows.append({"reveals": name, "whole": whole_states(model, task, places_of(name))})
    return [*rows, {"believed": believed(model, task)}]


def measure(model, task, tests):
    """The same, and the law."""
    return [*measure_drift(model, task, tests), *law(model, task, tracking_heads(model, task))]


STUDIES = [Study("drift", CELLS, trained(plan))]


# --- 5. The tables and the picture ----------------------------------------------------------------

def part(row, **conditions):
    """The one result of a row in which these keys have these values."""
    return where(row["results"], **conditions)[0]


def misread(loop, within):
    """A column: how many of the 120 loops are misread within so many commands."""
    return lambda row: sum(first <= within for first in part(row, loop=loop)["first"])


def whole(name):
    """A column: whole states read correctly, in %."""
    return lambda row: round(100 * part(row, reveals=name)["whole"])


def trust(row):
    """A column: false reveals that the model believes, in %."""
    return round(100 * next(r["believed"] for r in row["results"] if "believed" in r))


def after(commands, kind, name):
    """A column: a number of the law after so many commands."""
    return lambda row: part(row, kind=kind)[name][commands - 1]


def show():
    rows = sorted(records("drift"), key=lambda row: [*RECIPES].index(row["recipe"]))
    table("Reveals correct in % (chance is 20), min-max of the seeds", rows, ["recipe"],
          {"steps": lambda row: row["steps"], **by_test(TESTS)})
    for length, spacing in [(256, 1), (256, 32)]:
        accuracies = map(percent(length, spacing), where(rows, recipe="default"))
        print(f"\nDefault, ({length},{spacing}), seeds sorted:\n{in_order(accuracies)}")

    table("Loops, of 120 misread within 32 and within 64 commands", rows, ["recipe"],
          {f"{loop}, {within}": misread(loop, within)
           for loop in LOOPS for within in (32, MOST)})

    table("Whole states read correctly after 256 random commands, in %, by the number of reveals;\n"
          "and false reveals that are believed, in %", rows, ["recipe"],
          {**{name: whole(name) for name in PLACES}, "believed": trust})

    few = [row for row in rows if row["seed"] % 100 < 3]
    for kind in KINDS:
        table(f"The law, {kind} commands: alpha, the norm that is left; the largest entry of E;\n"
              "the exponent of its growth from 1 to 64 commands", few, ["recipe"], {
                  **{f"alpha {k}": after(k, kind, "alpha") for k in (16, 64, 128)},
                  **{f"E {k}": after(k, kind, "error") for k in (4, 16, 64)},
                  "exponent": lambda row, kind=kind: slope(part(row, kind=kind)["error"])}, 2)


def picture():
    """The error by the number of commands, for three runs of the default recipe."""
    figure, ((axes,),) = canvas("Errors of random commands add up as the root of their number,\n"
                                "errors of a repeated command in proportion to it")
    found = {}
    for kind, name, colour in [("random", "random commands", BLUE), ("repeated", "repeated", RED)]:
        few = [row for row in records("drift", recipe="default") if row["seed"] < 203]
        found[name] = range(1, 129), [part(row, kind=kind)["error"] for row in few], colour
    axes.set(yscale="log", xlabel="commands", ylabel="largest entry of the error E")
    axes.axhline(0.5, color=GREY, linestyle="--", linewidth=0.9)
    axes.text(1, 0.53, "a value is misread", color=GREY)
    draw(axes, found, trained=64)
    ticks_at(axes, [1, 4, 16, 64, 128])
    return figure


# --- 6. The command line --------------------------------------------------------------------------

def of_run(folder):
    """Print the loops and the reveals of one run."""
    task, model = load(folder)
    rows = []
    for loop, commands in loops_of(task).items():
        first = first_misread(model, task, commands)
        rows.append({"loop": loop, "loops": len(first), **{
            f"within {within}": (first <= within).sum() for within in (16, 32, 64)}})
    table("Loops that are misread within so many commands", rows, rows[0], {})

    rows = [{"reveals": name, "whole": f"{whole_states(model, task, places_of(name)):.2f}"}
            for name in PLACES]
    table("Fraction of whole states read correctly after 256 random commands", rows, rows[0], {})
    print(f"\nFalse reveals that are believed: {believed(model, task):.2f}")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv and not argv[0].startswith("-"):
        return of_run(argv[0])
    chapter(__doc__, show, STUDIES, argv=argv)


if __name__ == "__main__":
    run_cli(main)
