"""The choice of features: log-mel for the convolutional networks, the waveform for wav2vec 2.0."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.pipeline import DataNode
from pydantic import Discriminator, Tag

from carnelian_training import features, waveform
from carnelian_training.features import FeatureSettings
from carnelian_training.waveform import WaveformSettings

FrontEnd = FeatureSettings | WaveformSettings
Array = npt.NDArray[np.float32]
Extractor = Callable[[Sequence[Array]], tuple[Array, npt.NDArray[np.int64]]]


def _kind(found: Any) -> str:
    name = found.get("name", "log_mel") if isinstance(found, dict) else getattr(found, "name", "log_mel")
    return str(name)


Features = Annotated[
    Annotated[FeatureSettings, Tag("log_mel")] | Annotated[WaveformSettings, Tag("waveform")], Discriminator(_kind)
]
"""The type of `features` in a configuration: log-mel, which has no `name` in files, or `name: waveform`."""


def channels(settings: FrontEnd) -> int:
    """Return the number of rows of the features: mel bands, or 1 for a waveform."""
    return 1 if isinstance(settings, WaveformSettings) else settings.num_mels


def build_features(signal: DataNode, settings: FrontEnd) -> DataNode:
    """Build the feature graph: [samples] float32 with at least one sample -> [channels, frames] float32."""
    if isinstance(settings, WaveformSettings):
        return fn.expand_dims(waveform.waveform(signal, settings), axes=[0])
    return features.log_mel(signal, settings)


def build_extractor(settings: FrontEnd, batch_size: int, num_threads: int = 1) -> Extractor:
    """Build the graph once, for many calls of what :func:`compute_features` does, on `batch_size` clips at most."""

    @pipeline_def(
        batch_size=batch_size,
        num_threads=num_threads,
        device_id=None,
        prefetch_queue_depth=1,
        exec_async=False,
        exec_pipelined=False,
    )
    def graph() -> DataNode:
        return build_features(fn.external_source(name="SIGNAL", dtype=types.FLOAT, ndim=1), settings)

    pipeline: Any = graph()
    pipeline.build()

    def extract(waveforms: Sequence[Array]) -> tuple[Array, npt.NDArray[np.int64]]:
        if not 0 < len(waveforms) <= batch_size:
            raise ValueError(f"there must be 1 to {batch_size} clips, but are {len(waveforms)}")
        for clip in waveforms:
            if clip.dtype != np.float32 or clip.ndim != 1 or not clip.size:  # an empty one would crash DALI
                found = f"{clip.dtype} {list(clip.shape)}"
                raise ValueError(f"a waveform must be float32 [samples], with one sample at least, but is {found}")
        pipeline.feed_input("SIGNAL", [np.ascontiguousarray(clip) for clip in waveforms])
        (output,) = pipeline.run()
        rows = [np.asarray(output.at(i)) for i in range(len(waveforms))]
        lengths = np.array([row.shape[1] for row in rows])
        padded = np.zeros((len(rows), channels(settings), lengths.max()), np.float32)
        for place, row in zip(padded, rows, strict=True):
            place[:, : row.shape[1]] = row
        return padded, lengths

    return extract


def compute_features(waveforms: Sequence[Array], settings: FrontEnd) -> tuple[Array, npt.NDArray[np.int64]]:
    """Compute the features of clips, as a server does.

    Args:
        waveforms: each clip's [samples] float32 at 16 kHz, in [-1, 1].
        settings: `features` of the recogniser's configuration.

    Returns:
        [clips, channels, frames] float32, zero after a clip's own end, and [clips] int64 lengths in frames.

    Raises:
        ValueError: There are no clips, or one is empty or not of this type and shape.
    """
    if len(waveforms) == 0:  # an array of clips has no truth value
        raise ValueError("there must be at least one clip, but there is none")
    return build_extractor(settings, len(waveforms))(waveforms)


def served_by(settings: FrontEnd) -> ModuleType:
    """Return the module whose file becomes the `<model>_features` stage."""
    return waveform if isinstance(settings, WaveformSettings) else features
