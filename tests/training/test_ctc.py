import itertools

import numpy as np
import pytest
from carnelian_training.ctc import Calibration, Decoder, Options

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


def greedy(clips, frame_s: float = 0.02):
    return Decoder(LABELS, frame_s).decode(clips, [Options()] * len(clips))


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
    (hypothesis,) = greedy(log_probs(frames))
    assert hypothesis.text == text


def test_each_row_collapses_on_its_own():
    rows = ["aab__c", "bccc__", "______", "a a a_"]
    batch = greedy(log_probs(*rows))
    alone = [greedy(log_probs(row))[0] for row in rows]
    assert batch == alone
    assert [h.text for h in batch] == ["abc", "bc", "", "a a a"]


def test_a_row_that_starts_as_the_last_ended_is_not_merged():
    first, second = greedy(log_probs("_a", "a_"))
    assert (first.text, second.text) == ("a", "a")


def test_words_have_times_in_seconds():
    (hypothesis,) = greedy(log_probs("__aa_b_ __cc_"), 0.04)
    assert [(w.word, w.start, w.end) for w in hypothesis.words] == [("ab", 0.08, 0.24), ("c", 0.4, 0.48)]


def test_a_word_is_as_certain_as_its_least_certain_character_and_a_text_as_its_words():
    probabilities = log_probs("a_b", certainty=0.9)
    probabilities[0, 2] = log_probs("b", certainty=0.4)[0, 0]
    (hypothesis,) = greedy(probabilities)
    assert hypothesis.words[0].confidence == pytest.approx(0.4, abs=1e-3)
    assert hypothesis.confidence == hypothesis.words[0].confidence
    (two,) = greedy(np.concatenate([log_probs("a "), probabilities], axis=1))
    assert two.confidence == pytest.approx((0.9 + 0.4) / 2, abs=1e-3)
    (silence,) = greedy(log_probs("___", certainty=0.8))
    assert silence.confidence == pytest.approx(0.8, abs=1e-3)


@pytest.mark.parametrize("shape", [(0, 5, 6), (2, 0, 6)])
def test_nothing_decodes_to_nothing(shape):
    assert [hypothesis.text for hypothesis in greedy(np.zeros(shape, np.float32))] == [""] * shape[0]


def test_where_all_is_equally_likely_the_first_label_is_taken_and_where_a_blank_is_half_it_is_not_doubted():
    probabilities = np.full((1, 3, 6), 1 / 6)
    probabilities[0, 1] = [0.48, 0.0, 0.0, 0.0, 0.0, 0.52]
    probabilities[0, 2] = [0.1, 0.4, 0.0, 0.0, 0.0, 0.5]
    with np.errstate(divide="ignore"):
        (hypothesis,) = greedy(np.log(probabilities).astype(np.float32))
    assert hypothesis.text == ""
    assert hypothesis.confidence == pytest.approx((0.52 * 0.5 / 6) ** (1 / 3), abs=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_path_of_the_likeliest_labels(seed):
    rng = np.random.default_rng(seed)
    clips = [rng.normal(scale=2, size=(frames, 6)) for frames in (1, 40, 300)]
    clips = [(clip - np.log(np.exp(clip).sum(1, keepdims=True))).astype(np.float32) for clip in clips]
    for clip, hypothesis in zip(clips, greedy(clips), strict=True):
        path = [label for label, _ in itertools.groupby(clip.argmax(1))]
        text = "".join(LABELS[label] for label in path if label != BLANK)
        assert hypothesis.text == " ".join(text.split())


@pytest.mark.parametrize("late_s", [(0.11, 0.04), (-0.11, -0.2)])
@pytest.mark.parametrize("name", ["greedy", "beam"])
def test_words_of_many_clips_move_as_those_of_each_alone(name, late_s):
    decoder = Decoder(LABELS, 0.02, calibration=Calibration(*late_s, {"greedy": (1.5, -0.5)}))
    options = Options(decoder=name)
    rows = ("a_ b_ccc__a ", "_______b__ab", "a b c a b c a", "_______ab")
    clips = [log_probs(row, certainty=0.8)[0] for row in rows]
    together = decoder.decode(clips, [options] * 4)
    assert together == [decoder.decode([clip], [options])[0] for clip in clips]
    for row, hypothesis in zip(rows, together, strict=True):
        times = [time for word in hypothesis.words for time in (word.start, word.end)]
        assert times == sorted(times)
        assert times[0] >= 0
        assert times[-1] <= round(0.02 * len(row), 3)


@pytest.mark.parametrize("decoder", ["greedy", "beam"])
def test_no_confidence_exceeds_one_where_rounding_made_a_probability_do_so(decoder):
    clips = np.minimum(log_probs("ab c", certainty=0.999) + 0.005, 0.004)
    (hypothesis,) = Decoder(LABELS, 0.02).decode(clips, [Options(decoder=decoder)])
    assert {hypothesis.confidence, *(word.confidence for word in hypothesis.words)} == {1.0}


@pytest.mark.parametrize("decoder", ["greedy", "beam"])
def test_nor_does_the_confidence_that_nothing_was_said(decoder):
    clips = np.full((1, 6, 6), -9.0, np.float32)
    clips[..., BLANK] = 0.004
    (hypothesis,) = Decoder(LABELS, 0.02).decode(clips, [Options(decoder=decoder)])
    assert (hypothesis.text, hypothesis.confidence) == ("", 1.0)
