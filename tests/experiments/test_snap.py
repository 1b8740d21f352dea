"""The states of a head are found without labels; put back on them, it does not get lost."""

import json

import numpy as np
import pytest
import torch
from machine import SwapMachine

from data import Group, ReplTask, generator
from eval import evaluate
from experiments.heads import drift, settling_tokens
from experiments.snap import (NoClusters, Snapped, extract, extract_and_print, find_states, main,
                              relabel)
from models import build

HEADS = [(0, 0)]  # of a SwapMachine


@pytest.fixture(scope="module")
def noisy():
    """A hand-built head whose keys are bent, enough to lose the state within some hundred commands,
    and the states found in it."""
    torch.manual_seed(0)
    machine = SwapMachine("S3", noise=0.015)
    return machine, machine.task, find_states(machine, machine.task, HEADS)


# --- Finding states -------------------------------------------------------------------------------

def test_equal_states_are_no_gap(monkeypatch):
    """Three clusters, 10.3 apart, of two points each, 5.2 apart: the gap below 5.2, where the same
    point occurs twice, is the widest, but it parts nothing."""
    points = torch.eye(4).repeat_interleave(4, 0)[:12] * 7.3
    points[1::2, 3] = 5.2
    states = points.view(12, 1, 1, 1, 4)
    monkeypatch.setattr("experiments.snap.collect_states", lambda *_: (states, None))
    assert len(find_states(None, None, None)) == 3


def test_one_cluster_alone_is_no_list_of_states(monkeypatch):
    """-1, 0, 1: both others within the radius of 1.5 around the first point."""
    states = torch.tensor([0.0, 1.0, -1.0]).view(3, 1, 1, 1, 1)
    monkeypatch.setattr("experiments.snap.collect_states", lambda *_: (states, None))
    with pytest.raises(NoClusters, match="does not fall into clusters: 1 after"):
        find_states(None, None, None)


def test_states_without_clusters_are_refused():
    """Steps that never repeat: every batch brings new states."""
    class Wanderer(SwapMachine):
        def execute(self, commands, S):
            return S + torch.randn_like(S)

    machine = Wanderer("S3")
    with pytest.raises(NoClusters, match="fall into clusters"):
        find_states(machine, machine.task, HEADS)


# --- Snapping -------------------------------------------------------------------------------------

def test_snapping_restores_exact_tracking_where_the_noisy_head_alone_fails(noisy):
    """In the second half of 300 commands the head alone is often wrong; snapped after every
    command, or every fifth, it never is."""
    machine, task, states = noisy
    alone = evaluate(machine, task, 300, 10, traces=8)
    assert np.mean(alone["by_position"][15:]) < 0.6
    for interval in (1, 5):
        snapped = Snapped(machine, task, HEADS, states, interval)
        assert evaluate(snapped, task, 300, 10, traces=8)["all"] == 1


def test_a_state_that_is_wrong_stays_wrong(noisy):
    """With two values exchanged before the first command, the snapped head is for ever right about
    the third value, and never about these two: snapping makes an error permanent."""
    machine, task, states = noisy
    snapped = Snapped(machine, task, HEADS, states)
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
    task = ReplTask(Group("S3"))
    model = build("linrnn", len(task.vocab), d_model=12, heads=2).double()
    tokens = torch.from_numpy(task.sample(4, 12, 3, generator(0, "valid"))[0])
    states = torch.randn(6, 1, 6, 6).double()
    never = Snapped(model, task, [(1, 1)], states, interval=1000)
    with torch.no_grad():
        assert (never.stream(tokens)[0] == model.stream(tokens)[0]).all()
    snapped, state, pieces = Snapped(model, task, [(1, 1)], states, interval=2), None, []
    for piece in tokens.tensor_split([1, 2, 20, 21, 22, 23, 90], 1):
        logits, state = snapped.stream(piece, state)
        pieces.append(logits)
    whole = snapped.stream(tokens)[0]
    assert (torch.cat(pieces, 1) - whole).abs().max() < 1e-10
    assert (whole - never.stream(tokens)[0]).abs().max() > 1e-3


def test_traces_side_by_side_are_snapped_each_at_its_own_places():
    """Two traces with reveals at other places, streamed together and one by one."""
    task = ReplTask(Group("S3"))
    model = build("linrnn", len(task.vocab), d_model=12, heads=2).double()
    snapped = Snapped(model, task, [(1, 0)], torch.randn(6, 1, 6, 6).double(), interval=2)
    tokens = torch.from_numpy(np.vstack([
        task.sample(1, 12, spacing, generator(0, "valid"))[0][:, :120] for spacing in (1, 4)]))
    alone = torch.cat([snapped.stream(row)[0] for row in tokens.split(1)])
    assert (snapped.stream(tokens)[0] - alone).abs().max() < 1e-10


