"""What must a machine read to be forced to track state?  Permutations, spelled as Python.

    >>> a = 1                         state     s[i] = value of variable i         (1, 2, 3)
    >>> b = 2
    >>> c = 3
    >>> a, b, c = c, a, b             command   g = (2, 0, 1): new[i] = old[g[i]]  (3, 1, 2)
    >>> a, b = b, a                   command   g = (1, 0, 2)                      (1, 3, 2)
    >>> print('b', b)                 reveal    one variable, chosen uniformly
    b 3                                         the 3 is the only token that tests the state

Prose says line, print and program for a command, a reveal and a trace.

Conventions of permutations, the same in every file (those of matrices stand in scan.py)
    Permutations are arrays of 0-based positions. A command with right-hand side g sets
    new[i] = old[g[i]]. "First g, then h" turns the state s into s[g[h[i]]], so
    compose(g, h) = g[h], numpy-indexed. Time, and composition, run from left to right.

Symbols
    n  degree: number of variables     L  length: number of commands in a trace     T  its tokens
    B  batch: number of traces         S  spacing: commands per reveal (L is a multiple of S)

Source: Siems et al. 2026 (arXiv 2602.14814), section 3.

To see before reading: python data.py
Next: scan.py, a linear recurrence that can execute such a program.
"""

import argparse
import itertools
import math
import os
import re
import string
import sys
from functools import cached_property
from math import factorial
from typing import NamedTuple

import numpy as np

# --- 1. Commands and states -----------------------------------------------------------------------

COMMANDS = ["full", "swap"]  # a whole group element per command, or an exchange of two variables


def draw_commands(group, commands, shape, rng):
    """Random commands, uniform over the alphabet `full` or `swap`: [*shape, n]."""
    if commands == "full":
        return group.draw(shape, rng)
    return rng.choice(group.transpositions, size=shape)


# Training may show runs of one command. A model's error in a command is small, and in a trace of
# uniform commands most errors differ, so that they partly cancel. Equal errors add up: equal
# commands are the best teacher of precision.
STAY = 0.8  # probability that a command of such a trace is the one before it: runs of 5, on average
SHORTEST_WITH_RUNS = 8  # commands of a trace


def repeat_commands(commands, rng):
    """Commands in runs: each is replaced by the one before it with the probability STAY.

    Shapes: [B, L, n] -> [B, L, n].
    """
    batch, length, _ = commands.shape
    stays = rng.random((batch, length)) < STAY

    # A run shows its first command throughout: the latest one that does not stay, or the first of
    # the trace.
    first = np.where(stays, 0, np.arange(length))
    first = np.maximum.accumulate(first, 1)
    return np.take_along_axis(commands, first[..., None], 1)


def compose(g, h):
    """First g, then h: the permutation i -> g[h[i]].  Shapes: [..., n], [..., n] -> [..., n]."""
    # new[i] = old[g[i]], and after it newest[i] = new[h[i]] = old[g[h[i]]].
    return np.take_along_axis(g, h, -1)


def run_commands(commands):
    """The state after each command, s_t = compose(s_{t-1}, g_t): [B, L, n] -> [B, L, n]."""
    batch, length, n = commands.shape

    # At the start variable i holds value i.
    state = np.tile(np.arange(n), (batch, 1))

    # One step for all traces at once; the steps of a trace depend on one another.
    states = np.empty_like(commands)
    for t in range(length):
        state = compose(state, commands[:, t])
        states[:, t] = state
    return states


# --- 2. The trace ---------------------------------------------------------------------------------
#
# A task is any class with these four members, and for a command line with the fifth:
#
#     vocab                                          its symbols, a list of str
#     chance                                         accuracy of a guess that ignores the state
#     training_batch(batch, length, spacing, rng)    a Batch of fresh traces
#     test_batch(batch, length, spacing, rng)        a Batch of the distribution to be tested on
#     check(length, spacing)                         raises a UserError if no trace is like that


class Batch(NamedTuple):
    """Traces, as a task hands them to the training loop."""
    inputs: np.ndarray  # int64 [B, T]
    targets: np.ndarray  # int64 [B, T] what should come out at each position
    reveals: np.ndarray  # bool [B, T] the targets that count for the accuracy


