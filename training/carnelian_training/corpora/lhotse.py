"""Conversion of Lhotse's manifests (https://github.com/lhotse-speech/lhotse, recipes for about 100 corpora) to clips.

Clips inside longer recordings become clips with an `offset`; no audio is written.
"""

import functools
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import soundfile
import yaml

from carnelian_training.data.audio import check_regular
from carnelian_training.data.manifest import MOST_S, Clip, parse_line

_TYPES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("id", "recording_id"), lambda value: isinstance(value, (str, int)), "text or a number"),
    (
        ("start", "duration"),
        lambda value: type(value) in (int, float) and abs(value) <= MOST_S,
        f"a number of seconds, at most {MOST_S:.0f}",
    ),
    (("channel_ids",), lambda value: isinstance(value, list), "a list"),
)
"""What these fields of cuts, recordings and supervisions must be; Lhotse takes what it reads."""


def clips_of_cuts(cuts: Path) -> Iterator[Clip]:
    """Yield a clip for each supervision of a cut manifest.

    Raises:
        ValueError: A cut is mixed, padded or perturbed, its sound is missing or not one file of one channel, or a
            supervision begins before it or cannot be a line of our manifests; the message names the cut or the
            supervision.
    """
    seen: set[tuple[Path, str, float, str]] = set()
    for cut in _read(_lhotse().CutSet, cuts):
        if type(cut).__name__ != "MonoCut":
            raise ValueError(f"{cuts}: {cut.id} must be a plain part of a recording, but is a {type(cut).__name__}")
        if not cut.supervisions:
            continue
        if not cut.has_recording:
            raise ValueError(f"{cuts}: {cut.id} must have its recording, but has features alone")
        _check_types(cut, f"{cuts}: {cut.id}")
        _check_types(cut.recording, f"{cuts}: the recording of {cut.id}")
        for supervision in cut.supervisions:
            where = f"{cuts}: {supervision.id}"
            _check_types(supervision, where)
            start = cut.start + supervision.start
            clip = _clip(cut.recording, start, supervision, where)
            known = (clip.audio_filepath, supervision.id, round(start, 3), clip.text)
            if known not in seen:  # otherwise the same supervision in another window: they may overlap or cut it
                seen.add(known)
                yield clip


def clips_of_supervisions(recordings: Path, supervisions: Path) -> Iterator[Clip]:
    """Yield a clip for each supervision of a supervision manifest, with its sound from a recording manifest.

    Raises:
        ValueError: A recording is missing, perturbed, or not one file of one channel, two recordings have one id, or a
            supervision begins before its recording or cannot be a line of our manifests; the message names the
            recording or the supervision.
    """
    lhotse = _lhotse()
    by_id: dict[str, Any] = {}
    for recording in _read(lhotse.RecordingSet, recordings):
        _check_types(recording, f"{recordings}: {recording.id}")
        if by_id.setdefault(recording.id, recording) != recording:
            raise ValueError(
                f"{recordings} must have one recording of an id, but has two of {recording.id}: if corpora were "
                "combined, convert each by itself"
            )
    for supervision in _read(lhotse.SupervisionSet, supervisions):
        where = f"{supervisions}: {supervision.id}"
        _check_types(supervision, where)
        if supervision.recording_id not in by_id:
            raise ValueError(f"{where} is about {supervision.recording_id}, which {recordings} does not have")
        yield _clip(by_id[supervision.recording_id], supervision.start, supervision, where)


def _check_types(item: Any, where: str) -> None:
    """Check fields of a cut, a recording or a supervision; messages begin with `where`.

    Raises:
        ValueError: A field is not what `_TYPES` says.
    """
    own = vars(item)  # Lhotse's items answer to names in their `custom`, too
    for names, holds, must in _TYPES:
        for name in names:
            if name in own and not holds(value := own[name]):
                raise ValueError(f"{where}: its `{name}` must be {must}, found {value!r:.200}")


def _read(kind: Any, path: Path) -> Iterator[Any]:
    """Yield the items of a manifest; Lhotse may read them one by one.

    Raises:
        ValueError: The manifest cannot be read, is empty, or has items of another kind.
    """
    names = {"CutSet": "Cut", "RecordingSet": "Recording", "SupervisionSet": "SupervisionSegment"}
    expected = f"{path} must be a {kind.__name__} of Lhotse"
    with _read_as(expected):
        found = kind.from_file(path)
    if found is None:
        raise ValueError(f"{expected}, but is empty")
    items = iter(found)
    while True:
        with _read_as(expected):
            item = next(items, None)
        if item is None:
            return
        if not type(item).__name__.endswith(names[kind.__name__]):
            raise ValueError(f"{expected}, but has a {type(item).__name__}")
        yield item


@contextmanager
def _read_as(expected: str) -> Iterator[None]:
    try:
        yield
    except (
        *(AssertionError, AttributeError, EOFError, KeyError, OSError, RecursionError, TypeError, ValueError),
        *(yaml.YAMLError, zlib.error),
    ) as error:
        raise ValueError(f"{expected}, but cannot be read: {error}") from error


def _clip(recording: Any, start: float, supervision: Any, where: str) -> Clip:
    if len(recording.sources) != 1 or recording.sources[0].type != "file":
        kinds = [source.type for source in recording.sources]
        raise ValueError(f"{where} must be in one sound file, but its recording has the sources {kinds}")
    start = round(start, 6) + 0.0  # not -0.0
    if start < 0:
        raise ValueError(f"{where} must begin within its recording, but begins at {start:g} s")
    if recording.transforms:
        raise ValueError(f"{where} must be a file's own sound, but is transformed: let Lhotse save the sound first")
    is_whole = start == 0 and abs(supervision.duration - recording.duration) < 0.01
    extra = {"id": supervision.id, "speaker": supervision.speaker, "language": supervision.language}
    row = {
        "audio_filepath": recording.sources[0].source,
        "duration": recording.duration if is_whole else supervision.duration,
        "offset": None if is_whole else start,
        "text": "" if supervision.text is None else supervision.text,
        **{name: value for name, value in extra.items() if value is not None},
    }
    line = json.dumps(row, default=str)  # YAML has dates
    clip = parse_line(line.encode(), Path.cwd(), where)
    # What Lhotse made of Kaldi's folders claims one channel of every file.
    channels = max(recording.num_channels, _channels(clip.audio_filepath))
    if channels > 1:
        raise ValueError(
            f"{where} must be in a file of one channel, but {clip.audio_filepath} has {channels}: "
            "split it first, as by `sox call.wav caller.flac remix 1`"
        )
    return clip


@functools.cache  # a recording may have thousands of supervisions
def _channels(file: Path) -> int:
    """Return the number of channels of a sound file; 0 if it cannot be read, as `validate` will say."""
    try:
        check_regular(file)
        # By number, as the suffix of a name may decide how the file is read.
        with file.open("rb", buffering=0) as opened, soundfile.SoundFile(opened.fileno(), closefd=False) as sound:
            return int(sound.channels)
    except (OSError, RuntimeError):
        return 0


def _lhotse() -> Any:
    try:
        import lhotse
    except ImportError as error:
        raise ValueError("Lhotse's manifests need its package: pip install 'carnelian-training[corpora]'") from error
    return lhotse
