"""Normalizations, with factors for the gradients of their parameters.

The constructors are torch's, which end with `reset_parameters`.
"""

from torch import Tensor, nn

from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit.optim.parameter_kinds import tag


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` whose parameters' gradients are at unit scale."""

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero, and give them their kinds."""
        super().reset_parameters()
        tag(self, weight="norm", bias="bias")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.layer_norm`."""
        return U.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` whose weight's gradient is at unit scale."""

    def reset_parameters(self) -> None:
        """Set the weight to one, as torch does, and give it its kind."""
        super().reset_parameters()
        tag(self, weight="norm")

    def forward(self, x: Tensor) -> Tensor:
        """See `unit.functional.rms_norm`."""
        return U.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class GroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm` whose parameters' gradients are at unit scale."""

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero, and give them their kinds."""
        super().reset_parameters()
        tag(self, weight="norm", bias="bias")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.group_norm`."""
        return U.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class BatchNorm2d(nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` whose parameters' gradients are at unit scale.

    In evaluation it divides by the running deviation, so its output is at unit scale if that follows the data.
    """

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero, and give them their kinds."""
        super().reset_parameters()
        tag(self, weight="norm", bias="bias")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.batch_norm`. Buffers are counted and averaged as in torch."""
        self._check_input_dim(input)
        mean, var = self.running_mean, self.running_var
        by_batch = self.training or (mean is None and var is None)
        momentum = self._counted() if self.training else self.momentum
        if self.training and not self.track_running_stats:
            mean = var = None
        return U.batch_norm(
            input, mean, var, self.weight, self.bias, by_batch, 0.0 if momentum is None else momentum, self.eps
        )

    def _counted(self) -> float | None:
        """Count the batch, and return its share in the running statistics."""
        if not self.track_running_stats or self.num_batches_tracked is None:
            return self.momentum
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
