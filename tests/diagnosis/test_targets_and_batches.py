"""Trainings whose targets, batches or micro-batches are wrong, each with sound ones that come near."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from plimsoll.diagnosis import View, diagnose
from plimsoll.diagnosis.finding import Finding
from plimsoll.report.verdicts.verdict_sentence import verdict
from plimsoll.runs import Run
from tests.support.cases import each
from tests.support.diagnosis.trainings import seeded_mlp, watched

# -- batches of one class


def sorted_labels(kind: str) -> Iterator[Tensor]:
    """Labels of batch after batch."""
    torch.manual_seed(0)
    for step in range(40):
        drawn = torch.randint(4, (16,))
        rare = (torch.rand(16) < 0.05).long() * drawn
        yield {
            "sorted": torch.full((16,), step // 3 % 4),
            "two classes, one after the other": torch.full((16,), step // 20),
            "nearly sorted": torch.where(torch.arange(16) == 0, drawn, step // 3 % 4),
            "drawn": drawn,
            "one frequent class": rare,
            "one class alone": torch.zeros(16, dtype=torch.long),
            "small batches": drawn[:1].expand(4),
            "left out but for a few": torch.where(torch.arange(16) < 6, torch.full((16,), step // 3 % 4), -100),
        }[kind]


def batches_of(
    kind: str, path: Path, loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
) -> list[Finding]:
    model, labels = seeded_mlp(), sorted_labels(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(_: int) -> None:
        y = next(labels)
        optimizer.zero_grad()
        loss(model(torch.randn(len(y), 8)), y).backward()
        optimizer.step()

    return [finding for finding in watched(path, model, optimizer, step, 40) if finding.rule == "batches-of-one-class"]


@each(
    ("kind", "is_found"),
    [
        ("sorted", True),
        ("two classes, one after the other", True),
        ("nearly sorted", True),
        ("drawn", False),
        ("one frequent class", False),
        ("one class alone", False),
        ("small batches", False),
        ("left out but for a few", False),
    ],
)
def test_batches_that_are_sorted_by_class(kind: str, is_found: bool, tmp_path: Path) -> None:
    found = batches_of(kind, tmp_path / kind)
    assert bool(found) is is_found
    assert all(f.evidence["classes"] >= 2 and f.severity == "warning" for f in found)


def test_actions_and_the_classes_of_several_losses_are_no_sorted_data(tmp_path: Path) -> None:
    def of_actions(scores: Tensor, y: Tensor) -> Tensor:
        return (functional.cross_entropy(scores, y, reduction="none") * torch.randn(len(y))).mean()

    def of_two(scores: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(scores, y) + functional.cross_entropy(-scores, torch.zeros_like(y))

    assert batches_of("sorted", tmp_path / "actions", of_actions) == []
    assert batches_of("one class alone", tmp_path / "two", lambda s, y: of_two(s, y + 1)) == []


# -- targets that are the inputs


class Language(nn.Module):
    """Tokens in, scores of each place out, by one layer of attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.tokens, self.head = how, nn.Embedding(9, 16), nn.Linear(16, 9)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)[:, None]
        above = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if self.how == "causal":
            y = functional.scaled_dot_product_attention(h, h, h, is_causal=True)
        elif self.how == "mask":
            y = functional.scaled_dot_product_attention(h, h, h, attn_mask=~above)
        elif self.how == "minus infinity":
            y = functional.scaled_dot_product_attention(h, h, h, attn_mask=above.float() * -1e9)
        elif self.how == "by hand":
            y = (h @ h.mT).masked_fill(above, -torch.inf).softmax(-1) @ h
        else:
            y = functional.scaled_dot_product_attention(h, h, h)
        return self.head(h + y).squeeze(1)


