"""Recordings of any length: where they are cut, what is sent, and what the pieces' transcripts become."""

import asyncio
import io
import json
import signal
import threading
import warnings

import numpy as np
import pytest
import soundfile
from carnelian_client import AsyncCarnelianClient, InvalidAudio, InvalidOption, ServerError
from carnelian_client.__main__ import main
from carnelian_client._long import Recording, cut

RATE = 8000
PAUSES_S = (5, 20, 40)
"""The first one is too early for a cut."""
LENGTH_S = 70
LOST_S = 0.01
"""Servers count whole frames, and leave the rest of a piece out of its duration."""


@pytest.fixture(scope="module")
def talk():
    """[frames, 2] int16: noise with a second's silence at each of the pauses."""
    samples = np.random.default_rng(0).integers(-16384, 16384, (LENGTH_S * RATE, 2), np.int16)
    for pause_s in PAUSES_S:
        samples[pause_s * RATE : (pause_s + 1) * RATE] = 0
    return samples


@pytest.fixture(scope="module")
def flac(talk):
    return file_of(talk, "FLAC")


@pytest.fixture
def heard_s(triton, make_result):
    """The seconds of each piece that the server was sent; it understands "a b" in all of them."""
    heard = []

    def answer(request, context):
        samples, rate = soundfile.read(io.BytesIO(request.raw_input_contents[0]))
        heard.append(length_s := len(samples) / rate)
        return make_result("a b") | {"duration": length_s - LOST_S}

    triton.answer = answer
    return heard


def file_of(samples, kind="WAV", subtype=None, rate=RATE):
    sink = io.BytesIO()
    soundfile.write(sink, samples, rate, format=kind, subtype=subtype)
    return sink.getvalue()


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :]


def blocks_of(samples, size):
    return (samples[i : i + size] for i in range(0, len(samples), size))


@pytest.mark.parametrize("size", [1000, 65_536, 10**7])
@pytest.mark.parametrize("offset", [0, 8000])
def test_cuts_are_in_the_pauses_whatever_the_blocks(talk, size, offset):
    floats = (talk + np.int16(offset)) / np.float32(2**15)
    pieces = list(cut(blocks_of(floats, size), RATE, 30))
    np.testing.assert_array_equal(np.concatenate(pieces), floats)
    ends_s = np.cumsum([len(piece) for piece in pieces]) / RATE
    assert 20.1 < ends_s[0] < 20.9
    assert 40.1 < ends_s[1] < 40.9
    assert list(ends_s[2:]) == [LENGTH_S]


