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
    q_TK  the query, by which the state is read      v_TV  the value that k should lead to
    k_TK  the key, under which the state is compared  b_TK  the direction of the write
    r_TV  the error: what the state has wrong under k (equation 1)

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
import time

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
# The state is a table of what is stored under each key: for a unit key, S^T k is what a read of k
# gives. Each token compares that with the value that should be there, and writes the error:
#
#     r_t = v_t - S_{t-1}^T k_t          the error of a read                                    (1)
#     S_t = S_{t-1} + b_t r_t^T          a write of rank 1, in the direction b_t                (2)
#     o_t = S_t^T q_t                    the read at t sees the write at t
#
# Any b_t will do here. The DELTA RULE writes in the direction that it has read, b_t = beta_t k_t,
# so that (1) and (2) become the step of section 1, and a value:
#
#     S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T                                   (3)
#
# For a unit key it moves the value under k beta of the way to v: beta = 1 lands on v, and beta = 2
# overshoots, to the mirror image of the old value in v.


def scan_recurrent(q, k, b, v, state=None):
    """Equations (1) and (2), one token after the other: the definition.

    Shapes: q, k, b [..., T, K]; v [..., T, V]; state [..., K, V] or None (zeros)
            -> out [..., T, V], state [..., K, V]. The read at t sees the write at t.
    Half types become float32: in bfloat16 a state would lose its digits.
    Raises: ValueError if the inputs do not fit together.
    Cost: O(T K V), T sequential steps.  Source: [1] equations 23-25; [2] equation 2.
    """
    q, k, b, v, state_KV = check_inputs(q, k, b, v, state)
    out = []

    # unbind, not q[..., t, :]: the backward of an index writes a full-size gradient at every step
    for q_K, k_K, b_K, v_V in zip(q.unbind(-2), k.unbind(-2), b.unbind(-2), v.unbind(-2)):
        r_V = v_V - torch.einsum("...kv,...k->...v", state_KV, k_K)                            # (1)
        state_KV = state_KV + torch.einsum("...k,...v->...kv", b_K, r_V)                       # (2)
        out.append(torch.einsum("...kv,...k->...v", state_KV, q_K))

    return torch.stack(out, -2), state_KV


def delta_rule_recurrent(q, k, v, beta, state=None):
    """The delta rule, equation (3), by the loop.

    Shapes: as scan_recurrent; beta [..., T].  Raises: ValueError, also for beta.
    """
    return scan_recurrent(q, k, along(k, beta), v, state)


def along(k, beta):
    """The write of the delta rule, b = beta k: [..., T, K], [..., T] -> [..., T, K]."""
    if beta.shape != k.shape[:-1]:
        raise ValueError(f"beta must be [..., T], the shape of k without its last axis, "
                         f"{tuple(k.shape[:-1])}; got shape {tuple(beta.shape)}")
    if at_least_float32(beta).dtype != at_least_float32(k).dtype:
        raise ValueError(f"beta must have the type of k, {k.dtype}; got {beta.dtype}")
    return at_least_float32(beta).unsqueeze(-1) * at_least_float32(k)


def check_inputs(q, k, b, v, state):
    """The inputs in one type, float32 at least, and the initial state.  Raises: ValueError."""
    if k.ndim < 2 or k.shape[-2] < 1:
        raise ValueError(f"k must be [..., T, K] with T >= 1 tokens; got shape {tuple(k.shape)}")

    *lead, T, K = k.shape
    V = v.shape[-1] if v.ndim else 0
    if state is None:
        state = at_least_float32(k.new_zeros(*lead, K, V))

    # No message is made before there is an error: torch.compile takes a printed T for constant.
    expected = [
        ("q", q, "T, K", (*lead, T, K)), ("k", k, "T, K", (*lead, T, K)),
        ("b", b, "T, K", (*lead, T, K)), ("v", v, "T, V", (*lead, T, V)),
        ("state", state, "K, V", (*lead, K, V))]
    for name, x, axes, shape in expected:
        if x.shape != shape:
            raise ValueError(f"{name} must be [..., {axes}], here {tuple(shape)}, since k is "
                             f"{tuple(k.shape)}; got shape {tuple(x.shape)}")
        if at_least_float32(x).dtype != at_least_float32(k).dtype or not x.is_floating_point():
            raise ValueError(f"all inputs must have one floating-point type, as x.float() has; got "
                             f"k {k.dtype}, {name} {x.dtype}")
    return [at_least_float32(x) for x in (q, k, b, v, state)]


