"""A state is a linear image of a permutation; put back on it, the head does not get lost."""

import json

import numpy as np
import pytest
import torch
from machine import SwapMachine

from data import Group, ReplTask, generator
from eval import evaluate
from experiments.heads import LinearImage, Untracked, collect_states, settling_tokens
from experiments.snap import Snapped, fit_image, main
from models import build

HEADS = [(0, 0)]  # of a SwapMachine


@pytest.fixture(scope="module")
def noisy():
    """A hand-built head whose keys are bent, enough to lose the state within some hundred commands,
    and what is fitted to it."""
    torch.manual_seed(0)
    machine = SwapMachine("S3", noise=0.015)
    return machine, machine.task, fit_image(machine, machine.task, HEADS)[0]


def random_image(heads, width):
    """Of no head: the 6 permutations of 3 at random states."""
    perms = Group("S3").elements.repeat(5, 0)
    return LinearImage(heads, torch.randn(30, 1, width, width).double(), perms)


# --- Snapping -------------------------------------------------------------------------------------

def test_snapping_restores_exact_tracking_where_the_noisy_head_alone_fails(noisy):
    """In the second half of 300 commands the head alone is often wrong; snapped after every
    command, or every fifth, it never is."""
    machine, task, image = noisy
    alone = evaluate(machine, task, 300, 10, traces=8)
    assert np.mean(alone["by_position"][15:]) < 0.6
    for interval in (1, 5):
        snapped = Snapped(machine, task, image, interval)
        assert evaluate(snapped, task, 300, 10, traces=8)["all"] == 1


def test_the_same_with_26_variables():
    """4e26 states, 1,152 of them in the fit. Noise so large that the head loses its way within 60
    commands. The whole command line is written and read, all 26 letters."""
    torch.manual_seed(0)
    machine = SwapMachine("S26", noise=0.012)
    states, perms = collect_states(machine, machine.task, HEADS, 192, 6, 6, generator(0, "valid"))
    image = LinearImage(HEADS, states, perms)
    assert len(image.sizes) == 25**2
    alone = evaluate(machine, machine.task, 80, 10, traces=4)
    assert np.mean(alone["by_position"][5:]) < 0.6
    assert evaluate(Snapped(machine, machine.task, image), machine.task, 80, 10, 4)["all"] == 1


def test_along_a_trace_the_readings_drift_alone_and_stay_near_when_snapped(noisy):
    """Distance of P from the truth, alone and snapped, in 100 commands; and an image that reads a
    snapped model sees its state before it is put back, hence not without any error."""
    machine, task, image = noisy
    off = []
    for reader in (machine, Snapped(machine, task, image)):
        P, perms = image.along(reader, task, 8, 100, generator(0, "test"))
        assert P.shape == (8, 100, 3, 3)
        off.append((P - torch.eye(3)[perms]).square().mean((0, 2, 3)).sqrt())
    alone, snapped = off
    assert alone[80:].mean() > 4 * alone[:10].mean()
    assert 1e-3 < snapped[80:].mean() < 1.2 * snapped[:10].mean()


def test_a_state_that_is_wrong_stays_wrong(noisy):
    """With two values exchanged before the first command, the snapped head is for ever right about
    the third value, and never about these two: snapping makes an error permanent."""
    machine, task, image = noisy
    snapped = Snapped(machine, task, image)
    inputs, targets, reveals, _ = task.training_batch(8, 100, 1, generator(0, "valid"))
    tokens, first = torch.from_numpy(inputs.copy()), len(task.start_tokens())
    state = snapped.stream(tokens[:, :first])[1]
    state[0] = state[0][..., [1, 0, 2]]
    answers = snapped.stream(tokens[:, first:], state)[0].argmax(-1).numpy()
    truth, asked = targets[:, first:], reveals[:, first:]
    assert ((answers == truth) == (truth == task.value_tokens[2]))[asked].all()


