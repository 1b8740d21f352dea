"""What must a model read to copy and to track?  A listing of commands, and the session they make.

    a, b, c = c, a, b              the listing: a Python program, one command a line
    a, b, c = b, a, c
    >>> a = 1                      the session: a real one, in which the same commands are typed
    >>> b = 2
    >>> c = 3
    >>> a, b, c = c, a, b          a command, to be copied from the listing
    >>> a, b, c                    the question, after every S commands
    (3, 1, 2)                      the state, to be tracked

The listing is valid Python. Executed after a = 1, b = 2, c = 3 it ends in the last state of the
session. Where `one` variable is shown, the question is print('b', b), as in data.py.

Symbols: those of data.py; w tokens of a command with its prompt, q of a question and its answer.

Next: actions.py.
"""

import numpy as np

from data import TASKS, ReplTask, draw_commands, run_commands

SHORTEST = 4  # commands of a training trace
GIVEN, COMMAND, STATE = 0, 1, 2  # the roles of the tokens


class ActionTask(ReplTask):
    """A listing of all commands, then the session. Accuracy counts commands and states.

    shown: `all` variables after every S commands, or `one` of them, drawn as in ReplTask. A text
    has T = L (w - 1) + 5n + L w + q L/S tokens. Here w = 2n + 3, or 7 for swaps, and q = 2n + 5,
    or 11 if one variable is shown.
    """

    default_curriculum = "4:1,8:1,16:1"
    default_lengths = "8:1,16:1"
    bayes_loss = 0.0  # for FallingRun: the tokens that count are certain

    def __init__(self, group, commands="full", shown="all"):
        self.more_symbols = ["(", *(f", {i + 1}" for i in range(group.degree))]
        super().__init__(group, commands)
        if shown not in ("all", "one"):
            raise ValueError(f"shown must be all or one; got {shown}")
        self.shown = shown
        self._comma_value = np.array([self._id[symbol] for symbol in self.more_symbols[1:]])
        lines = self.command_tokens(self.alphabet)[:, 1:]
        self.varies = (lines != lines[0]).any(0)  # of full commands, the right-hand side

    def draw(self, batch, length, spacing, rng):
        """Random commands [B, L, n], and the variables asked, [B, L/S]: both for `write`."""
        self.check(length, spacing)
        return (draw_commands(self.group, self.commands, (batch, length), rng),
                rng.integers(self.group.degree, size=(batch, length // spacing)))

    def sample(self, batch, length, spacing, rng):
        return self.write(*self.draw(batch, length, spacing, rng))

    def answers(self, commands, asked):
        """The whole states [B, L/S, n], or the value of the variable asked, from 0: [B, L/S]."""
        if self.shown == "one":
            return super().answers(commands, asked)
        spacing = commands.shape[1] // asked.shape[1]
        return run_commands(commands)[:, spacing - 1::spacing]

    def reveal_tokens(self, asked, answers):
        """`>>> a, b, c` and its output `(3, 1, 2)`: -> [..., 2n + 5]."""
        if self.shown == "one":
            return super().reveal_tokens(asked, answers)
        values = [self.value_tokens[answers[..., 0]],
                  *np.moveaxis(self._comma_value[answers[..., 1:]], -1, 0)]
        return self._line(asked.shape, ">>> ", *self._names(np.arange(self.group.degree)), "\n",
                          "(", *values, ")", "\n")

    def assemble(self, lines, asked, answers):
        """The listing is the commands without their prompts. Shapes as in ReplTask."""
        session, _ = super().assemble(lines, asked, answers)
        tokens = np.hstack([lines[..., 1:].reshape(len(lines), -1), session])
        roles = self.roles(lines.shape[1], lines.shape[1] // asked.shape[1])
        counted = roles == STATE
        counted[roles == COMMAND] = np.tile(self.varies, lines.shape[1])
        return tokens, np.tile(counted, (len(lines), 1))

    def roles(self, length, spacing):
        """GIVEN, COMMAND (but its prompt) or STATE (its values), the same in all traces: [T]."""
        width, n = len(self.varies), self.group.degree
        command = np.array([GIVEN] + [COMMAND] * width)
        answer = [GIVEN] * (n + 3) + [STATE] * n + [GIVEN] * 2
        if self.shown == "one":
            answer = [GIVEN] * 9 + [STATE, GIVEN]
        block = np.concatenate([np.tile(command, spacing), answer])
        return np.concatenate([np.full(length * width + 5 * n, GIVEN),
                               np.tile(block, length // spacing)])

    def tokens_per_command(self, spacing):
        """Of the session without its first lines: w + q / S. The listing costs w - 1 more."""
        block = len(self.roles(2 * spacing, spacing)) - len(self.roles(spacing, spacing))
        return block / spacing - len(self.varies)

    def training_batch(self, batch, length, spacing, rng):
        """A batch has one length, drawn from 4 commands to those of the stage."""
        self.check(length, spacing)
        drawn = rng.choice(self.lengths(length, spacing))
        return self.test_batch(batch, drawn, spacing, rng)

    @staticmethod
    def lengths(length, spacing):
        """Those of the batches of a stage: the multiples of the spacing from 4 on."""
        return [L for L in range(spacing, length + 1, spacing) if L >= min(SHORTEST, length)]


TASKS["actions"] = ActionTask
