"""Beam search against every text there is, on clips so short that all of them can be listed."""

import itertools
import json
import math
import re

import kenlm
import numpy as np
import pytest
from carnelian_training.ctc import Decoder, OptionError, Options
from carnelian_training.ctc.hotwords import build_hotwords
from carnelian_training.ctc.prefixes import ROOT, Prefixes, Scoring

LABELS = [" ", "a", "b"]
BLANK = len(LABELS)
EVERYTHING = {"beam_width": "500", "beam_threshold": "100", "token_threshold": "-100", "n_best": "100"}


def decode(clip: np.ndarray, decoder: Decoder | None = None, /, **options: str):
    decoder = decoder or Decoder(LABELS, 0.02)
    wanted = decoder.read_options({"decoder": "beam", **options}, Options())
    return decoder.decode([clip], [wanted])[0]


def assert_ranked(alternatives, expected: dict[str, float]) -> None:
    ranking = sorted(expected, key=lambda text: -expected[text])[: len(alternatives)]
    assert [reading.text for reading in alternatives] == ranking
    for reading in alternatives:
        assert reading.score == pytest.approx(expected[reading.text], abs=1e-4)
        assert reading.score == pytest.approx(reading.acoustic + reading.language + reading.hotwords)


@pytest.mark.parametrize("seed", range(4))
def test_without_a_language_model_every_text_has_its_probability(seed, all_texts, random_clip):
    clip = random_clip(5, seed)
    hypothesis = decode(clip, **EVERYTHING)
    assert hypothesis.text == hypothesis.alternatives[0].text
    assert_ranked(hypothesis.alternatives, all_texts(clip, LABELS))


def test_with_a_language_model_words_and_sentence_ends_are_weighed_in(arpa, all_texts, random_clip):
    model = kenlm.Model(str(arpa))
    clip, weights = random_clip(5, seed=9), {"lm_weight": "0.7", "word_score": "0.4", "unknown_score": "-1.5"}
    expected = {}
    for text, log_prob in all_texts(clip, LABELS).items():
        unknown = sum(word not in ("a", "ab") for word in text.split())
        language = 0.7 * model.score(text) * math.log(10) + 0.4 * len(text.split()) - 1.5 * unknown
        expected[text] = log_prob + language
    hypothesis = decode(clip, Decoder(LABELS, 0.02, language_model=arpa), **EVERYTHING, **weights, decoder="ngram")
    assert_ranked(hypothesis.alternatives, expected)


@pytest.mark.parametrize("phrases", [("ab", "b a"), ("b a", "a"), ("a b", "b", "a b a")])
def test_hot_words_are_worth_their_boost_when_they_are_whole_and_nothing_otherwise(phrases, all_texts, random_clip):
    clip = random_clip(5, seed=3)
    expected = {
        text: log_prob
        + 2.0 * sum(len(phrase.split()) * len(re.findall(rf"(?= {phrase} )", f" {text} ")) for phrase in phrases)
        for text, log_prob in all_texts(clip, LABELS).items()
    }
    hypothesis = decode(clip, **EVERYTHING, hotwords=json.dumps(phrases), hotword_boost="2")
    assert_ranked(hypothesis.alternatives, expected)


def clear_clip(text: str, labels: list[str]) -> np.ndarray:
    """What is said, one frame for each character and a blank after it, with hardly a doubt."""
    scores = np.full((2 * len(text), len(labels) + 1), -10.0, np.float32)
    scores[::2][np.arange(len(text)), [labels.index(character) for character in text]] = 0.0
    scores[1::2, -1] = 0.0
    return scores - np.log(np.exp(scores).sum(1, keepdims=True))


@pytest.mark.parametrize(
    ("said", "phrase", "decoder"),
    [
        ("ab a b ab a bb b b b", "ab a b ab a bbaaaa", "beam"),
        ("a bbbbab a ab", "bbbbaaaabbbb", "ngram"),  # which the language model does not know
    ],
)
def test_a_hot_phrase_that_is_only_begun_takes_nothing_from_what_follows(said, phrase, decoder, arpa):
    model = Decoder(LABELS, 0.02, language_model=arpa)
    unknown = {"unknown_score": "-25"} if decoder == "ngram" else {}
    plain, hot = (
        decode(clear_clip(said, LABELS), model, decoder=decoder, **unknown, **more)
        for more in ({}, {"hotwords": json.dumps([phrase]), "hotword_boost": "5.5"})
    )
    assert hot.text in (plain.text, said)


