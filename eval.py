"""How far does a trained model track?  python eval.py runs/linrnn-S5-seed0

A run is a folder that train.py has made: its model.pt holds the weights, and the names of the task
and of the model. For each (length L, spacing S), on fresh traces:
    chance   accuracy of a guess that knows the variable but not the state
    all      accuracy over all reveals; final: at the last reveal of each trace
    perfect  share of traces in which EVERY reveal is right, with its 95% Wilson interval
The model reads the whole true trace and is asked for the revealed values only. An earlier reveal
tells it one variable, so at a small spacing `final` is above chance even if the state is lost.

Next: train.py.
"""

import inspect
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data import Group, Parser, ReplTask, UserError, at_least, generator, run, stages
from models import MODELS

TOKENS_AT_ONCE = 2**17  # of all traces together: what a model reads in one piece
LENGTHS = [(64, 8), (128, 16), (256, 32)]
NOT_FINITE = -1  # in place of a symbol
COLUMNS = ["chance", "all", "final", "perfect"]


# --- 1. The table ---------------------------------------------------------------------------------

def evaluate_and_print(model, task, lengths, traces=256, seed=0):
    """The table of this file's header, a row for each (length, spacing): a list of dicts."""
    rows = [evaluate(model, task, *stage, traces, seed) for stage in lengths]
    print_table(rows)
    return rows


def evaluate(model, task, length, spacing, traces=256, seed=0):
    """The row of the table for fresh traces.

    model: any module, tokens [B, T] -> logits [B, T, vocabulary]. task: as in data.py, section 2.
    """
    # The traces depend on these numbers only: every model reads the same ones.
    rng = generator(seed, "test", length, spacing)
    batch = task.test_batch(traces, length, spacing, rng)
    inputs, targets, reveals = [as_tensor(part).cpu().numpy() for part in batch[:3]]
    reveals = reveals.astype(bool)  # numbers would be read as places

    # With other numbers of reveals a row of `right` would hold those of several traces.
    counts = reveals.sum(1)
    if counts.min() < 1 or counts.min() < counts.max():
        raise UserError("each trace must have as many reveals as the others, and at least one; "
                        f"got {counts.min()} to {counts.max()}")

    # An answer is the most likely symbol of the whole vocabulary, not of the values only.
    said = predict(model, inputs, f"({length},{spacing})")
    right = (said == targets)[reveals].reshape(len(reveals), -1)  # [traces, reveals of a trace]

    # What was read, and what a guess would have: then what the model has.
    row = {"length": length, "spacing": spacing, "traces": traces, "chance": task.chance}
    no_answer = (said == NOT_FINITE).any(0).nonzero()[0]  # the tokens at which there is one
    if len(no_answer):
        row["not_finite_from"] = int(no_answer[0])
    return row | score(right)


