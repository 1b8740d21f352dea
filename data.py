"""What must a machine read to be forced to track state?  Permutations, spelled as Python.

    >>> a = 1                         state     s[i] = value of variable i         (1, 2, 3)
    >>> b = 2
    >>> c = 3
    >>> a, b, c = c, a, b             command   g = (2, 0, 1): new[i] = old[g[i]]  (3, 1, 2)
    >>> a, b = b, a                   command   g = (1, 0, 2)                      (1, 3, 2)
    >>> print('b', b)                 reveal    one variable, chosen uniformly
    b 3                               .         the 3 is the only token that tests the state

A command may be uncertain: the reader sees the coin, not how it fell. What remains is a belief, a
distribution over states; the exact filter computes it, and with it the best prediction there is.

    >>> if random() < 0.25: a, b = b, a         new = old[g] with probability 1/4, else new = old
    ...                                         an empty line ends the command, as in any session

Conventions, the same in every file
    Permutations are arrays of 0-based positions. A command with right-hand side g sets
    new[i] = old[g[i]]. "First g, then h" turns the state s into s[g[h[i]]], so
    compose(g, h) = g[h], numpy-indexed. Time runs left to right, and commands are composed in the
    order in which they are read.

Symbols
    n  degree: number of variables     L  length: number of commands in a trace
    B  batch: number of traces         S  spacing: commands per reveal (L is a multiple of S)
    T  tokens in a trace

Sources
    REPL traces: Siems et al. 2026 (arXiv 2602.14814), section 3. Their tokenizer is that of a large
    language model; ours is a small lossless lexer in which a comma belongs to the name after it.
    `word` format: Merrill, Petty, Sabharwal 2024 (arXiv 2404.08819), section 6.
    Automata with state reveals: Siems et al. 2026, definition 1.

Next: scan.py, a linear recurrence that can execute such a program.
"""

import argparse
import itertools
import re
import string
from functools import cached_property
from math import factorial, prod
from typing import NamedTuple

import numpy as np

MAX_DEGREE = 26  # the variables are the letters a to z
MAX_ENUMERATED = 1_000_000  # elements that .elements is willing to list (S9 fits, S10 does not)


# --------------------------------------------------------------------------------------------------
# Groups, as permutations
# --------------------------------------------------------------------------------------------------

def is_odd(perms):
    """True where a permutation is odd: its number of inversions (i < j, p[i] > p[j]) is odd.

    Shapes: perms [..., n] -> bool [...].
    """
    n = perms.shape[-1]
    inverted = perms[..., :, None] > perms[..., None, :]
    return (inverted & np.triu(np.ones((n, n), bool), 1)).sum((-2, -1)) % 2 == 1


def draw_factor(kind, n, shape, rng):
    """Uniform elements of S<n>, A<n>, Z<n> or D<n>, without listing the group: [*shape, n]."""
    points = np.arange(n)
    if kind in "SA":
        perms = rng.random((*shape, n)).argsort(-1)
        if kind == "A":  # make the odd ones even: odd and even pair up by swapping the last two
            odd = is_odd(perms)
            perms[odd, -2:] = perms[odd, :-3:-1]
        return perms
    shift = rng.integers(n, size=(*shape, 1))
    flip = rng.choice([1, -1], size=(*shape, 1)) if kind == "D" else 1
    return (flip * points + shift) % n


def list_factor(kind, n):
    """All elements of S<n>, A<n>, Z<n> or D<n>, in lexicographic order: [order, n]."""
    if kind in "SA":
        perms = np.array(list(itertools.permutations(range(n))))
        return perms[~is_odd(perms)] if kind == "A" else perms
    flips = [1, -1] if kind == "D" else [1]
    return np.array(sorted([(f * i + s) % n for i in range(n)] for f in flips for s in range(n)))


