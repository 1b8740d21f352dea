"""How does a *linear* recurrence execute a program, and how is it computed in parallel?

Conventions, the same in every file
    The state S is K x V: one row per key direction, one column per value direction.
    A step multiplies S on the LEFT; a read is S^T q. Time runs left to right, so the product of the
    steps 1..t is A_t ... A_2 A_1, the later factor on the left ("first g, then h").

Symbols (capital letters are sizes; the last axes of a tensor are in its name,
leading axes are free)
    B  batch     K  key width       C  positions in one chunk
    T  tokens    V  value width     N  chunks, ceil(T / C)
    H  heads     R  writes per token
    q_TK, k_TK, v_TV   query, key, value         beta_T   strength, in [0, 2] for unit keys
    d_TV               correction: what a step really writes (equation 2)

    name here        Yang et al. 2024    Schlag et al. 2021
    S (K x V)        S^T (they: V x K)   W^T
    beta             beta                beta
    D = U - W S_0    U - W S^T           -

Sources
    [1] Schlag, Irie, Schmidhuber 2021, arXiv 2102.11174: the delta rule as a linear-attention
        layer.
    [2] Yang, Wang, Zhang, Shen, Kim 2024, arXiv 2406.06484: chunks, and the WY form of the product.
    [3] Grazzi, Siems, Zela, Franke, Hutter, Pontil 2025, arXiv 2411.12537: beta up to 2,
        eigenvalue -1.
    [4] Siems, Carstensen, Zela, Hutter, Pontil, Grazzi 2025, arXiv 2502.10297: R writes per token.

Does NOT include: decay gates, kernels for a particular device, hidden scales or normalisations.
What is passed in is what is used.

Next: models.py, where q, k, v and beta are computed from tokens.
"""

import argparse
import functools
import itertools
import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.profiler import profile

# --------------------------------------------------------------------------------------------------
# 1. A toy: the swap machine
# --------------------------------------------------------------------------------------------------
#
# Let the rows of S be memory slots. One step of the delta rule with |k| = 1 and nothing to write,
#
#     S <- (I - beta k k^T) S,
#
# has eigenvalue 1 - beta along k and 1 on everything orthogonal to it. So beta = 0 does nothing,
# beta = 1 erases the direction k, and beta = 2 REFLECTS: it turns k into -k. Now take
# k = (e_i - e_j) / sqrt 2. The reflection sends e_i - e_j to its negative and keeps e_i + e_j: it
# EXCHANGES the slots i and j. With beta <= 1 every eigenvalue lies in [0, 1]; no exchange
# exists [3].
#
# A permutation is a product of exchanges, but a program spells it token by token, and there is no
# time to find its cycles. With a spare slot x' for each variable x no search is needed:
#
#     a, b, c = c, a, b        at each left-hand name x:             exchange x   and x'
#                              at the i-th right-hand name y:        exchange x_i and y'
#
# The left-hand names move all values out of the way; each right-hand name fetches one back. Every
# key depends on the token and its place in the line only: a linear recurrence can do it, exactly,
# for ever.


def exchange_key(i, j, slots):
    """The unit key whose reflection (beta = 2) exchanges slots i and j: (e_i - e_j) / sqrt 2.

    Shapes: i, j integer [...] -> [..., slots], float64.
    """
    return (F.one_hot(i, slots) - F.one_hot(j, slots)).double() / 2**0.5


def swap_machine_keys(commands):
    """The 2n reflections that execute `x_0, x_1, ... = x_g[0], x_g[1], ...`, with slots 0..n-1 for
    the variables and n..2n-1 for their spares.

    Shapes: commands integer [..., L, n] -> keys [..., L 2n, 2n], float64, to be used with beta = 2.
    Source: the construction is this project's; that reflections suffice is [3], theorem 3.
    """
    *lead, length, n = commands.shape
    place = torch.arange(n).expand_as(commands)
    left_hand = exchange_key(place, place + n, 2 * n)
    right_hand = exchange_key(place, commands + n, 2 * n)
    return torch.cat([left_hand, right_hand], -2).reshape(*lead, length * 2 * n, 2 * n)


