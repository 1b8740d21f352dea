"""Can a drifted state be put back?

A linear recurrence cannot pull a drifted state back: the steps that carry the state carry its
error, too. But the state is a linear image of a permutation matrix P (inside.py, equation 1). So
read P off the state, take the nearest permutation, and write its image back. No weight changes, and
no state is listed: S26 has 4 * 10^26 of them.

Finding. Put back after every command, the state lasts 8,192 commands on every recorded model, from
S3 to S26; alone the five models of S5 are near chance there. Rarer snaps do for 2,048 commands: one
in 192 for S5, one in 64 up to S26. The automaton inside the network, found by clustering alone, is
the group in ten of ten runs: of S3, S5, A5, Z7 and D6.

A state that is once put on the wrong place stays wrong. And a belief about uncertain commands has
no permutation to go back to.

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
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from data import Parser, UserError, generator, run, stages
from eval import device_of, evaluate, load, print_table
from experiments import (RESULTS, at, chapter, grid, k_of_n, percent, record, records, span, table,
                         where)
from experiments.groups import compose, index, shortest_words
from experiments.inside import (LinearImage, collect_states, nearest, read_heads, settling_tokens,
                                tracking_heads, write_heads)
from experiments.plots import BLUE, GREEN, ORANGE, RED, canvas, count, draw, ticks_at

MOST_STATES = 1000  # S6 has 720; the 20,480 points of find_states show each of them many times


class Untracked(UserError):
    """The heads do not hold a state of the group: the model has not learned it."""


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
        if state is None:
            inner = None
            past = tokens.new_full((len(tokens), 2), -1)
            settled_before = tokens.new_zeros(len(tokens))
        else:
            *inner, past, settled_before = state

        # due [B, T]: ahead of which tokens which traces are put back.
        window = torch.cat([past, tokens], 1)
        settled = self.settled(window)
        number = settled_before.unsqueeze(1) + settled.cumsum(1)
        due = settled & (number % self.interval == 0)

        logits = []
        begin = 0
        for end in due.any(0).nonzero().flatten().tolist():
            if begin < end:
                piece, inner = self.model.stream(tokens[:, begin:end], inner)
                logits.append(piece)
            held = read_heads(inner, self.image.heads)
            rows = due[:, end].view(-1, 1, 1, 1)
            put_back = torch.where(rows, self.image.correct(held), held)
            inner = write_heads(inner, self.image.heads, put_back)
            begin = end
        piece, inner = self.model.stream(tokens[:, begin:], inner)
        logits.append(piece)
        return torch.cat(logits, 1), [*inner, window[:, -2:], number[:, -1]]

    def settled(self, window):
        """Ahead of which tokens a command has settled, by the two before: [B, T + 2] -> [B, T]."""
        # After a comma name and `=`, or a newline for swaps, and nowhere else.
        vocab = self.task.vocab
        commas = [vocab.index(f", {name}") for name in self.task.names]
        mark = vocab.index("\n" if self.task.commands == "swap" else " = ")
        return torch.isin(window[:, :-2], window.new_tensor(commas)) & (window[:, 1:-1] == mark)


def fit_image(model, task, heads):
    """The LinearImage of these heads, and how well it holds on 16 fresh traces of 16 commands.

    Returns: (image, numbers). The residual is what the image leaves of the fresh states, as a share
    of their spread.
    Raises: Untracked if fewer than 95% of the fresh states are read as the permutation they hold.
    """
    if not heads:
        raise Untracked("no head of this model tracks; `python eval.py DIR` evaluates it alone")
    traces = max(64, task.group.degree**2 // 4)  # four states or more for each direction
    states, perms = collect_states(model, task, heads, traces + 16, 16, generator(0, "valid", 16))
    image = LinearImage(heads, states[:traces], perms[:traces])

    fresh = states[traces:]
    read = nearest(image.read(fresh)).cpu().numpy()
    right = (read == perms[traces:]).all(-1).mean()
    if right < 0.95:
        raise Untracked(f"the heads do not hold the permutation: {right:.1%} of fresh states are "
                        "read as what they are; train longer")

    left = (fresh - image.correct(fresh)).norm()
    residual = left / (fresh - fresh.mean((0, 1))).norm()
    return image, {"heads": heads, "directions": len(image.sizes), "residual": residual.item()}


# --- 2. The automaton inside ----------------------------------------------------------------------

def extract(model, task, heads):
    """Whether the automaton inside the network is the group: a dict.  Raises: Untracked."""
    states = find_states(model, task, heads)
    transitions, start = transition_table(model, task, heads, states)
    agree, isomorphic = compare(transitions, start, task.group, task.alphabet)
    return {"states": len(transitions), "order": task.group.order, "agree": agree,
            "transitions": transitions.size, "isomorphic": isomorphic}


@torch.no_grad()
def find_states(model, task, heads):
    """The states that the heads pass through, by clustering alone: centroids [N, heads, K, V].

    The distances of states are small within a cluster and large between two; the widest gap parts
    them. A state on the far side of it from the first states of all clusters begins a new one.
    Nothing is told about the group.
    Raises: Untracked if there is no gap, no second cluster, or more than MOST_STATES.
    """
    states, _ = collect_states(model, task, heads, 2560, 8, generator(0, "valid", 8, 8))
    points = states.flatten(0, 1).flatten(1)

    apart = torch.pdist(points[:2048]).sort()[0]
    # Traces that begin alike have equal states: a gap just above 0 says nothing.
    apart = apart.clamp(min=apart[-1].item() / 10)
    near, far = apart[apart.diff().argmax():][:2].tolist()

    leaders = points[:0]
    left = points
    while len(left) and len(leaders) <= MOST_STATES:
        leaders = torch.cat([leaders, left[:1]])
        left = left[torch.cdist(left, left[:1])[:, 0] > (near + far) / 2]
    if far < 1.05 * near or not 1 < len(leaders) <= MOST_STATES:
        raise Untracked(f"what the tracking heads hold does not fall into 2 to {MOST_STATES:,} "
                        "clusters: train longer, or take a smaller group")

    cluster = torch.cdist(points, leaders).argmin(1)
    sums = torch.zeros_like(leaders).index_add(0, cluster, points)
    return (sums / cluster.bincount().unsqueeze(1)).unflatten(1, states.shape[2:])


@torch.no_grad()
def transition_table(model, task, heads, states):
    """From each state [N, heads, K, V] each command: which state is nearest to where it leads.

    Returns ([N, commands], start). start is the state of a new trace.
    """
    lines = task.command_tokens(task.alphabet)
    begin = settling_tokens(task)
    first = np.concatenate([task.start_tokens(), lines[0, :begin]])
    # From one settled place to the next; all command lines are alike up to there.
    lines = torch.from_numpy(np.roll(lines, -begin, 1)).to(device_of(model))
    first = torch.from_numpy(first).to(lines).expand(len(lines), -1)

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
    return torch.stack(rows).cpu().numpy(), start


def compare(transitions, start, group, alphabet):
    """Is an automaton the group? Returns (agree, isomorphic): transitions that agree, and whether.

    The start is the identity. So each element gets the state to which a shortest word of it leads,
    and no other naming can be an isomorphism: the two are isomorphic if and only if each state
    stands for one element and every transition agrees.
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
# interval: commands from snap to snap; 0 is the model alone. length: of the longest traces. The
# cells of length 64 are there for the automaton inside.

