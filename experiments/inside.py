"""Which head of a linear RNN tracks the state, with which beta and keys, and what does it hold?

Finding, on the five stored models of S5. One head of four tracks, with beta near 2 at all five
right-hand names of a command, and only this head needs its reflections. Its keys are not in general
those of the swap machine that scan.py builds by hand: their inner products correlate by .50 to .90.
What the head holds is a linear image of the permutation: a linear map reads it off all states at 64
commands, and off few at 512, where the state has drifted.

A head is named by a pair (entry, head). The entry is the place of its block in model.blocks, and in
the state that model.stream returns. Behind one local block the entry of the first layer is 1.

Commands, where DIR is a run folder, such as experiments/results/models/linrnn-S5-seed0:
    python -m experiments.inside                     the five stored models, a line each
    python -m experiments.inside DIR                 beta, keys, and what can be read off the state
    python -m experiments.inside DIR --intervene     accuracy with the beta of one head narrowed

Source: Siems et al. 2026 (arXiv 2602.14814), figure 5 for beta and figure 6 for the intervention.
The rest is this project's.

Next: beliefs.py.
"""

import sys

import numpy as np
import torch
import torch.nn.functional as F

from data import Parser, UserError, draw_commands, generator, run, run_commands
from eval import device_of, evaluate, load
from experiments import RESULTS, chapter, span, table
from experiments.plots import BLUE, GREY, canvas, draw, ticks_at
from models import DeltaBlock
from scan import (delta_product, delta_rule_chunked, delta_rule_recurrent, exchange_key,
                  swap_machine_keys)

# --- 1. Which head tracks -------------------------------------------------------------------------


@torch.no_grad()
def tracking_heads(model, task):
    """The heads that keep what they held before a trace, and move it: [(entry, head)].

    Start at S = I and write nothing. Then the scan returns the product P of its steps. E|P|^2 -
    |E P|^2, over random traces, counts the directions that are kept and moved. The count is 0 for a
    head that forgets, where P = 0, and for one that merely remembers, whose P is always the same.
    """
    tokens, _, begin = traces_of_commands(model, task, 64, 32, generator(0, "valid", 32, 32))

    found = []
    for entry, inputs in scan_inputs(model, tokens).items():
        q, k, _, beta = [x[:, :, begin:] for x in inputs]
        eye = torch.eye(k.shape[-1]).to(k).expand(*k.shape[:2], -1, -1)
        _, P = delta_product(q, k, torch.zeros_like(k), beta, eye)
        moved = P.square().sum((-2, -1)).mean(0) - P.mean(0).square().sum((-2, -1))
        for head in (moved > 0.25).nonzero().flatten().tolist():
            found.append((entry, head))
    return found


def all_heads(model):
    """The heads of all DeltaBlocks: [(entry, head)]. Other models have none."""
    found = []
    for entry, block in enumerate(model.blocks):
        if isinstance(block, DeltaBlock):
            found += [(entry, head) for head in range(block.heads)]
    return found


def traces_of_commands(model, task, traces, length, rng):
    """Random traces without a reveal: tokens [B, T], on the model's device; commands [B, L, n]; and
    the place of the first command, behind the lines `>>> a = 1`.
    """
    commands = draw_commands(task.group, task.commands, (traces, length), rng)
    lines = task.command_tokens(commands).reshape(traces, -1)
    start = np.tile(task.start_tokens(), (traces, 1))
    tokens = torch.from_numpy(np.hstack([start, lines]))
    return tokens.to(device_of(model)), commands, start.shape[1]


@torch.no_grad()
def scan_inputs(model, tokens):
    """What each DeltaBlock hands to its scan: {entry: (q, k, v, beta)}, shaped as in models.py."""
    x = model.embedding(tokens)
    found = {}
    for entry, block in enumerate(model.blocks):
        if isinstance(block, DeltaBlock):
            found[entry] = block.inputs_of_scan(x)
        x, _ = block(x)
    return found


# --- 2. Beta and keys, place by place -------------------------------------------------------------

def beta_by_place(model, task):
    """Mean beta at each place in the line of a command: [layers, heads, line]."""
    _, found = in_commands(model, task)
    return torch.stack([beta.mean(0).T for _, beta in found.values()]).cpu()


