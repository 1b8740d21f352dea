"""Every model is causal, and gives in pieces what it gives whole; a block is what it says."""

import eval as evaluation
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import needs_cuda
from models import (LSTM, MLP, MODELS, AttentionBlock, DeltaBlock, LinRNN, LocalBlock, LSTMBlock,
                    Transformer, unit)

# --- The frame ------------------------------------------------------------------------------------

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("make_model", [
    lambda: LinRNN(11, 12, 3, layers=2, householders=3, conv_width=4),
    lambda: LinRNN(11, 12, 3, conv_width=1), lambda: Transformer(11, 12, 3),
    lambda: LSTM(11, 12, layers=2)])
def test_a_model_is_causal_and_gives_in_ragged_pieces_what_it_gives_whole(make_model, device):
    """Changing the token at t changes the logits at t and none before. State out, state in: random
    cuts change nothing, and the convolution reaches over them, too."""
    model = make_model().double()
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
    """A mixer and an MLP for each layer, each with weights of its own."""
    model = LinRNN(11, 12, 3, layers=2, conv_width=4)
    assert [*map(type, model.blocks)] == [LocalBlock, DeltaBlock, MLP, DeltaBlock, MLP]
    assert len({*model.blocks}) == 5

    tokens = torch.randint(11, (2, 9))
    x = model.embedding.weight[tokens]
    for block in model.blocks:
        x, _ = block(x)
    expected = F.rms_norm(x, (12,)) @ model.unembedding.weight.mT
    torch.testing.assert_close(model(tokens), expected)


