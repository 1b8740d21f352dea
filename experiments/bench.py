"""How much faster than the loop is the chunked scan?

Four forms of the delta rule do the same work, forward and backward, and are timed in turns:

    loop        the definition, token by token
    textbook    chunks whose triangular matrix is inverted row by row, as in public codes
    autograd    the forward of scan.py, with torch's own backward
    by hand     scan.delta_rule_chunked: the same forward, its backward written by hand

Finding (float32, one CPU core, H = 4, T = 1,024, K = V = 32). With B = 32 the loop takes 4.0 times
as long as the scan by hand, the textbook form 1.8 times, torch's own backward 1.1 times. With B =
4, where the loop is overhead, the loop takes 10 times as long. All four agree to 1e-4.

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

from data import Parser, UserError, run
from experiments import chapter, grid, record, records, table
from models import find_device
from scan import (check_inputs, chunked_forward, delta_rule_chunked, delta_rule_recurrent,
                  in_chunks)

H, K, C = 4, 32, 16  # heads, their width, tokens in a chunk


# --- 1. The forms ---------------------------------------------------------------------------------

def textbook(q, k, v, beta):
    """Chunk by chunk, and each inverse row by row: equations (4) to (8) of scan.py.

    Shapes: as delta_rule_chunked.
    """
    state_KV = check_inputs(q, k, v, beta, None)
    q_NCK, k_NCK, v_NCV, beta_NC1 = [in_chunks(x, C) for x in (q, k, v, beta.unsqueeze(-1))]

    # (I + L)^-1 without its diagonal: row i is -L_i (I + the rows above it).
    inverse_NCC = -(beta_NC1 * k_NCK @ k_NCK.mT).tril(-1)
    for i in range(1, C):
        row = inverse_NCC[..., i:i + 1, :i].clone()
        above = inverse_NCC[..., :i, :i].clone()
        inverse_NCC[..., i:i + 1, :i] = row + row @ above
    inverse_NCC = inverse_NCC + torch.eye(C).to(inverse_NCC)

    u_NCV = inverse_NCC @ (beta_NC1 * v_NCV)
    w_NCK = inverse_NCC @ (beta_NC1 * k_NCK)
    outs = []
    for q_CK, k_CK, u_CV, w_CK in zip(*(x.unbind(-3) for x in (q_NCK, k_NCK, u_NCV, w_NCK))):
        d_CV = u_CV - w_CK @ state_KV
        outs.append(q_CK @ state_KV + (q_CK @ k_CK.mT).tril() @ d_CV)
        state_KV = state_KV + k_CK.mT @ d_CV
    return torch.cat(outs, -2)[..., :q.shape[-2], :], state_KV


def by_autograd(q, k, v, beta):
    """All chunks at once, as in scan.py, and torch differentiates it."""
    state_KV = check_inputs(q, k, v, beta, None)
    chunks = [in_chunks(x, C) for x in (q, k, v, beta.unsqueeze(-1))]
    out_NCV, state_KV, *_ = chunked_forward(*chunks, state_KV)
    return out_NCV.flatten(-3, -2)[..., :q.shape[-2], :], state_KV


FORMS = {"loop": delta_rule_recurrent, "textbook": textbook, "autograd": by_autograd,
         "by hand": delta_rule_chunked}


# --- 2. A measurement -----------------------------------------------------------------------------

def with_gradients(form, inputs, g_out):
    """The output of a form, and the gradients of all its inputs."""
    out, _ = form(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, g_out)]


def measure(B, T, rounds=9, device="cpu"):
    """A row for each form: medians of so many calls, and the largest error against float64.

    Raises: UserError if a form disagrees with the loop.
    """
    torch.manual_seed(0)
    q, k, v, g_out = torch.randn(4, B, H, T, K, device=device)
    beta = 2 * torch.rand(B, H, T, device=device)
    inputs = [x.requires_grad_() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = with_gradients(delta_rule_recurrent, exact, g_out.double())

    times = {name: [] for name in FORMS}
    errors = {}
    for name in [*FORMS] * rounds:  # in turns: other load on the machine meets all alike
        start = time.perf_counter()
        results = with_gradients(FORMS[name], inputs, g_out)
        results[-1].sum().item()  # a GPU works behind our back: wait for it
        times[name].append(1000 * (time.perf_counter() - start))

        # torch's maximum keeps a nan, that of Python may not; and not >: nan is wrong, too.
        worst = [(x - right).abs().max() for x, right in zip(results, truth)]
        errors[name] = torch.stack(worst).max().item()
        if not errors[name] <= 1e-3:
            raise UserError(f"{name} disagrees with the loop: largest error {errors[name]}")

    medians = {name: statistics.median(times[name]) for name in FORMS}
    return [{"B": B, "T": T, "form": name, "milliseconds": medians[name],
             "slower": medians[name] / medians["by hand"], "error": errors[name]}
            for name in FORMS]


# --- 3. The study, and the command line -----------------------------------------------------------

CELLS = grid(B=[32, 4], T=[1024])


def make_missing():
    for cell in CELLS:
        if not records("bench", **cell):
            for row in measure(**cell):
                record("bench", row)


def number(key, digits):
    """A column of a table."""
    return lambda rows: format(rows[0][key], digits)


def print_rows(title, rows):
    table(title, rows, ["B", "T", "form"], {
        "milliseconds": number("milliseconds", ".0f"), "slower": number("slower", ".2f"),
        "error": number("error", ".0e")})


def show():
    rows = records("bench")
    print_rows(f"Forward and backward, float32, CPU, {rows[0]['threads']} thread(s), H = {H}, "
               f"K = V = {K}; slower: than `by hand`", rows)


def measure_here(argv):
    parser = Parser(prog="python -m experiments.bench measure", description="Time all forms now.")
    add = parser.add_argument
    add("--batch", type=int, default=4, help="B (4)")
    add("--length", type=int, default=1024, help="T (1024)")
    add("--rounds", type=int, default=5, help="medians of so many calls (5)")
    add("--device", help="cpu, cuda (cuda if it is there, else cpu)")
    args = parser.parse_args(argv)

    device = find_device(args.device)
    print_rows(f"Forward and backward, float32, {device}, {torch.get_num_threads()} thread(s); "
               "slower: than `by hand`",
               measure(args.batch, args.length, args.rounds, device))


def main(argv=None):
    chapter(__doc__, show, make_missing, {"measure": measure_here}, argv)


if __name__ == "__main__":
    run(main)
