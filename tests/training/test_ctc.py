import numpy as np
import pytest
from carnelian_training.ctc import greedy

LABELS = list(" abc'")
BLANK = 5


def log_probs(*rows: str, certainty: float = 0.9, frames: int | None = None) -> np.ndarray:
    """Rows of symbols, `_` for blank, as [batch, frames, 6] log-probabilities."""
    frames = frames or max(map(len, rows))
    probabilities = np.full((len(rows), frames, 6), (1 - certainty) / 5, np.float32)
    for i, row in enumerate(rows):
        for t, symbol in enumerate(row):
            probabilities[i, t, BLANK if symbol == "_" else LABELS.index(symbol)] = certainty
    return np.log(probabilities)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ("aab", "ab"),
        ("a_ab", "aab"),
        ("__", ""),
        ("_a__ _b_", "a b"),
        ("  a  b  ", "a b"),
        ("' a", "' a"),
        ("a", "a"),
        ("abab", "abab"),
    ],
)
def test_repeats_collapse_and_blanks_separate(frames, text):
    (hypothesis,) = greedy(log_probs(frames), np.array([len(frames)]), LABELS, 0.02)
    assert hypothesis.text == text


def test_each_row_collapses_on_its_own():
    rows = ["aab__c", "bccc__", "______", "a a a_"]
    batch = greedy(log_probs(*rows), np.array([6, 6, 6, 6]), LABELS, 0.02)
    alone = [greedy(log_probs(row), np.array([len(row)]), LABELS, 0.02)[0] for row in rows]
    assert batch == alone
    assert [h.text for h in batch] == ["abc", "bc", "", "a a a"]


def test_frames_after_the_length_are_not_decoded():
    (hypothesis,) = greedy(log_probs("abcabc"), np.array([[2]]), LABELS, 0.02)
    assert hypothesis.text == "ab"
    assert greedy(log_probs("abc"), np.array([0]), LABELS, 0.02)[0].text == ""


def test_a_row_that_starts_as_the_last_ended_is_not_merged():
    first, second = greedy(log_probs("_a", "a_"), np.array([2, 2]), LABELS, 0.02)
    assert (first.text, second.text) == ("a", "a")


def test_words_have_times_in_seconds():
    (hypothesis,) = greedy(log_probs("__aa_b_ __cc_"), np.array([13]), LABELS, 0.04)
    assert [(w.word, w.start, w.end) for w in hypothesis.words] == [("ab", 0.08, 0.24), ("c", 0.4, 0.48)]


def test_a_word_is_as_certain_as_its_least_certain_character_and_a_text_as_its_words():
    probabilities = log_probs("a_b", certainty=0.9)
    probabilities[0, 2] = log_probs("b", certainty=0.4)[0, 0]
    (hypothesis,) = greedy(probabilities, np.array([3]), LABELS, 0.02)
    assert hypothesis.words[0].confidence == pytest.approx(0.4, abs=1e-3)
    assert hypothesis.confidence == hypothesis.words[0].confidence
    (two,) = greedy(np.concatenate([log_probs("a "), probabilities], axis=1), np.array([5]), LABELS, 0.02)
    assert two.confidence == pytest.approx((0.9 + 0.4) / 2, abs=1e-3)
    (silence,) = greedy(log_probs("___", certainty=0.8), np.array([3]), LABELS, 0.02)
    assert silence.confidence == pytest.approx(0.8, abs=1e-3)


@pytest.mark.parametrize("shape", [(0, 5, 6), (2, 0, 6)])
def test_nothing_decodes_to_nothing(shape):
    assert [h.text for h in greedy(np.zeros(shape, np.float32), np.zeros(shape[0], int), LABELS, 0.02)] == [""] * shape[
        0
    ]
