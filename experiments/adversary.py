"""Do trained models keep a belief?  The paper's adversary, and what training shows of it.

The adversary repeats one cycle: an exchange behind a coin of 1/2, and a `print` of one of its two
variables, while no coin lets the exchange happen. The belief ahead of each reveal is the same. The
paper says that linear RNNs, which cannot divide, can be worse here than non-linear ones. A quarter
of the training batches are repetitions of such a cycle, too. They differ in the pattern of what is
shown, the first of the two variables, the second, or either, and in how the coins fall.

A run is *near* if it is within 0.1 nats of the filter on ordinary programs. It *keeps* the belief
if it is near, and within 0.05 nats at cycle 64. A uniform guess is 0.405 nats off there.

Finding, on swaps of S3. Yes, a linear RNN is worse here than an LSTM: one and the same reveal again
and again it keeps only where training forced it, for the variable that training showed, and else it
is 0.4 to 2.2 nats off at cycle 64. An LSTM that has seen honest coins only keeps it, on eight seeds
of eight; all LSTMs have some 3.3 times the steps. Half forced, with either variable at random, one
LSTM of three loses one of the patterns. To keep a belief is not beyond a linear recurrence. Where
training is mixed (each trace has a pattern of its own, inside a program that goes on) and half of
it is forced, five linear RNNs of five with beta <= 2 keep all patterns to the longest run of
training; either variable at random in each trace does not do (0 of 3). At four times that length
they are 0.05 to 0.14 nats off, or 0.01 to 0.02 after as many steps as the LSTMs, while hold_pair, a
head built by hand, keeps the belief for ever.

So a linear RNN keeps the cycle that training showed, pattern by pattern, and no other. After that
training, and as many steps as the LSTMs, it begins other cycles as the filter does, and then
drifts. With two coins in place of one, pairs in turn, an exchange with the third variable, or a
coin of 0.75 it is 0.1 to 0.7 nats off at reveal 64, and with two certain exchanges before the coin
1.0 to 1.1; a guess has 0.41, or 0.54 with the coin of 0.75. An LSTM carries over to some of them:
pairs in turn and the third variable cost it 0.04 to 0.08. But two certain exchanges it loses, too,
and on one seed of two the two coins and the coin of 0.75; the LSTM of a third seed is not near. So
neither has learned Bayes' rule.

Why. A cycle that comes again has the same tokens, so to one linear layer it is one affine map, S <-
A S + B, with the same A and B. The belief ahead of its reveal is the same each time. So what the
cycles before the last have left in S must not reach the answer, and where training never shows that
cycle, nothing teaches a model to keep it out.

    python -m experiments.adversary          # the tables, from the records
    python -m experiments.adversary --run    # makes what is missing, 2 to 50 minutes a run

Source: Siems et al. 2026 (arXiv 2602.14814), figure 10 (the cycle).

Next: repeats.py.
"""

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from data import Group, draw_commands, generator, run
from experiments import (FALLING, chapter, grid, k_of_n, make, make_arm, records, span, table,
                         where)
from experiments.beliefs import CoinTask, Program, kl_from, loss_of, nats_from_filter, width_of
from experiments.plots import BLUE, GREEN, NAMES, ORANGE, RED, canvas, count, draw, ticks_at
from models import LSTM, LinRNN, Transformer
from scan import delta_rule_recurrent, exchange_key
from train import Recipe

BEFORE, AFTER = 3, 3  # certain commands before the cycles, and after them


# --- 1. The task ----------------------------------------------------------------------------------

