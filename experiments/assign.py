"""What if code copies and computes?  One more key.

    >>> a, b, c, d, e = c, 4, b, b, a       shuffles that copy and overwrite
    >>> a = b + 3                           or programs of integers

The paper's programs only shuffle. `a = b` loses a value, and a layer of the delta rule cannot do
that (copies.py). What helps is one more key: a step reads along one key and writes along another,
so that it fetches what stands in b and puts it into a, and it can add as well. Models with that key
learn two tasks here, beside the delta rule and others.

Finding. Shuffles of five variables that copy are tracked with one more key: on five fresh seeds
99.8 to 100% of the prints are right at (128,16), after two minutes of training. The delta rule has
94.1 to 96.5% by this recipe, which was found for one more key, and no more by rates twice as high.
It loses more the more lines copy: at equal steps, after 32 lines without a print, 3 to 5% where at
most 6 lines copy and 12 to 13% where 13 or more do. Two writes a token, a second layer or a decay
gate lose 8 to 21% there, and one more key at most 2%. Nor is the eigenvalue -1 needed: held in [0,
1], one more key is as good. An LSTM learns neither task in so few tokens.

Integer programs part the two further, but the new layer may run away. Three seeds of one more key,
two of them fresh, have 98.5 to 98.9% at (64,8), where training ends, and 88.9 to 97.5% at (128,16);
the delta rule has 76 to 78 and 65 to 67, and the best reader of the last line 24. At (256,32) two
seeds have 95 and 96% and the third 1: its memory grows without bound, to 9e16, as free keys allow
it to. Of six functions one more key answers three for all 20 arguments, two of which the delta rule
answers for 0 to 9. The stored model's wrong answers in the other functions are all off by one,
among them five of six countdowns of three rounds or more: there the same two lines come again and
again.

In the chapter supervision a second loss makes a model say all values after each line. By that, at 4
lines, as in training, one more key answers 97 to 100% of the arithmetic, and the delta rule 66 to
83. At 16 lines one seed of one more key has 2%, the others 60 and 78, and the delta rule 26 to 40.
In a control all lines have an inverse, so that no value is lost, and still the delta rule has less,
37 to 47% at 4 lines, and one more key 99 to 100. So to lose values is not all that is hard for it.

    python -m experiments.assign                          the tables, from the records
    python -m experiments.assign --run                    makes what is missing, to 12 minutes a run
    python -m experiments.assign train                    integers, eleven minutes
    python -m experiments.assign train --task shuffles    two minutes
    python -m experiments.assign eval DIR

Sources. The transition 1 - b r^T with two vectors is known: in RWKV-7 (Peng et al. 2025, arXiv
2503.14456), with an erase key in Gated DeltaNet-2, and as IPLR, identity plus low rank, in
flash-linear-attention. Such a step may make a state longer: `a = b` has the norm sqrt 2, `a = b +
c` sqrt 3 and `a = a + b` 1.62. Products of copies stay bounded, as they only move values, but
products of free keys need not. The tasks and the runs are ours.

Next: play.py, a session with a trained model.
"""

import json
import math
import re
import runpy
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import nn

from data import (Group, Lexer, Parser, ReplTask, UserError, at_least, generator, next_tokens, run,
                  stages)
from eval import evaluate, evaluate_and_print, load_weights, predict, read_checkpoint
from experiments import (FALLING, RESULTS, at, chapter, evaluate_all, grid, make, millions,
                         minutes, percent, record, records, span, table, where)
from experiments.arms import GatedRNN, mean_accuracy, mean_at
from experiments.plots import BLUE, GREEN, ORANGE, RED, SKY, canvas, draw
from experiments.programs import trace
from experiments.supervision import ArithmeticTask, loss_of, make_head
from models import LSTM, DeltaBlock, LanguageModel, LinRNN, Transformer, unit
from scan import scan_chunked
from train import Recipe, config_of_run, new_parser, train_run

NUMBERS = np.arange(-9, 10)  # the values of integer programs
BLANK = -1  # a place of a line that holds no token


# --- 1. The layer ---------------------------------------------------------------------------------

