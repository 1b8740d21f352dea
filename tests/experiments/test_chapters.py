"""The law of the chapters: who imports whom, where a command ends, what shows which record; and the
numbers of both READMEs, counted again from the records.
"""

import importlib
import re
import sys
from math import factorial

import pytest
from conftest import PACKAGES, ROOT, imports_of

from eval import evaluate, load_run
from experiments import RESULTS, records, span

CHAPTERS = {path.stem: path for path in (ROOT / "experiments").glob("*.py")}
CHAPTERS.pop("__init__")
SPINE = ["data", "scan", "models", "eval", "train"]
ARROWS = {("snap", "inside"), ("adversary", "arms"), ("adversary", "beliefs"),
          ("programs", "snap")}  # and figures -> any
SHOWING = ["arms", "adversary", "unseen", "snap", "scale", "programs", "supervision", "actions"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECORDS = (RESULTS / "README.md").read_text(encoding="utf-8")
NAMES = sorted(path.stem for path in RESULTS.glob("*.jsonl"))


# --- The house ------------------------------------------------------------------------------------

def test_chapters_stand_side_by_side_on_the_spine():
    """A chapter imports the spine and the helpers of experiments/__init__.py. Few read another."""
    for name, path in CHAPTERS.items():
        for module in imports_of(path):
            package, _, other = module.partition(".")
            if package == "experiments" and other in CHAPTERS:
                assert name == "figures" or (name, other) in ARROWS, (name, other)
            else:
                known = {*SPINE, "experiments", *PACKAGES, *sys.stdlib_module_names}
                assert package in known, (name, module)


def test_a_command_is_run_by_its_name():
    """Each ends in silence at Ctrl-C and at a closed pipe (data.run)."""
    for name, path in CHAPTERS.items():
        source = path.read_text(encoding="utf-8")
        assert source.endswith('if __name__ == "__main__":\n    run(main)\n'), name


@pytest.mark.parametrize("name", SHOWING)
def test_a_chapter_without_options_shows_its_table(name, capsys):
    """From the records alone, and each number is one."""
    importlib.import_module(f"experiments.{name}").main([])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) > 10
    assert not re.search(r"\bnan\b|\bNone of\b|\{\}", shown)


# --- The records ----------------------------------------------------------------------------------

def cells(text, columns):
    """The rows of the tables of so many columns, a list of stripped cells each."""
    rows = []
    for line in text.splitlines():
        row = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(row) == columns and not set("".join(row)) <= set("- "):
            rows.append(row)
    return rows


def of_full_commands(name):
    """The runs of train.py in this file, without the one with swaps."""
    return [run for run in records(name) if "swap" not in run["command"]]


def accuracy(runs, length):
    """In %, of each run at this length, on each of its streams of test traces."""
    shares = []
    for run in runs:
        for results in [run["results"], *run.get("more_results", [])]:
            shares += [100 * row["all"] for row in results if row["length"] == length]
    return shares


def numbers_in(text):
    """'0-2, 10' -> {0, 1, 2, 10}; '-' is none."""
    found = set()
    for first, last in re.findall(r"(\d+)-?(\d*)", text):
        found.update(range(int(first), int(last or first) + 1))
    return found


def test_each_file_of_records_is_listed_as_it_is_and_shown():
    """Runs, seeds and hours are counted. A chapter that shows a file names it in its code. No
    command has a path of the machine that it ran on."""
    header, *rows = cells(RECORDS, 6)
    assert header == ["file", "runs", "seeds", "hours", "made by", "shown by"]
    assert sorted(row[0].strip("`") for row in rows) == NAMES
    total = 0
    for name, runs, seeds, hours, _, shown in rows:
        name = name.strip("`")
        found = records(name)
        hours_of_file = sum(run.get("minutes", 0) for run in found) / 60
        total += hours_of_file
        assert int(runs) == len(found), f"a new row? Count the runs of {name} in its README, too"
        assert numbers_in(seeds) == {run["seed"] for run in found if "seed" in run}, name
        assert hours == (f"{hours_of_file:.1f}" if hours_of_file else "-"), name
        assert not any(re.search(r"(^|[ =])[/~]", run.get("command", "")) for run in found), name
        for chapter in re.findall(r"`(\w+)`", shown):
            assert f'"{name}"' in CHAPTERS[chapter].read_text(encoding="utf-8"), (name, chapter)
        assert "`" in shown or shown in ("README", "below"), name
    assert f"took {total:.1f} hours" in RECORDS


def test_what_the_records_say_of_the_recipe_is_so():
    """Each of these numbers stands in the README of the records, and is the one of its row."""
    text = " ".join(RECORDS.split())
    steps = [run["steps"] for run in of_full_commands("s5")]
    stored = accuracy(of_full_commands("s5"), 256)
    default = accuracy(of_full_commands("default"), 256)
    longer, unweighted, few, many, *layered = records("recipe")
    layered_steps = [run["steps"] for run in layered]
    exact = accuracy(layered, 256)
    for said in (
            f"{min(steps)} to {max(steps)} short steps",
            f"took {longer['steps']} long ones",
            f"has {min(default):.1f} to {max(default):.1f}% there",
            f"all seeds of `s5` have at least {min(stored):.1f}%",
            f"took seed 0 {unweighted['steps']} steps",
            f"{unweighted['results'][2]['all']:.1%} at (256,32)",
            f"{many['steps']} steps with 256 words",
            f"{few['steps']:,} steps with 64",
            f"{few['results'][0]['all']:.1%} of the labels",
            f"learn S5 in {min(layered_steps)} to {max(layered_steps)} steps",
            f"and {min(exact):.1f} to {max(exact):.1f}% at (256,32)"):
        assert said in text, said
    assert min(accuracy(layered, 128)) == 100


