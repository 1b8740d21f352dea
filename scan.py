"""How does a *linear* recurrence execute a program, and how is it computed in parallel?

Conventions, the same in every file
    The state S is K x V: one row per key direction, one column per value direction.
    A step multiplies S on the LEFT; a read is S^T q. Time runs left to right, so the product of the
    steps 1..t is A_t ... A_2 A_1, the later factor on the left. It is the same "first g, then h" as
    in data.py: compose(g, h) writes it from left to right, matrices multiply from right to left.

Symbols (capital letters are sizes; a tensor's last axes are in its name, leading axes are free)
    B  batch     K  key width       C  positions in one chunk
    T  tokens    V  value width     N  chunks, ceil(T / C)
    H  heads     R  writes per token
    q_TK, k_TK, v_TV   query, key, value         beta_T   strength, in [0, 2] for unit keys
    d_TV               correction: what a step really writes (equation 2)
    Diag(beta) X       row t of X times beta_t

    name here        Yang et al. 2024    Schlag et al. 2021
    S (K x V)        S^T (they: V x K)   W^T
    D = U - W S_0    U - W S^T           -

Sources
    [1] Schlag, Irie, Schmidhuber 2021, arXiv 2102.11174: the delta rule as linear attention.
    [2] Yang, Wang, Zhang, Shen, Kim 2024, arXiv 2406.06484: chunks, and the WY form of the product.
    [3] Grazzi, Siems, Zela, Franke, Hutter, Pontil 2025, arXiv 2411.12537: eigenvalue -1.
    [4] Siems, Carstensen, Zela, Hutter, Pontil, Grazzi 2025, arXiv 2502.10297: R writes per token.

Does NOT include: decay gates, kernels for a particular device, hidden scales or normalisations.

To see before reading: python scan.py
Next: models.py, where q, k, v and beta are computed from tokens.
"""

import argparse
import contextlib
import os
import sys

import torch
import torch.nn.functional as F

# --- 1. A toy: the swap machine -------------------------------------------------------------------
#
# Let the rows of S be memory slots. One step of the delta rule with |k| = 1 and nothing to write,
#
#     S <- (I - beta k k^T) S,
#
# has eigenvalue 1 - beta along k and 1 on everything orthogonal to it. So beta = 0 does nothing,
# beta = 1 erases the direction k, and beta = 2 REFLECTS: it turns k into -k. The reflection with
# k = (e_i - e_j) / sqrt 2 negates e_i - e_j and keeps e_i + e_j: it EXCHANGES the slots i and j.
#
# With beta <= 1 no exchange exists, in any number of steps [3]. All eigenvalues of a step then lie
# in [0, 1], and such a step keeps the length of x only if it keeps x itself. An exchange keeps the
# length of e_i - e_j, so each of its steps would have to keep e_i - e_j, and none would negate it.
#
# A permutation is a product of exchanges, but a program spells it token by token, and there is no
# time to find its cycles. With a spare slot x' for each variable x no search is needed:
#
#     a, b, c = c, a, b        at each left-hand name x:             exchange x   and x'
#                              at the i-th right-hand name y:        exchange x_i and y'
#
# The left-hand names move all values out of the way; each right-hand name fetches one back. A key
# depends on a token and its place in the line only. So a linear recurrence can do it.


def exchange_key(i, j, slots):
    """The unit key whose reflection (beta = 2) exchanges slots i and j: (e_i - e_j) / sqrt 2.

    Shapes: i, j integer [...] -> [..., slots], float64.
    """
    return (F.one_hot(i, slots) - F.one_hot(j, slots)).double() / 2**0.5


def swap_machine_keys(commands):
    """The 2n reflections that execute `x_0, x_1, ... = x_g[0], x_g[1], ...`, a key for each name.

    Slots 0..n-1 are the variables, and n..2n-1 are their spares, in the same order.
    Shapes: commands integer [..., L, n] -> keys [..., L 2n, 2n], float64, to be used with beta = 2.
    Source: the construction is this project's; that reflections suffice is [3], theorem 3.
    """
    *lead, length, n = commands.shape
    place = torch.arange(n, device=commands.device).expand_as(commands)

    left_hand = exchange_key(place, place + n, 2 * n)
    right_hand = exchange_key(place, commands + n, 2 * n)

    keys = torch.cat([left_hand, right_hand], -2)  # [..., L, 2n, 2n]: 2n keys a command
    return keys.reshape(*lead, length * 2 * n, 2 * n)


