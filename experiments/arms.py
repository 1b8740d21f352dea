"""Which mixer learns to track, at what cost?

All arms have one frame and get the same: traces of all six stages at once, rates that fall to 0,
and the mean of the weights of the last tenth. Where each command has a reveal, training shows
products of a few exchanges, the easy way in; tests show uniform commands. A grid chose one factor
for the pair of rates and the optimiser that each arm had. Single runs tried what no factor reaches,
and none is better by a point: AdamW and ten times the warm-up for attention, Muon for the LSTM. The
batch, the clip, the convolution and the easy way in were found for the linear RNN, and all arms got
them. A second study asks how many commands may share a reveal.

Finding. From 15 million tokens of S5 the linear RNN with beta <= 2 learns all stages, with a decay
gate or without, on all seeds. Each reveal gives a value back, so what tells the arms apart is the
FIRST reveal of a trace, with none before it. After 2, 4, 8 and 16 commands beta <= 2 has it in 100%
of the traces. Beta <= 1 has it in 100, 99 to 100, 75 to 78, and 20 to 22%, where a guess has 20; on
one seed that read 45 million tokens, in 100, 100, 92, and 45%. A Transformer of two layers has it
in 55 to 100% after 2 commands, one of four layers in 100%, and the LSTM in 48 to 79%. After 4 of
these arms only four layers get above 25%, with 19 to 58%, and after 8 all three guess. On one seed
that read 45 million tokens four layers have 100% after 4 commands and 27 after 8, where two layers
and the LSTM have 22 and 23% after 4. An LSTM with as many numbers of state as the linear RNN has is
no better after 5 million tokens, on one seed.

Dense reveals are needed for the first step only: after the stage (2,1) the linear RNN learns S5
with a reveal after every second command on all seeds, and without that stage on none. Swaps of S5
it learns without it, with a reveal after every fourth command on all seeds. The Transformer learns
none of S3 here; of two variables it learns a reveal after every command on three seeds of three,
after every second one on two, and after every fourth on none.

    python -m experiments.arms          the tables, from the records
    python -m experiments.arms --run    first makes what has no record; 1 to 35 minutes a run

Sources: Siems et al. 2026 (arXiv 2602.14814), figure 4 for the first study. Their figure 3 asks the
question of the second, but in another experiment: there Qwen3-0.6B is fine-tuned on 64 commands of
S5, swaps and full ones, with S = 1 to 4. Yang et al. 2024 (arXiv 2412.06464): the gated delta rule.

Next: inside.py.
"""

import math
from collections import Counter
from functools import partial
from textwrap import fill

import numpy as np
import torch
from torch import nn

from data import Group, ReplTask, draw_commands, next_tokens, run
from eval import evaluate
from experiments import (RATES, at, chapter, grid, k_of_n, make, make_arm, millions, minutes,
                         percent, records, span, table, where)
from experiments.groups import draw_sparse_commands
from experiments.plots import BLUE, COLOURS, GREY, NAMES, canvas, count, dot, draw, ticks_at
from models import LSTM, DeltaBlock, LanguageModel, LinRNN, LSTMBlock, Transformer
from scan import delta_product
from train import WARMUP, Recipe


# --- 1. The arms ----------------------------------------------------------------------------------

class GatedRNN(LanguageModel):
    """The gated delta rule as mixer, in the sizes of LinRNN."""

    def __init__(self, vocab_size, conv_width, beta_max=2.0):
        super().__init__(vocab_size, 64, 1, conv_width, lambda: GatedBlock(64, 4, beta_max))


class WideLSTM(LanguageModel):
    """An LSTM of width 512 in the frame of LSTM: 1,024 numbers of state, as the delta rule has."""

    def __init__(self, vocab_size, conv_width):
        super().__init__(vocab_size, 60, 1, conv_width, lambda: WideLSTMBlock(60, 512))


