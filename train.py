"""Train one model on one group: python train.py --model linrnn --group S5

Each step draws fresh traces; nothing is seen twice. Training walks through a curriculum of stages
LENGTH:SPACING. A stage is left once the model answers more than --advance of the reveals in 3
batches running; the last stage lasts --last-steps steps. A run that does not get through the
earlier stages within --max-steps ends there. --stage-steps fixes the steps of every stage instead.
Where a task knows the best prediction (Batch.best), --advance is a share of that one's accuracy.

The learning rates do not decay. The model that is evaluated is the mean of the weights of all steps
of the last stage (Izmailov et al. 2018, arXiv 1803.05407), or the last ones if no stage is learned.

The loss is the mean cross-entropy of every next token, plus --reveal-weight times that of the
revealed values: most other tokens of a random program cannot be predicted, and are noise.

A run is a folder: config.json, log.jsonl (a line every 10 steps) and model.pt (the weights, and all
that --resume needs). On the CPU, with as many threads, a resumed run continues bit for bit.

Next: analysis.ipynb.
"""

import signal

if __name__ == "__main__":  # Ctrl-C, also while importing, and a closed pipe end it in silence
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(getattr(signal, "SIGPIPE", signal.SIGINT), signal.SIG_DFL)  # not in Windows

import argparse
import json
import re
import shlex
import sqlite3
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from data import COMMANDS, TASKS, generator, number, parse_stages, user_errors
from eval import (append_record, check_record, evaluate_and_print, load_run, make_task_and_model,
                  replace_file)
from models import MODELS, choose_device, options_of

WARMUP = 50  # steps over which the learning rates rise from 0
STREAK = 3  # batches in a row that must pass --advance
LOG_EVERY = 10  # steps
OUTER_OPTIONS = "device out resume save_every test_lengths traces record".split()  # not the config


def make_parser():
    parser = argparse.ArgumentParser(prog="python train.py", description=__doc__.split("\n")[0])
    add, rate = parser.add_argument, number(1e-9, 100, float)
    add("--model", default="linrnn", choices=MODELS)
    add("--group", default="S5", help="S<n>, A<n>, Z<n>, D<n> or a product such as A4xZ5")
    add("--format", default="repl", choices=TASKS, help="Python traces, or one token per element")
    add("--commands", default="full", choices=COMMANDS, help="whole elements, or transpositions")
    add("--beta-max", type=number(0, 2, float), help="linrnn: 2 allows the eigenvalue -1, 1 not")
    add("--householders", type=number(1), help="linrnn: steps per token, R")
    add("--conv-width", type=number(1), help="tokens that the local block sees (default: n + 3)")
    add("--d-model", type=number(1), help="width (default of this and the next two: the model's)")
    add("--heads", type=number(1))
    add("--layers", type=number(1))
    add("--curriculum", help="stages LENGTH:SPACING,... (default: the format's own)")
    add("--advance", type=number(-1, 2, float), default=0.97, help="accuracy that ends a stage")
    add("--last-steps", type=number(1), default=150, help="steps of the last stage")
    add("--max-steps", type=number(1), default=1500, help="steps before the last stage, at most")
    add("--stage-steps", metavar="N,N,...", help="the steps of each stage, instead of accuracies")
    add("--batch", type=number(1), default=16, help="traces per step")
    add("--optimizer", default="muon", choices=["muon", "adamw"], help="of the hidden matrices")
    add("--matrix-lr", type=rate, help="its peak learning rate (0.02; falls as 1 / sqrt n from S6)")
    add("--lr", type=rate, help="peak rate of all other weights (0.004; falls as 1 / n from S6)")
    add("--reveal-weight", type=number(0, 100, float), default=1.0, help="extra loss (0: none)")
    add("--seed", type=number(0), default=0, help="of the initial weights and of all traces")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--compile", action="store_true", help="torch.compile, which takes a minute")
    add("--out", help="run folder (default: runs/ and a name made of the options)")
    add("--resume", action="store_true", help="go on from the run folder's last checkpoint")
    add("--save-every", type=number(1), default=50, help="steps between checkpoints")
    add("--test-lengths", help="LENGTH:SPACING,... of the closing evaluation")
    add("--traces", type=number(1, 10**5), default=256, help="fresh traces for each of them")
    add("--record", metavar="FILE", help="append the finished run as one JSON line")
    return parser


