"""The numbers in the prose of README, the notebook and the docstrings are those of the records."""

import pytest
from test_chapters import ORDER, README, module
from test_notebook import CELLS

from experiments import at, number, percent, records
from experiments.baselines import first_reveal, passed

PAGES = [README, *("".join(cell["source"]) for cell in CELLS),
         *(module(name).__doc__ for name in ORDER)]
PROSE = " ".join(" ".join(PAGES).split())


def of(name, column, **conditions):
    """The values of a column, where there is one: the key of a record, or a function of one."""
    found = [row[column] if isinstance(column, str) else column(row)
             for row in records(name, **conditions)]
    return [value for value in found if value is not None]


def span(values, digits=0):
    """`46 to 71`, the least and the most of these values."""
    return " to ".join(number(float(value), digits) for value in (min(values), max(values)))


def drifted(key, spread=span, recipe="default"):
    return spread(of("drift", lambda row: 100 * row[key], recipe=recipe))


def low(values):
    return number(min(values), 0)


def first(spacing, millions, model="linrnn-beta1"):
    """After so many commands, and from so many million tokens."""
    return of("baselines", lambda row: first_reveal(row, spacing), model=model, millions=millions)


def swaps(stage, model):
    return of("baselines_swaps", passed(stage), model=model)


def price():
    return int(min(swaps(12, "lstm")) / max(swaps(12, "linrnn")))


def solved(training):
    return of("supervision", "solved", task="parity", model="linrnn", training=training)


def nats(**conditions):
    return [test["nats"][6] for row in records("adversary", **conditions)
            for test in row["results"] if test["test"] in ("first", "second")]


def copied(i):
    return of("copies", lambda row: 100 * row["results"][i]["all"], training="full")


def unseen():
    return min(of("unseen", lambda row: row["seen"] if at(row, length=2)["pairs_correct"] ==
                  at(row, length=2)["pairs"] else None))


def perfect():
    return sum(row["(128,1)"] == row["(128,16)"] == 1 for row in records("drift", recipe="default"))


CLAIMS = [
    lambda: f"answers every reveal in traces of 128 on {perfect()} of 20 seeds",
    lambda: f"gets every reveal right, on {perfect()} of 20 seeds",
    lambda: f"At (1024,128) it gets {drifted('(1024,128)')}%",
    lambda: f"a loop of ten has kept {drifted('loop 10')}% of the values, one repeated command",
    lambda: f"one repeated command {drifted('loop 1')}%",
    lambda: f"a loop of ten has kept {drifted('loop 10')}% of the values, and one repeated command "
            f"{drifted('loop 1')}%",
    lambda: f"at least {drifted('literal 8', low)}% of those that a literal has set",
    lambda: f"keeps {drifted('literal 8', recipe='no literals')}% of the values that they set",
    lambda: "without random first values "
            f"{drifted('repeats 8', recipe='no random first values')}% of those",
    lambda: f"believes {drifted('false reveals')}% of *false* reveals",
    lambda: f"depends on the seed: {drifted('whole')}%",
    lambda: f"of the reveals 25 to 48 it answers at least {drifted('joined late', low)}%",
    lambda: f"{min(of('bench', 'loop')):.1f} to {max(of('bench', 'loop')):.0f} times as fast",
    lambda: f"{min(of('bench', 'loop')):.1f} to {max(of('bench', 'loop')):.0f} times as long",
    lambda: f"is about .{100 * records('beliefs')[0]['results'][1]['kl']:02.0f} nats off",
    lambda: f"gets {span(first(8, 45))}% after 8 commands and, on one of three seeds, "
            f"{max(first(16, 45))}% after 16",
    lambda: f"to {span(first(8, 45))}% after eight commands and, on one of three seeds, to "
            f"{max(first(16, 45))}% after sixteen",
    lambda: f"from at least {price()} times the tokens",
    lambda: f"pass (32,4), after {span(swaps(11, 'lstm'))} million tokens",
    lambda: f"DeltaNets with β ≤ 2 need {span(swaps(11, 'linrnn'), 1)}.",
    lambda: f"stages, after {swaps(12, 'lstm')[0]:.0f} million tokens; DeltaNet needs "
            f"{span(swaps(12, 'linrnn'))}, and beta <= 1",
    lambda: f"learned, from {unseen()} of the 120 commands",
    lambda: f"With {unseen()} commands in training, every unseen command is correct",
    lambda: f"answer {span(of('snap', percent(8192), reader='alone'))}% of the reveals",
    lambda: f"alone know {span(of('snap', lambda row: 100 * row['loop 1'], reader='alone'))}%.",
    lambda: "Eleven of eleven" if len(of("exact", "margin")) == 11 else "fewer",
    lambda: f"answer at least {min(min(map(copied, range(3)))):.1f}% of the reveals in traces",
    lambda: f"repeats 32 times, they answer {span(copied(3))}%",
    lambda: f"a sort for {of('trace', 'commands', function='bubble_sort')[0]} commands",
    lambda: f"needs {solved('curriculum')[0]} to {max(solved('curriculum')):,} programs, and state "
            f"supervision {min(solved('states, linear')):,} to {max(solved('states, linear')):,}",
    lambda: f"it is {span(nats(model='linrnn', coins='honest'), 1)} nats off"]


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_prose_says_the_numbers_of_the_records(claim):
    assert claim() in PROSE
