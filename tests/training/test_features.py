import dataclasses

import numpy as np
import pytest
import soxr
import torch
from carnelian_training import features
from carnelian_training.features import FeatureSettings
from carnelian_training.foreign import dle
from carnelian_training.front_end import build_extractor, compute_features
from carnelian_training.waveform import WaveformSettings

# Both sides compute in float32; the logarithm of near-silent bands amplifies the last bits.
TOLERANCE = 1e-4
# Where no more is heard than `log_guard`, its logarithm is rounded to steps of 2e-6, and divided by at least 1e-4.
UNHEARD_TOLERANCE = 0.06
LENGTHS = [16_000, 27_301, 400, 48_000, 300]

DEFAULTS = FeatureSettings()
AS_NEMO = FeatureSettings(std_guard=1e-5, edges="zero", frame_count="floor")
AS_DLE = FeatureSettings(**dle.FEATURES)
OTHERS = FeatureSettings(
    window_samples=400,
    hop_samples=200,
    num_mels=40,
    low_hz=60.0,
    high_hz=7600.0,
    preemphasis=0.0,
    magnitude_power=1,
    log_guard=1e-3,
    log_guard_by="clamp",
)

ODD = FeatureSettings(window_samples=401, edges="zero")


def log_mel_reference(signal: np.ndarray, settings: FeatureSettings = DEFAULTS) -> np.ndarray:
    """Plain torch: [samples] -> [num_mels, frames]."""
    x = torch.from_numpy(signal).double()
    x = torch.cat([x[:1], x[1:] - settings.preemphasis * x[:-1]])
    hop, width = settings.hop_samples, settings.window_samples
    window = torch.hann_window(width, periodic=False, dtype=torch.float64)
    mode = {"reflect": "reflect", "zero": "constant"}[settings.edges]
    spectrum = torch.stft(x, settings.fft_size, hop, width, window, center=True, pad_mode=mode, return_complex=True)
    mel = slaney_filters(settings) @ spectrum.abs() ** settings.magnitude_power
    guard = settings.log_guard
    log = torch.log(mel + guard if settings.log_guard_by == "add" else mel.clamp(min=guard))
    frames = {"floor + 1": len(signal) // hop + 1, "ceil": -(-len(signal) // hop), "floor": len(signal) // hop}
    log = log[:, : max(frames[settings.frame_count], 1)]
    spread = log.std(1, keepdim=True) if log.shape[1] > 1 else torch.zeros(len(log), 1)
    if not settings.std_guard:
        spread = torch.sqrt(spread**2 + features.VARIANCE_GUARD)
    return ((log - log.mean(1, keepdim=True)) / (spread + settings.std_guard)).numpy()


def slaney_filters(settings: FeatureSettings) -> torch.Tensor:
    """Slaney's mel scale, linear below 1 kHz, with triangles of unit area: [num_mels, fft_size / 2 + 1]."""

    def to_hz(mel: torch.Tensor) -> torch.Tensor:
        return torch.where(mel < 15, mel * 200 / 3, 1000 * torch.exp((mel - 15) * np.log(6.4) / 27))

    def to_mel(hz: float) -> float:
        return hz * 3 / 200 if hz < 1000 else 15 + 27 * np.log(hz / 1000) / np.log(6.4)

    low, high = to_mel(settings.low_hz), to_mel(settings.high_hz)
    edges = to_hz(torch.linspace(low, high, settings.num_mels + 2, dtype=torch.float64))
    bins = torch.linspace(0, 8000, settings.fft_size // 2 + 1, dtype=torch.float64)
    rise = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    fall = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rise, fall).clamp(min=0) * (2 / (edges[2:] - edges[:-2]))[:, None]


def speech_like(samples: int) -> np.ndarray:
    noise = np.random.default_rng(samples).standard_normal(samples + 1)
    smooth = (noise[1:] + noise[:-1]) * (1 + np.sin(np.arange(samples) / 900))
    return (0.05 * smooth).astype(np.float32)


@pytest.fixture(scope="module")
def serve(load_stage):
    return load_stage(features, max_audio_s=3.0)


@pytest.mark.parametrize(
    "settings", [DEFAULTS, AS_NEMO, AS_DLE, OTHERS, ODD], ids=["defaults", "nemo", "dle", "others", "odd"]
)
def test_equal_a_plain_stft_on_a_ragged_batch(settings):
    signals = [speech_like(n) for n in LENGTHS]
    result, lengths = compute_features(signals, settings)
    for row, length, signal in zip(result, lengths, signals, strict=True):
        expected = log_mel_reference(signal, settings)
        assert row[:, :length].shape == expected.shape
        np.testing.assert_allclose(row[:, :length], expected, atol=TOLERANCE)
        assert not row[:, length:].any()


@pytest.mark.parametrize("samples", [8_000, 16_000, 48_000])
def test_digital_silence_is_nothing(serve, samples):
    ((silence, _),) = serve([np.zeros(samples, np.float32)], [samples])
    np.testing.assert_allclose(silence, 0.0, atol=UNHEARD_TOLERANCE)


@pytest.mark.parametrize("samples", [8_000, 20_000, 24_000])
def test_bands_that_a_telephone_does_not_carry_are_not_scaled_up_from_rounding(serve, samples):
    at_8_khz = speech_like(samples) * np.hanning(samples)  # no clicks at its ends, which all bands would hear
    signal = soxr.resample(at_8_khz, 8_000, 16_000).astype(np.float32)
    ((result, _),) = serve([signal], [len(signal)])
    expected = log_mel_reference(signal)
    np.testing.assert_allclose(result[:48], expected[:48], atol=TOLERANCE)  # up to 3.7 kHz
    np.testing.assert_allclose(result, expected, atol=UNHEARD_TOLERANCE)


def test_the_energy_of_dles_dither_stands_in_for_it():
    """As far from features with noise as those of other noise are; without it, half a second of zeros outweighs the
    speech in each band's mean and deviation."""
    signal = speech_like(32_000)
    signal[10_000:18_000] = 0
    own = dataclasses.replace(AS_DLE, log_guard=dle.LOG_GUARD)
    rng = np.random.default_rng(1)

    def distance(settings, noise):
        dithered = (signal + dle.DITHER * rng.standard_normal(len(signal))).astype(np.float32)
        heard = (signal + noise * rng.standard_normal(len(signal))).astype(np.float32)
        difference = log_mel_reference(heard, settings) - log_mel_reference(dithered, own)
        return float(np.sqrt(np.square(difference).mean()))

    assert distance(AS_DLE, 0.0) < 1.5 * distance(own, dle.DITHER)
    assert distance(own, 0.0) > 2 * distance(AS_DLE, 0.0)


def test_served_features_do_not_depend_on_padding_or_neighbours(serve):
    signal = speech_like(20_000)
    ((alone, _),) = serve([signal], [20_000])
    padded = np.concatenate([signal, np.full(9_000, 0.7, np.float32)])
    (in_batch, length), _ = serve([padded, speech_like(29_000)], [20_000, 29_000])
    assert length.tolist() == [126]
    assert in_batch.shape == (64, 29_000 // 160 + 1)
    np.testing.assert_array_equal(in_batch[:, :126], alone)
    assert not in_batch[:, 126:].any()


@pytest.mark.parametrize(
    ("samples", "length", "frames", "feature_length"),
    [
        (0, 0, 1, 0),
        (1, 1, 1, 1),
        (16_000, 0, 101, 0),
        (16_000, -7, 101, 0),
        (16_000, 20_000, 101, 126),  # says more than is there: the decoder refuses it by its length
        (48_000, 48_000, 301, 301),  # at the limit of three seconds
        (48_001, 48_001, 1, 301),
        (90_000, 90_000, 1, 563),  # over the limit: one frame, honest length
    ],
)
def test_serving_graph_is_total_and_its_lengths_are_honest(serve, samples, length, frames, feature_length):
    (result, result_length), (neighbour, _) = serve([speech_like(samples), speech_like(8_000)], [length, 8_000])
    assert result.shape == (64, frames)
    assert result_length.tolist() == [feature_length]
    ((expected, _),) = serve([speech_like(8_000)], [8_000])
    np.testing.assert_array_equal(neighbour, expected)


def test_the_serving_graph_is_total_with_the_settings_of_other_toolkits(load_stage):
    run = load_stage(features, max_audio_s=3.0, **dataclasses.asdict(AS_NEMO))
    lengths = [0, 1, 159, 160, 320, 16_000, 48_001]
    results = run([speech_like(samples) for samples in lengths], lengths)
    assert [result.shape[1] for result, _ in results] == [1, 1, 1, 1, 2, 100, 1]
    assert [length.item() for _, length in results] == [0, 1, 1, 1, 2, 100, 300]
    np.testing.assert_allclose(results[5][0], log_mel_reference(speech_like(16_000), AS_NEMO), atol=TOLERANCE)
    assert all(np.isfinite(result).all() for result, _ in results)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hop_samples": 0}, "`hop_samples` must be positive"),
        ({"window_samples": 1}, "`window_samples` must be at least 2"),
        ({"window_samples": 640}, "`fft_size` must be even and at least `window_samples`, 640"),
        ({"window_samples": 401, "fft_size": 401}, "`fft_size` must be even and at least `window_samples`, 401"),
        ({"high_hz": 9000.0}, "within 0 to 8000, but is 0 to 9000"),
    ],
)
def test_impossible_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        FeatureSettings(**wrong)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_a_row_that_is_not_finite_leaves_its_neighbours_alone(serve, value):
    bad = speech_like(8_000)
    bad[4_000] = value
    (result, _), (neighbour, _) = serve([bad, speech_like(8_000)], [8_000, 8_000])
    ((expected, _),) = serve([speech_like(8_000)], [8_000])
    assert not np.isfinite(result).all()
    np.testing.assert_array_equal(neighbour, expected)


