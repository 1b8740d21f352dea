"""Repetitions are real programs with an exact filter; the non-linear step; rates that fall to 0."""

import json
import random
import re

import numpy as np
import pytest
import torch
from conftest import SMALL, session, typed_lines
from test_beliefs import by_enumeration

from data import Group, generator
from experiments import adversary, cycle
from experiments.adversary import FallingRun, RepetitionTask, learn, make_parser
from models import build

TINY = [*SMALL, "--format", "repetitions", "--uncertain", "0.5"]


def task_of(shown="one", group="S3", **options):
    return RepetitionTask(Group(group), "swap", shown=shown, **options)


@pytest.mark.parametrize("shown", ["one", "all"])
@pytest.mark.parametrize("schedule", ["honest", "adversarial"])
def test_a_real_interpreter_shows_a_repetition_if_its_coins_fall_as_recorded(
        shown, schedule, monkeypatch):
    for group in ("S3", "S4"):
        task = task_of(shown, group)
        program = task.draw(6, 5, 1, np.random.default_rng(1), schedule)
        tokens, reveals = task.write_program(program)
        assert (tokens[reveals] == task.value_tokens[task.program_answers(program)].ravel()).all()
        for row, probability, executed in zip(tokens, program.probability, program.executed):
            text, coins = task.decode(row), (probability > 0) & (probability < 1)
            falls = iter([0.49 if fell else 0.5 for fell in executed[coins]])
            monkeypatch.setattr(random, "random", lambda: next(falls))
            assert session(typed_lines(text)) == text and next(falls, None) is None
            assert text.count("if random()") == 4
            assert text.count("print") == (5 if shown == "one" else 5 * task.group.degree)


@pytest.mark.parametrize("shown", ["one", "all"])
@pytest.mark.parametrize("schedule", ["honest", "adversarial"])
def test_the_filter_of_a_repetition_is_the_enumeration_of_its_coins(shown, schedule):
    task = task_of(shown)
    program = task.draw(5, 4, 1, np.random.default_rng(2), schedule)
    expected, _ = by_enumeration(task, program)
    assert np.abs(task.best_predictions(program) - expected).max() < 1e-12


def test_a_cycle_leaves_the_belief_ahead_of_each_reveal_as_it_was():
    """The claim of the title: only the number of cycles differs, and a reader need not count."""
    task = task_of()
    beliefs = task.beliefs(task.draw(9, 20, 1, np.random.default_rng(3), "adversarial"))
    assert np.abs(beliefs[:, 1:] - beliefs[:, 1:2]).max() < 1e-12
    assert ((beliefs[:, 1] == 0.5).sum(-1) == 2).all()


def test_honest_coins_fall_half_of_the_time_and_only_behind_a_coin():
    program = task_of().draw(500, 9, 1, np.random.default_rng(4), "honest")
    assert program.executed[:, 0].all()
    assert abs(program.executed[:, 1:].mean() - 0.5) < 6 * 0.5 / 4000**0.5
    assert (program.commands[:, 1:] == program.commands[:, 1:2]).all()


def test_a_quarter_of_the_batches_of_sparse_stages_are_repetitions_and_none_of_the_others():
    task, rng = task_of(cycles=3), np.random.default_rng(5)
    task.cycles = 6  # 7 reveals, where a random trace of (16,4) has 4
    counts = [task.training_batch(2, 16, 4, rng).reveals.sum() for _ in range(400)]
    assert set(counts) == {8, 14}
    assert abs(np.mean(np.equal(counts, 14)) - 0.25) < 6 * (0.25 * 0.75 / 400)**0.5
    assert {task.training_batch(2, 8, 1, rng).reveals.sum() for _ in range(20)} == {16}


def test_the_loss_of_the_filter_on_a_batch_is_kept():
    task = task_of(repeat=0.0)
    batch = task.training_batch(7, 8, 2, np.random.default_rng(6))
    values = batch.targets[batch.reveals].reshape(7, 4)
    expected = [-np.log(batch.best[b, r, values[b, r]]) for b in range(7) for r in range(4)]
    assert abs(task.bayes_loss - np.mean(expected)) < 1e-12


