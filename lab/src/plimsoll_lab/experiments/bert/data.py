"""Scores of answers: exact match and F1 over tokens, by the rules of SQuAD.

See Rajpurkar et al. 2016. F1 is the harmonic mean of precision and recall of the tokens, each counted as often as it
occurs, in any order. What SQuAD does to English before (lower case, no articles, no punctuation) is left out: to source
code these matter.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

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
        """Return a word's numbers: its own, or its longest known parts' from the front.

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
    """Words of the trained and the held-out text, and the vocabulary of the first."""

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
    """Return characters and the most frequent words, up to the vocabulary's size."""
    characters = [character for character in ALPHABET if character != " "]
    known = set(characters)
    counted = Counter(word for word in text if word not in known and len(word) <= _LONGEST)
    ranked = sorted(counted, key=lambda word: (-counted[word], word))
    return Vocabulary.of([*characters, *ranked[: size - len(SPECIAL) - len(characters)]])


LENGTH = 32  # tokens of an input
PREDICTIONS = 5  # of an input: 15 % of its tokens, as in BERT
LONGEST_ANSWER = 12  # tokens
_BEFORE = 3  # tokens in front of the context: the class's, the question, the separator
# What ends the answer to each question; an answer to the others is one word.
_ENDS = {"return": {"\n"}, "import": {"\n", "as"}, "for": {"in"}, "if": {":", "\n"}}
_NAMED = frozenset({"def", "class", "raise"})
_QUOTES = frozenset("'\"")
_NUMBER = "0"  # the question for a number
_MASKED, _KEPT = 0.8, 0.9  # of the tokens to be predicted 80 % are masked, 10 % others, 10 % as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """Masked inputs (batch, length), the places to predict, and the original tokens."""

    tokens: Tensor
    places: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """An input, and the answer's first and last token in it."""

    tokens: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Questions as a batch: tokens (batch, length), answers' two ends (batch, 2).

    `segments`: of each token whether it is the question's (0) or the context's (1).
    """

    tokens: Tensor
    segments: Tensor
    ends: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A text as numbers, with the places of its words, and of words that begin a line."""

    numbers: tuple[int, ...]
    words: tuple[str, ...]
    starts: tuple[int, ...]
    lines: tuple[int, ...]


@cache
def source(*, held_out: bool) -> Source:
    """The text that is trained on, or the one that is held out."""
    found = corpus()
    return source_of(found.held_out if held_out else found.trained, found.vocabulary)


def source_of(words: Sequence[str], vocabulary: Vocabulary) -> Source:
    """These words as numbers."""
    cut = {word: vocabulary.cut(word) for word in set(words)}
    starts = [0]
    for word in words:
        starts.append(starts[-1] + len(cut[word]))
    numbers = tuple(number for word in words for number in cut[word])
    lines = [0, *(place + 1 for place, word in enumerate(words[:-1]) if word == "\n" and words[place + 1] != "\n")]
    return Source(numbers=numbers, words=tuple(words), starts=tuple(starts), lines=tuple(lines))


def masked_batch(seed: int, step: int, size: int) -> Masked:
    """Return the step's batch: pieces of the text with 15 % of tokens to predict."""
    text = _tensor(held_out=False)
    generator = torch.Generator().manual_seed(100_003 * seed + step)
    starts = torch.randint(len(text) - LENGTH, (size, 1), generator=generator)
    tokens = text[starts + torch.arange(LENGTH)]
    places = torch.rand(size, LENGTH, generator=generator).argsort(dim=1)[:, :PREDICTIONS]
    targets = tokens.gather(1, places)
    chance = torch.rand(targets.shape, generator=generator)
    others = torch.randint(len(SPECIAL), len(corpus().vocabulary), targets.shape, generator=generator)
    shown = torch.where(chance < _MASKED, MASK, torch.where(chance < _KEPT, others, targets))
    counted_on = places + LENGTH * torch.arange(size)[:, None]
    return Masked(tokens=tokens.scatter(1, places, shown), places=counted_on.flatten(), targets=targets.flatten())


def asked_batch(seed: int, step: int, size: int) -> Asked:
    """The batch of that step: questions from anywhere in the text that is trained on."""
    asked = questions(held_out=False)
    generator = torch.Generator().manual_seed(100_019 * seed + step)
    chosen = torch.randint(len(asked), (size,), generator=generator)
    return batch_of([asked[int(number)] for number in chosen])


