"""Beliefs about uncertain programs. Oracles: the interpreter, and the enumeration of all coins.

The filter is exact, the two linear representations are the paper's and die where they must, and the
rescaled scan is the filter at any length.
"""

import code
import contextlib
import io
import itertools
import json
import math
import random

import numpy as np
import pytest
import torch
from data import COINS, PFSA, REVEALS, Group, Program, ReplTask, draw_commands, stream
from data import main as show
from eval import (against_filter, answer_log_probabilities, divergence, evaluate, main,
                  marginal_predictions)
from models import build
from scan import (compose, delta_rule_recurrent, exchange_key, marginal_coins, marginal_reveals,
                  rescaled_scan, sinkhorn, two_sided_recurrence)
from train import main as train

CASES = [("S3", "swap"), ("S3", "full"), ("S4", "swap"), ("D4", "full"), ("S2", "full")]


def session(lines, coins, monkeypatch):
    """What an interactive Python shows when its random() falls as recorded; all coins are used."""
    falls = iter(coins)
    monkeypatch.setattr(random, "random", lambda: next(falls))
    interpreter, shown, source = code.InteractiveInterpreter(), "", ""
    for line in lines:
        shown += f"{'... ' if source else '>>> '}{line}\n"
        source += f"{line}\n" if source or line.startswith("if") else line
        with contextlib.redirect_stdout(io.StringIO()) as out:
            unfinished = interpreter.runsource(source.removesuffix("\n") if line else source)
        shown, source = shown + out.getvalue(), source if unfinished else ""
    assert next(falls, None) is None
    return shown


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("name, commands", [*CASES, ("S5", "full"), ("A4xZ5", "full")])
def test_a_real_interpreter_shows_an_uncertain_trace_if_its_coins_fall_as_recorded(
        name, commands, share, monkeypatch):
    """The inputs of a trace, typed into Python, give the trace to the letter, `... ` and all."""
    task, rng = ReplTask(Group(name), commands, share), np.random.default_rng(1)
    for reveals in REVEALS if "S" in name else REVEALS[:2]:
        program = task.draw(4, 12, 3, rng, reveals)
        tokens, _ = task.write(*program)
        for row, chance, executed in zip(tokens, program.chance, program.executed):
            text = task.decode(row)
            assert task.encode(text) == row.tolist()
            inputs = [line[4:] for line in text.splitlines() if line[:4] in (">>> ", "... ")]
            # random() < p: the largest number that is still below p, or p itself
            coins = [np.nextafter(p, 0) if fell else p for p, fell in zip(chance, executed)
                     if p < 1]
            assert session(inputs, coins, monkeypatch) == text


@pytest.mark.parametrize("commands", ["full", "swap"])
def test_without_uncertain_commands_the_traces_are_those_of_the_plain_task(commands):
    """P = 0 draws the commands and then the variables, and nothing else; the vocabulary is as
    before."""
    task, group = ReplTask(Group("S4"), commands, 0.0), Group("S4")
    rng = np.random.default_rng(3)
    lines = draw_commands(group, commands, (5, 12), rng)
    plain = task.write(lines, rng.integers(4, size=(5, 4)))
    for ours, theirs in zip(task.sample(5, 12, 3, np.random.default_rng(3)), plain):
        assert (ours == theirs).all()
    assert task.vocab == ReplTask(group, commands, 0.5).vocab[:len(task.vocab)]
    assert len(task.vocab) == 7 + 3 * 4


def test_the_share_of_uncertain_commands_is_p_and_each_coin_falls_as_its_number_says():
    """In every trace where P L is whole, in the mean where it is not; each number equally often,
    each position equally often; executed with the probability shown."""
    task = ReplTask(Group("S3"), "swap", 0.25)
    program = task.draw(4000, 16, 4, np.random.default_rng(4))
    assert ((program.chance < 1).sum(1) == 4).all()
    assert np.abs((program.chance < 1).mean(0) - 0.25).max() < 6 * (0.25 * 0.75 / 4000)**0.5
    for coin in COINS:
        fell = program.executed[program.chance == coin]
        assert abs(len(fell) - 16000 / 3) < 6 * 16000**0.5 / 2
        assert abs(fell.mean() - coin) < 6 * (coin * (1 - coin) / len(fell))**0.5
    assert program.executed[program.chance == 1].all()
    counts = [(task.draw(1, 2, 1, stream(0, "valid", i)).chance < 1).sum() for i in range(400)]
    assert set(counts) == {0, 1} and abs(np.mean(counts) - 0.5) < 6 * 0.5 / 20


