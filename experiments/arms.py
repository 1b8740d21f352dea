"""Which mixer learns to track, at what cost?

All arms have one frame, one curriculum and one batch; the optimiser and its rates are each arm's
own. There is an easy way in: where each command has a reveal, training shows products of a few
exchanges, and a stage (4,1) stands between (2,1) and (8,1). A run ends with its curriculum, or when
its tokens are spent. The second study asks how many commands may share a reveal.

Finding. On full commands of S5 beta <= 2 is through the curriculum on five seeds of five, after 3
million tokens, with a decay gate or without. After 45 million beta <= 1 still learns traces of 16
to 32 commands, the Transformer of 8, and of 16 with four layers, the LSTM of 4. Dense reveals are
needed for the first step only: behind the stage (2,1) the linear RNN learns S5 with a reveal after
every second command on all seeds, and without that stage on none.

    python -m experiments.arms          the tables, from the records
    python -m experiments.arms --run    first makes what has no record; 1 to 30 minutes a run

Sources: Siems et al. 2026 (arXiv 2602.14814), figure 3 (our second study) and 4 (our first). Yang
et al. 2024 (arXiv 2412.06464): the gated delta rule.

Next: inside.py.
"""

import itertools
from functools import partial

import torch
from torch import nn

from data import Group, ReplTask, run
from eval import LENGTHS
from experiments import (RATES, at, chapter, grid, k_of_n, make, millions, minutes, percent,
                         records, span, table, where)
from experiments.plots import BLUE, COLOURS, GREY, NAMES, canvas, count, dot, draw, ticks_at
from experiments.scale import ManyVariables
from models import LSTM, DeltaBlock, LanguageModel, LinRNN, Transformer
from scan import delta_product
from train import Recipe


# --- 1. The arms ----------------------------------------------------------------------------------

class GatedRNN(LanguageModel):
    """The gated delta rule as mixer, in the sizes of LinRNN."""

    def __init__(self, vocab_size, conv_width, beta_max=2.0):
        super().__init__(vocab_size, 64, 1, conv_width, lambda: GatedBlock(64, 4, beta_max))


ARMS = {
    "linrnn": LinRNN,
    "linrnn-beta1": partial(LinRNN, beta_max=1.0),
    "transformer": Transformer,
    "transformer-4": partial(Transformer, layers=4),
    "lstm": LSTM,
    "gated": GatedRNN,
    "gated-beta1": partial(GatedRNN, beta_max=1.0)}


def make_arm(arm, task):
    """The model of an arm, its weights random."""
    return ARMS[arm](len(task.vocab), conv_width=task.conv_width)


def relative(arm):
    """The arm whose rates this one has: its own, or those of its nearest relative."""
    return arm.removesuffix("-4").replace("gated", "linrnn")


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
CELLS = [
    *grid(arm=["linrnn", "linrnn-beta1", "transformer", "lstm"], millions=[15],
          seed=range(10, 15)),
    *grid(arm=["transformer-4", "gated", "gated-beta1"], millions=[15], seed=range(10, 13)),
    # Three times the tokens, for the arms that were still learning.
    *grid(arm=["linrnn-beta1", "transformer", "lstm"], millions=[45], seed=range(10, 13)),
    *grid(arm=["transformer-4"], millions=[45], seed=[10])]

# By these rates an arm passes (2,1) on the most seeds of a grid, and then after the fewest tokens
# (the grid is recorded in commit 1650e9a).
EASED_RATES = RATES | {"lstm": {"optimizer": "adamw", "lr": 4e-3, "matrix_lr": 4e-3}}


def plan(cell):
    """An arm through the curriculum, as far as its tokens carry. The tests are uniform commands."""
    task = ManyVariables(Group("S5"))
    recipe = Recipe(curriculum=STAGES, max_steps=10**6, seed=cell["seed"],
                    **EASED_RATES[relative(cell["arm"])])
    return task, partial(make_arm, cell["arm"], task), recipe, TESTS


DEFAULT_CELLS = grid(seed=range(20, 25))


def plan_default(cell):
    """The run of `python train.py --model linrnn --group S5 --seed N`, without the easy way in."""
    task = ReplTask(Group("S5"))
    return task, partial(make_arm, "linrnn", task), Recipe(seed=cell["seed"]), LENGTHS


# --- 3. How many commands may share a reveal? -----------------------------------------------------

SPACINGS = [1, 2, 4, 8]
SPACING_CELLS = [
    *grid(group=["S5"], arm=["linrnn"], millions=[4], first=["", "(2,1)"], spacing=SPACINGS,
          seed=range(3)),
    *grid(group=["S3"], arm=["linrnn", "linrnn-beta1", "transformer"], millions=[3],
          first=["", "(2,1)"], spacing=SPACINGS, seed=range(3)),
    *grid(group=["S3"], arm=["lstm"], millions=[12], first=["", "(2,1)"], spacing=SPACINGS,
          seed=range(3))]


