"""Train one model on one task: python train.py --model linrnn --group S5

Each step draws fresh traces; nothing is seen twice. Training walks through a curriculum of stages
(length L, spacing S). A stage is left once the model answers more than `advance` of the reveals in
`streak` batches in a row; the last stage lasts `last_steps` steps. A run that does not get through
the earlier stages within `max_steps` ends there. `stage_steps` fixes the steps of every stage
instead. Where a task knows the best prediction (Batch.best), `advance` is a share of its accuracy.

At constant rates the weights of a step circle around a solution. There are two ways to its centre,
and `average` chooses. The rates stay, and the model that is evaluated is the mean of the weights of
all steps of the last stage (Izmailov et al. 2018, arXiv 1803.05407), or the last ones if no stage
is learned. Or the rates fall to 0 over the last stage, and the last weights are the model.

The loss is the mean cross-entropy of every next token, plus `reveal_weight` times that of the
revealed values: most other tokens of a random program cannot be predicted, and are noise.

A run is a folder: config.json, log.jsonl (a line every 10 steps), model.pt (the weights, and all
that --resume needs) and result.json. On the CPU, with as many threads, a resumed run continues bit
for bit. As a library all of it is two calls:

    model = LinRNN(len(task.vocab))
    model, log = train(model, task, Recipe(seed=0))

Next: analysis.ipynb.
"""

import argparse
import contextlib
import io
import json
import math
import os
import re
import shlex
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
import torch.distributed
import torch.nn.functional as F
from filelock import FileLock, Timeout
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

import data
from data import (COMMANDS, TASKS, UserError, generator, number, one_line_errors, parse, stages,
                  try_stages)
from eval import (TEST_LENGTHS, device_of, evaluate_and_print, make_model, make_task,
                  read_checkpoint, run_plugin)
from models import MODELS, choose_device, options_of

WARMUP = 50  # steps over which the learning rates rise from 0
LOG_EVERY = 10  # steps
MOST_TRAINED = 2**16  # commands in a batch: some 12 GB at the default width


# --- 1. What determines a run ---------------------------------------------------------------------

@dataclass
class Recipe:
    """All that determines a run besides its task and its model.  Raises: UserError."""

    # What is shown, and for how long. The paper begins with (8, 1). A stage of two commands ahead
    # of it tests single commands more often, and the plateau ends sooner.
    curriculum: list = field(default_factory=lambda: [(2, 1), (8, 1), (16, 2), (32, 4), (64, 8)])
    stage_steps: list = None  # the steps of each stage; None: a stage is left on accuracy
    advance: float = 0.97  # share of the reveals that ends a stage
    streak: int = 3  # batches in a row that must be above it
    last_steps: int = 150  # steps of the last stage
    max_steps: int = 1500  # steps before the last stage, at most
    batch: int = 16  # traces per step
    level: bool = False  # shorter stages have more: as many commands a step as the longest one

    # How the weights move.
    optimizer: str = "muon"  # of the matrices inside the model: muon or adamw
    lr: float = 4e-3  # peak learning rate of all other weights
    matrix_lr: float = 0.02  # peak learning rate of those matrices
    weight_decay: float = 0.01  # a step makes each weight smaller by this share of its rate
    reveal_weight: float = 1.0  # of the extra loss on the revealed values

    # What comes out, and what chance decides.
    average: bool = True  # the result is the mean of the last stage; else its rates fall to 0
    seed: int = 0  # of the traces; the weights a model begins with are its maker's
    compile: bool = False  # torch.compile, whose results differ in the last digits

    @property
    def last_stage(self):
        return len(self.curriculum) - 1

    def __post_init__(self):
        if self.stage_steps and len(self.stage_steps) != len(self.curriculum):
            raise UserError(f"the {len(self.curriculum)} stages of the curriculum need as many "
                            f"numbers of steps; got {self.stage_steps}")
        if self.optimizer not in ("muon", "adamw"):
            raise UserError(f"optimizer must be muon or adamw; got {self.optimizer}")


