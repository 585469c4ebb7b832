"""The `.pt` files of fairseq's wav2vec 2.0, pre-trained or fine-tuned, in the old layout (`args`) or the new (`cfg`).

This follows fairseq's source (v0.12.2, `models/wav2vec/wav2vec2.py` and `wav2vec2_asr.py`). NVIDIA's
DeepLearningExamples write the old layout; their Hourglass is supported. No code of a file is run: `unpickling.py` reads
it.
"""

import ast
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from carnelian_training.config import Config
from carnelian_training.config_errors import shown
from carnelian_training.features import SAMPLE_RATE_HZ
from carnelian_training.foreign import unpickling
from carnelian_training.foreign.alphabet import Alphabet, fold
from carnelian_training.foreign.options import NO_SPANS, Options, carry, single
from carnelian_training.foreign.tensors import num_rows
from carnelian_training.foreign.wav2vec2_keys import FAIRSEQ, FAIRSEQ_FINE_TUNED, take
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config
from carnelian_training.waveform import WaveformSettings
from carnelian_training.weight_files import CheckpointError

logger = logging.getLogger(__name__)

LONGEST = 500
"""The largest number of characters of an expression, and of entries of a list in its value."""
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
"""The special symbols with which every dictionary of fairseq begins; the first is CTC's blank."""
LIBRISPEECH = "|ETAONIHSRDLUMWCFGYPBVK'XJQZ"
"""The letters of LibriSpeech's `dict.ltr.txt`, which fairseq's fine-tuned models share."""
VARIANCE_GUARD = 1e-5  # that of `F.layer_norm`, which normalises waveforms

FIXED: Options = {
    "sample_rate": SAMPLE_RATE_HZ,
    "blank_weight": 0,
    "crop_seq_to_multiple": 1,
    "rotary_embeddings": False,
    "use_spectrogram_features": False,
    "conv_pos_batch_norm": False,
    "activation_fn": "gelu",
    "quantize_input": False,
    "target_glu": False,
    "negatives_from_everywhere": False,
    "cross_sample_negatives": 0,
    "codebook_negatives": 0,
    "layer_type": "transformer",
    "pos_conv_depth": 1,
    "quantizer_depth": 1,
    "pos_enc_type": "abs",
}
MODEL: dict[str, tuple[str, Any]] = {
    "conv_bias": ("conv_bias", False),
    "width": ("encoder_embed_dim", 768),
    "layers": ("encoder_layers", 12),
    "heads": ("encoder_attention_heads", 12),
    "feed_forward": ("encoder_ffn_embed_dim", 3072),
    "norm_first": ("layer_norm_first", False),
    "position_kernel": ("conv_pos", 128),
    "position_groups": ("conv_pos_groups", 16),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
    "activation_dropout": ("activation_dropout", 0.0),
    "input_dropout": ("dropout_input", 0.0),
    "head_dropout": ("final_dropout", 0.0),
    "layer_drop": ("encoder_layerdrop", 0.0),
    "extractor_gradient": ("feature_grad_mult", 1.0),
}
OVERRIDDEN = {
    **{name: name for name in ("dropout", "attention_dropout", "activation_dropout", "dropout_input")},
    "encoder_layerdrop": "layerdrop",
    "feature_grad_mult": "feature_grad_mult",
}
"""The options of pre-training that fine-tuning replaces, and their names there (`Wav2VecEncoder`'s `arg_overrides`)."""
RESAMPLING = {"naive": "mean", "linear": "linear"}
"""NVIDIA's names of the Hourglass's resampling, and Carnelian's."""
PRETRAINING: dict[str, tuple[str, Any]] = {
    "groups": ("latent_groups", 2),
    "codes": ("latent_vars", 320),
    "width": ("final_dim", 0),
    "feature_dropout": ("dropout_features", 0.0),
    "negatives": ("num_negatives", 100),
    "similarity_temperature": ("logit_temp", 0.1),
}
SPANS: dict[str, tuple[str, Any]] = {
    "time_probability": ("mask_prob", 0.65),
    "time_length": ("mask_length", 10),
    "channel_probability": ("mask_channel_prob", 0.0),
    "channel_length": ("mask_channel_length", 10),
}


def is_fairseq(content: Any) -> bool:
    """Return whether the content of a `.pt` file is a checkpoint of fairseq."""
    return isinstance(content, dict) and "model" in content and ("args" in content or "cfg" in content)


