"""A corpus of synthesised speech: its plan, its clips and its manifest.

The plan is a shuffled sequence of utterances that depends only on the seed, the texts and the voices. A corpus of a
number of hours is the beginning of the plan, so asking for more hours later appends, and every part of a corpus is as
mixed as the whole. A file's name contains a digest of all arguments of the engine, so an existing file need not be made
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

from carnelian_training.data.manifest import Clip, read_manifest, write_manifest
from carnelian_training.data.sound_file import write_sound
from carnelian_training.synthesis.sentences import Sentence, read_sentences
from carnelian_training.synthesis.texts import Source, choose_sources
from carnelian_training.synthesis.voices import SAMPLE_RATE_HZ, Voice, choose_voices, render

logger = logging.getLogger(__name__)

DURATION_LIMITS_S = (0.8, 16.5)
LETTERS_PER_S = (5.0, 32.0)
"""The range of characters per second; other speech was cut off, or is mostly silence or repetition."""
PLAIN_SHARE = 0.3
"""The share of clips with the voice's own pitch."""
CLIPS_PER_FOLDER = 1000
CLIPS_PER_TASK = 4
TASKS_PER_WORKER = 6
MANIFEST_PERIOD_S = 30
MOST_FAILURES = 10
"""The number of failures of a voice in a row that ends the run; otherwise the voice and its sentences would be missing
from the corpus."""
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
    """Make or continue a corpus in `out`: `manifest.jsonl` and clips of 16 kHz mono speech.

    The manifest is rewritten every half minute with the clips so far, so that training can begin, unless it had more
    clips before.

    Args:
        out: Folder of the corpus. Existing clips are kept and counted.
        hours: Length of the corpus; the last clip may exceed it.
        voices: Names, see :func:`choose_voices`; None for all voices that are installed.
        texts: Names of packaged texts or paths of text files; None for all packaged texts that are installed.
        seed: Together with the texts and the voices, decides sentences, voices, speeds and file names. The number of
            workers does not matter.
        workers: Number of processes.

    Returns:
        The clips, as in the manifest. They are fewer hours than asked if the texts have no more sentences.

    Raises:
        ValueError: A voice or a text is unknown or not installed, a number is out of its range, or the manifest would
            lose clips.
        RuntimeError: A voice fails `MOST_FAILURES` times in a row.
        OSError: The disk is too full for clips, or for the engines' temporary files.
    """
    if not 0 < hours < math.inf or workers < 1:
        raise ValueError(f"`hours` and `workers` must be positive and finite, found {hours} and {workers}")
    chosen = choose_voices(voices)
    target_s = hours * 3600
    manifest = out / "manifest.jsonl"
    listed = read_manifest(manifest) if manifest.exists() else []
    known = len(listed)
    utterances = _go_on(plan_utterances(choose_sources(texts), chosen, seed), manifest, listed, target_s)
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
            if total_s >= target_s and len(clips) >= known:  # more, if clips that were left out before succeed now
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


def _go_on(
    utterances: Iterator[Utterance], manifest: Path, listed: Sequence[Clip], target_s: float
) -> Iterator[Utterance]:
    """Yield `utterances`, after a check that their first `target_s` seconds include all clips of the manifest.

    Raises:
        ValueError: They do not, so that the manifest would lose clips.
    """
    lost = {clip.audio_filepath: clip.duration for clip in listed}
    begun: list[Utterance] = []
    total_s = 0.0
    while lost and total_s < target_s and (utterance := next(utterances, None)):
        begun.append(utterance)
        total_s += lost.pop(manifest.parent / utterance.path, 0.0)
    if lost:
        listed_h = math.ceil(sum(clip.duration for clip in listed) / 36) / 100
        raise ValueError(
            f"{manifest} would lose {len(lost)} of {len(listed)} clips, such as {next(iter(lost))}: ask for at least "
            f"{listed_h} hours of the same voices, texts and seed, or take another folder"
        )
    return itertools.chain(begun, utterances)


@contextmanager
def _kept_on_failure(manifest: Path, clips: list[Clip], known: int) -> Iterator[None]:
    """Write the manifest with the clips so far if the context fails, unless it had more clips (`known`) before."""
    try:
        yield
    except BaseException:
        if len(clips) > known:
            with suppress(OSError):  # the disk may be full, which may be why it failed
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


def _leave_out(made: Iterable[tuple[Utterance, Clip | str]], left_out: Counter[str]) -> Iterator[Clip]:
    """Yield the clips, and count failures by voice in `left_out`.

    Raises:
        RuntimeError: A voice fails `MOST_FAILURES` times in a row.
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
    """Make clips in worker processes; yield each clip, or why there is none, in the order of the plan."""
    tasks: deque[tuple[list[Utterance], Future[list[Clip | str]]]] = deque()
    # Spawned, not forked: a fork would copy the locks of the parent's threads (torch, DALI) in any state.
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
    """End this process when its parent ends: otherwise, if the parent is killed, it would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
