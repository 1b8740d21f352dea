"""Why does a state drift?  Every command adds an error, and no command takes one away.

Errors of random commands point in random directions and partly cancel. Errors of a repeated command
point the same way and add up, so loops break first. After 128 commands without a reveal, a loop of
ten commands has kept 73 to 96% of the values, and one repeated command 36 to 53%.

Does a reveal help? If the model writes the revealed value into its state, it removes an error. If
the model ignores reveals, they are only more text, and more text means more errors. So a quarter of
the batches in train.py have *dense reveals*, more than their stage asks for, and *join late*: the
lines that set the first values are missing. Trained with both, every one of 20 models has at least
98% of its states whole (all five variables right) after 256 commands with a reveal after each.
Trained with neither, two of three models lose nearly all. The price is trust: 15 of the 20 believe
a *false* reveal more often than not.

    python -m experiments.drift [--run]    the tables; --run: three minutes per missing run
    python -m experiments.drift DIR        the same tables for your own run

Source: ours. (Affine recurrences cannot correct errors: arXiv 2605.07755.)
Next: snap.py.
"""

import copy
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from data import draw_commands, generator, run_cli
from eval import evaluate, make, predict
from experiments import Study, by_test, chapter, grid, records, summary, table, without
from experiments.groups import alphabet, run_commands
from experiments.inside import Untracked, fit_image, read_heads
from experiments.plots import BLUE, GREY, RED, canvas, draw_lines, ticks_at
from experiments.reading import follow, is_right, read
from train import DENSER, Config, train

# --- 1. Programs that loop ------------------------------------------------------------------------

LOOPS = ["repeated", "inverse", "of 2", "of 5", "of 10"]


def loops_of(task):
    """120 loops of each kind, as the commands of one round: {kind: [loops, commands, n]}.

    repeated: one command.  inverse: a command and its inverse in turn.  of 5: five random commands.
    """
    single = alphabet(task)[:120]
    loops = {"repeated": single[:, None], "inverse": np.stack([single, single.argsort(1)], 1)}
    for length in (2, 5, 10):
        rng = generator(0, "test", length)
        loops[f"of {length}"] = draw_commands(task.group, task.commands, (120, length), rng)
    return loops


def right_after(model, task, loops, length=128):
    """The fraction of values that are right after `length` commands without a reveal."""
    commands = np.tile(loops, (1, length, 1))[:, :length]
    *_, state = follow(model, task, commands)
    return is_right(model, task, state, run_commands(commands)[:, -1]).mean()


# --- 2. Reveals: does a model write them into its state? ------------------------------------------

def whole_states(model, task, reveals, length=256, traces=96):
    """The fraction of states that are whole, i.e. right in all variables, after `length` commands.

    reveals: whether there is one after every command, or none.
    """
    rng = generator(0, "test", length)
    commands = draw_commands(task.group, task.commands, (traces, length), rng)
    asked = rng.integers(task.group.degree, size=(traces, length))
    *_, state = follow(model, task, commands, asked if reveals else None)
    return is_right(model, task, state, run_commands(commands)[:, -1]).all(1).mean()


def believed(model, task, length=32, traces=96):
    """How often a model believes a false reveal: when asked again, it repeats the false value."""
    rng = generator(1, "test", length)
    commands = draw_commands(task.group, task.commands, (traces, length), rng)
    *_, state = follow(model, task, commands)

    n = task.group.degree
    rows = np.arange(traces)
    asked = rng.integers(n, size=traces)
    perms = run_commands(commands)[:, -1]
    perms[rows, asked] = (perms[rows, asked] + rng.integers(1, n, size=traces)) % n  # false ones
    _, state = read(model, task, map(task.reveal_lines, asked, perms[rows, asked]), state)
    return is_right(model, task, state, perms)[rows, asked].mean()


MISSED, HEARD = 16, 48  # commands


