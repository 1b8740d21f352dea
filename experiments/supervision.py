"""What does a model gain if it is told the state after each line, and not only the next token?

    p = 1             An auxiliary head reads the hidden vector at the newline of each line.
    p ^= 0            It must say the state: 1, 1, 0. Its loss is added to that of the next tokens.
    p ^= 1            The text does not change, and the head is dropped when the model is used.
    assert p == 0     An answer is right if all its tokens are right.

    next          the next tokens alone, all programs of the training length n
    mixed         the same, each program of a length from 2 to n
    stages        the same with the lengths 2, 4, 8, ... n; each is left when it is learned.
                  Traces have a reveal after each command first, then ever rarer ones
    linear        supervised at length n: one linear map says all tokens of the state
    decoder       supervised at length n: a Transformer of two layers says them one by one
    contrastive   supervised at length n: the hidden vector must resemble that of a program which
                  only assigns this state, and not those of the other states; weight 0.1

A run is solved when all of 256 programs of length n from another random stream are answered. It
makes --last-steps more then, and the mean of their weights is tested at n, 2n and 4n. A run that is
not solved ends when its budget of programs is spent. The tests of `traces` have one reveal after
every n commands; the first one has the reveals of the training. Short programs are few (2^17 of
parity at length 16), so training may have met some of the 256. In the printed table `perfect`
counts whole answers; `all` and `final` count tokens, of which the last one of a permutation follows
from the others.

    python -m experiments.supervision run parity linear --model linrnn --length 16 --seed 0

Finding (experiments/results/supervision.jsonl; three seeds each; programs read until solved).
                      told the state stages           mixed          next
    parity 16         1,120 - 1,600  800 - 1,120      1 of 3: 1,440  none in 65,536
    parity 64         1,760 - 2,368  960 - 1,120      1 of 3: 3,840  -
    8 exchanges of 4  3,168 - 3,840  3,168 - 5,664    5,136 - 7,552  none in 65,536
    traces of (8,1)   4,224 - 5,136  26,256 - 42,336  -              2 of 3: 31,792, 32,768
    traces of (8,8)   5,664 - 6,240  16,272 - 42,336  -              none in 32,768
That is the linear RNN, told by the linear head, or by the decoder for traces. The contrastive loss
does as well. So the supervision replaces the curriculum, and it replaces dense reveals: with S = 1,
2, 4 and 8 traces need about as many. The next token alone stays at chance with S = 2, 4 and 8. The
stages, dense reveals first, learn (8,8), too, after 3 to 7 times as many traces. The number grows
slowly with the length, as in the source. On arithmetic, 4 lines and 65,536 programs, it has 32 to
40% right where the other arms have 19 to 22% (chance 19%).
    Longer programs are another matter. Told the state, the linear RNN has 100% right at twice the
length and 93 to 100% at four times, but for a seed of parity 64 with 55%. Traces go on only if
training shows each kind of line after each other: in (8,1) no command follows a command, in (8,8)
none follows a print, and such runs lose track where one does. After the stages of (8,8), which
begin with dense reveals, 56 to 84% are followed at four times the length. The Transformer learns
parity 8 after 14,784 to 26,256 programs, and parity 16 on two seeds of three, after 109,952 and
120,960; `next` at 8 and `mixed` at 16 are not learned. At twice the length it is at chance. With 4
exchanges it has 97 to 98% right when 65,536 are spent; the LSTM 29 to 57%, and 98% on parity 16.

The source trains small Transformers from scratch. The next token alone does not learn parity of
length 16. A curriculum needs millions of programs at 16 and 32, and fails at 64 after 2^25.
Supervision at length n only needs a fraction, and grows slowly with n. On arithmetic (lengths 4 to
6, 2^23 programs) it beats the curriculum except with numbers of 3 digits. How the models do on
longer programs is not told.

Deviations: our frame with its local block, and three mixers; the rates that arms.py chose.

Sources: "Grounding code understanding in step-by-step execution"; the stages, Siems et al. 2026
(arXiv 2602.14814), here by doubling.

Next: listings.py.
"""

import copy
import shlex
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel

import train
from data import generator, number, parse_stages, user_errors
from eval import append_record, evaluate_and_print, log_probabilities
from experiments.arms import RATES, folder_of
from experiments.pairs import run_part
from experiments.states import HEADS, NEWLINE, pad
from models import choose_device

RESULTS = Path(__file__).parent / "results"
GROUPS = {"parity": "S2", "permutations": "S4", "arithmetic": "S3", "traces": "S5"}  # by default
WEIGHTS = {"linear": 1.0, "decoder": 1.0, "contrastive": 0.1}  # of the auxiliary loss
ARMS = ["next", "mixed", "stages", *WEIGHTS]
TEMPERATURE = 0.1  # of the contrastive loss
UNSEEN = 256  # programs of a check
LEAST_STEPS = 10  # between two checks, and a tenth of the steps made
CONDITIONS = ["task", "arm", "model", "group", "commands", "digits", "length", "spacing", "seed",
              "options", "batch", "budget", "optimizer", "lr", "matrix_lr", "reveal_weight",
              "last_steps"]  # what a record tells of the options


