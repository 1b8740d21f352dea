"""Train one model on one group: python train.py --model linrnn --group S5

One loop for all models, formats and groups. Each step draws fresh traces; nothing is seen twice.
Training walks through a curriculum of stages LENGTH:SPACING. A stage is left once the model answers
more than --advance of the reveals in 3 batches running; the last stage lasts --last-steps steps. A
run that does not get through the earlier stages within --max-steps ends there. --stage-steps fixes
the steps of every stage instead, to give several models the same traces. Where a task knows the
best prediction there is (Batch.best), --advance is a share of the accuracy of that prediction.

The learning rates do not decay. The model that is evaluated is the mean of the weights of all steps
of the last stage (stochastic weight averaging, Izmailov et al. 2018, arXiv 1803.05407). Untrained
weights would spoil it, so it begins when some stage is learned. Till then the last weights stand.

The loss is the mean cross-entropy of every next token, plus --reveal-weight times that of the
revealed values. Most tokens of a random program cannot be predicted (a full S5 command carries
ln 120 = 4.8 nats), and the extra weight spares the optimiser much of their noise.

A run is a folder: config.json (what determines the result), log.jsonl (a line every 10 steps) and
model.pt (the weights, and all that --resume needs). Batches are a function of (seed, step), so a
resumed run continues bit for bit on the CPU, with the same number of threads.

Next: analysis.ipynb.
"""

import argparse
import json
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from data import COMMANDS, TASKS, generator, parse_stages
from eval import append_record, evaluate_and_print, load_run, make_task_and_model, replace_file
from models import MODELS, choose_device, options_of

WARMUP = 50  # steps over which the learning rates rise from 0
STREAK = 3  # batches in a row that must pass --advance
LOG_EVERY = 10  # steps
# Options that do not change the result. All others are the run's config.
OUTER_OPTIONS = ["device", "out", "resume", "save_every", "test_lengths", "traces", "record"]


