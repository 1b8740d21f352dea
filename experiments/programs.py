"""Is a real program followed?  A function becomes a trace, and a program becomes a session.

trace(function, *args) returns the straight line of what a function executes (unroll.py).

A program that exchanges variables becomes a session in the vocabulary of the REPL traces. Each
exchange is completed to a command of the model: `a, b = b, a` is a, b, c, d, e = b, a, c, d, e.
Other variables may count and decide; to exchange or print them is refused. The session is read by
the model alone, and by the model with its state put back after each command (snap.py).

    python -m experiments.programs RUN experiments/results/programs/bubble_sort.py

The program is executed, in a process of its own, with a limit of statements and of seconds. That
does not make a malicious program safe.

Source: "Grounding code understanding in step-by-step execution", section 2. That work traces the
benchmarks CRUXEval and MBPP for pretrained language models. Neither is here, so both are out of
scope; trace is what one would bring to them.

Next: bench.py.
"""

# The process of a program imports this file. So torch is imported in the functions that need it.
import argparse
import ast
import contextlib
import inspect
import io
import json
import shlex
import subprocess
import sys
import time
import tokenize
from collections import Counter
from pathlib import Path

import numpy as np

from experiments.unroll import STEPS, USABLE, Frame, Refused, Unroller, names_in

CHILD = """import sys; sys.path.insert(0, sys.argv[1])
from experiments.programs import child; child(*sys.argv[2:])"""


# --- From a function to a trace -------------------------------------------------------------------

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
    Raises: Refused, a ValueError, for what cannot be unrolled.
    """
    file, (source, first) = inspect.getsourcefile(function), inspect.findsource(function)
    unroller, line = Unroller("".join(source), file, steps), f"{file}:{first + 1}"
    found = [node for node in ast.walk(unroller.tree) if isinstance(node, ast.FunctionDef)
             and (node.name, node.lineno) == (function.__name__, first + 1)]
    if not found or function.__closure__:
        raise Refused(f"{line}: not a plain function, or one with variables of another function")
    given = inspect.signature(function).bind(*args)
    given.apply_defaults()
    arguments = {name: literal(value) for name, value in given.arguments.items()}
    if None in arguments.values():
        raise Refused(f"{line}: an argument that Python cannot read back from its repr")
    frame = unroller.enter(found[0], "")
    read = names_in(unroller.tree, ast.Load) & {*function.__globals__} - frame.variables
    constants = {name: literal(function.__globals__[name]) for name in sorted(read)}
    unroller.space |= {name: eval(text) for name, text in constants.items() if text}
    with unroller.naming_the_line(), contextlib.redirect_stdout(io.StringIO()):
        for name, text in arguments.items():
            unroller.run(f"{name} = {text}")
        left = unroller.block(found[0].body, frame)
        result = unroller.written(left.value, frame) if left and left.value else "None"
        if not (value := literal(eval(result, unroller.space))):
            raise Refused(f"{line}: the result cannot be read back from its repr")
        body = "\n".join([*unroller.lines, f"assert ({result}) == {value}\n"])
        used = {*constants} & names_in(ast.parse(body), ast.Load)
        text = "".join(f"{name} = {constants[name]}\n" for name in sorted(used)) + body
        exec(text, {})
        assert function(*map(eval, arguments.values())) == eval(value), "it is another result"
    return text


# --- From a program to a session ------------------------------------------------------------------

class Session(Unroller):
    """Executes a whole file and listens to the variables `names`: the session is in `events`.

    An event is {"line", "command"}, a permutation as in data.py, or {"line", "asked", "value"}.
    The variables belong to the file or to one of its functions. They begin as 1, 2, ..., n.
    """

    def __init__(self, source, file, steps, names):
        super().__init__(source, file, steps)
        self.variables, self.home, self.events, self.commands = [*names], None, [], 0

    def statement(self, node, frame):
        print(node.lineno, flush=True)  # what the parent reads if it has to end this process
        return super().statement(node, frame)

    def play(self):
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                self.enter(node, "")
            else:
                self.check([node])
        with self.naming_the_line():
            self.block(self.tree.body, Frame("", set()))
        if not any("asked" in event for event in self.events):
            raise Refused(f"{self.file}:{self.line}: the program ends without a print('a', a)")
        return self.events

    def unknown(self, node, names):
        """Refuses names that are not among the variables of the model."""
        if foreign := sorted({*names} - {*self.variables}):
            known = ", ".join(self.variables)
            self.refuse(node, f"{foreign[0]} is no variable of this model, which knows {known}")

    def executed(self, node, frame):
        stored = names_in(node, ast.Store, ast.Del)
        if self.home not in (None, frame) or not stored & {*self.variables}:
            return
        self.unknown(node, stored)
        values = [self.space.get(frame.prefix + name) for name in self.variables]
        start = [*range(1, len(values) + 1)]
        if self.home is None and None not in values:
            self.home = frame
            if values != start:
                self.refuse(node, f"the variables must begin as {start}, not as {values}")
        elif self.home:
            self.unknown(node, names_in(node, ast.Load))
            if not isinstance(node, ast.Assign) or sorted(values) != start:
                self.refuse(node, f"{min(stored)} may only be exchanged, as in a, b = b, a")
            command = [self.values.index(value) for value in values]
            self.events.append({"line": node.lineno, "command": command})
            self.commands += 1
        self.values = values

    def value(self, node, frame):
        match node:
            case ast.Call(func=ast.Name(id="print")):
                self.printed(node, frame)
        return super().value(node, frame)

    def printed(self, node, frame):
        match node.args:
            case [ast.Constant(value=name), ast.Name(id=shown)] if name == shown:
                self.unknown(node, [name])
                if frame is self.home and not node.keywords:
                    at = self.variables.index(name)
                    return self.events.append({
                        "line": node.lineno, "asked": at, "value": self.values[at],
                        "commands": self.commands})
        self.refuse(node, "print one variable, after all of them are set, as in print('a', a)")


def child(file, names, steps):
    """What the separate process does. It prints the line numbers, and at last one JSON line."""
    try:
        with tokenize.open(file) as source:
            session = Session(source.read(), file, int(steps), names)
        answer = {"events": session.play()}
    except Refused as error:
        answer = {"refused": str(error)}
    print(json.dumps(answer))


def execute(file, names, steps=STEPS, seconds=60):
    """The events of a program file, executed in a process of its own. Raises: Refused."""
    command = [sys.executable, "-I", "-X", "utf8", "-c", CHILD,
               str(Path(__file__).resolve().parent.parent), str(file), "".join(names), str(steps)]
    try:
        process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True,
                                 timeout=seconds)
        shown, why = process.stdout, process.stderr.decode().strip().split("\n")[-1]
    except subprocess.TimeoutExpired as late:
        shown, why = late.stdout or b"", f"still running after {seconds} seconds"
    last = (shown.decode().splitlines() or ["1"])[-1]  # a line number, or the answer
    if not last.startswith("{"):
        raise Refused(f"{file}:{last}: {why or 'its process broke off'}")
    answer = json.loads(last)
    if "refused" in answer:
        raise Refused(answer["refused"])
    return answer["events"]


# --- What a model makes of it ---------------------------------------------------------------------

def token_lines(task, events):
    """The session as tokens, an array for the first lines and for each event."""
    return [task.start_tokens()] + [
        task.command_tokens(np.array(event["command"])) if "command" in event else
        task.reveal_tokens(np.array(event["asked"]), np.array(event["value"] - 1))
        for event in events]


def answers(model, task, events, device="cpu"):
    """The model's answer at each print, after it has read the true session up to there."""
    from eval import log_probabilities

    lines = token_lines(task, events)
    ends = np.cumsum([line.size for line in lines])[1:]
    tokens = np.concatenate(lines)[None]
    reveals = np.zeros(tokens.shape, bool)
    reveals[0, [end - 2 for end, event in zip(ends, events) if "asked" in event]] = True
    log_q = log_probabilities(model, tokens[:, :-1], reveals[:, 1:], device)
    return [task.vocab[token] for token in log_q[0].argmax(-1)]


