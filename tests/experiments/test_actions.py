"""A listing and its session are Python; a model that is always right is right in every mode."""

import json

import numpy as np
import pytest
import torch
from conftest import session, typed_lines

from data import Group, generator, run_commands
from experiments import actions
from experiments.actions import MODES, SPACINGS, evaluate, generate
from experiments.listings import COMMAND, STATE, ActionTask
from models import AttentionBlock, DeltaBlock, build

KINDS = [("S3", "full", "all"), ("S4", "full", "one"), ("A4", "full", "all"), ("S4", "swap", "all"),
         ("S2xZ3", "full", "all")]


def task_of(group="S3", commands="full", shown="all"):
    return ActionTask(Group(group), commands, shown)


def texts(task, count, length, spacing):
    """Pairs (listing, session), and all tokens."""
    tokens, _ = task.sample(count, length, spacing, generator(3, "valid"))
    pairs = []
    for row in tokens:
        text = task.decode(row)
        at = text.index(">>> ")
        pairs.append((text[:at], text[at:]))
    return pairs, tokens


# --- The task -------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", KINDS)
def test_the_session_is_a_real_one_and_the_listing_is_its_program(kind):
    """A fresh interpreter shows the session. The listing, executed, ends where the session ends."""
    task = task_of(*kind)
    for spacing in (1, 3):
        pairs, tokens = texts(task, 4, 6, spacing)
        for (listing, shown), row in zip(pairs, tokens):
            assert session(typed_lines(shown)) == shown
            n, typed = task.group.degree, typed_lines(shown)
            commands = [line for line in typed[n:] if "=" in line]
            assert listing.splitlines() == commands and len(typed) == n + 6 + 6 // spacing
            ends = []
            for lines in ([*typed[:n], *commands], [*typed[:n], *listing.splitlines()]):
                ends.append({})
                exec("\n".join(lines), {}, ends[-1])
            assert ends[0] == ends[1]
            if kind[2] == "all":
                assert shown.endswith(f"({', '.join(str(ends[0][x]) for x in task.names)})\n")
            assert task.encode(listing + shown) == row.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_has_its_role_and_what_cannot_be_guessed_counts(kind):
    """At the commands' places stands the listing, at the states' places the values, and between
    them only what is the same in all traces; of a full command the right-hand side counts."""
    task = task_of(*kind)
    tokens, counted = task.sample(50, 6, 3, generator(4, "valid"))
    roles, width = task.roles(6, 3), len(task.varies)
    w, n, q = width + 1, task.group.degree, 11 if task.shown == "one" else 2 * task.group.degree + 5
    assert tokens.shape[1] == len(roles) == 6 * (w - 1) + 5 * n + 6 * w + 2 * q
    assert (tokens[:, roles == COMMAND] == tokens[:, :6 * width]).all()
    commands, asked = task.draw(50, 6, 3, generator(4, "valid"))
    states = run_commands(commands)[:, 2::3]
    values = [task.decode([x]).strip(", ") for x in tokens[:, roles == STATE].ravel()]
    if task.shown == "one":
        states = np.take_along_axis(states, asked[..., None], -1)
    assert values == [str(x + 1) for x in states.ravel()]
    given = tokens[:, 6 * width:][:, roles[6 * width:] == 0]
    assert task.shown == "one" or (given == given[0]).all()
    assert (counted == counted[0]).all() and counted[0][roles == STATE].all()
    assert not counted[0][roles == 0].any()
    constant = (tokens == tokens[0]).all(0)
    assert (counted[0] == ~constant)[roles == COMMAND].all()
    assert task.commands == "swap" or counted[0].sum() == 6 * n + (roles == STATE).sum()


def test_a_training_batch_has_a_length_of_its_own_and_a_test_batch_the_length_asked_for():
    task, rng = task_of(), np.random.default_rng(5)
    found = {task.training_batch(2, 16, 4, rng).inputs.shape[1] + 1 for _ in range(100)}
    assert found == {len(task.roles(length, 4)) for length in (4, 8, 12, 16)}
    found = {task.training_batch(2, 6, 1, rng).inputs.shape[1] + 1 for _ in range(50)}
    assert found == {len(task.roles(length, 1)) for length in (4, 5, 6)}
    assert task.training_batch(2, 2, 1, rng).inputs.shape[1] + 1 == len(task.roles(2, 1))
    assert task.test_batch(2, 16, 4, rng).inputs.shape[1] + 1 == len(task.roles(16, 4))
    with pytest.raises(ValueError, match="spacing"):
        task.training_batch(2, 6, 4, rng)