ARMS = {
    "linrnn": LinRNN,
    "linrnn-beta1": partial(LinRNN, beta_max=1.0),
    "transformer": Transformer,
    "transformer-4": partial(Transformer, layers=4),
    "lstm": LSTM,
    "lstm-512": WideLSTM,
    "gated": GatedRNN,
    "gated-beta1": partial(GatedRNN, beta_max=1.0)}


def relative(arm):
    """The arm whose rates this one has: its own, or those of its nearest relative."""
    return arm.removesuffix("-512").replace("gated", "linrnn")


class WideLSTMBlock(nn.Module):
    """LSTMBlock between two matrices, from d_model to width and back."""

    def __init__(self, d_model, width):
        super().__init__()
        self.widen = nn.Linear(d_model, width, bias=False)
        self.wide = LSTMBlock(width)
        self.narrow = nn.Linear(width, d_model, bias=False)

    def forward(self, x, state=None):
        out, state = self.wide(self.widen(x), state)
        return x + self.narrow(out), state


class GatedBlock(DeltaBlock):
    """DeltaBlock whose state decays by alpha in (1/2, 1), a number for each head and token."""

    def __init__(self, d_model, heads, beta_max):
        super().__init__(d_model, heads, beta_max, householders=1)
        self.gate = nn.Linear(d_model, heads)
        nn.init.constant_(self.gate.bias, 4.0)  # alpha begins near 0.99: forgetting is learned

    def forward(self, x, state=None):
        alpha_HT = (1 + self.gate(self.norm(x)).sigmoid().mT) / 2
        out, state = gated_product(*self.inputs_of_scan(x), alpha_HT, state)
        return x + self.out(self.out_norm(out).transpose(1, 2).flatten(2)), state


def gated_product(q, k, v, beta, alpha, state=None, piece=32):
    """S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, by the scan without a gate.

    Inside a piece let A_t = alpha_1 ... alpha_t. Then S_t / A_t obeys the rule without the gate,
    with v_t / A_t in place of v_t. A_t must stay far from 0: alpha > 1/2 gives A_t > 2^-32.
    Shapes: those of delta_product, R writes a token; alpha [..., T].
    """
    out = []
    inputs = zip(q.split(piece, -2), k.split(piece, -3), v.split(piece, -3),
                 beta.split(piece, -2), alpha.split(piece, -1))
    for q_TK, k_TRK, v_TRV, beta_TR, alpha_T in inputs:
        decay_T1 = alpha_T.cumprod(-1).unsqueeze(-1)
        undecayed_TRV = v_TRV / decay_T1.unsqueeze(-1)
        out_TV, state = delta_product(q_TK, k_TRK, undecayed_TRV, beta_TR, state)
        out.append(decay_T1 * out_TV)
        state = decay_T1[..., -1:, :] * state
    return torch.cat(out, -2), state


# --- 2. How far does an arm come? -----------------------------------------------------------------

STAGES = [(2, 1), (4, 1), (8, 1), (16, 2), (32, 4), (64, 8)]
TESTS = [*STAGES, (128, 16)]


