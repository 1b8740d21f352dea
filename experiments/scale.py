"""What must grow with the variables?  One rule for any n <= 26, and runs without a part.

    python -m experiments.scale                     the tables, from the records
    python -m experiments.scale --run               trains what is missing, three hours in all
    python -m experiments.scale train S12           three minutes; S8 1.5, S26 7 to 50
    python -m experiments.scale train S26 --commands swap

The 2n slots and 2n reflections of scan.py do not depend on the order of the group. What grows is
the wait for the first stage, (2,1): a command that moves all variables says nothing until both the
look-up and the move are right. Against the wait stand a wider model, smaller rates for more steps
(rule_for), and easier traces (ManyVariables). A run is *solved* if at least 99.5% of the reveals
are right at (128,16).

Finding. S26 has 10^24 times the states of S5 and takes 13.8 times its tokens. By this rule all runs
from S3 to S26 are solved. At four times the 64 commands of the first five stages, (256,32), a model
of many variables drifts. Above twelve variables training therefore goes on to 256 commands. S16 has
99.8 to 100% of the reveals there, S20 98.0 to 99.9%, and S26 94.6%; at 512 they drift again.
Without the exchanges S12 waits more than four times as long at (2,1), and with one reveal in a row
about twice as long or more (on other seeds).

Source: the task is that of Siems et al. 2026 (arXiv 2602.14814), section 3; the rule is ours.
Next: copies.py.
"""

from functools import partial

import numpy as np

from data import COMMANDS, Group, ReplTask, UserError, at_least, draw_commands, next_tokens, run
from eval import LENGTHS, make_model
from experiments import (at, chapter, falls_at_the_end, grid, k_of_n, make, millions, minutes,
                         percent, records, span, table, where)
from experiments.groups import draw_sparse_commands
from experiments.plots import BLUE, SKY, canvas, dot
from models import LinRNN
from train import (Recipe, config_of_run, new_config, new_parser, rates_for, share_of_peak,
                   train_run)

SOLVED = 0.995  # of the reveals at (128,16)
COMMAND = "python -m experiments.scale train"


# --- 1. The rule for n variables ------------------------------------------------------------------

