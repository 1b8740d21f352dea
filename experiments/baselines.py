"""Which model learns to track, and at what cost?

The test is the first reveal of a trace, where no earlier reveal can help; chance is 20%. All models
share one frame and read the same traces of S5. Each had its learning rates swept, and the rest of
the recipe was chosen for DeltaNet with beta <= 2.

Finding. From 15 million tokens, DeltaNet with beta <= 2 answers every first reveal, after 16
commands as after 2. With beta <= 1 it answers three of four after 8 commands, and is at chance
after 16. A Transformer of two layers and an LSTM are at chance after 4.

That is a price, not a limit. From 45 million tokens, beta <= 1 reaches 45% after 16 commands (one
seed). If training begins with swaps, one of three LSTMs passes all stages, after 84 million tokens;
DeltaNet needs 2 to 6. With beta <= 1, three seeds of that curriculum stay at chance after 16.

    python -m experiments.baselines [--run]    # --run: 1 to 80 minutes per missing run

Source: Siems et al. 2026 (arXiv 2602.14814), section 4.1. It trains DeltaNet[-1,1] (beta <= 2),
DeltaNet[0,1] (beta <= 1) and a Transformer, of about 265 million parameters each, and tests them at
(128,16) (figure 4). The LSTM, the swap curriculum and the test by first reveals are ours.
Next: inside.py.
"""

import math
from functools import partial

import numpy as np

from data import Group, ReplTask, draw_commands, run_cli
from experiments import (ALL_STAGES, COST, NAMES, Study, at, chapter, decaying, evaluate_all, grid,
                         percent, records, summary, table)
from experiments.groups import draw_sparse_commands, with_reveals
from experiments.plots import COLOURS, canvas, draw_lines, ticks_at
from models import LSTM, LinRNN, Transformer
from train import Config, lr_scale, train

MODELS = {
    "linrnn": LinRNN,
    "linrnn-beta1": partial(LinRNN, beta_max=1.0),
    "transformer": Transformer,
    "transformer-4": partial(Transformer, layers=4),
    "lstm": LSTM}

FIVE, THREE = range(70, 75), range(70, 73)


# --- 1. The same tokens ---------------------------------------------------------------------------

STAGES = [(2, 1), (4, 1), (8, 1), (16, 2), (32, 4), (64, 8)]
TESTS = [*STAGES, (128, 16)]

SETTINGS = [
    *grid(model=["linrnn", "linrnn-beta1", "transformer", "lstm"], millions=[15], seed=FIVE),
    *grid(model=["transformer-4"], millions=[15], seed=THREE),
    # Three times the tokens, for the models that were still learning.
    *grid(model=["linrnn-beta1", "transformer", "transformer-4", "lstm"], millions=[45],
          seed=[70])]


def run(setting, folder):
    """Train on all six stages at once, until so many million tokens are read.

    For train() these are two stages: nine tenths of the tokens, and the rest, over which it
    averages. The lengths in the curriculum mean nothing here, since draw_any_stage ignores them.
    """
    budget = 1e6 * setting["millions"]
    task = ReplTask(Group("S5"))
    config = Config(curriculum=[(2, 1), (64, 8)], pass_accuracy=0.0, pass_patience=1,
                    final_steps=10**9, seed=setting["seed"], **ALL_STAGES[setting["model"]])
    model = MODELS[setting["model"]](len(task.vocab))
    model, log = train(model, task, config, folder, resume=True,
                       draw=partial(draw_any_stage, budget=budget),
                       lr_scale=partial(cosine, budget=budget),
                       gives_up=lambda model, config, now: now.tokens >= budget)
    return summary(model, log) | {"results": first_reveals(model, task)}


def draw_any_stage(task, config, now, rng, budget):
    """A batch of one stage, drawn with probability proportional to 1 / L.

    So each stage shows equally many commands. Where every command has a reveal, commands are
    products of a few swaps. A batch counts once nine tenths of the budget are read.
    """
    weights = np.array([1 / length for length, _ in STAGES])
    length, spacing = STAGES[rng.choice(len(STAGES), p=weights / weights.sum())]
    shape = (config.batch, length)

    # Uniform commands are drawn even where sparse ones replace them. This keeps the random numbers
    # that follow as they were in the recorded runs.
    commands = draw_commands(task.group, "full", shape, rng)
    if spacing == 1:
        commands = draw_sparse_commands(task.group, shape, rng)
    batch = with_reveals(task, commands, spacing, rng)
    return batch, now.tokens + batch.inputs.size >= 0.9 * budget


