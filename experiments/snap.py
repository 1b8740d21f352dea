"""Can a drifted state be put back?

A linear recurrence cannot pull a drifted state back: the steps that carry the state carry its
error, too. But the state is a linear image of a permutation matrix P (inside.py, equation 1). So
read P off the state, take the nearest permutation, and write its image back. No weight changes, and
no state is listed: S26 has 4 * 10^26 of them.

Finding. Put back after every command, the state lasts 8,192 commands on every recorded model, from
S3 to S26; alone the five models of S5 have 23 to 49% of the reveals there. Rarer snaps do for 2,048
uniform commands: one in 128 for S5, one in 64 for S8, S12 and one model of S26. A command that
comes again and again needs a snap sooner, on S5 after 32 of them at the latest (repeats.py). The
automaton inside the network, found by clustering alone, is the group in ten of ten runs. But a
state once put on the wrong place stays wrong.

Commands, where DIR is a run folder, such as experiments/results/models/linrnn-S5-seed0:
    python -m experiments.snap                  the tables, from the records
    python -m experiments.snap --run            first measures what has no record; trains nothing
    python -m experiments.snap DIR              traces of 8,192 commands, put back after each
    python -m experiments.snap DIR --extract    and the automaton inside (10 seconds more)

Sources: arXiv 2605.07755, affine recurrences cannot correct errors; Omlin and Giles 1996, clusters
of an RNN's states as an automaton. The rest is this project's.

Next: scale.py.
"""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from data import Parser, at_least, generator, run, stages
from eval import evaluate, evaluate_and_print, load
from experiments import (RESULTS, at, chapter, grid, k_of_n, percent, record, records, span, table,
                         where)
from experiments.groups import compose, index, shortest_words
from experiments.inside import (Untracked, collect_states, fit_image, read_heads, settling_tokens,
                                tracking_heads, write_heads)
from experiments.plots import BLUE, RED, canvas, count, draw, ticks_at

MOST_STATES = 1000  # of an automaton: S6 has 720


# --- 1. Putting a state back ----------------------------------------------------------------------

class Snapped(nn.Module):
    """A model whose tracking heads are put back at every `interval`-th settled place of a trace.

    Snapping waits for the next token, so a returned state is the model's own.
    State: that of the model, the last two tokens [B, 2], the number of settled places [B].
    """

    def __init__(self, model, task, image, interval=1):
        super().__init__()
        self.model = model
        self.task = task
        self.image = image
        self.interval = interval

    @torch.no_grad()
    def stream(self, tokens, state=None):
        inner, past, settled_before = state or (
            None, tokens.new_full((len(tokens), 2), -1), tokens.new_zeros(len(tokens)))

        window = torch.cat([past, tokens], 1)
        settled = self.settled(window)
        number = settled_before.unsqueeze(1) + settled.cumsum(1)
        due = settled & (number % self.interval == 0)  # ahead of which tokens, [B, T]

        logits = []
        cuts = sorted({0, *due.any(0).nonzero().flatten().tolist()})
        for begin, end in zip(cuts, [*cuts[1:], tokens.shape[1]]):
            rows = due[:, begin].view(-1, 1, 1, 1)
            if rows.any():
                held = read_heads(inner, self.image.heads)
                put_back = torch.where(rows, self.image.correct(held), held)
                inner = write_heads(inner, self.image.heads, put_back)
            piece, inner = self.model.stream(tokens[:, begin:end], inner)
            logits.append(piece)
        return torch.cat(logits, 1), (inner, window[:, -2:], number[:, -1])

    def settled(self, window):
        """Ahead of which tokens a command has settled, by the two before: [B, T + 2] -> [B, T]."""
        # After a comma name and `=`, or a newline for swaps, and nowhere else.
        vocab = self.task.vocab
        commas = [vocab.index(f", {name}") for name in self.task.names]
        mark = vocab.index("\n" if self.task.commands == "swap" else " = ")
        return torch.isin(window[:, :-2], window.new_tensor(commas)) & (window[:, 1:-1] == mark)


# --- 2. The automaton inside ----------------------------------------------------------------------

def extract(model, task, heads):
    """Whether the automaton inside the network is the group: a dict.  Raises: Untracked."""
    states = find_states(model, task, heads)
    transitions, start = transition_table(model, task, heads, states)
    agree, isomorphic = compare(transitions, start, task.group, task.alphabet)
    return {"states": len(transitions), "transitions": transitions.size, "agree": agree,
            "isomorphic": isomorphic}


