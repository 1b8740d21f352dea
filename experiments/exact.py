"""Must a linear recurrence drift?  No: integer keys make no errors, and that can be proved.

    a swap of rows x and y'     trained:  k near +-(e_x - e_y') / sqrt 2, beta near 2
                                rounded:  k = e_x - e_y', beta = 1

A trained head is near the swap machine of scan.py: in suitable coordinates (a *frame*), the median
angle between its keys and those of the machine is 11 to 32 degrees. We give the head the machine's
keys, which are integers, and values that are multiples of 2^-10. A step then adds and subtracts
rows of the state, which float32 does exactly. So nothing drifts, although the recurrence is as
linear and as parallel as before. The rest is trained for 400 more steps, on eight commands a trace.

Between lines the state now has one of 120 values, and an answer depends on this value and on the
eight tokens of its reveal. So a finite test is a proof for every length: the theorem of `certify`.
All ten models pass it; five were never used for tuning. One read 1,048,576 commands without error.

Training did not find the integers; we put them in. Even a model that was never trained, in a random
frame, is proved after the same steps. So training only ends *near* a machine that can be proved.
The price: the rounded model ignores reveals, so it cannot join a session late.

    python -m experiments.exact          the tables, from the records
    python -m experiments.exact --run    first make what has no record: an hour
    python -m experiments.exact DIR      round your own run, train the rest, and prove it

Source: ours.
Next: copies.py.
"""

import copy
from dataclasses import asdict
from functools import cache
from time import process_time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from data import ReplTask, UserError, draw_commands, generator, run_cli
from eval import evaluate_and_print, load, make
from experiments import (RESULTS, STORED, Study, by_test, chapter, decaying, evaluate_all, grid,
                         records, table, where, without)
from experiments.groups import compose, index, run_commands
from experiments.inside import fit_image, scan_inputs, tokens_of, tracking_heads
from experiments.plots import BLUE, SKY, canvas, draw_lines, ticks_at
from experiments.reading import evaluate_stream, read
from experiments.snap import Snapped
from models import MLP, DeltaBlock, LocalBlock, unit
from scan import delta_rule_chunked, swap_key
from train import Config, train

GRID = 2.0**-10  # values are multiples of this, and at most 1
MARGIN = 0.5  # by which the logit of a correct answer must exceed all others


# --- 1. Which swap is at which token --------------------------------------------------------------
#
# S has 2n rows, called slots. Between two commands, slot x' (number n + x) holds the value of the
# variable x. While a command executes, the values are in the slots without a prime:
#
#     >>> a = 1                      at 1: write the value into a'
#     >>> a, b, c = c, a, b          at the i-th left-hand name x: swap x and x'
#                                    at the i-th right-hand name y: swap y and x_i'
#
# A mark is a token that is neither a name nor a value. The *place* of a token consists of the last
# mark up to it, its distance from that mark, and the token itself. Places are numbered, and the
# number is the *code*: first come right-hand names, then left-hand names, then values. All other
# tokens share the last code; their key is 0.


def places_and_swaps(task):
    """The place of each code, (mark, distance, token), and the slots to swap, int [codes, 2]."""
    n = len(task.names)
    prompt, equals = task.ids[">>> "], task.ids[" = "]
    name = [[task.ids[f", {y}" if i else y] for y in task.names] for i in range(n)]

    places = [(equals, i + 1, name[i][y]) for i in range(n) for y in range(n)]
    places += [(prompt, i + 1, name[i][i]) for i in range(n)]
    places += [(equals, 1, task.ids[value]) for value in task.values]
    swaps = [(y, n + i) for i in range(n) for y in range(n)] + [(i, n + i) for i in range(n)]
    return places, torch.tensor(swaps)


@cache
def tables_of(task):
    """Whether each token is a mark; the code of (mark, distance, token)."""
    places, _ = places_and_swaps(task)
    others = {*task.names, *task.values}
    marks = torch.tensor([token.strip(", ") not in others for token in task.vocab])
    codes = torch.full((len(task.vocab), len(task.names) + 2, len(task.vocab)), len(places))
    codes[tuple(torch.tensor(places).T)] = torch.arange(len(places))
    return marks, codes


