"""Normalisation of text to labels: a-z, apostrophe and space for English, or the labels of another language.

English training transcripts, synthesised sentences and references all use `to_labels`, so that numbers, abbreviations
and typographic quotes are written in the same way everywhere.
"""

import re
import unicodedata
from decimal import Decimal

from num2words import num2words

from carnelian_training.ctc.spelling import APOSTROPHES, HYPHENS, speller

LABEL_CHARACTERS = " abcdefghijklmnopqrstuvwxyz'"

ABBREVIATIONS = {
    "mr": "mister",
    "mrs": "missus",
    "dr": "doctor",
    "st": "saint",
    "messrs": "messieurs",
    "rev": "reverend",
    "capt": "captain",
    "col": "colonel",
    "gen": "general",
    "lieut": "lieutenant",
    "prof": "professor",
    "hon": "honourable",
    "esq": "esquire",
    "jr": "junior",
    "etc": "et cetera",
}
"""The spoken form of each abbreviation. Its period is required, except after `mr` and `mrs`, which are not words. `st`
without a name behind it is a street. Directly behind the _ of italics, `mr` and `mrs` stay: the packaged texts have a
few, and with another number of sentences, others would be held out."""

CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
    "€": ("euro", "euros", "cent", "cents"),
}

MAX_DIGITS = 15
"""The most digits of a number that is spelled out; a sentence with a longer one is refused."""

_APOSTROPHES = str.maketrans(dict.fromkeys(APOSTROPHES, "'"))
# A letter may follow directly only if it is a capital, as in Mr.Smith.
_ABBREVIATION = re.compile(
    rf"(?:\b(mrs?)(?![^\W_])\.?|(?<![^\W_])(?!mr)({'|'.join(ABBREVIATIONS)})\.)(?:(?![^\W_])|(?<=\.)(?=(?-i:[A-Z])))",
    flags=re.IGNORECASE,
)
_NAME = re.compile(r"(?:\s+[\"'“„«_*]*|[-\u2010])?[^\W\d_]")
# A number next to letters or other digits (A4, 5kg, 5'6, .5) is not spelled out, so the sentence is refused.
_NUMBER = re.compile(
    r"(?<![^\W_])(?<!\.)(?<!\d')(?P<currency>[$£€])?(?P<number>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)"
    r"(?:(?P<ordinal>st|nd|rd|th)|(?P<decade>s)|(?P<percent>\s?%))?"
    r"(?(currency)(?P<scale>[\s-](?:hundred|thousand|million|billion|trillion)(?![^\W_]))?)(?![^\W_]|[.']\d)",
    flags=re.IGNORECASE,
)
_NUMBERED = re.compile(r"(?:(?<=[\w,;:]\s)|(?<=\())No\.\s?(?=\d)")  # not the answer "No.", which begins a sentence
_MINUS = re.compile("(?<![^\\s(\\[\"'“‘])(?<!\\d\\s)[-\u2212](?=[$£€]?\\d)")  # noqa: RUF001
_TIME = re.compile(
    r"(?<![\w:.,])(?P<hour>[01]?\d|2[0-3]):(?P<minute>[0-5]\d)(?:\s?(?P<half>[ap]\.?m)\b|(?!\w|:\d))(?!\.\d)",
    re.IGNORECASE,
)
_RAISED = re.compile("(?=[\u00b2\u00b3\u00b9\u2070-\u209f\u2460-\u24ff])")
# What transcribers put into brackets is no speech: [noise], {uh}, *coughs*, (laughs). Prose has longer parentheses,
# (etc.), numbers, and asterisks behind words.
_TAG = re.compile(
    r"\[[^\[\]\w]*\w[^\[\]]*\]|\{[^{}\w]*\w[^{}]*\}|\*(?:(?<![^\s*]\*)[^*\w]*)?\w[^*]*\*"
    r"|\(\s*(?!(?i:etc)\.)(?=[^\s\d()]*[^\W\d_])[^\s\d()]+\s*\)"
)
_BRACKETED_NUMBER = re.compile(r"\(\s*([$£€]?\d[^\s()]*)\s*\)")
_CJK_BRACKETS = str.maketrans("（）［］【】〔〕｛｝＊", "()[][][]{}*")  # noqa: RUF001
_TELEPHONE_OR_DATE = re.compile(r"(?<!\d)(?:\d{3}-\d{3}-\d{4}|\d{4}-\d\d-\d\d)(?!\d)")
_SILENT = re.compile(r"[.,;:!?\"“”„«»()\[\]{}_*…\-\u2010-\u2015]+")
# Unicode classes these as punctuation, but they are read out as words.
_READ_OUT = frozenset("&%@#\u00a7\u066a\u2030\u2031\u0609\u060a\ufe60\ufe6a\ufe5f\ufe6b\uff06\uff05\uff20\uff03")
_QUOTE = re.compile(r"(?<![a-z])'(?=[a-z])")
_NO_LETTER_AROUND = re.compile(r"(?<![a-z])'|'(?![a-z])")
_NO_POSSESSIVE = re.compile(r"(?<![a-z])'|(?<!s)'(?![a-z])")