class RepetitionTask(CoinTask):
    """CoinTask, in which a quarter of the training batches with S > 1 are repetitions.

    A repetition is a program with S = 1: three certain commands, and then cycles. A cycle is an
    exchange behind a coin of 1/2, always the same one, and a reveal of one of its two variables.

    pattern  which of them is shown: always the first, always the second, both in turn, or either at
             random. mixed: each trace is of the pattern first, second or random, and three certain
             commands follow the cycles.
    coins    honest: each coin falls as it falls. forced: no coin but the last lets the exchange
             happen. half: half of the batches each.

    In training honest repetitions have `cycles` cycles, and forced ones 2 to `cycles` + 1.
    """

    def __init__(self, group, pattern="first", coins="honest", cycles=64, uncertain=0.25):
        super().__init__(group, "swap", uncertain)
        self.pattern = pattern
        self.coins = coins
        self.cycles = cycles

    def training_batch(self, batch, length, spacing, rng):
        if spacing == 1 or rng.random() >= 0.25:
            return super().training_batch(batch, length, spacing, rng)

        coins = self.coins
        if coins == "half":
            coins = rng.choice(["honest", "forced"])
        cycles = self.cycles if coins == "honest" else rng.integers(2, self.cycles + 2)
        after = AFTER if self.pattern == "mixed" else 0
        traces = self.batch_of(self.repetition(batch, self.pattern, coins, cycles, after, rng))
        if coins == "forced":
            traces = without_forced(traces, cycles)

        # A stage is left on ordinary batches only: one pattern is soon learned, and says nothing of
        # the others.
        return traces._replace(best=None)

    def repetition(self, batch, pattern, coins, cycles, after, rng):
        """The Program of traces with so many cycles, and with certain commands on both sides."""
        length = BEFORE + cycles + after
        commands = draw_commands(self.group, "swap", (batch, length), rng)
        asked = rng.integers(self.group.degree, size=(batch, length))
        probability = np.ones((batch, length))
        executed = np.ones((batch, length), bool)

        # One exchange for each trace. A stable sort puts its two variables first, in their order.
        cycle = slice(BEFORE, BEFORE + cycles)
        exchange = commands[:, BEFORE]
        commands[:, cycle] = exchange[:, None]
        stays = exchange == np.arange(self.group.degree)
        pair = stays.argsort(-1, kind="stable")[:, :2]
        asked[:, cycle] = np.take_along_axis(pair, draw_pattern(pattern, batch, cycles, rng), -1)

        probability[:, cycle] = 0.5
        executed[:, cycle] = rng.random((batch, cycles)) < 0.5
        if coins == "forced":
            executed[:, BEFORE:BEFORE + cycles - 1] = False
        return Program(commands, 1, asked, probability, executed)


def draw_pattern(pattern, batch, cycles, rng):
    """Whether the first or the second of the pair is shown, 0 or 1: integer [batch, cycles]."""
    at_random = rng.integers(2, size=(batch, cycles))
    if pattern == "mixed":
        kind = rng.integers(3, size=(batch, 1))  # 0 first, 1 second, 2 either at random
        return np.where(kind < 2, kind, at_random)
    shown = {"first": 0, "second": 1, "turn": np.arange(cycles) % 2, "random": at_random}[pattern]
    return np.broadcast_to(shown, (batch, cycles))


def without_forced(traces, cycles):
    """A CoinBatch in which forced reveals count nowhere: they would teach that coins never fall.

    The reveal after the last coin, which is honest, and those of certain commands count.
    """
    places = traces.reveals[0].nonzero()[0]  # the same in all traces
    reveals = traces.reveals.copy()
    reveals[:, places[BEFORE:BEFORE + cycles - 1]] = False
    targets = np.where(traces.reveals & ~reveals, -100, traces.targets)  # cross_entropy skips -100
    return traces._replace(targets=targets, reveals=reveals)


# Cycles that no training shows. A cycle is one block of lines or several, and each block ends in a
# reveal of the first variable of its last line. A line names the two variables that it exchanges,
# and with what probability: x and y are the pair of a trace, in their order, and z is the third.
OTHERS = {
    "as trained": [[("xy", 0.5)]],
    "two coins": [[("xy", 0.5), ("xy", 0.5)]],
    "pairs in turn": [[("xy", 0.5)], [("xz", 0.5)], [("yz", 0.5)]],
    "with the third": [[("yz", 1), ("xy", 0.5)]],
    "coin of 0.75": [[("xy", 0.75)]],
    "two certain": [[("xy", 1), ("xy", 1), ("xy", 0.5)]]}


def other_cycles(group, cycle, batch, reveals, rng):
    """The Program of traces of S3 with so many reveals of a cycle of OTHERS, all coins forced.

    Three blocks of certain commands, with a reveal each, come before.
    """
    blocks = OTHERS[cycle]
    spacing = len(blocks[0])
    before = BEFORE * spacing
    commands = draw_commands(group, "swap", (batch, before + reveals * spacing), rng)
    asked = rng.integers(3, size=(batch, BEFORE + reveals))
    probability = np.ones(commands.shape[:2])

    pair = rng.integers(3, size=batch)
    variables = dict(zip("xyz", np.array([[0, 0, 1], [1, 2, 2], [2, 1, 0]])[:, pair]))
    traces = np.arange(batch)
    for t in range(reveals):
        block = blocks[t % len(blocks)]
        for place, (names, p) in enumerate(block, before + t * spacing):
            first, second = variables[names[0]], variables[names[1]]
            commands[:, place] = np.arange(3)
            commands[traces, place, first] = second
            commands[traces, place, second] = first
            probability[:, place] = p
        asked[:, BEFORE + t] = first
    return Program(commands, spacing, asked, probability, probability == 1)


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

