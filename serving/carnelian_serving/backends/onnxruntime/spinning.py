"""How long a session's threads stay awake without work."""

from __future__ import annotations

import onnxruntime

SPIN_US = 20
"""Waking a thread takes as long, and most steps of a network follow the last one sooner."""
HAS_LIMIT = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) >= (1, 26)
"""Older ones spin for tens of milliseconds, or not at all."""


def limit_spinning(options: onnxruntime.SessionOptions) -> None:
    """Let threads that wait for the next step spin for :data:`SPIN_US` and sleep then, or, with old ones, at once.

    The stages are processes that share the cores: threads that spin on take them from the others.
    """
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(HAS_LIMIT)))
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
