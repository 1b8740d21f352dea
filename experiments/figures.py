"""What do the records look like? The pictures of analysis.ipynb and README.

One function draws one figure. It takes data, trains nothing, and returns the figure. A title is the
finding. Seeds are thin lines, their median is a heavy one. The colours are those of Okabe and Ito
(2008): colour-blind readers can tell them apart.

    python -m experiments.figures [--out DIR]    README's two pictures (experiments/results/figures)

tracking.png is drawn from results/arms_run.jsonl, beta.png from results/models. Figures 3 to 5 of
arXiv 2602.14814 are spacing, tracking and beta here.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib import pyplot

from eval import load_run
from experiments import heads, inside

RESULTS = Path(__file__).resolve().parent / "results"
BLUE, SKY, RED, GREEN = "#0072B2", "#56B4E9", "#D55E00", "#009E73"
ORANGE, GREY = "#E69F00", "#666666"
COLOURS = {"linear RNN, β ≤ 2": BLUE, "linear RNN, β ≤ 1": SKY, "Transformer": RED, "LSTM": GREEN}
PLACES = [">>>", *"abcde", "=", "1st", "2nd", "3rd", "4th", "5th", "↵"]  # of a full S5 command


def records(name):
    """The recorded runs of experiments/results/NAME.jsonl, one dictionary each."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def setting(record, name, default=None):
    """An option of a recorded run, from its config or from the command that made it."""
    config = record.get("config", {})
    known = config | config.get("options", {})
    if name in known:
        return known[name]
    words, flag = record["command"].split(), "--" + name.replace("_", "-")
    return words[words.index(flag) + 1] if flag in words else default


def arm(record):
    """The arm that a run belongs to: a key of COLOURS."""
    names = dict(zip(["linrnn", "linrnn-beta1", "transformer", "lstm"], COLOURS))
    narrow = float(setting(record, "beta_max", 2)) == 1
    return names[record.get("arm", setting(record, "model", "linrnn") + "-beta1" * narrow)]


def canvas(title, rows=1, columns=1, size=(8, 4), **shared):
    """A figure with its title, and its panels as an array [rows, columns]."""
    figure, panels = pyplot.subplots(rows, columns, figsize=size, dpi=90, layout="constrained",
                                     squeeze=False, **shared)
    figure.suptitle(title, fontsize=12)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    pyplot.close(figure)  # the caller shows the figure; pyplot need not keep it
    return figure, panels


def draw(axes, found, chance=None, trained=None, ticks=None, named=True, **options):
    """Thin lines for seeds, a heavy one for the median, and its name to the right of its end.

    found: {name: (x, rows, colour)}; a name moves up where it would touch the one below. ticks: the
    numbers on a logarithmic x axis. options: those of axes.set.
    """
    axes.set(**options)
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.xaxis.minorticks_off()
    ends = {}
    for name, (x, rows, colour) in found.items():
        median = np.median(rows, 0)
        axes.plot(x, np.transpose(rows), color=colour, linewidth=0.7, alpha=0.6)
        axes.plot(x, median, color=colour, linewidth=2.5)
        ends |= {name: (median[-1], colour)} if named else {}
    if chance is not None:
        axes.axhline(chance, color=GREY, linestyle="--", linewidth=0.9)
        ends["chance"] = chance, GREY
    if trained is not None:
        axes.axvline(trained, color=GREY, linestyle=":")
        axes.annotate(f"trained to {trained}", (trained, 1), (0, 3), ha="center", color=GREY,
                      xycoords=("data", "axes fraction"), textcoords="offset points")
    axes.autoscale_view()
    to_axes, lowest = axes.transData + axes.transAxes.inverted(), -1
    gap = 0.2 * axes.figure.dpi / axes.bbox.height  # 0.2 inches
    for name, (height, colour) in sorted(ends.items(), key=lambda end: end[1][0]):
        lowest = max(lowest + gap, to_axes.transform((1, height))[1])
        axes.text(1.02, lowest, name, color=colour, transform=axes.transAxes, va="center")


