"""How does a *linear* recurrence execute code, and how is it computed in parallel?

Conventions, the same in every file
    The state S is K x V: one row per key direction, one column per value direction.
    A step multiplies S on the LEFT, so the steps 1..t multiply it by A_t ... A_2 A_1, the latest on
    the left. (In data.py, "first g, then h" is g[h], and the latest is on the right.)
    Time is the axis before the last (of beta the last; in section 4, R stands between). Leading
    axes, such as batch and heads, are free: [B, H, T, K].
    A tensor's name ends in its last axes.

Symbols
    T  tokens    K  key width      C  tokens in one chunk       R  Householder steps per token
                 V  value width    N  chunks, ceil(T / C)
    q_TK  the query, which reads the state            v_TV  the value to store under k
    k_TK  the key: S^T k is what is stored under it   b_TK  the direction of the write
    d_TV  the delta: the error of what is stored under k, equation (1)

Sources
    [1] Schlag, Irie, Schmidhuber 2021, arXiv 2102.11174: the delta rule as linear attention.
    [2] Yang, Wang, Zhang, Shen, Kim 2024, arXiv 2406.06484: DeltaNet in chunks, by the WY form.
    [3] Grazzi, Siems, Zela, Franke, Hutter, Pontil 2025, arXiv 2411.12537: eigenvalue -1.
    [4] Siems, Carstensen, Zela, Hutter, Pontil, Grazzi 2025, arXiv 2502.10297: DeltaProduct.

Names elsewhere, where the delta rule, b = beta k, scales each error by beta at once.
    here                     [1]       [2]                  flash-linear-attention
    q, k [B, H, T, K]                                       q, k [B, T, H, K]: time BEFORE the heads
    S (K x V), or state      W^T       S^T                  initial_state, final_state
    Diag(beta) U, W, D       -         U, W, U - W S^T      u, w, v_new
    Diag(beta) (I + M)^-1    -         T, "UT transform"    A Diag(beta)
flash-linear-attention also divides q by sqrt K, unless scale=1.

Does NOT include: GPU kernels, hidden scales or normalisations, decay gates. A gate, as in Gated
DeltaNet or KDA, is a change of variables around scan_chunked: TEACHING.md has it, to paste.
Run it first: python scan.py. For a first reading, sections 1 to 4 are enough.
Next: models.py, where q, k, v and beta are computed from tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# --- 1. A toy: the swap machine -------------------------------------------------------------------
#
# Let the rows of S be memory slots. One step of the delta rule with |k| = 1 and nothing to write,
#
#     S <- (I - beta k k^T) S,
#
# has eigenvalue 1 - beta along k and 1 on everything orthogonal to it. So beta = 0 does nothing,
# beta = 1 erases the direction k, and beta = 2 REFLECTS: it turns k into -k. The reflection with
# k = (e_i - e_j) / sqrt 2 negates e_i - e_j and keeps e_i + e_j: it SWAPS the slots i and j.
#
# A permutation is a product of swaps. But a command spells its permutation out one token at a time,
# and nobody can decompose it into cycles before the command is over. Spare slots remove the need:
# give each variable x a slot x', and let x_i be the i-th left-hand name. Then
#
#     a, b, c = c, a, b        at each left-hand name x:             swap x   and x'
#                              at the i-th right-hand name y:        swap x_i and y'
#
# Left-hand names PARK their values in the spare slots; right-hand names FETCH them. A key depends
# on one name and its place in the command, never on the state. So a linear recurrence can make all
# these swaps.


def swap_key(i, j, slots):
    """The unit key whose reflection (beta = 2) swaps slots i and j: (e_i - e_j) / sqrt 2.

    Shapes: i, j integer [...] -> [..., slots], float64.
    """
    return (F.one_hot(i, slots) - F.one_hot(j, slots)).double() / 2**0.5


def swap_machine_keys(commands):
    """The 2n reflections that execute `x_0, x_1, ... = x_g[0], x_g[1], ...`, one key per name.

    Slots 0..n-1 are the variables, and n..2n-1 are their spares, in the same order.
    Shapes: commands integer [..., L, n] -> keys [..., L 2n, 2n], float64, to be used with beta = 2.
    Source: the construction is this project's; that reflections suffice is [3], theorem 3.
    """
    *lead, length, n = commands.shape
    place = torch.arange(n, device=commands.device).expand_as(commands)

    left_hand = swap_key(place, place + n, 2 * n)
    right_hand = swap_key(place, commands + n, 2 * n)

    keys = torch.cat([left_hand, right_hand], -2)  # [..., L, 2n, 2n]: 2n keys per command
    return keys.reshape(*lead, length * 2 * n, 2 * n)


# WHY BETA = 2? With a smaller beta > 0, a step shortens every vector y that it changes:
#
#     |y - beta (k.y) k|^2 = |y|^2 - beta (2 - beta) (k.y)^2
#
# So whatever the steps, a swap loses something. With beta <= 1, m steps leave at most
# cos^(m+1)(pi / (m+1)) of it: 70%, even if all 13 tokens of a command share one swap. (Proof:
# experiments/ANSWERS.md.) From command to command these factors multiply.


# --- 2. The definition, a loop over time ----------------------------------------------------------
#
# The state is a memory: for a unit key k, S^T k is the value stored under it. Each token compares
# that value with the one that should be there, and writes the error:
#
#     d_t = v_t - S_{t-1}^T k_t          the delta: the error of what is stored                 (1)
#     S_t = S_{t-1} + b_t d_t^T          a rank-1 write in the direction b_t                    (2)
#     o_t = S_t^T q_t                    the read at t sees the write at t
#
# Any b_t will do here. The DELTA RULE writes in the direction that it has read, b_t = beta_t k_t,
# and (1) and (2) become the step of section 1 plus a value:
#
#     S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T                                   (3)
#
# For a unit key, this moves the stored value a fraction beta of the way to v: beta = 1 lands on v,
# and beta = 2 overshoots to a value as far beyond v as the old one was before it.


def scan_recurrent(q, k, b, v, state=None):
    """Equations (1) and (2), one token after the other: the definition.

    Shapes: q, k, b [..., T, K]; v [..., T, V]; state [..., K, V] or None (zeros)
            -> out [..., T, V], state [..., K, V].
    Half-precision inputs are computed and returned in float32. (Under autocast this holds for
    scan_chunked only.)
    Raises: ValueError if the shapes do not fit.
    Cost: O(T K V), T sequential steps.  Source: [1] equations 23-25; [2] equation 2.
    """
    q, k, b, v, state_KV = check_inputs(q, k, b, v, state)
    out = []

    # unbind: indexing would allocate a full-size gradient at every step of the backward pass.
    for q_K, k_K, b_K, v_V in zip(q.unbind(-2), k.unbind(-2), b.unbind(-2), v.unbind(-2)):
        d_V = v_V - torch.einsum("...kv,...k->...v", state_KV, k_K)                            # (1)
        state_KV = state_KV + torch.einsum("...k,...v->...kv", b_K, d_V)                       # (2)
        out.append(torch.einsum("...kv,...k->...v", state_KV, q_K))

    return torch.stack(out, -2), state_KV


def delta_rule_recurrent(q, k, v, beta, state=None):
    """The delta rule, equation (3), by the loop.  Shapes: as scan_recurrent; beta [..., T]."""
    return scan_recurrent(q, k, beta_k(k, beta), v, state)


def beta_k(k, beta):
    """The write direction of the delta rule, b = beta k: [..., T, K], [..., T] -> [..., T, K]."""
    if beta.shape != k.shape[:-1]:
        raise ValueError(f"beta must have the shape {tuple(k.shape[:-1])}, since k has "
                         f"{tuple(k.shape)}; got {tuple(beta.shape)}")
    return upcast(beta).unsqueeze(-1) * k


def check_inputs(q, k, b, v, state):
    """All inputs and the initial state, in at least float32.  Raises: ValueError."""
    *lead, T, K = k.shape
    V = v.shape[-1]
    if state is None:
        state = k.new_zeros(*lead, K, V)

    # torch would silently broadcast an axis of size 1.
    if not (q.shape == k.shape == b.shape and T >= 1 and v.shape == (*lead, T, V)
            and state.shape == (*lead, K, V)):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, b, v, state))
        raise ValueError("q, k, b must have the shape [..., T, K] with T >= 1, v [..., T, V] and "
                         f"state [..., K, V]; got {shapes}")
    return [upcast(x) for x in (q, k, b, v, state)]


def upcast(x):
    """Half precision to float32. Under autocast, only some of the inputs are in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# --- 3. One chunk is one triangular system --------------------------------------------------------
