"""Is a string hard, or its tokens?

Docstring to be written.

    python -m experiments.strings [--run]

Next: bench.py.
"""

import re
from collections import Counter, defaultdict, namedtuple
from functools import cached_property, partial
from itertools import product, zip_longest

import numpy as np
import torch

from data import Batch, Lexer, ReplTask, generator, run_cli
from eval import predict
from experiments import (COST, RATES, Study, chapter, grid, in_order, percent, records, summary,
                         table, where)
from experiments.baselines import LEARNING_RATES
from experiments.plots import BLUE, canvas
from models import MODELS
from train import Config, loss, train

# --- 1. Lexers: a function, value -> its tokens, and all of these ---------------------------------

LEXERS = ["list", "letters", "pairs", "bpe", "bpe+", "bpe-skewed", "prefix-free"]


def make_lexer(name, alphabet, width, seed):
    """list, letters, pairs; bpe with as many tokens as pairs, bpe+ with as many as triples; and
    bpe-skewed and prefix-free, learned where the second letter is half as frequent as the first."""
    letters = [*alphabet]
    n = len(letters)
    if name in ("list", "letters"):
        return list, letters
    if name == "pairs":
        return partial(re.findall, "..?"), ["".join(pair) for pair in product(letters, repeat=2)]

    # Learn from 2,000 values, of a stream that nothing else uses.
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(3,)))
    shares = np.ones(n) if name in ("bpe", "bpe+") else 1 / np.arange(1, n + 1)
    words = map("".join, rng.choice(letters, (2000, width), p=shares / shares.sum()))
    if name == "prefix-free":
        tokens = grow([*words], letters, n)
        return longest_match(tokens), tokens
    merges = learn_merges(words, (n**3 if name == "bpe+" else n**2) - n)
    return partial(split, merges=merges), [*letters, *map("".join, merges)]


def learn_merges(words, count):
    """Byte-pair encoding: join the most frequent pair of neighbours, `count` times."""
    words = [[*word] for word in words]
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
            joined.append(joined.pop() + token if (*joined[-1:], token) == pair else token)
        word = joined
    return [*word]


def grow(words, letters, count):
    """Tunstall's code (1967): `count` times, extend the most frequent token by each of the letters.

    Then no token begins another, but for what was extended, which is left to the end of a word.
    """
    tokens = [*letters]
    extended = set()
    for _ in range(count):
        used = Counter(token for word in words for token in longest_match(tokens)(word))
        most = max({*used} - extended, key=lambda token: (used[token], token))
        extended.add(most)
        tokens += [most + letter for letter in letters]
    return tokens


def longest_match(tokens):
    """Cuts off the longest token that fits, from left to right."""
    return re.compile("|".join([*sorted(tokens, key=len, reverse=True), "."])).findall


# --- 2. The task ----------------------------------------------------------------------------------

COMMANDS = ["s[1:] + s[:1]", "s[-1:] + s[:-1]", "s[2:] + s[:2]", "s[::-1]",
            "s[1:2] + s[:1] + s[2:]", "s[:-2] + s[-1:] + s[-2:-1]"]
SLICES = sorted({part for command in COMMANDS for part in command.split(" + ")})
REVEALS = {"print(s)": str, "print(*s)": lambda value: " ".join(value),
           "print(s[::-1])": lambda value: str(value[::-1])}  # and what they show
MARKS = [">>> ", "s = ", *SLICES, " + ", *REVEALS, "\n", "'", "['", "', '", "']", " "]

StringBatch = namedtuple("StringBatch", [*Batch._fields, "numbers"])  # of the reveals, from 1


