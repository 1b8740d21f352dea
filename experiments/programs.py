"""Is a real program followed?

A function becomes a trace: the straight line of the assignments that it executes.

    def gcd(a, b):                a = 12
        while b:                  b = 8
            a, b = b, a % b       a, b = b, a % b
        return a                  a, b = b, a % b
                                  assert (a) == 4

And a program that exchanges variables becomes a session in the vocabulary of the REPL traces. A
trained model reads it twice: alone, and with its state put back after each command (snap.py).

Finding. Alone one of the five stored models of S5 follows four programs to their ends, 666 to 1,000
commands. The others follow them for 2.1 to 6.9 times the 64 commands of their longest training
traces, and then lose the state. Training has random commands only, and runs of one; what a command
that comes again does to a model is the question of repeats.py. Put back after each command, every
print is right. A blind guess, which says of each variable what it holds most often, has 34 to 57%.

    trace(function, *args)                      the straight line, as text
    python -m experiments.programs              the table; --run makes what has no record
    python -m experiments.programs DIR FILE     each answer of a model, and the same table

DIR is experiments/results/models/linrnn-S5-seed0, FILE one of experiments/results/programs. The
file is EXECUTED, in a process of its own, for at most ten seconds, with few functions of Python.
That holds off mistakes and not malice: run no file that you have not read.

Source: "Grounding code understanding in step-by-step execution", section 2, which traces benchmarks
for pretrained language models.

Next: supervision.py.
"""

import ast
import builtins
import copy
import inspect
import multiprocessing
import sys
import textwrap
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np

from data import Parser, UserError, run
from eval import load, predict
from experiments import RESULTS, chapter, grid, record, records, span, table
from experiments.groups import points_moved
from experiments.snap import Snapped, fit_image, tracking_heads


# --- 1. From a function to a trace ----------------------------------------------------------------

def gcd(a, b):
    while b:
        a, b = b, a % b
    return a


def trace(function, *args, steps=20_000):
    """The straight line of function(*args), without if, for, while, def and return.

    Law: it passes its last line, `assert (RESULT) == VALUE`, in an empty namespace if the function
    needs no global names. It is executed here, and a text that does something else raises an error.
    A round of `for x in ...` is `x = VALUE`; what the function calls is executed, and not followed.
    A statement may take several lines, but no line holds two statements.
    Raises: UserError, FUNCTION:LINE ahead, for what cannot be made straight.
    """
    name = getattr(function, "__name__", repr(function))
    try:
        above = "\n" * (function.__code__.co_firstlineno - 1)  # so that each line has its number
        source = above + textwrap.dedent(inspect.getsource(function))
        definition = ast.parse(source).body[0]
    except (OSError, TypeError, AttributeError, SyntaxError) as error:
        raise UserError(f"{name} has no source that can be read: {error}") from None
    if not isinstance(definition, ast.FunctionDef):
        raise UserError(f"{name} is not written as `def {name}(...):`")
    statements = statements_by_line(name, definition)
    text = partial(ast.get_source_segment, source)
    here = sys._getframe()
    lines = []
    node = None  # the statement that runs now

    def follow(frame, event, _):
        """Python calls it ahead of each line, and at the call and the return."""
        nonlocal node
        if frame.f_back is not here:
            return None

        # The next line of one statement, or the next round of its comprehension, is no news: it is
        # written once, when it is over.
        after = statements.get(frame.f_lineno)
        if event == "line" and after is node:
            return follow

        if event == "call":
            lines.extend(f"{name} = {value!r}" for name, value in frame.f_locals.items())
        elif isinstance(node, WRITTEN):
            lines.append(text(node))
        elif isinstance(node, ast.For) and after is node.body[0]:  # one more round
            target = text(node.target)
            lines.append(f"{target} = {eval(target, {}, frame.f_locals)!r}")

        if len(lines) > steps:
            raise TimeoutError(f"still running after {steps:,} lines")
        if event == "line":
            node = after
        return follow

    copied = copy.deepcopy(args)  # the function may alter them
    before = sys.gettrace()  # that of a debugger
    sys.settrace(follow)
    try:
        value = function(*copied)
    finally:
        sys.settrace(before)

    result = text(node.value) if isinstance(node, ast.Return) and node.value else "None"
    straight = "\n".join([*lines, f"assert ({result}) == {value!r}\n"])
    check_straight(name, straight, function.__globals__)
    return straight


