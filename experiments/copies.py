"""Why can a reflection not copy?  And what one more key does.

    a = b             loses the value of a, and then a and b hold the same

The paper's programs only shuffle. `a = b` is another thing: it loses a value. A step of the delta
rule takes away what it has read, along the key by which it has read it: with beta = 2 it reflects,
and with beta = 1 it takes a state to the nearest point of a hyperplane. `a = b` reads the
difference of two rows and changes only one of them. Section 1 proves that no other way of writing
the state helps: not both `a = b` and `b = a` are made of such steps. What helps is to read along
one key and to write along another. A step then fetches what stands in b and puts it into a, and it
can add as well: section 2 builds a machine of such steps.

Finding. In each of three representations the matrix of one copy at least has a norm above 1, 1.41
to 1.73, and steps of the delta rule never have. A search that chooses the representation finds one
copy by eight such steps. For both copies its error stays at 5% of the margin, by which the true
value is ahead of the others when it is read. With one more key it finds both.

    python -m experiments.copies            the norms of copies
    python -m experiments.copies search     how near the delta rule comes: ten seconds

Sources. DeltaProduct (Siems et al. 2025, arXiv 2502.10297), appendix B: "a generalized Householder
matrix cannot be a copy matrix". RWKV-7 (Peng et al. 2025, arXiv 2503.14456) has steps with two
vectors, with which it recognises all regular languages. The proof for any representation, the
search and this machine are ours.

Next: assign.py, where models are trained to copy and to compute.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

from data import Parser, run
from experiments import chapter, table

# --- 1. No layer of the delta rule can copy both ways ---------------------------------------------
#
# Let one vector c(x, y) stand for the values x of a and y of b, in any representation: a state S is
# such a vector, too, if its columns are written below each other. A line is c <- A c + s, where A
# and s depend on its tokens only, and |A| <= 1: A never makes a vector longer. What a line does to
# the difference of two such vectors is A alone. Let D be the space that all differences span, P the
# A of `a = b` on it, and Q that of `b = a`. Both map D into itself, because a line leads from
# states to states. Transposes are taken in D.
#
#   1. Twice is once: P P = P. A projection that makes no vector longer is an orthogonal one, so it
#      is symmetric. The same holds for Q.
#   2. `b = a` after `a = b` changes nothing: Q P = P. Likewise P Q = Q.
#   3. The transpose of Q P = P is P Q = P. With P Q = Q this gives P = Q.
#   4. P takes c(x, y) - c(x', y) to 0, for the value of a is lost. Q takes c(x, y) - c(x, y') to 0.
#      Differences of these two kinds span D. So P = Q takes all of it to 0.
#   5. Hence c(y, y), to which `a = b` leads, is the same vector for each y. Nothing can be read.
#
# The exchange `a, b = b, a` and one of the copies give the other copy. So such a layer has copies
# one way or exchanges, but not both. A step of the delta rule has |A| <= 1 for each beta in [0, 2],
# and so has any number of steps or heads. The proof leaves ways out: a second layer, attention,
# several vectors for one pair of values, transitions that depend on lines before, a step between
# the lines that is not linear (snap.py), and being right only nearly. The table has the norm of the
# matrix that each line needs; a step with one more key may have that norm.

LINES = {"a = b": lambda x, y: (y, y), "b = a": lambda x, y: (x, x),
         "a, b = b, a": lambda x, y: (y, x)}


def representations():
    """Three ways to write the values of two variables: {name: vectors [3, 3, width]}."""
    x, y = np.indices((3, 3))
    one_hot = np.eye(3)
    return {"a slot for each variable": np.concatenate([one_hot[x], one_hot[y]], -1),
            "one-hot of all states": np.eye(9).reshape(3, 3, 9),
            "(x - y, y)": np.stack([x - y, y], -1).astype(float)}


def norm_of_line(vectors, line):
    """The least norm |A| of a matrix that executes a line on the space D of section 1.

    Shapes: vectors c(x, y) [values, values, width] -> a number; inf if no A executes the line.
    """
    x, y = np.indices(vectors.shape[:2])
    images = vectors[LINES[line](x, y)]

    # The differences from one state span all differences, one a row. On them A is determined, and
    # the pseudoinverse gives the A that takes everything orthogonal to them to 0.
    before = (vectors - vectors[0, 0]).reshape(x.size, -1)
    after = (images - images[0, 0]).reshape(x.size, -1)
    transposed = np.linalg.pinv(before) @ after  # A^T, which is as long as A
    if abs(before @ transposed - after).max() > 1e-9:
        return math.inf
    return float(np.linalg.norm(transposed, 2))


def least_error(lines, own_read_key, starts=3, iterations=250):
    """Search for a representation and for steps that copy: how near to these lines they come.

    Free are nine vectors c(x, y) in 8 dimensions, of length 2 at most; a reader for each value of x
    and of y, of length 1; and for each line eight steps 1 - beta b k^T with unit keys, beta in
    [0, 2], and a vector that is added after them. b = k unless own_read_key. The margin is by how
    much the reader of the true value is ahead of the others, at least.
    Returns: the distance between a line's result and where it should be, the greatest of all lines
        and states, as a share of the margin; the best of some random starts; inf without a margin.
    """
    return min(error_of_start(lines, own_read_key, start, iterations) for start in range(starts))


def error_of_start(lines, own_read_key, start, iterations):
    """One start of the search, by torch's L-BFGS."""
    rng = torch.Generator().manual_seed(start)
    x, y = torch.cartesian_prod(torch.arange(3), torch.arange(3)).T  # of nine states
    targets = []
    for line in lines:
        new_x, new_y = LINES[line](x, y)
        targets.append(3 * new_x + new_y)  # the number of a state
    targets = torch.stack(targets)  # [lines, 9]

    def free(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64).requires_grad_()

    vectors = free(9, 8)
    readers = free(2, 3, 8)
    keys = free(2, 8, len(lines), 8)  # [b or k, step, line, dimension]
    angles = free(8, len(lines))
    added = free(len(lines), 1, 8)
    optimizer = torch.optim.LBFGS([vectors, readers, keys, angles, added], max_iter=iterations,
                                  history_size=30, line_search_fn="strong_wolfe")

    def measure():
        """The errors [lines, 9]; by how much true readers are ahead of others [36]."""
        c = vectors * (2 / vectors.norm(dim=-1, keepdim=True)).clamp(max=1)
        b, k = F.normalize(keys, dim=-1)
        beta = 2 * (0.3 * angles).sin().square()  # the steps begin small
        after = c.expand(len(lines), 9, 8)
        for b_LD, k_LD, beta_L in zip(b, k if own_read_key else b, beta):
            read = after @ k_LD.unsqueeze(-1)  # [lines, 9, 1]
            after = after - read * (beta_L.unsqueeze(-1) * b_LD).unsqueeze(-2)
        errors = (after + added - c[targets]).square().sum(-1)

        scores = torch.einsum("nd,vxd->nvx", c, F.normalize(readers, dim=-1))
        of_true = scores.gather(2, torch.stack([x, y], -1).unsqueeze(-1))
        ahead = of_true - scores
        return errors, ahead[ahead != 0]  # without the true reader itself

    def loss():
        optimizer.zero_grad()
        errors, ahead = measure()
        value = errors.mean() + (1 - ahead).relu().square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    errors, ahead = measure()
    margin = ahead.min()
    return (errors.max().sqrt() / margin).item() if margin > 0 else math.inf


