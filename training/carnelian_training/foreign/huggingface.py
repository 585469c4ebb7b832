"""Folders of Hugging Face `transformers`: reading and writing Wav2Vec2ForCTC and Wav2Vec2ForPreTraining.

HubertForCTC is read only. A recogniser's special tokens are dropped from its head, so log-probabilities are over the
characters and the blank. From a recogniser of many languages, such as MMS, one is read.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carnelian_training.config import Config
from carnelian_training.config_errors import shown
from carnelian_training.features import SAMPLE_RATE_HZ
from carnelian_training.foreign.alphabet import WORD_DELIMITER, Alphabet
from carnelian_training.foreign.huggingface_alphabet import read_alphabet
from carnelian_training.foreign.huggingface_folder import (
    check_kind_of_weights,
    read_if_there,
    read_json,
    read_tensors,
    read_weights,
)
from carnelian_training.foreign.huggingface_language import choose_language
from carnelian_training.foreign.options import NO_SPANS, Options, carry
from carnelian_training.foreign.tensors import num_rows
from carnelian_training.foreign.wav2vec2_keys import HUGGING_FACE, HUGGING_FACE_HUBERT, give, take
from carnelian_training.language_models.config import LanguageModelConfig
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config
from carnelian_training.replacement import replaced, write_text
from carnelian_training.run_config import RunConfig
from carnelian_training.tensor_checks import check_fit
from carnelian_training.waveform import WaveformSettings
from carnelian_training.weight_files import CheckpointError

logger = logging.getLogger(__name__)

FIXED: Options = {
    "model_type": "wav2vec2",
    "hidden_act": "gelu",
    "feat_extract_activation": "gelu",
    "add_adapter": False,
}
HUBERT: Options = FIXED | {"model_type": "hubert", "conv_pos_batch_norm": False, "feat_proj_layer_norm": True}
"""The options with which a fine-tuned HuBERT is the same network as a wav2vec 2.0."""
ACTIVATIONS = ("hidden_act", "feat_extract_activation")
MODEL: dict[str, tuple[str, Any]] = {
    "conv_channels": ("conv_dim", [512] * 7),
    "conv_kernels": ("conv_kernel", [10, 3, 3, 3, 3, 2, 2]),
    "conv_strides": ("conv_stride", [5, 2, 2, 2, 2, 2, 2]),
    "conv_bias": ("conv_bias", False),
    "conv_norm": ("feat_extract_norm", "group"),
    "width": ("hidden_size", 768),
    "layers": ("num_hidden_layers", 12),
    "heads": ("num_attention_heads", 12),
    "feed_forward": ("intermediate_size", 3072),
    "norm_first": ("do_stable_layer_norm", False),
    "adapter_width": ("adapter_attn_dim", None),
    "position_kernel": ("num_conv_pos_embeddings", 128),
    "position_groups": ("num_conv_pos_embedding_groups", 16),
    "norm_eps": ("layer_norm_eps", 1e-5),
    "dropout": ("hidden_dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
    "activation_dropout": ("activation_dropout", 0.1),
    "input_dropout": ("feat_proj_dropout", 0.0),
    "head_dropout": ("final_dropout", 0.1),
    "layer_drop": ("layerdrop", 0.1),
}
"""For each field of `model`, the option in `config.json` and its default in `transformers`."""
SPANS: dict[str, tuple[str, Any]] = {
    "time_probability": ("mask_time_prob", 0.05),
    "time_length": ("mask_time_length", 10),
    "time_least": ("mask_time_min_masks", 2),
    "channel_probability": ("mask_feature_prob", 0.0),
    "channel_length": ("mask_feature_length", 10),
}
PRETRAINING: dict[str, tuple[str, Any]] = {
    "groups": ("num_codevector_groups", 2),
    "codes": ("num_codevectors_per_group", 320),
    "code_width": ("codevector_dim", 256),
    "width": ("proj_codevector_dim", 256),
    "feature_dropout": ("feat_quantizer_dropout", 0.0),
    "negatives": ("num_negatives", 100),
    "similarity_temperature": ("contrastive_logits_temperature", 0.1),
    "diversity_weight": ("diversity_loss_weight", 0.1),
}


def read(path: Path, language: str | None = None) -> tuple[Options, dict[str, Tensor], Alphabet | None]:
    """Read a folder: the sections of a configuration, the tensors, and the alphabet of a recogniser's head.

    `language` is the one to read, if the recogniser has several.

    Returns:
        The sections `model`, `features`, `augment` and `labels` or `pretraining`; tensors by name; the alphabet, or
        None for a pre-trained model.

    Raises:
        CheckpointError: The folder is not of such a model, has options that Carnelian does not support, or does not
            have the language.
    """
    check_kind_of_weights(path)
    options = read_json(path / "config.json")
    for name in ACTIVATIONS:
        if options.get(name) == "gelu_python":  # the same function
            options[name] = "gelu"
    fixed = HUBERT if options.get("model_type") == HUBERT["model_type"] else FIXED
    wrong = [f"  `{k}` must be {v!r}, but is {shown(options[k])}" for k, v in fixed.items() if options.get(k, v) != v]
    if "model_type" not in options or wrong:
        raise CheckpointError("\n".join([f"{path / 'config.json'} must be of a wav2vec 2.0 or HuBERT model:", *wrong]))
    tensors = read_tensors(path)
    tree: Options = {
        "model": {"name": Wav2Vec2Config.name} | carry(MODEL, options),
        "features": _features(path),
        "augment": {"speed": [1.0, 1.0], "spans": carry(SPANS, options)},
    }
    if "lm_head.weight" in tensors:
        if not options.get("apply_spec_augment", True):  # turns masks of fine-tuning off
            tree["augment"]["spans"] |= NO_SPANS
        chosen = choose_language(path, language, has_adapters=options.get("adapter_attn_dim") is not None)
        if chosen.adapter is not None:
            tensors |= _adapter(chosen.adapter, tensors)
        alphabet = read_alphabet(path, chosen.tokens, options, num_rows(tensors["lm_head.weight"]))
        if (path / "language_model").is_dir():  # from `Wav2Vec2ProcessorWithLM`
            logger.warning(
                "%s/language_model, with which transformers decodes, is left aside: its n-grams can be given to the "
                "decoder (`carnelian-export --lm`)",
                path,
            )
        return tree | {"labels": list(alphabet.labels)}, tensors, alphabet
    if any(name.startswith("quantizer.") for name in tensors):
        # The loss of `transformers` has no penalty.
        return tree | {"pretraining": carry(PRETRAINING, options) | {"penalty_weight": 0.0}}, tensors, None
    raise CheckpointError(
        f"{path} must be a Wav2Vec2ForCTC, HubertForCTC or Wav2Vec2ForPreTraining, but has neither `lm_head.weight` "
        "nor `quantizer`; a body alone needs a head, which fine-tuning replaces: save it as a Wav2Vec2ForCTC or "
        "HubertForCTC (`.from_pretrained(...).save_pretrained(...)`)"
    )


def weights(tensors: dict[str, Tensor], config: Config, alphabet: Alphabet | None, path: Path) -> dict[str, Tensor]:
    """Convert the tensors to the weights of a network of `config`.

    Raises:
        CheckpointError: Tensors do not fit; the message names each.
    """
    is_hubert = any(name.startswith(HUGGING_FACE_HUBERT.body) for name in tensors)
    return take(tensors, config, HUGGING_FACE_HUBERT if is_hubert else HUGGING_FACE, alphabet, path)


def _adapter(path: Path, model: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read the adapters and the head of a language, which must replace all of the model's.

    Raises:
        CheckpointError: Tensors are missing, so that another language's would stay, or there are unexpected ones.
    """
    found = read_weights(path)
    own = {name for name in model if ".adapter_layer." in name or name.startswith("lm_head.")}
    check_fit([f"  {name}: {'missing' if name in own else 'unexpected'}" for name in sorted(found.keys() ^ own)], path)
    return found


