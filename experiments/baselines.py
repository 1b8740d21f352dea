"""Which model learns to track, and at what cost?

All models share one frame and one test: the first reveal of a trace, where no earlier reveal can
help. They are compared on the same 15 million tokens, and on a curriculum that begins with swaps
and lets in one full command after another.

Finding. All models read the same tokens of S5. At the first reveal after 16 commands DeltaNet with
beta <= 2 is right in all traces and on all seeds, with or without a decay gate. With beta <= 1 it
gets three of four right after 8 commands, and is at chance after 16. An LSTM and a Transformer of
two layers are at chance after 4.

This is a price, not a limit. On the swap curriculum one of three LSTMs passes all stages, after 84
million tokens. DeltaNet needs 2 to 6 million. The other two LSTMs diverge in the last stage, and
lose what they had learned. With beta <= 1 no seed passes (32,4), from 77 to 102 million tokens.

How rare may reveals be, if training starts with eight commands (S3)? One for every two commands
lets DeltaNet learn on all seeds, one for every four on half of them. The Transformer and the LSTM
learn swaps only. Learning rates were swept for each model; all else was chosen for DeltaNet.

    python -m experiments.baselines          the tables, from the records
    python -m experiments.baselines --run    first makes what is missing; 1 to 80 minutes a run

Sources: Siems et al. 2026 (arXiv 2602.14814), figure 4, and figure 3, where a pretrained model is
fine-tuned. Yang et al. 2024 (arXiv 2412.06464): the gated delta rule.
Next: inside.py.
"""

import copy
import math
import time
from functools import partial

import numpy as np
import torch
from torch import nn

from data import Group, ReplTask, draw_commands, generator, run_cli
from experiments import (ALL_STAGES, COST, NAMES, Study, at, chapter, decaying, evaluate_all, grid,
                         min_max, percent, records, summary, table)
from experiments.groups import draw_sparse_commands
from experiments.plots import COLOURS, canvas, draw_lines, ticks_at
from models import LSTM, DeltaBlock, LanguageModel, LinRNN, Transformer
from scan import delta_product
from train import Config, loss, make_optimizers, to_tensors, train


# --- 1. The models --------------------------------------------------------------------------------

class GatedRNN(LanguageModel):
    """The gated delta rule as mixer, in the sizes of LinRNN."""

    def __init__(self, vocab_size, conv_width=8, beta_max=2.0):
        super().__init__(vocab_size, 64, 1, conv_width, lambda: GatedBlock(64, 4, beta_max))


MODELS = {
    "linrnn": LinRNN,
    "linrnn-beta1": partial(LinRNN, beta_max=1.0),
    "transformer": Transformer,
    "transformer-4": partial(Transformer, layers=4),
    "lstm": LSTM,
    "gated": GatedRNN,
    "gated-beta1": partial(GatedRNN, beta_max=1.0)}


class GatedBlock(DeltaBlock):
    """DeltaBlock whose state decays by alpha in (1/2, 1), one number for each head and token."""

    def __init__(self, d_model, heads, beta_max):
        super().__init__(d_model, heads, beta_max, householders=1)
        self.gate = nn.Linear(d_model, heads)
        nn.init.constant_(self.gate.bias, 4.0)  # alpha starts near 0.99: forgetting is learned

    def forward(self, x, state=None):
        alpha_HT = (1 + self.gate(self.norm(x)).sigmoid().mT) / 2
        out, state = gated_product(*self.inputs_of_scan(x), alpha_HT, state)
        return x + self.out(self.out_norm(out).transpose(1, 2).flatten(2)), state