# --------------------------------------------------------------------------------------------------
# The filter
# --------------------------------------------------------------------------------------------------

def by_enumeration(task, program):
    """Every way that the coins can fall, executed on plain lists, weighted, and kept while it fits.

    -> the prediction at each reveal [B, R, n] and the probability of all reveals [B].
    """
    (batch, length), count = program.chance.shape, program.asked.shape[1]
    predicted, evidence = np.zeros((batch, count, task.group.degree)), np.zeros(batch)
    answers = task.answers(program.commands, program.asked, program.executed)
    for b in range(batch):
        uncertain = np.flatnonzero(program.chance[b] < 1)
        for fall in itertools.product([True, False], repeat=len(uncertain)):
            fell, weight = dict(zip(uncertain, fall)), 1.0
            for t, fallen in fell.items():
                weight *= program.chance[b, t] if fallen else 1 - program.chance[b, t]
            state = list(range(task.group.degree))
            for t in range(length):
                if fell.get(t, True):
                    state = [state[i] for i in program.commands[b, t]]
                if (t + 1) % (length // count) == 0:
                    r = t // (length // count)
                    value = state[program.asked[b, r]]
                    predicted[b, r, value] += weight
                    if value != answers[b, r]:
                        break
            else:
                evidence[b] += weight
    return predicted / predicted.sum(-1, keepdims=True), evidence


@pytest.mark.parametrize("name, commands", CASES)
def test_the_filter_is_the_enumeration_of_all_coins(name, commands):
    """Predictions at every reveal and the probability of all of them, to 1e-12."""
    task = ReplTask(Group(name), commands, 0.75)
    for reveals in REVEALS if name != "D4" else REVEALS[:2]:
        program = task.draw(6, 8, 2, np.random.default_rng(5), reveals)
        predicted, evidence = by_enumeration(task, program)
        assert np.abs(task.best_predictions(program) - predicted).max() < 1e-12
        _, log_evidence = task.automaton.filter(task.symbols(*program))
        assert np.abs(np.exp(log_evidence.sum(1)) / evidence - 1).max() < 1e-12


def random_automaton(rng, symbols=5, states=4):
    """Dense, not symmetric, with symbols that reveal and move at once; no state is a dead end."""
    delta = rng.random((symbols, states, states)) * (rng.random((symbols, states, states)) < 0.6)
    delta += np.eye(states) * 0.1
    rho = rng.random((symbols, states)) < 0.7
    rho[0] = True
    return PFSA(delta / delta.sum(1, keepdims=True), rho, np.array([0.4, 0.3, 0.2, 0.1]),
                [f"symbol {i}" for i in range(symbols)])


def possible_symbols(automaton, length, rng):
    """Symbols of a real run: each consistent with the state that it meets."""
    state, symbols = rng.choice(len(automaton.start), p=automaton.start), []
    for _ in range(length):
        symbols.append(rng.choice(np.flatnonzero(automaton.rho[:, state])))
        state = rng.choice(len(automaton.start), p=automaton.delta[symbols[-1]][:, state])
    return np.array([symbols])


def test_the_filter_of_any_automaton_is_the_sum_over_all_its_paths():
    """Reveal first, then move: beliefs and evidence of a random automaton, path by path."""
    automaton = random_automaton(np.random.default_rng(6))
    symbols = possible_symbols(automaton, 5, np.random.default_rng(7))
    beliefs, log_evidence = automaton.filter(symbols)
    mass = np.zeros((6, 4))
    for path in itertools.product(range(4), repeat=6):
        weight = automaton.start[path[0]]
        mass[0, path[0]] += weight * (len(set(path)) == 1)  # each start once
        for t, symbol in enumerate(symbols[0]):
            weight *= automaton.rho[symbol, path[t]]
            weight *= automaton.delta[symbol, path[t + 1], path[t]]
            mass[t + 1, path[t + 1]] += weight * (len(set(path[t + 1:])) == 1)
    assert np.abs(mass[:5] / mass[:5].sum(1, keepdims=True) - beliefs[0]).max() < 1e-12
    assert abs(mass[5].sum() - np.exp(log_evidence.sum())) < 1e-12


def test_a_deterministic_automaton_always_knows_its_state():
    """Certain commands: the belief is the one true state, and every reveal has evidence 1."""
    task = ReplTask(Group("S4"), "full", 0.5)
    program = task.draw(9, 12, 3, np.random.default_rng(8))
    certain = Program(program.commands, program.asked, np.ones((9, 12)), np.ones((9, 12), bool))
    _, log_evidence = task.automaton.filter(task.symbols(*certain))
    assert (log_evidence == 0).all()
    best = task.best_predictions(certain)
    assert (best.max(-1) == 1).all()
    assert (best.argmax(-1) == task.answers(program.commands, program.asked)).all()


def test_the_best_guess_is_right_as_often_as_the_filter_expects():
    """The Bayes accuracy, mean of max p, is what answering argmax p reaches; nothing passes it."""
    task = ReplTask(Group("S3"), "full", 0.5)
    program = task.draw(2000, 16, 2, np.random.default_rng(9))
    best = task.best_predictions(program)
    answers = task.answers(program.commands, program.asked, program.executed)
    assert abs((best.argmax(-1) == answers).mean() - best.max(-1).mean()) < 6 * 0.5 / 16000**0.5


# --------------------------------------------------------------------------------------------------
# The two linear representations, and where they end
# --------------------------------------------------------------------------------------------------

def joint_matrices(automaton, symbols):
    """A = T Z of each symbol: [T, Q, Q]."""
    return torch.from_numpy(automaton.delta[symbols] * automaton.rho[symbols][:, None])


def joint_states(A, h):
    """Equation (17), by the recurrence of scan.py, in the number format of A: [T, Q]."""
    one = torch.ones(len(A), 1, 1, dtype=A.dtype)
    return two_sided_recurrence(A, one, 0 * A[:, :, :1], h.unsqueeze(-1)).squeeze(-1)


# The paper's figure 9: one symbol, which reveals {2, 3} and then sends each of them to 1 with
# probability 1/2.
LEAK = PFSA([[[1, 0.5, 0.5], [0, 0.5, 0], [0, 0, 0.5]]], [[False, True, True]], [0, 0.5, 0.5],
            ["one of 2 and 3"])


def test_the_joint_norm_is_the_probability_of_all_that_was_revealed():
    """|h_t|_1 = product of the survival probabilities, to 1e-10; its direction is the belief."""
    task = ReplTask(Group("S3"), "full", 0.5)
    symbols = task.symbols(*task.draw(1, 24, 2, np.random.default_rng(10)))
    beliefs, log_evidence = task.automaton.filter(symbols)
    h = joint_states(joint_matrices(task.automaton, symbols[0]),
                     torch.from_numpy(task.automaton.start)).numpy()
    assert np.abs(h.sum(1) / np.exp(log_evidence[0].cumsum()) - 1).max() < 1e-10
    assert np.abs(h[:-1] / h[:-1].sum(1, keepdims=True) - beliefs[0, 1:]).max() < 1e-12


def test_figure_9_the_joint_mass_halves_while_the_belief_stays():
    """Revealed mass 1/2, 1/4, 1/8, ...; the posterior on {2, 3} is (1/2, 1/2) at every step."""
    beliefs, log_evidence = LEAK.filter(np.zeros((1, 9), int))
    assert np.abs(log_evidence[0] - [0] + math.log(2) * (np.arange(9) > 0)).max() < 1e-15
    assert np.abs(beliefs[0, 1:] - [0.5, 0.25, 0.25]).max() < 1e-15
    h = joint_states(joint_matrices(LEAK, np.zeros(9, int)), torch.tensor([0, 0.5, 0.5]).double())
    assert h[:, 1:].tolist() == [[2.0**-t / 2] * 2 for t in range(1, 10)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_representations_underflow_at_the_predicted_step(dtype):
    """Halving passes the smallest subnormal number 2^-m, m = 149, 133, 24: then h and H_33 are 0.

    The adversary of the paper's figure 10: exchange b and c with probability 1/2, then b shows 2.
    """
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    m = -round(math.log2(smallest))
    assert m == {torch.float32: 149, torch.bfloat16: 133, torch.float16: 24}[dtype]
    h = joint_states(joint_matrices(LEAK, np.zeros(m + 3, int)).to(dtype),
                     torch.tensor([0, 0.5, 0.5]).to(dtype))[:, 1]
    assert [int(t) for t in (h == 0).nonzero()][0] + 1 == m  # h_t = 2^-(t + 1), and a tie is even

    steps = m + 3
    coin = marginal_coins(torch.tensor([0, 2, 1]), torch.tensor(0.5, dtype=torch.float64))
    left, right, write = marginal_reveals(torch.tensor(1), torch.tensor(1), 3)
    H = two_sided_recurrence((left @ coin).expand(steps, 3, 3).to(dtype),
                             right.expand(steps, 3, 3).to(dtype),
                             write.expand(steps, 3, 3).to(dtype), torch.eye(3, dtype=dtype))
    halved = H[:, 2, 2].tolist()
    assert halved[:m] == [2.0**-t for t in range(1, m + 1)] and halved[m] == 0
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
    """(19): variable i holds j and nothing else, no other variable holds j; the rest is kept."""
    H = torch.rand(4, 4, dtype=torch.float64)
    for i, j in itertools.product(range(4), repeat=2):
        steps = [x[None] for x in marginal_reveals(torch.tensor(i), torch.tensor(j), 4)]
        ours, expected = two_sided_recurrence(*steps, H)[0], H.clone()
        expected[i], expected[:, j] = 0, 0
        expected[i, j] = 1
        assert (ours == expected).all()


def test_a_coin_flip_of_an_exchange_is_a_delta_step_with_beta_2p():
    """(1 - p) I + p P_g = I - 2p k k^T: equation (18) is the delta rule, for any H and p."""
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
    """(18) gives the filter's marginals to 1e-12; (19) after some coins does not, for any order of
    coins of S3 that makes positions depend on each other."""
    task, rng = ReplTask(Group("S4"), "full", 1.0), np.random.default_rng(11)
    program = task.draw(1, 6, 6, rng)
    symbols = task.symbols(*program)
    beliefs, _ = task.automaton.filter(np.hstack([symbols, [[0]]]))
    exact = [belief_to_marginals(task, belief) for belief in beliefs[0, 1:]]
    coins = marginal_coins(torch.from_numpy(program.commands[0]),
                           torch.from_numpy(program.chance[0]))
    left, right, write = marginal_reveals(
        torch.from_numpy(program.asked[0]),
        torch.from_numpy(task.answers(program.commands, program.asked, program.executed)[0]), 4)
    eye = torch.eye(4, dtype=torch.float64).expand(6, 4, 4)
    H = two_sided_recurrence(torch.cat([coins, left]), torch.cat([eye, right]),
                             torch.cat([0 * eye, write]), eye[0])
    assert np.abs(H[:6].numpy() - np.stack(exact[:6])).max() < 1e-12
    assert np.abs(sinkhorn(H[6]).numpy() - exact[6]).max() > 1e-3


def test_marginals_are_exact_for_certain_commands_and_never_rule_out_the_truth():
    """No coins: the permutation matrix itself. With coins: p > 0 implies marginal > 0."""
    task, rng = ReplTask(Group("S4"), "swap", 0.5), np.random.default_rng(12)
    program = task.draw(30, 12, 2, rng)
    certain = program._replace(chance=np.ones((30, 12)), executed=np.ones((30, 12), bool))
    assert np.abs(marginal_predictions(task, certain) - task.best_predictions(certain)).max() < 1e-9
    best, marginal = task.best_predictions(program), marginal_predictions(task, program)
    assert (marginal[best > 0] > 0).all() and np.abs(marginal.sum(-1) - 1).max() < 1e-6
    assert divergence(best, np.log(np.maximum(marginal, 1e-300))).mean() > 1e-4


def test_the_marginals_are_stable_if_every_variable_is_revealed_in_turn():
    """3,000 commands in float16 stay within 1% of float64, and no row or column fades."""
    task = ReplTask(Group("S3"), "swap", 0.5)
    program = task.draw(1, 3000, 1, np.random.default_rng(13), "periodic")
    inputs = [torch.from_numpy(x[0]) for x in
              (program.commands, program.chance, program.asked, task.answers(
                  program.commands, program.asked, program.executed))]
    left, right, write = marginal_reveals(*inputs[2:], 3)
    left = left @ marginal_coins(*inputs[:2])
    exact, half = (two_sided_recurrence(left.to(dtype), right.to(dtype), write.to(dtype),
                                        torch.eye(3, dtype=dtype)).double()
                   for dtype in (torch.float64, torch.float16))
    assert (exact - half).abs().max() < 0.01
    assert exact.sum(-1).min() > 1e-3 and exact.sum(-2).min() > 1e-3


def test_adversarial_reveals_halve_one_marginal_each_while_the_belief_stays():
    """After S certain commands each reveal has probability 1/2 and leaves one state. In the matrix
    of marginals the entry of the other variable halves, and Sinkhorn's decoder still repairs it."""
    task = ReplTask(Group("S4"), "full", 0.5)
    program = task.draw(5, 16, 1, np.random.default_rng(17), "adversarial")
    beliefs, log_evidence = task.automaton.filter(task.symbols(*program))
    assert (log_evidence[:, 1] == 0).all() and (beliefs[:, 2::2].max(-1) == 1).all()
    assert np.abs(log_evidence[:, 3::2] - math.log(0.5)).max() < 1e-15
    for b in range(5):
        x = program.asked[b, 0]
        y = program.commands[b, 1, x]
        held = task.answers(*program[:2], program.executed)[b, 0]
        state = task.group.elements[beliefs[b, 2].argmax()]
        assert x != y and (program.asked[b] == x).all() and state[x] == held
        left, right, write = marginal_reveals(torch.tensor(x), torch.tensor(held), 4)
        left = left @ marginal_coins(torch.from_numpy(program.commands[b, 1]),
                                     torch.tensor(0.5).double())
        H = two_sided_recurrence(*(m.expand(15, 4, 4) for m in (left, right, write)),
                                 torch.eye(4).double()[state])
        assert (task.answers(*program[:2], program.executed)[b] == held).all()
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


def test_the_example_of_appendix_b1_swaps_values_and_python_swaps_variables():
    """`a, b = b, a` with probability 1/2 on the six states, in Python and as the table says.

    Exchanging the VALUES 1 and 2 instead, as the matrix of the paper's appendix B.1 does, agrees in
    the first state only where a and b hold them, and is another matrix.
    """
    task = ReplTask(Group("S3"), "swap", 1.0)
    states = [tuple(state) for state in (task.group.elements + 1).tolist()]
    variables, values = np.zeros((6, 6)), np.zeros((6, 6))
    for old, (a, b, c) in enumerate(states):
        variables[old, old] = values[old, old] = 0.5
        renamed = tuple({1: 2, 2: 1}.get(value, value) for value in (a, b, c))
        values[states.index(renamed), old] += 0.5
        a, b = b, a
        variables[states.index((a, b, c)), old] += 0.5
    symbol = task.symbols(np.array([[[1, 0, 2]]]), np.array([[0]]), np.array([[0.5]]),
                          np.array([[False]]))[0, 0]
    assert (task.automaton.delta[symbol] == variables).all()
    # columns of (1, 2, 3) and (2, 1, 3) agree; in the other four states 1 and 2 are not in a and b
    assert (variables == values).all(0).tolist() == [True, False, True, False, False, False]


# --------------------------------------------------------------------------------------------------
# The rescaled scan
# --------------------------------------------------------------------------------------------------

def value_of(pair):
    M, s = pair
    return M * 2.0**s.unsqueeze(-2)


def test_pairs_compose_associatively_to_the_product_of_their_matrices():
    """(C B) A = C (B A) = the product, later factor on the left, whatever the scales; zeros too."""
    A, B, C = ((torch.rand(20, 4, 4).double() * (torch.rand(20, 4, 4) < 0.5),
                torch.randint(-9, 9, (20, 4))) for _ in range(3))
    truth = value_of(C) @ value_of(B) @ value_of(A)
    for pair in (compose(compose(C, B), A), compose(C, compose(B, A))):
        assert (value_of(pair) - truth).abs().max() < 1e-12 * truth.max()
        largest = pair[0].amax(-2)
        assert ((largest == 0) | (0.5 <= largest) & (largest < 1)).all()


def test_squaring_a_pair_36_times_still_counts_every_halving():
    """A^N of figure 9, N = 2^36: columns 2 and 3 are 2^-N, exactly; column 1 stays excluded."""
    A = torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.5, 0.0], [0.0, 0.0, 0.5]])
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


