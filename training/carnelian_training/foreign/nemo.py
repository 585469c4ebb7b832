"""Models of NeMo: the configuration and the tensors of a `.nemo` file, or of a `.ckpt` file of NeMo's training.

The features are those of NeMo 2.5 and later, whatever version wrote the file: zeros beyond a clip's ends, n // hop
frames, 1e-5 added to the standard deviation. NeMo 1.0 to 2.4 reflected the signal at the ends and had a frame
more; before 1.0, it reflected too and had ceil(n / hop) frames.
"""

import logging
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from carnelian_training.config import Config
from carnelian_training.config_errors import MAX_SHOWN, shown
from carnelian_training.features import SAMPLE_RATE_HZ, FeatureSettings, hann
from carnelian_training.foreign import nemo_archive, unpickling
from carnelian_training.foreign.options import Options, check, mel_features, samples, section
from carnelian_training.foreign.stack_keys import NEMO, NEMO_UNMASKED, give, take
from carnelian_training.foreign.stages import block_list, model_tree
from carnelian_training.foreign.tensors import plain_name
from carnelian_training.mel import to_hz, to_mel
from carnelian_training.models.blocks import StackConfig
from carnelian_training.models.jasper import JasperConfig
from carnelian_training.waveform import WaveformSettings
from carnelian_training.weight_files import CheckpointError

logger = logging.getLogger(__name__)

MODEL_CLASS = "nemo.collections.asr.models.ctc_models.EncDecCTCModel"
MODULES = "nemo.collections.asr.modules"
FEATURE_TENSORS = "preprocessor.featurizer."
AS_TODAY = {"std_guard": 1e-5, "edges": "zero", "frame_count": "floor"}
FIRST_AS_TODAY = (2, 5)
"""The first version of NeMo with the features `AS_TODAY`."""
AS_TORCHAUDIO = {"std_guard": 1e-5, "edges": "reflect", "frame_count": "floor + 1", "magnitude_power": 2}
"""The features with `use_torchaudio: true`, where the power is always 2."""
TABLE_TOLERANCE = 1e-4
"""The tolerance for the stored window and mel filters, because versions of librosa round differently. The rounding of
16-bit tables is added to it."""

_PREPROCESSOR_FIXED: Options = {
    "sample_rate": SAMPLE_RATE_HZ,
    "window": "hann",
    "normalize": "per_feature",
    "log": True,
    "frame_splicing": 1,
    "exact_pad": False,
    "pad_value": 0,
    "mel_norm": "slaney",
    "feat_type": "logfbank",
    "use_grads": False,  # it would add a constant to each magnitude
}
_PREPROCESSOR_CARRIED = {"window_size", "window_stride", "n_window_size", "n_window_stride", "n_fft", "features"}
_PREPROCESSOR_CARRIED |= {"preemph", "lowfreq", "highfreq", "log_zero_guard_type", "log_zero_guard_value", "mag_power"}
_PREPROCESSOR_CARRIED |= {"use_torchaudio", "stft_conv"}
# Options that only affect training, padding (which masks undo), or how the same values are computed.
_PREPROCESSOR_IGNORED = {"dither", "pad_to", "max_duration", "rng", "nb_augmentation_prob", "nb_max_freq"}
_PREPROCESSOR_IGNORED |= {"stft_exact_pad", "int_values"}
_ENCODER_FIXED: Options = {
    "activation": "relu",
    "normalization_mode": "batch",
    "residual_mode": "add",
    "frame_splicing": 1,
    "quantize": False,
}


def is_training_checkpoint(content: Any) -> bool:
    """Return whether the content of a `.ckpt` file is a training checkpoint of NeMo (PyTorch Lightning)."""
    return isinstance(content, dict) and "hyper_parameters" in content and "state_dict" in content


