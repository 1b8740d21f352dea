"""Plausible wrong variants of the project, each with the test that catches it.

    python tests/exercises.py mutants [--only WORD]      some minutes for all of them

A row says what the file has, what the variant has, and which tests must fail (as for pytest -k).
For a lecture: show a row, and ask which law it breaks, and what the smallest case is that shows it.
"""

import sys
from pathlib import Path

from exercises import COURSE, ROOT, UserError, failure

TABLE = {
    "data.py": [
        # "first g, then h" in the wrong order; a reveal at the wrong time, or of the wrong variable
        ("[state[i] for i in g]", "[g[i] for i in state]", "real_interpreter"),
        ("if (t + 1) % spacing == 0", "if t % spacing == 0", "after_each_spacing"),
        ("asked[t // spacing]", "asked[0]", "after_each_spacing"),
        ("self.names[g[i]] for i in left", "self.names[i] for i in left", "real_interpreter"),
        ("if g[i] != i]", "if g[i] > i]", "written_in_order"),
        ('inputs == self.ids[" "]', 'targets == self.ids[" "]', "real_interpreter"),
        ("key=len, reverse=True", "key=len", "real_interpreter"),
        ("np.maximum.accumulate(shown, 1)", "shown", "repeats_a_command"),
        (" if length >= SHORTEST_WITH_REPEATS else 0", "", "short_training_traces"),
        ("group.transpositions, size", "group.transpositions[:-1], size", "swaps_are_equally"),
        # groups
        ("perms[odd, -2:] = perms[odd][:, [-1, -2]]", "pass", "draws_them_uniformly"),
        ("rng.random((*shape, self.degree)).argsort(-1)",
         "np.broadcast_to(rng.permutation(self.degree), (*shape, self.degree)).copy()",
         "draws_them_uniformly"),
        ("(points[:, None] - points)", "(points - points[:, None])", "lists_its_elements"),
        ("elements[:, self.elements].reshape", "elements[:1, self.elements].reshape",
         "not_all_of_a_group"),
        # random streams
        ("key = (PURPOSES[purpose], *key)", "key = (PURPOSES[purpose],)", "seed_purpose_and_key"),
        ("SeedSequence(seed, spawn_key=key)", "SeedSequence([seed, *key])",
         "seed_purpose_and_key")],
    "scan.py": [
        ("F.one_hot(i, slots) - F.one", "F.one_hot(i, slots) + F.one", "swap_machine_tracks"),
        ("swap_key(place, commands + n", "swap_key(commands, place + n", "swap_machine_tracks"),
        ('"...k,...v->...kv", b_K, d_V)', '"...k,...v->...kv", k_K, d_V)', "exercise_2"),  # (2)
        ("L_NCC = (k_NCK @ b_NCK.mT)", "L_NCC = (b_NCK @ k_NCK.mT)", "equals_the_loop"),  # (5)
        ("torch.linalg.solve_triangular(L_NCC, eye_NCC, upper=False, unitriangular=True)",
         "sum(torch.linalg.matrix_power(-L_NCC, j) for j in range(L_NCC.shape[-1]))",
         "exercise_3"),
        ("w_NCK = inverse_NCC @ k_NCK", "w_NCK = inverse_NCC @ b_NCK", "equals_the_loop"),  # (6)
        ("state_KV + b_CK.mT @ d_CV", "state_KV + b_CK.mT @ u_CV", "equals_the_loop"),  # (8)
        ("(q_NCK @ b_NCK.mT).tril_()", "(q_NCK @ b_NCK.mT).tril_(-1)", "equals_the_loop"),  # (9)
        ("(0, 0, 0, N * C - T)", "(0, 0, N * C - T, 0)", "equals_the_loop"),
        (".clone(memory_format=torch.contiguous_format)", "", "own_their_memory"),
        ("out[..., R - 1::R, :]", "out[..., ::R, :]", "delta_product"),
        (" - w_NCK.select(-3, n).mT @ g_d_CV", "", "equals_the_loop"),  # (11)
        ("G_NKV = torch.stack(G[::-1], -3)", "G_NKV = torch.stack(G, -3)", "equals_the_loop"),
        ("(X_NCV @ d_NCV.mT).tril_(-1).neg_()", "(X_NCV @ d_NCV.mT).tril_(-1)",
         "equals_the_loop"),  # (12)
        ("torch.promote_types(x.dtype, torch.float32)", "x.dtype", "half_precision"),
        ("[out, state, inverse.mT, *others]", "[out, state, inverse, *others]", "torchs_rules"),
        ("    q, k, b, g_out, G = [x.contiguous() for x in (q, k, b, g_out, G)]\n", "",
         "torchs_rules")],
    "models.py": [
        ("unit(q), unit(k)", "q, unit(k)", "exercise_8"),
        ("unit(q), unit(k)", "unit(q), k", "exercise_8"),
        ("write_gate.unsqueeze(-1) * v", "v", "exercise_8"),
        (", self.beta_max * beta\n", ", beta\n", "exercise_8"),
        (".clamp_min(1e-12)", "", "zero_stays_zero"),
        ("window[:, -reach:]", "window[:, :reach]", "ragged_pieces"),
        ("F.gelu(self.up(self.norm(x)))", "self.up(self.norm(x))", "mlp_is_its_docstring"),
        ("q = rotate(q, past)", "q = rotate(q)", "ragged_pieces"),
        ("torch.cat([state, kv], 3)", "torch.cat([kv, state], 3)", "ragged_pieces"),
        (".tril(past)", ".tril(past + 1)", "ragged_pieces"),
        ("is_causal=not past", "is_causal=False", "ragged_pieces"),
        ("bias_ih_l0[d_model:2 * d_model] = 2", "bias_ih_l0[:d_model] = 2", "lstm_block"),
        ("self.unembedding(self.norm(x))", "self.unembedding(x)", "blocks_one_after_the_other")],
    "eval.py": [
        ("correct.all(1)", "correct.any(1)", "stops_tracking"),
        ("correct[:, -1].mean()", "correct[:, 0].mean()", "stops_tracking"),
        ('generator(seed, "test", length', 'generator(seed, "valid", length', "test_stream"),
        ("[reveals].reshape(traces, -1)", "[reveals].reshape(-1, traces).T", "stops_tracking"),
        ("shrink / total / 4", "shrink / 4", "wilson"),
        ("    model.eval()\n    bar", "    bar", "dropout"),
        ("weights_only=True", "weights_only=False", "executes_no_code"),
        ('np.arange(1, len(row["by_position"]) + 1)', 'np.arange(len(row["by_position"]))',
         "figure_shows")],
    "train.py": [
        ("now.passes + 1 if good else 0", "now.passes + good", "stage_ends"),
        ("now.stage_step = now.passes = 0", "now.stage_step = 0", "stage_ends"),
        ("if counts:", "if True:", "stage_ends"),
        ("task.joined_late(batch), False", "batch, False", "dense"),
        ("        model.zero_grad()\n", "", "clipped_gradient"),
        ("clip_grad_norm_(model.parameters(), 1.0,", "clip_grad_norm_(model.parameters(), 9e9,",
         "clipped_gradient"),
        ("lerp_(parameter.data, 1 / n)", "lerp_(parameter.data, 0.5)",
         "average_is_that_of_the_last"),
        ("(now.step + 1) / config.warmup", "(now.stage_step + 1) / config.warmup", "warm_up_once"),
        ("parameter.ndim == 2 and not is_end", "parameter.ndim == 2", "muon_gets_the_matrices"),
        ('average.load_state_dict(run["model"])', "pass", "cut_and_resumed"),
        ("return average.eval()", "return model.eval()", "average_is_that_of_the_last"),
        ('"train", now.step)', '"train", now.stage_step)', "fresh_traces_of_the_seed")],
    "experiments/groups.py": [
        ("np.take_along_axis(g, h, -1)", "np.take_along_axis(h, g, -1)", "permutations_compose")],
    "experiments/baselines.py": [
        ('["by_position"][0]', '["by_position"][-1]', "first_reveal_has_none"),
        ("undecayed_TRV = v_TRV / decay_T1", "undecayed_TRV = v_TRV * decay_T1",
         "gated_scan_is_the_loop")],
    "experiments/inside.py": [
        ("left[each, :, j] = -torch.inf", "pass", "nearest_permutation"),
        ("(P - self.average) @ self.B", "P @ self.B", "random_linear_image")],
    "experiments/beliefs.py": [
        ("survived / evidence[:, None]", "survived", "exact_filter"),
        ("rng.random((batch, length)) < probability", "rng.random((batch, length)) < 0.5",
         "coin_falls")],
    "experiments/underflow.py": [
        ("(1 - p) * H + p * H[g]", "p * H + (1 - p) * H[g]", "coin_is_a_delta_step"),
        ("        H = H / H.sum(-2, keepdim=True)\n", "", "sinkhorn")],
    "experiments/drift.py": [
        ("first[misread & (first > most)]", "first[misread]", "misread"),
        ("== perms).all(1)", "== perms).any(1)", "one_misread_variable")],
    "experiments/snap.py": [
        ("torch.where(rows, self.image.project(held), held)", "self.image.project(held)",
         "projected_where_it_is_due"),
        ("number % self.interval == 0", "number % self.interval == 1", "projected_where")],
    "experiments/words.py": [
        ("points_moved(others) < points_moved(words)", "points_moved(others) > points_moved(words)",
         "easy_words"),
        ("left * 2e-4 / config.lr if", "left if", "from_less"),
        ("beta += 6 * (0.9 - 0.5)", "beta += 0.9 - 0.5", "start_as_reflections")],
    "experiments/unseen.py": [
        ("self.batch_from(self.unseen,", "self.batch_from(self.seen,", "seen_commands"),
        ("compose(elements[number], commands)", "compose(commands, elements[number])",
         "perfect_reader")],
    "experiments/scale.py": [
        ("batch = batch * 64 // max(64, length)", "pass", "above_twelve_variables")],
    "experiments/copies.py": [
        ("b_r < 0, -r, r)", "b_r < 0, r, r)", "writes_along_another")],
    "experiments/supervision.py": [
        ("tokens.view(-1, answer_width).all(-1)", "tokens.view(-1, answer_width).any(-1)",
         "all_its_tokens")],
    "experiments/actions.py": [
        ("reshape(traces, length, -1).all(-1)", "reshape(traces, length, -1).any(-1)",
         "all_of_its_tokens"),
        ("read[:, end:end + 1] = predictions[-1][:, -1:]", "pass", "just_where_it_is_free")],
}


def tests_of(file):
    """The file with the tests of this file."""
    if file == "experiments/groups.py":
        return COURSE
    return str(Path("tests", file).with_name(f"test_{Path(file).name}"))


def survivors(word):
    """Run the variants whose row has this word.  Returns: how many of them their tests miss."""
    chosen = {file: found for file, rows in TABLE.items()
              if (found := [row for row in rows if word in f"{file} {row}"])}
    if not chosen:
        raise UserError(f"no row of the table has {word!r}")

    alive = 0
    for file, rows in chosen.items():
        # A test that fails without any variant would catch them all.
        all_words = " or ".join(words for _, _, words in rows)
        told = failure(file, lambda source: source, tests_of(file), all_words)
        if told:
            sys.exit(f"{tests_of(file)} fails without any variant: {told}")

        for old, new, words in rows:
            caught = failure(file, lambda source: source.replace(old, new), tests_of(file), words)
            alive += not caught
            print("caught  " if caught else "SURVIVES", f"{file}: {old}  ->  {new}", flush=True)
    return alive