def join_late(model, task, traces=256):
    """A model that reads sessions from the 17th command on: its accuracy at each reveal, [HEARD].

    By then the values are nearly uniform, so only reveals can tell them.
    """
    rng = generator(0, "test", MISSED, HEARD)
    commands = draw_commands(task.group, task.commands, (traces, MISSED + HEARD), rng)
    asked = rng.integers(task.group.degree, size=commands.shape[:2])  # after every command
    first = task.group.degree + 3 * MISSED  # lines; a reveal has two
    batch = task.batch_of("".join(task.trace(*each).splitlines(keepends=True)[first:])
                          for each in zip(commands.tolist(), asked.tolist()))
    correct = (predict(model, batch.inputs) == batch.targets)[batch.reveals]
    return correct.reshape(traces, HEARD).mean(0)


# --- 3. The law of the errors ---------------------------------------------------------------------
#
# A state is a linear image of the permutation matrix P (inside.py, equation 1). Off a drifted state
# we read
#
#     1/n + scale (P - 1/n + E)                                                                 (1)
#
# where `scale` is what is left of P, and E is orthogonal to it. So a state is lost in two ways.
#
# The scale shrinks with every command. A key that is slightly off moves part of the values into
# directions that no name reads, and there they are erased. A smaller scale is harmless at first,
# since the model normalises what it reads (out_norm), but in the end the rest of S drowns P.
#
# E confuses two values once two of its entries differ by 1. Every command adds an error to it and
# carries the earlier ones along. The errors of random commands point anywhere and add up like a
# random walk, as the root of their number. A repeated command adds the same error every time. The
# parts of it along eigenvalues 1 of the command stay where they are, and add up in proportion.

KINDS = ["random", "repeated", "revealed"]  # revealed: random, with a reveal after each


def settled(model, task, image, state, batch):
    """What a state is read as, minus 1/n, on a branch in which the last command has settled."""
    if task.commands == "full":  # the next line must have named its left-hand side (inside.py)
        settling = task.command_line(range(image.n)).split(" = ")[0] + " = "
        _, state = read(model, task, [settling] * batch, state)
    return image.read(read_heads(state, image.heads)) - 1 / image.n


def errors(model, task, image, commands, asked=None):
    """The scale, and the largest entry of E, after each command: [B, L], [B, L].

    Shapes: those of follow().
    """
    states = follow(model, task, commands, asked)
    seen = torch.stack([settled(model, task, image, state, len(commands)) for state in states], 1)

    P = F.one_hot(torch.from_numpy(run_commands(commands)), image.n) - 1 / image.n
    scale = (seen * P).sum((-2, -1)) / P.square().sum((-2, -1))
    E = seen / scale[..., None, None] - P
    return scale.numpy(), E.abs().flatten(-2).amax(-1).numpy()


def law(model, task, heads=None, length=128):
    """Medians over traces after 1, 2, ... commands: {kind: {"scale": [L], "error": [L]}}.

    Every kind has one trace for every second command of the group. The result is {} if no head of
    the model tracks the state.
    """
    model = copy.deepcopy(model).double()  # rounding in float32 is not the question
    try:
        image, _ = fit_image(model, task, heads)
    except Untracked:
        return {}
    same = alphabet(task)[::2, None].repeat(length, 1)
    rng = generator(0, "test", length)
    fresh = draw_commands(task.group, task.commands, same.shape[:2], rng)
    asked = rng.integers(task.group.degree, size=fresh.shape[:2])

    found = {}
    for kind, *texts in zip(KINDS, (fresh, same, fresh), (None, None, asked)):
        scale, E = errors(model, task, image, *texts)
        found[kind] = {"scale": np.median(scale, 0).tolist(), "error": np.median(E, 0).tolist()}
    return found


def slope(error, end=64):
    """The exponent with which an error grows from 1 command to `end`, by least squares."""
    return np.polyfit(np.log(np.arange(1, end + 1)), np.log(error[:end]), 1)[0]


# --- 4. The study ---------------------------------------------------------------------------------
#
# A quarter of the batches of train.py are different in two ways: they have dense reveals, and they
# join a session late. Which of the two does it take?

RECIPES = {"default": (True, True), "dense reveals": (True, False), "late joins": (False, True),
           "neither": (False, False)}
SETTINGS = [*grid(recipe=["default"], seed=range(250, 270)),
            *grid(recipe=[*RECIPES][1:], seed=range(250, 253))]
TESTS = [(128, 1), (128, 4), (128, 16), (256, 1), (256, 32), (512, 64), (1024, 128)]


