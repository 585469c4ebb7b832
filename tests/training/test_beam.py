"""Beam search against every text there is, on clips so short that all of them can be listed."""

import gzip
import itertools
import math
import sys
import urllib.parse

import kenlm
import numpy as np
import pytest
from carnelian_training.ctc import Decoder, MissingPackage, OptionError, Options
from carnelian_training.ctc.alignment import align
from carnelian_training.ctc.language_model import LanguageModel, LanguageModelError

LABELS = [" ", "a", "b"]
BLANK = len(LABELS)
EVERYTHING = {"beam_width": "500", "beam_threshold": "100", "token_threshold": "-100", "n_best": "100"}
ARPA = """\\data\\
ngram 1=5
ngram 2=4

\\1-grams:
-2.0\t<unk>\t0
0\t<s>\t-0.3
-1.0\t</s>\t0
-0.7\ta\t-0.2
-0.9\tab\t-0.1

\\2-grams:
-0.2\t<s> a
-1.5\t<s> ab
-0.4\ta ab
-0.3\tab </s>

\\end\\
"""


@pytest.fixture
def arpa(tmp_path):
    path = tmp_path / "lm.arpa"
    path.write_text(ARPA)
    return path


def random_clip(num_frames: int, seed: int = 0, num_labels: int = BLANK + 1) -> np.ndarray:
    scores = np.random.default_rng(seed).normal(scale=1.5, size=(num_frames, num_labels))
    return (scores - np.log(np.exp(scores).sum(1, keepdims=True))).astype(np.float32)


def all_texts(clip: np.ndarray) -> dict[str, float]:
    """Log-probability of every text, spaces at its ends and repeated ones left out, summed over all alignments."""
    found: dict[str, float] = {}
    for path in itertools.product(range(clip.shape[1]), repeat=len(clip)):
        labels = [label for label, _ in itertools.groupby(path) if label != BLANK]
        text = " ".join("".join(LABELS[label] for label in labels).split())
        found[text] = np.logaddexp(found.get(text, -np.inf), sum(clip[t, label] for t, label in enumerate(path)))
    return found


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
def test_without_a_language_model_every_text_has_its_probability(seed):
    clip = random_clip(5, seed)
    hypothesis = decode(clip, **EVERYTHING)
    assert hypothesis.text == hypothesis.alternatives[0].text
    assert_ranked(hypothesis.alternatives, all_texts(clip))


def test_with_a_language_model_words_and_sentence_ends_are_weighed_in(arpa):
    model = kenlm.Model(str(arpa))
    clip, weights = random_clip(5, seed=9), {"lm_weight": "0.7", "word_score": "0.4", "unknown_score": "-1.5"}
    expected = {}
    for text, log_prob in all_texts(clip).items():
        unknown = sum(word not in ("a", "ab") for word in text.split())
        language = 0.7 * model.score(text) * math.log(10) + 0.4 * len(text.split()) - 1.5 * unknown
        expected[text] = log_prob + language
    hypothesis = decode(clip, Decoder(LABELS, 0.02, arpa), **EVERYTHING, **weights, decoder="ngram")
    assert_ranked(hypothesis.alternatives, expected)


def test_hot_words_are_worth_their_boost_when_they_are_whole_and_nothing_otherwise():
    clip = random_clip(5, seed=3)
    expected = {
        text: log_prob + 2.0 * (text.split().count("ab") + 2 * f" {text} ".count(" b a "))
        for text, log_prob in all_texts(clip).items()
    }
    hypothesis = decode(clip, **EVERYTHING, hotwords='["ab", "b a"]', hotword_boost="2")
    assert_ranked(hypothesis.alternatives, expected)


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
    decoder = Decoder(LABELS, 0.02, path)
    narrow = decode(careful_clip(), decoder, decoder="ngram", lm_weight="1", beam_width="10")
    assert narrow.text == "a a a a a a a a ab"


