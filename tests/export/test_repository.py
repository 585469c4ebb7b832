import dataclasses
import json
import re
from pathlib import Path

import onnx
import pytest
import torch
from carnelian_export import parity
from carnelian_export.model_configs import read_config
from carnelian_export.repository import write_model
from carnelian_export.stages import SOURCES, RepositoryError
from carnelian_export.target import Target
from carnelian_export.tuning import StageTuning, describe_tuning
from carnelian_training.checkpoint import build_model
from carnelian_training.features import FeatureSettings
from carnelian_training.models.network import CtcNetwork
from torch import nn


def test_a_fresh_repository_gets_all_folders_and_nothing_else(tmp_path, config, network, folders):
    difference = write_model(tmp_path / "new" / "repository", "tiny", config, network)
    assert 0 < difference <= parity.TOLERANCES["fp32"].worst
    assert sorted(p.name for p in (tmp_path / "new" / "repository").iterdir()) == folders
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["repository"]


def test_an_ensemble_comes_after_its_stages(tmp_path, config, network, monkeypatch):
    """Without them Triton does not start, if the export is killed; and a polling one complains."""
    come, move = [], Path.rename
    monkeypatch.setattr(Path, "rename", lambda path, target: come.append(target.name) or move(path, target))
    write_model(tmp_path / "r", "tiny", config, network)
    stages = {name for name in come if name not in ("tiny", "tiny_pcm")}
    assert stages == {"audio_decode", "tiny_acoustic", "tiny_ctc", "tiny_features"}
    assert set(come[-2:]) == {"tiny", "tiny_pcm"}


def test_a_network_in_training_mode_is_refused(tmp_path, config):
    with pytest.raises(ValueError, match=r"must be in evaluation mode, .* call network\.eval\(\)"):
        write_model(tmp_path / "repository", "tiny", config, build_model(config))
    assert not (tmp_path / "repository").exists()


def test_a_network_that_export_does_not_know_is_refused(tmp_path, config, network):
    class Conformer(CtcNetwork):
        config = network.config

    with pytest.raises(TypeError, match="must be a StackNetwork or Wav2Vec2, but is of class Conformer"):
        write_model(tmp_path / "repository", "tiny", config, Conformer().eval())
    network.blocks[-1] = nn.Identity()
    with pytest.raises(TypeError, match=r"block 3 must be a Block of .*, but is of class Identity"):
        write_model(tmp_path / "repository", "tiny", config, network)
    assert not (tmp_path / "repository").exists()


def test_exporting_again_gives_the_same_bytes(tmp_path, config, network, contents):
    write_model(tmp_path / "a", "tiny", config, network)
    write_model(tmp_path / "b", "tiny", config, network)
    first = contents(tmp_path / "a")
    assert contents(tmp_path / "b") == first
    write_model(tmp_path / "a", "tiny", config, network)
    assert contents(tmp_path / "a") == first


def test_new_weights_replace_the_old_and_leave_neighbours_alone(tmp_path, config, network, contents):
    write_model(tmp_path / "r", "tiny", config, network)
    write_model(tmp_path / "r", "other", config, network)
    before = contents(tmp_path / "r")
    torch.manual_seed(1)
    write_model(tmp_path / "r", "tiny", config, build_model(config).eval())
    after = contents(tmp_path / "r")
    assert [name for name in before if before[name] != after[name]] == ["tiny_acoustic/1/model.onnx"]
    assert set(before) == set(after)


