import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from carnelian_export import engine, parity
from carnelian_export.engine import EngineError, build_engine
from carnelian_export.graph.shaped import build_shaped, export_shaped
from carnelian_export.model_configs import read_config
from carnelian_export.parity import ParityError, compare, make_inputs, run, score
from carnelian_export.profiles import SHAPED_INPUTS, Profile, choose_profiles, shapes_of
from carnelian_export.repository import write_model
from carnelian_export.target import Target, TargetError
from carnelian_training.checkpoint import build_model, load_model
from carnelian_training.config import config_from_dict
from carnelian_training.models.hourglass import HourglassConfig
from carnelian_training.models.wav2vec2 import Wav2Vec2
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config

TOLERANCE = 1e-4
SMALL = [Profile(rows=1, seconds=0.5, most_s=8.0), Profile(rows=2, seconds=2.0, most_s=8.0)]
HOP = 160
SHAPES = [shapes_of(profile, 4, 64, HOP) for profile in SMALL]


@pytest.fixture
def tensorrt():
    """NVIDIA's package that builds engines without a GPU; `make test` installs it."""
    return pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu12 is not installed")


@pytest.mark.parametrize("fixture", ["network", "jasper"])
def test_the_shaped_graph_says_of_a_batch_what_each_clip_alone_says(fixture, clips, frames, request, open_session):
    network = request.getfixturevalue(fixture)
    session = open_session(export_shaped(network, torch.float32, HOP))
    batch, lengths = run(session, clips, frames)
    assert batch.shape[1] == 100
    assert lengths.tolist() == [[1], [19], [100], [45]]
    for row, clip in enumerate(clips):
        expected, end = score(network, clip, clip.shape[1])
        np.testing.assert_allclose(batch[row, :end], expected, atol=TOLERANCE)
        assert not batch[row, end:].any()


def test_rows_of_one_request_are_as_long_as_its_clips(network, clips, open_session):
    session = open_session(export_shaped(network, torch.float32, HOP))
    inputs = make_inputs([clips[2]] * 3, [200] * 3)
    expected, _ = session.run(None, inputs)
    inputs["REQUEST_SIZES"] = np.array([3 * clips[2].size], np.int32)
    inputs["LONGEST_REQUEST"] = np.zeros(3 * clips[2].size, np.float32)
    np.testing.assert_array_equal(session.run(None, inputs)[0], expected)


def test_a_long_clip_beside_a_request_of_several_rows_is_heard_to_its_end(network, clips, frames, open_session):
    session = open_session(export_shaped(network, torch.float32, HOP))
    long, short = clips[2], clips[1]
    inputs = make_inputs([long, *[short] * 3], [frames[2], *[frames[1]] * 3])
    expected = session.run(None, inputs)
    inputs["REQUEST_SIZES"] = np.array([long.size, 3 * short.size], np.int32)
    for got, want in zip(session.run(None, inputs), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_no_size_in_the_shaped_graph_follows_from_a_value(network):
    graph = export_shaped(network, torch.float32, HOP).graph
    made_by = {output: node for node in graph.node for output in node.output}

    def sources(name):
        node = made_by.get(name)
        if node is None:
            return {name}
        return {"shape"} if node.op_type == "Shape" else set().union(*(sources(i) for i in node.input if i))

    for node in graph.node:
        if node.op_type == "Range":
            assert not set().union(*(sources(name) for name in node.input)) & set(SHAPED_INPUTS)


def test_a_bad_value_stays_in_its_row_of_the_shaped_graph(network, clips, frames, open_session):
    session = open_session(export_shaped(network, torch.float16, HOP))
    before, _ = run(session, clips, frames)
    clips[1][:] = np.nan
    after, _ = run(session, clips, frames)
    assert np.isnan(after[1]).any()
    for row in (0, 2, 3):
        np.testing.assert_array_equal(after[row], before[row])


@pytest.mark.usefixtures("tensorrt")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_engine_with_several_profiles_is_built(network, dtype):
    plan = build_engine(export_shaped(network, dtype, HOP), SHAPES)
    assert len(plan) > 10_000


@pytest.mark.usefixtures("tensorrt")
def test_a_timing_cache_that_is_not_written_is_named(network, tmp_path, caplog):
    build_engine(export_shaped(network, torch.float32, HOP), SHAPES[:1])
    build_engine(export_shaped(network, torch.float32, HOP), SHAPES[:1], tmp_path / "kernels.cache")
    plain, told = caplog.messages
    assert told == f"{plain}; TensorRT-RTX has no timing cache, so {tmp_path / 'kernels.cache'} was not written"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{}, {"tf32": True}])
