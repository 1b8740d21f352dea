"""Must a linear recurrence drift?  No: with integer keys it makes no errors, and that is provable.

    swap x and y'      trained:  k is near +-(e_x - e_y') / sqrt 2      rounded:  k = e_x - e_y'

The tracking head of a trained model is near the swap machine of scan.py. We replace its keys by
those of the machine, which are integers, put its values on a grid of 2^-10, and leave the other
heads out. A step then adds and subtracts rows of S, which float32 does exactly. So nothing drifts,
although the recurrence is as linear and as parallel as before. The other parameters are trained for
400 more steps, on traces of eight commands.

S can now have only 120 values, and an answer depends on S and on one line of text. So a finite test
is a proof for every length:

    Theorem. Let `certify` accept a model. Then it answers every reveal correctly in every text that
    consists of the lines `>>> a = 1` to `>>> e = 5` and then of full commands and reveals, in any
    number and order, true or false, in whatever pieces it is read. (Section 4 has the proof.)

Training did not find the integers: we put them in, and a model that was never trained, in a random
frame, is proved as well. The rounded model ignores reveals, so it cannot join a session late.

    python -m experiments.exact [--run]    the tables; first make what is missing
    python -m experiments.exact DIR        round your own run, train the rest, and prove it

Source: ours. Next: words.py.
"""

import copy
import sys
from dataclasses import asdict
from functools import cache
from itertools import islice
from pathlib import Path
from time import process_time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from data import Group, ReplTask, UserError, draw_commands, generator, make_parser, run_cli, stages
from eval import evaluate_and_print, make
from experiments import (RESULTS, STORED, Study, at, by_test, chapter, decaying, grid, load, read,
                         records, table, without)
from experiments.groups import compose, index
from experiments.inside import fit_image, scan_inputs, tokens_of, tracking_heads
from experiments.plots import BLUE, GREEN, RED, canvas, draw, ticks_at
from experiments.snap import Snapped, evaluate_stream
from models import MLP, DeltaBlock, LinRNN, LocalBlock, unit
from scan import delta_rule_chunked, swap_key
from train import Config, train

GRID = 2.0**-10  # values are multiples of this,
LARGEST = 4  # and at most this
MARGIN = 0.5  # by which the logit of a correct answer must exceed all others


class Refused(UserError):
    """There is no proof for this model."""


# --- 1. Which swap is at which token --------------------------------------------------------------
#
# S has 2n rows, called slots. Between two commands, slot x' (number n + x) holds the value of the
# variable x. While a command executes, the values are in the slots without a prime:
#
#     >>> a = 1                      at 1: write the value into a'
#     >>> a, b, c = c, a, b          at the i-th left-hand name x: swap x and x'
#                                    at the i-th right-hand name y: swap y and x_i'
#
# A place is a mark (a token that is neither a name nor a value), how many tokens later it is, and
# the token there. Its number is its code: first right-hand names, then left-hand names, then
# values. All other tokens share the last code; their key is 0.


def places_and_swaps(task):
    """The place of each code, (mark, distance, token), and the slots to swap, int [codes, 2]."""
    n = len(task.names)
    prompt, equals = task.ids[">>> "], task.ids[" = "]
    name = [[task.ids[f", {y}" if i else y] for y in task.names] for i in range(n)]

    places = [(equals, i + 1, name[i][y]) for i in range(n) for y in range(n)]
    places += [(prompt, i + 1, name[i][i]) for i in range(n)]
    places += [(equals, 1, task.ids[value]) for value in task.values]
    swaps = [(y, n + i) for i in range(n) for y in range(n)] + [(i, n + i) for i in range(n)]
    return places, torch.tensor(swaps)


@cache
def tables_of(task):
    """Whether each token is a mark; the code of (mark, distance, token)."""
    places, _ = places_and_swaps(task)
    others = {*task.names, *task.values}
    marks = torch.tensor([token.strip(", ") not in others for token in task.vocab])
    codes = torch.full((len(task.vocab), len(task.names) + 2, len(task.vocab)), len(places))
    codes[tuple(torch.tensor(places).T)] = torch.arange(len(places))
    return marks, codes


def codes_of(task, tokens):
    """The code of each token: int [B, T] -> [B, T].  It depends on n + 1 tokens at most."""
    marks, codes = tables_of(task)
    at = torch.arange(tokens.shape[1]).expand_as(tokens)
    last = torch.where(marks[tokens], at, 0).cummax(1).values
    return codes[tokens.gather(1, last), (at - last).clamp(max=codes.shape[1] - 1), tokens]


# --- 2. How near a trained head is to the machine -------------------------------------------------

