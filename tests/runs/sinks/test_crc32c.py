import random

import pytest

from plimsoll.runs.sinks import tensorboard as _crc32c
from plimsoll.runs.sinks.tensorboard import crc32c
from tests.support.cases import each

tensorboard = pytest.importorskip("tensorboard.compat.tensorflow_stub.pywrap_tensorflow", reason="the oracle")


def test_the_check_value_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@each("length", [*range(10), 255, 256, 257, 511, 512, 513, 5000])
def test_equals_tensorboards_own(length: int) -> None:
    for data in (bytes(length), b"\xff" * length, random.randbytes(length)):
        assert crc32c(data) == tensorboard.u32(tensorboard.crc32c(data))


def test_longer_than_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_crc32c, "_BATCH", 1024)
    data = random.randbytes(4 * 1024 + 77)
    assert crc32c(data) == tensorboard.u32(tensorboard.crc32c(data))
