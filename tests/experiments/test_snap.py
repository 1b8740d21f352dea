"""A drifted state is put back on its permutation, and the automaton inside is the group."""

import json
import re

import numpy as np
import pytest
import torch
from conftest import ROOT
from machine import SwapMachine

from data import Group, ReplTask, generator
from eval import evaluate
from experiments import snap
from experiments.inside import (LinearImage, Untracked, collect_states, load_repl_run,
                                settling_tokens, tracking_heads)
from experiments.snap import (Snapped, compare, extract, find_states, fit_image, main,
                              transitions)
from models import build

HEADS = [(0, 0)]  # of a SwapMachine


@pytest.fixture(scope="module")
def noisy():
    """A hand-built head whose keys are bent, enough to lose the state within some hundred commands,
    and what is fitted to it."""
    torch.manual_seed(0)
    machine = SwapMachine("S3", noise=0.015)
    return machine, machine.task, fit_image(machine, machine.task, HEADS)[0]


def random_image(heads, width):
    """Of no head: the 6 permutations of 3 at random states."""
    perms = Group("S3").elements.repeat(5, 0)
    return LinearImage(heads, torch.randn(30, 1, width, width).double(), perms)


def small_model():
    task = ReplTask(Group("S3"))
    return task, build("linrnn", len(task.vocab), d_model=12, heads=2).double()


# --- Snapping -------------------------------------------------------------------------------------

def test_snapping_restores_exact_tracking_where_the_noisy_head_alone_fails(noisy):
    """In the second half of 300 commands the head alone is often wrong; snapped after every
    command, or every fifth, it never is."""
    machine, task, image = noisy
    alone = evaluate(machine, task, 300, 10, traces=8)
    assert np.mean(alone["by_position"][15:]) < 0.6
    for interval in (1, 5):
        snapped = Snapped(machine, task, image, interval)
        assert evaluate(snapped, task, 300, 10, traces=8)["all"] == 1


def test_the_same_with_26_variables():
    """4e26 states, 1,152 of them in the fit. Noise so large that the head loses its way within 60
    commands. The whole command line is written and read, all 26 letters."""
    torch.manual_seed(0)
    machine = SwapMachine("S26", noise=0.012)
    states, perms = collect_states(machine, machine.task, HEADS, 192, 6, 6, generator(0, "valid"))
    image = LinearImage(HEADS, states, perms)
    assert len(image.sizes) == 25**2
    alone = evaluate(machine, machine.task, 80, 10, traces=4)
    assert np.mean(alone["by_position"][5:]) < 0.6
    assert evaluate(Snapped(machine, machine.task, image), machine.task, 80, 10, 4)["all"] == 1


def test_a_state_that_is_wrong_stays_wrong(noisy):
    """With two values exchanged before the first command, the snapped head is for ever right about
    the third value, and never about these two: snapping makes an error permanent."""
    machine, task, image = noisy
    snapped = Snapped(machine, task, image)
    inputs, targets, reveals, _ = task.training_batch(8, 100, 1, generator(0, "valid"))
    tokens, first = torch.from_numpy(inputs.copy()), len(task.start_tokens())
    state = snapped.stream(tokens[:, :first])[1]
    state[0] = state[0][..., [1, 0, 2]]
    answers = snapped.stream(tokens[:, first:], state)[0].argmax(-1).numpy()
    truth, asked = targets[:, first:], reveals[:, first:]
    assert ((answers == truth) == (truth == task.value_tokens[2]))[asked].all()


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


@pytest.mark.parametrize("commands", ["full", "swap"])
def test_a_snap_replaces_the_tracking_head_alone_and_only_when_a_command_has_settled(commands):
    """Of two heads, both 0, the second is put on the image of a permutation, just after the second
    settled place, and every other one."""
    task, image = ReplTask(Group("S3"), commands), random_image([(1, 1)], 6)
    model = build("linrnn", len(task.vocab), d_model=12, heads=2).double()

    def nothing(x):  # neither keys nor values nor beta: S stays 0
        keys = torch.zeros(len(x), 2, x.shape[1], 1, 6).double()
        return keys[..., 0, :], keys, keys, keys[..., 0]

    model.blocks[1].inputs_of_scan = nothing
    snapped = Snapped(model, task, image, interval=2)
    tokens = torch.from_numpy(task.sample(2, 6, 3, generator(0, "valid"))[0])
    line = len(task.command_tokens(np.arange(3)))
    place = len(task.start_tokens()) + settling_tokens(task) + line  # one command, settled
    place += line if commands == "swap" else 0  # a full trace settles before it begins, too
    state = snapped.stream(tokens[:, :place])[1]
    before, after = state[1], snapped.stream(tokens[:, place:place + 1], state)[1][1]
    assert not before.any() and not after[:, 0].any()
    assert torch.equal(after[:, 1:], image.correct(torch.zeros(2, 1, 6, 6).double()))