def batch_of(asked: Sequence[Question]) -> Asked:
    """These questions as tensors."""
    return Asked(
        tokens=torch.tensor([question.tokens for question in asked]),
        segments=(torch.arange(LENGTH) >= _BEFORE).long().repeat(len(asked), 1),
        ends=torch.tensor([[question.first, question.last] for question in asked]),
    )


@cache
def questions(*, held_out: bool) -> tuple[Question, ...]:
    """Every question that the text holds."""
    return tuple(questions_of(source(held_out=held_out)))


def questions_of(text: Source) -> Iterator[Question]:
    """Yield questions for each line that begins a piece: a thing held once each."""
    found = {place: kind for place, kind in enumerate(map(_asked_by, text.words)) if kind}
    for line in text.lines:
        yield from _asked_at(line, text, found)


def _asked_by(word: str) -> str:
    """The question that a word is the sign of; empty where there is none."""
    if word in _ENDS or word in _NAMED or word in _QUOTES:
        return word
    return _NUMBER if word.isdecimal() else ""


def _asked_at(line: int, text: Source, found: dict[int, str]) -> Iterator[Question]:
    begin = text.starts[line]
    if begin + LENGTH > text.starts[-1]:
        return
    signs: dict[str, list[int]] = {}
    for place in range(line, bisect_left(text.starts, begin + LENGTH - _BEFORE)):
        if place in found:
            signs.setdefault(found[place], []).append(place)
    answers = {kind: _answer(kind, places, text) for kind, places in signs.items()}
    asked = [_question(kind, begin, answer, text) for kind, answer in answers.items() if answer is not None]
    fitting = [question for question in asked if question.last < min(LENGTH, question.first + LONGEST_ANSWER)]
    if len(fitting) > 1:
        yield from fitting


def _question(kind: str, begin: int, answer: tuple[int, int], text: Source) -> Question:
    shown = text.numbers[begin : begin + LENGTH - _BEFORE]
    first, last = (text.starts[word] - begin + _BEFORE for word in answer)
    number = corpus().vocabulary.numbers[kind]
    return Question(tokens=(CLASS, number, SEPARATOR, *shown), first=first, last=last - 1)


def _answer(kind: str, places: list[int], text: Source) -> tuple[int, int] | None:
    """Return the answer's first word and the one after its last, or None without one."""
    place = places[0]
    if kind in _QUOTES:
        return (place + 1, places[1]) if len(places) == 2 and places[1] - place > 1 else None
    if len(places) > 1:
        return None
    if kind == _NUMBER:
        return place, place + 1
    if kind in _NAMED:
        return place + 1, place + 2
    return _until(place + 1, _ENDS[kind], text.words)


def _until(begin: int, ends: set[str], words: Sequence[str]) -> tuple[int, int] | None:
    for place in range(begin, min(begin + LONGEST_ANSWER + 1, len(words))):
        if words[place] in ends:
            return (begin, place) if place > begin else None
    return None


@cache
def _tensor(*, held_out: bool) -> Tensor:
    return torch.tensor(source(held_out=held_out).numbers)


def exact(predicted: Sequence[int], truth: Sequence[int]) -> float:
    """1 where the answer is the truth, token by token, else 0."""
    return float(tuple(predicted) == tuple(truth))


def f1(predicted: Sequence[int], truth: Sequence[int]) -> float:
    """Return the harmonic mean of precision and recall; 1 if both are empty.

    >>> round(f1([1, 2, 3], [2, 3, 4, 5]), 4)  # 2 of 3 are right, 2 of 4 were found
    0.5714
    """
    if not predicted or not truth:
        return float(not predicted and not truth)
    shared = sum((Counter(predicted) & Counter(truth)).values())
    return 2 * shared / (len(predicted) + len(truth))


def best_spans(first: Tensor, last: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    """Return answers' first and last tokens: the best spans that are not too long.

    They are spans of the context. `first` and `last` are scores (batch, length); a span's is the sum. Of equal ones the
    earliest counts; where scores are NaN, the context's first token.
    """
    length = first.shape[1]
    places = torch.arange(length)
    behind = places[None, :] - places[:, None]
    allowed = (behind >= 0) & (behind < LONGEST_ANSWER)
    context = segments.bool()
    allowed = allowed & context[:, :, None] & context[:, None, :]
    sums = (first.double()[:, :, None] + last.double()[:, None, :]).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    best = sums.masked_fill(~allowed, -torch.inf).flatten(1).argmax(dim=1)
    return best // length, best % length
