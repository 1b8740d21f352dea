"""The table and the certificate measure what they say: on an oracle that knows Python, and less."""

import io
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import session
from data import TASKS, Batch, Group, ReplTask, UserError, WordTask, generator
from eval import (evaluate, evaluate_and_print, exhaustive, interact, load_run, load_weights,
                  log_probabilities, main, plot, print_certificate, wilson)
from matplotlib.figure import Figure
from models import MODELS, LinRNN, build
from torch import nn


class Interpreter(nn.Module):
    """Not a network: executes the text it is given, and answers with the variable asked for.
    ignores(variables, line, count): True for a command, the count-th line, not to be executed."""

    def __init__(self, task, ignores=lambda variables, line, count: False):
        super().__init__()
        self.task, self.ignores = task, ignores

    def stream(self, tokens, state=None):
        logits = torch.zeros(*tokens.shape, len(self.task.vocab))
        for row, ids in enumerate(tokens.tolist()):
            variables, count, line = {}, 0, ""
            for t, token in enumerate(ids):
                line += self.task.vocab[token]
                if line.endswith("\n"):
                    if line.startswith(">>> ") and "print" not in line:
                        count += 1
                        if not self.ignores(variables, line[4:-1], count):
                            exec(line[4:], {}, variables)
                    line = ""
                elif line.endswith(" ") and not line.startswith(">>>"):
                    logits[row, t, self.task.encode(str(variables[line[0]]))[0]] = 1
        return logits, None


# --- The table ------------------------------------------------------------------------------------

def test_a_model_that_stops_tracking_is_right_up_to_there_and_at_chance_beyond(capsys):
    """It executes four commands only: two reveals are right, and two are guessed. `perfect` and its
    interval are of traces, all others of reveals."""
    task = ReplTask(Group("S4"))
    broken = Interpreter(task, lambda variables, line, count: count > 4 + 4)
    row, = evaluate_and_print(broken, task, [(8, 2)], traces=300, seed=3)

    # The same arguments give the same numbers, another seed gives others.
    assert row == evaluate(broken, task, 8, 2, 300, 3) != evaluate(broken, task, 8, 2, 300, 4)

    assert row["chance"] == 0.25 and row["reveals"] == 1200 and "bayes" not in row
    assert row["by_position"] == pytest.approx([1, 1, 0.25, 0.25], abs=0.05)
    assert row["all"] == pytest.approx(np.mean(row["by_position"]))
    assert row["final"] == row["by_position"][-1]
    assert row["perfect"] == pytest.approx(1 / 16, abs=0.03)
    assert (row["perfect_low"], row["perfect_high"]) == wilson(300 * row["perfect"], 300)

    shown, along = capsys.readouterr().out.splitlines()[-2:]
    cells = [f"{row[name]:.4f}" for name in ("chance", "all", "final", "perfect")]
    assert shown.split()[:-1] == ["(8,2)", *cells]
    assert along.split() == ["along", "it", *[f"{share:.4f}" for share in row["by_position"]]]


def test_the_interval_is_that_of_wilson_as_published():
    assert np.allclose([wilson(0, 10), wilson(5, 10), wilson(10, 10)],
                       [(0, 0.2775), (0.2366, 0.7634), (0.7225, 1)], atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_those_of_the_whole_trace_at_the_marked_places(name, monkeypatch):
    """Pieces of 7 tokens, other places in each trace: rows in the order of traces and of time."""
    monkeypatch.setattr("eval.TOKENS_AT_ONCE", 21)
    model, rng = build(name, 22).double(), np.random.default_rng(0)
    tokens = rng.integers(22, size=(3, 50))
    marks = rng.permuted(np.tile(np.arange(50) < 4, (3, 1)), axis=1)
    whole = model(torch.from_numpy(tokens)).detach().log_softmax(-1).numpy()
    ours = log_probabilities(model, tokens, marks)
    assert ours.shape == (3, 4, 22) and ours.dtype == np.float64
    assert np.abs(ours.reshape(12, 22) - whole[marks]).max() < 1e-10


def test_where_the_best_prediction_is_known_the_distance_to_it_is_measured():
    """bayes, kl and excess against plain loops; a probability of 0 adds nothing to kl. The traces
    are those of the generator for tests, of this seed, length and spacing."""
    best = np.array([[[0.5, 0.5, 0.0], [0.2, 0.1, 0.7]], [[1.0, 0.0, 0.0], [0.0, 0.9, 0.1]]])
    answers, q = np.array([[1, 2], [0, 1]]), [0.1, 0.6, 0.3]
    batch = Batch(np.zeros((2, 2), int), answers, np.ones((2, 2), bool), best)
    logits = torch.tensor(q, dtype=torch.float64).log().expand(2, 2, 3)

    drawn = []
    task = SimpleNamespace(chance=1 / 3, test_batch=lambda *x: drawn.extend(x) or batch)
    model = SimpleNamespace(stream=lambda *_: (logits, None), parameters=lambda: iter(()))
    row = evaluate(model, task, 2, 1, 2, seed=5)
    assert drawn[:3] == [2, 2, 1] and drawn[3].random() == generator(5, "test", 2, 1).random()

    kl, excess = np.zeros((2, 2)), np.zeros((2, 2))
    for at in np.ndindex(2, 2):
        kl[at] = sum(p * math.log(p / r) for p, r in zip(best[at], q) if p > 0)
        excess[at] = math.log(best[at][answers[at]] / q[answers[at]])
    assert np.allclose([row["bayes"], row["kl"], row["excess"], *row["kl_by_position"]],
                       [3.1 / 4, kl.mean(), excess.mean(), *kl.mean(0)], rtol=0, atol=1e-12)


# --- The certificate, the session, the figure -----------------------------------------------------

def test_the_certificate_is_complete_or_finds_the_one_broken_transition(capsys):
    """A model ignores one command in one state. That pair is named, with Python's values."""
    task = ReplTask(Group("S4"), "swap")
    assert exhaustive(Interpreter(task), task) == (24 * 6, [])

    task = ReplTask(Group("S3"))
    one = (2, 3, 1, "a, b, c = b, a, c")
    broken = Interpreter(task, lambda variables, line, _: (*variables.values(), line) == one)
    print_certificate(task, *exhaustive(broken, task))
    shown = capsys.readouterr().out
    assert "35 of 36" in shown and "state [2 3 1], command [2 1 3]: not [3 2 1] but '231'" in shown


def test_a_session_answers_beside_python_and_helps_with_the_rest(capsys, monkeypatch):
    """Beside the answer stand Python's value and the commands so far. The probability is that of
    the session, without what was refused, read at once."""
    task = ReplTask(Group("S3"), "swap")
    model = build("linrnn", len(task.vocab))
    typed = ["import os", "a, c = c, a", "a, b, c = c, a, b", "print('c', c)"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed)))
    interact(model, task)

    shown = capsys.readouterr().out
    read = session(["a = 1", "b = 2", "c = 3", "a, c = c, a", "print('c', c)"])
    tokens = torch.tensor([task.encode(read.removesuffix("1\n"))])
    p, token = model(tokens)[0, -1].softmax(-1).max(-1)
    answer = f"c {task.vocab[token]}    (probability {p:.1%}; Python: 1; 1 commands so far)"
    assert answer in shown and shown.count("type a command such as ") == 2


