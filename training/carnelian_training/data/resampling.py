"""Resampling in a DALI graph, without aliasing."""

from math import pi
from typing import Any

from nvidia.dali import fn, math, types
from nvidia.dali.pipeline import DataNode

REACH = 48
"""Half of the filter's length, in samples of the output."""
LONGEST_REACH = 32 * REACH
"""The same in samples of the recording, at most: up to 512 kHz the filter has its full length."""
# From DALI 2 on, the operator is no longer experimental, and warns under its old name.
filter_of = fn.filter if hasattr(fn, "filter") else fn.experimental.filter  # type: ignore[attr-defined]  # no stub


def low_pass(signal: DataNode, rate_hz: Any, output_hz: Any) -> DataNode:
    """Add to a DALI graph the filter against aliasing that `fn.audio_resample` lacks.

    Without it, what a recording at 48 kHz has at 11 kHz is heard at 5 kHz, as loud as it was. This is a windowed sinc:
    a filter that passes all up to 0.9 of half of `output_hz` (-0.1 dB), and of what lies above 1.02 of it nothing
    (-75 dB). A recording at `output_hz` or a lower rate stays as it is.
    """
    step = math.min(output_hz / rate_hz, 1.0)
    needed = fn.cast(math.min(REACH / step, LONGEST_REACH) * (step < 1.0), dtype=types.INT32)
    reach = fn.reshape(needed, shape=[1])  # DALI 1 slices by no scalars
    # Not quite whole numbers, as sin(x) / x has no value at 0.
    places = types.Constant([i + 1e-3 for i in range(-LONGEST_REACH, LONGEST_REACH + 1)], device="cpu")
    place = fn.slice(places, start=LONGEST_REACH - reach, shape=2 * reach + 1, axes=[0])
    x, turn = place * step * (0.94 * pi), place * (pi / (reach + 1))
    taps = math.sin(x) / x * (0.42 + 0.5 * math.cos(turn) + 0.08 * math.cos(2 * turn))  # Blackman's window
    image, taps = (fn.expand_dims(row, axes=[0]) for row in (signal, taps / fn.reductions.sum(taps)))
    return fn.squeeze(filter_of(image, taps), axes=[0])


def resample(signal: DataNode, rate_hz: Any, output_hz: Any) -> DataNode:
    """Add resampling to a DALI graph with conditionals: [samples] float32 at `rate_hz` -> [samples] at `output_hz`."""
    # Resampling to the rate that it has would cost more than decoding, and the filter does not take an empty clip.
    if (rate_hz != output_hz) & (signal.shape(dtype=types.INT64)[0] > 0):
        signal = fn.audio_resample(low_pass(signal, rate_hz, output_hz), in_rate=rate_hz, out_rate=output_hz)
    return signal
