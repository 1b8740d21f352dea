"""The table measures what it says: on an oracle that executes Python, and forgets on purpose."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data import Batch, Group, ReplTask, generator
from eval import (evaluate, evaluate_and_print, load, main, make, plot, predict, print_table,
                  read_run, score, wilson)
from matplotlib.figure import Figure
from models import LinRNN
from torch import nn


def module_of(forward):
    model = nn.Module()
    model.forward = forward
    return model


def task_of(targets, reveals):
    batch = Batch(np.zeros_like(targets), targets, reveals)
    return SimpleNamespace(chance=0.5, test_batch=lambda *_: batch)


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


# --- The table ------------------------------------------------------------------------------------

def test_exercise_6_a_model_that_stops_tracking_is_at_chance_from_there_on(capsys):
    """It executes 14 commands only: 14 reveals are correct, and two are guessed. `perfect` and its
    interval count traces, all other numbers reveals. The table prints them, and of the accuracies
    along a trace eight."""
    task = ReplTask(Group("S4"))
    broken = Interpreter(task, 4 + 14)
    row, = evaluate_and_print(broken, task, [(16, 1)], traces=50, seed=3)
    json.dumps(row)  # refuses a number of numpy
    assert row == evaluate(broken, task, 16, 1, 50, 3) != evaluate(broken, task, 16, 1, 50, 4)

    along, interval = row["by_position"], (row["perfect_low"], row["perfect_high"])
    assert (row["chance"], row["reveals"]) == (0.25, 800), "reveals"
    assert along == pytest.approx([1] * 14 + [0.25] * 2, abs=0.15), "by_position"
    assert row["all"] == pytest.approx(np.mean(along)), "all"
    assert row["final"] == along[-1], "final"
    assert row["perfect"] == pytest.approx(1 / 16, abs=0.06), "perfect"
    assert interval == wilson(50 * row["perfect"], 50), "perfect_low, perfect_high"

    names, shown, positions = capsys.readouterr().out.splitlines()[-3:]
    columns = names.split()[1:5]
    assert columns == ["chance", "all", "final", "perfect"]
    numbers = [f"{row[name]:.4f}" for name in columns]
    assert shown.split() == ["(16,1)", *numbers, "{:.4f}-{:.4f}".format(*interval)]
    assert positions.split() == ["along", "it", *[f"{value:.4f}" for value in along[::2]]]


def test_one_wrong_reveal_of_32768_is_not_printed_as_a_perfect_table(capsys):
    correct = np.ones((256, 128), bool)
    correct[7, 1] = False
    row = {"length": 128, "spacing": 1, "chance": 0.2} | score(correct)
    row["by_position"][0] = 1 - 1e-5
    print_table([row])
    *_, shown, along = capsys.readouterr().out.splitlines()
    assert shown.split()[1:5] == ["0.2000", "0.9999", "1.0000", "0.9961"]
    assert along.split()[2:] == ["0.9999"] + ["1.0000"] * 7


def test_the_interval_is_wilsons_as_published():
    assert np.allclose([wilson(0, 10), wilson(5, 10), wilson(10, 10)],
                       [(0, 0.2775), (0.2366, 0.7634), (0.7225, 1)], atol=1e-4)


def test_the_traces_come_from_the_test_stream_and_any_token_can_be_predicted():
    """Tokens that are not values count: here one is always more likely than the target. Targets
    outside the mask do not count."""
    task = task_of(np.array([[1, 2, 0], [1, 1, 2]]), np.array([[False, True, True]] * 2))
    logits = torch.tensor([1.0, 2.0, 0.0, 3.0])

    def says(best):
        model = module_of(lambda tokens: logits[:best].expand(*tokens.shape, best))
        return evaluate(model, task, 2, 1, 2, seed=5)

    assert says(4)["all"] == 0 and says(3)["all"] == 1 / 4 and says(3)["by_position"] == [0.5, 0]
    drawn, batch = [], task.test_batch()
    task.test_batch = lambda *arguments: drawn.extend(arguments) or batch
    says(3)
    assert drawn[:3] == [2, 2, 1] and drawn[3].random() == generator(5, "test", 2, 1).random()


@pytest.mark.parametrize("training", [False, True])
def test_a_model_is_evaluated_without_its_dropout_and_is_then_as_it_was(training):
    model = nn.Sequential(nn.Embedding(16, 16), nn.Dropout(0.9)).train(training)
    one, other = [evaluate(model, ReplTask(Group("S3")), 4, 2, 30) for _ in range(2)]
    assert one == other
    assert [module.training for module in model.modules()] == [training] * 3


def test_the_mask_marks_the_reveals_and_each_trace_needs_as_many():
    targets = np.array([[1, 2, 0], [1, 1, 2]])
    reveals = np.array([[False, True, True], [True, False, True]])
    model = module_of(lambda tokens: torch.tensor([0.0, 1, 0]).expand(*tokens.shape, 3))
    assert evaluate(model, task_of(targets, reveals), 3, 1, 2)["by_position"] == [0.5, 0]
    reveals[0] = True, False, False
    with pytest.raises(ValueError, match="same shape"):
        evaluate(model, task_of(targets, np.concatenate([reveals, reveals])), 3, 1, 4)


@pytest.mark.parametrize("tokens_at_once, pieces", [(2**17, [3]), (100, [2, 1]), (1, [1, 1, 1])])
def test_traces_are_read_in_pieces_and_keep_their_order(tokens_at_once, pieces, monkeypatch):
    """Three traces at once, two, or one; by any module, which needs no `stream`."""
    monkeypatch.setattr("eval.TOKENS_AT_ONCE", tokens_at_once)
    sizes = []
    model = nn.Embedding(22, 22)
    model.register_forward_pre_hook(
        lambda _, args: sizes.append(len(args[0]) / (not torch.is_grad_enabled())))
    tokens = np.random.default_rng(0).integers(22, size=(3, 50))
    assert (predict(model, tokens) == model.weight.argmax(-1).numpy()[tokens]).all()
    assert sizes == pieces


def test_the_figure_shows_each_reveal_at_the_commands_read_before_it(monkeypatch):
    """One curve for each row, a dotted line at the longest training trace, a line at chance. The
    commands double along the axis, the title names the run, and the legend is beside the curves."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: figures.append(figure))
    rows = [{"length": 8, "spacing": 2, "chance": 0.2, "by_position": [1, 0.9, 0.8, 0.7]},
            {"length": 9, "spacing": 3, "chance": 0.2, "by_position": [0.5, 0.4, 0.3]}]
    plot(rows, "x.png", "runs/one", trained=16)
    *curves, chance, trained = [line.get_xydata().tolist() for line in figures[0].axes[0].lines]
    assert curves == [[[2, 1], [4, 0.9], [6, 0.8], [8, 0.7]], [[3, 0.5], [6, 0.4], [9, 0.3]]]
    assert {y for _, y in chance} == {0.2} and {x for x, _ in trained} == {16}

    assert [line.get_label() for line in figures[0].axes[0].lines[:2]] == ["(8,2)", "(9,3)"]
    assert figures[0].axes[0].get_title() == "runs/one"


