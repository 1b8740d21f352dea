"""What do the records look like? The pictures of analysis.ipynb and of README.

One function draws one figure, and its title is the finding. Where a title counts seeds, it counts
them in the rows that are drawn. Thin lines are seeds, a heavy line is their median. The colours are
those of Okabe and Ito (2008), which colour-blind readers can tell apart.

    python -m experiments.figures [--out FOLDER]    README's two pictures, tracking.png and beta.png

Figures 3 to 6 of arXiv 2602.14814 are spacing, tracking, beta and head here.
Next: analysis.ipynb.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
from matplotlib import pyplot

from data import one_line_errors, parse, run
from eval import load_run
from experiments import (RESULTS, actions, adversary, arms, inside, records, scale, supervision,
                         where)

BLUE, SKY, RED, GREEN = "#0072B2", "#56B4E9", "#D55E00", "#009E73"
ORANGE, PINK, GREY = "#E69F00", "#CC79A7", "#666666"

# The name of an arm in every figure, and its colour.
NAMES = {"linrnn": "linear RNN, β ≤ 2", "linrnn-beta1": "linear RNN, β ≤ 1",
         "transformer": "Transformer", "lstm": "LSTM", "lstm-bare": "LSTM, no local block",
         "hybrid": "hybrid", "transformer-4": "Transformer, 4 layers"}
COLOURS = dict(zip(NAMES, [BLUE, SKY, RED, GREEN, ORANGE, PINK, "black"]))
LENGTH_MARKS = [(64, "o", BLUE), (128, "x", ORANGE), (256, "+", RED)]


# --- What all figures share -----------------------------------------------------------------------

def canvas(title, rows=1, columns=1, size=(8, 4), **shared):
    """A figure with its title, and its panels as an array [rows, columns]."""
    figure, panels = pyplot.subplots(rows, columns, figsize=size, dpi=80, layout="constrained",
                                     squeeze=False, **shared)
    figure.suptitle(title, fontsize=12)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    pyplot.close(figure)  # the notebook shows the figure; pyplot need not keep it
    return figure, panels


def ticks_at(axes, values):
    """These numbers, and no others, on a logarithmic x axis of base 2."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.xaxis.minorticks_off()


def draw(axes, found, chance=None, trained=None, named=True):
    """Thin lines for seeds, a heavy one for the median, and its name to the right of its end.

    found: {name: (x, rows, colour)}. A name moves up where it would touch the one below.
    chance, trained: a height and an x that are marked, or None.
    named: if not, the names are left to a legend.
    """
    ends = {}
    for name, (x, rows, colour) in found.items():
        median = np.median(rows, 0)
        axes.plot(x, np.transpose(rows), color=colour, linewidth=0.7, alpha=0.6)
        axes.plot(x, median, color=colour, linewidth=2.5, label=name)
        if named:
            ends[name] = (median[-1], colour)
    if chance is not None:
        axes.axhline(chance, color=GREY, linestyle="--", linewidth=0.9)
        ends["chance"] = (chance, GREY)
    if trained is not None:
        axes.axvline(trained, color=GREY, linestyle=":")
        axes.annotate(f"trained to {trained}", (trained, 1), (0, 3), ha="center", color=GREY,
                      xycoords=("data", "axes fraction"), textcoords="offset points")

    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    gap = 0.2 * axes.figure.dpi / axes.bbox.height  # 0.2 inches
    lowest = -1.0
    for name, (height, colour) in sorted(ends.items(), key=lambda end: end[1][0]):
        lowest = max(lowest + gap, to_axes.transform((1, height))[1])
        axes.text(1.02, lowest, name, color=colour, transform=axes.transAxes, va="center")


def dot(axes, x, y, marker, colour):
    """One run, or one test of it. Marks are open, so that those below can be seen."""
    axes.plot(x, y, marker, color=colour, fillstyle="none")


def count(rows, test):
    """How many of the rows pass, as in '3 of 5'."""
    return f"{sum(map(test, rows))} of {len(rows)}"


