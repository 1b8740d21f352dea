"""The chunked scan is the definition. Oracles: explicit matrices, the published form, data.py.

Sizes are pairwise different and states are not zero, so no swapped axis can hide.
"""

import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import scan
import torch
import torch.nn.functional as F
from conftest import call, check, needs_cuda, run_commands
from data import Group, draw_commands
from scan import (delta_product, delta_rule_chunked, delta_rule_recurrent, scan_chunked,
                  scan_recurrent, swap_machine_keys)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.overrides import TorchFunctionMode


def inputs(T, lead=(2, 3), steps=(), K=5, V=4):
    """q, k, v, beta and a state, float64, with gradients. |k| = 1; beta in (0, 2], 1 and 2 too."""
    shapes = [(T, K), (T, *steps, K), (T, *steps, V), (T, *steps), (K, V)]
    q, k, v, beta, state = (torch.randn(*lead, *shape).double() for shape in shapes)
    q = q / q.norm(dim=-1, keepdim=True)
    k = k / k.norm(dim=-1, keepdim=True)
    beta = 2 * beta.sigmoid()
    beta.flatten()[:1] = 2
    beta.flatten()[1:2] = 1
    return [x.requires_grad_() for x in (q, k, v, beta, state)]


def two_keys(T, **sizes):
    """q, k, b, v and a state, in which the read key k and the write direction b are unrelated."""
    q, k, v, _, state = inputs(T, **sizes)
    b = torch.randn(k.shape).double() / 2
    return [q, k, b.requires_grad_(), v, state]


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
    return max([(a - b).abs().max().item() for a, b in zip(ours, theirs) if a.numel()], default=0)


def with_gradients(function, arguments):
    """Both results, and the gradients of a random weighting of them with respect to all inputs."""
    weight = torch.Generator().manual_seed(1)
    results = function(*arguments)
    loss = sum((x * torch.randn(x.shape, generator=weight, dtype=x.dtype)).sum() for x in results)
    return [*results, *torch.autograd.grad(loss, arguments)]


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (0, 2)])
def test_the_loop_and_the_chunks_are_the_published_delta_rule(lead):
    """Outputs, state and gradients, whatever the leading axes. Without a state, S starts at zero.
    Traps: S is transposed there; beta = 1 and 2 are included."""
    *arguments, state = inputs(T=21, lead=lead)
    expected = with_gradients(published, [*arguments, state])
    from_zeros = published(*arguments, torch.zeros_like(state))
    for rule in (delta_rule_recurrent, delta_rule_chunked):
        assert difference(with_gradients(rule, [*arguments, state]), expected) < 1e-10
        assert difference(rule(*arguments), from_zeros) < 1e-10


# --- Exercises 2, 3 and 5 ---

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


def by_chunks(q, k, b, v, S, C):
    """The arguments of chunked_forward, and what it must return, by name."""
    out, states, errors = definition(q, k, b, v, S)
    q, k, b, v, out, errors = [x.unflatten(-2, (-1, C)) for x in (q, k, b, v, out, errors)]
    inverse = torch.linalg.inv(torch.eye(C) + (k @ b.mT).tril(-1))
    return (q, k, b, v, S), {
        "out": out, "the last state": states[-1], "(I + L)^-1": inverse, "W": inverse @ k,
        "the state before each chunk": torch.stack(states[:-1:C], -3), "D": errors,
        "tril(Q B^T)": (q @ b.mT).tril()}


@pytest.mark.parametrize("T, lead, dtype, result, tolerance", [
    (11, (2, 3), torch.float64, torch.float64, 1e-10),
    (7, (), torch.bfloat16, torch.float32, 1e-3)],
    ids=["float64", "bfloat16"])
def test_exercise_2_the_loop_over_tokens_is_the_definition(T, lead, dtype, result, tolerance,
                                                           monkeypatch):
    """Traps: b scales v - S^T k, not v alone; the read at t sees the write at t; `state +=` changes
    the caller's state, whose layout is free; in bfloat16 it loses its digits; no chunks here."""
    for name in ("scan_chunked", "chunked_forward", "forward_operator"):
        monkeypatch.setattr(scan, name, lambda *_, **more: pytest.fail("a loop, not the chunks"))

    *given, state = [x.to(dtype) for x in two_keys(T, lead=lead)]
    state = state.mT.contiguous().mT
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


