"""Train one model on one task: python train.py --model linrnn --group S5

Each step draws fresh traces. Training follows a curriculum of stages (length L, spacing S). Once
the model gets `pass_accuracy` of the reveals right in `pass_patience` batches in a row, it passes a
stage; the last one takes `final_steps` steps.

If all training traces began with the values 1, 2, ..., as test traces do, the model could ignore
the first lines and the reveals. So a quarter of the batches are *dense*: they have more reveals and
random first values, and half of them have literals, as in `b = 3`. (If all batches had random first
values, the model would not learn the first stage.) Half of all traces repeat commands, whose errors
add up until the loss notices them.

At constant learning rates the parameters circle around a solution. Their average over the last
stage is closer to it (Izmailov et al. 2018, arXiv 1803.05407).

From Python:
    config = Config(curriculum=[(8, 1), (32, 4)], seed=1)
    torch.manual_seed(config.seed)  # of the initial parameters
    task, model = make(asdict(config))  # or a task and a model of your own
    model, log = train(model, task, config)

Next: analysis.ipynb, or python -m experiments.
"""

import argparse
import copy
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
from eval import add_table_options, device_of, evaluate_and_print, make, read_run

DENSER = (1, 1, 2, 4)  # spacings of dense reveals; 1 is listed twice, for half of the batches
LOG_EVERY = 10  # steps
SAVE_EVERY = 50  # steps


# --- 1. What determines a run ---------------------------------------------------------------------

# Each model's own learning rates, from its grid (lab book, `baselines`). Others get linrnn's.
RATES = {"linrnn": {"optimizer": "muon", "matrix_lr": 0.01, "lr": 2e-3},
         "transformer": {"optimizer": "muon", "matrix_lr": 0.01, "lr": 2e-3},
         "lstm": {"optimizer": "adamw", "matrix_lr": 4e-3, "lr": 4e-3}}


@dataclass
class Config:
    """Every field is an option of the command line: pass_accuracy is --pass-accuracy."""

    # The task and the model. make() of eval.py reads these fields; train() is given task and model.
    # None means the default of the model's class in models.py.
    group: str = "S5"              # S<n>, A<n>, Z<n> or D<n>; the other defaults suit n up to 7
    commands: str = "full"         # full: permutations of all variables; swap: of two
    repeat_fraction: float = 0.5   # fraction of training traces with repeated commands
    literal_fraction: float = 0.5  # fraction of dense batches with literals
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
    dense_fraction: float = 0.25   # fraction of batches that are dense
    pass_accuracy: float = 0.97    # reveal accuracy that a batch needs to pass a stage
    pass_patience: int = 3         # consecutive batches that must reach it
    max_curriculum_steps: int = 1500  # stop if the last stage is not reached by this step
    final_steps: int = 350         # steps of the last stage
    average: bool = True           # return the mean of the last stage's parameters (--no-average)

    # The optimisers. Muon normalises the update, so its learning rate *is* the step size. None
    # becomes the model's own (RATES): linrnn 0.01 and 2e-3; twice as much is as fast but less
    # precise. (To copy a Config for another model, set these three to None again.)
    optimizer: str = None          # muon or adamw, for the matrices
    matrix_lr: float = None        # learning rate of the matrices
    lr: float = None               # learning rate of all other parameters, by AdamW
    warmup: int = 50               # steps over which both learning rates rise from 0
    weight_decay: float = 0.01     # of all parameters
    reveal_weight: float = 1.0     # weight of the extra loss on the revealed values

    seed: int = 0                  # of the traces and of the initial parameters
    compile: bool = False          # torch.compile: pays off after about 2,000 steps

    def __post_init__(self):
        """Fill in the learning rates.  Raises: UserError if they are another optimiser's."""
        own = RATES.get(self.model, RATES["linrnn"])
        if self.optimizer not in (None, "muon", "adamw"):
            raise UserError(f"optimizer must be muon or adamw; got {self.optimizer!r}")
        if self.optimizer not in (None, own["optimizer"]) and self.matrix_lr is None:
            raise UserError(f"{self.optimizer} needs its own matrix_lr (--matrix-lr)")
        for name, value in own.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

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
    possible = denser and hasattr(task, "dense_batch")  # a task of your own may lack it
    if possible and config.dense_fraction and rng.random() < config.dense_fraction:
        return task.dense_batch(config.batch, length, int(rng.choice(denser)), rng), False
    return task.training_batch(config.batch, length, spacing, rng), True


def loss(model, batch, config):
    """What to minimise, and the numbers for the log. batch: a Batch of tensors."""
    return loss_of(model(batch.inputs), batch, config)


def loss_of(logits, batch, config):
    """The mean cross-entropy of all tokens, plus reveal_weight times that of the revealed values.

    Most other tokens of a random trace are unpredictable noise.  logits: [B, T, vocabulary].
    """
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
    return mean + config.reveal_weight * reveal_loss, metrics


def lr_scale(config, now):
    """The factor of both learning rates at this step: it warms up to 1, and then stays there."""
    return min(1.0, (now.step + 1) / config.warmup)