def at(row, length):
    """The evaluation of a row in traces of that length."""
    return next(result for result in row["results"] if result["length"] == length)


# --- The arms -------------------------------------------------------------------------------------

def main_rows(millions):
    """The runs of each arm on full S5, and of the Transformer with twice its layers.

    millions: the cap in tokens. The linear RNN with β ≤ 2 is through long before any.
    """
    rows = {"linrnn": records("arms_eased", arm="linrnn")}
    for arm in ("linrnn-beta1", "lstm", "transformer"):
        rows[arm] = records("arms_eased", arm=arm, change="", millions=millions)
    rows["transformer-4"] = records("arms_eased", arm="transformer", change="more layers",
                                    millions=millions)
    return rows


def is_through(row):
    """Whether a run got through its curriculum."""
    return row["finished"]


def tracking():
    """Accuracy by the commands read, in traces of (16,2) on the left and of (128,16) on the right.
    """
    rows = main_rows(millions=15)
    solved = count(rows["linrnn"], lambda row: at(row, 128)["all"] > 0.99)
    figure, ((left, right),) = canvas("With β ≤ 2 the linear RNN tracks S5 to 128 commands "
                                      f"({solved} seeds);\nno other arm does, with over four "
                                      "times the tokens", 1, 2, (9, 3.9), sharey=True)
    found = {16: {}, 128: {}}
    for length, arm in itertools.product(found, rows):
        shares = [at(row, length)["by_position"] for row in rows[arm]]
        reads = range(length // 8, length + 1, length // 8)
        found[length][NAMES[arm]] = reads, shares, COLOURS[arm]

    left.set(ylim=(0, 1.02), ylabel="reveals right", xlabel="commands read, traces of (16,2)")
    right.set_xlabel("commands read, traces of (128,16)")
    draw(left, found[16], 0.2, named=False)
    draw(right, found[128], 0.2, trained=64)
    ticks_at(left, [2, 4, 8, 16])
    ticks_at(right, [16, 32, 64, 128])
    return figure


def learning():
    """Reveals right in training, against the tokens read."""
    rows = main_rows(millions=45)
    others = [row for arm in rows if arm != "linrnn" for row in rows[arm]]
    title = ("Through the curriculum: the linear RNN with β ≤ 2 on "
             f"{count(rows['linrnn'], is_through)} seeds, after 3 million tokens;\n"
             f"other arms on {count(others, is_through)}, after 45 million")
    figure, panels = canvas(title, 2, 3, (9.5, 5.6), sharex=True, sharey=True)
    panels[1, 2].set_visible(False)
    panels[0, 2].tick_params(labelbottom=True)  # no panel below it has the numbers
    for axes, arm in zip(panels.flat, rows):
        for row in rows[arm]:
            tokens, lengths, shares = np.transpose(row["curve"])
            begins = np.flatnonzero(np.diff(lengths)) + 1
            axes.plot(tokens / 1e6, shares, color=COLOURS[arm], linewidth=0.7)
            axes.plot(tokens[begins] / 1e6, shares[begins], "o", color="black", markersize=4)
        axes.set(ylim=(0, 1.02), xscale="log", title=NAMES[arm], xticks=[0.1, 1, 10],
                 xticklabels=["0.1", "1", "10"])
        draw(axes, {}, 0.2)
    figure.supxlabel("million tokens read; a dot is the beginning of a longer stage")
    figure.supylabel("reveals right in training")
    return figure


def spacing():
    """Tokens until traces of (8,S) are learned, alone and behind the stage (2,1), arm by arm."""
    rows = records("arms_spacing")
    counts = []
    for S in (1, 2, 4, 8):
        cells = {"group": "S5", "first": "2:1,", "spacing": S}
        counts.append(count(where(rows, **cells), lambda row: row["finished"]))
    panels_of = list(dict.fromkeys((row["group"], row["arm"]) for row in rows))
    figure, (panels,) = canvas("Behind (2,1) the linear RNN with β ≤ 2 learns S5 with a reveal "
                               f"after every 1, 2, 4, 8 commands\non {', '.join(counts)} seeds",
                               1, len(panels_of), (9.5, 4.4), sharey=True)

    for axes, (group, arm) in zip(panels, panels_of):
        for row in where(rows, group=group, arm=arm):
            shift, marker = (0.15, "x") if row["first"] else (-0.15, "o")
            dot(axes, np.log2(row["spacing"]) + shift, row["tokens"] / 1e6,
                marker if row["finished"] else "_", COLOURS[arm])
        name = NAMES[arm].replace(", ", ",\n")
        axes.set(xticks=range(4), xticklabels=[1, 2, 4, 8], yscale="log", ylim=(0.2, 16),
                 title=f"{group}\n{name}")
        axes.set_yticks([0.25, 0.5, 1, 2, 4, 8], ["¼", "½", "1", "2", "4", "8"])
        axes.minorticks_off()
    figure.supxlabel("commands per reveal, S:   o  (8,S) alone,   x  behind (2,1),   –  not "
                     "learned")
    panels[0].set_ylabel("million tokens read")
    return figure


# --- Inside the head ------------------------------------------------------------------------------

def beta(rows, labels):
    """The mean beta of a head at each place of a command. rows [heads, 13], of full S5."""
    places = [">>>", *"abcde", "=", "1st", "2nd", "3rd", "4th", "5th", "newline"]
    rows = np.asarray(rows)
    figure, ((axes,),) = canvas("Heads that track have β near 2, a reflection, at all right-hand "
                                "names", size=(9, 0.5 * len(rows) + 1.5))
    image = axes.imshow(rows, vmin=0, vmax=2, cmap="viridis", aspect="auto")
    for (y, x), value in np.ndenumerate(rows):
        colour = "black" if value > 1 else "white"
        axes.text(x, y, f"{value:.1f}", ha="center", va="center", color=colour)
    axes.set(xticks=range(13), xticklabels=places, yticks=range(len(rows)), yticklabels=labels,
             xlabel="the text of a command: five names, the sign =, the five names in a new order")
    figure.colorbar(image, label="mean β", ticks=[0, 1, 2])
    return figure


def head(limits, own, others, lengths, read, read_others):
    """Accuracy with the beta of one head narrowed; the permutation read off the state of heads.

    own, others: rows [limits]; read, read_others: rows [lengths].
    """
    figure, (panels,) = canvas("Only the head that tracks needs its reflections; a linear map reads"
                               "\nthe permutation off this head, and off the others hardly ever",
                               1, 2, (9.5, 4.2))
    panels[0].set(xlim=(2.03, 0.97), ylim=(0, 1.02), ylabel="reveals right at (64,2)",
                  xlabel="upper end of the β of one head")
    found = {"other heads": (limits, others, GREY), "tracking head": (limits, own, BLUE)}
    draw(panels[0], found, 0.2)
    panels[1].set(ylim=(-0.02, 1.02), xlabel="commands read",
                  ylabel="whole permutation read off")
    found = {"tracking head": (lengths, read, BLUE), "other heads": (lengths, read_others, GREY)}
    draw(panels[1], found, trained=64)
    ticks_at(panels[1], lengths)
    return figure


# --- Transitions, and what is learned -------------------------------------------------------------

def ladder():
    """Words of three groups: labels right at 64 and at 256 tokens, rung by rung."""
    rows = [row for row in records("ladder") if row["group"] in ("S2", "S3", "A5")]
    recorded = {row["arm"] for row in rows}
    rungs = [rung for rung in arms.RUNGS if rung in recorded]
    names = [NAMES.get(rung, rung.replace("dense", "dense rotation")) for rung in rungs]
    figure, (panels,) = canvas("Only four reflections a token read A5; a diagonal layer with "
                               "eigenvalues\nin [0, 1] loses even parity (S2)", 1, 3, (9, 4.6),
                               sharey=True)
    for axes, group in zip(panels, ("S2", "S3", "A5")):
        for row in where(rows, group=group):
            for result, marker, colour in zip(row["results"], "ox", [BLUE, RED]):
                dot(axes, result["all"], rungs.index(row["arm"]), marker, colour)
        axes.axvline(result["chance"], color=GREY, linestyle="--", linewidth=0.9)
        axes.set(title=group, xlim=(0, 1.04), yticks=range(len(rungs)), yticklabels=names)
    figure.supxlabel("labels right at   o  64,   x  256 tokens; trained to 64; dashed: chance")
    return figure


def unseen():
    """What is right of commands that training did not show, by the number of those that it did."""
    rows = records("unseen", kind="unseen")
    alls = {}
    for seen in (60, 108):
        mine = where(rows, seen=seen)
        alls[seen] = count(mine, lambda row: row["exhaustive"]["unseen_right"]
                           == row["exhaustive"]["unseen"])
    figure, (panels,) = canvas("Every unseen command is right from every state with 60 seen "
                               f"({alls[60]} seeds) and with 108 ({alls[108]});\nalong traces "
                               "errors add up", 1, 2, (9.5, 4.2), sharey=True)
    for row in rows:
        pairs = row["exhaustive"]
        dot(panels[0], row["seen"], pairs["unseen_right"] / pairs["unseen"], "o", BLUE)
        for length, marker, colour in LENGTH_MARKS:
            dot(panels[1], row["seen"], at(row, length)["all"], marker, colour)
    panels[1].axhline(0.2, color=GREY, linestyle="--", linewidth=0.9)
    for axes in panels:
        axes.set(ylim=(0, 1.04), xlabel="commands seen in training, of 120")
        ticks_at(axes, [5, 12, 30, 60, 108])
    panels[0].set_ylabel("unseen command and state, pairs right")
    panels[1].set_ylabel("reveals right, unseen commands")
    figure.supxlabel("right:   o  64,   x  128,   +  256 unseen commands;   dashed: chance")
    return figure


# --- The horizon ----------------------------------------------------------------------------------

def snapping():
    """Accuracy by length, alone and put back after every command; and with rarer snaps."""
    rows = records("snap")
    long = []  # the runs that were read at many lengths
    for row in rows:
        if row["config"]["group"] == "S5" and len(row["results"]) > 1:
            long.append(row)
    whole = count(where(long, interval=1), lambda row: at(row, 8192)["all"] == 1)
    figure, (panels,) = canvas("Put back on its permutation after each command, the state of S5 "
                               f"lasts 8,192 commands\n({whole} seeds); up to 26 variables one "
                               "snap in 64 commands suffices", 1, 2, (9.5, 4.2), sharey=True)

    found = {}
    for name, interval, colour in [("alone", 0, BLUE), ("put back", 1, RED)]:
        shares = []
        for row in where(long, interval=interval):
            lengths = [result["length"] for result in row["results"]]
            shares.append([result["all"] for result in row["results"]])
        found[name] = lengths, shares, colour
    panels[0].set(ylim=(-0.02, 1.04), xlabel="length of the trace", ylabel="reveals right")
    draw(panels[0], found, 0.2, trained=64)
    ticks_at(panels[0], [64, 256, 1024, 8192])

    for group, colour in [("S26", RED), ("S12", ORANGE), ("S8", GREEN), ("S5", BLUE)]:
        rare = [row for row in rows if row["config"]["group"] == group and row["interval"] > 1]
        intervals = sorted({row["interval"] for row in rare})
        shares = []
        for seed in sorted({row["seed"] for row in rare}):
            shares.append([at(row, 2048)["perfect"] for row in where(rare, seed=seed)])
        draw(panels[1], {group: (intervals, shares, colour)}, named=False)
    panels[1].legend(frameon=False, loc="lower left")
    panels[1].set(xlabel="commands from snap to snap",
                  ylabel="traces of 2,048 commands without an error")
    ticks_at(panels[1], [8, 16, 64, 192, 384])
    return figure


# --- Uncertainty ----------------------------------------------------------------------------------

def keeps(row):
    """Whether the belief is kept: at most adversary.KEPT nats at cycle 64."""
    return adversary.column_of(row, "adversarial", 64) <= adversary.KEPT


def cycles():
    """KL by cycle of the adversary, a panel for each kind of repetitions in training.

    The key of a panel is the kind, and the most cycles of a repetition.
    """
    rows = records("adversary", **adversary.USUAL)
    kinds = {("honest", 4): "honest, 4 cycles", ("honest", 16): "honest, 16 cycles",
             ("honest", 32): "honest, 32 cycles", ("forced", 32): "forced, up to 32 cycles",
             ("half", 32): "half of each, up to 32", ("half", 64): "half of each, up to 64"}
    linear = {"honest": [], "forced": [], "half": []}
    for kind, longest in kinds:
        cell = {"arm": "linrnn", "repetitions": kind, "cycles": longest}
        linear[kind] += where(rows, **cell)

    counts = [count(mine, keeps) for mine in linear.values()]
    figure, panels = canvas("The linear RNN (β ≤ 2) keeps the belief to cycle 64 after honest "
                            f"repetitions on {counts[0]} seeds,\nafter forced ones on "
                            f"{counts[1]}, and after half of each on {counts[2]}",
                            2, 3, (9.5, 7.5), sharey=True)
    lines = {}
    for axes, ((kind, longest), title) in zip(panels.flat, kinds.items()):
        found = {}
        for arm in NAMES:
            cell = {"arm": arm, "repetitions": kind, "cycles": longest}
            tests = [row["results"]["adversarial"][0] for row in where(rows, **cell)]
            if tests:
                kl = [test["kl_by_position"][1:] for test in tests]
                found[NAMES[arm]] = range(1, 1 + len(kl[0])), kl, COLOURS[arm]
        draw(axes, found, named=False)
        axes.axvline(longest, color=GREY, linestyle=":", label="most cycles in training")
        axes.set_title(title, fontsize=11)
        axes.set(yscale="log", ylim=(5e-4, 4), xlabel="cycles of the adversary")
        ticks_at(axes, [1, 4, 16, 64, 256])
        handles, names = axes.get_legend_handles_labels()
        lines.update(zip(names, handles))

    for axes in panels[:, 0]:
        axes.set_ylabel("KL(filter, model) in nats")
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=3, frameon=False)
    return figure


