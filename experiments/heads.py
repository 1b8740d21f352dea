"""Which head of a linear RNN tracks the state, and what does it hold?  A permutation, linearly.

A head is named by a pair (entry, head). The entry counts the blocks of the model. It is the index
into model.blocks and into the state that model.stream returns. Layer l has the entry 1 + 2 l.

Finding (results/extract.jsonl, at commit a8082c9). The network has four heads. On each of five
seeds of S5 exactly one of them tracks: head 3, 0, 0, 2 and 0. So it is with S3, A5 and the swaps of
S5; with Z7 and D6 two heads share the task.
    What the head holds is a linear image of the permutation (equation 1, below): on the five seeds
16 directions, and a state lies off its image by 15 to 17% of the spread of all states. On fresh
traces the wrong permutations are at least 4.7 times as far as the right one (results/snap.jsonl).
    What the head holds drifts. R is the rms distance of its states from the mean of their class,
where a class is all states of one permutation. M is the least distance between two such means. On
the five seeds of S5, over the 16 commands up to
    command        16           128          256         512
    R / M       0.17-0.20    0.50-0.75    1.3-3.1     4.6-7.9
The ratio grows because M shrinks, by 0.8 to 1.6% a command between 16 and 256. R never exceeds 1.6
times its first value. R / M = 1 is not the place where answers go wrong. At 256 commands the last
reveal is still right in 63, 64 and 63 of 64 traces, at 512 in 37, 40 and 14 (seeds 0-2,
results/length.jsonl, at commit 1551752).

Command: this chapter is used by the three after it. `python -m experiments.snap RUN --extract`
prints the heads and the drift.

Sources: R / M and why an affine recurrence cannot stop it, arXiv 2605.07755. The test of a head by
the product of its steps is this project's.

Next: extract.py, snap.py, inside.py.
"""

import numpy as np
import torch
import torch.nn.functional as F

from data import draw_commands, generator, run_commands
from eval import load_run
from models import DeltaBlock
from scan import delta_product


class Untracked(Exception):
    """The heads do not hold a state of the group: the model has not learned it."""


def load_repl_run(folder, device="cpu"):
    """load_run, for a run on REPL traces without coins. Raises: ValueError for any other run."""
    checkpoint, task, model = load_run(folder, device)
    if checkpoint["config"]["format"] != "repl":
        raise ValueError("this chapter looks for the finitely many states of REPL traces; the run "
                         f"in {folder} was trained on the format {checkpoint['config']['format']}")
    return checkpoint, task, model


# --- Which head tracks ----------------------------------------------------------------------------

def delta_blocks(model):
    """The DeltaBlocks of a model, layer by layer: {entry: block}. Other models have none."""
    return {entry: block for entry, block in enumerate(model.blocks)
            if isinstance(block, DeltaBlock)}


@torch.no_grad()
def scan_inputs(model, tokens):
    """What each DeltaBlock hands to its scan: [(q, k, v, beta)] layer by layer, as in models.py."""
    x, found = model.embedding(tokens), []
    for block in model.blocks:
        if isinstance(block, DeltaBlock):
            found.append(block.inputs_of_scan(x))
        x, _ = block(x)
    return found


@torch.no_grad()
def tracking_heads(model, task, device="cpu"):
    """The heads that keep what they held before a trace, and move it: [(entry, head)].

    Start at S = I and write nothing. Then the scan over 32 commands returns the product P of its
    steps. E|P|^2 - |E P|^2, over random traces, counts the directions that are kept and that the
    commands move. It is 0 for a head that forgets, since P = 0, and for one that merely remembers,
    since its P is the same for all traces. A group that moves anything moves a direction or more;
    a head counts from a quarter of a direction on.
    """
    tokens, _ = task.sample(64, 32, 32, generator(0, "valid", 32, 32))
    # Neither the lines `>>> a = 1` nor the reveal at the end: they may overwrite the state.
    whole, found = slice(len(task.start_tokens()), settled_ends(task, 32, 32)[-1]), []
    layers = scan_inputs(model, torch.from_numpy(tokens).to(device))
    for entry, inputs in zip(delta_blocks(model), layers):
        q, k, _, beta = (x[:, :, whole] for x in inputs)
        eye = torch.eye(k.shape[-1], device=device).expand(*k.shape[:2], -1, -1)
        _, P = delta_product(q, k, torch.zeros_like(k), beta, eye)
        moved = P.square().sum((-2, -1)).mean(0) - P.mean(0).square().sum((-2, -1))
        found += [(entry, head) for head in (moved > 0.25).nonzero().flatten().tolist()]
    return found


# --- Where in a trace a state can be read ---------------------------------------------------------

def settling_tokens(task):
    """Tokens of a line after which the command in the line before it is done: `>>> a, b, c = `.

    A network works late. The local block sees n + 3 tokens, so the names of one line still steer
    the steps of the next. After the `=` of a full command the line before it is out of sight. A
    swap is followed by no such fixed text: 0.
    """
    return 0 if task.commands == "swap" else task.group.degree + 2


