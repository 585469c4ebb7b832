"""A run of requests to a server, as raw files hold it."""

from dataclasses import dataclass

from carnelian_perf.percentile import percentile


@dataclass(frozen=True, kw_only=True)
class ServedRun:
    """The base of runs of requests to a server, which take turns with others."""

    round: int
    """Number of the turn: runs of one round are compared."""
    others_busy_cores: float
    """Cores that other processes kept busy just before the run, idle servers among them."""
    wall_s: float
    """Seconds from the first request to the last answer."""
    latencies_s: list[float]
    """Latency of each request that was answered, in seconds."""
    server_cpu_s: float
    """CPU seconds of the server and its models, all cores together."""

    @property
    def clips_per_s(self) -> float:
        """Throughput, in clips per second."""
        return len(self.latencies_s) / self.wall_s

    @property
    def cpu_ms_per_clip(self) -> float:
        """CPU milliseconds of the server and its models per clip."""
        return 1e3 * (self.server_cpu_s / max(len(self.latencies_s), 1))

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the latencies, in milliseconds."""
        return 1e3 * percentile(self.latencies_s, percent)