def language(path: Path, how: str, targets: Callable[[Tensor], Tensor], **options: int) -> list[Finding]:
    model = Language(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(_: int) -> None:
        x = torch.randint(8, (4, 16))
        optimizer.zero_grad()
        y = targets(x)
        functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), **options).backward()
        optimizer.step()

    return [f for f in watched(path, model, optimizer, step, 6) if f.rule == "targets-repeat-inputs"]


def shifted(x: Tensor) -> Tensor:
    return torch.cat([x[:, 1:], x[:, :1]], dim=1)


@each("how", ["causal", "mask", "minus infinity", "by hand"])
def test_targets_that_are_not_shifted(how: str, tmp_path: Path) -> None:
    (found,) = language(tmp_path / how, how, torch.Tensor.clone)
    assert found.evidence["cause"] == "not shifted" and found.since_step == 0
    assert language(tmp_path / f"{how}, shifted", how, shifted) == []


def test_padding_does_not_hide_targets_that_are_not_shifted(tmp_path: Path) -> None:
    def padded_inputs(x: Tensor) -> Tensor:
        x[:, -12:] = 8
        return x.clone()

    (found,) = language(tmp_path / "run", "causal", padded_inputs)
    assert found.evidence["cause"] == "not shifted"


def test_an_autoencoder_puts_out_what_it_is_given(tmp_path: Path) -> None:
    assert language(tmp_path / "all places", "all", torch.Tensor.clone) == []


# -- an attention that reads the padding alone


