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
    return " to ".join(number(value, digits) for value in (min(values), max(values)))


def drift(key, recipe="default"):
    return [100 * value for value in of("drift", key, recipe=recipe)]


def first(spacing):
    return of("baselines", lambda row: first_reveal(row, spacing), model="linrnn-beta1", millions=45)


def tokens(stage, model):
    return of("baselines_swaps", passed(stage), model=model)


def programs(training):
    return of("supervision", "solved", task="parity", model="linrnn", training=training)


def copied(test):
    return of("copies", lambda row: 100 * row["results"][test]["all"], training="full")


CLAIMS = [
    lambda: f"every reveal in traces of 128 on {drift('(128,16)').count(100)} of 20 seeds",
    lambda: f"every reveal right, on {drift('(128,1)').count(100)} of 20 seeds",
    lambda: f"At (1024,128) it gets {span(drift('(1024,128)'))}%.",
    lambda: f"a loop of ten has kept {span(drift('loop 10'))}% of the values, one repeated",
    lambda: f"a loop of ten has kept {span(drift('loop 10'))}% of the values, and one repeated",
    lambda: f"values, one repeated command {span(drift('loop 1'))}%.",
    lambda: f"values, and one repeated command {span(drift('loop 1'))}%.",
    lambda: f"at least {min(drift('literal 8')):.0f}% of those that a literal has set",
    lambda: f"keeps {span(drift('literal 8', 'no literals'))}% of the values that they set",
    lambda: f"first values {span(drift('repeats 8', 'no random first values'))}% of those",
    lambda: f"three models keeps {min(drift('literal 8', 'no dense reveals')):.0f}% of the values",
    lambda: f"believes {span(drift('false reveals'))}% of *false* reveals",
    lambda: f"depends on the seed: {span(drift('whole'))}%",
    lambda: f"of the reveals 25 to 48 it answers at least {int(min(drift('joined late')))}%",
    lambda: f"{min(of('bench', 'loop')):.1f} to {max(of('bench', 'loop')):.0f} times as fast",
    lambda: f"{min(of('bench', 'loop')):.1f} to {max(of('bench', 'loop')):.0f} times as long",
    lambda: f"is about {records('beliefs')[0]['results'][1]['kl']:.2f} nats from the filter",
    lambda: f"gets {span(first(8))}% after 8 commands and, on one of three seeds, {max(first(16))}%",
    lambda: f"to {span(first(8))}% after eight commands",
    lambda: f"at least {int(min(tokens(12, 'lstm')) / max(tokens(12, 'linrnn')))} times the tokens",
    lambda: f"(32,4), after {span(tokens(11, 'lstm'))} million tokens",
    lambda: f"DeltaNets with β ≤ 2 need {span(tokens(11, 'linrnn'), 1)}.",
    lambda: f"{tokens(12, 'lstm')[0]:.0f} million tokens; DeltaNet needs {span(tokens(12, 'linrnn'))}",
    lambda: f"answer {span(of('snap', percent(8192), reader='alone'))}% of the reveals",
    lambda: f"know {span([100 * x for x in of('snap', 'loop 1', reader='alone')])}%.",
    lambda: "Eleven of eleven" if len(of("exact", "margin")) == 11 else "",
    lambda: f"answer at least {min(min(map(copied, range(3)))):.1f}% of the reveals in traces",
    lambda: f"repeats 32 times, they answer {span(copied(3))}%",
    lambda: f"a sort for {of('trace', 'commands', function='bubble_sort')[0]} commands",
    lambda: f"needs {programs('curriculum')[0]} to {max(programs('curriculum')):,} programs",
    lambda: f"state supervision {' to '.join(f'{x:,}' for x in sorted(programs('states, linear'))[::2])}",
]


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_prose_says_the_numbers_of_the_records(claim):
    assert claim() in PROSE
