"""Which features a model takes: log-mel for the convolutional ones, the waveform for wav2vec 2.0."""

from types import ModuleType

from nvidia.dali import fn
from nvidia.dali.pipeline import DataNode

from carnelian_training import features, waveform
from carnelian_training.features import FeatureSettings
from carnelian_training.waveform import WaveformSettings

FrontEnd = FeatureSettings | WaveformSettings


def channels(settings: FrontEnd) -> int:
    """Rows of the features."""
    return 1 if isinstance(settings, WaveformSettings) else settings.num_mels


def build(signal: DataNode, settings: FrontEnd) -> DataNode:
    """Build the graph: [samples] float32 with at least one sample -> [channels, frames] float32."""
    if isinstance(settings, WaveformSettings):
        return fn.expand_dims(waveform.waveform(signal, settings), axes=[0])
    return features.log_mel(signal, settings)


def served_by(settings: FrontEnd) -> ModuleType:
    """The module whose file is the `<model>_features` stage."""
    return waveform if isinstance(settings, WaveformSettings) else features
