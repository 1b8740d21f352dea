"""How far does a trained model track? python eval.py RUN

For each (length L, spacing S), on fresh traces that no training run ever sees:
    chance   accuracy of a guess that knows the variable but not the state
    all      accuracy over all reveals
    final    accuracy at the last reveal of each trace, after all L commands
    every    fraction of traces in which EVERY reveal is right, with its 95% Wilson interval
The model reads the whole true trace (teacher forcing) and is asked for the revealed values only. An
earlier reveal tells it one variable, as it does in training; `final` of a model that lost the state
is therefore above chance at a small spacing.

For a run with uncertain commands three columns stand beside these, from the exact filter's p at the
same reveals (data.py), which no model can pass:
    bayes    accuracy to expect of the best answer there is, the mean of max p
    KL       KL(p || model) in nats: what the model loses on average by not being the filter
    excess   the same from the values that were revealed: mean of log p(value) - log model(value)
and, as a yardstick that needs no training, KL of marginals: that of the paper's n x n matrix of
marginals, in fp64 and decoded by Sinkhorn-Knopp (scan.py, section 6).

Recurrent models are streamed, piece by piece, in memory that does not depend on L.

--exhaustive is a certificate: from each state of the group, each command, then each variable is
printed; all answers are compared with the group's own table.

Next: analysis.ipynb.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data import REVEALS, parse_stages, stream
from models import choose_device
from scan import marginal_coins, marginal_reveals, sinkhorn, two_sided_recurrence
from train import load_run, replace_file

PIECE = 2048  # tokens of each trace that a recurrent model is fed at a time
FORMATS = [".png", ".pdf", ".svg"]
# Tokens in flight, over all traces of a batch, for a model that cannot be streamed.
ROW_TOKENS = 2**18


@torch.no_grad()
def predict(model, inputs):
    """The most likely output at each position. Shapes: inputs [B, T] -> [B, T]."""
    if not hasattr(model, "stream"):
        return model(inputs).argmax(-1)
    state, predicted = None, []
    for piece in inputs.split(PIECE, dim=1):
        logits, state = model.stream(piece, state)
        predicted.append(logits.argmax(-1))
    return torch.cat(predicted, 1)


def right_answers(model, inputs, targets, reveals, device, note=None):
    """Which reveals were answered rightly: arrays [B, T] -> bool [B, reveals per trace]."""
    rows = max(1, ROW_TOKENS // inputs.shape[1] if not hasattr(model, "stream") else 64)
    right = []
    for i in tqdm(range(0, len(inputs), rows), desc=note, leave=False, disable=note is None):
        given = torch.from_numpy(np.ascontiguousarray(inputs[i:i + rows])).to(device)
        right.append(predict(model, given).cpu().numpy() == targets[i:i + rows])
    return np.concatenate(right)[reveals].reshape(len(inputs), -1)


def wilson(hits, total, z=1.96):
    """The 95% Wilson score interval of a proportion (Wilson 1927); honest near 0 and 1."""
    share, spread = hits / total, z * z / total
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / total + spread / total / 4) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


# --------------------------------------------------------------------------------------------------
# Uncertain commands: how far from the exact filter?
# --------------------------------------------------------------------------------------------------

@torch.no_grad()
def answer_log_probabilities(model, inputs, reveals, device, note=None):
    """log softmax at the reveals. Shapes: arrays [B, T] -> [B, reveals per trace, vocabulary]."""
    streamed, answers = hasattr(model, "stream"), []
    rows = 64 if streamed else max(1, ROW_TOKENS // inputs.shape[1])
    for i in tqdm(range(0, len(inputs), rows), desc=note, leave=False, disable=note is None):
        given = torch.from_numpy(np.ascontiguousarray(inputs[i:i + rows])).to(device)
        asked = torch.from_numpy(np.ascontiguousarray(reveals[i:i + rows])).to(device)
        state, row_of, logits_at = None, [], []
        for piece, wanted in zip(given.split(PIECE if streamed else given.shape[1], 1),
                                 asked.split(PIECE if streamed else given.shape[1], 1)):
            logits, state = model.stream(piece, state) if streamed else (model(piece), None)
            logits_at.append(logits[wanted])
            row_of.append(wanted.nonzero()[:, 0])
        order = torch.cat(row_of).argsort(stable=True)  # by trace, and in it by time
        answers.append(torch.cat(logits_at)[order].double().log_softmax(-1).cpu().numpy())
    return np.concatenate(answers).reshape(len(inputs), -1, answers[0].shape[-1])


def marginal_predictions(task, program):
    """What equations (18) and (19) of scan.py, in fp64, and Sinkhorn's decoder expect at each
    reveal. Shapes: -> [B, L/S, n].
    """
    (batch, length, n), count = program.commands.shape, program.asked.shape[1]
    spacing, stays = length // count, torch.eye(n, dtype=torch.float64)
    asked = torch.from_numpy(program.asked)
    answers = torch.from_numpy(task.answers(program.commands, program.asked, program.executed))
    coins = marginal_coins(*map(torch.from_numpy, (program.commands, program.chance)))
    left, right, write = marginal_reveals(asked, answers, n)
    # Time: S commands, then a reveal; a command has R = I and W = 0.
    left = torch.cat([coins.unflatten(1, (count, spacing)), left.unsqueeze(2)], 2)
    right = torch.cat([stays.expand(batch, count, spacing, n, n), right.unsqueeze(2)], 2)
    write = torch.cat([torch.zeros(batch, count, spacing, n, n), write.unsqueeze(2)], 2)
    states = two_sided_recurrence(*(x.flatten(1, 2) for x in (left, right, write)), stays)
    ahead = sinkhorn(states[:, spacing - 1::spacing + 1])
    return ahead.gather(2, asked[..., None, None].expand(-1, -1, 1, n))[:, :, 0].numpy()


def divergence(p, log_q):
    """KL(p || q) in nats, over the last axis; 0 log 0 = 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p > 0, p * (np.log(p) - log_q), 0.0).sum(-1)