def find_states(model, task, heads):
    """The states that the heads pass through, one of each cluster: [N, heads, K, V].

    Nothing is told about the group. The distances of states are small within a cluster and large
    between two; the widest gap parts them. What lies beyond it from all found so far is new.
    """
    states, _ = collect_states(model, task, heads, 2560, 8, generator(0, "valid", 8, 8))
    points = states.flatten(0, 1).flatten(1)

    apart = torch.pdist(points[:2048]).sort()[0]
    # Traces that begin alike have equal states: a gap just above 0 says nothing.
    apart = apart.clamp(min=apart[-1].item() / 10)
    near, far = apart[apart.diff().argmax():][:2].tolist()

    found = []
    while len(points) and len(found) <= MOST_STATES:
        found.append(points[0])
        points = points[torch.cdist(points, points[:1])[:, 0] > (near + far) / 2]
    if not 1 < len(found) <= MOST_STATES:
        raise Untracked(f"the heads do not hold one of 2 to {MOST_STATES:,} states")
    return torch.stack(found).unflatten(1, states.shape[2:])


@torch.no_grad()
def transition_table(model, task, heads, states):
    """The number of the state nearest to where each command leads from each: [N, commands]; and of
    that of a new trace.
    """
    lines = task.command_tokens(task.alphabet)
    begin = settling_tokens(task)
    first = np.concatenate([task.start_tokens(), lines[0, :begin]])
    # From one settled place to the next; all command lines are alike up to there.
    lines = torch.from_numpy(np.roll(lines, -begin, 1))
    first = torch.from_numpy(first).expand(len(lines), -1)

    def nearest_states(state):
        held = read_heads(state, heads).flatten(1)
        return torch.cdist(held, states.flatten(1)).argmin(1)

    _, state = model.stream(first)
    start = nearest_states(state)[0].item()
    _, state = model.stream(lines[:1].expand(len(lines), -1), state)  # a command came before
    rows = []
    for held in states:
        changed = write_heads(state, heads, held.expand(len(lines), -1, -1, -1))
        _, after = model.stream(lines, changed)
        rows.append(nearest_states(after))
    return torch.stack(rows).numpy(), start


def compare(transitions, start, group, alphabet):
    """How many transitions of an automaton are the group's, and whether the two are isomorphic.

    The start is the identity. So each element gets the state to which a shortest word of it leads,
    and no other naming can be an isomorphism.
    """
    column = {command.tobytes(): number for number, command in enumerate(alphabet)}
    state_of = np.empty(group.order, int)
    for element, word in shortest_words(group, alphabet).items():
        state = start
        for command in word:
            state = transitions[state, column[command.tobytes()]]
        state_of[element] = state

    products = compose(group, np.arange(group.order)[:, None], index(group, alphabet))
    agree = int((transitions[state_of] == state_of[products]).sum())
    each_once = sorted(state_of) == list(range(len(transitions)))
    return agree, each_once and agree == transitions.size


# --- 3. The study ---------------------------------------------------------------------------------
#
# interval: commands from snap to snap; 0 is the model alone. length: of the longest traces; the
# cells of length 64 have the automaton. The models of S5 are stored, the others are expected where
#     python train.py --group S3 --commands full --seed 0 --out runs/snap/S3-full-0
#     python -m experiments.scale train S8 --seed 0 --out runs/snap/S8-full-0
# put them, and so on for each group, kind of commands and seed.

SMALL = ["S3", "A5", "Z7", "D6"]
FULL = ["full"]
CELLS = [
    *grid(length=[8192], group=["S5"], commands=FULL, seed=range(5), interval=[0, 1]),
    *grid(length=[8192], group=["S8", "S12", "S16", "S20", "S26"], commands=FULL, seed=range(2),
          interval=[1]),
    *grid(length=[8192], group=SMALL, commands=FULL, seed=[0], interval=[1]),
    *grid(length=[8192], group=["S5"], commands=["swap"], seed=[0], interval=[1]),

    *grid(length=[64], group=["S5"], commands=FULL, seed=range(5), interval=[0]),
    *grid(length=[64], group=SMALL, commands=FULL, seed=[0], interval=[0]),
    *grid(length=[64], group=["S5"], commands=["swap"], seed=[0], interval=[0]),

    *grid(length=[2048], group=["S5"], commands=FULL, seed=range(3),
          interval=[32, 64, 128, 192, 256, 384]),
    *grid(length=[2048], group=["S8"], commands=FULL, seed=range(2), interval=[32, 64, 128, 192]),
    *grid(length=[2048], group=["S12"], commands=FULL, seed=range(2), interval=[16, 32, 64, 128]),
    *grid(length=[2048], group=["S26"], commands=FULL, seed=[0], interval=[8, 16, 32, 64, 128])]

TESTS = {  # lengths and spacings
    2048: [(2048, 128)],
    8192: [(64, 8), (128, 16), (256, 32), (512, 64), (1024, 128), (2048, 128), (8192, 128)]}