def test_a_hundred_thousand_steps_of_the_worst_case_in_float32():
    """Figure 9 for 100,000 halvings: beliefs and log-evidence within 1e-4 of the fp64 filter."""
    T = 100_000
    beliefs, log_evidence = LEAK.filter(np.zeros((1, T + 1), int))
    A = joint_matrices(LEAK, np.zeros(1, int)).float().expand(T, 3, 3)
    ours, evidence = rescaled_scan(A, torch.tensor([0, 0.5, 0.5]))
    assert ours.dtype == torch.float32
    assert np.abs(ours.numpy() / beliefs[0, 1:] - 1).max() < 1e-4  # all entries are at least 1/4
    truth = log_evidence[0, 1:T].cumsum()
    assert np.abs(evidence.numpy()[1:] / truth - 1).max() < 1e-4


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


# --------------------------------------------------------------------------------------------------
# Models against the filter
# --------------------------------------------------------------------------------------------------

class Reader(torch.nn.Module):
    """Not a network: keeps every state that the text allows, with its probability, line by line.

    Knows Python and Bayes, and nothing of data.py but the symbols of the text.
    """

    def __init__(self, task):
        super().__init__()
        self.task = task

    def forward(self, tokens):
        logits = torch.full((*tokens.shape, len(self.task.vocab)), -1e9)
        for row, ids in enumerate(tokens.tolist()):
            weights, line = {(): 1.0}, ""
            for t, token in enumerate(ids):
                line += self.task.vocab[token]
                if line.endswith("\n"):
                    weights, line = self.read(weights, line), ""
                elif line.endswith(" ") and line[0] not in ">.":
                    logits[row, t] = -1e9
                    for state, weight in weights.items():
                        answer = self.task.encode(str(dict(state)[line[0]]))[0]
                        logits[row, t, answer] = torch.logaddexp(logits[row, t, answer],
                                                                 torch.tensor(math.log(weight)))
        return logits

    @staticmethod
    def read(weights, line):
        if line.startswith("...") or "print" in line or "import" in line:
            return weights
        if not line.startswith(">>> "):
            name, value = line.split()
            kept = {s: w for s, w in weights.items() if dict(s)[name] == int(value)}
            return {state: weight / sum(kept.values()) for state, weight in kept.items()}
        coin, _, command = line[4:].rpartition(": ")
        p = float(coin.removeprefix("if random() < ")) if coin else 1.0
        after = {}
        for state, weight in weights.items():
            variables = dict(state)
            exec(command, {}, variables)
            for outcome, chance in ((tuple(variables.items()), p), (state, 1 - p)):
                if chance:
                    after[outcome] = after.get(outcome, 0) + weight * chance
        return after


