"""Uncertain programs and beliefs. Oracles: the interpreter, and the enumeration of all coins."""

import itertools
import json
import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, session, typed_lines

from data import Group, ReplTask, draw_commands, generator
from eval import evaluate, log_probabilities
from experiments.beliefs import COINS, SCHEDULES, CoinTask, Program, main
from models import build

CASES = [("S3", "swap"), ("S3", "full"), ("S4", "swap"), ("D4", "full"), ("S2", "full")]


# --- The traces -----------------------------------------------------------------------------------

@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("name, commands", [*CASES, ("S5", "full"), ("A4xZ5", "full")])
def test_a_real_interpreter_shows_an_uncertain_trace_if_its_coins_fall_as_recorded(
        name, commands, share, monkeypatch):
    """The lines of a trace, typed into Python, give the trace to the letter, `... ` and all."""
    task, rng = CoinTask(Group(name), commands, share), np.random.default_rng(1)
    for schedule in SCHEDULES if "S" in name else SCHEDULES[:2]:
        program = task.draw(4, 12, 3, rng, schedule)
        tokens, reveals = task.write_program(program)
        assert (tokens[reveals] == task.value_tokens[task.program_answers(program)].ravel()).all()
        for row, probability, executed in zip(tokens, program.probability, program.executed):
            text = task.decode(row)
            assert task.encode(text) == row.tolist()
            # random() < p: the largest number that is still below p, or p itself
            falls = iter([np.nextafter(p, 0) if fell else p
                          for p, fell in zip(probability, executed) if p < 1])
            monkeypatch.setattr(random, "random", lambda: next(falls))
            assert session(typed_lines(text)) == text
            assert next(falls, None) is None  # all coins were used


@pytest.mark.parametrize("commands", ["full", "swap"])
def test_without_uncertain_commands_the_traces_are_those_of_the_plain_task(commands):
    """P = 0 draws the commands, then the variables, and nothing else. The new symbols come last."""
    task, plain = CoinTask(Group("S4"), commands, 0.0), ReplTask(Group("S4"), commands)
    ours, theirs = (x.sample(5, 12, 3, np.random.default_rng(3)) for x in (task, plain))
    for x, y in zip(ours, theirs):
        assert (x[:, 3:] == y).all() and x.shape[1] == y.shape[1] + 3
    assert task.decode(ours[0][0, :3]) == ">>> from random import random\n"
    assert task.vocab[:len(plain.vocab)] == plain.vocab and len(task.vocab) == 7 + 3 * 4 + 3 + 3


def test_the_random_choices_are_drawn_in_the_order_of_the_recorded_runs():
    """Commands, variables, the number of coins, their places, their numbers, how they fall."""
    task, rng = CoinTask(Group("S4"), "swap", 0.3), np.random.default_rng(3)
    commands = draw_commands(task.group, "swap", (5, 12), rng)
    asked = rng.integers(4, size=(5, 4))
    coins = int(0.3 * 12 + rng.random())
    places = rng.random((5, 12)).argsort(1) < coins
    probability = np.where(places, rng.choice(COINS, (5, 12)), 1)
    expected = Program(commands, asked, probability, rng.random((5, 12)) < probability)
    for ours, theirs in zip(task.draw(5, 12, 3, np.random.default_rng(3)), expected):
        assert (ours == theirs).all()


def test_the_share_of_uncertain_commands_is_p_and_each_coin_falls_as_its_number_says():
    """In every trace where P L is whole, in the mean where it is not; each number equally often,
    each position equally often; executed with the probability shown."""
    task = CoinTask(Group("S3"), "swap", 0.25)
    program = task.draw(4000, 16, 4, np.random.default_rng(4))
    assert ((program.probability < 1).sum(1) == 4).all()
    assert np.abs((program.probability < 1).mean(0) - 0.25).max() < 6 * (0.25 * 0.75 / 4000)**0.5
    for coin in COINS:
        fell = program.executed[program.probability == coin]
        assert abs(len(fell) - 16000 / 3) < 6 * 16000**0.5 / 2
        assert abs(fell.mean() - coin) < 6 * (coin * (1 - coin) / len(fell))**0.5
    assert program.executed[program.probability == 1].all()
    counts = [(task.draw(1, 2, 1, generator(0, "valid", i)).probability < 1).sum()
              for i in range(400)]
    assert set(counts) == {0, 1} and abs(np.mean(counts) - 0.5) < 6 * 0.5 / 20


