"""Is a string hard, or its tokens?

    >>> s = 'baca'                   the state, a string
    >>> s = s[1:] + s[:1]            a command, a permutation of its letters
    >>> s = s[1:2] + s[:1] + s[2:]
    >>> print(s)                     the reveal: all of it
    caab                             letters c|a|a|b, pairs ca|ab, merges (BPE) c|aa|b

"Debugging code world models" blames subword tokens for failures on strings, but compares no lexers.
Here several lexers cut the same strings, and the paper is right in part. Cut into letters, a string
is learned from about as few traces as a list. Pairs of letters take two to three times as many, and
byte-pair encoding (BPE) three to four times. Six letters, four different letters, a Transformer and
an LSTM all keep this order. Writing such tokens is hard, and reading them is not: if values are
read in BPE and printed letter by letter, by print(*s), they take 1.5 times the traces of letters.

With nine BPE tokens one layer gets 4 to 7% of the values wrong, after few commands as after many.
Yet it knows the state: a wrong token spells the right letters, but is cut wrongly. It errs where
three letters or more decide a token, counting letters after it. Where two decide (prefix-free), or
with a second layer, hardly any errors are left. With 27 tokens, or six letters in pairs, letters
are wrong, and more of them with depth, as in the paper. We tested no pretrained models.

    python -m experiments.strings [--run]      # with --run: 40 minutes of CPU time

Source: "Debugging code world models" (arXiv 2602.07672).
Next: unseen.py.
"""

import re
from collections import Counter, defaultdict, namedtuple
from functools import cached_property, partial
from itertools import product, zip_longest

import numpy as np

from data import Batch, Lexer, ReplTask, generator, run_cli
from eval import predict
from experiments import (RATES, Study, chapter, grid, in_order, percent, records, summary, table,
                         where)
from experiments.baselines import LEARNING_RATES
from experiments.plots import BLUE, GREEN, ORANGE, canvas, draw_lines
from models import MODELS
from train import Config, loss, train

# --- 1. Lexers: a function, value -> its tokens, and all of these ---------------------------------

LEXERS = ["list", "letters", "pairs", "bpe", "bpe-skewed", "prefix-free", "prefix-free+", "bpe+"]


def make_lexer(name, letters, width, seed):
    """A lexer for values of that width. With three letters its tokens are

    list, letters    3
    pairs            9
    bpe, bpe-skewed  9, the letters and six merges that join the most frequent pairs of tokens;
                     skewed: where the second letter is half as frequent as the first
    bpe+             27
    prefix-free      9: a and b take the next letter with them, c does not: ab|c|b (a token is as
                     long as it can be; a and b are left to the end of a value)
    prefix-free+     12: aa takes the next letter with it as well
    """
    n = len(letters)
    if name in ("list", "letters"):
        return list, letters
    if name == "pairs":
        return partial(re.findall, "..?"), [*map("".join, product(letters, repeat=2))]
    if name.startswith("prefix-free"):
        begun = [*letters[:-1], *(["aa"] if name == "prefix-free+" else [])]
        tokens = [*letters, *map("".join, product(begun, letters))]
        longest_first = sorted(tokens, key=len, reverse=True)
        return re.compile("|".join([*longest_first, "."])).findall, tokens

    # Merges are learned from 2,000 values.
    rng = generator(seed, "split")
    shares = 1 / np.arange(1, n + 1) if name == "bpe-skewed" else np.ones(n)
    words = rng.choice(letters, (2000, width), p=shares / shares.sum())
    merges = learn_merges(words, n**(3 if name == "bpe+" else 2) - n)
    return partial(split, merges=merges), [*letters, *map("".join, merges)]


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
            joined.append(joined.pop() + token if (*joined[-1:], token) == pair else token)
        word = joined
    return [*word]


# --- 2. The task ----------------------------------------------------------------------------------

COMMANDS = ["s[1:] + s[:1]", "s[-1:] + s[:-1]", "s[2:] + s[:2]", "s[::-1]",
            "s[1:2] + s[:1] + s[2:]", "s[:-2] + s[-1:] + s[-2:-1]"]
