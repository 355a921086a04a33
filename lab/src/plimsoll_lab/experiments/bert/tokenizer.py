"""Python source as tokens, for a small BERT: words that are frequent, and the characters of all others.

A token is a name, a number, an operator, a quotation mark or another sign, or the end of a line; blanks between tokens
are left out. The vocabulary is every character that there is, then the most frequent words of the text that is trained
on, those that are equally frequent by the alphabet. A word that is not in it is cut from its front into the longest
parts that are: in the end into characters. So every text has tokens, and nothing depends on anything but the text.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from plimsoll_lab.source_text import ALPHABET, spelled, standard_library

PAD, CLASS, SEPARATOR, MASK, UNKNOWN = range(5)
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
WORDS = 1024  # of the whole vocabulary
_LONGEST = 16  # characters of a word that is looked for
_TOKEN = re.compile(r"[A-Za-z_][A-Za-z_0-9]*|[0-9]+|\n|==|!=|<=|>=|->|:=|\*\*|//|[-+*/|&^%@]=|[^\s]")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens by number, and their numbers."""

    tokens: tuple[str, ...]
    numbers: dict[str, int]

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, word: str) -> tuple[int, ...]:
        """The numbers of a word: its own, or those of its longest known parts from the front.

        >>> found = Vocabulary.of(["a", "b", "ab"])
        >>> [found.tokens[number] for number in found.cut("abbq")]
        ['ab', 'b', '[UNK]']
        """
        parts: list[int] = []
        while word:
            end = next((end for end in range(min(len(word), _LONGEST), 1, -1) if word[:end] in self.numbers), 1)
            parts.append(self.numbers.get(word[:end], UNKNOWN))
            word = word[end:]
        return tuple(parts)

    @classmethod
    def of(cls, tokens: Sequence[str]) -> "Vocabulary":
        """The vocabulary of these tokens, behind the special ones."""
        listed = (*SPECIAL, *tokens)
        return cls(listed, {token: number for number, token in enumerate(listed)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The words of the text that is trained on and of the text that is held out, and the vocabulary of the first."""

    vocabulary: Vocabulary
    trained: tuple[str, ...]
    held_out: tuple[str, ...]


@cache
def corpus() -> Corpus:
    """Of this interpreter's standard library; made once."""
    text = standard_library()
    trained, held_out = (tuple(words(spelled(codes))) for codes in (text.trained, text.held_out))
    return Corpus(vocabulary=vocabulary_of(trained, WORDS), trained=trained, held_out=held_out)


def words(text: str) -> list[str]:
    r"""The words of a text, in order.

    >>> words("def f(a_1, b=-12):\n    return 'x y'")
    ['def', 'f', '(', 'a_1', ',', 'b', '=', '-', '12', ')', ':', '\n', 'return', "'", 'x', 'y', "'"]
    """
    return _TOKEN.findall(text)


def vocabulary_of(text: Sequence[str], size: int) -> Vocabulary:
    """The characters, and the most frequent words that fit in a vocabulary of that size."""
    characters = [character for character in ALPHABET if character != " "]
    known = set(characters)
    counted = Counter(word for word in text if word not in known and len(word) <= _LONGEST)
    ranked = sorted(counted, key=lambda word: (-counted[word], word))
    return Vocabulary.of([*characters, *ranked[: size - len(SPECIAL) - len(characters)]])