def curves(title, found, **options):
    """One panel. The arguments are those of draw."""
    figure, ((axes,),) = canvas(title)
    draw(axes, found, **options)
    return figure


def tracking(runs):
    """Accuracy against the commands read, in traces of (16,2) and of (128,16)."""
    short, long, solved = {}, {}, []
    for name, colour in COLOURS.items():
        mine = [{row["length"]: row for row in run["results"]} for run in runs if arm(run) == name]
        short[name] = range(2, 17, 2), [rows[16]["by_position"] for rows in mine], colour
        long[name] = range(16, 129, 16), [rows[128]["by_position"] for rows in mine], colour
        right = sum(rows[128]["all"] >= 0.995 for rows in mine)
        solved.append(f"{name}: {right} of {len(mine)}")
    figure, (panels,) = canvas("With one frame and equal caps of tokens, seeds that track 128 "
                               f"commands of S5:\n{', '.join(solved)}", 1, 2, (9, 4.2), sharey=True)
    draw(panels[0], short, 0.2, None, [2, 4, 8, 16], False, ylabel="accuracy", ylim=(0, 1.02),
         xlabel="commands read, traces of (16,2)")
    draw(panels[1], long, 0.2, 64, [16, 32, 64, 128], xlabel="commands read, traces of (128,16)")
    return figure


def learning(runs):
    """Reveals right in training against the tokens read. A drop is the beginning of a stage."""
    figure, panels = canvas("Every arm learns to read a command; then the stages part them",
                            2, 2, (9, 5.4), sharex=True, sharey=True)
    for axes, (name, colour) in zip(panels.flat, COLOURS.items()):
        for run in runs:
            if arm(run) == name:
                tokens, _, shares = np.transpose(run["curve"])
                axes.plot(tokens / 1e6, shares, color=colour, linewidth=0.7)
        axes.set_title(name, fontsize=11)
        draw(axes, {}, 0.2, ylim=(0, 1.02), xscale="log")
    figure.supxlabel("million tokens read")
    figure.supylabel("reveals right in training")
    return figure


def spacing(runs):
    """Accuracy at (8,S), with denser stages ahead of (8,S) and without."""
    rows, columns = ["linear RNN, β ≤ 2", "Transformer"], ["swap", "full"]
    figure, panels = canvas(
        "With denser stages first the linear RNN solves every spacing, without them few of them;\n"
        "the Transformer, in the same budget, none", 2, 2, (9, 5.4), sharex=True, sharey=True)
    for run in runs:
        row, alone = run["results"][0], run["stages"] == 1
        axes = panels[rows.index(arm(run)), columns.index(setting(run, "commands"))]
        axes.plot(np.log2(row["spacing"]) + (-0.12 if alone else 0.12), row["all"],
                  "o" if alone else "x", fillstyle="none", markersize=8, color=COLOURS[arm(run)])
    for (i, j), axes in np.ndenumerate(panels):
        axes.set_title(f"{rows[i]}, {columns[j]} commands", fontsize=11)
        draw(axes, {}, 0.2, ylim=(0, 1.06), xticks=range(4), xticklabels=[1, 2, 4, 8])
    figure.supxlabel("commands per reveal, S:   o  all steps at (8,S),   x  denser stages first")
    figure.supylabel("accuracy at (8,S)")
    return figure


def householders(short, long):
    """`word` format: labels right at 128 tokens against R, for each group, in two budgets."""
    colours = {"S5 swap": SKY, "S3 full": GREEN, "S4 full": BLUE, "A5 full": ORANGE, "S5 full": RED}
    figure, (panels,) = canvas(
        "S3 and S4 are learned with two reflections a token or three, S5 only with four;\n"
        "A5 and S5 are learned only with 256 words a step", 1, 2, (9, 4), sharey=True)
    for axes, runs, words in [(panels[0], short, 64), (panels[1], long, 256)]:
        shares = {}  # group -> seed -> R -> share
        for run in runs:
            name = f"{setting(run, 'group')} {setting(run, 'commands', 'full')}"
            seed = shares.setdefault(name, {}).setdefault(run["seed"], {})
            seed[int(setting(run, "householders"))] = run["results"][0]["all"]
        found = {name: ((1, 2, 3, 4), [[row[R] for R in (1, 2, 3, 4)] for row in seeds.values()],
                        colours[name]) for name, seeds in shares.items()}
        draw(axes, found, xlabel=f"reflections per token, R; {words} words a step",
             ylabel="labels right at 128 tokens", xticks=(1, 2, 3, 4), ylim=(0, 1.02))
    return figure