@torch.no_grad()
def predict(model, inputs, note=None):
    """The most likely symbol after each token: inputs [B, T] -> [B, T].

    NOT_FINITE, which is no symbol, where the model's numbers are not finite.
    note: what a progress bar says, where the output is a terminal; None for no bar.
    """
    hidden = None if note else True  # to tqdm None means: unless this is a terminal
    # On the device of the model, which need not be that of the traces.
    B, T = inputs.shape
    tokens = as_tensor(inputs).to(device_of(model), torch.long)
    said = []

    with eval_mode(model):
        # Without a state, a model must read a trace as a whole: a few traces at a time.
        if not hasattr(model, "stream"):
            few = max(1, TOKENS_AT_ONCE // T)
            for some in tqdm(tokens.split(few), desc=note, leave=False, disable=hidden):
                said.append(most_likely(model(some)))
            return torch.cat(said).cpu().numpy()

        # A long trace does not fit into memory, and a recurrence does not need it to: all traces,
        # piece by piece. The state that comes out of one piece goes into the next.
        state = None
        pieces = tokens.split(max(1, TOKENS_AT_ONCE // B), 1)
        for piece in tqdm(pieces, desc=note, leave=False, disable=hidden):
            logits, state = model.stream(piece, state)
            said.append(most_likely(logits))
        return torch.cat(said, 1).cpu().numpy()


def most_likely(logits):
    """The symbol of the largest logit: [B, T, vocabulary] -> [B, T]."""
    # argmax takes a nan for the largest number, and would call it an answer.
    finite = logits.amax(-1).isfinite()
    return torch.where(finite, logits.argmax(-1), NOT_FINITE)


@contextmanager
def eval_mode(model):
    """Inside of it the model has no dropout; after it each of its parts has its old mode."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def as_tensor(part):
    """Whole numbers as a tensor: from an array of any layout and type, a list, or a tensor."""
    if isinstance(part, torch.Tensor):
        return part
    return torch.from_numpy(np.array(part, np.int64, order="C"))  # torch takes no reversed one


def score(right):
    """The row of the table for answers that are right or wrong: bool [traces, reveals] -> a dict.

    perfect is a share of the traces, all the others are shares of the reveals. Everything is a
    plain number or a list of numbers, so that json can write it.
    """
    # A trace counts as perfect if all its reveals are right, not if most of them are. float: json
    # knows no numbers of numpy.
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


def print_table(rows, columns=COLUMNS):
    """A line for each row; below it the accuracy along the trace."""
    # Columns of nine characters, the name of the length ahead of them.
    print("\n     (L,S)" + "".join(f"{name:>9}" for name in columns) + "   95% of perfect")

    for row in rows:
        name = f"({row['length']},{row['spacing']})"
        print(f"{name:>10}" + "".join(f"{row[column]:9.4f}" for column in columns)
              + f"   {row['perfect_low']:.4f}-{row['perfect_high']:.4f}")

        # Some eight places, evenly spread: where along the trace is the state lost?
        by_position = row["by_position"]
        shown = by_position[::max(1, len(by_position) // 8)]
        print("  along it" + "".join(f"{share:9.4f}" for share in shown))
        if "not_finite_from" in row:
            print(f"  not finite from token {row['not_finite_from']} on: no answers there")


# --- 2. Reading a run -----------------------------------------------------------------------------

def load(folder, device="cpu"):
    """The task and the trained model of a run folder.  Raises: UserError."""
    # Runs of the library may have no config: nobody told them how their model was made.
    config = read_checkpoint(folder)["config"]
    if not config.get("task"):
        raise UserError(f"{folder} does not name its task: make the model yourself, and read it "
                        "with load_weights(model, folder)")

    task, model = make(config)
    return task, load_weights(model.to(device), folder)


def load_weights(model, folder):
    """Read the result of a run into a model of one's own making, and return it."""
    stored = read_checkpoint(folder, device_of(model))["model"]

    # torch.compile puts a word into the names of the weights. It says nothing about the model.
    word = "_orig_mod."
    own = {name.replace(word, ""): name for name in model.state_dict()}
    plain = {name.replace(word, ""): weight for name, weight in stored.items()}
    weights = {own.get(name, name): weight for name, weight in plain.items()}

    # torch says in many lines which tensor does not fit; one is enough here.
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{folder} holds the weights of another model: {error}"[:200]) from None
    return model.eval()


def read_checkpoint(folder, device="cpu"):
    """The content of model.pt: config, model (the result), and what train.py goes on from."""
    path = Path(folder) / "model.pt"
    try:
        # torch writes a checksum of each part of the file, and does not look at them again.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged:
            raise zipfile.BadZipFile(f"{damaged} does not have its checksum")

        checkpoint = torch.load(path, map_location=device, weights_only=True)  # runs no code
        checkpoint["config"].items(), checkpoint["model"].items()  # fails where one is not there
        return checkpoint
    except Exception as error:  # of any kind, since the file may hold anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:100]  # {error} may be empty
        raise UserError(f"{path} is missing, damaged or foreign: {reason}") from None


def make(config):
    """The task of a config, and its model before training.

    config: task ("traces"), group, commands, runs, model, options (of the model) and seed, all of
        them names and numbers. So no code runs that a run folder from elsewhere has brought.
    Raises: UserError for names or sizes that are not possible.
    """
    kind = config.get("task", "a task without a name")
    if kind != "traces":
        raise UserError(f"this is a run of {kind}: use the command that made it")
    missing = {"group", "commands", "model", "options", "seed"} - config.keys()
    if missing:
        raise UserError(f"the config of this run does not name its {', '.join(sorted(missing))}")

    # An older config does not say it: nothing in its traces came in runs.
    task = ReplTask(Group(config["group"]), config["commands"], config.get("runs", 0.0))
    return task, make_model(config, task)


def make_model(config, task):
    """The model of a config. Its weights depend on the seed, and on nothing else."""
    name = config["model"]
    if name not in MODELS:
        raise UserError(f"there is no model {name} here, but {', '.join(MODELS)}: make it "
                        "yourself, and read it with load_weights(model, folder)")
    for option in config["options"]:
        if option not in options_of(name):
            raise UserError(f"the model {name} has no option {option}")

    # torch draws the weights of a new layer from its one global generator.
    torch.manual_seed(config["seed"])
    try:
        return MODELS[name](len(task.vocab), **config["options"])
    except ValueError as error:  # of a constructor: sizes that do not fit together
        raise UserError(str(error)) from None


def options_of(name):
    """The options of a model and their defaults, as its own signature has them."""
    parameters = inspect.signature(MODELS[name]).parameters
    return {option: p.default for option, p in parameters.items() if option != "vocab_size"}


def find_device(name=None):
    """The device of that name; without a name cuda, where it is there.  Raises: UserError."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError):
        raise UserError(f"device {name} is not there: try --device cpu") from None
    return name


def device_of(model):
    """Where its weights are. A model without weights is on the CPU."""
    # The second argument of next() is what it returns when there is no first parameter.
    return next(model.parameters(), torch.zeros(0)).device


# --- 3. The picture -------------------------------------------------------------------------------

def plot(rows, config, path):
    """Accuracy against the commands read before a reveal, a curve for each length."""
    from matplotlib.figure import Figure  # only here: it takes a second to import
    axes = Figure(layout="constrained").subplots()

    # The first reveal of a trace stands after `spacing` commands, not after none.
    for row in rows:
        commands_read = np.arange(1, len(row["by_position"]) + 1) * row["spacing"]
        axes.plot(commands_read, row["by_position"], ".-",
                  label=f"traces of {row['length']} commands")

    # Two lines to compare with: a guess, and the end of what was trained.
    longest = max(length for length, _ in config["curriculum"])
    axes.axhline(rows[0]["chance"], color="grey", label="chance")
    axes.axvline(longest, color="grey", linestyle=":", label="longest training trace")
    axes.set(xlabel="commands read before the reveal", ylabel="accuracy", ylim=(0, 1.05),
             title=f"{config['model']} on {config['group']}: accuracy by reveal position")
    axes.legend()
    axes.figure.savefig(path)


# --- 4. The command line --------------------------------------------------------------------------

def main(argv=None):
    parser = Parser(prog="python eval.py", description="How far does a trained model track?")
    add = parser.add_argument
    add("run", help="a run folder, made by train.py")
    add("--lengths", type=stages, default=LENGTHS, help="LENGTH:SPACING,... (64:8,128:16,256:32)")
    add("--traces", type=at_least(1), default=256, help="fresh traces for each length (256)")
    add("--seed", type=at_least(0), default=0, help="of the traces (0)")
    add("--device", help="cpu, cuda, cuda:1, mps (cuda if it is there, else cpu)")
    add("--plot", metavar="FILE", help="write the figure (.png, .pdf, .svg)")
    args = parser.parse_args(argv)

    # Refuse, before the work, what cannot be read or written.
    task, model = load(args.run, find_device(args.device))
    for length, spacing in args.lengths:
        task.check(length, spacing)
    if args.plot:
        if Path(args.plot).suffix not in (".png", ".pdf", ".svg"):
            raise UserError(f"--plot writes .png, .pdf and .svg; got {args.plot}")
        open(args.plot, "a").close()

    # The same table as at the end of the training, on other traces if the seed is another one.
    rows = evaluate_and_print(model, task, args.lengths, args.traces, args.seed)
    if args.plot:
        plot(rows, read_checkpoint(args.run)["config"], args.plot)


if __name__ == "__main__":
    run(main)
