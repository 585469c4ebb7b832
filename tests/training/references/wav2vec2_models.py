"""Small wav2vec 2.0 checkpoints as other toolkits write them, and what `transformers` says with them.

    pip install torch transformers omegaconf
    python wav2vec2_models.py

writes the folders `wav2vec2_*` and files `wav2vec2_*.pt` beside this file. Seen with transformers 5.23.0 and omegaconf
2.3.0. fairseq cannot be installed beside today's PyTorch: its files hold the tensors of the Hugging Face model under
fairseq's names (v0.12.2), and its configuration as it writes it.
"""

import argparse
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC, Wav2Vec2ForPreTraining

HERE = Path(__file__).parent
SAMPLES = (2000, 1303)
TOKENS = ["<pad>", "<s>", "</s>", "<unk>", "|", "E", "T", "A", "'", "Z"]
SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (8, 12, 16),
    "conv_kernel": (10, 4, 3),
    "conv_stride": (8, 4, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "num_codevectors_per_group": 8,
    "codevector_dim": 12,
    "proj_codevector_dim": 10,
    "vocab_size": len(TOKENS),
    "mask_time_prob": 0.3,
    "mask_time_length": 2,
}
LARGE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}


def signals() -> list[torch.Tensor]:
    """As the test makes them."""
    rng = np.random.default_rng(1)
    return [torch.from_numpy(rng.standard_normal(samples).astype(np.float32)) for samples in SAMPLES]


def randomised(model):
    """Norms and biases that do something."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


@torch.inference_mode()
def recogniser(name: str, safe: bool, **options) -> Wav2Vec2ForCTC:
    torch.manual_seed(0)
    model = randomised(Wav2Vec2ForCTC(Wav2Vec2Config(**SIZES, **options)))
    folder = HERE / f"wav2vec2_{name}"
    model.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(TOKENS)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>", "word_delimiter_token": "|"}))
    extractor = {"sampling_rate": 16000, "feature_size": 1, "do_normalize": options != {}}
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    if not safe:
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    said = {}
    for i, signal in enumerate(signals()):
        said[f"logits_{i}"] = model(signal[None]).logits[0].numpy()
        frames = len(said[f"logits_{i}"])
        hidden = torch.arange(frames)[None] % 3 == 1
        x = model.wav2vec2(signal[None], mask_time_indices=hidden).last_hidden_state
        said[f"masked_{i}"] = model.lm_head(x)[0].numpy()
    np.savez(folder / "said.npz", **said)
    return model


@torch.inference_mode()
def adapters() -> None:
    """As MMS is published: a recogniser of English, and files that make it one of another language."""
    model = recogniser("adapters", safe=True, adapter_attn_dim=4, **LARGE)
    folder = HERE / "wav2vec2_adapters"
    vocabularies = {"eng": TOKENS, "deu": [*TOKENS[:5], *"äbct"], "fra": [*TOKENS[:5], *"çdeéêtu"]}
    rows = {language: {token: i for i, token in enumerate(tokens)} for language, tokens in vocabularies.items()}
    (folder / "vocab.json").write_text(json.dumps(rows))
    options = {"unk_token": "<unk>", "word_delimiter_token": "|", "target_lang": "eng"}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    said = dict(np.load(folder / "said.npz"))
    for language, write, kind in (("deu", save_file, "safetensors"), ("fra", torch.save, "bin")):
        model.lm_head = torch.nn.Linear(SIZES["hidden_size"], len(rows[language]))
        own = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in model._get_adapters().items()}
        write(own, folder / f"adapter.{language}.{kind}")
        multilingual = Wav2Vec2ForCTC.from_pretrained(folder).eval()
        multilingual.load_adapter(language)
        for i, signal in enumerate(signals()):
            said[f"{language}_{i}"] = multilingual(signal[None]).logits[0].numpy()
    np.savez(folder / "said.npz", **said)


@torch.inference_mode()
def pretraining() -> Wav2Vec2ForPreTraining:
    torch.manual_seed(0)
    model = randomised(Wav2Vec2ForPreTraining(Wav2Vec2Config(**SIZES)))
    folder = HERE / "wav2vec2_pretraining"
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"sampling_rate": 16000, "do_normalize": False}))
    signal = signals()[0][None]
    frames = int(model._get_feat_extract_output_lengths(torch.tensor(SAMPLES[0])))
    hidden = torch.arange(frames)[None] % 3 != 0
    positions = hidden[0].nonzero()[:, 0]
    ranks = torch.arange(len(positions))
    others = (ranks[:, None] + 1 + torch.arange(5)) % len(positions)  # of each hidden frame, the five after it
    negatives = torch.zeros(1, frames, 5, dtype=torch.int64)
    negatives[0, positions] = positions[others]
    said = model(signal, mask_time_indices=hidden, sampled_negative_indices=negatives)
    np.savez(
        folder / "said.npz",
        guesses=said.projected_states[0].numpy(),
        targets=said.projected_quantized_states[0].numpy(),
        loss=said.contrastive_loss.numpy(),
    )
    return model


RENAMED = [
    ("feature_projection.layer_norm", "layer_norm"),
    ("feature_projection.projection", "post_extract_proj"),
    ("masked_spec_embed", "mask_emb"),
    ("encoder.pos_conv_embed.conv.parametrizations.weight.original0", "encoder.pos_conv.0.weight_g"),
    ("encoder.pos_conv_embed.conv.parametrizations.weight.original1", "encoder.pos_conv.0.weight_v"),
    ("encoder.pos_conv_embed.conv", "encoder.pos_conv.0"),
    ("attention.", "self_attn."),
    ("feed_forward.intermediate_dense", "fc1"),
    ("feed_forward.output_dense", "fc2"),
    ("project_hid", "final_proj"),
    ("quantizer.codevectors", "quantizer.vars"),
]


def as_fairseq(model, body: str, head: str) -> dict[str, torch.Tensor]:
    """The tensors of a Hugging Face model under fairseq's names."""
    renamed = {}
    for name, tensor in model.state_dict().items():
        is_layer_mode = model.config.feat_extract_norm == "layer"
        if ".conv_layers." in name:
            name = name.replace(".conv.", ".0.").replace(".layer_norm.", ".2.1." if is_layer_mode else ".2.")
        elif ".layers." in name and ".final_layer_norm" not in name:
            name = name.replace(".layer_norm.", ".self_attn_layer_norm.")
        for theirs, fairseqs in RENAMED:
            name = name.replace(theirs, fairseqs)
        renamed[name.replace("wav2vec2.", body).replace("lm_head", head)] = tensor
    return renamed