# Armenian puts these marks over a vowel. Catalan has a point within words (col·legi), Swedish a colon (EU:s).
_WITHIN_WORDS = re.compile(
    r"[\u055b\u055c\u055e]|(?<=[^\W\d_])\u00b7(?=[^\W\d_])|(?<=[A-Za-z\u00c0-\u024f]):(?=[A-Za-z\u00c0-\u024f])"
)
# Older texts write a Malayalam letter as three characters, the last one invisible. Unicode does not equate the two.
_CHILLUS = {f"{letter}\u0d4d\u200d": chillu for letter, chillu in zip("ണനരലളക", "ൺൻർൽൾൿ", strict=True)}

# Gershayim mark a Hebrew acronym before its last letter; most texts have quotation marks in their place.
_GERSHAYIM = re.compile("(?<=[\u05d0-\u05ea])(?:[\"\u05f4\u201d\u201c\u201e]|'')(?=[\u05d0-\u05ea])")


def spell_out(text: str) -> str:
    """Write numbers, currencies and abbreviations as they are spoken, keeping case and punctuation.

    A speech engine that reads this text says the words of `to_labels`, whatever abbreviations it knows.
    """
    text = _RAISED.sub("^", text.translate(_APOSTROPHES))  # NFKC would turn "2 squared" into 22
    text = unicodedata.normalize("NFKC", text).translate(_APOSTROPHES)
    text = _BRACKETED_NUMBER.sub(r" \1 ", text)  # the word for (12) would be taken for a tag
    text = _TELEPHONE_OR_DATE.sub(r"\g<0>^", text)  # said in several ways, so the sentence is refused
    text = _NUMBERED.sub("number ", _ABBREVIATION.sub(_spell_abbreviation, text))
    text = _MINUS.sub("minus ", _TIME.sub(_spell_time, text))
    text = _NUMBER.sub(_spell_number, text)
    return text.replace("&", " and ")


def to_labels(text: str) -> str | None:
    """Normalise text to the characters that the models are trained on.

    Returns:
        Lower-case words of `LABEL_CHARACTERS`, one space apart; None if the text has other characters
        (an accented letter, a symbol) whose sound is not known, a tag such as [noise], or no word at all.
    """
    if _tag_marks(text):
        return None
    labels = _SILENT.sub(" ", spell_out(text).lower())
    # An apostrophe belongs to a word between letters (don't) and after a plural (the boys' room). A closing single
    # quotation mark looks like the latter, so if one opens before a word, only apostrophes between letters are kept.
    stray = _NO_LETTER_AROUND if _QUOTE.search(labels) else _NO_POSSESSIVE
    labels = " ".join(stray.sub(" ", labels).split())
    if not labels or any(character not in LABEL_CHARACTERS for character in labels):
        return None
    return labels


