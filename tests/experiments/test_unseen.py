"""Unseen commands are those that training never shows, read from the text of the traces; and both
certificates are complete for the head built by hand, until one transition of it is broken.
"""

import numpy as np
import pytest
import torch
from conftest import session, typed_lines
from machine import SwapMachine

import experiments
from data import Group, ReplTask, generator
from experiments import unseen
from experiments.groups import shortest_words
from experiments.unseen import UnseenTask, all_pairs, generators, pass_generators
from models import LinRNN


def test_training_shows_the_seen_commands_and_the_test_all_others():
    """Two sets that share nothing and together are the alphabet; the traces are Python's own."""
    task = UnseenTask(Group("S4"), 15)
    shown = []
    for draw in (task.training_batch, task.test_batch):
        commands = set()
        for row, rest in zip(*draw(200, 20, 4, np.random.default_rng(0))[:2]):
            text = task.decode([row[0], *rest])
            commands.update(line for line in typed_lines(text) if line.startswith("a, "))
        shown.append(commands)
        assert session(typed_lines(text)) == text
    seen, unseen = shown
    assert len(seen) == 15 and len(unseen) == 24 - 15 and not seen & unseen


@pytest.mark.parametrize("name, commands, count", [
    ("S5", "full", 4), ("S4", "swap", 6), ("A4", "full", 12), ("D5", "full", 10)])
def test_the_generators_reach_every_element_of_their_group(name, commands, count):
    """Four exchanges of neighbours are enough for S5; all swaps, and all of other groups."""
    group = Group(name)
    found = generators(ReplTask(group, commands))
    assert len(found) == count and len(shortest_words(group, found)) == group.order


class OneBroken(SwapMachine):
    """After `a, b, c = b, a, c` it confuses 1 and 2 if the values ahead of it were 3, 1, 2."""

    def execute(self, commands, S):
        after = super().execute(commands, S)
        values = S[:, 0, :3].argmax(-1)
        broken = (values == torch.tensor([2, 0, 1])) & (commands == torch.tensor([1, 0, 2]))
        broken = broken.all(-1)
        after[broken] = after[broken][..., [1, 0, 2]]
        return after


def test_both_certificates_of_a_perfect_reader_are_complete_and_find_one_broken_transition():
    """The elements of S3 in order: abc, acb, bac, bca, cab, cba. Broken is (cab, bac): all states
    but cab pass, a sixth of 30 by chance, with the other generator all of them."""
    machine, broken, task = SwapMachine("S3"), OneBroken("S3"), ReplTask(Group("S3"))
    assert all_pairs(machine, task, task.alphabet).all()
    assert np.argwhere(~all_pairs(broken, task, task.alphabet)).tolist() == [[4, 2]]

    right = pass_generators(machine, task, 30, 2, generator(0, "test"))
    assert right.shape == (30, 2) and right.all()
    right = pass_generators(broken, task, 30, 1, generator(0, "test"))
    assert 0 < (~right[:, 0]).sum() < 15 and right[:, 1].all()


class Once(SwapMachine):
    """A reader whose state is spoilt by whatever question or command is asked of it a second time.

    The number of commands read after the random ones, and of questions, stands beside its state.
    """

    def __init__(self, group, depth):
        super().__init__(group)
        self.depth = depth

    def stream(self, tokens, state=None):
        inner, commands, questions = state or (None, 0, 0)
        logits, inner = super().stream(tokens, inner)
        text = self.task.decode(tokens[0])
        questions += text.count("print")
        commands += text.count("=") - (self.n if state is None else 0)
        if commands > self.depth + 1 or questions > 1:
            logits = logits.flip(-1)
        return logits, (inner, commands, questions)


def test_each_question_of_a_certificate_starts_from_the_state_of_the_random_commands():
    """None tells the model anything about another, and no generator follows another."""
    machine, task = Once("S4", 3), ReplTask(Group("S4"))
    assert pass_generators(machine, task, 6, 3, generator(0, "test")).all()


def test_a_certificate_asks_for_every_variable_after_random_commands_of_that_number():
    """Read from the text that the model is given: 3 commands, then each generator, then all n."""
    task, read = ReplTask(Group("S4")), []

    class Listener(SwapMachine):
        def stream(self, tokens, state=None):
            read.append(task.decode(tokens[0]))
            return super().stream(tokens, state)

    pass_generators(Listener("S4"), task, 5, 3, generator(0, "test"))
    first, *rest = read
    assert first.count("\n") == 4 + 3 and session(typed_lines(first)) == first
    assert len(rest) == 3 * (1 + 4)
    for begin in range(0, len(rest), 5):
        assert rest[begin].count("=") == 1
        questions = [f">>> print('{name}', {name})\n{name} " for name in "abcd"]
        assert rest[begin + 1:begin + 5] == questions


def test_the_study_counts_the_pairs_with_an_unseen_command_and_each_cell_has_its_record():
    """The broken command is unseen only if all six commands of S3 are."""
    for seen, right in [(0, 35), (2, 24)]:
        task = UnseenTask(Group("S3"), seen)
        row, pairs = unseen.measure(OneBroken("S3"), task, [(4, 2)])
        assert row["length"] == 4 and pairs["pairs"] == 6 * (6 - seen)
        assert pairs["pairs_right"] == right

    for cell in unseen.CELLS:
        row, = experiments.records("unseen", **cell)
        assert experiments.at(row, 2)["pairs"] == 120 * (120 - cell["seen"])


def test_both_certificates_read_a_run(small_run, tmp_path, monkeypatch, refused, capsys):
    """One has 6 x 6 pairs of S3, the other a record. A group of 40,320 states has no list."""
    unseen.main(["exhaustive", str(small_run)])
    assert "of 36 pairs" in capsys.readouterr().out

    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    unseen.main(["certify", str(small_run), "--states", "3", "--depth", "2", "--record"])
    row, = experiments.records("unseen")
    assert (row["group"], row["states"], row["generators"]) == ("S3", 3, 2)
    assert 0 <= row["passed"] <= 3

    config = {"task": "traces", "group": "S8", "commands": "full", "model": "linrnn",
              "options": {"d_model": 4, "heads": 2}, "seed": 0}
    model = LinRNN(len(ReplTask(Group("S8")).vocab), **config["options"])
    torch.save({"config": config, "model": model.state_dict()}, tmp_path / "model.pt")
    refused(unseen.main, ["exhaustive", tmp_path], "S8", "certify")