def make_missing():
    """Measure and record each cell that has no row."""
    for cell in CELLS:
        if records("snap", **cell):
            continue
        print(f"missing: {cell}", flush=True)
        folder = Path("runs/snap", f"{cell['group']}-{cell['commands']}-{cell['seed']}")
        if folder.name.startswith("S5-full"):
            folder = RESULTS / f"models/linrnn-S5-seed{cell['seed']}"

        task, model = load(folder)
        image, row = fit_image(model, task, tracking_heads(model, task))
        if cell["length"] == 64:
            row["automaton"] = extract(model, task, image.heads)
        else:
            interval = cell["interval"]
            reader = Snapped(model, task, image, interval) if interval else model
            tests = TESTS[cell["length"]]
            row["results"] = [evaluate(reader, task, *stage, traces=32) for stage in tests]
        record("snap", cell | row)


def show():
    rows = records("snap")
    chance = {"chance, %": lambda rows: f"{100 * rows[0]['results'][0]['chance']:.1f}"}
    table("Traces of 8,192 commands: reveals right, least-greatest of the seeds, and traces\n"
          "without an error; interval: commands from snap to snap, 0 is the model alone",
          where(rows, length=8192), ["group", "commands", "interval"],
          chance | {"right, %": percent(8192), "without error": whole})

    rare = where(rows, length=2048)
    intervals = sorted({row["interval"] for row in rare})
    table("Rarer snaps: traces of 2,048 commands without an error, by the interval", rare,
          ["group"], chance | {str(each): partial(whole, interval=each) for each in intervals})

    columns = {}
    for name in ("states", "transitions", "agree"):
        columns[name] = lambda rows, name=name: span([row["automaton"][name] for row in rows], 0)
    columns["isomorphic"] = k_of_n(lambda row: row["automaton"]["isomorphic"])
    table("The automaton inside the network: transitions in which it agrees with the group\n"
          "(a random table of N states agrees in one of N)",
          where(rows, length=64), ["group", "commands"], columns)


def whole(rows, **conditions):
    """A column of a table: traces without an error, of the longest ones of all seeds."""
    last = [row["results"][-1] for row in where(rows, **conditions)]
    right = sum(round(result["perfect"] * result["traces"]) for result in last)
    return f"{right} of {sum(result['traces'] for result in last)}" if last else ""


def picture():
    """Accuracy of S5 by length, alone and put back after every command."""
    rows = records("snap", group="S5", commands="full", length=8192)
    mended = count(where(rows, interval=1), lambda row: at(row, 8192)["all"] == 1)
    figure, ((axes,),) = canvas("Put back on its permutation after each line, the state of S5 "
                                f"lasts\n8,192 lines ({mended} seeds)")
    found = {}
    for name, interval, colour in [("never put back", 0, BLUE), ("put back", 1, RED)]:
        mine = where(rows, interval=interval)
        lengths = [result["length"] for result in mine[0]["results"]]
        shares = [[at(row, length)["all"] for length in lengths] for row in mine]
        found[name] = lengths, shares, colour
    axes.set(ylim=(-0.02, 1.04), xlabel="lines of the program", ylabel="prints right")
    draw(axes, found, 0.2, trained=64)
    ticks_at(axes, [64, 256, 1024, 8192])
    return figure


# --- 4. The command line --------------------------------------------------------------------------

def of_run(argv):
    """The table of one run, put back."""
    parser = Parser(__doc__, prog="python -m experiments.snap")
    add = parser.add_argument
    add("DIR", help="a run folder, made by train.py or by experiments.scale")
    add("--lengths", type=stages, default=[(8192, 128)], help="LENGTH:SPACING,... (8192:128)")
    add("--traces", type=at_least(1), default=16, help="fresh traces for each length (16)")
    add("--seed", type=at_least(0), default=0, help="of the traces (0)")
    add("--interval", type=at_least(1), default=1, help="commands from snap to snap (1)")
    add("--extract", action="store_true", help="compare the automaton inside with the group")
    add("--json", action="store_true", help="print the numbers as one JSON line at the end")
    args = parser.parse_args(argv)

    task, model = load(args.DIR)
    image, row = fit_image(model, task, tracking_heads(model, task))
    print("tracking: heads {heads} (entry, head), {directions} directions, residual {residual:.2f}"
          .format(**row))
    if args.extract:
        row["automaton"] = extract(model, task, image.heads)
        print("{states} states inside, {agree:,} of {transitions:,} transitions are the group's, "
              "isomorphic: {isomorphic}".format(**row["automaton"]))

    reader = Snapped(model, task, image, args.interval)
    row["results"] = evaluate_and_print(reader, task, args.lengths, args.traces, args.seed)
    if args.json:
        print(json.dumps(row))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if {*argv} - {"--run", "-h", "--help"}:
        return of_run(argv)
    chapter(__doc__, show, make_missing, commands={"DIR": of_run}, argv=argv)  # DIR: for its help


if __name__ == "__main__":
    run(main)
