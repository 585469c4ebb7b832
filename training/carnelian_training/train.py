"""The training run, top to bottom: clips -> batches -> loss -> step, with evaluation and checkpoints in between.

In: a :class:`Config` and a folder. Out, in that folder: `<name>.yaml` (the resolved configuration), `<name>-<step>.pt`
(all that resuming needs), `<name>.pt` (the best weights by dev WER, in pre-training by accuracy; the last ones where
there is no dev manifest) and what `report.py` writes.
"""

import logging
import math
import signal
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
import yaml
from torch import Tensor

from carnelian_training import checkpoint, contrastive, finetune
from carnelian_training.config import Config, config_to_dict
from carnelian_training.defects import Limits
from carnelian_training.distributed import joined
from carnelian_training.evaluate import evaluate, read_clips
from carnelian_training.interruption import Interruption
from carnelian_training.loading import Batch, Item, deal, load, plan_epoch, trainable
from carnelian_training.manifest import Clip, read_manifest
from carnelian_training.models.network import CtcNetwork
from carnelian_training.models.pretraining import Wav2Vec2Pretraining
from carnelian_training.optim import clip_gradients, learning_rate
from carnelian_training.report import Report
from carnelian_training.state import State, new_state, resume, write
from carnelian_training.transcription import Transcription
from carnelian_training.validate import check_for_evaluation, check_sound

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Share:
    """What one process does of one step of the optimiser."""

    clips: Sequence[Item]
    """Those of the whole step, over all processes."""
    batches: Iterator[Batch]
    """The parts of this process; some may be empty."""
    parts: int
    """How many batches: as many as in every other process."""