def training_options(content: Any, where: str) -> Options:
    """Return NeMo's configuration from the content of a training checkpoint.

    Raises:
        CheckpointError: The checkpoint has no configuration.
    """
    found = unpickling.plain(content["hyper_parameters"], where)
    tree = found.get("cfg", found) if isinstance(found, dict) else None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{where} must hold NeMo's configuration in `hyper_parameters`, but does not")
    return tree


def config_tree(tree: Options, where: str) -> Options:
    """Convert NeMo's configuration to the `model`, `labels` and `features` of a Carnelian configuration.

    Raises:
        CheckpointError: The model is not a Jasper or QuartzNet with one label per character, or has options that
            Carnelian does not support.
    """
    for name, kind in {
        "preprocessor": "AudioToMelSpectrogramPreprocessor",
        "encoder": "ConvASREncoder",
        "decoder": "ConvASRDecoder",
    }.items():
        part = tree.get(name)
        found = str((part.get("_target_") or part.get("cls") or kind) if isinstance(part, dict) else None)
        if not found.endswith(f".{kind}") and found != kind:
            raise CheckpointError(
                f"{where}: `{name}` must be of the class {kind} (Jasper, QuartzNet), but is {found[:MAX_SHOWN]}"
            )
    if tree.get("tokenizer") is not None:
        raise CheckpointError(f"{where} must have one label per character, but has a `tokenizer` of word pieces")

    features = _features(section(tree, "preprocessor", where), f"{where}, `preprocessor`")
    encoder = section(tree, "encoder", where)
    carried, ignored = {"jasper", "feat_in", "conv_mask"}, {"init_mode", "norm_groups"}
    check(encoder, fixed=_ENCODER_FIXED, carried=carried, ignored=ignored, where=f"{where}, `encoder`")
    if not encoder.get("conv_mask", True):
        logger.warning(
            "%s: `conv_mask` is false, so NeMo lets padding into a clip's end; here it never does: "
            "log-probabilities differ from NeMo's near a clip's end",
            where,
        )
    decoder = section(tree, "decoder", where)
    labels = decoder.get("vocabulary") or tree.get("labels")
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise CheckpointError(f"{where}: `decoder.vocabulary` must be a list of characters, but is {shown(labels)}")
    model = model_tree(
        encoder.get("jasper"), features["num_mels"], "kernel", f"{where}, `encoder.jasper`", scales_kernels=True
    )
    return {"model": model, "labels": labels, "features": features}


def _features(options: Options, where: str) -> Options:
    check(options, fixed=_PREPROCESSOR_FIXED, carried=_PREPROCESSOR_CARRIED, ignored=_PREPROCESSOR_IGNORED, where=where)
    guard = options.get("log_zero_guard_value", 2.0**-24)
    power = options.get("mag_power", 2)
    float32 = torch.finfo(torch.float32)
    features = AS_TODAY | mel_features(options, where)
    features |= {
        "num_mels": options.get("features", 64),
        "magnitude_power": int(power) if power in (1, 2) else power,
        "log_guard": {"tiny": float32.tiny, "eps": float32.eps}[guard] if guard in ("tiny", "eps") else guard,
        "log_guard_by": options.get("log_zero_guard_type", "add"),
    }
    if not options.get("use_torchaudio"):
        return features
    logger.warning(
        "%s: `use_torchaudio` is true; the features are those of the versions of NeMo that knew it, but 2.7 and later "
        "do not look at it: if one of these trained the model, set `features.edges` to zero and `features.frame_count` "
        "to floor",
        where,
    )
    return features | AS_TORCHAUDIO


