"""A drifted state is put back on its permutation, and the automaton inside is the group."""

import json
import re

import numpy as np
import pytest
import torch
from machine import SwapMachine

from data import Group, ReplTask, generator
from eval import evaluate
from experiments import snap
from experiments.groups import compose, index
from experiments.inside import LinearImage, collect_states, read_heads, write_heads
from experiments.snap import Snapped, Untracked, compare, extract, find_states, main
from models import LinRNN

HEADS = [(0, 0)]  # of a SwapMachine


def random_image(heads, width, dtype):
    """Of no head: the 6 permutations of 3 at random states."""
    states = torch.randn(30, 1, width, width, dtype=dtype)
    return LinearImage(heads, states, Group("S3").elements.repeat(5, 0))


def test_snapping_restores_exact_tracking_where_the_noisy_head_alone_fails():
    """In the second half of the commands the head alone is often wrong; snapped it never is. S12
    has 479,001,600 states, 1,152 of them in the fit."""
    machine = SwapMachine("S12", 0.02)
    task = machine.task
    states, perms = collect_states(machine, task, HEADS, 192, 6, generator(0, "valid"))
    image = LinearImage(HEADS, states, perms)
    assert len(image.sizes) == 11**2
    alone = evaluate(machine, task, 80, 10, traces=4)
    assert np.mean(alone["by_position"][4:]) < 0.6
    assert evaluate(Snapped(machine, task, image, 4), task, 80, 10, traces=4)["all"] == 1


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
    for ours in (torch.cat(pieces, 1), snapped.stream(tokens)[0]):
        assert (ours - expected).abs().max() < 1e-10
    assert (model.stream(tokens)[0] - expected).abs().max() > 1e-3


def test_states_are_parted_by_the_widest_gap_that_parts_anything(monkeypatch):
    """Three clusters, 10.3 apart, of two points each, 5.2 apart, each point twice. The gap below
    5.2 is the widest, but it parts nothing. One cluster alone is no list of states."""
    machine = SwapMachine("S3")

    def find(points):
        monkeypatch.setattr(snap, "collect_states", lambda *_: (points[:, None, None, None], None))
        return find_states(machine, machine.task, HEADS)

    corners = torch.cat([7.3 * torch.eye(3), torch.zeros(3, 1)], 1)
    assert len(find(torch.cat([corners, corners + torch.tensor([0, 0, 0, 5.2])] * 2))) == 3
    with pytest.raises(Untracked, match="does not fall into 2 to 1,000 clusters"):
        find(torch.tensor([[0.0], [1.0], [-1.0]]))


def test_states_are_found_without_being_counted_and_their_automaton_is_the_group():
    """The 24 states of S4, in a noisy head."""
    machine = SwapMachine("S4", 0.005)
    found = extract(machine, machine.task, HEADS)
    assert found["states"] == 24 and found["isomorphic"]


def test_a_relabelled_group_is_recognised_and_no_other_automaton():
    """The true table with its states shuffled is the group. With one entry changed it is not, nor
    with a clock, which has each element twice, once for even times, and no wrong transition."""
    task = ReplTask(Group("S4"), "swap")
    numbers = np.arange(task.group.order)
    true = compose(task.group, numbers[:, None], index(task.group, task.alphabet))
    shuffle = np.random.default_rng(0).permutation(len(numbers))
    table = np.empty_like(true)
    table[shuffle] = shuffle[true]
    start = shuffle[0]

    def is_group(table):
        return compare(table, start, task.group, task.alphabet)

    assert is_group(table) == (table.size, True)
    wrong = table.copy()
    wrong[shuffle[-1], 0] = wrong[shuffle[-1], 1]
    assert is_group(wrong) == (table.size - 1, False)
    assert not is_group(np.vstack([table + len(table), table]))[1]


def test_the_snapped_model_is_what_the_command_evaluates(small_run, monkeypatch, capsys):
    """A head of small_run is said to track. Interval 0 is the model alone."""
    image = random_image([(1, 0)], 4, torch.float32)
    found = {"heads": image.heads, "directions": 4, "residual": 0.1}
    seen = []

    def look(reader, task, *numbers):
        seen.append((getattr(reader, "interval", None), *numbers))
        return evaluate(reader, task, *numbers)

    monkeypatch.setattr(snap, "tracking_heads", lambda *_: image.heads)
    monkeypatch.setattr(snap, "fit_image", lambda *_: (image, dict(found)))
    monkeypatch.setattr(snap, "evaluate", look)
    for interval in "20":
        main([str(small_run), *"--lengths 4:2 --traces 3 --seed 7 --json --interval".split(),
              interval])
    assert seen == [(2, 4, 2, 3, 7), (None, 4, 2, 3, 7)]
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["results"][0]["reveals"] == 6


def test_a_run_without_an_inside_and_an_option_without_a_run_are_refused(small_run, monkeypatch,
                                                                         refused):
    refused(main, ["--lengths", "64:8"], "DIR")
    refused(main, [small_run], "no head of this model tracks", "eval.py")
    monkeypatch.setattr(snap, "tracking_heads", lambda *_: [(1, 0)])
    refused(main, [small_run], "do not hold the permutation", "train longer")