def test_a_hot_phrase_with_an_unlikely_letter_is_written_where_it_is_said():
    options = {"hotwords": '["aba"]', "hotword_boost": "50"}
    assert (
        decode(clear_clip("ab bb a", LABELS), **options).text == "aba bb a"
    )  # and not "aba", of the first and the last


@pytest.mark.parametrize("said", ["     ab", "ab     ", "  a   b  "])
def test_spaces_around_words_are_no_part_of_them(said):
    labels = [" ", "a", "b"]
    clip = clear_clip(said, labels)[::2]  # without blanks between
    (greedy,) = Decoder(labels, 0.02).decode([clip], [Options()])
    assert decode(clip).text == greedy.text
    assert decode(clip).words == greedy.words


def test_an_impossible_space_is_no_error():
    with np.errstate(divide="ignore"):
        clip = np.log(np.array([[1, 0, 0, 0], [0, 1, 0, 0]], np.float32))
    assert [decode(clip).text, decode(clip).words[0].start] == ["a", 0.02]


def test_hot_phrases_that_overlap_expect_the_letters_of_both():
    labels = [" ", "a", "b", "c"]
    prefixes = Prefixes(Scoring(Options(), build_hotwords(["a b", "b c"], 6.0, labels), None, space=0), capacity=10)
    nodes = np.array([ROOT])
    for character, expected in (("a", {" "}), (" ", {"b"}), ("b", {" "}), (" ", {"c"})):
        extensions = prefixes.extend(nodes, np.array([labels.index(character)]), np.zeros((1, 1)), -np.inf)
        nodes = prefixes.append(extensions, np.array([0]), np.array([0]))
        assert {labels[i] for i in prefixes.expected_labels(nodes).nonzero()[0]} == expected


def test_a_hot_phrase_within_another_one_counts_once_while_that_one_is_spelled():
    labels = [" ", *"iobrt"]
    hotwords = build_hotwords(["i", "i robot"], 6.0, labels)
    state, kept, worth = hotwords.start, 0.0, []
    for character in "i robot ":
        state = hotwords.next_state[state, labels.index(character)]
        kept += hotwords.complete[state]
        worth.append(kept + hotwords.partial[state])
    assert worth == sorted(worth)
    assert worth[1] == pytest.approx(6 + 12 * 2 / 7)  # "i" is whole, and so are two of seven characters
    assert worth[-1] == 18


# Eight words that may be "a" or "b", which the language model does not mind, and one that sounds like "bb", which it
# does: 256 readings of the beginning, all nearer to what is heard than any that ends in "ab".
CAREFUL = """\\data\\
ngram 1=7
ngram 2=4

\\1-grams:
-3.0\t<unk>\t0
0\t<s>\t0
-1.0\t</s>\t0
-1.0\ta\t0
-1.0\tb\t0
-1.0\tab\t0
-1.0\tbb\t0

\\2-grams:
-0.1\ta ab
-0.1\tb ab
-2.0\ta bb
-2.0\tb bb

\\end\\
"""


def careful_clip() -> np.ndarray:
    choice, space, last, end = [0.01, 0.54, 0.44, 0.01], [0.97, 0.01, 0.01, 0.01], [0.01, 0.2, 0.78, 0.01], [0, 0, 1, 0]
    return np.log(np.maximum([choice, space] * 8 + [last, [0, 0, 0, 1], end], 1e-9)).astype(np.float32)


def test_what_lies_behind_takes_no_place_in_the_beam_from_what_lies_ahead(tmp_path):
    path = tmp_path / "careful.arpa"
    path.write_text(CAREFUL)
    decoder = Decoder(LABELS, 0.02, language_model=path)
    narrow = decode(careful_clip(), decoder, decoder="ngram", lm_weight="1", beam_width="10")
    assert narrow.text == "a a a a a a a a ab"


def test_readings_that_were_recombined_are_among_the_alternatives_with_their_scores(tmp_path):
    path = tmp_path / "careful.arpa"
    path.write_text(CAREFUL)
    decoder = Decoder(LABELS, 0.02, language_model=path)
    narrow, wide = (
        decode(careful_clip(), decoder, decoder="ngram", lm_weight="1", n_best=n_best, beam_width=width).alternatives
        for n_best, width in (("20", "20"), ("100", "500"))
    )
    assert len(narrow) == 20
    expected = {reading.text: reading.score for reading in wide}
    for reading in narrow:
        assert reading.score == pytest.approx(expected[reading.text], abs=0.02)
        assert reading.score == pytest.approx(reading.acoustic + reading.language + reading.hotwords)


