"""How fast is the scan?  Forward and backward, against three other forms of the delta rule.

    loop          the definition, token by token
    textbook      chunks, each triangle inverted row by row, as in transformers 5.24 and the
                  pseudo-code of Yang et al. 2024 (arXiv 2406.06484)
    autograd      the forward of scan.py, differentiated by torch
    hand-written  scan.delta_rule_chunked

In float32 on one CPU core the loop takes 5.5 to 13 times as long as the hand-written form. The
textbook form takes twice as long, and autograd 1.3 to 1.4 times. The loop compares worst in a
small batch, where most of its time is overhead.

    python -m experiments.bench                                                the table
    python -c "from experiments.bench import measure; print(measure(4, 1024, 'cuda'))"
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

C = 16  # tokens in a chunk


def textbook(q, k, v, beta):
    """Equations (5) to (9) of scan.py, chunk by chunk.  Shapes: as delta_rule_chunked."""
    *inputs, state_KV = check_inputs(q, k, beta_k(k, beta), v, None)
    q_NCK, k_NCK, b_NCK, v_NCV = [to_chunks(x, C) for x in inputs]

    # (I + L)^-1 without its diagonal: row i is -L_i (I + the rows above it).
    inverse_NCC = -(k_NCK @ b_NCK.mT).tril(-1)
    for i in range(1, C):
        row = inverse_NCC[..., i:i + 1, :i].clone()
        above = inverse_NCC[..., :i, :i].clone()
        inverse_NCC[..., i:i + 1, :i] = row + row @ above
    inverse_NCC = inverse_NCC + torch.eye(C).to(inverse_NCC)

    outs = []
    u_NCV, w_NCK = inverse_NCC @ v_NCV, inverse_NCC @ k_NCK
    for q_CK, b_CK, u_CV, w_CK in zip(*(x.unbind(-3) for x in (q_NCK, b_NCK, u_NCV, w_NCK))):
        d_CV = u_CV - w_CK @ state_KV
        outs.append(q_CK @ state_KV + (q_CK @ b_CK.mT).tril() @ d_CV)
        state_KV = state_KV + b_CK.mT @ d_CV
    return torch.cat(outs, -2)[..., :q.shape[-2], :], state_KV


def by_autograd(q, k, v, beta):
    """The forward of scan.py, which torch differentiates.  Shapes: as delta_rule_chunked."""
    *inputs, state_KV = check_inputs(q, k, beta_k(k, beta), v, None)
    out_NCV, state_KV, _ = chunked_forward(*[to_chunks(x, C) for x in inputs], state_KV)
    return out_NCV.flatten(-3, -2)[..., :q.shape[-2], :], state_KV


FORMS = {"loop": delta_rule_recurrent, "textbook": textbook, "autograd": by_autograd,
         "hand-written": delta_rule_chunked}


def with_gradients(form, inputs, g_out):
    """The output of a form, and the gradients of all its inputs."""
    out, _ = form(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, g_out)]


def measure(B, T, device="cpu"):
    """The median time of nine calls of each form, divided by that of the hand-written one."""
    q, k, v, g_out = torch.randn(4, B, 4, T, 32, device=device)
    beta = 2 * torch.rand(B, 4, T, device=device)
    inputs = [x.requires_grad_() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta)]

    times = {name: [] for name in FORMS}
    for name in [*FORMS] * 9:  # in turns, so other load on the machine slows all forms alike
        start = time.perf_counter()
        results = with_gradients(FORMS[name], inputs, g_out)
        results[-1].sum().item()  # waits for a GPU, which computes asynchronously
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