def config_of(args):
    """The options that determine the result, in full, and the task. Raises: ValueError."""
    config = {name: value for name, value in vars(args).items() if name not in OUTER_OPTIONS}
    of_models = {name for model in MODELS.values() for name in options_of(model)}
    chosen = {name: value for name in of_models if (value := config.pop(name, None)) is not None}
    task, _ = make_task_and_model(config | {"options": chosen}, "meta")  # refuses bad values
    known, rule = options_of(MODELS[args.model]), task.model_defaults()
    config["options"] = known | {name: rule[name] for name in rule if name in known} | chosen
    fall = min(1.0, 5 / task.group.degree)  # a wide convolution sums many terms
    config |= {"lr": args.lr or 4e-3 * fall, "matrix_lr": args.matrix_lr or 0.02 * fall**0.5}
    config["curriculum"] = parse_stages(args.curriculum or task.default_curriculum, task,
                                        args.batch, 2**16)  # some 12 GB at the default width
    if args.stage_steps:
        steps, stages = args.stage_steps, len(config["curriculum"])
        if not re.fullmatch(r"[1-9]\d{0,7}" + r",[1-9]\d{0,7}" * (stages - 1), steps):
            raise ValueError(f"--stage-steps takes {stages} positive numbers; got {steps}")
        config["stage_steps"] = [int(part) for part in steps.split(",")]
    return config, task


PARTS = {"config.json", "log.jsonl", "model.pt", "lock", "lock-journal", ".DS_Store"}  # of macOS
LOCKS = {}  # of the folders that this process trains in; no lock outlives its process


def open_folder(folder, resume, config, record=None):
    """The checkpoint of a run to go on with, or None for a new one; makes the folder and locks it.
    Without model.pt it is that of a run stopped in its first seconds, which starts over."""
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    foreign = {name.removesuffix(".partial") for name in names} - PARTS
    started, checkpoint = "model.pt" in names, None
    if started and not resume or foreign and not started:
        raise ValueError(f"{folder} is not empty: go on with --resume if it holds this run, "
                         "or choose another folder with --out")
    if started:
        checkpoint, _, _ = load_run(folder)
        theirs = checkpoint["config"]
        changed = [f"{key} {theirs.get(key)} against {config.get(key)}"
                   for key in {**theirs, **config} if theirs.get(key) != config.get(key)]
        if changed:
            raise ValueError(f"--resume with other options than those of the run in {folder}: "
                             + ", ".join(changed))
    if record:
        check_record(record)
    folder.mkdir(parents=True, exist_ok=True)
    if folder in LOCKS:
        LOCKS.pop(folder).close()
    LOCKS[folder] = sqlite3.connect(folder / "lock", timeout=0)
    try:
        LOCKS[folder].execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        raise ValueError(f"another process trains in {folder}, or it cannot be locked: {error}")
    if not started:
        (folder / "log.jsonl").unlink(missing_ok=True)
    text = json.dumps(config, indent=2).encode()
    replace_file(folder / "config.json", lambda file: file.write(text))
    return checkpoint


def make_optimizers(model, config):
    """One for the matrices between embedding and head, and AdamW for all other weights.

    Muon (Jordan et al. 2024) replaces the update of a matrix by the nearest orthogonal one. So the
    many small directions of a noisy gradient move as fast as the few large ones.
    """
    outer = {model.embedding.weight, model.head.weight}
    matrices = [p for p in model.parameters() if p.ndim == 2 and p not in outer]
    others = [p for p in model.parameters() if p.ndim != 2 or p in outer]
    adamw = {"betas": (0.9, 0.95), "weight_decay": 0.01}
    hidden = torch.optim.AdamW(matrices, lr=config["matrix_lr"], **adamw)
    if config["optimizer"] == "muon":
        hidden = torch.optim.Muon(matrices, lr=config["matrix_lr"], weight_decay=0.01)
    return [hidden, torch.optim.AdamW(others, lr=config["lr"], **adamw)]