@dataclass
class Progress:
    """Where a run stands: all of a checkpoint but the tensors."""

    step: int = 0  # made so far
    stage: int = 0  # an index of the curriculum
    stage_step: int = 0  # steps made in this stage
    streak: int = 0  # good batches in a row
    learned: bool = False  # whether some stage has had its streak
    tokens: int = 0  # read so far
    seconds: float = 0.0  # spent in steps
    finished: bool = False

    def advance(self, recipe, accuracy):
        """Count a step, and go on to the next stage, or to the end, if it is time."""
        self.step += 1
        self.stage_step += 1
        self.streak = self.streak + 1 if accuracy > recipe.advance else 0
        passed = self.streak == recipe.streak  # once: a longer streak does not pass again
        if passed:
            self.learned = True

        # Is the stage over?
        last = self.stage == recipe.last_stage
        if recipe.stage_steps:
            over = self.stage_step == recipe.stage_steps[self.stage]
        elif last:
            over = self.stage_step == recipe.last_steps
        else:
            over = passed
            self.finished = not passed and self.step >= recipe.max_steps

        # A new stage begins with an empty streak: its batches are harder.
        if over and last:
            self.finished = True
        elif over:
            self.stage += 1
            self.stage_step = 0
            self.streak = 0


# --- 2. The loss, the rates, the optimisers -------------------------------------------------------

def next_token_loss(model, batch, recipe):
    """What a step makes smaller, and the numbers that its log entry shows.

    batch: a data.Batch whose inputs, targets and reveals are tensors on the model's device.
    """
    # The loss of every token, and once more that of the few that test the state.
    logits = model(batch.inputs)  # [B, T, vocabulary]
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    losses = losses.view(batch.targets.shape)
    loss = losses.mean()
    reveal_loss = losses[batch.reveals].mean()

    # .item() turns a tensor of one number into a number, which keeps no graph alive.
    right = (logits.argmax(-1) == batch.targets)[batch.reveals]
    metrics = {"loss": loss.item(), "reveal_loss": reveal_loss.item(),
               "reveal_accuracy": right.float().mean().item()}
    # Where commands are uncertain, nobody can be right always: Progress.advance measures a model
    # by the best reader there is.
    if batch.best is not None:
        metrics["bayes_accuracy"] = float(batch.best.max(-1).mean())
    return loss + recipe.reveal_weight * reveal_loss, metrics


def share_of_peak(recipe, progress):
    """The share of the peak rates at this step: it rises from 0 to 1, once in a run, and stays.

    Without a mean of the weights it falls linearly to 0 over the last stage.
    """
    share = min(1.0, (progress.step + 1) / WARMUP)
    if not recipe.average and progress.stage == recipe.last_stage:
        steps = recipe.stage_steps[-1] if recipe.stage_steps else recipe.last_steps
        share *= 1 - progress.stage_step / steps
    return share


