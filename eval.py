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

Next: train.py, which makes the run folders that are read here.
"""

import argparse
import contextlib
import inspect
import json
import runpy
import zipfile
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import data
from data import (TASKS, Group, ReplTask, UserError, generator, number, one_line_errors, parse,
                  stages, try_stages)
from models import build, choose_device

TOKENS_AT_ONCE = 2**17  # of all traces together: what a model reads in one piece
TEST_LENGTHS = [(64, 8), (128, 16), (256, 32)]  # unless the task has its own


# --- 1. Reading a run -----------------------------------------------------------------------------

def run_plugin(argv):
    """Runs the file behind --plugin, which puts its names into FAMILIES, TASKS or MODELS.

    That happens ahead of the parsing of all other options, because they may be such names.
    """
    # A small parser that knows one option only, and leaves the rest to the real one.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--plugin")
    args, _ = parser.parse_known_args(argv)
    if args.plugin is None:
        return

    if not Path(args.plugin).is_file():
        parser.error(f"--plugin {args.plugin} is not there: expected a Python file")
    runpy.run_path(args.plugin)


def make_task(config):
    """The task of a run. Its constructor gets what it names of the config, the group as a Group."""
    name = config["format"]
    if name not in TASKS:
        raise UserError(f"the task {name!r} is not known here: name the file that brings it with "
                        "--plugin, or use the command that made the run")
    # A task of one's own may name a group, or neither group nor commands.
    available = {**config, "group": Group(config["group"])}
    wanted = inspect.signature(TASKS[name]).parameters
    return TASKS[name](**{key: available[key] for key in wanted if key in available})


def make_model(config, task):
    """The model of a run, before its training. Its weights depend on the seed and nothing else."""
    # torch draws the weights of a new layer from its one global generator.
    torch.manual_seed(config["seed"])
    return build(config["model"], len(task.vocab), **config["options"])


def read_checkpoint(folder, device="cpu"):
    """The content of model.pt, every byte checked.  Raises: UserError."""
    path = Path(folder) / "model.pt"
    # model.pt is a zip archive, as all files of torch.save.
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()  # torch does not look at the checksums

        if damaged:
            raise ValueError(f"the checksum of {damaged} does not fit")
        checkpoint = torch.load(path, map_location=device, weights_only=True)  # runs no code
        checkpoint["config"], checkpoint["model"]  # a KeyError says which one is not there
        return checkpoint
    except Exception as error:  # of any kind, since the file may hold anything
        reason = " ".join(str(error).split()).split(". ")[0][:150]  # without torch's advice
        raise UserError(f"{path} is missing, truncated or foreign: {reason}") from None


def fit_weights(model, checkpoint, folder):
    """The model with the weights of a checkpoint.  Raises: UserError if they do not fit."""
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:150]
        raise UserError(f"{folder} holds the weights of another model: {reason}") from None

    return model.eval()


def load_weights(model, folder):
    """Read the result of a run into a model of one's own making, and return it."""
    return fit_weights(model, read_checkpoint(folder, device_of(model)), folder)


def load_run(folder, device="cpu"):
    """A run of registered names: its checkpoint, its task, its model.  Raises: UserError.

    checkpoint: config, progress, model, resume. The config holds the recipe and the names.
    """
    # Names in the config, not pickled objects: a run folder from elsewhere can run no code here.
    checkpoint = read_checkpoint(folder, device)
    config = checkpoint["config"]
    # What was trained by the library, of one's own making, has no names.
    missing = {"model", "options", "format", "group", "commands"} - set(config)
    if missing:
        raise UserError(f"{folder} does not name its {', '.join(sorted(missing))}: make the model "
                        "yourself and read it with load_weights(model, folder)")

    task = make_task(config)
    model = make_model(config, task).to(device)
    return checkpoint, task, fit_weights(model, checkpoint, folder)


def device_of(model):
    """Where its weights are. A model without weights is on the CPU."""
    # The second argument of next() is what it returns when there is no first parameter.
    return next(model.parameters(), torch.zeros(0)).device


# --- 2. The table ---------------------------------------------------------------------------------

