"""All that is timed is the delta rule."""

import pytest
import torch
import torch.nn.functional as F
from conftest import needs_cuda

from experiments import bench
from experiments.bench import FORMS, with_gradients
from scan import delta_rule_recurrent


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_the_loop(name):
    """In values and gradients, also where T = 37 is no multiple of a chunk."""
    q, k, g_out = torch.randn(3, 2, 3, 37, 5).double()
    v = torch.randn(2, 3, 37, 5).double()
    beta = 2 * torch.rand(2, 3, 37).double()
    inputs = [x.requires_grad_() for x in (q, F.normalize(k, dim=-1), v, beta)]
    truth = with_gradients(delta_rule_recurrent, inputs, g_out)
    for x, right in zip(with_gradients(FORMS[name], inputs, g_out), truth, strict=True):
        torch.testing.assert_close(x, right, rtol=0, atol=1e-10)


@needs_cuda
def test_all_forms_are_timed_on_cuda():
    bench.main(["measure", "--device", "cuda"])
