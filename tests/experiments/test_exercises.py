"""What a solution must do, exercise by exercise. Oracles: explicit matrices, lists, plain loops.

No test needs another exercise: what it would need is made here, by brute force. Each imports what
it tests inside, so that a file that cannot be imported fails its own exercises only.
"""

import itertools
import json
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch


def random_scan(*lead, T=12, K=5, V=3):
    """q, k, v, beta and a state, float64: |k| = 1, beta in (0, 2)."""
    q, k, v, beta, state = (torch.randn(*lead, *shape).double()
                            for shape in [(T, K), (T, K), (T, V), (T,), (K, V)])
    return q, k / k.norm(dim=-1, keepdim=True), v, 2 * beta.sigmoid(), state


def by_matrices(q, k, v, beta, S):
    """The delta rule, matrix by matrix: outputs, corrections, and all states from S_0 on."""
    out, corrections, states = [], [], [S]
    for t in range(k.shape[-2]):
        key, b = k[..., t, :, None], beta[..., t, None, None]
        corrections.append((b * (v[..., t, None, :] - key.mT @ S)).squeeze(-2))
        S = (torch.eye(k.shape[-1]) - b * key @ key.mT) @ S + b * key @ v[..., t, None, :]
        out.append((q[..., t, None, :] @ S).squeeze(-2))
        states.append(S)
    return torch.stack(out, -2), torch.stack(corrections, -2), torch.stack(states, -3)


def chunks_by_matrices(q, k, v, beta, state, C):
    """The inputs in chunks, and all that chunked_forward returns; W by an explicit inverse."""
    out, d, states = by_matrices(q, k, v, beta, state)
    q, k, v, out, d = (x.unflatten(-2, (-1, C)) for x in (q, k, v, out, d))
    b = beta.unflatten(-1, (-1, C)).unsqueeze(-1)
    w = torch.linalg.inv(torch.eye(C) + (b * k @ k.mT).tril(-1)) @ (b * k)
    starts = states[..., :-1, :, :][..., ::C, :, :]
    return (q, k, v, b), (out, states[..., -1, :, :], starts, d, w)


@pytest.mark.exercise_1
@pytest.mark.parametrize("name", ["S4", "D4", "A4", "S2xS3"])
def test_compose_is_the_command_g_and_after_it_the_command_h(name):
    from data import Group
    group = Group(name)
    numbers = np.arange(group.order)
    table = group.compose(numbers[:, None], numbers)
    assert table.shape == (group.order, group.order)
    for g, h in itertools.product(numbers, numbers):
        values = [f"value {i}" for i in range(group.degree)]
        for command in (group.elements[g], group.elements[h]):
            values = [values[i] for i in command]
        assert values == [f"value {i}" for i in group.elements[table[g, h]]]
    assert group.compose(1, 1) == table[1, 1]


@pytest.mark.exercise_2
@pytest.mark.parametrize("T, lead", [(12, (2, 3)), (1, (2,)), (7, ())])
def test_the_loop_is_the_definition(T, lead):
    from scan import delta_rule_recurrent
    *inputs, state = random_scan(*lead, T=T)
    for start, given in ((state, [state]), (torch.zeros_like(state), [])):
        expected, _, states = by_matrices(*inputs, start)
        out, last = delta_rule_recurrent(*inputs, *given)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(last, states[..., -1, :, :])


@pytest.mark.exercise_3
@pytest.mark.parametrize("C", [1, 6])
def test_the_triangle_is_solved_whatever_stands_on_and_above_its_diagonal(C):
    from scan import solve_unit_triangle
    L, rhs = torch.randn(2, 3, C, C).double(), torch.randn(2, 3, 7, C).double().mT
    kept = L.clone(), rhs.clone()
    expected = torch.linalg.inv(torch.eye(C) + L.tril(-1)) @ rhs
    torch.testing.assert_close(solve_unit_triangle(L, rhs), expected)
    assert torch.equal(L, kept[0]) and torch.equal(rhs, kept[1])  # they are the caller's


@pytest.mark.exercise_4
@pytest.mark.parametrize("C", [12, 4, 1])
def test_the_chunks_carry_the_state_on(C):
    """One chunk, three, and a token each: outputs, last state, states at the starts, D and W."""
    from scan import chunked_forward
    *inputs, state = random_scan(2, 3)
    chunks, expected = chunks_by_matrices(*inputs, state, C)

    def solve(L, rhs):
        return torch.linalg.inv(torch.eye(C) + L.tril(-1)) @ rhs

    torch.testing.assert_close(chunked_forward(*chunks, state, solve), expected)


@pytest.mark.exercise_5
@pytest.mark.parametrize("n", [2, 5])
def test_reflections_execute_commands_name_by_name(n):
    """With explicit matrices I - 2 k k^T. After the left-hand names the spares hold all values;
    after the i-th right-hand name x_i has its new one; after the line the spares are empty."""
    from scan import swap_machine_keys
    commands = torch.stack([torch.stack([torch.randperm(n) for _ in range(3)]) for _ in range(2)])
    keys = swap_machine_keys(commands)
    assert keys.shape == (2, 3 * 2 * n, 2 * n) and keys.dtype == torch.float64
    for line, its_keys in zip(commands.tolist(), keys):
        slots = torch.cat([torch.arange(1, n + 1), torch.zeros(n)]).double()
        for command, pieces in zip(line, its_keys.split(2 * n)):
            old = slots[:n].tolist()
            for step, key in enumerate(pieces):
                slots = (torch.eye(2 * n) - 2 * torch.outer(key, key)) @ slots
                if step == n - 1:
                    torch.testing.assert_close(slots, torch.tensor(n * [0.0] + old).double())
                if step >= n:
                    assert abs(slots[step - n] - old[command[step - n]]) < 1e-10
            assert slots[n:].abs().max() < 1e-10


