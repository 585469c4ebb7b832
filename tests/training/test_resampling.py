"""The resampling of clips in the graph that decodes them for training."""

import numpy as np
import pytest
import soxr
from carnelian_training.data.audio import to_wav
from carnelian_training.data.decoding import decode
from nvidia.dali import fn, pipeline_def, types


def decoded(samples: np.ndarray, rate_hz: int, output_hz: float) -> np.ndarray:
    """Returns [samples] float32 at `output_hz`."""
    file = to_wav(samples.astype(np.float32), rate_hz)

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, enable_conditionals=True)
    def graph():
        data = fn.external_source(source=lambda: [file], dtype=types.UINT8, ndim=1)
        return decode(data, output_hz)

    signal, size = graph().run()
    return np.array(signal[0])[: int(np.array(size[0]))]


def tone(hz: float, rate_hz: int) -> np.ndarray:
    return np.sin(2 * np.pi * hz * np.arange(rate_hz) / rate_hz) / 2


@pytest.mark.parametrize("rate_hz", [22_050, 24_000, 44_100, 48_000, 96_000])
def test_what_lies_above_8_khz_is_not_heard_as_other_frequencies(rate_hz):
    heard = decoded(tone(7_100, rate_hz) + tone(8_250, rate_hz), rate_hz, 16_000.0)
    np.testing.assert_allclose(heard[400:-400], tone(7_100, 16_000)[400:-400], atol=2e-3)


def test_a_faster_speed_folds_nothing_down():
    heard = decoded(tone(6_000, 16_000) + tone(7_600, 16_000), 16_000, 16_000 / 1.1)  # half of this rate is 7,273 Hz
    wanted = np.sin(2 * np.pi * 6_000 * 1.1 * np.arange(len(heard)) / 16_000) / 2
    np.testing.assert_allclose(heard[400:-400], wanted[400:-400], atol=2e-3)


def test_speech_band_noise_becomes_what_soxr_makes_of_it():
    at_16_khz = np.random.default_rng(0).standard_normal(16_000)
    noise = soxr.resample(soxr.resample(at_16_khz, 16_000, 14_000), 14_000, 48_000)  # nothing where the filters differ
    heard = decoded(noise, 48_000, 16_000.0)
    np.testing.assert_allclose(heard[400:-400], soxr.resample(noise, 48_000, 16_000)[400:-400], atol=2e-3)


@pytest.mark.parametrize("output_hz", [16_000.0, 17_600.0])
def test_nothing_is_filtered_without_need(output_hz):
    noise = np.random.default_rng(0).standard_normal(16_000).astype(np.float32)
    heard = decoded(noise, 16_000, output_hz)
    back = heard if output_hz == 16_000 else soxr.resample(heard, output_hz, 16_000)
    np.testing.assert_allclose(back[400:-400].std(), noise[400:-400].std(), rtol=0 if output_hz == 16_000 else 0.05)


@pytest.mark.parametrize("samples", [0, 1, 2])
@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 48_000, 4_000_000])
def test_the_shortest_clips_have_the_samples_that_they_should(samples, rate_hz):
    assert len(decoded(np.ones(samples), rate_hz, 16_000.0)) == -(-samples * 16_000 // rate_hz)
