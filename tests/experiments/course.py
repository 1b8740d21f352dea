"""The teacher's file: ten exercises, their traps, and what a solution must do.

A check is a few lines of code that run in the submission's process, their inputs, and the values
that must come back. The expected values are made here by brute force, with loops, lists and
explicit matrices, and never by a solution. The checks of an exercise go from small to large: the
first that fails is shown to the student.

The students' copy has no such file. It has the inputs and values of one seed, tests/checks.json.
"""

import ast
import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from worker import to_json

ROOT = Path(__file__).resolve().parents[2]
YOUR_OWN = "tests/experiments/test_your_own.py"


class Exercise(NamedTuple):
    file: str
    function: str   # as in Group.compose; its whole body is blank in the students' copy
    points: int
    statement: str  # joins the docstring in the students' copy
    trap: str       # for teachers: what goes wrong most often


EXERCISES = {
    1: Exercise(
        "data.py", "Group.compose", 1,
        "Numbers in, numbers out: .elements and .index go from one to the other. g and h may be "
        "single numbers or arrays whose shapes broadcast.",
        "h[g[i]] in place of g[h[i]], which is the same where all elements commute"),
    2: Exercise(
        "scan.py", "delta_rule_recurrent", 2,
        "A loop over time, (1) and (2). check_inputs gives the state to begin with. Leave the "
        "inputs as they are, and let autograd go through your loop.",
        "beta scales v alone, not v - S^T k; or `state +=`, which writes into the caller's state"),
    3: Exercise(
        "scan.py", "solve_unit_triangle", 1,
        "One line of torch, or a loop over the rows. A caller may leave anything on and above the "
        "diagonal of L.",
        "the matrix is I + tril(L, -1), and not L or its lower half"),
    4: Exercise(
        "scan.py", "run_through_chunks", 2,
        "(6) and (8) in a loop over the chunks, then (7) for all chunks at once.",
        "D and O of a chunk want the state before it, and the read at t sees the write at t"),
    5: Exercise(
        "scan.py", "swap_machine_keys", 2,
        "First a key for each left-hand name, x and its spare x'. Then a key for each right-hand "
        "name: for the i-th, y, exchange x_i and y'.",
        "y' is exchanged with y, and so every command does nothing"),
    6: Exercise(
        "scan.py", "chunked_backward", 4,
        "(9) to (16), from the last chunk to the first, with the states, D and W that the forward "
        "kept, and without autograd. Begin with a comment: derive (13) from (4) in your own words, "
        "two to four sentences. Why has M a minus, and no diagonal? Your teacher reads it.",
        "G_n is the gradient of the state after chunk n: with one chunk, one late is not seen"),
    7: Exercise(
        "eval.py", "score", 2,
        "The keys are reveals, how many there are; all, final and perfect, the shares of right "
        "reveals, of right last reveals and of traces without an error; perfect_low and "
        "perfect_high, the Wilson interval of perfect; by_position, a list with the share of right "
        "reveals at each position. The row is written as JSON: Python's numbers and lists only.",
        "perfect is a share of traces; and by_position as an array breaks --json"),
    8: Exercise(
        "experiments/beliefs.py", "PFSA.step", 2,
        "The formula above, for a batch of beliefs with a symbol each.",
        "it reveals first and moves then; delta[symbol, new, old] stands on the left of a belief"),
    9: Exercise(
        "experiments/inside.py", "LinearImage.correct", 2,
        "Read P off, take the nearest permutation, and write its image, (1). The state that comes "
        "back holds a permutation, whatever came in.",
        "the largest entry of each row need not be a permutation; P transposed undoes a command"),
    10: Exercise(
        YOUR_OWN, "test_attention_reads_in_pieces_what_it_reads_at_once", 2,
        "Write a test that models.py passes. A wrong variant, whose AttentionBlock.forward calls "
        "rotate(q) in place of rotate(q, past), must fail it by an assert. The variant comes in as "
        "the argument `models`: use nothing else of models.py.",
        "only distances count for rotary positions, so one piece alone shows nothing"),
}


def check(exercise, law, case, code, inputs, **expected):
    """One check, as it is stored: everything in it can be written as JSON."""
    return {"exercise": exercise, "law": law, "case": case, "code": code.strip("\n"),
            "inputs": {name: to_json(value) for name, value in inputs.items()},
            "expected": {name: to_json(value) for name, value in expected.items()}}


