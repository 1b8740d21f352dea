"""Train one model on one task: python train.py --model linrnn --group S5

Each step draws fresh traces. Training walks through a curriculum of stages (length L, spacing S). A
stage is left once the model answers more than `advance` of the reveals in `streak` batches in a
row; the last stage lasts `last_steps` steps. A run that does not get through the earlier stages
within `max_steps` ends there. `stage_steps` fixes the steps of stages instead; a 0 fixes none.

At constant rates the weights of a step circle around a solution. So the model that is evaluated is
the mean of the weights of all steps of the last stage (Izmailov et al. 2018, arXiv 1803.05407), or
the last ones if no stage is learned.

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
import inspect
import io
import itertools
import json
import math
import os
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from data import COMMANDS, Group, Parser, ReplTask, UserError, generator, run, stages
from eval import COLUMNS, LENGTHS, device_of, evaluate, print_table, read_checkpoint
from models import MODELS, find_device, make

COMMAND = "python train.py"
WARMUP = 50  # steps over which the learning rates rise from 0
LOG_EVERY = 10  # steps
SAVE_EVERY = 50  # steps


# --- 1. What determines a run ---------------------------------------------------------------------

def option(default, help, **more):
    """A field of Recipe, and at once an option of the command line: more is for argparse."""
    # A factory, because a dataclass refuses a list as a default.
    return field(default_factory=lambda: default, metadata={"help": help, **more})


def counts(text):
    """A type for argparse: '150,50,50' -> [150, 50, 50]."""
    return [int(part) for part in text.split(",")]


@dataclass
class Recipe:
    """All that determines a run besides its task and its model.  Raises: UserError."""

    # What is shown, and for how long. The paper begins with (8, 1). A stage of two commands ahead
    # of it tests single commands more often, and the plateau ends sooner.
    curriculum: list = option([(2, 1), (8, 1), (16, 2), (32, 4), (64, 8)],
                              "stages LENGTH:SPACING,...", type=stages)
    stage_steps: list = option(None, "the steps of each stage, N,N,..., or 0: until it is learned",
                               type=counts)

    # When a stage is over. One good batch may be luck, three in a row hardly.
    advance: float = option(0.97, "share of the reveals that ends a stage")
    streak: int = option(3, "batches in a row that must be above it")
    last_steps: int = option(150, "steps of the last stage")
    max_steps: int = option(1500, "steps before the last stage, at most")
    batch: int = option(16, "traces per step")

    # How the weights move. Muon's rate is the size of a step, whatever that of the gradient.
    optimizer: str = option("muon", "of the matrices inside the model", choices=["muon", "adamw"])
    matrix_lr: float = option(0.02, "peak learning rate of those matrices")
    lr: float = option(4e-3, "peak learning rate of all other weights")
    weight_decay: float = option(0.01, "a step shrinks each weight by this share of its rate")
    reveal_weight: float = option(1.0, "of the extra loss on the revealed values")

    # What chance decides, and what decides the last digits.
    seed: int = option(0, "of the traces, and of the weights to begin with")
    compile: bool = option(False, "torch.compile, which takes a minute")

    @property
    def last_stage(self):
        return len(self.curriculum) - 1

    def steps_of(self, stage):
        """How many steps a stage has; 0 for one that lasts until it is learned."""
        if self.stage_steps:
            return self.stage_steps[stage]
        return self.last_steps if stage == self.last_stage else 0

    def __post_init__(self):
        # Refused here, and not in the stage that would have no number.
        if self.stage_steps and len(self.stage_steps) != len(self.curriculum):
            raise UserError(f"the {len(self.curriculum)} stages of the curriculum need as many "
                            f"numbers of steps; got {self.stage_steps}")


@dataclass
class Progress:
    """Where a run stands: all of a checkpoint but the tensors and the log."""

    step: int = 0  # made so far
    stage: int = 0  # an index of the curriculum
    stage_step: int = 0  # steps made in this stage
    streak: int = 0  # good batches in a row
    learned: int = 0  # the number, from 1, of the last stage that has had its streak
    tokens: int = 0  # read so far
    seconds: float = 0.0  # spent in steps
    finished: bool = False

    def advance(self, recipe, accuracy):
        """Count a step, and go on to the next stage, or to the end, if it is time.

        accuracy: of the reveals; None for a batch that tells nothing about it.
        """
        self.step += 1
        self.stage_step += 1
        # A batch that is not good ends the streak.
        if accuracy is not None:
            self.streak = self.streak + 1 if accuracy > recipe.advance else 0
        passed = self.streak >= recipe.streak
        if passed:
            self.learned = self.stage + 1

        # Is the stage over?
        steps = recipe.steps_of(self.stage)
        if steps:
            over = self.stage_step == steps
        else:
            over = passed
            self.finished = not passed and self.step >= recipe.max_steps

        # A new stage begins with an empty streak: its batches are harder.
        if over and self.stage == recipe.last_stage:
            self.finished = True
        elif over:
            self.stage += 1
            self.stage_step = 0
            self.streak = 0


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
        metrics["reveal_accuracy"].
    max_tokens: the run also ends when so many tokens are read. quiet: no progress bar.

    Returns: the model to evaluate, and the log, a list of dicts.
    Raises: UserError for a folder that holds another run, or a gradient that is not finite.
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

    # What computes has the same weights as the model. dynamic: one graph serves all lengths.
    network = torch.compile(model, dynamic=True) if recipe.compile else model
    network = share_gradients(network, recipe)
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
            metrics = mean_over_processes({**metrics, "gradient_norm": norm}, device_of(model))

            # Update. There are two optimisers, with a group of weights each. torch keeps the rate
            # of a group beside its weights.
            for optimizer, peak in zip(optimizers, peaks):
                optimizer.param_groups[0]["lr"] = peak * rate_of(recipe, progress)
                optimizer.step()

            # Average. At a constant rate single weights circle around the solution, and their mean
            # is near its centre.
            if averaged(recipe, progress):
                average.update_parameters(model)

            # Advance: is the stage over, or the run?
            accuracy = metrics["reveal_accuracy"]
            progress.advance(recipe, accuracy)
            progress.tokens += drawn.inputs.size
            progress.seconds += time.perf_counter() - start

            # Log. refresh=False: tqdm itself decides when the terminal is written to.
            bar.total = total_steps(recipe, progress)
            right = "" if accuracy is None else f", reveals right {accuracy:.0%}"
            bar.set_postfix_str(f"({length},{spacing}) loss {metrics['loss']:.3f}{right}",
                                refresh=False)
            bar.update()
            ended = progress.finished or progress.tokens >= max_tokens
            if progress.step % LOG_EVERY == 0 or ended:
                log.append({"step": progress.step, "stage": stage, "length": length,
                            "spacing": spacing, **metrics, "tokens": progress.tokens,
                            "seconds": progress.seconds, "learned": progress.learned,
                            "finished": progress.finished})

            # Save. What Ctrl-C costs is the steps since the last time.
            if folder and (progress.step % SAVE_EVERY == 0 or ended):
                save(folder, config, progress, log, model, average, optimizers)

    return result_of(model, average).eval(), log


def result_of(model, average):
    """The model to evaluate: the mean of the weights, once there is one."""
    # n_averaged counts the weights that went into the mean.
    return average.module if average.n_averaged else model


def total_steps(recipe, progress):
    """How many steps the run will have, at most: exact once all stages to come have a number."""
    # The bar needs a total for the time left. It shrinks when a stage is learned early.
    counts = [recipe.steps_of(stage) for stage in range(len(recipe.curriculum))]
    left = counts[progress.stage:]
    if all(left):
        return progress.step - progress.stage_step + sum(left)
    return recipe.max_steps + sum(counts)


def to_tensors(batch, device):
    """The traces of this process, as tensors on the device."""
    # Of two processes the first takes the rows 0, 2, 4, ..., of all arrays of the batch.
    rank, processes = this_process()
    parts = {}  # the fields that change
    for name, part in batch._asdict().items():
        if isinstance(part, np.ndarray):
            parts[name] = part[rank::processes]

    # What else a task may have put there stays an array. contiguous: inputs and targets are two
    # views of one array, one token apart.
    for name in ("inputs", "targets", "reveals"):
        parts[name] = torch.from_numpy(parts[name]).to(device).contiguous()
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
    if started and not resume and this_process()[0] == 0:
        raise UserError(f"{folder} holds a run already: resume it, or choose another folder")
    return started and resume


def save(folder, config, progress, log, model, average, optimizers):
    """Write model.pt: the result so far, and all that changes while a model is trained."""
    # All processes hold the same; the first one writes.
    if this_process()[0] > 0:
        return

    content = io.BytesIO()  # in memory first: torch.save reports a full disk as a bug of its own
    torch.save({
        "config": config, "progress": asdict(progress), "log": log,
        # "model" is the mean, to be evaluated; "weights" are those that training moves.
        "model": result_of(model, average).state_dict(), "weights": model.state_dict(),
        "average": average.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers]}, content)
    replace_file(Path(folder) / "model.pt", content.getbuffer())


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


# --- 4. Several processes -------------------------------------------------------------------------
#
# python -m torch.distributed.run --nproc-per-node 2 train.py: each process draws the same traces,
# keeps its rows, and gets the gradient of the whole batch. The first process writes and prints.


def join_processes(device):
    """Find the others, if torch.distributed.run has started several.  Returns: the device."""
    # It tells each process in these variables who it is.
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return device

    # nccl is the way between GPUs, gloo between processes on CPUs.
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return device


def this_process():
    """The number of this process, and how many there are."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def share_gradients(network, recipe):
    """The network, with the mean of the gradients of all processes.  Raises: UserError."""
    _, processes = this_process()
    if recipe.batch % processes:  # unequal shares would make another mean
        raise UserError(f"a batch of {recipe.batch} traces cannot be shared by {processes} "
                        "processes: choose a multiple with --batch")
    # It averages the gradients of all processes inside backward().
    return DistributedDataParallel(network) if processes > 1 else network