def train_step(model, optimizers, inputs, targets, reveals, reveal_weight):
    """One update, and what it measured. Raises: FloatingPointError, before any harm is done."""
    logits = model(inputs)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(),
                             reduction="none").view(targets.shape)
    loss, reveal_loss = losses.mean(), losses[reveals].mean()
    for optimizer in optimizers:
        optimizer.zero_grad()
    (loss + reveal_weight * reveal_loss).backward()
    gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not (loss.isfinite() and gradient_norm.isfinite()):
        raise FloatingPointError(f"the loss is {loss.item()}, its gradient {gradient_norm.item()}")
    for optimizer in optimizers:
        optimizer.step()
    accuracy = (logits.argmax(-1) == targets)[reveals].float().mean()
    return {"loss": loss.item(), "reveal_loss": reveal_loss.item(),
            "reveal_accuracy": accuracy.item(), "gradient_norm": gradient_norm.item()}


def advance(config, progress, accuracy):
    """Count the step just made, and move on to the next stage, or to the end, if it is time."""
    progress["step"] += 1
    progress["stage_step"] += 1
    progress["streak"] = progress["streak"] + 1 if accuracy > config["advance"] else 0
    progress["learned"] |= progress["streak"] == STREAK
    last = progress["stage"] == len(config["curriculum"]) - 1
    if config["stage_steps"]:
        over = progress["stage_step"] == config["stage_steps"][progress["stage"]]
    elif last:
        over = progress["stage_step"] == config["last_steps"]
    else:
        over = progress["streak"] == STREAK
        progress["finished"] = not over and progress["step"] >= config["max_steps"]
    if over and last:
        progress["finished"] = True
    elif over:
        progress.update(stage=progress["stage"] + 1, stage_step=0, streak=0)


