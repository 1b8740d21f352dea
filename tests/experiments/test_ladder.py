"""The mixers of the ladder are their recurrences, and a counter is found where there is one."""

import json

import pytest
import torch
from data import Group, WordTask, generator
from eval import evaluate_and_print
from experiments import ladder
from models import build


def few_traces(model, task, lengths, traces):
    return evaluate_and_print(model, task, lengths, 2)


def test_the_diagonal_scan_is_the_loop():
    """h_t = a_t h_{t-1} + b_t, with a in (-1, 1), from a state that is not zero, for ragged T."""
    for T in (1, 2, 13, 37):
        a, b = 2 * torch.rand(3, T, 5).double() - 1, torch.randn(3, T, 5).double()
        state = start = torch.randn(3, 5).double()
        ours = ladder.diagonal_scan(a, b, start)
        for t in range(T):
            state = a[:, t] * state + b[:, t]
            assert (ours[:, t] - state).abs().max() < 1e-10


@pytest.mark.parametrize("smallest", [-1.0, 0.0])
def test_a_stream_in_pieces_is_the_whole_and_no_eigenvalue_is_below_the_smallest(smallest):
    model = build("diagonal", 7, d_model=12, smallest=smallest).double()
    tokens = torch.randint(7, (2, 40))
    state, pieces = None, []
    for piece in tokens.tensor_split([1, 3, 30], 1):
        logits, state = model.stream(piece, state)
        pieces.append(logits)
    assert (torch.cat(pieces, 1) - model(tokens)).abs().max() < 1e-10
    block, seen = model.blocks[1], []
    block.project.weight.data *= 100
    block.project.register_forward_hook(lambda _, __, out: seen.append(out.chunk(3, -1)[0]))
    model(tokens)
    a = smallest + (1 - smallest) * torch.nn.functional.hardsigmoid(seen[0])
    assert a.min() == smallest and a.max() == 1


def test_a_dense_step_is_a_rotation_and_a_stream_in_pieces_is_the_whole():
    """Rotations keep the length of h, and two of them do not commute."""
    model = build("dense", 7, d_model=12, width=5).double()
    tokens, sizes = torch.randint(7, (2, 40)), []
    state, pieces = None, []
    for piece in tokens.tensor_split([1, 3, 30], 1):
        logits, state = model.stream(piece, state)
        pieces.append(logits)
        sizes.append(state[1].norm(dim=-1))
    assert (torch.cat(pieces, 1) - model(tokens)).abs().max() < 1e-10
    assert (torch.stack(sizes) - model.blocks[1].start.norm()).abs().max() < 1e-10
    ends = [model.stream(torch.tensor([word]))[1][1] for word in ([1] * 9 + [2] * 9,
                                                                  [2] * 9 + [1] * 9)]
    assert (ends[0] - ends[1]).abs().max() > 1e-3


def test_the_ladder_climbs_from_diagonal_to_dense(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder, "evaluate_and_print", few_traces)
    ladder.main(["run", "--group", "S2", "--millions", "0.001", "--record", "r.jsonl"])
    lines = [json.loads(line) for line in open("r.jsonl")]
    assert [line["arm"] for line in lines] == list(ladder.LADDER)
    assert all([row["length"] for row in line["results"]] == [64, 256] for line in lines)


def test_a_counter_is_what_odd_words_negate_and_even_words_keep():
    """Set by hand: one element is negated by odd words of S3, all others are forgotten."""
    task = WordTask(Group("S3"))
    model = build("diagonal", 6, d_model=8, conv_width=2)
    model.blocks[0].out.weight.data.zero_()  # no neighbour is seen
    model.embedding.weight.data = torch.eye(6, 8)
    block = model.blocks[1]
    inputs = task.test_batch(4, 50, 1, generator(0, "test", 50, 1)).inputs
    block.project.weight.data.zero_()
    with pytest.raises(ValueError, match="no element"):
        ladder.counters(model, task, inputs)
    odd = torch.tensor([sum(g[i] > g[j] for j in range(3) for i in range(j)) % 2 == 1
                        for g in task.group.elements])
    block.project.weight.data[2, :6] = 9 * (1 - 2 * odd.float())  # the norm keeps a one-hot's place
    block.project.weight.data[8 + 2, :6] = 1.0  # b
    block.project.bias.data[3] = 9.0  # kept by all words: a memory, not a counter
    h = ladder.counters(model, task, inputs)
    b = block.coefficients(model.blocks[0](model.embedding(torch.tensor([[0]])))[0])[1][0, 0, 2]
    expected = torch.zeros(4)
    for t in range(50):
        word = torch.from_numpy(inputs[:, t])
        expected = torch.where(odd[word], -expected, expected) + b
        assert h.shape[-1] == 1 and (h[:, t, 0] - expected).abs().max() < 1e-4


def test_what_does_not_fit_is_refused(refused, small_run):
    refused(ladder.main, ["count", small_run], "no diagonal layer")
    refused(ladder.main, ["climb"], "climb")
