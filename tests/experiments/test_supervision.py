"""Python holds the states that the tasks tell, and each loss has a plain loop beside it."""

import math

import numpy as np
import pytest
import torch
from conftest import typed_lines

from data import Group, ReplTask
from experiments import supervision
from experiments.supervision import TASKS, hidden_vectors, make_head, make_loss, stages_of
from models import build
from train import Recipe, next_token_loss, to_tensors

STATE_OF = {  # the text of a state, from Python's variables
    "parity": lambda space: str(space["p"]),
    "permutations": lambda space: str(space["a"])[1:-1],
    "arithmetic": lambda space: "".join(f"{space[name]:+}" for name in "abc"),
    "traces": lambda space: "".join(str(space[name]) for name in "abcde")}


def rng(seed=0):
    return np.random.default_rng(seed)


def executed(text):
    """Python's variables after this text."""
    lines = typed_lines(text) if ">>>" in text else text.splitlines()
    space = {}
    exec("\n".join(line for line in lines if "print" not in line), {}, space)
    return space


# --- The tasks ------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", TASKS)
def test_each_program_runs_and_python_holds_the_states_that_are_told(name):
    """The text up to each end is executed, and its variables are the state. The line that assigns
    this state makes it, too."""
    task = TASKS[name]()
    batch = task.training_batch(9, 6, 2 if name == "traces" else 1, rng(1))
    told = iter(batch.states)
    for tokens, ends in zip(batch.inputs, batch.ends):
        assert ends.sum() == 1 + 6
        for end in ends.nonzero()[0]:
            text = task.decode(tokens[:end + 1])
            state = task.decode(next(told))
            assert text.endswith("\n") and state == STATE_OF[name](executed(text))
            line = task.assignment(state) + "\n"
            assert task.decode(task.encode(line)) == line
            assert STATE_OF[name](executed(line)) == state
    assert next(told, None) is None


@pytest.mark.parametrize("name", ["parity", "permutations", "arithmetic"])
def test_the_answer_is_python_s(name):
    """What a program asserts is so, and the revealed tokens are the value that it asserts."""
    task = TASKS[name]()
    batch = task.test_batch(30, 5, 1, rng(2))
    for inputs, targets, reveals in zip(batch.inputs, batch.targets, batch.reveals):
        text = task.decode([inputs[0], *targets])
        executed(text)
        _, value = text.split("\nassert ")[1].split(" == ")
        assert task.decode(targets[reveals]).strip("\n") == value.strip("[]\n")
        assert reveals.sum() == task.answer_width


def test_a_trace_and_its_answers_are_those_of_the_spine():
    ours = TASKS["traces"]().training_batch(3, 8, 4, rng(3))
    theirs = ReplTask(Group("S5")).training_batch(3, 8, 4, rng(3))
    assert all((x == y).all() for x, y in zip(ours[:3], theirs[:3]))


# --- The losses -----------------------------------------------------------------------------------

def case(name, arm):
    """A task, a small model with the head of the arm, and what it is asked for a batch."""
    task = TASKS[name]()
    model = build("linrnn", len(task.vocab), d_model=12, heads=2, conv_width=4)
    model.auxiliary = make_head(arm, task, 12)
    batch = task.training_batch(3, 4, 1, rng(9))
    total, metrics = make_loss(task, arm)(model.double(), to_tensors(batch, "cpu"), Recipe())
    return task, model, batch, total, metrics


def last_vector(model, tokens):
    """The hidden vector at the end of a text, which is read no further: [D]."""
    tokens = torch.as_tensor(tokens)[None]
    return hidden_vectors(model, model.embedding(tokens))[0, -1].detach()


def hidden_by_prefix(model, batch):
    """The hidden vector at each end, of the text up to that end: [lines, D]."""
    return torch.stack([last_vector(model, batch.inputs[row, :end + 1])
                        for row, end in zip(*batch.ends.nonzero())])


