"""The head that tracks is found, and what it holds along a trace is collected where it belongs."""

import re

import numpy as np
import pytest
import torch
from conftest import SMALL
from machine import SwapMachine

from data import TASKS, Group, ReplTask, generator
from experiments.heads import (LinearImage, Untracked, ask_all, collect_states, delta_blocks, drift,
                               load_repl_run, nearest, read_heads, scan_inputs, settled_ends,
                               settling_tokens, spread, tracking_heads, write_heads)
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
    other, fresh = write_heads(state, heads, held + 1), torch.randn(3, 2, 6, 6).double()
    assert torch.equal(read_heads(write_heads(state, heads, fresh), heads), fresh)
    assert torch.equal(read_heads(state, heads), held)  # the state that was given is left alone
    assert torch.equal(other[3][:, 0], state[3][:, 0])


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
    states, perms = collect_states(machine, machine.task, [(0, 0)], 6, 10, 5,
                                   generator(0, "valid"))
    held = torch.from_numpy(np.eye(4)[perms])
    assert states.shape == (6, 10, 1, 8, 4) and len(np.unique(perms.reshape(60, 4), axis=0)) > 10
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


# --- The permutation in a state -------------------------------------------------------------------

def image_of(name, count=400):
    """The image fitted to states that are a random linear map of permutation matrices; a function
    that makes such states; and the permutations."""
    group = Group(name)
    perms, mix = group.draw((count,), generator(0, "valid")), torch.randn(group.degree**2, 2, 7, 9)
    def make(perms):
        return torch.tensordot(torch.eye(group.degree)[perms].flatten(1), mix, 1).double() + 3.0
    return LinearImage([(1, 0), (1, 1)], make(perms), perms), make, perms


@pytest.mark.parametrize("name, directions", [
    ("S5", 16), ("A5", 16), ("A3", 2), ("Z7", 6), ("D6", 9), ("D5", 8), ("D4", 5), ("A4xZ5", 13)])
def test_a_group_spans_as_many_directions_as_its_parts_say(name, directions, monkeypatch):
    """(n - 1)^2 for S_n and A_n, n - 1 for Z_n, 2n - 3 or 2n - 2 for D_n, and sums for products. A
    state is read and written without loss."""
    monkeypatch.setattr("experiments.heads.SHORTEST", 1e-6)  # random maps have short directions
    image, make, perms = image_of(name)
    assert len(image.sizes) == directions
    P = image.read(make(perms))
    assert (P - torch.eye(image.n)[perms]).abs().max() < 1e-5
    assert (image.correct(make(perms)) - make(perms)).abs().max() < 1e-4


def test_a_few_answers_that_are_no_permutation_do_not_spoil_the_fit():
    """Noisy states of S20, and one answer in 300 that names a value twice. If each answer is of
    this kind, there is nothing to fit."""
    perms = Group("S20").draw((1500,), generator(0, "valid"))
    states = torch.eye(20)[perms].unsqueeze(1) + 0.1 * torch.randn(1500, 1, 20, 20)
    answers = perms.copy()
    answers[::300, 0] = answers[::300, 1]
    image = LinearImage([(1, 0)], states, answers)
    assert len(image.sizes) == 361
    assert (nearest(image.read(states)).numpy() == perms).all()
    with pytest.raises(Untracked, match="no answer is one"):
        LinearImage([(1, 0)], states, 0 * perms)


def test_the_matrix_of_a_product_is_block_diagonal():
    """Whatever the state is, the entries between the factors are read as 0."""
    P = image_of("A4xZ5")[0].read(torch.randn(20, 2, 7, 9).double())
    assert P[:, :4, 4:].abs().max() < 1e-10 and P[:, 4:, :4].abs().max() < 1e-10
    assert P[:, :4, :4].abs().max() > 0.1


def test_the_directions_of_the_head_built_by_hand_are_of_one_length():
    """One-hot keys and values: all 16 singular values of S5 are equal, up to the sample."""
    machine = SwapMachine("S5")
    states, perms = collect_states(machine, machine.task, [(0, 0)], 8, 10, 5,
                                   generator(0, "valid"))
    image = LinearImage([(0, 0)], states, perms)
    assert len(image.sizes) == 16 and (image.sizes - 1).abs().max() < 1e-10


def test_a_direction_that_the_head_does_not_use_is_not_read():
    """States of Z7 on a circle, with noise: two of six directions, and every element is read."""
    perms = Group("Z7").draw((500,), generator(0, "valid"))
    angle = torch.from_numpy(perms[:, 0]).float() * (2 * torch.pi / 7)
    circle = torch.stack([angle.cos(), angle.sin()], -1) @ torch.randn(2, 12)
    states = (circle + 0.05 * torch.randn(500, 12)).view(500, 1, 3, 4)
    image = LinearImage([(1, 0)], states[:300], perms[:300])
    assert len(image.sizes) == 2
    assert (nearest(image.read(states[300:])).numpy() == perms[300:]).all()


def test_the_nearest_permutation_is_found_if_no_entry_is_off_by_a_half():
    """Also against all 120 of S5 by distance; and a matrix whose largest entries share a column."""
    perms = torch.from_numpy(Group("S5").elements)
    P = torch.eye(5)[perms] + 0.98 * (torch.rand(120, 5, 5) - 0.5)
    assert torch.equal(nearest(P), perms)
    apart = torch.cdist(P.flatten(1), torch.eye(5)[perms].flatten(1))
    assert torch.equal(apart.argmin(1), torch.arange(120))
    assert nearest(torch.tensor([[0.9, 0.1], [0.8, 0.7]])).tolist() == [0, 1]
    assert nearest(torch.rand(4, 1, 3, 3)).shape == (4, 1, 3)


def test_the_residual_and_the_margin_are_those_of_their_definition():
    """Of states with noise, one by one: the distance of S from its image, over the rms distance of
    the states from their mean; and of P from all permutations with two values exchanged."""
    image, make, perms = image_of("S4")
    exact = make(perms)
    states = exact[:10] + 0.4 * torch.randn(10, 2, 7, 9)
    found, residual, margin = image.certify(states)
    assert (found.numpy() == perms[:10]).all()
    spread = (exact - exact.mean(0)).flatten(1).norm(dim=1).square().mean().sqrt()
    assert torch.allclose(residual, (states - exact[:10]).flatten(1).norm(dim=1) / spread)
    for P, perm, value in zip(image.read(states), perms, margin):
        wrong = []
        for i in range(4):
            for j in range(i):
                exchanged = perm.copy()
                exchanged[[i, j]] = perm[[j, i]]
                wrong.append((P - torch.eye(4)[exchanged]).norm())
        assert torch.isclose(value, min(wrong) / (P - torch.eye(4)[perm]).norm())


def test_each_question_starts_from_the_same_state():
    """What a model has read when it answers: the past and one question, for each variable."""
    task, read = ReplTask(Group("S3")), []

    class Listener:
        def stream(self, tokens, state):
            read.append([past + task.decode(row) for past, row in zip(state, tokens)])
            logits = torch.zeros(*tokens.shape, len(task.vocab))
            logits[:, -1, task.value_tokens[len(read) % 3]] = 1
            return logits, read[-1]

    answers = ask_all(Listener(), task, ["one; ", "two; "], 2)
    assert answers.tolist() == [[1, 2, 0]] * 2
    assert read == [[f"{past}; >>> print('{x}', {x})\n{x} " for past in ("one", "two")]
                    for x in "abc"]