def make_checks(seed=0):
    """All checks, in the order of the exercises. Another seed draws other numbers."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    return [*check_compose(rng), *check_loop(), *check_triangle(), *check_chunks(),
            *check_swap_machine(), *check_backward(), *check_score(rng), *check_filter(rng),
            *check_snap(rng), *check_own_test()]


# --- 1. The order of composition ------------------------------------------------------------------

def check_compose(rng):
    import sys
    sys.path.insert(0, str(ROOT))
    from data import Group

    law = "compose(g, h) is the element whose command does what g and after it h does."

    def product(group, g, h):
        values = list(range(group.degree))
        for command in (group.elements[g], group.elements[h]):
            values = [values[i] for i in command]
        return group.elements.tolist().index(values)

    one = """
from data import Group
element = Group(name).compose(g, h)
"""
    group = Group("S3")
    g, h = [(g, h) for g in range(6) for h in range(6)
            if product(group, g, h) != product(group, h, g)][rng.integers(18)]
    yield check(1, law, f"elements {g} and {h} of S3, {group.elements[g].tolist()} and "
                f"{group.elements[h].tolist()}", one, {"name": "S3", "g": g, "h": h},
                element=np.array(product(group, g, h)))

    for name in ["D4", "A4", "S2xS3", "S4"]:
        group = Group(name)
        numbers = np.arange(group.order)
        table = np.array([[product(group, g, h) for h in numbers] for g in numbers])
        yield check(1, law, f"all of {name}: g a column, h a row", one,
                    {"name": name, "g": numbers[:, None], "h": numbers}, element=table)


# --- 2 to 6. The scan -----------------------------------------------------------------------------

def random_scan(*lead, T=12, K=5, V=3):
    """q, k, v, beta and a state, float64: |k| = 1, beta in (0, 2)."""
    q, k, v, beta, state = [torch.randn(*lead, *shape).double()
                            for shape in [(T, K), (T, K), (T, V), (T,), (K, V)]]
    return q, k / k.norm(dim=-1, keepdim=True), v, 2 * beta.sigmoid(), state


def by_matrices(q, k, v, beta, state, starts=None, C=None):
    """The delta rule with explicit K x K matrices: outputs, the state after each token, D.

    starts: the states that are put in place ahead of each chunk of C tokens. A gradient goes past
    this to the token before, as if nothing had been put in place.
    """
    outputs = []
    states = []
    corrections = []
    for t in range(k.shape[-2]):
        if starts is not None and t % C == 0:
            state = state + (starts[..., t // C, :, :] - state).detach()
        key = k[..., t, :, None]
        b = beta[..., t, None, None]
        corrections.append((b * (v[..., t, None, :] - key.mT @ state)).squeeze(-2))
        keep = torch.eye(k.shape[-1]) - b * key @ key.mT
        state = keep @ state + b * key @ v[..., t, None, :]
        states.append(state)
        outputs.append((q[..., t, None, :] @ state).squeeze(-2))
    return torch.stack(outputs, -2), torch.stack(states, -3), torch.stack(corrections, -2)


def check_loop():
    law = "Each step is (1): the state forgets along k, writes v under k, and is read with q."
    sizes = {"one token, K = V = 1": ((), 1, 1, 1), "three tokens": ((), 3, 2, 1),
             "batches of 2 x 3": ((2, 3), 12, 5, 3)}
    for case, (lead, T, K, V) in sizes.items():
        names = ("q", "k", "v", "beta", "state")
        inputs = dict(zip(names, random_scan(*lead, T=T, K=K, V=V)))
        out, states, _ = by_matrices(*inputs.values())
        yield check(2, law, case, """
from scan import delta_rule_recurrent
out, last = delta_rule_recurrent(q, k, v, beta, state)
""", inputs, out=out, last=states[..., -1, :, :])

        kept = {name: x.clone() for name, x in inputs.items()}
        yield check(2, "The inputs are left as they are.", case, """
from scan import delta_rule_recurrent
delta_rule_recurrent(q, k, v, beta, state)
""", inputs, **kept)

        nothing = torch.zeros_like(inputs.pop("state"))
        out, states, _ = by_matrices(*inputs.values(), nothing)
        yield check(2, "Without a state, the loop begins with zeros.", case, """
from scan import delta_rule_recurrent
out, last = delta_rule_recurrent(q, k, v, beta)
""", inputs, out=out, last=states[..., -1, :, :])

    inputs = [x.requires_grad_() for x in random_scan(2, T=4)]
    out, states, _ = by_matrices(*inputs)
    g_out = torch.randn_like(out)
    g_last = torch.randn_like(inputs[-1])
    loss = (out * g_out).sum() + (states[..., -1, :, :] * g_last).sum()
    gradients = torch.autograd.grad(loss, inputs)
    yield check(2, "Autograd goes through the loop: no tensor is overwritten.", "four tokens", """
