"""Learned or memorised?  Commands that training never shows, and states that no list can hold.

    python -m experiments.unseen            the table, and the certificates
    python -m experiments.unseen --run      trains what is missing, a minute a run on one core
    python -m experiments.unseen certify RUN --states 256 --depth 16

Training traces are made of some of the 120 commands of S5, test traces of all the others. A
certificate gives each of a few commands that generate the whole group, from random states, and asks
for every variable. If all of 256 states pass, a fresh one passes with a probability of at least
98.5% (Wilson's bound, 95% confidence). That says nothing of another depth, the number of random
commands ahead of a state: a linear recurrence drifts.

Finding. With 108 or 60 commands seen in training, each unseen command is right from each state, on
5 of 5 and on 3 of 3 seeds; along traces of them errors add up, the sooner the fewer were seen. With
12 or 5 the network knows the commands by heart. From S5 to S26 at least 247 of 256 states pass, but
none of S26 unless training rehearses exchanges of two variables (data.rule_for).

Next: snap.py.
"""

import argparse

import numpy as np
import torch

from data import (Group, ReplTask, UserError, draw_commands, generator, next_tokens, number,
                  one_line_errors, parse, run, run_commands, try_stages)
from eval import device_of, evaluate_and_print, exhaustive, load_run, wilson
from experiments import record, records, train_arm
from models import LinRNN, choose_device
from train import Recipe

GROUP = "S5"
SEEDS = {108: 5, 60: 3, 30: 3, 12: 2, 5: 2}  # commands seen in training: how many seeds
LENGTHS = [(64, 8), (128, 16), (256, 32)]


# --- 1. Unseen commands ---------------------------------------------------------------------------

