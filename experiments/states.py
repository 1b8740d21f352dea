"""What is the state of a program after each of its lines, and is it in the hidden vector there?

    parity        p = 1                 p ^= 0                           assert p == 1
    permutations  a = [2, 1, 3, 4]      a[0], a[1] = a[1], a[0]          assert a == [1, 2, 3, 4]
    arithmetic    c, a, b = 4, 3, 6     a = 9 - a                        assert a == 6
    traces        the REPL traces of data.py, with a reveal after every S commands

The first three begin with the line on the left. L lines like the one in the middle follow. The
question stands at the end, and an answer is right if all its tokens are right. The text is that of
the tokens, and a Python interpreter executes it. The states are what that interpreter holds.
Two heads read a state off the hidden vector at the newline.

Deviations from the source: the variables of arithmetic are always a, b, c. No value has more digits
than --digits says; a line that would make one is drawn again.

Symbols: L length, lines that change the state; W tokens of a state; B batch; T tokens.
Source: "Grounding code understanding in step-by-step execution".

Next: supervision.py.
"""

import re
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from data import TASKS, ReplTask, draw_commands, generator, run_commands
from models import MLP, AttentionBlock

NEWLINE = 0  # its number in the vocabulary of a program
IGNORED = -100  # a target that torch's cross-entropy leaves out: what follows a shorter program
END, ANSWER = 1, 2  # marks of tokens: the last one of a line, one of the answer


# --- The tasks ------------------------------------------------------------------------------------

class Supervised(NamedTuple):
    """A data.Batch whose answers are certain, and the states."""
    inputs: np.ndarray  # int64 [B, T]
    targets: np.ndarray  # int64 [B, T]
    reveals: np.ndarray  # bool [B, T] the targets that are tokens of an answer
    ends: np.ndarray  # bool [B, T] the last tokens of the lines, from the first that has a state
    states: np.ndarray  # int64 [lines of all programs, W] the tokens of the state after each
    best = None  # no field: see data.Batch


class Program(NamedTuple):
    lines: list  # the first assigns the first state
    states: list  # their texts, one after each line
    question: str
    answer: str


def pad(rows, filler, width):
    """Lists of numbers as one array: [B, width]."""
    return np.array([row + [filler] * (width - len(row)) for row in rows])


class ProgramTask:
    """Programs with one question. A subclass has: symbols, answer_width (tokens), chance, closing,
    program(length, rng) -> Program, and assignment(text of a state) -> the line that makes it.
    """

    default_curriculum, default_lengths = "16:1", "16:1,32:1,64:1"
    encode, decode, closing = ReplTask.encode, ReplTask.decode, ""

    def __init__(self, group):
        self.group = group
        self.vocab = ["\n", " = ", *self.symbols()]
        self._id = {symbol: i for i, symbol in enumerate(self.vocab)}
        longest_first = sorted(self.vocab, key=len, reverse=True)
        self._lexer = re.compile("|".join(map(re.escape, longest_first)))

    @staticmethod
    def check(length, spacing):
        """Raises: ValueError unless the spacing is 1 and the length positive."""
        if length < 1 or spacing != 1:
            raise ValueError("a program has one question, so its spacing is 1, and a positive "
                             f"length; got length {length}, spacing {spacing}")

    def model_defaults(self):
        return {}

    def training_batch(self, batch, length, spacing, rng):
        """Programs of one length, or of the lengths [B], as Supervised."""
        rows, marks, states = [], [], []
        for lines in np.broadcast_to(length, batch):
            program, row, mark = self.program(lines, rng), [], []
            for line in program.lines:
                row += self.encode(f"{line}\n")
                mark += [0] * (len(row) - len(mark) - 1) + [END]
            row += self.encode(program.question)
            mark += [0] * (len(row) - len(mark)) + [ANSWER] * self.answer_width
            row += self.encode(program.answer)
            row += [NEWLINE] * (len(mark) - len(row))  # empty lines behind a shorter answer
            row += self.encode(f"{self.closing}\n")
            rows.append(row)
            marks.append(mark)
            states += [self.encode(text) for text in program.states]
        width = max(map(len, rows))
        tokens, targets = pad(rows, NEWLINE, width), pad(rows, IGNORED, width)
        marks = pad(marks, 0, width)
        return Supervised(tokens[:, :-1], targets[:, 1:], marks[:, 1:] == ANSWER,
                          marks[:, :-1] == END, np.array(states))

    test_batch = training_batch


class ParityTask(ProgramTask):
    """`p = 1`, then `p ^= 0` or `p ^= 1`."""

    answer_width, chance = 1, 0.5

    def __init__(self, group):
        if group.name != "S2":
            raise ValueError(f"parity is the group S2, not {group.name}")
        super().__init__(group)

    def symbols(self):
        return ["p", " ^= ", "assert p == ", "0", "1"]

    def assignment(self, state):
        return f"p = {state}"

    def program(self, length, rng):
        bits = rng.integers(2, size=length + 1)
        states = [str(bit) for bit in bits.cumsum() % 2]
        lines = [self.assignment(states[0]), *(f"p ^= {bit}" for bit in bits[1:])]
        return Program(lines, states, "assert p == ", states[-1])


