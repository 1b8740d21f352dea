"""What do the records look like? The pictures of analysis.ipynb and README.

One function draws one figure. A title is the finding. Seeds are thin lines, their median is a heavy
one. The colours are those of Okabe and Ito (2008): colour-blind readers can tell them apart.

    python -m experiments.figures [--out DIR]    README's two pictures (experiments/results/figures)

tracking.png is drawn from results/arms_run.jsonl, beta.png from results/models. Figures 3 to 5 of
arXiv 2602.14814 are spacing, tracking and beta here.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib import pyplot

from data import user_errors
from eval import load_run
from experiments import heads, inside

RESULTS = Path(__file__).resolve().parent / "results"
BLUE, SKY, RED, GREEN = "#0072B2", "#56B4E9", "#D55E00", "#009E73"
ORANGE, GREY = "#E69F00", "#666666"
COLOURS = {"linear RNN, β ≤ 2": BLUE, "linear RNN, β ≤ 1": SKY, "Transformer": RED, "LSTM": GREEN}
MORE_COLOURS = COLOURS | {"LSTM, no local block": ORANGE}
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


def arm_runs(*tasks):
    """The recorded runs of the four arms of COLOURS on these tasks (group, commands)."""
    return [run for run in records("arms_run")
            if arm(run) in COLOURS and (run["group"], run["commands"]) in tasks]


def arm(record):
    """The arm that a run belongs to: a key of MORE_COLOURS, or its own name."""
    names = dict(zip(["linrnn", "linrnn-beta1", "transformer", "lstm", "lstm-bare"], MORE_COLOURS))
    return names.get(record["arm"], record["arm"])


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


def tracking(title, runs):
    """Accuracy against the commands read, in traces of (16,2) and of (128,16), a row a task."""
    tasks = list(dict.fromkeys((run["group"], run["commands"]) for run in runs))
    figure, panels = canvas(title, len(tasks), 2, (9, 0.8 + 3 * len(tasks)), sharey=True)
    for row, (group, commands) in zip(panels, tasks):
        short, long = {}, {}
        for name, colour in COLOURS.items():
            mine = [{result["length"]: result for result in run["results"]} for run in runs
                    if (arm(run), run["group"], run["commands"]) == (name, group, commands)]
            short[name] = range(2, 17, 2), [rows[16]["by_position"] for rows in mine], colour
            long[name] = range(16, 129, 16), [rows[128]["by_position"] for rows in mine], colour
        chance = mine[0][16]["chance"]
        draw(row[0], short, chance, None, [2, 4, 8, 16], False, ylim=(0, 1.02),
             ylabel=f"accuracy on {group}, {commands}")
        draw(row[1], long, chance, 64, [16, 32, 64, 128])
    panels[-1, 0].set_xlabel("commands read, traces of (16,2)")
    panels[-1, 1].set_xlabel("commands read, traces of (128,16)")
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
        draw(axes, {}, 0.2, ylim=(0, 1.02), xscale="log", title=name)
    figure.supxlabel("million tokens read")
    figure.supylabel("reveals right in training")
    return figure


def spacing(title, runs):
    """Tokens until traces of (8,S) are learned, alone and behind the stage (2,1), arm by arm."""
    arms = [*dict.fromkeys((run["group"], arm(run)) for run in runs)]
    figure, (panels,) = canvas(title, 1, len(arms), (9, 3.8), sharey=True)
    for axes, (group, name) in zip(panels, arms):
        for run in runs:
            if (run["group"], arm(run)) == (group, name):
                shift, marker = (0.15, "x") if run["first"] else (-0.15, "o")
                axes.plot(np.log2(run["spacing"]) + shift, run["tokens"] / 1e6,
                          marker if run["finished"] else "_", color=COLOURS[name], fillstyle="none")
        axes.set(xticks=range(4), xticklabels=[1, 2, 4, 8], yscale="log", ylim=(0.25, 15),
                 yticks=[0.5, 1, 2, 4, 8], yticklabels=[0.5, 1, 2, 4, 8], title=f"{group}\n{name}")
    figure.supxlabel("commands per reveal, S:  o  (8,S) alone,  x  behind (2,1),  –  not learned")
    panels[0].set_ylabel("million tokens")
    return figure


def ladder(runs):
    """Words of several groups: labels right at 64 and at 256 tokens, rung by rung."""
    groups, rungs = ([*dict.fromkeys(run[key] for run in runs)] for key in ("group", "arm"))
    figure, (panels,) = canvas("In [0, 1] parity is lost; with -1 a diagonal layer holds S3 for a "
                               "while; A5 takes more", 1, len(groups), (9, 4.4), sharey=True)
    for axes, group in zip(panels, groups):
        mine = [run for run in runs if run["group"] == group]
        axes.axvline(mine[0]["results"][0]["chance"], color=GREY, linestyle="--", linewidth=0.9)
        for run in mine:
            for row, marker, colour in zip(run["results"], "ox", (BLUE, RED)):
                axes.plot(row["all"], rungs.index(run["arm"]), marker, color=colour,
                          fillstyle="none", markersize=8)
        axes.set(title=group, xlim=(0, 1.04), yticks=range(len(rungs)), yticklabels=rungs)
    figure.supxlabel("labels right at   o  64,   x  256 tokens; trained to 64; dashed: chance")
    return figure


def householders(short, long):
    """`word` format: labels right at 128 tokens against R, for each group, in two budgets."""
    colours = {"S5 swap": SKY, "S3 full": GREEN, "S4 full": BLUE, "A5 full": ORANGE, "S5 full": RED}
    figure, (panels,) = canvas("Words: labels right by the reflections of a token, on two seeds "
                               "(left) and on one", 1, 2, (9, 4), sharey=True)
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
    for run in sorted(runs, key=lambda run: int(setting(run, "interval", 0))):
        accuracy = {row["length"]: row["all"] for row in run["results"]}
        if setting(run, "interval"):
            rare.setdefault(run["seed"], {})[int(setting(run, "interval"))] = accuracy[2048]
        elif len(accuracy) > 1:  # the runs of five seeds of S5
            way = "snapped" if "experiments.snap" in run["command"] else "alone"
            ways[way][run["seed"]] = accuracy
    right = [interval for interval in rare[0] if all(row[interval] == 1 for row in rare.values())]
    figure, ((far, seldom),) = canvas(
        "Put back on its permutation after each command, the network gets every reveal right;\n"
        f"on {len(rare)} seeds one in {max(right)} is enough", 1, 2, (9, 4.2), sharey=True)
    found = {way: ([*seeds[0]], [[*row.values()] for row in seeds.values()], colour)
             for (way, seeds), colour in zip(ways.items(), (BLUE, RED))}
    draw(far, found, 0.2, 64, [64, 256, 1024, 8192], ylim=(0, 1.02), ylabel="accuracy",
         xlabel="length of the trace")
    draw(seldom, {f"seed {seed}": ([*row], [[*row.values()]], (BLUE, SKY, GREEN)[seed])
                  for seed, row in rare.items()}, 0.2, None, [32, 64, 128, 256],
         xlabel="commands from snap to snap, at (2048,128)")
    return figure


def beliefs(title, runs, schedule, key):
    """KL from the exact filter by length, or by cycle: a panel for each value of a condition."""
    values, random = sorted({run[key] for run in runs}), schedule == "random"
    figure, (panels,) = canvas(title, 1, len(values), (9, 4.4), sharey=True)
    for axes, value in zip(panels, values):
        found, mine = {}, [run for run in runs if run[key] == value]
        for name, colour in MORE_COLOURS.items():
            kl = [[row["kl"] for row in rows] if random else
                  np.reshape(rows[0]["kl_by_position"], (65, -1)).mean(1)[1:]  # by cycle
                  for rows in (run["results"][schedule] for run in mine if arm(run) == name)]
            found |= {name: ([16, 64, 128] if random else range(1, 65), kl, colour)} if kl else {}
        draw(axes, found, None, None, [16, 64, 128] if random else [1, 4, 16, 64], yscale="log",
             title=f"{key.replace('_', ' ')}: {value}", ylim=(0.01, 1) if random else (5e-4, 4))
    figure.supxlabel("commands in the trace" if random else "cycles")
    figure.supylabel("KL(filter, model) in nats")
    return figure


def main(argv=None):
    parser = argparse.ArgumentParser("python -m experiments.figures")
    parser.add_argument("--out", type=Path, default=RESULTS / "figures", help="a folder")
    with user_errors(parser, argv) as args:
        args.out.mkdir(parents=True, exist_ok=True)
    out, rows = args.out, {}
    title = "With one frame and equal tokens the arms part by the length to which they track"
    tracking(title, arm_runs(("S5", "full"))).savefig(out / "tracking.png", dpi=100)
    for seed in range(5):
        _, task, model = load_run(RESULTS / f"models/linrnn-S5-seed{seed}")
        (_, head), = heads.tracking_heads(model, task)
        rows[f"seed {seed}"] = inside.beta_by_place(model, task)[0, head].numpy()
    beta(np.array([*rows.values()]), [*rows]).savefig(out / "beta.png", dpi=100)


if __name__ == "__main__":
    main()
