"""Which architectures can learn to track state?  One frame, four mixers.

    tokens [B, T] --> embedding                           the state of a block:
                          |
                          + <-- local block               the last inputs of its convolution
                          |
           layers times   + <-- mixer   linrnn            DeltaNet: one matrix per head
                          |             transformer       attention: all keys and values so far
                          |             lstm              torch's LSTM: two vectors
                          |             deltanet          the paper's layer: as linrnn, and the
                          |                               last inputs of a convolution inside
                          + <-- MLP                       nothing
                          |
                        norm --> unembedding --> logits [B, T, vocabulary]

The models differ in their *mixer*, the block that brings to each token what it needs from all
tokens before it.

    model(tokens) -> logits                              causal: logits at t depend on tokens <= t
    model.stream(tokens, state=None) -> (logits, state)  the same in pieces: state in, state out

Symbols
    B  batch     D  model width             R  Householder steps per token (option householders)
    T  tokens    H  heads of a mixer        K  width of a head, D / H

Sources: DeltaNet, Schlag et al. 2021 (arXiv 2102.11174), in parallel form Yang et al. 2024 (arXiv
2406.06484); beta up to 2, Grazzi et al. 2025 (arXiv 2411.12537); DeltaProduct, Siems et al. 2025
(arXiv 2502.10297); rotary positions, Su et al. 2021 (arXiv 2104.09864).

`deltanet` has two layers as the paper builds them, and no local block. `linrnn`, the default, has
one layer of ours: it trains in half the time and is more precise in long traces. What differs, and
why (`parts` measures most of it):
    no SiLU on q, k, v         with it, long traces are less precise; we do not know why
    hard sigmoids              with sigmoids, beta = 0 and beta = 2 are only approached
    a write gate               a reflection needs beta = 2 and should write nothing
    one wide convolution       before the layer, so that keys depend on a window of the text

Next: eval.py.
"""

import torch
import torch.nn.functional as F
from torch import nn

from scan import delta_product, upcast

# --- 1. Blocks ------------------------------------------------------------------------------------
#
# A block is a module with forward(x, state=None) -> (x, state), for x of shape [B, T, D]. It adds
# its result to x. The state is all that the block must remember of the tokens so far; None means
# that the text begins here.


class LocalBlock(nn.Module):
    """x + W gelu(conv(norm(x))): each token sees the conv_width - 1 tokens before it.

    The key of a swap depends on a name AND its place in the command. So the convolution is dense
    (every channel sees every other), and by default (eval.make) it has n + 3 tokens: ` = `, the n
    names after it, the end of the line, and the next `>>> `. So it sees where a line ends.
    State: the last conv_width - 1 inputs of the convolution, [B, conv_width - 1, D].
    """

    def __init__(self, d_model, conv_width):
        super().__init__()
        self.norm = nn.RMSNorm(d_model)
        self.conv = nn.Conv1d(d_model, d_model, conv_width)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, state=None):
        # The first tokens look back at zeros, or at the end of the previous piece.
        reach = self.conv.kernel_size[0] - 1
        if state is None:
            state = x.new_zeros(x.shape[0], reach, x.shape[-1])
        window = torch.cat([state, self.norm(x)], 1)  # [B, reach + T, D]

        conv = convolve(self.conv, window)  # [B, T, D]
        return x + self.out(F.gelu(conv)), window[:, -reach:].clone()  # a view would keep it all


def convolve(conv, window):
    """conv(window.mT).mT, but faster: as a 2D convolution of height 1, with the channels last."""
    image = window.mT.unsqueeze(2)  # [B, D, 1, reach + T]
    kernel = conv.weight.unsqueeze(2)  # [D, D, 1, conv_width]
    return F.conv2d(image, kernel, conv.bias, groups=conv.groups).squeeze(2).mT


class MLP(nn.Module):
    """x + W_2 gelu(W_1 norm(x)) for each token alone. State: None."""

    def __init__(self, d_model):
        super().__init__()
        self.norm = nn.RMSNorm(d_model)
        self.up = nn.Linear(d_model, 2 * d_model)
        self.down = nn.Linear(2 * d_model, d_model)

    def forward(self, x, state=None):
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.down(hidden), None


# --- 2. Four mixers -------------------------------------------------------------------------------

