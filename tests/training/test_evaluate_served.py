"""Evaluation through a running server, by itself and beside the checkpoint that it serves."""

import functools
import io
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import carnelian_client
import numpy as np
import pytest
import soundfile
from carnelian_training import checkpoint
from carnelian_training.data.manifest import Clip, read_manifest, write_manifest
from carnelian_training.evaluation import served
from carnelian_training.evaluation.evaluate import evaluate
from carnelian_training.evaluation.served import evaluate_served
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
CLIPS = ROOT / "demo" / "clips" / "manifest.jsonl"
DEPLOYED = ROOT / "model_repository" / "quartznet_demo_ctc" / "1"
DEMO = ROOT / "demo" / "quartznet_demo.pt"


def test_a_terminal_shows_how_many_clips_have_been_heard(server, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    # Otherwise nothing is drawn within 0.1 s of the last time.
    monkeypatch.setattr("carnelian_training.progress.tqdm", functools.partial(tqdm, mininterval=0, miniters=1))
    config, model = checkpoint.load_model(DEMO)
    for run in (
        lambda: evaluate(model, config, CLIPS),
        lambda: evaluate_served(server.grpc_url, "quartznet_demo", CLIPS),
    ):
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        run()
        assert "0/6 [" in terminal.getvalue()
        assert "6/6 [" in terminal.getvalue()


def test_a_server_and_its_checkpoint_agree_utterance_by_utterance(server, tmp_path, run_evaluate):
    arguments = ("--mistakes", 3, "--out")
    offline = run_evaluate(DEMO, CLIPS, *arguments, tmp_path / "offline.jsonl")
    served = run_evaluate("--url", server.grpc_url, CLIPS, *arguments, tmp_path / "served.jsonl")
    assert served == offline
    assert offline[0] == 0
    assert "substitutions" in offline[1]
    assert (tmp_path / "served.jsonl").read_text() == (tmp_path / "offline.jsonl").read_text()


def test_opus_of_telephone_calls_is_heard_as_by_the_checkpoint(server, tmp_path, write_rows, run_evaluate, read_rows):
    lines = []
    for name in ("letter.wav", "harbour.flac"):
        samples, rate = soundfile.read(CLIPS.parent / name)
        path = tmp_path / f"{name}.opus"
        soundfile.write(path, samples[::2], rate // 2, format="OGG", subtype="OPUS")
        lines.append({"audio_filepath": path.name, "duration": len(samples) / rate, "text": "a"})
    manifest = write_rows(tmp_path / "manifest.jsonl", lines)
    run_evaluate(DEMO, manifest, "--out", tmp_path / "offline.jsonl")
    run_evaluate("--url", server.grpc_url, manifest, "--out", tmp_path / "served.jsonl")
    assert read_rows(tmp_path / "served.jsonl") == read_rows(tmp_path / "offline.jsonl")


def test_the_table_has_a_row_for_each_test_set_and_decoder_offline_and_served(
    server, tmp_path, run_evaluate, read_rows
):
    clips = [replace(clip, extra={"source": clip.audio_filepath.suffix}) for clip in read_manifest(CLIPS)]
    write_manifest(tmp_path / "clips.jsonl", [c for c in clips if c.extra["source"] in (".flac", ".opus")])
    models = ["--lm", DEPLOYED / "english.klm", "--neural-lm", DEPLOYED / "english.onnx"]
    models += ["--lm-weights", DEMO.parent / "lm_weights.json"]
    arguments = [*models, "--url", server.grpc_url, "--out", tmp_path / "rows.jsonl"]
    status, printed, _ = run_evaluate("--table", DEMO, tmp_path / "clips.jsonl", *arguments)
    assert status == 0
    rows = read_rows(tmp_path / "rows.jsonl")
    everything = str(tmp_path / "clips.jsonl")
    assert [(row["test_set"], row["decoder"], row["same"]) for row in rows] == [
        (test_set, decoder, clips)
        for test_set, clips in ((".flac", 2), (".opus", 1), (everything, 3))
        for decoder in ("greedy", "n-gram", "transformer_xl")
    ]
    for row in rows:
        assert row["offline"]["wer"] == row["served"]["wer"]
        assert row["offline"]["decode_s"] > 0 < row["served"]["decode_s"]
    for flac, opus, both in zip(rows[:3], rows[3:6], rows[6:], strict=True):  # no clip is decoded once more for it
        for side in ("offline", "served"):
            assert both[side]["decode_s"] == pytest.approx(flac[side]["decode_s"] + opus[side]["decode_s"], abs=3e-6)
    assert printed.count("3 of 3") == 3
    assert run_evaluate("--table", CLIPS)[0] == run_evaluate("--table", DEMO, CLIPS, "--decoder", "beam")[0] == 2


def test_a_clip_that_the_server_refuses_is_named_and_counted(server, tmp_path, run_evaluate, write_rows, read_rows):
    shutil.copy(CLIPS.parent / "letter.wav", tmp_path)
    (tmp_path / "broken.wav").write_bytes(b"RIFF")
    lines = [{"audio_filepath": name, "duration": 3.6, "text": "two words"} for name in ("letter.wav", "broken.wav")]
    manifest, heard = write_rows(tmp_path / "manifest.jsonl", lines), tmp_path / "heard.jsonl"
    status, printed, err = run_evaluate("--url", server.grpc_url, manifest, "--out", heard)
    assert status == 1
    assert "2 clips       4 words" in printed
    rows = read_rows(heard)
    assert "error" not in rows[0]
    assert rows[1]["pred_text"] == ""
    assert rows[1]["error"]
    assert "broken.wav failed" in err


def test_what_a_server_says_of_a_clip_names_the_file_once(server, tmp_path):
    (tmp_path / "broken.wav").write_bytes(b"RIFF")
    (tmp_path / "folder.wav").mkdir()
    clips = [Clip(tmp_path / name, 1.0, "a") for name in ("broken.wav", "folder.wav", "gone.wav")]
    with served.connect(server.grpc_url, "quartznet_demo") as client:
        failures = served.transcribe_served(client, clips, {}).failures
    assert failures.keys() == {0, 1, 2}
    assert not any(str(tmp_path) in reason for reason in failures.values())


def test_missing_files_are_told_before_a_server_is_asked(tmp_path, write_rows, run_evaluate):
    manifest = write_rows(tmp_path / "m.jsonl", [{"audio_filepath": "gone.wav", "duration": 3.6, "text": "a"}])
    status, printed, err = run_evaluate("--url", "localhost:1", manifest)
    assert (status, printed) == (1, "")
    assert "m.jsonl must name clean clips, but 1 of 1 are bad (a relative path begins at the manifest's own" in err


def test_an_option_that_a_server_does_not_know_is_one_line_and_no_rate(server, run_evaluate):
    """Each clip was named with it, and the WER was 100 %."""
    status, printed, err = run_evaluate("--url", server.grpc_url, CLIPS, "--decoder", "beem")
    assert (status, printed) == (2, "")
    assert err == ("carnelian-train: wrong option: decoder must be one of greedy, beam, ngram, but is 'beem'\n")
    assert run_evaluate(DEMO, CLIPS, "--decoder", "beem")[0] == status


def test_a_table_names_the_clips_that_fail_once_and_warns_of_capitals(
    server, tmp_path, run_evaluate, write_rows, read_rows
):
    soundfile.write(tmp_path / "long.wav", np.zeros(61 * 16_000, np.int16), 16_000)
    lines = [
        {"audio_filepath": str(tmp_path / "long.wav"), "duration": 61.0, "text": "two words", "source": "long"},
        {"audio_filepath": str(CLIPS.parent / "letter.wav"), "duration": 3.6, "text": "Two words", "source": "letter"},
        {"audio_filepath": str(CLIPS.parent / "letter.wav"), "duration": 3.6, "text": "two"},
    ]
    write_rows(tmp_path / "m.jsonl", lines)
    out = tmp_path / "rows.jsonl"
    status, _, err = run_evaluate("--table", DEMO, tmp_path / "m.jsonl", "--url", server.grpc_url, "--out", out)
    assert status == 1
    assert [(row["failed"], row["clips"]) for row in read_rows(out)] == [(1, 1), (0, 1), (1, 3)]
    assert err.count("long.wav failed") == 1
    assert "1 of 3 references hold characters outside the labels" in err


def test_no_such_model_at_the_server(server):
    with pytest.raises(RuntimeError, match=r"no 'absent' ready; it serves quartznet_demo$"):
        evaluate_served(server.grpc_url, "absent", CLIPS)


def test_where_no_server_answers_the_sdk_says_why(server):
    with pytest.raises(RuntimeError, match=r"no 'quartznet_demo' ready: .*Connection refused; check `url`"):
        evaluate_served("localhost:1", "quartznet_demo", CLIPS)
    with pytest.raises(RuntimeError, match=r"no 'quartznet_demo' ready: .*`url` is not its gRPC port"):
        evaluate_served(server.http_url, "quartznet_demo", CLIPS)


def test_without_the_sdk_a_server_cannot_be_evaluated(monkeypatch):
    monkeypatch.setitem(sys.modules, "carnelian_client", None)
    with pytest.raises(RuntimeError, match="install carnelian-client"):
        evaluate_served("localhost:1", "quartznet_demo", CLIPS)


def test_a_table_beside_a_server_that_does_not_run_says_so_at_once(run_evaluate):
    models = ["--lm", DEPLOYED / "english.klm", "--lm-weights", DEMO.parent / "lm_weights.json"]
    status, _, err = run_evaluate("--table", DEMO, CLIPS, *models, "--url", "localhost:1")
    assert status == 1
    assert "the server must be running" in err


def test_a_table_of_a_model_without_a_decoding_stage_of_its_own_is_one_line(server, run_evaluate):
    status, _, err = run_evaluate("--table", DEMO, CLIPS, "--url", server.grpc_url, "--model", "quartznet_demo_pcm")
    assert status == 1
    assert "must count the time of quartznet_demo_pcm_ctc, but says: requested model" in err


def test_a_table_compares_a_checkpoint_with_the_served_model_of_its_name(server, tmp_path, run_evaluate):
    """It was compared with `quartznet_demo`, whatever it was."""
    config, content = checkpoint.load(DEMO)
    checkpoint.save(tmp_path / "a.pt", replace(config, name="mine"), content["weights"], results={})
    status, _, err = run_evaluate("--table", tmp_path / "a.pt", CLIPS, "--url", server.grpc_url)
    assert status == 1
    assert "has no 'mine' ready" in err


def test_a_server_that_is_shutting_down_is_an_error_in_one_line(monkeypatch):
    def shutting_down(self):
        raise carnelian_client.ModelNotReady("Server not ready")

    monkeypatch.setattr(carnelian_client.CarnelianClient, "is_ready", shutting_down)
    with pytest.raises(RuntimeError, match=r"^the server must be running .* has no 'tiny' ready: .*Server not ready$"):
        evaluate_served("localhost:1", "tiny", CLIPS)


def test_a_server_hears_segments_as_a_checkpoint_does(server, tmp_path, run_evaluate, write_rows, read_rows):
    clip = CLIPS.parent / "letter.wav"
    line = {"audio_filepath": str(clip), "text": "two words"}
    lines = [line | {"offset": 1.0, "duration": 1.5}, line | {"offset": 99.0, "duration": 1.5}]
    write_rows(tmp_path / "one.jsonl", lines[:1])
    write_rows(tmp_path / "both.jsonl", lines)
    assert run_evaluate(DEMO, tmp_path / "one.jsonl", "--out", tmp_path / "offline.jsonl")[0] == 0
    assert run_evaluate("--url", server.grpc_url, tmp_path / "both.jsonl", "--out", tmp_path / "served.jsonl")[0] == 1
    (offline,), (served, refused) = read_rows(tmp_path / "offline.jsonl"), read_rows(tmp_path / "served.jsonl")
    assert served["pred_text"] == offline["pred_text"]
    assert refused["pred_text"] == ""
    assert "error" in refused


def test_a_segment_that_cannot_be_read_is_not_sent_and_shifts_no_other(server, monkeypatch):
    """A sample of silence was sent in its place."""
    recording, name = CLIPS.parent / "letter.wav", "quartznet_demo"
    good, bad = (Clip(recording, 3.6, "two words", offset=offset) for offset in (0.0, 99.0))
    monkeypatch.setattr(served, "COUNTED_WITHIN_S", 1.0)
    with served.connect(server.grpc_url, name) as client, served.DecodingClock(server.grpc_url, name) as clock:
        evaluation = served.transcribe_served(client, [bad, good, bad, good], {})
        with pytest.raises(RuntimeError, match=f"must have counted 3 rows of {name}_ctc, but has 2"):
            clock.elapsed_s(3)
        (alone,) = served.transcribe_served(client, [good], {}).transcripts
    assert evaluation.transcripts == ["", alone, "", alone]
    assert [*evaluation.failures.items()] == [(i, "begins 99 s into a file that lasts 3.60 s") for i in (0, 2)]


def test_references_are_compared_with_what_is_heard_in_either_form(caplog):
    composed, decomposed = "sch\u00f6n", "scho\u0308n"
    for heard, words in (
        (
            composed,
            "1 of 3 references hold decomposed characters (NFD), which count as errors: transcripts are composed",
        ),
        (
            decomposed,
            "1 of 3 references hold composed characters (NFC), which count as errors: transcripts are decomposed",
        ),
    ):
        served.warn_of_accents(["an", composed, decomposed], [heard, "and"])
        (warning,) = caplog.messages
        assert warning.startswith(words)
        caplog.clear()
    for heard in ("", "\u00e2\u0301", "\u09df", f"{composed} {decomposed}"):  # of labels in both forms
        served.warn_of_accents([heard, composed, decomposed], [heard])
    assert not caplog.messages


def test_decomposed_references_are_warned_of_without_the_labels(server, tmp_path, run_evaluate, write_rows):
    line = {"audio_filepath": str(CLIPS.parent / "letter.wav"), "duration": 3.6}
    lines = [line | {"text": text} for text in ("scho\u0308n", "sch\u00f6n")]
    write_rows(tmp_path / "m.jsonl", lines)
    status, _, err = run_evaluate("--url", server.grpc_url, tmp_path / "m.jsonl")
    assert status == 0
    assert "1 of 2 references hold decomposed characters (NFD), which count as errors" in err
