"""Which architectures can learn to track state?  One frame, three mixers.

    model(tokens [B, T]) -> logits [B, T, vocabulary]    causal: logits at t depend on tokens <= t
    model.stream(tokens, state=None) -> (logits, state)  the same in pieces: state out, state in

Embedding -> local block -> layers x [mixer, MLP] -> norm -> logits. Only the mixer differs:
    linrnn       the delta rule     state: one matrix a head       (the model the project is about)
    transformer  causal attention   state: all keys and values so far
    lstm         torch's own LSTM   state: two vectors

Symbols
    B  batch     D  model width             R  writes per token (the option householders)
    T  tokens    H  heads of a mixer        K  width of a head, D / H

Sources: DeltaNet, Yang et al. 2024 (arXiv 2406.06484); beta up to 2, Grazzi et al. 2025 (arXiv
2411.12537); several writes, Siems et al. 2025 (arXiv 2502.10297); rotary positions, Su et al. 2021
(arXiv 2104.09864).

Deviations from the paper, and from DeltaNet as usually built, and why:
    74 thousand parameters     and one layer, not 265 million and 18: a minute on a CPU core
    no SiLU on q, k, v         it makes keys positive, and an exchange needs a negative entry
    hard sigmoids              beta = 0 and beta = 2 are reached, not merely approached
    a write strength gamma     a reflection needs beta = 2 and should write nothing
    one wide convolution       ahead of all layers, in place of a short one inside each layer

Next: eval.py.
"""

import torch
import torch.nn.functional as F
from torch import nn

from scan import delta_product


# --- 1. Blocks ------------------------------------------------------------------------------------
#
# A block is a module with forward(x, state=None) -> (x, state), for x of shape [B, T, D]. It adds
# to x what it has found. The state is all that the block must remember of the tokens so far; None
# stands for the start of a text.


class LocalBlock(nn.Module):
    """x + W gelu(conv(norm(x))): each token sees the conv_width - 1 tokens before it.

    So a name learns its place in the line, and the key of the delta rule can depend on that place.
    State: the last conv_width - 1 inputs of the convolution, [B, conv_width - 1, D].
    """

    def __init__(self, d_model, conv_width):
        super().__init__()
        self.norm = nn.RMSNorm(d_model)
        # Every output channel sees every input channel: which name AND which place, together.
        self.conv = nn.Conv1d(d_model, d_model, conv_width)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, state=None):
        # What the first tokens of this piece look back at: zeros, or the end of the last piece.
        normed = self.norm(x)
        reach = self.conv.kernel_size[0] - 1  # tokens that it looks back
        if state is None:
            window = F.pad(normed, (0, 0, reach, 0))
        else:
            window = torch.cat([state, normed], 1)  # [B, reach + T, D]

        # An image of height 1 whose channels stand last in memory, as they do here. torch then
        # convolves without reordering, and gelu meets a contiguous tensor.
        image = window.mT.unsqueeze(2)  # [B, D, 1, reach + T]
        kernel = self.conv.weight.unsqueeze(2)  # [D, D, 1, conv_width]
        conv = F.conv2d(image, kernel, self.conv.bias).squeeze(2).mT  # [B, T, D]

        # Slicing from the end by length: with reach 0 the slice [-0:] would be everything.
        return x + self.out(F.gelu(conv)), window[:, window.shape[1] - reach:]


class MLP(nn.Module):
    """x + W_2 gelu(W_1 norm(x)), each token by itself. It has no state."""

    def __init__(self, d_model):
        super().__init__()
        self.norm = nn.RMSNorm(d_model)
        self.up = nn.Linear(d_model, 2 * d_model)
        self.down = nn.Linear(2 * d_model, d_model)

    def forward(self, x, state=None):
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.down(hidden), None


# --- 2. Three mixers ------------------------------------------------------------------------------

