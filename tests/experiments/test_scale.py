"""The certificate by random states. Oracles: the head built by hand, and data.py's own groups."""

import numpy as np
import pytest
import torch
from machine import SwapMachine

from data import Group, ReplTask, generator
from experiments import scale


@pytest.mark.parametrize("name", ["S2", "S5", "A3", "A5", "Z7", "D6", "S3xZ4", "A4xD5"])
def test_the_generators_reach_every_element_of_their_group(name):
    group = Group(name)
    assert len(group.shortest_words(scale.generators(ReplTask(group)))) == group.order


def test_the_swaps_of_neighbours_generate_and_are_few_where_nothing_can_be_listed():
    generators = scale.generators(ReplTask(Group("S26")))
    moved = generators != np.arange(26)
    assert generators.shape == (25, 26) and (moved.sum(1) == 2).all()
    assert moved.any(0).all() and moved[:, :-1].sum() == moved[:, 1:].sum()


@pytest.mark.parametrize("name", ["S4", "S12"])
def test_the_head_built_by_hand_passes_with_every_generator(name):
    machine = SwapMachine(name)
    right, visited = scale.certify(machine, machine.task, 6, 3, generator(0, "test"))
    assert right.shape == (6, machine.n - 1) and right.all()
    assert visited <= 6 * machine.n and (name == "S4" or visited == 6 * machine.n)


def test_a_machine_that_misreads_some_commands_fails_with_those_generators_only():
    """It exchanges the last two names if the last is d: the generators that leave d there fail."""
    machine = SwapMachine("S4")
    execute = machine.execute
    machine.execute = lambda commands, S: execute(
        torch.where(commands[:, 3:] == 3, commands[:, [0, 1, 3, 2]], commands), S)
    # With no command ahead nothing but the generator can go wrong.
    right, visited = scale.certify(machine, machine.task, 5, 0, generator(0, "test"))
    stays = np.array([g[3] == 3 for g in scale.generators(machine.task)])
    assert stays.tolist() == [True, True, False] and (right == ~stays).all() and visited == 4


def test_states_and_depth_are_bounded_together_and_words_are_refused(small_run, refused):
    refused(scale.main, [small_run, "--states", "100000", "--depth", "100000"], "at most 1,048,576")