# --- 2. The definition, a loop over time ----------------------------------------------------------
#
#     S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T          o_t = S_t^T q_t          (1)
#
# For a unit key, S^T k is the value that is stored under k. A step moves this value beta of the way
# to v: beta = 1 lands on v, and beta = 2 overshoots, to the mirror image of the old value in v.
# With the correction d_t = beta_t (v_t - S_{t-1}^T k_t) the step is a rank-1 write:
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
    """The initial state.  Raises: ValueError for what does not fit together."""
    if k.ndim < 2 or k.shape[-2] < 1:
        raise ValueError(f"k must be [..., T, K] with T >= 1 tokens; got shape {tuple(k.shape)}")

    *lead, T, K = k.shape
    V = v.shape[-1] if v.ndim else 0
    if state is None:
        state = k.new_zeros(*lead, K, V)

    expected = [
        ("q", q, f"T={T}, K={K}", (*lead, T, K)),
        ("v", v, f"T={T}, V", (*lead, T, V)),
        ("beta", beta, f"T={T}", (*lead, T)),
        ("state", state, f"K={K}, V={V}", (*lead, K, V)),
    ]
    for name, x, letters, shape in expected:
        if x.shape != shape:
            raise ValueError(f"{name} must be [..., {letters}] with the leading axes of k, "
                             f"{tuple(lead)}; got shape {tuple(x.shape)}")
        if x.dtype != k.dtype or not x.is_floating_point():
            raise ValueError(f"all inputs must have one floating-point type, as x.float() has; got "
                             f"k {k.dtype}, {name} {x.dtype}")
    return state


# --- 3. One chunk is one triangular system --------------------------------------------------------
#
# The loop is T tiny steps. Unroll (2) inside one chunk of C tokens,
# S_{i-1} = S_0 + sum_{j<i} k_j d_j^T, and put that into the correction:
#
#     d_i + sum_{j<i} beta_i (k_i . k_j) d_j = beta_i (v_i - S_0^T k_i)                         (3)
#
# That is one unit lower-triangular system for all C corrections at once, rows d_i^T:
#
#     (I + L) D = Diag(beta) (V - K S_0)          L = tril(Diag(beta) K K^T, -1)                (4)
#
# The matrix does not contain the state. So invert it BEFORE the state is known, for all chunks of
# the sequence in parallel:
#
#     U = (I + L)^-1 Diag(beta) V          W = (I + L)^-1 Diag(beta) K                          (5)
#
# Then the state goes from chunk to chunk by two products,
#
#     D = U - W S_0                                                                             (6)
#     S_C = S_0 + K^T D = (I - K^T W) S_0 + K^T U                                               (7)
#
# and every token is read, again for all chunks in parallel:
#
#     O = Q S_0 + tril(Q K^T) D                                                                 (8)
#
# Set V = 0 in (7), and so U = 0: S_C is linear in S_0, by (1) through the product of the C factors
# I - beta k k^T, the later factor on the left. So I - K^T W is that product. This is its "WY form"
# (Bischof and Van Loan 1987), which [2] found for the delta rule. The inverse times Diag(beta) is
# called "UT transform" there.
#
# Why a triangular solve: it is exact to rounding. Codes for the GPU often multiply out
# (I - L)(I + L^2)(I + L^4)... instead, which ends, since a power of L is 0. With beta <= 1 that is
# fine. With one key again and again and beta = 2 the powers grow to 1e13 before they end, and in
# float32 a chunk of 32 comes out wrong by 1e5, though no entry of the inverse is above 2.


