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
    python -m experiments.programs              the table; --run makes what has no record
    python -m experiments.programs DIR FILE     the answers of a model, and of the guess

DIR is experiments/results/models/linrnn-S5-seed0, FILE one of experiments/results/programs.

A program file is EXECUTED, in a process of its own, for at most 20,000 lines and a minute. It has
no import, no class, no `try`, no attribute with two underscores, and no function such as open. That
holds off mistakes and not malice: run no file that you have not read. trace() executes its function
in this process.

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
import traceback
from pathlib import Path

import numpy as np

from data import Parser, UserError, run
from eval import load, predict
from experiments import RESULTS, chapter, grid, record, records, span, table
from experiments.snap import Snapped, Untracked, fit_image, tracking_heads

STEPS = 20_000  # lines that a program may execute
FOLLOWED = "<followed>"  # stands for the file name in code that is followed


# --- 1. From a function to a trace ----------------------------------------------------------------

def gcd(a, b):
    while b:
        a, b = b, a % b
    return a


def trace(function, *args, steps=STEPS):
    """The straight line of function(*args), a program without if, for, while, def and return.

    Law: in an empty namespace it passes its last line, `assert (RESULT) == VALUE`, and VALUE is
    what the function returns. The assertion is tried here.

    The function is executed on copies of the arguments. What it calls is executed, and not
    followed.
    Raises: UserError if it is no plain function, or if its result cannot be read back from its
    repr; TimeoutError after that many lines; whatever the function raises.
    """
    copied, statements = in_single_lines(function)
    straight = StraightLine(copied.__code__, statements)
    value = traced(straight.listen, steps, copied, *copy.deepcopy(args))
    expected = literal(value)
    if expected is None:
        raise UserError(f"the result cannot be read back from its repr: {value!r:.80}")

    # What the function returns, as its author wrote it, if no other function is needed for it.
    last = straight.node
    expression = expected
    if isinstance(last, ast.Return) and last.value:
        expression = last.text.removeprefix("return").strip()
    if not straight.does(f"result = {expression}", {"result": expected}):
        straight.lines.append(f"result = {expected}")
        expression = "result"

    text = "\n".join([*straight.lines, f"assert ({expression}) == {expected}\n"])
    exec(text, {})
    return text


class StraightLine:
    """Writes down what the statements of a function do, in `lines`.

    Law: the variables have the same values in `space`, where these lines are executed, and in the
    function. A line that would not do the same again is replaced by values. So one round of `for
    number in numbers` is `number = 7`, and so is a call of a function that stands outside.
    """

    def __init__(self, code, statements):
        self.code = code
        self.statements = statements
        self.home = None  # the frame of the outermost call: the function may call itself
        self.node = None  # the statement that runs now
        self.lines = []
        self.space = {}

    def listen(self, frame, event):
        if self.home is None and frame.f_code is self.code:
            self.home = frame
        if frame is self.home and event in ("line", "return"):
            held = {name: literal(value) for name, value in frame.f_locals.items()}
            self.write(held)
        if frame is self.home and event == "line":
            self.node = self.statements.get(frame.f_lineno)

    def write(self, held):
        """self.node is executed. held: the variables as text; None stands for no such text."""
        changed = differing(held, self.space)
        assigns = isinstance(self.node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete))
        alters = isinstance(self.node, ast.Expr) and changed  # as numbers.append(7) does
        if (assigns or alters) and self.does(self.node.text, held):
            self.lines.append(self.node.text)
            return

        for name in changed:
            self.lines.append(f"{name} = {held[name]}")
            self.space[name] = ast.literal_eval(held[name])

    def does(self, line, held):
        """Whether the variables have these values once this line is executed."""
        # On a copy, since a line that fails half-way must leave nothing behind.
        try:
            space = copy.deepcopy(self.space)
            exec(line, space)
        except Exception:
            return False
        if differing(held, space):
            return False
        del space["__builtins__"]
        self.space = space
        return True


def differing(held, space):
    """The variables whose text is not that of their value in the space."""
    return [name for name, text in held.items()
            if text and (name not in space or literal(space[name]) != text)]


def literal(value):
    """The text from which Python reads an equal value, or None if there is no such text."""
    try:
        text = repr(value)
        return text if ast.literal_eval(text) == value else None
    except Exception:  # a repr may be anything
        return None


def in_single_lines(function):
    """The function once more, each statement in a line of its own, since Python tells lines.

    Returns: the function, {line: statement}; the text of a statement is that of its author.
    Raises: UserError.
    """
    source = textwrap.dedent(inspect.getsource(function))
    written = ast.parse(source)
    head = written.body[0]
    if not isinstance(head, ast.FunctionDef) or head.decorator_list or function.__closure__:
        raise UserError(f"{function.__name__} cannot be traced: it must be a plain `def`, without "
                        "a decorator or variables of another function")

    # unparse writes each statement in a line of its own.
    tree = ast.parse(ast.unparse(written))
    statements = {}
    for node, old in zip(ast.walk(tree), ast.walk(written)):
        if isinstance(node, ast.stmt):
            # The author's text is easier to read: a, b = b, a and not a, b = (b, a).
            text = ast.get_source_segment(source, old)
            node.text = ast.unparse(old) if "\n" in text else text
            statements[node.lineno] = node

    space = dict(function.__globals__)
    exec(compile(tree, FOLLOWED, "exec"), space)
    return space[function.__name__], statements


