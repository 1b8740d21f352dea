"""A straight line does what the function did, and a session what the program did.

Oracles: Python itself. It executes the straight line in an empty namespace, watches the function
through sys.settrace, runs the program file, and answers the session as an interactive interpreter.
"""

import ast
import contextlib
import copy
import io
import json
import math
import runpy
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, session, typed_lines
from data import Group, ReplTask
from experiments import programs
from experiments.programs import answers, blind, token_lines, trace
from experiments.sessions import Session, execute
from experiments.unroll import Refused
from machine import SwapMachine

RUN = ROOT / "experiments/results/models/linrnn-S5-seed0"
PROGRAMS = sorted((ROOT / "experiments/results/programs").glob("*.py"))
LETTERS, WEIGHTS = "aeiou", [3, 1, 2]


# --- Functions to be traced -----------------------------------------------------------------------

def gcd(a, b):
    while b:
        a, b = b, a % b
    return a


def add_up(numbers):
    total = 0
    for number in numbers:
        total += number
    return total


def first_above(numbers, limit):
    for place, number in enumerate(numbers):
        if number > limit:
            break
    else:
        place = None
    return place


def odd_squares(numbers):
    found = []
    for n in numbers:
        if n % 2 == 0:
            continue
        found.append(n * n)
    return found


def sign(x):
    if x > 0:
        return "positive"
    elif x < 0:
        return "negative"
    return "zero"


def count_letters(text):
    counts = {}
    for letter in text:
        counts[letter] = counts.get(letter, 0) + 1
    return sorted(counts.items())


def table(n):
    rows = []
    for i in range(n):
        rows.append([])
        for j in range(i, n):
            if (i + j) % 3 == 2:
                break
            rows[i].append(i * j)
    return rows


def collatz(n):
    steps = [n]
    while True:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps.append(n)
        if n == 1:
            return steps


def rotate(xs, k):
    xs[:] = xs[k:] + xs[:k]
    xs[0], xs[-1] = xs[-1], xs[0]
    head, *rest = xs
    del xs[1:3]
    return head, rest, xs


def swap_by_hand(a, b):
    temp = a
    a = b
    b = temp
    return a, b


def hidden(sum, list):
    max = 0
    for i in list:
        sum += i
        if i > max:
            max = i
    return sum, max, [other for other in list if other < max]


def two_names_for_one(xs):
    ys = xs
    ys.append(4)
    zs = xs[:]
    zs.clear()
    return xs, ys, zs


def last_of(stack):
    total = 0
    while stack and stack.pop() != 3:
        total += 1
    if not stack or (n := len(stack)) > 5:
        return total, stack
    return total, stack, n


def from_an_iterator(xs):
    rest = iter(xs)
    if 3 in rest:
        return list(rest)
    return next(rest, None)


def with_sets(xs):
    seen, twice = set(), set()
    for x in xs:
        if x in seen:
            twice.add(x)
        seen.add(x)
    seen -= twice
    return seen, twice


def texts(name):
    """The docstring and print alter nothing."""
    print("hello", name)
    name = name.strip().title()
    parts: list = [f"{letter}{place}" for place, letter in enumerate(name)]
    unused: int
    assert parts
    return "-".join(parts), name[::-1]


def nothing(xs):
    xs.reverse()
    pass


def several_lines(xs):
    found = [
        x
        for x in xs
    ]
    last = found[-1]
    return (
        last,
        found)


def unpack(pairs):
    out = {}
    for (key, value), *_ in pairs:
        out.update({key: value})
        out.setdefault("all", []).append(value)
    return out


# These call functions of this file, or read its constants.

def is_prime(n, begin=2):
    for d in range(begin, n):
        if n % d == 0:
            return False
    return n > 1


def primes_below(n):
    found = []
    for i in range(n):
        if i and is_prime(i) and not is_prime(begin=2, n=i + 1):
            found.append(i)
    return found


def powers(n):
    d = 1
    while is_prime(n + d):
        d += square(d) - square(x=d) + 1
    x = square(square(d)) + add_up([square(3), *WEIGHTS])
    return x


def square(x):
    d = x * x
    return d


def swap_first(xs):
    xs[0], xs[1] = xs[1], xs[0]
    return 10


def order_counts(xs):
    swap_first(xs)
    return xs[0] + 2 * swap_first(xs) + xs[0], [len(xs), swap_first(xs)]