def test_what_a_print_costs_is_counted_in_real_texts():
    """Tokens per command of the session, as the lexer counts them, without the first lines."""
    for shown in ("all", "one"):
        task = task_of("S4", shown=shown)
        for spacing in SPACINGS:
            (_, text), = texts(task, 1, 16, spacing)[0]
            count = len(task.encode(text)) - 5 * task.group.degree
            assert task.tokens_per_command(spacing) == count / 16
    assert task_of("S5").tokens_per_command(1) == 13 + 15
    assert task_of("S5", shown="one").tokens_per_command(8) == 13 + 11 / 8


# --- Generation -----------------------------------------------------------------------------------

class Oracle:
    """Writes what is right by hand; its state is all that it read.

    order[i] is the number of the command in the listing that it writes as its i-th. It derives a
    state from all commands that it read, or (last=True) from the state that it read last and the
    commands after it. wrong: the number of a state whose first two values it exchanges.
    """

    def __init__(self, task, length, spacing, order=None, last=False, wrong=None):
        self.task, self.roles, self.spacing = task, task.roles(length, spacing), spacing
        self.order = np.arange(length) if order is None else np.array(order)
        self.last, self.wrong = last, wrong

    def next_token(self, read):
        task, place = self.task, len(read)
        past, width = self.roles[:place], len(self.task.varies)
        if self.roles[place] == COMMAND:
            number, at = divmod((past == COMMAND).sum(), width)
            return read[self.order[number] * width + at]
        if self.roles[place] != STATE:
            return 0
        lines = read[past == COMMAND].reshape(1, -1, width)
        commands, n = actions.written_commands(task, lines)[0], task.group.degree
        count, start = len(commands[0]) // self.spacing - 1, None
        values = read[past == STATE]
        if self.last and count:
            names = [task.vocab[x].strip(", ") for x in values[(count - 1) * n:count * n]]
            start, commands = np.array([[int(x) - 1 for x in names]]), commands[:, -self.spacing:]
        state = run_commands(commands, start)[0, -1]
        if task.shown == "one":
            return task.value_tokens[state[task.names.index(task.vocab[read[-2]])]]
        if count == self.wrong:
            state[:2] = state[1::-1]
        at = len(values) - count * n
        return (task._comma_value if at else task.value_tokens)[state[at]]

    def stream(self, tokens, state=None):
        read = tokens if state is None else torch.cat([state, tokens], 1)
        logits = torch.zeros(*tokens.shape, len(self.task.vocab))
        for row, trace in enumerate(read.numpy()):
            for place in range(read.shape[1] - tokens.shape[1], read.shape[1]):
                if place + 1 < len(self.roles):
                    at = place - (read.shape[1] - tokens.shape[1])
                    logits[row, at, self.next_token(trace[:place + 1])] = 1
        return logits, read


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_always_right_has_all_commands_and_states_in_every_mode(kind):
    task = task_of(*kind)
    for mode in MODES:
        row = evaluate(Oracle(task, 6, 2), task, 6, 2, mode, traces=3)
        assert [row[x] for x in ("commands", "states", "followed", "final", "perfect")] == [1] * 5
        assert row["by_position"] == {"commands": [1] * 6, "states": [1] * 3}


def test_two_exchanged_commands_are_lost_in_each_mode_and_the_states_in_own_alone():
    """It writes command 4 where 3 belongs, and so on. Given the true ones it knows the states. What
    it writes itself it follows. The states after the pair differ unless the pair commutes."""
    task = task_of("S5")
    order = [0, 1, 2, 4, 3, 5]
    for mode in MODES:
        row = evaluate(Oracle(task, 6, 1, order), task, 6, 1, mode, traces=20)
        assert row["by_position"]["commands"][:3] == [1, 1, 1] and row["followed"] == 1
        assert max(row["by_position"]["commands"][3:5]) < 0.2
        assert row["by_position"]["commands"][5] == 1 and row["perfect"] < 0.2
        states = row["by_position"]["states"]
        assert states[:3] == [1, 1, 1]
        assert states[3:] == [1, 1, 1] if mode != "own" else max(states[3:]) < 0.3


def test_a_wrong_state_is_kept_or_restored_where_states_are_made_from_the_last_one():
    """One mistake: all later states are lost in own and kept, none in restored."""
    task = task_of("S5")
    for mode in MODES:
        row = evaluate(Oracle(task, 6, 1, last=True, wrong=2), task, 6, 1, mode, traces=5)
        expected = [1, 1, 0, 1, 1, 1] if mode == "restored" else [1, 1, 0, 0, 0, 0]
        assert row["by_position"] == {"commands": [1] * 6, "states": expected}
        assert row["final"] == expected[-1] and row["perfect"] == 0
        # One that remembers the commands does not mind what it printed.
        row = evaluate(Oracle(task, 6, 1, wrong=2), task, 6, 1, mode, traces=5)
        assert row["by_position"]["states"] == [1, 1, 0, 1, 1, 1]