class Masked(nn.Module):
    """Tokens in, scores of each row out; attention reads what a mask shows."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.tokens, self.head = how, nn.Embedding(20, 16), nn.Linear(16, 4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=how != "places first")
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.before = nn.GRU(16, 16, batch_first=True)

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        h, keys = self.tokens(x), shown[:, None]
        q = h[:, None]
        if self.how in ("layer", "two layers"):
            h = self.layer(h, src_key_padding_mask=~shown)
        if self.how == "places first":
            h = self.layer(self.tokens(x.T), src_key_padding_mask=~shown).transpose(0, 1)
        elif self.how in ("weights", "two layers", "behind a recurrence"):
            h = self.before(h)[0] if self.how == "behind a recurrence" else h
            h, _ = self.attention(h, h, h, key_padding_mask=~shown, need_weights=True)
        elif self.how == "by hand":
            h = (h @ h.mT).masked_fill(~keys, -1e9).softmax(-1) @ h
        elif self.how == "scaled dot product":
            h = functional.scaled_dot_product_attention(q, q, q, attn_mask=keys[:, None]).squeeze(1)
        return self.head(h.nan_to_num().mean(dim=1))


def masked(path: Path, how: str, rows: Callable[[], tuple[Tensor, Tensor]]) -> list[Finding]:
    model = Masked(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(_: int) -> None:
        x, shown = rows()
        optimizer.zero_grad()
        functional.cross_entropy(model(x, shown), x[:, 0].long() % 4).backward()
        optimizer.step()

    return [f for f in watched(path, model, optimizer, step, 3) if f.rule == "tokens-hidden"]


def text(padding: int = 0, *, lengths: bool = True, left: bool = False) -> Tensor:
    """Rows of twelve places, padded from the seventh on at the earliest."""
    outside = torch.arange(12) >= (torch.randint(6, 12, (16, 1)) if lengths else torch.full((16, 1), 8))
    x = torch.randint(1, 20, (16, 12)).masked_fill(outside, padding)
    return x.flip(1) if left else x


HIDDEN: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "inverted": lambda: (x := text(), x == 0),
    "inverted, padded at the left": lambda: (x := text(left=True), x == 0),
    "inverted, in 32 bits": lambda: (x := text().int(), x == 0),
}
READ: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "right": lambda: (x := text(), x != 0),
    "right, padded at the left": lambda: (x := text(left=True), x != 0),
    "all": lambda: (x := text(), torch.ones_like(x, dtype=torch.bool)),
    "no padding": lambda: (x := torch.randint(1, 20, (16, 12)), x == 0),
    "one kind of token, anywhere": lambda: (x := torch.randint(0, 3, (16, 12)), x == 0),
    "a summary of four places": lambda: (x := text(lengths=False), x == 0),
    "the first token": lambda: (x := text(), (torch.arange(12) == 0).expand_as(x)),
    "two kinds": lambda: (x := (text() == 0).long(), x == 1),
}


@each("how", ["layer", "two layers", "places first", "weights", "by hand", "scaled dot product"])
def test_a_mask_of_the_other_convention_is_named(how: str, tmp_path: Path) -> None:
    most = None if how == "layer" else 1
    for name, rows in list(HIDDEN.items())[:most]:
        (found,) = masked(tmp_path / f"{how}, {name}", how, rows)
        assert found.evidence["token"] == 0 and "mask" in found.meaning and found.severity == "warning"
    for name, rows in list(READ.items())[:most]:
        assert masked(tmp_path / f"{how}, {name}", how, rows) == [], name


def test_places_that_others_were_mixed_into_may_be_read_alone(tmp_path: Path) -> None:
    assert masked(tmp_path / "run", "behind a recurrence", HIDDEN["inverted"]) == []


# -- an attention that sees the targets


class Sees(nn.Module):
    """Tokens in, scores of each place out, by an attention that is masked in some way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.tokens, self.head = how, nn.Embedding(9, 16), nn.Linear(16, 9)
        self.layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.1, batch_first=how != "places first")
        self.gru, self.router = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        return self.head(self.mixed(h).reshape(*x.shape, 16))

    def mixed(self, h: Tensor) -> Tensor:
        q, above = h[:, None], torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1)
        other = self.head.weight[:1, None].expand(len(h), 16, 16)
        attention = functional.scaled_dot_product_attention
        keys = torch.ones(1, 1, 1, 16, dtype=torch.bool)
        ways: dict[str, Callable[[], Tensor]] = {
            "layer": lambda: self.layer(h),
            "places first": lambda: self.layer(h),
            "layer, causal": lambda: self.layer(h, src_mask=above, is_causal=True),
            "weights": lambda: self.attention(h, h, h, need_weights=True)[0],
            "by hand": lambda: (q @ q.mT / 4).softmax(-1) @ q,
            "by hand, almost masked": lambda: (q @ q.mT / 4).masked_fill(above, 1e-9).softmax(-1) @ q,
            "by hand, causal": lambda: (q @ q.mT / 4 + above.float() * -1e9).softmax(-1) @ q,
            "keys masked": lambda: attention(q, q, q, attn_mask=keys),
            "mask with a wrong sign": lambda: attention(q, q, q, attn_mask=above.float() * 1e9),
            "causal": lambda: attention(q, q, q, is_causal=True),
            "one place back": lambda: attention(q, q, q, attn_mask=~above & torch.ones_like(above).triu(-1)),
            "a router": lambda: self.gru(h)[0] * self.router(h).softmax(-1),
            "values of others": lambda: attention(q, q, other[:, None]),
            "values of others, by hand": lambda: (q @ q.mT).softmax(-1) @ other[:, None],
            "an encoder of others": lambda: self.gru(h)[0] + attention(other, other, other),
        }
        return ways.get(self.how, lambda: attention(q, q, q))()


