"""Does it track what I type?  A session with a trained model, beside Python itself.

    python -m experiments.play          with a stored model of S5
    python -m experiments.play DIR      with a run of traces, of train.py or of scale.py

You type the lines of a trace, commands and prints. The model answers each print, and Python's value
stands beside its answer. Whatever the model said, it reads on with Python's value, as in training.
Only commands of its own task are executed. The end of the input ends the session.

Finding. After 64 random commands without a print the stored model has every value right, from 256
states of 256; after 256 commands it has so from 252 of them (unseen.py). Each print helps it, for
the answer tells the model one of the values.

Source: the session is that of Siems et al. 2026 (arXiv 2602.14814), section 3.
Next: programs.py, the commands of a real program.
"""

import io
import sys

import numpy as np
import torch

from data import Parser, draw_commands, run
from eval import load
from experiments import RESULTS


def play(model, task):
    """Read lines from the standard input until it ends, and answer as an interactive Python does.

    model: with stream(tokens, state), as those of models.py. task: a ReplTask.
    """
    # Bytes that are no text make a line that is no command, and no line after it is lost.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")

    text = task.decode(task.start_tokens())
    print(text, end="")
    _, state = read(model, task, text)

    # Python keeps the true values.
    variables = {}
    exec(text.replace(">>> ", ""), {}, variables)
    prints = {f"print('{name}', {name})": name for name in variables}
    count = 0  # of commands

    while True:
        try:
            line = input(">>> ").strip()
        except (EOFError, RuntimeError):  # a RuntimeError: the input was closed from the start
            print()
            return

        if line in prints:
            # The model reads up to the name in the answer. Its next token is the value.
            name = prints[line]
            probabilities, state = read(model, task, f">>> {line}\n{name} ", state)
            probability, token = probabilities.max(-1)
            print(f"{name} {task.vocab[token]}    (probability {probability:.1%}; "
                  f"Python: {variables[name]}; {count} commands so far)")
            # Whatever it said, it reads on with the truth.
            _, state = read(model, task, f"{variables[name]}\n", state)

        elif is_command(task, line):
            _, state = read(model, task, f">>> {line}\n", state)
            exec(line, {}, variables)
            count += 1

        else:
            some = draw_commands(task.group, task.commands, (1,), np.random.default_rng())
            example = task.decode(task.command_tokens(some[0])[1:-1])
            print(f"type a command such as {example}, or print('a', a)")


@torch.no_grad()
def read(model, task, text, state=None):
    """The probabilities of the symbol after a text, [vocabulary], and the state to go on from."""
    logits, state = model.stream(torch.tensor([task.encode(text)]), state)
    return logits[0, -1].softmax(-1), state


def is_command(task, line):
    """Whether this is a command of the task. S26 has too many for a list, so it is parsed."""
    # Each variable takes the value of what stands at its place on the right, or keeps its own.
    left, _, right = line.partition(" = ")
    sources = dict(zip(left.split(", "), right.split(", ")))
    command = [task.names.find(sources.get(name, name)) for name in task.names]

    if sorted(command) != list(range(task.group.degree)):
        return False
    if task.group.letter != "S" and command not in task.group.elements.tolist():
        return False

    # Is it what the task itself would write? No other line is ever executed.
    return task.decode(task.command_tokens(np.array(command))) == f">>> {line}\n"


def main(argv=None):
    parser = Parser(__doc__, prog="python -m experiments.play")
    parser.add_argument("run", nargs="?", default=RESULTS / "models" / "linrnn-S5-seed0",
                        help="a run folder of traces (a stored model of S5)")
    args = parser.parse_args(argv)

    task, model = load(args.run)
    play(model, task)


if __name__ == "__main__":
    run(main)
