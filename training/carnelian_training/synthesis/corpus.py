"""A corpus of synthesised speech: its clips, made by several processes, and its manifest.

A corpus of a number of hours is the beginning of the plan of utterances, so asking for more hours later appends, and
every part of a corpus is as mixed as the whole.
"""

import itertools
import logging
import math
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path

from tqdm import tqdm

from carnelian_training.data.manifest import Clip, read_manifest, write_manifest
from carnelian_training.synthesis.texts import choose_sources
from carnelian_training.synthesis.utterances import Utterance, make_clip, plan_utterances
from carnelian_training.synthesis.voices import choose_voices

logger = logging.getLogger(__name__)

CLIPS_PER_TASK = 4
TASKS_PER_WORKER = 6
MANIFEST_PERIOD_S = 30
MOST_FAILURES = 10
"""The number of failures of a voice in a row that ends the run; otherwise the voice and its sentences would be missing
from the corpus."""


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
