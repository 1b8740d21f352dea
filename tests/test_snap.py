"""The head that tracks is found; its states are the group's; put back on them, it does not get
lost."""

import json
import re

import numpy as np
import pytest
import torch
from data import Group, ReplTask, WordTask, stream
from eval import (Snapped, alphabet_of, collect_states, drift, evaluate, extract,
                  extract_and_print, find_states, main, relabel, settled, settled_ends, spread,
                  states_from, tracking_heads)
from models import build
from scan import delta_rule_recurrent, exchange_key, swap_machine_keys
from torch.nn import functional as F


class SwapMachine:
    """The hand-built head of scan.py on REPL traces of full commands: it executes a command at its
    newline, and answers with what the slot asked for holds. Noise, fixed for each key, bends it.

    Slot x begins with the one-hot value x, the spares empty. State: [S [B, 1, 2n, n], line [B, t]].
    """

    def __init__(self, group, noise=0.0):
        self.task, self.n = ReplTask(Group(group)), Group(group).degree
        self.noise_left = noise * torch.randn(self.n, 2 * self.n).double()
        self.noise_right = noise * torch.randn(self.n, self.n, 2 * self.n).double()

    def execute(self, commands, S):
        place = torch.arange(self.n)
        noise = torch.cat([self.noise_left.expand(len(S), -1, -1),
                           self.noise_right[place, commands]], 1)
        k = F.normalize(swap_machine_keys(commands.unsqueeze(1)) + noise, dim=-1).unsqueeze(1)
        nothing = k.new_zeros(*k.shape[:-1], self.n)
        return delta_rule_recurrent(k, k, nothing, k.new_full(k.shape[:-1], 2.0), S)[1]

    def stream(self, tokens, state=None):
        batch, n, vocab = len(tokens), self.n, self.task.vocab
        S, line = state or (torch.eye(2 * n)[:, :n].double().repeat(batch, 1, 1, 1), tokens[:, :0])
        logits = torch.zeros(*tokens.shape, len(vocab), dtype=torch.float64)
        for t in range(tokens.shape[1]):
            line = torch.cat([line, tokens[:, t:t + 1]], 1)
            word, place = vocab[line[0, -1]], (line - vocab.index("a")) % n
            if word == " ":  # `b `: the value comes next
                logits[:, t, self.task.value_tokens] = S[torch.arange(batch), 0, place[:, 0]]
            if word == "\n":
                S = self.execute(place[:, n + 2:-1], S) if line.shape[1] == 2 * n + 3 else S
                line = line[:, :0]
        return logits, [S, line]


def test_the_head_that_keeps_and_moves_is_found(monkeypatch):
    """Four heads with the same keys, exchanges of random slots: beta = 2 tracks; beta = 0 only
    keeps, and beta = 1 and 1/2 forget all but the mean of the slots. The first alone is found."""
    task = ReplTask(Group("S5"))
    model = build("linrnn", len(task.vocab), d_model=40, heads=4)

    def inputs_of_scan(x):
        i = torch.randint(5, x.shape[:2])
        j = (i + torch.randint(1, 5, i.shape)) % 5
        k = exchange_key(i, j, 10).float()[:, None, :, None].expand(-1, 4, -1, -1, -1)
        beta = torch.tensor([0.0, 2.0, 1.0, 0.5]).view(4, 1, 1).expand(k.shape[:-1])
        return k[..., 0, :], k, torch.ones_like(k), beta

    monkeypatch.setattr(model.blocks[1], "inputs_of_scan", inputs_of_scan)
    assert tracking_heads(model, task) == [(1, 1)]


@pytest.mark.parametrize("name, options", [("linrnn", {"beta_max": 1.0}), ("lstm", {}),
                                           ("transformer", {})])
def test_a_model_that_cannot_reflect_has_no_tracking_head(name, options):
    task = ReplTask(Group("S5"))
    assert tracking_heads(build(name, len(task.vocab), **options), task) == []


