"""Both curricula and the paper's recipe show what they say; tables read the right numbers."""

from functools import partial

import numpy as np
import pytest
from conftest import session, typed_lines

from data import Group, ReplTask, generator
from experiments import baselines
from train import Config, Progress


# --- The same tokens ------------------------------------------------------------------------------

def test_each_stage_shows_equally_many_commands_and_sparse_ones_where_each_has_a_reveal():
    """A stage of length L is drawn as 1 / L. In the last tenth of the budget, batches count."""
    task = ReplTask(Group("S5"))
    rng = generator(0, "train", 0)
    lengths, unmoved = [], {True: [], False: []}
    for _ in range(1200):
        batch, counts = baselines.draw_any_stage(task, Config(batch=1), Progress(), rng, 380)
        lines = typed_lines(task.decode(batch.inputs[0]))
        commands = [line for line in lines if ", e = " in line]
        lengths.append(len(commands))
        unmoved[len(commands) <= 8] += [line[-1] == "e" for line in commands]
        assert len(lines) - 5 - len(commands) == min(8, len(commands))  # the reveals
        assert counts == (batch.inputs.size >= 342)

    total = sum(1 / length for length, _ in baselines.STAGES)
    for length, _ in baselines.STAGES:
        expected = 1200 / length / total
        assert abs(lengths.count(length) - expected) < 4 * expected**0.5
    assert np.mean(unmoved[True]) > 0.3 and abs(np.mean(unmoved[False]) - 1 / 5) < 0.03


def test_learning_rates_decay_to_zero_over_the_tokens():
    for step, tokens, expected in [(24, 0, 0.5), (100, 0, 1), (100, 5, 0.5), (100, 10, 0)]:
        scale = baselines.cosine(Config(), Progress(step=step, tokens=tokens), 10)
        assert abs(scale - expected) < 1e-12


def test_the_paper_has_15000_traces_a_stage_and_a_learning_rate_that_ends_at_a_fifth():
    """Appendix A.1: batches of 36, a peak after 5% of the steps."""
    assert [(L, S) for L, S, _ in baselines.PAPER_STAGES] == [(8, 1), (16, 2), (32, 4), (64, 8)]
    assert all(0 <= 36 * steps - 15_000 < 36 for _, _, steps in baselines.PAPER_STAGES)
    config = Config(curriculum=baselines.PAPER_STAGES)
    scales = [baselines.paper_lr_scale(config, Progress(step=step)) for step in range(4 * 417)]
    assert scales[:84] == pytest.approx([*(np.arange(1, 84) / 83), 1])
    assert scales[83 + (1668 - 83) // 2] == pytest.approx(0.6, abs=1e-3)
    assert scales[-1] == pytest.approx(0.2, abs=1e-3)


# --- The swap curriculum --------------------------------------------------------------------------

MIXED = baselines.MixedTask(Group("S5"))


def draw_swaps(number, rng, **changes):
    return baselines.draw_swaps(MIXED, Config(batch=3), Progress(stage=number), rng, **changes)


@pytest.mark.parametrize("number", range(len(baselines.SWAP_STAGES)))
def test_a_trace_of_swaps_and_full_commands_shows_what_the_interpreter_prints(number):
    """A stage has as many full commands as it says; all others name two variables."""
    batch, counts = draw_swaps(number, generator(number, "train", 0), earlier=0)
    length, spacing, full = baselines.SWAP_STAGES[number]
    assert counts
    for inputs, targets, reveals in zip(*batch):
        text = MIXED.decode([inputs[0], *targets])
        lines = typed_lines(text)
        assert text == session(lines)

        widths = [line.split(" = ")[0].count(",") + 1 for line in lines[5:] if "print" not in line]
        assert len(widths) == length
        assert widths.count(5) == full and widths.count(2) == length - full
        assert reveals.sum() == length // spacing == len(lines) - 5 - length
        assert [MIXED.vocab[token] for token in inputs[reveals]] == [" "] * (length // spacing)


def test_one_batch_in_five_shows_an_earlier_stage_and_does_not_count_for_passing():
    """In stage 3, each earlier stage equally often, and none a later one."""
    drawn = [draw_swaps(3, generator(0, "train", step)) for step in range(600)]
    tokens = [batch.inputs.shape[1] for batch, _ in drawn]
    shown = [tokens.count(MIXED.swaps.test_batch(1, L, S, generator(0, "test")).inputs.shape[1])
             for L, S, _ in baselines.SWAP_STAGES[:4]]
    assert sum(counts for _, counts in drawn) == shown[-1] and sum(shown) == 600
    assert all(abs(x - y) <= 4 * y**0.5 for x, y in zip(shown, [40, 40, 40, 480]))
    assert not any(draw_swaps(3, generator(1, "train", t), earlier=1)[1] for t in range(50))


def test_learning_rates_fall_after_the_short_stages():
    config = Config(curriculum=[(L, S) for L, S, _ in baselines.SWAP_STAGES])
    for stage, expected in [(7, 1), (8, 0.4)]:
        now = Progress(step=1000, stage=stage)
        assert baselines.decaying_late(config, now, late=0.4) == expected


@pytest.mark.parametrize("stage, ends, millions, stops", [
    (0, [], 44, False), (0, [], 45, True), (2, [10, 30], 74, False), (2, [10, 30], 75, True),
    (13, 13 * [80], 159, False), (13, 13 * [80], 160, True)])
def test_a_run_stops_after_45_million_tokens_of_a_stage_or_160_in_all(stage, ends, millions, stops):
    now = Progress(stage=stage, tokens=millions * 10**6, stage_ends=[end * 10**6 for end in ends])
    assert baselines.out_of_tokens(None, None, now) == stops


# --- The tables -----------------------------------------------------------------------------------

def test_tables_say_which_stage_was_passed_and_when():
    assert baselines.stopped_in({"left": [1, 2, 3]}) == "(8,2)+0"
    assert baselines.stopped_in({"left": [1] * (len(baselines.SWAP_STAGES) - 1)}) is None
    until = partial(baselines.until_passed, spacing=2)
    assert until({"spacing": 2, "left": [1.26e6]}) == "1.3"
    assert until({"spacing": 2, "left": []}) == ">12" and until({"spacing": 1}) is None
    row = {"results": [{"length": 16, "spacing": 2, "by_position": [0.996, 1]}]}
    assert baselines.first_reveal(row, 2) == 99