def plan_spacing(cell):
    """Traces of 8 commands, a reveal after every S, alone or behind the stage (2,1).

    The stage (8,S) ends when it is learned; then it goes on for the steps of a last stage.
    """
    task = ReplTask(Group(cell["group"]))
    stage = (8, cell["spacing"])
    before = [(2, 1)] if cell["first"] else []
    recipe = Recipe(curriculum=[*before, stage, stage], max_steps=10**6, seed=cell["seed"],
                    **RATES[cell["arm"]])
    return task, partial(make_arm, cell["arm"], task), recipe, [stage]


def make_missing():
    make("default", DEFAULT_CELLS, plan_default)
    make("arms_eased", CELLS, plan)
    make("arms_spacing", SPACING_CELLS, plan_spacing)


# --- 4. The tables --------------------------------------------------------------------------------

def show():
    for cap in (15, 45):
        table(f"Full commands of S5 by the easy way in, to {cap} million tokens: runs through it, "
              "length of the\nstage reached, million tokens read; reveals right in % (a guess has "
              "20)", records("arms_eased", millions=cap), ["arm"],
              {"through": k_of_n(is_through), "stage": stage, "tokens": millions,
               "minutes": minutes, "(4,1)": percent(4), "(8,1)": percent(8),
               "(16,2)": percent(16), "(128,16)": percent(128)})

    table("The default command, five seeds: reveals right in %",
          records("default"), ["seed"], {"read": millions, "minutes": minutes, **{
              f"({length},{spacing})": percent(length) for length, spacing in LENGTHS}})

    table("Traces of 8 commands, a reveal after every S, alone or behind another stage: runs that "
          "learned\nthem, with over 97% of the reveals in three batches in a row",
          records("arms_spacing"), ["group", "arm", "first"],
          {f"S={S}": learned(S) for S in SPACINGS})


def is_through(row):
    """Whether a run got through its curriculum."""
    return row["finished"]


def stage(rows):
    """A column of a table: the length of the last stage that was reached."""
    return span([STAGES[row["stage_reached"] - 1][0] for row in rows], 0)


def learned(spacing):
    """A column of a table: how many of the runs with this spacing are through."""
    return lambda rows: k_of_n(is_through)(where(rows, spacing=spacing))


# --- 5. The pictures ------------------------------------------------------------------------------

def picture():
    """Accuracy by the commands read, in traces of (16,2) on the left and of (128,16) on the right.
    """
    rows = {arm: records("arms_eased", arm=arm, millions=15)
            for arm in ("linrnn", "linrnn-beta1", "lstm", "transformer", "transformer-4")}
    solved = count(rows["linrnn"], lambda row: at(row, 128)["all"] > 0.99)
    figure, ((left, right),) = canvas("With β ≤ 2 the linear RNN tracks S5 to 128 commands "
                                      f"({solved} seeds);\nno other arm does, with over four "
                                      "times the tokens", 1, 2, (9, 3.9), sharey=True)
    found = {16: {}, 128: {}}
    for length, arm in itertools.product(found, rows):
        shares = [at(row, length)["by_position"] for row in rows[arm]]
        reads = range(length // 8, length + 1, length // 8)
        found[length][NAMES[arm]] = reads, shares, COLOURS[arm]

    left.set(ylim=(0, 1.02), ylabel="reveals right", xlabel="commands read, traces of (16,2)")
    right.set_xlabel("commands read, traces of (128,16)")
    draw(left, found[16], 0.2, named=False)
    draw(right, found[128], 0.2, trained=64)
    ticks_at(left, [2, 4, 8, 16])
    ticks_at(right, [16, 32, 64, 128])
    return figure


def picture_of_spacing():
    """Which runs learned traces of (8,S), alone and behind the stage (2,1), arm by arm."""
    rows = records("arms_spacing")
    twos = where(rows, group="S5", spacing=2)
    alone, behind = (count(where(twos, first=first), is_through) for first in ("", "(2,1)"))
    figure, ((axes,),) = canvas("With a reveal after every second command the linear RNN (β ≤ 2) "
                                f"learns S5\non {behind} seeds behind the stage (2,1), and on "
                                f"{alone} without it", size=(8, 4.4))
    for row in rows:
        name = f"{row['group']}, {NAMES[row['arm']]}, "
        name += "behind (2,1)" if row["first"] else "alone"
        marker, colour = ("o", BLUE) if is_through(row) else ("x", GREY)
        dot(axes, SPACINGS.index(row["spacing"]) + (row["seed"] - 1) / 8, name, marker, colour)
    axes.set(xticks=range(4), xticklabels=SPACINGS,
             xlabel="commands per reveal, S;   three seeds:   o  learned,   x  not learned")
    axes.invert_yaxis()
    return figure


def main(argv=None):
    chapter(__doc__, show, make_missing, argv=argv)


if __name__ == "__main__":
    run(main)
