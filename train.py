"""Train one model on one group: python train.py --model linrnn --group S5

One loop for all models, both formats and all groups. Each step draws fresh traces; nothing is seen
twice. Training walks through a curriculum of stages LENGTH:SPACING. A stage is left once the model
answers more than --advance of the reveals in 3 batches running; the last stage lasts --last-steps
steps. A run that does not get through the earlier stages within --max-steps ends there. To give
several models the same traces instead, --stage-steps fixes the steps of every stage.

With --uncertain P a share P of the commands stands behind a coin. No model can then be right all
the time: a stage is left at --advance times the accuracy of the best prediction there is, that of
the exact filter on the same batch (data.py).

The learning rates do not decay. The model that is saved and evaluated is instead the mean of the
weights of all steps of the last stage (stochastic weight averaging, Izmailov et al. 2018,
arXiv 1803.05407). The single weights on the way are far worse: see README.

The loss is the mean cross-entropy of every next token, plus --reveal-weight times that of the
revealed values. Most tokens of a random program cannot be predicted (a full S5 command carries
ln 120 = 4.8 nats); the extra weight spares the optimiser much of their noise. --reveal-weight 0
is plain next-token prediction, see README.

With --codes a memory that takes errors off the state (models.py, CleanUp) learns in the last stage,
on the same traces, from the states of the mean model: those of the single weights move too fast. It
leaves the network as it is.

A run is a folder: config.json (what determines the result), log.jsonl (a line every 10 steps),
model.pt (weights and all that is needed to go on; replaced atomically). Batches are a function of
(seed, step): a resumed run continues bit for bit, on the CPU with the same number of threads.

Next: eval.py.
"""

import argparse
import json
import operator
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from data import COMMANDS, TASKS, Group, parse_stages, stream
from models import MODELS, CleanUp, build, choose_device, clean_ups, options_of

WARMUP = 50  # steps over which the learning rates rise from 0
STREAK = 3  # batches in a row that must pass --advance
LOG_EVERY = 10  # steps
MEMORY_RATE = 0.02  # of the AdamW for the CleanUps
TYPICAL_STAGE = 100  # steps, for the estimate of the time left

# Options that do not change the result. All others are the run's config.
OUTER_OPTIONS = ["device", "out", "resume", "save_every", "test_lengths", "traces", "record"]


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", default="linrnn", choices=MODELS)
    add("--group", default="S5", help="S<n>, A<n>, Z<n>, D<n> or a product such as A4xZ5")
    add("--format", default="repl", choices=TASKS, help="Python traces, or one token per element")
    add("--commands", default="full", choices=COMMANDS, help="whole elements, or transpositions")
    add("--uncertain", type=float, default=0.0, metavar="P",
        help="share of the commands behind `if random() < p:`, 0 to 1")
    add("--beta-max", type=float, help="linrnn: 2 allows the eigenvalue -1, 1 does not")
    add("--householders", type=int, help="linrnn: steps per token, R")
    add("--codes", type=int,
        help="linrnn: codes a head of a memory that takes errors off the state (0: none)")
    add("--conv-width", type=int,
        help="linrnn: tokens that the local block sees (default for traces: n + 3; 2n + 3 with "
             "uncertain commands)")
    add("--d-model", type=int, help="width (default for this and the next two: the model's own)")
    add("--heads", type=int)
    add("--layers", type=int)
    add("--curriculum", help="stages LENGTH:SPACING,... (default: the format's own)")
    add("--advance", type=float, default=0.97, help="reveal accuracy that ends a stage")
    add("--last-steps", type=positive, default=150, help="steps of the last stage")
    add("--max-steps", type=positive, default=1500, help="steps before the last stage, at most")
    add("--stage-steps", help="N,N,...: the steps of each stage, whatever the accuracy "
        "(in place of the three options above)")
    add("--hold-out-pairs", type=float, default=0.0, metavar="SHARE",
        help="of the ordered pairs of consecutive commands: not in training, alone in the test")
    add("--batch", type=positive, default=16, help="traces per step")
    add("--lr", type=positive_float, default=4e-3, help="peak learning rate of AdamW")
    add("--matrix-lr", type=positive_float, default=0.02, help="peak learning rate of Muon")
    add("--reveal-weight", type=float, default=1.0,
        help="extra weight of revealed values in the loss")
    add("--seed", type=int, default=0, help="of the initial weights and of all traces")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--out", help="run folder (default: runs/ and a name made of the options)")
    add("--resume", action="store_true", help="go on from the run folder's last checkpoint")
    add("--save-every", type=positive, default=50, help="steps between checkpoints")
    add("--test-lengths",
        help="LENGTH:SPACING,... of the closing evaluation (default: the format's own)")
    add("--traces", type=positive, default=256, help="fresh traces for each of them")
    add("--record", help="append the finished run to this file, as one JSON line")
    return parser


