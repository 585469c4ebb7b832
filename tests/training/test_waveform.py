"""The `<model>_features` stage of wav2vec 2.0, as Triton loads it."""

import numpy as np
import pytest
from carnelian_training import waveform
from carnelian_training.waveform import WaveformSettings


@pytest.fixture(scope="module", params=[True, False], ids=["normalised", "plain"])
def serve(request, load_stage):
    """The stage, and whether it normalises."""
    return load_stage(waveform, max_audio_s=1.0, normalise=request.param), request.param


def noise(samples: int) -> np.ndarray:
    return (0.3 + 0.1 * np.random.default_rng(samples).standard_normal(samples)).astype(np.float32)


@pytest.mark.parametrize(
    ("samples", "length", "size", "feature_length"),
    [
        (0, 0, 1, 0),
        (1, 1, 1, 1),
        (9_000, 0, 9_000, 0),
        (9_000, -7, 9_000, 0),
        (9_000, 4_000, 9_000, 4_000),
        (9_000, 12_000, 9_000, 12_000),  # says more than is there: the decoder refuses it by its length
        (16_000, 16_000, 16_000, 16_000),  # at the limit of one second
        (16_001, 16_001, 1, 16_001),
    ],
)
def test_it_is_total_its_lengths_are_honest_and_neighbours_do_not_matter(serve, samples, length, size, feature_length):
    run, normalises = serve
    (found, found_length), (neighbour, _) = run([noise(samples), noise(500)], [length, 500])
    assert found.shape == (size,)
    assert found_length.tolist() == [feature_length]
    np.testing.assert_array_equal(neighbour, run([noise(500)], [500])[0][0])
    clip = noise(samples)[: max(1, length)] if size == samples else np.zeros(0)
    expected = (clip - clip.mean()) / np.sqrt(clip.var() + 1e-7) if normalises and clip.size else clip
    np.testing.assert_allclose(found[: clip.size], expected, atol=1e-4)
    assert not found[max(1, clip.size) :].any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_leaves_its_neighbours_alone(serve, value):
    run, _ = serve
    bad = noise(800)
    bad[300] = value
    (found, _), (neighbour, _) = run([bad, noise(500)], [800, 500])
    assert not np.isfinite(found).all()
    np.testing.assert_array_equal(neighbour, run([noise(500)], [500])[0][0])


@pytest.mark.parametrize("level", [0.0, 0.5])
def test_silence_is_zero(serve, level):
    run, normalises = serve
    ((found, _),) = run([np.full(800, level, np.float32)], [800])
    np.testing.assert_allclose(found[:800], 0.0 if normalises else level, atol=1e-3)


@pytest.mark.parametrize("guard", [1e-5, 1e-2])
def test_the_guard_is_that_of_the_settings(load_stage, guard):
    served = load_stage(waveform, max_audio_s=60.0, variance_guard=guard)
    signal = 0.01 * np.random.default_rng(0).standard_normal(16000).astype(np.float32)  # variance 1e-4
    ((features, _),) = served([signal], [16000])
    np.testing.assert_allclose(features.std(), (1 + guard / signal.var()) ** -0.5, rtol=1e-3)


def test_the_guard_of_silence_is_positive():
    assert WaveformSettings().variance_guard > 0
    with pytest.raises(ValueError, match="`variance_guard` must be positive"):
        WaveformSettings(variance_guard=0.0)
