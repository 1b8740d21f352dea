"""What does being told the state change?  Auxiliary losses on the states of programs.

    p = 1             An auxiliary head reads the hidden vector at the end of each line.
    p ^= 0            It must say the state there: 1, 1, 0. Its loss is added to that of the next
    p ^= 1            tokens. The text stays the same, and the head is dropped after the training.
    assert p == 0     An answer is right if all its tokens are right.

Finding. Told the state, the linear RNN learns parity, exchanges in a list and REPL traces from
1,000 to 7,000 programs. Of arithmetic it has 32 to 40% of the answers. Twice as many programs and
rates that fall bring it to 66 to 83%, and with one more key to 97 to 100 (assign.py). From the next
token alone, without stages, it learns only traces with a reveal after every command, two seeds of
three, from 32,000. It follows traces of four times the length only if training shows commands after
commands and after prints.

    python -m experiments.supervision          # the table, from results/supervision.jsonl
    python -m experiments.supervision --run    # makes what is missing of it, 70 minutes in all

Source: "Grounding code understanding in step-by-step execution". There the supervision beats the
curriculum with small Transformers. Longer programs are not tested.

Next: actions.py.
"""

import tempfile
from functools import partial
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from data import Group, Lexer, ReplTask, draw_commands, generator, next_tokens, run, run_commands
from eval import predict
from experiments import (RATES, chapter, evaluate_all, grid, record, records, span, summary, table,
                         where)
from experiments.plots import BLUE, ORANGE, canvas, count, dot
from models import MODELS, Transformer
from train import Recipe, next_token_loss, train


# --- 1. Programs and their states -----------------------------------------------------------------

class Supervised(NamedTuple):
    """A data.Batch, and the states."""
    inputs: np.ndarray
    targets: np.ndarray
    reveals: np.ndarray  # the targets that are tokens of an answer
    ends: np.ndarray  # bool [B, T] the inputs that end a line, from the first that has a state
    states: np.ndarray  # int64 [ends of all programs, W] the tokens of the state at each end


class ProgramTask(Lexer):
    """Programs whose states Python tells: the base of the next three classes.

    A subclass has program(length, rng) -> a first line, and `length` that change the state. Then
    comes a question, as `assert p == 1`, for the variable that the last of them sets.
    """

    answer_end = -1  # a newline follows the answer

    def __init__(self):
        super().__init__(["\n", " = ", *self.symbols])

    def test_batch(self, batch, length, spacing, rng):
        """Programs, as Supervised. Programs of one length have equally many tokens."""
        texts, states = [], []
        for _ in range(batch):
            variables = {}
            lines = self.program(length, rng)
            for line in lines:
                exec(line, {}, variables)
                states.append(self.encode(self.state.format(**variables)))
            asked = lines[-1][0]
            answer = str(variables[asked]).ljust(self.answer_width, "\n")
            texts.append(self.encode("\n".join([*lines, f"assert {asked} == {answer}\n"])))

        tokens = np.array(texts)
        start = self.answer_end - self.answer_width
        reveals = np.zeros(tokens.shape, bool)
        reveals[:, start:self.answer_end] = True
        ends = tokens == self.encode("\n")[0]
        ends[:, start:] = False  # those of the answer end no line of the program
        return Supervised(*next_tokens(tokens, reveals), ends[:, :-1], np.array(states))

    training_batch = test_batch


class ParityTask(ProgramTask):
    """`p = 1`, then lines like `p ^= 0`."""

    symbols = ["p", " ^= ", "assert p == ", "0", "1"]
    state = "{p}"
    answer_width = 1
    chance = 0.5

    def program(self, length, rng):
        first, *bits = rng.integers(2, size=length + 1)
        return [f"p = {first}", *(f"p ^= {bit}" for bit in bits)]


class PermutationTask(ProgramTask):
    """`a = [2, 1, 3, 4]`, then lines like `a[0], a[1] = a[1], a[0]`."""

    symbols = ["a = [", "assert a == [", "]", *"1234", "a[0]", "a[1]", "a[2]", "a[3]", ", 1", ", 2",
               ", 3", ", 4", ", a[0]", ", a[1]", ", a[2]", ", a[3]"]
    state = "{a[0]}, {a[1]}, {a[2]}, {a[3]}"
    answer_width = 4
    answer_end = -2  # a bracket, too
    chance = 1 / 24

    def program(self, length, rng):
        start = (Group("S4").draw((), rng) + 1).tolist()
        exchanges = [f"a[{i}], a[{j}] = a[{j}], a[{i}]" for i, j in combinations(range(4), 2)]
        return [f"a = {start}", *(exchanges[one] for one in rng.integers(6, size=length))]