class ManyVariables(ReplTask):
    """REPL traces that are easier in training. Test traces are those of ReplTask.

    Reveals come n // 4 in a row, so that a trace tells more of its state. sparse: commands are made
    of a few exchanges where each command has a reveal, since a single command that leaves most
    variables alone tells more.

    Raises: UserError for sparse commands of a group other than S<n>.
    """

    def __init__(self, group, commands="full", sparse=True):
        super().__init__(group, commands)
        if sparse:
            group.require_swaps()  # here, and not at the first batch
        self.sparse = sparse
        self.reveals_in_a_row = max(1, group.degree // 4)

    def training_batch(self, batch, length, spacing, rng):
        self.check(length, spacing)
        n = self.group.degree
        batch = batch * 64 // max(64, length)  # a step has no more commands than one of (64,8)
        commands = draw_commands(self.group, self.commands, (batch, length), rng)

        # The first traces of the batch. Swap commands are exchanges, and stay as they are.
        easy = self.sparse_traces(batch, spacing) if self.commands == "full" else 0
        if easy:
            commands[:easy] = draw_sparse_commands(self.group, (easy, length), rng)

        asked = rng.integers(n, size=(batch, length // spacing, self.reveals_in_a_row))
        return next_tokens(*self.write(commands, asked, spacing))

    def sparse_traces(self, batch, spacing):
        """How many traces of a batch are made of sparse commands."""
        if not self.sparse:
            return 0
        if spacing == 1:  # the stages in which commands are learned
            return batch

        # Later one trace of sixteen rehearses them. Uniform commands move nearly all of many
        # variables, and a model that reads nothing else forgets the exchange of two. Of the 120
        # commands of S5 ten are exchanges, and it meets them anyway.
        return -(-batch // 16) if self.group.degree > 7 else 0  # rounded up


def rule_for(n):
    """The options of the model, and those of its recipe: two dicts. Found by trial, for n to 26.

    conv_width   n + 1 tokens see one side of a command; there are two to spare.
    d_model      two heads from n = 8 on. A key needs 2n dimensions (scan.py). A head has at least
                 2n + 8 of them, in steps of 8, and at least 32.
    lr           twice train.rates_for(n), which falls as 1 / n above five variables, and that of
                 the matrices as 1 / sqrt n. The rates of train.py are for traces with runs of one
                 command (the chapter `repeats`), and these records are older.
    last_steps   smaller rates need more steps. With 150 a model is right, but imprecise, and loses
                 long traces by drift.
    max_steps    the wait for (2,1) is longer.
    stage_steps  above twelve variables the last 300 steps go to traces of 64, 128 and 256 commands.
                 In 64 commands the errors do not add up to one that the loss would see.
    """
    options = {"conv_width": n + 3}
    rates = {name: 2 * rate for name, rate in rates_for(n).items()}
    recipe = {**rates, "last_steps": 150, "max_steps": 5000}

    if n > 7:
        quarter = -(-n // 4)  # rounded up
        options |= {"d_model": max(64, 16 * quarter + 16), "heads": 2}
        recipe |= {"last_steps": 300}
    if n > 12:
        recipe |= {"curriculum": [*Recipe().curriculum, (128, 8), (256, 8)],
                   "stage_steps": [0, 0, 0, 0, 60, 100, 140]}
    return options, recipe


def falls_over_long_traces(recipe, progress):
    """A hook of train(): where stages have numbers of steps, the rates fall over the last one."""
    return (falls_at_the_end if recipe.stage_steps else share_of_peak)(recipe, progress)


# --- 2. One run -----------------------------------------------------------------------------------

def train_one(argv):
    """The command `train`: a run of traces, which eval.py reads like any other."""
    parser = new_parser(COMMAND, "Train on traces of many variables, by the rule.")
    add = parser.add_argument
    add("group", nargs="?", help="S<n>; with --resume it is that of the run")
    add("--commands", choices=COMMANDS, help="whole elements, or exchanges (full)")
    add("--seed", type=at_least(0), help="of the traces, and of the weights to begin with (0)")

    typed = vars(parser.parse_args(argv))
    config = config_of_run(typed, COMMAND) if "resume" in typed else config_by_rule(typed)
    task = ManyVariables(Group(config["group"]), config["commands"], config["sparse"])
    train_run(task, make_model(config, task), config, typed, rate_of=falls_over_long_traces)


def config_by_rule(typed):
    """The config of a new run: what was typed, else what the rule says."""
    if "group" not in typed:
        raise UserError("train needs a group, as in: python -m experiments.scale train S8")
    n = Group(typed["group"]).degree
    names = {"task": "traces", "group": None, "commands": "full", "sparse": n > 7}
    return new_config(typed, COMMAND, names, *rule_for(n))


# --- 3. The study ---------------------------------------------------------------------------------

CELLS = [
    *grid(group=["S3", "S5"], commands=["full"], without=["none"], seed=range(3)),
    *grid(group=["S8", "S12"], commands=["full"], without=["none"], seed=range(30, 33)),
    *grid(group=["S16", "S20"], commands=["full"], without=["none"], seed=[30, 31]),
    *grid(group=["S26"], commands=["full"], without=["none"], seed=[30]),
    *grid(group=["S3", "S5", "S8", "S12"], commands=["swap"], without=["none"], seed=range(3)),
    *grid(group=["S26"], commands=["swap"], without=["none"], seed=range(2)),
    # The stages (2,1) and (8,1) only: how long is the wait at (2,1)?
    *grid(group=["S12"], commands=["full"], without=["reveals", "exchanges"], seed=range(3),
          millions=[5])]


def plan(cell):
    """By the rule, but for the part of it that is left out of the training traces."""
    group = Group(cell["group"])
    without = cell["without"]
    task = ManyVariables(group, cell["commands"], group.degree > 7 and without != "exchanges")
    if without == "reveals":
        task.reveals_in_a_row = 1

    options, recipe = rule_for(group.degree)
    if without != "none":
        recipe["curriculum"] = [(2, 1), (8, 1)]
    tests = LENGTHS if group.degree <= 12 else [*LENGTHS, (512, 64)]
    return (task, partial(LinRNN, len(task.vocab), **options), Recipe(**recipe, seed=cell["seed"]),
            tests)


# --- 4. What the records say ----------------------------------------------------------------------

def is_solved(row):
    """Whether traces of twice the length of training are right, up to one reveal in 200."""
    return at(row, 128)["all"] >= SOLVED


def at_512(rows):
    """A column: reveals right in % in traces of 512; tested where training has those of 256."""
    return span([100 * test["all"] for row in rows for test in row["results"]
                 if test["length"] == 512])


def waits(rows):
    """A column: million tokens read at (2,1), by seed; > : not left when the run ended."""
    texts = []
    for row in rows:
        last = max(tokens for tokens, length, _ in row["curve"] if length == 2)
        sign = "" if row["stage_reached"] > 1 else "> "
        texts.append(f"{sign}{last / 1e6:.1f}")
    return ", ".join(texts)


def show():
    """Both tables, from results/scale.jsonl."""
    rows = records("scale")
    table("Right reveals in %, least-greatest of the seeds; solved: at least 99.5% at (128,16)",
          where(rows, without="none"), ["group", "commands"], {
              "weights": lambda same: f"{same[0]['parameters']:,}",
              "million tokens": millions, "minutes": minutes,
              "chance": percent(64, "chance"),
              "solved": k_of_n(is_solved), "(128,16)": percent(128), "(256,32)": percent(256),
              "(512,64)": at_512})

    table("Million tokens, to the next 50 steps, until the stage (2,1) is left, by seed\n"
          "(>: not left); the reveals are 3 in a row, or 1 without them",
          where(rows, group="S12", commands="full"), ["group", "without"], {"tokens": waits})


def picture():
    """Tokens of the whole training, by the number of variables and the kind of commands."""
    rows = records("scale", without="none")
    tokens = {}
    for group in ("S5", "S26"):
        full = where(rows, group=group, commands="full")
        tokens[group] = np.mean([row["tokens"] for row in full])
    figure, ((axes,),) = canvas("With shuffles of all variables S26 takes "
                                f"{tokens['S26'] / tokens['S5']:.1f} times the tokens of S5,\n"
                                "for $10^{24}$ times the states")
    for row in rows:
        marker, colour = ("o", BLUE) if row["commands"] == "full" else ("x", SKY)
        dot(axes, int(row["group"][1:]), row["tokens"] / 1e6, marker, colour)
    axes.set(xlabel="variables, n:   o  lines shuffle all,   x  lines exchange two",
             ylabel="million tokens of the training")
    axes.loglog()
    axes.set_xticks([3, 5, 8, 12, 16, 20, 26], [3, 5, 8, 12, 16, 20, 26])
    axes.set_yticks([2, 5, 10, 20, 40], [2, 5, 10, 20, 40])
    axes.minorticks_off()
    return figure


def main(argv=None):
    make_missing = partial(make, "scale", CELLS, plan, rate_of=falls_over_long_traces)
    chapter(__doc__, show, make_missing, {"train": train_one}, argv)


if __name__ == "__main__":
    run(main)