class StringTask(Lexer):
    """Traces of a string, or (lexer "list") of a list of letters.

    Shorter traces end with empty lines, which belong to no reveal.
    """

    def __init__(self, lexer, letters=3, width=4, reveal="print(s)", seed=0):
        self.alphabet = "abcdefghi"[:letters]
        self.width = width
        self.reveal = reveal
        self.kind = list if lexer == "list" else str
        self.chance = 1 / letters**width

        self.split, tokens = make_lexer(lexer, self.alphabet, width, seed)
        super().__init__([*MARKS, *tokens])
        marks = map(re.escape, sorted(MARKS, key=len, reverse=True))
        self.pattern = re.compile("|".join([*marks, f"[{self.alphabet}]+|."]))

        # What Python makes of the positions is the command as a permutation: new[i] = old[g[i]].
        self.permutations = [eval(command, {"s": [*range(width)]}) for command in COMMANDS]

    def encode(self, text):
        """The token ids of a text, a list."""
        return [self.ids[token] for part in self.pattern.findall(text)
                for token in ([part] if part in MARKS else self.split(part))]

    def trace(self, value, commands, spacing):
        """The text in parts, each with the number of the reveal whose value it is, or 0."""
        yield f">>> s = {self.kind(value)!r}\n", 0
        for t, command in enumerate(commands, 1):
            value = "".join(value[i] for i in self.permutations[command])
            yield f">>> s = {COMMANDS[command]}\n", 0
            if t % spacing == 0:
                yield f">>> {self.reveal}\n", 0
                yield REVEALS[self.reveal](self.kind(value)), t // spacing
                yield "\n", 0

    def test_batch(self, batch, length, spacing, rng):
        """Uniformly random values and commands."""
        ReplTask.check(length, spacing)
        values = map("".join, rng.choice([*self.alphabet], size=(batch, self.width)))
        commands = rng.integers(len(COMMANDS), size=(batch, length))
        rows = [[(token, number) for text, number in self.trace(*drawn, spacing)
                 for token in self.encode(text)] for drawn in zip(values, commands)]
        tokens, numbers = np.array([*zip_longest(*rows, fillvalue=(self.ids["\n"], 0))]).T
        return StringBatch(tokens[:, :-1], tokens[:, 1:], numbers[:, 1:] > 0, numbers[:, 1:])

    training_batch = test_batch

    @cached_property
    def beyond(self):
        """{text of a reveal: for each of its tokens, the letters beyond the token that must be
        known to see where it ends, if the tokens before it are known}."""
        values = map("".join, product(self.alphabet, repeat=self.width))
        cuts = {}
        for text in map(REVEALS[self.reveal], map(self.kind, values)):
            cuts[text] = tuple(self.vocab[i] for i in self.encode(text))

        nexts = defaultdict(set)  # (tokens so far, letters known): all tokens that may be next
        for text, tokens in cuts.items():
            for i, end in product(range(len(tokens)), range(len(text) + 1)):
                nexts[tokens[:i], text[:end]].add(tokens[i])
        return {text: [next(k for k in range(len(text))
                            if len(nexts[tokens[:i], text[:len("".join(tokens[:i + 1])) + k]]) == 1)
                       for i in range(len(tokens))] for text, tokens in cuts.items()}


# --- 3. What is measured --------------------------------------------------------------------------

def whole(correct, numbers):
    """Whether all tokens of each reveal are correct: bool [B, T - 1] -> [B, reveals]."""
    reveals = np.ones((len(correct), numbers.max() + 1), bool)
    row, token = np.nonzero(~correct)
    reveals[row, numbers[row, token]] = False
    return reveals[:, 1:]  # number 0: no reveal


def loss_of_whole_reveals(model, batch, config):
    """The loss of train.py; a stage is passed by whole values, since more of their tokens are
    correct."""
    logits = model(batch.inputs)
    objective, metrics = loss(lambda tokens: logits, batch, config)
    correct = (logits.argmax(-1) == batch.targets).cpu().numpy()
    return objective, metrics | {"reveal_accuracy": float(whole(correct, batch.numbers).mean())}


