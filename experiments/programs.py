"""Is a real program followed?

A function becomes a trace: the straight line of the assignments that it executes.

    def gcd(a, b):                a = 12
        while b:                  b = 8
            a, b = b, a % b       a, b = b, a % b
        return a                  a, b = b, a % b
                                  assert (a) == 4

And a program that exchanges variables becomes a session in the vocabulary of the REPL traces. A
trained model reads it twice: alone, and with its state put back after each command (snap.py).

Finding (results/programs.jsonl). Four programs of 666 to 1,000 commands were read by the five
stored models of S5. Alone a model is right for 2.2 to 5.9 times the 64 commands of its longest
training traces, and then loses the state. Put back after each command, every print is right, in all
programs and on all seeds; a blind guess, which says of each variable what it holds most often in
these prints, has 34 to 57% of them.

    trace(function, *args)                      the straight line, as text
    python -m experiments.programs              the recorded runs, a row each
    python -m experiments.programs experiments/results/models/linrnn-S5-seed0 \
        experiments/results/programs/bubble_sort.py             (10 seconds)

A program file is EXECUTED, in a process of its own, for at most 20,000 statements and a minute. It
has no import, no class, no attribute with two underscores, and no function such as open. That holds
off mistakes and not malice: run no file that you have not read. trace() executes its function in
this process.

Source: "Grounding code understanding in step-by-step execution", section 2. That work traces the
benchmarks CRUXEval and MBPP for pretrained language models; neither is here.

Next: supervision.py.
"""

import argparse
import ast
import builtins
import contextlib
import copy
import inspect
import io
import multiprocessing
import shlex
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from data import UserError, one_line_errors, parse, run
from eval import log_probabilities
from experiments import record, records
from experiments.snap import Snapped, Untracked, fit_image, load_repl_run, tracking_heads

STEPS = 20_000  # statements that a program may execute
# The functions of Python that a program may call. All of their values have built-in types, so the
# methods that alter a value are known, too.
USABLE = """abs all any ascii bin bool bytearray bytes chr complex dict divmod enumerate filter
    float format frozenset hex int isinstance iter len list map max min next oct ord pow range repr
    reversed round set slice sorted str sum tuple zip""".split()
USABLE = {name: getattr(builtins, name) for name in USABLE}
ALTERING = """add append clear difference_update discard extend insert intersection_update pop
    popitem remove reverse setdefault sort symmetric_difference_update update""".split()
# A call inside one of these is executed sometimes, or often, or in an order of its own.
NO_PLACE_FOR_CALLS = (ast.BoolOp, ast.IfExp, ast.Dict, ast.NamedExpr, ast.GeneratorExp,
                      ast.ListComp, ast.SetComp, ast.DictComp, ast.JoinedStr)


# --- 1. A program is executed statement by statement ----------------------------------------------

def names_in(node, *contexts):
    """The variables that a node reads (ast.Load), sets (ast.Store) or deletes (ast.Del)."""
    return {part.id for part in ast.walk(node)
            if isinstance(part, ast.Name) and isinstance(part.ctx, contexts)}