@pytest.mark.parametrize("commands", ["full", "swap"])
def test_a_snap_replaces_the_tracking_head_alone_and_only_when_a_command_has_settled(commands):
    """Of two heads, both 0, the second is put on the only state there is, just after the second
    settled place, and every other one."""
    task = ReplTask(Group("S3"), commands)
    model = build("linrnn", len(task.vocab), d_model=12, heads=2)

    def nothing(x):  # neither keys nor values nor beta: S stays 0
        keys = torch.zeros(len(x), 2, x.shape[1], 1, 6)
        return keys[..., 0, :], keys, keys, keys[..., 0]

    model.blocks[1].inputs_of_scan = nothing
    snapped = Snapped(model, task, [(1, 1)], torch.ones(1, 1, 6, 6), interval=2)
    tokens = torch.from_numpy(task.sample(2, 6, 3, generator(0, "valid"))[0])
    line = len(task.command_tokens(np.arange(3)))
    place = len(task.start_tokens()) + settling_tokens(task) + line  # one command, settled
    place += line if commands == "swap" else 0  # a full trace settles before it begins, too
    state = snapped.stream(tokens[:, :place])[1]
    before, after = state[1], snapped.stream(tokens[:, place:place + 1], state)[1][1]
    assert not before.any() and not after[:, 0].any() and (after[:, 1] == 1).all()


# --- The automaton --------------------------------------------------------------------------------

def test_states_are_found_without_being_counted_and_their_automaton_is_the_group(noisy):
    """Six states of S3 in the noisy head, 24 of S4 in the exact one: every transition is right, and
    a command ends closer to its state than to the border."""
    exact = SwapMachine("S4")
    for machine in (noisy[0], exact):
        group, alphabet = machine.task.group, machine.task.alphabet
        states = find_states(machine, machine.task, HEADS)
        table, start, reach = extract(machine, machine.task, HEADS, states)
        labels, agree = relabel(table, start, group, alphabet)
        assert sorted(labels) == list(range(group.order)) and agree == table.size
        assert reach < 1e-6 if machine is exact else 0.05 < reach < 0.5


def test_the_reach_is_a_share_of_the_way_to_the_border():
    """Five states of Z5, each two of them sqrt 10 apart, with 0.3 added to the first spare slot. A
    command that is not the identity carries the 0.3 to another spare, 0.3 sqrt 2 away."""
    machine = SwapMachine("Z5")
    states = torch.eye(5)[machine.task.group.elements].double()
    states = torch.cat([states, torch.zeros(5, 5, 5).double()], 1).unsqueeze(1)
    states[:, 0, 5, 0] = 0.3
    table, _, reach = extract(machine, machine.task, HEADS, states)
    assert abs(reach - 0.3 * 2**0.5 / (10**0.5 / 2)) < 1e-10
    assert (table == (np.arange(5)[:, None] + np.arange(5)) % 5).all()


@pytest.mark.parametrize("name, commands", [("D4", "full"), ("S4", "swap")])
def test_a_word_leads_to_its_product(name, commands):
    """A true table is relabelled by the group's own numbers, also where the start reaches most
    states in several commands only."""
    task = ReplTask(Group(name), commands)
    group, numbers = task.group, np.arange(task.group.order)
    letters = group.index(task.alphabet)
    labels, agree = relabel(group.compose(numbers[:, None], letters), 0, group, task.alphabet)
    assert (labels == numbers).all() and agree == group.order * len(letters)


def test_a_relabelled_group_is_recognised_and_one_wrong_transition_is_counted():
    """The table of S4 with its states shuffled; then with one entry changed."""
    group = Group("S4")
    letters, shuffle = np.arange(24), np.random.default_rng(0).permutation(24)
    table = np.empty((24, 24), int)
    table[shuffle] = shuffle[group.compose(letters[:, None], letters)]
    labels, agree = relabel(table, shuffle[0], group, group.elements)
    assert (labels[shuffle] == letters).all() and agree == table.size
    table[shuffle[7], 5] = shuffle[3]
    assert relabel(table, shuffle[0], group, group.elements)[1] == table.size - 1


def test_what_is_not_the_group_is_not_called_isomorphic(noisy, monkeypatch):
    """All elements once, but one transition of 36 wrong; and a group with a clock, which has each
    element twice, once for even times, though all its transitions are right."""
    machine, task, states = noisy
    monkeypatch.setattr("experiments.snap.drift", lambda *_: [])
    numbers = np.arange(6)
    table = task.group.compose(numbers[:, None], numbers)
    clock = np.vstack([table + 6, table])
    wrong = table.copy()
    wrong[5, 0] = wrong[5, 1]
    for table, agree, exact in [(table, 36, True), (wrong, 35, False), (clock, 72, False)]:
        monkeypatch.setattr("experiments.snap.extract", lambda *_: (table, 0, 0.1))
        found = extract_and_print(machine, task, HEADS, states)
        assert found["agree"] == agree and found["isomorphic"] == exact