class Run:
    """All that changes while a model is trained, and that a checkpoint must hold."""

    def __init__(self, config, folder, device):
        self.config, self.folder, self.device = config, folder, device
        self.task, self.model = make_task_and_model(config)
        self.model.to(device)
        self.optimizers = make_optimizers(self.model, config)
        self.rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self.average = AveragedModel(self.model)  # the mean of the weights given to it, one by one
        if config["compile"]:
            self.model.compile()
        self.progress = {"step": 0, "stage": 0, "stage_step": 0, "streak": 0, "learned": False,
                         "tokens": 0, "seconds": 0.0, "finished": False}

    @property
    def result(self):
        """The model to evaluate: the mean, once there is one."""
        return self.average.module if self.average.n_averaged else self.model

    def save(self):
        for weights in (self.model.parameters(), self.result.parameters()):
            if not all(weight.isfinite().all() for weight in weights):
                raise FloatingPointError("the weights are not all finite")
        resume = {"model": self.model.state_dict(), "average": self.average.state_dict(),
                  "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}
        checkpoint = {"config": self.config, "progress": self.progress,
                      "model": self.result.state_dict(), "resume": resume}
        replace_file(self.folder / "model.pt", lambda file: torch.save(checkpoint, file))

    def restore(self, checkpoint):
        """Go on from a checkpoint; forget the logged steps after it, which will be made again."""
        try:
            resume, self.progress = checkpoint["resume"], checkpoint["progress"]
            self.model.load_state_dict(resume["model"])
            self.average.load_state_dict(resume["average"])
            for optimizer, state in zip(self.optimizers, resume["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        except Exception:  # of any kind, since the file may hold anything
            raise ValueError(f"{self.folder} cannot be resumed: optimisers do not fit") from None
        path = self.folder / "log.jsonl"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        logged = [re.fullmatch(r'{"step": (\d+), .*}', line) for line in lines]
        kept = [f"{x[0]}\n" for x in logged if x and int(x[1]) <= self.progress["step"]]
        replace_file(path, lambda file: file.write("".join(kept).encode()))

    def make_step(self):
        """One step of the current stage: draw, update, average, advance. Returns a log entry."""
        config, progress = self.config, self.progress
        start = time.perf_counter()
        length, spacing = config["curriculum"][progress["stage"]]
        batch = self.task.training_batch(config["batch"], length, spacing,
                                         generator(config["seed"], "train", progress["step"]))
        tensors = [torch.from_numpy(x).to(self.device).contiguous() for x in batch[:3]]
        for optimizer, rate in zip(self.optimizers, self.rates):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (progress["step"] + 1) / WARMUP)
        metrics = train_step(self.model, self.optimizers, *tensors, config["reveal_weight"])
        if batch.best is not None:
            metrics["bayes_accuracy"] = batch.best.max(-1).mean()
        if progress["learned"] and progress["stage"] == len(config["curriculum"]) - 1:
            self.average.update_parameters(self.model)
        advance(config, progress, metrics["reveal_accuracy"] / metrics.get("bayes_accuracy", 1.0))
        progress["tokens"] += tensors[0].numel()
        progress["seconds"] += time.perf_counter() - start
        return {"step": progress["step"], "length": length, "spacing": spacing, **metrics,
                "tokens": progress["tokens"], "seconds": progress["seconds"]}

    def train(self, save_every, interrupted):
        """The loop: until the run is finished, or interrupted() says to stop; saves either way."""
        progress, config = self.progress, self.config
        most, last = config["max_steps"] + config["last_steps"], len(config["curriculum"]) - 1
        with open(self.folder / "log.jsonl", "a") as log, \
                tqdm(initial=progress["step"], total=sum(config["stage_steps"] or [most])) as bar:
            while not progress["finished"] and not interrupted():
                row = self.make_step()
                if progress["stage"] == last and not config["stage_steps"]:
                    bar.total = progress["step"] - progress["stage_step"] + config["last_steps"]
                bar.set_postfix_str(f"({row['length']},{row['spacing']}) loss {row['loss']:.3f}, "
                                    f"reveals right {row['reveal_accuracy']:.0%}", refresh=False)
                bar.update()
                if progress["step"] % LOG_EVERY == 0 or progress["finished"]:
                    log.write(json.dumps(row) + "\n")
                    log.flush()
                if progress["step"] % save_every == 0:
                    self.save()
        self.save()


def main(argv=None, parser=None):
    """Train, evaluate, record. A chapter hands in a parser with more flags."""
    argv, parser = sys.argv[1:] if argv is None else argv, parser or make_parser()
    with user_errors(parser, argv) as args:
        config, task = config_of(args)
        test_lengths = parse_stages(args.test_lengths or task.default_lengths, task, args.traces)
        device = choose_device(args.device)
        left_out, plain = {"model", "group", "seed", "chapter", *OUTER_OPTIONS}, make_parser()
        changed = [f"{name}_{value}" for name, value in vars(args).items()
                   if name not in left_out and value != plain.get_default(name)]
        name = "-".join([args.model, args.group, *changed, f"seed{args.seed}"])
        folder = Path(args.out or "runs/" + re.sub(r"[^\w.-]", "_", name))
        run = Run(config, folder, device)  # takes a second or two, and leaves nothing behind
        checkpoint = open_folder(folder, args.resume, config, args.record)
        run.restore(checkpoint) if checkpoint else run.save()
    parameters = sum(weight.numel() for weight in run.model.parameters())
    print(f"{config['model']} on {config['group']} ({config['format']}, {config['commands']}): "
          f"{parameters:,} parameters, chance {run.task.chance:.3f}, device {device}, "
          f"{torch.get_num_threads()} threads, run folder {folder}, from step "
          f"{run.progress['step']}", flush=True)
    signals = []  # those that arrived; the loop looks here between two steps
    handlers = {signum: signal.signal(signum, lambda n, _: signals.append(n))
                for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        run.train(args.save_every, lambda: signals)
        for signum in handlers:
            signal.signal(signum, signal.default_int_handler)  # from now on there is no step to end
        if signals:
            raise KeyboardInterrupt
        steps, stage = run.progress["step"], run.progress["stage"] + 1
        minutes, stages = run.progress["seconds"] / 60, len(config["curriculum"])
        print(f"trained {steps} steps in {minutes:.2f} minutes" + (
            "" if stage == stages else f"; NOT LEARNED: stage {stage} was not passed"))
        results = evaluate_and_print(run.result.eval(), task, test_lengths, args.traces, 0, device)
        if args.record:
            append_record(args.record, f"{parser.prog} {shlex.join(argv)}", {
                "seed": config["seed"], "parameters": parameters, "steps": steps,
                "stage_reached": stage, "stages": stages, "minutes": round(minutes, 3),
                "device": device, "results": results})
    except KeyboardInterrupt:
        print(f"\ninterrupted after step {run.progress['step']}; {folder} keeps it: use --resume")
        raise SystemExit(130) from None
    except (FloatingPointError, NotImplementedError, OSError) as error:  # an exercise, too
        parser.error(f"{error} after step {run.progress['step']}; the checkpoint in {folder} is "
                     "the last good one. If a number is not finite, try smaller --lr, --matrix-lr")
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


if __name__ == "__main__":
    main()
