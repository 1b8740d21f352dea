"""Train one model on one task: python train.py --model linrnn --group S5

Each step draws fresh traces. Training follows a curriculum of stages (commands, commands for each
reveal). Once the model gets 97% of the reveals right in three batches in a row, it moves on to
longer traces. At constant learning rates the parameters circle around a solution, and their average
over the last stage is closer to it (Izmailov et al. 2018, arXiv 1803.05407).

If all training traces began with the values 1, 2, ..., as test traces do, the model could ignore
the first lines and the reveals. So a quarter of the batches of spacing 2 or more are *dense*: they
have more reveals and random first values, and half of them have literals, as in `b = 3`. (If all
batches had random first values, the model would not learn the first stage: lab book.) Half of the
traces of eight commands or more repeat commands, whose errors add up until the loss notices them.

From Python:
    config = Config(curriculum=[(8, 1), (32, 4)], seed=1)
    torch.manual_seed(config.seed)  # of the initial parameters
    task, model = make(asdict(config))  # or a task and a model of your own
    average, log = train(model, task, config)

Next: analysis.ipynb, or a chapter (README has their questions).
"""

import argparse
import copy
import inspect
import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from data import UserError, generator, make_parser, run_cli, stages
from eval import (add_table_options, device_of, evaluate_and_print, limit_threads, make, positive,
                  read_run)

SAVE_EVERY = 50  # steps


# --- 1. What determines a run ---------------------------------------------------------------------

@dataclass
class Config:
    """Every field is an option of the command line: pass_accuracy is --pass-accuracy.

    None means the model's own value: that in the table OWN below, or else that of its class in
    models.py.
    """
    # The task and the model. make() of eval.py reads these fields; train() is given task and model.
    group: str = "S5"              # S<n>, A<n>, Z<n> or D<n>; the other defaults suit n up to 7
    commands: str = "full"         # full: permutations of all variables; swap: of two
    repeat_fraction: float = 0.5   # fraction of training traces with repeated commands
    literal_fraction: float = 0.5  # fraction of dense batches with literals
    model: str = "linrnn"          # linrnn (ours), deltanet (the paper's layers), transformer, lstm
    d_model: int = None            # width: 64 (transformer 56, lstm 60)
    layers: int = None             # 1 (deltanet, transformer 2)
    heads: int = None              # all but lstm: 4
    beta_max: float = None         # linrnn, deltanet: 2 allows the eigenvalue -1; 1 does not
    householders: int = None       # linrnn, deltanet: Householder steps per token, 1
    conv_width: int = None         # all but deltanet: tokens that the local block sees, n + 3

    # The curriculum. The paper starts at 8:1. At 2:1 a reveal depends on one command or two, and
    # the loss falls sooner. One good batch may be luck; three in a row are not.
    curriculum: tuple = None       # LENGTH:SPACING,...
    batch: int = 16                # traces per step
    dense_fraction: float = 0.25   # fraction of dense batches; below 1, since they pass no stage
    pass_accuracy: float = 0.97    # reveal accuracy that a batch needs to pass a stage
    pass_patience: int = 3         # consecutive batches that must reach it
    max_curriculum_steps: int = None  # stop if the last stage is not reached by this step
    final_steps: int = None        # steps of the last stage

    # The optimisers. Muon normalises the update, so its learning rate *is* the step size: with
    # twice linrnn's, training is as fast, but the model is less precise.
    optimizer: str = None          # muon or adamw, for the matrices
    matrix_lr: float = None        # learning rate of the matrices
    lr: float = None               # learning rate of all other parameters, by AdamW
    warmup: int = 50               # steps over which both learning rates rise from 0
    weight_decay: float = 0.01     # of all parameters
    reveal_weight: float = 1.0     # weight of the extra loss on the revealed values

    seed: int = 0                  # of the traces and of the initial parameters
    compile: bool = False          # torch.compile: pays off after about 2,000 steps

    # What suits each model (`baselines` in the lab book, experiments/results/README.md). A value
    # that is not here is linrnn's. (Without an annotation, this is no field.)
    OWN = {"linrnn": {"curriculum": ((2, 1), (8, 1), (16, 2), (32, 4), (64, 8)),
                      "max_curriculum_steps": 1500, "final_steps": 350,
                      "optimizer": "muon", "matrix_lr": 0.01, "lr": 2e-3},
           "deltanet": {"curriculum": ((2, 1), (8, 1), (16, 2), (32, 4), (64, 8), (128, 16)),
                        "max_curriculum_steps": 3000, "final_steps": 175},
           "lstm": {"optimizer": "adamw", "matrix_lr": 4e-3, "lr": 4e-3}}

    def __post_init__(self):
        own = self.OWN["linrnn"] | self.OWN.get(self.model, {})
        if self.optimizer not in (None, "muon", "adamw"):
            raise UserError(f"optimizer must be muon or adamw; got {self.optimizer!r}")
        if self.optimizer not in (None, own["optimizer"]) and self.matrix_lr is None:
            raise UserError(f"{self.optimizer} needs its own matrix_lr (--matrix-lr)")
        for name, value in own.items():
            if getattr(self, name) is None:
                setattr(self, name, value)


