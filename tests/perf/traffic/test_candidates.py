import json

import pytest
from carnelian_perf.repository import read_config
from carnelian_perf.traffic.candidates import TITLES, build_variant
from carnelian_perf.traffic.loops import PROCESSED_FRAMES

MODEL = "quartznet_demo"


@pytest.fixture(params=TITLES)
def candidate(request):
    return request.param


@pytest.fixture
def variant(candidate, repository, padded, tmp_path):
    build_variant(repository, tmp_path / "variant", MODEL, candidate, 5, padded)
    return tmp_path / "variant"


def test_holds_the_ensemble_and_its_stages_alone(variant):
    names = {"audio_decode", MODEL, *(f"{MODEL}_{stage}" for stage in ("features", "acoustic", "ctc"))}
    assert {path.name for path in variant.iterdir()} == names


def test_waits_as_long_as_asked(variant):
    assert read_config(variant / f"{MODEL}_acoustic").dynamic_batching.max_queue_delay_microseconds == 5000


def test_is_ragged_unless_the_feature_stage_pads(candidate, variant):
    config = read_config(variant / f"{MODEL}_acoustic")
    is_ragged = candidate.startswith("ragged")
    assert config.input[0].allow_ragged_batch == is_ragged
    assert bool(config.batch_input) == is_ragged
    assert (variant / f"{MODEL}_features/1/shipped.py").exists() != is_ragged


def test_clips_meet_in_the_feature_stage_where_it_pads_them_to_one_another(candidate, variant):
    preferred = read_config(variant / f"{MODEL}_features").dynamic_batching.preferred_batch_size
    assert list(preferred) == ([] if candidate == "feature_batch" else [1])


def test_nothing_else_of_the_acoustic_stage_changes(variant, repository):
    shipped, changed = (read_config(root / f"{MODEL}_acoustic") for root in (repository, variant))
    shipped.dynamic_batching.max_queue_delay_microseconds = 5000
    del changed.output[-1]
    for config in (shipped, changed):
        del config.batch_input[:]
        config.input[0].allow_ragged_batch = True
    assert changed == shipped


def test_passes_the_frame_count_on(variant):
    ensemble = read_config(variant / MODEL)
    assert ensemble.output[-1].name == PROCESSED_FRAMES
    (step,) = (step for step in ensemble.ensemble_scheduling.step if step.model_name == f"{MODEL}_acoustic")
    assert step.output_map[PROCESSED_FRAMES] == PROCESSED_FRAMES


def test_shipped_repository_is_left_alone(variant, repository):
    names = [output.name for output in read_config(repository / f"{MODEL}_acoustic").output]
    assert names == ["LOG_PROBS", "LOG_PROB_LENGTH"]


def test_buckets_are_in_frames(repository, padded, tmp_path):
    build_variant(repository, tmp_path / "variant", MODEL, "buckets", 0, padded)
    padding = json.loads((tmp_path / f"variant/{MODEL}_features/1/padding.json").read_text())
    assert padding == {"bucket_frames": [401, 801, 1601, 6001]}
