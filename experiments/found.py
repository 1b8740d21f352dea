"""Can training alone end in a recurrence that can be proved?  Yes, if it chooses among integers.

    S <- S + p_r k_r (w_r v - S^T k_r)^T for each move r     k_r = e_i - e_j: swap slots i and j
                                                             k_r = e_i, w_r = 1: write v into i

What is put in: S has n slots, a slot holds a token, v is the token at hand, and a token takes one
of these n (n + 1) / 2 moves, or none. Which one, given the last n + 3 tokens, is learned from next
tokens alone. So training finds where a variable lives, which tokens write, which slot is read, and
which swaps execute a command (insertion: each name on the right fetches its value). In training,
p_r in p = softmax(W x) is a coin for move r, and S the expected state: a DeltaProduct, its keys
constant. The finished model takes the likeliest move: one step of DeltaNet, with beta = 1. Half of
the commands are drawn from those that it currently gets wrong. Training ends with a proof, or
begins anew: on S3 and S5, ten of ten seeds are proved, one of them at the second try.

It cannot drift, since float32 swaps and writes integers without rounding. It sees a window, so a
search through all its states proves all programs (`certify`). One model was right at every length
we tried, and had no proof: it fails after two reveals in a row, which its training had not shown.
Tests find what they ask; a proof asks everything. (Not covered: late joins, false reveals.) On S3,
two of three seeds are proved without commands drawn anew, and one of three with 2n slots.

    python -m experiments.found [--run]      the tables; --run first makes what has no record
    python -m experiments.found S3 [SEED]    train, prove, print the machine: half a minute

Source: ours. (Gumbel noise: arXiv 1611.01144; equal use, as in wav2vec 2.0: arXiv 2006.11477.)
Next: copies.py.
"""

import sys
from itertools import combinations
from time import process_time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import train
from data import Group, ReplTask, UserError, generator, make_parser, run_cli
from eval import print_table
from experiments import RESULTS, Study, by_test, chapter, grid, records, table
from experiments.exact import MARGIN, require
from experiments.reading import answers_correctly, evaluate_stream, read
from models import LanguageModel
from scan import delta_product, scan_chunked

GAP = 0.1  # by which the logit of a choice must exceed all others


# --- 1. The layer ---------------------------------------------------------------------------------

class Moves(nn.Module):
    """The mixer. A token takes a move, or none, and reads a slot.  State: S [B, slots, vocab]."""

    def __init__(self, d_model, slots, vocab, bound, noise):
        super().__init__()
        eye = torch.eye(slots)
        swaps = [eye[i] - eye[j] for i, j in combinations(range(slots), 2)]
        self.register_buffer("keys", torch.stack([*swaps, *eye]), persistent=False)
        self.register_buffer("writes", self.keys.sum(1, keepdim=True), persistent=False)  # 0 or 1
        self.bound, self.noise, self.eps = bound, noise, 1.0
        self.sizes = [1 + len(self.keys), slots]
        self.norm = nn.RMSNorm(d_model)
        self.project = nn.Linear(d_model, sum(self.sizes))
        nn.init.zeros_(self.project.bias)
        nn.init.constant_(self.project.bias[:1], 3)  # at first, a token takes no move
        self.out = nn.Linear(vocab, d_model, bias=False)

    def forward(self, x, v, state=None):
        self.chosen = [self.choose(z) for z in self.logits(x)]
        read, state = self.step(*self.chosen, v, state)
        return x + self.out(read), state

    def logits(self, x):
        """Of no move and of each move, and of each slot to read."""
        return self.project(self.norm(x)).split(self.sizes, -1)

    def choose(self, z):
        """One-hot in the finished model; in training, a distribution."""
        if not self.training:
            return F.one_hot(z.argmax(-1), z.shape[-1]).to(z)
        z = z - z.mean(-1, keepdim=True)  # with a bounded norm, each choice has a gradient
        z = z * self.bound / (self.bound**2 + z.square().sum(-1, keepdim=True)).sqrt()
        uniform = torch.rand_like(z).clamp(1e-9, 1 - 1e-7)
        return (z - self.noise * torch.log(-torch.log(uniform))).softmax(-1)

    def step(self, p, q, v, state=None):
        """p [B, T, 1 + moves], q [B, T, slots], v [B, T, vocab] -> what is read, and the state."""
        p = p[..., 1:]
        if not self.training:
            k = p @ self.keys
            return scan_chunked(q, k, k, p @ self.writes * v, state)
        keys = self.keys.expand(*p.shape, -1)
        read, state = delta_product(q, keys, self.writes * v.unsqueeze(-2), p, state)

        # Almost a unit vector, so uncertain contents can be read. Certain ones stay as they are.
        square = read.square().sum(-1, keepdim=True)
        return read * ((1 + self.eps) / (square + self.eps)).sqrt(), state


