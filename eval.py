"""How far does a trained model track? python eval.py RUN

For each (length L, spacing S), on fresh traces that no training run ever sees:
    chance   accuracy of a guess that knows the variable but not the state
    all      accuracy over all reveals; final: at the last reveal of each trace
    perfect  share of traces in which EVERY reveal is right, with its 95% Wilson interval
The model reads the whole true trace and is asked for the revealed values only. An earlier reveal
tells it one variable, so at a small spacing `final` is above chance even if the state is lost.

Where the task knows the best prediction p there is (Batch.best), three columns more:
    bayes    accuracy to expect of the best answer, the mean of max p
    kl       KL(p || model) in nats; excess: the mean of log p(value) - log model(value)

Next: train.py, which makes the run folders that are read and written here.
"""

import signal

if __name__ == "__main__":  # Ctrl-C, also while importing, and a closed pipe end it in silence
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(getattr(signal, "SIGPIPE", signal.SIGINT), signal.SIG_DFL)  # not in Windows

import argparse
import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data import TASKS, Group, ReplTask, generator, number, parse_stages, user_errors
from models import MODELS, build, choose_device, options_of

TOKENS_AT_ONCE = 2**17  # of all traces together: what a model reads in one piece


def make_task_and_model(config, device="cpu"):
    """Both as a function of the options. The initial weights depend on the seed only."""
    for name, registry in [(config["format"], TASKS), (config["model"], MODELS)]:
        if name not in registry:
            raise ValueError(f"{name!r} is a chapter's: python -m {config.get('chapter')} eval RUN")
    make_task = TASKS[config["format"]]
    task = make_task(Group(config["group"]), **{key: config[key] for key in options_of(make_task)})
    torch.manual_seed(config["seed"])
    with torch.device(device):
        return task, build(config["model"], len(task.vocab), **config["options"])


def load_run(folder, device="cpu"):
    """A run's checkpoint (config, progress, model, resume), task and model. Raises: ValueError."""
    path = Path(folder) / "model.pt"
    try:
        with zipfile.ZipFile(path) as file:
            if damaged := file.testzip():  # torch does not look at the checksums
                raise ValueError(f"the checksum of {damaged} does not fit")
        checkpoint = torch.load(path, map_location=device, weights_only=True)  # runs no code
        task, model = make_task_and_model(checkpoint["config"], "meta")  # shapes without memory
        model.load_state_dict(checkpoint["model"], assign=True)
    except Exception as error:
        reason = " ".join(str(error).split()).split(". ")[0][:150]  # without torch's advice
        raise ValueError(f"{path} is missing, truncated or foreign: {reason}") from None
    return checkpoint, task, model.float().eval()


