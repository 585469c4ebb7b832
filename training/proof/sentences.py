"""Sentences of a small vocabulary for `carnelian-train synthesise --text`: dates and times, amounts, telephone numbers.

`python training/proof/sentences.py COUNT` prints COUNT different sentences, the same ones every time. They have about
eighty words, so that a small network can learn them from minutes of speech on one CPU.
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
    """Spell a number in words, without hyphens and commas."""
    words: str = num2words(value, to=kind)
    return words.replace("-", " ").replace(",", "")


def date(rng: random.Random) -> str:
    """Draw a date and time, such as "monday the third of may at half past two"."""
    day = number(rng.choice(range(1, 32)), "ordinal")
    minutes = rng.choice(HOURS)
    return f"{rng.choice(DAYS)} the {day} of {rng.choice(MONTHS)} at {minutes} {number(rng.randint(1, 12))}"


def amount(rng: random.Random) -> str:
    """Draw an amount, such as "two thousand and five miles"."""
    return f"{number(rng.randint(1000, 999_999))} {rng.choice(UNITS)}"


def telephone(rng: random.Random) -> str:
    """Draw a telephone number of seven digits, in words."""
    return " ".join(rng.choices(DIGITS, k=7))


def sentences(count: int) -> Iterator[str]:
    """Yield `count` different sentences, the same ones every time."""
    rng = random.Random(1)
    said: set[str] = set()
    while len(said) < count:
        sentence = rng.choice([date, amount, telephone])(rng)
        if sentence not in said:
            said.add(sentence)
            yield f"{sentence.capitalize()}."


if __name__ == "__main__":
    sys.stdout.writelines(f"{sentence}\n" for sentence in sentences(int(sys.argv[1])))
