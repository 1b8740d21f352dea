"""Can training alone end in a recurrence that can be proved?  Yes, if slots choose what they hold.

    at a token:         S[i] <- the token, or S[i]              for each slot i
    at a line's end:    S[i] <- the token, or S[j] for any j    for all slots at once

What is put in, for n variables: S has 3n slots. A slot holds a token or nothing, and only at a
line's end may it take what another slot holds. (So a row of a step's matrix is one-hot or 0, as in
PD-SSM, arXiv 2509.22284. This is no step of DeltaNet, and a loop runs over the tokens.) One more
choice is what to predict: what a slot holds, or a guess from the window, the last n + 1 tokens. The
logit of a choice is a sum with one term for each token of the window. At first, slots mostly keep
what they hold.

What is found, from next tokens: where a variable lives, which tokens are written, which slot takes
from which after a command, and what is read. In training the choices are random, and S is the
expected state. It is exact, as no choice depends on S. Training ends with a proof, or begins anew,
at most twice. If it shows 80 of the 120 commands of S5, it ends in a proof of all 120, on 3 of 3
seeds; with 60 shown, on 1 of 3; with 40 or 20, on none.

The finished model takes the likeliest choices. It cannot drift, since S holds 0 and 1, and a choice
only copies a row. It remains to prove that it chooses correctly in every text. A choice is safe if
its logit leads all others in the worst text. That text is a shortest path of lines, back from the
token at hand, where a line costs the least that its tokens can add to the lead.

A command has n places on the right, and n names for each. If the slot of each place gets the value
of its name, whatever the other names, then n^2 cases prove all n! commands (`certify`).

    python -m experiments.found [--run]      the table; --run: a minute per missing run
    python -m experiments.found S5 [SEED]    train, prove, print the machine: half a minute

Source: ours.
Next: copies.py.
"""

import sys
from functools import cache
from time import process_time

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from data import Group, ReplTask, UserError, generator, make_parser, run_cli
from experiments import RESULTS, Study, chapter, grid, records, table
from experiments.exact import require

GAP = 0.02  # by which the logit of a choice must exceed all others
PRICE = 0.005  # of a slot that changes at a token, so that slots which are not needed rest
STEPS = 150  # of training, for each variable, before it begins anew


# --- 1. The model ---------------------------------------------------------------------------------

class Found(nn.Module):
    """State: the last n tokens [B, n], and S [B, slots, vocab]."""

    def __init__(self, task):
        super().__init__()
        self.n, self.vocab, self.end = len(task.names), len(task.vocab), task.ids["\n"]
        self.slots = 3 * self.n

        # For each distance and each token there (the last one: none yet), a term of each logit.
        # Choice 0 of a slot is the token, and choice 1 + j is what slot j holds.
        shape = self.n + 1, self.vocab + 1
        self.take = nn.Parameter(0.1 * torch.randn(*shape, self.slots, 1 + self.slots))
        self.read = nn.Parameter(0.1 * torch.randn(*shape, 1 + self.slots))  # 0: none
        self.say = nn.Parameter(0.1 * torch.randn(*shape, self.vocab))  # then it says this

        own = torch.eye(1 + self.slots)[1:]
        self.take.data[0] += 3 * own  # at first, a slot mostly keeps what it holds
        self.take.data[0, self.end] += 2 * own
        self.register_buffer("others", 1 - own > 0, persistent=False)
        self.others[:, 0] = False

    def choose(self, z):
        """One-hot in the finished model; in training, a distribution."""
        return z.softmax(-1) if self.training else F.one_hot(z.argmax(-1), z.shape[-1]).to(z)

    def stream(self, tokens, state=None):
        past, S = state or (tokens.new_full((len(tokens), self.n), self.vocab),
                            self.take.new_zeros(len(tokens), self.slots, self.vocab))
        past = torch.cat([past, tokens], 1)
        window = past.unfold(1, self.n + 1, 1).flip(-1)  # [B, T, n + 1], the token at hand first

        within = (tokens != self.end)[..., None, None]
        logits = add_terms(self.take, window).masked_fill(within & self.others, -torch.inf)
        take, read = self.choose(logits), self.choose(add_terms(self.read, window))
        self.changes = (1 - take.diagonal(1, -2, -1)).sum(-1).mean()  # slots, at a token

        write = take[..., :1] * F.one_hot(tokens, self.vocab).to(S).unsqueeze(2)
        states = []
        for write_t, take_t in zip(write.unbind(1), take[..., 1:].unbind(1)):
            S = torch.baddbmm(write_t, take_t, S)  # write_t + take_t @ S
            states.append(S)
        told = (read[..., None, 1:] @ torch.stack(states, 1)).squeeze(-2)
        p = told + read[..., :1] * add_terms(self.say, window).softmax(-1)
        return (p + 1e-6).log(), (past[:, -self.n:].clone(), S)