class ArithmeticTask(ProgramTask):
    """`c, a, b = 4, 3, 6`, then lines like `a = 9 - a` or `c = a + b`."""

    symbols = [*"abc", ", ", "assert ", " == ", " + ", " - ", "+", "-", *"0123456789"]
    state = "{a:+d}{b:+d}{c:+d}"
    answer_width = 3  # a sign, a digit, and the newline that tells that it is over
    chance = 0.189  # the share of the commonest answer, 0, of programs of 4 lines
    repeats = (0, 1, 2)  # how often the target may stand on the right-hand side of its line

    def program(self, length, rng):
        names = rng.permutation([*"abc"]).tolist()
        values = dict(zip(names, rng.integers(10, size=3).tolist()))
        lines = [f"{', '.join(names)} = {', '.join(map(str, values.values()))}"]

        while len(lines) <= length:
            target, one, other = (names[i] for i in rng.integers(3, size=3))
            literal, first, minus = rng.random(3) < 0.5
            if literal:
                other = str(rng.integers(10))
            if first:
                one, other = other, one
            expression = f"{one} {'-' if minus else '+'} {other}"
            result = eval(expression, {}, values)
            # A line that is not allowed is drawn again.
            if abs(result) <= 9 and expression.count(target) in self.repeats:
                values[target] = result
                lines.append(f"{target} = {expression}")
        return lines


