"""The voices of a corpus: engines, speakers, shares, and ranges of speed and pitch."""

import fnmatch
import itertools
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt
import soxr

from carnelian_training.synthesis.engines import ENGINES, Engine

logger = logging.getLogger(__name__)

SAMPLE_RATE_HZ = 16_000  # as in `features.py`, whose import would load DALI in every worker: 70 MB, 0.6 s

ESPEAK_SPEAKERS = tuple(
    f"{accent}+{variant}"
    for accent in ("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan", "en-029")
    for variant in ("m1", "m3", "m4", "m7", "f1", "f2", "f3", "f4", "f5", "klatt2")
)

KOKORO_SPEAKERS = tuple(
    f"{kind}_{name}"
    for kind, names in (  # all speak English phonemes, more or less with the accent of their language
        ("af", "alloy aoede bella heart jessica kore nicole nova river sarah sky"),  # American women
        ("am", "adam echo eric fenrir liam michael onyx puck santa"),  # American men
        ("bf", "alice emma isabella lily"),  # British
        ("bm", "daniel fable george lewis"),
        ("ef", "dora"),  # Spanish
        ("em", "alex santa"),
        ("ff", "siwis"),  # French
        ("hf", "alpha beta"),  # Hindi
        ("hm", "omega psi"),
        ("if", "sara"),  # Italian
        ("im", "nicola"),
        ("jf", "alpha gongitsune nezumi tebukuro"),  # Japanese
        ("jm", "kumo"),
        ("pf", "dora"),  # Portuguese
        ("pm", "alex santa"),
        ("zf", "xiaobei xiaoni xiaoxiao xiaoyi"),  # Chinese
        ("zm", "yunjian yunxi yunxia yunyang"),
    )
    for name in names.split()
)
KOKORO_PAIRS = tuple(map("+".join, itertools.combinations_with_replacement(KOKORO_SPEAKERS, 2)))


@dataclass(frozen=True, kw_only=True)
class Voice:
    """A voice and its share of a corpus."""

    name: str
    """The name of the engine; of several voices of one engine, a hyphen and a name of its own follow it."""
    speakers: tuple[str, ...]
    """The engine's names of the speakers; one is drawn for each clip."""
    share: float
    """The weight of the voice when the voice of a clip is drawn from those in use."""
    speed: tuple[float, float]
    """The range of the factor of speed; 1.0 is the speaker's own."""
    pitch: tuple[float, float]
    """The range of the factor of pitch. If the engine cannot change the pitch, the speech is made slower or faster and
    resampled, which also moves the formants, as a longer or shorter vocal tract does."""

    @property
    def engine(self) -> str:
        """The name of the engine, a key of `ENGINES`."""
        return self.name.partition("-")[0]


VOICES = (
    Voice(name="hibari", speakers=("heart",), share=36, speed=(0.85, 1.2), pitch=(0.85, 1.15)),
    Voice(name="pico-us", speakers=("en-US",), share=11, speed=(0.8, 1.25), pitch=(0.7, 1.4)),
    Voice(name="pico-gb", speakers=("en-GB",), share=11, speed=(0.8, 1.25), pitch=(0.7, 1.4)),
    Voice(name="flite-slt", speakers=("slt",), share=7, speed=(0.8, 1.2), pitch=(0.88, 1.12)),
    Voice(name="flite-rms", speakers=("rms",), share=10, speed=(0.8, 1.25), pitch=(0.9, 1.15)),
    Voice(name="flite-awb", speakers=("awb",), share=8, speed=(0.8, 1.2), pitch=(0.9, 1.15)),
    Voice(name="flite-kal16", speakers=("kal16",), share=3, speed=(0.8, 1.2), pitch=(0.88, 1.15)),
    # The HTS voice ignores the speed that is asked for; resampling changes both speed and pitch.
    Voice(name="festival-slt", speakers=("cmu_us_slt_arctic_hts",), share=2, speed=(1.0, 1.0), pitch=(0.88, 1.12)),
    Voice(name="festival-ked", speakers=("ked_diphone",), share=3, speed=(0.85, 1.2), pitch=(0.88, 1.15)),
    Voice(name="festival-kal", speakers=("kal_diphone",), share=1, speed=(0.85, 1.2), pitch=(0.88, 1.15)),
    Voice(name="espeak", speakers=ESPEAK_SPEAKERS, share=3, speed=(0.8, 1.15), pitch=(0.7, 1.4)),
    Voice(name="piper-joe", speakers=("joe",), share=5, speed=(0.85, 1.2), pitch=(0.88, 1.15)),
    # Its share is in addition to the others' 100, so that a corpus without this voice does not change.
    Voice(name="kokoro", speakers=KOKORO_PAIRS, share=8, speed=(0.85, 1.2), pitch=(0.88, 1.15)),
)


