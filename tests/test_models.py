"""Every model is causal, learns, and, where it can be streamed, gives in pieces what it gives
whole."""

import resource

import numpy as np
import pytest
import torch
from data import Group, ReplTask
from models import (CLEAN_UP_EVERY, MODELS, CleanUp, DeltaBlock, LocalBlock, build, clean_ups,
                    options_of, rotate)
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


def with_codes(gate, layers=2):
    """The same weights without codes and with, the gates as told; both in evaluation."""
    models = []
    for codes in (0, 5):
        torch.manual_seed(0)
        options = {**SMALL["linrnn"], "layers": layers, "codes": codes}
        models.append(build("linrnn", 11, **options).double().eval())
    for memory in clean_ups(models[1]):
        torch.nn.init.constant_(memory.gate, gate)
    return models


def test_a_clean_up_with_its_gate_shut_changes_nothing_and_nor_does_any_in_training():
    """Gate 0, as at first: the logits of the model without codes. Gate 0.3: other logits, but not
    in training."""
    tokens = torch.randint(11, (2, 150))
    plain, shut = with_codes(0.0)
    _, cleaned = with_codes(0.3)
    expected = plain(tokens)
    assert (shut(tokens) - expected).abs().max() < 1e-10
    assert (cleaned(tokens) - expected).abs().max() > 1e-3
    assert (cleaned.train()(tokens) - expected).abs().max() < 1e-10


@pytest.mark.parametrize("cuts", [[1, 3, 40, 41], [63, 64, 65], [64, 128], [10, 11, 140]])
def test_a_stream_with_clean_ups_is_the_whole_wherever_it_is_cut(cuts):
    """Before, at and after the places where the state is corrected, and anywhere."""
    _, model = with_codes(0.3)
    tokens = torch.randint(11, (2, 150))
    state, pieces = None, []
    for piece in tokens.tensor_split(cuts, 1):
        logits, state = model.stream(piece, state)
        pieces.append(logits)
    assert (torch.cat(pieces, 1) - model(tokens)).abs().max() < 1e-10


def test_the_state_is_corrected_after_every_so_many_tokens_and_not_between():
    """One layer: after CLEAN_UP_EVERY tokens the correction of what a model without it holds; a
    token earlier just what that holds; a token later, that token from the corrected state."""
    plain, model = with_codes(0.3, layers=1)
    tokens, clean_up = torch.randint(11, (2, CLEAN_UP_EVERY + 1)), clean_ups(model)[0]
    for length in (CLEAN_UP_EVERY - 1, CLEAN_UP_EVERY, CLEAN_UP_EVERY + 1):
        state, read = model.stream(tokens[:, :length])[1][1]
        past = plain.stream(tokens[:, :min(length, CLEAN_UP_EVERY)])[1]
        if length >= CLEAN_UP_EVERY:
            past[1] = clean_up(past[1])
        if length > CLEAN_UP_EVERY:
            past = plain.stream(tokens[:, -1:], past)[1]
        assert read == length and (state - past[1]).abs().max() < 1e-10


def test_a_memory_learns_from_states_at_any_place_and_the_network_from_none(monkeypatch):
    """Two layers: over 40 calls its loss is that of one or of two states a trace of 100 tokens, of
    those that the model without corrections passes through, met at many places; and it reaches the
    weights of the memories alone. A trace of one token has none, but where the count begins at the
    last place."""
    plain, model = with_codes(0.3)
    tokens, met = torch.randint(11, (2, 100)), []
    monkeypatch.setattr(CleanUp, "denoising_loss",
                        lambda memory, S: met.append(S) or memory(S).square().mean())
    for _ in range(40):
        loss = model.train().denoising_loss(tokens)
    assert {len(S) for S in met} == {2, 4}
    passed = [plain.stream(tokens[:, :t])[1][1] for t in range(1, 101)]
    places = {next(t for t, S in enumerate(passed) if (S - states[:2]).abs().max() < 1e-10)
              for states in met[::2]}  # of the first layer
    assert len(places) > 10
    loss.backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    assert reached == {name for name, _ in model.named_parameters() if "clean_up" in name}
    assert None in {model.denoising_loss(tokens[:, :1]) for _ in range(3)}


def test_a_sharp_clean_up_with_its_gate_at_one_puts_the_nearest_code_in_the_place_of_each_slot():
    """U^T U = I, so with g = 1 nothing of S is left: c U^T times, for each row of R = U S / c, the
    code that is least far from it, long or short."""
    clean_up = CleanUp(1, 5, 4).requires_grad_(False)
    clean_up.gate.fill_(1)
    clean_up.size.fill_(0.7)
    clean_up.sharpness.fill_(1e4)
    clean_up.codes.mul_(torch.tensor([0.1, 0.5, 1.0, 2.0]).unsqueeze(-1))
    S = torch.randn(4, 1, 5, 5)
    nearest = torch.cdist(clean_up.slots @ S / 0.7, clean_up.codes).argmin(-1)
    wanted = 0.7 * clean_up.slots.mT @ clean_up.codes[0][nearest]
    assert len(nearest.unique()) > 2
    torch.testing.assert_close(clean_up(S), wanted)


def test_the_denoising_loss_is_measured_in_units_of_the_size_of_the_states():
    """A shut gate takes nothing off: after i of four doses of noise the error is i, in the mean
    2.5, for each head, whatever the size, once that has been learned."""
    clean_up = CleanUp(2, 6, 3)
    states = torch.tensor([3.0, 0.1]).view(2, 1, 1) * torch.randn(400, 2, 6, 6)
    for _ in range(60):
        loss = clean_up.denoising_loss(states)
    assert (clean_up.size.flatten() / torch.tensor([3.0, 0.1]) - 1).abs().max() < 0.05
    assert abs(loss.item() - 5.0) < 0.2


def test_a_clean_up_learns_the_states_from_noise_alone():
    """The 24 permutation matrices of S4, turned in a space of 8: cleaned up after each of 100 doses
    of noise every state is held; without, most are lost."""
    torch.manual_seed(0)
    turn = torch.linalg.qr(torch.randn(2, 8, 8))[0]
    elements = torch.from_numpy(Group("S4").elements)
    states = 30 * turn[0][:, :4] @ F.one_hot(elements).float() @ turn[1][:4]
    clean_up = CleanUp(1, 8, 8)
    optimizer = torch.optim.AdamW(clean_up.parameters(), lr=0.02, weight_decay=0)
    for _ in range(300):
        optimizer.zero_grad()
        clean_up.denoising_loss(states[torch.randint(24, (128, 1))]).backward()
        optimizer.step()

    def held(step):
        moved = states.unsqueeze(1)
        with torch.no_grad():
            for _ in range(100):
                moved = step(moved + 1.5 * torch.randn_like(moved))
        nearest = torch.cdist(moved.flatten(1), states.flatten(1)).argmin(1)
        return (nearest == torch.arange(24)).float().mean()

    assert held(clean_up) == 1 and held(lambda S: S) < 0.8


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
            ("linrnn", {"householders": 0}, "at least 1"), ("linrnn", {"codes": -1}, "negative"),
            ("transformer", {"layers": 0}, "at least"), ("lstm", {"layers": 0}, "at least"),
            ("transformer", {"d_model": 12}, "even")]:
        with pytest.raises(ValueError, match=words):
            build(name, 22, **options)
    assert options_of("linrnn")["beta_max"] == 2.0
