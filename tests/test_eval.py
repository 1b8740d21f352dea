"""The table measures what it says: on an oracle that executes Python, and forgets on purpose."""

import builtins
import random
import re
from types import SimpleNamespace

import eval as evaluation
import numpy as np
import pytest
import torch
from data import Batch, Group, ReplTask, UserError, generator
from eval import (evaluate, evaluate_and_print, load, load_weights, main, plot, predict,
                  print_table, wilson)
from matplotlib.figure import Figure
from models import MODELS, LinRNN
from torch import nn
from train import to_tensors


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


class Saying(nn.Module):
    """Not a network: of four symbols the same one everywhere; from a token on one logit is bad."""

    def __init__(self, symbol, bad=0.0, bad_from=0):
        super().__init__()
        self.symbol, self.bad, self.bad_from = symbol, bad, bad_from

    def forward(self, tokens):
        logits = nn.functional.one_hot(torch.full(tokens.shape, self.symbol), 4).float()
        logits[1, self.bad_from:, 2] += self.bad
        return logits


def task_of(inputs, targets, reveals):
    return SimpleNamespace(chance=0.5, test_batch=lambda *_: Batch(inputs, targets, reveals))


@pytest.mark.parametrize("symbol", [0, 2])
@pytest.mark.parametrize("bad, is_bad", [(torch.nan, True), (torch.inf, True), (-torch.inf, False)])
def test_the_table_says_from_which_token_on_a_model_has_no_finite_numbers(symbol, bad, is_bad,
                                                                          capsys):
    """In one row of two. What it says there is no answer, be it right by chance: nan passes for the
    largest number. A symbol that is ruled out, by -inf, is well."""
    task = task_of(np.zeros((2, 4), int), np.full((2, 4), symbol), np.ones((2, 4), bool))
    row, = evaluate_and_print(Saying(symbol, bad, bad_from=2), task, [(4, 1)], 2)
    if not is_bad and symbol != 2:
        assert row["all"] == 1
    if is_bad:
        assert row["not_finite_from"] == 2 and row["by_position"] == [1, 1, 0.5, 0.5]
    assert ("not finite from token 2 on" in capsys.readouterr().out) == is_bad


def test_traces_need_as_many_reveals_as_the_others_and_at_least_one():
    """Else a row of answers would be those of several traces."""
    tokens = np.zeros((2, 3), int)
    for reveals in ([[1, 1, 0], [1, 0, 0]], [[0, 0, 0], [0, 1, 0]], [[0, 0, 0], [0, 0, 0]]):
        with pytest.raises(UserError, match="as many reveals"):
            evaluate(Saying(0), task_of(tokens, tokens, np.array(reveals, bool)), 2, 1, 2)


@pytest.mark.parametrize("change", [
    lambda part: part[:, ::-1].copy()[:, ::-1], lambda part: part.copy("F"),
    lambda part: part.astype(np.int32), lambda part: part.astype(np.uint8),
    lambda part: part.astype(">i8"), lambda part: part.tolist(), torch.tensor])
def test_a_batch_may_have_arrays_of_any_layout_or_tensors(change):
    """evaluate, and a step of train, see the same numbers."""
    batch = ReplTask(Group("S3")).test_batch(3, 4, 2, generator(0, "test"))
    other = Batch(*map(change, batch))
    model = LinRNN(16, d_model=8, heads=2)
    rows = [evaluate(model, task_of(*one), 4, 2, 3) for one in (batch, other)]
    assert rows[0] == rows[1]
    for one, same in zip(to_tensors(batch, "cpu"), to_tensors(other, "cpu"), strict=True):
        assert torch.equal(one, same) and one.dtype == same.dtype and same.is_contiguous()


def test_a_model_is_asked_without_its_dropout_and_each_part_has_its_mode_again():
    """Also where the question ends in an error."""
    task = ReplTask(Group("S3"))
    model = nn.Sequential(nn.Embedding(16, 16), nn.Dropout(0.9), nn.Dropout(0.9))
    model[2].eval()
    rows = [evaluate(model, task, 4, 2, 30) for _ in range(2)]
    assert rows[0] == rows[1] == evaluate(model.eval(), task, 4, 2, 30)

    model.train()
    model[2].eval()
    model.append(nn.Linear(3, 3))
    with pytest.raises(RuntimeError):
        evaluate(model, task, 4, 2, 30)
    assert [part.training for part in model] == [True, True, False, True]