def test_words_have_no_commands_to_stop_at():
    task = WordTask(Group("S3"))
    with pytest.raises(ValueError, match="trained on words"):
        tracking_heads(build("linrnn", 6), task)


@pytest.mark.parametrize("commands, mark", [("full", " = "), ("swap", "\n")])
def test_a_command_has_settled_in_the_line_after_it(commands, mark):
    """Up to each place the text holds one command more, whole, and ends with the mark."""
    task = ReplTask(Group("S4"), commands)
    tokens, _ = task.sample(1, 6, 3, stream(0, "valid"))
    for count, end in enumerate(settled_ends(task, 6, 3), 1):
        text = task.decode(tokens[0, :end])
        assert text.endswith(mark) and len(re.findall(r", . = .*\n", text)) == count


def test_the_states_of_the_hand_built_head_are_the_permutations():
    """Slot x holds the value of variable x after each command; the spares are empty again."""
    machine = SwapMachine("S4")
    states, elements = collect_states(machine, machine.task, [(0, 0)], 6, 10, 5, stream(0, "valid"))
    held = torch.from_numpy(np.eye(4)[machine.task.group.elements[elements]])
    assert states.shape == (6, 10, 1, 8, 4) and len(np.unique(elements)) > 10
    assert (states[:, :, 0, :4] - held).abs().max() < 1e-10
    assert states[:, :, 0, 4:].abs().max() < 1e-10


def test_spread_of_two_classes_known_by_hand():
    """Points 0, 2 and 7, 11 on a line: 1 and 2 from their means, with 4 - 2 degrees of freedom."""
    within, between = spread(torch.tensor([[0.0], [7.0], [2.0], [11.0]]), np.array([3, 8, 3, 8]))
    assert abs(within - 5**0.5) < 1e-6 and abs(between - 8) < 1e-6


@pytest.fixture(scope="module")
def noisy():
    """A hand-built head whose keys are bent, enough to lose the state within some hundred commands,
    and the states found in it."""
    torch.manual_seed(0)
    machine = SwapMachine("S3", noise=0.015)
    return machine, machine.task, find_states(machine, machine.task, [(0, 0)])


def test_snapping_restores_exact_tracking_where_the_noisy_head_alone_fails(noisy):
    """In the second half of 300 commands the head alone is often wrong; snapped after every
    command, or every fifth, it never is."""
    machine, task, states = noisy
    alone = evaluate(machine, task, 300, 10, traces=8)
    assert np.mean(alone["by_position"][15:]) < 0.6
    for every in (1, 5):
        snapped = Snapped(machine, task, [(0, 0)], states, every)
        assert evaluate(snapped, task, 300, 10, traces=8)["all"] == 1


def test_states_are_found_without_being_counted_and_their_automaton_is_the_group(noisy):
    """Six states of S3 in the noisy head, 24 of S4 in the exact one: every transition is right, and
    a command ends closer to its state than to the border."""
    exact = SwapMachine("S4")
    for machine in (noisy[0], exact):
        states = find_states(machine, machine.task, [(0, 0)])
        group, alphabet = machine.task.group, alphabet_of(machine.task)
        table, start, reach = extract(machine, machine.task, [(0, 0)], states)
        labels, agree = relabel(table, start, group, alphabet)
        assert sorted(labels) == list(range(group.order)) and agree == table.size
        assert reach < 1e-6 if machine is exact else 0.05 < reach < 0.5


def test_equal_states_are_no_gap(monkeypatch):
    """Three clusters, 10.3 apart, of two points each, 5.2 apart: the gap below 5.2, where the same
    point occurs twice, is the widest, but it parts nothing."""
    points = torch.eye(4).repeat_interleave(4, 0)[:12] * 7.3
    points[1::2, 3] = 5.2
    states = points.view(12, 1, 1, 1, 4)
    monkeypatch.setattr("eval.collect_states", lambda *_: (states, None))
    assert len(find_states(None, None, None)) == 3