def gated_product(q, k, v, beta, alpha, state=None, piece=32):
    """S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, by the scan without a gate.

    Within a piece let A_t = alpha_1 ... alpha_t. Then S_t / A_t obeys the rule without the gate,
    with v_t / A_t instead of v_t. A_t must stay far from 0: alpha > 1/2 gives A_t > 2^-32.
    Shapes: those of delta_product, with R Householder steps per token; alpha [..., T].
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


# --- 2. The same tokens ---------------------------------------------------------------------------

STAGES = [(2, 1), (4, 1), (8, 1), (16, 2), (32, 4), (64, 8)]
TESTS = [*STAGES, (128, 16)]


def train_on_all_stages(model, task, config, budget):
    """Train on all six stages at once, until `budget` tokens are read. No stage must be passed.

    Warm-up, and a cosine that reaches 0 after the last token; an average over the last tenth.
    Returns: the averaged model, and what summary() needs to know.
    """
    average = copy.deepcopy(model)
    optimizers = make_optimizers(model, config)
    step = tokens = averaged = 0
    start = time.perf_counter()
    while tokens < budget:
        batch = draw_any_stage(task, config.batch, generator(config.seed, "train", step))
        batch = to_tensors(batch, "cpu")
        objective, _ = loss(model, batch, config)
        model.zero_grad()
        objective.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        scale = min(1.0, (step + 1) / config.warmup) * (1 + math.cos(math.pi * tokens / budget)) / 2
        for optimizer, peak in zip(optimizers, (config.matrix_lr, config.lr)):
            optimizer.param_groups[0]["lr"] = peak * scale
            optimizer.step()
        if tokens >= 0.9 * budget:
            averaged += 1
            for mean, parameter in zip(average.parameters(), model.parameters()):
                mean.data.lerp_(parameter.data, 1 / averaged)
        step += 1
        tokens += batch.inputs.numel()
    return average, {"step": step, "tokens": tokens, "stage": 0, "stage_ends": [],
                     "seconds": time.perf_counter() - start}


def draw_any_stage(task, batch, rng):
    """A batch of one stage, drawn with probability proportional to 1 / L.

    So each stage shows equally many commands. Where every command has a reveal, commands are
    products of a few swaps.
    """
    weights = np.array([1 / length for length, _ in STAGES])
    length, spacing = STAGES[rng.choice(len(STAGES), p=weights / weights.sum())]

    # Uniform commands are drawn even where sparse ones replace them. This keeps the random numbers
    # that follow as they were in the recorded runs.
    commands = draw_commands(task.group, "full", (batch, length), rng)
    if spacing == 1:
        commands = draw_sparse_commands(task.group, (batch, length), rng)
    asked = rng.integers(task.group.degree, size=(batch, length // spacing))
    return task.batch_of(map(task.trace, commands.tolist(), asked.tolist()))


# The gated models have the learning rates of DeltaNet.
LEARNING_RATES = ALL_STAGES | {"gated": ALL_STAGES["linrnn"],
                               "gated-beta1": ALL_STAGES["linrnn-beta1"]}

FIVE, THREE = range(70, 75), range(70, 73)
SETTINGS = [
    *grid(model=["linrnn", "linrnn-beta1", "transformer", "lstm"], millions=[15], seed=FIVE),
    *grid(model=["transformer-4", "gated", "gated-beta1"], millions=[15], seed=THREE),
    # Three times the tokens, for the models that were still learning.
    *grid(model=["linrnn-beta1", "transformer", "transformer-4", "lstm", "gated-beta1"],
          millions=[45], seed=[70])]


def run(setting, _):
    """Nothing is stored on the way: an interrupted training starts again."""
    task = ReplTask(Group("S5"))
    config = Config(seed=setting["seed"], **LEARNING_RATES[setting["model"]])
    model = MODELS[setting["model"]](len(task.vocab))
    model, last = train_on_all_stages(model, task, config, 1e6 * setting["millions"])
    return summary(model, [last]) | {"results": first_reveals(model, task)}


def first_reveals(model, task):
    """The test of both studies."""
    return evaluate_all(model, task, TESTS, traces=768, by_position=True)


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
    rates, scale = LEARNING_RATES[name], decaying_late
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
                    seed=setting["seed"], **LEARNING_RATES[setting["model"]])
    task = ReplTask(Group("S3"), setting["commands"], repeat_fraction=0.0)
    model = MODELS[setting["model"]](len(task.vocab))
    model, log = train(model, task, config, folder, resume=True,
                       gives_up=lambda model, config, now: now.tokens >= 12e6)
    return summary(model, log) | {"results": evaluate_all(model, task, [stage])}


STUDIES = [Study("baselines", SETTINGS, run), Study("baselines_swaps", SWAP_SETTINGS, run_swaps),
           Study("baselines_spacings", SPACING_SETTINGS, run_spacings)]


# --- 5. The tables --------------------------------------------------------------------------------

def show():
    show_first()
    show_swaps()
    show_spacings()


def show_first():
    """Accuracy at the first reveal of a trace, where no earlier reveal can help."""
    rows = sorted(by_model(records("baselines")), key=lambda row: row["millions"])
    table("The same tokens. All models get batches of 16 traces of all lengths from (2,1) to\n"
          "(64,8), sparse commands at S = 1, 50 steps of warm-up, cosine decay, and weight\n"
          "averaging over the last tenth. Learning rates: of the matrices, by Muon (LSTM:\n"
          "AdamW), and of the other parameters. State: the numbers that the mixers carry from\n"
          "token to token",
          rows, ["model"],
          {"parameters": COST["parameters"], "state": state_of, "learning rates": rates_of})
    table("Accuracy in % at the first reveal of a trace, after 2 to 16 commands, and at all\n"
          "reveals of (128,16), min-max over the seeds; chance is 20", rows, ["model", "millions"],
          {"seeds": lambda row: row["seed"]} | TESTED)


def show_swaps():
    """How far the same models get when swaps come first."""
    table("The swap curriculum. A stage (L,S)+k has k full commands per trace; the others are\n"
          "swaps. All models get batches of 32, reveals weigh 5, one batch in five shows an\n"
          "earlier stage, and a stage is passed at 95% in four batches in a row, of its own\n"
          "only. Learning rates as above, but the LSTM has 0.0025 up to (8,1)+8 and 0.001 after\n"
          "it. A run stops after 160 million tokens, or after 45 in one stage. Million tokens\n"
          "when a stage was passed; accuracy as above",
          by_model(records("baselines_swaps")), ["model", "seed"],
          {name_of(stage): passed(stage) for stage in (2, 3, 7, 11, 12)}
          | {"end": COST["million tokens"], "stopped in": stopped_in} | TESTED)


def show_spacings():
    """Whether a model learns at all when a reveal comes after every S commands."""
    table("How rare may reveals be? Eight commands of S3 from the first step on, with a reveal\n"
          "after every S of them, until three batches in a row reach 97%. Learning rates as\n"
          "above. Million tokens read by then, or >12 where a run stopped; a number for each seed",
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
    return round(100 * at(row, 8 * spacing, spacing)["by_position"][0])


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


def rates_of(row):
    """A column: the learning rates of the matrices and of the other parameters."""
    rates = LEARNING_RATES[row["model"]]
    return f"{rates['matrix_lr']:g}, {rates['lr']:g}"


def state_of(row):
    """A column: how many numbers the mixers carry from token to token."""
    model = MODELS[row["model"]](16)
    counts = []
    for length in (1, 2):
        _, states = model.stream(torch.zeros(1, length, dtype=torch.long))
        mixers = [part for part in states[1:] if part is not None]  # after the local block
        counts.append(sum(part.numel() for state in mixers for part in state))
    grown = counts[1] - counts[0]
    return f"{grown} per token" if grown else f"{counts[0]:,}"


# --- 6. The pictures ------------------------------------------------------------------------------

# Where the name of each model is written, and the point of its line that it belongs to.
NAMED_AT = {"linrnn": ((8.3, 108), (8, 100)), "linrnn-beta1": ((11.5, 75), (9.4, 66)),
            "transformer": ((2.9, 88), (2.2, 83)), "transformer-4": ((4.3, 65), (3, 60)),
            "lstm": ((1.2, 50), (1.8, 59))}


def picture():
    """Accuracy at the first reveal of a trace, by the commands before it."""
    before = [1, 2, 4, 8, 16]
    found = {}
    for model in NAMED_AT:
        runs = records("baselines", model=model, millions=15)
        percents = [[first_reveal(row, S) for S in before] for row in runs]
        found[NAMES[model]] = before, percents, COLOURS[model]
    perfect = min_max([first_reveal(row, 16) == 100
                       for row in records("baselines", model="linrnn", millions=15)])

    figure, ((axes,),) = canvas("After 16 commands DeltaNet with β ≤ 2 knows every value "
                                f"({perfect} seeds)\nand the others guess: 15 million tokens each")
    axes.set(ylim=(0, 114), ylabel="accuracy at the first reveal in %", yticks=range(0, 101, 20),
             xlabel="commands before the first reveal of a trace")
    draw_lines(axes, found, 20, named=False)
    ticks_at(axes, before)
    for model, (place, point) in NAMED_AT.items():
        axes.annotate(NAMES[model], point, place, color=COLOURS[model], va="center",
                      arrowprops={"arrowstyle": "-", "color": COLOURS[model], "relpos": (0, 0.5)})
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