@dataclass
class Progress:
    """How far a run has come."""
    step: int = 0        # steps made
    stage: int = 0       # index into the curriculum
    stage_step: int = 0  # steps made in this stage
    streak: int = 0      # consecutive batches that reached pass_accuracy
    tokens: int = 0      # tokens read


# --- 2. What train() asks at every step; pass it functions of your own to change the answers ------

def draw(task, config, now, rng):
    """The batch of a step, and whether it counts towards passing the stage."""
    length, spacing = config.curriculum[now.stage]
    # At least half of the dense batches have a reveal after every command.
    denser = [S for S in (1, 1, 2, 4) if S < spacing and length % S == 0]
    possible = denser and hasattr(task, "dense_batch")  # a task of your own may lack it
    if possible and config.dense_fraction and rng.random() < config.dense_fraction:
        return task.dense_batch(config.batch, length, int(rng.choice(denser)), rng), False
    return task.training_batch(config.batch, length, spacing, rng), True


def loss(model, batch, config):
    """What to minimise, and the numbers for the log; reveal_accuracy must be one of them.

    It is the mean cross-entropy of all tokens, plus reveal_weight times that of the revealed
    values. Most other tokens of a random trace are unpredictable noise.
    """
    logits = model(batch.inputs)  # [B, T, vocabulary]
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    losses = losses.view_as(batch.targets)
    mean = losses.mean()

    # Multiply by the mask, and fetch all numbers at once: all else would make a GPU wait.
    count = batch.reveals.sum()
    reveal_loss = (losses * batch.reveals).sum() / count
    correct = (logits.argmax(-1) == batch.targets) & batch.reveals
    numbers = torch.stack([mean, reveal_loss, correct.sum() / count]).tolist()
    metrics = dict(zip(("loss", "reveal_loss", "reveal_accuracy"), numbers))
    return mean + config.reveal_weight * reveal_loss, metrics


def schedule(config, now):
    """The factor of both learning rates, which warms up to 1. Training ends when it is 0."""
    if now.stage == len(config.curriculum) - 1:
        over = now.stage_step >= config.final_steps
    else:
        over = now.step >= config.max_curriculum_steps  # it does not learn
    return 0 if over else min(1, (now.step + 1) / config.warmup)


# --- 3. The training loop -------------------------------------------------------------------------

def train(model, task, config, folder=None, resume=False, draw=draw, loss=loss, schedule=schedule):
    """Train a model, tokens [B, T] -> logits, on a task (data.py).

    config: train() stores its fields of the task and the model, and eval.load rebuilds both from
        them. So they should describe yours: group, beta_max, ...
    folder: where the run is saved.  resume: continue the run in that folder, if there is one.
    draw, loss, schedule: those of section 2, or functions of your own.

    Returns: the average over the last stage, or a copy of `model` if that stage is the only one or
    is not reached; and the log, a dict for each step. `model` keeps the last parameters.
    Raises: UserError if the folder holds a run, and resume is False.
    """
    now, log = Progress(), []
    last = len(config.curriculum) - 1
    average = copy.deepcopy(model)
    optimizers = make_optimizers(model, config)
    if folder and (Path(folder) / "model.pt").exists():
        if not resume:
            raise UserError(f"{folder} already holds a run; choose another folder (--out DIR), or "
                            f"continue that run by --resume {folder}")
        now, log = restore(folder, average, model, optimizers)
    network = torch.compile(model, dynamic=True) if config.compile else model  # for any length
    model.train()

    while scale := schedule(config, now):
        # The batch depends on the seed and the step only, so a resumed run draws the batches that
        # the interrupted run would have drawn.
        batch, counts = draw(task, config, now, generator(config.seed, "train", now.step))
        batch = batch._make(torch.from_numpy(part).to(device_of(model)) for part in batch)

        # Clip the gradient: one odd batch must not throw the parameters far away.
        objective, metrics = loss(network, batch, config)
        model.zero_grad()
        objective.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        for optimizer, lr in zip(optimizers, (config.matrix_lr, config.lr)):
            optimizer.param_groups[0]["lr"] = lr * scale
            optimizer.step()

        # A batch that does not count neither continues a streak of good ones nor breaks it.
        now.step += 1
        now.stage_step += 1
        now.tokens += batch.inputs.numel()
        if counts:
            good = metrics["reveal_accuracy"] >= config.pass_accuracy
            now.streak = now.streak + 1 if good else 0

        # The mean over the n steps of the last stage. Before it, or if it is the only one, n = 1, a
        # copy.
        n = now.stage_step if now.stage == last > 0 else 1
        for mean, parameter in zip(average.parameters(), model.parameters()):
            mean.data.lerp_(parameter.data, 1 / n)

        length, spacing = config.curriculum[now.stage]
        log.append({"length": length, "spacing": spacing, **asdict(now), **metrics})

        # A new stage starts a new streak, since its batches are harder.
        if now.streak >= config.pass_patience and now.stage < last:
            print(f"({length},{spacing}) passed after {now.step} steps, "
                  f"{now.tokens / 1e6:.2f} million tokens", flush=True)
            now.stage += 1
            now.stage_step = now.streak = 0

        if now.step % SAVE_EVERY == 0:
            print(f"step {now.step}: ({length},{spacing}) loss {metrics['loss']:.3f}, "
                  f"reveal accuracy {metrics['reveal_accuracy']:.0%}", flush=True)
            if folder:
                save(folder, config, now, log, average, model, optimizers)

    if folder:
        save(folder, config, now, log, average, model, optimizers)
    if now.stage < last:
        print(f"NOT LEARNED: stopped in stage {now.stage + 1} of {last + 1}", flush=True)
    return average.eval(), log