def test_one_cluster_alone_is_no_list_of_states(monkeypatch):
    """-1, 0, 1: both others within the radius of 1.5 around the first point."""
    states = torch.tensor([0.0, 1.0, -1.0]).view(3, 1, 1, 1, 1)
    monkeypatch.setattr("eval.collect_states", lambda *_: (states, None))
    with pytest.raises(ValueError, match="does not fall into clusters: 1 after"):
        find_states(None, None, None)


@pytest.mark.parametrize("name, commands", [("D4", "full"), ("S4", "swap")])
def test_a_word_leads_to_its_product(name, commands):
    """A true table is relabelled by the group's own numbers, also where the start reaches most
    states in several commands only."""
    task = ReplTask(Group(name), commands)
    group, numbers = task.group, np.arange(task.group.order)
    letters = group.index(alphabet_of(task))
    labels, agree = relabel(group.compose(numbers[:, None], letters), 0, group, alphabet_of(task))
    assert (labels == numbers).all() and agree == group.order * len(letters)


def test_a_relabelled_group_is_recognised_and_one_wrong_transition_is_counted():
    """The table of S4 with its states shuffled; then with one entry changed."""
    group = Group("S4")
    letters, shuffle = np.arange(24), np.random.default_rng(0).permutation(24)
    table = np.empty((24, 24), int)
    table[shuffle] = shuffle[group.compose(letters[:, None], letters)]
    labels, agree = relabel(table, shuffle[0], group, group.elements)
    assert (labels[shuffle] == letters).all() and agree == table.size
    table[shuffle[7], 5] = shuffle[3]
    assert relabel(table, shuffle[0], group, group.elements)[1] == table.size - 1


def test_one_wrong_transition_is_no_isomorphism(noisy, monkeypatch):
    """All elements occur once, and 35 of 36 transitions agree: not the group."""
    machine, task, states = noisy
    table, start, reach = extract(machine, task, [(0, 0)], states)
    last = next(state for state in range(6) if state != start)
    table[last, 0] = table[last, 1]
    monkeypatch.setattr("eval.extract", lambda *_: (table, start, reach))
    monkeypatch.setattr("eval.drift", lambda *_: [])
    numbers = extract_and_print(machine, task, [(0, 0)], states)
    assert numbers["agree"] == 35 and not numbers["isomorphic"]


def test_a_state_that_is_wrong_stays_wrong(noisy):
    """With two values exchanged before the first command, the snapped head is for ever right about
    the third value, and never about these two: snapping makes an error permanent."""
    machine, task, states = noisy
    snapped = Snapped(machine, task, [(0, 0)], states)
    inputs, targets, reveals = task.training_batch(8, 100, 1, stream(0, "valid"))
    tokens, first = torch.from_numpy(inputs.copy()), len(task.start_tokens())
    memory = snapped.stream(tokens[:, :first])[1]
    memory[0] = memory[0][..., [1, 0, 2]]
    answers = snapped.stream(tokens[:, first:], memory)[0].argmax(-1).numpy()
    truth, asked = targets[:, first:], reveals[:, first:]
    assert ((answers == truth) == (truth == task.value_tokens[2]))[asked].all()


def test_the_drift_grows_alone_and_stays_when_snapped(noisy, monkeypatch, capsys):
    """Spread within a state: alone larger after 48 commands than after 16; snapped the same within
    a tenth, and small. The printed verdict is that of the table."""
    machine, task, states = noisy
    monkeypatch.setattr("eval.drift", lambda *args: drift(*args, ends=(16, 48)))
    numbers = extract_and_print(machine, task, [(0, 0)], states)
    (_, early, _), (end, late, between) = numbers["drift"]["alone"]
    (_, first, _), (_, last, apart) = numbers["drift"]["snapped"]
    assert end == 48 and late > 1.5 * early and abs(last / first - 1) < 0.1
    assert last < early and apart > between
    assert numbers["isomorphic"] and numbers["agree"] == numbers["transitions"] == 36
    assert "36 of 36 transitions agree with S3 (6 elements): isomorphic" in capsys.readouterr().out


