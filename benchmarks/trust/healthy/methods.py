"""Methods of learning and families of models, by an author who had not read the rules."""

import copy
import math
from itertools import cycle

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from benchmarks.trust.registry import healthy
from benchmarks.trust.toys import Block, Transformer, batches, clusters, counting, mlp, pictures, token_loss
from benchmarks.trust.training import Training


@healthy("contrast-with-a-queue", held_back=True, learns=0.8)
def queue(run: Training) -> None:
    """A picture's view is known among 256 older ones at a temperature of 0.1; their encoder is a moving average."""
    encoder = mlp(144, 96, 32)
    slow = copy.deepcopy(encoder).requires_grad_(False)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batch = batches(pictures(classes=512, noise=0.1)[0].flatten(1))
    run.watch(encoder, optimizer)
    with torch.no_grad():
        keys = torch.cat([F.normalize(slow(batch(0)[0]), dim=1) for _ in range(8)])
    for step in range(240):
        (x,) = batch(step)
        one, other = (x + 0.8 * torch.randn_like(x) for _ in range(2))
        with run.forward():
            q = F.normalize(encoder(one).float(), dim=1)
            with torch.no_grad():
                k = F.normalize(slow(other).float(), dim=1)
            logits = torch.cat([(q * k).sum(dim=1, keepdim=True), q @ keys.T], dim=1) / 0.1
            loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        run.step(loss, optimizer)
        keys = torch.cat([keys[len(x) :], k])
        for p, mean in zip(encoder.parameters(), slow.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.02)


@healthy("annealed-divergence", held_back=True, learns=0.7)
def annealed(run: Training) -> None:
    """A variational autoencoder, summed over pixels; the weight of the divergence rises from 0 to 1 three times."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(144, 96, 16), mlp(8, 96, 144)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log = self.encoder(x).float().chunk(2, dim=1)
            return self.decoder(mean + (0.5 * log).exp() * torch.randn_like(mean)), mean, log

    model, batch = Model(), batches(pictures(noise=0.1)[0].flatten(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    run.watch(model, optimizer)
    for step in range(240):
        (x,) = batch(step)
        with run.forward():
            made, mean, log = model(x)
            apart = F.mse_loss(made.float(), x, reduction="sum") / len(x)
            divergence = 0.5 * (mean**2 + log.exp() - 1 - log).sum(dim=1).mean()
            loss = apart + min(1.0, (step % 80) / 40) * divergence
        run.step(loss, optimizer)
        run.measures.append(float(apart.detach()))


@healthy("denoiser-with-average", held_back=True, learns=0.6)
def denoiser(run: Training) -> None:
    """Pictures from noise: a small convolutional network, whose moving average draws samples every 60 steps."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.first = mlp(16, 32, 32, act=nn.SiLU), nn.Conv2d(1, 32, 3, padding=1)
            self.layers = nn.ModuleList([nn.Conv2d(32, 32, 3, padding=d, dilation=d) for d in (1, 2, 4)])
            self.norms = nn.ModuleList([nn.GroupNorm(4, 32) for _ in range(3)])
            self.last = nn.Conv2d(32, 1, 3, padding=1)
            nn.init.zeros_(self.last.weight)
            nn.init.zeros_(self.last.bias)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            angle = t[:, None] * 2.0 ** torch.arange(8)
            at, h = self.time(torch.cat([angle.sin(), angle.cos()], dim=1)), self.first(x)
            for layer, norm in zip(self.layers, self.norms, strict=True):
                h = h + layer(F.silu(norm(h) + at[:, :, None, None]))
            return self.last(F.silu(h))

    model, batch = Net(), batches(pictures(noise=0.05)[0], size=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.98))
    run.watch(model, optimizer)
    for step in range(200):
        (x,) = batch(step)
        t, noise = torch.rand(len(x)), torch.randn_like(x)
        a = (0.5 * math.pi * t)[:, None, None, None]
        with run.forward():
            loss = F.mse_loss(model(a.cos() * x + a.sin() * noise, t).float(), noise)
        run.step(loss, optimizer, clip=1.0)
        average.update_parameters(model)
        if step % 60 == 59:
            with torch.inference_mode():
                drawn = torch.randn(4, 1, 12, 12)
                for t in torch.linspace(0.98, 0.02, 8):
                    drawn = drawn - 0.1 * average(drawn, t.expand(4))


