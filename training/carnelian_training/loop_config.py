"""What every run has in its configuration, of a recogniser or of a language model: start, optimiser, loop."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from carnelian_training.checks import check_at_least_one, check_not_negative, check_positive, check_probability


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which optimiser, and the learning rate over the steps: linear warm-up, hold, then the schedule's decay."""

    name: Literal["adamw", "muon", "novograd"] = "novograd"
    lr: float = 0.01
    lr_batch_s: float | None = None
    """The `data.batch_s` that `lr` is meant for; with another one it is scaled by the square root of their ratio, as
    suits optimisers that normalise gradients (Malladi et al. 2022, arXiv:2205.10287). None: `lr` as it is."""
    betas: tuple[float, float] = (0.95, 0.0)
    eps: float = 1e-8
    """Of AdamW, and of Muon for what is no matrix, as the betas are."""
    weight_decay: float = 1e-3
    warmup_steps: int = 1000
    hold_steps: int = 0
    schedule: Literal["cosine", "linear", "exponential", "tri_stage"] = "cosine"
    """Cosine and linear fall to `min_lr` at `loop.steps`; exponential by `decay` every `decay_steps`, but not below
    `min_lr`; tri-stage, fairseq's, exponentially to `final_share` of `lr` at `loop.steps`."""
    start_share: float = 0.0
    """Of `lr`, where the warm-up begins."""
    final_share: float = 0.05
    decay: float = 0.981
    """As in NVIDIA's recipes, where it is per epoch."""
    decay_steps: int = 1000
    min_lr: float = 1e-5
    max_grad_norm: float | None = None
    ema: float | None = None
    """Decay of an average of the weights over the steps, for example 0.999, which is then what is evaluated, called the
    best and published; none: no average."""

    def __post_init__(self) -> None:
        if self.name != "novograd" and not 0 < self.betas[1] < 1:
            raise ValueError(
                f"`betas` must suit {self.name}, for example [0.9, 0.98], but are {list(self.betas)} (the defaults are "
                f"NovoGrad's, that of `lr` too: here it is {self.lr:g}, where 0.001 is usual)"
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
        if self.schedule != "tri_stage" and self.min_lr > self.lr:
            raise ValueError(f"`min_lr` must be at most `lr`, {self.lr:g}, but is {self.min_lr:g}")
        check_positive(self, "lr", "lr_batch_s", "decay_steps", "max_grad_norm", "eps")
        check_not_negative(self, "weight_decay", "warmup_steps", "hold_steps", "min_lr")


def _check_freezes(value: object) -> object:
    """In words of our own, for pydantic would name the kinds that a value might have been."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(part, (dict, FreezeConfig)) for part in value):
        raise ValueError("must be a list of sections, such as `[{stages: body, until_step: 1000}]`")
    return value


def _check_stages(value: object) -> object:
    if value != "body" and not (isinstance(value, (list, tuple)) and all(type(stage) is int for stage in value)):
        raise ValueError("must be `body`, everything but the head, or a list of stages' numbers")
    return value


@dataclass(frozen=True, kw_only=True)
class FreezeConfig:
    """Stages that do not learn for a while. Their batch norms keep their statistics; their dropout stays on."""

    stages: Annotated[tuple[int, ...] | Literal["body"], BeforeValidator(_check_stages)]
    """Positions in `model.stages`, or all of them: everything but the head. Those of wav2vec 2.0 are its extractor (0),
    the input of its transformer (1), and the transformer's layers."""
    until_step: int | None = None
    """They learn from this step on; none: never."""


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Fine-tuning: where the weights of a new run come from, and how fast each part moves away from there."""

    checkpoint: Path | None = None
    """Ours, published ones too. `model`, `labels` and `features` are its own where the YAML does not give them; a
    `model` or `features` without `name` is laid over its own."""
    freeze: Annotated[tuple[FreezeConfig, ...], BeforeValidator(_check_freezes)] = ()
    stage_lr_decay: float = 1.0
    """The head learns at the full rate, the last stage at this factor of it, the one before at its square, ..."""

    def __post_init__(self) -> None:
        if not 0 < self.stage_lr_decay <= 1:
            raise ValueError(f"`stage_lr_decay` must be above 0 and at most 1, but is {self.stage_lr_decay}")
        if self.freeze and self.checkpoint is None:
            raise ValueError("`freeze` must come with a `checkpoint`, for random weights have to learn")


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long to train, how often to look."""

    steps: int = 100_000
    seed: int = 1
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Of matrix products and convolutions; the rest is float32. tf32 is fp32 on devices without it."""
    compile: bool = False
    """Let `torch.compile` fuse the network; needs a C++ compiler, and Triton on GPUs."""
    depthwise: Literal["pytorch", "triton"] = "triton"
    """What computes depthwise convolutions on a GPU: kernels of ours in the Triton language
    (`models/depthwise_gpu.py`), or PyTorch's, of cuDNN, with which QuartzNet 15x5 trains half as fast on an H100. With
    `compile` they are PyTorch's. Without meaning for networks that have none."""
    recompute: bool = False
    """Keep only the inputs of blocks for the backward pass and compute the rest again: less memory, a third more
    time. Of Jasper and QuartzNet alone, as `batch_statistics` is."""
    batch_statistics: Literal["process", "shared", "frozen"] = "process"
    """What batch norms see in training: each process its own clips, all clips of all processes (of one part, where a
    step is taken in parts: see `data.device_batch_s`), or the statistics of the checkpoint, which then stay."""
    max_skipped_steps: int = 50
    """A step whose loss or gradient is not finite changes nothing; more than this many in a row end the run."""
    log_every_steps: int = 50
    evaluate_every_steps: int = 1000
    checkpoint_every_steps: int | None = None
    """None: at each evaluation. SIGTERM and Ctrl-C write one in any case."""
    checkpoint_every_s: float | None = None
    """And whenever the last one is older than this."""
    keep_last: int = 2
    milestones: tuple[int, ...] = ()
    """Steps whose checkpoints are kept for ever."""

    def __post_init__(self) -> None:
        check_at_least_one(
            self, "steps", "log_every_steps", "evaluate_every_steps", "checkpoint_every_steps", "keep_last"
        )
        if not -(2**63) <= self.seed < 2**64:  # as PyTorch takes them
            raise ValueError(f"`seed` must be at least -2^63 and below 2^64, but is {self.seed}")
        if early := [step for step in self.milestones if step < 1]:
            raise ValueError(f"`milestones` must be steps, at least 1, but hold {early}")
        check_positive(self, "checkpoint_every_s")
        check_not_negative(self, "max_skipped_steps")


LOOP_OF_STACKS = ("recompute", "batch_statistics")
"""Fields of :class:`LoopConfig` for Jasper and QuartzNet alone. Not `depthwise`, which had another default once:
resolved configurations and checkpoints of all models hold that."""


def check_name(name: str) -> None:
    """A run's name, which files carry."""
    if name in {"", ".."} or Path(name).name != name:
        raise ValueError(f"`name` must be fit to name files, without folders, but is {name!r}")


def check_stages(init: InitConfig, num_stages: int) -> None:
    """Only stages that there are can be frozen."""
    for freeze in init.freeze:
        absent = [i for i in freeze.stages if i not in range(num_stages)] if freeze.stages != "body" else []
        if absent:
            raise ValueError(f"`init.freeze` must name stages of 0 to {num_stages - 1}, but names {absent}")
