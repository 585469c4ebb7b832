"""Reading a clip as an encoded sound file."""

import io
import re
import stat
import unicodedata
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile

from carnelian_training.data.containers import (
    MIDI_DUMP,
    closed,
    end_of_tag,
    is_wav_of_mpeg,
    joined_format,
    wav_content,
)
from carnelian_training.data.manifest import Clip
from carnelian_training.data.mpeg import (
    SHORT_BLOCK_FRAMES,
    Tagged,
    Uncounted,
    counts_no_frames,
    from_first_frame,
    goes_on,
    in_memory,
    is_taken_for_mpeg,
)

Encoded = npt.NDArray[np.uint8]
Samples = npt.NDArray[np.float32]
MOST_EXCESS_S = 60.0
"""A whole file that lasts this much longer than its manifest says is not decoded: hours of it would fill the memory."""
_AT_ONCE = 1 << 16  # frames decoded at once
_HEAD_BYTES = 1 << 16
"""The part of a long file that shows what kind of file it is."""
_UNKNOWN_FRAMES = 2**63 - 1
"""The frames that libsndfile reports for FLAC without a count; DALI (2.4) then decodes into too little memory."""
_SPOILT_BY_TAGS = (b"RIFF", b"RIFX", b"FORM", b"OggS")
"""The beginnings of files that libsndfile cannot read behind an ID3v2 tag: it drops as many bytes at the end of WAV and
AIFF, and does not recognise Ogg."""
_DAMAGED = re.compile("Error decoding|chunk marker")
"""Matches what DALI and libsndfile say of a damaged file."""
_MOST_FRAMES_OF_A_PAGE = 255 * 4096
"""The most frames of a page of Ogg Vorbis: 255 packets of half the longest block."""


def encoded(clip: Clip) -> Encoded:
    """Return the bytes of a sound file that holds exactly the clip: the sound that the SDK would send, or an error.

    A clip with an `offset` is cut out of its file as a WAV file in memory, at the file's own rate. A segment of a long
    recording costs little more than its own length, so the rest of the recording is not checked; only a file that must
    be repaired, MP3 or MP2 in a WAV file, and MP3 that does not count its frames are read whole. MP3, which DALI does
    not decode, and FLAC that was written to a pipe, whose length DALI does not know, become WAV files in the same way,
    whatever the suffix of their names.

    Raises:
        OSError: The file cannot be read.
        RuntimeError: The file is not a regular file; libsndfile cannot read it (the message begins with libsndfile's);
            it holds several recordings, one behind the other; it lasts over :data:`MOST_EXCESS_S` longer than the clip;
            or it ends before the segment begins.
    """
    check_regular(clip.audio_filepath)
    try:
        return _whole(clip) if clip.offset is None else _segment(clip, clip.offset)
    except soundfile.LibsndfileError as error:
        words = error.error_string  # str(error) may name an object in memory
        if not _DAMAGED.search(words):
            with clip.audio_filepath.open("rb") as file:
                words = f"{words.rstrip('.')}; it begins with {file.read(16)!r}"
            words += "; if that is sound, convert it: `ffmpeg -i in.m4a -ar 16000 -ac 1 out.flac`"
        raise RuntimeError(words) from error


