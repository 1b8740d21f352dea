"""A drifted state is put back on its permutation, and the automaton inside is the group."""

import json
import re

import numpy as np
import pytest
import torch
from machine import SwapMachine

from data import Group, ReplTask, generator
from eval import evaluate
from experiments import inside, snap
from experiments.groups import compose, index
from experiments.inside import LinearImage, read_heads, write_heads
from experiments.snap import Snapped, compare, extract, find_states, fit_image, main
from models import LinRNN

HEADS = [(0, 0)]  # of a SwapMachine


def random_image(heads, width, dtype):
    """Of no head: the 6 permutations of 3 at random states."""
    states = torch.randn(30, 1, width, width, dtype=dtype)
    return LinearImage(heads, states, Group("S3").elements.repeat(5, 0))


def test_snapping_restores_exact_tracking_where_the_noisy_head_alone_fails():
    """In the second half of the commands the head alone is often wrong; snapped it never is. S12
    has 479,001,600 states, 1,024 of them in the fit."""
    machine = SwapMachine("S12", 0.02)
    task = machine.task
    image, found = fit_image(machine, task, HEADS)
    assert found["directions"] == 11**2
    alone = evaluate(machine, task, 80, 10, traces=4)
    assert np.mean(alone["by_position"][4:]) < 0.6
    assert evaluate(Snapped(machine, task, image, 4), task, 80, 10, traces=4)["all"] == 1


def states_of(perms, noise=0.0):
    """States of one head that are always the same random linear map of permutations, and noise."""
    P = torch.eye(3).double()[perms]
    B = torch.from_numpy(np.random.default_rng(1).normal(size=(9, 4, 5)))
    S = torch.tensordot(P.flatten(-2), B, 1)
    return (S + noise * torch.randn_like(S)).unsqueeze(2)


def test_an_image_is_judged_by_states_that_it_was_not_fitted_to(monkeypatch):
    """The last 16 traces are fresh. The residual is the share of their spread that the image
    leaves, here that of their noise; if their permutations are others, the image is refused."""
    task = ReplTask(Group("S3"))
    perms = task.group.draw((80, 16), np.random.default_rng(0))

    def judged(noise, of_fresh):
        states = torch.cat([states_of(perms[:64]), states_of(of_fresh, noise)])
        monkeypatch.setattr(inside, "collect_states", lambda *_: (states, perms))
        return fit_image(None, task, HEADS)[1]["residual"], states[64:]

    monkeypatch.setattr("experiments.inside.SHORTEST", 1e-6)
    assert judged(0, perms[64:])[0] < 1e-10
    residual, fresh = judged(0.02, perms[64:])
    noise = (fresh - states_of(perms[64:])).norm() / (fresh - fresh.mean((0, 1))).norm()
    assert residual == pytest.approx(noise.item(), rel=0.02)

    # Rotations alone do not tell what a reflection looks like.
    turns = perms.copy()
    turns[:64] = Group("Z3").draw((64, 16), np.random.default_rng(0))
    monkeypatch.setattr(inside, "collect_states", lambda *_: (states_of(turns), turns))
    with pytest.raises(snap.Untracked, match="read"):
        fit_image(None, task, HEADS)

    others = perms[64:].copy()
    others[0, :12] = np.roll(others[0, :12], 1, -1)  # 4.7% of 256
    judged(0, others)
    others[1, 0] = np.roll(others[1, 0], 1)  # 5.1%
    with pytest.raises(snap.Untracked, match="95% read"):
        judged(0, others)


