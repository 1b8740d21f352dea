"""Are strings hard, or only their tokens?

    >>> s = 'baca'                   the state, a string
    >>> s = s[1:] + s[:1]            a command, a permutation of its letters
    >>> print(s)                     a reveal; its tokens are letters a|c|a|b, or those of *BPE*,
    acab                             byte-pair encoding, which merges frequent pairs, as in ac|ab

The states of `actions` were tuples. A code world model does worse on strings: they are under half
of the values it is asked for, and over 70% of those it gets wrong. The source blames their tokens,
but varies no lexer. We vary it, for one small DeltaNet, and test no pretrained model.

Finding. Tracking the string is easy; writing it in BPE tokens is hard. Cut into letters, a string
is learned from about as few traces as a list of letters. BPE, whose cuts depend on the value, takes
about three times as many, and leaves 3 to 12% of the values wrong. Yet the model knows the state:
one that reads BPE but writes letters, by print(*s), needs only 1.3 times the traces of letters, and
gets at least 99.6% of the values right.

    python -m experiments.strings [--run]      # with --run: 12 minutes of CPU time

Source: Rahmani 2026, "Debugging code world models" (arXiv 2602.07672).
Next: unseen.py.
"""

import re
from collections import Counter, namedtuple
from itertools import product, zip_longest

import numpy as np

from data import Batch, Lexer, ReplTask, generator, run_cli
from eval import predict
from experiments import Study, by_test, chapter, grid, records, summary, table
from models import LinRNN
from train import Config, loss, train

# --- 1. Byte-pair encoding ------------------------------------------------------------------------

def learn_merges(words, count):
    """Byte-pair encoding: join the most frequent pair of neighbours, `count` times."""
    merges = []
    for _ in range(count):
        pairs = Counter(pair for word in words for pair in zip(word, word[1:]))
        merges.append(max(pairs, key=pairs.get))
        words = [split(word, merges[-1:]) for word in words]
    return merges


def split(word, merges):
    """The tokens of a word: each merge, in the order of learning, joins its pairs left to right."""
    for pair in merges:
        joined = []
        for token in word:
            if joined and (joined[-1], token) == pair:
                joined[-1] += token
            else:
                joined.append(token)
        word = joined
    return [*word]


# --- 2. The task ----------------------------------------------------------------------------------

LETTERS = [*"abc"]
WIDTH = 4  # letters of a value
COMMANDS = ["s[1:] + s[:1]", "s[-1:] + s[:-1]", "s[2:] + s[:2]", "s[::-1]",
            "s[1:2] + s[:1] + s[2:]", "s[:-2] + s[-1:] + s[-2:-1]"]
SLICES = sorted({part for command in COMMANDS for part in command.split(" + ")})
REVEALS = {"print(s)": str, "print(*s)": " ".join}  # and what they show
MARKS = [">>> ", "s = ", *SLICES, " + ", *REVEALS, "\n", "'", "['", "', '", "']", " "]

StringBatch = namedtuple("StringBatch", [*Batch._fields, "numbers"])  # of the reveals, from 1


