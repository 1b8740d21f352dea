"""Plausible wrong variants of the code. `python tests/exercises.py mutants` has them killed.

Each has the law that it breaks, what the file says, what it would say, and where to look for a test
that notices. The old text must stand in its file exactly once.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    file: str
    law: str
    old: str
    new: str
    tests: str  # a file, and an expression for -k


def mutants(file, rows):
    """Rows of law, old, new, and an expression for -k in the file's own tests, or another file."""
    tests = [f"test_{file} -k {row[3]}" if ".py" not in row[3] else row[3] for row in rows]
    return [Mutant(file, *row[:3], f"tests/{test}") for row, test in zip(rows, tests)]


FORMULAS = mutants("scan.py", [(*row, "chunked_equals") for row in [
    ("(4) has beta", "    beta_k_NCK = beta_NC1 * k_NCK\n    L_NCC = beta_k_NCK @ k_NCK.mT",
     "    beta_k_NCK = beta_NC1 * k_NCK\n    L_NCC = k_NCK @ k_NCK.mT"),
    ("(4) has a plus before L", "solve_triangular(L_NCC, rhs, ", "solve_triangular(-L_NCC, rhs, "),
    ("(5) has beta on v", "torch.cat([(beta_NC1 * v_NCV).mT,", "torch.cat([v_NCV.mT,"),
    ("(5) has beta on k", ".mT, beta_k_NCK.mT], -2)", ".mT, k_NCK.mT], -2)"),
    ("(5) puts the later factor on the left", "(L_NCC, rhs, upper=False",
     "(L_NCC.mT, rhs, upper=True"),
    ("(6) subtracts", "u_CV - w_CK @ state_KV", "u_CV + w_CK @ state_KV"),
    ("(6) knows the state", "u_CV - w_CK @ state_KV", "u_CV"),
    ("(7) sees the write at t", "k_NCK.mT).tril_() @ d_NCV", "k_NCK.mT).tril_(-1) @ d_NCV"),
    ("(7) is Q K^T, not K Q^T", "(q_NCK @ k_NCK.mT).tril_() @", "(k_NCK @ q_NCK.mT).tril_() @"),
    ("(7) reads the state before the chunk", "append(state_KV)",
     "append(state_KV + k_CK.mT @ d_CV)"),
    ("(7) has both terms", "q_NCK @ start_NKV + (q_NCK", "0 * q_NCK @ start_NKV + (q_NCK"),
    ("(8) writes with k", "state_KV + k_CK.mT @ d_CV", "state_KV + w_CK.mT @ d_CV"),
    ("(8) remembers the chunk before", "state_KV + k_CK.mT @ d_CV", "k_CK.mT @ d_CV"),
    ("a short chunk is filled up behind its tokens", "F.pad(x, (0, 0, 0, missing))",
     "F.pad(x, (0, 0, missing, 0))"),
    ("the filling leaves at the end", "torch.cat(out, -2)[..., :T, :]",
     "torch.cat(out, -2)[..., -T:, :]"),
    ("each piece begins with the state of the one before", "chunks, state_KV)",
     "chunks, state_KV * 0 + state)"),
    ("(9) knows the state", "select(-3, n) + k_CK @ G_KV", "select(-3, n)"),
    ("(9) transposes P", "P_NCC.mT @ g_out_NCV", "P_NCC @ g_out_NCV"),
    ("(10) has w", "- w_CK.mT @ g_d_CV", "- k_CK.mT @ g_d_CV"),
    ("(10) subtracts", "- w_CK.mT @ g_d_CV", "+ w_CK.mT @ g_d_CV"),
    ("(10) goes from the last chunk to the first", "torch.stack(G[::-1], -3)",
     "torch.stack(G, -3)"),
    ("(11) transposes the triangle", "L_NCC.mT, g_d_NCV, upper=True",
     "L_NCC, g_d_NCV, upper=False"),
    ("M has no diagonal", "-(X_NCV @ d_NCV.mT).tril_(-1)", "-(X_NCV @ d_NCV.mT).tril_()"),
    ("M has a minus", "-(X_NCV @ d_NCV.mT)", "(X_NCV @ d_NCV.mT)"),
    ("(12) has beta", "g_v_NCV = beta_NC1 * X_NCV", "g_v_NCV = X_NCV"),
    ("(13) knows the state", "g_beta_k_NCK -= X_NCV @ start_NKV.mT", "pass"),
    ("(14) knows the last state", "g_k_NCK += d_NCV @ G_NKV.mT", "pass"),
    ("(14) has beta", "+= beta_NC1 * g_beta_k_NCK", "+= g_beta_k_NCK"),
    ("(15) sees its own token", "(g_out_NCV @ d_NCV.mT).tril_()",
     "(g_out_NCV @ d_NCV.mT).tril_(-1)"),
    ("(16) knows the write", "((X_NCV * v_NCV).sum(-1, keepdim=True)", "(0 * beta_NC1"),
]])
SCAN = mutants("scan.py", [
    ("(1) beta scales the correction, not v alone", "b.unsqueeze(-1) * (v_V - stored_V)",
     "b.unsqueeze(-1) * v_V - stored_V", "definition"),
    ("(1) the read follows the write", """\
        state_KV = state_KV + k_K.unsqueeze(-1) * d_V.unsqueeze(-2)                            # (2)
        out.append((q_K.unsqueeze(-2) @ state_KV).squeeze(-2))                                 # (1)
""", """\
        out.append((q_K.unsqueeze(-2) @ state_KV).squeeze(-2))                                 # (1)
        state_KV = state_KV + k_K.unsqueeze(-1) * d_V.unsqueeze(-2)                            # (2)
""", "definition"),
    ("what is corrected is stored under the key", "stored_V = (k_K.unsqueeze(-2)",
     "stored_V = (q_K.unsqueeze(-2)", "definition"),
    ("an exchange has a minus", "F.one_hot(i, slots) - F.one_hot(j",
     "F.one_hot(i, slots) + F.one_hot(j", "experiments/test_exercises.py -k reflections"),
    ("the i-th right-hand name fetches into x_i", "exchange_key(place, commands + n",
     "exchange_key(commands, place + n", "swap_machine"),
    ("the left-hand names come first", "torch.cat([left_hand, right_hand], -2)",
     "torch.cat([right_hand, left_hand], -2)", "swap_machine"),
    ("a token is read after its last write", "out[..., R - 1::R, :]", "out[..., ::R, :]",
     "delta_product"),
    ("the writes of a token keep their order", "k.flatten(-3, -2), v.flatten(-3, -2)",
     "k.flip(-2).flatten(-3, -2), v.flip(-2).flatten(-3, -2)", "delta_product"),
])
DATA = mutants("data.py", [
    ("compose is first g, then h", "(self.elements[g], self.elements[h], -1)",
     "(self.elements[h], self.elements[g], -1)", "compose"),
    ("a command moves places, not values", "np.take_along_axis(state, commands[:, t], -1)",
     "np.take_along_axis(commands[:, t], state, -1)", "real_interpreter"),
    ("a state is revealed after the last command before it", "[:, spacing - 1::spacing]",
     "[:, ::spacing]", "real_interpreter"),
    ("a reveal marks the value", "is_answer[..., -2] = True", "is_answer[..., -3] = True",
     "real_interpreter"),
    ("the mask belongs to the targets", "tokens[:, 1:], reveals[:, 1:])",
     "tokens[:, 1:], reveals[:, :-1])", "comes_next"),
    ("an alternating group is drawn even", "odd = is_odd(perms)\n", "odd = ~is_odd(perms)\n",
     "form_a_group"),
    ("a dihedral group reflects, too", "flips = [1, -1] if", "flips = [1, 1] if", "form_a_group"),
    ("chance in a product is a mean over its points", "len(self.factors) / self.degree",
     "1 / self.degree", "form_a_group"),
    ("a token is the longest symbol", "key=len, reverse=True)", "key=len)", "real_interpreter"),
    ("a swap names its variables in turn", "right = left[..., ::-1]", "right = left",
     "real_interpreter"),
    ("test and training draw from streams of their own", "spawn_key=(PURPOSES[purpose], *key)",
     "spawn_key=key", "disjoint"),
    ("a stream depends on its step", "spawn_key=(PURPOSES[purpose], *key)",
     "spawn_key=(PURPOSES[purpose],)", "disjoint"),
    ("a label is the product of the words so far", "self.group.index(run_commands(commands))",
     "self.group.index(run_commands(commands[:, ::-1])[:, ::-1])", "running_product"),
    ("nan is no number", "if not low <= kind(text) <= high:",
     "if kind(text) < low or kind(text) > high:", "test_train.py -k bad_input"),
    ("a word is extended at its end", "words[element] + [letter]", "[letter] + words[element]",
     "test_eval.py -k certificate"),
])
MODELS = mutants("models.py", [
    ("a key has length 1", "k = F.normalize(k.unflatten(-1, per_write), dim=-1)",
     "k = k.unflatten(-1, per_write)", "eigenvalues"),
    ("beta reaches beta_max", "self.beta_max * beta\n", "2 * beta\n", "eigenvalues"),
    ("gamma scales what is written", "gamma.unsqueeze(-1) * v", "v",
     "experiments/test_spine.py -k docstring"),
    ("the output is normalised head by head", "self.out(self.out_norm(out).tr", "self.out(out.tr",
     "experiments/test_spine.py -k docstring"),
    ("rotary positions go on in the next piece",
     "rotate(q, past), torch.stack([rotate(k, past), v])", "rotate(q), torch.stack([rotate(k), v])",
     "causal"),
    ("the past is seen, and the future is not", ".tril(past)", ".tril(past + 1)", "causal"),
    ("attention is causal in one piece, too", "is_causal=not past", "is_causal=False", "causal"),
    ("a head turns pairs by angles of their own", "10000.0 ** (-torch.arange(0, width, 2",
     "10000.0 ** (0 * torch.arange(0, width, 2", "experiments/test_spine.py -k rotary"),
    ("the convolution goes on in the next piece", "window[:, window.shape[1] - reach:]",
     "window[:, :reach]", "causal"),
    ("the local block keeps its input", "return x + self.out(mixed), window",
     "return self.out(mixed), window", "convolution"),
    ("an LSTM begins by remembering", "self.lstm.bias_hh_l0[d_model:2 * d_model] = 0",
     "self.lstm.bias_hh_l0[d_model:2 * d_model] = 2", "remembering"),
    ("every block gets the state that it left", "zip(self.blocks, state or itertools.repeat(None))",
     "zip(self.blocks, itertools.repeat(None))", "causal"),
])
EVAL = mutants("eval.py", [
    ("perfect is every reveal of a trace", "perfect = right.all(1)", "perfect = right.any(1)",
     "stops_tracking"),
    ("final is the last reveal", "right[:, -1].mean()", "right[:, 0].mean()", "stops_tracking"),
    ("tests are drawn from the stream of tests", 'generator(seed, "test", length, spacing)',
     'generator(seed, "train", length, spacing)', "distance"),
    ("an interval needs its z", "half = z * np.sqrt(", "half = np.sqrt(", "wilson"),
    ("a trace is streamed with its state", "model.stream(tokens, state)", "model.stream(tokens)",
     "log_probabilities"),
    ("answers stand by trace, then by time", "torch.cat(found)[order]", "torch.cat(found)",
     "log_probabilities"),
    ("kl weighs with the best prediction", "(batch.best * gap).sum(-1)", "gap.sum(-1)", "distance"),
    ("bayes is the best guess", "batch.best.max(-1).mean()", "batch.best.mean()", "distance"),
    ("every variable is asked for", "(answers != task.value_tokens[expected]).any(1)",
     "(answers != task.value_tokens[expected]).all(1)", "certificate"),
])
TRAIN = mutants("train.py", [
    ("the result is the mean of the weights",
     "return self.average.module if self.average.n_averaged else self.model", "return self.model",
     "mean_of_its_last_stage"),
    ("the mean begins once a stage is learned",
     'progress["learned"] |= progress["streak"] == STREAK', 'progress["learned"] = True',
     "mean_of_its_last_stage"),
    ("each parameter is in one optimizer", "if p.ndim != 2 or p in outer]", "if p.ndim != 2]",
     "one_optimizer"),
    ("the extra loss is that of the reveals", "losses.mean(), losses[reveals].mean()",
     "losses.mean(), losses.mean()", "follows_the_gradient"),
    ("a gradient is clipped to norm 1", "clip_grad_norm_(model.parameters(), 1.0)",
     "clip_grad_norm_(model.parameters(), 10.0)", "follows_the_gradient"),
    ("each step begins with no gradient", "        optimizer.zero_grad()", "        pass",
     "follows_the_gradient"),
    ("the accuracy is that of the reveals", "(logits.argmax(-1) == targets)[reveals].float()",
     "(logits.argmax(-1) == targets).float()", "follows_the_gradient"),
    ("three batches running end a stage", '        over = progress["streak"] == STREAK',
     '        over = progress["streak"] > STREAK', "stage_ends"),
    ("a bad batch ends the streak", 'if accuracy > config["advance"] else 0',
     'if accuracy > config["advance"] else progress["streak"]', "stage_ends"),
    ("a stage has its own steps", "stage_step=0, streak=0", "streak=0", "stage_ends"),
    ("each step draws fresh traces", 'generator(config["seed"], "train", progress["step"])',
     'generator(config["seed"], "train")', "fresh_traces"),
    ("rates rise from 0", 'rate * min(1.0, (progress["step"] + 1) / WARMUP)', "rate",
     "experiments/test_spine.py -k rates"),
    ("a resumed run goes on with its optimisers",
     "                optimizer.load_state_dict(state)", "                pass", "bit_identical"),
    ("a resumed run goes on with its mean", 'self.average.load_state_dict(resume["average"])',
     "pass", "bit_identical"),
    ("the log of a resumed run has each step once", 'int(x[1]) <= self.progress["step"]', "True",
     "bit_identical"),
])
CHAPTERS = [Mutant(f"experiments/{file}.py", law, old, new, f"tests/experiments/test_{tests}")
            for file, law, old, new, tests in [
    ("automata", "Bayes divides at every step", "survived / evidence[:, t, None]", "survived",
     "automata.py -k paths"),
    ("automata", "delta stands on the left", "self.delta[symbols[:, t]] @ posterior",
     "self.delta[symbols[:, t]].swapaxes(1, 2) @ posterior", "automata.py -k paths"),
    ("automata", "a symbol reveals, and then it moves",
     "survived = belief * self.rho[symbols[:, t]]",
     "survived = (self.delta[symbols[:, t]] @ belief[..., None])[..., 0] * self.rho[symbols[:, t]]",
     "automata.py -k paths"),
    ("beliefs", "a prediction stands ahead of its reveal", "beliefs[:, spacing::spacing + 1]",
     "beliefs[:, spacing - 1::spacing + 1]", "beliefs.py -k enumeration"),
    ("beliefs", "a coin falls with its probability", "rng.random((batch, length)) < probability",
     "rng.random((batch, length)) < 0.5", "beliefs.py -k falls_as_its_number"),
    ("beliefs", "the adversary's coins never fall", "0.5, False", "0.5, True",
     "beliefs.py -k schedules"),
    ("underflow", "a reveal erases its column, too", "torch.diag_embed(1 - e_j)",
     "torch.diag_embed(0 * e_j + 1)", "underflow.py -k settles"),
    ("underflow", "pairs compose from left to right", "rescale(M2_KK @ M1_KV,",
     "rescale(M1_KV @ M2_KK,", "underflow.py -k rescaled"),
    ("heads", "a snapped state is written as it was read, not transposed",
     "(P - self.average) @ self.B).view_as(states)",
     "(P.unflatten(-1, (self.n, self.n)).mT.flatten(-2) - self.average) @ self.B).view_as(states)",
     "heads.py -k spans"),
    ("heads", "the mean is no part of P", "(states.flatten(-3) - self.mean) @ self.inverse",
     "states.flatten(-3) @ self.inverse", "heads.py -k spans"),
    ("heads", "a value is taken once", "left[rows, i] = left[rows, :, j] = -torch.inf",
     "left[rows, i] = -torch.inf", "heads.py -k nearest"),
    ("snap", "a trace is snapped at its own places",
     "torch.where(rows, self.image.correct(held), held)", "self.image.correct(held)",
     "snap.py -k side_by_side"),
    ("snap", "pieces do not matter", "[*inner, window[:, -2:], number[:, -1]]",
     "[*inner, window[:, -2:], 0 * number[:, -1]]", "snap.py -k pieces"),
    ("pairs", "training shows no held-out pair", "held_out=False", "held_out=True",
     "pairs.py -k training_never"),
    ("unseen", "a test shows no seen command", "self.batch_of(self.unseen,",
     "self.batch_of(self.seen,", "unseen.py -k all_others"),
]]
MUTANTS = FORMULAS + SCAN + DATA + MODELS + EVAL + TRAIN + CHAPTERS
