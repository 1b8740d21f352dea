"""Which architectures can learn to track state?  Three language models behind one interface.

    model(tokens [B, T]) -> logits [B, T, vocabulary]    causal: logits at t depend on tokens <= t
    model.stream(tokens, state=None) -> (logits, state)  the same in pieces, in constant memory (the
                                                         recurrent models; a Transformer has none)

Symbols: B batch, T tokens, H heads, K key and value width of a head,
R writes per token, D model width.

All three share the embedding, the final norm, the output head, the loss and the training loop, and
have comparable parameter counts at their default sizes. Pre-norm residual blocks in the first two:
    linrnn       a local block, then DeltaNet blocks      (the model the project is about); with
                 --codes a non-linear correction between pieces of their scan
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

CLEAN_UP_EVERY = 64  # tokens
WALK = 4  # doses of noise from which a CleanUp learns to bring a state back


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
    steps. State: S, [B, H, K, K]; with a CleanUp, S and the number of tokens read.
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
        self.clean_up = None

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

    def forward(self, x, state=None, visit=None):
        """visit: a function that may see and replace S at every CLEAN_UP_EVERY-th token; the
        CleanUp, if there is one, but in training.
        """
        inputs, visit = self.inputs_of_scan(x), visit or (None if self.training else self.clean_up)
        if visit is None:
            out, state = self.scan(inputs, state)
        else:
            out, state = self.scan_in_pieces(inputs, state or (None, 0), visit)
        return x + self.out(self.out_norm(out).transpose(1, 2).flatten(2)), state

    def scan(self, inputs, S):
        q, k, v, beta = inputs
        if self.householders == 1:
            return delta_rule_chunked(q, k.squeeze(-2), v.squeeze(-2), beta.squeeze(-1), S)
        return delta_product(q, k, v, beta, S)

    def scan_in_pieces(self, inputs, state, visit):
        """The scan, with visit(S) in the place of S whenever the number of tokens read is a
        multiple of CLEAN_UP_EVERY. State: S and this number.
        """
        S, read = state
        first, length, outs = CLEAN_UP_EVERY - read % CLEAN_UP_EVERY, inputs[0].shape[2], []
        cuts = list(range(first, length, CLEAN_UP_EVERY))
        for piece in zip(*[x.tensor_split(cuts, 2) for x in inputs]):
            out, S = self.scan(piece, S)
            outs.append(out)
            read += out.shape[2]
            S = visit(S) if read % CLEAN_UP_EVERY == 0 else S
        return torch.cat(outs, 2), (S, read)


class CleanUp(nn.Module):
    """Takes off a state the errors that a linear recurrence carries for ever: a memory of its
    parts.

    S <- S + g c U^T (softmax(s (R M^T - |m|^2 / 2)) M - R),   R = U S / c: each slot, a row of R,
    moves towards the codes, rows m of M, that it is near to. Not of whole states: those in the
    middle of a command are too many to list, but their slots hold what slots always hold.
    Per head: U [3K, K], M [codes, K], the sharpness s, and the gate g, 0 at first. c is the size of
    all states, not of the S at hand: a correction that does not know how long S should be lets it
    shrink to nothing. Shapes: S [B, H, K, K].
    Source: modern Hopfield networks, Ramsauer et al. 2021 (arXiv 2008.02217).
    """

    def __init__(self, heads, width, codes):
        super().__init__()
        slots = [nn.init.orthogonal_(torch.empty(3 * width, width)) for _ in range(heads)]
        self.slots = nn.Parameter(torch.stack(slots))
        self.codes = nn.Parameter(torch.randn(heads, codes, width))
        self.sharpness = nn.Parameter(torch.ones(heads, 1, 1))
        self.gate = nn.Parameter(torch.zeros(heads, 1, 1))
        self.register_buffer("size", torch.ones(heads, 1, 1))

    def forward(self, S):
        rows = self.slots @ (S / self.size)
        match = rows @ self.codes.mT - self.codes.square().sum(-1).unsqueeze(-2) / 2
        ideal = (self.sharpness * match).softmax(-1) @ self.codes
        return S + self.gate * self.size * (self.slots.mT @ (ideal - rows))

    def denoising_loss(self, S):
        """How far from S it ends, mean of |S' - S|^2 / c^2 over the walk, sum over heads: S takes
        WALK doses of noise as large as itself, each cleaned up before the next.

        A walk, since what a correction leaves of an error meets the next one: a memory that never
        saw its own leftovers lets them grow.
        Source: denoising autoencoders, Vincent et al. 2008; walkback, Bengio et al. 2013 (arXiv
        1305.6663).
        """
        self.size = self.size.lerp(S.square().mean((0, 2, 3)).sqrt().view(-1, 1, 1), 0.1)
        moved, loss = S, 0.0
        for _ in range(WALK):
            moved = self(moved + self.size * torch.randn_like(S))
            loss = loss + ((moved - S) / self.size).square().mean((0, 2, 3)).sum() / WALK
        return loss


def clean_ups(model):
    """The CleanUp layers of a model: one per DeltaNet block, or none."""
    return [module for module in model.modules() if isinstance(module, CleanUp)]


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
    [0, 1]. conv_width = 1 removes the mixing of neighbouring tokens. codes > 0 gives each DeltaNet
    block a CleanUp with so many codes a head. Raises: ValueError outside those ranges.
    """

    def __init__(self, vocab_size, d_model=64, heads=4, layers=1, beta_max=2.0, householders=1,
                 conv_width=8, codes=0):
        super().__init__(vocab_size, d_model, layers)
        check_heads(d_model, heads)
        if not 0 <= beta_max <= 2:
            raise ValueError(f"beta_max must lie in [0, 2], where |1 - beta| <= 1; got {beta_max}")
        if min(householders, conv_width) < 1:
            raise ValueError(f"householders and conv_width must be at least 1; got "
                             f"{householders}, {conv_width}")
        if codes < 0:
            raise ValueError(f"codes must not be negative; got {codes}")
        self.blocks = nn.ModuleList([LocalBlock(d_model, conv_width)])
        for _ in range(layers):
            self.blocks += [DeltaBlock(d_model, heads, beta_max, householders), MLP(d_model, 2)]
        for block in self.blocks[1::2] if codes else []:  # last: the other weights begin as without
            block.clean_up = CleanUp(heads, d_model // heads, codes)

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

    def denoising_loss(self, tokens):
        """That of all CleanUps, on the states that these traces pass through, uncorrected: a loss
        of their weights alone, the network is taken as it is. None if no state falls due.

        The tokens are counted from anywhere: from 0, a state would be met at a few places of the
        line only, where the reveals of these traces put them.
        """
        x, losses = self.embedding(tokens).detach(), []
        start = int(torch.randint(CLEAN_UP_EVERY, ()))
        for block in self.blocks:
            met = []
            with torch.no_grad():
                if isinstance(block, MLP):
                    x = block(x)
                elif isinstance(block, DeltaBlock):
                    x, _ = block(x, (None, start), lambda S: met.append(S) or S)
                else:
                    x, _ = block(x)
            if met:
                losses.append(block.clean_up.denoising_loss(torch.cat(met)))
        return sum(losses) if losses else None


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
