"""Which architectures can learn to track state?  Three language models behind one interface.

    model(tokens [B, T]) -> logits [B, T, vocabulary]    causal: logits at t depend on tokens <= t
    model.stream(tokens, state=None) -> (logits, state)  the same in pieces, in constant memory (the
                                                         recurrent models; a Transformer has none)

Symbols: B batch, T tokens, H heads, K key and value width of a head,
R writes per token, D model width.

All three share the embedding, the final norm, the output head, the loss and the training loop, and
have comparable parameter counts at their default sizes. Pre-norm residual blocks in the first two:
    linrnn       a local block, then DeltaNet blocks      (the model the project is about)
    transformer  attention blocks with rotary positions
    lstm         torch's own LSTM

Sources: DeltaNet, Yang et al. 2024 (arXiv 2406.06484); beta up to 2, Grazzi et al. 2025 (arXiv
2411.12537); several writes, Siems et al. 2025 (arXiv 2502.10297); rotary positions, Su et al. 2021
(arXiv 2104.09864).

Deviations from DeltaNet as usually built, and why: no SiLU on q, k, v (it makes keys positive, and
an exchange needs a negative entry); hard sigmoids, so that beta = 0 and beta = 2 are reached and
not merely approached; a write strength apart from beta; one wide convolution ahead of one DeltaNet
layer in place of a short one inside each layer.

Does NOT include: dropout, decay gates, key-value caches, weight tying.

Next: train.py.
"""

import inspect
import itertools

import torch
import torch.nn.functional as F
from torch import nn

from scan import delta_product, delta_rule_chunked


class LocalBlock(nn.Module):
    """Mixes each token with the conv_width - 1 before it, so that a key can depend on the place in
    a line.

    x + W gelu(conv(norm(x))). The right-hand name of a full command stands up to 2n + 1 tokens
    after the prompt, but only n after the `=`: a width of n + 1 suffices. State: the last
    conv_width - 1 inputs of the convolution, [B, conv_width - 1, D].
    """

    def __init__(self, d_model, conv_width):
        super().__init__()
        self.norm = nn.RMSNorm(d_model)
        self.conv = nn.Conv1d(d_model, d_model, conv_width)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, past=None):
        normed = self.norm(x)
        reach = self.conv.kernel_size[0] - 1
        if past is None:
            past = normed.new_zeros(len(x), reach, x.shape[-1])
        window = torch.cat([past, normed], 1)
        # As an image of height 1 whose channels stand last in memory, as they do here: torch then
        # convolves without reordering, and gelu meets a contiguous tensor.
        conv = F.conv2d(window.mT.unsqueeze(2), self.conv.weight.unsqueeze(2), self.conv.bias)
        mixed = F.gelu(conv.squeeze(2).mT)
        return x + self.out(mixed), window[:, window.shape[1] - reach:]


