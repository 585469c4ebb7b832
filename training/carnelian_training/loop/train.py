"""The training run, top to bottom: items -> batches -> loss -> step, with evaluation and checkpoints in between.

Input: a configuration and a folder. Output, in that folder: `<name>.yaml` (the resolved configuration),
`<name>-<step>.pt` (checkpoints to resume from), `<name>.pt` (the best weights: by dev WER, in pre-training by accuracy,
for a language model by perplexity; without dev data, the last weights) and the files of `report.py`.
"""

import logging
import math
import signal
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from carnelian_training import checkpoint
from carnelian_training.distributed import joined
from carnelian_training.garbage import thawed
from carnelian_training.interruption import Interruption
from carnelian_training.language_models.config import LanguageModelConfig
from carnelian_training.language_models.task import LanguageModelling
from carnelian_training.loop import finetune
from carnelian_training.loop.optim import clip_gradients, learning_rate
from carnelian_training.loop.recognition import Recognition
from carnelian_training.loop.report import Report
from carnelian_training.loop.run_checkpoints import resume, write_checkpoint
from carnelian_training.loop.run_folder import held, write_config
from carnelian_training.loop.state import State, new_state
from carnelian_training.loop.task import Item, Share, Task
from carnelian_training.run_config import RunConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """The result of a step, the same in all processes."""

    loss: float
    """The loss per character; in pre-training per hidden frame, for a language model per token."""
    grad_norm: float
    lr: float
    measured: Mapping[str, float] = field(default_factory=dict)
    """Further figures to log, if the step is logged."""

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are finite; otherwise the step was skipped."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def train(config: RunConfig, directory: Path, source: Path | None = None) -> None:
    """Train until `config.loop.steps`; if the folder holds checkpoints, resume from the newest.

    Under `torchrun`, this is one of the processes that train together. `source` is the file that `config` was read
    from. It is never overwritten, even if it is the folder's `<name>.yaml`. PyTorch's seed is set to `loop.seed`, and
    progress is logged at INFO.

    Raises:
        ValueError: There is nothing to train on, another run works in the folder, or its checkpoints do not fit the
            configuration.
        RuntimeError: A dev clip is bad, all training clips are bad, or too many steps in a row were not finite.
        KeyboardInterrupt: Ctrl-C ended the run after a checkpoint.
        SystemExit: Another signal did; the exit status is 128 plus its number.
    """
    task: Task = LanguageModelling(config) if isinstance(config, LanguageModelConfig) else Recognition(config)
    with (
        joined() as process,
        held(directory) if process.leads else nullcontext(),
        Interruption() as interruption,
        thawed(),
    ):
        state = new_state(config, process)
        if not resume(state, config, directory):
            finetune.start_from_checkpoint(state.model, config)
            state.restart_average()
        is_due = state.evaluation_is_due(config)  # an evaluation that the run was stopped before, or that failed
        if state.step >= config.loop.steps and not is_due:
            logger.info("nothing to do: `loop.steps` is %d", config.loop.steps)
            return
        task.prepare(state)
        if process.leads:
            write_config(config, directory, source)
        report = Report(directory, config, state.step, state.evaluated_step, enabled=process.leads)
        if is_due:
            evaluate(state, task, config, directory, report)
        stop = False
        for share in task.shares(state) if state.step < config.loop.steps else ():
            outcome = optimise(state, share, config)
            if outcome is None:
                continue
            state.step += 1
            report.add(outcome.loss, task.amounts(share.items))
            if state.step % config.loop.log_every_steps == 0:
                skipped = {"skipped_clips": state.skipped_clips, "skipped_steps": state.skipped_steps}
                report.log(
                    state.step, state.epoch, lr=outcome.lr, grad_norm=outcome.grad_norm, **outcome.measured, **skipped
                )
            stop, is_overdue = process.any(interruption.signal is not None, state.checkpoint_is_overdue(config))
            if not stop and state.evaluation_is_due(config):
                evaluate(state, task, config, directory, report)
            elif stop or is_overdue or state.checkpoint_is_due(config):
                write_checkpoint(state, config, directory)
            if stop or state.step >= config.loop.steps:
                break
        report.close()
    if stop:
        received = interruption.signal or signal.SIGTERM  # None if another process received it
        logger.warning("stopped by %s after step %d; the same command goes on from there", received.name, state.step)
        # A notebook or an interactive Python goes on after the one, and ends by the other.
        raise KeyboardInterrupt if received == signal.SIGINT else SystemExit(128 + received)


