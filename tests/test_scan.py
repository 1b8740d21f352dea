"""The chunked scan is the definition. Oracles: explicit matrices, the loop, data.py's permutations.

Sizes are pairwise different and states are not zero, so that no swapped axis can hide.
"""

import re

import numpy as np
import pytest
import scan
import torch
from conftest import needs_cuda
from data import Group, draw_commands, run_commands
from scan import (delta_product, delta_rule_chunked, delta_rule_recurrent, scan_chunked,
                  scan_recurrent, swap_machine_keys)
from torch.utils._python_dispatch import TorchDispatchMode


def inputs(T, lead=(2, 3), beta=None, writes=(), K=5, V=4):
    """q, k, v, beta and a state, with gradients; |k| = 1, beta in (0, 2) or as given; float64."""
    shapes = [(T, K), (T, *writes, K), (T, *writes, V), (T, *writes), (K, V)]
    q, k, v, strength, state = (torch.randn(*lead, *shape).double() for shape in shapes)
    q = q / q.norm(dim=-1, keepdim=True)
    k = k / k.norm(dim=-1, keepdim=True)
    strength = 2 * strength.sigmoid() if beta is None else torch.full_like(strength, beta)
    return [x.requires_grad_() for x in (q, k, v, strength, state)]


def two_keys(T, **sizes):
    """q, k, b, v and a state: the read key k and the write b have nothing to do with each other."""
    q, k, v, _, state = inputs(T, **sizes)
    b = torch.randn(k.shape).double() / 2
    return [q, k, b.requires_grad_(), v, state]


def by_matrices(q, k, v, beta, S):
    """Equation (3) as written, with explicit matrices I - beta k k^T."""
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
def test_the_loop_and_the_chunks_are_the_delta_rule(lead):
    """Equation (3), whatever the leading axes; without a state they begin at zero."""
    *arguments, state = inputs(T=11, lead=lead)
    for start, given in ((state, [state]), (torch.zeros_like(state), [])):
        expected = by_matrices(*arguments, start)
        for rule in (delta_rule_recurrent, delta_rule_chunked):
            assert difference(rule(*arguments, *given), expected) < 1e-10


def test_a_step_compares_under_one_key_and_writes_along_another():
    """S_t = (I - b k^T) S_{t-1} + b v^T: explicit matrices, which are not symmetric here. Traps: b
    scales v - S^T k, not v alone; `state +=` writes into the caller's state, and autograd refuses
    that."""
    q, k, b, v, state = two_keys(T=11)
    for start, given in ((state, [state]), (torch.zeros_like(state), [])):
        S, out = start, []
        for t in range(11):
            step = torch.eye(5) - b[..., t, :, None] * k[..., t, None, :]
            S = step @ S + b[..., t, :, None] * v[..., t, None, :]
            out.append((S.mT @ q[..., t, :, None]).squeeze(-1))
        ours = scan_recurrent(q, k, b, v, *given)
        assert difference(ours, [torch.stack(out, -2), S]) < 1e-10


@pytest.mark.parametrize("seed, device", [*((seed, "cpu") for seed in range(20)), pytest.param(
    0, "cuda", marks=needs_cuda)])
def test_chunked_equals_the_loop_in_values_and_gradients(seed, device):
    """Outputs, last state and the gradients of all five inputs, for random lengths, widths and
    chunks, a ragged end; the delta rule, beta at 1 and 2, too, and a write of its own."""
    rng = np.random.default_rng(seed)
    T, chunk = int(rng.integers(1, 70)), int(rng.integers(1, 40))
    K, V = (int(x) for x in rng.permutation(np.arange(2, 8))[:2])
    kind = ["two keys", None, 1.0, 2.0][seed % 4]
    if kind == "two keys":
        loop, chunks, given = scan_recurrent, scan_chunked, two_keys(T, K=K, V=V)
    else:
        loop, chunks = delta_rule_recurrent, delta_rule_chunked
        given = inputs(T, beta=kind, K=K, V=V)

    def chunked(*arguments):
        results = chunks(*[x.to(device) for x in arguments], chunk_size=chunk)
        return [x.cpu() for x in results]

    for what in (lambda function, given: function(*given), gradients):
        ours, theirs = what(chunked, given), what(loop, given)
        largest = max(1, *(x.abs().max().item() for x in theirs))  # keys of their own may stretch
        assert difference(ours, theirs) < 1e-10 * largest, (T, chunk, K, V)


def test_finite_differences_agree_with_the_gradients_of_all_five_inputs():
    """gradcheck shares nothing with (10) to (16). Ragged chunks, and a write of its own. Traps: M
    has a minus and no diagonal; G_n belongs to the state AFTER chunk n."""
    given = two_keys(T=6, lead=(1,), K=3, V=2)
    assert torch.autograd.gradcheck(lambda *x: scan_chunked(*x, chunk_size=4), given)


