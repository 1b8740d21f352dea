"""What kind of text forces a model to track state?  Permutations, spelled out as Python.

    >>> a = 1                         state     s[i] = value of variable i         (1, 2, 3)
    >>> b = 2
    >>> c = 3
    >>> a, b, c = c, a, b             command   g = (2, 0, 1): new[i] = old[g[i]]  (3, 1, 2)
    >>> a, b, c = b, a, c             command   g = (1, 0, 2)                      (1, 3, 2)
    >>> print('b', b)                 reveal    one variable, chosen uniformly
    b 3                                         only this 3 depends on the hidden state

The whole text is a trace. Its commands are `full`: each names every variable. In other traces all
commands are `swap`: each names only the two variables that change, as in `a, b = b, a`.

Conventions for permutations, the same in every file (those for matrices are in scan.py)
    A permutation is an array of 0-based positions. The command "first g, then h" is g[h] in numpy:
    it makes new[i] = old[g[h[i]]]. Time and composition run from left to right.

Symbols
    n  degree: number of variables     L  length: number of commands in a trace
    B  batch: number of traces         T  its tokens
    (128,16) is short for a length of 128 and a spacing of 16: a reveal after every 16th command.

Source: Siems et al. 2026 (arXiv 2602.14814 v3), section 4, figure 2. Run it first: python data.py
Next: scan.py, a linear recurrence that can execute such a trace.
"""

import argparse
import itertools
import re
import string
import sys
from functools import cached_property
from math import factorial
from typing import NamedTuple

import numpy as np

# --- 1. The trace ---------------------------------------------------------------------------------

class Lexer:
    """Text to token ids and back: decode(encode(text)) == text."""

    def __init__(self, vocab):
        self.vocab = vocab
        self.ids = {token: i for i, token in enumerate(vocab)}
        # The longest token first, or `print('` would be lexed as the variable `p`.
        longest_first = sorted(vocab, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)))

    def encode(self, text):
        tokens = self.pattern.findall(text)
        if "".join(tokens) != text:  # findall silently skips what it cannot match
            raise UserError(f"{text[:80]!r} contains characters that are not tokens of this task")
        return [self.ids[token] for token in tokens]

    def decode(self, ids):
        return "".join(self.vocab[i] for i in ids)


# Any class with these four members is a task:
#     vocab                                          its tokens, a list of str
#     chance                                         accuracy without knowledge of the state
#     training_batch(batch, length, spacing, rng)    a Batch of fresh traces
#     test_batch(batch, length, spacing, rng)        a Batch of the test distribution

