"""Each part differs from the default in what its name says, and in nothing else."""

import re
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from machine import SwapMachine

from data import Group, ReplTask, generator
from eval import make
from experiments import decaying, parts
from experiments.parts import FromOne, LayerOfFla, NotDenser, Part, small_loss
from experiments.reading import correct_after, told_values
from models import MLP, DeltaBlock
from train import Config, lr_scale

# --- The layers -----------------------------------------------------------------------------------

def same(x):
    return x


def hard(x):
    return (x / 6 + 0.5).clamp(0, 1)


@pytest.mark.parametrize("block, feature, gate_of_beta, gate_of_writing", [
    (DeltaBlock, same, hard, hard), (parts.Sigmoids, same, torch.sigmoid, torch.sigmoid),
    (parts.NoWriteGate, same, hard, torch.ones_like), (parts.SiLU, F.silu, hard, hard),
    (parts.Usual, F.silu, torch.sigmoid, torch.ones_like),
    (LayerOfFla, F.silu, torch.sigmoid, torch.ones_like)])
def test_a_layer_has_these_gates_and_features(block, feature, gate_of_beta, gate_of_writing):
    q, k, v = 3 * torch.randn(3, 2, 4, 7, 5).double()
    beta, write_gate = 4 * torch.randn(2, 2, 4, 7, 1).double()
    found = block(8, 2, 1.7, 1).gated(q, k, v, beta, write_gate)
    expected = (F.normalize(feature(q), dim=-1), F.normalize(feature(k), dim=-1),
                gate_of_writing(write_gate) * feature(v), 1.7 * gate_of_beta(beta))
    for part, right in zip(found, expected, strict=True):
        torch.testing.assert_close(part, right)


def test_the_layer_of_fla_mixes_the_last_four_tokens_of_each_channel():
    """By loops over tokens and channels; beta and the write gate are of the token alone. In pieces
    the layer gives what it gives whole."""
    width = 4
    layer, x = LayerOfFla(8, 2, 2.0, 1).double(), torch.randn(3, 20, 8).double()
    plain, mixed = layer.project[0](x), layer.project(x)
    conv = layer.project[1]
    assert mixed.shape == (3, 20 - width + 1, 24 + 4)
    for t in range(mixed.shape[1]):
        for channel in range(24):
            seen = plain[:, t:t + width, channel] @ conv.weight[channel, 0] + conv.bias[channel]
            torch.testing.assert_close(mixed[:, t, channel], seen)
    torch.testing.assert_close(mixed[..., 24:], plain[:, width - 1:, 24:])

    whole, _ = layer(x)
    state, pieces = None, []
    for piece in x.split([1, 2, 11, 6], 1):
        out, state = layer(piece, state)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)


# --- The recipes ----------------------------------------------------------------------------------

@pytest.mark.parametrize("task, spacing, random_values, literals", [
    (ReplTask(Group("S5")), 1, True, True), (NotDenser(Group("S5")), 4, True, True),
    (FromOne(Group("S5")), 1, False, True),
    (ReplTask(Group("S5"), literal_fraction=0.0), 1, True, False)])
def test_a_dense_batch_lacks_one_thing(task, spacing, random_values, literals):
    """Half of the batches have literals, as with train.py's own task."""
    shown = []
    for seed in range(20):
        batch = task.dense_batch(1, 32, 1, generator(seed, "train"))
        assert batch.reveals.sum() == 32 / spacing
        text = task.decode(batch.inputs[0])
        assert text.startswith(task.start_lines()) != random_values
        shown.append(len(re.findall(r" = \d", text)) > 5)
    assert {*shown} == {False, literals}


def trained_by(part, monkeypatch):
    """What run() passes to train()."""
    given = {}

    def train(model, task, config, folder, **options):
        given.update(model=model, task=task, config=config, **options)
        return model, [{"length": 64}]

    monkeypatch.setattr(parts, "train", train)
    monkeypatch.setattr(parts, "summary", lambda model, log: {})
    monkeypatch.setattr(parts, "measure", lambda model, task: {})
    monkeypatch.setitem(parts.BY_NAME, "part", part)
    torch.manual_seed(336)
    parts.run({"part": "part", "seed": 336}, None)
    return given


def test_a_run_is_that_of_train_but_for_its_part(monkeypatch):
    given = trained_by(Part(), monkeypatch)
    assert given["config"] == Config(seed=336) and given["lr_scale"] == lr_scale
    torch.manual_seed(336)
    task, model = make(asdict(Config(seed=336)))
    assert repr(given["model"]) == repr(model)
    for ours, of_train in zip(given["model"].parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, of_train)
    batch = given["task"].training_batch(16, 32, 4, generator(0, "train"))
    assert (batch.inputs == task.training_batch(16, 32, 4, generator(0, "train")).inputs).all()

    given = trained_by(Part({"repeat_fraction": 0.25, "literal_fraction": 0.75, "conv_width": 1},
                            LayerOfFla, FromOne, small_loss, decaying), monkeypatch)
    assert type(given["task"]) == FromOne and given["lr_scale"] == decaying
    assert given["loss"] == small_loss
    assert (given["task"].repeat_fraction, given["task"].literal_fraction) == (0.25, 0.75)
    assert [*map(type, given["model"].blocks)] == [LayerOfFla, MLP]


# --- What a record says ---------------------------------------------------------------------------

@pytest.mark.parametrize("believes", [True, False])
def test_a_record_says_what_a_model_knows(believes, monkeypatch):
    """A machine that never errs, but perhaps reads no value, and counts on 1, 2, 3."""
    given = []

    def of_short_traces(model, task, commands):
        given.append(commands)
        return correct_after(model, task, commands[:, :12])

    def of_literals(model, task, line, *traces):
        assert line == task.literal_line
        return told_values(model, task, line, *traces)

    monkeypatch.setattr(parts, "correct_after", of_short_traces)
    monkeypatch.setattr(parts, "told_values", of_literals)
    monkeypatch.setattr(parts, "evaluate", lambda model, task, *test: {"all": test})
    machine = SwapMachine("S3", believes=believes)
    found = parts.measure(machine, machine.task)
    assert [found[key] == 1 for key in ("first values", "literal")] == [believes] * 2
    assert found["whole"] == found["loop 10"] == 1 and found["(128,16)"] == (128, 16, 256)
    random, loops = given
    assert random.shape == (96, 256, 3) and loops.shape == (120, 128, 3)
    assert (loops[:, 10:] == loops[:, :-10]).all() and (loops[:, 9:] != loops[:, :-9]).any()
