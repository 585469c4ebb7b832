import json
import os
import re
import subprocess
import sys
import weakref

import pytest
from carnelian_client import _audio


def test_one_file_prints_its_text_alone(transcribe, endpoint, clip, wav):
    assert transcribe(clip, "--url", endpoint.url) == (0, f"{len(wav)} bytes\n", "")


def test_a_name_keeps_to_its_line_and_column(transcribe, endpoint, wav, tmp_path):
    clips = [tmp_path / "new\nline.wav", tmp_path / "a\ttab.wav", tmp_path / "\x1b[2J.wav"]
    for clip in clips:
        clip.write_bytes(wav)
    _, out, _ = transcribe(*clips, "--url", endpoint.url)
    names = [line.split("\t") for line in out.splitlines()]
    assert names == [
        [rf"{tmp_path}/{name}", f"{len(wav)} bytes"] for name in (r"new\nline.wav", r"a\ttab.wav", r"\x1b[2J.wav")
    ]


def test_nothing_that_the_server_says_commands_the_terminal_or_forges_a_line(
    transcribe, endpoint, triton, make_result, clip
):
    evil = "\x1b]0;OWNED\x07\x9b2J\x7fa\nb.wav\tforged\r\u202egpj\u2066\u2028\U000e0041"
    triton.script = [
        ("INTERNAL", f"in ensemble 'm', {evil}"),
        lambda request, context: {"error": evil},
        lambda request, context: make_result("a") | {"text": evil},
        lambda request, context: make_result("a") | {"new": evil, "file": "b.wav"},
    ]
    answers = [transcribe(clip, "--url", endpoint.url) for _ in range(3)]
    assert [(status, out, err.count("\n")) for status, out, err in answers] == [(1, "", 1)] * 3
    _, out, _ = transcribe(clip, "--json", "--url", endpoint.url)
    for line in [*(err for _, _, err in answers), out]:
        assert line.removesuffix("\n").isprintable()
    assert r"\x1b]0;OWNED\x07\x9b2J\x7fa\nb.wav\tforged" in answers[0][2]
    assert (json.loads(out)["new"], json.loads(out)["file"]) == (evil, str(clip))


@pytest.mark.parametrize("kind", ["text", "srt", "vtt", "ctm"])
def test_no_word_turns_lines_around_or_hides(transcribe, endpoint, triton, make_result, clip, tmp_path, kind):
    triton.answer = lambda request, context: make_result("a\u202egpj\u2066 b\U000e0041")
    transcribe(clip, "--format", kind, "--url", endpoint.url, "--out", tmp_path)
    (written,) = tmp_path.glob(f"{clip.stem}.{'txt' if kind == 'text' else kind}")
    _, out, _ = transcribe(clip, "--format", kind, "--url", endpoint.url)
    assert out == written.read_text()
    assert r"a\u202egpj\u2066" in out
    assert r"b\U000e0041" in out
    assert out.replace("\n", "").isprintable()


def test_joiners_and_marks_that_scripts_need_are_printed(transcribe, endpoint, triton, make_result, clip):
    text = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645\u200f \u0915\u094d\u200d\u0937\u200e"
    triton.answer = lambda request, context: make_result(text)
    assert transcribe(clip, "--url", endpoint.url) == (0, f"{text}\n", "")


