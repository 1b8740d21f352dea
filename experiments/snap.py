"""Can a drifting linear RNN be mended by a non-linear step between its linear ones?

A linear recurrence cannot pull back a state that has drifted: the steps that carry the state carry
its error, too. But the state is a linear image of a permutation matrix P (heads.py, equation 1). So
read P off the state, take the nearest permutation, and write its image back. No weight changes, and
no state is listed: S26 has 4 * 10^26, and the fit 676 unknown parts. Nor is any label needed: the
model is asked for each variable on short traces, and its own answers are fitted.

Finding (results/snap.jsonl). Put back after every command, every reveal is right in 32 of 32 traces
of 8,192 commands: on five of five seeds of S5, on two of two of S8, S12 and S26, and on a seed each
of the swaps of S5, S3, A5, Z7, D6 and S3xS4; on seeds 0 of S5 and S12 also in 4 of 4 of 65,536. The
five of S5 alone have 23 to 28% of the reveals at 8,192, near chance (20%). The margin falls with n:
wrong permutations are at least 4.7 times as far as the right one on S5, 3.6 on S8, 1.8 on S12 and
1.2 on S26. The more variables, the sooner must the next snap come. For all of 16 traces of 2,048
commands one in 192 suffices on S5 (three seeds), one in 128 on S8, in 64 on S12 (two seeds each),
and in 32 on S26 (one seed). One in 384 is right in 0, 4 and 11 traces on S5, one in 192 in 15 and
16 on S8, one in 128 in 4 and 16 on S12, one in 64 in 15 on S26.
    An error becomes permanent: a state once put on the wrong place stays wrong. And a belief about
uncertain commands has no permutation to go back to.

Command: python -m experiments.snap experiments/results/models/linrnn-S5-seed0

Sources: arXiv 2605.07755, affine recurrences cannot correct errors; arXiv 2606.07254 projects the
state in training, too. Reading and writing a state as a matrix is this project's.

Next: scale.py.
"""

import argparse
import json
import shlex
import sys
import time

import torch

from data import generator, number, parse_stages, user_errors
from eval import append_record, check_record, evaluate_and_print
from experiments.extract import check_order, extract_and_print
from experiments.heads import (LinearImage, Untracked, collect_states, load_repl_run,
                               read_heads, tracking_heads, write_heads)
from models import choose_device


def fit_image(model, task, heads, traces=None, device="cpu"):
    """The LinearImage of these heads, and numbers that say how well it holds on 16 fresh traces.

    The fit takes 64 traces of 16 commands, or n^2 / 4: four states or more for each direction. So
    few do as well as ever more. The labels are the model's own answers.
    Raises: Untracked if fewer than 95% of their states are read as the model answers.
    """
    if not heads:
        raise Untracked("no head of this model tracks; `python eval.py RUN` evaluates it alone")
    traces = traces or max(64, task.group.degree**2 // 4)
    states, perms = collect_states(model, task, heads, traces + 16, 16, 16,
                                   generator(0, "valid", 16), device, ask=True)
    image = LinearImage(heads, states[:traces], perms[:traces])
    read, residual, margin = image.certify(states[traces:])
    right = (read.cpu().numpy() == perms[traces:]).all(-1).mean()
    if right < 0.95:
        raise Untracked(f"the heads do not hold the permutation: after a fit on {traces} traces "
                        f"{right:.1%} of fresh states are read as the model answers; train longer, "
                        "or fit on more traces")
    return image, {"heads": heads, "directions": image.sizes.tolist(), "margin":
                   margin.min().item(), "residual": residual.square().mean().sqrt().item()}


class Snapped:
    """A model whose tracking heads are put back at every `interval`-th settled place of a trace.

    It is streamed as the model itself is. Snapping waits for the next token, so a returned state is
    the model's own. State: that of the model, the last two tokens [B, 2], the settled places [B].
    """

    def __init__(self, model, task, image, interval=1):
        self.model, self.image, self.interval = model, image, interval
        # A settled place is after a comma name and `=`, or a newline for swaps, and nowhere else.
        self.commas = torch.tensor([task.vocab.index(f", {name}") for name in task.names])
        self.mark = task.vocab.index("\n" if task.commands == "swap" else " = ")

    @torch.no_grad()
    def stream(self, tokens, state=None):
        *inner, past, count = state or [tokens.new_full((len(tokens), 2), -1),
                                        tokens.new_zeros(len(tokens))]
        window, inner = torch.cat([past, tokens], 1), inner or None
        after = torch.isin(window[:, :-2], self.commas.to(window)) & (window[:, 1:-1] == self.mark)
        number = count.unsqueeze(1) + after.cumsum(1)
        due = after & (number % self.interval == 0)
        logits, begin = [], 0
        for end in [*due.any(0).nonzero().flatten().tolist(), tokens.shape[1]]:
            if begin < end:
                piece, inner = self.model.stream(tokens[:, begin:end], inner)
                logits.append(piece)
            if end < tokens.shape[1]:
                held, rows = read_heads(inner, self.image.heads), due[:, end].view(-1, 1, 1, 1)
                put = torch.where(rows, self.image.correct(held), held)
                inner = write_heads(inner, self.image.heads, put)
            begin = end
        return torch.cat(logits, 1), [*inner, window[:, -2:], number[:, -1]]


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.snap",
                                     description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("run", help="a run folder, made by train.py")
    add("--lengths", default="8192:128", help="LENGTH:SPACING,...")
    add("--traces", type=number(1), default=16, help="fresh traces for each length")
    add("--seed", type=number(0), default=0, help="of the traces, never those of training")
    add("--interval", type=number(1), default=1, help="commands from snap to snap")
    add("--extract", action="store_true", help="compare the automaton with the group (extract.py)")
    add("--record", metavar="FILE", help="append the numbers as one JSON line")
    add("--json", action="store_true", help="print the numbers as one JSON line at the end")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    argv = sys.argv[1:] if argv is None else argv
    with user_errors(parser, argv) as args:
        device = choose_device(args.device)
        checkpoint, task, model = load_repl_run(args.run, device)
        lengths = parse_stages(args.lengths, task, args.traces)
        if args.extract:
            check_order(task.group)
        if args.record:
            check_record(args.record)
    begin = time.monotonic()
    try:
        heads = tracking_heads(model, task, device)
        image, found = fit_image(model, task, heads, device=device)
        print(f"tracking: heads {heads} (entry, head), {len(image.sizes)} directions, residual "
              f"{found['residual']:.2f}, margin at least {found['margin']:.1f}")
        extracted = args.extract and extract_and_print(model, task, heads, device)
    except Untracked as error:
        parser.error(str(error))
    numbers = {"config": checkpoint["config"], "tracking": found}
    if extracted:
        numbers["extract"] = extracted
    snapped = Snapped(model, task, image, args.interval)
    numbers["results"] = evaluate_and_print(snapped, task, lengths, args.traces, args.seed, device)
    if args.json:
        print(json.dumps(numbers))
    if args.record:
        with user_errors(parser, argv):
            append_record(args.record, f"{parser.prog} {shlex.join(argv)}",
                          {"seed": checkpoint["config"]["seed"], **numbers, "device": device,
                           "minutes": (time.monotonic() - begin) / 60})


if __name__ == "__main__":
    main()
