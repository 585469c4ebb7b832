"""The `.pt` files of Jasper and QuartzNet of NVIDIA's DeepLearningExamples (DLE): weights without a configuration.

This follows DLE's source at commit 729963dd; no original checkpoint was available. The features are those of its
PyTorch module: ceil(n / 160) frames, 1e-5 added to the standard deviation. DLE adds random noise to every clip, even at
inference, and 1e-20 inside the logarithm. Here the mean energy of that noise is added inside the logarithm instead, so
that a transcript depends only on its clip.
"""

import logging
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from carnelian_training import strict_yaml
from carnelian_training.config import LABELS, Config
from carnelian_training.features import SAMPLE_RATE_HZ
from carnelian_training.foreign.options import Options, check, mel_features, section, single
from carnelian_training.foreign.stack_keys import DLE_JASPER, DLE_QUARTZNET, DLE_V1_PREFIXES, take
from carnelian_training.foreign.stages import model_tree
from carnelian_training.foreign.tensors import plain_tensors
from carnelian_training.weight_files import CheckpointError

logger = logging.getLogger(__name__)

DITHER, LOG_GUARD = 1e-5, 1e-20
FEATURES: Options = {"std_guard": 1e-5, "log_guard": DITHER**2, "frame_count": "ceil"}
"""The features of DLE where they differ from the defaults. White noise of variance v has a mean energy of about v in a
mel band: 3.8 v by the window's and the filters' sums of squares, times the gain of the pre-emphasis, 0.001 at 0 Hz to
3.9 at 8 kHz."""
_V1_UNUSED = ("acoustic_model.", "audio_preprocessor.")  # copies and tables, which DLE drops too
_FEATURES_FIXED: Options = {
    "sample_rate": SAMPLE_RATE_HZ,
    "normalize": "per_feature",
    "window": "hann",
    "log": True,
    "frame_splicing": 1,
}
_FEATURES_OTHERWISE: Options = {"sample_rate": 8000, "window": "hamming"}
"""What DLE takes where a file does not say; its own files do."""
_FEATURES_CARRIED = {"window_size", "window_stride", "n_fft", "n_filt", "preemph", "lowfreq", "highfreq", "dither"}
_FEATURES_IGNORED = {"pad_align", "pad_to_max_duration", "max_duration", "spec_augment", "cutout_augment"}


def tensors(content: Any, *, is_raw: bool, path: Path) -> dict[str, Tensor]:
    """Return the tensors of a loaded DLE file under the names of DLE's current version.

    `content` comes from `torch.load`. With `is_raw` they are the trained weights instead of their exponential moving
    average.

    Raises:
        CheckpointError: The content is not that of a DLE file, or its weights are not what `plain_tensors` allows.
    """
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise CheckpointError(
            f"{path} must be a checkpoint of Carnelian, a .nemo file, a Hugging Face folder (not a file in it), a .pt "
            "of fairseq or a DLE .pt with a `state_dict`, but is none"
        )
    average = content.get("ema_state_dict")
    found = content["state_dict"] if is_raw or average is None else average
    result = {}
    for name, tensor in plain_tensors(found, path).items():
        if name.startswith(_V1_UNUSED):
            continue
        for old, new in DLE_V1_PREFIXES.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        result[name] = tensor
    if not any(name.startswith("encoder.layers.") for name in result):
        raise CheckpointError(f"{path} must hold `encoder.layers` (Jasper, QuartzNet), but holds other tensors")
    if not is_raw and average is None:
        logger.warning("%s has no average of its weights (EMA); taking the weights themselves", path)
    return result