# --- 2. A machine by hand: one more key -----------------------------------------------------------
#
#     S <- S + b (v - S^T k)^T          the scan of scan.py: it reads along k, and writes along b
#
# Rows of S are memory slots, as in the swap machine of scan.py. With k = e_x - e_y and b = e_x the
# row x becomes the row y: the step is x <- y, a copy. Its matrix 1 - b k^T has the eigenvalue
# 1 - k.b = 0 and the norm sqrt 2. The delta rule writes along the key by which it has read, so that
# it would change the row y, too.
#
# A line of an integer program takes a spare slot t, and a step for each of its tokens:
#
#     >>>               t <- 0            k = b = e_t                       eigenvalue 0
#     an operand y      t <- t + y or -   k = -e_y or +e_y, b = e_t         eigenvalue 1
#     a number 4        t <- t + 4 or -   k = 0, b = e_t, v = 4 or -4       eigenvalue 1
#     the newline       a <- t            k = e_a - e_t, b = e_a            eigenvalue 0
#
# So the target may stand among the operands. `a = a + a` in one step would need the eigenvalue 2.
#
# A shuffle line takes a spare x' for each variable, as in the swap machine, but copies in place of
# exchanges: x' <- x at each left-hand name, x_i <- y' at the i-th right-hand name, and x_i <- 4 for
# a 4. All eigenvalues are 0 or 1. Where b lies along k, an exchange needs the eigenvalue -1; copies
# by way of spare rows do the same without it.


