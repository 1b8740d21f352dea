"""Which head of a linear RNN tracks the state, and what does it hold along a trace?

A head is named by a pair (entry, head). The entry counts the blocks of the model. It is the index
into model.blocks and into the state that model.stream returns. Layer l has the entry 1 + 2 l.

Finding (results/extract.jsonl, at commit a8082c9). The network has four heads. On each of five
seeds of S5 exactly one of them tracks: head 3, 0, 0, 2 and 0. So it is with S3, A5 and the swaps of
S5; with Z7 and D6 two heads share the task.
    What the head holds drifts. R is the rms distance of its states from the mean of their class,
where a class is all states of one permutation. M is the least distance between two such means. On
the five seeds of S5, over the 16 commands up to
    command        16           128          256         512
    R / M       0.17-0.20    0.50-0.75    1.3-3.1     4.6-7.9
The ratio grows because M shrinks, by 0.8 to 1.6% a command between 16 and 256. R never exceeds 1.6
times its first value. R / M = 1 is not the place where answers go wrong. At 256 commands the last
reveal is still right in 63, 64 and 63 of 64 traces, at 512 in 37, 40 and 14 (seeds 0-2,
results/length.jsonl, at commit 1551752).

Command: this chapter is used by the two after it. `python -m experiments.snap RUN --extract` prints
the heads and the drift.

Sources: R / M and why an affine recurrence cannot stop it, arXiv 2605.07755. The test of a head by
the product of its steps is this project's.

Next: snap.py, inside.py.
"""

import numpy as np
import torch

from data import draw_commands, generator, run_commands
from eval import load_run
from models import DeltaBlock
from scan import delta_product


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


@torch.no_grad()
def collect_states(model, task, heads, traces, length, spacing, rng, device="cpu"):
    """What the heads hold once each command of fresh traces has settled, and where the trace is.

    A reveal that follows a command is read before the state is taken.
    Shapes: states [B, L, heads, K, V]; elements [B, L], the numbers of the true permutations.
    """
    longer = length + spacing  # the last command settles in the line after it
    commands = draw_commands(task.group, task.commands, (traces, longer), rng)
    asked = rng.integers(task.group.degree, size=(traces, longer // spacing))
    tokens = torch.from_numpy(task.write(commands, asked)[0]).to(device)
    elements = task.group.index(run_commands(commands[:, :length]))
    state, states, begin = None, [], 0
    for end in settled_ends(task, longer, spacing)[:length]:
        _, state = model.stream(tokens[:, begin:end], state)
        states.append(read_heads(state, heads))
        begin = end
    return torch.stack(states, 1), elements


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
    states, elements = collect_states(model, task, heads, 128, ends[-1], 16,
                                      generator(0, "valid", ends[-1], 16), device)
    return [[end, *spread(states[:, end - 16:end].flatten(0, 1),
                          elements[:, end - 16:end].flatten())] for end in ends]