def factorial(n):
    if n < 2:
        return 1
    return n * factorial(n - 1)


def one_name_twice(xs):
    """The x of a comprehension is another one. (Python 3.12 shows it to sys.settrace.)"""
    for x in xs:
        xs = [x * x for x in xs]
    return x, xs


def vowels(text):
    return sum(letter in LETTERS for letter in text) * WEIGHTS[0]


CASES = [
    (gcd, 48, 18), (add_up, [1, 2, 3]), (add_up, []), (first_above, [1, 5, 9], 4),
    (first_above, [1, 2], 4), (odd_squares, range(6)), (sign, 3), (sign, -3), (sign, 0),
    (count_letters, "banana"), (table, 4), (collatz, 6), (rotate, [1, 2, 3, 4, 5], 2),
    (swap_by_hand, 1, "x"), (hidden, 2, [3, 5, 4]), (two_names_for_one, [1, 2]),
    (last_of, [1, 2, 3, 4, 5]), (last_of, []), (from_an_iterator, [1, 3, 5]),
    (from_an_iterator, [1, 2, 4]), (with_sets, [1, 2, 1, 3]), (texts, " ada "), (nothing, [1, 2]),
    (several_lines, (4, 2)), (unpack, [[("a", 1), 0], [("b", 2)]])]
CALLING = [(primes_below, 12), (powers, 4), (order_counts, [4, 5]), (factorial, 5),
           (one_name_twice, [2, 3]), (vowels, "queue")]


def real(function, *args):
    """What the function returns, and alters, on copies of the arguments."""
    args = copy.deepcopy(args)
    with contextlib.redirect_stdout(io.StringIO()):
        return function(*args), args


def shown(variables, names):
    """The values of these variables as text; an iterator has none that could be compared."""
    return repr({name: "iterator" if hasattr(variables[name], "__next__") else variables[name]
                 for name in names if name in variables})


def changes(states):
    """A list of states without repetitions."""
    return [state for i, state in enumerate(states) if state not in states[i - 1:i][:i]]


def watched(function, names, *args):
    """The values of these variables in a real call, each time that one of them has changed."""
    seen, before = [], sys.gettrace()

    def look(frame, event, _):
        if frame.f_code is function.__code__:
            seen.append(shown(frame.f_locals, names))
            return look

    sys.settrace(look)
    try:
        real(function, *args)
    finally:
        sys.settrace(before)
    return changes(seen)


def stepped(text, names, count):
    """The same of a straight line, once its `count` arguments are set."""
    space, seen = {}, []
    for place, line in enumerate(ast.parse(text).body, 1):
        exec(ast.unparse(line), space)
        if place >= count:
            seen.append(shown(space, names))
    return changes(seen)


def names_of_case(case):
    return f"{case[0].__name__} {case[1:]}"


@pytest.mark.parametrize("case", CASES + CALLING, ids=names_of_case)
def test_a_trace_is_a_straight_line_whose_assertion_holds_what_the_function_returns(case):
    """No control flow is left; the text passes in an empty namespace and alters no argument."""
    before = repr(case[1:])
    text = trace(*case)
    body = ast.parse(text).body
    assert {type(node) for node in body[:-1]} <= {ast.Assign, ast.AugAssign, ast.AnnAssign,
                                                  ast.Delete, ast.Expr}
    assert not [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Lambda)]
    assert text.splitlines()[-1].startswith("assert (") and isinstance(body[-1], ast.Assert)
    exec(text, {})
    assert eval(ast.unparse(body[-1].test.comparators[0])) == real(*case)[0]
    assert repr(case[1:]) == before


@pytest.mark.parametrize("case", CASES, ids=names_of_case)
def test_the_variables_take_the_values_that_python_itself_reports(case):
    """All values of all variables in their order, by sys.settrace."""
    function, *args = case
    text, space = trace(*case), {}
    exec(text, space)
    names = sorted({*function.__code__.co_varnames} & {*space})
    assert stepped(text, names, len(args)) == watched(function, names, *args)


def test_a_trace_reads_as_in_the_header():
    assert trace(gcd, 12, 8).splitlines() == [
        "a = 12", "b = 8", "a, b = b, a % b", "a, b = b, a % b", "assert (a) == 4"]
    assert trace(add_up, [7]).splitlines() == [
        "numbers = [7]", "total = 0", "forloop0 = iter(numbers)", "number = next(forloop0)",
        "total += number", "assert (total) == 7"]