@healthy("critic-with-gradient-penalty", held_back=True, learns=0.7)
def critic(run: Training) -> None:
    """Three steps of a critic for each of the generator; its gradient's length is held near 1. Losses change sign."""
    maker, judge = mlp(4, 64, 64, 2), mlp(2, 64, 64, 1, act=lambda: nn.LeakyReLU(0.2))
    of_maker = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.9))
    of_judge = torch.optim.Adam(judge.parameters(), lr=4e-3, betas=(0.5, 0.9))
    run.watch(nn.ModuleDict({"maker": maker, "judge": judge}), [of_maker, of_judge])

    def true(count: int) -> Tensor:
        angle = torch.randint(8, (count,)) * (math.pi / 4)
        return 2 * torch.stack([angle.cos(), angle.sin()], dim=1) + 0.1 * torch.randn(count, 2)

    directions = F.normalize(torch.randn(2, 32), dim=0)
    for step in range(800):
        if step % 4 < 3:
            real = true(64)
            with run.forward():
                made = maker(torch.randn(64, 4)).float().detach()
                apart = (judge(made).float() - judge(real).float()).mean()
            mixed = torch.lerp(made, real, torch.rand(64, 1)).requires_grad_()
            (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)  # in FP32
            run.step(apart + 0.3 * ((slope.norm(dim=1) - 1) ** 2).mean(), of_judge)
        else:
            with run.forward():
                loss = -judge(maker(torch.randn(64, 4))).float().mean()
            run.step(loss, of_maker)
            with torch.no_grad():
                made, real = maker(torch.randn(512, 4)), true(512)
                run.measures.append(
                    float(((made @ directions).sort(0)[0] - (real @ directions).sort(0)[0]).abs().mean())
                )


@healthy("proximal-policy", learns=0.6)
def proximal(run: Training) -> None:
    """A point is pushed to the middle: rollouts without gradients, then four epochs of clipped ratios on them."""

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.value, self.log = (
                mlp(2, 32, 32, 1, act=nn.Tanh),
                mlp(2, 32, 1, act=nn.Tanh),
                nn.Parameter(torch.zeros(1)),
            )

        def forward(self, x: Tensor) -> tuple[torch.distributions.Normal, Tensor]:
            return torch.distributions.Normal(self.mean(x).float(), self.log.exp()), self.value(x).float().squeeze(-1)

    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-3, eps=1e-5)
    run.watch(agent, optimizer)
    for _ in range(30):
        state, seen, acted, logs, gained = 2 * torch.rand(32, 2) - 1, [], [], [], []
        with torch.no_grad(), run.forward():
            for _ in range(16):
                policy, _ = agent(state)
                action = policy.sample()
                speed = 0.8 * state[:, 1:] + 0.3 * action.clamp(-1, 1)
                seen.append(state)
                acted.append(action)
                logs.append(policy.log_prob(action).squeeze(-1))
                state = torch.cat([state[:, :1] + 0.5 * speed, speed], dim=1)
                gained.append(-state.square().sum(dim=1))
            after, back = agent(state)[1], []
            for reward in reversed(gained):
                after = reward + 0.9 * after
                back.insert(0, after)
        run.measures.append(-float(torch.stack(gained[8:]).mean()))
        x, a, old, target = torch.cat(seen), torch.cat(acted), torch.cat(logs), torch.cat(back)
        for rows in torch.cat([torch.randperm(len(x)).view(4, -1) for _ in range(3)]):
            with run.forward():
                policy, value = agent(x[rows])
                better = target[rows] - value.detach()
                better = (better - better.mean()) / (better.std() + 1e-8)
                ratio = (policy.log_prob(a[rows]).squeeze(-1) - old[rows]).exp()
                gain = torch.minimum(ratio * better, ratio.clamp(0.8, 1.2) * better).mean()
                loss = -gain + 0.5 * F.mse_loss(value, target[rows]) - 0.003 * policy.entropy().mean()
            run.step(loss, optimizer, clip=0.5)