def beta(rows, labels):
    """The mean beta of heads at each place in the line of a command. rows [heads, 13]."""
    figure, ((axes,),) = canvas("A tracking head has β near 2, a reflection, at all right-hand "
                                "names and some left-hand ones", size=(9, 0.5 * len(rows) + 1.5))
    image = axes.imshow(rows, vmin=0, vmax=2, cmap="viridis", aspect="auto")
    for (y, x), value in np.ndenumerate(rows):
        axes.text(x, y, f"{value:.1f}", ha="center", va="center",
                  color="black" if value > 1 else "white")
    axes.set(xticks=range(13), xticklabels=PLACES, yticks=range(len(rows)), yticklabels=labels,
             xlabel="the text of a command: five names, the sign =, the five names in a new order")
    figure.colorbar(image, label="mean β", ticks=[0, 1, 2])
    return figure


def keys(found):
    """How the 25 right-hand keys of each head meet. found {name: keys [5, 5, K]}, at most six.

    A key and its negative make the same step, so inner products are shown without their signs.
    """
    figure, panels = canvas("The trained keys resemble those of the hand-built machine to a "
                            "varying degree", 2, 3, (9, 6.8))
    for axes, (name, k) in zip(panels.flat, found.items()):
        listed = k.flatten(0, 1)
        image = axes.imshow((listed @ listed.T).abs().numpy(), vmin=0, vmax=1, cmap="viridis")
        axes.set_title(f"{name}: r = {inside.likeness(k):.2f}", fontsize=11)
        axes.set(xticks=range(2, 25, 5), xticklabels=PLACES[7:12], yticks=[])
    figure.colorbar(image, ax=panels, label="|inner product| of two keys", shrink=0.6)
    return figure


def drift(lengths, extracted):
    """Accuracy at the last reveal, and the drift R / M of the tracking head's states."""
    last = [{row["length"]: row["final"] for row in run["results"]} for run in lengths]
    ratios = [{end: R / M for end, R, M in run["extract"]["drift"]["alone"]} for run in extracted]
    figure, ((left, right),) = canvas("The states close in on one another until they overlap;\n"
                                      "answers go wrong later, not yet where R = M", 1, 2, (9, 4.2))
    draw(left, {"": ([*last[0]], [[*curve.values()] for curve in last], BLUE)}, 0.2, 64,
         [*last[0]][::2], ylim=(0, 1.02), xlabel="length of the trace",
         ylabel="accuracy at the last reveal")
    draw(right, {"": ([*ratios[0]], [[*curve.values()] for curve in ratios], BLUE)}, None, 64,
         [*ratios[0]], xlabel="commands read", ylabel="drift R / M", yscale="log", ylim=(0.1, 10))
    right.axhline(1, color=GREY, linestyle="--", linewidth=0.9)
    right.set_yticks([0.1, 1, 10], ["0.1", "R = M", "10"])
    return figure