def test_what_alters_nothing_is_dropped_and_a_condition_that_alters_something_stays():
    lines = trace(last_of, [3, 1]).splitlines()
    assert lines == ["stack = [3, 1]", "total = 0", "stack.pop() != 3", "total += 1",
                     "stack.pop() != 3", "assert ((total, stack)) == (1, [])"]
    assert not [line for line in trace(texts, "b").splitlines() if "print" in line or "The" in line]
    assert "3 in rest" in trace(from_an_iterator, [1, 3])


def test_a_call_is_unrolled_with_variables_of_its_own_and_what_precedes_it_is_kept():
    lines = trace(order_counts, [4, 5]).splitlines()
    assert lines[1:3] == ["swap_first0_xs = xs", "swap_first0_xs[0], swap_first0_xs[1] = "
                          "(swap_first0_xs[1], swap_first0_xs[0])"]
    assert lines.index("kept0 = xs[0]") < lines.index("swap_first1_xs = xs")
    assert trace(vowels, "a").startswith("LETTERS = 'aeiou'\nWEIGHTS = [3, 1, 2]\ntext = 'a'\n")
    assert "factorial1_n = factorial0_n - 1" in trace(factorial, 3)


# --- What is refused ------------------------------------------------------------------------------

def sorts(xs):
    return sorted(xs, key=lambda x: -x)


def imports(x):
    import math
    return math.sqrt(x)


def uses_a_module(x):
    return math.sqrt(x)


def tries(x):
    try:
        return 1 / x
    except ZeroDivisionError:
        return 0


def inner(x):
    def double(y):
        return 2 * y
    return double(x)


def yields(x):
    yield x


def asks(x):
    return input(x)


def calls_in_a_loop(xs):
    return [square(x) for x in xs]


def hands_on(xs):
    return list(map(square, xs))


def divides(x):
    y = 1
    return y / x


def runs_on(x):
    while True:
        x += 1


def recurs(x):
    return recurs(x + 1)


def too_many(x):
    return square(x, x)


def star(*xs):
    return xs


def reaches_in(x):
    return x.__class__


def not_a_number(x):
    return float("nan")


@pytest.mark.parametrize("function, line, words", [
    (sorts, 1, "lambda"), (imports, 1, "import"), (uses_a_module, 1, "math"), (tries, 1, "try"),
    (inner, 1, "def"), (yields, 1, "yield"), (asks, 1, "input"),
    (calls_in_a_loop, 1, "square() must be called in a line of its own"),
    (hands_on, 1, "square"), (divides, 2, "division by zero"),
    (recurs, 1, "Recursion"), (too_many, 1, "too many positional"), (star, 0, "*"),
    (reaches_in, 1, "__class__"), (not_a_number, 0, "result")])
def test_what_cannot_be_unrolled_is_refused_with_file_and_line(function, line, words):
    with pytest.raises(Refused) as refusal:
        trace(function, *[0] * (function is not star))
    place = f"{__file__}:{function.__code__.co_firstlineno + line}: "
    assert str(refusal.value).startswith(place) and words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_nothing_is_executed_beyond_the_limit():
    with pytest.raises(Refused, match="still running after 10 statements"):
        trace(runs_on, 0, steps=10)
    game = Session("a = b = c = 0\nwhile True:\n    a += 1\n", "f.py", 10, "xyz")
    with pytest.raises(Refused, match="f.py:3: still running"):
        game.play()
    assert game.space["a"] == 8  # after the first line and the loop


# --- Sessions -------------------------------------------------------------------------------------

TASK = ReplTask(Group("S5"))
START = "a, b, c, d, e = 1, 2, 3, 4, 5\n"
SHORT = START + """
for round in range(6):
    if a < c:
        a, b = b, a
    c, d, e = e, c, d
    print('c', c)
    print('a', a)
"""


def play(source, names="abcde", steps=20_000):
    return Session(source, "f.py", steps, names).play()


def text_of(events, task=TASK):
    return "".join(map(task.decode, token_lines(task, events)))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_shipped_program_is_long_and_its_session_is_pythons_own(path):
    """The file, run by Python, prints the values of its session. Typed into an interpreter, the
    session prints itself. Each is longer than the longest training trace, and no constant answers.
    """
    events = play(path.read_text(encoding="utf-8"))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(path))
    prints = [event for event in events if "asked" in event]
    assert out.getvalue() == "".join(f"{TASK.names[event['asked']]} {event['value']}\n"
                                     for event in prints)
    assert session(typed_lines(text_of(events))) == text_of(events)
    assert prints[-1]["commands"] == sum("command" in event for event in events) > 600
    assert blind(prints) < 0.6 * len(prints)


