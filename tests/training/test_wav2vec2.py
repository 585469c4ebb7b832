"""wav2vec 2.0 as a network and as a part of the training system."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from carnelian_training.checkpoint import build_model, load_model
from carnelian_training.config import config_from_dict
from carnelian_training.config_errors import ConfigError
from carnelian_training.config_tree import config_to_dict
from carnelian_training.data.loading import load
from carnelian_training.data.manifest import read_manifest
from carnelian_training.data.plan import Item
from carnelian_training.data.span_masks import SpanMaskConfig, channel_mask, time_mask
from carnelian_training.evaluation.evaluate import evaluate
from carnelian_training.loop.train import train
from carnelian_training.models.hourglass import HourglassConfig
from carnelian_training.models.wav2vec2 import PositionalConv, Wav2Vec2
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config
from carnelian_training.run_config import load_config, load_run
from carnelian_training.waveform import WaveformSettings
from torch.nn import functional as F

CLIPS = Path(__file__).parents[2] / "demo" / "clips" / "manifest.jsonl"
# Different batch shapes make kernels add the same numbers in another order.
TOLERANCE = 1e-4

TINY = {
    "conv_channels": (16, 16, 16),
    "conv_kernels": (10, 4, 4),
    "conv_strides": (8, 4, 4),
    "width": 24,
    "layers": 4,
    "heads": 2,
    "feed_forward": 32,
    "position_kernel": 16,
    "position_groups": 2,
}
POOLED = HourglassConfig(before=1, pooled=2, after=1, factor=3)
KINDS = {
    "base": {},
    "large": {"conv_norm": "layer", "norm_first": True, "conv_bias": True},
    "large, adapters": {"conv_norm": "layer", "norm_first": True, "adapter_width": 4},
    "hourglass": {"hourglass": POOLED},
    "hourglass, linear": {"hourglass": dataclasses.replace(POOLED, resampling="linear")},
    "hourglass, norm first": {"hourglass": POOLED, "norm_first": True, "conv_norm": "layer"},
}


def tiny(**changes) -> Wav2Vec2:
    torch.manual_seed(0)
    model = Wav2Vec2(Wav2Vec2Config(**TINY | changes), 29)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that do something
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def config():
    """A network of a few thousand parameters on the demo clips."""
    tree = {
        "name": "tiny",
        "model": {"name": "wav2vec2", **TINY, "layer_drop": 0.2},
        "data": {"train": [{"path": str(CLIPS)}], "dev": str(CLIPS), "batch_s": 12, "num_threads": 1},
        "augment": {"speed": [1.0, 1.0], "spans": {"time_probability": 0.3, "channel_probability": 0.2}},
        "optimizer": {"name": "adamw", "lr": 0.002, "betas": [0.9, 0.98], "warmup_steps": 2},
        "loop": {"steps": 4, "log_every_steps": 1, "evaluate_every_steps": 4},
    }
    tree["augment"]["spans"]["channel_length"] = 4
    return config_from_dict(tree, "here")


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({}, 94_396_320),  # facebook/wav2vec2-base-960h, as transformers counts it
        (
            {"width": 1024, "layers": 24, "heads": 16, "feed_forward": 4096},
            315_461_792,  # facebook/wav2vec2-large-960h
        ),
        (
            {"width": 1024, "layers": 24, "heads": 16, "feed_forward": 4096}
            | {"conv_norm": "layer", "conv_bias": True, "norm_first": True},
            315_471_520,  # facebook/wav2vec2-large-960h-lv60
        ),
    ],
)
def test_parameter_counts(changes, parameters):
    with torch.device("meta"):
        model = Wav2Vec2(Wav2Vec2Config(**changes), 32)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert (model.config.stride, model.config.window) == (320, 400)


def test_parameters_of_mms():
    large = {"conv_norm": "layer", "conv_bias": True, "norm_first": True, "adapter_width": 16}
    with torch.device("meta"):
        model = Wav2Vec2(Wav2Vec2Config(width=1280, layers=48, heads=16, feed_forward=5120, **large), 154)
    assert sum(p.numel() for p in model.parameters()) == 964_845_850  # facebook/mms-1b-all in English
    own = [p.numel() for name, p in model.named_parameters() if model.config.stage_of(name) == model.config.num_stages]
    assert sum(own) == 2_348_442  # what `_get_adapters` of transformers finds in it


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_do_not_depend_on_the_batch(kind):
    model = tiny(**KINDS[kind]).eval()
    samples = [4000, 2603, 130, 0, 129, 1100]
    lengths = torch.tensor(samples)
    waveforms = torch.randn(len(samples), 1, 4000)
    with torch.inference_mode():
        batch, out_lengths = model(waveforms, lengths)
        assert batch.isfinite().all()
        assert out_lengths.tolist() == [model.config.output_frames(n) for n in samples] == [31, 20, 1, 0, 0, 8]
        assert batch.shape[1] == 31
        for row, length in zip(waveforms, samples, strict=True):
            row[:, length:] = torch.nan  # whatever is in the padding
        again, _ = model(waveforms, lengths)
        for i, length in enumerate(samples):
            alone, _ = model(waveforms[i : i + 1, :, :length], lengths[i : i + 1])
            end = out_lengths[i]
            torch.testing.assert_close(batch[i, :end], alone[0, :end], atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(again[i, :end], alone[0, :end], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_training_gradients_do_not_depend_on_padding(kind):
    lengths = torch.tensor([2000, 1300])
    waveforms = torch.randn(2, 1, 2000)
    hidden = torch.rand(2, 15) < 0.3
    gradients = []
    for padding in (0, 900):
        model = tiny(**KINDS[kind], dropout=0.0, attention_dropout=0.0).train()
        frames = model.config.output_frames(2000 + padding)
        log_probs, out_lengths = model(
            F.pad(waveforms, (0, padding), value=7.0), lengths, F.pad(hidden, (0, frames - 15)), torch.eye(24)[:2] > 0
        )
        log_probs = log_probs.transpose(0, 1)
        F.ctc_loss(log_probs, torch.tensor([1, 2, 3, 4]), out_lengths, torch.tensor([2, 2]), blank=28).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, unpadded in gradients[0].items():
        assert unpadded is not None, name
        torch.testing.assert_close(unpadded, gradients[1][name], atol=TOLERANCE, rtol=1e-3)


def test_an_hourglass_has_the_weights_of_the_plain_transformer():
    plain, pooled = tiny(), tiny(hourglass=POOLED)
    pooled.load_state_dict(plain.state_dict())
    waveforms, lengths = torch.randn(1, 1, 4000), torch.tensor([4000])
    plain.eval(), pooled.eval()
    assert not torch.allclose(plain(waveforms, lengths)[0], pooled(waveforms, lengths)[0], atol=0.01)


def test_a_pooled_frame_is_a_mean_with_zeros_after_the_clip():
    """As NVIDIA's, whatever is in the padding."""
    resampling = tiny(hourglass=POOLED).resampling
    x = torch.randn(2, 7, 24)
    shorter, lengths = resampling.shorten(x, torch.tensor([7, 4]))
    assert lengths.tolist() == [3, 2]
    torch.testing.assert_close(shorter[0, 2], x[0, 6] / 3)
    torch.testing.assert_close(shorter[1, 0], x[1, :3].mean(0))
    torch.testing.assert_close(shorter[1, 1], x[1, 3] / 3)
    assert torch.equal(resampling.expand(shorter, 7)[0], shorter[0, [0, 0, 0, 1, 1, 1, 2]])