def draw_batch(task, config, now, rng, dense=True, late=True):
    """A batch as train.draw makes it, but with dense reveals and late joins as separate options."""
    length, spacing = config.curriculum[now.stage]
    denser = [S for S in DENSER if S < spacing]
    if not denser or rng.random() >= config.dense_fraction:
        return task.training_batch(config.batch, length, spacing, rng), True
    spacing = int(rng.choice(denser)) if dense else spacing
    batch = task.training_batch(config.batch, length, spacing, rng)
    return task.joined_late(batch, rng) if late else batch, False


def run(setting, folder):
    config = Config(seed=setting["seed"])
    task, model = make(asdict(config))
    dense, late = RECIPES[setting["recipe"]]
    model, log = train(model, task, config, folder, resume=True,
                       draw=partial(draw_batch, dense=dense, late=late))
    found = summary(model, log) | measure(model, task)
    if setting["recipe"] == "default" and setting["seed"] < 253:
        found["law"] = law(model, task)
    return found


def measure(model, task):
    """What a record says of a model, trained or loaded. Long traces are tested in fewer numbers."""
    results = [evaluate(model, task, *test, min(256, 2**15 // test[0])) for test in TESTS]
    return {"results": [without(row, "by_position") for row in results],
            "loops": {kind: right_after(model, task, loops)
                      for kind, loops in loops_of(task).items()},
            "believed": believed(model, task),
            "whole": whole_states(model, task, False),
            "whole_revealed": whole_states(model, task, True),
            "joined": join_late(model, task).tolist()}


STUDIES = [Study("drift", SETTINGS, run)]


# --- 5. The tables and the picture ----------------------------------------------------------------

def show(rows=None):
    """The tables of these records, or else of the study's."""
    rows = rows or [row for setting in SETTINGS for row in records("drift", **setting)]
    table("Reveals correct in % (chance is 20), min-max of the seeds", rows, ["recipe"],
          {"steps": lambda row: row.get("steps"), **by_test(TESTS)})
    table("Programs that loop: values right after 128 commands without a reveal, in %", rows,
          ["recipe"], {kind: lambda row, kind=kind: 100 * row["loops"][kind] for kind in LOOPS})
    table("What a reveal writes: states that are whole after 256 commands in %, without reveals\n"
          "and with one after each; reveals 25-48 right in % if a session is joined late; models\n"
          "that believe more than half of the false reveals", rows, ["recipe"],
          {"without": lambda row: 100 * row["whole"],
           "with reveals": lambda row: 100 * row["whole_revealed"],
           "joined late": lambda row: 100 * np.mean(row["joined"][24:]),
           "believe": lambda row: row["believed"] > 0.5})

    kinds = [{"commands": kind, **found} for row in rows
             for kind, found in row.get("law", {}).items()]
    table("The law: scale (what is left of P) and error (largest entry of E) after 64 commands;\n"
          "the exponent of the error's growth from 1 to 64", kinds, ["commands"],
          {"scale": lambda row: row["scale"][63], "error": lambda row: row["error"][63],
           "exponent": lambda row: slope(row["error"])}, 2)


def picture():
    """The error by the number of commands, for the runs that have the law."""
    figure, ((axes,),) = canvas("Errors of random commands grow as the root of their number,\n"
                                "errors of a repeated command in proportion")
    few = [row["law"] for row in records("drift") if row.get("law")]
    found = {name: (range(1, 129), [law[kind]["error"] for law in few], colour)
             for kind, name, colour in [("random", "random commands", BLUE),
                                        ("repeated", "one command repeated", RED)]}
    axes.set(yscale="log", xlabel="commands", ylabel="error in the table (0.5: a value is misread)")
    axes.axhline(0.5, color=GREY, linestyle="--", linewidth=0.9)
    draw_lines(axes, found, trained=64)
    ticks_at(axes, [1, 4, 16, 64, 128])
    return figure


def show_run(task, model):
    """The same tables for your own run."""
    show([{"recipe": "your run", **measure(model, task), "law": law(model, task)}])


def main(argv=None):
    chapter(__doc__, show, STUDIES, argv, show_run)


if __name__ == "__main__":
    run_cli(main)