def mean_over_processes(metrics, device):
    """The same numbers in each process, so that all leave a stage together."""
    _, processes = this_process()
    if processes == 1:
        return metrics

    # all_reduce adds up the numbers of all processes, in place. Equal shares of a batch make their
    # mean that of the batch. None, of a batch that tells nothing, is None in each process.
    known = [name for name, value in metrics.items() if value is not None]
    values = torch.tensor([metrics[name] for name in known], device=device)
    torch.distributed.all_reduce(values)
    return {**metrics, **dict(zip(known, (values / processes).tolist()))}


# --- 5. The command line --------------------------------------------------------------------------

def main(argv=None):
    parser = Parser(prog="python train.py", description=__doc__.split("\n")[0])
    add = parser.add_argument

    # What is trained, on what. No option has a default here: what was not typed is missing in
    # `typed`, and a resumed run has it from its folder.
    add("--model", choices=MODELS, help="(linrnn)")
    add("--group", help="S<n>, A<n>, Z<n> or D<n> (S5)")
    add("--commands", choices=COMMANDS, help="whole elements, or exchanges (full)")

    # The model; left out, its own default.
    add("--beta-max", type=float, help="linrnn: 2 allows the eigenvalue -1, 1 does not (2)")
    add("--householders", type=int, help="linrnn: writes per token, R (1)")
    add("--conv-width", type=int, help="tokens that the local block sees (n + 3)")
    add("--d-model", type=int, help="width (64, transformer 56, lstm 60)")
    add("--heads", type=int, help="(4)")
    add("--layers", type=int, help="(1, transformer 2)")

    # The recipe: an option for each field.
    for part in fields(Recipe):
        default = part.default_factory()
        more = {"type": type(default), **part.metadata}
        more["help"] += f" ({default})"
        if part.type is bool:
            more = {"action": argparse.BooleanOptionalAction, "help": more["help"]}
        add(f"--{part.name.replace('_', '-')}", **more)
    add_run_options(parser)

    typed = options_typed(parser, argv)
    config = config_of_run(typed, COMMAND) if "resume" in typed else new_config(typed)
    train_run(*make(config), config, typed)