def choose_voices(names: Sequence[str] | None) -> list[Voice]:
    """Find the voices with the given names, or all that are installed.

    Args:
        names: Names of voices or engines (`flite` means its four voices), with all their speakers or those that a shell
            pattern matches (`espeak:en-gb*`). None: all voices that are installed; the log says how to install the
            others.

    Raises:
        ValueError: The list is empty, a name is unknown, a pattern matches no speaker, a voice has two patterns, a
            named voice is not installed, or no voice is.
    """
    if names is not None and not names:
        raise ValueError("one voice must be named at least, found none")
    chosen = list(VOICES) if names is None else [voice for name in names for voice in _find(name)]
    chosen = list(dict.fromkeys(chosen))
    if twice := [name for name, count in Counter(voice.name for voice in chosen).items() if count > 1]:
        raise ValueError(f"a voice must be named with one pattern of its speakers, but these have more: {twice}")
    hints = {voice.name: hint for voice in chosen if (hint := _install_hint(voice)) is not None}
    advice = "; ".join(f"{name}: {hint}" for name, hint in hints.items())
    if hints and names is not None:
        raise ValueError(f"every voice that is named must be installed, but these are not: {advice}")
    if len(hints) == len(chosen):
        raise ValueError(f"at least one voice must be installed, but none is: {advice}")
    if hints:
        logger.warning("the corpus is made without these voices, which are not installed: %s", advice)
    return [voice for voice in chosen if voice.name not in hints]


def render(voice: Voice, text: str, speaker: str, speed: float, pitch: float, seed: int) -> npt.NDArray[np.float32]:
    """Synthesise `text`; return [samples] float32 in [-1, 1] at `SAMPLE_RATE_HZ`."""
    engine = _start(voice.engine)
    if engine.has_pitch:
        samples, rate_hz = engine.speak(text, speaker, speed, pitch, seed)
        source_hz = float(rate_hz)
    else:
        samples, rate_hz = engine.speak(text, speaker, speed / pitch, 1.0, seed)
        source_hz = rate_hz * pitch
    speech: npt.NDArray[np.float32] = soxr.resample(samples, source_hz, SAMPLE_RATE_HZ)
    # Resampling may exceed full scale, where a file would clip.
    peak = float(np.abs(speech).max(initial=0))
    return speech * np.float32(0.98 / peak) if peak > 0.98 else speech


@cache
def _start(engine: str) -> Engine:
    return ENGINES[engine]()


def _find(named: str) -> list[Voice]:
    name, colon, pattern = named.partition(":")
    found = [voice for voice in VOICES if name in (voice.name, voice.engine)]
    if not found:
        known = ", ".join(voice.name for voice in VOICES)
        raise ValueError(f"a voice must be one of {known} (or an engine, such as flite), found {name!r}")
    matching = [(voice, tuple(fnmatch.filter(voice.speakers, pattern if colon else "*"))) for voice in found]
    if not any(speakers for _, speakers in matching):
        speakers = [speaker for voice in found for speaker in voice.speakers]
        some = ", ".join(speakers[:: math.ceil(len(speakers) / 5)])  # about five, spread over all
        raise ValueError(f"a pattern must match one speaker of {name} at least, such as {some}; found {pattern!r}")
    return [replace(voice, speakers=speakers) for voice, speakers in matching if speakers]


def _install_hint(voice: Voice) -> str | None:
    return ENGINES[voice.engine].install_hint(voice.speakers[0])
