"""How fast is the scan?  Forward and backward, beside the loop that defines it.

In float32 on one CPU core, the loop of scan.py takes 5.5 to 13 times as long as the chunks. The
ratio is worst in a small batch, where most of the loop's time is overhead.

    python -m experiments.bench [--run]    the table; --run: first measure what is missing
"""

import statistics
import time
from operator import itemgetter

import torch
import torch.nn.functional as F

from data import run_cli
from experiments import Study, chapter, grid, records, table
from scan import delta_rule_chunked, delta_rule_recurrent

FORMS = {"loop": delta_rule_recurrent, "chunks": delta_rule_chunked}


def measure(B, T):
    """The median time of nine calls of each form, divided by that of the chunks."""
    q, k, v, g_out = torch.randn(4, B, 4, T, 32)
    beta = 2 * torch.rand(B, 4, T)
    inputs = [x.requires_grad_() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta)]

    times = {name: [] for name in FORMS}
    for name in [*FORMS] * 9:  # in turns, so other load on the machine slows both alike
        start = time.perf_counter()
        out, _ = FORMS[name](*inputs)
        torch.autograd.grad(out, inputs, g_out)
        times[name].append(time.perf_counter() - start)
    chunks = statistics.median(times["chunks"])
    return {name: statistics.median(times[name]) / chunks for name in FORMS}


def show():
    rows = records("bench")
    table("How many times as long the loop takes as the chunks: one CPU core, float32, H = 4,\n"
          f"K = V = 32, torch {rows[0]['torch']}", rows, ["B", "T"], {"loop": itemgetter("loop")})


STUDIES = [Study("bench", grid(B=[32, 4], T=[1024]), lambda setting, _: measure(**setting))]


def main(argv=None):
    chapter(__doc__, show, STUDIES, argv)


if __name__ == "__main__":
    run_cli(main)
