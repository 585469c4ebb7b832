"""The choice of features: log-mel for the convolutional networks, the waveform for wav2vec 2.0."""

from types import ModuleType
from typing import Annotated, Any

from nvidia.dali import fn
from nvidia.dali.pipeline import DataNode
from pydantic import Discriminator, Tag

from carnelian_training import features, waveform
from carnelian_training.features import FeatureSettings
from carnelian_training.waveform import WaveformSettings

FrontEnd = FeatureSettings | WaveformSettings


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


def served_by(settings: FrontEnd) -> ModuleType:
    """Return the module whose file becomes the `<model>_features` stage."""
    return waveform if isinstance(settings, WaveformSettings) else features