class DeltaBlock(nn.Module):
    """The delta rule, H heads side by side: S <- (I - beta k k^T) S + beta k (gamma v)^T, then
    o = S^T q.

    |q| = |k| = 1 and beta = beta_max hardsigmoid(.), so every step has its eigenvalues in
    [1 - beta_max, 1]. The write strength gamma = hardsigmoid(.) is apart from beta, since a
    reflection needs beta = 2 and should write nothing. With householders R > 1 a token makes R such
    steps. State: S, [B, H, K, K].
    """

    def __init__(self, d_model, heads, beta_max, householders):
        super().__init__()
        self.heads, self.beta_max, self.householders = heads, beta_max, householders
        self.norm = nn.RMSNorm(d_model)
        # One matrix for all that a token decides: q, then k and v of each write,
        # then beta and gamma.
        self.sizes = [d_model, householders * d_model, householders * d_model,
                      2 * householders * heads]
        self.project = nn.Linear(d_model, sum(self.sizes))
        self.out_norm = nn.RMSNorm(d_model // heads)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def inputs_of_scan(self, x):
        """q [B, H, T, K]; k, v [B, H, T, R, K]; beta [B, H, T, R]: what each head does at each
        token.
        """
        q, k, v, strengths = self.project(self.norm(x)).split(self.sizes, -1)
        per_head = (self.heads, -1)
        per_write = (self.householders, *per_head)
        q = F.normalize(q.unflatten(-1, per_head), dim=-1).transpose(1, 2)
        k = F.normalize(k.unflatten(-1, per_write), dim=-1).permute(0, 3, 1, 2, 4)
        v = v.unflatten(-1, per_write).permute(0, 3, 1, 2, 4)
        strengths = F.hardsigmoid(strengths).unflatten(-1, (2, self.householders, -1))
        beta, gamma = strengths.permute(2, 0, 4, 1, 3)
        return q, k, gamma.unsqueeze(-1) * v, self.beta_max * beta

    def forward(self, x, state=None):
        q, k, v, beta = self.inputs_of_scan(x)
        if self.householders == 1:
            out, state = delta_rule_chunked(q, k.squeeze(-2), v.squeeze(-2),
                                            beta.squeeze(-1), state)
        else:
            out, state = delta_product(q, k, v, beta, state)
        return x + self.out(self.out_norm(out).transpose(1, 2).flatten(2)), state


class MLP(nn.Module):
    """x + W_2 gelu(W_1 norm(x)), each token by itself."""

    def __init__(self, d_model, expansion):
        super().__init__()
        self.norm = nn.RMSNorm(d_model)
        self.up = nn.Linear(d_model, expansion * d_model)
        self.down = nn.Linear(expansion * d_model, d_model)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class AttentionBlock(nn.Module):
    """Causal softmax attention with rotary positions (torch's scaled_dot_product_attention)."""

    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(d_model)
        self.query_key_value = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        batch, length, d_model = x.shape
        qkv = self.query_key_value(self.norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.transpose(1, 3).unbind(2)  # [B, H, T, K] each
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def rotate(x):
    """Rotary positions: turns the pair (x_j, x_{j + K/2}) at token t by the angle t 10000^(-2j/K).

    So that q_t . k_s depends on t - s only. Shapes: x [..., T, K], K even.
    Source: Su et al. 2021, 3.2.
    """
    length, width = x.shape[-2:]
    rates = 10000.0 ** (-torch.arange(0, width, 2, device=x.device) / width)
    angles = torch.arange(length, device=x.device).unsqueeze(-1) * rates
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class LanguageModel(nn.Module):
    """What the three share: embedding -> blocks -> norm -> logits."""

    def __init__(self, vocab_size, d_model, layers):
        super().__init__()
        if vocab_size < 1 or d_model < 1 or layers < 1:
            raise ValueError(f"vocab_size, d_model and layers must be at least 1; got "
                             f"{vocab_size}, {d_model}, {layers}")
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.norm = nn.RMSNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)


class LinRNN(LanguageModel):
    """A local block, then `layers` times a DeltaNet block and an MLP.

    beta_max in [0, 2]: 2 allows the eigenvalue -1, 1 is the classical DeltaNet with eigenvalues in
    [0, 1]. conv_width = 1 removes the mixing of neighbouring tokens. Raises: ValueError outside
    those ranges.
    """

    def __init__(self, vocab_size, d_model=64, heads=4, layers=1, beta_max=2.0, householders=1,
                 conv_width=8):
        super().__init__(vocab_size, d_model, layers)
        check_heads(d_model, heads)
        if not 0 <= beta_max <= 2:
            raise ValueError(f"beta_max must lie in [0, 2], where |1 - beta| <= 1; got {beta_max}")
        if min(householders, conv_width) < 1:
            raise ValueError(f"householders and conv_width must be at least 1; got "
                             f"{householders}, {conv_width}")
        self.blocks = nn.ModuleList([LocalBlock(d_model, conv_width)])
        for _ in range(layers):
            self.blocks += [DeltaBlock(d_model, heads, beta_max, householders), MLP(d_model, 2)]

    def stream(self, tokens, state=None):
        """Logits, and the state to go on from. state: one entry per block with a memory, or None.
        """
        x = self.embedding(tokens)
        old = iter(state) if state is not None else itertools.repeat(None)
        new = []
        for block in self.blocks:
            if isinstance(block, MLP):
                x = block(x)
            else:
                x, memory = block(x, next(old))
                new.append(memory)
        return self.head(self.norm(x)), new

    def forward(self, tokens):
        return self.stream(tokens)[0]


class Transformer(LanguageModel):
    """`layers` times an attention block and an MLP, rotary positions."""

    def __init__(self, vocab_size, d_model=64, heads=4, layers=2):
        super().__init__(vocab_size, d_model, layers)
        check_heads(d_model, heads)
        if d_model // heads % 2:
            raise ValueError(f"rotary positions turn pairs: the head width d_model / heads must be "
                             f"even; got {d_model} / {heads}")
        self.blocks = nn.Sequential(*[block for _ in range(layers) for block in
                                      (AttentionBlock(d_model, heads), MLP(d_model, 4))])

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


class LSTM(LanguageModel):
    """torch's own LSTM: the non-linear recurrence, trained token by token."""

    def __init__(self, vocab_size, d_model=96, layers=1):
        super().__init__(vocab_size, d_model, layers)
        self.lstm = nn.LSTM(d_model, d_model, layers, batch_first=True)

    def stream(self, tokens, state=None):
        """Logits, and the state (hidden, cell) to go on from."""
        x, state = self.lstm(self.embedding(tokens), state)
        return self.head(self.norm(x)), state

    def forward(self, tokens):
        return self.stream(tokens)[0]


def check_heads(d_model, heads):
    if heads < 1 or d_model % heads:
        raise ValueError(f"heads must divide d_model; got d_model {d_model}, heads {heads}")


MODELS = {"linrnn": LinRNN, "transformer": Transformer, "lstm": LSTM}


def options_of(name):
    """The options a model takes, with their defaults."""
    parameters = inspect.signature(MODELS[name]).parameters
    return {key: p.default for key, p in parameters.items() if p.default is not p.empty}


def build(name, vocab_size, **options):
    """A model of the registry. Raises: ValueError for an unknown name or option, or a bad value."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: expected one of {', '.join(MODELS)}")
    unknown = sorted(set(options) - set(options_of(name)))
    if unknown:
        raise ValueError(f"{name} has no option {', '.join(unknown)}; it takes "
                         f"{', '.join(options_of(name))}")
    return MODELS[name](vocab_size, **options)


def choose_device(name):
    """The torch device of that name; auto takes cuda, then mps, then cpu. Raises: ValueError."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
             "cpu": True}
    there = [kind for kind in there if there[kind]]
    if name != "auto" and name not in there:
        raise ValueError(f"--device {name} is not there; this machine has {', '.join(there)}")
    return there[0] if name == "auto" else name