class StringTask(Lexer):
    """Traces of a string, or (lexer "list") of a list of letters.

    lexer: "list" and "letters" cut a value into letters, "bpe" joins these by six merges, learned
    from all values. Shorter traces end with empty lines, which belong to no reveal.
    """

    chance = 1 / 3**WIDTH

    def __init__(self, lexer, reveal="print(s)"):
        self.reveal = reveal
        self.kind = list if lexer == "list" else str
        values = [*product(LETTERS, repeat=WIDTH)]
        self.merges = learn_merges(values, 6) if lexer == "bpe" else []
        super().__init__([*MARKS, *LETTERS, *map("".join, self.merges)])
        marks = map(re.escape, sorted(MARKS, key=len, reverse=True))
        self.pattern = re.compile("|".join([*marks, "[abc]+|."]))

    def encode(self, text):
        """The token ids of a text, a list."""
        return [self.ids[token] for part in self.pattern.findall(text)
                for token in ([part] if part in MARKS else split(part, self.merges))]

    def trace(self, letters, commands, spacing):
        """The text in parts, each with the number of the reveal whose value it is, or 0."""
        s = self.kind("".join(letters))
        yield f">>> s = {s!r}\n", 0
        for t, command in enumerate(commands, 1):
            s = eval(command, {"s": s})
            yield f">>> s = {command}\n", 0
            if t % spacing == 0:
                yield f">>> {self.reveal}\n", 0
                yield REVEALS[self.reveal](s), t // spacing
                yield "\n", 0

    def test_batch(self, batch, length, spacing, rng):
        """Uniformly random values and commands."""
        ReplTask.check(length, spacing)
        values = rng.choice(LETTERS, size=(batch, WIDTH))
        commands = np.array(COMMANDS)[rng.integers(len(COMMANDS), size=(batch, length))]
        rows = [[(token, number) for text, number in self.trace(*drawn, spacing)
                 for token in self.encode(text)] for drawn in zip(values, commands.tolist())]
        tokens, numbers = np.array([*zip_longest(*rows, fillvalue=(self.ids["\n"], 0))]).T
        return StringBatch(tokens[:, :-1], tokens[:, 1:], numbers[:, 1:] > 0, numbers[:, 1:])

    training_batch = test_batch


# --- 3. What is measured --------------------------------------------------------------------------

def whole(correct, numbers):
    """Whether all tokens of each reveal are correct: bool [B, T - 1] -> [B, reveals]."""
    reveals = np.ones((len(correct), numbers.max() + 1), bool)
    row, token = np.nonzero(~correct)
    reveals[row, numbers[row, token]] = False
    return reveals[:, 1:]  # number 0: no reveal


def loss_of_whole_reveals(model, batch, config):
    """The loss of train.py. A stage is passed by the accuracy of whole values, since the accuracy
    of single tokens is higher."""
    logits = model(batch.inputs)
    objective, metrics = loss(lambda tokens: logits, batch, config)
    correct = whole((logits.argmax(-1) == batch.targets).numpy(), batch.numbers.numpy())
    return objective, metrics | {"reveal_accuracy": float(correct.mean())}


def measure(model, task, length, spacing, reveals=768):
    """The fraction of values of which each token is correct."""
    batch = task.test_batch(reveals * spacing // length, length, spacing,
                            generator(0, "test", length, spacing))
    correct = predict(model, batch.inputs) == batch.targets
    return {"length": length, "spacing": spacing,
            "all": float(whole(correct, batch.numbers).mean())}


# --- 4. The trained models and their table --------------------------------------------------------

CURRICULUM = [(2, 1), (4, 2), (8, 4), (16, 8)]
TESTS = [(2, 2), (16, 16), (128, 16)]
SETTINGS = [*grid(lexer=["list", "letters", "bpe"], reveal=["print(s)"], seed=range(270, 273)),
            *grid(lexer=["bpe"], reveal=["print(*s)"], seed=range(270, 273))]


def run(setting, folder):
    """A stage is passed at 90% of whole values, three batches in a row."""
    task = StringTask(setting["lexer"], setting["reveal"])
    config = Config(curriculum=CURRICULUM, pass_accuracy=0.9, final_steps=200, seed=setting["seed"])
    model, log = train(LinRNN(len(task.vocab)), task, config, folder, resume=True,
                       loss=loss_of_whole_reveals)
    return summary(model, log) | {"results": [measure(model, task, *test) for test in TESTS]}


STUDIES = [Study("strings", SETTINGS, run)]


def traces(row):
    """A column: thousands of traces before the last stage, of 16 a step; all runs reached it."""
    return 16 * (row["steps"] - 200) / 1000


def show():
    rows = [row for setting in SETTINGS for row in records("strings", **setting)]
    table("Thousands of traces before the last stage; whole values correct in %\n"
          "(chance is 1.2); min-max over three seeds",
          rows, ["lexer", "reveal"], {"traces": traces} | by_test(TESTS))


def main(argv=None):
    chapter(__doc__, show, STUDIES, argv)


if __name__ == "__main__":
    run_cli(main)
