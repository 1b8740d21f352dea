"""Can a linear recurrence carry a belief?  Two forms that the paper proposes, and how each ends.

Over Q states a belief is a vector. A command mixes its entries, and a reveal deletes the states
that it excludes. Both are matrices with entries >= 0. Without Bayes' division the belief is linear,
the paper's JOINT representation:

    h_t = A_t h_{t-1}          |h_t|_1 = probability of all that was revealed up to t         (1)

That is exact, and it dies: every reveal that had probability 1/2 halves h, until its numbers are 0.
An n x n matrix of MARGINALS, H_ij = P(variable i holds value j), is smaller than Q = n!:

    coin of g:         H <- ((1 - p) I + p P_g) H               (P_g H)_i = H_g[i]            (2)
    i shows value j:   H <- (I - e_i e_i^T) H (I - e_j e_j^T) + e_i e_j^T                     (3)

If g exchanges two variables, (1 - p) I + p P_g = I - 2p k k^T: a coin flip IS a step of the delta
rule, with beta = 2p. A fair coin is beta = 1, forgetting; every coin p > 1/2 needs beta > 1. Not
so (3): it erases a column as well, which a step from the left cannot do. The rows and columns of H
no longer sum to 1 after (3); the decoder repairs that, outside of the recurrence.

    python -m experiments.underflow
    python -m experiments.underflow --marginals --group S5 --uncertain 0.25

Findings. Where each reveal has probability 1/2, (1) is 0 after 149 reveals in float32, 133 in
bfloat16 and 24 in float16. The rescaled scan (4), which is as linear and as parallel, carries
100,000 steps in float32. It rounds nothing if all numbers are powers of two. With a leak of 0.3
its log-probability, -35,667, is wrong by 0.002.
    Marginals lose something in exact arithmetic, too. Up to the first reveal, and for certain
commands, they are those of the filter. After that their KL from the filter reaches 0.003 nats with
S3 swaps, 0.020 with all commands of S3, and 0.29 with those of S5 (experiments/results/
marginal.jsonl, float64, 128 traces for each of 15 lengths and spacings, commit 2c6698a, where
train.py printed this column).

Conventions: a step multiplies on the left, and time runs from left to right.

Sources: Siems et al. 2026 (arXiv 2602.14814), joint and marginal representation, figures 9 and 10.
The rescaled scan is not in the paper.

Next: heads.py.
"""

import argparse
import json
import math
import shlex
import sys

import numpy as np
import torch
import torch.nn.functional as F

from data import COMMANDS, Group, generator, number, parse_stages, user_errors
from eval import append_record, check_record
from experiments.automata import leak
from experiments.beliefs import CoinTask


# --- Two linear representations -------------------------------------------------------------------

def joint_matrices(automaton, symbols):
    """A = T Z of each symbol, for equation (1): [T] -> [T, Q, Q], float64."""
    return torch.from_numpy(automaton.delta[symbols] * automaton.rho[symbols][..., None, :])


def two_sided_recurrence(left, right, write, state):
    """S_t = L_t S_{t-1} R_t + W_t, every state. L = I - beta k k^T, R = I: the delta rule.

    Shapes: left [..., T, K, K]; right [..., T, V, V]; write [..., T, K, V]; state [..., K, V]
            -> [..., T, K, V]. Equation (1) has V = 1, R = 1, W = 0.
    Source: Siems et al. 2026, their joint and their marginal representation.
    """
    states = []
    for L_KK, R_VV, W_KV in zip(left.unbind(-3), right.unbind(-3), write.unbind(-3)):
        state = L_KK @ state @ R_VV + W_KV
        states.append(state)
    return torch.stack(states, -3)


def marginal_coins(commands, probability):
    """L of (2). Shapes: commands integer [..., n], probability [...] -> [..., n, n]."""
    p = probability[..., None, None]
    stays = torch.eye(commands.shape[-1], dtype=p.dtype)
    return (1 - p) * stays + p * F.one_hot(commands, commands.shape[-1])                       # (2)


