"""Python holds the states that the tasks tell; each loss has a loop beside it; runs end and resume.

Python's own interpreter is the oracle of the states, and plain loops are that of the losses.
"""

import copy
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import session, typed_lines

import train
from data import TASKS, Group, generator
from eval import load_run
from experiments import states, supervision
from experiments.supervision import ARMS, GROUPS, SupervisedRun, complete, make_parser, read
from models import build

TINY = "--d-model 8 --batch 2 --traces 4 --budget 8 --device cpu".split()
STATE_OF = {  # the text of a state, from Python's variables
    "parity": lambda space: str(space["p"]),
    "permutations": lambda space: str(space["a"])[1:-1],
    "traces": lambda space: "".join(str(space[name]) for name in "abcde")}


def arithmetic_state(space, digits):
    values = [space[name] for name in "abc"]
    return "".join(("-" if x < 0 else "+") + str(abs(x)).zfill(digits) for x in values)


def task_of(name, group=None, **options):
    return TASKS[name](Group(group or GROUPS[name]), **options)


def rng(seed=0):
    return np.random.default_rng(seed)


def executed(text):
    space = {}
    exec("\n".join(typed_lines(text)) if ">>>" in text else text, {}, space)
    return space


KINDS = [("parity", {}), ("permutations", {}), ("permutations", {"group": "S6"}),
         ("arithmetic", {}), ("arithmetic", {"digits": 3}), ("traces", {})]


# --- The tasks ------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, options", KINDS)
def test_each_program_runs_and_python_holds_the_states_that_are_told(name, options, monkeypatch):
    """Line by line: the text up to each end is executed, and its variables are the state."""
    task = task_of(name, **options)
    monkeypatch.setattr("builtins.print", lambda *_: None)
    state_of = STATE_OF.get(name, lambda space: arithmetic_state(space, options.get("digits", 1)))
    batch = task.training_batch(9, 6, 2 if name == "traces" else 1, rng(1))
    told = iter(batch.states)
    for tokens, ends in zip(batch.inputs, batch.ends):
        assert ends.sum() == 1 + 6
        for end in ends.nonzero()[0]:
            text = task.decode(tokens[:end + 1])
            assert text.endswith("\n")
            assert task.decode(next(told)) == state_of(executed(text))
    assert next(told, None) is None


@pytest.mark.parametrize("name, options", KINDS[:-1])
def test_the_answer_is_python_s_and_another_one_fails(name, options):
    """The revealed tokens are the text that Python shows for the value, and no other line ends
    in a question."""
    task = task_of(name, **options)
    batch = task.training_batch(30, 5, 1, rng(2))
    for inputs, targets, reveals in zip(batch.inputs, batch.targets, batch.reveals):
        whole = [inputs[0], *targets[targets != states.IGNORED]]
        text = task.decode(whole)
        space = executed(text)  # its own assertion holds
        question = text.strip().split("\n")[-1]
        value = eval(question.removeprefix("assert ").split(" == ")[0], {}, space)
        answer = task.decode(targets[reveals])
        assert answer.strip("\n") == str(value).strip("[]")
        assert len(targets[reveals]) == task.answer_width and text.count("assert") == 1
        assert answer.endswith("\n") == (name == "arithmetic")  # where a longer one could follow
        first = reveals.nonzero()[0][0]
        assert task.decode(inputs[:first + 1]) + answer + task.closing + "\n" == text
        with pytest.raises(AssertionError):
            exec(text.replace("assert ", "assert 1 + 1 == 3 or not "), {}, {})


def test_a_trace_is_a_session_and_its_texts_are_those_of_the_spine():
    task = task_of("traces")
    batch = task.training_batch(3, 8, 4, rng(3))
    plain = TASKS["repl"](Group("S5")).training_batch(3, 8, 4, rng(3))
    for ours, theirs in zip(batch[:3], plain[:3]):
        assert (ours == theirs).all()
    for inputs, targets in zip(batch.inputs, batch.targets):
        text = task.decode([inputs[0], *targets])
        assert session(typed_lines(text)) == text