#
# The loop is T tiny steps. Unroll (2) inside one chunk of C tokens, S_{i-1} = S_0 + sum_{j<i} b_j
# d_j^T, and put that into (1):
#
#     d_i + sum_{j<i} (k_i . b_j) d_j = v_i - S_0^T k_i                                         (4)
#
# That is one unit lower-triangular system for all C errors at once. Let Q, K, B, V and D be the
# matrices whose rows are the q, k, b, v and d of the chunk:
#
#     (I + M) D = V - K S_0          M = tril(K B^T, -1)                                        (5)
#
# The matrix does not contain the state. So invert it BEFORE the state is known, for all chunks of
# the sequence in parallel:
#
#     U = (I + M)^-1 V          W = (I + M)^-1 K                                                (6)
#
# Then the state goes from chunk to chunk by two products,
#
#     D = U - W S_0                                                                             (7)
#     S_C = S_0 + B^T D = (I - B^T W) S_0 + B^T U                                               (8)
#
# and every token reads the state, again for all chunks in parallel:
#
#     O = Q S_0 + tril(Q B^T) D                                                                 (9)
#
# One chunk of C = 4 tokens. M holds the stars: how much the write at j changes what k_i reads.
#
#               I + M               BEFORE S_0 is known, for all chunks at once:
#          b_1  b_2  b_3  b_4       U, the errors if S_0 were 0; W, how each error depends on S_0
#     k_1   1                                   |
#     k_2   *    1                              v
#     k_3   *    *    1              S_0 --> D = U - W S_0 --> S_C = S_0 + B^T D --> next chunk
#     k_4   *    *    *    1                    |
#                                               v
#                                   O = Q S_0 + tril(Q B^T) D, again for all chunks at once
#
# In (8), I - B^T W is the product of the C factors I - b k^T of the chunk, the last one leftmost.
# For the delta rule this is the "WY form" of Bischof and Van Loan (1987), as [2] pointed out.


