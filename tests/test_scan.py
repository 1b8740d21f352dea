"""The laws of the scan, in the order of scan.py.

Oracles: explicit matrices, the published form, data.py. Sizes are pairwise different and states are
not zero, so no swapped axis can hide.
"""

import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scan
import torch
import torch.nn.functional as F
from conftest import call, check, run_commands
from data import Group, draw_commands
from scan import (delta_product, delta_rule_chunked, delta_rule_recurrent, scan_chunked,
                  scan_recurrent, swap_machine_keys)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.overrides import TorchFunctionMode


def inputs(T, lead=(2, 3), steps=(), K=5, V=4):
    """q, k, v, beta and a state, float64, with gradients. |k| = 1; beta in (0, 2], 1 and 2 too."""
    shapes = [(T, K), (T, *steps, K), (T, *steps, V), (T, *steps), (K, V)]
    q, k, v, beta, state = (torch.randn(*lead, *shape).double() for shape in shapes)
    q = F.normalize(q, dim=-1)
    k = F.normalize(k, dim=-1)
    beta = 2 * beta.sigmoid()
    beta.flatten()[:1] = 2
    beta.flatten()[1:2] = 1
    return [x.requires_grad_() for x in (q, k, v, beta, state)]


def two_keys(T, **sizes):
    """q, k, b, v and a state, in which the read key k and the write direction b are unrelated."""
    q, k, v, _, state = inputs(T, **sizes)
    b = torch.randn(k.shape).double() / 2
    return [q, k, b.requires_grad_(), v, state]


def definition(q, k, b, v, S):
    """S_t = (I - b k^T) S_{t-1} + b v^T with explicit matrices.

    Returns: the reads; the states S_0 ... S_T; the errors v_t - S_{t-1}^T k_t.
    """
    out, states, errors = [], [S], []
    for t in range(k.shape[-2]):
        key, write = k[..., t, :, None], b[..., t, :, None]
        errors.append(v[..., t, :] - (S.mT @ key).squeeze(-1))
        S = (torch.eye(k.shape[-1]) - write * key.mT) @ S + write * v[..., t, None, :]
        states.append(S)
        out.append((S.mT @ q[..., t, :, None]).squeeze(-1))
    return torch.stack(out, -2), states, torch.stack(errors, -2)


def published(q, k, v, beta, state):
    """The delta rule as Yang et al. 2024 publish it: their S is V x K, and q is divided by sqrt K.

        S_t = S_{t-1} - beta_t (S_{t-1} k_t - v_t) k_t^T          o_t = S_t q_t / sqrt K
    """
    S = state.mT
    out = []
    for t in range(k.shape[-2]):
        q_t, k_t, v_t = (x[..., t, :, None] for x in (q * k.shape[-1]**0.5, k, v))
        S = S - beta[..., t, None, None] * (S @ k_t - v_t) @ k_t.mT
        out.append((S @ q_t / k.shape[-1]**0.5).squeeze(-1))
    return torch.stack(out, -2), S.mT


def difference(ours, theirs):
    assert [x.shape for x in ours] == [x.shape for x in theirs]
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs))


def with_gradients(function, arguments):
    """Both results, and the gradients of a random weighting of them with respect to all inputs."""
    weight = torch.Generator().manual_seed(1)
    results = function(*arguments)
    loss = sum((x * torch.randn(x.shape, generator=weight, dtype=x.dtype)).sum() for x in results)
    return [*results, *torch.autograd.grad(loss.real, arguments)]


# --- 1. The swap machine --------------------------------------------------------------------------

@pytest.mark.parametrize("beta", [0.5, 1, 1.9, 2])
def test_a_step_shortens_whatever_it_changes_unless_beta_is_two(beta):
    """It scales the direction of its key by 1 - beta, and keeps all that is orthogonal to it."""
    k, y = F.normalize(torch.randn(1, 5).double(), dim=-1), torch.randn(5, 3).double()
    _, after = delta_rule_recurrent(k, k, torch.zeros(1, 3).double(),
                                    torch.tensor([beta], dtype=torch.float64), y)
    lost = y.square().sum(0) - after.square().sum(0)
    assert (lost - beta * (2 - beta) * (k @ y).square()).abs().max() < 1e-10
    assert (k @ after - (1 - beta) * (k @ y)).abs().max() < 1e-10