# Statements that a straight line keeps, and those that only say which one comes next. A function
# may have no others.
WRITTEN = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.Expr, ast.Import,
           ast.ImportFrom, ast.Assert)
DIRECTING = (ast.If, ast.For, ast.While, ast.Break, ast.Continue, ast.Pass, ast.Return)


def statements_by_line(name, definition):
    """The statement of a function that each of its lines belongs to.  Raises: UserError."""
    found = {}
    for node in ast.walk(definition):
        if not isinstance(node, ast.stmt) or node is definition:
            continue
        where = f"{name}:{node.lineno}"
        if not isinstance(node, WRITTEN + DIRECTING):
            raise UserError(f"{where}: {type(node).__name__} cannot be made straight: use "
                            "assignments, calls, if, for, while, break, continue and return")

        # Of `if`, `for` and `while` only the head is its own: all lines ahead of its body.
        body = getattr(node, "body", None)
        last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
        for line in range(node.lineno, last + 1):
            if line in found:
                raise UserError(f"{where}: two statements in line {line}: give each its own")
            found[line] = node

        # The head of a statement is not written, so it must not assign.
        for head in ("test", "iter"):
            for inner in ast.walk(getattr(node, head, ast.Pass())):
                if isinstance(inner, ast.NamedExpr) and not isinstance(node, WRITTEN):
                    raise UserError(f"{where}: `:=` in a head: assign in a line of its own")
    return found


def check_straight(name, straight, namespace):
    """Execute a straight line.  Raises: UserError if it does not do what the function did."""
    try:
        # optimize: under `python -O` its assertion would not be executed.
        exec(compile(straight, f"<trace of {name}>", "exec", optimize=0), {**namespace})
    except Exception as error:
        told = f"{type(error).__name__}: {error}".rstrip(": ")
        raise UserError(f"{name} cannot be made straight, since its lines alone do something else "
                        f"({told}). A call in the head of an if, for or while may have changed "
                        "something, or a value has no text that makes it again") from None


# --- 2. From a program to a session ---------------------------------------------------------------

# What a program file may call, beside print.
USABLE = {name: getattr(builtins, name) for name in (
    "abs all any bool dict divmod enumerate int len list map max min ord range reversed set sorted "
    "str sum tuple zip").split()}


def play(source, file, names):
    """The session of a program: its events are commands of its variables `names`, and prints.

    The variables belong to the file or to one of its functions. They begin as 1, 2, ..., n, and
    hold a permutation of these values after each line. All others may count and decide. An event is
    ("command", a permutation as in data.py) or ("print", (variable, value)), as numbers.
    Raises: UserError, FILE:LINE ahead.
    """
    start = [*range(1, len(names) + 1)]
    events = []
    home = None  # the frame of the variables, once all of them are set
    values = None  # those of the variables
    line = 0  # which runs now

    def follow(frame, *_):
        """What the last line has done to the variables becomes a command."""
        nonlocal home, values, line
        if frame.f_code.co_filename != file:
            return None

        now = [frame.f_locals.get(name) for name in names]
        if home is None and now == start:
            home, values = frame, now
        if frame is home and now != values:
            if not all(value in now for value in start):
                raise ValueError(f"{', '.join(names)} may only be exchanged, as in a, b = b, a")
            events.append(("command", [values.index(value) for value in now]))
            values = now
        line = frame.f_lineno
        return follow

    def note(*said):
        """Stands for print in the program: print('a', a) becomes an event."""
        known = [*zip(names, values or [])]
        if said not in known:
            raise ValueError("print one variable, as in print('a', a), in a line after that in "
                             f"which {', '.join(names)} are set to {start} or exchanged")
        events.append(("print", (known.index(said), said[1])))

    try:
        code = compile(source, file, "exec")
        sys.settrace(follow)
        exec(code, {"__builtins__": {**USABLE, "print": note}})
        if "print" not in dict(events):
            raise ValueError("the program ends without a print('a', a)")
    except Exception as error:
        line = getattr(error, "lineno", line)  # a SyntaxError has its own
        raise UserError(f"{file}:{line}: {type(error).__name__}: {error}") from None
    finally:
        sys.settrace(None)
    return events


def play_apart(file, names, seconds=10):
    """play() of a program file, in a process of its own."""
    try:
        source = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is no text: {error}") from None
    with multiprocessing.Pool(1) as pool:  # its end ends the process
        try:
            return pool.apply_async(play, [source, str(file), names]).get(seconds)
        except multiprocessing.TimeoutError:
            raise UserError(f"{file}: still running after {seconds} seconds") from None