def add_terms(terms, window):
    """terms [distance, token, *logits], window [..., distance] -> sums [..., *logits]."""
    rows = window + terms.shape[1] * torch.arange(len(terms))
    sums = F.embedding_bag(rows.flatten(0, -2), terms.flatten(0, 1).flatten(1), mode="sum")
    return sums.view(*window.shape[:-1], *terms.shape[2:])


# --- 2. Training ----------------------------------------------------------------------------------

def train_found(group, seed, shown="all", tries=3):
    """Train until there is a proof, or anew from other parameters.  Returns: task, model, log.

    shown: "all" commands, so many of them (drawn once), or "copies": any names on the right.
    """
    torch.manual_seed(seed)
    task = ReplTask(Group(group))
    n, log, draw = len(task.names), [], drawer(task.group, shown, seed)
    batch, length = 16, 40 * n
    steps = (2 * STEPS if shown == "copies" else STEPS) * n  # copies lose values to learn from
    for step in range(tries * steps):
        if step % steps == 0:
            model = Found(task)
            averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.9, 0.95))

        rng = generator(seed, "train", step)
        tokens = torch.tensor([session(task, length, draw, rng) for _ in range(batch)])
        logits, _ = model.stream(tokens[:, :-1])
        losses = F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
        answers = losses[tokens[:, :-1] == task.ids[" "]].mean()
        optimizer.zero_grad()
        (losses.mean() + answers + PRICE * model.changes).backward()
        optimizer.step()
        averaged.update_parameters(model)

        if step % 20 == 19:
            log.append({"steps": step + 1})
            try:
                log[-1] |= certify(averaged.module, task, shown == "copies")
                break
            except UserError as error:
                log[-1]["refused"] = str(error)
    return task, averaged.module.eval(), log


def drawer(group, shown, seed):
    """A function that draws the right-hand side of a command."""
    if shown == "copies":
        return lambda rng: rng.integers(group.degree, size=group.degree).tolist()
    if shown == "all":
        return lambda rng: group.draw((1,), rng)[0].tolist()
    part = generator(seed, "split").permutation(group.elements)[:shown]
    return lambda rng: rng.choice(part).tolist()


