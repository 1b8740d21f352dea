"""Which transitions hold which group?  A ladder from diagonal matrices to dense ones.

    python -m experiments.ladder run --group S3 --seed 0     # eight mixers on words of one group
    python -m experiments.ladder count RUN                   # does a diagonal layer count?

Finding (experiments/results/ladder.jsonl, three seeds; labels right at 64 and at 256 tokens, after
training to 64, at most 1.5 million tokens; chance is 50% for S2, 17% for S3 and 2% for A5):
                         S2                     S3                     A5
    diagonal, 0 to 1     66 - 67   54 - 55      27 - 28   19 - 20      5 - 6     3
    diagonal, -1 to 1    100       100          92 - 95   74 - 75      5 - 6     2 - 3
    1 reflection         100       100          76 - 98   40 - 77      5         2 - 3
    2 reflections        100       96 - 100     100       100          5 - 8     2 - 3
    4 reflections        100       88 - 100     100       100          100       100
    dense                96 - 100  69 - 96      97 - 100  34 - 87      54 - 73   19 - 29
    lstm                 100       100          99 - 100  89 - 98      4 - 5     2 - 3
    transformer          82 - 84   58 - 59      32 - 35   20 - 21      5         2
Eigenvalues in [0, 1] lose parity, and -1 holds it. Diagonal matrices commute, and yet one layer of
them reads most words of S3. It counts: h <- a h + b is more than the matrix a. With a = -1 for odd
words and 1 for even ones these maps are the symmetries of the number line (two of them do not
commute), and S3 is what remains of h modulo 3. The count wanders off, as a random walk does. Beyond
64 tokens 100% of the labels are right where the count is small, in half of all places, and 29 to
51% where it is large (`count`, ladder_count.jsonl). So the layer holds S3 for a while only.
    A5 is not solvable, and only four reflections a token learn it with these tokens. Two would do:
A5 is the rotations of an icosahedron, and a rotation is two reflections. They stand at words of
four tokens, as all other rungs but the dense one.

Sources: Grazzi et al. 2025 (arXiv 2411.12537), theorem 1 (parity needs a negative eigenvalue);
Merrill et al. 2024 (arXiv 2404.08819), theorem 4.2 (diagonal transitions and non-solvable groups).
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import train
from data import generator, number, user_errors
from eval import append_record, check_record, evaluate_and_print, load_run
from experiments.arms import RATES, folder_of, learn, summary
from experiments.pairs import run_part
from models import MODELS, LanguageModel

RESULTS = Path(__file__).parent / "results"
LADDER = {  # transitions of ever more freedom, then two mixers of another kind
    "diagonal, 0 to 1": "--model diagonal --smallest 0",
    "diagonal, -1 to 1": "--model diagonal --smallest -1",
    "1 reflection": "--model linrnn --householders 1",
    "2 reflections": "--model linrnn --householders 2",
    "4 reflections": "--model linrnn --householders 4",
    "dense": "--model dense", "lstm": "--model lstm", "transformer": "--model transformer"}


# --- Diagonal and dense transitions ---------------------------------------------------------------

def diagonal_scan(a, b, state):
    """h_t = a_t h_{t-1} + b_t for every t at once, element by element.

    A pair (a, b) is the map h -> a h + b. First (a_1, b_1), then (a_2, b_2) is the pair
    (a_2 a_1, a_2 b_1 + b_2). After round r each pair spans 2^r tokens.
    Shapes: a, b [B, T, D]; state [B, D] -> [B, T, D].  Source: Hillis and Steele 1986.
    """
    span = 1
    while span < a.shape[1]:
        b = torch.cat([b[:, :span], b[:, span:] + a[:, span:] * b[:, :-span]], 1)
        a = torch.cat([a[:, :span], a[:, span:] * a[:, :-span]], 1)
        span *= 2
    return b + a * state.unsqueeze(1)


class DiagonalBlock(nn.Module):
    """h <- a h + b, a = smallest + (1 - smallest) hardsigmoid(.), then x + W (norm(h) gelu(gate)).

    State: h, [B, D].
    """

    def __init__(self, d_model, smallest):
        super().__init__()
        self.smallest = smallest
        self.norm = nn.RMSNorm(d_model)
        self.project = nn.Linear(d_model, 3 * d_model)
        self.out_norm = nn.RMSNorm(d_model)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def coefficients(self, x):
        """a, b and the gate of each token."""
        a, b, gate = self.project(self.norm(x)).chunk(3, -1)
        return self.smallest + (1 - self.smallest) * F.hardsigmoid(a), b, gate

    def forward(self, x, state=None):
        a, b, gate = self.coefficients(x)
        state = torch.zeros_like(x[:, 0]) if state is None else state
        h = diagonal_scan(a, b, state)
        return x + self.out(self.out_norm(h) * F.gelu(gate)), h[:, -1]


class DiagonalRNN(LanguageModel):
    """Diagonal transitions as mixer. smallest: the least eigenvalue, -1 or 0."""

    def __init__(self, vocab_size, d_model=64, layers=1, smallest=-1.0, conv_width=8):
        if not -1 <= smallest < 1:
            raise ValueError(f"smallest must lie in [-1, 1); got {smallest}")
        super().__init__(vocab_size, d_model, layers, conv_width,
                         lambda: DiagonalBlock(d_model, smallest))


class DenseBlock(nn.Module):
    """h <- A h with A = exp(W - W^T), any rotation of K dimensions; then x + W' norm(h).

    W is a linear function of the token. A permutation of n points is a rotation of n + 1
    dimensions, since a further sign can make its determinant 1.  State: h, [B, K].
    """

    def __init__(self, d_model, width):
        super().__init__()
        self.norm = nn.RMSNorm(d_model)
        self.project = nn.Linear(d_model, width * width)
        self.start = nn.Parameter(torch.randn(width))
        self.out = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, d_model, bias=False))

    def forward(self, x, state=None):
        skew = self.project(self.norm(x)).unflatten(-1, (len(self.start), -1))
        steps = torch.linalg.matrix_exp(skew - skew.mT)
        h, states = self.start.expand(len(x), -1) if state is None else state, []
        for step in steps.unbind(1):
            h = (step @ h.unsqueeze(-1)).squeeze(-1)
            states.append(h)
        return x + self.out(torch.stack(states, 1)), h


class DenseRNN(LanguageModel):
    """Dense transitions as mixer. width: of the state, K."""

    def __init__(self, vocab_size, d_model=64, layers=1, width=8, conv_width=8):
        super().__init__(vocab_size, d_model, layers, conv_width,
                         lambda: DenseBlock(d_model, width))


MODELS |= {"diagonal": DiagonalRNN, "dense": DenseRNN}


# --- The ladder -----------------------------------------------------------------------------------

def make_parser():
    parser = train.make_parser()
    parser.add_argument("--smallest", type=number(-1, 1, float), help="diagonal: least eigenvalue")
    parser.set_defaults(chapter="experiments.ladder")
    return parser


def run(argv):
    """Words of one group, on every rung. The stages double in length, from 2 to 64."""
    parser = argparse.ArgumentParser(prog="python -m experiments.ladder run")
    parser.add_argument("--group", default="S3")
    parser.add_argument("--seed", type=number(0), default=0)
    parser.add_argument("--millions", type=number(1e-3, 1e6, float), default=1.5,
                        help="cap of tokens, in millions")
    parser.add_argument("--record", metavar="FILE", default=RESULTS / "ladder.jsonl")
    with user_errors(parser, argv) as args:
        train.config_of(make_parser().parse_args(["--format", "word", "--group", args.group]))
        check_record(args.record)
    for name, model in LADDER.items():
        rates = RATES.get(name, RATES["linrnn"])
        options = [*model.split(), *rates.split(), "--format", "word", "--group", args.group,
                   "--batch", "64", "--curriculum", "2:1,4:1,8:1,16:1,32:1,64:1",
                   "--max-steps", "1000000", "--seed", str(args.seed)]
        made, curve = learn(options, folder_of(options), args.millions, make_parser())
        results = evaluate_and_print(made.result.eval(), made.task, [(64, 1), (256, 1)], 256)
        append_record(args.record, f"{parser.prog} {shlex.join(argv)}",
                      {"arm": name, "group": args.group, **summary(made, curve),
                       "results": results})


# --- Does a diagonal layer count? -----------------------------------------------------------------

@torch.no_grad()
def counters(model, task, inputs):
    """h of those elements that an odd permutation negates and an even one keeps: [B, T, elements].

    Negated means a mean of a below -0.9 over all odd words, kept a mean above 0.9 over all even
    ones.  Raises: ValueError if there is no such element.
    """
    tokens = torch.from_numpy(inputs)
    x, _ = model.blocks[0](model.embedding(tokens))
    block = model.blocks[1]
    a, b, _ = block.coefficients(x)
    signs = np.linalg.det(np.eye(task.group.degree)[task.group.elements])
    odd = torch.from_numpy(signs < 0)[tokens]
    counts = (a[odd].mean(0) < -0.9) & (a[~odd].mean(0) > 0.9)
    if not counts.any():
        raise ValueError("no element of h is negated by odd permutations and kept by even ones")
    return diagonal_scan(a, b, torch.zeros_like(x[:, 0]))[..., counts]


def count(argv):
    """Labels right against the size of the counter, in four equal parts, beyond 64 tokens."""
    parser = argparse.ArgumentParser(prog="python -m experiments.ladder count")
    parser.add_argument("run")
    parser.add_argument("--record", metavar="FILE", default=RESULTS / "ladder_count.jsonl")
    with user_errors(parser, argv) as args:
        checkpoint, task, model = load_run(args.run)
        if checkpoint["config"]["model"] != "diagonal":
            raise ValueError(f"{args.run} has no diagonal layer")
        batch = task.test_batch(256, 256, 1, generator(0, "test", 256, 1))
        check_record(args.record)
        h = counters(model, task, batch.inputs)
    with torch.no_grad():
        right = model(torch.from_numpy(batch.inputs)).argmax(-1) == torch.from_numpy(batch.targets)
    size = h.abs().mean(-1)
    order = size[:, 64:].flatten().argsort()
    shares = [right[:, 64:].flatten()[part].float().mean().item() for part in order.chunk(4)]
    numbers = {"seed": checkpoint["config"]["seed"], "elements": h.shape[-1],
               "size": {T: round(size[:, T - 1].mean().item(), 2) for T in (16, 32, 64, 128, 256)},
               "right_by_size": shares}
    print(json.dumps(numbers))
    append_record(args.record, f"{parser.prog} {shlex.join(argv)}", numbers)


def main(argv=None):
    run_part("experiments.ladder", {"run": run, "count": count}, argv)


if __name__ == "__main__":
    main()
