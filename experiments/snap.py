"""Can a drifted state be put back?

A linear recurrence cannot pull a drifted state back: the steps that carry the state carry its
error, too. But the state is a linear image of a permutation matrix P (inside.py, equation 1). So
read P off the state, take the nearest permutation, and write its image back. No weight changes, and
no state is listed: S26 has 4 * 10^26 of them.

Finding. Put back after every command, the state lasts 8,192 commands, on all seeds from S5 to S26;
alone the five models of S5 are near chance there. With the other heads set to their mean words of
S5 last as long, on five seeds of five. The automaton inside the network, found by clustering alone,
is the group in ten of ten runs.

A state that is once put on the wrong place stays wrong. And a belief about uncertain commands has
no permutation to go back to.

Commands, where RUN is experiments/results/models/linrnn-S5-seed0:
    python -m experiments.snap                  the recorded runs, a row each
    python -m experiments.snap RUN              traces of 8,192 commands, put back after each
    python -m experiments.snap RUN --extract    and the automaton inside (10 seconds more)

Sources: arXiv 2605.07755, affine recurrences cannot correct errors; Omlin and Giles 1996, clusters
of an RNN's states as an automaton. The rest is this project's.

Next: scale.py.
"""

import argparse
import json
import shlex
import sys
import time

import numpy as np
import torch
from torch import nn

from data import (UserError, WordTask, generator, number, one_line_errors, parse, run,
                  stages, try_stages)
from eval import device_of, evaluate_and_print
from experiments import record, records
from experiments.inside import (LinearImage, all_heads, collect_states, load_repl_run, nearest,
                                read_heads, settling_tokens, tracking_heads, write_heads)
from models import choose_device

EXPLAINED = 0.1  # of the spread of a head's states, if it holds a permutation
MOST_STATES = 1000  # S6 has 720; the 20,480 points of find_states show each of them many times


class Untracked(UserError):
    """The heads do not hold a state of the group: the model has not learned it."""


# --- Putting a state back -------------------------------------------------------------------------

