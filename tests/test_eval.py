"""The table and the certificate measure what they say: on an oracle that knows Python, and less."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data import Batch, Group, ReplTask, generator
from eval import evaluate, exhaustive, log_probabilities, main, wilson
from models import MODELS, build


class Interpreter:
    """Not a network: executes the text it is given, and answers with the variable asked for.
    ignores(variables, line, count): True for a command, the count-th line, not to be executed."""

    def __init__(self, task, ignores=lambda variables, line, count: False):
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


def test_a_model_that_stops_tracking_is_right_up_to_there_and_at_chance_beyond():
    """A perfect model scores perfectly. One that executes four commands only is right at two
    reveals, at chance at the other two, never at all four. The same arguments, the same numbers."""
    task = ReplTask(Group("S4"))
    row = evaluate(Interpreter(task), task, 8, 2, traces=20)
    assert row["all"] == row["final"] == row["perfect"] == 1 and row["by_position"] == [1] * 4
    assert row["chance"] == 0.25 and row["reveals"] == 80 and "bayes" not in row
    broken = Interpreter(task, lambda variables, line, count: count > 4 + 4)
    row, again, other = (evaluate(broken, task, 8, 2, 300, seed) for seed in (0, 0, 1))
    first, second, third, last = row["by_position"]
    assert first == second == 1 and abs(third - 0.25) < 0.1 and abs(last - 0.25) < 0.1
    assert row["final"] == last and row["perfect"] < 0.2
    assert abs(row["all"] - np.mean(row["by_position"])) < 1e-12 and row == again != other


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
    row = evaluate(SimpleNamespace(stream=lambda *_: (logits, None)), task, 2, 1, 2, seed=5)
    assert drawn[:3] == [2, 2, 1] and drawn[3].random() == generator(5, "test", 2, 1).random()
    kl = [[sum(p * math.log(p / r) for p, r in zip(ps, q) if p > 0) for ps in trace]
          for trace in best]
    excess = [math.log(best[at][answers[at]] / q[answers[at]]) for at in np.ndindex(2, 2)]
    assert np.allclose([row["bayes"], row["kl"], row["excess"], *row["kl_by_position"]],
                       [3.1 / 4, np.mean(kl), np.mean(excess), *np.mean(kl, 0)], rtol=0, atol=1e-12)


def test_the_interval_is_that_of_wilson_as_published():
    assert np.allclose([wilson(0, 10), wilson(5, 10), wilson(10, 10)],
                       [(0, 0.2775), (0.2366, 0.7634), (0.7225, 1)], atol=1e-4)


@pytest.mark.parametrize("name, commands, pairs, longest", [
    ("S3", "full", 36, 1), ("D4", "full", 64, 1), ("S4", "swap", 24 * 6, 3)])
def test_the_certificate_of_a_perfect_model_is_complete(name, commands, pairs, longest):
    """States are reached in the fewest commands: a permutation with c cycles by n - c swaps."""
    task = ReplTask(Group(name), commands)
    assert exhaustive(Interpreter(task), task) == (pairs, [])
    assert max(map(len, task.group.shortest_words(task.alphabet).values())) == longest


def test_the_certificate_finds_the_one_broken_transition():
    """A model that ignores one command in one state: one pair fails, and it is named."""
    task = ReplTask(Group("S3"))
    one = (2, 3, 1, "a, b, c = b, a, c")
    broken = Interpreter(task, lambda variables, line, _: (*variables.values(), line) == one)
    pairs, failures = exhaustive(broken, task)
    (state, command, expected, answers), = failures
    assert pairs == 36 and state.tolist() == [2, 3, 1] and command.tolist() == [2, 1, 3]
    assert expected.tolist() == [3, 2, 1] and task.decode(answers) == "231"


def test_the_command_line_prints_table_figure_json_certificate_and_record(
        small_run, tmp_path, capsys):
    figure, record = tmp_path / "figure.png", tmp_path / "record.jsonl"
    main([str(small_run), "--lengths", "4:2,8:4", "--traces", "8", "--device", "cpu", "--plot",
          str(figure), "--json", "--exhaustive", "--record", str(record)])
    shown = capsys.readouterr().out
    numbers, line = json.loads(shown.splitlines()[-1]), json.loads(record.read_text())
    assert [row["length"] for row in numbers["results"]] == [4, 8] and "(8,4)" in shown
    assert numbers["exhaustive"]["pairs"] == 36 and "of 36 (state, command) pairs right" in shown
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert line["results"] == numbers["results"] and line["torch"] == torch.__version__
    assert line["command"].startswith("python eval.py ") and line["seed"] == 0


def test_bad_input_gets_one_line_and_exit_code_2(small_run, tmp_path, refused):
    for words, *expected in [
            ([tmp_path / "nothing"], "model.pt", "missing"),
            ([small_run, "--lengths", "10:4"], "multiple of the spacing"),
            ([small_run, "--traces", "0"], "--traces"), ([small_run, "--seed", "-1"], "--seed"),
            ([small_run, "--device", "tpu"], "tpu is not there"),
            ([small_run, "--plot", tmp_path / "figure.xyz"], "xyz"),
            ([small_run, "--plot", small_run / "model.pt" / "figure.png"], "model.pt"),
            ([small_run, "--record", tmp_path], str(tmp_path))]:
        refused(main, words, *expected)
