"""What the oldest torch that is supported cannot do by itself, in the tests that need it."""

import pytest
import torch
from torch.torch_version import TorchVersion


def only_from(version: str, lacking: str) -> pytest.MarkDecorator:
    """Skips under a torch older than `version`, the oldest that the test is known to pass with, and says why."""
    return pytest.mark.skipif(is_older(version), reason=f"needs torch {version}, has {torch.__version__}: {lacking}")


def is_older(version: str) -> bool:
    """Whether this torch is older than that."""
    return TorchVersion(torch.__version__) < version