def test_readings_that_were_recombined_are_among_the_alternatives_with_their_scores(tmp_path):
    path = tmp_path / "careful.arpa"
    path.write_text(CAREFUL)
    decoder = Decoder(LABELS, 0.02, path)
    narrow, wide = (
        decode(careful_clip(), decoder, decoder="ngram", lm_weight="1", n_best=n_best, beam_width=width).alternatives
        for n_best, width in (("20", "20"), ("100", "500"))
    )
    assert len(narrow) == 20
    expected = {reading.text: reading.score for reading in wide}
    for reading in narrow:
        assert reading.score == pytest.approx(expected[reading.text], abs=0.02)
        assert reading.score == pytest.approx(reading.acoustic + reading.language + reading.hotwords)


@pytest.mark.parametrize("seed", range(5))
def test_every_alternative_has_time_to_be_said(seed, arpa):
    clip = random_clip(4, seed)
    for options in ({}, {"decoder": "ngram"}):
        found = decode(clip, Decoder(LABELS, 0.02, arpa), **EVERYTHING | {"beam_width": "4"} | options)
        assert len(found.alternatives) > 1
        for reading in found.alternatives:
            equal_neighbours = sum(a == b for a, b in itertools.pairwise(reading.text))
            assert len(reading.text) + equal_neighbours <= len(clip), "a blank is said between equal letters"


def test_an_expected_word_is_not_unknown(arpa):
    clip = random_clip(4, seed=5)
    decoder = Decoder(LABELS, 0.02, arpa)
    plain = decode(clip, decoder, **EVERYTHING, decoder="ngram", unknown_score="-3")
    hot = decode(clip, decoder, **EVERYTHING, decoder="ngram", unknown_score="-3", hotwords='["bb"]', hotword_boost="0")
    scores = [{reading.text: reading.score for reading in result.alternatives} for result in (plain, hot)]
    # A boost of nothing makes no word expected; any other one does.
    assert scores[0] == pytest.approx(scores[1])
    hot = decode(clip, decoder, **EVERYTHING, decoder="ngram", unknown_score="-3", hotwords='["b"]', hotword_boost="1")
    assert {r.text: r.score for r in hot.alternatives}["b"] == pytest.approx(scores[0]["b"] + 3 + 1)


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
        hypothesis = decode(clip, Decoder(LABELS, 0.02, arpa), decoder=decoder, n_best="3")
        assert 1 <= len(hypothesis.alternatives) <= 3


def test_nothing_but_blanks_is_an_empty_text(arpa):
    clip = np.log(np.array([[0.001, 0.001, 0.001, 0.997]] * 50, np.float32))
    hypothesis = decode(clip, Decoder(LABELS, 0.02, arpa), decoder="ngram")
    assert (hypothesis.text, hypothesis.words) == ("", ())
    assert hypothesis.confidence == pytest.approx(0.997, abs=1e-3)


def test_a_minute_of_equal_probabilities_ends():
    clip = np.log(np.full((3000, 4), 0.25, np.float32))
    hypothesis = decode(clip, beam_width="10")
    assert math.isfinite(hypothesis.alternatives[0].score)


def test_alignments_give_every_character_frames_of_its_own():
    clip = random_clip(12, seed=1)
    begin, end = align(clip, np.array([1, 1, 0, 2]))
    assert (begin < end).all()
    assert (end[:-1] <= begin[1:]).all()
    assert begin[1] > end[0]  # a blank between equal ones


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [(["a", "naïve", "c3"], r"'3' in 'c3', 'c' in 'c3', .*'ï' in 'naïve'"), (["a", "AB"], r"'A' in 'AB', 'B' in 'AB'")],
)
def test_a_language_model_of_another_alphabet_is_refused_with_its_characters(tmp_path, vocabulary, message):
    path = tmp_path / "lm.arpa"
    words = "".join(f"-1.0\t{word}\t0\n" for word in ["<unk>", "<s>", "</s>", *vocabulary])
    counts = f"ngram 1={len(vocabulary) + 3}\nngram 2=1\n"
    path.write_text(f"\\data\\\n{counts}\n\\1-grams:\n{words}\n\\2-grams:\n-1.0\t<s> a\n\n\\end\\\n")
    with pytest.raises(LanguageModelError, match=message):
        LanguageModel(path, LABELS)


