"""Can a drifting linear RNN be mended by a non-linear step between its linear ones?

A linear recurrence that keeps its states apart cannot pull back a state that has drifted, since the
steps that carry the state carry its error, too. But the states of a group are finitely many. So
find them, without labels, and after every few commands put the state back on the nearest one.
No weight changes, and between two such places the recurrence is computed chunk by chunk, as ever.

Finding (results/snap.jsonl, made by eval.py --snap at commits ba52296 and a8082c9). Snapped after
every command, every reveal is right in 64 of 64 traces of 8,192 commands, on five of five seeds of
S5 and on a seed each of S3, A5 and the swaps of S5; on seed 0 of S5 also in 8 of 8 traces of 65,536
commands. Alone the five seeds have 23 to 28% of the reveals at 8,192, near chance (20%).
    Rarer snaps suffice up to a point. Of 16 traces of 1,024 commands, those with all reveals right:
    commands from snap to snap    16-128     192     256     384
    seed 0                            16      16      16       9
    seed 2                            16      11       0       0
    The automaton that is read off the network, each command from each state found, is isomorphic to
the group in ten of ten runs (results/extract.jsonl, at a8082c9): five seeds of S5, its swaps, S3,
A5, Z7, D6. A command ends at most 15 to 47% of the way from a state to the border.
    Snapping makes an error permanent: a state once put on the wrong place stays wrong. And a belief
about uncertain commands has no finite list of states.

A memory that learns the correction has left the code. CleanUp (train.py --codes 16) was a small
Hopfield network at each head. After every 64 tokens it moved each slot of S towards the nearest of
16 learned vectors. It learned this in the last stage, by taking noise off the averaged model's
states. On seeds 0 to 4 of S5 every reveal was right in 64, 63, 58, 64 and 64 of 64 traces of 8,192
commands (results/cleanup.jsonl). With the memory acting in training, and all weights learning with
it, end to end, it was 32, 0, 4, 32 and 0 of 32 traces (results/end_to_end.jsonl). The memory runs
at commit 65e3aa6, its end-to-end form at 4cae00f.

Command: python -m experiments.snap experiments/results/models/linrnn-S5-seed0 --extract

Sources: arXiv 2605.07755, affine recurrences cannot correct errors; arXiv 2606.07254 projects the
state in training, too. For the memory: Ramsauer et al. 2021 (arXiv 2008.02217).

Next: inside.py.
"""

import argparse
import hashlib
import json
import shlex
import sys
from pathlib import Path

import numpy as np
import torch

from data import generator, number, parse_stages, user_errors
from eval import append_record, evaluate_and_print, read_file, replace_file
from experiments.heads import (collect_states, drift, load_repl_run, pairwise, read_heads,
                               settling_tokens, tracking_heads)
from models import choose_device

# --- The states, by clustering alone --------------------------------------------------------------

class NoClusters(Exception):
    """What the heads hold is no finite list of states: the model has not learned the group."""


@torch.no_grad()
def find_states(model, task, heads, device="cpu"):
    """The states that the heads pass through: centroids [N, heads, K, V].

    The distances of states are small within a cluster and large between two; the widest gap parts
    them. A state on the far side of it from the first states of all clusters begins a new one.
    Traces are added until a batch brings no new cluster.
    Raises: NoClusters if there is no gap, no second cluster, or a new one in each of 10 batches.
    """
    rng, points = generator(0, "valid", 8, 8), []
    for batch in range(10):
        states, _ = collect_states(model, task, heads, 256, 8, 8, rng, device)
        points.append(states.flatten(0, 1).flatten(1))
        if batch == 0:
            apart = pairwise(points[0]).sort()[0]
            # Traces that begin alike have equal states: a gap just above 0 says nothing.
            apart = apart.clamp(min=apart[-1].item() / 10)
            near, far = apart[apart.diff().argmax():][:2].tolist()
            radius, leaders = (near + far) / 2, points[0][:1]
            if far < 1.05 * near:
                break
        known = len(leaders)
        new = points[batch][torch.cdist(points[batch], leaders).amin(1) > radius]
        while len(new):
            leaders = torch.cat([leaders, new[:1]])
            new = new[torch.cdist(new, new[:1])[:, 0] > radius]
        if len(leaders) == known > 1:
            points = torch.cat(points)
            cluster = torch.cdist(points, leaders).argmin(1)
            sums = torch.zeros_like(leaders).index_add(0, cluster, points)
            return (sums / cluster.bincount().unsqueeze(1)).unflatten(1, states.shape[2:])
    raise NoClusters("what the tracking heads hold does not fall into clusters: "
                     f"{len(leaders):,} after {256 * 8 * len(points):,} commands, the widest gap "
                     f"from {near:.3g} to {far:.3g}; train longer")


