"""Must a linear recurrence drift?  No: integer keys make no errors, and that can be proved.

    >>> a, b, c = c, a, b     at the i-th left-hand name x_i:     swap the rows x_i and x_i' of S
                              at the i-th right-hand name y_i:    swap the rows y_i and x_i'
    >>> b = 3                 at a value, also in the output `b 3` of a reveal: write the row b'

What is put in: the swap machine of scan.py, in integers. With beta = 1, a key e_i - e_j swaps two
rows, a key e_i writes one, and a query e_i reads one. Float32 computes all that without rounding.
So nothing drifts, although the recurrence is as linear and as parallel as that of any DeltaNet.

What is learned: the language around the machine, and a reader that names the row it is handed. An
answer depends only on a variable and its value, so n^2 cases prove it. The theorem of `certify` is
about texts of any length, with literals anywhere, joined late, with false reveals (which the model
believes). It assumes that rounding outside S moves no difference of two logits by 0.5.

    python -m experiments.exact [--run]       the table; --run first makes what has no record
    python -m experiments.exact S4 [SEED]     train a model of S4, and prove it

Source: ours. (Trained, linear and exact as observed, without a proof: arXiv 2511.22751. By a
solver, for bounded lengths: arXiv 2605.24033.)
Next: copies.py.
"""

import sys
from time import process_time

import torch
import torch.nn.functional as F
from torch import nn

from data import Group, ReplTask, UserError, make_parser, run_cli
from eval import print_table
from experiments import RESULTS, Study, by_test, chapter, decaying, grid, percent, records, table
from experiments.plots import BLUE, SKY, canvas, draw_lines, ticks_at
from experiments.reading import evaluate_stream
from experiments.snap import TESTS
from models import LanguageModel
from scan import delta_rule_chunked
from train import Config, train

MARGIN = 0.5  # by which the logit of a correct answer must exceed all others
QUESTION = 9  # tokens of a reveal up to the blank: `>>> print('b', b)`, the line's end, and `b `


# --- 1. The machine, which is put in --------------------------------------------------------------
#
# For each variable x, S has a row x and a row x', number n + x. Between lines, x' holds the value
# of x, one-hot. A mark is a token that is neither a name nor a value; each line begins with one. A
# step depends on its token, the last mark, its distance, and the name before that mark.

class Machine(nn.Module):
    """The mixer: S <- (I - k k^T) S + k v^T, and then S^T q, with integers q, k, v.

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
        q, k, v = [part[:, past.shape[1]:] for part in self.integers(window)]
        read, S = delta_rule_chunked(q, k, v, k.new_ones(k.shape[:-1]), S)
        return read, (S, window[:, -v.shape[-1]:])

    def integers(self, tokens):
        """q [B, T, 2n], k [B, T, 2n] and v [B, T, n] of these tokens, [B, T]."""
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
        k = torch.cat([left + right, write - left - fetch], -1)
        ask = (tokens == self.blank).unsqueeze(-1) * before
        return F.pad(ask, (n, 0)), k, value


class Exact(LanguageModel):
    """embedding -> local block -> machine and reader -> MLP -> norm -> logits."""

    def __init__(self, task, d_model=32):
        super().__init__(len(task.vocab), d_model, layers=1, conv_width=QUESTION,
                         make_mixer=lambda: Machine(task))
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

    Theorem. Let t[x] be the last value that a literal or a reveal gave to x, moved by the commands
    since, t[x_i] <- t[y_i]: what Python has, unless a reveal lied. Where no value has come to x, it
    is untold, and nothing is claimed. Let certify accept the parameters of a model. In float32 on a
    CPU, Exact with these parameters predicts t[x] at each reveal of a told x: in any text of
    literals, full commands (all names, in order on the left, each once on the right) and reveals,
    in any order, joined late or not, in any pieces of one token or more.

    Proof, with (a) to (g) for the tests below. Queries, keys and values are integers; |k|^2 <= 2,
    and <= 1 where something is written (b). So I - k k^T has rows that are 0 or one-hot, up to
    their sign. So have products of such matrices, and S. So no entry of (I + L)^-1 exceeds 2, the
    most that |k|_1 can be (scan.py, section 5), and no sum in (5) to (9) there reaches 2^24.
    Float32 adds such integers exactly (a), in pieces of any size. By the code of `integers`, a step
    depends on tokens of its own line only, and the n that are kept are enough (c). So a line (a
    reveal is one) makes the same steps in every text.
    Claim: between lines, row x' is e_t[x] for each told x. A literal or a reveal writes this row,
    and leaves the other primed rows (e). In a command, the left-hand names swap all rows x and x'.
    Then the i-th right-hand name y swaps the rows y and x_i' (d). Each name is there once, so no
    other step of this half touches these two rows: x_i' ends with what y' began with.
    At the blank of a reveal the machine reads row x' (f), and the local block sees QUESTION tokens,
    the question alone. So an answer depends on x and t[x]: n^2 cases, of which each is correct (g).

    Assumed: rounding outside S moves no difference of two logits by MARGIN. (It rounds equal rows
    differently in products of different shapes: the logits of the stored model move by 4e-6.)
    """
    task = ReplTask(model.task.group)
    n = len(task.names)
    parameters = model.state_dict()
    model = Exact(task, model.embedding.embedding_dim)  # whatever else was done to the old one
    model.load_state_dict(parameters)
    products = torch.backends.mkldnn
    require({products.matmul.fp32_precision, products.conv.fp32_precision} <= {"none", "ieee"}
            and not torch.is_autocast_enabled("cpu"), "products have a reduced precision")     # (a)

    # In these n commands, each name is once in each right-hand place.
    commands = [task.command_line([(i + s) % n for i in range(n)]) for s in range(n)]
    left = [[(i, n + i)] * n for i in range(n)]
    right = [[((i + s) % n, n + i) for s in range(n)] for i in range(n)]
    S, _, after = effect(model, commands)
    for swaps, found in zip([[], *left, [], *right, []], after, strict=True):
        for s, (x, y) in enumerate(swaps):
            S[:, s, [x, y]] = S[:, s, [y, x]]
        require(torch.equal(found, S), "a command does not make its swaps")                    # (d)

    literals = [f">>> {x} = {value}\n" for x in task.names for value in task.values]
    reveals = [task.reveal_lines(x, value) for x in range(n) for value in range(n)]
    line = torch.arange(n * n)
    row = n + line // n  # x' of each line
    for lines in (literals, reveals):
        S, reads, after = effect(model, lines)
        told = S[:, line, row]
        S[:, line, row] = torch.eye(n).repeat(n, 1)
        require(torch.equal(after[-1][:, :, n:], S[:, :, n:]),
                f"{lines[0]!r}, or a line like it, is not the write of its value")             # (e)
    require(torch.equal(reads[QUESTION - 1], told), "a reveal does not read its row")          # (f)

    tokens = torch.tensor([task.encode(line) for line in reveals])
    question, value = tokens[:, :QUESTION], tokens[:, QUESTION:QUESTION + 1]
    logits, _ = model.stream(question, (None, (S[0], question[:, :0])))  # S[0]: row x' alone
    others = logits[:, -1].scatter(1, value, -torch.inf).amax(1)
    margins = logits[:, -1].gather(1, value).squeeze(1) - others
    correct = int((margins > MARGIN).sum())  # NaN is not
    require(correct == n * n, f"only {correct} of {n * n} answers are correct by {MARGIN}")    # (g)
    return {"swaps": n * n + n, "writes": 2 * n * n, "answers": correct,
            "margin": margins.min().item()}