def test_four_programs_are_shipped():
    assert [path.stem for path in PROGRAMS] == ["bubble_sort", "card_trick", "josephus",
                                                "riffle_shuffle"]


def test_an_exchange_in_a_function_is_one_of_its_own_variables():
    """The a of another function is not the a of the session."""
    source = ("def other(a):\n    a += 5\n    return a\n"
              "def main():\n    a, b = 1, 2\n    if other(a) == 6:\n        a, b = b, a\n"
              "    print('a', a)\nmain()\n")
    assert play(source, "ab") == [{"line": 7, "command": [1, 0]},
                                  {"line": 8, "asked": 0, "value": 2, "commands": 1}]


@pytest.mark.parametrize("source, line, words", [
    ("a = 1\nb = (\n", 2, "SyntaxError"), ("return 3\n", 1, "SyntaxError"),
    ("import os\n", 1, "import"), (START + "x = 1\nfrom os import path\n", 3, "from"),
    (START + "def f():\n    return input()\n", 3, "input"), ("open('x', 'w')\n", 1, "open"),
    (START + "z = 1\na, z = z, a\n", 3, "z is no variable of this model"),
    (START + "x, y = 3, 4\nprint('x', x)\n", 3, "x is no variable"),
    ("a, b, c, d, e, f = 1, 2, 3, 4, 5, 6\n", 1, "f is no variable"),
    (START + "temp = a\na = b\nb = temp\n", 3, "a may only be exchanged"),
    (START + "temp = a\na, b = b, temp\n", 3, "temp is no variable of this model"),
    (START + "for a in [1]:\n    pass\n", 2, "a may only be exchanged"),
    (START + "a += 0\n", 2, "a may only be exchanged"),
    ("e, b, c, d, a = 1, 2, 3, 4, 5\n", 1, "must begin as"),
    (START + "print(a)\n", 2, "as in print('a', a)"), ("print('a', a)\n", 1, "after all of them"),
    (START + "print('a', b)\n", 2, "as in print('a', a)"),
    (START + "a, b = b, a\n", 2, "without a print"), (START + "x = 1 / 0\n", 2, "ZeroDivision"),
    (START + "x = y\n", 2, "NameError"), ("x = 'a\0'\n", 1, "null")])
def test_a_program_that_makes_no_session_is_refused(source, line, words):
    with pytest.raises(Refused) as refusal:
        play(source)
    assert str(refusal.value).startswith(f"f.py:{line}: ") and words in str(refusal.value)


def test_what_is_refused_in_the_file_is_refused_before_anything_is_executed():
    game = Session("a = 1\nimport os\n", "f.py", 10, "ab")
    with pytest.raises(Refused, match="f.py:2: "):
        game.play()
    assert game.lines == []


def test_the_separate_process_imports_no_torch():
    """It would take seconds to start. Its limit counts from its start."""
    ask = "import sys; sys.path.insert(0, sys.argv[1]); import experiments.sessions; " \
          "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-I", "-c", ask, str(ROOT)]).returncode == 0