def positive(text, kind=int):
    if not kind(text) > 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return kind(text)


def positive_float(text):
    return positive(text, float)


def config_of(args):
    """The options that determine the result, in full; refuses those that do not fit together."""
    config = {name: value for name, value in vars(args).items() if name not in OUTER_OPTIONS}
    if args.seed < 0 or args.reveal_weight < 0:
        raise ValueError("--seed and --reveal-weight must not be negative; "
                         f"got {args.seed}, {args.reveal_weight}")
    config["curriculum"] = parse_stages(args.curriculum or TASKS[args.format].default_curriculum,
                                        TASKS[args.format])
    config["stage_steps"] = parse_steps(args.stage_steps, len(config["curriculum"]))
    options = options_of(args.model)
    for name in ("beta_max", "householders", "codes", "conv_width", "d_model", "heads", "layers"):
        value = config.pop(name)
        if value is not None and name not in options:
            raise ValueError(f"--model {args.model} has no --{name.replace('_', '-')}")
        if value is not None:
            options[name] = value
        elif name == "conv_width" and name in options and args.format == "repl":
            # The local block must reach from the last right-hand name over n names to the `=`;
            # with coins over the n left-hand names, too, to the number of the coin.
            options[name] = Group(args.group).degree * (2 if args.uncertain else 1) + 3
    return {**config, "options": options}


def parse_steps(text, stages):
    """'900,100' -> [900, 100], a positive number for each stage; None -> None."""
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text) or text.count(",") != stages - 1:
        raise ValueError(f"--stage-steps takes a positive number for each of the {stages} stages, "
                         f"as in {','.join(['100'] * stages)}; got {text}")
    return [int(steps) for steps in text.split(",")]


# --------------------------------------------------------------------------------------------------
# Run folders
# --------------------------------------------------------------------------------------------------

def replace_file(path, write):
    """Write to a side file, then rename: a reader, or a crash, meets the old file or the new."""
    side = path.with_name(path.name + ".partial")
    write(side)
    os.replace(side, path)


def prepare_file(path):
    """Make the folder of a file that is written at the end, before the work that it is to hold.

    Raises: OSError if that is impossible, or if the path is itself a folder. None is no file.
    """
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if Path(path).is_dir():
            raise IsADirectoryError(f"{path} is a folder, not a file")


def load_checkpoint(folder, device="cpu"):
    """The dictionary that Run.save wrote.

    Raises: ValueError, in one line, if a file is missing or truncated or is not this folder's.
    """
    folder = Path(folder)
    for name in ("config.json", "model.pt"):
        if not (folder / name).is_file():
            raise ValueError(f"no run in {folder}: {name} is missing; "
                             f"a run is made by train.py --out {folder}")
    try:
        config = json.loads((folder / "config.json").read_text())
        checkpoint = torch.load(folder / "model.pt", map_location=device, weights_only=True)
    except (ValueError, OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"the run in {folder} cannot be read, "
                         "a file is truncated or no checkpoint: "
                         f"{' '.join(str(error).split())[:100] or type(error).__name__}") from None
    if not isinstance(checkpoint, dict) or checkpoint.get("config") != config:
        raise ValueError(f"{folder}/model.pt belongs to another run than config.json: "
                         f"{differences(checkpoint, config)}")
    return checkpoint


