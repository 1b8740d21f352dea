"""The chunked scan is the delta rule. Oracles: explicit matrices, the loop, and data.py's
permutations.

Sizes are pairwise different and none a multiple of another, states are not zero, beta reaches 2: a
swapped axis, a transposed read or an off-by-one at a chunk edge cannot hide.
"""

import numpy as np
import pytest
import scan
import torch
from conftest import needs_cuda
from data import Group, draw_commands, run_commands
from scan import delta_product, delta_rule_chunked, delta_rule_recurrent, swap_machine_keys


def inputs(T, lead=(2, 3), beta=None, writes=()):
    """q, k, v, beta and a state, with gradients; |k| = 1, beta in (0, 2) or as given; float64."""
    shapes = [(T, 5), (T, *writes, 5), (T, *writes, 4), (T, *writes), (5, 4)]
    q, k, v, strength, state = (torch.randn(*lead, *shape).double() for shape in shapes)
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    strength = 2 * strength.sigmoid() if beta is None else torch.full_like(strength, beta)
    return [x.requires_grad_() for x in (q, k, v, strength, state)]


def by_matrices(q, k, v, beta, S):
    """Equation (1) as written, with explicit matrices I - beta k k^T."""
    out = []
    for t in range(k.shape[-2]):
        key, strength = k[..., t, :, None], beta[..., t, None, None]
        S = (torch.eye(5) - strength * key * key.mT) @ S + strength * key * v[..., t, None, :]
        out.append((S.mT @ q[..., t, :, None]).squeeze(-1))
    return torch.stack(out, -2), S


def difference(ours, theirs):
    assert [x.shape for x in ours] == [x.shape for x in theirs]
    return max([(a - b).abs().max().item() for a, b in zip(ours, theirs) if a.numel()], default=0)


def gradients(function, arguments):
    """Of a random weighting of both results, with respect to all inputs."""
    weight = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=weight, dtype=x.dtype)).sum()
               for x in function(*arguments))
    return torch.autograd.grad(loss, arguments)


def error(function, arguments):
    """The difference of a function from the loop, in values and gradients."""
    return max(difference(function(*arguments), delta_rule_recurrent(*arguments)),
               difference(gradients(function, arguments),
                          gradients(delta_rule_recurrent, arguments)))


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (0, 2)])
def test_the_loop_and_the_chunks_are_the_definition(lead):
    """Equation (1), whatever the leading axes; without a state they begin at zero."""
    *arguments, state = inputs(T=11, lead=lead)
    for start, given in ((state, [state]), (torch.zeros_like(state), [])):
        expected = by_matrices(*arguments, start)
        for rule in (delta_rule_recurrent, delta_rule_chunked):
            assert difference(rule(*arguments, *given), expected) < 1e-10


@pytest.mark.parametrize("beta", [None, 2.0, 1.0])
@pytest.mark.parametrize("at_once", [2**15, 84, 1])  # tokens in a piece: all, a few chunks, one
@pytest.mark.parametrize("T, chunk, device", [
    (1, 1, "cpu"), (1, 7, "cpu"), (7, 3, "cpu"), (13, 13, "cpu"), (13, 14, "cpu"), (23, 1, "cpu"),
    (23, 7, "cpu"), (37, 32, "cpu"), (65, 16, "cpu"), (41, 300, "cpu"),
    pytest.param(65, 16, "cuda", marks=needs_cuda)])
def test_chunked_equals_the_loop_in_values_and_gradients(
        T, chunk, device, at_once, beta, monkeypatch):
    """Outputs, last state and the gradients of all five inputs, to 1e-10 in float64."""
    def chunked(*arguments):
        results = delta_rule_chunked(*[x.to(device) for x in arguments], chunk_size=chunk)
        return [x.cpu() for x in results]

    monkeypatch.setattr(scan, "TOKENS_AT_ONCE", at_once)
    assert error(chunked, inputs(T, beta=beta)) < 1e-10


@pytest.mark.parametrize("name, length, dtype", [
    ("S5", 3000, torch.float64), ("A5", 500, torch.float64), ("D6", 500, torch.float64),
    ("S5", 3000, torch.float32)])
def test_the_swap_machine_tracks_the_group_without_training(name, length, dtype):
    """2n reflections per command, set by hand, give data.py's own states after every command. With
    beta = 1 the same keys erase what they should have moved."""
    group = Group(name)
    commands = draw_commands(group, "full", (length,), np.random.default_rng(0))
    n = group.degree
    keys = swap_machine_keys(torch.from_numpy(commands)).to(dtype)
    values, beta = keys.new_zeros(len(keys), n), torch.full(keys.shape[:-1], 2.0, dtype=dtype)
    start = torch.eye(2 * n, n, dtype=dtype)  # slot i holds value i, the spares are empty
    queries = torch.eye(2 * n, dtype=dtype)[:n, None]  # `print(x)` is the read q = e_x
    out, _ = delta_rule_chunked(queries.expand(n, *keys.shape), *[
        x.expand(n, *x.shape) for x in (keys, values, beta, start)], chunk_size=40)
    after_each_command = out[:, 2 * n - 1::2 * n]
    states = run_commands(commands[None])[0]
    assert (after_each_command.argmax(-1).numpy() == states.T).all()
    assert after_each_command.max(-1).values.min() > 0.99
    assert delta_rule_chunked(keys, keys, values, beta / 2, start)[1].abs().max() < 0.6


@pytest.mark.parametrize("R", [1, 3])
def test_delta_product_is_r_steps_and_one_read(R):
    """R writes in the order r = 1 ... R, then the read of the token: explicit matrices again. With
    one write it is the delta rule, bit for bit."""
    q, k, v, beta, state = inputs(T=11, writes=(R,))
    expected, last = by_matrices(q.repeat_interleave(R, -2), k.flatten(2, 3), v.flatten(2, 3),
                                 beta.flatten(2), state)
    ours = delta_product(q, k, v, beta, state, chunk_size=4)
    assert difference(ours, [expected[:, :, R - 1::R], last]) < 1e-10
    if R == 1:
        rule = delta_rule_chunked(q, k.squeeze(-2), v.squeeze(-2), beta.squeeze(-1), state, 4)
        assert all(map(torch.equal, ours, rule))
