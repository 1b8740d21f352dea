"""What must grow with the number of variables?  One rule for any n <= 26, and runs without a part.

    python -m experiments.scale                     the tables, from the records
    python -m experiments.scale --run --group S12   trains what is missing: 0.5 to 40 minutes a run
    python -m experiments.scale --plan --layers 18 --d-model 512      what would that cost?
    python -m experiments.scale --rounded experiments/results/models/linrnn-S5-seed0
                                                    does it track with q, k and v in bfloat16?

The 2n slots and 2n reflections of scan.py do not depend on the order of the group. What grows is
the wait for the first stage, (2,1). Against it stands data.rule_for(n): a wider model, smaller
rates for more steps, reveals in a row, and first commands made of a few exchanges, which leave many
variables in place. A run is *solved* if at least 99.5% of the reveals are right at (128,16).

Finding. S26 has 10^24 times the states of S5 and takes 14.0 times its tokens. By this rule all
linear RNNs from S3 to S26 are solved but one of the two of S16. Without the exchanges S12 waits
more than three times as long at (2,1), without the reveals in a row twice as long: a command that
moves all variables says nothing until both the look-up and the move are right.

The plan is within a factor of two of the recorded minutes of S5 to S26; on GPUs nothing was
measured. The kernels that a larger model would need read bfloat16 only (flash-linear-attention).
With q, k and v rounded, and S in float32, the five stored models of S5 have as many reveals right.

Next: programs.py.
"""

import argparse
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from data import (Group, ReplTask, UserError, generator, number, one_line_errors, parse, run,
                  stages, try_stages)
from eval import evaluate_and_print, load_run
from experiments import RATES, record, records, span, train_arm
from models import MODELS, DeltaBlock, LinRNN, build, options_of
from train import MOST_TRAINED, Recipe

LENGTHS = [(64, 8), (128, 16), (256, 32)]
SOLVED = 0.995  # of the reveals at (128,16)
TRACES = 15000  # of each stage, as in the paper
ONE_CORE = 5.5e10  # FLOP/s that the recorded runs reach on a core: 34e9 with S5, 86e9 with S20


# --- 1. The runs ----------------------------------------------------------------------------------

class Arm(NamedTuple):
    """Runs that differ in their seed only."""
    group: str
    commands: str = "full"
    model: str = "linrnn"
    without: str = "none"  # the part of the rule that is left out
    seeds: int = 3
    millions: int = 60  # tokens at which a run ends that is not through its stages


ARMS = [
    Arm("S3"),
    Arm("S5"),
    Arm("S8"),
    Arm("S12"),
    Arm("S16", seeds=2),
    Arm("S20", seeds=2),
    Arm("S26", seeds=2),
    Arm("S3", "swap"),
    Arm("S5", "swap"),
    Arm("S8", "swap"),
    Arm("S12", "swap"),
    Arm("S26", "swap", seeds=2),
    Arm("S8", model="transformer", millions=6),
    Arm("S8", model="lstm", millions=12),
    Arm("S12", without="rate", seeds=1, millions=5),
    Arm("S12", without="reveals", millions=5),
    Arm("S12", without="exchanges", millions=5),
    Arm("S12", without="all", millions=5),
    Arm("S26", without="last steps", seeds=1),
    Arm("S26", without="rehearsal", seeds=2)]

FULL_LENGTH = ["none", "last steps", "rehearsal"]  # the parts without which stages are not fewer


def make_task(arm):
    """REPL traces by the rule, but for the part of it that is left out.

    Only training is changed. The test traces are those of every other arm.
    """
    left_out = {arm.without}
    if arm.without == "all":
        left_out = {"rate", "last steps", "reveals", "exchanges", "rehearsal", "heads"}
    if arm.without == "rehearsal":
        left_out = {"rehearsal", "last steps"}  # the older part first

    sparse = False if "exchanges" in left_out else None
    task = ReplTask(Group(arm.group), arm.commands, sparse)
    if "reveals" in left_out:
        task.rule = task.rule._replace(reveals_in_a_row=1)
    if "rehearsal" in left_out:
        task.rule = task.rule._replace(sparse_commands=False)
    if "rate" in left_out:
        del task.recipe_options["lr"], task.recipe_options["matrix_lr"]
    if "last steps" in left_out:
        del task.recipe_options["last_steps"]
    if "heads" in left_out:  # the two wide ones, a part that was not left out alone
        task.model_options = {"conv_width": task.model_options["conv_width"]}
    return task