def session(task, length, draw, rng):
    """So many tokens and one, joined late: as many commands as literals and as reveals."""
    n, program = len(task.names), []
    for kind, x, v in rng.integers([3, n, n], size=(length // 5 + 1, 3)).tolist():
        program.append([("command", draw(rng)), ("literal", x, v), ("reveal", x)][kind])
    values = rng.integers(n, size=n).tolist()
    text = task.trace(program, values).removeprefix(task.start_lines(values))
    return task.encode(text)[:length + 1]


# --- 3. The certificate ---------------------------------------------------------------------------

@torch.no_grad()
def certify(model, task, copies=False):
    """Prove a Found model.  Returns: the slots of the variables; choices tested; the least lead.

    Theorem. What exact.certify proves holds for model.eval(), if a text begins with a prompt; with
    copies, it holds for any names on the right.  Raises: UserError.
    """
    require(all((terms.abs() < 100).all() for terms in model.parameters()),
            "a parameter is 100 or more, or not a number")
    n, leads = model.n, []

    # A line (a reveal and its output are one) is a list: the tokens that may be in each place.
    def line(texts):
        return [torch.tensor(sorted({*tokens})) for tokens in zip(*map(task.encode, texts))]

    def tells(write, *variables):
        return line(write(x, v) for x in variables for v in range(n))

    commands = [task.command_line(n * [y]) for y in range(n)]  # a, b, c = b, b, b
    kinds = [line(commands), tells(task.literal_line, *range(n)),
             tells(task.reveal_lines, *range(n)),
             (n + 1) * [torch.tensor([model.vocab])]]  # before a text begins

    def chooser(terms):
        """A function of a line, or of its beginning: the choice that leads at its last token, in
        the worst window, and so in all of them.  terms [distance, token, choice]"""
        over = terms.double().unsqueeze(-1) - terms.double().unsqueeze(-2)  # [..., choice, other]

        def least(line, d=0):
            """The least leads, if the line ends at distance d, whatever is before it."""
            here = sum(terms[tokens].amin(0) for terms, tokens in zip(over[d:], line[::-1]))
            return here + before(d + len(line))

        @cache
        def before(d):
            return 0 if d > n else torch.stack([least(kind, d) for kind in kinds]).amin(0)

        def choose(line):
            lead, choice = least(line).fill_diagonal_(torch.inf).amin(-1).max(-1)
            require(lead > GAP, f"a choice leads by only {lead:.2g}")
            leads.append(lead.item())
            return choice.item()
        return choose

    ask = chooser(model.read)
    at_end = [chooser(model.take[:, :, i]) for i in range(model.slots)]
    within = [chooser(model.take[:, :, i, [0, 1 + i]]) for i in range(model.slots)]

    def origin(line, slot):
        """The slot that, before a line, held what this slot holds after it; or the place in the
        line where it comes from (-1: the end, -2: the value)."""
        for end in range(len(line), 0, -1):
            if line[end - 1].tolist() == [model.end]:
                choice = at_end[slot](line[:end])
            else:
                choice = within[slot](line[:end]) and 1 + slot
            if choice == 0:
                return end - 1 - len(line)
            slot = choice - 1
        return slot

    # A claim (slot, x): between lines, this slot holds t[x], if x has it. What is claimed after a
    # line is traced back to claims before it.
    claims = []

    def claim(slot, x):
        require(slot >= 0, f"{task.names[x]} gets a token that is not its value")
        if (slot, x) not in claims:
            claims.append((slot, x))

    for x in range(n):
        question = tells(task.reveal_lines, x)[:-2]  # up to the blank
        choice = ask(question)
        require(choice > 0, f"no slot is read for {task.names[x]}")
        claim(origin(question, choice - 1), x)
    for slot, x in claims:
        for y in range(n):
            for write in task.literal_line, task.reveal_lines:
                source = origin(tells(write, y), slot)
                if x == y:
                    require(source == -2, f"{task.names[x]} does not get its value")
                else:
                    claim(source, x)

            # A command has y on the right, in the place of x.
            command = line(commands if copies else commands[:y] + commands[y + 1:])
            command[n + 2 + x] = line(commands[y:y + 1])[n + 2 + x]
            claim(origin(command, slot), y)
    return {"slots": [slot for slot, _ in claims[:n]], "choices": len(leads), "gap": min(leads)}


# Proof. A logit is a sum of terms, one for each of the last n + 1 tokens. For each two choices,
# `least` takes the least difference of their logits over all windows that lines, and the start of a
# text, can make (and over more: each place has its own minimum). So in all texts the choices of
# `origin` and `ask` are these. Float32 adds at most 27 parameters below 100, each with an error of
# at most 2^-13, so it moves no difference by .007. One-hot choices copy tokens: S is never rounded.
#
# All claims hold between lines, by induction; at first no x has a t[x]. A literal or a reveal of x
# puts its value into each slot for which t[x] is claimed. Else such a slot ends the line with what
# some slot had before it: one for which t[x] is claimed or, after a command, t[y], where y is the
# right-hand name in the place of x. (The cases of all y are all commands.) At the blank of a reveal
# of x, p is 1 for what such a slot held before that line, and 0 elsewhere.


# --- 4. The study, the table and the command line -------------------------------------------------

SETTINGS = [*grid(group=["S5", "S3"], shown=["all"], seed=range(400, 410)),
            *grid(group=["S4", "A5", "S6"], shown=["all"], seed=range(400, 403)),
            *grid(group=["S5", "S3"], shown=["copies"], seed=range(400, 403)),
            *grid(group=["S5"], shown=[80, 60, 40, 20], seed=range(400, 403))]
PATH = RESULTS / "models/found-S5-seed400.pt"


def run(setting, _):
    start = process_time()
    task, model, log = train_found(**setting)
    if setting == SETTINGS[0]:
        torch.save(model.state_dict(), PATH)
    return log[-1] | {"cpu_seconds": process_time() - start}


STUDIES = [Study("found", SETTINGS, run)]


def stored():
    """The task and the model of S5."""
    task = ReplTask(Group("S5"))
    model = Found(task)
    model.load_state_dict(torch.load(PATH, weights_only=True))
    return task, model.eval()


@torch.no_grad()
def machine(model, task):
    """What the slots of the variables hold after each line of a short text, line by line."""
    rotation = [*range(1, model.n), 0]
    text = task.trace([("command", rotation), ("reveal", 0)], rotation)
    slot, state = certify(model, task)["slots"], None
    for line in text.splitlines(keepends=True):
        _, state = model.stream(torch.tensor([task.encode(line)]), state)
        held = [task.vocab[row.argmax()] if row.any() else "-" for row in state[1][0, slot]]
        yield f"{line.strip():{6 * model.n + 8}}" + " ".join(f"{token:>2}" for token in held)


def show():
    table("How many models are proved; the training; choices tested, and the least lead",
          records("found"), ["group", "shown"], {"proved": lambda row: "gap" in row} | {
              key: lambda row, key=key: row.get(key)
              for key in ("steps", "cpu_seconds", "choices", "gap")}, digits=2)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0].startswith("-"):
        return chapter(__doc__, show, STUDIES, argv)
    parser = make_parser("Train a model of GROUP, prove it, and print the machine.")
    parser.add_argument("group", metavar="GROUP", help="S3, S5, A5, ...")
    parser.add_argument("seed", metavar="SEED", nargs="?", type=int, default=0)
    task, model, log = train_found(**vars(parser.parse_args(argv)))
    print("Proved after {steps} steps: {choices:,} choices lead, each by {gap:.2f} or more.\n"
          "The variables live in the slots {slots}.\n".format(**log[-1] | certify(model, task)),
          *machine(model, task), sep="\n")


if __name__ == "__main__":
    run_cli(main)
