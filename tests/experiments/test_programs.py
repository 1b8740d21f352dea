"""A straight line does what the function did, and a session what the program did.

The oracle is Python: it calls the function, executes the straight line, runs the program file, and
answers the session as an interactive interpreter.
"""

import ast
import contextlib
import io
import runpy

import numpy as np
import pytest
from conftest import ROOT, session, typed_lines
from data import Group, ReplTask, UserError
from experiments import programs, records
from experiments.programs import Snapped, blind, play, play_apart, trace, write_session

RUN = ROOT / "experiments/results/models/linrnn-S5-seed0"
PROGRAMS = sorted((ROOT / "experiments/results/programs").glob("*.py"))

# The functions that a random program calls, and its beginning.
SOURCE = '''
WEIGHTS = [3, 1, 2]

def helper(u, v):
    v[0], v[-1] = v[-1], u % 7
    return u % 5 + v[0]

def square(n: int):
    d: int = n * n
    return d

def factorial(n):
    if n < 2:
        return 1
    return n * factorial(n - 1)

def squares(n):
    for i in range(n):
        yield square(i)

def function(x, y, r):
    z = 0
'''


def function_of(source, path, name):
    """A function of a file with this source."""
    path.write_text(source, encoding="utf-8")
    space = {}
    exec(compile(source, path, "exec"), space)
    return space[name]


def random_block(rng, depth, inside):
    """Random statements that set x, y, z and the list r."""
    lines = []
    for _ in range(rng.integers(1, 5)):
        one, two, three = rng.choice(["x", "y", "z"], 3)
        number = rng.integers(2, 6)
        kind = rng.integers(12 if depth else 9)
        block = random_block(rng, depth - 1, inside or kind > 10) if kind > 8 else []
        lines += [
            [f"{one}, {two} = {two} + 1, {one} % {number}"],
            [f"{one} += helper({two} - r[0], r) * r[-1] + helper(v=r, u={three})"],
            [f"r.append({one} % {number})", f"{one} = [i * {two} for i in r][-1] % 9"],
            ["if r.pop() > 2: break", "r.append(1)"] if inside else ["r = r[:]"],
            [f"{one} = factorial({two} % 5) * WEIGHTS[0] % 9"],
            [f"{one} = sum(map(square, r)) + max(squares({number}))", "r.sort(key=lambda i: -i)"],
            ["r += [1, 2]", "head, *rest = r", "del r[1:3]", f"{one} = len(rest) + head"],
            ["s = iter(r)", f"if {number} in s or (m := r.pop()) > 2:", f"    {one} = next(s, 1)"],
            ["try:", f"    {one} += helper({two}, r) / 0", "except ZeroDivisionError:", "    pass"],
            [f"if {one} % {number} and not helper({two}, r) % 2:", *block, "else:", "    r.sort()"],
            [f"if {one} < {two} or r.insert(0, {number}):", *block],
            [f"for {one} in range({number}):", *block, "else:", f"    {two} = len(r)"]][kind]
        lines += ["r.append(0)"]
    return [f"    {line}" for line in lines]


@pytest.mark.parametrize("seed", range(16))
def test_a_random_program_and_its_trace_return_the_same(tmp_path, seed):
    """No control flow is left; the text passes its assertion of what the function returns; the
    arguments are as before. Among the lines: calls that alter a list in the middle of an
    expression, recursion, lambdas, iterators, generators, constants of the file."""
    body = "\n".join(random_block(np.random.default_rng(seed), 3, False))
    source = f"{SOURCE}{body}\n    return x, y, [z,\n        r]\n"
    function = function_of(source, tmp_path / "random_program.py", "function")
    args = [3, 4, [1, 2]]
    text = trace(function, *args)
    assert args == [3, 4, [1, 2]]
    exec(text, {})
    *lines, last = ast.parse(text).body
    assert eval(ast.unparse(last.test.comparators[0])) == function(*args)
    assert {type(node) for node in lines} <= {ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete,
                                              ast.Expr}
    assert "lambda" not in text


