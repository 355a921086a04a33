"""Philox against its authors' test vectors, and numpy's form against the kernels' torch form."""

import numpy as np
import torch

from plimsoll.formats import codec
from plimsoll.kernels import philox as kernel_noise
from tests.support.cases import each

ONES = 0xFFFF_FFFF
# From kat_vectors of Random123 (Salmon et al., SC 2011): philox4x32 10; counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@each(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = codec.philox(tuple(np.array([word], np.uint64) for word in counter), key[0] | key[1] << 32)
    assert tuple(int(word[0]) for word in words) == expected


@each("key", [0, 1, -1, 0x0123_4567_89AB_CDEF, -(1 << 63), (1 << 63) - 1, 1 << 32, ONES])
def test_both_forms_give_the_same_words(key):
    count = 5 * 1024 + 300
    expected = kernel_noise.words(torch.tensor(key), count)
    np.testing.assert_array_equal(codec.words(key, count).astype(np.int64), expected.numpy())


def test_the_layout_is_the_one_described():
    words, key = codec.words(7, 4096), 7
    for index in (0, 255, 256, 511, 700, 1023, 1024, 3000):
        counter = (index >> 10) * 256 + (index & 255)
        block = codec.philox(tuple(np.array([word], np.uint64) for word in (counter, 0, 0, 0)), key)
        assert words[index] == block[(index >> 8) & 3][0]


def test_a_shorter_draw_is_the_start_of_a_longer_one():
    np.testing.assert_array_equal(codec.words(3, 1500), codec.words(3, 4000)[:1500])
    assert codec.words(3, 0).shape == (0,)