@pytest.mark.parametrize("lead, N, C", [((2, 3), 3, 4), ((), 1, 6), ((2,), 6, 1)])
def test_exercise_3_every_part_of_a_chunk_is_what_its_equation_says(lead, N, C):
    given, expected = by_chunks(*two_keys(N * C, lead=lead), C)
    out, state, saved = call(scan.chunked_forward, *given)
    check([out, state, *saved], expected)


@pytest.mark.parametrize("beta, C", [(2.0, 32), (0.9, 64)])
def test_exercise_3_one_repeated_key_is_solved_precisely_in_float32(beta, C):
    """Multiplying out (I - L)(I + L^2)(I + L^4)... is wrong by 1e4 and more here."""
    q, k, _, v, state = two_keys(C)
    k = F.normalize(k[..., :1, :], dim=-1).expand_as(k)
    given, expected = by_chunks(*[x.float() for x in (q, k, beta * k, v, state)], C)
    out, state, _ = scan.chunked_forward(*given)
    check([out, state], dict([*expected.items()][:2]), 1e-3)


def test_exercise_3_operations_are_as_many_as_chunks_need_and_none_has_tokens_times_tokens():
    class Sizes(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), keywords=None):
            result = function(*arguments, **(keywords or {}))
            sizes[-1].append(result.numel() if isinstance(result, torch.Tensor) else 0)
            return result

    sizes = []
    for C in (4, 20):
        given, expected = by_chunks(*two_keys(3 * C), C)
        sizes.append([])
        with Sizes():
            scan.chunked_forward(*given)
    assert len(sizes[0]) == len(sizes[1]) > 0, \
        "longer chunks take more operations: a loop over tokens, or over the rows of a triangle?"
    largest = max(x.numel() for x in (*given, *expected.values()))
    assert max(sizes[1]) <= largest, "a tensor exceeds all results: do chunks see each other?"