@pytest.mark.parametrize("kind, place", [("full", r", \w = $"), ("swap", r", \w\n$")])
def test_a_snapped_stream_is_that_of_the_model_put_back_where_it_is_due(kind, place):
    """Token by token, trace by trace, the model's own stream, put back at each second place where a
    command has settled. Traces side by side have other places, and ragged pieces do not matter."""
    task = ReplTask(Group("S3"), kind)
    model = LinRNN(len(task.vocab), d_model=12, heads=2).double()
    image = random_image([(1, 0)], 6, torch.float64)
    traces = [task.test_batch(1, 12, spacing, generator(0, "valid")).inputs for spacing in (1, 4)]
    tokens = torch.from_numpy(np.vstack([trace[:, :110] for trace in traces]))

    expected = []
    for row in tokens:
        text, places, state = "", 0, None
        for token in row:
            if re.search(place, text):
                places += 1
                if places % 2 == 0:
                    put_back = image.correct(read_heads(state, image.heads))
                    state = write_heads(state, image.heads, put_back)
            logits, state = model.stream(token.view(1, 1), state)
            expected.append(logits[0, 0])
            text += task.vocab[token]
    expected = torch.stack(expected).unflatten(0, tokens.shape)

    snapped, state, pieces = Snapped(model, task, image, 2), None, []
    for piece in tokens.tensor_split([1, 2, 5, 6, 7, 9, 20, 21, 90], 1):
        logits, state = snapped.stream(piece, state)
        pieces.append(logits)
    assert (torch.cat(pieces, 1) - expected).abs().max() < 1e-10


def test_states_are_parted_by_the_widest_gap_that_parts_anything(monkeypatch):
    """Three clusters, 10.3 apart, of two points each, 5.2 apart, each point twice. The gap below
    5.2 is the widest, but it parts nothing."""
    corners = torch.cat([7.3 * torch.eye(3), torch.zeros(3, 1)], 1)
    points = torch.cat([corners, corners + torch.tensor([0, 0, 0, 5.2])] * 2)
    monkeypatch.setattr(snap, "collect_states", lambda *_: (points[:, None, None, None], None))
    assert len(find_states(None, None, HEADS)) == 3


def test_states_are_found_without_being_counted_and_their_automaton_is_the_group():
    """The 24 states of S4, in a noisy head."""
    machine = SwapMachine("S4", 0.005)
    found = extract(machine, machine.task, HEADS)
    assert found["states"] == 24 and found["isomorphic"]


def test_a_relabelled_group_is_recognised_and_no_other_automaton():
    """The true table with its states shuffled is the group. With one entry changed it is not, nor
    is an automaton that never moves: no transition of its only state in use is wrong."""
    task = ReplTask(Group("S4"), "swap")
    numbers = np.arange(task.group.order)
    true = compose(task.group, numbers[:, None], index(task.group, task.alphabet))
    shuffle = np.random.default_rng(0).permutation(len(numbers))
    table = np.empty_like(true)
    table[shuffle] = shuffle[true]
    rest = shuffle[0], task.group, task.alphabet

    assert compare(table, *rest) == (table.size, True)
    wrong = table.copy()
    wrong[shuffle[-1], 0] = wrong[shuffle[-1], 1]
    assert compare(wrong, *rest) == (table.size - 1, False)
    assert not compare(np.full_like(table, shuffle[0]), *rest)[1]


def test_a_run_is_put_back_and_one_that_does_not_track_is_refused(small_run, monkeypatch, capsys,
                                                                 refused):
    """A head of small_run is then said to track, and its image to fit."""
    refused(main, [small_run], "no head of this model tracks", "eval.py")
    monkeypatch.setattr(snap, "tracking_heads", lambda *_: [(1, 0)])
    refused(main, [small_run], "do not hold the permutation", "train longer")

    image = random_image([(1, 0)], 4, torch.float32)
    found = {"heads": image.heads, "directions": 4, "residual": 0.1}
    monkeypatch.setattr(snap, "fit_image", lambda *_: (image, found))
    monkeypatch.setattr(snap, "evaluate_and_print", lambda reader, task, *rest:
                        [reader.interval, *rest])
    main([str(small_run), *"--lengths 4:2 --traces 3 --seed 7 --json --interval 2".split()])
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["results"] == [2, [[4, 2]], 3, 7]