# --- Many variables -------------------------------------------------------------------------------

def sizes():
    """Tokens of the whole training, and reveals right, by the number of variables."""
    rows = records("scale", without="none", model="linrnn")
    full = where(rows, commands="full")
    tokens = {}
    for group in ("S5", "S26"):
        tokens[group] = np.mean([row["tokens"] for row in where(full, group=group)])
    right = count(full, lambda row: at(row, 64)["all"] >= scale.SOLVED)
    title = (f"With 3 to 26 variables {right} linear RNNs (β ≤ 2) have 99.5% of the reveals right "
             f"at (64,8),\nand {count(full, scale.is_solved)} at (128,16); "
             f"S26 takes {tokens['S26'] / tokens['S5']:.1f} times the tokens of S5")
    figure, (panels,) = canvas(title, 1, 2, (9.5, 4.4))

    for row in rows:
        n = int(row["group"][1:])
        if row["commands"] == "swap":
            dot(panels[0], n, row["tokens"] / 1e6, "x", SKY)
        else:
            dot(panels[0], n, row["tokens"] / 1e6, "o", BLUE)
            for length, marker, colour in LENGTH_MARKS:
                dot(panels[1], n, at(row, length)["all"], marker, colour)

    panels[0].set(yscale="log", ylabel="million tokens until the curriculum is through",
                  xlabel="variables, n:   o  full commands,   x  swaps")
    panels[0].set_yticks([2, 5, 10, 20, 40], ["2", "5", "10", "20", "40"])
    panels[1].plot(range(3, 27), [1 / n for n in range(3, 27)], "--", color=GREY, linewidth=0.9)
    panels[1].set(ylim=(0, 1.03), ylabel="reveals right, full commands",
                  xlabel="n:   o  64,   x  128,   +  256 commands;   dashed: chance")
    for axes in panels:
        axes.set_xscale("log")
        axes.set_xticks([3, 5, 8, 12, 16, 20, 26], [3, 5, 8, 12, 16, 20, 26])
        axes.minorticks_off()
    return figure


