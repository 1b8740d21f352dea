"""Which mixer learns to track, with what budget; what does each transition hold?

    python -m experiments.arms                 # the tables below, from the records
    python -m experiments.arms --run           # makes the cells that are not recorded yet
    python -m experiments.arms --run ladder    # those of one part; 0.4 to 40 minutes a cell

All arms have one frame, one curriculum and one batch; the optimiser and its rates are each arm's
own. A run ends with its curriculum, or when its tokens are spent. Six parts:
    main         REPL traces, each arm to its cap of tokens
    eased        the same on S5 by an easy way in, and one change at a time
    rates        the grid that chose the rates: the stage (2,1) passed on the most seeds of three
    spacing      traces of 8 commands with a reveal after every S of them
    ladder       words (one token a group element), read with ever freer transitions
    reflections  words read with R reflections a token, beside REPL traces read with one

Finding. On full commands of S5 beta <= 2 is through the curriculum on five seeds of five, after 3
million tokens; after 45 million beta <= 1 still learns traces of 16 to 32 commands, the Transformer
of 8, the LSTM of 4. A decay gate neither hurts beta <= 2 nor helps beta <= 1, and of all other
changes only depth helps each arm. On words eigenvalues in [0, 1] lose even parity, and a diagonal
layer with -1 counts; with as many reflections a token as the theory asks for words of S3, S4, A5
and S5 are learned on all seeds, with fewer on none.

Sources: Grazzi et al. 2025 (arXiv 2411.12537), theorem 1: parity needs a negative eigenvalue.
Merrill et al. 2024 (arXiv 2404.08819), theorem 4.2: diagonal transitions, non-solvable groups.
Siems et al. 2025 (arXiv 2502.10297): R reflections a token. Yang et al. 2024 (arXiv 2412.06464):
the gated delta rule.

Next: inside.py.
"""

import argparse
import math
from functools import partial
from itertools import product
from typing import Callable, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from data import Group, ReplTask, WordTask, generator, parse, run
from eval import evaluate, evaluate_and_print
from experiments import RATES, record, records, span, train_arm, where
from models import (LSTM, AttentionBlock, DeltaBlock, LanguageModel, LinRNN, LSTMBlock,
                    Transformer)
from scan import delta_product
from train import Recipe, share_of_peak

# --- Mixers beside those of models.py -------------------------------------------------------------

def diagonal_states(a, b, h):
    """h <- a h + b, one token after the other. a, b [B, T, D] -> every h, [B, T, D]."""
    states = []
    for a_t, b_t in zip(a.unbind(1), b.unbind(1)):
        h = a_t * h + b_t
        states.append(h)
    return torch.stack(states, 1)


class DiagonalBlock(nn.Module):
    """h <- a h + b with a in [smallest, 1], then x + W (norm(h) gelu(gate)).

    State: h, [B, D].
    """

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
        if state is None:
            state = torch.zeros_like(b[:, 0])
        h = diagonal_states(a, b, state)
        numbers = torch.cat([h.real, h.imag], -1) if h.is_complex() else h
        return x + self.out(self.out_norm(numbers) * F.gelu(gate)), h[:, -1]


