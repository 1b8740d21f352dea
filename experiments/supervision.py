"""What does being told the state change?  Auxiliary losses on the states of programs.

    p = 1             An auxiliary head reads the hidden vector at the end of each line.
    p ^= 0            It must say the state there: 1, 1, 0. Its loss is added to that of the next
    p ^= 1            tokens. The text stays the same, and the head is dropped after the training.
    assert p == 0     An answer is right if all its tokens are right.

Finding. Told the state, the linear RNN learns parity, exchanges in a list and REPL traces from
1,000 to 7,000 programs; arithmetic it does not learn. From the next token alone, without stages, it
learns only traces with a reveal after every command, two seeds of three, from 32,000. It follows
traces of four times the length only if training shows commands behind commands and behind prints.

    python -m experiments.supervision          # the table, from results/supervision.jsonl
    python -m experiments.supervision --run    # makes what is missing of it, 70 minutes in all

Symbols: n length, lines that change the state; S spacing, commands per reveal of a trace; W tokens
of a state; N states; B batch; T tokens; D width; V symbols.

Source: "Grounding code understanding in step-by-step execution". There the supervision beats the
curriculum with small Transformers. Longer programs are not tested.

Next: actions.py.
"""

import itertools
import re
import tempfile
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from data import Group, ReplTask, draw_commands, generator, next_tokens, run, run_commands
from eval import predict
from experiments import (RATES, chapter, evaluate_all, grid, record, records, span, summary, table,
                         where)
from experiments.plots import BLUE, ORANGE, canvas, dot
from models import MODELS, Transformer
from train import Recipe, next_token_loss, train

# --- 1. Programs and their states -----------------------------------------------------------------
#
#     parity        p = 1                 p ^= 0                           assert p == 1
#     permutations  a = [2, 1, 3, 4]      a[0], a[1] = a[1], a[0]          assert a == [1, 2, 3, 4]
#     arithmetic    c, a, b = 4, 3, 6     a = 9 - a                        assert a == 6
#     traces        the REPL traces of data.py, with a reveal after every S commands
#
# A program begins with the line on the left. n lines like the one in the middle follow. The
# question stands at the end. Python executes it, and the states are what Python holds.


class Supervised(NamedTuple):
    """A data.Batch, and the states."""
    inputs: np.ndarray
    targets: np.ndarray
    reveals: np.ndarray  # the targets that are tokens of an answer
    ends: np.ndarray  # bool [B, T] the inputs that end a line, from the first that has a state
    states: np.ndarray  # int64 [ends of all programs, W] the tokens of the state at each end


class ProgramTask:
    """Programs with one question: the base of the next three classes.

    A subclass has program(length, rng) -> the lines, of which the last one asks; the text of the
    state after each of the others; the answer, in answer_width tokens.
    """

    def __init__(self):
        self.vocab = ["\n", " = ", *self.symbols]
        longest_first = sorted(self.vocab, key=len, reverse=True)
        self._lexer = re.compile("|".join(map(re.escape, longest_first)))

    def encode(self, text):
        return [self.vocab.index(symbol) for symbol in self._lexer.findall(text)]

    def decode(self, tokens):
        return "".join(self.vocab[i] for i in tokens)

    def test_batch(self, batch, length, spacing, rng):
        """Programs, as Supervised. Programs of one length have equally many tokens."""
        rows = []
        all_states = []
        for _ in range(batch):
            lines, states, answer = self.program(length, rng)
            question = self.encode("\n".join(lines))
            rows.append(question + self.encode(f"{answer}\n"))
            all_states += [self.encode(state) for state in states]

        tokens = np.array(rows)
        asked = len(question)
        reveals = np.zeros(tokens.shape, bool)
        reveals[:, asked:asked + self.answer_width] = True
        ends = tokens == self.encode("\n")[0]
        ends[:, asked:] = False  # those of the answer end no line of the program
        return Supervised(*next_tokens(tokens, reveals), ends[:, :-1], np.array(all_states))

    training_batch = test_batch


class ParityTask(ProgramTask):
    """`p = 1`, then `p ^= 0` or `p ^= 1`."""

    symbols = ["p", " ^= ", "assert p == ", "0", "1"]
    answer_width = 1
    chance = 0.5

    def program(self, length, rng):
        bits = rng.integers(2, size=length + 1)
        states = [str(bit) for bit in bits.cumsum() % 2]
        lines = [f"p ^= {bit}" for bit in bits[1:]]
        return [f"p = {states[0]}", *lines, "assert p == "], states, states[-1]


