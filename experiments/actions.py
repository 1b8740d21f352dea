"""Own or forced actions?  Is the command invented, or is the state lost?

    a, b, c = c, a, b              the listing: a Python program, one command a line
    a, b, c = b, a, c
    >>> a = 1                      the session: a real one, in which the same commands are typed
    >>> b = 2
    >>> c = 3
    >>> a, b, c = c, a, b          a command, to be copied from the listing
    >>> a, b, c                    the question, after every S commands
    (3, 1, 2)                      the state, to be tracked

Finding. No arm copies a listing that is longer than those of training: its own commands fail first.
The hybrid, one layer of the delta rule and one of attention, copies as well as the Transformer, and
tracks as well as the linear RNN, or better. The Transformer loses the state soon after the length
of training.

    python -m experiments.actions           # the table, from results/actions.jsonl
    python -m experiments.actions --run     # makes what is missing of it, 70 minutes in all
    python -m experiments.actions --run --arm hybrid --group S3 --seed 3      # 2 minutes

A model is trained on texts of 4 to 16 commands with a question after each, by next-token
prediction. Then it goes on from a listing, token by token, and says the token that it finds most
likely. The prompts and the questions are always given.

    own        it reads its own commands and its own states
    kept       it reads the true commands and its own states

All arms read as many tokens. The rates are those that the chapter `arms` chose for another task;
the hybrid has those of the linear RNN.

Source: "Debugging code world models". With full S5 commands a Transformer keeps 100, 100, 100, 90,
90% over 8, 16, 32, 64, 128 commands if the true commands are forced, and 100, 80, 40, 0, 0% with
its own.

Next: bench.py.
"""

import argparse
import itertools
from functools import partial

import numpy as np
import torch

from data import Group, ReplTask, draw_commands, generator, number, one_line_errors, parse, run
from experiments import RATES, record, records, span, train_arm
from models import MODELS, AttentionBlock, DeltaBlock, LanguageModel
from train import Recipe

SHORTEST = 4  # commands of a training text
GIVEN, COMMAND, STATE = 0, 1, 2  # the roles of the tokens
MODES = {"own": [COMMAND, STATE], "kept": [STATE]}  # what is read as it was said


# --- 1. The task ----------------------------------------------------------------------------------