@pytest.mark.parametrize("name, options", KINDS)
def test_the_line_that_assigns_a_state_makes_it_and_every_text_is_its_tokens(name, options):
    task = task_of(name, **options)
    state_of = STATE_OF.get(name, lambda space: arithmetic_state(space, options.get("digits", 1)))
    assert len({*task.vocab}) == len(task.vocab)
    for state in task.training_batch(20, 4, 1, rng(4)).states:
        line = task.assignment(task.decode(state)) + "\n"
        assert state_of(executed(line)) == task.decode(state)
        assert task.decode(task.encode(line)) == line


def test_programs_are_as_the_source_lays_them_out():
    program = task_of("parity").program(3, rng(5))
    assert program.lines[0] in ("p = 0", "p = 1") and program.lines[1][:-1] == "p ^= "
    program = task_of("permutations").program(3, rng(5))
    assert program.lines[0].startswith("a = [") and program.lines[1].count("a[") == 4
    lines = [line for i in range(200) for line in task_of("arithmetic").program(4, rng(i)).lines]
    firsts, rest = lines[::5], [line for i, line in enumerate(lines) if i % 5]
    assert {line.split(" = ")[0] for line in firsts} == {
        "a, b, c", "a, c, b", "b, a, c", "b, c, a", "c, a, b", "c, b, a"}
    literals = [sum(term.isdigit() for term in line.split()[2::2]) for line in rest]
    assert set(literals) == {0, 1} and 0.4 < np.mean(literals) < 0.6


def test_no_value_of_arithmetic_has_more_digits_and_the_answers_are_not_all_alike():
    for digits in (1, 2):
        task = task_of("arithmetic", digits=digits)
        answers = [int(task.program(8, rng(i)).answer) for i in range(300)]
        assert max(map(abs, answers)) < 10**digits and min(answers) < 0 and len({*answers}) > 15
    share = np.mean([task_of("arithmetic").program(4, rng(i)).answer == "0" for i in range(500)])
    assert abs(task_of("arithmetic").chance - share) < 0.06


def test_shorter_programs_of_a_mixed_batch_are_followed_by_nothing_that_counts():
    """Its targets behind the last newline are ignored; answers and states keep their number."""
    task, lengths = task_of("permutations"), [2, 7, 4]
    batch = task.training_batch(3, lengths, 1, rng(6))
    assert batch.ends.sum(1).tolist() == [3, 8, 5] and len(batch.states) == 16
    assert (batch.reveals.sum(1) == 4).all()
    for inputs, targets, length in zip(batch.inputs, batch.targets, lengths):
        text = task.decode([inputs[0], *targets[targets != states.IGNORED]])
        assert text.count("\n") == length + 2 and executed(text)


# --- The losses -----------------------------------------------------------------------------------

def model_of(task, name="linrnn"):
    return build(name, len(task.vocab), d_model=12, conv_width=4,
                 **({} if name == "lstm" else {"heads": 2})).double()


def tensors_of(batch):
    return batch._make(torch.from_numpy(x) for x in batch)


def losses_of(model, task, batch, arm, weight=0.7):
    """What train_step reports; the weights stay."""
    return supervision.train_step(model, [], task, tensors_of(batch),
                                  {"arm": arm, "reveal_weight": weight})


@pytest.mark.parametrize("name", ["linrnn", "transformer", "lstm"])
def test_what_is_read_is_what_the_head_reads(name):
    task = task_of("parity")
    model, tokens = model_of(task, name), torch.randint(len(task.vocab), (2, 31))
    assert (model.head(read(model, tokens)) - model(tokens)).abs().max() == 0


