"""Plausible wrong variants, each with the test that must kill it.

    python tests/exercises.py mutants [--only WORD]      ten minutes for all of them

A row has what the file says, what it would say, and words that the name of the test contains. For a
lecture: show a row, and ask which law it breaks, and how small a case would show it.
"""

import sys
from pathlib import Path

from exercises import ROOT, UserError, failure

TABLE = {
    "data.py": [
        ("return np.take_along_axis(g, h, -1)", "return np.take_along_axis(h, g, -1)",
         "first_g_then_h"),
        ("[:, spacing - 1::spacing]", "[:, ::spacing]", "interpreter_prints"),
        ("tokens[:, 1:], reveals[:, 1:])", "tokens[:, 1:], reveals[:, :-1])", "interpreter_prints"),
        ("key=len, reverse=True)", "key=len)", "interpreter_prints"),
        ("key = (PURPOSES[purpose], *key)", "key = (PURPOSES[purpose],)", "seed_purpose_and_key")],
    "scan.py": [
        ("L_NCC = (k_NCK @ b_NCK.mT)", "L_NCC = (b_NCK @ k_NCK.mT)", "equals_the_loop"),  # (5)
        ("w_NCK = inverse_NCC @ k_NCK", "w_NCK = inverse_NCC @ b_NCK", "equals_the_loop"),  # (6)
        ("(q_NCK @ b_NCK.mT).tril_()", "(q_NCK @ b_NCK.mT).tril_(-1)", "equals_the_loop"),  # (9)
        ("G_NKV = torch.stack(G[::-1], -3)", "G_NKV = torch.stack(G, -3)", "equals_the_loop"),
        ("(0, 0, 0, missing)", "(0, 0, missing, 0)", "equals_the_loop"),
        ('"...k,...v->...kv", b_K, r_V)', '"...k,...v->...kv", k_K, r_V)', "along_another"),  # (2)
        ("inverse.mT.contiguous()", "inverse.contiguous()", "one_compiled_graph"),
        ("exchange_key(place, commands + n", "exchange_key(commands, place + n",
         "swap_machine_tracks")],
    "models.py": [
        ("q = unit(q)", "q = q", "delta_block"),
        ("k = unit(k)", "k = k", "delta_block"),
        (".clamp_min(1e-12)", "", "zero_stays_zero"),
        ("return q, k, gamma.unsqueeze(-1) * v,", "return q, k, v,", "delta_block"),
        (".tril(past)", ".tril(past + 1)", "ragged_pieces"),
        ("window[:, window.shape[1] - reach:]", "window[:, :reach]", "ragged_pieces"),
        ("hidden = F.gelu(self.up(", "hidden = (self.up(", "mlp_is_its_docstring")],
    "eval.py": [
        ("perfect = right.all(1)", "perfect = right.any(1)", "stops_tracking"),
        ("model.stream(piece, state)", "model.stream(piece)", "in_pieces_and_without")],
    "train.py": [
        ("if accuracy > recipe.pass_share else 0",
         "if accuracy > recipe.pass_share else self.passes", "stage_ends"),
        ("average.module if average.n_averaged else model", "model", "mean_of_the_last_stage"),
        ("            optimizer.zero_grad()", "            pass", "clipped_gradient"),
        ('average.load_state_dict(checkpoint["average"])', "pass", "cut_and_resumed")],
    "experiments/arms.py": [
        ('round(100 * test["by_position"][0])', 'round(100 * test["by_position"][-1])',
         "first_reveal")],
    "experiments/words.py": [
        ("points_moved(others) < points_moved(words)", "points_moved(others) > points_moved(words)",
         "easy_words"),
        ("left * QUIET_RATE / recipe.lr", "left", "rates_fall")],
    "experiments/scale.py": [
        ("batch = batch * 64 // max(64, length)", "pass", "twelve_variables")],
    "experiments/beliefs.py": [
        ("survived / evidence[:, None]", "survived", "exact_filter"),
        ("rng.random((batch, length)) < probability", "rng.random((batch, length)) < 0.5",
         "coin_falls")],
    "experiments/image.py": [
        ("left[each, :, j] = -torch.inf", "pass", "nearest_permutation")],
    "experiments/snap.py": [
        ("torch.where(rows, self.image.correct(held), held)", "self.image.correct(held)",
         "put_back_where_it_is_due")],
    "experiments/unseen.py": [
        ("self.batch_of(self.unseen,", "self.batch_of(self.seen,", "seen_commands")],
    "experiments/supervision.py": [
        ("each_token.view(-1, answer_width).all(-1)", "each_token.view(-1, answer_width).any(-1)",
         "all_its_tokens")],
}


def tests_of(file):
    """The file of the tests that judge this file."""
    return str(Path("tests", file).with_name(f"test_{Path(file).name}"))


def survivors(word):
    """Try each mutant whose row has this word. Returns: how many are not noticed by their test.

    Raises: UserError if no row has it.
    """
    if not any(word in f"{file} {row}" for file, rows in TABLE.items() for row in rows):
        raise UserError(f"no row of the table has {word!r}")

    alive = 0
    for file, rows in TABLE.items():
        rows = [row for row in rows if word in f"{file} {row}"]
        if not rows:
            continue

        # What fails without any mutant would kill them all.
        source = (ROOT / file).read_text(encoding="utf-8")
        all_words = " or ".join(words for _, _, words in rows)
        told = failure(file, source, tests_of(file), all_words)
        if told:
            sys.exit(f"{tests_of(file)} fails without any mutant: {told}")

        for old, new, words in rows:
            killed = failure(file, source.replace(old, new), tests_of(file), words)
            alive += not killed
            print("killed  " if killed else "SURVIVES", f"{file}: {old}  ->  {new}", flush=True)
    return alive
