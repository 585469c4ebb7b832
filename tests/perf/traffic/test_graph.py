from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from carnelian_perf.networks import load_network
from carnelian_perf.traffic.graph import build_padded, count_frames, pad_inside
from carnelian_perf.traffic.loops import PROCESSED_FRAMES

CONFIGS = Path(__file__).parents[3] / "training" / "configs"

FRAMES = (301, 77, 120)  # odd ones do not divide by the stride
TOLERANCE = 1e-4  # log-probabilities; float32 sums in another order


@pytest.fixture(scope="module")
def rows() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((64, frames)).astype(np.float32) for frames in FRAMES]


@pytest.fixture(scope="module")
def ragged_feeds(rows) -> dict[str, np.ndarray]:
    return {
        "FEATURES": np.concatenate([row.ravel() for row in rows]),
        "FEATURES_SHAPE": np.array([row.shape for row in rows], np.int32),
        "FEATURE_LENGTH": np.array(FRAMES, np.int32)[:, None],
    }


@pytest.fixture(scope="module")
def padded_feeds(rows) -> dict[str, np.ndarray]:
    features = np.zeros((len(rows), 64, max(FRAMES)), np.float32)
    for i, row in enumerate(rows):
        features[i, :, : row.shape[1]] = row
    return {"FEATURES": features, "FEATURE_LENGTH": np.array(FRAMES, np.int32)[:, None]}


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def test_the_three_graphs_agree(repository, padded, padded_feeds, ragged_feeds):
    shipped = onnx.load(repository / "quartznet_demo_acoustic/1/model.onnx")
    outputs = [
        run(padded, padded_feeds),
        run(pad_inside(padded), ragged_feeds),
        run(shipped, ragged_feeds),
    ]
    lengths = outputs[0]["LOG_PROB_LENGTH"]
    for other in outputs[1:]:
        np.testing.assert_array_equal(other["LOG_PROB_LENGTH"], lengths)
        for i, length in enumerate(lengths.ravel()):
            np.testing.assert_allclose(
                other["LOG_PROBS"][i, :length], outputs[0]["LOG_PROBS"][i, :length], atol=TOLERANCE
            )


def test_outputs_of_the_padded_graph_declare_the_dimensions_of_the_configuration(padded):
    # Triton's ONNX Runtime backend compares them all, and -1 is not 29.
    outputs = onnxruntime.InferenceSession(padded.SerializeToString()).get_outputs()
    shapes = [[size if isinstance(size, int) else -1 for size in tensor.shape] for tensor in outputs]
    assert shapes == [[-1, -1, 29], [-1, 1]]


def test_counts_the_frames_of_a_padded_batch(padded, padded_feeds, ragged_feeds):
    for model, feeds in ((padded, padded_feeds), (pad_inside(padded), ragged_feeds)):
        frames = run(count_frames(model), feeds)[PROCESSED_FRAMES]
        assert frames.shape == (3, 1)
        assert frames.sum() == 3 * max(FRAMES)


def test_counting_changes_no_other_output(padded, padded_feeds):
    counted, plain = run(count_frames(padded), padded_feeds), run(padded, padded_feeds)
    for name, array in plain.items():
        np.testing.assert_array_equal(counted[name], array)


def test_graph_without_a_convolution_is_refused():
    with pytest.raises(ValueError, match="first convolution"):
        count_frames(onnx.ModelProto())


def test_a_network_of_samples_is_refused_by_name():
    config, network = load_network(CONFIGS / "wav2vec2_small.yaml", ("pretraining=null",))
    with pytest.raises(ValueError, match=r"must be a Jasper or QuartzNet .* but is a wav2vec2 with 1"):
        build_padded(config, network)
