"""The teacher's file: ten exercises, their traps, and what a solution must do.

A check is a few lines of code that run in the submission's process, and the names of the values
that must come back. What is expected is what the project's own functions answer to the same lines:
their tests hold these against loops, fractions and explicit matrices. The cases of a check go from
small to large: the first that fails is shown to the student, who can run its code.
"""

import sys
from typing import NamedTuple

import worker
from exercises import ROOT, Exercise

sys.path.insert(0, str(ROOT))

EXERCISES = {
    # Trap: h[g[i]] in place of g[h[i]], which is the same where all elements commute.
    1: Exercise(
        "data.py", "Group.compose", 1,
        "Numbers in, numbers out: .elements and .index go from one to the other. g and h may be "
        "single numbers or arrays whose shapes broadcast."),
    # Traps: beta scales v alone, not v - S^T k; `state +=` writes into the caller's state.
    2: Exercise(
        "scan.py", "delta_rule_recurrent", 2,
        "A loop over time, (1) and (2). check_inputs gives the state to begin with. Leave the "
        "inputs as they are, and let autograd go through your loop."),
    # Trap: the matrix is I + tril(L, -1), and not L or its lower half.
    3: Exercise(
        "scan.py", "solve_unit_triangle", 1,
        "One line of torch, or a loop over the rows."),
    # Traps: D and O of a chunk want the state before it; the read at t sees the write at t.
    4: Exercise(
        "scan.py", "run_through_chunks", 2,
        "(6) and (8) in a loop over the chunks, then (7) for all chunks at once."),
    # Trap: y' is exchanged with y, and so every command does nothing.
    5: Exercise(
        "scan.py", "swap_machine_keys", 2,
        "First a key for each left-hand name, x and its spare x'. Then a key for each right-hand "
        "name: for the i-th, y, exchange x_i and y'."),
    # Trap: G_n is the gradient of the state after chunk n. With one chunk, one late is not seen.
    6: Exercise(
        "scan.py", "chunked_backward", 4,
        "(9) to (16), from the last chunk to the first, with the states, D and W that the forward "
        "kept, and without autograd. Begin with a comment: derive (13) from (4) in your own words, "
        "two to four sentences. Why has M a minus, and no diagonal? Your teacher reads it."),
    # Traps: perfect is a share of traces; by_position as an array breaks --json.
    7: Exercise(
        "eval.py", "score", 2,
        "The keys are reveals, how many there are; all, final and perfect, the shares of right "
        "reveals, of right last reveals and of traces without an error; perfect_low and "
        "perfect_high, the Wilson interval of perfect; by_position, a list with the share of right "
        "reveals at each position."),
    # Traps: it reveals first and moves then; delta[symbol, new, old] stands left of a belief.
    8: Exercise(
        "experiments/beliefs.py", "PFSA.step", 2,
        "The formula above, for a batch of beliefs with a symbol each."),
    # Traps: the largest entry of each row need not be a permutation; P transposed undoes a command.
    9: Exercise(
        "experiments/inside.py", "LinearImage.correct", 2,
        "Read P off, take the nearest permutation, and write its image, (1)."),
    # Trap: only distances count for rotary positions, so one piece alone shows nothing.
    10: Exercise(
        "tests/experiments/test_your_own.py",
        "test_attention_reads_in_pieces_what_it_reads_at_once", 2,
        "Write a test that models.py passes. A wrong variant, whose AttentionBlock.forward calls "
        "rotate(q) in place of rotate(q, past), must fail it by an assert. The variant comes in as "
        "the argument `models`: use nothing else of models.py."),
}


class Check(NamedTuple):
    exercise: int
    law: str
    names: str  # of the values that must come back
    cases: list  # lines ahead of the code, for each case
    code: str


BEGIN = """
import numpy, torch
rng = numpy.random.default_rng({seed})
normal = lambda *shape: torch.from_numpy(rng.standard_normal(shape))
"""

# What goes wrong with chunks shows in the smallest of these that can show it.
CHUNKS = ["lead, N, C, K, V = (), 1, 2, 2, 1", "lead, N, C, K, V = (), 2, 1, 2, 1",
          "lead, N, C, K, V = (2, 3), 3, 3, 4, 5"]

