"""Must a linear recurrence drift?  No: integer keys make no errors, and that can be proved.

    >>> a, b, c = c, a, b     at the i-th left-hand name x_i:     swap the rows x_i and x_i' of S
                              at the i-th right-hand name y_i:    swap the rows x_i and y_i'
    >>> b = 3                 at a value, also in the output `b 3` of a reveal: write the row b

This is the swap machine of scan.py, set by hand with integers; x' is the spare row of x. A key e_i
- e_j is not normalised: |k|^2 = 2, so with beta = 1 already it swaps two rows. A key e_i writes
one, and a query e_i reads one. Float32 computes all that without rounding. So nothing drifts,
although the recurrence is as linear and as parallel as that of any DeltaNet.

So each answer that a text determines is right, in texts of any length: with literals anywhere,
joined late (read without their first lines), with false reveals (which it believes). The steps of
each kind of line are all that the proof has to check. Nothing here is trained. In the next chapter,
`found`, the choices are.

    python -m experiments.exact        the proof for groups of 3 to 26 variables
    python -m experiments.play exact   type to the machine of copies.py, which is proved as well

Source: ours. (Exact as observed: arXiv 2511.22751; on bounded inputs, by a solver: 2605.24033.)
Next: found.py.
"""

from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import nn

from data import Group, ReplTask, UserError, run_cli
from experiments import chapter, table
from scan import scan_chunked

QUESTION = 9  # tokens of a reveal up to the blank: `>>> print('b', b)`, the line's end, and `b `


# --- 1. The machine -------------------------------------------------------------------------------
#
# For each variable x, S has a row x, which holds its value between lines, one-hot, and a row x',
# number n + x. A mark is a token that is neither a name nor a value; each line begins with one (a
# reveal and its output are one line). A step depends on its token, the last mark, its distance, and
# the name before that mark.

class Machine(nn.Module):
    """S <- S + b (v - S^T k)^T.  It predicts the value S^T q.  State: S, and the last n tokens."""

    def __init__(self, task):
        super().__init__()
        self.task = task
        self.prompt, self.equals, self.blank = [task.ids[mark] for mark in (">>> ", " = ", " ")]
        names = [[token.strip(", ") == x for x in task.names] for token in task.vocab]
        values = [[token == value for value in task.values] for token in task.vocab]
        self.register_buffer("names", torch.tensor(names).float())
        self.register_buffer("values", torch.tensor(values).float())

    def stream(self, tokens, state=None):
        S, past = state or (None, tokens[:, :0])
        window = torch.cat([past, tokens], 1)
        q, k, b, v = [part[:, past.shape[1]:] for part in self.integers(window)]
        read, S = scan_chunked(q, k, b, v, S)
        p = read @ self.values.T  # 0 for all tokens, unless a value comes next
        return (p + 1e-6).log(), (S, window[:, -v.shape[-1]:].clone())

    def integers(self, tokens):
        """q, k, b [B, T, 2n] and v [B, T, n] of these tokens, [B, T]."""
        name, value = self.names[tokens], self.values[tokens]  # e_x of a name, e_v of a value, or 0
        n = name.shape[-1]

        # The last mark; how far away it is, as e_i of the i-th token after it; the name before it.
        at = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        last = torch.where((name + value).any(-1), 0, at).cummax(1).values
        mark = tokens.gather(1, last).unsqueeze(-1)
        place = F.one_hot((at - last).clamp(max=n), n + 1)[..., 1:]  # no name is further away
        before = self.names[tokens.gather(1, (last - 1).clamp(min=0))]

        left = (mark == self.prompt) * name * place  # e_i, if x_i is the i-th after a prompt
        right = (mark == self.equals) * name
        fetch = right.sum(-1, keepdim=True) * place
        write = value.sum(-1, keepdim=True) * before  # values follow only `x = ` and `x `
        ask = (tokens == self.blank).unsqueeze(-1) * before
        return F.pad(ask, (0, n)), *self.keys(write, left, fetch, right), value

    def keys(self, write, left, fetch, right):
        """k and b = k, from one-hot names and places: it swaps two rows, or writes one."""
        k = torch.cat([write + left + fetch, -left - right], -1)
        return k, k


# --- 2. The certificate ---------------------------------------------------------------------------

