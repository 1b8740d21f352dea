"""The teacher's file: ten exercises, their traps, and what a solution must do.

A check is a few lines of code that run in the submission's process, their inputs, and the names of
the values that must come back. What is expected is what the project's own functions answer to the
same lines: their tests hold these against loops, fractions and explicit matrices. The checks of an
exercise go from small to large: the first that fails is shown to the student.

The students' copy has no such file. It has the inputs and values of one seed, tests/checks.json.
"""

import ast
import itertools
import sys
from pathlib import Path

import numpy as np
import torch
import worker
from exercises import Exercise

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


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
        "tests/experiments/test_your_own.py",
        "test_attention_reads_in_pieces_what_it_reads_at_once", 2,
        "Write a test that models.py passes. A wrong variant, whose AttentionBlock.forward calls "
        "rotate(q) in place of rotate(q, past), must fail it by an assert. The variant comes in as "
        "the argument `models`: use nothing else of models.py.",
        "only distances count for rotary positions, so one piece alone shows nothing"),
}


def check(exercise, law, case, code, inputs, names):
    """One check, as it is stored: everything in it can be written as JSON."""
    question = {"code": code.strip(), "names": names.split(),
                "inputs": {name: worker.to_json(value) for name, value in inputs.items()}}
    return {"exercise": exercise, "law": law, "case": case, "code": question["code"],
            "inputs": question["inputs"], "expected": worker.run(question)}


def make_checks(seed=0):
    """All checks, in the order of the exercises. Another seed draws other numbers."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    return [*check_compose(rng), *check_loop(), *check_triangle(), *check_chunks(),
            *check_swap_machine(), *check_backward(), *check_score(rng), *check_filter(rng),
            *check_snap(), *check_own_test()]


# --- 1. The order of composition ------------------------------------------------------------------

def check_compose(rng):
    law = "compose(g, h) is the element whose command does what g and after it h does."
    code = """
import numpy
from data import Group
element = numpy.asarray(Group(name).compose(g, h))
"""
    # In S3 the elements 1 and 2 are exchanges, and 3 and 4 are cycles: none commutes with another.
    g, h = int(rng.integers(1, 3)), int(rng.integers(3, 5))
    yield check(1, law, f"elements {g} and {h} of S3", code, {"name": "S3", "g": g, "h": h},
                "element")
    for name, order in [("S2xS3", 12), ("S4", 24)]:
        numbers = np.arange(order)
        yield check(1, law, f"all of {name}: g a column, h a row", code,
                    {"name": name, "g": numbers[:, None], "h": numbers}, "element")


# --- 2 to 6. The scan -----------------------------------------------------------------------------

# What goes wrong with chunks shows in the smallest of these that can show it.
CHUNKS = [("one chunk of two tokens", (1, 2, 2, 1)), ("two chunks of one token", (2, 1, 2, 1)),
          ("batches of 2 x 3, three chunks", (2, 3, 3, 4, 5, 3))]


def random_scan(*lead, T=12, K=5, V=3):
    """q, k, v, beta and a state, float64: |k| = 1, beta in (0, 2)."""
    q, k, v, beta, state = [torch.randn(*lead, *shape).double()
                            for shape in [(T, K), (T, K), (T, V), (T,), (K, V)]]
    return q, k / k.norm(dim=-1, keepdim=True), v, 2 * beta.sigmoid(), state


def check_loop():
    law = ("Each step is (1): the state forgets along k, writes v under k, and is read with q. The "
           "inputs are left as they are.")
    names = ("q", "k", "v", "beta", "state")
    for case, lead, T, K, V in [("one token, K = V = 1", (), 1, 1, 1),
                                ("three tokens", (), 3, 2, 1),
                                ("batches of 2 x 3", (2, 3), 12, 5, 3)]:
        inputs = dict(zip(names, random_scan(*lead, T=T, K=K, V=V)))
        yield check(2, law, case, """
from scan import delta_rule_recurrent
out, last = delta_rule_recurrent(q, k, v, beta, state)
""", inputs, "out last q k v beta state")

    yield check(2, "Without a state, the loop begins with zeros.", case, """