def measure(model, task, length, spacing, reveals=768):
    """all      the values of which each token is correct
    spelled  those of which each token spells the right letters, though it may end elsewhere
    beyond   for 0, 1, ... letters of task.beyond: tokens, wrong ones, and those of them that spell
             the right letters
    """
    inputs, targets, counted, numbers = task.test_batch(
        reveals * spacing // length, length, spacing, generator(0, "test", length, spacing))
    predictions = predict(model, inputs)
    correct = predictions == targets

    spelled = correct.copy()
    beyond = np.full(targets.shape, -1)
    for row, number in product(range(len(targets)), range(1, numbers.max() + 1)):
        places = np.flatnonzero(numbers[row] == number)
        text = task.decode(targets[row, places])
        beyond[row, places] = task.beyond[text]
        for place in places:  # text: from this token on
            spelled[row, place] = text.startswith(task.vocab[predictions[row, place]])
            text = text.removeprefix(task.vocab[targets[row, place]])

    counts = []
    for letters in range(beyond.max() + 1):
        tokens = beyond == letters
        wrong = tokens & ~correct
        counts.append([int(part.sum()) for part in (tokens, wrong, wrong & spelled)])
    return {"length": length, "spacing": spacing, "all": float(whole(correct, numbers).mean()),
            "spelled": float(whole(spelled, numbers).mean()), "beyond": counts}


@torch.no_grad()
def written(model, task, length, traces=256):
    """The model writes the first value itself, token by token.

    right: its text is. anagrams: its text has the right letters in another order.
    """
    right, anagrams = [], []
    for inputs, targets, counted in zip(*task.test_batch(
            traces, length, length, generator(0, "test", length))[:3]):
        text = ""
        token = torch.from_numpy(inputs[None, :counted.argmax() + 1])  # up to the reveal
        state = None
        while "\n" not in text and len(text) < 9 * task.width:
            logits, state = model.stream(token, state)
            token = logits[:, -1:].argmax(-1)
            text += task.vocab[token.item()]

        value = task.decode(targets[counted])
        text = text.removesuffix("\n")
        right.append(text == value)
        anagrams.append(text != value and sorted(text) == sorted(value))
    return {"right": float(np.mean(right)), "anagrams": float(np.mean(anagrams))}


# --- 4. The study ---------------------------------------------------------------------------------

CURRICULUM = [(2, 1), (4, 2), (8, 4), (16, 8)]
FIRST = [2, 4, 8, 16]  # commands before the first reveal


def settings(lexers, letters=3, width=4, reveal="print(s)", model="linrnn", layers=1, steps=1500,
             seeds=(270, 271, 272)):
    """steps: how many there are at most before the last stage."""
    return grid(model=[model], layers=[layers], letters=[letters], width=[width], lexer=lexers,
                reveal=[reveal], max_steps=[steps], seed=seeds)


SETTINGS = sorted([
    *settings(["letters", "bpe", "list", "pairs"]),
    # What may help merges: letters apart, a second layer, another lexer; or more steps.
    *settings(["bpe"], reveal="print(*s)"),
    *settings(["bpe"], layers=2),
    *settings(["bpe-skewed", "prefix-free"]),
    *settings(["bpe+"], steps=5000),
    # What was held fixed: the model, the width, the letters.
    *settings(["letters", "bpe"], model="transformer", layers=2, seeds=(270, 271)),
    *settings(["letters", "bpe"], model="lstm", seeds=(270, 271)),
    *settings(["letters", "pairs", "bpe"], width=6),
    *settings(["letters", "bpe"], letters=4)], key=lambda setting: setting["seed"])


def run(setting, folder):
    """A stage is passed at 90% of whole values, three batches in a row."""
    name = setting["model"]
    task = StringTask(*(setting[key] for key in ("lexer", "letters", "width", "reveal", "seed")))
    rates = LEARNING_RATES if name == "lstm" else RATES  # with RATES the LSTM learns nothing
    config = Config(curriculum=CURRICULUM, pass_accuracy=0.9, final_steps=200, seed=setting["seed"],
                    max_curriculum_steps=setting["max_steps"], **rates[name])
    model = MODELS[name](len(task.vocab), layers=setting["layers"])
    model, log = train(model, task, config, folder, resume=True, loss=loss_of_whole_reveals)

    # The steps before each stage that was reached.
    begins = {row["stage"]: row["step"] - row["stage_step"] for row in log if row["stage_step"]}
    return summary(model, log) | {
        "traces": [begins[stage] * config.batch if stage in begins else None for stage in range(4)],
        "tokens_a_value": float(np.mean([len(letters) for letters in task.beyond.values()])),
        "written": written(model, task, 4),
        "results": [measure(model, task, *test) for test in [*((S, S) for S in FIRST), (128, 16)]]}


STUDIES = [Study("strings", SETTINGS, run)]


# --- 5. The tables and the picture ----------------------------------------------------------------

KEYS = ["model", "layers", "letters", "width", "lexer", "reveal", "max_steps"]


def traces_before(stage):
    """A column: thousands of traces before that stage, where it was reached."""
    return lambda row: row["traces"][stage] and row["traces"][stage] / 1000


def by_letters(row):
    """[tokens, wrong ones, those of them that spell the right letters] for each number of letters
    that must be known beyond a token, in the first reveals."""
    return np.sum([result["beyond"] for result in row["results"][:len(FIRST)]], 0)


def show():
    rows = records("strings")
    table("Thousands of traces before each stage, for each seed that reached it; minutes", rows, KEYS,
          {f"({L},{S})": traces_before(stage) for stage, (L, S) in enumerate(CURRICULUM) if stage}
          | {"minutes": COST["minutes"]}, spread=in_order)
    table("Whole values correct in %, at the first reveal after so many commands, for each seed\n"
          "(chance is 1.2% of width 4, .1% of width 6)", rows, KEYS,
          {str(S): percent(S, S) for S in FIRST} | {"(128,16)": percent(128)}, spread=in_order)
    table("Tokens a value; of the values in %, after 16 commands: spelled with right letters; after "
          "4,\nwritten freely: right, and wrong but with the right letters in another order",
          rows, KEYS, {"tokens": lambda row: row["tokens_a_value"], "spelled": percent(16, 16, "spelled"),
          **{key: lambda row, key=key: 100 * row["written"][key] for key in ("right", "anagrams")}})
    table("Tokens wrong in %, by the letters beyond the token that must be known to see its end",
          rows, KEYS, {})


def main(argv=None):
    chapter(__doc__, show, STUDIES, argv)


if __name__ == "__main__":
    run_cli(main)
