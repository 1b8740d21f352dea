"""A trace is Python's, a lexer only cuts its values, and padding counts nowhere."""

from itertools import product

import numpy as np
import pytest
from conftest import session, typed_lines

from data import generator
from experiments import strings
from experiments.strings import MARKS, StringTask, learn_merges, split

SIZES = {"list": 3, "letters": 3, "bpe": 9}  # the tokens of each lexer
KINDS = [*product(SIZES, ["print(s)"]), ("bpe", "print(*s)")]


def drawn(task, batch=40):
    """A batch with three reveals a trace, and its texts without padding."""
    batch = task.test_batch(batch, 6, 2, generator(3, "valid"))
    texts = [task.decode([row[0], *rest]).rstrip("\n") + "\n" for row, rest in zip(*batch[:2])]
    return batch, texts


@pytest.mark.parametrize("lexer, reveal", KINDS)
def test_a_trace_is_a_real_session_and_what_counts_is_what_it_prints(lexer, reveal):
    """The tokens of reveal k are its k-th output."""
    task = StringTask(lexer, reveal)
    batch, texts = drawn(task)
    for text, targets, numbers in zip(texts, batch.targets, batch.numbers):
        assert session(typed_lines(text)) == text and ("['" in text) == (lexer == "list")
        printed = [line for line in text.splitlines() if not line.startswith(">>> ")]
        assert printed == [task.decode(targets[numbers == k]) for k in (1, 2, 3)]


@pytest.mark.parametrize("lexer", SIZES)
def test_a_lexer_cuts_each_value_into_its_tokens_and_back(lexer):
    """Into letters, or at places that depend on the value."""
    task = StringTask(lexer)
    values = [*map("".join, product("abc", repeat=4))]
    assert all(task.decode(task.encode(value)) == value for value in values)
    assert len(task.vocab) == len({*task.vocab}) == len(MARKS) + SIZES[lexer]
    cuts = {tuple(len(task.vocab[i]) for i in task.encode(value)) for value in values}
    assert len(cuts) > 3 if lexer == "bpe" else cuts == {(1, 1, 1, 1)}


def test_merges_are_learned_by_frequency_and_used_in_that_order():
    """On all values they do what minbpe does: join the earliest pair, until there is none."""
    assert learn_merges(["abab", "abc", "abab"], 2) == [("a", "b"), ("ab", "ab")]
    merges = StringTask("bpe").merges
    for value in map("".join, product("abc", repeat=4)):
        tokens = [*value]
        while found := [pair for pair in merges if pair in zip(tokens, tokens[1:])]:
            tokens = split(tokens, found[:1])
        assert split(value, merges) == tokens


def test_a_value_is_correct_if_all_its_tokens_are_and_padding_never_counts():
    """Three values of two, one and two tokens; the first has a wrong one, and padding another."""
    numbers = np.array([[0, 1, 1, 0, 2, 0, 3, 3, 0]])
    correct = np.array([[0, 1, 0, 0, 1, 1, 1, 1, 0]], bool)
    assert strings.whole(correct, numbers).tolist() == [[False, True, True]]