def test_float32_stays_float32_on_gpus_that_have_tf32_unless_asked(network, tensorrt, monkeypatch, options):
    build, allowed = tensorrt.Builder.build_serialized_network, []

    def watch(builder, graph, config):
        allowed.append(config.get_flag(tensorrt.BuilderFlag.TF32))
        return build(builder, graph, config)

    monkeypatch.setattr(tensorrt.Builder, "build_serialized_network", watch)
    build_engine(export_shaped(network, torch.float32, HOP), SHAPES[:1], **options)
    assert allowed == [bool(options)]


@pytest.mark.usefixtures("tensorrt")
def test_what_tensorrt_refuses_is_said_in_its_words(network):
    graph = export_shaped(network, torch.float32, HOP)
    for node in graph.graph.node:
        if node.op_type == "LogSoftmax":
            node.op_type = "Unheard"
    with pytest.raises(EngineError, match=r"must read the graph, but says: .*Unheard"):
        build_engine(graph, SHAPES)


@pytest.mark.usefixtures("tensorrt")
def test_an_export_writes_the_engine_and_its_configuration(tmp_path, config, network, monkeypatch):
    monkeypatch.setattr("carnelian_export.acoustic.choose_profiles", lambda most: SMALL)
    write_model(tmp_path, "tiny", config, network, target=Target(format="tensorrt", precision="bf16"))
    folder = tmp_path / "tiny_acoustic"
    assert [path.name for path in (folder / "1").iterdir()] == ["model.plan"]
    acoustic = read_config(folder / "config.pbtxt")
    assert (acoustic.backend, len(acoustic.parameters)) == ("tensorrt", 0)
    assert acoustic.instance_group[0].profile == ["0", "1", "2", "3"]
    assert list(acoustic.input[0].dims) == [-1, -1]
    made = [name for tensor in acoustic.batch_input for name in tensor.target_name]
    assert {*(tensor.name for tensor in acoustic.input), *made} == set(SHAPED_INPUTS)


@pytest.mark.parametrize(
    ("precision", "limit", "form"),
    [("fp16", "fp16", "ONNX Runtime"), ("bf16", "fp32", "ONNX Runtime"), ("bf16", "bf16", "bfloat16")],
)
def test_the_graph_is_compared_before_an_engine_is_built(
    tmp_path, config, network, monkeypatch, precision, limit, form
):
    monkeypatch.setitem(parity.TOLERANCES, limit, parity.Tolerance(0.0, 0.0))
    with pytest.raises(ParityError, match=f"^tiny_acoustic in {form}: .* of {limit} must be within 0 of"):
        write_model(tmp_path, "tiny", config, network, target=Target(format="tensorrt", precision=precision))
    assert not list(tmp_path.iterdir())


def test_the_graphs_that_are_compared_for_bf16_have_the_engines_limit_of_frames(tmp_path, config, network, monkeypatch):
    """A row of theirs could have 160 times as many."""
    hops = []
    for make in (export_shaped, build_shaped):
        place = f"carnelian_export.acoustic.{make.__name__}"
        monkeypatch.setattr(place, lambda *given, make=make: hops.append(given[2:]) or make(*given))
    monkeypatch.setattr("carnelian_export.acoustic.build_engine", lambda *_: b"built")
    write_model(tmp_path, "tiny", config, network, target=Target(format="tensorrt", precision="bf16"))
    assert hops == [(HOP,)] * 3


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_graph_of_a_trained_network_is_accepted_in_half_the_bits(tmp_path, monkeypatch, precision):
    monkeypatch.setattr("carnelian_export.acoustic.build_engine", lambda *_: b"built")
    config, network = load_model(Path(__file__).parents[2] / "demo/quartznet_demo.pt")
    write_model(tmp_path, "demo", config, network, target=Target(format="tensorrt", precision=precision))
    assert (tmp_path / "demo_acoustic/1/model.plan").read_bytes() == b"built"