class DeltaBlock(nn.Module):
    """The delta rule, H heads side by side.

    S <- (I - beta k k^T) S + beta k (gamma v)^T, then o = S^T q, with |q| = |k| = 1,
    beta = beta_max hardsigmoid(.) and gamma = hardsigmoid(.). So the eigenvalues of every write lie
    in [1 - beta_max, 1]. A token makes R = householders such writes.
    State: S, [B, H, K, K].
    """

    def __init__(self, d_model, heads, beta_max, householders):
        super().__init__()
        check_heads(d_model, heads)
        if not 0 <= beta_max <= 2:
            raise ValueError(f"beta_max must lie in [0, 2], where |1 - beta| <= 1; got {beta_max}")
        self.heads = heads
        self.beta_max = beta_max
        self.householders = householders

        # One matrix for all that a token decides: q, then k and v of each write, then beta, gamma.
        self.sizes = [d_model, householders * d_model, householders * d_model,
                      2 * householders * heads]
        self.norm = nn.RMSNorm(d_model)
        self.project = nn.Linear(d_model, sum(self.sizes))
        self.out_norm = nn.RMSNorm(d_model // heads)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def inputs_of_scan(self, x):
        """For delta_product: q [B, H, T, K]; k, v [B, H, T, R, K]; beta [B, H, T, R]."""
        q, k, v, strengths = self.project(self.norm(x)).split(self.sizes, -1)
        heads = self.heads
        writes = self.householders

        # Heads ahead of tokens, as the scan reads them.
        q = q.unflatten(-1, (heads, -1))  # [B, T, H, K]
        q = q.transpose(1, 2).contiguous()  # [B, H, T, K]

        k = k.unflatten(-1, (writes, heads, -1))  # [B, T, R, H, K]
        k = k.permute(0, 3, 1, 2, 4).contiguous()  # [B, H, T, R, K]

        v = v.unflatten(-1, (writes, heads, -1))  # [B, T, R, H, K]
        v = v.permute(0, 3, 1, 2, 4).contiguous()  # [B, H, T, R, K]

        # Unit keys: then I - beta k k^T has the eigenvalue 1 - beta along k. (The length of a query
        # would be lost in out_norm anyway.)
        q = unit(q)
        k = unit(k)

        # gamma lets a write of beta = 2 be a pure reflection, which puts nothing into S.
        strengths = F.hardsigmoid(strengths)
        strengths = strengths.unflatten(-1, (2, writes, heads))  # [B, T, 2, R, H]
        beta, gamma = strengths.permute(2, 0, 4, 1, 3)  # [B, H, T, R] each
        return q, k, gamma.unsqueeze(-1) * v, self.beta_max * beta

    def forward(self, x, state=None):
        out, state = delta_product(*self.inputs_of_scan(x), state)  # [B, H, T, K]
        out = self.out_norm(out.to(x.dtype))  # a model of half types has a scan in float32
        out = out.transpose(1, 2).flatten(2)  # [B, T, D]
        return x + self.out(out), state


def unit(x):
    """x / |x| along the last axis. What is shorter than 1e-6 is divided by 1e-6, so 0 stays 0.

    In float16 the square of 1e-6 would be 0, and so the length is taken in float32 at least.
    """
    squares = x.to(torch.promote_types(x.dtype, torch.float32)).square()
    squared_length = squares.sum(-1, keepdim=True).clamp_min(1e-12)
    return (x * squared_length.rsqrt()).to(x.dtype)


def check_heads(d_model, heads):
    """Raises: ValueError unless the heads share the width evenly."""
    if heads < 1 or d_model % heads:
        raise ValueError(f"heads must divide d_model; got d_model {d_model}, heads {heads}")


class AttentionBlock(nn.Module):
    """Causal softmax attention with rotary positions, by torch's scaled_dot_product_attention.

    State: the rotated keys and the values of all tokens so far, [2, B, H, T, K].
    """

    def __init__(self, d_model, heads):
        super().__init__()
        check_heads(d_model, heads)
        if d_model // heads % 2:
            raise ValueError("rotary positions turn pairs, so the width of a head must be even; "
                             f"got d_model {d_model} / heads {heads}")
        self.heads = heads

        self.norm = nn.RMSNorm(d_model)
        self.query_key_value = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, state=None):
        qkv = self.query_key_value(self.norm(x))
        qkv = qkv.unflatten(-1, (3, self.heads, -1))  # [B, T, 3, H, K]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, H, T, K] each

        # A token has its place from the start of the text, not from that of its piece.
        T = x.shape[1]
        past = 0 if state is None else state.shape[3]
        q = rotate(q, past)
        kv = torch.stack([rotate(k, past), v])  # [2, B, H, T, K]

        if past:
            kv = torch.cat([state, kv], 3)  # [2, B, H, past + T, K]

        # A token sees all the past, and of its own piece what is not later than itself.
        seen = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past)
        mixed = F.scaled_dot_product_attention(q, *kv, attn_mask=seen if past else None,
                                               is_causal=not past)  # [B, H, T, K]
        return x + self.out(mixed.transpose(1, 2).flatten(2)), kv


