"""Train one model on one task: python train.py --model linrnn --group S5

Each step draws fresh traces. Training walks through a curriculum of stages (length L, spacing S). A
stage is left once the model answers more than `pass_share` of the reveals in `pass_batches` batches
in a row; the last stage lasts `last_steps` steps. A run that does not get through the earlier
stages within `max_steps` ends there. `stage_steps` fixes the steps of stages instead; a 0 fixes
none.

At constant rates the weights of a step circle around a solution. So the model that is evaluated is
the mean of the weights of all steps of the last stage (Izmailov et al. 2018, arXiv 1803.05407), or
the last ones if no stage is learned.

In half of the traces of eight commands or more a command often comes again and again (`--runs`).
Errors of equal commands are equal, so that they add up to something that the loss can see.

The loss is the mean cross-entropy of every next token, plus `reveal_weight` times that of the
revealed values: most other tokens of a random program cannot be predicted, and are noise.

A run is a folder: model.pt, from which it can be resumed, and results.json, its closing table. On
the CPU, with as many threads, a resumed run continues bit for bit. As a library all of it is two
calls:

    model = LinRNN(len(task.vocab))
    model, log = train(model, task, Recipe(seed=0))

Next: analysis.ipynb, the questions that these five files can answer.
"""

import argparse
import io
import itertools
import json
import math
import os
import pickle
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from data import COMMANDS, Group, Parser, UserError, at_least, generator, run, stages
from eval import (COLUMNS, LENGTHS, as_tensor, device_of, evaluate, find_device, make, options_of,
                  print_table, read_checkpoint)
from models import MODELS

COMMAND = "python train.py"
WARMUP = 50  # steps over which the learning rates rise from 0
LOG_EVERY = 10  # steps
SAVE_EVERY = 50  # steps
OPTIMIZERS = ["muon", "adamw"]
RUNS = 0.5  # share of the traces, from 8 commands on, in which commands come in runs (data.py)


# --- 1. What determines a run ---------------------------------------------------------------------

def option(default, help, kind, **more):
    """A field of Recipe, and at once an option of the command line.

    kind: the type for argparse, which refuses impossible numbers; Recipe asks it, too. more: also
    for argparse.
    """
    return field(default=default, metadata={"help": help, "type": kind, **more})


def steps_of_stages(text):
    """A type for argparse: '150,50,0' -> [150, 50, 0]."""
    return [at_least(0)(steps) for steps in text.split(",")]


COUNT = at_least(1)
RATE = at_least(0, float)


