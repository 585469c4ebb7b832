"""Slaney's mel scale (Auditory Toolbox): linear below 1 kHz, which is 15 mel, and logarithmic above."""

import math

import torch
from torch import Tensor

_BREAK_HZ, _BREAK_MEL, _MEL_PER_E = 1000.0, 15.0, 27 / math.log(6.4)


def to_mel(hz: Tensor) -> Tensor:
    """Convert frequencies in Hz to the Slaney mel scale."""
    logarithmic = _BREAK_MEL + _MEL_PER_E * (hz.clamp(min=_BREAK_HZ) / _BREAK_HZ).log()
    return torch.where(hz < _BREAK_HZ, hz * _BREAK_MEL / _BREAK_HZ, logarithmic)


def to_hz(mel: Tensor) -> Tensor:
    """Convert values of the Slaney mel scale to frequencies in Hz."""
    logarithmic = _BREAK_HZ * ((mel - _BREAK_MEL) / _MEL_PER_E).exp()
    return torch.where(mel < _BREAK_MEL, mel * _BREAK_HZ / _BREAK_MEL, logarithmic)
