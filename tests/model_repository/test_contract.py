"""What the checked-in repository promises to Triton, without a server."""

import json
import subprocess
import sys
from pathlib import Path

import carnelian_export.profiles
import carnelian_training.ctc
import carnelian_training.features
import carnelian_training.waveform
import onnxruntime
import pytest
from carnelian_export.model_configs import read_config
from carnelian_export.stages import SOURCES
from carnelian_training.data import resampling
from tritonclient.grpc import model_config_pb2 as pb

REPOSITORY = Path(__file__).parents[2] / "model_repository"
ENSEMBLES = ["quartznet_demo", "quartznet_demo_pcm"]
STAGES = ["audio_decode", "quartznet_demo_acoustic", "quartznet_demo_ctc", "quartznet_demo_features"]
# What the native DALI backend runs, and before it what makes DALI 1.42, of Triton 24.10, out of a later one.
SERIALISE = """
import importlib.util, sys
from nvidia.dali._utils.autoserialize import invoke_autoserialize
from nvidia.dali import fn
from nvidia.dali.pipeline import DataNode
del DataNode.shape, fn.filter
spec = importlib.util.spec_from_file_location("autoserialize_mod", sys.argv[1])
head_module = importlib.util.module_from_spec(spec)
sys.modules["autoserialize_mod"] = head_module
spec.loader.exec_module(head_module)
invoke_autoserialize(head_module, sys.argv[2])
"""


def config_of(model: str) -> pb.ModelConfig:
    return read_config(REPOSITORY / model / "config.pbtxt")


def signatures(tensors) -> dict[str, tuple]:
    return {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in tensors}


@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_an_ensembles_edges_agree_in_name_type_and_shape(ensemble):
    config = config_of(ensemble)
    known = signatures(config.input)
    for step in config.ensemble_scheduling.step:
        stage = config_of(step.model_name)
        assert config.max_batch_size <= stage.max_batch_size
        assert set(step.input_map) == {tensor.name for tensor in stage.input}
        for name, (data_type, dims) in signatures(stage.input).items():
            source_type, source_dims = known[step.input_map[name]]
            assert source_type == data_type
            assert len(source_dims) == len(dims)
            assert all(want in (-1, have) for want, have in zip(dims, source_dims, strict=True))
        # The native DALI backend wants every output requested.
        assert set(step.output_map) == {tensor.name for tensor in stage.output}
        known |= {step.output_map[name]: tensor for name, tensor in signatures(stage.output).items()}
    for name, tensor in signatures(config.output).items():
        assert known[name] == tensor


def test_the_graph_declares_its_tensors_as_triton_compares_them_with_the_configuration():
    # The native ONNX Runtime backend loads a model only if a ragged input is flat, each other tensor has a free first
    # dimension, and no other dimension differs: of an input where the graph fixes it, of an output in any case.
    model = "quartznet_demo_acoustic"
    config = config_of(model)
    session = onnxruntime.InferenceSession(str(REPOSITORY / model / "1" / "model.onnx"))
    declared = {
        tensor.name: [size if isinstance(size, int) else -1 for size in tensor.shape]
        for tensor in (*session.get_inputs(), *session.get_outputs())
    }
    features, length = config.input
    assert declared[features.name] == [-1]
    assert declared[length.name] == [-1, *length.dims]
    for output in config.output:
        assert declared[output.name] == [-1, *output.dims]


@pytest.mark.parametrize(
    ("graph", "settings"),
    [
        (SOURCES / "audio_decode" / "dali.py", {}),
        (carnelian_training.features.__file__, {}),
        (carnelian_training.features.__file__, {"frame_count": "ceil"}),
        (carnelian_training.waveform.__file__, {}),
    ],
)
def test_the_dali_of_triton_24_10_can_build_the_graphs(graph, settings, tmp_path):
    source, target = tmp_path / "dali.py", tmp_path / "serialised"
    source.write_bytes(Path(graph).read_bytes())
    (tmp_path / "features.json").write_text(json.dumps({"max_audio_s": 60.0, **settings}))
    subprocess.run([sys.executable, "-c", SERIALISE, str(source), str(target)], check=True)
    serialised = target.read_bytes()
    assert b"Shapes" in serialised
    assert (b"experimental__Filter" in serialised) == (Path(graph).parent.name == "audio_decode")


def test_the_public_tensors():
    text = {"TRANSCRIPT": (pb.TYPE_STRING, [1]), "RESULT": (pb.TYPE_STRING, [1])}
    files, samples = map(config_of, ENSEMBLES)
    assert files.max_batch_size == 1
    assert samples.max_batch_size > 1
    assert signatures(files.input) == {"AUDIO": (pb.TYPE_UINT8, [-1])}
    assert signatures(samples.input) == {"SIGNAL": (pb.TYPE_FP32, [-1]), "SIGNAL_LENGTH": (pb.TYPE_INT32, [1])}
    assert signatures(files.output) == signatures(samples.output) == text


@pytest.mark.parametrize("model", STAGES)
def test_the_entry_alone_turns_requests_away_beyond_its_queue(model):
    batching = config_of(model).dynamic_batching
    # Where there is a policy, Triton 2.51 leaves requests waiting half a second beside an idle instance.
    assert batching.HasField("default_queue_policy") == (model == "audio_decode")
    if model == "audio_decode":
        policy = batching.default_queue_policy
        assert policy.max_queue_size > 0
        assert policy.timeout_action == pb.ModelQueuePolicy.REJECT
        assert policy.allow_timeout_override
        assert policy.default_timeout_microseconds > 0  # without one, requests' own timeouts are ignored


def test_bad_files_do_not_share_a_batch_and_clips_of_any_lengths_do():
    assert config_of("audio_decode").max_batch_size == 1
    for stage, tensor in {"features": "SIGNAL", "acoustic": "FEATURES", "ctc": "LOG_PROBS"}.items():
        inputs = {t.name: t for t in config_of(f"quartznet_demo_{stage}").input}
        assert inputs[tensor].allow_ragged_batch


def test_the_confidences_of_every_decoder_are_calibrated():
    measured = carnelian_training.ctc.Calibration.read(REPOSITORY / "quartznet_demo_ctc" / "1" / "calibration.json")
    assert set(measured.confidence) == set(carnelian_training.ctc.DECODERS)


def test_audio_decode_has_the_filter_of_training():
    theirs = Path(resampling.__file__).read_text()
    shared = theirs[theirs.index("REACH = ") : theirs.index("def resample")].split("\n\n\n")
    assert len([part for part in shared if part]) == 2
    text = (SOURCES / "audio_decode" / "dali.py").read_text()
    assert all(part in text for part in shared)


def test_audio_decode_cuts_at_the_limit_that_the_models_state():
    text = (SOURCES / "audio_decode" / "dali.py").read_text()
    assert f"MAX_AUDIO_S = {carnelian_export.profiles.MAX_AUDIO_S:g}\n" in text