SLICES = sorted({part for command in COMMANDS for part in command.split(" + ")})
REVEALS = {"print(s)": str, "print(*s)": " ".join}  # and what they show
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

        self.split, tokens = make_lexer(lexer, [*self.alphabet], width, seed)
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
        """{text of a reveal: for each of its tokens, how many letters beyond the token one must
        know to see where it ends, if one knows the tokens before it}."""
        values = map("".join, product(self.alphabet, repeat=self.width))
        texts = [REVEALS[self.reveal](self.kind(value)) for value in values]
        cuts = {text: tuple(self.vocab[i] for i in self.encode(text)) for text in texts}

        following = defaultdict(set)  # (tokens so far, letters known): all tokens that may follow
        for text, tokens in cuts.items():
            for i, known in product(range(len(tokens)), range(len(text) + 1)):
                following[tokens[:i], text[:known]].add(tokens[i])

        def letters(text, i):
            before = cuts[text][:i]
            end = len("".join(cuts[text][:i + 1]))
            return next(k for k in range(self.width) if len(following[before, text[:end + k]]) == 1)
        return {text: [letters(text, i) for i in range(len(cuts[text]))] for text in texts}


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
    correct = (logits.argmax(-1) == batch.targets).cpu().numpy()
    return objective, metrics | {"reveal_accuracy": float(whole(correct, batch.numbers).mean())}


