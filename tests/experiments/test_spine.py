"""More laws of the spine than the thousand lines of its own tests hold: what a batch costs, what is
shown, typed and refused, and the parts of a block and of a step, written out.
"""

import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import data
import eval as evaluation
import pytest
import scan
import torch
import train
from conftest import EARLY, ROOT, SMALL, session
from test_scan import error, inputs

from data import Group, ReplTask, generator
from models import DeltaBlock, build, rotate
from scan import delta_product, delta_rule_chunked, delta_rule_recurrent

TRAIN_BOTH = """import sys, train
for beta_max in "21":
    train.main([*sys.argv[2:], "--beta-max", beta_max, "--out", f"{sys.argv[1]}/{beta_max}",
                "--record", f"{sys.argv[1]}/record"])
"""


def train_both():
    """README's ten seconds: 250 steps on up to 16 commands, and then 32 commands to read."""
    options = ("--group S3 --d-model 32 --heads 2 --curriculum 2:1,8:2,16:4 --stage-steps "
               "150,50,50 --test-lengths 32:8 --traces 64 --device cpu").split()
    place = tempfile.TemporaryDirectory()
    return place, subprocess.Popen([sys.executable, "-c", TRAIN_BOTH, place.name, *options],
                                   cwd=ROOT, stdout=open(f"{place.name}/shown", "w"),
                                   stderr=subprocess.STDOUT)


EARLY["test_s3_is_learned_with_beta_up_to_two_and_not_with_beta_up_to_one"] = train_both


def test_s3_is_learned_with_beta_up_to_two_and_not_with_beta_up_to_one():
    place, process = EARLY["test_s3_is_learned_with_beta_up_to_two_and_not_with_beta_up_to_one"]
    code, shown = process.wait(), (Path(place.name) / "shown").read_text()
    assert code == 0, shown[-1000:]
    lines = (Path(place.name) / "record").read_text().splitlines()
    place.cleanup()
    two, one = (json.loads(line)["results"][0]["all"] for line in lines)
    assert two >= 0.95 and one <= 0.65


def test_to_draw_a_batch_costs_less_than_to_read_it_back():
    """32 traces at (64,8): they are drawn array by array, and the lexer goes token by token. Both
    are timed here, the best of five: the speed of the machine cancels."""
    task, drawing, reading, clock = ReplTask(Group("S5")), [], [], time.perf_counter
    for step in range(5):
        start = clock()
        tokens, _ = task.sample(32, 64, 8, generator(0, "train", step))
        drawing.append(clock() - start)
        texts, start = [task.decode(row) for row in tokens], clock()
        for text in texts:
            task.encode(text)
        reading.append(clock() - start)
    assert min(drawing) < min(reading)


def test_a_token_costs_no_more_to_draw_or_to_read_back_as_B_L_and_n_grow():
    """The best of five, with a factor of three for the clock."""
    clock, costs = time.perf_counter, []
    for name, batch, length in [("S6", 8, 32), ("S6", 64, 32), ("S6", 8, 256), ("S26", 8, 32)]:
        task, times = ReplTask(Group(name)), []
        for step in range(5):
            start = clock()
            tokens, _ = task.sample(batch, length, 2, generator(0, "test", step))
            drawn = clock()
            assert all(task.encode(task.decode(row)) == row.tolist() for row in tokens)
            times.append([drawn - start, clock() - drawn])
        costs.append([min(seconds) / tokens.size for seconds in zip(*times)])
    first, *others = costs
    assert all(now < 3 * then for cost in others for now, then in zip(cost, first)), costs


def test_the_trace_shown_to_a_reader_runs_in_python(capsys):
    data.main(["--group", "S3", "--length", "4", "--spacing", "2"])
    shown = capsys.readouterr().out.splitlines()
    lines = [line.split("  ")[0] for line in shown if " state " in line]
    assert session(line[4:] for line in lines if line.startswith(">>> ")).splitlines() == lines