def test_a_language_model_of_words_needs_a_label_between_them(arpa):
    with pytest.raises(LanguageModelError, match="one label must be the space, but the labels are 'ab'"):
        Decoder(["a", "b"], 0.02, arpa)


def test_a_language_model_in_capitals_serves_small_letters(tmp_path, arpa):
    capitals = tmp_path / "capitals.arpa"
    capitals.write_text(ARPA.replace("\ta", "\tA").replace("ab", "AB").replace(" a", " A").replace("\tAb", "\tAB"))
    clip = random_clip(8, seed=2)
    small, large = (decode(clip, Decoder(LABELS, 0.02, path), decoder="ngram") for path in (arpa, capitals))
    assert small == large


# The form of LibriSpeech's published 3-gram.pruned.*.arpa.gz: SRILM's, with an empty line first, in capitals, the
# unknown word as <UNK> and sentence ends without a back-off, words with apostrophes at either end.
PUBLISHED = """
\\data\\
ngram 1=7
ngram 2=3
ngram 3=1

\\1-grams:
-1.2\t</s>
-2.5\t<UNK>
-99\t<s>\t-0.8
-1.1\tA\t-0.4
-2.1\tA'B\t-0.2
-1.3\tAB\t-0.3
-3.1\t'B

\\2-grams:
-0.4\t<s> A\t-0.1
-0.6\tA AB\t-0.2
-0.5\tAB </s>

\\3-grams:
-0.2\t<s> A AB

\\end\\
"""


@pytest.mark.parametrize("name", ["3-gram.arpa", "3-gram.arpa.gz"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_published_language_models_of_librispeech_load_as_they_are(tmp_path, name, newline):
    path = tmp_path / name
    content = PUBLISHED.replace("\n", newline).encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    model = LanguageModel(path, [" ", "a", "b", "'"])
    known, unknown = model.rate("a ab"), model.rate("bb a'b")
    assert known == (pytest.approx((-0.4 - 0.2 - 0.2 - 0.5) * math.log(10)), 0)
    assert unknown == (pytest.approx((-0.8 - 2.5 - 2.1 - 0.2 - 1.2) * math.log(10)), 1)
    assert {word for word in ("a", "ab", "a'b", "'b") if model.rate(word)[1]} == set()


@pytest.mark.parametrize(
    "content", [b"no language model", gzip.compress(b"no", mtime=0), gzip.compress(b"x")[:10] + b"!" * 20]
)
def test_what_is_no_language_model_is_refused(tmp_path, content):
    path = tmp_path / "lm.klm"
    path.write_bytes(content)
    with pytest.raises(LanguageModelError, match=r"must be an ARPA file or a KenLM binary"):
        LanguageModel(path, LABELS)


def test_ten_thousand_hot_words():
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


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"beam": 3}, r"an option must be one of decoder, beam_width, .*'beam'"),
        ({"decoder": "wfst"}, r"decoder must be one of greedy, beam, but is 'wfst'"),
        ({"decoder": "ngram"}, r"ngram needs a language model"),
        ({"decoder": "beam", "beam_width": 0}, r"beam_width must be a whole number from 1 to 500, but is 0"),
        ({"decoder": "beam", "beam_width": 2.5}, r"beam_width must be a whole number"),
        ({"decoder": "beam", "n_best": True}, r"n_best must be a whole number"),
        ({"decoder": "beam", "beam_threshold": "nan"}, r"beam_threshold must be a number from 0 to 100, but is 'nan'"),
        ({"decoder": "beam", "lm_weight": 0.5}, r"lm_weight needs a decoder that is not there"),
        ({"n_best": 3}, r"n_best must come with decoder beam, but the decoder is greedy"),
        ({"decoder": "beam", "hotwords": "ada"}, r"hotwords must be a JSON list of strings"),
        ({"decoder": "beam", "hotwords": '{"ada": 1}'}, r"hotwords must be a JSON list of strings"),
        ({"decoder": "beam", "hotwords": "[" * 100_000}, r"hotwords must be a JSON list of strings"),
        ({"decoder": "beam", "hotwords": ["bär"]}, r"hotwords cannot be heard: .*'r' in 'bär', 'ä' in 'bär'"),
        ({"decoder": "beam", "hotwords": ["a", "b" * 201]}, r"at most 200 characters each, .* but 'bbb.* has 201"),
        ({"decoder": "beam", "hotwords": ["a" * 100] * 3001}, r"300,000 in all, .* and all have 300,100"),
    ],
)
def test_a_wrong_option_is_refused_with_what_is_allowed(parameters, message):
    with pytest.raises(OptionError, match=message):
        Decoder(LABELS, 0.02).read_options(parameters, Options())