class _Spike(torch.autograd.Function):
    """A step in the forward; in the backward the slope of a fast sigmoid."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradients[0] / (1 + 5 * x.abs()) ** 2


@healthy("spiking-neurons", held_back=True)
def spiking(run: Training) -> None:
    """Neurons that fire or do not over ten ticks: most outputs are zero, and the slope is a stand-in."""

    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = nn.Linear(16, 96), nn.Linear(96, 96), nn.Linear(96, 10)

        def forward(self, x: Tensor) -> Tensor:
            one = two = total = torch.zeros(())
            for _ in range(10):
                one = 0.8 * one + self.first(x)
                fired = _Spike.apply(one - 1.0)
                one = one - fired.detach()
                two = 0.8 * two + self.second(fired)
                again = _Spike.apply(two - 0.5)
                two = two - 0.5 * again.detach()
                total = total + self.out(again)
            return total / 10

    model, batch = Spiking(), batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 160)


@healthy("sparse-gradients", held_back=True, learns=0.8)
def sparse(run: Training) -> None:
    """Bags of words with sparse gradients: one in four of 4,000 words occurs, most of those seldom."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.EmbeddingBag(4000, 16, sparse=True), mlp(16, 32, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x)).squeeze(-1)

    model, worth = Bags(), torch.randn(1000)
    optimizers = (
        torch.optim.SparseAdam(model.words.parameters(), lr=2e-2),
        torch.optim.Adam(model.head.parameters(), lr=2e-3),
    )
    scaler = run.scaler(optimizers[1])
    run.watch(model, optimizers)
    for _ in range(300):
        x = (1000 * torch.rand(64, 12) ** 3).long()
        with run.forward():
            loss = F.binary_cross_entropy_with_logits(model(x).float(), (worth[x].sum(dim=1) > 0).float())
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(loss.detach()))


class _Modern(nn.Module):
    """A block with rotary positions, root-mean-square norms and a gated MLP, without biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 4, c // 4).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        angle = torch.arange(t)[:, None] * 0.3 ** torch.arange(c // 8)
        q, k = (
            torch.cat([one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], dim=-1).to(
                v.dtype
            )
            for one, two in (y.chunk(2, dim=-1) for y in (q, k))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        gate, value = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


@healthy("tokens-never-seen", held_back=True, learns=0.6)
def never_seen(run: Training) -> None:
    """A modern language model with 2,000 tied tokens, of which 100 occur; warm-up, a flat rate, a decay at the end."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(2000, 48)
            self.blocks, self.norm = nn.Sequential(_Modern(48), _Modern(48)), nn.RMSNorm(48)
            self.head = nn.Linear(48, 2000, bias=False)
            nn.init.normal_(self.tokens.weight, std=0.02)
            self.head.weight = self.tokens.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.blocks(self.tokens(x))))

    model, batch = Model(), batches(*counting(vocabulary=100), size=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 20, (181 - s) / 40))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        logits = model(x).float().flatten(0, 1)
        return F.cross_entropy(logits, y.flatten()) + 1e-4 * logits.logsumexp(dim=-1).square().mean()

    run.train(model, optimizer, loss, 180, scheduler=schedule, clip=1.0)


@healthy("lengths-that-grow", held_back=True)
def lengths(run: Training) -> None:
    """Sequences of 4 places at first and of 32 at last, with as many tokens a batch; some steps have one sequence."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRU(3, 48, batch_first=True), nn.Linear(48, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x)[0])

    model = Model()

    def loss(step: int) -> Tensor:
        length = 4 + 4 * (step // 40)
        count = 1 if step % 30 == 29 else 256 // length
        x = torch.randn(count, length, 3)
        # The latest first value whose second value was positive.
        y = torch.zeros(count, 1)
        kept = []
        for t in range(length):
            y = torch.where(x[:, t, 1:2] > 0, x[:, t, :1], y)
            kept.append(y)
        return F.mse_loss(model(x), torch.stack(kept, dim=1))

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 320, clip=1.0)


@healthy("sums-over-molecules", learns=0.3)
def molecules(run: Training) -> None:
    """Graphs of 3 to 20 nodes in one batch, messages added by index; an energy that grows with the nodes."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kinds, self.last = nn.Embedding(5, 32), mlp(32, 32, 1, act=nn.SiLU)
            self.messages = nn.ModuleList([mlp(64, 32, 32, act=nn.SiLU) for _ in range(3)])
            self.updates = nn.ModuleList([mlp(64, 32, 32, act=nn.SiLU) for _ in range(3)])

        def forward(self, kinds: Tensor, source: Tensor, sink: Tensor, owner: Tensor, count: int) -> Tensor:
            h = self.kinds(kinds)
            for message, update in zip(self.messages, self.updates, strict=True):
                sent = message(torch.cat([h[source], h[sink]], dim=1)).to(h.dtype)
                got = torch.zeros_like(h).index_add(0, sink, sent)
                h = h + update(torch.cat([h, got], dim=1))
            return torch.zeros(count).index_add(0, owner, self.last(h).float().squeeze(-1))

    model, own, pair = Model(), 2 * torch.randn(5) - 3, torch.randn(5, 5)

    def loss(step: int) -> Tensor:
        sizes = torch.randint(3, 21, (16,)).tolist()
        kinds, owner = torch.randint(5, (sum(sizes),)), torch.repeat_interleave(torch.arange(16), torch.tensor(sizes))
        one, other, start = [], [], 0
        for size in sizes:  # a ring with chords
            nodes = torch.arange(size)
            one += [start + nodes, start + nodes]
            other += [start + (nodes + 1) % size, start + (nodes + 2) % size]
            start += size
        source, sink = torch.cat(one + other), torch.cat(other + one)
        energy = torch.zeros(16).index_add(0, owner, own[kinds])
        energy = energy.index_add(0, owner[sink], 0.5 * pair[kinds[source], kinds[sink]])
        return F.smooth_l1_loss(model(kinds, source, sink, owner, 16), energy)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 200, clip=10.0)


