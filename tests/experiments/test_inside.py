"""What is reported from inside a model is what the model computes."""

import re

import numpy as np
import pytest
import torch
from conftest import typed_lines
from machine import SwapMachine

from data import Group, ReplTask, generator
from experiments import inside
from experiments.inside import (LinearImage, collect_states, components, in_commands, intervene,
                                likeness, main, nearest, read_heads, read_off, right_hand_keys,
                                scan_inputs, swap_machine_errors, tracking_heads, while_reading,
                                write_heads)
from models import LinRNN
from scan import delta_rule_recurrent, exchange_key

TASK = ReplTask(Group("S4"))
HEADS = [(0, 0)]  # of a SwapMachine


def make(layers=1, **options):
    return LinRNN(len(TASK.vocab), d_model=32, heads=2, layers=layers, **options)


def some_tokens():
    return torch.from_numpy(TASK.test_batch(3, 2, 1, generator(0, "valid")).inputs)


def test_the_head_that_keeps_and_moves_is_found(monkeypatch):
    """Four heads with the same keys, exchanges of random slots: beta = 2 tracks; beta = 0 only
    keeps, and beta = 1 and 1/2 forget all but the mean of the slots."""
    task = ReplTask(Group("S3"))
    model = LinRNN(len(task.vocab), d_model=24, heads=4, layers=2)

    def inputs_of_scan(x):
        i = torch.randint(3, x.shape[:2])
        j = (i + torch.randint(1, 3, i.shape)) % 3
        k = exchange_key(i, j, 6).float()[:, None, :, None].expand(-1, 4, -1, -1, -1)
        beta = torch.tensor([0.0, 2.0, 1.0, 0.5]).view(4, 1, 1).expand(k.shape[:-1])
        return k[..., 0, :], k, torch.ones_like(k), beta

    monkeypatch.setattr(model.blocks[3], "inputs_of_scan", inputs_of_scan)
    assert tracking_heads(model, task) == [(3, 1)]


def test_a_head_counts_if_the_state_is_read_off_it_alone(monkeypatch):
    """Of two heads that move, one holds the permutation and the other one noise. If no head alone
    holds all of it, both count: the first then has the first half of the values, the other the
    second half."""
    class OneAndNoise(SwapMachine):
        def stream(self, tokens, state=None):
            logits, (S, *rest) = super().stream(tokens, state and [state[0][:, :1], *state[1:]])
            return logits, [torch.cat([S, torch.randn_like(S)], 1), *rest]

    class Halves(SwapMachine):
        def stream(self, tokens, state=None):
            whole = state and [state[0].sum(1, keepdim=True), *state[1:]]
            logits, (S, *rest) = super().stream(tokens, whole)
            left = S * (torch.arange(4) < 2)
            return logits, [torch.cat([left, S - left], 1), *rest]

    both = [(0, 0), (0, 1)]
    monkeypatch.setattr(inside, "moving_heads", lambda *_: both)
    assert tracking_heads(OneAndNoise("S4"), TASK) == [(0, 0)]
    assert tracking_heads(Halves("S4"), TASK) == both
    monkeypatch.setattr(inside, "moving_heads", lambda *_: [])
    assert tracking_heads(OneAndNoise("S4"), TASK) == []


def test_an_entry_is_the_place_of_a_block_in_the_model_and_in_the_state():
    """S is computed from what the block of that entry hands to its scan. What is written can be
    read, in these heads and in no other, and the given state is left alone."""
    model = make(layers=2).double()
    with torch.no_grad():
        _, state = model.stream(some_tokens())
    heads = [(3, 1), (1, 0)]
    held = read_heads(state, heads)
    for (entry, head), S in zip(heads, held.unbind(1)):
        q, k, v, beta = [x[:, head] for x in scan_inputs(model, some_tokens())[entry]]
        _, expected = delta_rule_recurrent(q, k[..., 0, :], v[..., 0, :], beta[..., 0])
        assert (S - expected).abs().max() < 1e-10

    fresh = torch.randn_like(held)
    written = write_heads(state, heads, fresh)
    assert torch.equal(read_heads(written, heads), fresh)
    assert torch.equal(read_heads(state, heads), held)
    assert torch.equal(written[3][:, 0], state[3][:, 0])