def replace_file(path, write):
    """A reader, or a power cut, meets the old file or the new: write beside it, then rename."""
    side, content = path.with_name(path.name + ".partial"), io.BytesIO()
    write(content)  # in memory, since torch.save reports a full disk as an error of its own
    try:
        with open(side, "wb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        for seconds in (0.1, 0.5, 2):  # Windows replaces no file that another process holds open
            with contextlib.suppress(PermissionError):
                return side.replace(path)
            time.sleep(seconds)
        side.replace(path)
    finally:
        side.unlink(missing_ok=True)


def check_record(path):
    """Refuses, before the work, a file that cannot be written or that holds something else."""
    with open(path, "a+b") as file:
        file.seek(0)
        if file.read(2) not in (b"", b'{"'):  # how the line of a record begins
            raise ValueError(f"{path} holds no records, and none is added to it: choose another")


def append_record(path, command, numbers):
    """Append one JSON line: the command, what it measured, and the code that did."""
    # The repository of this folder: not one around it, nor one that the environment names.
    git = ["git", "-C", str(Path(__file__).resolve().parent), "--git-dir=.git", "--work-tree=."]
    answers = ["", ""]
    with contextlib.suppress(OSError):  # there is no git
        answers = [subprocess.run([*git, *ask.split()], capture_output=True, text=True).stdout
                   for ask in ("describe --always", "diff HEAD -- *.py")]
    commit = answers[0].strip() + "-dirty" * bool(answers[1])  # a new record changes no code
    line = {"command": command, **numbers, "torch": torch.__version__,
            "threads": torch.get_num_threads(), "commit": commit}
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


@torch.no_grad()
def log_probabilities(model, inputs, reveals, device="cpu", note=None):
    """The log of the model's softmax at the reveals; the traces are streamed piece by piece.
    Shapes: inputs, reveals [B, T], as many in each trace -> [B, reveals, vocabulary], float64.
    """
    pieces = [torch.from_numpy(x).to(device).split(max(1, TOKENS_AT_ONCE // len(x)), 1)
              for x in (inputs, reveals)]
    state, found, traces = None, [], []
    for tokens, asked in tqdm([*zip(*pieces)], desc=note, leave=False, disable=note is None):
        logits, state = model.stream(tokens, state)
        found.append(logits[asked])
        traces.append(asked.nonzero()[:, 0])
    order = torch.cat(traces).argsort(stable=True)  # by trace, and in a trace by time
    return torch.cat(found)[order].cpu().double().log_softmax(-1).numpy().reshape(
        len(inputs), -1, found[0].shape[-1])


def evaluate(model, task, length, spacing, traces=256, seed=0, device="cpu"):
    """The row of the table for fresh traces; model: anything with stream(tokens, state).

    Exercise 7 (2 points, 7 lines): the row, as its readers want it. Trap: perfect is of traces."""
    batch = task.test_batch(traces, length, spacing, generator(seed, "test", length, spacing))
    log_q = log_probabilities(model, batch.inputs, batch.reveals, device, f"({length},{spacing})")
    answers = batch.targets[batch.reveals].reshape(traces, -1, 1)
    ### BEGIN SOLUTION
    right = log_q.argmax(-1) == answers[..., 0]
    perfect = right.all(1)
    low, high = wilson(perfect.sum(), traces)
    row = {"length": length, "spacing": spacing, "traces": traces, "reveals": right.size,
           "chance": task.chance, "all": float(right.mean()), "final": float(right[:, -1].mean()),
           "perfect": float(perfect.mean()), "perfect_low": low, "perfect_high": high,
           "by_position": right.mean(0).tolist()}
    ### END SOLUTION
    if batch.best is not None:
        gap = np.log(batch.best.clip(1e-300)) - log_q  # in nats, for each symbol
        kl, excess = (batch.best * gap).sum(-1), np.take_along_axis(gap, answers, -1)
        row |= {"bayes": float(batch.best.max(-1).mean()), "kl": float(kl.mean()),
                "excess": float(excess.mean()), "kl_by_position": kl.mean(0).tolist()}
    return row


def wilson(hits, total, z=1.96):
    """The 95% Wilson score interval of a proportion (Wilson 1927); honest near 0 and 1."""
    share, spread = hits / total, z * z / total
    centre = (share + spread / 2) / (1 + spread)
    half = z * np.sqrt(share * (1 - share) / total + spread / total / 4) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def evaluate_and_print(model, task, lengths, traces=256, seed=0, device="cpu"):
    """The table of this file's header; under each row the accuracy by reveal position."""
    results = []
    for length, spacing in lengths:
        row = evaluate(model, task, length, spacing, traces, seed, device)
        shown = [x for x in "chance all final perfect bayes kl excess".split() if x in row]
        if not results:
            print("\n     (L,S)" + "".join(f"{name:>9}" for name in shown) + "   95% of perfect")
        print(f"{f'({length},{spacing})':>10}" + "".join(f"{row[name]:9.4f}" for name in shown)
              + f"   {row['perfect_low']:.4f}-{row['perfect_high']:.4f}")
        by_position = row["by_position"][::max(1, len(row["by_position"]) // 8)]
        print("  along it" + "".join(f"{share:9.4f}" for share in by_position))
        results.append(row)
    return results


def exhaustive(model, task, device="cpu"):
    """Each pair (state, command), its variables read out: how many there are, and the wrong."""
    group, n, alphabet, failures = task.group, task.group.degree, task.alphabet, []
    words = group.shortest_words(alphabet)
    for state, word in tqdm(words.items(), leave=False):
        commands = np.array([[*word, command] for command in alphabet])
        asked = np.tile(np.arange(n), len(alphabet))[:, None]
        tokens, reveals = task.write(commands.repeat(n, 0), asked)
        log_q = log_probabilities(model, tokens[:, :-2], reveals[:, 1:-1], device)
        answers = log_q.argmax(-1).reshape(len(alphabet), n)
        expected = group.elements[group.compose(state, group.index(alphabet))]
        failures += [(group.elements[state] + 1, alphabet[i] + 1, expected[i] + 1, answers[i])
                     for i in (answers != task.value_tokens[expected]).any(1).nonzero()[0]]
    pairs = len(words) * len(alphabet)
    print(f"\nexhaustive: {pairs - len(failures):,} of {pairs:,} (state, command) pairs right")
    for state, command, expected, answers in failures[:20]:
        print(f"  state {state}, command {command}: not {expected} but {task.decode(answers)!r}")
    return pairs, failures


@torch.no_grad()
def interact(model, task, device="cpu"):
    """The user types the lines of a trace. Beside each answer stands Python's, which is read on."""
    commands = [task.decode(ids)[4:-1] for ids in task.command_tokens(task.alphabet)]
    text, variables, count = task.decode(task.start_tokens()), {}, 0
    print(text, end="")
    exec(text.replace(">>> ", ""), {}, variables)
    prints = {f"print('{name}', {name})": name for name in variables}
    with contextlib.suppress(EOFError):  # the end of the input
        while True:
            line = input(">>> ").strip()
            if line in prints:
                name, value = prints[line], variables[prints[line]]
                text += f">>> {line}\n{name} "
                logits = model(torch.tensor([task.encode(text)], device=device))
                probability, token = logits[0, -1].softmax(-1).max(-1)
                text += f"{value}\n"
                print(f"{name} {task.vocab[token]}    (probability {probability:.1%}; "
                      f"Python: {value}; {count} commands so far)")
            elif line in commands:
                exec(line, {}, variables)
                text += f">>> {line}\n"
                count += 1
            else:
                print(f"type a command such as {commands[-1]}, or print('a', a)")


def plot(results, config, path):
    """Accuracy against the commands read before a reveal, a curve for each length."""
    from matplotlib.figure import Figure  # only here: it takes a second to import
    axes, trained = Figure(layout="constrained").subplots(), max(config["curriculum"])[0]
    for row in results:
        ends = np.arange(1, len(row["by_position"]) + 1) * row["spacing"]
        axes.plot(ends, row["by_position"], ".-", label=f"traces of {row['length']} commands")
    axes.axhline(results[0]["chance"], color="grey", label="chance")
    axes.axvline(trained, color="grey", linestyle=":", label="longest training trace")
    axes.set(xlabel="commands read before the reveal", ylabel="accuracy", ylim=(0, 1.05),
             title=f"{config['model']} on {config['group']}: accuracy by reveal position")
    axes.legend()
    axes.figure.savefig(path)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python eval.py", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("run", help="a run folder, made by train.py")
    add("--lengths", help="LENGTH:SPACING,... (default: the format's own)")
    add("--traces", type=number(1, 10**5), default=256, help="fresh traces for each length")
    add("--seed", type=number(0), default=0, help="of the traces, never those of training")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--compile", action="store_true", help="torch.compile, which takes a minute")
    add("--exhaustive", action="store_true", help="every command from every state")
    add("--interactive", action="store_true", help="type the commands of a trace yourself")
    add("--plot", metavar="FILE", help="write the figure (.png, .pdf, .svg)")
    add("--record", metavar="FILE", help="append the numbers as one JSON line")
    add("--json", action="store_true", help="print the numbers as one JSON line at the end")
    with user_errors(parser, argv) as args:
        if args.plot and Path(args.plot).suffix not in (".png", ".pdf", ".svg"):
            raise ValueError(f"--plot writes .png, .pdf and .svg; got {args.plot}")
        device = choose_device(args.device)
        checkpoint, task, model = load_run(args.run, device)
        if args.compile:
            model.compile()
        lengths = parse_stages(args.lengths or task.default_lengths, task, args.traces)
        if args.exhaustive or args.interactive:
            if not isinstance(task, ReplTask):
                raise ValueError("--exhaustive and --interactive are for traces, not for words")
            task.alphabet  # refuses a group that is too large to list
        if args.record:
            check_record(args.record)
        if args.plot:
            open(args.plot, "a").close()  # what cannot be written is refused before the work
    if args.interactive:
        return interact(model, task, device)
    results = evaluate_and_print(model, task, lengths, args.traces, args.seed, device)
    numbers = {"config": checkpoint["config"], "results": results}
    if args.exhaustive:
        pairs, failures = exhaustive(model, task, device)
        numbers["exhaustive"] = {"pairs": pairs, "right": pairs - len(failures)}
    if args.json:
        print(json.dumps(numbers))
    with user_errors(parser, argv):
        if args.record:
            append_record(args.record, shlex.join(["python", "eval.py", *(argv or sys.argv[1:])]),
                          {"seed": checkpoint["config"]["seed"], **numbers, "device": device})
        if args.plot:
            plot(results, checkpoint["config"], args.plot)


if __name__ == "__main__":
    main()
