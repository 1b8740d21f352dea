"""Must a linear recurrence drift?  No: integer keys make no errors, and that can be proved.

    >>> a, b, c = c, a, b     at the i-th left-hand name x_i:     swap the rows x_i and x_i' of S
                              at the i-th right-hand name y_i:    swap the rows x_i and y_i'
    >>> b = 3                 at a value, also in the output `b 3` of a reveal: write the row b

What is put in: the swap machine of scan.py, in integers. With beta = 1, a key e_i - e_j swaps two
rows, a key e_i writes one, and a query e_i reads one. Float32 computes all that without rounding.
So nothing drifts, although the recurrence is as linear and as parallel as that of any DeltaNet.

What is learned: the language around the machine, and a reader that names the row it is handed. An
answer depends only on a variable and its value. So n^2 answers, and the effect of each kind of
line, prove all texts (the theorem of `certify`): of any length, with literals anywhere, joined
late, with false reveals (which the model believes). Training alone has found such integers once, on
three variables (TEACHING.md, the open question).

    python -m experiments.exact [--run]       the table; --run first makes what has no record
    python -m experiments.exact S4 [SEED]     train a model of S4, and prove it

Source: ours. (Trained, linear and exact as observed, without a proof: arXiv 2511.22751. Checked by
a solver, on every input of a bounded domain: arXiv 2605.24033.)
Next: copies.py.
"""

import sys
from time import process_time

import torch
import torch.nn.functional as F
from torch import nn

from data import Group, ReplTask, UserError, make_parser, run_cli
from eval import print_table
from experiments import RESULTS, Study, by_test, chapter, decaying, grid, records, table
from experiments.reading import evaluate_stream
from experiments.snap import TESTS
from models import LanguageModel
from scan import scan_chunked
from train import Config, train

MARGIN = 0.5  # by which the logit of a correct answer must exceed all others
QUESTION = 9  # tokens of a reveal up to the blank: `>>> print('b', b)`, the line's end, and `b `


# --- 1. The machine, which is put in --------------------------------------------------------------
#
# For each variable x, S has a row x and a row x', number n + x. Between lines, x holds the value of
# x, one-hot. A mark is a token that is neither a name nor a value; each line begins with one. A
# step depends on its token, the last mark, its distance, and the name before that mark.

