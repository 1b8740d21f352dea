"""How far does a trained model track? python eval.py RUN

For each (length L, spacing S), on fresh traces that no training run ever sees:
    chance   accuracy of a guess that knows the variable but not the state
    all      accuracy over all reveals
    final    accuracy at the last reveal of each trace, after all L commands
    every    fraction of traces in which EVERY reveal is right, with its 95% Wilson interval
The model reads the whole true trace (teacher forcing) and is asked for the revealed values only. An
earlier reveal tells it one variable, as it does in training; `final` of a model that lost the state
is therefore above chance at a small spacing.

For a run with uncertain commands three columns stand beside these, from the exact filter's p at the
same reveals (data.py), which no model can pass:
    bayes    accuracy to expect of the best answer there is, the mean of max p
    KL       KL(p || model) in nats: what the model loses on average by not being the filter
    excess   the same from the values that were revealed: mean of log p(value) - log model(value)
and, as a yardstick that needs no training, KL of marginals: that of the paper's n x n matrix of
marginals, in fp64 and decoded by Sinkhorn-Knopp (scan.py, section 6).

Recurrent models are streamed, piece by piece, in memory that does not depend on L.

--snap auto puts the state of the tracking heads back on the nearest of the states that they pass
through, found without labels, and --extract compares their automaton with the group: see below.
(A run trained with --codes corrects its states by itself.)

--exhaustive is a certificate: from each state of the group, each command, then each variable is
printed; all answers are compared with the group's own table.

Next: analysis.ipynb.
"""

import argparse
import json
import math
import pickle
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from data import REVEALS, ReplTask, draw_commands, parse_stages, run_commands, stream
from models import MLP, DeltaBlock, LinRNN, choose_device, clean_ups
from scan import (delta_product, delta_rule_chunked, delta_rule_recurrent, marginal_coins,
                  marginal_reveals, sinkhorn, swap_machine_keys, two_sided_recurrence)
from train import append_record, load_run, prepare_file, replace_file

PIECE = 2048  # tokens of each trace that a recurrent model is fed at a time
FORMATS = [".png", ".pdf", ".svg"]
# Tokens in flight, over all traces of a batch, for a model that cannot be streamed.
ROW_TOKENS = 2**18


@torch.no_grad()
def predict(model, inputs):
    """The most likely output at each position. Shapes: inputs [B, T] -> [B, T]."""
    if not hasattr(model, "stream"):
        return model(inputs).argmax(-1)
    state, predicted = None, []
    for piece in inputs.split(PIECE, dim=1):
        logits, state = model.stream(piece, state)
        predicted.append(logits.argmax(-1))
    return torch.cat(predicted, 1)


def right_answers(model, inputs, targets, reveals, device, note=None):
    """Which reveals were answered rightly: arrays [B, T] -> bool [B, reveals per trace]."""
    rows = max(1, ROW_TOKENS // inputs.shape[1] if not hasattr(model, "stream") else 64)
    right = []
    for i in tqdm(range(0, len(inputs), rows), desc=note, leave=False, disable=note is None):
        given = torch.from_numpy(np.ascontiguousarray(inputs[i:i + rows])).to(device)
        right.append(predict(model, given).cpu().numpy() == targets[i:i + rows])
    return np.concatenate(right)[reveals].reshape(len(inputs), -1)


def wilson(hits, total, z=1.96):
    """The 95% Wilson score interval of a proportion (Wilson 1927); honest near 0 and 1."""
    share, spread = hits / total, z * z / total
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / total + spread / total / 4) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


# --------------------------------------------------------------------------------------------------
# Uncertain commands: how far from the exact filter?
# --------------------------------------------------------------------------------------------------

