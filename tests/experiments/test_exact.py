"""A rounded model is proved for every length, and a wrong one is refused."""

import copy

import numpy as np
import pytest
import torch
from conftest import run_commands, session, typed_lines

from data import Group, ReplTask, UserError, generator
from experiments import exact
from experiments.exact import (PROGRAMS, InFormat, Program, RoundedModel, certify, codes_of,
                               find_frame, nearest_head, places_and_swaps, to_format, train_rest)
from models import LinRNN, LocalBlock
from scan import swap_key


def random_frame(K):
    return torch.linalg.qr(torch.randn(K, K).double()).Q


def untrained(**options):
    return LinRNN(16, **{"d_model": 24, "heads": 2, "conv_width": 6} | options)


@pytest.fixture(scope="module")
def proved():
    """An untrained model of S3, rounded in a random frame: training makes it right."""
    torch.manual_seed(0)
    task = ReplTask(Group("S3"))
    return train_rest(RoundedModel(untrained(), task, 1, random_frame(12)), task, steps=150)


def test_the_proof_holds_on_a_long_trace_in_any_pieces(proved):
    """All answers are right, also those before the first command and after a false reveal, and the
    last state is the one after a single command. The oracle is a loop over permutations."""
    found = certify(proved)
    assert (found["states"], found["transitions"], found["answers"]) == (6, 36, 18)

    task = proved.task
    commands = task.group.draw((1, 3000), generator(0, "test"))
    perms = run_commands(commands)[0]
    asked = generator(1, "test").integers(3, size=3000)
    text = task.start_lines() + 2 * task.reveal_lines(1, 1)
    for g, x, perm in zip(commands[0], asked, perms):
        text += task.command_line(g) + task.reveal_lines(x, perm[x]) * int(x == 0)
    tokens = torch.tensor([task.encode(text)])

    predicted, state = [], None
    with torch.no_grad():
        for piece in tokens.tensor_split([1, 2, 3, 17, 18, 40, 1000, 1007, 20_001], 1):
            logits, state = proved.stream(piece, state)
            predicted.append(logits.argmax(-1))
        once = task.start_lines() + 3 * task.reveal_lines(1, 2) + task.command_line(perms[-1])
        _, after = proved.stream(torch.tensor([task.encode(once)]))
    assert torch.equal(state[1], after[1])
    revealed = tokens[:, :-1] == task.ids[" "]
    assert torch.equal(torch.cat(predicted, 1)[:, :-1][revealed], tokens[:, 1:][revealed])


# --- What is wrong is refused ---------------------------------------------------------------------

class Remembering(torch.nn.Linear):
    """It adds up what the tokens before it were: a memory that no state holds."""

    def forward(self, x):
        return super().forward(x.cumsum(1))


class Another(RoundedModel):
    pass


def reads_another_task(model):
    model.task = Program(Group("S3"), "random commands")


def has_more_memory(model):
    model.mlp.up = Remembering(24, 48)


def is_another_class(model):
    model.__class__ = Another


def sees_twice(model):
    model.local = torch.nn.Sequential(model.local, LocalBlock(24, 6))


def reads_swap_commands(model):
    model.task = ReplTask(Group("S3"), "swap")


def has_many_states(model):
    model.task = ReplTask(Group("S7"))


def is_double(model):
    model.double()


def exchange_two_keys(model):
    model.keys[[1, 2]] = model.keys[[2, 1]]


def turn_the_frame(model):
    """The same function of real numbers, but not of integers."""
    frame = random_frame(12).float()
    model.keys.copy_(model.keys @ frame.T)
    model.query.weight.data = frame @ model.query.weight


def lengthen_a_key(model):
    model.keys[0, 11] = 1


def write_under_a_swap_key(model):
    model.keys[-2, 11] = 1


def leave_the_grid(model):
    model.values *= 1 - 1e-6


def write_too_much(model):
    model.values *= 2


def exchange_two_values(model):
    model.values[[-3, -4]] = model.values[[-4, -3]]


def look_too_far(model):
    model.local.conv = torch.nn.Conv1d(24, 24, 10)


def read_nothing(model):
    model.out.weight.data[:] = 0