from scan import delta_rule_recurrent
out, last = delta_rule_recurrent(q, k, v, beta)
""", inputs, "out last")

    inputs = dict(zip(names, random_scan(2, T=4)))
    weights = {"g_out": torch.randn(2, 4, 3).double(), "g_last": torch.randn(2, 5, 3).double()}
    yield check(2, "Autograd goes through the loop: no tensor is overwritten.", "four tokens", """
from scan import delta_rule_recurrent
import torch
inputs = [x.requires_grad_() for x in (q, k, v, beta, state)]
out, last = delta_rule_recurrent(*inputs)
gradients = torch.autograd.grad((out * g_out).sum() + (last * g_last).sum(), inputs)
""", inputs | weights, "gradients")


def check_triangle():
    law = "x solves (I + tril(L, -1)) x = rhs. The inputs stay as they are."
    code = """
from scan import solve_unit_triangle
x = solve_unit_triangle(L, rhs)
"""
    for lead, C, width in [((), 2, 1), ((2, 3), 6, 7)]:
        rhs = torch.randn(*lead, C, width).double()
        full = torch.randn(*lead, C, C).double()
        size = f"{C} x {C}"
        for case, L in [(size, full.tril(-1)),
                        (f"{size}, numbers on and above the diagonal", full)]:
            yield check(3, law, case, code, {"L": L, "rhs": rhs}, "x L rhs")


def check_chunks():
    law = "(6) to (8): each chunk begins with the state that the chunk before left."
    code = """
from scan import run_through_chunks
out, last, starts, D = run_through_chunks(q, k, u, w, state)
"""
    for case, (*lead, N, C, K, V) in CHUNKS:
        q, k, w = torch.randn(3, *lead, N, C, K).double()
        u = torch.randn(*lead, N, C, V).double()
        state = torch.randn(*lead, K, V).double()
        yield check(4, law, case, code, {"q": q, "k": k, "u": u, "w": w, "state": state},
                    "out last starts D state")


def check_swap_machine():
    law = ("Each key of length 1 exchanges two slots: x and x' for the left-hand name x, x_i and "
           "y' for the i-th right-hand name y.")
    code = """
from scan import swap_machine_keys
keys = swap_machine_keys(commands)
shape = list(keys.shape)
after_each_name = []
for key in keys.flatten(0, -2)[:, :, None]:
    slots = slots - 2 * key @ (key.mT @ slots)  # a key may have either sign
    after_each_name.append(slots)
"""
    exchanged = torch.tensor([[1, 0]])
    fetched = torch.tensor([[1, 2, 0]])
    many = torch.stack([torch.randperm(5) for _ in range(6)]).unflatten(0, (2, 3))
    for case, commands in [("a, b = b, a", exchanged), ("a, b, c = b, c, a", fetched),
                           ("a batch of two, three commands each, n = 5", many)]:
        slots = torch.arange(2.0 * commands.shape[-1]).double()[:, None]
        yield check(5, law, case, code, {"commands": commands, "slots": slots},
                    "shape after_each_name")


def check_backward():
    law = "(9) to (16): the gradients of all that was saved, chunk by chunk, without autograd."
    code = """
from scan import chunked_backward
import torch
with torch.inference_mode():
    g_q, g_k, g_v, g_beta, g_state = chunked_backward(q, k, v, beta, starts, D, W, g_out, G)
