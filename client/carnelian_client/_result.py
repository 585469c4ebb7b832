"""Reads RESULT, the JSON that a server answers with: into a transcript, where it holds what it must."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from typing import Any

from ._types import Alternative, Transcript, Word

LONGEST_RESULT_S = 86_400.0
"""The latest time in a RESULT: servers take clips of 60 s, and a word of a million years would fill the memory with
cues."""
MAX_RESULT_DEPTH = 20
"""A RESULT that nests more deeply may end in a RecursionError where it is copied or printed; a word is at 3."""
# Control characters and lone surrogates: no label is one, terminals obey the first, and no file can hold the others.
_NO_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def check_result(result: Mapping[str, Any]) -> None:
    """Refuse a RESULT that does not hold what `transcript_from_result` reads, or that the formats cannot write.

    Raises:
        KeyError: a field is missing.
        TypeError: the object, `words`, `alternatives` or an item of these is of another type.
        ValueError: another field has another type, or a value that it must not have.
    """
    _check_json(result)
    if not isinstance(result["words"], list) or not isinstance(result["alternatives"], list):
        raise TypeError("words and alternatives must be lists")
    for name in ("text", "model", "version", "decoder"):
        _check_text(name, result[name])
    for word in result["words"]:
        _check_text("word", word["word"])
        if not word["word"] or " " in word["word"]:
            raise ValueError(f"word must have a character and no space, but is {word['word']!r:.80}")
        _check_number("start", word["start"], 0, LONGEST_RESULT_S)
        _check_number("end", word["end"], word["start"], LONGEST_RESULT_S)
        _check_number("confidence", word["confidence"])
    _check_number("confidence", result["confidence"])
    _check_number("duration", result["duration"], 0, LONGEST_RESULT_S)
    for reading in result["alternatives"]:
        _check_text("text", reading["text"])
        for name in ("score", "acoustic", "language", "hotwords"):
            _check_number(name, reading[name])
        _check_number("neural", reading.get("neural", 0.0))
    if type(result.get("rescored", False)) is not bool:
        raise ValueError(f"rescored must be true or false, but is {result['rescored']!r:.80}")


def _check_json(value: Any, left: int = MAX_RESULT_DEPTH) -> None:
    """Refuse, in fields that are not known here too, what Python reads as JSON but may not write as such."""
    if not left:
        raise ValueError(f"it must not nest more than {MAX_RESULT_DEPTH} deep, but does")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"numbers must be finite, but one is {value}")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_json(each, left - 1)


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or _NO_TEXT.search(value):
        raise ValueError(f"{name} must be text without control characters, but is {value!r:.80}")


def _check_number(name: str, value: Any, least: float = -sys.float_info.max, most: float = sys.float_info.max) -> None:
    if type(value) not in (int, float) or not least <= value <= most:
        raise ValueError(f"{name} must be a number from {least:g} to {most:g}, but is {value!r:.80}")


def later(result: Mapping[str, Any], start_s: float) -> dict[str, Any]:
    """Return a RESULT whose words are `start_s` later: of audio that a recording holds from there on."""
    moved = [
        {**word, "start": round(start_s + word["start"], 3), "end": round(start_s + word["end"], 3)}
        for word in result["words"]
    ]
    return {**result, "words": moved}


def transcript_from_result(result: Mapping[str, Any], request_id: str) -> Transcript:
    """Read a RESULT of the server that `check_result` lets pass."""
    return Transcript(
        text=result["text"],
        words=tuple(Word(w["word"], w["start"], w["end"], w["confidence"]) for w in result["words"]),
        confidence=result["confidence"],
        duration_s=result["duration"],
        model=result["model"],
        model_version=result["version"],
        request_id=request_id,
        decoder=result["decoder"],
        alternatives=tuple(
            Alternative(a["text"], a["score"], a["acoustic"], a["language"], a["hotwords"], a.get("neural", 0.0))
            for a in result["alternatives"]
        ),
        raw=result,
        rescored=result.get("rescored", False),
    )
