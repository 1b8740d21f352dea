"""What must grow with the number of variables?  A recipe for any n <= 26, and a certificate.

The 2n slots and 2n reflections of scan.py do not depend on the order of the group. So a command
costs n^2 to n^3 operations, and not n!. But the wait for the first stage, (2,1), is long for large
n. data.py and train.py hold a rule without a table of cases. Where n > 7,

    width      two heads of 2n + 8 dimensions or more: a key needs 2n
    rate       --lr falls as 1 / n, since the sums of the convolution have d (n + 3) terms, and
               --matrix-lr as 1 / sqrt n; both from n = 6 on
    reveals    n // 4 variables are revealed in a row, in training
    exchanges  at S = 1 a command is a product of 1 to n exchanges, in training: some variables
               stay, the model learns to look a variable up, and then to follow those that move

    python -m experiments.scale run --group S26                      the rule, as train.py has it
    python -m experiments.scale run --group S12 --without exchanges  how long is (2,1) then?

Finding (experiments/results/scale.jsonl). S8 and S12 are solved on three seeds of three, S16, S20
and S26 on two of two: 99.7 to 100% of the reveals at (64,8), and 95.9 to 100% at (128,16). S26 has
10^24 times the states of S5 and takes nine times its tokens: they grow as n^1.4, those of (2,1) as
n^1.6. The arithmetic says n for the length of a trace. A token costs more, too, since the
convolution has d^2 (n + 3) weights. The minutes of one core grow as n^2.1: 0.7 for S5, some 25 for
S26. Swaps are cheaper, since all variables but two stay: their tokens grow as n^0.5, S26 takes 2.6
minutes, and all reveals are right at (256,32).
    S12 leaves (2,1) after 0.9 to 1.3 million tokens, three seeds. Without the reveals in a row it
takes 1.8 to 2.3. Without the exchanges it takes 4.6 on one seed, and two are still there after 5;
without all parts three are, at 9 to 21%. A command that moves all variables says nothing until both
the look-up and the move are right. If some stay, the look-up pays at once. The rates matter little
at n = 12 (1.1 on one seed).

Is it the group, where the states are too many to be listed?  eval.py --exhaustive gives every
command from every state, which ends at S6. S12 has 479 million states. But a group is known by a
few generators, and states can be drawn. So here each generator is given from random states, and
every variable is asked for:

    python -m experiments.scale certify RUN --states 256 --depth 16

The random states are the samples. If N of N states pass with all generators, then with 95%
confidence a fresh state passes with a probability of at least N / (N + 3.84), Wilson's bound: 98.5%
for 256 states. The depth is the number of random commands ahead of each state.

It does not prove that every state passes, nor any at another depth: a linear recurrence drifts. And
the share of the states that were visited is nothing: 6,656 of 4 * 10^26 for S26.

Finding (experiments/results/certify.jsonl). On five seeds of S5 all of 256 states pass after 16 and
after 64 commands, the length of training. After 256 commands 248, 252, 199, 251 and 250 pass: there
the networks have begun to drift. The swaps of S5, S3, A5, Z7, D6 and S3xS4 pass after 16. So do two
seeds of S8, and S12 with 256 and 252 states. S20 has 158 (one seed), and S26 none of 256 on both
seeds: it follows random commands, of which one variable in 26 stays, and has lost those where 24
stay. These were in its first stages only. If all stages have them, 243 of 256 pass, and random
commands suffer: 97.7% at (64,8), 75% at (128,16), after 34.5 million tokens (one seed, no record).
Trained on swaps, S8, S12 and S26 pass with every exchange of two variables, two seeds each: 64 of
64 states of S26, with all of its 325 exchanges.

Next: inside.py.
"""

import argparse
import json
import shlex
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import train
from data import (TASKS, Batch, ReplTask, draw_commands, generator, number, parse_stages,
                  run_commands, user_errors)
from eval import append_record, check_record, evaluate_and_print, wilson
from experiments.arms import RATES, folder_of, learn, summary
from experiments.heads import ask_all, load_repl_run
from experiments.pairs import run_part
from models import choose_device

