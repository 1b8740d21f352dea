"""The head that tracks is found, and what it holds along a trace is collected where it belongs."""

import re

import numpy as np
import pytest
import torch
from conftest import SMALL
from machine import SwapMachine

from data import TASKS, Group, ReplTask, generator
from experiments.heads import (collect_states, delta_blocks, drift, load_repl_run, read_heads,
                               scan_inputs, settled_ends, settling_tokens, spread, tracking_heads)
from models import build
from scan import delta_rule_recurrent, exchange_key


def test_the_head_that_keeps_and_moves_is_found(monkeypatch):
    """Four heads with the same keys, exchanges of random slots: beta = 2 tracks; beta = 0 only
    keeps, and beta = 1 and 1/2 forget all but the mean of the slots. The first alone is found, in
    the layer where it is."""
    task = ReplTask(Group("S5"))
    model = build("linrnn", len(task.vocab), d_model=40, heads=4, layers=2)

    def inputs_of_scan(x):
        i = torch.randint(5, x.shape[:2])
        j = (i + torch.randint(1, 5, i.shape)) % 5
        k = exchange_key(i, j, 10).float()[:, None, :, None].expand(-1, 4, -1, -1, -1)
        beta = torch.tensor([0.0, 2.0, 1.0, 0.5]).view(4, 1, 1).expand(k.shape[:-1])
        return k[..., 0, :], k, torch.ones_like(k), beta

    monkeypatch.setattr(model.blocks[3], "inputs_of_scan", inputs_of_scan)
    assert [*delta_blocks(model)] == [1, 3] and tracking_heads(model, task) == [(3, 1)]


@pytest.mark.parametrize("name, options", [("linrnn", {"beta_max": 1.0}), ("lstm", {}),
                                           ("transformer", {})])
def test_a_model_that_cannot_reflect_has_no_tracking_head(name, options):
    task = ReplTask(Group("S5"))
    assert tracking_heads(build(name, len(task.vocab), **options), task) == []


def test_an_entry_is_the_place_of_a_block_in_the_model_and_in_the_state():
    """S, computed from what the block of that entry hands to its scan, token after token."""
    task = ReplTask(Group("S4"))
    model = build("linrnn", len(task.vocab), d_model=12, heads=2, layers=2).double()
    tokens = torch.from_numpy(task.sample(3, 2, 1, generator(0, "valid"))[0])
    with torch.no_grad():
        _, state = model.stream(tokens)
    layers, heads = scan_inputs(model, tokens), [(3, 1), (1, 0)]
    expected = []
    for layer, head in [(1, 1), (0, 0)]:
        q, k, v, beta = (x[:, head] for x in layers[layer])
        expected.append(delta_rule_recurrent(q, k[..., 0, :], v[..., 0, :], beta[..., 0])[1])
    held = read_heads(state, heads)
    assert held.shape == (3, 2, 6, 6)
    assert (held - torch.stack(expected, 1)).abs().max() < 1e-10


@pytest.mark.parametrize("commands, mark", [("full", " = "), ("swap", "\n")])
def test_a_command_has_settled_in_the_line_after_it(commands, mark):
    """Up to each place the text holds one command more, whole, and ends with the mark."""
    task = ReplTask(Group("S4"), commands)
    tokens, _ = task.sample(1, 6, 3, generator(0, "valid"))
    ends = settled_ends(task, 6, 3)
    assert len(ends) == 5 and settling_tokens(task) == (6 if commands == "full" else 0)
    for count, end in enumerate(ends, 1):
        text = task.decode(tokens[0, :end])
        assert text.endswith(mark) and len(re.findall(r", . = .*\n", text)) == count


def test_the_states_of_the_hand_built_head_are_the_permutations():
    """Slot x holds the value of variable x after each command; the spares are empty again."""
    machine = SwapMachine("S4")
    states, elements = collect_states(machine, machine.task, [(0, 0)], 6, 10, 5,
                                      generator(0, "valid"))
    held = torch.from_numpy(np.eye(4)[machine.task.group.elements[elements]])
    assert states.shape == (6, 10, 1, 8, 4) and len(np.unique(elements)) > 10
    assert (states[:, :, 0, :4] - held).abs().max() < 1e-10
    assert states[:, :, 0, 4:].abs().max() < 1e-10


def test_spread_of_two_classes_known_by_hand():
    """Points 0, 2 and 7, 11 on a line: 1 and 2 from their means, with 4 - 2 degrees of freedom."""
    within, between = spread(torch.tensor([[0.0], [7.0], [2.0], [11.0]]), np.array([3, 8, 3, 8]))
    assert abs(within - 5**0.5) < 1e-6 and abs(between - 8) < 1e-6


def test_the_drift_of_an_exact_head_is_nothing_and_that_of_a_bent_one_grows():
    """Two permutations of three values differ in two slots at least: M = 2."""
    exact, bent = SwapMachine("S3"), SwapMachine("S3", noise=0.015)
    rows = drift(exact, exact.task, [(0, 0)], ends=(16, 48))
    assert np.allclose(rows, [[16, 0, 2], [48, 0, 2]], atol=1e-10)
    (_, early, _), (_, late, _) = drift(bent, bent.task, [(0, 0)], ends=(16, 48))
    assert late > 1.5 * early > 0


def test_only_runs_on_plain_traces_are_loaded(small_run, tmp_path, monkeypatch):
    """Words have no commands to stop at. A belief has no list of states, and its task is refused
    whether its chapter has been imported or not."""
    import train
    train.main([*SMALL, "--format", "word", "--curriculum", "2:1", "--test-lengths", "2:1",
                "--out", str(tmp_path / "words")])
    with pytest.raises(ValueError, match="REPL traces.*format word"):
        load_repl_run(tmp_path / "words")
    checkpoint = torch.load(small_run / "model.pt", weights_only=True)
    checkpoint["config"] |= {"format": "coins", "chapter": "experiments.beliefs"}
    torch.save(checkpoint, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="experiments.beliefs"):
        monkeypatch.delitem(TASKS, "coins", raising=False)
        load_repl_run(tmp_path)
    with pytest.raises(ValueError, match="REPL traces.*format coins"):
        monkeypatch.setitem(TASKS, "coins", ReplTask)
        load_repl_run(tmp_path)
    assert load_repl_run(small_run)[1].group.name == "S3"
