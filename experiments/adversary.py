"""Do trained linear and non-linear models keep a belief?  The paper's adversary, and training.

The adversary repeats one cycle: an exchange behind a coin of 1/2, which never happens, and a
`print` of one of the two variables. The belief ahead of each reveal is the same. The paper expects
that a linear recurrence, which cannot divide, loses the belief. Honest repetitions of the cycle,
where the coin falls as it falls, show k equal reveals with probability 2^-k only. So a model that
is trained on them hardly ever sees the run of equal reveals that the test consists of.

Finding, on swaps of S3. After honest repetitions no linear RNN of 23 keeps the belief to cycle 64;
after those of 32 cycles five LSTMs of five do. What decides is the longest run that training shows:
where it forces runs of 16 cycles and more, 15 linear RNNs of 16 keep the belief. So linearity does
not forbid it, nor does it take beta > 1 or a head for each pair; hold_pair, a head built by hand,
keeps it for ever. Left empty: forced repetitions of other lengths than 32, and most longest runs of
the arms beside the linear RNN and the LSTM.

    python -m experiments.adversary             # the table, from results/adversary.jsonl
    python -m experiments.adversary --run 1     # makes the next missing cell (1 to 7 minutes)
    python -m experiments.adversary --control   # a probe finds a "counter" in untrained models, too

Source: Siems et al. 2026 (arXiv 2602.14814), figure 10 (the cycle).

Next: unseen.py.
"""

import argparse
import itertools

import torch

from data import Group, UserError, generator, number, one_line_errors, parse, run
from eval import evaluate_and_print
from experiments import record, records, span, train_arm
from experiments.arms import GatedRNN
from experiments.beliefs import CoinTask
from models import LSTM, LinRNN, Transformer
from scan import delta_rule_recurrent, exchange_key
from train import Recipe

IGNORED = -100  # the target of a token that counts in no loss: cross_entropy's own
REPEAT = 0.25  # share of the batches of sparse stages that are repetitions


# --- 1. The task ----------------------------------------------------------------------------------

class RepetitionTask(CoinTask):
    """CoinTask, in which a quarter of the batches of stages with S > 1 are repetitions.

    A repetition is one certain command and a reveal, and then again and again the same exchange
    behind a coin of 1/2 and the same reveal, of one of the two variables.
        honest   `cycles` times, and each coin falls as it falls
        forced   1 to `cycles` times, uniformly, and no coin lets the exchange happen. Then once
                 more with an honest coin. Only this last reveal counts in the loss.
        half     half of the repetitions are honest, half are forced

    Schedules besides those of CoinTask:
        honest   the coins of `adversarial` fall as they fall
        forced   `adversarial`, but the last coin is honest
        against  `random`, but each coin falls on its less likely side
    """

    def __init__(self, group, commands="full", uncertain=0.25, cycles=4, repetitions="honest"):
        if repetitions not in ("honest", "forced", "half"):
            raise UserError(f"repetitions must be honest, forced or half; got {repetitions}")
        super().__init__(group, commands, uncertain)
        self.cycles = cycles
        self.repetitions = repetitions

    def draw(self, batch, length, spacing, rng, schedule="random"):
        # These schedules are others, whose coins fall in another way.
        known = {"against": "random", "honest": "adversarial", "forced": "adversarial"}
        program = super().draw(batch, length, spacing, rng, known.get(schedule, schedule))
        if schedule == "against":
            p = program.probability
            program.executed[p == 0.25] = True
            program.executed[p == 0.75] = False
        if schedule == "honest":
            program.executed[rng.random((batch, length)) < 0.5] = True
        if schedule == "forced":
            program.executed[:, -1] = rng.random(batch) < 0.5
        return program

    def training_batch(self, batch, length, spacing, rng):
        if spacing == 1 or rng.random() >= REPEAT:
            return super().training_batch(batch, length, spacing, rng)

        forced = self.repetitions == "forced"
        if self.repetitions == "half":
            forced = rng.random() < 0.5
        if not forced:
            return self.batch_of(self.draw(batch, 1 + self.cycles, 1, rng, "honest"))

        # The forced reveals would teach that coins never fall. Ahead of the last one the filter's
        # prediction is true.
        count = rng.integers(1, self.cycles + 1)
        program = self.draw(batch, 2 + count, 1, rng, "forced")
        return only_last_reveal(self.batch_of(program))


