"""The automaton in a head is found without labels, and compared with the group."""

import numpy as np
import pytest
import torch
from machine import SwapMachine

from data import Group, ReplTask
from experiments.extract import check_order, extract, extract_and_print, find_states, relabel
from experiments.heads import Untracked, drift

HEADS = [(0, 0)]  # of a SwapMachine


@pytest.fixture(scope="module")
def noisy():
    """A hand-built head whose keys are bent, and the states found in it."""
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
    monkeypatch.setattr("experiments.extract.collect_states", lambda *_: (states, None))
    assert len(find_states(None, None, None)) == 3


def test_one_cluster_alone_is_no_list_of_states(monkeypatch):
    """-1, 0, 1: both others within the radius of 1.5 around the first point."""
    states = torch.tensor([0.0, 1.0, -1.0]).view(3, 1, 1, 1, 1)
    monkeypatch.setattr("experiments.extract.collect_states", lambda *_: (states, None))
    with pytest.raises(Untracked, match="does not fall into clusters: 1 after"):
        find_states(None, None, None)


def test_states_without_clusters_are_refused():
    """Steps that never repeat: every batch brings new states."""
    class Wanderer(SwapMachine):
        def execute(self, commands, S):
            return S + torch.randn_like(S)

    machine = Wanderer("S3")
    with pytest.raises(Untracked, match="fall into clusters"):
        find_states(machine, machine.task, HEADS)


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


def test_what_is_not_the_group_is_not_called_isomorphic(noisy, monkeypatch, capsys):
    """All elements once, but one transition of 36 wrong; and a group with a clock, which has each
    element twice, once for even times, though all its transitions are right."""
    machine, task, states = noisy
    monkeypatch.setattr("experiments.extract.drift", lambda *_: [])
    monkeypatch.setattr("experiments.extract.find_states", lambda *_: states)
    numbers = np.arange(6)
    table = task.group.compose(numbers[:, None], numbers)
    clock = np.vstack([table + 6, table])
    wrong = table.copy()
    wrong[5, 0] = wrong[5, 1]
    for table, agree, exact in [(table, 36, True), (wrong, 35, False), (clock, 72, False)]:
        monkeypatch.setattr("experiments.extract.extract", lambda *_: (table, 0, 0.1))
        found = extract_and_print(machine, task, HEADS)
        assert found["agree"] == agree and found["isomorphic"] == exact
        assert ("NOT isomorphic" in capsys.readouterr().out) != exact


def test_the_printed_verdict_is_that_of_the_table_and_the_drift_grows(noisy, monkeypatch, capsys):
    machine, task, _ = noisy
    monkeypatch.setattr("experiments.extract.drift", lambda *args: drift(*args, ends=(16, 48)))
    numbers = extract_and_print(machine, task, HEADS)
    (_, early, _), (end, late, _) = numbers["drift"]["alone"]
    assert end == 48 and late > 1.5 * early
    assert numbers["isomorphic"] and numbers["agree"] == numbers["transitions"] == 36
    assert "36 of 36 transitions agree with S3 (6 elements): isomorphic" in capsys.readouterr().out


@pytest.mark.parametrize("name, refused", [("S6", False), ("A7", True), ("S26", True)])
def test_a_group_of_too_many_states_is_refused_with_the_limit_and_the_alternative(name, refused):
    """Without listing it: S26 could not be."""
    group = Group(name)
    if not refused:
        return check_order(group)
    with pytest.raises(ValueError, match="lists every state.*refused above 1,000.*Without"):
        check_order(group)