def test_without_an_auxiliary_loss_a_step_is_that_of_train_py():
    task, updates = task_of("traces"), []
    batch = task.training_batch(3, 4, 2, rng(7))
    for theirs in (True, False):
        torch.manual_seed(1)
        model = model_of(task)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
        if theirs:
            inputs, targets, reveals = tensors_of(batch)[:3]
            numbers = train.train_step(model, optimizers, inputs, targets, reveals, 0.7)
        else:
            numbers = supervision.train_step(model, optimizers, task, tensors_of(batch),
                                             {"arm": "next", "reveal_weight": 0.7})
        updates.append((numbers, torch.cat([p.flatten() for p in model.parameters()])))
    (first, ours), (second, plain) = updates
    assert (ours - plain).abs().max() < 1e-12
    assert all(math.isclose(first[key], second[key], rel_tol=1e-9) for key in first)


def test_the_losses_of_a_mixed_batch_are_means_over_real_tokens_of_each_program_alone():
    task = task_of("arithmetic")
    batch, model = task.training_batch(4, [2, 5, 3, 4], 1, rng(8)), model_of(task)
    found, tokens, answers, right = losses_of(model, task, batch, "next"), [], [], []
    for inputs, targets, reveals in zip(batch.inputs, batch.targets, batch.reveals):
        real = targets != states.IGNORED
        alone = torch.from_numpy(inputs[real])[None]  # nothing behind it
        log_p = model(alone)[0].log_softmax(-1).tolist()
        losses = [-row[target] for row, target in zip(log_p, targets[real])]
        tokens += losses
        answers += [loss for loss, reveal in zip(losses, reveals[real]) if reveal]
        right.append(all(np.argmax(row) == target for row, target, reveal in
                         zip(log_p, targets[real], reveals[real]) if reveal))
    assert abs(found["loss"] - np.mean(tokens)) < 1e-10
    assert abs(found["reveal_loss"] - np.mean(answers)) < 1e-10
    assert found["reveal_accuracy"] == np.mean(right)


def hidden_by_prefix(model, batch):
    """The hidden vector at each end, of the text up to that end and no further: [lines, D]."""
    return torch.stack([read(model, torch.from_numpy(tokens[None, :end + 1]))[0, -1]
                        for tokens, ends in zip(batch.inputs, batch.ends)
                        for end in ends.nonzero()[0]])


@pytest.mark.parametrize("name", ["parity", "permutations", "traces"])
def test_the_linear_loss_is_that_of_each_token_from_the_vector_at_the_end_of_its_line(name):
    task = task_of(name)
    batch, model = task.training_batch(3, 4, 1, rng(9)), model_of(task)
    width, V = batch.states.shape[1], len(task.vocab)
    model.auxiliary = states.LinearHead(12, V, width).double()
    found = losses_of(model, task, batch, "linear")["auxiliary"]
    losses = []
    for vector, state in zip(hidden_by_prefix(model, batch), batch.states):
        for i, token in enumerate(state):
            matrix = model.auxiliary.logits.weight[i * V:(i + 1) * V]
            logits = matrix @ vector + model.auxiliary.logits.bias[i * V:(i + 1) * V]
            losses.append((logits.logsumexp(0) - logits[token]).item())
    assert abs(found - np.mean(losses)) < 1e-10


def test_the_decoder_s_losses_are_those_of_a_distribution_over_states():
    """The loss of a state is the sum of those of its tokens, and each follows from the vector and
    the tokens before: so the probabilities of all that can stand at a place sum to 1."""
    task = task_of("permutations")
    batch, model = task.training_batch(2, 3, 1, rng(10)), model_of(task)
    head = model.auxiliary = states.DecoderHead(12, len(task.vocab), 4).double()
    found = losses_of(model, task, batch, "decoder")["auxiliary"]
    hidden, told = hidden_by_prefix(model, batch), torch.from_numpy(batch.states)

    def nll(vector, state):  # of all its tokens
        return head(vector[None], state[None]).item() * len(state)

    assert abs(found - np.mean([nll(*pair) / 4 for pair in zip(hidden, told)])) < 1e-10
    for place in range(4):
        state, total = told[5, :place + 1].clone(), 0
        before = nll(hidden[5], told[5, :place]) if place else 0
        for state[place] in range(len(task.vocab)):
            total += math.exp(before - nll(hidden[5], state))
        assert abs(total - 1) < 1e-10
    assert nll(hidden[5], told[5]) != nll(hidden[4], told[5])


