"""Which head tracks, and what does it hold?

Finding, on the five stored models of S5. One head of four tracks, with beta near 2 at all five
right-hand names of a command. Where beta is narrowed to 1.8 in this head, four models lose 28 to
41% of the reveals at (64,2), and the fifth one loses 1%; in another head it costs nothing. The keys
of this head are not in general those of the swap machine that scan.py builds by hand: their inner
products correlate by .53 to .88. Nor do they lie in fewer dimensions than those of other heads, as
the paper's do: 7 or 8 principal components hold 95% of them, and 7 to 9 those of others. Its states
do: 16 components against 19 to 69. For what the head holds is a linear image of the permutation,
and has (5 - 1)^2 directions. A linear map reads the permutation off all states at 64 commands, and
off few at 512, where the state has drifted. Three runs of train.py with fresh seeds, 100 to 102,
are alike: one head tracks, narrowed it loses 10, 38 and 43%, its keys take 7 or 8 components, and
its states 16.

Commands:
    python -m experiments.inside                 the five stored models
    python -m experiments.inside DIR ...         other run folders of a linrnn, with full commands
    python -m experiments.inside --movie         the picture of README that moves

Source: Siems et al. 2026 (arXiv 2602.14814), figure 5 for beta and the principal components, and
figure 6 for the intervention.
The rest is this project's.

Next: beliefs.py.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.animation import PillowWriter

from data import Parser, UserError, draw_commands, generator, run, run_commands
from eval import evaluate, load
from experiments import RESULTS, span, table
from experiments.plots import BLUE, GREY, ORANGE, canvas, draw, ticks_at
from models import DeltaBlock
from scan import delta_product, delta_rule_chunked, exchange_key, swap_machine_keys

STORED = [RESULTS / f"models/linrnn-S5-seed{seed}" for seed in range(5)]

# --- 1. Which head tracks -------------------------------------------------------------------------
#
# A head is named by a pair (entry, head). The entry is the place of its block in model.blocks, and
# in the state that model.stream returns. After one local block the entry of the first layer is 1.


def tracking_heads(model, task):
    """The heads that hold the state: [(entry, head)], those of moving_heads that do so alone.

    A head may keep and move something that tells nothing of the permutation. So a head counts if
    the permutation is read off its state (fit_image). Where no head can do that alone, all count
    that move, because they may hold the permutation together.
    """
    moving = moving_heads(model, task)
    alone = []
    for head in moving:
        try:
            fit_image(model, task, [head])
            alone.append(head)
        except Untracked:
            pass
    return alone or moving


@torch.no_grad()
def moving_heads(model, task):
    """The heads that keep what they held before a trace, and move it: [(entry, head)].

    Start at S = I and write nothing. Then the scan returns the product P of its steps. E|P|^2 -
    |E P|^2, over random traces, counts the directions that are kept and moved. The count is 0 for a
    head that forgets, where P = 0, and for one that merely remembers, whose P is always the same.
    """
    commands = draw_commands(task.group, task.commands, (64, 32), generator(0, "valid", 32, 32))
    tokens, begin = write_lines(task, commands)

    found = []
    for entry, inputs in scan_inputs(model, tokens).items():
        q, k, _, beta = [x[:, :, begin:] for x in inputs]
        eye = torch.eye(k.shape[-1]).to(k).expand(*k.shape[:2], -1, -1)
        _, P = delta_product(q, k, torch.zeros_like(k), beta, eye)
        moved = P.square().sum((-2, -1)).mean(0) - P.mean(0).square().sum((-2, -1))
        found += [(entry, head) for head in (moved > 0.25).nonzero().flatten().tolist()]
    return found


def write_lines(task, commands):
    """Traces of these commands [B, L, n] without a reveal: tokens [B, T], where the commands begin.
    """
    lines = task.command_tokens(commands).reshape(len(commands), -1)
    start = np.tile(task.start_tokens(), (len(commands), 1))
    return torch.from_numpy(np.hstack([start, lines])), start.shape[1]


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

def in_commands(model, task, entry):
    """What a block does at each token of 1,024 commands; of several writes of a token, the first.

    Shapes: commands [N, n], an array; keys [N, line, H, K]; mean betas [H, line], an array.
    """
    commands = draw_commands(task.group, task.commands, (16, 64), generator(0, "valid"))
    tokens, begin = write_lines(task, commands)
    _, k, _, beta = scan_inputs(model, tokens)[entry]
    k = k[..., begin:, 0, :].transpose(1, 2)  # [B, T, H, K]
    beta = beta[..., begin:, 0]  # [B, H, T]

    keys = k.unflatten(1, (64, -1)).flatten(0, 1)
    return commands.reshape(len(keys), -1), keys, beta.unflatten(2, (64, -1)).mean((0, 2)).numpy()


def right_hand_keys(commands, keys):
    """A head's mean key where the name y stands as i-th on the right: [n, n, K] (place i, name y).

    k and -k make the same step: the mean is the unit vector closest to the keys up to their signs.
    Shapes: commands [N, n]; keys [N, n, K], those at the right-hand names.
    """
    n = commands.shape[1]
    mean = torch.empty(n, n, keys.shape[-1])
    for i, y in np.ndindex(n, n):
        there = keys[commands[:, i] == y, i]
        mean[i, y] = torch.linalg.svd(there, full_matrices=False).Vh[0]
    return mean


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


def components(vectors, share=0.95):
    """How many principal components hold this share of the squares of vectors, for each head.

    No mean is taken off the vectors, so that their signs do not matter.
    Shapes: vectors [N, H, K] -> an array of integers [H].
    """
    squares = torch.linalg.svdvals(vectors.double().transpose(0, 1)).square()
    held = squares.cumsum(-1) / squares.sum(-1, keepdim=True)
    return (1 + (held < share).sum(-1)).numpy()


# --- 3. What a head is worth ----------------------------------------------------------------------

def intervene(model, task, entry, limits):
    """Accuracy at (64,2) with the beta of ONE head scaled from [0, beta_max] to [0, limit], the
    other heads as trained: [heads, limits].
    """
    block = model.blocks[entry]
    trained = block.beta_max
    accuracy = np.empty((block.heads, len(limits)))
    for head, i in np.ndindex(accuracy.shape):
        block.beta_max = torch.full((block.heads, 1, 1), float(trained))
        block.beta_max[head] = limits[i]
        accuracy[head, i] = evaluate(model, task, 64, 2, traces=8)["all"]
    block.beta_max = trained
    return accuracy


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
# with B_ij = k_i v_j^T. Rows and columns of P - 1/n sum to 0: only (n - 1)^2 directions of B count.
# A head may hold fewer, any that tell all elements apart. A trained Z7 holds 2, a circle.

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
        Y = states.flatten(-3).flatten(0, -2).double()  # [states, heads K V]

        average = X.mean(0)  # 1/n, up to the luck of the draw
        mean = Y.mean(0)
        B = torch.linalg.pinv(X - average) @ (Y - mean)
        inverse = torch.linalg.pinv(B, rtol=SHORTEST)
        sizes = torch.linalg.svdvals(B)
        self.sizes = sizes[sizes > SHORTEST * sizes[0]]

        # Reading and writing are as precise as the model.
        self.average, self.mean, self.B, self.inverse = [
            part.to(states.dtype) for part in (average, mean, B, inverse)]

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
    each = torch.arange(len(left))
    found = torch.empty(len(left), n, dtype=torch.long)
    for _ in range(n):
        i, j = torch.unravel_index(left.flatten(1).argmax(1), (n, n))
        found[each, i] = j
        left[each, i] = -torch.inf
        left[each, :, j] = -torch.inf
    return found.view(P.shape[:-1])


class Untracked(UserError):
    """The heads do not hold a state of the group: the model has not learned it."""


def fit_image(model, task, heads):
    """The LinearImage of these heads, and a dict of how well it holds on 16 fresh traces.

    The residual is what the image leaves of the fresh states, as a share of their spread.
    Raises: Untracked if fewer than 95% of the fresh states are read as the permutation they hold.
    """
    if not heads:
        raise Untracked("no head of this model tracks; `python eval.py DIR` evaluates it alone")
    traces = max(64, task.group.degree**2 // 4)  # four states or more for each direction
    states, perms = collect_states(model, task, heads, traces + 16, 16, generator(0, "valid", 16))
    image = LinearImage(heads, states[:traces], perms[:traces])

    fresh = states[traces:]
    read = nearest(image.read(fresh)).numpy()
    right = (read == perms[traces:]).all(-1).mean()
    if right < 0.95:
        raise Untracked(f"the heads do not hold the permutation ({right:.0%} read): train longer")

    residual = (fresh - image.correct(fresh)).norm() / (fresh - fresh.mean((0, 1))).norm()
    return image, {"heads": heads, "directions": len(image.sizes), "residual": residual.item()}


def read_off(model, task, heads, lengths):
    """Share of the states off which the whole permutation is read, after each of these lengths.

    The image is fitted to 64 traces of 16 commands, and tried on 16 fresh traces.
    """
    fit = collect_states(model, task, heads, 64, 16, generator(0, "valid"))
    states, perms = collect_states(model, task, heads, 16, max(lengths), generator(0, "test"))
    read = nearest(LinearImage(heads, *fit).read(states)).numpy()
    right = (read == perms).all(-1).mean(0)
    return right[np.array(lengths) - 1]


def collect_states(model, task, heads, traces, length, rng):
    """What the heads hold once each command of fresh traces has settled, and the true permutations.

    Shapes: states [B, L, heads, K, V], a tensor; perms [B, L, n], an array.
    """
    # One command more than is read: the last one settles in the line after it.
    commands = draw_commands(task.group, task.commands, (traces, length + 1), rng)
    return settled_states(model, task, heads, commands), run_commands(commands[:, :length])


@torch.no_grad()
def settled_states(model, task, heads, commands):
    """What the heads hold once each of these commands but the last has settled.

    Shapes: commands [B, L + 1, n] -> [B, L, heads, K, V].
    """
    tokens, begin = write_lines(task, commands)
    count = commands.shape[1]
    line = (tokens.shape[1] - begin) // count
    settled = begin + settling_tokens(task) + line * np.arange(1, count)

    state = None
    states = []
    for piece in tokens.tensor_split(settled.tolist(), 1)[:-1]:
        _, state = model.stream(piece, state)
        states.append(read_heads(state, heads))
    return torch.stack(states, 1)


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

def swap_machine_errors(group, length, dtype, traces=2):
    """The swap machine of scan.py on random commands: what floating point leaves of it.

    Returns, after so many commands, the largest distance of an entry of S from its exact value, and
    the share of variables whose largest entry names the wrong value.
    """
    n = group.degree
    commands = group.draw((traces, length), generator(0, "test", 0))
    keys = swap_machine_keys(torch.from_numpy(commands)).to(dtype)
    nothing = keys.new_zeros(*keys.shape[:-1], n)
    start = torch.eye(2 * n, n, dtype=dtype).expand(traces, -1, -1)
    beta = keys.new_full(keys.shape[:-1], 2)

    # The scan computes in float32 at least. For a half type the reflections stand here, one by one,
    # and the state is rounded after each of them.
    if dtype in (torch.float32, torch.float64):
        _, state = delta_rule_chunked(keys, keys, nothing, beta, start)
    else:
        state = start
        for k_K1 in keys.float().unsqueeze(-1).unbind(-3):
            held = state.float()
            state = (held - 2 * k_K1 @ (k_K1.mT @ held)).to(dtype)

    exact = torch.from_numpy(run_commands(commands)[:, -1])
    ideal = F.pad(F.one_hot(exact, n), (0, 0, 0, n))  # empty spares below
    wrong = state[:, :n].argmax(-1) != exact
    return (state.double() - ideal).abs().max().item(), wrong.double().mean().item()


# --- 6. The table, and the pictures of the stored models ------------------------------------------

def show(folders=STORED):
    rows, parts = [], []
    for folder in folders:
        task, model = load(folder)
        heads = tracking_heads(model, task)
        if task.commands == "swap" or not heads:
            raise UserError(f"{folder} needs full commands, and a head that tracks")

        n = task.group.degree
        names = slice(n + 2, 2 * n + 2)  # after `>>> `, n names and ` = `
        for entry, head in heads:
            commands, keys, beta = in_commands(model, task, entry)
            beta = beta[:, names]
            right = 100 * intervene(model, task, entry, [1.8])
            read = 100 * read_off(model, task, [(entry, head)], [64, 512])
            others = np.arange(len(beta)) != head
            rows.append({
                "run": Path(folder).name, "head": f"{entry}:{head}",
                "beta": span([*beta[head]], 2), "of others": span([*beta[others].flat], 2),
                "likeness": f"{likeness(right_hand_keys(commands, keys[:, names, head])):.2f}",
                "narrowed": span([*right[head]]), "another": span([*right[others].flat]),
                "read at 64": f"{read[0]:.0f}", "at 512": f"{read[1]:.0f}"})

            every = [(entry, other) for other in range(len(beta))]
            states, _ = collect_states(model, task, every, 64, 16, generator(0, "valid"))
            states = (states - states.mean((0, 1))).flatten(-2).flatten(0, 1)  # [N, H, K V]
            of_keys = components(keys[:, names].flatten(0, 1))
            of_states = components(states)
            parts.append({
                "run": Path(folder).name, "head": f"{entry}:{head}",
                "keys": str(of_keys[head]), "of others": span([*of_keys[others]], 0),
                "states": str(of_states[head]), "those of others": span([*of_states[others]], 0)})

    table("Heads that track, as entry:head. Mean beta at the right-hand names of a command, and\n"
          "likeness of the keys there to the swap machine's, from 0 to 1; reveals right, %, with\n"
          "beta narrowed to 1.8 in this head or another; states that a linear map reads, %",
          rows, rows[0], {})
    table("Principal components for 95% of the keys of a head at the right-hand names, and of its\n"
          "states after 1 to 16 commands", parts, parts[0], {})


def stored(seed):
    """A stored model of S5, and its one head that tracks: task, model, entry, head."""
    task, model = load(STORED[seed])
    (entry, head), = tracking_heads(model, task)
    return task, model, entry, head


def picture():
    """The mean beta of the head that tracks, at each place of a command. Of five models."""
    betas = []
    for seed in range(5):
        task, model, entry, head = stored(seed)
        betas.append(in_commands(model, task, entry)[2][head])

    figure, ((axes,),) = canvas("Heads that track have β near 2, a reflection, at all right-hand "
                                "names", size=(9, 4))
    axes.imshow(betas, vmin=0, vmax=2, cmap="viridis", aspect="auto")
    for (y, x), value in np.ndenumerate(betas):
        colour = "black" if value > 1 else "white"
        axes.text(x, y, f"{value:.1f}", ha="center", va="center", color=colour)
    places = [">>>", *"abcde", "=", "1st", "2nd", "3rd", "4th", "5th", "newline"]
    axes.set(xticks=range(13), xticklabels=places, yticks=range(5), ylabel="seed",
             xlabel="the text of a line: five names, the sign =, the five names in a new order")
    return figure


def picture_of_worth():
    """Accuracy with the beta of one head narrowed; the permutation read off the state of heads."""
    limits = np.linspace(2, 1, 6)
    lengths = [1, 4, 16, 64, 256, 512]
    own, others, read, read_others = [], [], [], []
    for seed in range(3):
        task, model, entry, head = stored(seed)
        rest = [(entry, other) for other in range(4) if other != head]
        accuracy = intervene(model, task, entry, limits)
        own.append(accuracy[head])
        others.extend(np.delete(accuracy, head, 0))
        read.append(read_off(model, task, [(entry, head)], lengths))
        read_others.append(read_off(model, task, rest, lengths))

    figure, ((left, right),) = canvas(
        "Only the head that tracks needs its reflections; a linear map reads the\npermutation off "
        "this head, and off the others hardly ever", 1, 2, (9.5, 4.2))
    left.set(xlim=(2.03, 0.97), ylim=(0, 1.02), ylabel="prints right at (64,2)",
             xlabel="upper end of the β of one head")
    right.set(ylim=(-0.02, 1.02), xlabel="lines read", ylabel="whole permutation read off")
    draw(left, {"other heads": (limits, others, GREY), "tracking head": (limits, own, BLUE)}, 0.2)
    draw(right, {"other heads": (lengths, read_others, GREY),
                 "tracking head": (lengths, read, BLUE)}, 1 / 120, trained=64)
    ticks_at(right, [1, 4, 16, 64, 512])
    return figure


# --- 7. The picture that moves --------------------------------------------------------------------

def movie(path=RESULTS / "figures/reflections.gif"):
    """A program, token by token: its text, the table that a stored model's head holds, and beta."""
    figure, ((left, right),) = canvas(
        "A linear RNN reads a program. With β = 2 the names on the right take the values out\n"
        "of the table, and the names on the left of the next line put them into their new rows",
        1, 2, (10, 4.2), width_ratios=[1.4, 1])
    left.set_axis_off()
    right.set_xticks(range(5), "12345", fontsize=12)
    right.set_yticks(range(5), "abcde", fontsize=14)
    right.set(xlabel="value (circles: Python's own)", ylabel="variable")
    squares = right.imshow(np.eye(5), vmin=0, vmax=1, cmap="Greys")
    circles, = right.plot(range(5), "o", color=ORANGE, fillstyle="none", markersize=22, mew=3)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # from here on nothing moves by itself

    # A GIF has 256 colours. With few shades all fit, and a frame stores only what has changed.
    figure.set_agg_filter(lambda pixels, dpi: ((15 * pixels).round() / 15, 0, 0))

    # Three texts lie on one another: the lines that are read, the present line, the token.
    font = {"family": "monospace", "fontsize": 15, "va": "top"}
    done = figure.text(0.03, 0.82, "", color=GREY, **font)
    line = figure.text(0.03, 0.82, "", **font)
    here = figure.text(0.03, 0.82, "", color=BLUE, weight="bold", **font)
    caption = figure.text(0.03, 0.07, "", color=BLUE, fontsize=20)

    writer = PillowWriter(fps=4)
    with writer.saving(figure, path, dpi=80):
        for text, symbol, beta, held, values in while_reading(0, 3):
            start = text.rfind("\n") + 1  # of the present line
            above = "\n" * text.count("\n")
            done.set_text(text[:start])
            line.set_text(above + text[start:])
            here.set_text(above + " " * (len(text) - start) + symbol.replace("\n", "↵"))
            name = ", a reflection" if beta > 1.9 else ""
            caption.set_text(f"β = {beta:.1f}{name}")
            squares.set_data(held)
            circles.set_xdata(values)
            for label in right.get_yticklabels():
                label.set_color(BLUE if label.get_text() in symbol else "black")
            for _ in range(4 if symbol == " = " else 1):  # a pause where the table has settled
                writer.grab_frame()