class Group:
    """A finite group as permutations of `degree` points; a product acts on the points side by side.

    Names: S<n> symmetric, A<n> alternating, Z<n> cyclic, D<n> dihedral (order 2n), products like
    A4xZ5 (degree 4 + 5). Elements are numbered in lexicographic order; 0 is the identity.

    Raises: ValueError for an unknown name, a degree over 26, or a listing of over a million
    elements.
    """

    ORDER = {"S": factorial, "A": lambda n: factorial(n) // 2,
             "Z": lambda n: n, "D": lambda n: 2 * n}
    SMALLEST = {"S": 2, "A": 3, "Z": 2, "D": 3}

    def __init__(self, name):
        factors = [re.fullmatch(r"([SAZD])([1-9]\d*)", part) for part in name.split("x")]
        if not all(factors):
            raise ValueError(f"unknown group {name!r}: expected S<n>, A<n>, Z<n>, D<n> or a "
                             "product such as A4xZ5, e.g. --group S5 (120 elements)")
        self.name = name
        self.factors = [(match[1], int(match[2])) for match in factors]
        self.degree = sum(n for _, n in self.factors)
        if self.degree > MAX_DEGREE:
            raise ValueError(f"group {name} permutes {self.degree} points, but the variables are "
                             f"the letters a to z: at most {MAX_DEGREE} points")
        for kind, n in self.factors:
            if n < self.SMALLEST[kind]:
                raise ValueError(f"{kind}{n} is too small: {kind}<n> needs "
                                 f"n >= {self.SMALLEST[kind]}")
        self.order = prod(self.ORDER[kind](n) for kind, n in self.factors)

    @cached_property
    def elements(self):
        """All elements in lexicographic order: [order, degree]."""
        if self.order > MAX_ENUMERATED:
            raise ValueError(f"group {self.name} has {self.order:,} elements; listing them is "
                             f"refused above {MAX_ENUMERATED:,} (traces can still be drawn)")
        listed, offset = np.zeros((1, 0), int), 0
        for kind, n in self.factors:
            block = list_factor(kind, n) + offset
            listed = np.hstack([listed.repeat(len(block), 0), np.tile(block, (len(listed), 1))])
            offset += n
        return listed

    def draw(self, shape, rng):
        """Uniform random elements as permutations: [*shape, degree]."""
        blocks, offset = [], 0
        for kind, n in self.factors:
            blocks.append(draw_factor(kind, n, shape, rng) + offset)
            offset += n
        return np.concatenate(blocks, -1)

    def index(self, perms):
        """The number of each permutation in .elements: [..., degree] -> [...]."""
        return np.searchsorted(self._sorted_keys, self._keys(perms))

    def compose(self, g, h):
        """First g, then h: the element i -> g[h[i]]. Numbers, of any shapes that broadcast."""
        g, h = np.broadcast_arrays(g, h)
        return self.index(np.take_along_axis(self.elements[g], self.elements[h], -1))

    @cached_property
    def transpositions(self):
        """The exchanges of two points, i < j, that generate a product of S<n>: [count, degree]."""
        if any(kind != "S" for kind, _ in self.factors):
            raise ValueError(f"swap commands need a group generated by its transpositions: S<n> or "
                             f"a product such as S3xS4, not {self.name}")
        swaps, offset = [], 0
        for _, n in self.factors:
            for i, j in itertools.combinations(range(offset, offset + n), 2):
                swaps.append(np.arange(self.degree))
                swaps[-1][[i, j]] = j, i
            offset += n
        return np.array(swaps)

    @property
    def chance(self):
        """Accuracy of guessing a variable's value with no idea of the state: mean of 1/|orbit|."""
        return len(self.factors) / self.degree  # each factor is transitive on its own points

    @staticmethod
    def _keys(perms):
        # Rows as fixed-width byte strings, which numpy compares lexicographically; + 1 since numpy
        # strips trailing zero bytes.
        rows = np.ascontiguousarray(perms + 1, dtype=np.uint8)
        return rows.view(f"S{rows.shape[-1]}")[..., 0]

    @cached_property
    def _sorted_keys(self):
        return self._keys(self.elements)


