"""A straight line does what the function did, and a session what the program did.

The oracle is Python: it calls the function, executes the straight line, runs the program file, and
answers the session as an interactive interpreter.
"""

import ast
import contextlib
import copy
import io
import runpy
import sys

import pytest
from conftest import ROOT, session, typed_lines

from data import Group, ReplTask, UserError
from experiments import programs
from experiments.programs import blind, gcd, play, play_apart, trace, write_session

RUN = ROOT / "experiments/results/models/linrnn-S5-seed0"
PROGRAMS = sorted((ROOT / "experiments/results/programs").glob("*.py"))
TASK = ReplTask(Group("S5"))
START = "a, b, c, d, e = 1, 2, 3, 4, 5\n"


# --- Functions ------------------------------------------------------------------------------------

def bubble_sort(items):
    for end in range(len(items) - 1, 0, -1):
        for i in range(end):
            if items[i] > items[i + 1]:
                items[i], items[i + 1] = items[i + 1], items[i]
    return items


def reverse(items):
    turned = []
    while items:
        turned.append(items.pop())
    for place, _ in enumerate(turned):
        del items[:]
    return turned


def first_square(items, tried=0):
    for item in items:
        if int(item**0.5)**2 == item:
            return item
        tried += 1
    return None, tried


def lcm(a, b):
    return a // gcd(a, b) * b


@pytest.mark.parametrize("function, args", [
    (gcd, [252, 105]), (bubble_sort, [[3, 1, 2, 5, 4]]), (reverse, [[1, 2, 3]]),
    (first_square, [[3, 6, 4, 5]]), (first_square, [[3, 6]])])
def test_a_function_and_its_trace_return_the_same(function, args):
    """No control flow is left; in an empty namespace the text passes its assertion of what the
    function returns; the arguments are as before."""
    before = copy.deepcopy(args)
    text = trace(function, *args)
    assert args == before
    exec(text, {})
    *lines, last = ast.parse(text).body
    assert eval(ast.unparse(last.test.comparators[0])) == function(*args)
    assert {type(line) for line in lines} <= {ast.Assign, ast.AugAssign, ast.Delete, ast.Expr}


def test_a_trace_reads_as_in_the_header_and_a_call_is_not_followed():
    right = [line[34:] for line in programs.__doc__.splitlines()[4:9]]
    assert trace(gcd, 12, 8).splitlines() == right
    assert trace(lcm, 4, 6) == "a = 4\nb = 6\nassert (a // gcd(a, b) * b) == 12\n"
    assert trace(reverse, [5]).splitlines()[2:5] == [
        "turned.append(items.pop())", "place, _ = (0, 5)", "del items[:]"]
    with pytest.raises(TimeoutError, match="3 lines"):
        trace(gcd, 252, 105, steps=3)


def over_lines(n):
    squares = [i * i
               for i in range(n)
               if i]
    total = sum(
        squares
    )
    for place, square in enumerate(
            squares):
        total += (place +
                  square)
    while (total >
           n):
        total -= sum(1 for _ in
                     range(4))
    return (total
            - n)


def comprehends(n):
    total = sum([i * i for i in range(n)])
    table = {i: {j for j in range(i)} for i in range(n)}
    for _ in range(2):
        total += len([i for i in range(n)])
    return total, len(table)


def imports(n):
    import math
    from math import floor as down
    count: int = math.gcd(n, 4)
    assert count
    return count + down(2.5)


@pytest.mark.parametrize("function, arg, lines", [
    (over_lines, 3, 10), (comprehends, 3, 8), (imports, 6, 6)])
def test_a_statement_is_written_once_for_each_time_it_runs(function, arg, lines):
    """Over several lines, or with a comprehension, which Python 3.12 runs in its function's frame.
    The number of statements is counted by hand: the arguments, and what runs."""
    text = trace(function, arg)
    exec(text, {})
    assert len(ast.parse(text).body) == lines
    assert eval(text.rsplit(" == ")[1]) == function(arg)


def one_line(n):
    found = False
    if n > 3: found = True
    return found


def joined(n):
    n += 1; n += 2
    return n


def loop_in_a_line(n):
    for i in range(3): n += i
    return n


def tries(n):
    try:
        n += 1
    finally:
        return n


def inner(n):
    def one():
        return n
    return one()


def assigns_in_a_head(n):
    while (n := n - 1) > 2:
        pass
    return n


def pops_in_a_head(items):
    if items.pop():
        pass
    return items


def makes_a_thing(thing):
    return thing


@pytest.mark.parametrize("function, arg, words", [
    (one_line, 1, "one_line:.*two statements"), (joined, 1, "joined:.*two statements"),
    (loop_in_a_line, 1, "loop_in_a_line:.*two statements"), (tries, 1, "tries:.*Try"),
    (inner, 1, "inner:.*FunctionDef"), (assigns_in_a_head, 5, "assigns_in_a_head:.*:="),
    (pops_in_a_head, [1, 2], "AssertionError.*head"), (makes_a_thing, object(), "has no text"),
    (lambda n: n, 1, "has no source"), (len, [1], "len has no source")])