class ReplTask(Lexer):
    """Next-token prediction on Python REPL traces.

    A comma belongs to the name after it, so a first line has 5 tokens, a `full` command 2n + 3, a
    `swap` command 7, and a reveal 11: for full commands, T = 5n + L (2n + 3) + 11 L / spacing.

    The two fractions are for training_batch and dense_batch. Skip them at a first reading.
    """

    def __init__(self, group, commands="full", repeat_fraction=0.5, literal_fraction=0.5):
        if commands not in ("full", "swap"):
            raise UserError(f"commands must be full or swap; got {commands!r}")
        if commands == "swap" and group.order != factorial(group.degree):
            raise UserError(f"swap commands need S<n>; got {group.name}")
        self.group = group
        self.commands = commands
        self.repeat_fraction = repeat_fraction
        self.literal_fraction = literal_fraction
        self.chance = group.chance

        # The vocabulary: punctuation, names at the start of a list, names within one, values.
        self.names = string.ascii_lowercase[:group.degree]
        self.values = [str(i + 1) for i in range(group.degree)]
        punctuation = [">>> ", " = ", "print('", "'", ")", " ", "\n"]
        super().__init__([*punctuation, *self.names, *[f", {x}" for x in self.names], *self.values])

    # A trace is a text. The code below numbers values and variables from 0; the text numbers values
    # from 1.

    def trace(self, program, values=None):
        """The trace of a program: its events, each executed as it is written.

        An event is ("command", g), ("literal", variable, value) or ("reveal", variable).
        values [n]: of the first lines.
        """
        text = self.start_lines(values)
        state = [*range(self.group.degree)] if values is None else [*values]
        for event in program:
            match event:
                case "command", g:
                    text += self.command_line(g)
                    state = [state[i] for i in g]  # new[i] = old[g[i]]
                case "literal", variable, value:
                    text += self.literal_line(variable, value)
                    state[variable] = value
                case "reveal", variable:
                    text += self.reveal_lines(variable, state[variable])
                case _:
                    raise ValueError(f"unknown event: {event}")
        return text

    def start_lines(self, values=None):
        """`>>> a = 1` and so on: variable i starts with values[i], by default with value i."""
        if values is None:
            values = range(self.group.degree)
        return "".join(self.literal_line(i, value) for i, value in enumerate(values))

    def literal_line(self, variable, value):
        """`>>> b = 3`."""
        return f">>> {self.names[variable]} = {self.values[value]}\n"

    def command_line(self, g):
        """`>>> a, b, c = c, a, b` for g = (2, 0, 1)."""
        left = range(len(g))
        if self.commands == "swap":
            left = [i for i in left if g[i] != i] or left  # those that change, if any do
        names = ", ".join(self.names[i] for i in left)
        sources = ", ".join(self.names[g[i]] for i in left)
        return f">>> {names} = {sources}\n"

    def reveal_lines(self, variable, value):
        """`>>> print('b', b)` and its output `b 3`."""
        x = self.names[variable]
        return f">>> print('{x}', {x})\n{x} {self.values[value]}\n"

    # A batch holds traces as arrays of tokens. All traces of a batch are equally long.

    def test_batch(self, batch, length, spacing, rng):
        """Uniformly random commands, and after every `spacing` of them a uniform reveal."""
        return self.batch_of(map(self.trace, self.draw_programs(batch, length, spacing, rng)))

    def training_batch(self, batch, length, spacing, rng):
        """A test_batch in which some traces repeat commands (section 4)."""
        programs = self.draw_programs(batch, length, spacing, rng, self.repeat_fraction)
        return self.batch_of(map(self.trace, programs))

    def dense_batch(self, batch, length, spacing, rng):
        """A training_batch with random first values and, perhaps, literals (see train.py)."""
        n = self.group.degree
        programs = self.draw_programs(batch, length, spacing, rng, self.repeat_fraction)
        values = rng.integers(n, size=(batch, n)).tolist()

        # A literal, such as `>>> b = 3`, at a random place among the commands before each reveal:
        # the model must carry its value through the commands after it.
        blocks = batch, length // spacing
        places = rng.integers(spacing + 1, size=blocks)
        literals = rng.integers(n, size=(2, *blocks))
        if rng.random() < self.literal_fraction:
            for i, block in np.ndindex(blocks):
                place = block * (spacing + 2) + places[i, block]  # + 2: a literal and a reveal
                programs[i].insert(place, ("literal", *literals[:, i, block]))
        return self.batch_of(map(self.trace, programs, values))

    def draw_programs(self, batch, length, spacing, rng, repeat_fraction=0.0):
        """Random commands, some of them repeated, and uniform reveals: `batch` programs."""
        self.check(length, spacing)
        commands = draw_commands(self.group, self.commands, (batch, length), rng)
        if length >= SHORTEST_WITH_REPEATS:
            repeated = round(repeat_fraction * batch)
            commands[:repeated] = repeat_commands(commands[:repeated], rng)
        return self.with_reveals(commands.tolist(), spacing, rng)

    def with_reveals(self, commands, spacing, rng):
        """Commands [B, L, n], with a uniform reveal after every `spacing` of them: B programs."""
        blocks = len(commands), len(commands[0]) // spacing
        variables = rng.integers(self.group.degree, size=blocks)
        programs = [[("command", g) for g in trace] for trace in commands]
        for i, block in np.ndindex(blocks):
            place = block * (spacing + 1) + spacing  # + 1: a reveal
            programs[i].insert(place, ("reveal", variables[i, block]))
        return programs

    def batch_of(self, texts):
        """Traces as a Batch: the target of each token is the token after it."""
        tokens = np.array([self.encode(text) for text in texts], dtype=np.int64)
        inputs = tokens[:, :-1]
        reveals = inputs == self.ids[" "]  # this token occurs only in `b 3`, before the value
        return Batch(inputs, tokens[:, 1:], reveals)

    @staticmethod
    def check(length, spacing):
        if length < 1 or spacing < 1 or length % spacing:
            raise UserError("a trace ends on a reveal, so its length must be a positive multiple "
                            f"of the spacing; got length {length}, spacing {spacing}")


