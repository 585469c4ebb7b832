"""Real speech cut to an exact length, and perf_analyzer's input files made of it."""

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile

from carnelian_perf.clips import SAMPLE_RATE_HZ, read_speech
from carnelian_perf.whole_file import write_whole


@dataclass(frozen=True)
class Cut:
    """A clip of an exact length, as samples and as a file of the same samples."""

    samples: npt.NDArray[np.float32]
    """[samples], 16 kHz mono, rounded to 16 bits: exactly what a decoder reads from `file`."""
    file: bytes


def cut_equal(manifest: Path, duration_s: float, num_clips: int, file_format: str) -> list[Cut]:
    """Cut `num_clips` distinct clips of `duration_s` seconds from the beginning of a manifest's speech.

    If the speech is shorter than all clips together, they overlap, but no two begin at the same place. A clip that
    reaches past the end of the speech goes on at its beginning. `file_format` is flac or wav.

    Raises:
        ValueError: the manifest has no clips, or one cannot be read.
    """
    speech = read_speech(manifest, num_clips * duration_s)
    samples = round(duration_s * SAMPLE_RATE_HZ)
    starts = np.linspace(0, len(speech), num_clips, endpoint=False).astype(int)
    return [_cut(np.take(speech, range(start, start + samples), mode="wrap"), file_format) for start in starts]


def write_pcm(path: Path, cuts: Sequence[Cut]) -> None:
    """Write perf_analyzer's JSON for `<model>_pcm`."""
    rows = [
        {
            "SIGNAL": {"content": _base64(cut.samples.tobytes()), "shape": [len(cut.samples)]},
            "SIGNAL_LENGTH": {"content": [len(cut.samples)], "shape": [1]},
        }
        for cut in cuts
    ]
    write_whole(path, json.dumps({"data": rows}))


def write_files(path: Path, cuts: Sequence[Cut], transcripts: Sequence[str] | None) -> None:
    """Write perf_analyzer's JSON for `<model>`; if `transcripts` are given, it checks the answers against them."""
    rows = [{"AUDIO": {"content": _base64(cut.file), "shape": [len(cut.file)]}} for cut in cuts]
    content: dict[str, Any] = {"data": rows}
    if transcripts is not None:
        content["validation_data"] = [{"TRANSCRIPT": {"content": [text], "shape": [1]}} for text in transcripts]
    write_whole(path, json.dumps(content))


def _cut(samples: npt.NDArray[np.float32], file_format: str) -> Cut:
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE_HZ, format=file_format.upper(), subtype="PCM_16")
    decoded, _ = soundfile.read(io.BytesIO(file.getvalue()), dtype="float32")
    return Cut(decoded, file.getvalue())


def _base64(content: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(content).decode()}
