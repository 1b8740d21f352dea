"""Plausible wrong variants of the code. `python tests/exercises.py mutants` has them killed.

Each has the law that it breaks, what the file says, and what it would say. The old text must stand
in its file exactly once. One of the tests of its own file must fail: a spine file has its tests in
tests/test_FILE, and a chapter in tests/experiments/test_CHAPTER.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    file: str
    law: str
    old: str
    new: str

    @property
    def tests(self):
        folder = "tests/experiments" if "/" in self.file else "tests"
        return f"{folder}/test_{Path(self.file).name}"


TABLE = {}

TABLE["scan.py"] = [
    ("(4) has beta", "L_NCC = (beta_k_NCK @ k_NCK.mT).tril_(-1)",
     "L_NCC = (k_NCK @ k_NCK.mT).tril_(-1)"),
    ("(7) sees the write at t", "k_NCK.mT).tril_() @ d_NCV", "k_NCK.mT).tril_(-1) @ d_NCV"),
    ("(7) reads the state before the chunk", "starts.append(state_KV)",
     "starts.append(state_KV + k_CK.mT @ d_CV)"),
    ("(8) remembers the chunk before", "state_KV + k_CK.mT @ d_CV", "k_CK.mT @ d_CV"),
    ("(9) knows the state", "select(-3, n) + k_CK @ G_KV", "select(-3, n)"),
    ("(10) goes from the last chunk to the first", "torch.stack(G[::-1], -3)",
     "torch.stack(G, -3)"),
    ("M has no diagonal", "-(X_NCV @ d_NCV.mT).tril_(-1)", "-(X_NCV @ d_NCV.mT).tril_()"),
    ("(13) knows the state", "g_beta_k_NCK -= X_NCV @ start_NKV.mT", "pass"),
    ("a short chunk is filled up behind its tokens", "(0, 0, 0, missing)", "(0, 0, missing, 0)"),
    ("(1) beta scales the correction, not v alone", "b.unsqueeze(-1) * (v_V - stored_V)",
     "b.unsqueeze(-1) * v_V - stored_V"),
    ("an exchange has a minus", "F.one_hot(i, slots) - F.one_hot(j",
     "F.one_hot(i, slots) + F.one_hot(j"),
    ("the i-th right-hand name fetches into x_i", "exchange_key(place, commands + n",
     "exchange_key(commands, place + n"),
    ("a token is read after its last write", "out[..., R - 1::R, :]", "out[..., ::R, :]"),
    ("the writes of a token keep their order", "k_each_write = k.flatten(",
     "k_each_write = k.flip(-2).flatten("),
    ("all inputs have one type", "if x.dtype != k.dtype or not", "if not"),
]

TABLE["data.py"] = [
    ("compose is first g, then h", "(self.elements[g], self.elements[h], -1)",
     "(self.elements[h], self.elements[g], -1)"),
    ("a command moves places, not values", "np.take_along_axis(state, commands[:, t], -1)",
     "np.take_along_axis(commands[:, t], state, -1)"),
    ("a state is revealed after the last command before it", "[:, spacing - 1::spacing]",
     "[:, ::spacing]"),
    ("a reveal marks the value", "is_answer[..., -2] = True", "is_answer[..., -3] = True"),
    ("the mask belongs to the targets", "tokens[:, 1:], reveals[:, 1:], best",
     "tokens[:, 1:], reveals[:, :-1], best"),
    ("a test is not made easier", "return next_tokens(*self.sample(batch, length, spacing, rng))",
     "return self.training_batch(batch, length, spacing, rng)"),
    ("some variables of a large group stay", "last = rng.integers(n, size",
     "last = n - 1 + rng.integers(1, size"),
    ("only first commands are all made of exchanges", "if spacing == 1 and self.sparse:",
     "if self.sparse:"),
    ("later stages rehearse exchanges", "sparse = -(-batch // 16)", "sparse = batch // 16"),
    ("the easier of two words is shown", "points_moved(others) < points_moved(words)",
     "points_moved(others) > points_moved(words)"),
    ("an alternating group is drawn even", "odd = is_odd(perms)", "odd = ~is_odd(perms)"),
    ("a family is closed under composition", "if not known.issuperset(map(bytes, products",
     "if known.isdisjoint(map(bytes, products"),
    ("chance in a product is a mean over its points", "len(sizes) / self.degree",
     "1 / self.degree"),
    ("a token is the longest symbol", "key=len, reverse=True)", "key=len)"),
    ("training, validation and test draw from streams of their own", '"valid": 1', '"valid": 2'),
    ("a stream depends on its step", "key = (PURPOSES[purpose], *key)",
     "key = (PURPOSES[purpose],)"),
    ("nan is no number", "if not low <= value <= high:", "if value < low or value > high:"),
    ("a word is extended at its end", "words[element] + [letter]", "[letter] + words[element]"),
]

TABLE["models.py"] = [
    ("beta starts at its share of beta_max", "6 * (beta_start - 0.5)", "3 * (beta_start - 0.5)"),
    ("a key has length 1", "k = F.normalize(k, dim=-1).permute", "k = k.permute"),
    ("beta reaches beta_max", "self.beta_max * beta\n", "2 * beta\n"),
    ("gamma scales what is written", "gamma.unsqueeze(-1) * v", "v"),
    ("the output is normalised head by head", "out = self.out_norm(out).transpose",
     "out = out.transpose"),
    ("rotary positions go on in the next piece", "q = rotate(q, past)\n", "q = rotate(q)\n"),
    ("the past is seen, and the future is not", ".tril(past)", ".tril(past + 1)"),
    ("the convolution goes on in the next piece", "window[:, window.shape[1] - reach:]",
     "window[:, :reach]"),
    ("an LSTM begins by remembering", "self.lstm.bias_hh_l0[d_model:2 * d_model] = 0",
     "self.lstm.bias_hh_l0[d_model:2 * d_model] = 2"),
    ("an LSTM reads normalised inputs", "self.lstm(self.norm(x), state)", "self.lstm(x, state)"),
    ("every block gets the state that it left", "state or [None] * len(self.blocks)",
     "[None] * len(self.blocks)"),
    ("the scan is left out of the graph", "torch.compiler.disable(block.scan)", "block.scan"),
]

TABLE["eval.py"] = [
    ("perfect is every reveal of a trace", "perfect = right.all(1)", "perfect = right.any(1)"),
    ("final is the last reveal", "right[:, -1].mean()", "right[:, 0].mean()"),
    ("tests are drawn from the stream of tests", 'generator(seed, "test", length, spacing)',
     'generator(seed, "train", length, spacing)'),
    ("an interval needs its z", "half = z * np.sqrt(", "half = np.sqrt("),
    ("a trace is streamed with its state", "model.stream(tokens, state)", "model.stream(tokens)"),
    ("answers stand by trace, then by time", "torch.cat(found)[order]", "torch.cat(found)"),
    ("kl weighs with the best prediction", "(best * gap).sum(-1)", "gap.sum(-1)"),
    ("every variable is asked for", "(answered != task.value_tokens[expected]).any(1)",
     "(answered != task.value_tokens[expected]).all(1)"),
    ("weights of another model are refused", "model.load_state_dict(checkpoint[\"model\"])",
     "model.load_state_dict(checkpoint[\"model\"], strict=False)"),
]

TABLE["train.py"] = [
    ("the result is the mean of the weights", "return average.module if average.n_averaged else",
     "return"),
    ("the mean is that of the last stage",
     "progress.learned and progress.stage == recipe.last_stage", "progress.learned"),
    ("each parameter is in one optimizer", "if weight.ndim == 2 and weight not in outer",
     "if weight.ndim == 2"),
    ("a gradient is clipped to norm 1", "model.parameters(), 1.0)", "model.parameters(), 10.0)"),
    ("each step begins with no gradient", "                optimizer.zero_grad()",
     "                pass"),
    ("the accuracy is that of the reveals", "== batch.targets)[batch.reveals]",
     "== batch.targets)"),
    ("a bad batch ends the streak", "if accuracy > recipe.advance else 0",
     "if accuracy > recipe.advance else self.streak"),
    ("each step draws fresh traces", 'generator(recipe.seed, "train", progress.step)',
     'generator(recipe.seed, "train")'),
    ("with a mean no rate falls", "if not recipe.average and progress.stage",
     "if progress.stage"),
    ("short stages have more traces", "recipe.batch * (longest // length)", "recipe.batch"),
    ("rates rise once in a run", "(progress.step + 1) / WARMUP",
     "(progress.stage_step + 1) / WARMUP"),
    ("the minutes are those of all steps", "progress.seconds += time", "progress.seconds = time"),
    ("a resumed run goes on with its mean", 'average.load_state_dict(resume["average"])', "pass"),
    ("the log of a resumed run has each step once", 'if row["step"] <= progress.step:', "if True:"),
    ("a run with other options is not gone on with", "if changed:", "if False:"),
    ("each process has its own rows of a batch", "part[rank::processes]", "part[::processes]"),
    ("processes agree on their metrics", "metrics = mean_over_processes(metrics, device)", "pass"),
]

TABLE["experiments/beliefs.py"] = [
    ("Bayes divides at every step", "survived / evidence[:, None]", "survived"),
    ("delta stands on the left", "self.delta[symbol] @", "self.delta[symbol].swapaxes(1, 2) @"),
    ("a coin falls with its probability", "rng.random((batch, length)) < probability",
     "rng.random((batch, length)) < 0.5"),
    ("the adversary's coins never fall", "executed = probability == 1",
     "executed = probability > 0"),
    ("pairs compose from left to right", "M2_KK @ M1_KV,", "M1_KV @ M2_KK,"),
]
TABLE["experiments/inside.py"] = [
    ("row i of P shows what the variable i holds", "P = F.one_hot(perms, self.n).double()",
     "P = F.one_hot(perms, self.n).double().mT"),
    ("the mean is no part of P", "(states.flatten(-3) - self.mean) @", "states.flatten(-3) @"),
    ("a value is taken once", "left[each, :, j] = -torch.inf", "pass"),
]
TABLE["experiments/snap.py"] = [
    ("a trace is snapped at its own places", "torch.where(rows, self.image.correct(held), held)",
     "self.image.correct(held)"),
    ("pieces do not matter", "window[:, -2:], count[:, -1]]", "window[:, -2:], 0 * count[:, -1]]"),
    ("the first word has none ahead of it", "return window[:, 1:-1] >= 0",
     "return window[:, 1:-1] >= -1"),
    ("the sign is not linear in P", "signed = isinstance(task, WordTask)", "signed = False"),
    ("a head may move what is no permutation", "if kept and len(kept) < len(heads):", "if False:"),
    ("other heads rest at their mean", "torch.where(rows, resting, ",
     "torch.where(rows, 0 * resting, "),
]
TABLE["experiments/unseen.py"] = [
    ("a test shows no seen command", "self.batch_of(self.unseen,", "self.batch_of(self.seen,"),
]

MUTANTS = [Mutant(file, *row) for file, rows in TABLE.items() for row in rows]


def check_table(table):
    """Raises: ValueError unless each old text stands once in its file, and the new one differs."""
    for mutant in table:
        count = (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old)
        if count != 1 or mutant.new == mutant.old:
            raise ValueError(f"{mutant.file} says {count} times, and not once: {mutant.old!r}")


# --- To have them killed --------------------------------------------------------------------------

def failing_test(mutant):
    """The first of its tests that fails in a copy of the project with it, or None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder).resolve() / "copy"
        shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(".git", "runs", "__pycache__"))
        path = place / mutant.file
        source = path.read_text(encoding="utf-8")
        path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")

        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "-rfE", mutant.tests],
            cwd=place, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
            capture_output=True, text=True)
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return named and named[1]


def survivors(table):
    """Prints for each mutant the test that fails. Returns how many nobody notices."""
    check_table(table)
    alive = 0
    with ThreadPoolExecutor(2) as pool:
        # What fails without any mutant would kill them all.
        unchanged = [Mutant(file, "", "", "") for file in {mutant.file for mutant in table}]
        for mutant, failed in zip(unchanged, pool.map(failing_test, unchanged)):
            if failed:
                raise SystemExit(f"{mutant.tests} fails without any mutant: {failed}")

        for mutant, killer in zip(table, pool.map(failing_test, table)):
            alive += killer is None
            print(f"{'killed' if killer else 'SURVIVES':<8}  {mutant.file}: {mutant.law}\n"
                  f"          {killer or mutant.tests}", flush=True)
    print(f"{len(table) - alive} of {len(table)} killed")
    return alive
