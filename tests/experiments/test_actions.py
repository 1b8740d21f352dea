"""A listing and its session are Python; a model that is always right is right in every mode."""

import numpy as np
import pytest
import torch
from conftest import session, typed_lines

from data import Group, generator, run_commands
from experiments import actions
from experiments.actions import COMMAND, MODES, SPACINGS, STATE, ActionTask, Hybrid, evaluate_mode
from models import AttentionBlock, DeltaBlock

KINDS = [("S3", "all"), ("S4", "one"), ("A4", "all"), ("S2xZ3", "all")]


def task_of(group="S3", shown="all"):
    return ActionTask(Group(group), shown)


def texts(task, count, length, spacing):
    """Pairs (listing, session), and all tokens."""
    tokens, _ = task.write(*task.draw(count, length, spacing, generator(3, "valid")))
    pairs = []
    for row in tokens:
        text = task.decode(row)
        at = text.index(">>> ")
        pairs.append((text[:at], text[at:]))
    return pairs, tokens


# --- The task -------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", KINDS)
def test_the_session_is_a_real_one_and_the_listing_is_its_program(kind):
    """A fresh interpreter shows the session, in which the lines of the listing are typed."""
    task = task_of(*kind)
    n = task.group.degree
    for spacing in (1, 3):
        pairs, tokens = texts(task, 4, 6, spacing)
        for (listing, shown), row in zip(pairs, tokens):
            typed = typed_lines(shown)
            assert session(typed) == shown and len(typed) == n + 6 + 6 // spacing
            assert listing.splitlines() == [line for line in typed[n:] if "=" in line]
            assert task.encode(listing + shown) == row.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_has_its_role_and_what_cannot_be_guessed_counts(kind):
    """At the commands' places stands the listing, at the states' places the values, and between
    them only what is the same in all texts; of a full command the right-hand side counts."""
    task = task_of(*kind)
    commands, asked = task.draw(50, 6, 3, generator(4, "valid"))
    tokens, counted = task.write(commands, asked)
    roles, n = task.roles(6, 3), task.group.degree
    width = 2 * n + 2
    question = 11 if task.shown == "one" else 2 * n + 5
    assert tokens.shape[1] == len(roles) == 6 * width + 5 * n + 6 * (width + 1) + 2 * question
    assert (tokens[:, roles == COMMAND] == tokens[:, :6 * width]).all()

    states = run_commands(commands)[:, 2::3]
    if task.shown == "one":
        states = np.take_along_axis(states, asked[..., None], -1)
    values = [task.decode([x]).strip(", ") for x in tokens[:, roles == STATE].ravel()]
    assert values == [str(x + 1) for x in states.ravel()]

    given = tokens[:, 6 * width:][:, roles[6 * width:] == 0]
    assert task.shown == "one" or (given == given[0]).all()
    constant = (tokens == tokens[0]).all(0)
    assert (counted == counted[0]).all() and counted[0][roles == STATE].all()
    assert not counted[0][roles == 0].any()
    assert (counted[0] == ~constant)[roles == COMMAND].all()


def test_a_training_batch_has_a_length_of_its_own_and_a_test_batch_the_length_asked_for():
    task, rng = task_of(), np.random.default_rng(5)

    def tokens_of(draw, length, spacing, times):
        return {draw(2, length, spacing, rng).inputs.shape[1] + 1 for _ in range(times)}

    for length, spacing, drawn in [(16, 4, [4, 8, 12, 16]), (6, 1, [4, 5, 6])]:
        expected = {len(task.roles(each, spacing)) for each in drawn}
        assert tokens_of(task.training_batch, length, spacing, 60) == expected
    assert tokens_of(task.test_batch, 16, 4, 9) == {len(task.roles(16, 4))}


# --- Generation -----------------------------------------------------------------------------------

class Oracle(torch.nn.Module):
    """Writes what is right by hand; its state is all that it read.

    order[i] is the number of the command in the listing that it writes as its i-th. It derives a
    state from all commands that it read, or (last=True) from the state that it read last and the
    command after it. wrong: the number of a state whose first two values it exchanges.
    """

    def __init__(self, task, length, order=None, last=False, wrong=None):
        super().__init__()
        self.task, self.roles = task, task.roles(length, 1)
        self.order = np.arange(length) if order is None else np.array(order)
        self.last, self.wrong = last, wrong

    def next_token(self, read):
        task, past, role = self.task, self.roles[:len(read)], self.roles[len(read)]
        n = task.group.degree
        width = 2 * n + 2
        if role == COMMAND:
            number, at = divmod((past == COMMAND).sum(), width)
            return read[self.order[number] * width + at]
        if role != STATE:
            return 0

        # The right-hand sides that it read, and the values.
        right = read[past == COMMAND].reshape(-1, width)[:, n + 1:-1]
        names = [[task.vocab[x].strip(", ") for x in line] for line in right]
        commands = np.array([[[task.names.index(name) for name in line] for line in names]])
        values = [int(task.vocab[x].strip(", ")) - 1 for x in read[past == STATE]]
        count, start = len(right) - 1, None
        if self.last and count:
            start = np.array([values[(count - 1) * n:count * n]])
            commands = commands[:, -1:]
        state = run_commands(commands, start)[0, -1]
        if count == self.wrong:
            state[:2] = state[1::-1]
        at = len(values) - count * n
        return task.encode(f", {state[at] + 1}" if at else f"{state[at] + 1}")[0]

    def stream(self, tokens, state=None):
        read = tokens if state is None else torch.cat([state, tokens], 1)
        begin = read.shape[1] - tokens.shape[1]
        logits = torch.zeros(*tokens.shape, len(self.task.vocab))
        for row, trace in enumerate(read.numpy()):
            for place in range(begin, min(read.shape[1], len(self.roles) - 1)):
                logits[row, place - begin, self.next_token(trace[:place + 1])] = 1
        return logits, read