class Batch(NamedTuple):
    """B traces of T tokens, cut for next-token prediction."""
    inputs: np.ndarray  # int64 [B, T - 1], all tokens but the last
    targets: np.ndarray  # int64 [B, T - 1], all tokens but the first
    reveals: np.ndarray  # bool [B, T - 1], the targets that count for the accuracy


# --- 2. Groups ------------------------------------------------------------------------------------

class Group:
    """A finite group of permutations: its degree n counts the points, its order the elements.

    Names: S<n> symmetric, A<n> alternating, Z<n> cyclic, D<n> dihedral. Or any name together with
    some permutations: then the group is what they generate, all their products.
    """

    def __init__(self, name, generators=None):
        self.name = name
        self.letter = name[0] if generators is None else None
        if generators is None:
            generators = generators_of(name)
        self.generators = np.array([*generators]).tolist()
        self.degree = len(self.generators[0])

        points = [*range(self.degree)]
        if any(sorted(g) != points for g in self.generators):
            raise UserError(f"{name}: a permutation lists the positions 0, 1, ... in some order")
        reached = {0}
        for _ in points:
            reached |= {g[point] for g in self.generators for point in reached}
        if len(reached) < self.degree:
            raise UserError(f"{name} is not transitive: a never gets some of the values")

        # The accuracy of a guess that knows the variable but not the state: a random element of a
        # transitive group sends a point to every point equally often.
        self.chance = 1 / self.degree

    @cached_property
    def elements(self):
        """All products of generators in lexicographic order, the identity first: [order, n]."""
        elements = new = {tuple(range(self.degree))}
        while new:
            new = {tuple(g[i] for i in h) for g in new for h in self.generators} - elements
            elements = elements | new
        return np.array(sorted(elements))

    @cached_property
    def order(self):
        """The number of elements. (S26 has 4e26, more than one can list.)"""
        if self.letter in ("S", "A"):
            return factorial(self.degree) // (1 if self.letter == "S" else 2)
        return len(self.elements)

    def draw(self, shape, rng):
        """Uniformly random elements: [*shape, n]."""
        if self.letter not in ("S", "A"):
            return rng.choice(self.elements, size=shape)

        # The sorting order of random numbers is a uniformly random permutation.
        perms = rng.random((*shape, self.degree)).argsort(-1)
        if self.letter == "A":
            # A permutation is odd if its matrix has determinant -1. Swapping the last two entries
            # maps odd ones one-to-one onto even ones.
            odd = np.linalg.det(np.eye(self.degree)[perms]) < 0
            perms[odd, -2:] = perms[odd][:, [-1, -2]]
        return perms

    @cached_property
    def transpositions(self):
        """The swaps of two points, i < j: [n (n - 1) / 2, n]."""
        points = range(self.degree)
        return np.array([[{i: j, j: i}.get(point, point) for point in points]
                         for i, j in itertools.combinations(points, 2)])


def generators_of(name):
    """Permutations whose products are the group of that name."""
    if not re.fullmatch(r"[SZ]([2-9]|1\d|2[0-6])|[AD]([3-9]|1\d|2[0-6])", name):
        raise UserError(f"unknown group {name!r}: expected S<n>, Z<n> (n from 2), A<n> or D<n> "
                        "(n from 3), with n up to 26, since variables are the letters a to z")
    points = [*range(int(name[1:]))]
    rotation = [*points[1:], 0]
    swap = [1, 0, *points[2:]]
    three_cycles = [[*points[:i], i + 1, i + 2, i, *points[i + 3:]] for i in points[:-2]]
    return {"S": [rotation, swap], "A": three_cycles, "Z": [rotation],
            "D": [rotation, points[::-1]]}[name[0]]