def test_off_is_bit_identical_and_pieces_do_not_matter():
    """Without a snap due, every bit of the model's own stream; with snaps, the same in ragged
    pieces as whole."""
    task = ReplTask(Group("S3"))
    model = build("linrnn", len(task.vocab), d_model=12, heads=2)
    tokens = torch.from_numpy(task.sample(4, 12, 3, stream(0, "valid"))[0])
    states = torch.randn(6, 1, 6, 6)
    never = Snapped(model, task, [(1, 1)], states, every=1000)
    with torch.no_grad():
        assert (never.stream(tokens)[0] == model.stream(tokens)[0]).all()
    snapped, state, pieces = Snapped(model, task, [(1, 1)], states, every=2), None, []
    for piece in tokens.tensor_split([1, 2, 20, 21, 22, 23, 90], 1):
        logits, state = snapped.stream(piece, state)
        pieces.append(logits)
    whole = snapped.stream(tokens)[0]
    assert (torch.cat(pieces, 1) - whole).abs().max() < 1e-5
    assert (whole - never.stream(tokens)[0]).abs().max() > 1e-3


def test_traces_side_by_side_are_snapped_each_at_its_own_places():
    """Two traces with reveals at other places, streamed together and one by one."""
    task = ReplTask(Group("S3"))
    model = build("linrnn", len(task.vocab), d_model=12, heads=2)
    snapped = Snapped(model, task, [(1, 0)], torch.randn(6, 1, 6, 6), every=2)
    tokens = torch.from_numpy(np.vstack([
        task.sample(1, 12, spacing, stream(0, "valid"))[0][:, :120] for spacing in (1, 4)]))
    alone = torch.cat([snapped.stream(row)[0] for row in tokens.split(1)])
    assert (snapped.stream(tokens)[0] - alone).abs().max() < 1e-5


@pytest.mark.parametrize("commands", ["full", "swap"])
def test_a_snap_replaces_the_tracking_head_alone_and_only_when_a_command_has_settled(commands):
    """Of two heads, both 0, the second is put on the only state there is, just after the second
    settled place, and every other one."""
    task = ReplTask(Group("S3"), commands)
    model = build("linrnn", len(task.vocab), d_model=12, heads=2)

    def nothing(x):  # neither keys nor values nor beta: S stays 0
        keys = torch.zeros(len(x), 2, x.shape[1], 1, 6)
        return keys[..., 0, :], keys, keys, keys[..., 0]

    model.blocks[1].inputs_of_scan = nothing
    snapped = Snapped(model, task, [(1, 1)], torch.ones(1, 1, 6, 6), every=2)
    tokens = torch.from_numpy(task.sample(2, 6, 3, stream(0, "valid"))[0])
    line = len(task.command_tokens(np.arange(3)))
    place = len(task.start_tokens()) + settled(task) + line  # one whole command, and it has settled
    place += line if commands == "swap" else 0  # a full trace settles before it begins, too
    state = snapped.stream(tokens[:, :place])[1]
    before, after = state[1], snapped.stream(tokens[:, place:place + 1], state)[1][1]
    assert not before.any() and not after[:, 0].any() and (after[:, 1] == 1).all()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from train import main as train
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(["--group", "S3", "--curriculum", "2:1", "--d-model", "8", "--heads", "1", "--beta-max",
           "1", "--last-steps", "1", "--batch", "2", "--test-lengths", "2:1", "--traces", "2",
           "--out", str(folder)])
    return folder