def differences(checkpoint, config):
    theirs = checkpoint.get("config") if isinstance(checkpoint, dict) else None
    if not isinstance(theirs, dict) or not isinstance(config, dict):
        return "it carries no options"
    keys = sorted(key for key in {*theirs, *config} if theirs.get(key) != config.get(key))
    return ", ".join(f"{key} {theirs.get(key)} against {config.get(key)}" for key in keys)


def load_run(folder, device="cpu"):
    """The config, task and trained model of a run folder. Raises: ValueError as load_checkpoint."""
    checkpoint = load_checkpoint(folder, device)
    try:
        task, model = make_task_and_model(checkpoint["config"])
        model.load_state_dict(checkpoint["model"])
    except KeyError as error:
        raise ValueError(f"the run in {folder} has no {error}: made by another train.py") from None
    except RuntimeError as error:
        raise ValueError(f"{folder}/model.pt does not hold the weights of the model that "
                         f"config.json describes: {' '.join(str(error).split())[:100]}") from None
    return checkpoint["config"], task, model.to(device).eval()


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------

def make_task_and_model(config):
    """Both as a function of the options: the initial weights depend on the seed only."""
    task = TASKS[config["format"]](Group(config["group"]), config["commands"],
                                   config["uncertain"], config["hold_out_pairs"])
    torch.manual_seed(config["seed"])
    return task, build(config["model"], len(task.vocab), **config["options"])


def make_optimizers(model, config):
    """Muon (Jordan et al. 2024) for the matrices between embedding and head, AdamW for the rest.

    Muon replaces the update of a matrix by the nearest orthogonal one, so that the many small
    directions of a gradient that is mostly noise move as fast as the few large ones.
    """
    outer = {model.embedding.weight, model.head.weight}
    matrices = [p for p in model.parameters() if p.ndim == 2 and p not in outer]
    memory = [p for module in clean_ups(model) for p in module.parameters()]
    others = [p for p in model.parameters() if p not in {*matrices, *memory}]
    optimizers = [torch.optim.Muon(matrices, lr=config["matrix_lr"], weight_decay=0.01),
                  torch.optim.AdamW(others, lr=config["lr"], betas=(0.9, 0.95), weight_decay=0.01)]
    if memory:
        optimizers.append(torch.optim.AdamW(memory, lr=MEMORY_RATE, betas=(0.9, 0.95)))
    return optimizers


def train_step(model, optimizers, inputs, targets, reveals, reveal_weight):
    """One update; what it measured. Raises: FloatingPointError, before the update, if the loss or
    the gradient is not finite."""
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


def memory_step(model, optimizer, inputs):
    """One update of the CleanUps of a model, on the states that it passes through."""
    loss = model.denoising_loss(inputs)
    if loss is None:
        return {}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()  # now, or they would count when the next gradient is clipped
    return {"denoising_loss": loss.item()}


