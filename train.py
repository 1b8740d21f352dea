"""Train one model on one task: python train.py --model linrnn --group S5

Each step draws fresh traces. Training follows a curriculum of stages (length L, spacing S). A stage
is passed once the model gets `pass_accuracy` of the reveals right in `pass_patience` batches in a
row; the last stage takes `final_steps` steps. Training stops early if the stages before the last
one take more than `max_curriculum_steps` in all.

Two kinds of batches make the model more precise. From the command line (Config) both are on; from
Python (Recipe, ReplTask) you ask for them by `repeat_fraction` and `dense_fraction`.
    repeated commands   Small errors then accumulate until the loss can see them (data.py).
    dense reveals       The batch has more reveals than its stage and no lines that set the values,
                        as if the reader had joined the session late. A model that must learn the
                        values from reveals writes each one into its state; a model that never needs
                        reveals ignores them, and each then adds an error to the state.

The learning rates stay constant, so the parameters end up circling a solution. Their average over
the last stage is closer to it (Izmailov et al. 2018, arXiv 1803.05407), and is what train() returns
unless the last parameters do clearly better on fresh traces.

A run is a folder with model.pt, from which it can be resumed, and results.json, the closing table.
On one machine, a resumed run matches an uninterrupted one bit for bit.

From Python, you initialise the parameters: the seed of a Recipe draws only the traces.

    torch.manual_seed(0)
    model = LinRNN(len(task.vocab))
    model, log = train(model, task, Recipe(seed=0))

Next: experiments/one_page.py, or analysis.ipynb.
"""

import argparse
import copy
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from data import COMMANDS, Group, Parser, ReplTask, UserError, generator, run_cli, stages
from eval import LENGTHS, device_of, evaluate_and_print, find_device, make, read_checkpoint
from models import MODELS, options_of

WARMUP = 50  # steps over which the learning rates rise from 0
DENSER = (1, 1, 2, 4)  # spacings of a batch with dense reveals: half of them after every command
LOG_EVERY = 10  # steps
SAVE_EVERY = 50  # steps


# --- 1. What determines a run ---------------------------------------------------------------------
#
# The fields of both classes are the options of the command line: pass_accuracy is --pass-accuracy.

def option(default, help, **more):
    """A field and its help text. more: keywords for argparse."""
    return field(default=default, metadata={"help": help, **more})