@pytest.mark.parametrize("reveals", REVEALS)
@pytest.mark.parametrize("commands", ["full", "swap"])
def test_a_reader_who_knows_bayes_has_no_divergence_from_the_filter(commands, reveals):
    """KL and excess loss 0, read from the tokens alone; and its accuracy is near the best."""
    task = ReplTask(Group("S3"), commands, 0.5)
    row = evaluate(Reader(task), task, 8, 2, traces=40, reveals=reveals)
    assert 0 <= row["kl"] + 1e-6 < 2e-6 and abs(row["excess"]) < 1e-5
    assert abs(row["all"] - row["bayes"]) < 0.2 and row["reveals"] == 160
    assert len(row["by_position"]) == len(row["kl_by_position"]) == 4


def test_a_model_that_knows_nothing_loses_what_the_filter_knows():
    """Uniform over the vocabulary: KL = log |vocabulary| - entropy of the filter; the loss over the
    values that came up differs from it by chance only."""
    task = ReplTask(Group("S3"), "swap", 0.5)
    model = build("lstm", len(task.vocab), d_model=8)
    model.head.weight.data.zero_()
    program = task.draw(200, 8, 2, np.random.default_rng(15))
    _, row = against_filter(model, task, program, "cpu")
    p = task.best_predictions(program)
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1).mean()
    assert abs(row["kl"] - (math.log(len(task.vocab)) - entropy)) < 1e-6
    assert abs(row["excess"] - row["kl"]) < 0.1
    assert row["bayes"] == p.max(-1).mean()


