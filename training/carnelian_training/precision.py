"""The precisions in which networks compute, and their settings in PyTorch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The type of tensors for each precision; tf32 is float32 that is multiplied with fewer bits."""


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context in which matrix products and convolutions use the type of `precision`."""
    dtype = DTYPES[precision]
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def allow_tf32(precision: str) -> None:
    """Allow a GPU to multiply float32 with fewer bits (TF32), unless `precision` is fp32."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


@contextmanager
def full_precision() -> Iterator[None]:
    """Turn TF32 off within the context, so that evaluation on a GPU gives the results of a CPU or a server.

    PyTorch's default is TF32 in convolutions.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    allow_tf32("fp32")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