def chunked_forward(q_NCK, k_NCK, b_NCK, v_NCV, state_KV):
    """Equations (5) to (9).

    Shapes: q, k, b [..., N, C, K]; v [..., N, C, V]; state [..., K, V]
            -> out [..., N, C, V]; the state after the last chunk; and a list of what is saved for
            the backward: (I + M)^-1 [..., N, C, C], W [..., N, C, K], the state before each chunk
            [..., N, K, V], D [..., N, C, V], and tril(Q B^T) [..., N, C, C].
    """
    # Before the state is known, all chunks at once.
    M_NCC = (k_NCK @ b_NCK.mT).tril_(-1)                                                       # (5)
    eye_NCC = torch.eye(M_NCC.shape[-1], dtype=M_NCC.dtype, device=M_NCC.device).expand_as(M_NCC)
    # unitriangular=True ignores the diagonal and takes it as 1, so this inverts I + M.
    inverse_NCC = torch.linalg.solve_triangular(M_NCC, eye_NCC, upper=False, unitriangular=True)
    u_NCV = inverse_NCC @ v_NCV                                                                # (6)
    w_NCK = inverse_NCC @ k_NCK                                                                # (6)

    # The only sequential part: N steps, where the definition has T.
    starts = []
    errors = []
    for b_CK, u_CV, w_CK in zip(b_NCK.unbind(-3), u_NCV.unbind(-3), w_NCK.unbind(-3)):
        d_CV = u_CV - w_CK @ state_KV                                                          # (7)
        starts.append(state_KV)
        errors.append(d_CV)
        state_KV = state_KV + b_CK.mT @ d_CV                                                   # (8)
    start_NKV = torch.stack(starts, -3)
    d_NCV = torch.stack(errors, -3)

    # All chunks at once again. tril with its diagonal: the read at t sees the write at t.
    P_NCC = (q_NCK @ b_NCK.mT).tril_()
    out_NCV = q_NCK @ start_NKV
    out_NCV += P_NCC @ d_NCV                                                                   # (9)
    return out_NCV, state_KV, [inverse_NCC, w_NCK, start_NKV, d_NCV, P_NCC]