def test_arrays_of_any_front_end_become_what_a_network_takes():
    of_two_channels = np.stack([speech_like(400), speech_like(400)], axis=1)
    waveforms, lengths = compute_features([of_two_channels[:, 0], speech_like(1)], WaveformSettings(normalise=False))
    assert (waveforms.dtype, waveforms.shape) == (np.float32, (2, 1, 400))
    assert (lengths.dtype, lengths.tolist()) == (np.int64, [400, 1])
    np.testing.assert_array_equal(waveforms[0, 0], speech_like(400))


@pytest.mark.parametrize("clip", [np.zeros(0, np.float32), np.zeros(9), np.zeros((1, 9), np.float32)])
def test_an_array_that_is_no_waveform_is_refused(clip):
    with pytest.raises(ValueError, match=r"must be float32 \[samples\], with one sample at least, but is float"):
        compute_features([np.ones(9, np.float32), clip], DEFAULTS)


def test_without_clips_there_are_no_features():
    with pytest.raises(ValueError, match="there must be at least one clip, but there is none"):
        compute_features([], DEFAULTS)


@pytest.mark.parametrize("num_clips", [0, 3])
def test_an_extractor_takes_as_many_clips_as_it_was_built_for(num_clips):
    extract = build_extractor(DEFAULTS, 2)
    with pytest.raises(ValueError, match=f"there must be 1 to 2 clips, but are {num_clips}"):
        extract([speech_like(400)] * num_clips)
