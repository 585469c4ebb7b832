"""The configuration tree and its loader: one YAML file, only what differs from the defaults, no unknown keys."""

from collections import Counter
from copy import copy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from carnelian_training import config_errors, strict_yaml
from carnelian_training.checks import (
    check_at_least_one,
    check_not_negative,
    check_positive,
    check_probability,
    check_range,
)
from carnelian_training.data.span_masks import SpanMaskConfig
from carnelian_training.features import FeatureSettings
from carnelian_training.front_end import Features, channels
from carnelian_training.loop_config import InitConfig, LoopConfig, OptimizerConfig, check_name, check_stages
from carnelian_training.models.jasper import JasperConfig
from carnelian_training.models.pretraining import PretrainingConfig
from carnelian_training.models.quartznet import QuartzNetConfig
from carnelian_training.models.wav2vec2 import Wav2Vec2Config
from carnelian_training.text import LABEL_CHARACTERS
from carnelian_training.waveform import WaveformSettings

T = TypeVar("T")

LABELS = tuple(LABEL_CHARACTERS)


class ConfigError(ValueError):
    """The configuration is wrong; the message lists every mistake with its path."""


@dataclass(frozen=True, kw_only=True)
class ManifestConfig:
    """One training manifest."""

    path: Path
    """NeMo JSON lines; relative to the working directory."""
    repeat: int = 1
    """How often each of its clips comes in one epoch."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "repeat")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which clips, and how they are batched."""

    train: tuple[ManifestConfig, ...] = ()
    dev: Path | None = None
    batch_s: float = 128.0
    """Seconds of audio per step, padding included, over all processes together."""
    device_batch_s: float | None = None
    """Seconds of audio, padding included, that a device takes at once. A process whose share of a step is larger takes
    it in parts and adds up their gradients. A longer clip comes alone; none: no limit."""
    max_duration_s: float = 16.7
    """Longer training clips are left out and counted in the log."""
    min_duration_s: float = 0.2
    num_threads: int = 2
    """DALI threads that decode audio and compute features."""
    prefetch_batches: int = 2
    """Batches that DALI works on ahead of training."""

    def __post_init__(self) -> None:
        check_positive(self, "batch_s", "device_batch_s", "num_threads", "prefetch_batches")
        check_not_negative(self, "min_duration_s")
        if not self.min_duration_s <= self.max_duration_s:
            raise ValueError(
                f"`min_duration_s` must be at most `max_duration_s`, {self.max_duration_s:g}, "
                f"but is {self.min_duration_s:g}"
            )