def codes_of(task, tokens):
    """The code of each token: int [B, T] -> [B, T].  It depends on n + 1 tokens at most."""
    marks, codes = tables_of(task)
    at = torch.arange(tokens.shape[1]).expand_as(tokens)
    last = torch.where(marks[tokens], at, 0).cummax(1).values
    return codes[tokens.gather(1, last), (at - last).clamp(max=codes.shape[1] - 1), tokens]


# --- 2. How near a trained head is to the machine -------------------------------------------------

def nearest_head(model, task):
    """The tracking head that is nearest to the swap machine: head, frame, angles (see fit_frame).

    Raises: UserError for another kind of model or task, or if no head tracks the state.
    """
    if ([type(block) for block in model.blocks] != [LocalBlock, DeltaBlock, MLP]
            or model.blocks[1].householders > 1 or task.commands != "full"):
        raise UserError("this needs full commands, and DeltaNet with a local block, one layer and "
                        "one Householder step per token")
    if model.blocks[1].out_norm.weight.numel() < 2 * len(task.names):
        raise UserError("this needs heads of width 2n, two slots for each variable")
    found = [(head, *fit_frame(model, task, head)) for _, head in tracking_heads(model, task)]
    if not found:
        raise UserError("no head of this model tracks the state")
    return min(found, key=lambda each: each[2].median())


@torch.no_grad()
def fit_frame(model, task, head):
    """find_frame for a head's mean keys: n^2, one for each name in each place on the right."""
    commands = draw_commands(task.group, "full", (64, 8), generator(0, "valid"))
    tokens, _ = tokens_of(task, commands)
    k = scan_inputs(model, tokens)[1][1][:, head, :, 0].double()
    codes = codes_of(task, tokens)
    count = len(task.names)**2
    # k and -k make the same step: the mean is the unit vector closest to all keys up to sign.
    keys = [torch.linalg.svd(k[codes == code], full_matrices=False).Vh[0] for code in range(count)]
    return find_frame(torch.stack(keys), places_and_swaps(task)[1][:count])


def find_frame(keys, swaps):
    """The frame in which keys [N, K], up to signs, are nearest to those of the swaps [N, 2].

    Returns: orthonormal rows [K, K], those of the slots first; the angles that are left, in
    degrees [N].
    """
    slots = int(swaps.max()) + 1
    wanted = swap_key(*swaps.T, slots)  # [N, slots]

    # If the signs are right, keys with a slot in common have the product of the wanted ones.
    common = (wanted @ wanted.T) * (keys @ keys.T)
    signs = torch.linalg.eigh(common).eigenvectors[:, -1].sign()
    for _ in range(100):  # the best frame for these signs, the best signs for this frame, ...
        U, _, V = torch.linalg.svd((signs[:, None] * wanted).T @ keys, full_matrices=False)
        cosines = (wanted @ (U @ V) * keys).sum(1)
        signs = cosines.sign()
    frame = torch.cat([U @ V, torch.linalg.svd(U @ V).Vh[slots:]])
    return frame, cosines.abs().clamp(max=1).acos().rad2deg()


# --- 3. The rounded model -------------------------------------------------------------------------

