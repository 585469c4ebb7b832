"""The training task of a recogniser, and of wav2vec 2.0 in pre-training: its clips and its evaluation."""

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from carnelian_training.config import Config
from carnelian_training.config_errors import ConfigError
from carnelian_training.data.acoustics import Sounds
from carnelian_training.data.audio import other_spelling
from carnelian_training.data.loading import load
from carnelian_training.data.manifest import Clip, clips_to_evaluate, read_clips, read_manifest, warn_of_characters
from carnelian_training.data.plan import Item, deal, plan_epoch, trainable
from carnelian_training.data.validate import check_clean
from carnelian_training.distributed import Process
from carnelian_training.evaluation.evaluate import evaluate
from carnelian_training.garbage import lasting
from carnelian_training.loop import contrastive
from carnelian_training.loop.ctc_loss import CtcObjective
from carnelian_training.loop.metrics import error_of
from carnelian_training.loop.report import Report
from carnelian_training.loop.state import State
from carnelian_training.loop.task import Finding, Objective, Share
from carnelian_training.models.network import CtcNetwork
from carnelian_training.models.pretraining import Wav2Vec2Pretraining

logger = logging.getLogger(__name__)

MANY_CLIPS = 1_000_000
"""The clips of an epoch of which planning takes seconds, which the log then explains."""
MAX_FILES_LOOKED_UP = 100
"""The most sound files per manifest that are looked up before training; on a network, each takes a millisecond."""


class Recognition:
    """The task of training on clips; implements :class:`carnelian_training.loop.task.Task`.

    Raises:
        ConfigError: A file or folder of the configuration is missing, or a folder of noises or rooms holds no sound
            file.
    """

    clips: list[Clip]

    def __init__(self, config: Config) -> None:
        self.config = config
        _check_paths(config)
        Sounds.find(config.augment)  # each epoch lists them again; this reports mistakes before anything is written

    def prepare(self, state: State) -> None:
        """Read the manifests; if evaluations will not compare (:func:`digest_of`), forget the best error so far.

        Raises:
            ValueError: As :func:`read_training_clips` and :func:`check_dev`, or `data.train` has no clip to train on.
            RuntimeError: As :func:`check_dev`.
        """
        if not self.config.data.train:
            raise ValueError("`data.train` must name manifests, as in [{path: corpus/manifest.jsonl}], but is empty")
        self.clips = read_training_clips(self.config)
        if not self.clips:
            raise ValueError(
                "`data.train` must name manifests with usable clips, but they have none; "
                "where some were left out, a warning above says why"
            )
        if state.process.leads:
            hours = sum(clip.duration for clip in self.clips) / 3600
            every = self.config.loop.log_every_steps
            logger.info(
                "%d clips an epoch, %.3g hours; a line of figures every %d steps", len(self.clips), hours, every
            )
        dev = check_dev(self.config, state.process)
        if state.process.leads:
            change = "`data.dev` has other clips than before"
            if self.config.pretraining is not None:
                change += ", or `augment.spans` or `pretraining.negatives` has changed"
            state.rate_by(digest_of(dev, self.config) if dev else None, change)

    def shares(self, state: State) -> Iterator[Share]:
        """Yield the share of this process in each step; see :func:`shares`."""
        return shares(self.clips, self.config, state)

    def amounts(self, items: Sequence[Item]) -> Mapping[str, float]:
        """Return the number of utterances and the seconds of audio of a step's items."""
        return {"utterances": len(items), "audio_s": sum(item.duration_s for item in items)}

    def evaluate(self, state: State, report: Report) -> Finding | None:
        """Measure error rates on the dev manifest; in pre-training, the accuracy on hidden frames."""
        manifest = self.config.data.dev
        if manifest is None:
            return None
        if isinstance(state.best_model, Wav2Vec2Pretraining):
            found = contrastive.evaluate(state.best_model, self.config, manifest, state.process)
            record = report.record(state.step, found)
            return Finding(record, 1 - record["dev_accuracy"])
        assert isinstance(state.best_model, CtcNetwork)
        evaluation = evaluate(state.best_model, self.config, manifest, state.process)
        record = report.evaluated(state.step, evaluation)
        return Finding(record, error_of(record))


def _check_paths(config: Config) -> None:
    """Check that the manifests and the folders of sounds are there, to name all that are missing at once."""
    named = {f"data.train.{i}.path": manifest.path for i, manifest in enumerate(config.data.train)}
    named |= {"data.dev": config.data.dev} if config.data.dev else {}
    for key in ("noise", "reverberation"):
        if sounds := getattr(config.augment, key):
            named[f"augment.{key}.path"] = sounds.path
    if missing := [f"  {key}: {path}" for key, path in named.items() if not path.exists()]:
        raise ConfigError(
            "\n".join([f"these must be there, but are not (a relative path begins at {Path.cwd()}):", *missing])
        )


