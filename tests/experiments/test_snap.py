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
from experiments.inside import LinearImage, collect_states, load_repl_run
from experiments.snap import (Snapped, Untracked, compare, extract, find_states, main,
                              resting_heads)
from models import build

HEADS = [(0, 0)]  # of a SwapMachine


def bent_machine(name, noise):
    """A hand-built head whose keys are bent, and what is fitted to it."""
    machine = SwapMachine(name, noise)
    states, perms = collect_states(machine, machine.task, HEADS, 192, 6, generator(0, "valid"))
    return machine, machine.task, LinearImage(HEADS, states, perms)


def random_image(heads, width):
    """Of no head: the 6 permutations of 3 at random states."""
    perms = Group("S3").elements.repeat(5, 0)
    return LinearImage(heads, torch.randn(30, 1, width, width).double(), perms)


def small_model():
    task = ReplTask(Group("S3"))
    return task, build("linrnn", len(task.vocab), d_model=12, heads=2).double()


# --- Snapping -------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, noise, length, intervals", [("S5", 0.015, 200, [1, 5]),
                                                            ("S26", 0.012, 80, [1])])
def test_snapping_restores_exact_tracking_where_the_noisy_head_alone_fails(
        name, noise, length, intervals):
    """In the second half of the commands the head alone is often wrong; snapped it never is. S26
    has 4e26 states, 1,152 of them in the fit."""
    machine, task, image = bent_machine(name, noise)
    assert len(image.sizes) == (task.group.degree - 1)**2
    alone = evaluate(machine, task, length, 10, traces=4)
    assert np.mean(alone["by_position"][length // 20:]) < 0.6
    for interval in intervals:
        snapped = Snapped(machine, task, image, interval)
        assert evaluate(snapped, task, length, 10, traces=4)["all"] == 1


def test_no_snap_is_bit_identical_and_pieces_do_not_matter():
    """Without a snap due, every bit of the model's own stream; with snaps, the same in ragged
    pieces as whole."""
    task, model = small_model()
    tokens = torch.from_numpy(task.sample(4, 12, 3, generator(0, "valid"))[0])
    image = random_image([(1, 1)], 6)
    never = Snapped(model, task, image, interval=1000)
    with torch.no_grad():
        assert (never.stream(tokens)[0] == model.stream(tokens)[0]).all()

    snapped, state, pieces = Snapped(model, task, image, interval=2), None, []
    for piece in tokens.tensor_split([1, 2, 20, 21, 22, 23, 90], 1):
        logits, state = snapped.stream(piece, state)
        pieces.append(logits)
    whole = snapped.stream(tokens)[0]
    assert (torch.cat(pieces, 1) - whole).abs().max() < 1e-10
    assert (whole - never.stream(tokens)[0]).abs().max() > 1e-3


def test_traces_side_by_side_are_snapped_each_at_its_own_places():
    """Two traces with reveals at other places, streamed together and one by one."""
    task, model = small_model()
    snapped = Snapped(model, task, random_image([(1, 0)], 6), interval=2)
    tokens = torch.from_numpy(np.vstack([
        task.sample(1, 12, spacing, generator(0, "valid"))[0][:, :120] for spacing in (1, 4)]))
    alone = torch.cat([snapped.stream(row)[0] for row in tokens.split(1)])
    assert (snapped.stream(tokens)[0] - alone).abs().max() < 1e-10


@pytest.mark.parametrize("commands, mark", [("full", " = "), ("swap", "\n")])
def test_a_snap_comes_when_a_command_has_settled_and_at_no_other_place(commands, mark):
    """The pieces in which a snapped model reads end with the mark, each after one command more. The
    first piece of a full trace ends ahead of the first command."""
    task, pieces = ReplTask(Group("S3"), commands), []

    class Listener(torch.nn.Module):
        def stream(self, tokens, state=None):
            pieces.append(task.decode(tokens[0]))
            return torch.zeros(*tokens.shape, 1), [torch.zeros(1, 1, 6, 6).double()]

    tokens = torch.from_numpy(task.sample(1, 6, 3, generator(0, "valid"))[0])
    Snapped(Listener(), task, random_image(HEADS, 6)).stream(tokens)
    for count in range(1, len(pieces)):
        read = "".join(pieces[:count])
        done = re.findall(r", . = .*\n", read)
        assert read.endswith(mark) and len(done) == count - (commands == "full")
    assert len(pieces) == 7


def test_of_words_the_state_is_put_back_ahead_of_each_but_the_first():
    """The tracking head gets the image of its nearest permutation, and the other head its rest, in
    the traces and at the words that are due."""
    given = []

    class Listener(torch.nn.Module):
        def stream(self, tokens, state=None):
            given.append((tokens.shape[1], state))
            held = torch.randn(2, 2, 6, 6).double()
            made.append(held)
            return torch.zeros(*tokens.shape, 1), [held]

    made, image, resting = [], random_image(HEADS, 6), torch.randn(1, 6, 6).double()
    snapped = Snapped(Listener(), WordTask(Group("S3")), image, 2, ([(0, 1)], resting))
    _, state = snapped.stream(torch.zeros(2, 4, dtype=torch.long))
    snapped.stream(torch.zeros(2, 2, dtype=torch.long), state)

    assert [length for length, _ in given] == [2, 2, 2]  # due ahead of the words 3 and 5
    assert given[0][1] is None
    for held, (_, state) in zip(made, given[1:]):
        assert torch.equal(state[0][:, :1], image.correct(held[:, :1]))
        assert torch.equal(state[0][:, 1:], resting.expand(2, 1, 6, 6))


def test_the_other_heads_rest_at_the_mean_of_what_they_hold():
    """Of a model on words, whose head 1 is said to track."""
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
    assert resting_heads(model, task, [(0, 0), (0, 1), (0, 2)]) is None


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


@pytest.mark.parametrize("name, noise", [("S3", 0.015), ("S4", 0.0)])
def test_states_are_found_without_being_counted_and_their_automaton_is_the_group(name, noise):
    """Six states of S3 in a noisy head, 24 of S4 in the exact one."""
    machine = SwapMachine(name, noise)
    found = extract(machine, machine.task, HEADS)
    order = machine.task.group.order
    assert found["states"] == found["order"] == order
    assert found["agree"] == found["transitions"] == order**2 and found["isomorphic"]


@pytest.mark.parametrize("name, commands", [("D4", "full"), ("S4", "swap")])
def test_a_relabelled_group_is_recognised_and_no_other_automaton(name, commands):
    """The true table with its states shuffled is the group. With one entry changed it is not, nor
    with a clock, which has each element twice, once for even times, and no wrong transition."""
    task = ReplTask(Group(name), commands)
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
    image = random_image([(1, 0)], 4)
    image.average, image.mean, image.B, image.inverse = [
        x.float() for x in (image.average, image.mean, image.B, image.inverse)]
    monkeypatch.setattr(snap, "tracking_heads", lambda *_: image.heads)
    monkeypatch.setattr(snap, "fit_image", lambda *_: (image, {"residual": 0.1}))
    main([str(small_run), "--lengths", "4:2", "--traces", "4", "--seed", "7", "--interval", "2",
          "--json"])
    row = json.loads(capsys.readouterr().out.splitlines()[-1])

    _, task, model = load_repl_run(small_run)
    assert row["results"] == [evaluate(Snapped(model, task, image, 2), task, 4, 2, 4, seed=7)]
    assert row["interval"] == 2 and row["tracking"] == {"residual": 0.1}


def test_a_run_without_an_inside_is_refused_in_one_line(small_run, monkeypatch, refused):
    refused(main, [small_run], "no head of this model tracks", "eval.py")
    monkeypatch.setattr(snap, "tracking_heads", lambda *_: [(1, 0)])
    refused(main, [small_run], "do not hold the permutation", "train longer")