class Found(LanguageModel):
    """embedding -> local block -> moves -> MLP -> norm -> logits."""

    def __init__(self, task, spare=0, bound=8.0, noise=0.3):
        n, vocab = len(task.names), len(task.vocab)
        d_model = 2**(n + 2)  # 128 on S5: the window has many texts to tell apart
        super().__init__(vocab, d_model, layers=1, conv_width=n + 3,
                         make_mixer=lambda: Moves(d_model, n + spare, vocab, bound, noise))

    def stream(self, tokens, state=None):
        local_block, moves, mlp = self.blocks
        local, S = state or (None, None)
        x, local = local_block(self.embedding(tokens), local)
        x, S = moves(x, F.one_hot(tokens, moves.out.in_features).to(x), S)
        x, _ = mlp(x)
        return self.unembedding(self.norm(x)), (local, S)


# --- 2. Training ----------------------------------------------------------------------------------

# Commands, literals and reveals of a text; the price of a move; eps of what is read.
STAGES = [((0, 1, 3), 0.05, 0.01), ((2, 1, 2), 0.05, 0.01), ((4, 2, 3), 0.03, 0.1),
          ((8, 4, 5), 0.01, 1.0)]


def train_found(group, seed, tries=3, steps=2000, **changes):
    """Try until there is a proof, each time from new parameters.  Returns: task, model, log."""
    whole_log = []
    for attempt in range(tries):
        task, model, log = train_once(group, seed + 1000 * attempt, steps, **changes)
        whole_log += log
        if log[-1]["step"] <= steps:
            break
    return task, model, whole_log


def train_once(group, seed, steps, price=1, diversity=0.3, mining=0.5, **layer):
    """One try: train until there is a proof, or for `steps`.  Returns: task, model, log.

    price: a factor of that of a move.  diversity: what unequal use of the slots costs.
    mining: the fraction of commands drawn from those which the finished model got wrong lately.
    """
    torch.manual_seed(seed)
    task = ReplTask(Group(group))
    model = Found(task, **layer)
    moves = model.blocks[1]
    wrong = np.ones(task.group.order)  # how often each command was, lately
    config = train.Config(curriculum=[(commands, reveals) for (commands, _, reveals), *_ in STAGES],
                          final_steps=steps, batch=32, seed=seed)

    def draw(task, config, now, rng):
        counts, moves.price, moves.eps = STAGES[now.stage]  # for the loss, and for the layer
        odds = (1 - mining) / len(wrong) + mining * wrong / wrong.sum()
        return programs(task, config.batch, counts, odds, rng), True

    def loss(model, batch, config):
        value, metrics = train.loss(model, batch, config)
        p, q = moves.chosen
        writes, asked = p[..., -q.shape[-1]:], q * batch.reveals.unsqueeze(-1)
        value = value + price * moves.price * p[..., 1:].sum(-1).mean()
        return value + diversity * (unequal_use(writes) + unequal_use(asked)), metrics

    def schedule(config, now):
        proved = False
        if now.stage and now.stage_step and now.step % 20 == 0:
            bad = wrong_commands(model, task, generator(seed, "valid", now.step))
            wrong[:] = 0.8 * wrong + bad
            proved = not bad.any() and refusal(model, task) is None
            model.train()
        if proved:
            now.stage = len(STAGES) - 1  # this was the goal of all stages
        return 0 if proved or now.step > steps else min(1, (now.step + 1) / config.warmup)

    _, log = train.train(model, task, config, draw=draw, loss=loss, schedule=schedule)
    return task, model.eval(), log


