"""The table and the certificate measure what they say: on an oracle that knows Python, and on
broken ones."""

import json

import numpy as np
import pytest
import torch
from data import Group, ReplTask, WordTask
from eval import evaluate, evaluate_and_print, exhaustive, main, predict, shortest_words, wilson
from models import build


class Interpreter(torch.nn.Module):
    """Not a network: executes the text it is given, and answers with the variable asked for, as
    one-hot logits.

    ignores(state, line, count): True for a command, the count-th line, that it should not execute.
    """

    def __init__(self, task, ignores=lambda state, line, count: False):
        super().__init__()
        self.task, self.ignores = task, ignores

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, len(self.task.vocab))
        for row, ids in enumerate(tokens.tolist()):
            state, count, line = {}, 0, ""
            for t, token in enumerate(ids):
                line += self.task.vocab[token]
                if line.endswith("\n"):
                    if line.startswith(">>> ") and "print" not in line:
                        count += 1
                        if not self.ignores(state, line[4:-1], count):
                            exec(line[4:], {}, state)
                    line = ""
                elif line.endswith(" ") and not line.startswith(">>>"):
                    logits[row, t, self.task.encode(str(state[line[0]]))[0]] = 1
        return logits


def test_a_perfect_model_scores_perfectly():
    task = ReplTask(Group("S4"))
    row = evaluate(Interpreter(task), task, 8, 2, traces=20)
    assert row["all"] == row["final"] == row["every"] == 1 and row["by_position"] == [1] * 4
    assert row["chance"] == 0.25 and row["every_low"] < 0.9 and row["every_high"] > 0.999


def test_a_model_that_stops_tracking_is_right_up_to_there_and_at_chance_beyond():
    """Executing the four initial lines and four commands only: perfect at two reveals, chance at
    the other two, never all right."""
    task = ReplTask(Group("S4"))
    broken = Interpreter(task, lambda state, line, count: count > 4 + 4)
    row = evaluate(broken, task, 8, 2, traces=300)
    first, second, third, last = row["by_position"]
    assert first == second == 1 and abs(third - 0.25) < 0.1 and abs(last - 0.25) < 0.1
    assert row["final"] == last and row["every"] < 0.2
    assert abs(row["all"] - np.mean(row["by_position"])) < 1e-12


@pytest.mark.parametrize("name, commands, pairs", [("S3", "full", 36), ("D4", "full", 64),
                                                   ("S4", "swap", 24 * 6)])
def test_the_certificate_of_a_perfect_model_is_complete(name, commands, pairs):
    task = ReplTask(Group(name), commands)
    assert exhaustive(Interpreter(task), task) == (pairs, [])


def test_the_certificate_finds_the_one_broken_transition():
    """A model that ignores one command in one state: one pair fails, and it is named."""
    task = ReplTask(Group("S3"))
    one = (2, 3, 1, "a, b, c = b, a, c")
    broken = Interpreter(task, lambda state, line, count: (*state.values(), line) == one)
    pairs, failures = exhaustive(broken, task)
    (state, command, expected, answers), = failures
    assert pairs == 36 and state.tolist() == [1, 2, 0] and command.tolist() == [1, 0, 2]
    assert expected.tolist() == [2, 1, 0] and [task.vocab[i] for i in answers] == ["2", "3", "1"]


def test_shortest_words_reach_every_element_in_the_fewest_commands():
    """A product of swaps needs degree - cycles of them; a word, executed, is its element."""
    group = Group("S4")
    words = shortest_words(group, group.transpositions)
    assert sorted(words) == list(range(24))
    for number, word in words.items():
        state, element, seen, cycles = list(range(4)), group.elements[number], set(), 0
        for command in word:
            state = [state[i] for i in command]
        assert state == element.tolist()
        for start in range(4):
            cycles += start not in seen
            while start not in seen:
                seen.add(start)
                start = int(element[start])
        assert len(word) == 4 - cycles


def test_predictions_do_not_depend_on_the_piece_size(monkeypatch):
    """Streaming in pieces of 7 tokens gives the whole model's predictions."""
    for name in ("linrnn", "lstm"):
        model, tokens = build(name, 22), torch.randint(22, (3, 50))
        monkeypatch.setattr("eval.PIECE", 7)
        with torch.no_grad():
            assert (predict(model, tokens) == model(tokens).argmax(-1)).all()