def certify(machine, copies=False):
    """Prove a Machine.  Returns: how many lines and how many reads were tested.  Raises: UserError.

    Theorem. Take any text of literals, reveals and full commands (all names, in order on the left,
    each once on the right), joined late or not. Let t[x] be the last value that a literal or a
    reveal gave to x, moved by the commands since: what Python has, unless a reveal lied. If certify
    accepts, the machine predicts t[x] at each reveal of an x that has it: in float32 on a CPU, in
    pieces of one token or more. With copies, a command may have any names on the right.
    """
    task, n = machine.task, len(machine.task.names)
    rows = torch.eye(3 * n)  # the rows x, the rows x', and the values
    lines = []

    def steps_of(line):
        """The step of each token: for each row of S, which row or value it becomes [T, 2n, 3n]."""
        lines.append(line)
        _, *inputs = machine.integers(torch.tensor([task.encode(line)]))
        require(all((part == part.sign()).all() for part in inputs), "some inputs are no integers")
        k, b, v = [part[0] for part in inputs]
        steps = rows[:2 * n] + b.unsqueeze(-1) * torch.cat([-k, v], -1).unsqueeze(-2)
        require((steps >= 0).all() and (steps.sum(-1) <= 1).all(), f"{line!r} mixes rows")
        return steps

    def after(steps):
        """What the rows of S hold after these steps."""
        S = rows
        for step in steps:
            S = torch.cat([step @ S, rows[2 * n:]])
        return S[:2 * n]

    for x in range(n):
        for v in range(n):
            expected = rows[:n].clone()
            expected[x] = rows[2 * n + v]
            for line in task.literal_line(x, v), task.reveal_lines(x, v):
                held = after(steps_of(line))[:n]
                require(torch.equal(held, expected), f"{line!r} does not write its value alone")

        q, *_ = machine.integers(torch.tensor([task.encode(task.reveal_lines(x, 0))]))
        require(torch.equal(q[0, QUESTION - 1], rows[x, :2 * n]), f"row {x} is not what is read")

    for first in range(n):  # in these n commands, each name is once in each right-hand place
        order = [(first + i) % n for i in range(n)]
        line = task.command_line(order)
        steps = steps_of(line)
        left, right, end = steps[:n + 2], steps[n + 2:-1], steps[-1]
        require(torch.equal(after(left)[n:], rows[:n]), f"{line!r} does not park all values")
        for i, (y, step) in enumerate(zip(order, right, strict=True)):
            expected = rows[:2 * n].clone()
            expected[i] = rows[n + y]
            if not copies:
                expected[n + y] = step[n + y]  # it is not needed again
            require(torch.equal(step, expected), f"{line!r} does not fetch {task.names[y]} alone")
        require(torch.equal(end[:n], rows[:n]), f"{line!r} ends with a change")
    return {"lines": len(lines), "reads": n}


def require(condition, otherwise):
    if not condition:
        raise UserError(otherwise)


# Proof. Each step copies rows or values. So all rows of S, and of products of matrices I - b k^T,
# are 0 or one-hot. In k, b and v are only -1, 0 and 1. So in (I + M)^-1 (scan.py, section 5:
# -k^T A ... A b) are integers up to 2n, and no sum in (5) to (9) there reaches 2^24. Float32 adds
# such integers exactly: S is never rounded.
#
# By the code of Machine, a line makes the same steps in every text and in all pieces. The step of a
# name depends on its side of the `=`, its place and itself: the n commands have them all.
#
# Claim: between lines, row x is e_t[x] for each x that has a t[x]. A literal or a reveal writes
# this row and leaves the other rows of variables alone. In a command, each row y' holds t[y] when
# the left-hand names are read. Then the i-th right-hand name y takes row y' to row x_i, and changes
# no other row but y' (with copies, none). Each name is there once (with copies, any number of
# times), so x_i ends with what y began with. At the blank of a reveal of x, it reads row x.


# --- 3. The table ---------------------------------------------------------------------------------

def stored():
    """The task and the machine of S5."""
    task = ReplTask(Group("S5"))
    return task, Machine(task)


def show():
    rows = [{"group": name} | certify(Machine(ReplTask(Group(name))))
            for name in ("S3", "S5", "S10", "S26")]
    table("Proved: what was tested", rows, ["group"],
          {key: itemgetter(key) for key in ("lines", "reads")})


def main(argv=None):
    chapter(__doc__, show, argv=argv)


if __name__ == "__main__":
    run_cli(main)