def programs(task, batch, counts, odds, rng):
    """First lines with random values, then so many lines of each kind, in random order."""
    n, commands = len(task.names), task.group.elements.tolist()
    draw = {"command": lambda: [commands[rng.choice(len(odds), p=odds)]],
            "literal": lambda: rng.integers(n, size=2).tolist(),
            "reveal": lambda: rng.integers(n, size=1).tolist()}
    kinds = np.repeat([*draw], counts)
    return task.batch_of(task.trace([(kind, *draw[kind]()) for kind in rng.permutation(kinds)],
                                    rng.integers(n, size=n).tolist()) for _ in range(batch))


def unequal_use(p):
    """How unequally slots are used: the KL divergence from uniform of p [B, T, slots]."""
    use = p.sum((0, 1)) / p.sum()
    return (use * (len(use) * use + 1e-9).log()).sum()


def wrong_commands(model, task, rng):
    """Which commands the finished model gets wrong, each from random values: bool [order]."""
    commands = task.group.elements
    values = rng.integers(len(task.names), size=commands.shape)
    texts = [task.start_lines(v) + task.command_line(g) for v, g in zip(values, commands)]
    _, state = read(model.eval(), task, texts)
    return ~answers_correctly(model, task, state, np.take_along_axis(values, commands, 1)).all(1)


# --- 3. The certificate ---------------------------------------------------------------------------

@torch.no_grad()
def certify(model, task):
    """Prove a Found model.  Returns: what was visited (dict).  Raises: UserError.

    Theorem. Take any text that begins with the first lines (of all variables, in order, with any
    values), and goes on with full commands of the group, literals and true reveals, in any order
    and number. If certify accepts, model.eval() predicts the value of each reveal, in float32 on a
    CPU, in any pieces of one token or more, up to rounding outside S.
    """
    require(all((part.abs() < 100).all() for part in model.parameters()),
            "a parameter is 100 or more, or not a number")
    local_block, moves, _ = model.eval().blocks
    n, vocab, slots = len(task.names), len(task.vocab), moves.sizes[1]
    commands = torch.tensor(task.group.elements)
    x, v = torch.cartesian_prod(torch.arange(n), torch.arange(n)).T
    value = torch.tensor([task.ids[digit] for digit in task.values])[v]
    encode = lambda line, *about: torch.tensor([*map(task.encode, map(line, *about))])
    lines = {"command": (encode(task.command_line, commands), commands, None),
             "literal": (encode(task.literal_line, x, v), x, value),
             "reveal": (encode(task.reveal_lines, x, v), x, value)}
    blank = lines["reveal"][0][0].tolist().index(task.ids[" "])

    # A state: the number of first lines so far, the last n + 2 tokens, and the variable whose value
    # each slot holds, or n for anything else. Beside it, the state of the local block.
    start = 0, (), (n,) * slots
    found, todo = {start}, [(start, torch.zeros(n + 2, model.embedding.embedding_dim))]
    answers, margin, gap = 0, torch.inf, torch.inf
    while todo:
        (first, context, holds), local = todo.pop()
        S = F.pad(torch.eye(n + 1)[[*holds]], (vocab, 0))  # a column for each, beside the tokens
        follow = lines
        if first < n:  # the literal of this variable
            follow = {"literal": [part[n * first:][:n] for part in lines["literal"]]}
        for kind, (tokens, about, value) in follow.items():
            each = torch.arange(len(tokens))
            before = local.expand(len(each), -1, -1)
            h, after = local_block(model.embedding(tokens), before)
            logits = moves.logits(h)
            gap = min(gap, least_lead(logits[0]))

            # The moves of the line.
            p, q = map(moves.choose, logits)
            one_hot = F.pad(F.one_hot(tokens, vocab), (0, n + 1)).to(h)
            _, moved = moves.step(p, q, one_hot, S.expand(len(each), -1, -1))
            require(torch.equal(moved, F.one_hot(moved.argmax(-1), vocab + n + 1).to(h)),
                    "a line does not move rows of S, and tokens")
            held = moved[..., vocab:-1]
            if kind == "command":  # y gets the value of g[y]
                held = held.gather(2, about.unsqueeze(1).expand_as(held))
            else:
                known = held[each, :, about] if kind == "reveal" else 0
                held[each, :, about] = known + moved[each, :, value]
            held = torch.where(held.any(-1), held.argmax(-1), n).tolist()

            # The answers, if just the slots that hold this variable have its value.
            if kind == "reveal":
                gap = min(gap, least_lead(logits[1][:, blank]))
                values = S.T[vocab + about].unsqueeze(-1) * F.one_hot(value, vocab).unsqueeze(1)
                answer, _ = model.stream(tokens[:, :blank + 1], (before, values))
                others = answer[:, -1].scatter(1, value.unsqueeze(1), -torch.inf).amax(1)
                margins = answer[each, -1, value] - others
                right = margins > MARGIN
                require(right.all(), f"after {task.decode(context)!r}, "
                        f"{task.decode(tokens[right.int().argmin()])!r} is not predicted")
                margin = min(margin, margins.min().item())
                answers += len(each)

            for line, holds, local_after in zip(tokens.tolist(), held, after):
                state = min(first + 1, n), (*context, *line)[-n - 2:], (*holds,)
                if state not in found:
                    found.add(state)
                    todo.append((state, local_after))
    return {"states": len(found), "answers": answers, "margin": margin, "gap": gap}