# --- 3. What a model makes of it ------------------------------------------------------------------

def write_session(task, events):
    """The session of these events: its tokens [T], the places of the values, and a row a print.

    Raises: UserError for a command that the task cannot write, or that is none of its group.
    """
    tokens = [*task.start_tokens()]
    places, prints = [], []
    for number, (kind, what) in enumerate(events):
        if kind == "command":
            moved = int(points_moved(np.array(what)))
            if task.commands == "swap" and moved != 2:
                raise UserError(f"command {number + 1} moves {moved} variables, and this model "
                                "reads exchanges of two")
            if task.group.letter != "S" and what not in task.group.elements.tolist():
                raise UserError(f"command {number + 1} is none of {task.group.name}, which this "
                                "model was trained on")
            tokens.extend(task.command_tokens(np.array(what)))
        else:
            variable, value = what
            tokens.extend(task.reveal_tokens(np.array(variable), np.array(value - 1)))
            places.append(len(tokens) - 2)  # the last token but one of its line
            prints.append({"commands": number - len(prints), "print": task.names[variable],
                           "value": str(value)})
    return np.array(tokens), np.array(places), prints


def blind(prints):
    """Right answers of the best guess that knows the variable only, such as "b is always 2"."""
    counts = Counter((row["print"], row["value"]) for row in prints)
    best = {name: max(counts[name, value] for _, value in counts) for name, _ in counts}
    return sum(best.values())


def read_twice(folder, file):
    """What a model answers at each print, once it has read the true session up to there.

    Returns: a row for each print; a row for the table.
    Raises: Untracked if the model has no state that can be put back.
    """
    task, model = load(folder)
    tokens, places, prints = write_session(task, play_apart(file, task.names))
    image, _ = fit_image(model, task, tracking_heads(model, task))

    row = {"commands": prints[-1]["commands"], "prints": len(prints), "blind": blind(prints)}
    for name, reader in [("alone", model), ("put back", Snapped(model, task, image))]:
        said = predict(reader, tokens[None, :-1])[0, places - 1]
        for shown, token in zip(prints, said):
            shown[name] = task.vocab[token]
        wrong = [shown["commands"] for shown in prints if shown[name] != shown["value"]]
        row[name] = {"right": len(prints) - len(wrong), "first_wrong": min(wrong, default=None)}
    return prints, row


# --- 4. The study ---------------------------------------------------------------------------------

CELLS = grid(program=["bubble_sort", "card_trick", "josephus", "riffle_shuffle"], seed=range(5))


def make_missing():
    for cell in CELLS:
        if not records("programs", **cell):
            folder = RESULTS / "models" / f"linrnn-S5-seed{cell['seed']}"
            _, row = read_twice(folder, RESULTS / "programs" / f"{cell['program']}.py")
            record("programs", cell | row)


def right(reader):
    """A column of a table: prints that are right, in %."""
    return lambda rows: span([100 * row[reader]["right"] / row["prints"] for row in rows])


def print_rows(title, rows):
    table(title, rows, ["program", "commands", "prints"], {
        "alone, first wrong after": lambda rows: span(
            [row["alone"]["first_wrong"] for row in rows
             if row["alone"]["first_wrong"] is not None], 0),
        "alone": right("alone"), "put back": right("put back"),
        "blind guess": lambda rows: span([100 * row["blind"] / row["prints"] for row in rows])})


def show():
    print(f"The trace of gcd(12, 8)\n\n{trace(gcd, 12, 8)}")
    print_rows("Four programs, read by five models of S5: prints right in %", records("programs"))


def of_file(argv):
    """What `python -m experiments.programs DIR FILE` does."""
    parser = Parser(prog="python -m experiments.programs", description="Follow a program.")
    parser.add_argument("DIR", help="a run folder, made by train.py")
    parser.add_argument("FILE", help="a program that exchanges variables; it is executed")
    args = parser.parse_args(argv)

    prints, row = read_twice(args.DIR, args.FILE)
    table("Each print, and the answers of the model", prints, [*prints[0]], {})
    print_rows("Prints right in %", [{"program": Path(args.FILE).stem, **row}])


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if {*argv} - {"--run", "-h", "--help"}:
        return of_file(argv)
    chapter(__doc__, show, make_missing, {"DIR FILE": of_file}, argv)  # DIR FILE: for its help


if __name__ == "__main__":
    run(main)
