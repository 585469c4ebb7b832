"""The state of a run: everything that a checkpoint holds and that resuming restores bit for bit.

Checkpoints are written between two steps of the optimiser, so there are no half-accumulated gradients to save. No
random generator keeps its state between steps: random numbers depend only on the seed, the step and the process
(`train.optimise`) or on the clip (`data.plan.Item.seed`). So there is no generator state to save, and a run may be
resumed with another number of processes.
"""

import logging
import math
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from carnelian_training import checkpoint
from carnelian_training.config_errors import ConfigError
from carnelian_training.distributed import Process
from carnelian_training.loop import finetune
from carnelian_training.loop.ema import Average
from carnelian_training.loop.optim import build_optimizer
from carnelian_training.models.blocks import Block
from carnelian_training.models.jasper import JasperConfig
from carnelian_training.models.masked import MaskedBatchNorm, use_gpu_kernels
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config
from carnelian_training.precision import allow_tf32
from carnelian_training.run_config import RunConfig

logger = logging.getLogger(__name__)

FIELDS = (
    *("epoch", "batch", "best_error", "rated_by", "evaluated_step"),
    *("skipped_clips", "skipped_steps", "skipped_in_a_row"),
)
"""The fields of :class:`State` that a checkpoint holds as they are."""
PARTS = (*FIELDS, "weights", "optimizer", "scaler", "milestones", "memory")
"""The keys of a checkpoint's `training` part."""
MOST_VERSIONS = 64
"""The most versions of a function that PyTorch compiles; its default is 8."""


@dataclass
class State:
    """The network, its optimiser, and the progress of the run."""

    model: nn.Module
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    average: Average | None
    process: Process
    step: int = 0
    epoch: int = 0
    batch: int = 0
    """The number of steps of the current epoch that are done."""
    best_error: float = math.inf
    """The smallest dev error so far: WER; 1 - accuracy in pre-training; perplexity for a language model."""
    rated_by: str | None = None
    """The digest of what `best_error` was measured on: the dev clips or sentences and, in pre-training, the task."""
    evaluated_step: int = 0
    """The step of the last evaluation."""
    milestones: set[int] = field(default_factory=set)
    """The steps whose checkpoints are never removed, including those from earlier configurations of the run."""
    memory: Tensor | None = None
    """A language model's memory of this process's streams: [layers, streams, tokens, width]."""
    skipped_clips: int = 0
    """The number of clips left out because they were unusable; a clip counts every time."""
    skipped_steps: int = 0
    """The number of steps skipped because loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    """The number of steps skipped since the last one that was taken."""
    saved_at: float = field(default_factory=time.monotonic)
    """The time of the last checkpoint, in seconds of this process's monotonic clock."""

    def __post_init__(self) -> None:
        self._network: nn.Module | None = None
        self._frozen: frozenset[int] = frozenset()
        self._statistics = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        self._kept = [buffer.clone() for buffer in self._statistics]

    @property
    def best_model(self) -> nn.Module:
        """The network that is evaluated and published: the moving average if there is one, otherwise `model`."""
        return self.model if self.average is None else self.average.model

    def prepare(self, config: RunConfig) -> nn.Module:
        """Return the network for the next step, with stages frozen, compiled and wrapped as the configuration says."""
        frozen = finetune.freeze(self.model, config, self.step)
        if self._network is None or frozen != self._frozen:
            network = compiled(self.model, self.process.device) if config.loop.compile else self.model
            self._network, self._frozen = self.process.parallel(network), frozen
        if self._kept:
            torch._foreach_copy_(self._kept, self._statistics)
        return self._network

    def took_step(self, config: RunConfig, with_clips: int) -> None:
        """Update batch-norm statistics and the moving average after a step of the optimiser.

        The statistics change by the mean of the processes' changes, so that all processes have the same. `with_clips`
        is the number of processes that had clips in this step.
        """
        self.skipped_in_a_row = 0
        if self.process.size > 1 and self._statistics and config.loop.batch_statistics == "process":
            # Only processes with clips have changed their statistics. They are averaged in every step: otherwise a
            # process that often has no clips would keep statistics close to those of the start.
            changes = torch.cat(torch._foreach_sub(self._statistics, self._kept))
            self.process.total(changes).div_(with_clips)
            torch._foreach_copy_(self._statistics, self._kept)
            sizes = [len(statistic) for statistic in self._statistics]
            torch._foreach_add_(self._statistics, changes.split_with_sizes(sizes))
        if self.average is not None:
            self.average.update(self.step)

    def skipped_step(self) -> None:
        """Undo the changes of a skipped step to batch-norm statistics, and count the step.

        A language model's memory is dropped, because it may not be finite either.
        """
        self.memory = None
        if self._kept:
            torch._foreach_copy_(self._statistics, self._kept)
        self.skipped_steps += 1
        self.skipped_in_a_row += 1

    def rate_by(self, digest: str | None, change: str) -> None:
        """Set the digest of the evaluation data; if it has changed, forget the best error, which no longer compares.

        `digest` is None without evaluation, when no weights are chosen. `change` says in the log what has changed.
        """
        if self.rated_by is not None and digest != self.rated_by:
            if digest is not None:
                logger.warning("%s: the best weights are chosen anew", change)
            self.best_error = math.inf
        self.rated_by = digest

    def restart_average(self) -> None:
        """Set the moving average, if there is one, to the current weights."""
        if self.average is not None:
            self.average.model.load_state_dict(self.model.state_dict())

    def evaluation_is_due(self, config: RunConfig) -> bool:
        """Return whether an evaluation is due after this step and has not been done."""
        is_planned = self.step % config.loop.evaluate_every_steps == 0 or self.step == config.loop.steps
        return is_planned and self.step != self.evaluated_step

    def checkpoint_is_due(self, config: RunConfig) -> bool:
        """Return whether a checkpoint is due after this step, apart from those around an evaluation."""
        every_steps = config.loop.checkpoint_every_steps
        is_planned = every_steps is not None and self.step % every_steps == 0
        return is_planned or self.step in config.loop.milestones

    def checkpoint_is_overdue(self, config: RunConfig) -> bool:
        """Return whether the last checkpoint is older than `loop.checkpoint_every_s`, by this process's clock."""
        every_s = config.loop.checkpoint_every_s
        return every_s is not None and time.monotonic() - self.saved_at > every_s

    def whole_memory(self) -> Tensor | None:
        """Gather the memory of all processes' streams, in the order of streams; every process has to call it."""
        if self.memory is None:
            return None
        memories = self.process.union({self.process.rank: self.memory.cpu()})
        # Process i has the streams i, i + processes, ...
        return torch.stack(list(memories.values()), dim=2).flatten(1, 2)

    def save(self, path: Path, config: RunConfig, memory: Tensor | None) -> None:
        """Write a checkpoint, whose `weights` are those of :attr:`best_model`.

        `memory` is that of all processes' streams, from :meth:`whole_memory`.
        """
        training = {
            "weights": None if self.average is None else self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "milestones": sorted(self.milestones),
            "memory": memory,
            **{name: getattr(self, name) for name in FIELDS},
        }
        checkpoint.save(path, config, self.best_model.state_dict(), results={"step": self.step}, training=training)

    def restore(self, content: dict[str, Any]) -> None:
        """Restore what :meth:`save` wrote; a moving average that the checkpoint lacks starts at its weights."""
        training = content["training"]
        self.model.load_state_dict(training["weights"] or content["weights"])
        if self.average is not None:
            self.average.model.load_state_dict(content["weights"])
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(training["optimizer"])
        for group, configured in zip(self.optimizer.param_groups, options, strict=True):
            group.update(configured)  # options of the configuration win over those that were saved
        if training["scaler"]:  # empty unless the run was in float16
            self.scaler.load_state_dict(training["scaler"])
        self.step, self.milestones = content["results"]["step"], set(training["milestones"])
        if (memory := training["memory"]) is not None:
            self.memory = memory[:, self.process.rank :: self.process.size].to(self.process.device)
        for name in FIELDS:
            setattr(self, name, training[name])