class Execution:
    """Executes a program statement by statement, and writes each assignment down as it stands.

    Law: `lines` is a straight line, and `space` is the namespace in which it was executed.

    Control flow is followed and not written. A `for` loop becomes forloop0 = iter(...), and
    v = next(forloop0) in each round. A condition, or a line that is only an expression, is written
    if it alters something, as `stack.pop()` does. A call of a function of the same file is
    unrolled, and so is a recursion: the second call of gcd has the variables gcd1_a and gcd1_b, and
    the result gcd1.
    """

    def __init__(self, source, file, steps):
        self.source, self.file, self.limit = source, file, steps
        self.lines, self.steps, self.line = [], 0, 1
        self.prefix = ""  # of the variables of the function that is being executed
        self.space = {"__builtins__": {**USABLE, "print": lambda *_, **__: None},
                      "__name__": "__main__"}
        with self.naming_the_line():
            self.tree = ast.parse(source)
            compile(source, file, "exec")  # finds a `return` outside a function; executes nothing

        self.functions = {node.name: node for node in self.tree.body
                          if isinstance(node, ast.FunctionDef)}
        self.numbers = Counter()

    def refuse(self, why):
        raise UserError(f"{self.file}:{self.line}: {why}")

    @contextlib.contextmanager
    def naming_the_line(self):
        """Whatever the program raises is told in one line."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if self.steps == 0:  # the file is no Python
                self.line = getattr(error, "lineno", None) or self.line
            told = " ".join(str(getattr(error, "msg", error)).split())
            self.refuse(f"{type(error).__name__}: {told}")

    # Statements and conditions

    def run(self, text):
        """Executes a line and, if it did not fail, writes it down."""
        exec(text, self.space)
        self.lines.append(text)

    def block(self, nodes):
        """Executes statements up to one that leaves the block. Returns that one, or None."""
        for node in nodes:
            left = self.statement(node)
            if left:
                return left

    def statement(self, node):
        self.line = node.lineno
        self.steps += 1
        if self.steps > self.limit:
            self.refuse(f"still running after {self.limit:,} statements")

        match node:
            case ast.Break() | ast.Continue() | ast.Return():
                return node
            case ast.If():
                return self.block(node.body if self.holds(node.test) else node.orelse)
            case ast.For() | ast.While():
                for _ in self.rounds(node):
                    left = self.block(node.body)
                    if isinstance(left, ast.Return):
                        return left
                    if isinstance(left, ast.Break):
                        return None
                return self.block(node.orelse)
            case ast.Assert():
                if not self.holds(node.test):
                    self.refuse("the assertion fails")
            case ast.Expr():
                self.value(node.value)
            case ast.Assign() | ast.AugAssign() | ast.Delete() | ast.AnnAssign(value=ast.expr()):
                self.run(self.written(node))
                self.executed(node)
            case ast.Pass() | ast.AnnAssign():
                pass
            case _:
                self.refuse(f"`{ast.unparse(node).split()[0]}` cannot be traced")

    def rounds(self, node):
        """Yields once for each round of a loop."""
        if isinstance(node, ast.While):
            while self.holds(node.test):
                yield
            return

        loop = self.fresh("forloop")
        self.run(f"{loop} = iter({self.written(node.iter)})")
        target = self.written(node.target)
        while True:
            self.line = node.lineno
            try:
                self.run(f"{target} = next({loop})")
            except StopIteration:
                return
            self.executed(node.target)
            yield

    def holds(self, test):
        """Whether a condition holds. `and`, `or` and `not` are followed operand by operand."""
        match test:
            case ast.BoolOp(op=ast.And()):
                return all(self.holds(part) for part in test.values)
            case ast.BoolOp(op=ast.Or()):
                return any(self.holds(part) for part in test.values)
            case ast.UnaryOp(op=ast.Not()):
                return not self.holds(test.operand)
        return bool(self.value(test))

    def value(self, node):
        """The value of an expression, which is written down only if it alters something."""
        self.line = node.lineno
        text = self.written(node)
        alters = False
        for part in ast.walk(ast.parse(text)):
            # Whoever reads an iterator uses it up: next(x), list(x), 3 in x.
            iterator = hasattr(self.space.get(getattr(part, "id", None)), "__next__")
            method = getattr(part, "attr", None) in ALTERING
            alters |= iterator or method or isinstance(part, ast.NamedExpr)

        value = eval(text, self.space)
        if alters:
            self.lines.append(text)
        self.executed(node)
        return value

    def executed(self, node):
        """Called after each assignment, each condition, and each round of `for`; for Session."""

    # The text of a line, and the functions that it calls

    def fresh(self, stem):
        """stem0, stem1, ...: a name that does not stand in the file."""
        self.numbers[stem] += 1
        name = f"{stem}{self.numbers[stem] - 1}"
        return self.fresh(stem) if name in self.source else name

    def written(self, node):
        """The text of a node, after the calls in it have been unrolled."""
        for part in ast.walk(node):
            hidden = getattr(part, "attr", "").startswith("__")
            if hidden or isinstance(part, (ast.Lambda, ast.Yield, ast.YieldFrom)):
                self.refuse(f"`{ast.unparse(part)}` cannot be traced")
        if self.calls(node):
            return ast.unparse(Lift(self, node).visit(copy.deepcopy(node)))

        text = ast.get_source_segment(self.source, node)  # None in a function that was renamed
        # A tuple and a := stand in the file without the brackets that they need elsewhere.
        if text is None or "\n" in text or isinstance(node, (ast.Tuple, ast.NamedExpr)):
            text = ast.unparse(node)
        return text

    def calls(self, node):
        """The calls of functions of the file in a node."""
        return [part for part in ast.walk(node) if isinstance(part, ast.Call)
                and isinstance(part.func, ast.Name) and part.func.id in self.functions]

    def call(self, call):
        """Unrolls a call of a function of the file. Returns the node that stands for its result."""
        function = copy.deepcopy(self.functions[call.func.id])
        defaults = function.args.defaults
        names = [argument.arg for argument in function.args.posonlyargs + function.args.args]
        given = dict(zip(names, call.args)) | {word.arg: word.value for word in call.keywords}
        fits = len(given) == len(call.args) + len(call.keywords)
        given |= dict(zip(names[::-1], defaults[::-1])) | given
        constant = all(isinstance(value, (ast.Constant, ast.UnaryOp)) for value in defaults)
        odd = [*function.decorator_list, *function.args.kwonlyargs, function.args.vararg,
               function.args.kwarg]
        if not fits or {*given} != {*names} or not constant or any(odd):
            self.refuse(f"{function.name}() does not fit its call, or it has a decorator, *, ** or "
                        "a default that is no constant")

        result = self.fresh(function.name)
        caller = self.prefix, self.line
        self.prefix = f"{result}_"
        for name, value in given.items():
            self.run(f"{self.prefix}{name} = {ast.unparse(value)}")

        # The variables of the function have the prefix of this call.
        own = names_in(function, ast.Store, ast.Del) | {*names}
        for part in ast.walk(function):
            part.end_lineno = None  # the text of the file is no longer that of the node
            if isinstance(part, ast.Name) and part.id in own:
                part.id = self.prefix + part.id

        found = ast.Constant(None)
        left = self.block(function.body)
        if left and left.value:
            self.run(f"{result} = {self.written(left.value)}")
            found = ast.Name(result, ast.Load())
        self.prefix, self.line = caller
        return found


class Lift(ast.NodeTransformer):
    """Unrolls each call of a function of the file, and puts its result in its place.

    What Python computes before such a call is kept in a variable: the call may alter it.
    """

    def __init__(self, execution, node):
        self.execution = execution
        self.to_come = len(execution.calls(node))

    def visit(self, node):
        calls = self.execution.calls(node)
        place = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
        in_place = isinstance(node, ast.AugAssign) and not isinstance(node.target, ast.Name)
        chain = isinstance(node, ast.Compare) and len(node.ops) > 1
        if calls and (place or in_place or chain or isinstance(node, NO_PLACE_FOR_CALLS)):
            self.execution.refuse(f"{calls[0].func.id}() must be called in a line of its own")

        if node in calls:
            self.to_come -= 1
        through = isinstance(node, (ast.Starred, ast.keyword, ast.Attribute, ast.Slice))
        if calls or through:
            node = self.generic_visit(node)
        if node in calls:
            return self.execution.call(node)

        stays = place or through or isinstance(node, (ast.Name, ast.Constant))
        if self.to_come and isinstance(node, ast.expr) and not stays:
            kept = self.execution.fresh("kept")
            self.execution.run(f"{kept} = {ast.unparse(node)}")
            return ast.Name(kept, ast.Load())
        return node


# --- 2. From a function to a trace ----------------------------------------------------------------

def literal(value):
    """The repr of a value if Python reads an equal value from it, or else None."""
    with contextlib.suppress(Exception):
        if eval(repr(value), {"__builtins__": USABLE}) == value:
            return repr(value)


def trace(function, *args, steps=STEPS):
    """The straight line of function(*args), a program without if, for, while, def and lambda.

    Law: in an empty namespace it passes its last line, `assert (RESULT) == VALUE`, and VALUE is
    what the function returns. Both are checked here.

    Arguments, and constants of the file, are copied through repr: the function alters none of them.
    Raises: UserError, FILE:LINE ahead, for import, lambda, class, try, with, raise, yield, a
    function in a function, built-in functions not in USABLE, and more than `steps` statements.
    """
    source, first = inspect.findsource(function)
    execution = Execution("".join(source), inspect.getsourcefile(function), steps)
    execution.line = first + 1
    nodes = [node for node in ast.walk(execution.tree)
             if isinstance(node, ast.FunctionDef) and node.lineno == first + 1]
    if not nodes or function.__closure__:
        execution.refuse("not a plain function, or one with variables of another function")

    given = inspect.signature(function).bind(*args)
    given.apply_defaults()
    own = names_in(nodes[0], ast.Store, ast.Del) | {*given.arguments}
    constants = {}
    for name in sorted(names_in(execution.tree, ast.Load) & {*function.__globals__} - own):
        text = literal(function.__globals__[name])
        if text:
            constants[name] = text
            execution.space[name] = eval(text)

    with execution.naming_the_line(), contextlib.redirect_stdout(io.StringIO()):
        for name, value in given.arguments.items():
            if literal(value) is None:
                execution.refuse(f"the argument {name} cannot be read back from its repr")
            execution.run(f"{name} = {literal(value)}")
        left = execution.block(nodes[0].body)
        result = execution.written(left.value) if left and left.value else "None"
        value = literal(eval(result, execution.space))
        execution.line = first + 1
        if value is None:
            execution.refuse("the result cannot be read back from its repr")

        straight = "\n".join([*execution.lines, f"assert ({result}) == {value}\n"])
        for name in sorted({*constants} & names_in(ast.parse(straight), ast.Load), reverse=True):
            straight = f"{name} = {constants[name]}\n{straight}"
        exec(straight, {})
        if function(*copy.deepcopy(args)) != eval(value):
            execution.refuse("the function itself has another result")
    return straight


# --- 3. From a program to a session ---------------------------------------------------------------

class Session(Execution):
    """Executes a whole file and listens to the variables `names`: the session is in `events`.

    An event is {"line", "command"}, a permutation of all variables as in data.py, or {"line",
    "asked", "value", "commands"}. The variables belong to the file or to one of its functions. They
    begin as 1, 2, ..., n, and hold a permutation of these values after each statement, as they do
    after `a, b = b, a`. All other variables may count and decide.
    """

    def __init__(self, source, file, steps, names):
        super().__init__(source, file, steps)
        self.names, self.start = [*names], [*range(1, len(names) + 1)]
        self.events, self.commands = [], 0
        self.home = None  # the prefix of the variables, once all of them are set

    def executed(self, node):
        """What a statement has done to the variables of the session becomes an event."""
        names = [self.prefix + name for name in self.names]
        changed = names_in(node, ast.Store, ast.Del) & {*names}
        if self.home not in (None, self.prefix) or not changed:
            return

        values = [self.space.get(name) for name in names]
        begun = self.home is not None
        right = all(value in values for value in self.start) and (begun or values == self.start)
        if not right and (begun or None not in values):
            self.refuse(f"{', '.join(self.names)} must begin as {self.start}, and then they may "
                        "only be exchanged, as in a, b = b, a")
        if begun:
            command = [self.values.index(value) for value in values]
            self.events.append({"line": self.line, "command": command})
            self.commands += 1
        elif right:
            self.home = self.prefix
        self.values = values

    def value(self, node):
        """Also: a print('a', a) becomes an event, and any other print is refused."""
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            self.line = node.lineno
            known = [f"print('{name}', {self.prefix}{name})" for name in self.names]
            if self.home != self.prefix or ast.unparse(node) not in known:
                self.refuse("print one variable, after all of them are set, as in print('a', a)")
            at = known.index(ast.unparse(node))
            self.events.append({"line": self.line, "asked": at, "value": self.values[at],
                                "commands": self.commands})
        return super().value(node)


def play(source, file, names, steps=STEPS):
    """The events of a program. Raises: UserError."""
    session = Session(source, file, steps, names)
    with session.naming_the_line():
        session.block([node for node in session.tree.body if not isinstance(node, ast.FunctionDef)])
    if not any("asked" in event for event in session.events):
        session.refuse("the program ends without a print('a', a)")
    return session.events


def play_apart(file, names, steps=STEPS, seconds=60):
    """The events of a program file, executed in a process of its own. Raises as play; OSError."""
    source = Path(file).read_text(encoding="utf-8", errors="replace")
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # its end ends the process
        pool.apply(literal, [0])  # the process has made its imports, and the clock starts
        answer = pool.apply_async(play, [source, file, names, steps])
        try:
            return answer.get(seconds)
        except multiprocessing.TimeoutError:
            raise UserError(f"{file}: still running after {seconds} seconds") from None


# --- 4. What a model makes of it ------------------------------------------------------------------

def token_lines(task, events):
    """The session as tokens, an array for the first lines and for each event."""
    lines = [task.start_tokens()]
    for event in events:
        if "command" in event:
            lines.append(task.command_tokens(np.array(event["command"])))
        else:
            lines.append(task.reveal_tokens(np.array(event["asked"]), np.array(event["value"] - 1)))
    return lines


def answers(model, task, events):
    """The model's answer at each print, after it has read the true session up to there."""
    lines = token_lines(task, events)
    tokens = np.concatenate(lines)[None]
    reveals = np.zeros(tokens.shape, bool)
    ends = np.cumsum([line.size for line in lines])[1:]
    for end, event in zip(ends, events):
        if "asked" in event:
            reveals[0, end - 2] = True  # the value is the last token but one of its line

    log_q = log_probabilities(model, tokens[:, :-1], reveals[:, 1:])
    return [task.vocab[token] for token in log_q[0].argmax(-1)]