def make_recipe(arm, task, seed):
    """The rates of the rule, or those chosen for the model. Tokens end a run, not steps."""
    options = task.recipe_options.copy()
    if arm.model != "linrnn":
        options |= RATES[arm.model]
    if arm.without not in FULL_LENGTH:
        options["curriculum"] = [(2, 1), (8, 1)]  # how long is the wait at (2,1)?
    return Recipe(**options, max_steps=10**6, seed=seed)


def train_missing(arm, seed):
    """Train, evaluate and record the run of one seed, unless it has a record."""
    task = make_task(arm)
    recipe = make_recipe(arm, task, seed)
    options = options_of(MODELS[arm.model])
    for name in options.keys() & task.model_options.keys():
        options[name] = task.model_options[name]

    names = {"group": arm.group, "commands": arm.commands, "model": arm.model}
    cell = {**names, "without": arm.without, "seed": seed}
    made = train_arm("scale", cell, lambda: build(arm.model, len(task.vocab), **options), task,
                     recipe, max_tokens=arm.millions * 1e6,
                     description={**names, "options": options, "format": "repl"})
    if made:
        model, summary = made
        rates = {"options": options, "lr": recipe.lr, "matrix_lr": recipe.matrix_lr}
        results = evaluate_and_print(model, task, LENGTHS)
        record("scale", cell | rates | summary | {"results": results})


# --- 2. What the records say ----------------------------------------------------------------------

def right_at(row, length):
    """The share of the reveals that are right in traces of that length."""
    return next(result["all"] for result in row["results"] if result["length"] == length)


def is_solved(row):
    """Whether traces of twice the length of training are right, up to one reveal in 200."""
    return right_at(row, 128) >= SOLVED


def wait(row):
    """Tokens read at (2,1), to the next 50 steps."""
    return max(tokens for tokens, length, _ in row["curve"] if length == 2)


def records_of(arm):
    """The rows of all seeds of an arm."""
    return records("scale", group=arm.group, commands=arm.commands, model=arm.model,
                   without=arm.without)


def show(arms):
    """The tables, from results/scale.jsonl. Ranges are over the seeds."""
    print("(L,S): % of the reveals right; solved: at least 99.5% at (128,16), of all runs;\n"
          "*: 150 last steps and not 300; **: and no rehearsal\n")
    print("group      model        weights  million tokens    minutes      "
          "(64,8)     (128,16)     (256,32)  solved")
    for arm in arms:
        rows = records_of(arm)
        if arm.without not in FULL_LENGTH or not rows:
            continue
        name = arm.group + (" swaps" if arm.commands == "swap" else "")
        name += "*" * FULL_LENGTH.index(arm.without)
        shares = ""
        for length, _ in LENGTHS:
            shares += f"{span([100 * right_at(row, length) for row in rows]):>13}"
        print(f"{name:11}{arm.model:11}{rows[0]['parameters']:9,}"
              f"{span([row['tokens'] / 1e6 for row in rows]):>16}"
              f"{span([row['minutes'] for row in rows]):>11}{shares}  "
              f"{sum(map(is_solved, rows))} of {len(rows)}")

    print("\nmillion tokens until the stage (2,1) is left, by seed; > : not left when they ended\n")
    for arm in arms:
        if arm.group == "S12" and arm.commands == "full":
            waits = []
            for row in records_of(arm):
                left = row["stage_reached"] > 1
                waits.append(f"{'' if left else '> '}{wait(row) / 1e6:.1f}")
            name = "the rule" if arm.without == "none" else f"without {arm.without}"
            print(f"S12  {name:18} {', '.join(waits)}")


# --- 3. A plan for other sizes --------------------------------------------------------------------

def cost(model, batch, tokens):
    """What one training step costs, counted on tensors that have a shape and no memory.

    model: on the device `meta`.
    -> FLOPs of the matrix products and convolutions, forward and backward; bytes that are kept
       for the backward; bytes of the state that the traces leave behind.
    """
    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()  # several views of it count once
        return tensor

    inputs = torch.zeros(batch, tokens, dtype=torch.long, device="meta")
    counter = FlopCounterMode(display=False)
    with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits, state = model.stream(inputs)
        F.cross_entropy(logits.flatten(0, 1), inputs.flatten()).backward()
    state_bytes = sum(part.nbytes for part in state if part is not None)
    return counter.get_total_flops(), sum(kept.values()), state_bytes


