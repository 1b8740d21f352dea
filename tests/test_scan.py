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


WRONG = {  # a wrong variant of the source each: (what it says, what it would say)
    "(4) without beta": ("L_NCC = beta_k_NCK @ k_NCK.mT", "L_NCC = k_NCK @ k_NCK.mT"),
    "(5) without beta on v": ("torch.cat([(beta_NC1 * v_NCV).mT,", "torch.cat([v_NCV.mT,"),
    "(5) without beta on k": (".mT, beta_k_NCK.mT], -2)", ".mT, k_NCK.mT], -2)"),
    "(5) later factor on the right": ("(L_NCC, rhs, upper=False", "(L_NCC.mT, rhs, upper=True"),
    "(6) with the wrong sign": ("u_CV - w_CK @ state_KV", "u_CV + w_CK @ state_KV"),
    "(6) without the state": ("u_CV - w_CK @ state_KV", "u_CV"),
    "(7) excludes the write at t": ("k_NCK.mT).tril_() @ d_NCV", "k_NCK.mT).tril_(-1) @ d_NCV"),
    "(7) with q and k exchanged": ("(q_NCK @ k_NCK.mT).tril_() @", "(k_NCK @ q_NCK.mT).tril_() @"),
    "(7) reads the state after": ("append(state_KV)", "append(state_KV + k_CK.mT @ d_CV)"),
    "(8) writes with w": ("state_KV + k_CK.mT @ d_CV", "state_KV + w_CK.mT @ d_CV"),
    "(8) forgets the chunk before": ("state_KV + k_CK.mT @ d_CV", "k_CK.mT @ d_CV"),
    "the filling in front": ("F.pad(x, (0, 0, 0, missing))", "F.pad(x, (0, 0, missing, 0))"),
    "(9) without the state": ("select(-3, n) + k_CK @ G_KV", "select(-3, n)"),
    "(9) P not transposed": ("P_NCC.mT @ g_out_NCV", "P_NCC @ g_out_NCV"),
    "(10) with k": ("- w_CK.mT @ g_d_CV", "- k_CK.mT @ g_d_CV"),
    "(10) with the wrong sign": ("- w_CK.mT @ g_d_CV", "+ w_CK.mT @ g_d_CV"),
    "(10) one chunk late": ("G[::-1]", "G"),
    "(11) not transposed": ("L_NCC.mT, g_d_NCV, upper=True", "L_NCC, g_d_NCV, upper=False"),
    "M with its diagonal": ("-(X_NCV @ d_NCV.mT).tril_(-1)", "-(X_NCV @ d_NCV.mT).tril_()"),
    "M with the wrong sign": ("-(X_NCV @ d_NCV.mT)", "(X_NCV @ d_NCV.mT)"),
    "(12) without beta": ("g_v_NCV = beta_NC1 * X_NCV", "g_v_NCV = X_NCV"),
    "(13) without the state": ("g_beta_k_NCK -= X_NCV @ start_NKV.mT", "pass"),
    "(14) without the last state": ("g_k_NCK += d_NCV @ G_NKV.mT", "pass"),
    "(14) without beta": ("+= beta_NC1 * g_beta_k_NCK", "+= g_beta_k_NCK"),
    "(15) without its own token": ("d_NCV.mT).tril_()", "d_NCV.mT).tril_(-1)"),
    "(16) without the write": ("((X_NCV * v_NCV).sum(-1, keepdim=True)", "(0 * beta_NC1"),
    "each piece from the first state": ("chunks, state_KV)", "chunks, state_KV * 0 + state)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_variant_of_the_chunked_algorithm_is_noticed(name):
    """The comparison with the loop, values and gradients, fails when one thing is wrong."""
    right, wrong = WRONG[name]
    with open(scan.__file__, encoding="utf-8") as file:
        source = file.read()
    assert right in source, f"the source no longer says {right}"
    variant = {"__name__": "variant"}
    exec(source.replace(right, wrong), variant)
    variant["TOKENS_AT_ONCE"] = 84  # pieces of 14 and 9 tokens
    assert error(lambda *x: variant["delta_rule_chunked"](*x, chunk_size=7), inputs(T=23)) > 1e-3


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


def test_the_machine_shown_to_a_reader_ends_each_command_at_pythons_values(capsys):
    scan.main([])
    values, commands = {"a": 1, "b": 2, "c": 3}, capsys.readouterr().out.split(">>> ")[1:]
    for command in commands:
        exec(command.splitlines()[0], {}, values)
        assert command.split("variables ")[-1].split()[:3] == [str(values[name]) for name in "abc"]
    assert len(commands) == 2


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


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # inside torch
def test_compiled_equals_eager():
    """torch.compile traces the chunked scan without a graph break, gradients included. The traces
    are run as they are: to have them compiled as well takes half a minute, and tests torch."""
    compiled = torch.compile(lambda *x: delta_rule_chunked(*x, chunk_size=7), fullgraph=True,
                             backend="aot_eager")
    assert error(compiled, inputs(T=10, lead=(2,))) < 1e-10


def test_what_does_not_fit_is_refused_by_letter():
    q, k, v, beta, state = inputs(T=37)
    for wrong, words in [((q, k, v, beta[..., :36], state),
                          r"beta must be \[..., T=37\].*\(2, 3, 36\)"),
                         ((q[..., :4], k, v, beta, state), r"q must be \[..., T=37, K=5\]"),
                         ((q, k, v[:, :, 1:], beta, state), "v must be"),
                         ((q, k, v, beta, state.mT), "state must be"),
                         ([x[:, :, :0] for x in (q, k, v, beta)], "T >= 1")]:
        for function in (delta_rule_recurrent, delta_rule_chunked):
            with pytest.raises(ValueError, match=words):
                function(*wrong)
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        delta_rule_chunked(q, k, v, beta, state, chunk_size=0)
    with pytest.raises(ValueError, match=r"k must be \[..., T, R, K\]"):
        delta_product(q, k, v, beta, state)
    with pytest.raises(RuntimeError, match="cannot be differentiated again.*delta_rule_recurrent"):
        torch.autograd.grad(delta_rule_chunked(q, k, v, beta)[0].sum(), q, create_graph=True)
