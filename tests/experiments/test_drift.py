"""The law by which errors grow; and a projection restores the values, where it is due."""

import re

import numpy as np
import pytest
import torch
from machine import SwapMachine

from data import Group, ReplTask, generator
from experiments import drift
from experiments.drift import Projected, errors, exponent, write_heads
from experiments.inside import LinearImage, fit_image
from experiments.reading import evaluate_stream, read_heads, repeat
from models import LinRNN

# --- The law --------------------------------------------------------------------------------------

@pytest.mark.parametrize("left_behind", [0.1, -0.1])
def test_the_error_of_a_state_is_its_largest_entry_beside_the_permutation(left_behind):
    """By hand, for a head that keeps 0.9 of the values and leaves a part of them behind."""
    class Leaving(SwapMachine):
        def execute(self, commands, S):
            return 0.9 * super().execute(commands, S) + left_behind * S

    task = ReplTask(Group("S4"))
    image, _ = fit_image(SwapMachine("S4", believes=True), task)
    E = errors(Leaving("S4"), task, image, np.array([[[1, 0, 2, 3]]]))
    P = np.eye(4)[[1, 0, 2, 3]] - 0.25
    seen = 0.9 * P + left_behind * (np.eye(4) - 0.25)
    scale = (seen * P).sum() / (P * P).sum()
    assert E.item() == pytest.approx(np.abs(seen / scale - P).max())


def test_errors_of_a_repeated_command_grow_faster():
    """The law is the median over the traces."""
    machine = SwapMachine("S4", 0.01)
    drawn = Group("S4").draw((60, 32), generator(0, "test"))
    commands = {"random": drawn, "repeated": repeat(drawn[:, :1], 32)}
    found = drift.law(machine, machine.task, commands)
    assert exponent(found["random"], 32) < 0.7 < exponent(found["repeated"], 32)
    image, _ = fit_image(machine, machine.task, random_values=False)
    assert np.allclose(found["random"], np.median(errors(machine, machine.task, image, drawn), 0))


# --- The projection -------------------------------------------------------------------------------

def test_projections_restore_exact_tracking_where_the_noisy_head_alone_fails():
    """In the second half of the commands the head alone is often wrong; projected it never is.
    Twelve values of twelve make 9e12 states, 1,024 of them in the fit."""
    machine = SwapMachine("S12", 0.015, believes=True)
    image, found = fit_image(machine, machine.task)
    assert found["directions"] == 12 * 11
    machine.believes = False  # or reveals would help
    alone = evaluate_stream(machine, machine.task, 80, 10, traces=4)
    assert np.mean(alone["by_position"][4:]) < 0.7
    projected = Projected(machine, machine.task, image)
    assert evaluate_stream(projected, machine.task, 80, 10, traces=4)["perfect"] == 1


def test_a_stream_is_that_of_the_model_projected_where_it_is_due():
    """The oracle reads token by token, trace by trace, and projects where a command has settled.
    The two traces have other such places; ragged pieces do not matter."""
    task = ReplTask(Group("S3"))
    model = LinRNN(len(task.vocab), d_model=12, heads=2).double()
    states = torch.randn(30, 1, 6, 6, dtype=torch.float64)
    image = LinearImage([(1, 0)], states, Group("S3").elements.repeat(5, 0))
    traces = [task.test_batch(1, 12, spacing, generator(0, "valid")).inputs for spacing in (1, 4)]
    tokens = torch.from_numpy(np.vstack([trace[:, :110] for trace in traces]))

    expected = []
    for row in tokens:
        text, state = "", None
        for token in row:
            if re.search(r", \w = $", text):
                projected = image.project(read_heads(state, image.heads))
                state = write_heads(state, image.heads, projected)
            logits, state = model.stream(token.view(1, 1), state)
            expected.append(logits[0, 0])
            text += task.vocab[token]
    expected = torch.stack(expected).unflatten(0, tokens.shape)

    projected, state, pieces = Projected(model, task, image), None, []
    for piece in tokens.tensor_split([1, 2, 5, 6, 7, 9, 20, 21, 90], 1):
        logits, state = projected.stream(piece, state)
        pieces.append(logits)
    assert (torch.cat(pieces, 1) - expected).abs().max() < 1e-10


def test_a_run_is_measured_as_trained_and_projected(monkeypatch, capsys):
    """A noisy head, which alone is sometimes wrong."""
    machine = SwapMachine("S3", 0.025, believes=True)
    monkeypatch.setattr("experiments.load", lambda _: (machine.task, machine))
    monkeypatch.setattr(drift, "TESTS", [(80, 20)])
    drift.main(["run"])
    printed = capsys.readouterr().out
    alone, projected = re.findall(r"\(80,20\) +\S+ +(\S+)", printed)
    assert "[(0, 0)]" in printed and float(alone) < 0.9 and projected == "1.0000"
