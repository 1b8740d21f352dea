"""The rule for many variables, the runs without a part of it, and the plan for other sizes."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from data import Group, ReplTask
from experiments import records, scale
from experiments.scale import ARMS, Arm, make_recipe, make_task
from models import LinRNN


# --- The rule, and the rule without a part --------------------------------------------------------

@pytest.mark.parametrize("part, changed", [
    ("none", set()), ("rate", {"rate"}), ("reveals", {"reveals"}), ("exchanges", {"exchanges"}),
    ("last steps", {"last steps"}), ("rehearsal", {"rehearsal", "last steps"}),
    ("all", {"rate", "reveals", "exchanges", "rehearsal", "heads", "last steps"})])
def test_an_arm_lacks_the_part_that_it_names_and_nothing_else(part, changed):
    def parts(task):
        return {"rate": task.recipe_options.get("lr"),
                "last steps": task.recipe_options.get("last_steps"),
                "reveals": task.rule.reveals_in_a_row, "exchanges": task.sparse,
                "rehearsal": task.rule.sparse_commands, "heads": task.model_options}

    whole, left = parts(make_task(Arm("S12"))), parts(make_task(Arm("S12", without=part)))
    assert {name for name in whole if whole[name] != left[name]} == changed


# --- The runs and their tables --------------------------------------------------------------------

def test_a_study_trains_what_has_no_record_with_the_options_of_the_rule(monkeypatch):
    def untrained(name, cell, make_model, task, recipe, **_):
        return None if cell["seed"] == 0 and recipe.lr == 2.5e-3 else (make_model(), {})

    rows = []
    monkeypatch.setattr(scale, "train_arm", untrained)
    monkeypatch.setattr(scale, "evaluate_and_print", lambda *_: [])
    monkeypatch.setattr(scale, "record", lambda name, row: rows.append(row))
    monkeypatch.setattr(scale, "show", lambda arms: None)
    monkeypatch.setattr(scale, "ARMS", [Arm("S8", seeds=2), Arm("S8", without="all", seeds=1),
                                        Arm("S8", model="lstm", seeds=1), Arm("S9")])
    scale.main(["--run", "--group", "S8"])
    rule, none, lstm = rows
    assert (rule["seed"], rule["options"]["heads"], rule["lr"]) == (1, 2, 2.5e-3)
    assert (none["without"], none["options"]["heads"], none["lr"]) == ("all", 4, 4e-3)
    assert lstm["options"] == {"d_model": 64, "layers": 1, "conv_width": 11}


def test_every_record_is_a_run_of_the_study_and_every_run_has_one():
    """With the rates and the sizes that the rule, or what is left of it, says."""
    found = []
    for arm in ARMS:
        rows = scale.records_of(arm)
        assert sorted(row["seed"] for row in rows) == list(range(arm.seeds)), arm
        task = make_task(arm)
        recipe = make_recipe(arm, task, 0)
        for row in rows:
            assert (row["lr"], row["matrix_lr"]) == (recipe.lr, recipe.matrix_lr)
            assert row["stage_reached"] == len(recipe.curriculum) or not row["finished"]
            for name in row["options"].keys() & task.model_options.keys():
                assert row["options"][name] == task.model_options[name]
        found += rows
    assert len(found) == len(records("scale"))


def test_the_sentences_about_the_records_are_true():
    """Those of the chapter's first lines."""
    rule = [arm for arm in ARMS if arm.without == "none" and arm.model == "linrnn"]
    full = {arm.group: scale.records_of(arm) for arm in rule if arm.commands == "full"}
    solved = {name: sum(map(scale.is_solved, rows)) for name, rows in full.items()}
    assert solved == {"S3": 3, "S5": 3, "S8": 3, "S12": 3, "S16": 1, "S20": 2, "S26": 2}
    assert 0.999 <= min(scale.right_at(row, 64) for rows in full.values() for row in rows)

    tokens = {name: np.mean([row["tokens"] for row in rows]) for name, rows in full.items()}
    assert round(tokens["S26"] / tokens["S5"], 1) == 14.0

    def waits(without):
        return [scale.wait(row) for row in scale.records_of(Arm("S12", without=without))]
    assert min(waits("exchanges")) > 3 * max(waits("none"))
    assert 1.7 < np.mean(waits("reveals")) / np.mean(waits("none")) < 2.2