def _features(path: Path) -> Options:
    """Read the features from `processor_config.json`, else from `preprocessor_config.json`, as `transformers` 5."""
    file = path / "processor_config.json"
    newer, older = read_if_there(file), read_if_there(path / "preprocessor_config.json")
    options = newer.get("feature_extractor") or newer.get("audio_processor")
    if not options:
        file, options = path / "preprocessor_config.json", older
    if "do_normalize" not in options:
        logger.warning(
            "%s must say whether samples are normalised (`do_normalize`), but does not; taking that they are, as "
            "transformers would",
            file,
        )
    rate_hz, size = options.get("sampling_rate", SAMPLE_RATE_HZ), options.get("feature_size", 1)
    if rate_hz != SAMPLE_RATE_HZ or size != 1:
        raise CheckpointError(f"{file} must say {SAMPLE_RATE_HZ} Hz and one feature, but says {rate_hz} Hz and {size}")
    normalises = options.get("do_normalize", True)
    if not isinstance(normalises, bool):  # transformers takes "false" for true
        raise CheckpointError(f"{file} must say true or false for `do_normalize`, but says {normalises!r}")
    if (other := older.get("do_normalize", normalises)) != normalises:
        logger.warning(
            "%s of transformers 5 holds for `do_normalize`, %s; preprocessor_config.json, which transformers 4 reads, "
            "says %s",
            file,
            normalises,
            other,
        )
    return {"name": WaveformSettings.name, "normalise": normalises}