@pytest.mark.exercise_6
@pytest.mark.parametrize("C", [12, 4])
def test_the_backward_is_the_gradient_of_the_definition(C):
    """All five gradients, by autograd through explicit matrices, for one chunk and for three."""
    from scan import ChunkedDeltaRule
    inputs = [x.requires_grad_() for x in random_scan(2, 3)]
    out, _, states = by_matrices(*inputs)
    g_out, g_last = torch.randn_like(out), torch.randn_like(states[..., -1, :, :])
    expected = torch.autograd.grad((out, states), inputs, (
        g_out, torch.cat([torch.zeros_like(states[..., 1:, :, :]), g_last.unsqueeze(-3)], -3)))
    with torch.no_grad():
        chunks, (_, _, starts, d, w) = chunks_by_matrices(*inputs, C)
        ctx = SimpleNamespace(saved_tensors=(*chunks, starts, d, w))
        ours = ChunkedDeltaRule.backward(ctx, g_out.unflatten(-2, (-1, C)), g_last)
    assert len(ours) == 5
    for gradient, truth in zip(ours, expected):
        torch.testing.assert_close(gradient.reshape(truth.shape), truth)


@pytest.mark.exercise_7
def test_a_row_counts_reveals_last_reveals_and_whole_traces():
    """Seven traces of three reveals, at other places. One trace is right everywhere."""
    from data import Batch
    from eval import evaluate, wilson
    right = np.array([[1, 1, 1], [0, 1, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [1, 0, 0], [0, 1, 1]])
    targets, reveals = np.random.default_rng(0).integers(3, size=(7, 6)), np.zeros((7, 6), bool)
    logits = torch.zeros(7, 6, 4)
    for trace in range(7):
        for i, t in enumerate([[0, 2, 4], [1, 3, 5], [3, 4, 5]][trace % 3]):
            reveals[trace, t] = True
            logits[trace, t, targets[trace, t] if right[trace, i] else 3] = 1
    task = SimpleNamespace(chance=0.3, test_batch=lambda *_: Batch(targets, targets, reveals))
    row = evaluate(SimpleNamespace(stream=lambda *_: (logits, None)), task, 6, 2, traces=7)
    low, high = wilson(1, 7)
    assert row.pop("by_position") == pytest.approx([2 / 7, 5 / 7, 4 / 7])
    assert row == pytest.approx({
        "length": 6, "spacing": 2, "traces": 7, "reveals": 21, "chance": 0.3, "all": 11 / 21,
        "final": 4 / 7, "perfect": 1 / 7, "perfect_low": low, "perfect_high": high})
    assert json.loads(json.dumps(row)) == row


@pytest.mark.exercise_8
def test_the_filter_is_the_sum_over_all_paths():
    """Symbols that reveal and move at once; three states, two traces, path by path."""
    from experiments.automata import PFSA
    rng = np.random.default_rng(0)
    delta, rho = rng.random((4, 3, 3)), np.array([[1, 1, 1], [0, 1, 1], [1, 1, 0], [1, 0, 1]], bool)
    delta, start = delta / delta.sum(1, keepdims=True), np.array([0.5, 0.3, 0.2])
    symbols = rng.integers(4, size=(2, 5))
    beliefs, log_evidence = PFSA(delta, rho, start).filter(symbols)
    for trace, word in enumerate(symbols):
        likely = 1.0
        for t in range(6):
            mass = np.zeros(3)
            for path in itertools.product(range(3), repeat=t + 1):
                weight = start[path[0]]
                for symbol, old, new in zip(word, path, path[1:]):
                    weight *= rho[symbol, old] * delta[symbol, new, old]
                mass[path[-1]] += weight
            if t:
                assert log_evidence[trace, t - 1] == pytest.approx(np.log(mass.sum() / likely))
                likely = mass.sum()
            if t < 5:
                assert np.abs(beliefs[trace, t] - mass / mass.sum()).max() < 1e-12


@pytest.mark.exercise_9
@pytest.mark.parametrize("name", ["S4", "S2xS3"])
def test_a_state_is_put_on_the_image_of_the_nearest_permutation(name):
    """All elements of the group, two heads, and noise that does not hide which one is nearest. The
    image is written out: for each variable and its value a matrix, and their sum."""
    from data import Group
    from experiments.heads import LinearImage
    perms = Group(name).elements
    parts = torch.randn(perms.shape[1], perms.shape[1], 2, 3, 4).double()
    exact = torch.stack([sum(parts[i, value] for i, value in enumerate(perm)) for perm in perms])
    image = LinearImage([(1, 0), (1, 1)], exact, perms)
    noisy = exact + 0.02 * torch.randn_like(exact)
    kept = noisy.clone()
    torch.testing.assert_close(image.correct(noisy), exact)
    torch.testing.assert_close(image.correct(noisy[:6].unflatten(0, (2, 3))),
                               exact[:6].unflatten(0, (2, 3)))
    assert torch.equal(noisy, kept)


MUTANT = ("rotate(q, past), torch.stack([rotate(k, past), v])",
          "rotate(q), torch.stack([rotate(k), v])")


@pytest.mark.exercise_ten
def test_your_own_test_passes_on_the_code_and_notices_the_mutant():
    """By an assert: a test that merely breaks has noticed nothing."""
    import models
    from test_your_own import test_attention_reads_in_pieces_what_it_reads_at_once as yours
    yours(models)
    source, mutant = Path(models.__file__).read_text(encoding="utf-8"), types.ModuleType("mutant")
    assert source.count(MUTANT[0]) == 1
    exec(source.replace(*MUTANT), vars(mutant))
    with pytest.raises(AssertionError):
        yours(mutant)
