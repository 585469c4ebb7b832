"""Clips of mixed length, the same ones in every run.

In: a manifest of real clips. Out: WAV files in memory, 16 kHz mono, and the order in which a round sends them.
"""

import contextlib
import io
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from carnelian_perf.manifest import read_manifest

T = TypeVar("T")
SAMPLE_RATE_HZ = 16_000
HOP_SAMPLES = 160
NUM_CLIPS = 64
SEED = 2026
MEDIAN_S = 5.0
SIGMA = 0.6
"""Standard deviation of the natural logarithm of the duration: two thirds of the clips last 2.7 to 9.1 s."""
SHORTEST_S, LONGEST_S = 1.0, 16.0
LIMIT_S = 60.0
"""The longest clip that is served, in seconds."""
SHORTEST_CUT_S = 0.1
"""The shortest clip that is cut to an exact length, in seconds."""
MOST_CUTS = 1024
"""The largest number of clips that are cut to one length: at 60 s each, their samples take 4 GB."""


@dataclass(frozen=True)
class WavClip:
    """A clip as a WAV file in memory, as a request sends it."""

    wav: bytes
    duration_s: float
    frames: int
    """Number of feature frames of the clip; silence that a client adds is not counted."""


def cut_clips(manifest: Path, num_clips: int = NUM_CLIPS) -> list[WavClip]:
    """Join a manifest's clips and cut them into clips whose durations are drawn from a log-normal distribution.

    Raises:
        ValueError: the manifest has no clips, or one cannot be read.
    """
    speech = read_speech(manifest)
    rng = random.Random(SEED)
    clips, start = [], 0
    for _ in range(num_clips):
        seconds = min(max(rng.lognormvariate(math.log(MEDIAN_S), SIGMA), SHORTEST_S), LONGEST_S)
        samples = round(seconds * SAMPLE_RATE_HZ)
        clips.append(encode_clip(np.take(speech, range(start, start + samples), mode="wrap")))
        start += samples
    return clips


def load_clips(manifest: Path) -> list[WavClip]:
    """Load :data:`NUM_CLIPS` whole clips of a manifest (all, if it has fewer), drawn with a fixed seed.

    Raises:
        ValueError: the manifest has no clips of at most 60 s, or one cannot be read.
    """
    paths = _servable(manifest)
    chosen = random.Random(SEED).sample(paths, min(NUM_CLIPS, len(paths)))
    return [encode_clip(_read(path, manifest)) for path in chosen]


def check_clips(manifest: Path) -> None:
    """Open each clip of a manifest: what is not there must be found before an export or a measurement takes minutes.

    Raises:
        ValueError: the manifest has no clips of at most 60 s, or one cannot be opened.
    """
    for path in _servable(manifest):
        with _opened(path, manifest):
            pass


def read_speech(manifest: Path, enough_s: float = math.inf) -> npt.NDArray[np.float32]:
    """Read and join the clips of a manifest, as [samples], 16 kHz mono; stop once they last `enough_s` seconds.

    Raises:
        ValueError: the manifest has no clips of at most 60 s, one cannot be read, or they have no samples.
    """
    clips, num_samples = [], 0
    for path in _servable(manifest):
        if num_samples < enough_s * SAMPLE_RATE_HZ:
            clips.append(_read(path, manifest))
            num_samples += len(clips[-1])
    if not num_samples:
        raise ValueError(f"a manifest must name clips that have samples, but those of {manifest} have none")
    return np.concatenate(clips)


def read_clip(sound: soundfile.SoundFile) -> npt.NDArray[np.float32]:
    """Read a sound file as [samples], 16 kHz mono."""
    samples = sound.read(dtype="float32", always_2d=True)
    mono: npt.NDArray[np.float32] = soxr.resample(samples.mean(axis=1), sound.samplerate, SAMPLE_RATE_HZ)
    return mono


def encode_clip(samples: npt.NDArray[np.float32] | npt.NDArray[np.int16]) -> WavClip:
    """Make a clip of samples, [samples], 16 kHz mono, rounded to 16 bits."""
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE_HZ, format="WAV", subtype="PCM_16")
    return WavClip(file.getvalue(), len(samples) / SAMPLE_RATE_HZ, len(samples) // HOP_SAMPLES + 1)


def shuffle_order(num_requests: int, num_clips: int, round_number: int) -> list[int]:
    """Return the index of the clip that each request of a round sends: every clip equally often, shuffled."""
    return shuffled([index % num_clips for index in range(num_requests)], round_number)


def shuffled(items: Iterable[T], round_number: int) -> list[T]:
    """Shuffle what takes turns: another order in each round, but the same orders in every measurement."""
    order = list(items)
    random.Random(SEED + round_number).shuffle(order)
    return order


def _servable(path: Path) -> list[Path]:
    paths = [clip.audio_filepath for clip in read_manifest(path, with_texts=False) if clip.duration_s <= LIMIT_S]
    if not paths:
        raise ValueError(f"a manifest must name at least one clip of at most {LIMIT_S:g} s, but {path} has none")
    return paths


def _read(path: Path, manifest: Path) -> npt.NDArray[np.float32]:
    with _opened(path, manifest) as sound:
        return read_clip(sound)


@contextlib.contextmanager
def _opened(path: Path, manifest: Path) -> Iterator[soundfile.SoundFile]:
    try:
        # Python says why a file cannot be opened; libsndfile only says "System error". By number: a name in .raw would
        # decide how the file is read.
        with path.open("rb", buffering=0) as file, soundfile.SoundFile(file.fileno(), closefd=False) as sound:
            yield sound
            return
    except OSError as error:
        reason = error.strerror
    except soundfile.LibsndfileError as error:
        reason = error.error_string
    raise ValueError(
        f"{manifest} must name sound files that can be read, but {path} cannot be: {reason}; mend or drop its line"
    )
