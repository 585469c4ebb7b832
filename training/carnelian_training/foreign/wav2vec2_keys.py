"""The names of the tensors of wav2vec 2.0 in fairseq and in Hugging Face `transformers`.

Both have the same tensors as Carnelian, except that their codebook has the shape [1, groups * codes, width], and their
head has rows for special tokens, which are dropped: `alphabet.py` chooses the rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from carnelian_training.checkpoint import build_network
from carnelian_training.config import Config
from carnelian_training.foreign.alphabet import Alphabet
from carnelian_training.foreign.tensors import num_rows
from carnelian_training.models.hourglass import HourglassConfig
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config
from carnelian_training.tensor_checks import check_fit, find_mistake

_BODY = {
    "extractor_norm": ("feature_projection.layer_norm", "layer_norm"),
    "projection": ("feature_projection.projection", "post_extract_proj"),
    "norm": ("encoder.layer_norm", "encoder.layer_norm"),
    "positions": ("encoder.pos_conv_embed.conv", "encoder.pos_conv.0"),
}
_HOURGLASS = {
    "resampling.down": "encoder.downsample_layer.linear",
    "resampling.up": "encoder.upsample_layer.linear",
}
"""The names in NVIDIA's Hourglass; the other toolkits have none."""
_LAYER = {
    "attention.query": ("attention.q_proj", "self_attn.q_proj"),
    "attention.key": ("attention.k_proj", "self_attn.k_proj"),
    "attention.value": ("attention.v_proj", "self_attn.v_proj"),
    "attention.output": ("attention.out_proj", "self_attn.out_proj"),
    "attention_norm": ("layer_norm", "self_attn_layer_norm"),
    "widen": ("feed_forward.intermediate_dense", "fc1"),
    "narrow": ("feed_forward.output_dense", "fc2"),
    "output_norm": ("final_layer_norm", "final_layer_norm"),
}
_ADAPTER = {
    "adapter.norm": "adapter_layer.norm",
    "adapter.narrow": "adapter_layer.linear_1",
    "adapter.widen": "adapter_layer.linear_2",
}
"""The names of adapters in Hugging Face; the other toolkits have none."""
_PRETRAINING = {
    "quantiser.choose": ("quantizer.weight_proj", "quantizer.weight_proj"),
    "quantiser.vectors": ("quantizer.codevectors", "quantizer.vars"),
    "target": ("project_q", "project_q"),
    "guess": ("project_hid", "final_proj"),
}
_HUBERT_TARGETS = "label_embs_concat"
"""The targets of pre-training in fairseq's HuBERT, which a fine-tuned recogniser does not need."""
_POSITIONS = {"direction": "weight_v", "magnitude": "weight_g", "bias": "bias"}
_TODAYS = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
"""The names of weight norm in PyTorch from 2.0 on, and the older ones that most files have."""


@dataclass(frozen=True)
class Naming:
    """A toolkit's names: the column of the tables above, and the prefixes."""

    column: int
    body: str
    head: str
    mask: str
    has_hourglass: bool = False
    """Whether the layers are in NVIDIA's three lists, before, in and after the pooled middle, each numbered from 0."""


HUGGING_FACE = Naming(0, "wav2vec2.", "lm_head", "masked_spec_embed")
HUGGING_FACE_HUBERT = Naming(0, "hubert.", "lm_head", "masked_spec_embed")
FAIRSEQ = Naming(1, "", "proj", "mask_emb")
FAIRSEQ_FINE_TUNED = Naming(1, "w2v_encoder.w2v_model.", "w2v_encoder.proj", "mask_emb")


def names(config: Config, naming: Naming) -> Iterator[tuple[str, str]]:
    """Yield every tensor's name in Carnelian and in the toolkit."""
    with torch.device("meta"):
        ours = build_network(config).state_dict()
    assert isinstance(config.model, Wav2Vec2Config)
    hourglass = config.model.hourglass if naming.has_hourglass else None
    for name in ours:
        yield name, _name(name, naming, hourglass)