@pytest.mark.parametrize("rule", adversary.RULES)
def test_the_non_linear_step_acts_after_every_interval_however_the_trace_is_cut(rule):
    """A stream in pieces is the whole; the size before the next token is what the rule says."""
    model = build("scaled", 9, d_model=12, heads=3, interval=5, rule=rule).double()
    block = model.blocks[1]
    block.a_b.data += torch.rand(2, 3) if rule != "unit" else 0
    tokens = torch.randint(9, (2, 23))
    whole, state, pieces = model(tokens), None, []
    for piece in tokens.tensor_split([1, 5, 6, 15, 22], 1):
        logits, state = model.stream(piece, state)
        pieces.append(logits)
    assert (torch.cat(pieces, 1) - whole).abs().max() < 1e-10
    S = torch.randn(2, 3, 4, 4).double()
    a, b = block.a_b
    sizes = block.rescale(S).flatten(-2).norm(dim=-1)
    if rule == "saturating":
        largest = a.exp()[:, None, None]
        assert ((block.rescale(S) / largest).atanh() * largest - S).abs().max() < 1e-10
    else:
        assert (sizes - S.flatten(-2).norm(dim=-1) ** (1 - b) * a.exp()).abs().max() < 1e-10
    if rule == "unit":
        assert (sizes - 1).abs().max() < 1e-10 and not block.a_b.requires_grad
    plain = build("linrnn", 9, d_model=12, heads=3).double()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "a_b" not in k})
    assert (plain(tokens)[:, :5] - whole[:, :5]).abs().max() < 1e-10  # the first piece is linear
    assert (plain(tokens)[:, 5:] - whole[:, 5:]).abs().max() > 1e-6


def test_the_rates_fall_to_0_over_the_last_stage_and_the_result_are_the_last_weights(tmp_path):
    options, rates = [*TINY, "--last-steps", "4", "--max-steps", "9"], []

    class Watched(FallingRun):
        def make_step(self):
            row = super().make_step()
            rates.append((row["length"], self.rates[0] / self.peaks[0]))
            return row

    run, _ = learn(options, tmp_path / "run", 1, make_parser(), Watched)
    assert [left for length, left in rates if length == 2] == [1] * (len(rates) - 4)
    assert [left for length, left in rates if length == 4] == [1, 0.75, 0.5, 0.25]
    assert run.result is run.model and run.progress["finished"]


def test_an_arm_is_run_recorded_and_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adversary, "TESTS", {"random": [(4, 2)], "honest": [(3, 1)]})
    adversary.main(["run", "linrnn", *TINY[2:], "--record", "r.jsonl"])
    line = json.loads(open("r.jsonl").read())
    assert line["uncertain"] == 0.5 and line["results"]["honest"][0]["reveals"] == 12
    folder = next((tmp_path / "runs" / "arms").iterdir())
    cycle.main([str(folder), "--record", "e.jsonl"])
    line = json.loads(open("e.jsonl").read())
    assert len(line["size_adversarial"]) == 1 + adversary.CYCLES
    assert all(line[f"r2_{name}"] < 1 for name in ("joint", "marginals"))


def test_the_map_of_a_cycle_is_what_carries_a_state_through_it():
    """S after the cycle = M S before it + the writes: two states, one difference."""
    task = task_of()
    model = build("linrnn", len(task.vocab), d_model=12, heads=3, conv_width=3).double()
    batch = task.batch_of(task.draw(2, 6, 1, np.random.default_rng(7), "adversarial"))
    places = batch.reveals[0].nonzero()[0]
    M = cycle.cycle_matrices(model, batch.inputs, places[2], places[3])
    tokens = torch.from_numpy(batch.inputs)
    _, state = model.stream(tokens[:, :places[2] + 1])
    other = torch.randn_like(state[1])
    after = [model.stream(tokens[:, places[2] + 1:places[3] + 1], [state[0], S, None])[1][1]
             for S in (state[1], state[1] + other)]
    assert (after[1] - after[0] - M @ other).abs().max() < 1e-10


def test_the_corrections_of_a_cycle_change_what_they_name_and_nothing_else():
    """The loss is that of the whole trace; the size is kept; one number of the state is frozen."""
    task = task_of()
    model = build("linrnn", len(task.vocab), d_model=12, heads=3, conv_width=3).double()
    batch = task.batch_of(task.draw(5, 9, 1, np.random.default_rng(8), "adversarial"))
    kl, states = cycle.losses(model, batch)
    logits = model(torch.from_numpy(batch.inputs))[torch.from_numpy(batch.reveals)]
    best = torch.from_numpy(batch.best)
    gap = best.clamp_min(1e-300).log() - logits.view(5, 9, -1).log_softmax(-1)
    expected = (best * gap).sum(-1).mean(0)
    assert (expected - torch.tensor(kl, dtype=torch.float64)).abs().max() < 1e-10
    _, kept = cycle.losses(model, batch, cycle.keep_size(states))
    sizes = kept.flatten(-2).norm(dim=-1)
    assert (sizes[:, 1:] - sizes[:, 1:2]).abs().max() < 1e-10
    assert (kept[:, :3] - states[:, :3])[:, :2].abs().max() == 0
    correct = cycle.freeze_growth(states, 2, 8)
    direction = (states[:, 8] - states[:, 2]).flatten(1)
    before, after = states[:, 5], correct(5, states[:, 5])
    moved = (after - before).flatten(1)
    assert ((after - states[:, 2]).flatten(1) * direction).sum(-1).abs().max() < 1e-10
    assert torch.linalg.matrix_rank(torch.stack([moved[0], direction[0]])) == 1


