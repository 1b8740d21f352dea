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

import argparse
import contextlib
import itertools
import os
import re
import string
import sys
from collections.abc import Callable
from functools import cached_property, lru_cache
from math import factorial
from typing import NamedTuple

import numpy as np

MAX_VARIABLES = 26  # their names are the letters a to z
MAX_ENUMERATED = 1_000_000  # elements that .elements is willing to list (S9 fits, S10 does not)
MAX_CHECKED = 200  # elements of a family that are tested for being a group
MAX_ROTATIONS = 60  # elements of A5, the largest group of rotations of a solid
FEW_WORDS = 24  # elements of S4: with so few, a model would leave short words too soon
EASY_LENGTH = 16  # training traces of at most so many words show easy words more often
MAX_COMMANDS = 2**22  # in all traces that are drawn at once: S5 then fills some gigabytes


class UserError(ValueError):
    """Bad input. A command line shows the message in one line, without a traceback."""


# --- 1. Groups ------------------------------------------------------------------------------------

def draw_symmetric(n, shape, rng):
    """Uniform permutations: [*shape, n]. They are the sorting orders of random numbers."""
    return rng.random((*shape, n)).argsort(-1)


def is_odd(perms):
    """Whether each permutation is odd: its matrix has determinant -1. [..., n] -> bool [...]."""
    matrices = np.eye(perms.shape[-1])[perms]
    return np.linalg.det(matrices) < 0


def draw_alternating(n, shape, rng):
    """Uniform even permutations: [*shape, n].

    Exchanging its last two entries turns an odd permutation into an even one, and no two odd ones
    into the same. So the even permutations stay equally likely.
    """
    perms = draw_symmetric(n, shape, rng)

    odd = is_odd(perms)
    perms[odd, -2:] = perms[odd, :-3:-1]  # the slice takes the last two, the last one first
    return perms


# The lists of all elements. Large groups are only drawn from: S26 has 4e26 elements.

def list_symmetric(n):
    return np.array(list(itertools.permutations(range(n))))


def list_alternating(n):
    perms = list_symmetric(n)
    return perms[~is_odd(perms)]


def list_cyclic(n):
    """The rotations i -> i + s of a circle of n points."""
    points = np.arange(n)
    return (points + points[:, None]) % n


def list_dihedral(n):
    """The rotations of a circle of n points, and its reflections i -> s - i."""
    # With the rotations of n points these are all symmetries of a regular polygon.
    points = np.arange(n)
    reflections = (points[:, None] - points) % n
    return np.concatenate([list_cyclic(n), reflections])


class Family(NamedTuple):
    """Groups that share a letter, one for each n, as permutations of n points.

    To add one's own, put it into FAMILIES. Group checks a family when it is used.
    """
    smallest: int  # the least n
    order: Callable  # n -> how many elements
    elements: Callable  # n -> all of them, in any order: [order, n]
    draw: Callable = None  # (n, shape, rng) -> uniform ones [*shape, n]; None: from the list