@pytest.mark.parametrize("breaks, words", [
    (has_more_memory, "not a rounded model"), (is_another_class, "not a rounded model"),
    (sees_twice, "not a rounded model"), (reads_another_task, "not a rounded model"),
    (reads_swap_commands, "not a rounded model"),
    (has_many_states, "5,040 states"), (is_double, "float32 on a CPU"),
    (turn_the_frame, "not integers"), (lengthen_a_key, "too long"),
    (write_under_a_swap_key, "too long"), (leave_the_grid, "grid"), (write_too_much, "grid"),
    (exchange_two_keys, "a state is wrong after >>> a, b, c = "),
    (exchange_two_values, "only [0-9]+ of 18 answers"), (look_too_far, "more than the lines"),
    (read_nothing, "only [0-9]+ of 18 answers")])
def test_a_wrong_model_has_no_proof(proved, breaks, words):
    model = copy.deepcopy(proved)
    breaks(model)
    with pytest.raises(UserError, match=words):
        certify(model)


@pytest.mark.parametrize("before, token", [(", a", ")"), (" ", "2")])
def test_a_reveal_that_changes_a_state_has_no_proof(proved, monkeypatch, before, token):
    """All reveals swap something, or only those that show a 2."""
    def codes(task, tokens):
        acts = (tokens[:, 1:] == task.ids[token]) & (tokens[:, :-1] == task.ids[before])
        codes = codes_of(task, tokens)
        codes[:, 1:][acts] = 0
        return codes
    monkeypatch.setattr(exact, "codes_of", codes)
    with pytest.raises(UserError, match="a reveal of a changes a state"):
        certify(proved)


def test_what_the_first_lines_leave_must_stay(proved, monkeypatch):
    """Their last token writes something into a spare slot, and the tokens of a command erase it. So
    all states are right after a command, but not before the first one."""
    model = copy.deepcopy(proved)
    spare = torch.eye(12)[-1:]
    model.keys = torch.cat([model.keys[:-1], spare, spare])
    model.values = torch.cat([model.values[:-1], model.values[-2:]])

    def codes(task, tokens):
        codes = codes_of(task, tokens)
        none = len(places_and_swaps(task)[0])
        codes = torch.where(codes == none, none + 1, codes)
        codes[:, -1] -= int(tokens.shape[1] == 5 * 3)
        return codes
    monkeypatch.setattr(exact, "codes_of", codes)
    with pytest.raises(UserError, match="a state is wrong after >>> a, b, c = a, b, c"):
        certify(model)


def test_reduced_precision_has_no_proof(proved):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError, match="precision"):
        certify(proved)
    try:
        torch.set_float32_matmul_precision("medium")
        with pytest.raises(UserError, match="precision"):
            certify(proved)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_an_unlearned_model_has_no_proof():
    model = RoundedModel(untrained(), ReplTask(Group("S3")), 1, random_frame(12))
    with pytest.raises(UserError, match="answers are correct"):
        certify(model)


@pytest.mark.parametrize("options, words", [
    ({"layers": 2}, "one layer"), ({"householders": 2}, "one Householder step"),
    ({"conv_width": 1}, "a local block"), ({"heads": 6}, "width 2n"), ({}, "no head")])
def test_a_model_that_does_not_fit_is_refused(options, words):
    with pytest.raises(UserError, match=words):
        nearest_head(untrained(**options), ReplTask(Group("S3")))


def test_a_second_local_block_is_refused():
    model = untrained()
    model.blocks.insert(0, LocalBlock(24, 6))
    with pytest.raises(UserError, match="a local block, one layer"):
        nearest_head(model, ReplTask(Group("S3")))


# --- Places, frames, heads ------------------------------------------------------------------------

def test_the_codes_of_a_line_depend_on_that_line_alone():
    """All pairs of lines: the codes of the second one are those that it has by itself."""
    task = ReplTask(Group("S3"))
    lines = [task.command_line(g) for g in task.group.elements]
    lines += [task.reveal_lines(x, value) for x in range(3) for value in range(3)]
    lines = [torch.tensor([task.encode(line)]) for line in lines]
    for before in lines:
        for line in lines:
            both = codes_of(task, torch.cat([before, line], 1))
            assert torch.equal(both[:, before.shape[1]:], codes_of(task, line))


