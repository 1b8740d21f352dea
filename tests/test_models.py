"""A block is what its docstring says; a model is causal, and in pieces what it is as a whole."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import check
from models import (LSTM, MLP, MODELS, AttentionBlock, DeltaBlock, DeltaNet, PaperBlock, LinRNN,
                    LocalBlock, LSTMBlock, Transformer, unit)

# --- 1. Blocks ------------------------------------------------------------------------------------

@torch.no_grad()
def test_a_local_block_is_its_docstring():
    """Token t sees the tokens t - 3 to t, and zeros before the first."""
    block = LocalBlock(6, 4)
    x = 10 * torch.randn(2, 9, 6)
    padded = torch.cat([torch.zeros(2, 3, 6), F.rms_norm(x, (6,))], 1)
    for t in range(9):
        seen = torch.einsum("bti,oit->bo", padded[:, t:t + 4], block.conv.weight)
        expected = x[:, t] + F.gelu(seen + block.conv.bias) @ block.out.weight.mT
        torch.testing.assert_close(block(x)[0][:, t], expected)


@torch.no_grad()
def test_an_mlp_is_its_docstring():
    """Only what is added passes through the norm."""
    block = MLP(6)
    x = 10 * torch.randn(2, 9, 6)
    hidden = F.gelu(F.rms_norm(x, (6,)) @ block.up.weight.mT + block.up.bias)
    torch.testing.assert_close(block(x)[0], x + hidden @ block.down.weight.mT + block.down.bias)


# --- 2. Four mixers -------------------------------------------------------------------------------

@torch.no_grad()
def test_exercise_7_the_inputs_of_the_scan_are_those_of_the_docstring():
    """By loops over traces, heads, tokens and steps. Traps: beta_max scales beta, write_gate scales
    v; all of it in float32, even if the network is in half precision."""
    H, R, K, B, T = 2, 3, 4, 5, 6
    block = DeltaBlock(H * K, H, 1.7, R).double()
    block.project.weight.mul_(20)  # then both strengths reach 0 and 1
    x = torch.randn(B, T, H * K).double()
    check(block.inputs_of_scan(x), inputs_of_scan_by_loops(block, x))
    block, x = block.bfloat16(), x.bfloat16()
    halves = inputs_of_scan_by_loops(block, x)
    check(block.inputs_of_scan(x), {f"{name} (in a bfloat16 network)": part
                                    for name, part in halves.items()}, 1e-4)


def inputs_of_scan_by_loops(block, x):
    """By name. What the network computes is converted at once."""
    H, R, (B, T, D) = block.heads, block.householders, x.shape
    K = D // H
    result = torch.promote_types(x.dtype, torch.float32)
    parts = block.project(block.norm(x)).to(result).split(block.sizes, -1)
    q = torch.zeros(B, H, T, K, dtype=result)
    k, v = torch.zeros(2, B, H, T, R, K, dtype=result)
    beta = torch.zeros(B, H, T, R, dtype=result)
    for b, h, t, r in np.ndindex(B, H, T, R):
        queries, keys, values, strengths = [part[b, t] for part in parts]
        strength, gate = (strengths.view(2, R, H)[:, r, h] / 6 + 0.5).clamp(0, 1)
        q[b, h, t] = F.normalize(queries.view(H, K)[h], dim=0)
        k[b, h, t, r] = F.normalize(keys.view(R, H, K)[r, h], dim=0)
        v[b, h, t, r] = gate * values.view(R, H, K)[r, h]
        beta[b, h, t, r] = 1.7 * strength
    assert beta.min() == 0 and 1.7 - beta.max() < 1e-6
    return {"q": q, "k": k, "v": v, "beta": beta}


@torch.no_grad()
def test_a_delta_block_runs_the_delta_rule_in_each_head_and_normalises_it_alone():
    """Plain loops over traces, heads, tokens and steps."""
    block, x = DeltaBlock(8, 2, 1.7, 3).double(), torch.randn(2, 5, 8).double()
    block.out_norm.weight.copy_(torch.rand(4))
    q, k, v, beta = block.inputs_of_scan(x)
    out = torch.zeros(2, 5, 2, 4).double()
    for b, h in np.ndindex(2, 2):
        S = torch.zeros(4, 4).double()
        for t in range(5):
            for key, value, strength in zip(k[b, h, t], v[b, h, t], beta[b, h, t]):
                S = S + strength * torch.outer(key, value - key @ S)
            out[b, t, h] = F.rms_norm(q[b, h, t] @ S, (4,), block.out_norm.weight)
    assert (block(x)[0] - x - block.out(out.flatten(2))).abs().max() < 1e-10


@torch.no_grad()
def test_the_papers_layer_is_its_docstring():
    """By loops over traces, heads, tokens and steps. Convolution and SiLU come before the norms of
    q and k, beta sees its token alone, and the first tokens look back at zeros."""
    H, R, K, B, T = 2, 3, 4, 2, 6
    D = H * K
    block = PaperBlock(D, H, 1.7, R).double()
    block.out_norm.weight.copy_(torch.rand(K))
    x = torch.randn(B, T, D).double()
    projected = F.rms_norm(x, (D,)) @ block.project.weight.mT
    padded = F.pad(projected[..., :D * (1 + 2 * R)], (0, 0, 3, 0))
    beta = 1.7 * projected[..., -R * H:].sigmoid().view(B, T, R, H)

    out = torch.zeros(B, T, H, K).double()
    for b, h in np.ndindex(B, H):
        S = torch.zeros(K, K).double()
        for t in range(T):
            seen = (padded[b, t:t + 4] * block.conv.weight[:, 0].mT).sum(0)
            query, *others = (seen * seen.sigmoid()).view(1 + 2 * R, H, K)[:, h]
            for r in range(R):
                key, value = others[r] / others[r].norm(), others[R + r]
                S = S + beta[b, t, r, h] * torch.outer(key, value - key @ S)
            out[b, t, h] = F.rms_norm(query / query.norm() @ S, (K,), block.out_norm.weight)
    check([block(x)[0]], {"x + the result": x + out.flatten(2) @ block.out.weight.mT})


@torch.no_grad()
def test_in_half_precision_the_papers_layer_keeps_unit_keys_and_its_type():
    block, x = PaperBlock(16, 2, 2.0, 1).bfloat16(), torch.randn(2, 300, 16).bfloat16()
    out, (_, S) = block(x)
    assert out.dtype == torch.bfloat16 and S.dtype == torch.float32 and S.isfinite().all()


def test_the_attention_block_is_a_causal_softmax_over_rotated_keys():
    """A pair j of a key or query is a complex number, rotated by t 10000^(-2j/K) at token t. The
    real part of a product with a conjugate is the product of two vectors."""
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
def test_an_lstm_block_adds_torchs_lstm_which_starts_by_remembering():
    """With only the biases of the forget gate left, it keeps sigmoid(2) of each cell."""
    block = LSTMBlock(5)
    x = 10 * torch.randn(3, 4, 5)
    torch.testing.assert_close(block(x)[0], x + block.lstm(F.rms_norm(x, (5,)))[0])

    for name, parameter in block.lstm.named_parameters():
        forget = parameter[5:10].clone() if name.startswith("bias") else 0
        parameter.zero_()[5:10] = forget
    cell = torch.randn(1, 3, 5)
    _, (_, after) = block(torch.randn(3, 1, 5), (torch.zeros(1, 3, 5), cell))
    torch.testing.assert_close(after, torch.tensor(2.0).sigmoid() * cell)


def test_a_unit_vector_has_norm_one_and_zero_stays_zero_without_a_nan_in_its_gradient():
    assert (unit(1e-4 * torch.randn(7, 5)).norm(dim=-1) - 1).abs().max() < 1e-6
    x = torch.zeros(5, requires_grad=True)
    unit(x).sum().backward()
    assert not unit(x).any() and x.grad.isfinite().all()


# --- 3. The frame ---------------------------------------------------------------------------------

def test_the_logits_are_those_of_the_blocks_one_after_the_other():
    """A mixer and an MLP for each layer, with separate parameters."""
    model = LinRNN(11, 12, 3, layers=2, conv_width=4)
    assert [*map(type, model.blocks)] == [LocalBlock, DeltaBlock, MLP, DeltaBlock, MLP]
    assert len({*model.blocks}) == 5

    tokens = torch.randint(11, (2, 9))
    x = model.embedding.weight[tokens]
    for block in model.blocks:
        x, _ = block(x)
    expected = F.rms_norm(x, (12,)) @ model.unembedding.weight.mT
    torch.testing.assert_close(model(tokens), expected)


def test_models_have_similar_sizes():
    counts = [sum(parameter.numel() for parameter in model(22).parameters())
              for model in MODELS.values()]
    assert len(counts) == 4 and max(counts) < 1.15 * min(counts)


SMALL = {"two layers of DeltaProduct": lambda: LinRNN(11, 12, 3, layers=2, householders=3),
         "no convolution": lambda: LinRNN(11, 12, 3, conv_width=1),
         "the paper's layer": lambda: DeltaNet(11, 12, 3, householders=3),
         "transformer": lambda: Transformer(11, 12, 3), "lstm": lambda: LSTM(11, 12, layers=2)}


@pytest.mark.parametrize("name", SMALL)
def test_a_token_changes_the_logits_at_its_place_and_none_before(name):
    model, tokens = SMALL[name]().double(), torch.randint(11, (2, 75))
    for t in (1, 37, 74):
        other = tokens.clone()
        other[:, t] = (other[:, t] + 1) % 11
        change = (model(other) - model(tokens)).abs().amax((0, 2))
        assert change[:t].max() < 1e-12 and change[t] > 1e-6


@pytest.mark.parametrize("name", SMALL)
def test_a_text_in_ragged_pieces_has_the_logits_and_gradients_of_the_whole(name):
    """Random cuts change nothing, although the convolution reaches over them, and two streams may
    branch off one state."""
    model, tokens = SMALL[name]().double(), torch.randint(11, (2, 75))
    whole = model(tokens)
    gradient, = torch.autograd.grad(whole.square().sum(), model.embedding.weight)

    cuts = np.random.default_rng(0).permutation(np.arange(2, 75))[:5]
    state, pieces = None, []
    for piece in tokens.tensor_split([1, *sorted(cuts)], 1):
        model.stream(piece, state)
        logits, state = model.stream(piece, state)
        pieces.append(logits)
    logits = torch.cat(pieces, 1)
    assert (logits - whole).abs().max() < 1e-10
    ours, = torch.autograd.grad(logits.square().sum(), model.embedding.weight)
    assert (ours - gradient).abs().max() < 1e-10 * gradient.abs().max()


@pytest.mark.parametrize("name, numbers", [("linrnn", 1472), ("deltanet", 3200),
                                           ("lstm", 540)])
def test_a_state_is_as_large_after_500_tokens_as_after_5(name, numbers):
    model = MODELS[name](22)
    for length in (5, 500):
        _, states = model.stream(torch.randint(22, (1, length)))
        parts = [state if isinstance(state, tuple) else [state] for state in states]
        assert sum(x.numel() for x in sum(map(list, parts), []) if x is not None) == numbers
