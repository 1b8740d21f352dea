"""A listing and its session are Python; a model reads its own words just where it is free."""

import numpy as np
import pytest
import torch
from conftest import session, typed_lines

from data import Group, generator
from experiments import actions
from experiments.actions import COMMAND, MODES, STATE, ActionTask, Hybrid, evaluate_mode
from models import AttentionBlock, DeltaBlock



@pytest.fixture(params=["S3", "A4", "S2xZ3"])
def task(request):
    return ActionTask(Group(request.param))


# --- The task -------------------------------------------------------------------------------------

def test_the_session_is_a_real_one_and_the_listing_is_its_program(task):
    """A fresh interpreter shows the session, in which the lines of the listing are typed."""
    n = task.group.degree
    tokens, _ = task.sample(4, 6, 3, generator(3, "valid"))
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
    tokens, counted = task.sample(50, 6, 3, generator(4, "valid"))
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


def test_a_training_batch_has_a_length_of_its_own():
    task, rng = ActionTask(Group("S3")), np.random.default_rng(5)
    sizes = {task.training_batch(2, 6, 1, rng).inputs.shape[1] + 1 for _ in range(30)}
    assert sizes == {len(task.roles(drawn, 1)) for drawn in (4, 5, 6)}


# --- Generation -----------------------------------------------------------------------------------

@pytest.mark.parametrize("name", actions.MAKE)
def test_a_model_reads_its_own_words_just_where_it_is_free(name):
    """What it read, read again at once, gives the same words. The true words are read where they
    are forced."""
    task = ActionTask(Group("S3"))
    options = {} if name == "lstm" else {"heads": 2}
    model = actions.MAKE[name](len(task.vocab), d_model=16, conv_width=4, **options).double()
    truth = torch.from_numpy(task.sample(3, 4, 2, generator(1, "test"))[0])
    roles = task.roles(4, 2)
    for own in [*MODES.values(), []]:
        free = np.isin(roles, own)
        with torch.no_grad():
            said, read = actions.generate(model, truth, free)
        assert torch.equal(said[:, 1:], model(read)[:, :-1].argmax(-1))
        assert torch.equal(read[:, free], said[:, free])
        assert torch.equal(read[:, ~free], truth[:, ~free])
        assert (read != truth).any() == free.any()  # it is not trained, and wrong where it may be


@pytest.mark.parametrize("mode, spoken", [("own", [COMMAND, STATE]), ("kept", [STATE])])
def test_a_command_or_a_state_is_right_if_all_of_its_tokens_are(mode, spoken, monkeypatch):
    """Here two tokens of one command are wrong in each of 5 texts, one of a state in the first."""
    task = ActionTask(Group("S5"))
    roles = task.roles(6, 1)

    def mistaken(model, tokens, free):
        assert (free == np.isin(roles, spoken)).all()
        said = tokens.clone()
        said[:, np.flatnonzero(roles == COMMAND)[[40, 45]]] = 0  # the prompt stands in no command
        said[0, np.flatnonzero(roles == STATE)[7]] = 0
        return said, tokens

    monkeypatch.setattr(actions, "generate", mistaken)
    row = evaluate_mode(None, task, 6, mode, traces=5)
    assert row["commands"] == pytest.approx(1 - 1 / 6, abs=1e-4)
    assert row["states"] == pytest.approx(1 - 1 / 30, abs=1e-4)


# --- The hybrid, and the study --------------------------------------------------------------------

def test_the_mixers_of_the_hybrid_alternate():
    model = Hybrid(9, d_model=12, heads=3, layers=3, conv_width=3)
    assert [type(block) for block in model.blocks[1::2]] == [DeltaBlock, AttentionBlock, DeltaBlock]
    assert model.blocks[1] is not model.blocks[5]


def test_an_arm_reads_the_tokens_of_its_cell_most_of_them_in_the_last_stage():
    task = ActionTask(Group("S3"))
    recipe = actions.recipe_for(task, {"arm": "lstm", "millions": 5, "seed": 0})
    read = []
    for (length, _), count in zip(recipe.curriculum, recipe.stage_steps, strict=True):
        mean = np.mean([len(task.roles(drawn, 1)) for drawn in range(4, length + 1)])
        read.append(16 * count * mean / 1e6)
    assert [sum(read), read[-1]] == pytest.approx([5, 0.7 * 5], rel=0.01)


def test_an_arm_is_trained_evaluated_in_each_mode_and_recorded(tmp_path, monkeypatch):
    """The record is that of its cell, with the keys that the records have."""
    rows = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(actions, "LENGTHS", [4])
    monkeypatch.setattr(actions, "record", lambda name, row: rows.append(row))
    cell = {"arm": "hybrid", "group": "S3", "millions": 0.003, "seed": 0}
    actions.run_cell(cell)
    row, = rows
    assert [test["mode"] for test in row["results"]] == [*MODES]
    assert row["finished"] and cell.items() <= row.items()
    assert {*row} < {*actions.records("actions")[0]}