def scan_chunked(q, k, b, v, state=None, chunk_size=None):
    """Equations (1) and (2), chunk by chunk: the outputs and the state of scan_recurrent.

    Shapes: q, k, b [..., T, K]; v [..., T, V]; state [..., K, V] or None (zeros)
            -> out [..., T, V], state [..., K, V]. Any T >= 1; the last chunk may be short.
    Heads come before time: the order of flash-linear-attention, [B, T, H, K], raises no error, but
    its results are wrong.
    chunk_size: C. Longer chunks make fewer sequential steps and larger triangles.
    Raises: ValueError if the shapes do not fit; RuntimeError at a second derivative.
    Beware: unless |k| = 1 and b = beta k with beta in [0, 2], a chunk can overflow (section 5). A
            NaN or an overflow spreads over its whole chunk, even backwards in time.
    Cost: O(T (C^2 + C K + C V + K V)), C^2 for inverting; T / C sequential steps.
    Source: [2] section 3.
    """
    q_TK, k_TK, b_TK, v_TV, state_KV = check_inputs(q, k, b, v, state)
    C = chunk_size or default_chunk_size(k.shape[-1], k.device.type)
    # Section 7: to_chunks, chunked_forward and from_chunks, as one operation for autograd.
    return ChunkedScan.apply(q_TK, k_TK, b_TK, v_TV, state_KV, C)


def to_chunks(x, C):
    """[..., T, K] -> [..., N, C, K], with the last chunk zero-padded; V like K.

    A token with k = 0 and b = 0 writes nothing, so the padding leaves the state unchanged.
    """
    T = x.shape[-2]
    N = (T + C - 1) // C
    if T < N * C:
        x = F.pad(x, (0, 0, 0, N * C - T))
    return x.contiguous().unflatten(-2, (N, C))


def from_chunks(x, T):
    """[..., N, C, K] -> [..., T, K], without the padding."""
    return x.flatten(-3, -2)[..., :T, :].contiguous()


def default_chunk_size(K, device_type):
    """The number of tokens per chunk if the caller gives none."""
    # On a CPU core, chunks of 64 tokens take 2.1 times as long as chunks of 16 for K = 16, and 0.6
    # times as long for K = 128. A GPU waits for each small operation, and C = 64 has few of them.
    if device_type != "cpu":
        return 64
    return 16 if K <= 32 else 32


def delta_rule_chunked(q, k, v, beta, state=None, chunk_size=None):
    """The delta rule, equation (3), by chunks.

    Shapes: q, k [..., T, K] with |k| = 1; v [..., T, V]; beta [..., T] in [0, 2]; state [..., K, V]
            or None (zeros) -> out [..., T, V], state [..., K, V].
    """
    return scan_chunked(q, k, beta_k(k, beta), v, state, chunk_size)


# --- 4. Several Householder steps per token -------------------------------------------------------
#
# DeltaProduct [4] applies R steps of (3) per token and reads once, after the last one. The scan
# sees R tokens for each token, and only the last of their reads is used.
#
# The product of at most R reflections can be any orthogonal matrix A with rank(A - I) <= R (Cartan
# and Dieudonne), and no other, since each factor differs from I by rank 1. (With beta = 0, a step
# changes nothing.) So one token can be a whole permutation. An n-cycle of n slots has rank(A - I) =
# n - 1, since it fixes only the direction (1, ..., 1). So R >= n - 1 if one token may be any
# permutation of n slots.


def delta_product(q, k, v, beta, state=None, chunk_size=None):
    """R steps of the delta rule per token, r = 1 first, then one read.

    Shapes: q [..., T, K]; k [..., T, R, K] with |k| = 1; v [..., T, R, V]; beta [..., T, R] in
            [0, 2]; state [..., K, V] or None (zeros) -> out [..., T, V], state [..., K, V].
    Cost: that of delta_rule_chunked at T R tokens.  Source: [4] section 4.
    """
    # Read after every step, and keep only the last read of each token.
    R = k.shape[-2]
    q_each_step = q.repeat_interleave(R, dim=-2)
    k, b, v = [x.flatten(-3, -2) for x in (k, beta_k(k, beta), v)]
    out, state = scan_chunked(q_each_step, k, b, v, state, chunk_size)
    return out[..., R - 1::R, :].contiguous(), state


# === A first reading ends here ====================================================================
#
# Sections 5 to 7 make the scan precise and fast, and add nothing to what it computes.
# `python scan.py` is at the end.

# --- 5. Numerics ----------------------------------------------------------------------------------
#
# Why unit keys: with |k| = 1, b = beta k and beta <= 2, each factor A = I - b k^T has norm <= 1.
# The entry (i, j) of (I + M)^-1 below the diagonal is -k_i^T A_{i-1} ... A_{j+1} b_j: the write at
# j, carried to i and read there. So no entry exceeds 2. If keys are raw, or b is not parallel to k,
# a step can stretch, and the inverse can grow exponentially in C.
#
# Why a triangular solve: it is stable. With random beta it is as precise as the loop. At worst,
# with beta = 2 and nearly equal keys, it loses a digit or two: in float32, chunks of 64 tokens are
# then off by 3e-4, and the loop by 3e-6 to 1e-5. Multiplying out (I - M)(I + M^2)(I + M^4)... is
# not stable. If keys are similar, the powers of M become huge before they vanish, and they must
# cancel in an inverse whose entries are at most 2. In float32, one key that is repeated with
# beta = 0.9 makes an error of about 1e9 in a chunk of 64.