def run_commands(commands, state=None):
    """The state after each command: s_t = s_{t-1}[g_t].

    Shapes: commands [B, L, n]; state [B, n] or None (the identity) -> [B, L, n].
    """
    batch, length, n = commands.shape
    state = np.broadcast_to(np.arange(n), (batch, n)) if state is None else state
    states = np.empty_like(commands)
    for t in range(length):
        state = states[:, t] = np.take_along_axis(state, commands[:, t], -1)
    return states


def check_length(length, spacing):
    """Raises: ValueError unless the length is a positive multiple of the spacing."""
    if length < 1 or spacing < 1 or length % spacing:
        raise ValueError(f"the length must be a positive multiple of the spacing, so that a trace "
                         f"ends on a reveal; got length {length}, spacing {spacing}, e.g. 64:8")


COMMANDS = ["full", "swap"]  # a whole group element per command, or one transposition


def draw_commands(group, commands, shape, rng):
    """Random commands, uniform over the alphabet: [*shape, n]."""
    if commands == "full":
        return group.draw(shape, rng)
    return group.transpositions[rng.integers(len(group.transpositions), size=shape)]


class PairSplit:
    """Splits the ordered pairs of consecutive commands into seen and held-out ones.

    The pair (g, h) is held out if (a[g] + b[h]) mod N < share N, with two random numberings a, b of
    the N commands: of the N successors of each command, and of its N predecessors, the same number
    is held out, so that all commands remain equally frequent. Which pairs are held out does not
    depend on the seed of a run.
    Raises: ValueError unless some, and not all, of the pairs are held out.
    """

    def __init__(self, group, commands, share):
        self.alphabet = group.elements if commands == "full" else group.transpositions
        count = len(self.alphabet)
        self.cut = round(np.clip(share, 0, 1) * count)
        if not 0 < self.cut < count:
            raise ValueError(f"the held-out share of the {count} successors of each command must "
                             f"leave at least one on either side; got {share}, which is {self.cut}")
        rng = stream(0, "split")
        self.a, self.b = rng.permutation(count), rng.permutation(count)
        self.find = self.b.argsort()  # the command h of a given b[h]

    def draw(self, shape, rng, held_out):
        """Random commands of which every consecutive pair is held out, or none: [B, L, n]."""
        (batch, length), count = shape, len(self.alphabet)
        low, high = (0, self.cut) if held_out else (self.cut, count)
        sums = rng.integers(low, high, size=(batch, length))
        numbers = np.empty((batch, length), int)
        numbers[:, 0] = rng.integers(count, size=batch)
        for t in range(1, length):
            numbers[:, t] = self.find[(sums[:, t] - self.a[numbers[:, t - 1]]) % count]
        return self.alphabet[numbers]


# --------------------------------------------------------------------------------------------------
# Automata whose state is uncertain, and sometimes revealed
# --------------------------------------------------------------------------------------------------

