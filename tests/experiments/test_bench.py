"""Everything that is timed is the delta rule."""

import pytest
import torch
import torch.nn.functional as F

from experiments.bench import FORMS, with_gradients
from scan import delta_rule_recurrent


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_the_loop(name):
    """In values and gradients, although T = 37 is not a multiple of the chunk size."""
    q, k, g_out = torch.randn(3, 2, 3, 37, 5).double()
    v = torch.randn(2, 3, 37, 5).double()
    beta = 2 * torch.rand(2, 3, 37).double()
    inputs = [x.requires_grad_() for x in (q, F.normalize(k, dim=-1), v, beta)]
    expected = with_gradients(delta_rule_recurrent, inputs, g_out)
    for x, y in zip(with_gradients(FORMS[name], inputs, g_out), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