FAMILIES = {
    "S": Family(2, factorial, list_symmetric, draw_symmetric),
    "A": Family(3, lambda n: factorial(n) // 2, list_alternating, draw_alternating),
    "Z": Family(2, lambda n: n, list_cyclic),
    "D": Family(3, lambda n: 2 * n, list_dihedral)}


def list_family(family, n):
    """All elements in lexicographic order, so that the identity is the first: [order, n]."""
    return np.unique(family.elements(n), axis=0)


def draw_family(family, n, shape, rng):
    if family.draw is None:
        return rng.choice(list_family(family, n), size=shape)
    return family.draw(n, shape, rng)


@lru_cache
def check_family(family, name, n):
    """Is this a group of permutations of n points that moves each point to each other?

    Large groups are trusted: only those of at most MAX_CHECKED elements are listed.
    Raises: UserError that names the rule that is broken.
    """
    order = family.order(n)
    if order > MAX_CHECKED:
        return

    # As many different elements as there should be, and each a permutation?
    elements = list_family(family, n)
    if elements.shape != (order, n):
        raise UserError(f"group {name}: its order says {order} elements of {n} points, and its "
                        f"list holds {' x '.join(map(str, elements.shape))} different ones")

    if (np.sort(elements, -1) != np.arange(n)).any():
        raise UserError(f"group {name}: each element must be a permutation of 0 to {n - 1}")

    # Closed? A finite set of permutations that is closed has the identity and all inverses, too.
    known = {bytes(element) for element in elements.astype(np.uint8)}
    for g in elements:
        products = g[elements]  # first g, then each h
        if not known.issuperset(map(bytes, products.astype(np.uint8))):
            raise UserError(f"group {name}: the product of two elements is not in its list")

    # Does the value of the first variable reach each of the n values, and equally often? Then all
    # values are equally likely, and Group.chance is right.
    if (np.bincount(elements[:, 0], minlength=n) * n != order).any():
        raise UserError(f"group {name}: every point must reach every other one")

    # A family with a list of one group and draws from another would train without a word.
    drawn = draw_family(family, n, (4 * order,), np.random.default_rng(0))
    if not known.issuperset(map(bytes, drawn.astype(np.uint8))):
        raise UserError(f"group {name}: what it draws is not in its list")


class Group:
    """A finite group as permutations of `degree` points; a product acts on the points side by side.

    Names: S<n> symmetric, A<n> alternating, Z<n> cyclic, D<n> dihedral (order 2n), products like
    A4xZ5 (degree 4 + 5). Elements are numbered in lexicographic order; 0 is the identity.

    Raises: UserError for an unknown name, more than 26 points, or a family that is no group.
    """

    def __init__(self, name):
        # The name, factor by factor.
        self.name = name
        self.factors = []  # the letter and the number of points of each
        for part in name.split("x"):
            match = re.fullmatch(r"([A-Z])([1-9]\d*)", part)
            if not match or match[1] not in FAMILIES:
                known = ", ".join(f"{letter}<n>" for letter in FAMILIES)
                raise UserError(f"unknown group {name!r}: expected {known} or a product such as "
                                "A4xZ5, e.g. --group S5 (120 elements)")
            self.factors.append((match[1], int(match[2])))

        # The points of the factors stand side by side: 0 to 3 for A4, 4 to 8 for Z5.
        sizes = [n for _, n in self.factors]
        self.degree = sum(sizes)
        self.offsets = np.cumsum([0, *sizes])  # the first point of each factor, and the end
        self.chance = len(sizes) / self.degree  # the mean over all points of 1 / orbit

        if self.degree > MAX_VARIABLES:
            raise UserError(f"the variables are the letters a to z: group {name} permutes "
                            f"{self.degree} points, and at most {MAX_VARIABLES} are possible")

        # The order of a product is the product of the orders.
        self.order = 1
        for letter, n in self.factors:
            family = FAMILIES[letter]

            if n < family.smallest:
                raise UserError(f"{letter}{n} is too small: {letter}<n> needs "
                                f"n >= {family.smallest}")

            check_family(family, f"{letter}{n}", n)
            self.order *= family.order(n)

    @cached_property
    def elements(self):
        """All elements in lexicographic order: [order, degree]. Raises: UserError if too many."""
        if self.order > MAX_ENUMERATED:
            raise UserError(f"group {self.name} has {self.order:,} elements; listing them is "
                            f"refused above {MAX_ENUMERATED:,} (traces can still be drawn)")

        listed = np.zeros((1, 0), int)
        for (letter, n), offset in zip(self.factors, self.offsets):
            factor = list_family(FAMILIES[letter], n) + offset
            # Each element so far beside each element of the factor.
            left = listed.repeat(len(factor), 0)
            right = np.tile(factor, (len(listed), 1))

            listed = np.hstack([left, right])
        return listed

    def draw(self, shape, rng):
        """Uniform random elements as permutations: [*shape, degree]. No large group is listed."""
        # Each factor permutes its own points, and so the factors are drawn one by one.
        drawn = []
        for (letter, n), offset in zip(self.factors, self.offsets):
            drawn.append(draw_family(FAMILIES[letter], n, shape, rng) + offset)
        return np.concatenate(drawn, -1)

    def index(self, perms):
        """The number of each permutation in .elements: [..., degree] -> [...]."""
        # The list is sorted, so a binary search finds each one.
        return np.searchsorted(self._keys(self.elements), self._keys(perms))

    def compose(self, g, h):
        """First g, then h: the element i -> g[h[i]]. Numbers, of any shapes that broadcast."""
        # new[i] = old[g[i]], and after it newest[i] = new[h[i]] = old[g[h[i]]].
        g, h = np.broadcast_arrays(g, h)
        product = np.take_along_axis(self.elements[g], self.elements[h], -1)
        return self.index(product)

    def shortest_words(self, alphabet):
        """The fewest commands that lead to each element: {its number: a list of commands}."""
        numbers = self.index(alphabet)
        words = {0: []}
        frontier = [0]

        for element in frontier:  # breadth first: the list grows while it is read
            products = self.compose(element, numbers).tolist()
            for letter, product in zip(alphabet, products):
                if product not in words:
                    words[product] = words[element] + [letter]
                    frontier.append(product)
        return words

    @cached_property
    def transpositions(self):
        """The exchanges of two points, i < j, that generate a product of S<n>: [count, degree].

        Raises: UserError for any other group.
        """
        if any(letter != "S" for letter, _ in self.factors):
            raise UserError(f"swap commands need a group generated by its transpositions: S<n> or "
                            f"a product such as S3xS4, not {self.name}")

        # Both points lie in one factor: S3xS4 has no exchange of a point of S3 and one of S4.
        swaps = []
        for begin, end in itertools.pairwise(self.offsets):
            for i, j in itertools.combinations(range(begin, end), 2):
                swap = np.arange(self.degree)
                swap[[i, j]] = j, i
                swaps.append(swap)
        return np.array(swaps)

    @staticmethod
    def _keys(perms):
        # Rows as byte strings, which numpy compares from left to right, as a list of permutations
        # in lexicographic order needs it. + 1: numpy strips zero bytes at the end of a string.
        rows = np.ascontiguousarray(perms + 1, dtype=np.uint8)
        return rows.view(f"S{rows.shape[-1]}")[..., 0]


# --- 2. Commands and states -----------------------------------------------------------------------

COMMANDS = ["full", "swap"]  # a whole group element per command, or one transposition


def draw_commands(group, commands, shape, rng):
    """Random commands, uniform over the alphabet `full` or `swap`: [*shape, n]."""
    if commands == "full":
        return group.draw(shape, rng)
    return rng.choice(group.transpositions, size=shape)


def run_commands(commands, state=None):
    """The state after each command, s_t = s_{t-1}[g_t]: [B, L, n], [B, n] or None -> [B, L, n]."""
    batch, length, n = commands.shape

    # In the identity, variable i holds value i.
    if state is None:
        state = np.broadcast_to(np.arange(n), (batch, n))

    # One step for all traces at once; the steps of a trace depend on one another.
    states = np.empty_like(commands)
    for t in range(length):
        state = np.take_along_axis(state, commands[:, t], -1)
        states[:, t] = state
    return states


def draw_sparse_commands(group, shape, rng):
    """Products of 1 to n random exchanges: many of them leave most variables where they are.

    A uniform permutation of many points moves nearly all of them.  -> [*shape, n]
    """
    # Random products of 1, 2, ..., n exchanges, of which one is kept.
    n = group.degree
    count = int(np.prod(shape))
    products = run_commands(draw_commands(group, "swap", (count, n), rng))
    last = rng.integers(n, size=(count, 1, 1))
    return np.take_along_axis(products, last, 1).reshape(*shape, n)


def points_moved(perms):
    """How many points each permutation moves: [..., n] -> [...]."""
    return (perms != np.arange(perms.shape[-1])).sum(-1)


class SizeRule(NamedTuple):
    """What a task of n variables asks of a model, of its training, and of the traces for it."""
    model_options: dict
    recipe_options: dict
    reveals_in_a_row: int
    sparse_commands: bool


def rule_for(n):
    """All that depends on the number of variables. Found by experiment, for n from 3 to 26.

    conv_width   n + 1 tokens see one side of a command; there are two to spare.
    d_model      two heads from n = 8 on. A key needs 2n dimensions (scan.py); a head has at least
                 2n + 8 of them, in steps of 8, and at least 32.
    lr           falls as 1 / n above five variables, and that of the matrices as 1 / sqrt n: a wide
                 convolution adds up many terms.
    last_steps   smaller rates need more steps. With 150 a model is right, but imprecise, and loses
                 long traces by drift.
    reveals      n // 4 in a row: a trace then tells more of its state.
    sparse       single commands that leave most variables alone are learned sooner. Later stages
                 rehearse them, in one trace of sixteen.
    """
    model_options = {"conv_width": n + 3}
    if n > 7:
        # Two heads: each has half of the width. n / 4 is rounded up.
        model_options |= {"d_model": max(64, 16 * -(-n // 4) + 16), "heads": 2}

    # S5 is where the rates were found.
    fall = min(1.0, 5 / n)
    recipe_options = {"lr": 4e-3 * fall, "matrix_lr": 0.02 * fall**0.5}
    if n > 7:
        recipe_options["last_steps"] = 300
    return SizeRule(model_options, recipe_options, max(1, n // 4), n > 7)


# --- 3. Tasks -------------------------------------------------------------------------------------
#
# A task is any class with these four members:
#
#     vocab                                          its symbols, a list of str
#     chance                                         accuracy of a guess that ignores the state
#     training_batch(batch, length, spacing, rng)    a Batch of fresh traces
#     test_batch(batch, length, spacing, rng)        a Batch of the distribution to be tested on
#
# The command line also reads the following, if it is there: check(length, spacing), which refuses
# traces that the task cannot make; model_options and recipe_options, in place of the defaults of
# models.py and of train.Recipe; test_lengths, a list of (L, S).


class Batch(NamedTuple):
    """Traces, as a task hands them to the training loop."""
    inputs: np.ndarray  # int64 [B, T]
    targets: np.ndarray  # int64 [B, T] what should come out at each position
    reveals: np.ndarray  # bool [B, T] the targets that count for the accuracy
    best: np.ndarray = None  # [B, reveals of a trace, vocabulary] what an ideal reader predicts


def next_tokens(tokens, reveals, best=None):
    """Traces as a Batch for next-token prediction: the target of each token is the one after it."""
    return Batch(tokens[:, :-1], tokens[:, 1:], reveals[:, 1:], best)


def check_spacing(length, spacing):
    """Raises: UserError unless the length is a positive multiple of the spacing."""
    if length < 1 or spacing < 1 or length % spacing:
        raise UserError("a trace ends on a reveal, so its length must be a positive multiple "
                        f"of the spacing; got length {length}, spacing {spacing}")


class ReplTask:
    """Next-token prediction on Python REPL traces; accuracy counts the revealed values only.

    A token is a symbol of a small lossless lexer; a comma belongs to the name after it. A trace has
    T = 5n + L (2n + 3) + 11 L/S tokens, where a `swap` command has 7 tokens, not 2n + 3.

    sparse: whether training shows sparse commands where each command has a reveal; None: as
        rule_for(n) says. The commands of other groups than S<n> are never sparse. With eight
        variables or more, later stages rehearse sparse commands in any case.

    Raises: UserError if the commands are swaps and the group has none.
    """

    more_symbols = []  # of a subclass whose traces contain other lines, too

    def __init__(self, group, commands="full", sparse=None):
        self.group = group
        self.commands = commands
        self.chance = group.chance
        if commands == "swap":
            group.transpositions  # refuses a group without them here, not at the first batch

        # What the size of the task asks of models and recipes.
        self.rule = rule_for(group.degree)
        self.model_options = self.rule.model_options
        self.recipe_options = self.rule.recipe_options
        self.sparse = self.rule.sparse_commands if sparse is None else sparse

        # The vocabulary: marks, names at the start of a list, names within it, values.
        self.names = string.ascii_lowercase[:group.degree]
        values = [str(i + 1) for i in range(group.degree)]
        comma_names = [f", {name}" for name in self.names]
        marks = [">>> ", " = ", "print('", "'", ")", " ", "\n"]
        self.vocab = [*marks, *self.names, *comma_names, *values, *self.more_symbols]
        self._id = {symbol: i for i, symbol in enumerate(self.vocab)}

        # Tables from a variable, or from its value, to a token.
        self._name = np.array([self._id[name] for name in self.names])
        self._comma_name = np.array([self._id[name] for name in comma_names])
        self.value_tokens = np.array([self._id[value] for value in values])

        # Of two symbols that fit at one place the lexer must take the longer: print(' is not the
        # variable p, and 12 is not a 1.
        longest_first = sorted(self.vocab, key=len, reverse=True)
        self._lexer = re.compile("|".join(map(re.escape, longest_first)))

    check = staticmethod(check_spacing)

    @property
    def alphabet(self):
        """All commands, as permutations: [commands, n]. Raises: UserError if there are too many."""
        return self.group.elements if self.commands == "full" else self.group.transpositions

    def encode(self, text):
        """Token ids of a trace: decode(encode(text)) == text. Raises: UserError."""
        # findall skips what is no symbol: then the symbols are not the whole text.
        symbols = self._lexer.findall(text)
        if "".join(symbols) != text:
            raise UserError(f"not all of {text!r} is made of symbols of {self.group.name} traces")
        return [self._id[symbol] for symbol in symbols]

    def decode(self, ids):
        """The text of a sequence of token ids."""
        return "".join(self.vocab[i] for i in ids)

    # Batches.

    def test_batch(self, batch, length, spacing, rng):
        """Uniform commands, one uniform reveal after every `spacing` of them."""
        return next_tokens(*self.sample(batch, length, spacing, rng))

    def training_batch(self, batch, length, spacing, rng):
        """As a test batch with up to seven variables; with more, by rule_for(n) an easier one."""
        self.check(length, spacing)
        n = self.group.degree
        commands = draw_commands(self.group, self.commands, (batch, length), rng)

        # The stages with a reveal after every command are where commands are learned. Later one
        # trace in sixteen rehearses them: uniform commands move nearly all variables, and a model
        # that reads nothing else forgets the exchange of two.
        sparse = 0
        if spacing == 1 and self.sparse:
            sparse = batch
        elif spacing > 1 and self.rule.sparse_commands:
            sparse = -(-batch // 16)  # rounded up

        # Sparse commands are elements of S<n>, and of no other group.
        if sparse and self.commands == "full" and self.group.order == factorial(n):
            commands[:sparse] = draw_sparse_commands(self.group, (sparse, length), rng)

        # The variables to reveal, several in a row if there are many of them.
        asked = rng.integers(n, size=(batch, length // spacing, self.rule.reveals_in_a_row))
        return next_tokens(*self.write(commands, asked))

    def sample(self, batch, length, spacing, rng):
        """Random traces: tokens int64 [B, T]; reveals bool [B, T], True at a revealed value."""
        self.check(length, spacing)
        commands = draw_commands(self.group, self.commands, (batch, length), rng)
        asked = rng.integers(self.group.degree, size=(batch, length // spacing))
        return self.write(commands, asked)

    # From permutations to tokens.

    def write(self, commands, asked):
        """As sample: commands [B, L, n]; asked [B, L/S], or [B, L/S, P] for P reveals in a row."""
        return self.assemble(self.command_tokens(commands), asked, self.answers(commands, asked))

    def answers(self, commands, asked):
        """The revealed values, from 0, in the shape of asked."""
        spacing = commands.shape[1] // asked.shape[1]
        states = run_commands(commands)[:, spacing - 1::spacing]  # at each place of reveals
        variables = asked.reshape(*states.shape[:2], -1)
        return np.take_along_axis(states, variables, -1).reshape(asked.shape)

    def assemble(self, lines, asked, answers):
        """First lines, commands and reveals in the order of a trace.

        Shapes: lines [B, L, tokens of a command]; asked, answers as in write
                -> tokens int64 [B, T], reveals bool [B, T]
        """
        batch, count = asked.shape[:2]  # count: places of reveals, L/S
        shown = self.reveal_tokens(asked, answers)

        is_answer = np.zeros(shown.shape, bool)
        is_answer[..., -2] = True  # of `b 3\n`, the last tokens of a reveal

        # One block for each place of reveals: the commands before it, then what it shows. A trace
        # is all its blocks in a row.
        commands = lines.reshape(batch, count, -1)
        shown = shown.reshape(batch, count, -1)
        is_answer = is_answer.reshape(batch, count, -1)
        blocks = np.concatenate([commands, shown], -1)
        marks = np.concatenate([np.zeros(commands.shape, bool), is_answer], -1)

        # The same first lines in every trace: variable i holds value i.
        start = np.tile(self.start_tokens(), (batch, 1))
        tokens = np.hstack([start, blocks.reshape(batch, -1)])
        reveals = np.hstack([np.zeros(start.shape, bool), marks.reshape(batch, -1)])
        return tokens, reveals

    def start_tokens(self):
        """`>>> a = 1` and so on, a line for each variable: [5n]."""
        lines = self._line(self._name.shape, ">>> ", self._name, " = ", self.value_tokens, "\n")
        return lines.reshape(-1)

    def command_tokens(self, commands):
        """`>>> a, b, c = c, a, b`: [..., n] -> [..., 2n + 3], or [..., 7] for swaps."""
        # The names on either side of the equals sign.
        if self.commands == "full":
            left = np.broadcast_to(np.arange(self.group.degree), commands.shape)
            right = commands
        else:
            # Only the two names that move are written. A stable sort leaves them in order.
            stays = commands == np.arange(self.group.degree)
            left = stays.argsort(-1, kind="stable")[..., :2]  # the two variables that move
            right = left[..., ::-1]
        return self._line(commands.shape[:-1], ">>> ", *self._names(left), " = ",
                          *self._names(right), "\n")

    def _names(self, variables):
        """`a, b, c`: [..., count] -> count arrays of ids [...]."""
        first = self._name[variables[..., 0]]
        rest = self._comma_name[variables[..., 1:]]
        return [first, *np.moveaxis(rest, -1, 0)]

    def reveal_tokens(self, asked, answers):
        """`>>> print('b', b)` and its output `b 3`: [...], [...] -> [..., 11]."""
        name = self._name[asked]
        return self._line(asked.shape, ">>> ", "print('", name, "'", self._comma_name[asked], ")",
                          "\n", name, " ", self.value_tokens[answers], "\n")

    def _line(self, shape, *parts):
        """Side by side, one token each: symbols, and arrays of ids [*shape] -> [*shape, parts]."""
        # A symbol is the same in every line, an array of ids is not.
        columns = []
        for part in parts:
            ids = self._id[part] if isinstance(part, str) else part
            columns.append(np.broadcast_to(ids, shape))
        return np.stack(columns, -1, dtype=np.int64)


class WordTask:
    """One token per group element; the label at t is the product of the first t elements.

    This is the older form of the task, on which DeltaProduct and others report. A model must make
    a whole permutation of a single token. With spacing S only every S-th label counts.

    easy: whether training shows easy words more often, while its traces are short; None: with more
        than MAX_ROTATIONS elements.
    """

    # A word needs nothing from the words before it, so there is no local block. It makes several
    # writes at once. If they all erased before training, a few words would empty the state, and a
    # model would learn to do without: so beta starts near 2, as a reflection. And each of the 120
    # words of S5 needs keys of its own, so the model is wide.
    model_options = {"conv_width": 1, "beta_start": 0.9, "d_model": 128, "heads": 8}
    # Short traces teach the words, and a step of them holds many (level). One batch with 80% of the
    # labels ends a stage. Traces of 128 words are not waited for: constant rates keep their
    # accuracy down. So their stage, the last one, is long, and its rates fall to 0 (average=False).
    recipe_options = {
        "curriculum": [(2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (128, 1)],
        "batch": 4, "level": True, "advance": 0.8, "streak": 1, "max_steps": 8000,
        "last_steps": 5000, "average": False, "optimizer": "adamw", "lr": 3e-3,
        "matrix_lr": 3e-3}
    # The few words of S3 and S4 are half known after some dozen steps. A model that went on then
    # would forget them at 128 words, or would track a quotient only (S3 is one of S4). So it stays
    # with short words for longer, and takes smaller steps.
    few_words_options = {"advance": 0.9, "streak": 10, "lr": 2e-3, "matrix_lr": 2e-3}
    test_lengths = [(64, 1), (128, 1), (256, 1), (512, 1)]
    check = staticmethod(check_spacing)

    def __init__(self, group, commands="full", easy=None):
        self.group = group
        self.commands = commands
        self.easy = group.order > MAX_ROTATIONS if easy is None else easy
        if group.order <= FEW_WORDS:
            self.recipe_options = self.recipe_options | self.few_words_options
        self.chance = 1 / group.order  # all words are equally likely, and so are all answers
        self.vocab = ["".join(string.ascii_lowercase[i] for i in g) for g in group.elements]
        if commands == "swap":
            group.transpositions  # refuses a group without them here

    def training_batch(self, batch, length, spacing, rng):
        """As a test batch; with up to EASY_LENGTH words, those that move few points are commoner.

        An exchange takes one reflection, a cycle of five points four. A model that can exchange
        learns the harder words one by one.
        From S4 and A5 easy words would lead away: these groups are the rotations of a cube and of
        an icosahedron, and a rotation in space takes two reflections.
        """
        words = draw_commands(self.group, self.commands, (batch, length), rng)
        if self.easy and length <= EASY_LENGTH:
            # Of two words the one that leaves more points in place. So every word is shown.
            others = draw_commands(self.group, self.commands, (batch, length), rng)
            easier = points_moved(others) < points_moved(words)
            words = np.where(easier[..., None], others, words)
        return self.batch_of(words, spacing)

    def test_batch(self, batch, length, spacing, rng):
        """Uniform words, and their running products."""
        return self.batch_of(draw_commands(self.group, self.commands, (batch, length), rng),
                             spacing)

    def batch_of(self, words, spacing):
        """A Batch of words [B, L, n]: their numbers, and those of the running products."""
        batch, length, _ = words.shape
        self.check(length, spacing)

        # The answer after each word is a word of the same vocabulary.
        inputs = self.group.index(words)
        targets = self.group.index(run_commands(words))
        counts = np.arange(1, length + 1) % spacing == 0
        return Batch(inputs, targets, np.tile(counts, (batch, 1)))


TASKS = {"repl": ReplTask, "word": WordTask}  # by the names of --format


# --- 4. Random numbers ----------------------------------------------------------------------------

PURPOSES = {"train": 0, "valid": 1, "test": 2, "split": 3}


def generator(seed, purpose, *key):
    """A random generator of its own for each (seed, purpose, key).

    So the batch of a step can be drawn without those before it, and no test trace is ever trained
    on.  Source: numpy's SeedSequence, whose spawn keys give independent streams.
    """
    # The purpose stands first, so that no key of one purpose equals a key of another.
    key = (PURPOSES[purpose], *key)

    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


# --- 5. What the command lines share --------------------------------------------------------------

def number(low, high=10**8, kind=int):
    """A type for argparse: a number from low to high, and so neither nan nor inf."""
    # nan is in no interval: each comparison with it is false.
    def read(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must lie in [{low}, {high}], got {text}")
        return value

    read.__name__ = kind.__name__  # argparse calls the type by its name if the text is no number
    return read


def stages(text):
    """A type for argparse: '8:1,16:2' -> [(8, 1), (16, 2)], pairs of a length and a spacing."""
    # int() would also take ' 8', '+8' and '8_0'. So a regular expression reads the text first.
    if not re.fullmatch(r"\d{1,9}:\d{1,9}(,\d{1,9}:\d{1,9})*", text):
        raise argparse.ArgumentTypeError(f"expected LENGTH:SPACING,..., as in 8:1,16:2; got "
                                         f"{text!r}")

    found = []
    for stage in text.split(","):
        length, spacing = stage.split(":")
        found.append((int(length), int(spacing)))
    return found


def try_stages(task, pairs, traces, most=MAX_COMMANDS):
    """Refuses, before any work, what the task cannot make or memory cannot hold.

    pairs: (length, spacing); traces: how many are drawn at once.  Raises: UserError.
    """
    for length, spacing in pairs:
        # A task of one's own need not have a check: then a single trace is drawn.
        if hasattr(task, "check"):
            task.check(length, spacing)
        else:
            task.training_batch(1, length, spacing, generator(0, "valid"))
            task.test_batch(1, length, spacing, generator(0, "valid"))

        if length * traces > most:
            raise UserError(f"{traces:,} traces of {length:,} commands are too many to be read at "
                            f"once: at most {most:,} commands in all")


def parse(parser, argv):
    """The options. An empty one, as --out "" from an unset shell variable, is a mistake."""
    # argparse itself accepts an empty text, and Path("") is the current folder.
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if value == "":
            parser.error(f"--{name.replace('_', '-')} is empty: leave it out, or give it a value")
    return args


@contextlib.contextmanager
def one_line_errors(parser):
    """Bad input in this block ends the program with one line and exit code 2."""
    # Any other exception is a bug of ours, or of a fork: it shows where it arose.
    try:
        yield
    except (UserError, OSError) as error:
        parser.error(" ".join(str(error).split()))


def run(main):
    """What `python FILE.py` does: main(). Ctrl-C and a closed pipe end it without a traceback."""
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack a letter

    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # as in `python data.py | head -1`
        # Python flushes stdout when it ends, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


# --- To see before reading: python data.py --------------------------------------------------------

def main(argv=None):
    parser = argparse.ArgumentParser(description="Print a trace, its tokens, and the states.")
    add = parser.add_argument
    add("--group", default="S5", help="S<n>, A<n>, Z<n>, D<n> or a product (A4xZ5)")
    add("--commands", default="full", choices=COMMANDS)
    add("--length", type=number(1, 100), default=4, help="number of commands")
    add("--spacing", type=number(1), default=2, help="commands per reveal")
    args = parse(parser, argv)
    with one_line_errors(parser):
        task = ReplTask(Group(args.group), args.commands)
        tokens, _ = task.sample(1, args.length, args.spacing, generator(0, "valid"))

    print(f"{task.group.order:,} states, chance {task.chance:.3f}; {tokens.size} tokens\n")
    variables = {}
    width = 6 * task.group.degree + 6

    # Python executes the trace, line by line.
    for line in task.decode(tokens[0]).splitlines():
        if line.startswith(">>> ") and "print" not in line:
            exec(line[4:], {}, variables)  # the state shown is Python's own, not ours
        state = " ".join(str(variables.get(name, ".")) for name in task.names)
        pieces = "|".join(task.vocab[i] for i in task.encode(line))
        print(f"{line:<{width}} state {state}   tokens {pieces}")


if __name__ == "__main__":
    run(main)