def chunked_forward(q_NCK, k_NCK, v_NCV, beta_NC1, state_KV):
    """Equations (4) to (8). Autograd can differentiate it; section 6 does so by hand.

    Shapes: q, k [..., N, C, K]; v [..., N, C, V]; beta [..., N, C, 1]; state [..., K, V]
            -> out [..., N, C, V]; the state after the last chunk; and for section 6 the inverse
            [..., N, C, C], W [..., N, C, K], the state before each chunk [..., N, K, V], D, and
            tril(Q K^T) [..., N, C, C].
    """
    # Before the state is known, all chunks at once.
    beta_k_NCK = beta_NC1 * k_NCK
    L_NCC = (beta_k_NCK @ k_NCK.mT).tril_(-1)                                                  # (4)
    eye_NCC = torch.eye(L_NCC.shape[-1], dtype=L_NCC.dtype, device=L_NCC.device).expand_as(L_NCC)
    inverse_NCC = torch.linalg.solve_triangular(L_NCC, eye_NCC, upper=False, unitriangular=True)
    u_NCV = inverse_NCC @ (beta_NC1 * v_NCV)                                                   # (5)
    w_NCK = inverse_NCC @ beta_k_NCK

    # The only sequential part: N steps, where the definition has T.
    starts = []
    corrections = []
    for k_CK, u_CV, w_CK in zip(k_NCK.unbind(-3), u_NCV.unbind(-3), w_NCK.unbind(-3)):
        d_CV = u_CV - w_CK @ state_KV                                                          # (6)
        starts.append(state_KV)
        corrections.append(d_CV)
        state_KV = state_KV + k_CK.mT @ d_CV                                                   # (7)
    start_NKV = torch.stack(starts, -3)
    d_NCV = torch.stack(corrections, -3)

    # All chunks at once again. tril with its diagonal: the read at t sees the write at t.
    P_NCC = (q_NCK @ k_NCK.mT).tril_()
    out_NCV = q_NCK @ start_NKV
    add_product_(out_NCV, P_NCC, d_NCV)                                                        # (8)
    return out_NCV, state_KV, inverse_NCC, w_NCK, start_NKV, d_NCV, P_NCC


def add_product_(x, a, b, sign=1):
    """x += sign a @ b, in its place: the product needs no memory of its own.

    Shapes: x [..., C, X]; a [..., C, Y]; b [..., Y, X].
    """
    # baddbmm_ knows one leading axis, and flatten makes one of all.
    x.flatten(0, -3).baddbmm_(a.flatten(0, -3), b.flatten(0, -3), alpha=sign)


def delta_rule_chunked(q, k, v, beta, state=None, chunk_size=16):
    """The delta rule, chunk by chunk: the outputs and the state of delta_rule_recurrent.

    A longer chunk makes fewer sequential steps, T / C, and larger matrices, C x C.

    Shapes: q, k [..., T, K]; v [..., T, V]; beta [..., T]; state [..., K, V] or None (zeros)
            -> out [..., T, V], state [..., K, V]. Any T >= 1; the last chunk may be short.
    Half types become float32: in bfloat16 a state would lose its digits.
    Raises: ValueError if the inputs do not fit together; RuntimeError at a second derivative.
    Beware: a NaN or an overflow anywhere in a chunk reaches all of it, also backwards in time.
    Cost: O(T (C K + C V + K V)) in matrix products, T / C sequential steps.  Source: [2] section 3.
    """
    q, k, v, beta = [at_least_float32(x) for x in (q, k, v, beta)]
    state_KV = check_inputs(q, k, v, beta, state)
    T = k.shape[-2]
    C = min(chunk_size, T)

    chunks = [in_chunks(x, C) for x in (q, k, v, beta.unsqueeze(-1))]
    out_NCV, state_KV = ChunkedDeltaRule.apply(*chunks, state_KV)
    return out_NCV.flatten(-3, -2)[..., :T, :], state_KV


