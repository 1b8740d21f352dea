"""The chunked scan is the delta rule. Oracles: explicit matrices in numpy, the loop, and data.py's
permutations.

Sizes are pairwise different and none a multiple of another, states are not zero, beta reaches 2: a
swapped axis, a transposed read or an off-by-one at a chunk edge cannot hide.
"""

import json

import numpy as np
import pytest
import scan
import torch
from data import Group, draw_commands, run_commands
from scan import (delta_product, delta_rule_chunked, delta_rule_recurrent, exchange_key,
                  swap_machine_keys)

LEAD, K, V = (2, 3), 5, 4


def inputs(T, lead=LEAD, K=K, V=V, beta=None, dtype=torch.float64, writes=()):
    """q, k, v, beta and a state, all requiring gradients; |k| = 1, beta uniform in (0, 2) or as
    given."""
    unit = torch.nn.functional.normalize
    q = unit(torch.randn(*lead, T, K, dtype=dtype), dim=-1)
    k = unit(torch.randn(*lead, T, *writes, K, dtype=dtype), dim=-1)
    v = torch.randn(*lead, T, *writes, V, dtype=dtype)
    strength = 2 * torch.rand(*lead, T, *writes, dtype=dtype) if beta is None else \
        torch.full((*lead, T, *writes), beta, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v, strength, torch.randn(*lead, K, V, dtype=dtype))]


def by_matrices(q, k, v, beta, state):
    """Equation (1) as written, in numpy, with explicit matrices I - beta k k^T and plain loops."""
    q, k, v, beta, state = (x.detach().numpy() for x in (q, k, v, beta, state))
    out, last = np.empty((*q.shape[:-1], v.shape[-1])), np.empty_like(state)
    for at in np.ndindex(*q.shape[:-2]):
        S = state[at]
        for t in range(q.shape[-2]):
            key, b = k[at][t], beta[at][t]
            S = (np.eye(len(key)) - b * np.outer(key, key)) @ S + b * np.outer(key, v[at][t])
            out[at][t] = S.T @ q[at][t]
        last[at] = S
    return torch.from_numpy(out), torch.from_numpy(last)


def assert_same(ours, theirs, tolerance=1e-10):
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < tolerance


def gradients(function, arguments):
    """Of a random weighting of both results, with respect to all five inputs."""
    out, state = function(*arguments)
    weight = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=weight, dtype=x.dtype)).sum()
               for x in (out, state))
    return torch.autograd.grad(loss, arguments)


def test_the_loop_is_the_definition():
    """delta_rule_recurrent computes equation (1), explicit matrix by explicit matrix."""
    arguments = inputs(T=11)
    assert_same(delta_rule_recurrent(*arguments), by_matrices(*arguments))


@pytest.mark.parametrize("beta", [None, 2.0, 1.0])
@pytest.mark.parametrize("T, chunk", [(1, 1), (1, 7), (7, 3), (13, 13), (13, 14), (23, 1), (23, 7),
                                      (37, 32), (65, 16), (41, 300)])
def test_chunked_equals_the_loop_in_values_and_gradients(T, chunk, beta):
    """Outputs, last state, and the gradients of q, k, v, beta and the first state, to 1e-10 in
    float64."""
    arguments = inputs(T, beta=beta)

    def chunked(*x):
        return delta_rule_chunked(*x, chunk_size=chunk)

    assert_same(chunked(*arguments), delta_rule_recurrent(*arguments))
    assert_same(gradients(chunked, arguments), gradients(delta_rule_recurrent, arguments))


@pytest.mark.parametrize("at_once", [1, 84, 90])
def test_a_long_input_is_worked_on_in_pieces(at_once, monkeypatch):
    """Pieces of 7 or 14 tokens, joined by the state: values and gradients stay the loop's."""
    monkeypatch.setattr(scan, "TOKENS_AT_ONCE", at_once)
    arguments = inputs(T=23)

    def chunked(*x):
        return delta_rule_chunked(*x, chunk_size=7)

    assert_same(chunked(*arguments), delta_rule_recurrent(*arguments))
    assert_same(gradients(chunked, arguments), gradients(delta_rule_recurrent, arguments))


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3)])
def test_leading_axes_are_free_and_the_state_defaults_to_zero(lead):
    *arguments, state = inputs(T=9, lead=lead)
    assert_same(delta_rule_chunked(*arguments, chunk_size=4),
                by_matrices(*arguments, torch.zeros_like(state)))


