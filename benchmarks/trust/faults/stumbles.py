"""Stumbles over spectra, temperatures, teachers, signs and gains, by an author who had not read the rules.

With `sound` they are left out.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.trust.faults.oversights import SIDE, either
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import Transformer, batches, clusters, counting, mlp, surface, token_loss
from benchmarks.trust.training import Training

NAN = r"\bnan\b|non-?finite|\binf(inite|inity|inities)?\b"


class Spectrum(nn.Module):
    """The lowest 16 frequencies of a signal in FP16, of sums over its places or of means."""

    def __init__(self, *, mean: bool) -> None:
        super().__init__()
        self.norm = "forward" if mean else "backward"

    def forward(self, x: Tensor) -> Tensor:
        """Real parts, then imaginary ones."""
        waves = torch.fft.rfft(x.float(), norm=self.norm)[..., :16]
        parts = torch.cat([waves.real, waves.imag], dim=-1).half()
        return parts.float() * (1 if self.norm == "forward" else 1 / x.shape[-1])


@fault(
    "unnormalised-spectrum-in-fp16",
    named=rf"{either('spectrum', f'{NAN}|overflow|range|exceed|large')}|65,?504|\bfft\b"
    r"|(sums?|activations?|forward)\b[^>]*overflow|overflow[^>]*(sums?|activations?|forward)",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    precision="fp16",
    held_back=True,
)
def loud_signals(run: Training, *, sound: bool = False) -> None:
    """A Fourier transform sums 2,048 places in FP16: loud signals exceed 65,504 there, and their batches are lost."""
    model = nn.Sequential()
    model.add_module("spectrum", Spectrum(mean=sound))
    model.add_module("norm", nn.LayerNorm(32))
    model.add_module("rest", mlp(32, 64, 8))
    y = torch.randint(8, (512,))
    places = torch.arange(2048) / 2048
    x = torch.sin(2 * torch.pi * (places * (y[:, None] + 1) + torch.rand(512, 1))) + torch.randn(512, 2048)
    x += torch.where(torch.rand(512, 1) < 0.02, 40.0, 1.0)  # 40 * 2,048 is more than FP16 holds
    batch, quiet = batches(x, y, size=16), x.mean(dim=1) < 10

    def loss(step: int) -> Tensor:
        if step % 10 == 0:
            with torch.no_grad():
                run.measures.append(float(F.cross_entropy(model(x[quiet]).float(), y[quiet])))
        rows, classes = batch(step)
        return F.cross_entropy(model(rows).float(), classes)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 150)


class Recomputed(nn.Module):
    """Layers whose values the backward computes again, with the forward's dropout or with a new draw of it."""

    def __init__(self, *, same: bool) -> None:
        super().__init__()
        self.same = same
        self.layers = nn.Sequential()
        for i in range(3):
            self.layers.add_module(f"linear{i}", nn.Linear((16, 128, 128)[i], 128))
            self.layers.add_module(f"act{i}", nn.ReLU())
            self.layers.add_module(f"dropout{i}", nn.Dropout(0.5))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        if not self.training:
            return self.head(self.layers(x))
        return self.head(checkpoint(self.layers, x, use_reentrant=False, preserve_rng_state=self.same))


@fault(
    "checkpoint-draws-dropout-again",
    named=r"checkpoint|recompute|recomputing|recomputation|\bdropout|\brng\b|random (state|mask|draw|number)|preserve"
    r"|gradients?\b[^>]*(wrong|mismatch|disagree|differ from|do(es)? not (match|fit|belong|agree))",
    misleading=f"{SIDE}|learning rate|swallow|rounding|in no optimizer",
)
def drawn_again(run: Training, *, sound: bool = False) -> None:
    """Checkpointed layers do not keep the random state: the backward drops other units than the forward did."""
    model, (x, y) = Recomputed(same=sound), clusters(spread=1.0)
    batch = batches(x, y)

    def loss(step: int) -> Tensor:
        if step % 20 == 0:
            model.eval()
            with torch.no_grad():
                run.measures.append(float(F.cross_entropy(model(x), y)))
            model.train()
        rows, classes = batch(step)
        return F.cross_entropy(model(rows), classes)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 300)


