"""The easier training traces of many variables, the rule for n, and a run that is made by both."""

import numpy as np
import pytest
from conftest import session, typed_lines

import eval
import train
from data import Group, ReplTask, generator
from experiments import records, scale
from experiments.groups import draw_sparse_commands, points_moved
from experiments.scale import CELLS, ManyVariables, plan, rule_for
from train import Progress, Recipe


def with_exchange(task, batch):
    """The numbers of the traces in which a full command moves two variables, by their text."""
    found = []
    for number, row in enumerate(batch.inputs):
        for line in typed_lines(task.decode(row)):
            left, _, right = line.partition(" = ")
            pairs = zip(left.split(", "), right.split(", "))
            if "," in left and "print" not in left and sum(a != b for a, b in pairs) == 2:
                found.append(number)
                break
    return found


@pytest.mark.parametrize("name, commands, in_a_row", [("S9", "full", 2), ("S12", "swap", 3)])
def test_a_training_trace_is_a_python_session_with_reveals_in_a_row(name, commands, in_a_row):
    task = ManyVariables(Group(name), commands)
    batch = task.training_batch(3, 6, 2, generator(0, "valid"))
    for row, rest in zip(batch.inputs, batch.targets):
        text = task.decode([row[0], *rest])
        assert session(typed_lines(text)) == text
        assert text.count("print") == 6 // 2 * in_a_row
    assert (batch.reveals.sum(1) == 6 // 2 * in_a_row).all()


def test_each_reveal_in_a_row_asks_any_variable_whatever_the_others_ask():
    """All 64 pairs of two reveals side by side are equally likely. If they asked the same variable,
    the second would say nothing of the state."""
    batch = ManyVariables(Group("S8")).training_batch(800, 8, 1, generator(0, "train"))
    traces, places = batch.reveals.nonzero()
    asked = batch.inputs[traces, places - 1].reshape(-1, 2)  # `b` of `b 3`
    found, counts = np.unique(asked, axis=0, return_counts=True)
    assert len(found) == 64 and np.abs(counts - counts.mean()).max() < 6 * counts.mean()**0.5


def test_exchanges_fill_the_stages_with_a_reveal_a_command_and_one_trace_in_sixteen_later():
    """A uniform command of S12 moves just two variables once in seven million times."""
    task = ManyVariables(Group("S12"))

    def found(batch, spacing, task=task):
        return with_exchange(task, task.training_batch(batch, 64, spacing, generator(0, "valid")))
    assert found(16, 1) == list(range(16))
    assert found(16, 8) == [0] and found(17, 2) == [0, 1]
    assert not with_exchange(task, task.test_batch(16, 96, 1, generator(0, "test")))
    assert not found(16, 1, ManyVariables(Group("S12"), sparse=False))


def test_with_few_variables_later_stages_are_those_of_the_plain_task():
    mine, plain = ManyVariables(Group("S5")), ReplTask(Group("S5"))
    for a, b in zip(mine.training_batch(4, 8, 2, generator(1, "train")),
                    plain.training_batch(4, 8, 2, generator(1, "train"))):
        assert np.array_equal(a, b)


def test_sparse_commands_are_products_of_one_to_n_exchanges_equally_often():
    """The sign of k exchanges is (-1)^k, so of S3 two products in three are odd: k = 1 and 3."""
    drawn = draw_sparse_commands(Group("S3"), (60, 50), np.random.default_rng(0))
    assert drawn.shape == (60, 50, 3)
    assert (points_moved(drawn) == 2).mean() == pytest.approx(2 / 3, abs=0.03)


def test_a_head_has_room_for_the_2n_slots_and_the_rates_fall_from_those_of_five_variables():
    for n in range(3, 27):
        options, recipe = rule_for(n)
        width = options.get("d_model", 64) / options.get("heads", 4)
        assert width == int(width) >= 2 * n and options["conv_width"] > n
        assert recipe["lr"] == pytest.approx(4e-3 * min(1, 5 / n))
        assert recipe["matrix_lr"] ** 2 == pytest.approx(0.02**2 * min(1, 5 / n))


def test_above_twelve_variables_traces_grow_to_256_commands_and_the_rates_fall_over_the_last():
    """A step has no more commands than one of (64,8). With fewer variables nothing changes."""
    for n, last in ((12, (64, 8)), (16, (256, 8))):
        recipe = Recipe(**rule_for(n)[1])
        assert recipe.curriculum[-1] == last
        middle = Progress(step=2000, stage=recipe.last_stage, stage_step=70)
        share = scale.falls_over_long_traces(recipe, middle)
        assert share == (1 if n == 12 else 0.5)
        assert scale.falls_over_long_traces(recipe, Progress(step=2000, stage=4)) == 1

    task = ManyVariables(Group("S13"))
    for length, rows in ((8, 16), (64, 16), (128, 8), (256, 4)):
        assert len(task.training_batch(16, length, 8, generator(0, "train")).inputs) == rows


def test_each_cell_has_one_record_of_a_model_as_the_rule_makes_it():
    assert len(records("scale")) == len(CELLS)
    for cell in CELLS:
        row, = records("scale", **cell)
        if cell["seed"] == 0:
            model = plan(cell)[1]()
            assert row["parameters"] == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("part, in_a_row, sparse", [
    ("none", 3, 16), ("reveals", 1, 16), ("exchanges", 3, 0)])
def test_a_run_lacks_the_part_that_it_names_and_nothing_else(part, in_a_row, sparse):
    task = plan({"group": "S12", "commands": "full", "without": part, "seed": 0})[0]
    batch = task.training_batch(16, 48, 1, generator(0, "valid"))
    assert (batch.reveals.sum(1) == 48 * in_a_row).all()
    assert len(with_exchange(task, batch)) == sparse


def test_a_run_is_read_by_eval_and_goes_on_with_its_own_traces(tmp_path, monkeypatch, refused,
                                                               small_run):
    small = {"d_model": 8, "heads": 2}, {"curriculum": [(4, 2)], "batch": 2, "stage_steps": [1]}
    monkeypatch.setattr(scale, "rule_for", lambda n: small)
    folder = str(tmp_path / "run")
    scale.main(f"train S8 --seed 3 --out {folder} --lengths 4:2 --traces 4 --device cpu".split())
    task, _ = eval.load(folder)
    assert type(task) is ReplTask and task.group.name == "S8"

    called = []
    monkeypatch.setattr(scale, "train_run", lambda *arguments, **hooks: called.append(arguments))
    scale.main(["train", "--resume", folder])
    (task, _, config, _), = called
    assert type(task) is ManyVariables and task.sparse and config["seed"] == 3

    refused(scale.main, ["train"], "group")
    refused(scale.main, ["train", "A8"], "S<n>", "A8")
    refused(scale.main, ["train", "S8", "--resume", folder], "group")
    refused(scale.main, ["train", "--resume", small_run], "not made by")
    refused(train.main, ["--resume", folder], "not made by")  # it would go on with other traces