def test_the_accuracy_along_a_trace_is_shown_at_eight_places_evenly_spread(capsys):
    numbers = dict.fromkeys(["chance", "all", "final", "perfect", "perfect_low", "perfect_high"], 0)
    shares = [place / 32 for place in range(32)]
    print_table([{**numbers, "length": 32, "spacing": 1, "by_position": shares}])
    along = capsys.readouterr().out.splitlines()[-1].split()[2:]
    assert [float(share) for share in along] == [i / 8 for i in range(8)]
    assert evaluation.LENGTHS == [(64, 8), (128, 16), (256, 32)]  # as the paper, and twice as long


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


def test_a_model_that_was_compiled_is_the_same_model(small_run, tmp_path):
    """torch.compile, of all of it or of a block, changes the names of the weights."""
    task, model = load(small_run)
    expected = model.state_dict()
    own = evaluation.make(torch.load(small_run / "model.pt")["config"])[1]
    own.blocks[1] = torch.compile(own.blocks[1], backend="eager")
    for compiled in (own, torch.compile(model, backend="eager")):
        checkpoint = torch.load(small_run / "model.pt")
        torch.save(checkpoint | {"model": compiled.state_dict()}, tmp_path / "model.pt")
        if compiled is own:  # not read yet
            load_weights(compiled, small_run)
            torch.save(checkpoint | {"model": compiled.state_dict()}, tmp_path / "model.pt")
        assert any("_orig_mod" in name for name in torch.load(tmp_path / "model.pt")["model"])
        for found in (load(tmp_path)[1], load_weights(compiled, tmp_path)):
            for weight, other in zip(expected.values(), found.state_dict().values(), strict=True):
                assert torch.equal(weight, other)


@pytest.mark.parametrize("change, words", [
    ({"model": "mine"}, "there is no model mine here"), ({"options": {"colour": 3}}, "no option"),
    ({"options": {"d_model": 9}}, "heads must divide"), ({"options": {"heads": 0}}, "heads"),
    ({"task": "words"}, "a run of words"), ({"task": None}, "does not name its task")])
def test_a_run_that_cannot_be_made_again_is_refused_in_one_line(change, words, small_run, tmp_path,
                                                                refused):
    """As that of a fork with a model of its own. Its weights can still be read."""
    checkpoint = torch.load(small_run / "model.pt")
    torch.save(checkpoint | {"config": checkpoint["config"] | change}, tmp_path / "model.pt")
    refused(main, [tmp_path], words)
    load_weights(LinRNN(16, d_model=8, heads=2, conv_width=6), tmp_path)


def test_the_config_of_an_older_or_another_program_is_refused_by_what_it_lacks(small_run, tmp_path,
                                                                              refused):
    checkpoint = torch.load(small_run / "model.pt")
    for name in ("group", "commands", "model", "options", "seed"):
        less = {key: value for key, value in checkpoint["config"].items() if key != name}
        torch.save(checkpoint | {"config": less}, tmp_path / "model.pt")
        refused(main, [tmp_path], name)


def test_damaged_bytes_are_refused_or_change_nothing(small_run, tmp_path):
    """64 random ones at twenty places: what holds a weight has a checksum, and padding has none."""
    whole = (small_run / "model.pt").read_bytes()
    expected = torch.load(small_run / "model.pt")["model"]
    rng = random.Random(0)
    stopped = 0
    for _ in range(20):
        place = rng.randrange(len(whole) - 64)
        damaged = whole[:place] + rng.randbytes(64) + whole[place + 64:]
        (tmp_path / "model.pt").write_bytes(damaged)
        try:
            _, model = load(tmp_path)
        except UserError:
            stopped += 1
        else:
            assert all(torch.equal(expected[name], x) for name, x in model.state_dict().items())
    assert stopped > 10


class Payload:
    def __reduce__(self):
        return (exec, ("import builtins; builtins.payload_ran = True",))


def test_reading_a_run_runs_no_code(tmp_path):
    torch.save({"config": {}, "model": Payload()}, tmp_path / "model.pt")
    with pytest.raises(UserError, match="damaged or foreign"):
        load(tmp_path)
    assert "payload_ran" not in dir(builtins)


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