@dataclass
class Recipe:
    """How a model is trained. For another batch, loss or schedule, override a method in a subclass
    (with @dataclass above it if it has new fields or defaults).

    Raises: UserError for an impossible number or stage.
    """

    # What is shown. The paper starts at (8, 1). We start at (2, 1), where a reveal depends on one
    # command or two, and the loss falls sooner.
    curriculum: tuple = option(((2, 1), (8, 1), (16, 2), (32, 4), (64, 8)),
                               "stages LENGTH:SPACING,... (default 2:1,8:1,16:2,32:4,64:8); any "
                              "others come without repeated commands and dense reveals")
    dense_fraction: float = option(0.0, "fraction of batches with dense reveals")
    batch: int = option(16, "traces per step")

    # When a stage is over. One good batch may be luck; three in a row are not.
    pass_accuracy: float = option(0.97, "reveal accuracy that a batch needs to pass a stage")
    pass_patience: int = option(3, "consecutive batches that must reach it")
    max_curriculum_steps: int = option(1500, "stop if the last stage is not reached by this step")
    final_steps: int = option(350, "steps of the last stage")

    # How the parameters move. Muon normalises the update, so its learning rate *is* the step size.
    # Doubling both trains as fast but less precisely: some seeds then fail at 256 commands.
    optimizer: str = option("muon", "optimiser of the matrices", choices=["muon", "adamw"])
    matrix_lr: float = option(0.01, "peak learning rate of the matrices")
    lr: float = option(2e-3, "peak learning rate of all other parameters")
    weight_decay: float = option(0.01, "weight decay of all parameters")
    reveal_weight: float = option(1.0, "weight of the extra loss on the revealed values")

    seed: int = option(0, "seed of the traces and of the initial parameters")
    compile: bool = option(False, "use torch.compile (pays off after about 2,000 steps)")

    def __post_init__(self):
        # Convert NumPy's numbers: torch.load(weights_only=True) rejects them.
        self.curriculum = tuple((int(length), int(spacing)) for length, spacing in self.curriculum)
        for stage in self.curriculum:
            ReplTask.check(*stage)
        if self.optimizer not in ("muon", "adamw"):
            raise UserError(f"optimizer must be muon or adamw; got {self.optimizer!r}")

        for part in fields(self):
            value = getattr(self, part.name)
            if part.type not in (int, float) or value is None:
                continue
            least = 1 if part.type is int and part.default != 0 else 0
            most = 1 if part.name.endswith(("accuracy", "fraction")) else 2**64 - 1  # largest seed
            # Comparisons with NaN are false, so NaN is refused as well.
            if not least <= value <= most or part.type(value) != value:
                raise UserError(f"{part.name} must be between {least} and {most} "
                                f"({part.type.__name__}); got {value}")
            setattr(self, part.name, part.type(value))

    def draw(self, task, progress, rng):
        """The batch of a step, and whether it counts towards passing the stage."""
        length, spacing = self.curriculum[progress.stage]
        denser = [S for S in DENSER if S < spacing and length % S == 0]
        if self.dense_fraction and denser and rng.random() < self.dense_fraction:
            batch = task.training_batch(self.batch, length, int(rng.choice(denser)), rng)
            return task.joined_late(batch), False
        return task.training_batch(self.batch, length, spacing, rng), True

    def loss(self, model, batch):
        """What to minimise, and the numbers for the log. batch: a Batch of tensors.

        The mean cross-entropy of all tokens, plus reveal_weight times that of the revealed values,
        since most other tokens of a random trace are unpredictable noise. A task without reveals
        needs another loss, whose reveal_accuracy is None, and stages that end by stage_steps.
        """
        logits = model(batch.inputs)  # [B, T, vocabulary]
        losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        losses = losses.view(batch.targets.shape)
        loss = losses.mean()

        # Boolean indexing has a data-dependent size and forces a GPU sync; multiply by the mask.
        count = batch.reveals.sum()
        reveal_loss = (losses * batch.reveals).sum() / count
        correct = (logits.argmax(-1) == batch.targets) & batch.reveals

        # One .tolist() for all metrics: a single sync.
        numbers = torch.stack([loss, reveal_loss, correct.sum() / count]).tolist()
        metrics = dict(zip(("loss", "reveal_loss", "reveal_accuracy"), numbers))
        return loss + self.reveal_weight * reveal_loss, metrics

    def lr_scale(self, progress):
        """The fraction of the peak learning rates at a step: one warm-up, then constant."""
        return min(1.0, (progress.step + 1) / WARMUP)

    def averages(self, progress):
        """Whether a step's parameters enter the average: in the last stage, if any was passed."""
        return progress.learned > 0 and progress.stage == len(self.curriculum) - 1

    def stage_steps(self, stage):
        """How many steps a stage takes; 0 for one that lasts until it is passed."""
        return self.final_steps if stage == len(self.curriculum) - 1 else 0

    def gives_up(self, progress):
        """Whether training ends after this step although its stages are not over."""
        return not self.stage_steps(progress.stage) and progress.step >= self.max_curriculum_steps


@dataclass
class Config(Recipe):
    """A run of the command line: a recipe, a task and a model, all as names and numbers.

    None means a default that depends on other fields. An option of a new model needs a field here.
    """

    model: str = option("linrnn", "linrnn is DeltaNet", choices=MODELS)
    group: str = option("S5", "S<n>, A<n>, Z<n> or D<n>; the other defaults suit n up to 7")
    commands: str = option("full", "full permutations, or swaps of two variables", choices=COMMANDS)

    # A curriculum that the user types is taken literally.
    repeat_fraction: float = option(None, "fraction of training traces with repeated commands "
                                    "(default 0.5, or 0 if --curriculum is given)")
    dense_fraction: float = option(None, "fraction of batches with dense reveals "
                                   "(default 0.25, or 0 if --curriculum is given)")

    d_model: int = option(None, "model width (default 64; transformer 56, lstm 60)")
    layers: int = option(None, "number of layers (default 1; transformer 2)")
    heads: int = option(None, "heads of linrnn and transformer (default 4)")
    beta_max: float = option(None, "linrnn: 2 allows the eigenvalue -1, 1 does not (default 2)")
    householders: int = option(None, "linrnn: Householder steps per token, R (default 1)")
    conv_width: int = option(None, "tokens that the local block sees (default n + 3)")

    # Above five variables lr shrinks as 1 / n, as it also moves the convolution, which adds up more
    # terms the wider it is. matrix_lr shrinks as 1 / sqrt n, which was found by trial.
    matrix_lr: float = option(None, "peak learning rate of the matrices (default 0.01 for S5)")
    lr: float = option(None, "peak learning rate of all other parameters (default 0.002 for S5)")

    lengths: tuple = option(LENGTHS, "rows LENGTH:SPACING,... of the closing table "
                            "(default 64:8,128:1,128:16,256:32)")
    traces: int = option(256, "test traces for each row of the closing table")
    chapter: str = ""  # the module of experiments/ that makes the task and the model

    def __post_init__(self):
        super().__post_init__()
        n = Group(self.group).degree
        shrink = min(1.0, 5 / n)
        default = self.curriculum == Config.curriculum
        options = options_of(self.model)
        follows = options | {"conv_width": n + 3,
                             "lr": 2e-3 * shrink, "matrix_lr": 0.01 * shrink**0.5,
                             "repeat_fraction": 0.5 if default else 0.0,
                             "dense_fraction": 0.25 if default else 0.0}
        for name, value in follows.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

        for name in ("heads", "beta_max", "householders"):
            if name not in options and getattr(self, name) is not None:
                raise UserError(f"model {self.model} has no option {name}")


