"""The configuration tree of a recogniser. A YAML file gives what differs from the defaults; unknown keys are errors."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, with_config

from carnelian_training.checks import (
    GivenPath,
    check_at_least_one,
    check_at_most,
    check_no_controls,
    check_not_negative,
    check_positive,
    check_probability,
    check_range,
)
from carnelian_training.config_errors import ConfigError
from carnelian_training.config_tree import validated
from carnelian_training.ctc.spelling import quote
from carnelian_training.data.span_masks import SpanMaskConfig
from carnelian_training.features import FeatureSettings
from carnelian_training.front_end import Features, channels
from carnelian_training.loop_config import (
    LOOP_OF_STACKS,
    InitConfig,
    LoopConfig,
    OptimizerConfig,
    check_name,
    check_stages,
)
from carnelian_training.models.jasper import JasperConfig
from carnelian_training.models.pretraining import PretrainingConfig
from carnelian_training.models.quartznet import QuartzNetConfig
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config
from carnelian_training.text import LABEL_CHARACTERS
from carnelian_training.waveform import WaveformSettings

LABELS = tuple(LABEL_CHARACTERS)


@dataclass(frozen=True, kw_only=True)
class ManifestConfig:
    """A training manifest and how often it is used."""

    path: GivenPath
    """The path of a NeMo manifest (JSON lines); relative to the working directory."""
    repeat: int = 1
    """How often each clip of the manifest occurs in one epoch."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "repeat")
        check_at_most(self, 10_000, "repeat")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The clips to train and evaluate on, and how they are batched."""

    train: tuple[ManifestConfig, ...] = ()
    dev: GivenPath | None = None
    batch_s: float = 128.0
    """The seconds of audio per step, padding included, over all processes together."""
    device_batch_s: float | None = None
    """The seconds of audio, padding included, that a device processes at once. A process whose share of a step is
    larger splits it into parts and adds up their gradients. A longer clip is a part of its own. None: no limit."""
    max_duration_s: float = 16.7
    """The longest training clip in seconds; longer ones are left out and counted in the log."""
    min_duration_s: float = 0.2
    num_threads: int = 2
    """The number of threads that decode audio, disturb it and compute features."""
    prefetch_batches: int = 2
    """The number of batches that DALI prepares ahead of training."""

    def __post_init__(self) -> None:
        check_positive(self, "batch_s", "device_batch_s", "num_threads", "prefetch_batches")
        check_at_most(self, 1024, "num_threads", "prefetch_batches")
        check_not_negative(self, "min_duration_s")
        if not self.min_duration_s <= self.max_duration_s:
            raise ValueError(
                f"`min_duration_s` must be at most `max_duration_s`, {self.max_duration_s:g}, "
                f"but is {self.min_duration_s:g}"
            )


@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """The augmentation with noise from files."""

    path: GivenPath
    """A folder of sound files, searched with its subfolders; relative to the working directory."""
    probability: float = 0.5
    snr_db: tuple[float, float] = (5.0, 30.0)

    def __post_init__(self) -> None:
        check_probability(self, "probability")
        check_range("snr_db", self.snr_db, -20.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class ReverberationConfig:
    """The augmentation with reverberation: convolution with the impulse responses of rooms."""

    path: GivenPath
    """A folder of impulse responses as sound files, searched with its subfolders."""
    probability: float = 0.5

    def __post_init__(self) -> None:
        check_probability(self, "probability")


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """The augmentation of training clips.

    Masks are those of SpecAugment (Park et al. 2019), filled with 0, the mean of normalised features. wav2vec 2.0,
    which has no log-mel features, has its own masks: `spans`.
    """

    speed: tuple[float, float] = (0.85, 1.15)
    """The range of the speed factor. Speed is changed by resampling, so tempo, pitch and formants change together."""
    speed_factors: tuple[float, ...] = ()
    """If given, one of these is drawn instead of a number within `speed`, for example [0.9, 1.0, 1.1]."""
    speed_probability: float = 1.0
    reverberation: ReverberationConfig | None = None
    noise: NoiseConfig | None = None
    gain_db: tuple[float, float] = (0.0, 0.0)
    dither: float = 0.0
    """The standard deviation of white noise, relative to full scale 1, that is added last (NeMo's recipes: 1e-5)."""
    frequency_warp: float = 0.0
    """Vocal tract length perturbation: frequencies are scaled by a factor uniform in 1 +- this."""
    frequency_masks: int = 2
    frequency_mask_bands: int = 15
    """The widest frequency mask, in mel bands; the width is uniform from 0."""
    time_masks: int = 2
    time_mask_frames: int = 55
    """The longest time mask, in frames of `features.hop_samples`; the length is uniform from 0."""
    time_mask_share: float = 0.1
    """The longest time mask as a share of the clip; the smaller of the two limits holds."""
    cutout_boxes: int = 0
    """The number of rectangles of bands by frames that are filled with 0 (DeVries and Taylor 2017,
    arXiv:1708.04552)."""
    cutout_bands: int = 20
    """The widest cutout box, in mel bands; the width is uniform from 0."""
    cutout_frames: int = 5
    """The longest cutout box, in frames; the length is uniform from 0."""
    spans: SpanMaskConfig = field(default_factory=SpanMaskConfig)
    consistency: float = 0.0
    """The weight of the CR-CTC loss (Yao et al. 2024, arXiv:2410.05101, who take 0.2). Above 0, a recogniser gets two
    views of each clip, with different masks and warps, and learns to give the same result for both. A step then costs
    as much as one of twice `data.batch_s`, and a part needs twice the memory: halve `data.device_batch_s`."""

    def __post_init__(self) -> None:
        check_range("speed", self.speed, 0.5, 2.0)
        if not all(0.5 <= factor <= 2.0 for factor in self.speed_factors):
            raise ValueError(f"`speed_factors` must be within 0.5 to 2.0, but are {list(self.speed_factors)}")
        check_range("gain_db", self.gain_db, -60.0, 60.0)
        check_not_negative(self, "dither", "frequency_masks", "frequency_mask_bands", "time_masks", "time_mask_frames")
        check_not_negative(self, "cutout_boxes", "cutout_bands", "cutout_frames", "consistency")
        check_at_most(self, 1024, "frequency_masks", "time_masks", "cutout_boxes")
        if not 0.0 <= self.frequency_warp < 0.5:
            raise ValueError(f"`frequency_warp` must be within 0 to 0.5, but is {self.frequency_warp}")
        check_probability(self, "speed_probability", "time_mask_share")

    @property
    def fastest(self) -> float:
        """The highest speed factor that can be drawn."""
        return max(1.0, *(self.speed_factors or self.speed)) if self.speed_probability else 1.0


AUGMENT_OF_MEL = (
    "frequency_warp",
    "frequency_masks",
    "frequency_mask_bands",
    "time_masks",
    "time_mask_frames",
    "time_mask_share",
    "cutout_boxes",
    "cutout_bands",
    "cutout_frames",
)
"""The fields of :class:`AugmentConfig` that apply only to networks with log-mel features."""


_REPLACE_LABELS = (
    ": put others in their place, for a checkpoint of another toolkit with `carnelian-train import --set "
    "'labels=[...]'`"
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration of a recogniser's run. It is written beside and into each checkpoint.

    The dataclasses check ranges, but neither types nor names: for a configuration made by code,
    `config_from_dict(config_to_dict(config), "mine")` does, as for one from a file.
    """

    name: str
    """The name of the run, and of its config file, its checkpoints and the Triton model."""
    model: Annotated[QuartzNetConfig | JasperConfig | Wav2Vec2Config, Field(discriminator="name")]
    """The network; `model.name` chooses the architecture."""
    labels: tuple[str, ...] = LABELS
    """The labels, one character each. The CTC blank follows the last one and is not listed."""
    features: Features = field(default_factory=FeatureSettings)
    """The features: log-mel, or `name: waveform`, the default of wav2vec 2.0."""
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    init: InitConfig = field(default_factory=InitConfig)
    pretraining: PretrainingConfig | None = None
    """The pre-training of wav2vec 2.0, from audio without transcripts. None: train a recogniser."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        check_name(self.name)
        if not self.labels:
            raise ValueError("`labels` must hold one character at least, but is empty")
        wrong = [label for label, count in Counter(self.labels).items() if len(label) != 1 or count > 1]
        if wrong:
            raise ValueError(
                "`labels` must be distinct single characters, accented ones composed (NFC), but these are not: "
                f"[{', '.join(map(quote, wrong[:10]))}{', ...' * (len(wrong) > 10)}]{_REPLACE_LABELS}"
            )
        check_no_controls("labels", self.labels, _REPLACE_LABELS)
        is_wav2vec2 = isinstance(self.model, Wav2Vec2Config)
        if is_wav2vec2 != isinstance(self.features, WaveformSettings):
            found = "log-mel" if is_wav2vec2 else "a waveform"
            raise ValueError(
                f"`features` must be a waveform for wav2vec2 and for it alone, but are {found} for {self.model.name}"
            )
        if self.model.feature_channels != channels(self.features):
            raise ValueError(
                f"`model.num_mels` must be `features.num_mels`, {channels(self.features)}, but is "
                f"{self.model.feature_channels}"
            )
        if not is_wav2vec2 and self.augment.spans != SpanMaskConfig():
            raise ValueError(f"`augment.spans` must not be set for {self.model.name}: they are masks of wav2vec2")
        if self.pretraining is not None and not (is_wav2vec2 and self.augment.spans.time_probability):
            raise ValueError(
                "`pretraining` must come with `model.name: wav2vec2` and `augment.spans.time_probability` above 0, for "
                f"it learns from masked frames, but these are {self.model.name} and "
                f"{self.augment.spans.time_probability:g}"
            )
        if self.pretraining is not None and self.augment.consistency:
            raise ValueError(
                "`augment.consistency` must be 0 with `pretraining`, which has no transcripts to hear, but is "
                f"{self.augment.consistency:g}"
            )
        check_stages(self.init, self.model.num_stages)


# `extra="forbid"` also applies to nested dataclasses; a test checks that.
_ADAPTER = TypeAdapter(with_config(ConfigDict(extra="forbid"))(Config))


def check_suits_network(config: Config, where: str) -> None:
    """Check that no field is set that the network does not use, and that masks are no wider than its features.

    :class:`Config` itself does not check this, because checkpoints may hold such fields.

    Raises:
        ConfigError: Fields that only networks with log-mel features use are set for wav2vec 2.0; 0 does not count. Or
            masks may be of more bands than there are.
    """
    if isinstance(config.features, FeatureSettings):
        augment, num_mels = config.augment, config.features.num_mels
        for masks, bands in (("frequency_masks", "frequency_mask_bands"), ("cutout_boxes", "cutout_bands")):
            if getattr(augment, masks) and getattr(augment, bands) > num_mels:
                raise ConfigError(
                    f"{where}: `augment.{bands}` must be at most `features.num_mels`, {num_mels}, but is "
                    f"{getattr(augment, bands)}; lower it"
                )
        return
    sections = {
        "augment": (config.augment, AugmentConfig(), AUGMENT_OF_MEL),
        "loop": (config.loop, LoopConfig(), LOOP_OF_STACKS),
    }
    unused = [
        f"{section}.{name}"
        for section, (own, plain, names) in sections.items()
        for name in names
        if getattr(own, name) and getattr(own, name) != getattr(plain, name)
    ]
    if unused:
        raise ConfigError(
            f"{where}: these are for networks of log-mel features and must not be set for wav2vec2: {', '.join(unused)}"
        )


def config_from_dict(tree: dict[str, Any], where: str) -> Config:
    """Make a configuration of a plain tree, for example from a checkpoint.

    Raises:
        ConfigError: The tree is wrong; the message begins with `where` and lists each unknown key and wrong value.
    """
    if isinstance(tree.get("model"), dict) and tree["model"].get("name") == Wav2Vec2Config.name:
        tree = {"features": {"name": WaveformSettings.name}, **tree}
    return validated(_ADAPTER, tree, where, tagged=("model", "features"))
