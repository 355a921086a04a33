"""One call of every operation on the CUDA lists, as a user would make it: name -> function of a dtype."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (as everyone calls it)
from torch import Tensor, nn

DTYPE = torch.dtype


def made(dtype: DTYPE, *shape: int) -> Tensor:
    """Values between 0.2 and 0.8: in the domain of every function on the lists."""
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return (torch.rand(shape, generator=generator, device="cpu") * 0.6 + 0.2).to(dtype)


def unary(function: Callable[..., Any], *rest: Any) -> Callable[[DTYPE], Any]:
    return lambda dtype: function(made(dtype, 4, 4), *rest)


def binary(function: Callable[..., Any], *rest: Any) -> Callable[[DTYPE], Any]:
    return lambda dtype: function(made(dtype, 4, 4), made(dtype, 4, 4), *rest)


def of(function: Callable[..., Any], *shapes: tuple[int, ...], rest: tuple[Any, ...] = ()) -> Callable[[DTYPE], Any]:
    return lambda dtype: function(*(made(dtype, *shape) for shape in shapes), *rest)


def cell(kind: Callable[..., nn.Module]) -> Callable[[DTYPE], Any]:
    return lambda dtype: kind(4, 4).to(dtype)(made(dtype, 2, 4))


def layer(kind: type[nn.Module], **settings: Any) -> Callable[[DTYPE], Any]:
    return lambda dtype: kind(4, 4, **settings).to(dtype)(made(dtype, 3, 2, 4))[0]


M, V, B = (4, 4), (4,), (2, 4, 4)
LOW: dict[str, Callable[[DTYPE], Any]] = {
    "_convolution": lambda d: torch._convolution(
        made(d, 1, 2, 5), made(d, 3, 2, 3), None, [1], [0], [1], False, [0], 1, False, False, False, False
    ),
    "addbmm": of(torch.addbmm, M, B, B), "addmm": of(torch.addmm, M, M, M), "addmv": of(torch.addmv, V, M, V),
    "addr": of(torch.addr, M, V, V), "baddbmm": of(torch.baddbmm, B, B, B), "bmm": of(torch.bmm, B, B),
    "chain_matmul": lambda d: torch.ops.aten.chain_matmul([made(d, 4, 4)] * 3),
    "conv1d": of(F.conv1d, (1, 2, 5), (3, 2, 3)), "conv2d": of(F.conv2d, (1, 2, 5, 5), (3, 2, 3, 3)),
    "conv3d": of(F.conv3d, (1, 2, 5, 5, 5), (3, 2, 3, 3, 3)),
    "conv_tbc": of(torch.conv_tbc, (5, 1, 2), (3, 2, 4), (4,)),
    "conv_transpose1d": of(F.conv_transpose1d, (1, 2, 5), (2, 3, 3)),
    "conv_transpose2d": of(F.conv_transpose2d, (1, 2, 5, 5), (2, 3, 3, 3)),
    "conv_transpose3d": of(F.conv_transpose3d, (1, 2, 3, 3, 3), (2, 3, 2, 2, 2)),
    "convolution": of(torch.convolution, (1, 2, 5), (3, 2, 3), rest=(None, [1], [0], [1], False, [0], 1)),
    "einsum": lambda d: torch.einsum("ij,jk->ik", made(d, 4, 4), made(d, 4, 4)),
    "gru": layer(nn.GRU), "gru_cell": cell(nn.GRUCell),
    "linalg_multi_dot": lambda d: torch.linalg.multi_dot([made(d, 4, 4)] * 3),
    "linalg_vecdot": binary(torch.linalg.vecdot), "linear": of(F.linear, (2, 4), (3, 4), (3,)),
    "lstm": layer(nn.LSTM), "lstm_cell": lambda d: nn.LSTMCell(4, 4).to(d)(made(d, 2, 4))[0],
    "matmul": lambda d: made(d, 4, 4) @ made(d, 4, 4), "mm": of(torch.mm, M, M), "mv": of(torch.mv, M, V),
    "prelu": of(F.prelu, M, (1,)), "rnn_relu": layer(nn.RNN, nonlinearity="relu"),
    "rnn_relu_cell": cell(functools.partial(nn.RNNCell, nonlinearity="relu")),
    "rnn_tanh": layer(nn.RNN), "rnn_tanh_cell": cell(nn.RNNCell),
    "scaled_dot_product_attention": of(F.scaled_dot_product_attention, B, B, B),
}  # fmt: skip
NO_CPU_KERNEL = {"_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell"}


def with_classes(function: Callable[..., Any]) -> Callable[[DTYPE], Any]:
    return lambda dtype: function(made(dtype, 4, 4), torch.tensor([0, 1, 2, 3]))


def upsampled(mode: str, *shape: int, **keywords: Any) -> Callable[[DTYPE], Any]:
    return lambda dtype: F.interpolate(made(dtype, 1, 1, *shape), scale_factor=2, mode=mode, **keywords)


HIGH: dict[str, Callable[[DTYPE], Any]] = {
    "_upsample_bicubic2d_aa": upsampled("bicubic", 3, 3, antialias=True),
    "_upsample_bilinear2d_aa": upsampled("bilinear", 3, 3, antialias=True),
    "_upsample_nearest_exact1d": upsampled("nearest-exact", 3),
    "_upsample_nearest_exact2d": upsampled("nearest-exact", 3, 3),
    "_upsample_nearest_exact3d": upsampled("nearest-exact", 3, 3, 3),
    "acos": unary(torch.acos), "asin": unary(torch.asin), "cosh": unary(torch.cosh), "erfinv": unary(torch.erfinv),
    "binary_cross_entropy_with_logits": binary(F.binary_cross_entropy_with_logits),
    "cdist": binary(torch.cdist), "cosine_embedding_loss": of(F.cosine_embedding_loss, M, M, V),
    "cosine_similarity": binary(F.cosine_similarity), "cumprod": unary(torch.cumprod, 0),
    "cumsum": unary(torch.cumsum, 0), "dist": binary(torch.dist), "exp": unary(torch.exp), "expm1": unary(torch.expm1),
    "frobenius_norm": unary(torch.ops.aten.frobenius_norm, [0, 1]),
    "group_norm": lambda d: F.group_norm(made(d, 2, 4), 2),
    "hinge_embedding_loss": binary(F.hinge_embedding_loss), "huber_loss": binary(F.huber_loss),
    "kl_div": lambda d: F.kl_div(made(d, 4, 4), made(d, 4, 4), reduction="sum"), "l1_loss": binary(F.l1_loss),
    "layer_norm": unary(F.layer_norm, (4,)),
    "linalg_matrix_norm": unary(torch.linalg.matrix_norm), "linalg_vector_norm": unary(torch.linalg.vector_norm),
    "log": unary(torch.log), "log10": unary(torch.log10), "log1p": unary(torch.log1p), "log2": unary(torch.log2),
    "log_softmax": unary(F.log_softmax, -1), "logsumexp": unary(torch.logsumexp, -1),
    "margin_ranking_loss": of(F.margin_ranking_loss, V, V, V), "mse_loss": binary(F.mse_loss),
    "multi_margin_loss": with_classes(F.multi_margin_loss),
    "multilabel_margin_loss": lambda d: F.multilabel_margin_loss(made(d, 1, 4), torch.tensor([[3, 0, -1, 1]])),
    "native_layer_norm": lambda d: torch.native_layer_norm(made(d, 4, 4), [4], None, None, 1e-5)[0],
    "nll_loss": with_classes(F.nll_loss),
    "nll_loss2d": lambda d: F.nll_loss(made(d, 1, 4, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long)),
    "norm": unary(torch.ops.aten.norm, 2), "nuclear_norm": unary(torch.ops.aten.nuclear_norm),
    "pdist": unary(torch.pdist), "poisson_nll_loss": binary(F.poisson_nll_loss), "pow": unary(torch.pow, 2),
    "prod": unary(torch.prod), "reciprocal": unary(torch.reciprocal), "renorm": unary(torch.renorm, 2, 0, 1.0),
    "rms_norm": unary(F.rms_norm, (4,)), "rsqrt": unary(torch.rsqrt), "sinh": unary(torch.sinh),
    "smooth_l1_loss": binary(F.smooth_l1_loss), "soft_margin_loss": binary(F.soft_margin_loss),
    "softmax": unary(F.softmax, -1), "softplus": unary(F.softplus), "sum": unary(torch.sum), "tan": unary(torch.tan),
    "triplet_margin_loss": of(F.triplet_margin_loss, M, M, M),
    "upsample_bicubic2d": upsampled("bicubic", 3, 3), "upsample_bilinear2d": upsampled("bilinear", 3, 3),
    "upsample_linear1d": upsampled("linear", 3), "upsample_nearest1d": upsampled("nearest", 3),
    "upsample_nearest2d": upsampled("nearest", 3, 3), "upsample_nearest3d": upsampled("nearest", 3, 3, 3),
    "upsample_trilinear3d": upsampled("trilinear", 3, 3, 3),
}  # fmt: skip

# Each takes the dtypes of its first and of its other arguments.
Two = Callable[[DTYPE, DTYPE], Any]
PROMOTE: dict[str, Two] = {
    "addcdiv": lambda a, b: torch.addcdiv(made(a, 4), made(b, 4), made(b, 4)),
    "addcmul": lambda a, b: torch.addcmul(made(a, 4), made(b, 4), made(b, 4)),
    "atan2": lambda a, b: torch.atan2(made(a, 4), made(b, 4)),
    "bilinear": lambda a, b: F.bilinear(made(a, 2, 4), made(b, 2, 4), made(b, 3, 4, 4)),
    "cross": lambda a, b: torch.cross(made(a, 2, 3), made(b, 2, 3), dim=1),
    "dot": lambda a, b: torch.dot(made(a, 4), made(b, 4)),
    "grid_sampler": lambda a, b: F.grid_sample(made(a, 1, 1, 4, 4), made(b, 1, 2, 2, 2), align_corners=False),
    "index_put": lambda a, b: torch.index_put(made(a, 4), [torch.tensor([1])], made(b, 1)),
    "scatter_add": lambda a, b: torch.scatter_add(made(a, 4), 0, torch.tensor([1]), made(b, 1)),
    "tensordot": lambda a, b: torch.tensordot(made(a, 4, 4), made(b, 4, 4), dims=1),
    "vdot": lambda a, b: torch.vdot(made(a, 4), made(b, 4)),
}  # fmt: skip