@dataclass
class Progress:
    """Where a run stands: everything in a checkpoint except the tensors and the log."""

    step: int = 0  # steps made
    stage: int = 0  # index into the curriculum
    stage_step: int = 0  # steps made in this stage
    passes: int = 0  # consecutive batches that reached pass_accuracy
    learned: int = 0  # number (from 1) of the last stage that was passed
    averaged: int = 0  # steps in the average
    tokens: int = 0  # tokens read
    left: list = field(default_factory=list)  # tokens read when each stage was left
    seconds: float = 0.0  # spent in steps
    finished: bool = False
    returned: str = ""  # which parameters a finished run returns: "average" or "last"


# --- 2. The training loop -------------------------------------------------------------------------

def train(model, task, recipe, folder=None, resume=False):
    """Train a model on a task (data.py, section 2).

    model: a module, tokens [B, T] -> logits, on its device. Afterwards it holds the last
        parameters; the model that is returned may hold their average instead.
    folder: where checkpoints go. resume: continue the run in that folder, if there is one.

    Returns: the model to evaluate, in eval mode, and the log, a list of dicts.
    Raises: UserError for a folder that holds a run (without resume) or another run (with it), and
        for a gradient that is not finite.
    """
    # Everything that changes during training. A checkpoint holds exactly these and the log.
    optimizers = make_optimizers(model, recipe)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    average = copy.deepcopy(model)
    progress = Progress()
    log = []
    folder = folder and Path(folder).expanduser()
    if folder and (folder / "model.pt").exists():
        if not resume:
            raise UserError(f"{folder} already holds a run; choose another folder, or resume it "
                            f"(--resume {folder})")
        progress, log = restore(folder, recipe, model, average, optimizers)

    network = torch.compile(model, dynamic=True) if recipe.compile else model  # for any length
    model.train()
    last_stage = len(recipe.curriculum) - 1

    bar = tqdm(total=recipe.max_curriculum_steps + recipe.final_steps, initial=progress.step,
               disable=None)
    while not progress.finished:
        # Draw. The batch depends on the seed and the step only, so a resumed run draws the batches
        # that the interrupted run would have drawn.
        start = time.perf_counter()
        stage = progress.stage
        length, spacing = recipe.curriculum[stage]
        drawn, counts = recipe.draw(task, progress, generator(recipe.seed, "train", progress.step))
        batch = to_tensors(drawn, device_of(model))

        # Differentiate, and clip: one odd batch must not throw the parameters far away.
        objective, metrics = recipe.loss(network, batch)
        model.zero_grad()
        objective.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        if not math.isfinite(norm):
            raise UserError(f"step {progress.step}: the gradient is not finite; try smaller "
                            "learning rates (lr, matrix_lr)")

        # Update. torch keeps a learning rate beside each group of parameters.
        for optimizer, peak in zip(optimizers, peaks):
            optimizer.param_groups[0]["lr"] = peak * recipe.lr_scale(progress)
            optimizer.step()

        # Average: move 1/n of the way to the n-th parameters.
        if recipe.averages(progress):
            progress.averaged += 1
            for mean, parameter in zip(average.parameters(), model.parameters()):
                mean.data.lerp_(parameter.data, 1 / progress.averaged)

        # Count. A batch below pass_accuracy breaks the series. One that does not count, or has no
        # accuracy (see Recipe.loss), does not change it.
        progress.step += 1
        progress.stage_step += 1
        progress.tokens += batch.inputs.numel()
        accuracy = metrics["reveal_accuracy"]
        if counts and accuracy is not None:
            progress.passes = progress.passes + 1 if accuracy >= recipe.pass_accuracy else 0
        passed = progress.passes >= recipe.pass_patience
        if passed:
            progress.learned = stage + 1

        # Move on. A new stage starts a new series, since its batches are harder.
        steps = recipe.stage_steps(stage)
        over = progress.stage_step == steps if steps else passed
        if over and stage < last_stage:
            progress.stage += 1
            progress.stage_step = progress.passes = 0
            progress.left.append(progress.tokens)
            say(f"({length},{spacing}) passed after {progress.step} steps, "
                f"{progress.tokens / 1e6:.2f} million tokens")
        elif over or recipe.gives_up(progress):
            progress.finished = True
            progress.returned = choose(model, average, task, recipe, progress)
        progress.seconds += time.perf_counter() - start

        # Report. refresh=False: tqdm decides when to write to the terminal.
        if progress.stage == last_stage:
            bar.total = progress.step - progress.stage_step + recipe.stage_steps(last_stage)
        bar.set_postfix_str(f"({length},{spacing}) loss {metrics['loss']:.3f}, "
                            f"reveal accuracy {accuracy or 0:.0%}", refresh=False)
        bar.update()
        if progress.step % LOG_EVERY == 0 or progress.finished:
            log.append({**asdict(progress), "stage": stage, "length": length, "spacing": spacing,
                        **metrics, "gradient_norm": norm})

        # Save. The first step leaves a checkpoint, unless it fails.
        if folder and (progress.step % SAVE_EVERY == 1 or progress.finished):
            save(folder, recipe, progress, log, model, average, optimizers)

    bar.close()
    if progress.stage < last_stage:
        say(f"NOT LEARNED: stopped in stage {progress.stage + 1} of {last_stage + 1}")
    return result_of(progress, model, average).eval(), log


