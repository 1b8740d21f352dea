"""README's table says what the records say."""

import json
import re
from math import factorial

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = {("`linrnn`", "≤ 2"): "linrnn", ("`linrnn`", "≤ 1"): "linrnn-beta1",
        ("`transformer`", ""): "transformer", ("`lstm`", ""): "lstm"}


def records(name):
    text = (ROOT / f"experiments/results/{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def span(values):
    """Least-greatest, with one decimal place; one number where the two are the same."""
    ends = f"{min(values):.1f}", f"{max(values):.1f}"
    return ends[0] if ends[0] == ends[1] else "-".join(ends)


@pytest.mark.parametrize("row", ROWS)
def test_each_row_is_what_the_records_of_its_arm_say(row):
    """Seeds that are solved, tokens, minutes, and the accuracy at each length, over all seeds."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in README.splitlines()]
    (_, _, solved, *cells), = [line for line in lines if tuple(line[:2]) == row]
    runs = [run for run in records("arms_run")
            if (run["arm"], run["group"], run["commands"]) == (ROWS[row], "S5", "full")]
    assert len({run["seed"] for run in runs}) == len(runs) >= 5
    accuracy = {length: [100 * result["all"] for run in runs for result in run["results"]
                         if result["length"] == length] for length in (2, 8, 16, 64, 128)}
    assert solved == f"{sum(share >= 99.5 for share in accuracy[128])} of {len(runs)}"
    assert cells == [span([run["tokens"] / 1e6 for run in runs]),
                     span([run["minutes"] for run in runs]), *map(span, accuracy.values())]


def test_what_is_said_of_the_default_run_is_what_five_seeds_recorded():
    """Minutes and accuracies of `python train.py`, seeds 0 to 4."""
    runs = [run for run in records("default") if "swap" not in run["command"]]
    assert sorted(run["seed"] for run in runs) == [0, 1, 2, 3, 4]
    minutes = re.search(r"python train.py --model linrnn --group S5 *# (\S+) minutes", README)[1]
    assert minutes == span([run["minutes"] for run in runs])
    accuracy = {row["length"]: span([100 * run["results"][i]["all"] for run in runs])
                for i, row in enumerate(runs[0]["results"])}
    said = " ".join(README.split())
    assert (f"{accuracy[64]}% of the reveals at (64,8), {accuracy[128]}% at (128,16), "
            f"{accuracy[256]}% at (256,32)") in said


def test_the_rows_of_more_variables_are_what_the_records_say():
    """States, minutes times cores, accuracies of the model alone, and traces of 8,192 commands that
    are right to the end if the state is put back after each."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in README.splitlines()
            if re.match(r"\| S\d+ \|", line)]
    assert [row[0] for row in rows] == ["S8", "S12", "S16", "S26"]
    snaps = [run for run in records("snap") if "--lengths 8192:128" in run["command"]]
    for group, states, seeds, minutes, *accuracies, snapped in rows:
        wanted = {"group": group, "commands": "full", "without": "none", "model": "linrnn"}
        runs = [run for run in records("scale") if wanted.items() <= run.items()]
        assert float(states.replace(",", "")) == pytest.approx(factorial(int(group[1:])), rel=0.05)
        assert int(seeds) == len({run["seed"] for run in runs}) == len(runs) >= 2
        assert minutes == span([run["minutes"] * run["threads"] for run in runs])
        assert accuracies == [span([100 * run["results"][i]["all"] for run in runs])
                              for i in range(3)]
        put_back = [run["results"][0] for run in snaps if run["config"]["group"] == group]
        told = f"{min(round(row['perfect'] * row['traces']) for row in put_back)} of 32" \
            if put_back else "-"
        assert snapped == told and all(row["traces"] == 32 for row in put_back)
