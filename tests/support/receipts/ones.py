"""Products and sums of ones, whose results show the format that they were added up in."""

import torch
import torch.nn.functional as F  # noqa: N812

COUNT = 4096  # ones: from 256 on BF16 cannot add one more, from 2,048 on FP16 cannot


def ones(dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.ones(COUNT, dtype=dtype, device=device)


PRODUCTS = {
    "mm": lambda x: x[None] @ x[:, None],
    "addmm": lambda x: torch.addmm(x[:1, None], x[None], x[:, None]),
    "bmm": lambda x: x.expand(2, 3, COUNT).contiguous() @ x[:, None].expand(2, COUNT, 3).contiguous(),
    "mv": lambda x: torch.mv(x.expand(8, COUNT).contiguous(), x),
    "dot": lambda x: torch.dot(x, x),
    "convolution": lambda x: F.conv1d(x.view(1, COUNT, 1), x.view(1, COUNT, 1)),
}
SUMS = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean() * COUNT,
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, 1),
    "cumsum": lambda x: x.cumsum(0)[-1],
    "_foreach_norm": lambda x: torch._foreach_norm([x], 1)[0],
    "index_add": lambda x: x.new_zeros(1).index_add_(0, x.new_zeros(COUNT, dtype=torch.long), x),
    "embedding_dense_backward": lambda x: torch.ops.aten.embedding_dense_backward(
        x[:, None], x.new_zeros(COUNT, dtype=torch.long), 1, -1, False
    ),
}