@dataclass
class Recipe:
    """All that determines a run besides its task and its model.  Raises: UserError."""

    # What is shown, and for how long. The paper begins with (8, 1). A stage of two commands ahead
    # of it tests single commands more often, and the plateau ends sooner.
    curriculum: list = option(((2, 1), (8, 1), (16, 2), (32, 4), (64, 8)),
                              "stages LENGTH:SPACING,...", stages)
    stage_steps: list = option(None, "the steps of each stage, N,N,..., or 0: until it is learned",
                               steps_of_stages)

    # When a stage is over. One good batch may be luck, three in a row hardly.
    pass_share: float = option(0.97, "share of the reveals that ends a stage", at_least(-1, float))
    pass_batches: int = option(3, "batches in a row that must be above it", COUNT)
    last_steps: int = option(250, "steps of the last stage", COUNT)
    max_steps: int = option(1500, "steps before the last stage, at most", COUNT)
    batch: int = option(16, "traces per step", COUNT)

    # How the weights move. Muon's rate is the size of a step, whatever that of the gradient. Twice
    # these rates learn no later, but less precisely: traces of 256 are then lost on some seeds.
    optimizer: str = option("muon", "of the matrices inside the model", str, choices=OPTIMIZERS)
    matrix_lr: float = option(0.01, "peak learning rate of those matrices", RATE)
    lr: float = option(2e-3, "peak learning rate of all other weights", RATE)
    weight_decay: float = option(0.01, "a step shrinks each weight by this share of its rate", RATE)
    reveal_weight: float = option(1.0, "of the extra loss on the revealed values", RATE)

    # What chance decides, and what decides the last digits.
    seed: int = option(0, "of the traces, and of the weights to begin with", at_least(0))
    compile: bool = option(False, "torch.compile: it pays from some 2,000 steps on", bool)

    @property
    def last_stage(self):
        return len(self.curriculum) - 1

    def steps_of(self, stage):
        """How many steps a stage has; 0 for one that lasts until it is learned."""
        if self.stage_steps:
            return self.stage_steps[stage]
        return self.last_steps if stage == self.last_stage else 0

    def __post_init__(self):
        # Lists of its own, so that no other recipe changes with this one; and plain numbers, since
        # a checkpoint with those of numpy can be written, but not read.
        self.curriculum = [tuple(plain("curriculum", COUNT, part) for part in stage)
                           for stage in self.curriculum]
        if self.stage_steps is not None:
            self.stage_steps = [plain("stage_steps", at_least(0), part)
                                for part in self.stage_steps]
        for part in fields(self):
            if part.type is not list:
                value = plain(part.name, part.metadata["type"], getattr(self, part.name))
                setattr(self, part.name, value)

        # Refused here, and not in the step that would fail.
        if self.optimizer not in OPTIMIZERS:
            raise UserError(f"optimizer: one of {OPTIMIZERS}; got {self.optimizer}")
        if not self.curriculum:
            raise UserError("the curriculum needs a stage")
        if self.stage_steps and len(self.stage_steps) != len(self.curriculum):
            raise UserError(f"stage_steps needs a number for each of the {len(self.curriculum)} "
                            f"stages of the curriculum; got {self.stage_steps}")


def plain(name, kind, value):
    """A number of Python's own, equal to the value.  Raises: UserError, which says the name."""
    try:
        number = kind(value)
    except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
        raise UserError(f"{name}: {error}") from None
    if number != value:
        raise UserError(f"{name}: {value!r} is no {type(number).__name__}")
    return number


@dataclass
class Progress:
    """Where a run stands: all of a checkpoint but the tensors and the log."""

    step: int = 0  # made so far
    stage: int = 0  # an index of the curriculum
    stage_step: int = 0  # steps made in this stage
    passes: int = 0  # good batches in a row
    learned: int = 0  # the number, from 1, of the last stage that was passed
    tokens: int = 0  # read so far
    seconds: float = 0.0  # spent in steps
    finished: bool = False

    def count_step(self, recipe, accuracy):
        """Count a step, and go on to the next stage, or to the end, if it is time.

        accuracy: of the reveals; None for a batch that tells nothing about it.
        """
        self.step += 1
        self.stage_step += 1
        # A batch that is not good ends the row of good ones.
        if accuracy is not None:
            self.passes = self.passes + 1 if accuracy > recipe.pass_share else 0
        passed = self.passes >= recipe.pass_batches
        if passed:
            self.learned = self.stage + 1

        # Is the stage over?
        steps = recipe.steps_of(self.stage)
        if steps:
            over = self.stage_step == steps
        else:
            over = passed
            self.finished = not passed and self.step >= recipe.max_steps

        # A new stage begins without good batches: its own are harder.
        if over and self.stage == recipe.last_stage:
            self.finished = True
        elif over:
            self.stage += 1
            self.stage_step = 0
            self.passes = 0


# --- 2. Training ----------------------------------------------------------------------------------

# Three functions that may be replaced, as arguments of train(): the rates, the mean, the loss.

def share_of_peak(recipe, progress):
    """The share of the peak rates at this step: it rises from 0 to 1, once in a run, and stays."""
    return min(1.0, (progress.step + 1) / WARMUP)


def in_last_stage(recipe, progress):
    """Whether the weights of this step enter the mean: once something is worth averaging."""
    return progress.learned > 0 and progress.stage == recipe.last_stage


