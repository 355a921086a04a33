"""A made text: the same characters on every machine and in every version of Python."""

import random

_LETTERS = "abcdefghijklmnop"


def made_text(length: int, seed: int = 0) -> str:
    """Return a Markov chain of 16 letters, each followed by one of two: 4 bits a letter, 0.9 with what is before it.

    So a small model learns much of it in few steps. Of Python's modules, which differ from version to version, it
    learns little more than how frequent letters are.
    """
    draw = random.Random(seed).random  # Python keeps this method's numbers for a seed, and no other's
    at, found = 0, list[str]()
    for _ in range(length):
        at = (7 * at + 3 + int(2 * draw() ** 2)) % len(_LETTERS)
        found.append(_LETTERS[at])
    return "".join(found)
