"""Must a linear recurrence drift?  No: integer keys make no errors, and that can be proved.

    >>> a, b, c = c, a, b     at the i-th left-hand name x_i:     swap the rows x_i and x_i' of S
                              at the i-th right-hand name y_i:    swap the rows x_i and y_i'
    >>> b = 3                 at a value, also in the output `b 3` of a reveal: write the row b

The swap machine of scan.py is put in, with integers. With beta = 1, a key e_i - e_j swaps two rows,
a key e_i writes one, and a query e_i reads one. Float32 computes all that without rounding. So
nothing drifts, although the recurrence is as linear and as parallel as that of any DeltaNet.

The rest is learned: the language, and a reader that names the row it is handed. An answer depends
only on a variable and its value. So it is enough to check n^2 answers and the steps of each kind of
line. That proves the answers in all texts: of any length, with literals anywhere, read without
their first lines (joined late), with false reveals (which are believed). It assumes that rounding
outside S stays small, as it does where we measured it. Here the machine is put in; in the next
chapter, `found`, training finds it.

    python -m experiments.exact [--run]    the table; --run: seconds per missing run

Source: ours. (Exact as observed: arXiv 2511.22751; on bounded inputs, by a solver: 2605.24033.)
Next: found.py.
"""

from operator import itemgetter
from time import process_time

import torch
import torch.nn.functional as F
from torch import nn

from data import Group, ReplTask, UserError, run_cli
from experiments import RESULTS, Study, chapter, decaying, grid, records, table
from models import LanguageModel
from scan import scan_chunked
from train import Config, train

MARGIN = 0.5  # by which the logit of a correct answer must exceed all others
QUESTION = 9  # tokens of a reveal up to the blank: `>>> print('b', b)`, the line's end, and `b `


# --- 1. The machine, which is put in --------------------------------------------------------------
#
# For each variable x, S has a row x, which holds its value between lines, one-hot, and a row x',
# number n + x. A mark is a token that is neither a name nor a value; each line begins with one (a
# reveal and its output are one line). A step depends on its token, the last mark, its distance, and
# the name before that mark.

class Machine(nn.Module):
    """The mixer, S <- S + b (v - S^T k)^T and then S^T q.  State: S, and the last n tokens."""

    def __init__(self, task):
        super().__init__()
        self.prompt, self.equals, self.blank = [task.ids[mark] for mark in (">>> ", " = ", " ")]
        names = [[token.strip(", ") == x for x in task.names] for token in task.vocab]
        values = [[token == value for value in task.values] for token in task.vocab]
        self.register_buffer("names", torch.tensor(names).float(), persistent=False)
        self.register_buffer("values", torch.tensor(values).float(), persistent=False)

    def forward(self, tokens, state=None):
        S, past = state or (None, tokens[:, :0])
        window = torch.cat([past, tokens], 1)
        q, k, b, v = [part[:, past.shape[1]:] for part in self.integers(window)]
        read, S = scan_chunked(q, k, b, v, S)
        return read, (S, window[:, -v.shape[-1]:].clone())

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

    def moves(self, i, y=None):
        """{row: the row it takes}, at the i-th left-hand name, or at y, the i-th right-hand one."""
        spare = self.names.shape[1] + (i if y is None else y)
        return {i: spare, spare: i}


class Exact(LanguageModel):
    """embedding -> local block -> machine and reader -> MLP -> norm -> logits."""

    def __init__(self, task, machine=Machine):
        super().__init__(len(task.vocab), d_model=32, layers=1, conv_width=QUESTION,
                         make_mixer=lambda: machine(task))
        self.reader = nn.Linear(len(task.names), 32, bias=False)
        self.task = task

    def stream(self, tokens, state=None):
        local_block, machine, mlp = self.blocks
        local, held = state or (None, None)
        x, local = local_block(self.embedding(tokens), local)
        read, held = machine(tokens, held)
        x, _ = mlp(x + self.reader(read))
        return self.unembedding(self.norm(x)), (local, held)


# --- 2. The certificate ---------------------------------------------------------------------------

