"""A model whose states are known: the hand-built head of scan.py, made to read REPL traces."""

import torch
import torch.nn.functional as F

from data import Group, ReplTask
from scan import delta_rule_recurrent, swap_machine_keys


class SwapMachine:
    """It answers with what the slot asked for holds, and works late, as a network does: it executes
    a full command at the `=` of the next line, or just before it answers.

    Noise, fixed for each key, bends it. Slot x begins with the one-hot value x, the spares empty.
    State: [S [B, 1, 2n, n], the line so far [B, t], the command to be done [B, n or 0]], so S is
    that of head (0, 0).
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
        S, line, command = state or (torch.eye(2 * n)[:, :n].double().repeat(batch, 1, 1, 1),
                                     tokens[:, :0], tokens[:, :0])
        logits = torch.zeros(*tokens.shape, len(vocab), dtype=torch.float64)
        for t in range(tokens.shape[1]):
            line = torch.cat([line, tokens[:, t:t + 1]], 1)
            word, place = vocab[line[0, -1]], (line - vocab.index("a")) % n
            if word in (" = ", " ") and command.shape[1]:
                S, command = self.execute(command, S), command[:, :0]
            if word == " ":  # `b `: the value comes next
                logits[:, t, self.task.value_tokens] = S[torch.arange(batch), 0, place[:, 0]]
            if word == "\n":
                command = place[:, n + 2:-1] if line.shape[1] == 2 * n + 3 else command
                line = line[:, :0]
        return logits, [S, line, command]
