"""Every model is causal, and gives in pieces what it gives whole; a block is what it says."""

import math

import models
import numpy as np
import pytest
import scan
import torch
import torch.nn.functional as F
from conftest import needs_cuda
from models import (LSTM, MLP, MODELS, AttentionBlock, DeltaBlock, LinRNN, LocalBlock, LSTMBlock,
                    Transformer)

FRAMES = {
    "linrnn of two layers": lambda: LinRNN(11, 12, 3, layers=2, conv_width=4),
    "linrnn with three writes": lambda: LinRNN(11, 12, 3, householders=3),
    "linrnn without local block": lambda: LinRNN(11, 12, 3, conv_width=1),
    "transformer": lambda: Transformer(11, 12, 3),
    "lstm of two layers": lambda: LSTM(11, 12, layers=2)}


# --- The frame ------------------------------------------------------------------------------------

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("make", FRAMES)
def test_a_model_is_causal_and_gives_in_ragged_pieces_what_it_gives_whole(make, device):
    """Changing the token at t changes the logits at t and none before. State out, state in: random
    cuts change nothing, and the convolution reaches over them, too."""
    model = FRAMES[make]().double()
    tokens = torch.randint(11, (2, 75))
    whole = model(tokens)

    for t in (1, 37, 74):
        other = tokens.clone()
        other[:, t] = (other[:, t] + 1) % 11
        change = (model(other) - whole).abs().amax((0, 2))
        assert change[:t].max() < 1e-12 and change[t] > 1e-6

    model.to(device)
    for seed in range(3):
        cuts = np.random.default_rng(seed).permutation(np.arange(2, 75))[:5]
        state, pieces = None, []
        for piece in tokens.tensor_split([1, *sorted(cuts)], 1):
            logits, state = model.stream(piece.to(device), state)
            pieces.append(logits.cpu())
        tolerance = 1e-10 if device == "cpu" else 1e-4  # rotary angles are rounded to float32
        assert (torch.cat(pieces, 1) - whole).abs().max() < tolerance