# --- 6. The hand-written backward -----------------------------------------------------------------
#
# Autograd could differentiate chunked_forward. The hand-written backward saves up to a quarter of
# the time of forward and backward (lab book, `bench`).
#
# Write g(Y) for the gradient of the loss with respect to Y, G_n for that of the state after chunk
# n, and P = tril(Q B^T). Inside chunk n, with S_0 the state before it, (9) and (8) give g(D). Then
# (7), (8) and (9) each add a term to g(S_0), which is G of the chunk before:
#
#     g(D)    = P^T g(O) + B G_n                                                                (10)
#     G_{n-1} = G_n + Q^T g(O) - W^T g(D)                                                       (11)
#
# Only these two run from chunk to chunk, now from the last to the first. Everything else is local.
# Write (5) as (I + M) D = Z and differentiate. X = g(Z) is one product with the saved inverse, and
# g(M) has entries only below the diagonal, as M has:
#
#     X = (I + M)^-T g(D)          g(M) = -tril(X D^T, -1)          g(P) = tril(g(O) D^T)       (12)
#
# Now add one term for each use: V is used in Z = V - K S_0; K in Z and in M = tril(K B^T, -1); B in
# M, in P and in the write (8); Q in P and in the read of S_0:
#
#     g(V) = X                                                                                  (13)
#     g(K) = g(M) B - X S_0^T                                                                   (14)
#     g(B) = g(M)^T K + g(P)^T Q + D G_n^T                                                      (15)
#     g(Q) = g(O) S_0^T + g(P) B                                                                (16)
#
# For the delta rule, autograd carries g(B) on to k and beta, through b = beta k.


def chunked_backward(q_NCK, k_NCK, b_NCK, inverse_NCC, w_NCK, start_NKV, d_NCV, P_NCC,
                     g_out_NCV, G_KV):
    """Equations (10) to (16): the gradients of chunked_forward.

    Shapes: as there; g_out [..., N, C, V] and G [..., K, V] are the gradients of out and of the
            last state -> a list, the gradients of q, k, b, v and the first state.
    """
    # (10) and (11), from the last chunk to the first. Terms without G are computed for all chunks.
    g_d_NCV = P_NCC.mT @ g_out_NCV
    from_out_NKV = q_NCK.mT @ g_out_NCV

    G = []
    for n in reversed(range(k_NCK.shape[-3])):
        g_d_CV = g_d_NCV.select(-3, n)  # a view: += changes g_d_NCV
        g_d_CV += b_NCK.select(-3, n) @ G_KV                                                  # (10)
        G.append(G_KV)
        G_KV = G_KV + from_out_NKV.select(-3, n) - w_NCK.select(-3, n).mT @ g_d_CV            # (11)
    G_NKV = torch.stack(G[::-1], -3)

    X_NCV = inverse_NCC.mT @ g_d_NCV                                                          # (12)
    g_M_NCC = (X_NCV @ d_NCV.mT).tril_(-1).neg_()                                             # (12)
    g_P_NCC = (g_out_NCV @ d_NCV.mT).tril_()                                                  # (12)

    # add_ and sub_ change their left side in place, which saves memory for each sum.
    g_v_NCV = X_NCV                                                                           # (13)
    g_k_NCK = (g_M_NCC @ b_NCK).sub_(X_NCV @ start_NKV.mT)                                    # (14)
    g_b_NCK = (g_M_NCC.mT @ k_NCK).add_(g_P_NCC.mT @ q_NCK).add_(d_NCV @ G_NKV.mT)            # (15)
    g_q_NCK = (g_out_NCV @ start_NKV.mT).add_(g_P_NCC @ b_NCK)                                # (16)
    return [g_q_NCK, g_k_NCK, g_b_NCK, g_v_NCV, G_KV]