def test_a_trace_reads_as_in_the_header(tmp_path):
    """The function stands there on the left, and its straight line on the right. And a call has
    variables of its own."""
    shown = programs.__doc__.splitlines()[4:9]
    gcd = function_of("\n".join(line[4:34] for line in shown), tmp_path / "header.py", "gcd")
    assert trace(gcd, 12, 8).splitlines() == [line[34:] for line in shown]
    source = f"{SOURCE}    return square(square(x)) + square(y)\n"
    factorial = function_of(source, tmp_path / "calls.py", "factorial")
    assert trace(factorial, 3).splitlines() == [
        "n = 3", "factorial1_n = 2", "factorial2_n = 1", "factorial2 = 1",
        "factorial1 = factorial1_n * factorial2", "assert (n * factorial1) == 6"]
    function = function_of(source, tmp_path / "calls.py", "function")
    assert trace(function, 2, 1, []).endswith("\nassert (square1 + square2) == 17\n")


# The body of a function of x, which is 0; the line that is refused, and a word of the refusal.
@pytest.mark.parametrize("body, line, words", [
    ("y = 1\n    return y / x", 2, "division by zero"), ("return bad(x)", 1, "Recursion"),
    ("while True:\n        x += 1", 2, "still running after 50 "),
    ("return float('nan')", 0, "result"), ("return lambda: x", 0, "result")])
def test_what_cannot_be_traced_is_refused_with_file_and_line(tmp_path, body, line, words):
    path = tmp_path / "bad.py"
    function = function_of(f"def bad(x):\n    {body}\n", path, "bad")
    with pytest.raises(UserError, match=f"^{path}:{1 + line}: .*{words}.*$"):
        trace(function, 0, steps=1000 if "Recursion" in words else 50)


# --- Sessions -------------------------------------------------------------------------------------

TASK = ReplTask(Group("S5"))
START = "a, b, c, d, e = 1, 2, 3, 4, 5\n"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_shipped_program_is_long_and_its_session_is_pythons_own(path):
    """The file, run by Python, prints the values of its session. Typed into an interpreter, the
    session prints itself. Each is longer than the longest training trace, and no constant answers.
    """
    events = play(path.read_text(encoding="utf-8"), "f.py", "abcde")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(path))
    prints = [event for event in events if "asked" in event]
    assert out.getvalue() == "".join(f"{TASK.names[event['asked']]} {event['value']}\n"
                                     for event in prints)
    text = TASK.decode(write_session(TASK, events)[0][0])
    assert session(typed_lines(text)) == text
    assert prints[-1]["commands"] == sum("command" in event for event in events) > 600
    assert blind(prints) < 0.6 * len(prints)


def test_an_exchange_in_a_function_is_one_of_its_own_variables():
    """The a of another function is not the a of the session. Other variables may take part."""
    source = ("def other(a):\n    a += 5\n    return a\n"
              "def main():\n    a, b = 1, 2\n    if other(a) == 6:\n        x = b\n"
              "        a, b = x, a\n    print('a', a)\nmain()\n")
    assert play(source, "f.py", "ab") == [{"line": 8, "command": [1, 0]},
                                          {"line": 9, "asked": 0, "value": 2, "commands": 1}]