# --- The companion works --------------------------------------------------------------------------

def copying():
    """Own commands that are right, and states after the true commands, by the length."""
    rows = records("actions")
    figure, panels = canvas("No arm copies listings of 32 commands, twice the longest in training;"
                            "\nthe hybrid goes on tracking the state at 64", 2, 2, (9, 6.6),
                            sharey=True)
    for line, group in zip(panels, ["S3", "S5"]):
        for axes, mode, what in zip(line, ["own", "kept"], ["commands", "states"]):
            found = {}
            for arm in actions.ARMS:
                shares = []
                for row in where(rows, arm=arm, group=group):
                    tests = where(row["results"], mode=mode)
                    shares.append([test[what] for test in tests])
                found[NAMES[arm]] = actions.LENGTHS, shares, COLOURS[arm]
            axes.set(ylim=(0, 1.02), xlabel=f"commands in the listing, {group}",
                     ylabel=f"{mode} commands right" if mode == "own" else "states right, kept")
            draw(axes, found, trained=16, named=mode == "kept")
            ticks_at(axes, actions.LENGTHS)
    return figure


def told():
    """Programs read until solved, by the arm of supervision and the size of the program."""
    rows = records("supervision", model="linrnn")
    heads = ["linear", "decoder", "contrastive"]
    tasks = {"parity": "length", "permutations": "length", "traces": "spacing"}
    solved = [row["solved"] for row in rows if row["task"] in tasks and row["arm"] in heads]
    figure, (panels,) = canvas(f"Told the state, all {len(solved)} linear RNNs solve parity, "
                               f"exchanges and traces\nafter {min(solved):,} to {max(solved):,} "
                               "programs", 1, 3, (9.5, 4.4), sharex=True)

    for axes, (task, what) in zip(panels, tasks.items()):
        mine = where(rows, task=task)
        mine.sort(key=lambda row: (supervision.ARMS.index(row["arm"]), row[what]), reverse=True)
        for row in mine:
            colour = BLUE if row["arm"] in heads else ORANGE
            dot(axes, row["solved"] or row["budget"], f"{row['arm']}, {row[what]}",
                "o" if row["solved"] else "x", colour)
        axes.set(xscale="log", xlim=(500, 1.2e5), title=f"{task}: arm, {what}")
    figure.supxlabel("programs read:   o  until solved,   x  all of the budget, not solved;   "
                     "blue: told the state")
    return figure


# --- The command line -----------------------------------------------------------------------------

def tracking_betas():
    """The mean beta of the heads that track, in the stored models of S5: rows, labels."""
    rows, labels = [], []
    for seed in range(5):
        _, task, model = load_run(RESULTS / f"models/linrnn-S5-seed{seed}")
        (_, head), = inside.tracking_heads(model, task)
        rows.append(inside.beta_by_place(model, task)[0, head].numpy())
        labels.append(f"seed {seed}")
    return rows, labels


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.figures",
                                     description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=str(RESULTS / "figures"), help="a folder")
    args = parse(parser, argv)
    with one_line_errors(parser):
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        tracking().savefig(folder / "tracking.png", dpi=100)
        beta(*tracking_betas()).savefig(folder / "beta.png", dpi=100)


if __name__ == "__main__":
    run(main)