def test_log_probabilities_at_the_reveals_do_not_depend_on_pieces_or_rows(monkeypatch):
    """Streamed in pieces of 7 tokens, traces in groups: those of the whole model at each reveal."""
    task = ReplTask(Group("S3"), "full", 0.5)
    tokens, reveals = task.sample(70, 6, 2, np.random.default_rng(16))
    for name in ("linrnn", "lstm", "transformer"):
        model = build(name, len(task.vocab), d_model=8)
        monkeypatch.setattr("eval.PIECE", 7)
        ours = answer_log_probabilities(model, tokens[:, :-1], reveals[:, 1:], "cpu")
        with torch.no_grad():
            whole = model(torch.from_numpy(tokens[:, :-1])).double().log_softmax(-1)
        theirs = whole.numpy()[reveals[:, 1:]]
        assert np.abs(ours.reshape(theirs.shape) - theirs).max() < 1e-5


@pytest.fixture
def run(tmp_path):
    train(["--group", "S3", "--uncertain", "0.5", "--curriculum", "2:1,4:2", "--d-model", "8",
           "--heads", "1", "--advance", "-1", "--last-steps", "1", "--batch", "2",
           "--test-lengths", "4:2", "--traces", "4", "--out", str(tmp_path / "run"),
           "--record", str(tmp_path / "results.jsonl")])
    return tmp_path


