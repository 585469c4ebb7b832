"""Sound files that are there whole or not at all."""

import io
from pathlib import Path

import numpy.typing as npt
import soundfile

from carnelian_training.replacement import replaced


def write_sound(path: Path, samples: npt.ArrayLike, rate_hz: int) -> None:
    """Write samples, [samples] float within 1, as the format of the file's ending: FLAC and WAV of 16 bits, Ogg Vorbis.

    Raises:
        WriteError: It could not be written; a file that was there is as it was.
    """
    # By way of memory: where a disk has no room, libsndfile writes less and says nothing.
    sound = io.BytesIO()
    soundfile.write(sound, samples, rate_hz, format=path.suffix.removeprefix("."))
    with replaced(path) as partial:
        partial.write_bytes(sound.getvalue())  # of a view in an error's traceback Python 3.12.1 crashes
