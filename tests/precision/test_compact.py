import numpy as np
import pytest
import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.precision.weights.master_weights import MasterWeights
from plimsoll.precision.weights.stores import join, split
from tests.support.cases import each

# Lower halves at which something changes: the ends, the middle, each power of two and its neighbours.
LOW = sorted({(edge + near) & 0xFFFF for edge in [0, *(1 << n for n in range(17))] for near in (-1, 0, 1)})
HIGH = np.arange(1 << 16, dtype=np.uint32)


def bits_of(high: np.ndarray, low: int) -> np.ndarray:
    return (high << np.uint32(16)) | np.uint32(low)


def as_tensor(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.view(np.float32).copy())


def taken_apart(values: Tensor) -> tuple[Tensor, Tensor]:
    weight, low = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split(values.clone(), weight, low)
    return weight, low


def nearest_away(values: np.ndarray) -> np.ndarray:
    """The bfloat16 numbers nearest to float32 ones, ties away from zero, in float64 arithmetic."""
    x = np.abs(values.astype(np.float64))
    with np.errstate(divide="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.where(x > 0, x, 1))), -126)
    spacing = np.exp2(exponent - 7)
    rounded = np.floor(x / spacing + 0.5) * spacing
    return np.copysign(np.where(rounded >= 2.0**128, np.inf, rounded), values)


@each("low", LOW)
def test_every_upper_half_comes_back_and_the_weight_is_the_nearest(low: int) -> None:
    bits = bits_of(HIGH, low)
    values = as_tensor(bits)
    weight, kept = taken_apart(values)
    nan = np.isnan(bits.view(np.float32))
    back = join(weight, kept).numpy().view(np.uint32)
    assert np.array_equal(back[~nan], bits[~nan])
    assert np.isnan(back.view(np.float32)[nan]).all() and weight.isnan().numpy()[nan].all()
    assert np.array_equal(back[nan] >> 31, bits[nan] >> 31)
    finite = np.isfinite(bits.view(np.float32))
    expected = nearest_away(bits.view(np.float32)[finite])
    assert np.array_equal(weight.double().numpy()[finite], expected)
    assert np.array_equal(np.signbit(weight.float().numpy()[finite]), np.signbit(expected))


@each("low", [-0x8000, -0x7FFF, -5, -1, 0, 1, 5, 0x7FFE, 0x7FFF])
def test_low_bits_of_another_weight_never_change_what_the_weight_is(low: int) -> None:
    weight = torch.from_numpy(HIGH.astype(np.uint16).view(np.int16).copy()).view(torch.bfloat16)
    value = join(weight, torch.full_like(weight, low, dtype=torch.int16))
    again, kept = taken_apart(value)
    nan = weight.isnan()
    assert value.isnan()[nan].all()
    assert torch.equal(again[~nan].view(torch.int16), weight[~nan].view(torch.int16))
    assert torch.equal(join(again, kept)[~nan], value[~nan])


@each("shape", [(), (0,), (1,), (7, 5)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    weight, low = taken_apart(values)
    assert torch.equal(join(weight, low), values)


def test_any_strides() -> None:
    values = torch.randn(6, 8)
    weight = torch.empty(8, 6, dtype=torch.bfloat16).t()
    low = torch.zeros_like(weight, dtype=torch.int16)
    split(values.clone(), weight, low)
    assert low.stride() == weight.stride()
    assert torch.equal(join(weight, low), values)


# -- in a MasterWeights ------------------------------------------------------------------------------------------------


def stepped(value: Tensor, gradient: float = 1.0) -> tuple[nn.Parameter, MasterWeights]:
    weight = nn.Parameter(value.bfloat16())
    masters = MasterWeights(torch.optim.SGD([weight], lr=1e-4))
    weight.grad = torch.full_like(weight, gradient)
    masters.step()
    return weight, masters


def test_weights_and_low_bits_take_four_bytes() -> None:
    model = nn.Linear(100, 100).bfloat16()
    held = sum(p.nbytes for p in model.parameters())
    full = MasterWeights(torch.optim.SGD(nn.Linear(100, 100).bfloat16().parameters(), lr=0.1), compact=False)
    assert held + MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1)).nbytes == 4 * 10_100
    assert held + full.nbytes == 6 * 10_100


def test_weights_set_to_zero_from_outside_are_zero() -> None:
    weight, masters = stepped(torch.ones(4))
    assert (masters.master_of(weight) != 1).all()
    with torch.no_grad():
        weight.copy_(torch.tensor([0.0, -0.0, 2.0, -2.0]))
    value = masters.master_of(weight)
    assert value[:2].eq(0).all()
    assert (value[2:].abs() != 2).all() and value[2:].bfloat16().tolist() == [2, -2]
    masters.take_model_weights()
    assert masters.master_of(weight).tolist() == [0, 0, 2, -2]


def test_a_clamp_in_every_step_does_not_stop_small_updates() -> None:
    weight = nn.Parameter(torch.full((3,), 0.5, dtype=torch.bfloat16))
    masters = MasterWeights(torch.optim.SGD([weight], lr=1e-4))
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        masters.step()
        weight.data.clamp_(-0.75, 0.75)
    assert masters.master_of(weight).sub(0.49).abs().max() < 1e-5


def test_a_finite_master_above_bfloat16s_largest_value_comes_back_down() -> None:
    weight = nn.Parameter(torch.tensor([torch.finfo(torch.bfloat16).max], dtype=torch.bfloat16))
    masters = MasterWeights(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.full_like(weight, -(2.0**119))  # half the spacing of bfloat16 there: the tie rounds to Inf
    masters.step()
    assert weight.isinf().all() and masters.master_of(weight).isfinite().all()
    weight.grad = torch.full_like(weight, 1e37)
    masters.step()
    assert weight.isfinite().all()


def test_a_nan_stays_where_it_is() -> None:
    weight, masters = stepped(torch.tensor([1.0, float("nan"), -2.0]))
    assert weight.isnan().tolist() == [False, True, False]
    assert masters.master_of(weight).isnan().tolist() == [False, True, False]


def test_no_more_than_the_chunk_is_open_at_a_time() -> None:
    weights = [nn.Parameter(torch.ones(100, dtype=torch.bfloat16)) for _ in range(10)]
    weights.append(nn.Parameter(torch.ones(1000, dtype=torch.bfloat16)))
    plain = nn.Parameter(torch.ones(100_000))
    seen: list[int] = []

    class Spy(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            held = [p for group in self.param_groups for p in group["params"] if p is not plain]
            seen.append(sum(p.nbytes * p.is_contiguous() + p.grad.nbytes for p in held))
            super().step()

    inner = Spy([*weights, plain], lr=0.1)
    masters = MasterWeights(inner, chunk_bytes=1600)
    for p in (*weights, plain):
        p.grad = torch.ones_like(p)
    before = [p.untyped_storage().nbytes() for p in masters.param_groups[0]["params"][:-1]]
    masters.step()
    assert seen == [1600] * 5 + [8000]
    assert masters._scratch.nbytes == 8000
    assert before == [4] * 11 == [p.untyped_storage().nbytes() for p in masters.param_groups[0]["params"][:-1]]
    assert all(torch.equal(p, torch.full_like(p, 0.9)) for p in (*weights, plain))


def test_a_step_that_fails_leaves_weights_and_gradients_as_they_were() -> None:
    class Failing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            self.param_groups[0]["params"][0].zero_()
            raise RuntimeError("out of paper")

    weight, other = (nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    masters = MasterWeights(Failing([weight, other], lr=0.1), chunk_bytes=1)
    weight.grad = torch.ones_like(weight)
    other.grad = torch.ones_like(other)
    with pytest.raises(RuntimeError, match="out of paper"):
        masters.step()
    (master, _) = masters.param_groups[0]["params"]
    assert (weight == 1).all() and masters.master_of(weight).eq(1).all()
    assert master.grad is None and master.isnan().all()


def test_a_master_that_is_not_open_shows_nan_and_cannot_be_written() -> None:
    weight, masters = stepped(torch.ones(4))
    (master,) = masters.param_groups[0]["params"]
    assert master.shape == weight.shape and master.isnan().all()
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"), torch.no_grad():
        master.add_(1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compact_is_chosen_for_bfloat16(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    kept = MasterWeights(torch.optim.SGD([weight], lr=0.1)).nbytes
    assert kept == (16 if dtype is torch.float16 else 8)


def test_compact_with_float16_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    inner = torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(
        ArgumentError, match=r"MasterWeights: expected bfloat16 parameters .*got a parameter of torch\.f"
    ):
        MasterWeights(inner, compact=True)
    assert inner.param_groups[0]["params"][0] is weight


def test_compact_with_lbfgs_is_refused_and_none_takes_full_masters() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(ArgumentError, match="got LBFGS, which steps all parameters at once"):
        MasterWeights(torch.optim.LBFGS([weight]), compact=True)
    assert MasterWeights(torch.optim.LBFGS([weight])).nbytes == 16


def test_an_optimizer_that_counts_in_its_groups_is_refused_when_it_does() -> None:
    class Counting(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            super().step()
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1

    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    masters = MasterWeights(Counting([weight], lr=0.1))
    with pytest.raises(
        ArgumentError, match=r"groups do not change in its step.*got Counting, which changed k.*compact=F"
    ):
        masters.step()
    whole = MasterWeights(Counting([nn.Parameter(weight.detach().clone())], lr=0.1), compact=False)
    whole.param_groups[0]["params"][0].grad = torch.ones(4)
    whole.step()
    assert whole.param_groups[0]["k"] == 1
