"""How does one follow a state that is seen only at times?  A filter, exact for any automaton.

A probabilistic automaton with state reveals reads symbols. A symbol may reveal something of the
state, and it may move the state at random. The filter keeps the probability of every state. Bayes'
rule updates these probabilities at each symbol.

Finding. The filter of a trace with uncertain commands (beliefs.py) is the enumeration of all ways
in which its coins can fall, to 1e-12. The filter of a random automaton is the sum over all its
paths, to 1e-12. tests/experiments/test_beliefs.py shows both.

Command: none. The two chapters after this one use the filter.

Source: Siems et al. 2026 (arXiv 2602.14814), definition 1 (there the start is one state) and
figure 9.

Next: beliefs.py, underflow.py.
"""

import numpy as np


class PFSA:
    """A probabilistic automaton with state reveals. Its filter is Bayes' rule, symbol by symbol.

    A symbol says that the state lies in rho[symbol], and then moves the state at random:
        b <- f(T Z b),    f(x) = x / |x|_1,    Z = diag(rho[symbol]),    T = delta[symbol]
    A reveal has T = I, and a command has Z = I.

    Shapes: delta [symbols, Q, Q], where delta[symbol, new, old] is a probability; rho bool
            [symbols, Q]; start [Q], a distribution too. Errors call the symbols by their names.
    Raises: ValueError for shapes that do not fit, or columns that are no distribution.
    Source: Siems et al. 2026, definition 1.
    """

    def __init__(self, delta, rho, start, names=None):
        self.delta, self.rho = np.asarray(delta, float), np.asarray(rho, bool)
        self.start = np.asarray(start, float)
        symbols, Q = self.rho.shape
        self.names = names or range(symbols)
        if self.delta.shape != (symbols, Q, Q) or self.start.shape != (Q,):
            raise ValueError(f"rho {self.rho.shape} has {symbols} symbols and {Q} states: delta "
                             f"must be {(symbols, Q, Q)} and start {(Q,)}; got "
                             f"{self.delta.shape} and {self.start.shape}")
        for name, table in [("delta", self.delta), ("start", self.start[:, None])]:
            sums = table.sum(-2)
            if not (table.min() >= 0 and np.abs(sums - 1).max() < 1e-12):
                raise ValueError(f"each column of {name} must be a distribution, at least 0 and of "
                                 f"sum 1; got entries from {table.min()}, sums from {sums.min()} "
                                 f"to {sums.max()}")

    def filter(self, symbols):
        """The exact belief ahead of each symbol, and the log of each symbol's evidence, |Z b|_1.

        The sum of the second is the log-probability of all that the symbols revealed.
        Shapes: symbols [B, T] -> beliefs [B, T, Q], log-evidence [B, T], both float64.
        Raises: ValueError at a reveal that the symbols before it make impossible.
        Cost: O(B T Q^2).

        Exercise 8 (2 points, 4 lines): one symbol, evidence[:, t] and the belief after it.
        Trap: reveal first, then move; and delta[symbol, new, old] stands on the left of a belief.
        """
        (batch, length), Q = symbols.shape, len(self.start)
        beliefs, evidence = np.empty((batch, length, Q)), np.empty((batch, length))
        belief = np.broadcast_to(self.start, (batch, Q))
        with np.errstate(invalid="ignore"):  # 0 / 0 is reported below
            for t in range(length):
                beliefs[:, t] = belief
                ### BEGIN SOLUTION
                survived = belief * self.rho[symbols[:, t]]
                evidence[:, t] = survived.sum(1)
                posterior = survived / evidence[:, t, None]
                belief = (self.delta[symbols[:, t]] @ posterior[..., None])[..., 0]
                ### END SOLUTION
        if (evidence == 0).any():
            trace, step = np.argwhere(evidence == 0)[0]
            raise ValueError(f"impossible reveal at step {step} of trace {trace}: no state that "
                             f"the symbols before it allow is consistent with "
                             f"{self.names[symbols[trace, step]]!r}")
        return beliefs, np.log(evidence)


def leak(p=0.5):
    """The paper's figure 9, where p = 1/2. States are numbered from 1.

    The only symbol reveals that the state is 2 or 3. Then the state leaks to 1 with probability p.
    So each further symbol has probability 1 - p, while the belief ahead of each stays the same.
    """
    return PFSA([[[1, p, p], [0, 1 - p, 0], [0, 0, 1 - p]]], [[False, True, True]], [0, 0.5, 0.5],
                ["one of 2 and 3"])
