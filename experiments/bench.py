"""How fast is the chunked scan, and what would be the most that any chunked form could gain?

Each form computes the delta rule and its gradients for the same random inputs:
    loop              scan.delta_rule_recurrent
    textbook          chunks of 32; (I + L)^-1 made row by row, as textbooks do; torch's backward
    autograd          chunks of 32; a triangular solve; torch's backward
    C=16, 32, 64      scan.delta_rule_chunked, whose backward is written by hand
    compiled          C=32 under torch.compile (--compile)
Printed are the medians in milliseconds of the forward alone and of both passes, the peak memory,
the largest error of values and gradients against the float64 loop, and times_bound, the ratio to
the time that the matrix products alone would take. A form that disagrees with the loop ends the
program.

Finding (experiments/results/bench.jsonl, float32, two cores, forward and backward). With B = 32,
H = 4, T = 1,024 and K = V = 32 the chunked scan takes 0.12 s. The loop takes 2.9 times as long, the
textbook form 2.2 times, torch's own backward 1.2 times. The chunked scan stands at 2.0 times its
bound, at 1.9 on one core. The loop stands at 5.9: no chunked form could be more than six times as
fast as the loop here. C = 16 takes as long as C = 32, and C = 64 a quarter more. With B = 4 the
loop takes 12 times as long, and a token 3.8 microseconds at T = 1,024 and 5.0 at 65,536.
    What the chunk size trades: a larger C means fewer sequential steps, T / C, and more work per
token, C K for the triangle.
    The gradient of the output is a dense tensor, a fixed random weight for each entry. Records at
commit 4474c86 took that of out.sum(), one number expanded to the shape of out. No model hands such
a tensor to a scan, and torch multiplies it matrix by matrix: they had 3.3 times the bound.
    train.py --compile (compile.jsonl): 39 seconds of compiling for all five stages of the default
run. A step then takes 0.85 to 0.90 of its time. The first loss and gradient norm of each stage
differ by 2e-7 at most. Nothing has been recorded on a GPU.

    python -m experiments.bench --batch 32 --lengths 1024 --rounds 9
    python -m experiments.bench --steps       # train.py's own steps, with and without --compile

Sources: the textbook form follows the pseudo-code of Yang et al. 2024 (arXiv 2406.06484).

Next: analysis.ipynb.
"""

import argparse
import functools
import itertools
import math
import shlex
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.profiler import profile

import train
from data import generator, number, user_errors
from eval import append_record, check_record
from models import choose_device
from scan import (check_inputs, chunked_forward, delta_rule_chunked, delta_rule_recurrent,
                  in_chunks, solve_unit_triangle)

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
    """delta_rule_chunked with C = 32, all chunks at once, and torch's own backward."""
    chunks = [in_chunks(x, 32) for x in (q, k, v, beta.unsqueeze(-1))]
    state_KV = check_inputs(q, k, v, beta, None)
    out_NCV, state_KV, *_ = chunked_forward(*chunks, state_KV, solve)
    return out_NCV.flatten(-3, -2)[..., :q.shape[-2], :], state_KV


FORMS = {"loop": delta_rule_recurrent,
         "textbook": functools.partial(by_autograd, solve=invert_row_by_row),
         "autograd": by_autograd,
         **{f"C={C}": functools.partial(delta_rule_chunked, chunk_size=C) for C in (16, 32, 64)},
         "compiled": lambda *x: torch.compile(delta_rule_chunked, dynamic=False)(*x)}
MAX_NUMBERS = 2**26  # of q, and of the state: 256 MiB each
LONGEST_LOOP = 4096  # tokens: the forms other than C=... keep T states, or matrices of all chunks


# --- Measurements ---------------------------------------------------------------------------------

def random_inputs(shape, device):
    """Unit q and k, normal v, beta uniform in (0, 2), and a gradient of the output.

    The shape is [B, H, T, K], and V = K.
    """
    q, k, v, g_out = (torch.randn(shape) for _ in range(4))
    inputs = F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, 2 * torch.rand(shape[:-1])
    return [x.to(device).requires_grad_() for x in inputs], g_out.to(device)


def measure(function, inputs, g_out=None):
    """Milliseconds of one call, and its output; given g_out, with the gradients of the inputs."""
    start = time.perf_counter()
    with torch.set_grad_enabled(g_out is not None):
        out, _ = function(*inputs)
        gradients = () if g_out is None else torch.autograd.grad(out, inputs, g_out)
    results = [out.detach(), *gradients]
    results[-1][..., 0].sum().item()  # a GPU works behind our back: wait for it
    return 1000 * (time.perf_counter() - start), results


def peak_memory(function, inputs, g_out):
    """MiB that forward and backward add to the inputs, by torch's account of its allocations."""
    with profile(profile_memory=True) as profiler:
        measure(function, inputs, g_out)
    events = [event for event in profiler.profiler.kineto_results.events()
              if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes)) / 2**20