def effect(model, lines):
    """Let the machine read lines from 0 and from both halves of I: they determine S -> A S + W.

    Returns: S [3, lines, 2n, n] before the lines; the reads and the S after each token, as lists.
    """
    machine = model.blocks[1]
    tokens = torch.tensor([model.task.encode(line) for line in lines]).repeat(3, 1)
    integers = machine.integers(tokens)
    q, k, v = [part.square().sum(-1) for part in integers]
    require(all(torch.equal(part, part.round()) for part in integers)
            and (q <= 1).all() and (k <= 2 - v).all(), "q, k and v are not such integers")     # (b)

    # In one piece from the beginning, and token by token after the same lines.
    n = integers[2].shape[-1]
    basis = torch.stack([torch.zeros(2 * n, n), *torch.eye(2 * n).split(n, 1)])
    S = basis.repeat_interleave(len(lines), 0)
    _, (at_once, _) = machine(tokens, (S, tokens[:, :0]))
    state = S, tokens
    steps = []
    for token in tokens.split(1, 1):
        read, state = machine(token, state)
        steps.append((read[:, 0].unflatten(0, (3, -1)), state[0].unflatten(0, (3, -1))))
    require(torch.equal(state[0], at_once), "a line's steps depend on more than the line")     # (c)
    return S.unflatten(0, (3, -1)), *zip(*steps)


def require(condition, otherwise):
    if not condition:
        raise UserError(otherwise)


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
    task.example = "a = 3"
    model = Exact(task)
    model.load_state_dict(torch.load(PATH, weights_only=True))
    return task, model.eval()


# --- 4. The table, the picture and the command line -----------------------------------------------

def show():
    rows = records("exact")
    measured = ("swaps", "writes", "answers", "margin", "cpu_seconds")
    table(f"{len(rows)} of {len(SETTINGS)} models: how many are proved, what was tested, the least "
          "margin\nof an answer; the training; and reveals correct in %", rows, ["group"], {
              "proved": lambda row: "refused" not in row,
              **{key: lambda row, key=key: row.get(key) for key in measured}, **by_test(TESTS)})


def picture():
    """The accuracy of S5 by length: as trained, projected (snap.py), and with integer keys."""
    lengths = [length for length, _ in TESTS]
    curves = {("integer keys", SKY): records("exact", group="S5"),
              ("projected", "black"): records("snap", reader="projected"),
              ("as trained", BLUE): records("snap", reader="alone")}
    found = {name: (lengths, [[percent(length)(row) for length in lengths] for row in rows], colour)
             for (name, colour), rows in curves.items() if rows}
    figure, ((axes,),) = canvas("Errors add up; a projection corrects them; integer keys make none")
    axes.set(ylim=(-2, 104), xlabel="commands in a trace", ylabel="accuracy in %")
    draw_lines(axes, found, 20, trained=64)
    ticks_at(axes, lengths)
    return figure


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0].startswith("-"):
        return chapter(__doc__, show, STUDIES, argv)
    parser = make_parser("Train a model of GROUP, prove it, and print the table of eval.py.")
    parser.add_argument("group", metavar="GROUP", help="S<n>, A<n>, Z<n> or D<n>, n up to 26")
    parser.add_argument("seed", metavar="SEED", nargs="?", type=int, default=0)
    model = train_exact(**vars(parser.parse_args(argv)))
    print("Proved for every text: {swaps} swaps, {writes:,} writes, {answers} answers, by a margin "
          "of {margin:.1f}.".format(**certify(model)))
    print_table([evaluate_stream(model, model.task, *test, traces=4) for test in TESTS[::2]])


if __name__ == "__main__":
    run_cli(main)
