"""A straight line does what the function did, and a session what the program did.

The oracle is Python: it calls the function, executes the straight line, runs the program file, and
answers the session as an interactive interpreter.
"""

import ast
import contextlib
import io
import runpy
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, session, typed_lines

from data import Group, ReplTask, UserError
from experiments import programs
from experiments.programs import blind, play, play_apart, trace, write_session

RUN = ROOT / "experiments/results/models/linrnn-S5-seed0"
PROGRAMS = sorted((ROOT / "experiments/results/programs").glob("*.py"))
TASK = ReplTask(Group("S5"))
START = "a, b, c, d, e = 1, 2, 3, 4, 5\n"


def function_of(source, path):
    """The function `traced` of a file with this source."""
    path.write_text(source)
    return runpy.run_path(str(path))["traced"]


def random_block(rng, depth, loop):
    """Random statements that set x, y, z and the list r."""
    lines = []
    for kind in rng.integers(13 if depth else 9, size=3):
        one, two, three = rng.choice(["x", "y", "z"], 3)
        number = rng.integers(2, 4)
        inside = random_block(rng, depth - 1, loop or kind > 10) if kind > 8 else []
        lines += [
            [f"{one}, {two} = {two} + 1, {one} % {number}"],
            [f"{one} += r.pop() % 7 + helper({two}, r); r.append({one} % {number})"],
            [f"r[0], r[-1] = r[-1], {two} % 7", f"{one} = [i * {two} for i in r][-1] % 9"],
            [f"if {one} < {two}: {'break' if loop else 'return z, r'}", "r.insert(0, 1)"],
            ["r += [1, 2]", "head, *rest = r", "del r[1:3]", f"{one} = len(rest) + head"],
            ["s = iter(r)", f"if {number} in s or (m := r[0]) > 2: {one} = next(s, 1)"],
            [f"(x, y,\n     z) = ({one}, {two},\n    {three})", "rows = [r]; row = rows[0][:]"],
            ["try:", f"    {one} = helper({two}, r) / 0", "except ZeroDivisionError:", "    pass"],
            ["r.sort(key=lambda i: -i)", f"{one} = traced(2, {two}, [5], 0)[0] if n else 4"],
            [f"if {one} % {number} and not helper({two}, r):", *inside, "else:", "    r.sort()"],
            [f"if {one} < {two} or r.append({number}):", *inside],
            [f"for {one} in range({number}):", *inside, "else:", f"    {two} = len(r)"],
            [f"t{depth} = 3", f"while t{depth}:", f"    t{depth} -= 1", *inside]][kind]
    return [f"    {line}" for line in lines]


@pytest.mark.parametrize("seed", range(8))
def test_a_random_program_and_its_trace_return_the_same(tmp_path, seed):
    """No control flow is left; in an empty namespace the text passes its assertion of what the
    function returns; the arguments are as before. Among the lines: calls of another function and
    of itself, which alter a list, iterators, several statements in a line, one in several lines."""
    body = "\n".join(random_block(np.random.default_rng(seed), 2, False))
    source = ("def helper(u, v):\n    v.append(u % 5)\n    return u + v[0]\n"
              f"def traced(x, y, r, n=1):\n    z = 0\n{body}\n    return x, y, [z,\n        r]\n")
    function = function_of(source, tmp_path / "program.py")
    args = [3, 4, [1, 2]]
    text = trace(function, *args)
    assert args == [3, 4, [1, 2]]
    exec(text, {})
    *lines, last = ast.parse(text).body
    assert eval(ast.unparse(last.test.comparators[0])) == function(*args)
    assert {type(line) for line in lines} <= {ast.Assign, ast.AugAssign, ast.Delete, ast.Expr}


def test_a_trace_reads_as_in_the_header_and_calls_are_values(tmp_path):
    """The function stands there on the left, and its straight line on the right. A line that would
    not do the same again is replaced by values; that it was tried changes nothing."""
    right = [line[34:] for line in programs.__doc__.splitlines()[4:9]]
    assert trace(programs.gcd, 12, 8).splitlines() == right
    function = function_of("""def traced(n):
    if n < 2: n = 5; return 1
    s = iter("abcde"); x = next(s) * ord(traced.__name__[0])
    y, z = (next(s),
            n); z += 1
    if "d" in s: y = next(s)
    return n * traced(n - 1)\n""", tmp_path / "calls.py")
    assert trace(function, 2).splitlines() == [
        "n = 2", 's = iter("abcde")', f"x = {'a' * 116!r}", "y = 'b'", "z = 2", "z += 1", "y = 'e'",
        "result = 2", "assert (result) == 2"]


