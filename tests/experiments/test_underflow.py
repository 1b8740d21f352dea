"""Beliefs as linear recurrences: exact where they should be, dead where they must die."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from test_automata import possible_symbols, random_automaton

from data import Group, generator
from experiments.automata import leak
from experiments.beliefs import CoinTask
from experiments.underflow import (compose, divergence, joint_example, joint_matrices, main,
                                   marginal_coins, marginal_example, marginal_predictions,
                                   marginal_reveals, rescaled_scan, sinkhorn, two_sided_recurrence)
from scan import delta_rule_recurrent, exchange_key


# --- The two linear representations, and where they end -------------------------------------------

def test_the_joint_norm_is_the_probability_of_all_that_was_revealed():
    """|h_t|_1 = product of the survival probabilities, to 1e-10; its direction is the belief."""
    task = CoinTask(Group("S3"), "full", 0.5)
    symbols = task.symbols(task.draw(1, 24, 2, np.random.default_rng(10)))
    beliefs, log_evidence = task.automaton.filter(symbols)
    A, one = joint_matrices(task.automaton, symbols[0]), torch.ones(36, 1, 1).double()
    start = torch.from_numpy(task.automaton.start).unsqueeze(-1)
    h = two_sided_recurrence(A, one, 0 * A[:, :, :1], start).squeeze(-1).numpy()
    assert np.abs(h.sum(1) / np.exp(log_evidence[0].cumsum()) - 1).max() < 1e-10
    assert np.abs(h[:-1] / h[:-1].sum(1, keepdims=True) - beliefs[0, 1:]).max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_representations_underflow_at_the_predicted_step(dtype):
    """Halving passes the smallest subnormal number 2^-m, m = 149, 133, 24: then h and H_33 are 0.

    Figure 9 of the paper begins at 1/2 and rounds the tie 2^-(m + 1) to even, figure 10 at 1.
    """
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    m = -round(math.log2(smallest))
    assert m == {torch.float32: 149, torch.bfloat16: 133, torch.float16: 24}[dtype]
    h = joint_example(m + 3, dtype)
    assert h[:, 1].tolist() == [2.0**-t / 2 for t in range(1, m)] + [0] * 4
    assert (h[:, 2] == h[:, 1]).all()
    H = marginal_example(m + 3, dtype)
    assert H[:, 2, 2].tolist() == [2.0**-t for t in range(1, m + 1)] + [0] * 3
    assert (H[:, [0, 1], [0, 1]] == 1).all()


def test_the_two_sided_recurrence_is_its_equation():
    """S_t = L_t S_{t-1} R_t + W_t with K, V and T different, in numpy, step by step."""
    left, right = torch.rand(2, 6, 4, 4).double(), torch.rand(2, 6, 3, 3).double()
    write, state = torch.rand(2, 6, 4, 3).double(), torch.rand(2, 4, 3).double()
    ours = two_sided_recurrence(left, right, write, state).numpy()
    for b in range(2):
        S = state[b].numpy()
        for t in range(6):
            S = left[b, t].numpy() @ S @ right[b, t].numpy() + write[b, t].numpy()
            assert np.abs(ours[b, t] - S).max() < 1e-12 * np.abs(S).max()


def test_a_reveal_settles_one_row_and_one_column_of_the_marginals():
    """(3): variable i holds j and nothing else, no other variable holds j; the rest is kept."""
    H = torch.rand(4, 4, dtype=torch.float64)
    for i, j in itertools.product(range(4), repeat=2):
        steps = [x[None] for x in marginal_reveals(torch.tensor(i), torch.tensor(j), 4)]
        ours, expected = two_sided_recurrence(*steps, H)[0], H.clone()
        expected[i], expected[:, j] = 0, 0
        expected[i, j] = 1
        assert (ours == expected).all()


def test_a_coin_flip_of_an_exchange_is_a_delta_step_with_beta_2p():
    """(1 - p) I + p P_g = I - 2p k k^T: equation (2) is the delta rule, for any H and p."""
    p = torch.rand(7, dtype=torch.float64)
    exchanges = torch.tensor([[0, 3, 2, 1, 4]]).expand(7, 5)
    H = torch.rand(5, 4, dtype=torch.float64)
    k = exchange_key(torch.tensor(1), torch.tensor(3), 5).expand(7, 5)
    _, ours = delta_rule_recurrent(k, k, torch.zeros(7, 4).double(), 2 * p, H)
    left = marginal_coins(exchanges, p)
    theirs = two_sided_recurrence(left, torch.eye(4).double().expand(7, 4, 4),
                                  torch.zeros(7, 5, 4).double(), H)
    assert (ours - theirs[-1]).abs().max() < 1e-12


def belief_to_marginals(task, belief):
    """P(variable i holds value j) of a belief over the elements: [n, n]."""
    return np.einsum("q,qij->ij", belief,
                     task.group.elements[:, :, None] == np.arange(task.group.degree))


def test_coins_alone_leave_the_marginals_exact_and_a_reveal_does_not():
    """(2) gives the filter's marginals to 1e-12; (3) after some coins does not: positions depend on
    each other, and a matrix of marginals does not know how."""
    task, rng = CoinTask(Group("S4"), "full", 1.0), np.random.default_rng(11)
    program = task.draw(1, 6, 6, rng)
    beliefs, _ = task.automaton.filter(np.hstack([task.symbols(program), [[0]]]))
    exact = [belief_to_marginals(task, belief) for belief in beliefs[0, 1:]]
    commands, probability, asked, answers = (torch.from_numpy(x[0]) for x in (
        program.commands, program.probability, program.asked, task.program_answers(program)))
    coins = marginal_coins(commands, probability)
    left, right, write = marginal_reveals(asked, answers, 4)
    eye = torch.eye(4, dtype=torch.float64).expand(6, 4, 4)
    H = two_sided_recurrence(torch.cat([coins, left]), torch.cat([eye, right]),
                             torch.cat([0 * eye, write]), eye[0])
    assert np.abs(H[:6].numpy() - np.stack(exact[:6])).max() < 1e-12
    assert np.abs(sinkhorn(H[6]).numpy() - exact[6]).max() > 1e-3


def test_marginals_are_exact_for_certain_commands_and_never_rule_out_the_truth():
    """No coins: the permutation matrix itself. With coins: p > 0 implies marginal > 0."""
    task = CoinTask(Group("S4"), "swap", 0.5)
    certain = task.draw(30, 12, 2, np.random.default_rng(12), share=0)
    assert np.abs(marginal_predictions(task, certain) - task.best_predictions(certain)).max() < 1e-9
    program = task.draw(30, 12, 2, np.random.default_rng(12))
    best, marginal = task.best_predictions(program), marginal_predictions(task, program)
    assert (marginal[best > 0] > 0).all() and np.abs(marginal.sum(-1) - 1).max() < 1e-6
    assert np.abs(marginal[:, 0] - best[:, 0]).max() < 1e-9  # up to the first reveal
    assert divergence(best, marginal).mean() > 1e-4


def test_the_marginals_are_stable_if_every_variable_is_revealed_in_turn():
    """3,000 commands in float16 stay within 1% of float64, and no row or column fades."""
    task = CoinTask(Group("S3"), "swap", 0.5)
    program = task.draw(1, 3000, 1, np.random.default_rng(13), "periodic")
    commands, probability, asked, answers = (torch.from_numpy(x[0]) for x in (
        program.commands, program.probability, program.asked, task.program_answers(program)))
    left, right, write = marginal_reveals(asked, answers, 3)
    left = left @ marginal_coins(commands, probability)
    exact, half = (two_sided_recurrence(left.to(dtype), right.to(dtype), write.to(dtype),
                                        torch.eye(3, dtype=dtype)).double()
                   for dtype in (torch.float64, torch.float16))
    assert (exact - half).abs().max() < 0.01
    assert exact.sum(-1).min() > 1e-3 and exact.sum(-2).min() > 1e-3


def test_adversarial_reveals_halve_one_marginal_each_while_the_belief_stays():
    """After S certain commands each reveal has probability 1/2 and leaves one state. In the matrix
    of marginals the entry of the other variable halves, and Sinkhorn's decoder still repairs it."""
    task = CoinTask(Group("S4"), "full", 0.5)
    program = task.draw(5, 16, 1, np.random.default_rng(17), "adversarial")
    beliefs, log_evidence = task.automaton.filter(task.symbols(program))
    answers = task.program_answers(program)
    assert (log_evidence[:, 1] == 0).all() and (beliefs[:, 2::2].max(-1) == 1).all()
    assert np.abs(log_evidence[:, 3::2] - math.log(0.5)).max() < 1e-15
    for b in range(5):
        x = program.asked[b, 0]
        y = program.commands[b, 1, x]
        state = task.group.elements[beliefs[b, 2].argmax()]
        assert x != y and (program.asked[b] == x).all() and (answers[b] == state[x]).all()
        left, right, write = marginal_reveals(torch.tensor(x), torch.tensor(state[x]), 4)
        left = left @ marginal_coins(torch.from_numpy(program.commands[b, 1]),
                                     torch.tensor(0.5).double())
        H = two_sided_recurrence(*(m.expand(15, 4, 4) for m in (left, right, write)),
                                 torch.eye(4).double()[state])
        assert H[:, y, state[y]].tolist() == [2.0**-t for t in range(1, 16)]
    assert np.abs(marginal_predictions(task, program) - task.best_predictions(program)).max() < 1e-9


