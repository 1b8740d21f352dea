"""The states are told where they hold, and each loss has a plain loop beside it."""

import numpy as np
import pytest
import torch
from conftest import typed_lines

from data import Group, ReplTask
from experiments import records, supervision
from experiments.supervision import CELLS, TASKS, hidden_vectors, loss_of, make_head, stages_of
from models import LinRNN
from train import Recipe, next_token_loss, to_tensors


def executed(text):
    """Python's variables after this text, with what it asserts."""
    lines = typed_lines(text) if ">>>" in text else text.splitlines()
    space = {}
    exec("\n".join(line for line in lines if "print" not in line), {}, space)
    return space


@pytest.mark.parametrize("name", TASKS)
def test_python_holds_the_states_that_are_told_and_the_answer(name):
    """At each end of a line the text so far is executed, and its variables are the state."""
    def decode(tokens):
        return "".join(task.vocab[i] for i in tokens)

    task = TASKS[name]()
    state = "{a}{b}{c}{d}{e}" if name == "traces" else task.state
    batch = task.training_batch(9, 6, 2 if name == "traces" else 1, np.random.default_rng(1))
    told = iter(batch.states)
    for inputs, targets, reveals, ends in zip(*batch[:4]):
        assert ends.sum() == 1 + 6
        for end in ends.nonzero()[0]:
            text = decode(inputs[:end + 1])
            assert text.endswith("\n") and decode(next(told)) == state.format(**executed(text))

        if name != "traces":
            text = decode([inputs[0], *targets])
            executed(text)
            assert decode(targets[reveals]).strip("\n") == text.split(" == ")[1].strip("[]\n")
            assert reveals.sum() == task.answer_width
    assert next(told, None) is None


def test_a_trace_and_its_answers_are_those_of_the_spine():
    ours = TASKS["traces"]().training_batch(3, 8, 4, np.random.default_rng(3))
    theirs = ReplTask(Group("S5")).training_batch(3, 8, 4, np.random.default_rng(3))
    assert all((x == y).all() for x, y in zip(ours[:3], theirs))


def case(name, arm):
    """A task, a small model with the head of the arm, and a batch of three."""
    task = TASKS[name]()
    model = LinRNN(len(task.vocab), d_model=12, heads=2, conv_width=4)
    model.auxiliary = make_head(arm, task, 12)
    batch = task.training_batch(3, 4, 1, np.random.default_rng(9))
    return task, model.double(), to_tensors(batch, "cpu")


@pytest.mark.parametrize("arm, name", [("linear", "traces"), ("decoder", "permutations")])
def test_the_loss_is_that_of_train_and_that_of_each_token_of_each_state(arm, name):
    """The linear map reads it off the vector after the text so far; the decoder also reads the
    tokens of the state before it."""
    task, model, batch = case(name, arm)
    total, _ = loss_of(task.answer_width, model, batch, Recipe())
    of_train, _ = next_token_loss(model, batch, Recipe())
    head = model.auxiliary
    losses = []
    for row, end, state in zip(*batch.ends.nonzero(), torch.from_numpy(batch.states)):
        text = model.embedding(batch.inputs[row:row + 1, :end + 1])
        vector = hidden_vectors(model, text)[0, -1]
        for place, token in enumerate(state):
            if arm == "linear":
                scores = head(vector).view(len(state), -1)[place]
            else:
                read = torch.cat([vector[None], head.embedding(state[:place])])
                scores = head.unembedding(hidden_vectors(head, read[None]))[0, -1]
            losses.append((scores.logsumexp(0) - scores[token]).item())
    assert abs((total - of_train).item() - np.mean(losses)) < 1e-10


def test_an_answer_is_right_if_all_its_tokens_are():
    task, model, batch = case("permutations", "next")
    said = model(batch.inputs).argmax(-1)
    said[0, batch.reveals[0].nonzero()[2]] -= 1  # one wrong token in one of three answers
    _, metrics = loss_of(task.answer_width, model, batch._replace(targets=said % 20), Recipe())
    assert metrics["reveal_accuracy"] == pytest.approx(2 / 3)


def test_the_stages_double_their_length_and_then_thin_out_their_reveals():
    assert stages_of("stages", 8, 4) == [(2, 1), (4, 1), (8, 1), (8, 2), (8, 4)]
    assert stages_of("linear", 8, 4) == [(8, 4)]


def test_parity_is_learned_from_the_states_and_the_result_has_no_auxiliary_head(monkeypatch):
    """Of two lines. A solved run makes some steps more, and is right where it was trained."""
    def small(size):
        return LinRNN(size, d_model=16, heads=2, conv_width=4)

    rows = []
    monkeypatch.setitem(supervision.MODELS, "linrnn", small)
    monkeypatch.setattr(supervision, "record", lambda name, row: rows.append(row))
    monkeypatch.setattr(supervision, "LAST_STEPS", 7)
    supervision.run_cell({"task": "parity", "arm": "linear", "model": "linrnn", "length": 2,
                          "spacing": 1, "seed": 0, "budget": 8192})
    row, = rows
    assert row["steps"] == row["solved"] // 16 + 7
    assert [test["length"] for test in row["results"]] == [2, 4, 8]
    assert row["results"][0]["perfect"] > 0.98
    assert row["parameters"] == sum(weight.numel() for weight in small(7).parameters())


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_run_is_solved_if_all_of_256_programs_are_answered_that_it_has_not_read(wrong,
                                                                                 monkeypatch):
    """One wrong token in one answer, and it is not. There are 10^7 permutation programs of eight
    lines, so that none comes twice by chance."""
    trained, rows = [], []

    class Recorded(supervision.PermutationTask):
        def training_batch(self, *arguments):
            batch = super().training_batch(*arguments)
            trained.append(batch.inputs)
            return batch

    def predict(model, inputs):
        asked.append(inputs)
        tokens = np.hstack([inputs[:, 1:], inputs[:, :1] + len(task.vocab)])
        targets = tokens.copy()
        targets[-1, -3] += wrong  # of `4]` and the newline that ends the text
        return targets

    asked, task = [], Recorded()
    monkeypatch.setitem(TASKS, "permutations", Recorded)
    monkeypatch.setitem(supervision.MODELS, "linrnn", lambda size: LinRNN(size, 8, 2))
    monkeypatch.setattr(supervision, "predict", predict)
    monkeypatch.setattr(supervision, "evaluate_all", lambda *_: [])
    monkeypatch.setattr(supervision, "record", lambda name, row: rows.append(row))
    monkeypatch.setattr(supervision, "LAST_STEPS", 2)
    supervision.run_cell({"task": "permutations", "arm": "next", "model": "linrnn", "length": 8,
                          "spacing": 1, "seed": 0, "budget": 16 * 12})
    assert rows[0]["solved"] == (None if wrong else 16 * 10)
    read = {row.tobytes() for batch in trained for row in batch}
    assert len(asked[0]) == 256 and len(read) > 150
    assert not read & {row.tobytes() for row in asked[0]}


def test_each_cell_has_one_record_and_each_record_its_cell():
    assert {len(records("supervision", **cell)) for cell in CELLS} == {1}
    assert len(records("supervision")) == len(CELLS)
