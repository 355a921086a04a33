"""16-bit gradient reduction for DistributedDataParallel without overflow.

Each bucket of gradients is multiplied by a power of two before it is cast to 16 bits. The factor is chosen so that the
sum over all ranks cannot overflow, and small gradients use the remaining range:

1. Every rank finds the largest finite magnitude in its bucket. A reduction of that number gives all ranks the same one.
2. With m the exponent above it and W ranks, the scale is 2**(15 - m - ceil(log2 W)). Each addend is below 2**15 / W in
   magnitude, so every partial sum is below 2**15 in any order.
3. The addends are summed as 16-bit numbers. The sum is divided by the scale and by W in float32.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from plimsoll.checks import one_of
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.kernels.dtypes import FORMATS, SIXTEEN_BIT

Carrier = Literal["fp16", "bf16"]
_DTYPES = {FORMATS[dtype].name: dtype for dtype in SIXTEEN_BIT}
_TOP = 15  # 2**15 is the largest power of two of FP16, whose largest number is almost twice that
# With exponents beyond these the scale itself would leave float32's range.
_LOWEST, _HIGHEST = -126, 126


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Amount sent so far. Every count is the same on all ranks."""

    steps: int
    buckets: int
    bytes: int  # as 16-bit numbers, of one rank
    nonfinite_buckets: int  # with a NaN or Inf in the sum, and so in some rank's gradient
    scales: tuple[float, ...]  # of the last step, by bucket


def compress_gradients(model: DistributedDataParallel, fmt: Carrier = "fp16") -> "GradientCompression":
    """Reduce a DistributedDataParallel model's gradients over ranks in 16 bits.

    They are scaled so that they fit. Numerics. The result is torch's mean over ranks, except for roundings to `fmt`:
    one of each rank's addend, and one in each of the W - 1 additions. The error of a value is at most 2**-11 (FP16) or
    2**-8 (BF16) of the sum of its magnitudes over ranks. In FP16 it is also up to 2 W times 2**-39 of the bucket's
    largest magnitude, because smaller values underflow. All ranks get the same bits.

    A sum of gradients of at most 2**127 never overflows, so there is no fallback. A NaN or Inf of any rank reaches all
    ranks, as without compression, so scalers skip the same step everywhere. `traffic` counts such buckets.

    The cost is one pass over the bucket and a reduction of one number before the bucket's own. A model can have one
    such hook, and torch has no way to remove it.

    Args:
        model: A DistributedDataParallel model that has not run yet.
        fmt: "fp16" for more digits, "bf16" for more range; both are scaled in the same way.
    """
    if not isinstance(cast("object", model), DistributedDataParallel):
        raise ArgumentError(
            f"compress_gradients: expected a DistributedDataParallel model; got {type(model).__name__}. Wrap the model "
            "first. Sharded models reduce in MixedPrecisionPolicy's reduce_dtype."
        )
    one_of("compress_gradients", "fmt", fmt, tuple(_DTYPES))
    if any(getattr(module, "sparse", False) is True for module in model.modules()):
        raise UnsupportedTensorError(
            "compress_gradients: expected dense gradients; got a module with sparse=True. Make its gradients dense."
        )
    compression = GradientCompression(_DTYPES[fmt], cast("Any", model).process_group)
    _hook.__annotations__.clear()  # torch checks for its own bucket class, which not every build has
    model.register_comm_hook(compression, _hook)
    return compression


class GradientCompression:
    """Handle on a model with compressed gradients. `traffic` counts them."""

    def __init__(self, dtype: torch.dtype, group: Any) -> None:
        self.dtype, self.group = dtype, group
        self._buckets = self._bytes = self._steps = 0
        self._nonfinite: Tensor | None = None
        self._exponents: list[Tensor] = []

    @property
    def traffic(self) -> Traffic:
        """Amount sent so far. Reading it waits for the device."""
        return Traffic(
            steps=self._steps,
            buckets=self._buckets,
            bytes=self._bytes,
            nonfinite_buckets=0 if self._nonfinite is None else int(self._nonfinite),
            scales=tuple(2.0 ** float(exponent) for exponent in self._exponents),
        )

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start the reduction of a bucket; return the future of its mean over ranks."""
        whole: Tensor = bucket.buffer()
        if not whole.is_floating_point() or whole.layout != torch.strided:
            raise UnsupportedTensorError(
                f"compress_gradients: expected dense gradients of real numbers; got {whole.dtype}, {whole.layout}. "
                "Leave such a model's gradients as they are."
            )
        ranks = dist.get_world_size(self.group)
        exponent = self._exponent(whole, ranks)
        sent = torch.ldexp(whole.to(torch.float32), exponent).to(self.dtype)
        self._count(bucket, sent, exponent)
        future = cast("Any", dist).all_reduce(sent, group=self.group, async_op=True).get_future()

        def give_back(done: torch.futures.Future[Any]) -> Tensor:
            total = cast("list[Tensor]", done.value())[0]
            finite = total.isfinite().all()
            if self._nonfinite is None:
                self._nonfinite = torch.zeros((), dtype=torch.int64, device=total.device)
            self._nonfinite.add_(finite.logical_not())
            return whole.copy_(torch.ldexp(total.to(torch.float32).div_(ranks), -exponent))

        return future.then(give_back)

    # Scaling by powers of two is exact, except for values 39 binades or more below the bucket's largest, which
    # underflow in FP16. NaN and Inf are sent unchanged and reach every rank alike.
    def _exponent(self, whole: Tensor, ranks: int) -> Tensor:
        """Return the scale's exponent, the same on all ranks."""
        size = whole.detach().abs().to(torch.float32)
        largest = torch.where(size.isfinite(), size, 0.0).amax().reshape(1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        above = torch.frexp(largest).exponent  # the largest is below 2**above
        exponent = _TOP - math.ceil(math.log2(ranks)) - above
        return torch.where(largest > 0, exponent, 0).clamp_(_LOWEST, _HIGHEST)

    def _count(self, bucket: Any, sent: Tensor, exponent: Tensor) -> None:
        if bucket.index() == 0:
            self._steps += 1
            self._exponents.clear()
        self._exponents.append(exponent)
        self._buckets += 1
        self._bytes += sent.nbytes


def _hook(compression: GradientCompression, bucket: Any) -> Any:
    return compression.reduce(bucket)
