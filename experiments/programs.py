"""Is a real program followed?

A function becomes a trace: the straight line of the assignments that it executes.

    def gcd(a, b):                a = 12
        while b:                  b = 8
            a, b = b, a % b       a, b = b, a % b
        return a                  a, b = b, a % b
                                  assert (a) == 4

And a program that exchanges variables becomes a session in the vocabulary of the REPL traces. A
trained model reads it twice: alone, and with its state put back after each command (snap.py).

Finding. Alone the five stored models of S5 follow four programs for 2.2 to 5.9 times the 64
commands of their longest training traces, and then lose the state. Put back after each command,
every print is right. A blind guess, which says of each variable what it holds most often, has 34 to
57% of them.

    trace(function, *args)                      the straight line, as text
    python -m experiments.programs              the recorded runs
    python -m experiments.programs RUN FILE     the answers of a model, and of the guess

RUN is experiments/results/models/linrnn-S5-seed0, FILE one of experiments/results/programs.

A program file is EXECUTED, in a process of its own, for at most 20,000 statements and a minute. It
has no import, no class, no `try`, no attribute with two underscores, and no function such as open.
That holds off mistakes and not malice: run no file that you have not read. trace() executes its
function in this process.

Source: "Grounding code understanding in step-by-step execution", section 2, which traces benchmarks
for pretrained language models.

Next: supervision.py.
"""

import argparse
import ast
import builtins
import contextlib
import copy
import inspect
import io
import itertools
import multiprocessing
import sys
import traceback
from collections import Counter
from pathlib import Path

import numpy as np

from data import UserError, one_line_errors, parse, run
from eval import log_probabilities
from experiments import records
from experiments.snap import Snapped, Untracked, fit_image, load_repl_run, tracking_heads

STEPS = 20_000  # statements that a program may execute
FOLLOWED = "<followed>"  # stands for the file name in code that is followed
# The functions of Python that a program file may call, beside print.
USABLE = """abs all any ascii bin bool bytearray bytes chr complex dict divmod enumerate filter
    float format frozenset hex int isinstance iter len list map max min next oct ord pow range repr
    reversed round set slice sorted str sum tuple zip""".split()
USABLE = {name: getattr(builtins, name) for name in USABLE}


# --- 1. A program is followed statement by statement ----------------------------------------------

def names_in(node, context):
    """The variables that a node reads (ast.Load) or sets (ast.Store)."""
    return {part.id for part in ast.walk(node)
            if isinstance(part, ast.Name) and isinstance(part.ctx, context)}


def own_part(node):
    """A statement, or what stands ahead of its block: the condition of `while`. None for others."""
    match node:
        case ast.If() | ast.While() | ast.Assert():
            return node.test
        case ast.Expr() | ast.Return():
            return node.value
        case ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.Delete():
            return node
    return None


class Call:
    """A function that is being executed, or the file itself.

    In the straight line the second call of gcd has the variables gcd1_a and gcd1_b, and its result
    is gcd1. The variables of the outermost function keep their names.
    """

    def __init__(self, frame, result, prefix):
        self.frame, self.result, self.prefix = frame, result, prefix
        self.node = None  # the statement that it executes
        self.results = []  # of calls in this statement, as they ended: (function, variable)


