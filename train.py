"""Train one model on one task: python train.py --model linrnn --group S5

Each step draws fresh traces. Training follows a curriculum of stages (length L, spacing S). A stage
is passed once the model gets `pass_accuracy` of the reveals right in `pass_patience` batches in a
row; the last stage takes `final_steps` steps.

Test traces begin with the values 1, 2, ..., and only permute them. Training adds what such traces
cannot teach:
    repeated commands   Precision: the error of one command adds up until the loss can see it.
    dense batches       Reading: they have more reveals than their stage, and random values in the
                        first lines; half of them also assign literals later, as in `b = 3`. Without
                        them a model ignores the first lines, which never change, and often the
                        reveals too. (If all batches had random values, the first stage would not
                        be learned.)

The learning rates stay constant, so the parameters end up circling a solution. Their average over
the last stage is closer to it (Izmailov et al. 2018, arXiv 1803.05407).

From Python: model, log = train(model, task, Config(curriculum=[(8, 1), (32, 4)], seed=1))
Next: analysis.ipynb, or python -m experiments.
"""

import argparse
import copy
import inspect
import json
import math
import time
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from data import UserError, generator, make_parser, run_cli, stages
from eval import LENGTHS, device, device_of, evaluate_and_print, make, read_run

DENSER = (1, 1, 2, 4)  # spacings of dense reveals; 1 is listed twice, for half of the batches
LOG_EVERY = 10  # steps
SAVE_EVERY = 50  # steps


# --- 1. What determines a run ---------------------------------------------------------------------

@dataclass
class Config:
    """Every field is an option of the command line: pass_accuracy is --pass-accuracy."""

    # The task, and the model. None means the default of the model's class in models.py.
    group: str = "S5"              # S<n>, A<n>, Z<n> or D<n>; the other defaults suit n up to 7
    commands: str = "full"         # full: permutations of all variables; swap: of two
    repeat_fraction: float = 0.5   # fraction of training traces with repeated commands
    model: str = "linrnn"          # linrnn (DeltaNet), transformer or lstm
    d_model: int = None            # width: 64 (transformer 56, lstm 60)
    layers: int = None             # 1 (transformer 2)
    heads: int = None              # linrnn, transformer: 4
    beta_max: float = None         # linrnn: 2 allows the eigenvalue -1; 1 does not
    householders: int = None       # linrnn: Householder steps per token, 1
    conv_width: int = None         # tokens that the local block sees: n + 3

    # The curriculum. The paper starts at 8:1. At 2:1 a reveal depends on one command or two, and
    # the loss falls sooner. One good batch may be luck; three in a row are not. From Python, a
    # stage may also be (L, S, steps): it takes exactly that many steps.
    curriculum: tuple = ((2, 1), (8, 1), (16, 2), (32, 4), (64, 8))  # LENGTH:SPACING,...
    batch: int = 16                # traces per step
    dense_fraction: float = 0.25   # fraction of batches with dense reveals and random values
    literal_fraction: float = 0.5  # fraction of these that also assign literals, as in `b = 3`
    pass_accuracy: float = 0.97    # reveal accuracy that a batch needs to pass a stage
    pass_patience: int = 3         # consecutive batches that must reach it
    max_curriculum_steps: int = 1500  # stop if the last stage is not reached by this step
    final_steps: int = 350         # steps of the last stage
    average: bool = True           # return the mean of the last stage's parameters (--no-average)

    # The optimisers. Muon normalises the update, so its learning rate *is* the step size. With both
    # learning rates doubled, training is as fast but less precise: some seeds fail at 256 commands.
    optimizer: str = "muon"        # muon or adamw, for the matrices
    matrix_lr: float = 0.01        # learning rate of the matrices
    lr: float = 2e-3               # learning rate of all other parameters, by AdamW
    warmup: int = 50               # steps over which both learning rates rise from 0
    weight_decay: float = 0.01     # of all parameters
    reveal_weight: float = 1.0     # weight of the extra loss on the revealed values

    seed: int = 0                  # of the traces and of the initial parameters
    compile: bool = False          # torch.compile: pays off after about 2,000 steps

    def steps_of(self, stage):
        """How many steps a stage takes; None for one that lasts until it is passed."""
        if len(self.curriculum[stage]) == 3:
            return self.curriculum[stage][2]
        return self.final_steps if stage == len(self.curriculum) - 1 else None


