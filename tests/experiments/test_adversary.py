"""Repetitions are real programs; what counts in training; the head by hand; the study."""

import re
from collections import Counter

import numpy as np
import pytest
import torch
from test_beliefs import check_traces

from data import Group, run_commands
from experiments import adversary, records, where
from experiments.adversary import (AFTER, BEFORE, CELLS, RepetitionTask, hold_pair,
                                   without_forced)
from experiments.beliefs import loss_of
from models import LinRNN
from train import Recipe, to_tensors


def task_of(pattern="first", coins="honest", **options):
    return RepetitionTask(Group("S3"), pattern, coins, **options)


SHOWN = {"first": {(0, 0, 0, 0)}, "second": {(1, 1, 1, 1)}, "turn": {(0, 1, 0, 1)}}


@pytest.mark.parametrize("pattern", ["first", "second", "turn", "random", "mixed"])
@pytest.mark.parametrize("coins, share", [("forced", 0), ("honest", 0.5)])
def test_a_repetition_is_one_exchange_behind_fair_coins_inside_a_certain_program(
        pattern, coins, share, monkeypatch):
    """The belief ahead of each reveal of a cycle is half of each value of the pair."""
    task = RepetitionTask(Group("S4"))
    rng = np.random.default_rng(2)
    check_traces(task, task.repetition(3, pattern, coins, 4, AFTER, rng), monkeypatch)

    program = task.repetition(500, pattern, coins, 4, AFTER, rng)
    cycles = slice(BEFORE, BEFORE + 4)
    inside = np.zeros(BEFORE + 4 + AFTER, bool)
    inside[cycles] = True
    assert (program.probability == np.where(inside, 0.5, 1)).all()
    assert program.executed[:, ~inside].all()
    assert abs(program.executed[:, cycles][:, :-1].mean() - share) <= 6 * share / 1500**0.5
    assert abs(program.executed[:, cycles][:, -1].mean() - 0.5) <= 3 / 500**0.5

    # One exchange a trace, all of them, and the variable that is shown.
    cycle = program.commands[:, cycles]
    moved = cycle[:, 0] != np.arange(4)
    assert (cycle == cycle[:, :1]).all() and len(np.unique(moved, axis=0)) == 6
    second = 3 - moved[:, ::-1].argmax(1)
    is_second = program.asked[:, cycles] == second[:, None]
    is_first = program.asked[:, cycles] == moved.argmax(1)[:, None]
    assert (is_first ^ is_second).all()
    shown, counts = np.unique(is_second, axis=0, return_counts=True)
    shown = set(map(tuple, shown.astype(int)))
    assert shown == SHOWN.get(pattern, shown)
    if pattern == "random":
        assert len(shown) == 16 and counts.max() < 70
    if pattern == "mixed":
        assert len(shown) == 16 and min(counts[0], counts[-1]) > 100

    best = task.best_predictions(program)
    assert (best[:, cycles].max(-1) == 0.5).all()
    assert (best[:, ~inside][:, :BEFORE].max(-1) == 1).all()


@pytest.mark.parametrize("pattern, after", [("random", 0), ("mixed", AFTER)])
@pytest.mark.parametrize("coins", ["honest", "forced", "half"])
def test_a_quarter_of_the_batches_of_sparse_stages_are_repetitions(pattern, after, coins):
    """All reveals of honest ones count; of forced ones those ahead of the cycles, the last of them,
    and what follows. None of them counts for a stage."""
    task, rng = task_of(pattern, coins, cycles=6), np.random.default_rng(5)
    made = [task.training_batch(1, 16, 4, rng) for _ in range(300)]
    repeated = np.array([batch.best is None for batch in made])
    assert abs(repeated.mean() - 0.25) < 6 * (0.25 * 0.75 / 300)**0.5
    assert {batch.reveals.sum() for batch in made if batch.best is not None} == {4}

    counts = {batch.reveals.sum() for batch in made if batch.best is None}
    honest, forced = {BEFORE + 6 + after}, {BEFORE + 1 + after}
    assert counts == {"honest": honest, "forced": forced, "half": honest | forced}[coins]

    lengths = {batch.inputs.shape[1] for batch in made if batch.best is None
               and batch.reveals.sum() in forced}
    possible = [task.repetition(1, pattern, "forced", cycles, after, rng) for cycles in range(2, 8)]
    if coins != "honest":
        assert lengths == {task.batch_of(one).inputs.shape[1] for one in possible}
    assert {task.training_batch(2, 8, 1, rng).reveals.sum() for _ in range(20)} == {16}