def next_token_loss(model, batch, recipe):
    """What a step makes smaller, and the numbers that its log entry shows.

    batch: a data.Batch whose inputs, targets and reveals are tensors on the model's device.
    """
    # The loss of every token, and once more that of the few that test the state.
    logits = model(batch.inputs)  # [B, T, vocabulary]
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    losses = losses.view(batch.targets.shape)
    loss = losses.mean()

    # Products with the mask: losses[batch.reveals] would have a size that a GPU must be asked for,
    # and the program would wait until the GPU has come that far.
    count = batch.reveals.sum()
    reveal_loss = (losses * batch.reveals).sum() / count
    right = (logits.argmax(-1) == batch.targets) & batch.reveals
    reveal_accuracy = right.sum() / count

    # For the same reason all numbers are read at once. Plain numbers keep no graph alive.
    numbers = torch.stack([loss, reveal_loss, reveal_accuracy]).tolist()
    metrics = dict(zip(("loss", "reveal_loss", "reveal_accuracy"), numbers))
    if math.isnan(metrics["reveal_accuracy"]):  # 0 of 0
        raise UserError("a batch without a reveal has no accuracy: use a loss of your own")
    return loss + recipe.reveal_weight * reveal_loss, metrics


def train(model, task, recipe, folder=None, *, resume=False, config=None, loss_of=next_token_loss,
          rate_of=share_of_peak, averaged=in_last_stage, max_tokens=math.inf, quiet=False):
    """Train a model on a task as the recipe says.

    model: a module, tokens [B, T] -> logits, on the device where it is to be trained. In the end it
        holds the last weights; what is returned is their mean.
    task: anything with vocab, chance, training_batch and test_batch (data.py, section 2).
    folder: where the run is kept. resume: go on from its checkpoint, if there is one.
    config: what eval.load needs to make task and model again.
    loss_of, rate_of, averaged: as the three functions above. The curriculum reads
        metrics["reveal_accuracy"]: None, or no such entry, for a batch that tells nothing. Metrics
        are plain numbers.
    max_tokens: the run also ends when so many tokens are read. quiet: nothing is printed.

    Returns: the model to evaluate, and the log, a list of dicts.
    Raises: UserError for a folder that holds another run, a config that cannot be stored, or a
        gradient that is not finite.
    """
    # All that changes while a model is trained: the weights, their mean, the optimisers' memory,
    # and where the run stands. A checkpoint holds just these, and the log.
    optimizers = make_optimizers(model, recipe)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    average = AveragedModel(model)  # the mean of the weights that it is given, one after the other
    progress = Progress()
    log = []

    # The first checkpoint is written before the first step: from there on the run can be resumed.
    config = {**(config or {}), **asdict(recipe)}
    if folder and holds_run(folder, resume):
        progress, log = restore(folder, recipe, model, average, optimizers)
    if folder:
        save(folder, config, progress, log, model, average, optimizers)

    # What computes has the same weights as the model. dynamic: one graph serves all lengths. (On a
    # CPU torch still compiles the convolution for each length anew.)
    network = torch.compile(model, dynamic=True) if recipe.compile else model
    model.train()

    steps = total_steps(recipe, progress)
    with tqdm(total=steps, initial=progress.step, disable=quiet) as bar:
        while not progress.finished and progress.tokens < max_tokens:
            # Draw. The traces of a step depend on the seed and on its number, on nothing else. So a
            # resumed run draws what the run that was cut off would have drawn.
            start = time.perf_counter()
            stage = progress.stage
            length, spacing = recipe.curriculum[stage]
            rng = generator(recipe.seed, "train", progress.step)
            drawn = task.training_batch(recipe.batch, length, spacing, rng)
            batch = to_tensors(drawn, device_of(model))

            # Measure: the loss, its gradient, and the norm of the gradient. A longer one is cut to
            # the length 1, so that a single odd batch cannot throw the weights far away.
            objective, metrics = loss_of(network, batch, recipe)
            for optimizer in optimizers:
                optimizer.zero_grad()
            objective.backward()  # adds to the gradient of each weight
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()  # of all weights
            if not math.isfinite(norm):
                raise UserError(f"step {progress.step}: the gradient is not finite; the last "
                                "checkpoint is a good one: try smaller rates, lr and matrix_lr")

            # Update. There are two optimisers, with a group of weights each. torch keeps the rate
            # of a group beside its weights.
            for optimizer, peak in zip(optimizers, peaks):
                optimizer.param_groups[0]["lr"] = peak * rate_of(recipe, progress)
                optimizer.step()

            # Average. At a constant rate single weights circle around the solution, and their mean
            # is near its centre.
            if averaged(recipe, progress):
                average.update_parameters(model)

            # Count. Is the stage over, or the run?
            accuracy = metrics.get("reveal_accuracy")
            progress.count_step(recipe, accuracy)
            progress.tokens += batch.inputs.numel()
            progress.seconds += time.perf_counter() - start

            # Show. refresh=False: tqdm itself decides when the terminal is written to.
            bar.total = total_steps(recipe, progress)
            loss = f" loss {metrics['loss']:.3f}" if "loss" in metrics else ""
            right = "" if accuracy is None else f", reveals right {accuracy:.0%}"
            bar.set_postfix_str(f"({length},{spacing}){loss}{right}", refresh=False)
            bar.update()
            if progress.stage > stage and not quiet:
                say(f"({length},{spacing}) is left after step {progress.step} and "
                    f"{progress.tokens / 1e6:.2f} million tokens")

            # Log.
            ended = progress.finished or progress.tokens >= max_tokens
            if progress.step % LOG_EVERY == 0 or ended:
                log.append({"step": progress.step, "stage": stage, "length": length,
                            "spacing": spacing, **metrics, "reveal_accuracy": accuracy,
                            "gradient_norm": norm, "tokens": progress.tokens,
                            "seconds": progress.seconds, "learned": progress.learned,
                            "finished": progress.finished})

            # Save. What Ctrl-C costs is the steps since the last time.
            if folder and (progress.step % SAVE_EVERY == 0 or ended):
                save(folder, config, progress, log, model, average, optimizers)

    return result_of(model, average).eval(), log


