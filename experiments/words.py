"""How free must a transition be?  Words: a token is a whole group element.

A trace spells a command over many tokens, and each can bring a reflection. A word is one token, so
one layer must make the whole permutation of it. The first table is a ladder of mixers, from
diagonal transitions to any rotation. The second has R reflections a token (scan.py, section 4), the
third one reflection and signs, or an LSTM. *Solved* is at least 99.5% of the labels at 128 words.

Finding. Eigenvalues in [0, 1] lose even parity (S2), and a diagonal layer with -1 holds it. With as
many reflections a token as the theory asks for, words of S3, S4, A5 and S5 are solved on all
recorded seeds. With fewer, no run gets past 32 words. The last steps, at 512 words and small rates,
mend the drift: then at least 99% of whole traces of 512 are right, but on two seeds of A5 (75 and
88%). At 1,024 words, twice the longest of training, 71 to 86% of whole traces of S5 are right, and
24 to 97% of A5. One reflection and signs solve S3 on four seeds of five, and do not get past 4
words of S4 and A5. An LSTM solves the swaps of S5 in the same minutes. What is possible need not
come soon: two reflections can make the words of A5, but within the 1.5 million tokens of the ladder
only four do.

    python -m experiments.words                              the tables, from the records
    python -m experiments.words --run                        first makes what has no record
    python -m experiments.words train S5 --householders 4    6 minutes on one core
    python -m experiments.words eval DIR                     a run of words, at other lengths, too

Sources: Grazzi et al. 2025 (arXiv 2411.12537), theorem 1: parity needs a negative eigenvalue.
Merrill et al. 2024 (arXiv 2404.08819), theorem 4.2: diagonal transitions, non-solvable groups.
Siems et al. 2025 (arXiv 2502.10297): R reflections a token.

Next: unseen.py.
"""

import string
from dataclasses import asdict
from functools import partial, reduce

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from data import (COMMANDS, Batch, Group, Parser, ReplTask, UserError, at_least, draw_commands, run,
                  run_commands, stages)
from eval import evaluate, evaluate_and_print, load_weights, make_model, read_checkpoint
from experiments import (RATES, at, chapter, grid, k_of_n, make, minutes, never, percent, records,
                         span, table)
from experiments.groups import index, points_moved, product
from experiments.plots import BLUE, GREY, NAMES, RED, canvas, count, dot
from models import LSTM, DeltaBlock, LanguageModel, LinRNN, Transformer
from scan import delta_product
from train import Recipe, config_of_run, new_config, new_parser, share_of_peak, train_run

COMMAND = "python -m experiments.words train"
LONGEST = 128  # words of a training trace, but for those of the quiet end
QUIET = 512
STAGES = [2, 4, 8, 16, 32, LONGEST, QUIET]  # words of a trace
QUIET_RATE = 2e-4  # at 1e-3 a hundred steps of the quiet end destroy a model
LENGTHS = [(128, 1), (256, 1), (512, 1), (1024, 1)]
SOLVED = 0.995  # of the labels


# --- 1. The task ----------------------------------------------------------------------------------

class WordTask:
    """One token per group element; the label at t is the product of the first t elements.

    DeltaProduct and others report on this task. With spacing S only every S-th label counts.
    """

    check = staticmethod(ReplTask.check)

    def __init__(self, group, commands="full"):
        self.group = group
        self.commands = commands
        self.chance = 1 / group.order  # all words are equally likely, and so are all answers
        self.vocab = ["".join(string.ascii_lowercase[i] for i in g) for g in group.elements]
        if commands == "swap":
            group.require_swaps()  # here, and not at the first batch

    def test_batch(self, batch, length, spacing, rng):
        """Uniform words, and their running products."""
        words = draw_commands(self.group, self.commands, (batch, length), rng)
        return self.batch_of(words, spacing)

    training_batch = test_batch

    def batch_of(self, words, spacing):
        """A Batch of words [B, L, n]: their numbers, and those of the running products."""
        batch, length, _ = words.shape
        self.check(length, spacing)
        counts = np.arange(1, length + 1) % spacing == 0
        return Batch(index(self.group, words), index(self.group, run_commands(words)),
                     np.tile(counts, (batch, 1)))


def group_of(name):
    """A group as data.Group knows it, or a direct product such as A4xZ5."""
    return reduce(product, [Group(factor) for factor in name.split("x")])