def test_onnxruntimes_provider_gets_the_shaped_graph_and_one_profile_for_all_batches(tmp_path, config, network):
    write_model(tmp_path, "tiny", config, network, target=Target(provider="tensorrt", precision="fp16"))
    folder = tmp_path / "tiny_acoustic"
    acoustic = read_config(folder / "config.pbtxt")
    (accelerator,) = acoustic.optimization.execution_accelerators.gpu_execution_accelerator
    assert (acoustic.backend, accelerator.name) == ("onnxruntime", "tensorrt")
    assert accelerator.parameters["precision_mode"] == "FP32"  # which lets the graph's own types stand
    assert accelerator.parameters["trt_profile_max_shapes"].startswith(
        f"FEATURES:{(192_000 + 32) * 64},FEATURES_SHAPE:32x2,"
    )
    made = [name for tensor in acoustic.batch_input for name in tensor.target_name]
    graph = onnx.load(folder / "1" / "model.onnx").graph
    assert {*(tensor.name for tensor in acoustic.input), *made} == {tensor.name for tensor in graph.input}


def test_another_networks_engines_are_not_taken_from_the_cache(tmp_path, config, caplog):
    prefixes = set()
    for seed in (0, 1, 1):
        torch.manual_seed(seed)
        write_model(tmp_path, "tiny", config, build_model(config).eval(), target=Target(provider="tensorrt"))
        acoustic = read_config(tmp_path / "tiny_acoustic" / "config.pbtxt")
        (accelerator,) = acoustic.optimization.execution_accelerators.gpu_execution_accelerator
        prefixes.add(accelerator.parameters["trt_engine_cache_prefix"])
    assert len(prefixes) == 2
    assert all(prefix.startswith("tiny_acoustic_") for prefix in prefixes)
    assert "set up otherwise" not in caplog.text


def test_a_row_has_room_for_the_longest_clip_and_no_more(network, open_session):
    session = open_session(export_shaped(network, torch.float32, HOP))
    for frames, rows in ((6001, 6001), (7000, 6001)):  # 60 s, and what no feature stage lets through
        log_probs, _ = run(session, [np.zeros((64, frames), np.float32)], [frames])
        assert log_probs.shape[1] == network.config.output_frames(rows)


def fits(batch, shapes):
    return all(
        least[axis] <= size <= most[axis]
        for name, (least, _, most) in shapes.items()
        for axis, size in enumerate(batch[name].shape)
    )


@pytest.fixture
def compare_within(open_session):
    """Compares the shaped graph with PyTorch, as exports do, on batches that all of the profiles take."""

    def compare_within(profiles, network):
        session = open_session(export_shaped(network, torch.float32, HOP))

        def score_in_profiles(clips, lengths):
            assert all(fits(make_inputs(clips, lengths), shapes) for shapes in profiles)
            return run(session, clips, lengths)

        compare(score_in_profiles, network, "fp32", "the graph")

    return compare_within


def test_every_profile_takes_the_batches_that_an_engine_is_compared_on(network, compare_within):
    compare_within([shapes_of(profile, 32, 64, 160) for profile in choose_profiles(32)], network)


@pytest.mark.parametrize(
    ("most", "bands", "hop", "batches"),
    [
        (32, 64, 160, [(1, 1), (1, 51), (1, 6001), (2, 800), (8, 6001), (32, 1), (32, 6001)]),
        (32, 64, 80, [(1, 1), (1, 12_001), (8, 12_001), (32, 1), (32, 12_001)]),
        (8, None, 1, [(1, 1), (1, 960_000), (2, 128_000), (8, 1), (8, 960_000)]),
    ],
    ids=["features", "features of 5 ms", "waveforms"],
)
def test_profiles_take_every_batch_that_the_configuration_allows(most, bands, hop, batches):
    profiles = [shapes_of(profile, most, bands, hop) for profile in choose_profiles(most)]
    for rows, length in batches:
        clip = np.zeros((bands, length) if bands else length, np.float32)
        batch = make_inputs([clip] * rows, [length] * rows)
        # As one request with all rows, too.
        batch["LONGEST_REQUEST"] = np.zeros(rows * clip.size, np.float32)
        assert any(fits(batch, shapes) for shapes in profiles)
    for shapes in profiles:
        assert all(least <= tuned <= largest for least, tuned, largest in shapes.values())