def test_an_evaluation_set_is_a_function_of_its_arguments():
    """Same arguments, same numbers; another seed, other traces."""
    task = ReplTask(Group("S5"))
    model = Interpreter(task, lambda state, line, count: count % 7 == 0)
    first, again, other = (evaluate(model, task, 8, 1, traces=32, seed=seed) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("uncertain", [0.0, 0.5])
def test_held_out_pairs_are_those_evaluated_with_coins_too(uncertain, monkeypatch):
    """Every pair of consecutive commands is a held-out one, where the filter is asked as well."""
    task, drawn = ReplTask(Group("S3"), "full", uncertain, hold_out=0.5), []

    def look(*program):
        drawn.append(task.group.index(program[0]))
        return ReplTask.write(task, *program)

    monkeypatch.setattr(task, "write", look)
    for share in (None, 0.0):
        evaluate(build("lstm", len(task.vocab)), task, 8, 2, traces=4, share=share)
        a, b = task.pairs.a[drawn[-1][:, :-1]], task.pairs.b[drawn[-1][:, 1:]]
        assert ((a + b) % 6 < task.pairs.cut).all()


def test_wilson_interval():
    """Against the published worked values: 0 of 10, 5 of 10 and 10 of 10 at 95%."""
    assert np.allclose([wilson(0, 10), wilson(5, 10), wilson(10, 10)],
                       [(0, 0.2775), (0.2366, 0.7634), (0.7225, 1)], atol=1e-4)


def test_words_are_evaluated_too(capsys):
    task = WordTask(Group("S3"))
    rows = evaluate_and_print(build("linrnn", 6), task, [(8, 1), (16, 1)], traces=8)
    assert [row["reveals"] for row in rows] == [64, 128] and rows[0]["chance"] == 1 / 6
    assert "(16,1)" in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--uncertain", "0"], ["--exhaustive"], ["--intervene"],
                                    ["--extract"], ["--snap", "auto"]])
def test_what_needs_repl_traces_is_refused_before_words_are_evaluated(
        option, tmp_path, monkeypatch, refused):
    import train
    monkeypatch.setattr("eval.evaluate_and_print", lambda *_, **__: [])
    train.main(["--group", "S3", "--format", "word", "--curriculum", "2:1", "--d-model", "8",
                "--heads", "1", "--last-steps", "1", "--batch", "2", "--out", str(tmp_path)])
    monkeypatch.setattr("eval.evaluate_and_print", None)
    refused(main, [tmp_path, *option], option[0], "trained on words")


@pytest.fixture
def run(tmp_path):
    from train import main as train
    train(["--group", "S3", "--curriculum", "2:1", "--d-model", "8", "--heads", "1",
           "--last-steps", "1", "--batch", "2", "--test-lengths", "2:1", "--traces", "2",
           "--out", str(tmp_path / "run")])
    return tmp_path / "run"


def test_the_command_line_prints_table_figure_json_and_certificate(run, capsys):
    figure = run / "new" / "figure.png"
    main([str(run), "--lengths", "4:2,8:4", "--traces", "8", "--plot", str(figure), "--json",
          "--exhaustive"])
    shown = capsys.readouterr().out
    numbers = json.loads(shown.splitlines()[-1])
    assert [row["length"] for row in numbers["results"]] == [4, 8]
    assert numbers["exhaustive"]["pairs"] == 36
    assert "of 36 (state, command) pairs right" in shown and "accuracy by reveal position" in shown
    assert figure.read_bytes()[:4] == b"\x89PNG"


def test_ctrl_c_ends_without_a_traceback(run, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("eval.predict", interrupted)
    with pytest.raises(SystemExit) as stop:
        main([str(run), "--lengths", "4:2"])
    assert stop.value.code == 130


def test_bad_input_gets_one_line_and_exit_code_2(run, refused):
    refused(main, [run / "nothing"], "no run in")
    refused(main, [run, "--lengths", "10:4"], "multiple of the spacing")
    refused(main, [run, "--traces", "0"], "--traces")
    refused(main, [run, "--device", "tpu"], "tpu is not there")
    refused(main, [run, "--plot", run / "figure.xyz"], "xyz")
    refused(main, [run, "--plot", run / "model.pt" / "figure.png"], "model.pt")
    refused(main, [run, "--record", run], "is a folder")
    refused(main, [run, "--snap-every", "2"], "--snap-every needs --snap")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "group": "S4"}))
    refused(main, [run], "another run", "group S3 against S4")
    (run / "config.json").write_text("{")
    refused(main, [run], "cannot be read")