def test_no_snap_is_bit_identical_and_pieces_do_not_matter():
    """Without a snap due, every bit of the model's own stream; with snaps, the same in ragged
    pieces as whole."""
    task = ReplTask(Group("S3"))
    model = build("linrnn", len(task.vocab), d_model=12, heads=2).double()
    tokens = torch.from_numpy(task.sample(4, 12, 3, generator(0, "valid"))[0])
    image = random_image([(1, 1)], 6)
    never = Snapped(model, task, image, interval=1000)
    with torch.no_grad():
        assert (never.stream(tokens)[0] == model.stream(tokens)[0]).all()
    snapped, state, pieces = Snapped(model, task, image, interval=2), None, []
    for piece in tokens.tensor_split([1, 2, 20, 21, 22, 23, 90], 1):
        logits, state = snapped.stream(piece, state)
        pieces.append(logits)
    whole = snapped.stream(tokens)[0]
    assert (torch.cat(pieces, 1) - whole).abs().max() < 1e-10
    assert (whole - never.stream(tokens)[0]).abs().max() > 1e-3


def test_traces_side_by_side_are_snapped_each_at_its_own_places():
    """Two traces with reveals at other places, streamed together and one by one."""
    task = ReplTask(Group("S3"))
    model = build("linrnn", len(task.vocab), d_model=12, heads=2).double()
    snapped = Snapped(model, task, random_image([(1, 0)], 6), interval=2)
    tokens = torch.from_numpy(np.vstack([
        task.sample(1, 12, spacing, generator(0, "valid"))[0][:, :120] for spacing in (1, 4)]))
    alone = torch.cat([snapped.stream(row)[0] for row in tokens.split(1)])
    assert (snapped.stream(tokens)[0] - alone).abs().max() < 1e-10


@pytest.mark.parametrize("commands", ["full", "swap"])
def test_a_snap_replaces_the_tracking_head_alone_and_only_when_a_command_has_settled(commands):
    """Of two heads, both 0, the second is put on the image of a permutation, just after the second
    settled place, and every other one."""
    task, image = ReplTask(Group("S3"), commands), random_image([(1, 1)], 6)
    model = build("linrnn", len(task.vocab), d_model=12, heads=2).double()

    def nothing(x):  # neither keys nor values nor beta: S stays 0
        keys = torch.zeros(len(x), 2, x.shape[1], 1, 6).double()
        return keys[..., 0, :], keys, keys, keys[..., 0]

    model.blocks[1].inputs_of_scan = nothing
    snapped = Snapped(model, task, image, interval=2)
    tokens = torch.from_numpy(task.sample(2, 6, 3, generator(0, "valid"))[0])
    line = len(task.command_tokens(np.arange(3)))
    place = len(task.start_tokens()) + settling_tokens(task) + line  # one command, settled
    place += line if commands == "swap" else 0  # a full trace settles before it begins, too
    state = snapped.stream(tokens[:, :place])[1]
    before, after = state[1], snapped.stream(tokens[:, place:place + 1], state)[1][1]
    assert not before.any() and not after[:, 0].any()
    assert torch.equal(after[:, 1:], image.correct(torch.zeros(2, 1, 6, 6).double()))


# --- The fit --------------------------------------------------------------------------------------

def test_the_models_own_answers_are_the_labels():
    """Asked for each variable; the head built by hand is never wrong. A model that names the first
    value as the second and the second as the first gives a fit of its own names."""
    class Renamed(SwapMachine):
        def stream(self, tokens, state=None):
            logits, state = super().stream(tokens, state)
            first, second, _ = self.task.value_tokens
            logits[..., [first, second]] = logits[..., [second, first]]
            return logits, state

    machine, other = SwapMachine("S3"), Renamed("S3")
    (own, perms), (_, true), (_, renamed) = [
        collect_states(model, model.task, HEADS, 4, 5, 5, generator(0, "valid"), ask=ask)
        for model, ask in ((machine, True), (machine, False), (other, True))]
    assert (perms == true).all() and (renamed == np.array([1, 0, 2])[true]).all()
    image, numbers = fit_image(other, other.task, HEADS)
    P = image.read(own)
    assert (P - torch.eye(3)[renamed]).abs().max() < 1e-10
    assert numbers["residual"] < 1e-10 and len(numbers["directions"]) == 4


