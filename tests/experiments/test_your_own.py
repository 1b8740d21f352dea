"""A test of your own: exercise 10. `python tests/exercises.py grade` runs it on the mutant, too."""

import models
import pytest
import torch


@pytest.mark.exercise_ten
def test_attention_reads_in_pieces_what_it_reads_at_once(models=models):
    """The output of an attention block depends on the tokens, not on how they are cut into pieces.

    Exercise 10 (2 points, 6 lines): a test that models.py passes, and that the mutant fails whose
    AttentionBlock.forward calls rotate(q), rotate(k) in place of rotate(q, past), rotate(k, past).
    Take what you test from the argument `models`, and let an assert notice the mutant.
    Trap: only distances matter to rotary positions. One piece alone looks right.
    """
    ### BEGIN SOLUTION
    block, x = models.AttentionBlock(6, 1).double(), torch.randn(2, 9, 6).double()
    whole, _ = block(x)
    for cut in (1, 4, 8):
        first, state = block(x[:, :cut])
        second, _ = block(x[:, cut:], state)
        assert (torch.cat([first, second], 1) - whole).abs().max() < 1e-5
    ### END SOLUTION