def test_a_layer_left_out_has_a_gradient_of_zero():
    model = tiny(layer_drop=1.0, dropout=0.0).train()
    log_probs, _ = model(torch.randn(1, 1, 2000), torch.tensor([2000]))
    log_probs.square().sum().backward()
    assert not any(p.grad.any() for p in model.layers.parameters())
    assert model.extractor[0].weight.grad.any()


def test_the_extractors_gradient_is_scaled():
    norms = []
    for scale in (1.0, 0.1):
        model = tiny(extractor_gradient=scale, dropout=0.0, attention_dropout=0.0).train()
        torch.manual_seed(1)
        log_probs, _ = model(torch.randn(1, 1, 2000), torch.tensor([2000]))
        log_probs.square().sum().backward()
        norms.append((model.extractor[1].weight.grad.norm().item(), model.projection.weight.grad.norm().item()))
    assert norms[1] == pytest.approx((0.1 * norms[0][0], norms[0][1]), rel=1e-4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"conv_kernels": (10, 3)}, "equally long"),
        ({"adapter_width": 4}, "`adapter_width` must come with `norm_first`"),
        ({"adapter_width": 0, "norm_first": True}, "`adapter_width` must be at least 1, but is 0"),
        ({"heads": 5}, "`heads` must divide `width`, 24, but is 5"),
        ({"hourglass": HourglassConfig()}, "`hourglass` must divide up all `layers`, 4, but its parts are 12"),
        ({"dropout": 1.0}, "`dropout` must be at least 0 and below 1"),
    ],
)
def test_impossible_networks_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Wav2Vec2Config(**TINY | wrong)