def fit_image(model, task, heads):
    """The LinearImage of these heads, and how well it holds on 16 fresh traces of 16 commands.

    A head of which the image explains less than EXPLAINED holds no permutation, and is left out.
    Returns: (image, numbers). The residual is what the image leaves of the fresh states, as a share
    of their spread.
    Raises: Untracked if fewer than 95% of the fresh states are read as the permutation they hold.
    """
    if not heads:
        raise Untracked("no head of this model tracks; `python eval.py RUN` evaluates it alone")
    traces = max(64, task.group.degree**2 // 4)  # four states or more for each direction
    states, perms = collect_states(model, task, heads, traces + 16, 16, generator(0, "valid", 16))
    signed = isinstance(task, WordTask)
    image = LinearImage(heads, states[:traces], perms[:traces], signed)

    kept = (image.explained >= EXPLAINED).nonzero().flatten().tolist()
    if kept and len(kept) < len(heads):
        heads = [heads[i] for i in kept]
        states = states[:, :, kept]
        image = LinearImage(heads, states[:traces], perms[:traces], signed)

    fresh = states[traces:]
    read = nearest(image.read(fresh)).cpu().numpy()
    right = (read == perms[traces:]).all(-1).mean()
    if right < 0.95:
        raise Untracked(f"the heads do not hold the permutation: {right:.1%} of fresh states are "
                        "read as what they are; train longer")

    left = (fresh - image.correct(fresh)).norm()
    residual = left / (fresh - fresh.mean((0, 1))).norm()
    return image, {"heads": heads, "directions": image.sizes.tolist(), "residual": residual.item()}


def resting_heads(model, task, tracking):
    """All other heads, and the mean of what they hold: (heads, S [heads, K, V]), or None.

    Of a line of text they keep what the next token needs, and lose it with the next line. In words
    there are no lines: what they hold grows with every word, and in the end it drowns the answer.
    """
    others = [head for head in all_heads(model) if head not in tracking]
    if not others:
        return None
    states, _ = collect_states(model, task, others, 64, 16, generator(0, "valid", 16))
    return others, states.mean((0, 1))


class Snapped(nn.Module):
    """A model whose tracking heads are put back at every `interval`-th settled place of a trace.

    Snapping waits for the next token, so a returned state is the model's own.
    State: that of the model, the last two tokens [B, 2], the number of settled places [B].
    rest: heads that are set to one S at the same places, from resting_heads; needed for words.
    """

    def __init__(self, model, task, image, interval=1, rest=None):
        super().__init__()
        self.model, self.task, self.image = model, task, image
        self.interval, self.rest = interval, rest

    def settled(self, window):
        """Ahead of which tokens a command has settled, by the two before: [B, T + 2] -> [B, T]."""
        vocab = self.task.vocab
        if isinstance(self.task, WordTask):
            return window[:, 1:-1] >= 0  # each word but the first has one ahead of it

        # After a comma name and `=`, or a newline for swaps, and nowhere else.
        commas = [vocab.index(f", {name}") for name in self.task.names]
        mark = vocab.index("\n" if self.task.commands == "swap" else " = ")
        return torch.isin(window[:, :-2], window.new_tensor(commas)) & (window[:, 1:-1] == mark)

    @torch.no_grad()
    def stream(self, tokens, state=None):
        if state is None:
            inner = None
            past = tokens.new_full((len(tokens), 2), -1)
            count = tokens.new_zeros(len(tokens))
        else:
            *inner, past, count = state

        # due [B, T]: ahead of which tokens which traces are put back.
        window = torch.cat([past, tokens], 1)
        settled = self.settled(window)
        count = count.unsqueeze(1) + settled.cumsum(1)
        due = settled & (count % self.interval == 0)

        logits, begin = [], 0
        for end in due.any(0).nonzero().flatten().tolist():
            if begin < end:
                piece, inner = self.model.stream(tokens[:, begin:end], inner)
                logits.append(piece)
            rows = due[:, end].view(-1, 1, 1, 1)
            held = read_heads(inner, self.image.heads)
            put_back = torch.where(rows, self.image.correct(held), held)
            inner = write_heads(inner, self.image.heads, put_back)
            if self.rest:
                heads, resting = self.rest
                rested = torch.where(rows, resting, read_heads(inner, heads))
                inner = write_heads(inner, heads, rested)
            begin = end
        piece, inner = self.model.stream(tokens[:, begin:], inner)
        logits.append(piece)
        return torch.cat(logits, 1), [*inner, window[:, -2:], count[:, -1]]


# --- The automaton inside -------------------------------------------------------------------------

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

    apart = torch.pdist(points[:2048].cpu()).sort()[0]  # the GPUs of Apple lack pdist
    # Traces that begin alike have equal states: a gap just above 0 says nothing.
    apart = apart.clamp(min=apart[-1].item() / 10)
    near, far = apart[apart.diff().argmax():][:2].tolist()

    leaders, left = points[:0], points
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
def transitions(model, task, heads, states):
    """From each state [N, heads, K, V] each command: which state is nearest to where it leads.

    Returns (table [N, commands], start). start is the state of a new trace.
    """
    lines, begin = task.command_tokens(task.alphabet), settling_tokens(task)
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
    table = []
    for held in states:
        changed = write_heads(state, heads, held.expand(len(lines), -1, -1, -1))
        _, after = model.stream(lines, changed)
        table.append(nearest_states(after))
    return torch.stack(table).cpu().numpy(), start


def compare(table, start, group, alphabet):
    """Is an automaton the group? Returns (agree, isomorphic): transitions that agree, and whether.

    The start is the identity. So each element gets the state to which a shortest word of it leads,
    and no other naming can be an isomorphism: the two are isomorphic if and only if each state
    stands for one element and every transition agrees.
    """
    column = {command.tobytes(): number for number, command in enumerate(alphabet)}
    state_of = np.empty(group.order, int)
    for element, word in group.shortest_words(alphabet).items():
        state = start
        for command in word:
            state = table[state, column[command.tobytes()]]
        state_of[element] = state

    products = group.compose(np.arange(group.order)[:, None], group.index(alphabet))
    agree = int((table[state_of] == state_of[products]).sum())
    each_once = sorted(state_of) == list(range(len(table)))
    return agree, each_once and agree == table.size


def extract(model, task, heads):
    """Whether the automaton inside the network is the group: a dict.  Raises: Untracked."""
    states = find_states(model, task, heads)
    table, start = transitions(model, task, heads, states)
    agree, isomorphic = compare(table, start, task.group, task.alphabet)
    return {"states": len(table), "order": task.group.order, "transitions": table.size,
            "agree": agree, "isomorphic": isomorphic}


# --- The command line -----------------------------------------------------------------------------

def name_of(config):
    """What a model reads: 'S5 full', 'S5 swap' or 'S5 words'."""
    kind = "words" if config["format"] == "word" else config["commands"]
    return f"{config['group']} {kind}"


def print_records():
    """A line for each row of results/snap.jsonl: its longest traces, or the automaton inside."""
    for row in records("snap"):
        config, last = row["config"], row["results"][-1]
        name = f"{name_of(config)}, seed {row['seed']}:"
        if "extract" in row:
            print_automaton(name, row["extract"])
        else:
            whole = round(last["perfect"] * last["traces"])
            interval = row["interval"] or "none"  # 0: the model alone
            print(f"{name:<20} put back after {interval:>4} commands; of "
                  f"{last['length']:6,} commands {last['all']:6.1%} of the reveals right, "
                  f"{whole:2} of {last['traces']:2} traces")


def print_automaton(name, found):
    verdict = "isomorphic" if found["isomorphic"] else "NOT isomorphic"
    print(f"{name:<20} {found['states']} states inside, {found['agree']:,} of "
          f"{found['transitions']:,} transitions are the group's: {verdict}")


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.snap",
                                     description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("run", nargs="?", help="a run folder, made by train.py (default: show the records)")
    add("--lengths", type=stages, help="LENGTH:SPACING,... (default: 8192:128; of words, 8192:1)")
    add("--traces", type=number(1), default=16, help="fresh traces for each length")
    add("--seed", type=number(0), default=0, help="of the traces, never those of training")
    add("--interval", type=number(1), default=1, help="commands from snap to snap")
    add("--extract", action="store_true", help="compare the automaton inside with the group")
    add("--record", action="store_true", help="append the numbers to results/snap.jsonl")
    add("--json", action="store_true", help="print the numbers as one JSON line at the end")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    argv = sys.argv[1:] if argv is None else argv
    args = parse(parser, argv)
    if args.run is None:
        return print_records()

    begin = time.monotonic()
    with one_line_errors(parser):
        device = choose_device(args.device)
        checkpoint, task, model = load_repl_run(args.run, device, words=not args.extract)
        words = isinstance(task, WordTask)
        lengths = args.lengths or ([(8192, 1)] if words else [(8192, 128)])
        try_stages(task, lengths, args.traces)

        image, found = fit_image(model, task, tracking_heads(model, task))
        heads = image.heads
        print(f"tracking: heads {heads} (entry, head), {len(image.sizes)} directions, residual "
              f"{found['residual']:.2f}")
        row = {"command": f"{parser.prog} {shlex.join(argv)}",
               "seed": checkpoint["config"]["seed"], "config": checkpoint["config"],
               "interval": args.interval, "tracking": found, "device": device}

        if args.extract:
            row["extract"] = extract(model, task, heads)
            print_automaton(task.group.name, row["extract"])

        rest = resting_heads(model, task, heads) if words else None
        snapped = Snapped(model, task, image, args.interval, rest)
        row["results"] = evaluate_and_print(snapped, task, lengths, args.traces, args.seed)
        row["minutes"] = (time.monotonic() - begin) / 60
        if args.record:
            record("snap", row)
    if args.json:
        print(json.dumps(row))


if __name__ == "__main__":
    run(main)