def test_without_tensorrt_the_export_says_what_to_install(network, monkeypatch):
    for name in (engine.SERVABLE, engine.PORTABLE):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EngineError, match=r"pip install 'carnelian-export\[tensorrt\]'"):
        build_engine(onnx.ModelProto(), SHAPES)


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_a_tensorrt_that_does_not_load_is_named(tmp_path, monkeypatch, error):
    """The engine was built with TensorRT-RTX, which Triton cannot load, or the advice was to install TensorRT."""
    (tmp_path / "tensorrt.py").write_text(f"raise {error}('libnvinfer.so.10: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, engine.SERVABLE, raising=False)
    with pytest.raises(EngineError, match=r"^tensorrt is installed, .* but does not: libnvinfer\.so\.10: cannot open"):
        engine.load_tensorrt()


def test_what_does_not_go_together_is_refused(tmp_path):
    with pytest.raises(TargetError, match="--execution-provider is for --format onnx"):
        Target(format="tensorrt", provider="cuda")
    with pytest.raises(TargetError, match="--timing-cache is for --format tensorrt"):
        Target(timing_cache=tmp_path / "cache")
    with pytest.raises(TargetError, match="--timing-cache must be a file in a folder that exists"):
        Target(format="tensorrt", timing_cache=tmp_path / "missing" / "cache")
    with pytest.raises(TargetError, match="must be one of fp32, fp16, int8, but is bf16"):
        Target(precision="bf16")


@pytest.fixture(params=["base", "large, hourglass"])
def wav2vec2(request):
    """Of both kinds of norms, with every layer's numbers set to something."""
    sizes = {"conv_channels": (8,) * 3, "conv_kernels": (10, 4, 4), "conv_strides": (8, 4, 4), "width": 16, "heads": 2}
    sizes |= {"layers": 3, "feed_forward": 16, "position_kernel": 16, "position_groups": 2}
    if request.param != "base":
        sizes |= {"conv_norm": "layer", "conv_bias": True, "norm_first": True}
        sizes["hourglass"] = HourglassConfig(before=1, pooled=1, after=1, factor=3)
    torch.manual_seed(0)
    network = Wav2Vec2(Wav2Vec2Config(**sizes), 4).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return network


def test_the_shaped_graph_of_waveforms_says_of_a_batch_what_each_clip_alone_says(wav2vec2, open_session):
    session = open_session(export_shaped(wav2vec2, torch.float32, 1))
    rng = np.random.default_rng(0)
    samples = [130, 2611, 8000, 129, 4000]
    clips = [rng.standard_normal(count, np.float32) for count in samples]
    batch, lengths = run(session, clips, [*samples[:4], 3000])
    assert lengths[:, 0].tolist() == [1, 20, 62, 0, 23]
    for row, (clip, end) in enumerate(zip(clips, lengths[:, 0], strict=True)):
        expected, _ = score(wav2vec2, clip, [*samples[:4], 3000][row])
        np.testing.assert_allclose(batch[row, :end], expected[:end], atol=TOLERANCE)
        assert not batch[row, end:].any()
    clips[1][:] = np.nan
    after, _ = run(session, clips, [*samples[:4], 3000])
    np.testing.assert_array_equal(after[2], batch[2])


@pytest.mark.usefixtures("tensorrt")
def test_an_engine_of_waveforms_is_built_and_configured(wav2vec2, tmp_path, monkeypatch):
    monkeypatch.setattr("carnelian_export.acoustic.choose_profiles", lambda most: SMALL[:1])
    precision = "fp16" if wav2vec2.config.conv_norm == "group" else "bf16"
    config = config_from_dict({"name": "tiny", "model": asdict(wav2vec2.config), "labels": list("abc")}, "here")
    write_model(tmp_path, "tiny", config, wav2vec2, target=Target(format="tensorrt", precision=precision))
    folder = tmp_path / "tiny_acoustic"
    assert (folder / "1" / "model.plan").stat().st_size > 10_000
    assert list(read_config(folder / "config.pbtxt").input[0].dims) == [-1]


def test_every_profile_of_waveforms_takes_the_batches_that_an_engine_is_compared_on(compare_within):
    small = Wav2Vec2Config(width=8, heads=2, layers=1, feed_forward=8, conv_channels=(4,) * 7, position_groups=2)
    torch.manual_seed(0)
    profiles = [shapes_of(profile, 8, None, 1) for profile in choose_profiles(8)]
    compare_within(profiles, Wav2Vec2(small, 4).eval())