def to_given_labels(text: str, labels: str) -> str | None:
    """Write text of any language in a recogniser's labels; numbers and abbreviations are left as they are.

    Args:
        text: any text. It gets the labels' case and Unicode form. Punctuation and invisible characters that are not
            labels are dropped, except punctuation that is read out, such as & and %: an apostrophe within a word joins
            its parts (Turkish İzmir'de, Ukrainian п'ять), as do gershayim in Hebrew, a point in Catalan and a colon in
            Swedish; other marks divide words. A hyphen that is a label stays within words alone.
        labels: the labels, one character each.

    Returns:
        Words with one space between them, or none if the space is no label; None if the text has other letters or
        symbols, a tag such as [noise] in brackets that are not labels, or no word at all.
    """
    if not _tag_marks(text) <= set(labels):
        return None
    # An apostrophe that is not a letter (in Uzbek and Hawaiian some are letters) is a quotation mark unless it stands
    # between letters.
    quotes = "".join(sorted(mark for mark in APOSTROPHES if not (mark in labels and mark.isalpha())))
    text = _GERSHAYIM.sub(next((mark for mark in '"\u05f4' if mark in labels), ""), unicodedata.normalize("NFC", text))
    text = re.sub(rf"(?<![^\W_])[{quotes}]+|[{quotes}]+(?![^\W_])|[{HYPHENS}]{{2,}}", " ", text)
    if "ŀ" not in labels.lower():
        text = text.replace("ŀ", "l·").replace("Ŀ", "L·")
    if "\u200d" not in labels:
        for written, chillu in _CHILLUS.items():
            text = text.replace(written, chillu)
    text = _WITHIN_WORDS.sub(lambda mark: mark[0] if mark[0] in labels else "", speller(tuple(labels))(text))
    outside = {mark for mark in set(text) - set(labels) - _READ_OUT if unicodedata.category(mark).startswith("P")}
    words = text.translate(dict.fromkeys(map(ord, outside), " ")).split()
    between = " " if " " in labels else ""
    text = between.join(filter(None, (word.strip(HYPHENS) for word in words)))  # a hyphen of its own is a silent dash
    return text if text and set(text) <= set(labels) else None


def _tag_marks(text: str) -> set[str]:
    """Return the marks that tags begin with."""
    return {text[tag.start()] for tag in _TAG.finditer(text.translate(_CJK_BRACKETS))}


def _spell_abbreviation(match: re.Match[str]) -> str:
    found = match[1] or match[2]
    said = ABBREVIATIONS[found.lower()]
    if said == "saint" and not _NAME.match(match.string, match.end()):
        said = "street"
    said = said.capitalize() if found[0].isupper() else said
    if match.end() == len(match.string):  # the abbreviation's period also ends the sentence
        return said + "." if match[0].endswith(".") else said
    return f"{said} " if match.string[match.end()].isalpha() else said


def _spell_time(match: re.Match[str]) -> str:
    hour, minute, half = int(match["hour"]), int(match["minute"]), match["half"]
    if not minute and not 0 < hour <= 12:
        return match[0]  # nobody says fifteen o'clock
    said = [num2words(hour)]
    if minute:
        said += ["oh"] * (minute < 10) + [num2words(minute)]
    return " ".join([*said, half] if half else said if minute else [*said, "o'clock"])


def _spell_number(match: re.Match[str]) -> str:
    digits = match["number"].replace(",", "")
    whole, _, fraction = digits.partition(".")
    if len(digits) > MAX_DIGITS or (len(whole) > 1 and whole.startswith("0")):
        return match[0]
    if match["ordinal"]:
        return str(num2words(int(Decimal(digits)), to="ordinal")) if digits.isdigit() else match[0]
    is_year = digits == match["number"] and len(digits) == 4 and 1100 <= int(Decimal(digits)) <= 1999
    amount = Decimal(digits)
    if match["decade"]:
        if match["currency"] or not re.fullmatch(r"[2-9]0|(?:1[1-9]|20)\d0", match["number"]):
            return match[0]
        return re.sub("ty$", "tie", str(num2words(int(amount), to="year"))) + "s"
    if is_year and not match["currency"] and not match["percent"]:
        return str(num2words(int(amount), to="year"))
    if match["currency"] and len(fraction) == 2 and not match["scale"]:
        return _spell_money(int(whole), int(fraction), match["currency"])
    if match["scale"]:
        fraction = fraction.rstrip("0")
    said = str(num2words(int(whole)))
    if fraction:
        said = f"{said} point {' '.join(str(num2words(int(digit))) for digit in fraction)}"
    if match["percent"]:
        return f"{said} percent"
    if match["currency"]:
        singular, plural, *_ = CURRENCIES[match["currency"]]
        if match["scale"]:
            return f"{said}{match['scale']} {plural}"
        return f"{said} {singular if amount == 1 and not fraction else plural}"
    return said


def _spell_money(units: int, hundredths: int, currency: str) -> str:
    one, more, hundredth, several = CURRENCIES[currency]
    parts = [f"{num2words(units)} {one if units == 1 else more}"] if units or not hundredths else []
    parts += [f"{num2words(hundredths)} {hundredth if hundredths == 1 else several}"] if hundredths else []
    return " and ".join(parts)
