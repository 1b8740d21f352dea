"""Which head of a linear RNN tracks the state, with which beta and keys, and what does it hold?

Finding, on the five stored models of S5. One head of four tracks, with beta near 2 at all five
right-hand names of a command, and only this head needs its reflections. Its keys are not in general
those of the swap machine that scan.py builds by hand: their inner products correlate by .50 to .90.
What the head holds is a linear image of the permutation: a linear map reads it off all states at 64
commands, and off few at 512, where the state has drifted.

A head is named by a pair (entry, head). The entry is the place of its block in model.blocks, and in
the state that model.stream returns. Behind one local block the entry of the first layer is 1.

Commands, where RUN is experiments/results/models/linrnn-S5-seed0 (some 20 seconds each):
    python -m experiments.inside RUN                 beta, keys, and what can be read off the state
    python -m experiments.inside RUN --intervene     accuracy with the beta of one head narrowed

Source: Siems et al. 2026 (arXiv 2602.14814), figure 5 for beta and figure 6 for the intervention.
The rest is this project's.

Next: beliefs.py.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F

from data import (UserError, WordTask, draw_commands, generator, one_line_errors, parse, run,
                  run_commands)
from eval import device_of, evaluate, load_run
from models import DeltaBlock
from scan import (delta_product, delta_rule_chunked, delta_rule_recurrent, exchange_key,
                  swap_machine_keys)


def load_repl_run(folder, device="cpu", words=False):
    """load_run, for a run on REPL traces, or on words if they are welcome.  Raises: UserError."""
    checkpoint, task, model = load_run(folder, device)
    name = checkpoint["config"]["format"]
    if name != "repl" and not (words and name == "word"):
        raise UserError("this chapter looks for the finitely many states of REPL traces; the run "
                        f"in {folder} was trained on the format {name}")
    return checkpoint, task, model


def traces_of_commands(model, task, traces, length, rng):
    """Random traces without a reveal: tokens [B, T], on the model's device; commands [B, L, n]; and
    the place of the first command, behind the lines `>>> a = 1`.
    """
    commands = draw_commands(task.group, task.commands, (traces, length), rng)
    if isinstance(task, WordTask):
        tokens, begin = task.group.index(commands), 0
    else:
        start = np.tile(task.start_tokens(), (traces, 1))
        lines = task.command_tokens(commands).reshape(traces, -1)
        tokens, begin = np.hstack([start, lines]), start.shape[1]
    return torch.from_numpy(tokens).to(device_of(model)), commands, begin


# --- Which head tracks ----------------------------------------------------------------------------

def all_heads(model):
    """The heads of all DeltaBlocks: [(entry, head)]. Other models have none."""
    found = []
    for entry, block in enumerate(model.blocks):
        if isinstance(block, DeltaBlock):
            found += [(entry, head) for head in range(block.heads)]
    return found


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


@torch.no_grad()
def tracking_heads(model, task):
    """The heads that keep what they held before a trace, and move it: [(entry, head)].

    Start at S = I and write nothing. Then the scan returns the product P of its steps. E|P|^2 -
    |E P|^2, over random traces, counts the directions that are kept and moved. The count is 0 for a
    head that forgets, where P = 0, and for one that merely remembers, whose P is always the same.
    """
    length = 128 if isinstance(task, WordTask) else 32  # a word has one token only
    tokens, _, begin = traces_of_commands(model, task, 64, length, generator(0, "valid", 32, 32))

    found = []
    for entry, inputs in scan_inputs(model, tokens).items():
        q, k, _, beta = [x[:, :, begin:] for x in inputs]
        eye = torch.eye(k.shape[-1]).to(k).expand(*k.shape[:2], -1, -1)
        _, P = delta_product(q, k, torch.zeros_like(k), beta, eye)
        moved = P.square().sum((-2, -1)).mean(0) - P.mean(0).square().sum((-2, -1))
        for head in (moved > 0.25).nonzero().flatten().tolist():
            found.append((entry, head))
    return found


# --- Beta and keys, place by place ----------------------------------------------------------------

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
        found[entry] = by_line(k[..., 0, :].transpose(1, 2)), by_line(beta[..., 0].transpose(1, 2))
    return by_line(tokens), found


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
    tokens, keys = tokens[:, right], found[entry][0][:, right, head]

    mean = torch.empty(n, n, keys.shape[-1])
    for i in range(n):
        for y, name in enumerate(task.names):
            symbol = task.vocab.index(name if i == 0 else f", {name}")
            there = keys[tokens[:, i] == symbol, i]
            mean[i, y] = torch.linalg.svd(there, full_matrices=False).Vh[0]
    return mean


def likeness(keys):
    """How much right-hand keys [n, n, K] are like those of the swap machine: in [-1, 1].

    It is the correlation of all inner products, without their signs. The machine's keys,
    (e_i - e_y') / sqrt 2, meet at 60 degrees if they share the place or the name, else at 90. A
    rotation of all keys, or the sign of one, changes nothing.
    """
    n = len(keys)
    place, name = torch.cartesian_prod(torch.arange(n), torch.arange(n)).T
    products = []
    for k in (keys.double().flatten(0, 1), exchange_key(place, name + n, 2 * n)):
        products.append((k @ k.T).abs()[np.triu_indices(n * n, 1)])
    return torch.corrcoef(torch.stack(products))[0, 1].item()


# --- What a head is worth -------------------------------------------------------------------------

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


# --- Where in a trace a state can be read ---------------------------------------------------------

def settling_tokens(task):
    """Tokens of a line after which the command in the line before it is done: `>>> a, b, c = `.

    A network works late. The local block sees n + 3 tokens, so the names of one line still steer
    the steps of the next, up to the `=`. A swap is followed by no such fixed text: 0. A word is
    done with its own token: 0.
    """
    if isinstance(task, WordTask) or task.commands == "swap":
        return 0
    return task.group.degree + 2


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


@torch.no_grad()
def collect_states(model, task, heads, traces, length, rng):
    """What the heads hold once each command of fresh traces has settled, and where the trace is.

    Shapes: states [B, L, heads, K, V], a tensor; perms [B, L, n], an array.
    """
    # One command more than is read: the last one settles in the line after it.
    tokens, commands, begin = traces_of_commands(model, task, traces, length + 1, rng)
    line = (tokens.shape[1] - begin) // (length + 1)
    begin += settling_tokens(task)

    state = model.stream(tokens[:, :begin])[1] if begin else None
    states = []
    for lines in tokens[:, begin:begin + length * line].split(line, 1):
        _, state = model.stream(lines, state)
        states.append(read_heads(state, heads))
    return torch.stack(states, 1), run_commands(commands[:, :length])


# --- The permutation in a state -------------------------------------------------------------------
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
# elements apart. A trained Z7 holds 2 of 6, a circle; a D6 5 of 9.

SHORTEST = 0.25  # of the longest: a direction below is not used by the head, and read as noise


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
        i, j = largest // n, largest % n
        found[each, i] = j
        left[each, i] = -torch.inf
        left[each, :, j] = -torch.inf
    return found.view(P.shape[:-1])


class LinearImage:
    """Equation (1), fitted by least squares, in float64, to states of these heads.

    Shapes: states [..., heads, K, V], a tensor; perms [..., n], an array.
    signed: fit the sign of the permutation. It is not linear in P, and a head may hold it alone.
    Attributes: sizes, the lengths of the directions; explained, of each head the share of the
        spread of its states that is in the image.
    """

    def __init__(self, heads, states, perms, signed=False):
        self.heads, self.n, self.signed = heads, perms.shape[-1], signed
        X = self.numbers(torch.from_numpy(perms)).flatten(0, -2)
        Y = states.flatten(-3).flatten(0, -2).cpu().double()
        average, mean = X.mean(0), Y.mean(0)  # average: 1/n, where the points are moved uniformly

        B = torch.linalg.pinv(X - average) @ (Y - mean)
        inverse = torch.linalg.pinv(B, rtol=SHORTEST)
        sizes = torch.linalg.svdvals(B)
        self.sizes = sizes[sizes > SHORTEST * sizes[0]]

        left = (Y - mean - (X - average) @ B).unflatten(1, (len(heads), -1))
        spread = (Y - mean).unflatten(1, (len(heads), -1))
        self.explained = 1 - left.square().sum((0, 2)) / spread.square().sum((0, 2))

        # Back to the dtype first: the GPUs of Apple have no float64.
        self.average, self.mean, self.B, self.inverse = [
            part.to(states.dtype).to(states.device) for part in (average, mean, B, inverse)]

    def numbers(self, perms):
        """What S is linear in: [..., n] -> [..., n n], or with the sign one more."""
        P = F.one_hot(perms, self.n).double()
        if not self.signed:
            return P.flatten(-2)
        return torch.cat([P.flatten(-2), torch.linalg.det(P).round().unsqueeze(-1)], -1)

    def read(self, states):
        """(S - mean) B^+, plus 1/n: [..., heads, K, V] -> P [..., n, n]."""
        numbers = (states.flatten(-3) - self.mean) @ self.inverse + self.average
        return numbers[..., :self.n**2].unflatten(-1, (self.n, self.n))

    def correct(self, states):
        """The image of the nearest permutation, in place of each state: (1) without its noise."""
        perms = nearest(self.read(states))
        numbers = self.numbers(perms.cpu()).to(states)
        return (self.mean + (numbers - self.average) @ self.B).view_as(states)


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


# --- The head built by hand -----------------------------------------------------------------------

def swap_machine_errors(group, length, dtype, traces=4):
    """The swap machine of scan.py on random commands: what floating point leaves of it.

    Returns, after so many commands, the largest distance of an entry of S from its exact value, and
    the share of variables whose largest entry names the wrong value.
    """
    # torch solves no triangle in bf16.
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


# --- The command line -----------------------------------------------------------------------------

def print_table(title, columns, rows):
    print(f"\n{title}\n" + " " * 10 + "".join(f"{column:>8}" for column in columns))
    for name, numbers in rows:
        print(f"{name:>10}" + "".join(f"{number:8.3f}" for number in numbers))


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.inside",
                                     description=__doc__.split("\n")[0])
    parser.add_argument("run", help="a run folder of a linrnn, made by train.py")
    parser.add_argument("--intervene", action="store_true",
                        help="accuracy with the beta of each head narrowed")
    args = parse(parser, argv)

    with one_line_errors(parser):
        checkpoint, task, model = load_repl_run(args.run)
        heads, config = all_heads(model), checkpoint["config"]
        if not heads:
            raise UserError(f"only a linrnn has beta and keys; this run is a {config['model']}")

    tracking = tracking_heads(model, task)
    names = []
    for entry, head in heads:
        mark = "*" if (entry, head) in tracking else ""
        names.append(f"{entry}:{head}{mark}")
    print("heads as entry:head; those with a * track")

    if args.intervene:
        limits = np.linspace(1, 0.5, 6) * config["options"]["beta_max"]
        accuracy = intervene(model, task, limits)
        print_table("accuracy at (64,2) with the beta of one head scaled to [0, limit]; "
                    f"chance {task.chance:.3f}", limits.round(2),
                    zip(names, accuracy.reshape(len(names), -1)))
        return

    places = ["x", "y", "=", "y", "x"]
    if task.commands == "full":
        right = [f"{i + 1}. name" for i in range(task.group.degree)]
        places = [*task.names, "=", *right]
    places = [">>>", *places, "newline"]
    print_table("mean beta at each place of a command, over all names that stand there", names,
                zip(places, beta_by_place(model, task).flatten(0, 1).T))

    if task.commands == "full":
        for entry, head in tracking:
            r = likeness(right_hand_keys(model, task, entry, head))
            print(f"\nkeys of {entry}:{head}, correlation with the hand-built head: r = {r:.2f}")

    if tracking:
        lengths = [1, 4, 16, 64, 256, 512]
        print_table("share of states off which a linear map reads the whole permutation, by "
                    "commands read", lengths, [("share", read_off(model, task, tracking, lengths))])


if __name__ == "__main__":
    run(main)