class Follower:
    """Python executes a program, and stops before each statement.

    Python tells lines, not statements, to sys.settrace. So the program is written anew first, each
    statement in a line of its own.
    """

    def __init__(self, source, file, steps):
        self.source, self.file, self.limit = source, file, steps
        self.steps, self.numbers = 0, Counter()
        self.calls = []  # the innermost one is at the end
        try:
            compile(source, file, "exec")  # executes nothing
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            self.refuse(line, f"{type(error).__name__}: {error.args[0]}")

        as_it_stands = ast.parse(source)
        self.tree = ast.parse(ast.unparse(as_it_stands))
        # Line of the new text: the statement, `except` or `case` in the file that has this line.
        self.statements = {}
        for new, old in zip(ast.walk(self.tree), ast.walk(as_it_stands)):
            if hasattr(new, "lineno"):
                self.statements.setdefault(new.lineno, old)  # the outer nodes come first

    def refuse(self, line, why):
        raise UserError(f"{self.file}:{line}: {why}")

    def follow(self, first, function, *args):
        """function(*args), which begins at line `first`. Whatever it raises is told in one line."""
        before = sys.gettrace()
        sys.settrace(self.on_event)
        try:
            return function(*args)
        except UserError:
            raise
        except Exception as error:
            for frame, line in traceback.walk_tb(error.__traceback__):
                if frame.f_code.co_filename == FOLLOWED:
                    first = self.statements[line].lineno
            self.refuse(first, f"{type(error).__name__}: {' '.join(str(error).split())}")
        finally:
            sys.settrace(before)

    def on_event(self, frame, event, value):
        """Python calls this, as sys.settrace wants it, at each call, line and return."""
        code = frame.f_code
        # A comprehension and a lambda have frames of their own.
        inner = code.co_name.startswith("<") and code.co_name != "<module>"
        if code.co_filename != FOLLOWED or inner:
            return None

        if event == "call":
            result = f"{code.co_name}{self.numbers[code.co_name]}"
            self.numbers[code.co_name] += 1
            self.calls.append(Call(frame, result, f"{result}_" if self.calls else ""))
        elif event == "line":
            call, node = self.calls[-1], self.statements.get(frame.f_lineno)
            self.steps += 1
            if self.steps > self.limit:
                line = (call.node or node).lineno
                self.refuse(line, f"still running after {self.limit:,} statements")
            if node is not call.node:  # else a comprehension goes on, or the file is empty
                self.done(call)
                call.node = node
        elif event == "return":
            self.done(self.calls[-1], value)
            self.ended = self.calls.pop()
            if self.calls:
                self.calls[-1].results.append((code.co_name, self.ended.result))
        return self.on_event

    def done(self, call, value=None):
        """call.node is executed; None stands for the arguments. value: what a function returns."""


# --- 2. From a function to a trace ----------------------------------------------------------------

def literal(value):
    """The text from which Python reads an equal value, or None if there is no such text."""
    with contextlib.suppress(Exception):
        if hasattr(value, "__next__"):  # a copy is read to its end
            return f"iter({[*itertools.islice(copy.deepcopy(value), STEPS)]})"
        if eval(repr(value), {"__builtins__": USABLE}) == value:
            return repr(value)


class Renamed(ast.NodeTransformer):
    """A statement of a call, in the names of the straight line.

    The variables of a function have a prefix. In the place of a call stands its result.
    """

    def __init__(self, call):
        code = call.frame.f_code
        self.own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        self.prefix, self.results = call.prefix, [*call.results]

    def visit_Name(self, node):
        if node.id in self.own:
            node.id = self.prefix + node.id
        return node

    def visit_Call(self, node):
        self.generic_visit(node)  # calls within this one have ended before it
        for name, result in self.results:
            if name == getattr(node.func, "id", None):
                self.results.remove((name, result))
                return ast.Name(result, ast.Load())
        return node


class StraightLine(Follower):
    """Writes each assignment down that is executed, in `lines`.

    Law: after each of them the variables in `space`, in which the lines are executed, too, have the
    values that they have in the program.

    A line that would not do the same again is replaced by the values that it gives to variables.
    So one round of `for number in numbers` is `number = 7`. And so is a line in whose middle a
    function alters what was read before.
    """

    def __init__(self, source, file, steps, constants):
        super().__init__(source, file, steps)
        self.constants = constants
        self.lines, self.space = [], {}

    def done(self, call, value=None):
        """Writes down what call.node has done: the line as it stands in the file, or values."""
        # The variables as text. A function, for example, has none: None.
        held = {call.prefix + name: literal(found) for name, found in call.frame.f_locals.items()}
        if isinstance(call.node, ast.Return):
            held[call.result] = literal(value)
        held = {name: text for name, text in held.items() if text}

        changed = self.others(held)
        line = self.text(call, changed)
        if line and self.does(line, held):
            self.lines.append(line)
        else:
            # A line that failed half-way may have altered other variables, too.
            changed |= self.others(held)
            for name in held:
                if name in changed:
                    self.write(f"{name} = {held[name]}")
        call.results.clear()

    def others(self, held):
        """The variables that have another value in `space`."""
        return {name for name, text in held.items()
                if name not in self.space or literal(self.space[name]) != text}

    def does(self, line, held):
        """Whether the variables have these values once this line is executed."""
        try:
            exec(line, self.space)
        except Exception:
            return False
        return not self.others(held)

    def write(self, line):
        exec(line, self.space)
        self.lines.append(line)

    def text(self, call, changed):
        """The line for call.node, or None. A condition has one if it alters something."""
        node = own_part(call.node)
        if node is None or not (changed or isinstance(node, ast.stmt)):
            return None
        if any(isinstance(part, ast.Lambda) for part in ast.walk(node)):
            return None

        renamed = Renamed(call).visit(copy.deepcopy(node))
        # A constant of the file is written ahead of the first line that reads it.
        for name in sorted(names_in(renamed, ast.Load) & {*self.constants} - {*self.space}):
            constant = literal(self.constants[name])
            if constant:
                self.write(f"{name} = {constant}")

        # The text of the file is easier to read than that of ast: a, b = (b, a % b).
        text = ast.get_source_segment(self.source, node)
        if ast.dump(renamed) != ast.dump(node) or "\n" in text:
            text = ast.unparse(renamed)
        return f"{call.result} = {text}" if isinstance(call.node, ast.Return) else text


