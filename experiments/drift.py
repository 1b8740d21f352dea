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
right) after 256. So a quarter of the training batches join a session late, with dense reveals. The
model then erases the row that a reveal names, and writes the revealed value. 17 of 20 seeds get at
least 99.5% of the reveals right at (256,1), and 15 have every state whole. The price: without any
reveal, six seeds keep less than a quarter of the states for 256 commands.

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

from data import draw_commands, generator, run_cli
from eval import evaluate, make
from experiments import (Study, by_test, chapter, grid, in_order, load, percent, read, records,
                         summary, table, where, without)
from experiments.groups import alphabet, run_commands
from experiments.inside import Untracked, fit_image, read_heads
from experiments.plots import BLUE, GREY, RED, canvas, draw, ticks_at
from train import Config, train

MOST = 64  # commands, as many as in training
LOOPS = ["repeated", "inverse", "of 2", "of 5"]  # inverse: a command and its inverse in turn
PLACES = {"none": 0, "one in 16": 16, "one in 4": 4, "every command": 1, "64 at random": None}
KINDS = ["random", "repeated", "revealed"]  # revealed: random, with a reveal after each


# --- 1. Reading a trace, command by command -------------------------------------------------------

def follow(model, task, commands, asked=None, places=None):
    """Let a model read traces: yields the state of its stream after each command and its reveal.

    Shapes: commands [B, L, n].  asked [B, L] variables to reveal, where places, bool [L], says so.
    """
    perms = run_commands(commands)
    _, state = read(model, task, [task.start_lines()] * len(commands))
    for t in range(commands.shape[1]):
        texts = map(task.command_line, commands[:, t].tolist())
        if places is not None and places[t]:
            texts = [text + task.reveal_lines(i, perm[i])
                     for text, i, perm in zip(texts, asked[:, t], perms[:, t])]
        _, state = read(model, task, texts, state)
        yield state


def ask_all(model, task, state, batch):
    """The value that a model predicts for each variable: -> int [B, n], or -1 for a non-value.

    Every question branches off the same state of model.stream, so no answer informs another.
    """
    answers = []
    for variable in range(len(task.names)):
        question = task.reveal_lines(variable, 0).removesuffix(f"{task.values[0]}\n")
        logits, _ = read(model, task, [question] * batch, state)
        answers.append([task.vocab[token] for token in logits[:, -1].argmax(-1).tolist()])
    values = {value: i for i, value in enumerate(task.values)}
    return np.array([[values.get(token, -1) for token in column] for column in answers]).T


def is_whole(model, task, state, perms):
    """Whether a state answers for all variables: perms [B, n] -> bool [B]."""
    return (ask_all(model, task, state, len(perms)) == perms).all(1)


