"""Python holds the states that the tasks tell, and each loss has a plain loop beside it."""

import numpy as np
import pytest
import torch
from conftest import typed_lines

from data import Group, ReplTask
from experiments import supervision
from experiments.supervision import CELLS, TASKS, hidden_vectors, make_head, make_loss, stages_of
from models import LinRNN
from train import Recipe, next_token_loss, to_tensors

STATE_OF = {  # the text of a state, from Python's variables
    "parity": lambda space: str(space["p"]),
    "permutations": lambda space: str(space["a"])[1:-1],
    "arithmetic": lambda space: "".join(f"{space[name]:+}" for name in "abc"),
    "traces": lambda space: "".join(str(space[name]) for name in "abcde")}


def executed(text):
    """Python's variables after this text."""
    lines = typed_lines(text) if ">>>" in text else text.splitlines()
    space = {}
    exec("\n".join(line for line in lines if "print" not in line), {}, space)
    return space


@pytest.mark.parametrize("name", TASKS)
def test_python_holds_the_states_that_are_told(name):
    """At each end of a line the text so far is executed, and its variables are the state."""
    task = TASKS[name]()
    batch = task.training_batch(9, 6, 2 if name == "traces" else 1, np.random.default_rng(1))
    told = iter(batch.states)
    for tokens, ends in zip(batch.inputs, batch.ends):
        assert ends.sum() == 1 + 6
        for end in ends.nonzero()[0]:
            text = task.decode(tokens[:end + 1])
            assert text.endswith("\n") and task.decode(task.encode(text)) == text
            assert task.decode(next(told)) == STATE_OF[name](executed(text))
    assert next(told, None) is None


@pytest.mark.parametrize("name", ["parity", "permutations", "arithmetic"])
def test_the_answer_is_python_s(name):
    """What a program asserts is so, and the revealed tokens are the value that it asserts."""
    task = TASKS[name]()
    batch = task.test_batch(30, 5, 1, np.random.default_rng(2))
    for inputs, targets, reveals in zip(batch.inputs, batch.targets, batch.reveals):
        text = task.decode([inputs[0], *targets])
        executed(text)
        _, value = text.split("\nassert ")[1].split(" == ")
        assert task.decode(targets[reveals]).strip("\n") == value.strip("[]\n")
        assert reveals.sum() == task.answer_width


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


@pytest.mark.parametrize("arm, name", [("linear", "traces"), ("linear", "permutations"),
                                       ("decoder", "permutations"), ("next", "traces")])
def test_the_loss_is_that_of_train_and_that_of_each_token_of_each_state(arm, name):
    """Each is read off the vector after the text so far: by the linear map, or by the decoder,
    which reads the vector and the tokens before it."""
    task, model, batch = case(name, arm)
    total, _ = make_loss(task.answer_width)(model, batch, Recipe())
    of_train, _ = next_token_loss(model, batch, Recipe())
    head = model.auxiliary
    if head is None:
        return np.testing.assert_allclose(total.item(), of_train.item(), rtol=1e-12)

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
    _, metrics = make_loss(task.answer_width)(model, batch._replace(targets=said % 20), Recipe())
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


def test_every_run_of_the_study_has_its_row():
    """So `--run` finds nothing to do."""
    assert all(len(supervision.records("supervision", **cell)) == 1 for cell in CELLS)