def arithmetic_bound(shape, device, C=32):
    """Milliseconds that the products of forward and backward take at the rate of tril(Q K^T) D."""
    *lead, T, K = shape
    N = math.prod(lead) * -(-T // C)
    P_NCC, d_NCV = torch.randn(N, C, C, device=device), torch.randn(N, C, K, device=device)
    product = min(measure(lambda P, d: (P @ d, None), (P_NCC, d_NCV))[0] for _ in range(9))
    # (4) to (16), V = K: 12 products of C C K, two solves for another 1.5, and 9 products of C K K
    return product * (27 / 2 * C + 9 * K) / C


def largest_error(results, truth):
    # torch's maximum of a nan is nan; that of Python may be another number
    return torch.stack([(x - exact).abs().max() for x, exact in zip(results, truth)]).max().item()


class Disagreement(Exception):
    """A form does not compute the delta rule."""


def bench(shape, forms, rounds, device):
    """Yields a row of numbers for each form that the length allows. Raises: Disagreement."""
    B, _, T, _ = shape
    inputs, g_out = random_inputs(shape, device)
    bound = arithmetic_bound(shape, device)
    times = {name: [] for name in forms if T <= LONGEST_LOOP or name.startswith("C=")}
    errors = {}
    if "loop" in times:
        exact = [x.detach().double().requires_grad_() for x in inputs]
        _, truth = measure(delta_rule_recurrent, exact, g_out.double())
    for name in [*times] * rounds:  # in turns: other load on the machine meets all alike
        forward, _ = measure(FORMS[name], inputs)
        both, results = measure(FORMS[name], inputs, g_out)
        times[name].append((forward, both))
        if "loop" in times:
            errors[name] = largest_error(results, truth)
    for name in times:
        forward, both = map(statistics.median, zip(*times[name]))
        row = {"T": T, "form": name, "forward": forward, "with_backward": both,
               "tokens/s": 1000 * B * T / both, "times_bound": both / bound,
               "peak": peak_memory(FORMS[name], inputs, g_out)}
        if errors:
            loop = statistics.median(both for _, both in times["loop"])
            row |= {"times_faster": loop / both, "error": errors[name]}
            if not errors[name] <= 10 * errors["loop"] + 1e-5:  # not >: nan disagrees, too
                raise Disagreement(f"{name} disagrees with the loop at T = {T}: largest error "
                                   f"{errors[name]:.3g}, that of the loop {errors['loop']:.3g}")
        yield row


def bench_steps(rounds, device):
    """Yields a row for each stage of the default run: a step as it is, and compiled, in turns.

    Both begin a stage with the same weights; `difference` is that of the first loss and gradient
    norm, relative. `compiling` are the seconds that the first two steps take beyond the median.
    """
    runs = {}
    for name, flags in [("eager", []), ("compiled", ["--compile"])]:
        config, task = train.config_of(train.make_parser().parse_args(flags))
        runs[name] = train.Run(config, None, device)
    for stage, (length, spacing) in enumerate(config["curriculum"]):
        batch = task.training_batch(config["batch"], length, spacing, generator(0, "train", stage))
        tensors = [torch.from_numpy(x).to(device).contiguous() for x in batch[:3]]
        runs["compiled"].model.load_state_dict(runs["eager"].model.state_dict())
        times, firsts = {name: [] for name in runs}, {}
        for name in [*runs] * (2 + rounds):
            start = time.perf_counter()
            found = train.train_step(runs[name].model, runs[name].optimizers, *tensors, 1.0)
            times[name].append(time.perf_counter() - start)
            firsts.setdefault(name, found)
        eager, compiled = (statistics.median(x[2:]) for x in times.values())
        exact, close = firsts.values()
        yield {"length": length, "spacing": spacing, "T": tensors[0].shape[1],
               "eager": 1000 * eager, "compiled": 1000 * compiled, "ratio": compiled / eager,
               "compiling": sum(times["compiled"][:2]) - 2 * compiled,
               "difference": max(abs(close[key] / exact[key] - 1)
                                 for key in ("loss", "reveal_loss", "gradient_norm"))}


# --- The command line -----------------------------------------------------------------------------

def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.bench",
                                     description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--batch", type=number(1, 10**4), default=4)
    add("--heads", type=number(1, 10**4), default=4)
    add("--width", type=number(1, 10**4), default=32, help="K = V")
    add("--lengths", type=number(1, 2**20), nargs="+", default=[128, 1024], help="T ...")
    add("--rounds", type=number(1, 10**4), default=5, help="medians of so many calls")
    add("--seed", type=number(0), default=0)
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--compile", action="store_true", help="torch.compile too")
    add("--steps", action="store_true", help="steps of train.py instead, eager and compiled")
    add("--record", metavar="FILE", help="append each row as one JSON line")
    argv = sys.argv[1:] if argv is None else argv
    with user_errors(parser, argv) as args:
        size = args.batch * args.heads * args.width * max(args.width, *args.lengths)
        if size > MAX_NUMBERS:
            raise ValueError(f"a tensor would have {size:,} numbers; at most {MAX_NUMBERS:,} are "
                             "measured")
        choose_device(args.device)  # refuses a device that is not there
        if args.record:
            check_record(args.record)
    torch.manual_seed(args.seed)
    forms = [name for name in FORMS if args.compile or name != "compiled"]
    about = {"B": args.batch, "H": args.heads, "K=V": args.width}
    tables = (bench((args.batch, args.heads, T, args.width), forms, args.rounds, args.device)
              for T in args.lengths)
    if args.steps:
        about, tables = {"model": "linrnn", "group": "S5"}, [bench_steps(args.rounds, args.device)]
    about |= {"device": args.device, "threads": torch.get_num_threads()}
    print(*[f"{key} {value}" for key, value in about.items()], sep=", ")
    print("Milliseconds, medians; peak in MiB; error of values and gradients against float64"
          if not args.steps else "Milliseconds, medians; seconds of compiling")
    try:
        for row in itertools.chain.from_iterable(tables):
            print(*[f"{key} {value:<7.3g}" if isinstance(value, float) else f"{key} {value:<8}"
                    for key, value in row.items()], flush=True)
            if args.record:
                append_record(args.record, f"{parser.prog} {shlex.join(argv)}", row | about)
    except Disagreement as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
