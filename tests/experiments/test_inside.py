"""What is reported from inside a model is what the model computes."""

import json

import numpy as np
import pytest
import torch

from data import Group, ReplTask, generator, run_commands
from experiments.heads import delta_blocks, load_repl_run, scan_inputs
from experiments.inside import (beta_by_place, command_lines, fit_probe, intervene, likeness, main,
                                mean_axis, name_keys, probe_accuracy, swap_machine_errors)
from models import build
from scan import exchange_key

TASK = ReplTask(Group("S4"))


def make(layers=1, **options):
    return build("linrnn", len(TASK.vocab), d_model=32, heads=2, layers=layers, **options)


# --- Beta and keys --------------------------------------------------------------------------------

def test_the_lines_of_an_array_are_the_lines_of_the_text():
    tokens, _ = TASK.sample(3, 12, 4, generator(0, "valid"))
    for row, lines in zip(tokens, command_lines(TASK, tokens, 12, 4)):
        commands = [line for line in TASK.decode(row).splitlines(keepends=True)
                    if line.startswith(">>> ") and ", " in line and "print" not in line]
        assert [TASK.decode(line) for line in lines] == commands and len(commands) == 12


def test_scan_inputs_are_those_of_every_layer():
    """The second layer's inputs depend on the first layer's output: recomputed block by block."""
    model = make(layers=2)
    tokens = torch.from_numpy(TASK.sample(2, 3, 1, generator(0, "valid"))[0])
    first, second = scan_inputs(model, tokens)
    local, delta, mlp, deeper, _ = model.blocks
    x, _ = local(model.embedding(tokens))
    assert all(map(torch.equal, first, delta.inputs_of_scan(x)))
    assert all(map(torch.equal, second, deeper.inputs_of_scan(mlp(delta(x)[0])[0])))
    assert delta_blocks(build("lstm", 9)) == {}


def test_keys_are_sorted_by_name_and_place():
    """Without a local block a key depends on its token alone: each entry is that token's key."""
    model = make(conv_width=1)
    left, right = name_keys(model, TASK, 0, 1, length=32, spacing=8)
    symbols = torch.arange(len(TASK.vocab)).unsqueeze(0)
    of_symbol = scan_inputs(model, symbols)[0][1][0, 1, :, 0]
    for i, place in enumerate("abcd"):
        for y, name in enumerate("abcd"):
            token = TASK.encode(name if i == 0 else f", {name}")[0]
            assert abs(right[i, y] @ of_symbol[token]) > 1 - 1e-5
        token = TASK.encode(place if i == 0 else f", {place}")[0]
        assert abs(left[i] @ of_symbol[token]) > 1 - 1e-5


def test_opposite_keys_are_the_same_reflection():
    key = torch.tensor([0.6, -0.8])
    assert abs(mean_axis(torch.stack([key, -key, -key, key])) @ key) > 1 - 1e-6


def test_the_keys_of_the_machine_are_like_themselves_in_any_basis_and_random_ones_are_not():
    """The machine's keys by its own rule, e_i against e_y', rotated and with random signs: r = 1.
    With places and names exchanged r is 1 as well. With the names shuffled at each place it is
    not: then two keys of one name no longer meet at 60 degrees."""
    place, name = torch.meshgrid(torch.arange(5), torch.arange(5), indexing="ij")
    keys = exchange_key(place, name + 5, 10)
    rotation = torch.linalg.qr(torch.randn(10, 10).double())[0]
    signs = torch.randint(2, (5, 5, 1)) * 2 - 1
    assert abs(likeness(signs * (keys @ rotation)) - 1) < 1e-10
    assert abs(likeness(keys.transpose(0, 1)) - 1) < 1e-10
    shuffled = torch.stack([keys[i, torch.arange(5).roll(i)] for i in range(5)])
    assert likeness(shuffled) < 0.7
    random = torch.nn.functional.normalize(torch.randn(5, 5, 10), dim=-1)
    assert abs(likeness(random)) < 0.3


def test_beta_by_place_averages_each_place_of_the_command_lines():
    """Without a local block beta depends on its token alone. At the place 7 of a line, the second
    on the right, all names occur, each in its share of the lines."""
    model = make(conv_width=1)
    betas = beta_by_place(model, TASK, length=32, spacing=8)
    assert betas.shape == (1, 2, 11)
    symbols = torch.arange(len(TASK.vocab)).unsqueeze(0)
    of_symbol = scan_inputs(model, symbols)[0][3][0, :, :, 0]
    lines = command_lines(TASK, TASK.sample(16, 32, 8, generator(0, "valid"))[0], 32, 8)
    for place, count in [(0, 1), (7, 4)]:
        there = lines[..., place].flatten()
        assert len(set(there)) == count
        assert torch.allclose(betas[0, :, place], of_symbol[:, there].mean(-1), atol=1e-6)


# --- Intervention and probe -----------------------------------------------------------------------