def against_filter(model, task, program, device, note=None):
    """Which answers were right, bool [B, L/S], and the comparison with the exact filter."""
    tokens, reveals = task.write(*program)
    inputs, targets, reveals = tokens[:, :-1], tokens[:, 1:], reveals[:, 1:]
    answers = targets[reveals].reshape(len(inputs), -1, 1)
    log_q = answer_log_probabilities(model, inputs, reveals, device, note)
    p, values = task.best_predictions(program), (answers == task.value_tokens).argmax(-1)[..., None]
    kl = divergence(p, log_q[..., task.value_tokens])
    excess = np.log(np.take_along_axis(p, values, -1)) - np.take_along_axis(log_q, answers, -1)
    with np.errstate(divide="ignore"):
        kl_marginal = divergence(p, np.log(marginal_predictions(task, program)))
    return log_q.argmax(-1) == answers[..., 0], {
        "bayes": float(p.max(-1).mean()), "kl": float(kl.mean()), "excess": float(excess.mean()),
        "kl_marginal": float(kl_marginal.mean()), "kl_by_position": kl.mean(0).tolist(),
        "kl_marginal_by_position": kl_marginal.mean(0).tolist()}


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------

def evaluate(model, task, length, spacing, traces=256, seed=0, device="cpu", reveals="random",
             share=None):
    """Accuracy on fresh traces, a pure function of the arguments but the device.

    A share, even 0, asks for the comparison with the filter on traces of that share.
    """
    rng = stream(seed, "test", length, spacing)
    if task.uncertain or share is not None:
        program = task.draw(traces, length, spacing, rng, reveals, share)
        right, compared = against_filter(model, task, program, device, f"({length},{spacing})")
    else:
        inputs, targets, where = task.training_batch(traces, length, spacing, rng)
        right = right_answers(model, inputs, targets, where, device, f"({length},{spacing})")
        compared = {}
    every = right.all(1)
    low, high = wilson(every.sum(), traces)
    return {"length": length, "spacing": spacing, "traces": traces, "reveals": right.size,
            "chance": task.chance, "all": float(right.mean()), "final": float(right[:, -1].mean()),
            "every": float(every.mean()), "every_low": low, "every_high": high,
            "by_position": right.mean(0).tolist(), **compared}