def test_models_have_about_as_many_weights_and_none_needs_memory_on_the_meta_device():
    """Shapes only, forward and backward: so a large model can be counted before it is made."""
    counts = []
    for model_class in MODELS.values():
        with torch.device("meta"):
            model = model_class(22)
            logits = model(torch.zeros(2, 40, dtype=torch.long))
        logits.sum().backward()
        assert logits.shape == (2, 40, 22)
        assert all(weight.grad.is_meta for weight in model.parameters())
        counts.append(sum(weight.numel() for weight in model.parameters()))
    assert len(counts) == 3 and max(counts) < 1.15 * min(counts)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_under_autocast_has_a_finite_gradient(name):
    model = MODELS[name](22)
    tokens = torch.randint(22, (2, 40))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    assert logits.dtype == torch.bfloat16
    assert all(weight.grad.isfinite().all() and weight.grad.any() for weight in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_linear_rnn_of_a_half_type_reads_streams_and_makes_a_step(dtype):
    """The scan inside computes in float32, and what goes back to the network has its type."""
    model = LinRNN(22, 16, 2, conv_width=4).to(dtype)
    tokens = torch.randint(22, (2, 40))
    logits = model(tokens)
    _, state = model.stream(tokens[:, :25])
    rest, _ = model.stream(tokens[:, 25:], state)
    assert logits.dtype == rest.dtype == dtype
    assert (rest - logits[:, 25:]).abs().max() < 0.1

    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(weight.grad.isfinite().all() and weight.isfinite().all()
               for weight in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_unit_vector_has_length_one_and_zero_stays_zero(dtype):
    """In each type, whatever the length; of what is nearly zero the direction is lost at worst."""
    x = torch.randn(7, 5).to(dtype).requires_grad_()
    made = unit(x)
    assert made.dtype == dtype and (made.double().norm(dim=-1) - 1).abs().max() < 1e-2
    for short in (0.0, torch.finfo(dtype).tiny):
        x = torch.full((5,), short, dtype=dtype, requires_grad=True)
        made = unit(x)
        made.sum().backward()
        assert made.abs().max() <= 1 and made.isfinite().all() and bool(made.any()) <= (short > 0)
        assert not x.grad.isnan().any()


def test_the_weights_depend_on_the_seed_and_on_nothing_else():
    config = {"task": "traces", "group": "S3", "commands": "full", "model": "lstm", "options": {}}
    one, same, other = [evaluation.make({**config, "seed": seed})[1].embedding.weight
                        for seed in (3, 3, 4)]
    assert torch.equal(one, same) and not torch.equal(one, other)


# --- The blocks -----------------------------------------------------------------------------------

@torch.no_grad()
def test_an_mlp_is_its_docstring():
    """Only what is added passes through the norm."""
    block = MLP(6)
    x = 10 * torch.randn(2, 9, 6)
    hidden = F.gelu(F.rms_norm(x, (6,)) @ block.up.weight.mT + block.up.bias)
    torch.testing.assert_close(block(x)[0], x + hidden @ block.down.weight.mT + block.down.bias)


@torch.no_grad()
def test_a_local_block_is_its_docstring():
    """Token t sees the tokens t - 3 to t, and zeros before the first."""
    block = LocalBlock(6, 4)
    x = 10 * torch.randn(2, 9, 6)
    padded = torch.cat([torch.zeros(2, 3, 6), F.rms_norm(x, (6,))], 1)
    for t in range(9):
        found = torch.einsum("bti,oit->bo", padded[:, t:t + 4], block.conv.weight)
        expected = x[:, t] + F.gelu(found + block.conv.bias) @ block.out.weight.mT
        torch.testing.assert_close(block(x)[0][:, t], expected)


@torch.no_grad()
def test_a_delta_block_is_its_docstring_head_by_head_and_write_by_write():
    """Plain loops over traces, tokens, heads and writes. Keys have length 1, and beta lies in
    [0, beta_max]: so all eigenvalues lie in [1 - beta_max, 1]. Queries have length 1, too. gamma
    scales what is written, not how far is forgotten. Each head is normalised by itself."""
    heads, R, K = 2, 3, 4
    x = torch.randn(2, 5, 8).double()
    block = DeltaBlock(8, heads, 1.7, R).double()
    block.out_norm.weight.copy_(torch.rand(K))
    block.project.weight.mul_(20)  # then beta reaches both its ends

    projected = block.project(F.rms_norm(x, (8,)))
    q, k, v, strengths = projected.split([8, 8 * R, 8 * R, 2 * R * heads], -1)
    q = F.normalize(q.unflatten(-1, (heads, K)), dim=-1)
    k = F.normalize(k.unflatten(-1, (R, heads, K)), dim=-1)
    v = v.unflatten(-1, (R, heads, K))
    strengths = (strengths / 6 + 0.5).clamp(0, 1)  # the hard sigmoid
    assert strengths.min() == 0 and strengths.max() == 1
    beta, gamma = strengths.unflatten(-1, (2, R, heads)).unbind(2)

    out = torch.zeros(2, 5, heads, K).double()
    for b, h in np.ndindex(2, heads):
        S = torch.zeros(K, K).double()
        for t in range(5):
            for r in range(R):
                at = b, t, r, h
                S = S + 1.7 * beta[at] * torch.outer(k[at], gamma[at] * v[at] - k[at] @ S)
            out[b, t, h] = F.rms_norm(q[b, t, h] @ S, (K,), block.out_norm.weight)

    assert (block(x)[0] - x - block.out(out.flatten(2))).abs().max() < 1e-10
    read_with, *_ = block.inputs_of_scan(x)  # out_norm would hide another length
    assert (read_with - q.transpose(1, 2)).abs().max() < 1e-10


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
    """Nothing but the biases of the forget gate left, it keeps sigmoid(2) of each cell."""
    block = LSTMBlock(5)
    x = 10 * torch.randn(3, 4, 5)
    torch.testing.assert_close(block(x)[0], x + block.lstm(F.rms_norm(x, (5,)))[0])

    for name, parameter in block.lstm.named_parameters():
        kept = parameter[5:10].clone() if name.startswith("bias") else 0
        parameter.zero_()[5:10] = kept
    cell = torch.randn(1, 3, 5)
    _, (_, after) = block(torch.randn(3, 1, 5), (torch.zeros(1, 3, 5), cell))
    torch.testing.assert_close(after, torch.tensor(2.0).sigmoid() * cell)
