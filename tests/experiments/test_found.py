"""A machine that training found is proved for every text, and a wrong one is refused."""

import re

import numpy as np
import pytest
import torch
from conftest import session, typed_lines
from machine import check_answers, mixed_session

from data import Group, ReplTask, UserError
from experiments import found
from experiments.found import Found, certify


@pytest.fixture(scope="module")
def proved():
    return found.stored()


def built(group, read_from="home"):
    """A machine by hand: slot x holds x. It takes another slot's content by a lead of 2 over
    keeping what it holds, and all else leads by more.

    read_from: its home; or a slot "fetched", into which each question fetches its value; or a slot
    "cached" for each variable, which takes what slot x holds after each literal and reveal.
    """
    task = ReplTask(Group(group))
    model, n, ids = Found(task).eval(), task.group.degree, task.ids
    for terms in model.parameters():
        terms.data.zero_()
    take, read = model.take.data, model.read.data
    keep = torch.eye(1 + model.slots)[1:]
    told = [ids[")"], *(ids[value] for value in task.values)]
    take[0] += 40 * keep
    take[0, model.end] -= 30 * keep
    take[1, told] += 20 * keep  # no other line than a command moves slots
    read[0, :, 0] += 5
    for x, name in enumerate(task.names):
        for slot in (x, n + x) if read_from == "cached" else (x,):
            take[0, told[1:], slot, 0] += 33
            take[2, ids[name], slot, 0] += 33
            for y in range(n):
                named = task.encode(task.command_line(n * [y]))[n + 2 + x]
                take[n - x, named, slot, 1 + y] += 12
        take[1, told[1:], n + x, 1 + x] += 40 * (read_from == "cached")
        take[2, ids[f", {name}"], n, 1 + x] += 40 * (read_from == "fetched")
        read[1, ids[name], 1 + {"home": x, "fetched": n, "cached": n + x}[read_from]] += 10
    return task, model


# --- The theorem ----------------------------------------------------------------------------------

@pytest.mark.parametrize("lines, lies, pieces", [(3000, 0.5, 99), (1000, 0, 1), (50, 0.5, 10**9)])
def test_long_texts_are_answered_as_python_does(proved, lines, lies, pieces):
    """With loops, joined late, literals at any time, false reveals; whole, in pieces, by token."""
    machines = proved, built("S3"), built("S4", "fetched"), built("S3", "cached")
    for task, model in machines:
        copies = model is not proved[1]
        certify(model, task, copies)
        text, answers = mixed_session(task, lines, np.random.default_rng(60), lies, copies)
        assert lies or copies or session(typed_lines(text)) == text
        S = check_answers(model, task, text, answers, pieces)[1]
        assert ((S == 0) | (S == 1)).all() and (S.sum(-1) <= 1).all()


@pytest.mark.parametrize("group", ["S3", "S4", "S6"])
@pytest.mark.parametrize("read_from", ["home", "fetched", "cached"])
def test_the_least_lead_is_that_of_the_worst_window(group, read_from):
    task, model = built(group, read_from)
    facts, n = certify(model, task, copies=True), task.group.degree
    assert facts["slots"] == [n * (read_from == "cached") + x for x in range(n)]
    assert facts["gap"] == 2


def test_the_stored_model_has_its_proof_and_its_record(proved):
    task, model = proved
    row, = found.records("found", group="S5", seed=400, shown="all")
    facts = certify(model, task)
    assert facts["slots"] == row["slots"] and facts["choices"] == row["choices"]
    assert facts["gap"] == pytest.approx(row["gap"], rel=1e-3)
    *_, command, question, answer = found.machine(model, task)  # 2 3 4 5 1 moves
    assert command.endswith(" 3  4  5  1  2") and question.endswith(" 3  4  5  1  2")
    assert answer.startswith("a 3") and answer.endswith(" 3  4  5  1  2")


# --- What is wrong is refused ---------------------------------------------------------------------

@pytest.mark.parametrize("group, before", [
    ("S3", {3: ", b"}), ("S3", {3: " = "}), ("S3", {3: " "}), ("S3", {1: "none"}),
    ("S3", {1: "none", 3: "none"}), ("S5", {4: "b", 5: ">>> "}), ("S5", {4: "b", 5: "\n"}),
    ("S6", {6: "none"}), ("S6", {6: "\n"})])
def test_all_that_may_precede_a_line_counts(group, before):
    """At a prompt slot 1 keeps what it holds by a lead of 6, but by 0 after these tokens: a
    command, a literal, a reveal, the start of a text, b alone, two lines."""
    task, model = built(group)
    take, ids = model.take.data[:, :, 1, 0], {**task.ids, "none": -1}
    take[0, ids[">>> "]] += 34
    for distance, token in before.items():
        take[distance, ids[token]] += 6 / len(before)
    with pytest.raises(UserError, match="leads by only 0$"):
        certify(model, task)


