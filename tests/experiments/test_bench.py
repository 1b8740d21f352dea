"""All that is timed is the delta rule, and what is printed about it is true."""

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


def test_the_forms_agree_and_the_ratios_are_those_of_one_run():
    """Also where T = 45 is no multiple of a chunk."""
    rows = bench.bench(1, 45, 2, "cpu")
    assert [row["form"] for row in rows] == [*FORMS]
    for row in rows:
        assert row["slower"] == pytest.approx(row["with_backward"] / rows[-1]["with_backward"])
        assert row["error"] < 1e-4


def test_what_the_chapter_says_is_what_its_records_say():
    times = {(row["B"], row["form"]): row["with_backward"] for row in records("bench")}
    said = " ".join(bench.__doc__.split())
    for batch, form, words in [(32, "loop", "the loop takes {:.1f} times as long"),
                               (32, "textbook", "the textbook form {:.1f} times"),
                               (32, "autograd", "torch's own backward {:.1f} times"),
                               (4, "loop", "it takes {:.0f} times as long")]:
        assert words.format(times[batch, form] / times[batch, "C=32"]) in said


@needs_cuda
def test_on_cuda_all_forms_agree_with_the_loop():
    main(["--device", "cuda", "--batch", "2", "--lengths", "45", "300", "--rounds", "1"])
