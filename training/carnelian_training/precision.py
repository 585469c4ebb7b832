"""The precisions that networks compute in, and how PyTorch is told."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By name; tf32 is float32 that is multiplied in fewer bits."""


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Where matrix products and convolutions are of a precision's type."""
    dtype = DTYPES[precision]
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def allow_tf32(precision: str) -> None:
    """Let a GPU multiply float32 in fewer bits, in every precision but fp32 itself."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


@contextmanager
def full_precision() -> Iterator[None]:
    """Within it a GPU multiplies float32 as it is, for an evaluation that says what a CPU's or a server's says.

    PyTorch's own default is TF32 in convolutions.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    allow_tf32("fp32")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