# --- The losses -----------------------------------------------------------------------------------

def read(model, tokens):
    """The hidden vectors, which the head of the model turns into logits: [B, T] -> [B, T, D]."""
    x = model.embedding(tokens)
    for block in model.blocks:
        x, _ = block(x)
    return model.norm(x)


def contrastive_loss(model, task, hidden, states):
    """Which of the states of this batch is it?  Cross-entropy of cosines / TEMPERATURE.

    The model's own vector of a state is the hidden one after a program that only assigns it.
    """
    distinct, own = states.unique(dim=0, return_inverse=True)
    rows = [task.encode(f"{task.assignment(task.decode(state))}\n") for state in distinct.tolist()]
    ends = [len(row) - 1 for row in rows]
    tokens = torch.from_numpy(pad(rows, NEWLINE, max(ends) + 1)).to(hidden.device)
    vectors = read(model, tokens)[range(len(rows)), ends]
    cosines = F.normalize(hidden, dim=-1) @ F.normalize(vectors, dim=-1).mT
    return F.cross_entropy(cosines / TEMPERATURE, own)


def right_answers(found, tokens, width):
    """For each answer of so many tokens whether all of them were found: bool [answers]."""
    return (found == tokens).reshape(-1, width).all(-1)


def train_step(model, optimizers, task, batch, config):
    """train.train_step with an auxiliary loss, and with answers of several tokens."""
    hidden, answers = read(model, batch.inputs), batch.targets[batch.reveals]
    logits, auxiliary, arm = model.head(hidden), torch.zeros(()), config["arm"]
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    reveal_loss = F.cross_entropy(logits[batch.reveals], answers)
    if arm in HEADS:
        auxiliary = model.auxiliary(hidden[batch.ends], batch.states)
    if arm == "contrastive":
        auxiliary = contrastive_loss(model, task, hidden[batch.ends], batch.states)
    total = loss + config["reveal_weight"] * reveal_loss + WEIGHTS.get(arm, 0) * auxiliary
    for optimizer in optimizers:
        optimizer.zero_grad()
    total.backward()
    gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not (total.isfinite() and gradient_norm.isfinite()):
        raise FloatingPointError(f"the loss is {total.item()}, its gradient {gradient_norm.item()}")
    for optimizer in optimizers:
        optimizer.step()
    right = right_answers(logits[batch.reveals].argmax(-1), answers, task.answer_width)
    return {"loss": loss.item(), "reveal_loss": reveal_loss.item(), "auxiliary": auxiliary.item(),
            "reveal_accuracy": right.float().mean().item(), "gradient_norm": gradient_norm.item()}


# --- Training -------------------------------------------------------------------------------------

class SupervisedRun(train.Run):
    """A run that ends some steps after it is solved. The auxiliary head is a part of its model, so
    that it is trained and resumed, and no part of its result.
    """

    def __init__(self, config, folder, device):
        super().__init__(config, folder, device)
        self.progress |= {"solved": None, "curve": []}  # the curve: [programs seen, share right]
        length, spacing = config["curriculum"][-1]
        self.unseen = self.task.training_batch(UNSEEN, length, spacing, generator(
            config["seed"], "valid", length, spacing))
        if config["arm"] in HEADS:
            sizes = self.model.head.in_features, len(self.task.vocab), self.unseen.states.shape[1]
            self.model.auxiliary = HEADS[config["arm"]](*sizes).to(device)
            weights = self.model.auxiliary.parameters()
            self.optimizers.append(torch.optim.AdamW(weights, lr=config["lr"]))
            self.rates.append(config["lr"])
            self.average = AveragedModel(self.model)

    @property
    def result(self):
        model = copy.deepcopy(super().result)
        if self.config["arm"] in HEADS:
            del model.auxiliary
        return model

    def make_step(self):
        config, progress, start = self.config, self.progress, time.perf_counter()
        length, spacing = config["curriculum"][progress["stage"]]
        rng, size = generator(config["seed"], "train", progress["step"]), config["batch"]
        lengths = rng.integers(2, length + 1, size) if config["arm"] == "mixed" else length
        batch = self.task.training_batch(size, lengths, spacing, rng)
        batch = batch._make(torch.from_numpy(x).to(self.device).contiguous() for x in batch)
        for optimizer, rate in zip(self.optimizers, self.rates):
            optimizer.param_groups[0]["lr"] = rate * min(1, (progress["step"] + 1) / train.WARMUP)
        metrics = train_step(self.model, self.optimizers, self.task, batch, config)
        self.advance(metrics["reveal_accuracy"])
        progress["tokens"] += batch.inputs.numel()
        progress["seconds"] += time.perf_counter() - start
        return {"step": progress["step"], "length": length, "spacing": spacing, **metrics,
                "tokens": progress["tokens"], "seconds": progress["seconds"]}

    def advance(self, accuracy):
        """Count the step, go on to the next stage or to the end, and look whether it is solved."""
        config, progress, last = self.config, self.progress, len(self.config["curriculum"]) - 1
        progress["step"] += 1
        if progress["solved"]:
            self.average.update_parameters(self.model)
            progress["stage_step"] += 1
            progress["finished"] = progress["stage_step"] == config["last_steps"]
            return
        progress["streak"] = progress["streak"] + 1 if accuracy > config["advance"] else 0
        if progress["streak"] == train.STREAK and progress["stage"] < last:
            progress.update(stage=progress["stage"] + 1, streak=0)
        seen = progress["step"] * config["batch"]
        spent = progress["step"] == config["stage_steps"][0]
        before = progress["curve"][-1][0] if progress["curve"] else 0
        if seen >= before + max(before / 10, LEAST_STEPS * config["batch"]) or spent:
            share = self.share_of_unseen()
            progress["curve"].append([seen, share])
            progress["finished"] = spent and share < 1
            if share == 1:
                progress.update(solved=seen, stage=last, stage_step=0)

    def share_of_unseen(self):
        inputs, targets, reveals = self.unseen[:3]
        found = log_probabilities(self.model, inputs, reveals, self.device).argmax(-1)
        return float(right_answers(found.ravel(), targets[reveals], self.task.answer_width).mean())


