"""What the same tokens show, and the learning rates."""

import numpy as np
from conftest import typed_lines

from data import Group, ReplTask, generator
from experiments import baselines
from train import Config, Progress


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


def test_learning_rates_warm_up_and_decay(monkeypatch):
    """To 0 after the last token; in the paper's recipe after 5% of the steps, to a fifth."""
    for step, tokens, expected in [(24, 0, 0.5), (100, 0, 1), (100, 5, 0.5), (100, 10, 0)]:
        scale = baselines.cosine(Config(), Progress(step=step, tokens=tokens), 10)
        assert abs(scale - expected) < 1e-12

    configs = []

    def train(model, task, config, folder, **options):
        configs.append(config)
        return model, [vars(Progress())]

    monkeypatch.setattr(baselines, "train", train)
    monkeypatch.setattr(baselines, "first_reveals", lambda *_: [])
    for first in 8, 2:
        baselines.run_paper({"model": "lstm", "first": first, "seed": 0}, None)
    four, five = configs
    a_fifth = 0.6 + 0.1 * (1 + 5**0.5)  # of the way: 0.6 + 0.4 cos 36 degrees
    for step, expected in [(0, 1 / 83), (82, 1), (83, 1), (83 + 317, a_fifth), (4 * 417, 0.2)]:
        assert abs(baselines.paper_schedule(four, Progress(step=step)) - expected) < 1e-12
    assert baselines.paper_schedule(five, Progress(step=4 * 417 - 1, stage=3)) > 0.2
