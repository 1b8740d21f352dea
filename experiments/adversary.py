"""Do trained models keep a belief?  The paper's adversary, and what training shows of it.

The adversary repeats one cycle: an exchange behind a coin of 1/2, which never happens, and a
`print` of the first of the two variables. The belief ahead of each reveal is the same. The paper
says that linear RNNs, which cannot divide, can be worse here than non-linear ones. A quarter of the
training batches are repetitions of the cycle, too. In honest ones the coin falls as it falls: k
equal reveals then have probability 2^-k. Forced ones are runs of equal reveals, as in the test.

Training and test show the same pattern, the FIRST of the pair. Whether a model that keeps it would
keep another one is not tested here.

Finding, on swaps of S3. A run has learned if it is within 0.1 nats of the filter on random programs
of its training length, (16,4). It keeps the belief if it is also within 0.05 nats at cycle 64. All
27 linear RNNs with beta <= 2 and 7 of 9 with beta <= 1 have learned, and none of 40 LSTMs and
Transformers, so the study cannot compare linear with non-linear. Of those that have learned none of
10 keeps the belief after honest repetitions, and 20 of 21 do where training forces runs of up to 16
cycles or more. So linearity alone does not decide: hold_pair, a head of the delta rule built by
hand, keeps the belief for ever.

    python -m experiments.adversary          # the table, from results/adversary.jsonl
    python -m experiments.adversary --run    # makes what is missing, 1 to 12 minutes a run

Source: Siems et al. 2026 (arXiv 2602.14814), figure 10 (the cycle).

Next: words.py.
"""

from functools import partial

import numpy as np
import torch

from data import Group, draw_commands, generator, run
from experiments import FALLING, chapter, grid, k_of_n, make, records, span, table, where
from experiments.beliefs import CoinTask, evaluate, kl_from, loss_of
from experiments.plots import BLUE, GREEN, RED, canvas, count, draw, ticks_at
from models import LSTM, LinRNN, Transformer
from scan import delta_rule_recurrent, exchange_key
from train import Recipe


# --- 1. The task ----------------------------------------------------------------------------------

class RepetitionTask(CoinTask):
    """CoinTask, in which a quarter of the batches of stages with S > 1 are repetitions.

    It adds to CoinTask other schedules, that is kinds of programs. All but the first begin with S
    certain commands and a reveal. Then come again and again the same exchange, behind a coin of
    1/2, and the same reveal, of the first of the two variables.

        random       all is uniform, as in CoinTask
        adversarial  no coin lets the exchange happen
        honest       each coin falls as it falls
        forced       as adversarial, but the last coin is honest

    Training has S = 1 in its repetitions: honest ones of `cycles` cycles, forced ones of 1 to
    `cycles` cycles and one more with the honest coin, or half of each.
    """

    schedule = "random"  # what test_batch draws

    def __init__(self, group, commands="full", uncertain=0.25, cycles=4, repetitions="honest"):
        super().__init__(group, commands, uncertain)
        self.cycles = cycles
        self.repetitions = repetitions

    def test_batch(self, batch, length, spacing, rng):
        return self.batch_of(self.draw(batch, length, spacing, rng, self.schedule))

    def training_batch(self, batch, length, spacing, rng):
        if spacing == 1 or rng.random() >= 0.25:
            return self.batch_of(self.draw(batch, length, spacing, rng))

        schedule = self.repetitions
        if schedule == "half":
            schedule = rng.choice(["honest", "forced"])
        if schedule == "honest":
            traces = self.batch_of(self.draw(batch, 1 + self.cycles, 1, rng, schedule))
        else:
            length = 2 + rng.integers(1, self.cycles + 1)
            traces = only_last_reveal(self.batch_of(self.draw(batch, length, 1, rng, schedule)))

        # A stage is left on ordinary batches only: one pattern is soon learned, and says nothing of
        # the others.
        return traces._replace(best=None)

    def draw(self, batch, length, spacing, rng, schedule="random"):
        """The choices behind a batch of traces: a Program."""
        program = super().draw(batch, length, spacing, rng)
        if schedule == "random":
            return program

        # One exchange for each trace, whose first variable is shown.
        exchange = draw_commands(self.group, "swap", (batch,), rng)
        first = (exchange != np.arange(self.group.degree)).argmax(1)
        program.commands[:, spacing:] = exchange[:, None]
        program.asked[:] = first[:, None]

        # How the coins fall.
        program.probability[:] = 0.5
        program.probability[:, :spacing] = 1
        program.executed[:] = program.probability == 1
        if schedule == "honest":
            program.executed[:] |= rng.random((batch, length)) < 0.5
        if schedule == "forced":
            program.executed[:, -1] = rng.random(batch) < 0.5
        return program


