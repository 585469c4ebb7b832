"""Rescoring, against all texts there are on clips so short that they can be listed."""

import base64
import math
import sys

import numpy as np
import onnx
import pytest
from carnelian_training.ctc import Decoder, MissingPackage, OptionError, Options, rescoring
from carnelian_training.ctc.rescoring import NeuralLanguageModel, NeuralLanguageModelError

LABELS = [" ", "a", "b"]
EVERYTHING = {"beam_width": 500, "beam_threshold": 100, "token_threshold": -100, "n_best": 100}
RESCORE = {"decoder": "beam", "rescore": True}


@pytest.fixture
def character_scores(tmp_path, write_language_model):
    """What `tiny.onnx` gives each character; "" is the sentence's end."""
    return write_language_model(tmp_path / "tiny.onnx", "ab")


@pytest.fixture
def decoder(tmp_path, character_scores):
    return Decoder(LABELS, 0.02, neural_language_model=tmp_path / "tiny.onnx")


def decode(clip: np.ndarray, decoder: Decoder, **options):
    wanted = decoder.read_options(RESCORE | options, Options(max_rescore_depth=500))
    return decoder.decode([clip], [wanted])[0]


def log_prob(text: str, character_scores: dict[str, float]) -> float:
    """A sentence begins with a space, for sentencepiece; an empty one has none."""
    return sum(character_scores[character] for character in (f" {text}" if text else "")) + character_scores[""]


@pytest.mark.parametrize("seed", range(3))
def test_every_reading_is_weighed_anew(decoder, character_scores, seed, all_texts, random_clip):
    clip = random_clip(5, seed)
    expected = {text: found + 0.7 * log_prob(text, character_scores) for text, found in all_texts(clip, LABELS).items()}
    hypothesis = decode(clip, decoder, **EVERYTHING, rescore_weight=0.7, rescore_depth=500)
    assert hypothesis.text == hypothesis.alternatives[0].text
    assert [reading.text for reading in hypothesis.alternatives] == sorted(expected, key=lambda t: -expected[t])[:100]
    for reading in hypothesis.alternatives:
        assert reading.score == pytest.approx(expected[reading.text], abs=1e-4)
        parts = reading.acoustic + reading.language + reading.hotwords + reading.neural
        assert reading.score == pytest.approx(parts)


def test_a_reading_far_down_the_list_may_win_if_the_list_is_deep_enough(decoder, random_clip):
    clip = random_clip(5, seed=1)
    shallow, deep = (decode(clip, decoder, rescore_weight=3, rescore_depth=depth, n_best=2) for depth in (1, 50))
    unaided = decode(clip, decoder, rescore=False, n_best=50)
    assert deep.text not in [r.text for r in unaided.alternatives[:2]]
    assert {r.text for r in shallow.alternatives} == {r.text for r in unaided.alternatives[:2]}  # n_best at least
    assert len(deep.alternatives) == 2
    assert " ".join(word.word for word in deep.words) == deep.text


def test_hot_words_and_rescoring_add_up(decoder, character_scores, random_clip):
    clip = random_clip(6, seed=3)
    options = {"hotwords": ["ab"], "hotword_boost": 4.0, "rescore_weight": 0.4}
    for reading in decode(clip, decoder, **options, n_best=20).alternatives:
        assert reading.hotwords == 4.0 * reading.text.split().count("ab")
        assert reading.neural == pytest.approx(0.4 * log_prob(reading.text, character_scores))


def test_a_clip_is_scored_as_alone_in_any_company(decoder, random_clip):
    clips = [random_clip(num_frames, seed) for seed, num_frames in enumerate((9, 7, 3, 9))]
    wanted = [
        Options(),
        Options(decoder="beam", rescore=True, n_best=3),
        Options(decoder="beam", n_best=3),
        Options(decoder="beam", rescore=True, rescore_weight=1.5, rescore_depth=7),
    ]
    together = decoder.decode(clips, wanted)
    alone = [decoder.decode([clip], [options])[0] for clip, options in zip(clips, wanted, strict=True)]
    assert together == alone
    assert [any(r.neural for r in hypothesis.alternatives) for hypothesis in together] == [False, True, False, True]


def test_texts_are_scored_in_parts_that_fit_into_memory(tmp_path, character_scores, monkeypatch):
    model = NeuralLanguageModel(tmp_path / "tiny.onnx", LABELS)
    texts = ["a" * length for length in (3, 0, 20, 1, 7, 7)]
    whole = model.score(texts)
    assert whole == pytest.approx([log_prob(text, character_scores) for text in texts])
    monkeypatch.setattr(rescoring, "MAX_TOKENS", 8)
    np.testing.assert_array_equal(model.score(texts), whole)