def test_an_uncertain_run_is_trained_evaluated_and_recorded(run, capsys):
    """Bayes accuracy and KL stand in the record, in the table and in the JSON of eval.py."""
    row, = json.loads((run / "results.jsonl").read_text())["results"]
    assert row["kl"] > 0 and 1 / 3 < row["bayes"] <= 1 and row["kl_marginal"] >= 0
    config = json.loads((run / "run" / "config.json").read_text())
    assert config["uncertain"] == 0.5 and config["options"]["conv_width"] == 9
    shown = {}
    for reveals in REVEALS:
        main([str(run / "run"), "--lengths", "4:2", "--traces", "4", "--reveals", reveals,
              "--json"])
        out = capsys.readouterr().out
        assert "bayes" in out and "KL" in out
        shown[reveals] = json.loads(out.splitlines()[-1])["results"][0]
    assert shown["random"] == row
    main([str(run / "run"), "--lengths", "4:2", "--traces", "4", "--uncertain", "0", "--json"])
    certain = json.loads(capsys.readouterr().out.splitlines()[-1])["results"][0]
    assert certain["bayes"] == 1 and abs(certain["kl"] - certain["excess"]) < 1e-12
    assert len({r["kl"] for r in shown.values()}) == 3


def test_a_stage_is_left_when_the_model_is_as_good_as_the_filter(tmp_path, monkeypatch):
    """Accuracy 0.97 of the best possible accuracy of the same batch, three times in a row."""
    monkeypatch.setattr("eval.evaluate_and_print", lambda *_, **__: [])
    seen = []

    def step(accuracy):
        def fake(model, optimizers, inputs, targets, reveals, weight):
            task = ReplTask(Group("S3"), "full", 1.0)
            rng = stream(0, "train", len(seen))
            best = task.best_predictions(task.draw(4, 2, 1, rng)).max(-1).mean()
            seen.append(best)
            return {"loss": 0.0, "reveal_loss": 0.0, "reveal_accuracy": accuracy * best,
                    "gradient_norm": 0.0}
        return fake

    for accuracy, steps in [(0.98, 3 + 2), (0.96, 20)]:
        seen.clear()
        monkeypatch.setattr("train.train_step", step(accuracy))
        train(["--group", "S3", "--uncertain", "1", "--curriculum", "2:1,2:1", "--d-model", "8",
               "--heads", "1", "--last-steps", "2", "--max-steps", "20", "--batch", "4",
               "--out", str(tmp_path / str(accuracy))])
        assert len(seen) == steps and max(seen) < 1


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------