def make_optimizers(model, config):
    """Muon for the matrices between embedding and unembedding, AdamW for all other parameters.

    Muon (Jordan et al. 2024) replaces the update of a matrix by approximately the nearest
    orthogonal one, so the small directions of a noisy gradient move as fast as the large ones.
    """
    # The rows of embedding and unembedding belong to single tokens: a rare token has a small
    # gradient, but Muon would move its row as far as any other.
    matrices, others = [], []
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


# --- 4. The run folder: model.pt, from which a run resumes with the same bits ---------------------

def save(folder, config, now, log, average, model, optimizers):
    Path(folder).mkdir(parents=True, exist_ok=True)
    partial = Path(folder) / "model.pt.partial"
    torch.save({"config": asdict(config), "progress": asdict(now), "log": log,
                "model": average.state_dict(), "last": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers]}, partial)
    partial.replace(Path(folder) / "model.pt")  # an interruption leaves the old file or the new one


def restore(folder, average, model, optimizers):
    run = read_run(folder)
    average.load_state_dict(run["model"])
    model.load_state_dict(run["last"])
    for optimizer, state in zip(optimizers, run["optimizers"]):
        optimizer.load_state_dict(state)
    return Progress(**run["progress"]), run["log"]


# --- 5. The command line --------------------------------------------------------------------------

def fraction(text):
    """A type for argparse: a number from 0 to 1."""
    if not 0 <= float(text) <= 1:
        raise ValueError
    return float(text)


def main(argv=None, train=train):
    options, *_ = inspect.getsource(Config).partition("    def ")
    parser = make_parser(f"{__doc__}\n{options}")
    where = parser.add_mutually_exclusive_group().add_argument
    where("--out", metavar="DIR", help="folder of the run (default runs/MODEL-GROUP-seedN)")
    where("--resume", metavar="DIR", help="continue the run in DIR, with its options")
    add_table_options(parser)
    kinds = {int: {"type": positive}, tuple: {"type": stages}, bool: {"action": "store_true"}}
    for field in fields(Config):
        kind = kinds.get(field.type, {"type": field.type})
        if field.name == "seed":
            kind = {"type": int}
        if field.name.endswith(("_fraction", "_accuracy")):
            kind = {"type": fraction}
        parser.add_argument(f"--{field.name.replace('_', '-')}", help=argparse.SUPPRESS,
                            default=argparse.SUPPRESS, **kind)
    args = parser.parse_args(argv)

    stored = {} if args.resume is None else read_run(args.resume)["config"]
    names = [field.name for field in fields(Config)]
    typed = {name: getattr(args, name) for name in names if name in args}
    if stored and typed:
        raise UserError(f"--resume takes {', '.join(typed)} from the run")
    config = Config(**stored | typed)
    default = f"runs/{config.model}-{config.group}-seed{config.seed}"
    folder = Path(args.resume or args.out or default)

    limit_threads()
    torch.manual_seed(config.seed)
    task, model = make(asdict(config))
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters, "
          f"{config.optimizer} {config.matrix_lr:g} and adamw {config.lr:g}, "
          f"chance {task.chance:.3f}, device {args.device}, threads {torch.get_num_threads()} "
          f"(OMP_NUM_THREADS), folder {folder}", flush=True)

    start = time.time()
    try:
        model, log = train(model.to(args.device), task, config, folder, resume=bool(args.resume))
    except KeyboardInterrupt:
        raise UserError(f"interrupted; --resume {folder} goes on from the last save") from None
    print(f"{log[-1]['step']} steps, {log[-1]['tokens'] / 1e6:.2f} million tokens, "
          f"{(time.time() - start) / 60:.2f} minutes")
    print("(Above: single batches before averaging, in which some traces repeat commands.)")
    rows = evaluate_and_print(model, task, args.lengths, args.traces)
    result = {"config": asdict(config), "results": rows, **log[-1]}
    (folder / "results.json").write_text(json.dumps(result))


if __name__ == "__main__":
    run_cli(main)