# --- The fit --------------------------------------------------------------------------------------

def test_residual_and_margin_are_those_of_the_worst_fresh_state(monkeypatch):
    """Of 256 fresh states, which are no part of the fit, one is far off. residual_at_most is the
    largest and margin the smallest of all states, residual the root of the mean square."""
    machine = SwapMachine("S3")
    perms = Group("S3").draw((80, 16), generator(0, "valid"))
    states = torch.eye(3).double()[perms].unsqueeze(2)
    states[64:] += 0.01 * torch.randn_like(states[64:])
    states[70, 3] += torch.tensor([[0.3, -0.3, 0], [-0.3, 0.3, 0], [0, 0, 0]])
    monkeypatch.setattr(snap, "collect_states", lambda *_, **__: (states, perms))
    image, numbers = fit_image(machine, machine.task, HEADS)
    assert numbers["fitted"] == 64 * 16

    _, residual, margin = image.certify(states[64:])
    rms = residual.square().mean().sqrt().item()
    assert numbers["residual_at_most"] == residual.max().item() > 5 * rms
    assert numbers["residual"] == rms > 1.5 * residual.mean().item()
    assert numbers["margin"] == margin.min().item() < margin.mean().item() / 5


def test_a_head_that_does_not_hold_the_permutation_is_refused():
    """No head; and a state that never repeats, though all answers are permutations."""
    class Wanderer(SwapMachine):
        def stream(self, tokens, state=None):
            logits, state = super().stream(tokens, state and state[:3])
            return logits, [*state, torch.randn_like(state[0])]

    wanderer = Wanderer("S3")
    with pytest.raises(Untracked, match="no head of this model tracks"):
        fit_image(wanderer, wanderer.task, [])
    with pytest.raises(Untracked, match="do not hold the permutation"):
        fit_image(wanderer, wanderer.task, [(3, 0)])
    assert fit_image(wanderer, wanderer.task, HEADS)[1]["margin"] > 100


def test_a_stored_model_gives_the_numbers_of_its_record():
    """The first record is of seed 0 of S5. Its fresh traces are followed without an error."""
    row = snap.recorded()[0]
    folder, = re.findall(r"results/models/\S+", row["command"])
    _, task, model = load_repl_run(ROOT / "experiments" / folder)
    image, numbers = fit_image(model, task, tracking_heads(model, task))
    assert [list(head) for head in numbers["heads"]] == row["tracking"]["heads"]
    for name in ("residual", "margin"):
        assert abs(numbers[name] - row["tracking"][name]) < 1e-3 * row["tracking"][name]
    assert evaluate(Snapped(model, task, image), task, 64, 8, traces=8)["all"] == 1


# --- The automaton inside -------------------------------------------------------------------------

@pytest.mark.parametrize("points, count", [
    # Three clusters, 10.3 apart, of two points each, 5.2 apart, each point twice. The gap below 5.2
    # is the widest, but it parts nothing.
    ([[7.3, 0, 0, 0], [7.3, 0, 0, 5.2], [0, 7.3, 0, 0], [0, 7.3, 0, 5.2], [0, 0, 7.3, 0],
      [0, 0, 7.3, 5.2]] * 2, 3),
    # One cluster alone is no list of states: both others are within 1.5 of the first point.
    ([[0.0], [1.0], [-1.0]], None)])
def test_states_are_parted_by_the_widest_gap_that_parts_anything(points, count, monkeypatch):
    states = torch.tensor(points)[:, None, None, None]
    machine = SwapMachine("S3")
    monkeypatch.setattr(snap, "collect_states", lambda *_: (states, None))
    if count:
        assert len(find_states(machine, machine.task, HEADS)) == count
    else:
        with pytest.raises(Untracked, match="does not fall into clusters: 1 or more"):
            find_states(machine, machine.task, HEADS)


@pytest.mark.parametrize("name, noise", [("S3", 0.015), ("S4", 0.0)])
def test_states_are_found_without_being_counted_and_their_automaton_is_the_group(name, noise):
    """Six states of S3 in a noisy head, 24 of S4 in the exact one. Every transition is right, and a
    command ends closer to its state than to the border."""
    torch.manual_seed(0)
    machine = SwapMachine(name, noise)
    found = extract(machine, machine.task, HEADS)
    order = machine.task.group.order
    assert found["states"] == found["order"] == order
    assert found["agree"] == found["transitions"] == order**2 and found["isomorphic"]
    assert 0.05 < found["reach"] < 0.5 if noise else found["reach"] < 1e-6


