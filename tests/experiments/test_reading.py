"""What is read command by command, or in pieces, is the trace that eval.py reads whole."""

import re

import pytest
import torch
from machine import SwapMachine

from data import Group, ReplTask, generator
from eval import evaluate
from experiments import reading
from experiments.reading import evaluate_stream, follow


@pytest.mark.parametrize("reveals", [False, True])
def test_a_model_reads_the_trace_of_these_commands_and_reveals(reveals):
    """To the letter, and it stops after each command and its reveal."""
    task = ReplTask(Group("S4"))
    commands = task.group.draw((3, 6), generator(0, "test"))
    asked = generator(1, "test").integers(4, size=(3, 6))

    class Listener(torch.nn.Module):
        def stream(self, tokens, state=None):
            return None, [before + task.decode(row) for before, row in
                          zip(state or [""] * len(tokens), tokens.tolist())]

    texts = [*follow(Listener(), task, commands, asked if reveals else None)]
    traces = map(task.trace, commands.tolist(), asked.tolist())
    assert texts[-1] == [text if reveals else re.sub(r".*print.*\n.*\n", "", text)
                         for text in traces]
    assert [text[0].count(" = ") for text in texts] == [*range(4 + 1, 4 + 7)]


def test_a_row_of_a_stream_in_pieces_is_that_of_eval(monkeypatch):
    monkeypatch.setattr(reading, "TOKENS_AT_ONCE", 50)
    machine = SwapMachine("S3", 0.05)
    rows = [measure(machine, machine.task, 24, 4, 5, seed=3)
            for measure in (evaluate_stream, evaluate)]
    assert rows[0] == rows[1] and 0.5 < rows[0]["all"] < 1
