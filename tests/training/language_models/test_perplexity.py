"""How well a language model, and n-grams beside it, predict words."""

import gzip
import json
import math
import re

import numpy as np
import pytest
import torch
from carnelian_training.checkpoint import load, load_language_model
from carnelian_training.cli import main
from carnelian_training.ctc.language_model import LanguageModel
from carnelian_training.distributed import Process
from carnelian_training.language_models.perplexity import (
    WordScores,
    interpolate,
    measure_perplexity,
    score_sentences,
    score_words,
    score_words_by_ngrams,
)
from carnelian_training.language_models.task import LanguageModelling
from carnelian_training.loop.state import new_state
from carnelian_training.text import LABEL_CHARACTERS

CPU = Process(torch.device("cpu"))


def test_words_are_rated_by_their_tokens(config, trained):
    _, network = load_language_model(trained / "tiny.pt")
    task = LanguageModelling(config)
    task.prepare(new_state(config, CPU))
    found = measure_perplexity(network, task.held_out, 5)
    assert found.per_word == pytest.approx(measure_perplexity(network, task.held_out, 500).per_word, rel=1e-5)
    best = load(trained / "tiny.pt")[1]["results"]["dev_word_perplexity"]
    assert found.per_word == pytest.approx(best, rel=1e-5)
    words = score_words(network, task.held_out, 5)
    assert len(words.log_probs) == sum(len(sentence.split()) + 1 for sentence in task.held_out)
    assert words.perplexity() == pytest.approx(found.per_word)
    assert words.known.all()
    assert score_words(network, ["the naïve king"], 5).known.tolist() == [True, False, True, True]


ARPA = """\\data\\
ngram 1=5
ngram 2=1

\\1-grams:
-1.0\t<unk>\t0
-99\t<s>\t0
-0.5\t</s>
-0.25\tthe\t0
-2.0\tking\t0

\\2-grams:
-0.75\tthe king

\\end\\
"""


def test_a_process_without_sentences_adds_a_number_of_the_same_type(trained):
    _, network = load_language_model(trained / "tiny.pt")
    none, one = score_sentences(network, [], 8), score_sentences(network, [[5]], 8)
    assert none.dtype == one.dtype == torch.float64  # for they meet in one sum
    assert none.sum() == 0


@pytest.mark.parametrize(
    "change", [("-1.0\t<unk>", "-inf\t<unk>"), ("-2.0\tking", "-inf\tking"), ("-1.0\t<unk>", "-99\t<unk>")]
)
def test_words_are_rated_as_the_decoder_rates_them(tmp_path, change):
    """A model that gives unknown words a probability of 0 had a perplexity of 1e15 or infinity."""
    (tmp_path / "lm.arpa").write_text(ARPA.replace(*change))
    assert change[1] in (tmp_path / "lm.arpa").read_text()
    text = "king saw the king"
    model = LanguageModel(tmp_path / "lm.arpa", list(LABEL_CHARACTERS))
    assert score_words_by_ngrams(tmp_path / "lm.arpa", [text]).log_probs.sum() == pytest.approx(model.rate(text)[0])


def test_perplexities_stand_beside_each_other(trained, tmp_path, call):
    (tmp_path / "text.txt").write_text("The king saw the king.")
    (tmp_path / "lm.arpa").write_text(ARPA)
    words = score_words_by_ngrams(tmp_path / "lm.arpa", ["the king saw the king"])
    assert words.known.tolist() == [True, True, False, True, True, True]
    assert words.perplexity() == pytest.approx(10 ** ((0.25 + 0.75 + 1 + 0.25 + 0.75 + 0.5) / 6), rel=1e-5)
    assert words.perplexity(words.known) == pytest.approx(10 ** ((0.25 + 0.75 + 0.25 + 0.75 + 0.5) / 5), rel=1e-5)
    capitals = re.sub(r"\b(the|king|saw)\b", lambda word: word[0].upper(), ARPA)
    (tmp_path / "3-gram.arpa.gz").write_bytes(gzip.compress(capitals.encode()))  # as LibriSpeech's are
    again = score_words_by_ngrams(tmp_path / "3-gram.arpa.gz", ["the king saw the king"])
    np.testing.assert_array_equal(again.log_probs, words.log_probs)
    certain = WordScores(np.zeros(6), np.ones(6, bool))
    mixed = interpolate([words, certain])
    assert mixed.log_probs[1] == pytest.approx(math.log((1 + 10**-0.75) / 2), rel=1e-5)
    assert mixed.known.tolist() == words.known.tolist()
    paths = [trained / "tiny.pt", tmp_path / "lm.arpa"]
    report = tmp_path / "report.json"
    options = ["--text", tmp_path / "text.txt", "--whole", "--out", report]
    status, out, err = call(main, "perplexity", *paths, *options)
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0] == "1 sentences, 5 words"
    assert [line.split()[-1] for line in lines[2:]] == ["tiny.pt", "lm.arpa", "together"]
    assert lines[3].split()[:3] == [f"{words.perplexity():.2f}", f"{words.perplexity(words.known):.2f}", "16.67%"]
    written = json.loads(report.read_text())
    assert written["words"] == 5
    assert written["models"]["lm.arpa"]["known_words"] == pytest.approx(words.perplexity(words.known))
    assert call(main, "perplexity", paths[0], paths[0])[0] == 2
    (tmp_path / "no.klm").write_text("nothing")
    status, _, err = call(main, "perplexity", tmp_path / "no.klm", "--text", tmp_path / "text.txt")
    assert status == 1
    assert "must be an ARPA file or a KenLM binary" in err


def test_perplexities_are_measured_on_the_device_that_there_is(trained, tmp_path, call, monkeypatch):
    (tmp_path / "text.txt").write_text("The king saw the king.")
    monkeypatch.setattr("carnelian_training.distributed.find_device", lambda: torch.device("meta"))
    status, _, err = call(main, "perplexity", trained / "tiny.pt", "--text", tmp_path / "text.txt", "--whole")
    assert status == 1
    assert "meta tensor" in err
