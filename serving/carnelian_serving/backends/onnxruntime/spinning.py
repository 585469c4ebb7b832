"""Limits how long a session's threads stay awake without work."""

from __future__ import annotations

import onnxruntime

from carnelian_serving.backends.onnxruntime.version import parse_version

SPIN_US = 20
"""How long a thread spins before it sleeps, in microseconds: as long as waking it takes. Most steps of a network come
sooner after the one before."""
HAS_LIMIT = parse_version(onnxruntime.__version__) >= (1, 26)
"""Whether ONNX Runtime has `spin_duration_us`; older versions spin for tens of milliseconds, or not at all."""


def limit_spinning(options: onnxruntime.SessionOptions) -> None:
    """Let threads that wait for the next step spin for :data:`SPIN_US`, and then sleep; in old versions, sleep at once.

    The stages are processes that share the cores, so threads that spin longer take the cores from the other stages.
    """
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(HAS_LIMIT)))
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