# --------------------------------------------------------------------------------------------------
# 2. The definition, a loop over time
# --------------------------------------------------------------------------------------------------
#
#     S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T          o_t = S_t^T q_t          (1)
#
# Read it as a memory that corrects itself: look up what is stored under k_t, and move it a fraction
# beta_t of the way to v_t. With the correction d_t = beta_t (v_t - S_{t-1}^T k_t) it is a rank-1
# write:
#
#     S_t = S_{t-1} + k_t d_t^T                                                                 (2)


def delta_rule_recurrent(q, k, v, beta, state=None):
    """The delta rule, one token after the other: equations (1) and (2).

    Shapes: q, k [..., T, K]; v [..., T, V]; beta [..., T]; state [..., K, V] or None (zeros)
            -> out [..., T, V], state [..., K, V]. The read at t sees the write at t.
    Raises: ValueError if the shapes do not fit together.
    Cost: O(T K V), T sequential steps.  Source: [1] equations 23-25; [2] equation 2.
    """
    state_KV = check_inputs(q, k, v, beta, state)
    out = []
    # unbind, not q[..., t, :]: the backward of an index writes a full-size gradient at every step
    for q_K, k_K, v_V, b in zip(q.unbind(-2), k.unbind(-2), v.unbind(-2), beta.unbind(-1)):
        stored_V = (k_K.unsqueeze(-2) @ state_KV).squeeze(-2)
        d_V = b.unsqueeze(-1) * (v_V - stored_V)
        state_KV = state_KV + k_K.unsqueeze(-1) * d_V.unsqueeze(-2)                            # (2)
        out.append((q_K.unsqueeze(-2) @ state_KV).squeeze(-2))                                 # (1)
    return torch.stack(out, -2), state_KV


def check_inputs(q, k, v, beta, state):
    """The initial state, after refusing shapes that do not fit together."""
    *lead, T, K = k.shape
    V = v.shape[-1]
    if T < 1:
        raise ValueError(f"k must have at least one token (T >= 1); got shape {tuple(k.shape)}")
    if q.shape != k.shape:
        raise ValueError(f"q must have the shape of k [..., T={T}, K={K}]; got {tuple(q.shape)} "
                         f"against {tuple(k.shape)}")
    if tuple(v.shape[:-1]) != (*lead, T):
        raise ValueError(f"v must be [..., T={T}, V] with the leading axes of k, {tuple(lead)}; "
                         f"got shape {tuple(v.shape)}")
    if tuple(beta.shape) != (*lead, T):
        raise ValueError(f"beta must have the token axis of k (T={T}) last and its leading axes "
                         f"{tuple(lead)}; got shape {tuple(beta.shape)}")
    if state is None:
        return k.new_zeros(*lead, K, V)
    if tuple(state.shape) != (*lead, K, V):
        raise ValueError(f"state must be [..., K={K}, V={V}] with the leading axes of k, "
                         f"{tuple(lead)}; got shape {tuple(state.shape)}")
    return state


# --------------------------------------------------------------------------------------------------
# 3. One chunk is one triangular system
# --------------------------------------------------------------------------------------------------
#
# The loop is T tiny steps. Unroll (2) inside one chunk of C tokens,
# S_{i-1} = S_0 + sum_{j<i} k_j d_j^T, and put that into the correction:
#
#     d_i + sum_{j<i} beta_i (k_i . k_j) d_j = beta_i (v_i - S_0^T k_i)                         (3)
#
# That is one unit lower-triangular system for all C corrections at once, rows d_i^T:
#
#     (I + L) D = beta (V - K S_0)          L = tril(beta K K^T, -1)                            (4)
#
# The matrix does not contain the state. So solve BEFORE the state is known, for two right-hand
# sides,
#
#     (I + L) U = beta V          (I + L) W = beta K                                            (5)
#     D = U - W S_0                                                                             (6)
#
# and then every output of the chunk and its last state are matrix products:
#
#     O = Q S_0 + tril(Q K^T) D                                                                 (7)
#     S_C = S_0 + K^T D = (I - K^T W) S_0 + K^T U                                               (8)
#
# In (8) I - K^T W is the product of the C factors I - beta k k^T, the later factor on the left: the
# "WY form" of a product of reflections (Bischof and Van Loan 1987), found by [2]
# for the delta rule.


