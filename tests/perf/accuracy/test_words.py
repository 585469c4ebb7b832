import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from carnelian_perf.accuracy.words import Heard, align, calibrate, compare, draw, fit_logistic, rate
from carnelian_perf.cli import main
from carnelian_training.ctc import DECODERS, Calibration, Hypothesis, Word
from carnelian_training.data.manifest import read_manifest

ROOT = Path(__file__).parents[3]
MANIFEST = ROOT / "demo" / "clips" / "manifest.jsonl"


def heard(confidence: float, is_right: bool, start: float = 0.0, reference: tuple[float, float] | None = None) -> Heard:
    return Heard(0, "greedy", confidence, is_right, (start, start + 0.3), reference)


def test_a_right_word_is_compared_with_the_one_that_was_said():
    words = (Word("the", 0.1, 0.2, 0.9), Word("cat", 0.3, 0.5, 0.8), Word("sat", 0.6, 0.9, 0.7))
    found = compare(3, "ngram", "the sat", [(0.0, 0.2), (0.5, 0.9)], Hypothesis("the cat sat", words, 0.8))
    assert [(word.is_right, word.reference) for word in found] == [
        (True, (0.0, 0.2)),
        (False, None),
        (True, (0.5, 0.9)),
    ]
    assert compare(3, "ngram", "the sat", None, Hypothesis("", (), 0.9)) == []


def test_delays_are_medians():
    words = [heard(0.9, True, start, (start - 0.1, start + 0.25)) for start in (1.0, 2.0, 3.0)]
    calibration = calibrate([*words, heard(0.2, False, 4.0, None)])
    assert calibration.start_late_s == pytest.approx(0.1)
    assert calibration.end_late_s == pytest.approx(0.05)


def test_half_of_the_clips_without_times_is_named():
    with pytest.raises(ValueError, match=r"each half of the clips must have words .* take more clips"):
        calibrate([])


def test_decoder_that_hears_nothing_right_is_named():
    with pytest.raises(ValueError, match=r"beam must hear a word right .* take more clips"):
        rate([heard(0.9, False, 1.0, None)], "beam", False)


def test_a_clip_is_aligned_at_any_rate_and_with_any_channels(tmp_path):
    pytest.importorskip("pocketsphinx", reason="needs carnelian-perf[words]")
    clip = read_manifest(MANIFEST)[0]
    found = align(clip)
    samples, rate = soundfile.read(clip.audio_filepath)
    soundfile.write(tmp_path / "stereo.wav", soxr.resample(np.stack([samples, samples], 1), rate, 44_100), 44_100)
    again = align(replace(clip, audio_filepath=tmp_path / "stereo.wav"))
    np.testing.assert_allclose(again, found, atol=0.05)  # a few of the aligner's frames
    soundfile.write(tmp_path / "long.wav", np.concatenate([np.zeros(5 * rate), samples, samples]), rate)
    stretch = align(replace(clip, audio_filepath=tmp_path / "long.wav", offset=5.0))
    np.testing.assert_allclose(stretch, found, atol=0.05)


def test_a_logistic_function_is_found_again():
    draw_from = np.random.default_rng(0)
    x = draw_from.normal(scale=2, size=4000)
    y = (draw_from.random(4000) < 1 / (1 + np.exp(-(0.7 * x - 1)))).astype(np.float64)
    assert fit_logistic(x, y) == pytest.approx((0.7, -1.0), abs=0.1)


@pytest.mark.parametrize("y", [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
def test_of_few_words_scale_and_offset_are_kept_by_their_prior(y):
    x = np.array([1.0, 2.0, 3.0])

    def loss(weights):
        right = 1 / (1 + np.exp(-(weights[0] * x + weights[1])))
        return -np.log(np.where(y, right, 1 - right)).sum() + ((weights - [1, 0]) ** 2).sum() / 2

    found = np.array(fit_logistic(x, np.array(y)))
    around = itertools.product((-1e-3, 0, 1e-3), repeat=2)
    assert all(loss(found) <= loss(found + step) for step in around)  # it is convex, so it is not lower anywhere


def test_without_words_confidences_stay_as_they_are():
    assert fit_logistic(np.zeros(0), np.zeros(0)) == (1.0, 0.0)


def test_the_curve_and_its_error(tmp_path):
    words = [heard(0.95, i < 5, 1.0, (0.9, 1.3)) for i in range(10)] + [heard(0.15, False)] * 10
    row = rate(words, "greedy", False)
    assert row.calibration_error == pytest.approx(0.5 * 0.45 + 0.5 * 0.15)
    assert (row.start_error_ms, row.end_error_ms, row.timed_words) == (100.0, 0.0, 10)
    assert [point.words for point in row.curve] == [10, 10]
    certain = rate([*words, heard(1.0, True)], "greedy", False)
    assert [point.words for point in certain.curve] == [10, 11]
    draw([replace(row, decoder=name) for name in DECODERS], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_the_command_writes_corrections_that_name_their_network(tmp_path, call):
    pytest.importorskip("pocketsphinx")
    corrections, raw = tmp_path / "calibration.json", tmp_path / "words.json"
    arguments = [ROOT / "demo" / "quartznet_demo.pt", MANIFEST, "--calibration", corrections, "--out", raw]
    arguments += ["--lm", ROOT / "model_repository" / "quartznet_demo_ctc" / "1" / "english.klm"]
    status, _, err = call(main, "words", *arguments)
    assert status == 0, err
    found = Calibration.read(corrections)
    assert found.model == "quartznet_demo"
    assert set(found.confidence) == set(DECODERS)
    assert 0 < found.end_late_s < found.start_late_s < 0.3