def check_whole(content: Any, where: str) -> None:
    """Check that the content of a `.pt` or `.ckpt` file is not only a part of a model of NeMo.

    Raises:
        CheckpointError: It is weights without their configuration, or half of them.
    """
    found = content.get("state_dict", content) if isinstance(content, dict) else None
    names = [plain_name(name) for name in found if isinstance(name, str)] if isinstance(found, dict) else []
    if any(name.startswith("encoder.encoder.") for name in names):
        raise CheckpointError(
            f"{where} must come with NeMo's configuration, but holds weights alone: give the .nemo file that they are "
            f"from, or make one: tar -cf x.nemo {nemo_archive.CONFIG_FILE} {nemo_archive.WEIGHTS_FILE}"
        )
    if any(re.match(r"encoder\.\d+\.m?conv\.|decoder_layers\.0\.", name) for name in names):
        raise CheckpointError(
            f"{where} must be a whole model, but is half of a checkpoint of NeMo 0.x, which has encoder and decoder in "
            "two files: make a .nemo file of both, see `NeMo 0.x` in training/docs/checkpoints.md"
        )


def weights(tensors: dict[str, Tensor], tree: Options, config: Config, path: Path) -> dict[str, Tensor]:
    """Convert the tensors to the weights of a network of `config`; `tree` is NeMo's configuration.

    Raises:
        CheckpointError: Tensors do not fit, or the stored window or mel filters are not those of `config.features`.
    """
    assert isinstance(config.features, FeatureSettings)
    settings = config.features
    shapes = {"window": [settings.window_samples], "fb": [1, settings.num_mels, settings.fft_size // 2 + 1]}
    for name, shape in shapes.items():
        found = tensors.get(FEATURE_TENSORS + name)
        if found is None:
            continue
        difference = str(list(found.shape))
        if list(found.shape) == shape:  # so the table computed here is no larger than the one in the file
            table = _feature_tensor(name, settings)
            rounding = torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
            if torch.allclose(found.float(), table, rounding, TABLE_TOLERANCE):
                continue
            difference = f"{(found.float() - table).abs().max():.1g} off"
        raise CheckpointError(
            f"{path}: {FEATURE_TENSORS}{name} must be what `preprocessor` describes, {shape}, but is another table, "
            f"{difference}"
        )
    _warn_of_versions(tree, tensors, settings, str(path))
    network = {name: tensor for name, tensor in tensors.items() if not name.startswith("preprocessor.")}
    is_masked = any(name.endswith(f".{NEMO.conv}") for name in network)
    return take(network, config, NEMO if is_masked else NEMO_UNMASKED, path)


def _warn_of_versions(tree: Options, tensors: dict[str, Tensor], settings: FeatureSettings, where: str) -> None:
    """Log where the version of NeMo that made a file may have had other features than `settings`."""
    version = re.match(r"(\d{1,9})\.(\d{1,9})", str(tree.get("nemo_version")))
    is_old = version is None or (int(version[1]), int(version[2])) < FIRST_AS_TODAY
    if is_old and settings.edges == AS_TODAY["edges"] and settings.frame_count == AS_TODAY["frame_count"]:
        logger.warning(
            "%s: %s; before %d.%d, features reflected at a clip's ends and had a frame more than those taken here: if "
            "such a version trained it last, carnelian-train import --set features.edges=reflect "
            "--set 'features.frame_count=floor + 1' (before 1.0, ceil)",
            where,
            "it names no version of NeMo" if version is None else f"NeMo {version[0]} wrote its configuration",
            *FIRST_AS_TODAY,
        )
    # Versions that write `nemo_version` write these tensors too where they look at the option.
    says_so = version is None and section(tree, "preprocessor", where).get("stft_conv")
    if says_so or any(name.startswith(f"{FEATURE_TENSORS}stft.") for name in tensors):
        logger.warning(
            "%s: `stft_conv` is true, so NeMo's window was periodic; here it is symmetric: features of "
            "speech differ by up to about 0.2",
            where,
        )


def write(path: Path, config: Config, weights: dict[str, Tensor]) -> list[str]:
    """Write a `.nemo` file that NeMo 3.0 restores.

    Returns:
        A message for each setting of the features that differs in NeMo, which has no option for it.

    Raises:
        CheckpointError: NeMo does not support the network.
    """
    if isinstance(config.features, WaveformSettings):
        raise CheckpointError(
            f"a .nemo file must hold a Jasper or QuartzNet, not {config.model.name}: see to-huggingface"
        )
    if config.model.head_frames != 1:
        raise CheckpointError(
            f"`model.head_frames` must be 1, for NeMo has no other, but is {config.model.head_frames}"
        )
    tree = _nemo_tree(config)
    tensors = give(weights, config, NEMO)
    tensors |= {FEATURE_TENSORS + name: _feature_tensor(name, config.features) for name in ("window", "fb")}
    nemo_archive.write(path, tree, tensors)
    return [
        f"`features.{name}` is {getattr(config.features, name)!r}, but NeMo has {value!r} and no option for it"
        for name, value in AS_TODAY.items()
        if getattr(config.features, name) != value
    ]


def _nemo_tree(config: Config) -> dict[str, Any]:
    features, labels = config.features, list(config.labels)
    assert isinstance(features, FeatureSettings)
    assert isinstance(config.model, StackConfig)
    seconds = {
        "window_size": _seconds(features.window_samples),
        "window_stride": _seconds(features.hop_samples),
    }
    preprocessor = {
        "_target_": f"{MODULES}.AudioToMelSpectrogramPreprocessor",
        "sample_rate": SAMPLE_RATE_HZ,
        "normalize": "per_feature",
        **seconds,
        "window": "hann",
        "features": features.num_mels,
        "n_fft": features.fft_size,
        "lowfreq": features.low_hz,
        "highfreq": features.high_hz,
        "preemph": features.preemphasis or None,
        "mag_power": float(features.magnitude_power),
        "log_zero_guard_type": features.log_guard_by,
        "log_zero_guard_value": features.log_guard,
        "frame_splicing": 1,
        "dither": 1e-5,
    }
    is_dense = isinstance(config.model, JasperConfig) and config.model.dense
    return {
        "target": MODEL_CLASS,
        "nemo_version": "3.0.0",
        "sample_rate": SAMPLE_RATE_HZ,
        "labels": labels,
        "preprocessor": preprocessor,
        "encoder": {
            "_target_": f"{MODULES}.ConvASREncoder",
            "feat_in": features.num_mels,
            "activation": "relu",
            "conv_mask": True,
            "jasper": block_list(list(config.model.stages), is_dense),
        },
        "decoder": {
            "_target_": f"{MODULES}.ConvASRDecoder",
            "feat_in": config.model.stages[-1].filters,
            "num_classes": len(labels),
            "vocabulary": labels,
        },
    }


def _seconds(count: int) -> float:
    """Return seconds that NeMo, which rounds down, converts to `count` samples; 1001 / 16000 would give 1000."""
    seconds = count / SAMPLE_RATE_HZ
    return seconds if samples(seconds) == count else math.nextafter(seconds, math.inf)


def _feature_tensor(name: str, settings: FeatureSettings) -> Tensor:
    """Return a table that NeMo stores: `window` [window_samples] or `fb` [1, num_mels, fft_size / 2 + 1], float32."""
    if name == "window":
        return torch.tensor(hann(settings.window_samples))
    return torch.from_numpy(mel_filters(settings))[None]


def mel_filters(settings: FeatureSettings) -> npt.NDArray[np.float32]:
    """Compute triangular mel filters of unit area on Slaney's mel scale: [num_mels, fft_size / 2 + 1] float32."""
    low, high = to_mel(torch.tensor([settings.low_hz, settings.high_hz], dtype=torch.float64))
    edges = to_hz(torch.linspace(low, high, settings.num_mels + 2, dtype=torch.float64)).numpy()
    bins = np.linspace(0, SAMPLE_RATE_HZ / 2, settings.fft_size // 2 + 1)
    rise = (bins - edges[:-2, None]) / np.diff(edges)[:-1, None]
    fall = (edges[2:, None] - bins) / np.diff(edges)[1:, None]
    area = 2 / (edges[2:] - edges[:-2])[:, None]
    filters: npt.NDArray[np.float32] = (np.clip(np.minimum(rise, fall), 0, None) * area).astype(np.float32)
    return filters