def _name(name: str, naming: Naming, hourglass: HourglassConfig | None) -> str:
    if name == "mask_embedding":
        return naming.body + naming.mask
    module, _, part = name.rpartition(".")
    if module == "head":
        return f"{naming.head}.{part}"
    if module == "positions":
        return f"{naming.body}{_BODY[module][naming.column]}.{_POSITIONS[part]}"
    if name == "pretraining.quantiser.vectors":
        return _PRETRAINING["quantiser.vectors"][naming.column]
    first, _, rest = module.partition(".")
    if first == "pretraining":
        return f"{_PRETRAINING[rest][naming.column]}.{part}"
    if first == "layers":
        i, _, inner = rest.partition(".")
        theirs = _ADAPTER[inner] if inner in _ADAPTER else _LAYER[inner][naming.column]
        return f"{naming.body}encoder.{_place(int(i), hourglass)}.{theirs}.{part}"
    if first == "extractor":
        i, _, norm = rest.partition(".")
        position = {
            "": ("conv", "0"),
            "clip_norm": ("layer_norm", "2"),
            "frame_norm": ("layer_norm", "2.1"),
        }[norm][naming.column]
        return f"{naming.body}feature_extractor.conv_layers.{i}.{position}.{part}"
    if module in _HOURGLASS:
        return f"{naming.body}{_HOURGLASS[module]}.{part}"
    return f"{naming.body}{_BODY[module][naming.column]}.{part}"


def _place(layer: int, hourglass: HourglassConfig | None) -> str:
    if hourglass is None or layer < hourglass.before:
        return f"layers.{layer}"
    layer -= hourglass.before
    if layer < hourglass.pooled:
        return f"hourglass_layers.{layer}"
    return f"post_layers.{layer - hourglass.pooled}"


def take(
    found: Mapping[str, Tensor], config: Config, naming: Naming, alphabet: Alphabet | None, path: Path
) -> dict[str, Tensor]:
    """Convert another toolkit's tensors to the float32 weights of a network of `config`.

    A recogniser may have additional tensors of pre-training, and the mask embedding may be missing. `alphabet` has the
    rows of the head that are labels; None for pre-training.

    Raises:
        CheckpointError: Tensors are missing, unexpected, of another shape, or not finite; the message gives each by the
            toolkit's name.
    """
    found = {_mostly(name): tensor for name, tensor in found.items()}
    with torch.device("meta"):
        wanted = build_network(config).state_dict()
    table = dict(names(config, naming))
    pretraining = {theirs[naming.column] for theirs in _PRETRAINING.values()} | {_HUBERT_TARGETS}
    # In fairseq's recognisers, tensors of pre-training also have the prefix of the body.
    leftover = {f"{body}{name}" for name in pretraining for body in ("", naming.body)} if alphabet else set()
    unexpected = [
        name for name in found.keys() - set(table.values()) if not any(name.startswith(part) for part in leftover)
    ]
    mistakes = [f"  {name}: unexpected" for name in sorted(unexpected)]
    rows = num_rows(found.get(f"{naming.head}.weight"))
    weights = {}
    for ours, theirs in table.items():
        shape = list(wanted[ours].shape)
        tensor = found.get(theirs)
        if tensor is None and ours == "mask_embedding":
            tensor = torch.zeros(shape)
        if tensor is None:
            mistakes.append(f"  {theirs}: missing")
            continue
        if ours.startswith("head.") and alphabet is not None:
            if num_rows(tensor) == rows:
                tensor = tensor[alphabet.rows]
            else:
                shape[0] = rows
        if ours == "pretraining.quantiser.vectors" and tensor.numel() == wanted[ours].numel():
            tensor = tensor.reshape(shape)
        if mistake := find_mistake(theirs, tensor, shape):
            mistakes.append(mistake)
            continue
        weights[ours] = tensor.to(torch.float32, copy=True)
    check_fit(mistakes, path)
    return weights


def give(weights: Mapping[str, Tensor], config: Config, naming: Naming) -> dict[str, Tensor]:
    """Convert weights of a network of `config` to another toolkit's tensors in float32; the head keeps its rows."""
    result = {}
    for ours, theirs in names(config, naming):
        tensor = weights[ours].float().contiguous()
        result[theirs] = tensor.flatten(0, 1)[None] if ours == "pretraining.quantiser.vectors" else tensor
    return result


def _mostly(name: str) -> str:
    for today, before in _TODAYS.items():
        name = name.replace(today, before)
    return name