def least_lead(logits):
    """The least lead of a choice.  Raises: UserError if it is no more than GAP."""
    first, second = logits.topk(2, -1).values.unbind(-1)
    lead = (first - second).min().item()
    require(lead > GAP, f"a choice leads by only {lead:.2g}")
    return lead


def refusal(model, task):
    """Why there is no proof, or None."""
    try:
        certify(model, task)
    except UserError as error:
        return str(error)


# Proof.
#
# Nothing is rounded in S. By the code of `step`, each token of the finished model swaps two rows of
# S, or writes itself into one, or does nothing. So rows stay one-hot (or 0, in the beginning), and
# float32 makes such steps exactly (the proof in exact.py).
#
# The moves of a line depend on it and on its context, the n + 2 tokens before it (all, in the
# beginning): the window ends there. So each line makes its moves of all texts in `certify`, on an S
# whose rows say whose value they hold. A command gives y the value of g[y], so what was called g[y]
# is called y. A literal of x ends what was called x; x is what it has told. So is what a true
# reveal of x has told. The search begins as texts do, and goes on with each line that may follow.
# So between the lines of every text, it has visited a state that is true of the text.
#
# There, a reveal of x was answered for each value, from an S in which only the slots of x hold it.
# The text reads the same row. It is one of x: another one would be the same for all n values, and n
# different answers could not be right. So it holds what it held there. All else at the blank
# depends on line and context alone, so the answer is the same: right.
#
# Assumed: rounding outside S moves no difference of two logits by GAP where a move or a slot is
# chosen, or by MARGIN where a token is. (Parameters are below 100. Measured: below 1e-4.)


# --- 4. The study ---------------------------------------------------------------------------------

CHANGES = {"no price": {"price": 0}, "no diversity": {"diversity": 0}, "no noise": {"noise": 0},
           "no bound": {"bound": 1e6}, "no mining": {"mining": 0}, "2n slots": {"spare": 3}}
SETTINGS = [*grid(group=["S3"], seed=range(360, 370), change=["none"]),
            *grid(group=["S5"], seed=range(363, 373), change=["none"]),
            *grid(group=["S4", "A5"], seed=range(360, 363), change=["none"]),
            *grid(group=["S3"], seed=range(360, 363), change=[*CHANGES])]