def test_a_batch_of_none_is_computed():
    *arguments, _ = inputs(T=9, lead=(0, 2))
    for function in (delta_rule_recurrent, delta_rule_chunked):
        out, state = function(*arguments)
        assert out.shape == (0, 2, 9, V) and state.shape == (0, 2, K, V)


WRONG = {  # a wrong variant of the source each: (what it says, what it would say)
    "(4) without beta": ("L_NCC = beta_k_NCK @ k_NCK.mT", "L_NCC = k_NCK @ k_NCK.mT"),
    "(5) without beta on v": ("torch.cat([(beta_NC1 * v_NCV).mT,", "torch.cat([v_NCV.mT,"),
    "(5) without beta on k": (".mT, beta_k_NCK.mT], -2)", ".mT, k_NCK.mT], -2)"),
    "(5) later factor on the right": ("solve_triangular(L_NCC, rhs, upper=False",
                                      "solve_triangular(L_NCC.mT, rhs, upper=True"),
    "(6) with the wrong sign": ("u_CV - w_CK @ state_KV", "u_CV + w_CK @ state_KV"),
    "(6) without the state": ("u_CV - w_CK @ state_KV", "u_CV"),
    "(7) excludes the write at t": ("(q_NCK @ k_NCK.mT).tril_() @",
                                    "(q_NCK @ k_NCK.mT).tril_(-1) @"),
    "(7) with q and k exchanged": ("(q_NCK @ k_NCK.mT).tril_() @", "(k_NCK @ q_NCK.mT).tril_() @"),
    "(7) reads the state after": ("starts.append(state_KV)",
                                  "starts.append(state_KV + k_CK.mT @ d_CV)"),
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
    "(15) without its own token": ("(g_out_NCV @ d_NCV.mT).tril_()",
                                   "(g_out_NCV @ d_NCV.mT).tril_(-1)"),
    "(16) without the write": ("((X_NCV * v_NCV).sum(-1, keepdim=True)", "(0 * beta_NC1"),
    "each piece from the first state": ("apply(*chunks, state_KV)",
                                        "apply(*chunks, check_inputs(q, k, v, beta, state))"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_variant_of_the_chunked_algorithm_is_noticed(name):
    """The comparison with the loop, values and gradients, fails when one thing is wrong."""
    right, wrong = WRONG[name]
    source = open(scan.__file__).read()
    assert right in source, f"the source no longer says {right}"
    variant = {"__name__": "variant"}
    exec(source.replace(right, wrong), variant)
    variant["TOKENS_AT_ONCE"] = 84  # pieces of 14 and 9 tokens
    arguments = inputs(T=23)

    def chunked(*x):
        return variant["delta_rule_chunked"](*x, chunk_size=7)

    pairs = [*zip(chunked(*arguments), delta_rule_recurrent(*arguments)),
             *zip(gradients(chunked, arguments), gradients(delta_rule_recurrent, arguments))]
    assert max((a - b).abs().max() for a, b in pairs) > 1e-3


def test_the_backward_by_hand_is_that_of_autograd():
    """The same forward, differentiated by torch: equations (9) to (16) to 1e-10."""
    q, k, v, beta, state = inputs(T=21)
    arguments = [x.unflatten(-2, (3, 7)).detach().requires_grad_()
                 for x in (q, k, v, beta.unsqueeze(-1))] + [state]
    assert_same(gradients(scan.ChunkedDeltaRule.apply, arguments),
                gradients(lambda *x: scan.chunked_forward(*x)[:2], arguments))


def test_a_second_derivative_is_refused():
    arguments = inputs(T=9)
    out, _ = delta_rule_chunked(*arguments)
    with pytest.raises(RuntimeError, match="cannot be differentiated again.*delta_rule_recurrent"):
        torch.autograd.grad(out.sum(), arguments[:4], create_graph=True)


@pytest.mark.parametrize("cut", [1, 6, 17])
def test_a_sequence_in_two_pieces_is_the_sequence(cut):
    """The state carries all that the second piece needs to know."""
    *arguments, state = inputs(T=23)
    whole, last = delta_rule_chunked(*arguments, state, chunk_size=5)
    first, middle = delta_rule_chunked(*[x[:, :, :cut] for x in arguments], state, chunk_size=5)
    second, end = delta_rule_chunked(*[x[:, :, cut:] for x in arguments], middle, chunk_size=8)
    assert_same([torch.cat([first, second], -2), end], [whole, last])


def test_gradcheck():
    """Finite differences agree with the gradients of all five inputs."""
    arguments = inputs(T=7, lead=(2,), K=3, V=2)
    assert torch.autograd.gradcheck(lambda *x: delta_rule_chunked(*x, chunk_size=3), arguments)


def test_beta_zero_leaves_the_state():
    *arguments, state = inputs(T=10, beta=0.0)
    assert_same(delta_rule_chunked(*arguments, state, chunk_size=4)[1:], [state])


def test_one_factor_with_beta_two_is_a_reflection():
    """I - 2 k k^T: its own inverse, determinant -1, k to -k, and norms kept."""
    q, k, v, beta, _ = inputs(T=1, lead=(), beta=2.0)
    identity = torch.eye(K, dtype=torch.float64)
    _, H = delta_rule_chunked(q, k, torch.zeros(1, K, dtype=torch.float64), beta, identity)
    assert_same([H @ H, H.mT, H @ k[0], H.det()],
                [identity, H, -k[0], torch.tensor(-1.0).double()], 1e-12)


def test_the_exchange_key_exchanges_two_slots():
    key = exchange_key(torch.tensor([1]), torch.tensor([3]), 4)
    slots, two = torch.arange(4.0).double().unsqueeze(-1), torch.tensor([2.0]).double()
    _, after = delta_rule_chunked(key, key, torch.zeros(1, 1).double(), two, slots)
    assert_same([after.squeeze()], [torch.tensor([0.0, 3.0, 2.0, 1.0]).double()])


@pytest.mark.parametrize("name, length, dtype", [
    ("S5", 3000, torch.float64), ("A5", 500, torch.float64), ("D6", 500, torch.float64),
    ("S5", 3000, torch.float32)])
def test_the_swap_machine_tracks_the_group_without_training(name, length, dtype):
    """Ten reflections per command, set by hand, give data.py's own states after every command."""
    group = Group(name)
    commands = draw_commands(group, "full", (length,), np.random.default_rng(0))
    n = group.degree
    keys = swap_machine_keys(torch.from_numpy(commands)).to(dtype)
    values, beta = keys.new_zeros(len(keys), n), torch.full(keys.shape[:-1], 2.0, dtype=dtype)
    start = torch.eye(2 * n, n, dtype=dtype)  # slot i holds value i, the spares are empty
    states = run_commands(commands[None])[0]
    for variable in range(n):  # `print(x)` is the read q = e_x
        queries = torch.eye(2 * n, dtype=dtype)[variable].expand_as(keys)
        out, _ = delta_rule_chunked(queries, keys, values, beta, start, chunk_size=40)
        after_each_command = out[2 * n - 1::2 * n]
        assert (after_each_command.argmax(-1).numpy() == states[..., variable]).all()
        assert after_each_command.max(-1).values.min() > 0.99


def test_a_swap_machine_with_beta_one_forgets():
    """The same keys at beta = 1: every step erases what it should have moved."""
    commands = draw_commands(Group("S5"), "full", (1, 3), np.random.default_rng(0))
    keys = swap_machine_keys(torch.from_numpy(commands))
    _, state = delta_rule_chunked(keys, keys, keys.new_zeros(1, 30, 5), keys.new_ones(1, 30),
                                  torch.eye(10, 5).double().unsqueeze(0))
    assert state.abs().max() < 0.6


@pytest.mark.parametrize("R", [1, 3])
def test_delta_product_is_r_steps_and_one_read(R):
    """R writes in the order r = 1 ... R, then the read of the token: explicit matrices again."""
    q, k, v, beta, state = inputs(T=11, writes=(R,))
    expected, last = by_matrices(q.repeat_interleave(R, -2), k.flatten(2, 3), v.flatten(2, 3),
                                 beta.flatten(2), state)
    assert_same(delta_product(q, k, v, beta, state, chunk_size=4), [expected[:, :, R - 1::R], last])


def test_unit_keys_stay_finite_in_float32_at_every_chunk_size():
    """beta = 2 and one key repeated is the worst case of the triangular system; it stays exact."""
    q, k, v, beta, state = (x.detach() for x in inputs(T=512, beta=2.0, dtype=torch.float32))
    k = k[:, :, :1].expand_as(k)
    for chunk in (1, 16, 64, 256):
        out, last = delta_rule_chunked(q, k, v * 0, beta, state, chunk_size=chunk)
        assert_same([last], [state], 1e-3)  # an even number of equal reflections
        assert out.isfinite().all()


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # inside torch
def test_compiled_equals_eager():
    """torch.compile traces the chunked scan without a graph break, gradients included. The traces
    are run as they are: to have them compiled as well takes half a minute, and tests torch."""
    arguments = inputs(T=10, lead=(2,))
    compiled = torch.compile(lambda *x: delta_rule_chunked(*x, chunk_size=7), fullgraph=True,
                             backend="aot_eager")
    assert_same(compiled(*arguments), delta_rule_recurrent(*arguments))
    assert_same(gradients(compiled, arguments), gradients(delta_rule_recurrent, arguments))


def test_shapes_that_do_not_fit_are_refused_by_letter():
    q, k, v, beta, state = inputs(T=37)
    for wrong, words in [((q, k, v, beta[..., :36], state),
                          r"token axis of k \(T=37\).*\(2, 3, 36\)"),
                         ((q[..., :4], k, v, beta, state), "q must have the shape of k"),
                         ((q, k, v[:, :, 1:], beta, state), "v must be"),
                         ((q, k, v, beta, state.mT), "state must be"),
                         ((q[:, :, :0], k[:, :, :0], v[:, :, :0], beta[:, :, :0], state),
                          "T >= 1")]:
        for function in (delta_rule_recurrent, delta_rule_chunked):
            with pytest.raises(ValueError, match=words):
                function(*wrong)
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        delta_rule_chunked(q, k, v, beta, state, chunk_size=0)
    with pytest.raises(ValueError, match=r"k must be \[..., T, R, K\]"):
        delta_product(q, k, v, beta, state)


def test_the_self_check_prints_its_rows_and_fails_on_a_wrong_scan(
        capsys, monkeypatch, refused, tmp_path):
    small = "--batch 2 --heads 1 --width 4 --rounds 1 --lengths 9 33".split()
    scan.main(small)
    assert capsys.readouterr().out.count("times_faster") == 4
    monkeypatch.setattr(scan, "in_chunks", lambda x, C: x.flip(-2).unsqueeze(-3))
    with pytest.raises(SystemExit, match="C=32 disagrees"):
        scan.main(small)
    capsys.readouterr()
    refused(scan.main, ["--width", 0], "at least 1")
    refused(scan.main, ["--lengths", "many"], "invalid int")
    refused(scan.main, ["--record", tmp_path], "is a folder")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(scan.main, ["--device", "cuda"], "cuda is not there")


def test_the_forms_of_the_benchmark_are_the_delta_rule():
    """All that is timed computes the same values and gradients; the bound counts what (4) to (16)
    multiply."""
    arguments = inputs(T=45)[:4]
    expected = gradients(delta_rule_recurrent, arguments)
    for name in ("textbook", "autograd", "C=16", "C=64"):
        assert_same(scan.FORMS[name](*arguments), delta_rule_recurrent(*arguments))
        assert_same(gradients(scan.FORMS[name], arguments), expected)


def test_the_bench_records_time_and_memory(tmp_path):
    """A row for each form at each length, as JSON. The loop keeps a K x V state for each token, at
    least; the chunks do with less."""
    scan.main(["--bench", "--batch", "2", "--heads", "1", "--width", "32", "--lengths", "200",
               "--rounds", "1", "--record", str(tmp_path / "bench.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    assert [row["form"] for row in rows] == ["loop", "textbook", "autograd", "C=16", "C=32", "C=64"]
    assert rows[0]["peak"] >= 2 * 200 * 32 * 32 * 4 / 2**20 > rows[4]["peak"]
    assert rows[0]["times_faster"] == 1
    assert all(row["tokens/s"] == pytest.approx(400e3 / row["with_backward"]) for row in rows)


def test_float32_loses_a_few_times_what_the_loop_loses():
    """T = 4,096 exchanges by the ten swap keys of S5, in a random orthogonal basis: the error
    against the float64 loop is within 10 times that of the float32 loop."""
    pairs = torch.combinations(torch.arange(5))
    basis = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0]
    k = (exchange_key(pairs[:, 0], pairs[:, 1], 5) @ basis)[torch.randint(10, (8, 4096))]
    beta, state = k.new_full((8, 4096), 2.0), torch.eye(5).double().expand(8, 5, 5)
    exact = torch.randn_like(k), k, torch.zeros_like(k), beta, state
    rounded = [x.float() for x in exact]
    truth = delta_rule_recurrent(*exact)
    loop = scan.largest_error(delta_rule_recurrent(*rounded), truth)
    for C in (16, 32, 256):
        assert scan.largest_error(delta_rule_chunked(*rounded, chunk_size=C), truth) <= 10 * loop
