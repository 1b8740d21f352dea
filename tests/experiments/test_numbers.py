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


def span(values, digits=0, dash=" to "):
    """`46 to 71`, the least and the most of these values."""
    return dash.join(number(float(value), digits) for value in (min(values), max(values)))


more, less = [records("baselines", model="linrnn-beta1", millions=M, seed=70)[0] for M in (45, 15)]
lstms, deltas = [{stage: of("baselines_swaps", passed(stage), model=model) for stage in (11, 12)}
                 for model in ("lstm", "linrnn")]
price = int(min(lstms[12]) / max(deltas[12]))
loop = of("bench", "loop")
copied = [[100 * row["results"][i]["all"] for row in records("copies", training="full")]
          for i in range(4)]
unseen = min(of("unseen", lambda row: row["seen"] if at(row, length=2)["pairs_correct"] ==
                at(row, length=2)["pairs"] else None))
parity = [of("supervision", "solved", task="parity", model="linrnn", training=training)
          for training in ("curriculum", "states, linear")]
bpe, letters = [records("strings", lexer="bpe", reveal=reveal)
                for reveal in ("print(s)", "print(*s)")]
honest = [test["nats"][6] for row in records("adversary", model="linrnn", coins="honest")
          for test in row["results"] if test["test"] in ("first", "second")]

CLAIMS = [
    f"the same {less['millions']} million tokens",
    f"Given {more['millions']} million such tokens, one seed",
    f"reaches {first_reveal(more, 8)}% after 8 commands and {first_reveal(more, 16)}% after 16",
    f"from at least {price} times DeltaNet's tokens",
    f"from at most 1/{price} of the tokens",
    f"{min(loop):.1f} to {max(loop):.0f} times as fast",
    f"{min(loop):.1f} to {max(loop):.0f} times as long",
    f"comes within .{100 * records('beliefs')[0]['results'][1]['kl']:02.0f} nats",
    f"learned, from {unseen} of the 120 commands",
    f"With {unseen} commands in training, every unseen command is correct",
    f"pass (32,4), after {span(lstms[11])} million tokens",
    f"DeltaNets with β ≤ 2 need {span(deltas[11], 1)}.",
    f"gets {max(of('baselines_swaps', lambda row: first_reveal(row, 16), model='lstm'))}% of the",
    f"lift it from {first_reveal(less, 16)} to {first_reveal(more, 16)}% (one seed)",
    f"stages, after {lstms[12][0]:.0f} million tokens; DeltaNet needs {span(deltas[12])}.",
    f"answer {span(of('snap', percent(8192), reader='alone'))}% of the reveals",
    f"answer at least {min(sum(copied[:3], [])):.1f}% of the reveals in traces of 128",
    f"repeats 32 times, they answer {span(copied[3])}%",
    f"a sort for {of('trace', 'commands', function='bubble_sort')[0]} commands",
    f"a card trick for {of('trace', 'commands', function='card_trick')[0]}, without a mistake",
    f"needs {min(parity[0])} to {max(parity[0]):,} programs, and state supervision "
    f"{min(parity[1]):,} to {max(parity[1]):,}",
    f"{span([100 - percent(S, S)(row) for row in bpe for S in (2, 4, 8, 16)])}% of the values stay",
    f"gets at least {min(map(percent(128), letters)):.1f}% of the values right",
    f"it is {span(honest, 1)} nats off"]


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_prose_says_the_numbers_of_the_records(claim):
    assert claim in PROSE