"""
    for case, (*lead, N, C, K, V) in CHUNKS:
        q, k, v, beta, G = random_scan(*lead, N, T=C, K=K, V=V)
        beta = beta.unsqueeze(-1)
        g_out = torch.randn_like(v)

        # Each chunk begins with a state of its own. So autograd, through the chunks, goes wrong.
        starts = torch.randn_like(G)
        inverse = torch.linalg.inv(torch.eye(C) + (beta * k @ k.mT).tril(-1))
        W = inverse @ (beta * k)
        D = inverse @ (beta * (v - k @ starts))
        inputs = {"q": q, "k": k, "v": v, "beta": beta, "starts": starts, "D": D, "W": W,
                  "g_out": g_out, "G": G[..., -1, :, :]}
        yield check(6, law, f"{case}, each chunk with a state of its own ahead of it", code,
                    inputs, "g_q g_k g_v g_beta g_state")


# --- 7. A row of the table ------------------------------------------------------------------------

def check_score(rng):
    law = ("all and by_position count reveals, final counts last reveals, perfect counts traces; "
           "and JSON can write the row.")
    for case, right in [("two traces of two reveals", np.array([[True, True], [False, True]])),
                        ("no reveal is right", np.array([[False, False, False]])),
                        ("seven traces of three reveals", rng.random((7, 3)) < 0.6)]:
        yield check(7, law, case, """
from eval import score
row = score(right)
""", {"right": right}, "row")


# --- 8. A filter ----------------------------------------------------------------------------------

def check_filter(rng):
    law = "The symbol says where the state is, Bayes divides by its probability, the state moves."
    code = """
from experiments.beliefs import PFSA
automaton = PFSA(delta, rho, start)
evidence, after = automaton.step(belief, symbol)
"""
    stay = np.stack([np.eye(3)] * 4)
    turn = np.roll(stay, 1, 1)
    mixed = rng.random((4, 3, 3)) + 0.1
    mixed = mixed / mixed.sum(1, keepdims=True)
    rho = np.array([[1, 1, 1], [0, 1, 1], [1, 1, 0], [1, 0, 1]], bool)
    one = np.array([[0.5, 0.3, 0.2]])
    many = rng.dirichlet(np.ones(3), 6)
    some = rng.integers(4, size=6)
    for case, delta, belief, symbol in [
            ("a reveal: the state is 2 or 3, and stays", stay, one, np.array([1])),
            ("a command: each state goes to the next", turn, one, np.array([0])),
            ("six beliefs; symbols that reveal and move", mixed, many, some)]:
        inputs = {"delta": delta, "rho": rho, "start": np.ones(3) / 3, "belief": belief,
                  "symbol": symbol}
        yield check(8, law, case, code, inputs, "evidence after belief")


# --- 9. The snap ----------------------------------------------------------------------------------

# Read off a state that held 1, 2, 3: the nearest permutation is still the identity, although rows 0
# and 1 have their largest entries in one column, and columns 1 and 2 in one row.
BENT = torch.tensor([[0.7, 0.1, 0.2], [0.6, 0.4, 0.0], [-0.3, 0.5, 0.8]]).double() - torch.eye(3)


def check_snap():
    law = ("A state comes back as the exact image of the nearest permutation, mean + sum_ij "
           "(P_ij - 1/n) B_ij.")
    code = """
from experiments.inside import LinearImage
image = LinearImage(heads, states, perms)
corrected = image.correct(bent)
"""
    for n, heads, batch in [(3, [(1, 0)], (6,)), (4, [(1, 0), (1, 1)], (4, 6))]:
        # B_ij of (1): orthonormal directions, each in the shape of the states of all heads.
        shape = (len(heads), 3, n)
        directions, _ = torch.linalg.qr(torch.randn(len(heads) * 3 * n, n * n).double())
        B = directions.mT.reshape(n, n, *shape)

        perms = np.array([*itertools.permutations(range(n))])
        states = B[np.arange(n), perms].sum(1)
        bent = states.clone()
        for state, perm in zip(bent, perms):
            for i, j in itertools.product(range(3), range(3)):
                state += BENT[i, j] * B[i, perm[j]]

        inputs = {"heads": heads, "states": states, "perms": perms,
                  "bent": bent.unflatten(0, batch)}
        yield check(9, law, f"the states of all elements of S{n}, bent", code, inputs,
                    "corrected bent")


# --- 10. A test -----------------------------------------------------------------------------------

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
    wrong = otherwise.replace("rotate(q, past)", "rotate(q)")
    assert wrong != otherwise
    for case, text in [("models.py", source), ("models.py without its comments", otherwise),
                       ("a variant with rotate(q)", wrong)]:
        yield check(10, law, case, code, {"source": text}, "outcome")
