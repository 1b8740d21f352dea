"""What does a program file do to the variables of a session?  It is executed, and listened to.

A file that exchanges variables becomes a list of events in the vocabulary of the REPL traces. Each
exchange is completed to a permutation of all variables: `a, b = b, a` is a, b, c, d, e = b, a, c,
d, e. Other variables may count and decide; to exchange them with these, or to print them, is
refused. So is whatever unroll.py refuses, and a file that does not end within its limits.

The file is executed in a process of its own, with a limit of statements and of seconds. That does
not make a malicious file safe: run none that you have not read. This chapter imports neither torch
nor numpy, so that the process starts at once.

Next: programs.py.
"""

import ast
import json
import subprocess
import sys
import tokenize
from pathlib import Path

from experiments.unroll import STEPS, Frame, Refused, Unroller, names_in

CHILD = """import sys; sys.path.insert(0, sys.argv[1])
from experiments.sessions import child; child(*sys.argv[2:])"""


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
        """The events of the whole file. Raises: Refused."""
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
        """What a statement has done to the variables of the session becomes an event."""
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

    def printed(self, call, frame):
        """A print('a', a) becomes an event; any other print is refused."""
        match call.args:
            case [ast.Constant(value=name), ast.Name(id=shown)] if name == shown:
                self.unknown(call, [name])
                if frame is self.home and not call.keywords:
                    at = self.variables.index(name)
                    return self.events.append({
                        "line": call.lineno, "asked": at, "value": self.values[at],
                        "commands": self.commands})
        self.refuse(call, "print one variable, after all of them are set, as in print('a', a)")


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
