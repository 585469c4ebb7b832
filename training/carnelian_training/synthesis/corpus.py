"""A corpus of synthesised speech: which voice says which sentence, the clips, the manifest.

The plan is a shuffled sequence of utterances that the seed alone decides, and a corpus of so many hours is
its beginning: asking for more hours later appends, and any part of a corpus is as mixed as the whole. A
file's name carries a digest of all that was asked of the engine, so a file that is there need not be made
again.
"""

import errno
import hashlib
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
from tqdm import tqdm

from carnelian_training.data.manifest import Clip, write_manifest
from carnelian_training.data.sound_file import write_sound
from carnelian_training.synthesis.texts import Sentence, Source, choose_sources, read_sentences
from carnelian_training.synthesis.voices import SAMPLE_RATE_HZ, Voice, choose_voices, render

logger = logging.getLogger(__name__)

DURATION_LIMITS_S = (0.8, 16.5)
LETTERS_PER_S = (5.0, 32.0)
"""Speech outside this range was cut off, or is mostly silence or repetition."""
PLAIN_SHARE = 0.3
"""Part of the clips with the voice's own pitch."""
CLIPS_PER_FOLDER = 1000
CLIPS_PER_TASK = 4
TASKS_PER_WORKER = 6
MANIFEST_PERIOD_S = 30
MOST_FAILURES = 10
"""Of a voice in a row: one that cannot speak would be missing from the corpus, and its sentences with it."""
SHORTAGES = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE}
"""Of room or of files, which no other sentence would do better with."""


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """One sentence and how it is to be said."""

    index: int
    sentence: Sentence
    voice: Voice
    speaker: str
    speed: float
    pitch: float
    seed: int

    @property
    def path(self) -> Path:
        """The clip's file, Ogg Vorbis, relative to the corpus."""
        asked = asdict(self) | {"voice": self.voice.engine}
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]
        folder = f"{self.index // CLIPS_PER_FOLDER:04d}"
        return Path("clips", folder, f"{self.index:06d}_{self.voice.name}_{digest}.ogg")


def synthesise(
    out: Path,
    hours: float,
    *,
    voices: Sequence[str] | None = None,
    texts: Sequence[str] | None = None,
    seed: int = 1,
    workers: int = 2,
) -> list[Clip]:
    """Make, or go on making, a corpus in `out`: `manifest.jsonl` and clips of 16 kHz mono speech.

    The manifest is rewritten every half a minute with what there is, so training can begin on it, but not with less
    than it had before.

    Args:
        out: Folder of the corpus. Clips that it holds are kept and counted.
        hours: Length of the corpus; the last clip may run over it.
        voices: Names as `choose_voices` takes them; None for all that are installed.
        texts: Packaged texts or paths of text files; None for all packaged texts that are installed.
        seed: Decides sentences, voices, speeds and file names, together with the texts and the voices that
            are there. The number of workers has no part in it.
        workers: Processes.

    Returns:
        The clips, as in the manifest. Fewer hours than asked if the texts have no more sentences.

    Raises:
        ValueError: A voice or a text is unknown or not installed, or a number is out of its range.
        RuntimeError: A voice fails again and again.
        OSError: There is no room for clips, or for what engines write meanwhile.
    """
    if not 0 < hours < math.inf or workers < 1:
        raise ValueError(f"`hours` and `workers` must be positive and finite, found {hours} and {workers}")
    chosen = choose_voices(voices)
    utterances = plan_utterances(choose_sources(texts), chosen, seed)
    target_s = hours * 3600
    manifest = out / "manifest.jsonl"
    known = manifest.read_bytes().count(b"\n") if manifest.exists() else 0
    clips: list[Clip] = []
    total_s = 0.0
    left_out: Counter[str] = Counter()
    with (
        _kept_on_failure(manifest, clips, known),
        closing(_make_clips(utterances, out, workers)) as made,
        tqdm(total=round(target_s), unit="s", desc="speech", disable=not sys.stderr.isatty()) as progress,
    ):
        last_write = time.monotonic()
        for clip in _leave_out(made, left_out):
            clips.append(clip)
            total_s += clip.duration
            progress.update(round(min(total_s, target_s)) - progress.n)
            if total_s >= target_s:
                break
            if time.monotonic() - last_write > MANIFEST_PERIOD_S:
                if len(clips) > known:
                    write_manifest(manifest, clips)
                last_write = time.monotonic()
                logger.info("%.2f of %.2f hours, %d clips", total_s / 3600, hours, len(clips))
    write_manifest(manifest, clips)
    kept = Counter(clip.extra["voice"] for clip in clips)
    for voice, count in left_out.items():
        logger.warning("%s: %d of %d clips left out", voice, count, count + kept[voice])
    if total_s < target_s:
        logger.warning("the texts are used up: %.2f of %.2f hours; add more with --text", total_s / 3600, hours)
    return clips