def at_least_float32(x):
    """float16 and bfloat16 become float32. Under autocast some inputs arrive so, others do not."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# --- 3. One chunk is one triangular system --------------------------------------------------------
#
# The loop is T tiny steps. Unroll (2) inside one chunk of C tokens, S_{i-1} = S_0 + sum_{j<i} b_j
# r_j^T, and put that into (1):
#
#     r_i + sum_{j<i} (k_i . b_j) r_j = v_i - S_0^T k_i                                         (4)
#
# That is one unit lower-triangular system for all C errors at once, rows r_i^T:
#
#     (I + L) R = V - K S_0          L = tril(K B^T, -1)                                        (5)
#
# The matrix does not contain the state. So invert it BEFORE the state is known, for all chunks of
# the sequence in parallel:
#
#     U = (I + L)^-1 V          W = (I + L)^-1 K                                                (6)
#
# Then the state goes from chunk to chunk by two products,
#
#     R = U - W S_0                                                                             (7)
#     S_C = S_0 + B^T R = (I - B^T W) S_0 + B^T U                                               (8)
#
# and every token is read, again for all chunks in parallel:
#
#     O = Q S_0 + tril(Q B^T) R                                                                 (9)
#
# Set V = 0, and so U = 0: by (8) S_C is linear in S_0, and by (1) and (2) the map is the product of
# the C factors I - b k^T, the later factor on the left. So I - B^T W is that product. For the delta
# rule this is its "WY form" (Bischof and Van Loan 1987), which [2] found.
#
# Names elsewhere. The literature has the delta rule alone, and scales each error by beta at once:
#
#     Yang et al. [2]         here                       Schlag et al. [1]
#     S (V x K)               S^T                        W
#     U, W                    Diag(beta) U, W            -
#     U - W S^T               Diag(beta) R               -
#     T, "UT transform"       Diag(beta) (I + L)^-1      -
#
# A decay gate would multiply S_{t-1} by alpha_t in (1) and (2). With a_i = alpha_1 ... alpha_i it
# enters as a_i / a_j at k_i . b_j and q_i . b_j, as a_C / a_j at the b_j of (8), and as a_i at the
# k_i, q_i and (i = C) I that meet S_0.


def scan_chunked(q, k, b, v, state=None, chunk_size=None):
    """Equations (1) and (2), chunk by chunk: the outputs and the state of scan_recurrent.

    A longer chunk makes fewer sequential steps, T / C, and larger matrices, C x C. chunk_size None
    is a good C for the width of the keys and the device.

    Shapes: q, k, b [..., T, K]; v [..., T, V]; state [..., K, V] or None (zeros)
            -> out [..., T, V], state [..., K, V]. Any T >= 1; the last chunk may be short.
    Half types become float32.
    Raises: ValueError if the inputs do not fit together; RuntimeError at a second derivative.
    Beware: a NaN or an overflow anywhere in a chunk reaches all of it, also backwards in time.
    Cost: O(T (C K + C V + K V)) in matrix products, T / C sequential steps.  Source: [2] section 3.
    """
    q, k, b, v, state_KV = check_inputs(q, k, b, v, state)
    T, K = k.shape[-2:]
    if chunk_size is None:
        chunk_size = good_chunk_size(K, k.device.type)
    elif chunk_size < 1:
        raise ValueError(f"chunk_size must be 1 or more; got {chunk_size}")
    C = min(chunk_size, T)

    # The same two functions below, for torch.compile (section 7) or without it (section 6).
    if torch.compiler.is_compiling():
        out_TV, state_KV, *_ = scan_operator(q, k, b, v, state_KV, C)
        return out_TV, state_KV
    return ChunkedScan.apply(q, k, b, v, state_KV, C)


def good_chunk_size(K, device_type):
    """The number of tokens in a chunk, where the caller names none."""
    # On one CPU core chunks of 8 / 16 / 32 / 64 tokens take, as multiples of 16 (T = 944):
    #     K = 16   1.45  1  1.57  2.07          K = 64    1.72  1  0.99  1.00
    #     K = 32   1.45  1  1.32  1.36          K = 128   1.85  1  0.71  0.57
    # A GPU is kept waiting by many small operations: 587 of them at C = 16, 199 at C = 64.
    if device_type != "cpu":
        return 64
    return 16 if K <= 32 else 32


def delta_rule_chunked(q, k, v, beta, state=None, chunk_size=None):
    """The delta rule, equation (3), by chunks.

    Shapes: as scan_chunked; beta [..., T].  Raises: as scan_chunked, also for beta.
    """
    return scan_chunked(q, k, along(k, beta), v, state, chunk_size)


def scan_forward(q_TK, k_TK, b_TK, v_TV, state_KV, C):
    """chunked_forward of tokens: cut them into chunks, and put its outputs together again."""
    chunks = [in_chunks(x, C) for x in (q_TK, k_TK, b_TK, v_TV)]
    with no_autocast(k_TK.device.type):
        out_NCV, state_KV, kept = chunked_forward(*chunks, state_KV)
    return in_tokens(out_NCV, k_TK.shape[-2]), state_KV, kept


def chunked_forward(q_NCK, k_NCK, b_NCK, v_NCV, state_KV):
    """Equations (5) to (9).

    Shapes: q, k, b [..., N, C, K]; v [..., N, C, V]; state [..., K, V]
            -> out [..., N, C, V]; the state after the last chunk; and what the backward by hand
            keeps, which a first reading may skip: (I + L)^-1 [..., N, C, C], W [..., N, C, K], the
            state before each chunk [..., N, K, V], R, and tril(Q B^T) [..., N, C, C].
    """
    # Before the state is known, all chunks at once.
    L_NCC = (k_NCK @ b_NCK.mT).tril_(-1)                                                       # (5)
    eye_NCC = torch.eye(L_NCC.shape[-1], dtype=L_NCC.dtype, device=L_NCC.device).expand_as(L_NCC)
    inverse_NCC = torch.linalg.solve_triangular(L_NCC, eye_NCC, upper=False, unitriangular=True)
    u_NCV = inverse_NCC @ v_NCV                                                                # (6)
    w_NCK = inverse_NCC @ k_NCK

    # The only sequential part: N steps, where the definition has T.
    starts = []
    errors = []
    for b_CK, u_CV, w_CK in zip(b_NCK.unbind(-3), u_NCV.unbind(-3), w_NCK.unbind(-3)):
        r_CV = u_CV - w_CK @ state_KV                                                          # (7)
        starts.append(state_KV)
        errors.append(r_CV)
        state_KV = state_KV + b_CK.mT @ r_CV                                                   # (8)
    start_NKV = torch.stack(starts, -3)
    r_NCV = torch.stack(errors, -3)

    # All chunks at once again. tril with its diagonal: the read at t sees the write at t.
    P_NCC = (q_NCK @ b_NCK.mT).tril_()
    out_NCV = q_NCK @ start_NKV
    add_product_(out_NCV, P_NCC, r_NCV)                                                        # (9)
    return out_NCV, state_KV, (inverse_NCC, w_NCK, start_NKV, r_NCV, P_NCC)


def add_product_(x, a, b, sign=1):
    """x += sign a @ b, in its place: the product needs no memory of its own.

    Shapes: x [..., C, X]; a [..., C, Y]; b [..., Y, X].
    """
    # baddbmm_ knows one leading axis, and flatten makes one of all.
    x.flatten(0, -3).baddbmm_(a.flatten(0, -3), b.flatten(0, -3), alpha=sign)


def in_chunks(x, C):
    """[..., T, X] -> [..., N, C, X], the last chunk filled up with zeros.

    A token with k = 0 and b = 0 writes nothing: the filling leaves the state as it is.
    """
    missing = -x.shape[-2] % C
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    return x.unflatten(-2, (-1, C)).contiguous()


def in_tokens(x, T):
    """[..., N, C, X] -> [..., T, X], without the filling."""
    return x.flatten(-3, -2)[..., :T, :]


def no_autocast(device_type):
    """Under autocast every product of the scan would be made, and rounded, in half precision."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()  # such as for tensors on the device meta


