"""Does it track what I type?  A session with a trained model, beside Python itself.

    python -m experiments.play          with a stored model of S5
    python -m experiments.play DIR      with a run of train.py, scale.py or assign.py

You type lines as to Python, or paste a session with its output. The model reads each line as its
task writes it: `print(a)` as `print('a', a)`, and `a, b = b, a` as the full command. Python's value
stands beside the model's answer to a print, and whatever the model said, it reads on with Python's
value, as in training. `a = b` needs a model of `assign`. The end of the input ends the session.

Finding. After 64 random commands without a print the stored model has every value right, from 256
states of 256; after 256 commands it has so from 252 of them (unseen.py). Each print helps it, for
the answer tells the model one of the values.

Source: the session is that of Siems et al. 2026 (arXiv 2602.14814), section 3.
Next: programs.py, the commands of a real program.
"""

import ast
import io
import sys

import numpy as np
import torch

from data import Parser, UserError, draw_commands, run
from eval import load, read_checkpoint
from experiments import RESULTS, assign


def play(model, task):
    """Read lines from the standard input until it ends, and answer as an interactive Python does.

    model: with stream(tokens, state), as those of models.py. task: a ReplTask.
    """
    # Bytes that are no text make a line that is no command, and no line after it is lost.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")

    text = task.decode(task.start_tokens())
    print(text, end="")
    print(f"    (type a line such as {example_of(task)}, then print(a))")
    _, state = read(model, task, text)

    # Python keeps the true values.
    variables = {}
    exec(text.replace(">>> ", ""), {}, variables)
    count = 0  # of commands
    # Lines that change nothing: none, and of a pasted session the first ones and the output.
    known = ["", *text.replace(">>> ", "").splitlines()]

    while True:
        try:
            line = input(">>> ").strip().removeprefix(">>>").strip()
        except (EOFError, RuntimeError):  # a RuntimeError: the input was closed from the start
            print()
            return
        if line in ("exit()", "quit()"):
            return
        if line in known or line.startswith("#"):
            continue

        try:
            statement = statement_of(line)
            name = name_printed(statement)
            if name in variables:
                written = f"print('{name}', {name})"
            else:
                written = line_of(task, *assignment(statement), variables)
        except UserError as error:
            print(f"{error}; try {example_of(task)} or print(a)")
            continue

        if written != line:
            print(f"    {written}")
        if name is None:
            _, state = read(model, task, f">>> {written}\n", state)
            exec(written, {}, variables)
            count += 1
            known = [""]
            continue

        # The model reads up to the name in the answer. Its next token is the value.
        probabilities, state = read(model, task, f">>> {written}\n{name} ", state)
        probability, token = probabilities.max(-1)
        value = variables[name]
        print(f"{name} {task.vocab[token]}    (probability {probability:.1%}; "
              f"Python: {value}; {count} commands so far)")
        # Whatever it said, it reads on with the truth.
        _, state = read(model, task, f"{value}\n", state)
        known = ["", f"{name} {value}", str(value)]


@torch.no_grad()
def read(model, task, text, state=None):
    """The probabilities of the symbol after a text, [vocabulary], and the state to go on from."""
    logits, state = model.stream(torch.tensor([task.encode(text)]), state)
    return logits[0, -1].softmax(-1), state


def statement_of(line):
    """The one statement of a line, not executed.  Raises: UserError."""
    try:
        statement, = ast.parse(line).body
        return statement
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError("this is not one statement of Python") from None


def name_printed(statement):
    """The b of `print('b', b)`, of `print(b)`, or of `b` alone; None for another statement."""
    match statement:
        case ast.Expr(ast.Name(name)):
            return name
        case ast.Expr(ast.Call(ast.Name("print"), [*label, ast.Name(name)], [])):
            return name if all(isinstance(part, ast.Constant) for part in label) else None


def assignment(statement):
    """The left-hand and the right-hand sides of an assignment.  Raises: UserError."""
    match statement:
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(sources)):
            pass
        case ast.Assign([target], source):
            targets, sources = [target], [source]
        case ast.AugAssign(target, sign, value):
            targets, sources = [target], [ast.BinOp(target, sign, value)]
        case _:
            raise UserError("this is neither an assignment nor a print of one variable")
    if len(targets) != len(sources):
        raise UserError("both sides must have as many names")
    return [*map(ast.unparse, targets)], [*map(ast.unparse, sources)]


def line_of(task, targets, sources, values):
    """The line that does what was typed, as the task writes it: a full command, or a swap.

    values: of the variables, {name: value}.
    Raises: UserError, with the reason, if the model has never read such lines.
    """
    if isinstance(task, (assign.NumberTask, assign.ShuffleTask)):
        return task.line_of(targets, sources, values)

    # Each variable takes the value of what stands at its place on the right, or keeps its own.
    taken = dict(zip(targets, sources))
    command = [task.names.find(taken.get(name, name)) for name in task.names]

    if -1 in command or not {*targets} <= {*task.names}:
        raise UserError(f"this model has read nothing but {task.names[0]} to {task.names[-1]} "
                        "change places")
    if len({*command}) < len(command):
        raise UserError("this copies a value, which its layer cannot (experiments.copies)")
    if task.group.letter != "S" and command not in task.group.elements.tolist():
        raise UserError(f"this line is no element of {task.group.name}")
    moved = sum(place != source for place, source in enumerate(command))
    if task.commands == "swap" and moved != 2:
        raise UserError("this model has read exchanges of two variables only")
    return task.decode(task.command_tokens(np.array(command))[1:-1])


def example_of(task):
    """A line that a model of this task follows."""
    if isinstance(task, assign.NumberTask):
        return "a = b + 3"
    if isinstance(task, assign.ShuffleTask):
        return "a, b = b, 4"
    some = draw_commands(task.group, task.commands, (1,), np.random.default_rng())
    return task.decode(task.command_tokens(some[0])[1:-1])


def main(argv=None):
    parser = Parser(__doc__, prog="python -m experiments.play")
    parser.add_argument("run", nargs="?", default=RESULTS / "models" / "linrnn-S5-seed0",
                        help="a run folder of traces (a stored model of S5)")
    args = parser.parse_args(argv)

    of_assign = read_checkpoint(args.run)["config"].get("task") in assign.TASKS
    task, model = (assign.load if of_assign else load)(args.run)
    play(model, task)


if __name__ == "__main__":
    run(main)
