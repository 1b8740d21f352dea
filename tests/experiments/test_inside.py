"""What is reported from inside a model is what the model computes."""

import re

import numpy as np
import pytest
import torch
from machine import SwapMachine

import train
from data import Group, ReplTask, generator
from experiments.inside import (LinearImage, beta_by_place, collect_states, in_commands, intervene,
                                likeness, main, nearest, read_heads, read_off, right_hand_keys,
                                scan_inputs, swap_machine_errors, tracking_heads, write_heads)
from models import LinRNN
from scan import delta_rule_recurrent, exchange_key

TASK = ReplTask(Group("S4"))
HEADS = [(0, 0)]  # of a SwapMachine


def make(layers=1, **options):
    return LinRNN(len(TASK.vocab), d_model=32, heads=2, layers=layers, **options)


def traces(batch, length, spacing):
    return torch.from_numpy(TASK.test_batch(batch, length, spacing, generator(0, "valid")).inputs)


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


def test_an_entry_is_the_place_of_a_block_in_the_model_and_in_the_state():
    """S is computed from what the block of that entry hands to its scan. What is written can be
    read, in these heads and in no other, and the given state is left alone."""
    model = make(layers=2).double()
    tokens = traces(3, 2, 1)
    with torch.no_grad():
        _, state = model.stream(tokens)
    heads, expected = [(3, 1), (1, 0)], []
    for entry, head in heads:
        q, k, v, beta = [x[:, head] for x in scan_inputs(model, tokens)[entry]]
        _, S = delta_rule_recurrent(q, k[..., 0, :], v[..., 0, :], beta[..., 0])
        expected.append(S)
    held = read_heads(state, heads)
    assert (held - torch.stack(expected, 1)).abs().max() < 1e-10

    fresh = torch.randn_like(held)
    written = write_heads(state, heads, fresh)
    assert torch.equal(read_heads(written, heads), fresh)
    assert torch.equal(read_heads(state, heads), held)
    assert torch.equal(written[3][:, 0], state[3][:, 0])


def test_beta_and_keys_are_sorted_by_place_and_name(monkeypatch):
    """Without a local block both depend on their token alone. The key of a place and a name is
    that of the token there, up to its sign; the mean beta of a place is that of its tokens."""
    model = make(conv_width=1)
    as_trained = model.blocks[0].inputs_of_scan

    def with_random_signs(x):
        q, k, v, beta = as_trained(x)
        return q, k * (2 * torch.randint(2, k.shape[:-1]) - 1).unsqueeze(-1), v, beta

    monkeypatch.setattr(model.blocks[0], "inputs_of_scan", with_random_signs)
    lines, _ = in_commands(model, TASK)
    for line in lines[::64]:
        assert re.fullmatch(r">>> a, b, c, d = \w, \w, \w, \w\n", TASK.decode(line))

    _, k, _, beta = scan_inputs(model, torch.arange(len(TASK.vocab)).unsqueeze(0))[0]
    keys = right_hand_keys(model, TASK, 0, 1)
    for i in range(4):
        for y, name in enumerate("abcd"):
            token, = TASK.encode(name if i == 0 else f", {name}")
            assert abs(keys[i, y] @ k[0, 1, token, 0]) > 1 - 1e-5
    expected = beta[0, :, lines, 0].mean(1)  # [heads, lines of commands, place]
    torch.testing.assert_close(beta_by_place(model, TASK), expected.unsqueeze(0))


def test_the_keys_of_the_machine_are_like_themselves_in_any_basis_and_others_are_not():
    """The machine's keys, rotated and with random signs: r = 1. With the names shuffled at each
    place two keys of one name no longer meet at 60 degrees."""
    place, name = torch.meshgrid(torch.arange(5), torch.arange(5), indexing="ij")
    keys = exchange_key(place, name + 5, 10)
    rotation = torch.linalg.qr(torch.randn(10, 10).double())[0]
    signs = torch.randint(2, (5, 5, 1)) * 2 - 1
    assert abs(likeness(signs * (keys @ rotation)) - 1) < 1e-10
    shuffled = torch.stack([keys[i, torch.arange(5).roll(i)] for i in range(5)])
    assert likeness(shuffled) < 0.7


def test_an_intervention_narrows_one_head_and_is_undone(monkeypatch):
    """In the model that is evaluated the beta of that head is scaled, the other is as trained."""
    model, seen = make(), []
    tokens = traces(2, 3, 1)
    before = scan_inputs(model, tokens)[1][3]

    def look(model, *_):
        seen.append(scan_inputs(model, tokens)[1][3])
        return {"all": len(seen) / 10}

    monkeypatch.setattr("experiments.inside.evaluate", look)
    assert intervene(model, TASK, [2.0, 0.5]).tolist() == [[[0.1, 0.2], [0.3, 0.4]]]
    scales = [(beta / before).mean((0, 2, 3)).tolist() for beta in seen]
    assert np.allclose(scales, [[1, 1], [0.25, 1], [1, 1], [1, 0.25]], atol=1e-6)
    assert torch.equal(scan_inputs(model, tokens)[1][3], before)


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


@pytest.mark.parametrize("name, directions", [("S5", 16), ("Z7", 6)])
def test_a_random_linear_image_is_read_and_written_without_loss(name, directions, monkeypatch):
    """States that are a random linear map of permutation matrices span (n - 1)^2 directions of S_n,
    n - 1 of Z_n. A state near one is put onto it."""
    monkeypatch.setattr("experiments.inside.SHORTEST", 1e-6)  # random maps have short directions
    perms = Group(name).draw((400,), generator(0, "valid"))
    P = torch.eye(perms.shape[1]).double()[perms]
    states = torch.tensordot(P.flatten(1), torch.randn(P[0].numel(), 2, 7, 9).double(), 1) + 3.0
    image = LinearImage([(1, 0), (1, 1)], states, perms)
    assert len(image.sizes) == directions
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
    near, far = read_off(machine, machine.task, HEADS, [1, 200], traces=8)
    assert near == 1 and far < 0.6


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.bfloat16, 1e-10)])
def test_the_hand_built_head_errs_by_rounding_only(dtype, bound):
    """No variable is misread. Rounding to 8 bits is itself a correction: in bf16 1 - 2^-12 becomes
    1 after each exchange."""
    error, wrong = swap_machine_errors(Group("S5"), 400, dtype)
    assert wrong == 0 and error < bound


def test_a_model_without_beta_and_an_option_without_a_run_are_refused(tmp_path, refused):
    short = "--model lstm --group S3 --curriculum 2:1 --last-steps 1 --batch 1 --lengths 2:1"
    train.main([*short.split(), "--device", "cpu", "--out", str(tmp_path / "run")])
    refused(main, [tmp_path / "run"], "only a linrnn")
    refused(main, ["--intervene"], "DIR")
