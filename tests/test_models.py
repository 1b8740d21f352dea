"""Every model is causal, learns, and, where it can be streamed, gives in pieces what it gives
whole."""

import resource

import numpy as np
import pytest
import torch
from data import Group, ReplTask
from models import MODELS, DeltaBlock, LocalBlock, build, options_of, rotate
from torch.nn import functional as F

SMALL = {"linrnn": {"d_model": 12, "heads": 3, "layers": 2, "conv_width": 4},
         "transformer": {"d_model": 12, "heads": 3}, "lstm": {"d_model": 12, "layers": 2}}
RECURRENT = [("linrnn", {}), ("linrnn", {"householders": 3}), ("linrnn", {"conv_width": 1}),
             ("lstm", {})]


@pytest.mark.parametrize("name", MODELS)
def test_logits_depend_on_no_later_token(name):
    """Changing the token at t changes the logits at t and none before."""
    model = build(name, 11, **SMALL[name]).double()
    tokens = torch.randint(11, (2, 45))
    before = model(tokens)
    for t in (1, 17, 44):
        other = tokens.clone()
        other[:, t] = (other[:, t] + 1) % 11
        change = (model(other) - before).abs().amax((0, 2))
        assert change[:t].max() < 1e-12 and change[t] > 1e-6


@pytest.mark.parametrize("name, options", RECURRENT)
def test_a_stream_in_ragged_pieces_is_the_whole(name, options):
    """State out, state in: cuts at 1, 3, 40, 41 change nothing (the convolution reaches over them
    too)."""
    model = build(name, 11, **{**SMALL[name], **options}).double()
    tokens = torch.randint(11, (2, 75))
    state, pieces = None, []
    for piece in tokens.tensor_split([1, 3, 40, 41], 1):
        logits, state = model.stream(piece, state)
        pieces.append(logits)
    assert (torch.cat(pieces, 1) - model(tokens)).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["linrnn", "lstm"])
def test_a_million_tokens_run_through_without_growth(name):
    """One stream: memory after 1,000,000 tokens is that after the first 100,000."""
    model, state = build(name, 11, d_model=8, **({"heads": 1} if name == "linrnn" else {})), None
    with torch.no_grad():
        for i in range(50):
            logits, state = model.stream(torch.randint(11, (1, 20_000)), state)
            if i == 4:
                start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert logits.isfinite().all()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start < 30_000  # KiB


@pytest.mark.parametrize("name", MODELS)
def test_each_model_overfits_a_handful_of_traces(name):
    """Four fixed traces: the loss falls below what any model of random programs can reach."""
    model = build(name, 22)
    tokens = torch.from_numpy(ReplTask(Group("S5")).sample(4, 2, 2, np.random.default_rng(0))[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def test_every_step_has_its_eigenvalues_in_one_minus_beta_max_to_one():
    """Unit keys and queries, beta in [0, beta_max], both ends of it reached, for each arm."""
    for beta_max in (0.0, 1.0, 2.0):
        block = DeltaBlock(8, 2, beta_max, 3)
        q, k, _, beta = block.inputs_of_scan(100 * torch.randn(2, 50, 8))
        block.project.weight.data *= 50
        extreme = block.inputs_of_scan(torch.randn(2, 50, 8))[-1]
        assert q.norm(dim=-1).sub(1).abs().max() < 1e-5 and k.norm(dim=-1).sub(1).abs().max() < 1e-5
        assert beta.min() >= 0 and beta.max() <= beta_max
        assert extreme.min() == 0 and extreme.max() == beta_max


def test_the_local_block_is_its_convolution():
    """x + W gelu(conv(norm(x))) with torch's own Conv1d, zeros ahead of the first token."""
    block, x = LocalBlock(6, 4).double(), torch.randn(2, 9, 6, dtype=torch.float64)
    window = F.pad(block.norm(x), (0, 0, 3, 0))
    expected = x + block.out(F.gelu(block.conv(window.mT).mT))
    assert (block(x)[0] - expected).abs().max() < 1e-10


def test_rotary_scores_depend_on_the_distance_only():
    """q_t . k_s after rotation is a function of t - s; a rotation keeps the norm."""
    q, k = torch.randn(2, 6, dtype=torch.float64).unsqueeze(1).expand(2, 9, 6)
    scores = rotate(q) @ rotate(k).mT
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        assert (diagonal - diagonal[0]).abs().max() < 1e-5
    assert (rotate(q).norm(dim=-1) - q.norm(dim=-1)).abs().max() < 1e-5


def test_the_default_sizes_are_comparable():
    """Parameter counts within a factor of 1.6 of one another."""
    counts = [sum(p.numel() for p in build(name, 22).parameters()) for name in MODELS]
    assert max(counts) < 1.6 * min(counts)


def test_bad_options_are_refused_with_the_rule():
    for name, options, words in [
            ("gru", {}, "unknown model 'gru'"), ("lstm", {"heads": 2}, "no option heads"),
            ("linrnn", {"d_model": 10, "heads": 4}, "heads must divide d_model"),
            ("linrnn", {"beta_max": 2.5}, r"\[0, 2\]"), ("linrnn", {"beta_max": -1}, r"\[0, 2\]"),
            ("linrnn", {"householders": 0}, "at least 1"),
            ("transformer", {"layers": 0}, "at least"), ("lstm", {"layers": 0}, "at least"),
            ("transformer", {"d_model": 12}, "even")]:
        with pytest.raises(ValueError, match=words):
            build(name, 22, **options)
    assert options_of("linrnn")["beta_max"] == 2.0
