"""Utterances of a corpus: which sentence is said by whom and how, and the clip of one.

The plan is a shuffled sequence of utterances that depends only on the seed, the texts and the voices. A file's name
contains a digest of all arguments of the engine, so an existing file need not be made again.
"""

import errno
import hashlib
import itertools
import json
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile

from carnelian_training.data.manifest import Clip
from carnelian_training.data.sound_file import write_sound
from carnelian_training.synthesis.sentences import Sentence, read_sentences
from carnelian_training.synthesis.texts import Source
from carnelian_training.synthesis.voices import SAMPLE_RATE_HZ, Voice, render

logger = logging.getLogger(__name__)

DURATION_LIMITS_S = (0.8, 16.5)
LETTERS_PER_S = (5.0, 32.0)
"""The range of characters per second; other speech was cut off, or is mostly silence or repetition."""
PLAIN_SHARE = 0.3
"""The share of clips with the voice's own pitch."""
CLIPS_PER_FOLDER = 1000
SHORTAGES = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE}
"""The error numbers of a full disk or too many open files, with which every other sentence would fail too."""


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """One sentence of the plan, with its voice and how to say it."""

    index: int
    sentence: Sentence
    voice: Voice
    speaker: str
    speed: float
    pitch: float
    seed: int

    @property
    def path(self) -> Path:
        """The path of the clip's Ogg Vorbis file, relative to the corpus."""
        asked = vars(self) | {"voice": self.voice.engine, "sentence": vars(self.sentence)}
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]
        folder = f"{self.index // CLIPS_PER_FOLDER:04d}"
        return Path("clips", folder, f"{self.index:06d}_{self.voice.name}_{digest}.ogg")


def plan_utterances(sources: Iterable[Source], voices: Sequence[Voice], seed: int) -> Iterator[Utterance]:
    """Yield every sentence once, in shuffled order, each with its voice."""
    sources = list(sources)
    rng = random.Random(f"utterances {seed}")
    waiting = read_sentences(sources)
    for name, sentences in waiting.items():
        random.Random(f"{name} {seed}").shuffle(sentences)
    shares = [voice.share for voice in voices]
    for index in itertools.count():
        left = [source for source in sources if waiting[source.name]]
        if not left:
            return
        source = rng.choices(left, [source.share for source in left])[0]
        voice = rng.choices(voices, shares)[0]
        plain = rng.random() < PLAIN_SHARE
        yield Utterance(
            index=index,
            sentence=waiting[source.name].pop(),
            voice=voice,
            speaker=rng.choice(voice.speakers),
            speed=round(rng.uniform(*voice.speed), 3),
            pitch=1.0 if plain else round(rng.uniform(*voice.pitch), 3),
            seed=rng.randrange(2**31),
        )


def make_clip(utterance: Utterance, out: Path) -> Clip | str:
    """Synthesise an utterance, unless its file exists.

    Returns:
        The clip, or a message that says why there is none: the engine failed, or its speech cannot be the sentence.

    Raises:
        OSError: The disk is full, or too many files are open.
    """
    path = out / utterance.path
    if not path.exists():
        how = (utterance.speaker, utterance.speed, utterance.pitch, utterance.seed)
        try:
            speech = render(utterance.voice, utterance.sentence.spoken, *how)
        except Exception as error:  # an engine may raise anything, and one sentence may be missing
            if isinstance(error, OSError) and error.errno in SHORTAGES:
                raise
            logger.warning("%s left out: %s: %s", path.name, type(error).__name__, error)
            return f"{type(error).__name__}: {error}"
        fault = find_fault(speech, utterance.sentence.labels)
        if fault is not None:
            logger.info("%s left out: %s", path.name, fault)
            return fault
        write_sound(path, speech, SAMPLE_RATE_HZ)
    extra = {
        "speaker": f"{utterance.voice.engine}-{utterance.speaker}",
        "voice": utterance.voice.name,
        "source": utterance.sentence.source,
        "speed": utterance.speed,
        "pitch": utterance.pitch,
    }
    duration = round(float(soundfile.info(path).duration), 3)
    return Clip(path, duration, utterance.sentence.labels, extra)


def find_fault(speech: npt.NDArray[np.float32], labels: str) -> str | None:
    """Return why samples cannot be the sentence `labels`, by their length and loudness; None if they can be."""
    duration_s = len(speech) / SAMPLE_RATE_HZ
    if not np.isfinite(speech).all() or np.abs(speech).max(initial=0) < 0.01:
        return "silent, or not finite"
    if not DURATION_LIMITS_S[0] <= duration_s <= DURATION_LIMITS_S[1]:
        return f"{duration_s:.2f} s is outside {DURATION_LIMITS_S}"
    pace = len(labels) / duration_s
    if not LETTERS_PER_S[0] <= pace <= LETTERS_PER_S[1]:
        return f"{pace:.1f} letters per second is outside {LETTERS_PER_S}"
    return None
