"""analysis.ipynb is short, complete and alive: its cheap cells run, its titles are findings."""

import contextlib
import io
import json
import re

import matplotlib
import pytest
from conftest import ROOT

NOTEBOOK = json.loads((ROOT / "analysis.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def is_slow(cell):
    return "slow" in cell["metadata"].get("tags", [])


def test_the_notebook_is_short_and_its_outputs_are_committed():
    """At most 20 code cells of at most 20 lines, run from top to bottom, none failed."""
    assert len(CODE) <= 20
    assert max(len("".join(cell["source"]).splitlines()) for cell in CODE) <= 20
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 10


def test_the_cheap_cells_run_and_print_what_is_committed(monkeypatch):
    """The numbers that come from results/ are those of the files that are there."""
    matplotlib.use("Agg")
    monkeypatch.chdir(ROOT)
    names, ran = {}, 0
    for cell in CODE:
        if not is_slow(cell):
            with contextlib.redirect_stdout(io.StringIO()) as shown:
                exec("".join(cell["source"]), names)
            printed = "".join("".join(output["text"]) for output in cell["outputs"]
                              if output["output_type"] == "stream")
            assert shown.getvalue() == printed
            ran += 1
    matplotlib.pyplot.close("all")
    assert ran >= len(CODE) / 2


@pytest.mark.parametrize("cell", [cell for cell in CODE if "subplots" in "".join(cell["source"])])
def test_every_figure_has_a_title_that_is_a_sentence(cell):
    titles = re.findall(r'title[(=]f?"([^"]*)"', "".join(cell["source"]))
    assert max(len(title.split()) for title in titles) >= 7
