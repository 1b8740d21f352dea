"""Which mixer learns to track, with what budget, and how far?  One frame, equal caps in tokens.

    python -m experiments.arms rates lstm          # the grid of rates of one arm
    python -m experiments.arms run lstm --seed 0   # one arm to its plateau, with its curve
    python -m experiments.arms spacing lstm        # traces of 8 commands with rarer reveals

The frame, the traces, the batch, the curriculum and its rule (a stage is left after three batches
with 97% of the reveals right) are the same for all arms. The optimiser and its rates are each arm's
own. They are chosen among two optimisers and a grid of rates on seed 100: the ones with which the
stage (2,1) is passed with the fewest tokens. If none passes it within the cap, the ones with the
most reveals right at the end. An arm that is not through the curriculum when its tokens are spent
is evaluated with the weights that it has.

Finding (experiments/results/arms_run.jsonl: S5, five seeds, at most 15 million tokens, one core).
With beta <= 2 the linear RNN is through the curriculum after 2.8 to 3.2 million tokens, within a
minute, and has 100.0% at (128,16) on 5 of 5 seeds. With beta <= 1 it passes (2,1) and (8,1), has 86
to 90% at (16,2), and is at chance at (64,8). Along (16,2) its accuracy falls from 100 to 67%. The
Transformer passes (2,1) on three seeds of five, and has 40 to 56% at (8,1) there. The LSTM has 71
to 91% at (2,1). Both stand for millions of tokens at 60% of (2,1), where one command is read and
two are not composed. Both climb slowly where their tokens end. In the grid (arms_rates.jsonl) each
best value lies inside.

Where a command is easier, the gap to the LSTM closes at a price (three seeds each). On the swaps of
S3 the LSTM is through the curriculum on 3 of 3 seeds, with 100.0% at (128,16), after 5.7 to 8.2
million tokens; the linear RNN after 1.4. On all commands of S3 it is through on 1 of 3 after 11.4
million, has 98.7% at (128,16) on another after 18, and 88% at (16,2) on the third; the linear RNN
takes 1.8. So the price is a factor of four to ten in tokens. On S5 it is more. With 20 million
tokens of swaps, thirteen times what the linear RNN takes, the LSTM has 68 to 69% at (8,1). With 45
million tokens of full commands, fifteen times as many, it has 99.8% at (2,1) and 42% at (8,1) (one
seed, arms_longer.jsonl).
    The Transformer learns one length after the other, and each time the longer one undoes it: on
the swaps of S3 it passes (16,2) on 3 of 3 seeds and (32,4) on one, and with 12 million tokens ends
at chance on every length. With beta <= 1 the swaps of S3 are passed on 3 of 3 seeds, with 93 to 95%
at (64,8) and 54 to 61% at (128,16); elsewhere (64,8) has 64 to 84%. Without the local block (the
arms called bare, 4 million tokens) the linear RNN has 69 to 76% at (2,1) of S5, the Transformer 69
to 86%, the LSTM 56 to 63%.

Rarer reveals (arms_spacing.jsonl, three seeds). Behind the stage (2,1) traces of 8 commands are
learned with a reveal after every S of them: by the linear RNN with beta <= 2 on S5 for S = 1 and 2,
and on 2 of 3 seeds for 4 (4 million tokens); on S3 for S = 1, 2, 4, and on 2 of 3 seeds for 8 (3
million). With beta <= 1 on S3 for S = 1 and 2, and on 2 of 3 for 4. Alone, only S = 1 is learned on
all seeds. The LSTM had 12 million tokens: behind (2,1) it learns S = 1 on one seed of three, after
7.9, and has 84 and 96% on the others, 61 to 63% for S = 2, and chance from S = 4 on. The
Transformer (3 million) learns none of these. Behind (2,1) it has 59 to 93% of (8,1), 49 to 51% of
(8,2), and chance from S = 4 on.

Next: ladder.py.
"""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np

import train
from data import number, parse_stages, user_errors
from eval import append_record, check_record, evaluate_and_print

RESULTS = Path(__file__).parent / "results"
GRID = {"adamw": [(rate, rate) for rate in (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)],
        "muon": [(rate, 5 * rate) for rate in (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)]}  # (lr, matrix lr)
ARMS = {  # the options of train.py that make an arm
    "linrnn": "--model linrnn", "linrnn-beta1": "--model linrnn --beta-max 1",
    "lstm": "--model lstm", "transformer": "--model transformer"}
ARMS |= {f"{name}-bare": f"{ARMS[name]} --conv-width 1"  # without the local block
         for name in ("linrnn", "lstm", "transformer")}
RATES = {  # what the rule chose, from results/arms_rates.jsonl
    "linrnn": "--optimizer muon --lr 2e-3 --matrix-lr 0.01",
    "linrnn-beta1": "--optimizer muon --lr 1e-3 --matrix-lr 5e-3",
    "lstm": "--optimizer adamw --lr 5e-4 --matrix-lr 5e-4",
    "transformer": "--optimizer muon --lr 1e-3 --matrix-lr 5e-3"}
RATES |= {f"{name}-bare": RATES[name] for name in ("linrnn", "lstm", "transformer")}
LENGTHS = "2:1,8:1,16:2,64:8,128:16"


# --- Training to a plateau ------------------------------------------------------------------------

