"""Learned or memorised?  Commands that training never shows, and states that no list can hold.

    python -m experiments.unseen                    the tables, from the records
    python -m experiments.unseen --run              trains what is missing, a minute a run
    python -m experiments.unseen exhaustive DIR     every command from every state
    python -m experiments.unseen certify DIR        a few commands from random states
    (DIR is a run of traces, such as experiments/results/models/linrnn-S5-seed0)

Training traces are made of some of the 120 commands of S5, test traces of all the others. There are
two certificates. *All pairs* gives every command from every state, in the shortest trace. It proves
that the model has the table of the group, and says nothing of a long way. *By generators* gives the
few commands that generate the group, from random states, and asks for every variable. It works for
S26, too. If all of 256 states pass, a fresh one passes with a probability of at least 98.5%
(Wilson's bound, 95% confidence). That says nothing of another depth, the number of random commands
ahead of a state: a linear recurrence drifts.

Finding. With 108 or 60 commands seen in training each unseen command is right from each state, on 5
of 5 and on 3 of 3 seeds. With 30 two seeds miss 1 and 2 of 10,800 pairs, and the third misses
1,029; with 12 or 5 0.2 to 20% of the pairs are right. Along traces of unseen commands errors add
up: at (64,8) 99.7 to 100, 77 to 99.9 and 44 to 75% of the reveals are right after 108, 60 and 30
seen, and with 12 or 5 a guess is as good. By generators at least 250 of 256 states pass after 16
full commands, from S3 to S26, but none of S26 unless training rehearses exchanges
(scale.ManyVariables).

Source: the question and both certificates are ours; the task is that of arXiv 2602.14814.
Next: snap.py.
"""

from functools import partial

import numpy as np
import torch
from tqdm import tqdm

from data import (Group, Parser, ReplTask, UserError, at_least, compose, draw_commands, generator,
                  next_tokens, run, run_commands)
from eval import LENGTHS, device_of, find_device, load, predict, read_checkpoint, wilson
from experiments import (OLD, at, chapter, evaluate_all, grid, make, make_arm, percent,
                         read_rightly, record, records, table, where)
from experiments.groups import shortest_words
from experiments.plots import BLUE, canvas, count, dot, draw, ticks_at
from models import LinRNN
from train import Recipe


# --- 1. Unseen commands ---------------------------------------------------------------------------