def test_the_separate_process_gives_the_same_events_and_is_ended_after_its_time(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(SHORT, encoding="utf-8")
    assert execute(path, "abcde") == play(SHORT)
    path.write_text("x = sum(iter(int, 1))  # one endless line\n", encoding="utf-8")
    with pytest.raises(Refused, match="program.py:1: still running after 2 seconds"):
        execute(path, "abcde", seconds=2)
    path.write_text("x = 9 ** 9 ** 9 ** 9\n", encoding="utf-8")
    with pytest.raises(Refused, match="program.py:1: "):
        execute(path, "abcde", seconds=2)
    path.write_bytes("a = 'é'\n".encode("latin-1"))
    with pytest.raises(Refused, match="program.py:1: "):
        execute(path, "abcde")


# --- What a model makes of it ---------------------------------------------------------------------

def test_a_model_is_asked_for_the_printed_values_of_the_session():
    """A machine that executes the commands answers all; with noise on its keys it errs."""
    events = play(SHORT)
    truth = [str(event["value"]) for event in events if "asked" in event]
    assert answers(SwapMachine("S5"), TASK, events) == truth and len({*truth}) > 2
    torch.manual_seed(0)
    assert answers(SwapMachine("S5", noise=1.0), TASK, events) != truth


def test_the_blind_guess_knows_the_most_frequent_value_of_each_variable():
    values = [(0, 1), (0, 1), (0, 2), (1, 2), (1, 3), (1, 3), (2, 5)]
    assert blind([{"asked": at, "value": value} for at, value in values]) == 5


def test_the_command_prints_both_answers_beside_the_true_value(tmp_path, monkeypatch, capsys):
    """The stored model, alone and in the place of the one whose state is put back a model that
    always answers 1. The record holds what was printed."""
    class One:
        def stream(self, tokens, state=None):
            one = torch.eye(len(TASK.vocab))[TASK.vocab.index("1")]
            return one.expand(*tokens.shape, -1), state

    monkeypatch.setattr(programs, "put_back", lambda *_: One())
    path, record = tmp_path / "short.py", tmp_path / "r.jsonl"
    path.write_text(SHORT, encoding="utf-8")
    programs.main([str(RUN), str(path), "--record", str(record), "--device", "cpu"])
    shown, events = capsys.readouterr().out.splitlines(), play(SHORT)
    values = [event["value"] for event in events if "asked" in event]
    answered = [line for line in shown if "model: " in line and "put back: " in line]
    for line, value in zip(answered, values, strict=True):
        assert line[2:].startswith(f"{value}    (model: {value}; put back: 1; ")
        assert line.endswith("WRONG") == (value != 1)
    line, = map(json.loads, record.read_text().splitlines())
    assert line["model"] == {"right": 12, "first_wrong": None} and line["seed"] == 0
    assert line["put back"]["right"] == values.count(1) and line["prints"] == 12
    assert line["commands"] == sum("command" in event for event in events)
    assert [text for text in shown if text.startswith(">>> a, b, c, d, e = b, a, c, d, e")]


def test_bad_input_is_told_in_one_line(refused, tmp_path):
    path = tmp_path / "bad.py"

    def tell(source, line, *words):
        path.write_text(source, encoding="utf-8")
        refused(programs.main, [RUN, path, "--steps", "50"], f"{path}:{line}: ", *words)

    tell(START + "f = 6\nd, f = f, d\n", 3, "f is no variable of this model")
    tell(START + "while True:\n    a, b = b, a\n", 3, "after 50 statements")
    refused(programs.main, [RUN, tmp_path / "missing.py"], "missing.py", "No such file")
    refused(programs.main, [tmp_path, path], "model.pt")


def test_a_command_that_the_model_was_not_trained_on_is_refused(refused, monkeypatch, tmp_path):
    """The model knows exchanges of two variables; the program turns three."""
    task = ReplTask(Group("S3"), "swap")
    monkeypatch.setattr(programs, "load_repl_run", lambda *_: ({}, task, None))
    path = tmp_path / "turn.py"
    path.write_text("a, b, c = 1, 2, 3\na, b, c = b, c, a\nprint('a', a)\n", encoding="utf-8")
    refused(programs.main, ["run", path], f"{path}:2: no command of this model", "swap")


def test_the_table_of_the_header_is_what_was_recorded():
    """Commands, prints, the model alone seed by seed, the blind guess; put back all is right."""
    rows = {}
    text = (ROOT / "experiments/results/programs.jsonl").read_text(encoding="utf-8")
    for run in sorted(map(json.loads, text.splitlines()), key=lambda run: run["seed"]):
        rows.setdefault(run["program"], []).append(run)
        assert run["put back"] == {"right": run["prints"], "first_wrong": None}
    assert sorted(rows) == [path.stem for path in PROGRAMS]
    for name, runs in rows.items():
        assert [run["seed"] for run in runs] == [0, 1, 2, 3, 4]
        said, = [line.split()[1:] for line in programs.__doc__.splitlines()
                 if line.startswith(f"    {name}  ")]
        assert [*map(int, said)] == [
            runs[0]["commands"], runs[0]["prints"], *(run["model"]["first_wrong"] for run in runs),
            *(run["model"]["right"] for run in runs), runs[0]["blind"]]


def test_a_model_without_states_is_read_alone(monkeypatch, capsys):
    monkeypatch.setattr(programs, "tracking_heads", lambda *_: [])
    assert programs.put_back(None, TASK) is None