# --- 3. Random commands, from independent streams -------------------------------------------------

def draw_commands(group, commands, shape, rng):
    """Uniformly random commands, `full` or `swap`: [*shape, n]."""
    if commands == "full":
        return group.draw(shape, rng)
    return rng.choice(group.transpositions, size=shape)


PURPOSES = {"train": 0, "valid": 1, "test": 2, "split": 3}  # split: of commands, of a corpus


def generator(seed, purpose, *key):
    """An independent random generator for each (seed, purpose, key).

    So the batch of any step can be drawn without those before it, and tests have a stream of their
    own. (Short test traces still occur in training: there are few traces of two commands.)
    """
    spawn_key = (PURPOSES[purpose], *key)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=spawn_key))


# --- 4. Repeated commands, in training only -------------------------------------------------------
#
# A model makes a small error in every command. The errors of random commands partly cancel. Those
# of one repeated command add up, so the loss notices them.

REPEAT = 0.8  # probability that a command repeats the one before it: 1 / (1 - 0.8) = 5 in a row
SHORTEST_WITH_REPEATS = 8  # commands in a trace; shorter ones teach single commands


def repeat_commands(commands, rng):
    """Replace each command by the one before it with probability REPEAT: [B, L, n] -> [B, L, n]."""
    repeats = rng.random(commands.shape[:2]) < REPEAT

    # The command to show: the latest one that is not a repeat.
    shown = np.where(repeats, 0, np.arange(commands.shape[1]))
    shown = np.maximum.accumulate(shown, 1)
    return np.take_along_axis(commands, shown[..., None], 1)


# --- 5. The command line --------------------------------------------------------------------------

class UserError(ValueError):
    """Bad input. The command lines print its message in one line, without a traceback."""


def run_cli(command):
    """Run a command. Bad input ends it with one line and exit code 2."""
    try:
        command()
    except (UserError, OSError) as error:
        print("error:", error, file=sys.stderr)
        sys.exit(2)


def make_parser(description):
    """A parser that keeps the lines of its description, and whose errors are one line."""
    return argparse.ArgumentParser(description=description, usage=argparse.SUPPRESS,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)


def stages(text):
    """A type for argparse: '8:1,16:2' -> ((8, 1), (16, 2)), pairs of length and spacing."""
    try:
        pairs = tuple(tuple(map(int, pair.split(":"))) for pair in text.split(","))
        for length, spacing in pairs:
            ReplTask.check(length, spacing)
    except ValueError:
        raise argparse.ArgumentTypeError(
            "expected LENGTH:SPACING,... such as 8:1,16:2, each length a multiple of its spacing; "
            f"got {text!r}") from None
    return pairs


def main(argv=None):
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--group", default="S5", help="S<n>, A<n>, Z<n> or D<n> (default S5)")
    add("--commands", default="full", help="full or swap (default full)")
    add("--length", type=int, default=4, help="number of commands (default 4)")
    add("--spacing", type=int, default=2, help="commands per reveal (default 2)")
    args = parser.parse_args(argv)

    task = ReplTask(Group(args.group), args.commands)
    inputs, targets, _ = task.test_batch(1, args.length, args.spacing, generator(0, "valid"))
    tokens = [inputs[0, 0], *targets[0]]  # the whole trace
    print(f"{task.group.order:,} states, chance {task.chance:.3f}; {len(tokens)} tokens\n")

    # Python itself executes the trace, so the states shown are Python's, not ours.
    variables = {}
    width = 6 * task.group.degree + 6
    for line in task.decode(tokens).splitlines():
        if line.startswith(">>> ") and "print" not in line:
            exec(line[4:], {}, variables)
        state = " ".join(str(variables.get(name, ".")) for name in task.names)
        pieces = "|".join(task.vocab[i] for i in task.encode(line))
        print(f"{line:<{width}} state {state}   tokens {pieces}")


if __name__ == "__main__":
    run_cli(main)