MANY = ["S8", "S12", "S16", "S20", "S26"]
RARE = {"S5": [32, 64, 128, 192, 256, 384], "S8": [32, 64, 128, 192], "S12": [16, 32, 64, 128],
        "S26": [8, 16, 32, 64, 128]}
CELLS = [
    *grid(length=[8192], group=["S5"], commands=["full"], seed=range(5), interval=[0, 1]),
    *grid(length=[8192], group=["S3", "A5", "Z7", "D6"], commands=["full"], seed=[0],
          interval=[1]),
    *grid(length=[8192], group=["S5"], commands=["swap"], seed=[0], interval=[1]),
    *grid(length=[8192], group=MANY, commands=["full"], seed=range(2), interval=[1]),

    *grid(length=[64], group=["S5"], commands=["full"], seed=range(5), interval=[0]),
    *grid(length=[64], group=["S3", "A5", "Z7", "D6"], commands=["full"], seed=[0], interval=[0]),
    *grid(length=[64], group=["S5"], commands=["swap"], seed=[0], interval=[0]),

    *grid(length=[2048], group=["S5"], commands=["full"], seed=range(3), interval=RARE["S5"]),
    *grid(length=[2048], group=["S8"], commands=["full"], seed=range(2), interval=RARE["S8"]),
    *grid(length=[2048], group=["S12"], commands=["full"], seed=range(2), interval=RARE["S12"]),
    *grid(length=[2048], group=["S26"], commands=["full"], seed=[0], interval=RARE["S26"])]