def test_an_impossible_reveal_names_the_step_and_the_symbol():
    task = ReplTask(Group("S3"), "full", 0.5)
    certain = task.symbols(np.array([[[1, 0, 2]]]), np.array([[0]]), np.ones((1, 1)),
                           np.ones((1, 1), bool))
    assert certain.tolist() == [[2 * 4 + 3, 24 + 1]]  # `a, b, c = b, a, c`, then `a 2`
    with pytest.raises(ValueError, match="impossible reveal at step 3 of trace 1: .*'a 3'"):
        task.automaton.filter(np.array([[11, 25, 3, 25], [11, 25, 3, 26]]))


def test_too_many_states_are_refused_with_the_cost():
    task = ReplTask(Group("S6"), "swap", 0.5)
    with pytest.raises(ValueError, match="S6.*720 probabilities.*518,400.*refused above 120"):
        task.best_predictions(task.draw(1, 2, 1, np.random.default_rng(0)))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_outside_0_and_1_is_refused(share, refused, tmp_path):
    with pytest.raises(ValueError, match="between 0 and 1; got"):
        ReplTask(Group("S3"), "full", share)
    refused(train, ["--uncertain", share, "--out", tmp_path / "run"], "between 0 and 1")
    refused(show, ["--uncertain", share], "between 0 and 1")