def new_config(typed):
    """The names and numbers that determine a run on traces: what was typed, else the defaults."""
    group = Group(typed.get("group", "S5"))
    commands = typed.get("commands", "full")
    name = typed.get("model", "linrnn")

    # The options of the model, as its own signature has them. All of them stand in the config: it
    # means the same when a default is another one.
    parameters = inspect.signature(MODELS[name]).parameters
    options = {option: p.default for option, p in parameters.items() if option != "vocab_size"}
    options["conv_width"] = ReplTask(group, commands).conv_width
    for option in ("beta_max", "householders", "conv_width", "d_model", "heads", "layers"):
        if option in typed and option not in options:
            raise UserError(f"the model {name} has no option {option}")
        if option in typed:
            options[option] = typed[option]

    # S5 is where the rates were found. With more variables a wide convolution adds up more terms.
    fall = min(1.0, 5 / group.degree)
    chosen = {"lr": 4e-3 * fall, "matrix_lr": 0.02 * fall**0.5}
    for part in fields(Recipe):
        if part.name in typed:
            chosen[part.name] = typed[part.name]

    if group.degree > 7:
        print(f"the defaults were found for up to seven variables; {group.name} has "
              f"{group.degree}, and may need a wider model and easier traces")

    return {"command": COMMAND, "task": "traces", "model": name, "group": group.name,
            "commands": commands, "options": options, **asdict(Recipe(**chosen))}


# What a training command of one's own shares with this one: the options, and the functions below.

