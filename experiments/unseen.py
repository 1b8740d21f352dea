"""Learned the commands, or learned to read them?  The test has commands that training never shows.

Training traces are made of some of the commands only, test traces of the others only. So every
command of a test trace is new to the model: its names are known, their order on the right-hand side
is not. pairs.py holds out less, pairs of commands that are each seen in training.

Finding (experiments/results/unseen.jsonl: S5, the default recipe; five seeds for 108, three for 60
and 30, two for 12 and 5). New pairs are those of a state and a command that training never shows.
    seen   new pairs right           right at (64,8) and (128,16), new commands only, by seed
    108    all, on 5 of 5 seeds      100 100 99.7 100 100%   100 100 94.5 99.8 99.7%
    60     all, on 3 of 3 seeds      91.0 99.9 77.3%       69.8 97.0 53.6%
    30     100.0 90.5 100.0%         61.2 44.1 75.4%       41.2 30.9 48.7%
    12     6.6 20.0%                 chance
    5      0.2 3.4%                  chance
So the network reads a command name by name, from some thirty seen commands on. With fewer it knows
the commands by heart. What fewer commands do not teach is precision, which long traces need.

    python -m experiments.unseen train --seen 60
    python -m experiments.unseen eval RUN
    python -m experiments.unseen study          # seen 108, 60, 30, 12 on three seeds each

Next: automata.py.
"""

import argparse
import shlex
from pathlib import Path

import train
from data import TASKS, Batch, ReplTask, generator, number, user_errors
from eval import append_record, check_record, evaluate_and_print, exhaustive, load_run
from experiments.pairs import eval_run, make_eval_parser, run_part, train_run

RESULTS = Path(__file__).parent / "results"


class UnseenTask(ReplTask):
    """REPL traces: `seen` of the commands in training, all others in the test.

    Which commands are seen depends on the group and on `seen`, not on the seed of a run.
    Raises: ValueError unless some command is seen and some is not, and the seen ones reach every
    state of the group.
    """

    def __init__(self, group, commands="full", seen=108):
        super().__init__(group, commands)
        count = len(self.alphabet)
        if not 0 < seen < count:
            raise ValueError(f"of the {count} commands at least one must be seen in training and "
                             f"one not; got {seen}")
        mixed = self.alphabet[generator(0, "split").permutation(count)]
        self.seen, self.unseen = mixed[:seen], mixed[seen:]
        reached = len(group.shortest_words(self.seen))
        if reached < group.order:
            raise ValueError(f"the {seen} seen commands reach {reached} of the {group.order} "
                             f"states of {group.name} only: more must be seen")

    def batch_of(self, alphabet, batch, length, spacing, rng):
        """A Batch of traces whose commands are uniform over this alphabet."""
        self.check(length, spacing)
        commands = alphabet[rng.integers(len(alphabet), size=(batch, length))]
        asked = rng.integers(self.group.degree, size=(batch, length // spacing))
        tokens, reveals = self.write(commands, asked)
        return Batch(tokens[:, :-1], tokens[:, 1:], reveals[:, 1:])

    def training_batch(self, batch, length, spacing, rng):
        return self.batch_of(self.seen, batch, length, spacing, rng)

    def test_batch(self, batch, length, spacing, rng):
        return self.batch_of(self.unseen, batch, length, spacing, rng)


TASKS["unseen"] = UnseenTask


def make_parser():
    parser = train.make_parser()
    parser.add_argument("--seen", type=number(0), default=108, help="commands that training shows")
    return parser


def train_unseen(argv):
    train_run("experiments.unseen", "unseen", make_parser(), argv)


def eval_unseen(argv):
    eval_run("unseen", make_eval_parser("experiments.unseen"), argv)


def numbers(text):
    return [number(0)(part) for part in text.split(",")]


def study(argv):
    """Trains every cell, reads it on unseen commands and through the certificate, and records it.

    The certificate asks for all 120 commands from all 120 states, seen and unseen.
    """
    parser = argparse.ArgumentParser(prog="python -m experiments.unseen study")
    add = parser.add_argument
    add("--counts", type=numbers, default="108,60,30,12", help="commands seen, by comma")
    add("--seeds", type=numbers, default="0,1,2", help="by comma")
    add("--record", default=RESULTS / "unseen.jsonl", metavar="FILE")
    with user_errors(parser, argv) as args:
        check_record(args.record)
    for seen in args.counts:
        for seed in args.seeds:
            folder = Path("runs") / f"unseen-{seen}-seed{seed}"
            train_unseen(["--seen", str(seen), "--seed", str(seed), "--traces", "1", "--out",
                          str(folder), "--resume"])  # a run that is done is only read
            checkpoint, task, model = load_run(folder)
            results = evaluate_and_print(model, task, [(64, 8), (128, 16), (256, 32)], 256)
            pairs, failures = exhaustive(model, task)
            new = {tuple(command + 1) for command in task.unseen}
            wrong_new = sum(tuple(command) in new for _, command, _, _ in failures)
            append_record(args.record, f"{parser.prog} {shlex.join(argv)}".strip(), {
                "seen": seen, "seed": seed, "steps": checkpoint["progress"]["step"],
                "minutes": round(checkpoint["progress"]["seconds"] / 60, 3), "results": results,
                "exhaustive": {"pairs": pairs, "right": pairs - len(failures),
                               "unseen": len(task.unseen) * task.group.order,
                               "unseen_right": len(task.unseen) * task.group.order - wrong_new}})


def main(argv=None):
    run_part("experiments.unseen", {"train": train_unseen, "eval": eval_unseen, "study": study},
             argv)


if __name__ == "__main__":
    main()
