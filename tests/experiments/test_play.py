"""A session: what the model reads is a Python session of the lines that were typed, to the letter.
"""

import code
import contextlib
import io
import sys

import numpy as np
import pytest
import torch
from conftest import session

from data import Group, ReplTask, UserError, generator
from experiments import play
from experiments.play import assignment, line_of, statement_of


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
    answers = out.splitlines()[4:-1]
    assert [answer[:4] for answer in answers] == ["a 3 ", "a 3 ", "b 3 "]
    assert "Python: 1; 2 commands" in answers[2]


@pytest.mark.parametrize("line", [
    "a = 5", "a, b = b, a", "a, b, c = b, b, a", "a, b, c = b, c, a; a = 5", "print(a, b)", "1",
    "a, b, c = c, b, a ", "print(f)", "print(a, end='')", "print()", "b, a, c = a, b, c", "c 3",
    "a = quit()", "a, = b", "a = b,", "print(quit(), a)", "id(a)", "exec('a = 3')"])
def test_no_line_is_executed_that_is_none_of_the_task(monkeypatch, capsys, line):
    read = type_in(monkeypatch, ReplTask(Group("Z3")), [line, "print('a', a)"])
    assert read == session([*FIRST, "print('a', a)"])
    assert "; try a, b, c = " in capsys.readouterr().out


def test_bytes_that_are_no_text_are_answered_and_no_line_after_them_is_lost(monkeypatch, capsys):
    task = ReplTask(Group("S3"))
    typed = b"\xff\xfe\na, b, c = b, c, a\n\x00\xc3\nprint('a', a)\n"
    stdin = io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8", errors="strict")
    monkeypatch.setattr(sys, "stdin", stdin)
    model = Wrong(task)
    play.play(model, task)
    assert task.decode(model.read) == session([*FIRST, "a, b, c = b, c, a", "print('a', a)"])
    assert capsys.readouterr().out.count("; try ") == 2


def of_python(lines):
    """The real interpreter reads these lines.  Returns: its variables, and what each line prints.
    """
    interpreter = code.InteractiveInterpreter()
    outputs = []
    for line in lines:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert not interpreter.runsource(line), "an open block"
        outputs.append(output.getvalue())
    return interpreter.locals, outputs


def typed_by_hand(rng, count=40):
    """Lines of five variables, as people write them."""
    lines = []
    for _ in range(count):
        some = rng.permutation([*"abcde"])[:rng.integers(1, 6)]
        name = some[0]
        prints = [f"print({name})", f"print('{name}', {name})", f'print( "{name}",{name} )', name]
        sides = [[", ", ",", " ,  "][rng.integers(3)].join(side)
                 for side in (some, rng.permutation(some))]
        shuffle = [" = ", "=", "  =\t"][rng.integers(3)].join(sides)
        lines.append(shuffle if rng.random() < 0.6 else prints[rng.integers(4)])
        lines[-1] += ["", ";", "  # so", " "][rng.integers(4)]
    lines[1:1] = ["# a remark", ""]
    return lines


@pytest.mark.parametrize("seed", range(5))
def test_what_is_typed_does_what_it_does_in_python_and_so_does_the_session_pasted(
        monkeypatch, capsys, seed):
    typed = [f"{name} = {i + 1}" for i, name in enumerate("abcde")]
    typed += typed_by_hand(np.random.default_rng(seed))
    variables, outputs = of_python(typed)

    # The model has read lines that leave Python where it is, and Python's value after each print.
    task = ReplTask(Group("S5"))
    read = type_in(monkeypatch, task, typed[5:])
    left, printed = of_python([line[4:] for line in read.splitlines() if line[:4] == ">>> "])
    values = [output.split()[-1] for output in outputs if output]
    assert [left[name] for name in "abcde"] == [variables[name] for name in "abcde"]
    assert [output.split()[-1] for output in printed if output] == values
    shown = capsys.readouterr().out
    assert [line.split("Python: ")[1].split(";")[0] for line in shown.splitlines()
            if "Python: " in line] == values

    # As an interactive Python shows it, from the first lines on.
    session_of_python = "".join(f">>> {line}\n{output}" for line, output in zip(typed, outputs))
    assert type_in(monkeypatch, task, session_of_python.splitlines()) == read
    assert "; try " not in capsys.readouterr().out


@pytest.mark.parametrize("lines", [["3"], ["print(a)", "2"], ["print(a)", "1", "a, b = b, a", "1"]])
def test_output_that_python_does_not_print_here_is_refused(monkeypatch, capsys, lines):
    type_in(monkeypatch, ReplTask(Group("S3")), lines)
    assert capsys.readouterr().out.count("; try ") == 1


@pytest.mark.parametrize("line", ["exit()", "quit()"])
def test_a_session_can_be_left(monkeypatch, line):
    assert type_in(monkeypatch, ReplTask(Group("S3")), [line, "a, b = b, a"]) == session(FIRST)


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
    ("Z3", "full", "c, a, b = a, b, c", "a, b, c = b, c, a"),
    ("S3", "full", "(c, a) = (a, c)", "a, b, c = c, b, a")])
def test_what_does_the_same_as_a_command_is_read_as_that_command(name, commands, line, written):
    assert taken(ReplTask(Group(name), commands), line) == written


@pytest.mark.parametrize("name, commands, line, reason", [
    ("A3", "full", "a, b, c = b, a, c", "no element of A3"),
    ("S3", "swap", "a, b, c = b, c, a", "exchanges of two"),
    ("S3", "swap", "a, b = a, b", "exchanges of two"),
    ("S3", "full", "a = b", "copies"), ("S3", "full", "a, b, c = b, b, a", "copies"),
    ("S3", "full", "a = 3", "change places"), ("S3", "full", "a, d = d, a", "change places"),
    ("S3", "full", "a, a = b, c", "copies"), ("S3", "full", "a, b = b, c, a", "as many"),
    ("S3", "full", "a += b", "change places"), ("S3", "full", "a = b = c", "neither"),
    ("S3", "full", "a, b = b, a; b = a", "not one"), ("S3", "full", "(", "not one"),
    ("S3", "full", "for x in a: b", "neither"), ("S3", "full", "*a, b = b, c", "change places")])
def test_what_a_model_cannot_follow_is_refused_with_the_reason(name, commands, line, reason):
    with pytest.raises(UserError, match=reason):
        taken(ReplTask(Group(name), commands), line)


def taken(task, line):
    """The line that a model of this task reads where this one is typed."""
    return line_of(task, *assignment(statement_of(line)), {})