def say(line):
    """Print a line above the bar."""
    try:
        tqdm.write(line)
        sys.stdout.flush()
    except BrokenPipeError:  # of `| head -1`: train on, for the run folder
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def result_of(model, average):
    """The model to evaluate: the mean of the weights, once there is one."""
    # n_averaged counts the weights that went into the mean.
    return average.module if average.n_averaged else model


def total_steps(recipe, progress):
    """How many steps the run will have, at most: exact once all stages to come have a number."""
    # The bar needs a total for the time left. It shrinks when a stage is learned early.
    steps = [recipe.steps_of(stage) for stage in range(len(recipe.curriculum))]
    left = steps[progress.stage:]
    if all(left):
        return progress.step - progress.stage_step + sum(left)
    return recipe.max_steps + sum(steps)


def to_tensors(batch, device):
    """A batch whose inputs, targets and reveals are tensors on the device; the rest stays."""
    # contiguous: inputs and targets are two views of one array, one token apart.
    kinds = {"inputs": torch.long, "targets": torch.long, "reveals": torch.bool}
    parts = {name: as_tensor(getattr(batch, name)).to(device, kind).contiguous()
             for name, kind in kinds.items()}
    return batch._replace(**parts)


def make_optimizers(model, recipe):
    """One for the matrices between embedding and unembedding, and AdamW for all other weights.

    Muon (Jordan et al. 2024) replaces the update of a matrix by the nearest orthogonal one,
    approximately. So the many small directions of a noisy gradient move as fast as the few large
    ones.
    """
    # The rows of these two belong to single symbols. A rare symbol has a small gradient, and Muon
    # would move its row as far as all others.
    # (A model of one's own may have no unembedding; its last matrix is then one like the others.)
    outer = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    if hasattr(model, "unembedding"):
        outer.add(model.unembedding.weight)

    # Muon is defined for matrices: norms, biases and the convolution go to AdamW.
    matrices = []
    others = []
    for weight in model.parameters():
        if weight.ndim == 2 and weight not in outer:
            matrices.append(weight)
        else:
            others.append(weight)

    # A second beta below torch's 0.999: the runs are short, and their gradients change quickly.
    decay = recipe.weight_decay
    adamw = {"betas": (0.9, 0.95), "weight_decay": decay}
    optimizers = []
    if matrices and recipe.optimizer == "muon":
        optimizers.append(torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=decay))
    elif matrices:
        optimizers.append(torch.optim.AdamW(matrices, lr=recipe.matrix_lr, **adamw))
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=recipe.lr, **adamw))
    return optimizers