def at_least_float32(x):
    """Under autocast some inputs arrive in float16 or bfloat16, and others do not."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def in_chunks(x, C):
    """[..., T, X] -> [..., N, C, X], the last chunk filled up with zeros.

    A token with k = 0 and beta = 0 writes nothing: the filling leaves the state as it is.
    """
    missing = -x.shape[-2] % C
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    return x.unflatten(-2, (-1, C)).contiguous()


# --- 4. Several writes per token ------------------------------------------------------------------
#
# DeltaProduct [4] applies R steps of (1) per token and reads once, after the last: to the scan, R
# tokens of which the last is read. The product of R reflections can be any orthogonal matrix Q with
# rank(Q - I) <= R (Cartan-Dieudonne), and no other, since each factor differs from I by rank 1. One
# token can then be one permutation. An n-cycle of n slots has rank(Q - I) = n - 1, since it keeps
# no direction but (1, ..., 1). So S_n as permutations of slots needs R >= n - 1 if a command is
# one token. (As rotations of a cube, S4 needs R = 2.)


def delta_product(q, k, v, beta, state=None, chunk_size=16):
    """R delta-rule writes per token, r = 1 first, then one read.

    Shapes: q [..., T, K]; k [..., T, R, K]; v [..., T, R, V]; beta [..., T, R];
            state [..., K, V] or None -> out [..., T, V], state [..., K, V].
    Raises: ValueError as delta_rule_chunked, or if k has no axis of writes.
    Cost: that of delta_rule_chunked at T R tokens.  Source: [4] section 3.
    """
    one_write = (*k.shape[:-2], *k.shape[-1:])
    if k.ndim < 3 or q.shape != one_write or not k.shape[:-1] == v.shape[:-1] == beta.shape:
        raise ValueError("with q [..., T, K], k must be [..., T, R, K], v [..., T, R, V] and beta "
                         f"[..., T, R]; got q {tuple(q.shape)}, k {tuple(k.shape)}, v "
                         f"{tuple(v.shape)}, beta {tuple(beta.shape)}")

    # Every write gets a read of its own, and all reads but the last of a token are dropped.
    R = k.shape[-2]
    q_each_write = q.repeat_interleave(R, dim=-2)
    k_each_write = k.flatten(-3, -2)
    v_each_write = v.flatten(-3, -2)
    beta_each_write = beta.flatten(-2)

    out, state = delta_rule_chunked(q_each_write, k_each_write, v_each_write, beta_each_write,
                                    state, chunk_size)
    return out[..., R - 1::R, :], state


# --- 5. Numerics ----------------------------------------------------------------------------------
#
# Why unit keys: with |k| = 1 and beta <= 2 each factor A = I - beta k k^T has norm <= 1. Below the
# diagonal, the entry (i, j) of (I + L)^-1 is -beta_i k_i^T A_{i-1} ... A_{j+1} k_j: what is written
# at j is carried to i, and read there. So no entry is above 2. With raw keys the inverse grows
# exponentially in C.
#
# What float32 loses: a reflection with a rounded key is not exactly orthogonal, and nothing in a
# linear recurrence pulls the state back. So the error grows with the number of steps, slowly.


# --- 6. The backward, by hand ---------------------------------------------------------------------
#
# Autograd could differentiate chunked_forward, and a first reading can stop here. By hand it takes
# a fifth less time at K = 16, and three fifths of the memory.
#
# Let g(X) be the gradient of the loss with respect to X, G_n = g(S_n) for the state after chunk n,
# and P = tril(Q K^T). Inside chunk n, with S_0 its first state, (8) and (7) give the gradient of D,
# and then (6) that of S_0, which is G of the chunk before:
#
#     g(D)    = P^T g(O) + K G_n                                                                (9)
#     G_{n-1} = G_n + Q^T g(O) - W^T g(D)                                                       (10)
#
# Only these two run from chunk to chunk, now from the last to the first. All else is local, and
# follows from one rule, that of a solved system Y = A^-1 B:
#
#     g(B) = A^-T g(Y)          g(A) = -g(B) Y^T
#
# In (4) A is I + L, Y is D, and B is Diag(beta) (V - K S_0). The inverse is kept from the forward,
# so X = g(B) is one product. The gradient of L is M, only below the diagonal:
#
#     X = (I + L)^-T g(D)          M = -tril(X D^T, -1)          g(P) = tril(g(O) D^T)          (11)
#
# Read (4) as B = Diag(beta) V - (beta K) S_0 and L = tril((beta K) K^T, -1), with beta K for the
# matrix Diag(beta) K:
#
#     g(V)      = Diag(beta) X                                                                  (12)
#     g(beta K) = M K - X S_0^T                                                                 (13)
#
# K has four uses: it is the second factor of L, it is in P, it writes in (7), and it is in beta K.
# Each use adds a term:
#
#     g(K)      = M^T (beta K) + g(P)^T Q + D G_n^T + Diag(beta) g(beta K)                      (14)
#     g(Q)      = g(O) S_0^T + g(P) K                                                           (15)
#     g(beta)   = row sums of X * V + g(beta K) * K                                             (16)


def chunked_backward(q_NCK, k_NCK, v_NCV, beta_NC1, inverse_NCC, w_NCK, start_NKV, d_NCV,
                     P_NCC, g_out_NCV, G_KV):
    """Equations (9) to (16): the gradients of chunked_forward.

    Shapes: as in chunked_forward; g_out [..., N, C, V] and G [..., K, V] are the gradients of its
            outputs and of the state AFTER the last chunk -> those of q, k, v, beta and the state
            before the first chunk, each in the shape of what it belongs to.
    """
    # (9) and (10), from the last chunk to the first. What does not depend on G is made at once.
    g_d_NCV = P_NCC.mT @ g_out_NCV
    from_out_NKV = q_NCK.mT @ g_out_NCV

    G = []
    for n in reversed(range(k_NCK.shape[-3])):
        g_d_CV = g_d_NCV.select(-3, n)  # a view: += changes g_d_NCV
        g_d_CV += k_NCK.select(-3, n) @ G_KV                                                   # (9)
        G.append(G_KV)
        G_KV = G_KV + from_out_NKV.select(-3, n) - w_NCK.select(-3, n).mT @ g_d_CV            # (10)
    G_NKV = torch.stack(G[::-1], -3)

    X_NCV = inverse_NCC.mT @ g_d_NCV                                                          # (11)
    M_NCC = (X_NCV @ d_NCV.mT).tril_(-1).neg_()
    g_P_NCC = (g_out_NCV @ d_NCV.mT).tril_()

    g_v_NCV = beta_NC1 * X_NCV                                                                # (12)

    g_beta_k_NCK = M_NCC @ k_NCK
    add_product_(g_beta_k_NCK, X_NCV, start_NKV.mT, -1)                                       # (13)

    g_k_NCK = M_NCC.mT @ (beta_NC1 * k_NCK)
    add_product_(g_k_NCK, g_P_NCC.mT, q_NCK)
    add_product_(g_k_NCK, d_NCV, G_NKV.mT)
    g_k_NCK += beta_NC1 * g_beta_k_NCK                                                        # (14)

    g_q_NCK = g_out_NCV @ start_NKV.mT
    add_product_(g_q_NCK, g_P_NCC, k_NCK)                                                     # (15)

    from_v_NC1 = (X_NCV * v_NCV).sum(-1, keepdim=True)
    from_k_NC1 = (g_beta_k_NCK * k_NCK).sum(-1, keepdim=True)
    g_beta_NC1 = from_v_NC1 + from_k_NC1                                                      # (16)

    return g_q_NCK, g_k_NCK, g_v_NCV, g_beta_NC1, G_KV


class ChunkedDeltaRule(torch.autograd.Function):
    """chunked_forward for autograd, with chunked_backward as its backward."""

    @staticmethod
    def forward(ctx, q_NCK, k_NCK, v_NCV, beta_NC1, state_KV):
        with no_autocast(k_NCK.device.type):
            out_NCV, state_KV, *kept = chunked_forward(q_NCK, k_NCK, v_NCV, beta_NC1, state_KV)
        ctx.save_for_backward(q_NCK, k_NCK, v_NCV, beta_NC1, *kept)
        return out_NCV, state_KV

    @staticmethod
    @torch.autograd.function.once_differentiable  # autograd cannot see into a backward by hand
    def backward(ctx, g_out_NCV, G_KV):
        g_out_NCV = g_out_NCV.contiguous()  # the gradient of out.sum() is one number, expanded
        with no_autocast(G_KV.device.type):
            return chunked_backward(*ctx.saved_tensors, g_out_NCV, G_KV)


def no_autocast(device_type):
    """Under autocast every product of the scan would be made, and rounded, in half precision."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()  # such as for tensors on the device meta