ARMS = {"linrnn": LinRNN, "linrnn-beta1": partial(LinRNN, beta_max=1.0), "lstm": LSTM,
        "transformer": Transformer}
CURRICULUM = [(2, 1), (8, 1), (8, 2), (16, 4)]

# The smallest rates of an arm, and what they are multiplied by to find the best.
MUON = {"optimizer": "muon", "lr": 1e-3, "matrix_lr": 5e-3}
ADAMW = {"optimizer": "adamw", "lr": 1e-3, "matrix_lr": 1e-3}
SMALLEST = {"linrnn": MUON, "linrnn-beta1": MUON, "transformer": MUON, "lstm": ADAMW}
RATE_CELLS = [*grid(arm=[*ARMS], factor=[1, 2, 4, 8], last_steps=[2000], seed=[100]),
              *grid(arm=["lstm"], factor=[1], last_steps=[8000], seed=[100])]

FIVE, THREE = range(10, 15), range(10, 13)
CELLS = [
    *grid(arm=["linrnn", "lstm"], pattern=["first"], coins=["half"], seed=THREE),
    *grid(arm=["linrnn", "lstm"], pattern=["random"], coins=["honest", "half"], seed=THREE),
    *grid(arm=["linrnn", "lstm"], pattern=["mixed"], coins=["honest", "half"], seed=FIVE),
    *grid(arm=["linrnn-beta1", "transformer"], pattern=["mixed"], coins=["half"], seed=THREE)]

# The factor of each arm that was best, and its last steps: more where 2,000 are not enough.
CHOSEN = {"linrnn": (2, 2000), "linrnn-beta1": (2, 2000), "lstm": (1, 5000),
          "transformer": (1, 5000)}

# Other cycles than the trained one are asked of runs of equally many steps. They are some that let
# an LSTM come near the filter, three times as many as a linear RNN needs.
OTHER_CELLS = grid(seed=range(100, 103), arm=["lstm", "linrnn"], pattern=["mixed"], coins=["half"])
EQUAL_STEPS = [450, 800, 750, 5000]

PATTERNS = ["first", "second", "turn", "random"]  # of the tests
CYCLES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def plan_rates(cell):
    """The ordinary task, by a multiple of the smallest rates."""
    task = CoinTask(Group("S3"), "swap")
    make_model = partial(make_arm, ARMS[cell["arm"]], task, width_of(task.group.degree))
    return task, make_model, recipe_of(**cell), None


def plan(cell):
    """An arm, by its best rates, with repetitions in a quarter of the batches."""
    task = RepetitionTask(Group("S3"), cell["pattern"], cell["coins"])
    recipe = recipe_of(cell["arm"], *CHOSEN[cell["arm"]], cell["seed"])
    make_model = partial(make_arm, ARMS[cell["arm"]], task, width_of(task.group.degree))
    return task, make_model, recipe, None


def plan_others(cell):
    """As plan, but each stage has the same steps for both arms."""
    task, make_model, recipe, tests = plan(cell)
    return task, make_model, replace(recipe, stage_steps=EQUAL_STEPS), tests


def recipe_of(arm, factor, last_steps, seed):
    """The same for all arms, but for the rates."""
    rates = SMALLEST[arm]
    return Recipe(curriculum=CURRICULUM, last_steps=last_steps, max_steps=8000, seed=seed,
                  optimizer=rates["optimizer"], lr=factor * rates["lr"],
                  matrix_lr=factor * rates["matrix_lr"])


def measure_rates(model, task, tests):
    """Nats from the filter on ordinary traces, of a stream that is not that of the tests."""
    drawn = task.test_batch(256, 16, 4, generator(0, "valid", 16, 4))
    nats, guess = nats_from_filter(model, task, drawn)
    return [{"kl": float(nats.mean()), "guess": float(guess.mean())}]