def test_the_backward_by_hand_needs_no_autograd():
    """In inference mode torch differentiates nothing: what comes out is made of products."""
    given = two_keys(T=12)
    expected = gradients(scan_recurrent, given)
    with torch.inference_mode():
        *chunks, state = [scan.in_chunks(x, 4) for x in given[:4]] + [given[4]]
        out, last, kept = scan.chunked_forward(*chunks, state)
        weight = torch.Generator().manual_seed(1)
        g_out = torch.randn(2, 3, 12, 4, generator=weight, dtype=torch.float64)
        G = torch.randn(last.shape, generator=weight, dtype=torch.float64)
        *ours, g_state = scan.chunked_backward(*chunks[:3], *kept, scan.in_chunks(g_out, 4), G)
        ours = [*(scan.in_tokens(x, 12) for x in ours), g_state]
    assert difference([x.clone() for x in ours], expected) < 1e-9


@pytest.mark.parametrize("R", [1, 3])
def test_delta_product_is_r_steps_and_one_read(R):
    """R writes in the order r = 1 ... R, then the read of the token: explicit matrices again."""
    q, k, v, beta, state = inputs(T=11, writes=(R,))
    expected, last = by_matrices(q.repeat_interleave(R, -2), k.flatten(2, 3), v.flatten(2, 3),
                                 beta.flatten(2), state)
    ours = delta_product(q, k, v, beta, state, chunk_size=4)
    assert difference(ours, [expected[:, :, R - 1::R], last]) < 1e-10


# --- What a chunk is for --------------------------------------------------------------------------

def operations_of_forward(chunk, length):
    """How many operations of torch the forward of so many chunks of this length makes."""
    class Count(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, function, types, arguments=(), more=None):
            self.made += 1
            return function(*arguments, **(more or {}))

    *given, state = [x.detach() for x in two_keys(T=chunk * length)]
    with Count() as count:
        scan.chunked_forward(*[scan.in_chunks(x, length) for x in given], state)
    return count.made


def test_what_is_sequential_is_as_long_as_there_are_chunks_not_tokens():
    """Chunks of 4 or of 20 tokens: as many operations, and a few more for one more chunk."""
    four, twenty, more = (operations_of_forward(3, 4), operations_of_forward(3, 20),
                          operations_of_forward(4, 4))
    assert four == twenty < more < 2 * four


def test_a_row_alone_has_the_bits_that_it_has_in_a_batch():
    """Forward and backward, so that a model answers alike whoever else is asked."""
    given = [x.detach().float().requires_grad_() for x in inputs(T=41, lead=(7, 3), K=16, V=16)]
    alone = [x[2:3].detach().requires_grad_() for x in given]
    ours = [*delta_rule_chunked(*alone), *torch.autograd.grad(
        delta_rule_chunked(*alone)[0].square().sum(), alone)]
    theirs = [*delta_rule_chunked(*given), *torch.autograd.grad(
        delta_rule_chunked(*given)[0].square().sum(), given)]
    assert difference(ours, [x[2:3] for x in theirs]) == 0


# --- torch.compile --------------------------------------------------------------------------------

@pytest.mark.parametrize("R", [1, 3])
def test_one_compiled_graph_serves_all_lengths_with_the_bits_of_eager(R):
    """A graph without a break, for T below and above a multiple of the chunk: values, gradients."""
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(delta_product, backend=backend, fullgraph=True, dynamic=True)
    for T in (41, 72, 216, 944):
        given = [x.detach().float().requires_grad_()
                 for x in inputs(T=T, lead=(2,), writes=(R,), K=8, V=4)]
        for what in (lambda form: form(*given), lambda form: gradients(form, given)):
            assert difference(what(compiled), what(delta_product)) == 0
    torch._dynamo.reset()
    assert len(graphs) == 1


def test_the_operators_for_torch_compile_keep_torchs_own_rules():
    """opcheck: that nothing is changed in place, that the fakes have the true shapes and layouts,
    and that the gradient is where autograd looks for it; T unknown for the first one."""
    given = two_keys(T=5, lead=(1,), K=3, V=2)
    torch.library.opcheck(scan.scan_operator, (*given, 4))
    q, k, b, v, state = [x.detach() for x in given]
    out, last, *kept = scan.scan_operator(q, k, b, v, state, 4)
    quick = ["test_schema", "test_faketensor"]
    torch.library.opcheck(scan.scan_backward_operator, (q, k, b, kept, out, last),
                          test_utils=quick)


# --- Numerics -------------------------------------------------------------------------------------

