"""The precisions that networks compute in, and how PyTorch is told."""

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