class PFSA:
    """A probabilistic automaton with state reveals; its filter is Bayes' rule, one symbol a step.

    A symbol says that the state lies in rho[symbol], and then moves it at random:
        b <- f(T Z b),    f(x) = x / |x|_1,    Z = diag(rho[symbol]),    T = delta[symbol]
    A reveal has T = I, a command has Z = I; an automaton whose T are permutations is a plain DFA.

    Shapes: delta [symbols, Q, Q], where delta[symbol, new, old] is a probability; rho bool
            [symbols, Q]; start [Q], a distribution too. Errors call the symbols by their names.
    Raises: ValueError for shapes that do not fit, or columns that are no distribution.
    Source: Siems et al. 2026, definition 1 (there the start is one state).
    """

    def __init__(self, delta, rho, start, names=None):
        self.delta, self.rho = np.asarray(delta, float), np.asarray(rho, bool)
        self.start = np.asarray(start, float)
        symbols, Q = self.rho.shape
        self.names = names or range(symbols)
        if self.delta.shape != (symbols, Q, Q) or self.start.shape != (Q,):
            raise ValueError(f"rho {self.rho.shape} has {symbols} symbols and {Q} states: delta "
                             f"must be {(symbols, Q, Q)} and start {(Q,)}; got "
                             f"{self.delta.shape} and {self.start.shape}")
        for name, table in [("delta", self.delta), ("start", self.start[:, None])]:
            sums = table.sum(-2)
            if not (table.min() >= 0 and np.abs(sums - 1).max() < 1e-12):
                raise ValueError(f"each column of {name} must be a distribution, at least 0 and of "
                                 f"sum 1; got entries from {table.min()}, sums from {sums.min()} "
                                 f"to {sums.max()}")

    def filter(self, symbols):
        """The exact belief ahead of each symbol, and the log of each symbol's evidence, |Z b|_1.

        The sum of the second is the log-probability of all that the symbols revealed.
        Shapes: symbols [B, T] -> beliefs [B, T, Q], log-evidence [B, T], both float64.
        Raises: ValueError at a reveal that the symbols before it make impossible.
        Cost: O(B T Q^2).
        """
        (batch, length), Q = symbols.shape, len(self.start)
        beliefs, evidence = np.empty((batch, length, Q)), np.empty((batch, length))
        belief = np.broadcast_to(self.start, (batch, Q))
        with np.errstate(invalid="ignore"):  # 0 / 0 is reported below
            for t in range(length):
                beliefs[:, t] = belief
                survived = belief * self.rho[symbols[:, t]]
                evidence[:, t] = survived.sum(1)
                posterior = survived / evidence[:, t, None]
                belief = (self.delta[symbols[:, t]] @ posterior[..., None])[..., 0]
        if (evidence == 0).any():
            trace, step = np.argwhere(evidence == 0)[0]
            raise ValueError(f"impossible reveal at step {step} of trace {trace}: no state that "
                             f"the symbols before it allow is consistent with "
                             f"{self.names[symbols[trace, step]]!r}")
        return beliefs, np.log(evidence)


MAX_STATES = 120  # of the exact filter: S5. S6 would have 720, and 36 times the work at each step


# --------------------------------------------------------------------------------------------------
# The task as REPL traces
# --------------------------------------------------------------------------------------------------

COINS = [0.25, 0.5, 0.75]  # the numbers that an uncertain command may show
REVEALS = ["random", "periodic", "adversarial"]  # which variables are revealed, see ReplTask.draw


class Program(NamedTuple):
    """The random choices that make traces: ReplTask.write spells them."""
    commands: np.ndarray  # [B, L, n]
    asked: np.ndarray  # [B, L/S] the variable of each reveal
    chance: np.ndarray  # [B, L] the probability that a command is executed; 1 shows no coin
    executed: np.ndarray  # bool [B, L] how the coins fell, which no reader is told