class RotationBlock(DiagonalBlock):
    """The same with complex numbers and |a| = 1: h <- exp(i angle) h + b.

    State: h, complex [B, D/2].
    """

    def __init__(self, d_model):
        super().__init__(d_model, smallest=-1.0)
        self.sizes = [d_model // 2, d_model, d_model]
        self.project = nn.Linear(d_model, sum(self.sizes))

    def coefficients(self, x):
        """a and b, complex [B, T, D/2]; the gate, [B, T, D]."""
        angle, b, gate = self.project(self.norm(x)).split(self.sizes, -1)
        a = torch.polar(torch.ones_like(angle), math.pi * angle)
        return a, torch.complex(*b.chunk(2, -1)), gate


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


def gated_product(q, k, v, beta, alpha, state=None, piece=32):
    """S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, by the scan without a gate.

    Inside a piece let A_t = alpha_1 ... alpha_t. Then S_t / A_t obeys the rule without the gate,
    with v_t / A_t in place of v_t. A_t must stay far from 0: alpha > 1/2 gives A_t > 2^-32.
    Shapes: those of delta_product, R writes a token; alpha [..., T].
    """
    out = []
    inputs = zip(q.split(piece, -2), k.split(piece, -3), v.split(piece, -3),
                 beta.split(piece, -2), alpha.split(piece, -1))
    for q_TK, k_TRK, v_TRK, beta_TR, alpha_T in inputs:
        decay_T1 = alpha_T.cumprod(-1).unsqueeze(-1)
        undecayed_TRK = v_TRK / decay_T1.unsqueeze(-1)
        out_TK, state = delta_product(q_TK, k_TRK, undecayed_TRK, beta_TR, state)
        out.append(decay_T1 * out_TK)
        state = decay_T1[..., -1:, :] * state
    return torch.cat(out, -2), state


class GatedBlock(DeltaBlock):
    """DeltaBlock whose state decays by alpha in (1/2, 1), a number for each head and token."""

    def __init__(self, d_model, heads, *options):
        super().__init__(d_model, heads, *options)
        self.gate = nn.Linear(d_model, heads)
        nn.init.constant_(self.gate.bias, 4.0)  # alpha begins near 0.99: forgetting is learned

    def forward(self, x, state=None):
        alpha_HT = (1 + self.gate(self.norm(x)).sigmoid().mT) / 2
        out, state = gated_product(*self.inputs_of_scan(x), alpha_HT, state)
        return x + self.out(self.out_norm(out).transpose(1, 2).flatten(2)), state


class GatedRNN(LinRNN):
    """The gated delta rule as mixer, in the frame of LinRNN."""

    Block = GatedBlock


# --- main, rates, spacing: arms on REPL traces ----------------------------------------------------

ARMS = {
    "linrnn": LinRNN,
    "linrnn-beta1": partial(LinRNN, beta_max=1.0),
    "transformer": Transformer,
    "lstm": LSTM,
    "gated": GatedRNN,
    "gated-beta1": partial(GatedRNN, beta_max=1.0)}


def make_arm(arm, task, **options):
    """The model of an arm. A bare arm has no local block."""
    width = 1 if arm.endswith("-bare") else task.model_options["conv_width"]
    return ARMS[arm.removesuffix("-bare")](len(task.vocab), conv_width=width, **options)


def recipe_of(cell, rates=RATES, **options):
    """The recipe of a cell: the rates of its arm, and no limit but that of tokens.

    Bare and gated arms, and the rungs of the ladder, have the rates of their nearest relative.
    """
    relative = cell["arm"].removesuffix("-bare").replace("gated", "linrnn")
    return Recipe(**rates.get(relative, rates["linrnn"]), max_steps=10**6, seed=cell["seed"],
                  **options)


MAIN_LENGTHS = [(2, 1), (8, 1), (16, 2), (64, 8), (128, 16)]


def plan_main(cell):
    """An arm through the curriculum, as far as its tokens carry."""
    task = ReplTask(Group(cell["group"]), cell["commands"])
    return task, lambda: make_arm(cell["arm"], task), recipe_of(cell), MAIN_LENGTHS


# --- eased: an easy way in for all arms, and one change at a time ---------------------------------

# Where each command has a reveal, commands are products of a few exchanges, as rule_for(n) asks for
# large n; and a stage (4,1) stands between (2,1) and (8,1).
EASED = [(2, 1), (4, 1), (8, 1), (16, 2), (32, 4), (64, 8)]
EASED_LENGTHS = [*EASED, (128, 16)]
# Those that pass in the part `rates`: on the most seeds, and then after the fewest tokens.
EASED_RATES = RATES | {"lstm": {"optimizer": "adamw", "lr": 4e-3, "matrix_lr": 4e-3}}
CHANGES = {  # what is tried, one at a time: options of the recipe, and of the model
    "": ({}, {}),
    "batch 64": ({"batch": 64}, {}),
    "weight decay 0.1": ({"weight_decay": 0.1}, {}),
    "rates fall to 0": ({}, {}),
    "width 96": ({}, {"d_model": 96}),
    "more layers": ({}, {"layers": 2})}  # the Transformer has two anyway, and gets four


def plan_eased(cell):
    """As plan_main, by the easy way in. The tests show uniform commands."""
    task = ReplTask(Group("S5"), sparse=True)
    of_recipe, of_model = CHANGES[cell["change"]]
    if cell["change"] == "more layers" and cell["arm"] == "transformer":
        of_model = {"layers": 4}
    recipe = recipe_of(cell, EASED_RATES, curriculum=EASED, **of_recipe)
    return task, lambda: make_arm(cell["arm"], task, **of_model), recipe, EASED_LENGTHS


def fall_with_tokens(cell):
    """A schedule for train: the rates fall linearly to 0 while the tokens of the cell are read."""
    most = 1e6 * cell["millions"]
    return lambda recipe, progress: share_of_peak(recipe, progress) * (1 - progress.tokens / most)


def plan_rates(cell):
    """The easy way in until the stage (2,1) is passed: one step of (4,1) ends the run."""
    task = ReplTask(Group("S5"), sparse=True)
    matrix_lr = cell["lr"] * (5 if cell["optimizer"] == "muon" else 1)
    recipe = Recipe(optimizer=cell["optimizer"], lr=cell["lr"], matrix_lr=matrix_lr,
                    curriculum=EASED[:2], last_steps=1, max_steps=10**6, seed=cell["seed"])
    return task, lambda: make_arm(cell["arm"], task), recipe, []


def plan_spacing(cell):
    """Traces of 8 commands, a reveal after every S, alone or behind the stage (2,1).

    The stage (8,S) ends when it is learned; then it goes on for the steps of a last stage.
    """
    task = ReplTask(Group(cell["group"]), cell["commands"])
    stage = (8, cell["spacing"])
    before = [(2, 1)] if cell["first"] else []
    recipe = recipe_of(cell, curriculum=[*before, stage, stage])
    return task, lambda: make_arm(cell["arm"], task), recipe, [stage, (8, 8)]


# --- ladder: transitions of ever more freedom, on words -------------------------------------------

RUNGS = {  # width of the model, layers, and what makes a mixer
    "diagonal, 0 to 1": (64, 1, lambda: DiagonalBlock(64, smallest=0.0)),
    "diagonal, -1 to 1": (64, 1, lambda: DiagonalBlock(64, smallest=-1.0)),
    "rotations": (64, 1, lambda: RotationBlock(64)),
    "1 reflection": (64, 1, lambda: DeltaBlock(64, 4, beta_max=2.0, householders=1)),
    "2 reflections": (64, 1, lambda: DeltaBlock(64, 4, beta_max=2.0, householders=2)),
    "4 reflections": (64, 1, lambda: DeltaBlock(64, 4, beta_max=2.0, householders=4)),
    "dense": (64, 1, lambda: DenseBlock(64, width=8)),
    "lstm": (60, 1, lambda: LSTMBlock(60)),
    "transformer": (56, 2, lambda: AttentionBlock(56, heads=4))}
COUNTING = {"arm": "diagonal, -1 to 1", "group": "S3"}  # the cells whose layer is looked into


def plan_ladder(cell):
    """Words of one group. The stages double in length, from 2 to 64."""
    task = WordTask(Group(cell["group"]), easy=False)
    stages = [(2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (64, 1)]
    recipe = recipe_of(cell, batch=64, curriculum=stages)
    width, layers, make_mixer = RUNGS[cell["arm"]]
    return (task, lambda: LanguageModel(len(task.vocab), width, layers, 8, make_mixer), recipe,
            [(64, 1), (256, 1)])


@torch.no_grad()
def count(model, task):
    """Does a diagonal layer count? Labels right by the size of the count, beyond 64 tokens.

    The maps h -> a h + b do not commute. With a = -1 for odd words and 1 for even ones they are the
    symmetries of the number line, and S3 is what remains of h modulo 3. The count grows as a random
    walk does, so it leaves what training showed.
    A counter is an element with a mean of a below -0.9 over odd words, above 0.9 over even ones.
    Returns: how many elements count; their mean size by token; the labels right in four equal
    parts of all places, from the smallest counts to the largest.
    """
    batch = task.test_batch(256, 256, 1, generator(0, "test", 256, 1))
    tokens = torch.from_numpy(batch.inputs)
    x, _ = model.blocks[0](model.embedding(tokens))
    a, b, _ = model.blocks[1].coefficients(x)

    signs = np.linalg.det(np.eye(task.group.degree)[task.group.elements])
    odd = torch.from_numpy(signs < 0)[tokens]
    counters = (a[odd].mean(0) < -0.9) & (a[~odd].mean(0) > 0.9)
    if not counters.any():
        return {"elements": 0}

    h = diagonal_states(a, b, torch.zeros_like(b[:, 0]))
    size = h[..., counters].abs().mean(-1)
    by_token = {str(t): round(size[:, t - 1].mean().item(), 2) for t in (16, 32, 64, 128, 256)}

    right = model(tokens).argmax(-1) == torch.from_numpy(batch.targets)
    right = right[:, 64:].flatten().float()
    parts = size[:, 64:].flatten().argsort().chunk(4)
    return {"elements": int(counters.sum()), "size": by_token,
            "right_by_size": [right[places].mean().item() for places in parts]}


# --- reflections: words against traces ------------------------------------------------------------

def plan_reflections(cell):
    """Words and traces, each as train.py reads them without further options."""
    if cell["format"] == "word":
        task = WordTask(Group(cell["group"]), cell["commands"])
        lengths = task.test_lengths
    else:
        task = ReplTask(Group(cell["group"]), cell["commands"])
        lengths = [(64, 8), (128, 16), (256, 32)]

    def make_model():
        return LinRNN(len(task.vocab), householders=cell["householders"], **task.model_options)

    return task, make_model, Recipe(seed=cell["seed"], **task.recipe_options), lengths


# --- The tables, from the records -----------------------------------------------------------------

def through(rows):
    """How many of the runs got through their curriculum."""
    if not rows:
        return ""
    return f"{sum(row['finished'] for row in rows)} of {len(rows)}"


def right(i):
    """The accuracy at the i-th length of the evaluation, in percent, on all its test streams."""
    def text(rows):
        values = []
        for row in rows:
            for results in [row["results"], *row.get("more_results", [])]:
                values.append(100 * results[i]["all"])
        return span(values)

    return text


EQUAL_MINUTES = 3  # on one core; less than any arm of `eased` needs for its 15 million tokens


def after_equal_minutes(entry, digits):
    """What an entry of the curve said then: 1 the length of the stage, 2 the reveals right in %.

    All tokens of a run count as equally long in time. A run that was over by then has its end.
    """
    def text(rows):
        values = []
        for row in rows:
            tokens = row["tokens"] * EQUAL_MINUTES / row["minutes"]
            before = [point for point in row["curve"] if point[0] <= tokens]
            values.append(before[-1][entry] * (100 if entry == 2 else 1))
        return span(values, digits)

    return text


def tokens_to_pass(rows):
    """Million tokens until the stage of the grid was passed, of the seeds that did."""
    return span([row["tokens"] / 1e6 for row in rows if row["finished"]], 2)


def print_table(title, keys, texts, rows, by=None):
    """A line for each combination of values of the keys; its rows make each text.

    texts: {name: rows -> text}; by: a key whose values have columns of their own.
    """
    columns = list(product(dict.fromkeys(row.get(by, "") for row in rows), texts))
    names = [f"{value} {name}".strip() for value, name in columns]
    print(f"\n{title}\n" + " " * 30 + "".join(f"{name:>13}" for name in names))

    for values in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        line = ", ".join(str(value).rstrip(",") for value in values if value != "")
        of_line = where(rows, **dict(zip(keys, values)))
        cells = []
        for value, name in columns:
            cells.append(texts[name]([row for row in of_line if row.get(by, "") == value]))
        print(f"{line:30}" + "".join(f"{cell:>13}" for cell in cells))


def texts_of_arms(lengths):
    """What a table of arms shows of each: how far it came, and the reveals right in %."""
    texts = {"through": through,
             "stage": lambda rows: span([row["stage_reached"] for row in rows], 0),
             "tokens read": lambda rows: span([row["tokens"] / 1e6 for row in rows]),
             "minutes": lambda rows: span([row["minutes"] for row in rows])}
    for i, (length, spacing) in enumerate(lengths):
        texts[f"({length},{spacing})"] = right(i)
    return texts


def show_main(rows):
    print_table("Arms, with their cap in million tokens: seeds through the curriculum of five "
                "stages, stage reached,\nmillion tokens read, reveals right in %, least-greatest "
                "of the seeds (chance: 20 on S5, 33 on S3)",
                ["group", "commands", "arm", "millions"], texts_of_arms(MAIN_LENGTHS), rows)


def show_eased(rows):
    keys = ["arm", "change", "millions"]
    print_table("Full commands of S5 by the easy way in, which has six stages. Behind the name of "
                "an arm stands\nwhat was changed, and the cap in million tokens",
                keys, texts_of_arms(EASED_LENGTHS), rows)

    rows = where(rows, millions=15)
    if not rows:
        return
    texts = {"length": after_equal_minutes(1, 0), "right": after_equal_minutes(2, 1)}
    print_table(f"These runs in training after equal time, {EQUAL_MINUTES} minutes of one core, or "
                "at their end if that is sooner:\nlength of the stage, reveals right in %",
                keys, texts, rows)


def show_rates(rows):
    print_table("By rate, the seeds that pass (2,1) of S5 by the easy way in, and their million "
                "tokens", ["arm", "optimizer"], {"pass": through, "after": tokens_to_pass},
                sorted(rows, key=lambda row: row["lr"]), by="lr")


def show_spacing(rows):
    print_table("Traces of 8 commands, a reveal after every S, alone or behind (2,1): by S, seeds "
                "that learned it,\nreveals right in %", ["group", "arm", "first"],
                {"learned": through, "right": right(0)}, rows, by="spacing")


def show_ladder(rows):
    print_table("Words: labels right in % at 64 and at 256 tokens, trained to 64 (chance: 50 on "
                "S2, 17 on S3, 2 on A5, 20 on Z5)", ["arm"], {"64": right(0), "256": right(1)},
                rows, by="group")

    texts = {}
    for i, part in enumerate(["smallest", "small", "large", "largest"]):
        texts[part] = lambda rows, i=i: span([100 * row["count"]["right_by_size"][i]
                                              for row in rows])
    counted = [row for row in where(rows, **COUNTING) if row["count"]["elements"]]
    print_table("The same beyond 64 tokens, by the size of the count, in four equal parts of all "
                "places", ["arm", "group"], texts, counted)


def show_reflections(rows):
    of_words = where(rows, format="word")
    print_table("Words, trained to 128 of them: labels right in % at 128 and at 512 words, by "
                "reflections a token", ["group", "commands"],
                {"at 128": right(1), "at 512": right(3)},
                sorted(of_words, key=lambda row: row["householders"]), by="householders")
    print_table("REPL traces, one reflection a token: reveals right in % at (64,8)",
                ["group", "commands"], {"right": right(0)}, where(rows, format="repl"))


# --- The studies, cell by cell --------------------------------------------------------------------

def grid(**values):
    """Every combination of the values of each key, as a list of cells."""
    return [dict(zip(values, chosen)) for chosen in product(*values.values())]


def traces(group, commands, arms, millions, seeds=3, **more):
    """The cells of these arms on REPL traces, each with a cap in million tokens."""
    return grid(arm=arms, group=[group], commands=[commands], **more, millions=[millions],
                seed=range(seeds))


def words(group, commands, householders, seeds=3):
    """The cells of words of one group, each with the same cap in million tokens."""
    return grid(format=["word"], group=[group], commands=[commands], householders=householders,
                millions=[7], seed=range(10, 10 + seeds))


def rate_grid(optimizer, rates):
    """The cells of one optimiser in the grid of rates."""
    return grid(arm=[*RATES], optimizer=[optimizer], lr=rates, millions=[6],
                seed=[100, 101, 102])


class Study(NamedTuple):
    """results/NAME.jsonl holds a row for each cell; a cell is what distinguishes a run."""
    name: str
    plan: Callable  # cell -> task, make_model, recipe, lengths of the evaluation
    show: Callable  # rows -> None; prints a table
    cells: list


LINEAR = ["linrnn", "linrnn-beta1"]
SPACINGS = {"first": ["", "2:1,"], "spacing": [1, 2, 4, 8]}
STUDIES = {
    "main": Study("arms", plan_main, show_main, [
        *traces("S5", "full", [*RATES], 15, seeds=5),
        *traces("S5", "full", ["lstm"], 45, seeds=1),
        *traces("S5", "full", ["linrnn-bare", "transformer-bare", "lstm-bare"], 4),
        *traces("S3", "full", [*LINEAR, "transformer"], 6),
        *traces("S3", "full", ["lstm"], 18),
        *traces("S5", "swap", [*LINEAR, "transformer"], 5),
        *traces("S5", "swap", ["lstm"], 20),
        *traces("S3", "swap", LINEAR, 6),
        *traces("S3", "swap", ["transformer", "lstm"], 12),
        *traces("S3", "full", ["gated", "gated-beta1"], 4),
        *traces("S5", "full", ["gated", "gated-beta1"], 4)]),
    "eased": Study("arms_eased", plan_eased, show_eased, [
        *grid(arm=[*RATES], change=[""], millions=[15], seed=range(10, 15)),
        *grid(arm=["transformer", "lstm", "linrnn-beta1"], change=[*CHANGES], millions=[5],
              seed=[100]),
        *grid(arm=["transformer"], change=["more layers"], millions=[15], seed=range(10, 13)),
        # Three times the tokens, for the arms that were still learning.
        *grid(arm=["transformer", "linrnn-beta1", "lstm"], change=[""], millions=[45],
              seed=range(10, 13)),
        *grid(arm=["transformer"], change=["more layers"], millions=[45], seed=[10])]),
    "rates": Study("arms_rates", plan_rates, show_rates,
                   rate_grid("adamw", [1e-3, 2e-3, 4e-3]) + rate_grid("muon", [5e-4, 1e-3, 2e-3])),
    "spacing": Study("arms_spacing", plan_spacing, show_spacing, [
        *traces("S5", "full", ["linrnn"], 4, **SPACINGS),
        *traces("S3", "full", [*LINEAR, "transformer"], 3, **SPACINGS),
        *traces("S3", "full", ["lstm"], 12, **SPACINGS)]),
    "ladder": Study("ladder", plan_ladder, show_ladder, [
        *grid(arm=[*RUNGS], group=["S2", "S3", "A5"], millions=[1.5], seed=range(3)),
        *grid(arm=["diagonal, -1 to 1", "rotations", "2 reflections"], group=["Z5"],
              millions=[1.5], seed=range(3))]),
    "reflections": Study("reflections", plan_reflections, show_reflections, [
        # As many reflections as a word needs; then one fewer; then the rest of the table.
        *words("S5", "full", [4], seeds=5),
        *words("A5", "full", [2]),
        *words("S4", "full", [2], seeds=5),
        *words("S3", "full", [2], seeds=5),
        *words("S5", "swap", [1]),
        *words("S5", "full", [3]),
        *words("A5", "full", [1]),
        *words("S4", "full", [1]),
        *words("S3", "full", [1]),
        *words("S5", "full", [1, 2]),
        *words("A5", "full", [3, 4]),
        *words("S4", "full", [3, 4]),
        *words("S3", "full", [3, 4]),
        *words("S5", "swap", [2, 3, 4]),
        *grid(format=["repl"], group=["S3", "S4", "A5", "D6", "Z7"], commands=["full"],
              householders=[1], seed=[0, 1])])}


def make_missing(study):
    """Train, evaluate and record each cell of a study that no row describes."""
    for cell in study.cells:
        task, make_model, recipe, lengths = study.plan(cell)
        max_tokens = 1e6 * cell.get("millions", math.inf)
        falls = cell.get("change") == "rates fall to 0"
        made = train_arm(study.name, cell, make_model, task, recipe, max_tokens=max_tokens,
                         rate_of=fall_with_tokens(cell) if falls else share_of_peak)
        if made is None:
            continue

        # Three streams of test traces, of which the first is that of all other records.
        model, summary = made
        row = cell | summary | {"results": evaluate_and_print(model, task, lengths)}
        row["more_results"] = [[evaluate(model, task, *length, seed=stream) for length in lengths]
                               for stream in (1, 2)]
        if COUNTING.items() <= cell.items():
            row["count"] = count(model, task)
        record(study.name, row)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.arms",
                                     description=__doc__.split("\n")[0])
    parser.add_argument("--run", metavar="PART", nargs="?", const="all", choices=["all", *STUDIES],
                        help=f"make the missing cells, of all parts or one: {', '.join(STUDIES)}")
    args = parse(parser, argv)

    parts = [*STUDIES] if args.run in (None, "all") else [args.run]
    for part in parts:
        if args.run:
            make_missing(STUDIES[part])
        STUDIES[part].show(records(STUDIES[part].name))


if __name__ == "__main__":
    run(main)
