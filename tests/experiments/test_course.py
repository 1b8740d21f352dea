"""Laws that the exercises need and no other file has; and two functions that students write."""

import contextlib
import inspect
import random
import types

import models
import numpy as np
import pytest
import torch

import data
from experiments import groups


def test_numbers_compose_as_their_permutations_do():
    """In shapes that broadcast: first g, then h, run as two commands. Most pairs do not commute."""
    group = data.Group("S5")
    g, h = np.arange(120)[:, None], np.arange(120)
    pairs = np.stack(np.broadcast_arrays(g, h), -1).reshape(-1, 2)
    last = data.run_commands(group.elements[pairs])[:, 1]
    assert (group.elements[groups.compose(group, g, h).ravel()] == last).all()
    assert groups.compose(group, 7, 11) == groups.compose(group, g, h)[7, 11]


# --- No product of steps with beta <= 1 exchanges two values --------------------------------------
#
# Why. A step has the determinant 1 - beta >= 0, and so has a product of steps. An exchange X has
# -1. If |A - X| < 1, then A = X (I + E) with |E| < 1, and the determinant of A is negative, too. So
# no product comes nearer to an exchange than 1, however many steps it has.

def nearest_to_an_exchange(steps, beta_max):
    """Search for the steps I - beta k k^T whose product is nearest to an exchange.

    X = [[0, 1, 0], [1, 0, 0], [0, 0, 1]] exchanges the first two of three slots.
    Returns: keys [steps, 3] of length 1, betas [steps] in [0, beta_max], float64.
    """
    torch.manual_seed(0)
    starts = 30  # from one of them alone, the search may get stuck
    keys = torch.randn(starts, steps, 3).double().requires_grad_()
    angles = torch.randn(starts, steps).double().requires_grad_()
    optimizer = torch.optim.Adam([keys, angles], lr=0.05)

    for _ in range(300):
        units = keys / keys.norm(dim=-1, keepdim=True)
        betas = beta_max * angles.sin().square()  # both ends are reached, and gradients go on
        distances = distance(units, betas)
        optimizer.zero_grad()
        distances.square().sum().backward()
        optimizer.step()

    best = distances.argmin()
    return units[best].detach(), betas[best].detach()


def distance(keys, betas):
    """|A_m ... A_1 - X|, the root of the sum of squares: [..., steps, 3], [..., steps] -> [...]."""
    product = torch.eye(3).double()
    for key, beta in zip(keys.unbind(-2), betas[..., None, None].unbind(-3)):
        product = (torch.eye(3) - beta * key[..., :, None] * key[..., None, :]) @ product
    return (product - torch.eye(3)[[1, 0, 2]]).norm(dim=(-2, -1))


@pytest.mark.parametrize("steps", [1, 4])
def test_no_product_of_steps_with_beta_up_to_one_comes_nearer_to_an_exchange_than_one(steps):
    """With beta up to 2 the search finds an exchange. With beta up to 1 it ends at distance 1."""
    for beta_max, nearest in ((1, 1), (2, 0)):
        keys, betas = nearest_to_an_exchange(steps, beta_max)
        assert keys.shape == (steps, 3) and (keys.norm(dim=-1) - 1).abs().max() < 1e-9
        assert betas.min() >= 0 and betas.max() <= beta_max
        assert nearest - 1e-9 < distance(keys.double(), betas.double()) < nearest + 0.01


# --- A test of one's own --------------------------------------------------------------------------

def test_attention_reads_in_pieces_what_it_reads_at_once(models=models):
    """The output of an attention block depends on the tokens, not on how they are cut into pieces.
    models is the module under test."""
    torch.manual_seed(0)
    block = models.AttentionBlock(6, 1).double()
    x = torch.randn(2, 9, 6).double()
    whole, _ = block(x)

    state = None
    pieces = []
    for piece in x.split([1, 3, 5], 1):
        out, state = block(piece, state)
        pieces.append(out)
    assert (torch.cat(pieces, 1) - whole).abs().max() < 1e-5


WRONG = [("q = rotate(q, past)", "q = rotate(q)"), ("rotate(k, past)", "rotate(k)"),
         (".tril(past)", ".tril(past + 1)"), ("cat([state, kv], 3)", "cat([kv, state], 3)"),
         (".flatten(2)), kv", ".flatten(2)), kv[:, :, :, past:]")]


def test_the_own_test_passes_on_models_and_fails_on_each_wrong_variant():
    """In a random order. Traps: two pieces are too few, and a last piece of one token hides a mask
    that looks ahead."""
    source = inspect.getsource(models)
    for old, new in random.sample([*WRONG, ("q", "q"), ("q", "q")], 7):
        assert source.count(old) == 1 or old == new
        variant = types.ModuleType("models")
        exec(source.replace(old, new), vars(variant))
        wrong = pytest.raises(AssertionError) if old != new else contextlib.nullcontext()
        with wrong:
            test_attention_reads_in_pieces_what_it_reads_at_once(variant)