def test_other_labels_are_another_release(tmp_path, config, network, contents):
    write_model(tmp_path / "r", "tiny", config, network)
    before = contents(tmp_path / "r")
    other = dataclasses.replace(config, labels=(*config.labels, "-"))
    words = r"ctc\.json must be .* but has other values of labels; choose another --name .* tiny, tiny_pcm, "
    with pytest.raises(RepositoryError, match=words):
        write_model(tmp_path / "r", "tiny", other, build_model(other).eval())
    assert contents(tmp_path / "r") == before


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ('{"max_audio_s": 30.0}', "has other values of max_audio_s;"),
        ('{"max_audio_s": 60.0, "new": null}', "has other values of new;"),
        ("null", "is missing or damaged;"),
        ("[" * 100_000, "is missing or damaged;"),
    ],
)
def test_other_features_are_another_release(tmp_path, config, network, there, found):
    write_model(tmp_path / "r", "tiny", config, network)
    (tmp_path / "r" / "tiny_features" / "1" / "features.json").write_text(there)
    with pytest.raises(RepositoryError, match=rf"features\.json must be .* but {found}"):
        write_model(tmp_path / "r", "tiny", config, network)


def test_the_name_that_older_versions_wrote_makes_no_other_release(tmp_path, config, network):
    write_model(tmp_path, "tiny", config, network)
    settings = tmp_path / "tiny_ctc" / "1" / "ctc.json"
    before = settings.read_text()
    settings.write_text(json.dumps({"name": "renamed since"} | json.loads(before)))
    write_model(tmp_path, "tiny", config, network)
    assert settings.read_text() == before


def test_line_ends_of_windows_are_no_other_release(tmp_path, config, network, caplog):
    """Git for Windows checks text out with them."""
    write_model(tmp_path, "tiny", config, network)
    for path in (*tmp_path.glob("*/1/*.py"), *tmp_path.glob("*/1/*.json")):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    write_model(tmp_path, "tiny", config, network)
    assert not caplog.records


def test_settings_that_an_older_version_lacked_were_their_defaults(tmp_path, config, network):
    """After an upgrade that added a setting, no name could get new weights."""
    write_model(tmp_path, "tiny", config, network)
    path = tmp_path / "tiny_features" / "1" / "features.json"
    written = path.read_text()
    older = json.loads(written)
    assert older.pop("edges") == "reflect"
    path.write_text(json.dumps(older))
    other = dataclasses.replace(config, features=FeatureSettings(edges="zero"))
    with pytest.raises(RepositoryError, match=r"features\.json must be"):
        write_model(tmp_path, "tiny", other, network)
    write_model(tmp_path, "tiny", config, network)
    assert path.read_text() == written


def test_a_reworded_program_is_no_other_release(tmp_path, config, network, caplog):
    """After any upgrade no name could get new weights, and an `audio_decode` was said to differ."""
    write_model(tmp_path, "tiny", config, network)
    programs = [tmp_path / model / "1" / "dali.py" for model in ("tiny_features", "audio_decode")]
    for program in programs:
        written = program.read_text()
        reworded = re.sub(r'("""|# )[A-Z]', r"\1In other words: ", written)
        assert reworded.count("In other words") > 2
        program.write_text(reworded)
    write_model(tmp_path, "tiny", config, network)
    assert not caplog.records


def test_a_program_of_another_version_is_replaced_with_a_warning(tmp_path, config, network, caplog):
    """The export was refused, and no advice led to new weights under the name with the settings kept in view."""
    write_model(tmp_path, "tiny", config, network)
    program, settings = (tmp_path / "tiny_features" / file for file in ("1/dali.py", "config.pbtxt"))
    written = program.read_text()
    program.write_text(written.replace("VARIANCE_GUARD = 1e-8", "VARIANCE_GUARD = 1e-9"))
    settings.write_text(settings.read_text().replace("count: 1", "count: 3", 1))
    write_model(tmp_path, "tiny", config, network)
    assert program.read_text() == written
    features, changes = caplog.messages
    assert features.startswith(f"{program} differs from this version's program, which replaces it: ")
    assert "tiny_features: instance_group was [count: 3 " in changes


@pytest.mark.parametrize(
    ("ours", "other", "found"),
    [
        ('backend: "onnxruntime"', 'backend: "tensorrt"', "it has backend tensorrt"),
        ("dims: 29", "dims: 30", r"it has .*'LOG_PROBS', 'TYPE_FP32', -1, 30\)"),
    ],
    ids=["backend", "dims"],
)
def test_another_format_is_another_release(tmp_path, config, network, ours, other, found):
    write_model(tmp_path / "r", "tiny", config, network)
    path = tmp_path / "r" / "tiny_acoustic" / "config.pbtxt"
    path.write_text(path.read_text().replace(ours, other))
    with pytest.raises(RepositoryError, match=found):
        write_model(tmp_path / "r", "tiny", config, network)