def cosine(config, now, budget):
    """Learning rates that warm up, and then decay along a cosine to 0 after the last token."""
    return lr_scale(config, now) * (1 + math.cos(math.pi * now.tokens / budget)) / 2


def first_reveals(model, task):
    """The test of all three recipes on S5."""
    return evaluate_all(model, task, TESTS, traces=768, by_position=True)


# --- 2. The paper's recipe ------------------------------------------------------------------------

# 15,000 traces a stage, in batches of 3 times 12. Four stages are 30 million tokens.
PAPER_STAGES = [(8, 1, 417), (16, 2, 417), (32, 4, 417), (64, 8, 417)]


def run_paper(setting, folder):
    """Appendix A.1 with our small model: AdamW and the next-token loss alone, in float32.

    No trace repeats commands, no batch is dense, reveals have no extra weight, nothing is averaged.
    """
    task = ReplTask(Group("S5"), repeat_fraction=0.0)
    config = Config(curriculum=PAPER_STAGES, batch=36, optimizer="adamw", matrix_lr=5e-4, lr=5e-4,
                    dense_fraction=0.0, reveal_weight=0.0, average=False, seed=setting["seed"])
    model, log = train(LinRNN(len(task.vocab)), task, config, folder, resume=True,
                       lr_scale=paper_lr_scale)
    return summary(model, log) | {"results": first_reveals(model, task)}


def paper_lr_scale(config, now):
    """Learning rates that warm up over 5% of the steps, and decay along a cosine to a fifth."""
    total = sum(steps for _, _, steps in config.curriculum)
    warmup = round(0.05 * total)
    if now.step < warmup:
        return (now.step + 1) / warmup
    return 0.6 + 0.4 * math.cos(math.pi * (now.step - warmup) / (total - warmup))


# --- 3. The swap curriculum -----------------------------------------------------------------------

# (L, S, full commands in a trace); all other commands are swaps, in their short form.
SWAP_STAGES = [(2, 1, 0), (4, 1, 0), (8, 1, 0), (8, 2, 0),
               (8, 1, 1), (8, 1, 2), (8, 1, 5), (8, 1, 8),
               (8, 2, 8), (16, 2, 16), (16, 4, 16), (32, 4, 32), (64, 8, 64),
               (64, 8, 64)]  # the last one for final_steps, with learning rates that decay to 0
SHORT = 8  # the first eight stages


class Swap(list):
    """A command in its short form: `a, c = c, a`."""


class MixedTask(ReplTask):
    """Full commands and Swaps in one trace. Tests have full commands, as in every ReplTask."""

    def __init__(self, group):
        super().__init__(group)
        self.swaps = ReplTask(group, "swap")

    def command_line(self, g):
        if isinstance(g, Swap):
            return self.swaps.command_line(g)
        return super().command_line(g)