class PermutationTask(ProgramTask):
    """A list of n items, of which each line exchanges two; the group is S<n> or a product."""

    closing = "]"

    def __init__(self, group):
        super().__init__(group)
        self.answer_width, self.chance = group.degree, 1 / group.order
        self.pairs = [np.flatnonzero(swap != np.arange(group.degree)).tolist()
                      for swap in group.transpositions]  # refuses a group without them

    def symbols(self):
        values = [str(i + 1) for i in range(self.group.degree)]
        places = [f"a[{i}]" for i in range(self.group.degree)]
        return ["a = [", "assert a == [", "]", *values, *places,
                *(f", {text}" for text in [*values, *places])]

    def assignment(self, state):
        return f"a = [{state}]"

    def program(self, length, rng):
        items = (self.group.draw((1,), rng)[0] + 1).tolist()
        lines, states = [self.assignment(self._text(items))], [self._text(items)]
        for choice in rng.integers(len(self.pairs), size=length):
            i, j = self.pairs[choice]
            items[i], items[j] = items[j], items[i]
            lines.append(f"a[{i}], a[{j}] = a[{j}], a[{i}]")
            states.append(self._text(items))
        return Program(lines, states, "assert a == [", states[-1])

    def _text(self, items):
        return ", ".join(map(str, items))


class ArithmeticTask(ProgramTask):
    """n variables, of which each line sets one to a sum or a difference; the last one is asked.

    One operand is a variable, the other a variable or, half of the time, a number. The text of a
    state is that of all values, each with its sign and all its digits: +4-2+6.
    """

    def __init__(self, group, digits=1):
        super().__init__(group)
        self.digits, self.answer_width = digits, digits + 2  # a sign, and the newline after it

    def symbols(self):
        self.names = [chr(ord("a") + i) for i in range(self.group.degree)]
        return [*self.names, ", ", "assert ", " == ", " + ", " - ", "+", "-", *map(str, range(10))]

    @cached_property
    def chance(self):
        """The share of the commonest answer, of 2,000 programs of length 4."""
        rng = generator(0, "valid")
        answers = [self.program(4, rng).answer for _ in range(2000)]
        return max(map(answers.count, set(answers))) / 2000

    def assignment(self, state):
        return self._assign(self.names, [int(text) for text in re.findall(r"[+-]\d+", state)])

    def _assign(self, names, values):
        return f"{', '.join(names)} = {', '.join(map(str, values))}"

    def program(self, length, rng):
        largest = 10**self.digits - 1
        names = [str(name) for name in rng.permutation(self.names)]
        values = dict(zip(names, rng.integers(largest + 1, size=len(names)).tolist()))
        lines, states = [self._assign(names, values.values())], [self._state(values)]
        while len(lines) <= length:
            target, left, right = (names[i] for i in rng.integers(len(names), size=3))
            literal, first, minus = rng.random(3) < 0.5
            if literal:
                right = str(rng.integers(largest + 1))
            if first:
                left, right = right, left
            x, y = (values[term] if term in values else int(term) for term in (left, right))
            result = x - y if minus else x + y
            if abs(result) <= largest:
                values[target] = result
                lines.append(f"{target} = {left} {'-' if minus else '+'} {right}")
                states.append(self._state(values))
        return Program(lines, states, f"assert {target} == ", str(values[target]))

    def _state(self, values):
        return "".join(f"{values[name]:+0{self.digits + 1}d}" for name in self.names)


class TraceTask(ReplTask):
    """The REPL traces of data.py. The state is told after each command, and ahead of the first."""

    answer_width = 1

    def assignment(self, state):
        return "\n".join(f">>> {name} = {value}" for name, value in zip(self.names, state))

    def training_batch(self, batch, length, spacing, rng):
        n = self.group.degree
        self.check(length, spacing)
        commands = draw_commands(self.group, self.commands, (batch, length), rng)
        asked = rng.integers(n, size=(batch, length // spacing))
        tokens, reveals = self.write(commands, asked)
        lines = self.command_tokens(commands)
        lines[..., -1] = IGNORED  # marks the newlines of the commands
        ends = self.assemble(lines, asked, asked)[0] == IGNORED
        ends[:, 5 * n - 1] = True
        states = np.concatenate([np.broadcast_to(np.arange(n), (batch, 1, n)),
                                 run_commands(commands)], 1)
        return Supervised(tokens[:, :-1], tokens[:, 1:], reveals[:, 1:], ends[:, :-1],
                          self.value_tokens[states].reshape(-1, n))

    test_batch = training_batch


TASKS |= {"parity": ParityTask, "permutations": PermutationTask, "arithmetic": ArithmeticTask,
          "traces": TraceTask}


# --- How a state is read off a hidden vector ------------------------------------------------------

class LinearHead(nn.Module):
    """The loss of all tokens of the states, each read off the hidden vector alone.

    Shapes: hidden [N, D], states [N, W] -> a number, the mean over tokens.
    """

    def __init__(self, d_model, vocab_size, width):
        super().__init__()
        self.logits = nn.Linear(d_model, width * vocab_size)

    def forward(self, hidden, states):
        logits = self.logits(hidden).unflatten(-1, (states.shape[1], -1))
        return F.cross_entropy(logits.flatten(0, 1), states.flatten())


class DecoderHead(nn.Module):
    """The same, but each token is read off the hidden vector and the tokens of the state before it.

    Raises: ValueError unless the width has two heads of even width.
    """

    def __init__(self, d_model, vocab_size, width):
        super().__init__()
        if d_model % 4:
            raise ValueError(f"the decoder needs a d_model that is a multiple of 4; got {d_model}")
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList([AttentionBlock(d_model, 2), MLP(d_model),
                                     AttentionBlock(d_model, 2), MLP(d_model)])
        self.norm = nn.RMSNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, hidden, states):
        x = torch.cat([hidden.unsqueeze(1), self.embedding(states[:, :-1])], 1)
        for block in self.blocks:
            x, _ = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), states.flatten())


HEADS = {"linear": LinearHead, "decoder": DecoderHead}