def right_hand_keys(model, task, entry, head):
    """A head's mean key where the name y stands as i-th on the right: [n, n, K] (place i, name y).

    k and -k make the same step: the mean is the unit vector closest to the keys up to their signs.
    """
    n = task.group.degree
    right = slice(n + 2, 2 * n + 2)  # `>>> `, n names, ` = `, n names
    tokens, found = in_commands(model, task)
    tokens = tokens[:, right]
    keys = found[entry][0][:, right, head]

    mean = torch.empty(n, n, keys.shape[-1])
    for i in range(n):
        for y, name in enumerate(task.names):
            symbol = task.vocab.index(name if i == 0 else f", {name}")
            there = keys[tokens[:, i] == symbol, i]
            mean[i, y] = torch.linalg.svd(there, full_matrices=False).Vh[0]
    return mean


@torch.no_grad()
def in_commands(model, task):
    """The tokens of 4,096 commands, and the key and the beta of each block at each token.

    Of a token with several writes the first is taken.
    Returns: tokens [commands, line], {entry: (k [commands, line, H, K], beta [commands, line, H])}.
    """
    tokens, _, begin = traces_of_commands(model, task, 64, 64, generator(0, "valid"))

    def by_line(x):  # [B, T, ...] -> [commands, line, ...]
        return x[:, begin:].unflatten(1, (64, -1)).flatten(0, 1)

    found = {}
    for entry, (_, k, _, beta) in scan_inputs(model, tokens).items():
        # [B, H, T, R, ...] -> [B, T, H, ...], of the first write.
        k = k[..., 0, :].transpose(1, 2)
        beta = beta[..., 0].transpose(1, 2)
        found[entry] = by_line(k), by_line(beta)
    return by_line(tokens), found


def likeness(keys):
    """How much right-hand keys [n, n, K] are like those of the swap machine: in [-1, 1].

    It is the correlation of all inner products, without their signs. The machine's keys,
    (e_i - e_y') / sqrt 2, meet at 60 degrees if they share the place or the name, else at 90. A
    rotation of all keys, or the sign of one, changes nothing. Random keys have 0.
    """
    n = len(keys)
    place, name = torch.cartesian_prod(torch.arange(n), torch.arange(n)).T
    products = []
    for k in (keys.double().flatten(0, 1), exchange_key(place, name + n, 2 * n)):
        products.append((k @ k.T).abs()[np.triu_indices(n * n, 1)])
    return torch.corrcoef(torch.stack(products))[0, 1].item()


# --- 3. What a head is worth ----------------------------------------------------------------------

def intervene(model, task, limits, traces=64):
    """Accuracy at (64,2) with the beta of ONE head scaled from [0, beta_max] to [0, limit], the
    other heads as trained: [layers, heads, limits].
    """
    accuracy = []
    for entry, head in all_heads(model):
        block = model.blocks[entry]
        trained = block.beta_max
        scaled = torch.full((block.heads, 1, 1), float(trained), device=device_of(model))
        block.beta_max = scaled
        for limit in limits:
            scaled[head] = limit
            accuracy.append(evaluate(model, task, 64, 2, traces)["all"])
        block.beta_max = trained
    return np.reshape(accuracy, (-1, block.heads, len(limits)))


# --- 4. The permutation in a state ----------------------------------------------------------------
#
# Let P be the n x n matrix with a 1 where variable i holds value j, and 0 elsewhere. Once a command
# has settled, what the tracking heads hold is a linear image of P:
#
#     S = mean + sum_ij (P_ij - 1/n) B_ij + noise                                               (1)
#
# Why. At the start a key k_j carries the value j: S = sum_j k_j v_j^T. Later nothing is written; a
# command moves the keys, A_g k_i = k_i' for the variable i' that is given what i held. (In the head
# built by hand, scan.py, k_i = e_i.) So after any commands S = sum_ij P_ij k_i v_j^T. This is (1),
# with B_ij = k_i v_j^T. Rows and columns of P - 1/n sum to 0, so only (n - 1)^2 directions of B
# count. All are of one length if keys and values are orthonormal.
#
# A smaller group spans fewer, such as Z_n n - 1. A head may hold fewer still: any that tell all
# elements apart. A trained Z7 holds 2 of 6, a circle.