class RoundedModel(nn.Module):
    """A model with one head, which looks up its keys and values; queries are computed as before.

    State: that of the local block; S, [B, K, K]; the last n + 1 tokens.
    """

    def __init__(self, model, task, head, frame):
        super().__init__()
        n = len(task.names)
        K = len(frame)
        _, (_, S, _) = read(model, task, [task.start_lines()])
        model = copy.deepcopy(model)
        self.task = task
        self.embedding, self.last_norm, self.unembedding = (
            model.embedding, model.norm, model.unembedding)
        self.local, block, self.mlp = model.blocks
        self.norm, self.out_norm = block.norm, block.out_norm

        # The queries of this head, in the new frame.
        width = block.project.in_features
        rows = slice(head * K, (head + 1) * K)
        self.query = nn.Linear(width, K)
        self.out = nn.Linear(K, width, bias=False)
        with torch.no_grad():
            self.query.weight.copy_(frame @ block.project.weight[rows].double())
            self.query.bias.copy_(frame @ block.project.bias[rows].double())
            self.out.weight.copy_(block.out.weight[:, rows])

        # One key and one value for each code. out_norm discards the size of the values.
        x, y = F.one_hot(places_and_swaps(task)[1].T, K)
        keys = torch.cat([x - y, F.one_hot(torch.arange(n, 2 * n), K), torch.zeros(1, K)])
        values = (frame[n:2 * n] @ S[0, head].double()).float()
        values = (values / values.abs().max() / GRID).round() * GRID
        self.register_buffer("keys", keys.float())
        self.register_buffer("values", F.pad(values, (0, 0, len(keys) - 1 - n, 1)))

    def forward(self, tokens):
        return self.stream(tokens)[0]

    def stream(self, tokens, state=None):
        local, S, past = state or (None, None, tokens[:, :0])
        window = torch.cat([past, tokens], 1)
        codes = codes_of(self.task, window)[:, past.shape[1]:]

        x, local = self.local(self.embedding(tokens), local)
        q = unit(self.query(self.norm(x)))
        k = self.keys[codes]
        beta = k.new_ones(codes.shape)  # if |k|^2 = 2, I - k k^T is a reflection
        out, S = delta_rule_chunked(q, k, self.values[codes], beta, S)
        x, _ = self.mlp(x + self.out(self.out_norm(out)))
        logits = self.unembedding(self.last_norm(x))
        return logits, (local, S, window[:, -len(self.task.names) - 1:])


def train_rest(model, task, seed=0, steps=400):
    """Train all but keys and values. Eight commands are enough: one command reaches any state."""
    config = Config(curriculum=((8, 1),), final_steps=steps, average=False, lr=1e-3,
                    matrix_lr=5e-3, seed=seed)
    return train(model, task, config, lr_scale=decaying)[0]


# --- 4. The certificate ---------------------------------------------------------------------------

