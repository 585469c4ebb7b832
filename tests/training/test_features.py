import importlib.util
import json
import shutil

import numpy as np
import pytest
import torch
from carnelian_training import features
from nvidia.dali import fn, pipeline_def, types

# Both sides compute in float32; the logarithm of near-silent bands amplifies the last bits.
TOLERANCE = 1e-4
LENGTHS = [16_000, 27_301, 400, 48_000, 300]


def log_mel_reference(signal: np.ndarray) -> np.ndarray:
    """Plain torch: [samples] -> [64, samples // 160 + 1]."""
    x = torch.from_numpy(signal).double()
    x = torch.cat([x[:1], x[1:] - 0.97 * x[:-1]])
    window = torch.hann_window(320, periodic=False, dtype=torch.float64)
    spectrum = torch.stft(x, 512, 160, 320, window, center=True, pad_mode="reflect", return_complex=True)
    mel = slaney_filters() @ spectrum.abs().square()
    log = torch.log(mel + 2**-24)
    return ((log - log.mean(1, keepdim=True)) / log.std(1, keepdim=True)).numpy()


def slaney_filters() -> torch.Tensor:
    """Slaney's mel scale, linear below 1 kHz, with triangles of unit area: [64, 257]."""

    def to_hz(mel: torch.Tensor) -> torch.Tensor:
        return torch.where(mel < 15, mel * 200 / 3, 1000 * torch.exp((mel - 15) * np.log(6.4) / 27))

    top = 15 + 27 * np.log(8) / np.log(6.4)
    edges = to_hz(torch.linspace(0, top, 66, dtype=torch.float64))
    bins = torch.linspace(0, 8000, 257, dtype=torch.float64)
    rise = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    fall = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rise, fall).clamp(min=0) * (2 / (edges[2:] - edges[:-2]))[:, None]


def speech_like(samples: int) -> np.ndarray:
    noise = np.random.default_rng(samples).standard_normal(samples + 1)
    smooth = (noise[1:] + noise[:-1]) * (1 + np.sin(np.arange(samples) / 900))
    return (0.05 * smooth).astype(np.float32)


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """The serving graph as Triton loads it: a copy of the file with its settings beside it."""
    folder = tmp_path_factory.mktemp("features")
    shutil.copy(features.__file__, folder / "dali.py")
    (folder / "features.json").write_text(json.dumps({"max_audio_s": 3.0}))
    spec = importlib.util.spec_from_file_location("served_features", folder / "dali.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pipeline = module.serve(batch_size=16, prefetch_queue_depth=1, exec_async=False, exec_pipelined=False)
    pipeline.build()

    def run(signals, lengths):
        pipeline.feed_input("SIGNAL", [np.asarray(signal, np.float32) for signal in signals])
        pipeline.feed_input("SIGNAL_LENGTH", [np.array([length], np.int32) for length in lengths])
        outputs = pipeline.run()
        return [(np.array(outputs[0][i]), np.array(outputs[1][i])) for i in range(len(signals))]

    return run


def test_equal_a_plain_stft_on_a_ragged_batch():
    @pipeline_def(batch_size=8, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def graph():
        return features.log_mel(fn.external_source(name="SIGNAL", dtype=types.FLOAT, ndim=1))

    pipeline = graph(exec_async=False, exec_pipelined=False)
    pipeline.build()
    signals = [speech_like(n) for n in LENGTHS]
    pipeline.feed_input("SIGNAL", signals)
    (result,) = pipeline.run()
    for i, signal in enumerate(signals):
        expected = log_mel_reference(signal)
        assert np.asarray(result[i]).shape == expected.shape == (64, len(signal) // 160 + 1)
        np.testing.assert_allclose(np.asarray(result[i]), expected, atol=TOLERANCE)


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


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_a_row_that_is_not_finite_leaves_its_neighbours_alone(serve, value):
    bad = speech_like(8_000)
    bad[4_000] = value
    (result, _), (neighbour, _) = serve([bad, speech_like(8_000)], [8_000, 8_000])
    ((expected, _),) = serve([speech_like(8_000)], [8_000])
    assert not np.isfinite(result).all()
    np.testing.assert_array_equal(neighbour, expected)