def plan(args):
    """Weights, memory, FLOPs and hours of a training, stage by stage."""
    task = ReplTask(Group(args.group or "S5"))
    options = options_of(LinRNN) | task.model_options
    for name in ("d_model", "heads", "layers"):
        options[name] = getattr(args, name) or options[name]
    with torch.device("meta"):
        model = LinRNN(len(task.vocab), **options)
    weights = sum(weight.numel() for weight in model.parameters())
    try_stages(task, args.lengths, args.batch, MOST_TRAINED)

    print(options)
    print(f"{weights:,} weights: {16 * weights / 1e9:.3f} GB with gradient, momentum and mean; "
          f"batches of {args.batch} traces\n")
    print("   (L,S)  tokens a trace  MFLOP a token  GB kept  MB of state  "
          f"hours of {TRACES:,} traces")
    total = 0
    for length, spacing in args.lengths:
        batch = task.training_batch(1, length, spacing, generator(0, "valid"))
        tokens = batch.inputs.shape[1]
        flops, kept, state = cost(model, args.batch, tokens)
        hours = flops * TRACES / args.batch / args.flops / 3600
        total += hours
        print(f"{f'({length},{spacing})':>8} {tokens:15,} {flops / args.batch / tokens / 1e6:14.2f}"
              f" {kept / 1e9:8.2f} {state / 1e6:12.2f} {hours:11.4f}")
    print(f"   in all {total:.3f} hours at {args.flops:.3g} FLOP/s")


# --- 4. Kernels that read bfloat16 only -----------------------------------------------------------

def scan_of_rounded(scan, q, k, v, beta, state=None):
    """The scan of q, k and v as bfloat16 can hold them. beta and S keep their digits."""
    rounded = [x.bfloat16().to(x.dtype) for x in (q, k, v)]
    return scan(*rounded, beta, state)


def print_rounded(folder):
    """The table of a run, first as it was trained, then with its scans reading bfloat16."""
    _, task, model = load_run(folder)
    evaluate_and_print(model, task, LENGTHS)

    for block in model.blocks:
        if isinstance(block, DeltaBlock):
            block.scan = partial(scan_of_rounded, block.scan)
    print("\nwith q, k and v rounded to bfloat16:")
    evaluate_and_print(model, task, LENGTHS)


# --- 5. The command line --------------------------------------------------------------------------

def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.scale",
                                     description=__doc__.split("\n")[0])
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--run", action="store_true", help="first train what is missing: 0.5 to 40 "
                       "minutes a run, four hours in all on one core")
    parts.add_argument("--plan", action="store_true",
                       help="what would a training of these sizes cost?")
    parts.add_argument("--rounded", metavar="RUN",
                       help="the table of a run with q, k and v in bfloat16")
    add = parser.add_argument
    add("--group", help="this group only; of a plan: its group (default: S5)")
    add("--d-model", type=number(1), help="of a plan, as are all below: width")
    add("--heads", type=number(1))
    add("--layers", type=number(1))
    add("--batch", type=number(1, 10**5), default=16, help="traces a step")
    add("--lengths", type=stages, default=Recipe().curriculum, help="stages LENGTH:SPACING,...")
    add("--flops", type=number(1, 1e21, float), default=ONE_CORE,
        help="FLOP/s that are reached, not those of a data sheet (default: those of our one core)")
    args = parse(parser, argv)

    with one_line_errors(parser):
        if args.plan:
            return plan(args)
        if args.rounded:
            return print_rounded(args.rounded)
        arms = [arm for arm in ARMS if args.group in (None, arm.group)]
        if not arms:
            known = dict.fromkeys(arm.group for arm in ARMS)
            raise UserError(f"--group {args.group} has no runs here; those of {', '.join(known)}")
    if args.run:
        for arm in arms:
            for seed in range(arm.seeds):
                train_missing(arm, seed)
    show(arms)


if __name__ == "__main__":
    run(main)