@torch.no_grad()
def certify(model):
    """Prove an Exact model.  Returns: what was tested (dict).  Raises: UserError.

    Theorem. Take any text of literals, reveals and full commands (all names, in order on the left,
    each once on the right), joined late or not. Let t[x] be the last value that a literal or a
    reveal gave to x, moved by the commands since: what Python has, unless a reveal lied. If certify
    accepts, the model predicts t[x] at each reveal of an x that has it: in float32 on a CPU, in
    pieces of one token or more, up to rounding outside S.
    """
    task, machine = model.task, model.blocks[1]
    n = len(task.names)
    require(all((parameter.abs() < 100).all() for parameter in model.parameters()),
            "a parameter is 100 or more, or not a number")                                     # (a)

    # The moves of each token of a line, {row: the row it becomes}; row 2n + v is the value v.
    lines = {}
    for s in range(n):  # in these n commands, each name is once in each right-hand place
        order = [(i + s) % n for i in range(n)]
        moves = [*map(machine.moves, range(n)), {}, *map(machine.moves, range(n), order)]
        lines[task.command_line(order)] = [{}, *moves, {}]
    for x in range(n):
        name = machine.moves(0) if x == 0 else {}  # `>>> a` could still become a command
        for v in range(n):
            lines[task.literal_line(x, v)] = [{}, name, {}, {x: 2 * n + v}, {}]
            lines[task.reveal_lines(x, v)] = [*QUESTION * [{}], {x: 2 * n + v}, {}]

    rows = torch.eye(3 * n)
    for line, moves in lines.items():
        q, k, b, v = inputs = machine.integers(torch.tensor([task.encode(line)]))
        require(all((part == part.sign()).all() for part in inputs)
                and (q.abs().sum(-1) <= 1).all(), "q, k, b, v are not such integers")          # (b)
        steps = rows[:2 * n] + b[0].unsqueeze(-1) * torch.cat([-k, v], -1)[0].unsqueeze(-2)
        for step, move in zip(steps, moves, strict=True):
            expected = rows[[move.get(row, row) for row in range(2 * n)]]
            require(torch.equal(step, expected), f"{line!r} does not make its moves")          # (c)

    # In these texts, S holds nothing but the value that is asked for.
    texts = [task.literal_line(x, v) + task.reveal_lines(x, v) for x in range(n) for v in range(n)]
    tokens = torch.tensor([task.encode(text) for text in texts])
    value = tokens[:, -2:-1]
    logits = model.stream(tokens)[0][:, -3]  # at the blank
    margins = logits.gather(1, value) - logits.scatter(1, value, -torch.inf).amax(1, keepdim=True)
    correct = int((margins > MARGIN).sum())
    require(correct == n * n, f"only {correct} of {n * n} answers are correct by {MARGIN}")    # (d)
    return {"moves": n * n + n, "writes": 2 * n * n, "answers": correct,
            "margin": margins.min().item()}


def require(condition, otherwise):
    if not condition:
        raise UserError(otherwise)


# Proof, by the tests (a) to (d). Each step copies, swaps or writes rows (c). So all rows of S, and
# of products of matrices I - b k^T, are 0 or one-hot. In q, k, b and v are only -1, 0 and 1 (b). So
# in (I + M)^-1 (scan.py, section 5: -k^T A ... A b) are integers up to 2n, and no sum in (5) to (9)
# there reaches 2^24. Float32 adds such integers exactly: S is never rounded.
#
# By the code of Machine, a line makes the same steps in every text and in all pieces. The step of a
# name depends on its side of the `=`, its place and itself: the n commands of (c) have them all.
#
# Claim: between lines, row x is e_t[x] for each x that has a t[x]. A literal or a reveal writes
# this row and leaves the other rows of variables alone (c). In a command, the left-hand names swap
# all rows x and x'. Then the i-th right-hand name y swaps the rows x_i and y' (c). Each name is
# there once, so no other step of this half touches these two rows: x_i ends with what y began with.
#
# At the blank of a reveal the machine reads one row, or its negative, or nothing (b). It is row x,
# or no answer could depend on the value (d). The local block sees QUESTION tokens, the question
# alone. So an answer depends on x and t[x]: n^2 cases, of which each is correct (d).
#
# Assumed: rounding outside S moves no difference of two logits by MARGIN. (Measured: below 1e-5.
# Parameters are below 100 (a), so nothing there overflows.)


# --- 3. The models and the table ------------------------------------------------------------------

SETTINGS = [*grid(group=["S5"], seed=range(320, 325)),
            *grid(group=["S3", "S4", "A5", "S6", "S10", "S26"], seed=[320])]
PATH = RESULTS / "models/exact-S5-seed0.pt"


def train_exact(group, seed, steps=300):
    """Train all but the machine. Two commands a trace are enough, since it needs no training."""
    torch.manual_seed(seed)
    task = ReplTask(Group(group))
    config = Config(curriculum=((2, 1),), final_steps=steps, seed=seed)
    return train(Exact(task), task, config, schedule=decaying)[0]  # one stage: the last parameters


def run(setting, _):
    start = process_time()
    model = train_exact(**setting)
    if setting == SETTINGS[0]:
        torch.save(model.state_dict(), PATH)
    return {"cpu_seconds": process_time() - start} | certify(model)


STUDIES = [Study("exact", SETTINGS, run)]


def stored():
    """The task and the model of S5."""
    task = ReplTask(Group("S5"))
    model = Exact(task)
    model.load_state_dict(torch.load(PATH, weights_only=True))
    return task, model.eval()


def show():
    measured = ("moves", "writes", "answers", "margin", "cpu_seconds")
    table("Models proved; what was tested, and the least margin; the training", records("exact"),
          ["group"], {"proved": lambda row: "margin" in row}
          | {key: itemgetter(key) for key in measured})


def main(argv=None):
    chapter(__doc__, show, STUDIES, argv)


if __name__ == "__main__":
    run_cli(main)
