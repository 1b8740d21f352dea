"""What is the whole idea, on one page?  No import of ours, and a quarter of a minute.

A program is a line of tokens. Each command shuffles three variables, as `a, b, c = c, a, b` does,
and now and then a `?` asks for one of them. The model is a linear recurrence, the delta rule. It
learns from programs of up to 16 commands, and is then asked about 32. With beta up to 2 a step can
have the eigenvalue -1, and so it can exchange two values. With beta up to 1 it cannot.

    python -m experiments.one_page            beta up to 2
    python -m experiments.one_page 1          beta up to 1
    python -m experiments.one_page 2 7        beta up to 2, seed 7

Next: data.py. The five files tell how it goes from 16 commands to 256, in parallel, and why.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = [*"abc=?123"]  # names, the sign of a command, that of a question, values


def traces(batch, length, spacing):
    """Random programs, `123=cab=bac?b1` and so on: tokens [B, T], and the places of the answers."""
    state = torch.arange(3).expand(batch, 3)  # variable i holds value i
    tokens = [state + 5]
    answers = []
    for line in range(1, length + 1):
        command = torch.rand(batch, 3).argsort(1)
        state = state.gather(1, command)  # new[i] = old[command[i]]
        tokens += [torch.full((batch, 1), 3), command]
        if line % spacing == 0:
            asked = torch.randint(3, (batch, 1))
            tokens += [torch.full((batch, 1), 4), asked, state.gather(1, asked) + 5]
            answers.append(3 + 4 * line + 3 * (line // spacing) - 1)
    return torch.cat(tokens, 1), torch.tensor(answers)


class LinearRNN(nn.Module):
    """Embedding, a convolution, the delta rule in H heads, and an MLP that reads the answer."""

    def __init__(self, beta_max, D=32, H=2):
        super().__init__()
        self.beta_max = beta_max
        self.H = H
        self.embedding = nn.Embedding(len(VOCAB), D)
        self.convolution = nn.Conv1d(D, D, 6)  # so that a name knows its place in the command
        self.project = nn.Linear(D, 3 * D + 2 * H)
        self.read_out = nn.Sequential(nn.RMSNorm(D), nn.Linear(D, 2 * D), nn.GELU(),
                                      nn.Linear(2 * D, len(VOCAB)))

    def forward(self, tokens):
        x = self.embedding(tokens)  # [B, T, D]
        x = x + F.gelu(self.convolution(F.pad(x.mT, (5, 0))).mT)

        q, k, v, strengths = self.project(x).split([x.shape[-1]] * 3 + [2 * self.H], -1)
        q, k, v = [part.unflatten(-1, (self.H, -1)) for part in (q, k, v)]  # [B, T, H, K]
        beta, gamma = F.hardsigmoid(strengths).unsqueeze(-1).chunk(2, -2)  # [B, T, H, 1]
        q, k, v = F.normalize(q, dim=-1), F.normalize(k, dim=-1), gamma * v
        b = self.beta_max * beta * k

        S = x.new_zeros(*k[:, 0].shape, v.shape[-1])  # [B, H, K, V], what is stored under each key
        read = []
        for t in range(tokens.shape[1]):
            r = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)  # what S has wrong under k
            S = S + torch.einsum("bhk,bhv->bhkv", b[:, t], r)  # (I - beta k k^T) S + beta k v^T
            read.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
        return self.read_out(x + torch.stack(read, 1).flatten(2))


def train(model, steps=400, peak=5e-3, silent=False):
    """Answers of fresh programs, short ones first: two commands only ask what a command does."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak)
    for step in range(steps):
        length, spacing = [(2, 1), (2, 1), (8, 2), (16, 4)][4 * step // steps]
        tokens, answers = traces(16, length, spacing)
        logits = model(tokens[:, :-1])[:, answers - 1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, answers].flatten())

        optimizer.param_groups[0]["lr"] = peak * min(1.0, 3 * (1 - step / steps))  # falls to 0
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # no single batch may throw it far away
        optimizer.step()
        if step % 50 == 49 and not silent:
            right = (logits.argmax(-1) == tokens[:, answers]).float().mean()
            print(f"step {step + 1}: {length} commands, loss {loss:.3f}, right {right:.0%}",
                  flush=True)


@torch.no_grad()
def share_right(model, length, spacing):
    """How many answers are right in 256 fresh programs."""
    tokens, answers = traces(256, length, spacing)
    said = model(tokens[:, :-1])[:, answers - 1].argmax(-1)
    return (said == tokens[:, answers]).float().mean().item()


def main(argv):
    beta_max = float(argv[0]) if argv else 2.0
    torch.manual_seed(int(argv[1]) if argv[1:] else 0)
    torch.set_num_threads(1)  # the tensors are small: a second thread would mostly wait

    model = LinearRNN(beta_max)
    train(model)
    print(f"programs of 32 commands, twice as long, a question after every 8: right "
          f"{share_right(model, 32, 8):.1%} with beta up to {beta_max:g}; a guess has 33.3%")


if __name__ == "__main__":
    main(sys.argv[1:])
