"""Questions about digits, whose answers can be checked, and what people have written about them.

    r31425=52413.   backwards
    s31425=12345.   sorted

The question ends with `=`, the answer with the first `.`; all questions have one length, so none
is padded. Everything is a function of the question's number: nothing is downloaded or stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

DIGITS = 5
CHARACTERS = "_.=rs0123456789"  # tokens are their places; the first fills up what is shorter
VOCAB, PAD, END = len(CHARACTERS), 0, 1
PROMPT_LENGTH = DIGITS + 2
ANSWER_LENGTH = DIGITS + 1  # with the end
LENGTH = PROMPT_LENGTH + ANSWER_LENGTH

QUESTIONS = 2 * 10**DIGITS
HELD_OUT = 1000  # nothing is trained on these
STRIDE = 7919  # a prime that does not divide QUESTIONS: walks through them as if at random
MISTAKES = 0.65  # the share of demonstrations with a wrong answer


@dataclass(frozen=True)
class Prompt:
    """A question, and its number."""

    number: int
    text: str


class Questions(Generic[T]):
    """A map-style dataset of what `make` makes of the numbers of questions: of those to train on,
    or of those that are held out."""

    def __init__(self, make: Callable[[int], T], *, held_out: bool = False) -> None:
        self._make = make
        self._first = QUESTIONS - HELD_OUT if held_out else 0
        self._count = HELD_OUT if held_out else QUESTIONS - HELD_OUT

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> T:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._make(self._first + index)


def question(number: int) -> Prompt:
    """The question of that number."""
    operation, value = divmod(number * STRIDE % QUESTIONS, 10**DIGITS)
    return Prompt(number, f"{'rs'[operation]}{value:0{DIGITS}}=")


def demonstration(number: int) -> Tensor:
    """A question with an answer by someone who makes mistakes: (LENGTH,) int64 tokens."""
    prompt = question(number)
    rng = Random(number)
    answer = solve(prompt)
    return write(prompt, damage(answer, rng) if rng.random() < MISTAKES else answer)


def preference(number: int) -> Tensor:
    """A question with two answers, the better one first: (2, LENGTH) int64 tokens."""
    prompt = question(number)
    answer = solve(prompt)
    worse = damage(answer, Random(number))
    return torch.stack([write(prompt, answer), write(prompt, worse)])


def solve(prompt: Prompt) -> str:
    """The right answer, without its end."""
    digits = prompt.text[1:-1]
    return digits[::-1] if prompt.text[0] == "r" else "".join(sorted(digits))


def damage(answer: str, rng: Random) -> str:
    """A wrong answer: with one other digit, two of them exchanged, or one left out."""
    wrong = answer
    while wrong == answer:
        digits = list(answer)
        first, second = (rng.randrange(len(digits)) for _ in range(2))
        match rng.choice(("other", "exchanged", "left out")):
            case "other":
                digits[first] = str(rng.randrange(10))
            case "exchanged":
                digits[first], digits[second] = digits[second], digits[first]
            case _:
                del digits[first]
        wrong = "".join(digits)
    return wrong


def is_right(prompt: Prompt, answer: Tensor) -> bool:
    """Whether an answer of tokens, to its end, is exactly the right one."""
    return decode(answer).rstrip(CHARACTERS[PAD]) == solve(prompt) + CHARACTERS[END]


def write(prompt: Prompt, answer: str) -> Tensor:
    """Question, answer and end, filled up: (LENGTH,) int64 tokens."""
    return encode(f"{prompt.text}{answer}{CHARACTERS[END]}".ljust(LENGTH, CHARACTERS[PAD]))


def encode(text: str) -> Tensor:
    """One int64 token for each character."""
    return torch.tensor([CHARACTERS.index(it) for it in text])


def decode(tokens: Tensor) -> str:
    """The text of one row of tokens."""
    return "".join(CHARACTERS[it] for it in tokens.tolist())