def traced(listen, steps, function, *args):
    """function(*args); listen(frame, event) is called ahead of each line, and at each return.

    It hears of code of FOLLOWED only.  Raises: TimeoutError after so many steps.
    """
    count = 0

    def follow(frame, event, value):
        nonlocal count
        if frame.f_code.co_filename != FOLLOWED:
            return None
        count += 1
        if count > steps:
            raise TimeoutError(f"still running after {steps:,} lines")
        listen(frame, event)
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        return function(*args)
    finally:
        sys.settrace(before)


# --- 2. From a program to a session ---------------------------------------------------------------

# The functions of Python that a program file may call, beside print.
USABLE = """abs all any ascii bin bool bytearray bytes chr complex dict divmod enumerate filter
    float format frozenset hex int isinstance iter len list map max min next oct ord pow range repr
    reversed round set slice sorted str sum tuple zip""".split()


class Session:
    """Listens to the variables `names` of a program, line by line.

    The variables belong to the file or to one of its functions. They begin as 1, 2, ..., n, and
    after each line they hold a permutation of these values. All other variables may count and
    decide. `events` is the session: {"line", "command"}, a permutation as in data.py, wherever the
    variables have changed, and {"line", "asked", "value", "commands"} for each print.
    """

    def __init__(self, file, names):
        self.file = file
        self.names = [*names]
        self.start = [*range(1, len(names) + 1)]
        self.home = None  # the frame of the variables, once all of them are set
        self.line = None  # which runs now in that frame
        self.values = None  # those of the variables
        self.commands = 0  # so far
        self.events = []

    def refuse(self, line, why):
        raise UserError(f"{self.file}:{line}: {' '.join(why.split())}")

    def listen(self, frame, event):
        """What the last line has done to the variables becomes a command."""
        values = [frame.f_locals.get(name) for name in self.names]
        if self.home is None and values == self.start:
            self.home = frame
            self.values = values
        if frame is not self.home:
            return

        if values != self.values:
            if not all(value in values for value in self.start):
                self.refuse(self.line, f"{', '.join(self.names)} may only be exchanged, within a "
                            "line, as in a, b = b, a")
            command = [self.values.index(value) for value in values]
            self.events.append({"line": self.line, "command": command})
            self.commands += 1
        self.values = values
        self.line = frame.f_lineno

    def print(self, *said, **options):
        """Stands for print in the program: print('a', a) becomes an event, all else is refused."""
        frame = sys._getframe(1)
        self.listen(frame, "print")  # an exchange may stand in the same line
        known = list(zip(self.names, self.values or []))
        if said not in known or options:
            self.refuse(frame.f_lineno, "print one variable, as in print('a', a), after all of "
                        f"{', '.join(self.names)} began as {self.start}")
        self.events.append({"line": frame.f_lineno, "asked": known.index(said), "value": said[1],
                            "commands": self.commands})


def play(source, file, names, steps=STEPS):
    """The events of a program, as of Session.  Raises: UserError, FILE:LINE ahead."""
    session = Session(file, names)
    try:
        tree = ast.parse(source)
        code = compile(tree, FOLLOWED, "exec")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        session.refuse(line, f"{type(error).__name__}: {error.args[0]}")

    # `try` would catch a refusal, and from x.__class__ one can get anywhere.
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) or getattr(node, "attr", "").startswith("__"):
            shown = ast.unparse(node).splitlines()[0]
            session.refuse(node.lineno, f"`{shown}` cannot be followed")

    usable = {name: getattr(builtins, name) for name in USABLE}
    space = {"__builtins__": {**usable, "print": session.print}}
    try:
        traced(session.listen, steps, exec, code, space)
    except UserError:
        raise
    except Exception as error:
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__)
                 if frame.f_code.co_filename == FOLLOWED]
        session.refuse(lines[-1], f"{type(error).__name__}: {error}")

    if not any("asked" in event for event in session.events):
        session.refuse(len(source.splitlines()), "the program ends without a print('a', a)")
    return session.events


def play_apart(file, names, seconds=60):
    """The events of a program file, executed in a process of its own. Raises as play; OSError."""
    source = Path(file).read_text(encoding="utf-8", errors="replace")
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # its end ends the process
        pool.apply(literal, [0])  # the process has made its imports, and the clock starts
        answer = pool.apply_async(play, [source, str(file), names])
        try:
            return answer.get(seconds)
        except multiprocessing.TimeoutError:
            raise UserError(f"{file}: still running after {seconds} seconds") from None


# --- 3. What a model makes of it ------------------------------------------------------------------