def rotate(x, start=0):
    """Rotary positions: turns the pair (x_j, x_{j + K/2}) at token t by the angle t 10000^(-2j/K).

    So q_t . k_s depends on t - s only. The first token of x is token number `start`.
    Shapes: x [..., T, K], K even.  Source: Su et al. 2021, 3.2.
    """
    T, K = x.shape[-2:]
    rates = 10000.0 ** (-torch.arange(0, K, 2, device=x.device) / K)  # [K / 2]
    angles = torch.arange(start, start + T, device=x.device).unsqueeze(-1) * rates
    cos = angles.cos().to(x.dtype)
    sin = angles.sin().to(x.dtype)

    # The pair j is made of the entries j and j + K/2.
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class LSTMBlock(nn.Module):
    """torch's own LSTM, the non-linear recurrence. State: hidden and cell, [1, B, D] each.

    The forget gate begins at sigmoid(2) = 0.88. At torch's own 0.5 a value would have shrunk to
    2^-13 after one S5 command (Jozefowicz, Zaremba, Sutskever 2015, section 2.2).
    """

    def __init__(self, d_model):
        super().__init__()
        self.norm = nn.RMSNorm(d_model)
        self.lstm = nn.LSTM(d_model, d_model, batch_first=True)
        # torch adds two biases, and orders the gates: in, forget, cell, out.
        with torch.no_grad():
            self.lstm.bias_ih_l0[d_model:2 * d_model] = 2
            self.lstm.bias_hh_l0[d_model:2 * d_model] = 0

    def forward(self, x, state=None):
        mixed, state = self.lstm(self.norm(x), state)
        return x + mixed, state


# --- 3. The frame ---------------------------------------------------------------------------------

class LanguageModel(nn.Module):
    """Embedding -> local block -> layers x [mixer, MLP] -> norm -> logits.

    make_mixer() makes a block of its own for each layer. conv_width 1 leaves out the local block.
    For n variables it is n + 3: one side of a command has n + 1 tokens, and two are to spare.
    """

    def __init__(self, vocab_size, d_model, layers, conv_width, make_mixer):
        super().__init__()
        # Both ends: symbols to vectors, vectors to a score for each symbol.
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.norm = nn.RMSNorm(d_model)
        self.unembedding = nn.Linear(d_model, vocab_size, bias=False)

        # The MLP after each mixer works on each token by itself.
        self.blocks = nn.ModuleList()
        if conv_width > 1:
            self.blocks.append(LocalBlock(d_model, conv_width))
        for _ in range(layers):
            self.blocks.append(make_mixer())
            self.blocks.append(MLP(d_model))

    def stream(self, tokens, state=None):
        """Logits, and the state to go on from: an entry for each of self.blocks."""
        old_states = state or [None] * len(self.blocks)
        new_states = []

        x = self.embedding(tokens)
        for block, old in zip(self.blocks, old_states):
            x, new = block(x, old)
            new_states.append(new)
        return self.unembedding(self.norm(x)), new_states

    def forward(self, tokens):
        logits, _ = self.stream(tokens)
        return logits


class LinRNN(LanguageModel):
    """The delta rule as mixer.

    beta_max: 2 allows the eigenvalue -1, 1 is the classical DeltaNet with eigenvalues in [0, 1].
    householders: writes per token, R. heads must divide d_model, here and in the Transformer.
    Raises: ValueError for a beta_max or heads that do not fit.
    """

    def __init__(self, vocab_size, d_model=64, heads=4, layers=1, beta_max=2.0, householders=1,
                 conv_width=8):
        super().__init__(vocab_size, d_model, layers, conv_width,
                         lambda: DeltaBlock(d_model, heads, beta_max, householders))


class Transformer(LanguageModel):
    """Attention as mixer: two narrower layers, since one layer cannot compose what it looked up."""

    def __init__(self, vocab_size, d_model=56, heads=4, layers=2, conv_width=8):
        super().__init__(vocab_size, d_model, layers, conv_width,
                         lambda: AttentionBlock(d_model, heads))


class LSTM(LanguageModel):
    """torch's LSTM as mixer. Its four gates are large, so its width is a little smaller."""

    def __init__(self, vocab_size, d_model=60, layers=1, conv_width=8):
        super().__init__(vocab_size, d_model, layers, conv_width, lambda: LSTMBlock(d_model))


MODELS = {"linrnn": LinRNN, "transformer": Transformer, "lstm": LSTM}  # by the names of --model