def learn(options, folder, millions, parser=None, make_run=train.Run):
    """Train with these options of train.py until they are done, or so many million tokens are read.

    A folder that holds a part of this run is resumed. Returns the run, and its curve: pieces of
    50 steps, each [tokens read, length of the stage, share of the reveals right].
    """
    args = (parser or train.make_parser()).parse_args([*options, "--out", str(folder)])
    config, _ = train.config_of(args)
    there = (folder / "model.pt").exists()
    checkpoint = train.open_folder(folder, there, config)
    run = make_run(config, folder, "cpu")
    if checkpoint:
        run.restore(checkpoint)
    run.train(500, lambda: run.progress["tokens"] >= 1e6 * millions)
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    curve = []
    for i in range(0, len(rows) - 4, 5):
        five = rows[i:i + 5]
        curve.append([five[-1]["tokens"], five[-1]["length"],
                      round(float(np.mean([row["reveal_accuracy"] for row in five])), 4)])
    return run, curve


def summary(run, curve):
    """What every record of this chapter holds."""
    progress = run.progress
    return {"seed": run.config["seed"], "steps": progress["step"], "tokens": progress["tokens"],
            "stage_reached": progress["stage"] + 1, "finished": progress["finished"],
            "minutes": round(progress["seconds"] / 60, 3),
            "parameters": sum(weight.numel() for weight in run.model.parameters()), "curve": curve}


def folder_of(options):
    return Path("runs") / "arms" / re.sub(r"[^\w.-]+", "_", "_".join(options)).strip("_-")


def place(row):
    """How early a row of the grid stands: by tokens if it passed (2,1), then by accuracy."""
    return (0, row["tokens"]) if row["finished"] else (1, -row["last_accuracy"])


def rates(args):
    """One arm over the grid. A row is finished one step after it passed (2,1)."""
    rows = []
    for optimizer, grid in GRID.items():
        for lr, matrix_lr in grid:
            options = [*ARMS[args.arm].split(), "--group", args.group, "--commands", args.commands,
                       "--optimizer", optimizer, "--lr", str(lr), "--matrix-lr", str(matrix_lr),
                       "--curriculum", "2:1,8:1", "--last-steps", "1", "--max-steps", "1000000",
                       "--seed", "100"]
            run, curve = learn(options, folder_of(options), args.millions)
            accuracy = float(np.mean([share for _, _, share in curve[-10:]]))
            row = {"arm": args.arm, "optimizer": optimizer, "lr": lr, "matrix_lr": matrix_lr,
                   "last_accuracy": round(accuracy, 4), **summary(run, curve)}
            print({key: value for key, value in row.items() if key != "curve"}, flush=True)
            rows.append(row)
            append_record(args.record, args.command, row)
    best = min(rows, key=place)
    print("best: --optimizer {optimizer} --lr {lr} --matrix-lr {matrix_lr}".format(**best))


def options_of_arm(args):
    return [*ARMS[args.arm].split(), *RATES[args.arm].split(), "--group", args.group,
            "--commands", args.commands, "--max-steps", "1000000", "--seed", str(args.seed)]


def run_arm(args):
    """One arm and seed through the curriculum, as far as its tokens carry, and its evaluation."""
    options = options_of_arm(args)
    run, curve = learn(options, folder_of(options), args.millions)
    results = evaluate_and_print(run.result.eval(), run.task, parse_stages(LENGTHS, run.task), 256)
    append_record(args.record, args.command,
                  {"arm": args.arm, "group": args.group, "commands": args.commands,
                   **summary(run, curve), "results": results})


def spacing(args):
    """The same commands with a reveal after every S of them, alone and behind the stage (2,1).

    A stage is left when it is learned; then (8,S) goes on for the steps of a last stage.
    """
    for first in ("", "2:1,"):
        for S in (1, 2, 4, 8):
            options = [*options_of_arm(args), "--curriculum", f"{first}8:{S},8:{S}"]
            run, curve = learn(options, folder_of(options), args.millions)
            results = evaluate_and_print(run.result.eval(), run.task, [(8, S), (8, 8)], 256)
            append_record(args.record, args.command,
                          {"arm": args.arm, "group": args.group, "commands": args.commands,
                           "first": first, "spacing": S, **summary(run, curve),
                           "results": results})


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m experiments.arms",
                                     description=__doc__.split("\n")[0])
    parts = {"rates": rates, "run": run_arm, "spacing": spacing}
    parser.add_argument("part", choices=parts)
    parser.add_argument("arm", nargs="?", choices=ARMS, default="linrnn")
    parser.add_argument("--group", default="S5")
    parser.add_argument("--commands", default="full", choices=["full", "swap"])
    parser.add_argument("--seed", type=number(0), default=0)
    parser.add_argument("--millions", type=number(1e-3, 1e6, float), default=30,
                        help="cap of tokens, in millions")
    parser.add_argument("--record", metavar="FILE", help="append the numbers as JSON lines")
    with user_errors(parser, argv) as args:
        train.config_of(train.make_parser().parse_args(
            ["--group", args.group, "--commands", args.commands]))  # refuses bad values
        args.record = args.record or RESULTS / f"arms_{args.part}.jsonl"
        check_record(args.record)
    args.command = f"{parser.prog} {shlex.join(argv)}"
    parts[args.part](args)


if __name__ == "__main__":
    main()
