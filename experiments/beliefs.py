"""What can be known of uncertain commands?  And how do linear representations of it end?

    >>> if random() < 0.25: a, b = b, a         new = old[g] with probability 1/4, else new = old
    ...                                         an empty line ends the command, as in any session

The reader sees the coin, but not how it fell. What can be known is a belief: a probability for
each state. The exact filter computes it by Bayes' rule. A model, or a representation, is measured
against the filter: KL, in nats.

Finding. Without Bayes' division the belief follows a linear recurrence, which is exact until its
numbers underflow, after 149 halvings in float32. A rescaled scan, as linear and as parallel,
carries 100,000 steps. A matrix of n x n marginals is no belief even where nothing underflows: in 16
traces of S5, at (64,4) and in float64, it is 0.28 nats from the filter, and a uniform guess 1.03.

    python -m experiments.beliefs              # how linear ones end: some 5 seconds
    python -m experiments.beliefs train --group S3 --uncertain 0.5
    python -m experiments.beliefs eval RUN     # eval.py alone does not know this task

Conventions: a matrix multiplies on the left, and time runs from left to right.
Symbols: Q states, T symbols of a trace, n variables, B traces, L commands, S commands per reveal.

Source: Siems et al. 2026 (arXiv 2602.14814): definition 1, the joint and the marginal
representation, figures 9 and 10. The rescaled scan is not in the paper.

Next: adversary.py, where models are trained on these traces.
"""

import json
from functools import cached_property
from typing import NamedTuple

import eval as evaluation
import numpy as np
import torch

from data import (COMMANDS, Group, Parser, ReplTask, UserError, at_least, draw_commands, generator,
                  next_tokens, run, stages)
from experiments import FALLING, chapter, groups, table
from models import MODELS
from train import (config_of_run, new_config, new_parser, next_token_loss, to_tensors, train_run)

COMMAND = "python -m experiments.beliefs train"
COINS = [0.25, 0.5, 0.75]  # the probabilities that an uncertain command may show
LENGTHS = [(16, 4), (64, 4), (128, 4)]  # where a belief is tested


# --- 1. The filter of any automaton ---------------------------------------------------------------

class PFSA(NamedTuple):
    """A probabilistic automaton with state reveals. Its filter is Bayes' rule, symbol by symbol.

    A symbol says that the state lies in rho[symbol], and then moves the state at random:
        b <- f(T Z b),    f(x) = x / |x|_1,    Z = diag(rho[symbol]),    T = delta[symbol]
    A reveal has T = I, and a command has Z = I.

    Source: Siems et al. 2026, definition 1, where the start is one state.
    """
    delta: np.ndarray  # [symbols, Q, Q]: delta[symbol, new, old] is a probability
    rho: np.ndarray  # bool [symbols, Q]
    start: np.ndarray  # [Q] a distribution

    def filter(self, symbols):
        """The exact belief ahead of each symbol: [B, T] -> [B, T, Q], float64."""
        belief = np.tile(self.start, (len(symbols), 1))
        beliefs = []
        for symbol in symbols.T:
            beliefs.append(belief)
            belief = self.step(belief, symbol)
        return np.stack(beliefs, 1)

    def step(self, belief, symbol):
        """One symbol: the state is revealed, and then it moves: b <- T Z b / |Z b|_1.

        Shapes: belief [B, Q], symbol integer [B] -> belief [B, Q].
        """
        survived = belief * self.rho[symbol]
        evidence = survived.sum(1)  # the probability of what the symbol says
        posterior = survived / evidence[:, None]
        return (self.delta[symbol] @ posterior[..., None])[..., 0]


# --- 2. The task ----------------------------------------------------------------------------------

class Program(NamedTuple):
    """The random choices behind traces."""
    commands: np.ndarray  # [B, L, n]
    spacing: int  # commands per reveal, S
    asked: np.ndarray  # [B, L/S] the variable of each reveal
    probability: np.ndarray  # [B, L] that a command is executed; at 1 the line shows no coin
    executed: np.ndarray  # bool [B, L] how the coins fell, which no reader is told


