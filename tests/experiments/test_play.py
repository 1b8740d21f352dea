"""A session: what the model reads is a Python session of the lines that were typed, to the letter.
"""

import io
import sys

import pytest
import torch
from conftest import session

from data import Group, ReplTask, UserError, generator
from experiments import play
from experiments.play import assignment, line_of


class Wrong:
    """A model that answers 3 to everything, and keeps what it has read as its state."""

    def __init__(self, task):
        self.answer = task.vocab.index("3")
        self.size = len(task.vocab)

    def stream(self, tokens, state=None):
        self.read = (state or []) + tokens[0].tolist()
        logits = torch.zeros(*tokens.shape, self.size)
        logits[..., self.answer] = 9
        return logits, self.read


def type_in(monkeypatch, task, lines):
    """Play these lines with a model that is wrong.  Returns: the text that it has read."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    model = Wrong(task)
    play.play(model, task)
    return task.decode(model.read)


FIRST = ["a = 1", "b = 2", "c = 3"]


def test_after_a_wrong_answer_the_model_reads_on_with_pythons_value(monkeypatch, capsys):
    lines = ["print('a', a)", "a, b, c = b, c, a", "print('a', a)", "a, b, c = b, c, a",
             "print('b', b)"]
    read = type_in(monkeypatch, ReplTask(Group("S3")), lines)
    assert read == session([*FIRST, *lines])

    # The values are 1, 2 and 1. It is printed as Python prints it: a name, a space, a value.
    out = capsys.readouterr().out.replace(">>> ", "")
    answers = out.splitlines()[3:-1]
    assert [answer[:4] for answer in answers] == ["a 3 ", "a 3 ", "b 3 "]
    assert "Python: 1; 2 commands" in answers[2]


@pytest.mark.parametrize("line", [
    "a = 5", "a, b = b, a", "a, b, c = b, b, a", "a, b, c = b, c, a; a = 5", "print(a)", "quit()",
    "a, b, c = c, b, a ", "print('a', b)", "", "b, a, c = a, b, c", "a = quit()"])
def test_no_line_is_executed_that_is_none_of_the_task(monkeypatch, capsys, line):
    read = type_in(monkeypatch, ReplTask(Group("Z3")), [line, "print('a', a)"])
    assert read == session([*FIRST, "print('a', a)"])
    assert "type a command such as a, b, c = " in capsys.readouterr().out


def test_bytes_that_are_no_text_are_answered_and_no_line_after_them_is_lost(monkeypatch, capsys):
    task = ReplTask(Group("S3"))
    typed = b"\xff\xfe\na, b, c = b, c, a\n\x00\xc3\nprint('a', a)\n"
    stdin = io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8", errors="strict")
    monkeypatch.setattr(sys, "stdin", stdin)
    model = Wrong(task)
    play.play(model, task)
    assert task.decode(model.read) == session([*FIRST, "a, b, c = b, c, a", "print('a', a)"])
    assert capsys.readouterr().out.count("type a command such as") == 2


@pytest.mark.parametrize("stdin", [None, io.StringIO()])
def test_without_any_input_a_session_ends_in_silence(monkeypatch, stdin):
    monkeypatch.setattr(sys, "stdin", stdin)
    task = ReplTask(Group("S3"))
    model = Wrong(task)
    play.play(model, task)
    assert task.decode(model.read) == session(FIRST)


@pytest.mark.parametrize("name, commands", [("S26", "full"), ("S12", "swap"), ("A5", "full")])
def test_every_line_of_a_trace_is_a_command(name, commands):
    task = ReplTask(Group(name), commands)
    batch = task.test_batch(3, 8, 8, generator(0, "valid"))
    for row in batch.inputs:
        lines = task.decode(row).splitlines()[task.group.degree:-2]
        assert len(lines) == 8 and all(taken(task, line[4:]) == line[4:] for line in lines)


@pytest.mark.parametrize("name, commands, line, written", [
    ("S3", "full", "a, b = b, a", "a, b, c = b, a, c"),
    ("S3", "full", "c,a=a , c", "a, b, c = c, b, a"), ("S3", "full", "b = b", "a, b, c = a, b, c"),
    ("S3", "swap", "b, a = a, b", "a, b = b, a"),
    ("S3", "swap", "a, b, c = c, b, a", "a, c = c, a"),
    ("Z3", "full", "c, a, b = a, b, c", "a, b, c = b, c, a")])
def test_what_does_the_same_as_a_command_is_read_as_that_command(name, commands, line, written):
    assert taken(ReplTask(Group(name), commands), line) == written


@pytest.mark.parametrize("name, commands, line, reason", [
    ("A3", "full", "a, b, c = b, a, c", "no element of A3"),
    ("S3", "swap", "a, b, c = b, c, a", "exchanges of two"),
    ("S3", "swap", "a, b = a, b", "exchanges of two"),
    ("S3", "full", "a = b", "copies"), ("S3", "full", "a, b, c = b, b, a", "copies"),
    ("S3", "full", "a = 3", "change places"), ("S3", "full", "a, d = d, a", "change places"),
    ("S3", "full", "a, a = b, c", "change places"), ("S3", "full", "a, b = c", "as many"),
    ("S3", "full", "a += b", "no assignment"), ("S3", "full", "a = b = c", "no assignment"),
    ("S3", "full", "a, b = b, a; b = a", "no assignment"), ("S3", "full", "(", "no assignment")])
def test_what_a_model_cannot_follow_is_refused_with_the_reason(name, commands, line, reason):
    with pytest.raises(UserError, match=reason):
        taken(ReplTask(Group(name), commands), line)


def taken(task, line):
    """The line that a model of this task reads where this one is typed."""
    return line_of(task, *assignment(line), {})
