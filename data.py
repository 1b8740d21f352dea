"""What must a machine read to be forced to track state?  Permutations, spelled as Python.

    >>> a = 1                         state     s[i] = value of variable i         (1, 2, 3)
    >>> b = 2
    >>> c = 3
    >>> a, b, c = c, a, b             command   g = (2, 0, 1): new[i] = old[g[i]]  (3, 1, 2)
    >>> a, b = b, a                   command   g = (1, 0, 2)                      (1, 3, 2)
    >>> print('b', b)                 reveal    one variable, chosen uniformly
    b 3                                         the 3 is the only token that tests the state

Conventions, the same in every file
    Permutations are arrays of 0-based positions. A command with right-hand side g sets
    new[i] = old[g[i]]. "First g, then h" turns the state s into s[g[h[i]]], so
    compose(g, h) = g[h], numpy-indexed. Time, and composition, run from left to right.

Symbols
    n  degree: number of variables     L  length: number of commands in a trace     T  its tokens
    B  batch: number of traces         S  spacing: commands per reveal (L is a multiple of S)

Sources: Siems et al. 2026 (arXiv 2602.14814), section 3 (REPL traces); Merrill, Petty, Sabharwal
2024 (arXiv 2404.08819), section 6 (words).

Next: scan.py, a linear recurrence that can execute such a program.
"""

import signal

if __name__ == "__main__":  # Ctrl-C, also while importing, and a closed pipe end it in silence
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(getattr(signal, "SIGPIPE", signal.SIGINT), signal.SIG_DFL)  # not in Windows

import argparse
import contextlib
import itertools
import re
import string
import sys
from functools import cached_property
from math import factorial
from typing import NamedTuple

import numpy as np

COMMANDS = ["full", "swap"]  # a whole group element per command, or one transposition
MAX_ENUMERATED = 1_000_000  # elements that .elements is willing to list (S9 fits, S10 does not)
MAX_COMMANDS = 2**22  # in all traces that are drawn at once: S5 then fills some gigabytes


def draw_factor(kind, n, shape, rng):
    """Uniform elements of S<n>, A<n>, Z<n> or D<n>; no large group is listed: [*shape, n]."""
    if kind in "ZD":
        return rng.choice(list_factor(kind, n), size=shape)
    perms = rng.random((*shape, n)).argsort(-1)
    if kind == "A":  # make the odd ones even: odd and even pair up by swapping the last two
        odd = np.linalg.det(np.eye(n)[perms]) < 0
        perms[odd, -2:] = perms[odd, :-3:-1]
    return perms


def list_factor(kind, n):
    """All elements of S<n>, A<n>, Z<n> or D<n>, in lexicographic order: [order, n]."""
    if kind in "SA":
        perms = np.array(list(itertools.permutations(range(n))))
        return perms[np.linalg.det(np.eye(n)[perms]) > 0] if kind == "A" else perms
    flips = [1, -1] if kind == "D" else [1]
    return np.array(sorted([(f * i + s) % n for i in range(n)] for f in flips for s in range(n)))