@torch.no_grad()
def certify(model):
    """Prove a RoundedModel.  Returns: what was tested, as a dict.  Raises: UserError.

    Theorem. Let `certify` accept the model, with the methods of these files and no hooks, and let a
    text consist of the first lines, `>>> a = 1` and so on, and then of any number of commands of
    the group and of reveals, in any order. Then the model, in float32 on a CPU, predicts at each
    reveal the value of that variable. It may read the text in any pieces. Reveals may show false
    values: it ignores them.

    Proof, with (a) to (f) for the tests below. A code depends on the tokens from the last mark on,
    and each command and each reveal begins with a mark. So the steps of a command or a reveal are
    the same in every text (a). How the text is cut into pieces and chunks does not matter either,
    because S is exact (b): keys are integers with |k|^2 <= 2, or <= 1 where they write, so each row
    of S is 0 or a value, up to its sign; no entry of L,
    (I + L)^-1, U, W or D exceeds 2 (as in scan.py, section 5); so in chunks of up to 1,024 tokens
    no sum in (5) to (8) of scan.py reaches 2^24 GRID, and below that float32 is exact. Let S_e be
    the S after the first lines, and S_p (p not e) that after a command p. Claim: S is S_p after any
    lines whose commands multiply to p ("first g, then h"). It is so after the first lines; a
    command g takes S_p to S_pg (c: all pairs); a reveal keeps S_p (d: all values, true or false).
    At the answer, the local block sees the reveal alone (e). So the answer depends on the variable
    and p alone, and it is the value that p gives to the variable (f: all of them).

    Assumed: rounding outside S changes no difference of two logits by MARGIN from one text to
    another. The number of operations for a token does not grow with the text.
    """
    task = model.task
    n = len(task.names)
    N = task.group.order
    require([type(part) for part in (task, *model.modules())] == KINDS
            and task.commands == "full", "this is not a rounded model of full commands")       # (a)
    require(N <= 1000, f"{N:,} states are too many to test all")

    keys, values = model.keys, model.values
    require({(x.device.type, x.dtype) for x in model.state_dict().values()}
            == {("cpu", torch.float32)}, "the proof is for float32 on a CPU")                  # (b)
    require(torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")
            and not torch.is_autocast_enabled("cpu"), "products have a reduced precision")     # (b)
    require(torch.isin(keys, torch.tensor([-1.0, 0, 1])).all(), "the keys are not integers")   # (b)
    require((keys.square().sum(1) <= 1 + (values == 0).all(1)).all(), "the keys are too long") # (b)
    require(torch.equal(values, (values / GRID).round() * GRID) and values.abs().max() <= 1,
            "the values are not on the grid")                                                  # (b)

    perms = task.group.elements
    _, first = read(model, task, [task.start_lines()])
    first = [x.expand(N, *x.shape[1:]) for x in first]
    _, (local, S, past) = read(model, task, map(task.command_line, perms), first)
    S[0] = first[1][0]  # perms[0] is the identity
    state = local, S, past
    for g in perms:
        _, after = read(model, task, [task.command_line(g)] * N, state)
        require(torch.equal(after[1], S[index(task.group, compose(perms, g))]),
                f"a state is wrong after {task.command_line(g).strip()}")                      # (c)

    margins = []
    for x in range(n):
        for value in range(n):
            _, after = read(model, task, [task.reveal_lines(x, value)] * N, state)
            require(torch.equal(after[1], S), f"a reveal of {task.names[x]} changes a state")  # (d)

        question = task.reveal_lines(x, 0).removesuffix(f"{task.values[0]}\n")
        require(model.local.conv.kernel_size[0] <= len(task.encode(question)),
                "the local block sees more than the lines of a reveal")                        # (e)
        logits, _ = read(model, task, [question] * N, state)
        correct = torch.tensor([[task.ids[task.values[p[x]]]] for p in perms])
        others = logits[:, -1].scatter(1, correct, -torch.inf).amax(1)
        margins.append(logits[:, -1].gather(1, correct).squeeze(1) - others)
    margins = torch.cat(margins)
    answers = int((margins > MARGIN).sum())  # NaN is not
    require(answers == len(margins),
            f"only {answers} of {len(margins)} answers are correct by a margin of {MARGIN}")   # (f)
    return {"states": N, "transitions": N * N, "answers": answers, "margin": margins.min().item()}


KINDS = [ReplTask, RoundedModel, nn.Embedding, nn.RMSNorm, nn.Linear,
         LocalBlock, nn.RMSNorm, nn.Conv1d, nn.Linear, MLP, nn.RMSNorm, nn.Linear, nn.Linear,
         nn.RMSNorm, nn.RMSNorm, nn.Linear, nn.Linear]


def require(condition, otherwise):
    if not condition:
        raise UserError(otherwise)


# --- 5. Long programs, and coarse numbers ---------------------------------------------------------

PROGRAMS = ["random commands", "the identity", "one command", "a command and its inverse",
            "a loop of 2", "a loop of 5", "a loop of 10", "bursts of reveals", "false reveals"]


class Program(ReplTask):
    """Test traces of one kind: a loop that repeats, or random commands with unusual reveals."""

    def __init__(self, group, name):
        super().__init__(group)
        self.name = name

    def test_batch(self, batch, length, spacing, rng):
        """One trace. In "false reveals" half of the reveals are false; only true ones count."""
        n = self.group.degree
        drawn = self.group.draw((10,), rng)
        loops = {"the identity": [np.arange(n)], "one command": drawn[:1],
                 "a command and its inverse": [drawn[0], drawn[0].argsort()],
                 "a loop of 2": drawn[:2], "a loop of 5": drawn[:5], "a loop of 10": drawn}
        loop = loops[self.name] if self.name in loops else self.group.draw((length,), rng)
        commands = np.resize(loop, (length, n))  # repeats the loop

        text = [self.start_lines()]
        counts = []
        for t, (g, state) in enumerate(zip(commands, run_commands(commands))):
            text.append(self.command_line(g))
            reveals = int((t + 1) % spacing == 0)
            if self.name == "bursts of reveals":
                reveals = rng.integers(1, 20) * (rng.random() < 1 / spacing)
            for x in rng.integers(n, size=reveals):
                false = self.name == "false reveals" and rng.random() < 0.5
                value = (state[x] + rng.integers(1, n)) % n if false else state[x]
                text.append(self.reveal_lines(x, value))
                counts.append(not false)
        inputs, targets, reveals = self.batch_of(["".join(text)])
        reveals[reveals] = counts
        return inputs, targets, reveals