def copy_step(target, source, slots):
    """k and b of the step that copies row `source` to row `target`.  Shapes: [...] -> [..., slots].
    """
    b = F.one_hot(target, slots).double()
    return b - F.one_hot(source, slots).double(), b


def shuffle_steps(commands):
    """The 2n steps of each shuffle: from integers [..., L, n] to k, b [..., L 2n, 2n] and v
    [..., L 2n, 1].

    An entry below n is a variable, and n + j is the literal of the value j, counted from 0.
    """
    *lead, length, n = commands.shape
    place = torch.arange(n).expand_as(commands)
    literal = (commands >= n).unsqueeze(-1)

    k_left, b_left = copy_step(place + n, place, 2 * n)
    k_right, b_right = copy_step(place, n + commands % n, 2 * n)
    k_right = torch.where(literal, b_right, k_right)  # x_i <- v
    v_right = torch.where(literal, commands.unsqueeze(-1) - n, 0).double()

    k = torch.cat([k_left, k_right], -2)  # [..., L, 2n, 2n]: 2n steps a command
    b = torch.cat([b_left, b_right], -2)
    v = torch.cat([torch.zeros_like(v_right), v_right], -2)
    return [x.reshape(*lead, length * 2 * n, -1) for x in (k, b, v)]


def number_steps(symbols, names):
    """The step of each token of an integer line: k, b [T, n + 1] and v [T, 1].

    symbols: the tokens of a line, as in [">>> ", "a", " = ", "4", " - ", "b", "\\n"].
    """
    slots = dict(zip([*names, "t"], np.eye(len(names) + 1)))
    nothing = 0 * slots["t"]
    sign, target = 1, None
    steps = []
    for symbol in symbols:
        step = nothing, nothing, 0
        if symbol == ">>> ":
            step = slots["t"], slots["t"], 0
        elif symbol == "\n":
            step = slots[target] - slots["t"], slots[target], 0
        elif symbol == " - ":
            sign = -1
        elif symbol in names and target is None:
            target = symbol
        elif symbol in names:
            step = -sign * slots[symbol], slots["t"], 0
        elif symbol not in (" = ", " + "):
            step = nothing, slots["t"], sign * int(symbol)
        steps.append(step)
    k, b, v = map(np.array, zip(*steps))
    return [torch.from_numpy(x).double() for x in (k, b, v[:, None])]


# --- 3. The tables --------------------------------------------------------------------------------

def show():
    """The norms of three lines in three representations."""
    rows = []
    for name, vectors in representations().items():
        rows.append({"representation": name,
                     **{line: f"{norm_of_line(vectors, line):.2f}" for line in LINES}})
    table("The least norm of a matrix that executes a line (three values)", rows, rows[0], {})


def show_search(argv=()):
    """The command `search`, of some ten seconds."""
    Parser(prog="python -m experiments.copies search").parse_args(argv)
    both = ["a = b", "b = a"]
    print("The least error of a line that a search finds, as a share of the margin of a read\n")
    for name, lines, own_read_key in [("one copy, delta rule", both[:1], False),
                                      ("both copies, delta rule", both, False),
                                      ("both copies, one more key", both, True)]:
        print(f"{name:>25}  {least_error(lines, own_read_key):.3f}", flush=True)


def main(argv=None):
    chapter(__doc__, show, commands={"search": show_search}, argv=argv)


if __name__ == "__main__":
    run(main)
