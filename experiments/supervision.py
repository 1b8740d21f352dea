"""What does being told the state change?  Auxiliary losses on the states of programs.

    p = 1             An auxiliary head reads the hidden vector at the end of each line.
    p ^= 0            It must say the state there: 1, 1, 0. Its loss is added to that of the next
    p ^= 1            tokens. The text stays the same, and the head is dropped after the training.
    assert p == 0     An answer is right if all its tokens are right.

Finding. Told the state, the linear RNN learns parity, exchanges in a list and REPL traces from
1,000 to 7,000 programs, and arithmetic not. From the next token alone it learns only traces with a
reveal after every command, on two seeds of three and from 32,000. It follows traces of four times
the length only if training has shown commands behind commands and behind prints.

    python -m experiments.supervision          # the table, from results/supervision.jsonl
    python -m experiments.supervision --run    # makes what is missing of it, 80 minutes in all
    python -m experiments.supervision --run --task permutations --arm linear --seed 3   # a minute

Symbols: n length, lines that change the state; S spacing, commands per reveal of a trace; W tokens
of a state; N states; B batch; T tokens; D width; V symbols.

Source: "Grounding code understanding in step-by-step execution". There the supervision beats the
curriculum with small Transformers. Longer programs are not tested.

Next: actions.py.
"""

import argparse
import itertools
import re
import tempfile
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from data import (Group, ReplTask, draw_commands, draw_symmetric, generator, next_tokens, number,
                  parse, run, run_commands)
from eval import evaluate_and_print, log_probabilities
from experiments import RATES, record, records
from models import Transformer, build
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
    best: None  # the answers are certain
    ends: np.ndarray  # bool [B, T] the inputs that end a line, from the first that has a state
    states: np.ndarray  # int64 [ends of all programs, W] the tokens of the state at each end


class ProgramTask:
    """Programs with one question: the base of the next three classes.

    A subclass has program(length, rng) -> the lines, of which the last one asks; the text of the
    state after each of the others; the answer. Its `start` is the line that makes a state.
    """

    def __init__(self):
        self.vocab = ["\n", " = ", *self.symbols]
        longest_first = sorted(self.vocab, key=len, reverse=True)
        self._lexer = re.compile("|".join(map(re.escape, longest_first)))

    def encode(self, text):
        return [self.vocab.index(symbol) for symbol in self._lexer.findall(text)]

    def decode(self, tokens):
        return "".join(self.vocab[i] for i in tokens)

    def assignment(self, state):
        return self.start.format(state)

    def test_batch(self, batch, length, spacing, rng):
        """Programs, as Supervised. Programs of one length have equally many tokens."""
        rows, all_states = [], []
        for _ in range(batch):
            lines, states, answer = self.program(length, rng)
            before = self.encode("\n".join(lines))
            rows.append(before + self.encode(f"{answer}\n"))
            all_states += [self.encode(text) for text in states]

        tokens = np.array(rows)
        reveals = np.zeros(tokens.shape, bool)
        reveals[:, len(before):len(before) + self.answer_width] = True
        ends = tokens == self.encode("\n")[0]
        ends[:, len(before):] = False  # those of the answer end no line of the program
        return Supervised(*next_tokens(tokens, reveals), ends[:, :-1], np.array(all_states))

    training_batch = test_batch


class ParityTask(ProgramTask):
    """`p = 1`, then `p ^= 0` or `p ^= 1`."""

    start = "p = {}"
    symbols = ["p", " ^= ", "assert p == ", "0", "1"]
    answer_width = 1
    chance = 0.5

    def program(self, length, rng):
        bits = rng.integers(2, size=length + 1)
        states = [str(bit) for bit in bits.cumsum() % 2]
        lines = [f"p ^= {bit}" for bit in bits[1:]]
        return [self.assignment(states[0]), *lines, "assert p == "], states, states[-1]


class PermutationTask(ProgramTask):
    """A list of four items, of which each line exchanges two."""

    start = "a = [{}]"
    symbols = ["a = [", "assert a == [", "]", "1", "2", "3", "4", "a[0]", "a[1]", "a[2]", "a[3]",
               ", 1", ", 2", ", 3", ", 4", ", a[0]", ", a[1]", ", a[2]", ", a[3]"]
    answer_width = 4
    chance = 1 / 24

    def program(self, length, rng):
        items = (draw_symmetric(4, (), rng) + 1).tolist()
        states = [", ".join(map(str, items))]
        lines = [self.assignment(states[0])]
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

    def assignment(self, state):
        return f"a, b, c = {', '.join(re.findall('[+-].', state))}"

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

    def assignment(self, state):
        return "\n".join(f">>> {name} = {value}" for name, value in zip(self.names, state))

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
#     next          the next tokens alone, all programs of the training length n
#     stages        the same with the lengths 2, 4, 8, ... n; each is left when it is learned.
#                   Traces have a reveal after each command first, then ever rarer ones
#     linear        told the state: one linear map says all its tokens
#     decoder       told the state: a small Transformer says its tokens one by one
#     contrastive   told the state: the hidden vector must resemble that of a program that only
#                   assigns this state, and not those of the other states

