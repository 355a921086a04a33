"""Noise of stochastic rounding: Philox4x32-10 of a 64-bit key and an index.

The index is the value's (Salmon et al., SC 2011). Value i of the flattened tensor (row-major, blocks last for block
formats) takes word ``(i >> 8) & 3`` of the Philox block with counter ``(i >> 10) * 256 + (i & 255)``: of every 1,024
consecutive values, the first 256 take word 0 of 256 counters, the next 256 word 1 of the same ones, and so on. Words
are thus independent of thread, block and backend, and a vector unit computes 256 counters side by side without
transposing its four outputs.

The key's low and high halves are Philox's two key words; the counter's, its first two counter words.
A value with discarded fraction f of the spacing at it rounds away from zero if its word is below ``floor(f * 2**32)``.
"""

import torch

GROUP = 1024  # values that share 256 counters
LANES = 256
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)

_WORD = 0xFFFF_FFFF


def words(key: torch.Tensor, count: int, start: int = 0) -> torch.Tensor:
    """Return the words of values `start` to `start + count`: the reference.

    They are int64, 0 to 2**32 - 1, on the key's device.
    """
    index = torch.arange(start, start + count, dtype=torch.int64, device=key.device)
    counter = (index >> 10) * LANES + (index & (LANES - 1))
    state = [counter & _WORD, (counter >> 32) & _WORD, torch.zeros_like(counter), torch.zeros_like(counter)]
    low, high = key & _WORD, (key >> 32) & _WORD
    for _ in range(ROUNDS):
        # int64 products wrap, yet both halves of the 64-bit result are right after masking.
        product0, product1 = state[0] * MULTIPLIERS[0], state[2] * MULTIPLIERS[1]
        state = [
            ((product1 >> 32) & _WORD) ^ state[1] ^ low,
            product1 & _WORD,
            ((product0 >> 32) & _WORD) ^ state[3] ^ high,
            product0 & _WORD,
        ]
        low, high = (low + WEYL[0]) & _WORD, (high + WEYL[1]) & _WORD
    lane = (index >> 8) & 3
    return torch.where(lane < 2, torch.where(lane == 0, state[0], state[1]), torch.where(lane == 2, state[2], state[3]))
