"""Why a reflection cannot copy: the norms, the search, and the machine that Python judges."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from experiments.assign import NumberTask, ShuffleTask
from experiments.copies import (LINES, copy_step, least_error, norm_of_line, number_steps,
                                representations, shuffle_steps)
from scan import scan_recurrent


# --- The theorem ----------------------------------------------------------------------------------

def test_the_table_of_norms():
    """Copies are longer than 1 one way or both; in no representation are both copies 1."""
    golden = (1 + 5**0.5) / 2
    expected = [[2**0.5, 2**0.5, 1], [3**0.5, 3**0.5, 1], [1, 2**0.5, golden]]
    found = [[norm_of_line(vectors, line) for line in LINES]
             for vectors in representations().values()]
    assert np.abs(np.array(found) - expected).max() < 1e-10

    rng = np.random.default_rng(0)
    for _ in range(100):
        vectors = rng.normal(size=(3, 3, 8))
        there, back, exchange = [norm_of_line(vectors, line) for line in LINES]
        assert 1 + 1e-6 < max(there, back) < 1e9 and (there > 1 or exchange > 1)
        assert norm_of_line(vectors[..., :7], "a = b") == float("inf")  # 8 differences in 7


def test_the_norm_is_that_of_a_step_which_executes_the_line():
    """With slots `a = b` is the step of one more key: no step that does the same is shorter."""
    vectors = representations()["a slot for each variable"]
    k, b = copy_step(torch.tensor(0), torch.tensor(1), 2)
    step = torch.eye(2).double() - b.unsqueeze(-1) * k
    states = torch.from_numpy(vectors).unflatten(-1, (2, 3))  # a row for each slot
    after = vectors[LINES["a = b"](*np.indices((3, 3)))]
    assert ((step @ states).flatten(-2).numpy() == after).all()
    assert torch.linalg.matrix_norm(step, 2).item() == pytest.approx(
        norm_of_line(vectors, "a = b"), abs=1e-10)


def test_the_search_finds_one_copy_and_finds_both_only_with_one_more_key():
    both = ["a = b", "b = a"]
    assert least_error(["a = b"], False, starts=1, iterations=80) < 0.02
    assert least_error(both, True, starts=1, iterations=80) < 0.02
    assert least_error(both, False, starts=1, iterations=80) > 0.04
    assert least_error(both, False, starts=1, iterations=1) == float("inf")  # nothing can be read


# --- The machine by hand --------------------------------------------------------------------------

def end_of(steps, state):
    """The state after these steps: k and b [..., T, slots], v [..., T, 1], from [..., slots]."""
    k, b, v = steps
    assert ((k * b).sum(-1).unique()[:, None] == torch.tensor([0, 1])).any(1).all()  # eigenvalues
    return scan_recurrent(k, k, b, v, state.unsqueeze(-1))[1].squeeze(-1)


def test_the_machine_executes_ten_thousand_lines_of_numbers_as_python_does():
    """The target stands among the operands in many of them. The spare slot holds what it will."""
    task = NumberTask()
    rng = np.random.default_rng(1)
    values = rng.integers(-9, 10, (10_000, 3))
    lines, results = task.draw(values, rng)
    rows = task.line_tokens(*lines.T)
    steps, ends, repeated = [], [], 0
    for row, numbers, result in zip(rows, values.tolist(), results):
        symbols = [task.vocab[token] for token in row if token >= 0]
        line = "".join(symbols[1:-1])
        python = dict(zip("abc", numbers))
        exec(line, {}, python)
        assert python[line[0]] == result
        ends.append([*python.values()])
        repeated += line[0] in line[4:]

        # Steps that do nothing make all lines as long.
        steps.append([F.pad(x, (0, 0, 0, 7 - len(symbols))) for x in
                      number_steps(symbols, task.names)])

    start = torch.from_numpy(np.hstack([values, rng.integers(9, size=(10_000, 1))]))
    steps = [torch.stack(parts) for parts in zip(*steps)]
    assert end_of(steps, start.double())[:, :3].tolist() == ends and repeated > 1000


def test_the_machine_executes_shuffles_by_copies_alone():
    """Copies and literals among them. The state of the machine is Python's."""
    task = ShuffleTask()
    rng = np.random.default_rng(2)
    commands = task.draw((200, 50), rng)
    steps = shuffle_steps(torch.from_numpy(commands))
    start = torch.cat([torch.arange(5.), torch.randn(5)]).double().expand(200, 10)
    ends = end_of(steps, start)[:, :5]
    for row, end in zip(commands, ends):
        python = dict(zip("abcde", range(1, 6)))
        for line in task.command_tokens(row):
            exec(task.decode(line)[4:], {}, python)
        assert (end + 1).tolist() == list(python.values())