def traces_per_step(recipe, length):
    """How many traces of this length a step reads: `batch`, or more of the shorter ones."""
    if not recipe.level:
        return recipe.batch
    longest = max(length for length, _ in recipe.curriculum)
    return recipe.batch * (longest // length)  # a multiple of batch, which processes can share


def make_optimizers(model, recipe):
    """One for the matrices between embedding and unembedding, and AdamW for all other weights.

    Muon (Jordan et al. 2024) replaces the update of a matrix by the nearest orthogonal one. So the
    many small directions of a noisy gradient move as fast as the few large ones.
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
#
# A run folder must survive everything: a second process, a full disk, a power cut, other options,
# a file from elsewhere. So it is locked, each file is replaced as a whole, and what does not fit is
# refused before anything is written.

PARTS = {"config.json", "log.jsonl", "model.pt", "result.json", "lock"}


def open_folder(folder, resume, config):
    """Refuse a folder that holds anything else; else make it, and lock it against other processes.

    A folder without model.pt is that of a run that was stopped in its first seconds: it starts
    over.  Returns: the lock.  Raises: UserError, before anything is written.
    """
    # What is there?
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    foreign = {name.removesuffix(".partial") for name in names} - PARTS
    started = "model.pt" in names

    # Nothing of another run is overwritten, and nothing that is no run at all.
    if (started and not resume) or (foreign and not started):
        raise UserError(f"{folder} is not empty: go on with --resume if it holds this run, "
                        "or choose another folder with --out")

    # A run goes on with its own options only: another rate would make another run of it.
    if started:
        theirs = read_checkpoint(folder)["config"]
        changed = []
        for key in {**theirs, **config}:
            if theirs.get(key) != config.get(key):
                changed.append(f"{key} {theirs.get(key)} against {config.get(key)}")
        if changed:
            raise UserError(f"--resume with other options than those of the run in {folder}: "
                            + ", ".join(changed))

    # The system frees the lock when the process ends, however it ends.
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"another process trains in {folder}: wait for its end, or choose another "
                        "folder with --out") from None

    replace_file(folder / "config.json", json.dumps(config, indent=2).encode())
    return lock


def replace_file(path, content):
    """A reader, or a power cut, meets the old file or the new: write beside it, then rename."""
    side = path.with_name(path.name + ".partial")
    try:
        with open(side, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # on the disk, before the name is given to it
        side.replace(path)
    finally:
        side.unlink(missing_ok=True)


def save(folder, config, progress, result, model, average, optimizers):
    """Write model.pt: the result so far, and all that changes while a model is trained."""
    # A checkpoint of ruined weights would be the end of the run.
    for weight in [*model.parameters(), *result.parameters()]:
        if not weight.isfinite().all():
            raise FloatingPointError("the weights are not all finite")

    checkpoint = {
        "config": config, "progress": asdict(progress), "model": result.state_dict(),
        # "model" above is the mean, to be evaluated; below are the weights that training moves.
        "resume": {"model": model.state_dict(), "average": average.state_dict(),
                   "optimizers": [optimizer.state_dict() for optimizer in optimizers]}}

    content = io.BytesIO()  # in memory first: torch.save reports a full disk as a bug of its own
    torch.save(checkpoint, content)
    replace_file(folder / "model.pt", content.getbuffer())


def restore(folder, device, model, average, optimizers):
    """Load the checkpoint. Returns: its progress, and the log entries that are not after it."""
    checkpoint = read_checkpoint(folder, device)
    try:
        resume = checkpoint["resume"]
        progress = Progress(**checkpoint["progress"])
        model.load_state_dict(resume["model"])
        average.load_state_dict(resume["average"])
        for optimizer, state in zip(optimizers, resume["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    except Exception as error:  # of any kind, since the file may hold anything
        reason = " ".join(str(error).split())[:150]
        raise UserError(f"{folder} cannot be resumed, its checkpoint does not fit: "
                        f"{reason}") from None

    # The log may be ahead of the checkpoint, by up to save_every steps.
    log = []
    path = folder / "log.jsonl"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for line in lines:
        with contextlib.suppress(ValueError):  # a line that a power cut has cut off
            row = json.loads(line)
            if row["step"] <= progress.step:  # the steps after it will be made again
                log.append(row)
    return progress, log


def write_log(folder, log):
    content = "".join(json.dumps(row) + "\n" for row in log)
    replace_file(folder / "log.jsonl", content.encode())


# --- 4. Training ----------------------------------------------------------------------------------

def train(model, task, recipe, folder=None, *, resume=False, description=None,
          loss_of=next_token_loss, rate_of=share_of_peak, max_tokens=math.inf, save_every=50,
          quiet=False):
    """Train a model on a task as the recipe says.

    model: a module, tokens [B, T] -> logits, on the device where it is to be trained. In the end it
        holds the last weights, and what is returned is the mean over the last stage.
    task: anything with vocab, chance, training_batch and test_batch (data.py, section 3).
    folder: where the run is kept. resume: go on from the folder's last checkpoint, if there is one.
    description: names for config.json, beside the recipe, from which eval.load_run makes the task
        and the model again.
    loss_of(model, batch, recipe): as next_token_loss. rate_of(recipe, progress): as share_of_peak.
    max_tokens: the run also ends when so many tokens are read. quiet: prints nothing.

    Under torch.distributed each process takes its rows of every batch, and the first one writes.

    Returns: the model to evaluate, and the log, a list of dicts.
    Raises: UserError for a folder that cannot be used; FloatingPointError if a loss is not finite:
        then the last checkpoint is still a good one.
    """
    # Which of how many processes is this one? All draw the same traces, and each keeps its rows.
    rank = 0
    processes = 1
    if torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
        processes = torch.distributed.get_world_size()
    if recipe.batch % processes:
        raise UserError(f"a batch of {recipe.batch} traces cannot be shared by {processes} "
                        "processes: choose a multiple with --batch")
    folder = Path(folder) if folder is not None else None
    writes = folder is not None and rank == 0

    # All that changes while a model is trained: the weights, their mean, the optimisers' memory,
    # and where the run stands. A checkpoint holds just these.
    device = device_of(model)
    optimizers = make_optimizers(model, recipe)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    average = AveragedModel(model)  # the mean of the weights that it is given, one after the other
    progress = Progress()
    log = []

    with contextlib.ExitStack() as stack:
        # Open the folder, and go on from its checkpoint if there is one.
        # By way of JSON, since a config that was read back has lists where a Recipe has tuples.
        config = json.loads(json.dumps({**(description or {}), **asdict(recipe)}))
        if writes:
            lock = open_folder(folder, resume, config)
            stack.callback(lock.release)
        if processes > 1:
            torch.distributed.barrier()  # until the first process has opened it
        if folder and resume and (folder / "model.pt").exists():
            progress, log = restore(folder, device, model, average, optimizers)
        if writes:
            write_log(folder, log)
            save(folder, config, progress, result_of(model, average), model, average, optimizers)

        # Say what will be trained, on what, and what a guess would reach.
        quiet = quiet or rank > 0
        if not quiet:
            weights = sum(weight.numel() for weight in model.parameters())
            place = f", run folder {folder}, from step {progress.step}" if folder else ""
            print(f"{weights:,} parameters, chance {task.chance:.3f}, device {device}, "
                  f"{torch.get_num_threads()} threads{place}", flush=True)
        bar = stack.enter_context(tqdm(total=total_steps(recipe, progress), initial=progress.step,
                                       disable=quiet))

        # What computes: the model, compiled, or wrapped so that each process gets the gradient of
        # the whole batch. Its weights are the same tensors. The mean was copied from it before:
        # a copy of a compiled model would still compute with the old weights.
        if recipe.compile:
            model.compile()
        shared = DistributedDataParallel(model) if processes > 1 else model
        model.train()

        while not progress.finished and progress.tokens < max_tokens:
            # Draw. The traces of a step depend on the seed and on its number, on nothing else. So a
            # resumed run draws what the run that was cut off would have drawn.
            start = time.perf_counter()
            length, spacing = recipe.curriculum[progress.stage]
            rng = generator(recipe.seed, "train", progress.step)
            traces = traces_per_step(recipe, length)
            batch = task.training_batch(traces, length, spacing, rng)
            tokens = batch.inputs.size
            if processes > 1:
                batch = rows_of(batch, rank, processes)
            batch = to_tensors(batch, device)

            # Measure: the loss, its gradient, and the norm of the gradient. A longer one is cut to
            # the length 1, so that a single odd batch cannot throw the weights far away.
            objective, metrics = loss_of(shared, batch, recipe)
            for optimizer in optimizers:
                optimizer.zero_grad()
            objective.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            if not math.isfinite(objective.item()) or not math.isfinite(norm):
                raise FloatingPointError(f"step {progress.step}: the loss is {objective.item()}, "
                                         f"its gradient has the norm {norm}")
            metrics["gradient_norm"] = norm
            if processes > 1:
                metrics = mean_over_processes(metrics, device)  # all leave a stage together

            # Update. There are two optimisers, with a group of weights each.
            for optimizer, peak in zip(optimizers, peaks):
                optimizer.param_groups[0]["lr"] = peak * rate_of(recipe, progress)
                optimizer.step()

            # Average, as soon as there is something worth averaging. At a constant rate single
            # weights circle around the solution; their mean is near its centre.
            if recipe.average and progress.learned and progress.stage == recipe.last_stage:
                average.update_parameters(model)

            # Advance: is the stage over, or the run?
            best = metrics.get("bayes_accuracy", 1.0)
            stage = progress.stage
            progress.advance(recipe, metrics["reveal_accuracy"] / best)
            progress.tokens += tokens
            progress.seconds += time.perf_counter() - start

            # Log. refresh=False: tqdm itself decides when the terminal is written to.
            bar.total = total_steps(recipe, progress)
            bar.set_postfix_str(f"({length},{spacing}) loss {metrics['loss']:.3f}, "
                                f"reveals right {metrics['reveal_accuracy']:.0%}", refresh=False)
            bar.update()
            ended = progress.finished or progress.tokens >= max_tokens
            if progress.step % LOG_EVERY == 0 or ended:
                row = {"step": progress.step, "stage": stage, "length": length,
                       "spacing": spacing, **metrics, "tokens": progress.tokens,
                       "seconds": progress.seconds, "finished": progress.finished}
                log.append(row)
                if writes:
                    with open(folder / "log.jsonl", "a") as file:
                        file.write(json.dumps(row) + "\n")

            # Save. What Ctrl-C costs is the steps since the last time.
            if writes and (progress.step % save_every == 0 or ended):
                result = result_of(model, average)
                save(folder, config, progress, result, model, average, optimizers)

    if not quiet:
        through = ""
        if progress.stage < recipe.last_stage:
            through = (f"; NOT LEARNED: stage {progress.stage + 1} of {recipe.last_stage + 1} was "
                       "not passed")
        print(f"trained {progress.step} steps in {progress.seconds / 60:.2f} minutes{through}")
    return result_of(model, average).eval(), log


def result_of(model, average):
    """The model to evaluate: the mean of the weights, once there is one."""
    # n_averaged counts the weights that went into the mean.
    return average.module if average.n_averaged else model


def total_steps(recipe, progress):
    """How many steps the run will have, at most. Known exactly from the last stage on."""
    # The bar needs a total for the time left. It shrinks when an early stage is passed early.
    if recipe.stage_steps:
        return sum(recipe.stage_steps)
    if progress.stage == recipe.last_stage:
        return progress.step - progress.stage_step + recipe.last_steps
    return recipe.max_steps + recipe.last_steps


def to_tensors(batch, device):
    """The traces of a batch on the device. What else a task may have put there stays as it is."""
    # contiguous: inputs and targets are two views of one array, one token apart.
    traces = {}
    for name in ("inputs", "targets", "reveals"):
        array = torch.from_numpy(getattr(batch, name))
        traces[name] = array.to(device).contiguous()
    return batch._replace(**traces)


def rows_of(batch, rank, processes):
    """The share of one process: every `processes`-th trace, from number `rank` on."""
    # Of two processes the first takes the rows 0, 2, 4, ..., the second all others.
    return batch._make(None if part is None else part[rank::processes] for part in batch)


def mean_over_processes(metrics, device):
    """The same numbers in each process. Equal shares of a batch make the mean that of the batch."""
    # all_reduce adds up the numbers of all processes, in place.
    values = torch.tensor([*metrics.values()], device=device)
    torch.distributed.all_reduce(values)
    values /= torch.distributed.get_world_size()
    return dict(zip(metrics, values.tolist()))


# --- 5. The command line --------------------------------------------------------------------------

def counts(text):
    """A type for argparse: '150,50,50' -> [150, 50, 50]."""
    if not re.fullmatch(r"[1-9]\d{0,7}(,[1-9]\d{0,7})*", text):
        raise argparse.ArgumentTypeError(f"expected positive numbers N,N,...; got {text!r}")
    return [int(part) for part in text.split(",")]


def make_parser():
    parser = argparse.ArgumentParser(prog="python train.py", description=__doc__.split("\n")[0])
    add = parser.add_argument
    rate = number(1e-9, 100, float)  # refuses 0, which would train nothing, and nan

    # What is trained, on what.
    add("--model", default="linrnn", choices=MODELS)
    add("--group", default="S5", help="S<n>, A<n>, Z<n>, D<n> or a product such as A4xZ5")
    add("--format", default="repl", choices=TASKS, help="Python traces, or one token per element")
    add("--commands", default="full", choices=COMMANDS, help="whole elements, or transpositions")
    add("--plugin", metavar="FILE", help="runs this file, which may add groups, tasks and models")

    # The model; left out, the task's own choice or the model's default.
    add("--beta-max", type=number(0, 2, float),
        help="linrnn: 2 allows the eigenvalue -1, 1 does not")
    add("--beta-start", type=number(0, 1, float),
        help="linrnn: beta before training, as a share of --beta-max (0.5)")
    add("--householders", type=number(1), help="linrnn: writes per token, R")
    add("--conv-width", type=number(1), help="tokens that the local block sees (default: n + 3)")
    add("--d-model", type=number(1), help="width")
    add("--heads", type=number(1))
    add("--layers", type=number(1))

    # The recipe; left out, the task's own choice or the default of Recipe.
    add("--curriculum", type=stages, help="stages LENGTH:SPACING,...")
    add("--stage-steps", type=counts, metavar="N,N,...", help="the steps of each stage")
    add("--advance", type=number(-1, 2, float), help="accuracy that ends a stage (0.97)")
    add("--streak", type=number(1), help="batches in a row that must be above it (3)")
    add("--last-steps", type=number(1), help="steps of the last stage (150)")
    add("--max-steps", type=number(1), help="steps before the last stage, at most (1500)")
    add("--batch", type=number(1), help="traces per step (16)")
    add("--level", action=argparse.BooleanOptionalAction, help="shorter stages have more traces")
    add("--average", action=argparse.BooleanOptionalAction,
        help="the mean of the last stage's weights; without it, rates that fall there")
    add("--optimizer", choices=["muon", "adamw"], help="of the hidden matrices (muon)")
    add("--matrix-lr", type=rate, help="its peak learning rate (0.02; falls as 1 / sqrt n from S6)")
    add("--lr", type=rate, help="peak rate of all other weights (0.004; falls as 1 / n from S6)")
    add("--weight-decay", type=number(0, 100, float), help="of all weights (0.01)")
    add("--reveal-weight", type=number(0, 100, float), help="extra loss on the reveals (1)")
    add("--seed", type=number(0), default=0, help="of the initial weights and of all traces")
    add("--compile", action="store_true", help="torch.compile, which takes a minute")

    # Where, and what for.
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--out", help="run folder (default: runs/ and a name made of the options)")
    add("--resume", action="store_true", help="go on from the run folder's last checkpoint")
    add("--save-every", type=number(1), default=50, help="steps between checkpoints")
    add("--test-lengths", type=stages, help="LENGTH:SPACING,... of the closing evaluation")
    add("--traces", type=number(1, 10**5), default=256, help="fresh traces for each of them")
    return parser


def chosen(args, names):
    """Those of these options that the user has given."""
    # An option that was not given is None: the task, then the defaults, decide on it.
    given = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def default_folder(args, parser):
    """runs/, the model, the group, every other option that is not its default, and the seed."""
    left_out = {"model", "group", "seed", "device", "out", "resume", "save_every", "test_lengths",
                "traces", "plugin"}
    # Two runs with different options must not want the same folder.
    parts = [args.model, args.group]
    for name, value in vars(args).items():
        if name not in left_out and value != parser.get_default(name):
            parts.append(f"{name}_{value}")
    parts.append(f"seed{args.seed}")
    return Path("runs") / re.sub(r"[^\w.-]+", "_", "-".join(parts))


def join_processes(device):
    """Under `python -m torch.distributed.run --nproc-per-node N train.py`, find the others.

    Returns: whether this process is the first one, and the device that it trains on.
    """
    # torch.distributed.run tells each process in these variables who it is.
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return True, device

    # nccl is the way between GPUs, gloo between processes on CPUs.
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return torch.distributed.get_rank() == 0, device


def main(argv=None):
    run_plugin(argv)
    parser = make_parser()
    args = parse(parser, argv)

    with one_line_errors(parser):
        # The task, by its names.
        names = {name: getattr(args, name) for name in ("model", "format", "group", "commands")}
        task = make_task(names)

        # The recipe: the defaults, what the task knows better, what the user has said.
        recipe = Recipe(**{**getattr(task, "recipe_options", {}),
                           **chosen(args, [part.name for part in fields(Recipe)])})

        # The options of the model, in the same order. An LSTM has no beta_max: what the user has
        # said is kept, so that build() refuses it; what the task proposes is left out.
        known = options_of(MODELS[args.model])
        of_task = getattr(task, "model_options", {})
        options = {name: of_task[name] for name in of_task if name in known}
        of_models = set()
        for make in MODELS.values():
            of_models |= set(options_of(make))
        options = {**known, **options, **chosen(args, of_models)}
        description = {**names, "options": options}

        # Refuse, before any work, what cannot be trained, evaluated or found.
        lengths = args.test_lengths or getattr(task, "test_lengths", TEST_LENGTHS)
        for length, spacing in recipe.curriculum:
            traces = traces_per_step(recipe, length)
            try_stages(task, [(length, spacing)], traces, MOST_TRAINED)
        try_stages(task, lengths, args.traces)
        first, device = join_processes(choose_device(args.device))
        model = make_model({**description, "seed": args.seed}, task).to(device)
        folder = Path(args.out) if args.out else default_folder(args, parser)

        try:
            model, log = train(model, task, recipe, folder, resume=args.resume,
                               description=description, save_every=args.save_every)
        except FloatingPointError as error:
            parser.error(f"{error}; the checkpoint in {folder} is the last good one: try smaller "
                         "--lr, --matrix-lr")
    if first:
        results = evaluate_and_print(model, task, lengths, args.traces)

        # All that a table of results needs to know of this run, in one file.
        command = shlex.join(["python", "train.py", *(sys.argv[1:] if argv is None else argv)])
        result = {"command": command, "seed": args.seed, "steps": log[-1]["step"],
                  "stage_reached": log[-1]["stage"] + 1, "stages": len(recipe.curriculum),
                  "parameters": sum(weight.numel() for weight in model.parameters()),
                  "minutes": round(log[-1]["seconds"] / 60, 3), "device": device,
                  "threads": torch.get_num_threads(), "torch": torch.__version__,
                  "results": results}
        replace_file(folder / "result.json", json.dumps(result).encode())
    if torch.distributed.is_initialized():
        # gloo's threads let go of the last gradients some milliseconds late, and need Python for
        # it: they abort a process whose Python is ending. _exit leaves without that ending.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    data.run(main)
