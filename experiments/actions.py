"""Is the command invented, or is the state lost?  A model writes both, or is given the commands.

A text of listings.py is a listing of commands, and the session in which they are typed and the
whole state is printed. A model is trained on texts of 4 to 16 commands, by next-token prediction.
Then it goes on from a listing, token by token. It says the token that it finds most likely.
    own        it reads its own commands and its own states
    kept       it reads the true commands and its own states
    restored   it reads the true commands and the true states
The prompts and the questions are always given. A command or a state is right if all of its tokens
are. A state is `followed` if Python shows it after the commands that were read. In `own` these are
the model's own commands, right or wrong.

All arms read the same texts, as many tokens. Their rates are those that arms.py chose for another
task. The hybrid has one linear RNN layer and one attention layer, and the rates of the linear RNN.

    python -m experiments.actions run hybrid --seed 0     # train, evaluate in each mode, record
    python -m experiments.actions eval RUN --lengths 8:1,256:1 --mode own
    python -m experiments.actions cost                    # the price of dense prints

Finding (experiments/results/actions.jsonl: S3, 4 million tokens, and S5, 12 million, three seeds
each; in %, the least and the greatest, at 8, 16, 32 and 128 commands; chance is 17 and 1).
                         commands, own                   states, kept
    S3  linrnn           90-93   41-51   22-26   14-17   100     100     89-100  87-100
        hybrid           98-100  86-91   21-23   17-18   100     100     100     100
        transformer      95-100  58-88   17-19   17-18   100     100     44-72   16-21
        lstm             21-30   16-23   16-17   17      100     100     100     91-100
    S5  linrnn           60-68   7-13    1-2     0-1     100     100     89-100  11-76
        hybrid           100     98-100  1-2     1       100     100     97-100  78-100
        transformer      100     99      1-2     1       15-100  8-100   3-70    0-1
        lstm             1-2     1       0-1     1       14-16   7-10    4-5     1-2
No arm copies a listing that is longer than those of training. Its own commands fail first. The
hybrid copies as well as the Transformer, and tracks as well as the linear RNN, or better. The
Transformer loses the state soon after 16 commands, also with each true state restored: on S5 it
then has 3 to 16% at 128, the linear RNN 42 to 99 and the hybrid 100. One of its seeds on S5, and
all of the LSTM's, have not learned the states when the tokens are spent.
    The price of dense prints (the linear RNN on S3, 16 commands). With S = 1, 2, 4, 8 a command
and its share of a print have 20, 14.5, 11.75 and 10.4 tokens. Within the same 4 million, the states
stay at 100%, and its own commands rise from 41-51 to 76-89%: rarer prints leave more texts. Prints
of one variable in place of all (as many tokens on S3) are as good up to S = 4; at S = 8 the state
is tracked on one seed of three.

Source: "Debugging code world models". With full S5 commands a Transformer keeps 100, 100, 100, 90,
90% over 8, 16, 32, 64, 128 commands if the true commands are forced, and 100, 80, 40, 0, 0% with
its own.
"""

import argparse
import itertools
import json
import shlex
from pathlib import Path

import numpy as np
import torch

import train
from data import Group, generator, number, parse_stages, user_errors
from eval import append_record, check_record, load_run
from experiments import arms
from experiments.adversary import FallingRun
from experiments.arms import folder_of, learn, summary
from experiments.listings import COMMAND, STATE, ActionTask
from experiments.pairs import make_eval_parser, run_part
from models import (MODELS, AttentionBlock, DeltaBlock, LanguageModel, check_sizes,
                    choose_device)

RESULTS = Path(__file__).parent / "results"
ARMS = {name: arms.ARMS[name] for name in ("linrnn", "transformer", "lstm")}
ARMS |= {"hybrid": "--model hybrid"}
RATES = arms.RATES | {"hybrid": arms.RATES["linrnn"]}
SPACINGS = [1, 2, 4, 8]
LENGTHS = "8:{0},16:{0},32:{0},64:{0},128:{0}"  # of the evaluation, at the spacing of a run
KEYS = ["arm", "group", "millions", "shown", "spacing", "tokens_per_command"]  # of the table
MODES = {"own": (COMMAND, STATE), "kept": (STATE,), "restored": ()}  # what is read as it was said


# --- A hybrid -------------------------------------------------------------------------------------

