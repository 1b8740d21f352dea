"""How far does a trained model track?  python eval.py runs/linrnn-S5-seed0

For each (length L, spacing S), on fresh traces:
    chance   accuracy of a guess that knows the variable but not the state
    all      accuracy over all reveals
    final    accuracy at the last reveal of each trace
    perfect  fraction of traces with EVERY reveal correct, with its 95% Wilson interval
The model reads the whole true trace and is scored on the revealed values only. Each earlier reveal
tells it one variable, so at a small spacing `final` exceeds chance even if the state is lost.

Next: train.py, which makes the runs that this file reads.
"""

from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data import Group, Parser, ReplTask, UserError, generator, run_cli, stages
from models import MODELS, options_of

LENGTHS = ((64, 8), (128, 1), (128, 16), (256, 32))
TOKENS_AT_ONCE = 2**17  # in one forward pass, over all its traces
NOT_FINITE = -1  # the prediction where logits are not finite; not a token


# --- 1. The table ---------------------------------------------------------------------------------

def evaluate_and_print(model, task, lengths=LENGTHS, traces=256, seed=0):
    """The table described above, printed and returned: a dict for each (length, spacing)."""
    rows = [evaluate(model, task, *stage, traces, seed) for stage in lengths]
    print_table(rows)
    return rows


def evaluate(model, task, length, spacing, traces=256, seed=0):
    """One row of the table.

    model: any module, tokens [B, T] -> logits [B, T, vocabulary]. task: see data.py, section 2.
    """
    # The traces depend on these numbers only, so every model reads the same ones.
    rng = generator(seed, "test", length, spacing)
    inputs, targets, reveals = task.test_batch(traces, length, spacing, rng)[:3]
    if len({*reveals.sum(1).tolist()}) > 1:  # the reshape below would mix traces
        raise UserError("all traces of a test must have the same number of reveals")

    predictions = predict(model, inputs, f"({length},{spacing})")
    correct = (predictions == targets)[reveals].reshape(traces, -1)
    row = {"length": length, "spacing": spacing, "chance": task.chance} | score(correct)
    not_finite = (predictions == NOT_FINITE).any(0).nonzero()[0]
    if len(not_finite):
        row["not_finite_from"] = int(not_finite[0])
    return row