def test_the_reflection_of_a_swap_key_swaps_its_two_slots():
    k = scan.swap_key(torch.tensor(3), torch.tensor(1), 5)
    reflection = torch.eye(5) - 2 * torch.outer(k, k)
    assert (reflection - torch.eye(5)[[0, 3, 2, 1, 4]]).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["S5", "A6"])
def test_exercise_3_the_swap_machine_tracks_a_group_without_training(name):
    """2n hand-set reflections per command, multiplied one by one, give data.py's states."""
    n = Group(name).degree
    commands = draw_commands(Group(name), "full", (100,), np.random.default_rng(0))
    keys = swap_machine_keys(torch.from_numpy(commands))
    assert keys.shape == (100 * 2 * n, 2 * n), "the shape of the keys"

    S = torch.eye(2 * n, n).double()  # slot i holds value i, the spares are empty
    for t, state in enumerate(run_commands(commands[None])[0]):
        for k in keys[2 * n * t:2 * n * (t + 1)]:
            S = S - 2 * torch.outer(k, k @ S)
        assert (S[:n] - torch.eye(n)[state]).abs().max() < 1e-9, f"after {t + 1} commands"


# --- 2. The definition ----------------------------------------------------------------------------

@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3)])
def test_the_loop_and_the_chunks_are_the_published_delta_rule(lead):
    """Outputs, state and gradients, whatever the leading axes. Without a state, S starts at zero.
    Traps: S is transposed there; beta = 1 and 2 are included."""
    *arguments, state = inputs(T=21, lead=lead)
    expected = with_gradients(published, [*arguments, state])
    from_zeros = published(*arguments, torch.zeros_like(state))
    for rule in (delta_rule_recurrent, delta_rule_chunked):
        assert difference(with_gradients(rule, [*arguments, state]), expected) < 1e-10
        assert difference(rule(*arguments), from_zeros) < 1e-10


@pytest.mark.parametrize("T, lead, dtype, result, tolerance", [
    (11, (2, 3), torch.float64, torch.float64, 1e-10),
    (7, (), torch.bfloat16, torch.float32, 1e-3)],
    ids=["float64", "bfloat16"])
def test_exercise_2_the_loop_over_tokens_is_the_definition(T, lead, dtype, result, tolerance):
    """Traps: b scales v - S^T k, not v alone; the read at t sees the write at t; `state +=` changes
    the caller's state; in bfloat16 it loses its digits."""
    *given, state = [x.to(dtype) for x in two_keys(T, lead=lead)]
    for start, more in ((state, [state]), (torch.zeros_like(state), [])):
        out, states, _ = definition(*[x.double() for x in (*given, start)])
        expected = {"out": out.to(result), "the last state": states[-1].to(result)}
        ours = call(scan.scan_recurrent, *given, *more)
        check(ours, expected, tolerance)
        if dtype == result:
            ours, theirs = [torch.autograd.grad(sum(x.sum() for x in results), [*given, *more])
                            for results in (ours, expected.values())]
            names = ["g(q)", "g(k)", "g(b)", "g(v)", "g(state)"]
            check(ours, dict(zip(names, theirs)), tolerance)


@pytest.mark.parametrize("rule", [delta_rule_recurrent, delta_rule_chunked])
def test_half_precision_is_computed_in_float32(rule):
    """To the bit. Trap: beta k is a product of two half-precision numbers."""
    types = torch.bfloat16, torch.bfloat16, torch.half, torch.bfloat16, torch.half
    half = [x.detach().to(dtype) for x, dtype in zip(inputs(T=21), types)]
    assert difference(rule(*half), rule(*[x.float() for x in half])) == 0


def test_shapes_that_torch_would_broadcast_are_refused():
    q, k, v, beta, state = (x.detach() for x in inputs(T=37))
    for function, wrong in [
            (scan_recurrent, (q[..., :1, :], k, k, v)), (scan_chunked, (q, k, k, v[..., :1, :])),
            (delta_rule_chunked, (q, k, v, beta[..., :1])),
            (delta_rule_chunked, (q, k, v, beta, state[:, :1]))]:
        with pytest.raises(ValueError, match="must have the shape"):
            function(*wrong)


# --- 3. Chunks ------------------------------------------------------------------------------------