def test_keys_and_betas_are_those_of_the_tokens_of_the_commands():
    """Without a local block both depend on their token alone."""
    model = make(conv_width=1)
    commands, keys, betas = in_commands(model, TASK, 0)
    lines = torch.from_numpy(TASK.command_tokens(commands))
    _, k, _, beta = scan_inputs(model, torch.arange(len(TASK.vocab)).unsqueeze(0))[0]
    torch.testing.assert_close(keys.permute(2, 0, 1, 3), k[0, :, lines, 0])
    assert np.allclose(betas, beta[0, :, lines, 0].mean(1), atol=1e-5)


def test_mean_keys_do_not_mind_signs_and_those_of_the_machine_are_like_themselves_in_any_basis():
    """The machine's keys, rotated and with both signs: r = 1. With the names shuffled at each
    place two keys of one name no longer meet at 60 degrees."""
    place, name = torch.meshgrid(torch.arange(5), torch.arange(5), indexing="ij")
    keys = exchange_key(place, name + 5, 10)
    rotation = torch.linalg.qr(torch.randn(10, 10).double())[0]
    commands = Group("S5").draw((500,), generator(0, "valid"))
    found = (keys @ rotation)[torch.arange(5), commands]
    mean = right_hand_keys(np.tile(commands, (2, 1)), torch.cat([found, -found]))
    assert ((mean * (keys @ rotation)).sum(-1).abs() > 1 - 1e-5).all()
    assert abs(likeness(mean) - 1) < 1e-5
    shuffled = torch.stack([keys[i, torch.arange(5).roll(i)] for i in range(5)])
    assert likeness(shuffled) < 0.7


def test_components_are_the_fewest_directions_that_hold_95_percent_whatever_the_signs():
    """One head has 90, 4, 3 and 3% along four directions: three hold 95%, two do not. The other
    head has one direction, with both signs; with one sign no mean must hide it."""
    axes = torch.linalg.qr(torch.randn(7, 7))[0]
    parts = torch.tensor([0.90, 0.04, 0.03, 0.03]).sqrt().unsqueeze(1) * axes[:4]
    line = axes[5].expand(4, -1)
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0]).view(4, 1, 1)
    both = torch.stack([parts, line], 1)  # [N, H, K]
    assert components(both).tolist() == components(signs * both).tolist() == [3, 1]
    assert components(torch.stack([line, parts], 1), 0.93).tolist() == [1, 2]


def test_an_intervention_narrows_one_head_and_is_undone(monkeypatch):
    """In the model that is evaluated the beta of that head is scaled, the other is as trained."""
    model, seen = make(), []
    before = scan_inputs(model, some_tokens())[1][3]

    def look(model, *_, traces):
        seen.append(scan_inputs(model, some_tokens())[1][3] / before)
        return {"all": len(seen) / 10}

    monkeypatch.setattr("experiments.inside.evaluate", look)
    assert intervene(model, TASK, 1, [2.0, 0.5]).tolist() == [[0.1, 0.2], [0.3, 0.4]]
    scales = [scale.mean((0, 2, 3)).tolist() for scale in seen]
    assert np.allclose(scales, [[1, 1], [0.25, 1], [1, 1], [1, 0.25]], atol=1e-6)
    assert torch.equal(scan_inputs(model, some_tokens())[1][3], before)


@pytest.mark.parametrize("commands, mark", [("full", " = "), ("swap", "\n")])
def test_a_command_has_settled_in_the_line_after_it(commands, mark):
    """Ahead of each state the text holds one whole command more, and ends with the mark."""
    task, text = ReplTask(Group("S4"), commands), []

    class Listener(torch.nn.Module):
        def stream(self, tokens, state=None):
            text.append(task.decode(tokens[0]))
            return None, [torch.full((1, 1, 1, 1), len("".join(text)))]

    ends, _ = collect_states(Listener(), task, HEADS, 1, 5, generator(0, "valid"))
    for count, end in enumerate(ends.flatten(), 1):
        read = "".join(text)[:end]
        assert read.endswith(mark) and len(re.findall(r", . = .*\n", read)) == count