def seen(path: Path, how: str, targets: Callable[[Tensor], Tensor], *, cut: bool = False) -> list[Finding]:
    model = Sees(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(_: int) -> None:
        x = torch.randint(8, (4, 16))
        y, scores = targets(x), model(x.T).transpose(0, 1) if how == "places first" else model(x)
        scores, y = (scores[:, :-1], y[:, :-1]) if cut else (scores, y)
        optimizer.zero_grad()
        if how == "in another shape":
            functional.cross_entropy(scores.transpose(1, 2), y).backward()
        elif how == "places first":  # flat, as that model's tutorial has it
            functional.cross_entropy(scores.transpose(0, 1).flatten(0, 1), y.T.flatten()).backward()
        else:
            functional.cross_entropy(scores.flatten(0, 1), y.flatten()).backward()
        optimizer.step()

    return [f for f in watched(path, model, optimizer, step, 6) if f.rule == "targets-repeat-inputs"]


OPEN = [
    "all", "layer", "places first", "weights", "by hand", "by hand, almost masked", "keys masked", "in another shape",
    "mask with a wrong sign",
]  # fmt: skip


@each("how", OPEN)
def test_an_attention_that_sees_the_targets_is_named(how: str, tmp_path: Path) -> None:
    (found,) = seen(tmp_path / how, how, shifted)
    assert (found.severity, found.evidence["cause"], found.since_step) == ("warning", "next seen", 0)
    assert "is_causal=True" in found.advice


@each("how", ["all", "by hand"])
def test_what_a_checkpoint_has_not_kept_is_not_computed_again(how: str, tmp_path: Path) -> None:
    class Checkpointed(Sees):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            h = self.tokens(x)
            return self.head(checkpoint(self.counted, h, use_reentrant=False).reshape(*x.shape, 16))

        def counted(self, h: Tensor) -> Tensor:
            self.calls += 1
            return self.mixed(h)

    model = Checkpointed(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(_: int) -> None:
        x = torch.randint(8, (4, 16))
        optimizer.zero_grad()
        functional.cross_entropy(model(x).flatten(0, 1), shifted(x).flatten()).backward()
        optimizer.step()

    assert [f for f in watched(tmp_path / how, model, optimizer, step, 6) if f.rule == "targets-repeat-inputs"] == []
    assert model.calls == 12  # a forward of each step, and what its backward computes again


def test_targets_without_the_last_place_are_seen_too(tmp_path: Path) -> None:
    (found,) = seen(tmp_path / "run", "all", shifted, cut=True)
    assert found.evidence["cause"] == "next seen"


@each(
    "how",
    [
        "causal",
        "layer, causal",
        "by hand, causal",
        "one place back",
        "a router",
        "an encoder of others",
        "values of others",
        "values of others, by hand",
    ],
)
def test_an_attention_that_does_not_see_the_targets_is_not(how: str, tmp_path: Path) -> None:
    assert seen(tmp_path / how, how, shifted) == []


def marked(x: Tensor) -> Tensor:
    """Targets at a few places, as of masked tokens; the other places are left out."""
    return torch.where(torch.rand(x.shape) < 0.3, x.roll(-3, dims=1), -100)


@each(
    ("kind", "targets"),
    [
        ("of other places", lambda x: x.roll(2, dims=1)),
        ("masked tokens", marked),
        ("classes of the tokens", lambda x: x % 3),
        ("one token for all", lambda x: x.zero_().clone()),
        ("nearly the next", lambda x: torch.where(torch.rand(x.shape) < 0.8, shifted(x), 8)),
    ],
)
def test_other_targets_may_be_seen(kind: str, targets: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    assert [f for f in seen(tmp_path / kind, "all", targets) if f.evidence["cause"] == "next seen"] == []


def padded(x: Tensor, places: int) -> Tensor:
    """The next tokens, and token 8 at the last places, where the model is given it too."""
    x[:, -places:] = 8
    return torch.where(torch.arange(16) < 16 - places, shifted(x), 8)


def test_padding_that_counts_in_the_loss(tmp_path: Path) -> None:
    (found,) = language(tmp_path / "counted", "causal", lambda x: padded(x, 12))
    assert found.evidence["cause"] == "padding counted" and found.evidence["token"] == 8
    assert float(found.evidence["share"]) >= 0.75 and "ignore_index" in found.advice
    assert language(tmp_path / "left out", "causal", lambda x: padded(x, 12), ignore_index=8) == []
    assert language(tmp_path / "little", "causal", lambda x: padded(x, 4)) == []


# -- micro-batches, clipping, frozen norms


def accumulating(path: Path, between: str, micro: int = 4, divided: int = 4) -> list[str]:
    """Causes of what is said of a training whose gradients something happens to between micro-batches."""
    model = seeded_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(_: int) -> None:
        for part in range(micro):
            if part == 0 or between == "cleared":
                optimizer.zero_grad()
            elif between == "set to zero":
                optimizer.zero_grad(set_to_none=False)
            elif between == "moved":  # as SAM does
                optimizer.zero_grad()
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(1e-4)
            x = torch.randn(16, 8)
            (functional.cross_entropy(model(x), x[:, :4].argmax(dim=1)) / divided).backward()
        optimizer.step()

    found = watched(path, model, optimizer, step, 8)
    return [str(f.evidence["cause"]) for f in found if f.rule == "gradients-mishandled"]


@each(
    ("between", "micro", "divided", "is_found"),
    [
        ("cleared", 4, 4, True),
        ("set to zero", 4, 4, True),
        ("added", 4, 4, False),
        ("moved", 4, 4, False),
        ("cleared", 4, 1, False),  # steps of an attack, or passes whose gradients are for something else
        ("cleared", 1, 4, False),
    ],
)
def test_gradients_that_are_cleared_between_micro_batches(
    between: str, micro: int, divided: int, is_found: bool, tmp_path: Path
) -> None:
    causes = accumulating(tmp_path / f"{between} {micro} {divided}", between, micro, divided)
    assert [cause.startswith("cleared before each") for cause in causes] == [True] * is_found


def clipped(path: Path, how: str) -> list[str]:
    model = seeded_mlp()
    parameters = (p for p in model.parameters()) if how == "used up" else list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-2)

    def step(_: int) -> None:
        optimizer.zero_grad()
        if how in ("before the backward", "before and after"):
            nn.utils.clip_grad_norm_(parameters, 1.0)
        x = torch.randn(16, 8)
        functional.cross_entropy(model(x), x[:, :4].argmax(dim=1)).backward()
        if how != "before the backward":
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    found = watched(path, model, optimizer, step, 8)
    return [str(f.evidence["cause"]) for f in found if f.rule == "gradients-mishandled"]


@pytest.mark.filterwarnings("ignore:.*empty generator:UserWarning")  # newer versions of torch notice it, too
@each(
    ("how", "is_found"),
    [("used up", True), ("before the backward", True), ("as it should be", False), ("before and after", False)],
)
def test_clipping_that_gets_no_gradient(how: str, is_found: bool, tmp_path: Path) -> None:
    causes = clipped(tmp_path / how, how)
    assert [cause.startswith("not clipped") for cause in causes] == [True] * is_found


def frozen_norms(path: Path, how: str) -> list[Finding]:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
    model = nn.Sequential(trunk, nn.Linear(16, 4))
    if how != "trained":
        trunk.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def step(_: int) -> None:
        if how == "evaluated":
            trunk.eval()
        if how == "an average":  # of another model's weights
            with torch.no_grad():
                for p in trunk.parameters():
                    p.mul_(0.999)
        if how == "unfrozen by turns":
            trunk.requires_grad_(not trunk[0].weight.requires_grad)
        optimizer.zero_grad()
        x = torch.randn(16, 8)
        functional.cross_entropy(model(x), x[:, :4].argmax(dim=1)).backward()
        optimizer.step()

    found = watched(path, model, optimizer, step, 8)
    return [f for f in found if f.rule == "evaluation-mode" and "cause" in f.evidence]


@each(
    "how, places",
    [
        ("trained", []),
        ("evaluated", []),
        ("an average", []),
        ("unfrozen by turns", []),
        ("in training mode", [("0.1",)]),
    ],
)
def test_frozen_norms_that_follow_the_data(how: str, places: list[tuple[str, ...]], tmp_path: Path) -> None:
    found = frozen_norms(tmp_path / how, how)
    assert [f.where for f in found] == places and all(f.severity == "warning" for f in found)


# -- a classifier that has hardly moved


class Pairs(nn.Module):
    """Scores of all pairs: cosines, or products, times a factor."""

    def __init__(self, factor: float | nn.Parameter, *, dim: int | None = 1) -> None:
        super().__init__()
        self.factor, self.dim, self.left, self.right = factor, dim, nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x), self.right(x)
        if self.dim is not None:
            left, right = functional.normalize(left, dim=self.dim), right / right.norm(dim=self.dim, keepdim=True)
        return left @ right.T * self.factor


def of_pairs(path: Path, model: Pairs, *, both_ways: bool = False, rises: bool = False) -> list[Finding]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(at: int) -> None:
        optimizer.zero_grad()
        scores, own = model(torch.randn(64, 8)) * (at + 1.0 if rises else 1.0), torch.arange(64)
        loss = functional.cross_entropy(scores, own)
        (((loss + functional.cross_entropy(scores.T, own)) / 2) if both_ways else loss).backward()
        optimizer.step()

    return [f for f in watched(path, model, optimizer, step, 4) if f.rule == "loss-at-chance"]


def at_chance(path: Path, rate: float, times: float = 1.0) -> list[Finding]:
    torch.manual_seed(0)
    model = seeded_mlp()
    with torch.no_grad():
        model[4].weight.mul_(0.01)
        model[4].bias.zero_()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)

    def step(_: int) -> None:
        optimizer.zero_grad()
        (functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,))) * times).backward()
        optimizer.step()

    with pl.watch(model, optimizer, run=path, every=20, quiet=True):
        for at in range(225):
            step(at)
    return [finding for finding in diagnose(path) if finding.rule == "loss-at-chance"]


