"""Groups by the numbers of their elements: what chapters need that list a whole group.

It adds to data.Group, whose elements are permutations, their numbers in .elements (lexicographic
order; 0 is the identity), shortest words, and products of groups. Everything is "first g, then h".
"""

import numpy as np

import data
from data import Group


def index(group, perms):
    """The number of each permutation in group.elements: [..., n] -> [...]."""
    # The list is sorted, so a binary search finds each one.
    return np.searchsorted(keys(group.elements), keys(perms))


def keys(perms):
    """Rows as byte strings, which numpy compares from left to right: [..., n] -> [...]."""
    # + 1: numpy strips zero bytes at the end of a string.
    rows = np.ascontiguousarray(perms + 1, dtype=np.uint8)
    return rows.view(f"S{rows.shape[-1]}")[..., 0]


def compose(group, g, h):
    """First g, then h, as data.compose, but of numbers, in any shapes that broadcast."""
    g, h = np.broadcast_arrays(g, h)
    return index(group, data.compose(group.elements[g], group.elements[h]))


def shortest_words(group, alphabet):
    """The fewest commands that lead to each element: {its number: a list of commands}."""
    numbers = index(group, alphabet)
    words = {0: []}
    frontier = [0]

    for element in frontier:  # breadth first: the list grows while it is read
        products = compose(group, element, numbers).tolist()
        for letter, reached in zip(alphabet, products):
            if reached not in words:
                words[reached] = words[element] + [letter]
                frontier.append(reached)
    return words


def product(g, h):
    """The direct product of two groups, as in A4xZ5: it permutes the pairs of their points."""
    # The pair (i, j) is the point i m + j. So the product moves each point to each other one.
    m = h.degree
    left = g.elements[:, None, :, None]
    right = h.elements[None, :, None, :]
    elements = (left * m + right).reshape(g.order * h.order, g.degree * m)
    return Group(f"{g.name}x{h.name}", elements)


def points_moved(perms):
    """How many points each permutation moves: [..., n] -> [...]."""
    return (perms != np.arange(perms.shape[-1])).sum(-1)
