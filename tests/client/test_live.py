"""The SDK against a real server and the demo model: what the answers scripted elsewhere stand for."""

import asyncio
import io
import json
import logging
import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jiwer
import numpy as np
import pytest
import soundfile
from carnelian_client import (
    AsyncCarnelianClient,
    CarnelianClient,
    InvalidAudio,
    ModelNotFound,
    RetryPolicy,
    ServerError,
    Transcript,
)
from carnelian_client._settings import DEFAULT_MODEL as MODEL

DEMO_CLIPS = Path(__file__).parents[2] / "demo" / "clips"
RATE = 16_000
FRAME_S = 0.05
"""The server counts in whole frames, of which the last may pass the end; the demo model's are 0.04 s."""


@pytest.fixture(scope="module")
def client(server):
    with CarnelianClient(server.grpc_url, model=MODEL, timeout_s=60) as client:
        yield client


@pytest.fixture(scope="module")
def clip():
    """[samples] int16, two seconds of tones that come and go."""
    time_s = np.arange(2 * RATE) / RATE
    tones = sum(np.sin(2 * np.pi * f * time_s) for f in (220, 660, 1900)) * np.sin(2 * np.pi * 3 * time_s) ** 2
    return (5000 * tones).astype(np.int16)


def file_of(samples, fmt="WAV", subtype="PCM_16", rate=RATE):
    sink = io.BytesIO()
    soundfile.write(sink, samples, rate, format=fmt, subtype=subtype)
    return sink.getvalue()


@pytest.fixture(scope="module")
def reference(client, clip):
    return client.transcribe(file_of(clip), request_id="reference")


def test_a_transcript_is_complete(reference):
    assert reference.duration_s == pytest.approx(2.0, abs=FRAME_S)
    assert reference.model == MODEL
    assert reference.request_id == "reference"
    assert reference.text == " ".join(word.word for word in reference.words)
    assert 0 <= reference.confidence <= 1
    assert reference.raw["decoder"] == "greedy"
    for word in reference.words:
        assert 0 <= word.start_s < word.end_s <= reference.duration_s
        assert 0 <= word.confidence <= 1


def test_one_clip_in_every_form_has_one_transcript(client, clip, reference, tmp_path):
    path = tmp_path / "clip.flac"
    path.write_bytes(file_of(clip, "FLAC"))
    forms = [path, str(path), path.read_bytes(), file_of(clip, "AIFF"), (clip, RATE), (clip / 2**15, RATE)]
    forms += [(np.stack([clip, clip], axis=1), RATE), (clip.astype(np.int32) << 16, RATE)]
    for form in forms:
        transcript = client.transcribe(form)
        assert (transcript.text, transcript.words) == (reference.text, reference.words)


def test_other_rates_and_codecs_are_the_servers_work(client, clip):
    for audio in ((clip, 8000), (clip, 44100), file_of(clip, "OGG", "VORBIS"), file_of(clip, "MP3", None)):
        assert isinstance(client.transcribe(audio), Transcript)
    assert client.transcribe((clip, 8000)).duration_s == pytest.approx(4.0, abs=FRAME_S)


def test_mp3_in_a_wav_file_is_heard_as_the_mp3_file(client, clip):
    """The server reads all other codecs of WAV that libsndfile does."""
    mp3 = file_of(clip, "MP3", None)
    header = struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", 2**32 - 1, b"WAVE", b"fmt ", 16, 0x55, 1, RATE, 0, 1, 0, b"data", len(mp3)
    )
    for transcribe in (client.transcribe, client.transcribe_long):
        heard, expected = transcribe(header + mp3), transcribe(mp3)
        assert (heard.text, heard.words) == (expected.text, expected.words)
    for subtype in ("ULAW", "ALAW", "IMA_ADPCM", "MS_ADPCM", "GSM610", "G721_32", "NMS_ADPCM_32", "DOUBLE"):
        assert client.transcribe(file_of(clip, "WAV", subtype)).duration_s == pytest.approx(2, abs=2 * FRAME_S)


