"""Own or forced actions?  Is the command invented, or is the state lost?

    a, b, c = c, a, b              the listing: a Python program, one command a line
    a, b, c = b, a, c
    >>> a = 1                      the session: a real one, in which the same commands are typed
    >>> b = 2
    >>> c = 3
    >>> a, b, c = c, a, b          a command, to be copied from the listing
    >>> a, b, c                    the question, after each command
    (3, 1, 2)                      the state, to be tracked

A model is trained on texts of 4 to 16 commands with a question after each, by next-token
prediction. Then it goes on from a listing, token by token, and says the token that it finds most
likely. The prompts and the questions are always given.

    own        it reads its own commands and its own states
    forced     it reads the true commands and its own states

Finding. No arm copies a listing of 32 commands, twice the longest of training. What fails first is
the copy: after 32 true commands the linear RNN and the hybrid still have 89 to 100% of the states.
The hybrid, one layer of the delta rule and one of attention, copies as well as the Transformer, or
better, and tracks as well as the linear RNN, or better. The Transformer has 28 to 72% of the states
at 32 commands, and guesses at 128; one of its three seeds does not track S5 at all. The LSTM
copies hardly a command. It tracks S3 to 128 commands, and S5 not even at 8.

    python -m experiments.actions           # the tables
    python -m experiments.actions --run     # first makes what has no record; 70 minutes for all

All arms read as many tokens. The rates come from an older grid, on commands of S5 at (2,1);
the hybrid has those of the linear RNN.

Source: "Debugging code world models". With full S5 commands a Transformer keeps 100, 100, 100, 90,
90% over 8, 16, 32, 64, 128 commands if the true commands are forced, and 100, 80, 40, 0, 0% with
its own.

Next: bench.py.
"""

import itertools
from functools import partial

import numpy as np
import torch

from data import Group, ReplTask, draw_commands, generator, next_tokens, run, run_commands
from experiments import (FALLING, RATES, chapter, grid, make, make_arm, millions, minutes, records,
                         span, table, where)
from experiments.plots import COLOURS, NAMES, canvas, draw, ticks_at
from models import LSTM, AttentionBlock, DeltaBlock, LanguageModel, LinRNN, Transformer
from train import Recipe

GIVEN, COMMAND, STATE = 0, 1, 2  # the roles of the tokens
MODES = {"own": [COMMAND, STATE], "forced": [STATE]}  # what a model must say, and then reads
SHORTEST = 4  # commands of a training text


# --- 1. The task ----------------------------------------------------------------------------------

class ActionTask(ReplTask):
    """A listing of all commands, then the session, with the whole state after each command.

    A text has T = L (2n + 2) + 5n + L (4n + 8) tokens. The spacing is always 1.
    """

    def __init__(self, group):
        comma_values = [f", {i + 1}" for i in range(group.degree)]
        self.more_symbols = ["(", *comma_values]
        super().__init__(group)
        self.comma_value_tokens = np.array([self.encode(text)[0] for text in comma_values])

    def test_batch(self, batch, length, spacing, rng):
        """Uniform commands. What cannot be guessed counts: right-hand sides, and states."""
        commands = draw_commands(self.group, "full", (batch, length), rng)
        lines = self.command_tokens(commands)
        session = np.concatenate([lines, self.state_tokens(run_commands(commands))], -1)
        listing = lines[..., 1:]  # without the prompts
        start = np.tile(self.start_tokens(), (batch, 1))
        tokens = np.hstack([listing.reshape(batch, -1), start, session.reshape(batch, -1)])

        n = self.group.degree
        roles = self.roles(length)
        counted = roles == STATE
        counted[roles == COMMAND] = ([False] * (n + 1) + [True] * n + [False]) * length
        return next_tokens(tokens, np.tile(counted, (batch, 1)))

    def training_batch(self, batch, length, spacing, rng):
        """A batch has one length, drawn from 4 commands to those of the stage."""
        return self.test_batch(batch, rng.choice(range(SHORTEST, length + 1)), spacing, rng)

    def state_tokens(self, states):
        """`>>> a, b, c` and its output `(3, 1, 2)`: [..., n] -> [..., 2n + 5]."""
        names = self._names(np.arange(self.group.degree))
        first = self.value_tokens[states[..., 0]]
        later = np.moveaxis(self.comma_value_tokens[states[..., 1:]], -1, 0)
        return self._line(states.shape[:-1], ">>> ", *names, "\n", "(", first, *later, ")", "\n")

    def roles(self, length):
        """GIVEN, COMMAND (but its prompt) or STATE (its values), the same in all texts: [T]."""
        n = self.group.degree
        command = [GIVEN] + [COMMAND] * (2 * n + 2)
        question = [GIVEN] * (n + 3) + [STATE] * n + [GIVEN] * 2
        before = [GIVEN] * (length * (2 * n + 2) + 5 * n)  # the listing and the first lines
        return np.array(before + (command + question) * length)


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
    """What the model says at each place: [B, T].

    It reads its own word at the places that are `free`, bool [T], and the true one elsewhere. The
    true words up to the next free place are streamed in one piece. Place 0 must not be free.
    """
    read = tokens.clone()
    said = [tokens[:, :1]]
    state = None
    begin = 0
    for end in [*np.flatnonzero(free), tokens.shape[1]]:
        logits, state = model.stream(read[:, begin:end], state)
        said.append(logits.argmax(-1))
        read[:, end:end + 1] = said[-1][:, -1:]  # no place at the end of the text
        begin = end
    return torch.cat(said, 1)[:, :-1]