# --- 2. How words are learned with R reflections --------------------------------------------------

class TaughtWords(WordTask):
    """WordTask whose training shows many short traces, and in large groups easy words first."""

    def training_batch(self, batch, length, spacing, rng):
        """As a test batch, but shorter traces have more rows, and their words may be easier.

        An exchange takes one reflection, a cycle of five points four. So words that move few points
        are easy, and a model that can exchange learns the harder words one by one.
        """
        # A step has as many words in every stage, and at least two traces.
        shape = (max(2, batch * LONGEST // length), length)
        words = draw_commands(self.group, self.commands, shape, rng)

        # Up to A5 easy words would lead away: S4 and A5 are the rotations of a cube and of an
        # icosahedron, and a rotation in space takes two reflections.
        if self.group.order > 60 and length <= 16:
            # Of two words the one that leaves more points in place. So every word is shown.
            others = draw_commands(self.group, self.commands, shape, rng)
            easier = points_moved(others) < points_moved(words)
            words = np.where(easier[..., None], others, words)
        return self.batch_of(words, spacing)


def recipe_of(group, seed):
    """Short traces until they are known, many steps of 128 words, and a quiet end of 512."""
    # The few words of S3 and S4 are half known after some dozen steps. A model that went on then
    # would forget them at 128 words, or would track a quotient only (S3 is one of S4).
    few = group.order <= 24
    pass_share, pass_batches, rate = (0.9, 10, 2e-3) if few else (0.8, 1, 3e-3)

    # 128 words are not waited for: constant rates keep their accuracy down. What is left then is
    # drift: small errors of a few hundred reflections add up. The quiet end shows the model 512.
    return Recipe(curriculum=[(length, 1) for length in STAGES],
                  stage_steps=[0, 0, 0, 0, 0, 5000, 1500], max_steps=8000, pass_share=pass_share,
                  pass_batches=pass_batches, batch=4, optimizer="adamw", lr=rate, matrix_lr=rate,
                  seed=seed)


def falls_twice(recipe, progress):
    """A hook of train(): the rates fall to 0 over 128 words, and from QUIET_RATE over 512."""
    steps = recipe.steps_of(progress.stage)
    if not steps:
        return share_of_peak(recipe, progress)

    left = 1 - progress.stage_step / steps
    return left if progress.stage < recipe.last_stage else left * QUIET_RATE / recipe.lr


HOOKS = {"rate_of": falls_twice, "averaged": never}


def config_of_words(typed):
    """The config of a new run: what was typed, else S5 with R = 4."""
    names = {"task": "words", "group": "S5", "commands": "full"}
    # Each of the 120 words of S5 needs keys of its own, so the model is wide. A word needs nothing
    # from the words before it, so there is no local block.
    options = {"d_model": 128, "heads": 8, "conv_width": 1, "householders": 4}
    recipe = recipe_of(group_of(typed.get("group", "S5")), seed=0)
    return new_config(typed, COMMAND, names, options, asdict(recipe))


def make_run(config):
    """The task of a config, and its model before training: its writes begin as reflections.

    At random weights beta is about 1, and such a write erases what S holds along its key. With R of
    them a token a few words would empty the state, and a model would learn to do without.
    """
    if config.get("task") != "words":
        raise UserError(f"this is no run of words, but of {config.get('task')}: use the command "
                        "that made it")
    task = TaughtWords(group_of(config["group"]), config["commands"])
    model = make_model(config, task)
    begin_as_reflections(model.blocks[0])
    return task, model


@torch.no_grad()
def begin_as_reflections(block):
    """Move beta of a DeltaBlock from a half to 0.9 of its upper end."""
    betas, _ = block.project.bias[sum(block.sizes[:3]):].chunk(2)
    betas += 6 * (0.9 - 0.5)  # hardsigmoid(b) = 1/2 + b/6


# --- 3. Mixers beside those of models.py, for the ladder ------------------------------------------

class DiagonalBlock(nn.Module):
    """h <- a h + b with a in [smallest, 1], then x + W (norm(h) gelu(gate)).  State: h, [B, D]."""

    def __init__(self, d_model, smallest):
        super().__init__()
        self.smallest = smallest
        self.norm = nn.RMSNorm(d_model)
        self.project = nn.Linear(d_model, 3 * d_model)
        self.out_norm = nn.RMSNorm(d_model)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def coefficients(self, x):
        """a, b and the gate of each token: [B, T, D] each."""
        a, b, gate = self.project(self.norm(x)).chunk(3, -1)
        return self.smallest + (1 - self.smallest) * F.hardsigmoid(a), b, gate

    def forward(self, x, state=None):
        a, b, gate = self.coefficients(x)
        h = torch.zeros_like(b[:, 0]) if state is None else state
        states = []
        for a_t, b_t in zip(a.unbind(1), b.unbind(1)):
            h = a_t * h + b_t
            states.append(h)

        numbers = torch.stack(states, 1)
        if numbers.is_complex():
            numbers = torch.cat([numbers.real, numbers.imag], -1)
        return x + self.out(self.out_norm(numbers) * F.gelu(gate)), h


class RotationBlock(DiagonalBlock):
    """The same with |a| = 1: h <- exp(i pi angle) h + b.  State: h, complex [B, D/2]."""

    def __init__(self, d_model):
        super().__init__(d_model, smallest=-1.0)
        self.sizes = [d_model // 2, d_model, d_model]
        self.project = nn.Linear(d_model, sum(self.sizes))

    def coefficients(self, x):
        """a and b, complex [B, T, D/2]; the gate, [B, T, D]."""
        angle, b, gate = self.project(self.norm(x)).split(self.sizes, -1)
        return torch.exp(1j * torch.pi * angle), torch.complex(*b.chunk(2, -1)), gate


class SignedBlock(DeltaBlock):
    """S <- (I - beta k k^T) Diag(s) S + beta k v^T with signs s = +-1: one reflection, and signs.

    Let P be the product of the signs so far, entry by entry. Then P S follows the plain delta rule
    with the keys P k and the queries P q, since P P = 1.  State: P S [B, H, K, K], P [B, H, K].
    Source: arXiv 2609.24797 has one factor and a diagonal, too; this way to compute it is ours.
    """

    def __init__(self, d_model, heads):
        super().__init__(d_model, heads, beta_max=2.0, householders=1)
        self.signs = nn.Linear(d_model, d_model)

    def forward(self, x, state=None):
        q, k, v, beta = self.inputs_of_scan(x)
        S, past = state or (None, torch.ones_like(q[:, :, 0]))

        # A sign has no slope. In the backward pass it passes for its soft form.
        soft = torch.tanh(self.signs(self.norm(x)))
        hard = 1 - 2 * (soft < 0).to(soft.dtype)
        s = soft + (hard - soft).detach()
        s = s.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, T, K]
        P = past.unsqueeze(2) * s.cumprod(2)

        out, S = delta_product(P * q, P.unsqueeze(3) * k, v, beta, S)
        out = self.out_norm(out).transpose(1, 2).flatten(2)
        return x + self.out(out), (S, P[:, :, -1])


class DenseBlock(nn.Module):
    """h <- A h with A = exp(W - W^T), any rotation of K dimensions; then x + W' norm(h).

    A permutation of n points is a rotation of n + 1 dimensions, since a further sign can make its
    determinant 1.  State: h, [B, K].
    """

    def __init__(self, d_model, width):
        super().__init__()
        self.norm = nn.RMSNorm(d_model)
        self.project = nn.Linear(d_model, width * width)
        self.start = nn.Parameter(torch.randn(width))
        self.out = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, d_model, bias=False))

    def forward(self, x, state=None):
        W_KK = self.project(self.norm(x)).unflatten(-1, (len(self.start), -1))
        A_KK = torch.linalg.matrix_exp(W_KK - W_KK.mT)

        h = self.start.expand(len(x), -1) if state is None else state
        states = []
        for step_KK in A_KK.unbind(1):
            h = (step_KK @ h.unsqueeze(-1)).squeeze(-1)
            states.append(h)
        return x + self.out(torch.stack(states, 1)), h