def test_the_figure_shows_each_reveal_at_the_commands_read_before_it(monkeypatch):
    """A dotted line stands at the longest training trace, and another line at chance."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: figures.append(figure))
    row = {"length": 8, "spacing": 2, "chance": 0.2, "by_position": [1, 0.9, 0.8, 0.7]}
    plot([row], {"curriculum": [[2, 1], [16, 2], [4, 2]], "model": "lstm", "group": "S5"}, "x.png")
    axes, = figures[0].axes
    curve, chance, trained = [line.get_xydata().tolist() for line in axes.lines]
    assert curve == [[2, 1], [4, 0.9], [6, 0.8], [8, 0.7]]
    assert {y for _, y in chance} == {0.2} and {x for x, _ in trained} == {16}


# --- Reading a run --------------------------------------------------------------------------------

def test_a_run_is_read_back_by_its_names_or_into_a_model_of_ones_own(small_run):
    checkpoint, task, model = load_run(small_run)
    assert not model.training and checkpoint["config"]["group"] == task.group.name == "S3"
    assert checkpoint["progress"]["step"] == 6 and checkpoint["progress"]["finished"]

    options = checkpoint["config"]["options"]
    own = LinRNN(len(task.vocab), **options)
    assert load_weights(own, small_run) is own and not own.training
    for one, other in zip(model.parameters(), own.parameters(), strict=True):
        assert torch.equal(one, other)
    for wrong in ({"d_model": 12}, {"layers": 2}):  # other shapes, and blocks that are not there
        with pytest.raises(UserError, match="weights of another model"):
            load_weights(LinRNN(len(task.vocab), **options | wrong), small_run)


def test_the_command_line_prints_table_certificate_and_json(small_run, capsys, monkeypatch):
    """The numbers are those of evaluate(), and depend on --seed."""
    checkpoint, task, _ = load_run(small_run)
    model = Interpreter(task, lambda variables, line, count: count > 3 + 3)
    monkeypatch.setattr("eval.load_run", lambda *_: (checkpoint, task, model))
    main([str(small_run), *"--lengths 8:4 --traces 20 --device cpu --seed 5 --json "
          "--exhaustive".split()])

    shown = capsys.readouterr().out
    row, other = [evaluate(model, task, 8, 4, 20, seed) for seed in (5, 0)]
    assert row != other
    assert json.loads(shown.splitlines()[-1]) == {
        "config": checkpoint["config"], "results": [row],
        "exhaustive": {"pairs": 36, "right": 36}}
    assert "(8,4)" in shown and "36 of 36" in shown


def test_what_cannot_be_evaluated_is_refused_in_one_line(small_run, refused, monkeypatch):
    monkeypatch.delitem(TASKS, "repl")
    refused(main, [small_run], "'repl' is not known here", "--plugin")
    monkeypatch.setattr("eval.load_run", lambda *_: ({}, WordTask(Group("S3")), None))
    for option in ("--exhaustive", "--interactive"):
        refused(main, [small_run, option], "for traces, not for words")