@pytest.mark.parametrize("start_s", [20.0, 20.1, 20.2, 20.25])
def test_a_pause_of_half_a_second_is_found_wherever_it_begins(start_s):
    samples = np.random.default_rng(2).uniform(-1, 1, (40 * RATE, 1)).astype(np.float32)
    first = round(start_s * RATE)
    samples[first : first + RATE // 2] /= 100
    piece, _ = cut(iter([samples]), RATE, 30)
    assert first < len(piece) < first + RATE // 2


def test_silence_is_cut_as_late_as_may_be():
    pieces = list(cut(iter([np.zeros((100 * RATE, 1), np.float32)]), RATE, 30))
    assert [len(piece) > 29 * RATE for piece in pieces] == [True, True, True, False]


@pytest.mark.parametrize("rate", [1, 7, 192_000])
@pytest.mark.parametrize("longest_s", [5, 5.5, 30, 60])
def test_pieces_have_half_of_the_longest_or_more_at_any_rate(rate, longest_s):
    noise = np.random.default_rng(1).normal(size=(100 * rate, 1)).astype(np.float32)
    pieces = list(cut(iter([noise]), rate, longest_s))
    np.testing.assert_array_equal(np.concatenate(pieces), noise)
    longest = int(longest_s * rate)
    assert all(longest // 2 <= len(piece) <= longest for piece in pieces[:-1])
    assert 0 < len(pieces[-1]) <= longest


def test_samples_that_are_not_finite_are_the_servers_to_refuse(talk):
    floats = talk / np.float32(2**15)
    floats[25 * RATE] = np.inf
    floats[26 * RATE] = 1e38
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum(map(len, cut(iter([floats]), RATE, 30))) == len(floats)


def test_what_is_no_longer_than_a_piece_is_one(talk):
    [piece] = cut(iter([talk[: 30 * RATE] / np.float32(2**15)]), RATE, 30)
    assert len(piece) == 30 * RATE


@pytest.mark.parametrize(
    ("kind", "subtype"), [("FLAC", None), ("WAV", "PCM_16"), ("AIFF", "PCM_16"), ("samples", None)]
)
def test_pieces_of_16_bits_are_the_samples_to_the_bit(talk, kind, subtype):
    audio = (talk, RATE) if kind == "samples" else file_of(talk, kind, subtype)
    pieces = list(Recording(audio, {}).pieces())
    assert all(piece.startswith(b"fLaC") for piece in pieces)
    sent = [soundfile.read(io.BytesIO(piece), dtype="int16")[0] for piece in pieces]
    np.testing.assert_array_equal(np.concatenate(sent), talk)


def test_pieces_of_mp3_are_what_libsndfile_reads(talk):
    mp3 = file_of(talk, "MP3", rate=16_000)
    sent = [soundfile.read(io.BytesIO(piece), dtype="float32")[0] for piece in Recording(mp3, {}).pieces()]
    whole, _ = soundfile.read(io.BytesIO(mp3), dtype="float32")
    np.testing.assert_allclose(np.concatenate(sent), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("behind", [b"TAG" + bytes(125), bytes(5000), b"junk" * 1000])
def test_what_is_behind_the_last_frame_of_flac_is_no_damage(flac, talk, behind):
    sent = [soundfile.read(io.BytesIO(piece), dtype="int16")[0] for piece in Recording(flac + behind, {}).pieces()]
    np.testing.assert_array_equal(np.concatenate(sent), talk)


def test_flac_that_is_cut_between_two_frames_is_an_error(flac):
    frame = flac.rindex(b"\xff\xf8")
    with pytest.raises(
        InvalidAudio, match=r"samples that it counts, but \d+ are missing: the file is damaged, cut short, "
    ):
        list(Recording(flac[:frame], {}).pieces())


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_a_damaged_page_of_ogg_is_an_error_and_a_missing_end_is_not(talk, subtype):
    ogg = file_of(talk, "OGG", subtype)
    with pytest.raises(InvalidAudio, match=r"samples that it counts, but \d+ are missing: the file is damaged"):
        list(Recording(flipped(ogg, len(ogg) // 4), {}).pieces())
    assert list(Recording(ogg[: len(ogg) // 2], {}).pieces())


def test_ogg_that_counts_a_little_too_much_is_no_damage(talk):
    """As ffmpeg makes it of the rounded times in WebM."""
    ogg = bytearray(file_of(talk, "OGG", "VORBIS"))
    last = ogg.rindex(b"OggS")
    ogg[last + 6 : last + 14] = (len(talk) + 700).to_bytes(8, "little")
    ogg[last + 22 : last + 26] = bytes(4)
    checksum = 0
    for byte in ogg[last:]:
        checksum ^= byte << 24
        for _ in range(8):
            checksum = (checksum << 1) ^ (0x104C11DB7 if checksum >> 31 else 0)
    ogg[last + 22 : last + 26] = checksum.to_bytes(4, "little")
    assert soundfile.info(io.BytesIO(ogg)).frames == len(talk) + 700
    sent = [soundfile.info(io.BytesIO(piece)).frames for piece in Recording(bytes(ogg), {}).pieces()]
    assert len(talk) <= sum(sent) < len(talk) + 700


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "MP3"])
def test_the_exception_of_a_signals_handler_ends_the_reading(talk, kind):
    def interrupt(*_):
        raise KeyboardInterrupt

    audio = file_of(talk, kind, rate=RATE * 2)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for delay_s in (0.01, 0.02, 0.03, 0.05):
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012  (once through may be over too soon)
                for _ in range(100):
                    list(Recording(audio, {}).pieces())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_times_count_from_the_beginning_of_the_recording(client, triton, flac, heard_s):
    transcript = client.transcribe_long(flac, concurrency=1, decoder="beam")
    assert transcript.text == "a b a b a b"
    starts_s = [0, heard_s[0], heard_s[0] + heard_s[1]]
    assert [word.start_s for word in transcript.words] == pytest.approx(
        [start_s + second for start_s in starts_s for second in (0, 1)], abs=0.001
    )
    assert [word.end_s - word.start_s for word in transcript.words] == pytest.approx([0.5] * 6)
    assert [word["start"] for word in transcript.raw["words"]] == [word.start_s for word in transcript.words]
    assert transcript.duration_s == LENGTH_S - LOST_S
    assert transcript.confidence == 0.9
    assert transcript.request_id == triton.requests[0].id
    assert {request.parameters["decoder"].string_param for request in triton.requests} == {"beam"}


def test_silence_between_words_adds_nothing_to_the_text(client, triton, flac, answers):
    triton.script = [answers("a"), answers("", confidence=0.1), answers("b")]
    transcript = client.transcribe_long(flac, concurrency=1)
    assert transcript.text == "a b"
    assert transcript.confidence == 0.9


@pytest.mark.parametrize("rescored", [False, True])
def test_one_piece_that_was_rescored_makes_the_transcript_so(client, triton, flac, answers, rescored):
    triton.script = [answers("a"), answers("b", rescored=rescored), answers("")]
    assert client.transcribe_long(flac, concurrency=1).rescored == rescored


def test_silence_alone_has_the_confidence_of_its_pieces(client, triton, flac, answers):
    triton.script = [answers("", confidence=confidence) for confidence in (0.1, 0.2, 0.6)]
    transcript = client.transcribe_long(flac, concurrency=1)
    assert (transcript.text, transcript.words, transcript.confidence) == ("", (), 0.3)


def test_an_error_of_a_piece_names_the_file_and_the_time(client, triton, flac, tmp_path):
    path = tmp_path / "talk.flac"
    path.write_bytes(flac)
    triton.script = [triton.answer, ("INTERNAL", "out of luck")]
    with pytest.raises(ServerError, match=r"talk\.flac, from 20\.\d to 40\.\d s \(\d+ bytes\): out of luck"):
        client.transcribe_long(path, concurrency=1)
    assert len(triton.requests) <= 3


@pytest.mark.parametrize(
    ("status", "words", "error"),
    [
        (
            "INVALID_ARGUMENT",
            "too long: a clip must be at most 10 s long, but this one has 20.50 s; send it in parts",
            InvalidAudio,
        ),
        ("RESOURCE_EXHAUSTED", "CLIENT: Sent message larger than max (9 vs. 8)", InvalidAudio),
        ("INTERNAL", "Received http2 header with status: 413", ServerError),
    ],
)
def test_a_piece_that_is_too_large_is_to_be_shorter(client, triton, flac, status, words, error):
    triton.script = [(status, words)] * 9
    with pytest.raises(error) as raised:
        client.transcribe_long(flac)
    message = str(raised.value)
    assert f" bytes): {words}; " in message
    assert "let pieces be shorter (`longest_piece_s`, `--longest-piece`)" in message
    assert "transcribe_long" not in message
    assert "shorter clip" not in message


def test_the_shortest_pieces_are_not_to_be_shorter(client, triton, flac):
    triton.script = [("INVALID_ARGUMENT", "too long: a clip must be at most 4 s long.")] * 20
    with pytest.raises(InvalidAudio, match=r"bytes\): too long: a clip must be at most 4 s long\. \["):
        client.transcribe_long(flac, longest_piece_s=5)


def test_pieces_are_as_short_as_they_are_to_be(client, flac, heard_s):
    transcript = client.transcribe_long(flac, longest_piece_s=10)
    assert max(heard_s) <= 10
    assert (sum(sorted(heard_s)), transcript.duration_s) == (LENGTH_S, LENGTH_S - LOST_S)


@pytest.mark.parametrize("longest_s", [0, 4.9, 61, float("nan")])
def test_pieces_have_5_to_60_s(client, triton, flac, longest_s):
    with pytest.raises(ValueError, match=r"must have 5 to 60 s, but has"):
        client.transcribe_long(flac, longest_piece_s=longest_s)
    assert not triton.requests


def test_a_recording_that_ends_in_damage_is_an_error(client, flac):
    with pytest.raises(InvalidAudio, match=r"^\d+ bytes: libsndfile cannot decode it"):
        client.transcribe_long(flac[: len(flac) * 2 // 3])


@pytest.mark.parametrize(
    ("audio", "error"),
    [(b"", InvalidAudio), (file_of(np.zeros(0)), InvalidAudio), ("missing.wav", FileNotFoundError), (7, TypeError)],
)
def test_what_is_no_recording_is_refused(client, audio, error):
    with pytest.raises(error):
        client.transcribe_long(audio)


def test_alternatives_are_refused(client, flac):
    with pytest.raises(InvalidOption, match="`n_best` must be left out"):
        client.transcribe_long(flac, n_best=3)


def test_a_long_recording_is_read_as_it_is_sent(client, triton):
    """Not more than a few pieces are held: of an hour, the last ones are cut after the first ones are answered."""
    hour = file_of(np.zeros((3600 * 100, 1), np.int16), rate=100)
    recording = Recording(hour, {})
    outcomes = client.transcribe_many(recording.pieces(), concurrency=2)
    next(outcomes)
    assert len(triton.requests) <= 6
    assert 1 + sum(1 for _ in outcomes) == len(triton.requests) > 100


def test_many_channels_make_pieces_shorter(monkeypatch, client, triton):
    monkeypatch.setattr("carnelian_client._long.MAX_DECODED_BYTES", 64 * 4 * 100 * 7)
    samples = np.zeros((100 * 20, 64), np.float32)
    pieces = list(Recording(file_of(samples, rate=100), {}).pieces())
    assert [round(soundfile.info(io.BytesIO(piece)).duration) for piece in pieces] == [7, 7, 6]
    assert client.transcribe_long(file_of(samples[:100], rate=100))
    assert len(triton.requests) == 1


def test_a_piece_that_would_fill_the_memory_is_refused(client, triton):
    bomb = file_of(np.zeros((8000, 200), np.float32), "OGG", rate=96_000)
    assert len(bomb) < 20_000
    with pytest.raises(InvalidAudio, match=r"5 s must have .* but 200 channels at 96000 Hz have that in 3\.5 s; mix"):
        client.transcribe_long(bomb)
    assert not triton.requests


async def transcribe_in_asyncio(url, audio, **arguments):
    async with AsyncCarnelianClient(url) as client:
        return await client.transcribe_long(audio, **arguments)


def test_asyncio_gives_the_same(endpoint, client, flac, heard_s):
    transcript = asyncio.run(transcribe_in_asyncio(endpoint.url, flac, longest_piece_s=50))
    assert transcript.words == client.transcribe_long(flac, longest_piece_s=50).words
    assert len(heard_s) == 4


def test_pieces_are_sent_as_the_call_says(endpoint, client, triton, make_result):
    all_there = threading.Barrier(10, timeout=30)

    def meet(request, context):
        all_there.wait()
        return make_result(request.model_name)

    triton.answer = meet
    silence = np.zeros(46 * RATE, np.int16), RATE
    told = {"longest_piece_s": 5, "concurrency": 10, "model": "other", "timeout_s": 1000}
    blocking = client.transcribe_long(silence, **told)
    asynchronous = asyncio.run(transcribe_in_asyncio(endpoint.url, silence, **told))
    assert blocking.text == asynchronous.text == " ".join(["other"] * 10)
    assert all(request.parameters["timeout"].int64_param > 9e8 for request in triton.requests)


def test_the_command_cuts_files_with_long(call, endpoint, triton, flac, tmp_path, heard_s):
    path, bad = tmp_path / "talk.flac", tmp_path / "bad.flac"
    path.write_bytes(flac)
    bad.write_bytes(flac[:100])
    status, out, err = call(main, "--long", path, bad, path, "--json", "--option", "lm_weight=2", "--url", endpoint.url)
    first, second = map(json.loads, out.splitlines())
    assert status == 1
    assert first["text"] == second["text"] == "a b a b a b"
    assert first["duration"] == LENGTH_S - LOST_S
    assert err.startswith(f"carnelian-transcribe: {bad}: libsndfile cannot decode it")
    assert len(heard_s) == 6
    assert {request.parameters["lm_weight"].string_param for request in triton.requests} == {"2"}


def test_the_command_names_a_file_once(call, endpoint, triton, flac, tmp_path):
    path = tmp_path / "talk.flac"
    path.write_bytes(flac)
    triton.script = [("INTERNAL", "out of luck")] * 3
    _, _, err = call(main, "--long", path, "--url", endpoint.url)
    assert err.startswith(f"carnelian-transcribe: {path}, from 0.0 to 20.")


def test_the_command_refuses_alternatives_before_any_work(call, triton, endpoint, flac):
    status, _, err = call(main, "--long", "talk.flac", "--option", "n_best=3", "--url", endpoint.url)
    assert status == 2
    assert "must come without the option n_best" in " ".join(err.split())
    assert not triton.requests


def test_the_command_takes_the_longest_piece(call, endpoint, flac, tmp_path, heard_s):
    path = tmp_path / "talk.flac"
    path.write_bytes(flac)
    status, _, _ = call(main, "--long", "--longest-piece", "10", path, "--url", endpoint.url)
    assert status == 0
    assert max(heard_s) <= 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--longest-piece", "30"], "--longest-piece must come with --long"),
        (["--long", "--longest-piece", "nan"], "must have 5 to 60 s, but has nan"),
        (["--long", "--option", "longest_piece_s=9"], "the command has --model, --timeout, --concurrency, --long"),
    ],
)
def test_the_command_refuses_a_longest_piece_that_makes_no_sense(call, triton, endpoint, arguments, message):
    status, _, err = call(main, "talk.flac", *arguments, "--url", endpoint.url)
    assert status == 2
    assert message in " ".join(err.replace("│", " ").split())
    assert not triton.requests