ARMS = ["next", "stages", "linear", "decoder", "contrastive"]


def hidden_vectors(model, x):
    """What stands ahead of model.unembedding: embedded texts [B, T, D] -> [B, T, D]."""
    for block in model.blocks:
        x, _ = block(x)
    return model.norm(x)


def make_head(arm, task, d_model):
    """What reads the W tokens of a state off a vector. The contrastive arm needs no head."""
    if arm == "linear":
        width = task.test_batch(1, 2, 1, np.random.default_rng(0)).states.shape[1]
        return nn.Linear(d_model, width * len(task.vocab))
    if arm == "decoder":
        return Transformer(len(task.vocab), d_model, heads=2, conv_width=1)
    return None


def loss_of_states(model, task, arm, hidden, states):
    """Cross-entropy of the states, each read off the hidden vector at the end of its line.

    Shapes: hidden [N, D], states [N, W] -> a number, the mean over tokens, or over states.
    """
    head = model.auxiliary
    if arm == "linear":
        logits = head(hidden).unflatten(-1, (states.shape[1], -1))  # [N, W, V]
    elif arm == "decoder":
        # The hidden vector stands where a text begins; what the head says there is the first token.
        x = torch.cat([hidden.unsqueeze(1), head.embedding(states[:, :-1])], 1)  # [N, W, D]
        logits = head.unembedding(hidden_vectors(head, x))
    else:
        # The model's own vector of a state is the hidden one after a program that only assigns it.
        distinct, states = states.unique(dim=0, return_inverse=True)
        texts = [task.assignment(task.decode(state)) for state in distinct.tolist()]
        tokens = torch.tensor([task.encode(f"{text}\n") for text in texts])  # of one length
        vectors = hidden_vectors(model, model.embedding(tokens))[:, -1]
        cosines = F.normalize(hidden, dim=-1) @ F.normalize(vectors, dim=-1).mT
        logits = (cosines / 0.1).unsqueeze(1)  # [N, 1, states of this batch]
    return F.cross_entropy(logits.flatten(0, 1), states.flatten())


def make_loss(task, arm):
    """The loss_of of train(): its own loss, and that of the states."""
    weight = {"linear": 1, "decoder": 1, "contrastive": 0.1}.get(arm)

    def loss_of(model, batch, recipe):
        hidden = hidden_vectors(model, model.embedding(batch.inputs))
        logits = model.unembedding(hidden)
        total, metrics = next_token_loss(lambda inputs: logits, batch, recipe)

        # An answer is right if all its tokens are.
        right = (logits.argmax(-1) == batch.targets)[batch.reveals]
        right = right.reshape(-1, task.answer_width).all(-1)
        metrics["reveal_accuracy"] = right.float().mean().item()

        if weight:
            at_ends = hidden[torch.from_numpy(batch.ends)]
            states = torch.from_numpy(batch.states)
            auxiliary = loss_of_states(model, task, arm, at_ends, states)
            total = total + weight * auxiliary
            metrics["auxiliary"] = auxiliary.item()
        return total, metrics
    return loss_of


# --- 3. One run, until it is solved ---------------------------------------------------------------

BATCH = 16
LAST_STEPS = 150  # made by a run that is solved


