"""Clips of speech, and calls to the models of the session's server."""

import collections
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from carnelian_client import CarnelianClient

CLIPS = Path(__file__).parents[2] / "demo" / "clips"
RATE_HZ = 16_000


@pytest.fixture(scope="session")
def models(server: Any, connect: Callable[[str], Any]) -> Any:
    return connect(server.grpc_url)


@pytest.fixture(scope="session")
def batch_sizes_of(models: Any) -> Callable[..., collections.Counter[int]]:
    """Rows in a batch -> how many such batches of a model `send`, which sends so many rows, makes of them."""

    def count(model: str) -> collections.Counter[int]:
        (statistics,) = models.client.get_inference_statistics(model).model_stats
        return collections.Counter({batch.batch_size: batch.compute_infer.count for batch in statistics.batch_stats})

    def batch_sizes_of(model: str, num_rows: int, send: Callable[[], None]) -> collections.Counter[int]:
        before = count(model)
        send()
        deadline = time.monotonic() + 30  # Triton counts a request after it has answered it
        while True:
            made = count(model) - before
            if sum(size * number for size, number in made.items()) >= num_rows or time.monotonic() > deadline:
                return made
            time.sleep(0.02)

    return batch_sizes_of


@pytest.fixture(scope="session")
def sdk(server: Any) -> Iterator[CarnelianClient]:
    with CarnelianClient(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="session")
def encode() -> Callable[..., np.ndarray]:
    """Makes AUDIO [1, bytes] uint8, a file of samples."""

    def encode(
        samples: np.ndarray, rate_hz: int = RATE_HZ, container: str = "WAV", subtype: str = "PCM_16"
    ) -> np.ndarray:
        file = io.BytesIO()
        soundfile.write(file, samples, rate_hz, format=container, subtype=subtype)
        return np.frombuffer(file.getvalue(), np.uint8)[None]

    return encode


@pytest.fixture(scope="session")
def clip_files() -> dict[str, np.ndarray]:
    """Name -> AUDIO [1, bytes] uint8 of the demo's clips, one for each container, codec, rate or channel count."""
    paths = sorted(path for path in CLIPS.iterdir() if path.suffix != ".jsonl")
    return {path.name: np.fromfile(path, np.uint8)[None] for path in paths}


@pytest.fixture(scope="session")
def signals(models: Any, clip_files: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Name -> [samples] float32 at 16 kHz of the demo's clips, as the server decodes them: 3.6 s to 5.2 s."""
    return {name: models.infer("audio_decode", AUDIO=file)["SIGNAL"][0] for name, file in clip_files.items()}
