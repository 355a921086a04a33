"""What travels between ranks; communication_rank.py holds what each of them asserts."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.precision.training.gradient_compression import GradientCompression, compress_gradients
from tests.support import processes

RANK = processes.SUPPORT / "precision" / "communication_rank.py"


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_mean_over_ranks_is_right_and_nothing_overflows(ranks: int, tmp_path: Path) -> None:
    processes.ranks(RANK, [(tmp_path, rank, ranks) for rank in range(ranks)])


def test_a_model_that_is_not_distributed_is_refused() -> None:
    with pytest.raises(
        ArgumentError, match="expected a DistributedDataParallel model; got Linear. Wrap the model first"
    ):
        compress_gradients(nn.Linear(2, 2))


@pytest.mark.parametrize("gradient", [torch.eye(2).to_sparse(), torch.eye(2, dtype=torch.complex64)])
def test_gradients_that_are_not_dense_and_real_are_refused(gradient: Tensor) -> None:
    class Bucket:
        def buffer(self) -> Tensor:
            return gradient

    with pytest.raises(UnsupportedTensorError, match="expected dense gradients of real numbers; got torch."):
        GradientCompression(torch.float16, None).reduce(Bucket())