def gives_up(model, config, now):
    """Whether training stops before its last stage is over."""
    return config.steps_of(now.stage) is None and now.step >= config.max_curriculum_steps


# --- 3. The training loop -------------------------------------------------------------------------

def train(model, task, config, folder=None, resume=False,
          draw=draw, loss=loss, lr_scale=lr_scale, gives_up=gives_up):
    """Train a model on a task (data.py).

    model: a module, tokens [B, T] -> logits, on its device. Afterwards it has the last parameters.
    config: of its fields, those of the task and the model are only stored.
    folder: where checkpoints go. resume: continue the run in that folder, if there is one: the run
        of the same config, model and task.
    draw, loss, lr_scale, gives_up: those of section 2, or functions of your own. (resume compares
        the batches that draw makes, and not the other three.)

    Returns: a copy of the model with the averaged parameters, and the log, a list of dicts.
    Raises: UserError, e.g. if a gradient is not finite.
    """
    model.train()
    now = Progress()
    log = []
    last = len(config.curriculum) - 1
    averages = config.average and last > 0
    average = copy.deepcopy(model)
    optimizers = make_optimizers(model, config)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    identity = folder and identity_of(model, task, config, draw)
    if folder and has_run(folder, identity, resume):
        now, log = restore(folder, model, average, optimizers)

    network = torch.compile(model, dynamic=True) if config.compile else model  # for any length
    while not now.finished:
        start = time.perf_counter()
        stage = now.stage
        length, spacing, *_ = config.curriculum[stage]

        # Draw. The batch depends on the seed and the step only, so a resumed run draws the batches
        # that the interrupted run would have drawn.
        batch, counts = draw(task, config, now, generator(config.seed, "train", now.step))
        batch = to_tensors(batch, device_of(model))

        # Differentiate, and clip: one odd batch must not throw the parameters far away.
        objective, metrics = loss(network, batch, config)
        model.zero_grad()
        objective.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        if not math.isfinite(norm):
            raise UserError(f"step {now.step + 1}: the gradient is not finite; try a lower lr "
                            "(or does a batch have no reveals?)")

        # Update, and average over the last stage, unless it is the only one.
        for optimizer, peak in zip(optimizers, peaks):
            optimizer.param_groups[0]["lr"] = peak * lr_scale(config, now)
            optimizer.step()
        update_mean(average, model, now.stage_step + 1 if averages and stage == last else 1)

        # Count. A batch that does not count neither continues a streak of good ones nor breaks it.
        now.step += 1
        now.stage_step += 1
        now.tokens += batch.inputs.numel()
        if counts:
            good = metrics["reveal_accuracy"] >= config.pass_accuracy
            now.streak = now.streak + 1 if good else 0

        # Move on. A new stage starts a new streak, since its batches are harder.
        steps = config.steps_of(stage)
        passed = now.streak >= config.pass_patience if steps is None else now.stage_step >= steps
        if passed and stage < last:
            print(f"({length},{spacing}) passed after {now.step} steps, "
                  f"{now.tokens / 1e6:.2f} million tokens", flush=True)
            now.stage += 1
            now.stage_step = now.streak = 0
            now.stage_ends.append(now.tokens)
        else:
            now.finished = passed or gives_up(model, config, now)
        now.seconds += time.perf_counter() - start

        # Log, report and save: the first step, the last, and some between.
        first_or_last = now.step == 1 or now.finished
        if first_or_last or now.step % LOG_EVERY == 0:
            log.append({**asdict(now), "stage": stage, "length": length, "spacing": spacing,
                        **metrics, "gradient_norm": norm})
        if first_or_last or now.step % SAVE_EVERY == 0:
            print(f"step {now.step}: ({length},{spacing}) loss {metrics['loss']:.3f}, "
                  f"reveal accuracy {metrics['reveal_accuracy']:.0%}", flush=True)
            if folder:
                save(folder, identity, config, now, log, model, average, optimizers)

    if now.stage < last:
        print(f"NOT LEARNED: stopped in stage {now.stage + 1} of {last + 1}", flush=True)
    return average.eval(), log


def update_mean(average, model, n):
    """Move the parameters of `average` 1/n of the way to those of the model; n = 1 copies them.

    So after n steps they are the mean of n. (If the loss is high between good solutions, their mean
    is worse than each of them.)
    """
    for mean, parameter in zip(average.parameters(), model.parameters()):
        mean.data.lerp_(parameter.data, 1 / n)
    for newest, buffer in zip(average.buffers(), model.buffers()):
        newest.copy_(buffer)


def to_tensors(batch, device):
    """A batch whose inputs, targets and reveals are tensors on the device; the rest is kept."""
    inputs, targets, reveals = [torch.from_numpy(part).to(device) for part in batch[:3]]
    return batch._replace(inputs=inputs, targets=targets, reveals=reveals)