class InFormat:
    """A model whose S is rounded to a number format after every token."""

    def __init__(self, model, name):
        self.model = model
        self.name = name

    def stream(self, tokens, state=None):
        logits = []
        for token in tokens.split(1, 1):
            piece, state = self.model.stream(token, state)
            state = [*state[:1], to_format(state[1], self.name), *state[2:]]
            logits.append(piece)
        return torch.cat(logits, 1), state


def to_format(S, name):
    """S in float32, float16 or bfloat16, or in int8 with a scale for each head."""
    if name == "int8":
        scale = S.abs().amax((-2, -1), keepdim=True).clamp(min=1e-12) / 127
        return (S / scale).round() * scale
    return S.to(getattr(torch, name)).float()


# --- 6. The study ---------------------------------------------------------------------------------
#
# Seeds 0 to 4 are stored; the others are default runs of train.py, and fresh: nothing was tuned on
# them. frame: nearest, or random; `never trained` is a model that never was, in a random frame.

TESTS = [(64, 8), (256, 1), (1024, 128), (8192, 1024)]
LENGTHS = [64, 256, 1024, 8192, 65536]  # of the picture, with eight reveals

SETTINGS = [
    *grid(part=["proof"], group=["S5"], frame=["nearest", "random"],
          seed=[*range(5), *range(280, 285)]),
    *grid(part=["proof"], group=["S5"], frame=["never trained"], seed=range(3)),
    *grid(part=["proof"], group=["A5", "S4", "S6"], frame=["nearest"], seed=[280]),
    *grid(part=["program"], program=PROGRAMS, length=[100_007], spacing=[97],
          model=["plain", "rounded"]),
    *grid(part=["program"], program=["random commands"], length=[2**20], spacing=[2**11],
          model=["rounded"]),
    *grid(part=["format"], format=["float32", "float16", "bfloat16", "int8"],
          model=["plain", "rounded"]),
    *grid(part=["length"], seed=range(3))]
PATH = RESULTS / "models/exact-S5-seed0.pt"


def run(setting, _):
    start = process_time()
    found = {"proof": prove, "program": run_program, "format": run_format,
             "length": run_lengths}[setting["part"]](setting)
    return found | {"cpu_seconds": process_time() - start}


def prove(setting):
    """Round a model, train the rest, and ask for a proof."""
    group, seed, frame = setting["group"], setting["seed"], setting["frame"]
    config = Config(group=group, seed=seed)
    task, model = load(STORED[seed]) if seed < 5 else make(asdict(config))
    row = {}
    try:
        if frame == "never trained":
            task, model = make(asdict(config))
            head = 0
            nearest, angles = fit_frame(model, task, head)
        else:
            if seed >= 5:
                model, _ = train(model, task, config, f"runs/exact/{group}-{seed}", resume=True)
            head, nearest, angles = nearest_head(model, task)

        rng = torch.Generator().manual_seed(seed)
        random = torch.linalg.qr(torch.randn(16, 16, generator=rng).double()).Q
        model = RoundedModel(model, task, head, nearest if frame == "nearest" else random)
        row |= {"angles": angles.tolist(), "untrained": evaluate_all(model, task, TESTS, traces=8)}
        model = train_rest(model, task, seed)
        row["results"] = evaluate_all(model, task, TESTS, traces=8)
        if (frame, seed) == ("nearest", 0):
            torch.save(model.state_dict(), PATH)
        return row | certify(model)
    except UserError as error:
        return row | {"refused": str(error)}