# --- 4. Several writes per token ------------------------------------------------------------------
#
# DeltaProduct [4] applies R steps of (3) per token and reads once, after the last: to the scan, R
# tokens of which the last is read. The product of R reflections can be any orthogonal matrix Q with
# rank(Q - I) <= R (Cartan-Dieudonne), and no other, since each factor differs from I by rank 1. One
# token can then be one permutation. An n-cycle of n slots has rank(Q - I) = n - 1, since it keeps
# no direction but (1, ..., 1). So S_n as permutations of slots needs R >= n - 1 if a command is
# one token. (As rotations of a cube, S4 needs R = 2.)


def delta_product(q, k, v, beta, state=None, chunk_size=None):
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
# Why unit keys: with |k| = 1, b = beta k and beta <= 2 each factor A = I - b k^T has norm <= 1.
# Below the diagonal, the entry (i, j) of (I + L)^-1 is -k_i^T A_{i-1} ... A_{j+1} b_j: what is
# written at j is carried to i, and read there. So no entry is above 2. With raw keys the inverse
# grows exponentially in C. It may grow, too, where b is not along k, since such a step can stretch.
#
# Why a triangular solve: it is exact to rounding. Codes for the GPU often multiply out
# (I - L)(I + L^2)(I + L^4)... instead, which ends, since a power of L is 0. With beta <= 1 that is
# fine. With one key again and again and beta = 2 the powers grow to 1e13 before they end, and in
# float32 a chunk of 32 comes out wrong by 1e4, though no entry of the inverse is above 2.
#
# What float32 loses: a reflection with a rounded key is not exactly orthogonal, and nothing in a
# linear recurrence pulls the state back. So the error grows with the number of steps, slowly.