def test_schedules_reveal_the_variables_that_they_name():
    """Periodic: a, b, c, a, ... Adversarial: one variable of the swap that never happens."""
    task, rng = CoinTask(Group("S3"), "full", 0.5), np.random.default_rng(18)
    assert task.draw(2, 10, 2, rng, "periodic").asked.tolist() == [[0, 1, 2, 0, 1]] * 2
    program = task.draw(50, 12, 3, rng, "adversarial")
    assert (program.asked == program.asked[:, :1]).all() and len(np.unique(program.asked)) > 1
    assert (program.probability[:, :3] == 1).all() and (program.probability[:, 3:] == 0.5).all()
    assert program.executed[:, :3].all() and not program.executed[:, 3:].any()
    cycle = program.commands[:, 3:]
    assert (cycle == cycle[:, :1]).all() and ((cycle != np.arange(3)).sum(-1) == 2).all()
    assert (np.take_along_axis(cycle[:, 0], program.asked[:, :1], 1) != program.asked[:, :1]).all()


def test_a_batch_carries_what_the_filter_predicts_and_a_test_what_it_was_told_to_draw():
    """best: the filter at the values, 0 elsewhere. Training knows no schedule, no other share."""
    task = CoinTask(Group("S3"), "swap", 0.5)
    task.schedule, task.share = "periodic", 0.75
    for make, more in [(task.training_batch, []), (task.test_batch, ["periodic", 0.75])]:
        batch = make(7, 8, 2, np.random.default_rng(5))
        program = task.draw(7, 8, 2, np.random.default_rng(5), *more)
        tokens, reveals = task.write_program(program)
        assert (batch.inputs == tokens[:, :-1]).all() and (batch.targets == tokens[:, 1:]).all()
        assert (batch.reveals == reveals[:, 1:]).all()
        assert batch.best.shape == (7, 4, len(task.vocab))
        assert (batch.best[..., task.value_tokens] == task.best_predictions(program)).all()
        assert np.abs(batch.best.sum(-1) - 1).max() < 1e-12


# --- The filter -----------------------------------------------------------------------------------

