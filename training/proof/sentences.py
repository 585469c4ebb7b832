"""Sentences of few words for `carnelian-train synthesise --text`: dates and times, amounts, telephone numbers.

`python training/proof/sentences.py COUNT` prints as many different ones, always the same. About eighty words, so that a
small network can learn them from minutes of speech on one CPU.
"""

import calendar
import random
import sys
from collections.abc import Iterator

from num2words import num2words

DAYS = [name.lower() for name in calendar.day_name]
MONTHS = [name.lower() for name in list(calendar.month_name)[1:]]
HOURS = ["half past", "quarter past", "quarter to", "ten past", "twenty to", "five to"]
UNITS = ["pounds", "dollars", "people", "miles", "minutes"]
DIGITS = [num2words(digit) for digit in range(10)]


def number(value: int, kind: str = "cardinal") -> str:
    """In words without marks."""
    words: str = num2words(value, to=kind)
    return words.replace("-", " ").replace(",", "")


def date(rng: random.Random) -> str:
    """A day and an hour."""
    day = number(rng.choice(range(1, 32)), "ordinal")
    minutes = rng.choice(HOURS)
    return f"{rng.choice(DAYS)} the {day} of {rng.choice(MONTHS)} at {minutes} {number(rng.randint(1, 12))}"


def amount(rng: random.Random) -> str:
    """A number of something."""
    return f"{number(rng.randint(1000, 999_999))} {rng.choice(UNITS)}"


def telephone(rng: random.Random) -> str:
    """Seven digits."""
    return " ".join(rng.choices(DIGITS, k=7))


def sentences(count: int) -> Iterator[str]:
    """`count` different ones."""
    rng = random.Random(1)
    said: set[str] = set()
    while len(said) < count:
        sentence = rng.choice([date, amount, telephone])(rng)
        if sentence not in said:
            said.add(sentence)
            yield f"{sentence.capitalize()}."


if __name__ == "__main__":
    sys.stdout.writelines(f"{sentence}\n" for sentence in sentences(int(sys.argv[1])))