@pytest.mark.parametrize("changes, words", [
    ([("take", 0, "\n", (1, 2), 1.99)], "leads by only 0.01$"),  # keep what b has, or take from y
    ([("read", 0, " ", (0,), 20)], "no slot is read for a"),  # no slot is read
    ([("take", 0, " ", (1, 0), 90)], "b gets a token"),  # the blank is written, and then read
    ([("read", 1, "b", (1,), 20)], "b gets a token"),  # a is read for b
    ([("take", 2, "b", (0, 0), 20)], "a gets a token"),  # the value of b goes to a as well
    ([("take", 2, "b", (1, 0), -30)], "b does not get its value"),  # or not to b
    ([("take", 1, " ", (1, 0), -33)], "b does not get its value"),  # or not in a reveal
    ([("take", 1, " = ", (1, 0), -33)], "b does not get its value"),  # or in a literal
    ([("take", 2, " = ", (1, 0), 25), ("take", 3, "b", (1, 0), 9)],
     "b does not get its value"),  # at the end of a literal of b, the end is written
    ([("take", 1, ")", (1, 3), 40)], "leads by only -2"),  # a question moves c to b
    ([("take", 1, "3", (1, 3), 40)], "leads by only -10"),  # or a 3 at the end of a literal
    ([("take", 0, "\n", (1, 0), 99)], "b gets a token"),  # a line's end is written
    ([("take", 2, ", c", (1, 1), 20)], "c gets a token"),
    ([("take", 1, ", a", (1, 1), 11.99)], "leads by only 0.01"),  # if the last two are c, a
    ([("take", 3, "a", (8, 8), torch.nan)], "100 or more, or not"),
    ([("say", 3, "a", (8,), -100)], "100 or more, or not")])
def test_a_wrong_machine_has_no_proof(changes, words):
    task, model = built("S3")
    for part, distance, token, choice, by in changes:
        getattr(model, part).data[(distance, task.ids[token], *choice)] += by
    with pytest.raises(UserError, match=words):
        certify(model, task)


def test_copies_are_a_theorem_of_their_own():
    task, model = built("S3")
    model.take.data[1, task.ids[", c"], 1, 1] += 11.99  # b = c comes close to b = a before a c
    assert certify(model, task)["gap"] > 1
    with pytest.raises(UserError, match="leads by only 0.01"):
        certify(model, task, copies=True)


# --- The layer and the training -------------------------------------------------------------------

def test_training_computes_the_expected_state_of_random_choices():
    task = ReplTask(Group("S2"))
    model = Found(task)
    model.take.data *= 3
    tokens = torch.tensor([task.encode(">>> b = 2\na 1\n>>> a, b = b, a\n")])
    _, (_, S) = model.stream(tokens)
    model.choose = lambda z: torch.nn.functional.one_hot(
        torch.distributions.Categorical(logits=z).sample(), z.shape[-1]).to(z)
    with torch.no_grad():
        _, sampled = model.stream(tokens.expand(4000, -1))[1]
    assert (sampled.mean(0) - S[0]).abs().max() < 0.05
    assert (sampled.sum(-1) <= 1).all()


@pytest.mark.parametrize("shown, kinds", [("all", 6), (4, 4), ("copies", 27)])
def test_sessions_are_joined_late(shown, kinds):
    task, rng = ReplTask(Group("S3")), np.random.default_rng(60)
    draw = found.drawer(task.group, shown, 60)
    tokens = [found.session(task, 300, draw, rng) for _ in range(50)]
    assert {*map(len, tokens)} == {301}
    lines = [task.decode(text).splitlines()[:-1] for text in tokens]
    assert len({line for line in sum(lines, []) if line.startswith(">>> a, ")}) == kinds
    assert len({(first[4:6], "=" in first) for first, *_ in lines}) == 1 + 3 + 1


def test_training_ends_with_a_proof_or_begins_anew(monkeypatch):
    models = []

    def refuse(model, *_):
        models.append(model)
        raise UserError("no")
    monkeypatch.setattr(found, "STEPS", 10)
    monkeypatch.setattr(found, "certify", refuse)
    _, model, log = found.train_found("S2", 60, tries=2)
    assert models[0] is not models[-1] is model and log[-1] == {"steps": 40, "refused": "no"}
    monkeypatch.setattr(found, "certify", lambda *_: {"gap": 1})
    assert found.train_found("S2", 60)[2] == [{"steps": 20, "gap": 1}]


def test_the_command_prints_a_proof_or_has_none(proved, capsys, monkeypatch):
    log = [{"steps": 7} | certify(*proved[::-1])]
    monkeypatch.setattr(found, "train_found", lambda group, seed, shown=None: (*proved, log))
    found.main(["S5", "60"])
    assert re.match(r"Proved after 7 steps: \d+ choices lead", capsys.readouterr().out)
    row = found.run({"group": "S5", "seed": 60, "shown": "all"}, None)
    assert row["steps"] == 7 and row["gap"] > 0.1
    untrained = Found(proved[0])
    torch.nn.init.zeros_(untrained.read)
    monkeypatch.setattr(found, "train_found", lambda group, seed: (proved[0], untrained, log))
    with pytest.raises(UserError, match="leads by only 0$"):
        found.main(["S5"])