def small_model(name, task):
    return build(name, len(task.vocab), d_model=16, conv_width=4,
                 **{} if name == "lstm" else {"heads": 2}).double()


def whole_pass(model, read):
    with torch.no_grad():
        return model(read)[:, :-1].argmax(-1)


@pytest.mark.parametrize("name, kind", [
    *((name, ("S3", "full", "all")) for name in actions.ARMS), ("hybrid", ("S4", "swap", "one"))])
def test_what_is_generated_is_what_a_whole_pass_over_it_says(name, kind):
    """In every mode: what the model read, read again at once, gives the same words. The true words
    are read where they are forced. So `restored` is teacher forcing, and it is the same if every
    token is streamed alone."""
    task = task_of(*kind)
    model = small_model(name, task)
    truth = torch.from_numpy(task.sample(3, 4, 2, generator(1, "test"))[0])
    roles = task.roles(4, 2)
    for mode, own in MODES.items():
        free = np.isin(roles, own)
        said, read = generate(model, truth, free)
        assert torch.equal(said[:, 1:], whole_pass(model, read))
        assert torch.equal(read[:, free], said[:, free])
        assert torch.equal(read[:, ~free], truth[:, ~free]) and free.any() == (mode != "restored")
        assert not free.any() or (read != truth).any()
    assert torch.equal(said[:, 1:], whole_pass(model, truth))  # the last mode was `restored`
    state, alone = None, []
    for token in truth.unbind(1):
        logits, state = model.stream(token[:, None], state)
        alone.append(logits[:, 0].argmax(-1))
    assert torch.equal(torch.stack(alone[:-1], 1), said[:, 1:])


def test_a_line_that_is_no_command_is_not_followed_from_then_on():
    task = task_of()
    lines = task.command_tokens(np.array([[[1, 2, 0], [0, 2, 1]], [[2, 1, 0], [1, 0, 2]]]))[..., 1:]
    lines[1, 0, 4] = lines[1, 0, 5]  # a, b, c = , b, b, a
    commands, known = actions.written_commands(task, lines)
    assert commands.tolist() == [[[1, 2, 0], [0, 2, 1]], [[0, 1, 2], [1, 0, 2]]]
    assert known.tolist() == [[True, True], [False, True]]

    class Stutter(Oracle):
        """Repeats a name in its second command."""

        def next_token(self, read):
            token = super().next_token(read)
            at = (self.roles[:len(read)] == COMMAND).sum()
            return read[-1] if at == len(self.task.varies) + 5 else token

    row = evaluate(Stutter(task, 6, 1), task, 6, 1, "own", traces=4)
    assert row["by_position"]["commands"] == [1, 0, 1, 1, 1, 1]
    assert row["followed"] == pytest.approx(1 / 6, abs=1e-3)
    row = evaluate(Stutter(task, 6, 1), task, 6, 1, "kept", traces=4)
    assert row["followed"] == row["states"] == 1


# --- The hybrid, and the command line -------------------------------------------------------------

def test_the_mixers_of_the_hybrid_alternate_and_it_streams():
    model = build("hybrid", 9, d_model=12, heads=3, layers=3, conv_width=3).double()
    kinds = [type(block) for block in model.blocks[1::2]]
    assert kinds == [DeltaBlock, AttentionBlock, DeltaBlock]
    assert model.blocks[1] is not model.blocks[5]
    tokens, state, pieces = torch.randint(9, (2, 23)), None, []
    for piece in tokens.tensor_split([1, 5, 15, 22], 1):
        logits, state = model.stream(piece, state)
        pieces.append(logits)
    assert (torch.cat(pieces, 1) - model(tokens)).abs().max() < 1e-10
    for options in ({"d_model": 12, "heads": 4}, {"beta_max": 2.5}, {"d_model": 13}, {"layers": 0}):
        with pytest.raises(ValueError, match="must"):
            build("hybrid", 9, **options)


def test_all_arms_read_the_same_tokens_most_of_them_in_the_last_stage():
    for spacing in SPACINGS:
        for shown in ("all", "one"):
            task, tokens = task_of(shown=shown), []
            options = actions.schedule(task, spacing, 5.0)
            stages = [[int(x) for x in stage.split(":")] for stage in options[1].split(",")]
            steps = [int(x) for x in options[3].split(",")]
            for (length, S), count in zip(stages, steps, strict=True):
                lengths = range(max(S, 4), length + 1, S)
                mean = np.mean([len(task.roles(drawn, S)) for drawn in lengths])
                tokens.append(16 * count * mean / 1e6)
            assert stages[0] == [4, 1] and stages[-1] == [16, spacing]
            assert sum(tokens) == pytest.approx(5, rel=0.01)
            assert tokens[-1] == pytest.approx(0.7 * 5, rel=0.01)