def test_an_audio_decode_that_is_there_stays_if_its_tensors_fit(tmp_path, config, network):
    folder = tmp_path / "r" / "audio_decode"
    folder.mkdir(parents=True)
    source = (SOURCES / "audio_decode" / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(source.replace("count: 4", "count: 8"))
    write_model(tmp_path / "r", "tiny", config, network)
    assert read_config(folder / "config.pbtxt").instance_group[0].count == 8
    (folder / "config.pbtxt").write_text(source.replace("SIGNAL_LENGTH", "SAMPLES"))
    with pytest.raises(RepositoryError, match="SAMPLES"):
        write_model(tmp_path / "r", "tiny", config, network)


def test_an_audio_decode_of_another_version_stays_with_a_warning(tmp_path, config, network, caplog):
    """An old one that opens files of any format, in which its decoder may crash, stayed without a word."""
    repository = tmp_path / "r"
    for _ in range(2):
        write_model(repository, "tiny", config, network)
    assert not caplog.records
    program = repository / "audio_decode" / "1" / "dali.py"
    program.write_text("# of another version")
    write_model(repository, "tiny", config, network)
    assert program.read_text() == "# of another version"
    assert f"{repository / 'audio_decode'} stays as it is" in caplog.text
    assert "move the folder away and export again, this model or another one of the repository" in caplog.text


def test_a_stranger_of_the_same_name_is_not_replaced(tmp_path, config, network):
    (tmp_path / "r" / "tiny").mkdir(parents=True)
    with pytest.raises(RepositoryError, match=r"no config\.pbtxt"):
        write_model(tmp_path / "r", "tiny", config, network)
    (tmp_path / "r" / "tiny" / "config.pbtxt").write_text('name: "tiny" backend: "python" max_batch_size: 4')
    with pytest.raises(RepositoryError, match="backend python, max_batch_size 4"):
        write_model(tmp_path / "r", "tiny", config, network)


def test_what_is_no_repository_is_refused_and_left_as_it_is(tmp_path, config, network, contents):
    write_model(tmp_path / "r", "tiny", config, network)
    before = contents(tmp_path)
    with pytest.raises(RepositoryError, match=r"tiny is a model's own: give the folder that it is in, .*r$"):
        write_model(tmp_path / "r" / "tiny", "tiny", config, network)
    assert contents(tmp_path) == before
    with pytest.raises(RepositoryError, match="/dev/null is no folder"):
        write_model(Path("/dev/null"), "tiny", config, network)
    with pytest.raises(RepositoryError, match="/ is the root of all files"):
        write_model(Path("/"), "tiny", config, network)


@pytest.mark.parametrize("content", [b"backend: python", b"# \xe9"])
def test_a_configuration_that_was_broken_by_hand_is_named(tmp_path, config, network, content):
    """The command ended in the parser's traceback."""
    path = tmp_path / "r" / "tiny_ctc" / "config.pbtxt"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"r/tiny_ctc/config\.pbtxt must be a model's configuration, .*; mend"):
        write_model(tmp_path / "r", "tiny", config, network)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("stage", "tensor", "rows"), [("features", "SIGNAL", [1, 1]), ("acoustic", "FEATURES", [1, 4, 1])]
)
def test_warm_up_runs_clips_that_fill_their_tensors(tmp_path, config, network, stage, tensor, rows):
    write_model(tmp_path, "tiny", config, network)
    warmups = read_config(tmp_path / f"tiny_{stage}" / "config.pbtxt").model_warmup
    assert [warmup.batch_size for warmup in warmups] == rows
    for warmup in warmups:
        (length,) = (value for value in warmup.inputs.values() if value.input_data_file)
        file = tmp_path / f"tiny_{stage}" / "warmup" / length.input_data_file
        assert int.from_bytes(file.read_bytes(), "little") == warmup.inputs[tensor].dims[-1] > 0


