"""Two linear representations of a belief, the rescaled scan, and a hand-built head."""

import numpy as np
import pytest
import torch

from data import Group
from experiments import underflow
from experiments.beliefs import PFSA, Choices, CoinTask
from scan import delta_rule_recurrent, swap_key

def test_a_coin_is_a_delta_step_and_a_reveal_settles_a_row_and_a_column():
    """(1 - p) I + p P_g = I - 2p k k^T: equation (2) is the delta rule, with beta = 2p."""
    p = torch.rand(7, dtype=torch.float64)
    H = torch.rand(5, 5, dtype=torch.float64)
    k = swap_key(torch.tensor(1), torch.tensor(3), 5).expand(7, 5)
    _, expected = delta_rule_recurrent(k, k, torch.zeros(7, 5).double(), 2 * p, H)
    for coin in p:
        H = underflow.flip_coin(H, [0, 3, 2, 1, 4], coin)
    assert (H - expected).abs().max() < 1e-12

    expected[2], expected[:, 4] = 0, 0
    expected[2, 4] = 1
    assert (underflow.show_value(H, 2, 4) - expected).abs().max() < 1e-12


def test_sinkhorn_scales_rows_and_columns_to_sum_to_one():
    """Only scales: the log of the ratio is a number for each row plus one for each column."""
    H = torch.rand(3, 4, 4, dtype=torch.float64) + 0.1
    scaled = underflow.sinkhorn(H)
    assert (scaled.sum(-1) - 1).abs().max() < 1e-8 and (scaled.sum(-2) - 1).abs().max() < 1e-8
    ratio = (scaled / H).log()
    apart = ratio - ratio[:, :1] - ratio[:, :, :1] + ratio[:, :1, :1]
    assert apart.abs().max() < 1e-10


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_marginals_have_a_gap_to_the_filter_even_in_exact_arithmetic(share):
    """They are exact up to the first reveal, and for certain commands. Later they are off, but they
    never rule out a possible value: they do not say how the variables depend on each other."""
    task = CoinTask(Group("S4"), "swap", share)
    choices = task.draw(10, 12, 2, np.random.default_rng(12))
    best = task.batch_of_choices(choices).best
    marginal = underflow.marginal_predictions(choices)
    gap = np.abs(marginal - best).max((0, 2))  # at each reveal
    assert gap[0] < 1e-9 and (marginal[best > 0] > 0).all()
    assert gap.max() > 0.01 if share else gap.max() < 1e-9


def test_the_rescaled_scan_is_the_filter():
    """On a random automaton whose symbols exclude one state or none, then move."""
    rng = np.random.default_rng(6)
    delta = rng.dirichlet([0.3] * 4, size=(5, 4)).swapaxes(1, 2)
    rho = np.arange(4) != np.arange(5)[:, None]
    start = np.array([0.4, 0.3, 0.2, 0.1])
    symbols = rng.integers(5, size=(1, 38))
    exact = PFSA(delta, rho, start).filter(symbols)[0]
    evidence = (exact * rho[symbols[0]]).sum(1)

    A = torch.from_numpy(delta * rho[:, None])[symbols[0, :-1]]
    ours, log_norm = underflow.rescaled_scan(A, torch.from_numpy(start))
    assert np.abs(ours.numpy() - exact[1:]).max() < 1e-10
    assert np.abs(log_norm.numpy() - np.log(evidence[:-1]).cumsum()).max() < 1e-10


def test_a_start_that_fits_badly_has_a_separate_scale():
    """Two states that never meet: one survives each step with probability 1/2, the other always.
    One scale for the whole matrix would let the first column underflow in float32."""
    A = torch.diag(torch.tensor([0.5, 1.0])).expand(10_000, 2, 2)
    belief, log_norm = underflow.rescaled_scan(A, torch.tensor([1.0, 0.0]))
    assert (belief == torch.tensor([1.0, 0.0])).all()
    assert abs(log_norm[-1] / (10_000 * np.log(0.5)) - 1) < 1e-12


def test_both_representations_end_where_the_number_format_does():
    """Halving passes the smallest number 2^-m, and the tie 2^-(m + 1) is rounded to the even 0.
    Figure 9 of the paper begins at 1/2, figure 10 at 1."""
    for dtype, m in [(torch.float32, 149), (torch.float16, 24)]:
        assert underflow.underflow(dtype) == (m, m + 1)


def test_a_hand_built_head_keeps_the_belief_about_a_pair_for_100_cycles():
    """Before each reveal of a it reads the filter's own prediction, and after it 1 for the value
    shown and 1/2 for the other of the pair. A certain swap comes first."""
    task = CoinTask(Group("S3"), "swap")
    commands = np.tile([1, 0, 2], (3, 101, 1))
    commands[:, 0] = task.group.transpositions
    probability = np.full((3, 101), 0.5)
    probability[:, 0] = 1
    executed = np.random.default_rng(7).random((3, 101)) < probability
    choices = Choices(commands, np.zeros((3, 101), int), probability, executed)
    best = torch.from_numpy(task.batch_of_choices(choices).best)[:, 1:]
    shown = torch.from_numpy(choices.revealed())[:, 1:]
    for b in range(3):
        before, after = underflow.hold_pair(shown[b], torch.from_numpy(commands[b, 0]))
        assert (before - best[b]).abs().max() < 1e-10
        assert (after - best[b].scatter(1, shown[b, :, None], 1.0)).abs().max() < 1e-10
