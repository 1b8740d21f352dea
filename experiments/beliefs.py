"""What can be known if commands are uncertain?  A belief, and with it the best prediction.

    >>> if random() < 0.25: a, b = b, a         new = old[g] with probability 1/4, else new = old
    ...                                         an empty line ends the command, as in any session

The reader sees the coin, but not how the coin fell. What remains is a belief, a distribution over
states. The exact filter computes the belief by Bayes' rule. The belief gives the best prediction of
each reveal, and eval.py measures a model against that prediction (columns bayes, kl, excess).

    python -m experiments.beliefs show
    python -m experiments.beliefs train --group S3 --commands swap --uncertain 0.25
    python -m experiments.beliefs eval RUN --schedule adversarial

The filter is exact: it agrees with the enumeration of all ways in which the coins can fall
(tests/experiments/test_beliefs.py). How close trained models come to it is the next chapter's
question. Earlier records of this chapter compared arms that were under-trained, in unequal frames;
they are gone.

Source: the adversarial schedule is the cycle of Siems et al. 2026 (arXiv 2602.14814), figure 10.

Next: adversary.py.
"""

import argparse
import string
from functools import cached_property
from typing import NamedTuple

import numpy as np

import train
from data import (COMMANDS, TASKS, Batch, Group, ReplTask, draw_commands, generator, number,
                  user_errors)
from experiments.automata import PFSA
from experiments.pairs import eval_run, make_eval_parser, run_part, train_run

COINS = [0.25, 0.5, 0.75]  # the probabilities that an uncertain command may show
SCHEDULES = ["random", "periodic", "adversarial"]  # which variables are revealed
MAX_STATES = 120  # of the exact filter: S5. S6 would have 720, and 36 times the work at each step


# --- The task -------------------------------------------------------------------------------------

class Program(NamedTuple):
    """The random choices behind traces. All traces have equally many uncertain commands."""
    commands: np.ndarray  # [B, L, n]
    asked: np.ndarray  # [B, L/S] the variable of each reveal
    probability: np.ndarray  # [B, L] that a command is executed; 1 shows no coin, 0 no line
    executed: np.ndarray  # bool [B, L] how the coins fell, which no reader is told


def check_share(share):
    """Raises: ValueError unless the share of uncertain commands lies between 0 and 1."""
    if not 0 <= share <= 1:
        raise ValueError("uncertain is the share of the commands behind a coin, "
                         f"between 0 and 1; got {share}")