class Pair(nn.Module):
    """Two encoders, and the similarities of all rows of one kind with all of the other, times a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.left, self.right = mlp(16, 64, 32), mlp(24, 64, 32)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """A square of scores."""
        left, right = F.normalize(self.left(a), dim=1), F.normalize(self.right(b), dim=1)
        return left @ right.T * self.factor


@fault(
    "multiplied-by-the-temperature",
    named=r"temperature|cosine|similarit"
    r"|(logits?|scores|outputs?)\b[^>]*(small|narrow|tiny|flat|close (to|together)|alike|uniform|bounded|spread)"
    r"|softmax[^>]*(flat|uniform|evenly|equal)|loss\b[^>]*(stuck|plateau|at chance|near chance|hardly|stops?)",
    misleading=f"{SIDE}|lower the (learning )?rate|swallow|rounding|in no optimizer",
)
def lukewarm(run: Training, *, sound: bool = False) -> None:
    """Cosines are multiplied by a temperature of 0.07, not divided by it: the softmax over them stays uniform."""
    model = Pair(1 / 0.07 if sound else 0.07)
    hidden = torch.randn(2048, 6)
    a, b = torch.tanh(hidden @ torch.randn(6, 16)), torch.tanh(hidden @ torch.randn(6, 24))
    batch = batches(a, b, size=64)

    def loss(step: int) -> Tensor:
        scores = model(*batch(step))
        run.measures.append(float((scores.argmax(dim=1) != torch.arange(64)).float().mean()))
        return F.cross_entropy(scores, torch.arange(64))

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 250)


class Sent(nn.Module):
    """A teacher's probabilities as they arrive in E4M3, multiplied before by what makes the largest 448, or by 1."""

    def __init__(self, *, scaled: bool) -> None:
        super().__init__()
        self.scaled = scaled

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        scale = 448 / x.amax(dim=1, keepdim=True) if self.scaled else 1.0
        return (x * scale).to(torch.float8_e4m3fn).float() / scale


class Distilled(nn.Module):
    """A teacher of 512 classes, what is sent of its probabilities, and a student."""

    def __init__(self, *, scaled: bool) -> None:
        super().__init__()
        self.teacher = mlp(16, 64, 512).requires_grad_(False)
        self.sent, self.student = Sent(scaled=scaled), mlp(16, 128, 512)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The student's scores, the probabilities that it is given, and those that the teacher has."""
        true = (4 * self.teacher(x)).softmax(dim=1)
        return self.student(x), self.sent(true), true


@fault(
    "teacher-sent-in-e4m3-without-a-scale",
    named=either(
        "sent|teacher|targets?|probability|probabilities", "(are|is|of them|become) (0|zeros?)|underflow|flush"
    )
    + r"|e4m3|\bfp8|float8|8[- ]bit|quanti[sz]|small (probabilities|values)\b[^>]*(lost|zero)",
    misleading="raise the loss scale|scale-low|learning rate|swallow|in no optimizer",
)
def only_the_likeliest(run: Training, *, sound: bool = False) -> None:
    """Probabilities of 512 classes are sent in E4M3, where all below 2^-10 are zero: only the likeliest are left."""
    model = Distilled(scaled=sound)
    batch = batches(torch.randn(2048, 16))

    def loss(step: int) -> Tensor:
        scores, given, true = model(*batch(step))
        guesses = scores.log_softmax(dim=1)
        run.measures.append(float(F.kl_div(guesses.detach(), true, reduction="batchmean")))
        return -(given * guesses).sum(dim=1).mean()

    run.train(model, torch.optim.Adam(model.student.parameters(), lr=3e-3), loss, 300)


class Quantized(nn.Module):
    """Values as 8-bit multiples of a step, from -127 to 127 or from 0 to 255, with the slope 1."""

    def __init__(self, *, signed: bool) -> None:
        super().__init__()
        self.lowest, self.highest = (-127, 127) if signed else (0, 255)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        step = x.detach().abs().amax() / self.highest
        return x + ((x / step).round().clamp(self.lowest, self.highest) * step - x).detach()


@fault(
    "unsigned-codes-for-signed-inputs",
    named=either(
        "stub|inputs?",
        r"negative|below (0|zero)|clamp|clip|\bcut|saturat|one[- ]sided|zeros\b"
        r"|(are|is|all|exactly|of them|become|half|%) (0|zeros?)\b",
    )
    + r"|u?int8|8[- ]bit|unsigned|quanti[sz]|zero[- ]?point",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
)
def half_of_the_line(run: Training, *, sound: bool = False) -> None:
    """Inputs around 0 are rounded to unsigned 8-bit codes, as for pixels: all that is negative becomes zero."""
    model = nn.Sequential()
    model.add_module("stub", Quantized(signed=sound))
    model.add_module("rest", mlp(8, 64, 64, 1, act=nn.Tanh))
    batch = batches(*surface(count=2048))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 300)


@fault(
    "norm-gains-drawn-like-weights",
    named=either(r"norm[12]|layer ?norms?|norm('s)? weights?|gains?", r"small|tiny|near (0|zero)|initiali[sz]|shrink")
    + r"|initiali[sz]ation|\bvanish|branch(es)?\b[^>]*(small|tiny|silent|nothing|contribut)"
    r"|(activations?|outputs?|gradients?)\b[^>]*(shrink|tiny|too small)",
    misleading=f"{SIDE}|learning rate|swallow|rounding|in no optimizer",
)
def gains_by_chance(run: Training, *, sound: bool = False) -> None:
    """A loop draws all parameters from N(0, 0.02), gains of norms too: what passes a norm is fifty times too small."""
    model, batch = Transformer(depth=3), batches(*counting())
    for p in model.parameters():
        if p.dim() > 1 or not sound:
            nn.init.normal_(p, std=0.02)

    def loss(step: int) -> Tensor:
        return token_loss(model, *batch(step))

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss, 200)