@torch.no_grad()
def predict(model, inputs, description=None):
    """The most likely token of the whole vocabulary at each position: inputs [B, T] -> [B, T].

    It is NOT_FINITE where the logits are not finite. description: the progress bar's text.
    """
    tokens = torch.from_numpy(inputs).to(device_of(model))
    pieces = tokens.split(max(1, TOKENS_AT_ONCE // tokens.shape[1]))
    model.eval()
    predictions = []
    for piece in tqdm(pieces, desc=description, leave=False, disable=None):
        logits = model(piece)
        # argmax treats NaN as the maximum, so mask it.
        finite = logits.amax(-1).isfinite()
        predictions.append(torch.where(finite, logits.argmax(-1), NOT_FINITE))
    return torch.cat(predictions).cpu().numpy()


def score(correct):
    """The accuracies of a row: bool [traces, reveals] -> a dict of plain numbers, for json."""
    perfect = correct.all(1)
    low, high = wilson(perfect.sum(), len(correct))
    return {"reveals": correct.size, "all": float(correct.mean()),
            "final": float(correct[:, -1].mean()),
            "perfect": float(perfect.mean()), "perfect_low": low, "perfect_high": high,
            "by_position": correct.mean(0).tolist()}


def wilson(hits, total, z=1.96):
    """The 95% Wilson score interval of a proportion (Wilson 1927)."""
    # The naive interval p +- 1.96 SE has zero width at 100%.
    p = hits / total
    shrink = z * z / total

    centre = (p + shrink / 2) / (1 + shrink)
    half = z * np.sqrt(p * (1 - p) / total + shrink / total / 4) / (1 + shrink)
    return float(max(0.0, centre - half)), float(min(1.0, centre + half))


def print_table(rows, columns=("chance", "all", "final", "perfect")):
    """Print two lines per row: the columns, then the accuracy along the trace."""
    print("\n     (L,S)" + "".join(f"{name:>9}" for name in columns) + "   95% of perfect")

    for row in rows:
        name = f"({row['length']},{row['spacing']})"
        print(f"{name:>10}" + "".join(f"{row[column]:9.4f}" for column in columns)
              + f"   {row['perfect_low']:.4f}-{row['perfect_high']:.4f}")

        # About eight positions, evenly spaced: where along the trace is the state lost?
        by_position = row["by_position"]
        shown = by_position[::max(1, len(by_position) // 8)]
        print("  along it" + "".join(f"{accuracy:9.4f}" for accuracy in shown))
        if "not_finite_from" in row:
            print(f"  logits are not finite from token {row['not_finite_from']} on")


# --- 2. Reading a run -----------------------------------------------------------------------------

def load(folder, device="cpu"):
    """The task and the trained model of a run folder.  Raises: UserError."""
    task, model = make(read_checkpoint(folder)["config"])
    return task, load_weights(model.to(device), folder)


def load_weights(model, folder):
    """Load the result of a run into a model that you made yourself, and return it."""
    try:
        model.load_state_dict(read_checkpoint(folder)["model"])
    except RuntimeError as error:  # torch lists every tensor that does not fit
        raise UserError(f"{folder} holds another model: {error}"[:200]) from None
    return model.eval()


def read_checkpoint(folder):
    """The contents of model.pt: config, model (the result), and what --resume needs."""
    path = Path(folder).expanduser() / "model.pt"
    if not path.exists():
        raise UserError(f"there is no run in {folder}: {path} does not exist")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)  # executes no code
        checkpoint["config"], checkpoint["model"]
    except Exception as error:  # of any type: the file may hold anything
        raise UserError(f"{path} is not a readable run: {error}"[:200]) from None
    return checkpoint


def make(config):
    """The task of a config (the fields of train.Config), and its model before training."""
    if config.get("chapter"):
        raise UserError(f"this run belongs to experiments.{config['chapter']}; evaluate it with "
                        f"python -m experiments.{config['chapter']} eval")
    if config.get("model") not in MODELS or "repeat_fraction" not in config:
        raise UserError("this run was made from Python, by a fork or by another version: make its "
                        "task and model yourself, then call load_weights(model, folder)")
    task = ReplTask(Group(config["group"]), config["commands"], config["repeat_fraction"])
    return task, make_model(MODELS[config["model"]], task, config)


def make_model(model_class, task, config):
    """A model with random parameters, from the seed and the sizes of a config."""
    options = {name: config[name] for name in options_of(config["model"])}
    # torch initialises layers from its global CPU generator: seed it here, then restore it.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config["seed"])
        try:
            return model_class(len(task.vocab), **options)
        except ValueError as error:  # sizes that do not fit together
            raise UserError(str(error)) from None


def find_device(name=None):
    """The device of that name; by default cuda if available, else cpu.  Raises: UserError."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError):
        raise UserError(f"device {name} is not available; try --device cpu") from None
    return name


def device_of(model):
    """The device of the parameters, or the CPU for a model without any."""
    return next(model.parameters(), torch.zeros(0)).device


# --- 3. The figure --------------------------------------------------------------------------------

def plot(rows, config, path):
    """Accuracy against the commands read before a reveal, one curve for each (length, spacing)."""
    from matplotlib.figure import Figure  # imported here: it takes a second
    axes = Figure(layout="constrained").subplots()
    for row in rows:
        # The first reveal of a trace comes after `spacing` commands, not after none.
        commands_read = np.arange(1, len(row["by_position"]) + 1) * row["spacing"]
        axes.plot(commands_read, row["by_position"], ".-",
                  label=f"{row['length']} commands, a reveal after every {row['spacing']}")

    longest = max(length for length, _ in config["curriculum"])
    axes.axhline(rows[0]["chance"], color="grey", label="chance")
    axes.axvline(longest, color="grey", linestyle=":", label="longest training trace")
    axes.set(xlabel="commands read before the reveal", ylabel="accuracy", ylim=(0, 1.05),
             title=f"{config['model']} on {config['group']}: accuracy by reveal position")
    axes.legend()
    try:
        axes.figure.savefig(path)
    except ValueError as error:  # an unknown file format
        raise UserError(str(error)) from None


# --- 4. The command line --------------------------------------------------------------------------

def main(argv=None):
    parser = Parser(description="How far does a trained model track?")
    add = parser.add_argument
    add("run", help="a run folder made by train.py")
    add("--lengths", type=stages, default=LENGTHS,
        help="LENGTH:SPACING,... (default 64:8,128:1,128:16,256:32)")
    add("--traces", type=int, default=256, help="fresh traces for each row (default 256)")
    add("--seed", type=int, default=0, help="seed of the test traces (default 0)")
    add("--device", help="cpu, cuda, cuda:1 or mps (default cuda if available, else cpu)")
    add("--plot", metavar="FILE", help="write a figure (.png, .pdf or .svg)")
    args = parser.parse_args(argv)
    if args.traces < 1 or args.seed < 0:
        raise UserError("--traces must be at least 1, and --seed at least 0")

    task, model = load(args.run, find_device(args.device))
    for stage in args.lengths:
        task.check(*stage)
    rows = evaluate_and_print(model, task, args.lengths, args.traces, args.seed)
    if args.plot:
        plot(rows, read_checkpoint(args.run)["config"], args.plot)


if __name__ == "__main__":
    run_cli(main)