def settled_ends(task, length, spacing):
    """How many tokens of a trace are read when each command but the last has settled: [L - 1]."""
    zero, done = np.zeros((), int), np.arange(1, length)
    command = task.command_tokens(np.arange(task.group.degree)).shape[-1]
    reveal = task.reveal_tokens(zero, zero).shape[-1]
    before = len(task.start_tokens()) + settling_tokens(task)
    return before + done * command + done // spacing * reveal


def read_heads(state, heads):
    """The S of these heads, from the state of a stream: [B, heads, K, V]."""
    return torch.stack([state[entry][:, head] for entry, head in heads], 1)


def write_heads(state, heads, S):
    """The state of a stream with S [B, heads, K, V] in these heads."""
    state = list(state)
    for i, (entry, head) in enumerate(heads):
        state[entry] = state[entry].clone()
        state[entry][:, head] = S[:, i]
    return state


@torch.no_grad()
def ask_all(model, task, state, batch, device="cpu"):
    """What the model answers to a `print` of each variable, before the next line: [B, n], from 0.

    Each question starts from the same state, so none tells the model anything about another.
    """
    n, answers = task.group.degree, []
    values = torch.from_numpy(task.value_tokens).to(device)
    for variable in range(n):
        line = task.reveal_tokens(np.full(batch, variable), np.zeros(batch, int))[:, :-2]
        logits, _ = model.stream(torch.from_numpy(line).to(device), state)
        answers.append(logits[:, -1, values].argmax(-1))
    return torch.stack(answers, -1).cpu().numpy()


