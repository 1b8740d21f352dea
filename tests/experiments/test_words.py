"""Words: labels are products, training starts easy, and the ladder's mixers are what they claim."""

import numpy as np
import pytest
import torch

import eval
from data import Group, generator
from experiments import groups, records, words
from eval import make_model
from train import Progress, Recipe


@pytest.mark.parametrize("name, commands", [("S4", "swap"), ("A4xZ5", "full")])
def test_the_label_after_each_word_is_the_product_so_far(name, commands):
    """By lists of Python: a word g turns the state s into [s[g[0]], s[g[1]], ...]."""
    task = words.WordTask(words.group_of(name), commands)
    inputs, targets, counts = task.test_batch(6, 9, 3, generator(0, "test"))
    for row, labels in zip(inputs, targets):
        state = list(range(task.group.degree))
        for word, label in zip(row, labels):
            state = [state[i] for i in task.group.elements[word]]
            assert state == task.group.elements[label].tolist()
    assert counts.tolist() == 6 * [[False, False, True] * 3]


@pytest.mark.parametrize("name, easy_to", [("S5", 16), ("A5", 0)])
def test_training_shows_easy_words_of_large_groups_in_short_traces_only(name, easy_to):
    """Of two words the one that moves fewer points, and yet every word; as many words a stage."""
    task = words.TaughtWords(Group(name))
    uniform = groups.points_moved(task.group.elements).mean()
    for length in (2, 16, 32, 128):
        inputs = task.training_batch(50, length, 1, generator(0, "train")).inputs
        assert inputs.shape == (50 * 128 // length, length)
        assert len(np.unique(inputs)) == task.group.order
        moved = groups.points_moved(task.group.elements[inputs]).mean()
        assert moved < uniform - 0.3 if length <= easy_to else abs(moved - uniform) < 0.1
    assert task.training_batch(4, words.QUIET, 1, generator(0, "train")).inputs.shape == (2, 512)


def test_rates_fall_to_nothing_over_128_words_and_again_from_a_tenth_over_the_quiet_end():
    recipe = words.recipe_of(Group("S5"), seed=0)
    assert recipe.lr == recipe.matrix_lr  # one share holds for both
    for stage, share, rate in ((4, 0.0, recipe.lr), (5, 0.0, recipe.lr), (5, 0.75, recipe.lr / 4),
                               (6, 0.0, words.QUIET_RATE), (6, 0.75, words.QUIET_RATE / 4)):
        stage_step = share * (recipe.steps_of(stage) or 1000)
        progress = Progress(step=6000, stage=stage, stage_step=stage_step)
        assert abs(recipe.lr * words.falls_twice(recipe, progress) - rate) < 1e-12
    assert words.falls_twice(recipe, Progress(step=24)) == 0.5


def test_writes_begin_as_reflections_and_nothing_else_is_moved():
    """beta is near 0.9 of 2, and all other weights are those of the seed."""
    config = words.config_of_words({"group": "S3", "householders": 3, "seed": 4})
    task, model = words.make_run(config)
    plain = make_model(config, task)
    _, _, _, beta = model.blocks[0].inputs_of_scan(model.embedding(torch.arange(6)[None]))
    assert beta.shape == (1, 8, 6, 3) and 1.7 < beta.mean() < 1.9
    moved = [(a != b).sum().item() for a, b in zip(model.parameters(), plain.parameters())]
    assert sum(moved) == 8 * 3


@pytest.mark.parametrize("rung", ["diagonal, -1 to 1", "rotations", "1 reflection, signs", "dense"])
def test_a_stream_in_two_pieces_is_the_whole(rung):
    model = words.RUNGS[rung](7).double()
    tokens = torch.randint(7, (2, 40))
    first, state = model.stream(tokens[:, :7])
    rest, _ = model.stream(tokens[:, 7:], state)
    assert (torch.cat([first, rest], 1) - model(tokens)).abs().max() < 1e-10


def test_signs_and_one_reflection_are_the_loop_of_their_equation():
    """S <- (I - beta k k^T) Diag(s) S + beta k v^T, read by q: a token after the other."""
    torch.manual_seed(0)
    block = words.SignedBlock(12, heads=2).double()
    x = torch.randn(3, 30, 12, dtype=torch.float64)
    q, k, v, beta = block.inputs_of_scan(x)
    signs = torch.where(block.signs(block.norm(x)) < 0, -1.0, 1.0)
    assert -0.5 < signs.mean() < 0.5
    signs = signs.unflatten(-1, (2, 6)).transpose(1, 2)

    state = torch.zeros(3, 2, 6, 6, dtype=torch.float64)
    reads = []
    for t in range(30):
        state = signs[:, :, t, :, None] * state
        key = k[:, :, t, 0]
        wrong = v[:, :, t, 0] - torch.einsum("bhkv,bhk->bhv", state, key)
        state = state + beta[:, :, t, 0, None, None] * key[..., None] * wrong[..., None, :]
        reads.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    out = block.out_norm(torch.stack(reads, 2)).transpose(1, 2).flatten(2)
    assert (x + block.out(out) - block(x)[0]).abs().max() < 1e-10

    block(x)[0].square().sum().backward()
    assert block.signs.weight.grad.abs().min() > 0


def test_each_transition_is_as_free_as_its_name_says():
    """Diagonal: a in [smallest, 1], both reached. Rotations: |a| = 1. Dense: lengths are kept."""
    x = 100 * torch.randn(2, 40, 64)
    for smallest in (-1.0, 0.0):
        block = words.DiagonalBlock(64, smallest)
        block.project.weight.data *= 100
        a, _, _ = block.coefficients(x)
        assert a.min() == smallest and a.max() == 1
    a, _, _ = words.RotationBlock(64).coefficients(x)
    assert (a.abs() - 1).abs().max() < 1e-6 and a.angle().std() > 0.5

    block = words.DenseBlock(64, width=5).double()
    _, h = block(x.double())
    assert (h.norm(dim=-1) - block.start.norm()).abs().max() < 1e-10
    assert (h - block.start).abs().max() > 0.1


def test_a_run_of_words_is_read_by_its_own_command_only(tmp_path, monkeypatch, capsys, refused):
    """eval prints the table of the training, and eval.py refuses the run."""
    short = Recipe(curriculum=[(2, 1), (4, 1)], stage_steps=[2, 3], batch=2)
    monkeypatch.setattr(words, "recipe_of", lambda group, seed: short)
    folder = tmp_path / "run"
    tables = []
    for command in (["train", "S3", "--out", folder], ["eval", folder]):
        words.main([*map(str, command), "--lengths", "4:1,6:1"])
        lines = capsys.readouterr().out.partition("     (L,S)")[2].splitlines()
        tables.append([line for line in lines if line.lstrip().startswith(("(", "along"))])
    assert tables[0] == tables[1] and len(tables[0]) == 4
    refused(eval.main, [folder], "words")


def test_each_cell_has_one_record_and_each_record_its_cell():
    for name, cells in (("ladder", words.LADDER), ("reflections", words.REFLECTIONS),
                        ("words", words.OTHERS)):
        assert {len(records(name, **cell)) for cell in cells} == {1}
        assert len(records(name)) == len(cells)
