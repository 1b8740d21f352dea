"""The chunked scan is the delta rule. Oracles: explicit matrices, the loop, data.py's permutations.

Sizes are pairwise different and states are not zero, so that no swapped axis can hide.
"""

import numpy as np
import pytest
import scan
import torch
from conftest import needs_cuda
from data import Group, draw_commands, run_commands
from scan import delta_product, delta_rule_chunked, delta_rule_recurrent, swap_machine_keys


def inputs(T, lead=(2, 3), beta=None, writes=(), K=5, V=4):
    """q, k, v, beta and a state, with gradients; |k| = 1, beta in (0, 2) or as given; float64."""
    shapes = [(T, K), (T, *writes, K), (T, *writes, V), (T, *writes), (K, V)]
    q, k, v, strength, state = (torch.randn(*lead, *shape).double() for shape in shapes)
    q = q / q.norm(dim=-1, keepdim=True)
    k = k / k.norm(dim=-1, keepdim=True)
    strength = 2 * strength.sigmoid() if beta is None else torch.full_like(strength, beta)
    return [x.requires_grad_() for x in (q, k, v, strength, state)]


def by_matrices(q, k, v, beta, S):
    """Equation (1) as written, with explicit matrices I - beta k k^T."""
    out = []
    for t in range(k.shape[-2]):
        key = k[..., t, :, None]
        strength = beta[..., t, None, None]
        step = torch.eye(k.shape[-1]) - strength * key * key.mT
        S = step @ S + strength * key * v[..., t, None, :]
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


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (0, 2)])
def test_the_loop_and_the_chunks_are_the_definition(lead):
    """Equation (1), whatever the leading axes; without a state they begin at zero."""
    *arguments, state = inputs(T=11, lead=lead)
    for start, given in ((state, [state]), (torch.zeros_like(state), [])):
        expected = by_matrices(*arguments, start)
        for rule in (delta_rule_recurrent, delta_rule_chunked):
            assert difference(rule(*arguments, *given), expected) < 1e-10


@pytest.mark.parametrize("seed, device", [*((seed, "cpu") for seed in range(20)), pytest.param(
    0, "cuda", marks=needs_cuda)])
def test_chunked_equals_the_loop_in_values_and_gradients(seed, device):
    """Outputs, last state and the gradients of all five inputs, for random lengths, widths and
    chunks, a ragged end, beta at 1 and 2, too."""
    rng = np.random.default_rng(seed)
    T, chunk = int(rng.integers(1, 70)), int(rng.integers(1, 40))
    K, V = (int(x) for x in rng.permutation(np.arange(2, 8))[:2])
    beta = [None, None, 1.0, 2.0][seed % 4]

    def chunked(*arguments):
        results = delta_rule_chunked(*[x.to(device) for x in arguments], chunk_size=chunk)
        return [x.cpu() for x in results]

    given = inputs(T, beta=beta, K=K, V=V)
    for what in (lambda function, given: function(*given), gradients):
        ours, theirs = what(chunked, given), what(delta_rule_recurrent, given)
        assert difference(ours, theirs) < 1e-10, (T, chunk, K, V)


@pytest.mark.parametrize("R", [1, 3])
def test_delta_product_is_r_steps_and_one_read(R):
    """R writes in the order r = 1 ... R, then the read of the token: explicit matrices again."""
    q, k, v, beta, state = inputs(T=11, writes=(R,))
    expected, last = by_matrices(q.repeat_interleave(R, -2), k.flatten(2, 3), v.flatten(2, 3),
                                 beta.flatten(2), state)
    ours = delta_product(q, k, v, beta, state, chunk_size=4)
    assert difference(ours, [expected[:, :, R - 1::R], last]) < 1e-10


# --- Numerics -------------------------------------------------------------------------------------

def test_no_entry_of_the_inverse_of_a_chunk_is_above_two():
    """For unit keys and beta up to 2: section 5 of scan.py."""
    q, k, v, beta, state = inputs(T=30)
    beta = beta.unsqueeze(-1)
    chunks = [x.unsqueeze(-3) for x in (q, k, v, beta)]
    inverse = scan.chunked_forward(*chunks, state)[2].squeeze(-3)
    L = (beta * k @ k.mT).tril(-1)
    assert difference([inverse], [torch.linalg.inv(torch.eye(30) + L)]) < 1e-10
    assert inverse.abs().max() <= 2