@pytest.mark.parametrize(
    "options",
    [{"decoder": "beam", "beam_width": "3"}, {"decoder": "ngram", "beam_width": "2", "word_score": "-3"}],
    ids=["beam", "ngram"],
)
def test_what_is_said_three_times_is_not_heard_a_fourth_time(options, arpa, all_texts):
    a, space, blank = [0.01, 0.97, 0.01, 0.01], [0.9, 0.01, 0.01, 0.08], [0.01, 0.01, 0.01, 0.97]
    clip = np.log(np.array([a, space, a, space, a, blank, blank], np.float32))
    found = decode(clip, Decoder(LABELS, 0.02, language_model=arpa), **EVERYTHING | options).alternatives
    assert "a a a" in [reading.text for reading in found]
    expected = all_texts(clip, LABELS)
    for reading in found:  # "a " stands for "a a ", but not over and over; what was recombined is an estimate
        assert reading.acoustic < min(0.0, expected[reading.text] + 0.2), reading.text


@pytest.mark.parametrize("seed", range(8))
def test_no_alternative_is_likelier_than_all_its_alignments(seed, arpa, all_texts, random_clip):
    clip = random_clip(5, seed)
    options = EVERYTHING | {"decoder": "ngram", "beam_width": "6"}
    expected = all_texts(clip, LABELS)
    for reading in decode(clip, Decoder(LABELS, 0.02, language_model=arpa), **options).alternatives:
        assert reading.acoustic <= expected[reading.text] + 1e-4, reading.text


@pytest.mark.parametrize("seed", range(5))
def test_every_alternative_has_time_to_be_said(seed, arpa, random_clip):
    clip = random_clip(4, seed)
    for options in ({}, {"decoder": "ngram"}):
        found = decode(clip, Decoder(LABELS, 0.02, language_model=arpa), **EVERYTHING | {"beam_width": "4"} | options)
        assert len(found.alternatives) > 1
        for reading in found.alternatives:
            equal_neighbours = sum(a == b for a, b in itertools.pairwise(reading.text))
            assert len(reading.text) + equal_neighbours <= len(clip), "a blank is said between equal letters"


def test_an_expected_word_is_not_unknown(arpa, random_clip):
    clip = random_clip(4, seed=5)
    decoder = Decoder(LABELS, 0.02, language_model=arpa)
    plain = decode(clip, decoder, **EVERYTHING, decoder="ngram", unknown_score="-3")
    hot = decode(clip, decoder, **EVERYTHING, decoder="ngram", unknown_score="-3", hotwords='["bb"]', hotword_boost="0")
    scores = [{reading.text: reading.score for reading in result.alternatives} for result in (plain, hot)]
    # A boost of nothing makes no word expected; any other one does.
    assert scores[0] == pytest.approx(scores[1])
    hot = decode(clip, decoder, **EVERYTHING, decoder="ngram", unknown_score="-3", hotwords='["b"]', hotword_boost="1")
    assert {r.text: r.score for r in hot.alternatives}["b"] == pytest.approx(scores[0]["b"] + 3 + 1)


def test_the_first_words_of_a_hot_phrase_are_not_unknown_and_its_later_words_alone_are(arpa, random_clip):
    clip = random_clip(5, seed=5)
    decoder = Decoder(LABELS, 0.02, language_model=arpa)
    options = EVERYTHING | {"decoder": "ngram", "unknown_score": "-3"}
    plain, hot = (
        {reading.text: reading.language for reading in decode(clip, decoder, **options, **more).alternatives}
        for more in ({}, {"hotwords": '["bb b"]', "hotword_boost": "1"})
    )
    gains = {text: hot[text] - plain[text] for text in ("bb b", "bb", "a bb", "b", "b bb", "a b")}
    assert gains == pytest.approx({"bb b": 6, "bb": 3, "a bb": 3, "b": 0, "b bb": 3, "a b": 0})


def test_a_narrow_beam_finds_what_greedy_decoding_finds_on_a_clear_clip():
    clip = np.log(np.full((7, 4), 0.01, np.float32))
    for frame, label in enumerate([1, 1, BLANK, 2, 0, 2, 2]):
        clip[frame, label] = math.log(0.97)
    assert decode(clip, beam_width="1").text == decode(clip, decoder="greedy").text == "ab b"
    words = decode(clip, beam_width="1").words
    assert words == decode(clip, decoder="greedy").words


