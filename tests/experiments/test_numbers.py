"""The numbers in the prose of README, the notebook and the docstrings are those of the records."""

import numpy as np
import pytest
from test_chapters import ORDER, README, module
from test_notebook import CELLS

from experiments import percent, records
from experiments.adversary import worst_at
from experiments.baselines import first_reveal
from experiments.drift import exponent

PROSE = " ".join(" ".join([README, *("".join(cell["source"]) for cell in CELLS),
                           *(module(name).__doc__ for name in ORDER)]).split())


def of(name, column, **where):
    """The values of a column, where there is one: the key of a record, or a function of one."""
    values = [column(row) if callable(column) else row[column] for row in records(name, **where)]
    return sorted(value for value in values if value is not None)


def span(values, digits=0):
    """`46 to 71`, the least and the most of these values."""
    return f"{min(values):,.{digits}f} to {max(values):,.{digits}f}"


def drift(key):
    return [100 * value for value in of("drift", key, part="the default")]


def whole(name):
    twenty = [row for row in records("drift", part=name) if row["seed"] >= 340]
    return 100 * np.median([row["whole"] for row in twenty])


def papers(key, **where):
    """Of two of the paper's layers, in %."""
    return [100 * value for value in of("parts", key, part="two of the paper's layers", **where)]


def first(after):
    return of("baselines", lambda row: first_reveal(row, after), millions=45,
              model="linrnn-beta1")


def nats(shown):
    return of("adversary", worst_at(64, [shown]), model="linrnn", coins="honest")


def twice_as_long(training):
    return of("supervision", percent(16, key="final"), task="traces", length=8, training=training)


CLAIMS = [
    lambda: "{} of {} seeds of S3, S4, A5, S5 and S6".format(
        len(of("found", "gap", shown="all")), len(records("found", shown="all"))),
    lambda: f"every reveal in random traces of 128, on {drift('(128,16)').count(100)} of 40 seeds",
    lambda: f"every reveal is right, on {drift('(128,16)').count(100)} of 40 seeds; at (1024,128) "
            f"{span(drift('(1024,128)'))}% are.",
    lambda: f"every 128th, {span(drift('(1024,128)'))}% of the reveals are right",
    lambda: "to the power of .{:.0f} to .{:.0f}.".format(
        *(10 * limit(of("drift", lambda row: exponent(row["law"]["repeated"]), part="the default"))
          for limit in (min, max))),
    lambda: f"{span(of('unseen', percent(128), seen=60))}% of the reveals",
    lambda: f"gets {span(twice_as_long('states, decoder'))}% right, the curriculum "
            f"{span(twice_as_long('curriculum'))}%",
    lambda: f"a loop of ten has kept {span(drift('loop 10'))}% of the values, one repeated command "
            f"{span(drift('loop 1'))}%.",
    lambda: f"a loop of ten has kept {span(drift('loop 10'))}% of the values, and one repeated",
    lambda: f"values, and one repeated command {span(drift('loop 1'))}%.",
    lambda: f"is {whole('no write gate'):.0f}% without the write gate and "
            f"{whole('convolution of 4'):.0f}% with a convolution of 4 tokens, where the default "
            f"gets {whole('the default'):.0f}%. Without repeated commands it is "
            f"{whole('no repeated commands'):.0f}%",
    lambda: f"learn the task on {papers('passed').count(100)} of {len(papers('passed'))} seeds",
    lambda: f"get {span(papers('(256,32)', passed=True))}% on the nine seeds that learn",
    lambda: "{:.1f} to {:.0f} times as fast".format(*of("bench", "loop")),
    lambda: "{:.1f} to {:.0f} times as long".format(*of("bench", "loop")),
    lambda: f"{span(first(8))}% after 8 commands and, on one of three seeds, {first(16)[2]}% after",
    lambda: f"to {span(first(8))}% after eight commands",
    lambda: f"it is {span(nats('first') + nats('second'), 1)} nats off",
    lambda: f"answer {span(of('snap', percent(8192), reader='alone'))}% of the reveals",
    lambda: f"a sort for {of('trace', 'commands')[0]} commands"]


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_prose_says_the_numbers_of_the_records(claim):
    assert claim() in PROSE
