"""The training run, top to bottom: clips -> batches -> loss -> step, with evaluation and checkpoints in between.

In: a :class:`Config` and a folder. Out, in that folder: `<name>.yaml` (the resolved configuration), `<name>-<step>.pt`
(all that resuming needs), `<name>.pt` (the best weights by dev WER) and what `report.py` writes.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from carnelian_training import checkpoint, finetune
from carnelian_training.augment import spec_augment, warp_frequency
from carnelian_training.config import Config, config_to_dict
from carnelian_training.defects import Limits
from carnelian_training.evaluate import evaluate
from carnelian_training.loading import Batch, load, plan_epoch, trainable
from carnelian_training.manifest import Clip, read_manifest
from carnelian_training.models.network import CtcNetwork
from carnelian_training.optim import build_optimizer, clip_gradients, learning_rate
from carnelian_training.report import Report

logger = logging.getLogger(__name__)


@dataclass
class State:
    """Where a run is: what a checkpoint holds and resuming restores."""

    model: CtcNetwork
    optimizer: Optimizer
    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches of the epoch that are done."""
    skipped: int = 0
    """How often a clip was left out of its batch because of what its file holds."""
    best_wer: float = float("inf")

    def save(self, path: Path, config: Config) -> None:
        """Write everything, the random state of dropout included."""
        training = {
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "batch": self.batch,
            "skipped": self.skipped,
            "best_wer": self.best_wer,
            "rng": torch.get_rng_state(),
        }
        checkpoint.save(path, config, self.model.state_dict(), results={"step": self.step}, training=training)

    def restore(self, path: Path) -> None:
        """Take over everything from a checkpoint that :meth:`save` wrote."""
        _, content = checkpoint.load(path)
        training = content["training"]
        self.model.load_state_dict(content["weights"])
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(training["optimizer"])
        for group, configured in zip(self.optimizer.param_groups, options, strict=True):
            group.update(configured)  # the configuration may have changed; what was saved must not win over it
        self.step, self.epoch, self.batch = content["results"]["step"], training["epoch"], training["batch"]
        self.skipped = training.get("skipped", 0)
        self.best_wer = training["best_wer"]
        torch.set_rng_state(training["rng"])


def train(config: Config, directory: Path) -> None:
    """Train until `config.loop.steps`; a folder that holds checkpoints is resumed from the newest.

    Raises:
        ValueError: There is nothing to train on.
    """
    clips = [clip for manifest in config.data.train for clip in read_manifest(manifest.path) * manifest.repeat]
    clips = trainable(clips, config)
    if not clips:
        raise ValueError("`data.train` must name manifests with usable clips, but none is left; see the warnings above")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{config.name}.yaml").write_text(yaml.safe_dump(config_to_dict(config), sort_keys=False))

    torch.manual_seed(config.loop.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = checkpoint.build_model(config).to(device)
    state = State(model, build_optimizer(config, model))
    saved = _checkpoints(directory, config)
    if not saved:
        finetune.start_from_checkpoint(model, config)
    else:
        state.restore(saved[-1])
        logger.info("resuming %s at step %d", saved[-1], state.step)
    if state.step >= config.loop.steps:
        logger.info("nothing to do: `loop.steps` is %d", config.loop.steps)
        return

    report = Report(directory, config, state.step)
    for batch in batches(clips, config, state):
        loss, grad_norm, lr = optimise(state, batch, config)
        state.step += 1
        report.add(loss, len(batch.items), sum(item.duration_s for item in batch.items))
        if state.step % config.loop.log_every_steps == 0:
            report.log(state.step, state.epoch, lr=lr, grad_norm=grad_norm.item(), skipped_clips=state.skipped)
        if state.step % config.loop.evaluate_every_steps == 0 or state.step == config.loop.steps:
            look(state, config, directory, report)
            report.restart_clock()
        if state.step >= config.loop.steps:
            break
    report.close()


def batches(clips: list[Clip], config: Config, state: State) -> Iterator[Batch]:
    """Endless batches, from where `state` is, which is kept up to date."""
    while True:
        plan = plan_epoch(clips, config, state.epoch)
        for batch in load(plan[state.batch :], config.features, config.data.num_threads, skip=Limits.of(config)):
            state.batch += 1
            state.skipped += len(batch.skipped)
            if batch.items:
                yield batch
        state.epoch, state.batch = state.epoch + 1, 0


def optimise(state: State, batch: Batch, config: Config) -> tuple[Tensor, Tensor, float]:
    """One step: the loss per character, the gradient norm and the learning rate."""
    state.model.train()
    finetune.freeze(state.model, config, state.step)
    device = next(state.model.parameters()).device
    features = warp_frequency(batch.features, config.augment, batch.seeds)
    features = spec_augment(features, batch.lengths, config.augment, batch.seeds).to(device)
    targets, target_lengths = batch.targets(config.labels)
    with torch.autocast(device.type, torch.bfloat16, enabled=config.loop.precision == "bf16"):
        log_probs, lengths = state.model(features, batch.lengths.to(device))
    loss = F.ctc_loss(
        log_probs.transpose(0, 1),
        targets.to(device),
        lengths,
        target_lengths.to(device),
        blank=len(config.labels),
        reduction="sum",
    ) / target_lengths.sum().to(device)
    lr = learning_rate(config.optimizer, state.step, config.loop.steps)
    for group in state.optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    state.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    grad_norm = clip_gradients(state.model, config.optimizer.max_grad_norm)
    state.optimizer.step()
    return loss.detach(), grad_norm, lr


def look(state: State, config: Config, directory: Path, report: Report) -> None:
    """Evaluate on the dev manifest, write a checkpoint, keep the best weights and the newest checkpoints."""
    if config.data.dev is not None:
        record = report.evaluated(state.step, evaluate(state.model, config, config.data.dev))
        if record["dev_wer"] < state.best_wer:
            state.best_wer = record["dev_wer"]
            checkpoint.save(directory / f"{config.name}.pt", config, state.model.state_dict(), results=record)
    state.save(directory / f"{config.name}-{state.step:08d}.pt", config)
    for old in _checkpoints(directory, config)[: -config.loop.keep_last]:
        old.unlink()


def _checkpoints(directory: Path, config: Config) -> list[Path]:
    return sorted(directory.glob(f"{config.name}-{'[0-9]' * 8}.pt"))
