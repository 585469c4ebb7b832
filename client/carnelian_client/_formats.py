"""Transcripts as text files: plain, JSON lines, SRT and WebVTT subtitles, and NIST's CTM."""

from __future__ import annotations

import html
import json
import math
import re
import unicodedata
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from ._types import Transcript, Word

MAX_LINE_CHARACTERS = 42
"""The most characters in each of the two lines of a cue, as is usual in broadcasting; a longer word has its own cue."""
MAX_CUE_S = 6.0
"""The longest time from the first to the last word of a cue, in seconds; a longer word of many letters is cut."""
MIN_CUE_S = 1.0
"""The shortest time that a cue is shown, in seconds, unless the next cue comes sooner."""
NEW_CUE_GAP_S = 0.8
"""The longest pause between two words of a cue, in seconds."""

FORMATTING = {
    code: ascii(chr(code))[1:-1] for code in (*range(0x2028, 0x202F), *range(0x2066, 0x206A), *range(0xE0000, 0xE0080))
}
"""Unicode's characters that end lines, turn text around, or are tags that nobody sees, and how they are written for
people; for `str.translate`. Scripts need the joiners and marks from U+200C to U+200F."""
CONTROLS = {code: ascii(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0))} | FORMATTING
"""The same with the control characters, which terminals obey."""
_JSON_CONTROLS = {code: json.dumps(chr(code))[1:-1] for code in CONTROLS}


def render(transcript: Transcript, kind: str, file: str) -> str:
    """Render a transcript in one of the formats, including the newline of its last line.

    Args:
        transcript: the transcript of one clip.
        kind: text (the text alone), json (the server's RESULT with `file`), ctm (one line per word), srt or vtt.
        file: the clip's name.
    """
    if kind == "text":
        return f"{transcript.text}\n"
    if kind == "json":
        return json_line({"file": file, "request_id": transcript.request_id}, transcript.raw)
    if kind == "ctm":
        name = ctm_name(file)
        return "".join(
            f"{name} 1 {word.start_s:.2f} {word.end_s - word.start_s:.2f} {word.word} {word.confidence:.2f}\n"
            for word in transcript.words
        )
    point, text = (",", "") if kind == "srt" else (".", "WEBVTT\n\n")
    cues = list(split_cues(transcript.words))
    nexts = [*(cue[0].start_s for cue in cues[1:]), math.inf]  # one too many if there is no cue
    for i, (cue, next_s) in enumerate(zip(cues, nexts, strict=False), 1):
        start_s = cue[0].start_s
        end_s = max(cue[-1].end_s, min(start_s + MIN_CUE_S, next_s))
        text += f"{i}\n" if kind == "srt" else ""
        lines = _lines(cue) if kind == "srt" else html.escape(_lines(cue), quote=False)
        text += f"{_clock(start_s, point)} --> {_clock(end_s, point)}\n{lines}\n\n"
    return text


def json_line(own: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Write our fields and a RESULT as a line of readable JSON; fields of the server come behind ours and replace none.

    Control characters that JSON may have as such are escaped; they can stand only in its strings.
    """
    return json.dumps({**own, **result, **own}, ensure_ascii=False).translate(_JSON_CONTROLS) + "\n"


def ctm_name(file: str) -> str:
    """Return a file's stem as CTM's first column: white space would end it, and two semicolons begin a comment.

    Terminals obey control characters.
    """
    return re.sub(r"^;;|\s", "_", Path(file).stem.translate(dict.fromkeys(CONTROLS, "_"))) or "-"


def split_cues(words: tuple[Word, ...]) -> Iterator[list[Word]]:
    """Split words into the cues of subtitles. A cue ends at a pause, or when two lines or six seconds are full."""
    cue: list[Word] = []
    for word in (part for whole in words for part in _cut(whole)):
        if cue and (
            word.start_s - cue[-1].end_s > NEW_CUE_GAP_S
            or word.end_s - cue[0].start_s > MAX_CUE_S
            or max(map(len, _lines([*cue, word]).split("\n"))) > MAX_LINE_CHARACTERS
        ):
            yield cue
            cue = []
        cue.append(word)
    if cue:
        yield cue


def _cut(word: Word) -> Iterator[Word]:
    """Cut a word that is too long for a cue, as a text without spaces may be; two parts never share a line."""
    duration_s, size = word.end_s - word.start_s, len(word.word)
    if duration_s <= MAX_CUE_S or size <= MAX_LINE_CHARACTERS // 2:  # few letters: a word drawn out, or a pause in it
        yield word
        return
    parts = max(math.ceil(duration_s / MAX_CUE_S), math.ceil(size / MAX_LINE_CHARACTERS))
    # Fewer where a letter of several marks would be in two.
    edges = sorted({0, *(_letter_at(word.word, i * size // parts) for i in range(1, parts + 1))})
    part_s = duration_s / (len(edges) - 1)
    for i, (start, end) in enumerate(pairwise(edges)):
        yield Word(word.word[start:end], word.start_s + i * part_s, word.start_s + (i + 1) * part_s, word.confidence)


def _letter_at(text: str, index: int) -> int:
    """Return the index, or the next one where no mark of the letter before stands, as vowels in Thai."""
    while index < len(text) and (unicodedata.category(text[index]).startswith("M") or text[index] in "\u0e33\u0eb3"):
        index += 1
    return index


def _lines(cue: list[Word]) -> str:
    """Join the words of a cue to one line, or to two of about equal length."""
    text = " ".join(word.word for word in cue)
    if len(text) <= MAX_LINE_CHARACTERS:
        return text
    spaces = [i for i, character in enumerate(text) if character == " "]
    if not spaces:
        return text
    middle = min(spaces, key=lambda i: abs(i - len(text) // 2))
    return f"{text[:middle]}\n{text[middle + 1 :]}"


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