def new_state(config: RunConfig, process: Process) -> State:
    """Create the state before the first step, with random weights that are the same in every process.

    Raises:
        ValueError: The device does not support the precision or compiling the network, or it is far too large.
    """
    precision, device = config.loop.precision, process.device
    if precision == "bf16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            f"`loop.precision: bf16` needs an NVIDIA GPU of the Ampere generation or later, not {name}: use fp16"
        )
    is_emulated = precision == "bf16" and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    if is_emulated and process.leads:
        logger.warning(
            "`loop.precision: bf16` should have a CPU with AVX-512, but this one has AVX2 and emulates it, about ten "
            "times slower than fp32: set `loop.precision=fp32`"
        )
    # PyTorch 2.13: TorchInductor orders strides, and cannot where these networks' depend on the length of the batch.
    if config.loop.compile and device.type == "cpu" and isinstance(config.model, JasperConfig | Wav2Vec2Config):
        raise ConfigError(
            f"`loop.compile` must be false for {config.model.name} on a CPU, where TorchInductor cannot compile it, "
            "but is true: set `loop.compile=false`"
        )
    checkpoint.check_size(config, f"`model` of {config.name}")
    allow_tf32(precision)
    torch.manual_seed(config.loop.seed)
    model = checkpoint.build_network(config).to(device)
    if config.loop.depthwise == "triton" and device.type == "cuda" and not config.loop.compile:
        use_gpu_kernels(model, device)
    for module in model.modules():
        if isinstance(module, MaskedBatchNorm):
            module.shared = config.loop.batch_statistics == "shared" and process.size > 1
        if isinstance(module, Block):
            module.recompute = config.loop.recompute
    average = None if config.optimizer.ema is None else Average(model, config.optimizer.ema)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    return State(model, build_optimizer(config, model, process), scaler, average, process)


def compiled(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the same model, which is compiled at its first call.

    Raises:
        RuntimeError: There is no C++ compiler, which TorchInductor needs on a CPU.
    """
    names = [os.environ.get("CXX", "g++"), "clang++"]
    if device.type == "cpu" and not any(map(shutil.which, names)):
        raise RuntimeError(
            "`loop.compile` needs a C++ compiler, but none was found: install g++, set CXX, or set the option to false"
        )
    # Each kernel width and number of channels needs its own version of a sub-block's function. By default PyTorch
    # compiles 8 versions and runs the others uncompiled.
    torch._dynamo.config.cache_size_limit = MOST_VERSIONS  # an alias of `recompile_limit`, its name from PyTorch 2.7 on
    network: nn.Module = torch.compile(model, dynamic=True)  # type: ignore[assignment]
    return network