# --- 3. The run folder ----------------------------------------------------------------------------

def holds_run(folder, resume):
    """Whether the folder has a checkpoint to go on from.  Raises: UserError if it must not."""
    started = (Path(folder) / "model.pt").exists()
    if started and not resume:
        raise UserError(f"{folder} holds a run already: resume it, or choose another folder")
    return started and resume


def save(folder, config, progress, log, model, average, optimizers):
    """Write model.pt: the result so far, and all that changes while a model is trained."""
    content = io.BytesIO()  # in memory first: torch.save reports a full disk as a bug of its own
    torch.save({
        "config": config, "progress": asdict(progress), "log": log,
        # "model" is the mean, to be evaluated; "weights" are those that training moves.
        "model": result_of(model, average).state_dict(), "weights": model.state_dict(),
        "average": average.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers]}, content)

    # torch.save writes more than torch.load, which runs no code, will read: numpy's numbers, say.
    content.seek(0)
    try:
        torch.load(content, weights_only=True)
    except pickle.UnpicklingError:
        raise UserError("what config and loss_of give to a run must be plain numbers, texts or "
                        "tensors: others could be stored, but not be read") from None
    replace_file(Path(folder) / "model.pt", content.getvalue())


def restore(folder, recipe, model, average, optimizers):
    """Load the checkpoint into model, mean and optimisers. Returns: its progress and its log."""
    checkpoint = read_checkpoint(folder, device_of(model))
    # By another recipe the rest of the run would be another run.
    for name, value in asdict(recipe).items():
        if checkpoint["config"].get(name) != value:
            raise UserError(f"the run in {folder} has another {name}, and not {value}")

    # A stored model may have nothing but its result.
    try:
        model.load_state_dict(checkpoint["weights"])
        average.load_state_dict(checkpoint["average"])
        for optimizer, state in zip(optimizers, checkpoint["optimizers"]):
            optimizer.load_state_dict(state)
        return Progress(**checkpoint["progress"]), checkpoint["log"]
    except (KeyError, RuntimeError) as error:
        raise UserError(f"{folder} cannot be resumed: {error!r}"[:200]) from None