@pytest.mark.parametrize("num_frames", [0, 1, 2])
def test_next_to_nothing_can_be_rescored(decoder, num_frames):
    clip = np.log(np.full((num_frames, 4), 0.25, np.float32))
    assert 1 <= len(decode(clip, decoder, n_best=3).alternatives) <= 3


def test_nothing_but_blanks_is_an_empty_text(decoder, character_scores):
    clip = np.log(np.array([[0.001, 0.001, 0.001, 0.997]] * 50, np.float32))
    hypothesis = decode(clip, decoder)
    assert (hypothesis.text, hypothesis.words) == ("", ())
    assert hypothesis.alternatives[0].neural == pytest.approx(0.3 * character_scores[""])


def test_a_minute_of_equal_probabilities_ends(decoder):
    hypothesis = decode(np.log(np.full((3000, 4), 0.25, np.float32)), decoder, beam_width=10)
    assert math.isfinite(hypothesis.alternatives[0].score)


@pytest.mark.parametrize(
    ("labels", "alphabet", "message"),
    [
        (LABELS, "abß", r"alphabet, ' ab', but has 'ß'"),
        ([" ", "a", "b", "c", "'"], "ab", r"but does not know \"'\", 'c'"),
        ([" ", "a", "c"], "ab", r"but does not know 'c' and has 'b'"),
    ],
)
def test_a_model_of_another_alphabet_is_refused_with_its_characters(
    tmp_path, write_language_model, labels, alphabet, message
):
    write_language_model(tmp_path / "lm.onnx", alphabet)
    with pytest.raises(NeuralLanguageModelError, match=message):
        Decoder(labels, 0.02, neural_language_model=tmp_path / "lm.onnx")


def test_labels_without_a_space_are_refused_as_they_have_no_readings_to_rate(tmp_path, write_language_model):
    write_language_model(tmp_path / "lm.onnx", "ab")
    with pytest.raises(NeuralLanguageModelError, match=r"lm\.onnx .* one label must be the space, .* are 'ab'"):
        Decoder(["a", "b"], 0.02, neural_language_model=tmp_path / "lm.onnx")


def test_a_model_in_capitals_serves_small_letters_and_the_other_way_round(tmp_path, write_language_model):
    write_language_model(tmp_path / "lower.onnx", "ab", "lower", lambda c: -1.0 - (c.lower() == "b"))
    write_language_model(tmp_path / "upper.onnx", "AB", "upper", lambda c: -1.0 - (c.lower() == "b"))
    scores = [
        NeuralLanguageModel(tmp_path / f"{case}.onnx", labels).score([text])
        for case in ("lower", "upper")
        for labels, text in ((LABELS, "ab b"), ([" ", "A", "B"], "AB B"))
    ]
    assert scores == [scores[0]] * 4


def test_a_turkish_model_keeps_both_letters_i_in_the_other_case(tmp_path, write_language_model):
    write_language_model(tmp_path / "lm.onnx", "\u0131i", "lower", lambda c: -1.0 - (c == "i"))
    model = NeuralLanguageModel(tmp_path / "lm.onnx", [" ", "I", "\u0130"])
    assert model.score(["I I"]) > model.score(["I \u0130"]) > model.score(["\u0130 \u0130"])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"format": "carnelian-language-model-2"}, "must say format 'carnelian-language-model-1' .*-2'"),
        ({"case": "title"}, "must have case lower or upper in its metadata, but has 'title'"),
        ({"tokenizer": base64.b64encode(b"no tokenizer").decode()}, "must hold a sentencepiece model as base64"),
        ({"tokenizer": ""}, "must hold a sentencepiece model as base64"),
        ({"tokenizer": "%"}, "must hold a sentencepiece model as base64"),
    ],
)
def test_what_is_no_such_model_is_refused(tmp_path, write_language_model, metadata, message):
    write_language_model(tmp_path / "lm.onnx", "ab", **metadata)
    with pytest.raises(NeuralLanguageModelError, match=message):
        NeuralLanguageModel(tmp_path / "lm.onnx", LABELS)


