"""Learned or memorised?  The model is tested on pairs of commands that it never met in training.

A tenth of all ordered pairs (g, h) of consecutive commands is held out. No training trace contains
one of these pairs, and in a test trace every two consecutive commands are one of them.

    python -m experiments.pairs train --hold-out-pairs 0.1
    python -m experiments.pairs eval RUN

Finding (experiments/results/pairs.jsonl, S5, default recipe, seeds 0 to 2). All three models answer
100% of the reveals at (64,8) and at (128,16), and 99.7 to 99.9% at (256,32). So none of them has
learned pairs by heart. The records were made at commit 94952b2 by `python train.py --model linrnn
--group S5 --hold-out-pairs 0.1 --seed 0`.

The test is weak. A model that has learned what each single command does to a state passes it, and
each single command still occurs in training, after 108 of the 120 commands of S5.

This is also the smallest chapter with a task of its own. Its second half is the command line that
such chapters share.

Next: automata.py, beliefs.py.
"""

import argparse
import json
import shlex
import sys

import numpy as np

import train
from data import TASKS, Batch, ReplTask, generator, number, parse_stages, user_errors
from eval import append_record, check_record, evaluate_and_print, load_run
from models import choose_device


# --- The task -------------------------------------------------------------------------------------

class PairSplit:
    """Splits the ordered pairs of N commands into pairs for training and held-out pairs.

    The pair (g, h) is held out if (a[g] + b[h]) mod N < share N. Here a and b are two random
    numberings of the commands. Each command keeps the same number of successors and the same number
    of predecessors, so all commands remain equally frequent. The split does not depend on the seed
    of a run.

    Shapes: alphabet [N, n].
    Raises: ValueError unless some, and not all, of the pairs are held out.
    """

    def __init__(self, alphabet, share):
        self.alphabet, count = alphabet, len(alphabet)
        self.cut = round(share * count) if 0 < share < 1 else 0
        if not 0 < self.cut < count:
            raise ValueError(f"the held-out share of the {count} successors of each command must "
                             f"leave at least one on either side; got {share}")
        rng = generator(0, "split")
        self.a, self.b = rng.permutation(count), rng.permutation(count)
        self.command_at = self.b.argsort()  # the command h with a given b[h]

    def draw(self, shape, rng, held_out):
        """Random commands of which every consecutive pair is held out, or none: [B, L, n]."""
        (batch, length), count = shape, len(self.alphabet)
        low, high = (0, self.cut) if held_out else (self.cut, count)
        sums = rng.integers(low, high, size=(batch, length))
        numbers = np.empty((batch, length), int)
        numbers[:, 0] = rng.integers(count, size=batch)
        for t in range(1, length):
            numbers[:, t] = self.command_at[(sums[:, t] - self.a[numbers[:, t - 1]]) % count]
        return self.alphabet[numbers]


class PairTask(ReplTask):
    """REPL traces: the held-out pairs are missing in training and are all that a test contains.

    Raises: ValueError as PairSplit, or if the group is too large to list its elements.
    """

    def __init__(self, group, commands="full", hold_out_pairs=0.1):
        super().__init__(group, commands)
        self.pairs = PairSplit(self.alphabet, hold_out_pairs)

    def sample(self, batch, length, spacing, rng, held_out=False):
        """As ReplTask.sample, with training pairs only, or with held-out pairs only."""
        self.check(length, spacing)
        commands = self.pairs.draw((batch, length), rng, held_out)
        asked = rng.integers(self.group.degree, size=(batch, length // spacing))
        return self.write(commands, asked)

    def training_batch(self, batch, length, spacing, rng):
        return super().test_batch(batch, length, spacing, rng)

    def test_batch(self, batch, length, spacing, rng):
        tokens, reveals = self.sample(batch, length, spacing, rng, held_out=True)
        return Batch(tokens[:, :-1], tokens[:, 1:], reveals[:, 1:])


TASKS["pairs"] = PairTask


# --- The command line of a chapter with a task of its own -----------------------------------------

def run_part(chapter, parts, argv):
    """python -m CHAPTER PART OPTIONS: hands the options to the function of that part."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog=f"python -m {chapter}")
    parser.add_argument("part", choices=parts, help="--help behind it shows its options")
    parts[parser.parse_args(argv[:1]).part](argv[1:])


def train_run(chapter, task_format, parser, argv):
    """train.py for a task of a chapter. parser: train.make_parser() with the flags of the task."""
    parser.prog = f"python -m {chapter} train"
    parser.set_defaults(format=task_format, chapter=chapter)
    asked = parser.parse_args(argv).format
    if asked != task_format:
        parser.error(f"{chapter} trains --format {task_format} only; got {asked}")
    train.main(argv, parser)


def make_eval_parser(chapter):
    parser = argparse.ArgumentParser(prog=f"python -m {chapter} eval",
                                     description="How far does a trained model track?")
    add = parser.add_argument
    add("run", help="a run folder, made by the part train")
    add("--lengths", help="LENGTH:SPACING,... (default: the format's own)")
    add("--traces", type=number(1, 10**5), default=256, help="fresh traces for each length")
    add("--seed", type=number(0), default=0, help="of the traces, never those of training")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--record", metavar="FILE", help="append the numbers as one JSON line")
    add("--json", action="store_true", help="print the numbers as one JSON line at the end")
    return parser


def eval_run(task_format, parser, argv, prepare=lambda task, args: {}):
    """The table of eval.py for a run of a chapter.

    prepare(task, args) hands the chapter's own flags to the task. It returns what a record should
    tell about them, and raises ValueError for bad values.
    """
    with user_errors(parser, argv) as args:
        device = choose_device(args.device)
        checkpoint, task, model = load_run(args.run, device)
        config = checkpoint["config"]
        if config["format"] != task_format:
            raise ValueError(f"{args.run} holds a run of the format {config['format']}, "
                             f"not {task_format}")
        settings = prepare(task, args)
        lengths = parse_stages(args.lengths or task.default_lengths, task, args.traces)
        if args.record:
            check_record(args.record)
    results = evaluate_and_print(model, task, lengths, args.traces, args.seed, device)
    numbers = {"config": config, **settings, "results": results}
    if args.json:
        print(json.dumps(numbers))
    if args.record:
        with user_errors(parser, argv):
            append_record(args.record, f"{parser.prog} {shlex.join(argv)}",
                          {"seed": config["seed"], **numbers, "device": device})


def train_pairs(argv):
    parser = train.make_parser()
    parser.add_argument("--hold-out-pairs", type=float, default=0.1, metavar="SHARE",
                        help="share of the pairs of consecutive commands kept for the test")
    train_run("experiments.pairs", "pairs", parser, argv)


def eval_pairs(argv):
    eval_run("pairs", make_eval_parser("experiments.pairs"), argv)


def main(argv=None):
    run_part("experiments.pairs", {"train": train_pairs, "eval": eval_pairs}, argv)


if __name__ == "__main__":
    main()