def add_run_options(parser):
    """Where a run lies, and what it is tested on."""
    add = parser.add_argument
    add("--out", metavar="DIR", help="a new run folder (runs/MODEL-GROUP-seedN, or -2, -3, ...)")
    add("--resume", metavar="DIR",
        help="go on with the run in DIR, by one process at a time; needs no other option")
    add("--device", help="cpu, cuda, cuda:1, mps (cuda if it is there, else cpu)")
    add("--lengths", type=stages, help="LENGTH:SPACING,... of the closing table")
    add("--traces", type=int, help="fresh traces for each of them (256)")


def options_typed(parser, argv):
    """The options that the user has typed, by name. None of them has a default in the parser."""
    args = vars(parser.parse_args(argv))  # argparse gives None for what was not typed
    return {name: value for name, value in args.items() if value is not None}


def config_of_run(typed, command):
    """The config of the run that --resume names.  Raises: UserError for an option that differs."""
    config = read_checkpoint(typed["resume"])["config"]

    # Another command may draw other traces from the same options.
    if config.get("command") != command:
        raise UserError(f"the run in {typed['resume']} was not made by {command}: resume it by the "
                        "command that made it")

    # What was typed must be what the run has, but for its table and its device.
    known = {**config, **config.get("options", {})}
    for name, value in typed.items():
        if name not in ("resume", "device", "lengths", "traces") and known.get(name) != value:
            raise UserError(f"--resume goes on with the options of that run: its {name} is "
                            f"{known.get(name)}, and {value} was typed")
    return config


def train_run(task, model, config, typed, lengths=LENGTHS, measure=evaluate, columns=COLUMNS,
              **hooks):
    """Train a model, evaluate it, and keep both in a run folder: what a training command does.

    config: as of new_config. typed: as of options_typed. lengths: of the closing table, if the
    user names none. measure, columns: as evaluate, and what to print of it. hooks: of train().
    """
    # Of its table the run keeps what was typed, else what it had, else what the command proposes.
    recipe = Recipe(**{part.name: config[part.name] for part in fields(Recipe)})
    lengths = typed.get("lengths", config.get("lengths", lengths))
    traces = typed.get("traces", config.get("traces", 256))
    config = {**config, "lengths": lengths, "traces": traces}

    # Refuse, before any work, what cannot be trained or evaluated.
    for length, spacing in [*recipe.curriculum, *lengths]:
        task.check(length, spacing)

    # Where it runs, and where it is kept.
    device = join_processes(find_device(typed.get("device")))
    first = this_process()[0] == 0
    folder = Path(typed["resume"]) if "resume" in typed else None
    if folder is None and first:
        name = f"{config['task']}-{config['model']}-{config['group']}-seed{recipe.seed}"
        folder = new_folder(typed.get("out"), name.removeprefix("traces-"))

    # Say what is trained, on what, and what a guess would reach. flush: at once, into a pipe, too.
    weights = sum(weight.numel() for weight in model.parameters())
    if first:
        print(f"{weights:,} parameters, chance {task.chance:.3f}, device {device}, "
              f"{torch.get_num_threads()} threads, run folder {folder}", flush=True)
    model, log = train(model.to(device), task, recipe, folder, resume="resume" in typed,
                       config=config, quiet=not first, **hooks)

    # The results are on the disk before they are printed: `| head -1` loses nothing.
    if first:
        rows = [measure(model, task, *stage, traces) for stage in lengths]
        last = log[-1]  # of the last step, whatever LOG_EVERY is
        learned = stages_learned(model, task, recipe, last, hooks.get("loss_of", next_token_loss))
        result = {"config": config, "results": rows, "steps": last["step"],
                  "tokens": last["tokens"], "seconds": last["seconds"],
                  "learned": learned, "parameters": weights, "device": device,
                  "threads": torch.get_num_threads(), "torch": torch.__version__}
        replace_file(folder / "results.json", json.dumps(result).encode())

        print_table(rows, columns)
        print(f"\ntrained {last['step']} steps in {last['seconds'] / 60:.2f} minutes")
        if learned <= recipe.last_stage:
            print(f"NOT LEARNED: stage {learned + 1} of {len(recipe.curriculum)}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@torch.no_grad()
def stages_learned(model, task, recipe, last, loss_of):
    """How many stages of the curriculum are learned. last: the last entry of the log."""
    # The last stage is asked of the result, on fresh traces. In training the weights of single
    # steps are asked, which are worse than their mean.
    rng = generator(recipe.seed, "valid")
    batch = task.training_batch(recipe.batch, *recipe.curriculum[-1], rng)
    _, metrics = loss_of(model, to_tensors(batch, device_of(model)), recipe)

    if last["stage"] == recipe.last_stage and metrics["reveal_accuracy"] > recipe.advance:
        return len(recipe.curriculum)
    return min(last["learned"], recipe.last_stage)


if __name__ == "__main__":
    run(main)