def read_samples(clip: Clip) -> tuple[Samples, int]:
    """Read a clip: [samples, channels] float32, and their rate in Hz.

    Raises:
        ValueError: The clip cannot be read; the message names it and says why, as :func:`encoded` does.
    """
    try:
        samples, rate_hz = soundfile.read(io.BytesIO(encoded(clip).tobytes()), dtype="float32", always_2d=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{clip.title} cannot be read: {error_words(error)}") from error
    return samples, rate_hz


def _whole(clip: Clip) -> Encoded:
    data = clip.audio_filepath.read_bytes()
    data = data[end_of_tag(data) :]
    if joined_format(data):
        raise RuntimeError(
            "must hold one recording, but holds several, one behind the other, of which only the first would be heard: "
            "give each a file of its own"
        )
    data = _repaired(data)
    file = in_memory(data)
    with soundfile.SoundFile(file) as source:
        most_frames = int((clip.duration + MOST_EXCESS_S) * source.samplerate)
        is_read_here = source.format == "MP3" or source.frames == _UNKNOWN_FRAMES
        samples = _read(source, file, most_frames + 1) if is_read_here else None
        if (source.frames if samples is None else len(samples)) > most_frames:
            raise RuntimeError(
                f"lasts over {MOST_EXCESS_S:g} s longer than the {clip.duration:.2f} s of its manifest; "
                "a stretch of a longer file has an `offset`, be it 0"
            )
        if samples is None:
            return np.frombuffer(data, np.uint8)
        if source.format == "MP3" and goes_on(file):
            raise RuntimeError(
                "goes on behind its end, as MP3 files do that were put one behind the other, or are damaged within: "
                "give each recording a file of its own, or leave it out"
            )
        return to_wav(samples, source.samplerate)


def _segment(clip: Clip, offset_s: float) -> Encoded:
    # Python says why a file cannot be opened; libsndfile only says "System error".
    with clip.audio_filepath.open("rb", buffering=0) as opened:
        start = 0
        while tag_bytes := end_of_tag(opened.read(10)):
            start = opened.seek(start + tag_bytes)
        opened.seek(start)
        head = opened.read(_HEAD_BYTES)
        _check_kind(head)
        is_spoilt = start > 0 and head[:4] in _SPOILT_BY_TAGS
        opened.seek(0)
        # By number: the suffix of a name, such as .raw, would decide how the file is read.
        file: io.BufferedIOBase | int = opened.fileno()
        if is_spoilt or is_wav_of_mpeg(head) or closed(head) != head or counts_no_frames(head):
            opened.seek(start)
            file = in_memory(_repaired(opened.read()))
        elif start == 0 and head[:1] == b"\xff":
            file = Tagged(io.BufferedReader(opened))  # it reads each frame's header by itself
        with soundfile.SoundFile(file, closefd=False) as source:
            first = round(offset_s * source.samplerate)
            if first >= source.frames:
                lasts_s = source.frames / source.samplerate
                raise RuntimeError(f"begins {offset_s:g} s into a file that lasts {lasts_s:.2f} s")
            lead = 0
            if source.format == "MP3":  # a frame may need bits of frames up to a second earlier
                lead = min(first, source.samplerate)
            elif source.subtype == "VORBIS":  # libsndfile (1.2.2) goes to a wrong place within the last page
                lead = min(first, max(first + _MOST_FRAMES_OF_A_PAGE - source.frames, 0))
            _go_to(source, first - lead)
            samples = _read(source, file, lead + round(clip.duration * source.samplerate))
            return to_wav(samples[lead:], source.samplerate)


def _repaired(data: bytes) -> bytes:
    """Return a file, without tags before it, with the size of a WAV filled in, and without the WAV around MP3."""
    data = closed(data)
    if is_wav_of_mpeg(data):
        data = from_first_frame(wav_content(data))
    _check_kind(data)
    return data


def _check_kind(data: bytes) -> None:
    if not data:
        raise RuntimeError("no samples")
    if data.startswith(MIDI_DUMP):
        raise RuntimeError("is a MIDI sample dump, which is not read; convert it: `ffmpeg -i in.sds out.flac`")
    if is_taken_for_mpeg(data):
        raise RuntimeError("begins as an MP3 file does, but no second frame follows; raw samples must have a header")


def check_regular(path: Path) -> None:
    """Check that a path is a regular file; reading a pipe, for example, might never end.

    Raises:
        OSError: There is no such file.
        RuntimeError: The path is not a regular file.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, f"{error.strerror}{other_spelling(path)}", str(path)) from error
    if not stat.S_ISREG(mode):
        raise RuntimeError("must be a regular file, but is a folder, a pipe or a device")


def other_spelling(path: Path) -> str:
    """Return what to add to an error about a missing file if it is there under another spelling, else nothing.

    macOS finds an accented name in either form, composed (NFC) or decomposed (NFD); Linux only as it is written.
    Windows separates folders by backslashes, too.
    """
    if Path(str(path).replace("\\", "/")).exists():
        return "; it is there with / for each backslash, so write its path in this way"
    for form in ("NFC", "NFD"):
        name, whole = (unicodedata.normalize(form, text) for text in (path.name, str(path)))
        if path.with_name(name).exists() or Path(whole).exists():
            return f"; it is there with its accents in the form {form}, so write its path in this form"
    return ""


def _go_to(file: soundfile.SoundFile, start: int) -> None:
    """Go to a frame; if libsndfile cannot seek, as in GSM 6.10 of telephone calls, decode all frames before it."""
    if file.seekable():
        file.seek(start)
        return
    for done in range(0, start, _AT_ONCE):
        file.buffer_read(min(_AT_ONCE, start - done), dtype="int16")


def _read(source: soundfile.SoundFile, file: io.BufferedIOBase | int, most_frames: int) -> Samples:
    """Read at most `most_frames` frames, [frames, channels], from where `source`, which reads `file`, is."""
    # Otherwise soundfile seeks after each read, and the next MP3 frame lacks the bits that it shares with the last one.
    source.seekable = lambda: False
    size = SHORT_BLOCK_FRAMES if isinstance(file, Uncounted) else _AT_ONCE
    blocks = [np.zeros((0, source.channels), np.float32)]
    left = most_frames
    try:
        while left and len(block := source.read(min(size, left), dtype="float32", always_2d=True)):
            blocks.append(block)
            left -= len(block)
    except soundfile.LibsndfileError:
        # Behind the last whole frame of an MP3 without a count there may be half a frame, or a tag.
        if left == most_frames or not isinstance(file, Uncounted) or goes_on(file):
            raise
    return np.concatenate(blocks)


def to_wav(samples: Samples, rate_hz: int) -> Encoded:
    """Encode samples, [frames] or [frames, channels] float32, as a WAV file of floats."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate_hz, format="WAV", subtype="FLOAT")
    return np.frombuffer(buffer.getvalue(), np.uint8)


def error_words(error: Exception) -> str:
    """Return the first line of an error's message, without a file's name and the place in DALI's graph.

    What the SDK says of a damaged file is added.
    """
    said = (isinstance(error, OSError) and error.strerror) or str(error)
    _, _, words = said.rpartition("encountered:")
    words = words.strip().partition("\n")[0] or repr(error)  # a MemoryError may have no words
    return f"{words.rstrip('.')}: the file is damaged or cut short" if _DAMAGED.search(words) else words