@healthy("state-space", learns=0.6)
def state_space(run: Training) -> None:
    """Linear recurrences of 40 places with decays that are learned as logarithms, and gates."""

    class Layer(nn.Module):
        def __init__(self, width: int, states: int) -> None:
            super().__init__()
            self.log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))
            self.rate, self.into, self.out = nn.Linear(width, width), nn.Linear(width, states), nn.Linear(width, states)
            self.skip, self.gate, self.norm = (
                nn.Parameter(torch.ones(width)),
                nn.Linear(width, width),
                nn.LayerNorm(width),
            )
            nn.init.constant_(self.rate.bias, -2.0)

        def forward(self, x: Tensor) -> Tensor:
            u = self.norm(x)
            step = F.softplus(self.rate(u).float())[..., None]
            keep = (-self.log.exp() * step).exp()
            put = step * self.into(u).float()[:, :, None] * u.float()[..., None]
            state, seen = torch.zeros_like(keep[:, 0]), []
            for t in range(x.shape[1]):
                state = keep[:, t] * state + put[:, t]
                seen.append(state)
            y = (torch.stack(seen, dim=1) * self.out(u).float()[:, :, None]).sum(dim=-1) + self.skip * u
            return x + y * F.silu(self.gate(u))

    model = nn.Sequential(nn.Linear(2, 16), Layer(16, 8), Layer(16, 8), nn.Linear(16, 1))

    def loss(step: int) -> Tensor:
        x = torch.randn(16, 40, 2)
        y, kept = torch.zeros(16, 1), []
        for t in range(40):
            y = 0.8 * y + 0.6 * x[:, t, :1] * (x[:, t, 1:] > 0)
            kept.append(y)
        return F.mse_loss(model(x).float(), torch.stack(kept, dim=1))

    run.train(model, torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01), loss, 160, clip=1.0)


@healthy("standardised-weights")
def standardised(run: Training) -> None:
    """Convolutions whose weights are standardised before use, group norms, and a head of bounded stretch."""

    class Standardised(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            w = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
            return self._conv_forward(x, w / (w.std(dim=(1, 2, 3), keepdim=True) + 1e-5), self.bias)

    model = nn.Sequential(
        Standardised(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), Standardised(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), parametrizations.spectral_norm(nn.Linear(32 * 36, 8)),
    )  # fmt: skip
    batch = batches(*pictures(), size=24)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(2 * model(x), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True), loss, 160)