def test_an_evaluation_at_a_share_outside_0_and_1_is_refused(run, refused):
    for share in ("-0.1", "1.5", "nan"):
        refused(main, [run / "run", "--uncertain", share], "between 0 and 1")
    refused(main, [run / "run", "--reveals", "adversarial", "--uncertain", "0.5"], "of its own")


def test_a_belief_is_neither_snapped_nor_extracted(run, refused):
    for option in (["--snap", "auto"], ["--extract"]):
        refused(main, [run / "run", *option], "holds a belief")


def test_a_table_that_is_no_distribution_is_refused():
    for delta, start in [([[[0.5]]], [1.0]), ([[[1.0]]], [0.9]),
                         ([[[1.5, 0], [-0.5, 1]]], [1.0, 0.0]), ([[[math.nan]]], [1.0])]:
        with pytest.raises(ValueError, match="distribution"):
            PFSA(delta, [[True] * len(start)], start)
    with pytest.raises(ValueError, match=r"rho \(1, 2\) has 1 symbols and 2 states"):
        PFSA([[[1.0]]], [[True, True]], [1.0, 0.0])


def test_bad_requests_get_one_line(tmp_path, refused):
    out = ["--out", tmp_path / "run"]
    refused(train, ["--format", "word", "--uncertain", "0.5", *out], "no coins", "repl")
    refused(train, ["--group", "S6", "--uncertain", "0.5", *out], "720", "refused")
    train(["--group", "S3", "--curriculum", "2:1", "--d-model", "8", "--heads", "1",
           "--last-steps", "1", "--batch", "2", "--test-lengths", "2:1", "--traces", "2",
           *map(str, out)])
    for options in (["--reveals", "periodic"], ["--uncertain", "0.5"]):
        refused(main, [tmp_path / "run", *options], "trained without --uncertain")


def test_the_sample_shown_to_a_reader_carries_what_the_filter_expects(capsys):
    """python data.py --uncertain: Python's own states beside the lines, and p at each reveal."""
    show(["--group", "S3", "--uncertain", "1", "--length", "4"])
    shown = capsys.readouterr().out
    assert ">>> if random() < 0." in shown and "\n..." in shown and shown.count("filter ") == 2
