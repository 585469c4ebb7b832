"""The padding stage in DALI, without a server."""

import numpy as np
import pytest
from carnelian_perf.traffic.candidates import build_variant
from carnelian_serving.backends.dali.pipeline import PipelineRunner, load_serialized
from carnelian_serving.backends.model_config import read_model_config
from google.protobuf import json_format

SAMPLES = (3 * 16_000, 5 * 16_000, 40_000)


def run_features(folder, signals):
    from carnelian_perf.repository import read_config

    message = json_format.MessageToJson(
        read_config(folder), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    known = ("max_pending_requests", "pending_models")
    config = read_model_config(message, folder / "1", known_parameters=known, default_filename="model.dali")
    runner = PipelineRunner(load_serialized(config), max_batch_size=4, num_threads=1, device_id=None)
    lengths = [np.array([len(signal)], np.int32) for signal in signals]
    features, feature_lengths = runner.run({"SIGNAL": signals, "SIGNAL_LENGTH": lengths})
    return [np.copy(row) for row in features], [int(row[0]) for row in feature_lengths]


@pytest.fixture(scope="module")
def signals():
    rng = np.random.default_rng(0)
    return [rng.standard_normal(samples).astype(np.float32) for samples in SAMPLES]


@pytest.fixture
def build(repository, padded, tmp_path):
    def build_one(candidate):
        build_variant(repository, tmp_path / "variant", "quartznet_demo", candidate, 0, padded)
        return tmp_path / "variant" / "quartznet_demo_features"

    return build_one


@pytest.mark.parametrize(("candidate", "frames"), [("buckets", [401, 801, 401]), ("feature_batch", [501, 501, 501])])
def test_features_are_the_shipped_ones_and_then_zero(build, repository, signals, candidate, frames):
    shipped, lengths = run_features(repository / "quartznet_demo_features", signals)
    padded, padded_lengths = run_features(build(candidate), signals)
    assert padded_lengths == lengths
    assert [row.shape for row in padded] == [(64, count) for count in frames]
    for row, padded_row in zip(shipped, padded, strict=True):
        np.testing.assert_array_equal(padded_row[:, : row.shape[1]], row)
        assert not padded_row[:, row.shape[1] :].any()


def test_bucket_holds_a_clip_of_its_own_duration(build):
    features, _ = run_features(
        build("buckets"), [np.zeros(4 * 16_000, np.float32), np.zeros(4 * 16_000 + 160, np.float32)]
    )
    assert [row.shape[1] for row in features] == [401, 801]
