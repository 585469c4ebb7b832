"""DLE's `.pt` files. Its modules are rebuilt here, in plain PyTorch, as its source at 729963dd lays them out."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
import yaml
from carnelian_training import checkpoint
from carnelian_training.config_errors import ConfigError
from carnelian_training.config_tree import config_to_dict
from carnelian_training.foreign import sources, unpickling
from carnelian_training.models.jasper import JasperConfig
from carnelian_training.models.masked import strided
from carnelian_training.weight_files import CheckpointError
from torch import Tensor, nn
from torch.nn import functional as F

REFERENCES = Path(__file__).parent / "references"
TOLERANCE = 1e-4


class Layers(nn.Module):
    """A block of DLE: `conv` (Jasper) or `mconv` (QuartzNet) and `res`, lists of layers with one number each."""

    def __init__(self, body: str, sizes: list[int], block: dict) -> None:
        super().__init__()
        self.block, self.body = block, body
        filters, kernel, dilation = block["filters"], block["kernel_size"][0], block["dilation"][0]
        options = {"padding": kernel // 2 * dilation, "stride": block["stride"][0], "dilation": dilation, "bias": False}
        layers, channels = nn.ModuleList(), sizes[-1]
        for r in range(block["repeat"]):
            if block.get("separable"):
                layers.append(nn.Conv1d(channels, channels, kernel, groups=channels, **options))
                layers.append(nn.Conv1d(channels, filters, 1, bias=False))
            else:
                layers.append(nn.Conv1d(channels, filters, kernel, **options))
            layers.append(nn.BatchNorm1d(filters, eps=1e-3))
            if r + 1 < block["repeat"]:
                layers.extend([nn.ReLU(), nn.Dropout(block["dropout"])])
            channels = filters
        setattr(self, body, layers)
        if block["residual"]:
            norm = nn.BatchNorm1d
            panes = sizes if block.get("residual_dense") else sizes[-1:]
            self.res = nn.ModuleList(
                nn.ModuleList([nn.Conv1d(size, filters, 1, bias=False), norm(filters, eps=1e-3)]) for size in panes
            )

    def forward(self, inputs: list[Tensor]) -> Tensor:
        x = inputs[-1]
        for layer in getattr(self, self.body):
            x = layer(x)
        for (conv, norm), pane in zip(getattr(self, "res", []), inputs, strict=False):
            x = x + norm(conv(pane))
        return F.relu(x)


class Original(nn.Module):
    """A clip alone, without padding, where DLE's masks have nothing to do."""

    def __init__(self, body: str, blocks: list[dict], num_labels: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        layers, panes, channels = nn.ModuleList(), [], 64
        for block in blocks:
            panes += [channels] if block.get("residual_dense") else []
            layers.append(Layers(body, panes if block.get("residual_dense") else [channels], block))
            channels = block["filters"]
        self.encoder.layers = layers
        self.decoder.layers = nn.Sequential(nn.Conv1d(channels, num_labels, 1))

    def forward(self, features: Tensor) -> Tensor:
        inputs = [features]
        for layer in self.encoder.layers:
            x = layer(inputs)
            inputs = [*inputs, x] if layer.block.get("residual_dense") else [x]
        return F.log_softmax(self.decoder.layers(inputs[-1]).transpose(1, 2), dim=2)


def block(filters: int, kernel: int, repeat: int = 1, stride: int = 1, dilation: int = 1, **others) -> dict:
    lists = {"kernel_size": [kernel], "stride": [stride], "dilation": [dilation]}
    return {"filters": filters, "repeat": repeat, "dropout": 0.1, "residual": False, **lists, **others}


DENSE = {"residual": True, "residual_dense": True}
MODELS = {
    "jasper": (
        "conv",
        [
            block(8, 5, stride=2),
            *[block(8, 5, 2, **DENSE)] * 2,
            block(10, 7, 2, **DENSE),
            block(12, 5, dilation=2),
            block(16, 1),
        ],
    ),
    "quartznet": (
        "mconv",
        [
            block(8, 5, stride=2, separable=True),
            *[block(12, 7, 2, residual=True, separable=True)] * 2,
            block(12, 9, dilation=2, separable=True),
            block(16, 1, separable=False),
        ],
    ),
}


def trained(name: str, num_labels: int = 29) -> Original:
    torch.manual_seed(1)
    body, blocks = MODELS[name]
    model = Original(body, blocks, num_labels)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.1, 0.5)
            nn.init.normal_(module.bias, std=0.2)
    return model.eval()


