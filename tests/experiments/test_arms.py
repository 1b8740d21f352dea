"""The gated scan is its recurrence, and every arm can be trained."""

import numpy as np
import torch
import torch.nn.functional as F
from conftest import typed_lines

from data import Group, ReplTask, generator
from experiments import arms, records, where
from train import Progress, Recipe


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
    q, k, v, beta, alpha, state = [x.double() for x in (
        torch.randn(2, 3, 45, 5), F.normalize(torch.randn(2, 3, 45, 2, 5), dim=-1),
        torch.randn(2, 3, 45, 2, 7), 2 * torch.rand(2, 3, 45, 2), (1 + torch.rand(2, 3, 45)) / 2,
        torch.randn(2, 3, 5, 7))]
    inputs = [x.requires_grad_() for x in (q, k, v, beta, alpha, state)]
    found = []
    for scan in (arms.gated_product, gated_loop):
        out, state = scan(*inputs)
        gradients = torch.autograd.grad(out.sin().sum() + state.cos().sum(), inputs)
        found.append([out, state, *gradients])
    for ours, exact in zip(*found):
        assert (ours - exact).abs().max() < 1e-10


def test_every_arm_reads_its_task_whole_and_in_pieces():
    """A batch of each arm's first stage; the pieces end where no mixer's own pieces do."""
    cells = {cell["arm"]: cell for cell in [*arms.CELLS, *arms.RATE_CELLS]}
    assert cells.keys() == arms.ARMS.keys()
    for cell in cells.values():
        task, make_model, recipe, _ = arms.plan(cell)
        tokens, _, _ = task.training_batch(2, *recipe.curriculum[0], generator(0, "train", 0))
        model = make_model().double()
        state, pieces = None, []
        for piece in torch.from_numpy(tokens).tensor_split([1, 3, 40], 1):
            logits, state = model.stream(piece, state)
            pieces.append(logits)
        assert (torch.cat(pieces, 1) - model(torch.from_numpy(tokens))).abs().max() < 1e-10


def test_each_stage_trains_on_as_many_commands():
    """Batches have as many traces in every stage, so a stage of length L must come as 1 / L."""
    task, rng = arms.AllStages(Group("S5")), generator(0, "train", 0)
    drawn = [task.training_batch(1, 64, 8, rng).inputs.shape[1] for _ in range(3000)]
    tokens = {length: ReplTask(Group("S5")).training_batch(1, length, spacing, rng)
              .inputs.shape[1] for length, spacing in arms.STAGES}
    total = sum(1 / length for length in tokens)
    for length, width in tokens.items():
        expected = 3000 / length / total
        assert abs(drawn.count(width) - expected) < 4 * expected**0.5


def test_commands_are_easy_where_each_has_a_reveal_and_uniform_elsewhere():
    """One uniform command of S5 in twelve moves two variables, but nearly one in three of those
    that are made of one to five exchanges: all if it is one, a third if three, a fifth if five."""
    task, rng = arms.AllStages(Group("S5")), generator(0, "train", 0)
    pairs = {True: [], False: []}
    for _ in range(40):
        batch = task.training_batch(6, 64, 8, rng)
        for row in batch.inputs:
            lines = [line for line in typed_lines(task.decode(row)) if ", e = " in line]
            moved = [sum(x != y for x, y in zip(line[:13:3], line[16::3])) for line in lines]
            pairs[len(lines) <= 8].extend(moved)
    found = {easy: np.mean(np.array(moved) == 2) for easy, moved in pairs.items()}
    assert found[True] > 0.22 and abs(found[False] - 10 / 120) < 0.03


def test_the_rates_fall_to_zero_over_the_cap_and_the_last_tenth_enters_the_mean():
    recipe = Recipe(curriculum=[(64, 8)])
    at = lambda millions: Progress(step=10**4, tokens=millions * 10**6)
    shares = [arms.cosine(recipe, at(millions), cap=8e6) for millions in (0, 2, 4, 6, 8)]
    assert np.allclose(shares, [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0])
    rising = [arms.cosine(recipe, Progress(step=step), 8e6, warmup=500) for step in (0, 249, 499)]
    assert np.allclose(rising, [1 / 500, 1 / 2, 1])
    entered = [arms.in_last_tenth(recipe, at(millions), cap=10e6) for millions in (0, 8, 9, 10)]
    assert entered == [False, False, True, True]


