"""What a network is exported for: a file format, a precision, and what runs it."""

from dataclasses import dataclass

FORMATS = {"onnx": ("fp32", "fp16")}
"""Each file format and its precisions."""
PROVIDERS = ("cuda",)
"""ONNX Runtime's execution providers that can be asked for on GPUs. Without: what the backend takes by itself."""


class TargetError(ValueError):
    """There is no such format, precision or provider, or they do not go together."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One way to export a network; Raises TargetError if there is none such."""

    format: str = "onnx"
    precision: str = "fp32"
    provider: str | None = None

    def __post_init__(self) -> None:
        _check("--format", self.format, tuple(FORMATS))
        _check(f"--precision of {self.format}", self.precision, FORMATS[self.format])
        if self.provider is not None:
            _check("--execution-provider", self.provider, PROVIDERS)


def _check(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise TargetError(f"{option} must be one of {', '.join(known)}, but is {value}")