# --- 4. The studies, their tables and the picture -------------------------------------------------

mixed = partial(LanguageModel, d_model=64, layers=1, conv_width=8)
RUNGS = {
    "diagonal, 0 to 1": partial(mixed, make_mixer=lambda: DiagonalBlock(64, smallest=0.0)),
    "diagonal, -1 to 1": partial(mixed, make_mixer=lambda: DiagonalBlock(64, smallest=-1.0)),
    "rotations": partial(mixed, make_mixer=lambda: RotationBlock(64)),
    "1 reflection": LinRNN,
    "1 reflection, signs": partial(mixed, make_mixer=lambda: SignedBlock(64, heads=4)),
    "2 reflections": partial(LinRNN, householders=2),
    "4 reflections": partial(LinRNN, householders=4),
    "dense": partial(mixed, make_mixer=lambda: DenseBlock(64, width=8)),
    "lstm": LSTM,
    "transformer": Transformer}
LADDER = grid(group=["S2", "S3", "A5"], arm=[*RUNGS], millions=[1.5], seed=range(3))


def plan_ladder(cell):
    """Uniform words. The stages double in length, from 2 to 64."""
    task = WordTask(Group(cell["group"]))
    rates = RATES.get(cell["arm"], RATES["linrnn"])
    recipe = Recipe(curriculum=[(2**i, 1) for i in range(1, 7)], last_steps=150, batch=64,
                    max_steps=10**6, seed=cell["seed"], **rates)
    return task, partial(RUNGS[cell["arm"]], len(task.vocab)), recipe, [(64, 1), (256, 1)]