def test_sinkhorn_finds_the_doubly_stochastic_matrix_with_the_same_cross_ratios():
    """All sums 1 to 1e-8, and D_1 H D_2: cross ratios H_ij H_kl / H_il H_kj are kept."""
    H = torch.rand(6, 4, 4, dtype=torch.float64) + 0.01
    D = sinkhorn(H)
    assert (D.sum(-1) - 1).abs().max() < 1e-8 and (D.sum(-2) - 1).abs().max() < 1e-8

    def ratio(X):
        return X[:, 0, 1] * X[:, 2, 3] / (X[:, 0, 3] * X[:, 2, 1])

    assert (ratio(D) / ratio(H) - 1).abs().max() < 1e-9


# --- The rescaled scan ----------------------------------------------------------------------------

def value_of(pair):
    M, s = pair
    return M * 2.0**s.unsqueeze(-2)


def test_pairs_compose_associatively_first_the_first_then_the_second():
    """First A, then B, then C is the matrix C B A, whatever is joined first, whatever the scales;
    with zeros, too."""
    A, B, C = ((torch.rand(20, 4, 4).double() * (torch.rand(20, 4, 4) < 0.5),
                torch.randint(-9, 9, (20, 4))) for _ in range(3))
    truth = value_of(C) @ value_of(B) @ value_of(A)
    assert (truth - value_of(A) @ value_of(B) @ value_of(C)).abs().max() > 1
    for pair in (compose(A, compose(B, C)), compose(compose(A, B), C)):
        assert (value_of(pair) - truth).abs().max() < 1e-12 * truth.max()
        largest = pair[0].amax(-2)
        assert ((largest == 0) | (0.5 <= largest) & (largest < 1)).all()