@torch.no_grad()
def choose(model, average, task, recipe, progress):
    """Which parameters to return, tested on 8 fresh batches of the last stage.

    The average is usually better and sometimes much worse, as when the loss rises between two good
    solutions. So it is returned unless the last parameters have a reveal accuracy that is a point
    higher (or, in a task without reveals, a loss that is 1% lower).
    """
    if not progress.averaged:
        return "last"

    accuracies = []
    losses = []
    for candidate in (average.eval(), model.eval()):
        for i in range(8):
            batch, _ = recipe.draw(task, progress, generator(recipe.seed, "valid", i))
            _, metrics = recipe.loss(candidate, to_tensors(batch, device_of(model)))
            accuracies.append(metrics["reveal_accuracy"])
            losses.append(metrics["loss"])

    if None in accuracies:
        return "last" if sum(losses[8:]) < 0.99 * sum(losses[:8]) else "average"
    return "last" if sum(accuracies[8:]) >= sum(accuracies[:8]) + 8 * 0.01 else "average"


def result_of(progress, model, average):
    """The model to evaluate: the average once there is one, unless the last did better."""
    return average if progress.averaged and progress.returned != "last" else model


def to_tensors(batch, device):
    """A batch whose inputs, targets and reveals are tensors on the device; the rest is kept."""
    inputs, targets, reveals = [torch.from_numpy(part).to(device) for part in batch[:3]]
    return batch._replace(inputs=inputs, targets=targets, reveals=reveals)


def say(text):
    """Print above the progress bar. A terminal that has been closed does not end the training."""
    try:
        tqdm.write(text)
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_optimizers(model, recipe):
    """Muon for the matrices between embedding and unembedding, AdamW for all other parameters.

    Muon (Jordan et al. 2024) replaces the update of a matrix by approximately the nearest
    orthogonal one, so the many small directions of a noisy gradient move as fast as the few large
    ones. (torch runs its Newton-Schulz iteration in bfloat16.)
    """
    # The rows of embedding and unembedding belong to single tokens: a rare token has a small
    # gradient, but Muon would move its row as far as any other. (torch knows no unembeddings, so
    # name yours like that.)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = []
    others = []
    for name, parameter in model.named_parameters():
        is_end = parameter in embeddings or "unembedding" in name
        (matrices if parameter.ndim == 2 and not is_end else others).append(parameter)

    # beta2 below torch's 0.999: the runs are short and their gradients change quickly.
    adamw = {"betas": (0.9, 0.95), "weight_decay": recipe.weight_decay}
    if recipe.optimizer == "muon":
        first = torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=recipe.weight_decay)
    else:
        first = torch.optim.AdamW(matrices, lr=recipe.matrix_lr, **adamw)
    return [first, torch.optim.AdamW(others, lr=recipe.lr, **adamw)]


