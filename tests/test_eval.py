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
                  log_probabilities, main, plot, print_certificate, score, wilson)
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

def test_a_model_that_stops_tracking_is_right_up_to_there_and_at_chance_beyond():
    """Executing four commands only, it is right at two reveals and at chance at the other two. The
    same arguments, the same numbers."""
    task = ReplTask(Group("S4"))
    broken = Interpreter(task, lambda variables, line, count: count > 4 + 4)
    row, again, other = (evaluate(broken, task, 8, 2, 300, seed) for seed in (0, 0, 1))
    assert (row["length"], row["spacing"], row["traces"], row["reveals"]) == (8, 2, 300, 1200)
    first, second, third, last = row["by_position"]
    assert first == second == 1 and abs(third - 0.25) < 0.1 and abs(last - 0.25) < 0.1
    assert row["chance"] == 0.25 and "bayes" not in row and row == again != other


@pytest.mark.parametrize("seed", range(4))
def test_a_row_counts_reveals_last_reveals_and_whole_traces(seed):
    """By plain counting: `perfect` and its interval are of traces, all others of reveals."""
    rng = np.random.default_rng(seed)
    traces, reveals = rng.integers(1, 30), rng.integers(1, 6)
    right = rng.random((traces, reveals)) < 0.7
    row = json.loads(json.dumps(score(right)))
    whole = sum(all(trace) for trace in right)
    assert row["reveals"] == traces * reveals and row["perfect"] == whole / traces
    assert np.allclose([row["all"], row["final"]], [right.sum() / right.size, right[:, -1].mean()])
    assert np.allclose(row["by_position"], [sum(right[:, i]) / traces for i in range(reveals)])
    assert (row["perfect_low"], row["perfect_high"]) == wilson(whole, traces)


def test_the_interval_is_that_of_wilson_as_published():
    assert np.allclose([wilson(0, 10), wilson(5, 10), wilson(10, 10)],
                       [(0, 0.2775), (0.2366, 0.7634), (0.7225, 1)], atol=1e-4)


def test_the_printed_table_has_the_numbers_of_the_rows(capsys):
    """Each row of both lengths, to four places; the interval from its lower end to its upper."""
    task = ReplTask(Group("S3"))
    model = Interpreter(task, lambda variables, line, count: count > 3 + 5)
    rows = evaluate_and_print(model, task, [(4, 2), (32, 2)], traces=12, seed=3)
    _, heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split()[:5] == "(L,S) chance all final perfect".split()
    assert rows == [evaluate(model, task, *stage, 12, 3) for stage in [(4, 2), (32, 2)]]
    for row, shown, along in zip(rows, lines[::2], lines[1::2], strict=True):
        cells = [f"{row[name]:.4f}" for name in ("chance", "all", "final", "perfect")]
        interval = f"{row['perfect_low']:.4f}-{row['perfect_high']:.4f}"
        assert shown.split() == [f"({row['length']},{row['spacing']})", *cells, interval]
        positions = row["by_position"][::max(1, len(row["by_position"]) // 8)]
        assert along.split() == ["along", "it", *[f"{share:.4f}" for share in positions]]
    assert rows[1]["perfect_low"] < rows[1]["perfect_high"] < 1


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_those_of_the_whole_trace_at_the_marked_places(name, monkeypatch):
    """Pieces of 7 tokens, other places in each trace: rows in the order of traces and of time."""
    monkeypatch.setattr("eval.TOKENS_AT_ONCE", 21)
    model, rng = build(name, 22).double(), np.random.default_rng(0)
    tokens, marks = rng.integers(22, size=(3, 50)), np.zeros((3, 50), bool)
    for row in marks:
        row[rng.permutation(50)[:4]] = True
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
    kl = [[sum(p * math.log(p / r) for p, r in zip(ps, q) if p > 0) for ps in trace]
          for trace in best]
    excess = [math.log(best[at][answers[at]] / q[answers[at]]) for at in np.ndindex(2, 2)]
    assert np.allclose([row["bayes"], row["kl"], row["excess"], *row["kl_by_position"]],
                       [3.1 / 4, np.mean(kl), np.mean(excess), *np.mean(kl, 0)], rtol=0, atol=1e-12)


# --- The certificate, the session, the figure -----------------------------------------------------

@pytest.mark.parametrize("name, commands, pairs", [
    ("S3", "full", 36), ("D4", "full", 64), ("S4", "swap", 24 * 6)])
def test_the_certificate_of_a_perfect_model_is_complete(name, commands, pairs):
    task = ReplTask(Group(name), commands)
    assert exhaustive(Interpreter(task), task) == (pairs, [])


def test_the_certificate_finds_the_one_broken_transition(capsys):
    """A model that ignores one command in one state: one pair fails, and it is named, its values as
    Python prints them."""
    task = ReplTask(Group("S3"))
    one = (2, 3, 1, "a, b, c = b, a, c")
    broken = Interpreter(task, lambda variables, line, _: (*variables.values(), line) == one)
    print_certificate(task, *exhaustive(broken, task))
    shown = capsys.readouterr().out
    assert "35 of 36" in shown and "state [2 3 1], command [2 1 3]: not [3 2 1] but '231'" in shown


TYPED = {  # and whether it is a line of a trace
    "full": {"print('b', b)": True, "a, b, c = c, a, b": True, "a, c, b = a, b, c": False,
             "import os": False, "a, b, c = b, a, c": True, "print('b', a)": False,
             "print('a', a)": True},
    "swap": {"a, c = c, a": True, "b, a = a, b": False, "print('c', c)": True,
             "a, b, c = c, a, b": False}}


@pytest.mark.parametrize("commands", TYPED)
def test_a_session_answers_beside_python_and_helps_with_the_rest(commands, capsys, monkeypatch):
    """Beside each answer stand the value of a real interpreter and the commands so far. The
    probability is that of the session, without what was refused, read at once."""
    task = ReplTask(Group("S3"), commands)
    model = build("linrnn", len(task.vocab))
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(TYPED[commands])))
    interact(model, task)
    shown = capsys.readouterr().out
    lines, count = ["a = 1", "b = 2", "c = 3"], 0
    for line in [line for line, legal in TYPED[commands].items() if legal]:
        lines.append(line)
        if "print" not in line:
            count += 1
            continue
        *read, value, _ = session(lines)
        p, token = model(torch.tensor([task.encode("".join(read))]))[0, -1].softmax(-1).max(-1)
        assert (f"{line[7]} {task.vocab[token]}    (probability {p:.1%}; Python: {value}; {count} "
                "commands" in shown)
    assert shown.count("type a command such as ") == [*TYPED[commands].values()].count(False)