def test_the_last_reveals_of_random_traces_stand_at_one_place_ahead_of_the_value():
    """There the probe of a belief looks: the belief is that ahead of the value."""
    task = task_of()
    program = task.draw(50, 16, 4, np.random.default_rng(9))
    batch = task.batch_of(program)
    last = batch.reveals[0].nonzero()[0][-1]
    assert batch.reveals[:, last].all() and not batch.reveals[:, last + 1:].any()
    value = task.value_tokens[task.program_answers(program)[:, -1]]
    assert (batch.targets[:, last] == value).all() and (batch.inputs[:, last] != value).all()


def test_a_probe_finds_a_linear_image_and_nothing_in_noise():
    x = torch.randn(400, 5).double()
    y = x @ torch.randn(5, 2).double() + 3
    assert cycle.explained(cycle.fit_probe(x[:200], y[:200])(x[200:]), y[200:]) > 0.9999
    noise = torch.randn(400, 2).double()
    probe = cycle.fit_probe(x[:200], noise[:200])
    assert cycle.explained(probe(x[200:]), noise[200:]) < 0.1


def test_what_does_not_fit_is_refused(refused, small_run):
    refused(adversary.main, ["run", "nobody"], "nobody")
    refused(cycle.main, [small_run], "no run of experiments.adversary")
    for options, word in [({"repeat": 2.0}, "repeat"), ({"cycles": 0}, "cycles"),
                          ({"group": "Z3"}, "transposition")]:
        with pytest.raises(ValueError, match=word):
            task_of(**options)
    for options in ({"interval": 0}, {"rule": "none"}):
        with pytest.raises(ValueError, match="interval"):
            build("scaled", 9, **options)


def test_the_table_of_the_header_is_what_was_recorded():
    """Ranges of the seeds, the greatest at cycle 4, and all seeds at cycle 64."""
    def told(x):
        return "inf" if np.isinf(x) else f"{x:.2f}".lstrip("0") if x >= 0.0995 else f"{x:.3f}"[1:]

    names = {"P = ": "uncertain", " cycle": "cycles", "all shown": "shown", "S": "group",
             " last steps": "last_steps"}
    text = (adversary.RESULTS / "adversary.jsonl").read_text()
    runs = [json.loads(line) for line in text.splitlines()]
    table = adversary.__doc__.split("by rank\n")[1].split("So linear")[0].splitlines()
    for row in table:
        name, near, far, fourth, *ranks = [x.strip() for x in re.split(r"  +", row.strip())]
        arm, _, condition = name.partition(", ")
        wanted = {"group": "S3", "uncertain": 0.25, "cycles": 4, "shown": "one",
                  "last_steps": 2000, "arm": arm}
        for word, key in names.items():
            if word in condition and arm not in ("scaled", "scaled-64", "learned", "saturating"):
                value = condition.replace(word, "").rstrip("s").replace(",", "")
                wanted[key] = {"shown": "all", "group": condition}.get(key) or float(value)
        mine = [run for run in runs if wanted.items() <= run.items()]
        kl = np.array([[run["results"]["random"][i]["kl"] for i in (0, 2)] for run in mine])
        cycles = np.array([np.reshape(run["results"]["adversarial"][0]["kl_by_position"],
                                      (65, -1)).mean(1) for run in mine])
        kl[np.isnan(kl)] = cycles[np.isnan(cycles)] = np.inf  # a state that overflows
        assert [near, far] == [" - ".join(map(told, (x.min(), x.max()))) for x in kl.T], name
        assert fourth == told(cycles[:, 4].max()), name
        assert " ".join(ranks) == " ".join(map(told, sorted(cycles[:, 64]))), name
    assert len(table) > 25
