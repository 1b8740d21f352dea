"""What does a head do inside a linear RNN: with which beta, with which keys, and at what price?

Finding, on the five stored models of S5, seeds 0-4. The commands below and analysis.ipynb print
these numbers; there is no record.
    One head of four tracks. Its mean beta is 1.84 or more at all five right-hand names of a command
and at two to four of the five left-hand ones.
    It is needed, and the others are not. With its beta scaled to [0, 1] the accuracy at (64,2)
falls from 100% to 20.5% on seed 0, where chance is 20.0%; that of any other head costs nothing.
    Its keys are not, in general, those of the hand-built machine (scan.py, section 1). The 25
right-hand keys have 300 inner products. Their absolute values correlate with those of the machine
by r = .90, .64, .50, .53 and .79. So "a close relative of the machine" is true of two seeds at
most. The learned keys span 9, 8, 7, 7 and 8 dimensions (singular values above a fifth of the
largest), the machine's 9. At the first place the keys of two names have |cos| = .74 to .98 on
average, the machine's .5.
    A linear map reads the whole permutation off the tracking head, and off no other (fit_probe).
    The hand-built machine itself errs by rounding only. In float32 the error of S grows by about
1.5e-7 a command, to 1.5e-3 after 10,000. In bfloat16 it is 0, since rounding to 8 bits corrects.

Commands, where RUN is experiments/results/models/linrnn-S5-seed0:
    python -m experiments.inside RUN                 beta and keys, head by head
    python -m experiments.inside RUN --intervene     accuracy with the beta of one head narrowed

Sources: Siems et al. 2026 (arXiv 2602.14814), figure 5 for beta and figure 6 for the intervention;
the comparison of the keys with the machine's is this project's.

Next: bench.py.
"""

import argparse
import json

import numpy as np
import torch
import torch.nn.functional as F

from data import MAX_COMMANDS, generator, number, run_commands, user_errors
from eval import evaluate
from experiments.heads import delta_blocks, load_repl_run, scan_inputs, tracking_heads
from scan import delta_rule_chunked, delta_rule_recurrent, exchange_key, swap_machine_keys

# --- Beta and keys, place by place ----------------------------------------------------------------

