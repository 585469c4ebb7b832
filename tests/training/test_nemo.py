"""`.nemo` files against what NeMo itself says; references/nemo_models.py made the files."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from carnelian_training import checkpoint
from carnelian_training.cli import main
from carnelian_training.config_errors import ConfigError
from carnelian_training.evaluation.evaluate import evaluate
from carnelian_training.features import FeatureSettings, log_mel
from carnelian_training.foreign import nemo, nemo_archive, sources
from carnelian_training.models.jasper import Jasper
from carnelian_training.models.quartznet import QuartzNet
from carnelian_training.weight_files import CheckpointError
from nvidia.dali import fn, pipeline_def, types

REFERENCES = Path(__file__).parent / "references"
QUARTZNET = REFERENCES / "quartznet.nemo"
JASPER = REFERENCES / "jasper.nemo"
CLIPS = Path(__file__).parents[2] / "demo" / "clips" / "manifest.jsonl"
SECONDS = (0.503, 1.1, 0.26)
FEATURE_TOLERANCE = 1e-4  # as DALI against torch.stft
TOLERANCE = 1e-3  # 1e-5 was seen; a wrong mask or weight shows as 0.1 and more


def signals() -> list[np.ndarray]:
    """As references/nemo_models.py, which runs where this project is not, makes them."""
    rng = np.random.default_rng(1)
    clips = []
    for seconds in SECONDS:
        noise = rng.standard_normal(round(seconds * 16_000) + 1)
        rhythm = 1 + np.sin(np.arange(len(noise) - 1) / 900)
        clips.append((0.05 * (noise[1:] + noise[:-1]) * rhythm).astype(np.float32))
    return clips


def features_of(settings: FeatureSettings) -> list[np.ndarray]:
    @pipeline_def(batch_size=3, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def graph():
        return log_mel(fn.external_source(name="SIGNAL", dtype=types.FLOAT, ndim=1), settings)

    pipeline = graph(exec_async=False, exec_pipelined=False)
    pipeline.build()
    pipeline.feed_input("SIGNAL", signals())
    (result,) = pipeline.run()
    return [np.array(result[i]) for i in range(len(SECONDS))]


@pytest.fixture
def rewrite(tmp_path):
    """Makes `x.nemo`, a .nemo file with another configuration or other tensors."""

    def rewrite(change=lambda tree, tensors: None, source=QUARTZNET, prefix="./"):
        tree, tensors = nemo_archive.read(source)
        change(tree, tensors)
        weights = io.BytesIO()
        torch.save(tensors, weights)
        with tarfile.open(tmp_path / "x.nemo", "w:gz") as archive:
            for name, content in {
                nemo_archive.CONFIG_FILE: yaml.safe_dump(tree).encode(),
                nemo_archive.WEIGHTS_FILE: weights.getvalue(),
            }.items():
                member = tarfile.TarInfo(prefix + name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return tmp_path / "x.nemo"

    return rewrite


@pytest.mark.parametrize(("name", "kind"), [("quartznet", QuartzNet), ("jasper", Jasper)])
def test_log_probabilities_are_nemos_features_included(name, kind):
    config, model = sources.load_model(REFERENCES / f"{name}.nemo")
    assert isinstance(model, kind)
    expected = np.load(REFERENCES / f"{name}.npz")
    features = features_of(config.features)
    for i, found in enumerate(features):
        if f"features_{i}" in expected:
            np.testing.assert_allclose(found, expected[f"features_{i}"], atol=FEATURE_TOLERANCE)
    lengths = torch.tensor([clip.shape[1] for clip in features])
    batch = torch.zeros(len(features), 64, int(lengths.max()))
    for row, clip in zip(batch, features, strict=True):
        row[:, : clip.shape[1]] = torch.from_numpy(clip)
    with torch.inference_mode():
        log_probs, ends = model(batch, lengths)
        for i, clip in enumerate(features):
            alone, _ = model(torch.from_numpy(clip)[None], lengths[i : i + 1])
            for found in (log_probs[i, : ends[i]], alone[0]):
                np.testing.assert_allclose(found, expected[f"log_probs_{i}"], atol=TOLERANCE)
    assert np.ptp(expected["log_probs_1"]) > 3  # the comparison is about something


def test_an_imported_model_is_a_checkpoint_like_any_other(tmp_path, call):
    target = tmp_path / "imported.pt"
    status, out, _ = call(main, "import", QUARTZNET, target, "--set", "features.edges=reflect")
    assert status == 0
    assert "quartznet, 9,781 parameters, 28 labels" in out
    config, model = checkpoint.load_model(target)
    assert (config.name, config.features.edges, config.features.frame_count) == ("imported", "reflect", "floor")
    assert len(evaluate(model, config, CLIPS).transcripts) == 6
    # Blocks that are equal are one stage.
    assert [(stage.blocks, stage.repeat) for stage in config.model.stages] == [(1, 1), (2, 2), (1, 3), (1, 1), (1, 1)]


def test_a_label_that_cannot_be_printed_is_replaced_as_the_message_says(rewrite, tmp_path, call):
    labels = sources.read(JASPER)[0].labels
    source = rewrite(lambda tree, _: tree["decoder"].update(vocabulary=[*labels[:-1], "\x92"]), source=JASPER)
    status, _, err = call(main, "import", source, tmp_path / "x.pt")
    assert status == 1
    assert "but has '\\x92': put others in their place" in err
    assert "`carnelian-train import --set 'labels=[...]'`" in err
    assert call(main, "import", source, tmp_path / "x.pt", "--set", f"labels={list(labels)}")[0] == 0
    assert checkpoint.load_model(tmp_path / "x.pt")[0].labels == labels


@pytest.mark.parametrize("label", ["<unk>", "a", "", "e\N{COMBINING ACUTE ACCENT}"])
def test_a_label_that_is_no_character_of_its_own_is_replaced_as_the_message_says(label, rewrite):
    labels = list(sources.read(QUARTZNET)[0].labels)
    source = rewrite(lambda tree, _: tree["decoder"].update(vocabulary=[*labels[:-1], label]))
    with pytest.raises(ConfigError, match=r"but these are not: \[.*\]: put others .* `carnelian-train import --set '"):
        sources.read(source)
    assert sources.read(source, overrides=(f"labels={labels}",))[0].labels == tuple(labels)


def test_labels_that_the_head_does_not_have_are_named_as_the_message_says(rewrite):
    labels = list(sources.read(QUARTZNET)[0].labels)
    source = rewrite(lambda tree, _: tree["decoder"].update(vocabulary=labels[:-1]))
    message = (
        r"its head has 28 labels, but 27 were taken; name them .*: carnelian-train import --set 'labels=\[\.\.\.\]'$"
    )
    with pytest.raises(CheckpointError, match=message):
        sources.read(source)
    assert sources.read(source, overrides=(f"labels={labels}",))[0].labels == tuple(labels)


def test_any_alphabet_comes_along(rewrite):
    config, _ = sources.read(JASPER, "other")
    assert "".join(config.labels) == " abäöüßłżąéñж中文字"
    assert config.name == "other"

    def chinese(tree, tensors):
        labels = [chr(0x4E00 + i) for i in range(5000)]
        tree["decoder"] |= {"vocabulary": labels, "num_classes": len(labels)}
        for part in ("weight", "bias"):
            name = f"decoder.decoder_layers.0.{part}"
            tensors[name] = torch.randn(5001, *tensors[name].shape[1:])

    config, weights = sources.read(rewrite(chinese))
    assert len(config.labels) == 5000
    assert weights["head.bias"].shape == (5001,)


def test_the_first_form_of_nemo_1_reads_alike(rewrite):
    """`cls` and `params` in place of `_target_`, options of then."""

    def old_form(tree, tensors):
        for name in ("preprocessor", "encoder", "decoder"):
            tree[name] = {"cls": tree[name].pop("_target_"), "params": tree[name]}
        tree["preprocessor"]["params"] |= {"pad_to": 16, "stft_conv": True, "feat_type": "logfbank"}
        tree["labels"] = tree["decoder"]["params"].pop("vocabulary")

    config, weights = sources.read(rewrite(old_form), "same")
    expected, expected_weights = sources.read(QUARTZNET, "same")
    assert config == expected
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected_weights.items())


def test_options_of_the_features_come_along(rewrite):
    def other(tree, tensors):
        tree["preprocessor"] |= {"window_size": 0.025, "n_fft": None, "preemph": None, "highfreq": 7600, "features": 40}
        tree["preprocessor"] |= {"log_zero_guard_type": "clamp", "log_zero_guard_value": "eps", "mag_power": 1.0}
        tree["encoder"]["feat_in"] = 40
        for name in ("window", "fb"):
            del tensors[nemo.FEATURE_TENSORS + name]
        first = "encoder.encoder.0.mconv.0.conv.weight"
        tensors[first] = tensors[first][:40]
        second = "encoder.encoder.0.mconv.1.conv.weight"
        tensors[second] = tensors[second][:, :40]

    config, _ = sources.read(rewrite(other))
    assert config.features == FeatureSettings(
        window_samples=400,
        num_mels=40,
        high_hz=7600.0,
        preemphasis=0.0,
        magnitude_power=1,
        log_guard=torch.finfo(torch.float32).eps,
        log_guard_by="clamp",
        std_guard=1e-5,
        edges="zero",
        frame_count="floor",
    )


def test_windows_and_hops_may_be_given_in_samples(rewrite):
    def other(tree, tensors):
        tree["preprocessor"] |= {"window_size": None, "n_window_size": 400, "window_stride": None}
        tree["preprocessor"] |= {"n_window_stride": 200}
        del tensors[nemo.FEATURE_TENSORS + "window"]

    config, _ = sources.read(rewrite(other))
    assert (config.features.window_samples, config.features.hop_samples) == (400, 200)


def test_the_features_of_torchaudio_come_along(rewrite, caplog):
    """`use_torchaudio: true` reflects at the ends, has a frame more and squares, in the versions that knew it."""

    def torchaudio(tree, tensors):
        tree["preprocessor"] |= {"use_torchaudio": True, "mag_power": 1.0}

    config, _ = sources.read(rewrite(torchaudio))
    assert config.features == FeatureSettings(std_guard=1e-5)
    assert (config.features.edges, config.features.frame_count) == ("reflect", "floor + 1")
    assert "2.7 and later do not look at it" in caplog.text


def test_what_is_as_it_is_here_may_be_said(rewrite):
    def say(tree, tensors):
        tree["preprocessor"] |= {"frame_splicing": 1, "exact_pad": False, "pad_value": 0, "mel_norm": "slaney"}
        tree["encoder"] |= {"normalization_mode": "batch", "residual_mode": "add", "quantize": False}
        for block in tree["encoder"]["jasper"]:
            block |= {"heads": -1, "se": False, "residual_mode": "add", "stride_last": False, "future_context": -1}
            block |= {"normalization": "batch"}

    assert sources.read(rewrite(say), "same")[0] == sources.read(QUARTZNET, "same")[0]


def test_even_kernels_are_rounded_up_as_nemo_does(rewrite):
    def even(tree, tensors):
        block = tree["encoder"]["jasper"][0]
        block |= {"kernel": [block["kernel"][0] - 1], "kernel_size_factor": "1.0"}  # a text, as some files have it

    config, _ = sources.read(rewrite(even), "same")
    assert config == sources.read(QUARTZNET, "same")[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_files_of_16_bits_are_read(rewrite, dtype):
    """As `model.half()` leaves them, the stored window and mel filters too."""

    def rounded(tree, tensors):
        tensors |= {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}

    _, weights = sources.read(rewrite(rounded))
    for name, expected in sources.read(QUARTZNET)[1].items():
        assert weights[name].dtype == expected.dtype
        torch.testing.assert_close(weights[name], expected.to(dtype).to(expected.dtype) if expected.ndim else expected)


HEAD = "decoder.decoder_layers.0.weight"


def break_tensors(tree, tensors):
    del tensors["decoder.decoder_layers.0.bias"]
    tensors["encoder.encoder.9.mconv.0.conv.weight"] = torch.zeros(1)
    tensors["encoder.encoder.1.res.0.0.conv.weight"] = torch.zeros(16, 15, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            break_tensors,
            r"(?s)3 tensor\(s\).*decoder_layers\.0\.bias: missing.*encoder\.9\.mconv\.0\.conv\.weight: unexpected"
            r".*encoder\.1\.res\.0\.0\.conv\.weight: must be \[16, 16, 1\], but is \[16, 15, 1\]",
        ),
        (
            lambda _, tensors: tensors["decoder.decoder_layers.0.bias"].fill_(float("nan")),
            r"decoder_layers\.0\.bias: holds numbers that are not finite",
        ),
        (
            lambda _, tensors: next(value for name, value in tensors.items() if "running_var" in name).mul_(-1),
            r"running_var: holds variances, but some are negative",
        ),
        (
            lambda _, tensors: tensors.update({HEAD: tensors[HEAD].to(torch.float8_e4m3fn)}),
            r"layers\.0\.weight: must hold numbers of 16 bits or more, but holds float8_e4m3fn",
        ),
        (
            lambda _, tensors: tensors.update({HEAD: tensors[HEAD].double() + 1e300}),
            r"layers\.0\.weight: holds numbers that are not finite in float32",
        ),
        (lambda _, tensors: tensors.update({HEAD: tensors[HEAD].to("meta")}), r"dense .* are not: decoder.*0\.weight$"),
        (lambda _, tensors: tensors.update({1: torch.zeros(1)}), r"must be a dense tensor, but these are not: 1$"),
        (
            lambda _, tensors: tensors["preprocessor.featurizer.window"].mul_(0.9),
            r"\[320\], but is another table, 0\.1 off",
        ),
        (lambda tree, _: tree["preprocessor"].update(sample_rate=8000), "`sample_rate` must be 16000"),
        (lambda tree, _: tree["preprocessor"].update(use_grads=True), "`use_grads` must be False"),
        (lambda tree, _: tree["preprocessor"].update(window_size="long"), "`window_size` must be a number, but is"),
        (lambda tree, _: tree["preprocessor"].update(window_stride=None), "`window_stride` must be a number, .* None"),
        (
            lambda tree, _: tree["preprocessor"].update(window_stride=True),
            "`window_stride` must be a number",
        ),
        (
            lambda tree, _: tree["preprocessor"].update(window_size=-1),
            r"x\.nemo, `preprocessor`, `window_size` in samples must be a whole .* at least 1, but is -16000",
        ),
        (
            lambda tree, _: tree["preprocessor"].update(n_window_size="abc"),
            "`n_window_size` must be a number, but is 'a",
        ),
        (lambda tree, _: tree["preprocessor"].update(n_window_size=320.5), "`n_window_size` must be a whole number"),
        (
            lambda tree, _: tree["preprocessor"].update(window_size=float("inf")),
            "`window_size` must be at most 214.*inf",
        ),
        (
            lambda tree, _: tree["preprocessor"].update(n_fft=10**12),
            r"featurizer\.fb must be .* but is another table, \[",
        ),
        (lambda tree, _: tree["encoder"]["jasper"][1].update(kernel=[10**400]), "block 1, `kernel` must be at most"),
        (
            lambda tree, _: tree["encoder"]["jasper"][1].update(repeat=10**9),
            r"x\.nemo must describe a network of 500 layers at most, but describes 10000000",
        ),
        (lambda tree, _: tree["preprocessor"].update(preemph=1e20), "`preemphasis` must be at most 1, but is 1e[+]20"),
        (lambda tree, _: tree["preprocessor"].update(log_zero_guard_value=[]), r"features\.log_guard: .*number"),
        (lambda tree, _: tree["encoder"]["jasper"][1].update(kernel_size_factor=None), "`kernel_size_factor` must be"),
        (lambda tree, _: tree["encoder"]["jasper"][1].update(kernel=[None]), "block 1, `kernel` must be a number"),
        (
            lambda tree, _: tree["preprocessor"].update(window="hamming", a=1),
            r"(?s)2 option.*`window`.*`a` is not known",
        ),
        (
            lambda tree, _: tree["preprocessor"].update({1: 2, "zz": 3}),
            r"(?s)2 option.*`1` is not known.*`zz` is not known",
        ),
        (lambda tree, _: tree["preprocessor"].update(highfreq=4000), r"featurizer\.fb must be what `preprocessor`"),
        (lambda tree, _: tree["preprocessor"].update(mag_power=3.0), r"features\.magnitude_power: .*1 or 2 \(found 3"),
        (lambda tree, _: tree["encoder"].update(activation="swish"), "`activation` must be 'relu'"),
        (lambda tree, _: tree["encoder"]["jasper"][1].update(se=True), "`se` must be False"),
        (lambda tree, _: tree["encoder"]["jasper"][1].update(stride=[2]), "block 1: `stride` must be 1 where"),
        (lambda tree, _: tree["encoder"].update(_target_="x.ConformerEncoder"), "`encoder` must be of the class Conv"),
        (lambda tree, _: tree["decoder"].update(vocabulary=["ab", "c", "c"]), r"these are not: \['ab', 'c'\]"),
        (lambda tree, _: tree.update(tokenizer={"dir": "x"}), "one label per character"),
        (lambda tree, _: tree["encoder"].pop("jasper"), "must be a list of blocks, but is None"),
        (lambda tree, _: tree.pop("decoder"), "`decoder` must be .* but is None"),
    ],
)
def test_what_cannot_be_carried_over_is_refused_by_name(rewrite, change, message):
    path = rewrite(change)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        sources.read(path)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_model_that_was_saved_inside_of_a_wrapper_is_read_too(rewrite, prefix):
    def wrapped(_, tensors):
        for name in list(tensors):
            place, _, rest = name.partition(".")
            tensors[f"{place}.{prefix}{rest}"] = tensors.pop(name)

    _, weights = sources.read(rewrite(wrapped, JASPER))
    _, expected = sources.read(JASPER)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_batch_norms_need_not_have_counted_their_batches(rewrite):
    def uncounted(tree, tensors):
        for name in [name for name in tensors if name.endswith("num_batches_tracked")]:
            del tensors[name]

    _, model = sources.load_model(rewrite(uncounted))
    _, counted = sources.load_model(QUARTZNET)
    features, lengths = torch.randn(1, 64, 50), torch.tensor([50])
    torch.testing.assert_close(model(features, lengths), counted(features, lengths))


def test_a_model_that_is_there_beside_its_wrapper_is_refused(rewrite):
    def doubled(_, tensors):
        name = next(iter(tensors))
        tensors[f"module.{name}"] = tensors[name] + 1

    with pytest.raises(CheckpointError, match=r"there with a wrapper's name and without: [\w.]+$"):
        sources.read(rewrite(doubled, JASPER))


def test_unmasked_convolutions_are_read_with_a_warning(rewrite, caplog):
    def unmasked(tree, tensors):
        tree["encoder"]["conv_mask"] = False
        for name in list(tensors):
            tensors[name.replace(".conv.weight", ".weight")] = tensors.pop(name)

    _, weights = sources.read(rewrite(unmasked, JASPER))
    assert "`conv_mask` is false" in caplog.text
    _, expected = sources.read(JASPER)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


class Foreign:
    """What an archive must not be able to make us load."""


def test_no_class_is_loaded_and_nothing_is_unpacked(rewrite, tmp_path):
    harmful = rewrite(lambda _, tensors: tensors.update(a=Foreign()))
    with pytest.raises(CheckpointError, match="cannot be read"):
        sources.read(harmful)
    with pytest.raises(CheckpointError, match=r"x\.nemo must hold model_config\.yaml at its root, but does not"):
        sources.read(rewrite(prefix="../../"))
    assert [path.name for path in tmp_path.iterdir()] == ["x.nemo"]