TOKENS_AT_ONCE = 2**15  # of all sequences: the matrices of a longer piece leave a CPU's cache


def delta_rule_chunked(q, k, v, beta, state=None, chunk_size=32):
    """The delta rule, chunk by chunk: the outputs and the state of delta_rule_recurrent.

    Shapes: q, k [..., T, K]; v [..., T, V]; beta [..., T]; state [..., K, V] or None (zeros)
            -> out [..., T, V], state [..., K, V]. Any T >= 1; the last chunk may be short.
    Raises: ValueError if the shapes do not fit together, or chunk_size < 1; RuntimeError if the
            gradient is to be differentiated again.
    Cost: O(T (C K + C V + K V)) in matrix products, T / C sequential steps.  Source: [2] section 3.
    """
    state_KV = check_inputs(q, k, v, beta, state)
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 token; got {chunk_size}")
    *lead, T, K = k.shape
    C = min(chunk_size, T)
    piece = max(1, TOKENS_AT_ONCE // max(1, math.prod(lead) * C)) * C
    out = []
    for inputs in zip(*[x.split(piece, -2) for x in (q, k, v, beta.unsqueeze(-1))]):
        chunks = [in_chunks(x, C) for x in inputs]
        out_NCV, state_KV = ChunkedDeltaRule.apply(*chunks, state_KV)
        out.append(out_NCV.flatten(-3, -2))
    return torch.cat(out, -2)[..., :T, :], state_KV


def in_chunks(x, C):
    """[..., T, X] -> [..., N, C, X], the last chunk filled up with zeros.

    A token with k = 0 and beta = 0 writes nothing: the filling leaves the state as it is.
    """
    missing = -x.shape[-2] % C
    x = F.pad(x, (0, 0, 0, missing)) if missing else x
    return x.unflatten(-2, (-1, C)).contiguous()


def solve_unit_triangle(L_NCC, rhs):
    """(I + L)^-1 rhs. The solver reads only what is strictly below the diagonal of L."""
    return torch.linalg.solve_triangular(L_NCC, rhs, upper=False, unitriangular=True)


def chunked_forward(q_NCK, k_NCK, v_NCV, beta_NC1, state_KV, solve=solve_unit_triangle):
    """Equations (4) to (8): all chunks at once, but for the state. Autograd can differentiate it.

    Returns out [..., N, C, V] and the last state; then, for the backward by hand, the states at the
    chunk starts [..., N, K, V], D [..., N, C, V] and W [..., N, C, K].
    """
    beta_k_NCK = beta_NC1 * k_NCK
    L_NCC = beta_k_NCK @ k_NCK.mT                                                              # (4)
    rhs = torch.cat([(beta_NC1 * v_NCV).mT, beta_k_NCK.mT], -2).mT  # column by column: no copy
    solved = solve(L_NCC, rhs)                                                                 # (5)
    u_NCV, w_NCK = solved.split([v_NCV.shape[-1], k_NCK.shape[-1]], -1)

    # The state, from chunk to chunk: the only sequential part.
    starts, corrections = [], []
    for k_CK, w_CK, u_CV in zip(k_NCK.unbind(-3), w_NCK.unbind(-3), u_NCV.unbind(-3)):
        d_CV = u_CV - w_CK @ state_KV                                                          # (6)
        starts.append(state_KV)
        corrections.append(d_CV)
        state_KV = state_KV + k_CK.mT @ d_CV                                                   # (8)

    start_NKV, d_NCV = torch.stack(starts, -3), torch.stack(corrections, -3)
    out_NCV = q_NCK @ start_NKV + (q_NCK @ k_NCK.mT).tril_() @ d_NCV                           # (7)
    return out_NCV, state_KV, start_NKV, d_NCV, w_NCK


# --------------------------------------------------------------------------------------------------
# 4. The backward, by hand
# --------------------------------------------------------------------------------------------------
#
# Let g(X) be the gradient of the loss with respect to X, G_n = g(S_n) for the state after chunk n,
# and P = tril(Q K^T). Inside chunk n, with S_0 its first state, (7) and (8) give the gradient of D,
# and then (6) that of S_0, which is G of the chunk before:
#
#     g(D)    = P^T g(O) + K G_n                                                                (9)
#     G_{n-1} = G_n + Q^T g(O) - W^T g(D)                                                       (10)
#
# Only these two run from chunk to chunk, now from the last to the first. All else is local. D
# solves (I + L) D = beta (V - K S_0); the backward of that is ONE solve, with the TRANSPOSED
# triangle,
#
#     (I + L)^T X = g(D)                                                                        (11)
#
# where X is the gradient of the right-hand side and M = -tril(X D^T, -1) that of L. Hence, with
# g(P) = tril(g(O) D^T), and beta K as one matrix,
#
#     g(V)      = beta X                                                                        (12)
#     g(beta K) = M K - X S_0^T                                                                 (13)
#     g(K)      = M^T (beta K) + g(P)^T Q + D G_n^T + beta g(beta K)                            (14)
#     g(Q)      = g(O) S_0^T + g(P) K                                                           (15)
#     g(beta)   = row sums of X * V + g(beta K) * K                                             (16)
#
# What to keep from the forward? q, k, v and beta exist anyway. D is as large as v, W as large as k,
# the states at the chunk starts K / C times v. L and P would be C / V times v each, and each is one
# cheap product: they are made again.


class ChunkedDeltaRule(torch.autograd.Function):
    """chunked_forward, with (9) to (16) as its backward."""

    @staticmethod
    def forward(ctx, q_NCK, k_NCK, v_NCV, beta_NC1, state_KV):
        out_NCV, state_KV, *kept = chunked_forward(q_NCK, k_NCK, v_NCV, beta_NC1, state_KV)
        ctx.save_for_backward(q_NCK, k_NCK, v_NCV, beta_NC1, *kept)
        return out_NCV, state_KV

    @staticmethod
    def backward(ctx, g_out_NCV, G_KV):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("the backward of delta_rule_chunked is written by hand and cannot "
                               "be differentiated again: use delta_rule_recurrent")
        q_NCK, k_NCK, v_NCV, beta_NC1, start_NKV, d_NCV, w_NCK = ctx.saved_tensors
        P_NCC = (q_NCK @ k_NCK.mT).tril_()
        from_out_NCV, from_out_NKV = P_NCC.mT @ g_out_NCV, q_NCK.mT @ g_out_NCV
        G, g_d = [], []
        for n in reversed(range(k_NCK.shape[-3])):
            k_CK, w_CK = k_NCK.select(-3, n), w_NCK.select(-3, n)
            g_d_CV = from_out_NCV.select(-3, n) + k_CK @ G_KV                                  # (9)
            G.append(G_KV)
            g_d.append(g_d_CV)
            G_KV = G_KV + from_out_NKV.select(-3, n) - w_CK.mT @ g_d_CV                       # (10)
        G_NKV, g_d_NCV = torch.stack(G[::-1], -3), torch.stack(g_d[::-1], -3)

        beta_k_NCK = beta_NC1 * k_NCK
        L_NCC = beta_k_NCK @ k_NCK.mT
        X_NCV = torch.linalg.solve_triangular(L_NCC.mT, g_d_NCV, upper=True,
                                              unitriangular=True)                             # (11)
        # `+=` writes into the product just made, instead of into fresh memory
        M_NCC, g_P_NCC = -(X_NCV @ d_NCV.mT).tril_(-1), (g_out_NCV @ d_NCV.mT).tril_()
        g_v_NCV = beta_NC1 * X_NCV                                                            # (12)
        g_beta_k_NCK = M_NCC @ k_NCK
        g_beta_k_NCK -= X_NCV @ start_NKV.mT                                                  # (13)
        g_k_NCK = M_NCC.mT @ beta_k_NCK
        g_k_NCK += g_P_NCC.mT @ q_NCK
        g_k_NCK += d_NCV @ G_NKV.mT
        g_k_NCK += beta_NC1 * g_beta_k_NCK                                                    # (14)
        g_q_NCK = g_out_NCV @ start_NKV.mT
        g_q_NCK += g_P_NCC @ k_NCK                                                            # (15)
        g_beta_NC1 = ((X_NCV * v_NCV).sum(-1, keepdim=True)
                      + (g_beta_k_NCK * k_NCK).sum(-1, keepdim=True))                         # (16)
        return g_q_NCK, g_k_NCK, g_v_NCV, g_beta_NC1, G_KV


# --------------------------------------------------------------------------------------------------
# 5. Several writes per token
# --------------------------------------------------------------------------------------------------
#
# DeltaProduct [4] applies R steps of (1) per token and reads once, after the last. To the scan
# these are R tokens of which only the last is read. A token's transition is then a product of R
# reflections and can be any orthogonal matrix of rank <= R away from I (Cartan-Dieudonne): one
# token, one permutation.


def delta_product(q, k, v, beta, state=None, chunk_size=32):
    """R delta-rule writes per token, r = 1 first, then one read.

    Shapes: q [..., T, K]; k [..., T, R, K]; v [..., T, R, V]; beta [..., T, R];
            state [..., K, V] or None -> out [..., T, V], state [..., K, V].
    Raises: ValueError as delta_rule_chunked, or if k has no axis of writes.
    Cost: that of delta_rule_chunked at T R tokens.  Source: [4] section 3.
    """
    if k.ndim != q.ndim + 1:
        raise ValueError(f"k must be [..., T, R, K], one axis more than q [..., T, K]; got k "
                         f"{tuple(k.shape)}, q {tuple(q.shape)}")
    R = k.shape[-2]
    q_each_write = q.repeat_interleave(R, dim=-2)
    out, state = delta_rule_chunked(q_each_write, k.flatten(-3, -2), v.flatten(-3, -2),
                                    beta.flatten(-2), state, chunk_size)
    return out[..., R - 1::R, :], state


# --------------------------------------------------------------------------------------------------
# 6. Uncertain commands: beliefs as linear recurrences
# --------------------------------------------------------------------------------------------------
#
# Nobody says whether `if random() < p: a, b = b, a` did anything. What can still be tracked is a
# belief. Over Q states it is a vector: a command mixes it, a reveal deletes the states that it
# excludes. Both are matrices with entries >= 0, and without Bayes' division the belief is linear:
#
#     h_t = A_t h_{t-1}          |h_t|_1 = probability of all that was revealed up to t        (17)
#
# That is exact, and it dies: every reveal that had probability 1/2 halves h, until its numbers are
# 0. An n x n matrix of marginals, H_ij = P(variable i holds value j), is smaller than Q = n!:
#
#     coin of g:         H <- ((1 - p) I + p P_g) H               (P_g H)_i = H_g[i]           (18)
#     i shows value j:   H <- (I - e_i e_i^T) H (I - e_j e_j^T) + e_i e_j^T                    (19)
#
# If g exchanges two variables, (1 - p) I + p P_g = I - 2p k k^T: a coin flip IS a step of the delta
# rule, with beta = 2p. A fair coin is beta = 1, forgetting; every coin p > 1/2 needs beta > 1. Not
# so (19): it erases a column as well, which a step from the left cannot do. The rows and columns of
# H no longer sum to 1 after (19); the decoder repairs that, outside of the recurrence.


def two_sided_recurrence(left, right, write, state):
    """S_t = L_t S_{t-1} R_t + W_t, every state. L = I - beta k k^T, R = I: the delta rule.

    Shapes: left [..., T, K, K]; right [..., T, V, V]; write [..., T, K, V]; state [..., K, V]
            -> [..., T, K, V]. Equation (17) has V = 1, R = 1, W = 0.
    Source: Siems et al. 2026, their joint and their marginal representation.
    """
    states = []
    for L_KK, R_VV, W_KV in zip(left.unbind(-3), right.unbind(-3), write.unbind(-3)):
        state = L_KK @ state @ R_VV + W_KV
        states.append(state)
    return torch.stack(states, -3)


def marginal_coins(commands, chance):
    """L of equation (18). Shapes: commands integer [..., n], chance [...] -> [..., n, n]."""
    p = chance[..., None, None]
    stays = torch.eye(commands.shape[-1], dtype=p.dtype)
    return (1 - p) * stays + p * F.one_hot(commands, commands.shape[-1])


def marginal_reveals(asked, answers, n):
    """L, R and W of equation (19). Shapes: i, j integer [...] -> three times [..., n, n], fp64."""
    e_i, e_j = F.one_hot(asked, n).double(), F.one_hot(answers, n).double()
    return (torch.diag_embed(1 - e_i), torch.diag_embed(1 - e_j),
            e_i.unsqueeze(-1) * e_j.unsqueeze(-2))


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


# Is the underflow of (17) the price of linearity? Bayes divides at every step, which is not linear,
# but f(x) = x / |x|_1 commutes with matrices, f(A f(x)) = f(A x): WHEN one divides is free. So let
# a pair (M, s) stand for the matrix M diag(2^s). Pairs compose, and composition is associative,
#
#     (M_2, s_2) (M_1, s_1) = (M_2 diag(2^(s_2 - c)) M_1, s_1 + c),   any c for each column    (20)
#
# so there is a parallel scan, and c keeps every column near 1: powers of two round nothing. Each
# column has a scale of its own, since column j is the belief of a reader who began in state j: two
# beginnings that fit the reveals unequally well drift apart without bound. (Inside one belief a
# state of relative weight below the smallest number is still lost, as it is to a filter that
# divides at every step.)

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


def compose(later, earlier):
    """Equation (20): first the earlier pair, then the later one."""
    (M2_KK, s2_K), (M1_KV, s1_V) = later, earlier
    M1_KV, s_V = rescale(M1_KV, s2_K, s1_V)
    return rescale(M2_KK @ M1_KV, torch.zeros_like(s2_K), s_V)


def rescaled_scan(A_TKK, h_K):
    """Equation (17) at every t at once, in any number format, for any length.

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
        joined = compose((M_TKK[..., span:, :, :], s_TK[..., span:, :]),
                         (M_TKK[..., :-span, :, :], s_TK[..., :-span, :]))
        M_TKK = torch.cat([M_TKK[..., :span, :, :], joined[0]], -3)
        s_TK = torch.cat([s_TK[..., :span, :], joined[1]], -2)
        span *= 2
    h_K1 = h_K.unsqueeze(-1).unsqueeze(-3)
    h_TK1, s_T1 = compose((M_TKK, s_TK), (h_K1, s_TK.new_zeros(1)))
    norm_T1 = h_TK1.sum(-2)
    return (h_TK1 / norm_T1.unsqueeze(-2)).squeeze(-1), \
        (norm_T1.double().log() + s_T1.double() * math.log(2)).squeeze(-1)


# What this says about the paper's conclusion. That (17) underflows is a limit of number formats:
# (20) is as linear and as parallel, and runs for ever. That (18) and (19) are not the filter is a
# limit of n^2 numbers, in exact arithmetic too: marginals do not determine the belief (`eval.py`
# measures the loss). What a state of fixed size LEARNS is neither of the two: README has the runs.


# --------------------------------------------------------------------------------------------------
# 7. Numerics
# --------------------------------------------------------------------------------------------------
#
# Why unit keys: with |k| = 1 and beta <= 2 each factor has norm <= 1, and the inverse of I + L in
# (4) stays tame (at beta = 2 no entry is above 2: it holds products of reflections). With raw keys
# the factors grow, and the inverse with them, exponentially in C.
#
# What float32 loses: a reflection with a rounded key is not exactly orthogonal, and nothing in a
# linear recurrence pulls the state back. The error grows with the number of steps, slowly. Over
# 4,096 exchanges (the test of float32) chunks of 32 lost 0.9 to 5 times what the loop lost, in six
# draws at K = 5 and 16: it is the rounding of L. With L and its solve in float64 the factor was 0.9
# to 1.2, for 1.0 to 1.4 times the time. Left out, since Apple's GPUs have no float64.
#
# What the chunk size trades: a larger C means fewer sequential steps, T / C, and more work per
# token, C K for the triangle. Memory for L is T C. `python scan.py --bench` shows what pays.
#
# What was tried and left out: (8) is affine in the state, so the states between chunks can come
# from a scan of pairs (I - K^T W, K^T U) in log2 N rounds. In a trial at K = V = 16 on one CPU core
# forward and backward took 0.68, 0.82 and 0.99 of the loop's time for C = 16, 32 and 64 over 2
# sequences of 32,768 tokens, and 1.25 to 1.34 over 64 of 1,024, nearer to how models are trained.


# --------------------------------------------------------------------------------------------------
# 8. Measurements
# --------------------------------------------------------------------------------------------------

def invert_row_by_row(L_NCC, rhs):
    """The same solution as textbooks write it: the inverse, one row after the other, then U, W."""
    inverse_NCC = -L_NCC.tril(-1)
    for i in range(1, L_NCC.shape[-1]):
        row = inverse_NCC[..., i, :i].clone()
        inverse_NCC[..., i, :i] = row + (row.unsqueeze(-2) @ inverse_NCC[..., :i, :i].clone()
                                         ).squeeze(-2)
    return rhs + inverse_NCC @ rhs


def by_autograd(q, k, v, beta, solve=solve_unit_triangle):
    """delta_rule_chunked with C = 32, all chunks at once, and torch's own backward."""
    chunks = [in_chunks(x, 32) for x in (q, k, v, beta.unsqueeze(-1))]
    state_KV = check_inputs(q, k, v, beta, None)
    out_NCV, state_KV, *_ = chunked_forward(*chunks, state_KV, solve)
    return out_NCV.flatten(-3, -2)[..., :q.shape[-2], :], state_KV


FORMS = {"loop": delta_rule_recurrent,
         "textbook": functools.partial(by_autograd, solve=invert_row_by_row),
         "autograd": by_autograd,
         **{f"C={C}": functools.partial(delta_rule_chunked, chunk_size=C) for C in (16, 32, 64)},
         "compiled": lambda *x: torch.compile(delta_rule_chunked, dynamic=False)(*x)}
LONGEST_LOOP = 4096  # tokens: the forms other than C=... keep T states, or matrices of all chunks


def random_inputs(shape, device):
    """Unit q and k, normal v, beta uniform in (0, 2), for the shape [B, H, T, K = V]."""
    q, k, v = (torch.randn(shape) for _ in range(3))
    inputs = F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, 2 * torch.rand(shape[:-1])
    return [x.to(device).requires_grad_() for x in inputs]


def measure(function, leaves, backward):
    """Milliseconds of one call, and its outputs; with backward the gradients too."""
    start = time.perf_counter()
    with torch.set_grad_enabled(backward):
        out, _ = function(*leaves)
        results = [out.detach(), *(torch.autograd.grad(out.sum(), leaves) if backward else ())]
    results[-1][..., 0].sum().item()  # a GPU works behind our back: wait for it
    return 1000 * (time.perf_counter() - start), results


def peak_memory(function, leaves):
    """MiB that forward and backward add to the inputs, by torch's account of its allocations."""
    with profile(profile_memory=True) as profiler:
        measure(function, leaves, True)
    events = [event for event in profiler.profiler.kineto_results.events()
              if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes)) / 2**20