def config_tree(content: Any, labels: Path | None, where: str) -> tuple[Options, Alphabet | None]:
    """Return the sections of a Carnelian configuration, and the alphabet of a fine-tuned model's head.

    `labels` is the path of `dict.ltr.txt`, if the file has no dictionary.

    Raises:
        CheckpointError: The file is not of wav2vec 2.0, or has options that Carnelian does not support.
    """
    outer = _options(content, where)
    head = next((t for name, t in content["model"].items() if name.endswith("w2v_encoder.proj.weight")), None)
    inner = _flat(outer.get("w2v_args") or {}) if head is not None else outer
    options = outer | inner
    if head is not None:
        options |= {name: outer[new] for name, new in OVERRIDDEN.items() if new in outer}
    wrong = [
        f"  `{name}` must be {value!r}, but is {shown(found[name])}"
        for name, value in FIXED.items()
        for found in (outer, inner)
        if found.get(name, value) != value
    ]
    wrong = list(dict.fromkeys(wrong))  # both sections may have the same mistake
    if "conv_feature_layers" not in options and "encoder_layers" not in options:
        wrong.append("  it says nothing of `encoder_layers`" + _whereabouts(outer, content["model"]))
    if wrong:
        raise CheckpointError(
            "\n".join([f"{where} must be a wav2vec 2.0 of fairseq that can be carried over:", *wrong])
        )
    channels, kernels, strides = zip(*_layers(options, where), strict=True)
    model = {"name": Wav2Vec2Config.name, **carry(MODEL, options)}
    model |= {"conv_channels": channels, "conv_kernels": kernels, "conv_strides": strides}
    model["conv_norm"] = "layer" if options.get("extractor_mode", "default") == "layer_norm" else "group"
    if options.get("hourglass_transformer"):  # an option of NVIDIA's
        model["hourglass"] = _hourglass(options, where)
    features = {"name": WaveformSettings.name, "variance_guard": VARIANCE_GUARD}
    features["normalise"] = outer.get("normalize", inner.get("normalize", False))
    # Options of fine-tuning (`outer`) win over those of the pre-training before it (`inner`).
    tree: Options = {
        "model": model,
        "features": features,
        "augment": {"speed": [1.0, 1.0], "spans": carry(SPANS, inner | outer)},
    }
    if head is not None:
        if not outer.get("apply_mask", True):  # turns masks of fine-tuning off
            tree["augment"]["spans"] |= NO_SPANS
        alphabet = _alphabet(content, num_rows(head), labels, where)
        return tree | {"labels": list(alphabet.labels)}, alphabet
    pretraining = carry(PRETRAINING, options)
    pretraining["width"] = pretraining["width"] or model["width"]
    pretraining["code_width"] = options.get("latent_dim") or pretraining["width"]
    match _evaluated(options, "latent_temp", where) or (2, 0.5, 0.999995):
        case [start, end, decay]:
            pretraining |= {"temperature": [start, end], "temperature_decay": decay}
        case found:
            raise CheckpointError(f"{where}: `latent_temp` must be (start, end, decay), but is {shown(found)}")
    match _evaluated(options, "loss_weights", where):
        case None:
            pass
        case [diversity, penalty]:
            pretraining |= {"diversity_weight": diversity, "penalty_weight": penalty}
        case found:
            raise CheckpointError(f"{where}: `loss_weights` must be [diversity, penalty], but is {shown(found)}")
    if "max_sample_size" in options:
        pretraining["crop_s"] = single(options["max_sample_size"], f"{where}: `max_sample_size`") / SAMPLE_RATE_HZ
    return tree | {"pretraining": pretraining}, None


def weights(content: Any, config: Config, alphabet: Alphabet | None, path: Path) -> dict[str, Tensor]:
    """Convert the tensors to the weights of a network of `config`.

    Raises:
        CheckpointError: Tensors do not fit; the message names each.
    """
    if content.get("ema_model"):  # in NVIDIA's files
        logger.warning(
            "%s holds an average of its weights, `ema_model`, which is left aside as NVIDIA's own inference does", path
        )
    has_hourglass = any(".hourglass_layers." in name for name in content["model"])
    naming = replace(FAIRSEQ_FINE_TUNED if alphabet else FAIRSEQ, has_hourglass=has_hourglass)
    return take(content["model"], config, naming, alphabet, path)


def _whereabouts(outer: Options, tensors: Any) -> str:
    """Say why a file may have no options of its network, if that is known."""
    if any(name.startswith("decoder.") for name in tensors):
        return ": it has a decoder, so it is no CTC model"
    if path := outer.get("w2v_path"):
        return f": its `w2v_args` must be the options of its pre-training, which are in the file of `w2v_path`, {path}"
    return ""


def _options(content: Any, where: str) -> Options:
    found = unpickling.plain(content.get("cfg") or content.get("args"), where)
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} must have its configuration in `cfg` or `args`, but has {type(found).__name__}")
    return _flat(found)


def _flat(found: Any) -> Options:
    """Return the options of the model, the task and the criterion in one mapping, as the old layout has them."""
    if not isinstance(found, dict):
        return {}
    sections = [found[name] for name in ("criterion", "task", "model") if isinstance(found.get(name), dict)]
    flat = dict(found) if not sections else {}
    for options in sections:
        flat |= options
    flat = {name: _resolved(value, found) for name, value in flat.items()}
    return {name: value for name, value in flat.items() if value is not None}