def test_a_loss_at_chance_says_whether_weights_have_moved(tmp_path: Path) -> None:
    for times in (1.0, 1024.0):
        (found,) = at_chance(tmp_path / f"still {times}", 1e-7, times)
        assert found.evidence["cause"] == "weights hardly move" and "learning rate" in found.advice
        assert float(found.evidence["guessing"]) == pytest.approx(times * 1.386, rel=1e-3)
    (found,) = at_chance(tmp_path / "moving", 1e-3)
    assert "cause" not in found.evidence and "labels" in found.advice
    assert "the steps are not too small" in found.advice and "learning rate" not in found.advice
    for both_ways in (False, True):
        (found,) = of_pairs(tmp_path / f"cosines {both_ways}", Pairs(0.07), both_ways=both_ways)
        assert found.evidence["factor"] == pytest.approx(0.07) and "temperature" in found.advice
        assert float(found.evidence["lowest"]) == pytest.approx(4.021, rel=1e-3)
    for name, model in (
        ("divided", Pairs(1 / 0.07)),
        ("cosines alone", Pairs(1.0)),
        ("learned", Pairs(nn.Parameter(torch.tensor(0.07)))),
        ("products", Pairs(0.07, dim=None)),
        ("over the rows", Pairs(0.07, dim=0)),
    ):
        assert of_pairs(tmp_path / name, model) == [], name
    assert of_pairs(tmp_path / "rises", Pairs(0.02), rises=True) == []


