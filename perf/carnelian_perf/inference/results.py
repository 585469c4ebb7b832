"""The raw file of an inference benchmark."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Literal

from carnelian_perf.raw_file import Filled, Record

TITLES = {
    "plain": "PyTorch eager, plain Conv1d",
    "eager": "PyTorch eager",
    "graphs": "PyTorch, CUDA graphs",
    "compiled": "PyTorch compiled",
    "compiled_graphs": "PyTorch compiled, CUDA graphs",
    "onnx_conv1d": "ONNX Runtime, Conv1d without masks, the form of NeMo's export",
    "onnx": "ONNX Runtime, as served",
    "onnx_int8": "ONNX Runtime, int8",
    "tensorrt": "TensorRT",
}
"""Engine -> what it is called in the page."""
AS_SERVED = "onnx"
GPU_ONLY = ("graphs", "compiled_graphs", "tensorrt")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of an inference benchmark."""

    source: str
    """Path of a checkpoint, or of a training YAML."""
    random_weights: bool
    """Whether the source is a training YAML, whose network nobody has trained: its speed is the same."""
    manifest: str
    """Path of the manifest of the speech that is cut to the durations."""
    engines: list[str]
    durations_s: list[float]
    batches: list[int]
    steps: int
    """Counted steps."""
    warm_up: int
    """Steps before the counted ones."""
    threads: int
    """CPU threads."""
    device: str = "cpu"
    """Where networks run: cpu or cuda."""
    precision: str = "fp32"
    overrides: list[str] = field(default_factory=list)
    """Changes to a training YAML, each `a.b=value`."""


@dataclass(kw_only=True)
class Timing:
    """One engine at one batch and duration; milliseconds of each counted step."""

    engine: str
    duration_s: float
    batch: int
    not_run: str | None = None
    network_ms: list[float] = field(default_factory=list)
    network_cpu_ms: list[float] = field(default_factory=list)
    same_texts: bool | None = None
    """Whether the texts equal those of the first engine that ran; None if this engine did not run."""


@dataclass(kw_only=True)
class Common:
    """What all engines of a batch and duration share; milliseconds of each counted step."""

    duration_s: float
    batch: int
    features_ms: list[float] = field(default_factory=list)
    decoding_ms: list[float] = field(default_factory=list)
    """Greedy decoding of what the first engine that ran gave; texts of others may take longer or shorter."""
    gflop: float
    """Operations of the network's convolutions and matrix products on the batch, in 10^9."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf infer`."""

    subject: Literal["infer"] = "infer"
    others_busy_cores: float
    """Cores that other processes kept busy before the measurement."""
    gflop_per_s: float
    """The best rate of a 1x1 convolution on this machine, in GFLOP/s."""
    titles: dict[str, str]
    """Engine -> what the page calls it, in the order of the tables."""
    plan: Plan
    published: dict[str, str] | None = None
    """Arguments of `yardsticks.published.choose` for the published table beside it; empty or None for none."""
    timings: Filled[Timing]
    common: list[Common]

    def say_threads(self) -> str:
        """Say in words how many CPU threads were used."""
        return f"{self.plan.threads} thread{'s' * (self.plan.threads != 1)}"


def find_common(measurement: Measurement, duration_s: float, batch: int) -> Common:
    """Find what all engines of a batch and duration share."""
    return next(row for row in measurement.common if (row.duration_s, row.batch) == (duration_s, batch))


def sum_up_served(measurement: Measurement, engine: str) -> dict[tuple[float, int], float]:
    """Sum the median milliseconds of features, network in one engine, and decoding: (duration, batch) -> sum."""
    found = {}
    for timing in measurement.timings:
        if timing.engine == engine and timing.network_ms:
            common = find_common(measurement, timing.duration_s, timing.batch)
            parts = (common.features_ms, timing.network_ms, common.decoding_ms)
            # Not `sum`, whose rounding differs between versions of Python, and with it the page.
            found[timing.duration_s, timing.batch] = math.fsum(statistics.median(part) for part in parts)
    return found