def test_the_reach_is_a_share_of_the_way_to_the_border():
    """Five states of Z5, each two of them sqrt 10 apart, with 0.3 added to the first spare slot. A
    command that is not the identity carries the 0.3 to another spare, 0.3 sqrt 2 away."""
    machine = SwapMachine("Z5")
    states = torch.eye(5)[machine.task.group.elements].double()
    states = torch.cat([states, torch.zeros(5, 5, 5).double()], 1).unsqueeze(1)
    states[:, 0, 5, 0] = 0.3
    table, start, reach = transitions(machine, machine.task, HEADS, states)
    assert abs(reach - 0.3 * 2**0.5 / (10**0.5 / 2)) < 1e-10
    assert start == 0 and (table == (np.arange(5)[:, None] + np.arange(5)) % 5).all()


@pytest.mark.parametrize("name, commands", [("D4", "full"), ("S4", "full"), ("S4", "swap")])
def test_a_relabelled_group_is_recognised_and_no_other_automaton(name, commands):
    """The true table with its states shuffled is the group. With one entry changed it is not, nor
    with a clock, which has each element twice, once for even times, and no wrong transition; nor
    is a table that always leads to the start, where all that agrees is one state."""
    task = ReplTask(Group(name), commands)
    group, numbers = task.group, np.arange(task.group.order)
    letters = group.index(task.alphabet)
    shuffle = np.random.default_rng(0).permutation(len(numbers))
    true = group.compose(numbers[:, None], letters)
    table = np.empty_like(true)
    table[shuffle] = shuffle[true]
    start = shuffle[0]
    assert compare(table, start, group, task.alphabet) == (table.size, True)

    wrong = table.copy()
    wrong[start, -1] = wrong[start, 1]
    agree, isomorphic = compare(wrong, start, group, task.alphabet)
    assert agree < table.size and not isomorphic
    wrong = table.copy()
    wrong[shuffle[-1], 0] = wrong[shuffle[-1], 1]
    assert compare(wrong, start, group, task.alphabet) == (table.size - 1, False)
    clock = np.vstack([table + len(table), table])
    assert not compare(clock, start, group, task.alphabet)[1]
    still = np.full_like(table, start)
    assert compare(still, start, group, task.alphabet) == (table.size, False)


# --- The command line -----------------------------------------------------------------------------

NUMBERS = {"residual": 0.1, "residual_at_most": 0.2, "margin": 9.0}


def test_the_snapped_model_is_evaluated_and_recorded(small_run, tmp_path, monkeypatch, capsys):
    """A head of small_run is said to track, with this image. What is recorded is shown."""
    image = random_image([(1, 0)], 4)
    image.average, image.mean, image.B, image.inverse = [
        x.float() for x in (image.average, image.mean, image.B, image.inverse)]
    monkeypatch.setattr("experiments.RESULTS", tmp_path)
    monkeypatch.setattr(snap, "tracking_heads", lambda *_: image.heads)
    monkeypatch.setattr(snap, "fit_image", lambda *_: (image, NUMBERS))
    main([str(small_run), "--lengths", "4:2", "--traces", "4", "--seed", "7", "--interval", "2",
          "--json", "--record"])
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    row, = snap.recorded()
    assert row["command"].startswith(f"python -m experiments.snap {small_run} --lengths 4:2")
    assert row["seed"] == 0 and row["interval"] == 2 and row["tracking"] == NUMBERS

    _, task, model = load_repl_run(small_run)
    assert shown["results"] == row["results"] == [
        evaluate(Snapped(model, task, image, 2), task, 4, 2, 4, seed=7)]
    main([])
    assert "S3 full, seed 0:     put back after    2 commands" in capsys.readouterr().out


def test_a_run_without_an_inside_is_refused_in_one_line(small_run, monkeypatch, refused):
    refused(main, [small_run], "no head of this model tracks", "eval.py")
    monkeypatch.setattr(snap, "tracking_heads", lambda *_: [(1, 0)])
    refused(main, [small_run], "do not hold the permutation", "train longer")
    monkeypatch.setattr(snap, "MOST_STATES", 5)
    monkeypatch.setattr(snap, "fit_image", lambda *_: (random_image([(1, 0)], 4), NUMBERS))
    refused(main, [small_run, "--extract"], "S3 has 6", "Without --extract")