def config_tree(found: dict[str, Tensor], yaml_file: Path | None, where: str) -> Options:
    """Return the `model`, `labels` and `features` of a Carnelian configuration for a DLE checkpoint.

    Without DLE's YAML file, the network follows from the shapes of the tensors. Strides and dilations are then those of
    every published Jasper and QuartzNet: the first block halves the frame rate, and the last one with a kernel above 1
    has dilation 2. The labels are then a-z, apostrophe and space.

    Raises:
        CheckpointError: The YAML file cannot be read, or has options that Carnelian does not support.
    """
    if yaml_file is None:
        logger.warning("%s says nothing about labels, strides and dropout; taking those of the published models", where)
        return {
            "model": model_tree(_blocks(found, where), 64, "kernel_size", where, scales_kernels=False),
            "labels": list(LABELS),
            "features": FEATURES,
        }
    tree, where = _read_yaml(yaml_file), str(yaml_file)
    features = _features(
        section(section(tree, "input_val", where), "filterbank_features", f"{where}, `input_val`"), where
    )
    family = "quartznet" if "quartznet" in tree else "jasper"
    encoder = section(section(tree, family, where), "encoder", f"{where}, `{family}`")
    if family != (wanted := "quartznet" if _is_quartznet(found) else "jasper"):
        raise CheckpointError(
            f"{where} must have a section `{wanted}`, for the weights are of that, but has `{family}`"
        )
    fixed = {"activation": "relu", "frame_splicing": 1}
    check(
        encoder,
        fixed=fixed,
        carried={"blocks", "in_feats", "use_conv_masks"},
        ignored={"init"},
        where=f"{where}, `encoder`",
    )
    if not encoder.get("use_conv_masks", False):
        logger.warning(
            "%s: `use_conv_masks` is false, so DLE lets padding into a clip's end; here it never does", where
        )
    model = model_tree(
        encoder.get("blocks"),
        features["num_mels"],
        "kernel_size",
        f"{where}, `encoder.blocks`",
        scales_kernels=family == "quartznet",
    )
    return {"model": model, "labels": tree.get("labels"), "features": features}


def _read_yaml(yaml_file: Path) -> Options:
    if yaml_file.suffix == ".toml":
        raise CheckpointError(
            f"{yaml_file} must be YAML, but is TOML of DLE's first versions: a published model needs none, "
            "and one with other labels only --set 'labels=[...]'"
        )
    try:
        tree = strict_yaml.load(yaml_file.read_text(encoding="utf-8"), unique_keys=False)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CheckpointError(f"{yaml_file}: cannot be read as YAML: {error}") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{yaml_file}: must hold a mapping, but holds {type(tree).__name__}")
    return tree


def _features(options: Options, where: str) -> Options:
    """Convert DLE's `filterbank_features` to the `features` of a configuration."""
    where = f"{where}, `filterbank_features`"
    check(options, fixed=_FEATURES_FIXED, carried=_FEATURES_CARRIED, ignored=_FEATURES_IGNORED, where=where)
    for name, own in _FEATURES_OTHERWISE.items():
        if name not in options:
            raise CheckpointError(
                f"{where} must give `{name}`: without it DLE takes {own!r}; supported is {_FEATURES_FIXED[name]!r}"
            )
    dither = single(options.get("dither", DITHER), f"{where}, `dither`")
    ours = {"num_mels": options.get("n_filt", 64), "log_guard": max(dither**2, LOG_GUARD)}
    return FEATURES | mel_features(options, where) | ours


def _blocks(found: dict[str, Tensor], where: str) -> list[Options]:
    """Derive DLE's list of blocks from the shapes of their tensors.

    Raises:
        CheckpointError: A block has no convolution.
    """
    bodies, panes = defaultdict(list), defaultdict(set)
    for name, tensor in found.items():
        if match := re.match(r"encoder\.layers\.(\d+)\.(m?conv|res)\.([^.]*)", name):
            if match[2] == "res":
                panes[match[1]].add(match[3])
            else:
                bodies[match[1]].append(tensor)
    blocks: list[Options] = []
    while (i := str(len(blocks))) in bodies:
        convs = [tensor for tensor in bodies[i] if tensor.ndim == 3]  # in the order of the layers
        if not convs:
            raise CheckpointError(f"{where}: `encoder.layers.{i}` must hold a convolution's weights, but holds none")
        residuals = panes[i]
        is_separable = convs[0].shape[1] == 1
        blocks.append(
            {
                "filters": convs[-1].shape[0],
                "repeat": len(convs) // (2 if is_separable else 1),
                "kernel_size": convs[0].shape[2],
                "stride": 2 if not blocks else 1,
                "dilation": 1,
                "residual": bool(residuals),
                "residual_dense": len(residuals) > 1,
                "separable": is_separable,
            }
        )
    if any(block["residual_dense"] for block in blocks):
        for block in blocks:
            block["residual_dense"] = block["residual"]
    wide = [block for block in blocks if block["kernel_size"] > 1]
    if wide and not wide[-1]["residual"]:
        wide[-1]["dilation"] = 2
    return blocks


def _is_quartznet(found: dict[str, Tensor]) -> bool:
    return any(name.startswith("encoder.layers.0.mconv.") for name in found)


def weights(found: dict[str, Tensor], config: Config, path: Path) -> dict[str, Tensor]:
    """Convert the tensors to the weights of a network of `config`.

    Raises:
        CheckpointError: Tensors do not fit; the message names each.
    """
    return take(found, config, DLE_QUARTZNET if _is_quartznet(found) else DLE_JASPER, path)