# --- 6. The backward, by hand ---------------------------------------------------------------------
#
# Autograd could differentiate chunked_forward, and a first reading can stop here. At K = 16 forward
# and backward take a quarter less time by hand, and three fifths of the memory.
#
# Let g(X) be the gradient of the loss with respect to X, G_n = g(S_n) for the state after chunk n,
# and P = tril(Q B^T). Inside chunk n, with S_0 its first state, (9) and (8) give the gradient of R,
# and then (7) that of S_0, which is G of the chunk before:
#
#     g(R)    = P^T g(O) + B G_n                                                                (10)
#     G_{n-1} = G_n + Q^T g(O) - W^T g(R)                                                       (11)
#
# Only these two run from chunk to chunk, now from the last to the first. All else is local, and
# follows from one rule, that of a solved system Y = A^-1 Z:
#
#     g(Z) = A^-T g(Y)          g(A) = -g(Z) Y^T
#
# In (5) A is I + L, Y is R, and Z is V - K S_0. The inverse is kept from the forward, so X = g(Z)
# is one product. The gradient of L is M, only below the diagonal:
#
#     X = (I + L)^-T g(R)          M = -tril(X R^T, -1)          g(P) = tril(g(O) R^T)          (12)
#
# V stands in Z alone, as it is. K has two uses: it is in Z, and in L = tril(K B^T, -1). B has
# three: it is in L, it is in P, and it writes in (8). Q reads S_0, and is in P. Each use is a term:
#
#     g(V) = X                                                                                  (13)
#     g(K) = M B - X S_0^T                                                                      (14)
#     g(B) = M^T K + g(P)^T Q + R G_n^T                                                         (15)
#     g(Q) = g(O) S_0^T + g(P) B                                                                (16)
#
# For the delta rule, autograd takes g(B) on to k and beta, through b = beta k.


class ChunkedScan(torch.autograd.Function):
    """scan_forward for autograd, with scan_backward as its backward."""

    @staticmethod
    def forward(ctx, q_TK, k_TK, b_TK, v_TV, state_KV, C):
        out_TV, state_KV, kept = scan_forward(q_TK, k_TK, b_TK, v_TV, state_KV, C)
        ctx.save_for_backward(q_TK, k_TK, b_TK, *kept)
        return out_TV, state_KV

    @staticmethod
    @torch.autograd.function.once_differentiable  # autograd cannot see into a backward by hand
    def backward(ctx, g_out_TV, G_KV):
        q_TK, k_TK, b_TK, *kept = ctx.saved_tensors
        gradients = scan_backward(q_TK, k_TK, b_TK, kept, g_out_TV, G_KV)
        return *gradients, None  # C has no gradient


