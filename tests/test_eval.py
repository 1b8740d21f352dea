"""The table measures what it says: on an oracle that executes Python, and forgets on purpose."""

import re
from types import SimpleNamespace

import eval as evaluation
import numpy as np
import pytest
import torch
from data import Batch, Group, ReplTask, UserError, generator
from eval import evaluate, evaluate_and_print, load, load_weights, main, plot, predict, wilson
from matplotlib.figure import Figure
from models import MODELS, LinRNN
from torch import nn


class Interpreter(nn.Module):
    """Not a network: executes the first `most` lines of a trace, and answers what is asked for."""

    def __init__(self, task, most):
        super().__init__()
        self.task, self.most = task, most

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, len(self.task.vocab))
        for row, ids in enumerate(tokens.tolist()):
            symbols = [self.task.vocab[token] for token in ids]
            for t, symbol in enumerate(symbols):
                if symbol == " ":  # of `b 3`
                    lines = "".join(symbols[:t]).splitlines()
                    commands = [line[4:] for line in lines if re.match(">>> (?!print)", line)]
                    variables = {}
                    exec("\n".join(commands[:self.most]), {}, variables)
                    value = variables[symbols[t - 1]]
                    logits[row, t, self.task.encode(str(value))[0]] = 1
        return logits


# --- The table ------------------------------------------------------------------------------------

def test_a_model_that_stops_tracking_is_right_up_to_there_and_at_chance_beyond(capsys):
    """It executes four commands only: two reveals are right, and two are guessed. `perfect` and its
    interval are of traces, all others of reveals. The table prints these numbers."""
    task = ReplTask(Group("S4"))
    broken = Interpreter(task, 4 + 4)
    row, = evaluate_and_print(broken, task, [(8, 2)], traces=300, seed=3)
    assert row == evaluate(broken, task, 8, 2, 300, 3) != evaluate(broken, task, 8, 2, 300, 4)

    assert (row["chance"], row["reveals"]) == (0.25, 1200)
    assert row["by_position"] == pytest.approx([1, 1, 0.25, 0.25], abs=0.05)
    assert row["all"] == pytest.approx(np.mean(row["by_position"]))
    assert row["final"] == row["by_position"][-1]
    assert row["perfect"] == pytest.approx(1 / 16, abs=0.03)
    assert (row["perfect_low"], row["perfect_high"]) == wilson(300 * row["perfect"], 300)

    names, shown, along = capsys.readouterr().out.splitlines()[-3:]
    columns = names.split()[1:5]
    assert columns == ["chance", "all", "final", "perfect"]
    interval = f"{row['perfect_low']:.4f}-{row['perfect_high']:.4f}"
    assert shown.split() == ["(8,2)", *[f"{row[name]:.4f}" for name in columns], interval]
    assert along.split() == ["along", "it", *[f"{share:.4f}" for share in row["by_position"]]]


def test_the_interval_is_that_of_wilson_as_published():
    assert np.allclose([wilson(0, 10), wilson(5, 10), wilson(10, 10)],
                       [(0, 0.2775), (0.2366, 0.7634), (0.7225, 1)], atol=1e-4)


def test_the_traces_are_those_of_the_test_stream_and_a_wrong_word_is_no_answer():
    """A symbol that is no value counts, too: here it is always more likely than the right one.
    Targets outside the mask do not count."""
    drawn = []
    targets = np.array([[1, 2, 0], [1, 1, 2]])
    batch = Batch(np.zeros((2, 3), int), targets, np.array([[False, True, True]] * 2))
    task = SimpleNamespace(chance=1 / 3, test_batch=lambda *x: drawn.extend(x) or batch)
    logits = torch.tensor([1.0, 2.0, 0.0, 3.0])

    def says(best):
        model = nn.Module()
        model.forward = lambda tokens: logits[:best].expand(*tokens.shape, best)
        return evaluate(model, task, 2, 1, 2, seed=5)

    assert says(4)["all"] == 0 and says(3)["all"] == 1 / 4 and says(3)["by_position"] == [0.5, 0]
    assert drawn[:3] == [2, 2, 1] and drawn[3].random() == generator(5, "test", 2, 1).random()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_says_the_same_whole_in_pieces_and_without_a_stream(name, monkeypatch):
    """Pieces of 7 tokens of all traces, or one trace at a time: the order of traces and of time is
    kept. So a fork needs no `stream`, and a long trace needs no memory."""
    model = MODELS[name](22).double()
    tokens = np.random.default_rng(0).integers(22, size=(3, 50))
    whole = model(torch.from_numpy(tokens)).argmax(-1).numpy()
    assert len(np.unique(whole)) > 2

    for at_once in (2**17, 21, 1):
        monkeypatch.setattr("eval.TOKENS_AT_ONCE", at_once)
        for reader in (model, nn.Sequential(model)):  # Sequential has no stream
            assert (predict(reader, tokens) == whole).all()


def test_the_figure_shows_each_reveal_at_the_commands_read_before_it(monkeypatch):
    """A dotted line stands at the longest training trace, and another line at chance."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: figures.append(figure))
    row = {"length": 8, "spacing": 2, "chance": 0.2, "by_position": [1, 0.9, 0.8, 0.7]}
    plot([row], {"curriculum": [[2, 1], [16, 2], [4, 2]], "model": "lstm", "group": "S5"}, "x.png")
    curve, chance, trained = [line.get_xydata().tolist() for line in figures[0].axes[0].lines]
    assert curve == [[2, 1], [4, 0.9], [6, 0.8], [8, 0.7]]
    assert {y for _, y in chance} == {0.2} and {x for x, _ in trained} == {16}


# --- Reading a run --------------------------------------------------------------------------------

def test_a_run_is_read_back_by_its_names_or_into_a_model_of_ones_own(small_run):
    task, model = load(small_run)
    assert not model.training and task.group.name == "S3"

    own = LinRNN(len(task.vocab), d_model=8, heads=2, conv_width=6)
    assert load_weights(own, small_run) is own and not own.training
    for one, other in zip(model.parameters(), own.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(UserError, match="weights of another model"):
        load_weights(LinRNN(len(task.vocab), d_model=12, heads=2, conv_width=6), small_run)


def test_the_command_line_prints_the_table_of_evaluate_and_draws_it(small_run, tmp_path, capsys,
                                                                    monkeypatch):
    """For the lengths, the number of traces and the seed that are typed."""
    task = ReplTask(Group("S3"))
    model = Interpreter(task, 3 + 3)
    monkeypatch.setattr(evaluation, "load", lambda folder, device: (task, model))
    main([str(small_run), *"--lengths 8:4,4:1 --traces 20 --seed 5 --plot".split(),
          str(tmp_path / "table.svg")])
    shown = capsys.readouterr().out
    assert "<svg" in (tmp_path / "table.svg").read_text()

    evaluate_and_print(model, task, [(8, 4), (4, 1)], 20, 5)
    assert shown == capsys.readouterr().out