def advance(config, progress, accuracy):
    """Count the step just made, and move on to the next stage, or to the end, if it is time."""
    progress["step"] += 1
    progress["stage_step"] += 1
    progress["streak"] = progress["streak"] + 1 if accuracy > config["advance"] else 0
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
        for name, module in self.model.named_modules():
            if isinstance(module, CleanUp):  # one for both: it belongs to the mean, and has no mean
                self.average.module.set_submodule(name, module)
        self.tokens_per_step = [
            self.task.training_batch(1, *stage, stream(0, "valid"))[0].size * config["batch"]
            for stage in config["curriculum"]]
        self.progress = {"step": 0, "stage": 0, "stage_step": 0, "streak": 0,
                         "seconds": 0.0, "finished": False}

    @property
    def result(self):
        """The model to evaluate: the average, once there is one."""
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
        rng = stream(config["seed"], "train", progress["step"])
        arrays = self.task.training_batch(config["batch"], length, spacing, rng)
        batch = [torch.from_numpy(array).to(self.device).contiguous() for array in arrays]
        for optimizer, rate in zip(self.optimizers, self.rates):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (progress["step"] + 1) / WARMUP)
        metrics = train_step(self.model, self.optimizers[:2], *batch, config["reveal_weight"])
        if progress["stage"] == len(config["curriculum"]) - 1:
            self.average.update_parameters(self.model)
            if clean_ups(self.model):
                torch.manual_seed(progress["step"])  # of the noise
                metrics |= memory_step(self.average.module, self.optimizers[2], batch[0])
        if self.task.uncertain:
            same = stream(config["seed"], "train", progress["step"])
            program = self.task.draw(config["batch"], length, spacing, same)
            metrics["bayes_accuracy"] = self.task.best_predictions(program).max(-1).mean()
        advance(config, progress,
                metrics["reveal_accuracy"] / metrics.get("bayes_accuracy", 1.0))
        seconds = time.perf_counter() - start
        progress["seconds"] += seconds
        return {"step": progress["step"], "length": length, "spacing": spacing, **metrics,
                "tokens_per_second": batch[0].numel() / seconds, "seconds": progress["seconds"]}

    def train(self, save_every, interrupted):
        """The loop: until the run is finished, or interrupted() says to stop; saves either way."""
        progress, stages = self.progress, self.config["curriculum"]
        steps = self.config["stage_steps"] or (
            [TYPICAL_STAGE] * (len(stages) - 1) + [self.config["last_steps"]])
        bar = tqdm(initial=progress["step"], bar_format="{desc}: {n} steps in {elapsed}{postfix}")
        with open(self.folder / "log.jsonl", "a") as log, bar:
            while not progress["finished"] and not interrupted():
                bar.set_description(f"stage {progress['stage'] + 1} of {len(stages)}",
                                    refresh=False)
                row = self.make_step()
                left = tokens_left(progress, steps, self.tokens_per_step) / row["tokens_per_second"]
                bar.set_postfix_str(f"({row['length']},{row['spacing']}) loss {row['loss']:.3f}, "
                                    f"reveals right {row['reveal_accuracy']:.0%}, "
                                    f"{row['tokens_per_second']:,.0f} tokens/s, "
                                    f"about {left:.0f} s left", refresh=False)
                bar.update()
                if progress["step"] % LOG_EVERY == 0 or progress["finished"]:
                    log.write(json.dumps(row) + "\n")
                    log.flush()
                if progress["step"] % save_every == 0:
                    self.save()
        self.save()


def tokens_left(progress, steps, sizes):
    """An estimate, from the steps and the tokens per step of each stage, less those made."""
    now = progress["stage"]
    planned = sum(map(operator.mul, steps[now:], sizes[now:]))
    return max(0, planned - progress["stage_step"] * sizes[now])


def default_folder(args, parser):
    """runs/ and a name that spells out each option of the config that is not the default."""
    names = [name for name in vars(args) if name not in ("model", "group", "seed", *OUTER_OPTIONS)]
    changed = [f"{name}_{getattr(args, name)}" for name in names
               if getattr(args, name) != parser.get_default(name)]
    name = "-".join([args.model, args.group, *changed, f"seed{args.seed}"])
    return Path("runs") / re.sub(r"[^\w.-]", "_", name)


def open_folder(folder, resume, config):
    """The checkpoint if the run in the folder is to be resumed; else None, and a folder made.

    Raises: ValueError if the folder holds a run and --resume is not given, or if there is nothing
    to resume.
    """
    if resume:
        checkpoint = load_checkpoint(folder)
        if checkpoint["config"] != config:
            raise ValueError(f"--resume with other options than those of the run in {folder}: "
                             f"{differences(checkpoint, config)}")
        if "resume" not in checkpoint:
            raise ValueError(f"{folder} holds a finished model without its optimisers, as those in "
                             "results/models/ do: it can be evaluated, not resumed")
        return checkpoint
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty: go on with --resume, "
                         "or choose another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "config.json", lambda path: path.write_text(json.dumps(config, indent=2)))
    return None