def test_a_factor_that_merges_no_frames_is_refused():
    with pytest.raises(ValueError, match="`factor` at least 2"):
        HourglassConfig(factor=1)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"features": {"num_mels": 64}}, "must be a waveform for wav2vec2"),
        ({"model": {"name": "quartznet", "stages": [{"filters": 8, "kernel": 3}]}}, "must be a waveform for wav2vec2"),
        ({"features": {"name": "waveform", "nonsense": 1}}, r"features\.nonsense"),
        ({"model": {"name": "wav2vec2", "hourglass": {"factor": 4, "depth": 2}}}, r"model\.hourglass\.depth"),
        ({"init": {"checkpoint": "x.pt", "freeze": [{"stages": [9]}]}}, "stages of 0 to 5, but names"),
    ],
)
def test_contradictions_in_a_configuration_are_refused(config, sections, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(config_to_dict(config) | sections, "here")


def test_what_only_networks_of_log_mel_features_have_is_refused(tmp_path):
    """It was ignored."""
    tree = {"name": "tiny", "model": {"name": "wav2vec2"}, "optimizer": {"name": "adamw", "betas": [0.9, 0.98]}}
    tree["augment"] = {"frequency_warp": 0.2, "time_masks": 0, "cutout_boxes": 3}
    tree["loop"] = {"recompute": True, "batch_statistics": "shared"}
    unused = r"augment\.frequency_warp, augment\.cutout_boxes, loop\.recompute, loop\.batch_statistics"
    (tmp_path / "x.yaml").write_text(json.dumps(tree))
    for read in (load_config, load_run):
        with pytest.raises(ConfigError, match=rf"must not be set for wav2vec2: {unused}"):
            read(tmp_path / "x.yaml")
    config_from_dict(tree, "a checkpoint")  # of when it was ignored
    tree["augment"] = {"frequency_masks": 0}
    tree["loop"] = {"depthwise": "pytorch"}  # the default, once, and so in resolved configurations
    (tmp_path / "x.yaml").write_text(json.dumps(tree))
    load_config(tmp_path / "x.yaml")


def test_spans_of_other_networks_are_refused(tiny_config):
    tree = config_to_dict(tiny_config)
    tree["augment"]["spans"] = {"time_probability": 0.5}
    with pytest.raises(ConfigError, match=r"`augment\.spans` must not be set for quartznet"):
        config_from_dict(tree, "here")


def test_without_masks_their_embedding_has_a_gradient_too():
    # Processes that train together wait for one of every parameter.
    model = tiny().train()
    model(torch.randn(1, 1, 4000), torch.tensor([4000]))[0].sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert not model.mask_embedding.grad.any()


def test_masks_depend_on_the_clip_alone_and_keep_their_share():
    spans = SpanMaskConfig(time_probability=0.65, channel_probability=0.5, channel_length=10)
    batch = time_mask([400, 90, 3, 0], 400, spans, [1, 2, 3, 4])
    assert torch.equal(batch[1, :90], time_mask([90], 90, spans, [2])[0])
    assert not batch[1, 90:].any()
    many = time_mask([500] * 200, 500, spans, range(200))
    assert many.float().mean() == pytest.approx(0.48, abs=0.02)  # "approximately 49%", Baevski et al., section 4.2
    assert channel_mask(100, spans, [7]).shape == (1, 100)
    assert time_mask([10], 10, SpanMaskConfig(), [1]) is None


def test_waveforms_are_normalised_as_transformers_does():
    clips = read_manifest(CLIPS)[:2]
    (raw,) = load([[Item(clip) for clip in clips]], WaveformSettings(normalise=False), 1)
    (batch,) = load([[Item(clip) for clip in clips]], WaveformSettings(), 1)
    assert batch.features.shape == (2, 1, max(batch.lengths))
    for row, plain, length in zip(batch.features, raw.features, batch.lengths.tolist(), strict=True):
        samples = plain[0, :length].double().numpy()
        expected = (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)
        np.testing.assert_allclose(row[0, :length].numpy(), expected, atol=1e-4)
        assert not row[0, length:].any()


def test_training_evaluation_and_checkpoints_are_those_of_every_network(config, tmp_path):
    train(config, tmp_path)
    loaded, model = load_model(tmp_path / "tiny.pt")
    assert loaded == config
    assert len(evaluate(model, config, CLIPS).transcripts) == 6
    start = build_model(config).state_dict()
    assert any(not torch.equal(start[name], tensor) for name, tensor in model.state_dict().items())


DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "input_dropout", "head_dropout", "layer_drop")


def scores(model, *masks, seed=1):
    torch.manual_seed(seed)
    return model(torch.randn(1, 1, 4000, generator=torch.Generator().manual_seed(5)), torch.tensor([4000]), *masks)[0]