def saved(path: Path, model: Original, average: Original | None, **others) -> Path:
    """With the keys of DLE's `Checkpointer`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
    state = {"epoch": 3, "step": 9, "best_wer": 12.5, "state_dict": model.state_dict(), "optimizer": optimizer}
    state["ema_state_dict"] = average.state_dict() if average is not None else None
    torch.save(state | others, path)
    return path


def yaml_of(name: str, path: Path, change=lambda tree: None) -> Path:
    features = {"normalize": "per_feature", "sample_rate": 16000, "window_size": 0.02, "window_stride": 0.01}
    features |= {"window": "hann", "n_filt": 64, "n_fft": 512, "frame_splicing": 1, "dither": 1e-5, "pad_align": 16}
    encoder = {"init": "xavier_uniform", "in_feats": 64, "frame_splicing": 1, "activation": "relu"}
    encoder |= {"use_conv_masks": True, "blocks": copy.deepcopy(MODELS[name][1])}
    labels = list(" abcdefghijklmnopqrstuvwxyzé")
    tree = {"name": "x", "labels": labels, "input_val": {"filterbank_features": features}, name: {"encoder": encoder}}
    change(tree)
    path.write_text(yaml.safe_dump(tree))
    return path


def set_features(**options):
    return lambda tree: tree["input_val"]["filterbank_features"].update(options)


def without_feature(name):
    return lambda tree: tree["input_val"]["filterbank_features"].pop(name)


@pytest.fixture
def quartznet(tmp_path):
    """A file without an average."""
    return saved(tmp_path / "dle.pt", trained("quartznet"), None)


@pytest.fixture
def read_with(quartznet, tmp_path):
    """Reads it with a YAML that is changed before."""

    def read(change):
        return sources.read(quartznet, dle_config=yaml_of("quartznet", tmp_path / "dle.yaml", change))[0]

    return read


def difference(model: nn.Module, original: Original) -> float:
    """The largest, over clips alone and in a ragged batch."""
    lengths = torch.tensor([61, 40, 7])
    features = torch.randn(3, 64, 61)
    worst = 0.0
    with torch.inference_mode():
        batch, ends = model(features, lengths)
        assert ends.tolist() == strided(lengths, 2).tolist()
        for row, (length, end) in enumerate(zip(lengths, ends, strict=True)):
            expected = original(features[row : row + 1, :, :length])[0]
            assert expected.shape[0] == end
            worst = max(worst, float((batch[row, :end] - expected).abs().max()))
    return worst


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_those_of_the_original_layers(name, tmp_path, caplog):
    original = trained(name)
    path = saved(tmp_path / "dle.pt", original, original)
    config, model = sources.load_model(path, "imported")
    assert difference(model, original) < TOLERANCE
    assert "says nothing about labels, strides and dropout" in caplog.text
    assert config.features.log_guard == pytest.approx(1e-10)
    assert (config.features.frame_count, config.features.edges) == ("ceil", "reflect")
    assert isinstance(config.model, JasperConfig) == (name == "jasper")
    # With DLE's YAML, which says the same of the network, and more: dropout and labels.
    told, _ = sources.read(path, "imported", dle_config=yaml_of(name, tmp_path / "dle.yaml"))
    stages = tuple(dataclasses.replace(stage, dropout=0.1) for stage in config.model.stages)
    assert told.model == dataclasses.replace(config.model, stages=stages)
    assert told.labels[-1] == "é"
    assert told.features == config.features


def test_kernels_of_quartznet_are_scaled_and_rounded_up_as_dle_does(tmp_path):
    def told(name, kernel, **others):
        options = {"kernel_size": [kernel], **others}
        path = yaml_of(name, tmp_path / "dle.yaml", lambda tree: tree[name]["encoder"]["blocks"][0].update(options))
        return sources.read(saved(tmp_path / "dle.pt", trained(name), None), dle_config=path)[0].model.stages[0].kernel

    assert told("quartznet", 4) == told("quartznet", 9, kernel_size_factor=0.5) == told("jasper", 5) == 5
    with pytest.raises(ConfigError, match="`kernel` must be odd"):
        told("jasper", 4)
    with pytest.raises(CheckpointError, match="`kernel_size_factor` is not known"):
        told("jasper", 5, kernel_size_factor=1.0)


@pytest.mark.parametrize(("dither", "guard"), [(0.0, 1e-20), (1e-4, 1e-8), ("1e-4", 1e-8)])
def test_the_dither_of_a_yaml_is_in_the_logarithm(read_with, dither, guard):
    assert read_with(set_features(dither=dither)).features.log_guard == pytest.approx(guard)


def test_the_average_is_taken_unless_the_raw_weights_are_asked_for(tmp_path, caplog):
    raw, average = trained("quartznet"), trained("quartznet")
    nn.init.constant_(average.decoder.layers[0].bias, 0.5)
    path = saved(tmp_path / "dle.pt", raw, average)
    assert sources.read(path)[1]["head.bias"].eq(0.5).all()
    assert torch.equal(sources.read(path, is_raw=True)[1]["head.bias"], raw.decoder.layers[0].bias)
    assert "EMA" not in caplog.text
    _, weights = sources.read(saved(tmp_path / "without.pt", raw, None))
    assert torch.equal(weights["head.bias"], raw.decoder.layers[0].bias)
    assert "no average of its weights (EMA)" in caplog.text


def test_jaspers_first_names_are_read_too(tmp_path):
    original = trained("jasper")
    renamed = {"audio_preprocessor.featurizer.fb": torch.zeros(1)}
    for name, tensor in original.state_dict().items():
        name = name.replace("encoder.layers.", "jasper_encoder.encoder.")
        renamed[name.replace("decoder.layers.", "jasper_decoder.decoder_layers.")] = tensor
    torch.save({"state_dict": renamed, "ema_state_dict": None}, tmp_path / "v1.pt")
    _, model = sources.load_model(tmp_path / "v1.pt")
    assert difference(model, original) < TOLERANCE


def test_a_model_that_was_saved_inside_of_ddp_is_read_too(tmp_path):
    original = trained("quartznet")
    wrapped = {f"module.{name}": tensor for name, tensor in original.state_dict().items()}
    torch.save({"state_dict": wrapped, "ema_state_dict": wrapped}, tmp_path / "ddp.pt")
    _, model = sources.load_model(tmp_path / "ddp.pt")
    assert difference(model, original) < TOLERANCE


def test_tensors_that_do_not_fit_are_named(tmp_path):
    model = trained("quartznet")
    weights = model.state_dict()
    del weights["encoder.layers.1.res.0.1.running_mean"]
    weights["encoder.layers.4.mconv.9.weight"] = torch.zeros(3)
    weights["decoder.layers.0.weight"] = torch.zeros(31, 16, 1)
    torch.save({"state_dict": weights, "ema_state_dict": None}, tmp_path / "dle.pt")
    with pytest.raises(CheckpointError) as error:
        sources.read(tmp_path / "dle.pt")
    for line in (
        "encoder.layers.1.res.0.1.running_mean: missing",
        "encoder.layers.4.mconv.9.weight: unexpected",
        "decoder.layers.0.weight: must be [29, 16, 1], but is [31, 16, 1]",
    ):
        assert line in str(error.value)


def test_labels_of_another_language_have_to_be_named(tmp_path):
    path, labels = saved(tmp_path / "dle.pt", trained("quartznet", 31), None), " abcdefghijklmnopqrstuvwxyzäöü"
    with pytest.raises(CheckpointError, match=r"its head has 30 labels, but 28 were taken; name them .* --dle-config"):
        sources.read(path)
    assert sources.read(path, overrides=(f"labels={list(labels)}",))[0].labels == tuple(labels)


def test_other_files_are_refused(tmp_path, caplog):
    torch.save({"weights": 1}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="is one of Carnelian already"):
        sources.read(tmp_path / "a.pt")
    torch.save({"model": 1}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="a DLE"):
        sources.read(tmp_path / "a.pt")
    for content in (nn.Linear(1, 1), [1], {"encoder.layers.0.mconv.0.weight": torch.zeros(1)}):
        torch.save(content, tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match="a DLE"):
            sources.load_model(tmp_path / "a.pt")
    torch.save({"state_dict": {"wav2vec": torch.zeros(1)}}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match=r"must hold `encoder\.layers`"):
        sources.read(tmp_path / "b.pt")
    assert "EMA" not in caplog.text  # which only DLE's files have


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.pop("input_val"), "must have a section `input_val`"),
        (lambda tree: tree["quartznet"]["encoder"].pop("blocks"), "must be a list of blocks, but is None"),
        (lambda tree: tree["quartznet"]["encoder"].update(activation="selu"), "`activation` must be 'relu'"),
        (set_features(frame_splicing=3), "`frame_splicing` must be 1"),
        (without_feature("window"), "must give `window`: without it DLE takes 'hamming'; supported is 'hann'"),
        (without_feature("sample_rate"), "must give `sample_rate`: without it DLE takes 8000; supported is 16000"),
        (
            set_features(window_size=-1),
            r"dle\.yaml, `filterbank_features`, `window_size` in samples must be .* at least 1, but is -16000",
        ),
        (
            set_features(window_stride=5e-5),
            r"dle\.yaml, `filterbank_features`, `window_stride` in samples must be .* at least 1, but is 0",
        ),
        (
            set_features(window_size=10**400),
            r"dle\.yaml, `filterbank_features`, `window_size` must be at most 2147483647, but is 1000",
        ),
        (set_features(dither=1e300), r"dle\.yaml, `filterbank_features`, `dither` must be at most"),
        (
            lambda tree: tree["quartznet"]["encoder"]["blocks"][1].update(repeat=10**9),
            r"dle\.pt must describe a network of 500 layers at most",
        ),
    ],
)
def test_what_a_yaml_must_not_say_is_refused_by_name(read_with, change, message):
    with pytest.raises(CheckpointError, match=message):
        read_with(change)


def test_a_block_without_a_convolution_is_named(tmp_path):
    weights = trained("quartznet").state_dict()
    weights = {name: tensor for name, tensor in weights.items() if "layers.1.mconv" not in name or tensor.ndim != 3}
    torch.save({"state_dict": weights}, tmp_path / "dle.pt")
    with pytest.raises(CheckpointError, match=r"dle\.pt: `encoder\.layers\.1` must hold a convolution"):
        sources.read(tmp_path / "dle.pt")


def test_a_file_that_is_no_yaml_is_refused(quartznet):
    with pytest.raises(CheckpointError, match=r"dle\.pt: cannot be read as YAML: 'utf-8' codec"):
        sources.read(quartznet, dle_config=quartznet)


def test_a_toml_is_refused(quartznet, tmp_path):
    with pytest.raises(CheckpointError, match=r"jasper10x5dr\.toml must be YAML, but is TOML.* --set 'labels="):
        sources.read(quartznet, dle_config=tmp_path / "jasper10x5dr.toml")


@pytest.mark.parametrize(("weights", "told"), [("quartznet", "jasper"), ("jasper", "quartznet")])
def test_a_yaml_of_the_other_architecture_is_refused_in_one_line(weights, told, tmp_path):
    """It was a line for each tensor."""
    path = saved(tmp_path / "dle.pt", trained(weights), None)
    with pytest.raises(CheckpointError, match=rf"dle\.yaml must have a section `{weights}`, .* but has `{told}`$"):
        sources.read(path, dle_config=yaml_of(told, tmp_path / "dle.yaml"))


def test_options_of_another_kind_of_file_are_refused(quartznet, tmp_path):
    """They were passed over: a wrong dictionary, or the average in place of the raw weights."""
    with pytest.raises(CheckpointError, match=r"dle\.pt must be read without --labels: --labels is for recognisers of"):
        sources.read(quartznet, labels=tmp_path / "dict.ltr.txt")
    for name in ("quartznet.nemo", "wav2vec2_base", "wav2vec2_new.pt"):
        with pytest.raises(CheckpointError, match=rf"{name} must be read without --raw, --dle-config"):
            sources.read(REFERENCES / name, is_raw=True, dle_config=tmp_path / "dle.yaml")
    with pytest.raises(CheckpointError, match="must be read without --labels"):
        sources.read(REFERENCES / "wav2vec2_old.pt", labels=tmp_path / "dict.ltr.txt")  # pre-trained: has no letters


@pytest.mark.parametrize("wrong", [lambda t: t.numpy(), lambda t: t.to_sparse(), lambda t: t.tolist(), lambda t: None])
def test_weights_that_are_no_tensors_are_named(tmp_path, wrong):
    model = trained("quartznet")
    weights = model.state_dict()
    weights["decoder.layers.0.weight"] = wrong(weights["decoder.layers.0.weight"])
    torch.save({"state_dict": weights}, tmp_path / "dle.pt")
    content = unpickling.plain(unpickling.load_checkpoint(REFERENCES / "wav2vec2_new.pt"), "here")
    content["model"]["w2v_encoder.proj.weight"] = wrong(content["model"]["w2v_encoder.proj.weight"])
    torch.save(content, tmp_path / "fairseq.pt")
    for name, key in (("dle.pt", r"decoder\.layers\.0\.weight"), ("fairseq.pt", r"w2v_encoder\.proj\.weight")):
        with pytest.raises(CheckpointError, match=rf"{name}: each .* must be a dense tensor, but these are not: {key}"):
            sources.read(tmp_path / name)


def test_a_tensor_with_a_wrappers_name_and_without_is_refused(tmp_path):
    """The last of the two was taken, without a word."""
    weights = trained("quartznet").state_dict()
    weights["module.decoder.layers.0.bias"] = weights["decoder.layers.0.bias"] + 1
    torch.save({"state_dict": weights}, tmp_path / "dle.pt")
    with pytest.raises(CheckpointError, match=r"with a wrapper's name and without: decoder\.layers\.0\.bias$"):
        sources.read(tmp_path / "dle.pt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state_dict": {1: torch.zeros(1)}}, "must be a dense tensor, but these are not: 1$"),
        ({"state_dict": {}, "ema_state_dict": 5}, "must hold its weights by name, but holds int$"),
    ],
    ids=["a number for a name", "a number for an average"],
)
def test_weights_without_names_are_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "dle.pt")
    with pytest.raises(CheckpointError, match=message):
        sources.read(tmp_path / "dle.pt")


def test_a_checkpoint_of_ours_passes(tmp_path, tiny_config):
    weights = checkpoint.build_model(tiny_config).state_dict()
    checkpoint.save(tmp_path / "t.pt", tiny_config, weights, results={})
    config, model = sources.load_model(tmp_path / "t.pt", "other")
    assert config_to_dict(config) == config_to_dict(tiny_config)
    loaded = model.state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize(("window_size", "samples"), [(0.025, 400), (0.032, 512)])
def test_the_options_of_a_yamls_features_come_along(read_with, window_size, samples):
    options = {"window_size": window_size, "window_stride": 0.0125, "preemph": 0, "lowfreq": 20, "highfreq": 7600}
    features = read_with(set_features(n_fft=None, **options)).features
    assert (features.window_samples, features.hop_samples, features.fft_size) == (samples, 200, 512)
    assert (features.preemphasis, features.low_hz, features.high_hz) == (0.0, 20.0, 7600.0)