class Machine(nn.Module):
    """The mixer: S <- S + b (v - S^T k)^T, and then S^T q, with integers q, k, b, v.

    State: S, [B, 2n, n], and the last n tokens.
    """

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
        place = F.one_hot((at - last).clamp(max=n + 1), n + 2)[..., 1:-1]
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

    def __init__(self, task, d_model=32, machine=Machine):
        super().__init__(len(task.vocab), d_model, layers=1, conv_width=QUESTION,
                         make_mixer=lambda: machine(task))
        self.reader = nn.Linear(len(task.names), d_model, bias=False)
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
    """Prove the parameters of an Exact model.  Returns: what was tested (dict).  Raises: UserError.

    Theorem, for this file's Machine. Take any text of literals, reveals and full commands (all
    names, in order on the left, each once on the right), in any order, joined late or not. Let t[x]
    be the last value that a literal or a reveal gave to x, moved by the commands since: what Python
    has, unless a reveal lied. If certify accepts, the parameters predict t[x] at each reveal of an
    x that has it, in float32 on a CPU, in any pieces. (Where x has no t[x], nothing is claimed.)
    """
    machine = type(model.blocks[1])
    task = ReplTask(model.task.group)
    n = len(task.names)
    parameters = model.state_dict()
    model = Exact(task, model.embedding.embedding_dim, machine)  # whatever was done to the old one
    try:
        model.load_state_dict(parameters)
    except RuntimeError:
        raise UserError(f"these are not the parameters of Exact for {task.group.name}") from None
    products = torch.backends.mkldnn
    require({products.matmul.fp32_precision, products.conv.fp32_precision} <= {"none", "ieee"}
            and not torch.is_autocast_enabled("cpu"), "products have a reduced precision")     # (a)

    # In these n commands, each name is once in each right-hand place.
    orders = [[(i + s) % n for i in range(n)] for s in range(n)]
    S, _, alone, after = effect(model, list(map(task.command_line, orders)))
    moves = model.blocks[1].moves
    left = [moves(i) for i in range(n)]
    for s, order in enumerate(orders):
        right = [moves(i, y) for i, y in enumerate(order)]
        for rows, found in zip([{}, *left, {}, *right, {}], alone, strict=True):
            expected = S[:, s].clone()
            expected[:, [*rows]] = S[:, s, [*rows.values()]]
            require(torch.equal(found[:, s], expected), "a command does not make its moves")   # (d)
        require(torch.equal(after[:, s, :n], S[:, s, order]), "a command is not executed")     # (d)

    literals = [f">>> {x} = {value}\n" for x in task.names for value in task.values]
    reveals = [task.reveal_lines(x, value) for x in range(n) for value in range(n)]
    line = torch.arange(n * n)
    row = line // n  # x of each line
    for lines in (literals, reveals):
        S, reads, _, after = effect(model, lines)
        told = S[:, line, row]
        S[:, line, row] = torch.eye(n).repeat(n, 1)
        require(torch.equal(after[:, :, :n], S[:, :, :n]),
                f"{lines[0]!r}, or a line like it, is not the write of its value")             # (e)
    require(torch.equal(reads[QUESTION - 1], told), "a reveal does not read its row")          # (f)

    tokens = torch.tensor([task.encode(line) for line in reveals])
    question, value = tokens[:, :QUESTION], tokens[:, QUESTION:QUESTION + 1]
    logits, _ = model.stream(question, (None, (S[0], question[:, :0])))  # S[0]: row x alone
    others = logits[:, -1].scatter(1, value, -torch.inf).amax(1)
    margins = logits[:, -1].gather(1, value).squeeze(1) - others
    correct = int((margins > MARGIN).sum())  # NaN is not
    require(correct == n * n, f"only {correct} of {n * n} answers are correct by {MARGIN}")    # (g)
    return {"moves": n * n + n, "writes": 2 * n * n, "answers": correct,
            "margin": margins.min().item()}


def effect(model, lines):
    """Let the machine read lines from 0 and from both halves of I: they determine S -> A S + W.

    Returns: S [3, lines, 2n, n]; lists, the reads and each token's own effect; S after the lines.
    """
    machine = model.blocks[1]
    tokens = torch.tensor([model.task.encode(line) for line in lines]).repeat(3, 1)
    integers = machine.integers(tokens)
    q, k, b, v = [part.square().sum(-1) for part in integers]
    require(all(torch.equal(part, part.round()) for part in integers)
            and torch.equal((integers[1] * integers[2]).sum(-1), b)
            and (q <= 1).all() and (k <= 2 - v).all(), "q, k, b, v are not such integers")     # (b)

    # In one piece from the beginning, and token by token after the same lines.
    n = integers[3].shape[-1]
    basis = torch.stack([torch.zeros(2 * n, n), *torch.eye(2 * n).split(n, 1)])
    S = basis.repeat_interleave(len(lines), 0)
    _, (at_once, _) = machine(tokens, (S, tokens[:, :0]))
    state = S, tokens
    reads, alone = [], []
    for token in tokens.split(1, 1):
        alone.append(machine(token, (S, state[1]))[1][0].unflatten(0, (3, -1)))
        read, state = machine(token, state)
        reads.append(read[:, 0].unflatten(0, (3, -1)))
    require(torch.equal(state[0], at_once), "a line's steps depend on more than the line")     # (c)
    return S.unflatten(0, (3, -1)), reads, alone, at_once.unflatten(0, (3, -1))


def require(condition, otherwise):
    if not condition:
        raise UserError(otherwise)