def test_no_entry_of_the_inverse_of_a_chunk_is_above_two():
    """For unit keys and beta up to 2: section 5 of scan.py."""
    q, k, v, beta, state = inputs(T=30)
    b = beta.unsqueeze(-1) * k
    _, _, kept = scan.chunked_forward(*[x.unsqueeze(-3) for x in (q, k, b, v)], state)
    inverse = kept[0].squeeze(-3)
    L = (k @ b.mT).tril(-1)
    assert difference([inverse], [torch.linalg.inv(torch.eye(30) + L)]) < 1e-10
    assert inverse.abs().max() <= 2


def test_one_key_again_and_again_at_beta_two_costs_no_digits():
    """To multiply out (I - L)(I + L^2)(I + L^4)... instead of solving is wrong by 1e4 here."""
    q, k, v, beta, state = [x.detach().float() for x in inputs(T=32, beta=2.0)]
    k = k[..., :1, :].expand_as(k)
    exact = delta_rule_recurrent(*[x.double() for x in (q, k, v, beta, state)])
    assert difference(delta_rule_chunked(q, k, v, beta, state, chunk_size=32), exact) < 1e-3


@pytest.mark.parametrize("rule", [delta_rule_recurrent, delta_rule_chunked])
def test_half_types_and_autocast_are_computed_in_float32(rule):
    """bfloat16 has two digits: a state kept in it would be off by a hundredth. The results are
    those of the same numbers in float32, to the bit, forwards and backwards; a gradient has the
    type of what it belongs to."""
    q, k, v, beta, state = [x.detach().float() for x in inputs(T=21)]
    half = [x.requires_grad_() for x in (q.bfloat16(), k, v.half(), beta.bfloat16(), state.half())]
    full = [x.detach().float().requires_grad_() for x in half]
    expected = [*rule(*full), *gradients(rule, full)]
    in_halves = gradients(rule, half)
    assert [x.dtype for x in in_halves] == [x.dtype for x in half]
    assert difference(in_halves, [x.to(y.dtype) for x, y in zip(expected[2:], half)]) == 0
    if rule is delta_rule_chunked:  # (Autocast is for products, of which a loop has none.)
        with torch.autocast("cpu", torch.bfloat16):
            ours = [*rule(*half), *gradients(rule, full)]
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


def test_the_demo_shows_exchanges_which_together_are_pythons_own_commands(capsys):
    """Each line exchanges two slots of the line before; each command ends as Python's does."""
    n = 4
    scan.main(["--variables", str(n)])
    state, slots = dict(zip("abcd", "1234")), [*"1234", *"0000"]
    changed = 0
    for line in capsys.readouterr().out.splitlines():
        if line.startswith(">>> "):
            before = dict(state)
            exec(line[4:], {}, state)
            assert state != before  # a command that changes nothing shows nothing
        shown = re.match(r" +exchange (\w) and (\w)': +variables ([\d ]+?)  +spares ([\d ]+?)  ",
                         line)
        if shown:
            x, spare = "abcd".index(shown[1]), n + "abcd".index(shown[2])
            slots[x], slots[spare] = slots[spare], slots[x]
            assert slots == f"{shown[3]} {shown[4]}".split()
            changed += 1
        if shown and changed % (2 * n) == 0:
            assert slots == [*state.values(), *"0000"]
    assert changed == 4 * n


# --- Refusals -------------------------------------------------------------------------------------

def test_what_does_not_fit_is_refused_by_letter():
    """The message names the tensor, and what it must be. A backward by hand has no derivative."""
    q, k, v, beta, state = (x.detach() for x in inputs(T=37))
    for function, wrong, words in [
            (delta_rule_recurrent, (q, k, v, beta[..., :36]), r"beta must be .* 37\).* 36\)"),
            (delta_rule_chunked, (q, k, v, beta, state.mT), "state must be"),
            (delta_rule_recurrent, (q, k, v.float(), beta), "v torch.float32"),
            (delta_rule_chunked, (q, k, v, beta.half()), "beta must have the type.*torch.float16"),
            (delta_rule_chunked, (q, k.half(), v, beta), "beta .*k, torch.float16; got torch.flo"),
            (scan_chunked, (q, k, k[..., :3], v), r"b must be \[..., T, K\].*37, 3\)"),
            (scan_recurrent, (q.long(), k, k, v), "q torch.int64"),
            (lambda *x: delta_rule_chunked(*x, chunk_size=0), (q, k, v, beta), "chunk_size.*got 0"),
            (delta_product, (q, k, v, beta), r"k must be \[..., T, R, K\]")]:
        with pytest.raises(ValueError, match=words):
            function(*wrong)

    q.requires_grad_()
    out, _ = delta_rule_chunked(q, k, v, beta)
    gradient, = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