REFLECTIONS = [
    # Too few reflections: no run gets past 32 words.
    *grid(group=["S3", "S4", "A5"], commands=["full"], householders=[1], millions=[7],
          seed=range(10, 13)),
    *grid(group=["S5"], commands=["full"], householders=[1, 2, 3], millions=[7],
          seed=range(10, 13)),
    # As many as the theory asks for.
    *grid(group=["S3", "S4", "A5"], commands=["full"], householders=[2], millions=[7],
          seed=range(30, 33)),
    *grid(group=["S5"], commands=["full"], householders=[4], millions=[7], seed=range(30, 35)),
    *grid(group=["S5"], commands=["swap"], householders=[1], millions=[7], seed=range(30, 33))]


def plan_reflections(cell):
    """What `words train` does without further options."""
    typed = {name: cell[name] for name in ("group", "commands", "householders", "seed")}
    task, model = make_run(config_of_words(typed))
    return task, lambda: model, recipe_of(task.group, cell["seed"]), LENGTHS


OTHERS = [
    *grid(group=["S3"], commands=["full"], arm=["1 reflection, signs"], millions=[7],
          seed=range(30, 35)),
    *grid(group=["S4", "A5"], commands=["full"], arm=["1 reflection, signs"], millions=[7],
          seed=range(30, 33)),
    *grid(group=["S5"], commands=["swap"], arm=["lstm"], millions=[7], seed=range(30, 33))]


def make_signed(vocab_size):
    """A model as `words train` makes one, but with signs and one reflection."""
    model = LanguageModel(vocab_size, d_model=128, layers=1, conv_width=1,
                          make_mixer=lambda: SignedBlock(128, heads=8))
    begin_as_reflections(model.blocks[0])
    return model


MAKERS = {"1 reflection, signs": make_signed, "lstm": partial(LSTM, d_model=128, conv_width=1)}


def plan_others(cell):
    """Another mixer in the place of the reflections, by the same recipe."""
    task = TaughtWords(Group(cell["group"]), cell["commands"])
    recipe = recipe_of(task.group, cell["seed"])
    return task, partial(MAKERS[cell["arm"]], len(task.vocab)), recipe, LENGTHS


def many_traces(model, task, tests):
    """A row of eval.py for each test. Whole traces are a matter of few, so three times as many."""
    return [evaluate(model, task, *stage, traces=768) for stage in tests]


def make_missing():
    make("ladder", LADDER, plan_ladder)
    make("reflections", REFLECTIONS, plan_reflections, many_traces, **HOOKS)
    make("words", OTHERS, plan_others, many_traces, **HOOKS)