# --- To see before reading: python scan.py --------------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(description="Watch the swap machine execute random commands.")
    parser.add_argument("--variables", type=int, default=3, choices=range(2, 10), metavar="2-9")
    args = parser.parse_args(argv)

    n = args.variables
    names = "abcdefghi"[:n]
    nothing = torch.zeros(1, 1).double()  # v: a reflection writes no new value
    two = torch.tensor([2.0]).double()

    # Variable i holds the value i + 1. A spare slot holds 0 until a left-hand name fills it.
    slots = torch.cat([torch.arange(1, n + 1), torch.zeros(n)]).double().unsqueeze(-1)

    for command in (torch.randperm(n), torch.randperm(n)):
        print(f"\n>>> {', '.join(names)} = {', '.join(names[i] for i in command)}")
        for key in swap_machine_keys(command.unsqueeze(0)).split(1):
            _, slots = delta_rule_recurrent(key, key, nothing, two, slots)
            x, spare = key[0].nonzero().flatten().tolist()
            values = [f"{abs(value):.0f}" for value in slots.flatten().tolist()]
            print(f"    exchange {names[x]} and {names[spare - n]}':   variables "
                  f"{' '.join(values[:n])}   spares {' '.join(values[n:])}")


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # as in `python scan.py | head -1`
        os._exit(1)  # at once: Python's own end would flush, and fail, again