def only_last_reveal(traces):
    """A CoinBatch in which only the last reveal of each trace counts, in the loss and elsewhere.

    The forced reveals before it would teach that coins never fall.
    """
    last = traces.reveals.copy()
    last[:, :-2] = False  # a trace ends with the answer and a new line
    targets = np.where(traces.reveals & ~last, -100, traces.targets)  # cross_entropy skips -100
    return traces._replace(targets=targets, reveals=last)


# --- 2. A linear recurrence can keep a belief -----------------------------------------------------

def hold_pair(shown, start):
    """A head of the delta rule, built by hand, that keeps the belief about a pair for ever.

    Rows of S are variables, columns are values. Coin and reveal have one key, with beta = 1:

        coin that may exchange x and y    k = (e_x - e_y) / sqrt 2, v = 0
                                          both rows become their mean: this is the belief
        x shows the value j               the same k, v = e_j / sqrt 2
                                          row x gains e_j / 2, and row y loses it

    The key never touches the sum of the two rows, which is all that the belief needs. What a reveal
    writes, the next coin erases. So nothing is halved, and nothing adds up.

    Shapes: shown integer [cycles], the values that x = 0 shows; start integer [n], the first values
            -> what is read of x ahead of each reveal, and after it: [cycles, n] each, float64.
    """
    cycles, n = len(shown), len(start)
    k = exchange_key(*torch.tensor([0, 1]), n).expand(2 * cycles, n)
    v = torch.zeros(cycles, 2, n, dtype=k.dtype)  # the coin, then the reveal
    v[torch.arange(cycles), 1, shown] = 0.5**0.5
    identity = torch.eye(n, dtype=k.dtype)
    q = identity[0].expand(2 * cycles, n)
    beta = torch.ones(2 * cycles, dtype=k.dtype)
    read, _ = delta_rule_recurrent(q, k, v.flatten(0, 1), beta, identity[start])
    return read[0::2], read[1::2]


# --- 3. The study ---------------------------------------------------------------------------------
#
# The recorded runs were made when repetitions, too, counted where a stage is left.

ARMS = {  # model, its options; conv_width 1 leaves out the local block
    "linrnn": (LinRNN, {}),
    "linrnn-beta1": (LinRNN, {"beta_max": 1.0}),
    "lstm": (LSTM, {}),
    "lstm-bare": (LSTM, {"conv_width": 1}),
    "transformer": (Transformer, {})}
KINDS = ["honest", "forced", "half"]
FIVE, THREE = range(10, 15), range(10, 13)
CELLS = [
    *grid(arm=["linrnn"], repetitions=KINDS, cycles=[32], seed=FIVE),
    *grid(arm=["lstm"], repetitions=["honest", "half"], cycles=[32], seed=FIVE),
    *grid(arm=["lstm"], repetitions=["forced"], cycles=[32], seed=THREE),
    *grid(arm=["linrnn", "lstm"], repetitions=["half"], cycles=[4, 16, 64], seed=THREE),
    *grid(arm=["linrnn"], repetitions=["honest"], cycles=[64], seed=THREE),
    *grid(arm=["lstm-bare", "linrnn-beta1", "transformer"], repetitions=KINDS, cycles=[32],
          seed=THREE)]

TESTS = [  # schedule, (L, S), traces
    ("random", (16, 4), 256),
    ("adversarial", (257, 1), 64),  # all its reveals have the same belief: few traces do
    ("honest", (65, 1), 256)]


def plan(cell):
    """Of four pairs of rates for each arm, on seed 100, these had the least KL."""
    task = RepetitionTask(Group("S3"), "swap", 0.25, cell["cycles"], cell["repetitions"])
    recipe = Recipe(curriculum=[(2, 1), (8, 1), (8, 2), (16, 4)], last_steps=2000, max_steps=8000,
                    lr=2e-3, matrix_lr=0.01, seed=cell["seed"])
    model_class, changed = ARMS[cell["arm"]]
    options = {"conv_width": task.conv_width, **changed}
    return task, partial(model_class, len(task.vocab), **options), recipe, TESTS