class ReplTask:
    """Next-token prediction on Python REPL traces; accuracy counts the revealed values only.

    A trace is n lines `>>> a = 1`, then L commands, and after every S of them a reveal:
    T = 5n + L (2n + 3) + 11 L/S tokens, where a `swap` command has 7 tokens, not 2n + 3.

    With uncertain = P > 0, the share P of the commands of each trace stands behind
    `if random() < p: `, four more tokens each, p uniform over COINS. P is a share and not the p
    of all commands: then P = 0 is the plain task, and a model must read both sorts in one trace.

    Raises: ValueError for a share outside [0, 1], or swaps of a group without them.
    """

    default_curriculum = "2:1,8:1,16:2,32:4,64:8"
    default_lengths = "64:8,128:16,256:32"

    def __init__(self, group, commands="full", uncertain=0.0, hold_out=0.0):
        self.group, self.commands, self.uncertain = group, commands, uncertain
        if commands == "swap":
            group.transpositions  # refuse a group without them here, not at the first batch
        if not 0 <= uncertain <= 1:
            raise ValueError("uncertain is the share of the commands behind a coin, "
                             f"between 0 and 1; got {uncertain}")
        self.pairs = PairSplit(group, commands, hold_out) if hold_out else None
        names = string.ascii_lowercase[:group.degree]
        values = [str(i + 1) for i in range(group.degree)]
        marks = [">>> ", " = ", "print('", "'", ")", " ", "\n"]
        self.vocab = marks + list(names) + [f", {name}" for name in names] + values
        if uncertain:  # a colon belongs to the number before it
            self.vocab += ["from random import random", "if random() < ", "... ",
                           *(f"{coin}: " for coin in COINS)]
        self._id = {symbol: i for i, symbol in enumerate(self.vocab)}
        self._name = np.array([self._id[name] for name in names])
        self._comma_name = np.array([self._id[f", {name}"] for name in names])
        self.value_tokens = np.array([self._id[value] for value in values])
        # Longest symbol first, so that `print('` is not read as the variable p, nor 12 as 1, 2.
        longest_first = sorted(self.vocab, key=len, reverse=True)
        self._lexer = re.compile("|".join(map(re.escape, longest_first)))

    @property
    def chance(self):
        return self.group.chance

    check = staticmethod(check_length)

    def encode(self, text):
        """Token ids of a trace: decode(encode(text)) == text.

        Raises ValueError at an unknown symbol.
        """
        ids, at = [], 0
        while at < len(text):
            match = self._lexer.match(text, at)
            if match is None:
                raise ValueError(f"no symbol of {self.group.name} traces begins at character {at}: "
                                 f"{text[at:at + 10]!r}")
            ids.append(self._id[match[0]])
            at = match.end()
        return ids

    def decode(self, ids):
        """The text of a sequence of token ids."""
        return "".join(self.vocab[i] for i in ids)

    def sample(self, batch, length, spacing, rng, held_out=False):
        """Random traces; of a task with held-out pairs, only of these or only of the others.

        Shapes: tokens int64 [B, T]; reveals bool [B, T], True at a revealed value.
        Raises: ValueError if L is not a positive multiple of S.
        """
        program = self.draw(batch, length, spacing, rng, held_out=held_out)
        return self.write(*program)

    def draw(self, batch, length, spacing, rng, reveals="random", share=None, held_out=False):
        """The choices behind a batch of traces: a Program. The share P is the task's if not given.

        Every trace has the same number of uncertain commands, P L rounded up or down at random, so
        that all have the same number of tokens. The variables revealed are
            random       each one uniform
            periodic     a, b, c, a, b, c, ...
            adversarial  always the same x, under the worst commands for a matrix of marginals:
                         after S certain ones only `if random() < 0.5: x, y = y, x`, and the coin
                         never lets it happen. So each reveal halves the mass of (y holds its value)
                         in such a matrix, and the true belief is the same after each.
        """
        self.check(length, spacing)
        n, count = self.group.degree, length // spacing
        if self.pairs is None:
            commands = draw_commands(self.group, self.commands, (batch, length), rng)
        else:
            commands = self.pairs.draw((batch, length), rng, held_out)
        asked = rng.integers(n, size=(batch, count))
        chance, executed = np.ones((batch, length)), np.ones((batch, length), bool)
        share = self.uncertain if share is None else share
        if reveals == "periodic":
            asked = np.tile(np.arange(count) % n, (batch, 1))
        if reveals == "adversarial":
            swaps = self.group.transpositions
            swap = swaps[rng.integers(len(swaps), size=batch)]
            commands[:, spacing:] = swap[:, None]
            asked[:] = (swap != np.arange(n)).argmax(1)[:, None]
            chance[:, spacing:], executed[:, spacing:] = 0.5, False
        elif share:
            behind_coins = int(share * length + rng.random())
            places = rng.random((batch, length)).argsort(1) < behind_coins
            chance = np.where(places, rng.choice(COINS, (batch, length)), chance)
            executed = rng.random((batch, length)) < chance
        return Program(commands, asked, chance, executed)

    def write(self, commands, asked, chance=None, executed=None):
        """The traces of given commands, with the `asked` variables revealed at even spacing.

        Without chance and executed, every command is certain.
        Shapes: those of Program -> tokens [B, T], reveals [B, T].
        """
        (batch, length, _), count = commands.shape, asked.shape[1]
        lines, kept = self.command_tokens(commands), None
        if self.uncertain and chance is not None:
            lines, kept = self._behind_coins(lines, chance)
        answers = self.answers(commands, asked, executed)
        body = np.concatenate([lines.reshape(batch, count, -1),
                               self.reveal_tokens(asked, answers)], -1)
        is_answer = np.zeros(body.shape, bool)
        is_answer[..., -2] = True  # `b 3`: the value is the last token but the newline
        if kept is not None:
            kept = np.concatenate([kept.reshape(batch, count, -1),
                                   np.ones((batch, count, 11), bool)], -1)
            body, is_answer = body[kept].reshape(batch, -1), is_answer[kept].reshape(batch, -1)
        start = np.tile(self.start_tokens(), (batch, 1))
        tokens = np.hstack([start, body.reshape(batch, -1)])
        reveals = np.hstack([np.zeros_like(start, bool), is_answer.reshape(batch, -1)])
        return tokens, reveals

    def answers(self, commands, asked, executed=None):
        """The revealed values, from 0: [B, L/S]."""
        spacing = commands.shape[1] // asked.shape[1]
        if executed is not None:
            commands = np.where(executed[..., None], commands, np.arange(self.group.degree))
        states = run_commands(commands)[:, spacing - 1::spacing]
        return np.take_along_axis(states, asked[..., None], -1)[..., 0]

    def start_tokens(self):
        """`>>> a = 1` and so on, a line for each variable: [5n]; 3 more where coins are needed."""
        lines = self._line(self._name.shape, ">>> ", self._name, " = ", self.value_tokens, "\n")
        coins = self._line((), ">>> ", "from random import random", "\n") if self.uncertain else []
        return np.concatenate([coins, lines.reshape(-1)]).astype(int)

    def command_tokens(self, commands):
        """`>>> a, b, c = c, a, b`: [..., n] -> [..., 2n + 3], or [..., 7] for swaps."""
        if self.commands == "full":
            left, right = np.broadcast_to(np.arange(self.group.degree), commands.shape), commands
        else:
            moved = commands != np.arange(self.group.degree)
            i, j = moved.argmax(-1), self.group.degree - 1 - moved[..., ::-1].argmax(-1)
            left, right = np.stack([i, j], -1), np.stack([j, i], -1)
        names = [part for side in (left, right) for part in
                 (self._name[side[..., 0]], *np.moveaxis(self._comma_name[side[..., 1:]], -1, 0))]
        half = len(names) // 2
        return self._line(commands.shape[:-1], ">>> ", *names[:half], " = ", *names[half:], "\n")

    def _behind_coins(self, lines, chance):
        """`>>> if random() < 0.5: a, b = b, a`, and the `... ` under it; which tokens to keep.

        Shapes: lines [B, L, W], chance [B, L] -> tokens, kept [B, L, W + 4].
        """
        coins = np.array([self._id[f"{coin}: "] for coin in COINS])
        number = coins[np.searchsorted(COINS, np.minimum(chance, COINS[-1]))]
        before = self._line(chance.shape, ">>> ", "if random() < ", number)
        after = self._line(chance.shape, "... ", "\n")
        tokens = np.concatenate([before, lines[..., 1:], after], -1)
        kept = np.ones(tokens.shape, bool)
        kept[..., [1, 2, -2, -1]] = chance[..., None] < 1
        return tokens, kept

    def reveal_tokens(self, asked, answers):
        """`>>> print('b', b)` and its output `b 3`: [...], [...] -> [..., 11]."""
        name = self._name[asked]
        return self._line(asked.shape, ">>> ", "print('", name, "'", self._comma_name[asked], ")",
                          "\n", name, " ", self.value_tokens[answers], "\n")

    def _line(self, shape, *parts):
        """Side by side, one token each: symbols, and arrays of ids [*shape] -> [*shape, parts]."""
        return np.stack([np.broadcast_to(self._id[part] if isinstance(part, str) else part, shape)
                         for part in parts], -1)

    def training_batch(self, batch, length, spacing, rng, held_out=False):
        """inputs, targets (next tokens), reveals (targets that are revealed values): [B, T-1]."""
        tokens, reveals = self.sample(batch, length, spacing, rng, held_out)
        return tokens[:, :-1], tokens[:, 1:], reveals[:, 1:]

    def test_batch(self, batch, length, spacing, rng):
        """As training_batch; of a task with held-out pairs, traces made of these alone."""
        return self.training_batch(batch, length, spacing, rng, held_out=True)

    @cached_property
    def automaton(self):
        """These traces as a PFSA: states are the group's elements, symbols are lines.

        A command of number g and coin number c (the last: certain) is symbol g (coins + 1) + c; the
        reveals follow, variable by variable. Raises: ValueError above 120 states.
        """
        group, n, chances = self.group, self.group.degree, [*COINS, 1.0]
        if group.order > MAX_STATES:
            raise ValueError(
                f"the exact filter of {group.name} would keep {group.order:,} probabilities for a "
                f"trace and touch {group.order**2:,} at each command: refused above {MAX_STATES} "
                "states (S5)")
        everyone = np.arange(group.order)
        moves = np.eye(group.order)[group.compose(everyone[:, None], everyone)].transpose(1, 2, 0)
        stays = np.eye(group.order)
        commands = [p * move + (1 - p) * stays for move in moves for p in chances]
        shown = group.elements.T[:, None] == np.arange(n)[:, None]  # [variable, value, state]
        rho = np.concatenate([np.ones((len(commands), group.order), bool),
                              shown.reshape(n * n, -1)])
        names = [f"{g + 1} with probability {p}" for g in group.elements for p in chances]
        names += [f"{string.ascii_lowercase[i]} {j + 1}" for i in range(n) for j in range(n)]
        delta = np.concatenate([commands, np.broadcast_to(stays, (n * n, *stays.shape))])
        return PFSA(delta, rho, stays[0], names)

    def symbols(self, commands, asked, chance, executed):
        """The automaton's symbols of a Program, commands and reveals in the order of the trace."""
        (batch, length), count = chance.shape, asked.shape[1]
        coins = np.searchsorted(COINS, chance)
        lines = self.group.index(commands) * (len(COINS) + 1) + coins
        answers = self.answers(commands, asked, executed)
        reveals = (self.group.order * (len(COINS) + 1)
                   + asked * self.group.degree + answers)[..., None]
        return np.concatenate([lines.reshape(batch, count, -1), reveals], -1).reshape(batch, -1)

    def best_predictions(self, program):
        """What the exact filter expects at each reveal: the best prediction that there is.

        p(value | all lines before, the variable asked for). No other has a smaller expected loss
        -log p(answer), and its largest entry is the best chance of a right guess.
        Shapes: -> [B, L/S, n].
        """
        (batch, length), count = program.chance.shape, program.asked.shape[1]
        beliefs, _ = self.automaton.filter(self.symbols(*program))
        ahead = beliefs[:, length // count::length // count + 1]  # of each reveal
        holds = self.group.elements.T[:, :, None] == np.arange(self.group.degree)  # [n, Q, n]
        return (ahead[..., None, :] @ holds[program.asked])[..., 0, :]


# --------------------------------------------------------------------------------------------------
# The same task as words over the group
# --------------------------------------------------------------------------------------------------

class WordTask:
    """One token per group element; the label at t is the product of the first t elements.

    A sequence-to-sequence task, not next-token prediction. Every position is revealed, so the
    spacing is always 1. With commands="swap" the words are made of transpositions only.
    Source: Merrill et al. 2024, section 6.
    """

    default_curriculum = "2:1,8:1,16:1,32:1,64:1"
    default_lengths = "64:1,128:1,256:1"

    uncertain = 0.0

    def __init__(self, group, commands="full", uncertain=0.0, hold_out=0.0):
        if hold_out:
            raise ValueError("held-out pairs of commands are a matter of REPL traces; "
                             "leave out --hold-out-pairs, or --format word")
        self.group, self.commands = group, commands
        if uncertain:
            raise ValueError("a word has no coins: uncertain commands need the format repl")
        self.vocab = ["".join(string.ascii_lowercase[i] for i in g) for g in group.elements]
        if commands == "swap":
            group.transpositions

    @property
    def chance(self):
        return 1 / self.group.order

    @staticmethod
    def check(length, spacing):
        """Raises: ValueError unless the spacing is 1 and the length positive."""
        if spacing != 1:
            raise ValueError(f"a word reveals the state at every token: its spacing must be 1, "
                             f"got {spacing}")
        check_length(length, spacing)

    def training_batch(self, batch, length, spacing, rng):
        """inputs (element numbers), targets (numbers of the running products), reveals: [B, L]."""
        self.check(length, spacing)
        commands = draw_commands(self.group, self.commands, (batch, length), rng)
        inputs, targets = self.group.index(commands), self.group.index(run_commands(commands))
        return inputs, targets, np.ones_like(inputs, bool)

    test_batch = training_batch


TASKS = {"repl": ReplTask, "word": WordTask}


def parse_stages(text, task):
    """'8:1,16:2' -> [[8, 1], [16, 2]], each a length and a spacing that the task accepts."""
    if not re.fullmatch(r"\d+:\d+(,\d+:\d+)*", text):
        raise ValueError(f"expected LENGTH:SPACING,..., as in 8:1,16:2; got {text!r}")
    stages = [[int(number) for number in stage.split(":")] for stage in text.split(",")]
    for stage in stages:
        task.check(*stage)
    return stages


STREAMS = {"train": 0, "valid": 1, "test": 2, "split": 3}


def stream(seed, purpose, *key):
    """A generator of its own for each (seed, purpose, key): training step, test length and spacing.

    Streams with different arguments are independent (numpy's SeedSequence), and none depends on how
    much was drawn from another: any batch can be made again without the ones before it.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(STREAMS[purpose], *key)))


# --------------------------------------------------------------------------------------------------
# To see before reading: python data.py
# --------------------------------------------------------------------------------------------------

def main(argv=None):
    description = "Print a sample trace, its tokens, and the states."
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--group", default="S5", help="S<n>, A<n>, Z<n>, D<n> or a product (A4xZ5)")
    parser.add_argument("--commands", default="full", choices=COMMANDS)
    parser.add_argument("--length", type=int, default=4, help="number of commands")
    parser.add_argument("--spacing", type=int, default=2, help="commands per reveal")
    parser.add_argument("--uncertain", type=float, default=0.0, metavar="P",
                        help="share of the commands behind a coin, 0 to 1")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        group = Group(args.group)
        task = ReplTask(group, args.commands, args.uncertain)
        program = task.draw(1, args.length, args.spacing, stream(args.seed, "valid"))
        tokens, reveals = task.write(*program)
        expected = iter(task.best_predictions(program)[0] if args.uncertain else [])
    except ValueError as error:
        parser.error(str(error))
    print(f"group {group.name}: {group.order:,} elements on {group.degree} points")
    print(f"vocabulary: {len(task.vocab)} symbols; trace: {tokens.shape[1]} tokens, "
          f"{reveals.sum()} reveals; chance {task.chance:.3f}\n")
    names = list(string.ascii_lowercase[:group.degree])
    uncertain = program.chance[0] < 1
    falls = iter(np.where(program.executed[0], 0.0, 1.0)[uncertain])
    state, width = {"random": lambda: next(falls)}, 6 * group.degree + 6 + 20 * any(uncertain)
    for line in task.decode(tokens[0]).splitlines():
        if line.startswith(">>> ") and "print" not in line and "import" not in line:
            exec(line[4:], state)  # the state shown is Python's own, not ours
        shown = " ".join(str(state.get(name, ".")) for name in names)
        pieces = "|".join(task.vocab[i] for i in task.encode(line))
        print(f"{line:<{width}} state {shown}   tokens {pieces}")
        if "print" in line and args.uncertain:
            chances = ", ".join(f"{i + 1}: {p:.3f}" for i, p in enumerate(next(expected)))
            print(f"{'':<{width}} filter {chances}")


if __name__ == "__main__":
    main()
