"""The filter of any automaton. Oracle: the sum over all paths of its state."""

import itertools
import math

import numpy as np
import pytest

from experiments.automata import PFSA, leak


def random_automaton(rng, symbols=5, states=4):
    """Dense, not symmetric, with symbols that reveal and move at once; no state is a dead end."""
    delta = rng.random((symbols, states, states)) * (rng.random((symbols, states, states)) < 0.6)
    delta += np.eye(states) * 0.1
    rho = rng.random((symbols, states)) < 0.7
    rho[0] = True
    return PFSA(delta / delta.sum(1, keepdims=True), rho, np.array([0.4, 0.3, 0.2, 0.1]),
                [f"symbol {i}" for i in range(symbols)])


def possible_symbols(automaton, length, rng):
    """Symbols of a real run: each consistent with the state that it meets. [1, length]."""
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


@pytest.mark.parametrize("p", [0.5, 0.3])
def test_figure_9_its_belief_stays_while_each_reveal_has_probability_1_minus_p(p):
    beliefs, log_evidence = leak(p).filter(np.zeros((1, 9), int))
    assert np.abs(log_evidence[0] - [0, *[math.log(1 - p)] * 8]).max() < 1e-15
    assert np.abs(beliefs[0, 1:] - [p, (1 - p) / 2, (1 - p) / 2]).max() < 1e-15


def test_an_impossible_symbol_names_its_place_and_itself():
    automaton = PFSA(np.eye(2)[None].repeat(2, 0), [[True, False], [False, True]], [0.5, 0.5],
                     ["the first", "the second"])
    with pytest.raises(ValueError, match="impossible reveal at step 2 of trace 1: .*'the first'"):
        automaton.filter(np.array([[0, 0, 0], [1, 1, 0]]))


def test_a_table_that_is_no_distribution_is_refused():
    for delta, start in [([[[0.5]]], [1.0]), ([[[1.0]]], [0.9]),
                         ([[[1.5, 0], [-0.5, 1]]], [1.0, 0.0]), ([[[math.nan]]], [1.0])]:
        with pytest.raises(ValueError, match="distribution"):
            PFSA(delta, [[True] * len(start)], start)
    with pytest.raises(ValueError, match=r"rho \(1, 2\) has 1 symbols and 2 states"):
        PFSA([[[1.0]]], [[True, True]], [1.0, 0.0])