# --- 3. The run folder ----------------------------------------------------------------------------

def save(folder, recipe, progress, log, model, average, optimizers):
    """Write model.pt: the result so far, and everything that changes during training."""
    folder.mkdir(parents=True, exist_ok=True)

    # Write beside it, then rename, so an interruption leaves the old file or the new one.
    partial = folder / "model.pt.partial"
    torch.save({
        "config": asdict(recipe), "progress": asdict(progress), "log": log,
        # "model" is the result, to be evaluated; "parameters" are those that training moves.
        "model": result_of(progress, model, average).state_dict(),
        "parameters": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers]}, partial)
    partial.replace(folder / "model.pt")


def restore(folder, recipe, model, average, optimizers):
    """Load the checkpoint into model, average and optimisers. Returns: progress and log."""
    checkpoint = read_checkpoint(folder)
    if checkpoint["config"] != asdict(recipe) or "parameters" not in checkpoint:
        raise UserError(f"{folder} holds another run, or only the result of one")

    model.load_state_dict(checkpoint["parameters"])
    average.load_state_dict(checkpoint["model"])
    for optimizer, state in zip(optimizers, checkpoint["optimizers"]):
        optimizer.load_state_dict(state)
    return Progress(**checkpoint["progress"]), checkpoint["log"]


# --- 4. The command line --------------------------------------------------------------------------

def make_parser(config_class):
    """An option for each field that has a help text. Options that are not given are absent."""
    parser = Parser(description="Train one model on one task.",
                    argument_default=argparse.SUPPRESS)
    add = parser.add_argument
    add("--out", metavar="DIR", help="folder of the run (default runs/MODEL-GROUP-seedN)")
    add("--resume", metavar="DIR", help="resume the run in DIR, with the options stored there")
    add("--device", help="cpu, cuda, cuda:1 or mps (default cuda if available, else cpu)")

    for part in fields(config_class):
        if not part.metadata:
            continue
        more = dict(part.metadata)
        if part.default is not None and part.type not in (bool, tuple):
            more["help"] += f" (default {part.default})"
        if part.type is bool:
            more["action"] = "store_true"
        else:
            more["type"] = stages if part.type is tuple else part.type
        add(f"--{part.name.replace('_', '-')}", **more)
    return parser


def main(argv=None, config_class=Config, make=make, table=evaluate_and_print):
    """Train, print the closing table, and store both in a run folder.

    A chapter that trains passes a subclass of Config, and a make(config dict) -> (task, model).
    """
    typed = vars(make_parser(config_class).parse_args(argv))
    device = find_device(typed.pop("device", None))
    out = typed.pop("out", None)
    resume = typed.pop("resume", None)
    if resume:
        if out or typed:
            raise UserError("--resume takes all options but --device from the run")
        typed = read_checkpoint(resume)["config"]
        if typed.keys() != {part.name for part in fields(config_class)}:
            raise UserError(f"{resume} was made by another command or another version")
    config = config_class(**typed)

    # Refuse before any work what cannot be trained or evaluated.
    task, model = make(asdict(config))
    for length, spacing in [*config.curriculum, *config.lengths]:
        task.check(length, spacing)
    name = "-".join(filter(None, (config.chapter, config.model, config.group)))
    folder = Path(resume or out or f"runs/{name}-seed{config.seed}").expanduser()

    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"{parameters:,} parameters, chance {task.chance:.3f}, device {device}, "
        f"{torch.get_num_threads()} threads, folder {folder}")
    model, log = train(model.to(device), task, config, folder, resume=bool(resume))

    rows = table(model, task, config.lengths, config.traces)
    last = log[-1]
    result = {"config": asdict(config), "results": rows, **last, "parameters": parameters}
    (folder / "results.json").write_text(json.dumps(result))
    say(f"\n{last['step']} steps, {last['tokens'] / 1e6:.2f} million tokens, "
        f"{last['seconds'] / 60:.2f} minutes")


if __name__ == "__main__":
    run_cli(main)