def marginal_reveals(asked, answers, n):
    """L, R and W of (3). Shapes: i, j integer [...] -> three times [..., n, n], float64."""
    e_i, e_j = F.one_hot(asked, n).double(), F.one_hot(answers, n).double()
    return (torch.diag_embed(1 - e_i), torch.diag_embed(1 - e_j),
            e_i.unsqueeze(-1) * e_j.unsqueeze(-2))                                             # (3)


def sinkhorn(H_KV, tolerance=1e-9, rounds=1000):
    """Columns, then rows, divided by their sums until all sums are 1: a doubly stochastic matrix.

    A row or column of zeros, which only underflow makes, stays as it is.
    Source: Sinkhorn and Knopp 1967.
    """
    tiny = torch.finfo(H_KV.dtype).tiny
    for _ in range(rounds):
        H_KV = H_KV / H_KV.sum(-2, keepdim=True).clamp_min(tiny)
        H_KV = H_KV / H_KV.sum(-1, keepdim=True).clamp_min(tiny)
        if (H_KV.sum(-2) - 1).abs().max() < tolerance:
            break
    return H_KV


def marginal_predictions(task, program):
    """What (2) and (3), in float64, and Sinkhorn's decoder expect at each reveal of a program.

    Shapes: a Program of a CoinTask -> [B, L/S, n].
    """
    (batch, length, n), count = program.commands.shape, program.asked.shape[1]
    spacing, stays = length // count, torch.eye(n, dtype=torch.float64)
    commands, asked, probability, answers = map(torch.from_numpy, (
        program.commands, program.asked, program.probability, task.program_answers(program)))
    coins = marginal_coins(commands, probability)
    left, right, write = marginal_reveals(asked, answers, n)
    # Time: S commands, then a reveal; a command has R = I and W = 0.
    left = torch.cat([coins.unflatten(1, (count, spacing)), left.unsqueeze(2)], 2)
    right = torch.cat([stays.expand(batch, count, spacing, n, n), right.unsqueeze(2)], 2)
    write = torch.cat([torch.zeros(batch, count, spacing, n, n), write.unsqueeze(2)], 2)
    states = two_sided_recurrence(*(x.flatten(1, 2) for x in (left, right, write)), stays)
    ahead = sinkhorn(states[:, spacing - 1::spacing + 1])
    return ahead.gather(2, asked[..., None, None].expand(-1, -1, 1, n))[:, :, 0].numpy()