def test_forced_reveals_do_not_count_in_the_loss():
    """All tokens but these count as ever."""
    task = task_of()
    program = task.repetition(5, "mixed", "forced", 4, AFTER, np.random.default_rng(6))
    traces = task.batch_of(program)
    places = traces.reveals[0].nonzero()[0]
    forced = places[BEFORE:BEFORE + 3]
    model = LinRNN(len(task.vocab), d_model=8, heads=2).double()
    log_q = model(torch.from_numpy(traces.inputs)).log_softmax(-1)
    losses = -log_q.gather(2, torch.from_numpy(traces.targets).unsqueeze(2)).squeeze(2)
    kept = np.delete(np.arange(losses.shape[1]), forced)
    counted = losses[:, np.setdiff1d(places, forced)].mean()

    objective, metrics = loss_of(model, to_tensors(without_forced(traces, 4), "cpu"), Recipe())
    assert abs(metrics["reveal_loss"] - counted.item()) < 1e-10
    assert (objective - losses[:, kept].sum() / losses.numel() - counted).abs() < 1e-10


def test_a_hand_built_head_keeps_the_belief_about_a_pair_for_500_cycles():
    """Ahead of each reveal it reads [1/2, 1/2, 0], the filter's own prediction, whatever was shown
    before. After a reveal it reads 1 for the value shown, and 1/2 for the other of the pair."""
    task = task_of()
    rng = np.random.default_rng(7)
    program = task.repetition(20, "first", "honest", 500, 0, rng)
    best = torch.from_numpy(task.best_predictions(program))
    shown = torch.from_numpy(task.program_answers(program))
    states = run_commands(program.commands[:, :BEFORE])[:, -1]  # ahead of the cycles
    for b in np.flatnonzero((program.commands[:, BEFORE] == [1, 0, 2]).all(1)):  # of a and b
        ahead, after = hold_pair(shown[b, BEFORE:], torch.from_numpy(states[b]))
        assert (ahead - best[b, BEFORE:]).abs().max() < 1e-10
        expected = best[b, BEFORE:].scatter(1, shown[b, BEFORE:, None], 1.0)
        assert (after - expected).abs().max() < 1e-10


def test_the_study_reads_each_test_of_a_run(monkeypatch):
    """A model that finds all symbols equally likely is log(vocabulary) from the filter at a certain
    reveal, and log 2 less where the filter gives 1/2 to two values."""
    monkeypatch.setattr(adversary, "CYCLES", [1, 2, 4])
    task = task_of()

    class Uniform(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, tokens):
            return torch.zeros(*tokens.shape, len(task.vocab))

    results = adversary.measure(Uniform(), task, None)
    row = {"results": results}
    chance = np.log(len(task.vocab))
    for pattern in adversary.PATTERNS:
        for coins in ("forced", "honest"):
            for cycles in (1, 2, 4):
                nats = adversary.at_cycle(row, cycles, coins, pattern)
                assert abs(nats - (chance - np.log(2))) < 1e-6
    for test in where(results, test="going on"):
        assert np.abs(np.array(test["nats"]) - chance).max() < 1e-6
    assert abs(adversary.going_on(row, 4, "forced") - chance) < 1e-6