def only_last_reveal(traces):
    """A Batch in which only the last reveal of each trace counts, in the loss and elsewhere."""
    others = traces.reveals[0].nonzero()[0][:-1]  # their places are the same in all traces
    targets = traces.targets.copy()
    reveals = traces.reveals.copy()
    targets[:, others] = IGNORED
    reveals[:, others] = False
    return traces._replace(targets=targets, reveals=reveals, best=traces.best[:, -1:])


# --- 2. A linear recurrence can keep a belief -----------------------------------------------------

def hold_pair(shown, start, x=0, y=1):
    """A head of the delta rule, built by hand, that keeps the belief about one pair for ever.

    Rows of S are variables, columns are values. Coin and reveal have one key, with beta = 1:

        coin that may exchange x and y    k = (e_x - e_y) / sqrt 2, v = 0
                                          both rows become their mean: this is the belief
        x shows the value j               the same k, v = e_j / sqrt 2
                                          row x gains e_j / 2, and row y loses it

    The key never touches the sum of the two rows, which is all that the belief needs. What a reveal
    writes, the next coin erases. So nothing is halved, and nothing adds up.

    Shapes: shown integer [cycles], the values that x shows; start integer [n], the first values
            -> what is read of x ahead of each reveal, and after it: [cycles, n] each, float64.
    """
    cycles, n = len(shown), len(start)
    k = exchange_key(torch.tensor(x), torch.tensor(y), n).expand(2 * cycles, n)
    v = torch.zeros(cycles, 2, n, dtype=k.dtype)  # the coin, then the reveal
    v[torch.arange(cycles), 1, shown] = 0.5**0.5
    q = torch.eye(n, dtype=k.dtype)[x].expand(2 * cycles, n)
    beta = torch.ones(2 * cycles, dtype=k.dtype)
    S_0 = torch.eye(n, dtype=k.dtype)[start]

    read, _ = delta_rule_recurrent(q, k, v.flatten(0, 1), beta, S_0)
    return read[0::2], read[1::2]


# --- 3. What a probe of the state does not show ---------------------------------------------------

@torch.no_grad()
def count_read_off(model, task, cycles=64):
    """How well a linear map reads the number of the cycle off the state: R^2 on other traces.

    1 is exact, 0 is no better than the mean. A linear recurrence that reads the same line again
    adds the same write again. So it reaches 1 with random weights, too: such a probe, and a state
    that grows, say nothing about what a trained model does with the count.
    """
    program = task.draw(128, 1 + cycles, 1, generator(0, "valid"), "adversarial")
    batch = task.batch_of(program)

    # What the last mixer holds ahead of each revealed value.
    state = None
    begin = 0
    features = []
    for place in batch.reveals[0].nonzero()[0]:
        _, state = model.stream(torch.from_numpy(batch.inputs[:, begin:place + 1]), state)
        begin = place + 1
        held = state[-2]  # of the blocks [.., mixer, MLP]; an LSTM holds two tensors
        parts = held if isinstance(held, tuple) else (held,)
        features.append(torch.cat([part.reshape(128, -1) for part in parts], 1))
    x = torch.stack(features, 1).double()

    # Least squares with a small ridge on half of the traces. The constant is left to the means.
    count = torch.arange(1.0 + cycles).double().repeat(64) - cycles / 2
    x = x - x[:64].mean((0, 1))
    known, other = x[:64].flatten(0, 1), x[64:].flatten(0, 1)
    gram = known.T @ known
    ridge = 1e-6 * gram.diagonal().mean() * torch.eye(len(gram))
    weights = torch.linalg.solve(gram + ridge, known.T @ count)

    missed = (other @ weights - count).square().sum() / count.square().sum()
    return 1 - float(missed)