def bad_clips(clip):
    flac = file_of(clip, "FLAC")
    tone = (clip / 2**15).astype(np.float32)
    tone[500] = np.nan
    return {
        "no samples": file_of(clip[:0]),
        "finite": file_of(tone, subtype="FLOAT"),
        "60": file_of(np.zeros(61 * RATE, np.int16), "FLAC"),
        "damaged or cut short": flac[: len(flac) // 2],
        "convert the file": b"OggS, it claims, but this is text " * 50,
    }


@pytest.mark.parametrize("words", ["no samples", "finite", "60", "damaged or cut short", "convert the file"])
def test_a_bad_clip_is_invalid_audio_and_says_why(client, clip, words):
    with pytest.raises(InvalidAudio, match=words) as caught:
        client.transcribe(bad_clips(clip)[words], request_id="7")
    assert "C++ context" not in str(caught.value)
    assert caught.value.request_id == "7"
    assert not caught.value.retryable


def test_many_keep_their_order_around_bad_clips(client, clip, reference):
    bad = list(bad_clips(clip).values())
    clips = [file_of(clip), bad[0], file_of(clip[:RATE]), bad[1], bad[2], bad[3], bad[4], file_of(clip)]
    outcomes = list(client.transcribe_many(clips, concurrency=8))
    assert [type(o) for o in outcomes] == [
        *(Transcript, InvalidAudio, Transcript),
        *(InvalidAudio, InvalidAudio, InvalidAudio, InvalidAudio, Transcript),
    ]
    assert outcomes[0].text == outcomes[7].text == reference.text
    assert [outcomes[i].duration_s for i in (0, 2, 7)] == pytest.approx([2.0, 1.0, 2.0], abs=FRAME_S)


def test_an_utterance_is_what_a_clip_of_its_samples_is(client, talk):
    heard = list(client.transcribe_stream((talk[i : i + 1600] for i in range(0, len(talk), 1600)), RATE))
    finals = [each for each in heard if each.is_final]
    assert len(finals) == 2 < len(heard)
    for each in heard:
        clip = client.transcribe((talk[round(each.start_s * RATE) : round(each.end_s * RATE)], RATE))
        assert each.transcript.text == clip.text
        assert [word.start_s for word in each.transcript.words] == pytest.approx(
            [each.start_s + word.start_s for word in clip.words], abs=0.001
        )
        assert len(clip.words) > 1 or not each.is_final


def test_asyncio_gives_the_same(server, clip, reference):
    async def main():
        async with AsyncCarnelianClient(server.grpc_url, model=MODEL) as client:
            one = await client.transcribe(file_of(clip))
            many = [o async for o in client.transcribe_many([file_of(clip), b"RIFF", file_of(clip)])]
            return one, many, await client.is_ready(), await client.health(), await client.models()

    one, many, is_ready, health, models = asyncio.run(main())
    assert one.text == many[0].text == many[2].text == reference.text
    assert isinstance(many[1], InvalidAudio)
    assert is_ready
    assert health.is_live
    assert MODEL in {model.name for model in models}


def test_a_long_recording_is_understood_as_its_clips_are(client, read_rows):
    clips = read_rows(DEMO_CLIPS / "manifest.jsonl")
    clips = [clip for clip in clips if soundfile.info(DEMO_CLIPS / clip["audio_filepath"]).samplerate == RATE] * 5
    paths = [DEMO_CLIPS / clip["audio_filepath"] for clip in clips]
    samples, spans_s = np.zeros(0, np.float32), []
    for path in paths:
        speech, _ = soundfile.read(path, dtype="float32")
        spans_s.append((len(samples) / RATE - FRAME_S, (len(samples) + len(speech)) / RATE + FRAME_S))
        samples = np.concatenate([samples, speech, np.zeros(RATE // 2, np.float32)])
    with pytest.raises(InvalidAudio, match=r"too long.*`transcribe_long`"):
        client.transcribe((samples, RATE))
    transcript = client.transcribe_long((samples, RATE))
    references = [clip["text"] for clip in clips]
    wer_of_clips = jiwer.wer(references, [outcome.text for outcome in client.transcribe_many(paths)])
    assert jiwer.wer(" ".join(references), transcript.text) < wer_of_clips + 0.05
    assert transcript.duration_s == pytest.approx(len(samples) / RATE, abs=FRAME_S)
    for word in transcript.words:
        middle_s = (word.start_s + word.end_s) / 2
        assert any(start_s < middle_s < end_s for start_s, end_s in spans_s)


def test_health_readiness_and_models(client):
    health = client.health()
    assert health.is_live
    assert health.is_ready
    assert health.server_version
    assert client.is_ready()
    assert not client.is_ready("missing")
    assert {MODEL, f"{MODEL}_pcm", "audio_decode"} <= {model.name for model in client.models() if model.is_ready}


def test_a_wrong_model_is_named(client, clip):
    with pytest.raises(ModelNotFound, match=r"'missing'.*models\(\)"):
        client.transcribe(file_of(clip), model="missing")
    for stage in (f"{MODEL}_pcm", "audio_decode"):
        with pytest.raises(ServerError, match=r"AUDIO|RESULT") as caught:
            client.transcribe(file_of(clip), model=stage)
        assert type(caught.value) is ServerError


def test_a_full_queue_is_waited_out(server, clip, reference, caplog, stubs_of, wait_until):
    """The entry stage refuses what its queue cannot hold, and the retries bring all of it through."""
    decoders = [stub for name, stub in stubs_of(server).items() if name.startswith("audio_decode")]
    patient = RetryPolicy(num_attempts=1000, longest_wait_s=0.5)
    with (
        caplog.at_level(logging.INFO, "carnelian_client"),
        CarnelianClient(server.grpc_url, model=MODEL, timeout_s=600, retry=patient) as client,
        ThreadPoolExecutor() as pool,
    ):
        for decoder in decoders:
            decoder.suspend()  # or a server that is faster than this process would have no queue
        try:
            outcomes = pool.submit(list, client.transcribe_many([file_of(clip)] * 150, concurrency=150))
            wait_until(lambda: "Exceeds maximum queue size" in caplog.text)
        finally:
            for decoder in decoders:
                decoder.resume()
        assert [outcome.text for outcome in outcomes.result()] == [reference.text] * 150


def test_the_command_reads_files_and_the_standard_input_and_names_a_bad_one(server, clip, reference, tmp_path):
    good, bad = tmp_path / "good.aiff", tmp_path / "bad.flac"
    good.write_bytes(file_of(clip, "AIFF"))
    bad.write_bytes(file_of(clip, "FLAC")[:300])
    words = [str(good), str(bad), "-", "--json", "--url", server.grpc_url, "--model", MODEL]
    done = subprocess.run(
        [sys.executable, "-m", "carnelian_client", *words],
        input=file_of(clip),
        capture_output=True,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 1
    first, second = map(json.loads, done.stdout.decode().splitlines())
    assert (first["file"], second["file"]) == (str(good), "-")
    assert first["text"] == second["text"] == reference.text
    assert done.stderr.decode().startswith(f"carnelian-transcribe: {bad}: ")
    assert len(done.stderr.splitlines()) == 1
