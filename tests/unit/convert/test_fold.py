"""Folded models give the converted ones' outputs, from plain weights."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plimsoll.unit.folding import fold
from tests.support.unit.models import CONVERTED, MODELS, converted

pytestmark = CONVERTED


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_the_converted_models(name: str) -> None:
    case, model = converted(name)
    args, kwargs = case.call
    with torch.no_grad():
        model.train()(*args, **kwargs)  # running statistics are no longer those of the start
        model.eval()
        folded = fold(model)
        expected, got = _tensors(model(*args, **kwargs)), _tensors(folded(*args, **kwargs))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
