"""Spelling of a text with a recogniser's labels: their case and their Unicode normal form."""

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

APOSTROPHES = "'\u2019\u2018\u201b\u02bb\u02bc`\u00b4\u2032\uff07\u05f3"
"""The characters that are written as apostrophes."""
HYPHENS = "-\u2010\u2011"
"""The characters that are written as hyphens."""
_DOTLESS_I = "\N{LATIN SMALL LETTER DOTLESS I}"
_DOTTED_I = "i\N{COMBINING DOT ABOVE}"
"""What `str.lower` makes of İ."""
SIGMA, FINAL_SIGMA = "\N{GREEK SMALL LETTER SIGMA}", "\N{GREEK SMALL LETTER FINAL SIGMA}"


@lru_cache(4)
def speller(labels: tuple[str, ...]) -> Callable[[str], str]:
    """Return the function that spells texts with the labels.

    It writes them in the labels' case, if they have only one, with characters composed as theirs are. All apostrophes
    and hyphens become the labels' own ones. Apostrophes go if there is none, and so do invisible characters that are no
    labels. Other characters that the labels cannot spell stay.

    Args:
        labels: one character each.
    """
    known, marks, apart = frozenset(labels), _own_marks(labels), _apart(labels)
    lower, upper = choose_cases(labels)
    change_case: Callable[[str], str] = str
    if not any(map(str.isupper, labels)):
        change_case = lower
    elif not any(map(str.islower, labels)):
        change_case = upper

    def spell(text: str) -> str:
        text = unicodedata.normalize("NFC", text).translate(marks)
        # Soft hyphens and direction marks are removed; a zero-width space separates words, as in Khmer.
        for unseen in (c for c in set(text) - known if unicodedata.category(c) == "Cf"):
            text = text.replace(unseen, " " if unseen == "\u200b" else "")
        text = unicodedata.normalize("NFC", change_case(text))  # `upper` decomposes some characters
        for composed, label in apart.items():
            text = text.replace(composed, label)
        spelled = {c: next(filter(known.issuperset, _take_apart(c)), c) for c in set(text) - known}
        return "".join(spelled.get(c, c) for c in text)

    return spell


def choose_cases(labels: Sequence[str]) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Return the functions for lower and upper case, Python's own where the labels need no others.

    Turkish labels have two letters i, each with its own capital. A capital ß among the labels is that of ß, which is
    SS otherwise. Greek labels may have one small sigma for all places in a word.
    """
    capitals = str.maketrans({"ß": "ẞ"} if "ẞ" in labels else {})
    if has_one_sigma(labels):
        return lambda text: text.lower().replace(FINAL_SIGMA, SIGMA), str.upper
    if _DOTLESS_I not in labels and "İ" not in labels:
        return str.lower, (lambda text: text.translate(capitals).upper()) if capitals else str.upper
    return (
        lambda text: text.replace(_DOTTED_I, "i").replace("I", _DOTLESS_I).replace("İ", "i").lower(),
        lambda text: text.replace(_DOTTED_I, "i").replace("i", "İ").translate(capitals).upper(),
    )


def has_one_sigma(labels: Sequence[str]) -> bool:
    """Whether σ is a label and ς, which is written at the end of a word, is none."""
    return SIGMA in labels and FINAL_SIGMA not in labels


def quote(text: str) -> str:
    """Quote text for a message; combining accents are escaped, as they look like composed ones or sit on neighbours."""
    return "".join(c.encode("unicode_escape").decode() if unicodedata.combining(c) else c for c in repr(text))


def _own_marks(labels: tuple[str, ...]) -> Mapping[int, str]:
    """Map apostrophes and hyphens that are no labels to those that are."""
    apostrophe, hyphen = (next((label for label in labels if label in marks), "") for marks in (APOSTROPHES, HYPHENS))
    changes = {ord(mark): apostrophe for mark in APOSTROPHES} | {ord(mark): hyphen for mark in HYPHENS if hyphen}
    return {code: own for code, own in changes.items() if chr(code) not in labels}


def _take_apart(character: str) -> Iterator[str]:
    """Yield a character as a letter and its marks: all of them, or all but one (Vietnamese ê and a tone)."""
    apart = unicodedata.normalize("NFD", character)
    yield apart
    letter, marks = apart[0], apart[1:]
    for i, mark in enumerate(marks):
        parts = unicodedata.normalize("NFC", letter + mark) + marks[:i] + marks[i + 1 :]
        # With marks in another order, it would be another character.
        if unicodedata.normalize("NFD", parts) == apart:
            yield parts


def _apart(labels: tuple[str, ...]) -> Mapping[str, str]:
    """Map the NFC form of a label to the label, if NFC has characters that are not labels (as for some Hindi)."""
    known, normal = frozenset(labels), {unicodedata.normalize("NFC", label): label for label in labels}
    return {composed: label for composed, label in normal.items() if not known.issuperset(composed)}