def scan_backward(q_TK, k_TK, b_TK, kept, g_out_TV, G_KV):
    """chunked_backward of tokens: the gradients of q, k, b, v and the initial state."""
    T = k_TK.shape[-2]
    C = kept[0].shape[-1]
    q_NCK, k_NCK, b_NCK, g_out_NCV = [in_chunks(x, C) for x in (q_TK, k_TK, b_TK, g_out_TV)]
    with no_autocast(k_TK.device.type):
        *gradients, G_KV = chunked_backward(q_NCK, k_NCK, b_NCK, *kept, g_out_NCV, G_KV)
    return *(in_tokens(x, T) for x in gradients), G_KV


def chunked_backward(q_NCK, k_NCK, b_NCK, inverse_NCC, w_NCK, start_NKV, r_NCV, P_NCC,
                     g_out_NCV, G_KV):
    """Equations (10) to (16): the gradients of chunked_forward.

    Shapes: as in chunked_forward; g_out [..., N, C, V] and G [..., K, V] are the gradients of its
            outputs and of the state AFTER the last chunk -> those of q, k, b, v and the state
            before the first chunk, each in the shape of what it belongs to.
    """
    # (10) and (11), from the last chunk to the first. What does not depend on G is made at once.
    g_r_NCV = P_NCC.mT @ g_out_NCV
    from_out_NKV = q_NCK.mT @ g_out_NCV

    G = []
    for n in reversed(range(k_NCK.shape[-3])):
        g_r_CV = g_r_NCV.select(-3, n)  # a view: += changes g_r_NCV
        g_r_CV += b_NCK.select(-3, n) @ G_KV                                                  # (10)
        G.append(G_KV)
        G_KV = G_KV + from_out_NKV.select(-3, n) - w_NCK.select(-3, n).mT @ g_r_CV            # (11)
    G_NKV = torch.stack(G[::-1], -3)

    X_NCV = inverse_NCC.mT @ g_r_NCV                                                          # (12)
    M_NCC = (X_NCV @ r_NCV.mT).tril_(-1).neg_()
    g_P_NCC = (g_out_NCV @ r_NCV.mT).tril_()

    g_v_NCV = X_NCV                                                                           # (13)

    g_k_NCK = M_NCC @ b_NCK
    add_product_(g_k_NCK, X_NCV, start_NKV.mT, -1)                                            # (14)

    g_b_NCK = M_NCC.mT @ k_NCK
    add_product_(g_b_NCK, g_P_NCC.mT, q_NCK)
    add_product_(g_b_NCK, r_NCV, G_NKV.mT)                                                    # (15)

    g_q_NCK = g_out_NCV @ start_NKV.mT
    add_product_(g_q_NCK, g_P_NCC, b_NCK)                                                     # (16)

    return g_q_NCK, g_k_NCK, g_b_NCK, g_v_NCV, G_KV


# --- 7. For torch.compile -------------------------------------------------------------------------
#
# torch.compile follows every turn of a loop, so the loop over chunks would become another graph for
# each length. Here it meets scan_forward and scan_backward as two OPERATORS, like matmul: it
# calls them as they are, and a "fake" tells it the shapes of their results. One graph then serves
# all lengths. Without the compiler an operator only costs time (some 5 to 15% of the scan), and so
# it is used only while compiling.
#
# An operator returns tensors of its own, laid out as its fake says. The solver writes columns, and
# hence the inverse goes from one operator to the other transposed.


@torch.library.custom_op("state_tracking::scan", mutates_args=())
def scan_operator(q: torch.Tensor, k: torch.Tensor, b: torch.Tensor, v: torch.Tensor,
                  state: torch.Tensor, C: int) -> list[torch.Tensor]:
    out, state, (inverse, *kept) = scan_forward(q, k, b, v, state, C)
    return [out.contiguous(), state, inverse.mT.contiguous(), *kept]


