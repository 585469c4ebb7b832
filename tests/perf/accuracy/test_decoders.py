import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from carnelian_perf import stages
from carnelian_perf.accuracy import decoders
from carnelian_perf.accuracy.decoders import Measurement, make_batch, measure_stage
from carnelian_perf.accuracy.hot_words import rare_words, rate_hotwords
from carnelian_perf.cli import main
from carnelian_perf.load import LoadError
from carnelian_perf.stages import read_statistics
from tritonclient import grpc

ROOT = Path(__file__).parents[3]
ARPA = """\\data\\
ngram 1=6
ngram 2=1

\\1-grams:
-2.0\t<unk>\t0
0\t<s>\t0
-1.0\t</s>\t0
-1.0\tletter\t0
-6.0\tskipper\t0
-9.0\tcat\t0

\\2-grams:
-0.2\t<s> letter

\\end\\
"""


@pytest.fixture
def arpa(tmp_path):
    path = tmp_path / "lm.arpa"
    path.write_text(ARPA)
    return path


def test_rare_words_are_long_and_unlikely_or_unknown(arpa):
    said, rare = ["letter skipper cat", "carnelian letter xyz"], ["carnelian", "skipper"]
    assert rare_words(said, arpa) == rare
    capitals = arpa.with_name("capitals.arpa.gz")
    text = re.sub(r"\b(letter|skipper|cat)\b", lambda word: word[0].upper(), arpa.read_text())
    capitals.write_bytes(gzip.compress(text.encode()))
    assert rare_words(said, capitals) == rare


def test_rare_words_are_counted_clip_by_clip_and_left_out_of_the_others():
    row = rate_hotwords(
        "beam", 5.0, ["the skipper said", "no skipper"], ["the skipper set", "skipper skipper"], ["skipper"]
    )
    assert (row.precision, row.recall, row.f1) == (2 / 3, 1.0, pytest.approx(0.8))
    assert row.wer_of_others == pytest.approx(2 / 3)


def test_the_demo_is_measured(arpa, tmp_path, call):
    arguments = [ROOT / "demo" / "quartznet_demo.pt", ROOT / "demo" / "clips" / "manifest.jsonl", "--lm", arpa]
    status, _, err = call(main, "decoding", *arguments, "--boosts", 6, "--out", tmp_path / "raw.json")
    assert status == 0, err
    measured = Measurement.read(tmp_path / "raw.json")
    assert [row.decoder for row in measured.decoders][:3] == ["greedy", "beam", "ngram"]
    assert [(row.decoder, row.boost) for row in measured.hotwords] == [
        ("beam", 0.0),
        ("beam", 6.0),
        ("ngram", 0.0),
        ("ngram", 6.0),
    ]
    assert measured.greedy_batch.median_cpu_ms > 0


def test_hot_words_are_left_out_where_no_word_is_rare(arpa, tmp_path, call):
    said = (ROOT / "demo" / "clips" / "manifest.jsonl").read_text().splitlines()
    words = {word for line in said for word in json.loads(line)["text"].split()}
    common = "".join(f"-3.0\t{word}\t0\n" for word in sorted(words - {"letter", "skipper", "cat"}))
    text = arpa.read_text().replace("-6.0\tskipper", f"{common}-3.0\tskipper")
    arpa.write_text(text.replace("ngram 1=6", f"ngram 1={6 + common.count(chr(10))}"))
    arguments = [ROOT / "demo" / "quartznet_demo.pt", ROOT / "demo" / "clips" / "manifest.jsonl", "--lm", arpa]
    status, out, err = call(main, "decoding", *arguments, "--out", tmp_path / "raw.json")
    assert status == 0, err
    assert "no word of the manifest is rare" in out
    assert "F1" not in out
    measured = Measurement.read(tmp_path / "raw.json")
    assert (measured.rare_words, measured.hotwords) == ([], [])