# --- The command line -----------------------------------------------------------------------------

def make_parser():
    parser = train.make_parser()
    add = parser.add_argument
    add("task", choices=GROUPS)
    add("arm", choices=ARMS)
    add("--length", type=number(2), default=16, help="lines of a program that change the state")
    add("--spacing", type=number(1), default=1, help="traces: commands per reveal")
    add("--digits", type=number(1, 3), default=1, help="arithmetic: of the largest value")
    add("--budget", type=number(1), default=2**17, help="programs seen in training, at most")
    parser.set_defaults(group=None, format=None, chapter="experiments.supervision")
    parser.prog = "python -m experiments.supervision run"
    return parser


def complete(args):
    """The configuration of a run, the task, and the lengths of the tests. Raises: ValueError."""
    if args.format or args.curriculum or args.stage_steps:
        raise ValueError("the task and the arm decide on --format, --curriculum, --stage-steps")
    if (args.task, args.arm) == ("traces", "mixed"):
        raise ValueError("the length of a trace is a multiple of its spacing: try the arm stages")
    n, spacing, args.format = args.length, args.spacing, args.task
    args.group = args.group or GROUPS[args.task]
    stages = [(n, spacing)]
    while args.arm == "stages" and stages[0] != (2, 1):
        length, S = stages[0]
        if S > 1:
            stages.insert(0, (length, max(d for d in range(1, S) if S % d == 0)))
        else:
            stages.insert(0, (max(2, 2 ** ((length - 1).bit_length() - 1)), 1))
    args.curriculum = ",".join(f"{length}:{S}" for length, S in stages)
    config, task = train.config_of(args)
    config["stage_steps"] = [max(1, args.budget // args.batch)]  # the progress bar shows it
    one = n if args.task == "traces" else 1  # the spacing of the tests
    tests = dict.fromkeys([f"{n}:{spacing}", *(f"{m * n}:{one}" for m in (1, 2, 4))])
    return config, task, parse_stages(args.test_lengths or ",".join(tests), task, args.traces)


def run(argv):
    """One arm on one task until it is solved or its budget is spent, and its tests."""
    parser = make_parser()
    with user_errors(parser, argv) as args:
        args = parser.parse_args([*RATES.get(args.model, "").split(), *argv])
        config, task, tests = complete(args)
        device, record = choose_device(args.device), args.record or RESULTS / "supervision.jsonl"
        made = SupervisedRun(config, Path(args.out or folder_of(argv)), device)
        there = (made.folder / "model.pt").exists()
        if checkpoint := train.open_folder(made.folder, there, config, record):
            made.restore(checkpoint)
    print(f"{args.arm} of {args.model} on {args.task}, chance {task.chance:.3f}, device {device}, "
          f"from step {made.progress['step']}", flush=True)
    try:
        made.train(args.save_every, lambda: False)
    except FloatingPointError as error:
        parser.error(f"{error} after step {made.progress['step']}; try smaller --lr, --matrix-lr")
    progress, model = made.progress, made.result.eval()
    minutes = round(progress["seconds"] / 60, 3)
    print(f"solved after {progress['solved']} programs, ended after {progress['step']} steps, "
          f"{minutes} minutes")
    results = evaluate_and_print(model, task, tests, args.traces, 0, device)
    append_record(record, f"{parser.prog} {shlex.join(argv)}", {
        **{key: config[key] for key in CONDITIONS}, "solved": progress["solved"],
        "steps": progress["step"], "tokens": progress["tokens"], "minutes": minutes,
        "parameters": sum(weight.numel() for weight in model.parameters()), "device": device,
        "curve": progress["curve"], "results": results})


def main(argv=None):
    run_part("experiments.supervision", {"run": run}, argv)


if __name__ == "__main__":
    main()