class Hybrid(LanguageModel):
    """Mixers alternate: the delta rule, then attention. The first can track, the second can copy.

    Raises: ValueError for beta_max outside [0, 2], or an odd width of a head.
    """

    def __init__(self, vocab_size, d_model=56, heads=4, layers=2, beta_max=2.0, conv_width=8):
        check_sizes(d_model, heads)
        if not 0 <= beta_max <= 2 or d_model // heads % 2:
            raise ValueError("beta_max must lie in [0, 2], and d_model / heads must be even; got "
                             f"{beta_max}, and {d_model} / {heads}")
        mixers = itertools.cycle([lambda: DeltaBlock(d_model, heads, beta_max, 1),
                                  lambda: AttentionBlock(d_model, heads)])
        super().__init__(vocab_size, d_model, layers, conv_width, lambda: next(mixers)())


MODELS["hybrid"] = Hybrid


# --- Generation -----------------------------------------------------------------------------------

@torch.no_grad()
def generate(model, tokens, free):
    """What the model says at each place, and what it read: [B, T] each.

    It reads its own word at the places that are `free`, bool [T], and the true one elsewhere. The
    true words up to the next free place are streamed in one piece. Place 0 must not be free.
    """
    said, read, state, begin = tokens.clone(), tokens.clone(), None, 0
    for end in [*np.flatnonzero(free).tolist(), tokens.shape[1]]:
        logits, state = model.stream(read[:, begin:end], state)
        said[:, begin + 1:end + 1] = logits.argmax(-1)[:, :tokens.shape[1] - begin - 1]
        if end < tokens.shape[1]:
            read[:, end] = said[:, end]
        begin = end
    return said, read


def written_commands(task, lines):
    """Lines without prompts [B, L, w - 1] -> commands [B, L, n], and whether each is one, [B, L].

    A line that is no command counts as the identity.
    """
    numbers = {bytes(line): i for i, line in enumerate(task.command_tokens(task.alphabet)[:, 1:])}
    found = np.array([[numbers.get(bytes(line), -1) for line in trace] for trace in lines])
    known = found >= 0
    return np.where(known[..., None], task.alphabet[found], np.arange(task.group.degree)), known


def evaluate(model, task, length, spacing, mode, traces=32, seed=0, device="cpu"):
    """A row of the table; by_position has the means of eight equal parts of the trace."""
    commands, asked = task.draw(traces, length, spacing, generator(seed, "test", length, spacing))
    truth, roles = task.write(commands, asked)[0], task.roles(length, spacing)
    said, read = (x.cpu().numpy() for x in generate(
        model, torch.from_numpy(truth).to(device), np.isin(roles, MODES[mode])))

    def right(role, expected, count):
        return (said == expected)[:, roles == role].reshape(traces, count, -1).all(-1)

    count = length // spacing
    command, state = right(COMMAND, truth, length), right(STATE, truth, count)
    own, known = written_commands(task, read[:, roles == COMMAND].reshape(traces, length, -1))
    intact = np.logical_and.accumulate(known, 1)[:, spacing - 1::spacing]
    followed = right(STATE, task.write(own, asked)[0], count) & intact
    hits = {"commands": command, "states": state, "followed": followed, "final": state[:, -1],
            "perfect": command.all(1) & state.all(1)}
    parts = {name: np.array_split(hits[name], min(8, hits[name].shape[1]), 1)
             for name in ("commands", "states")}
    return {"mode": mode, "length": length, "spacing": spacing, "traces": traces,
            **{name: round(float(x.mean()), 4) for name, x in hits.items()}, "by_position": {
                name: [round(float(x.mean()), 3) for x in parts[name]] for name in parts}}


def evaluate_and_print(model, task, lengths, modes, traces, seed=0, device="cpu"):
    shown, rows = ["commands", "states", "followed", "final", "perfect"], []
    print(f"\nchance: {1 / len(task.alphabet):.4f} of the commands, {1 / task.group.order:.4f} of "
          "whole states\n   (L,S)      mode" + "".join(f"{name:>10}" for name in shown))
    for (length, spacing), mode in itertools.product(lengths, modes):
        rows.append(row := evaluate(model, task, length, spacing, mode, traces, seed, device))
        print(f"{f'({length},{spacing})':>8}{mode:>10}"
              + "".join(f"{row[name]:10.4f}" for name in shown), flush=True)
    return rows


# --- The command line -----------------------------------------------------------------------------

def make_parser():
    parser = train.make_parser()
    parser.add_argument("--shown", default="all", choices=["all", "one"])
    parser.set_defaults(format="actions", chapter="experiments.actions")
    return parser


