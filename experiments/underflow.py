"""What happens to a belief that is never normalised?  It underflows, unless its scale is restored.

At each reveal Bayes' rule (beliefs.py) divides by the probability of what is shown, which a linear
recurrence cannot do. Without the division the belief is linear, and exact until it underflows,
after 149 halvings in float32. The paper's n x n *marginals*, P(variable i has value j), are a
smaller representation. They underflow if all reveals show one variable, and are stable if the
variables are revealed in turn.

So far we agree with the paper. It adds that rescaling breaks the linearity of the recurrence, and
that a stable belief "appears infeasible" without it. But linearity is wanted for a parallel scan,
and a scan of pairs (matrix, log-scale) rescales and is just as parallel. It survives 100,000 steps,
at K times the work of the recurrence or more, for K states.

    python -m experiments.underflow        5 seconds; trains nothing

Source: Siems et al. 2026 (arXiv 2602.14814), section 5.3, figures 9 and 10, and appendix B.1. The
rescaled scan is ours.
Next: adversary.py.
"""

import numpy as np
import torch

from data import Group, run_cli
from experiments import chapter, table
from experiments.groups import index

# --- 1. Two linear representations ----------------------------------------------------------------
#
# Without Bayes' division the belief is linear in the one before it, the paper's JOINT
# representation:
#
#     h_t = A_t h_{t-1},   A = T Z        |h_t|_1 = probability of all that was revealed        (1)
#
# It is exact, but every reveal that had probability 1/2 halves h, until its numbers are 0. The
# vector h has Q = n! numbers. An n x n matrix of MARGINALS, H_ij = P(variable i has value j), has
# fewer:
#
#     coin of g:         H <- ((1 - p) I + p P_g) H               (P_g H)_i = H_g[i]            (2)
#     i shows value j:   H <- (I - e_i e_i^T) H (I - e_j e_j^T) + e_i e_j^T                     (3)
#
# If g swaps two variables, (1 - p) I + p P_g = I - 2p k k^T: a coin IS a step of the delta rule,
# with beta = 2p. (3) is not: it also erases a column, which a step from the left cannot do.
#
# A partial reveal cannot write its lost mass back into h: which entries survive depends on h, and a
# write depends on the token alone (section 5.2.1). Two other writes can. A FULL REVEAL says the
# whole state c, h <- 0 h + c; if such reveals come often enough, (1) is stable. The GATED RESET of
# appendix B.1 writes a uniform belief, and so forgets.

# A = T Z in figure 9, of its only symbol: it reveals that the state is 2 or 3, and then the state
# leaks to 1 with probability 1/2.
LEAK = torch.tensor([[0, 0.5, 0.5],
                     [0, 0.5, 0],
                     [0, 0, 0.5]])


def cycle(H, i):
    """Figure 10: a coin of 1/2 may swap the variables 2 and 3, and then one of them, number i from
    0, shows its old value.  H [3, 3] -> [3, 3]."""
    H = (H + H[[0, 2, 1]]) / 2                                                                 # (2)
    H[i] = 0                                                                                   # (3)
    H[:, i] = 0
    H[i, i] = 1
    return H


def halvings(dtype):
    """After how many reveals h (figure 9) and H (figure 10) are 0 where they should not be.

    In both figures a number is halved at each reveal, while the true belief stays the same.
    """
    h = torch.tensor([0, 0.5, 0.5], dtype=dtype)
    joint = 0
    while h[1] > 0:
        h = LEAK.to(dtype) @ h                                                                 # (1)
        joint += 1

    H = torch.eye(3, dtype=dtype)
    marginals = 0
    while H[2, 2] > 0:
        H = cycle(H, 1)
        marginals += 1
    return joint, marginals


def joint_example():
    """The joint example of appendix B.1: a name, and h over the elements of S3, after each step.

    The matrix printed there swaps values, not positions as its text; from 123 both end alike.
    """
    group = Group("S3")
    identity = torch.eye(6)
    places = [index(group, group.elements[:, swap]) for swap in ([1, 0, 2], [2, 1, 0])]
    A = sum(identity[place] for place in places) / 2  # each swap is its own inverse
    Z = torch.diag(torch.from_numpy(group.elements[:, 0] == 2).float())
    h = identity[0]
    return [("the start", h), ("the swap", A @ h), ("the reveal", Z @ A @ h)]


