import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from carnelian_training.cli import main
from carnelian_training.ctc import Alternative, Decoder, Options
from carnelian_training.data.manifest import read_manifest, write_manifest
from carnelian_training.language_models import weights
from carnelian_training.language_models.weights import (
    RESCORING_GRID,
    SEARCH_GRID,
    Readings,
    choose_weights,
    read_weights,
)

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "quartznet_demo.pt"
CLIPS = ROOT / "demo" / "clips" / "manifest.jsonl"
NGRAMS = ROOT / "model_repository" / "quartznet_demo_ctc" / "1" / "english.klm"
LABELS = [" ", "a", "b"]


def spell(text: str, doubts: dict[int, tuple[str, float]]) -> np.ndarray:
    """Log-probabilities of a clear text, a frame and a blank for each character; in places another one is likelier."""
    clip = np.full((2 * len(text), len(LABELS) + 1), math.log(1e-4), np.float32)
    clip[1::2, -1] = math.log(0.999)
    for place, character in enumerate(text):
        clip[2 * place, LABELS.index(character)] = math.log(0.99)
    for place, (character, probability) in doubts.items():
        clip[2 * place, LABELS.index(text[place])] = math.log(1 - probability)
        clip[2 * place, LABELS.index(character)] = math.log(probability)
    return clip


def test_weights_are_those_with_which_a_language_model_settles_what_is_unsure(tmp_path, write_language_model, caplog):
    # The model prefers a to b by 2; the recogniser is wrong by 1 where b should be a, right by 5 where b is b.
    write_language_model(tmp_path / "lm.onnx", "ab", log_prob=lambda character: -3.0 if character == "b" else -1.0)
    clips = [
        spell("ab aa", {1: ("a", 1 / (1 + math.exp(5))), 4: ("b", 1 / (1 + math.exp(-1)))}),
        spell("aa ba", {4: ("b", 1 / (1 + math.exp(-1)))}),
    ]
    references = ["ab aa", "aa ba"]
    decoder = Decoder(LABELS, 0.02, neural_language_model=tmp_path / "lm.onnx")
    chosen = choose_weights(clips, references, decoder)
    assert set(chosen) == set(RESCORING_GRID)
    assert 0.5 < chosen["rescore_weight"] < 2.5
    options = decoder.read_options({"decoder": "beam", "rescore": True, **chosen}, Options())
    heard = [decoder.decode([clip], [options])[0].text for clip in clips]
    assert heard == references
    assert not caplog.messages


def test_weights_at_the_edge_of_the_grid_are_named(tmp_path, write_language_model, caplog):
    write_language_model(tmp_path / "lm.onnx", "ab")
    decoder = Decoder(LABELS, 0.02, neural_language_model=tmp_path / "lm.onnx")
    assert choose_weights([spell("ab aa", {})], ["ab aa"], decoder) == {"rescore_weight": 0.0}  # any would do
    assert "at its edge: rescore_weight 0 (of 0 to 1.5); the clips may be too few" in caplog.text


def test_a_model_is_not_heard_before_there_is_something_to_weigh(tmp_path, call):
    assert call(main, "weigh", "absent.pt", "absent.jsonl", "--out", tmp_path / "weights.json")[0] == 2


def test_without_language_models_there_is_nothing_to_choose():
    with pytest.raises(ValueError, match="give --lm or --neural-lm"):
        choose_weights([], [], Decoder(LABELS, 0.02))


def test_the_command_writes_what_evaluate_and_export_read(tmp_path, write_language_model, call):
    write_language_model(tmp_path / "lm.onnx", "abcdefghijklmnopqrstuvwxyz'")
    write_manifest(tmp_path / "clips.jsonl", read_manifest(CLIPS)[:2])
    manifest = tmp_path / "clips.jsonl"
    models = ["--lm", NGRAMS, "--neural-lm", tmp_path / "lm.onnx"]
    weights = tmp_path / "new" / "weights.json"
    status, out, err = call(main, "weigh", DEMO, manifest, *models, "--out", weights)
    assert status == 0, err
    options = read_weights(weights, NGRAMS, tmp_path / "lm.onnx")
    assert set(options) == set(SEARCH_GRID) | set(RESCORING_GRID)
    report = json.loads(weights.read_text())
    assert report["clips"] == 2
    assert list(report["wer"]) == ["greedy", "n-gram", "n-gram, weighed", "tiny", "tiny, weighed"]
    assert report["wer"]["n-gram, weighed"] <= report["wer"]["n-gram"] < report["wer"]["greedy"]
    assert "lower than on others" in out
    assert "outside the labels" not in err
    arguments = ["evaluate", DEMO, manifest, *models, "--lm-weights", weights]
    status, table, err = call(main, *arguments, "--table")
    assert status == 0, err
    assert f"{report['wer']['n-gram, weighed']:.2%}"[:-1] in table
    _, again, _ = call(main, *arguments, "--decoder=ngram", "--option=rescore=true")
    assert f"WER {report['wer']['tiny, weighed']:7.2%}" in again