_READ_FIRST = ("added_tokens.json", "processor_config.json", "tokenizer.json")
"""Files of another model that `transformers` would read before the files of :func:`write`."""


def write(path: Path, config: RunConfig, weights: dict[str, Tensor]) -> list[str]:
    """Write a folder that `from_pretrained` of `Wav2Vec2ForCTC` or `Wav2Vec2ForPreTraining` reads.

    Returns:
        A message for each way in which `transformers` will compute something different.

    Raises:
        CheckpointError: `transformers` does not support the network, or the folder has files of another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if isinstance(config, LanguageModelConfig) or not isinstance(config.features, WaveformSettings):
        raise CheckpointError(f"a Hugging Face folder must hold a wav2vec2, not a {config.model.name}")
    assert isinstance(config.model, Wav2Vec2Config)
    if config.model.hourglass is not None:
        raise CheckpointError("`model.hourglass` must be none, for `transformers` has no such layers")
    if config.pretraining is None and WORD_DELIMITER in config.labels:
        raise CheckpointError(f"`labels` must not hold {WORD_DELIMITER!r}, which stands for the space in such folders")
    if stale := [name for name in _READ_FIRST if (path / name).exists()]:
        raise CheckpointError(
            f"{path} must be a new folder, or one that was written here: transformers would read its "
            f"{', '.join(stale)}, of another model"
        )
    tensors = give(weights, config, HUGGING_FACE)
    options: Options = dict(FIXED) | {theirs: getattr(config.model, ours) for ours, (theirs, _) in MODEL.items()}
    options |= {theirs: getattr(config.augment.spans, ours) for ours, (theirs, _) in SPANS.items()}
    options |= {"architectures": ["Wav2Vec2ForCTC" if config.pretraining is None else "Wav2Vec2ForPreTraining"]}
    files: dict[str, Options] = {"config.json": options}
    if config.pretraining is None:
        tokens = _with_special_tokens(tensors, config)
        options |= {"vocab_size": len(tokens), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        tokenizer = special | {"tokenizer_class": "Wav2Vec2CTCTokenizer", "word_delimiter_token": WORD_DELIMITER}
        files |= {"vocab.json": tokens, "tokenizer_config.json": tokenizer, "special_tokens_map.json": special}
    else:
        options |= {theirs: getattr(config.pretraining, ours) for ours, (theirs, _) in PRETRAINING.items()}
    extractor = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "feature_size": 1, "padding_value": 0.0}
    extractor |= {"sampling_rate": SAMPLE_RATE_HZ, "do_normalize": config.features.normalise}
    # With a group norm over time, published models were trained without attention masks.
    extractor |= {"return_attention_mask": config.model.conv_norm == "layer"}
    files["preprocessor_config.json"] = extractor
    with replaced(path / "model.safetensors") as partial:
        try:
            save_file(tensors, partial, {"format": "pt"})
        except SafetensorError as error:  # also for a full disk
            raise OSError(error) from error
    for name, content in files.items():
        write_text(path / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    guard = config.features.variance_guard
    if not config.features.normalise or guard == WaveformSettings.variance_guard:
        return []
    theirs = WaveformSettings.variance_guard
    return [f"`features.variance_guard` is {guard:g}, but transformers has {theirs:g} and no option for it"]


NEVER = -1e4
"""The bias of a special token, so low that its probability is 0."""


def _with_special_tokens(tensors: dict[str, Tensor], config: Config) -> dict[str, int]:
    """Move the blank to the first row of the head, as `<pad>`, followed by three special tokens that are never written.

    Returns:
        Each token's row, for `vocab.json`.
    """
    weight, bias = tensors["lm_head.weight"], tensors["lm_head.bias"]
    tensors["lm_head.weight"] = torch.cat([weight[-1:], torch.zeros(3, weight.shape[1]), weight[:-1]])
    tensors["lm_head.bias"] = torch.cat([bias[-1:], torch.full((3,), NEVER), bias[:-1]])
    labels = [WORD_DELIMITER if label == " " else label for label in config.labels]
    return {token: row for row, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *labels])}