def test_exercise_5_the_five_gradients_are_those_of_the_definition():
    """Traps: M has a minus and no diagonal; G_n belongs to the state AFTER chunk n. In inference
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


# --- Chunks ---

@pytest.mark.parametrize("seed, device", [*((seed, "cpu") for seed in range(20)), pytest.param(
    0, "cuda", marks=needs_cuda)])
def test_chunked_equals_the_loop_in_values_and_gradients(seed, device):
    """For random lengths, widths and chunk sizes, and any write direction. Traps: M in (12) has a
    minus and no diagonal; G_n belongs to the state AFTER chunk n."""
    rng = np.random.default_rng(seed)
    T, chunk = rng.integers(1, (70, 40)).tolist()
    K, V = rng.permutation(np.arange(2, 8))[:2].tolist()
    given = two_keys(T, K=K, V=V)

    def chunked(*arguments):
        results = scan_chunked(*[x.to(device) for x in arguments], chunk_size=chunk)
        return [x.cpu() for x in results]

    expected = with_gradients(scan_recurrent, given)
    largest = max(1, *(x.abs().max().item() for x in expected))  # such a step can stretch the state
    assert difference(with_gradients(chunked, given), expected) < 1e-10 * largest, (T, chunk, K, V)


def test_delta_product_is_r_steps_and_one_read(monkeypatch):
    """The steps r = 1 ... R of a token in this order, and then its read: the published form."""
    monkeypatch.setattr(scan, "default_chunk_size", None)  # not asked if a size is given
    q, k, v, beta, state = inputs(T=11, steps=(3,))
    expected, last = published(q.repeat_interleave(3, -2), k.flatten(2, 3), v.flatten(2, 3),
                               beta.flatten(2), state)
    ours = delta_product(q, k, v, beta, state, chunk_size=4)
    assert difference(ours, [expected[:, :, 2::3], last]) < 1e-10


# --- What a chunk is for --------------------------------------------------------------------------

@pytest.mark.parametrize("form, steps", [(delta_rule_chunked, ()), (delta_product, (3,))])
def test_results_own_their_memory_and_can_be_changed_in_place(form, steps):
    """As in `out *= gate`. Traps: a view of a Function's output refuses; a slice keeps the padding,
    or the reads of all steps, in memory."""
    given = inputs(T=11, steps=steps)
    doubled = with_gradients(lambda *x: [result.mul_(2) for result in form(*x)], given)
    assert difference(doubled, [2 * x for x in with_gradients(form, given)]) == 0
    for x in form(*given):
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


# --- torch.compile --------------------------------------------------------------------------------

def other_layout(x, rng):
    """A tensor of this shape that is permuted in memory, sliced, expanded, or x itself."""
    order = rng.permutation(x.ndim)
    permuted = x.permute(*order).contiguous().permute(*np.argsort(order))
    sliced = torch.stack([x, x], -1)[..., 0]
    return [x, permuted, sliced, x[:1].expand_as(x)][rng.integers(4)]


@pytest.fixture(params=["by columns", "by rows"])
def solver(request, monkeypatch):
    """torch solves a triangular system by columns on CPUs and CUDA, and by rows on MPS."""
    if request.param == "by rows":
        solve = torch.linalg.solve_triangular
        monkeypatch.setattr(torch.linalg, "solve_triangular",
                            lambda *x, **more: solve(*x, **more).contiguous())


@pytest.mark.parametrize("seed", [5, 6, 8, 14])
def test_the_operators_for_torch_compile_keep_torchs_rules_in_any_layout(seed, solver):
    """opcheck: nothing is changed in place, no result shares memory with another, and the fakes
    have the true shapes and strides, also for an input like S.mT. (With these seeds, the strides
    would be others if the operators did not copy.)"""
    rng = np.random.default_rng(seed)
    lead, N, C = [(), (1,), (2, 3)][seed % 3], int(rng.integers(1, 4)), int(rng.integers(1, 6))
    shapes = [(N, C, 3), (N, C, 3), (N, C, 3), (N, C, 2), (3, 2)]
    given = [other_layout(torch.randn(*lead, *shape), rng) for shape in shapes]
    rules = "test_schema", "test_faketensor"  # compiled gradients have their own tests below
    torch.library.opcheck(scan.forward_operator, given, test_utils=rules)

    out, state, *saved = scan.forward_operator(*given)
    g_out, G = (other_layout(x, rng) for x in (out, state))
    torch.library.opcheck(scan.backward_operator, (*given[:3], *saved, g_out, G), test_utils=rules)


@pytest.mark.skipif("INDUCTOR_TESTS" not in os.environ, reason="with a C++ compiler: "
                    "INDUCTOR_TESTS=1 python -m pytest tests -k inductor")
def test_inductor_compiles_lengths_below_and_above_a_chunk(solver):
    """The compiler itself, for a state as the literature has it, V x K: 10 s of CPU time."""
    torch._dynamo.reset()
    compiled = torch.compile(delta_rule_chunked, fullgraph=True, dynamic=True,
                             options={"fx_graph_cache": False})
    for T in (9, 41):
        *given, state = inputs(T)
        given.append(state.detach().mT.contiguous().mT.requires_grad_())
        ours, theirs = (with_gradients(rule, given) for rule in (compiled, delta_rule_chunked))
        assert difference(ours, theirs) < 1e-10


@pytest.mark.parametrize("R", [1, 3])
def test_one_compiled_graph_serves_all_lengths_with_the_bits_of_eager(R):
    """One unbroken graph, whether or not T is a multiple of the chunk size: values, gradients.
    Trap: a slice, or a branch on the padding, is another graph from the first multiple on."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")  # what precedes the compiler itself
    compiled = torch.compile(delta_product, backend=backend, fullgraph=True, dynamic=True)
    for T in (41, 72, 48, 64, 90):
        given = [x.detach().float().requires_grad_() for x in inputs(T, (2,), (R,), K=8)]
        ours, theirs = (with_gradients(form, given) for form in (compiled, delta_product))
        assert difference(ours, theirs) == 0
    assert backend.frame_count == 1


# --- Numerics -------------------------------------------------------------------------------------

@pytest.mark.parametrize("rule", [delta_rule_recurrent, delta_rule_chunked])
def test_half_precision_and_autocast_are_computed_in_float32(rule):
    """The results are those of the same numbers in float32, to the bit; a gradient has the dtype of
    its input, to which it is rounded. Traps: beta k is a product of two half-precision numbers;
    autocast would round every matrix product."""
    types = torch.bfloat16, torch.bfloat16, torch.half, torch.bfloat16, torch.half
    half = [x.detach().to(dtype).requires_grad_() for x, dtype in zip(inputs(T=21), types)]
    full = [x.detach().float().requires_grad_() for x in half]
    expected = with_gradients(rule, full)

    assert difference(rule(*half), expected[:2]) == 0
    for ours, theirs, x in zip(with_gradients(rule, half)[2:], expected[2:], half):
        assert ours.dtype == x.dtype
        assert (ours - theirs).abs().max() < theirs.abs().max() / 64

    if rule is delta_rule_chunked:  # only the chunks have matrix products
        with torch.autocast("cpu", torch.bfloat16):
            ours = [*rule(*half), *with_gradients(rule, full)]
        assert ours[1].dtype == torch.float32
        assert difference(ours, [*expected[:2], *expected]) == 0