class UnseenTask(ReplTask):
    """REPL traces: `seen` of the commands in training, all others in the test."""

    def __init__(self, group, seen):
        super().__init__(group)
        # The same commands for each seed of a run.
        mixed = self.alphabet[generator(0, "split").permutation(len(self.alphabet))]
        self.seen = mixed[:seen]
        self.unseen = mixed[seen:]

    def batch_of(self, alphabet, batch, length, spacing, rng):
        """A Batch of traces whose commands are uniform over this alphabet."""
        self.check(length, spacing)
        commands = alphabet[rng.integers(len(alphabet), size=(batch, length))]
        asked = rng.integers(self.group.degree, size=(batch, length // spacing))
        return next_tokens(*self.write(commands, asked))

    def training_batch(self, batch, length, spacing, rng):
        return self.batch_of(self.seen, batch, length, spacing, rng)

    def test_batch(self, batch, length, spacing, rng):
        return self.batch_of(self.unseen, batch, length, spacing, rng)


def train_missing():
    """Train each cell that has no record, and read it on unseen commands.

    `exhaustive` gives all commands from all states. The pairs with an unseen command are new.
    """
    for seen, seeds in SEEDS.items():
        for seed in range(seeds):
            task = UnseenTask(Group(GROUP), seen)
            made = train_arm("unseen", {"seen": seen, "seed": seed},
                             lambda: LinRNN(len(task.vocab), **task.model_options), task,
                             Recipe(**task.recipe_options, seed=seed))
            if made is None:
                continue

            model, summary = made
            results = evaluate_and_print(model, task, LENGTHS)
            _, failures = exhaustive(model, task)
            new = len(task.unseen) * task.group.order
            commands = {tuple(command) for command in task.unseen}
            wrong = sum(tuple(command) in commands for _, command, _, _ in failures)
            record("unseen", {"kind": "unseen", "seen": seen, **summary, "results": results,
                              "exhaustive": {"unseen": new, "unseen_right": new - wrong}})


# --- 2. The certificate by generators -------------------------------------------------------------

def generators(task):
    """Commands that generate the group: [generators, n].

    A product has the generators of its factors. Of swap commands, all are taken.
    """
    if task.commands == "swap":
        return task.alphabet

    found = []
    for (letter, n), offset in zip(task.group.factors, task.group.offsets):
        points = np.arange(n)
        if letter in "SA":
            # S<n>: the exchanges of neighbours. A<n>: the cycles of three neighbours.
            width = 2 if letter == "S" else 3
            moves = np.tile(points, (n - width + 1, 1))
            for first, move in enumerate(moves):
                move[first:first + width] = np.roll(move[first:first + width], -1)
        elif letter == "Z":
            moves = [np.roll(points, -1)]
        elif letter == "D":
            moves = [np.roll(points, -1), points[::-1]]
        else:
            moves = Group(f"{letter}{n}").elements  # a family of one's own: every element

        for move in moves:
            command = np.arange(task.group.degree)
            command[offset:offset + n] = move + offset
            found.append(command)
    return np.array(found)


@torch.no_grad()
def certify(model, task, states, depth, rng):
    """Give each generator from random states, and ask for every variable after it.

    states: how many, each reached in a trace of its own; depth: by how many random commands.
    -> right, bool [states, generators]: all variables as they must be.
    """
    device = device_of(model)
    commands = draw_commands(task.group, task.commands, (states, depth), rng)
    start = np.tile(task.start_tokens(), (states, 1))
    lines = task.command_tokens(commands).reshape(states, -1)
    _, before = model.stream(torch.from_numpy(np.hstack([start, lines])).to(device))
    perms = run_commands(commands)[:, -1]

    # Each question starts from the same state, so none tells the model anything about another.
    values = torch.from_numpy(task.value_tokens).to(device)
    right = []
    for command in generators(task):
        line = np.tile(task.command_tokens(command), (states, 1))
        _, after = model.stream(torch.from_numpy(line).to(device), before)
        passed = np.ones(states, bool)
        for variable in range(task.group.degree):
            asked = np.full(states, variable)
            question = task.reveal_tokens(asked, asked)[:, :-2]  # the value is left out
            logits, _ = model.stream(torch.from_numpy(question).to(device), after)
            answers = logits[:, -1, values].argmax(-1).cpu().numpy()
            passed &= answers == perms[:, command[variable]]
        right.append(passed)
    return np.stack(right, 1)


def certify_run(args):
    """Print the certificate of a run folder."""
    checkpoint, task, model = load_run(args.run_folder, choose_device(args.device))
    if not isinstance(task, ReplTask):
        raise UserError(f"the certificate is for REPL traces; the run in {args.run_folder} was "
                        f"trained on the format {checkpoint['config']['format']}")
    # The traces are read at once, not in pieces.
    try_stages(task, [(args.depth, args.depth)], args.states, most=2**20)

    rng = generator(args.seed, "test", args.depth, args.depth)
    right = certify(model, task, args.states, args.depth, rng)
    passed = int(right.all(1).sum())
    low, high = wilson(passed, args.states)
    print(f"{task.group.name}: {passed} of {args.states} random states after {args.depth} commands "
          f"pass with all {right.shape[1]} generators (95%: {low:.2%} to {high:.2%})")

    if args.record:
        record("unseen", {
            "kind": "certificate", "group": task.group.name, "commands": task.commands,
            "seed": checkpoint["config"]["seed"], "states": args.states, "depth": args.depth,
            "generators": right.shape[1], "passed": passed, "run": str(args.run_folder)})


# --- 3. What the records say ----------------------------------------------------------------------

def show():
    """Both tables, from results/unseen.jsonl."""
    print(f"{GROUP}: `seen` commands in training, all others in the test\n")
    print("seen  seed   unseen commands right from     right in traces of unseen commands")
    print("                        all states             (64,8)  (128,16)  (256,32)")
    for row in records("unseen", kind="unseen"):
        found = row["exhaustive"]
        pairs = f"{found['unseen_right']:,} of {found['unseen']:,}"
        shares = "".join(f"{result['all']:10.1%}" for result in row["results"])
        print(f"{row['seen']:4}  {row['seed']:4}   {pairs:>20}        {shares}")

    certificates = {}
    for row in records("unseen", kind="certificate"):
        key = (row["group"], row["commands"], row.get("without", "-"), row["depth"],
               row["generators"], row["states"])
        certificates.setdefault(key, []).append(str(row["passed"]))

    print("\nstates that pass with all generators, by seed\n"
          "without: a part of data.rule_for (see scale.py)\n")
    print("group  commands  without     depth  generators  states  passed")
    for (group, commands, without, depth, count, states), passed in certificates.items():
        print(f"{group:5}  {commands:8}  {without:10}  {depth:5}  {count:10}  {states:6}  "
              f"{' '.join(passed)}")


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.unseen",
                                     description=__doc__.split("\n")[0])
    parser.add_argument("--run", action="store_true",
                        help="first train what is missing, a minute a run on one core")
    parts = parser.add_subparsers(dest="part", metavar="certify")
    certificate = parts.add_parser("certify", help="the certificate of a run folder")
    add = certificate.add_argument
    add("run_folder", metavar="RUN", help="a run folder, made by train.py")
    add("--states", type=number(1, 10**5), default=256, help="random states, each a fresh trace")
    add("--depth", type=number(1, 10**5), default=16, help="random commands ahead of each state")
    add("--seed", type=number(0), default=0, help="of the states")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--record", action="store_true", help="add the row to experiments/results/unseen.jsonl")
    args = parse(parser, argv)

    if args.part == "certify":
        with one_line_errors(certificate):
            certify_run(args)
        return
    if args.run:
        train_missing()
    show()


if __name__ == "__main__":
    run(main)