def by_chunks(q, k, b, v, S, C):
    """The arguments of chunked_forward, and what it must return, by name."""
    out, states, errors = definition(q, k, b, v, S)
    q, k, b, v, out, errors = [x.unflatten(-2, (-1, C)) for x in (q, k, b, v, out, errors)]
    inverse = torch.linalg.inv(torch.eye(C) + (k @ b.mT).tril(-1))
    return (q, k, b, v, S), {
        "out": out, "the last state": states[-1], "(I + M)^-1": inverse, "W": inverse @ k,
        "the state before each chunk": torch.stack(states[:-1:C], -3), "D": errors,
        "tril(Q B^T)": (q @ b.mT).tril()}


@pytest.mark.parametrize("lead, N, C", [((2, 3), 3, 4), ((), 1, 6), ((2,), 6, 1)])
def test_exercise_5_every_part_of_a_chunk_is_what_its_equation_says(lead, N, C):
    given, expected = by_chunks(*two_keys(N * C, lead=lead), C)
    out, state, saved = call(scan.chunked_forward, *given)
    check([out, state, *saved], expected)


def test_exercise_5_a_longer_chunk_takes_no_more_operations():
    class Count(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), keywords=None):
            calls[-1] += 1
            return function(*arguments, **(keywords or {}))

    calls = []
    for C in (4, 20):
        given, _ = by_chunks(*two_keys(3 * C), C)
        calls.append(0)
        with Count():
            scan.chunked_forward(*given)
    assert calls[0] == calls[1] > 0, "a loop over tokens, or over the rows of a triangle?"


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("seed", range(10))
def test_the_chunks_are_the_loop_in_values_and_gradients(seed, dtype):
    """For random lengths, widths and chunk sizes, and any write direction. Trap: the gradient of a
    complex product has a conjugate."""
    rng = np.random.default_rng(seed)
    T, chunk = rng.integers(1, (70, 40)).tolist()
    K, V = rng.permutation(np.arange(2, 8))[:2].tolist()
    given = [(x * torch.rand_like(x, dtype=dtype)).detach().requires_grad_()
             for x in two_keys(T, K=K, V=V)]
    expected = with_gradients(scan_recurrent, given)
    ours = with_gradients(partial(scan_chunked, chunk_size=chunk), given)
    largest = max(1, *(x.abs().max().item() for x in expected))  # such a step can stretch the state
    assert difference(ours, expected) < 1e-10 * largest, (T, chunk, K, V)


# --- 4. Several Householder steps per token -------------------------------------------------------

def test_delta_product_is_r_steps_and_one_read():
    """The steps r = 1 ... R of a token in this order, and then its read: the published form."""
    q, k, v, beta, state = inputs(T=11, steps=(3,))
    expected, last = published(q.repeat_interleave(3, -2), k.flatten(2, 3), v.flatten(2, 3),
                               beta.flatten(2), state)
    ours = delta_product(q, k, v, beta, state, chunk_size=4)
    assert difference(ours, [expected[:, :, 2::3], last]) < 1e-10
    assert ours[0].is_contiguous()  # a view would keep all three reads


# --- 5. Numerics ----------------------------------------------------------------------------------

@pytest.mark.parametrize("beta, nearly", [(0.9, 0), (2, 0), (2, 0.01)])
def test_exercise_5_one_repeated_key_is_solved_precisely_in_float32(beta, nearly):
    """Multiplying out (I - M)(I + M^2)(I + M^4)... is wrong by 1e4 and more here."""
    q, k, _, v, state = two_keys(64)
    k = F.normalize(k[..., :1, :] + nearly * k, dim=-1)
    given, expected = by_chunks(*[x.float() for x in (q, k, beta * k, v, state)], 64)
    out, state, _ = scan.chunked_forward(*given)
    check([out, state], dict([*expected.items()][:2]), 5e-3)


# --- 6. The backward ------------------------------------------------------------------------------

def test_exercise_6_the_five_gradients_are_those_of_the_definition():
    """Traps: g(M) has a minus and no diagonal; G_n belongs to the state AFTER chunk n. In inference
    mode autograd does not work."""
    tokens = two_keys(12)
    given, expected = by_chunks(*tokens, 4)
    out, state, *saved = expected.values()
    g_out, G = torch.randn_like(out), torch.randn_like(state)
    gradients = [x.reshape(part.shape) for x, part in zip(
        torch.autograd.grad([out, state], tokens, [g_out, G]), given)]

    with torch.inference_mode():
        ours = call(scan.chunked_backward, *[x.detach() for x in (*given[:3], *saved, g_out, G)])
    check(ours, dict(zip(["g(Q)", "g(K)", "g(B)", "g(V)", "g(S_0)"], gradients)), 1e-9)