def show():
    """All tables: ladder.jsonl, reflections.jsonl and words.jsonl."""
    table("Words, trained to 64 of them with at most 1.5 million tokens: labels right in %",
          records("ladder"), ["group", "arm"],
          {"chance": percent(64, "chance"), "at 64": percent(64), "at 256": percent(256)})

    first = {"chance": percent(128, "chance"), "solved": k_of_n(is_solved), "minutes": minutes,
             "to": longest}
    rows = [row | {"R": row["householders"]} for row in records("reflections")]
    table("By `words train`, with R reflections a token: labels right in %, and whole traces\n"
          "(to: words of the longest traces that a run came to)",
          rows, ["group", "commands", "R"],
          {**first, "at 128": percent(128), "at 512": percent(512), "at 1024": at_1024("all"),
           "whole, 512": percent(512, "perfect"), "whole, 1024": at_1024("perfect")})

    table("By the same recipe, with another mixer: labels at 512 words, the same scaled from 0 at\n"
          "chance to 1, and whole traces", records("words"), ["group", "commands", "arm"],
          {**first, "at 512": percent(512), "scaled": scaled, "whole, 512": percent(512, "perfect"),
           "whole, 1024": at_1024("perfect")})


def is_solved(row):
    """Whether traces of 128 words are right, up to one label in 200."""
    return at(row, 128)["all"] >= SOLVED


def at_1024(key):
    """A column: what is right in %; empty for runs with too few reflections, not tested there."""
    return lambda rows: span([100 * test[key] for row in rows for test in row["results"]
                              if test["length"] == 1024])


def scaled(rows):
    """A column: (right - chance) / (1 - chance) at 512 words, the measure of arXiv 2609.24797."""
    tests = [at(row, 512) for row in rows]
    return span([(test["all"] - test["chance"]) / (1 - test["chance"]) for test in tests], 2)


def longest(rows):
    """A column: words of the longest training traces of a run."""
    return span([STAGES[row["stage_reached"] - 1] for row in rows], 0)


def picture():
    """The ladder, for three groups: labels right at 64 and at 256 tokens, rung by rung."""
    rungs = [*RUNGS]
    names = [NAMES.get(rung, rung.replace("dense", "dense rotation")) for rung in rungs]
    fours = records("ladder", group="A5", arm="4 reflections")
    right = count(fours, lambda row: at(row, 64)["all"] >= SOLVED)
    figure, (panels,) = canvas("Within 1.5 million tokens only four reflections a token read A5 "
                               f"({right} seeds);\na diagonal layer with eigenvalues in [0, 1] "
                               "loses even parity (S2)", 1, 3, (9, 4.6), sharey=True)
    for axes, group in zip(panels, ("S2", "S3", "A5")):
        for row in records("ladder", group=group):
            for length, marker, colour in [(64, "o", BLUE), (256, "x", RED)]:
                dot(axes, at(row, length)["all"], rungs.index(row["arm"]), marker, colour)
        axes.axvline(1 / Group(group).order, color=GREY, linestyle="--", linewidth=0.9)
        axes.set(title=group, xlim=(0, 1.04), xticks=[0, 0.5, 1],
                 xticklabels=[0, 0.5, 1], yticks=range(len(rungs)), yticklabels=names)
    figure.supxlabel("labels right at   o  64,   x  256 tokens; trained to 64; dashed: chance")
    return figure


# --- 5. The command line --------------------------------------------------------------------------

def train_words(argv):
    """words train GROUP: a run folder, and its closing table."""
    parser = new_parser(COMMAND, "Train on words: a token is a whole group element.")
    add = parser.add_argument
    add("group", nargs="?", help="S<n>, A<n>, Z<n>, D<n>, or a product such as A4xZ5 (S5)")
    add("--commands", choices=COMMANDS, help="all elements, or exchanges only (full)")
    add("--householders", type=at_least(1), help="reflections a token, R (4)")
    add("--seed", type=at_least(0), help="of the traces, and of the weights to begin with (0)")

    typed = vars(parser.parse_args(argv))
    config = config_of_run(typed, COMMAND) if "resume" in typed else config_of_words(typed)
    train_run(*make_run(config), config, typed, LENGTHS, **HOOKS)


def eval_words(argv):
    """words eval DIR: the table of eval.py, for a run of words."""
    parser = Parser(prog="python -m experiments.words eval")
    parser.add_argument("run", help="a run folder, made by words train")
    parser.add_argument("--lengths", type=stages, default=LENGTHS, help="LENGTH:1,... (to 1024:1)")
    args = parser.parse_args(argv)

    task, model = make_run(read_checkpoint(args.run)["config"])
    evaluate_and_print(load_weights(model, args.run), task, args.lengths)


def main(argv=None):
    chapter(__doc__, show, make_missing, {"train": train_words, "eval": eval_words}, argv)


if __name__ == "__main__":
    run(main)
