"""A test of your own: exercise 10. The grader runs it on models.py and on a wrong variant of it."""

import models
import torch


def test_attention_reads_in_pieces_what_it_reads_at_once(models=models):
    """The output of an attention block depends on the tokens, not on how they are cut into pieces.

    models: the module under test.
    """
    block = models.AttentionBlock(6, 1).double()
    x = torch.randn(2, 9, 6).double()
    whole, _ = block(x)

    for cut in (1, 4, 8):
        first, state = block(x[:, :cut])
        second, _ = block(x[:, cut:], state)
        pieces = torch.cat([first, second], 1)
        assert (pieces - whole).abs().max() < 1e-5
