"""How fast is the scan?  Forward and backward, beside two other forms of the delta rule.

    loop          the definition, token by token
    autograd      the chunks of scan.py, differentiated by torch
    hand-written  the chunks of scan.py, with their own backward: delta_rule_chunked

In float32 on one CPU core, the loop takes 5.5 to 13 times as long as the hand-written form. The
ratio is worst in a small batch, where most of the loop's time is overhead. Autograd takes 1.3 to
1.4 times as long.

    python -m experiments.bench [--run]    the table; --run: first measure what has no record
"""

import statistics
import time
from operator import itemgetter

import torch
import torch.nn.functional as F

from data import run_cli
from experiments import Study, chapter, grid, records, table
from scan import (beta_k, check_inputs, chunked_forward, delta_rule_chunked, delta_rule_recurrent,
                  to_chunks)


def by_autograd(q, k, v, beta):
    """The forward of scan.py, which torch differentiates.  Shapes: as delta_rule_chunked."""
    *inputs, state_KV = check_inputs(q, k, beta_k(k, beta), v, None)
    out_NCV, state_KV, _ = chunked_forward(*[to_chunks(x, 16) for x in inputs], state_KV)
    return out_NCV.flatten(-3, -2)[..., :q.shape[-2], :], state_KV


FORMS = {"loop": delta_rule_recurrent, "autograd": by_autograd,
         "hand-written": delta_rule_chunked}


def with_gradients(form, inputs, g_out):
    """The output of a form, and the gradients of all its inputs."""
    out, _ = form(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, g_out)]


def measure(B, T):
    """The median time of nine calls of each form, divided by that of the hand-written one."""
    q, k, v, g_out = torch.randn(4, B, 4, T, 32)
    beta = 2 * torch.rand(B, 4, T)
    inputs = [x.requires_grad_() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta)]

    times = {name: [] for name in FORMS}
    for name in [*FORMS] * 9:  # in turns, so other load on the machine slows all forms alike
        start = time.perf_counter()
        with_gradients(FORMS[name], inputs, g_out)
        times[name].append(time.perf_counter() - start)
    ours = statistics.median(times["hand-written"])
    return {name: statistics.median(times[name]) / ours for name in FORMS}


def show():
    rows = records("bench")
    table(f"Times, divided by that of the hand-written form: torch {rows[0]['torch']}, float32, "
          "one CPU core, H = 4, K = V = 32", rows, ["B", "T"],
          {name: itemgetter(name) for name in FORMS}, digits=2)


STUDIES = [Study("bench", grid(B=[32, 4], T=[1024]), lambda setting, _: measure(**setting))]


def main(argv=None):
    chapter(__doc__, show, STUDIES, argv)


if __name__ == "__main__":
    run_cli(main)