# --- The swap machine -----------------------------------------------------------------------------

@pytest.mark.parametrize("name, dtype", [("S5", torch.float32), ("D6", torch.float64)])
def test_the_swap_machine_tracks_the_group_without_training(name, dtype):
    """2n hand-set reflections per command give data.py's states after every command. With beta = 1
    the same keys erase what they should have moved."""
    group = Group(name)
    n = group.degree
    commands = draw_commands(group, "full", (1000,), np.random.default_rng(0))
    keys = swap_machine_keys(torch.from_numpy(commands)).to(dtype)
    values, beta = keys.new_zeros(len(keys), n), keys.new_full(keys.shape[:-1], 2)
    start = torch.eye(2 * n, n, dtype=dtype)  # slot i holds value i, the spares are empty

    # The left-hand names have moved all values into the spares, with their signs.
    _, halfway = delta_rule_chunked(keys[:n], keys[:n], values[:n], beta[:n], start)
    assert (halfway.roll(n, 0) - start).abs().max() < 1e-5

    queries = torch.eye(2 * n, dtype=dtype)[:n, None]  # `print(x)` is the read q = e_x
    out, _ = delta_rule_chunked(queries.expand(n, *keys.shape), *[
        x.expand(n, *x.shape) for x in (keys, values, beta, start)])
    after_each_command = out[:, 2 * n - 1::2 * n]
    assert (after_each_command.argmax(-1).numpy() == run_commands(commands[None])[0].T).all()
    assert after_each_command.max(-1).values.min() > 0.99
    assert delta_rule_chunked(keys, keys, values, beta / 2, start)[1].abs().max() < 0.6


def test_two_projections_carry_half_of_a_row_into_an_empty_slot():
    """With beta = 1: along the key of the swap, then along the slot that is left. A machine of such
    steps tracks S5 for a reader that takes the largest entry; a command keeps a quarter."""
    commands = draw_commands(Group("S5"), "full", (60,), np.random.default_rng(0))
    swaps = swap_machine_keys(torch.from_numpy(commands)).float()
    left = torch.cat([torch.arange(5).expand(60, 5), torch.from_numpy(commands) + 5], 1)
    keys = torch.stack([swaps, F.one_hot(left.flatten(), 10)], 1).flatten(0, 1)

    nothing, ones = torch.zeros(len(keys), 5), torch.ones(len(keys))
    largest, place = delta_rule_chunked(keys, keys, nothing, ones, torch.eye(10, 5))[1][:5].max(-1)
    assert (place.numpy() == run_commands(commands[None])[0, -1]).all()
    assert (largest * 4.0**60 - 1).abs().max() < 1e-3


def test_the_demo_says_swap_by_swap_what_python_does(capsys):
    """Each line swaps two slots of the line before; each command ends as Python's does."""
    scan.show_swap_machine("abcd")
    state, slots = dict(zip("abcd", "1234")), dict(zip("abcdABCD", "12340000"))  # A is a'
    line = r"swap (\w) and (\w)': +variables ([\d ]+?)   spares ([\d ]+?)   (.*)"
    for command in capsys.readouterr().out.split(">>> ")[1:]:
        before = dict(state)
        exec(command.splitlines()[0], {}, state)
        assert state != before  # a command that changes nothing shows nothing
        swaps = re.findall(line, command)
        for i, (x, y, *values, why) in enumerate(swaps):
            slots[x], slots[y.upper()] = slots[y.upper()], slots[x]
            assert " ".join(slots.values()) == " ".join(values)
            assert why == (f"fetch {y} into {x}" if i >= 4 else f"park {x}")
            assert slots[x] == before[y] if i >= 4 else x == y
        assert len(swaps) == 8 and slots == state | dict.fromkeys("ABCD", "0")


def test_the_file_needs_nothing_but_torch_in_any_folder_or_notebook(capsys, monkeypatch):
    """Traps: there is no data.py; a notebook's cell has no __file__; a path need not be UTF-8."""
    monkeypatch.setitem(sys.modules, "data", None)
    source = Path(scan.__file__).read_text(encoding="utf-8")
    exec(compile(source, "caf\udce9", "exec"), {"__name__": "__main__"})
    assert "1,000 sequential steps by the loop, and 63 by chunks" in capsys.readouterr().out


# --- Why beta = 2 ---------------------------------------------------------------------------------