def test_a_second_derivative_is_refused():
    """Trap: to autograd the saved tensors are constants, so it would be silently wrong."""
    tokens = two_keys(9)
    gradient, = torch.autograd.grad(scan_chunked(*tokens)[0].square().sum(), tokens[1],
                                    create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        gradient.sum().backward()


# --- 7. Autograd and torch.compile ----------------------------------------------------------------

def test_autocast_rounds_no_product():
    given = [x.detach().float().requires_grad_() for x in inputs(T=21)]
    expected = with_gradients(delta_rule_chunked, given)
    with torch.autocast("cpu", torch.bfloat16):
        assert difference(with_gradients(delta_rule_chunked, given), expected) == 0


@pytest.mark.parametrize("solved", ["by columns", "by rows"])
def test_the_operators_keep_the_rules_of_torch(solved, monkeypatch):
    """opcheck: nothing is changed in place, no result shares memory with another, and the fakes
    have the true shapes and strides, also for an input like S.mT, and where torch solves a triangle
    by rows (on MPS)."""
    if solved == "by rows":
        solve = torch.linalg.solve_triangular
        monkeypatch.setattr(torch.linalg, "solve_triangular",
                            lambda *x, **more: solve(*x, **more).contiguous())
    rules = "test_schema", "test_faketensor"
    state, G = torch.randn(2, 2, 6, 5).mT
    for T in (11, 12):
        q, k, b = torch.randn(3, 2, T, 5)
        v, g_out = torch.randn(2, 2, T, 6)
        torch.library.opcheck(scan.forward_operator, (q, k, b, v, state, 4), test_utils=rules)
        _, _, *saved = scan.forward_operator(q, k, b, v, state, 4)
        given = q, k, b, *saved, g_out, G
        torch.library.opcheck(scan.backward_operator, given, test_utils=rules)


@pytest.mark.parametrize("R", [1, 3])
def test_one_compiled_graph_serves_all_lengths_with_the_bits_of_eager(R):
    """One unbroken graph, whether or not T is a multiple of the chunk size: values, gradients."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")  # what precedes the compiler itself
    compiled = torch.compile(delta_product, backend=backend, fullgraph=True, dynamic=True)
    for T in (41, 72, 48, 64, 90):
        given = [x.detach().float().requires_grad_() for x in inputs(T, (2,), (R,), K=8)]
        ours, theirs = (with_gradients(form, given) for form in (compiled, delta_product))
        assert difference(ours, theirs) == 0
    assert backend.frame_count == 1


def test_an_exported_scan_takes_any_length():
    class Scan(torch.nn.Module):
        def forward(self, *given):
            return delta_rule_chunked(*given)

    given, longer = [[x.detach() for x in inputs(T)] for T in (41, 70)]
    lengths = (*4 * [{2: torch.export.Dim("T", min=33)}], None)
    exported = torch.export.export(Scan(), (*given,), dynamic_shapes={"given": lengths})
    assert difference(exported.module()(*longer), delta_rule_chunked(*longer)) == 0


# --- The demo -------------------------------------------------------------------------------------

def test_the_demo_executes_its_commands_as_python_does(capsys):
    """A swap for each name; at the end of a command the spares are empty."""
    scan.show_swap_machine("abcd")
    state = dict(zip("abcd", "1234"))
    for shown in capsys.readouterr().out.split(">>> ")[1:]:
        command, *swaps = shown.strip().splitlines()
        exec(command, {}, state)
        assert f"variables {' '.join(state.values())}   spares 0 0 0 0" in swaps[-1]
        assert len(swaps) == 8 and re.search("park a$", swaps[0]) and "fetch" in swaps[4]


def test_a_copy_of_the_file_needs_only_torch_and_leaves_the_original_alone(capsys, monkeypatch):
    """Even a wrong one. Trap: torch knows an operator by its name, for the whole process."""
    given = [x.detach() for x in inputs(T=21)]
    before = delta_rule_chunked(*given)
    monkeypatch.setitem(sys.modules, "data", None)
    source = Path(scan.__file__).read_text(encoding="utf-8").replace("@ d_NCV   ", "@ u_NCV   ")
    exec(compile(source, "copy.py", "exec"), {"__name__": "__main__"})
    assert "1,000 sequential steps by the loop, and 63 by chunks" in capsys.readouterr().out
    assert difference(delta_rule_chunked(*given), before) == 0
