"""The pictures can be read, and each draws what its title says, from the records that are there."""

from functools import cache

import numpy as np
import pytest
from matplotlib.text import Text

from experiments import adversary, figures, records

FADING = np.linspace(1, 0.2, 4)  # numbers that are right at their first point only

FROM_RECORDS = ["tracking", "learning", "spacing", "ladder", "unseen", "snapping", "cycles",
                "sizes", "told", "copying"]
FIGURES = {name: getattr(figures, name) for name in FROM_RECORDS} | {
    "beta": lambda: figures.beta(np.linspace(0, 2, 65).reshape(5, 13), list("01234")),
    "head": lambda: figures.head([2, 1.6, 1.3, 1], [FADING], [np.ones(4)], [1, 4, 16, 64], [FADING],
                                 [0 * FADING])}


@cache
def drawn(name):
    figure = FIGURES[name]()
    figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize("name", FIGURES)
def test_all_texts_can_be_read_and_no_two_overlap(name):
    """As wide as the notebook shows a figure, with letters of 9 points or more."""
    figure = drawn(name)
    assert 8 <= figure.get_figwidth() <= 9.5
    ticks = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            for tick in axis.get_major_ticks() + axis.get_minor_ticks():
                ticks |= {tick.label1, tick.label2}
    shown = [text for text in figure.findobj(Text)
             if text.get_text().strip() and text.get_visible() and text not in ticks]
    assert min(text.get_fontsize() for text in shown) >= 9

    boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
    for i, (text, box) in enumerate(boxes):
        assert -1 <= box.x0 and box.x1 <= figure.bbox.width + 1, f"{text!r} is cut off"
        for other, second in boxes[:i]:
            beside = max(box.x0 - second.x1, second.x0 - box.x1)
            above = max(box.y0 - second.y1, second.y0 - box.y1)
            assert max(beside, above) > -1, f"{text!r} lies on {other!r}"


def test_titles_count_the_seeds_of_the_rows_that_are_drawn():
    """Counted again here, from the records: what is solved, and what is kept."""
    rows = records("arms_eased", change="", arm="linrnn")
    solved = sum(row["results"][-1]["all"] > 0.99 for row in rows)
    assert f"({solved} of {len(rows)} seeds)" in drawn("tracking").get_suptitle()

    forced = records("adversary", **adversary.USUAL, repetitions="forced", arm="linrnn")
    kept = sum(row["results"]["adversarial"][0]["kl_by_position"][64] <= 0.05 for row in forced)
    assert f"after forced ones on {kept} of {len(forced)}" in drawn("cycles").get_suptitle()


def test_no_arm_but_four_reflections_reads_A5_and_0_to_1_loses_parity():
    """The title of `ladder`, which is written and not counted."""
    for row in records("ladder"):
        right = row["results"][0]["all"]
        if row["group"] == "A5":
            assert (right > 0.99) == (row["arm"] == "4 reflections"), row["arm"]
        if row["group"] == "S2" and row["arm"] == "diagonal, 0 to 1":
            assert right < 0.7


def test_the_command_writes_the_two_pictures_of_the_readme(monkeypatch, tmp_path):
    rows = np.ones((5, 13)), [f"seed {seed}" for seed in range(5)]
    monkeypatch.setattr(figures, "tracking_betas", lambda: rows)
    figures.main(["--out", str(tmp_path / "new")])
    for name in ("tracking.png", "beta.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")
        assert (figures.RESULTS / "figures" / name).exists()