HORIZON = [(64, 8), (128, 16), (256, 32), (512, 64), (1024, 128), (2048, 128), (8192, 128)]


def make_missing():
    """Measure and record each cell that has no row. The models must be there."""
    for cell in CELLS:
        if not records("snap", **cell):
            print(f"missing: {cell}", flush=True)
            begin = time.monotonic()
            task, model = load(folder_of(cell))
            automaton = cell["length"] == 64
            row = measure(model, task, *tests_of(cell), 0, cell["interval"], automaton)
            record("snap", cell | row | {"minutes": (time.monotonic() - begin) / 60})


def tests_of(cell):
    """Lengths and spacings of the test traces, and how many there are of each."""
    if cell["length"] == 64:
        return [(64, 8)], 8
    if cell["length"] == 2048:
        return [(2048, 128)], 16
    if cell["interval"] == 0:
        return HORIZON, 16
    return HORIZON[::2] if cell["group"] == "S5" else HORIZON[-1:], 32


def folder_of(cell):
    """The run folder of a cell's model.  Raises: UserError, which says how to make it."""
    group = cell["group"]
    if group == "S5" and cell["commands"] == "full":
        return RESULTS / f"models/linrnn-S5-seed{cell['seed']}"

    folder = Path("runs/snap") / f"{group}-{cell['commands']}-{cell['seed']}"
    if not folder.exists():
        command = f"python train.py --group {group} --commands {cell['commands']}"
        if group in MANY:
            command = f"python -m experiments.scale train {group}"
        raise UserError(f"train it first: {command} --seed {cell['seed']} --out {folder}")
    return folder


def measure(model, task, lengths, traces, seed, interval, automaton):
    """What is recorded of a model that is put back: the rows of eval.py, and the automaton."""
    image, row = fit_image(model, task, tracking_heads(model, task))
    if automaton:
        row["automaton"] = extract(model, task, image.heads)
    reader = Snapped(model, task, image, interval) if interval else model
    row["results"] = [evaluate(reader, task, *stage, traces, seed) for stage in lengths]
    return row


def show():
    rows = records("snap")
    chance = {"chance, %": lambda rows: f"{100 * rows[0]['results'][0]['chance']:.1f}"}
    table("Traces of 8,192 commands: reveals right, least-greatest of the seeds, and traces\n"
          "without an error; interval: commands from snap to snap, 0 is the model alone",
          where(rows, length=8192), ["group", "commands", "interval"],
          chance | {"right, %": percent(8192), "without error": whole})

    rare = where(rows, length=2048)
    columns = {}
    for interval in sorted({row["interval"] for row in rare}):
        columns[str(interval)] = partial(whole, interval=interval)
    table("Rarer snaps: traces of 2,048 commands without an error, by the interval", rare,
          ["group"], chance | columns)

    table("The automaton inside the network: transitions in which it agrees with the group\n"
          "(a random table of N states agrees in one of N)",
          where(rows, length=64), ["group", "commands"], {
              **{name: partial(automata, name=name) for name in ("states", "transitions", "agree")},
              "isomorphic": k_of_n(lambda row: row["automaton"]["isomorphic"])})


