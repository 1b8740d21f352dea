"""What all pictures share: a canvas, lines for arms, their names and their colours.

A picture stands in its chapter, beside its table, and its title is the finding. Where a title
counts seeds, it counts them in the rows that are drawn. Thin lines are seeds, a heavy line is their
median. The colours are those of Okabe and Ito (2008), which colour-blind readers can tell apart.
This file imports nothing of ours.
"""

import numpy as np
from matplotlib import pyplot

BLUE, SKY, RED, GREEN = "#0072B2", "#56B4E9", "#D55E00", "#009E73"
ORANGE, PINK, GREY = "#E69F00", "#CC79A7", "#666666"

# The name of an arm in every picture, and its colour.
NAMES = {"linrnn": "linear RNN, β ≤ 2", "linrnn-beta1": "linear RNN, β ≤ 1",
         "transformer": "Transformer", "lstm": "LSTM", "lstm-bare": "LSTM, no local block",
         "hybrid": "hybrid", "transformer-4": "Transformer, 4 layers"}
COLOURS = dict(zip(NAMES, [BLUE, SKY, RED, GREEN, ORANGE, PINK, "black"]))


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


def shell_game(moves=((2, 1), (1, 0), (2, 0), (2, 1)), ball=1):
    """Three cups, a above b above c, of which each move exchanges two. The ball takes the blue way.
    """
    figure, ((axes,),) = canvas("Where is the ball? Only someone who followed every move can tell",
                                size=(9, 2.8))
    bend = (1 - np.cos(np.linspace(0, np.pi))) / 2
    balls = [ball]
    for step, (i, j) in enumerate(moves):
        after = {0: 0, 1: 1, 2: 2, i: j, j: i}
        for place in after:
            colour = BLUE if place == balls[-1] else GREY
            path = place + bend * (after[place] - place)
            axes.plot(np.linspace(step, step + 1), path, color=colour, alpha=0.6)
        balls.append(after[balls[-1]])
        x, y = "cba"[i], "cba"[j]
        axes.text(step + 0.5, -0.9, f"{x}, {y} = {y}, {x}", ha="center", family="monospace")

    cup = np.array([[-0.09, 0.09, 0.14, -0.14], [0.25, 0.25, -0.25, -0.25]])
    for step, place in np.ndindex(len(balls), 3):
        axes.fill(step + cup[0], place + cup[1], color="#DDBB88", zorder=3)
    axes.plot([0, len(moves)], [balls[0] - 0.33, balls[-1] - 0.33], "o", color=BLUE, markersize=9)
    axes.set(xticks=[], yticks=range(3), yticklabels="cba", ylim=(-1.1, 2.4))
    axes.spines[:].set_visible(False)
    return figure