def test_the_drift_grows_alone_and_stays_when_snapped(noisy, monkeypatch, capsys):
    """Spread within a state: alone larger after 48 commands than after 16; snapped the same within
    a tenth, and small. The printed verdict is that of the table."""
    machine, task, states = noisy
    monkeypatch.setattr("experiments.snap.drift", lambda *args: drift(*args, ends=(16, 48)))
    numbers = extract_and_print(machine, task, HEADS, states)
    (_, early, _), (end, late, between) = numbers["drift"]["alone"]
    (_, first, _), (_, last, apart) = numbers["drift"]["snapped"]
    assert end == 48 and late > 1.5 * early and abs(last / first - 1) < 0.1
    assert last < early and apart > between
    assert numbers["isomorphic"] and numbers["agree"] == numbers["transitions"] == 36
    assert "36 of 36 transitions agree with S3 (6 elements): isomorphic" in capsys.readouterr().out


# --- The command line -----------------------------------------------------------------------------

@pytest.fixture
def tracked(monkeypatch):
    """A head of small_run is said to track, in these six states."""
    states = torch.randn(6, 1, 4, 4)
    monkeypatch.setattr("experiments.snap.tracking_heads", lambda *_: [(1, 0)])
    monkeypatch.setattr("experiments.snap.find_states", lambda *_: states)
    monkeypatch.setattr("experiments.snap.drift", lambda *_: [])
    return states


def test_without_a_tracking_head_the_model_is_evaluated_alone(small_run, capsys):
    import eval
    eval.main([str(small_run), "--lengths", "8:4", "--traces", "8", "--json"])
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    main([str(small_run), "--lengths", "8:4", "--traces", "8", "--extract", "--json"])
    shown = capsys.readouterr().out
    numbers = json.loads(shown.splitlines()[-1])
    assert shown.splitlines()[0].endswith("no head of this model tracks; it is evaluated alone")
    assert numbers["results"] == alone["results"] and "extract" not in numbers
    assert numbers["tracking"] == {"heads": [], "states": 0}


def test_the_command_line_evaluates_the_snapped_model(small_run, tracked, monkeypatch):
    calls = []
    monkeypatch.setattr("experiments.snap.evaluate_and_print", lambda *args: calls.append(args))
    main([str(small_run), "--interval", "3", "--traces", "5", "--seed", "7", "--device", "cpu"])
    snapped, _, *rest = calls[0]
    assert isinstance(snapped, Snapped) and snapped.interval == 3
    assert snapped.centroids is tracked and snapped.heads == [(1, 0)]
    assert rest == [[[8192, 128]], 5, 7, "cpu"]


def test_a_record_holds_the_command_the_seed_and_the_numbers(small_run, tracked, tmp_path):
    main([str(small_run), "--lengths", "4:2", "--traces", "4", "--extract", "--record",
          str(tmp_path / "r.jsonl")])
    line = json.loads((tmp_path / "r.jsonl").read_text())
    assert line["command"].startswith(f"python -m experiments.snap {small_run} --lengths 4:2")
    assert line["seed"] == 0 and line["results"][0]["length"] == 4
    assert line["extract"]["states"] == 6 and line["tracking"] == {"heads": [[1, 0]], "states": 6}


def test_states_are_kept_in_a_file(small_run, tracked, tmp_path, capsys, refused):
    """Found once and written, then read; a file of anything else, or of another model, is
    refused."""
    path = tmp_path / "states.pt"
    for where in ("6 states found", f"6 states read from {path}"):
        main([str(small_run), "--states", str(path), "--lengths", "2:1", "--traces", "2"])
        assert where in capsys.readouterr().out
        heads, states, _ = torch.load(path, weights_only=True)
        assert heads == [(1, 0)] and (states == tracked).all()
    torch.save(([(1, 0)], torch.randn(6, 1, 5, 5)), path)
    for wrong in (path, small_run / "config.json", small_run / "model.pt", tmp_path):
        refused(main, [small_run, "--states", wrong], "states of this model")


def test_what_a_user_can_get_wrong_is_refused_in_one_line(small_run, tmp_path, monkeypatch,
                                                          refused):
    refused(main, [small_run, "--interval", 0], "--interval: must lie in [1,")
    refused(main, [small_run, "--lengths", "8:3"], "multiple of the spacing")
    refused(main, [tmp_path], "model.pt")
    refused(main, [small_run, "--record", tmp_path], "directory")
    monkeypatch.setattr("experiments.snap.tracking_heads", lambda *_: [(1, 0)])
    refused(main, [small_run], "does not fall into clusters", "train longer")
    monkeypatch.setattr("data.MAX_ENUMERATED", 5)
    refused(main, [small_run], "group S3 has 6 elements")


@pytest.mark.parametrize("function", ["find_states", "extract", "evaluate_and_print"])
def test_a_bug_is_not_taken_for_an_error_of_the_user(function, small_run, tracked, monkeypatch):
    """A ValueError inside the work reaches the caller."""
    def broken(*_):
        raise ValueError("a bug")

    monkeypatch.setattr(f"experiments.snap.{function}", broken)
    with pytest.raises(ValueError, match="a bug"):
        main([str(small_run), "--extract", "--lengths", "2:1", "--traces", "2"])
