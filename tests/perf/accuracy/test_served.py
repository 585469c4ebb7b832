import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import grpc
import pytest
import soundfile
from carnelian_client import CarnelianClient, Transcript
from carnelian_perf.accuracy.served import Accuracy, measure
from carnelian_perf.cli import main
from carnelian_perf.manifest import Utterance

CLIPS = Path(__file__).parents[3] / "demo" / "clips"
MODEL = "quartznet_demo"


def utterance(text: str, source: str | None = None) -> Utterance:
    return Utterance(Path("clip.wav"), 999.0, text, source)


def transcript(text: str) -> Transcript:
    return Transcript(text, (), 1.0, 2.0, MODEL, "1", "7", "greedy", (), {})


@pytest.fixture
def accuracy() -> Accuracy:
    utterances = [utterance("one two", "a"), utterance("three four", "b"), utterance("five six", "b")]
    return Accuracy(utterances, [transcript("one two"), transcript("three for"), OSError("clip.wav is not there")], 2.0)


def test_rates_are_over_all_words_together(accuracy):
    rates = accuracy.error_rates()
    assert (rates.utterances, rates.words) == (3, 6)
    assert rates.wer == pytest.approx(3 / 6)


def test_rates_of_a_source(accuracy):
    assert accuracy.sources == ["a", "b"]
    assert accuracy.error_rates("a").wer == 0
    assert accuracy.error_rates("b").wer == pytest.approx(3 / 4)


def test_a_clip_that_failed_was_not_heard_and_is_not_counted_as_speed(accuracy):
    assert [str(error) for error in accuracy.failures] == ["clip.wav is not there"]
    assert accuracy.transcribed_s == 4.0


def test_a_clip_without_words_may_be_among_others():
    silence = Accuracy([utterance("one two"), utterance("")], [transcript("one two"), transcript("")], 1.0)
    assert silence.error_rates().wer == 0


def test_a_source_in_which_nothing_was_said_has_no_rate():
    silence = Accuracy([utterance("one two"), utterance("", "b")], [transcript("one"), transcript("a b c")], 1.0)
    rates = silence.error_rates("b")
    assert math.isnan(rates.wer)
    assert math.isnan(rates.cer)
    assert (rates.words, rates.insertions) == (0, 3)


def test_spaces_beside_spaces_are_no_errors():
    spaced = Accuracy([utterance("one  two ")], [transcript("one two")], 1.0).error_rates()
    assert (spaced.wer, spaced.cer) == (0, 0)


def test_what_is_written_is_a_manifest_with_transcripts(accuracy, tmp_path, read_rows):
    accuracy.write(tmp_path / "new" / "heard.jsonl")
    rows = read_rows(tmp_path / "new" / "heard.jsonl")
    said = {"text": "one two", "pred_text": "one two"}
    assert rows[0] == {"audio_filepath": "clip.wav", "duration": 999.0, **said, "source": "a"}
    assert [row["pred_text"] for row in rows] == ["one two", "three for", ""]
    assert rows[2]["error"] == "clip.wav is not there"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json\n", "line 1"),
        ("", "at least one word"),
        ('{"audio_filepath": "a.wav", "duration": 1, "text": " "}\n', "at least one word"),
    ],
)
def test_what_is_no_manifest_is_named(tmp_path, content, words):
    path = tmp_path / "manifest.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"(?s){words}"):
        measure(path, "localhost:1", MODEL)