PATH = RESULTS / "models/found-S3-seed360.pt"
TESTS = [(64, 8), (256, 32), (1024, 128), (8192, 1024)]


def run(setting, _):
    start = process_time()
    change = setting["change"]
    options = CHANGES[change] | {"tries": 1, "steps": 1000} if change in CHANGES else {}
    task, model, log = train_found(setting["group"], setting["seed"], **options)
    ends = [row for row in log if row["finished"]]  # of the tries
    row = {"cpu_seconds": process_time() - start, "tries": len(ends),
           "steps": sum(end["step"] for end in ends), "tokens": sum(end["tokens"] for end in ends),
           "machine": [*machine(model, task)]}
    if setting == SETTINGS[0]:
        torch.save(model.state_dict(), PATH)
    row["results"] = [evaluate_stream(model, task, *test, traces=4) for test in TESTS]
    refused = refusal(model, task)
    return row | ({"refused": refused} if refused else certify(model, task))


STUDIES = [Study("found", SETTINGS, run)]


def stored():
    """The task and the model of S3."""
    task = ReplTask(Group("S3"))
    model = Found(task)
    model.load_state_dict(torch.load(PATH, weights_only=True))
    return task, model.eval()


@torch.no_grad()
def machine(model, task):
    """What the finished model does with a short text: yields a line for each line."""
    rotation = [*range(1, len(task.names)), 0]
    text = task.trace([("command", rotation), ("reveal", 0)], rotation)
    local_block, moves, _ = model.blocks
    slots = range(moves.sizes[1])
    names = ["", *[f"swaps {i} {j}" for i, j in combinations(slots, 2)],
             *[f"writes {i}" for i in slots]]
    local = S = None
    for line in text.splitlines(keepends=True):
        tokens = torch.tensor([task.encode(line)])
        h, local = local_block(model.embedding(tokens), local)
        p, q = map(moves.choose, moves.logits(h))
        _, S = moves.step(p, q, F.one_hot(tokens, len(task.vocab)).to(h), S)
        held = [task.vocab[row.argmax()].strip() if row.any() else "-" for row in S[0]]
        taken = [f"{task.vocab[token].strip(', ')!r} {names[move]}"
                 for token, move in zip(tokens[0], p[0].argmax(-1)) if move]
        yield f"{line.strip():36}{' '.join(held):16}{', '.join(taken)}".rstrip()


# --- 5. The tables and the command line -----------------------------------------------------------

def show():
    rows = records("found")
    measured = ("tries", "steps", "cpu_seconds", "states", "margin", "gap")
    columns = {"proved": lambda row: "refused" not in row,
               "million tokens": lambda row: row["tokens"] / 1e6,
               **{key: lambda row, key=key: row.get(key) for key in measured},
               **by_test(TESTS[1::2])}
    table("Trained from scratch: how many are proved; the least margin of an answer and of a "
          "choice;\nand reveals correct in % (chance 33.3, 25 or 20)",
          [row for row in rows if row["change"] == "none"], ["group"], columns)
    table("What each part is for, on S3", [row for row in rows if row["group"] == "S3"],
          ["change"], columns)
    print("\nA machine of S5: what its slots hold after each line, and which token makes which "
          "move\n", *records("found", group="S5")[0]["machine"], sep="\n")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0].startswith("-"):
        return chapter(__doc__, show, STUDIES, argv)
    parser = make_parser("Train a model of GROUP, prove it, and print the table of eval.py.")
    parser.add_argument("group", metavar="GROUP", help="S3, S4, S5, A5, ...")
    parser.add_argument("seed", metavar="SEED", nargs="?", type=int, default=0)
    task, model, _ = train_found(**vars(parser.parse_args(argv)))
    print("Proved (see certify): {answers:,} answers in {states} states, by a margin of "
          "{margin:.1f}.\n".format(**certify(model, task)))
    print(*machine(model, task), "\n(4 traces; the proof needs none)", sep="\n")
    print_table(evaluate_stream(model, task, *test, traces=4) for test in TESTS[::3])


if __name__ == "__main__":
    run_cli(main)
