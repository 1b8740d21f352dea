"""Laws that the exercises need and no other file has; and two functions that students write."""

import inspect
import random
import types

import models
import numpy as np
import pytest
import torch
from test_scan import by_matrices, difference, inputs

import data
import scan
from data import Group
from experiments import groups


def test_numbers_compose_as_their_permutations_do():
    """On A4xZ5, 60 elements on 20 points, in shapes that broadcast: first g, then h, run as two
    commands. Most pairs do not commute."""
    group = groups.product(Group("A4"), Group("Z5"))
    g, h = np.arange(60)[:, None], np.arange(60)
    pairs = np.stack(np.broadcast_arrays(g, h), -1).reshape(-1, 2)
    last = data.run_commands(group.elements[pairs])[:, 1]
    assert (group.elements[groups.compose(group, g, h).ravel()] == last).all()
    assert groups.compose(group, 7, 11) == groups.compose(group, g, h)[7, 11]


@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_the_loop_alone_is_the_definition(lead):
    """Explicit matrices. The inputs are left as they are: autograd would refuse to write into
    them."""
    *arguments, state = inputs(T=7, lead=lead)
    assert difference(scan.delta_rule_recurrent(*arguments, state),
                      by_matrices(*arguments, state)) < 1e-10
    assert difference(scan.delta_rule_recurrent(*arguments),
                      by_matrices(*arguments, torch.zeros_like(state))) < 1e-10


def test_gradcheck_agrees_with_the_backward_by_hand():
    """Finite differences of chunked_forward share nothing with (9) to (16)."""
    *arguments, state = inputs(T=9, lead=(2,), K=3, V=2)
    chunks = [scan.in_chunks(x, 4).detach().requires_grad_()
              for x in (*arguments[:3], arguments[3].unsqueeze(-1))]
    assert torch.autograd.gradcheck(scan.ChunkedDeltaRule.apply, [*chunks, state])


# --- No product of steps with beta <= 1 exchanges two values --------------------------------------
#
# Why. A step has the determinant 1 - beta >= 0, and so has a product of steps. An exchange X has
# -1. If |A - X| < 1, then A = X (I + E) with |E| < 1, and the determinant of A is negative, too. So
# no product comes nearer to an exchange than 1, however many steps it has.

def nearest_to_an_exchange(steps, beta_max):
    """Search for the steps I - beta k k^T whose product is nearest to an exchange.

    Of the first two of three slots: X = [[0, 1, 0], [1, 0, 0], [0, 0, 1]]. The distance of a
    product A_m ... A_1 is |A_m ... A_1 - X|, the root of the sum of squares.
    Returns: keys [steps, 3] of length 1, betas [steps] in [0, beta_max], float64.
    """
    torch.manual_seed(0)
    starts = 30
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
    """|A_m ... A_1 - X|: keys [..., steps, 3], betas [..., steps] -> [...]."""
    product = torch.eye(3).double()
    for key, beta in zip(keys.unbind(-2), betas.unbind(-1)):
        stored = key.unsqueeze(-2) @ product
        product = product - beta[..., None, None] * key.unsqueeze(-1) * stored
    return (product - torch.eye(3)[[1, 0, 2]]).norm(dim=(-2, -1))


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_no_product_of_steps_with_beta_up_to_one_comes_nearer_to_an_exchange_than_one(steps):
    """With beta up to 2 the search finds an exchange. With beta up to 1 it ends at distance 1."""
    found = {}
    for beta_max in (1, 2):
        keys, betas = nearest_to_an_exchange(steps, beta_max)
        assert keys.shape == (steps, 3) and (keys.norm(dim=-1) - 1).abs().max() < 1e-9
        assert betas.min() >= 0 and betas.max() <= beta_max
        found[beta_max] = distance(keys.double(), betas.double()).item()
    assert 1 - 1e-9 < found[1] < 1.01 and found[2] < 0.01


# --- A test of one's own --------------------------------------------------------------------------

def test_attention_reads_in_pieces_what_it_reads_at_once(models=models):
    """The output of an attention block depends on the tokens, not on how they are cut into pieces.

    models: the module under test.
    """
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
    """In a random order, the right one twice."""
    cases = [*WRONG, ("q", "q"), ("q", "q")]
    random.shuffle(cases)
    source = inspect.getsource(models)
    for old, new in cases:
        assert source.count(old) == 1 or old == new
        variant = types.ModuleType("models")
        exec(source.replace(old, new), vars(variant))
        try:
            test_attention_reads_in_pieces_what_it_reads_at_once(variant)
            passed = True
        except AssertionError:
            passed = False
        assert passed == (old == new), f"{old} -> {new}"