def test_the_logits_are_those_of_the_blocks_one_after_the_other():
    """Embedding, local block, a mixer and an MLP for each layer, each with weights of its own, a
    norm, and the unembedding."""
    model = LinRNN(11, 12, 3, layers=2, conv_width=4)
    kinds = [type(block) for block in model.blocks]
    assert kinds == [LocalBlock, DeltaBlock, MLP, DeltaBlock, MLP]
    assert len({id(block) for block in model.blocks}) == 5

    tokens = torch.randint(11, (2, 9))
    x = model.embedding.weight[tokens]
    for block in model.blocks:
        x, _ = block(x)
    expected = F.rms_norm(x, (12,)) @ model.unembedding.weight.mT
    torch.testing.assert_close(model(tokens), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_needs_no_memory_to_be_tried_on_the_meta_device(name):
    """Shapes only, forward and backward: so a large model can be counted before it is made."""
    with torch.device("meta"):
        model = MODELS[name](22)
        tokens = torch.zeros(2, 40, dtype=torch.long)
    logits = model(tokens)
    logits.sum().backward()
    assert logits.shape == (2, 40, 22) and logits.is_meta
    assert all(weight.grad.is_meta for weight in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_step_under_autocast_is_finite_and_scans_in_float32(name, monkeypatch):
    """bfloat16 for the products of the model; the state of the delta rule keeps its digits."""
    seen = set()
    real = scan.chunked_forward

    def forward(*arguments):
        results = real(*arguments)
        seen.update(x.dtype for x in (*arguments, *results))
        return results

    monkeypatch.setattr(scan, "chunked_forward", forward)
    model = MODELS[name](22)
    tokens = torch.randint(22, (2, 40))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    assert logits.dtype == torch.bfloat16
    assert seen == ({torch.float32} if name == "linrnn" else set())
    for weight in model.parameters():
        assert weight.grad.isfinite().all() and weight.grad.any()


def test_the_weights_depend_on_the_seed_and_on_nothing_else():
    config = {"task": "traces", "group": "S3", "commands": "full", "model": "lstm",
              "options": {"d_model": 8}, "seed": 3}
    weights = []
    for seed in (3, 3, 4):
        torch.rand(seed)  # what was drawn before does not matter
        _, model = models.make(config | {"seed": seed})
        weights.append(model.embedding.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_the_parameter_counts_are_within_15_percent_of_one_another():
    counts = [sum(p.numel() for p in MODELS[name](22).parameters()) for name in MODELS]
    assert len(counts) == 3 and max(counts) < 1.15 * min(counts)


# --- The blocks -----------------------------------------------------------------------------------

def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def rms_norm(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


@torch.no_grad()
def test_an_mlp_is_its_docstring():
    """x + W_2 gelu(W_1 norm(x)). Only what is added passes through the norm."""
    block = MLP(6).double()
    x = 10 * torch.randn(2, 9, 6).double()
    hidden = gelu(rms_norm(x) @ block.up.weight.mT + block.up.bias)
    expected = x + hidden @ block.down.weight.mT + block.down.bias
    assert (block(x)[0] - expected).abs().max() < 1e-12


@torch.no_grad()
def test_a_local_block_is_its_docstring():
    """x + W gelu(conv(norm(x))): token t sees the tokens t - 3 to t, and zeros before the first."""
    block = LocalBlock(6, 4).double()
    x = 10 * torch.randn(2, 9, 6).double()
    normed = rms_norm(x)
    for t in range(9):
        found = block.conv.bias.expand(2, 6)
        for back in range(min(4, t + 1)):
            found = found + normed[:, t - back] @ block.conv.weight[:, :, 3 - back].mT
        expected = x[:, t] + gelu(found) @ block.out.weight.mT
        assert (block(x)[0][:, t] - expected).abs().max() < 1e-12


def test_a_delta_block_is_its_docstring_head_by_head_and_write_by_write():
    """Plain loops over traces, tokens, heads and writes. Keys and queries have length 1, and beta
    lies in [0, beta_max]: so all eigenvalues lie in [1 - beta_max, 1]. gamma scales what is
    written, not how far is forgotten. Each head is normalised by itself."""
    heads, R, K = 2, 3, 4
    x = torch.randn(2, 5, 8).double()
    block = DeltaBlock(8, heads, 1.7, R).double().requires_grad_(False)
    block.out_norm.weight.copy_(torch.rand(K))
    block.project.weight.mul_(20)  # then beta reaches both its ends

    q, k, v, strengths = block.project(rms_norm(x)).split([8, 8 * R, 8 * R, 2 * R * heads], -1)
    strengths = (strengths / 6 + 0.5).clamp(0, 1)  # the hard sigmoid
    assert strengths.min() == 0 and strengths.max() == 1

    out = torch.zeros(2, 5, heads, K).double()
    for b in range(2):
        for h in range(heads):
            S = torch.zeros(K, K).double()
            for t in range(5):
                for r in range(R):
                    i = r * heads + h
                    at = slice(i * K, i * K + K)
                    key = k[b, t, at] / k[b, t, at].norm()
                    beta, gamma = 1.7 * strengths[b, t, i], strengths[b, t, R * heads + i]
                    S = S + beta * torch.outer(key, gamma * v[b, t, at] - key @ S)
                query = q[b, t, h * K:h * K + K]
                out[b, t, h] = rms_norm(query / query.norm() @ S)

    expected = x + block.out((out * block.out_norm.weight).flatten(2))
    assert (block(x)[0] - expected).abs().max() < 1e-10


def test_the_attention_block_is_a_causal_softmax_over_rotated_keys():
    """The pair j of a key or a query is a complex number, turned by the angle t 10000^(-2j/K) at
    token t. The real part of a product with a conjugate is the product of two vectors."""
    block = AttentionBlock(6, 1).double()
    x = torch.randn(2, 9, 6).double()
    q, k, v = block.query_key_value(block.norm(x)).chunk(3, -1)
    j, t = torch.arange(3), torch.arange(9).unsqueeze(-1)
    turn = torch.exp(1j * t * 10000.0 ** (-2 * j / 6))
    q, k = (torch.complex(*vector.chunk(2, -1)) * turn for vector in (q, k))

    weights = ((q @ k.mH).real / 6**0.5).exp().tril()
    mixed = block.out(weights / weights.sum(-1, keepdim=True) @ v)
    assert (block(x)[0] - x - mixed).abs().max() < 1e-5  # the angles are rounded to float32


@torch.no_grad()
def test_an_lstm_block_adds_torchs_lstm_which_begins_by_remembering():
    """Nothing but the biases of the forget gate left, it keeps sigmoid(2) of each cell: the 2 is
    where torch has its forget gate, and is not there twice."""
    block = LSTMBlock(5)
    x = 10 * torch.randn(3, 4, 5)
    torch.testing.assert_close(block(x)[0], x + block.lstm(rms_norm(x))[0])

    for name, parameter in block.lstm.named_parameters():
        kept = parameter[5:10].clone() if name.startswith("bias") else 0
        parameter.zero_()[5:10] = kept
    cell = torch.randn(1, 3, 5)
    _, (_, after) = block(torch.randn(3, 1, 5), (torch.zeros(1, 3, 5), cell))
    torch.testing.assert_close(after, torch.tensor(2.0).sigmoid() * cell)
