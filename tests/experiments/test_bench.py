"""All that is timed is the delta rule, and what is printed about it is true."""

import pytest
import torch
import torch.nn.functional as F
from conftest import needs_cuda

from data import UserError
from experiments import bench
from experiments.bench import FORMS, measure, with_gradients
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


def test_a_wrong_form_is_refused(monkeypatch):
    """A scan that runs backwards, and a nan in one gradient alone."""
    def nan_in_q(q, k, v, beta):
        out, state = delta_rule_recurrent(q, k, v, beta)
        return out + 0 * (q - q.detach()).sqrt(), state  # 0 times an infinite slope

    def backwards(*inputs):
        return delta_rule_recurrent(*[x.flip(2) for x in inputs])

    for wrong in (nan_in_q, backwards):
        monkeypatch.setitem(FORMS, "autograd", wrong)
        with pytest.raises(UserError, match="autograd disagrees with the loop"):
            measure(1, 9)


@needs_cuda
def test_on_cuda_all_forms_agree_with_the_loop():
    bench.main(["measure", "--device", "cuda", "--batch", "2", "--length", "300", "--rounds", "1"])