@pytest.mark.parametrize(
    "parameters",
    [
        {"x" * 20_000: 1},
        {"decoder": "x" * 20_000},
        {"decoder": "beam", "beam_width": "9" * 20_000},
        {"decoder": "beam", "hotwords": "x" * 20_000},
        {"decoder": "beam", "hotwords": ["x" * 20_000]},
        {"decoder": "beam", "hotwords": [chr(0x4E00 + i) * 200 for i in range(1000)]},
    ],
)
def test_however_long_a_wrong_option_is_grpc_can_say_so(parameters):
    with pytest.raises(OptionError) as refused:
        Decoder(LABELS, 0.02).read_options(parameters, Options())
    assert len(urllib.parse.quote(str(refused.value))) < 8000, "gRPC may refuse a status of 8 KiB, percent-encoded"


def test_a_model_may_have_defaults_for_decoders_that_are_not_its_default():
    decoder = Decoder(LABELS, 0.02)
    defaults = decoder.change_options({"beam_width": "7", "lm_weight": "0.9"})
    assert decoder.read_options({}, defaults).decoder == "greedy"
    assert decoder.read_options({"decoder": "beam"}, defaults).beam_width == 7


def test_a_model_may_lower_what_requests_may_ask_for():
    decoder = Decoder(LABELS, 0.02)
    model = decoder.change_options({"max_beam_width": "100", "max_n_best": "5"})
    assert decoder.read_options({"decoder": "beam", "beam_width": 100, "n_best": "5"}, model).n_best == 5
    for option, allowed in (("beam_width", "from 1 to 100, but is 600"), ("n_best", "from 1 to 5, but is 600")):
        with pytest.raises(OptionError, match=rf"{option} must be a whole number {allowed}"):
            decoder.read_options({"decoder": "beam", option: 600}, model)
    with pytest.raises(
        OptionError, match=r"an option must be one of decoder, .*rescore_depth, but there is 'max_n_best'"
    ):
        decoder.read_options({"decoder": "beam", "max_n_best": 100}, model)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_beam_width": 50}, "beam_width must be at most max_beam_width, which is 50, but is 100"),
        ({"max_rescore_depth": 10}, "rescore_depth must be at most max_rescore_depth, which is 10, but is 20"),
        ({"max_n_best": 101}, "max_n_best must be a whole number from 1 to 100, but is 101"),
    ],
)
def test_limits_of_a_model_that_do_not_fit_its_defaults_are_refused(parameters, message):
    with pytest.raises(OptionError, match=message):
        Decoder(LABELS, 0.02).change_options(parameters)


def test_clips_with_different_options_share_a_batch():
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


def test_without_kenlm_a_language_model_says_what_to_install(arpa, monkeypatch):
    monkeypatch.setitem(sys.modules, "kenlm", None)
    monkeypatch.delitem(sys.modules, "carnelian_training.ctc.language_model", raising=False)
    with pytest.raises(MissingPackage, match="pip install ufal-kenlm"):
        Decoder(LABELS, 0.02, arpa)
    assert Decoder(LABELS, 0.02).decoders == ("greedy", "beam")