@pytest.mark.parametrize("name", ["permutations", "arithmetic", "traces"])
def test_the_contrastive_loss_is_that_of_naming_the_state_among_those_of_the_batch(name):
    task = task_of(name)
    batch, model = task.training_batch(3, 5, 1, rng(11)), model_of(task)
    texts = [task.decode(state) for state in batch.states]
    vectors = {}
    for text in texts:
        tokens = torch.tensor([task.encode(task.assignment(text) + "\n")])
        vectors[text] = read(model, tokens)[0, -1].detach().numpy()
    losses = []
    for vector, text in zip(hidden_by_prefix(model, batch).detach().numpy(), texts):
        scores = {other: math.exp(vector @ z / np.sqrt(vector @ vector * (z @ z)) / 0.1)
                  for other, z in vectors.items()}
        losses.append(-math.log(scores[text] / sum(scores.values())))
    found = losses_of(model, task, batch, "contrastive")["auxiliary"]
    assert abs(found - np.mean(losses)) < 1e-10


@pytest.mark.parametrize("arm", ARMS)
def test_the_update_is_that_of_the_weighted_sum(arm):
    """By autograd of the sum, put together here: weight 1, and 0.1 for the contrastive loss."""
    task = task_of("permutations")
    batch, model = task.training_batch(2, 3, 1, rng(12)), model_of(task)
    if arm in states.HEADS:
        model.auxiliary = states.HEADS[arm](12, len(task.vocab), 4).double()
    before = copy.deepcopy(model)
    inputs, targets, reveals, ends, told = tensors_of(batch)
    hidden = read(before, inputs)
    logits = before.head(hidden)
    total = (F.cross_entropy(logits.flatten(0, 1), targets.flatten())
             + 0.3 * F.cross_entropy(logits[reveals], targets[reveals]))
    if arm in states.HEADS:
        total = total + before.auxiliary(hidden[ends], told)
    if arm == "contrastive":
        total = total + 0.1 * supervision.contrastive_loss(before, task, hidden[ends], told)
    total.backward()
    torch.nn.utils.clip_grad_norm_(before.parameters(), 1.0)
    supervision.train_step(model, [torch.optim.SGD(model.parameters(), lr=1.0)], task,
                           tensors_of(batch), {"arm": arm, "reveal_weight": 0.3})
    for old, new in zip(before.parameters(), model.parameters()):
        assert (old - old.grad - new).abs().max() < 1e-12


def test_an_answer_is_right_if_all_its_tokens_are():
    found, tokens = np.array([1, 2, 3, 4, 5, 6]), np.array([1, 2, 3, 0, 5, 6])
    assert supervision.right_answers(found, tokens, 2).tolist() == [True, False, True]
    assert supervision.right_answers(found, tokens, 3).tolist() == [True, False]


# --- Runs -----------------------------------------------------------------------------------------

def config_of(*words):
    return complete(make_parser().parse_args([*words]))