def stages_of(arm, length, spacing):
    """The curriculum: (length, spacing) alone, or shorter programs and denser reveals before it."""
    stages = [(length, spacing)]
    while arm == "stages" and stages[0] != (2, 1):  # both are powers of two
        n, S = stages[0]
        stages.insert(0, (n, S // 2) if S > 1 else (n // 2, 1))
    return stages


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
                            loss_of=make_loss(task, cell["arm"]),
                            max_tokens=tokens + more * one.inputs.size)
        steps, stage, tokens = (log[-1][key] for key in ("step", "stage", "tokens"))

        if not solved:
            found = log_probabilities(result, unseen.inputs, unseen.reveals).argmax(-1)
            share = (found.ravel() == unseen.targets[unseen.reveals]).mean()
            print(f"{steps * BATCH:8,} programs; of unseen answers {share:.0%} of the tokens right",
                  flush=True)
            if share == 1:
                solved = steps * BATCH
                limit = steps + LAST_STEPS
    return result, log, solved


def run_cell(cell):
    """One arm on one task with one seed: trained, tested at n, 2n and 4n, recorded."""
    print(cell)
    task = TASKS[cell["task"]]()
    torch.manual_seed(cell["seed"])
    model = build(cell["model"], len(task.vocab))
    # As a part of the model, the head is trained and saved with it.
    model.auxiliary = make_head(cell["arm"], task, model.unembedding.in_features)
    with tempfile.TemporaryDirectory() as folder:  # a run has minutes: no need to keep its parts
        model, log, solved = train_until_solved(model, task, cell, folder)
    del model.auxiliary

    n, S = cell["length"], cell["spacing"]
    one = n if cell["task"] == "traces" else 1  # the spacing with which one question is asked
    tests = dict.fromkeys([(n, S), (n, one), (2 * n, one), (4 * n, one)])  # each of them once
    record("supervision", cell | RATES[cell["model"]] | {
        "solved": solved, "steps": log[-1]["step"], "tokens": log[-1]["tokens"],
        "minutes": round(log[-1]["seconds"] / 60, 3),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "results": evaluate_and_print(model, task, tests)})


# --- 4. The study and its table -------------------------------------------------------------------

STUDY = [  # task, length, spacing, model, the arms and their budget in programs; three seeds each
    ("parity", 16, 1, "linrnn", ["next", "stages", "linear", "contrastive"], 2**16),
    ("parity", 32, 1, "linrnn", ["linear"], 2**16),
    ("parity", 64, 1, "linrnn", ["stages", "linear"], 2**15),
    ("permutations", 8, 1, "linrnn", ARMS, 2**16),
    *(("traces", 8, S, "linrnn", ["next", "decoder"], 2**15) for S in (1, 2, 4, 8)),
    ("traces", 8, 1, "linrnn", ["stages"], 2**16),
    ("traces", 8, 8, "linrnn", ["stages"], 2**16),
    ("arithmetic", 4, 1, "linrnn", ["next", "decoder"], 2**16),
    ("parity", 8, 1, "transformer", ["next", "linear"], 2**15),
    ("parity", 16, 1, "transformer", ["linear"], 2**17)]


def cells_of_study():
    """An arm each: all that distinguishes its runs, but for the seed."""
    cells = []
    for task, length, spacing, model, arms, budget in STUDY:
        for arm in arms:
            cells.append({"task": task, "length": length, "spacing": spacing, "model": model,
                          "arm": arm, "budget": budget})
    return cells


def show():
    """The records, an arm a line: when its runs were solved, and what is right, seed by seed.

    For programs the shares are those of the lengths n, 2n and 4n. For traces they are those of
    (n,S), and then with one reveal of (n,n), (2n,n) and (4n,n).
    """
    print("task        (n,S)  model       arm          solved after, of so many programs"
          "      % right")
    for cell in cells_of_study():
        # The last reveal of a trace is its answer; the answer of a program is all its tokens.
        what = "final" if cell["task"] == "traces" else "perfect"
        solved, shares = [], []
        for row in records("supervision", **cell):
            solved.append(str(row["solved"] or "-"))
            shares.append("/".join(f"{100 * test[what]:.0f}" for test in row["results"]))
        size = f"({cell['length']},{cell['spacing']})"
        print(f"{cell['task']:13}{size:7}{cell['model']:12}{cell['arm']:12}"
              f"{', '.join(solved):>22} of {cell['budget']:6}  {'  '.join(shares)}")


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.supervision",
                                     description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--run", action="store_true", help="make the missing runs of the study, or some of them:")
    add("--task", choices=TASKS, help="those of this task")
    add("--arm", choices=ARMS, help="those of this arm")
    add("--seed", type=number(0), help="those of this seed, which may be a fourth one")
    args = parse(parser, argv)

    seeds = range(3) if args.seed is None else [args.seed]
    for cell, seed in itertools.product(cells_of_study() if args.run else [], seeds):
        cell = cell | {"seed": seed}
        wanted = args.task in (None, cell["task"]) and args.arm in (None, cell["arm"])
        if wanted and not records("supervision", **cell):
            run_cell(cell)
    show()


if __name__ == "__main__":
    run(main)