def measure(model, task, length, spacing, reveals=768):
    """all      the values of which each token is correct
    spelled  those of which each token spells the right letters, though it may end elsewhere
    tokens   for each length of a token, and letters of task.beyond: the tokens, the wrong ones, and
             those of them that spell the right letters
    """
    inputs, targets, _, numbers = task.test_batch(
        reveals * spacing // length, length, spacing, generator(0, "test", length, spacing))
    predictions = predict(model, inputs)
    correct = predictions == targets

    spelled = correct.copy()
    counts = defaultdict(lambda: np.zeros(3, int))
    for row, number in product(range(len(targets)), range(1, numbers.max() + 1)):
        places = np.flatnonzero(numbers[row] == number)
        text = task.decode(targets[row, places])
        for place, beyond in zip(places, task.beyond[text]):
            token = task.vocab[targets[row, place]]
            spelled[row, place] = text.startswith(task.vocab[predictions[row, place]])
            text = text.removeprefix(token)

            wrong = not correct[row, place]
            counts[len(token), beyond] += 1, wrong, wrong and spelled[row, place]
    return {"length": length, "spacing": spacing, "all": float(whole(correct, numbers).mean()),
            "spelled": float(whole(spelled, numbers).mean()),
            "tokens": [[*kind, *found.tolist()] for kind, found in counts.items()]}


# --- 4. The study ---------------------------------------------------------------------------------

CURRICULUM = [(2, 1), (4, 2), (8, 4), (16, 8)]
FIRST = [2, 4, 8, 16]  # commands before the first reveal


def settings(lexers, letters=3, width=4, reveal="print(s)", model="linrnn", layers=1,
             max_steps=1500, seeds=(270, 271, 272)):
    """max_steps: how many there are at most before the last stage."""
    return grid(model=[model], layers=[layers], letters=[letters], width=[width], lexer=lexers,
                reveal=[reveal], max_steps=[max_steps], seed=seeds)


SETTINGS = [
    *settings(["list", "letters", "pairs", "bpe"]),
    # What may help merges: a second layer, another lexer, letters apart, more steps.
    *settings(["bpe"], layers=2),
    *settings(["prefix-free", "prefix-free+", "bpe-skewed"]),
    *settings(["bpe"], reveal="print(*s)"),
    *settings(["bpe+"], max_steps=5000),
    # What was held fixed: the model, the width, the letters.
    *settings(["letters", "bpe"], model="transformer", layers=2, seeds=(270, 271)),
    *settings(["letters", "bpe"], model="lstm", seeds=(270, 271)),
    *settings(["letters", "pairs", "bpe"], width=6),
    *settings(["letters", "bpe"], letters=4)]


def run(setting, folder):
    """A stage is passed at 90% of whole values, three batches in a row."""
    name = setting["model"]
    task = StringTask(*(setting[key] for key in ("lexer", "letters", "width", "reveal", "seed")))
    rates = LEARNING_RATES if name == "lstm" else RATES  # with RATES the LSTM learns nothing
    config = Config(curriculum=CURRICULUM, pass_accuracy=0.9, final_steps=200, seed=setting["seed"],
                    max_curriculum_steps=setting["max_steps"], **rates[name])
    model = MODELS[name](len(task.vocab), layers=setting["layers"])
    model, log = train(model, task, config, folder, resume=True, loss=loss_of_whole_reveals)

    # The traces before each stage that was reached, to ten steps.
    begins = {row["stage"]: row["step"] - row["stage_step"] for row in log if row["stage_step"]}
    return summary(model, log) | {
        "traces": [begins[stage] * config.batch if stage in begins else None for stage in range(4)],
        "tokens_a_value": float(np.mean([len(letters) for letters in task.beyond.values()])),
        "results": [measure(model, task, *test) for test in [*zip(FIRST, FIRST), (128, 16)]]}


STUDIES = [Study("strings", SETTINGS, run)]


# --- 5. The tables and the picture ----------------------------------------------------------------

def wrong_tokens(rows, *letters):
    """How many tokens are wrong, of how many, among those that so many letters decide (in the token
    and beyond it), in the first reveals of these records."""
    kinds = [kind for row in rows for result in row["results"][:len(FIRST)]
             for kind in result["tokens"] if sum(kind[:2]) in letters]
    return sum(kind[3] for kind in kinds), sum(kind[2] for kind in kinds)


def wrong_percent(*letters):
    """A column: the share of wrong tokens, if there are such tokens."""
    def column(row):
        wrong, tokens = wrong_tokens([row], *letters)
        return 100 * wrong / tokens if tokens else None
    return column


def traces_before(stage):
    """A column: thousands of traces before that stage, if it was reached."""
    return lambda row: row["traces"][stage] and row["traces"][stage] / 1000


def show():
    rows = [row | {"values": f"{row['letters']}^{row['width']}"}
            for setting in SETTINGS for row in records("strings", **setting)]
    keys = ["model", "layers", "values", "lexer", "reveal"]
    table("Thousands of traces before each stage that was reached, of each seed (at most 24; 80\n"
          "for bpe+); tokens a value", rows, keys,
          {f"({L},{S})": traces_before(stage) for stage, (L, S) in enumerate(CURRICULUM) if stage}
          | {"tokens": lambda row: row["tokens_a_value"]}, spread=in_order)
    table("Whole values correct in %, at the first reveal after so many commands\n"
          "(chance is 1.2 for 3^4 values, 0.4 for 4^4, 0.1 for 3^6)", rows, keys,
          {str(S): percent(S, S) for S in FIRST} | {"(128,16)": percent(128)}, spread=in_order)
    strings = [row for row in where(rows, reveal="print(s)") if row["lexer"] != "list"]
    table("In %: after 4 commands, values whose tokens all spell the right letters; and the wrong\n"
          "ones of the tokens that 1 or 2, or 3 or more letters decide", strings, keys,
          {"spelled": percent(4, 4, "spelled"), "1 or 2": wrong_percent(1, 2),
           "3 or more": wrong_percent(3, 4, 5, 6)}, spread=in_order)


def picture():
    """Wrong tokens by the letters that decide them, with the counts of all seeds."""
    figure, ((axes,),) = canvas("One layer errs where three letters or more decide a token,\n"
                                "in the token or beyond it")
    kinds = [(1,), (2,), (3, 4)]
    found = {}
    for name, lexer, layers, colour in [("prefix-free+", "prefix-free+", 1, ORANGE),
                                        ("BPE", "bpe", 1, BLUE),
                                        ("BPE, two layers", "bpe", 2, GREEN)]:
        rows = records("strings", lexer=lexer, layers=layers, model="linrnn", letters=3, width=4,
                       reveal="print(s)")
        percents = [[wrong_percent(*kind)(row) for kind in kinds] for row in rows]
        wrong, tokens = wrong_tokens(rows, *kinds[-1])
        found[f"{name}: {wrong} of {tokens:,}"] = [1, 2, 3], percents, colour
    axes.set(xlabel="letters that decide a token", ylabel="wrong tokens in %", xticks=[1, 2, 3],
             xticklabels=["1", "2", "3 or more"], xlim=(0.9, 3.05))
    draw_lines(axes, found)
    return figure


def main(argv=None):
    chapter(__doc__, show, STUDIES, argv)


if __name__ == "__main__":
    run_cli(main)