def product(keys, betas):
    """A_m ... A_1 with A = I - beta k k^T: keys [..., m, K] of norm 1, betas [..., m]."""
    P = torch.eye(keys.shape[-1]).double()
    for k, beta in zip(keys.unbind(-2), betas[..., None, None].unbind(-3)):
        P = P - beta * k[..., :, None] * (k[..., None, :] @ P)
    return P


@pytest.mark.parametrize("m", [1, 2, 3, 13])
def test_no_product_with_beta_up_to_one_exceeds_the_bound(m):
    """On what reaches -x. Exercise 10 comes arbitrarily close to it."""
    keys = F.normalize(torch.randn(3000, m, 3).double().cumsum(1), dim=-1)  # neighbours are similar
    P = product(keys, torch.rand(3000, m).double().mul(2).clamp(max=1))
    reached = torch.linalg.eigvalsh(-(P + P.mT) / 2).max()
    assert reached < math.cos(math.pi / (m + 1))**(m + 1) + 1e-10


@pytest.mark.parametrize("bound, fades", [(1, True), (1.9, True), (2, False)])
def test_whatever_a_repeated_command_moves_fades_unless_beta_is_two(bound, fades):
    """Each change of the state is at most c < 1 times the one before, where c is the norm of the
    command on the span of its keys. Writes and another direction of the state do not help."""
    _, k, v, _, state = [x.detach() for x in inputs(T=3, lead=())]
    beta = torch.full((3,), bound).double()
    U, _ = torch.linalg.qr(k.mT)
    c = torch.linalg.matrix_norm(product(k, beta) @ U, 2)
    assert (c < 1 - 1e-6) == fades

    states = [state]
    for _ in range(300):
        states.append(delta_rule_recurrent(k, k, v, beta, states[-1])[1])
    changes = torch.stack(states).diff(dim=0).norm(dim=(1, 2))
    assert (changes[1:] <= c * changes[:-1] + 1e-10).all()
    assert (changes[-1] < 0.01 * changes[0]) == fades


def test_slots_survive_rounding_after_each_token_and_bfloat16_keys_lose_a_third():
    """1,024 commands on five variables, in float32, float16, bfloat16 and int8."""
    commands = draw_commands(Group("S5"), "full", (1024,), np.random.default_rng(0))
    keys = swap_machine_keys(torch.from_numpy(commands)).float()
    expected = torch.eye(5)[run_commands(commands[None])[0, -1]]

    S = torch.eye(10, 5).repeat(4, 1, 1)
    for k in keys:
        S = S - 2 * k[:, None] * (k @ S)[:, None]
        S = torch.stack([S[0], S[1].half().float(), S[2].bfloat16().float(),
                         S[3].mul(127).round().div(127)])
    assert (S[:, :5] - expected).abs().max() < 2e-7

    rough = keys.bfloat16().float()
    for k, largest in ((rough, 0.66), (F.normalize(rough, dim=-1), 1)):
        _, S = delta_rule_chunked(k, k, torch.zeros(len(k), 5), torch.full((len(k),), 2.0),
                                  torch.eye(10, 5))
        assert (S[:5] - largest * expected).abs().max() < 0.02


# --- Refusals -------------------------------------------------------------------------------------

def test_shapes_that_do_not_fit_are_refused():
    """Trap: torch would broadcast an axis of size 1. A second derivative is refused as well."""
    q, k, v, beta, state = (x.detach() for x in inputs(T=37))
    for function, wrong in [
            (delta_rule_chunked, (q, k, v, beta, state.mT)),
            (delta_rule_chunked, (q, k, v, beta[..., :1])),
            (delta_product, (q, k[..., None, :], v[..., None, :], beta[..., None, :])),
            (scan_chunked, (q, k, k[..., :3], v)),
            (scan_recurrent, (q[..., :1, :], k, k, v)),
            (scan_chunked, (q, k, k, v[..., :1, :])),
            (scan_chunked, [x[..., :0, :] for x in (q, k, k, v)])]:
        with pytest.raises(ValueError, match="must have the shape"):
            function(*wrong)

    q.requires_grad_()
    out, _ = delta_rule_chunked(q, k, v, beta)
    with pytest.raises(RuntimeError, match="no second derivative"):  # even of a linear loss
        torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="complex"):  # its values are right, and refused are its
        out, _ = scan_chunked(*(x.to(torch.complex128) for x in (q, k, k, v)))  # gradients
        out.abs().sum().backward()
