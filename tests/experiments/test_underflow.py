"""Two linear representations of a belief, and the rescaled scan."""

import numpy as np
import torch

from experiments import underflow
from experiments.beliefs import PFSA
from scan import delta_rule_recurrent, swap_key


def test_a_coin_is_a_delta_step_and_a_reveal_settles_a_row_and_a_column():
    """(1 - p) I + p P_g = I - 2p k k^T: equation (2) is the delta rule, with beta = 2p, here 1."""
    H = torch.rand(3, 3, dtype=torch.float64)
    k = swap_key(torch.tensor(1), torch.tensor(2), 3)[None].double()
    _, expected = delta_rule_recurrent(k, k, torch.zeros_like(k), torch.ones(1).double(), H)
    expected[2], expected[:, 2] = 0, 0
    expected[2, 2] = 1
    assert (underflow.cycle(H, 2) - expected).abs().max() < 1e-12


def test_the_papers_joint_example():
    """Appendix B.1, from the matrices that it prints. It numbers the orders 123, 213, 321, 132,
    231, 312, and the printed A swaps values, not positions; from 123 both end alike."""
    A = torch.tensor([[0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 1],
                      [0, 0, 0, 0, 1, 1], [0, 1, 0, 1, 0, 0], [0, 0, 1, 1, 0, 0]]) / 2
    Z = torch.diag(torch.tensor([0.0, 0, 1, 0, 0, 1]))
    h = torch.tensor([1.0, 0, 0, 0, 0, 0])
    orders = ["123", "213", "321", "132", "231", "312"]
    lexicographic = [orders.index(order) for order in sorted(orders)]
    found = torch.stack([h for _, h in underflow.joint_example()])
    assert torch.equal(found, torch.stack([h, A @ h, Z @ A @ h])[:, lexicographic])


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
        assert underflow.halvings(dtype) == (m, m + 1)