class PermutationTask(ProgramTask):
    """A list of four items, of which each line exchanges two."""

    symbols = ["a = [", "assert a == [", "]", "1", "2", "3", "4", "a[0]", "a[1]", "a[2]", "a[3]",
               ", 1", ", 2", ", 3", ", 4", ", a[0]", ", a[1]", ", a[2]", ", a[3]"]
    answer_width = 4
    chance = 1 / 24

    def program(self, length, rng):
        items = (Group("S4").draw((), rng) + 1).tolist()
        states = [", ".join(map(str, items))]
        lines = [f"a = [{states[0]}]"]
        pairs = list(itertools.combinations(range(4), 2))
        for choice in rng.integers(len(pairs), size=length):
            i, j = pairs[choice]
            items[i], items[j] = items[j], items[i]
            lines.append(f"a[{i}], a[{j}] = a[{j}], a[{i}]")
            states.append(", ".join(map(str, items)))
        return [*lines, "assert a == ["], states, states[-1] + "]"


class ArithmeticTask(ProgramTask):
    """Three variables, of which each line sets one to a sum or a difference; the last one is asked.

    One operand is a variable, the other a variable or, half of the time, a digit. The text of a
    state is that of all values with their signs: +4-2+6.
    """

    symbols = [*"abc", ", ", "assert ", " == ", " + ", " - ", "+", "-", *"0123456789"]
    answer_width = 3  # a sign, a digit, and the newline that tells that it is over
    chance = 0.189  # the share of the commonest answer, 0, of programs of 4 lines

    def program(self, length, rng):
        names = rng.permutation([*"abc"]).tolist()
        values = dict(zip(names, rng.integers(10, size=3).tolist()))
        lines = [f"{', '.join(names)} = {', '.join(map(str, values.values()))}"]
        states = [self.state(values)]

        while len(lines) <= length:
            target, left, right = (names[i] for i in rng.integers(3, size=3))
            literal, first, minus = rng.random(3) < 0.5
            if literal:
                right = str(rng.integers(10))
            if first:
                left, right = right, left

            expression = f"{left} {'-' if minus else '+'} {right}"
            result = eval(expression, {}, values)
            if abs(result) <= 9:  # else this line is drawn again
                values[target] = result
                lines.append(f"{target} = {expression}")
                states.append(self.state(values))
        return [*lines, f"assert {target} == "], states, str(values[target]).ljust(3, "\n")

    def state(self, values):
        return "".join(f"{values[name]:+d}" for name in "abc")


