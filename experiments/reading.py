"""What chapters need to read with a model: text by text, command by command, or a long trace."""

from functools import partial

import numpy as np
import torch

from eval import device_of, evaluate
from experiments.groups import compose, run_commands

TOKENS_AT_ONCE = 1024  # of each trace, in predict_stream


@torch.no_grad()
def read(model, task, texts, state=None):
    """Let a model read one text per trace, all of equally many tokens.  Returns: logits, state."""
    tokens = torch.tensor([task.encode(text) for text in texts], device=device_of(model))
    return model.stream(tokens, state)


def follow(model, task, commands, state=None):
    """Let a model read commands [B, L, n]: yields the state of its stream after each of them.

    state: where it begins, by default after the first lines `a = 1` and so on.
    """
    if state is None:
        _, state = read(model, task, [task.start_lines()] * len(commands))
    for t in range(commands.shape[1]):
        _, state = read(model, task, map(task.command_line, commands[:, t].tolist()), state)
        yield state


def read_heads(state, heads):
    """The S of these heads, (block, head), in the state of a stream: [B, heads, K, V]."""
    return torch.stack([state[block][:, head] for block, head in heads], 1)


def answers_correctly(model, task, state, values):
    """Whether a model answers correctly for each variable: values [B, n] -> bool [B, n].

    Every question branches off the same state of model.stream, so no answer informs another.
    """
    answers = []
    for variable in range(len(task.names)):
        question = task.reveal_lines(variable, 0).removesuffix(f"{task.values[0]}\n")
        logits, _ = read(model, task, [question] * len(values), state)
        answers.append(logits[:, -1].argmax(-1).numpy())
    ids = np.array([task.ids[value] for value in task.values])
    return np.stack(answers, 1) == ids[values]


def correct_after(model, task, commands, values=None, state=None):
    """Which values are correct after commands [B, L, n], without a reveal: bool [B, n].

    values [B, n], state: what they begin with, by default 1, 2, ... and the first lines.
    """
    *_, state = follow(model, task, commands, state)
    values = np.arange(task.group.degree) if values is None else values
    return answers_correctly(model, task, state, compose(values, run_commands(commands)[:, -1]))


def repeat(commands, total):
    """The commands [B, k, n] repeatedly, `total` of them: [B, total, n]."""
    return np.tile(commands, (1, total, 1))[:, :total]


@torch.no_grad()
def predict_stream(reader, inputs):
    """eval.predict for long traces. All are read side by side, in pieces."""
    predictions = []
    state = None
    for piece in torch.from_numpy(inputs).split(TOKENS_AT_ONCE, 1):
        logits, state = reader.stream(piece, state)
        predictions.append(logits.argmax(-1))
    return torch.cat(predictions, 1).numpy()


evaluate_stream = partial(evaluate, predict=predict_stream)  # a row of eval.py for long traces