def trace(function, *args, steps=STEPS):
    """The straight line of function(*args), a program without if, for, while, def and lambda.

    Law: in an empty namespace it passes its last line, `assert (RESULT) == VALUE`, and VALUE is
    what the function returns. Both are checked here.

    The function is executed on copies of the arguments; the functions of its file are followed.
    Raises: UserError, FILE:LINE ahead, for what the function raises, for a result that cannot be
    read back from its repr, and for more than `steps` statements.
    """
    source, first = inspect.findsource(function)
    straight = StraightLine("".join(source), inspect.getsourcefile(function), steps,
                            function.__globals__)

    # The functions of the file once more, from the text that has a line for each statement.
    plain = [node for node in ast.walk(straight.tree)
             if isinstance(node, ast.FunctionDef) and not node.decorator_list]
    wanted = [node for node in plain if straight.statements[node.lineno].lineno == first + 1]
    if not wanted or function.__closure__:
        straight.refuse(first + 1,
                        "not a plain function, or one with variables of another function")
    functions = [node for node in plain if node in straight.tree.body]
    space = dict(function.__globals__)
    exec(compile(ast.Module(functions + wanted, []), FOLLOWED, "exec"), space)

    with contextlib.redirect_stdout(io.StringIO()):
        value = literal(straight.follow(first + 1, space[wanted[0].name], *copy.deepcopy(args)))
        if value is None:
            straight.refuse(first + 1, "the result cannot be read back from its repr")

        # The last line may be `gcd0 = a`. Then the assertion is of a.
        result, last = "None", straight.ended
        if isinstance(last.node, ast.Return):
            result = straight.lines.pop().removeprefix(f"{last.result} = ")
        text = "\n".join([*straight.lines, f"assert ({result}) == {value}\n"])
        exec(text, {})
        if function(*copy.deepcopy(args)) != eval(value):
            straight.refuse(first + 1, "the function itself has another result")
    return text


# --- 3. From a program to a session ---------------------------------------------------------------

class Session(Follower):
    """Follows a whole file and listens to the variables `names`: the session is in `events`.

    An event is {"line", "command"}, a permutation of all variables as in data.py, or {"line",
    "asked", "value", "commands"}. The variables belong to the file or to one of its functions. They
    begin as 1, 2, ..., n, and hold a permutation of these values after each statement. All other
    variables may count and decide.
    """

    def __init__(self, source, file, steps, names):
        super().__init__(source, file, steps)
        self.names, self.start = [*names], [*range(1, len(names) + 1)]
        self.events = []
        self.home = None  # where the variables are, once all of them are set
        self.values = None  # those that they had before this statement

    def done(self, call, value=None):
        """What a statement has done to the variables of the session becomes an event."""
        values = [call.frame.f_locals.get(name) for name in self.names]
        part = own_part(call.node)
        named = part is not None and names_in(part, ast.Store) & {*self.names}

        begins = self.home is None and named and None not in values
        goes_on = call.frame is self.home and (named or values != self.values)
        permuted = all(value in values for value in self.start)
        if begins and values != self.start or goes_on and not permuted:
            listed = ", ".join(self.names)
            self.refuse(call.node.lineno, f"{listed} must begin as {self.start}, and then they may "
                        "only be exchanged, as in a, b = b, a")
        if goes_on:
            command = [self.values.index(value) for value in values]
            self.events.append({"line": call.node.lineno, "command": command})
        if begins or goes_on:
            self.home, self.values = call.frame, values

    def print(self, *said, **options):
        """Stands for print in the program: print('a', a) becomes an event, all else is refused."""
        line = self.calls[-1].node.lineno
        known = list(zip(self.names, self.values or []))
        if said not in known or options:
            self.refuse(line, "print one variable, after all of them are set, as in print('a', a)")
        commands = sum("command" in event for event in self.events)
        self.events.append({"line": line, "asked": known.index(said), "value": said[1],
                            "commands": commands})