class TraceTask(ReplTask):
    """The REPL traces of data.py. The state is told before the first command and after each."""

    answer_width = 1

    def test_batch(self, batch, length, spacing, rng):
        n = self.group.degree
        commands = draw_commands(self.group, self.commands, (batch, length), rng)
        asked = rng.integers(n, size=(batch, length // spacing))
        tokens, reveals = self.write(commands, asked)

        # A trace: a first line for each variable, then again and again S commands and a reveal.
        block = [True] * spacing + [False] * 2
        told = [False] * (n - 1) + [True] + block * (length // spacing)
        ends = tokens == self.encode("\n")[0]
        ends[ends] = told * batch

        first = np.broadcast_to(np.arange(n), (batch, 1, n))
        states = np.concatenate([first, run_commands(commands)], 1)
        states = self.value_tokens[states].reshape(-1, n)
        return Supervised(*next_tokens(tokens, reveals), ends[:, :-1], states)

    training_batch = test_batch


TASKS = {"parity": ParityTask, "permutations": PermutationTask, "arithmetic": ArithmeticTask,
         "traces": lambda: TraceTask(Group("S5"))}


# --- 2. The arms, and how a state is read off a hidden vector -------------------------------------
#
#     next       the next tokens alone, all programs of the training length n
#     stages     the same with the lengths 2, 4, 8, ... n; each is left when it is learned.
#                Traces have a reveal after each command first, then ever rarer ones
#     linear     told the state: one linear map says all its tokens
#     decoder    told the state: a small Transformer says its tokens one by one

ARMS = ["next", "stages", "linear", "decoder"]
TOLD = ["linear", "decoder"]


def hidden_vectors(model, x):
    """What stands ahead of model.unembedding: embedded texts [B, T, D] -> [B, T, D]."""
    for block in model.blocks:
        x, _ = block(x)
    return model.norm(x)


def make_head(arm, task, d_model):
    """What reads the W tokens of a state off a vector. None for an arm that is not told it."""
    if arm == "linear":
        width = task.test_batch(1, 2, 1, np.random.default_rng(0)).states.shape[1]
        return nn.Linear(d_model, width * len(task.vocab))
    if arm == "decoder":
        return Transformer(len(task.vocab), d_model, heads=2, conv_width=1)
    return None


def loss_of_states(head, hidden, states):
    """Cross-entropy of the tokens of states, each read off the vector at the end of its line.

    Shapes: hidden [N, D], states [N, W] -> a number, the mean over all tokens.
    """
    if isinstance(head, nn.Linear):
        logits = head(hidden).unflatten(-1, (states.shape[1], -1))  # [N, W, V]
    else:
        # The hidden vector stands where a text begins; what the head says there is the first token.
        x = torch.cat([hidden.unsqueeze(1), head.embedding(states[:, :-1])], 1)  # [N, W, D]
        logits = head.unembedding(hidden_vectors(head, x))
    return F.cross_entropy(logits.flatten(0, 1), states.flatten())


def make_loss(answer_width):
    """The loss_of of train(): its own loss, and that of the states if the model has a head."""
    def loss_of(model, batch, recipe):
        hidden = hidden_vectors(model, model.embedding(batch.inputs))
        logits = model.unembedding(hidden)
        total, metrics = next_token_loss(lambda inputs: logits, batch, recipe)

        # An answer is right if all its tokens are.
        right = (logits.argmax(-1) == batch.targets)[batch.reveals]
        right = right.view(-1, answer_width).all(-1)
        metrics["reveal_accuracy"] = right.float().mean().item()

        if model.auxiliary:
            at_ends = hidden[torch.from_numpy(batch.ends)]
            states = torch.from_numpy(batch.states)
            auxiliary = loss_of_states(model.auxiliary, at_ends, states)
            total = total + auxiliary
            metrics["auxiliary"] = auxiliary.item()
        return total, metrics
    return loss_of


# --- 3. One run, until it is solved ---------------------------------------------------------------

BATCH = 16
LAST_STEPS = 150  # made by a run that is solved


def run_cell(cell):
    """One arm on one task with one seed: trained, tested at n, 2n and 4n, recorded."""
    print(cell, flush=True)
    task = TASKS[cell["task"]]()
    torch.manual_seed(cell["seed"])
    model = MODELS[cell["model"]](len(task.vocab))
    # As a part of the model, the head is trained and saved with it.
    model.auxiliary = make_head(cell["arm"], task, model.unembedding.in_features)
    with tempfile.TemporaryDirectory() as folder:  # a run has minutes: no need to keep its parts
        model, log, solved = train_until_solved(model, task, cell, folder)
    del model.auxiliary

    n = cell["length"]
    one = n if cell["task"] == "traces" else 1  # the spacing with which one question is asked
    tests = dict.fromkeys([(n, cell["spacing"]), (n, one), (2 * n, one), (4 * n, one)])
    record("supervision", cell | {"solved": solved} | summary(model, log)
           | {"results": evaluate_all(model, task, tests)})


def train_until_solved(model, task, cell, folder):
    """Train in pieces, with a check after each, until it is solved or its budget is read.

    It is solved when all unseen programs are answered, and then makes LAST_STEPS more.
    Returns: the trained model, the log, after how many programs it was solved (None: it was not).
    """
    # The last stage stands twice: the first of the two is left as soon as it is learned, and the
    # mean of the weights, which is tested, begins there. No stage ends the run.
    length, spacing, seed = cell["length"], cell["spacing"], cell["seed"]
    stages = [*stages_of(cell["arm"], length, spacing), (length, spacing)]
    limit = cell["budget"] // BATCH
    recipe = Recipe(curriculum=stages, max_steps=limit + LAST_STEPS, last_steps=limit + LAST_STEPS,
                    batch=BATCH, seed=seed, **RATES[cell["model"]])

    # The unseen programs are drawn apart from those of training. But short programs are few (2^17
    # of parity at length 16), so training may meet some of them.
    unseen = task.test_batch(256, length, spacing, generator(seed, "valid", length, spacing))

    steps, stage, tokens, solved = 0, 0, 0, None
    while steps < limit:
        # A piece is one call of train(), which goes on from the folder. Its cap is in tokens.
        more = limit - steps
        if not solved:
            more = min(more, max(10, steps // 10))  # evenly spread on a logarithmic axis
        one = task.training_batch(BATCH, *stages[stage], np.random.default_rng(0))
        result, log = train(model, task, recipe, folder, resume=True, quiet=True,
                            loss_of=make_loss(task.answer_width),
                            max_tokens=tokens + more * one.inputs.size)
        steps, stage, tokens = (log[-1][key] for key in ("step", "stage", "tokens"))

        if not solved:
            right = (predict(result, unseen.inputs) == unseen.targets)[unseen.reveals]
            print(f"{steps * BATCH:8,} programs; of unseen answers {right.mean():.0%} of the "
                  "tokens right", flush=True)
            if right.all():
                solved = steps * BATCH
                limit = steps + LAST_STEPS
    return result, log, solved


def stages_of(arm, length, spacing):
    """The curriculum: (length, spacing) alone, or shorter programs and denser reveals before it."""
    stages = [(length, spacing)]
    while arm == "stages" and stages[0] != (2, 1):  # both are powers of two
        n, S = stages[0]
        stages.insert(0, (n, S // 2) if S > 1 else (n // 2, 1))
    return stages


# --- 4. The study and its table -------------------------------------------------------------------

def runs(task, length, spacing, arms, budget, model="linrnn"):
    """Three seeds of each arm. budget: the programs that a run may read."""
    return grid(task=[task], length=[length], spacing=[spacing], model=[model], arm=arms,
                budget=[budget], seed=range(3))


CELLS = [
    *runs("parity", 16, 1, ["next", "stages", "linear"], 2**16),
    *runs("parity", 32, 1, ["linear"], 2**16),
    *runs("parity", 64, 1, ["stages", "linear"], 2**15),
    *runs("permutations", 8, 1, ["next", "stages", "linear", "decoder"], 2**16),
    *runs("traces", 8, 1, ["next", "decoder"], 2**15),
    *runs("traces", 8, 2, ["next", "decoder"], 2**15),
    *runs("traces", 8, 4, ["next", "decoder"], 2**15),
    *runs("traces", 8, 8, ["next", "decoder"], 2**15),
    *runs("traces", 8, 1, ["stages"], 2**16),
    *runs("traces", 8, 8, ["stages"], 2**16),
    *runs("arithmetic", 4, 1, ["next", "decoder"], 2**16),
    *runs("parity", 8, 1, ["next", "linear"], 2**15, "transformer"),
    *runs("parity", 16, 1, ["linear"], 2**17, "transformer")]


def make_missing():
    """Not experiments.make: here a run ends when it is solved, and records when that was."""
    for cell in CELLS:
        if not records("supervision", **cell):
            run_cell(cell)


def right(place):
    """A column: whole answers right in %, in the test at this place of a row's results."""
    def text(rows):
        # The last reveal of a trace is its answer; the answer of a program is all its tokens.
        key = "final" if rows[0]["task"] == "traces" else "perfect"
        return span([100 * row["results"][place][key] for row in rows], 0)
    return text


def show():
    table("Programs read until solved, by seed (-: not within the budget). Whole answers right in "
          "%,\nleast-greatest of the seeds: at (n,S); of one question after n, 2n and 4n lines",
          records("supervision"), ["task", "length", "spacing", "model", "arm", "budget"], {
              "solved after": lambda rows: ", ".join(str(row["solved"] or "-") for row in rows),
              "chance": lambda rows: span([100 * rows[0]["results"][0]["chance"]], 0),
              "(n,S)": right(0), "n": right(-3), "2n": right(-2), "4n": right(-1)})


def picture():
    """Programs read until solved, by the arm and the size of the program: a mark a run."""
    rows = records("supervision", model="linrnn")
    told = [row for row in rows if row["arm"] in TOLD]
    arithmetic = where(told, task="arithmetic")
    solved = [row["solved"] for row in told if row["task"] != "arithmetic"]
    figure, (panels,) = canvas(
        f"Told the state, {sum(map(bool, solved))} of {len(solved)} linear RNNs solve parity, "
        f"exchanges and traces after {min(solved):,} to {max(solved):,} programs,\n"
        f"and {sum(bool(row['solved']) for row in arithmetic)} of {len(arithmetic)} arithmetic "
        f"within {arithmetic[0]['budget']:,}", 1, 4, (12.5, 4.4), sharex=True)

    size = {"parity": "length", "permutations": "length", "traces": "spacing",
            "arithmetic": "length"}
    for axes, (task, what) in zip(panels, size.items()):
        mine = where(rows, task=task)
        mine.sort(key=lambda row: (ARMS.index(row["arm"]), row[what]), reverse=True)
        for row in mine:
            colour = BLUE if row["arm"] in TOLD else ORANGE
            dot(axes, row["solved"] or row["budget"], f"{row['arm']}, {row[what]}",
                "o" if row["solved"] else "x", colour)
        axes.set(xscale="log", xlim=(500, 1.2e5), title=f"{task}: arm, {what}")
    figure.supxlabel("programs read:   o  until solved,   x  all of the budget, not solved;   "
                     "blue: told the state")
    return figure


def main(argv=None):
    chapter(__doc__, show, make_missing, argv=argv)


if __name__ == "__main__":
    run(main)