def by_enumeration(task, program):
    """Every way that the coins can fall, executed on plain lists, weighted, and kept while it fits.

    -> the prediction at each reveal [B, L/S, n] and the probability of all reveals [B].
    """
    (batch, length), count = program.probability.shape, program.asked.shape[1]
    predicted, evidence = np.zeros((batch, count, task.group.degree)), np.zeros(batch)
    answers = task.program_answers(program)
    for b in range(batch):
        uncertain = np.flatnonzero(program.probability[b] < 1)
        for fall in itertools.product([True, False], repeat=len(uncertain)):
            fell, weight = dict(zip(uncertain, fall)), 1.0
            for t, fallen in fell.items():
                weight *= program.probability[b, t] if fallen else 1 - program.probability[b, t]
            state = list(range(task.group.degree))
            for t in range(length):
                if fell.get(t, True):
                    state = [state[i] for i in program.commands[b, t]]
                if (t + 1) % (length // count) == 0:
                    r = t // (length // count)
                    value = state[program.asked[b, r]]
                    predicted[b, r, value] += weight
                    if value != answers[b, r]:
                        break
            else:
                evidence[b] += weight
    return predicted / predicted.sum(-1, keepdims=True), evidence


@pytest.mark.parametrize("name, commands", CASES)
def test_the_filter_is_the_enumeration_of_all_coins(name, commands):
    """Predictions at every reveal and the probability of all of them, to 1e-12."""
    task = CoinTask(Group(name), commands, 0.75)
    for schedule in SCHEDULES if name != "D4" else SCHEDULES[:2]:
        program = task.draw(6, 8, 2, np.random.default_rng(5), schedule)
        predicted, evidence = by_enumeration(task, program)
        assert np.abs(task.best_predictions(program) - predicted).max() < 1e-12
        _, log_evidence = task.automaton.filter(task.symbols(program))
        assert np.abs(np.exp(log_evidence.sum(1)) / evidence - 1).max() < 1e-12


def test_a_deterministic_automaton_always_knows_its_state():
    """Certain commands: the belief is the one true state, and every reveal has evidence 1."""
    task = CoinTask(Group("S4"), "full", 0.5)
    certain = task.draw(9, 12, 3, np.random.default_rng(8), share=0)
    _, log_evidence = task.automaton.filter(task.symbols(certain))
    best = task.best_predictions(certain)
    assert (log_evidence == 0).all() and (best.max(-1) == 1).all()
    assert (best.argmax(-1) == task.answers(certain.commands, certain.asked)).all()


def test_the_best_guess_is_right_as_often_as_the_filter_expects():
    """The Bayes accuracy, mean of max p, is what answering argmax p reaches; nothing passes it."""
    task = CoinTask(Group("S3"), "full", 0.5)
    program = task.draw(2000, 16, 2, np.random.default_rng(9))
    best, answers = task.best_predictions(program), task.program_answers(program)
    assert abs((best.argmax(-1) == answers).mean() - best.max(-1).mean()) < 6 * 0.5 / 16000**0.5


def test_the_example_of_appendix_b1_swaps_values_and_python_swaps_variables():
    """`a, b = b, a` with probability 1/2 on the six states, in Python and as the table says.

    Exchanging the VALUES 1 and 2 instead, as the matrix of the paper's appendix B.1 does, agrees in
    the first state only where a and b hold them, and is another matrix.
    """
    task = CoinTask(Group("S3"), "swap", 1.0)
    states = [tuple(state) for state in (task.group.elements + 1).tolist()]
    variables, values = np.zeros((6, 6)), np.zeros((6, 6))
    for old, (a, b, c) in enumerate(states):
        variables[old, old] = values[old, old] = 0.5
        renamed = tuple({1: 2, 2: 1}.get(value, value) for value in (a, b, c))
        values[states.index(renamed), old] += 0.5
        a, b = b, a
        variables[states.index((a, b, c)), old] += 0.5
    symbol = task.symbols(Program(np.array([[[1, 0, 2]]]), np.array([[0]]), np.array([[0.5]]),
                                  np.array([[False]])))[0, 0]
    assert (task.automaton.delta[symbol] == variables).all()
    # columns of (1, 2, 3) and (2, 1, 3) agree; in the other four states 1 and 2 are not in a and b
    assert (variables == values).all(0).tolist() == [True, False, True, False, False, False]


# --- Models against the filter --------------------------------------------------------------------

class Reader:
    """Not a network: keeps every state that the text allows, with its probability, line by line.

    Knows Python and Bayes, and nothing of the task but the symbols of its text.
    """

    def __init__(self, task):
        self.task = task

    def stream(self, tokens, state=None):
        logits = torch.full((*tokens.shape, len(self.task.vocab)), -1e9, dtype=torch.float64)
        state = [({(): 1.0}, "")] * len(tokens) if state is None else state
        after = []
        for row, ids, (weights, line) in zip(logits, tokens.tolist(), state):
            for t, token in enumerate(ids):
                line += self.task.vocab[token]
                if line.endswith("\n"):
                    weights, line = self.read(weights, line), ""
                elif line.endswith(" ") and line[0] not in ">.":
                    for variables, weight in weights.items():
                        answer = self.task.encode(str(dict(variables)[line[0]]))[0]
                        row[t, answer] = torch.logaddexp(
                            row[t, answer], torch.tensor(math.log(weight), dtype=torch.float64))
            after.append((weights, line))
        return logits, after

    @staticmethod
    def read(weights, line):
        if line.startswith("...") or "print" in line or "import" in line:
            return weights
        if not line.startswith(">>> "):
            name, value = line.split()
            kept = {s: w for s, w in weights.items() if dict(s)[name] == int(value)}
            return {state: weight / sum(kept.values()) for state, weight in kept.items()}
        coin, _, command = line[4:].rpartition(": ")
        p = float(coin.removeprefix("if random() < ")) if coin else 1.0
        after = {}
        for state, weight in weights.items():
            variables = dict(state)
            exec(command, {}, variables)
            for outcome, probability in ((tuple(variables.items()), p), (state, 1 - p)):
                if probability:
                    after[outcome] = after.get(outcome, 0) + weight * probability
        return after


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("commands", ["full", "swap"])
def test_a_reader_who_knows_bayes_has_no_divergence_from_the_filter(
        commands, schedule, monkeypatch):
    """KL and excess loss 0, read from the tokens alone; and its accuracy is near the best."""
    monkeypatch.setattr("eval.TOKENS_AT_ONCE", 40 * 37)  # pieces of 37 tokens
    task = CoinTask(Group("S3"), commands, 0.5)
    task.schedule = schedule
    row = evaluate(Reader(task), task, 8, 2, traces=40)
    assert abs(row["kl"]) < 1e-10 and abs(row["excess"]) < 1e-10
    assert abs(row["all"] - row["bayes"]) < 0.2 and row["reveals"] == 160
    assert len(row["by_position"]) == len(row["kl_by_position"]) == 4


def test_a_model_that_knows_nothing_loses_what_the_filter_knows():
    """Uniform over the vocabulary: KL = log |vocabulary| - entropy of the filter; the loss over the
    values that came up differs from it by chance only."""
    task = CoinTask(Group("S3"), "swap", 0.5)
    model = build("lstm", len(task.vocab), d_model=8)
    model.head.weight.data.zero_()
    row = evaluate(model, task, 8, 2, traces=200)
    p = task.best_predictions(task.draw(200, 8, 2, generator(0, "test", 8, 2)))
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1).mean()
    assert abs(row["kl"] - (math.log(len(task.vocab)) - entropy)) < 1e-6
    assert abs(row["excess"] - row["kl"]) < 0.1
    assert abs(row["bayes"] - p.max(-1).mean()) < 1e-12


