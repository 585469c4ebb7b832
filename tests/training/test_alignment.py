import itertools
import tracemalloc

import numpy as np
import pytest
from carnelian_training.ctc.alignment import LOOK_EVERY, MARGIN, align

SPACE, A, B, BLANK = range(4)


def normalise(scores):
    scores = np.asarray(scores, np.float64)
    return (scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))).astype(np.float32)


def say(path, certainty=5.0, seed=0):
    """Log-probabilities of a recogniser that hears a path, [frames, 4]."""
    rows = np.random.default_rng(seed).normal(size=(len(path), 4))
    rows[np.arange(len(path)), path] += certainty
    return normalise(rows)


def exhaustive(clip, text):
    """The likeliest alignment, of all that there are: first frame of each character and the frame after its last."""
    best, found = -np.inf, None
    for path in itertools.product(range(4), repeat=len(clip)):
        ends = itertools.accumulate(len(list(run)) for _, run in itertools.groupby(path))
        starts = [0, *ends]
        spoken = [(path[start], start, end) for start, end in itertools.pairwise(starts) if path[start] != BLANK]
        while spoken and spoken[0][0] == SPACE:  # around a text spaces change nothing
            spoken.pop(0)
        while spoken and spoken[-1][0] == SPACE:
            spoken.pop()
        score = sum(row[label] for row, label in zip(clip.tolist(), path, strict=True))
        if [label for label, _, _ in spoken] == text and score > best:
            best, found = score, np.transpose([span for _, *span in spoken])
    return found


def test_alignments_give_every_character_frames_of_its_own():
    begin, end = align(normalise(np.random.default_rng(1).normal(size=(12, 4))), np.array([A, A, SPACE, B]), SPACE)
    assert (begin < end).all()
    assert (end[:-1] <= begin[1:]).all()
    assert begin[1] > end[0]  # a blank between equal ones


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("text", [[A], [A, B], [A, A, B], [B, A, B, B]])
def test_an_alignment_is_the_likeliest_of_all(seed, text):
    clip = normalise(np.random.default_rng(seed).normal(scale=3, size=(6, 4)))
    np.testing.assert_array_equal(align(clip, np.array(text), SPACE), exhaustive(clip, text))


def test_a_long_clip_takes_memory_by_its_length_alone():
    path = np.resize([A, BLANK, B, BLANK, BLANK, SPACE], 12_000)
    clip = say(path, certainty=15.0)
    text = path[path != BLANK]
    tracemalloc.start()
    begin, end = align(clip, text, SPACE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(begin, np.flatnonzero(path != BLANK))
    np.testing.assert_array_equal(end, begin + 1)
    assert peak < 100 * clip.nbytes  # all states of all frames, a byte each, are 750 times the clip


def test_a_text_that_the_recogniser_does_not_hear_is_aligned_all_the_same():
    frames = 10 * LOOK_EVERY
    clip = say([BLANK] * frames, certainty=MARGIN)  # each character lies below the margin
    text = np.resize([A, B], frames - 2)
    begin, end = align(clip, text, SPACE)
    assert (end - begin >= 1).all()
    assert (end[:-1] <= begin[1:]).all()
    assert end[-1] <= frames


@pytest.mark.parametrize("seed", range(6))
def test_a_recogniser_that_is_sure_of_another_text_can_be_aligned(seed):
    """States that were not followed for a while hold nothing of the time before."""
    rng = np.random.default_rng(seed)
    clip = normalise(rng.normal(scale=60, size=(100, 4)))
    text = rng.integers(0, 3, 40)
    begin, end = align(clip, text, SPACE)
    assert (begin < end).all()
    assert (end[:-1] <= begin[1:]).all()


def test_a_pause_of_several_spaces_is_one():
    clip = say([A, SPACE, BLANK, SPACE, B], certainty=15.0)
    clip[3, B] = clip[3, SPACE] - 1  # likelier than a blank, but less so than another space
    begin, end = align(clip, np.array([A, SPACE, B]), SPACE)
    assert (begin[0], end[0], begin[2], end[2]) == (0, 1, 4, 5)