@torch.no_grad()
def while_reading(seed, lines):
    """What the head that tracks holds after each token of a program of so many commands.

    It begins at the ` = ` of the first command, where the first values have settled, and ends where
    the last command has, at the ` = ` of one line more.
    Returns: a list of (text ahead, symbol, beta, P as read [n, n], Python's values [n]).
    """
    task, model, entry, head = stored(seed)
    heads = [(entry, head)]
    image = LinearImage(heads, *collect_states(model, task, heads, 64, 16, generator(0, "valid")))

    commands = draw_commands(task.group, task.commands, (1, lines + 1), generator(0, "test"))
    tokens, begin = write_lines(task, commands)
    symbols = [task.vocab[token] for token in tokens[0]]
    beta = scan_inputs(model, tokens)[entry][3][0, head, :, 0]
    n = task.group.degree
    values = [np.arange(n), *run_commands(commands)[0]]

    first = begin + settling_tokens(task) - 1
    _, state = model.stream(tokens[:, :first])
    found = []
    for t in range(first, first + lines * (2 * n + 3) + 1):
        _, state = model.stream(tokens[:, t:t + 1], state)
        held = image.read(read_heads(state, heads))[0]
        commands_done = symbols[begin:t + 1].count("\n")
        found.append(("".join(symbols[:t]), symbols[t], beta[t], held, values[commands_done]))
    return found


def main(argv=None):
    parser = Parser(__doc__, prog="python -m experiments.inside")
    parser.add_argument("runs", nargs="*", metavar="DIR",
                        help="run folders of a linrnn (the five stored models)")
    parser.add_argument("--movie", action="store_true", help="only make the picture that moves")
    args = parser.parse_args(argv)
    if args.movie and args.runs:
        parser.error("--movie shows a stored model, and reads no DIR")
    if args.movie:
        movie()
    else:
        show(args.runs or STORED)


if __name__ == "__main__":
    run(main)