def draw_swaps(task, config, now, rng, earlier=0.2, sparse=0.3):
    """A batch of the stage, or sometimes of an earlier one.

    earlier: the fraction of batches that show an earlier stage. These do not count for passing.
    sparse: the fraction of full commands that are products of a few swaps.
    """
    stage = now.stage
    if stage and rng.random() < earlier:
        stage = rng.integers(stage)
    length, spacing, full = SWAP_STAGES[stage]
    shape = (config.batch, length)

    # Which commands are full is the same for all traces: they need equally many tokens.
    is_full = rng.permutation(length) < full
    commands = draw_commands(task.group, "full", shape, rng)
    is_sparse = rng.random(shape) < sparse
    commands[is_sparse] = draw_sparse_commands(task.group, shape, rng)[is_sparse]
    swaps = draw_commands(task.group, "swap", shape, rng)
    commands = np.where(is_full[:, None], commands, swaps)
    asked = rng.integers(task.group.degree, size=(config.batch, length // spacing))

    traces = [[g if full else Swap(g) for g, full in zip(trace, is_full)]
              for trace in commands.tolist()]
    return task.batch_of(map(task.trace, traces, asked.tolist())), stage == now.stage


def decaying_late(config, now, late=1.0):
    """Learning rates that decay over the last stage. late: their scale after the first 8 stages."""
    return decaying(config, now) * (late if now.stage >= SHORT else 1)


def out_of_tokens(model, config, now):
    """After 160 million tokens, or 45 million on one stage but the last."""
    on_this_stage = now.tokens - (now.stage_ends[-1] if now.stage_ends else 0)
    stuck = on_this_stage >= 45e6 and now.stage < len(SWAP_STAGES) - 1
    return stuck or now.tokens >= 160e6


SWAP_SETTINGS = grid(model=["linrnn", "linrnn-beta1", "lstm"], seed=range(230, 233))


def run_swaps(setting, folder):
    name = setting["model"]
    rates, scale = ALL_STAGES[name], decaying_late
    if name == "lstm":  # with these learning rates it was first seen to learn
        rates = rates | {"matrix_lr": 2.5e-3, "lr": 2.5e-3}
        scale = partial(decaying_late, late=0.4)
    config = Config(curriculum=[(L, S) for L, S, _ in SWAP_STAGES], batch=32, pass_accuracy=0.95,
                    pass_patience=4, final_steps=300, reveal_weight=5.0, average=False,
                    seed=setting["seed"], **rates)
    task = MixedTask(Group("S5"))
    model, log = train(MODELS[name](len(task.vocab)), task, config, folder, resume=True,
                       draw=draw_swaps, lr_scale=scale, gives_up=out_of_tokens)
    return summary(model, log) | {"results": first_reveals(model, task)}


# --- 4. How rare may reveals be? ------------------------------------------------------------------
#
# The paper's figure 3 fine-tunes a pretrained Transformer (Qwen3-0.6B-Base) on 64 commands of S5
# with a reveal after every 1 to 4. Ours start at random, on eight commands of S3.

SPACINGS = [1, 2, 4]
SPACING_SETTINGS = [
    *grid(commands=["swap", "full"], model=["linrnn", "transformer", "lstm"], spacing=SPACINGS,
          seed=[275]),
    # Further seeds, where that one showed a difference between models.
    *grid(commands=["swap", "full"], model=["linrnn"], spacing=SPACINGS, seed=[276, 277]),
    *grid(commands=["swap"], model=["transformer", "lstm"], spacing=[1, 2], seed=[276, 277])]


def run_spacings(setting, folder):
    """Eight commands of S3 from the first step on, and 100 more steps once they are passed."""
    stage = (8, setting["spacing"])
    config = Config(curriculum=[stage, stage], final_steps=100, dense_fraction=0.0,
                    seed=setting["seed"], **ALL_STAGES[setting["model"]])
    task = ReplTask(Group("S3"), setting["commands"], repeat_fraction=0.0)
    model = MODELS[setting["model"]](len(task.vocab))
    model, log = train(model, task, config, folder, resume=True,
                       gives_up=lambda model, config, now: now.tokens >= 12e6)
    return summary(model, log) | {"results": evaluate_all(model, task, [stage])}


STUDIES = [Study("baselines", SETTINGS, run),
           Study("baselines_paper", grid(seed=THREE), run_paper),
           Study("baselines_swaps", SWAP_SETTINGS, run_swaps),
           Study("baselines_spacings", SPACING_SETTINGS, run_spacings)]


# --- 5. The tables --------------------------------------------------------------------------------

def show():
    rows = sorted(by_model(records("baselines")), key=lambda row: row["millions"])
    rows += [row | {"model": "DeltaNet, the paper's recipe", "millions": 30}
             for row in records("baselines_paper")]
    table("The same tokens. All models get batches of 16 traces of all lengths from (2,1) to\n"
          "(64,8), sparse commands at S = 1, 50 steps of warm-up, cosine decay, and weight\n"
          "averaging over the last tenth. Accuracy in % at the first reveal of a trace, after 2\n"
          "to 16 commands, and at all reveals of (128,16), min-max over the seeds; chance is 20",
          rows, ["model", "millions"],
          {"seeds": lambda row: row["seed"]} | TESTED | {"parameters": COST["parameters"]})

    table("The swap curriculum. A stage (L,S)+k has k full commands per trace; the others are\n"
          "swaps. All models get batches of 32, reveals weigh 5, one batch in five shows an\n"
          "earlier stage, and a stage is passed at 95% in four batches in a row, of its own\n"
          "only. The LSTM has learning rates of 0.0025 up to (8,1)+8 and 0.001 after it. A run\n"
          "stops after 160 million tokens, or after 45 in one stage. Million tokens when a stage\n"
          "was passed; accuracy as above",
          by_model(records("baselines_swaps")), ["model", "seed"],
          {name_of(stage): passed(stage) for stage in (2, 3, 7, 11, 12)}
          | {"end": COST["million tokens"], "stopped in": stopped_in} | TESTED)

    table("How rare may reveals be? Eight commands of S3 from the first step on, with a reveal\n"
          "after every S of them, until three batches in a row reach 97%. Million tokens read by\n"
          "then, or >12 where a run stopped; a number for each seed",
          by_model(records("baselines_spacings")), ["commands", "model"],
          {f"S = {S}": until_passed(S) for S in SPACINGS}, spread=lambda texts, _: " ".join(texts))


def until_passed(spacing):
    """A column: million tokens read until eight commands were passed."""
    def column(row):
        if row["spacing"] == spacing:
            return f"{row['left'][0] / 1e6:.1f}" if row["left"] else ">12"
    return column


def by_model(rows):
    return sorted(rows, key=lambda row: [*MODELS].index(row["model"]))


def first_reveal(row, spacing):
    """Accuracy at the first reveal of the traces with this spacing, in whole %."""
    return round(100 * at(row, length=8 * spacing, spacing=spacing)["by_position"][0])


TESTED = {"after 2": partial(first_reveal, spacing=2), "4": partial(first_reveal, spacing=4),
          "8": partial(first_reveal, spacing=8), "16": partial(first_reveal, spacing=16),
          "(128,16)": percent(128)}


def name_of(stage):
    length, spacing, full = SWAP_STAGES[stage]
    return f"({length},{spacing})+{full}"


def passed(stage):
    """A column: million tokens read when this stage was passed."""
    return lambda row: row["left"][stage] / 1e6 if stage < len(row["left"]) else None


def stopped_in(row):
    """A column: the stage that a run did not pass."""
    stage = len(row["left"])
    return name_of(stage) if stage < len(SWAP_STAGES) - 1 else None


# --- 6. The pictures ------------------------------------------------------------------------------

def picture():
    """Accuracy at the first reveal of a trace, by the commands before it."""
    before = [1, 2, 4, 8, 16]
    found = {}
    for model in MODELS:
        runs = records("baselines", model=model, millions=15)
        percents = [[first_reveal(row, S) for S in before] for row in runs]
        found[NAMES[model]] = before, percents, COLOURS[model]

    figure, ((axes,),) = canvas("After 16 commands DeltaNet with β ≤ 2 knows every value,\n"
                                "and the others guess: 15 million tokens each")
    axes.set(ylim=(0, 104), ylabel="accuracy at the first reveal in %",
             xlabel="commands before the first reveal of a trace")
    draw_lines(axes, found, 20)
    ticks_at(axes, before)
    return figure


def picture_of_swaps():
    """The stages of the swap curriculum, by the tokens read when each was passed."""
    figure, ((axes,),) = canvas("Led by swaps, one of three LSTMs passes all stages, after 84 "
                                "million tokens.\nDeltaNet does so after 2 to 6, and with β ≤ "
                                "1 it is stopped at 16 or 32 commands")
    for row in records("baselines_swaps"):
        colour = COLOURS[row["model"]]
        passed = [tokens / 1e6 for tokens in row["left"]]
        axes.plot(passed, range(len(passed)), "o-", markersize=4, color=colour)
        if stopped_in(row):
            axes.plot(row["tokens"] / 1e6, len(passed), "x", color=colour)
    for model in ("linrnn", "linrnn-beta1", "lstm"):
        axes.plot([], [], "o-", markersize=4, color=COLOURS[model], label=NAMES[model])
    axes.plot([], [], "x", color="black", label="stopped in this stage")
    axes.legend(frameon=False, loc=(0.44, 0.28))
    stages = range(len(SWAP_STAGES) - 1)
    axes.set(xscale="log", xlabel="million tokens read when the stage was passed", yticks=stages,
             yticklabels=map(name_of, stages), ylabel="(commands, commands per reveal)\n"
             "+ full commands; the others are swaps")
    ticks_at(axes, [0.3, 1, 3, 10, 30, 100])
    return figure


def main(argv=None):
    chapter(__doc__, show, STUDIES, argv)


if __name__ == "__main__":
    run_cli(main)