def measure(model, task, tests):
    """A row for each test. The schedule is that of the test traces: training does not read it."""
    results = []
    for schedule, stage, traces in tests:
        task.schedule = schedule
        results.append({"schedule": schedule, **evaluate(model, task, *stage, traces)})
    return results


# --- 4. The table ---------------------------------------------------------------------------------

LEARNED = 0.1  # nats on random programs of (16,4)
KEPT = 0.05  # nats at cycle 64; a coin that is taken for certain costs 0.69 and more


def nats(row, schedule, cycle=None):
    """KL from the filter of a run: at one cycle, or the mean over all reveals of the traces."""
    test, = where(row["results"], schedule=schedule)
    return test["kl"] if cycle is None else test["kl_by_position"][cycle]


def has_learned(row):
    """Whether a run is near the filter on traces as it was trained on."""
    return nats(row, "random") <= LEARNED


def keeps(row):
    """Whether a run has learned, and keeps the belief to cycle 64."""
    return has_learned(row) and nats(row, "adversarial", 64) <= KEPT


def kept(rows):
    """A column of the table: how many of the runs that have learned keep the belief."""
    return count([row for row in rows if has_learned(row)], keeps)


def column(*test):
    """A column of the table: nats."""
    return lambda rows: span([nats(row, *test) for row in rows], 3)


def show():
    task = RepetitionTask(Group("S3"), "swap")
    best = task.test_batch(256, 16, 4, generator(0, "test", 16, 4)).best
    rows = records("adversary")
    rows.sort(key=lambda row: (row["arm"], row["repetitions"], row["cycles"]))
    table("KL from the filter in nats, least-greatest of the seeds: random programs, cycles of\n"
          "the adversary, honest coins. Always the first of the pair is shown, as in training.\n"
          f"Learned: at most {LEARNED} at (16,4). Kept, of those: at most {KEPT} at cycle 64.\n"
          f"A uniform guess has {kl_from(best, 1 / 3).mean():.3f} at (16,4), and at each cycle "
          f"{np.log(3 / 2):.3f}.",
          rows, ["arm", "repetitions", "cycles"],
          {"learned": k_of_n(has_learned), "kept": kept, "(16,4)": column("random"),
           "cycle 64": column("adversarial", 64), "cycle 256": column("adversarial", 256),
           "honest 64": column("honest", 64)})

    ahead, _ = hold_pair(torch.zeros(4096, dtype=torch.long), torch.arange(3))
    belief = [round(share, 6) for share in ahead[-1].tolist()]
    print(f"\nhold_pair, built by hand, ahead of the reveal of cycle 4,096: {belief}")


def picture():
    """KL by cycle of the linear RNNs, beta <= 2, after repetitions of up to 32 cycles."""
    found = {}
    seeds = {}
    for kind, colour in zip(KINDS, (RED, BLUE, GREEN)):
        rows = records("adversary", arm="linrnn", repetitions=kind, cycles=32)
        kl = [where(row["results"], schedule="adversarial")[0]["kl_by_position"] for row in rows]
        found[kind] = range(1, 257), [by_cycle[1:] for by_cycle in kl], colour
        seeds[kind] = count(rows, keeps)

    figure, ((axes,),) = canvas(
        f"Linear RNNs keep the belief to cycle 64 on {seeds['honest']} seeds after honest\n"
        f"repetitions, on {seeds['forced']} after forced ones, on {seeds['half']} after both")
    axes.set(yscale="log", xlabel="cycles of the adversary, the first of the pair shown",
             ylabel="KL(filter, model) in nats")
    draw(axes, found, chance=np.log(3 / 2), trained=32)
    ticks_at(axes, [1, 4, 16, 64, 256])
    return figure


def main(argv=None):
    make_missing = partial(make, "adversary", CELLS, plan, measure, loss_of=loss_of, **FALLING)
    chapter(__doc__, show, make_missing, argv=argv)


if __name__ == "__main__":
    run(main)