def test_an_arm_has_its_curriculum_and_is_tested_at_two_and_four_times_the_length():
    for n, lengths in [(16, [2, 4, 8, 16]), (5, [2, 4, 5]), (3, [2, 3]), (2, [2])]:
        config, _, tests = config_of("parity", "stages", "--length", str(n))
        assert config["curriculum"] == [[length, 1] for length in lengths]
        assert tests == [[n, 1], [2 * n, 1], [4 * n, 1]]
        assert config_of("parity", "mixed", "--length", str(n))[0]["curriculum"] == [[n, 1]]
    config, task, tests = config_of("traces", "stages", "--length", "8", "--spacing", "4")
    assert config["curriculum"] == [[2, 1], [4, 1], [8, 1], [8, 2], [8, 4]]
    assert tests == [[8, 4], [8, 8], [16, 8], [32, 8]] and task.group.name == "S5"
    config, *_ = config_of("traces", "stages", "--length", "9", "--spacing", "9")
    assert config["curriculum"] == [[2, 1], [4, 1], [8, 1], [9, 1], [9, 3], [9, 9]]
    assert config["stage_steps"] == [config["budget"] // config["batch"]]


def run_of(folder, *words):
    config, _, _ = config_of(*TINY, *words)
    folder.mkdir(exist_ok=True)
    return SupervisedRun(config, folder, "cpu")


def test_a_mixed_run_draws_all_lengths_and_the_others_the_one_of_their_stage(
        tmp_path, monkeypatch):
    for arm, expected in [("mixed", {2, 3, 4, 5}), ("linear", {5}), ("stages", {2})]:
        run, seen = run_of(tmp_path / arm, "parity", arm, "--length", "5"), []
        draw = run.task.program
        run.task.program = lambda length, rng: seen.append(int(length)) or draw(length, rng)
        monkeypatch.setattr(supervision, "LEAST_STEPS", 100)  # no check
        for _ in range(20):
            run.make_step()
        assert {*seen} == expected


def test_a_run_is_checked_solved_averaged_over_its_last_steps_and_ended(tmp_path, monkeypatch):
    """Shares 0.5 and then 1: solved at the second check, and three steps later at the end."""
    monkeypatch.setattr(supervision, "LEAST_STEPS", 2)
    shares = iter([0.5, 1.0])
    monkeypatch.setattr(SupervisedRun, "share_of_unseen", lambda run: next(shares))
    run = run_of(tmp_path, "parity", "stages", "--length", "4", "--last-steps", "3")
    run.config["stage_steps"], weights = [50], []
    while not run.progress["finished"]:
        run.make_step()
        weights.append(run.model.head.weight.detach().clone())
    assert run.progress["curve"] == [[4, 0.5], [8, 1.0]] and run.progress["solved"] == 8
    assert len(weights) == 4 + 3 and run.progress["stage"] == 1  # of the length 4
    assert (run.result.head.weight - sum(weights[4:]) / 3).abs().max() < 1e-6


def test_the_checks_are_equally_far_apart_on_a_logarithmic_axis(tmp_path, monkeypatch):
    """Ten steps at least; from step 100 on at the first step with a tenth more programs."""
    monkeypatch.setattr(SupervisedRun, "share_of_unseen", lambda run: 0.5)
    run = run_of(tmp_path, "parity", "next", "--length", "2", "--budget", "400")
    while not run.progress["finished"]:
        run.advance(0)
    assert [seen // 2 for seen, _ in run.progress["curve"]] == [
        *range(10, 101, 10), 110, 121, 134, 148, 163, 180, 198, 200]


def test_a_budget_that_is_spent_ends_a_run_after_a_last_check(tmp_path, monkeypatch):
    monkeypatch.setattr(supervision, "LEAST_STEPS", 2)
    run = run_of(tmp_path, "permutations", "next", "--length", "3", "--budget", "7")
    run.train(100, lambda: False)
    assert run.progress["step"] == 3 and [seen for seen, _ in run.progress["curve"]] == [4, 6]
    assert run.progress["solved"] is None and run.result is not run.model


@pytest.mark.parametrize("arm", ["linear", "decoder", "contrastive"])
def test_a_run_is_resumed_bit_for_bit_and_its_result_has_no_auxiliary_head(arm, tmp_path):
    words = "permutations", arm, "--length", "3"
    whole = run_of(tmp_path / "whole", *words)
    whole.train(100, lambda: False)
    first = run_of(tmp_path / "parts", *words)
    first.train(100, lambda: first.progress["step"] == 3)
    second = run_of(tmp_path / "parts", *words)
    second.restore(load_run(tmp_path / "parts")[0])
    second.train(100, lambda: False)
    assert second.progress["step"] == 4 == whole.progress["step"]
    ours, theirs = second.model.state_dict(), whole.model.state_dict()
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert any("auxiliary" in name for name in theirs) == (arm != "contrastive")
    _, task, model = load_run(tmp_path / "whole")
    tokens = torch.from_numpy(task.training_batch(2, 3, 1, rng()).inputs)
    assert (model(tokens) - whole.model(tokens)).abs().max() < 1e-6


def test_the_share_of_unseen_programs_is_that_of_whole_answers(tmp_path):
    run = run_of(tmp_path, "permutations", "next", "--length", "3")
    inputs, targets, reveals = run.unseen[:3]
    known = run.task.training_batch(256, 3, 1, generator(0, "valid", 3, 1))
    assert (known.inputs == inputs).all()  # of a stream that is not that of the training
    with torch.no_grad():
        found = run.model(torch.from_numpy(inputs)).argmax(-1).numpy()
    whole = [(row[asked] == target[asked]).all()
             for row, target, asked in zip(found, targets, reveals)]
    assert run.share_of_unseen() == np.mean(whole) and len(whole) == 256


def test_a_run_is_recorded_and_short_programs_are_learned(tmp_path, monkeypatch, capsys):
    """Parity of two lines, supervised: solved, and right at the length of the training."""
    monkeypatch.chdir(tmp_path)
    supervision.main(["run", "parity", "linear", "--length", "2", "--d-model", "16", "--budget",
                      "8192", "--last-steps", "5", "--device", "cpu", "--record", "r.jsonl"])
    line = json.loads(open("r.jsonl").read())
    assert line["solved"] == line["curve"][-1][0] and line["curve"][-1][1] == 1
    assert line["steps"] == line["solved"] // line["batch"] + 5
    assert [row["length"] for row in line["results"]] == [2, 4, 8]
    assert line["results"][0]["perfect"] > 0.98 and line["lr"] == 2e-3
    assert line["command"].startswith("python -m experiments.supervision run parity linear")
    assert {*supervision.CONDITIONS} <= {*line}


def test_what_does_not_fit_is_refused_and_leaves_nothing(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, told in [
            ("parity next --group S3", "S2"), ("permutations next --group Z4", "transpositions"),
            ("parity next --spacing 2", "spacing"), ("traces mixed", "stages"),
            ("traces next --length 9 --spacing 2", "multiple"),
            ("parity linear --curriculum 2:1", "--curriculum"),
            ("parity decoder --d-model 10 --heads 1", "multiple of 4"),
            ("parity next --batch 60000", "too many"), ("nothing next", "nothing")]:
        refused(supervision.main, ["run", *words.split()], told)
    assert not [*tmp_path.iterdir()]


def test_the_table_of_the_header_is_what_was_recorded():
    """The least and the greatest number of programs of three seeds, all of them if one failed."""
    lines = (supervision.RESULTS / "supervision.jsonl").read_text().split("\n")
    runs = [run for run in map(json.loads, filter(None, lines)) if run["model"] == "linrnn"]
    task = {"parity 16": ("parity", 16, None), "parity 64": ("parity", 64, None),
            "8 exchanges of 4": ("permutations", 8, None),
            "traces of (8,1)": ("traces", 8, 1), "traces of (8,8)": ("traces", 8, 8)}
    table = supervision.__doc__.split("mixed          next\n")[1].splitlines()[:5]
    for line in table:
        kind, length, spacing = task[line[4:22].strip()]
        told = "decoder" if kind == "traces" else "linear"
        said = [line[22:37], line[37:54], line[54:69], line[69:]]
        for arm, cell in zip([told, "stages", "mixed", "next"], said):
            mine = [run for run in runs if (run["task"], run["arm"], run["length"]) ==
                    (kind, arm, length) and spacing in (None, run["spacing"])]
            solved = sorted(run["solved"] for run in mine if run["solved"])
            if len(solved) == 3:
                expected = f"{solved[0]:,} - {solved[2]:,}"
            elif solved:
                expected = f"{len(solved)} of 3: " + ", ".join(f"{each:,}" for each in solved)
            else:
                expected = f"none in {mine[0]['budget']:,}" if mine else "-"
            assert len(mine) in (0, 3) and cell.strip() == expected, line