def measure(model, task, tests):
    """Nats from the filter: of ordinary traces, by the cycle, and after some cycles."""
    drawn = task.test_batch(256, 16, 4, generator(0, "test", 16, 4))
    nats, _ = nats_from_filter(model, task, drawn)
    results = [{"test": "ordinary", "nats": float(nats.mean())}]

    for coins in ("forced", "honest"):
        for number, pattern in enumerate(PATTERNS):
            rng = generator(0, "test", CYCLES[-1], number)
            nats = repetition_nats(model, task, pattern, coins, CYCLES[-1], 0, rng)
            by_cycle = [nats[BEFORE + cycles - 1] for cycles in CYCLES]
            results.append({"test": "cycles", "pattern": pattern, "coins": coins,
                            "nats": by_cycle})

            for cycles in CYCLES[::2]:
                rng = generator(0, "test", cycles, number)
                nats = repetition_nats(model, task, pattern, coins, cycles, AFTER, rng)
                results.append({"test": "going on", "pattern": pattern, "coins": coins,
                                "cycles": cycles, "nats": nats[-AFTER:]})

    return results


def measure_others(model, task, tests):
    """As measure, and nats from the filter by the reveal, in other cycles than the trained one."""
    results = measure(model, task, tests)
    for number, cycle in enumerate(OTHERS):
        rng = generator(0, "test", 64, 10 + number)
        drawn = task.batch_of(other_cycles(task.group, cycle, 32, 64, rng))
        nats, guess = nats_from_filter(model, task, drawn)
        results.append({"test": cycle, "nats": nats.mean(0)[BEFORE:].tolist(),
                        "guess": float(guess.mean(0)[-1])})
    return results


def repetition_nats(model, task, pattern, coins, cycles, after, rng):
    """The mean of 32 traces, at each reveal: a list."""
    drawn = task.batch_of(task.repetition(32, pattern, coins, cycles, after, rng))
    nats, _ = nats_from_filter(model, task, drawn)
    return nats.mean(0).tolist()


def make_missing():
    hooks = {"loss_of": loss_of, **FALLING}
    make("adversary_rates", RATE_CELLS, plan_rates, measure_rates, **hooks)
    make("adversary", CELLS, plan, measure, **hooks)
    make("adversary_others", OTHER_CELLS, plan_others, measure_others, **hooks)


# --- 4. The tables --------------------------------------------------------------------------------

NEAR = 0.1  # nats on ordinary traces of (16,4)
KEPT = 0.05  # nats at cycle 64; a coin that is taken for certain costs 0.69 and more
KEYS = ["arm", "pattern", "coins"]


def ordinary(row):
    """Nats on traces as all runs were trained on."""
    test, = where(row["results"], test="ordinary")
    return test["nats"]


def at_cycle(row, cycles, coins, *patterns):
    """Nats at a reveal of the repetitions: of these patterns of the test the worst."""
    found = []
    for pattern in patterns:
        test, = where(row["results"], test="cycles", pattern=pattern, coins=coins)
        found.append(test["nats"][CYCLES.index(cycles)])
    return max(found)


def going_on(row, most, coins):
    """Nats at the certain reveals after 1 to `most` cycles: the worst of all patterns."""
    tests = where(row["results"], test="going on", coins=coins)
    return max(max(test["nats"]) for test in tests if test["cycles"] <= most)


def is_near(row):
    """Whether a run is near the filter on traces as it was trained on."""
    return ordinary(row) <= NEAR


def keeps(row):
    """Whether a run is near, and keeps the belief, whatever pattern is forced."""
    return is_near(row) and at_cycle(row, 64, "forced", *PATTERNS) <= KEPT


def kept(rows):
    """A column of a table: how many of the runs that are near keep the belief."""
    return count([row for row in rows if is_near(row)], keeps)


def column(of, *args, digits=2):
    """A column of a table: nats, of the runs that are near."""
    return lambda rows: span([of(row, *args) for row in rows if is_near(row)], digits)


def show():
    table("Nats from the filter on ordinary traces, (16,4), by the rates: Muon 0.005 and AdamW "
          "0.001, for the\nLSTM AdamW 0.001, times a factor (a guess has 0.64)",
          records("adversary_rates"), ["arm", "last_steps"],
          {f"times {factor}": rates_column(factor) for factor in (1, 2, 4, 8)})
    show_patterns()

    task = CoinTask(Group("S3"), "swap")
    best = task.test_batch(256, 16, 4, generator(0, "test", 16, 4)).best
    table("The same runs: ordinary traces; the worst pattern of the test at cycle 256, and at "
          "cycle 64 with\nhonest coins; and three certain reveals after 1 to 64 cycles, forced "
          "and honest, and after 1 to\n256. A guess has "
          f"{kl_from(best, 1 / 3).mean():.2f} at (16,4), {np.log(1.5):.2f} in the cycles, and "
          f"{np.log(3):.2f} after them.",
          recorded(), KEYS,
          {"(16,4)": column(ordinary),
           "cycle 256": column(at_cycle, 256, "forced", *PATTERNS),
           "honest, 64": column(at_cycle, 64, "honest", *PATTERNS),
           "after 64": column(going_on, 64, "forced"),
           "honest": column(going_on, 64, "honest"),
           "after 256": column(going_on, 256, "forced")})
    show_others()

    ahead, _ = hold_pair(torch.zeros(4096, dtype=torch.long), torch.arange(3))
    belief = [round(share, 6) for share in ahead[-1].tolist()]
    print(f"\nhold_pair, built by hand: the belief ahead of the reveal of cycle 4,096 is {belief}")