@dataclass
class Progress:
    """How far a run has come."""
    step: int = 0  # steps made
    stage: int = 0  # index into the curriculum
    stage_step: int = 0  # steps made in this stage
    streak: int = 0  # consecutive batches that reached pass_accuracy
    tokens: int = 0  # tokens read
    stage_ends: list = field(default_factory=list)  # tokens read at the end of each stage
    seconds: float = 0.0  # spent in steps
    finished: bool = False


# --- 2. What train() asks at every step; pass it functions of your own to change the answers ------

def draw(task, config, now, rng):
    """The batch of a step, and whether it counts towards passing the stage."""
    length, spacing, *_ = config.curriculum[now.stage]
    denser = [S for S in DENSER if S < spacing and length % S == 0]
    if not hasattr(task, "dense_batch"):  # a task of your own may lack it
        denser = []
    if config.dense_fraction and denser and rng.random() < config.dense_fraction:
        return task.dense_batch(config.batch, length, int(rng.choice(denser)), rng), False
    return task.training_batch(config.batch, length, spacing, rng), True


def loss(model, batch, config):
    """What to minimise, and the numbers for the log. batch: a Batch of tensors.

    The mean cross-entropy of all tokens, plus reveal_weight times that of the revealed values,
    since most other tokens of a random trace are unpredictable noise.
    """
    logits = model(batch.inputs)  # [B, T, vocabulary]
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    losses = losses.view(batch.targets.shape)
    mean = losses.mean()

    # Boolean indexing has a data-dependent size and forces a GPU sync; multiply by the mask.
    count = batch.reveals.sum()
    reveal_loss = (losses * batch.reveals).sum() / count
    correct = (logits.argmax(-1) == batch.targets) & batch.reveals

    # One .tolist() for all metrics: a single sync.
    numbers = torch.stack([mean, reveal_loss, correct.sum() / count]).tolist()
    metrics = dict(zip(("loss", "reveal_loss", "reveal_accuracy"), numbers))
    if math.isnan(metrics["reveal_accuracy"]):  # 0 / 0
        raise UserError("a batch of this task has no reveals")
    return mean + config.reveal_weight * reveal_loss, metrics


def lr_scale(config, now):
    """The factor of both learning rates at this step: it warms up to 1, and then stays there."""
    return min(1.0, (now.step + 1) / config.warmup)


def gives_up(model, config, now):
    """Whether training stops before its last stage is over."""
    return not config.steps_of(now.stage) and now.step >= config.max_curriculum_steps


# --- 3. The training loop -------------------------------------------------------------------------