SHORTEST = 0.25  # of the longest: a direction below is not used by the head, and read as noise


class LinearImage:
    """Equation (1), fitted by least squares, in float64, to states of these heads.

    Shapes: states [..., heads, K, V], a tensor; perms [..., n], an array.
    Attributes: heads; sizes, the lengths of the directions.
    """

    def __init__(self, heads, states, perms):
        self.heads = heads
        self.n = perms.shape[-1]
        P = F.one_hot(torch.from_numpy(perms), self.n)
        X = P.flatten(-2).flatten(0, -2).double()  # [states, n n]
        Y = states.flatten(-3).flatten(0, -2).cpu().double()  # [states, heads K V]

        average = X.mean(0)  # 1/n, up to the luck of the draw
        mean = Y.mean(0)
        B = torch.linalg.pinv(X - average) @ (Y - mean)
        inverse = torch.linalg.pinv(B, rtol=SHORTEST)
        sizes = torch.linalg.svdvals(B)
        self.sizes = sizes[sizes > SHORTEST * sizes[0]]

        # Reading and writing are done where, and as precisely as, the model computes.
        self.average, self.mean, self.B, self.inverse = [
            part.to(states.dtype).to(states.device) for part in (average, mean, B, inverse)]

    def read(self, states):
        """(S - mean) B^+, plus 1/n: [..., heads, K, V] -> P [..., n, n]."""
        P = (states.flatten(-3) - self.mean) @ self.inverse + self.average
        return P.unflatten(-1, (self.n, self.n))

    def correct(self, states):
        """The image of the nearest permutation, in place of each state: (1) without its noise."""
        perms = nearest(self.read(states))
        P = F.one_hot(perms, self.n).to(states).flatten(-2)
        return (self.mean + (P - self.average) @ self.B).view_as(states)


def nearest(P):
    """A permutation for each matrix: take the largest entry, cross out its row and column, again.

    If no entry is off by 1/2 from a permutation matrix, it is that one, and no other is as near.
    Shapes: P [..., n, n] -> [..., n].
    """
    n = P.shape[-1]
    left = P.clone().reshape(-1, n, n)
    each = torch.arange(len(left), device=P.device)
    found = torch.empty(len(left), n, dtype=torch.long, device=P.device)
    for _ in range(n):
        largest = left.flatten(1).argmax(1)
        i = largest // n
        j = largest % n
        found[each, i] = j
        left[each, i] = -torch.inf
        left[each, :, j] = -torch.inf
    return found.view(P.shape[:-1])


def read_off(model, task, heads, lengths, traces=64):
    """Share of the states off which the whole permutation is read, after each of these lengths.

    The image is fitted to 64 traces of 16 commands, and tried on fresh traces.
    """
    fit = collect_states(model, task, heads, 64, 16, generator(0, "valid", 16))
    longest = max(lengths)
    states, perms = collect_states(model, task, heads, traces, longest,
                                   generator(0, "test", longest))
    read = nearest(LinearImage(heads, *fit).read(states)).cpu().numpy()
    right = (read == perms).all(-1).mean(0)
    return right[np.array(lengths) - 1].tolist()


@torch.no_grad()
def collect_states(model, task, heads, traces, length, rng):
    """What the heads hold once each command of fresh traces has settled, and where the trace is.

    Shapes: states [B, L, heads, K, V], a tensor; perms [B, L, n], an array.
    """
    # One command more than is read: the last one settles in the line after it.
    tokens, commands, begin = traces_of_commands(model, task, traces, length + 1, rng)
    line = (tokens.shape[1] - begin) // (length + 1)
    begin += settling_tokens(task)

    _, state = model.stream(tokens[:, :begin])
    states = []
    for lines in tokens[:, begin:begin + length * line].split(line, 1):
        _, state = model.stream(lines, state)
        states.append(read_heads(state, heads))
    return torch.stack(states, 1), run_commands(commands[:, :length])