def test_the_machine_shown_to_a_reader_ends_each_command_at_pythons_values(capsys):
    scan.main([])
    values, commands = {"a": 1, "b": 2, "c": 3}, capsys.readouterr().out.split(">>> ")[1:]
    for command in commands:
        exec(command.splitlines()[0], {}, values)
        assert command.split("variables ")[-1].split()[:3] == [str(values[name]) for name in "abc"]
    assert len(commands) == 2


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # inside torch
def test_compiled_equals_eager():
    """torch.compile traces the chunked scan without a graph break, gradients included. The traces
    are run as they are: to have them compiled as well takes half a minute, and tests torch."""
    compiled = torch.compile(lambda *x: delta_rule_chunked(*x, chunk_size=7), fullgraph=True,
                             backend="aot_eager")
    assert error(compiled, inputs(T=10, lead=(2,))) < 1e-10


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # inside torch
def test_compiled_training_and_evaluation_are_the_same_and_leave_out_the_scan(
        tmp_path, monkeypatch, capsys):
    """The graphs are run as they are, bit for bit. (`experiments.bench --steps` compiles them.)"""
    graphs, compiler = [], torch.compile

    def compiled(function, dynamic):
        assert dynamic, "else each length is compiled anew"
        return compiler(function, dynamic=dynamic, backend=lambda graph, _: (
            graphs.append(graph.print_readable(print_output=False)) or graph.forward))

    monkeypatch.setattr(torch, "compile", compiled)
    shown, weights = [], []
    for flags in ([], ["--compile"]):
        folder = str(tmp_path / f"run{len(flags)}")
        train.main([*SMALL, *flags, "--out", folder])
        of_training = len(graphs)
        capsys.readouterr()
        evaluation.main([folder, *flags, "--lengths", "4:2", "--traces", "4"])
        assert (0 < of_training < len(graphs)) if flags else not graphs
        shown.append(capsys.readouterr().out)
        weights.append(torch.load(f"{folder}/model.pt", weights_only=True)["model"])
    assert shown[0] == shown[1] and all(map(torch.equal, *(w.values() for w in weights)))
    assert "conv2d" in "".join(graphs) and "solve_triangular" not in "".join(graphs)
    with pytest.raises(ValueError, match="other options .* compile False against True"):
        train.open_folder(tmp_path / "run0", True, train.config_of(train.make_parser().parse_args(
            [*SMALL, "--compile"]))[0])


def test_what_does_not_fit_is_refused_by_letter():
    q, k, v, beta, state = inputs(T=37)
    for wrong, words in [((q, k, v, beta[..., :36], state),
                          r"beta must be \[..., T=37\].*\(2, 3, 36\)"),
                         ((q[..., :4], k, v, beta, state), r"q must be \[..., T=37, K=5\]"),
                         ((q, k, v[:, :, 1:], beta, state), "v must be"),
                         ((q, k, v, beta, state.mT), "state must be"),
                         ([x.long() for x in (q, k, v, beta)], "floating-point type"),
                         ([x[0, 0, 0] for x in (q, k, v, beta)], "k must be"),
                         ([x[:, :, :0] for x in (q, k, v, beta)], "T >= 1")]:
        for function in (delta_rule_recurrent, delta_rule_chunked):
            with pytest.raises(ValueError, match=words):
                function(*wrong)
    with pytest.raises(ValueError, match="chunks need float32"):
        delta_rule_chunked(*[x.half() for x in (q, k, v, beta)])
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        delta_rule_chunked(q, k, v, beta, state, chunk_size=0)
    with pytest.raises(RuntimeError, match="cannot be differentiated again.*delta_rule_recurrent"):
        torch.autograd.grad(delta_rule_chunked(q, k, v, beta)[0].sum(), q, create_graph=True)
    q, k, v, beta, state = inputs(T=11, writes=(3,))
    for wrong in ((q, *[x.transpose(2, 3) for x in (k, v, beta)]), (k, k, v, beta), (q, q, v, beta),
                  (q, k, v.transpose(2, 3), beta), (q, k, v, beta.transpose(2, 3))):
        with pytest.raises(ValueError, match=r"k must be \[..., T, R, K\]"):
            delta_product(*wrong)


TYPED = {  # and whether it is a line of a trace
    "full": {"print('b', b)": True, "a, b, c = c, a, b": True, "a, c, b = a, b, c": False,
             "print('c', c)": True, "a, b, c = b, a, c": True, "import os": False,
             "a, b, c = c, a, a": False, "print('b', a)": False, "print('a', a)": True},
    "swap": {"a, c = c, a": True, "b, a = a, b": False, "print('c', c)": True, "a = b": False,
             "b, c = c, b": True, "a, b, c = c, a, b": False, "print('b', b)": True}}


@pytest.mark.parametrize("commands", TYPED)
def test_a_session_answers_beside_python_and_helps_with_the_rest(commands, capsys, monkeypatch):
    """Beside each answer stand the value of a real interpreter and the commands so far. The
    probability is that of the session, without what was refused, read at once."""
    task = ReplTask(Group("S3"), commands)
    model = build("linrnn", len(task.vocab))
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(TYPED[commands])))
    evaluation.interact(model, task)
    shown = capsys.readouterr().out
    lines, count = ["a = 1", "b = 2", "c = 3"], 0
    for line in [line for line, legal in TYPED[commands].items() if legal]:
        lines.append(line)
        if "print" not in line:
            count += 1
            continue
        *read, value, _ = session(lines)
        p, token = model(torch.tensor([task.encode("".join(read))]))[0, -1].softmax(-1).max(-1)
        assert (f"{line[7]} {task.vocab[token]}    (probability {p:.1%}; Python: {value}; {count} "
                "commands" in shown)
    assert shown.count("type a command such as ") == [*TYPED[commands].values()].count(False)