def play(source, file, names, steps=STEPS):
    """The events of a program. Raises: UserError."""
    session = Session(source, file, steps, names)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Try) or getattr(node, "attr", "").startswith("__"):
            shown = ast.unparse(node).splitlines()[0]
            session.refuse(node.lineno, f"`{shown}` cannot be followed")

    space = {"__builtins__": {**USABLE, "print": session.print}}
    session.follow(1, exec, compile(session.tree, FOLLOWED, "exec"), space)
    if not any("asked" in event for event in session.events):
        session.refuse(len(source.splitlines()), "the program ends without a print('a', a)")
    return session.events


def play_apart(file, names, seconds=60):
    """The events of a program file, executed in a process of its own. Raises as play; OSError."""
    source = Path(file).read_text(encoding="utf-8", errors="replace")
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # its end ends the process
        pool.apply(literal, [0])  # the process has made its imports, and the clock starts
        answer = pool.apply_async(play, [source, file, names])
        try:
            return answer.get(seconds)
        except multiprocessing.TimeoutError:
            raise UserError(f"{file}: still running after {seconds} seconds") from None


# --- 4. What a model makes of it ------------------------------------------------------------------

def write_session(task, events):
    """The session of these events: tokens int64 [1, T], and bool [1, T], True at the values."""
    tokens, values = [*task.start_tokens()], []
    for event in events:
        if "command" in event:
            tokens += [*task.command_tokens(np.array(event["command"]))]
        else:
            asked, value = np.array(event["asked"]), np.array(event["value"] - 1)
            tokens += [*task.reveal_tokens(asked, value)]
            values.append(len(tokens) - 2)  # the last token but one of its line
    return np.array([tokens]), np.isin([range(len(tokens))], values)


def answers(model, task, events):
    """The model's answer at each print, after it has read the true session up to there."""
    tokens, reveals = write_session(task, events)
    log_q = log_probabilities(model, tokens[:, :-1], reveals[:, 1:])
    return [task.vocab[token] for token in log_q[0].argmax(-1)]


def blind(prints):
    """Right answers of the best guess that knows the variable only, such as "b is always 2"."""
    counts = np.zeros((26, 27), int)  # of each variable and value
    for event in prints:
        counts[event["asked"], event["value"]] += 1
    return counts.max(1).sum()


def print_records():
    """The rows of results/programs.jsonl: a line for each program and each model."""
    print("                                    alone:   right   right,         right,\n"
          "program         seed  commands  right at first  prints  put back  blind guess")
    for row in sorted(records("programs"), key=lambda row: (row["program"], row["seed"])):
        of = row["prints"]
        print(f"{row['program']:15}{row['seed']:5}{row['commands']:10,}"
              f"{row['model']['first_wrong']:16}{row['model']['right'] / of:8.1%}"
              f"{row['put back']['right'] / of:9.1%}{row['blind'] / of:14.1%}")


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.programs",
                                     description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("run", nargs="?", help="a run folder, made by train.py (default: show the records)")
    add("file", nargs="?", help="a program that exchanges variables; it is executed")
    args = parse(parser, argv)
    if args.run is None:
        return print_records()
    if args.file is None:
        parser.error("which program? RUN is followed by FILE")

    with one_line_errors(parser):
        _, task, model = load_repl_run(args.run)
        events = play_apart(args.file, task.names)
        known = task.alphabet.tolist()
        for event in events:
            if "command" in event and event["command"] not in known:
                raise UserError(f"{args.file}:{event['line']}: no command of this model, which "
                                f"knows --commands {task.commands} of {task.group.name}")

    found = {"model": answers(model, task, events)}
    try:
        image, _ = fit_image(model, task, tracking_heads(model, task))
        found["put back"] = answers(Snapped(model, task, image), task, events)
    except Untracked as error:
        print(f"not put back: {error}")

    prints = [event for event in events if "asked" in event]
    for event, *answered in zip(prints, *found.values()):
        said = "; ".join(f"{reader}: {answer}" for reader, answer in zip(found, answered))
        mark = "" if {*answered} == {str(event["value"])} else "   WRONG"
        print(f"{task.names[event['asked']]} {event['value']}    ({said}; {event['commands']} "
              f"commands so far){mark}")
    print(f"{prints[-1]['commands']:,} commands; a blind guess has {blind(prints)} prints right")
    for reader, said in found.items():
        wrong = [event["commands"] for event, answer in zip(prints, said)
                 if answer != str(event["value"])]
        print(f"{reader}: {len(prints) - len(wrong)} of {len(prints)} prints right; commands "
              f"before an error: {min(wrong, default=None)}")


if __name__ == "__main__":
    run(main)