def shares(mode, **options):
    """Of commands and of states, of the oracle on six commands of S5."""
    task = task_of("S5")
    row = evaluate_mode(Oracle(task, 6, **options), task, 6, 1, mode, traces=6)
    return row["commands"], row["states"]


@pytest.mark.parametrize("mode", MODES)
def test_a_model_is_right_where_its_own_mistakes_are_not_read(mode):
    """Two commands exchanged: both are lost in each mode, and the states from the first of them
    until both are executed, and after if they do not commute, in own alone. One wrong state, where
    a state is made from the last one: all later states are lost too, unless they are restored."""
    assert shares(mode) == (1, 1)
    assert shares(mode, order=[0, 1, 2, 4, 3, 5]) == (
        pytest.approx(4 / 6, abs=1e-3), pytest.approx(3 / 6, abs=1e-3) if mode == "own" else 1)
    expected = 5 / 6 if mode == "restored" else 2 / 6
    assert shares(mode, last=True, wrong=2) == (1, pytest.approx(expected, abs=1e-3))
    assert shares(mode, wrong=2) == (1, pytest.approx(5 / 6, abs=1e-3))


@pytest.mark.parametrize("name", actions.MAKE)
def test_a_model_reads_its_own_words_just_where_it_is_free(name):
    """What it read, read again at once, gives the same words. The true words are read where they
    are forced, so `restored` is teacher forcing."""
    task = task_of()
    options = {} if name == "lstm" else {"heads": 2}
    model = actions.MAKE[name](len(task.vocab), d_model=16, conv_width=4, **options).double()
    truth = torch.from_numpy(task.write(*task.draw(3, 4, 2, generator(1, "test")))[0])
    roles = task.roles(4, 2)
    for own in MODES.values():
        free = np.isin(roles, own)
        with torch.no_grad():
            said, read = actions.generate(model, truth, free)
        assert torch.equal(said[:, 1:], model(read)[:, :-1].argmax(-1))
        assert torch.equal(read[:, free], said[:, free])
        assert torch.equal(read[:, ~free], truth[:, ~free])
        assert (read != truth).any() == free.any()  # it is not trained, and wrong where it may be


# --- The hybrid, and the study --------------------------------------------------------------------

def test_the_mixers_of_the_hybrid_alternate_and_its_pieces_make_the_whole():
    model = Hybrid(9, d_model=12, heads=3, layers=3, conv_width=3).double()
    assert [type(block) for block in model.blocks[1::2]] == [DeltaBlock, AttentionBlock, DeltaBlock]
    assert model.blocks[1] is not model.blocks[5]
    tokens, state, pieces = torch.randint(9, (2, 23)), None, []
    for piece in tokens.tensor_split([1, 5, 15, 22], 1):
        logits, state = model.stream(piece, state)
        pieces.append(logits)
    assert (torch.cat(pieces, 1) - model(tokens)).abs().max() < 1e-10


@pytest.mark.parametrize("spacing", SPACINGS)
def test_all_arms_read_the_same_tokens_most_of_them_in_the_last_stage(spacing):
    task = task_of()
    cell = {"arm": "lstm", "spacing": spacing, "millions": 5, "seed": 0}
    recipe, tokens = actions.recipe_for(task, cell), []
    for (length, S), count in zip(recipe.curriculum, recipe.stage_steps, strict=True):
        lengths = range(max(S, 4), length + 1, S)
        mean = np.mean([len(task.roles(drawn, S)) for drawn in lengths])
        tokens.append(16 * count * mean / 1e6)
    assert recipe.curriculum[0] == (4, 1) and recipe.curriculum[-1] == (16, spacing)
    assert sum(tokens) == pytest.approx(5, rel=0.01) and not recipe.average
    assert tokens[-1] == pytest.approx(0.7 * 5, rel=0.01)


def test_an_arm_is_trained_evaluated_in_each_mode_and_recorded(tmp_path, monkeypatch):
    """The record is that of its cell, with the keys that the records have."""
    rows = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(actions, "LENGTHS", [4])
    monkeypatch.setattr(actions, "record", lambda name, row: rows.append(row))
    cell = {"arm": "hybrid", "group": "S3", "shown": "one", "spacing": 2, "millions": 0.003,
            "seed": 0}
    actions.run_cell(cell)
    row, = rows
    assert [(test["mode"], test["length"]) for test in row["results"]] == [(x, 4) for x in MODES]
    assert row["finished"] and cell.items() <= row.items() and set(row) < set(
        actions.records("actions")[0])


def test_every_run_of_the_study_has_its_row():
    """So `--run` finds nothing to do."""
    for cell in actions.cells_of_study():
        assert sorted(row["seed"] for row in actions.records("actions", **cell)) == [0, 1, 2]