def settling_tokens(task):
    """Tokens of a line after which the command in the line before it is done: `>>> a, b, c = `.

    A network works late. The local block sees n + 3 tokens, so the names of one line still steer
    the steps of the next, up to the `=`. A swap is followed by no such fixed text: 0.
    """
    return 0 if task.commands == "swap" else task.group.degree + 2


def read_heads(state, heads):
    """The S of these heads, from the state of a stream: [B, heads, K, V]."""
    return torch.stack([state[entry][:, head] for entry, head in heads], 1)


def write_heads(state, heads, S):
    """The state of a stream with S [B, heads, K, V] in these heads. The given state is kept."""
    state = list(state)
    for i, (entry, head) in enumerate(heads):
        state[entry] = state[entry].clone()
        state[entry][:, head] = S[:, i]
    return state


# --- 5. The head built by hand --------------------------------------------------------------------

def swap_machine_errors(group, length, dtype, traces=4):
    """The swap machine of scan.py on random commands: what floating point leaves of it.

    Returns, after so many commands, the largest distance of an entry of S from its exact value, and
    the share of variables whose largest entry names the wrong value.
    """
    # The scan in chunks computes in float32 at least. The loop stays in bfloat16.
    scan = delta_rule_recurrent if dtype == torch.bfloat16 else delta_rule_chunked
    n = group.degree
    commands = group.draw((traces, length), generator(0, "test", 0))
    keys = swap_machine_keys(torch.from_numpy(commands)).to(dtype)
    nothing = keys.new_zeros(*keys.shape[:-1], n)
    start = torch.eye(2 * n, n, dtype=dtype).expand(traces, -1, -1)
    _, state = scan(keys, keys, nothing, keys.new_full(keys.shape[:-1], 2), start)

    exact = torch.from_numpy(run_commands(commands)[:, -1])
    ideal = F.pad(F.one_hot(exact, n), (0, 0, 0, n))  # empty spares below
    wrong = state[:, :n].argmax(-1) != exact
    return (state.double() - ideal).abs().max().item(), wrong.double().mean().item()


# --- 6. The stored models -------------------------------------------------------------------------

def stored(seed):
    """A stored model of S5, and its one head that tracks: task, model, entry, head."""
    task, model = load(RESULTS / f"models/linrnn-S5-seed{seed}")
    (entry, head), = tracking_heads(model, task)
    return task, model, entry, head


def show():
    rows = []
    for seed in range(5):
        task, model, entry, head = stored(seed)
        keys = right_hand_keys(model, task, entry, head)
        beta = beta_by_place(model, task)[0, :, 7:12]  # [heads, right-hand names]
        rows.append({"seed": seed, "head": head, "tracking head": beta[head].tolist(),
                     "other heads": np.delete(beta, head, 0).flatten().tolist(),
                     "keys": likeness(keys)})

    table("The stored models of S5: mean beta at the five right-hand names, and how much the keys\n"
          "there are like those of the swap machine, from 0 (random keys) to 1",
          rows, ["seed", "head"], {
              "beta": lambda rows: span(rows[0]["tracking head"], 2),
              "of the other heads": lambda rows: span(rows[0]["other heads"], 2),
              "likeness": lambda rows: f"{rows[0]['keys']:.2f}"})


def picture():
    """The mean beta of the head that tracks, at each place of a command. Of five models."""
    betas = []
    for seed in range(5):
        task, model, _, head = stored(seed)
        betas.append(beta_by_place(model, task)[0, head].numpy())

    figure, ((axes,),) = canvas("Heads that track have β near 2, a reflection, at all right-hand "
                                "names", size=(9, 4))
    image = axes.imshow(betas, vmin=0, vmax=2, cmap="viridis", aspect="auto")
    for (y, x), value in np.ndenumerate(betas):
        colour = "black" if value > 1 else "white"
        axes.text(x, y, f"{value:.1f}", ha="center", va="center", color=colour)
    places = [">>>", *"abcde", "=", "1st", "2nd", "3rd", "4th", "5th", "newline"]
    axes.set(xticks=range(13), xticklabels=places, yticks=range(5),
             yticklabels=[f"seed {seed}" for seed in range(5)],
             xlabel="the text of a command: five names, the sign =, the five names in a new order")
    figure.colorbar(image, label="mean β", ticks=[0, 1, 2])
    return figure