# --- 2. Loops: when is a variable misread? --------------------------------------------------------

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
    batch, length, _ = loops.shape
    commands = np.tile(loops, (1, most // length, 1))
    perms = run_commands(commands)
    first = np.full(batch, most + 1)
    for t, state in enumerate(follow(model, task, commands)):
        if (t + 1) % length == 0:
            misread = ~is_whole(model, task, state, perms[:, t])
            first[misread & (first > most)] = t + 1
    return first


# --- 3. Reveals: does a model use them? -----------------------------------------------------------

def whole_states(model, task, places, length=256, traces=96):
    """Fraction of states in which all variables are read correctly, after `length` commands.

    places: after which commands there is a reveal, bool [length].
    """
    rng = generator(0, "test", length)
    commands = draw_commands(task.group, task.commands, (traces, length), rng)
    asked = rng.integers(task.group.degree, size=(traces, length))
    *_, state = follow(model, task, commands, asked, places)
    return is_whole(model, task, state, run_commands(commands)[:, -1]).mean()


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
    *_, state = follow(model, task, commands)

    n = task.group.degree
    rows = np.arange(traces)
    asked = rng.integers(n, size=traces)
    false = (run_commands(commands)[rows, -1, asked] + rng.integers(1, n, size=traces)) % n
    _, state = read(model, task, map(task.reveal_lines, asked, false), state)
    return (ask_all(model, task, state, traces)[rows, asked] == false).mean()


# --- 4. The law of the errors ---------------------------------------------------------------------
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
# A reveal adds an error as well. A model that uses it erases the row of the variable and writes the
# revealed value there: the alpha of that row is as if it were new, and the other rows shrink a bit.

def settled(model, task, image, state, batch):
    """What a state is read as, less 1/n, on a branch in which the last command has settled."""
    if task.commands == "full":  # the next line must have named its left-hand side (inside.py)
        settling = task.command_line(range(image.n)).split(" = ")[0] + " = "
        _, state = read(model, task, [settling] * batch, state)
    return image.read(read_heads(state, image.heads)) - 1 / image.n


def errors(model, task, image, commands, reveals=False):
    """alpha, and the largest entry of E, after each command: [B, L], [B, L].

    Shapes: commands [B, L, n].  reveals: whether each command is followed by one.
    """
    batch, length, n = commands.shape
    asked = generator(0, "test").integers(n, size=(batch, length))
    states = follow(model, task, commands, asked, [reveals] * length)
    seen = torch.stack([settled(model, task, image, state, batch) for state in states], 1)

    P = F.one_hot(torch.from_numpy(run_commands(commands)), n) - 1 / n
    alpha = (seen * P).sum((-2, -1)) / P.square().sum((-2, -1))
    E = seen / alpha[..., None, None] - P
    return alpha.numpy(), E.abs().flatten(-2).amax(-1).numpy()


def law(model, task, heads=None, length=128):
    """Medians of alpha and E after 1, 2, ... commands, for three kinds of traces: a list of dicts.

    Every kind has one trace for every second command of the group.
    """
    model = copy.deepcopy(model).double()  # rounding in float32 is not the question
    image, _ = fit_image(model, task, heads)
    same = alphabet(task)[::2, None].repeat(length, 1)
    fresh = draw_commands(task.group, task.commands, same.shape[:2], generator(0, "test", length))

    rows = []
    for kind, commands in [("random", fresh), ("repeated", same), ("revealed", fresh)]:
        alpha, E = errors(model, task, image, commands, kind == "revealed")
        rows.append({"kind": kind, "alpha": np.median(alpha, 0).tolist(),
                     "error": np.median(E, 0).tolist()})
    return rows


def slope(error, end=64):
    """The exponent with which an error grows from 1 command to `end`, by least squares."""
    return np.polyfit(np.log(np.arange(1, end + 1)), np.log(error[:end]), 1)[0]


def rows_left(model, task, image, length=64, traces=96):
    """The median alpha of the row that a reveal names, and of the other rows: a line for each.

    The states are those before the last of `length` reveals, one after every command; after it; and
    after a false one in its place.
    """
    rng = generator(0, "test", length)
    commands = draw_commands(task.group, task.commands, (traces, length), rng)
    asked = rng.integers(image.n, size=(traces, length))
    *_, state = follow(model, task, commands, asked, np.arange(length) < length - 1)

    perms = run_commands(commands)[:, -1]
    last = asked[:, -1]
    value = perms[np.arange(traces), last]
    states = {"before": state}
    for name, shown in [("after", value), ("after a false one", (value + 1) % image.n)]:
        _, states[name] = read(model, task, map(task.reveal_lines, last, shown), state)

    P = F.one_hot(torch.from_numpy(perms), image.n) - 1 / image.n
    named = torch.from_numpy(last[:, None] == np.arange(image.n))
    lines = {"row": "named"}, {"row": "others"}
    for name, state in states.items():
        seen = settled(model, task, image, state, traces)
        alpha = (seen * P).sum(-1) / P.square().sum(-1)
        for line, chosen in zip(lines, (named, ~named)):
            line[name] = f"{alpha[chosen].median():.2f}"
    return lines


# --- 5. The study ---------------------------------------------------------------------------------

RECIPES = {
    "default": {},  # python train.py --model linrnn --group S5
    "no dense reveals": {"dense_fraction": 0.0, "final_steps": 250},
    "nor repeats": {"dense_fraction": 0.0, "repeat_fraction": 0.0, "final_steps": 150,
                    "lr": 4e-3, "matrix_lr": 0.02}}
SETTINGS = [*grid(recipe=["default"], seed=range(200, 220)),
            *grid(recipe=["no dense reveals", "nor repeats"], seed=range(5))]
TESTS = [(64, 8), (128, 1), (128, 4), (128, 16), (256, 1), (256, 32), (512, 64), (1024, 128)]


def run(setting, folder):
    seed = setting["seed"]
    config = Config(seed=seed, **RECIPES[setting["recipe"]])
    task, model = make(asdict(config))
    model, log = train(model, task, config, folder, resume=True)
    return summary(model, log) | {"results": measure(model, task, with_law=seed % 100 < 3)}


def measure(model, task, with_law):
    """A row of eval.py for each test (fewer traces if they are long), each loop, each spacing."""
    rows = [without(evaluate(model, task, *test, traces=min(256, 2**15 // test[0])), "by_position")
            for test in TESTS]
    for loop, commands in loops_of(task).items():
        rows.append({"loop": loop, "first": first_misread(model, task, commands).tolist()})
    for name in PLACES:
        rows.append({"reveals": name, "whole": whole_states(model, task, places_of(name))})
    rows.append({"believed": believed(model, task)})
    return rows + (law(model, task) if with_law else [])


STUDIES = [Study("drift", SETTINGS, run)]


# --- 6. The tables and the picture ----------------------------------------------------------------

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


# --- 7. The command line --------------------------------------------------------------------------

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

    try:
        image, _ = fit_image(model, task)
    except Untracked as error:
        return print(f"\n{error}")
    lines = rows_left(model, task, image)
    table("The last of 64 reveals: the norm that is left (alpha) of the row that it names, and of\n"
          "the other rows", lines, lines[0], {})


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv and not argv[0].startswith("-"):
        return of_run(argv[0])
    chapter(__doc__, show, STUDIES, argv)


if __name__ == "__main__":
    run_cli(main)