@dataclass(frozen=True)
class Outcome:
    """What became of a step, the same in all processes."""

    loss: float
    """Per character; in pre-training per hidden frame."""
    grad_norm: float
    lr: float
    measured: Mapping[str, float] = field(default_factory=dict)
    """What else there is to report, where the step is logged."""

    @property
    def is_finite(self) -> bool:
        """Whether the step was taken."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def train(config: Config, directory: Path) -> None:
    """Train until `config.loop.steps`; a folder that holds checkpoints is resumed from the newest.

    Started by `torchrun`, this is one of the processes that train together.

    Raises:
        ValueError: There is nothing to train on, or the folder's checkpoints do not fit the configuration.
        RuntimeError: A dev clip is bad, all training clips are, or too many steps in a row were not finite.
        SystemExit: A signal ended the run, after a checkpoint; the status is the one a shell gives that signal.
    """
    clips = trainable(read_training_clips(config), config)
    if not clips:
        raise ValueError("`data.train` must name manifests with usable clips, but none is left; see the warnings above")
    with joined() as process, Interruption() as interruption:
        state = new_state(config, process)
        if not resume(state, config, directory):
            finetune.start_from_checkpoint(state.model, config)
            state.restart_average()
        if state.step >= config.loop.steps:
            logger.info("nothing to do: `loop.steps` is %d", config.loop.steps)
            return
        if process.leads:
            check_dev(config)
            directory.mkdir(parents=True, exist_ok=True)
            resolved = yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)
            (directory / f"{config.name}.yaml").write_text(resolved, encoding="utf-8")

        report = Report(directory, config, state.step, enabled=process.leads)
        stop = False
        for share in shares(clips, config, state):
            outcome = optimise(state, share, config)
            if outcome is None:
                continue
            state.step += 1
            report.add(outcome.loss, len(share.clips), sum(item.duration_s for item in share.clips))
            if state.step % config.loop.log_every_steps == 0:
                skipped = {"skipped_clips": state.skipped_clips, "skipped_steps": state.skipped_steps}
                report.log(
                    state.step, state.epoch, lr=outcome.lr, grad_norm=outcome.grad_norm, **outcome.measured, **skipped
                )
            stop, is_late = process.any(interruption.signal is not None, state.is_late(config))
            if not stop and state.looks(config):
                look(state, config, directory, report)
                report.restart_clock()
            if stop or is_late or state.saves(config):
                write(state, config, directory)
            if stop or state.step >= config.loop.steps:
                break
        report.close()
    if stop:
        received = interruption.signal or signal.SIGTERM  # another process may have got it
        logger.warning("stopped by %s after step %d; the same command goes on from there", received.name, state.step)
        raise SystemExit(128 + received)


def read_training_clips(config: Config) -> list[Clip]:
    """All clips of `data.train`, as often as they come in an epoch.

    Raises:
        ValueError: A manifest is none; the message says which entry names it.
    """
    clips: list[Clip] = []
    for i, manifest in enumerate(config.data.train):
        try:
            clips += read_manifest(manifest.path) * manifest.repeat
        except ValueError as error:
            raise ValueError(f"`data.train.{i}.path`: {error}") from error
    return clips


def check_dev(config: Config) -> None:
    """Look at `data.dev`, so that a bad one ends a run before it begins and not at its first evaluation.

    Raises:
        ValueError: It is no manifest, or there is nothing to compare with.
        RuntimeError: Clips that evaluation would refuse; each is named, with why.
    """
    if config.data.dev is None:
        logger.warning("`data.dev` is null: %s.pt will be the last weights, not the best", config.name)
        return
    try:
        if config.pretraining is None:
            check_for_evaluation(config.data.dev, config.labels, config.data.num_threads)
        else:
            check_sound(read_clips(config.data.dev), config.data.dev, config.data.num_threads)
    except ValueError as error:
        raise ValueError(f"`data.dev`: {error}") from error


def shares(clips: list[Clip], config: Config, state: State) -> Iterator[Share]:
    """What this process has to do, step after step without end, from where `state` is, which is kept up to date.

    Raises:
        RuntimeError: A whole epoch held no clip that could be learnt from.
    """
    rank, size = state.process.rank, state.process.size
    named: set[tuple[Path, str]] = set()  # a bad clip is bad in every epoch
    while True:
        started = None if state.batch else state.step
        plan = plan_epoch(clips, config, state.epoch)[state.batch :]
        dealt = [deal(step, config.data.device_batch_s, rank=rank, world_size=size) for step in plan]
        parts_in_order = [part for parts in dealt for part in parts]
        batches = load(
            parts_in_order,
            config.features,
            config.data.num_threads,
            skip=Limits.of(config),
            named=named,
            prefetch=config.data.prefetch_batches,
        )
        for step, parts in zip(plan, dealt, strict=True):
            state.batch += 1
            yield Share(step, islice(batches, len(parts)), len(parts))
        if started == state.step:
            raise RuntimeError(
                "one clip at least must be usable, but the files of all are bad; the log says why of each"
            )
        state.epoch, state.batch = state.epoch + 1, 0


def optimise(state: State, share: Share, config: Config) -> Outcome | None:
    """One step of the optimiser, in as many parts as the share has; if it is not finite, nothing changes.

    Returns:
        None if no process had a clip that could be learnt from: that is no step.

    Raises:
        RuntimeError: This was one too many in a row.
    """
    process = state.process
    network = state.prepare(config)
    # What dropout draws follows from these three alone, so that a resumed run draws it again.
    torch.manual_seed(zlib.crc32(f"{config.loop.seed}/{state.step}/{process.rank}".encode()))
    lr = learning_rate(config, state.step)
    for group in state.optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    state.optimizer.zero_grad()
    task = objective(state, config)
    planned = task.planned(share.clips)
    heard = torch.zeros(2, dtype=torch.int64)  # characters or hidden frames, and clips left out
    total = torch.zeros((), device=process.device)
    losses: list[tuple[Sequence[Item], Tensor]] = []
    for part, batch in enumerate(task.batches(share.batches, share.parts), start=1):
        with process.gathering(network, part == share.parts):
            clip_losses, weight = task.losses(network, batch)
            loss = clip_losses.sum() / planned
            # Gradients are averaged over the processes, but their sum is the gradient of the mean over characters.
            state.scaler.scale(loss * process.size).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
        losses.append((batch.items, clip_losses.detach()))
        heard += torch.tensor([weight, len(batch.skipped)])
    weights, left_out = process.total(heard).tolist()
    state.skipped_clips += left_out
    if not weights:
        return None
    correction = planned / weights  # clips that could not be read are known only now
    state.scaler.unscale_(state.optimizer)
    grad_norm = clip_gradients(state.model, config.optimizer.max_grad_norm, correction)
    loss_value, norm_value = torch.stack(
        [process.total(total) * correction, grad_norm]
    ).tolist()  # the one wait for the device
    measured = task.measured() if (state.step + 1) % config.loop.log_every_steps == 0 else {}
    outcome = Outcome(loss_value, norm_value, lr, measured)
    if outcome.is_finite:
        state.optimizer.step()
        state.took_step()
    else:
        endless = [
            item for items, values in losses for item, value in zip(items, values, strict=False) if not value.isfinite()
        ]
        skip(state, outcome, endless, config)
    state.scaler.update()
    return outcome


def objective(state: State, config: Config) -> Transcription | contrastive.Contrastive:
    """What the next step learns."""
    if config.pretraining is None:
        return Transcription(config)
    assert isinstance(state.model, Wav2Vec2Pretraining)
    return contrastive.Contrastive(state.model, config, state.step, state.process)


def skip(state: State, outcome: Outcome, clips: Sequence[Item], config: Config) -> None:
    """Leave everything as it was before the step, say so, and give up if that has become the rule.

    Args:
        state: whose optimiser has not been called.
        outcome: what was not finite.
        clips: those of this process whose own loss was not.
        config: says when to give up.

    Raises:
        RuntimeError: Too many steps in a row were skipped.
    """
    state.skipped_step()
    found = f"loss {outcome.loss:.4g}, gradient norm {outcome.grad_norm:.4g}"
    names = "".join(f"\n  not finite: {item.clip.audio_filepath}" for item in clips)
    # With float16 this is how the scale is found.
    level = logging.INFO if state.scaler.is_enabled() and not names else logging.WARNING
    logger.log(level, "step %d skipped: %s%s", state.step + 1, found, names)
    if state.skipped_in_a_row > config.loop.max_skipped_steps:
        raise RuntimeError(
            f"loss and gradient must be finite, but were not in {state.skipped_in_a_row} steps in a row "
            f"(now {found}, learning rate {outcome.lr:.3g}); lower `optimizer.lr`, set `optimizer.max_grad_norm`, or "
            "look at the clips that the log names"
        )


def look(state: State, config: Config, directory: Path, report: Report) -> None:
    """Evaluate on the dev manifest and keep the best weights; without one, the last."""
    state.settle(config)
    best = directory / f"{config.name}.pt"
    if config.data.dev is None:
        if state.process.leads:
            checkpoint.save(best, config, state.best_model.state_dict(), results={"step": state.step})
        return
    if isinstance(state.best_model, Wav2Vec2Pretraining):
        found = contrastive.evaluate(state.best_model, config, config.data.dev, state.process)
        record = report.record(state.step, found)
        error = 1 - record["dev_accuracy"]
    else:
        assert isinstance(state.best_model, CtcNetwork)
        record = report.evaluated(state.step, evaluate(state.best_model, config, config.data.dev, state.process))
        error = record["dev_wer"]
    if state.process.leads and error < state.best_error:
        state.best_error = error
        checkpoint.save(best, config, state.best_model.state_dict(), results=record)
