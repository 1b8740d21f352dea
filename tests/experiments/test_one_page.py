"""The page runs by itself, and its programs are those of Python."""

import torch
import torch.nn.functional as F

from experiments import one_page
from scan import delta_rule_recurrent


def test_each_answer_is_what_python_holds():
    """`=cab` is the line `a, b, c = c, a, b`, and `?b1` says that b is 1."""
    tokens, answers = one_page.traces(20, 6, 2)
    assert len(answers) == 3 and tokens.shape[1] == 3 + 6 * 4 + 3 * 3
    for row in tokens.tolist():
        text = "".join(one_page.VOCAB[token] for token in row)
        held = dict(zip("abc", text))
        for place in range(3, len(text)):
            if text[place] == "=":
                exec(f"a, b, c = {', '.join(text[place + 1:place + 4])}", {}, held)
            elif text[place] == "?":
                assert held[text[place + 1]] == text[place + 2] and place + 2 in answers
    assert len(tokens.unique(dim=0)) == 20


def test_twenty_steps_learn_something_with_and_without_the_sign():
    """Answers of the first stage get likelier; eigenvalues in [0, 1] are enough for them, too."""
    for beta_max in (1.0, 2.0):
        torch.manual_seed(0)
        model = one_page.LinearRNN(beta_max)
        before = one_page.share_right(model, 2, 1)
        one_page.train(model, steps=20, silent=True)
        assert one_page.share_right(model, 2, 1) > before + 0.05


def test_its_recurrence_is_the_delta_rule_of_the_spine():
    """What the read-out gets is x and what scan.py's own loop reads, head by head."""
    model = one_page.LinearRNN(2.0).double()
    tokens, _ = one_page.traces(3, 4, 2)
    got = []
    model.read_out.register_forward_hook(lambda module, inputs, output: got.append(inputs[0]))
    model(tokens)

    x = model.embedding(tokens)
    x = x + F.gelu(model.convolution(F.pad(x.mT, (5, 0))).mT)
    q, k, v, strengths = model.project(x).split([32, 32, 32, 4], -1)
    q, k, v = [part.unflatten(-1, (2, 16)).transpose(1, 2) for part in (q, k, v)]  # [B, H, T, K]
    beta, gamma = F.hardsigmoid(strengths).mT.chunk(2, 1)  # [B, H, T]
    out, _ = delta_rule_recurrent(F.normalize(q, dim=-1), F.normalize(k, dim=-1),
                                  gamma.unsqueeze(-1) * v, 2 * beta)
    assert (got[0] - x - out.transpose(1, 2).flatten(2)).abs().max() < 1e-10