@healthy("preferences-against-a-reference", held_back=True, learns=0.5)
def preferences(run: Training) -> None:
    """A language model that was trained before learns which of two continuations is liked, from its frozen copy."""
    model, (x, y) = Transformer(), counting()
    plain = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(80):
        rows = torch.randint(len(x), (16,))
        plain.zero_grad()
        token_loss(model, x[rows], y[rows]).backward()
        plain.step()
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)

    def chance(of: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return of(x).float().log_softmax(-1).gather(-1, y[..., None]).sum(dim=(1, 2))

    stride = (y - x)[:, 0] % 32
    liked, other = (stride == 1).nonzero().squeeze(1), (stride == 3).nonzero().squeeze(1)

    def loss(step: int) -> Tensor:
        one, two = (rows[torch.randint(len(rows), (8,))] for rows in (liked, other))
        both = torch.cat([one, two])
        with torch.no_grad():
            before = chance(reference, x[both], y[both])
        gained = chance(model, x[both], y[both]) - before
        return -F.logsigmoid(0.1 * (gained[:8] - gained[8:])).mean()

    run.train(model, optimizer, loss, 120)


@healthy("recomputed-activations", held_back=True)
def recomputed(run: Training) -> None:
    """A language model whose blocks run a second time in the backward, to save memory."""

    class Model(Transformer):
        def forward(self, x: Tensor) -> Tensor:
            h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False)
            return self.head(self.norm(h))

    model, batch = Model(depth=3), batches(*counting(), size=16)

    def loss(step: int) -> Tensor:
        return token_loss(model, *batch(step))

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 160)


@healthy("exits-on-the-way", held_back=True, learns=0.6)
def exits(run: Training) -> None:
    """Each block has a head with a loss of its own; the last block is left out of every second step."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.blocks = nn.Embedding(32, 32), nn.ModuleList([Block(32, causal=True) for _ in range(3)])
            self.heads = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])

        def forward(self, x: Tensor, depth: int) -> list[Tensor]:
            h, said = self.tokens(x), []
            for block, head in list(zip(self.blocks, self.heads, strict=True))[:depth]:
                h = block(h)
                said.append(head(h))
            return said

    model, batch, depths = Model(), batches(*counting(), size=16), cycle([3, 2])

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        losses = [F.cross_entropy(logits.flatten(0, 1), y.flatten()) for logits in model(x, next(depths))]
        return torch.stack([(i + 1) * each for i, each in enumerate(losses)]).sum() / sum(range(1, len(losses) + 1))

    run.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss, 180)


@healthy("slopes-from-losses-alone", held_back=True)
def two_losses(run: Training) -> None:
    """No backward at all: 6 directions a step are tried both ways, and differences of losses are the gradient."""
    model, batch = mlp(6, 16, 4, act=nn.Tanh), batches(*clusters(6, 4, 0.4), size=64)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    run.watch(model, optimizer)
    weights = list(model.parameters())
    for step in range(200):
        x, y = batch(step)
        for p in weights:
            p.grad = torch.zeros_like(p)
        with torch.no_grad():
            total = 0.0
            for _ in range(6):
                moves = [0.03 * torch.randn_like(p) for p in weights]
                both = []
                for sign in (1, -2):  # uphill, then as far downhill of where it was
                    for p, move in zip(weights, moves, strict=True):
                        p.add_(move, alpha=sign)
                    with run.forward():
                        both.append(float(F.cross_entropy(model(x).float(), y)))
                for p, move in zip(weights, moves, strict=True):
                    p.add_(move)
                    p.grad.add_(move, alpha=(both[0] - both[1]) / (2 * 0.03**2 * 6))
                total += sum(both) / 12
        optimizer.step()
        run.losses.append(total)


@healthy("private-gradients", held_back=True, learns=0.6)
def private(run: Training) -> None:
    """Each row's gradient is cut to the length 1, and noise as long as theirs is added to the sum, for privacy."""
    model, batch = mlp(16, 32, 10), batches(*clusters(spread=0.4), size=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = run.scaler(optimizer)
    run.watch(model, optimizer)
    weights = list(model.parameters())
    for step in range(120):
        rows, classes = batch(step)
        sums, total = [torch.zeros_like(p) for p in weights], 0.0
        for x, y in zip(rows.split(1), classes.split(1), strict=True):
            optimizer.zero_grad()
            with run.forward():
                loss = F.cross_entropy(model(x).float(), y)
            scaler.scale(loss).backward()
            with torch.no_grad():
                scale = scaler.get_scale()
                length = torch.stack([p.grad.norm() for p in weights]).norm() / scale
                for p, kept in zip(weights, sums, strict=True):  # What overflowed stays so: the scaler skips the step.
                    kept.add_(p.grad / length.clamp(min=1.0))
            total += float(loss.detach()) / 10
        for p, kept in zip(weights, sums, strict=True):
            p.grad.copy_((kept + 0.3 * scale * torch.randn_like(p)) / 10)
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(total)