def evaluate_modes(model, task, lengths, traces=32):
    """A row for each length and each mode: the shares of commands and of states that are right."""
    rows = []
    for length in lengths:
        batch = task.test_batch(traces, length, 1, generator(0, "test", length, 1))
        truth = torch.from_numpy(np.hstack([batch.inputs[:, :1], batch.targets]))
        roles = task.roles(length)
        for mode, spoken in MODES.items():
            said = generate(model, truth, np.isin(roles, spoken))
            equal = (said == truth).numpy()

            # A command or a state is right if all of its tokens are.
            row = {"mode": mode, "length": length, "traces": traces}
            for name, role in [("commands", COMMAND), ("states", STATE)]:
                whole = equal[:, roles == role].reshape(traces, length, -1).all(-1)
                row[name] = float(whole.mean())
            rows.append(row)
    return rows


# --- 4. The study ---------------------------------------------------------------------------------

ARMS = {"linrnn": LinRNN, "hybrid": Hybrid, "transformer": Transformer, "lstm": LSTM}
LENGTHS = [8, 16, 32, 64, 128]  # of the evaluation
MILLIONS = {"S3": 4, "S5": 12}  # of tokens that a run reads, by its group
CELLS = grid(group=["S3", "S5"], arm=[*ARMS], seed=range(3))


def plan(cell):
    """The stages (4,1), (8,1), (16,1). In the last one the rates fall to 0."""
    task = ActionTask(Group(cell["group"]))
    shares = {4: 0.15, 8: 0.15, 16: 0.7}  # of the tokens
    steps = []
    for length, share in shares.items():
        tokens = np.mean([len(task.roles(drawn)) for drawn in range(SHORTEST, length + 1)])
        steps.append(round(share * 1e6 * MILLIONS[cell["group"]] / 16 / tokens))

    rates = RATES["linrnn" if cell["arm"] == "hybrid" else cell["arm"]]
    recipe = Recipe(curriculum=[(length, 1) for length in shares], stage_steps=steps, batch=16,
                    seed=cell["seed"], **rates)
    return task, partial(make_arm, ARMS[cell["arm"]], task), recipe, LENGTHS


def make_missing():
    make("actions", CELLS, plan, evaluate_modes, **FALLING)


# --- 5. The tables --------------------------------------------------------------------------------

def right(mode, what, length):
    """A column of a table: what is right in texts of that length, in %."""
    def text(rows):
        tests = [where(row["results"], mode=mode, length=length)[0] for row in rows]
        return span([100 * test[what] for test in tests], 0)
    return text


def guess(rows):
    """A column of a table: the share of a blind guess, which is one element of the group, in %."""
    return f"{100 / Group(rows[0]['group']).order:.1f}"


def costs():
    """What a text of 64 commands costs: its tokens, and those that a model must say one by one."""
    rows = []
    for group in MILLIONS:
        roles = ActionTask(Group(group)).roles(64)
        said = {mode: str(np.isin(roles, spoken).sum()) for mode, spoken in MODES.items()}
        rows.append({"group": group, "text": len(roles), **said})
    return rows


def show():
    rows = records("actions")
    for mode, what in [("own", "commands"), ("forced", "states")]:
        columns = {str(length): right(mode, what, length) for length in LENGTHS}
        table(f"Actions {mode}: {what} right in %, by the number of commands; three seeds", rows,
              ["group", "arm"], {"million tokens": millions, "minutes": minutes, **columns,
                                 "guess": guess})
    table("Tokens of a text of 64 commands, and how many of them the model says", costs(),
          ["group", "text", *MODES], {})


def picture():
    """S5: own commands that are right, and states after forced commands, by the length."""
    figure, (panels,) = canvas("No arm copies listings of 32 lines, twice the longest in "
                               "training;\nthe hybrid goes on tracking the state at 64", 1, 2,
                               (9.5, 3.8))
    said = {"own": ("commands", "lines right, own lines read"),
            "forced": ("states", "states right, true lines given")}
    for axes, mode in zip(panels, MODES):
        what, label = said[mode]
        found = {}
        for arm in ARMS:
            rows = records("actions", arm=arm, group="S5")
            shares = [[test[what] for test in where(row["results"], mode=mode)] for row in rows]
            found[NAMES[arm]] = LENGTHS, shares, COLOURS[arm]
        axes.set(ylim=(0, 1.02), xlabel="lines in the listing, S5", ylabel=label)
        draw(axes, found, chance=1 / 120, trained=16, named=None if mode == "forced" else [])
        ticks_at(axes, LENGTHS)
    return figure


def main(argv=None):
    chapter(__doc__, show, make_missing, argv=argv)


if __name__ == "__main__":
    run(main)
