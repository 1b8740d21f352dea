"""Train one model on one group: python train.py --model linrnn --group S5

One loop for all models, both formats and all groups. Each step draws fresh traces; nothing is seen twice.
Training walks through a curriculum of stages (length : spacing). A stage is left when the model answers
more than --advance of the reveals in 3 batches running; the last stage lasts --last-steps steps, in
which the learning rate falls linearly to 0. If a stage is not passed within --max-steps steps in all, the
run ends there: the task was not learned, and the final table says what was.

The loss is the cross-entropy of every next token plus --reveal-weight times that of the revealed values.
Most tokens of a random program cannot be predicted (a full S5 command carries ln 120 = 4.8 nats);
the extra weight only spares the optimiser their noise.

A run is a folder: config.json (all options), log.jsonl (metrics, one line per 10 steps), model.pt (weights,
optimiser, progress; written to a side file and renamed, so that it is whole at any moment). Batches are a
function of (seed, step): a resumed run continues bit for bit, on the CPU.

Next: eval.py.
"""

import argparse
import json
import math
import os
import pickle
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from data import COMMANDS, TASKS, Group, check_length, stream
from models import MODELS, build, options_of

WARMUP = 50  # steps over which the learning rate rises from 0
STREAK = 3  # batches in a row that must pass --advance
LOG_EVERY = 10  # steps
TYPICAL_STAGE = 50  # steps, for the estimate of the time left


def parse_curriculum(text):
    """'8:1,16:2' -> [(8, 1), (16, 2)], each length a multiple of its spacing."""
    try:
        stages = [tuple(int(number) for number in stage.split(":")) for stage in text.split(",")]
        for length, spacing in stages:
            check_length(length, spacing)
    except ValueError as error:
        raise ValueError(f"expected LENGTH:SPACING,..., as in 8:1,16:2; got {text!r} ({error})") from None
    return stages


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", default="linrnn", choices=MODELS)
    add("--group", default="S5", help="S<n>, A<n>, Z<n>, D<n> or a product such as A4xZ5")
    add("--format", default="repl", choices=TASKS, help="Python traces, or one token per element")
    add("--commands", default="full", choices=COMMANDS, help="whole elements, or transpositions")
    for name, kind, text in [("beta-max", float, "linrnn: 2 allows the eigenvalue -1, 1 does not"),
                             ("householders", int, "linrnn: writes per token"),
                             ("conv-width", int, "linrnn: tokens seen by the local block"),
                             ("d-model", int, "width"), ("heads", int, "heads"), ("layers", int, "layers")]:
        add(f"--{name}", type=kind, help=f"{text} (default: the model's own)")
    add("--curriculum", help="stages LENGTH:SPACING,... (default: the format's own)")
    add("--advance", type=float, default=0.97, help="reveal accuracy that ends a stage")
    add("--last-steps", type=int, default=200, help="steps of the last stage")
    add("--max-steps", type=int, default=1500, help="steps before the last stage, at most")
    add("--batch", type=int, default=32, help="traces per step")
    add("--lr", type=float, default=4e-3, help="peak learning rate")
    add("--reveal-weight", type=float, default=1.0, help="extra weight of revealed values in the loss")
    add("--seed", type=int, default=0, help="of the initial weights and of all traces")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--out", help="run folder (default: runs/ and a name made of the options)")
    add("--save-every", type=int, default=50, help="steps between checkpoints")
    add("--resume", action="store_true", help="go on from the run folder's last checkpoint")
    add("--record", help="append the finished run to this file, as one JSON line")
    return parser


# ---------------------------------------------------------------------------------------------------
# Run folders
# ---------------------------------------------------------------------------------------------------

def replace_file(path, write):
    """Write to a side file, then rename: a reader, or a crash, meets the old file or the new one."""
    side = path.with_name(path.name + ".partial")
    write(side)
    os.replace(side, path)


def save_checkpoint(folder, config, model, optimizer, progress):
    checkpoint = {"config": config, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                  "progress": progress}
    replace_file(folder / "model.pt", lambda path: torch.save(checkpoint, path))