def train(model, task, config, folder=None, resume=False,
          draw=draw, loss=loss, lr_scale=lr_scale, gives_up=gives_up):
    """Train a model on a task (data.py).

    model: a module, tokens [B, T] -> logits, on its device. Afterwards it has the last parameters.
    folder: where checkpoints go. resume: continue the run in that folder, if there is one. The two
        runs must have the same config, model and first batch; the functions below are not compared.
        (eval.load reads the folder if the config describes the model and the task.)
    draw, loss, lr_scale, gives_up: those of section 2, or functions of your own.

    Returns: a copy of the model with the averaged parameters, and the log, a list of dicts.
        (The average can fail, since the loss may be high between good solutions. An example is a
        counter modulo 5, trained on (8,1) and then (32,4): with the last parameters it gets over
        99% of the reveals right, and with the average under 15%. --no-average returns the last.)
    """
    model.train()
    now = Progress()
    log = []
    average = copy.deepcopy(model)
    optimizers = make_optimizers(model, config)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    identity = folder and identity_of(model, task, config, draw)
    if folder and has_run(folder, identity, resume):
        now, log = restore(folder, model, average, optimizers)

    network = torch.compile(model, dynamic=True) if config.compile else model  # for any length
    last = len(config.curriculum) - 1
    while not now.finished:
        # Draw. The batch depends on the seed and the step only, so a resumed run draws the batches
        # that the interrupted run would have drawn.
        start = time.perf_counter()
        stage = now.stage
        batch, counts = draw(task, config, now, generator(config.seed, "train", now.step))
        batch = to_tensors(batch, device_of(model))

        # Differentiate, and clip: one odd batch must not throw the parameters far away.
        objective, metrics = loss(network, batch, config)
        model.zero_grad()
        objective.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

        # Update. torch keeps a learning rate beside each group of parameters.
        for optimizer, peak in zip(optimizers, peaks):
            optimizer.param_groups[0]["lr"] = peak * lr_scale(config, now)
            optimizer.step()

        # Average over the last stage, unless it is the only one: move 1/n of the way to the n-th
        # parameters. Elsewhere n = 1, which copies the newest.
        n = now.stage_step + 1 if config.average and stage == last > 0 else 1
        for mean, parameter in zip(average.parameters(), model.parameters()):
            mean.data.lerp_(parameter.data, 1 / n)
        for copied, buffer in zip(average.buffers(), model.buffers()):
            copied.copy_(buffer)

        # Count. Batches that do not count neither continue a streak of good ones nor break it.
        now.step += 1
        now.stage_step += 1
        now.tokens += batch.inputs.numel()
        if counts:
            good = metrics["reveal_accuracy"] >= config.pass_accuracy
            now.streak = now.streak + 1 if good else 0

        # Move on. A new stage starts a new streak, since its batches are harder.
        length, spacing, *_ = config.curriculum[stage]
        steps = config.steps_of(stage)
        over = (now.stage_step >= steps) if steps else (now.streak >= config.pass_patience)
        if over and stage < last:
            now.stage += 1
            now.stage_step = now.streak = 0
            now.stage_ends.append(now.tokens)
            print(f"({length},{spacing}) passed after {now.step} steps, "
                  f"{now.tokens / 1e6:.2f} million tokens", flush=True)
        elif over or gives_up(model, config, now):
            now.finished = True
        now.seconds += time.perf_counter() - start

        # Log, report and save: the first step, the last, and some between.
        ends = now.step == 1 or now.finished
        if ends or now.step % LOG_EVERY == 0:
            log.append({**asdict(now), "stage": stage, "length": length, "spacing": spacing,
                        **metrics, "gradient_norm": norm.item()})
        if ends or now.step % SAVE_EVERY == 0:
            print(f"step {now.step}: ({length},{spacing}) loss {metrics['loss']:.3f}, "
                  f"reveal accuracy {metrics['reveal_accuracy']:.0%}", flush=True)
            if folder:
                save(folder, identity, config, now, log, model, average, optimizers)

    if now.stage < last:
        print(f"NOT LEARNED: stopped in stage {now.stage + 1} of {last + 1}", flush=True)
    return average.eval(), log


def to_tensors(batch, device):
    """A batch whose inputs, targets and reveals are tensors on the device; the rest is kept."""
    inputs, targets, reveals = [torch.from_numpy(part).to(device) for part in batch[:3]]
    return batch._replace(inputs=inputs, targets=targets, reveals=reveals)


def make_optimizers(model, config):
    """Muon for the matrices between embedding and unembedding, AdamW for all other parameters.

    Muon (Jordan et al. 2024) replaces the update of a matrix by approximately the nearest
    orthogonal one, so the many small directions of a noisy gradient move as fast as the few large
    ones. (torch runs its Newton-Schulz iteration in bfloat16.)
    """
    # The rows of embedding and unembedding belong to single tokens: a rare token has a small
    # gradient, but Muon would move its row as far as any other. (torch has no class for an
    # unembedding, so it is recognised by its name.)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = []
    others = []
    for name, parameter in model.named_parameters():
        is_end = parameter in embeddings or "unembedding" in name
        (matrices if parameter.ndim == 2 and not is_end else others).append(parameter)

    # beta2 below torch's 0.999: the runs are short and their gradients change quickly.
    adamw = {"betas": (0.9, 0.95), "weight_decay": config.weight_decay}
    if config.optimizer not in ("muon", "adamw"):
        raise UserError(f"optimizer must be muon or adamw; got {config.optimizer!r}")
    if config.optimizer == "muon":
        first = torch.optim.Muon(matrices, lr=config.matrix_lr, weight_decay=config.weight_decay)
    else:
        first = torch.optim.AdamW(matrices, lr=config.matrix_lr, **adamw)
    return [first, torch.optim.AdamW(others, lr=config.lr, **adamw)]


# --- 4. The run folder: model.pt, from which a run resumes with the same bits, and results.json ---

def identity_of(model, task, config, draw):
    """A checksum of what a run is: its config, its model and its first batch."""
    batch, _ = draw(task, config, Progress(), generator(config.seed, "train", 0))
    parts = [asdict(config), batch.inputs.tolist()]
    for module in model.modules():
        parts += [type(module).__name__, [x.shape for x in module.parameters(recurse=False)]]
        parts += [pair for pair in vars(module).items() if isinstance(pair[1], (int, float, str))]
    return zlib.crc32(repr(parts).encode())


