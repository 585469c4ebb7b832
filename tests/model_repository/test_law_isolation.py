"""The second law: one bad clip fails alone and says why, while clips beside it are transcribed as ever."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import soundfile
from carnelian_client import InvalidAudio, Transcript
from carnelian_serving.launcher import Server
from tritonclient.utils import InferenceServerException

MODEL = "quartznet_demo"
RATE_HZ = 16_000
LIMIT_SAMPLES = 60 * RATE_HZ
NOT_DECODED = "nvidia.dali.fn.decoders.audio"
UNKNOWN = "Format not recognised"
UNKNOWN_FORMAT = rf"{NOT_DECODED}.*Failed to open encoded data: {UNKNOWN}"
CUT_SHORT = rf"{NOT_DECODED}.*Error decoding file .* Requested \d+ samples but got \d+"
NO_LENGTH = (
    "too long or of unknown length: .* FLAC written to a pipe .* Ogg with several streams or a picture do not: send WAV"
)
NO_SAMPLES = "no samples: a clip must hold at least one sample"
NOT_FINITE = "not finite: all samples must be finite numbers"
TOO_FEW = "SIGNAL hold all that its SIGNAL_LENGTH counts"

Encode = Callable[..., np.ndarray]


class BadFile(NamedTuple):
    make: Callable[[np.ndarray, Encode], np.ndarray]
    """From [samples] of speech, and the encoder, to AUDIO [1, bytes]."""
    words: str
    """What the server says: a regular expression."""
    advice: str | None
    """What the SDK makes of it; None where it transcodes the file and gets a transcript."""


def with_sample(speech: np.ndarray, value: float) -> np.ndarray:
    changed = speech.astype(np.float32)
    changed[len(changed) // 2] = value
    return changed


def damaged(file: np.ndarray) -> np.ndarray:
    file = file.copy()
    file[0, file.size // 2 :][:200] ^= 0x5A
    return file


def half(file: np.ndarray) -> np.ndarray:
    return file[:, : file.size // 2]


def piped(file: np.ndarray) -> np.ndarray:
    """The FLAC file that an encoder writes which cannot go back and fill in the number of samples."""
    file = file.copy()
    file[0, 21] &= 0xF0
    file[0, 22:26] = 0
    return file


def hour_of_silence(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    path = tmp_path_factory.mktemp("hour") / "hour.flac"
    with soundfile.SoundFile(path, "w", RATE_HZ, 1, format="FLAC", subtype="PCM_16") as file:
        for _ in range(60):
            file.write(np.zeros(60 * RATE_HZ, np.int16))
    assert path.stat().st_size < 200_000
    return np.fromfile(path, np.uint8)[None]


BAD_FILES = {
    "empty": BadFile(
        lambda s, e: np.zeros((1, 0), np.uint8), UNKNOWN_FORMAT, "empty audio: there is not a single byte"
    ),
    "text": BadFile(
        lambda s, e: np.frombuffer(b"Dear sir or madam, " * 50, np.uint8)[None], UNKNOWN_FORMAT, "convert the file"
    ),
    "gigantic": BadFile(
        lambda s, e: np.random.default_rng(0).integers(0, 256, (1, 5_000_000), np.uint8),
        UNKNOWN_FORMAT,
        "convert the file",
    ),
    "header only": BadFile(lambda s, e: e(s)[:, :30], f"{NOT_DECODED}.*No 'data' chunk marker", "damaged or cut short"),
    "truncated": BadFile(lambda s, e: half(e(s, container="FLAC")), CUT_SHORT, "damaged or cut short"),
    "corrupt": BadFile(lambda s, e: damaged(e(s, container="FLAC")), CUT_SHORT, "damaged or cut short"),
    "written to a pipe": BadFile(
        lambda s, e: piped(e(s, container="FLAC")),
        NO_LENGTH,
        None,
    ),
    "joined": BadFile(
        lambda s, e: np.concatenate([e(s, container="OGG", subtype="OPUS") for _ in range(2)], axis=1),
        NO_LENGTH,
        "Ogg files one behind the other, of which only the first would be read",
    ),
    "zero samples": BadFile(lambda s, e: e(s[:0]), NO_SAMPLES, NO_SAMPLES),
    "over the limit": BadFile(
        lambda s, e: e(np.zeros(LIMIT_SAMPLES + RATE_HZ), container="FLAC"),
        "too long: .* at most 60 s long, but this one has 61.0. s; send it in parts",
        "at most 60 s long, but this one has 61.02 s",
    ),
    "not a number": BadFile(lambda s, e: e(with_sample(s, np.nan), subtype="FLOAT"), NOT_FINITE, NOT_FINITE),
    "infinite": BadFile(lambda s, e: e(with_sample(s, np.inf), subtype="FLOAT"), NOT_FINITE, NOT_FINITE),
    "MP3": BadFile(lambda s, e: e(s, container="MP3", subtype="MPEG_LAYER_III"), f"{NOT_DECODED}.*{UNKNOWN}", None),
}

UNUSUAL_FILES: dict[str, Callable[[np.ndarray, Encode], np.ndarray]] = {
    "one sample": lambda s, e: e(s[:1]),
    "8 bit": lambda s, e: e(s, subtype="PCM_U8"),
    "mu-law": lambda s, e: e(s, subtype="ULAW"),
    "8 kHz": lambda s, e: e(s, 8_000),
    "48 kHz, stereo": lambda s, e: e(np.stack([s, s], axis=1), 48_000),
}
SECONDS_OF_UNUSUAL_FILES = {"one sample": 1 / RATE_HZ, "8 kHz": 2.0, "48 kHz, stereo": 1 / 3}


class BadSignal(NamedTuple):
    samples: Callable[[np.ndarray], np.ndarray]
    length: int
    words: str


BAD_SIGNALS = {
    "no samples": BadSignal(lambda s: s[:0], 0, NO_SAMPLES),
    "length 0": BadSignal(lambda s: s, 0, NO_SAMPLES),
    "negative length": BadSignal(lambda s: s, -1, NO_SAMPLES),
    "most negative length": BadSignal(lambda s: s, -(2**31), NO_SAMPLES),
    "length beyond the tensor": BadSignal(lambda s: s, 2 * RATE_HZ, rf"{TOO_FEW}, but this clip of about 2\.0\d s"),
    "just over the limit": BadSignal(
        lambda s: np.zeros(LIMIT_SAMPLES + 160, np.float32),
        LIMIT_SAMPLES + 160,
        rf"{TOO_FEW}, but this clip of about 60\.02 s is over",
    ),
    "length beyond an empty tensor": BadSignal(lambda s: s[:0], RATE_HZ, TOO_FEW),
    "greatest length": BadSignal(lambda s: s, 2**31 - 1, "too long or of unknown length: .* at most 60 s"),
    "not a number": BadSignal(lambda s: with_sample(s, np.nan), RATE_HZ, NOT_FINITE),
    "infinite": BadSignal(lambda s: with_sample(s, -np.inf), RATE_HZ, NOT_FINITE),
    "huge": BadSignal(lambda s: with_sample(s, 3e38), RATE_HZ, NOT_FINITE),
    "over the limit": BadSignal(
        lambda s: np.zeros(LIMIT_SAMPLES + RATE_HZ, np.float32),
        LIMIT_SAMPLES + RATE_HZ,
        "too long: .* at most 60 s long, but this one has 61.0. s; send it in parts",
    ),
    "tensor over the limit": BadSignal(lambda s: np.zeros(LIMIT_SAMPLES + 160, np.float32), RATE_HZ, "over the limit"),
}


def signal_request(samples: np.ndarray, length: int | None = None) -> dict[str, np.ndarray]:
    length = len(samples) if length is None else length
    return {"SIGNAL": samples[None], "SIGNAL_LENGTH": np.array([[length]], np.int32)}


def text_of(answer: Any) -> str:
    assert isinstance(answer, dict), answer
    return answer["TRANSCRIPT"].item().decode()


@pytest.fixture(scope="module")
def speech(signals) -> np.ndarray:
    """[samples] float32, one second."""
    return signals["harbour.flac"][RATE_HZ : 2 * RATE_HZ]


@pytest.fixture(scope="module")
def good_signals(models, signals) -> list[tuple[np.ndarray, str]]:
    """Samples of three clips, 1.2 s to 2 s, and what each says alone."""
    clips = ("harbour.flac", "letter.wav", "market.ogg")
    rows = [signals[name][4_000:end] for name, end in zip(clips, (24_000, 32_000, 36_000), strict=True)]
    texts = [text_of(models.infer(f"{MODEL}_pcm", **signal_request(row))) for row in rows]
    assert all(texts)
    return list(zip(rows, texts, strict=True))


@pytest.fixture(scope="module")
def good_files(models, good_signals, encode) -> list[tuple[np.ndarray, str]]:
    """AUDIO of the same clips, and what each says alone."""
    files = [encode(row, container="FLAC") for row, _ in good_signals]
    return [(file, text_of(models.infer(MODEL, AUDIO=file))) for file in files]


@pytest.fixture(scope="module")
def bad_files(server, speech, encode, tmp_path_factory):
    def expect(words: str) -> str:
        # The instances of the native backend share libsndfile's one reason, which another's good file clears.
        return words if isinstance(server, Server) else words.replace(UNKNOWN, f"({UNKNOWN}|No Error)")

    files = {name: (bad.make(speech, encode), expect(bad.words), bad.advice) for name, bad in BAD_FILES.items()}
    words = "at most 60 s long, but this one has 3600.02 s; send it in parts"
    return files | {"an hour in a small file": (hour_of_silence(tmp_path_factory), words, words)}


@pytest.fixture(autouse=True)
def _server_stays_ready(models):
    yield
    assert models.client.is_server_live()
    assert models.client.is_server_ready()
    index = models.client.get_model_repository_index().models
    assert {model.state for model in index} == {"READY"}


def send_among(models, model: str, good: list[dict[str, np.ndarray]], bad: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """Sends good, bad, good, bad, good at once; returns the answers to the good ones and to the bad ones."""
    answers = models.infer_at_once(model, [good[0], bad, good[1], bad, good[2]])
    return answers[::2], answers[1::2]


def assert_refused(answers: list[Any], words: str) -> None:
    for answer in answers:
        assert isinstance(answer, InferenceServerException), answer
        assert re.search(words, answer.message(), re.DOTALL), answer
        assert "Traceback" not in answer.message()  # the words are for the client's user


@pytest.mark.parametrize("name", [*BAD_FILES, "an hour in a small file"])
def test_a_bad_file_fails_alone_and_says_why(models, good_files, bad_files, name):
    audio, words, _ = bad_files[name]
    requests = [{"AUDIO": file} for file, _ in good_files]
    good, bad = send_among(models, MODEL, requests, {"AUDIO": audio})
    assert [text_of(answer) for answer in good] == [text for _, text in good_files]
    assert_refused(bad, words)


@pytest.mark.parametrize("name", UNUSUAL_FILES)
def test_an_unusual_file_is_transcribed_among_others(models, good_files, speech, encode, name):
    requests = [{"AUDIO": file} for file, _ in good_files]
    good, unusual = send_among(models, MODEL, requests, {"AUDIO": UNUSUAL_FILES[name](speech, encode)})
    assert [text_of(answer) for answer in good] == [text for _, text in good_files]
    for answer in unusual:
        result = json.loads(answer["RESULT"].item())
        assert result["text"] == text_of(answer)
        assert result["duration"] == pytest.approx(SECONDS_OF_UNUSUAL_FILES.get(name, 1.0), abs=0.05)


def test_the_sdk_reports_every_bad_file_and_transcribes_the_others(sdk, good_files, bad_files):
    (good, text), *_ = good_files
    clips = [clip.tobytes() for audio, _, _ in bad_files.values() for clip in (audio, good)]
    outcomes = list(sdk.transcribe_many(clips, concurrency=16))
    for outcome in outcomes[1::2]:
        assert isinstance(outcome, Transcript), outcome
        assert outcome.text == text
    for (name, (_, _, advice)), outcome in zip(bad_files.items(), outcomes[::2], strict=True):
        if advice is None:
            assert isinstance(outcome, Transcript), (name, outcome)
        else:
            assert isinstance(outcome, InvalidAudio), (name, outcome)
            assert advice in str(outcome)


@pytest.mark.parametrize("name", BAD_SIGNALS)
def test_bad_samples_fail_alone_and_say_why(models, good_signals, speech, name):
    samples, length, words = BAD_SIGNALS[name]
    requests = [signal_request(row) for row, _ in good_signals]
    good, bad = send_among(models, f"{MODEL}_pcm", requests, signal_request(samples(speech), length))
    assert [text_of(answer) for answer in good] == [text for _, text in good_signals]
    assert_refused(bad, words)
    assert {answer.status() for answer in bad} == {"StatusCode.INVALID_ARGUMENT"}


def test_bad_rows_of_a_request_fail_alone(models, good_signals):
    lengths = [len(row) for row, _ in good_signals]
    signal = np.zeros((6, max(lengths)), np.float32)
    for position, (row, _) in zip((0, 2, 4), good_signals, strict=True):
        signal[position, : len(row)] = row
    signal[1] = np.nan
    request = {
        "SIGNAL": signal,
        "SIGNAL_LENGTH": np.array([[lengths[0]], [lengths[1]], [lengths[1]], [0], [lengths[2]], [-5]], np.int32),
    }
    answer = models.infer(f"{MODEL}_pcm", **request)
    texts = [text.decode() for text in answer["TRANSCRIPT"][:, 0]]
    assert texts[::2] == [text for _, text in good_signals]
    assert texts[1::2] == ["", "", ""]
    results = [json.loads(text) for text in answer["RESULT"][:, 0]]
    assert [result["text"] for result in results[::2]] == texts[::2]
    for result, words in zip(results[1::2], (NOT_FINITE, NO_SAMPLES, NO_SAMPLES), strict=True):
        assert list(result) == ["error", "request_id"]
        assert words in result["error"]


def test_a_request_whose_rows_all_fail_is_an_error(models, speech):
    request = {"SIGNAL": np.stack([speech] * 3), "SIGNAL_LENGTH": np.zeros((3, 1), np.int32)}
    with pytest.raises(InferenceServerException, match=rf"{NO_SAMPLES}.*\(the first of 3 rows; all failed\)"):
        models.infer(f"{MODEL}_pcm", **request)
