"""Sequences: language models, classifiers, recurrent networks, alignments."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.registry import healthy
from benchmarks.trust.toys import Transformer, batches, counting, token_loss
from benchmarks.trust.training import Training


@healthy("language-model-pre-norm")
def pre_norm(run: Training) -> None:
    """A small language model, norms before the branches."""
    model = Transformer()
    batch = batches(*counting(), size=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.train(model, optimizer, lambda step: token_loss(model, *batch(step)), 200, clip=1.0)


@healthy("language-model-post-norm", held_back=True)
def post_norm(run: Training) -> None:
    """A small language model, norms after the sums, with a warm-up."""
    model = Transformer(post=True)
    batch = batches(*counting(), size=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, 40)
    run.train(model, optimizer, lambda step: token_loss(model, *batch(step)), 220, scheduler=scheduler)


@healthy("tied-embeddings", learns=0.75)
def tied(run: Training) -> None:
    """The head is the embedding; most rows are seen seldom."""
    model = Transformer(vocabulary=256, outputs=256)
    model.head.weight = model.tokens.weight
    nn.init.normal_(model.tokens.weight, std=0.05)
    x, y = counting()
    batch = batches(x**2 // 8 % 256, y**2 // 8 % 256, size=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.train(model, optimizer, lambda step: token_loss(model, *batch(step)), 200)


@healthy("masked-tokens", learns=0.8)
def masked(run: Training) -> None:
    """A bidirectional encoder fills in masked tokens."""
    model = Transformer(vocabulary=33, causal=False, depth=2)
    batch = batches(counting()[0], size=24)

    def loss(step: int) -> Tensor:
        (x,) = batch(step)
        hidden = torch.rand(x.shape) < 0.2
        hidden[:, 0] = True
        return F.cross_entropy(model(x.masked_fill(hidden, 32))[hidden], x[hidden])

    run.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss, 300)


@healthy("encoder-classifier", held_back=True)
def classifier(run: Training) -> None:
    """Which token a sequence holds most of."""
    model = Transformer(vocabulary=8, outputs=8, causal=False, pooled=True)

    def loss(step: int) -> Tensor:
        x = torch.randint(8, (24, 16))
        return F.cross_entropy(model(x), F.one_hot(x, 8).sum(dim=1).argmax(dim=-1))

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 200)


class Recurrent(nn.Module):
    """Tokens through a recurrent layer."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.recurrent, self.head = nn.Embedding(32, 24), kind(24, 48, batch_first=True), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every position."""
        return self.head(self.recurrent(self.embed(x))[0])


@healthy("lstm")
def lstm(run: Training) -> None:
    """A language model of one LSTM layer."""
    model = Recurrent(nn.LSTM)
    batch = batches(*counting(), size=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    run.train(model, optimizer, lambda step: token_loss(model, *batch(step)), 160, clip=1.0)


@healthy("gru-signal")
def gru(run: Training) -> None:
    """The next value of a sum of sines."""
    recurrent, head = nn.GRU(1, 32, batch_first=True), nn.Linear(32, 1)
    model = nn.ModuleDict({"recurrent": recurrent, "head": head})

    def loss(step: int) -> Tensor:
        phase, rate = torch.rand(16, 1) * 6, 0.3 + torch.rand(16, 1) * 0.5
        t = torch.arange(21)
        wave = (torch.sin(phase + rate * t) + 0.5 * torch.sin(2.1 * rate * t)).unsqueeze(-1)
        return F.mse_loss(head(recurrent(wave[:, :-1])[0]), wave[:, 1:])

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 160, clip=1.0)


@healthy("ctc", learns=0.7)
def ctc(run: Training) -> None:
    """Labels without their places, by CTC."""
    signs = torch.randn(9, 12)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 9))

    def loss(step: int) -> Tensor:
        labels = torch.randint(1, 9, (8, 4))
        frames = signs[torch.stack([labels, torch.zeros_like(labels)], dim=-1).flatten(1).repeat_interleave(2, dim=1)]
        logits = model(frames + 0.3 * torch.randn_like(frames))
        scores = logits.float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, labels, torch.full((8,), 16), torch.full((8,), 4), zero_infinity=True)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 300)


@healthy("sequence-to-sequence", held_back=True)
def seq2seq(run: Training) -> None:
    """Sequences written backwards, by an encoder and a decoder."""
    embed = nn.Embedding(12, 32)
    encoder, decoder = nn.GRU(32, 48, batch_first=True), nn.GRU(32, 48, batch_first=True)
    attend, head = nn.Linear(48, 48), nn.Linear(96, 12)
    parts = {"embed": embed, "encoder": encoder, "decoder": decoder, "attend": attend, "head": head}
    model = nn.ModuleDict(parts)

    def loss(step: int) -> Tensor:
        x = torch.randint(1, 12, (24, 6))
        y = x.flip(-1)
        states, last = encoder(embed(x))
        h, _ = decoder(embed(F.pad(y[:, :-1], (1, 0))), last)
        weights = (attend(h) @ states.transpose(1, 2)).softmax(-1)
        logits = head(torch.cat([h, weights @ states], dim=-1))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    run.train(model, torch.optim.Adam(model.parameters(), lr=6e-3), loss, 300, clip=1.0)
