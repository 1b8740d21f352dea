"""Each part differs from the default in what its name says, and in nothing else."""

from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from machine import SwapMachine

from eval import make
from experiments import parts
from experiments.parts import WithoutSiLU, WithoutWriteGate, WithSiLU
from experiments.reading import correct_after
from models import DeltaBlock, PaperBlock
from train import Config

# --- The layers -----------------------------------------------------------------------------------

def same(x):
    return x


def hard(x):
    return (x / 6 + 0.5).clamp(0, 1)


@pytest.mark.parametrize("layer, feature, gate_of_writing", [
    (DeltaBlock, same, hard), (WithSiLU, F.silu, hard), (WithoutWriteGate, same, torch.ones_like)])
def test_a_layer_has_these_gates_and_features(layer, feature, gate_of_writing):
    q, k, v = 3 * torch.randn(3, 2, 4, 7, 5).double()
    beta, write_gate = 4 * torch.randn(2, 2, 4, 7, 1).double()
    found = layer(64, 4, 2.0, 1).gated(q, k, v, beta, write_gate)
    expected = (F.normalize(feature(q), dim=-1), F.normalize(feature(k), dim=-1),
                gate_of_writing(write_gate) * feature(v), 2 * hard(beta))
    for part, right in zip(found, expected, strict=True):
        torch.testing.assert_close(part, right)


def test_without_silu_the_papers_layer_reads_its_convolution_as_it_is():
    """Then a convolution of the other sign turns q, k and v around, and so the output as well."""
    x = torch.randn(3, 9, 16).double()
    for layer, is_odd in ((WithoutSiLU, True), (PaperBlock, False)):
        block = layer(16, 2, 2.0, 1).double()
        result = block(x)[0] - x
        block.conv.weight.data *= -1
        assert torch.allclose(block(x)[0] - x, -result) == is_odd


# --- A run and its record -------------------------------------------------------------------------

def trained_by(name, monkeypatch):
    """What trained() passes to train()."""
    given = {}

    def train(model, task, config, folder, **options):
        given.update(model=model, config=config)
        return "average", []

    monkeypatch.setattr(parts, "train", train)
    torch.manual_seed(336)
    return given, parts.trained({"part": name, "seed": 336}, None)[1]


def test_a_run_is_that_of_train_but_for_its_part(monkeypatch):
    given, result = trained_by("the default", monkeypatch)
    assert given["config"] == Config(seed=336) and result == "average"
    torch.manual_seed(336)
    _, model = make(asdict(Config(seed=336)))
    assert repr(given["model"]) == repr(model)
    for ours, of_train in zip(given["model"].parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, of_train)

    given, result = trained_by("no averaging", monkeypatch)
    assert given["config"] == Config(seed=336) and result is given["model"]
    given, _ = trained_by("SiLU on q, k, v", monkeypatch)
    assert [type(block) for block in given["model"].blocks][1] is WithSiLU
    given, _ = trained_by("the same without SiLU", monkeypatch)
    assert given["config"] == Config(seed=336, model="deltanet")
    assert [type(block) for block in given["model"].blocks][::2] == [WithoutSiLU] * 2


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