class ActionTask(ReplTask):
    """A listing of all commands, then the session. Accuracy counts commands and states.

    A text has T = L (2n + 2) + 5n + L (2n + 3) + (2n + 5) L/S tokens.
    """

    def __init__(self, group):
        comma_values = [f", {i + 1}" for i in range(group.degree)]
        self.more_symbols = ["(", *comma_values]
        super().__init__(group)
        self.comma_value_tokens = np.array([self.encode(text)[0] for text in comma_values])

    def sample(self, batch, length, spacing, rng):
        """As in ReplTask, but all variables are asked for: [B, L/S, n]."""
        self.check(length, spacing)
        commands = draw_commands(self.group, self.commands, (batch, length), rng)
        n = self.group.degree
        asked = np.broadcast_to(np.arange(n), (batch, length // spacing, n))
        return self.write(commands, asked)

    def training_batch(self, batch, length, spacing, rng):
        """A batch has one length, drawn from 4 commands to those of the stage."""
        lengths = [L for L in range(spacing, length + 1, spacing) if L >= SHORTEST]
        return self.test_batch(batch, rng.choice(lengths), spacing, rng)

    def reveal_tokens(self, asked, answers):
        """`>>> a, b, c` and its output `(3, 1, 2)`: -> [..., 2n + 5]."""
        first = self.value_tokens[answers[..., 0]]
        later = np.moveaxis(self.comma_value_tokens[answers[..., 1:]], -1, 0)
        return self._line(asked.shape[:-1], ">>> ", *self._names(asked), "\n", "(", first, *later,
                          ")", "\n")

    def assemble(self, lines, asked, answers):
        """The listing is the commands without their prompts."""
        session, _ = super().assemble(lines, asked, answers)
        batch, length = lines.shape[:2]
        tokens = np.hstack([lines[..., 1:].reshape(batch, -1), session])

        # Of a command the right-hand side counts. All else of it can be guessed.
        n = self.group.degree
        roles = self.roles(length, length // asked.shape[1])
        counted = roles == STATE
        counted[roles == COMMAND] = ([False] * (n + 1) + [True] * n + [False]) * length
        return tokens, np.tile(counted, (batch, 1))

    def roles(self, length, spacing):
        """GIVEN, COMMAND (but its prompt) or STATE (its values), the same in all texts: [T]."""
        n = self.group.degree
        command = [GIVEN] + [COMMAND] * (2 * n + 2)
        reveal = [GIVEN] * (n + 3) + [STATE] * n + [GIVEN] * 2
        before = [GIVEN] * (length * (2 * n + 2) + 5 * n)  # the listing and the first lines
        return np.array(before + (command * spacing + reveal) * (length // spacing))


# --- 2. A hybrid ----------------------------------------------------------------------------------

class Hybrid(LanguageModel):
    """Mixers alternate: the delta rule, which can track, then attention, which can copy."""

    def __init__(self, vocab_size, d_model=56, heads=4, layers=2, conv_width=8):
        mixers = itertools.cycle([lambda: DeltaBlock(d_model, heads, 2.0, 1),
                                  lambda: AttentionBlock(d_model, heads)])
        super().__init__(vocab_size, d_model, layers, conv_width, lambda: next(mixers)())


# --- 3. Generation --------------------------------------------------------------------------------

@torch.no_grad()
def generate(model, tokens, free):
    """What the model says at each place, and what it read: [B, T] each.

    It reads its own word at the places that are `free`, bool [T], and the true one elsewhere. The
    true words up to the next free place are streamed in one piece. Place 0 must not be free.
    """
    batch, length = tokens.shape
    said = tokens.new_zeros(batch, length + 1)  # at the end a word for the place behind the text
    read = tokens.clone()
    state = None
    begin = 0
    for end in [*np.flatnonzero(free), length]:
        logits, state = model.stream(read[:, begin:end], state)
        said[:, begin + 1:end + 1] = logits.argmax(-1)
        if end < length:
            read[:, end] = said[:, end]
        begin = end
    return said[:, :-1], read


def evaluate_mode(model, task, length, mode, traces=32, seed=0):
    """The shares of the commands and of the states after them that are right, as a row."""
    truth, _ = task.sample(traces, length, 1, generator(seed, "test", length, 1))
    roles = task.roles(length, 1)
    said, _ = generate(model, torch.from_numpy(truth), np.isin(roles, MODES[mode]))
    equal = said.numpy() == truth

    row = {"mode": mode, "length": length, "traces": traces}
    for name, role in [("commands", COMMAND), ("states", STATE)]:
        right = equal[:, roles == role].reshape(traces, length, -1).all(-1)  # all of its tokens
        row[name] = round(float(right.mean()), 4)
    return row


# --- 4. The study ---------------------------------------------------------------------------------

ARMS = ["linrnn", "hybrid", "transformer", "lstm"]
MAKE = MODELS | {"hybrid": Hybrid}
LENGTHS = [8, 16, 32, 64, 128]  # of the evaluation
MILLIONS = {"S3": 4.0, "S5": 12.0}  # of tokens that a run reads, by its group
# An arm each: all that distinguishes its runs, but for the seed.
STUDY = [{"arm": arm, "group": group, "millions": MILLIONS[group]}
         for group, arm in itertools.product(MILLIONS, ARMS)]


def recipe_for(task, cell):
    """The stages (4,1), (8,1), (16,1). In the last one the rates fall to 0."""
    shares = {4: 0.15, 8: 0.15, 16: 0.7}  # of the tokens
    steps = []
    for length, share in shares.items():
        tokens = np.mean([len(task.roles(drawn, 1)) for drawn in range(SHORTEST, length + 1)])
        steps.append(max(1, round(share * 1e6 * cell["millions"] / 16 / tokens)))
    rates = RATES["linrnn" if cell["arm"] == "hybrid" else cell["arm"]]
    return Recipe(curriculum=[(length, 1) for length in shares], stage_steps=steps, batch=16,
                  average=False, seed=cell["seed"], **rates)


def run_cell(cell):
    """Trains one arm with one seed, evaluates it in each mode, and records both."""
    task = ActionTask(Group(cell["group"]))
    make = partial(MAKE[cell["arm"]], len(task.vocab), **task.model_options)
    made = train_arm("actions", cell, make, task, recipe_for(task, cell))
    if made:
        model, summary = made
        results = [evaluate_mode(model, task, length, mode)
                   for length, mode in itertools.product(LENGTHS, MODES)]
        record("actions", cell | summary | {"results": results})


# --- 5. The table ---------------------------------------------------------------------------------

def show():
    """The records, an arm a line: % right against the number of commands."""
    lengths = "".join(f"{length:>8}" for length in LENGTHS)
    print("% right by the number of commands, the least and the greatest of three seeds\n"
          f"{'':25}commands, own{'':27}states, kept\n"
          f"group  read  arm         {lengths}{lengths}")
    for cell in STUDY:
        tests = []
        for row in records("actions", **cell):
            tests += row["results"]
        line = f"{cell['group']:5}{cell['millions']:5.0f}m  {cell['arm']:12}"
        columns = [("own", "commands"), ("kept", "states")]
        for (mode, what), length in itertools.product(columns, LENGTHS):
            found = [round(100 * test[what]) for test in tests
                     if (test["mode"], test["length"]) == (mode, length)]
            line += f"{span(found, 0):>8}"
        print(line)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.actions",
                                     description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--run", action="store_true", help="make the missing runs of the study, or some of them:")
    add("--arm", choices=ARMS, help="those of this arm")
    add("--group", choices=MILLIONS, help="those of this group")
    add("--seed", type=number(0), help="those of this seed, which may be a fourth one")
    args = parse(parser, argv)

    seeds = range(3) if args.seed is None else [args.seed]
    with one_line_errors(parser):
        for cell, seed in itertools.product(STUDY, seeds):
            wanted = args.arm in (None, cell["arm"]) and args.group in (None, cell["group"])
            if args.run and wanted:
                run_cell(cell | {"seed": seed})
    show()


if __name__ == "__main__":
    run(main)