# --- Reading a run --------------------------------------------------------------------------------

def test_a_run_is_read_back_from_its_config(small_run):
    task, model = load(small_run)
    assert not model.training and task.group.name == "S3"
    run = read_run(small_run)
    own = LinRNN(len(task.vocab), d_model=8, heads=2, conv_width=6)
    own.load_state_dict(run["model"])
    assert all(map(torch.equal, model.parameters(), own.parameters()))
    assert make(run["config"])[1].state_dict().keys() == run["model"].keys()
    assert make(run["config"] | {"beta_max": 0.0})[1].blocks[1].beta_max == 0


@pytest.mark.parametrize("changes, words", [
    ({"d_model": 9}, "heads must divide"), ({"group": "Q8"}, "unknown group"),
    ({"model": "gru"}, "model must be one of"), ({"layers": 2}, "does not describe its model"),
    ({"group": None}, "does not describe its model"),
    ({}, "does not describe its model")])
def test_a_run_that_cannot_be_made_again_is_refused(changes, words, small_run, tmp_path, refused):
    """As that of a model of your own, whose config does not describe it."""
    run = read_run(small_run)
    config = run["config"] | changes if changes else {}
    torch.save(run | {"config": config}, tmp_path / "model.pt")
    refused(main, [tmp_path], words)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", print])
def test_a_run_that_is_missing_or_unreadable_is_refused_and_executes_no_code(content, tmp_path,
                                                                             refused):
    refused(main, [tmp_path], "there is no run in", str(tmp_path))
    refused(main, [tmp_path / "nowhere"], "there is no run in", "nowhere")
    path = tmp_path / "model.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save({"model": content}, path)
    refused(main, [tmp_path], str(path), "cannot be read")


# --- The command line -----------------------------------------------------------------------------

def test_the_command_prints_the_table_of_evaluate_and_draws_it(small_run, tmp_path, capsys,
                                                               monkeypatch):
    """For the lengths, the number of traces and the seed that are typed; the title is the run."""
    task = ReplTask(Group("S3"))
    model = Interpreter(task, 3 + 3)
    monkeypatch.setattr("eval.load", lambda run, device: (load(run, device), (task, model))[1])
    lines = []
    monkeypatch.setattr("matplotlib.axes.Axes.axvline", lambda _, x, **more: lines.append(x))
    main([str(small_run / "model.pt"), *"--lengths 8:4,4:1 --traces 20 --seed 5 --plot".split(),
          str(tmp_path / "table.svg")])
    shown = capsys.readouterr().out
    assert f"<!-- {small_run / 'model.pt'} -->" in (tmp_path / "table.svg").read_text()
    assert lines == [4]  # of the curriculum 2:1,4:2

    evaluate_and_print(model, task, [(8, 4), (4, 1)], 20, 5)
    assert shown == capsys.readouterr().out


@pytest.mark.parametrize("options, words", [
    ("--lengths 64", "LENGTH:SPACING"), ("--lengths 4:2,0:1", "multiple"),
    ("--lengths 4:0", "LENGTH:SPACING"),
    ("--traces 0", "traces"), ("--seed -1", "seed"), ("--plot x.bmp", ".png, .pdf or .svg"),
    ("--plot=", "got ''"),
    ("--device cuda", "no device 'cuda'"), ("--plot nowhere/x.png", "in a folder")])
def test_the_command_refuses_bad_input_before_the_work(options, words, small_run, refused):
    assert not refused(main, [small_run, *options.split()], words)
