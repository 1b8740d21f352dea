"""Permutations compose from left to right."""

import numpy as np

from data import Group
from experiments import groups


def test_permutations_compose_from_left_to_right():
    """new[i] = old[g[i]], then the same with h. Most pairs do not commute; shapes broadcast."""
    elements = Group("S4").elements
    g, h = elements[:, None], elements[None, 5:]
    expected = [[[x[j] for j in y] for y in elements[5:]] for x in elements]
    assert np.array_equal(groups.compose(g, h), expected), "all pairs: [24, 1, 4] and [1, 19, 4]"
    assert np.array_equal(groups.compose(g[3, 0], h[0, 7]), expected[3][7]), "one pair: [4] and [4]"