def stored(name="rounded"):
    """A stored model of S5, with its task: the rounded one, or the plain one that it comes from."""
    task, model = load(STORED[0])
    if name == "rounded":
        model = RoundedModel(model, task, 0, torch.eye(16).double()).eval()
        model.load_state_dict(torch.load(PATH, weights_only=True))
    return task, model


def run_program(setting):
    task, model = stored(setting["model"])
    program = Program(task.group, setting["program"])
    row = evaluate_stream(model, program, setting["length"], setting["spacing"], traces=1)
    return without(row, "by_position")


def run_format(setting):
    task, model = stored(setting["model"])
    reader = InFormat(model, setting["format"])
    return without(evaluate_stream(reader, task, 1024, 128, traces=32), "by_position")


def run_lengths(setting):
    """The accuracies of a stored model, projected as in snap.py, and rounded."""
    task, model = load(STORED[setting["seed"]])
    image, _ = fit_image(model, task)
    rounded = RoundedModel(model, task, *nearest_head(model, task)[:2])
    readers = {"plain": model, "projected": Snapped(model, task, image),
               "rounded": train_rest(rounded, task, setting["seed"])}
    return {name: [evaluate_stream(reader, task, length, length // 8,
                                   max(2, 2**12 // length))["all"] for length in LENGTHS]
            for name, reader in readers.items()}


STUDIES = [Study("exact", SETTINGS, run)]


# --- 7. The tables, the picture and the command line ----------------------------------------------

def show():
    rows = records("exact")
    proofs = where(rows, part="proof")
    table("Keys: degrees from those of the machine in the nearest frame, the median. The proof:\n"
          "models accepted, transitions tested, the smallest margin of an answer", proofs,
          ["group", "frame"], {
              "degrees": lambda row: np.median(row["angles"]) if "angles" in row else None,
              "proved": lambda row: "refused" not in row,
              "transitions": lambda row: row.get("transitions"),
              "margin": lambda row: row.get("margin")})
    for row in proofs:
        if "refused" in row:
            print(f"{row['group']}, {row['frame']}, seed {row['seed']}: {row['refused']}")

    tested = [row for row in proofs if "results" in row]
    before = [row | {"results": row["untrained"], "rest": "as it was"} for row in tested]
    after = [row | {"rest": "trained"} for row in tested]
    table("Reveals correct in %, min-max of the seeds", before + after,
          ["group", "frame", "rest"], by_test(TESTS))

    models = {name: lambda row, name=name: 100 * row["all"] if row["model"] == name else None
              for name in ("plain", "rounded")}
    table("Long programs: reveals correct in %, of stored seed 0 as trained and rounded",
          where(rows, part="program"), ["program", "length"], models)
    table("S rounded to a number format after every token: reveals correct at (1024,128), in %",
          where(rows, part="format"), ["format"], models)


def picture():
    """The accuracy by length, of three stored models: as trained, projected, rounded."""
    rows = records("exact", part="length")
    figure, ((axes,),) = canvas("Errors add up; a projection corrects them; integer keys make none")
    found = {name: (LENGTHS, [100 * np.array(row[name]) for row in rows], colour)
             for name, colour in [("rounded", SKY), ("projected", "black"), ("plain", BLUE)]}
    axes.set(ylim=(-2, 104), xlabel="commands in a trace", ylabel="accuracy in %")
    draw_lines(axes, found, 20, trained=64)
    ticks_at(axes, LENGTHS)
    return figure


def prove_and_print(task, model, lengths, traces):
    """Round a run, train the rest, prove it, and print the table of eval.py."""
    head, frame, angles = nearest_head(model, task)
    print(f"The keys of head {head} are {angles.median():.0f} degrees (median) from the machine's.")
    model = train_rest(RoundedModel(model, task, head, frame), task)
    print("Proved for every length: {states} states, {transitions:,} transitions, {answers} answers"
          " (by a\nmargin of {margin:.1f} or more).".format(**certify(model)))
    evaluate_and_print(model, task, lengths, traces)


def main(argv=None):
    chapter(__doc__, show, STUDIES, argv, prove_and_print,
            lengths=((64, 8), (8192, 1024)), traces=4)


if __name__ == "__main__":
    run_cli(main)