@pytest.mark.parametrize("arm, name", [("linear", "parity"), ("linear", "traces"),
                                       ("linear", "permutations"), ("decoder", "permutations")])
def test_each_token_of_a_state_is_read_off_the_vector_at_the_end_of_its_line(arm, name):
    """By the linear map; by the decoder token by token, from the vector and the tokens before."""
    _, model, batch, _, metrics = case(name, arm)
    head, losses = model.auxiliary, []
    for vector, state in zip(hidden_by_prefix(model, batch), torch.from_numpy(batch.states)):
        for place, token in enumerate(state):
            if arm == "linear":
                scores = head(vector).view(len(state), -1)[place]
            else:
                read = torch.cat([vector[None], head.embedding(state[:place])])
                scores = head.unembedding(hidden_vectors(head, read[None]))[0, -1]
            losses.append((scores.logsumexp(0) - scores[token]).item())
    assert abs(metrics["auxiliary"] - np.mean(losses)) < 1e-10


@pytest.mark.parametrize("name", ["permutations", "arithmetic", "traces"])
def test_the_contrastive_loss_is_that_of_naming_the_state_among_those_of_the_batch(name):
    task, model, batch, _, metrics = case(name, "contrastive")
    texts = [task.decode(state) for state in batch.states]
    vectors = {}
    for text in texts:
        vectors[text] = last_vector(model, task.encode(task.assignment(text) + "\n")).numpy()

    losses = []
    for vector, text in zip(hidden_by_prefix(model, batch).numpy(), texts):
        scores = {other: math.exp(vector @ z / np.sqrt(vector @ vector * (z @ z)) / 0.1)
                  for other, z in vectors.items()}
        losses.append(-math.log(scores[text] / sum(scores.values())))
    assert abs(metrics["auxiliary"] - np.mean(losses)) < 1e-10


@pytest.mark.parametrize("arm, weight", [("next", 0), ("linear", 1), ("decoder", 1),
                                         ("contrastive", 0.1)])
def test_the_total_is_the_loss_of_train_and_the_weighted_one_of_the_states(arm, weight):
    """So the hidden vectors are those that the model unembeds."""
    _, model, batch, total, metrics = case("traces", arm)
    of_train, expected = next_token_loss(model, to_tensors(batch, "cpu"), Recipe())
    assert abs((total - of_train).item() - weight * metrics.pop("auxiliary", 0)) < 1e-10
    assert metrics == pytest.approx(expected, rel=1e-9)


# --- Runs -----------------------------------------------------------------------------------------

def test_the_stages_double_their_length_and_then_thin_out_their_reveals():
    assert stages_of("stages", 8, 4) == [(2, 1), (4, 1), (8, 1), (8, 2), (8, 4)]
    assert stages_of("linear", 8, 4) == [(8, 4)]


def test_parity_is_learned_from_the_states_and_the_result_has_no_auxiliary_head(monkeypatch):
    """Of two lines. A solved run makes some steps more, and is right where it was trained."""
    def small(name, size):
        return build(name, size, d_model=16, heads=2, conv_width=4)

    rows = []
    monkeypatch.setattr(supervision, "build", small)
    monkeypatch.setattr(supervision, "record", lambda name, row: rows.append(row))
    monkeypatch.setattr(supervision, "LAST_STEPS", 7)
    supervision.run_cell({"task": "parity", "arm": "linear", "model": "linrnn", "length": 2,
                          "spacing": 1, "seed": 0, "budget": 8192})
    row, = rows
    assert row["steps"] == row["solved"] // 16 + 7
    assert [test["length"] for test in row["results"]] == [2, 4, 8]
    assert row["results"][0]["perfect"] > 0.98
    assert row["parameters"] == sum(weight.numel() for weight in small("linrnn", 7).parameters())


def test_every_run_of_the_study_has_its_row():
    """So `--run` finds nothing to do."""
    for cell in supervision.cells_of_study():
        rows = supervision.records("supervision", **cell)
        assert sorted(row["seed"] for row in rows) == [0, 1, 2]