# --- The plan -------------------------------------------------------------------------------------

def model_of(group, **options):
    """Its shapes, without memory."""
    with torch.device("meta"):
        return LinRNN(len(ReplTask(Group(group)).vocab), **options)


def test_the_costs_of_a_step_are_those_of_its_weights_tokens_and_traces():
    """FLOPs: at least six for each weight and token, two forward and four backward; the scan adds
    its own. State: layers x heads x K x K numbers of four bytes and conv_width - 1 inputs, for each
    trace. What is kept for the backward grows with the tokens, and not with the weights."""
    model = model_of("S3", d_model=12, heads=3, layers=2, conv_width=5)
    dense = sum(weight.numel() for weight in model.parameters() if weight.ndim > 1)
    dense -= model.embedding.weight.numel()
    flops, kept, state = scale.cost(model, 2, 64)
    assert 6 * dense * 2 * 64 < flops < 2 * 6 * dense * 2 * 64
    assert state == 2 * 4 * (2 * 3 * 4 * 4 + 4 * 12)
    twice, longer, _ = scale.cost(model, 2, 128)
    assert 1.99 < longer / kept < 2.01 and twice == 2 * flops


@pytest.mark.parametrize("name", ["S5", "S8", "S20", "S26"])
def test_a_plan_is_within_a_factor_of_two_of_the_recorded_minutes(name):
    """On as many cores as the run had threads; the median of its seeds."""
    rows = scale.records_of(Arm(name))
    flops, _, _ = scale.cost(model_of(name, **rows[0]["options"]), 1, 512)
    seconds = [60 * row["minutes"] * row["threads"] / row["tokens"] for row in rows]
    assert 0.5 < flops / 512 / scale.ONE_CORE / np.median(seconds) < 2


def test_a_plan_names_weights_and_hours_and_a_group_without_runs_is_refused(capsys, refused):
    scale.main("--plan --group S3 --d-model 32 --heads 2 --lengths 2:1,4:2 --batch 2 "
               "--flops 1e6".split())
    shown = capsys.readouterr().out
    model = model_of("S3", d_model=32, heads=2, conv_width=6)
    assert f"{sum(weight.numel() for weight in model.parameters()):,} weights" in shown
    rows = [line.split() for line in shown.splitlines() if line.lstrip().startswith("(")][1:]
    for (_, tokens, flops, *_, hours), (length, spacing) in zip(rows, [(2, 1), (4, 2)]):
        assert int(tokens) == 15 + 9 * length + 11 * length // spacing - 1
        assert float(hours) == pytest.approx(15000 / 3600 * int(tokens) * float(flops), rel=0.1)
    refused(scale.main, ["--group", "S4"], "S4", "S3, S5")


def test_the_scan_of_a_rounded_model_reads_bfloat16_and_nothing_else_changes(monkeypatch):
    """q, k and v are numbers that bfloat16 can hold; beta and the state are handed on as they are.
    """
    model, scan = LinRNN(7, d_model=8, heads=2), Mock()
    model.blocks[1].scan = scan
    monkeypatch.setattr(scale, "load_run", lambda folder: (None, None, model))
    monkeypatch.setattr(scale, "evaluate_and_print", Mock())
    scale.main(["--rounded", "RUN"])

    exact = torch.randn(5, 9)  # q, k, v, beta, state
    model.blocks[1].scan(*exact)
    read = torch.stack(scan.call_args.args)
    assert torch.equal(read[:3], exact[:3].bfloat16().float()) and (read != exact)[:3].any()
    assert torch.equal(read[3:], exact[3:])
