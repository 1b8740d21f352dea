"""What does one cycle of the adversary do to the state of a trained model?

    python -m experiments.cycle RUN        # a run of adversary.py

Finding (experiments/results/cycle.jsonl, five linear RNNs). The belief of the theory halves in each
cycle. The state of the trained network grows, from 21 - 24 at cycle 1 to 57 - 70 at cycle 64. It
counts: a linear map reads the number of cycles off it (R^2 = 1.000; off an LSTM 0.25 - 0.37). Ahead
of a random reveal such a map reads the marginals (0.65 - 0.72) better than the joint belief (0.49 -
0.56). If one direction of the state is frozen, the one in which it grows, the loss at cycle 64
falls from 0.58 - 1.74 nats to 0.012 - 0.052. If the size of the state is kept instead, 0.54 - 0.99
remain. So underflow is not what goes wrong. Each cycle adds the same evidence once more.

Next: underflow.py.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from data import generator, user_errors
from eval import append_record, check_record, load_run
from experiments.adversary import CYCLES
from scan import delta_product

RESULTS = Path(__file__).parent / "results"


@torch.no_grad()
def states_at(model, inputs, places):
    """What the last mixer holds after each of these tokens, flat: [B, places, F], float64."""
    state, start, found = None, 0, []
    for place in places:
        _, state = model.stream(torch.from_numpy(inputs[:, start:place + 1]), state)
        parts = state[-2] if isinstance(state[-2], tuple) else (state[-2],)
        found.append(torch.cat([part.reshape(len(inputs), -1) for part in parts
                                if torch.is_tensor(part)], 1))
        start = place + 1
    return torch.stack(found, 1).double()


def fit_probe(features, targets):
    """A linear read-out with a bias, by least squares with a small ridge."""
    mean, target_mean = features.mean(0), targets.mean(0)
    x, y = features - mean, targets - target_mean
    gram = x.T @ x
    gram += 1e-6 * gram.diagonal().mean() * torch.eye(len(gram))
    weights = torch.linalg.solve(gram, x.T @ y)
    return lambda new: (new - mean) @ weights + target_mean


def explained(predicted, targets):
    """R^2, the share of the variance that is explained: 1 is exact, 0 no better than the mean."""
    return float(1 - (predicted - targets).square().sum() / (
        targets - targets.mean(0)).square().sum())


@torch.no_grad()
def cycle_matrices(model, inputs, first, last):
    """The transition of one cycle, tokens first + 1 to last, without its writes: [B, H, K, K]."""
    x = model.embedding(torch.from_numpy(inputs[:, :last + 1]))
    for block in model.blocks[:-2]:
        x, _ = block(x)
    q, k, v, beta = (part[:, :, first + 1:] for part in model.blocks[-2].inputs_of_scan(x))
    batch, heads, width = q.shape[0], q.shape[1], k.shape[-1]
    identity = torch.eye(width, dtype=x.dtype).expand(batch, heads, -1, -1)
    return delta_product(q, k, torch.zeros_like(v), beta, identity)[1]


@torch.no_grad()
def losses(model, batch, correct=None):
    """KL(filter, model) at each reveal, and S after it [B, reveals, H, K, K].

    correct(cycle, S) -> S may change the state of the mixer after each reveal.
    """
    places, state, start, kl, states = batch.reveals[0].nonzero()[0], None, 0, [], []
    for cycle, place in enumerate(places):
        logits, state = model.stream(torch.from_numpy(batch.inputs[:, start:place + 1]), state)
        if correct:
            state[-2] = correct(cycle, state[-2])
        best = torch.from_numpy(batch.best[:, cycle])
        gap = best.clamp_min(1e-300).log() - logits[:, -1].double().log_softmax(-1)
        kl.append((best * gap).sum(-1).mean().item())
        states.append(state[-2])
        start = place + 1
    return kl, torch.stack(states, 1)


def keep_size(states):
    """A correction that brings each head's S back to its size at cycle 1."""
    size = states[:, 1].flatten(-2).norm(dim=-1)[..., None, None]
    return lambda cycle, S: S if cycle < 2 else S * (
        size / S.flatten(-2).norm(dim=-1)[..., None, None])


def freeze_growth(states, first=2, later=20):
    """A correction that lets nothing grow along one direction, that from S_first to S_later.

    The direction is each trace's own: of all numbers that its heads hold, one combination is put
    back to its value at cycle `first`. All others are left alone.
    """
    kept = states[:, first].flatten(1)
    direction = F.normalize((states[:, later] - states[:, first]).flatten(1), dim=-1)

    def correct(cycle, S):
        grown = ((S.flatten(1) - kept) * direction).sum(-1, keepdim=True)
        return S if cycle <= first else (S.flatten(1) - grown * direction).view_as(S)

    return correct


def main(argv=None):
    """What a trained run holds along the cycles of the adversary, and which map a cycle is."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m experiments.cycle")
    parser.add_argument("run")
    parser.add_argument("--record", metavar="FILE", default=RESULTS / "cycle.jsonl")
    with user_errors(parser, argv) as args:
        checkpoint, task, model = load_run(args.run)
        config = checkpoint["config"]
        if config["format"] != "repetitions" or config["model"] == "transformer":
            raise ValueError(f"{args.run} is no run of experiments.adversary with a recurrent "
                             "mixer")
        check_record(args.record)
    numbers = {"model": config["model"], "seed": config["seed"]}

    program = task.draw(4096, 16, 4, generator(0, "valid"))
    batch, belief = task.batch_of(program), torch.from_numpy(task.beliefs(program)[:, -1])
    held = task.group.elements[:, :, None] == np.arange(task.group.degree)  # [Q, n, n]
    marginals = belief @ torch.from_numpy(held.reshape(len(held), -1).astype(float))
    last = batch.reveals[0].nonzero()[0][-1]  # the token ahead of the last value, as the belief is
    features = states_at(model, batch.inputs, [last])[:, 0]
    half = len(features) // 2
    for name, target in [("joint", belief), ("marginals", marginals)]:
        probe = fit_probe(features[:half], target[:half])
        numbers[f"r2_{name}"] = explained(probe(features[half:]), target[half:])

    for schedule in ("adversarial", "honest"):
        batch = task.batch_of(task.draw(64, 1 + CYCLES, 1, generator(0, "valid"), schedule))
        places = batch.reveals[0].nonzero()[0]
        features = states_at(model, batch.inputs, places)
        numbers[f"size_{schedule}"] = features.norm(dim=-1).mean(0).tolist()
        count = torch.arange(1.0 + CYCLES).double().expand(len(features), -1)
        probe = fit_probe(features[:32].flatten(0, 1), count[:32].reshape(-1, 1))
        numbers[f"r2_count_{schedule}"] = explained(probe(features[32:].flatten(0, 1)),
                                                    count[32:].reshape(-1, 1))
        if schedule == "adversarial" and config["model"] == "linrnn":
            matrices = cycle_matrices(model, batch.inputs, *places[4:6])
            sizes = torch.linalg.eigvals(matrices.double()).abs().sort(descending=True)[0]
            numbers["eigenvalues"] = sizes.mean(0).tolist()
            numbers["kl"], states = losses(model, batch)
            numbers["kl_kept_size"], _ = losses(model, batch, keep_size(states))
            numbers["kl_frozen"], _ = losses(model, batch, freeze_growth(states))
    print(json.dumps(numbers))
    append_record(args.record, f"{parser.prog} {shlex.join(argv)}", numbers)


if __name__ == "__main__":
    main()