@pytest.mark.parametrize("source, line, words", [
    ("a = 1\nb = (\n", 2, "SyntaxError"), ("import os\n", 1, "import"),
    ("open('x', 'w')\n", 1, "open"), ("x = 'a'\nx.__class__\n", 2, "__class__"),
    ("try:\n    a = 1\nexcept:\n    pass", 1, "try"),
    (START + "while 1: a, b = b, a\n", 2, "still"), (START + "x = 1 / 0\n", 2, "ZeroDivision"),
    (START + "temp = a\na = b\nb = temp\n", 3, "only be exchanged"),
    (START + "for a in [2]:\n    pass\n", 2, "exchanged"), (START + "del a\n", 2, "exchanged"),
    ("e, b, c, d, a = 1, 2, 3, 4, 5\n", 1, "must begin as"),
    (START + "x = 3\nprint('x', x)\n", 3, "print one variable"),
    (START + "print('a', a, end='')\n", 2, "print one variable"),
    ("a = 1\nprint('a', a)\n", 2, "after all of them"),
    (START + "a, b = b, a\n", 2, "without a print"), ("", 0, "without a print")])
def test_a_program_that_makes_no_session_is_refused(source, line, words):
    with pytest.raises(UserError, match=rf"^f.py:{line}: .*{words}"):
        play(source, "f.py", "abcde", steps=50)


def test_the_separate_process_is_ended_after_its_time_even_within_a_line(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("x = 9 ** 9 ** 9 ** 9\n", encoding="utf-8")
    with pytest.raises(UserError, match="program.py: still running after 1 seconds"):
        play_apart(path, "abcde", seconds=1)


# --- What a model makes of it ---------------------------------------------------------------------

def test_the_blind_guess_knows_the_most_frequent_value_of_each_variable():
    values = [(0, 1), (0, 1), (0, 2), (1, 2), (1, 3), (1, 3), (2, 5)]
    assert blind([{"asked": asked, "value": value} for asked, value in values]) == 5


def test_the_command_prints_both_answers_beside_the_true_value(tmp_path, monkeypatch, capsys):
    """The stored model answers, and in the place of the one that is put back a 1 for each print."""
    real = programs.answers
    monkeypatch.setattr(programs, "answers", lambda model, *rest: (
        ["1"] * 6 if isinstance(model, Snapped) else real(model, *rest)))
    path = tmp_path / "short.py"
    source = START + """for _ in range(3):
    if a < c: a, b = b, a
    c, d, e = e, c, d; print('c', c)
    print('a', a)
"""
    path.write_text(source, encoding="utf-8")
    programs.main([str(RUN), str(path)])

    values = [event["value"] for event in play(source, path, "abcde") if "asked" in event]
    shown = capsys.readouterr().out
    marked = [line for line in shown.splitlines() if "(model: " in line]
    for line, value in zip(marked, values, strict=True):
        assert f" {value}    (model: {value}; put back: 1; " in line
        assert line.endswith("WRONG") == (value != 1)
    assert "model: 6 of 6 prints right; commands before an error: None" in shown
    assert f"put back: {values.count(1)} of 6 prints right" in shown


def test_bad_input_is_told_in_one_line(refused, tmp_path, monkeypatch):
    refused(programs.main, [RUN, tmp_path / "missing.py"], "missing.py", "No such file")
    # The model knows exchanges of two variables, and the program turns three.
    task = ReplTask(Group("S3"), "swap")
    monkeypatch.setattr(programs, "load_repl_run", lambda *_: ({}, task, None))
    path = tmp_path / "bad.py"
    path.write_text("a, b, c = 1, 2, 3\na, b, c = b, c, a\nprint('a', a)\n", encoding="utf-8")
    refused(programs.main, ["run", path], f"{path}:2: no command of this model", "swap")


def test_the_sentences_of_the_header_are_what_was_recorded():
    rows = records("programs")
    firsts = [row["model"]["first_wrong"] / 64 for row in rows]
    shares = [row["blind"] / row["prints"] for row in rows]
    text = " ".join(programs.__doc__.split())
    assert f"{min(firsts):.1f} to {max(firsts):.1f} times the 64 commands" in text
    assert f"has {100 * min(shares):.0f} to {max(shares):.0%} of them" in text
    assert {row["program"] for row in rows} == {path.stem for path in PROGRAMS}
    assert all(row["put back"]["right"] == row["prints"] for row in rows)