def write_session(task, events):
    """The session of these events: tokens int64 [1, T], and bool [1, T], True at the values."""
    tokens = [*task.start_tokens()]
    values = []  # their places
    for event in events:
        if "command" in event:
            tokens += [*task.command_tokens(np.array(event["command"]))]
        else:
            asked = np.array(event["asked"])
            tokens += [*task.reveal_tokens(asked, np.array(event["value"] - 1))]
            values.append(len(tokens) - 2)  # the last token but one of its line
    return np.array([tokens]), np.isin([range(len(tokens))], values)


def answers(model, task, events):
    """The model's answer at each print, after it has read the true session up to there."""
    tokens, reveals = write_session(task, events)
    said = predict(model, tokens[:, :-1])
    return [task.vocab[token] for token in said[reveals[:, 1:]]]


def blind(prints):
    """Right answers of the best guess that knows the variable only, such as "b is always 2"."""
    counts = np.zeros((26, 27), int)  # of each variable and value
    for event in prints:
        counts[event["asked"], event["value"]] += 1
    return int(counts.max(1).sum())


def read_twice(folder, file):
    """What a model answers at the prints of a program, alone and put back after each command.

    Returns: the task, the events that are prints, {"alone": answers, "put back": answers}. A model
    that has not learned to track cannot be put back.
    """
    task, model = load(folder)
    events = play_apart(file, task.names)
    check_commands(task, events, file)

    said = {"alone": answers(model, task, events)}
    try:
        image, _ = fit_image(model, task, tracking_heads(model, task))
        said["put back"] = answers(Snapped(model, task, image), task, events)
    except Untracked as error:
        print(f"not put back: {error}")
    return task, [event for event in events if "asked" in event], said


def check_commands(task, events, file):
    """Raises: UserError if the program has a command that the model has never seen."""
    if task.commands == "full" and task.group.letter == "S":
        return  # it knows every permutation; those of S26 cannot even be listed
    known = task.alphabet.tolist()
    for event in events:
        if "command" in event and event["command"] not in known:
            raise UserError(f"{file}:{event['line']}: no command of this model, which knows "
                            f"--commands {task.commands} of {task.group.name}")


def result(prints, said):
    """How many answers are right, and after how many commands the first wrong one was given."""
    wrong = [event["commands"] for event, answer in zip(prints, said)
             if answer != str(event["value"])]
    return {"right": len(prints) - len(wrong), "first_wrong": min(wrong, default=None)}


# --- 4. The study ---------------------------------------------------------------------------------

PROGRAMS = ["bubble_sort", "card_trick", "josephus", "riffle_shuffle"]
CELLS = grid(program=PROGRAMS, seed=range(5))


def make_missing():
    for cell in CELLS:
        if not records("programs", **cell):
            folder = RESULTS / "models" / f"linrnn-S5-seed{cell['seed']}"
            _, prints, said = read_twice(folder, RESULTS / "programs" / f"{cell['program']}.py")
            results = {reader: result(prints, answered) for reader, answered in said.items()}
            record("programs", cell | {"commands": prints[-1]["commands"], "prints": len(prints),
                                       "blind": blind(prints), **results})


def right(reader):
    """A column of a table: prints that are right, in %."""
    return lambda rows: span([100 * row[reader]["right"] / row["prints"] for row in rows])


def show():
    print(f"The trace of gcd(12, 8)\n\n{trace(gcd, 12, 8)}")

    table("Four programs, read by five models of S5: prints right in %", records("programs"),
          ["program", "commands", "prints"], {
              "alone, first wrong after": lambda rows: span(
                  [row["alone"]["first_wrong"] for row in rows], 0),
              "alone": right("alone"), "put back": right("put back"),
              "blind guess": lambda rows: span([100 * row["blind"] / row["prints"] for row in rows])
          })


def follow(argv):
    """What `python -m experiments.programs DIR FILE` does."""
    parser = Parser(prog="python -m experiments.programs", description="Follow a program.")
    parser.add_argument("DIR", help="a run folder, made by train.py")
    parser.add_argument("FILE", help="a program that exchanges variables; it is executed")
    args = parser.parse_args(argv)

    task, prints, said = read_twice(args.DIR, args.FILE)
    for event, *answered in zip(prints, *said.values()):
        shown = "; ".join(f"{reader}: {answer}" for reader, answer in zip(said, answered))
        mark = "" if {*answered} == {str(event["value"])} else "   WRONG"
        print(f"{task.names[event['asked']]} {event['value']}    ({shown}; {event['commands']} "
              f"commands so far){mark}")

    print(f"{prints[-1]['commands']:,} commands; a blind guess has {blind(prints)} prints right")
    for reader, answered in said.items():
        found = result(prints, answered)
        print(f"{reader}: {found['right']} of {len(prints)} prints right; commands before an "
              f"error: {found['first_wrong']}")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if {*argv} - {"--run", "-h", "--help"}:
        return follow(argv)
    chapter(__doc__, show, make_missing, {"DIR FILE": follow}, argv)  # DIR FILE: for its help


if __name__ == "__main__":
    run(main)