# Proof, with (a) to (g) for the tests above.
#
# Nothing is rounded in S. Queries, keys and values are integers, |k|^2 <= 2, <= 1 where something
# is written, and k.b = |b|^2 (b). So b is 0, or k, or k without one of its two entries. So the rows
# of I - b k^T are 0 or one-hot, up to their sign, and so are those of products of such matrices,
# and of S. So no entry of (I + L)^-1, -k^T A ... A b, exceeds |k|_1 <= 2 (scan.py, section 5), and
# no sum in (5) to (9) there reaches 2^24. Float32 adds such integers exactly (a).
#
# By the code of `integers`, a step depends on its own line only (a reveal is one line), and the n
# tokens that are kept are enough (c): a line makes the same steps in every text. That of a name
# depends on its side of the `=`, its place and itself: the n commands of (d) have them all.
#
# Claim: between lines, row x is e_t[x] for each x that has a t[x]. A literal or a reveal writes
# this row and leaves the other rows of variables (e). In a command, the left-hand names swap all
# rows x and x'. Then the i-th right-hand name y swaps the rows x_i and y' (d). Each name is there
# once, so no other step of this half touches these two rows: x_i ends with what y began with.
#
# At the blank of a reveal the machine reads row x (f), and the local block sees QUESTION tokens,
# the question alone. So an answer depends on x and t[x]: n^2 cases, of which each is correct (g).
#
# Assumed: rounding outside S moves no difference of two logits by MARGIN. (Measured: 4e-6.)


# --- 3. The study ---------------------------------------------------------------------------------

SETTINGS = [*grid(group=["S5"], seed=range(320, 325)),
            *grid(group=["S3", "S4", "A5", "S6", "S10", "S26"], seed=[320])]
PATH = RESULTS / "models/exact-S5-seed0.pt"


def train_exact(group, seed, steps=300):
    """Train all but the machine. Two commands a trace are enough, since it needs no training."""
    torch.manual_seed(seed)
    task = ReplTask(Group(group))
    config = Config(curriculum=((2, 1),), final_steps=steps, average=False, seed=seed)
    return train(Exact(task), task, config, lr_scale=decaying)[0]


def run(setting, _):
    start = process_time()
    model = train_exact(**setting)
    row = {"cpu_seconds": process_time() - start}
    if setting == SETTINGS[0]:
        torch.save(model.state_dict(), PATH)
    row["results"] = [evaluate_stream(model, model.task, *test, traces=4) for test in TESTS]
    try:
        return row | certify(model)
    except UserError as error:
        return row | {"refused": str(error)}


STUDIES = [Study("exact", SETTINGS, run)]


def stored():
    """The task and the model of S5."""
    task = ReplTask(Group("S5"))
    model = Exact(task)
    model.load_state_dict(torch.load(PATH, weights_only=True))
    return task, model.eval()


# --- 4. The table and the command line ------------------------------------------------------------

def show():
    rows = records("exact")
    measured = ("moves", "writes", "answers", "margin", "cpu_seconds")
    table(f"{len(rows)} of {len(SETTINGS)} models: how many are proved, what was tested, the least "
          "margin\nof an answer; the training; and reveals correct in %", rows, ["group"], {
              "proved": lambda row: "refused" not in row,
              **{key: lambda row, key=key: row.get(key) for key in measured}, **by_test(TESTS)})


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0].startswith("-"):
        return chapter(__doc__, show, STUDIES, argv)
    parser = make_parser("Train a model of GROUP, prove it, and print the table of eval.py.")
    parser.add_argument("group", metavar="GROUP", help="S<n>, A<n>, Z<n> or D<n>, n up to 26")
    parser.add_argument("seed", metavar="SEED", nargs="?", type=int, default=0)
    model = train_exact(**vars(parser.parse_args(argv)))
    print("Proved (see certify): {moves} moves, {writes:,} writes, {answers} answers, by a margin "
          "of {margin:.1f}.".format(**certify(model)))
    print_table(evaluate_stream(model, model.task, *test, traces=4) for test in TESTS[::2])


if __name__ == "__main__":
    run_cli(main)