class CoinBatch(NamedTuple):
    """A data.Batch, and what an ideal reader predicts."""
    inputs: np.ndarray
    targets: np.ndarray
    reveals: np.ndarray
    best: np.ndarray  # [B, L/S, n] the filter's probability of each value, at each reveal


class CoinTask(ReplTask):
    """REPL traces in which a share of the commands stands behind `if random() < p: `.

    It adds to ReplTask the coins and the filter. `uncertain` is the share of the commands, not the
    probability p of a coin: each p is uniform over COINS. A coin adds four tokens to its command.

    Raises: UserError for a group of more than 120 elements, or a share that is none.
    """

    # A colon belongs to the number before it.
    more_symbols = ["from random import random", "if random() < ", "... ",
                    *(f"{coin}: " for coin in COINS)]

    def __init__(self, group, commands="full", uncertain=0.25):
        if group.order > 120:  # S5. S6 would be 36 times the work at each step
            raise UserError("the exact filter keeps a probability for each of the "
                            f"{group.order:,} states of {group.name}: refused above 120 (S5)")
        if not 0 <= uncertain <= 1:
            raise UserError(f"a share of the commands lies in [0, 1]; got {uncertain}")
        super().__init__(group, commands)
        self.uncertain = uncertain

    def test_batch(self, batch, length, spacing, rng):
        return self.batch_of(self.draw(batch, length, spacing, rng))

    training_batch = test_batch

    def batch_of(self, program):
        """The traces of a program, as a CoinBatch."""
        tokens, reveals = self.write_program(program)
        return CoinBatch(*next_tokens(tokens, reveals), self.best_predictions(program))

    def draw(self, batch, length, spacing, rng):
        """A Program in which all is uniform: commands, their places behind coins, reveals."""
        self.check(length, spacing)
        commands = draw_commands(self.group, self.commands, (batch, length), rng)
        asked = rng.integers(self.group.degree, size=(batch, length // spacing))

        # All traces have equally many coins, and so equally many tokens.
        behind_coins = int(self.uncertain * length + rng.random())
        places = rng.random((batch, length)).argsort(1) < behind_coins
        probability = np.where(places, rng.choice(COINS, (batch, length)), 1)
        executed = rng.random((batch, length)) < probability
        return Program(commands, spacing, asked, probability, executed)

    def write_program(self, program):
        """The traces of a program: tokens [B, T], reveals [B, T]."""
        # Every command as `>>> if random() < 0.5: a, b = b, a`, with `... ` under it.
        lines = self.command_tokens(program.commands)
        coins = np.array([self._id[f"{coin}: "] for coin in COINS] + [-1])
        coin = coins[np.searchsorted(COINS, program.probability)]
        before = self._line(coin.shape, ">>> ", "if random() < ", coin)
        after = self._line(coin.shape, "... ", "\n")
        lines = np.concatenate([before, lines[..., 1:], after], -1)

        # A certain command shows no coin: -1 stands for no token, and is taken out again.
        added = [1, 2, -2, -1]
        lines[..., added] = np.where(coin[..., None] >= 0, lines[..., added], -1)
        tokens, reveals = self.assemble(lines, program.asked, self.program_answers(program))
        kept = tokens >= 0
        return tokens[kept].reshape(len(tokens), -1), reveals[kept].reshape(len(tokens), -1)

    def start_tokens(self):
        """`>>> from random import random`, then a line for each variable: [3 + 5n]."""
        coins = self._line((), ">>> ", "from random import random", "\n")
        return np.concatenate([coins, super().start_tokens()])

    def program_answers(self, program):
        """The revealed values, from 0: [B, L/S]."""
        stays = np.arange(self.group.degree)
        happened = np.where(program.executed[..., None], program.commands, stays)
        return self.answers(happened, program.asked, program.spacing)

    def best_predictions(self, program):
        """p(value | all lines before) at each reveal, by the exact filter: [B, L/S, n]."""
        S = program.spacing
        beliefs = self.automaton.filter(self.symbols(program))
        ahead = beliefs[:, S::S + 1]  # of each reveal: [B, L/S, Q]
        holds = self.group.elements.T[:, :, None] == np.arange(self.group.degree)  # [n, Q, n]
        return (ahead[..., None, :] @ holds[program.asked])[..., 0, :]

    def symbols(self, program):
        """The automaton's symbols of a program, in the order of the trace: [B, L + L/S]."""
        batch, count = program.asked.shape
        coins = np.searchsorted(COINS, program.probability)
        lines = groups.index(self.group, program.commands) * (len(COINS) + 1) + coins
        reveals = program.asked * self.group.degree + self.program_answers(program)
        reveals += self.group.order * (len(COINS) + 1)
        blocks = [lines.reshape(batch, count, -1), reveals[..., None]]
        return np.concatenate(blocks, -1).reshape(batch, -1)

    @cached_property
    def automaton(self):
        """These traces as a PFSA: states are the group's elements, symbols are lines.

        A command of number g and coin number c (the last: certain) is symbol g (coins + 1) + c.
        The reveals follow, variable by variable.
        """
        group = self.group
        n, Q = group.degree, group.order
        stays = np.eye(Q)

        # moves[g, new, old] = 1 where command g takes the state old to the state new.
        after = groups.compose(group, np.arange(Q)[:, None], np.arange(Q))  # [old, g]
        moves = stays[after].transpose(1, 2, 0)
        p = np.array([*COINS, 1.0])[:, None, None]
        commands = (p * moves[:, None] + (1 - p) * stays).reshape(-1, Q, Q)

        # A reveal excludes the states in which the variable holds another value.
        shown = group.elements.T[:, None] == np.arange(n)[:, None]  # [variable, value, Q]
        delta = np.concatenate([commands, np.broadcast_to(stays, (n * n, Q, Q))])
        rho = np.concatenate([np.ones((len(commands), Q), bool), shown.reshape(n * n, Q)])
        return PFSA(delta, rho, stays[0])


# --- 3. Two linear representations ----------------------------------------------------------------
#
# Without Bayes' division the belief is linear in the one before it, the paper's JOINT
# representation:
#
#     h_t = A_t h_{t-1},   A = T Z        |h_t|_1 = probability of all that was revealed        (1)
#
# That is exact, and it dies: every reveal that had probability 1/2 halves h, until its numbers are
# 0. An n x n matrix of MARGINALS, H_ij = P(variable i holds value j), is smaller than Q = n!:
#
#     coin of g:         H <- ((1 - p) I + p P_g) H               (P_g H)_i = H_g[i]            (2)
#     i shows value j:   H <- (I - e_i e_i^T) H (I - e_j e_j^T) + e_i e_j^T                     (3)
#
# If g exchanges two variables, (1 - p) I + p P_g = I - 2p k k^T: a coin flip IS a step of the delta
# rule, with beta = 2p. Not so (3): it erases a column as well, which a step from the left cannot
# do. After (3) the rows and columns of H no longer sum to 1; the decoder repairs that, outside of
# the recurrence.

def marginal_predictions(task, program):
    """What marginals in float64, with Sinkhorn's decoder, expect at each reveal: [B, L/S, n]."""
    batch, length, n = program.commands.shape
    commands, asked, probability = [torch.from_numpy(part) for part in (
        program.commands, program.asked, program.probability)]
    answers = torch.from_numpy(task.program_answers(program))

    H = torch.eye(n, dtype=torch.float64).expand(batch, n, n)
    ahead = []  # of each reveal
    for t in range(length):
        H = flip_coin(H, commands[:, t], probability[:, t])  # a certain command has p = 1
        if (t + 1) % program.spacing == 0:
            reveal = t // program.spacing
            ahead.append(H)
            H = show_value(H, asked[:, reveal], answers[:, reveal])

    decoded = sinkhorn(torch.stack(ahead, 1))  # [B, L/S, n, n]
    return decoded.take_along_dim(asked[..., None, None], 2).squeeze(2).numpy()


def flip_coin(H, g, p):
    """The marginals after a coin of g: H [..., n, n], g integer [..., n], p [...]."""
    p = p[..., None, None]
    moved = H.take_along_dim(g.unsqueeze(-1), -2)
    return (1 - p) * H + p * moved                                                             # (2)


def show_value(H, i, j):
    """The marginals after variable i shows the value j: H [..., n, n], i and j integer [...]."""
    e = torch.eye(H.shape[-1], dtype=H.dtype)
    e_i = e[i].unsqueeze(-1)
    e_j = e[j].unsqueeze(-2)
    return (1 - e_i) * H * (1 - e_j) + e_i * e_j                                               # (3)


def sinkhorn(H):
    """Columns, then rows, divided by their sums until all sums are 1 (Sinkhorn and Knopp 1967)."""
    for _ in range(1000):
        H = H / H.sum(-2, keepdim=True)
        H = H / H.sum(-1, keepdim=True)
        if (H.sum(-2) - 1).abs().max() < 1e-9:
            break
    return H


# --- 4. The rescaled scan -------------------------------------------------------------------------
#
# Is the underflow of (1) the price of linearity? Bayes divides at every step, which is not linear,
# but f(x) = x / |x|_1 commutes with matrices, f(A f(x)) = f(A x): WHEN one divides is free. So let
# a pair (M, s) stand for the matrix M diag(e^s), where the columns of M have the sum 1. Pairs
# compose, and composition is associative, so there is a parallel scan:
#
#     first (M_1, s_1), then (M_2, s_2):   (M_2 W, s_1 + c),   W diag(e^c) = diag(e^s_2) M_1    (4)
#
# Column j of M is the belief of a reader who began in state j, and s_j the log-probability of what
# this reader has seen. Readers who began in different states drift apart without bound.

def rescaled_scan(A_TKK, h_K):
    """Equation (1) at every t at once, in any number format, for any length.

    After round r every pair spans 2^r tokens (Hillis and Steele 1986).
    Shapes: A [T, K, K] with entries >= 0, h [K] -> f(h_t) [T, K], and log |h_t|_1 [T], float64
    """
    M_TKK, s_TK = pair(A_TKK, torch.zeros_like(h_K))

    span = 1
    while span < len(M_TKK):
        # The first `span` pairs begin at the start: they are done.
        joined_M, joined_s = compose((M_TKK[:-span], s_TK[:-span]), (M_TKK[span:], s_TK[span:]))
        M_TKK = torch.cat([M_TKK[:span], joined_M])
        s_TK = torch.cat([s_TK[:span], joined_s])
        span *= 2

    # The start is a pair, too: a matrix of one column.
    h_TK1, s_T1 = compose((h_K.unsqueeze(-1), h_K.new_zeros(1)), (M_TKK, s_TK))
    return h_TK1.squeeze(-1), s_T1.squeeze(-1)


def compose(first, then):
    """The pair that acts as `first`, then as `then`: equation (4)."""
    M1_KV, s1_V = first
    M2_KK, s2_K = then
    W_KV, c_V = pair(M1_KV, s2_K)
    return M2_KK @ W_KV, s1_V + c_V                                                            # (4)


def pair(M_KV, s_K):
    """diag(e^s_K) M as a pair.  Shapes: M [..., K, V], s [..., K] -> [..., K, V], [..., V]."""
    log_KV = M_KV.double().log() + s_K.unsqueeze(-1)
    c_V = log_KV.logsumexp(-2).clamp_min(-1e30)  # a column of zeros stays one
    return (log_KV - c_V.unsqueeze(-2)).exp().to(M_KV.dtype), c_V


# --- 5. How they end ------------------------------------------------------------------------------

# A = T Z in the paper's figure 9, of its only symbol: it reveals that the state is 2 or 3, and then
# the state leaks to 1 with probability 1/2.
LEAK = torch.tensor([[0, 0.5, 0.5],
                     [0, 0.5, 0],
                     [0, 0, 0.5]])


def show():
    """Both linear representations end: by underflow, or by what marginals do not say."""
    rows = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        joint, marginals = underflow(dtype)
        rows.append({"format": str(dtype)[6:], "figure 9, joint": joint,
                     "figure 10, marginals": marginals})
    table("The reveal after which a number that each reveal halves is 0", rows, [*rows[0]], {})

    steps = 100_000  # (1) has long been 0
    beliefs, log_norm = rescaled_scan(LEAK.expand(steps, 3, 3), torch.tensor([0, 0.5, 0.5]))
    exactly = (steps - 1) * np.log(0.5)  # the first reveal is certain
    print(f"\nThe rescaled scan, float32, {steps:,} steps of figure 9\n\n"
          f"log |h| {log_norm[-1]:.3f}, exactly {exactly:.3f}\n"
          f"belief {beliefs[-1].tolist()}, exactly [0.5, 0.25, 0.25]")

    rows = []
    for group in ("S3", "S5"):
        task = CoinTask(Group(group))
        for length, spacing in LENGTHS:
            program = task.draw(16, length, spacing, generator(0, "test", length, spacing))
            best = task.best_predictions(program)
            marginals = marginal_predictions(task, program)
            rows.append({"group": group, "(L,S)": f"({length},{spacing})",
                         "marginals": f"{kl_from(best, marginals).mean():.3f}",
                         "a uniform guess": f"{kl_from(best, 1 / task.group.degree).mean():.3f}"})
    table("Nats from the filter in float64, a quarter of the commands behind a coin",
          rows, [*rows[0]], {})


def underflow(dtype):
    """After how many reveals both linear representations are 0 where they should not be.

    Joint, the paper's figure 9: h_2 halves at each reveal, while the belief stays the same.
    Marginal, figure 10: a cycle exchanges the variables 2 and 3 with probability 1/2, and then 2
    shows its old value. So H_33 halves, while the true belief is the same after each cycle.
    """
    A = LEAK.to(dtype)
    h = torch.tensor([0, 0.5, 0.5], dtype=dtype)
    joint = 0
    while h[1] > 0:
        h = A @ h                                                                              # (1)
        joint += 1

    two = torch.tensor(1)
    H = torch.eye(3, dtype=dtype)
    marginal = 0
    while H[2, 2] > 0:
        H = flip_coin(H, torch.tensor([0, 2, 1]), torch.tensor(0.5, dtype=dtype))
        H = show_value(H, two, two)
        marginal += 1
    return joint, marginal


def kl_from(best, predicted):
    """sum of p log(p / q) over the values, in nats: best p, predicted q [..., n] -> [...]."""
    # Where the filter is sure that a value will not come, p log p is 0: the clip makes it so.
    return (best * np.log(best.clip(1e-300) / np.clip(predicted, 1e-300, 1))).sum(-1)


# --- 6. Trained models ----------------------------------------------------------------------------

# A belief is learned in the last stage, and slowly; there the rates fall to 0. On S3, half of the
# commands behind a coin, three runs end 0.053 to 0.057 nats from the filter; one run by train.py's
# recipe ended at 0.142.
RECIPE = {"curriculum": [(2, 1), (8, 1), (8, 2), (16, 4)], "last_steps": 2000, "lr": 2e-3,
          "matrix_lr": 0.01}
COLUMNS = ["chance", "all", "bayes", "final", "perfect", "kl", "guess"]


def loss_of(model, batch, recipe):
    """next_token_loss, but the accuracy is a share of what the best reader can expect.

    A coin leaves nobody certain, so a stage could not be left on the accuracy alone. A batch
    without `best` says nothing about the stage.
    """
    objective, metrics = next_token_loss(model, batch, recipe)
    share = None
    if batch.best is not None:
        share = metrics["reveal_accuracy"] / float(batch.best.max(-1).mean())
    return objective, metrics | {"reveal_accuracy": share}


def evaluate(model, task, length, spacing, traces=256, seed=0):
    """The row of eval.py on fresh traces, and how far the model is from the filter.

    bayes   accuracy to expect of the best answer, the mean of max p
    kl      from the filter's prediction to the model's, in nats: the mean over the reveals
    guess   the same for a uniform guess of the value
    """
    row = evaluation.evaluate(model, task, length, spacing, traces, seed)

    # The same traces again, for the probabilities.
    drawn = task.test_batch(traces, length, spacing, generator(seed, "test", length, spacing))
    kl, guess = nats_from_filter(model, task, drawn)
    return row | {"bayes": float(drawn.best.max(-1).mean()), "kl": float(kl.mean()),
                  "guess": float(guess.mean()), "kl_by_position": kl.mean(0).tolist()}


@torch.no_grad()
def nats_from_filter(model, task, drawn):
    """KL at each reveal of a CoinBatch, of the model and of a uniform guess: two of [B, L/S]."""
    # All at once would not fit into memory.
    batch = to_tensors(drawn, evaluation.device_of(model))
    found = []
    with evaluation.eval_mode(model):
        for tokens, reveals in zip(batch.inputs.split(16), batch.reveals.split(16)):
            probabilities = model(tokens)[reveals].double().softmax(-1)  # [reveals, vocabulary]
            found.append(probabilities[:, task.value_tokens])
    predicted = torch.cat(found).view(drawn.best.shape).cpu().numpy()
    return kl_from(drawn.best, predicted), kl_from(drawn.best, 1 / task.group.degree)


def train_coins(argv):
    """beliefs train: a run folder, and its closing table."""
    parser = new_parser(COMMAND, "Train a model on uncertain programs.")
    add = parser.add_argument
    add("--model", choices=MODELS, help="(linrnn)")
    add("--group", help="S<n>, A<n>, Z<n> or D<n>, of at most 120 states (S3)")
    add("--commands", choices=COMMANDS, help="whole elements, or exchanges (full)")
    add("--uncertain", type=at_least(0, float), metavar="P",
        help="share of commands behind a coin (0.25)")
    add("--seed", type=at_least(0), help="of all that is random (0)")

    typed = vars(parser.parse_args(argv))
    config = config_of_run(typed, COMMAND) if "resume" in typed else config_of_coins(typed)
    task, model = make(config)
    train_run(task, model, config, typed, LENGTHS, evaluate, COLUMNS, loss_of=loss_of, **FALLING)


def config_of_coins(typed):
    """The config of a new run: what was typed, else S3 with a quarter of uncertain commands."""
    names = {"task": "coins", "group": "S3", "commands": "full", "uncertain": 0.25}
    n = Group(typed.get("group", "S3")).degree
    return new_config(typed, COMMAND, names, {"conv_width": width_of(n)}, RECIPE)


def width_of(n):
    """How many tokens the local block sees: a whole command of n variables."""
    return 2 * n + 3


def make(config):
    """The task of a config, and its model before training.  Raises: UserError."""
    if config.get("task") != "coins":
        raise UserError(f"this is no run of beliefs, but one of {config.get('task')}")
    task = CoinTask(Group(config["group"]), config["commands"], config["uncertain"])
    return task, evaluation.make_model(config, task)


def eval_coins(argv):
    """beliefs eval DIR: the same table for a run of `train`."""
    parser = Parser(prog="python -m experiments.beliefs eval",
                    description="Evaluate a run against the filter.")
    add = parser.add_argument
    add("run", help="a run folder, made by beliefs train")
    add("--lengths", type=stages, default=LENGTHS, help="LENGTH:SPACING,... (16:4,64:4,128:4)")
    add("--traces", type=at_least(1), default=256, help="fresh traces for each length (256)")
    add("--seed", type=at_least(0), default=0, help="of the traces (0)")
    add("--json", action="store_true", help="the table once more, as a last line of JSON")
    args = parser.parse_args(argv)

    task, model = make(evaluation.read_checkpoint(args.run)["config"])
    evaluation.load_weights(model, args.run)
    rows = [evaluate(model, task, *stage, args.traces, args.seed) for stage in args.lengths]
    evaluation.print_table(rows, COLUMNS)
    if args.json:
        print(json.dumps({"results": rows}))


def main(argv=None):
    chapter(__doc__, show, commands={"train": train_coins, "eval": eval_coins}, argv=argv)


if __name__ == "__main__":
    run(main)