def replace_file(path, content):
    """A reader, or a power cut, meets the old file or the new: write beside it, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    side = path.with_name(path.name + ".partial")
    with open(side, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # on the disk, before the name is given to it
    side.replace(path)


def new_folder(out, name):
    """Make the folder `out`, or runs/NAME, runs/NAME-2 and so on: one that was not there."""
    for number in itertools.count(1):
        suffix = f"-{number}" if number > 1 else ""
        folder = Path(out or f"runs/{name}{suffix}")

        # mkdir succeeds for one process only, however many try. So two runs never share a folder.
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if out:
                raise UserError(f"--out {out} is there already: choose another, or go on with "
                                f"--resume {out}") from None


# --- 4. The command line --------------------------------------------------------------------------

def main(argv=None):
    typed, config = read_options(argv)
    train_run(*make(config), config, typed)


def read_options(argv):
    """What was typed, a dictionary, and the config of the run that it asks for."""
    parser = new_parser("python train.py", "Train one model on one task.")
    add = parser.add_argument

    # What is trained, on what.
    add("--model", choices=MODELS, help="(linrnn)")
    add("--group", help="S<n>, A<n>, Z<n> or D<n> (S5)")
    add("--commands", choices=COMMANDS, help="whole elements, or exchanges (full)")
    add("--runs", type=at_least(0, float), help="share of the traces in which commands come again "
        f"and again ({RUNS}; beside a --curriculum 0)")

    # The model; left out, its own default.
    add("--beta-max", type=at_least(0, float),
        help="linrnn: 2 allows the eigenvalue -1, 1 does not (2)")
    add("--householders", type=at_least(1), help="linrnn: writes per token, R (1)")
    add("--conv-width", type=at_least(1), help="tokens that the local block sees (n + 3)")
    add("--d-model", type=at_least(1), help="width (64, transformer 56, lstm 60)")
    add("--heads", type=at_least(1), help="(4)")
    add("--layers", type=at_least(1), help="(1, transformer 2)")

    # The recipe: an option for each field.
    for part in fields(Recipe):
        more = part.metadata | {"help": f"{part.metadata['help']} ({part.default})"}
        if part.type is bool:
            more = {"action": argparse.BooleanOptionalAction, "help": more["help"]}
        add(f"--{part.name.replace('_', '-')}", **more)

    typed = vars(parser.parse_args(argv))
    if "resume" in typed:
        return typed, config_of_run(typed, COMMAND)

    # S5 is where the defaults were found.
    group = Group(typed.get("group", "S5"))
    n = group.degree
    if n > 7:
        print(f"the defaults were found for up to seven variables; {group.name} has {n}, and may "
              "need a wider model and easier traces")
    # Equal errors add up, so equal commands are the best teacher of precision. A curriculum of
    # one's own shows what it says, and nothing else.
    runs = 0.0 if "curriculum" in typed else RUNS
    names = {"task": "traces", "group": "S5", "commands": "full", "runs": runs}
    return typed, new_config(typed, COMMAND, names, {"conv_width": n + 3}, rates_for(n))


def rates_for(n):
    """The peak rates for n variables. With more than five a wide convolution adds up more terms."""
    fall = min(1.0, 5 / n)
    return {"lr": 2e-3 * fall, "matrix_lr": 0.01 * fall**0.5}


# What a training command of one's own shares with this one: the five functions below.

def new_parser(command, description):
    """A parser that returns what was typed, and nothing else; where a run lies, and its table."""
    parser = Parser(prog=command, description=description, argument_default=argparse.SUPPRESS)
    add = parser.add_argument
    add("--out", metavar="DIR", help="a new run folder (runs/MODEL-GROUP-seedN, or -2, -3, ...)")
    add("--resume", metavar="DIR",
        help="go on with the run in DIR, by one process at a time; needs no other option")
    add("--device", help="cpu, cuda, cuda:1, mps (cuda if it is there, else cpu)")
    add("--lengths", type=stages, help="LENGTH:SPACING,... of the closing table")
    add("--traces", type=at_least(1), help="fresh traces for each of them (256)")
    return parser


def config_of_run(typed, command):
    """The config of the run that --resume names.  Raises: UserError for any option of a run."""
    others = typed.keys() - {"resume", "device", "lengths", "traces"}
    if others:
        raise UserError("--resume has its options from the run; leave out "
                        f"{', '.join(sorted(others))}")

    # Another command may draw other traces from the same options, and another version have others.
    config = read_checkpoint(typed["resume"])["config"]
    if config.get("command") != command or not asdict(Recipe()).keys() <= config.keys():
        raise UserError(f"the run in {typed['resume']} was not made by {command}, or not by this "
                        "version: resume it by the command that made it")
    return config


def new_config(typed, command, names, options, recipe):
    """The names and numbers that determine a run: what was typed, else what the command proposes.

    names: of the task. options, recipe: of the model and of Recipe, where they differ from the
    defaults.
    """
    # All that is known of the run stands in the config: it means the same when a default changes.
    names = {"model": "linrnn"} | names
    names = {name: typed.get(name, value) for name, value in names.items()}
    recipe = Recipe(**recipe | {
        part.name: typed[part.name] for part in fields(Recipe) if part.name in typed})

    # What else was typed is an option of the model, and make_model refuses those that it has not.
    known = {"out", "device", "lengths", "traces", *names, *asdict(recipe)}
    options = options_of(names["model"]) | options | {
        name: value for name, value in typed.items() if name not in known}
    return {"command": command, **names, "options": options, **asdict(recipe)}


def recipe_of(config):
    """The part of a config that is a Recipe."""
    return Recipe(**{part.name: config[part.name] for part in fields(Recipe)})


def train_run(task, model, config, typed, lengths=LENGTHS, measure=evaluate, columns=COLUMNS,
              **hooks):
    """Train a model, evaluate it, and keep both in a run folder: what a training command does.

    config: as of new_config. typed: of a new_parser. lengths: of the closing table, if the user
    names none. measure, columns: as evaluate, and what to print of it. hooks: of train().
    """
    # Of its table the run keeps what was typed, else what it had, else what the command proposes.
    recipe = recipe_of(config)
    lengths = typed.get("lengths", config.get("lengths", lengths))
    traces = typed.get("traces", config.get("traces", 256))
    config = {**config, "lengths": lengths, "traces": traces}

    # Refuse, before any work, what cannot be trained or evaluated.
    for length, spacing in [*recipe.curriculum, *lengths]:
        task.check(length, spacing)

    # Where it runs, and where it is kept.
    device = find_device(typed.get("device"))
    if "resume" in typed:
        folder = Path(typed["resume"])
    else:
        name = f"{config['task']}-{config['model']}-{config['group']}-seed{recipe.seed}"
        folder = new_folder(typed.get("out"), name.removeprefix("traces-"))

    # Say what is trained, on what, and what a guess would reach. flush: at once, into a pipe, too.
    weights = sum(weight.numel() for weight in model.parameters())
    print(f"{weights:,} parameters, chance {task.chance:.3f}, device {device}, "
          f"{torch.get_num_threads()} threads, run folder {folder}", flush=True)
    model, log = train(model.to(device), task, recipe, folder, resume="resume" in typed,
                       config=config, **hooks)

    # The results are on the disk before they are printed: `| head -1` loses nothing.
    rows = [measure(model, task, *stage, traces) for stage in lengths]
    last = log[-1]  # of the last step, whatever LOG_EVERY is
    learned = stages_learned(model, task, recipe, last, hooks.get("loss_of", next_token_loss))
    result = {"config": config, "results": rows, "steps": last["step"], "tokens": last["tokens"],
              "seconds": last["seconds"], "learned": learned, "parameters": weights,
              "device": device, "threads": torch.get_num_threads(), "torch": torch.__version__}
    replace_file(folder / "results.json", json.dumps(result).encode())

    print_table(rows, columns)
    print(f"\ntrained {last['step']} steps, {last['tokens'] / 1e6:.2f} million tokens, in "
          f"{last['seconds'] / 60:.2f} minutes")
    if learned <= recipe.last_stage:
        print(f"NOT LEARNED: stage {learned + 1} of {len(recipe.curriculum)}")


@torch.no_grad()
def stages_learned(model, task, recipe, last, loss_of):
    """How many stages of the curriculum are learned. last: the last entry of the log."""
    # The last stage is asked of the result, on fresh traces. In training the weights of single
    # steps are asked, which are worse than their mean. Few reveals would leave it to luck.
    length, spacing = recipe.curriculum[-1]
    traces = max(recipe.batch, -(-256 * spacing // length))  # rounded up
    rng = generator(recipe.seed, "valid")
    batch = task.training_batch(traces, length, spacing, rng)
    _, metrics = loss_of(model, to_tensors(batch, device_of(model)), recipe)

    accuracy = metrics.get("reveal_accuracy")  # None of a loss that tells nothing
    known = accuracy is not None and last["stage"] == recipe.last_stage
    if known and accuracy > recipe.pass_share:
        return len(recipe.curriculum)
    return min(last["learned"], recipe.last_stage)


if __name__ == "__main__":
    run(main)