def test_rates_and_speed_are_printed_and_clips_that_fail_are_named(server, tmp_path, call, write_rows, read_rows):
    rows = read_rows(CLIPS / "manifest.jsonl")
    texts = {str(CLIPS / row["audio_filepath"]): row["text"] for row in rows}
    good = [{"audio_filepath": path, "duration": 4.0, "text": text, "source": ""} for path, text in texts.items()]
    silent = {"audio_filepath": next(iter(texts)), "duration": 4.0, "text": "", "source": "silent"}
    (tmp_path / "text.wav").write_text("RIFF, it claims, but this is text")
    bad = [{"audio_filepath": name, "duration": 9.0, "text": "a b c"} for name in ("text.wav", "missing.wav")]
    manifest = write_rows(tmp_path / "manifest.jsonl", [bad[0], *good, silent, bad[1]])

    options = ["--url", server.grpc_url, "--model", MODEL, "--out", tmp_path / "heard.jsonl"]
    before = manifest.read_text()
    assert call(main, "accuracy", manifest, *options[:-1], manifest)[0] == 2
    assert manifest.read_text() == before
    status, out, err = call(main, "accuracy", manifest, *options)
    assert status == 1, err
    demo, nothing_said, overall, speed, wrote = out.splitlines()
    assert demo.split()[:5] == ["''", "6", "clips", "80", "words"]
    assert nothing_said.split()[:8] == ["silent", "1", "clips", "0", "words", "WER", "-", "CER"]
    assert nothing_said.endswith(" words inserted")
    assert overall.split()[:5] == ["all", "9", "clips", "86", "words"]
    assert "WER" in demo
    assert "CER" in overall
    lengths_s = [soundfile.info(path).duration for path in [*texts, silent["audio_filepath"]]]
    assert float(speed.split(" s of audio in ")[0]) == pytest.approx(sum(lengths_s), abs=0.1 * len(lengths_s))
    assert "audio seconds per second, 8 requests at a time" in speed
    assert wrote == f"wrote {tmp_path / 'heard.jsonl'}"
    first, second = err.splitlines()
    assert str(tmp_path / "text.wav") in first
    assert str(tmp_path / "missing.wav") in second

    heard = read_rows(tmp_path / "heard.jsonl")
    assert [row["text"] for row in heard] == ["a b c", *texts.values(), "", "a b c"]
    with CarnelianClient(server.grpc_url, model=MODEL) as client:
        assert [row["pred_text"] for row in heard[1:-2]] == [client.transcribe(path).text for path in texts]


def test_sources_of_any_script_stay_in_line_and_end_no_command(server, tmp_path, write_rows):
    sources = {"Rundfunk": b"Rundfunk", "日本放送": rb"\u65e5\u672c\u653e\u9001", "Zu\u0308rich": rb"Zu\u0308rich"}
    clip = {"audio_filepath": str(CLIPS / "letter.wav"), "duration": 3.6, "text": "a letter"}
    manifest = write_rows(tmp_path / "m.jsonl", [{**clip, "source": source} for source in sources])
    command = [sys.executable, "-c", "from carnelian_perf.cli import main; main()", "accuracy", manifest]
    for encoding in ("utf-8", "latin-1", "ascii:surrogateescape"):
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        said = subprocess.run([*command, "--url", server.grpc_url], env=environment, capture_output=True, check=True)
        *lines, _, _ = said.stdout.splitlines()
        if encoding == "utf-8":
            assert [line.decode().index("1 clips") for line in lines] == [38, 38 - 4, 38 + 1]
        else:
            assert [line.split()[0] for line in lines] == list(sources.values())


def test_all_clips_transcribed_is_status_0(server, call):
    status, _, err = call(main, "accuracy", CLIPS / "manifest.jsonl", "--url", server.grpc_url)
    assert (status, err) == (0, "")


def test_no_server_is_status_1_and_says_where(call):
    status, _, err = call(main, "accuracy", CLIPS / "manifest.jsonl", "--url", "localhost:1")
    assert status == 1
    assert "localhost:1 has no 'quartznet_demo' ready, or is not the address of its gRPC endpoint" in err
    assert "without TLS and without an API key" in err


def test_a_wrong_model_is_told_from_a_dead_server(server, call):
    status, _, err = call(main, "accuracy", CLIPS / "manifest.jsonl", "--url", server.grpc_url, "--model", "jasper")
    assert (status, "must be running" in err) == (1, False)
    assert f"'jasper' is not; {server.grpc_url} has " in err
    assert MODEL in err


def test_gateway_that_wants_a_key_is_named_without_an_option_that_there_is_not(call):
    def refuse(_, context):
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "no key")

    handler = MagicMock(spec=grpc.GenericRpcHandler)
    handler.service.return_value = grpc.unary_unary_rpc_method_handler(refuse)
    gateway = grpc.server(ThreadPoolExecutor(1), handlers=[handler])
    url = f"127.0.0.1:{gateway.add_insecure_port('127.0.0.1:0')}"
    gateway.start()
    try:
        status, _, err = call(main, "accuracy", CLIPS / "manifest.jsonl", "--url", url)
    finally:
        gateway.stop(None)
    assert status == 1
    assert err.endswith("; it refuses the call, as a gateway does that wants a key\n")
    assert "api_key" not in err