@torch.no_grad()
def answer_log_probabilities(model, inputs, reveals, device, note=None):
    """log softmax at the reveals. Shapes: arrays [B, T] -> [B, reveals per trace, vocabulary]."""
    streamed, answers = hasattr(model, "stream"), []
    rows = 64 if streamed else max(1, ROW_TOKENS // inputs.shape[1])
    for i in tqdm(range(0, len(inputs), rows), desc=note, leave=False, disable=note is None):
        given = torch.from_numpy(np.ascontiguousarray(inputs[i:i + rows])).to(device)
        asked = torch.from_numpy(np.ascontiguousarray(reveals[i:i + rows])).to(device)
        state, row_of, logits_at = None, [], []
        for piece, wanted in zip(given.split(PIECE if streamed else given.shape[1], 1),
                                 asked.split(PIECE if streamed else given.shape[1], 1)):
            logits, state = model.stream(piece, state) if streamed else (model(piece), None)
            logits_at.append(logits[wanted])
            row_of.append(wanted.nonzero()[:, 0])
        order = torch.cat(row_of).argsort(stable=True)  # by trace, and in it by time
        answers.append(torch.cat(logits_at)[order].cpu().double().log_softmax(-1).numpy())
    return np.concatenate(answers).reshape(len(inputs), -1, answers[0].shape[-1])


def marginal_predictions(task, program):
    """What equations (18) and (19) of scan.py, in fp64, and Sinkhorn's decoder expect at each
    reveal. Shapes: -> [B, L/S, n].
    """
    (batch, length, n), count = program.commands.shape, program.asked.shape[1]
    spacing, stays = length // count, torch.eye(n, dtype=torch.float64)
    asked = torch.from_numpy(program.asked)
    answers = torch.from_numpy(task.answers(program.commands, program.asked, program.executed))
    coins = marginal_coins(*map(torch.from_numpy, (program.commands, program.chance)))
    left, right, write = marginal_reveals(asked, answers, n)
    # Time: S commands, then a reveal; a command has R = I and W = 0.
    left = torch.cat([coins.unflatten(1, (count, spacing)), left.unsqueeze(2)], 2)
    right = torch.cat([stays.expand(batch, count, spacing, n, n), right.unsqueeze(2)], 2)
    write = torch.cat([torch.zeros(batch, count, spacing, n, n), write.unsqueeze(2)], 2)
    states = two_sided_recurrence(*(x.flatten(1, 2) for x in (left, right, write)), stays)
    ahead = sinkhorn(states[:, spacing - 1::spacing + 1])
    return ahead.gather(2, asked[..., None, None].expand(-1, -1, 1, n))[:, :, 0].numpy()


def divergence(p, log_q):
    """KL(p || q) in nats, over the last axis; 0 log 0 = 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p > 0, p * (np.log(p) - log_q), 0.0).sum(-1)


def against_filter(model, task, program, device, note=None):
    """Which answers were right, bool [B, L/S], and the comparison with the exact filter."""
    tokens, reveals = task.write(*program)
    inputs, targets, reveals = tokens[:, :-1], tokens[:, 1:], reveals[:, 1:]
    answers = targets[reveals].reshape(len(inputs), -1, 1)
    log_q = answer_log_probabilities(model, inputs, reveals, device, note)
    p, values = task.best_predictions(program), (answers == task.value_tokens).argmax(-1)[..., None]
    kl = divergence(p, log_q[..., task.value_tokens])
    excess = np.log(np.take_along_axis(p, values, -1)) - np.take_along_axis(log_q, answers, -1)
    with np.errstate(divide="ignore"):
        kl_marginal = divergence(p, np.log(marginal_predictions(task, program)))
    return log_q.argmax(-1) == answers[..., 0], {
        "bayes": float(p.max(-1).mean()), "kl": float(kl.mean()), "excess": float(excess.mean()),
        "kl_marginal": float(kl_marginal.mean()), "kl_by_position": kl.mean(0).tolist(),
        "kl_marginal_by_position": kl_marginal.mean(0).tolist()}


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------

def evaluate(model, task, length, spacing, traces=256, seed=0, device="cpu", reveals="random",
             share=None):
    """Accuracy on fresh traces, a pure function of the arguments but the device.

    A share, even 0, asks for the comparison with the filter on traces of that share.
    """
    rng = stream(seed, "test", length, spacing)
    if task.uncertain or share is not None:
        program = task.draw(traces, length, spacing, rng, reveals, share, held_out=True)
        right, compared = against_filter(model, task, program, device, f"({length},{spacing})")
    else:
        inputs, targets, where = task.test_batch(traces, length, spacing, rng)
        right = right_answers(model, inputs, targets, where, device, f"({length},{spacing})")
        compared = {}
    every = right.all(1)
    low, high = wilson(every.sum(), traces)
    return {"length": length, "spacing": spacing, "traces": traces, "reveals": right.size,
            "chance": task.chance, "all": float(right.mean()), "final": float(right[:, -1].mean()),
            "every": float(every.mean()), "every_low": low, "every_high": high,
            "by_position": right.mean(0).tolist(), **compared}


def evaluate_and_print(model, task, lengths, traces=256, seed=0, device="cpu", reveals="random",
                       share=None):
    """The table of this file's header, then the accuracy by reveal position, at each length."""
    results, compared = [], task.uncertain or share is not None
    print(f"\n{'(L,S)':>10} {'chance':>7} {'all':>7} {'final':>7} {'every':>7}  "
          "95% interval    reveals" + (
              "    bayes       KL   excess  KL of marginals" if compared else ""))
    for length, spacing in lengths:
        row = evaluate(model, task, length, spacing, traces, seed, device, reveals, share)
        results.append(row)
        print(f"{f'({length},{spacing})':>10} {row['chance']:7.1%} {row['all']:7.2%} "
              f"{row['final']:7.2%} {row['every']:7.1%}  "
              f"{row['every_low']:.1%} - {row['every_high']:.1%}{row['reveals']:>10,}" + (
                  "  {bayes:7.2%} {kl:8.4f} {excess:8.4f}         {kl_marginal:8.4f}".format(**row)
                  if compared else ""))
    print("accuracy by reveal position:")
    for row in results:
        shown = row["by_position"][::max(1, len(row["by_position"]) // 8)]
        print(f"{'({length},{spacing})'.format(**row):>10} " +
              " ".join(f"{right:7.1%}" for right in shown))
    return results


# --------------------------------------------------------------------------------------------------
# The certificate
# --------------------------------------------------------------------------------------------------

def shortest_words(group, alphabet):
    """For each element that the alphabet can reach a shortest word: {number: list of commands}.

    Breadth first, so that each word extends a shorter one by one command. The identity has the
    empty word.
    """
    numbers = group.index(alphabet)
    words, frontier = {0: []}, [0]
    while frontier:
        reached = []
        for element in frontier:
            for letter, product in zip(alphabet, group.compose(element, numbers)):
                if int(product) not in words:
                    words[int(product)] = words[element] + [letter]
                    reached.append(int(product))
        frontier = reached
    return words


def alphabet_of(task):
    """All commands of the task, as permutations: [commands, n]."""
    return task.group.elements if task.commands == "full" else task.group.transpositions


def exhaustive(model, task, device="cpu"):
    """Every command from every state, each variable read out in a trace of its own.

    Returns (pairs, failures): the number of (state, command) pairs, and for each pair in which a
    variable was wrong (state, command, expected values, answers). The expected values are those of
    Group.compose.
    """
    group, n, alphabet = task.group, task.group.degree, alphabet_of(task)
    words = shortest_words(group, alphabet)
    pairs, failures = 0, []
    for size in sorted({len(word) for word in words.values()}):
        states = [state for state, word in words.items() if len(word) == size]
        for state in tqdm(states, desc=f"states {size} commands away", leave=False):
            past = np.array(words[state], int).reshape(size, n)
            lines = np.stack([np.vstack([past, command]) for command in alphabet])
            tokens, _ = task.write(lines.repeat(n, 0),
                                   np.tile(np.arange(n), len(alphabet))[:, None])
            given = torch.from_numpy(tokens[:, :-2]).to(device)  # up to `b `: the value comes next
            answers = predict(model, given)[:, -1].cpu().numpy().reshape(len(alphabet), n)
            expected = group.elements[group.compose(state, group.index(alphabet))]
            wrong = (answers != task.value_tokens[expected]).any(1)
            pairs += len(alphabet)
            failures += [(group.elements[state], alphabet[i], expected[i], answers[i])
                         for i in np.flatnonzero(wrong)]
    return pairs, failures


def print_certificate(pairs, failures, task, shown=20):
    """The count of right pairs, and the first failures in the notation of the traces."""
    print(f"\nexhaustive: {pairs - len(failures):,} of {pairs:,} (state, command) pairs right, "
          f"{task.group.degree} variables each")
    for state, command, expected, answers in failures[:shown]:
        print(f"  state {spaced(state + 1)}, command {spaced(command + 1)}: "
              f"expected {spaced(expected + 1)}, "
              f"got {spaced(repr(task.vocab[token]) for token in answers)}")
    if len(failures) > shown:
        print(f"  and {len(failures) - shown:,} more")


def spaced(values):
    return " ".join(map(str, values))


# --------------------------------------------------------------------------------------------------
# The head that tracks, and the states it passes through
# --------------------------------------------------------------------------------------------------

@torch.no_grad()
def tracking_heads(model, task, device="cpu"):
    """The heads that keep what they held before a trace, and move it: [(entry of the state, head)].

    With nothing to write and S = I at first, the scan over 32 commands returns the product P of its
    steps. E|P|^2 - |E P|^2 over random traces counts the directions that are kept and moved by the
    commands: 0 for a head that forgets (P = 0), and for one that merely remembers (P the same for
    all traces). A group that moves anything moves a direction or more; a head counts from a quarter
    direction. Empty for a model that is no linear RNN.
    """
    if not isinstance(model, LinRNN):
        return []
    if not isinstance(task, ReplTask):
        raise ValueError("the tracking heads are found in REPL traces; this run was trained on "
                         "words")
    tokens, _ = task.sample(64, 32, 32, stream(0, "valid", 32, 32))
    x, entry, found = model.embedding(torch.from_numpy(tokens).to(device)), 0, []
    for block in model.blocks:
        if isinstance(block, DeltaBlock):
            # Neither the lines `>>> a = 1` nor the reveal at the end: they may overwrite the state.
            whole = slice(len(task.start_tokens()), settled_ends(task, 32, 32)[-1])
            q, k, v, beta = (y[:, :, whole] for y in block.inputs_of_scan(x))
            eye = torch.eye(k.shape[-1], device=device).expand(*k.shape[:2], -1, -1)
            P = delta_product(q, k, torch.zeros_like(k), beta, eye)[1]
            moved = P.square().sum((-2, -1)).mean(0) - P.mean(0).square().sum((-2, -1))
            found += [(entry, head) for head in (moved > 0.25).nonzero().flatten().tolist()]
        if isinstance(block, MLP):
            x = block(x)
        else:
            x, entry = block(x)[0], entry + 1
    return found


def settled(task):
    """Tokens of a line after which the command in the line before is done: `>>> a, b, c = `.

    A network works late: the local block sees n + 3 tokens, so the names of one line still steer
    the steps of the next. After the `=` of a full command the line before is out of sight. A swap
    is followed by no such fixed text: 0.
    """
    return 0 if task.commands == "swap" else task.group.degree + 2


def settled_ends(task, length, spacing):
    """How many tokens of a trace are read when each command but the last has settled: [L - 1]."""
    zero, done = np.zeros((), int), np.arange(1, length)
    command = task.command_tokens(np.arange(task.group.degree)).shape[-1]
    reveal = task.reveal_tokens(zero, zero).shape[-1]
    return len(task.start_tokens()) + done * command + done // spacing * reveal + settled(task)


def read_heads(state, heads):
    """The S of these heads out of the state of a stream: [B, heads, K, V]."""
    return torch.stack([state[entry][:, head] for entry, head in heads], 1)


@torch.no_grad()
def collect_states(model, task, heads, traces, length, spacing, rng, device="cpu"):
    """What the heads hold once each command of fresh traces has settled, and where the trace is.

    Shapes: states [B, L, heads, K, V]; elements [B, L], the numbers of the true permutations. The
    reveal that may follow a command is read before its state is taken.
    """
    length = length + spacing  # the last command settles in the line after it
    commands = draw_commands(task.group, task.commands, (traces, length), rng)
    asked = rng.integers(task.group.degree, size=(traces, length // spacing))
    tokens = torch.from_numpy(task.write(commands, asked)[0]).to(device)
    elements = task.group.index(run_commands(commands))
    state, states, begin = None, [], 0
    for end in settled_ends(task, length, spacing)[:length - spacing]:
        state = model.stream(tokens[:, begin:end], state)[1]
        states.append(read_heads(state, heads))
        begin = end
    return torch.stack(states, 1), elements[:, :length - spacing]


def pairwise(points):
    """The distances of all pairs: [N, ...] -> [N (N - 1) / 2], on the CPU: Apple's GPUs lack it."""
    return torch.pdist(points.flatten(1).cpu())


def spread(states, elements):
    """Rms distance of the states to the mean of their class, and the least between two class means.

    Shapes: states [N, ...]; elements [N], at least one of them twice.
    """
    points, (found, sizes) = states.flatten(1), np.unique(elements, return_counts=True)
    means = torch.stack([points[torch.from_numpy(elements == e)].mean(0) for e in found])
    apart = points - means[torch.from_numpy(np.searchsorted(found, elements))]
    within = (apart.square().sum() / (len(points) - len(found))).sqrt()
    return within.item(), pairwise(means).min().item()


# --------------------------------------------------------------------------------------------------
# Snapping: a non-linear step between the linear ones
# --------------------------------------------------------------------------------------------------
#
# A linear recurrence that keeps its states apart cannot pull back a state that has drifted: the
# same steps that carry the state carry its error. The states of a group are finitely many. So find
# them, and after every few commands put the state back on the nearest one. Between two such points
# the recurrence is what it was, and is still computed chunk by chunk.

@torch.no_grad()
def find_states(model, task, heads, device="cpu"):
    """The states that the heads pass through, by clustering alone: centroids [N, heads, K, V].

    The distances between the states of short traces are small within a cluster, large between two;
    the widest gap parts them. A state on the far side of it from the first states of all clusters
    begins a new one. Traces are added until a batch brings no new cluster.
    Raises: ValueError if there is no gap, no second cluster, or a new one in each of 10 batches.
    """
    rng, points = stream(0, "valid", 8, 8), []
    for batch in range(10):
        states = collect_states(model, task, heads, 256, 8, 8, rng, device)[0].flatten(0, 1)
        points.append(states.flatten(1))
        if batch == 0:
            apart = pairwise(points[0]).sort()[0]
            # Some states are the same, from traces that begin alike: a gap there says nothing.
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
            return (sums / cluster.bincount().unsqueeze(1)).unflatten(1, states.shape[1:])
    raise ValueError("what the tracking heads hold does not fall into clusters: "
                     f"{len(leaders):,} after {256 * 8 * len(points):,} commands, the widest gap "
                     f"from {near:.3g} to {far:.3g}; train longer, or use --snap off")


def distances(states, centroids):
    """Of each state to each centroid: [B, heads, K, V], [N, heads, K, V] -> [B, N]."""
    return torch.cdist(states.flatten(1), centroids.flatten(1))


def snap(memory, heads, centroids, rows):
    """The state of a stream, in these rows with the nearest centroid in the place of what the heads
    held. Shapes: centroids [N, heads, K, V]; rows bool [B]."""
    held, memory = read_heads(memory, heads), list(memory)
    near = centroids[distances(held, centroids).argmin(1)]
    for (entry, head), old, new in zip(heads, held.unbind(1), near.unbind(1)):
        memory[entry] = memory[entry].clone()
        memory[entry][:, head] = torch.where(rows.view(-1, 1, 1), new, old)
    return memory


class Snapped:
    """A linear RNN whose tracking heads are snapped at every `every`-th settled place of a trace.

    Streamed as the model itself is. The state is snapped just before the token that follows, so
    that it is returned as it arrived. State: that of the model, then the last two tokens [B, 2] and
    the count of such places [B].
    """

    def __init__(self, model, task, heads, centroids, every=1):
        self.model, self.heads, self.centroids, self.every = model, heads, centroids, every
        # Such a place is after a comma name and `=`, or a newline for swaps, and nowhere else.
        commas = [i for i, symbol in enumerate(task.vocab) if symbol.startswith(", ")]
        self.commas = torch.tensor(commas)
        self.mark = task.vocab.index("\n" if task.commands == "swap" else " = ")

    @torch.no_grad()
    def stream(self, tokens, state=None):
        *memory, past, count = state or [tokens.new_full((len(tokens), 2), -1),
                                         tokens.new_zeros(len(tokens))]
        window, memory = torch.cat([past, tokens], 1), memory or None
        after = torch.isin(window[:, :-2], self.commas.to(window)) & (window[:, 1:-1] == self.mark)
        number = count.unsqueeze(1) + after.cumsum(1)
        due = after & (number % self.every == 0)
        logits, begin = [], 0
        for end in [*due.any(0).nonzero().flatten().tolist(), tokens.shape[1]]:
            if begin < end:
                piece, memory = self.model.stream(tokens[:, begin:end], memory)
                logits.append(piece)
            if end < tokens.shape[1]:
                memory = snap(memory, self.heads, self.centroids, due[:, end])
            begin = end
        return torch.cat(logits, 1), [*memory, window[:, -2:], number[:, -1]]


@torch.no_grad()
def extract(model, task, heads, centroids, device="cpu"):
    """The automaton inside the network: from each state each command, and the state nearest to
    where it leads.

    Returns (table, start, reach): the next states [N, commands], the state nearest to where the
    lines `>>> a = 1` lead, and how far, at most, a command ends from the nearest state, in units of
    half the least distance between two: below 1, no other state is as near.
    """
    lines, begin = task.command_tokens(alphabet_of(task)), settled(task)
    first = torch.from_numpy(np.concatenate([task.start_tokens(), lines[0, :begin]])).to(device)
    # From one settled place to the next; all command lines are alike up to there.
    lines = torch.from_numpy(np.roll(lines, -begin, 1)).to(device)
    memory, table, farthest = model.stream(first.expand(len(lines), -1))[1], [], 0.0
    start = distances(read_heads(memory, heads), centroids)[0].argmin().item()
    memory = model.stream(lines[:1].expand(len(lines), -1), memory)[1]  # a command came before
    for state in centroids:
        for (entry, head), held in zip(heads, state):
            memory[entry][:, head] = held
        ends = distances(read_heads(model.stream(lines, memory)[1], heads), centroids).min(1)
        table.append(ends.indices)
        farthest = max(farthest, ends.values.max().item())
    reach = farthest / (pairwise(centroids).min().item() / 2)
    return torch.stack(table).cpu().numpy(), start, reach


def relabel(table, start, group, alphabet):
    """The states as elements: the start is the identity, and a command leads from g to g h.

    Breadth first; -1 for a state that no command leads to. Since the commands keep their names and
    lead everywhere, no other relabelling can be an isomorphism: table and group are isomorphic if
    and only if each element occurs once, and every transition agrees.
    Returns (labels [N], agree): the number of transitions that agree.
    """
    labels, letters = np.full(len(table), -1), group.index(alphabet)
    labels[start], frontier = 0, [start]
    while frontier:
        state = frontier.pop(0)
        for after, label in zip(table[state], group.compose(labels[state], letters)):
            if labels[after] < 0:
                labels[after] = label
                frontier.append(after)
    reached = labels >= 0
    expected = group.compose(labels[reached, None], letters)
    return labels, int((labels[table[reached]] == expected).sum())


def drift(model, task, heads, device="cpu", ends=(16, 64, 128, 256, 512)):
    """The spread of the states along traces: [end, within a class, between two], each from the 16
    commands up to that end."""
    states, elements = collect_states(model, task, heads, 128, ends[-1], 16,
                                      stream(0, "valid", ends[-1], 16), device)
    rows = []
    for end in ends:
        states_there, there = states[:, end - 16:end].flatten(0, 1), elements[:, end - 16:end]
        rows.append([end, *spread(states_there, there.flatten())])
    return rows


def extract_and_print(model, task, heads, centroids, device="cpu"):
    """Whether the automaton inside the network is the group, and how its states drift."""
    group, alphabet = task.group, alphabet_of(task)
    table, start, reach = extract(model, task, heads, centroids, device)
    labels, agree = relabel(table, start, group, alphabet)
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


def states_from(source, model, task, device="cpu"):
    """The tracking heads and their states: found, or read from a file; one not there is written.

    Both empty for a model without a tracking head. Raises: ValueError if the file holds something
    else, or states of another shape.
    """
    path = None if source == "auto" else Path(source)
    if path and path.exists():
        try:
            heads, centroids = torch.load(path, map_location=device, weights_only=True)
            state = model.stream(torch.zeros(1, 1, dtype=torch.long, device=device))[1]
            snap(state, heads, centroids, torch.ones(1, dtype=torch.bool, device=device))
        except (OSError, EOFError, RuntimeError, TypeError, ValueError, IndexError, AttributeError,
                pickle.UnpicklingError) as error:
            raise ValueError(f"{path} does not hold the states of this model: "
                             f"{' '.join(str(error).split())[:100]}") from None
        print(f"tracking: {len(centroids)} states read from {path}")
        return heads, centroids
    prepare_file(path)
    heads = tracking_heads(model, task, device)
    if not heads:
        print("tracking: no head of this model tracks; nothing is snapped or extracted")
        return [], []
    centroids = find_states(model, task, heads, device)
    least = pairwise(centroids).min().item()
    print(f"tracking: heads {spaced(f'{entry}:{head}' for entry, head in heads)} (state:head), "
          f"{len(centroids)} states found, at least {least:.1f} apart")
    if path:
        replace_file(path, lambda side: torch.save((heads, centroids), side))
    return heads, centroids


# --------------------------------------------------------------------------------------------------
# Inside a linear RNN: beta, keys, and what each head is worth
# --------------------------------------------------------------------------------------------------

def delta_blocks(model):
    """The DeltaNet layers of a model, in order; none for a Transformer or an LSTM."""
    return [block for block in model.modules() if isinstance(block, DeltaBlock)]


@torch.no_grad()
def scan_inputs(model, tokens):
    """What each DeltaNet layer hands to its scan: a list of (q, k, v, beta), one per layer, with
    the shapes of DeltaBlock.inputs_of_scan.
    """
    found = []
    hooks = [block.register_forward_pre_hook(
        lambda block, given: found.append(block.inputs_of_scan(given[0])))
        for block in delta_blocks(model)]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return found


def command_lines(task, of_tokens, length, spacing):
    """The part of an array over tokens that belongs to commands: [B, T, ...] -> [B, L, line, ...].
    """
    batch, rest = len(of_tokens), of_tokens.shape[2:]
    body = of_tokens[:, task.start_tokens().size:].reshape(batch, length // spacing, -1, *rest)
    reveal = task.reveal_tokens(np.array(0), np.array(0)).size
    return body[:, :, :-reveal].reshape(batch, length, -1, *rest)


def beta_by_place(model, task, traces=16, length=64, spacing=8, seed=0):
    """Mean beta at each place in the line of a command: [layers, heads, line]. Figure 5."""
    tokens, _ = task.sample(traces, length, spacing, stream(seed, "valid"))
    betas = [beta[..., 0].permute(0, 2, 1) for *_, beta in scan_inputs(model, torch.tensor(tokens))]
    return torch.stack([command_lines(task, beta, length, spacing).mean((0, 1)).T
                        for beta in betas])


def name_keys(model, task, layer, head, traces=16, length=64, spacing=8, seed=0):
    """A head's mean key for each left-hand name [n, K], and for the name y as i-th on the right
    [n, n, K], of full commands. k and -k make the same step: signs are aligned first.
    """
    n = task.group.degree
    tokens, _ = task.sample(traces, length, spacing, stream(seed, "valid"))
    keys = scan_inputs(model, torch.tensor(tokens))[layer][1][:, head, :, 0]
    lines = command_lines(task, torch.tensor(tokens), length, spacing).flatten(0, 1)
    keys = command_lines(task, keys, length, spacing).flatten(0, 1)
    left, right = keys[:, 1:n + 1], keys[:, n + 2:2 * n + 2]  # `>>> `, n names, ` = `, n names
    symbols = [str(task.vocab[token])[-1] for token in lines[:, n + 2:2 * n + 2].flatten()]
    names = torch.tensor([ord(symbol) - ord("a") for symbol in symbols]).view(-1, n)
    fetched = torch.stack([torch.stack([mean_axis(right[names[:, i] == y, i]) for y in range(n)])
                           for i in range(n)])
    return torch.stack([mean_axis(left[:, x]) for x in range(n)]), fetched


def mean_axis(keys):
    """The unit vector closest, up to sign, to the given ones: [count, K] -> [K]."""
    return torch.linalg.svd(keys, full_matrices=False).Vh[0]


def intervene(model, task, limits, length=64, spacing=2, traces=64, seed=0, device="cpu"):
    """Accuracy over all reveals with the beta of ONE head scaled from [0, beta_max] to [0, limit],
    the other heads as trained: [layers, heads, limits]. Figure 6 of the paper.
    """
    accuracy = []
    for block in delta_blocks(model):
        trained, rows = block.beta_max, []
        for head in range(block.heads):
            rows.append([])
            for limit in limits:
                block.beta_max = torch.full((block.heads, 1, 1), float(trained), device=device)
                block.beta_max[head] = limit
                rows[-1].append(evaluate(model, task, length, spacing, traces, seed, device)["all"])
        block.beta_max = trained
        accuracy.append(rows)
    return np.array(accuracy)


def print_intervention(accuracy, limits, chance):
    """The table of intervene(): a row for each head."""
    print("\naccuracy at (64,2) with the beta of one head scaled to [0, limit]; "
          f"chance {chance:.1%}")
    print(f"{'limit':>16} " + " ".join(f"{limit:7.2f}" for limit in limits))
    for layer, head in np.ndindex(accuracy.shape[:2]):
        print(f"{f'layer {layer} head {head}':>16} " +
              " ".join(f"{share:7.1%}" for share in accuracy[layer, head]))


def fit_probe(states, elements, group):
    """A linear map from a state to its permutation: least squares onto the n x n matrix with a 1
    where variable i holds value j. Shapes: states [N, ...], elements [N] -> weights [features, nn].
    """
    targets = F.one_hot(torch.from_numpy(group.elements[elements]), group.degree).float()
    return torch.linalg.lstsq(states.flatten(1), targets.flatten(1), driver="gelsd").solution


def probe_accuracy(weights, states, elements, group):
    """Share of states of which the map reads every variable rightly."""
    n = group.degree
    read = (states.flatten(1) @ weights).view(-1, n, n).argmax(-1)
    return (read == torch.from_numpy(group.elements[elements])).all(-1).float().mean().item()


def swap_machine_errors(group, lengths, dtype, traces=4, seed=0):
    """The machine of scan.py, set by hand, on random commands: what floating point leaves of it.

    S holds value j in slot i as S[i, j] = 1. Returns, after each of the lengths, the largest
    distance of an entry of S from its exact value, and the share of variables whose largest entry
    names the wrong value. bf16 runs as a loop over tokens: torch solves no triangle in it.
    """
    scan = delta_rule_recurrent if dtype == torch.bfloat16 else delta_rule_chunked
    n, rng, done, rows = group.degree, stream(seed, "test", 0), 0, []
    state = torch.eye(2 * n, n, dtype=dtype).expand(traces, -1, -1)
    exact = None
    for length in lengths:
        while done < length:
            commands = group.draw((traces, min(1000, length - done)), rng)
            keys = swap_machine_keys(torch.from_numpy(commands)).to(dtype)
            _, state = scan(keys, keys, keys.new_zeros(*keys.shape[:-1], n),
                            keys.new_full(keys.shape[:-1], 2), state)
            exact = run_commands(commands, exact)[:, -1]
            done += commands.shape[1]
        ideal = F.pad(F.one_hot(torch.from_numpy(exact), n), (0, 0, 0, n))
        rows.append({"commands": length, "error": float((state.double() - ideal).abs().max()),
                     "wrong": float((state[:, :n].argmax(-1).numpy() != exact).mean())})
    return rows


# --------------------------------------------------------------------------------------------------
# The figure and the command line
# --------------------------------------------------------------------------------------------------

def plot(results, config, path):
    """Left: accuracy against length. Right: against the position of the reveal, for each length."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    trained = max(length for length, _ in config["curriculum"])
    blue, orange, grey = "#0072B2", "#D55E00", "#666666"  # Okabe and Ito 2008
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    lengths = [row["length"] for row in results]
    left.plot(lengths, [row["all"] for row in results], "o-", color=blue)
    left.plot(lengths, [row["every"] for row in results], "s-", color=orange)
    left.fill_between(lengths, [row["every_low"] for row in results],
                      [row["every_high"] for row in results], color=orange, alpha=0.2, linewidth=0)
    for key, label, colour, above in [("all", "all reveals", blue, True),
                                      ("every", "every reveal of a trace", orange,
                                       results[-1]["every"] < 0.5)]:
        left.annotate(label, (lengths[-1], results[-1][key]), (-8, 8 if above else -16),
                      textcoords="offset points", color=colour, ha="right")
    left.axvline(trained, color=grey, linestyle=":")
    left.annotate("longest training trace", (trained, 0.62), (4, 0),
                  textcoords="offset points", rotation=90, color=grey, va="center")
    left.set_xscale("log", base=2)
    left.set(xlabel="commands in the trace", ylabel="accuracy", ylim=(0, 1.05))
    for row, shade in zip(results, np.linspace(0.35, 1, len(results))):
        ends = np.arange(1, len(row["by_position"]) + 1) * row["spacing"]
        right.plot(ends, row["by_position"], color=blue, alpha=shade)
    right.axvline(trained, color=grey, linestyle=":")
    right.set(xlabel="commands read before the reveal")
    right.set_xscale("log", base=2)
    for axes in (left, right):
        axes.xaxis.set_major_formatter(ticker.ScalarFormatter())
        axes.axhline(results[0]["chance"], color=grey, linewidth=0.8)
        axes.annotate("chance", (axes.get_xlim()[0], results[0]["chance"]), (3, 3),
                      textcoords="offset points", color=grey)
    far = results[-1]
    figure.suptitle(f"{config['model']} on {config['group']}, trained to {trained} commands: "
                    f"{far['all']:.0%} of reveals right at {far['length']}")
    figure.tight_layout()
    replace_file(Path(path), lambda side: figure.savefig(
        side, format=Path(path).suffix[1:], dpi=150))
    pyplot.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", help="a run folder, made by train.py")
    parser.add_argument("--lengths", help="LENGTH:SPACING,... (default: the format's own)")
    parser.add_argument("--traces", type=int, default=256, help="fresh traces for each length")
    parser.add_argument("--seed", type=int, default=0,
                        help="of the traces; any seed is disjoint from training")
    parser.add_argument("--uncertain", type=float, metavar="P",
                        help="share of uncertain commands in the traces (default: the run's own; "
                             "for a run without them 0, which asks for the filter)")
    parser.add_argument("--reveals", default="random", choices=REVEALS,
                        help="which variables are revealed (a run with --uncertain)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    parser.add_argument("--exhaustive", action="store_true", help="every command from every state")
    parser.add_argument("--intervene", action="store_true",
                        help="accuracy with the beta range of each head narrowed, one at a time")
    parser.add_argument("--snap", default="off", metavar="auto|off|FILE",
                        help="put drifted states back on the nearest one; FILE keeps those found")
    parser.add_argument("--snap-every", type=int, default=1, help="commands from snap to snap")
    parser.add_argument("--extract", action="store_true",
                        help="read the automaton off the states, and compare it with the group")
    parser.add_argument("--record", metavar="FILE", help="append the numbers as one JSON line")
    parser.add_argument("--plot", metavar="FILE", help="write the figure (.png, .pdf, .svg)")
    parser.add_argument("--json", action="store_true",
                        help="print the numbers as one JSON line at the end")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    try:
        if args.traces < 1 or args.seed < 0 or args.snap_every < 1:
            raise ValueError("--traces and --snap-every must be at least 1 and --seed not "
                             f"negative; got {args.traces}, {args.snap_every}, {args.seed}")
        if args.snap_every > 1 and args.snap == "off":
            raise ValueError("--snap-every needs --snap auto or FILE")
        if args.plot and Path(args.plot).suffix not in FORMATS:
            raise ValueError(f"--plot writes {', '.join(FORMATS)}; got {args.plot}")
        device = choose_device(args.device)
        config, task, model = load_run(args.run, device)
        lengths = parse_stages(args.lengths or task.default_lengths, task)
        inside = args.exhaustive or args.intervene or args.extract or args.snap != "off"
        if config["format"] != "repl" and (inside or args.uncertain is not None):
            raise ValueError("--exhaustive, --intervene, --extract, --snap and --uncertain are for "
                             "REPL traces; this run was trained on words")
        if task.uncertain and (args.snap != "off" or args.extract):
            raise ValueError("--snap and --extract look for finitely many states; a run with "
                             "--uncertain holds a belief")
        if clean_ups(model) and (args.snap != "off" or args.extract):
            raise ValueError("--snap and --extract are for states that nothing else corrects; a "
                             "run with --codes corrects its own")
        if (args.uncertain or args.reveals != "random") and not task.uncertain:
            raise ValueError("--uncertain and --reveals ask how a belief is tracked; this run was "
                             "trained without --uncertain and knows no coins")
        if args.reveals == "adversarial" and args.uncertain is not None:
            raise ValueError("--reveals adversarial has coins of its own; leave out --uncertain")
        if not 0 <= (args.uncertain or 0) <= 1:
            raise ValueError(f"--uncertain must lie between 0 and 1; got {args.uncertain}")
        if args.intervene and not delta_blocks(model):
            raise ValueError("--intervene narrows the beta of a linrnn; "
                             f"this run is a {config['model']}")
        prepare_file(args.record)
        prepare_file(args.plot)
        numbers, begin, trained = {"config": config}, time.perf_counter(), model
        if args.snap != "off" or args.extract:
            source = "auto" if args.snap == "off" else args.snap
            heads, centroids = states_from(source, model, task, device)
            numbers["tracking"] = {"heads": heads, "states": len(centroids)}
        if args.extract and heads:
            numbers["extract"] = extract_and_print(model, task, heads, centroids, device)
        if args.snap != "off" and heads:
            model = Snapped(model, task, heads, centroids, args.snap_every)
        results = evaluate_and_print(model, task, lengths, args.traces, args.seed, device,
                                     args.reveals, args.uncertain)
        numbers["results"] = results
        if task.uncertain:
            numbers |= {"uncertain": args.uncertain, "reveals": args.reveals}
        if args.exhaustive:
            pairs, failures = exhaustive(model, task, device)
            print_certificate(pairs, failures, task)
            numbers["exhaustive"] = {"pairs": pairs, "right": pairs - len(failures)}
        if args.intervene:
            limits = np.linspace(1, 0.5, 6) * config["options"]["beta_max"]
            accuracy = intervene(trained, task, limits, seed=args.seed, device=device)
            print_intervention(accuracy, limits, task.chance)
            numbers["intervention"] = {"limits": limits.tolist(), "accuracy": accuracy.tolist()}
        if args.plot:
            plot(results, config, args.plot)
        if args.record:
            minutes = round((time.perf_counter() - begin) / 60, 3)
            append_record(args.record, ["eval.py", *argv],
                          {"seed": config["seed"], **numbers, "minutes": minutes,
                           "threads": torch.get_num_threads(), "device": device})
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # what was printed stands; nothing is recorded
    if args.json:
        print(json.dumps(numbers))


if __name__ == "__main__":
    main()
