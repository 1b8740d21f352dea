"""The table measures what it says: on an oracle that executes Python, and forgets on purpose."""

import json
import re
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data import Batch, Group, ReplTask, UserError, generator
from eval import (evaluate, evaluate_and_print, load, main, make, plot, predict, print_table,
                  read_run, score, wilson)
from matplotlib.figure import Figure
from torch import nn
from train import Config


class Interpreter(nn.Module):
    """Not a network: executes the first `most` lines of a trace, and answers by their state."""

    def __init__(self, task, most):
        super().__init__()
        self.task, self.most = task, most

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, len(self.task.vocab))
        for row, ids in enumerate(tokens.tolist()):
            tokens = [self.task.vocab[i] for i in ids]
            for t, token in enumerate(tokens):
                if token == " ":  # of `b 3`
                    lines = "".join(tokens[:t]).splitlines()
                    commands = [line[4:] for line in lines if re.match(">>> (?!print)", line)]
                    variables = {}
                    exec("\n".join(commands[:self.most]), {}, variables)
                    value = variables[tokens[t - 1]]
                    logits[row, t, self.task.encode(str(value))[0]] = 1
        return logits


# --- 1. The table ---------------------------------------------------------------------------------

def test_exercise_1_a_model_that_stops_tracking_is_at_chance_from_there_on():
    """It executes 14 commands only: 14 reveals are correct, and two are guessed. `perfect` and its
    interval count traces, all other numbers reveals."""
    task = ReplTask(Group("S4"))
    row = evaluate(Interpreter(task, 4 + 14), task, 16, 1, traces=50, seed=3)
    json.dumps(row)  # refuses a number of numpy
    along, interval = row["by_position"], (row["perfect_low"], row["perfect_high"])
    assert (row["chance"], row["reveals"]) == (0.25, 800), "reveals"
    assert along == pytest.approx([1] * 14 + [0.25] * 2, abs=0.15), "by_position"
    assert row["all"] == pytest.approx(np.mean(along)), "all"
    assert row["final"] == along[-1], "final"
    assert row["perfect"] == pytest.approx(1 / 16, abs=0.06), "perfect"
    assert interval == wilson(50 * row["perfect"], 50), "perfect_low, perfect_high"


def test_the_interval_is_wilsons_as_published():
    assert np.allclose([wilson(0, 10), wilson(5, 10), wilson(10, 10)],
                       [(0, 0.2775), (0.2366, 0.7634), (0.7225, 1)], atol=1e-4)


def test_the_traces_are_those_of_the_test_stream_for_each_seed_length_and_spacing():
    drawn, batch = [], Batch(*np.ones((2, 3, 4), int), np.ones((3, 4), bool))
    task = SimpleNamespace(chance=0.5, test_batch=lambda *asked: drawn.extend(asked) or batch)
    evaluate(nn.Embedding(2, 2), task, 4, 1, 3, seed=5)
    assert drawn[:3] == [3, 4, 1] and drawn[3].random() == generator(5, "test", 4, 1).random()


def test_any_token_can_be_predicted_and_only_those_under_the_mask_count():
    """Tokens that are not values count: here one is always more likely than the target."""
    reveals = np.array([[False, True, True], [True, False, True]])
    batch = Batch(np.zeros((2, 3), int), np.array([[1, 2, 0], [1, 1, 2]]), reveals)
    task = SimpleNamespace(chance=0.5, test_batch=lambda *_: batch)
    model = nn.Embedding(1, 4)
    for largest, by_position in [(0, [0, 0.5]), (1, [0.5, 0]), (2, [0.5, 0.5]), (3, [0, 0])]:
        model.weight.data = torch.eye(4)[[largest]]
        assert evaluate(model, task, 3, 1, 2)["by_position"] == by_position


@pytest.mark.parametrize("training", [False, True])
def test_a_model_is_evaluated_without_its_dropout_and_is_then_as_it_was(training):
    model = nn.Sequential(nn.Embedding(16, 16), nn.Dropout(0.9)).train(training)
    one, other = [evaluate(model, ReplTask(Group("S3")), 4, 2, 30) for _ in range(2)]
    assert one == other
    assert [module.training for module in model.modules()] == [training] * 3