def heads_and_states(model, task, device="cpu"):
    """The tracking heads and their states; both empty if no head tracks. Raises: NoClusters."""
    heads = tracking_heads(model, task, device)
    if not heads:
        print("tracking: no head of this model tracks; it is evaluated alone")
        return [], []
    centroids = find_states(model, task, heads, device)
    print(f"tracking: heads {' '.join(f'{entry}:{head}' for entry, head in heads)} (entry:head), "
          f"{len(centroids)} states found, at least {pairwise(centroids).min():.1f} apart")
    return heads, centroids


def fingerprint(model):
    weights = [weight.cpu().numpy().tobytes() for weight in model.state_dict().values()]
    return hashlib.sha256(b"".join(weights)).hexdigest()


def read_states(path, model, device="cpu"):
    """The same from a file. Raises: ValueError if it holds anything else than this model's."""
    try:
        heads, centroids, weights = read_file(path, device)
    except Exception:  # of any kind, since the file may hold anything
        weights = None
    if weights != fingerprint(model):
        raise ValueError(f"{path} does not hold the states of this model: delete it to find them "
                         "again, or name another file")
    print(f"tracking: {len(centroids)} states read from {path}")
    return heads, centroids


# --- A model whose state is put back --------------------------------------------------------------

def distances(states, centroids):
    """Of each state to each centroid: [B, heads, K, V], [N, heads, K, V] -> [B, N]."""
    return torch.cdist(states.flatten(1), centroids.flatten(1))


def snap(state, heads, centroids, rows):
    """The state of a stream with, in these rows, the nearest centroid in place of what heads held.

    Shapes: centroids [N, heads, K, V]; rows bool [B].
    """
    held, state = read_heads(state, heads), list(state)
    near = centroids[distances(held, centroids).argmin(1)]
    for (entry, head), old, new in zip(heads, held.unbind(1), near.unbind(1)):
        state[entry] = state[entry].clone()
        state[entry][:, head] = torch.where(rows.view(-1, 1, 1), new, old)
    return state


class Snapped:
    """A model whose tracking heads are snapped at every `interval`-th settled place of a trace.

    It is streamed as the model itself is. Snapping waits for the next token, so a returned state is
    always the model's own. State: that of the model, then the last two tokens [B, 2] and the count
    of settled places [B].
    """

    def __init__(self, model, task, heads, centroids, interval=1):
        self.model, self.heads, self.centroids = model, heads, centroids
        self.interval = interval
        # A settled place is after a comma name and `=`, or a newline for swaps, and nowhere else.
        self.commas = torch.tensor([task.vocab.index(f", {name}") for name in task.names])
        self.mark = task.vocab.index("\n" if task.commands == "swap" else " = ")

    @torch.no_grad()
    def stream(self, tokens, state=None):
        *inner, past, count = state or [tokens.new_full((len(tokens), 2), -1),
                                        tokens.new_zeros(len(tokens))]
        window, inner = torch.cat([past, tokens], 1), inner or None
        after = torch.isin(window[:, :-2], self.commas.to(window)) & (window[:, 1:-1] == self.mark)
        number = count.unsqueeze(1) + after.cumsum(1)
        due = after & (number % self.interval == 0)
        logits, begin = [], 0
        for end in [*due.any(0).nonzero().flatten().tolist(), tokens.shape[1]]:
            if begin < end:
                piece, inner = self.model.stream(tokens[:, begin:end], inner)
                logits.append(piece)
            if end < tokens.shape[1]:
                inner = snap(inner, self.heads, self.centroids, due[:, end])
            begin = end
        return torch.cat(logits, 1), [*inner, window[:, -2:], number[:, -1]]


# --- The automaton inside the network -------------------------------------------------------------

@torch.no_grad()
def extract(model, task, heads, centroids, device="cpu"):
    """From each state each command, and the state nearest to where it leads.

    Returns (table, start, reach): the next states [N, commands]; the state nearest to where the
    lines `>>> a = 1` lead; and how far, at most, a command ends from its nearest state, in units of
    half the least distance between two states. Below 1 no other state is as near.
    """
    lines, begin = task.command_tokens(task.alphabet), settling_tokens(task)
    first = torch.from_numpy(np.concatenate([task.start_tokens(), lines[0, :begin]])).to(device)
    # From one settled place to the next; all command lines are alike up to there.
    lines = torch.from_numpy(np.roll(lines, -begin, 1)).to(device)
    _, state = model.stream(first.expand(len(lines), -1))
    start = distances(read_heads(state, heads), centroids)[0].argmin().item()
    _, state = model.stream(lines[:1].expand(len(lines), -1), state)  # a command came before
    table, farthest = [], 0.0
    for centroid in centroids:
        for (entry, head), S in zip(heads, centroid):
            state[entry][:, head] = S
        _, after = model.stream(lines, state)
        ends = distances(read_heads(after, heads), centroids).min(1)
        table.append(ends.indices)
        farthest = max(farthest, ends.values.max().item())
    reach = farthest / (pairwise(centroids).min().item() / 2)
    return torch.stack(table).cpu().numpy(), start, reach