def recorded():
    """The runs of the study, arm by arm."""
    return sorted(records("adversary"), key=lambda row: [*ARMS].index(row["arm"]))


def rates_column(factor):
    return lambda rows: span([row["results"][0]["kl"] for row in where(rows, factor=factor)], 3)


def show_patterns():
    """Patterns of training against patterns of the test."""
    table("Patterns of training against patterns of the test: nats from the filter at cycle 64, "
          "forced coins,\nleast-greatest of the runs that are near (at most "
          f"{NEAR} at (16,4)). Kept: at most {KEPT} in the last\nfour columns. A guess has "
          f"{np.log(1.5):.3f} in each.",
          recorded(), KEYS,
          {"near": k_of_n(is_near), "kept": kept,
           **{pattern: column(at_cycle, 64, "forced", pattern, digits=3) for pattern in PATTERNS}})

    missing = [cell for cell in CELLS if not records("adversary", **cell)]
    left_out = Counter(" ".join(cell[key] for key in KEYS) for cell in missing)
    if left_out:
        print("\nNot made yet:", ", ".join(f"{runs} {n}" for runs, n in left_out.items()))


def show_others():
    """Cycles that training did not show, after equally many steps."""
    runs = records("adversary_others")
    near = {arm: count(where(runs, arm=arm), is_near) for arm in ("linrnn", "lstm")}
    rows = []
    for cycle in OTHERS:
        row = {"cycle": cycle}
        for arm in near:
            tests = [test for one in runs if one["arm"] == arm and is_near(one)
                     for test in where(one["results"], test=cycle)]
            for place in (1, 4, 64):
                row[f"{arm} {place}"] = span([test["nats"][place - 1] for test in tests], 2)
        row["guess"] = f"{tests[0]['guess']:.2f}"
        rows.append(row)
    table("Other cycles than the trained one (mixed, half), after as many steps of both arms, "
          f"{sum(EQUAL_STEPS):,}:\nnats from the filter at reveals 1, 4 and 64 of the cycles, "
          "least-greatest of the runs that are near\n"
          f"({near['linrnn']} and {near['lstm']}). All coins are forced", rows, rows[0], {})
    table("The same runs on ordinary traces, and the worst pattern of the trained cycle",
          runs, ["arm"], {"(16,4)": column(ordinary),
                          "cycle 64": column(at_cycle, 64, "forced", *PATTERNS),
                          "cycle 256": column(at_cycle, 256, "forced", *PATTERNS)})


def picture():
    """Nats by the cycle, pattern by pattern of the test: rows are arms, columns are trainings."""
    trainings = [("first", "half"), ("random", "honest"), ("mixed", "half")]
    figure, panels = canvas("Trained on one pattern, or on honest coins, a linear RNN loses what "
                            "training did not show,\nand an LSTM less. Trained on a mix of forced "
                            "runs, both keep all patterns to cycle 64",
                            2, 3, (11, 6), sharex=True, sharey=True)
    for row, arm in zip(panels, ("linrnn", "lstm")):
        for axes, (pattern, coins) in zip(row, trainings):
            runs = records("adversary", arm=arm, pattern=pattern, coins=coins)
            found = {}
            for test, colour in zip(PATTERNS, (BLUE, RED, ORANGE, GREEN)):
                nats = [[at_cycle(trained, cycles, "forced", test) for cycles in CYCLES]
                        for trained in runs]
                found[test] = CYCLES, nats, colour
            axes.set_yscale("log")
            axes.set_title(f"{NAMES[arm]}; {pattern}, {coins}", fontsize=10, pad=16)
            draw(axes, found, chance=np.log(1.5), trained=64)
            ticks_at(axes, [1, 4, 16, 64, 256])
    figure.supxlabel("cycles of the adversary")
    figure.supylabel("nats from the filter")
    return figure


def main(argv=None):
    chapter(__doc__, show, make_missing, argv=argv)


if __name__ == "__main__":
    run(main)