def test_the_frame_of_a_turned_machine_is_found():
    _, swaps = places_and_swaps(ReplTask(Group("S5")))
    wanted = swap_key(*swaps.T, 16)
    keys = wanted @ random_frame(16) * torch.randn(30, 1).sign()
    frame, angles = find_frame(keys, swaps)
    assert angles.max() < 1e-4
    assert (frame @ frame.T - torch.eye(16)).abs().max() < 1e-12
    assert ((wanted @ frame * keys).sum(1).abs() - 1).abs().max() < 1e-12


def test_of_several_tracking_heads_the_nearest_is_rounded(monkeypatch):
    monkeypatch.setattr(exact, "tracking_heads", lambda *_: [(1, 0), (1, 1), (1, 2)])
    monkeypatch.setattr(exact, "fit_frame", lambda model, task, head: (
        f"frame {head}", torch.tensor([[30.0, 40], [10, 20], [20, 30]])[head]))
    head, frame, angles = nearest_head(untrained(), ReplTask(Group("S3")))
    assert (head, frame, angles.tolist()) == (1, "frame 1", [10, 20])


# --- The stored model, programs, number formats, the command --------------------------------------

def test_the_stored_model_has_its_proof():
    _, model = exact.stored()
    found = certify(model)
    assert (found["states"], found["transitions"], found["answers"]) == (120, 14_400, 600)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_reveals_of_a_program_that_count_are_those_of_python(name):
    """Python itself runs what is typed. A reveal that shows another value does not count."""
    task = Program(Group("S4"), name)
    inputs, targets, reveals = task.test_batch(1, 60, 3, generator(0, "test"))
    tokens = np.append(inputs[0], targets[0, -1])
    typed = typed_lines(task.decode(tokens))
    python = np.array(task.encode(session(typed)))
    at = inputs[0] == task.ids[" "]
    false = at & ~reveals[0]
    assert np.array_equal(np.flatnonzero(tokens != python) - 1, np.flatnonzero(false))

    commands = [line for line in typed if line.startswith("a, ")]
    assert len(commands) == 60
    period = {"the identity": 1, "one command": 1, "a command and its inverse": 2,
              "a loop of 2": 2, "a loop of 5": 5, "a loop of 10": 10}.get(name)
    assert period is None or commands == 60 // period * commands[:period]
    assert false.any() == (name == "false reveals")


def test_a_state_is_rounded_to_a_number_format_after_every_token():
    S = torch.randn(3, 2, 5, 4)
    for name, numpy_name in (("float32", np.float32), ("float16", np.float16)):
        assert torch.equal(to_format(S, name), torch.tensor(S.numpy().astype(numpy_name)).float())
    for head, rounded in zip(S.flatten(0, 1), to_format(S, "int8").flatten(0, 1)):
        steps = rounded / (head.abs().max() / 127)
        assert (steps - steps.round()).abs().max() < 1e-4 and steps.abs().max() < 127.01
        assert (rounded - head).abs().max() <= head.abs().max() / 253

    model = untrained()
    tokens = torch.randint(16, (2, 7))
    expected, state = [], None
    for t in range(7):
        logits, state = model.stream(tokens[:, t:t + 1], state)
        state[1] = state[1].bfloat16().float()
        expected.append(logits)
    assert torch.equal(InFormat(model, "bfloat16").stream(tokens)[0], torch.cat(expected, 1))


def test_the_command_rounds_trains_proves_and_prints(proved, small_run, refused, capsys,
                                                     monkeypatch):
    refused(exact.main, [small_run], "width 2n")
    monkeypatch.setattr("experiments.load", lambda folder: (proved.task, untrained()))
    monkeypatch.setattr(exact, "nearest_head", lambda *_: (0, random_frame(12), torch.ones(3)))
    monkeypatch.setattr(exact, "train_rest", lambda model, task: model)
    refused(exact.main, [small_run], "answers are correct")

    monkeypatch.setattr(exact, "train_rest", lambda model, task: proved)
    exact.main([str(small_run), "--lengths", "64:8,32:1", "--traces", "1"])
    printed = capsys.readouterr().out
    assert "Proved for every length: 6 states, 36 transitions, 18 answers" in printed
    assert "(64,8)   0.3333   1.0000   1.0000   1.0000" in printed and "(32,1)" in printed