def test_what_cannot_be_made_straight_says_why_by_its_name(function, arg, words):
    """No tracing is left behind."""
    before = sys.gettrace()
    with pytest.raises(UserError, match=words) as refused:
        trace(function, arg)
    assert function.__name__ in str(refused.value) and sys.gettrace() is before


def test_a_trace_is_checked_where_asserts_are_not_executed(monkeypatch):
    """`python -O` compiles an assert to nothing, unless the compiler is told otherwise."""
    compiled = []

    def as_under_O(source, file, mode, optimize=2):
        compiled.append(source)
        return compile(source, file, mode, optimize=optimize)

    monkeypatch.setattr(programs, "compile", as_under_O, raising=False)
    with pytest.raises(UserError, match="AssertionError"):
        trace(pops_in_a_head, [1, 2])
    assert len(compiled) == 1


# --- Programs -------------------------------------------------------------------------------------

@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_shipped_program_is_long_and_its_session_is_pythons_own(path):
    """The file, run by Python, prints the values of its session. Typed into an interpreter, the
    session prints itself. It is longer than any training trace, and no constant answers it."""
    tokens, places, prints = write_session(TASK, play(path.read_text(), "f.py", "abcde"))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(path))
    assert out.getvalue() == "".join(f"{row['print']} {row['value']}\n" for row in prints)

    text = TASK.decode(tokens)
    assert session(typed_lines(text)) == text
    assert TASK.decode(tokens[places]) == "".join(row["value"] for row in prints)
    assert prints[-1]["commands"] == text.count("=") - 5 > 600

    shown = out.getvalue()
    best = [max(shown.count(f"{name} {value}") for value in "12345") for name in "abcde"]
    assert blind(prints) == sum(best) < 0.6 * len(prints)


def test_an_exchange_in_a_function_is_one_of_its_own_variables():
    """The a of another function is not the a of the session; other variables may take part."""
    source = ("def other(a):\n    a += 5\n    return a\n"
              "def main():\n    a, b = 1, 2\n    if other(a) == 6:\n        x = b\n"
              "        a, b = x, a\n    print('a', a)\nmain()\n")
    assert play(source, "f.py", "ab") == [("command", [1, 0]), ("print", (0, 2))]


@pytest.mark.parametrize("source, line, words", [
    ("a = 1\nb = (\n", 2, "SyntaxError"), ("import os\n", 1, "import"),
    ("", "[01]", "without a print"),  # the line of an empty file differs by Python's version
    ("open('x', 'w')\n", 1, "open"), (START + "x = 1 / 0\n", 2, "ZeroDivision"),
    (START + "temp = a\na = b\nb = temp\n", 3, "exchanged"), (START + "del a\n", 2, "exchanged"),
    ("a, b = 1, 2\nprint('a', a)", 2, "print"), (START + "print('b', a)\n", 2, "print")])
def test_a_program_that_makes_no_session_is_refused(source, line, words):
    with pytest.raises(UserError, match=rf"^f.py:{line}: .*{words}"):
        play(source, "f.py", "abcde")


@pytest.mark.parametrize("task, command, words", [
    (ReplTask(Group("S3"), "swap"), [1, 2, 0], "moves 3"), (ReplTask(Group("A3")), [1, 0, 2], "A3"),
    (ReplTask(Group("Z3")), [0, 2, 1], "none of Z3")])
def test_a_command_that_the_model_was_not_trained_on_is_refused(task, command, words):
    """As two names of three, say, it would be written as another command."""
    with pytest.raises(UserError, match=words):
        write_session(task, [("command", command), ("print", (0, 1))])
    right = [1, 0, 2] if task.commands == "swap" else [1, 2, 0]
    tokens, *_ = write_session(task, [("command", right), ("print", (0, right[0] + 1))])
    assert session(typed_lines(task.decode(tokens))) == task.decode(tokens)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "bytes.py").write_bytes(b"a = 1\n\xff\xfe\n")
    with pytest.raises(UserError, match="bytes.py is no text"):
        play_apart(tmp_path / "bytes.py", "abcde")


def test_a_program_is_ended_after_its_time_even_within_a_line(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("x = 9 ** 9 ** 9 ** 9\n")
    with pytest.raises(UserError, match="program.py: still running after 1 seconds"):
        play_apart(path, "abcde", seconds=1)


def test_a_stored_model_answers_and_what_is_wrong_is_counted(tmp_path, monkeypatch, capsys):
    """Alone it is right. Put back it would be right, too; here it says 3 each time. No first wrong
    answer alone leaves a gap in the table."""
    real = programs.predict
    monkeypatch.setattr(programs, "predict", lambda model, tokens: (
        0 * tokens + TASK.value_tokens[2] if isinstance(model, programs.Snapped)
        else real(model, tokens)))
    path = tmp_path / "short.py"
    path.write_text(f"{START}for _ in range(3):\n    a, b, c = b, c, a\n    print('a', a)\n")
    programs.main([str(RUN), str(path)])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    for commands, value in enumerate("231", 1):
        assert [str(commands), "a", value, value, "3"] in shown
    assert shown[-1] == ["short", "3", "3", "100.0", "33.3", "33.3"]