def optimise(state: State, share: Share, config: RunConfig) -> Outcome | None:
    """Take one step of the optimiser over all parts of the share; if it is not finite, leave the weights unchanged.

    Returns:
        The result of the step; None if no process had a usable item, which does not count as a step.

    Raises:
        RuntimeError: Too many steps in a row were not finite.
    """
    process = state.process
    network = state.prepare(config)
    # Dropout depends only on seed, step and process, so that a resumed run draws the same.
    torch.manual_seed(zlib.crc32(f"{config.loop.seed}/{state.step}/{process.rank}".encode()))
    lr = learning_rate(config, state.step)
    for group in state.optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    state.optimizer.zero_grad()
    objective = share.objective
    planned = objective.planned(share.items)
    counts = torch.zeros(2, dtype=torch.int64)  # weight (characters, hidden frames or tokens); clips left out
    total = torch.zeros((), device=process.device)
    losses: list[tuple[Sequence[Item], Tensor]] = []
    for part, batch in enumerate(objective.batches(share.batches, share.parts), start=1):
        with process.gradient_sync(network, part == share.parts):
            item_losses, weight = objective.losses(network, batch)
            loss = item_losses.sum() / planned
            # PyTorch averages gradients over the processes, but the gradient of the mean over characters is their sum.
            state.scaler.scale(loss * process.size).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
        losses.append((batch.items, item_losses.detach()))
        counts += torch.tensor([weight, len(batch.skipped)])
    has_clips = torch.tensor([any(items for items, _ in losses)])
    weights, left_out, with_clips = process.total(torch.cat([counts, has_clips])).tolist()
    state.skipped_clips += left_out
    if not weights:
        return None
    correction = planned / weights  # only now is it known which clips could not be read
    state.scaler.unscale_(state.optimizer)
    grad_norm = clip_gradients(state.model, config.optimizer.max_grad_norm, correction)
    loss_value, norm_value = torch.stack(
        [process.total(total) * correction, grad_norm]
    ).tolist()  # the only place where a step waits for the device
    measured = objective.measured() if (state.step + 1) % config.loop.log_every_steps == 0 else {}
    outcome = Outcome(loss_value, norm_value, lr, measured)
    if outcome.is_finite:
        state.optimizer.step()
        state.took_step(config, with_clips)
    else:
        not_finite = [
            item for items, values in losses for item, value in zip(items, values, strict=False) if not value.isfinite()
        ]
        skip(state, outcome, not_finite, config)
    state.scaler.update()
    return outcome


def skip(state: State, outcome: Outcome, items: Sequence[Item], config: RunConfig) -> None:
    """Skip a step that was not finite: undo its forward pass, log it, and give up after too many in a row.

    `items` are those of this process whose own loss was not finite.

    Raises:
        RuntimeError: Too many steps in a row were skipped.
    """
    state.skipped_step()
    found = f"loss {outcome.loss:.4g}, gradient norm {outcome.grad_norm:.4g}"
    names = "".join(f"\n  not finite: {item.title}" for item in items)
    # With float16, skipped steps are normal: they are how the gradient scaler finds its scale.
    level = logging.INFO if state.scaler.is_enabled() and not names else logging.WARNING
    logger.log(level, "step %d skipped: %s%s", state.step + 1, found, names)
    if state.skipped_in_a_row > config.loop.max_skipped_steps:
        raise RuntimeError(
            f"loss and gradient must be finite, but were not in {state.skipped_in_a_row} steps in a row "
            f"(now {found}, learning rate {outcome.lr:.3g}); lower `optimizer.lr`, set `optimizer.max_grad_norm`, or "
            "look at what the log names"
        )


def evaluate(state: State, task: Task, config: RunConfig, directory: Path, report: Report) -> None:
    """Evaluate, between two checkpoints; keep the weights if they are the best.

    They are written to `<name>.pt` if no others had less error, it is gone, or there is no dev data. The first
    checkpoint is there because an evaluation may take hours, fail or be killed; the second has its result.
    """
    write_checkpoint(state, config, directory)
    with report.paused():
        finding = task.evaluate(state, report)
        best = directory / f"{config.name}.pt"
        if state.process.leads and (finding is None or finding.error < state.best_error or not best.exists()):
            results = {"step": state.step} if finding is None else finding.record
            checkpoint.save(best, config, state.best_model.state_dict(), results=results)
            if finding is not None:
                # No error is below NaN, so weights rated by it would stay the best for ever.
                state.best_error = math.inf if math.isnan(finding.error) else finding.error
        state.evaluated_step = state.step
    write_checkpoint(state, config, directory)