def test_several_files_print_their_names_and_a_bad_one_goes_to_stderr(transcribe, endpoint, clip, wav, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("hello world")
    status, out, err = transcribe(clip, text, tmp_path / "missing.wav", clip, "--url", endpoint.url)
    assert status == 1
    assert out == f"{clip}\t{len(wav)} bytes\n" * 2
    first, second = err.splitlines()
    assert first.startswith(f"carnelian-transcribe: {text}: libsndfile cannot decode it")
    assert "ffmpeg" in first
    assert second == f"carnelian-transcribe: {tmp_path / 'missing.wav'}: No such file or directory"


@pytest.mark.parametrize("words", [[], ["--long"]])
def test_a_file_that_memory_does_not_hold_fails_alone(transcribe, endpoint, clip, monkeypatch, words):
    large = clip.with_name("large.wav")
    large.write_bytes(bytes(1000))
    held = []

    def read_all(file, deadline=None):
        assert not [reference for reference in held if reference()]
        if file.name == str(large):
            read = {1}
            held.append(weakref.ref(read))
            raise MemoryError
        return file.read()

    monkeypatch.setattr(_audio, "read_all", read_all)
    status, out, err = transcribe(*words, large, clip, "--concurrency", "1", "--url", endpoint.url)
    assert status == 1
    assert out.startswith(f"{clip}\t")
    assert re.fullmatch(rf"carnelian-transcribe: {large}: memory must hold .* but it ran out; allow more, .*\n", err)


def test_json_is_one_object_a_line(transcribe, endpoint, clip, wav):
    status, out, _ = transcribe("--json", "--url", endpoint.url, clip, clip)
    first, second = map(json.loads, out.splitlines())
    assert status == 0
    assert first["file"] == str(clip)
    assert first["text"] == f"{len(wav)} bytes"
    assert first["words"][1] == {"word": "bytes", "start": 1.0, "end": 1.5, "confidence": 0.9}
    assert first["request_id"] != second["request_id"]


@pytest.mark.skipif(sys.platform != "linux", reason="names are text elsewhere")
def test_a_name_that_cannot_be_spelled_costs_no_file_its_transcript(transcribe, endpoint, clip, wav):
    odd = clip.with_name(os.fsdecode(b"od\xffd.wav"))
    odd.write_bytes(wav)
    status, out, err = transcribe(odd, clip, "--url", endpoint.url)
    assert (status, err) == (0, "")
    assert out.splitlines()[0].endswith(f"od\\udcffd.wav\t{len(wav)} bytes")
    folder = clip.parent / "out"
    assert transcribe(odd, "--url", endpoint.url, "--format", "ctm", "--out", folder) == (0, "", "")
    assert (folder / os.fsdecode(b"od\xffd.ctm")).read_bytes().startswith(b"od\xffd 1 0.00")


@pytest.mark.parametrize("option", ["--ca", "--cert", "--key"])
def test_a_certificate_that_is_not_there_is_named_with_its_option(transcribe, clip, option):
    status, _, err = transcribe(clip, option, "missing.pem")
    assert status == 2
    assert f"'{option}'" in err
    assert "missing.pem" in err


def test_an_empty_path_is_no_folder(transcribe, clip, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    status, _, err = transcribe(clip, "--out", "")
    assert (status, "must be a folder" in err) == (2, True)


def test_an_option_comes_once(transcribe, clip):
    status, _, err = transcribe(clip, "--option", "beam_width=5", "--option", "beam_width=7")
    assert (status, "'5' and '7'" in err) == (2, True)


def test_attempts_are_as_many_as_asked_for(transcribe, endpoint, triton, clip):
    triton.script = [("UNAVAILABLE", "Exceeds maximum queue size")] * 5
    status, _, err = transcribe(clip, "--url", endpoint.url, "--attempts", "2")
    assert (status, len(triton.requests)) == (1, 2)
    assert "send fewer clips at a time" in err


def test_options_reach_the_server(transcribe, endpoint, triton, clip, monkeypatch):
    words = ("--model", "jasper", "--timeout", "1000", "--url", endpoint.url)
    monkeypatch.setenv("CARNELIAN_API_KEY", "secret")
    assert transcribe(clip, *words)[0] == 0
    assert triton.requests[0].model_name == "jasper"
    assert triton.requests[0].parameters["timeout"].int64_param == pytest.approx(1e9, rel=0.05)
    assert triton.metadata[0]["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("key", "host", "is_told"),
    [("secret", "0.0.0.0", True), ("secret", "localhost", False), ("", "0.0.0.0", False)],  # which leads here as well
)
def test_a_key_that_others_can_read_is_told(transcribe, endpoint, clip, monkeypatch, key, host, is_told):
    monkeypatch.setenv("CARNELIAN_API_KEY", key)
    status, _, err = transcribe(clip, "--url", f"{host}:{endpoint.url.rpartition(':')[2]}")
    told = "carnelian-transcribe: CARNELIAN_API_KEY is sent unencrypted; use --tls if others share the network\n"
    assert (status, err) == (0, told if is_told else "")


def test_a_key_over_tls_is_not_told(transcribe, clip, monkeypatch):
    monkeypatch.setenv("CARNELIAN_API_KEY", "secret")
    status, _, err = transcribe(clip, "--url", "0.0.0.0:1", "--tls", "--attempts", "1")
    assert (status, len(err.splitlines())) == (1, 1)


def test_an_empty_api_key_is_none(transcribe, endpoint, triton, clip, monkeypatch):
    monkeypatch.setenv("CARNELIAN_API_KEY", "")
    assert transcribe(clip, "--url", endpoint.url)[0] == 0
    assert "authorization" not in triton.metadata[0]


def test_a_server_that_is_not_there_is_one_line_of_advice(transcribe, clip):
    status, out, err = transcribe(clip, "--url", "127.0.0.1:1", "--attempts", "1")
    assert (status, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "check `url`" in err


def test_a_refused_certificate_is_one_line_too(transcribe, endpoint, clip):
    status, out, err = transcribe(clip, "--tls", "--url", endpoint.url, "--attempts", "1")
    assert (status, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "check `tls`" in err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["a.wav", "--url", "http://localhost:8000"],
        ["a.wav", "--concurrency", "0"],
        ["a.wav", "--pause", "1"],
        ["a.wav", "--interim", "1", "--long"],
        ["a.wav", "--timeout", "-1"],
        ["a.wav", "--timeout", "inf"],
        ["a.wav", "--attempts", "0"],
        ["a/clip.wav", "b/clip.flac", "--format", "ctm"],
        ["a b.wav", "a_b.wav", "--format", "ctm"],
        ["a.wav", "--json", "--format", "srt"],
        ["a.wav", "--cert", "cert.pem"],
        ["a.wav", "--ca", "missing.pem"],
        ["a.wav", "--loud"],
    ],
)
def test_wrong_use_exits_with_2(transcribe, words):
    status, out, err = transcribe(*words)
    assert (status, out) == (2, "")
    assert err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--url", "http://a:1"], "--url must be the host:port of .* turn encryption on with --tls"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--stream", "--pause", "9"], "--pause must be 0.1 to 5 s, but is 9"),
        (["--stream", "--interim", "-1"], "--interim must be above 0"),
        (["--long", "--longest-piece", "2"], "the longest piece .--longest-piece. must have 5 to 60 s, but has 2"),
        (["--ca", "empty.pem"], "--ca must be a PEM file of certificates, but empty.pem is none"),
        (["--cert", "empty.pem"], "only --cert is given; add --key"),
        (["--key", "empty.pem"], "only --key is given; add --cert"),
        (["--cert", "empty.pem", "--key", "empty.pem"], "--cert and --key must be PEM files that belong together"),
    ],
)
def test_wrong_values_are_told_by_the_names_of_the_options(transcribe, tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.pem").touch()
    status, _, err = transcribe("a.wav", *words)
    assert (status, bool(re.search(told, err)), "`" in err.replace("`--interim 0`", "")) == (2, True, False), err


def test_an_api_key_that_cannot_be_sent_is_told_by_the_name_of_its_variable(transcribe, monkeypatch):
    monkeypatch.setenv("CARNELIAN_API_KEY", "two\nlines")
    status, _, err = transcribe("a.wav")
    assert (status, "Invalid value: CARNELIAN_API_KEY, " in err) == (2, True), err


def test_without_typer_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from carnelian_client.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'carnelian-client[cli,audio]'" in done.stderr


def test_subtitles_and_ctm_are_printed_as_their_formats_have_them(transcribe, endpoint, clip, triton, answers):
    triton.answer = answers("a b")
    printed = {kind: transcribe(clip, "--url", endpoint.url, "--format", kind)[1] for kind in ("srt", "vtt", "ctm")}
    assert printed["srt"] == "1\n00:00:00,000 --> 00:00:01,500\na b\n\n"
    assert printed["vtt"] == "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\na b\n\n"
    assert printed["ctm"] == "clip 1 0.00 0.50 a 0.90\nclip 1 1.00 0.50 b 0.90\n"


def test_subtitles_of_several_files_are_wrong_use(transcribe, endpoint, clip):
    status, out, err = transcribe(clip, clip, "--url", endpoint.url, "--format", "srt")
    assert (status, out) == (2, "")
    assert "must have one file" in err


def test_options_of_the_decoder_reach_the_server_and_need_a_value(transcribe, endpoint, clip, triton):
    transcribe(clip, "--url", endpoint.url, "--option", "decoder=beam", "--option", "beam_width=20")
    parameters = triton.requests[0].parameters
    assert (parameters["decoder"].string_param, parameters["beam_width"].string_param) == ("beam", "20")
    status, _, err = transcribe(clip, "--url", endpoint.url, "--option", "beam")
    assert status == 2
    assert "name=value" in err


@pytest.mark.parametrize(
    "name", ["timeout_s", "concurrency", "model", "clips", "audio", "request_id", "return_exceptions"]
)
def test_options_are_of_the_decoder_alone(transcribe, endpoint, clip, name):
    status, out, err = transcribe(clip, "--url", endpoint.url, "--option", f"{name}=1")
    assert (status, out) == (2, "")
    assert f"--option must be one of the decoder, but {name} is not" in " ".join(err.split())