def test_files_that_cannot_be_used_are_named(tmp_path, write_language_model):
    (tmp_path / "lm.onnx").write_bytes(b"no graph")
    with pytest.raises(NeuralLanguageModelError, match=r"lm\.onnx must be an ONNX file"):
        NeuralLanguageModel(tmp_path / "lm.onnx", LABELS)
    with pytest.raises(NeuralLanguageModelError, match=r"missing\.onnx must be an ONNX file .* No such file"):
        NeuralLanguageModel(tmp_path / "missing.onnx", LABELS)
    write_language_model(tmp_path / "nan.onnx", "ab")
    model = onnx.load(tmp_path / "nan.onnx")
    (end,) = (tensor for tensor in model.graph.initializer if tensor.name == "end")
    end.CopyFrom(onnx.numpy_helper.from_array(np.asarray(np.float32("nan")), "end"))
    onnx.save(model, tmp_path / "nan.onnx")
    with pytest.raises(NeuralLanguageModelError, match=r"must give finite log-probabilities, but gives .*nan"):
        NeuralLanguageModel(tmp_path / "nan.onnx", LABELS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"LOG_PROB": "SCORE"}, r"Invalid output name: ?LOG_PROB"),
        ({"TOKENS": "IDS"}, r"Required inputs \(\['IDS'\]\) are missing"),
        ({"int64[rows, time]": "int32[rows, time]"}, r"Unexpected input data type.*tensor\(int32\)"),
        ({"float[rows]": "float[rows, one]", "keepdims = 0": "keepdims = 1"}, r"the shape \(2,\), but has \(2, 1\)"),
        ({"float[rows]": "float", "(real, last)": "(real)"}, r"the shape \(2,\), but has \(\)"),
    ],
    ids=["output", "input", "type", "matrix", "scalar"],
)
def test_a_model_of_other_inputs_or_outputs_is_named(tmp_path, write_language_model, changes, message):
    write_language_model(tmp_path / "lm.onnx", "ab", changes=changes)
    with pytest.raises(NeuralLanguageModelError, match=rf"lm\.onnx must compute LOG_PROB of TOKENS and .*{message}"):
        NeuralLanguageModel(tmp_path / "lm.onnx", LABELS)


def test_a_model_that_gives_a_letter_no_number_is_named(tmp_path, write_language_model):
    write_language_model(tmp_path / "lm.onnx", "ab", log_prob=lambda c: math.nan if c == "b" else -1.0)
    with pytest.raises(NeuralLanguageModelError, match=r"must give finite log-probabilities, but gives .*nan"):
        NeuralLanguageModel(tmp_path / "lm.onnx", LABELS)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"decoder": "beam", "rescore": "maybe"}, "rescore must be true or false, but is 'maybe'"),
        ({"decoder": "beam", "rescore": 1}, "rescore must be true or false, but is 1"),
        ({"rescore": True}, "rescore must come with decoder beam, but the decoder is greedy"),
        ({"decoder": "beam", "rescore_weight": 1}, "rescore_weight must come with rescore true"),
        ({**RESCORE, "rescore_weight": -1}, "rescore_weight must be a number from 0 to 10, but is -1"),
        ({**RESCORE, "rescore_depth": 101}, "rescore_depth must be a whole number from 1 to 100"),
        ({**RESCORE, "rescore_depth": 1.5}, "rescore_depth must be a whole number"),
    ],
)
def test_a_wrong_option_is_refused_with_what_is_allowed(decoder, parameters, message):
    with pytest.raises(OptionError, match=message):
        decoder.read_options(parameters, Options())


def test_without_a_model_there_is_no_rescoring():
    decoder = Decoder(LABELS, 0.02)
    with pytest.raises(OptionError, match="rescore needs a neural language model, but the model has none"):
        decoder.read_options(RESCORE, Options())
    with pytest.raises(OptionError, match="rescore needs a neural language model"):
        decoder.change_options({"rescore": "true"})
    for decoding in ("greedy", "beam"):
        assert decoder.read_options({"decoder": decoding, "rescore": "false"}, Options()).rescore is False


def test_a_model_that_rescores_by_default_still_decodes_greedily(decoder, random_clip):
    defaults = decoder.change_options({"decoder": "beam", "rescore": "True"})
    clip = random_clip(5)
    wanted = [decoder.read_options(asked, defaults) for asked in ({}, {"decoder": "greedy"}, {"rescore": "false"})]
    rescored, greedy, searched = decoder.decode([clip] * 3, wanted)
    assert rescored.alternatives[0].neural < 0 == searched.alternatives[0].neural
    assert greedy.alternatives == ()


def test_without_its_packages_a_model_says_what_to_install(tmp_path, character_scores, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.delitem(sys.modules, "carnelian_training.ctc.rescoring", raising=False)
    with pytest.raises(MissingPackage, match="pip install onnxruntime sentencepiece") as caught:
        Decoder(LABELS, 0.02, neural_language_model=tmp_path / "tiny.onnx")
    assert caught.value.path == tmp_path / "tiny.onnx"