def print_control():
    """R^2 of a linear read-out of the cycle's number, off models that were never trained."""
    task = RepetitionTask(Group("S3"), "swap")
    print("R^2 of the number of the cycle, read linearly off the state of untrained models")
    for model_class in (LinRNN, LSTM):
        found = []
        for seed in range(3):
            torch.manual_seed(seed)
            model = model_class(len(task.vocab), **task.model_options)
            found.append(f"{count_read_off(model, task):.3f}")
        print(f"{model_class.__name__:<8} seeds 0 to 2: {'  '.join(found)}")


# --- 4. The study ---------------------------------------------------------------------------------

ARMS = {  # model, its options; conv_width 1 leaves out the local block
    "linrnn": (LinRNN, {"beta_max": 2.0}),
    "lstm": (LSTM, {}),
    "lstm-bare": (LSTM, {"conv_width": 1}),
    "linrnn-beta1": (LinRNN, {"beta_max": 1.0}),
    "transformer": (Transformer, {}),
    "gated": (GatedRNN, {}),
    # Heads against pairs: hold_pair needs a head for each pair. S3 has three pairs, S4 has six.
    "linrnn-1-head": (LinRNN, {"d_model": 48, "heads": 1}),
    "linrnn-2-heads": (LinRNN, {"d_model": 48, "heads": 2}),
    "linrnn-3-heads": (LinRNN, {"d_model": 48, "heads": 3}),
    "linrnn-6-heads": (LinRNN, {"d_model": 48, "heads": 6})}
HEADS = [name for name in ARMS if "-head" in name]
CURRICULUM = [(2, 1), (8, 1), (8, 2), (16, 4)]
# Of four pairs of rates for each arm, on seed 100, these had the least KL.
# The rates fall to 0: a mean over the last stage would be older than its end.
RECIPE = {"max_steps": 8000, "lr": 2e-3, "matrix_lr": 0.01, "average": False}
USUAL = {"group": "S3", "uncertain": 0.25, "repeat": REPEAT, "last_steps": 2000}

TESTS = [  # schedule, (L, S) each, traces
    ("random", [(16, 4), (64, 4), (128, 4)], 256),
    ("adversarial", [(257, 1)], 64),  # all its reveals have the same belief: few traces do
    ("honest", [(65, 1)], 256),
    ("against", [(64, 4)], 256)]


def cells():
    """What --run makes, the most important cells first."""
    kinds = ["half", "honest", "forced"]
    others = ["lstm-bare", "linrnn-beta1", "transformer"]
    plan = [  # group, arms, repetitions, longest run, seeds
        (["S3"], ["linrnn"], kinds, [32], [10, 11, 12, 13, 14]),
        (["S3"], ["lstm"], ["half", "honest"], [32], [10, 11, 12, 13, 14]),
        (["S3"], ["gated", *others], ["half"], [32], [10, 11, 12]),
        (["S3"], HEADS, ["half"], [32], [10, 11, 12]),
        (["S3"], ["linrnn", "lstm"], ["half"], [4, 16, 64], [10, 11, 12]),
        (["S3"], ["linrnn"], ["honest"], [64], [10, 11, 12]),
        (["S4"], ["linrnn", *HEADS], ["half"], [32], [10, 11, 12]),
        (["S3"], ["lstm"], ["forced"], [32], [10, 11, 12]),
        (["S3"], others, ["honest", "forced"], [32], [10, 11, 12])]
    names = ["group", "arm", "repetitions", "cycles", "seed"]
    found = []
    for row in plan:
        for values in itertools.product(*row):
            found.append(USUAL | dict(zip(names, values)))
    return found