RESULTS = Path(__file__).parent / "results"
PARTS = ["width", "rate", "reveals", "exchanges"]  # of the rule
LENGTHS = "64:8,128:16,256:32"


# --- The rule, and the rule without one of its parts ----------------------------------------------

class AblatedTask(ReplTask):
    """ReplTask whose training lacks the reveals in a row, or the exchanges, or both."""

    def __init__(self, group, commands="full", reveals=True, exchanges=True):
        super().__init__(group, commands)
        self.reveals, self.exchanges = reveals, exchanges

    def training_batch(self, batch, length, spacing, rng):
        n, shape = self.group.degree, (batch, length)
        commands = draw_commands(self.group, "full", shape, rng)
        if self.exchanges and spacing == 1:
            words = run_commands(draw_commands(self.group, "swap", (batch * length, n), rng))
            last = rng.integers(n, size=(batch * length, 1, 1))
            commands = np.take_along_axis(words, last, 1).reshape(commands.shape)
        asked = rng.integers(n, size=(batch, length // spacing, n // 4 if self.reveals else 1))
        tokens, reveals = self.write(commands, asked)
        return Batch(tokens[:, :-1], tokens[:, 1:], reveals[:, 1:])


TASKS["ablated"] = AblatedTask


def run(argv):
    """One run with the rule of train.py, or without a part of it, as far as its tokens carry."""
    parser = argparse.ArgumentParser(prog="python -m experiments.scale run")
    add = parser.add_argument
    add("--group", default="S12")
    add("--commands", default="full", choices=["full", "swap"])
    add("--model", default="linrnn", choices=["linrnn", "lstm", "transformer"])
    add("--without", default="none", choices=["none", *PARTS, "all"], help="a part of the rule")
    add("--curriculum", default=ReplTask.default_curriculum)
    add("--seed", type=number(0), default=0)
    add("--millions", type=number(1e-3, 1e6, float), default=60, help="cap of tokens, in millions")
    add("--record", metavar="FILE", default=RESULTS / "scale.jsonl")
    with user_errors(parser, argv) as args:
        options = ["--model", args.model, "--group", args.group, "--commands", args.commands,
                   "--curriculum", args.curriculum, "--max-steps", "1000000",
                   "--seed", str(args.seed)]
        without = PARTS if args.without == "all" else [args.without]
        if args.model != "linrnn":
            options += RATES[args.model].split()
        plain = train.config_of(train.make_parser().parse_args(options))[1]  # refuses bad values
        if args.without != "none":
            if plain.group.degree < 8 or args.commands != "full" or set(args.group) & set("AZDx"):
                raise ValueError("the rule has parts for full commands of S8 to S26 only; got "
                                 f"{args.commands} commands of {args.group}")
            options += ["--format", "ablated", "--reveals", str(int("reveals" not in without)),
                        "--exchanges", str(int("exchanges" not in without))]
            options += ["--d-model", "64", "--heads", "4"] * ("width" in without)
            options += ["--lr", "4e-3", "--matrix-lr", "0.02"] * ("rate" in without)
        check_record(args.record)
    made, curve = learn(options, folder_of(options), args.millions, make_parser())
    lengths = parse_stages(LENGTHS, plain)
    results = evaluate_and_print(made.result.eval(), made.task, lengths, 256)
    append_record(args.record, f"{parser.prog} {shlex.join(argv)}", {
        "group": args.group, "commands": args.commands, "model": args.model,
        "without": args.without, "options": made.config["options"], "lr": made.config["lr"],
        "matrix_lr": made.config["matrix_lr"], **summary(made, curve), "results": results})


def make_parser():
    """train.py's, and which parts of the training batches are there."""
    parser = train.make_parser()
    parser.add_argument("--reveals", type=number(0, 1), default=1)
    parser.add_argument("--exchanges", type=number(0, 1), default=1)
    parser.set_defaults(chapter="experiments.scale")
    return parser


# --- The certificate ------------------------------------------------------------------------------

def generators(task):
    """Commands that generate the group: swaps of neighbours, 3-cycles, a rotation, a flip: [., n].

    S<n> is generated by the exchanges of i and i + 1, A<n> by the cycles of i, i + 1 and i + 2,
    Z<n> by one rotation, D<n> by that and a flip; a product by the generators of its factors.
    """
    if task.commands == "swap":
        return task.alphabet
    group, found = task.group, []
    for (kind, n), offset in zip(group.factors, group.offsets):
        points = np.arange(n)
        cycles = {"S": 2, "A": 3}.get(kind)
        if cycles:
            moves = [np.r_[points[:i], np.roll(points[i:i + cycles], -1), points[i + cycles:]]
                     for i in range(n - cycles + 1)]
        else:
            moves = [np.roll(points, -1), points[::-1]][:1 + (kind == "D")]
        for move in moves:
            found.append(np.arange(group.degree))
            found[-1][offset:offset + n] = move + offset
    return np.array(found)


@torch.no_grad()
def certify(model, task, states, depth, rng, device="cpu"):
    """Each generator from random states, each variable asked for, from the same place of a trace.

    Returns right, bool [states, generators], and the number of different states that were visited.
    """
    commands = draw_commands(task.group, task.commands, (states, depth), rng)
    start = np.tile(task.start_tokens(), (states, 1))
    lines = [task.command_tokens(commands[:, t]) for t in range(depth)]
    _, before = model.stream(torch.from_numpy(np.hstack([start, *lines])).to(device))
    perms = np.tile(np.arange(task.group.degree), (states, 1))
    for t in range(depth):
        perms = np.take_along_axis(perms, commands[:, t], -1)
    visited, right = {*map(bytes, perms.astype(np.uint8))}, []
    for command in tqdm(generators(task), leave=False):
        line = np.tile(task.command_tokens(command), (states, 1))
        _, after = model.stream(torch.from_numpy(line).to(device), before)
        expected = perms[:, command]
        right.append((ask_all(model, task, after, states, device) == expected).all(1))
        visited |= {*map(bytes, expected.astype(np.uint8))}
    return np.stack(right, 1), len(visited)


def certify_run(argv):
    """The certificate of a run folder."""
    parser = argparse.ArgumentParser(prog="python -m experiments.scale certify")
    add = parser.add_argument
    add("run", help="a run folder, made by train.py")
    add("--states", type=number(1, 10**5), default=256, help="random states, each a fresh trace")
    add("--depth", type=number(1, 10**5), default=16, help="random commands ahead of each state")
    add("--seed", type=number(0), default=0, help="of the states")
    add("--record", metavar="FILE", help="append the numbers as one JSON line")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    with user_errors(parser, argv) as args:
        device = choose_device(args.device)
        checkpoint, task, model = load_repl_run(args.run, device)
        if args.states * args.depth > 2**20:
            raise ValueError(f"{args.states:,} traces of {args.depth:,} commands are too many to "
                             f"be read at once: at most {2**20:,} commands in all")
        if args.record:
            check_record(args.record)
    begin = time.monotonic()
    rng = generator(args.seed, "test", args.depth, args.depth)
    right, visited = certify(model, task, args.states, args.depth, rng, device)
    passed = int(right.all(1).sum())
    low, high = wilson(passed, args.states)
    print(f"{task.group.name}: {passed} of {args.states} random states after {args.depth} commands "
          f"pass with all {right.shape[1]} generators (95%: {low:.2%} to {high:.2%}); "
          f"{right.sum():,} of {right.size:,} pairs right; {visited:,} of {task.group.order:,} "
          "states visited")
    if args.record:
        with user_errors(parser, argv):
            append_record(args.record, f"{parser.prog} {shlex.join(argv)}", {
                "seed": checkpoint["config"]["seed"], "config": checkpoint["config"],
                "states": args.states, "depth": args.depth, "generators": right.shape[1],
                "passed": passed, "low": low, "pairs": right.size, "right": int(right.sum()),
                "visited": visited, "minutes": (time.monotonic() - begin) / 60, "device": device})


def main(argv=None):
    run_part("experiments.scale", {"run": run, "certify": certify_run}, argv)


if __name__ == "__main__":
    main()