def test_a_fit_on_too_few_traces_is_refused():
    """One trace of 16 states cannot show the 49 directions of S8; six can, without noise."""
    machine = SwapMachine("S8")
    with pytest.raises(Untracked, match="after a fit on 1 traces .* or fit on more traces"):
        fit_image(machine, machine.task, HEADS, traces=1)
    assert len(fit_image(machine, machine.task, HEADS, traces=6)[1]["directions"]) == 49


def test_a_head_that_does_not_track_is_refused():
    """Its state never repeats, though all answers are permutations."""
    class Wanderer(SwapMachine):
        def stream(self, tokens, state=None):
            logits, (S, *rest) = super().stream(tokens, state)
            return logits, [S, *rest, torch.randn_like(S)]

    machine = Wanderer("S3")
    machine.stream = lambda tokens, state=None, stream=machine.stream: stream(
        tokens, state and state[:3])
    with pytest.raises(Untracked, match="do not hold the permutation: after a fit on 64 traces"):
        fit_image(machine, machine.task, [(3, 0)])
    assert fit_image(machine, machine.task, HEADS)[1]["margin"] > 100


# --- The command line -----------------------------------------------------------------------------

@pytest.fixture
def tracked(monkeypatch):
    """A head of small_run is said to track, with this image."""
    image = random_image([(1, 0)], 4)
    image.average, image.mean, image.B, image.inverse = [
        x.float() for x in (image.average, image.mean, image.B, image.inverse)]
    monkeypatch.setattr("experiments.snap.tracking_heads", lambda *_: image.heads)
    monkeypatch.setattr("experiments.snap.fit_image",
                        lambda *_, **__: (image, {"residual": 0.1, "margin": 9.0}))
    monkeypatch.setattr("experiments.snap.extract_and_print", lambda *_: {"states": 6})
    return image


def test_the_command_line_evaluates_the_snapped_model(small_run, tracked, monkeypatch):
    calls = []
    monkeypatch.setattr("experiments.snap.evaluate_and_print", lambda *args: calls.append(args))
    main([str(small_run), "--interval", "3", "--traces", "5", "--seed", "7", "--device", "cpu"])
    snapped, _, *rest = calls[0]
    assert isinstance(snapped, Snapped) and snapped.interval == 3 and snapped.image is tracked
    assert rest == [[[8192, 128]], 5, 7, "cpu"]


def test_a_record_holds_the_command_the_seed_and_the_numbers(small_run, tracked, tmp_path, capsys):
    main([str(small_run), "--lengths", "4:2", "--traces", "4", "--extract", "--json", "--record",
          str(tmp_path / "r.jsonl")])
    line = json.loads((tmp_path / "r.jsonl").read_text())
    assert line["command"].startswith(f"python -m experiments.snap {small_run} --lengths 4:2")
    assert line["seed"] == 0 and line["results"][0]["length"] == 4
    assert line["extract"] == {"states": 6} and line["tracking"] == {"residual": 0.1, "margin": 9.0}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["results"] == line["results"]


def test_what_a_user_can_get_wrong_is_refused_in_one_line(small_run, tmp_path, monkeypatch,
                                                          refused):
    refused(main, [small_run, "--interval", 0], "--interval: must lie in [1")
    refused(main, [small_run, "--lengths", "8:3"], "multiple of the spacing")
    refused(main, [tmp_path], "model.pt")
    refused(main, [small_run, "--record", tmp_path], "directory")
    refused(main, [small_run], "no head of this model tracks", "eval.py")
    monkeypatch.setattr("experiments.snap.tracking_heads", lambda *_: [(1, 0)])
    refused(main, [small_run], "do not hold the permutation", "train longer")
    monkeypatch.setattr("experiments.extract.MOST_STATES", 5)
    refused(main, [small_run, "--extract"], "S3 has 6", "Without --extract")


@pytest.mark.parametrize("function", ["fit_image", "extract_and_print", "evaluate_and_print"])
def test_a_bug_is_not_taken_for_an_error_of_the_user(function, small_run, tracked, monkeypatch):
    """A ValueError inside the work reaches the caller."""
    def broken(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr(f"experiments.snap.{function}", broken)
    with pytest.raises(ValueError, match="a bug"):
        main([str(small_run), "--extract", "--lengths", "2:1", "--traces", "2"])