@contextmanager
def _kept_on_failure(manifest: Path, clips: list[Clip], known: int) -> Iterator[None]:
    """Write the manifest if this context fails, with what there is by then, unless it had more before."""
    try:
        yield
    except BaseException:
        if len(clips) > known:
            with suppress(OSError):  # a full disk, perhaps, which is what failed
                write_manifest(manifest, clips)
        raise


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
    """Say an utterance, unless its file is there.

    Returns:
        The clip, or in words why there is none: the engine failed or said something that cannot be the sentence.

    Raises:
        OSError: There is no room for it.
    """
    path = out / utterance.path
    if not path.exists():
        how = (utterance.speaker, utterance.speed, utterance.pitch, utterance.seed)
        try:
            speech = render(utterance.voice, utterance.sentence.spoken, *how)
        except Exception as error:  # an engine may fail in any way, and one sentence is no loss
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
    """Say why samples cannot be this sentence, by their length and loudness; None if they may be."""
    duration_s = len(speech) / SAMPLE_RATE_HZ
    if not np.isfinite(speech).all() or np.abs(speech).max(initial=0) < 0.01:
        return "silent, or not finite"
    if not DURATION_LIMITS_S[0] <= duration_s <= DURATION_LIMITS_S[1]:
        return f"{duration_s:.2f} s is outside {DURATION_LIMITS_S}"
    pace = len(labels) / duration_s
    if not LETTERS_PER_S[0] <= pace <= LETTERS_PER_S[1]:
        return f"{pace:.1f} letters per second is outside {LETTERS_PER_S}"
    return None


def _leave_out(made: Iterable[tuple[Utterance, Clip | str]], left_out: Counter[str]) -> Iterator[Clip]:
    """Yield clips; count what is none, by voice.

    Raises:
        RuntimeError: A voice fails again and again.
    """
    in_a_row: Counter[str] = Counter()
    for utterance, clip in made:
        voice = utterance.voice.name
        if isinstance(clip, Clip):
            in_a_row[voice] = 0
            yield clip
            continue
        left_out[voice] += 1
        in_a_row[voice] += 1
        if in_a_row[voice] == MOST_FAILURES:
            raise RuntimeError(
                f"{voice} must say its sentences, but {MOST_FAILURES} in a row failed, the last with {clip!r}; mend "
                "it, or name the other voices with --voices"
            )


def _make_clips(
    utterances: Iterator[Utterance], out: Path, workers: int
) -> Generator[tuple[Utterance, Clip | str], None, None]:
    """Make clips in worker processes; yield them, or why there is none, in the order of the plan."""
    tasks: deque[tuple[list[Utterance], Future[list[Clip | str]]]] = deque()
    # Not forked: the parent may have threads (torch, DALI) whose locks a fork would copy in any state.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_start_worker)
    try:
        while True:
            while len(tasks) < workers * TASKS_PER_WORKER:
                chunk = list(itertools.islice(utterances, CLIPS_PER_TASK))
                if not chunk:
                    break
                tasks.append((chunk, pool.submit(_make_task, chunk, out)))
            if not tasks:
                return
            chunk, task = tasks.popleft()
            yield from zip(chunk, task.result(), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


def _make_task(utterances: list[Utterance], out: Path) -> list[Clip | str]:
    return [make_clip(utterance, out) for utterance in utterances]


def _start_worker() -> None:
    """End with the parent: a pool's process whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
