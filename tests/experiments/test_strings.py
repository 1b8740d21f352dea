"""A trace is Python's, a lexer only cuts its values, and padding counts nowhere."""

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import session, typed_lines

from data import generator
from experiments import strings
from experiments.strings import MARKS, StringTask, learn_merges, split
from train import Config, to_tensors

SIZES = {"list": 3, "letters": 3, "pairs": 9, "bpe": 9}  # the tokens of each lexer
KINDS = [*product(SIZES, ["print(s)"]), ("bpe", "print(*s)")]


def drawn(task, batch=40):
    """A batch with three reveals a trace, and its texts without padding."""
    batch = task.test_batch(batch, 6, 2, generator(3, "valid"))
    texts = [task.decode([row[0], *rest]).rstrip("\n") + "\n" for row, rest in zip(*batch[:2])]
    return batch, texts


@pytest.mark.parametrize("lexer, reveal", KINDS)
def test_a_trace_is_a_real_session_and_what_counts_is_what_it_prints(lexer, reveal):
    """The tokens of reveal k are its k-th output, and all lexers read the same programs."""
    task = StringTask(lexer, reveal)
    batch, texts = drawn(task)
    for text, targets, numbers in zip(texts, batch.targets, batch.numbers):
        assert session(typed_lines(text)) == text
        printed = [line for line in text.splitlines() if not line.startswith(">>> ")]
        assert printed == [task.decode(targets[numbers == k]) for k in (1, 2, 3)]
    others = drawn(StringTask("letters", reveal))[1]
    without_marks = str.maketrans("", "", "[', ]")  # what a list has more
    assert "".join(texts).translate(without_marks) == "".join(others).translate(without_marks)


@pytest.mark.parametrize("lexer", SIZES)
def test_a_lexer_cuts_each_value_into_its_tokens_and_back(lexer):
    """Merges cut at different places, the others always at the same ones."""
    task = StringTask(lexer)
    values = [*map("".join, product("abc", repeat=4))]
    assert all(task.decode(task.encode(value)) == value for value in values)
    assert len(task.vocab) == len({*task.vocab}) == len(MARKS) + SIZES[lexer]
    cuts = {tuple(map(len, task.split(value))) for value in values}
    fixed = {"list": (1, 1, 1, 1), "letters": (1, 1, 1, 1), "pairs": (2, 2)}
    assert cuts == {fixed[lexer]} if lexer in fixed else len(cuts) > 3
    with pytest.raises(KeyError):  # nothing is skipped
        task.encode("z")


def test_merges_are_learned_by_frequency_and_used_in_that_order():
    """On all values they do what minbpe does: join the earliest pair, until there is none."""
    assert learn_merges(["abab", "abc", "abab"], 2) == [("a", "b"), ("ab", "ab")]
    merges = StringTask("bpe").split.keywords["merges"]
    for value in map("".join, product("abc", repeat=4)):
        tokens = [*value]
        while found := [pair for pair in merges if pair in zip(tokens, tokens[1:])]:
            tokens = split(tokens, found[:1])
        assert split(value, merges) == tokens


def test_padding_never_counts_and_a_wrong_token_may_spell_the_right_letters(monkeypatch):
    """Of 16 reveals one is cut elsewhere, one has a wrong second letter, and one goes on with the
    letter of the next reveal."""
    task = StringTask("bpe")
    batch = task.test_batch(8, 4, 2, generator(0, "test", 4, 2))
    assert len({*(batch.numbers > 0).sum(1)}) > 1  # so some are padded
    read = np.where(batch.reveals, batch.targets, -1)
    first = batch.reveals.argmax(1)
    values = [[task.decode(row[numbers == number]) for number in (1, 2)]
              for row, numbers in zip(batch.targets, batch.numbers)]
    pairs = task.vocab[len(MARKS) + 3:]

    cut = next(row for row in range(8) if len(task.vocab[batch.targets[row, first[row]]]) == 2)
    read[cut, first[cut]] = task.ids[values[cut][0][0]]
    row, wrong = next((row, pair) for row in range(8) for pair in pairs
                      if row != cut and pair[0] == values[row][0][0] and pair != values[row][0][:2])
    read[row, first[row]] = task.ids[wrong]
    other, beyond = next((row, last) for row in {*range(8)} - {cut, row}
                         for last in [np.flatnonzero(batch.numbers[row] == 1)[-1]]
                         if len(task.vocab[batch.targets[row, last]]) == 1
                         and values[row][0][-1] + values[row][1][0] in pairs)
    read[other, beyond] = task.ids[values[other][0][-1] + values[other][1][0]]
    monkeypatch.setattr(strings, "predict", lambda model, inputs: read)
    found = strings.measure(None, task, 4, 2, reveals=16)
    assert (found["all"], found["spelled"]) == (13 / 16, 14 / 16)


def test_a_stage_is_passed_by_whole_reveals():
    """A reader that says `a` gets every value of four `a`, but no value with another letter."""
    task = StringTask("letters")
    batch, texts = drawn(task, 200)
    says = F.one_hot(torch.tensor(task.ids["a"]), len(task.vocab)).float()
    _, metrics = strings.loss_of_whole_reveals(lambda tokens: says.expand(*tokens.shape, -1),
                                               to_tensors(batch, "cpu"), Config())
    values = [line for text in texts for line in text.splitlines() if line[0] in "abc"]
    assert 0 < metrics["reveal_accuracy"] == pytest.approx(np.mean([v == "aaaa" for v in values]))
