"""A drifted state is put back on its permutation, and the automaton inside is the group."""

import json
import re

import numpy as np
import pytest
import torch
from machine import SwapMachine

from data import Group, ReplTask, WordTask, draw_commands, generator
from eval import evaluate
from experiments import snap
from experiments.inside import (LinearImage, collect_states, load_repl_run, read_heads,
                                write_heads)
from experiments.snap import (Snapped, Untracked, compare, extract, find_states, fit_image, main,
                              resting_heads)
from models import build

HEADS = [(0, 0)]  # of a SwapMachine


def random_image(heads, width, dtype):
    """Of no head: the 6 permutations of 3 at random states."""
    states = torch.randn(30, 1, width, width, dtype=dtype)
    return LinearImage(heads, states, Group("S3").elements.repeat(5, 0))


# --- Snapping -------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, noise, length, interval", [("S5", 0.015, 200, 5),
                                                           ("S26", 0.012, 80, 1)])
def test_snapping_restores_exact_tracking_where_the_noisy_head_alone_fails(
        name, noise, length, interval):
    """In the second half of the commands the head alone is often wrong; snapped it never is. S26
    has 4e26 states, 1,152 of them in the fit."""
    machine = SwapMachine(name, noise)
    task = machine.task
    states, perms = collect_states(machine, task, HEADS, 192, 6, generator(0, "valid"))
    image = LinearImage(HEADS, states, perms)
    assert len(image.sizes) == (task.group.degree - 1)**2
    alone = evaluate(machine, task, length, 10, traces=4)
    assert np.mean(alone["by_position"][length // 20:]) < 0.6
    snapped = Snapped(machine, task, image, interval)
    assert evaluate(snapped, task, length, 10, traces=4)["all"] == 1


PLACES = {"full": r", \w = $", "swap": r", \w\n$", "word": r"."}  # of what was read, settled


@pytest.mark.parametrize("kind", PLACES)
def test_a_snapped_stream_is_that_of_the_model_put_back_where_it_is_due(kind):
    """Token by token, trace by trace, the model's own stream, put back at each second place where a
    command has settled; of words the other head rests. Traces side by side have other places, and
    ragged pieces do not matter."""
    task = WordTask(Group("S3")) if kind == "word" else ReplTask(Group("S3"), kind)
    model = build("linrnn", len(task.vocab), d_model=12, heads=2).double()
    image = random_image([(1, 0)], 6, torch.float64)
    rest = ([(1, 1)], torch.randn(1, 6, 6).double()) if kind == "word" else None
    tokens = torch.from_numpy(np.vstack([
        task.test_batch(1, 12, spacing, generator(0, "valid")).inputs[:, :110]
        for spacing in (1, 4)]))

    expected = []
    for row in tokens:
        text, places, state = "", 0, None
        for token in row:
            if re.search(PLACES[kind], text):
                places += 1
                if places % 2 == 0:
                    put_back = image.correct(read_heads(state, image.heads))
                    state = write_heads(state, image.heads, put_back)
                    state = write_heads(state, rest[0], rest[1][None]) if rest else state
            logits, state = model.stream(token.view(1, 1), state)
            expected.append(logits[0, 0])
            text += task.vocab[token]
    expected = torch.stack(expected).unflatten(0, tokens.shape)

    snapped, state, pieces = Snapped(model, task, image, 2, rest), None, []
    for piece in tokens.tensor_split([1, 2, 5, 6, 7, 9, 20, 21, 90], 1):
        if piece.numel():
            logits, state = snapped.stream(piece, state)
            pieces.append(logits)
    for ours in (torch.cat(pieces, 1), snapped.stream(tokens)[0]):
        assert (ours - expected).abs().max() < 1e-10
    assert (model.stream(tokens)[0] - expected).abs().max() > 1e-3


def test_of_words_the_sign_belongs_to_the_image_and_a_head_without_a_permutation_does_not(
        monkeypatch):
    """Head 0 holds P, head 1 the sign, a little bent; head 2, said to track, holds noise."""
    rng = generator(0, "valid")
    perms = Group("S4").draw((80, 16), rng)
    P = np.eye(4)[perms]
    held = np.stack([P, np.zeros_like(P), 30 * rng.standard_normal(P.shape)], 2)
    held[:, :, 1, 0, 0] = np.linalg.det(P)
    held[:, :, :2] += 0.01 * rng.standard_normal(held[:, :, :2].shape)
    held = torch.from_numpy(held)
    monkeypatch.setattr(snap, "collect_states", lambda *_: (held, perms))
    image, _ = fit_image(None, WordTask(Group("S4")), [(0, 0), (0, 1), (0, 2)])
    assert image.heads == [(0, 0), (0, 1)] and len(image.sizes) == 9 + 1
    assert (image.correct(held[:, :, :2])[:, :, 0] - torch.from_numpy(P)).abs().max() < 0.01
    assert (image.correct(held[:, :, :2])[:, :, 1] - held[:, :, 1]).abs().max() < 0.1


def test_the_other_heads_rest_at_the_mean_of_what_they_hold():
    task = WordTask(Group("S3"))
    model = build("linrnn", 6, d_model=12, heads=3, conv_width=1).double()
    heads, S = resting_heads(model, task, [(0, 1)])
    assert heads == [(0, 0), (0, 2)] and S.shape == (2, 4, 4)
    commands = draw_commands(task.group, "full", (64, 17), generator(0, "valid", 16))
    tokens, state, held = torch.from_numpy(task.group.index(commands)), None, []
    for t in range(16):
        _, state = model.stream(tokens[:, t:t + 1], state)
        held.append(state[0][:, [0, 2]])
    assert (S - torch.stack(held).mean((0, 1))).abs().max() < 1e-12


# --- The automaton inside -------------------------------------------------------------------------

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
    true = task.group.compose(numbers[:, None], task.group.index(task.alphabet))
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


# --- The command line -----------------------------------------------------------------------------

def test_the_snapped_model_is_what_the_command_evaluates(small_run, monkeypatch, capsys):
    """A head of small_run is said to track, with this image."""
    image = random_image([(1, 0)], 4, torch.float32)
    monkeypatch.setattr(snap, "tracking_heads", lambda *_: image.heads)
    monkeypatch.setattr(snap, "fit_image", lambda *_: (image, {"residual": 0.1}))
    main([str(small_run), "--lengths", "4:2", "--traces", "4", "--seed", "7", "--interval", "2",
          "--json"])
    row = json.loads(capsys.readouterr().out.splitlines()[-1])

    _, task, model = load_repl_run(small_run)
    assert row["results"] == [evaluate(Snapped(model, task, image, 2), task, 4, 2, 4, seed=7)]


def test_a_run_without_an_inside_is_refused_in_one_line(small_run, monkeypatch, refused):
    refused(main, [small_run], "no head of this model tracks", "eval.py")
    monkeypatch.setattr(snap, "tracking_heads", lambda *_: [(1, 0)])
    refused(main, [small_run], "do not hold the permutation", "train longer")