def test_squaring_a_pair_36_times_still_counts_every_halving():
    """A^N of figure 9, N = 2^36: columns 2 and 3 are 2^-N, exactly; column 1 stays excluded."""
    A = joint_matrices(leak(), 0).float()
    pair = (A, torch.zeros(3, dtype=torch.int64))
    for _ in range(36):
        pair = compose(pair, pair)
    M, s = pair
    assert (M == A).all() and s[1:].tolist() == [1 - 2**36] * 2 and s[0] < -2**39


@pytest.mark.parametrize("length", [1, 2, 37, 1000])
def test_the_rescaled_scan_is_the_filter(length):
    """Beliefs and log-evidence at every step of a random automaton, at any length, to 1e-10."""
    automaton, rng = random_automaton(np.random.default_rng(6)), np.random.default_rng(14)
    symbols = possible_symbols(automaton, length, rng)
    beliefs, log_evidence = automaton.filter(np.hstack([symbols, [[0]]]))
    ours, evidence = rescaled_scan(joint_matrices(automaton, symbols[0]),
                                   torch.from_numpy(automaton.start))
    assert np.abs(ours.numpy() - beliefs[0, 1:]).max() < 1e-10
    assert np.abs(evidence.numpy() - log_evidence[0, :-1].cumsum()).max() < 1e-10 * length