def test_the_probabilities_at_reveals_do_not_depend_on_the_pieces_of_a_trace(monkeypatch):
    """The reveals stand at other places in each trace; streamed in pieces of 7 tokens or whole."""
    task = CoinTask(Group("S3"), "full", 0.5)
    batch = task.test_batch(20, 6, 2, np.random.default_rng(16))
    assert len(np.unique(batch.reveals, axis=0)) > 5
    monkeypatch.setattr("eval.TOKENS_AT_ONCE", 20 * 7)
    for name in ("linrnn", "lstm"):
        model = build(name, len(task.vocab), d_model=8).double()
        ours = log_probabilities(model, batch.inputs, batch.reveals)
        with torch.no_grad():
            whole = model(torch.from_numpy(batch.inputs)).log_softmax(-1).numpy()
        assert np.abs(ours.reshape(-1, len(task.vocab)) - whole[batch.reveals]).max() < 1e-10


# --- The command line -----------------------------------------------------------------------------

@pytest.fixture(scope="module")
def run(small_run, tmp_path_factory):
    """A folder with a run that learned nothing, and its record. Where there can be no small run, in
    a students' copy, there can be none of this."""
    folder = tmp_path_factory.mktemp("coins")
    main(["train", *SMALL, "--commands", "swap", "--uncertain", "0.5", "--out",
          str(folder / "run"), "--record", str(folder / "results.jsonl")])
    return folder


def test_an_uncertain_run_is_trained_evaluated_and_recorded(run, capsys):
    """The filter's columns stand in the record, in the table and in the JSON, for each schedule and
    share. A share of 0 leaves no coin, and the filter knows all."""
    record = json.loads((run / "results.jsonl").read_text())
    assert record["command"].startswith("python -m experiments.beliefs train --group S3")
    row, = record["results"]
    assert row["kl"] > 0 and 1 / 3 < row["bayes"] <= 1
    config = json.loads((run / "run" / "config.json").read_text())
    assert (config["uncertain"], config["format"]) == (0.5, "coins")
    assert config["chapter"] == "experiments.beliefs" and config["options"]["conv_width"] == 9
    evaluation = ["eval", str(run / "run"), "--lengths", "4:2", "--traces", "4", "--json"]

    def shown(*options):
        main([*evaluation, *options])
        out = capsys.readouterr().out
        assert "bayes" in out and "kl" in out
        return json.loads(out.splitlines()[-1])

    by_schedule = {x: shown("--schedule", x)["results"][0] for x in SCHEDULES}
    assert by_schedule["random"] == row
    assert len({x["kl"] for x in by_schedule.values()}) == 3
    certain = shown("--uncertain", "0")["results"][0]
    assert certain["bayes"] == 1 and abs(certain["kl"] - certain["excess"]) < 1e-12
    record = run / "evaluation.jsonl"
    again = shown("--schedule", "periodic", "--uncertain", "1", "--record", str(record))
    line = json.loads(record.read_text())
    assert line["command"].startswith("python -m experiments.beliefs eval ")
    assert (line["schedule"], line["uncertain"], line["seed"]) == ("periodic", 1, 0)
    assert line["results"] == again["results"]


