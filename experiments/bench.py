"""How much faster than the loop is the chunked scan?

    python -m experiments.bench --batch 32 --lengths 1024 --rounds 9

Read the ratios, not the milliseconds: all forms are timed in turns, in one run. `slower` is the
time of a form, forward and backward, against C=32, which is scan.delta_rule_chunked.

Finding (float32, two cores, H = 4, T = 1,024, K = V = 32). With B = 32 the loop takes 2.9 times as
long as the chunked scan, the textbook form 2.2 times, torch's own backward 1.2 times. With B = 4,
where the loop is overhead, it takes 12 times as long.

Source: the textbook form follows the pseudo-code of Yang et al. 2024 (arXiv 2406.06484).

Next: analysis.ipynb.
"""

import argparse
import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F

from data import number, one_line_errors, parse, run
from experiments import record
from models import choose_device
from scan import (check_inputs, chunked_forward, delta_rule_chunked, delta_rule_recurrent,
                  in_chunks, solve_unit_triangle)

H, K, C = 4, 32, 32  # heads, their width, tokens in a chunk


# --- The forms ------------------------------------------------------------------------------------

def invert_row_by_row(L_NCC, rhs):
    """(I + L)^-1 rhs, from the inverse, made one row after the other."""
    inverse_NCC = -L_NCC.tril(-1)
    for i in range(1, L_NCC.shape[-1]):
        row = inverse_NCC[..., i, :i].clone()
        earlier = inverse_NCC[..., :i, :i].clone()
        inverse_NCC[..., i, :i] = row + (row.unsqueeze(-2) @ earlier).squeeze(-2)
    return rhs + inverse_NCC @ rhs


def by_autograd(q, k, v, beta, solve=solve_unit_triangle):
    """delta_rule_chunked, all chunks at once, with torch's own backward."""
    chunks = [in_chunks(x, C) for x in (q, k, v, beta.unsqueeze(-1))]
    state_KV = check_inputs(q, k, v, beta, None)
    out_NCV, state_KV, *_ = chunked_forward(*chunks, state_KV, solve)
    return out_NCV.flatten(-3, -2)[..., :q.shape[-2], :], state_KV


FORMS = {"loop": delta_rule_recurrent,
         "textbook": partial(by_autograd, solve=invert_row_by_row),
         "autograd": by_autograd,
         "C=32": partial(delta_rule_chunked, chunk_size=C)}  # its backward is written by hand



# --- Measurements ---------------------------------------------------------------------------------

def with_gradients(form, inputs, g_out):
    """The output of a form, and the gradients of all its inputs."""
    out, _ = form(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, g_out)]


def bench(B, T, rounds, device):
    """A row for each form. One that disagrees with the loop in float64 ends the program."""
    q, k, v, g_out = torch.randn(4, B, H, T, K, device=device)
    q, k, beta = F.normalize(q, dim=-1), F.normalize(k, dim=-1), 2 * torch.rand_like(q[..., 0])
    inputs = [x.requires_grad_() for x in (q, k, v, beta)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = with_gradients(delta_rule_recurrent, exact, g_out.double())

    errors, times = {}, {name: [] for name in FORMS}
    for name in [*FORMS] * rounds:  # in turns: other load on the machine meets all alike
        start = time.perf_counter()
        results = with_gradients(FORMS[name], inputs, g_out)
        results[-1].sum().item()  # a GPU works behind our back: wait for it
        times[name].append(1000 * (time.perf_counter() - start))

        # torch's maximum keeps a nan, that of Python may not; and not >: nan is wrong, too.
        worst = [(x - right).abs().max() for x, right in zip(results, truth)]
        errors[name] = torch.stack(worst).max().item()
        if not errors[name] <= 1e-3:
            raise SystemExit(f"{name} disagrees with the loop: largest error {errors[name]}")

    median = {name: statistics.median(times[name]) for name in FORMS}
    return [{"T": T, "form": name, "with_backward": median[name],
             "slower": median[name] / median["C=32"], "error": errors[name], "B": B, "H": H,
             "K=V": K, "device": device} for name in FORMS]


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.bench",
                                     description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--batch", type=number(1, 10**4), default=4)
    add("--lengths", type=number(1, 2**20), nargs="+", default=[128, 1024], help="T ...")
    add("--rounds", type=number(1, 10**4), default=5, help="medians of so many calls")
    add("--device", default="cpu", help="cpu, cuda")
    add("--record", action="store_true", help="append the rows to results/bench.jsonl")
    args = parse(parser, argv)
    with one_line_errors(parser):
        device = choose_device(args.device)

    torch.manual_seed(0)
    print(f"{device}, {torch.get_num_threads()} threads; medians in milliseconds")
    for T in args.lengths:
        for row in bench(args.batch, T, args.rounds, device):
            print(*[f"{key} {value:<7.3g}" if isinstance(value, float) else f"{key} {value:<8}"
                    for key, value in row.items()])
            if args.record:
                record("bench", row)


if __name__ == "__main__":
    run(main)