def picture_of_worth():
    """Accuracy with the beta of one head narrowed; the permutation read off the state of heads."""
    limits = np.linspace(2, 1, 6)
    lengths = [1, 4, 16, 64, 256, 512]
    own, others, read, read_others = [], [], [], []
    for seed in range(3):
        task, model, entry, head = stored(seed)
        rest = [other for other in all_heads(model) if other != (entry, head)]
        accuracy, = intervene(model, task, limits, traces=8)
        own.append(accuracy[head])
        others.extend(np.delete(accuracy, head, 0))
        read.append(read_off(model, task, [(entry, head)], lengths, traces=32))
        read_others.append(read_off(model, task, rest, lengths, traces=32))

    figure, ((left, right),) = canvas("Only the head that tracks needs its reflections; a linear "
                                      "map reads\nthe permutation off this head, and off the "
                                      "others hardly ever", 1, 2, (9.5, 4.2))
    left.set(xlim=(2.03, 0.97), ylim=(0, 1.02), ylabel="reveals right at (64,2)",
             xlabel="upper end of the β of one head")
    right.set(ylim=(-0.02, 1.02), xlabel="commands read", ylabel="whole permutation read off")
    draw(left, {"other heads": (limits, others, GREY), "tracking head": (limits, own, BLUE)}, 0.2)
    draw(right, {"other heads": (lengths, read_others, GREY),
                 "tracking head": (lengths, read, BLUE)}, 1 / 120, trained=64)
    ticks_at(right, lengths)
    return figure


# --- 7. The command line --------------------------------------------------------------------------

def of_run(argv):
    """The tables of one run."""
    parser = Parser(prog="python -m experiments.inside", description=__doc__.split("\n")[0])
    parser.add_argument("DIR", help="a run folder of a linrnn, made by train.py")
    parser.add_argument("--intervene", action="store_true",
                        help="accuracy with the beta of each head narrowed")
    args = parser.parse_args(argv)

    task, model = load(args.DIR)
    heads = all_heads(model)
    if not heads:
        raise UserError(f"{args.DIR}: only a linrnn has beta and keys")
    tracking = tracking_heads(model, task)
    names = [f"{entry}:{head}{'*' * ((entry, head) in tracking)}" for entry, head in heads]
    print("heads as entry:head; those with a * track")

    if args.intervene:
        limits = np.linspace(1, 0.5, 6) * model.blocks[heads[0][0]].beta_max
        accuracy = intervene(model, task, limits).reshape(len(heads), -1)
        print_table("accuracy at (64,2) with the beta of one head scaled to [0, limit]; "
                    f"chance {task.chance:.3f}", limits.round(2), zip(names, accuracy))
        return

    places = [">>>", "x", "y", "=", "y", "x", "newline"]
    if task.commands == "full":
        right = [f"{i + 1}. name" for i in range(task.group.degree)]
        places = [">>>", *task.names, "=", *right, "newline"]
    print_table("mean beta at each place of a command, over all names that stand there", names,
                zip(places, beta_by_place(model, task).flatten(0, 1).T))

    if task.commands == "full":
        for entry, head in tracking:
            r = likeness(right_hand_keys(model, task, entry, head))
            print(f"\nkeys of {entry}:{head}, correlation with the hand-built head: r = {r:.2f}")

    if tracking:
        lengths = [1, 4, 16, 64, 256, 512]
        print_table("share of states off which a linear map reads the whole permutation, by "
                    f"commands read; a guess has 1 / {task.group.order:,}", lengths,
                    [("share", read_off(model, task, tracking, lengths))])


def print_table(title, columns, rows):
    print(f"\n{title}\n" + " " * 10 + "".join(f"{column:>8}" for column in columns))
    for name, numbers in rows:
        print(f"{name:>10}" + "".join(f"{number:8.3f}" for number in numbers))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if {*argv} - {"-h", "--help"}:
        return of_run(argv)
    chapter(__doc__, show, commands={"DIR": of_run}, argv=argv)  # DIR: for its help


if __name__ == "__main__":
    run(main)