def relabel(table, start, group, alphabet):
    """The states as elements: the start is the identity, and a command h leads from g to g h.

    Breadth first; -1 for a state that no command leads to. The commands keep their names and lead
    everywhere, so no other relabelling can be an isomorphism. Hence table and group are isomorphic
    if and only if each element occurs once and every transition agrees.
    Returns (labels [N], agree): the number of transitions that agree.
    """
    labels, letters = np.full(len(table), -1), group.index(alphabet)
    labels[start], frontier = 0, [start]
    for state in frontier:  # the list grows while it is read
        for after, label in zip(table[state], group.compose(labels[state], letters)):
            if labels[after] < 0:
                labels[after] = label
                frontier.append(after)
    reached = labels >= 0
    expected = group.compose(labels[reached, None], letters)
    return labels, int((labels[table[reached]] == expected).sum())


def extract_and_print(model, task, heads, centroids, device="cpu"):
    """Whether the automaton inside the network is the group, and how its states drift."""
    group = task.group
    table, start, reach = extract(model, task, heads, centroids, device)
    labels, agree = relabel(table, start, group, task.alphabet)
    exact = agree == table.size and sorted(labels) == list(range(group.order))
    print(f"extract: {len(table)} states found, {agree:,} of {table.size:,} transitions agree with "
          f"{group.name} ({group.order} elements): {'' if exact else 'NOT '}isomorphic; a command "
          f"ends at most {reach:.0%} of the way from a state to the border")
    drifts = {"alone": drift(model, task, heads, device),
              "snapped": drift(Snapped(model, task, heads, centroids), task, heads, device)}
    for name, rows in drifts.items():
        print(f"{name:>8}: spread within a state, least distance between two: " +
              ", ".join(f"{within:.2f} {between:.2f} at {end}" for end, within, between in rows))
    return {"states": len(table), "order": group.order, "transitions": table.size, "agree": agree,
            "isomorphic": exact, "reach": reach, "drift": drifts}


# --- The command line -----------------------------------------------------------------------------

def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.snap",
                                     description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("run", help="a run folder, made by train.py")
    add("--lengths", default="8192:128", help="LENGTH:SPACING,...")
    add("--traces", type=number(1, 10**5), default=16, help="fresh traces for each length")
    add("--seed", type=number(0), default=0, help="of the traces, never those of training")
    add("--interval", type=number(1), default=1, help="commands from snap to snap")
    add("--states", type=Path, metavar="FILE", help="keep the states found, or read them")
    add("--extract", action="store_true", help="compare the automaton with the group")
    add("--record", metavar="FILE", help="append the numbers as one JSON line")
    add("--json", action="store_true", help="print the numbers as one JSON line at the end")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    argv = sys.argv[1:] if argv is None else argv
    with user_errors(parser, argv) as args:
        device = choose_device(args.device)
        checkpoint, task, model = load_repl_run(args.run, device)
        lengths = parse_stages(args.lengths, task, args.traces)
        task.group.elements  # refuses a group that is too large to list
        there = args.states and args.states.exists()
        kept = read_states(args.states, model, device) if there else None
        if args.record:
            open(args.record, "a").close()  # what cannot be written is refused before the work
        if args.states and not there:
            args.states.touch()
            args.states.unlink()
    try:
        heads, centroids = kept or heads_and_states(model, task, device)
    except NoClusters as error:
        parser.error(str(error))
    if args.states and heads and not kept:
        found = heads, centroids, fingerprint(model)
        with user_errors(parser, argv):
            replace_file(args.states, lambda file: torch.save(found, file))
    numbers = {"config": checkpoint["config"],
               "tracking": {"heads": heads, "states": len(centroids)}}
    if args.extract and heads:
        numbers["extract"] = extract_and_print(model, task, heads, centroids, device)
    if heads:
        model = Snapped(model, task, heads, centroids, args.interval)
    numbers["results"] = evaluate_and_print(model, task, lengths, args.traces, args.seed, device)
    if args.json:
        print(json.dumps(numbers))
    if args.record:
        with user_errors(parser, argv):
            append_record(args.record, f"{parser.prog} {shlex.join(argv)}",
                          {"seed": checkpoint["config"]["seed"], **numbers, "device": device})


if __name__ == "__main__":
    main()