class AllStages(ReplTask):
    """Every batch is of one of the six stages, at random, in proportion to 1 / L.

    So no stage has to be learned before the next, and each has as many commands. Where each command
    has a reveal, commands are products of few exchanges.
    """

    def training_batch(self, batch, length, spacing, rng):
        shares = np.array([1 / length for length, _ in STAGES])
        length, spacing = STAGES[rng.choice(len(STAGES), p=shares / shares.sum())]

        # Uniform commands are drawn even where easy ones replace them, so that the random numbers
        # after them are those of the recorded runs.
        commands = draw_commands(self.group, self.commands, (batch, length), rng)
        if spacing == 1:
            commands = draw_sparse_commands(self.group, (batch, length), rng)
        asked = rng.integers(self.group.degree, size=(batch, length // spacing))
        return next_tokens(*self.write(commands, asked, spacing))


def cosine(recipe, progress, cap, warmup=WARMUP):
    """A hook of train(): the rates rise for `warmup` steps, and fall to 0 over `cap` tokens."""
    risen = min(1.0, (progress.step + 1) / warmup)
    return risen * (1 + math.cos(math.pi * progress.tokens / cap)) / 2


def in_last_tenth(recipe, progress, cap):
    """A hook of train(): the weights of the last tenth of the tokens enter the mean."""
    return progress.tokens >= 0.9 * cap


# A factor for both rates of RATES, whole runs, until the best lies inside. So the grid has one
# dimension: the ratio of the two rates, the optimiser and 50 steps of warm-up are those of RATES.
RATE_CELLS = [
    *grid(arm=["linrnn", "linrnn-beta1", "transformer", "transformer-4", "lstm"],
          factor=[0.25, 0.5, 1, 2], millions=[5], seed=[60]),
    *grid(arm=["lstm"], factor=[4, 8, 16], millions=[5], seed=[60]),
    *grid(arm=["transformer", "transformer-4"], factor=[4], millions=[5], seed=[60]),
    # As many numbers of state as the delta rule.
    *grid(arm=["lstm-512"], factor=[2, 8], millions=[5], seed=[60])]
FACTORS = {"linrnn": 0.5, "linrnn-beta1": 1, "transformer": 2, "transformer-4": 1, "lstm": 8}

# What a factor cannot reach: another optimiser, and ten times the steps of warm-up. AdamW has the
# pair of the LSTM, and Muon that of the Transformer.
PAIRS = {"adamw": RATES["lstm"], "muon": RATES["transformer"]}
TRIES = [*grid(arm=["transformer"], optimizer=["muon"], factor=[2], millions=[5], seed=[60]),
         *grid(arm=["transformer"], optimizer=["adamw"], factor=[1, 2, 4], millions=[5], seed=[60]),
         *grid(arm=["lstm"], optimizer=["muon"], factor=[1, 2, 4], millions=[5], seed=[60]),
         *grid(arm=["transformer-4"], optimizer=["adamw"], factor=[2], millions=[5], seed=[60]),
         *grid(arm=["transformer-4"], optimizer=["muon"], factor=[1], millions=[5], seed=[60])]
LONG_WARMUP = 500

FIVE, THREE = range(70, 75), range(70, 73)
CELLS = [
    *grid(arm=["linrnn", "linrnn-beta1", "transformer", "lstm"], millions=[15], seed=FIVE),
    *grid(arm=["transformer-4", "gated", "gated-beta1"], millions=[15], seed=THREE),
    # Three times the tokens, for the arms that were still learning.
    *grid(arm=["linrnn-beta1", "transformer", "transformer-4", "lstm", "gated-beta1"],
          millions=[45], seed=[70]),
    # With fewer tokens, to set beside the stages of train.py.
    *grid(arm=["linrnn"], millions=[4, 6], seed=FIVE)]


def plan(cell):
    """An arm on all stages at once, by its best rates. The tests are uniform commands."""
    arm = relative(cell["arm"])
    factor = cell.get("factor") or FACTORS[arm]
    rates = PAIRS[cell["optimizer"]] if "optimizer" in cell else RATES[arm.removesuffix("-4")]
    task = AllStages(Group("S5"))
    recipe = Recipe(curriculum=[STAGES[-1]], last_steps=10**6, seed=cell["seed"],
                    optimizer=rates["optimizer"], lr=factor * rates["lr"],
                    matrix_lr=factor * rates["matrix_lr"])
    return task, partial(make_arm, ARMS[cell["arm"]], task), recipe, TESTS


def measure(model, task, tests):
    return [evaluate(model, task, *stage, traces=768) for stage in tests]


def measure_rates(model, task, tests):
    """On traces that are not those of the tests."""
    return [evaluate(model, task, *stage, seed=60) for stage in tests]


def mean_accuracy(row):
    """What chooses a factor: the share of reveals that are right, the mean of the tests."""
    return np.mean([result["all"] for result in row["results"]])


# --- 3. How many commands may share a reveal? -----------------------------------------------------

SPACINGS = [1, 2, 4, 8]
SPACING_CELLS = [
    *grid(group=["S5"], arm=["linrnn"], millions=[4], first=["", "(2,1)"], spacing=SPACINGS,
          seed=range(3)),
    *grid(group=["S3"], arm=["linrnn", "linrnn-beta1", "transformer"], millions=[3],
          first=["", "(2,1)"], spacing=SPACINGS, seed=range(3)),
    *grid(group=["S3"], arm=["lstm"], millions=[12], first=["", "(2,1)"], spacing=SPACINGS,
          seed=range(3)),
    *grid(group=["S5 swap"], arm=["linrnn"], millions=[2], first=["", "(2,1)"], spacing=SPACINGS,
          seed=range(100, 103)),
    # A group that a Transformer learns where each command has a reveal.
    *grid(group=["S2"], arm=["transformer"], millions=[3], first=[""], spacing=SPACINGS,
          seed=range(100, 103))]


def plan_spacing(cell):
    """Traces of 8 commands, a reveal after every S, alone or after the stage (2,1).

    The stage (8,S) ends when it is learned; then it goes on for the steps of a last stage.
    """
    name, *commands = cell["group"].split()  # "S5", or "S5 swap"
    task = ReplTask(Group(name), *commands)
    stage = (8, cell["spacing"])
    before = [(2, 1)] if cell["first"] else []
    recipe = Recipe(curriculum=[*before, stage, stage], last_steps=150, max_steps=10**6,
                    seed=cell["seed"], **RATES[cell["arm"]])
    return task, partial(make_arm, ARMS[cell["arm"]], task), recipe, [stage]


def make_missing():
    for name, cells, of in [("arms_rates", RATE_CELLS, measure_rates), ("arms", CELLS, measure)]:
        for cap in sorted({cell["millions"] for cell in cells}):
            make(name, where(cells, millions=cap), plan, of, rate_of=partial(cosine, cap=1e6 * cap),
                 averaged=partial(in_last_tenth, cap=1e6 * cap))
    make("arms_tries", TRIES, plan, measure_rates, averaged=partial(in_last_tenth, cap=5e6),
         rate_of=partial(cosine, cap=5e6, warmup=LONG_WARMUP))
    make("arms_spacing", SPACING_CELLS, plan_spacing)


# --- 4. The tables --------------------------------------------------------------------------------

def show():
    show_first()
    show_arms()
    table("The grid of the rates: both of an arm, as RATES has them, times one factor. One run of\n"
          "5 million tokens each: reveals right in %, the mean of all tests, on other traces than\n"
          "those of the tables",
          in_order(records("arms_rates")), ["arm"],
          {str(factor): mean_at(factor) for factor in (0.25, 0.5, 1, 2, 4, 8, 16)})
    table("The same traces, one run each, with what no factor reaches: 500 steps of warm-up in "
          "place of\n50, and AdamW (both rates 0.0005) or Muon (0.001 and, for matrices, 0.005), "
          "times a factor",
          in_order(records("arms_tries")), ["arm", "optimizer"],
          {str(factor): mean_at(factor) for factor in (1, 2, 4)})

    table("Traces of 8 commands, a reveal after every S, alone or after another stage: runs that "
          "learned\nthem, with over 97% of the reveals in three batches in a row",
          records("arms_spacing"), ["group", "arm", "first"],
          {f"S={S}": learned(S) for S in SPACINGS})


def show_first():
    """The contrast that no reveal blurs: the first one of a trace."""
    rows = in_order(records("arms"))
    firsts = {f"after {S}": first_after(S) for S in (2, 4, 8, 16)}
    table("After 15 million tokens: the first reveal of a trace, after 2 to 16 commands with none\n"
          "before it, and all reveals of (128,16), right in %, least to greatest of the seeds (a\n"
          "guess has 20)", where(rows, millions=15), ["arm"],
          {"seeds": lambda rows: str(len(rows)), "weights": weights_of, "state": state_of, **firsts,
           "(128,16)": percent(128)})
    table("The same after 45 million tokens, one seed", where(rows, millions=45), ["arm"],
          {**firsts, "(128,16)": percent(128)})


def show_arms():
    """The arms on all stages at once, and how the stages of train.py compare."""
    rows = in_order(records("arms"))
    long = where(rows, millions=45)
    rows = where(rows, millions=15)
    right = {f"({length},{S})": percent(length) for length, S in TESTS}
    table("All stages at once, 15 million tokens: weights, numbers of state, and reveals right in "
          "%,\nleast to greatest of the seeds (a guess has 20)", rows, ["arm"],
          {"weights": weights_of, "state": state_of, **{
              test: right[test] for test in ("(2,1)", "(8,1)", "(16,2)", "(64,8)", "(128,16)")}})

    table("The same runs. The last columns are the reveals of (16,2) by the commands ahead of them,"
          "\n2 to 16: right in %, median of the seeds", rows, ["arm"],
          {"runs": lambda rows: str(len(rows)), "minutes": minutes, "(4,1)": right["(4,1)"],
           "(32,4)": right["(32,4)"], **{str(2 * i + 2): by_position(i) for i in range(8)}})

    table("All stages at once, 45 million tokens, one seed: reveals right in %",
          long, ["arm"], {"minutes": minutes, **right})
    missing = Counter((cell["arm"], cell["millions"])
                      for study, cells in [("arms", CELLS), ("arms_rates", RATE_CELLS),
                                           ("arms_tries", TRIES), ("arms_spacing", SPACING_CELLS)]
                      for cell in cells if not records(study, **cell))
    if missing:
        runs = [f"{arm} to {cap} million ({n})" for (arm, cap), n in missing.items()]
        print("\n" + fill(f"Not made yet: {', '.join(runs)}.", 100))

    table("The stages of train.py beside all stages at once, linear RNN: runs with 99.5% of the "
          "reveals at\n(64,8), and reveals right in %",
          side_by_side(), ["curriculum"],
          {"read": millions, "minutes": minutes, "reached": k_of_n(reaches), "(64,8)": percent(64),
           "(128,16)": percent(128)})


def in_order(rows):
    """The rows in the order of ARMS."""
    return sorted(rows, key=lambda row: [*ARMS].index(row["arm"]))


def is_learned(row):
    """Whether a run of picture_of_spacing learned its traces: it then ended before its cap."""
    return row["finished"]


def side_by_side():
    """The linear RNN by the stages of train.py, and by all stages at once with so many tokens."""
    # Both read uniform commands. The default command has runs besides (the chapter `repeats`).
    rows = [row | {"curriculum": "stages"} for row in records("repeats", recipe="old")]
    at_once = records("arms", arm="linrnn")
    for row in sorted(at_once, key=lambda row: row["millions"]):
        rows.append(row | {"curriculum": f"at once, {row['millions']} million"})
    return rows


def reaches(row):
    """Whether 99.5% of the reveals at (64,8) are right."""
    return at(row, 64)["all"] >= 0.995


def mean_at(factor):
    """A column of a table: what this factor of the rates gives."""
    return lambda rows: span([100 * mean_accuracy(row) for row in where(rows, factor=factor)])


def weights_of(rows):
    """A column of a table: how many weights."""
    return f"{rows[0]['parameters']:,}"


def first_after(spacing):
    """A column of a table: the first reveal of a trace, after so many commands and no reveal."""
    return lambda rows: span([first_reveal(row, spacing) for row in rows], 0)


def first_reveal(row, spacing):
    """How often the first reveal of the traces with this spacing is right, in %."""
    test = next(test for test in row["results"] if test["spacing"] == spacing)
    return 100 * test["by_position"][0]


def by_position(i):
    """A column of a table: the reveal number i of (16,2)."""
    return lambda rows: f"{100 * np.median([at(row, 16)['by_position'][i] for row in rows]):.0f}"


def state_of(rows):
    """A column of a table: how many numbers the mixers carry from token to token."""
    task = ReplTask(Group("S5"))
    model = make_arm(ARMS[rows[0]["arm"]], task)
    counts = []
    for length in (1, 2):
        _, states = model.stream(torch.zeros(1, length, dtype=torch.long))
        mixers = [part for part in states[1:] if part is not None]  # after the local block
        counts.append(sum(part.numel() for state in mixers for part in state))
    grown = counts[1] - counts[0]
    return f"{grown} a token" if grown else f"{counts[0]:,}"


def learned(spacing):
    """A column of a table: how many of the runs with this spacing learned."""
    return lambda rows: k_of_n(is_learned)(where(rows, spacing=spacing))


# --- 5. The pictures ------------------------------------------------------------------------------

def picture():
    """The first print of a program, by the lines before it; and all prints of (64,8)."""
    rows = {arm: records("arms", arm=arm, millions=15)
            for arm in ("linrnn", "linrnn-beta1", "lstm", "transformer", "transformer-4")}
    right = count(rows["linrnn"], lambda row: first_reveal(row, 16) > 99.5)
    figure, (panels,) = canvas("The first print after 16 lines: the linear RNN with −1 is right\n"
                               f"({right} seeds, 15 million tokens), and all others guess",
                               1, 2, (10.5, 3.9), sharey=True)
    firsts, along = {}, {}
    for arm, runs in rows.items():
        shares = [[first_reveal(row, S) / 100 for S in (1, 2, 4, 8, 16)] for row in runs]
        firsts[NAMES[arm]] = (1, 2, 4, 8, 16), shares, COLOURS[arm]
        shares = [at(row, 64)["by_position"] for row in runs]
        along[NAMES[arm]] = range(8, 65, 8), shares, COLOURS[arm]

    panels[0].set(ylim=(0, 1.02), ylabel="prints right",
                  xlabel="lines before the first print of a program")
    panels[1].set_xlabel("lines read, with a print after every 8")
    draw(panels[0], firsts, 0.2, named=[NAMES["linrnn"]])
    draw(panels[1], along, 0.2)
    ticks_at(panels[0], [1, 2, 4, 8, 16])
    ticks_at(panels[1], [8, 16, 32, 64])
    return figure


def picture_of_spacing():
    """Which runs learned programs of (8,S), after the stage (2,1) and without it, arm by arm."""
    rows = records("arms_spacing")
    twos = where(rows, group="S5", spacing=2)
    alone, after = (count(where(twos, first=first), is_learned) for first in ("", "(2,1)"))
    figure, ((axes,),) = canvas("With a print after every second line the linear RNN with −1 "
                                f"learns S5\non {after} seeds after the stage (2,1), and on "
                                f"{alone} without that stage", size=(8, 5.3))
    for row in rows:
        name = f"{row['group']}, {NAMES[row['arm']]}, "
        name += "after (2,1)" if row["first"] else "at once"
        marker, colour = ("o", BLUE) if is_learned(row) else ("x", GREY)
        place = SPACINGS.index(row["spacing"]) + (row["seed"] % 100 - 1) / 8
        dot(axes, place, name, marker, colour)
    axes.set(xticks=range(4), xticklabels=SPACINGS,
             xlabel="lines per print, S;   three seeds:   o  learned,   x  not learned")
    axes.invert_yaxis()
    return figure


def main(argv=None):
    chapter(__doc__, show, make_missing, argv=argv)


if __name__ == "__main__":
    run(main)
