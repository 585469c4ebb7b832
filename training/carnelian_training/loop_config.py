"""The parts of the configuration that recognisers and language models share: start, optimiser, loop."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from carnelian_training.checks import (
    GivenPath,
    check_at_least_one,
    check_no_controls,
    check_not_negative,
    check_positive,
    check_probability,
)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimiser and the learning rate schedule: linear warm-up, hold, then decay."""

    name: Literal["adamw", "muon", "novograd"] = "novograd"
    lr: float = 0.01
    lr_batch_s: float | None = None
    """The `data.batch_s` that `lr` and `min_lr` are meant for. With another `data.batch_s`, they are scaled by the
    square root of their ratio, which suits optimisers that normalise gradients (Malladi et al. 2022,
    arXiv:2205.10287). None: no scaling."""
    betas: tuple[float, float] = (0.95, 0.0)
    eps: float = 1e-8
    """The term that avoids division by zero; Muon uses it, like `betas`, for parameters other than matrices."""
    weight_decay: float = 1e-3
    warmup_steps: int = 1000
    hold_steps: int = 0
    schedule: Literal["cosine", "linear", "exponential", "tri_stage"] = "cosine"
    """The decay of the learning rate. `cosine` and `linear` fall to `min_lr` at `loop.steps`; `exponential` falls by
    the factor `decay` every `decay_steps`, but not below `min_lr`; `tri_stage`, as in fairseq, falls exponentially to
    `final_share` of `lr` at `loop.steps`."""
    start_share: float = 0.0
    """The learning rate at the start of the warm-up, as a share of `lr`."""
    final_share: float = 0.05
    """The learning rate at `loop.steps`, as a share of `lr`, with `tri_stage`."""
    decay: float = 0.981
    """The factor of the `exponential` schedule per `decay_steps`. NVIDIA's recipes have this value per epoch."""
    decay_steps: int = 1000
    min_lr: float = 1e-5
    max_grad_norm: float | None = None
    ema: float | None = None
    """The decay of an exponential moving average of the weights, for example 0.999. The average is then evaluated,
    compared and published in place of the weights. None: no average."""

    def __post_init__(self) -> None:
        if self.name != "novograd" and not 0 < self.betas[1] < 1:
            default = OptimizerConfig.lr
            of_lr = f", that of `lr` too: here it is {default:g}, where 0.001 is usual" if self.lr == default else ""
            raise ValueError(
                f"`betas` must suit {self.name}, for example [0.9, 0.98], but are {list(self.betas)} (the defaults are "
                f"NovoGrad's{of_lr})"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"`betas` must be at least 0 and below 1, but are {list(self.betas)}")
        for name in ("decay", "ema"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ValueError(f"`{name}` must lie between 0 and 1, but is {value}")
        check_probability(self, "start_share")
        if not 0 < self.final_share <= 1:
            raise ValueError(f"`final_share` must be above 0 and at most 1, but is {self.final_share}")
        check_positive(self, "lr", "lr_batch_s", "decay_steps", "max_grad_norm", "eps")
        check_not_negative(self, "weight_decay", "warmup_steps", "hold_steps", "min_lr")
        if self.schedule != "tri_stage" and self.min_lr > self.lr:
            raise ValueError(f"`min_lr` must be at most `lr`, {self.lr:g}, but is {self.min_lr:g}")


def _check_freezes(value: object) -> object:
    """Check the type here, because pydantic's own message would list the types of the union."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(part, (dict, FreezeConfig)) for part in value):
        raise ValueError("must be a list of sections, such as `[{stages: body, until_step: 1000}]`")
    return value


def _check_stages(value: object) -> object:
    if value != "body" and not (isinstance(value, (list, tuple)) and all(type(stage) is int for stage in value)):
        raise ValueError("must be `body`, everything but the head, or a list of stages' numbers")
    return value


@dataclass(frozen=True, kw_only=True)
class FreezeConfig:
    """Stages that are frozen for a number of steps. Their batch norms keep their statistics; their dropout stays on."""

    stages: Annotated[tuple[int, ...] | Literal["body"], BeforeValidator(_check_stages)]
    """The positions of the stages in `model.stages`, or `body`, everything but the head. The stages of wav2vec 2.0 are
    its extractor (0), the input of its transformer (1), and the transformer's layers."""
    until_step: int | None = None
    """The first step at which the stages learn. None: they never learn."""

    def __post_init__(self) -> None:
        check_not_negative(self, "until_step")


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """The start of a run: a checkpoint to fine-tune, and which parts learn when and how fast."""

    checkpoint: GivenPath | None = None
    """The Carnelian checkpoint to start from, of a run or published. It gives `model`, `labels` and `features` if the
    YAML file does not; a `model` or `features` without `name` changes single fields of the checkpoint's."""
    freeze: Annotated[tuple[FreezeConfig, ...], BeforeValidator(_check_freezes)] = ()
    stage_lr_decay: float = 1.0
    """The factor on the learning rate per stage below the head: the head learns at the full rate, the last stage at
    this factor of it, the stage before at its square, and so on."""

    def __post_init__(self) -> None:
        if not 0 < self.stage_lr_decay <= 1:
            raise ValueError(f"`stage_lr_decay` must be above 0 and at most 1, but is {self.stage_lr_decay}")
        if self.freeze and self.checkpoint is None:
            raise ValueError("`freeze` must come with a `checkpoint`, for random weights have to learn")


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The length and precision of training, and how often to log, evaluate and write checkpoints."""

    steps: int = 100_000
    seed: int = 1
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """The precision of matrix products and convolutions; the rest is float32. On devices without tf32, it is fp32."""
    compile: bool = False
    """Whether `torch.compile` fuses the network; needs a C++ compiler, and Triton on GPUs. Not with
    `recompute`, and on a CPU not for Jasper and wav2vec 2.0."""
    depthwise: Literal["pytorch", "triton"] = "triton"
    """The kernels of depthwise convolutions on a GPU: Carnelian's own in the Triton language
    (`models/depthwise_gpu.py`), or PyTorch's (cuDNN), with which QuartzNet 15x5 trains half as fast on an H100. With
    `compile` they are always PyTorch's. Networks without depthwise convolutions ignore this."""
    recompute: bool = False
    """Whether only the inputs of blocks are kept for the backward pass and the rest is computed again: less memory, a
    third more time. Only for Jasper and QuartzNet."""
    batch_statistics: Literal["process", "shared", "frozen"] = "process"
    """The statistics of batch norms in training: `process` computes them over each process's own clips, `shared` over
    the clips of all processes (in a step of several parts, of one part: see `data.device_batch_s`), and `frozen` keeps
    those of the checkpoint. Only for Jasper and QuartzNet."""
    max_skipped_steps: int = 50
    """The most steps in a row that may be skipped because loss or gradient is not finite; more end the run."""
    log_every_steps: int = 50
    evaluate_every_steps: int = 1000
    checkpoint_every_steps: int | None = None
    """The number of steps between checkpoints beside those that are written before and after each evaluation, and on
    SIGTERM and Ctrl-C. None: no others."""
    checkpoint_every_s: float | None = None
    """The age in seconds of the last checkpoint after which another one is written. None: no limit."""
    keep_last: int = 2
    milestones: tuple[int, ...] = ()
    """The steps at which checkpoints are written that are never removed."""

    def __post_init__(self) -> None:
        check_at_least_one(
            self, "steps", "log_every_steps", "evaluate_every_steps", "checkpoint_every_steps", "keep_last"
        )
        if not -(2**63) <= self.seed < 2**64:  # the range that PyTorch accepts
            raise ValueError(f"`seed` must be at least -2^63 and below 2^64, but is {self.seed}")
        if early := [step for step in self.milestones if step < 1]:
            raise ValueError(f"`milestones` must be steps, at least 1, but hold {early}")
        if self.compile and self.recompute:
            raise ValueError(
                "`compile` must be false with `recompute`, whose blocks `torch.compile` cannot compile, but both are "
                "true: choose one"
            )
        check_positive(self, "checkpoint_every_s")
        check_not_negative(self, "max_skipped_steps")


LOOP_OF_STACKS = ("recompute", "batch_statistics")
"""The fields of :class:`LoopConfig` only for Jasper and QuartzNet. `depthwise` is not listed: resolved configurations
and checkpoints of all models have it with an earlier default."""


def check_name(name: str) -> None:
    """Check that a run's name can be part of file names."""
    if name in {"", ".."} or Path(name).name != name:
        raise ValueError(f"`name` must be fit to name files, without folders, but is {name!r}")
    check_no_controls("name", name)


def check_stages(init: InitConfig, num_stages: int) -> None:
    """Check that `init.freeze` names only stages that the network has."""
    for freeze in init.freeze:
        absent = [i for i in freeze.stages if i not in range(num_stages)] if freeze.stages != "body" else []
        if absent:
            raise ValueError(f"`init.freeze` must name stages of 0 to {num_stages - 1}, but names {absent}")