def test_references_in_capitals_are_named(tmp_path, call):
    clip = read_manifest(CLIPS)[0]
    write_manifest(tmp_path / "clips.jsonl", [dataclasses.replace(clip, text=clip.text.upper())])
    arguments = [DEMO, tmp_path / "clips.jsonl", "--lm", NGRAMS, "--out", tmp_path / "weights.json"]
    status, _, err = call(main, "weigh", *arguments)
    assert status == 1
    assert "1 of 1 references hold characters outside the labels" in err
    assert "references must have words in the labels" in err
    assert not (tmp_path / "weights.json").exists()


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"options": 5}',
        '{"options": [1]}',
        "{",
        '{"lm_weight": 1}',
        '{"options": {"lm_weight": 1}, "language_models": [1]}',
        '{"options": {"lm_weight": 1}, "language_models": "english.klm"}',
    ],
)
def test_another_file_is_not_taken_for_weights(tmp_path, content):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"must be a file of `carnelian-train weigh`, but (is none|it has other content)"
    ):
        read_weights(tmp_path / "other.json", NGRAMS)


def test_an_option_that_is_wrong_is_named_with_its_file(tmp_path):
    path = tmp_path / "weights.json"
    path.write_text('{"options": {"lm_weight": 99}}')
    with pytest.raises(ValueError, match=r"weights\.json must .* but is none: lm_weight must be a number from 0 to 10"):
        read_weights(path, NGRAMS)


def test_weights_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ValueError, match="weigh`, but it cannot be read: No such file"):
        read_weights(tmp_path / "nowhere.json", NGRAMS)


def test_weights_come_with_the_language_models_that_they_were_chosen_for(tmp_path, caplog):
    path = tmp_path / "weights.json"
    # A byte order mark, as Windows' editors write it, is no part of the JSON.
    path.write_text('\ufeff{"options": {"lm_weight": 0.5}, "language_models": ["books.klm"]}', encoding="utf-8")
    assert read_weights(path, tmp_path / "books.klm", None) == {"lm_weight": 0.5}
    assert not caplog.messages
    assert read_weights(path, tmp_path / "news.klm", None) == {"lm_weight": 0.5}
    assert "weights.json were chosen for books.klm, not for news.klm" in caplog.text
    with pytest.raises(ValueError, match=r"must come with the language models, .*weights\.json comes alone"):
        read_weights(path, None, None)


def test_a_reading_has_its_words_those_that_are_unknown_and_its_errors(arpa):
    decoder, readings = Decoder(LABELS, 0.02, language_model=arpa), Readings("a ab")
    readings.add([Alternative("a bb", -3.0, acoustic=-2.0, language=-1.0, hotwords=0.0)], decoder, rescore=False)
    ngram, _ = decoder.language_model.rate("a bb")
    assert readings.rows == {"a bb": (-2.0, ngram, 0.0, 2, 1, 1)}


@pytest.mark.parametrize(
    ("errors", "best"),
    [
        ({0.0: 10, 0.25: 0, 0.35: 10, 0.85: 1, 1.25: 10}, 1.0),
        ({0.0: 10, 0.35: 9, 1.25: 10}, 0.5),  # the first whose neighbours have no more than 9
    ],
    ids=["lucky", "at the edge"],
)
def test_a_lucky_point_is_no_better_than_a_good_neighbourhood(errors, best):
    # Of the straight lines that the readings' scores are over the weight, each is the highest from somewhere on.
    readings, score = Readings("a"), 0.0
    for slope, (begins, wrong) in enumerate(errors.items()):
        score -= begins
        readings.rows[str(slope)] = (score, 0.0, float(slope), 0, 0, wrong)
    assert weights._best_point([readings], RESCORING_GRID, Options(decoder="beam")) == {"rescore_weight": best}


def test_words_have_a_score_of_their_own_beside_n_grams_alone():
    wordy, acoustic = (0.0, 0.0, 0.0, 9, 0, 1), (1.0, 0.0, 0.0, 1, 0, 0)
    for decoder, expected in (("ngram", 0), ("beam", 1)):
        options = Options(decoder=decoder, word_score=2.0)
        scores = np.array([wordy, acoustic])[:, :-1] @ weights._weights(options, rescore=True)
        assert scores.argmax() == expected


def test_unknown_words_have_a_score_of_their_own():
    unknown, acoustic = (1.0, 0.0, 0.0, 1, 1, 1), (0.0, 0.0, 0.0, 1, 0, 0)
    for unknown_score, expected in ((0.0, 0), (-2.0, 1)):
        options = Options(decoder="ngram", unknown_score=unknown_score)
        scores = np.array([unknown, acoustic])[:, :-1] @ weights._weights(options, rescore=False)
        assert scores.argmax() == expected


def test_a_search_is_repeated_with_what_it_gave_until_that_stays(monkeypatch):
    found, searched = [{"lm_weight": 0.7}, {"lm_weight": 0.6}, {"lm_weight": 0.6}], []
    monkeypatch.setattr(weights, "_search", lambda *arguments, rescore: searched.append(arguments[3].lm_weight))
    monkeypatch.setattr(weights, "_best_point", lambda *_: found[len(searched) - 1])
    assert weights._weigh_search([], [], None, Options(decoder="ngram")) == {"lm_weight": 0.6}
    assert searched == [Options().lm_weight, 0.7, 0.6]