class TraceTask(ReplTask):
    """The REPL traces of data.py. The state is told before the first command and after each."""

    answer_width = 1

    def test_batch(self, batch, length, spacing, rng):
        n = self.group.degree
        commands = draw_commands(self.group, self.commands, (batch, length), rng)
        asked = rng.integers(n, size=(batch, length // spacing))
        tokens, reveals = self.write(commands, asked, spacing)

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
         "traces": partial(TraceTask, Group("S5"))}


# --- 2. The arms, and how a state is read off a hidden vector -------------------------------------
#
#     next       the next tokens alone, all programs of the training length n
#     stages     the same with the lengths 2, 4, 8, ... n; each is left when it is learned.
#                Traces have a reveal after each command first, then ever rarer ones
#     linear     told the state: one linear map says all its tokens
#     decoder    told the state: a small Transformer says its tokens one by one


def loss_of(answer_width, model, batch, recipe):
    """The loss of train.py, and the mean cross-entropy of the tokens of all states if told."""
    hidden = hidden_vectors(model, model.embedding(batch.inputs))
    logits = model.unembedding(hidden)
    loss, metrics = next_token_loss(lambda inputs: logits, batch, recipe)

    # An answer is right if all its tokens are.
    each_token = (logits.argmax(-1) == batch.targets)[batch.reveals]
    answered = each_token.view(-1, answer_width).all(-1)
    metrics["reveal_accuracy"] = answered.float().mean().item()

    head = model.auxiliary
    if head is None:
        return loss, metrics

    # Each of N states is read off the vector at the end of its line.
    at_ends = hidden[torch.from_numpy(batch.ends)]  # [N, D]
    states = torch.from_numpy(batch.states)  # [N, W]
    if isinstance(head, nn.Linear):
        said = head(at_ends).unflatten(-1, (states.shape[1], -1))  # [N, W, V]
    else:
        # The vector stands where a text begins; what the head says there is the first token.
        x = torch.cat([at_ends.unsqueeze(1), head.embedding(states[:, :-1])], 1)  # [N, W, D]
        said = head.unembedding(hidden_vectors(head, x))
    return loss + F.cross_entropy(said.flatten(0, 1), states.flatten()), metrics


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


def stages_of(arm, length, spacing):
    """The curriculum: (length, spacing) alone, or shorter programs and denser reveals before it."""
    stages = [(length, spacing)]
    while arm == "stages" and stages[0] != (2, 1):  # both are powers of two
        n, S = stages[0]
        stages.insert(0, (n, S // 2) if S > 1 else (n // 2, 1))
    return stages


# --- 3. One run, until it answers -----------------------------------------------------------------

LAST_STEPS = 150  # made by a run that answers all


def run_cell(cell):
    """Train in pieces until all unseen programs are answered, and then for LAST_STEPS more."""
    print(cell, flush=True)
    task = TASKS[cell["task"]]()
    n, seed = cell["length"], cell["seed"]
    torch.manual_seed(seed)
    model = MODELS[cell["model"]](len(task.vocab))
    # As a part of the model, the head is trained and saved with it.
    model.auxiliary = make_head(cell["arm"], task, model.unembedding.in_features)

    # The last stage stands twice: the first of the two is left as soon as it is learned, and the
    # mean of the weights, which is tested, begins there. No stage ends the run.
    last = n, cell["spacing"]
    recipe = Recipe([*stages_of(cell["arm"], *last), last], max_steps=10**6, last_steps=10**6,
                    seed=seed, **RATES[cell["model"]])
    limit = cell["budget"] // recipe.batch

    # (Short programs are few, 2^17 of parity at length 16: training may meet some of these.)
    unseen = task.test_batch(256, *last, generator(seed, "valid", *last))
    solved = None
    now = {"step": 0, "stage": 0, "tokens": 0}  # the last entry of the log
    with tempfile.TemporaryDirectory() as folder:
        while now["step"] < limit:
            # A piece is one call of train(), which goes on from the folder: a tenth of the steps so
            # far, or all that is left of a run that answers. Its cap is in tokens.
            more = limit - now["step"]
            if not solved:
                more = min(more, max(10, now["step"] // 10))
            stage = recipe.curriculum[now["stage"]]
            one = task.training_batch(recipe.batch, *stage, np.random.default_rng(0))
            result, log = train(model, task, recipe, folder, resume=True, quiet=True,
                                loss_of=partial(loss_of, task.answer_width),
                                max_tokens=now["tokens"] + more * one.inputs.size)
            now = log[-1]

            answered = (predict(result, unseen.inputs) == unseen.targets)[unseen.reveals]
            if answered.all() and not solved:
                solved = now["step"] * recipe.batch
                limit = now["step"] + LAST_STEPS

    del result.auxiliary
    one = n if cell["task"] == "traces" else 1  # traces: a question after each n commands
    results = evaluate_all(result, task, [(n, one), (2 * n, one), (4 * n, one)])
    record("supervision", cell | {"solved": solved, "results": results} | summary(result, log))


# --- 4. The study, its table and the picture ------------------------------------------------------

def runs(task, length, arms, budget, spacings=(1,), model="linrnn"):
    """Three seeds of each arm. budget: the programs that a run may read."""
    return grid(task=[task], length=[length], spacing=spacings, model=[model], arm=arms,
                budget=[budget], seed=range(3))


CELLS = [
    *runs("parity", 16, ["next", "stages", "linear"], 2**16),
    *runs("parity", 32, ["linear"], 2**16),
    *runs("parity", 64, ["stages", "linear"], 2**15),
    *runs("permutations", 8, ["next", "stages", "linear", "decoder"], 2**16),
    *runs("traces", 8, ["next", "decoder"], 2**15, spacings=[1, 2, 4, 8]),
    *runs("traces", 8, ["stages"], 2**16, spacings=[1, 8]),
    *runs("arithmetic", 4, ["next", "decoder"], 2**16),
    *runs("parity", 8, ["next", "linear"], 2**15, model="transformer"),
    *runs("parity", 16, ["linear"], 2**17, model="transformer")]


def make_missing():
    """Not experiments.make: here a run ends once it answers all, and records when that was."""
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
    rows = [row | {"L": row["length"], "S": row["spacing"]} for row in records("supervision")]
    table("Programs of L lines, or traces of (L,S), read until all of 256 others are answered, by "
          "seed (-: not in\nthe budget). Whole answers right in %, to the last question, after L, "
          "2L, 4L lines", rows, ["task", "L", "S", "model", "arm", "budget"], {
              "all after": lambda rows: " ".join(str(row["solved"] or "-") for row in rows),
              "chance": lambda rows: span([100 * rows[0]["results"][0]["chance"]], 0),
              "at L": right(-3), "at 2L": right(-2), "at 4L": right(-1)})


def picture():
    """Programs that the linear RNN read until it answered all others, by task, length and arm."""
    rows = records("supervision", model="linrnn")
    rows.sort(key=lambda row: (row["task"], row["length"], row["spacing"]))
    told = [row for row in rows if row["arm"] in ("linear", "decoder")]
    most = max(row["solved"] for row in told if row["task"] != "arithmetic")
    solved = count(where(told, task="arithmetic"), lambda row: row["solved"] is not None)
    title = (f"Told the state, the linear RNN answers parity, permutations and traces\nwithin "
             f"{most:,} programs, and arithmetic on {solved} seeds")
    figure, ((axes,),) = canvas(title, size=(8, 6))
    for row in rows:
        stage = f"({row['length']},{row['spacing']})" if row["task"] == "traces" else row["length"]
        dot(axes, row["solved"] or row["budget"], f"{row['task']} of {stage}, {row['arm']}",
            "o" if row["solved"] else "x", BLUE if row in told else ORANGE)
    axes.set_xscale("log")
    axes.set_xticks([1000, 3000, 10_000, 30_000], ["1,000", "3,000", "10,000", "30,000"])
    axes.minorticks_off()
    figure.supxlabel("programs read:   o  until 256 others are answered,   x  all of the budget;   "
                     "blue: told the state")
    return figure


def main(argv=None):
    chapter(__doc__, show, make_missing, argv=argv)


if __name__ == "__main__":
    run(main)