@pytest.mark.parametrize("seed", range(5))
def test_a_stored_model_is_the_recorded_run(seed):
    """The seed, the steps, and all reveals right, of which a few traces are read again."""
    recorded, = [run for run in of_full_commands("s5") if run["seed"] == seed]
    checkpoint, task, model = load_run(RESULTS / f"models/linrnn-S5-seed{seed}")
    assert checkpoint["progress"]["step"] == recorded["steps"]
    assert checkpoint["config"]["seed"] == seed
    row = evaluate(model, task, 64, 8, traces=8)
    assert row["all"] == recorded["results"][0]["all"] == 1


# --- README ---------------------------------------------------------------------------------------

ARMS = {  # the first two cells of a row; its arm, what is changed, how many seeds
    ("`linrnn`", "≤ 2"): ("linrnn", "", 5),
    ("`linrnn`", "≤ 1"): ("linrnn-beta1", "", 5),
    ("`transformer`, 2 layers", ""): ("transformer", "", 5),
    ("`transformer`, 4 layers", ""): ("transformer", "more layers", 3),
    ("`lstm`", ""): ("lstm", "", 5)}


def solved(runs):
    """k of n: at least 99.5% of the answers are right at length 128, on each stream."""
    return f"{sum(min(accuracy([run], 128)) >= 99.5 for run in runs)} of {len(runs)}"


@pytest.mark.parametrize("row", ARMS)
def test_each_row_of_the_arms_is_what_the_records_say(row):
    (_, _, told, *numbers), = [line for line in cells(README, 11) if tuple(line[:2]) == row]
    arm, change, seeds = ARMS[row]
    runs = records("arms_eased", arm=arm, change=change, millions=15)
    assert sorted(run["seed"] for run in runs) == [*range(10, 10 + seeds)]
    assert told == solved(runs)
    assert numbers == [span([run["tokens"] / 1e6 for run in runs]),
                       span([run["minutes"] for run in runs]),
                       *(span(accuracy(runs, length)) for length in (2, 4, 8, 16, 64, 128))]


def test_three_times_the_tokens_carry_the_other_arms_as_far_as_readme_says():
    """None is through. Three seeds each, and one of the Transformer with four layers."""
    longer = records("arms_eased", millions=45)
    assert len(longer) == 10 and not any(run["finished"] for run in longer)
    of = {arm: [run for run in longer if (run["arm"], run["change"]) == (arm, "")]
          for arm in ("linrnn-beta1", "transformer", "lstm")}
    past = sum(run["stage_reached"] > 4 for run in of["linrnn-beta1"])
    assert {arm: len(runs) for arm, runs in of.items()} == dict.fromkeys(of, 3) and past == 2
    assert ("β ≤ 1 passes (16,2) on two seeds, the Transformer has "
            f"{span(accuracy(of['transformer'], 8), 0)}% at (8,1), and the LSTM "
            f"{span(accuracy(of['lstm'], 4), 0)}% at (4,1)") in " ".join(README.split())


def test_the_default_command_is_what_five_seeds_recorded():
    runs = of_full_commands("default")
    assert sorted(run["seed"] for run in runs) == [10, 11, 12, 13, 14]
    assert {run["threads"] for run in runs} == {1}
    shares = {length: span(accuracy(runs, length)) for length in (64, 128, 256)}
    assert shares[64] == shares[128]
    assert (f"on five fresh seeds and one core: {shares[64]}% at (64,8) and (128,16), "
            f"{shares[256]}% at (256,32), in {span([run['minutes'] for run in runs])} minutes"
            ) in " ".join(README.split())


def test_each_row_of_words_is_what_the_records_say():
    """Those with as many reflections as a word needs."""
    _, *rows = cells(README, 6)
    assert len(rows) == 5
    for name, householders, told, *numbers in rows:
        group, *swaps = name.split(", ")
        runs = records("reflections", format="word", group=group, householders=int(householders),
                       commands="swap" if swaps else "full")
        assert told == solved(runs)
        assert numbers == [span([run["minutes"] for run in runs]),
                           *(span(accuracy(runs, length)) for length in (128, 512))]


def test_each_row_of_more_variables_is_what_the_records_say():
    """The last column counts, on the worst seed, the traces of 8,192 commands that are right to the
    end if the state is put back after each."""
    rows = [row for row in cells(README, 9) if re.fullmatch(r"S\d+", row[0])]
    assert [row[0] for row in rows] == ["S8", "S12", "S16", "S20", "S26"]
    for group, states, told, minutes, *shares, certified, snapped in rows:
        runs = records("scale", group=group, commands="full", without="none", model="linrnn")
        assert float(states.replace(",", "")) == pytest.approx(factorial(int(group[1:])), rel=0.05)
        assert told == solved(runs)
        assert minutes == span([run["minutes"] * run["threads"] for run in runs])
        assert shares == [span(accuracy(runs, length)) for length in (64, 128, 256)]
        certificates = records("unseen", kind="certificate", group=group, commands="full", depth=16)
        assert certified == span([row["passed"] for row in certificates if "without" not in row], 0)
        put_back = rf"snap runs/scale/{group}-full-\S+ --lengths 8192:128 --traces 32 --record"
        perfect = [run["results"][-1]["perfect"] for run in records("snap")
                   if re.search(put_back, run["command"])]
        assert snapped == f"{32 * min(perfect):.0f} of 32"


def test_the_table_of_chapters_names_each_of_them():
    named = re.findall(r"`(\w+)`", " ".join(row[0] for row in cells(README, 2)))
    assert {*named} >= {*CHAPTERS} and not {*named} - {*CHAPTERS} - {*SPINE} - {"file", "py"}
