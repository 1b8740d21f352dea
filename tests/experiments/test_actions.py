"""A listing and its session are Python; a model reads its own words just where it is free."""

import numpy as np
import pytest
import torch
from conftest import session, typed_lines

from data import Group, generator
from experiments import actions
from experiments.actions import COMMAND, GIVEN, MODES, STATE, ActionTask, Hybrid
from models import AttentionBlock, DeltaBlock


def texts(task, batch, length):
    """Whole texts as tokens, and what counts of them: [B, T] each."""
    drawn = task.test_batch(batch, length, 1, generator(3, "valid"))
    return (np.hstack([drawn.inputs[:, :1], drawn.targets]),
            np.hstack([np.zeros((batch, 1), bool), drawn.reveals]))


@pytest.mark.parametrize("name", ["S3", "A4"])
def test_a_text_is_a_program_and_its_real_session_and_each_token_has_its_role(name):
    """A fresh interpreter shows the session, in which the lines of the listing are typed. At the
    states' places stand the values. Behind the listing counts what differs among the texts."""
    task = ActionTask(Group(name))
    tokens, counted = texts(task, 50, 6)
    roles, n = task.roles(6), task.group.degree
    assert tokens.shape[1] == len(roles)
    for row in tokens:
        text = task.decode(row)
        at = text.index(">>> ")
        listing, shown = text[:at], text[at:]
        typed = typed_lines(shown)
        assert session(typed) == shown and len(typed) == n + 6 + 6
        assert listing.splitlines() == [line for line in typed[n:] if "=" in line]
        assert task.decode(row[roles == COMMAND]) == listing
        states = [line.strip("()") for line in shown.splitlines() if line.startswith("(")]
        assert task.decode(row[roles == STATE]) == "".join(states)
        assert task.encode(text) == row.tolist()

    differs = (tokens != tokens[0]).any(0)
    differs[:6 * (2 * n + 2)] = False
    assert (counted == differs).all() and not counted[:, roles == GIVEN].any()


@pytest.mark.parametrize("name", actions.ARMS)
def test_a_model_reads_its_own_words_just_where_it_is_free(name):
    """The text with its own words there, read at once, gives the same words."""
    task = ActionTask(Group("S3"))
    options = {} if name == "lstm" else {"heads": 2}
    model = actions.ARMS[name](len(task.vocab), d_model=16, conv_width=4, **options).double()
    truth = torch.from_numpy(texts(task, 3, 4)[0])
    for own in [*MODES.values(), []]:
        free = np.isin(task.roles(4), own)
        said = actions.generate(model, truth, free)
        read = torch.where(torch.from_numpy(free), said, truth)
        with torch.no_grad():
            assert torch.equal(said[:, 1:], model(read)[:, :-1].argmax(-1))
        assert (read != truth).any() == free.any()  # it is not trained, and wrong where it may be


def test_a_command_or_a_state_is_right_if_all_of_its_tokens_are(monkeypatch):
    """Here two tokens of one command are wrong in each of 5 texts, one of a state in the first."""
    task = ActionTask(Group("S5"))
    roles = task.roles(6)

    def mistaken(model, tokens, free):
        said = tokens.clone()
        said[:, np.flatnonzero(roles == COMMAND)[[40, 45]]] = 0  # the prompt stands in no command
        said[0, np.flatnonzero(roles == STATE)[7]] = 0
        return said

    monkeypatch.setattr(actions, "generate", mistaken)
    own, forced = actions.evaluate_modes(None, task, [6], traces=5)
    assert [own["mode"], forced["mode"]] == ["own", "forced"]
    assert (own["commands"], own["states"]) == pytest.approx((1 - 1 / 6, 1 - 1 / 30))


def test_the_mixers_of_the_hybrid_alternate():
    first, second, third = Hybrid(9, d_model=12, heads=3, layers=3, conv_width=3).blocks[1::2]
    assert [type(first), type(second), type(third)] == [DeltaBlock, AttentionBlock, DeltaBlock]


def test_a_run_reads_the_tokens_of_its_group_in_batches_of_a_drawn_length():
    """A batch has one length, from 4 commands to those of its stage; 70% is the last stage."""
    task, _, recipe, _ = actions.plan({"group": "S3", "arm": "lstm", "seed": 0})
    rng = np.random.default_rng(5)
    read = []
    for (length, _), count in zip(recipe.curriculum, recipe.stage_steps, strict=True):
        sizes = {task.training_batch(2, length, 1, rng).inputs.shape[1] + 1 for _ in range(100)}
        assert sizes == {len(task.roles(drawn)) for drawn in range(4, length + 1)}
        read.append(recipe.batch * count * np.mean([*sizes]) / 1e6)
    assert [sum(read), read[-1]] == pytest.approx([4, 0.7 * 4], rel=0.01)