def _resolved(value: Any, tree: Options) -> Any:
    """Return the value of an option; resolve omegaconf's references such as `${task.normalize}`."""
    reference = re.fullmatch(r"\$\{(\w+)\.(\w+)\}", value) if isinstance(value, str) else None
    if reference is None:
        return value
    section = tree.get(reference[1])
    return section[reference[2]] if isinstance(section, dict) and reference[2] in section else value


def _layers(options: Options, where: str) -> list[tuple[int, int, int]]:
    """Return (channels, kernel, stride) of each convolution."""
    usual = [(512, 10, 5), *[(512, 3, 2)] * 4, *[(512, 2, 2)] * 2]
    found = _evaluated(options, "conv_feature_layers", where) if "conv_feature_layers" in options else usual
    rows = found if isinstance(found, (list, tuple)) else []
    if not rows or not all(isinstance(row, (list, tuple)) and len(row) == 3 for row in rows):
        raise CheckpointError(
            f"{where}: `conv_feature_layers` must list (channels, kernel, stride), but is {shown(found)}"
        )
    return [tuple(row) for row in rows]


def _hourglass(options: Options, where: str) -> Options:
    """Convert NVIDIA's options to the `hourglass` section of a configuration."""
    match _evaluated(options, "hourglass_transformer", where):
        case [before, [pooled, factor], after]:
            pass
        case found:
            raise CheckpointError(
                f"{where}: `hourglass_transformer` must be [before, (pooled, factor), after], but is {shown(found)}"
            )
    theirs = options.get("hourglass_resample", "naive")
    if theirs not in RESAMPLING:
        raise CheckpointError(
            f"{where}: `hourglass_resample` must be one of {', '.join(RESAMPLING)}, but is {theirs!r}"
        )
    resampling = RESAMPLING[theirs]
    return {"before": before, "pooled": pooled, "factor": factor, "after": after, "resampling": resampling}


def _evaluated(options: Options, name: str, where: str) -> Any:
    """Return an option, or its value if it is written as a Python expression, as is usual in fairseq."""
    found = options.get(name)
    return _literal(found, f"{where}: `{name}`") if isinstance(found, str) else found


def _literal(expression: str, where: str) -> Any:
    """Evaluate an expression of only numbers, lists, tuples, `+` and `*`.

    Raises:
        CheckpointError: The expression has anything else, or it or its value is longer than `LONGEST`.
    """

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple)):
            entries = [value(entry) for entry in node.elts]
            return entries if isinstance(node, ast.List) else tuple(entries)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(left, list) and isinstance(right, int) and len(left) * right <= LONGEST:
                return left * right
        raise ValueError(ast.dump(node))

    try:
        if len(expression) > LONGEST:
            raise ValueError(len(expression))
        return value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{where} must be a short expression of numbers, but is {shown(expression)}") from error


def _alphabet(content: Any, rows: int, labels: Path | None, where: str) -> Alphabet:
    """Return the alphabet of the given dictionary, else of the one in the checkpoint, else LibriSpeech's."""
    state = content.get("task_state")
    dictionary = unpickling.plain(state.get("target_dictionary"), where) if isinstance(state, dict) else None
    symbols = dictionary.get("symbols") if isinstance(dictionary, dict) else None
    try:
        text = content.get("output_labels") if labels is None else labels.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{labels} cannot be read as a dictionary: {error}") from error
    if isinstance(text, str):  # the text of a dictionary, as in NVIDIA's files
        lines = [line for line in text.split("\n") if line.strip()]  # at no other character, as in fairseq
        symbols = [*SPECIAL, *(line.rsplit(" ", 1)[0] for line in lines)]
    elif symbols:
        if not isinstance(symbols, list) or not all(isinstance(symbol, str) for symbol in symbols):
            raise CheckpointError(f"{where}: `target_dictionary.symbols` must list text, but is {shown(symbols)}")
    elif rows == len(SPECIAL) + len(LIBRISPEECH):
        logger.warning("%s has no dictionary; taking LibriSpeech's letters, as its head has as many rows", where)
        symbols = [*SPECIAL, *LIBRISPEECH]
    else:
        raise CheckpointError(
            f"{where} must come with its dictionary, for its head has {rows} rows, but has none: "
            "carnelian-train import --labels dict.ltr.txt"
        )
    if len(symbols) != rows:
        raise CheckpointError(
            f"{where}: the dictionary must have as many symbols as the head, {rows}, not {len(symbols)}"
        )
    return fold({symbol: row for row, symbol in enumerate(symbols)}, 0, f"{where}, its dictionary")