def automata(rows, name):
    """A column of a table: a number of the automata of all seeds."""
    return span([row["automaton"][name] for row in rows], 0)


def whole(rows, **conditions):
    """A column of a table: traces without an error, of the longest ones of all seeds."""
    last = [row["results"][-1] for row in where(rows, **conditions)]
    right = sum(round(result["perfect"] * result["traces"]) for result in last)
    return f"{right} of {sum(result['traces'] for result in last)}" if last else ""


def picture():
    """Accuracy by length, alone and put back after every command; and with rarer snaps."""
    rows = records("snap", commands="full")
    long = where(rows, group="S5", length=8192)
    mended = count(where(long, interval=1), lambda row: at(row, 8192)["all"] == 1)
    figure, ((left, right),) = canvas(
        "Put back on its permutation after each command, the state of S5 lasts 8,192 commands\n"
        f"({mended} seeds); up to 26 variables one snap in 64 commands suffices", 1, 2,
        (9.5, 4.2), sharey=True)

    found = {}
    for name, interval, colour in [("alone", 0, BLUE), ("put back", 1, RED)]:
        mine = where(long, interval=interval)
        lengths = [result["length"] for result in mine[0]["results"]]
        shares = [[at(row, length)["all"] for length in lengths] for row in mine]
        found[name] = lengths, shares, colour
    left.set(ylim=(-0.02, 1.04), xlabel="length of the trace", ylabel="reveals right")
    draw(left, found, 0.2, trained=64)
    ticks_at(left, [64, 256, 1024, 8192])

    for group, colour in [("S26", RED), ("S12", ORANGE), ("S8", GREEN), ("S5", BLUE)]:
        rare = where(rows, group=group, length=2048)
        shares = []
        for seed in sorted({row["seed"] for row in rare}):
            mine = where(rare, seed=seed)
            shares.append([where(mine, interval=i)[0]["results"][0]["perfect"]
                           for i in RARE[group]])
        draw(right, {group: (RARE[group], shares, colour)}, named=False)
    right.legend(frameon=False, loc="lower left")
    right.set(xlabel="commands from snap to snap, in traces of 2,048",
              ylabel="traces without an error")
    ticks_at(right, [8, 16, 64, 192, 384])
    return figure


# --- 4. The command line --------------------------------------------------------------------------

def of_run(argv):
    """The table of one run, put back."""
    parser = Parser(prog="python -m experiments.snap", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("DIR", help="a run folder, made by train.py or by experiments.scale")
    add("--lengths", type=stages, default=[(8192, 128)], help="LENGTH:SPACING,... (8192:128)")
    add("--traces", type=int, default=16, help="fresh traces for each length (16)")
    add("--seed", type=int, default=0, help="of the traces (0)")
    add("--interval", type=int, default=1, help="commands from snap to snap, 0: none (1)")
    add("--extract", action="store_true", help="compare the automaton inside with the group")
    add("--json", action="store_true", help="print the numbers as one JSON line at the end")
    args = parser.parse_args(argv)

    task, model = load(args.DIR)
    for stage in args.lengths:
        task.check(*stage)
    row = measure(model, task, args.lengths, args.traces, args.seed, args.interval, args.extract)

    print(f"tracking: heads {row['heads']} (entry, head), {row['directions']} directions, residual "
          f"{row['residual']:.2f}")
    if args.extract:
        found = row["automaton"]
        print(f"{found['states']} states inside, {found['agree']:,} of {found['transitions']:,} "
              f"transitions are the group's: {'' if found['isomorphic'] else 'NOT '}isomorphic")
    print_table(row["results"])
    if args.json:
        print(json.dumps(row))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if {*argv} - {"--run", "-h", "--help"}:
        return of_run(argv)
    chapter(__doc__, show, make_missing, commands={"DIR": of_run}, argv=argv)  # DIR: for its help


if __name__ == "__main__":
    run(main)