# --- 2. The rescaled scan -------------------------------------------------------------------------
#
# Is the underflow of (1) the price of linearity? Dividing is not linear, but f(x) = x / |x|_1
# commutes with matrices, f(A f(x)) = f(A x), so it does not matter WHEN one divides. Let a pair
# (M, s) represent the matrix M diag(e^s), where the columns of M sum to 1. Pairs compose, and
# composition is associative, so there is a parallel scan:
#
#     first (M_1, s_1), then (M_2, s_2):   (M_2 W, s_1 + c),   W diag(e^c) = diag(e^s_2) M_1    (4)
#
# Column j of M is the belief of a reader who started in state j, and s_j the log-probability of
# all reveals that this reader saw. Readers with different starts drift apart without bound.

def rescaled_scan(A_TKK, h_K):
    """Equation (1) at every t at once, in any number format, for any length.

    After round r every pair spans 2^r tokens (Hillis and Steele 1986). The recurrence multiplies a
    vector by a matrix for each token; this multiplies two matrices, up to log2 T times.
    Shapes: A [T, K, K] with entries >= 0, h [K] -> f(h_t) [T, K], and log |h_t|_1 [T], float64
    """
    M_TKK, s_TK = pair(A_TKK, torch.zeros_like(h_K))
    span = 1
    while span < len(M_TKK):
        # The first `span` pairs already reach back to the start.
        joined_M, joined_s = join((M_TKK[:-span], s_TK[:-span]), (M_TKK[span:], s_TK[span:]))
        M_TKK = torch.cat([M_TKK[:span], joined_M])
        s_TK = torch.cat([s_TK[:span], joined_s])
        span *= 2

    start = pair(h_K.unsqueeze(-1), torch.zeros_like(h_K))  # a matrix with one column
    h_TK1, log_T1 = join(start, (M_TKK, s_TK))
    return h_TK1.squeeze(-1), log_T1.squeeze(-1)


def join(first, then):
    """The pair that acts as `first`, then as `then`: equation (4)."""
    (M1_KV, s1_V), (M2_KK, s2_K) = first, then
    W_KV, c_V = pair(M1_KV, s2_K)
    return M2_KK @ W_KV, s1_V + c_V                                                            # (4)


def pair(M_KV, s_K):
    """diag(e^s_K) M as a pair.  Shapes: M [..., K, V], s [..., K] -> [..., K, V], [..., V]."""
    log_KV = M_KV.double().log() + s_K.unsqueeze(-1)
    c_V = log_KV.logsumexp(-2).clamp_min(-1e30)  # a column of zeros stays zero
    return (log_KV - c_V.unsqueeze(-2)).exp().to(M_KV.dtype), c_V


# --- 3. The tables --------------------------------------------------------------------------------

def show():
    """How the linear representations end, and that the rescaled one does not."""
    heads = ["format", "figure 9, joint", "figure 10, marginals"]
    rows = [dict(zip(heads, [str(dtype).removeprefix("torch."), *halvings(dtype)]))
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
    table("The reveal after which a number that each reveal halves is 0", rows, heads, {})

    names = ["123", "132", "213", "231", "312", "321"]
    rows = [{"after": step} | dict(zip(names, h.tolist())) for step, h in joint_example()]
    table("Appendix B.1, h: swap 1 with 2, or 1 with 3, with 1/2 each; then position 1 shows 3",
          rows, ["after", *names], {})

    H = torch.eye(3, dtype=torch.float16)
    least = min((H := cycle(H, 1 + t % 2)).diagonal().min().item() for t in range(10_000))
    print("\nFigure 10 in float16, with 2 and 3 revealed in turn: in 10,000 reveals no true value\n"
          f"falls below {least}, since each reveal restores the row that the last one halved")

    steps = 100_000  # (1) has long been 0
    beliefs, log_norm = rescaled_scan(LEAK.expand(steps, 3, 3), torch.tensor([0, 0.5, 0.5]))
    exact = (steps - 1) * np.log(0.5)  # the first reveal is certain
    print(f"\nThe rescaled scan, float32, {steps:,} steps of figure 9\n\n"
          f"log |h| {log_norm[-1]:.3f}, exactly {exact:.3f}\n"
          f"belief {beliefs[-1].tolist()}, exactly [0.5, 0.25, 0.25]")


def main(argv=None):
    chapter(__doc__, show, argv=argv)


if __name__ == "__main__":
    run_cli(main)