def put_back(model, task):
    """The model with its state put back after each command, or None if no head of it tracks."""
    try:
        image, _ = fit_image(model, task, tracking_heads(model, task))
    except Untracked as error:
        print(f"not put back: {error}")
        return None
    return Snapped(model, task, image)


def blind(prints):
    """Right answers of the best guess that knows the variable only, such as "b is always 2"."""
    most = Counter()
    for (at, _), count in Counter((event["asked"], event["value"]) for event in prints).items():
        most[at] = max(most[at], count)
    return most.total()


def show(task, events, found):
    """The session, with the answers of all readers beside each true value."""
    first, *lines = [task.decode(line) for line in token_lines(task, events)]
    print(first, end="")
    answered = zip(*found.values())
    for event, line in zip(events, lines):
        if "asked" in event:
            told = next(answered)
            said = "; ".join(f"{reader}: {answer}" for reader, answer in zip(found, told))
            mark = "" if {*told} == {str(event["value"])} else "   WRONG"
            line = f"{line[:-1]}    ({said}; {event['commands']} commands so far){mark}\n"
        print(line, end="")


def print_records():
    """The rows of results/programs.jsonl: a line for each program and each model."""
    print("                                    alone:   right   right,         right,\n"
          "program         seed  commands  right at first  prints  put back  blind guess")
    for row in sorted(records("programs"), key=lambda row: (row["program"], row["seed"])):
        first = row["model"]["first_wrong"] or "all"
        shares = [row["model"]["right"], row.get("put back", {"right": 0})["right"], row["blind"]]
        alone, back, blind_guess = [f"{right / row['prints']:.1%}" for right in shares]
        print(f"{row['program']:15}{row['seed']:5}{row['commands']:10,}{first:>16}{alone:>8}"
              f"{back:>9}{blind_guess:>14}")


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.programs",
                                     description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("run", nargs="?", help="a run folder, made by train.py (default: show the records)")
    add("file", nargs="?", help="a program that exchanges variables; it is executed")
    add("--record", action="store_true", help="append the numbers to results/programs.jsonl")
    argv = sys.argv[1:] if argv is None else argv
    args = parse(parser, argv)
    if args.run is None:
        return print_records()
    if args.file is None:
        parser.error("which program? RUN is followed by FILE")

    begin = time.monotonic()
    with one_line_errors(parser):
        checkpoint, task, model = load_repl_run(args.run)
        events = play_apart(args.file, task.names)
        known = task.alphabet.tolist()
        for event in events:
            if "command" in event and event["command"] not in known:
                raise UserError(f"{args.file}:{event['line']}: no command of this model, which "
                                f"knows --commands {task.commands} of {task.group.name}")

    found = {"model": answers(model, task, events)}
    snapped = put_back(model, task)
    if snapped:
        found["put back"] = answers(snapped, task, events)
    show(task, events, found)

    prints = [event for event in events if "asked" in event]
    numbers = {"program": Path(args.file).stem, "commands": prints[-1]["commands"],
               "prints": len(prints), "blind": blind(prints)}
    for reader, said in found.items():
        wrong = [event["commands"] for event, answer in zip(prints, said)
                 if answer != str(event["value"])]
        right, first = len(prints) - len(wrong), min(wrong, default=None)
        numbers[reader] = {"right": right, "first_wrong": first}
        print(f"{reader}: {right} of {len(prints)} prints right; commands before an error: {first}")
    print(f"{numbers['commands']:,} commands; a blind guess has {numbers['blind']} prints right")

    if args.record:
        row = {"command": f"{parser.prog} {shlex.join(argv)}",
               "seed": checkpoint["config"]["seed"], **numbers,
               "minutes": round((time.monotonic() - begin) / 60, 3)}
        with one_line_errors(parser):
            record("programs", row)


if __name__ == "__main__":
    run(main)
