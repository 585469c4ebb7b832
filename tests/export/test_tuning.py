from pathlib import Path

import pytest
from carnelian_export.model_configs import STAGES, TensorSizes, build_configs, read_config
from carnelian_export.repository import write_model
from carnelian_export.target import Target
from carnelian_export.tuning import (
    StageTuning,
    TuningError,
    apply_tuning,
    describe_tuning,
    read_tuning,
    write_tuning,
)
from carnelian_serving.backends.parts import MAX_RUN_ROWS
from carnelian_training.replacement import WriteError

DEMO = Path(__file__).parents[2] / "model_repository"
TUNING = {
    "acoustic": StageTuning(instances=2, threads=1, preferred_batch=8, queue_delay_ms=0.5),
    "decode": StageTuning(instances=6),
    "ctc": StageTuning(instances=3),
}


def test_tuning_survives_its_file(tmp_path):
    path = tmp_path / "new" / "tuning.json"
    write_tuning(path, {**TUNING, "features": StageTuning()})
    assert read_tuning(path) == TUNING
    path.write_text(f"\ufeff{path.read_text()}", encoding="utf-8")  # as Windows' editors save it
    assert read_tuning(path) == TUNING


def test_tuning_that_finds_no_room_is_named_and_the_old_one_stays(room, tmp_path):
    write_tuning(tmp_path / "tuning.json", TUNING)
    with room(50), pytest.raises(WriteError, match=r"tuning\.json could not be written, and is as it was before"):
        write_tuning(tmp_path / "tuning.json", {**TUNING, "features": StageTuning(instances=2)})
    assert read_tuning(tmp_path / "tuning.json") == TUNING


def test_tuning_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TuningError, match=r"nowhere\.json must be JSON as `carnelian-perf tune` writes it"):
        read_tuning(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "must be JSON"),
        ("instances: 2", "must be JSON"),
        ('{"encoder": {}}', "encoder"),
        ('{"ctc": {"instanses": 2}}', "instanses"),
        ('{"ctc": {"instances": 0}}', "`instances` must be a whole number from 1 to 4096, but is 0"),
        ('{"ctc": {"instances": 1.5}}', "whole number"),
        ('{"ctc": {"instances": 2.0}}', "whole number"),
        ('{"ctc": {"queue_delay_ms": Infinity}}', "`queue_delay_ms` must be a number from 0 to 60000, but is inf"),
        ('{"ctc": {"instances": "2"}}', "'2'"),
        ('{"ctc": 2}', "must be JSON"),
        pytest.param("[" * 100_000, "must be JSON", id="deep"),
        *(
            pytest.param(f'{{"ctc": {{"{name}": {10**400}}}}}', f"`{name}` must be a {words}, but is 1000", id=name)
            for name, words in (
                ("instances", "whole number from 1 to 4096"),
                ("threads", "whole number from 0 to 4096"),
                ("preferred_batch", "whole number from 0 to 4096"),
                ("queue_delay_ms", "number from 0 to 60000"),
            )
        ),
    ],
)
def test_what_is_no_tuning_is_named(tmp_path, content, words):
    (tmp_path / "tuning.json").write_text(content)
    with pytest.raises(TuningError, match=r"tuning\.json") as caught:
        read_tuning(tmp_path / "tuning.json")
    assert words in str(caught.value)


def test_a_tuning_made_by_code_names_stages_that_exist():
    with pytest.raises(TuningError, match=r"stages must be of decode, .*, but there is acoustik"):
        Target(tuning={"acoustik": StageTuning(instances=2)})


@pytest.mark.parametrize(
    ("precision", "tuning", "batch"),
    [
        ("fp32", {}, "1_of_20s"),
        ("fp32", {"preferred_batch": 0}, f"{MAX_RUN_ROWS}_of_20s"),
        ("fp32", {"preferred_batch": 0, "threads": 6}, "6_of_20s"),
        ("fp32", {"preferred_batch": 0, "threads": 32}, "16_of_20s"),
        ("fp32", {"threads": 6}, "1_of_20s"),
        ("fp16", {}, "8_of_20s"),
        ("fp16", {"threads": 0}, f"{MAX_RUN_ROWS}_of_20s"),
        ("fp16", {"preferred_batch": 1}, "1_of_20s"),
    ],
)
def test_features_warm_up_with_as_many_clips_as_a_tuned_stage_takes_at_once(precision, tuning, batch):
    sizes = TensorSizes(features=(64, -1), hop_samples=160, max_batch_size=16, vocabulary=29)
    target = Target(precision=precision, tuning={"features": StageTuning(**tuning)})
    configs = build_configs("tiny", sizes, {}, target)
    assert [warm_up.name for warm_up in configs["tiny_features"].model_warmup] == ["1_of_2s", batch]


@pytest.mark.parametrize("stage", ["audio_decode", *(f"quartznet_demo_{stage}" for stage in STAGES)])
def test_settings_that_are_there_change_nothing(stage):
    config = read_config(DEMO / stage / "config.pbtxt")
    before = config.SerializeToString(deterministic=True)
    apply_tuning(config, describe_tuning(config))
    assert config.SerializeToString(deterministic=True) == before


def test_the_instances_of_all_groups_are_counted():
    config = read_config(DEMO / "quartznet_demo_ctc" / "config.pbtxt")
    (group,) = config.instance_group
    config.instance_group.add(count=group.count + 1)
    assert describe_tuning(config).instances == 2 * group.count + 1


def test_a_backend_without_threads_and_a_batch_beyond_the_interface_are_refused():
    with pytest.raises(TuningError, match="quartznet_demo_ctc"):
        apply_tuning(read_config(DEMO / "quartznet_demo_ctc" / "config.pbtxt"), StageTuning(threads=2))
    with pytest.raises(TuningError, match="at most its max_batch_size, 32, but is 64"):
        apply_tuning(read_config(DEMO / "quartznet_demo_ctc" / "config.pbtxt"), StageTuning(preferred_batch=64))


def test_export_writes_a_tuning_into_the_configurations(tmp_path, config, network):
    write_model(tmp_path, "tiny", config, network)
    write_model(tmp_path, "tiny", config, network, target=Target(tuning=TUNING))
    found = {stage: read_config(tmp_path / f"tiny_{stage}" / "config.pbtxt") for stage in STAGES}
    assert describe_tuning(found["acoustic"]) == TUNING["acoustic"]
    assert found["acoustic"].parameters["intra_op_thread_count"].string_value == "1"
    assert found["ctc"].instance_group[0].count == 3
    assert found["features"].instance_group[0].count == 1
    decode = read_config(tmp_path / "audio_decode" / "config.pbtxt")
    assert decode.instance_group[0].count == 6
    assert decode.dynamic_batching.default_queue_policy.max_queue_size == 64
    write_model(tmp_path, "tiny", config, network)  # another model's export leaves the shared stage alone
    assert read_config(tmp_path / "audio_decode" / "config.pbtxt").instance_group[0].count == 6