def has_run(folder, identity, resume):
    """Whether the folder has a run to resume.  Raises: UserError if its run must not be touched."""
    if not (Path(folder) / "model.pt").exists():
        return False
    if read_run(folder).get("identity") != identity:
        raise UserError(f"{folder} already holds another run; choose another folder (--out DIR)")
    if not resume:
        raise UserError(f"{folder} already holds this run; continue it by --resume {folder}, or "
                        "choose another folder (--out DIR)")
    return True


def save(folder, identity, config, now, log, model, average, optimizers):
    """Write model.pt: `model` is the result so far; the rest is what changes during training."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.pt.partial"
    torch.save({"config": asdict(config), "identity": identity, "model": average.state_dict(),
                "last": model.state_dict(), "progress": asdict(now), "log": log,
                "rng": torch.get_rng_state(),  # of dropout
                "optimizers": [optimizer.state_dict() for optimizer in optimizers]}, partial)
    read_run(partial)  # refuse now, after the first step, what could not be read
    has_run(folder, identity, resume=True)  # refuse if another run has come to this folder
    partial.replace(folder / "model.pt")  # an interruption leaves the old file or the new one


def restore(folder, model, average, optimizers):
    """Load model.pt into model, average and optimisers. Returns: progress and log."""
    run = read_run(folder)
    average.load_state_dict(run["model"])
    model.load_state_dict(run["last"])
    for optimizer, state in zip(optimizers, run["optimizers"]):
        optimizer.load_state_dict(state)
    torch.set_rng_state(run.get("rng", torch.get_rng_state()))  # an older run has none
    return Progress(**run["progress"]), run["log"]


# --- 5. The command line --------------------------------------------------------------------------

def parse(argv=None):
    """A Config, and the options that are not part of a run."""
    shown = inspect.getsource(Config).partition("    def ")[0]  # the fields and their comments
    parser = make_parser("Train one model on one task.\n\n" + shown)
    add = parser.add_argument
    add("--out", metavar="DIR", help="folder of the run (default runs/MODEL-GROUP-seedN)")
    add("--resume", metavar="DIR", help="continue the run in DIR, with the options stored there")
    add("--device", type=device, default="cpu", help="cpu (default), cuda, ...")
    add("--lengths", type=stages, default=LENGTHS, help="rows LENGTH:SPACING,... of the last table")
    add("--traces", type=int, default=256, help="fresh traces for each row (default 256)")
    for part in fields(Config):
        kind = {"type": stages if part.type is tuple else part.type}
        if part.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        add(f"--{part.name.replace('_', '-')}", help=argparse.SUPPRESS, default=argparse.SUPPRESS,
            **kind)
    args = parser.parse_args(argv)
    names = [part.name for part in fields(Config)]
    typed = {name: value for name, value in vars(args).items() if name in names}
    if args.resume:
        if typed or args.out:
            raise UserError("--resume takes its config and its folder from the run")
        typed = read_run(args.resume)["config"]
    return Config(**typed), args


def main(argv=None):
    config, args = parse(argv)
    torch.manual_seed(config.seed)
    task, model = make(asdict(config))
    default = f"runs/{config.model}-{config.group}-seed{config.seed}"
    folder = Path(args.resume or args.out or default)
    folder = folder.parent if folder.is_file() else folder  # of RUN/model.pt
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters, chance {task.chance:.3f}, device {args.device}, "
          f"{torch.get_num_threads()} threads, folder {folder}", flush=True)

    try:
        model, log = train(model.to(args.device), task, config, folder, resume=bool(args.resume))
    except KeyboardInterrupt:
        print(f"\nto go on: python train.py --resume {folder}", flush=True)
        raise
    rows = evaluate_and_print(model, task, args.lengths, args.traces)
    result = {"config": asdict(config), "results": rows, **log[-1], "parameters": parameters}
    (folder / "results.json").write_text(json.dumps(result))
    print(f"\n{log[-1]['step']} steps, {log[-1]['tokens'] / 1e6:.2f} million tokens, "
          f"{log[-1]['seconds'] / 60:.2f} minutes")


if __name__ == "__main__":
    run_cli(main)