class CoinTask(ReplTask):
    """REPL traces in which a share of the commands stands behind `if random() < p: `.

    uncertain is that share, not the probability p of a coin. Each p is uniform over COINS. A coin
    adds four tokens to its command. One trace mixes certain and uncertain commands.

    schedule and share change what test_batch draws. A share of None is that of the training.

    Raises: ValueError for a share outside [0, 1], over 120 states, or swaps of a group without any.
    """

    # A colon belongs to the number before it.
    more_symbols = ["from random import random", "if random() < ", "... ",
                    *(f"{coin}: " for coin in COINS)]

    def __init__(self, group, commands="full", uncertain=0.25):
        check_share(uncertain)
        if group.order > MAX_STATES:
            raise ValueError(
                f"the exact filter of {group.name} would keep {group.order:,} probabilities for a "
                f"trace and touch {group.order**2:,} at each command: refused above {MAX_STATES} "
                "states (S5)")
        super().__init__(group, commands)
        self.uncertain, self.schedule, self.share = uncertain, "random", None
        self._coin = np.array([self._id[f"{coin}: "] for coin in COINS])

    def model_defaults(self):
        """conv_width: the local block sees a whole command of 2n + 3 tokens."""
        return {"conv_width": 2 * self.group.degree + 3}

    def draw(self, batch, length, spacing, rng, schedule="random", share=None):
        """The choices behind a batch of traces: a Program.

        Every trace has the same number of uncertain commands, share L rounded up or down at random.
        So all traces have the same number of tokens. The variables revealed are
            random       each one uniform
            periodic     a, b, c, a, b, c, ...
            adversarial  always the same x. After S certain commands all others are
                         `if random() < 0.5: x, y = y, x`, and the coin never lets it happen. The
                         true belief is the same after each reveal.
        """
        self.check(length, spacing)
        n, count = self.group.degree, length // spacing
        commands = draw_commands(self.group, self.commands, (batch, length), rng)
        asked = rng.integers(n, size=(batch, count))
        probability, executed = np.ones((batch, length)), np.ones((batch, length), bool)
        share = self.uncertain if share is None else share
        if schedule == "periodic":
            asked = np.tile(np.arange(count) % n, (batch, 1))
        if schedule == "adversarial":
            swaps = self.group.transpositions
            swap = swaps[rng.integers(len(swaps), size=batch)]
            commands[:, spacing:] = swap[:, None]
            asked[:] = (swap != np.arange(n)).argmax(1)[:, None]
            probability[:, spacing:], executed[:, spacing:] = 0.5, False
        elif share:
            behind_coins = int(share * length + rng.random())
            places = rng.random((batch, length)).argsort(1) < behind_coins
            probability = np.where(places, rng.choice(COINS, (batch, length)), probability)
            executed = rng.random((batch, length)) < probability
        return Program(commands, asked, probability, executed)

    def program_answers(self, program):
        """The revealed values, from 0: [B, L/S]."""
        stays = np.arange(self.group.degree)
        happened = np.where(program.executed[..., None], program.commands, stays)
        return self.answers(happened, program.asked)

    def start_tokens(self):
        """`>>> from random import random`, then a line for each variable: [3 + 5n]."""
        coins = self._line((), ">>> ", "from random import random", "\n")
        return np.concatenate([coins, super().start_tokens()])

    def behind_coins(self, lines, probability):
        """`>>> if random() < 0.5: a, b = b, a`, and `... ` under it. -1 stands for no token.

        A certain command (probability 1) shows no coin, and one of probability 0 does not show.

        Shapes: lines [B, L, W], probability [B, L] -> [B, L, W + 4].
        """
        coin = self._coin[np.searchsorted(COINS, np.minimum(probability, COINS[-1]))]
        before = self._line(coin.shape, ">>> ", "if random() < ", coin)
        after = self._line(coin.shape, "... ", "\n")
        tokens = np.concatenate([before, lines[..., 1:], after], -1)
        added = [1, 2, -2, -1]
        tokens[..., added] = np.where(probability[..., None] < 1, tokens[..., added], -1)
        tokens[probability == 0] = -1
        return tokens

    def write_program(self, program):
        """The traces of a program: tokens [B, T], reveals [B, T]."""
        lines = self.behind_coins(self.command_tokens(program.commands), program.probability)
        tokens, reveals = self.assemble(lines, program.asked, self.program_answers(program))
        kept = tokens >= 0
        return tokens[kept].reshape(len(tokens), -1), reveals[kept].reshape(len(tokens), -1)

    def sample(self, batch, length, spacing, rng):
        return self.write_program(self.draw(batch, length, spacing, rng))

    def training_batch(self, batch, length, spacing, rng):
        return self.batch_of(self.draw(batch, length, spacing, rng))

    def test_batch(self, batch, length, spacing, rng):
        return self.batch_of(self.draw(batch, length, spacing, rng, self.schedule, self.share))

    def batch_of(self, program):
        """A Batch whose `best` is the filter's prediction; no other symbol can be revealed."""
        tokens, reveals = self.write_program(program)
        best = np.zeros((*program.asked.shape, len(self.vocab)))
        best[..., self.value_tokens] = self.best_predictions(program)
        return Batch(tokens[:, :-1], tokens[:, 1:], reveals[:, 1:], best)

    @cached_property
    def automaton(self):
        """These traces as a PFSA: states are the group's elements, symbols are lines.

        A command of number g and coin number c (the last: certain) is symbol g (coins + 1) + c. The
        reveals follow, variable by variable.
        """
        group, n, probabilities = self.group, self.group.degree, [*COINS, 1.0]
        everyone, stays = np.arange(group.order), np.eye(group.order)
        moves = stays[group.compose(everyone[:, None], everyone)].transpose(1, 2, 0)
        commands = [p * move + (1 - p) * stays for move in moves for p in probabilities]
        shown = group.elements.T[:, None] == np.arange(n)[:, None]  # [variable, value, state]
        rho = np.concatenate([np.ones((len(commands), group.order), bool),
                              shown.reshape(n * n, -1)])
        names = [f"{g + 1} with probability {p}" for g in group.elements for p in probabilities]
        names += [f"{string.ascii_lowercase[i]} {j + 1}" for i in range(n) for j in range(n)]
        delta = np.concatenate([commands, np.broadcast_to(stays, (n * n, *stays.shape))])
        return PFSA(delta, rho, stays[0], names)

    def symbols(self, program):
        """The automaton's symbols of a program, in the order of the trace: [B, L + L/S]."""
        batch, count = program.asked.shape
        coins = np.searchsorted(COINS, program.probability)
        lines = self.group.index(program.commands) * (len(COINS) + 1) + coins
        reveals = (self.group.order * (len(COINS) + 1)
                   + program.asked * self.group.degree + self.program_answers(program))
        return np.concatenate([lines.reshape(batch, count, -1), reveals[..., None]],
                              -1).reshape(batch, -1)

    def best_predictions(self, program):
        """What the exact filter expects at each reveal: the best prediction that there is.

        p(value | all lines before, the variable asked for). No other has a smaller expected loss
        -log p(answer), and its largest entry is the best probability of a right guess.
        Shapes: -> [B, L/S, n].
        """
        holds = self.group.elements.T[:, :, None] == np.arange(self.group.degree)  # [n, Q, n]
        return (self.beliefs(program)[..., None, :] @ holds[program.asked])[..., 0, :]

    def beliefs(self, program):
        """The exact belief ahead of each reveal: [B, L/S, Q]."""
        spacing = program.commands.shape[1] // program.asked.shape[1]
        beliefs, _ = self.automaton.filter(self.symbols(program))
        return beliefs[:, spacing::spacing + 1]