def record_run(path, argv, run, results):
    """Append one JSON line: enough to make the run again, and what it reached."""
    append_record(path, ["train.py", *argv], {
        "seed": run.config["seed"],
        "parameters": sum(weight.numel() for weight in run.model.parameters()),
        "steps": run.progress["step"], "stage_reached": run.progress["stage"] + 1,
        "stages": len(run.config["curriculum"]),
        "minutes": round(run.progress["seconds"] / 60, 3),
        "threads": torch.get_num_threads(), "device": run.device, "results": results})


def append_record(path, command, numbers):
    """Append one JSON line: the command, what it measured, and the code that did."""
    commit = ""
    if shutil.which("git"):
        commit, changed = (subprocess.run(["git", *ask], capture_output=True, text=True).stdout
                           for ask in (["describe", "--always"], ["diff", "HEAD", "--", "*.py"]))
        commit = commit.strip() + "-dirty" * bool(changed)  # other runs' records change no code
    line = {"command": shlex.join(["python", *command]), **numbers, "torch": torch.__version__,
            "commit": commit}
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        config = config_of(args)
        test_lengths = parse_stages(args.test_lengths or TASKS[args.format].default_lengths,
                                    TASKS[args.format])
        device = choose_device(args.device)
        task, _ = make_task_and_model(config)  # refuses bad options before a folder is made
        if task.uncertain:
            task.automaton  # and a group that is too large for the exact filter
        prepare_file(args.record)
        folder = Path(args.out) if args.out else default_folder(args, parser)
        checkpoint = open_folder(folder, args.resume, config)
    except (ValueError, OSError) as error:
        parser.error(str(error))

    run = Run(config, folder, device)
    run.save() if checkpoint is None else run.restore(checkpoint)
    print(f"{config['model']} on {config['group']} ({config['format']}, {config['commands']}): "
          f"{sum(weight.numel() for weight in run.model.parameters()):,} parameters, "
          f"chance {run.task.chance:.3f}, device {device}, "
          f"{torch.get_num_threads()} threads, run folder {folder}")
    print("curriculum, with tokens per step: " + ", ".join(
        f"({length},{spacing}) {tokens:,}"
        for (length, spacing), tokens in zip(config["curriculum"], run.tokens_per_step)))

    signals = []  # those that arrived; the loop looks here between two steps
    handlers = {number: signal.signal(number, lambda n, _: signals.append(n))
                for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        run.train(args.save_every, lambda: signals)
    except FloatingPointError as error:
        parser.error(f"{error} at step {run.progress['step'] + 1}; the checkpoint in {folder} "
                     f"is the last good one. Try smaller rates than --lr {config['lr']} "
                     f"--matrix-lr {config['matrix_lr']}")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if signals:
        print(f"interrupted after step {run.progress['step']}; "
              "go on with the same command and --resume")
        raise SystemExit(130)

    if run.progress["stage"] < len(config["curriculum"]) - 1:
        outcome = (f"NOT LEARNED: stage {run.progress['stage'] + 1} was not passed "
                   f"in {config['max_steps']} steps")
    else:
        outcome = "all stages " + ("made" if config["stage_steps"] else "passed")
    print(f"trained {run.progress['step']} steps in {run.progress['seconds'] / 60:.2f} minutes; "
          f"{outcome}")
    from eval import evaluate_and_print  # here, since eval itself reads runs with load_run
    try:
        results = evaluate_and_print(run.result.eval(), run.task, test_lengths, args.traces,
                                     device=device)
    except KeyboardInterrupt:
        print(f"\ninterrupted; the trained model is safe: python eval.py {folder}")
        raise SystemExit(130) from None
    if args.record:
        record_run(args.record, argv, run, results)


if __name__ == "__main__":
    main()