class ReadKeyBlock(DeltaBlock):
    """The delta rule with one more key: S <- S + beta k (gamma v - S^T r)^T, |k| = |r| = 1.

    r = unit(k + a linear map of norm(x) that begins at 0). So the block begins as DeltaBlock, r =
    k. The eigenvalue 1 - beta k.r lies in [-1, 3], since r may turn against k: a run may diverge.
    """

    def __init__(self, d_model, heads):
        super().__init__(d_model, heads, beta_max=2.0, householders=1)
        self.read = nn.Linear(d_model, d_model)
        nn.init.zeros_(self.read.weight)
        nn.init.zeros_(self.read.bias)

    def forward(self, x, state=None):
        out, state = scan_chunked(*self.four_inputs(x), state)  # [B, H, T, K]
        return x + self.out(self.out_norm(out).transpose(1, 2).flatten(2)), state

    def four_inputs(self, x):
        """For scan_chunked: q, the read key r, b = beta k and gamma v, [B, H, T, K] each."""
        q, k, v, beta = self.inputs_of_scan(x)
        k, v = k.squeeze(3), v.squeeze(3)  # there is one write a token
        shift = self.read(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return q, unit(k + shift), beta * k, v


class HeldBlock(ReadKeyBlock):
    """ReadKeyBlock with all eigenvalues 1 - b.r of a step in [0, 1]."""

    def four_inputs(self, x):
        q, r, b, v = super().four_inputs(x)

        # Where r is turned against b it is turned round. Then b is shortened until b.r <= 1.
        along = (b * r).sum(-1, keepdim=True)
        return q, torch.where(along < 0, -r, r), b / along.abs().clamp(min=1), v


# --- 2. Two tasks ---------------------------------------------------------------------------------

class ShuffleTask(ReplTask):
    """REPL traces of shuffles that copy and overwrite: `a, b, c, d, e = c, 4, b, c, d`.

    A line is a permutation that is changed: in half of the lines a place takes the name of a random
    place, perhaps its own, and then in half of them a place takes a value. So 32% show a name
    twice. An entry of a command is a variable, or n + j for the value j, counted from 0.
    """

    def __init__(self, n=5):
        self.more_symbols = [f", {i + 1}" for i in range(n)]  # ahead of super(), which reads them
        super().__init__(Group(f"S{n}"))
        # The best reader of the last line knows the value where it shows one, 1 place in 2n, and
        # guesses the others.
        self.chance = 1 / (2 * n) + (1 - 1 / (2 * n)) / n
        commas = [self._id[symbol] for symbol in self.more_symbols]
        self._first = np.concatenate([self._name, self.value_tokens])
        self._later = np.concatenate([self._comma_name, commas])

    def draw(self, shape, rng):
        """Random commands, [*shape, n]."""
        n = self.group.degree
        commands = self.group.draw(shape, rng).reshape(-1, n)
        rows = np.arange(len(commands))
        to, source, overwritten = rng.integers(n, size=(3, len(rows)))
        copy, literal = rng.random((2, len(rows))) < 0.5
        commands[rows[copy], to[copy]] = commands[rows[copy], source[copy]]
        commands[rows[literal], overwritten[literal]] = n + rng.integers(n, size=literal.sum())
        return commands.reshape(*shape, n)

    def test_batch(self, batch, length, spacing, rng):
        self.check(length, spacing)
        commands = self.draw((batch, length), rng)
        asked = rng.integers(self.group.degree, size=(batch, length // spacing))
        return next_tokens(*self.write(commands, asked, spacing))

    def training_batch(self, batch, length, spacing, rng):
        """As test_batch, but a quarter of the batches have a print after each of fewer lines.

        A long last stage without them forgets the first lines of a trace, which it never asks for.
        """
        if rng.random() < 0.25:
            length, spacing = length // spacing, 1
        return self.test_batch(batch, length, spacing, rng)

    def answers(self, commands, asked, spacing):
        batch, length, n = commands.shape
        numbers = np.tile(np.arange(n), (batch, 1))  # what the entries n, n + 1, ... stand for
        state = numbers
        states = np.empty_like(commands)
        for t in range(length):
            known = np.concatenate([state, numbers], 1)
            state = np.take_along_axis(known, commands[:, t], 1)
            states[:, t] = state
        return np.take_along_axis(states[:, spacing - 1::spacing], asked[..., None], -1)[..., 0]

    def clue(self, line, asked):
        """What a reader of one line knows of a variable: a value, if its place shows one."""
        left, _, right = line.partition(" = ")
        shown = dict(zip(left.split(", "), right.split(", ")))[asked]
        return shown if shown.isdigit() else "a name"

    def line_of(self, targets, sources, values):
        """What was typed, as the full line that it is, with more copies than training shows, too.

        values: not needed here.  Raises: UserError.
        """
        taken = dict(zip(targets, sources))
        known = {*self.names, *map(str, range(1, self.group.degree + 1))}
        if len(taken) < len(targets):
            raise UserError("a name stands twice on the left-hand side")
        if not {*targets} <= {*self.names} or not {*sources} <= known:
            raise UserError(f"this model has read {', '.join(sorted(known))}, and no more")
        return f"{', '.join(self.names)} = {', '.join(taken.get(x, x) for x in self.names)}"

    def _names(self, entries):
        first = self._first[entries[..., 0]]
        return [first, *np.moveaxis(self._later[entries[..., 1:]], -1, 0)]


class NumberTask(ReplTask):
    """REPL traces that compute: `a = b`, `a = -4`, `a = b + c`, `a = b - 3`, `a = 4 - b`.

    Three variables, and values from -9 to 9, one token each. A line whose result lies outside is
    drawn again. Before that a quarter are copies, an eighth are numbers, and half of the others
    have a number. A short trace is filled up with newlines after its last reveal.
    """

    chance = 0.24  # of best_of_last_line

    def __init__(self):
        self.names = "abc"
        commas = [f", {name}" for name in self.names]
        numbers = [str(number) for number in NUMBERS]
        marks = [">>> ", " = ", "print('", "'", ")", " ", "\n", " + ", " - "]
        # There is no group: of ReplTask it has check, _line and reveal_tokens.
        Lexer.__init__(self, [*marks, *self.names, *commas, *numbers])

        # What the lines of ReplTask read, and two tables of this task.
        self._name, self._comma_name, self.value_tokens = [
            np.array([self._id[symbol] for symbol in symbols])
            for symbols in (self.names, commas, numbers)]
        self._operand = np.concatenate([self._name, self.value_tokens])
        self._sign = np.array([BLANK, self._id[" + "], self._id[" - "]])  # of 0, 1, -1

        # All right-hand sides (left, sign, right) and how often each is drawn. An operand below 3
        # is a variable, and 3 + j is NUMBERS[j]. Without a right operand the sign is 0.
        variables, values, digits = range(3), range(3, 22), range(12, 22)
        kinds = [(1 / 4, variables, [0], [0]), (1 / 8, values, [0], [0]),
                 (5 / 16, variables, [1, -1], variables),
                 (5 / 32, variables, [1, -1], digits), (5 / 32, digits, [1, -1], variables)]
        self.sides = np.array([side for _, *parts in kinds for side in product(*parts)])
        self.shares = np.concatenate([
            np.full(math.prod(map(len, parts)), share / math.prod(map(len, parts)))
            for share, *parts in kinds])

    def draw(self, values, rng):
        """A random line for each program, from the values of its variables [B, 3].

        Returns: target, left, sign and right, [B, 4]; the results [B].
        """
        batch, n = values.shape
        known = np.concatenate([values, np.tile(NUMBERS, (batch, 1))], 1)  # of each operand
        left, sign, right = self.sides.T
        results = known[:, left] + sign * known[:, right]  # [B, sides]

        # To draw again until it is in the range is to draw among those that are.
        reached = np.cumsum(self.shares * (abs(results) <= 9), 1)
        chosen = (reached <= rng.random((batch, 1)) * reached[:, -1:]).sum(1)
        targets = rng.integers(n, size=(batch, 1))
        lines = np.hstack([targets, self.sides[chosen]])
        return lines, results[np.arange(batch), chosen]

    def test_batch(self, batch, length, spacing, rng):
        """Random lines, and after every `spacing` of them one uniform reveal."""
        self.check(length, spacing)
        n = len(self.names)
        rows = np.arange(batch)
        values = rng.integers(-9, 10, (batch, n))
        start = self.line_tokens(np.tile(np.arange(n), (batch, 1)), values + 12)  # 12 is 0

        # Each line changes one variable.
        lines = np.empty((batch, length, 4), int)
        states = np.empty((batch, length, n), int)
        for t in range(length):
            lines[:, t], results = self.draw(values, rng)
            values[rows, lines[:, t, 0]] = results
            states[:, t] = values

        # A block for each reveal, as in ReplTask.
        asked = rng.integers(n, size=(batch, length // spacing))
        answers = np.take_along_axis(states[:, spacing - 1::spacing], asked[..., None], -1)[..., 0]
        shown = self.reveal_tokens(asked, answers + 9)
        lines = self.line_tokens(*np.moveaxis(lines, -1, 0)).reshape(*asked.shape, -1)
        blocks = np.concatenate([lines, shown], -1)
        tokens = np.hstack([start.reshape(batch, -1), blocks.reshape(batch, -1)])

        # Blanks move to the end, where newlines take their place.
        order = (tokens == BLANK).argsort(1, kind="stable")
        tokens = np.take_along_axis(tokens, order, 1)
        longest = (tokens != BLANK).sum(1).max()
        tokens = np.where(tokens == BLANK, self._id["\n"], tokens)[:, :longest]

        # A single space stands ahead of a revealed value, and nowhere else.
        reveals = np.zeros(tokens.shape, bool)
        reveals[:, 1:] = tokens[:, :-1] == self._id[" "]
        return next_tokens(tokens, reveals)

    training_batch = test_batch

    def clue(self, line, asked):
        """What a reader of one line knows: all of it, and which name in it is asked.

        No name differs from others, so they become p, q, r in the order in which they stand here.
        """
        text = f"{asked}: {line}"
        order = dict.fromkeys(re.findall("[abc]", text))
        return text.translate(str.maketrans(dict(zip(order, "pqr"))))

    def start_tokens(self):
        """What a session begins with: `>>> a = 1` and so on."""
        places = np.arange(3)
        tokens = self.line_tokens(places, places + 13)
        return tokens[tokens != BLANK]

    def line_of(self, targets, sources, values):
        """What was typed, if it is a line of this task.  values: {name: value}.  Raises: UserError.
        """
        line = f"{', '.join(targets)} = {', '.join(sources)}"
        if not re.fullmatch(r"[abc] = (0|-?[1-9]|[abc]|[abc] [+-] [abc\d]|\d [+-] [abc])", line):
            raise UserError("this model has read copies, numbers from -9 to 9, and sums and "
                            "differences of two, one at a time")
        if abs(eval(sources[0], {}, dict(values))) > 9:
            raise UserError("its values go from -9 to 9")
        return line

    def line_tokens(self, target, left, sign=0, right=0):
        """`>>> a = b - 3`, or `>>> a = b` and two blanks: [...] each -> [..., 7]."""
        right = np.where(sign == 0, BLANK, self._operand[right])
        return self._line(target.shape, ">>> ", self._name[target], " = ", self._operand[left],
                          self._sign[sign], right, "\n")


def best_of_last_line(task, traces=4096):
    """What the best reader of the last line alone answers: {what it knows: a value}, by counting.

    It knows what task.clue says of the line and of the variable that is asked.
    """
    inputs, targets, _ = task.test_batch(traces, 32, 1, generator(0, "valid"))
    counts = defaultdict(Counter)
    for row in np.hstack([inputs, targets[:, -1:]]):
        for clue, value in clues(task, task.decode(row))[16:]:  # behind the first lines
            counts[clue][value] += 1
    return {clue: values.most_common(1)[0][0] for clue, values in counts.items()}


def clues(task, text):
    """(what the line ahead of it says, the value) of each print of a trace."""
    found = re.findall(r">>> (.*)\n>>> print\('(\w)', \w\)\n\w (.*)\n", text)
    return [(task.clue(line, asked), value) for line, asked, value in found]


TASKS = {"integers": NumberTask, "shuffles": ShuffleTask}


# --- 3. Real functions ----------------------------------------------------------------------------

FUNCTIONS = ["fibonacci", "running_sum", "alternating_sum", "countdown", "difference_of_sums",
             "sort_two"]


def sessions(name, count=20):
    """The straight lines of a function for random arguments, as (lines, variable asked, its value).

    The closing `assert (c) == 4` becomes a print. Arguments that lead out of the range are drawn
    again.
    """
    function = runpy.run_path(str(RESULTS / "functions.py"))[name]
    rng = generator(FUNCTIONS.index(name), "test")
    found = []
    while len(found) < count:
        *lines, closing = trace(function, *rng.choice(NUMBERS, 3).tolist()).splitlines()
        asked, value = re.fullmatch(r"assert \((\w)\) == (.*)", closing).groups()
        values = {}
        reached = []
        for line in lines:
            exec(line, {}, values)
            reached += values.values()
        if max(map(abs, reached)) <= 9:
            found.append((lines, asked, value))
    return found


def answers_of(model, task):
    """Right answers of 20 for each function: [[of the model, of the best reader of the last line]].
    """
    best = best_of_last_line(task)
    rows = []
    for name in FUNCTIONS:
        right = guessed = 0
        for lines, asked, value in sessions(name):
            typed = "".join(f">>> {line}\n" for line in [*lines, f"print('{asked}', {asked})"])
            tokens = task.encode(f"{typed}{asked} ")
            right += task.vocab[predict(model, np.array([tokens]))[0, -1]] == value
            guessed += best.get(task.clue(lines[-1], asked)) == value
        rows.append([int(right), int(guessed)])
    return rows


# --- 4. The study ---------------------------------------------------------------------------------

class KeyRNN(LanguageModel):
    """A linear RNN with one more key, in the sizes of LinRNN.  block: ReadKeyBlock or HeldBlock."""

    def __init__(self, vocab_size, block=ReadKeyBlock):
        super().__init__(vocab_size, 64, 1, 8, lambda: block(64, 4))


ARMS = {
    "one more key": KeyRNN,
    "one more key, held": partial(KeyRNN, block=HeldBlock),
    "delta rule": LinRNN,
    "two writes a token": partial(LinRNN, householders=2),
    "two layers": partial(LinRNN, layers=2),
    "gated delta rule": partial(GatedRNN, conv_width=8),
    "LSTM": LSTM,
    "Transformer": Transformer}

# The steps of each stage are fixed, so that no arm is let through or held back. The rates fall to 0
# over the last stage, which has six tokens of ten.
CURRICULUM = [(2, 1), (8, 1), (16, 2), (32, 4)]
STEPS = {"shuffles": [400, 150, 150, 350], "integers": [300, 300, 300, 700]}

# The optimiser and its rates, those of train.py and of the best LSTM of the chapter arms, and what
# both rates are multiplied by to find the best. What is best on shuffles is used on both tasks.
RATES = {"LSTM": ("adamw", 4e-3, 4e-3), "the others": ("muon", 2e-3, 0.01)}
FACTORS = [0.5, 1, 2]
RATE_CELLS = grid(task=["shuffles"], arm=[*ARMS], factor=FACTORS, seed=[60])
CELLS = grid(task=[*STEPS], arm=[*ARMS], seed=range(100, 103))
TESTS = [(8, 1), (16, 2), (32, 4), (64, 8), (128, 16)]


def plan_rates(cell):
    """An arm on a task, by a multiple of its rates, with a quarter of the last stage."""
    task = TASKS[cell["task"]]()
    *steps, last_steps = STEPS[cell["task"]]
    optimizer, lr, matrix_lr = RATES.get(cell["arm"], RATES["the others"])
    recipe = Recipe(curriculum=CURRICULUM, seed=cell["seed"], optimizer=optimizer,
                    stage_steps=[*steps, last_steps // 4],
                    lr=cell["factor"] * lr, matrix_lr=cell["factor"] * matrix_lr)
    return task, partial(ARMS[cell["arm"]], len(task.vocab)), recipe, TESTS


def plan(cell):
    """An arm on a task, by the rates that were best."""
    best = max(records("assign_rates", arm=cell["arm"]), key=mean_accuracy)
    task, make_model, recipe, tests = plan_rates(cell | {"factor": best["factor"]})
    return task, make_model, replace(recipe, stage_steps=STEPS[cell["task"]]), tests


def measure_rates(model, task, tests):
    """On traces that are not those of the tests."""
    return [evaluate(model, task, *stage, seed=60) for stage in tests]


def measure(model, task, tests):
    """The rows of the tests; on shuffles the first of them also has what copies cost."""
    results = evaluate_all(model, task, tests)
    if isinstance(task, ShuffleTask):
        results[0]["by_copies"] = by_copies(model, task)
    return results


def by_copies(model, task, length=32, traces=2048):
    """The only print of a shuffle program of so many lines, by the lines of it that copy.

    Returns: [[right prints, prints] with 0, 1, ..., length copies].
    """
    n = task.group.degree
    rng = generator(0, "test", length)
    commands = task.draw((traces, length), rng)
    asked = rng.integers(n, size=(traces, 1))
    inputs, targets, reveals = next_tokens(*task.write(commands, asked, length))
    right = (predict(model, inputs) == targets)[reveals]

    copies = is_copy(commands).sum(1)
    return [[int(right[copies == count].sum()), int((copies == count).sum())]
            for count in range(length + 1)]


def is_copy(commands):
    """Whether a shuffle shows a name twice: [..., n] -> bool [...]."""
    # A value is no name: it gets a number of its own, so that it is like nothing else.
    n = commands.shape[-1]
    names = np.sort(np.where(commands < n, commands, n + np.arange(n)))
    return (np.diff(names) == 0).any(-1)


# --- 5. Told the state ----------------------------------------------------------------------------
#
# The chapter supervision tells a model the state after each line, and the delta rule learns little
# of its arithmetic. Here both layers read twice as many programs, and their rates fall to 0. A
# control has lines that lose no value.


class InvertibleTask(ArithmeticTask):
    """ArithmeticTask whose lines have an inverse: the target stands once on the right-hand side."""

    repeats = (1,)
    chance = 0.072  # the share of 0, the commonest answer


TOLD_TASKS = {"arithmetic": ArithmeticTask, "invertible lines": InvertibleTask}
TOLD_CELLS = grid(task=[*TOLD_TASKS], arm=["one more key", "delta rule"], seed=range(100, 103))
TOLD_PROGRAMS = 2**17
TOLD_TESTS = [(4, 1), (8, 1), (16, 1)]


def plan_told(cell):
    """Programs of four lines. The head that says the state is a part of the model."""
    task = TOLD_TASKS[cell["task"]]()

    def make_model():
        model = ARMS[cell["arm"]](len(task.vocab))
        model.auxiliary = make_head("decoder", task, model.unembedding.in_features)
        return model

    recipe = Recipe(curriculum=[(4, 1)], seed=cell["seed"])
    return task, make_model, replace(recipe, last_steps=TOLD_PROGRAMS // recipe.batch), TOLD_TESTS


# --- 6. The recipe of `train`, on which the goals rest --------------------------------------------

COMMAND = "python -m experiments.assign train"
RECIPES = {
    "integers": {"curriculum": [(2, 1), (8, 1), (16, 2), (32, 4), (64, 8)],
                 "stage_steps": [300, 300, 400, 3000, 3000]},
    "shuffles": {"max_steps": 4000, "last_steps": 600, "lr": 1e-3, "matrix_lr": 5e-3}}

MODELS = {"key": KeyRNN, "linrnn": LinRNN}  # the delta rule has the recipe of one more key

FURTHER = (256, 32)  # four times as long as training, and four times as long without a print

# Seeds of `train` on which nothing was tried. Integers of seed 45 were judged once before, by an
# older recipe.
GOALS = [*grid(task=["shuffles"], model=[*MODELS], seed=[42, 43, 44, 48, 49]),
         *grid(task=["integers"], model=[*MODELS], seed=[45, 46, 47])]


def train_one(argv):
    """The command `train`: a run folder of a linear RNN, with one more key or without."""
    parser = new_parser(COMMAND, "Train a linear RNN on programs that copy and compute.")
    add = parser.add_argument
    add("--task", choices=TASKS, help="integers or shuffles (integers)")
    add("--model", choices=MODELS, help="key: with one more key; linrnn: the delta rule (key)")
    add("--seed", type=at_least(0), help="of the traces, and of the weights to begin with (0)")

    typed = vars(parser.parse_args(argv))
    if "resume" in typed:
        config = config_of_run(typed, COMMAND)
    else:
        task = typed.get("task", "integers")
        recipe = Recipe(**RECIPES[task], seed=typed.get("seed", 0))
        config = {"command": COMMAND, "task": task, "model": typed.get("model", "key"),
                  "group": TASKS[task]().names, **asdict(recipe)}  # group: for the folder's name
    task, model = make_run(config)
    train_run(task, model, config, typed, lengths=TESTS, **FALLING)


def make_run(config):
    """The task of a config, and its model before training.  Raises: UserError."""
    if config.get("task") not in TASKS:
        raise UserError(f"this is a run of {config.get('task')}: use the command that made it")
    task = TASKS[config["task"]]()
    torch.manual_seed(config["seed"])
    return task, MODELS[config["model"]](len(task.vocab))


def load(folder):
    """The task and the trained model of a run of `train`."""
    task, model = make_run(read_checkpoint(folder)["config"])
    return task, load_weights(model, folder)


def evaluate_one(argv):
    """The command `eval`."""
    parser = Parser(prog="python -m experiments.assign eval", description="The table of a run.")
    add = parser.add_argument
    add("run", help="a run folder, made by `train`")
    add("--lengths", type=stages, default=TESTS, help="LENGTH:SPACING,... (8:1 to 128:16)")
    add("--traces", type=at_least(1), default=256, help="fresh traces for each length (256)")
    add("--json", action="store_true", help="print the rows as JSON, too, on the last line")
    args = parser.parse_args(argv)

    for stage in args.lengths:
        ReplTask.check(*stage)
    task, model = load(args.run)
    rows = evaluate_and_print(model, task, args.lengths, args.traces)
    if args.json:
        print(json.dumps({"results": rows}))


# --- 7. The tables and the picture ----------------------------------------------------------------

def show():
    """All tables, from the records."""
    for task in STEPS:
        chance = 100 * TASKS[task]().chance
        table(f"{task}: prints right in %, least-greatest of the seeds; the best reader of the "
              f"last line has {chance:.0f}", records("assign", task=task), ["arm"], {
                  "weights": lambda same: f"{same[0]['parameters']:,}",
                  "million tokens": millions, "minutes": minutes,
                  **{f"({length},{spacing})": percent(length) for length, spacing in TESTS}})
    prints = ", ".join(str(prints_between(*bin)) for bin in BINS)
    table("shuffles, the only print of programs of 32 lines, by how many of them copy: right in %\n"
          f"of {prints} prints", records("assign", task="shuffles"), ["arm"],
          {f"{least}-{most}": share_between(least, most) for least, most in BINS})
    table("The grid of the rates, seed 60, a quarter of the last stage: prints right in %, the "
          "mean\nof the tests on other traces", records("assign_rates"),
          ["task", "arm"], {f"times {factor}": mean_at(factor) for factor in FACTORS})

    table(f"Told the state, {TOLD_PROGRAMS:,} programs of 4 lines: answers right in %, sorted",
          records("assign_told"), ["task", "arm"], {
              "minutes": minutes,
              **{f"{length} lines": in_order(length, "perfect") for length, _ in TOLD_TESTS}})

    rows = records("assign_goals")
    table("The runs of `train`, one more key (key) and the delta rule (linrnn): prints right in %",
          rows, ["task", "model"], {
              "million tokens": millions, "minutes": minutes,
              **{f"({length},{spacing})": percent(length) for length, spacing in TESTS[:3]}})
    table("The same, sorted", rows, ["task", "model"], {
        f"({length},{spacing})": in_order(length) for length, spacing in [*TESTS[3:], FURTHER]})
    table("Real functions, read by the models of integers: answers right of 20, sorted\n(those of "
          "the best reader of the last line)", where(rows, task="integers"), ["model"], {
              name: functions_right(place) for place, name in enumerate(FUNCTIONS)})


BINS = [(0, 6), (7, 9), (10, 12), (13, 32)]  # numbers of copies in 32 lines


def share_between(least, most):
    """A column of a table: prints that are right after so many copies."""
    return lambda rows: span([share_of(row, least, most) for row in rows])


def prints_between(least, most):
    """How many prints come after so many copies: the same for all runs."""
    counts = records("assign", task="shuffles")[0]["results"][0]["by_copies"]
    return np.sum(counts[least:most + 1], 0)[1]


def share_of(row, least, most):
    """In %, of one run. The counts are kept in the first row, though they are of 32 lines."""
    right, prints = np.sum(row["results"][0]["by_copies"][least:most + 1], 0)
    return 100 * right / prints


def in_order(length, key="all"):
    """A column of a table: a number for each seed, from the least on."""
    return lambda rows: " ".join(f"{100 * share:.1f}" for share in sorted(
        at(row, length)[key] for row in rows))


def functions_right(place):
    """A column of a table: right answers for a function, and those of the last line's reader."""
    def text(rows):
        right = sorted(row["functions"][place][0] for row in rows)
        return f"{' '.join(map(str, right))} ({rows[0]['functions'][place][1]})"
    return text


COLOURS = dict(zip([*ARMS][:6], [BLUE, SKY, RED, ORANGE, GREEN, "black"]))


def picture():
    """Wrong answers at the only print of 32 lines, against the number of lines that copy.

    The LSTM and the Transformer are far above it.
    """
    rows = records("assign", task="shuffles")
    figure, ((axes,),) = canvas("The more lines copy, the more the delta rule loses, with more "
                                "writes or layers, too;\nwith one more key a copy costs little")
    axes.set(xlabel="lines that copy, of the 32 before the only print",
             ylabel=f"prints wrong, % (a guess: {100 - 100 * ShuffleTask().chance:.0f})")
    axes.set_xticks(range(len(BINS)), ["up to 6", "7-9", "10-12", "13 or more"])

    found = {}
    for arm, colour in COLOURS.items():
        wrong = [[100 - share_of(row, *bin) for bin in BINS] for row in where(rows, arm=arm)]
        found[arm] = range(len(BINS)), wrong, colour
    draw(axes, found)
    return figure


# --- 8. The command line -------------------------------------------------------------------------

def make_missing():
    make("assign_rates", RATE_CELLS, plan_rates, measure_rates, **FALLING)
    make("assign", CELLS, plan, measure, **FALLING)
    with_state = partial(loss_of, ArithmeticTask.answer_width)
    make("assign_told", TOLD_CELLS, plan_told, loss_of=with_state, **FALLING)
    for cell in GOALS:
        if not records("assign_goals", **cell):
            make_goal(cell)


def make_goal(cell):
    """A run of `train`, as a record."""
    folder = Path("runs") / "assign_goals" / "-".join(map(str, cell.values()))
    options = [f"--{key}={value}" for key, value in cell.items()]
    train_one([*options, "--out", str(folder)])
    result = json.loads((folder / "results.json").read_text())
    row = {key: result[key] for key in ("steps", "tokens", "parameters", "results")}
    row["minutes"] = result["seconds"] / 60
    task, model = load(folder)
    row["results"].append(evaluate(model, task, *FURTHER))
    if isinstance(task, NumberTask):
        row["functions"] = answers_of(model, task)
    record("assign_goals", cell | row)


def main(argv=None):
    chapter(__doc__, show, make_missing,
            {"train": train_one, "eval": evaluate_one}, argv)


if __name__ == "__main__":
    run(main)