def type_into_a_session():
    process = subprocess.Popen(
        [sys.executable, "eval.py", "experiments/results/models/linrnn-S5-seed0", "--interactive",
         "--device", "cpu"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True)
    process.stdin.write("a, b, c, d, e = c, a, b, d, e\nprint('b', b)\n")
    process.stdin.close()
    return None, process


EARLY["test_a_session_runs_through_a_pipe_and_ends_with_it"] = type_into_a_session


def test_a_session_runs_through_a_pipe_and_ends_with_it():
    _, process = EARLY["test_a_session_runs_through_a_pipe_and_ends_with_it"]
    shown = process.stdout.read()
    assert process.wait() == 0 and "Python: 1; 1 command" in shown, shown
    assert "Traceback" not in shown


def test_no_command_line_hides_an_error_that_is_not_the_users(small_run, tmp_path, monkeypatch):
    """A ValueError of the work itself, from broadcasting say, is not turned into one line."""
    fail = Mock(side_effect=ValueError("shapes (2,3) and (4,) do not fit"))
    out, run = ["--out", str(tmp_path / "run")], str(small_run)
    for function, main, argv in [
            ("train.train_step", train.main, [*SMALL, *out]),
            ("eval.evaluate", evaluation.main, [run]), ("data.run_commands", data.main, [])]:
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="do not fit"):
            patch.setattr(function, fail)
            main(argv)


def test_a_delta_block_is_its_docstring_head_by_head_and_write_by_write():
    """Plain loops over traces, tokens, heads and writes: gamma scales what is written, not how far
    is forgotten, and each head is normalised by itself."""
    heads, R, K, x = 2, 3, 4, torch.randn(2, 5, 8).double()
    block = DeltaBlock(8, heads, 1.7, R).double().requires_grad_(False)
    block.out_norm.weight.copy_(torch.rand(K))
    q, k, v, strengths = block.project(block.norm(x)).split([8, 8 * R, 8 * R, 2 * R * heads], -1)
    strengths = (strengths / 6 + 0.5).clamp(0, 1)  # the hard sigmoid
    out = torch.zeros(2, 5, heads, K).double()
    for b in range(2):
        for h in range(heads):
            S = torch.zeros(K, K).double()
            for t in range(5):
                for r in range(R):
                    i = r * heads + h
                    at = slice(i * K, i * K + K)
                    key = k[b, t, at] / k[b, t, at].norm()
                    beta, gamma = 1.7 * strengths[b, t, i], strengths[b, t, R * heads + i]
                    S = S + beta * torch.outer(key, gamma * v[b, t, at] - key @ S)
                query = q[b, t, h * K:h * K + K]
                o = query / query.norm() @ S
                out[b, t, h] = o / (o.square().mean() + torch.finfo(o.dtype).eps).sqrt()
    expected = x + block.out((out * block.out_norm.weight).flatten(2))
    assert (block(x)[0] - expected).abs().max() < 1e-6


def test_rotary_positions_turn_each_pair_at_its_own_rate():
    """The pair j is a complex number, turned by the angle t 10000^(-2j/K) at token t."""
    x = torch.randn(3, 7, 6).double()
    j, t = torch.arange(3), 4 + torch.arange(7).unsqueeze(-1)
    turned = torch.complex(*x.chunk(2, -1)) * torch.exp(1j * t * 10000.0 ** (-2 * j / 6))
    assert (rotate(x, 4) - torch.cat([turned.real, turned.imag], -1)).abs().max() < 1e-5


def test_the_learning_rates_rise_from_0_and_then_stay(tmp_path, monkeypatch):
    """In step i of the first 50 each rate is i / 50 of its peak."""
    seen, real = [], train.train_step

    def step(model, optimizers, *rest):
        seen.append([optimizer.param_groups[0]["lr"] for optimizer in optimizers])
        return real(model, optimizers, *rest)

    monkeypatch.setattr(train, "train_step", step)
    train.main([*SMALL, "--curriculum", "2:1", "--last-steps", "60", "--lr", "0.01", "--matrix-lr",
                "0.02", "--out", str(tmp_path)])
    expected = [[0.02 * min(1, i / 50), 0.01 * min(1, i / 50)] for i in range(1, 61)]
    assert torch.allclose(torch.tensor(seen), torch.tensor(expected))