def make_cell(cell):
    """Train and test the arm of one cell, and record it, unless it is recorded."""
    make_model, options = ARMS[cell["arm"]]
    task = RepetitionTask(Group(cell["group"]), "swap", cell["uncertain"], cell["cycles"],
                          cell["repetitions"])
    options = task.model_options | options
    recipe = Recipe(curriculum=CURRICULUM, last_steps=cell["last_steps"], seed=cell["seed"],
                    **RECIPE)
    made = train_arm("adversary", cell, lambda: make_model(len(task.vocab), **options), task,
                     recipe)
    if made is None:
        return

    # A schedule is an attribute of the task, and none of it is used in training.
    model, summary = made
    results = {}
    for schedule, lengths, traces in TESTS:
        task.schedule = schedule
        results[schedule] = evaluate_and_print(model, task, lengths, traces)
    record("adversary", cell | summary | {"results": results})


# --- 5. The table ---------------------------------------------------------------------------------

COLUMNS = {  # title in the table: schedule of the test, cycle
    "cycle 16": ("adversarial", 16), "cycle 32": ("adversarial", 32),
    "cycle 64": ("adversarial", 64), "cycle 256": ("adversarial", 256),
    "honest 64": ("honest", 64), "random": ("random", None), "against": ("against", None)}
KEPT = 0.05  # nats at cycle 64; a coin that is taken for certain costs 0.69 and more


def column_of(row, schedule, cycle):
    """KL from the filter in nats: at one cycle, or of the longest traces; None if not tested."""
    tests = row["results"].get(schedule)
    if tests is None:
        return None
    if cycle is None:
        return tests[-1]["kl"]
    by_cycle = tests[0]["kl_by_position"]  # position 0 stands ahead of the first cycle
    return by_cycle[cycle] if cycle < len(by_cycle) else None


def print_table():
    """All recorded cells: training against tests. The cells of the usual training come first."""
    # The seeds of a cell together.
    found = {}
    for row in records("adversary"):
        usual = USUAL.items() <= row.items()
        key = (not usual, row["group"], row["uncertain"], row["last_steps"], row["repetitions"],
               row["cycles"], row["arm"])
        found.setdefault(key, []).append(row)

    print("KL from the filter in nats, least and greatest of the seeds: the adversary by cycle;\n"
          "honest coins; random programs of (128,4); (64,4), coins fall against the odds.\n"
          f"Kept: at most {KEPT} nats at cycle 64. P: share of uncertain commands.\n")
    titles = "".join(f"{title:<13}" for title in COLUMNS)
    print(f"{'':<4}{'P':<6}{'steps':<7}{'repetitions':<13}{'arm':<16}{'kept':<8}{titles}")
    for key in sorted(found):
        _, group, uncertain, last_steps, repetitions, cycles, arm = key
        rows = found[key]
        kept = sum(column_of(row, "adversarial", 64) <= KEPT for row in rows)
        line = (f"{group:<4}{uncertain:<6}{last_steps:<7}{f'{repetitions} {cycles}':<13}{arm:<16}"
                f"{f'{kept} of {len(rows)}':<8}")
        for column in COLUMNS.values():
            values = [column_of(row, *column) for row in rows]
            line += f"{'-' if None in values else span(values, 3):<13}"
        print(line)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.adversary",
                                     description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=number(1), nargs="?", const=10**6, metavar="N",
                        help="train N of the cells that are not recorded yet (default: all)")
    parser.add_argument("--control", action="store_true",
                        help="read the number of the cycle off untrained models")
    args = parse(parser, argv)
    if args.control:
        return print_control()
    if args.run is None:
        return print_table()

    with one_line_errors(parser):
        missing = [cell for cell in cells() if not records("adversary", **cell)]
        for place, cell in enumerate(missing[:args.run]):
            print(f"cell {place + 1} of {len(missing)} missing: {cell}", flush=True)
            make_cell(cell)


if __name__ == "__main__":
    run(main)