def load_checkpoint(folder, device="cpu"):
    """The dictionary of save_checkpoint.

    Raises: ValueError, in one line, if a file is missing or truncated or is not this folder's.
    """
    folder = Path(folder)
    for name in ("config.json", "model.pt"):
        if not (folder / name).is_file():
            raise ValueError(f"no run in {folder}: {name} is missing; a run is made by train.py --out {folder}")
    try:
        config = json.loads((folder / "config.json").read_text())
        checkpoint = torch.load(folder / "model.pt", map_location=device, weights_only=True)
    except (json.JSONDecodeError, pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        raise ValueError(f"the run in {folder} cannot be read, a file is truncated or no checkpoint: "
                         f"{str(error).splitlines()[0]}") from None
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
    task, model = make_task_and_model(checkpoint["config"])
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        raise ValueError(f"{folder}/model.pt does not hold the weights of the model that config.json "
                         f"describes: {str(error).splitlines()[1].strip()}") from None
    return checkpoint["config"], task, model.to(device).eval()


# ---------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------

def make_task_and_model(config):
    """Both as a function of the options: the initial weights depend on the seed only."""
    task = TASKS[config["format"]](Group(config["group"]), config["commands"])
    torch.manual_seed(config["seed"])
    return task, build(config["model"], len(task.vocab), **config["options"])


def draw_batch(task, traces, length, spacing, rng, device):
    """inputs, targets and reveals of task.training_batch, as tensors on the device."""
    arrays = task.training_batch(traces, length, spacing, rng)
    return [torch.from_numpy(array).to(device).contiguous() for array in arrays]


def train_step(model, optimizer, inputs, targets, reveals, reveal_weight):
    """One update; what it measured. Raises: FloatingPointError, before the update, if the loss is not finite."""
    logits = model(inputs)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    reveal_loss = losses[reveals].mean()
    loss = losses.mean()
    if not math.isfinite(loss.item()):
        raise FloatingPointError(f"the loss is {loss.item()}")
    optimizer.zero_grad()
    (loss + reveal_weight * reveal_loss).backward()
    gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    accuracy = (logits.argmax(-1) == targets)[reveals].float().mean()
    return {"loss": loss.item(), "reveal_loss": reveal_loss.item(), "reveal_accuracy": accuracy.item(),
            "gradient_norm": gradient_norm.item()}


def learning_rate(config, progress):
    """Constant after the warm-up; linear to 0 over the last stage."""
    rate = config["lr"] * min(1.0, (progress["step"] + 1) / WARMUP)
    if progress["stage"] == len(config["curriculum"]) - 1:
        rate *= 1 - progress["stage_step"] / config["last_steps"]
    return rate


def advance(config, progress, accuracy):
    """Count the step just made, and move on to the next stage, or to the end, if it is time."""
    progress["step"] += 1
    progress["stage_step"] += 1
    progress["streak"] = progress["streak"] + 1 if accuracy > config["advance"] else 0
    if progress["stage"] == len(config["curriculum"]) - 1:
        progress["finished"] = progress["stage_step"] == config["last_steps"]
    elif progress["streak"] == STREAK:
        progress.update(stage=progress["stage"] + 1, stage_step=0, streak=0)
    else:
        progress["finished"] = progress["step"] >= config["max_steps"]


def seconds_left(config, progress, tokens_per_trace, tokens_per_second):
    """An estimate: the stages ahead take TYPICAL_STAGE steps each, the last one --last-steps."""
    steps = [TYPICAL_STAGE] * (len(config["curriculum"]) - 1) + [config["last_steps"]]
    steps[progress["stage"]] = max(0, steps[progress["stage"]] - progress["stage_step"])
    ahead = range(progress["stage"], len(steps))
    return sum(steps[i] * config["batch"] * tokens_per_trace[i] for i in ahead) / tokens_per_second


def train(model, task, optimizer, config, progress, folder, save_every, device, interrupted):
    """The loop: until the run is finished, or interrupted() says to stop. Saves at the end in both cases."""
    curriculum = config["curriculum"]
    tokens_per_trace = [task.training_batch(1, *stage, stream(config["seed"], "valid"))[0].size
                        for stage in curriculum]
    bar = tqdm(initial=progress["step"], unit="step", bar_format="{desc} {n} steps {elapsed}{postfix}")
    with open(folder / "log.jsonl", "a") as log, bar:
        while not progress["finished"] and not interrupted():
            start = time.perf_counter()
            stage, (length, spacing) = progress["stage"], curriculum[progress["stage"]]
            rng = stream(config["seed"], "train", progress["step"])
            batch = draw_batch(task, config["batch"], length, spacing, rng, device)
            optimizer.param_groups[0]["lr"] = rate = learning_rate(config, progress)
            metrics = train_step(model, optimizer, *batch, config["reveal_weight"])
            advance(config, progress, metrics["reveal_accuracy"])

            seconds = time.perf_counter() - start
            progress["seconds"] += seconds
            speed = batch[0].numel() / seconds
            left = seconds_left(config, progress, tokens_per_trace, speed)
            bar.set_description(f"stage {stage + 1}/{len(curriculum)} ({length},{spacing})", refresh=False)
            bar.set_postfix_str(f"loss {metrics['loss']:.3f}, reveals {metrics['reveal_accuracy']:.1%}, "
                                f"{speed / 1000:.0f}k tokens/s, about {left:.0f} s left", refresh=False)
            bar.update()
            if progress["step"] % LOG_EVERY == 0 or progress["finished"]:
                entry = {"step": progress["step"], "length": length, "spacing": spacing, **metrics,
                         "lr": rate, "tokens_per_second": speed, "seconds": progress["seconds"]}
                log.write(json.dumps(entry) + "\n")
                log.flush()
            if progress["step"] % save_every == 0:
                save_checkpoint(folder, config, model, optimizer, progress)
    save_checkpoint(folder, config, model, optimizer, progress)


def config_of(args):
    """The options that determine the result, in full; refuses those that do not fit the model."""
    given = {name: getattr(args, name) for name in
             ("beta_max", "householders", "conv_width", "d_model", "heads", "layers")}
    options = options_of(args.model)
    for name, value in given.items():
        if value is not None and name not in options:
            raise ValueError(f"--model {args.model} has no --{name.replace('_', '-')}")
    options.update({name: value for name, value in given.items() if value is not None})
    for name in ("batch", "last_steps", "max_steps", "save_every"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(args, name)}")
    if args.seed < 0:
        raise ValueError(f"--seed must not be negative; got {args.seed}")
    if args.lr <= 0 or args.reveal_weight < 0:
        raise ValueError(f"--lr must be positive and --reveal-weight not negative; got {args.lr}, "
                         f"{args.reveal_weight}")
    curriculum = parse_curriculum(args.curriculum or TASKS[args.format].default_curriculum)
    return {"model": args.model, "options": options, "group": args.group, "format": args.format,
            "commands": args.commands, "curriculum": [list(stage) for stage in curriculum],
            "advance": args.advance, "last_steps": args.last_steps, "max_steps": args.max_steps,
            "batch": args.batch, "lr": args.lr, "reveal_weight": args.reveal_weight, "seed": args.seed}


def choose_device(name):
    """The torch device of that name; auto takes cuda, then mps, then cpu. Raises: ValueError."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(kind for kind in ("cuda", "mps", "cpu") if there[kind])
    if not there.get(name.split(":")[0], False):
        raise ValueError(f"--device {name} is not there; this machine has "
                         f"{', '.join(kind for kind in there if there[kind])}")
    return name


def open_run(args, config):
    """The run folder, made or found, and its checkpoint if it is resumed.

    Raises: ValueError if the folder holds another run, or if there is nothing to resume.
    """
    options = f"{config['model']}-{config['group']}-{config['commands']}-{config['format']}-s{config['seed']}"
    folder = Path(args.out or f"runs/{options}")
    if args.resume:
        checkpoint = load_checkpoint(folder)
        if checkpoint["config"] != config:
            raise ValueError(f"--resume with other options than the run in {folder}: "
                             f"{differences(checkpoint, config)}")
        return folder, checkpoint
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: go on with --resume, or choose another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "config.json", lambda path: path.write_text(json.dumps(config, indent=2)))
    return folder, None


def drop_log_after(path, step):
    """Forget the logged steps that a resumed run is going to make again."""
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line + "\n" for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
    replace_file(path, lambda side: side.write_text("".join(kept)))


def record_run(path, argv, config, progress, parameters, results):
    """Append one JSON line: enough to make the run again, and what it reached."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    line = {"command": shlex.join(["python", "train.py", *argv]), "seed": config["seed"],
            "parameters": parameters, "steps": progress["step"], "finished_in_stage": progress["stage"] + 1,
            "stages": len(config["curriculum"]), "minutes": round(progress["seconds"] / 60, 3),
            "threads": torch.get_num_threads(), "torch": torch.__version__,
            "commit": commit.stdout.strip(), "results": results}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        config = config_of(args)
        device = choose_device(args.device)
        task, model = make_task_and_model(config)
        folder, checkpoint = open_run(args, config)
    except ValueError as error:
        parser.error(str(error))

    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], betas=(0.9, 0.95), weight_decay=0.01)
    progress = {"step": 0, "stage": 0, "stage_step": 0, "streak": 0, "seconds": 0.0, "finished": False}
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        progress = checkpoint["progress"]
        drop_log_after(folder / "log.jsonl", progress["step"])
    else:
        save_checkpoint(folder, config, model, optimizer, progress)

    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{config['model']} on {config['group']} ({config['format']}, {config['commands']}): {parameters:,} "
          f"parameters, {config['batch']} traces per step, chance {task.chance:.3f}, device {device}, "
          f"{torch.get_num_threads()} threads")
    print(f"curriculum {' -> '.join(f'({a},{b})' for a, b in config['curriculum'])}, run folder {folder}")

    signals = []  # what arrived; the loop looks here between two steps
    handlers = {number: signal.signal(number, lambda n, _: signals.append(n))
                for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        train(model, task, optimizer, config, progress, folder, args.save_every, device, lambda: signals)
    except FloatingPointError as error:
        parser.error(f"{error} at step {progress['step'] + 1}; the checkpoint in {folder} is the last good one. "
                     f"Try a smaller --lr than {config['lr']}")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if signals:
        print(f"interrupted after step {progress['step']}; go on with the same command and --resume")
        raise SystemExit(130)

    passed = progress["stage"] == len(config["curriculum"]) - 1
    print(f"trained {progress['step']} steps in {progress['seconds'] / 60:.2f} minutes; " +
          ("all stages passed" if passed else f"NOT LEARNED: stage {progress['stage'] + 1} was not passed "
           f"in {config['max_steps']} steps"))
    from eval import evaluate_and_print  # eval reads runs with load_run: imported late, as they need each other
    results = evaluate_and_print(model.eval(), task, device=device)
    if args.record:
        record_run(args.record, argv, config, progress, parameters, results)


if __name__ == "__main__":
    main()