def arithmetic_bound(shape, device, C=32):
    """Milliseconds that the products of forward and backward take at the rate of tril(Q K^T) D."""
    *lead, T, K = shape
    N = math.prod(lead) * -(-T // C)
    P_NCC, d_NCV = torch.randn(N, C, C, device=device), torch.randn(N, C, K, device=device)
    product = min(measure(lambda P, d: (P @ d, None), (P_NCC, d_NCV), False)[0] for _ in range(9))
    # (4) to (16), V = K: 12 products of C C K, two solves for another 1.5, and 9 products of C K K
    return product * (27 / 2 * C + 9 * K) / C


def largest_error(results, truth):
    return max((ours - theirs).abs().max().item() for ours, theirs in zip(results, truth))


def main(argv=None):
    description = "Check the chunked scan against the loop, and time both."
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=32, help="K = V")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024], help="T ...")
    parser.add_argument("--rounds", type=int, default=5, help="medians of so many calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--bench", action="store_true", help="every form, with its peak memory")
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    parser.add_argument("--record", help="append each row to this file, as one JSON line")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    from models import choose_device  # not above: both need this file
    from train import append_record, prepare_file
    if min(args.batch, args.heads, args.width, args.rounds, *args.lengths) < 1:
        parser.error("all sizes must be at least 1")
    try:
        torch.manual_seed(args.seed)
        choose_device(args.device)
        prepare_file(args.record)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    forms = [name for name in FORMS if name in ("loop", "C=32") or
             (args.compile if name == "compiled" else args.bench)]
    about = {"B": args.batch, "H": args.heads, "K=V": args.width, "device": args.device,
             "threads": torch.get_num_threads()}

    print(*[f"{key} {value}" for key, value in about.items()], sep=", ")
    print("Milliseconds, medians; peak in MiB; error of values and gradients against float64")
    for T in args.lengths:
        shape = (args.batch, args.heads, T, args.width)
        leaves = random_inputs(shape, args.device)
        bound = arithmetic_bound(shape, args.device)
        times = {name: [] for name in forms if T <= LONGEST_LOOP or name.startswith("C=")}
        errors = {}
        if "loop" in times:
            exact = [x.detach().double().requires_grad_() for x in leaves]
            truth = measure(delta_rule_recurrent, exact, True)[1]
        for name in [*times] * args.rounds:  # in turns: other load on the machine meets all alike
            both, results = measure(FORMS[name], leaves, True)
            times[name].append((measure(FORMS[name], leaves, False)[0], both))
            if "loop" in times:
                errors[name] = largest_error(results, truth)
        for name in times:
            forward, both = map(statistics.median, zip(*times[name]))
            row = {"T": T, "form": name, "forward": forward, "with_backward": both,
                   "tokens/s": 1000 * args.batch * T / both, "times_bound": both / bound}
            if errors:
                loop = statistics.median(both for _, both in times["loop"])
                row.update(times_faster=loop / both, error=errors[name])
            if args.bench:
                row["peak"] = peak_memory(FORMS[name], leaves)
            print(*[f"{key} {value:<7.3g}" if isinstance(value, float) else f"{key} {value:<8}"
                    for key, value in row.items()], flush=True)
            if args.record:
                append_record(args.record, ["scan.py", *argv], row | about)
            if errors and not errors[name] <= 10 * errors["loop"] + 1e-5:
                raise SystemExit(f"{name} disagrees with the loop")


if __name__ == "__main__":
    main()
