"""A listing and its session are Python; a model reads its own words just where it is free."""

import numpy as np
import pytest
import torch
from conftest import session, typed_lines

from data import Group, generator
from experiments import actions
from experiments.actions import COMMAND, MODES, STATE, ActionTask, Hybrid, evaluate_mode
from experiments.groups import product
from models import AttentionBlock, DeltaBlock


@pytest.fixture(params=["S3", "A4", "S2xZ3"])
def task(request):
    factors = [Group(name) for name in request.param.split("x")]
    return ActionTask(factors[0] if len(factors) == 1 else product(*factors))


def texts(task, batch, length, spacing, seed=3):
    """Whole texts as tokens, and what counts of them: [B, T] each."""
    drawn = task.test_batch(batch, length, spacing, generator(seed, "valid"))
    return (np.hstack([drawn.inputs[:, :1], drawn.targets]),
            np.hstack([np.zeros((batch, 1), bool), drawn.reveals]))


def test_the_session_is_a_real_one_and_the_listing_is_its_program(task):
    """A fresh interpreter shows the session, in which the lines of the listing are typed."""
    n = task.group.degree
    tokens, _ = texts(task, 4, 6, 3)
    for row in tokens:
        text = task.decode(row)
        at = text.index(">>> ")
        listing, shown = text[:at], text[at:]
        typed = typed_lines(shown)
        assert session(typed) == shown and len(typed) == n + 6 + 2
        assert listing.splitlines() == [line for line in typed[n:] if "=" in line]
        assert task.encode(text) == row.tolist()


def test_each_token_has_its_role_and_what_cannot_be_guessed_counts(task):
    """At the commands' places stands the listing, at the states' places the values, and between
    them only what is the same in all texts. Of a command the right-hand side counts."""
    tokens, counted = texts(task, 50, 6, 3)
    roles, n = task.roles(6, 3), task.group.degree
    width = 2 * n + 2
    assert tokens.shape[1] == len(roles) == 6 * width + 5 * n + 6 * (width + 1) + 2 * (2 * n + 5)
    assert (tokens[:, roles == COMMAND] == tokens[:, :6 * width]).all()

    for row in tokens:
        shown = [line for line in task.decode(row).splitlines() if line.startswith("(")]
        assert task.decode(row[roles == STATE]) == "".join(line.strip("()") for line in shown)

    given = tokens[:, 6 * width:][:, roles[6 * width:] == 0]
    constant = (tokens == tokens[0]).all(0)
    assert (given == given[0]).all() and (counted == counted[0]).all()
    assert (counted[0] == ~constant)[roles > 0].all() and not counted[0][roles == 0].any()


@pytest.mark.parametrize("name", actions.ARMS)
def test_a_model_reads_its_own_words_just_where_it_is_free(name):
    """What it read, read again at once, gives the same words. The true words are read where they
    are forced."""
    task = ActionTask(Group("S3"))
    options = {} if name == "lstm" else {"heads": 2}
    model = actions.ARMS[name](len(task.vocab), d_model=16, conv_width=4, **options).double()
    truth = torch.from_numpy(texts(task, 3, 4, 2)[0])
    for own in [*MODES.values(), []]:
        free = np.isin(task.roles(4, 2), own)
        with torch.no_grad():
            said, read = actions.generate(model, truth, free)
            assert torch.equal(said[:, 1:], model(read)[:, :-1].argmax(-1))
        assert torch.equal(read[:, free], said[:, free])
        assert torch.equal(read[:, ~free], truth[:, ~free])
        assert (read != truth).any() == free.any()  # it is not trained, and wrong where it may be


def test_a_command_or_a_state_is_right_if_all_of_its_tokens_are(monkeypatch):
    """Here two tokens of one command are wrong in each of 5 texts, one of a state in the first."""
    task = ActionTask(Group("S5"))
    roles = task.roles(6, 1)

    def mistaken(model, tokens, free):
        said = tokens.clone()
        said[:, np.flatnonzero(roles == COMMAND)[[40, 45]]] = 0  # the prompt stands in no command
        said[0, np.flatnonzero(roles == STATE)[7]] = 0
        return said, tokens

    monkeypatch.setattr(actions, "generate", mistaken)
    row = evaluate_mode(None, task, 6, "own", traces=5)
    assert (row["commands"], row["states"]) == pytest.approx((1 - 1 / 6, 1 - 1 / 30))


def test_the_mixers_of_the_hybrid_alternate():
    first, second, third = Hybrid(9, d_model=12, heads=3, layers=3, conv_width=3).blocks[1::2]
    assert [type(first), type(second), type(third)] == [DeltaBlock, AttentionBlock, DeltaBlock]
    assert first is not third


def test_a_run_reads_the_tokens_of_its_group_in_batches_of_a_drawn_length():
    """A batch has one length, from 4 commands to those of its stage; 70% is the last stage."""
    task, _, recipe, _ = actions.plan({"group": "S3", "arm": "lstm", "seed": 0})
    rng = np.random.default_rng(5)
    read = []
    for (length, _), count in zip(recipe.curriculum, recipe.stage_steps, strict=True):
        sizes = {task.training_batch(2, length, 1, rng).inputs.shape[1] + 1 for _ in range(100)}
        assert sizes == {len(task.roles(drawn, 1)) for drawn in range(4, length + 1)}
        read.append(recipe.batch * count * np.mean([*sizes]) / 1e6)
    assert [sum(read), read[-1]] == pytest.approx([4, 0.7 * 4], rel=0.01)
