"""What is read command by command, or in pieces, is the trace that eval.py reads whole."""

import torch
from machine import SwapMachine

from data import Group, ReplTask, generator
from eval import evaluate
from experiments import reading
from experiments.reading import evaluate_stream, follow


def test_a_model_reads_commands_one_by_one_from_the_first_lines_or_from_a_state():
    """To the letter, and it stops after each command."""
    task = ReplTask(Group("S4"))
    commands = task.group.draw((3, 6), generator(0, "test"))

    class Listener(torch.nn.Module):
        def stream(self, tokens, state=None):
            return None, [before + task.decode(row) for before, row in
                          zip(state or [""] * len(tokens), tokens.tolist())]

    texts = [*follow(Listener(), task, commands[:, :4])]
    texts += follow(Listener(), task, commands[:, 4:], texts[-1])
    assert texts[-1] == [task.start_lines() + "".join(map(task.command_line, trace))
                         for trace in commands.tolist()]
    assert [text[0].count(" = ") for text in texts] == [*range(4 + 1, 4 + 7)]


def test_a_row_of_a_stream_in_pieces_is_that_of_eval(monkeypatch):
    monkeypatch.setattr(reading, "TOKENS_AT_ONCE", 50)
    machine = SwapMachine("S3", 0.05)
    rows = [measure(machine, machine.task, 24, 4, 5, seed=3)
            for measure in (evaluate_stream, evaluate)]
    assert rows[0] == rows[1] and 0.5 < rows[0]["all"] < 1