@pytest.mark.parametrize("name", [None, *DROPOUTS])
def test_each_dropout_is_drawn_in_training_and_never_in_evaluation(name):
    dry = tiny(**dict.fromkeys(DROPOUTS, 0.0)).eval()
    model = tiny(**dict.fromkeys(DROPOUTS, 0.0) | ({} if name is None else {name: 0.5}))
    model.load_state_dict(dry.state_dict())  # positions are drawn by the dropout
    assert torch.equal(scores(model.eval()), scores(dry))
    model.train()
    assert torch.equal(scores(model), scores(model))
    assert torch.equal(scores(model), scores(model, seed=2)) == (name is None)


def test_what_masks_hide_is_not_seen():
    model = tiny().eval()
    hidden, channels = torch.arange(31)[None] % 3 == 1, torch.arange(24)[None] < 5
    x, lengths = torch.randn(1, 31, 16), torch.tensor([31])
    other = x.masked_fill(hidden[:, :, None], 7.0)
    masked = model.encode(x, lengths, hidden)
    torch.testing.assert_close(model.encode(other, lengths, hidden), masked)
    assert not torch.allclose(model.encode(x, lengths), masked, atol=0.01)
    narrowed = model.encode(x, lengths, None, channels)
    assert not torch.allclose(model.encode(x, lengths), narrowed, atol=0.01)
    with torch.no_grad():
        model.projection.weight[:5] += 1.0
    torch.testing.assert_close(model.encode(x, lengths, None, channels), narrowed)


def test_stages_are_the_extractor_the_input_and_each_layer():
    model = tiny()
    stages = {}
    for name, _ in model.named_parameters():
        stages.setdefault(model.config.stage_of(name), set()).add(".".join(name.split(".")[:2]))
    assert sorted(stages) == [0, 1, 2, 3, 4, 5, 6]
    assert stages[0] == {"extractor.0", "extractor.1", "extractor.2"}
    assert {"projection.weight", "mask_embedding", "positions.bias", "norm.weight"} <= stages[1]
    assert [stages[2 + i] for i in range(4)] == [{f"layers.{i}"} for i in range(4)]
    assert stages[model.config.num_stages] == {"head.weight", "head.bias"}
    assert model.config.stage_of("pretraining.quantiser.vectors") == model.config.num_stages


def test_adapters_learn_with_the_head_alone_while_the_body_is_frozen(config, tmp_path):
    tree = config_to_dict(config)
    tree["model"] |= {"norm_first": True, "adapter_width": 4}
    start = config_from_dict(tree, "here")
    train(start, tmp_path / "start")
    tree["init"] = {"checkpoint": str(tmp_path / "start" / "tiny.pt"), "freeze": [{"stages": "body"}]}
    train(config_from_dict(tree, "here"), tmp_path / "tuned")
    before, after = (load_model(tmp_path / run / "tiny.pt")[1].state_dict() for run in ("start", "tuned"))
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved == {name for name in before if ".adapter." in name or name.startswith("head.")}


def test_a_norm_after_the_layers_is_of_the_last_ones_stage():
    before, after = (Wav2Vec2Config(**TINY | {"norm_first": first}) for first in (False, True))
    assert (before.stage_of("norm.weight"), after.stage_of("norm.weight")) == (1, 1 + after.layers)
    assert after.stage_of("projection.norm.weight") == 1


def test_every_clip_has_its_least_number_of_spans():
    rare = SpanMaskConfig(time_probability=0.001, time_length=10, time_least=2)
    hidden = time_mask([40] * 100, 40, rare, range(100)).sum(1)
    assert hidden.min() >= 11  # two spans that do not begin at one frame
    assert hidden.max() <= 20


def test_spans_leave_a_frame_of_a_short_clip_visible():
    """Fine-tuning would teach a transcript without any sound. But pre-training needs a mask."""
    spans = SpanMaskConfig(time_probability=0.65, time_length=10)
    for frames, least, most in ((1, 0, 0), (2, 1, 1), (10, 9, 9), (11, 10, 10), (20, 10, 10), (21, 11, 20)):
        hidden = time_mask([frames] * 100, frames, spans, range(100)).sum(1)
        assert (hidden.min(), hidden.max()) == (least, most)


def test_the_positional_convolution_starts_with_its_deviation_whatever_the_dropout():
    config = Wav2Vec2Config(**TINY | {"width": 64, "dropout": 0.5})
    assert PositionalConv(config).direction.std().item() == pytest.approx(
        (4 / (config.position_kernel * config.width)) ** 0.5, rel=0.05
    )


def test_the_number_of_spans_is_exact_on_average():
    spans = SpanMaskConfig(time_probability=0.5, time_length=10, time_least=0)
    hidden = time_mask([30] * 2000, 30, spans, range(2000)).sum(1)  # 1.5 spans: one in half of the clips, else two
    assert (hidden > 10).float().mean() == pytest.approx(0.5, abs=0.05)
    assert hidden.min() == 10