@pytest.mark.parametrize("num_frames", [0, 1, 2])
def test_next_to_nothing_can_be_decoded(num_frames, arpa):
    clip = np.log(np.full((num_frames, 4), 0.25, np.float32))
    for decoder in ("beam", "ngram"):
        hypothesis = decode(clip, Decoder(LABELS, 0.02, language_model=arpa), decoder=decoder, n_best="3")
        assert 1 <= len(hypothesis.alternatives) <= 3


def test_of_labels_that_are_all_unlikely_the_likeliest_is_taken():
    labels = [" ", *map(chr, range(0x4E00, 0x4E00 + 600))]  # so many that none reaches `token_threshold`
    probabilities = np.ones((1, len(labels) + 1))
    probabilities[0, 7] = 3.0  # a space and a blank together, both of which are no text, have 2
    clip = np.log(probabilities / probabilities.sum()).astype(np.float32)
    assert clip.max() < Options().token_threshold
    assert decode(clip, Decoder(labels, 0.02)).text == labels[7]


def test_nothing_but_blanks_is_an_empty_text(arpa):
    clip = np.log(np.array([[0.001, 0.001, 0.001, 0.997]] * 50, np.float32))
    hypothesis = decode(clip, Decoder(LABELS, 0.02, language_model=arpa), decoder="ngram")
    assert (hypothesis.text, hypothesis.words) == ("", ())
    assert hypothesis.confidence == pytest.approx(0.997, abs=1e-3)


def test_a_word_is_as_certain_as_its_least_certain_character_at_its_best_frame():
    heard = [[0.01, 0.6, 0.01, 0.38], [0.01, 0.95, 0.01, 0.03], [0.01, 0.01, 0.9, 0.08], [0.01, 0.01, 0.7, 0.28]]
    (word,) = decode(np.log(np.array(heard, np.float32))).words
    assert (word.word, word.confidence) == ("ab", pytest.approx(0.9, abs=1e-3))


def test_a_minute_of_equal_probabilities_ends():
    clip = np.log(np.full((3000, 4), 0.25, np.float32))
    hypothesis = decode(clip, beam_width="10")
    assert math.isfinite(hypothesis.alternatives[0].score)


def test_ten_thousand_hot_words(random_clip):
    letters = "abcdefghijklmnopqrstuvwxyz"
    labels = [" ", *letters]
    words = ["".join(word) for word in itertools.islice(itertools.product(letters, repeat=4), 10_000)]
    decoder = Decoder(labels, 0.02)
    clip = random_clip(20, num_labels=len(labels) + 1)
    wanted = decoder.read_options({"decoder": "beam", "hotwords": words, "hotword_boost": 20}, Options())
    (hypothesis,) = decoder.decode([clip], [wanted])
    assert len(set(hypothesis.text.split()) & set(words)) >= 2
    assert hypothesis.alternatives[0].hotwords >= 40
    with pytest.raises(OptionError, match=r"at most 10,000"):
        decoder.read_options({"decoder": "beam", "hotwords": [*words, "one more"]}, Options())


def test_hot_words_are_bounded_by_what_they_take_for_all_labels():
    labels = [" ", *(chr(0x4E00 + i) for i in range(4999))]
    decoder = Decoder(labels, 0.02)
    fit, more = ("".join(labels[1:199]) for _ in range(10)), ["".join(labels[1:199])] * 11
    decoder.read_options({"decoder": "beam", "hotwords": list(fit)}, Options())
    with pytest.raises(OptionError, match=r"with the 5,000 labels .* at most 2,000 characters .* but have 2,200; send"):
        decoder.read_options({"decoder": "beam", "hotwords": more}, Options())


def test_clips_with_different_options_share_a_batch(random_clip):
    clips = [random_clip(num_frames, seed) for seed, num_frames in enumerate((9, 7, 3, 9))]
    decoder = Decoder(LABELS, 0.02)
    wanted = [
        Options(),
        Options(decoder="beam", n_best=2),
        Options(),
        Options(decoder="beam", hotwords=("bb",), hotword_boost=9.0),
    ]
    together = decoder.decode(clips, wanted)
    alone = [decoder.decode([clip], [options])[0] for clip, options in zip(clips, wanted, strict=True)]
    assert together == alone
    assert [len(hypothesis.alternatives) for hypothesis in together] == [0, 2, 0, 1]