def test_a_stage_is_left_when_the_model_is_as_good_as_the_filter(tmp_path, monkeypatch):
    """Accuracy 0.97 of the best possible accuracy of the same batch, three times in a row."""
    monkeypatch.setattr("train.evaluate_and_print", lambda *_, **__: [])
    seen = []

    def step(accuracy):
        def fake(model, optimizers, inputs, targets, reveals, weight):
            task = CoinTask(Group("S3"), "full", 1.0)
            rng = generator(0, "train", len(seen))
            best = task.best_predictions(task.draw(4, 2, 1, rng)).max(-1).mean()
            seen.append(best)
            return {"loss": 0.0, "reveal_loss": 0.0, "reveal_accuracy": accuracy * best,
                    "gradient_norm": 0.0}
        return fake

    for accuracy, steps in [(0.98, 3 + 2), (0.96, 20)]:
        seen.clear()
        monkeypatch.setattr("train.train_step", step(accuracy))
        main(["train", "--group", "S3", "--uncertain", "1", "--curriculum", "2:1,2:1", "--d-model",
              "8", "--heads", "1", "--last-steps", "2", "--max-steps", "20", "--batch", "4",
              "--out", str(tmp_path / str(accuracy))])
        assert len(seen) == steps and max(seen) < 1


def test_the_trace_shown_to_a_reader_carries_what_the_filter_expects(capsys):
    """Python's own states beside the lines, and the filter's prediction at each reveal."""
    main(["show", "--group", "S3", "--uncertain", "1", "--length", "4"])
    shown = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(">>> if random() < 0.") for line in shown) == 4
    assert sum(line.startswith("... ") for line in shown) == 4
    filters = [i for i, line in enumerate(shown) if "filter " in line]
    assert len(filters) == 2
    for i in filters:
        name, value = shown[i + 1].split()[:2]
        assert shown[i - 1].startswith(f">>> print('{name}'")
        assert shown[i - 1].split("state ")[1].split()["abc".index(name)] == value
        expected = shown[i].split("filter ")[1].split(", ")
        predicted = [float(part.split(": ")[1]) for part in expected]
        assert predicted[int(value) - 1] > 0 and abs(sum(predicted) - 1) < 0.002


# --- Refusals -------------------------------------------------------------------------------------

def test_an_impossible_reveal_is_called_by_its_line():
    task = CoinTask(Group("S3"), "full", 0.5)
    certain = task.symbols(Program(np.array([[[1, 0, 2]]]), np.array([[0]]), np.ones((1, 1)),
                                   np.ones((1, 1), bool)))
    assert certain.tolist() == [[2 * 4 + 3, 24 + 1]]  # `a, b, c = b, a, c`, then `a 2`
    with pytest.raises(ValueError, match="impossible reveal at step 3 of trace 1: .*'a 3'"):
        task.automaton.filter(np.array([[11, 25, 3, 25], [11, 25, 3, 26]]))


def test_too_many_states_are_refused_with_the_cost(refused, tmp_path):
    with pytest.raises(ValueError, match="S6.*720 probabilities.*518,400.*refused above 120"):
        CoinTask(Group("S6"), "swap")
    refused(main, ["train", "--group", "S6", "--out", tmp_path / "run"], "720", "refused")
    refused(main, ["show", "--group", "S6"], "720", "refused")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_outside_0_and_1_is_refused(share, refused, run, tmp_path):
    with pytest.raises(ValueError, match="between 0 and 1; got"):
        CoinTask(Group("S3"), "full", share)
    for part in (["train", "--out", tmp_path / "run"], ["show"], ["eval", run / "run"]):
        refused(main, [*part, "--uncertain", share], "between 0 and 1")


def test_bad_requests_get_one_line(refused, run, small_run, tmp_path):
    refused(main, ["eval", run / "run", "--schedule", "adversarial", "--uncertain", "0.5"],
            "of its own")
    refused(main, ["eval", run / "run", "--lengths", "8:3"], "multiple")
    refused(main, ["eval", tmp_path], "missing")
    refused(main, ["eval", small_run], "format repl, not coins")
    refused(main, ["train", "--format", "word", "--out", tmp_path / "run"], "coins only", "word")
    refused(main, ["walk"], "invalid choice")
    main(["train", *SMALL, "--group", "A3", "--out", str(tmp_path / "run")])
    refused(main, ["eval", tmp_path / "run", "--schedule", "adversarial"], "transpositions", "A3")


def test_eval_py_refuses_the_run_of_a_chapter_and_names_the_chapter(run):
    """In a process of its own, where nobody has imported the chapter."""
    done = subprocess.run([sys.executable, "eval.py", str(run / "run")], cwd=ROOT, text=True,
                          capture_output=True)
    message = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error: " in message and "python -m experiments.beliefs eval" in message