@pytest.mark.parametrize("p, T", [(0.5, 100_000), (0.3, 20_000)])
def test_the_rescaled_scan_of_the_worst_case_in_float32(p, T):
    """Figure 9 for up to 100,000 steps: beliefs and log-evidence within 1e-4 of the exact ones. A
    leak of 0.3 is no power of two, and so is rounded."""
    A = joint_matrices(leak(p), np.zeros(1, int)).float().expand(T, 3, 3)
    belief, evidence = rescaled_scan(A, torch.tensor([0, 0.5, 0.5]))
    assert belief.dtype == torch.float32
    exact = torch.tensor([p, (1 - p) / 2, (1 - p) / 2])
    assert (belief / exact - 1).abs().max() < 1e-4
    truth = torch.arange(T) * math.log(1 - p)  # the first reveal is certain
    assert (evidence[1:] / truth[1:] - 1).abs().max() < 1e-4 and abs(evidence[0]) < 1e-6


def test_a_beginning_that_fits_badly_keeps_a_scale_of_its_own():
    """Two states that never meet: one survives each step with probability 1/2, the other always.

    The reader who began in the first knows where she is after 10,000 steps, in float32; one scale
    for the whole matrix would let her column underflow.
    """
    A = torch.diag(torch.tensor([0.5, 1.0])).expand(10_000, 2, 2)
    belief, evidence = rescaled_scan(A, torch.tensor([1.0, 0.0]))
    assert (belief == torch.tensor([1.0, 0.0])).all()
    assert abs(evidence[-1] / (10_000 * math.log(0.5)) - 1) < 1e-12


def test_the_scan_takes_numbers_at_the_end_of_the_format():
    """Steps with entries of 2^-140 and 2^120 in float32, whose products no float32 holds."""
    A = torch.tensor([2.0**-140, 2.0**-145, 2.0**120, 2.0**127]).repeat(50)[:, None, None]
    belief, evidence = rescaled_scan(A, torch.ones(1))
    assert (belief == 1).all()
    assert abs(evidence[-1] / (50 * (-140 - 145 + 120 + 127) * math.log(2)) - 1) < 1e-12


def test_an_impossible_reveal_ends_the_rescaled_scan_where_it_stands():
    A = torch.stack([torch.eye(2), torch.diag(torch.tensor([0.0, 1.0])), torch.eye(2)])
    belief, evidence = rescaled_scan(A, torch.tensor([1.0, 0.0]))
    assert belief[0].tolist() == [1, 0] and belief[1:].isnan().all()
    assert evidence.tolist() == [0, -math.inf, -math.inf]


# --- The command line -----------------------------------------------------------------------------

def test_the_marginals_are_measured_on_the_traces_of_an_evaluation(capsys, tmp_path):
    """KL over the program that eval.py draws, for each length; the same in the record."""
    main(["--marginals", "--group", "S3", "--uncertain", "0.5", "--lengths", "6:2,8:1", "--traces",
          "9", "--seed", "3", "--record", str(tmp_path / "results.jsonl"), "--json"])
    numbers = json.loads(capsys.readouterr().out.splitlines()[-1])
    record = json.loads((tmp_path / "results.jsonl").read_text())
    assert record["results"] == numbers["results"] and numbers["uncertain"] == 0.5
    assert record["command"].startswith("python -m experiments.underflow --marginals --group S3")
    task = CoinTask(Group("S3"), "full", 0.5)
    for row, (length, spacing) in zip(numbers["results"], [(6, 2), (8, 1)]):
        program = task.draw(9, length, spacing, generator(3, "test", length, spacing))
        p, q = task.best_predictions(program), marginal_predictions(task, program)
        kl = (p * np.log(np.where(p > 0, p, 1) / np.where(p > 0, q, 1))).sum(-1)
        assert abs(row["kl_marginal"] - kl.mean()) < 1e-12 and row["traces"] == 9
        assert np.abs(np.array(row["kl_marginal_by_position"]) - kl.mean(0)).max() < 1e-12


def test_the_demonstration_counts_the_reveals_of_each_number_format(capsys, monkeypatch):
    monkeypatch.setattr("experiments.underflow.LONG", 1000)
    main([])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["float32", "2^-149", "149", "150"] in shown
    assert ["float16", "2^-24", "24", "25"] in shown
    assert any(line[:3] == ["p", "=", "0.3:"] for line in shown)


def test_bad_requests_get_one_line(refused):
    refused(main, ["--group", "S3"], "--marginals")
    refused(main, ["--marginals", "--group", "S6"], "refused above 120")
    refused(main, ["--marginals", "--uncertain", "1.5"], "between 0 and 1")
    refused(main, ["--marginals", "--lengths", "8:3"], "multiple")
    refused(main, ["--marginals", "--traces", "0"], "--traces")
