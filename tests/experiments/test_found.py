"""A machine that training found is proved for every text, and a wrong one is refused."""

import copy
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import session, typed_lines
from machine import check_answers, mixed_session

from data import Group, ReplTask, UserError, run_cli
from experiments import found
from experiments.found import Found, Moves, certify


@pytest.fixture(scope="module")
def proved():
    return found.stored()


# --- The theorem ----------------------------------------------------------------------------------

@pytest.mark.parametrize("pieces", [1, 99, 10**9])
def test_long_texts_are_answered_as_python_does(proved, pieces):
    """With loops, and literals and reveals at any time; at once, in pieces, or by token."""
    task, model = proved
    text, answers = mixed_session(task, 9000 if pieces < 100 else 200, np.random.default_rng(60), 0)
    text = task.start_lines([2, 2, 0]) + text
    assert session(typed_lines(text)) == text
    S = check_answers(model, task, text, answers, pieces)[1]
    assert ((S == 0) | (S == 1)).all() and (S.sum(-1) == 1).all()


def test_a_stored_model_has_its_proof_and_its_record(proved):
    task, model = proved
    row, = found.records("found", group="S3", seed=360, change="none")
    for key, value in certify(model.train(), task).items():
        assert value == pytest.approx(row[key], rel=1e-3)
    assert [*found.machine(model, task)] == row["machine"]


# --- What is wrong is refused ---------------------------------------------------------------------

def row_of(part, i, value):
    def breaks(model):
        model.get_parameter(part).data[i] = value
    return breaks


def whispers(model):
    """All answers are right, by a small margin."""
    model.unembedding.weight.data *= 0.05


def would_end_the_line(model):
    """For a 3, the end of a line is as likely."""
    weight = model.unembedding.weight.data
    weight[6] = weight[-1]


def forgetful(model):
    """What the window shows of the tokens furthest back is noise: some contexts are wrong."""
    torch.manual_seed(7)
    furthest = model.blocks[0].conv.weight.data[:, :, 0]
    furthest += 0.2 * torch.randn_like(furthest)


@pytest.mark.parametrize("breaks, words", [
    (row_of("unembedding.weight", -1, 0), "is not predicted"),
    (whispers, "is not predicted"),
    (would_end_the_line, "3.*is not predicted"),
    (row_of("blocks.1.out.weight", slice(None), 0), "is not predicted"),
    (row_of("blocks.1.project.bias", 1, 50), "is not predicted"),      # it always swaps 0 and 1
    (row_of("blocks.1.project.weight", slice(0, 7), 0), "is not predicted|leads by only"),
    (row_of("blocks.1.project.weight", slice(7, 10), 0), "leads by only"),
    (row_of("blocks.0.conv.weight", (slice(None), slice(None), 3), 0), "leads by only"),
    (forgetful, r"after '>>> b = 2\\n', .* is not predicted"),
    (row_of("embedding.weight", 0, torch.nan), "100 or more, or not a number"),
    (row_of("norm.weight", 0, -100), "100 or more, or not a number")])
def test_wrong_parameters_have_no_proof(proved, breaks, words):
    task, model = proved
    model = copy.deepcopy(model)
    breaks(model)
    with pytest.raises(UserError, match=words):
        certify(model, task)


def forgets(token):
    """Literals of the first lines write. Later ones do not, if they are of this variable."""
    def step(right, p, q, v, S):
        later = v.shape[1] == 5 and not S[..., -1].any()
        spared = later * v[:, 1, token, None, None] * torch.tensor([0, 0, 0, 0, 1, 1, 1])
        return right(p * (1 - spared), q, v, S)
    return step


def hesitates(right, x):
    """At the last token of a line, all moves are alike."""
    p, q = right(x)
    return F.pad(p[:, :-1], (0, 0, 0, 1)), q


@pytest.mark.parametrize("name, wrong, words", [
    ("step", lambda right, p, q, v, S: right(p[..., [0, 2, 1, 3, 4, 5, 6]], q, v, S), "predicted"),
    ("step", lambda right, p, q, v, S: right(p, q.roll(1, -1), v, S), "predicted"),
    ("step", lambda right, p, q, v, S: right(p, q, 1.001 * v, S), "does not move"),
    ("step", lambda right, p, q, v, S: (lambda read, S: (read, S + 1))(*right(p, q, v, S)), "move"),
    *[("step", forgets(token), "predicted") for token in (7, 8, 9)],  # of a, of b, of c
    ("logits", hesitates, "leads by only 0"),
    ("choose", lambda right, z: right(-z), "predicted|leads")])
def test_a_wrong_layer_has_no_proof(proved, monkeypatch, name, wrong, words):
    task, model = proved
    right = getattr(Moves, name)
    monkeypatch.setattr(Moves, name, lambda self, *given: wrong(
        lambda *changed: right(self, *changed), *given))
    with pytest.raises(UserError, match=words):
        certify(model, task)


def test_a_reveal_need_not_write(proved, monkeypatch):
    task, model = proved
    right, writes = Moves.step, torch.tensor([0, 0, 0, 0, 1, 1, 1])
    monkeypatch.setattr(Moves, "step", lambda self, p, q, v, S: right(
        self, p * (1 - (v.shape[1] == 11) * writes), q, v, S))
    assert certify(model, task)["answers"] > 0


