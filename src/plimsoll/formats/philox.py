"""Philox4x32-10 in numpy: the noise of stochastic rounding, equal to the kernels'."""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFF_FFFF


# The counter layout is that of `plimsoll.kernels.philox`: value i of the flattened array takes word `(i >> 8) & 3` of
# the Philox block (Salmon et al., SC 2011) with counter `(i >> 10) * 256 + (i & 255)`. The low and high halves of the
# key are its two key words. This form exists since formats import no torch. `tests/formats/test_noise.py` compares the
# two with each other, and both with the published test vectors.
def words(key: int, count: int) -> NDArray[np.uint64]:
    """Return the words, 0 to 2**32 - 1, of values 0 to `count`, for a key mod 2**64."""
    index = np.arange(count, dtype=np.uint64)
    counter = (index >> np.uint64(10)) * np.uint64(256) + (index & np.uint64(255))
    zeros = np.zeros_like(counter)
    state = philox((counter & np.uint64(_WORD), counter >> np.uint64(32), zeros, zeros), key)
    lane = (index >> np.uint64(8)) & np.uint64(3)
    return np.select([lane == word for word in range(3)], state[:3], state[3])


def philox(counter: tuple[NDArray[np.uint64], ...], key: int) -> tuple[NDArray[np.uint64], ...]:
    """Return four output words of each counter, given as four arrays of 32-bit words."""
    c0, c1, c2, c3 = counter
    low, high = key & _WORD, (key >> 32) & _WORD
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(low)
        c2 = (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(high)
        c1, c3 = product1 & np.uint64(_WORD), product0 & np.uint64(_WORD)
        low, high = (low + _WEYL[0]) & _WORD, (high + _WEYL[1]) & _WORD
    return c0, c1, c2, c3