def test_an_intervention_narrows_one_head_and_is_undone(monkeypatch):
    """In the model that is evaluated, the beta of that head is scaled, the other is as trained."""
    model, seen = make(), []
    tokens = torch.from_numpy(TASK.sample(2, 3, 1, generator(0, "valid"))[0])
    before = scan_inputs(model, tokens)[0][3]

    def look(model, *_):
        seen.append(scan_inputs(model, tokens)[0][3])
        return {"all": len(seen) / 10}

    monkeypatch.setattr("experiments.inside.evaluate", look)
    assert intervene(model, TASK, [2.0, 0.5]).tolist() == [[[0.1, 0.2], [0.3, 0.4]]]
    scales = [(beta / before).mean((0, 2, 3)).tolist() for beta in seen]
    assert np.allclose(scales, [[1, 1], [0.25, 1], [1, 1], [1, 0.25]], atol=1e-6)
    assert torch.equal(scan_inputs(model, tokens)[0][3], before)


def test_the_probe_reads_a_permutation_that_is_there_and_none_that_is_not():
    """States that are a random linear image of the permutation matrix: read exactly on fresh
    elements. Of states without the permutation nothing can be read."""
    perms, fresh = TASK.group.draw((2, 300), generator(0, "valid"))
    mix, noise = torch.randn(16, 20), torch.randn(300, 4, 5)
    states, unseen = [(torch.eye(4)[p].flatten(1) @ mix).view(-1, 4, 5) for p in (perms, fresh)]
    assert probe_accuracy(fit_probe(states, perms), unseen, fresh) == 1
    assert probe_accuracy(fit_probe(noise, perms), noise.flip(0), fresh) < 0.2


# --- The head built by hand -----------------------------------------------------------------------

@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-3)])
def test_the_hand_built_head_errs_by_rounding_only(dtype, bound):
    rows = swap_machine_errors(Group("S5"), [10, 1500], dtype)
    assert [row["commands"] for row in rows] == [10, 1500]
    assert rows[-1]["error"] < bound and all(row["wrong"] == 0 for row in rows)
    assert rows[0]["error"] < bound / 20  # it grows: ten commands are not a thousand


def test_bfloat16_rounds_the_hand_built_state_back_to_the_exact_one():
    """Rounding to 8 bits is itself a correction: after each exchange 1 - 2^-12 becomes 1 again."""
    rows = swap_machine_errors(Group("S5"), [200], torch.bfloat16, traces=2)
    assert rows[0]["error"] == 0


def test_a_state_that_lags_one_command_behind_is_wrong(monkeypatch):
    """The error compares with data.py's own states: a shifted oracle must show."""
    monkeypatch.setattr("experiments.inside.run_commands", lambda commands, state:
                        run_commands(commands[:, :-1], state))
    assert swap_machine_errors(Group("S5"), [50], torch.float64)[0]["wrong"] > 0.5


# --- The command line -----------------------------------------------------------------------------

def test_the_tables_name_each_head_and_mark_those_that_track(small_run, monkeypatch, capsys):
    """A row for each place of a command, a column for each head; and the keys of the second head,
    which is said to track, are compared with the machine's."""
    monkeypatch.setattr("experiments.inside.tracking_heads", lambda *_: [(1, 1)])
    main([str(small_run), "--traces", "4", "--json"])
    *table, last = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in table if line]
    assert rows[2] == ["1:0", "1:1*"]
    assert [row[:-2] for row in rows[3:12]] == [[">>>"], ["a"], ["b"], ["c"], ["="], ["name", "1"],
                                                ["name", "2"], ["name", "3"], ["newline"]]
    numbers = json.loads(last)
    shown = np.array([[float(x) for x in row[-2:]] for row in rows[3:12]]).T
    assert np.allclose(numbers["beta"], shown, atol=6e-4) and numbers["tracking"] == [[1, 1]]
    _, task, model = load_repl_run(small_run)
    assert numbers["likeness"] == [likeness(name_keys(model, task, 0, 1, traces=4)[1])]
    assert table[-1].startswith("keys of 1:1 against those")


def test_the_intervention_is_printed_head_by_head(small_run, monkeypatch, capsys):
    monkeypatch.setattr("experiments.inside.evaluate", lambda *_: {"all": 0.25})
    main([str(small_run), "--intervene", "--json"])
    *table, last = capsys.readouterr().out.splitlines()
    assert [line.split() for line in table[-2:]] == [[head] + ["0.250"] * 6
                                                     for head in ("1:0", "1:1")]
    assert json.loads(last)["intervention"] == {"limits": [2.0, 1.8, 1.6, 1.4, 1.2, 1.0],
                                                "accuracy": [[[0.25] * 6] * 2]}


def test_only_a_linear_rnn_has_an_inside(tmp_path, refused):
    import train
    train.main("--model lstm --group S3 --curriculum 2:1 --d-model 8 --last-steps 1 --batch 1 "
               "--test-lengths 2:1 --traces 1 --out".split() + [str(tmp_path)])
    refused(main, [tmp_path], "only a linrnn", "lstm")
    refused(main, [tmp_path, "--traces", 0], "must lie in [1,")
