"""Every model is causal, and gives in pieces what it gives whole."""

import pytest
import torch
from conftest import needs_cuda
from models import MODELS, AttentionBlock, DeltaBlock, LocalBlock, LSTMBlock, build, rotate
from torch.nn import functional as F

KINDS = [("linrnn", {"heads": 3, "layers": 2, "conv_width": 4}),
         ("linrnn", {"heads": 3, "householders": 3}), ("linrnn", {"heads": 3, "conv_width": 1}),
         ("transformer", {"heads": 3}), ("lstm", {"layers": 2})]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("name, options", KINDS)
def test_a_model_is_causal_and_gives_in_ragged_pieces_what_it_gives_whole(name, options, device):
    """Changing the token at t changes the logits at t and none before. State out, state in: cuts
    change nothing, and the convolution reaches over them, too."""
    model, tokens = build(name, 11, d_model=12, **options).double(), torch.randint(11, (2, 75))
    whole = model(tokens)
    for t in (1, 37, 74):
        other = tokens.clone()
        other[:, t] = (other[:, t] + 1) % 11
        change = (model(other) - whole).abs().amax((0, 2))
        assert change[:t].max() < 1e-12 and change[t] > 1e-6
    state, pieces = None, []
    for piece in tokens.tensor_split([1, 3, 40, 41], 1):
        logits, state = model.to(device).stream(piece.to(device), state)
        pieces.append(logits.cpu())
    tolerance = 1e-10 if device == "cpu" else 1e-4  # rotary angles are rounded to float32
    assert (torch.cat(pieces, 1) - whole).abs().max() < tolerance


def shapes(state):
    """Of all tensors in a state, however it is nested."""
    if torch.is_tensor(state):
        return [state.shape]
    return [shape for part in state or [] for shape in shapes(part)]


@torch.no_grad()
@pytest.mark.parametrize("name, pieces, grows", [
    ("linrnn", [1_000] + 10 * [9_900], False), ("lstm", [1_000] + 10 * [9_900], False),
    ("transformer", [10, 30], True)])
def test_the_state_of_a_recurrence_does_not_grow_and_that_of_a_transformer_does(
        name, pieces, grows):
    """After 1,000 and after 100,000 tokens the same tensors, and finite logits."""
    model, state, seen = build(name, 11, d_model=8), None, []
    for length in pieces:
        logits, state = model.stream(torch.randint(11, (1, length)), state)
        seen.append(shapes(state))
    assert len(seen[0]) > 1 and (seen[0] != seen[-1]) == grows and logits.isfinite().all()


def test_every_step_has_its_eigenvalues_in_one_minus_beta_max_to_one():
    """Unit keys and queries, beta in [0, beta_max], both ends of it reached, for each arm."""
    for beta_max in (0.0, 1.0, 2.0):
        block = DeltaBlock(8, 2, beta_max, 3)
        q, k, _, beta = block.inputs_of_scan(100 * torch.randn(2, 50, 8))
        assert q.norm(dim=-1).sub(1).abs().max() < 1e-5 and k.norm(dim=-1).sub(1).abs().max() < 1e-5
        assert beta.min() >= 0 and beta.max() <= beta_max
        block.project.weight.data *= 50
        extreme = block.inputs_of_scan(torch.randn(2, 50, 8))[-1]
        assert extreme.min() == 0 and extreme.max() == beta_max


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


def test_the_blocks_are_a_convolution_and_a_causal_softmax_over_rotated_keys():
    """x + W gelu(conv(norm(x))) with torch's own Conv1d, zeros ahead of the first token; attention
    without torch's own function."""
    local, attention = LocalBlock(6, 4).double(), AttentionBlock(6, 1).double()
    x = torch.randn(2, 9, 6).double()
    window = F.pad(local.norm(x), (0, 0, 3, 0))
    assert (local(x)[0] - x - local.out(F.gelu(local.conv(window.mT).mT))).abs().max() < 1e-10
    q, k, v = attention.query_key_value(attention.norm(x)).chunk(3, -1)
    weights = (rotate(q) @ rotate(k).mT / 6**0.5).exp().tril()
    mixed = attention.out(weights / weights.sum(-1, keepdim=True) @ v)
    assert (attention(x)[0] - x - mixed).abs().max() < 1e-10


def test_rotary_scores_depend_on_the_distance_only():
    """q_t . k_s after rotation is a function of t - s; a rotation keeps the norm."""
    q, k = torch.randn(2, 6).double().unsqueeze(1).expand(2, 9, 6)
    scores = rotate(q) @ rotate(k).mT
    assert torch.allclose(scores[1:, 1:], scores[:-1, :-1], atol=1e-5)
    assert scores[8].std() > 0.01 and (rotate(q).norm(dim=-1) - q.norm(dim=-1)).abs().max() < 1e-5


def test_the_parameter_counts_are_within_15_percent_of_one_another():
    counts = [sum(p.numel() for p in build(name, 22).parameters())
              for name in ("linrnn", "transformer", "lstm")]
    assert max(counts) < 1.15 * min(counts)