def digest_of(clips: Sequence[Clip], config: Config) -> str:
    """Return the SHA-256 digest, as hexadecimal, of dev clips and, in pre-training, of what is asked about them.

    It depends on names of files, not on their folders.
    """
    digest = hashlib.sha256()
    if config.pretraining is not None:
        digest.update(repr((config.augment.spans, config.pretraining.negatives)).encode())
    for clip in clips:
        digest.update(repr((clip.audio_filepath.name, clip.offset, clip.duration, clip.text)).encode())
    return digest.hexdigest()


def read_training_clips(config: Config) -> list[Clip]:
    """Read the usable clips of `data.train`, each one as often as an epoch has it.

    Raises:
        ValueError: A file is not a manifest, or the sound files that it names are missing; the message names the entry
            of `data.train`.
    """
    clips: list[Clip] = []
    for i, manifest in enumerate(config.data.train):
        try:
            with lasting():
                usable = trainable(read_manifest(manifest.path), config, manifest.path)
            _check_place(manifest.path, usable)
            clips += usable * manifest.repeat
        except ValueError as error:
            raise ValueError(f"`data.train.{i}.path`: {error}") from error
    return clips


def _check_place(manifest: Path, clips: Sequence[Clip]) -> None:
    # A missing file is only left out of its batch. If all are missing, an error now spares an epoch of warnings.
    distinct: dict[Path, None] = {}
    for clip in clips:
        distinct[clip.audio_filepath] = None
        if len(distinct) == MAX_FILES_LOOKED_UP:
            break
    files = list(distinct)
    if len(clips) > 1 and not any(map(os.path.isfile, files)):
        raise ValueError(
            f"the sound files of usable clips in {manifest} must be there, but of the first {len(files)} none is, "
            f"such as {files[0]}; a relative path begins at the manifest's own folder{other_spelling(files[0])}"
        )


def check_dev(config: Config, process: Process) -> list[Clip]:
    """Read and decode `data.dev`, so that a bad clip ends a run before it begins and not at its first evaluation.

    References with characters that are not labels give a warning. Without `data.dev` there are no clips.

    Raises:
        ValueError: The file is not a manifest, or has no text to compare transcripts with.
        RuntimeError: As :func:`check_clean`.
    """
    if config.data.dev is None:
        if process.leads:
            logger.warning("`data.dev` is null: %s.pt will be the last weights, not the best", config.name)
        return []
    try:
        if config.pretraining is None:
            clips = clips_to_evaluate(config.data.dev)
            if process.leads:
                warn_of_characters(clips, config.labels)
        else:
            clips = read_clips(config.data.dev)
        check_clean(clips, config.data.dev, config.data.num_threads, process)
    except ValueError as error:
        raise ValueError(f"`data.dev`: {error}") from error
    return clips


def shares(clips: list[Clip], config: Config, state: State) -> Iterator[Share]:
    """Yield the share of this process in each step, without end, from the place of `state`, which is kept up to date.

    Raises:
        RuntimeError: A whole epoch had no usable clip.
    """
    named: set[tuple[str, str]] = set()  # bad clips already named in the log, which names each once
    while True:
        started = None if state.batch else state.step
        yield from _shares_of_epoch(clips, config, state, named)  # its plan is gone when the next one is made
        if started == state.step:
            raise RuntimeError(
                "one clip at least must be usable, but the files of all are bad; the log says why of each"
            )
        state.epoch, state.batch = state.epoch + 1, 0


def _shares_of_epoch(clips: list[Clip], config: Config, state: State, named: set[tuple[str, str]]) -> Iterator[Share]:
    rank, size = state.process.rank, state.process.size
    if len(clips) >= MANY_CLIPS:
        logger.info("planning epoch %d", state.epoch)
    with lasting():
        plan = plan_epoch(clips, config, state.epoch)[state.batch :]
        dealt = [deal(step, config.data.device_batch_s, rank=rank, world_size=size) for step in plan]
    batches = load(
        [part for parts in dealt for part in parts],
        config.features,
        config.data.num_threads,
        training=config,
        named=named,
        prefetch=config.data.prefetch_batches,
    )
    for step, parts in zip(plan, dealt, strict=True):
        state.batch += 1
        yield Share(step, islice(batches, len(parts)), len(parts), choose_objective(config, state))


def choose_objective(config: Config, state: State) -> Objective:
    """Return the objective of the next step, CTC's or pre-training's."""
    if config.pretraining is None:
        return CtcObjective(config)
    assert isinstance(state.model, Wav2Vec2Pretraining)
    return contrastive.ContrastiveObjective(state.model, config, state.step, state.process)
