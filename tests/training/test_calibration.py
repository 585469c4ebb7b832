import pytest
from carnelian_training.ctc import Calibration, Hypothesis, Word

WORDS = (Word("a", 0.05, 0.3, 0.5), Word("b", 0.34, 0.5, 0.9), Word("c", 1.0, 1.02, 0.1))
HEARD = Hypothesis("a b c", WORDS, 0.5)


def test_nothing_measured_changes_nothing():
    assert Calibration().apply(HEARD, "greedy", 0.02).words == WORDS


def test_words_move_to_where_they_are_said_and_stay_in_order_and_apart():
    words = Calibration(start_late_s=0.11, end_late_s=0.03).apply(HEARD, "greedy", 0.02).words
    assert [(word.start, word.end) for word in words] == [(0.0, 0.27), (0.27, 0.47), (0.89, 0.99)]


def test_a_word_is_never_shorter_than_a_frame():
    (word,) = Calibration(end_late_s=0.5).apply(Hypothesis("a", WORDS[:1], 0.5), "greedy", 0.02).words
    assert word.end == pytest.approx(word.start + 0.02)


def test_confidence_becomes_the_likelihood_measured_for_its_decoder():
    calibration = Calibration(confidence={"greedy": (1.0, -1.0)})
    assert calibration.likelihood(0.5, "greedy") == pytest.approx(0.2689, abs=1e-4)
    assert calibration.likelihood(0.5, "ngram") == 0.5
    assert 0 < calibration.likelihood(0.0, "greedy") < calibration.likelihood(1.0, "greedy") < 1
    result = calibration.apply(HEARD, "greedy", 0.02)
    assert result.confidence == pytest.approx(sum(word.confidence for word in result.words) / 3, abs=1e-4)


def test_what_is_written_is_read(tmp_path):
    calibration = Calibration(0.11, 0.03, {"greedy": (1.1, -1.7), "ngram": (0.5, 0.1)})
    calibration.write(tmp_path / "calibration.json")
    assert Calibration.read(tmp_path / "calibration.json") == calibration