def test_the_figure_shows_each_reveal_at_the_commands_read_before_it(tmp_path, monkeypatch):
    """With spacing S the first reveal comes after S commands. The dotted line stands at the longest
    training trace, the other one at chance."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: figures.append(figure))
    rows = [{"length": 8, "spacing": 2, "chance": 0.2, "by_position": [1, 0.9, 0.8, 0.7]},
            {"length": 6, "spacing": 3, "chance": 0.2, "by_position": [1, 0.5]}]
    plot(rows, {"curriculum": [[2, 1], [16, 2], [4, 2]], "model": "lstm", "group": "S5"}, "x.png")
    axes, = figures[0].axes
    one, other, chance, trained = [line.get_xydata().tolist() for line in axes.lines]
    assert one == [[2, 1], [4, 0.9], [6, 0.8], [8, 0.7]] and other == [[3, 1], [6, 0.5]]
    assert {y for _, y in chance} == {0.2} and {x for x, _ in trained} == {16}
    assert "lstm on S5" in axes.get_title()


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


def test_the_command_line_prints_table_figure_json_and_certificate(
        small_run, tmp_path, capsys, monkeypatch):
    """The numbers are those of evaluate(), and depend on --seed."""
    checkpoint, task, _ = load_run(small_run)
    model = Interpreter(task, lambda variables, line, count: count > 3 + 3)
    monkeypatch.setattr("eval.load_run", lambda *_: (checkpoint, task, model))
    figure = tmp_path / "figure.png"
    main([str(small_run), "--lengths", "4:2,8:4", "--traces", "20", "--device", "cpu", "--plot",
          str(figure), "--json", "--exhaustive", "--seed", "5"])
    shown = capsys.readouterr().out
    numbers = json.loads(shown.splitlines()[-1])
    assert numbers["config"] == checkpoint["config"]
    assert "(8,4)" in shown and figure.read_bytes()[:4] == b"\x89PNG"
    assert numbers["exhaustive"] == {"pairs": 36, "right": 36} and "36 of 36" in shown

    of_seed = {}
    for seed in (0, 5):
        of_seed[seed] = [evaluate(model, task, *stage, 20, seed) for stage in [(4, 2), (8, 4)]]
    assert numbers["results"] == of_seed[5] != of_seed[0]


def test_bad_input_gets_one_line_and_exit_code_2(small_run, tmp_path, refused, monkeypatch):
    for words, *expected in [
            ([tmp_path / "nothing"], "model.pt", "missing"),
            ([small_run, "--lengths", "10:4"], "multiple of the spacing"),
            ([small_run, "--lengths", "10"], "expected LENGTH:SPACING"),
            ([small_run, "--traces", "0"], "--traces"),
            ([small_run, "--lengths", "500000:1"], "too many"),
            ([small_run, "--device", "tpu"], "tpu is not there"),
            ([small_run, "--plot", tmp_path / "figure.xyz"], "xyz"),
            ([small_run, "--plot", small_run / "model.pt" / "figure.png"], "model.pt"),
            ([small_run, "--plugin", tmp_path / "nothing.py"], "nothing.py is not there")]:
        refused(main, words, *expected)
    monkeypatch.delitem(TASKS, "repl")
    refused(main, [small_run], "'repl' is not known here", "--plugin")
    monkeypatch.setattr("eval.load_run", lambda *_: ({}, WordTask(Group("S3")), None))
    for option in ("--exhaustive", "--interactive"):
        refused(main, [small_run, option], "for traces, not for words")