@torch.no_grad()
def collect_states(model, task, heads, traces, length, spacing, rng, device="cpu", ask=False):
    """What the heads hold once each command of fresh traces has settled, and where the trace is.

    A reveal that follows a command is read before the state is taken. With ask the permutations are
    the model's own answers, which may name a value twice; else they are the true ones.
    Shapes: states [B, L, heads, K, V]; perms [B, L, n].
    """
    longer = length + spacing  # the last command settles in the line after it
    commands = draw_commands(task.group, task.commands, (traces, longer), rng)
    asked = rng.integers(task.group.degree, size=(traces, longer // spacing))
    tokens = torch.from_numpy(task.write(commands, asked)[0]).to(device)
    state, states, answers, begin = None, [], [], 0
    for end in settled_ends(task, longer, spacing)[:length]:
        if ask:
            line_end = end - settling_tokens(task)
            _, state = model.stream(tokens[:, begin:line_end], state)
            answers.append(ask_all(model, task, state, traces, device))
            begin = line_end
        if begin < end:
            _, state = model.stream(tokens[:, begin:end], state)
        states.append(read_heads(state, heads))
        begin = end
    perms = np.stack(answers, 1) if ask else run_commands(commands[:, :length])
    return torch.stack(states, 1), perms


# --- The permutation in a state -------------------------------------------------------------------
#
# Let P be the n x n matrix with a 1 where variable i holds value j, and 0 elsewhere. Once a command
# has settled, what the tracking heads hold is a linear image of P:
#
#     S = mean + sum_ij (P_ij - 1/n) B_ij + noise                                               (1)
#
# Why. At the start a key k_j carries the value j: S = sum_j k_j v_j^T. Later nothing is written; a
# command moves the keys, A_g k_i = k_i' for the variable i' that is given what i held. (In the head
# built by hand, scan.py, k_i = e_i.) So after any commands S = sum_ij P_ij k_i v_j^T: (1), with
# B_ij = k_i v_j^T. Rows and columns of P - 1/n sum to 0, so only (n - 1)^2 directions of B count:
# differences of keys times differences of values. All are of one length if both are orthonormal.
#
# A smaller group spans fewer. Split its n points, over the complex numbers, into irreducible parts;
# each distinct part of dimension d but the trivial one adds d^2 (Burnside). So S_n, and A_n from
# n = 4, span (n - 1)^2 directions; Z_n n - 1; D_n 2 n - 3 for even n and 2 n - 2 for odd n. In a
# product P is block diagonal, and the numbers of the factors add up. A head may hold fewer still:
# any parts that tell all elements apart. A trained Z7 holds 2 of 6, a circle; a D6 5 of 9.

SHORTEST = 0.25  # of the longest: a direction below is not used by the head, and read as noise


def nearest(P):
    """A permutation for each matrix: take the largest entry, cross out its row and column, again.

    If no entry is off by 1/2 from a permutation matrix, it is that one, and no other is as near.
    Shapes: P [..., n, n] -> [..., n].
    """
    n, left = P.shape[-1], P.clone().reshape(-1, *P.shape[-2:])
    found, rows = torch.empty(left.shape[:2], dtype=torch.long, device=P.device), range(len(left))
    for _ in range(n):
        largest = left.flatten(1).argmax(1)
        i, j = largest // n, largest % n
        found[rows, i] = j
        left[rows, i] = left[rows, :, j] = -torch.inf
    return found.view(P.shape[:-1])


class LinearImage:
    """Equation (1), fitted by least squares, in float64, to states of these heads.

    Left out are the states with a value twice: they span directions that no permutation has.
    Shapes: states [..., heads, K, V], a tensor; perms [..., n], an array. Raises: Untracked."""

    def __init__(self, heads, states, perms):
        perms = torch.from_numpy(perms).flatten(0, -2)
        whole = (perms.sort(-1).values == torch.arange(perms.shape[-1])).all(-1)
        if not whole.any():
            raise Untracked("the heads do not hold the permutation, no answer is one: train longer")
        X = F.one_hot(perms[whole], perms.shape[-1]).flatten(-2).double()
        Y = states.flatten(-3).flatten(0, -2).cpu().double()[whole]
        average, mean = X.mean(0), Y.mean(0)  # average: 1/n, where the points are moved uniformly
        B = torch.linalg.pinv(X - average) @ (Y - mean)
        sizes = torch.linalg.svdvals(B)
        self.heads, self.n, self.sizes = heads, perms.shape[-1], sizes[sizes > SHORTEST * sizes[0]]
        self.spread = (Y - mean).square().sum(1).mean().sqrt().item()
        parts = average, mean, B, torch.linalg.pinv(B, rtol=SHORTEST)
        self.average, self.mean, self.B, self.inverse = [
            part.to(states.dtype).to(states.device) for part in parts]  # Apple has no float64

    def read(self, states):
        """(S - mean) B^+, plus 1/n: [..., heads, K, V] -> P [..., n, n]."""
        P = (states.flatten(-3) - self.mean) @ self.inverse + self.average
        return P.unflatten(-1, (self.n, self.n))

    def along(self, reader, task, traces, length, rng, device="cpu"):
        """P along fresh traces without a reveal, [traces, length, n, n], and the permutations.

        The reader is the model, whose states drift, or a Snapped one (snap.py).
        """
        states, perms = collect_states(reader, task, self.heads, traces, length, length, rng,
                                       device)
        return self.read(states), perms

    def correct(self, states):
        """The image of the nearest permutation, in place of each state.

        Exercise 9 (2 points, 2 lines): read P, take the nearest permutation, write its image, (1).
        Trap: P has a row for each variable. Transposed it undoes the command, as no swap shows."""
        ### BEGIN SOLUTION
        P = F.one_hot(nearest(self.read(states)), self.n).flatten(-2).to(states)
        return (self.mean + (P - self.average) @ self.B).view_as(states)
        ### END SOLUTION

    def certify(self, states):
        """How sure is a reading? Returns (permutation [..., n], residual [...], margin [...]).

        residual: the distance of S from the image of its permutation, over the spread of the
        states. margin: the distance of P from the nearest wrong permutation, over its distance from
        this one; wrong are those with two values exchanged. Above 1 none of them is as near.
        """
        P, residual = self.read(states), states - self.correct(states)
        perms = nearest(P)
        error = (P - F.one_hot(perms, self.n)).square().sum((-2, -1))
        A = P.gather(-1, perms.unsqueeze(-2).expand_as(P))  # A_ij: i holds the value of j
        own = A.diagonal(dim1=-2, dim2=-1)
        loss = own.unsqueeze(-1) + own.unsqueeze(-2) - A - A.mT  # of <P, permutation>, for i and j
        loss.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
        margin = (1 + 2 * loss.amin((-2, -1)) / error).sqrt()
        return perms, residual.flatten(-3).norm(dim=-1) / self.spread, margin


# --- How the states spread ------------------------------------------------------------------------

def pairwise(points):
    """The distances of all pairs: [N, ...] -> [N (N - 1) / 2], on the CPU: Apple's GPUs lack it."""
    return torch.pdist(points.flatten(1).cpu())


def spread(states, elements):
    """Rms distance of the states to the mean of their class, and the least between two such means.

    Shapes: states [N, ...]; elements [N], two or more of them different and one of them twice.
    """
    points, (found, sizes) = states.flatten(1), np.unique(elements, return_counts=True)
    means = torch.stack([points[torch.from_numpy(elements == e)].mean(0) for e in found])
    apart = points - means[torch.from_numpy(np.searchsorted(found, elements))]
    within = (apart.square().sum() / (len(points) - len(found))).sqrt()
    return within.item(), pairwise(means).min().item()


def drift(model, task, heads, device="cpu", ends=(16, 64, 128, 256, 512)):
    """How the states spread along traces: rows [end, R, M], each from the 16 commands up to end."""
    states, perms = collect_states(model, task, heads, 128, ends[-1], 16,
                                   generator(0, "valid", ends[-1], 16), device)
    elements = task.group.index(perms)
    return [[end, *spread(states[:, end - 16:end].flatten(0, 1),
                          elements[:, end - 16:end].flatten())] for end in ends]