class Group:
    """A finite group as permutations of `degree` points; a product acts on the points side by side.

    Names: S<n> symmetric, A<n> alternating, Z<n> cyclic, D<n> dihedral (order 2n), products like
    A4xZ5 (degree 4 + 5). Elements are numbered in lexicographic order; 0 is the identity.
    """

    FAMILIES = {"S": (2, factorial), "A": (3, lambda n: factorial(n) // 2),
                "Z": (2, lambda n: n), "D": (3, lambda n: 2 * n)}  # smallest n, order

    def __init__(self, name):
        factors = [re.fullmatch(r"([SAZD])([1-9]\d*)", part) for part in name.split("x")]
        if not all(factors):
            raise ValueError(f"unknown group {name!r}: expected S<n>, A<n>, Z<n>, D<n> or a "
                             "product such as A4xZ5, e.g. --group S5 (120 elements)")
        self.name = name
        self.factors = [(match[1], int(match[2])) for match in factors]
        self.degree = sum(n for _, n in self.factors)
        if self.degree > 26:
            raise ValueError(f"the variables are the letters a to z: group {name} permutes "
                             f"{self.degree} points, and at most 26 are possible")
        self.order, self.offsets = 1, np.cumsum([0, *(n for _, n in self.factors)])
        for kind, n in self.factors:
            smallest, order = self.FAMILIES[kind]
            if n < smallest:
                raise ValueError(f"{kind}{n} is too small: {kind}<n> needs n >= {smallest}")
            self.order *= order(n)
        self.chance = len(self.factors) / self.degree  # the mean of 1 / orbit of a point

    @cached_property
    def elements(self):
        """All elements in lexicographic order: [order, degree]."""
        if self.order > MAX_ENUMERATED:
            raise ValueError(f"group {self.name} has {self.order:,} elements; listing them is "
                             f"refused above {MAX_ENUMERATED:,} (traces can still be drawn)")
        listed = np.zeros((1, 0), int)
        for (kind, n), offset in zip(self.factors, self.offsets):
            block = list_factor(kind, n) + offset
            listed = np.hstack([listed.repeat(len(block), 0), np.tile(block, (len(listed), 1))])
        return listed

    def draw(self, shape, rng):
        """Uniform random elements as permutations: [*shape, degree]."""
        return np.concatenate([draw_factor(kind, n, shape, rng) + offset
                               for (kind, n), offset in zip(self.factors, self.offsets)], -1)

    def index(self, perms):
        """The number of each permutation in .elements: [..., degree] -> [...]."""
        return np.searchsorted(self._keys(self.elements), self._keys(perms))

    def compose(self, g, h):
        """First g, then h: the element i -> g[h[i]]. Numbers, of any shapes that broadcast.

        Exercise 1 (1 point, 1 line): the law above. Trap: in Z<n>, h[g[i]] is the same."""
        g, h = np.broadcast_arrays(g, h)
        ### BEGIN SOLUTION
        return self.index(np.take_along_axis(self.elements[g], self.elements[h], -1))
        ### END SOLUTION

    def shortest_words(self, alphabet):
        """Of commands, one for each element that they reach: {number: list of commands}."""
        numbers, words, frontier = self.index(alphabet), {0: []}, [0]
        for element in frontier:  # breadth first: the list grows while it is read
            for letter, product in zip(alphabet, self.compose(element, numbers).tolist()):
                if product not in words:
                    words[product] = words[element] + [letter]
                    frontier.append(product)
        return words

    @cached_property
    def transpositions(self):
        """The exchanges of two points, i < j, that generate a product of S<n>: [count, degree]."""
        if any(kind != "S" for kind, _ in self.factors):
            raise ValueError(f"swap commands need a group generated by its transpositions: S<n> or "
                             f"a product such as S3xS4, not {self.name}")
        swaps = []
        for begin, end in itertools.pairwise(self.offsets):
            for i, j in itertools.combinations(range(begin, end), 2):
                swaps.append(np.arange(self.degree))
                swaps[-1][[i, j]] = j, i
        return np.array(swaps)

    @staticmethod
    def _keys(perms):
        # Rows as byte strings, compared lexicographically; + 1: numpy strips trailing zero bytes.
        rows = np.ascontiguousarray(perms + 1, dtype=np.uint8)
        return rows.view(f"S{rows.shape[-1]}")[..., 0]


def run_commands(commands, state=None):
    """The state after each command, s_t = s_{t-1}[g_t]: [B, L, n], [B, n] or None -> [B, L, n]."""
    batch, length, n = commands.shape
    state = np.broadcast_to(np.arange(n), (batch, n)) if state is None else state
    states = np.empty_like(commands)
    for t in range(length):
        state = states[:, t] = np.take_along_axis(state, commands[:, t], -1)
    return states


class Batch(NamedTuple):
    """What a task gives to the training loop. A task is any class with the attributes vocab,
    chance, default_curriculum and default_lengths, and the methods check, training_batch,
    test_batch and model_defaults, as ReplTask."""
    inputs: np.ndarray  # int64 [B, T]
    targets: np.ndarray  # int64 [B, T] what should come out at each position
    reveals: np.ndarray  # bool [B, T] the targets that count for the accuracy
    best: np.ndarray = None  # [B, reveals of a trace, vocabulary] what an ideal reader predicts


def draw_commands(group, commands, shape, rng):
    """Random commands, uniform over the alphabet: [*shape, n]."""
    if commands == "full":
        return group.draw(shape, rng)
    return rng.choice(group.transpositions, size=shape)


class ReplTask:
    """Next-token prediction on Python REPL traces; accuracy counts the revealed values only.

    A token is a symbol of a small lossless lexer; a comma belongs to the name after it. A trace has
    T = 5n + L (2n + 3) + 11 L/S tokens, where a `swap` command has 7 tokens, not 2n + 3.
    """

    default_curriculum = "2:1,8:1,16:2,32:4,64:8"
    default_lengths = "64:8,128:16,256:32"
    more_symbols = []  # of a subclass whose traces contain other lines, too

    def __init__(self, group, commands="full"):
        self.group, self.commands, self.chance = group, commands, group.chance
        if commands == "swap":
            group.transpositions  # refuse a group without them here, not at the first batch
        self.names = names = string.ascii_lowercase[:group.degree]
        values = [str(i + 1) for i in range(group.degree)]
        marks = [">>> ", " = ", "print('", "'", ")", " ", "\n"]
        self.vocab = [*marks, *names, *(f", {name}" for name in names), *values, *self.more_symbols]
        self._id = {symbol: i for i, symbol in enumerate(self.vocab)}
        longest_first = sorted(self.vocab, key=len, reverse=True)  # print(' is not the variable p
        self._lexer = re.compile("|".join(map(re.escape, longest_first)))
        self._name = np.array([self._id[name] for name in names])
        self._comma_name = np.array([self._id[f", {name}"] for name in names])
        self.value_tokens = np.array([self._id[value] for value in values])

    @property
    def alphabet(self):
        """All commands, as permutations: [commands, n]."""
        return self.group.elements if self.commands == "full" else self.group.transpositions

    @staticmethod
    def check(length, spacing):
        """Raises: ValueError unless the length is a positive multiple of the spacing."""
        if length < 1 or spacing < 1 or length % spacing:
            raise ValueError("a trace ends on a reveal, so its length must be a positive multiple "
                             f"of the spacing; got length {length}, spacing {spacing}")

    def model_defaults(self):
        """Options of a model. A key needs 2n dimensions (scan.py): from n = 8 on it has 2n + 8."""
        n = self.group.degree
        wide = {"d_model": max(64, 16 * -(-n // 4) + 16), "heads": 2} if n > 7 else {}
        return {"conv_width": n + 3} | wide  # n + 1 see one side of a command, 2 to spare

    def encode(self, text):
        """Token ids of a trace: decode(encode(text)) == text. Raises: ValueError."""
        symbols = self._lexer.findall(text)  # it skips what is no symbol
        if "".join(symbols) != text:
            raise ValueError(f"not all of {text!r} is made of symbols of {self.group.name} traces")
        return [self._id[symbol] for symbol in symbols]

    def decode(self, ids):
        """The text of a sequence of token ids."""
        return "".join(self.vocab[i] for i in ids)

    def sample(self, batch, length, spacing, rng):
        """Random traces: tokens int64 [B, T]; reveals bool [B, T], True at a revealed value."""
        self.check(length, spacing)
        commands = draw_commands(self.group, self.commands, (batch, length), rng)
        asked = rng.integers(self.group.degree, size=(batch, length // spacing))
        return self.write(commands, asked)

    def write(self, commands, asked):
        """As sample: commands [B, L, n]; asked [B, L/S], or [B, L/S, P] for P reveals in a row."""
        return self.assemble(self.command_tokens(commands), asked, self.answers(commands, asked))

    def answers(self, commands, asked):
        """The revealed values, from 0, in the shape of asked."""
        spacing = commands.shape[1] // asked.shape[1]
        now = run_commands(commands)[:, spacing - 1::spacing]
        return np.take_along_axis(now, asked.reshape(*now.shape[:2], -1), -1).reshape(asked.shape)

    def assemble(self, lines, asked, answers):
        """First lines, commands and reveals in the order of a trace.

        Shapes: lines [B, L, tokens of a command]; asked, answers as in write -> both [B, T]
        """
        batch, count = asked.shape[:2]
        shown = self.reveal_tokens(asked, answers).reshape(batch, count, -1)
        body = np.concatenate([lines.reshape(batch, count, -1), shown], -1)
        is_answer = np.zeros(body.shape, bool)  # `b 3`: the last but one of a reveal's 11 tokens
        is_answer[..., -2:-shown.shape[-1]:-11] = True
        start = np.tile(self.start_tokens(), (batch, 1))
        return (np.hstack([start, body.reshape(batch, -1)]),
                np.hstack([np.zeros_like(start, bool), is_answer.reshape(batch, -1)]))

    def start_tokens(self):
        """`>>> a = 1` and so on, a line for each variable: [5n]."""
        return self._line(self._name.shape, ">>> ", self._name, " = ", self.value_tokens,
                          "\n").reshape(-1)

    def command_tokens(self, commands):
        """`>>> a, b, c = c, a, b`: [..., n] -> [..., 2n + 3], or [..., 7] for swaps."""
        if self.commands == "full":
            left, right = np.broadcast_to(np.arange(self.group.degree), commands.shape), commands
        else:
            stays = commands == np.arange(self.group.degree)
            left = stays.argsort(-1, kind="stable")[..., :2]  # the two variables that move
            right = left[..., ::-1]
        return self._line(commands.shape[:-1], ">>> ", *self._names(left), " = ",
                          *self._names(right), "\n")

    def _names(self, variables):
        """`a, b, c`: [..., count] -> count arrays of ids [...]."""
        first, rest = self._name[variables[..., 0]], self._comma_name[variables[..., 1:]]
        return [first, *np.moveaxis(rest, -1, 0)]

    def reveal_tokens(self, asked, answers):
        """`>>> print('b', b)` and its output `b 3`: [...], [...] -> [..., 11]."""
        name = self._name[asked]
        return self._line(asked.shape, ">>> ", "print('", name, "'", self._comma_name[asked], ")",
                          "\n", name, " ", self.value_tokens[answers], "\n")

    def _line(self, shape, *parts):
        """Side by side, one token each: symbols, and arrays of ids [*shape] -> [*shape, parts]."""
        return np.stack([np.broadcast_to(self._id[part] if isinstance(part, str) else part, shape)
                         for part in parts], -1, dtype=np.int64)

    def test_batch(self, batch, length, spacing, rng):
        """Random traces as a Batch: the target at each position is the token after it."""
        tokens, reveals = self.sample(batch, length, spacing, rng)
        return Batch(tokens[:, :-1], tokens[:, 1:], reveals[:, 1:])

    def training_batch(self, batch, length, spacing, rng):
        """The same where n < 8. More variables are learned sooner from n // 4 reveals in a row, and
        if the first commands are products of 1 to n exchanges, so that some variables stay."""
        self.check(length, spacing)
        n = self.group.degree
        commands = draw_commands(self.group, self.commands, (batch, length), rng)
        if n > 7 and spacing == 1 and self.commands == "full" and self.group.order == factorial(n):
            words = run_commands(draw_commands(self.group, "swap", (batch * length, n), rng))
            last = rng.integers(n, size=(batch * length, 1, 1))
            commands = np.take_along_axis(words, last, 1).reshape(commands.shape)
        asked = rng.integers(n, size=(batch, length // spacing, max(1, n // 4)))
        tokens, reveals = self.write(commands, asked)
        return Batch(tokens[:, :-1], tokens[:, 1:], reveals[:, 1:])


class WordTask:
    """One token per group element; the label at t is the product of the first t elements."""

    default_curriculum = "2:1,8:1,16:1,32:1,64:1"
    default_lengths = "64:1,128:1,256:1"

    def __init__(self, group, commands="full"):
        self.group, self.commands, self.chance = group, commands, 1 / group.order
        self.vocab = ["".join(string.ascii_lowercase[i] for i in g) for g in group.elements]
        if commands == "swap":
            group.transpositions

    check = staticmethod(ReplTask.check)

    def model_defaults(self):
        return {}

    def training_batch(self, batch, length, spacing, rng):
        """Element numbers, and those of the running products: [B, L] each."""
        self.check(length, spacing)
        commands = draw_commands(self.group, self.commands, (batch, length), rng)
        inputs, targets = self.group.index(commands), self.group.index(run_commands(commands))
        reveals = np.tile(np.arange(1, length + 1) % spacing == 0, (batch, 1))
        return Batch(inputs, targets, reveals)

    test_batch = training_batch


TASKS = {"repl": ReplTask, "word": WordTask}


def parse_stages(text, task, traces=1, most=MAX_COMMANDS):
    """'8:1,16:2' -> [[8, 1], [16, 2]], if the task accepts each stage. Raises: ValueError."""
    if not re.fullmatch(r"\d+:\d+(,\d+:\d+)*", text):
        raise ValueError(f"expected LENGTH:SPACING,..., as in 8:1,16:2; got {text!r}")
    stages = [[int(part) for part in stage.split(":")] for stage in text.split(",")]
    for length, spacing in stages:
        task.check(length, spacing)
        if length * traces > most:
            raise ValueError(f"{traces:,} traces of {length:,} commands are too many to be read at "
                             f"once: at most {most:,} commands in all")
    return stages


PURPOSES = {"train": 0, "valid": 1, "test": 2, "split": 3}


def generator(seed, purpose, *key):
    """A random generator of its own for each (seed, purpose, key); so a batch is made alone."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(PURPOSES[purpose], *key)))


def number(low, high=10**8, kind=int):
    """A type for argparse: a number from low to high, and so neither nan nor inf."""
    def read(text):
        if not low <= kind(text) <= high:
            raise argparse.ArgumentTypeError(f"must lie in [{low}, {high}], got {text}")
        return kind(text)
    read.__name__ = kind.__name__  # argparse calls the type by its name if the text is no number
    return read


@contextlib.contextmanager
def user_errors(parser, argv):
    """The options. An error in this block is the user's: one line, exit code 2; elsewhere a bug."""
    args = parser.parse_args(argv)
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that lacks a letter shows its number
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if "" in vars(args).values():
            raise ValueError("an option is empty: leave it out, or give it a value")
        yield args
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))


def main(argv=None):
    parser = argparse.ArgumentParser(description="Print a trace, its tokens, and the states.")
    parser.add_argument("--group", default="S5", help="S<n>, A<n>, Z<n>, D<n> or a product (A4xZ5)")
    parser.add_argument("--commands", default="full", choices=COMMANDS)
    parser.add_argument("--length", type=number(1, 100), default=4, help="number of commands")
    parser.add_argument("--spacing", type=number(1), default=2, help="commands per reveal")
    with user_errors(parser, argv) as args:
        task = ReplTask(Group(args.group), args.commands)
        task.check(args.length, args.spacing)
    tokens, _ = task.sample(1, args.length, args.spacing, generator(0, "valid"))
    print(f"{task.group.order:,} states, chance {task.chance:.3f}; {tokens.size} tokens\n")
    variables, width = {}, 6 * task.group.degree + 6
    for line in task.decode(tokens[0]).splitlines():
        if line.startswith(">>> ") and "print" not in line:
            exec(line[4:], {}, variables)  # the state shown is Python's own, not ours
        state = " ".join(str(variables.get(name, ".")) for name in task.names)
        pieces = "|".join(task.vocab[i] for i in task.encode(line))
        print(f"{line:<{width}} state {state}   tokens {pieces}")


if __name__ == "__main__":
    main()