def nearest_head(model, task):
    """The tracking head that is nearest to the swap machine: head, frame, angles (see fit_frame).

    Raises: Refused for another kind of model or task, or if no head tracks the state.
    """
    if ([type(block) for block in model.blocks] != [LocalBlock, DeltaBlock, MLP]
            or model.blocks[1].householders > 1 or task.commands != "full"):
        raise Refused("this needs full commands, and DeltaNet with a local block, one layer and "
                      "one Householder step per token")
    if model.blocks[1].out_norm.weight.numel() < 2 * len(task.names):
        raise Refused("this needs heads of width 2n, two slots for each variable")
    found = [(head, *fit_frame(model, task, head)) for _, head in tracking_heads(model, task)]
    if not found:
        raise Refused("no head of this model tracks the state")
    return min(found, key=lambda each: each[2].median())


@torch.no_grad()
def fit_frame(model, task, head):
    """find_frame for the mean key of each right-hand name in each place: n^2 keys."""
    commands = draw_commands(task.group, "full", (64, 8), generator(0, "valid"))
    tokens, _ = tokens_of(task, commands)
    k = scan_inputs(model, tokens)[1][1][:, head, :, 0].double()
    codes = codes_of(task, tokens)
    count = len(task.names)**2
    # k and -k make the same step: the mean is the unit vector nearest to all keys up to sign.
    keys = [torch.linalg.svd(k[codes == code], full_matrices=False).Vh[0] for code in range(count)]
    return find_frame(torch.stack(keys), places_and_swaps(task)[1][:count])


def find_frame(keys, swaps):
    """The frame in which keys [N, K], up to signs, are nearest to those of the swaps [N, 2].

    Returns: orthonormal rows [K, K], those of the slots first; the angles that are left, in
    degrees [N].
    """
    slots = int(swaps.max()) + 1
    wanted = swap_key(*swaps.T, slots)  # [N, slots]

    # If the signs are right, keys with a slot in common have the product of the wanted ones.
    common = (wanted @ wanted.T) * (keys @ keys.T)
    signs = torch.linalg.eigh(common).eigenvectors[:, -1].sign()
    for _ in range(100):  # the best frame for these signs, the best signs for this frame, ...
        U, _, V = torch.linalg.svd((signs[:, None] * wanted).T @ keys, full_matrices=False)
        cosines = (wanted @ (U @ V) * keys).sum(1)
        signs = cosines.sign()
    frame = torch.cat([U @ V, torch.linalg.svd(U @ V).Vh[slots:]])
    return frame, cosines.abs().clamp(max=1).acos().rad2deg()


# --- 3. The rounded model -------------------------------------------------------------------------