TASKS["coins"] = CoinTask


# --- The command line -----------------------------------------------------------------------------

def show(argv):
    """A trace, Python's own state beside each line, the filter's expectation at each reveal."""
    parser = argparse.ArgumentParser(prog="python -m experiments.beliefs show")
    add = parser.add_argument
    add("--group", default="S3", help="S<n>, A<n>, Z<n>, D<n> or a product of at most 120 states")
    add("--commands", default="full", choices=COMMANDS)
    add("--length", type=number(1, 100), default=4, help="number of commands")
    add("--spacing", type=number(1), default=2, help="commands per reveal")
    add("--uncertain", type=float, default=0.5, metavar="P", help="share of commands behind a coin")
    add("--seed", type=number(0), default=0)
    with user_errors(parser, argv) as args:
        task = CoinTask(Group(args.group), args.commands, args.uncertain)
        program = task.draw(1, args.length, args.spacing, generator(args.seed, "valid"))
    tokens, _ = task.write_program(program)
    expected = iter(task.best_predictions(program)[0])
    uncertain = program.probability[0] < 1
    falls = iter(np.where(program.executed[0], 0.0, 1.0)[uncertain])
    variables, width = {"random": lambda: next(falls)}, 6 * task.group.degree + 26
    for line in task.decode(tokens[0]).splitlines():
        if line.startswith(">>> ") and "print" not in line and "import" not in line:
            exec(line[4:], variables)  # the state shown is Python's own, not ours
        state = " ".join(str(variables.get(name, ".")) for name in task.names)
        print(f"{line:<{width}} state {state}")
        if "print" in line:
            shares = ", ".join(f"{i + 1}: {p:.3f}" for i, p in enumerate(next(expected)))
            print(f"{'':<{width}} filter {shares}")


def train_coins(argv):
    parser = train.make_parser()
    parser.add_argument("--uncertain", type=float, default=0.25, metavar="P",
                        help="share of the commands behind a coin, 0 to 1")
    train_run("experiments.beliefs", "coins", parser, argv)


def eval_coins(argv):
    parser = make_eval_parser("experiments.beliefs")
    parser.add_argument("--schedule", default="random", choices=SCHEDULES,
                        help="which variables are revealed")
    parser.add_argument("--uncertain", type=float, metavar="P",
                        help="share of the commands behind a coin (default: that of the training)")

    def prepare(task, args):
        if args.schedule == "adversarial":
            task.group.transpositions  # refuse a group without them here
            if args.uncertain is not None:
                raise ValueError("--schedule adversarial has coins of its own; "
                                 "leave out --uncertain")
        if args.uncertain is not None:
            check_share(args.uncertain)
        task.schedule, task.share = args.schedule, args.uncertain
        return {"schedule": args.schedule, "uncertain": args.uncertain}

    eval_run("coins", parser, argv, prepare)


def main(argv=None):
    run_part("experiments.beliefs", {"show": show, "train": train_coins, "eval": eval_coins}, argv)


if __name__ == "__main__":
    main()
