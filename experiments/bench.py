"""How fast is the scan?

Four forms of the delta rule do the same work, forward and backward, and are timed in turns:

    loop        the definition, token by token
    textbook    chunks whose triangular matrix is inverted row by row, as in public codes
    autograd    the forward of scan.py, with torch's own backward
    by hand     scan.delta_rule_chunked: the same forward, its backward written by hand

Finding (float32, one CPU core, H = 4, T = 1,024, K = V = 32). With B = 32 the loop takes 5.5 times
as long as the scan by hand, the textbook form 2.0 times, torch's own backward 1.3 times. With B =
4, where the loop is overhead, the loop takes 13 times as long.

    python -m experiments.bench                the table; --run measures what has no record
    python -m experiments.bench measure        measures now, here, and records nothing

Read the ratios, not the milliseconds: those of one run met the same other load on the machine.

Source: the textbook form follows the pseudo-code of Yang et al. 2024 (arXiv 2406.06484).

Next: analysis.ipynb.
"""

import statistics
import time

import torch
import torch.nn.functional as F

from data import Parser, run
from eval import find_device
from experiments import chapter, grid, record, records, table
from scan import (along, check_inputs, delta_rule_chunked, delta_rule_recurrent, in_chunks,
                  scan_forward)

C = 16  # tokens in a chunk


def textbook(q, k, v, beta):
    """Chunk by chunk, and each inverse row by row: equations (5) to (9) of scan.py.

    Shapes: as delta_rule_chunked.
    """
    q, k, b, v, state_KV = check_inputs(q, k, along(k, beta), v, None)
    q_NCK, k_NCK, b_NCK, v_NCV = [in_chunks(x, C) for x in (q, k, b, v)]

    # (I + L)^-1 without its diagonal: row i is -L_i (I + the rows above it).
    inverse_NCC = -(k_NCK @ b_NCK.mT).tril(-1)
    for i in range(1, C):
        row = inverse_NCC[..., i:i + 1, :i].clone()
        above = inverse_NCC[..., :i, :i].clone()
        inverse_NCC[..., i:i + 1, :i] = row + row @ above
    inverse_NCC = inverse_NCC + torch.eye(C).to(inverse_NCC)

    u_NCV = inverse_NCC @ v_NCV
    w_NCK = inverse_NCC @ k_NCK
    outs = []
    for q_CK, b_CK, u_CV, w_CK in zip(*(x.unbind(-3) for x in (q_NCK, b_NCK, u_NCV, w_NCK))):
        r_CV = u_CV - w_CK @ state_KV
        outs.append(q_CK @ state_KV + (q_CK @ b_CK.mT).tril() @ r_CV)
        state_KV = state_KV + b_CK.mT @ r_CV
    return torch.cat(outs, -2)[..., :q.shape[-2], :], state_KV


def by_autograd(q, k, v, beta):
    """All chunks at once, as in scan.py, and torch differentiates it."""
    q, k, b, v, state_KV = check_inputs(q, k, along(k, beta), v, None)
    out_TV, state_KV, _ = scan_forward(q, k, b, v, state_KV, C)
    return out_TV, state_KV


FORMS = {"loop": delta_rule_recurrent, "textbook": textbook, "autograd": by_autograd,
         "by hand": delta_rule_chunked}
CELLS = grid(B=[32, 4], T=[1024])


def with_gradients(form, inputs, g_out):
    """The output of a form, and the gradients of all its inputs."""
    out, _ = form(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, g_out)]


def measure(B, T, device="cpu"):
    """A row for each form: the median of nine calls."""
    q, k, v, g_out = torch.randn(4, B, 4, T, 32, device=device)
    beta = 2 * torch.rand(B, 4, T, device=device)
    inputs = [x.requires_grad_() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta)]

    times = {name: [] for name in FORMS}
    for name in [*FORMS] * 9:  # in turns: other load on the machine meets all alike
        start = time.perf_counter()
        results = with_gradients(FORMS[name], inputs, g_out)
        results[-1].sum().item()  # a GPU works behind our back: wait for it
        times[name].append(1000 * (time.perf_counter() - start))

    medians = {name: statistics.median(times[name]) for name in FORMS}
    return [{"B": B, "T": T, "form": name, "milliseconds": medians[name],
             "slower": medians[name] / medians["by hand"]} for name in FORMS]


def make_missing():
    for cell in CELLS:
        if not records("bench", **cell):
            for row in measure(**cell):
                record("bench", row)


def print_rows(where, rows):
    table(f"Forward and backward, float32, {where}, H = 4, K = V = 32; slower: than `by hand`",
          rows, ["B", "T", "form"], {
              "milliseconds": lambda row: f"{row['milliseconds']:.0f}",
              "slower": lambda row: f"{row['slower']:.2f}"})


def show():
    rows = records("bench")
    print_rows(f"CPU, {rows[0]['threads']} thread(s)", rows)


def measure_here(argv):
    """What `python -m experiments.bench measure` does."""
    parser = Parser(prog="python -m experiments.bench measure", description="Time all forms now.")
    parser.add_argument("--device", help="cpu, cuda (cuda if it is there, else cpu)")
    device = find_device(parser.parse_args(argv).device)
    print_rows(f"{device}, {torch.get_num_threads()} thread(s)", measure(4, 1024, device))


def main(argv=None):
    chapter(__doc__, show, make_missing, {"measure": measure_here}, argv)


if __name__ == "__main__":
    run(main)