@scan_operator.register_fake
def _(q, k, b, v, state, C):
    *lead, T, K = k.shape
    V = v.shape[-1]
    N = (T + C - 1) // C
    shapes = [(T, V), (K, V), (N, C, C), (N, C, K), (N, K, V), (N, C, V), (N, C, C)]
    return [k.new_empty(*lead, *shape) for shape in shapes]


@torch.library.custom_op("state_tracking::scan_backward", mutates_args=())
def scan_backward_operator(q: torch.Tensor, k: torch.Tensor, b: torch.Tensor,
                           kept: list[torch.Tensor], g_out: torch.Tensor,
                           G: torch.Tensor) -> list[torch.Tensor]:
    inverse_transposed, *others = kept
    gradients = scan_backward(q, k, b, [inverse_transposed.mT, *others], g_out, G)
    return [x.contiguous() for x in gradients]


@scan_backward_operator.register_fake
def _(q, k, b, kept, g_out, G):
    return [x.new_empty(x.shape) for x in (q, k, b, g_out, G)]


def keep_for_backward(ctx, inputs, output):
    q, k, b, *_ = inputs
    ctx.save_for_backward(q, k, b, *output[2:])


def operator_gradient(ctx, g_results):
    q, k, b, *kept = ctx.saved_tensors
    g_out, G = g_results[:2]  # what is kept goes nowhere else, and has no gradient
    return *scan_backward_operator(q, k, b, kept, g_out, G), None  # C has no gradient


scan_operator.register_autograd(operator_gradient, setup_context=keep_for_backward)


# --- To see before reading: python scan.py --------------------------------------------------------


def main(argv=None):
    # Without a usage a wrong argument is refused in one line.
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, description="Watch the swap machine execute two commands, and the "
        "chunks compute what the loop does.")
    parser.add_argument("--variables", type=int, default=3, choices=range(2, 10), metavar="2-9")
    show_swap_machine(parser.parse_args(argv).variables)
    show_loop_and_chunks()


def show_swap_machine(n):
    """A rotation and a reversal of n variables, exchange by exchange."""
    names = "abcdefghi"[:n]
    nothing = torch.zeros(1, 1).double()  # v: a reflection writes no new value
    two = torch.tensor([2.0]).double()

    # Variable i holds the value i + 1. A spare slot holds 0 until a left-hand name fills it.
    slots = torch.cat([torch.arange(1, n + 1), torch.zeros(n)]).double().unsqueeze(-1)

    for command in (torch.arange(n).roll(1), torch.arange(n).flip(0)):
        print(f"\n>>> {', '.join(names)} = {', '.join(names[i] for i in command)}")
        for step, key in enumerate(swap_machine_keys(command.unsqueeze(0)).split(1)):
            _, slots = delta_rule_recurrent(key, key, nothing, two, slots)
            x, spare = key[0].nonzero().flatten().tolist()
            x, spare = names[x], names[spare - n]
            why = f"{x} moves out" if step < n else f"{x} gets what {spare} had"
            values = [f"{abs(value):.0f}" for value in slots.flatten().tolist()]
            print(f"    exchange {x} and {spare}':   variables {' '.join(values[:n])}   "
                  f"spares {' '.join(values[n:])}   {why}")


def show_loop_and_chunks(T=1000, K=16):
    """The same random tokens by the loop and by chunks: the difference, and the times."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, T, K).double()
    inputs = F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, 2 * torch.rand(T).double()

    torch.set_num_threads(1)  # the tensors are small: a second thread would mostly wait
    outs = []
    seconds = []
    for form in (delta_rule_recurrent, delta_rule_chunked):
        times = []
        for _ in range(5):  # the quickest of five: other work on the machine only adds time
            start = time.perf_counter()
            out, _ = form(*inputs)
            times.append(time.perf_counter() - start)
        outs.append(out)
        seconds.append(min(times))
    print(f"\n{T:,} random tokens, by the loop and by chunks: the largest difference is "
          f"{(outs[0] - outs[1]).abs().max():.0e},\nand the chunks are "
          f"{seconds[0] / seconds[1]:.0f} times as fast.")


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # as in `python scan.py | head -1`
        os._exit(1)  # at once: Python's own end would flush, and fail, again
    except OSError as error:  # as on a full disk
        print("error:", error, file=sys.stderr, flush=True)
        os._exit(2)
