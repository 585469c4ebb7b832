"""Text as a recogniser's labels spell it: in their case, and in the form of Unicode that they have."""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

_DOTLESS_I = "\N{LATIN SMALL LETTER DOTLESS I}"
_SIGMA, _FINAL_SIGMA = "\N{GREEK SMALL LETTER SIGMA}", "\N{GREEK SMALL LETTER FINAL SIGMA}"


def spell(text: str, labels: tuple[str, ...]) -> str:
    """Change the case of `text` where the labels have only one, and compose or take apart its characters as they are.

    Args:
        text: any.
        labels: one character each.
    """
    text = unicodedata.normalize("NFC", text)
    lower, upper = choose_cases(labels)
    if not any(map(str.isupper, labels)):
        text = lower(text)
        if _SIGMA in labels and _FINAL_SIGMA not in labels:  # capitals that were made small have one
            text = text.replace(_FINAL_SIGMA, _SIGMA)
    elif not any(map(str.islower, labels)):
        text = upper(text)
    text = unicodedata.normalize("NFC", text)  # upper() takes some apart
    for composed, label in _apart(labels).items():
        text = text.replace(composed, label)
    marked = {character: unicodedata.normalize("NFD", character) for character in set(text) - set(labels)}
    return "".join(marked[c] if c in marked and set(marked[c]) <= set(labels) else c for c in text)


def choose_cases(labels: Sequence[str]) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """What makes a text small and what makes it capital; Turkish has two letters i, each with its own capital."""
    if _DOTLESS_I not in labels and "İ" not in labels:
        return str.lower, str.upper
    return (
        lambda text: text.replace("I", _DOTLESS_I).replace("İ", "i").lower(),
        lambda text: text.replace("i", "İ").upper(),
    )


@lru_cache(4)
def _apart(labels: tuple[str, ...]) -> Mapping[str, str]:
    """NFC -> label, of labels that NFC takes apart, as letters of Hindi with a dot, or writes as what is no label."""
    normal = {unicodedata.normalize("NFC", label): label for label in labels}
    return {composed: label for composed, label in normal.items() if not set(composed) <= set(labels)}