def test_without_a_tracking_head_snapping_says_so_and_changes_nothing(run, capsys):
    numbers = []
    for options in ([], ["--snap", "auto", "--extract"]):
        capsys.readouterr()
        main([str(run), "--lengths", "8:4", "--traces", "8", *options, "--json"])
        shown = capsys.readouterr().out
        numbers.append(json.loads(shown.splitlines()[-1]))
        assert ("no head of this model tracks" in shown) == bool(options)
    assert numbers[0]["results"] == numbers[1]["results"]
    assert "extract" not in numbers[1]
    assert numbers[1]["tracking"] == {"heads": [], "states": 0}


def test_the_command_line_snaps_if_told_to_and_only_then(run, monkeypatch):
    """With a head that is said to track: --extract evaluates the model itself, --snap auto a
    snapped one, with the interval that was asked for."""
    states, models = torch.randn(6, 1, 8, 8), []
    monkeypatch.setattr("eval.tracking_heads", lambda *_: [(1, 0)])
    monkeypatch.setattr("eval.find_states", lambda *_: states)
    monkeypatch.setattr("eval.drift", lambda *_: [])
    monkeypatch.setattr("eval.evaluate_and_print", lambda model, *_: models.append(model))
    for options in (["--extract"], ["--snap", "auto", "--snap-every", "3"]):
        main([str(run), *options])
    alone, snapped = models
    assert isinstance(alone, torch.nn.Module) and isinstance(snapped, Snapped)
    assert snapped.every == 3 and snapped.centroids is states and snapped.heads == [(1, 0)]


def test_states_are_kept_in_a_file(run, tmp_path, monkeypatch, capsys, refused):
    """Found once and written, then read; a file of anything else, or of another model, is
    refused."""
    task, model = ReplTask(Group("S3")), build("linrnn", 18, d_model=8, heads=1)
    states, path = torch.randn(6, 1, 8, 8), tmp_path / "new" / "states.pt"
    monkeypatch.setattr("eval.tracking_heads", lambda *_: [(1, 0)])
    monkeypatch.setattr("eval.find_states", lambda *_: states)
    for where in ("found", "read from"):
        heads, centroids = states_from(str(path), model, task)
        assert heads == [(1, 0)] and (centroids == states).all()
        assert where in capsys.readouterr().out
    with pytest.raises(ValueError, match="states of this model"):
        states_from(str(path), build("linrnn", 18, d_model=12, heads=1), task)
    refused(main, [run, "--snap", run / "config.json"], "states of this model")
    refused(main, [run, "--snap-every", 0], "--snap-every")


@pytest.mark.parametrize("option", [["--snap", "auto"], ["--extract"]])
def test_a_run_that_corrects_its_own_states_is_not_snapped(option, tmp_path, monkeypatch, refused):
    from train import main as train
    monkeypatch.setattr("eval.evaluate_and_print", lambda *_, **__: [])
    train(["--group", "S3", "--curriculum", "2:1", "--d-model", "8", "--heads", "1", "--codes", "2",
           "--last-steps", "1", "--batch", "2", "--out", str(tmp_path)])
    refused(main, [tmp_path, *option], option[0], "corrects its own")


def test_a_record_holds_the_command_the_seed_and_the_numbers(run, tmp_path):
    main([str(run), "--lengths", "4:2", "--traces", "4", "--record", str(tmp_path / "r.jsonl")])
    line = json.loads((tmp_path / "r.jsonl").read_text())
    assert line["command"].startswith(f"python eval.py {run}") and line["seed"] == 0
    assert line["results"][0]["length"] == 4 and line["torch"] == torch.__version__
    assert {"commit", "config", "minutes"} <= set(line)


def test_states_without_clusters_are_refused():
    """Steps that never repeat: every batch brings new states."""
    class Wanderer(SwapMachine):
        def execute(self, commands, S):
            return S + torch.randn_like(S)

    machine = Wanderer("S3")
    with pytest.raises(ValueError, match="fall into clusters"):
        find_states(machine, machine.task, [(0, 0)])
