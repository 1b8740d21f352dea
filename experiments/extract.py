"""Is the automaton inside the network the group?  Found without labels, and without counting.

The states of a group are finitely many. So the states that the tracking heads pass through should
fall into clusters. Find the clusters by their distances alone, run each command from each of them,
and look in which cluster it ends. That is an automaton, read off the network. Then compare it with
the group.

This is the one look inside that is told nothing of permutations: neither how many states there are
nor what they mean. eval.py --exhaustive asks for outputs, from states that short words reach.
snap.py reads a permutation off any state, and needs no list. Here a list is needed, so this chapter
ends at S6 (720 states).

Finding (results/extract.jsonl, at commit a8082c9). The automaton is isomorphic to the group in ten
of ten runs: five seeds of S5, its swaps, S3, A5, Z7, D6. A command ends at most 15 to 47% of the
way from a state to the border.

Command: python -m experiments.snap experiments/results/models/linrnn-S5-seed0 --extract

Sources: Omlin and Giles 1996, clusters of an RNN's states as an automaton. That the widest gap
between distances parts the clusters, and the test of the isomorphism, are this project's.

Next: snap.py.
"""

import numpy as np
import torch

from data import generator
from experiments.heads import (Untracked, collect_states, drift, pairwise, read_heads,
                               settling_tokens, write_heads)

MOST_STATES = 1000  # S6 has 720; ten batches of 2,048 states do not show many more


def check_order(group):
    """Raises: ValueError for a group of too many states to be listed."""
    if group.order > MOST_STATES:
        raise ValueError(f"--extract lists every state, and {group.name} has {group.order:,}: "
                         f"refused above {MOST_STATES:,} (S6 has 720). Without --extract states "
                         "are read and put back whatever their number")


# --- The states, by clustering alone --------------------------------------------------------------

@torch.no_grad()
def find_states(model, task, heads, device="cpu"):
    """The states that the heads pass through: centroids [N, heads, K, V].

    The distances of states are small within a cluster and large between two; the widest gap parts
    them. A state on the far side of it from the first states of all clusters begins a new one.
    Traces are added until a batch brings no new cluster.
    Raises: Untracked if there is no gap, no second cluster, or a new one in each of 10 batches.
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
    raise Untracked("what the tracking heads hold does not fall into clusters: "
                    f"{len(leaders):,} after {256 * 8 * len(points):,} commands, the widest gap "
                    f"from {near:.3g} to {far:.3g}; train longer")


def distances(states, centroids):
    """Of each state to each centroid: [B, heads, K, V], [N, heads, K, V] -> [B, N]."""
    return torch.cdist(states.flatten(1), centroids.flatten(1))


# --- The automaton --------------------------------------------------------------------------------

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
        held = centroid.expand(len(lines), -1, -1, -1)
        _, after = model.stream(lines, write_heads(state, heads, held))
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


def extract_and_print(model, task, heads, device="cpu"):
    """Whether the automaton inside the network is the group, and how its states drift."""
    group, centroids = task.group, find_states(model, task, heads, device)
    table, start, reach = extract(model, task, heads, centroids, device)
    labels, agree = relabel(table, start, group, task.alphabet)
    exact = agree == table.size and sorted(labels) == list(range(group.order))
    print(f"extract: {len(table)} states found, {agree:,} of {table.size:,} transitions agree with "
          f"{group.name} ({group.order} elements): {'' if exact else 'NOT '}isomorphic; a command "
          f"ends at most {reach:.0%} of the way from a state to the border")
    rows = drift(model, task, heads, device)
    print("drift: spread within a state, least distance between two: " +
          ", ".join(f"{within:.2f} {between:.2f} at {end}" for end, within, between in rows))
    return {"states": len(table), "order": group.order, "transitions": table.size, "agree": agree,
            "isomorphic": exact, "reach": reach, "drift": {"alone": rows}}
