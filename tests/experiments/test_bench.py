"""All that is timed is the delta rule, and what is printed about it is true."""

import experiments
import pytest
from conftest import needs_cuda
from experiments import bench, records
from experiments.bench import FORMS, main
from scan import delta_rule_recurrent


def test_a_wrong_form_ends_the_program_in_one_line(monkeypatch):
    """A scan that runs backwards, and a nan in one gradient alone."""
    def nan_in_q(q, k, v, beta):
        out, state = delta_rule_recurrent(q, k, v, beta)
        return out + 0 * (q - q.detach()).sqrt(), state  # 0 times an infinite slope

    def backwards(*inputs):
        return delta_rule_recurrent(*[x.flip(2) for x in inputs])

    for wrong in (nan_in_q, backwards):
        monkeypatch.setitem(FORMS, "autograd", wrong)
        with pytest.raises(SystemExit, match="autograd disagrees with the loop"):
            main(["--batch", "1", "--lengths", "9"])


def test_ratios_are_those_of_one_run_and_are_recorded(tmp_path, monkeypatch):
    """A row for each form, also where T = 45 is no multiple of a chunk."""
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    main(["--batch", "1", "--lengths", "45", "--rounds", "2", "--record"])
    rows = records("bench")
    assert [row["form"] for row in rows] == [*FORMS]
    for row in rows:
        assert row["slower"] == pytest.approx(row["with_backward"] / rows[-1]["with_backward"])
        assert row["error"] < 1e-4


def test_what_the_chapter_says_is_what_its_records_say():
    """The ratios of the docstring, from the rows at B = 32 with two threads, and at B = 4."""
    rows = {(row["B"], row["form"]): row for row in records("bench", T=1024, threads=2)}
    said = " ".join(bench.__doc__.split())
    for form, words in [("loop", "the loop takes {} times as long as the chunked scan"),
                        ("textbook", "the textbook form {} times"),
                        ("autograd", "torch's own backward {} times")]:
        ratio = rows[32, form]["with_backward"] / rows[32, "C=32"]["with_backward"]
        assert words.format(f"{ratio:.1f}") in said
    bounds = [f"{rows[32, form]['times_bound']:.1f}" for form in ("C=32", "loop")]
    assert "stands at {} times its bound and the loop at {},".format(*bounds) in said
    assert f"it takes {rows[4, 'C=32']['times_faster']:.0f} times as long" in said


@needs_cuda
def test_on_cuda_all_forms_agree_with_the_loop():
    main(["--device", "cuda", "--batch", "2", "--lengths", "45", "300", "--rounds", "1"])