def test_decoding_warms_up_with_files_of_their_stated_sizes(tmp_path, config, network):
    write_model(tmp_path, "tiny", config, network)
    folder = tmp_path / "audio_decode"
    samples = [warmup.inputs["AUDIO"] for warmup in read_config(folder / "config.pbtxt").model_warmup]
    assert {sample.input_data_file for sample in samples} == {path.name for path in (folder / "warmup").iterdir()}
    assert all((folder / "warmup" / s.input_data_file).stat().st_size == s.dims[0] for s in samples)


@pytest.mark.parametrize("name", ["audio_decode", "tiny_pcm", "tiny_ctc", "Tiny", "../tiny", ""])
def test_names_that_would_clash_are_refused(tmp_path, config, network, name):
    with pytest.raises(RepositoryError, match="a model's name must"):
        write_model(tmp_path / "r", name, config, network)


def test_float16_is_at_no_interface(tmp_path, config, network, folders):
    difference = write_model(tmp_path, "tiny", config, network, target=Target(precision="fp16"))
    assert 1e-5 < difference <= parity.TOLERANCES["fp16"].worst
    graph = onnx.load(tmp_path / "tiny_acoustic" / "1" / "model.onnx").graph
    kinds = [tensor.type.tensor_type.elem_type for tensor in (*graph.input, *graph.output)]
    assert kinds == [
        onnx.TensorProto.FLOAT,
        *[onnx.TensorProto.INT32] * 2,
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.INT32,
    ]
    write_model(tmp_path / "fp32", "tiny", config, network)
    for model in folders:
        half, single = (read_config(folder / model / "config.pbtxt") for folder in (tmp_path, tmp_path / "fp32"))
        if model == "tiny_features":  # for GPUs, which leave the cores to this stage, and have a driver
            assert half.parameters.pop("num_threads").string_value == "8"
            assert single.dynamic_batching.preferred_batch_size == [1]
            assert not half.dynamic_batching.preferred_batch_size
            assert half.model_warmup[1].batch_size == 8  # as many rows as threads
            half.dynamic_batching.preferred_batch_size.append(1)
            half.model_warmup[1].name, half.model_warmup[1].batch_size = "1_of_20s", 1
        assert half == single


def test_a_tuning_says_how_many_threads_features_have_beside_a_gpu(tmp_path, config, network):
    for threads in (2, 0):
        target = Target(provider="cuda", tuning={"features": StageTuning(threads=threads)})
        write_model(tmp_path, "tiny", config, network, target=target)
        assert describe_tuning(read_config(tmp_path / "tiny_features/config.pbtxt")).threads == threads


def test_an_instance_on_a_gpu_runs_on_cuda_without_being_told(tmp_path, config, network):
    write_model(tmp_path / "a", "tiny", config, network)
    write_model(tmp_path / "b", "tiny", config, network, target=Target(provider="cuda"))
    plain, cuda = (read_config(tmp_path / name / "tiny_acoustic" / "config.pbtxt") for name in "ab")
    cuda.model_warmup.clear()  # of shapes that its graph has
    plain.model_warmup.clear()
    assert cuda == plain
    assert plain.instance_group[0].kind == plain.instance_group[0].KIND_AUTO
    assert plain.parameters["cudnn_conv_algo_search"].string_value == "1"


def test_settings_follow_the_configuration(tmp_path, config, network):
    write_model(tmp_path, "tiny", config, network)
    assert json.loads((tmp_path / "tiny_ctc" / "1" / "ctc.json").read_text()) == {
        "labels": list(config.labels),
        "frame_s": 0.02,
        "max_audio_s": 60.0,
    }
    assert list(read_config(tmp_path / "tiny_acoustic" / "config.pbtxt").output[0].dims) == [-1, 29]
