import numpy as np
import pytest
from carnelian_training.ctc import Calibration

STARTS, ENDS = np.array([50, 340, 1000, 0, 100]), np.array([300, 500, 1020, 80, 300])
IS_FIRST = np.array([True, False, False, True, False])  # two clips
CLIP_ENDS = np.array([1020, 1020, 1020, 320, 320])


def test_nothing_measured_changes_nothing():
    starts, ends = Calibration().correct_times(STARTS, ENDS, 20, IS_FIRST, CLIP_ENDS)
    assert (starts.tolist(), ends.tolist()) == (STARTS.tolist(), ENDS.tolist())
    assert Calibration().likelihoods(np.array([0.3]), "greedy") == [0.3]


def test_words_move_to_where_they_are_said_and_stay_in_order_and_apart():
    starts, ends = Calibration(start_late_s=0.11, end_late_s=0.03).correct_times(STARTS, ENDS, 20, IS_FIRST, CLIP_ENDS)
    assert starts.tolist() == [0, 270, 890, 0, 50]
    assert ends.tolist() == [270, 470, 990, 50, 270]


def test_a_word_is_never_shorter_than_a_frame():
    starts, ends = Calibration(end_late_s=0.5).correct_times(STARTS, ENDS, 20, IS_FIRST, CLIP_ENDS)
    assert (ends - starts >= 20).all()
    assert starts.tolist() == [50, 340, 1000, 0, 100]


def test_words_that_are_pushed_push_on():
    starts, ends = np.array([0, 0, 0]), np.array([0, 0, 0])
    starts, ends = Calibration().correct_times(starts, ends, 20, np.array([True, False, False]), np.full(3, 60))
    assert (starts.tolist(), ends.tolist()) == ([0, 20, 40], [20, 40, 60])


def test_words_that_are_said_later_stay_in_their_clip_in_order_and_apart():
    calibration = Calibration(start_late_s=-0.3, end_late_s=-0.7)
    starts, ends = calibration.correct_times(STARTS, ENDS, 20, IS_FIRST, CLIP_ENDS)
    assert starts.tolist() == [350, 980, 1000, 280, 300]
    assert ends.tolist() == [980, 1000, 1020, 300, 320]


def test_confidence_becomes_the_likelihood_measured_for_its_decoder():
    calibration = Calibration(confidence={"greedy": (1.0, -1.0)})
    assert calibration.likelihoods(np.array([0.5]), "greedy") == pytest.approx(0.2689, abs=1e-4)
    assert calibration.likelihoods(np.array([0.5]), "ngram") == 0.5
    least, most = calibration.likelihoods(np.array([0.0, 1.0]), "greedy")
    assert 0 < least < most < 1


def test_what_is_written_is_read(tmp_path):
    calibration = Calibration(0.11, 0.03, {"greedy": (1.1, -1.7), "ngram": (0.5, 0.1)}, "tiny")
    for mark in ("", "\ufeff"):  # as Windows' editors save UTF-8
        (tmp_path / "calibration.json").write_text(mark + calibration.to_json(), encoding="utf-8")
        assert Calibration.read(tmp_path / "calibration.json") == calibration


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"confidence": {"greedy": 1}}',
        '{"confidence": {}, "late": 1}',
        "\xff",
        # These were read, and every request that came upon them failed or had NaN in its answer.
        '{"confidence": {}, "start_late_s": NaN}',
        '{"confidence": {}, "end_late_s": "0.04"}',
        '{"confidence": {"greedy": [Infinity, 0]}}',
        '{"confidence": {"gredy": [1, 0]}}',
        '{"confidence": {"greedy": [-1, 0]}}',
        '{"confidence": {"greedy": [0, 0]}}',
        '{"confidence": {}, "start_late_s": 1e9}',
        '{"confidence": {}, "end_late_s": -11}',
        '{"confidence": {}, "model": 1}',
        f'{{"confidence": {{}}, "start_late_s": {10**400}}}',
        "[" * 100_000,
    ],
)
def test_another_file_is_not_taken_for_a_calibration(tmp_path, content):
    (tmp_path / "other.json").write_text(content, encoding="latin-1")
    with pytest.raises(
        ValueError, match=r"must be a file of `carnelian-perf words`, but (is none|it has other content)"
    ):
        Calibration.read(tmp_path / "other.json")