@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """Additive noise from files."""

    path: Path
    """A folder of sound files, searched with its subfolders; relative to the working directory."""
    probability: float = 0.5
    snr_db: tuple[float, float] = (5.0, 30.0)

    def __post_init__(self) -> None:
        check_probability(self, "probability")
        check_range("snr_db", self.snr_db, -20.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class ReverberationConfig:
    """Convolution with the impulse responses of rooms."""

    path: Path
    """A folder of impulse responses as sound files, searched with its subfolders."""
    probability: float = 0.5

    def __post_init__(self) -> None:
        check_probability(self, "probability")


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Training only. Masks as in SpecAugment (Park et al. 2019), filled with 0, the mean of normalised features.

    wav2vec 2.0, which has no log-mel features, has masks of its own: `spans`.
    """

    speed: tuple[float, float] = (0.85, 1.15)
    """Range of the speed factor, by resampling: tempo, pitch and formants move together."""
    speed_factors: tuple[float, ...] = ()
    """If given, one of these is drawn instead of a number within `speed`, for example [0.9, 1.0, 1.1]."""
    speed_probability: float = 1.0
    reverberation: ReverberationConfig | None = None
    noise: NoiseConfig | None = None
    gain_db: tuple[float, float] = (0.0, 0.0)
    dither: float = 0.0
    """Standard deviation of white noise that is added last, full scale 1 (NeMo's recipes: 1e-5)."""
    frequency_warp: float = 0.0
    """Vocal tract length perturbation: frequencies are scaled by a factor uniform in 1 +- this."""
    frequency_masks: int = 2
    frequency_mask_bands: int = 15
    """Widest mask, in mel bands; the width is uniform from 0."""
    time_masks: int = 2
    time_mask_frames: int = 55
    """Widest mask, in frames of 10 ms."""
    time_mask_share: float = 0.1
    """And never more than this share of the clip."""
    cutout_boxes: int = 0
    """Rectangles of bands by frames (DeVries and Taylor 2017, arXiv:1708.04552), filled with 0 as well."""
    cutout_bands: int = 20
    """Widest box; the width is uniform from 0."""
    cutout_frames: int = 5
    """Longest box, likewise."""
    spans: SpanMaskConfig = field(default_factory=SpanMaskConfig)

    def __post_init__(self) -> None:
        check_range("speed", self.speed, 0.5, 2.0)
        if not all(0.5 <= factor <= 2.0 for factor in self.speed_factors):
            raise ValueError(f"`speed_factors` must be within 0.5 to 2.0, but are {list(self.speed_factors)}")
        check_range("gain_db", self.gain_db, -60.0, 60.0)
        check_not_negative(self, "dither", "frequency_masks", "frequency_mask_bands", "time_masks", "time_mask_frames")
        check_not_negative(self, "cutout_boxes", "cutout_bands", "cutout_frames")
        if not 0.0 <= self.frequency_warp < 0.5:
            raise ValueError(f"`frequency_warp` must be within 0 to 0.5, but is {self.frequency_warp}")
        check_probability(self, "speed_probability", "time_mask_share")

    @property
    def fastest(self) -> float:
        """The highest speed that a clip can be played at."""
        return max(1.0, *(self.speed_factors or self.speed)) if self.speed_probability else 1.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that makes a model. Written beside and into each checkpoint."""

    name: str
    """Also the name of the config file, the checkpoint and the Triton model."""
    model: Annotated[QuartzNetConfig | JasperConfig | Wav2Vec2Config, Field(discriminator="name")]
    """The architecture that `model.name` says."""
    labels: tuple[str, ...] = LABELS
    """One character each; the CTC blank comes after the last and is not listed."""
    features: Features = field(default_factory=FeatureSettings)
    """Log-mel, or `name: waveform`, which wav2vec 2.0 has by default."""
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    init: InitConfig = field(default_factory=InitConfig)
    pretraining: PretrainingConfig | None = None
    """For wav2vec 2.0: pre-train on sound alone, without reading transcripts; none: train a recogniser."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        check_name(self.name)
        if not self.labels:
            raise ValueError("`labels` must hold one character at least, but is empty")
        wrong = [label for label, count in Counter(self.labels).items() if len(label) != 1 or count > 1]
        if wrong:
            raise ValueError(f"`labels` must be distinct single characters, but these are not: {wrong}")
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
        check_stages(self.init, self.model.num_stages)


# The rule reaches nested dataclasses by propagation; a test pins that.
_ADAPTER = TypeAdapter(with_config(ConfigDict(extra="forbid"))(Config))


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Read a recogniser's YAML file and apply ``a.b=value`` overrides to its tree before validation.

    Raises:
        ConfigError: with every unknown key and wrong value, by path.
    """
    tree = load_tree(path, overrides)
    inherit(tree)
    return config_from_dict(tree, str(path))


def load_tree(path: Path, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """The plain tree of a YAML file with its overrides, not validated.

    Raises:
        ConfigError: The file is not a mapping, or an override cannot be applied.
    """
    try:
        tree = strict_yaml.load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold a mapping, but holds {type(tree).__name__}")
    apply_overrides(tree, overrides)
    expanded: dict[str, Any] = _expand_home(tree)
    return expanded


def _expand_home(node: Any) -> Any:
    """Paths in the home folder, which a shell expands neither in a file nor behind the `=` of an override."""
    if isinstance(node, dict):
        return {key: _expand_home(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_expand_home(value) for value in node]
    return str(Path(node).expanduser()) if isinstance(node, str) and node.startswith("~/") else node


def apply_overrides(tree: dict[str, Any], overrides: tuple[str, ...]) -> None:
    """Set ``a.b=value`` in a plain tree; of a list, ``a.0.b=value``.

    Raises:
        ConfigError: An override cannot be read, or its place is no section.
    """
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"an override must look like a.b=value, but is {override!r}")
        node: Any = tree
        path = ""
        *parents, leaf = key.split(".")
        for parent in parents:
            place = _place(node, parent, path, override)
            child = copy(node.setdefault(parent, {}) if isinstance(node, dict) else node[place])  # YAML's `*` shares it
            node[place] = child
            node, path = child, f"{path}.{parent}".lstrip(".")
        place = _place(node, leaf, path, override)
        try:
            node[place] = strict_yaml.load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {override!r}: the value cannot be read as YAML: {error}") from error


def _place(node: Any, key: str, path: str, override: str) -> str | int:
    """Where a section or a list has what an override calls `key`."""
    if isinstance(node, dict):
        return key
    if not isinstance(node, list):
        raise ConfigError(f"override {override!r}: `{path}` is a value, not a section")
    if not (key.isdecimal() and int(key) < len(node)):
        raise ConfigError(f"override {override!r}: `{path}` has positions 0 to {len(node) - 1}, but no {key!r}")
    return int(key)


def inherit(tree: dict[str, Any]) -> None:
    """Fill in what a fine-tuning's YAML leaves out of `model`, `labels` and `features` from its checkpoint, in place.

    A section without its `name` is laid over the checkpoint's; one with its `name` stands alone.

    Raises:
        CheckpointError: `init.checkpoint` cannot be read.
        ConfigError: The YAML names a stage that the checkpoint does not have.
    """
    init = tree.get("init")
    if isinstance(init, dict) and isinstance(init.get("checkpoint"), str) and not _is_whole(tree):
        from carnelian_training.checkpoint import load  # which needs this module

        source = config_to_dict(load(Path(init["checkpoint"]))[0])
        wanted = tree.get("model")
        if isinstance(wanted, dict) and wanted.get("name", source["model"]["name"]) != source["model"]["name"]:
            return  # `finetune.py` reports the mismatch
        sections = {"model", "labels", "features"} - ({"labels"} if source.get("pretraining") else set())
        for section in sections & source.keys():
            if section not in tree:
                tree[section] = source[section]
            elif isinstance(tree[section], dict) and "name" not in tree[section]:
                tree[section] = _laid_over(source[section], tree[section], section)
        if "text" in source and isinstance(text := tree.setdefault("text", {}), dict):
            for key in ("tokens", "labels"):
                text.setdefault(key, source["text"].get(key))


def _is_whole(tree: dict[str, Any]) -> bool:
    """Whether nothing is left to a checkpoint, as in a run's own YAML, which goes on where that file is gone."""
    model, features, text = (tree.get(key) for key in ("model", "features", "text"))
    if not (isinstance(model, dict) and "name" in model):
        return False
    if isinstance(text, dict):
        return {"tokens", "labels"} <= text.keys()
    log_mel = {field.name for field in fields(FeatureSettings)}
    return "labels" in tree and isinstance(features, dict) and ("name" in features or log_mel <= features.keys())


def _laid_over(node: Any, changes: Any, path: str) -> Any:
    """A plain tree with changes; those of a list, such as `model.stages`, are a mapping from positions."""
    if isinstance(node, dict) and isinstance(changes, dict):
        return node | {key: _laid_over(node.get(key), value, f"{path}.{key}") for key, value in changes.items()}
    if isinstance(node, list) and isinstance(changes, dict):
        positions = {str(i): i for i in range(len(node))}
        if absent := [key for key in changes if str(key) not in positions]:
            raise ConfigError(
                f"`{path}` of the checkpoint has positions 0 to {len(node) - 1}, but these are given: {absent}"
            )
        changed = list(node)
        for key, value in changes.items():
            i = positions[str(key)]
            changed[i] = _laid_over(node[i], value, f"{path}.{key}")
        return changed
    return changes


def config_from_dict(tree: dict[str, Any], where: str) -> Config:
    """Validate a plain tree, for example one out of a checkpoint.

    Raises:
        ConfigError: with every unknown key and wrong value, by path; `where` opens the message.
    """
    if isinstance(tree.get("model"), dict) and tree["model"].get("name") == Wav2Vec2Config.name:
        tree = {"features": {"name": WaveformSettings.name}, **tree}
    return validated(_ADAPTER, tree, where, tagged=("model", "features"))


def validated(adapter: TypeAdapter[T], tree: dict[str, Any], where: str, *, tagged: tuple[str, ...] = ()) -> T:
    """Validate a plain tree with a pydantic adapter.

    Args:
        adapter: of the configuration's class.
        tree: as YAML gives it.
        where: opens the message of an error.
        tagged: sections of which there are several kinds, told apart by their `name`.

    Raises:
        ConfigError: with every unknown key and wrong value, by path.
    """
    try:
        return adapter.validate_python(tree)
    except ValidationError as error:
        found = config_errors.describe(error, tagged)
        raise ConfigError("\n".join([f"{where}: {len(found)} mistake(s)", *(f"  {line}" for line in found)])) from error


def config_to_dict(config: object) -> dict[str, Any]:
    """The plain tree of a configuration, as YAML and JSON can hold it."""
    plain: dict[str, Any] = TypeAdapter(type(config)).dump_python(config, mode="json")
    return plain


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a plain tree by their dotted paths."""
    if isinstance(tree, dict):
        children = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list):
        children = [(str(i), value) for i, value in enumerate(tree)]
    else:
        return {path: tree}
    leaves: dict[str, Any] = {}
    for key, value in children:
        leaves |= flat(value, f"{path}.{key}" if path else key)
    return leaves