class UnseenTask(ReplTask):
    """REPL traces: `seen` of the commands in training, all others in the test."""

    def __init__(self, group, seen):
        super().__init__(group)
        # The same commands for each seed of a run.
        mixed = self.alphabet[generator(0, "split").permutation(len(self.alphabet))]
        self.seen = mixed[:seen]
        self.unseen = mixed[seen:]

    def training_batch(self, batch, length, spacing, rng):
        return self.batch_of(self.seen, batch, length, spacing, rng)

    def test_batch(self, batch, length, spacing, rng):
        return self.batch_of(self.unseen, batch, length, spacing, rng)

    def batch_of(self, alphabet, batch, length, spacing, rng):
        """A Batch of traces whose commands are uniform over this alphabet."""
        self.check(length, spacing)
        commands = alphabet[rng.integers(len(alphabet), size=(batch, length))]
        asked = rng.integers(self.group.degree, size=(batch, length // spacing))
        return next_tokens(*self.write(commands, asked, spacing))


# --- 2. The certificate of all pairs --------------------------------------------------------------

def all_pairs(model, task, alphabet):
    """Every command of an alphabet from every state: whether all variables are then right.

    A state is reached by the fewest commands that lead there, so that what is tested is the last
    command and not a long way. If all pairs of all commands are right, the model has the whole
    multiplication table of the group.

    Returns: bool [states, commands], the states in the order of group.elements.
    """
    group = task.group
    n = group.degree
    words = shortest_words(group, task.alphabet)

    right = np.empty((len(words), len(alphabet)), bool)
    for state, word in tqdm(words.items(), leave=False, disable=None):  # a bar in a terminal only
        # One batch for each state. It holds each command n times, and each time another variable
        # is asked for in its one reveal.
        commands = np.array([[*word, command] for command in alphabet])
        asked = np.tile(np.arange(n), len(alphabet))[:, None]
        batch = next_tokens(*task.write(commands.repeat(n, 0), asked, commands.shape[1]))

        said = predict(model, batch.inputs)[batch.reveals].reshape(-1, n)
        expected = compose(group.elements[[state]].repeat(len(alphabet), 0), alphabet)
        right[state] = (said == task.value_tokens[expected]).all(1)
    return right


def exhaustive(argv):
    """The command `exhaustive`: every command from every state, then every variable."""
    parser = Parser(exhaustive.__doc__, prog="python -m experiments.unseen exhaustive")
    parser.add_argument("run", help="a run folder of traces")
    args = parser.parse_args(argv)

    task, model = load(args.run, find_device())
    order = task.group.order
    if order > 10**4:
        raise UserError(f"{task.group.name} has {order:.0e} states, too many for a list: certify "
                        "asks from random ones")
    right = all_pairs(model, task, task.alphabet)
    print(f"{task.group.name}: {right.sum():,} of {right.size:,} pairs of a state and a command "
          f"are right; a guess is right in one of {order:,}")

    # The first that are wrong, with values printed from 1.
    for state, command in np.argwhere(~right)[:10]:
        print(f"  wrong from state {task.group.elements[state] + 1} by command "
              f"{task.decode(task.command_tokens(task.alphabet[command])[1:-1])}")


# --- 3. The certificate by generators -------------------------------------------------------------

def generators(task):
    """Commands that generate the group: [generators, n].

    For S<n> these are the exchanges of neighbours; for swap commands, and for other groups, all
    commands there are.
    """
    if task.group.letter != "S" or task.commands == "swap":
        return task.alphabet

    n = task.group.degree
    found = np.tile(np.arange(n), (n - 1, 1))
    for first, command in enumerate(found):
        command[[first, first + 1]] = first + 1, first
    return found


@torch.no_grad()
def pass_generators(model, task, states, depth, rng):
    """Give each generator from random states, and ask for every variable after it.

    states: how many, each reached in a trace of its own; depth: by how many random commands.
    Returns: bool [states, generators], whether all variables are right.
    """
    # The model's states after random commands, and the true ones.
    device = device_of(model)
    commands = draw_commands(task.group, task.commands, (states, depth), rng)
    start = np.tile(task.start_tokens(), (states, 1))
    lines = task.command_tokens(commands).reshape(states, -1)
    _, before = model.stream(torch.from_numpy(np.hstack([start, lines])).to(device))
    perms = run_commands(commands)[:, -1]

    right = []
    for command in tqdm(generators(task), leave=False, disable=None):
        line = np.tile(task.command_tokens(command), (states, 1))
        _, after = model.stream(torch.from_numpy(line).to(device), before)
        right.append(read_rightly(model, task, after, perms[:, command]))
    return np.stack(right, 1)


def certify(argv):
    """The command `certify`: the commands that generate the group, from random states."""
    parser = Parser(certify.__doc__, prog="python -m experiments.unseen certify")
    add = parser.add_argument
    add("run", help="a run folder of traces")
    add("--states", type=at_least(1), default=256,
        help="random states, each in a trace of its own (256)")
    add("--depth", type=at_least(1), default=16, help="random commands ahead of each state (16)")
    add("--seed", type=at_least(0), default=0, help="of the states (0)")
    add("--record", action="store_true", help="add the row to experiments/results/unseen.jsonl")
    args = parser.parse_args(argv)

    task, model = load(args.run, find_device())
    rng = generator(args.seed, "test", args.depth, args.depth)
    right = pass_generators(model, task, args.states, args.depth, rng)
    passed = int(right.all(1).sum())
    low, high = wilson(passed, args.states)
    print(f"{task.group.name}: {passed} of {args.states} random states after {args.depth} commands "
          f"pass with all {right.shape[1]} generators (95%: {low:.2%} to {high:.2%})\n"
          f"a guess passes with one generator from one state in {task.group.order:,}")

    if args.record:
        config = read_checkpoint(args.run)["config"]
        record("unseen", {
            "kind": "certificate", "group": task.group.name, "commands": task.commands,
            "rehearsal": "yes" if config.get("sparse") else "no", "seed": config["seed"],
            "depth": args.depth, "states": args.states, "generators": right.shape[1],
            "passed": passed})


# --- 4. The study ---------------------------------------------------------------------------------

CELLS = [  # seen: commands in training
    *grid(kind=["unseen"], seen=[108], seed=range(5)),
    *grid(kind=["unseen"], seen=[60, 30], seed=range(3)),
    *grid(kind=["unseen"], seen=[12, 5], seed=range(2))]


def plan(cell):
    task = UnseenTask(Group("S5"), cell["seen"])
    return task, partial(make_arm, LinRNN, task), Recipe(**OLD, seed=cell["seed"]), LENGTHS


def measure(model, task, tests):
    """A row for each length, and one for the pairs of a state and an unseen command.

    All those pairs are new, in traces of at most two commands.
    """
    right = all_pairs(model, task, task.unseen)
    pairs = {"length": 2, "pairs": right.size, "pairs_right": int(right.sum())}
    return [*evaluate_all(model, task, tests), pairs]


def all_right(row):
    """Whether each unseen command is right from each state."""
    return at(row, 2)["pairs_right"] == at(row, 2)["pairs"]


def pairs_of(rows):
    """A column: the pairs of an unseen command and a state that are right."""
    texts = [f"{at(row, 2)['pairs_right']:,} of {at(row, 2)['pairs']:,}" for row in rows]
    return ", ".join(texts)


def passed_of(rows):
    """A column: the states that pass, by seed."""
    return " ".join(str(row["passed"]) for row in rows)


def show():
    """Both tables, from results/unseen.jsonl."""
    table("S5, of 120 commands `seen` in training, the others in the test: pairs of a state and\n"
          "an unseen command (a guess: 1 of 120), reveals after unseen commands in % (chance 20)",
          records("unseen", kind="unseen"), ["seen", "seed"], {
              "pairs right": pairs_of,
              **{f"({length},{spacing})": percent(length) for length, spacing in LENGTHS}})

    table("By generators: states that pass with all of them, by seed (a guess passes none)\n"
          "rehearsal: training shows exchanges among full commands (scale.ManyVariables)",
          records("unseen", kind="certificate"),
          ["group", "commands", "rehearsal", "depth", "generators", "states"],
          {"passed": passed_of})


def picture():
    """Unseen commands that are right from each state, by the number of commands in training."""
    rows = records("unseen", kind="unseen")
    alls = {seen: count(where(rows, seen=seen), all_right) for seen in (60, 108)}
    figure, ((axes,),) = canvas("Every unseen line is right from every state with 60 lines seen "
                                f"({alls[60]} seeds)\nand with 108 ({alls[108]})")
    for row in rows:
        pairs = at(row, 2)
        dot(axes, row["seen"], pairs["pairs_right"] / pairs["pairs"], "o", BLUE)
    axes.set(ylim=(0, 1.04), xlabel="lines seen in training, of 120;   o  a seed",
             ylabel="right pairs of state and unseen line")
    draw(axes, {}, chance=1 / 120)
    ticks_at(axes, [5, 12, 30, 60, 108])
    return figure


def main(argv=None):
    chapter(__doc__, show, partial(make, "unseen", CELLS, plan, measure),
            {"exhaustive": exhaustive, "certify": certify}, argv)


if __name__ == "__main__":
    run(main)
