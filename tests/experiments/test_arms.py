"""The mixers of the ladder are their recurrences, and a study says what it measured."""

import re
from functools import partial

import experiments
import numpy as np
import pytest
import torch
from data import Group, ReplTask, WordTask, generator
from experiments import arms, records
from models import LanguageModel


# --- The mixers -----------------------------------------------------------------------------------

def gated_loop(q, k, v, beta, alpha, state):
    """S <- alpha S, then a write for each r, then the read S^T q; explicit matrices."""
    out = []
    for t in range(q.shape[-2]):
        state = alpha[..., t, None, None] * state
        for r in range(k.shape[-2]):
            k_K1 = k[..., t, r, :, None]
            step = torch.eye(k.shape[-1]) - beta[..., t, r, None, None] * k_K1 @ k_K1.mT
            write = beta[..., t, r, None, None] * k_K1 @ v[..., t, r, None, :]
            state = step @ state + write
        out.append((state.mT @ q[..., t, :, None])[..., 0])
    return torch.stack(out, -2), state


def test_the_gated_scan_is_the_loop_in_values_and_gradients():
    """S_t = alpha_t (I - beta k k^T) S_{t-1} + beta k v^T; T = 45 is no multiple of a piece."""
    torch.set_default_dtype(torch.float64)
    try:
        q, k, v = torch.randn(2, 3, 45, 5), torch.randn(2, 3, 45, 2, 5), torch.randn(2, 3, 45, 2, 7)
        k = torch.nn.functional.normalize(k, dim=-1)
        beta, alpha = 2 * torch.rand(2, 3, 45, 2), (1 + torch.rand(2, 3, 45)) / 2
        inputs = [x.requires_grad_() for x in (q, k, v, beta, alpha, torch.randn(2, 3, 5, 7))]
        found = []
        for scan in (arms.gated_product, gated_loop):
            out, state = scan(*inputs)
            gradients = torch.autograd.grad(out.sin().sum() + state.cos().sum(), inputs)
            found.append([out, state, *gradients])
        for ours, exact in zip(*found):
            assert (ours - exact).abs().max() < 1e-10
    finally:
        torch.set_default_dtype(torch.float32)


def model_of(name, task):
    """The model of an arm, or of a rung."""
    if name in arms.RUNGS:
        width, layers, make_mixer = arms.RUNGS[name]
        return LanguageModel(len(task.vocab), width, layers, 8, make_mixer)
    return arms.make_arm(name, task)


@pytest.mark.parametrize("name", [*arms.ARMS, *arms.RUNGS])
def test_a_stream_in_pieces_is_the_whole(name):
    """State out, state in, at places that no mixer's own pieces or chunks know."""
    model = model_of(name, ReplTask(Group("S3"))).double()
    for weight in model.parameters():
        weight.data *= 1.5  # gates and angles leave the middle of their range
    tokens = torch.randint(7, (2, 40))
    state, pieces = None, []
    for piece in tokens.tensor_split([1, 3, 30], 1):
        logits, state = model.stream(piece, state)
        pieces.append(logits)
    assert (torch.cat(pieces, 1) - model(tokens)).abs().max() < 1e-10


def test_each_transition_is_as_free_as_its_name_says():
    """Diagonal: a in [smallest, 1], both reached. Rotations: |a| = 1, and the state of a dense
    rotation keeps its length but not its direction."""
    x = 100 * torch.randn(2, 40, 64)
    for smallest in (-1.0, 0.0):
        block = arms.DiagonalBlock(64, smallest)
        block.project.weight.data *= 100
        a, _, _ = block.coefficients(x)
        assert a.min() == smallest and a.max() == 1
    a, _, _ = arms.RotationBlock(64).coefficients(x)
    assert (a.abs() - 1).abs().max() < 1e-6 and a.angle().std() > 0.5

    block = arms.DenseBlock(64, width=5).double()
    _, h = block(x.double())
    assert (h.norm(dim=-1) - block.start.norm()).abs().max() < 1e-10
    assert (h - block.start).abs().max() > 0.1


def test_a_counter_is_what_odd_words_negate_and_even_words_keep():
    """Set by hand: one element is negated by odd words of S3, one is a memory, all others fade."""
    task = WordTask(Group("S3"))
    model = LanguageModel(6, 8, 1, 2, lambda: arms.DiagonalBlock(8, -1.0))
    model.blocks[0].out.weight.data.zero_()  # no neighbour is seen
    model.embedding.weight.data = torch.eye(6, 8)
    weights, bias = model.blocks[1].project.weight.data, model.blocks[1].project.bias.data
    weights.zero_()
    bias[3] = 9.0  # kept by all words
    assert arms.count(model, task) == {"elements": 0}

    odd = torch.tensor([sum(g[i] > g[j] for j in range(3) for i in range(j)) % 2 == 1
                        for g in task.group.elements])
    weights[2, :6] = 9 * (1 - 2 * odd.float())  # the norm keeps a one-hot's place
    assert arms.count(model, task)["elements"] == 1


# --- The studies ----------------------------------------------------------------------------------