def make_parser():
    parser = argparse.ArgumentParser(prog="python train.py", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", default="linrnn", choices=MODELS)
    add("--group", default="S5", help="S<n>, A<n>, Z<n>, D<n> or a product such as A4xZ5")
    add("--format", default="repl", choices=TASKS, help="Python traces, or one token per element")
    add("--commands", default="full", choices=COMMANDS, help="whole elements, or transpositions")
    add("--beta-max", type=float, help="linrnn: 2 allows the eigenvalue -1, 1 does not")
    add("--householders", type=int, help="linrnn: steps per token, R")
    add("--conv-width", type=int, help="tokens that the local block sees (default: n + 3)")
    add("--d-model", type=int, help="width (default for this and the next two: the model's own)")
    add("--heads", type=int)
    add("--layers", type=int)
    add("--curriculum", help="stages LENGTH:SPACING,... (default: the format's own)")
    add("--advance", type=float, default=0.97, help="reveal accuracy that ends a stage")
    add("--last-steps", type=positive, default=150, help="steps of the last stage")
    add("--max-steps", type=positive, default=1500, help="steps before the last stage, at most")
    add("--stage-steps", metavar="N,N,...", help="the steps of each stage, whatever the accuracy "
        "(in place of the three options above)")
    add("--batch", type=positive, default=16, help="traces per step")
    add("--optimizer", default="muon", choices=["muon", "adamw"], help="of the hidden matrices")
    add("--matrix-lr", type=positive_float, default=0.02, help="its peak learning rate")
    add("--lr", type=positive_float, default=4e-3, help="peak learning rate of all other weights")
    add("--reveal-weight", type=float, default=1.0, help="extra, in the loss (0: none)")
    add("--seed", type=int, default=0, help="of the initial weights and of all traces")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--out", help="run folder (default: runs/ and a name made of the options)")
    add("--resume", action="store_true", help="go on from the run folder's last checkpoint")
    add("--save-every", type=positive, default=50, help="steps between checkpoints")
    add("--test-lengths", help="LENGTH:SPACING,... of the closing evaluation")
    add("--traces", type=positive, default=256, help="fresh traces for each of them")
    add("--record", metavar="FILE", help="append the finished run as one JSON line")
    return parser


def positive(text, kind=int):
    if not kind(text) > 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return kind(text)


def positive_float(text):
    return positive(text, float)


def config_of(args):
    """The options that determine the result, in full, and the task. Raises: ValueError."""
    config = {name: value for name, value in vars(args).items() if name not in OUTER_OPTIONS}
    if args.seed < 0 or args.reveal_weight < 0:
        raise ValueError("--seed and --reveal-weight must not be negative; "
                         f"got {args.seed}, {args.reveal_weight}")
    of_models = {name for model in MODELS.values() for name in options_of(model)}
    chosen = {name: config.pop(name) for name in of_models & config.keys()}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    known = options_of(MODELS[args.model])
    for name in set(chosen) - set(known):
        raise ValueError(f"--model {args.model} has no --{name.replace('_', '-')}")
    task, _ = make_task_and_model(config | {"options": chosen})  # refuses bad values
    defaults = {name: value for name, value in task.model_defaults().items() if name in known}
    config["options"] = known | defaults | chosen
    config["curriculum"] = parse_stages(args.curriculum or task.default_curriculum, task)
    if args.stage_steps:
        steps, stages = args.stage_steps, len(config["curriculum"])
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", steps) or steps.count(",") != stages - 1:
            raise ValueError(f"--stage-steps takes a positive number for each of the {stages} "
                             f"stages; got {steps}")
        config["stage_steps"] = [int(number) for number in steps.split(",")]
    return config, task


def default_folder(args):
    """runs/ and a name that spells out each option of the config that is not the default."""
    left_out, plain = {"model", "group", "seed", "chapter", *OUTER_OPTIONS}, make_parser()
    changed = [f"{name}_{value}" for name, value in vars(args).items()
               if name not in left_out and value != plain.get_default(name)]
    name = "-".join([args.model, args.group, *changed, f"seed{args.seed}"])
    return Path("runs") / re.sub(r"[^\w.-]", "_", name)


def open_folder(folder, resume, config):
    """The checkpoint of a run to go on with; else None, and a folder made. Raises: ValueError."""
    if resume:
        checkpoint, _, _ = load_run(folder)
        theirs = checkpoint["config"]
        changed = [f"{key} {theirs.get(key)} against {config.get(key)}"
                   for key in sorted({*theirs, *config}) if theirs.get(key) != config.get(key)]
        if changed:
            raise ValueError(f"--resume with other options than those of the run in {folder}: "
                             + ", ".join(changed))
        if "resume" not in checkpoint:
            raise ValueError(f"{folder} holds a model without its optimisers: it cannot be resumed")
        return checkpoint
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty: go on with --resume, "
                         "or choose another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "config.json", lambda path: path.write_text(json.dumps(config, indent=2)))
    return None


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
        self.progress = {"step": 0, "stage": 0, "stage_step": 0, "streak": 0, "learned": False,
                         "tokens": 0, "seconds": 0.0, "finished": False}

    @property
    def result(self):
        """The model to evaluate: the mean, once there is one."""
        return self.average.module if self.average.n_averaged else self.model

    def save(self):
        resume = {"model": self.model.state_dict(), "average": self.average.state_dict(),
                  "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}
        checkpoint = {"config": self.config, "progress": self.progress,
                      "model": self.result.state_dict(), "resume": resume}
        replace_file(self.folder / "model.pt", lambda path: torch.save(checkpoint, path))

    def restore(self, checkpoint):
        """Go on from a checkpoint; forget the logged steps after it, which will be made again."""
        self.progress = checkpoint["progress"]
        self.model.load_state_dict(checkpoint["resume"]["model"])
        self.average.load_state_dict(checkpoint["resume"]["average"])
        for optimizer, state in zip(self.optimizers, checkpoint["resume"]["optimizers"]):
            optimizer.load_state_dict(state)
        path = self.folder / "log.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [f"{line}\n" for line in lines
                if line.endswith("}") and json.loads(line)["step"] <= self.progress["step"]]
        replace_file(path, lambda side: side.write_text("".join(kept)))

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
    args = parser.parse_args(argv)
    try:
        config, task = config_of(args)
        test_lengths = parse_stages(args.test_lengths or task.default_lengths, task)
        device = choose_device(args.device)
        if args.record:
            open(args.record, "a").close()  # refused now, not after the training
        folder = Path(args.out) if args.out else default_folder(args)
        checkpoint = open_folder(folder, args.resume, config)
    except (ValueError, OSError) as error:
        parser.error(str(error))

    run = Run(config, folder, device)
    run.save() if checkpoint is None else run.restore(checkpoint)
    parameters = sum(weight.numel() for weight in run.model.parameters())
    print(f"{config['model']} on {config['group']} ({config['format']}, {config['commands']}): "
          f"{parameters:,} parameters, chance {run.task.chance:.3f}, device {device}, "
          f"{torch.get_num_threads()} threads, run folder {folder}")

    signals = []  # those that arrived; the loop looks here between two steps
    handlers = {number: signal.signal(number, lambda n, _: signals.append(n))
                for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        run.train(args.save_every, lambda: signals)
    except FloatingPointError as error:
        parser.error(f"{error} at step {run.progress['step'] + 1}; the checkpoint in {folder} is "
                     "the last good one. Try smaller rates: --lr, --matrix-lr")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    steps, minutes = run.progress["step"], run.progress["seconds"] / 60
    if signals:
        print(f"interrupted after step {steps}; go on with the same command and --resume")
        raise SystemExit(130)

    learned = run.progress["stage"] == len(config["curriculum"]) - 1
    print(f"trained {steps} steps in {minutes:.2f} minutes" + (
        "" if learned else f"; NOT LEARNED: stage {run.progress['stage'] + 1} was not passed"))
    try:
        results = evaluate_and_print(run.result.eval(), run.task, test_lengths, args.traces,
                                     device=device)
    except KeyboardInterrupt:
        print(f"\ninterrupted; the trained model is safe: python eval.py {folder}")
        raise SystemExit(130) from None
    if args.record:
        append_record(args.record, f"{parser.prog} {shlex.join(argv)}", {
            "seed": config["seed"], "parameters": parameters, "steps": steps,
            "stage_reached": run.progress["stage"] + 1, "stages": len(config["curriculum"]),
            "minutes": round(minutes, 3), "device": device, "results": results})


if __name__ == "__main__":
    main()