def test_a_loss_times_infinity_has_no_guessing(tmp_path: Path) -> None:
    model = seeded_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(at: int) -> None:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        (loss * (torch.inf if at == 1 else 1.0)).backward()
        if at != 1:
            optimizer.step()

    assert {finding.rule for finding in watched(tmp_path / "run", model, optimizer, step, 6)} == {"nonfinite"}
    assert not [event for event in pl.Run(tmp_path / "run").events() if event.kind == "failure"]


# -- a layer of zeros behind which the graph is cut


def test_a_layer_that_gets_no_gradient_is_not_called_dead(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16))
    nn.init.zeros_(trunk[1].weight)
    nn.init.zeros_(trunk[1].bias)
    model = nn.ModuleDict({"trunk": trunk, "head": nn.Linear(24, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(_: int) -> None:
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        h = torch.cat([x, trunk(x).detach()], dim=1)
        functional.cross_entropy(model["head"](h), x[:, :4].argmax(dim=1)).backward()
        optimizer.step()

    assert [finding.rule for finding in watched(tmp_path / "run", model, optimizer, step, 20)] == [
        "untrained-parameters"
    ]


# -- errors that are maximised


def signed(path: Path, loss: Callable[[Tensor, Tensor], Tensor], *, maximize: bool = False) -> list[Finding]:
    """A training on a loss of scores and labels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, maximize=maximize)

    def step(_: int) -> None:
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        loss(model(x), x[:, :4].argmax(dim=1)).backward()
        optimizer.step()

    return [finding for finding in watched(path, model, optimizer, step) if finding.rule == "loss-unbounded"]


def likelihood(scores: Tensor, labels: Tensor) -> Tensor:
    return scores.log_softmax(dim=1).gather(1, labels[:, None]).mean()


@each(
    "loss, is_found",
    [
        (lambda scores, labels: -functional.cross_entropy(scores, labels), True),
        (lambda scores, labels: -functional.cross_entropy(scores, labels) / 4, True),
        (lambda scores, labels: -functional.mse_loss(scores, torch.ones_like(scores)), True),
        (lambda scores, labels: functional.cross_entropy(scores, labels).neg().neg(), False),
        (lambda scores, labels: -likelihood(scores, labels), False),
        (lambda scores, labels: functional.mse_loss(scores[:, 0], labels / 4) - 10.0, False),
        (lambda scores, labels: scores.square().mean() - functional.cross_entropy(scores, labels), False),
    ],
)
def test_an_error_that_is_maximised_is_named(
    loss: Callable[[Tensor, Tensor], Tensor], is_found: bool, tmp_path: Path
) -> None:
    found = signed(tmp_path / str(len(list(tmp_path.iterdir()))), loss)
    assert [finding.evidence["cause"] for finding in found] == ["an error with a minus sign"] * is_found


def test_an_optimizer_that_maximises_turns_the_sign_round(tmp_path: Path) -> None:
    (found,) = signed(tmp_path / "error", functional.cross_entropy, maximize=True)
    assert found.evidence["cause"] == "an optimizer that maximises an error" and "maximize=True" in found.advice
    negative = lambda scores, labels: -functional.cross_entropy(scores, labels)  # noqa: E731
    assert signed(tmp_path / "negative", negative, maximize=True) == []
    assert signed(tmp_path / "likelihood", likelihood, maximize=True) == []


def test_a_training_that_maximises_until_it_breaks_is_told_of_that_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=5, quiet=True):
        for _ in range(250):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), x[:, :4].argmax(dim=1)).backward()
            optimizer.step()
    view = View(Run(tmp_path / "run"))
    findings = diagnose(view)
    assert "maximize=True" in verdict(view, findings) and "NaN or Inf" in verdict(view, findings)
    assert {finding.rule for finding in findings}.isdisjoint({"loss-spike", "rate-too-high", "optimizer-idle"})
    assert not [finding for finding in findings if "settled" in finding.meaning]
    assert [f for f in findings if f.rule == "distribution-drift" and "until they became NaN" in f.meaning]


def test_an_adversarial_backward_maximises_and_trains_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(_: int) -> None:
        x = torch.randn(32, 8, requires_grad=True)
        labels = x[:, :4].argmax(dim=1)
        (-functional.cross_entropy(model(x), labels)).backward()
        optimizer.zero_grad()
        functional.cross_entropy(model((x - 0.1 * x.grad.sign()).detach()), labels).backward()  # type: ignore[union-attr]
        optimizer.step()

    assert "loss-unbounded" not in {finding.rule for finding in watched(tmp_path / "run", model, optimizer, step)}