def options(model) -> dict[str, object]:
    """fairseq's options of the network, as far as they are not its defaults."""
    config = model.config
    sizes = zip(config.conv_dim, config.conv_kernel, config.conv_stride, strict=True)
    layers = " + ".join(str([layer]) for layer in sizes)
    return {
        "extractor_mode": "layer_norm" if config.feat_extract_norm == "layer" else "default",
        "conv_feature_layers": layers,
        "conv_bias": config.conv_bias,
        "encoder_layers": config.num_hidden_layers,
        "encoder_embed_dim": config.hidden_size,
        "encoder_ffn_embed_dim": config.intermediate_size,
        "encoder_attention_heads": config.num_attention_heads,
        "layer_norm_first": config.do_stable_layer_norm,
        "conv_pos": config.num_conv_pos_embeddings,
        "conv_pos_groups": config.num_conv_pos_embedding_groups,
        "activation_fn": "gelu",
        "final_dim": config.proj_codevector_dim,
        "latent_dim": config.codevector_dim,
        "latent_vars": config.num_codevectors_per_group,
        "latent_groups": config.num_codevector_groups,
        "latent_temp": "(2,0.5,0.999995)",
        "mask_prob": 0.65,
    }


def main() -> None:
    """Write everything."""
    recogniser("base", safe=True)
    large = recogniser("large", safe=False, **LARGE)
    adapters()
    pretrained = pretraining()

    old = argparse.Namespace(arch="wav2vec2", task="audio_pretraining", normalize=False, **options(pretrained))
    weights = as_fairseq(pretrained, "", "proj")
    torch.save({"args": old, "model": weights, "extra_state": {}}, HERE / "wav2vec2_old.pt")

    # The dictionary travels in `task_state`, as an object of a class that is not there when the file is read.
    for name in ("fairseq", "fairseq.data", "fairseq.data.dictionary"):
        sys.modules[name] = types.ModuleType(name)
    kind = type("Dictionary", (), {"__module__": "fairseq.data.dictionary"})
    sys.modules["fairseq.data.dictionary"].Dictionary = kind
    dictionary = kind()
    dictionary.symbols = ["<s>", "<pad>", "</s>", *TOKENS[3:]]
    inner = {"model": {"_name": "wav2vec2", **options(large)}, "task": {"normalize": True}}
    model = {"_name": "wav2vec_ctc", "w2v_args": inner, "mask_prob": 0.5, "mask_channel_prob": 0.25, "normalize": True}
    config = OmegaConf.create({"model": model, "task": {"_name": "audio_finetuning", "normalize": True}})
    content = {"args": None, "cfg": config, "task_state": {"target_dictionary": dictionary}}
    weights = as_fairseq(large, "w2v_encoder.w2v_model.", "w2v_encoder.proj")
    torch.save(content | {"model": weights}, HERE / "wav2vec2_new.pt")


if __name__ == "__main__":
    main()