def test_packed_ngrams_are_read_for_pyctcdecode_too(arpa, tmp_path, call):
    pytest.importorskip("pyctcdecode")
    packed = arpa.with_name("lm.arpa.gz")
    packed.write_bytes(gzip.compress(arpa.read_bytes()))
    heard = []
    for place in (arpa, packed):
        arguments = [ROOT / "demo" / "quartznet_demo.pt", ROOT / "demo" / "clips" / "manifest.jsonl", "--lm", place]
        status, _, err = call(main, "decoding", *arguments, "--boosts", 6, "--out", tmp_path / "raw.json")
        assert status == 0, err
        heard += [row for row in Measurement.read(tmp_path / "raw.json").decoders if row.decoder == "pyctcdecode"]
    assert heard[0].wer == heard[1].wer


def test_a_server_that_is_not_there_is_named_before_anything_is_measured(arpa, call):
    arguments = [ROOT / "demo" / "quartznet_demo.pt", ROOT / "demo" / "clips" / "manifest.jsonl", "--lm", arpa]
    status, _, err = call(main, "decoding", *arguments, "--url", "localhost:9", "--out", "raw.json")
    assert status == 1
    assert "localhost:9 has no 'quartznet_demo' ready" in err


def test_statistics_of_no_model_are_an_error_in_words(server):
    with (
        grpc.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(LoadError, match="must tell what jasper has done, but says"),
    ):
        read_statistics(client, "jasper")


def test_a_server_that_counts_no_request_is_an_error_in_words(server, monkeypatch):
    monkeypatch.setattr(decoders, "ask", lambda *_: None)
    monkeypatch.setattr(stages, "REQUEST_TIMEOUT_S", 0.1)
    with pytest.raises(LoadError, match=r"quartznet_demo_ctc must count .* but has not in 0\.1 s"):
        measure_stage(server.grpc_url, "quartznet_demo", [np.zeros((4, 29), np.float32)])


def test_clips_shorter_than_a_stretch_begin_again():
    clip = np.arange(100, dtype=np.float32)[:, np.newaxis]
    batch = make_batch([clip, clip], 0.02)
    assert [part.shape for part in batch] == [(835, 1)] * 32
    assert batch[0][:201, 0].tolist() == [*range(100), *range(100), 0]


def test_the_decoding_stage_of_a_server_is_timed_by_its_own_statistics(server):
    clip = np.full((900, 29), np.log(1 / 29), np.float32)
    batch = make_batch([clip, clip], 0.02)
    assert [part.shape for part in batch] == [(835, 29)] * 32
    measured = measure_stage(server.grpc_url, "quartznet_demo", batch)
    assert measured.clips == 32
    assert 0 < measured.compute_infer_ms < measured.stage_ms
    assert measured.stage_least_ms <= measured.stage_ms


@pytest.mark.parametrize(
    "words",
    [
        "decoding MODEL CLIPS.json --lm LM.json --lm-weights WEIGHTS.json --out OUT",
        "held-out MODEL CLIPS.json --lm LM.json --neural-lm NEURAL.json --out OUT",
        "words MODEL CLIPS.json --lm LM.json --lm-weights WEIGHTS.json --out OUT",
        "words MODEL CLIPS.json --lm LM.json --lm-weights WEIGHTS.json --calibration OUT",
        "int8 MODEL --int8-clips OTHERS.json --manifest CLIPS.json --out OUT",
        "accuracy CLIPS.json --out OUT",
    ],
)
def test_nothing_is_written_over_what_is_measured(words, tmp_path, call):
    places = [word for word in words.split() if word.endswith(".json")]
    for place in ("MODEL", *places):
        (tmp_path / place).write_text(place)
    for place in places:
        named = {word: tmp_path / word for word in ("MODEL", *places)} | {"OUT": tmp_path / "." / place}
        status, _, err = call(main, *(named.get(word, word) for word in words.split()))
        assert (status, "must be another file than" in " ".join(err.split())) == (2, True), (place, err)
        assert (tmp_path / place).read_text() == place
