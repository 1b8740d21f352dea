"""Both curricula and the paper's recipe show what they say; tables read the right numbers."""

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
    sparse = np.mean([0.6, 0.4, 0.3, 0.25, 0.225])  # e stays in place after 1, 2, ..., 5 swaps
    assert abs(np.mean(unmoved[True]) - sparse) < 0.03
    assert abs(np.mean(unmoved[False]) - 1 / 5) < 0.03


def test_learning_rates_warm_up_and_decay():
    """To 0 after the last token; in the paper's recipe after 5% of the steps, to a fifth."""
    for step, tokens, expected in [(24, 0, 0.5), (100, 0, 1), (100, 5, 0.5), (100, 10, 0)]:
        scale = baselines.cosine(Config(), Progress(step=step, tokens=tokens), 10)
        assert abs(scale - expected) < 1e-12
    a_fifth = 0.6 + 0.1 * (1 + 5**0.5)  # of the way: 0.6 + 0.4 cos 36 degrees
    for step, expected in [(0, 1 / 83), (82, 1), (83, 1), (83 + 317, a_fifth), (4 * 417, 0.2)]:
        scale = baselines.paper_lr_scale(Config(warmup=83), Progress(step=step))
        assert abs(scale - expected) < 1e-12


# --- The swap curriculum --------------------------------------------------------------------------

MIXED = baselines.MixedTask(Group("S5"))


def draw_swaps(number, rng):
    return baselines.draw_swaps(MIXED, Config(batch=3), Progress(stage=number), rng)


@pytest.mark.parametrize("number", range(len(baselines.SWAP_STAGES)))
def test_a_trace_of_swaps_and_full_commands_shows_what_the_interpreter_prints(number):
    """A stage has as many full commands as it says; all others name two variables."""
    drawn = [draw_swaps(number, generator(number, "train", step)) for step in range(9)]
    batch = next(batch for batch, counts in drawn if counts)
    length, spacing, full = baselines.SWAP_STAGES[number]
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
    drawn = [draw_swaps(3, generator(0, "train", step)) for step in range(1500)]
    tokens = [batch.inputs.shape[1] for batch, _ in drawn]
    shown = [tokens.count(baselines.SHORT.test_batch(1, L, S, generator(0, "test"))[0].shape[1])
             for L, S, _ in baselines.SWAP_STAGES[:4]]
    assert sum(counts for _, counts in drawn) == shown[-1] and sum(shown) == 1500
    assert all(abs(x - y) <= 2 * y**0.5 for x, y in zip(shown, [100, 100, 100, 1200]))


@pytest.mark.parametrize("stage, ends, millions, stops", [
    (0, [], 44, False), (0, [], 45, True), (2, [10, 30], 74, False), (2, [10, 30], 75, True),
    (13, 13 * [80], 159, False), (13, 13 * [80], 160, True)])
def test_a_run_stops_after_45_million_tokens_of_a_stage_or_160_in_all(stage, ends, millions, stops):
    now = Progress(stage=stage, tokens=millions * 10**6, stage_ends=[end * 10**6 for end in ends])
    assert baselines.out_of_tokens(None, None, now) == stops