from scan import delta_rule_recurrent
import torch
inputs = [x.requires_grad_() for x in (q, k, v, beta, state)]
out, last = delta_rule_recurrent(*inputs)
loss = (out * g_out).sum() + (last * g_last).sum()
gradients = torch.autograd.grad(loss, inputs)
""", dict(zip(names, inputs)) | {"g_out": g_out, "g_last": g_last}, gradients=gradients)


def check_triangle():
    code = """
from scan import solve_unit_triangle
x = solve_unit_triangle(L, rhs)
"""
    for lead, C, width in [((), 1, 1), ((), 2, 1), ((), 3, 2), ((2, 3), 6, 7)]:
        rhs = torch.randn(*lead, C, width).double()
        clean = torch.randn(*lead, C, C).double().tril(-1)
        size = f"{C} x {C}"
        for case, L in [(size, clean), (f"{size}, numbers on and above the diagonal",
                                        clean + torch.randn(C, C).double().triu())]:
            kept = {"L": L.clone(), "rhs": rhs.clone()}
            x = torch.linalg.inv(torch.eye(C) + clean) @ rhs
            yield check(3, "x solves (I + tril(L, -1)) x = rhs. The inputs stay as they are.", case,
                        code, {"L": L, "rhs": rhs}, x=x, **kept)


def check_chunks():
    code = """
from scan import run_through_chunks
out, last, starts, D = run_through_chunks(q, k, u, w, state)
"""
    sizes = {"one chunk of one token": ((), 1, 1, 1, 1), "one chunk of two": ((), 1, 2, 1, 1),
             "two chunks of one token": ((), 2, 1, 1, 1), "two chunks of two": ((), 2, 2, 2, 1),
             "batches of 2 x 3": ((2, 3), 3, 4, 5, 3)}
    for case, (lead, N, C, K, V) in sizes.items():
        q, k, w = torch.randn(3, *lead, N, C, K).double()
        u = torch.randn(*lead, N, C, V).double()
        state = torch.randn(*lead, K, V).double()
        kept = state.clone()

        # Token by token: u and w are any numbers, so no other equation holds.
        now = state
        starts = []
        D = torch.zeros_like(u)
        out = torch.zeros_like(u)
        for n in range(N):
            start = now
            starts.append(start)
            for t in range(C):
                D[..., n, t, :] = u[..., n, t, :] - (w[..., n, t, :, None] * start).sum(-2)
                now = now + k[..., n, t, :, None] * D[..., n, t, None, :]
                read = (q[..., n, t, :, None] * start).sum(-2)
                for s in range(t + 1):
                    likeness = (q[..., n, t, :] * k[..., n, s, :]).sum(-1, keepdim=True)
                    read = read + likeness * D[..., n, s, :]
                out[..., n, t, :] = read

        yield check(4, "(6) to (8): each chunk begins with the state that the chunk before left.",
                    case, code, {"q": q, "k": k, "u": u, "w": w, "state": state}, out=out,
                    last=now, starts=torch.stack(starts, -3), D=D, state=kept)


def check_swap_machine():
    law = ("Each key of length 1 exchanges two slots: x and x' for the left-hand name x, x_i and "
           "y' for the i-th right-hand name y.")
    code = """
from scan import swap_machine_keys
keys = swap_machine_keys(commands)
shape = list(keys.shape)
after_each_name = []
for key in keys.flatten(0, -2)[:, :, None]:
    slots = slots - 2 * key @ (key.mT @ slots)
    after_each_name.append(slots)
"""
    exchanged = torch.tensor([[1, 0]])
    fetched = torch.tensor([[1, 2, 0]])
    many = torch.stack([torch.stack([torch.randperm(5) for _ in range(3)]) for _ in range(2)])
    for case, commands in [("a, b = b, a", exchanged), ("a, b, c = b, c, a", fetched),
                           ("a batch of two, three commands each, n = 5", many)]:
        n = commands.shape[-1]
        values = [float(i + 1) for i in range(n)] + [-float(i + 1) for i in range(n)]
        slots = torch.tensor(values).double()[:, None]

        after = []
        for command in commands.flatten(0, -2).tolist():
            for i, j in [*zip(range(n), range(n, 2 * n)),
                         *((place, y + n) for place, y in enumerate(command))]:
                values[i], values[j] = values[j], values[i]
                after.append(torch.tensor(values).double()[:, None])
        *lead, length, _ = commands.shape
        yield check(5, law, case, code, {"commands": commands, "slots": slots},
                    shape=[*lead, length * 2 * n, 2 * n], after_each_name=after)


def check_backward():
    law = "(9) to (16): the gradients of all that was saved, chunk by chunk, without autograd."
    code = """