# --- 7. For autograd, and for torch.compile -------------------------------------------------------
#
# torch.compile unrolls Python loops, so it would compile a graph for each number of chunks. We
# therefore register two custom operators, which it calls without looking inside, as it calls
# matmul. So one graph serves all lengths above one chunk. A "fake" tells torch.compile the shape
# and the strides of each result. They must not depend on the strides of an input, such as S.mT, so
# the operators first make their inputs contiguous.


# torch knows an operator by its name, for the whole process. So a copy of this file needs another.
OPERATORS = "state_tracking_" + __name__.replace(".", "_")


class ChunkedScan(torch.autograd.Function):
    """chunked_forward for autograd, with chunked_backward as its backward."""

    @staticmethod
    def forward(ctx, q_TK, k_TK, b_TK, v_TV, state_KV, C):
        out_TV, state_KV, *saved = forward_operator(q_TK, k_TK, b_TK, v_TV, state_KV, C)
        ctx.save_for_backward(q_TK, k_TK, b_TK, *saved)
        return out_TV, state_KV

    @staticmethod
    def backward(ctx, g_out_TV, G_KV):
        saved = [x.conj() for x in ctx.saved_tensors]  # if they are complex; real ones stay
        return *backward_operator(*saved, g_out_TV, G_KV), None


@torch.library.custom_op(f"{OPERATORS}::chunked_forward", mutates_args=())
def forward_operator(q: Tensor, k: Tensor, b: Tensor, v: Tensor, state: Tensor,
                     C: int) -> list[Tensor]:
    chunks = [to_chunks(x, C) for x in (q, k, b, v)]
    # Autocast would compute and round every product in half precision.
    with torch.autocast(k.device.type, enabled=False):
        out, state, (inverse, *others) = chunked_forward(*chunks, state.contiguous())
    # The solver writes by columns, so only on MPS does this copy the inverse.
    return [from_chunks(out, k.shape[-2]), state, inverse.mT.contiguous(), *others]


@forward_operator.register_fake
def _(q, k, b, v, state, C):
    *lead, T, K = k.shape
    V = v.shape[-1]
    N = (T + C - 1) // C
    shapes = [(T, V), (K, V), (N, C, C), (N, C, K), (N, K, V), (N, C, V), (N, C, C)]
    return [k.new_empty(*lead, *shape) for shape in shapes]


@torch.library.custom_op(f"{OPERATORS}::chunked_backward", mutates_args=())
def backward_operator(q: Tensor, k: Tensor, b: Tensor, inverse_T: Tensor, w: Tensor, starts: Tensor,
                      d: Tensor, P: Tensor, g_out: Tensor, G: Tensor) -> list[Tensor]:
    T, C = k.shape[-2], P.shape[-1]
    q, k, b, g_out = [to_chunks(x, C) for x in (q, k, b, g_out)]
    with torch.autocast(k.device.type, enabled=False):
        *gradients, g_state = chunked_backward(q, k, b, inverse_T.mT, w, starts, d, P, g_out,
                                               G.contiguous())
    return [*[from_chunks(x, T) for x in gradients], g_state]


@backward_operator.register_fake
def _(q, k, b, inverse_T, w, starts, d, P, g_out, G):
    return [x.new_empty(x.shape) for x in (q, k, b, g_out, G)]


# --- To see before reading: python scan.py --------------------------------------------------------

def show_swap_machine(names="abc"):
    """Two commands, a rotation and a reversal of the variables, swap by swap."""
    n = len(names)
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
            why = f"park {x}" if step < n else f"fetch {spare} into {x}"
            values = [f"{round(value)}" for value in slots.flatten().tolist()]
            print(f"    swap {x} and {spare}':   variables {' '.join(values[:n])}   "
                  f"spares {' '.join(values[n:])}   {why}")


def main(argv=None):
    """The swap machine at work, and then the same random tokens by the loop and by chunks."""
    print("Each name makes one reflection (beta = 2). It swaps a variable and a spare slot, such\n"
          "as a'. At first the variables hold 1 2 3, and the spares nothing (0).")
    show_swap_machine()

    T, K = 1000, 16
    q, k, v = torch.randn(3, T, K).double()
    inputs = F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, 2 * torch.rand(T).double()
    loop, _ = delta_rule_recurrent(*inputs)
    chunks, _ = delta_rule_chunked(*inputs)
    steps = -(-T // default_chunk_size(K, "cpu"))
    print(f"\n{T:,} random tokens: {T:,} sequential steps by the loop, and {steps} by chunks. The "
          f"outputs\ndiffer by at most {(loop - chunks).abs().max():.0e}.")


if __name__ == "__main__":
    main()