def make_optimizers(model, config):
    """Muon for the matrices between embedding and unembedding, AdamW for all other parameters.

    Muon (Jordan et al. 2024) replaces the update of a matrix by approximately the nearest
    orthogonal one, so the small directions of a noisy gradient move as fast as the large ones.
    """
    # The rows of embedding and unembedding belong to single tokens: a rare token has a small
    # gradient, but Muon would move its row as far as any other.
    matrices = []
    others = []
    for name, parameter in model.named_parameters():
        between = parameter.ndim == 2 and "embedding" not in name
        (matrices if between else others).append(parameter)

    # beta2 below torch's 0.999: the runs are short and their gradients change quickly.
    adamw = {"betas": (0.9, 0.95), "weight_decay": config.weight_decay}
    if config.optimizer == "muon":
        first = torch.optim.Muon(matrices, lr=config.matrix_lr, weight_decay=config.weight_decay)
    else:
        first = torch.optim.AdamW(matrices, lr=config.matrix_lr, **adamw)
    return [first, torch.optim.AdamW(others, lr=config.lr, **adamw)]


# --- 4. The run folder: model.pt, from which a run resumes with the same bits, and results.json ---

def identity_of(model, task, config, draw):
    """A checksum of what a run is: its config, its model, a batch of its first and last stage."""
    parts = [asdict(config), str(model)]
    for stage in (0, len(config.curriculum) - 1):
        batch, _ = draw(task, config, Progress(stage=stage), generator(config.seed, "train", 0))
        parts.append(batch.inputs.tolist())
    return zlib.crc32(json.dumps(parts).encode())


def has_run(folder, identity, resume):
    """Whether the folder has a run to resume.  Raises: UserError if its run must not be touched."""
    if not (Path(folder) / "model.pt").exists():
        return False
    if not resume or read_run(folder).get("identity") != identity:
        raise UserError(f"{folder} already holds a run; choose another folder (--out DIR), or "
                        f"continue the same run by --resume {folder}")
    return True


def save(folder, identity, config, now, log, model, average, optimizers):
    """Write model.pt: `model` is the result so far; the rest is what changes during training."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.pt.partial"
    run = {"config": asdict(config), "identity": identity, "model": average.state_dict(),
           "last": model.state_dict(), "progress": asdict(now), "log": log,
           "rng": torch.get_rng_state(),  # of dropout on the CPU
           "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    torch.save(run, partial)
    partial.replace(folder / "model.pt")  # an interruption leaves the old file or the new one


def restore(folder, model, average, optimizers):
    """Load model.pt into model, average and optimisers. Returns: progress and log."""
    run = read_run(folder)
    average.load_state_dict(run["model"])
    model.load_state_dict(run["last"])
    for optimizer, state in zip(optimizers, run["optimizers"]):
        optimizer.load_state_dict(state)
    torch.set_rng_state(run["rng"])
    return Progress(**run["progress"]), run["log"]


# --- 5. The command line --------------------------------------------------------------------------

def parse(argv=None):
    """A Config, and the options that are not part of a run."""
    # The comments of the fields are the help.
    source = Path(__file__).read_text(encoding="utf-8")
    shown = source[source.index("class Config:"):source.index("    def __post_init__")].rstrip()
    parser = make_parser("Train one model on one task.\n\n" + shown)
    add = parser.add_argument
    add("--out", metavar="DIR", help="folder of the run (default runs/MODEL-GROUP-seedN)")
    add("--resume", metavar="DIR", help="continue the run in DIR, with its own config")
    add_table_options(parser)
    for part in fields(Config):
        kind = {"type": stages if part.type is tuple else part.type}
        if part.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        add(f"--{part.name.replace('_', '-')}", help=argparse.SUPPRESS, default=argparse.SUPPRESS,
            **kind)
    args = parser.parse_args(argv)
    typed = {part.name: getattr(args, part.name) for part in fields(Config) if part.name in args}
    if args.resume:
        if typed or args.out:
            raise UserError("--resume takes its config and its folder from the run")
        typed = read_run(args.resume)["config"]
    return Config(**typed), args


def main(argv=None, train=train):
    config, args = parse(argv)
    torch.set_num_threads(1)  # the tensors are small: a second thread would mostly wait
    torch.manual_seed(config.seed)
    task, model = make(asdict(config))
    default = f"runs/{config.model}-{config.group}-seed{config.seed}"
    folder = Path(args.resume or args.out or default)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters, {config.optimizer} {config.matrix_lr:g} and adamw "
          f"{config.lr:g}, chance {task.chance:.3f}, device {args.device}, folder {folder}",
          flush=True)

    model, log = train(model.to(args.device), task, config, folder, resume=bool(args.resume))
    rows = evaluate_and_print(model, task, args.lengths, args.traces)
    result = {"config": asdict(config), "results": rows, **log[-1], "parameters": parameters}
    (folder / "results.json").write_text(json.dumps(result))
    print(f"\n{log[-1]['step']} steps, {log[-1]['tokens'] / 1e6:.2f} million tokens, "
          f"{log[-1]['seconds'] / 60:.2f} minutes")


if __name__ == "__main__":
    run_cli(main)