from scan import chunked_backward
import torch
with torch.inference_mode():
    g_q, g_k, g_v, g_beta, g_state = chunked_backward(q, k, v, beta, starts, D, W, g_out, G)
"""
    sizes = [("one chunk of one token", (), 1, 1, 1, 1), ("one chunk of two", (), 1, 2, 2, 1),
             ("two chunks of one token", (), 2, 1, 2, 1), ("two chunks of two", (), 2, 2, 2, 1),
             ("batches of 2 x 3, three chunks", (2, 3), 3, 4, 5, 3)]
    for case, lead, N, C, K, V in sizes:
        inputs = [x.requires_grad_() for x in random_scan(*lead, T=N * C, K=K, V=V)]
        q, k, v, beta, state = inputs

        # Each chunk begins with a state of its own. So the states cannot be computed again.
        starts = torch.randn(*lead, N, K, V).double()
        starts[..., 0, :, :] = state.detach()
        out, states, D = by_matrices(*inputs, starts, C)
        g_out = torch.randn_like(out)
        G = torch.randn_like(state)
        loss = (out * g_out).sum() + (states[..., -1, :, :] * G).sum()
        g_q, g_k, g_v, g_beta, g_state = torch.autograd.grad(loss, inputs)

        q, k, v, D, g_out, g_q, g_k, g_v = [
            x.detach().unflatten(-2, (N, C)) for x in (q, k, v, D, g_out, g_q, g_k, g_v)]
        beta, g_beta = [x.detach().unflatten(-1, (N, C))[..., None] for x in (beta, g_beta)]
        W = torch.linalg.inv(torch.eye(C) + (beta * k @ k.mT).tril(-1)) @ (beta * k)
        yield check(6, law, f"{case}, each chunk with a state of its own ahead of it", code,
                    {"q": q, "k": k, "v": v, "beta": beta, "starts": starts, "D": D, "W": W,
                     "g_out": g_out, "G": G},
                    g_q=g_q, g_k=g_k, g_v=g_v, g_beta=g_beta, g_state=g_state)


# --- 7. A row of the table ------------------------------------------------------------------------

def check_score(rng):
    law = ("all and by_position count reveals, final counts last reveals, perfect counts traces; "
           "and JSON can write the row.")
    tables = {"one trace, one reveal, right": [[True]], "two traces of two reveals": [[True, True],
              [False, True]], "no reveal is right": [[False, False, False]],
              "seven traces of three reveals": (rng.random((7, 3)) < 0.6).tolist()}
    for case, table in tables.items():
        traces, count = len(table), len(table[0])
        hits = sum(all(row) for row in table)
        by_position = [sum(row[i] for row in table) / traces for i in range(count)]

        # Wilson 1927, with z = 1.96
        share, z = hits / traces, 1.96
        centre = share + z * z / 2 / traces
        half = z * (share * (1 - share) / traces + z * z / 4 / traces**2) ** 0.5
        low, high = [(centre + sign * half) / (1 + z * z / traces) for sign in (-1, 1)]

        expected = {"reveals": traces * count, "all": sum(by_position) / count,
                    "final": by_position[-1], "perfect": share, "perfect_low": max(0.0, low),
                    "perfect_high": min(1.0, high), "by_position": by_position}
        yield check(7, law, case, """
from eval import score
row = score(right)
""", {"right": np.array(table)}, row=expected)


# --- 8. A filter ----------------------------------------------------------------------------------

def check_filter(rng):
    law = "The symbol says where the state is, Bayes divides by its probability, the state moves."
    code = """