@torch.no_grad()
def log_probabilities(model, inputs, reveals, note=None):
    """The log of the model's softmax at the reveals; the traces are streamed piece by piece.

    Shapes: inputs, reveals [B, T], equally many reveals in each trace
            -> [B, reveals, vocabulary], float64.
    """
    # A long trace does not fit into memory at once, and a recurrence does not need it to.
    device = device_of(model)
    piece = max(1, TOKENS_AT_ONCE // len(inputs))
    pieces_of_inputs = torch.from_numpy(inputs).to(device).split(piece, 1)
    pieces_of_reveals = torch.from_numpy(reveals).to(device).split(piece, 1)

    state = None
    found = []
    traces = []  # the number of the trace of each row that was found
    pairs = list(zip(pieces_of_inputs, pieces_of_reveals))

    # The state that comes out of one piece goes into the next.
    for tokens, asked in tqdm(pairs, desc=note, leave=False, disable=note is None):
        logits, state = model.stream(tokens, state)
        # Of all logits only these are kept: memory grows with the reveals, not with the tokens.
        found.append(logits[asked])
        traces.append(asked.nonzero()[:, 0])

    # They came piece by piece. Now by trace, and in a trace by time.
    order = torch.cat(traces).argsort(stable=True)
    # float64, so that the log of a small probability keeps its digits.
    logits = torch.cat(found)[order].cpu().double()
    return logits.log_softmax(-1).numpy().reshape(len(inputs), -1, logits.shape[-1])


def score(right):
    """The row of the table for answers that are right or wrong: bool [traces, reveals] -> a dict.

    perfect is a share of the traces, all the others are shares of the reveals. Everything is a
    plain number or a list of numbers, so that json can write it.
    """
    # A trace counts as perfect if all its reveals are right, not if most of them are.
    perfect = right.all(1)
    low, high = wilson(perfect.sum(), len(right))
    return {"reveals": right.size, "all": float(right.mean()), "final": float(right[:, -1].mean()),
            "perfect": float(perfect.mean()), "perfect_low": low, "perfect_high": high,
            "by_position": right.mean(0).tolist()}


def wilson(hits, total, z=1.96):
    """The 95% Wilson score interval of a proportion (Wilson 1927); honest near 0 and 1."""
    # share +- 1.96 standard errors would end at 100% with a width of 0, and be sure of it.
    share = hits / total
    spread = z * z / total

    centre = (share + spread / 2) / (1 + spread)
    half = z * np.sqrt(share * (1 - share) / total + spread / total / 4) / (1 + spread)
    return float(max(0.0, centre - half)), float(min(1.0, centre + half))


def distance_from_best(best, log_q, truth):
    """The columns bayes, kl and excess.

    Shapes: best, log_q [traces, reveals, vocabulary]; truth [traces, reveals]
    """
    # Where the best reader is sure that a symbol will not come, p log p is 0: the clip makes it so.
    gap = np.log(best.clip(1e-300)) - log_q  # in nats, for each symbol
    kl = (best * gap).sum(-1)  # the mean over what may come
    excess = np.take_along_axis(gap, truth[..., None], -1)  # at what did come

    return {"bayes": float(best.max(-1).mean()), "kl": float(kl.mean()),
            "excess": float(excess.mean()), "kl_by_position": kl.mean(0).tolist()}


def evaluate(model, task, length, spacing, traces=256, seed=0):
    """The row of the table for fresh traces.

    model: a module with stream(tokens, state); the traces depend on length, spacing and seed only.
    """
    # The stream of a test depends on its own numbers only: every model reads the same traces.
    batch = task.test_batch(traces, length, spacing, generator(seed, "test", length, spacing))
    log_q = log_probabilities(model, batch.inputs, batch.reveals, f"({length},{spacing})")
    truth = batch.targets[batch.reveals].reshape(traces, -1)  # by trace, then by time

    # An answer is the most likely symbol of the whole vocabulary, not of the values only.
    row = {"length": length, "spacing": spacing, "traces": traces, "chance": task.chance}
    row |= score(log_q.argmax(-1) == truth)
    if batch.best is not None:
        row |= distance_from_best(batch.best, log_q, truth)
    return row


def evaluate_and_print(model, task, lengths, traces=256, seed=0):
    """The table of this file's header; under each row the accuracy by reveal position."""
    rows = []
    for length, spacing in lengths:
        row = evaluate(model, task, length, spacing, traces, seed)
        # The last three columns are there only where the best prediction is known.
        columns = [name for name in "chance all final perfect bayes kl excess".split()
                   if name in row]
        if not rows:
            print("\n     (L,S)" + "".join(f"{name:>9}" for name in columns)
                  + "   95% of perfect")
        name = f"({length},{spacing})"
        print(f"{name:>10}" + "".join(f"{row[column]:9.4f}" for column in columns)
              + f"   {row['perfect_low']:.4f}-{row['perfect_high']:.4f}")

        # Some eight places, evenly spread: where along the trace is the state lost?
        by_position = row["by_position"]
        shown = by_position[::max(1, len(by_position) // 8)]
        print("  along it" + "".join(f"{share:9.4f}" for share in shown))
        rows.append(row)
    return rows


# --- 3. The certificate ---------------------------------------------------------------------------

def exhaustive(model, task):
    """Every command from every state, and then each variable asked for.

    A state is reached by the fewest commands that lead there. If all pairs (state, command) are
    right, the model has the whole multiplication table of the group.
    Returns: how many pairs there are, and the wrong ones (state, command, expected, answered).
    """
    # Shortest words, so that what is tested is the last command and not a long way to the state.
    group = task.group
    alphabet = task.alphabet
    n = group.degree
    numbers = group.index(alphabet)
    words = group.shortest_words(alphabet)

    failures = []
    for state, word in tqdm(words.items(), leave=False):
        # One batch for each state. It holds each command n times, and each time another variable
        # is asked for in its one reveal.
        commands = np.array([[*word, command] for command in alphabet])
        asked = np.tile(np.arange(n), len(alphabet))[:, None]
        tokens, reveals = task.write(commands.repeat(n, 0), asked)

        # The tokens of the answer and of the line's end are not shown.
        log_q = log_probabilities(model, tokens[:, :-2], reveals[:, 1:-1])
        answered = log_q.argmax(-1).reshape(len(alphabet), n)

        # A pair is right if all n variables are.
        expected = group.elements[group.compose(state, numbers)]
        wrong = (answered != task.value_tokens[expected]).any(1)
        for i in wrong.nonzero()[0]:
            failures.append((group.elements[state], alphabet[i], expected[i], answered[i]))
    return len(words) * len(alphabet), failures


def print_certificate(task, pairs, failures):
    print(f"\nexhaustive: {pairs - len(failures):,} of {pairs:,} (state, command) pairs right")
    for state, command, expected, answered in failures[:20]:  # values are printed from 1
        print(f"  state {state + 1}, command {command + 1}: not {expected + 1} but "
              f"{task.decode(answered)!r}")


# --- 4. To type a trace, and to plot the table ----------------------------------------------------

@torch.no_grad()
def interact(model, task):
    """The user types the lines of a trace.

    Python's value stands beside the model's. The model then reads on with Python's.
    """
    # The lines that may be typed: every command without its prompt, and a print of each variable.
    commands = [task.decode(ids)[4:-1] for ids in task.command_tokens(task.alphabet)]
    text = task.decode(task.start_tokens())  # all that the model has read so far
    count = 0  # of commands

    # Python keeps the true values. Nothing but known lines is ever executed.
    variables = {}
    exec(text.replace(">>> ", ""), {}, variables)
    prints = {f"print('{name}', {name})": name for name in variables}

    print(text, end="")

    with contextlib.suppress(EOFError):  # the end of the input
        while True:
            line = input(">>> ").strip()
            if line in prints:
                name = prints[line]
                # The model reads up to the name in the answer. Its next token is the value.
                text += f">>> {line}\n{name} "
                logits = model(torch.tensor([task.encode(text)], device=device_of(model)))
                probability, token = logits[0, -1].softmax(-1).max(-1)
                print(f"{name} {task.vocab[token]}    (probability {probability:.1%}; "
                      f"Python: {variables[name]}; {count} commands so far)")
                # Whatever it said, it reads on with the truth.
                text += f"{variables[name]}\n"
            elif line in commands:
                exec(line, {}, variables)
                text += f">>> {line}\n"
                count += 1
            else:
                print(f"type a command such as {commands[-1]}, or print('a', a)")


def plot(results, config, path):
    """Accuracy against the commands read before a reveal, a curve for each length."""
    from matplotlib.figure import Figure  # only here: it takes a second to import
    axes = Figure(layout="constrained").subplots()

    # The first reveal of a trace stands after `spacing` commands, not after none.
    for row in results:
        commands_read = np.arange(1, len(row["by_position"]) + 1) * row["spacing"]
        axes.plot(commands_read, row["by_position"], ".-",
                  label=f"traces of {row['length']} commands")

    # Two lines to compare with: a guess, and the end of what was trained.
    longest = max(length for length, _ in config["curriculum"])
    axes.axhline(results[0]["chance"], color="grey", label="chance")
    axes.axvline(longest, color="grey", linestyle=":", label="longest training trace")
    axes.set(xlabel="commands read before the reveal", ylabel="accuracy", ylim=(0, 1.05),
             title=f"{config['model']} on {config['group']}: accuracy by reveal position")
    axes.legend()
    axes.figure.savefig(path)


# --- 5. The command line --------------------------------------------------------------------------

def main(argv=None):
    run_plugin(argv)
    parser = argparse.ArgumentParser(prog="python eval.py", description=__doc__.split("\n")[0])
    add = parser.add_argument

    # What is evaluated, and on what.
    add("run", help="a run folder, made by train.py")
    add("--lengths", type=stages, help="LENGTH:SPACING,... (default: the task's own)")
    add("--traces", type=number(1, 10**5), default=256, help="fresh traces for each length")
    add("--seed", type=number(0), default=0, help="of the traces, never those of training")

    # How, and what else.
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--compile", action="store_true", help="torch.compile, which takes a minute")
    add("--exhaustive", action="store_true", help="every command from every state")
    add("--interactive", action="store_true", help="type the commands of a trace yourself")
    add("--plot", metavar="FILE", help="write the figure (.png, .pdf, .svg)")
    add("--json", action="store_true", help="print the numbers as one JSON line at the end")
    add("--plugin", metavar="FILE", help="runs this file, which brings the run's group or model")
    args = parse(parser, argv)

    # Refuse, before the work, what cannot be read or written.
    with one_line_errors(parser):
        if args.plot and Path(args.plot).suffix not in (".png", ".pdf", ".svg"):
            raise UserError(f"--plot writes .png, .pdf and .svg; got {args.plot}")
        checkpoint, task, model = load_run(args.run, choose_device(args.device))

        lengths = args.lengths or getattr(task, "test_lengths", TEST_LENGTHS)
        try_stages(task, lengths, args.traces)

        # Both write lines of a trace themselves.
        if args.exhaustive or args.interactive:
            if not isinstance(task, ReplTask):
                raise UserError("--exhaustive and --interactive are for traces, not for words")
            task.alphabet  # refuses a group that is too large to list
        if args.plot:  # refused now, not after the work
            open(args.plot, "a").close()

    if args.compile:
        model.compile()
    if args.interactive:
        return interact(model, task)

    # The table, the certificate, and the same numbers for other programs.
    results = evaluate_and_print(model, task, lengths, args.traces, args.seed)
    numbers = {"config": checkpoint["config"], "results": results}
    if args.exhaustive:
        pairs, failures = exhaustive(model, task)
        print_certificate(task, pairs, failures)
        numbers["exhaustive"] = {"pairs": pairs, "right": pairs - len(failures)}

    if args.plot:
        with one_line_errors(parser):
            plot(results, checkpoint["config"], args.plot)
    if args.json:  # the last line, for a program that reads it
        print(json.dumps(numbers))


if __name__ == "__main__":
    data.run(main)
