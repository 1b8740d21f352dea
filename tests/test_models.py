"""Every model is causal, and gives in pieces what it gives whole; a block is what it says."""

import numpy as np
import pytest
import torch
from conftest import needs_cuda
from data import UserError
from models import (MLP, MODELS, AttentionBlock, DeltaBlock, LinRNN, LocalBlock, LSTMBlock,
                    build)

FRAMES = {
    "linrnn of two layers": lambda: LinRNN(11, 12, 3, layers=2, conv_width=4),
    "linrnn with three writes": lambda: LinRNN(11, 12, 3, householders=3),
    "linrnn without local block": lambda: LinRNN(11, 12, 3, conv_width=1),
    "transformer": lambda: build("transformer", 11, d_model=12, heads=3),
    "lstm of two layers": lambda: build("lstm", 11, d_model=12, layers=2)}


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


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: LocalBlock(6, 4), lambda: MLP(6), lambda: LSTMBlock(6)])
def test_a_block_adds_to_its_input_what_it_makes_of_the_normalised_input(make):
    """Ten times the input, and the block adds the same: the norm takes the scale off. Only what is
    added passes through the norm, not what it is added to."""
    block = make().double()
    x = torch.randn(2, 9, 6).double()
    added = block(x)[0] - x
    assert added.abs().max() > 1e-3
    assert (block(10 * x)[0] - 10 * x - added).abs().max() < 1e-10


def test_a_delta_block_is_its_docstring_head_by_head_and_write_by_write():
    """Plain loops over traces, tokens, heads and writes. Keys and queries have length 1, and beta
    lies in [0, beta_max]: so all eigenvalues lie in [1 - beta_max, 1]. gamma scales what is
    written, not how far is forgotten. Each head is normalised by itself."""
    heads, R, K = 2, 3, 4
    x = torch.randn(2, 5, 8).double()
    block = DeltaBlock(8, heads, 1.7, R).double().requires_grad_(False)
    block.out_norm.weight.copy_(torch.rand(K))
    block.project.weight.mul_(20)  # then beta reaches both its ends

    q, k, v, strengths = block.project(block.norm(x)).split([8, 8 * R, 8 * R, 2 * R * heads], -1)
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
                o = query / query.norm() @ S
                out[b, t, h] = o / (o.square().mean() + torch.finfo(o.dtype).eps).sqrt()

    expected = x + block.out((out * block.out_norm.weight).flatten(2))
    assert (block(x)[0] - expected).abs().max() < 1e-6


@torch.no_grad()
def test_beta_starts_at_its_share_of_beta_max():
    """With the same random weights, 2 times 0.4 lies between the starts 0.5 and 0.9."""
    betas = []
    for start in (0.5, 0.9):
        torch.manual_seed(0)
        block = LinRNN(9, householders=2, beta_start=start).blocks[1]
        *_, beta = block.inputs_of_scan(torch.zeros(1, 1, 64))
        betas.append(beta)
    assert (betas[1] - betas[0] - 2 * 0.4).abs().max() < 1e-6


def test_an_lstm_begins_by_remembering():
    """Nothing but the biases of the forget gate left, it keeps sigmoid(2) of each cell: the 2 is
    where torch has its forget gate, and is not there twice."""
    block = LSTMBlock(5).requires_grad_(False)
    for name, parameter in block.lstm.named_parameters():
        kept = parameter[5:10].clone() if name.startswith("bias") else 0
        parameter.zero_()[5:10] = kept
    cell = torch.randn(1, 3, 5)
    _, (_, after) = block(torch.randn(3, 1, 5), (torch.zeros(1, 3, 5), cell))
    torch.testing.assert_close(after, torch.tensor(2.0).sigmoid() * cell)


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


def test_the_parameter_counts_are_within_15_percent_of_one_another():
    counts = [sum(p.numel() for p in build(name, 22).parameters()) for name in MODELS]
    assert len(counts) >= 3 and max(counts) < 1.15 * min(counts)


def test_to_compile_one_model_leaves_all_others_as_they_are(monkeypatch):
    """compile() keeps torch's compiler out of the scan of this model, and of no other."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    one, other = build("linrnn", 11), build("linrnn", 11)
    before = other.blocks[1].scan
    one.compile()
    assert one.blocks[1].scan is not before and other.blocks[1].scan is before


@pytest.mark.parametrize("name, options, rule", [
    ("gpt", {}, "unknown model 'gpt': expected one of linrnn"),
    ("lstm", {"beta_max": 1}, "lstm has no option beta_max"),
    ("linrnn", {"beta_max": 2.5}, r"beta_max must lie in \[0, 2\]"),
    ("linrnn", {"beta_start": 1.0}, "beta_start must lie between 0 and 1"),
    ("linrnn", {"householders": 0}, "householders must be at least 1"),
    ("linrnn", {"heads": 5}, "heads must divide d_model"),
    ("transformer", {"d_model": 12}, "must be even"),
    ("lstm", {"d_model": 4096, "layers": 40}, "at most 300,000,000")])
def test_what_cannot_be_built_is_refused_before_it_takes_memory(name, options, rule):
    with pytest.raises(UserError, match=rule):
        build(name, 22, **options)