from experiments.beliefs import PFSA
automaton = PFSA(delta, rho, start)
evidence, after = automaton.step(belief, symbol)
"""
    stay = np.eye(3)
    turn = np.roll(stay, 1, 0)
    mixed = rng.random((4, 3, 3)) + 0.1
    mixed = mixed / mixed.sum(1, keepdims=True)
    some = np.array([[1, 1, 1], [0, 1, 1], [1, 1, 0], [1, 0, 1]], bool)
    one = np.array([[0.5, 0.3, 0.2]])
    many = rng.dirichlet(np.ones(3), 6)
    cases = [("a reveal: the state is 2 or 3, and stays", stay[None], some[1:2], one, [0]),
             ("a command: each state goes to the next", turn[None], some[:1], one, [0]),
             ("a symbol that reveals and moves", mixed[1:2], some[1:2], one, [0]),
             ("six beliefs, four symbols", mixed, some, many, rng.integers(4, size=6))]
    for case, delta, rho, belief, symbol in cases:
        evidence = []
        after = []
        for b, s in zip(belief, symbol):
            likely = sum(b[i] for i in range(3) if rho[s][i])
            evidence.append(likely)
            after.append([sum(delta[s][new][old] * b[old] * rho[s][old] for old in range(3))
                          / likely for new in range(3)])
        inputs = {"delta": delta, "rho": rho, "start": np.ones(3) / 3, "belief": belief,
                  "symbol": np.array(symbol)}
        yield check(8, law, case, code, inputs, evidence=np.array(evidence),
                    after=np.array(after), belief=belief.copy())


# --- 9. The snap ----------------------------------------------------------------------------------

# Read off a state that held 1, 2, 3: the nearest permutation is still the identity, although rows 0
# and 1 have their largest entries in one column, and columns 1 and 2 in one row.
BENT = torch.tensor([[0.7, 0.1, 0.2], [0.6, 0.4, 0.0], [-0.3, 0.5, 0.8]]).double() - torch.eye(3)


def check_snap(rng):
    law = ("A state comes back as the exact image of the nearest permutation, mean + sum_ij "
           "(P_ij - 1/n) B_ij.")
    code = """
from experiments.inside import LinearImage
image = LinearImage([(1, 0), (1, 1)], states, perms)
corrected = image.correct(bent)
"""
    groups = {"S3": [*itertools.permutations(range(3))], "S4": [*itertools.permutations(range(4))]}
    groups["S2xS3"] = [(*a, *(i + 2 for i in b)) for a in itertools.permutations(range(2))
                       for b in itertools.permutations(range(3))]
    for name, elements in groups.items():
        n = len(elements[0])
        heads = {3: (1, 3, 3), 4: (2, 3, 4), 5: (2, 3, 5)}[n]
        directions, _ = torch.linalg.qr(torch.randn(heads[0] * heads[1] * heads[2], n * n).double())
        parts = directions.mT.reshape(n, n, *heads)
        exact = torch.stack([sum(parts[i, value] for i, value in enumerate(element))
                             for element in elements])
        # In S3 and S4, P is bent by hand. In S2xS3 the noise goes in all directions.
        bent = exact + 0.02 * torch.randn_like(exact)
        if n < 5:
            bent = exact.clone()
            for state, element in zip(bent, elements):
                for i, j in itertools.product(range(3), range(3)):
                    state += BENT[i, j] * parts[i, element[j]]
        heads_of = code.replace("[(1, 0), (1, 1)]", "[(1, 0)]") if n == 3 else code
        inputs = {"states": exact, "perms": np.array(elements), "bent": bent}
        yield check(9, law, f"the states of all elements of {name}, bent", heads_of, inputs,
                    corrected=exact, bent=bent.clone())
    yield check(9, law, "a batch of 2 x 3", heads_of, inputs | {"bent": bent[:6].unflatten(
        0, (2, 3))}, corrected=exact[:6].unflatten(0, (2, 3)))


# --- 10. A test -----------------------------------------------------------------------------------

ROTATIONS = ("rotate(q, past)", "rotate(k, past)")


def check_own_test():
    law = ("The test passes on models.py and on the same code written otherwise; a wrong variant "
           "fails it by an assert.")
    code = """
import types
from test_your_own import test_attention_reads_in_pieces_what_it_reads_at_once as test
models = types.ModuleType("models")
exec(source, vars(models))
try:
    test(models)
    outcome = "the test passes"
except AssertionError:
    outcome = "an assert fails"
"""
    source = (ROOT / "models.py").read_text(encoding="utf-8")
    otherwise = ast.unparse(ast.parse(source))
    for rotation in ROTATIONS:
        assert source.count(rotation) == otherwise.count(rotation) == 1, rotation

    wrong = otherwise
    for rotation in ROTATIONS:
        wrong = wrong.replace(rotation, rotation.replace(", past", ""))
    half_wrong = otherwise.replace(ROTATIONS[0], "rotate(q)")
    for case, text, outcome in [
            ("models.py", source, "the test passes"),
            ("models.py without its comments", otherwise, "the test passes"),
            ("a variant with rotate(q) and rotate(k)", wrong, "an assert fails"),
            ("a variant with rotate(q)", half_wrong, "an assert fails")]:
        yield check(10, law, case, code, {"source": text}, outcome=outcome)