def snapping(runs):
    """Accuracy by length, alone and snapped after every command; and with rarer snaps."""
    ways, rare = {"alone": {}, "snapped": {}}, {}
    for run in runs:
        accuracy = {row["length"]: row["all"] for row in run["results"]}
        if setting(run, "interval"):
            rare.setdefault(run["seed"], {})[int(setting(run, "interval"))] = accuracy[2048]
        elif len(accuracy) > 1:  # the runs of five seeds of S5
            way = "snapped" if "experiments.snap" in run["command"] else "alone"
            ways[way][run["seed"]] = accuracy
    right = [interval for interval in rare[0] if all(row[interval] == 1 for row in rare.values())]
    figure, ((far, seldom),) = canvas(
        "Put back on its permutation after each command, the network gets every reveal right;\n"
        f"on two seeds one snap in {max(right)} commands is enough", 1, 2, (9, 4.2), sharey=True)
    found = {way: ([*seeds[0]], [[*row.values()] for row in seeds.values()], colour)
             for (way, seeds), colour in zip(ways.items(), (BLUE, RED))}
    draw(far, found, 0.2, 64, [64, 256, 1024, 8192], ylim=(0, 1.02), ylabel="accuracy",
         xlabel="length of the trace")
    draw(seldom, {f"seed {seed}": ([*row], [[*row.values()]], (BLUE, SKY)[seed > 0])
                  for seed, row in rare.items()}, 0.2, None, [32, 64, 128, 256],
         xlabel="commands from snap to snap, at (2048,128)")
    return figure


def belief_runs():
    """(group, P, arm, schedule of the reveals, rows) of each run that was held against a filter."""
    return [(setting(run, "group"), float(setting(run, "uncertain")), arm(run),
             run.get("reveals", "random"), run["results"])
            for run in records("pfsa") + records("pfsa_reveals") if "kl" in run["results"][0]]


def beliefs(runs, nothing):
    """KL from the exact filter by length. nothing: {(group, P): KL of knowing nothing}, four."""
    figure, panels = canvas("Of these briefly trained arms the linear RNN with β ≤ 2 is closest to "
                            "the filter on S3;\non S5 it loses the belief with length", 2, 2,
                            (9, 6.4), sharex=True, sharey=True)
    for (group, share), axes in zip(nothing, panels.flat):
        found = {name: ([16, 32, 64, 128], [[row["kl"] for row in rows] for *which, rows in runs
                                            if which == [group, share, name, "random"]], colour)
                 for name, colour in COLOURS.items()}
        draw(axes, found, None, 16, [16, 32, 64, 128], yscale="log", ylim=(1e-4, 6))
        axes.axhline(nothing[group, share], color=GREY, linestyle="--", linewidth=0.9)
        axes.set_title(f"{group}, P = {share}", fontsize=11)
    figure.supxlabel("commands in the trace; dashed: a reader who knows nothing")
    figure.supylabel("KL(filter, model) in nats")
    return figure


def schedules(runs):
    """KL at (128,4) for three ways to choose the variables that are revealed: a dot for a seed."""
    cells = [(group, share) for group in ("S3", "S5") for share in (0.1, 0.25, 0.5)]
    ways = ["random", "periodic", "adversarial"]
    figure, panels = canvas("Periodic reveals change nothing;\nadversarial ones mislead the linear "
                            "RNNs on S3, and not on S5", 2, 3, (9, 5.6), sharex=True, sharey=True)
    for (group, share), axes in zip(cells, panels.flat):
        for i, (name, colour) in enumerate(COLOURS.items()):
            dots = [(ways.index(way) + 0.15 * i - 0.22, rows[-1]["kl"])
                    for *which, way, rows in runs if which == [group, share, name]]
            axes.plot(*zip(*dots), "o", color=colour, fillstyle="none", label=name)
        axes.set(xticks=range(3), xticklabels=ways, yscale="log")
        axes.set_title(f"{group}, P = {share}", fontsize=11)
    figure.supylabel("KL(filter, model) at (128,4) in nats")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def main(argv=None):
    parser = argparse.ArgumentParser("python -m experiments.figures")
    parser.add_argument("--out", type=Path, default=RESULTS / "figures", help="a folder")
    out, rows = parser.parse_args(argv).out, {}
    out.mkdir(parents=True, exist_ok=True)
    tracking(records("arms_run")).savefig(out / "tracking.png", dpi=100)
    for seed in range(5):
        _, task, model = load_run(RESULTS / f"models/linrnn-S5-seed{seed}")
        (_, head), = heads.tracking_heads(model, task)
        rows[f"seed {seed}"] = inside.beta_by_place(model, task)[0, head].numpy()
    beta(np.array([*rows.values()]), [*rows]).savefig(out / "beta.png", dpi=100)


if __name__ == "__main__":
    main()
