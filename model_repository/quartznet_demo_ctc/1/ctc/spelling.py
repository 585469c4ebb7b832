"""Text as a recogniser's labels spell it: in their case, and in the form of Unicode that they have."""

import unicodedata
from collections.abc import Sequence

_DOTLESS_I = "\N{LATIN SMALL LETTER DOTLESS I}"
_SIGMA, _FINAL_SIGMA = "\N{GREEK SMALL LETTER SIGMA}", "\N{GREEK SMALL LETTER FINAL SIGMA}"


def spell(text: str, labels: Sequence[str]) -> str:
    """Change the case of `text` where the labels have only one, and compose or take apart its characters as they are.

    Args:
        text: any.
        labels: one character each.
    """
    text = unicodedata.normalize("NFC", text)
    is_turkish = _DOTLESS_I in labels or "İ" in labels
    if not any(map(str.isupper, labels)):
        text = (text.replace("I", _DOTLESS_I).replace("İ", "i") if is_turkish else text).lower()
        if _SIGMA in labels and _FINAL_SIGMA not in labels:  # capitals that were made small have one
            text = text.replace(_FINAL_SIGMA, _SIGMA)
    elif not any(map(str.islower, labels)):
        text = (text.replace("i", "İ") if is_turkish else text).upper()
    for label in labels:  # NFC takes some letters apart, such as those of Hindi with a dot
        text = text.replace(unicodedata.normalize("NFC", label), label)
    marked = {character: unicodedata.normalize("NFD", character) for character in set(text) - set(labels)}
    return "".join(marked[c] if c in marked and set(marked[c]) <= set(labels) else c for c in text)
