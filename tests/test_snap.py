"""The head that tracks is found, and the states it passes through are the group's."""

import re

import numpy as np
import pytest
import torch
from data import Group, ReplTask, WordTask, stream
from eval import collect_states, settled_ends, spread, tracking_heads
from models import build
from scan import delta_rule_recurrent, exchange_key, swap_machine_keys
from torch.nn import functional as F


class SwapMachine:
    """The hand-built head of scan.py on REPL traces of full commands: it executes a command at its
    newline, and answers with what the slot asked for holds. Noise, fixed for each key, bends it.

    Slot x begins with the one-hot value x, the spares empty. State: [S [B, 1, 2n, n], line [B, t]].
    """

    def __init__(self, group, noise=0.0):
        self.task, self.n = ReplTask(Group(group)), Group(group).degree
        self.noise_left = noise * torch.randn(self.n, 2 * self.n).double()
        self.noise_right = noise * torch.randn(self.n, self.n, 2 * self.n).double()

    def execute(self, commands, S):
        place = torch.arange(self.n)
        noise = torch.cat([self.noise_left.expand(len(S), -1, -1),
                           self.noise_right[place, commands]], 1)
        k = F.normalize(swap_machine_keys(commands.unsqueeze(1)) + noise, dim=-1).unsqueeze(1)
        nothing = k.new_zeros(*k.shape[:-1], self.n)
        return delta_rule_recurrent(k, k, nothing, k.new_full(k.shape[:-1], 2.0), S)[1]

    def stream(self, tokens, state=None):
        batch, n, vocab = len(tokens), self.n, self.task.vocab
        S, line = state or (torch.eye(2 * n)[:, :n].double().repeat(batch, 1, 1, 1), tokens[:, :0])
        logits = torch.zeros(*tokens.shape, len(vocab), dtype=torch.float64)
        for t in range(tokens.shape[1]):
            line = torch.cat([line, tokens[:, t:t + 1]], 1)
            word, place = vocab[line[0, -1]], (line - vocab.index("a")) % n
            if word == " ":  # `b `: the value comes next
                logits[:, t, self.task.value_tokens] = S[torch.arange(batch), 0, place[:, 0]]
            if word == "\n":
                S = self.execute(place[:, n + 2:-1], S) if line.shape[1] == 2 * n + 3 else S
                line = line[:, :0]
        return logits, [S, line]


def test_the_head_that_keeps_and_moves_is_found(monkeypatch):
    """Four heads with the same keys, exchanges of random slots: beta = 2 tracks; beta = 0 only
    keeps, and beta = 1 and 1/2 forget all but the mean of the slots. The first alone is found."""
    task = ReplTask(Group("S5"))
    model = build("linrnn", len(task.vocab), d_model=40, heads=4)

    def inputs_of_scan(x):
        i = torch.randint(5, x.shape[:2])
        j = (i + torch.randint(1, 5, i.shape)) % 5
        k = exchange_key(i, j, 10).float()[:, None, :, None].expand(-1, 4, -1, -1, -1)
        beta = torch.tensor([0.0, 2.0, 1.0, 0.5]).view(4, 1, 1).expand(k.shape[:-1])
        return k[..., 0, :], k, torch.ones_like(k), beta

    monkeypatch.setattr(model.blocks[1], "inputs_of_scan", inputs_of_scan)
    assert tracking_heads(model, task) == [(1, 1)]


@pytest.mark.parametrize("name, options", [("linrnn", {"beta_max": 1.0}), ("lstm", {}),
                                           ("transformer", {})])
def test_a_model_that_cannot_reflect_has_no_tracking_head(name, options):
    task = ReplTask(Group("S5"))
    assert tracking_heads(build(name, len(task.vocab), **options), task) == []


def test_words_have_no_commands_to_stop_at():
    task = WordTask(Group("S3"))
    with pytest.raises(ValueError, match="trained on words"):
        tracking_heads(build("linrnn", 6), task)


@pytest.mark.parametrize("commands, mark", [("full", " = "), ("swap", ">>> ")])
def test_a_command_has_settled_in_the_line_after_it(commands, mark):
    """Up to each place the text holds one command more, whole, and ends with the mark."""
    task = ReplTask(Group("S4"), commands)
    tokens, _ = task.sample(1, 6, 3, stream(0, "valid"))
    for count, end in enumerate(settled_ends(task, 6, 3), 1):
        text = task.decode(tokens[0, :end])
        assert text.endswith(mark) and len(re.findall(r", . = .*\n", text)) == count


def test_the_states_of_the_hand_built_head_are_the_permutations():
    """Slot x holds the value of variable x after each command; the spares are empty again."""
    machine = SwapMachine("S4")
    states, elements = collect_states(machine, machine.task, [(0, 0)], 6, 10, 5, stream(0, "valid"))
    held = torch.from_numpy(np.eye(4)[machine.task.group.elements[elements]])
    assert states.shape == (6, 10, 1, 8, 4) and len(np.unique(elements)) > 10
    assert (states[:, :, 0, :4] - held).abs().max() < 1e-10
    assert states[:, :, 0, 4:].abs().max() < 1e-10


def test_spread_of_two_classes_known_by_hand():
    """Points 0, 2 and 7, 11 on a line: 1 and 2 from their means, with 4 - 2 degrees of freedom."""
    within, between = spread(torch.tensor([[0.0], [7.0], [2.0], [11.0]]), np.array([3, 8, 3, 8]))
    assert abs(within - 5**0.5) < 1e-6 and abs(between - 8) < 1e-6