@pytest.mark.parametrize("body, error, words", [
    ("while True: x += 1", TimeoutError, "50 lines"), ("return x / 0", ZeroDivisionError, "zero"),
    ("return float('nan')", UserError, "repr"), ("return lambda: x", UserError, "repr")])
def test_what_cannot_be_traced_is_refused(tmp_path, body, error, words):
    with pytest.raises(error, match=words):
        trace(function_of(f"def traced(x):\n    {body}\n", tmp_path / "bad.py"), 1, steps=50)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_shipped_program_is_long_and_its_session_is_pythons_own(path):
    """The file, run by Python, prints the values of its session. Typed into an interpreter, the
    session prints itself. Each is longer than the longest training trace, and no constant answers.
    """
    events = play(path.read_text(), "f.py", "abcde")
    prints = [event for event in events if "asked" in event]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(path))
    assert out.getvalue() == "".join(f"{TASK.names[event['asked']]} {event['value']}\n"
                                     for event in prints)
    text = TASK.decode(write_session(TASK, events)[0][0])
    assert session(typed_lines(text)) == text
    assert prints[-1]["commands"] == len(events) - len(prints) > 600

    said = [(event["asked"], event["value"]) for event in prints]
    best = [max(said.count((name, value)) for value in range(1, 6)) for name in range(5)]
    assert blind(prints) == sum(best) < 0.6 * len(prints)


def test_an_exchange_in_a_function_is_one_of_its_own_variables():
    """The a of another function is not the a of the session. Other variables may take part, and a
    print may stand in the line of the exchange."""
    source = ("def other(a):\n    a += 5\n    return a\n"
              "def main():\n    a, b = 1, 2\n    if other(a) == 6:\n        x = b\n"
              "        a, b = x, a; print('a', a)\nmain()\n")
    assert play(source, "f.py", "ab") == [{"line": 8, "command": [1, 0]},
                                          {"line": 8, "asked": 0, "value": 2, "commands": 1}]


@pytest.mark.parametrize("source, line, words", [
    ("a = 1\nb = (\n", 2, "SyntaxError"), ("import os\n", 1, "import"), ("", 0, "without a print"),
    ("open('x', 'w')\n", 1, "open"), ("x = 'a'\nx.__class__\n", 2, "__class__"),
    ("try:\n    a = 1\nexcept:\n    pass", 1, "try"), (START + "x = 1 / 0\n", 2, "ZeroDivision"),
    (START + "while 1: a, b = b, a\n", 2, "still"), (START + "a, b = b, a\n", 2, "without a print"),
    (START + "temp = a\na = b\nb = temp\n", 3, "exchanged"), (START + "del a\n", 2, "exchanged"),
    ("a, b = 1, 2\nprint('a', a)", 2, "print"), (START + "x = 3\nprint('x', x)\n", 3, "print"),
    (START + "print('b', a)\n", 2, "print"), (START + "print('a', a, end='')\n", 2, "print")])
def test_a_program_that_makes_no_session_is_refused(source, line, words):
    with pytest.raises(UserError, match=rf"^f.py:{line}: .*{words}"):
        play(source, "f.py", "abcde", steps=50)


def test_the_separate_process_is_ended_after_its_time_even_within_a_line(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("x = 9 ** 9 ** 9 ** 9\n")
    with pytest.raises(UserError, match="program.py: still running after 1 seconds"):
        play_apart(path, "abcde", seconds=1)


def test_a_stored_model_answers_and_what_is_wrong_is_marked_and_counted(
        tmp_path, monkeypatch, capsys, refused):
    """A model that is put back would be right, too. Here it says 1 each time. And a model that
    knows exchanges of two variables refuses a program that turns three."""
    monkeypatch.setattr(programs, "play_apart", lambda file, names: play(
        Path(file).read_text(), file, names))
    real = programs.answers
    monkeypatch.setattr(programs, "answers", lambda model, *rest: (
        ["1"] * 3 if isinstance(model, programs.Snapped) else real(model, *rest)))
    path = tmp_path / "short.py"
    path.write_text(f"{START}for _ in range(3):\n    a, b, c = b, c, a\n    print('a', a)\n")
    programs.main([str(RUN), str(path)])
    shown = capsys.readouterr().out
    for commands, value in enumerate([2, 3, 1], 1):
        line = f"a {value}    (alone: {value}; put back: 1; {commands} commands so far)"
        assert line + ("\n" if value == 1 else "   WRONG\n") in shown
    assert "alone: 3 of 3 prints right; commands before an error: None\n" in shown
    assert "put back: 1 of 3 prints right; commands before an error: 1\n" in shown

    monkeypatch.setattr(programs, "load", lambda _: (ReplTask(Group("S5"), "swap"), None))
    refused(programs.main, [RUN, path], f"{path}:3: no command of this model", "swap")