# --- The layer ------------------------------------------------------------------------------------

def test_training_makes_the_steps_of_a_loop_and_the_finished_model_makes_one():
    B, T, n, vocab = 2, 7, 4, 11
    moves = Moves(8, n, vocab, 8.0, 0.3).double()
    moves.eps = 0.01
    R = n * (n + 1) // 2
    p = torch.rand(B, T, 1 + R).double().softmax(-1)
    q = torch.rand(B, T, n).double().softmax(-1)
    v = F.one_hot(torch.randint(vocab, (B, T)), vocab).double()
    S = start = torch.randn(B, n, vocab).double()
    for t in range(T):
        for r in range(R):  # with probability p, two slots are exchanged or one is written
            moved = S.clone()
            if r < R - n:
                i, j = torch.combinations(torch.arange(n))[r]
                moved[:, [i, j]] = S[:, [j, i]]
            else:
                moved[:, r - (R - n)] = v[:, t]
            S = S + p[:, t, 1 + r, None, None] * (moved - S)
    read, state = moves.step(p, q, v, start)
    assert (state - S).abs().max() < 1e-10
    last = (q[:, -1, :, None] * S).sum(1)
    square = last.square().sum(-1, keepdim=True)
    assert (read[:, -1] - last * (1.01 / (square + 0.01)).sqrt()).abs().max() < 1e-10

    p, q = [F.one_hot(x.argmax(-1), x.shape[-1]).double() for x in (p.roll(1, 1), q)]
    start = F.one_hot(torch.randint(vocab, (B, n)), vocab).double()
    read, state = moves.step(p, q, v, start)
    for one, other in zip(moves.eval().step(p, q, v, start), (read, state)):
        assert (one - other).abs().max() < 1e-10


def test_no_choice_is_out_of_reach():
    moves = Moves(8, 3, 16, bound=8.0, noise=0.0)
    p = moves.choose(torch.tensor([0.0, 1e4, 0, 0, -1e5, 0, 0]))
    assert p.min() > 1e-5 and abs(p.sum() - 1) < 1e-5
    assert moves.eval().choose(torch.tensor([0.0, 2, 1])).tolist() == [0, 1, 0]


# --- Training, the study and the command ----------------------------------------------------------

def test_training_on_two_variables_ends_in_a_proof():
    task, model, log = found.train_found("S2", 60)
    assert certify(model, task)["answers"] == 40 and log[-1]["step"] % 20 == 0


def test_a_try_that_fails_is_followed_by_another(monkeypatch):
    tried = []
    monkeypatch.setattr(found, "refusal", lambda model, task: tried.append(model))
    _, model, log = found.train_found("S2", 60, tries=3, steps=1)
    assert [row["step"] for row in log] == [1, 2] * 3 and not tried


def test_texts_hold_what_was_asked_for():
    task = ReplTask(Group("S3"))
    odds = np.array([0, 0, 0, 0.5, 0, 0.5])
    batch = found.programs(task, 9, (4, 2, 3), odds, np.random.default_rng(60))
    for row in np.column_stack([batch.inputs, batch.targets[:, -1]]):
        text = task.decode(row)
        assert session(typed_lines(text)) == text
        lines = text.splitlines()
        assert len(lines) == 3 + 4 + 2 + 2 * 3
        right = [line.split(" = ")[1] for line in lines if line.startswith(">>> a, ")]
        assert len(right) == 4 and {*right} <= {"b, c, a", "c, b, a"}


def test_wrong_commands_are_found(proved):
    task, model = proved
    rng = np.random.default_rng(60)
    assert not found.wrong_commands(model, task, rng).any()
    wrong = found.wrong_commands(Found(task), task, rng)
    assert wrong.shape == (6,) and wrong.all()


@pytest.mark.parametrize("argv, word", [
    (["S27"], "a to z"), (["Q5"], "unknown group"), (["S3"], "leads by only|not predicted")])
def test_the_command_refuses_in_one_line(argv, word, capsys, monkeypatch):
    monkeypatch.setattr(found.train, "train", lambda model, *_, **__: (model, [{"step": 1}]))
    with pytest.raises(SystemExit, match="^2$"):
        run_cli(lambda: found.main(argv))
    line, = capsys.readouterr().err.splitlines()
    assert re.search(word, line)


def test_the_command_proves_and_a_record_says_so(proved, capsys, monkeypatch):
    task, model = proved
    log = 2 * [{"step": 7, "tokens": 8, "finished": True}]
    monkeypatch.setattr(found, "train_found", lambda group, seed, **_: (task, model, log))
    monkeypatch.setattr(found, "TESTS", [(16, 2), (8, 1), (8, 2), (32, 4)])
    found.main(["S3", "60"])
    printed = capsys.readouterr().out
    assert "Proved (see certify): 216 answers" in printed and "swaps" in printed
    assert "(16,2)   0.3333   1.0000   1.0000   1.0000" in printed and "(32,4)" in printed

    setting = {"group": "S3", "seed": 60, "change": "none"}
    row = found.run(setting, None)
    assert (row["answers"], row["steps"], row["tries"]) == (216, 14, 2)
    untrained = Found(task).eval()
    monkeypatch.setattr(found, "train_found", lambda group, seed, **_: (task, untrained, log))
    row = found.run(setting, None)
    assert "answers" not in row and row["refused"]