def test_both_rates_of_an_arm_have_its_factor_and_a_gated_arm_those_of_its_relative():
    def rates(arm):
        _, _, recipe, _ = arms.plan({"arm": arm, "seed": 0})
        return recipe.optimizer, recipe.lr, recipe.matrix_lr

    assert rates("lstm") == ("adamw", 8 * 5e-4, 8 * 5e-4)
    assert rates("linrnn") == ("muon", 0.5 * 2e-3, 0.5 * 0.01) == rates("gated")
    assert rates("transformer-4") == ("muon", 1e-3, 5e-3) == rates("gated-beta1")
    assert rates("transformer") == ("muon", 2e-3, 0.01)
    _, _, tried, _ = arms.plan({"arm": "linrnn", "factor": 0.25, "seed": 0})
    assert (tried.lr, tried.matrix_lr) == (0.25 * 2e-3, 0.25 * 0.01)

    # Another optimiser comes with a pair of its own.
    for arm, optimizer, pair in [("transformer-4", "adamw", (5e-4, 5e-4)),
                                 ("lstm", "muon", (1e-3, 5e-3))]:
        _, _, tried, _ = arms.plan({"arm": arm, "optimizer": optimizer, "factor": 2, "seed": 0})
        assert (tried.optimizer, tried.lr, tried.matrix_lr) == (optimizer, *(2 * x for x in pair))


def test_the_state_of_an_arm_is_what_its_mixers_carry():
    """Heads of K x V numbers; a hidden vector and a cell; keys and values of each layer."""
    for arm, expected in [("linrnn", f"{4 * 16 * 16:,}"), ("gated", f"{4 * 16 * 16:,}"),
                          ("lstm", "120"), ("lstm-512", f"{2 * 512:,}"),
                          ("transformer-4", f"{4 * 2 * 56} a token")]:
        assert arms.state_of([{"arm": arm}]) == expected


def test_each_record_has_its_cell():
    """No table reads what no plan makes, and no cell was made twice."""
    for name, cells in [("arms", arms.CELLS), ("arms_rates", arms.RATE_CELLS),
                        ("arms_tries", arms.TRIES), ("arms_spacing", arms.SPACING_CELLS)]:
        rows = records(name)
        assert max(len(where(rows, **cell)) for cell in cells) == 1
        assert all(any(cell.items() <= row.items() for cell in cells) for row in rows)


def test_each_arm_has_the_best_of_its_rates_and_the_best_lies_inside():
    for arm, factor in arms.FACTORS.items():
        rows = sorted(records("arms_rates", arm=arm), key=lambda row: row["factor"])
        found = [arms.mean_accuracy(row) for row in rows]
        best = found.index(max(found))
        assert rows[best]["factor"] == factor and 0 < best < len(rows) - 1


def test_the_first_reveal_has_none_before_it_and_in_the_picture_as_many_seeds_have_it_as_it_says():
    """Of the traces with a reveal after every S commands it is the first one, S commands in."""
    row = {"results": [{"length": 16, "spacing": 2, "by_position": [0.5, 0.25]},
                       {"length": 32, "spacing": 4, "by_position": [0.125, 1.0]}]}
    assert [arms.first_reveal(row, S) for S in (2, 4)] == [50, 12.5]
    assert arms.first_after(4)([row]) == "12"

    others = [row for row in records("arms", millions=15)
              if row["arm"] not in ("linrnn", "gated")]
    right = [arms.first_reveal(row, 16) for row in records("arms", arm="linrnn", millions=15)]
    assert f"({sum(share > 99.5 for share in right)} of {len(right)} seeds" in \
        arms.picture().get_suptitle()
    assert max(arms.first_reveal(row, 16) for row in others) < 20 + 4 * (0.2 * 0.8 / 768)**0.5 * 100