def test_a_random_linear_image_is_read_and_written_without_loss(monkeypatch):
    """States that are a random linear map of permutation matrices of S5 span 16 directions. A state
    near one is put onto it."""
    monkeypatch.setattr("experiments.inside.SHORTEST", 1e-6)  # random maps have short directions
    perms = Group("S5").draw((400,), generator(0, "valid"))
    P = torch.eye(5).double()[perms]
    states = torch.tensordot(P.flatten(1), torch.randn(25, 2, 7, 9).double(), 1) + 3.0
    image = LinearImage([(1, 0), (1, 1)], states, perms)
    assert len(image.sizes) == 16
    assert (image.read(states) - P).abs().max() < 1e-10
    bent = states + 0.1 * torch.randn_like(states)
    assert (image.correct(bent) - states).abs().max() < 1e-10


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
    """Against all by distance: near each of S5; and where two rows are largest in one column. A
    state there, here P itself, is put onto the image of that permutation."""
    bent = torch.tensor([[0.50, 0.30, 0.20], [0.45, 0.30, 0.25], [0.05, 0.40, 0.55]])
    near = torch.eye(5)[Group("S5").elements] + 0.98 * (torch.rand(120, 5, 5) - 0.5)
    for P in (bent.unsqueeze(0), near):
        perms = torch.from_numpy(Group(f"S{P.shape[-1]}").elements)
        apart = torch.cdist(P.flatten(1), torch.eye(P.shape[-1])[perms].flatten(1))
        assert torch.equal(nearest(P), perms[apart.argmin(1)])

    perms = Group("S3").elements
    image = LinearImage(HEADS, torch.eye(3)[perms].unsqueeze(1), perms)
    assert (image.correct(bent[None, None]) - torch.eye(3)).abs().max() < 1e-5


def test_the_permutation_is_read_off_the_head_that_holds_it_until_noise_has_bent_it():
    machine = SwapMachine("S4", 0.03)
    near, far = read_off(machine, machine.task, HEADS, [1, 200])
    assert near == 1 and far < 0.6


def test_what_is_read_off_is_counted_on_other_traces_than_those_of_the_fit(monkeypatch):
    """States of the second call hold other permutations than those which are true there, but for
    the first place; the fit is perfect."""
    monkeypatch.setattr("experiments.inside.SHORTEST", 1e-6)
    basis, drawn = torch.randn(16, 3, 7).double(), []

    def collect(model, task, heads, traces, length, rng):
        perms = task.group.draw((traces, length), rng)
        drawn.append(perms)
        held = perms.copy()
        if len(drawn) == 2:
            held[:, 1:] = np.roll(held[:, 1:], 1, -1)
        P = torch.eye(4).double()[held]
        return torch.tensordot(P.flatten(-2), basis, 1).unsqueeze(2), perms

    monkeypatch.setattr("experiments.inside.collect_states", collect)
    assert read_off(None, TASK, HEADS, [1, 2, 16]).tolist() == [1, 0, 0]
    assert len(drawn) == 2 and not (drawn[0][:16] == drawn[1]).all()


def test_the_hand_built_head_errs_by_rounding_only():
    """No variable is misread. A state in bfloat16 has two digits: its error is larger than that of
    float32 could be, and the rounding itself keeps it small."""
    for dtype, least, most in ((torch.float64, 0, 1e-10), (torch.bfloat16, 0.01, 0.1)):
        error, wrong = swap_machine_errors(Group("S5"), 400, dtype)
        assert wrong == 0 and least <= error < most


def test_the_picture_that_moves_shows_what_python_holds_once_a_command_has_settled():
    """From the last name on the left on, one square a row is dark, that of the value which Python
    gives the variable. Of the 13 tokens from ` = ` to ` = ` the first five are the names on the
    right, and beta is near 2 there."""
    read = while_reading(0, 3)
    betas = np.array([beta for _, _, beta, *_ in read[1:]]).reshape(3, 13)
    assert betas[:, :5].min() > 1.7

    for last_name in (12, 25, 38):
        for text, _, _, table, values in read[last_name:last_name + 2]:
            variables = {}
            exec("\n".join(typed_lines(text)[:-1]), variables)
            own = np.array([variables[name] for name in "abcde"]) - 1
            assert (values == own).all() and (table - torch.eye(5)[own]).abs().max() < 0.1


def test_a_model_in_which_no_head_tracks_is_refused(small_run, refused):
    refused(main, [small_run], "a head that tracks")