def next_tokens(tokens, reveals):
    """Traces as a Batch for next-token prediction: the target of each token is the one after it."""
    return Batch(tokens[:, :-1], tokens[:, 1:], reveals[:, 1:])


class Lexer:
    """Texts as ids of symbols, and back: decode(encode(text)) == text."""

    def __init__(self, vocab):
        self.vocab = vocab
        self._id = {symbol: i for i, symbol in enumerate(vocab)}

        # Of two symbols that fit at one place the lexer must take the longer: print(' is not the
        # variable p, and 12 is not a 1.
        longest_first = sorted(vocab, key=len, reverse=True)
        self._symbol = re.compile("|".join(map(re.escape, longest_first)))

    def encode(self, text):
        """The ids of the symbols of a text: a list.  Raises: UserError."""
        # findall skips what is no symbol: then the symbols are not the whole text.
        symbols = self._symbol.findall(text)
        if "".join(symbols) != text:
            raise UserError(f"not all of {text!r} is made of symbols of these traces")
        return [self._id[symbol] for symbol in symbols]

    def decode(self, ids):
        """The text of a sequence of ids."""
        return "".join(self.vocab[i] for i in ids)


class ReplTask(Lexer):
    """Next-token prediction on Python REPL traces; accuracy counts the revealed values only.

    A token is a symbol of a small lossless lexer; a comma belongs to the name after it. A trace has
    T = 5n + L (2n + 3) + 11 L/S tokens, where a `swap` command has 7 tokens, not 2n + 3.

    runs: the share of the traces of a training batch in which commands come in runs, from 0 to 1.
    Raises: UserError if the commands are swaps and the group has none, or runs are no share.
    """

    more_symbols = []  # of a subclass whose traces contain other lines, too

    def __init__(self, group, commands="full", runs=0.0):
        self.group = group
        self.commands = commands
        self.runs = runs
        self.chance = group.chance
        if commands == "swap":
            group.require_swaps()  # here, and not at the first batch
        if not 0 <= runs <= 1:
            raise UserError(f"runs are a share of the traces, from 0 to 1; got {runs}")

        # The vocabulary: marks, names at the start of a list, names within it, values.
        self.names = string.ascii_lowercase[:group.degree]
        values = [str(i + 1) for i in range(group.degree)]
        comma_names = [f", {name}" for name in self.names]
        marks = [">>> ", " = ", "print('", "'", ")", " ", "\n"]
        super().__init__([*marks, *self.names, *comma_names, *values, *self.more_symbols])

        # Tables from a variable, or from its value, to a token.
        self._name = np.array([self._id[name] for name in self.names])
        self._comma_name = np.array([self._id[name] for name in comma_names])
        self.value_tokens = np.array([self._id[value] for value in values])

    @property
    def alphabet(self):
        """Every command there is, as permutations: [commands, n]."""
        return self.group.elements if self.commands == "full" else self.group.transpositions

    # Batches.

    def training_batch(self, batch, length, spacing, rng):
        """As test_batch, but for runs of one command in some of the traces (repeat_commands)."""
        # Two commands are too few for a run: such traces teach what a command is.
        in_runs = round(self.runs * batch) if length >= SHORTEST_WITH_RUNS else 0
        return self.draw_batch(batch, length, spacing, rng, in_runs)

    def test_batch(self, batch, length, spacing, rng):
        """Uniform commands, and after every `spacing` of them one uniform reveal."""
        return self.draw_batch(batch, length, spacing, rng, 0)

    def draw_batch(self, batch, length, spacing, rng, in_runs):
        """Traces of uniform commands, of which the first `in_runs` traces have runs."""
        self.check(length, spacing)
        commands = draw_commands(self.group, self.commands, (batch, length), rng)
        commands[:in_runs] = repeat_commands(commands[:in_runs], rng)
        asked = rng.integers(self.group.degree, size=(batch, length // spacing))
        return next_tokens(*self.write(commands, asked, spacing))

    @staticmethod
    def check(length, spacing):
        """Raises: UserError unless the length is a positive multiple of the spacing."""
        if length < 1 or spacing < 1 or length % spacing:
            raise UserError("a trace ends on a reveal, so its length must be a positive multiple "
                            f"of the spacing; got length {length}, spacing {spacing}")

    # From permutations to tokens.

    def write(self, commands, asked, spacing):
        """The traces of these commands, in which these variables are revealed.

        Shapes: commands [B, L, n]; asked [B, L/S], or [B, L/S, P] for P reveals in a row
                -> tokens int64 [B, T]; reveals bool [B, T], True at a revealed value.
        Raises: UserError unless there is a place in `asked` after each `spacing` commands.
        """
        lines = self.command_tokens(commands)
        return self.assemble(lines, asked, self.answers(commands, asked, spacing))

    def answers(self, commands, asked, spacing):
        """The revealed values, from 0, in the shape of asked."""
        if commands.shape[1] != spacing * asked.shape[1]:
            raise UserError(f"{commands.shape[1]} commands with a reveal after every {spacing} do "
                            f"not have {asked.shape[1]} places of reveals")

        # A reveal shows the state after the last of `spacing` commands.
        states = run_commands(commands)[:, spacing - 1::spacing]  # [B, L/S, n]
        variables = asked.reshape(*states.shape[:2], -1)  # [B, L/S, P]
        return np.take_along_axis(states, variables, -1).reshape(asked.shape)

    def assemble(self, lines, asked, answers):
        """First lines, commands and reveals in the order of a trace.

        Shapes: lines [B, L, tokens of a command]; asked, answers as above -> as write.
        """
        batch, count = asked.shape[:2]  # count: places of reveals in a trace, L/S
        shown = self.reveal_tokens(asked, answers)
        is_answer = np.zeros(shown.shape, bool)
        is_answer[..., -2] = True  # of `b 3\n`, the last tokens of a reveal

        # One block for each reveal: the commands before it, then what it shows. A trace is all its
        # blocks in a row.
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

    def reveal_tokens(self, asked, answers):
        """`>>> print('b', b)` and its output `b 3`: [...], [...] -> [..., 11]."""
        name = self._name[asked]
        return self._line(asked.shape, ">>> ", "print('", name, "'", self._comma_name[asked], ")",
                          "\n", name, " ", self.value_tokens[answers], "\n")

    def _names(self, variables):
        """`a, b, c`: [..., count] -> count arrays of ids [...]."""
        first = self._name[variables[..., 0]]
        rest = self._comma_name[variables[..., 1:]]
        return [first, *np.moveaxis(rest, -1, 0)]

    def _line(self, shape, *parts):
        """Side by side, one token each: symbols, and arrays of ids [*shape] -> [*shape, parts]."""
        # A symbol is the same in every line, an array of ids is not.
        columns = []
        for part in parts:
            ids = self._id[part] if isinstance(part, str) else part
            columns.append(np.broadcast_to(ids, shape))
        return np.stack(columns, -1, dtype=np.int64)


# --- 3. Groups ------------------------------------------------------------------------------------

class Group:
    """A finite group as permutations of n points; n is its degree.

    Names: S<n> symmetric, A<n> alternating, Z<n> cyclic, D<n> dihedral (order 2n). Or a name of
    one's own with all elements [order, n], in any order.

    Attributes: degree; order, how many elements; chance, the accuracy of a guess that knows the
        variable but not the state.
    Raises: UserError for an unknown name, more than 26 points, or elements that are no group.
    """

    def __init__(self, name, elements=None):
        self.name = name
        if elements is None:
            self.letter, self.degree, self.order = read_name(name)
        else:
            self.letter = None
            self.elements = distinct(name, elements)
            self.order, self.degree = self.elements.shape

        if self.degree > 26:
            raise UserError(f"the variables are the letters a to z, and {name} permutes "
                            f"{self.degree} points: at most 26 are possible")
        if elements is not None:
            check_group(name, self.elements)
        # A group that moves each point to each other one does so equally often.
        self.chance = 1 / self.degree

    @cached_property
    def elements(self):
        """All elements in lexicographic order, the identity first: [order, n]."""
        lists = {"S": list_symmetric, "A": list_alternating, "Z": list_cyclic, "D": list_dihedral}
        return np.unique(lists[self.letter](self.degree), axis=0)

    def draw(self, shape, rng):
        """Uniform random elements: [*shape, n]."""
        if self.letter not in ("S", "A"):
            return rng.choice(self.elements, size=shape)

        # S26 has 4e26 elements, and nobody lists them. A random permutation is the sorting order of
        # random numbers.
        perms = rng.random((*shape, self.degree)).argsort(-1)

        # To exchange its last two entries turns an odd permutation into an even one, and no two odd
        # ones into the same: the even ones stay equally likely.
        if self.letter == "A":
            odd = is_odd(perms)
            perms[odd, -2:] = perms[odd][:, [-1, -2]]
        return perms

    def require_swaps(self):
        """Raises: UserError unless the exchanges of two points generate this group: it is S<n>."""
        if self.order != factorial(self.degree):
            raise UserError(f"swap commands need S<n>, which exchanges generate; got {self.name}")

    @cached_property
    def transpositions(self):
        """The exchanges of two points, i < j: [n (n - 1) / 2, n].  Raises: as require_swaps."""
        self.require_swaps()

        # Each is the identity with two entries exchanged.
        swaps = []
        for i, j in itertools.combinations(range(self.degree), 2):
            swap = np.arange(self.degree)
            swap[[i, j]] = j, i
            swaps.append(swap)
        return np.array(swaps)


def read_name(name):
    """S5 -> its letter, degree and order: (S, 5, 120).  Raises: UserError."""
    # fullmatch: the whole name, so that S5x is refused and not read as S5.
    match = re.fullmatch(r"([SAZD])([1-9]\d*)", name)
    if not match:
        raise UserError(f"unknown group {name!r}: expected S<n>, A<n>, Z<n> or D<n>, e.g. --group "
                        "S5 (120 elements)")

    letter = match[1]
    n = int(match[2])
    if n < (3 if letter in "AD" else 2):
        raise UserError(f"group {name} is too small: S and Z begin at 2, A and D at 3")

    orders = {"S": factorial(n), "A": factorial(n) // 2, "Z": n, "D": 2 * n}
    return letter, n, orders[letter]


def distinct(name, elements):
    """A list of permutations without repetitions, in lexicographic order: int64 [order, n].

    Raises: UserError if it is none.
    """
    try:
        found = np.asarray(elements, dtype=float)
    except (ValueError, TypeError) as error:  # rows of several lengths, words
        raise UserError(f"group {name}: {error}") from None
    if found.ndim != 2 or not found.size:
        raise UserError(f"group {name}: its elements are a list of permutations, [order, n]; got "
                        f"shape {list(found.shape)}")

    # Sorted, a permutation of n points is 0, 1, ..., n - 1.
    n = found.shape[1]
    if (np.sort(found) != np.arange(n)).any():
        raise UserError(f"group {name}: each element must be a permutation of 0 to {n - 1}")
    return np.unique(found.astype(np.int64), axis=0)


def check_group(name, elements):
    """Raises: UserError unless these [order, n] are a group that moves each point to each other.

    A list is a group if it is what a few of its elements generate. Each element that their products
    lack at least doubles them, so that some log2(order) elements are enough.
    """
    # A finite set of permutations that is closed has all inverses, too.
    order, n = elements.shape
    if (elements[0] != np.arange(n)).any():
        raise UserError(f"group {name} lacks the identity, and so it is not closed")

    after = []  # for each generator: the number of the element that it makes of each element
    reached = np.arange(order) == 0  # from the identity
    while not reached.all():
        g = elements[reached.argmin()]  # the first that is not reached is one generator more
        products, numbers = np.unique(elements[:, g], axis=0, return_inverse=True)
        if (products != elements).any():
            raise UserError(f"group {name} is not closed: some element, and after it {g}, give "
                            "none of its list")
        after.append(numbers.reshape(-1))

        latest = np.zeros(1, int)  # the identity
        while len(latest):
            reached[latest] = True
            found = np.unique([numbers[latest] for numbers in after])
            latest = found[~reached[found]]

    # Only then are all n values of a variable equally likely.
    if len(np.unique(elements[:, 0])) < n:
        raise UserError(f"group {name} is not transitive: point 0 does not reach all others")


# The lists of all elements.

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
    # Together these are all symmetries of a regular polygon.
    points = np.arange(n)
    reflections = (points[:, None] - points) % n
    return np.concatenate([list_cyclic(n), reflections])


def is_odd(perms):
    """Whether each permutation is odd: its matrix has determinant -1. [..., n] -> bool [...]."""
    # Row i of the matrix is the unit vector of perms[i].
    matrices = np.eye(perms.shape[-1])[perms]
    return np.linalg.det(matrices) < 0


# --- 4. Random streams ----------------------------------------------------------------------------

PURPOSES = {"train": 0, "valid": 1, "test": 2, "split": 3}


def generator(seed, purpose, *key):
    """A random generator of its own for each (seed, purpose, key).

    So the batch of a step can be drawn without those before it, and training and test traces come
    from different streams. Streams differ, sets need not: there are few traces of two commands, and
    training meets most of them. Of 64 commands of S5 there are more traces than atoms in the world.

    Source: numpy's SeedSequence, whose spawn keys give independent streams.
    """
    # The purpose stands first, so that no key of one purpose equals a key of another.
    key = (PURPOSES[purpose], *key)

    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


# --- 5. What the command lines share --------------------------------------------------------------

class UserError(ValueError):
    """Bad input. A command line shows the message in one line, without a traceback."""


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line, too, without the usage of all options ahead of it.

    doc: a docstring, whose first line describes the command; None under `python -OO`.
    """

    def __init__(self, doc=None, **options):
        description = doc.split("\n")[0] if doc else None
        super().__init__(**{"description": description, **options})

    def error(self, message):
        raise UserError(message)


def stages(text):
    """A type for argparse: '8:1,16:2' -> [(8, 1), (16, 2)], pairs of a length and a spacing."""
    found = []
    for stage in text.split(","):
        length, spacing = map(int, stage.split(":"))
        try:
            ReplTask.check(length, spacing)
        except UserError as error:  # argparse shows the message of this type of error only
            raise argparse.ArgumentTypeError(error) from None
        found.append((length, spacing))
    return found


def at_least(least, kind=int):
    """A type for argparse: numbers of this kind that are finite, and `least` or more."""
    def number(text):
        value = kind(text)
        # A comparison with nan is false, so nan is refused, too.
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be {least} or more; got {text}")
        return value
    return number


def run(command):
    """What `python FILE.py` does: command(), which Ctrl-C and a closed pipe end in silence.

    Bad input ends it with one line and exit code 2, and so does an exercise that is not done. Any
    other exception is a bug, and shows itself.
    """
    try:
        command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # as in `python data.py | head -1`
        os._exit(1)  # at once: Python's own end would flush, and fail, again
    except (UserError, OSError, NotImplementedError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


def main(argv=None):
    parser = Parser(description="Print a trace, its tokens, and the states.")
    add = parser.add_argument
    add("--group", default="S5", help="S<n>, A<n>, Z<n> or D<n> (S5)")
    add("--commands", default="full", choices=COMMANDS, help="whole elements, or exchanges (full)")
    add("--length", type=at_least(1), default=4, help="number of commands (4)")
    add("--spacing", type=at_least(1), default=2, help="commands per reveal (2)")
    args = parser.parse_args(argv)

    # The inputs lack the last token of a trace, and the targets the first.
    task = ReplTask(Group(args.group), args.commands)
    inputs, targets, _ = task.test_batch(1, args.length, args.spacing, generator(0, "valid"))
    tokens = [inputs[0, 0], *targets[0]]
    print(f"{task.group.order:,} states, chance {task.chance:.3f}; {len(tokens)} tokens\n")

    # Python executes the trace, line by line: the state shown is Python's own, not ours.
    variables = {}
    width = 6 * task.group.degree + 6
    for line in task.decode(tokens).splitlines():
        if line.startswith(">>> ") and "print" not in line:
            exec(line[4:], {}, variables)
        state = " ".join(str(variables.get(name, ".")) for name in task.names)
        pieces = "|".join(task.vocab[i] for i in task.encode(line))
        print(f"{line:<{width}} state {state}   tokens {pieces}")


if __name__ == "__main__":
    run(main)
