"""Is a real program followed?  A function becomes a trace, and a program becomes a session.

trace(function, *args) returns the straight line of what a function executes (unroll.py).

A program that exchanges variables becomes a session (sessions.py). A trained model reads it twice:
alone, and with its state put back after each command (snap.py).

    python -m experiments.programs RUN experiments/results/programs/bubble_sort.py

Finding (results/programs.jsonl, at commit 53c0ed5; the five stored models of S5, by seed 0 to 4).
                                        the model alone, by seed
                  commands   prints     commands before an error    prints right       blind guess
    bubble_sort        666      150     204 196 310 190 142         97 63 83 70 39              81
    riffle_shuffle     800      100     312 296 328 344 376         50 51 59 53 68              34
    josephus          1000      100     280 350 170 170 340         30 34 17 16 34              50
    card_trick         990      105     311 299 330 354 365         54 35 37 53 56              60
The longest training trace has 64 commands. So alone a model is right for 2.2 to 5.9 times as many,
and then loses the state. With its state put back after each command every print is right, in all
programs and on all seeds. The blind guess says of each variable what it holds most often in these
prints, and does not know the state. It has 34 to 57% of them, where chance is 20%.

Source: "Grounding code understanding in step-by-step execution", section 2. That work traces the
benchmarks CRUXEval and MBPP for pretrained language models. Neither is here, so both are out of
scope; trace is what one would bring to them.

Next: states.py.
"""

import argparse
import ast
import contextlib
import inspect
import io
import shlex
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from data import number, user_errors
from eval import append_record, check_record, log_probabilities
from experiments.heads import Untracked, load_repl_run, tracking_heads
from experiments.sessions import execute
from experiments.snap import Snapped, fit_image
from experiments.unroll import STEPS, USABLE, Refused, Unroller, names_in
from models import choose_device


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
    constants = {name: text for name, text in constants.items() if text}
    unroller.space |= {name: eval(text) for name, text in constants.items()}
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


# --- What a model makes of it ---------------------------------------------------------------------

def token_lines(task, events):
    """The session as tokens, an array for the first lines and for each event."""
    return [task.start_tokens()] + [
        task.command_tokens(np.array(event["command"])) if "command" in event else
        task.reveal_tokens(np.array(event["asked"]), np.array(event["value"] - 1))
        for event in events]


def answers(model, task, events, device="cpu"):
    """The model's answer at each print, after it has read the true session up to there."""
    lines = token_lines(task, events)
    ends = np.cumsum([line.size for line in lines])[1:]
    tokens = np.concatenate(lines)[None]
    reveals = np.zeros(tokens.shape, bool)
    reveals[0, [end - 2 for end, event in zip(ends, events) if "asked" in event]] = True
    log_q = log_probabilities(model, tokens[:, :-1], reveals[:, 1:], device)
    return [task.vocab[token] for token in log_q[0].argmax(-1)]


def put_back(model, task, device="cpu"):
    """The model with its state put back after each command, or None if no head of it tracks."""
    try:
        image, _ = fit_image(model, task, tracking_heads(model, task, device), device=device)
    except Untracked as error:
        return print(f"not put back: {error}")
    return Snapped(model, task, image)


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
    add("--steps", type=number(1), default=STEPS, help="statements that it may execute")
    add("--seconds", type=number(1, 10**5), default=60, help="seconds that it may take")
    add("--record", metavar="FILE", help="append the numbers as one JSON line")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    begin = time.perf_counter()
    with user_errors(parser, argv) as args:
        device = choose_device(args.device)
        checkpoint, task, model = load_repl_run(args.run, device)
        known = {tuple(command) for command in task.alphabet.tolist()}
        events = execute(args.file, task.names, args.steps, args.seconds)
        for event in events:
            if "command" in event and tuple(event["command"]) not in known:
                raise Refused(f"{args.file}:{event['line']}: no command of this model, which knows "
                              f"--commands {task.commands} of {task.group.name}")
        if args.record:
            check_record(args.record)
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