CYCLES = {"as trained": "xy .5, x", "two coins": "xy .5, xy .5, x",
          "pairs in turn": "xy .5, x, xz .5, x, yz .5, y", "with the third": "yz 1, xy .5, x",
          "coin of 0.75": "xy .75, x", "two certain": "xy 1, xy 1, xy .5, x"}


@pytest.mark.parametrize("cycle", adversary.OTHERS)
def test_other_cycles_repeat_their_lines_while_no_coin_falls_and_the_filter_knows_their_belief(
        cycle, monkeypatch):
    """The text is read line by line, by Bayes' rule over the six states of three variables."""
    task = task_of()
    program = adversary.other_cycles(task.group, cycle, 40, 6, np.random.default_rng(3))
    check_traces(task, program._replace(**{
        name: part[:2] for name, part in program._asdict().items() if name != "spacing"}),
        monkeypatch)
    traces = task.batch_of(program)

    pairs = set()
    for tokens, best in zip(task.write_program(program)[0], traces.best):
        belief = {(1, 2, 3): 1.0}
        read, expected = [], []
        for line in task.decode(tokens).splitlines():
            exchange = re.fullmatch(r">>> (?:if random\(\) < (.*): )?(\w), (\w) = \3, \2", line)
            shown = re.fullmatch(r"(\w) (\d)", line)
            if exchange:
                p = float(exchange[1] or 1)
                pair = exchange[2] + exchange[3]
                moved = Counter()
                for state, mass in belief.items():
                    new = dict(zip("abc", state))
                    new[pair[0]], new[pair[1]] = new[pair[1]], new[pair[0]]
                    moved[tuple(new.values())] += p * mass
                    moved[state] += (1 - p) * mass
                belief = moved
                read.append((pair, p))
            if shown:
                place = "abc".index(shown[1])
                expected.append([sum(mass for state, mass in belief.items() if state[place] == v)
                                 for v in (1, 2, 3)])
                belief = {state: mass for state, mass in belief.items()
                          if state[place] == int(shown[2])}
                belief = {state: mass / sum(belief.values()) for state, mass in belief.items()}
                read.append(shown[1])
        assert np.abs(best - expected).max() < 1e-12

        # The lines of the cycle, with x and y for the pair of this trace.
        parts = CYCLES[cycle].split(", ")
        repeated = read[BEFORE * (program.spacing + 1):]
        x, y = next(pair for pair, p in repeated if p < 1)
        names = {"x": x, "y": y, "z": ({*"abc"} - {x, y}).pop()}
        for place, step in enumerate(repeated):
            part = parts[place % len(parts)].split()
            named = [names[name] for name in part[0]]
            assert sorted(step[0]) == sorted(named)
            assert len(part) == 1 or step[1] == float(part[1])
        pairs.add(x + y)
    assert pairs == {"ab", "ac", "bc"}
    assert (program.executed == (program.probability == 1)).all()


def test_a_run_that_is_not_near_keeps_nothing():
    def row(ordinary, *nats):
        tests = [{"test": "cycles", "pattern": pattern, "coins": "forced", "nats": [0] * 6 + [one]}
                 for pattern, one in zip(adversary.PATTERNS, nats)]
        return {"results": [{"test": "ordinary", "nats": ordinary}, *tests]}

    rows = [row(0.09, 0.04, 0.04, 0.04, 0.04), row(0.09, 0.04, 0.04, 0.06, 0.04),
            row(0.11, 0.01, 0.01, 0.01, 0.01)]
    assert adversary.kept(rows) == "1 of 2" and not adversary.keeps(rows[2])


def test_the_records_are_cells_of_the_study():
    for name, cells in [("adversary", CELLS), ("adversary_rates", adversary.RATE_CELLS),
                        ("adversary_others", adversary.OTHER_CELLS)]:
        rows = records(name)
        assert max(len(where(rows, **cell)) for cell in cells) == 1
        assert all(any(cell.items() <= row.items() for cell in cells) for row in rows)
