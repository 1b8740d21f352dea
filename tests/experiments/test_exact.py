"""A machine with integer keys is proved for every text, and a wrong one is refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import session, typed_lines
from machine import check_answers, mixed_session

from data import Group, ReplTask, UserError
from experiments import exact
from experiments.exact import Machine, certify
from scan import swap_machine_keys

S3 = ReplTask(Group("S3"))


@pytest.mark.parametrize("lines, lies, pieces", [(20_000, 0.5, 99), (50, 0, 10**9)])
def test_a_long_session_is_answered_as_python_does(lines, lies, pieces):
    """With loops, joined late, literals at any time, false reveals; in large pieces or by token."""
    task, machine = exact.stored()
    text, answers = mixed_session(task, lines, np.random.default_rng(60), lies)
    assert lies or session(typed_lines(text)) == text
    assert (None in answers) == (lies > 0) and len(answers) > lines / 20
    S, _ = check_answers(machine, task, text, answers, pieces)
    assert ((S == 0) | (S == 1)).all() and (S[0, :5].sum(-1) == 1).all()


def test_the_machine_has_its_proof_and_the_keys_of_the_swap_machine_in_scan():
    task, machine = exact.stored()
    assert certify(machine) == {"lines": 55, "reads": 5}

    commands = task.group.draw((40,), np.random.default_rng(60))
    tokens = torch.tensor([task.encode(task.command_line(g)) for g in commands])
    _, k, b, _ = machine.integers(tokens)
    keys = 2**0.5 * swap_machine_keys(torch.from_numpy(commands).unsqueeze(1))
    names = [*range(1, 6), *range(7, 12)]  # after `>>> ` and after ` = `
    assert (k[:, names] - keys).abs().max() < 1e-10 and torch.equal(k, b)
    assert k.abs().sum() == 40 * 20  # other tokens have none


def at(tokens, *pattern):
    """Where a text of S3 ends with these tokens: bool [B, T, 1]."""
    ids = torch.tensor([S3.ids[token] for token in pattern])
    windows = F.pad(tokens, (len(ids) - 1, 0), value=-1).unfold(1, len(ids), 1)
    return (windows == ids).all(-1, keepdim=True)


E = torch.eye(6)  # a, b, c and then a', b', c'


@pytest.mark.parametrize("wrong, words", [
    (lambda t, q, k, v: (q, k / 2, 2 * v), "no integers"),
    (lambda t, q, k, v: (2 * q, k, v), "row 0 is not"),
    (lambda t, q, k, v: (torch.where(q.any(-1, True), q + E[3], q), k, v), "row 0 is not"),
    # At a blank another row is read.
    (lambda t, q, k, v: (torch.where(q.any(-1, True), E[0], q), k, v), "row 1 is not"),
    # In a command two names are mistaken, or the end of the line erases a.
    (lambda t, q, k, v: (q, torch.where(at(t, " = ", "c"), E[0] - E[4], k), v), "fetch c alone"),
    (lambda t, q, k, v: (q, torch.where(at(t, ", c", "\n"), E[0], k), v), "ends with a change"),
    # A value is not parked. Another is fetched, or moved as well.
    (lambda t, q, k, v: (q, k * ~at(t, ">>> ", "a", ", b"), v), "does not park"),
    (lambda t, q, k, v: (q, k * ~at(t, " = ", "a"), v), "not fetch a alone"),
    (lambda t, q, k, v: (q, torch.where(at(t, " = ", "a", ", b"), E[0] - E[4], k), v),
     "not fetch b alone"),
    # A key has the length of another step, and a row becomes the sum of two.
    (lambda t, q, k, v: (q, torch.where(at(t, " = ", "a"), E[0] + E[3], k), v), "mixes rows"),
    # A literal erases another row, or is not read. In a reveal the value is ignored, or a spare row
    # comes in.
    (lambda t, q, k, v: (q, torch.where(at(t, "3", "\n"), E[0], k), v), "value alone"),
    (lambda t, q, k, v: (q, k * ~at(t, " = ", "2"), v), ">>> a = 2.* value alone"),
    (lambda t, q, k, v: (q, k * ~at(t, " ", "2"), v), "print.* value alone"),
    (lambda t, q, k, v: (q, torch.where(at(t, ")", "\n"), E[0] - E[3], k), v), "print.* alone")])
def test_a_wrong_machine_has_no_proof(monkeypatch, wrong, words):
    """wrong: from the tokens and q, k, v of the machine to q, k, v."""
    integers = Machine.integers

    def wrong_integers(self, tokens):
        q, k, _, v = integers(self, tokens)
        q, k, v = wrong(tokens, q, k, v)
        return q, k, k, v
    monkeypatch.setattr(Machine, "integers", wrong_integers)
    with pytest.raises(UserError, match=words):
        certify(Machine(S3))


def test_a_machine_whose_spare_rows_grow_has_no_proof():
    """At the bracket of a reveal, a' is added to b'."""
    class Growing(Machine):
        def integers(self, tokens):
            q, k, b, v = super().integers(tokens)
            here = at(tokens, ")")
            return q, k - here * E[3], b + here * E[4], v

    with pytest.raises(UserError, match="mixes rows"):
        certify(Growing(S3))