class RoundedModel(nn.Module):
    """A model with one head, which looks up its keys and values; queries are computed as before.

    State: that of the local block; S, [B, K, K]; the last n + 1 tokens.
    """

    def __init__(self, model, task, head, frame):
        super().__init__()
        self.task = task
        local, block, mlp = copy.deepcopy(model).blocks
        K = len(frame)
        n = len(task.names)
        _, (_, S, _) = read(model, task, [task.start_lines()])

        self.embedding = copy.deepcopy(model.embedding)
        self.local = local
        self.norm = block.norm
        self.query = nn.Linear(block.project.in_features, K)
        self.out_norm = block.out_norm
        self.out = nn.Linear(K, block.project.in_features, bias=False)
        self.mlp = mlp
        self.last_norm = copy.deepcopy(model.norm)
        self.unembedding = copy.deepcopy(model.unembedding)

        head = slice(head * K, (head + 1) * K)
        with torch.no_grad():  # in the new frame, a query q is frame @ q
            self.query.weight.copy_(frame @ block.project.weight[head].double())
            self.query.bias.copy_(frame @ block.project.bias[head].double())
            self.out.weight.copy_(block.out.weight[:, head])
        values = frame[n:2 * n] @ S[0, head.start // K].double()
        self.values = nn.Parameter((values / values.abs().max()).float())

        x, y = F.one_hot(places_and_swaps(task)[1].T, K)
        keys = torch.cat([x - y, F.one_hot(torch.arange(n, 2 * n), K), torch.zeros(1, K)])
        self.register_buffer("keys", keys.float())

    def written(self):
        """The value of each code, on the grid.  Its gradient is that of self.values."""
        rounding = (self.values / GRID).round() * GRID - self.values
        values = self.values + rounding.detach()
        return F.pad(values, (0, 0, len(self.keys) - 1 - len(values), 1))

    def forward(self, tokens):
        return self.stream(tokens)[0]

    def stream(self, tokens, state=None):
        local, S, past = state or (None, None, tokens[:, :0])
        window = torch.cat([past, tokens], 1)
        codes = codes_of(self.task, window)[:, past.shape[1]:]

        x, local = self.local(self.embedding(tokens), local)
        q = unit(self.query(self.norm(x)))
        k = self.keys[codes]
        beta = k.new_ones(codes.shape)  # if |k|^2 = 2, I - k k^T is a reflection
        read, S = delta_rule_chunked(q, k, self.written()[codes], beta, S)
        x, _ = self.mlp(x + self.out(self.out_norm(read)))
        logits = self.unembedding(self.last_norm(x))
        return logits, (local, S, window[:, -len(self.task.names) - 1:])


def train_rest(model, task, seed=0):
    """Train all but the keys. Traces of 8 commands are enough: one command reaches any state."""
    config = Config(curriculum=((8, 1),), final_steps=400, average=False, lr=1e-3, matrix_lr=5e-3,
                    seed=seed)
    return train(model, task, config, lr_scale=decaying)[0]


# --- 4. The certificate ---------------------------------------------------------------------------

PARTS = [nn.Embedding, LocalBlock, nn.RMSNorm, nn.Linear, nn.RMSNorm, nn.Linear, MLP, nn.RMSNorm,
         nn.Linear]


@torch.no_grad()
def certify(model):
    """Prove the theorem for a RoundedModel.  Returns: a dict of numbers.  Raises: Refused.

    Proof. The steps of a line are the same in every text, since a code depends on the tokens from
    the last mark on, and every command and reveal begins with one (a). Nor do chunks (of at most
    1,024 tokens) and pieces matter, since all sums are exact (b): keys are integers with |k|^2 <= 2,
    so each row of S is a value, up to sign, or 0; no entry of (I + L)^-1, which is computed by
    substitution, exceeds 2 (scan.py, section 5); and no sum reaches 2^24 GRID, up to which float32
    is exact. Let S_p be the S that command p alone makes of the first lines. Claim: after any lines
    whose commands multiply to p, in this order, S is S_p. It holds after the first lines (c); then
    command g takes S_p to S_pg (d, all pairs), and any reveal, true or false, keeps S_p (e, all of
    them). The local block sees no token before the reveal (f), so an answer depends on the
    variable and S_p, and is the correct one (g, all of them).

    Assumed: rounding from S to the logits, a number of operations that does not grow with the text,
    moves no difference of two logits by MARGIN between one text and another (measured: 2e-5).
    """
    task = model.task
    N, n = task.group.order, len(task.names)
    keys, values = model.keys, model.written()
    lines = [[task.reveal_lines(x, value) for value in range(n)] for x in range(n)]
    questions = [line.removesuffix(f"{task.values[0]}\n") for line, *_ in lines]

    require(type(model) is RoundedModel and [type(part) for part in model.children()] == PARTS
            and type(task) is ReplTask and task.commands == "full",
            "this is not a rounded model of full commands")                                    # (a)
    require(N <= 1000, f"{N:,} states are too many to test all")
    require({(str(x.device), x.dtype) for x in model.state_dict().values()}
            == {("cpu", torch.float32)}, "the proof is for float32 on a CPU")                  # (b)
    require(not torch.is_autocast_enabled("cpu")
            and torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee"),
            "products are not computed in full precision")                                     # (b)
    require(torch.isin(keys, torch.tensor([-1.0, 0, 1])).all(), "the keys are not integers")   # (b)
    norms = keys.square().sum(1)
    require((norms <= 1 + (values == 0).all(1)).all(), "the keys are too long")                # (b)
    require(torch.equal(values, (values / GRID).round() * GRID) and values.abs().max() <= LARGEST,
            "the values are not on the grid")                                                  # (b)
    require(model.local.conv.kernel_size[0] <= len(task.encode(questions[0])),
            "the local block sees more than the line of a reveal")                             # (f)

    perms = task.group.elements
    _, first = read(model, task, [task.start_lines()])
    first = [x.expand(N, *x.shape[1:]) for x in first]
    _, state = read(model, task, map(task.command_line, perms), first)
    S = state[1]
    require(torch.equal(first[1], S[:1].expand_as(S)),  # the identity is perms[0]
            "the first lines do not make the state of the identity")                           # (c)
    for g in perms:
        _, after = read(model, task, [task.command_line(g)] * N, state)
        require(torch.equal(after[1], S[index(task.group, compose(perms, g))]),
                f"a state is wrong after {task.command_line(g).strip()}")                      # (d)

    margins = []
    for x in range(n):
        for line in lines[x]:
            _, after = read(model, task, [line] * N, state)
            require(torch.equal(after[1], S), f"a reveal of {task.names[x]} changes S")        # (e)
        logits, _ = read(model, task, [questions[x]] * N, state)
        correct = torch.tensor([[task.ids[task.values[p[x]]]] for p in perms])
        others = logits[:, -1].scatter(1, correct, -torch.inf).amax(1)
        margins.append(logits[:, -1].gather(1, correct).squeeze(1) - others)
    margins = torch.cat(margins)
    answers = int((margins > MARGIN).sum())  # NaN is not
    require(answers == len(margins),
            f"only {answers} of {len(margins)} answers are correct by a margin of {MARGIN}")   # (g)
    return {"states": N, "transitions": N * N, "answers": answers, "margin": margins.min().item()}


def require(condition, otherwise):
    if not condition:
        raise Refused(otherwise)


def stored():
    """The stored rounded model: (task, model)."""
    task = ReplTask(Group("S5"))
    model = RoundedModel(LinRNN(len(task.vocab)), task, 0, torch.eye(16).double())
    model.load_state_dict(torch.load(PATH, weights_only=True))
    return task, model.eval()


PATH = RESULTS / "models/exact-S5-seed0.pt"