@pytest.mark.parametrize("tokens_at_once", [2**17, 100, 1])
def test_traces_are_read_in_pieces_and_keep_their_order(tokens_at_once, monkeypatch):
    """Three traces at once, two, or one; by any module, which needs no `stream`."""
    monkeypatch.setattr("eval.TOKENS_AT_ONCE", tokens_at_once)
    model, tokens = nn.Embedding(22, 22), np.random.default_rng(0).integers(22, size=(3, 50))
    assert (predict(model, tokens) == model.weight.argmax(-1).numpy()[tokens]).all()


def test_one_wrong_reveal_of_32768_is_not_printed_as_a_perfect_table(capsys):
    """A row shows its columns, and eight of the accuracies along a trace."""
    correct = np.ones((256, 128), bool)
    correct[7, 1] = False
    row = {"length": 128, "spacing": 1, "chance": 0.2} | score(correct)
    row["by_position"][0] = 1 - 1e-5
    print_table([row])
    names, shown, along = capsys.readouterr().out.splitlines()[-3:]
    assert names.split()[1:5] == ["chance", "all", "final", "perfect"]
    assert shown.split()[:5] == ["(128,1)", "0.2000", "0.9999", "1.0000", "0.9961"]
    assert along.split()[2:] == ["0.9999"] + ["1.0000"] * 7


def test_the_figure_shows_each_reveal_at_the_commands_read_before_it(monkeypatch):
    """One curve for each row, a dotted line at the longest training trace, a line at chance."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: figures.append(figure))
    rows = [{"length": 8, "spacing": 2, "chance": 0.2, "by_position": [1, 0.9, 0.8, 0.7]},
            {"length": 9, "spacing": 3, "chance": 0.2, "by_position": [0.5, 0.4, 0.3]}]
    plot(rows, "x.png", "runs/one", trained=16)
    *curves, chance, trained = [line.get_xydata().tolist() for line in figures[0].axes[0].lines]
    assert curves == [[[2, 1], [4, 0.9], [6, 0.8], [8, 0.7]], [[3, 0.5], [6, 0.4], [9, 0.3]]]
    assert {y for _, y in chance} == {0.2} and {x for x, _ in trained} == {16}


# --- 2. Reading a run -----------------------------------------------------------------------------

def test_a_run_is_read_back_from_its_config(small_run):
    task, model = load(small_run)
    run = read_run(small_run)
    assert not model.training and task.group.name == "S3"
    assert all(map(torch.equal, model.state_dict().values(), run["model"].values()))
    _, other = make(run["config"] | {"beta_max": 0.0})
    assert other.blocks[1].beta_max == 0


def test_sizes_that_are_not_given_are_those_of_the_model_and_the_group():
    default = asdict(Config())
    _, model = make(default)
    assert (model.blocks[1].beta_max, model.blocks[1].heads) == (2, 4)
    assert sum(parameter.numel() for parameter in model.parameters()) == 73_688
    assert make(default | {"group": "S7"})[1].blocks[0].conv.kernel_size == (10,)
    assert make(default | {"model": "lstm"})[1].embedding.embedding_dim == 60


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no run in"):
        load(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"half a file")
    with pytest.raises(UserError, match="is damaged"):
        load(tmp_path)


# --- 3. The command line --------------------------------------------------------------------------

def test_the_command_prints_the_table_of_evaluate_and_draws_it(small_run, tmp_path, capsys):
    """For the lengths, the number of traces and the seed that are typed; the title is the run."""
    main([str(small_run), *"--lengths 8:4,4:1 --traces 20 --seed 5 --plot".split(),
          str(tmp_path / "table.svg")])
    shown = capsys.readouterr().out
    assert f"<!-- {small_run} -->" in (tmp_path / "table.svg").read_text()
    task, model = load(small_run)
    evaluate_and_print(model, task, [(8, 4), (4, 1)], 20, 5)
    assert shown == capsys.readouterr().out