class DeltaBlock(nn.Module):
    """DeltaNet: the delta rule in H heads. With R = householders > 1 it is DeltaProduct.

        S <- (I - beta k k^T) S + beta k (write_gate v)^T    R times per token, and then o = S^T q

    |q| = |k| = 1, beta = beta_max hardsigmoid(.), write_gate = hardsigmoid(.). So the eigenvalues
    of each step are 1 and 1 - beta, in [1 - beta_max, 1].
    State: S, [B, H, K, K].
    """

    def __init__(self, d_model, heads, beta_max, householders):
        super().__init__()
        self.heads = heads
        self.beta_max = beta_max
        self.householders = householders

        # One matrix computes q, k, v and the two gates, beta and write_gate.
        self.sizes = [d_model, householders * d_model, householders * d_model,
                      2 * householders * heads]
        self.norm = nn.RMSNorm(d_model)
        self.project = nn.Linear(d_model, sum(self.sizes))
        self.out_norm = nn.RMSNorm(d_model // heads)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def inputs_of_scan(self, x):
        """For delta_product: q [B, H, T, K]; k, v [B, H, T, R, K]; beta [B, H, T, R]."""
        # In float32 like the scan, even if the network is in half precision.
        parts = upcast(self.project(self.norm(x))).split(self.sizes, -1)

        # Cut the features of each token, and move the heads before the tokens, as the scan wants.
        # (The last 1 of the gates makes the heads the axis before the last in all four.)
        R, H, K = self.householders, self.heads, self.sizes[0] // self.heads
        shapes = (H, K), (R, H, K), (R, H, K), (2, R, H, 1)
        q, k, v, gates = [part.unflatten(-1, shape).movedim(-2, 1).contiguous()
                          for part, shape in zip(parts, shapes)]
        beta, write_gate = gates.unbind(-3)  # [B, H, T, R, 1] each
        return self.gated(q, k, v, beta.squeeze(-1), write_gate)

    def gated(self, q, k, v, beta, write_gate):
        """The inputs of the scan, from what the projection gives. A variant overrides this."""
        beta = self.beta_max * F.hardsigmoid(beta)

        # With write_gate = 0, a step with beta = 2 is a pure reflection.
        return unit(q), unit(k), F.hardsigmoid(write_gate) * v, beta

    def forward(self, x, state=None):
        out, state = delta_product(*self.inputs_of_scan(x), state)  # [B, H, T, K]
        out = self.out_norm(out.to(x.dtype))
        out = out.transpose(1, 2).flatten(2)  # [B, T, D]
        return x + self.out(out), state


class PaperBlock(nn.Module):
    """The paper's layer: DeltaNet as flash-linear-attention (fla) builds it, with allow_neg_eigval.

        q, k, v = silu(conv(W x)), then |q| = |k| = 1        beta = beta_max sigmoid(w x)
        S <- (I - beta k k^T) S + beta k v^T                 R times per token, and then o = S^T q

    conv: each channel sees its own last four values, and at the start of a text zeros.
    State: the last three W x, [B, 3, (1 + 2 R) D], and S, [B, H, K, K].
    fla differs in its eps (1e-6 in |q| and |k|, 1e-5 in the norm of the output, after q / sqrt K),
    and draws all weights from N(0, .02). For R > 1 this is its GatedDeltaProduct, without
    gates and with expand_v=1.
    Source: github.com/fla-org/flash-linear-attention/blob/bc3b101d/fla/layers/delta_net.py#L77-L289
    """

    activation = staticmethod(F.silu)

    def __init__(self, d_model, heads, beta_max, householders):
        super().__init__()
        self.heads = heads
        self.beta_max = beta_max
        self.householders = householders

        # One matrix for W and w. (fla has four; with them Muon was slower, on one seed.)
        channels = (1 + 2 * householders) * d_model  # a query, R keys and R values
        self.sizes = [channels, householders * heads]
        self.norm = nn.RMSNorm(d_model)
        self.project = nn.Linear(d_model, sum(self.sizes), bias=False)
        self.conv = nn.Conv1d(channels, channels, 4, groups=channels, bias=False)
        self.out_norm = nn.RMSNorm(d_model // heads)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, state=None):
        recent, S = state or (None, None)
        qkv, beta = self.project(self.norm(x)).split(self.sizes, -1)
        if recent is None:
            recent = qkv.new_zeros(len(x), 3, qkv.shape[-1])
        window = torch.cat([recent, qkv], 1)
        qkv = upcast(self.activation(convolve(self.conv, window)))  # as above, in float32

        # Cut the features of each token, and move the heads before the tokens, as the scan wants.
        R, H = self.householders, self.heads
        qkv = qkv.unflatten(-1, ((1 + 2 * R) * H, -1)).transpose(1, 2)  # [B, (1 + 2 R) H, T, K]
        q, k, v = qkv.split([H, R * H, R * H], 1)
        k, v = (part.unflatten(1, (R, H)).movedim(1, -2) for part in (k, v))  # [B, H, T, R, K]
        beta = upcast(beta).unflatten(-1, (R, H)).movedim(-1, 1)  # [B, H, T, R]

        beta = self.beta_max * beta.sigmoid()
        out, S = delta_product(unit(q), unit(k), v, beta, S)  # [B, H, T, K]
        out = self.out_norm(out.to(x.dtype)).transpose(1, 2).flatten(2)  # [B, T, D]
        return x + self.out(out), (window[:, -3:].clone(), S)


def unit(x):
    """x / |x| along the last axis. Norms below 1e-6 are clamped, so the zero vector stays zero."""
    return x * x.square().sum(-1, keepdim=True).clamp_min(1e-12).rsqrt()


class AttentionBlock(nn.Module):
    """Causal softmax attention with rotary positions, by torch's scaled_dot_product_attention.

    State: the rotated keys and the values of all tokens so far, [2, B, H, T, K].
    """

    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(d_model)
        self.query_key_value = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, state=None):
        qkv = self.query_key_value(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.movedim(-2, 1).unbind(-2)  # [B, H, T, K] each

        # Positions count from the start of the text, not of this piece.
        T = x.shape[1]
        past = 0 if state is None else state.shape[3]
        q = rotate(q, past)
        kv = torch.stack([rotate(k, past), v])  # [2, B, H, T, K]
        if past:
            kv = torch.cat([state, kv], 3)  # [2, B, H, past + T, K]

        # A token sees all earlier pieces, and this one up to itself.
        seen = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past)
        mixed = F.scaled_dot_product_attention(q, *kv, attn_mask=seen)
        return x + self.out(mixed.transpose(1, 2).flatten(2)), kv


def rotate(x, start=0):
    """Rotary positions: rotate the pair (x_j, x_{j + K/2}) at token t by t 10000^(-2j/K) radians.

    So q_t . k_s depends on positions only through t - s. The first token of x is number `start`.
    Shapes: x [..., T, K], K even.  Source: Su et al. 2021, 3.2.
    """
    T, K = x.shape[-2:]
    frequencies = 10000.0 ** (-torch.arange(0, K, 2, device=x.device) / K)  # [K / 2]
    angles = torch.arange(start, start + T, device=x.device).unsqueeze(-1) * frequencies
    cos = angles.cos().to(x.dtype)
    sin = angles.sin().to(x.dtype)

    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class LSTMBlock(nn.Module):
    """torch's LSTM, a non-linear recurrence. State: hidden and cell, [1, B, D] each.

    The forget gate starts at sigmoid(2) = 0.88. At torch's default, 0.5, the 13 tokens of one S5
    command would shrink a value to 2^-13 (Jozefowicz, Zaremba, Sutskever 2015, section 2.2).
    """

    def __init__(self, d_model):
        super().__init__()
        self.norm = nn.RMSNorm(d_model)
        self.lstm = nn.LSTM(d_model, d_model, batch_first=True)
        # torch adds two biases, and its gates are in the order input, forget, cell, output.
        with torch.no_grad():
            self.lstm.bias_ih_l0[d_model:2 * d_model] = 2
            self.lstm.bias_hh_l0[d_model:2 * d_model] = 0

    def forward(self, x, state=None):
        mixed, state = self.lstm(self.norm(x), state)
        return x + mixed, state


# --- 3. The frame ---------------------------------------------------------------------------------

class LanguageModel(nn.Module):
    """The frame. make_mixer() makes a block for each layer; conv_width=1 omits the local block."""

    def __init__(self, vocab_size, d_model, layers, conv_width, make_mixer):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.norm = nn.RMSNorm(d_model)
        self.unembedding = nn.Linear(d_model, vocab_size, bias=False)

        self.blocks = nn.ModuleList()
        if conv_width > 1:
            self.blocks.append(LocalBlock(d_model, conv_width))
        for _ in range(layers):
            self.blocks.append(make_mixer())
            self.blocks.append(MLP(d_model))

    def stream(self, tokens, state=None):
        """Logits, and the state from which to continue: a list with one entry per block."""
        states = list(state or [None] * len(self.blocks))  # a copy: the caller may reuse its own
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x, states[i] = block(x, states[i])
        return self.unembedding(self.norm(x)), states

    def forward(self, tokens):
        logits, _ = self.stream(tokens)
        return logits


class LinRNN(LanguageModel):
    """DeltaNet. With beta_max=1 it is the classical one, whose eigenvalues are in [0, 1]."""

    def __init__(self, vocab_size, d_model=64, heads=4, layers=1, beta_max=2.0, householders=1,
                 conv_width=8):
        super().__init__(vocab_size, d_model, layers, conv_width,
                         lambda: DeltaBlock(d_model, heads, beta_max, householders))


class DeltaNet(LanguageModel):
    """DeltaNet with the paper's layers. Two learn; a single one did on 1 of 3 seeds (`parts`)."""

    def __init__(self, vocab_size, d_model=64, heads=4, layers=2, beta_max=2.0, householders=1):
        super().__init__(vocab_size, d_model, layers, 1,
                         lambda: PaperBlock(d_model, heads, beta_max, householders))


class Transformer(LanguageModel):
    """Attention, in two layers."""

    def __init__(self, vocab_size, d_model=56, heads=4, layers=2, conv_width=8):
        super().__init__(vocab_size, d_model, layers, conv_width,
                         lambda: AttentionBlock(d_model, heads))


class LSTM(LanguageModel):
    """Its four gates need many parameters, so it is narrower."""

    def __init__(self, vocab_size, d_model=60, layers=1, conv_width=8):
        super().__init__(vocab_size, d_model, layers, conv_width, lambda: LSTMBlock(d_model))


MODELS = {"linrnn": LinRNN, "deltanet": DeltaNet, "transformer": Transformer,
          "lstm": LSTM}  # the names of --model