def test_one_key_again_and_again_at_beta_two_costs_no_digits():
    """To multiply out (I - L)(I + L^2)(I + L^4)... instead of solving is wrong by 1e5 here."""
    q, k, v, beta, state = [x.detach().float() for x in inputs(T=32, beta=2.0)]
    k = k[..., :1, :].expand_as(k)
    exact = delta_rule_recurrent(*[x.double() for x in (q, k, v, beta, state)])
    assert difference(delta_rule_chunked(q, k, v, beta, state, chunk_size=32), exact) < 1e-3


def test_half_types_and_autocast_are_computed_in_float32():
    """bfloat16 has two digits: a state kept in it would be off by a hundredth. The results are
    those of the same numbers in float32, to the bit, forwards and backwards."""
    q, k, v, beta, state = [x.detach().float().requires_grad_() for x in inputs(T=21)]
    half = [q.bfloat16(), k, v.half(), beta.bfloat16(), state]
    full = [x.float() for x in half]
    expected = [*delta_rule_chunked(*full), *gradients(delta_rule_chunked, full)]
    with torch.autocast("cpu", torch.bfloat16):
        ours = [*delta_rule_chunked(*half), *gradients(delta_rule_chunked, full)]
    assert ours[1].dtype == torch.float32 and difference(ours, expected) == 0


# --- The swap machine -----------------------------------------------------------------------------

@pytest.mark.parametrize("name, dtype", [("S5", torch.float32), ("D6", torch.float64)])
def test_the_swap_machine_tracks_the_group_without_training(name, dtype):
    """2n reflections per command, set by hand, give data.py's own states after every command. With
    beta = 1 the same keys erase what they should have moved."""
    group = Group(name)
    n = group.degree
    commands = draw_commands(group, "full", (1000,), np.random.default_rng(0))
    keys = swap_machine_keys(torch.from_numpy(commands)).to(dtype)
    values, beta = keys.new_zeros(len(keys), n), torch.full(keys.shape[:-1], 2.0, dtype=dtype)
    start = torch.eye(2 * n, n, dtype=dtype)  # slot i holds value i, the spares are empty

    # The left-hand names have put all values into the spares, with their sign.
    _, halfway = delta_rule_chunked(keys[:n], keys[:n], values[:n], beta[:n], start)
    assert (halfway.roll(n, 0) - start).abs().max() < 1e-5

    queries = torch.eye(2 * n, dtype=dtype)[:n, None]  # `print(x)` is the read q = e_x
    out, _ = delta_rule_chunked(queries.expand(n, *keys.shape), *[
        x.expand(n, *x.shape) for x in (keys, values, beta, start)])
    after_each_command = out[:, 2 * n - 1::2 * n]
    assert (after_each_command.argmax(-1).numpy() == run_commands(commands[None])[0].T).all()
    assert after_each_command.max(-1).values.min() > 0.99
    assert delta_rule_chunked(keys, keys, values, beta / 2, start)[1].abs().max() < 0.6


# --- Refusals -------------------------------------------------------------------------------------

def test_what_does_not_fit_is_refused_by_letter():
    """The message names the tensor, and what it must be. A backward by hand has no derivative."""
    q, k, v, beta, state = (x.detach() for x in inputs(T=37))
    for function, wrong, words in [
            (delta_rule_recurrent, (q, k, v, beta[..., :36]), r"beta must be \[..., T=37\]"),
            (delta_rule_chunked, (q, k, v, beta, state.mT), "state must be"),
            (delta_rule_recurrent, (q, k, v.float(), beta), "v torch.float32"),
            (delta_product, (q, k, v, beta), r"k must be \[..., T, R, K\]")]:
        with pytest.raises(ValueError, match=words):
            function(*wrong)

    q.requires_grad_()
    out, _ = delta_rule_chunked(q, k, v, beta)
    gradient, = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