def divergence(p, q):
    """KL(p || q) in nats, over the last axis; 0 log 0 = 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p > 0, p * (np.log(p) - np.log(q)), 0.0).sum(-1)


# --- The rescaled scan ----------------------------------------------------------------------------
#
# Is the underflow of (1) the price of linearity? Bayes divides at every step, which is not linear,
# but f(x) = x / |x|_1 commutes with matrices, f(A f(x)) = f(A x): WHEN one divides is free. So let
# a pair (M, s) stand for the matrix M diag(2^s). Pairs compose, and composition is associative,
#
#     first (M_1, s_1), then (M_2, s_2):   (M_2 diag(2^(s_2 - c)) M_1, s_1 + c)                 (4)
#
# with any c for each column. So there is a parallel scan, and c keeps every column near 1. Powers
# of two round nothing. Each column has a scale of its own, since column j is the belief of a reader
# who began in state j. Two beginnings that fit the reveals unequally well drift apart without
# bound. (Inside one belief a state of relative weight below the smallest number is still lost, as
# it is to a filter that divides at every step.)

NEVER = -2**40  # the scale of a column of zeros: this beginning is excluded


def rescale(M_KV, s_K, s_V):
    """diag(2^s_K) M diag(2^s_V) as a pair, the largest entry of each column in [1/2, 1).

    Shapes: M [..., K, V]; s_K, s_V int64 [..., K], [..., V]. Zeros have no scale of their own.
    """
    mantissa_KV, exponent_KV = torch.frexp(M_KV)
    exponent_KV = torch.where(mantissa_KV != 0, exponent_KV + s_K.unsqueeze(-1), NEVER)
    c_V = exponent_KV.amax(-2)
    below_KV = (exponent_KV - c_V.unsqueeze(-2)).clamp_min(-2000)  # ldexp reads 32 bits only
    return torch.ldexp(mantissa_KV.expand_as(below_KV), below_KV), s_V + c_V


def compose(first, then):
    """The pair that acts as `first`, then as `then`: equation (4)."""
    (M1_KV, s1_V), (M2_KK, s2_K) = first, then
    M1_KV, s_V = rescale(M1_KV, s2_K, s1_V)
    return rescale(M2_KK @ M1_KV, torch.zeros_like(s2_K), s_V)                                 # (4)


def rescaled_scan(A_TKK, h_K):
    """Equation (1) at every t at once, in any number format, for any length.

    After round r every pair spans 2^r tokens: ceil(log2 T) rounds make all products from the start.
    Shapes: A [..., T, K, K] with entries >= 0, h [..., K]
            -> f(h_t) [..., T, K], and the log of |h_t|_1 [..., T], float64;
            nan and -inf from an impossible reveal on.
    Cost: O(T K^3 log T), log2 T sequential rounds.  Source: Hillis and Steele 1986.
    """
    T = A_TKK.shape[-3]
    zeros_TK = A_TKK.new_zeros(A_TKK.shape[:-1], dtype=torch.int64)
    M_TKK, s_TK = rescale(A_TKK, zeros_TK, zeros_TK)
    span = 1
    while span < T:
        joined = compose((M_TKK[..., :-span, :, :], s_TK[..., :-span, :]),
                         (M_TKK[..., span:, :, :], s_TK[..., span:, :]))
        M_TKK = torch.cat([M_TKK[..., :span, :, :], joined[0]], -3)
        s_TK = torch.cat([s_TK[..., :span, :], joined[1]], -2)
        span *= 2
    h_K1 = h_K.unsqueeze(-1).unsqueeze(-3)
    h_TK1, s_T1 = compose((h_K1, s_TK.new_zeros(1)), (M_TKK, s_TK))
    norm_T1 = h_TK1.sum(-2)
    log_norm_T1 = norm_T1.double().log() + s_T1.double() * math.log(2)
    return (h_TK1 / norm_T1.unsqueeze(-2)).squeeze(-1), log_norm_T1.squeeze(-1)


# What this says about the paper's conclusion. That (1) underflows is a limit of number formats: (4)
# is as linear and as parallel, and does not underflow. That (2) and (3) are not the filter is a
# limit of n^2 numbers, in exact arithmetic too: marginals do not determine the belief. What a state
# of fixed size LEARNS is neither of the two: adversary.py and cycle.py measure that.


# --- The paper's two examples, and the command line -----------------------------------------------

LONG = 100_000  # steps of the rescaled scan in the demonstration


def joint_example(steps, dtype, p=0.5):
    """Equation (1) on the paper's figure 9: h_t [steps, 3]. Its true belief never changes."""
    automaton = leak(p)
    A = joint_matrices(automaton, np.zeros(steps, int)).to(dtype)
    one = torch.ones(steps, 1, 1, dtype=dtype)
    start = torch.from_numpy(automaton.start).to(dtype).unsqueeze(-1)
    return two_sided_recurrence(A, one, 0 * A[:, :, :1], start).squeeze(-1)