CHECKS = [
    # In S3 the elements 1 and 2 are exchanges, 3 and 4 are cycles: none commutes with another.
    Check(1, "compose(g, h) is the element whose command does what g and after it h does.",
          "element", [
              'name, g, h = "S3", 1, 3',
              'name, g, h = "S2xS3", numpy.arange(12)[:, None], numpy.arange(12)'], """
from data import Group
element = numpy.asarray(Group(name).compose(g, h))
"""),

    # Of inputs that want a gradient, autograd refuses to have one overwritten.
    Check(2, "Each step is (1): the state forgets along k, writes v under k, and is read with q. "
          "Without a state the loop begins with zeros. Autograd goes through the loop; no tensor "
          "is overwritten.", "out last gradients from_zeros", [
              "lead, T, K, V = (), 1, 1, 1", "lead, T, K, V = (), 3, 2, 1",
              "lead, T, K, V = (2, 3), 7, 5, 3"], """
q, k, v = normal(*lead, T, K), normal(*lead, T, K), normal(*lead, T, V)
beta, state = normal(*lead, T), normal(*lead, K, V)
inputs = [x.requires_grad_() for x in (q, k, v, beta, state)]
from scan import delta_rule_recurrent
out, last = delta_rule_recurrent(*inputs)
gradients = torch.autograd.grad(out.square().sum() + last.square().sum(), inputs)
from_zeros = delta_rule_recurrent(q, k, v, beta)
"""),

    Check(3, "x solves (I + tril(L, -1)) x = rhs. The inputs stay as they are.", "x L rhs", [
        "L, rhs = normal(2, 2).tril(-1), normal(2, 1)", "L, rhs = normal(2, 2), normal(2, 1)",
        "L, rhs = normal(2, 3, 6, 6), normal(2, 3, 6, 7)"], """
from scan import solve_unit_triangle
x = solve_unit_triangle(L, rhs)
"""),

    Check(4, "(6) to (8): each chunk begins with the state that the chunk before left.",
          "out last starts D state", CHUNKS, """
q, k, w = normal(3, *lead, N, C, K)
u, state = normal(*lead, N, C, V), normal(*lead, K, V)
from scan import run_through_chunks
out, last, starts, D = run_through_chunks(q, k, u, w, state)
"""),

    Check(5, "Each key of length 1 exchanges two slots: x and x' for the left-hand name x, x_i and "
          "y' for the i-th right-hand name y.", "shape after_each_name", [
              "commands = torch.tensor([[1, 0]])", "commands = torch.tensor([[1, 2, 0]])",
              "commands = normal(2, 3, 5).argsort(-1)"], """
from scan import swap_machine_keys
keys = swap_machine_keys(commands)
shape = [*keys.shape]
slots = torch.arange(2.0 * commands.shape[-1]).double()[:, None]
after_each_name = []
for key in keys.flatten(0, -2)[:, :, None]:
    slots = slots - 2 * key @ (key.mT @ slots)  # a key may have either sign
    after_each_name.append(slots)
"""),

    # Each chunk begins with a state of its own. So autograd, through the chunks, goes wrong.
    Check(6, "(9) to (16): the gradients of all that was saved, chunk by chunk, without autograd.",
          "g_q g_k g_v g_beta g_state", CHUNKS, """
q, k = normal(2, *lead, N, C, K)
v, g_out = normal(2, *lead, N, C, V)
beta, starts, G = normal(*lead, N, C, 1), normal(*lead, N, K, V), normal(*lead, K, V)
inverse = torch.linalg.inv(torch.eye(C) + (beta * k @ k.mT).tril(-1))
W, D = inverse @ (beta * k), inverse @ (beta * (v - k @ starts))
from scan import chunked_backward
with torch.inference_mode():
    g_q, g_k, g_v, g_beta, g_state = chunked_backward(q, k, v, beta, starts, D, W, g_out, G)
"""),

    Check(7, "all and by_position count reveals, final counts last reveals, perfect counts traces; "
          "and JSON can write the row.", "row", [
              "right = numpy.array([[True, True], [False, True]])",
              "right = numpy.array([[False, False, False]])",
              "right = rng.random((7, 3)) < 0.6"], """
from eval import score
row = score(right)
"""),

    Check(8, "The symbol says where the state is, Bayes divides by its probability, the state "
          "moves.", "evidence after belief", [
              "move, belief, symbol = numpy.eye(3), numpy.array([[0.5, 0.3, 0.2]]), [1]",
              "move, belief, symbol = numpy.eye(3)[[2, 0, 1]], numpy.array([[0.5, 0.3, 0.2]]), [0]",
              "move, belief = rng.dirichlet([1, 1, 1], 3).T, rng.dirichlet([1, 1, 1], 6)\n"
              "symbol = rng.integers(4, size=6)"], """
delta = numpy.stack([move, move[::-1], move, move[::-1]])
rho = numpy.array([[1, 1, 1], [0, 1, 1], [1, 1, 0], [1, 0, 1]], bool)
from experiments.beliefs import PFSA
automaton = PFSA(delta, rho, numpy.ones(3) / 3)
evidence, after = automaton.step(belief, numpy.array(symbol))
"""),

    # The nearest permutation to `bent` is the identity, although rows 0 and 1 have their largest
    # entries in one column, and columns 1 and 2 in one row.
    Check(9, "A state comes back as the exact image of the nearest permutation, mean + sum_ij "
          "(P_ij - 1/n) B_ij.", "corrected states", [
              "n, heads = 3, [(1, 0)]", "n, heads = 4, [(1, 0), (1, 1)]"], """
import itertools
perms = numpy.array([*itertools.permutations(range(n))])
B = normal(n, n, len(heads), 3, n)
images = B[numpy.arange(n), perms].sum(1)
bent = numpy.array([[0.7, 0.1, 0.2], [0.6, 0.4, 0.0], [-0.3, 0.5, 0.8]]) - numpy.eye(3)
states = images.clone()
for state, perm in zip(states, perms):
    for i, j in itertools.product(range(3), range(3)):
        state += bent[i, j] * B[i, perm[j]]
from experiments.inside import LinearImage
corrected = LinearImage(heads, images, perms).correct(states.unflatten(0, (2, -1)))
"""),

    Check(10, "The test passes on models.py, and a wrong variant fails it by an assert.",
          "outcome", ['call = "rotate(q, past)"', 'call = "rotate(q)"'], """
import inspect, models, types
variant = types.ModuleType("models")
exec(inspect.getsource(models).replace("rotate(q, past)", call), vars(variant))
from test_your_own import test_attention_reads_in_pieces_what_it_reads_at_once as test
try:
    test(variant)
    outcome = "the test passes"
except AssertionError:
    outcome = "an assert fails"
"""),
]


def make_checks(seed=0):
    """All checks, in the order of the exercises, with what is expected. The seed draws numbers."""
    found = []
    for check in CHECKS:
        for case in check.cases:
            code = f"{BEGIN.format(seed=seed)}{case}{check.code}".strip()
            found.append({"exercise": check.exercise, "law": check.law, "code": code,
                          "expected": worker.run(code, check.names.split())})
    return found
