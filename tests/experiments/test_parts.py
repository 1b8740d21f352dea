"""Each part differs from the default in what its name says, and in nothing else."""

from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from machine import SwapMachine

from eval import make
from experiments import decaying, parts
from experiments.parts import Layer, LayerOfFla, Part
from experiments.reading import correct_after
from models import MLP
from train import Config, schedule

# --- The layers -----------------------------------------------------------------------------------

def same(x):
    return x


def hard(x):
    return (x / 6 + 0.5).clamp(0, 1)


@pytest.mark.parametrize("layer, feature, gate_of_beta, gate_of_writing", [
    (Layer, same, hard, hard), (LayerOfFla, F.silu, torch.sigmoid, torch.ones_like),
    (parts.PARTS["sigmoids"].layer, same, torch.sigmoid, torch.sigmoid),
    (parts.PARTS["SiLU on q, k, v"].layer, F.silu, hard, hard),
    (parts.PARTS["no write gate"].layer, same, hard, torch.ones_like),
    (parts.PARTS["all three"].layer, F.silu, torch.sigmoid, torch.ones_like)])
def test_a_layer_has_these_gates_and_features(layer, feature, gate_of_beta, gate_of_writing):
    q, k, v = 3 * torch.randn(3, 2, 4, 7, 5).double()
    beta, write_gate = 4 * torch.randn(2, 2, 4, 7, 1).double()
    found = layer().gated(q, k, v, beta, write_gate)
    expected = (F.normalize(feature(q), dim=-1), F.normalize(feature(k), dim=-1),
                gate_of_writing(write_gate) * feature(v), 2 * gate_of_beta(beta))
    for part, right in zip(found, expected, strict=True):
        torch.testing.assert_close(part, right)


def test_the_layer_of_fla_mixes_the_last_four_tokens_of_each_channel():
    """By loops over tokens and channels; beta and the write gate are of the token alone. In pieces
    the layer gives what it gives whole."""
    width = 4
    layer, x = LayerOfFla().double(), torch.randn(3, 20, 64).double()
    plain, mixed = layer.project[0](x), layer.project(x)
    conv = layer.project[1]
    assert mixed.shape == (3, 20 - width + 1, 192 + 8)
    for t in range(mixed.shape[1]):
        for channel in range(0, 192, 7):
            seen = plain[:, t:t + width, channel] @ conv.weight[channel, 0] + conv.bias[channel]
            torch.testing.assert_close(mixed[:, t, channel], seen)
    torch.testing.assert_close(mixed[..., 192:], plain[:, width - 1:, 192:])

    whole, _ = layer(x)
    state, pieces = None, []
    for piece in x.split([1, 2, 11, 6], 1):
        out, state = layer(piece, state)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)


# --- A run and its record -------------------------------------------------------------------------

def trained_by(part, monkeypatch):
    """What trained() passes to train()."""
    given = {}

    def train(model, task, config, folder, **options):
        given.update(model=model, config=config, **options)
        return model, []

    monkeypatch.setattr(parts, "train", train)
    monkeypatch.setitem(parts.PARTS, "part", part)
    torch.manual_seed(336)
    parts.trained({"part": "part", "seed": 336}, None)
    return given


def test_a_run_is_that_of_train_but_for_its_part(monkeypatch):
    given = trained_by(Part(), monkeypatch)
    assert given["config"] == Config(seed=336) and given["schedule"] == schedule
    torch.manual_seed(336)
    _, model = make(asdict(Config(seed=336)))
    assert repr(given["model"]) == repr(model)
    for ours, of_train in zip(given["model"].parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, of_train)

    given = trained_by(Part({"conv_width": 1}, LayerOfFla, decaying), monkeypatch)
    assert given["config"] == Config(seed=336, conv_width=1) and given["schedule"] == decaying
    assert [*map(type, given["model"].blocks)] == [LayerOfFla, MLP]


@pytest.mark.parametrize("believes", [True, False])
def test_a_record_says_what_a_model_knows(believes, monkeypatch):
    """A machine that never errs, but perhaps reads no value, and counts on 1, 2, 3."""
    given = []

    def of_short_traces(model, task, commands, *state):
        given.append(commands.shape)
        return correct_after(model, task, commands[:, :12], *state)

    monkeypatch.setattr(parts, "correct_after", of_short_traces)
    monkeypatch.setattr(parts, "evaluate", lambda model, task, *test: {"all": test})
    machine = SwapMachine("S3", believes=believes)
    found = parts.measure(machine, machine.task)
    assert found == {"literal": believes, "whole": 1, "loop 1": 1, "loop 10": 1,
                     "(128,16)": (128, 16, 256), "(256,32)": (256, 32, 128),
                     "(1024,128)": (1024, 128, 32)}
    assert given == [(240, 8, 3), (96, 256, 3), (120, 128, 3), (120, 128, 3)]