def marginal_example(cycles, dtype):
    """(2) and (3) on the paper's figure 10: H after each cycle [cycles, 3, 3].

    A cycle exchanges the variables 2 and 3 with probability 1/2. Then 2 shows its old value. So
    H_33 halves, while the true belief is the same after each cycle.
    """
    coin = marginal_coins(torch.tensor([0, 2, 1]), torch.tensor(0.5).double())
    left, right, write = marginal_reveals(torch.tensor(1), torch.tensor(1), 3)
    steps = [x.to(dtype).expand(cycles, 3, 3) for x in (left @ coin, right, write)]
    return two_sided_recurrence(*steps, torch.eye(3, dtype=dtype))


def demonstrate():
    print("The number that each reveal halves, and the reveal after which it is 0\n"
          "format       smallest   figure 9, joint   figure 10, marginals")
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        numbers = torch.finfo(dtype)
        exponent = round(math.log2(numbers.smallest_normal) + math.log2(numbers.eps))
        joint = joint_example(3 - exponent, dtype)[:, 1]
        marginal = marginal_example(3 - exponent, dtype)[:, 2, 2]
        ends = [int((x == 0).nonzero()[0]) + 1 for x in (joint, marginal)]
        print(f"{str(dtype)[6:]:<12} 2^{exponent:<8} {ends[0]:<17} {ends[1]}")
    print(f"\nThe rescaled scan, float32, {LONG:,} steps of figure 9 with a leak of p")
    for p in (0.5, 0.3):
        automaton = leak(p)
        A = joint_matrices(automaton, np.zeros(1, int)).float().expand(LONG, 3, 3)
        belief, evidence = rescaled_scan(A, torch.from_numpy(automaton.start).float())
        truth = automaton.filter(np.zeros((1, 2), int))[0][0, 1].tolist()  # ahead of every reveal
        print(f"p = {p}: log |h| {evidence[-1]:.3f}, exactly {(LONG - 1) * math.log(1 - p):.3f}; "
              f"belief {[round(x, 6) for x in belief[-1].tolist()]}, exactly {truth}")


def measure_marginals(task, lengths, traces, seed):
    """KL from the exact filter to the marginals, on the traces on which eval.py tests a model."""
    results = []
    for length, spacing in lengths:
        program = task.draw(traces, length, spacing, generator(seed, "test", length, spacing))
        kl = divergence(task.best_predictions(program), marginal_predictions(task, program))
        results.append({"length": length, "spacing": spacing, "traces": traces,
                        "kl_marginal": float(kl.mean()),
                        "kl_marginal_by_position": kl.mean(0).tolist()})
        print(f"{f'({length},{spacing})':>10}  KL of marginals {kl.mean():.6f}")
    return results


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.underflow",
                                     description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--marginals", action="store_true", help="what marginals lose on the traces of beliefs.py; "
        "the options below belong to it")
    add("--group", default="S3")
    add("--commands", default="full", choices=COMMANDS)
    add("--uncertain", type=float, default=0.25, metavar="P", help="share of uncertain commands")
    add("--lengths", default="16:4,64:4", help="LENGTH:SPACING,...")
    add("--traces", type=number(1, 10**5), default=128, help="fresh traces for each length")
    add("--seed", type=number(0), default=0, help="of the traces")
    add("--record", metavar="FILE", help="append the numbers as one JSON line")
    add("--json", action="store_true", help="print the numbers as one JSON line at the end")
    argv = sys.argv[1:] if argv is None else argv
    with user_errors(parser, argv) as args:
        if argv and not args.marginals:
            raise ValueError("these options need --marginals")
        task = CoinTask(Group(args.group), args.commands, args.uncertain)
        lengths = parse_stages(args.lengths, task, args.traces)
        if args.record:
            check_record(args.record)
    if not argv:
        return demonstrate()
    numbers = {"seed": args.seed, "group": args.group, "commands": args.commands,
               "uncertain": args.uncertain,
               "results": measure_marginals(task, lengths, args.traces, args.seed)}
    if args.json:
        print(json.dumps(numbers))
    if args.record:
        with user_errors(parser, argv):
            append_record(args.record, f"{parser.prog} {shlex.join(argv)}", numbers)


if __name__ == "__main__":
    main()