def schedule(task, spacing, millions, batch=16):
    """The stages 4:1, then 8 commands with ever rarer prints, then 16. All arms make these steps.

    The last stage has 70% of the tokens, and in it the rates fall to 0. The others share the rest.
    """
    stages, steps = [(4, 1), *((8, S) for S in SPACINGS if S <= spacing), (16, spacing)], []
    for length, S in stages:
        share = 0.7 if length == 16 else 0.3 / (len(stages) - 1)
        tokens = np.mean([len(task.roles(drawn, S)) for drawn in task.lengths(length, S)])
        steps.append(max(1, round(share * 1e6 * millions / batch / tokens)))
    return ["--curriculum", ",".join(f"{length}:{S}" for length, S in stages),
            "--stage-steps", ",".join(map(str, steps)), "--batch", str(batch)]


def run(argv):
    """One arm on so many tokens, and its evaluation."""
    parser = argparse.ArgumentParser(prog="python -m experiments.actions run")
    add = parser.add_argument
    add("arm", choices=ARMS)
    add("--group", default="S5")
    add("--shown", default="all", choices=["all", "one"], help="variables after every S commands")
    add("--spacing", type=int, default=1, choices=SPACINGS, help="commands per print, S")
    add("--seed", type=number(0), default=0)
    add("--millions", type=number(1e-3, 1e4, float), default=12, help="tokens to read, in millions")
    add("--traces", type=number(1, 10**5), default=32, help="fresh traces for each length")
    add("--record", metavar="FILE", default=RESULTS / "actions.jsonl")
    with user_errors(parser, argv) as args:
        task = ActionTask(Group(args.group), shown=args.shown)
        options = [*ARMS[args.arm].split(), *RATES[args.arm].split(), "--group", args.group,
                   "--shown", args.shown, "--seed", str(args.seed),
                   *schedule(task, args.spacing, args.millions)]
        train.config_of(make_parser().parse_args(options))  # refuses bad values
        lengths = parse_stages(LENGTHS.format(args.spacing), task, args.traces)
        check_record(args.record)
    made, curve = learn(options, folder_of(options), float("inf"), make_parser(), FallingRun)
    results = evaluate_and_print(made.result.eval(), task, lengths, MODES, args.traces)
    append_record(args.record, f"{parser.prog} {shlex.join(argv)}", {
        "arm": args.arm, "group": args.group, "shown": args.shown, "spacing": args.spacing,
        "tokens_per_command": task.tokens_per_command(args.spacing), "millions": args.millions,
        **summary(made, curve), "results": results})


def eval_run(argv):
    """Other lengths, or one mode alone."""
    parser = make_eval_parser("experiments.actions")
    parser.add_argument("--mode", choices=MODES, help="one of them alone")
    with user_errors(parser, argv) as args:
        device = choose_device(args.device)
        checkpoint, task, model = load_run(args.run, device)
        if not isinstance(task, ActionTask):
            raise ValueError(f"{args.run} is no run of experiments.actions")
        lengths = parse_stages(args.lengths or LENGTHS.format(1), task, args.traces)
        if args.record:
            check_record(args.record)
    modes = [args.mode] if args.mode else MODES
    results = evaluate_and_print(model, task, lengths, modes, args.traces, args.seed, device)
    numbers = {"config": checkpoint["config"], "results": results}
    if args.json:
        print(json.dumps(numbers))
    if args.record:
        with user_errors(parser, argv):
            append_record(args.record, f"{parser.prog} {shlex.join(argv)}",
                          {"seed": checkpoint["config"]["seed"], **numbers, "device": device})


def cost(argv):
    """The records at 16 commands, and what a command costs there: least and greatest of seeds."""
    parser = argparse.ArgumentParser(prog="python -m experiments.actions cost")
    parser.add_argument("file", nargs="?", default=RESULTS / "actions.jsonl", help="of records")
    table, asked = {}, [("own", "commands"), ("own", "states"), ("kept", "states")]
    with user_errors(parser, argv) as args:
        try:
            for line in map(json.loads, Path(args.file).read_text().splitlines()):
                rows = {row["mode"]: row for row in line["results"] if row["length"] == 16}
                key = tuple(line[name] for name in KEYS)
                table.setdefault(key, []).append([rows[mode][name] for mode, name in asked])
        except (KeyError, TypeError):
            raise ValueError(f"{args.file} holds other records than those of run") from None
    print("arm         group  millions shown  S  tokens per command  seeds   own commands    "
          "own states   kept states")
    for (arm, group, millions, shown, spacing, tokens), seeds in sorted(table.items()):
        cells = (f"{100 * min(x):5.1f} - {100 * max(x):5.1f}" for x in zip(*seeds))
        print(f"{arm:12}{group:>5}{millions:10.1f}{shown:>6}{spacing:3}{tokens:20.2f}"
              f"{len(seeds):7}  " + " ".join(cells))


def main(argv=None):
    run_part("experiments.actions", {"run": run, "eval": eval_run, "cost": cost}, argv)


if __name__ == "__main__":
    main()
