"""Options of the decoder: what requests and models may ask for, and what is said of the rest."""

import urllib.parse

import numpy as np
import pytest
from carnelian_export.stages import MAX_BATCH_SIZE
from carnelian_training.ctc import Decoder, OptionError, Options, decoder
from carnelian_training.ctc.hotwords import build_hotwords
from carnelian_training.ctc.spelling import speller

LABELS = [" ", "a", "b"]


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
    ("options", "message"),
    [
        (Options(decoder="ngram"), r"greedy, beam, but is 'ngram'; ngram needs a language model"),
        (Options(decoder="ngramm"), r"decoder must be one of greedy, beam, but is 'ngramm'"),
        (Options(decoder="beam", rescore=True), r"rescore needs a neural language model"),
    ],
)
def test_options_made_by_code_are_refused_unless_the_decoder_supports_them(options, message):
    with pytest.raises(OptionError, match=message):
        Decoder(LABELS, 0.02).decode([np.zeros((3, 4), np.float32)], [options])


@pytest.mark.parametrize("options", [Options(), Options(decoder="beam")])
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(3, 4), (3, 4)], r"must be one for each of 2 clips, but are 1"),
        ([(3, 3)], r"here \[frames, 4\], but is of \[3, 3\]"),
        ([(3, 8)], r"here \[frames, 4\], but is of \[3, 8\]"),
        ([(4,)], r"here \[frames, 4\], but is of \[4\]"),
    ],
)
def test_clips_that_do_not_fit_the_labels_or_the_options_are_refused(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        Decoder(LABELS, 0.02).decode([np.zeros(shape, np.float32) for shape in shapes], [options])


@pytest.fixture
def lists_built(monkeypatch):
    """The hot words of the tables that were built, in order."""
    built = []

    def build(phrases, boost, labels):
        built.append(phrases)
        return build_hotwords(phrases, boost, labels)

    monkeypatch.setattr(decoder, "build_hotwords", build)
    return built


def test_hot_words_of_each_clip_of_a_batch_are_kept(lists_built):
    hearing = Decoder(LABELS, 0.02)
    lists = [("a" * (i + 1),) for i in range(MAX_BATCH_SIZE)]
    for _ in range(2):
        for phrases in lists:
            hearing.read_options({"decoder": "beam", "hotwords": phrases}, Options())
    assert lists_built == lists


def test_kept_hot_words_have_a_bounded_size(lists_built, monkeypatch):
    monkeypatch.setattr(decoder, "MAX_HOTWORD_CELLS", len(LABELS) * 100)
    hearing = Decoder(LABELS, 0.02)
    first, second, third = (("a" * length,) for length in (30, 40, 50))  # two fit
    for phrases in (first, second, first, third, first, second):
        hearing.read_options({"decoder": "beam", "hotwords": phrases}, Options())
    assert lists_built == [first, second, third, second]


@pytest.mark.parametrize(
    ("labels", "word", "spelled"),
    [
        (" κόσμο", "ΚΌΣΜΟΣ", "κόσμοσ"),
        (" κόσμο", "κόσμος", "κόσμοσ"),
        (" no\u0301", "nón", "no\u0301n"),
        (" \u09df", "\u09af\u09bc", "\u09df"),
        ("ış k", "IŞIK", "ışık"),
        ("ışk i", "i\u0307şık", "işık"),
        ("IŞKİ ", "i\u0307şık", "İŞIK"),
        (" 'hats", "hat\u2019s", "hat's"),
        (" şiled", "Şişli\u2019de", "şişlide"),
        (" иза-", "из\u2011за", "из-за"),
        (" иза\u2011", "из-за", "из\u2011за"),
        (" nohcs", "\u200fscho\u00adn\u200bschon", "schon schon"),
        (" a", "\u200b", ""),
    ],
)
def test_hot_words_are_spelled_as_the_labels_are(labels, word, spelled):
    assert " ".join(speller(tuple(labels))(word).split()) == spelled
    Decoder(list(labels), 0.02).read_options({"decoder": "beam", "hotwords": [word]}, Options())


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


def test_a_default_may_be_what_the_limit_set_with_it_allows():
    options = Decoder(LABELS, 0.02).change_options({"max_rescore_depth": 300, "rescore_depth": 200})
    assert (options.max_rescore_depth, options.rescore_depth) == (300, 200)


def test_a_boost_is_of_hot_words():
    decoder = Decoder(LABELS, 0.02)
    model = decoder.change_options({"hotword_boost": 9, "decoder": "beam"})
    with pytest.raises(OptionError, match="hotword_boost must come with hotwords, but there are none"):
        decoder.read_options({"hotword_boost": 5}, model)
    assert decoder.read_options({"hotword_boost": 5, "hotwords": []}, model).hotword_boost == 5
    expecting = decoder.change_options({"hotwords": ["a"], "decoder": "beam"})
    assert decoder.read_options({"hotword_boost": 5}, expecting).hotword_boost == 5


def test_of_several_mistakes_the_same_one_is_named_whatever_their_order():
    decoder = Decoder(LABELS, 0.02)
    for mistakes in ({"n_best": 0, "beam_width": 0}, {"beam_width": 0, "n_best": 0}):
        with pytest.raises(OptionError, match="beam_width"):
            decoder.read_options(mistakes, decoder.change_options({}))