def test_each_arm_is_run_recorded_resumed_and_evaluated(tmp_path, monkeypatch, capsys, refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(actions, "LENGTHS", "4:{0}")
    plain = ["--group", "S3", "--millions", "0.003", "--traces", "2", "--record", "r.jsonl"]
    for arm in actions.ARMS:
        actions.main(["run", arm, *plain])
    actions.main(["run", "lstm", *plain])  # the folder is there: it is evaluated again
    actions.main(["run", "lstm", "--shown", "one", "--spacing", "2", *plain])
    lines = [json.loads(line) for line in open("r.jsonl")]
    assert [line["arm"] for line in lines] == [*actions.ARMS, "lstm", "lstm"]
    assert lines[4]["results"] == lines[2]["results"] and len({x["tokens"] for x in lines[:5]}) == 1
    assert [row["mode"] for row in lines[0]["results"]] == [*MODES] and lines[0]["finished"]
    assert lines[5]["tokens_per_command"] == 9 + 11 / 2 and lines[5]["spacing"] == 2
    folder = next(path for path in (tmp_path / "runs" / "arms").iterdir() if "hybrid" in path.name)
    capsys.readouterr()
    actions.main(["eval", str(folder), "--lengths", "4:2,6:1", "--mode", "kept", "--traces", "2",
                  "--json", "--record", "e.jsonl", "--device", "cpu"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["length"], row["mode"]) for row in told["results"]] == [(4, "kept"), (6, "kept")]
    assert json.loads(open("e.jsonl").read())["results"] == told["results"]


def test_the_table_of_costs_is_that_of_the_records(tmp_path, capsys, refused):
    def record(arm, spacing, own, kept):
        rows = [{"mode": "own", "length": 16, "commands": own, "states": 0.5},
                {"mode": "kept", "length": 16, "commands": 1.0, "states": kept},
                {"mode": "own", "length": 8, "commands": 0.0, "states": 0.0}]
        return json.dumps({"arm": arm, "group": "S5", "millions": 12, "shown": "all",
                           "spacing": spacing, "tokens_per_command": 13 + 15 / spacing,
                           "results": rows}) + "\n"

    (tmp_path / "r").write_text(record("lstm", 2, 0.25, 1) + record("hybrid", 1, 0.5, 0.75)
                                + record("lstm", 2, 0.125, 0.875))
    actions.main(["cost", str(tmp_path / "r")])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == ["hybrid S5 12.0 all 1 28.00 1 50.0 - 50.0 50.0 - 50.0 75.0 - 75.0".split(),
                    "lstm S5 12.0 all 2 20.50 2 12.5 - 25.0 50.0 - 50.0 87.5 - 100.0".split()]
    (tmp_path / "r").write_text('{"results": [1]}')
    refused(actions.main, ["cost", tmp_path / "r"], "other records")


def test_what_does_not_fit_is_refused(refused, small_run):
    refused(actions.main, ["run", "nobody"], "nobody")
    refused(actions.main, ["eval", small_run], "no run of experiments.actions")
    refused(actions.main, ["run", "lstm", "--group", "S10"], "listing them is refused")
    refused(actions.main, ["cost", small_run / "none"], "none")
    refused(actions.main, ["run", "lstm", "--spacing", "3"], "spacing")
    with pytest.raises(ValueError, match="shown"):
        task_of(shown="none")


def test_the_table_of_the_header_is_what_was_recorded():
    """In %, the least and the greatest of three seeds, at 8, 16, 32 and 128 commands."""
    runs = [json.loads(line) for line in (actions.RESULTS / "actions.jsonl").read_text().split("\n")
            if line and '"shown": "all", "spacing": 1,' in line]
    table = actions.__doc__.split("states, kept\n")[1].splitlines()[:8]
    group = None
    for line in table:
        *first, arm, said = line[:8].split() + line[8:24].split() + [line[24:].split()]
        group = first[0] if first else group
        mine = [run for run in runs if (run["arm"], run["group"]) == (arm, group)]
        cells = []
        for mode, what in [("own", "commands"), ("kept", "states")]:
            rows = [[round(100 * row[what]) for row in run["results"] if row["mode"] == mode]
                    for run in mine]
            cells += [f"{min(x)}-{max(x)}" if min(x) < max(x) else str(x[0]) for x in zip(*rows)]
        assert len(mine) == 3 and said == [*cells[:3], cells[4], *cells[5:8], cells[9]], line