def test_a_study_makes_what_is_missing_and_skips_what_is_recorded(tmp_path, monkeypatch):
    """Two cells of the ladder with a thousand tokens each: a row for each, once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    monkeypatch.setattr(arms, "evaluate_and_print", partial(arms.evaluate_and_print, traces=2))
    cells = arms.grid(arm=["rotations"], group=["S2"], millions=[0.001], seed=[0, 1])
    study = arms.STUDIES["ladder"]
    arms.make_missing(study._replace(cells=cells[1:]))
    monkeypatch.setitem(arms.STUDIES, "ladder", study._replace(cells=cells))
    for _ in range(2):
        arms.main(["--run", "ladder"])
    rows = records("ladder")
    assert [row["seed"] for row in rows] == [1, 0]
    assert all(cell.items() <= row.items() for cell, row in zip(cells[::-1], rows))
    assert all(1000 <= row["tokens"] < 3000 and not row["finished"] for row in rows)
    assert [result["length"] for result in rows[0]["results"]] == [64, 256]


@pytest.mark.parametrize("part", arms.STUDIES)
def test_every_plan_can_be_trained(part):
    """One batch of the first stage of each kind of cell: the model reads it, and its rates fit."""
    study = arms.STUDIES[part]
    kinds = {(cell.get("arm"), cell.get("format")): cell for cell in study.cells
             if cell.get("group") != "A5"}
    for cell in kinds.values():
        task, make_model, recipe, lengths = study.plan(cell)
        length, spacing = recipe.curriculum[0]
        batch = task.training_batch(2, length, spacing, generator(0, "train", 0))
        logits = make_model()(torch.from_numpy(batch.inputs))
        assert logits.shape == (*batch.inputs.shape, len(task.vocab)) and logits.isfinite().all()
        assert recipe.seed == cell["seed"] and bool(lengths) == (part != "rates")


def test_the_rates_are_the_best_of_the_recorded_grid():
    """Passed on the most seeds, and then with the fewest tokens on average."""
    for arm, rates in arms.EASED_RATES.items():
        merit = {}
        for row in records("arms_rates", arm=arm):
            cell = records("arms_rates", arm=arm, optimizer=row["optimizer"], lr=row["lr"])
            assert len(cell) == 3
            tokens = [row["tokens"] for row in cell if row["finished"]]
            merit[row["optimizer"], row["lr"]] = len(tokens), -np.mean(tokens or [np.inf])
        assert max(merit, key=merit.get) == (rates["optimizer"], rates["lr"])


def test_equal_time_reads_the_curve_where_the_minutes_are_over():
    """After 3 of 6 minutes half of the tokens are read. A run of one minute is at its end."""
    row = {"tokens": 100, "minutes": 6.0, "curve": [[40, 2, 0.5], [50, 4, 0.25], [60, 8, 0.75]]}
    length, right = arms.after_equal_minutes(1, 0), arms.after_equal_minutes(2, 1)
    assert (length([row]), right([row])) == ("4", "25.0")
    assert (length([row | {"minutes": 1.0}]), right([row | {"minutes": 1.0}])) == ("8", "75.0")


def test_what_the_chapter_says_is_what_its_records_say(capsys):
    """The finding of the docstring, and a line of every table, from the records."""
    arms.main([])
    shown = {}
    for line in capsys.readouterr().out.splitlines():
        name, *cells = re.split(r"  +", line)
        shown.setdefault(name, cells)  # the table of equal time has the names again
    assert shown["linrnn, 15"][:3] == ["5 of 5", "6", "2.9-3.4"]
    assert shown["linrnn, 15"][-1] == "100.0"
    for arm in ("linrnn-beta1", "transformer", "lstm"):
        assert shown[f"{arm}, 15"][0] == "0 of 5"
    assert shown["transformer, 15"][1] == "3" and shown["lstm, 15"][1] == "2"
    assert shown["transformer, 15"][6] == "63.6-65.9" and shown["lstm, 15"][5] == "57.8-61.7"
    assert shown["transformer, more layers, 5"][6] == "82.7-83.8"
    deep = shown["transformer, more layers, 15"]
    assert deep[:2] == ["0 of 3", "4"] and deep[7] == "39.2-76.4"
    assert shown["transformer, 5"][6] == "54.4-55.3"
    assert shown["lstm, more layers, 5"][4] == "86.3-89.1" and shown["lstm, 5"][4] == "75.6-77.7"
    assert shown["linrnn-beta1, more layers, 5"][7] == "85.6-86.5"
    assert shown["linrnn-beta1, rates fall to 0, 5"][7] == "87.9-89.1"
    assert shown["linrnn-beta1, 5"][7] == "77.1-80.3"
    passed = {arm: sum(row["stage_reached"] > 1 for row in records("arms", arm=arm, group="S5",
                                                                  commands="full", millions=15))
              for arm in ("transformer", "lstm")}
    assert passed == {"transformer": 3, "lstm": 0}
    assert shown["4 reflections"][4:6] == ["100.0", "99.8-100.0"]  # A5
    assert shown["S3, linrnn, 2:1"][-2:] == ["2 of 3", "33.6-100.0"]
    for group, householders, learned in [
            ("S3", 1, "0 of 3"), ("S3", 2, "5 of 5"), ("S3", 3, "3 of 3"), ("S3", 4, "3 of 3"),
            ("S4", 1, "0 of 3"), ("S4", 2, "5 of 5"), ("S4", 3, "3 of 3"), ("S4", 4, "3 of 3"),
            ("A5", 1, "0 of 3"), ("A5", 2, "3 of 3"), ("A5", 3, "3 of 3"), ("A5", 4, "3 of 3"),
            ("S5", 1, "0 of 3"), ("S5", 2, "0 of 3"), ("S5", 3, "0 of 3"), ("S5", 4, "5 of 5")]:
        rows = records("reflections", format="word", group=group, householders=householders,
                       commands="full")
        solved = sum(row["results"][1]["all"] >= 0.995 for row in rows)
        assert f"{solved} of {len(rows)}" == learned
