"""What a network is exported for: a file format, a precision, what runs it, and how it uses its machine."""

from dataclasses import dataclass, field
from pathlib import Path

from carnelian_export.tuning import Tuning, check_stages

FORMATS = {"onnx": ("fp32", "fp16", "int8"), "tensorrt": ("fp32", "fp16", "bf16")}
"""Each file format and its precisions."""
PROVIDERS = ("cuda", "tensorrt")
"""ONNX Runtime's execution providers for GPUs."""


class TargetError(ValueError):
    """A format, precision or provider that does not exist or cannot hold the network, or options that clash."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One way to export a network.

    Raises:
        TargetError: There is no such way; the message names the command-line option to change.
        TuningError: The tuning names a stage that does not exist.
    """

    format: str = "onnx"
    precision: str = "fp32"
    provider: str | None = None
    """The execution provider of ONNX Runtime on GPUs; without one, an instance on a GPU takes CUDA."""
    int8_clips: Path | None = None
    """A manifest of clips to measure int8's scales on; required for int8, refused for other precisions."""
    timing_cache: Path | None = None
    """The file of TensorRT's kernel timings, read if it exists, and written for the next export on the same GPU."""
    tuning: Tuning = field(default_factory=dict)
    """Settings of the stages that differ from the defaults, for one machine."""

    @property
    def is_for_gpus(self) -> bool:
        """Whether only a GPU gains by it."""
        return self.format == "tensorrt" or self.precision == "fp16" or self.provider is not None

    def __post_init__(self) -> None:
        check_stages(self.tuning)
        _check("--format", self.format, tuple(FORMATS))
        _check(f"--precision of {self.format}", self.precision, FORMATS[self.format])
        if self.provider is not None:
            _check("--execution-provider", self.provider, PROVIDERS)
            _check_only("--execution-provider", "onnx", self.format)
        if self.provider is not None and self.precision == "int8":
            raise TargetError("--precision int8 is for CPUs, and has no --execution-provider")
        if (self.precision == "int8") != (self.int8_clips is not None):
            found = f"is {self.int8_clips} for {self.precision}" if self.int8_clips else "is not given"
            raise TargetError(
                f"--int8-clips must name a manifest of clips for --precision int8, and is for that alone, but {found}"
            )
        if self.timing_cache is not None:
            _check_only("--timing-cache", "tensorrt", self.format)
            if not self.timing_cache.parent.is_dir():  # now, not after an engine has been built for minutes
                raise TargetError(
                    f"--timing-cache must be a file in a folder that exists, but {self.timing_cache.parent} does not"
                )


def _check(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise TargetError(f"{option} must be one of {', '.join(known)}, but is {value}")


def _check_only(option: str, owner: str, found: str) -> None:
    if found != owner:
        raise TargetError(f"{option} is for --format {owner}, but that is {found}")
