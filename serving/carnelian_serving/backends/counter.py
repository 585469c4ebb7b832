"""A counter among the server's metrics."""

from __future__ import annotations

import contextlib

import triton_python_backend_utils as pb_utils


class Counter:
    """Counts what Triton cannot; it does nothing if the server keeps no metrics."""

    def __init__(self, name: str, description: str, **labels: str) -> None:
        """Register a metric, beside those of other instances and of other labels."""
        self._metric = None
        with contextlib.suppress(pb_utils.TritonModelException):
            # A family must outlive its metrics.
            self._family = pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.COUNTER)
            self._metric = self._family.Metric(labels=labels)

    def count(self, number: int = 1) -> None:
        """Count so many more."""
        if self._metric is not None:
            self._metric.increment(number)
