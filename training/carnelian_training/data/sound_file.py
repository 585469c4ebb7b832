"""Atomic writing of sound files: a file is complete or not there."""

import io
from pathlib import Path

import numpy.typing as npt
import soundfile

from carnelian_training.replacement import replaced


def write_sound(path: Path, samples: npt.ArrayLike, rate_hz: int) -> None:
    """Write samples, [samples] float in -1 to 1, in the format of the file's suffix (16-bit FLAC or WAV, Ogg Vorbis).

    Raises:
        WriteError: The file could not be written; an existing file is unchanged.
    """
    # Encoded in memory first, because libsndfile writes less without an error when the disk is full.
    sound = io.BytesIO()
    soundfile.write(sound, samples, rate_hz, format=path.suffix.removeprefix("."))
    with replaced(path) as partial:
        partial.write_bytes(sound.getvalue())  # Python 3.12.1 crashes on `getbuffer`'s view in an error's traceback