def evaluate_and_print(model, task, lengths, traces=256, seed=0, device="cpu", reveals="random",
                       share=None):
    """The table of this file's header, then the accuracy by reveal position, at each length."""
    results, compared = [], task.uncertain or share is not None
    print(f"\n{'(L,S)':>10} {'chance':>7} {'all':>7} {'final':>7} {'every':>7}  "
          "95% interval    reveals" + (
              "    bayes       KL   excess  KL of marginals" if compared else ""))
    for length, spacing in lengths:
        row = evaluate(model, task, length, spacing, traces, seed, device, reveals, share)
        results.append(row)
        print(f"{f'({length},{spacing})':>10} {row['chance']:7.1%} {row['all']:7.2%} "
              f"{row['final']:7.2%} {row['every']:7.1%}  "
              f"{row['every_low']:.1%} - {row['every_high']:.1%}{row['reveals']:>10,}" + (
                  "  {bayes:7.2%} {kl:8.4f} {excess:8.4f}         {kl_marginal:8.4f}".format(**row)
                  if compared else ""))
    print("accuracy by reveal position:")
    for row in results:
        shown = row["by_position"][::max(1, len(row["by_position"]) // 8)]
        print(f"{'({length},{spacing})'.format(**row):>10} " +
              " ".join(f"{share:7.1%}" for share in shown))
    return results


# --------------------------------------------------------------------------------------------------
# The certificate
# --------------------------------------------------------------------------------------------------

def shortest_words(group, alphabet):
    """For each element that the alphabet can reach a shortest word: {number: list of commands}.

    Breadth first, so that each word extends a shorter one by one command. The identity has the
    empty word.
    """
    numbers = group.index(alphabet)
    words, frontier = {0: []}, [0]
    while frontier:
        reached = []
        for element in frontier:
            for letter, product in zip(alphabet, group.compose(element, numbers)):
                if int(product) not in words:
                    words[int(product)] = words[element] + [letter]
                    reached.append(int(product))
        frontier = reached
    return words


def exhaustive(model, task, device="cpu"):
    """Every command from every state, each variable read out in a trace of its own.

    Returns (pairs, failures): the number of (state, command) pairs, and for each pair in which a
    variable was wrong (state, command, expected values, answers). The expected values are those of
    Group.compose.
    """
    group, n = task.group, task.group.degree
    alphabet = group.elements if task.commands == "full" else group.transpositions
    words = shortest_words(group, alphabet)
    pairs, failures = 0, []
    for size in sorted({len(word) for word in words.values()}):
        states = [state for state, word in words.items() if len(word) == size]
        for state in tqdm(states, desc=f"states {size} commands away", leave=False):
            past = np.array(words[state], int).reshape(size, n)
            lines = np.stack([np.vstack([past, command]) for command in alphabet])
            tokens, _ = task.write(lines.repeat(n, 0),
                                   np.tile(np.arange(n), len(alphabet))[:, None])
            given = torch.from_numpy(tokens[:, :-2]).to(device)  # up to `b `: the value comes next
            answers = predict(model, given)[:, -1].cpu().numpy().reshape(len(alphabet), n)
            expected = group.elements[group.compose(state, group.index(alphabet))]
            wrong = (answers != task.value_tokens[expected]).any(1)
            pairs += len(alphabet)
            failures += [(group.elements[state], alphabet[i], expected[i], answers[i])
                         for i in np.flatnonzero(wrong)]
    return pairs, failures


def print_certificate(pairs, failures, task, shown=20):
    """The count of right pairs, and the first failures in the notation of the traces."""
    print(f"\nexhaustive: {pairs - len(failures):,} of {pairs:,} (state, command) pairs right, "
          f"{task.group.degree} variables each")
    for state, command, expected, answers in failures[:shown]:
        print(f"  state {spaced(state + 1)}, command {spaced(command + 1)}: "
              f"expected {spaced(expected + 1)}, "
              f"got {spaced(task.vocab[token] for token in answers)}")
    if len(failures) > shown:
        print(f"  and {len(failures) - shown:,} more")


def spaced(values):
    return " ".join(map(str, values))


# --------------------------------------------------------------------------------------------------
# The figure and the command line
# --------------------------------------------------------------------------------------------------

def plot(results, config, path):
    """Left: accuracy against length. Right: against the position of the reveal, for each length."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    trained = max(length for length, _ in config["curriculum"])
    blue, orange, grey = "#0072B2", "#D55E00", "#666666"  # Okabe and Ito 2008
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    lengths = [row["length"] for row in results]
    left.plot(lengths, [row["all"] for row in results], "o-", color=blue)
    left.plot(lengths, [row["every"] for row in results], "s-", color=orange)
    left.fill_between(lengths, [row["every_low"] for row in results],
                      [row["every_high"] for row in results], color=orange, alpha=0.2, linewidth=0)
    for key, label, colour, above in [("all", "all reveals", blue, True),
                                      ("every", "every reveal of a trace", orange,
                                       results[-1]["every"] < 0.5)]:
        left.annotate(label, (lengths[-1], results[-1][key]), (-8, 8 if above else -16),
                      textcoords="offset points", color=colour, ha="right")
    left.axvline(trained, color=grey, linestyle=":")
    left.annotate("longest training trace", (trained, 0.62), (4, 0),
                  textcoords="offset points", rotation=90, color=grey, va="center")
    left.set_xscale("log", base=2)
    left.set(xlabel="commands in the trace", ylabel="accuracy", ylim=(0, 1.05))
    for row, shade in zip(results, np.linspace(0.35, 1, len(results))):
        ends = np.arange(1, len(row["by_position"]) + 1) * row["spacing"]
        right.plot(ends, row["by_position"], color=blue, alpha=shade)
    right.axvline(trained, color=grey, linestyle=":")
    right.set(xlabel="commands read before the reveal")
    right.set_xscale("log", base=2)
    for axes in (left, right):
        axes.xaxis.set_major_formatter(ticker.ScalarFormatter())
        axes.axhline(results[0]["chance"], color=grey, linewidth=0.8)
        axes.annotate("chance", (axes.get_xlim()[0], results[0]["chance"]), (3, 3),
                      textcoords="offset points", color=grey)
    far = results[-1]
    figure.suptitle(f"{config['model']} on {config['group']}, trained to {trained} commands: "
                    f"{far['all']:.0%} of reveals right at {far['length']}")
    figure.tight_layout()
    replace_file(Path(path), lambda side: figure.savefig(
        side, format=Path(path).suffix[1:], dpi=150))
    pyplot.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", help="a run folder, made by train.py")
    parser.add_argument("--lengths", help="LENGTH:SPACING,... (default 64:8,128:16,256:32)")
    parser.add_argument("--traces", type=int, default=256, help="fresh traces for each length")
    parser.add_argument("--seed", type=int, default=0,
                        help="of the traces; any seed is disjoint from training")
    parser.add_argument("--uncertain", type=float, metavar="P",
                        help="share of uncertain commands in the traces (default: the run's own)")
    parser.add_argument("--reveals", default="random", choices=REVEALS,
                        help="which variables are revealed (a run with --uncertain)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    parser.add_argument("--exhaustive", action="store_true", help="every command from every state")
    parser.add_argument("--plot", metavar="FILE", help="write the figure (.png, .pdf, .svg)")
    parser.add_argument("--json", action="store_true",
                        help="print the numbers as one JSON line at the end")
    args = parser.parse_args(argv)
    try:
        if args.traces < 1 or args.seed < 0:
            raise ValueError("--traces must be at least 1 and --seed not negative; "
                             f"got {args.traces}, {args.seed}")
        if args.plot and Path(args.plot).suffix not in FORMATS:
            raise ValueError(f"--plot writes {', '.join(FORMATS)}; got {args.plot}")
        device = choose_device(args.device)
        config, task, model = load_run(args.run, device)
        lengths = parse_stages(args.lengths or task.default_lengths, task)
        if (args.uncertain or args.reveals != "random") and not task.uncertain:
            raise ValueError("--uncertain and --reveals ask how a belief is tracked; this run was "
                             "trained without --uncertain and knows no coins")
        if not 0 <= (args.uncertain or 0) <= 1:
            raise ValueError(f"--uncertain must lie between 0 and 1; got {args.uncertain}")
        results = evaluate_and_print(model, task, lengths, args.traces, args.seed, device,
                                     args.reveals, args.uncertain)
        numbers = {"config": config, "results": results}
        if "kl" in results[0]:
            numbers |= {"uncertain": args.uncertain, "reveals": args.reveals}
        if args.exhaustive and config["format"] != "repl":
            raise ValueError("--exhaustive reads variables out of REPL traces; "
                             "this run was trained on words")
        if args.exhaustive:
            pairs, failures = exhaustive(model, task, device)
            print_certificate(pairs, failures, task)
            numbers["exhaustive"] = {"pairs": pairs, "right": pairs - len(failures)}
        if args.plot:
            plot(results, config, args.plot)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps(numbers))


if __name__ == "__main__":
    main()