def put_back(model, task, device="cpu"):
    """The model with its state put back after each command, or None if it has no such states."""
    from experiments.snap import NoClusters, Snapped, heads_and_states

    try:
        heads, states = heads_and_states(model, task, device)
    except NoClusters as error:
        return print(f"not put back: {error}")
    return Snapped(model, task, heads, states) if heads else None


def blind(prints):
    """Right answers of the best guess that knows the variable only, such as "b is always 2"."""
    counts = Counter((event["asked"], event["value"]) for event in prints)
    return sum({at: count for (at, _), count in counts.most_common()[::-1]}.values())


def show(task, events, found):
    """The session, with the answers of all readers beside each true value."""
    first, *lines = (task.decode(line) for line in token_lines(task, events))
    print(first, end="")
    answered = zip(*found.values())
    for event, line in zip(events, lines):
        if "asked" in event:
            told = next(answered)
            said = "; ".join(f"{reader}: {answer}" for reader, answer in zip(found, told))
            mark = "" if {*told} == {str(event["value"])} else "   WRONG"
            line = f"{line[:-1]}    ({said}; {event['commands']} commands so far){mark}\n"
        print(line, end="")


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.programs",
                                     description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("run", help="a run folder, made by train.py")
    add("file", help="a program that exchanges variables; it is executed")
    add("--steps", type=int, default=STEPS, help="statements that it may execute")
    add("--seconds", type=int, default=60, help="seconds that it may take")
    add("--record", metavar="FILE", help="append the numbers as one JSON line")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    args = parser.parse_args(argv)

    from eval import append_record
    from experiments.heads import load_repl_run
    from models import choose_device

    begin = time.perf_counter()
    try:
        device = choose_device(args.device)
        checkpoint, task, model = load_repl_run(args.run, device)
        known = {tuple(command) for command in task.alphabet.tolist()}
        events = execute(args.file, task.names, args.steps, args.seconds)
        for event in events:
            if "command" in event and tuple(event["command"]) not in known:
                raise Refused(f"{args.file}:{event['line']}: no command of this model, which knows "
                              f"--commands {task.commands} of {task.group.name}")
        if args.record:
            open(args.record, "a").close()  # what cannot be written is refused before the work
    except (ValueError, OSError) as error:
        parser.error(str(error))
    readers = {"model": model, "put back": put_back(model, task, device)}
    found = {reader: answers(model, task, events, device) for reader, model in readers.items()
             if model}
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
        append_record(args.record, f"{parser.prog} {shlex.join(argv or sys.argv[1:])}", {
            "seed": checkpoint["config"]["seed"], **numbers,
            "minutes": round((time.perf_counter() - begin) / 60, 3), "device": device})


if __name__ == "__main__":
    main()