def command_lines(task, of_tokens, length, spacing):
    """The part of an array over tokens that belongs to commands: [B, T, ...] -> [B, L, line, ...].
    """
    batch, rest = len(of_tokens), of_tokens.shape[2:]
    body = of_tokens[:, task.start_tokens().size:].reshape(batch, length // spacing, -1, *rest)
    reveal = task.reveal_tokens(np.array(0), np.array(0)).size
    return body[:, :, :-reveal].reshape(batch, length, -1, *rest)


def beta_by_place(model, task, traces=16, length=64, spacing=8, seed=0):
    """Mean beta at each place in the line of a command: [layers, heads, line]. Figure 5.

    Of a token with several writes the first is taken.
    """
    tokens, _ = task.sample(traces, length, spacing, generator(seed, "valid"))
    betas = [beta[..., 0].permute(0, 2, 1)
             for *_, beta in scan_inputs(model, torch.from_numpy(tokens))]
    return torch.stack([command_lines(task, beta, length, spacing).mean((0, 1)).T
                        for beta in betas])


def name_keys(model, task, layer, head, traces=16, length=64, spacing=8, seed=0):
    """A head's mean key for each left-hand name [n, K], and for the name y as i-th on the right
    [n, n, K] (place i, name y), of full commands and the first write of a token.

    k and -k make the same step, so the mean is taken up to sign.
    """
    n = task.group.degree
    tokens = torch.from_numpy(task.sample(traces, length, spacing, generator(seed, "valid"))[0])
    keys = scan_inputs(model, tokens)[layer][1][:, head, :, 0]
    lines = command_lines(task, tokens, length, spacing).flatten(0, 1)
    keys = command_lines(task, keys, length, spacing).flatten(0, 1)
    places = slice(n + 2, 2 * n + 2)  # `>>> `, n names, ` = `, n names
    left, right = keys[:, 1:n + 1], keys[:, places]
    names = torch.tensor([task.names.index(task.vocab[token][-1])
                          for token in lines[:, places].flatten()]).view(-1, n)
    fetched = torch.stack([torch.stack([mean_axis(right[names[:, i] == y, i]) for y in range(n)])
                           for i in range(n)])
    return torch.stack([mean_axis(left[:, x]) for x in range(n)]), fetched


def mean_axis(keys):
    """The unit vector closest, up to sign, to the given ones: [count, K] -> [K]."""
    return torch.linalg.svd(keys, full_matrices=False).Vh[0]


def likeness(fetched):
    """How much right-hand keys [n, n, K] are like those of the hand-built machine: in [-1, 1].

    It is the correlation of the absolute inner products of all pairs of keys. Those of the machine,
    (e_i - e_y') / sqrt 2 for the name y at place i, meet at 60 degrees if they share the place or
    the name, else at 90. A rotation of all keys, or the sign of one, changes nothing.
    """
    n = len(fetched)
    place = torch.arange(n)
    built = exchange_key(place.unsqueeze(1).expand(n, n), (place + n).expand(n, n), 2 * n)
    pairs = np.triu_indices(n * n, 1)
    ours, machines = [(k.flatten(0, 1) @ k.flatten(0, 1).T).abs().numpy()[pairs]
                      for k in (fetched.double(), built)]
    return float(np.corrcoef(ours, machines)[0, 1])


# --- What a head is worth -------------------------------------------------------------------------

def intervene(model, task, limits, length=64, spacing=2, traces=64, seed=0):
    """Accuracy over all reveals with the beta of ONE head scaled from [0, beta_max] to [0, limit],
    the other heads as trained: [layers, heads, limits]. Figure 6 of the paper.
    """
    accuracy = []
    for block in delta_blocks(model).values():
        trained, rows = block.beta_max, []
        for head in range(block.heads):
            rows.append([])
            for limit in limits:
                block.beta_max = torch.full((block.heads, 1, 1), float(trained))
                block.beta_max[head] = limit
                rows[-1].append(evaluate(model, task, length, spacing, traces, seed)["all"])
        block.beta_max = trained
        accuracy.append(rows)
    return np.array(accuracy)


def fit_probe(states, perms):
    """A linear map from a state to its permutation: least squares onto the n x n matrix with a 1
    where variable i holds value j. Shapes: states [N, ...], perms [N, n] -> weights [features, nn].

    snap.py fits the other way round, from the permutation to the state.
    """
    targets = F.one_hot(torch.from_numpy(perms), perms.shape[-1]).float()
    return torch.linalg.lstsq(states.flatten(1), targets.flatten(1), driver="gelsd").solution


def probe_accuracy(weights, states, perms):
    """Share of states of which the map reads every variable rightly."""
    n = perms.shape[-1]
    read = (states.flatten(1) @ weights).view(-1, n, n).argmax(-1)
    return (read == torch.from_numpy(perms)).all(-1).float().mean().item()


# --- The head built by hand -----------------------------------------------------------------------

def swap_machine_errors(group, lengths, dtype, traces=4, seed=0):
    """The machine of scan.py, set by hand, on random commands: what floating point leaves of it.

    S holds value j in slot i as S[i, j] = 1. Returns, after each of the lengths, the largest
    distance of an entry of S from its exact value, and the share of variables whose largest entry
    names the wrong value. bf16 runs as a loop over tokens: torch solves no triangle in it.
    """
    scan = delta_rule_recurrent if dtype == torch.bfloat16 else delta_rule_chunked
    n, rng, done, rows = group.degree, generator(seed, "test", 0), 0, []
    state = torch.eye(2 * n, n, dtype=dtype).expand(traces, -1, -1)
    exact = None
    for length in lengths:
        while done < length:
            commands = group.draw((traces, min(1000, length - done)), rng)
            keys = swap_machine_keys(torch.from_numpy(commands)).to(dtype)
            _, state = scan(keys, keys, keys.new_zeros(*keys.shape[:-1], n),
                            keys.new_full(keys.shape[:-1], 2), state)
            exact = run_commands(commands, exact)[:, -1]
            done += commands.shape[1]
        ideal = F.pad(F.one_hot(torch.from_numpy(exact), n), (0, 0, 0, n))
        rows.append({"commands": length, "error": float((state.double() - ideal).abs().max()),
                     "wrong": float((state[:, :n].argmax(-1).numpy() != exact).mean())})
    return rows


# --- The command line -----------------------------------------------------------------------------

def place_names(task):
    """What stands at each place of a command; name i is the i-th on the right."""
    if task.commands == "swap":
        return [">>>", "x", "y", "=", "y", "x", "newline"]
    right = [f"name {i}" for i in range(1, task.group.degree + 1)]
    return [">>>", *task.names, "=", *right, "newline"]


def print_table(title, columns, rows):
    """Columns: their names. Rows: (name, numbers) each."""
    print(f"\n{title}\n{'':>10}" + "".join(f"{column:>8}" for column in columns))
    for name, numbers in rows:
        print(f"{name:>10}" + "".join(f"{number:8.3f}" for number in numbers))


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.inside",
                                     description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("run", help="a run folder of a linrnn, made by train.py")
    add("--intervene", action="store_true", help="accuracy with the beta of each head narrowed")
    add("--traces", type=number(1, MAX_COMMANDS // 64), default=64, help="fresh traces")
    add("--seed", type=number(0), default=0, help="of the traces, never those of training")
    add("--json", action="store_true", help="print the numbers as one JSON line at the end")
    with user_errors(parser, argv) as args:
        checkpoint, task, model = load_repl_run(args.run)
        blocks, config = delta_blocks(model), checkpoint["config"]
        if not blocks:
            raise ValueError(f"only a linrnn has beta and keys; this run is a {config['model']}")
    tracking = tracking_heads(model, task)
    heads = [(entry, head) for entry, block in blocks.items() for head in range(block.heads)]
    names = [f"{entry}:{head}" + "*" * ((entry, head) in tracking) for entry, head in heads]
    numbers = {"config": config, "tracking": tracking}
    print("heads as entry:head; those with a * track")
    if args.intervene:
        limits = np.linspace(1, 0.5, 6) * config["options"]["beta_max"]
        accuracy = intervene(model, task, limits, traces=args.traces, seed=args.seed)
        print_table("accuracy at (64,2) with the beta of one head scaled to [0, limit]; "
                    f"chance {task.chance:.3f}", [f"{limit:.2f}" for limit in limits],
                    zip(names, accuracy.reshape(len(heads), -1)))
        numbers["intervention"] = {"limits": limits.tolist(), "accuracy": accuracy.tolist()}
    else:
        betas = beta_by_place(model, task, args.traces, seed=args.seed)
        print_table("mean beta at each place of a command, over all names that stand there", names,
                    zip(place_names(task), betas.flatten(0, 1).T.tolist()))
        numbers["beta"] = betas.tolist()
        if task.commands == "full":
            numbers["likeness"] = []
            for entry, head in tracking:
                _, keys = name_keys(model, task, [*blocks].index(entry), head, args.traces,
                                    seed=args.seed)
                numbers["likeness"].append(likeness(keys))
                print(f"\nkeys of {entry}:{head} against those of the hand-built machine: "
                      f"r = {numbers['likeness'][-1]:.2f}")
    if args.json:
        print(json.dumps(numbers))


if __name__ == "__main__":
    main()
