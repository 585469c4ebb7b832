"""Rows of a sweep's report: the rounds of each cell, combined for tables and plots."""

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from carnelian_perf.raw_file import Split
from carnelian_perf.sweeps.grid import Cell
from carnelian_perf.sweeps.perf_analyzer import Report
from carnelian_perf.sweeps.results import Result

PUBLISHED = ("p90", "p95", "p99", "avg")
LATENCIES = ("p50", *PUBLISHED)
_MOST_OF_REQUEST = 1.05
"""How long the stages of a request may take in all, as a multiple of its own time, to be parts of it: Triton and
perf_analyzer count about the same requests, not quite the same."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell in a report: the medians of its stable rounds, and what became of the others."""

    cell: Cell
    """The cell, as of its first round."""
    results: list[Result]

    @property
    def stable(self) -> list[Report]:
        """The reports of the stable rounds."""
        return [result.report for result in self._stable_rounds if result.report]

    @property
    def group(self) -> tuple[str, str, str, str]:
        """What all rows of a table have in common: model, precision, protocol, shared memory."""
        return self.cell.model, self.cell.precision, self.cell.protocol, self.cell.shared_memory

    @property
    def load(self) -> str:
        """The load in words: the batch, the number of clients, or the rate of arrivals."""
        if self.cell.input == "pcm":
            return f"batch {self.cell.batch}"
        if self.cell.concurrency is None:
            reached = "" if self.share is None else f", {self.share:.0%} reached"
            return f"Poisson, {self.cell.poisson_share:.0%} asked for{reached}"
        return f"{self.cell.concurrency} client{'s' if self.cell.concurrency > 1 else ''}"

    @property
    def title(self) -> str:
        """The length of the clips, and the load."""
        return f"{self.cell.duration_s:g} s, {self.load}"

    @property
    def status(self) -> str:
        """Status of the last round: stable, unstable or failed."""
        return self.results[-1].status

    @property
    def troubles(self) -> list[str]:
        """What became of the rounds that have no numbers."""
        several = len(self.results) > 1
        return [
            f"{f'round {result.cell.round} ' if several else ''}{result.describe()}"
            for result in self.results
            if result.status != "stable"
        ]

    @property
    def latency_ms(self) -> dict[str, float]:
        """p50, p90, p95, p99 and avg of a request's latency, each the median of the stable rounds."""
        return {
            name: statistics.median((report.latency_ms or {})[name] for report in self.stable) for name in LATENCIES
        }

    @property
    def requests(self) -> str:
        """Number of requests that were timed in a round, in words: fewest to most."""
        found = sorted({report.requests or 0 for report in self.stable})
        return "-" if 0 in found else " to ".join(map(str, dict.fromkeys((found[0], found[-1]))))

    @property
    def clips_per_s(self) -> float:
        """Throughput, the median of the stable rounds."""
        return statistics.median(rate for result in self.results if (rate := result.clips_per_s) is not None)

    @property
    def share(self) -> float | None:
        """The share of the closed loop's throughput that an open loop reached, the median of the stable rounds."""
        found = [share for result in self.results if (share := result.share) is not None]
        return statistics.median(found) if found else None

    @property
    def rtfx(self) -> float:
        """Throughput in seconds of audio per second."""
        return self.clips_per_s * self.cell.duration_s

    @property
    def client_ms(self) -> float | None:
        """Milliseconds of sending, receiving and the network; None if not known.

        perf_analyzer counts all time in which an ensemble does not compute as the network's, so the queues of its
        stages are subtracted. If Triton's times of the stages exceed the requests' own, the result would be negative,
        and is not known.
        """
        found = self._median(
            lambda report: (
                # Not `sum`, whose rounding differs between versions of Python, and with it the page.
                math.fsum((report.client_ms or {}).values())
                - math.fsum(stage.queue for stage in (report.stages or {}).values())
            )
        )
        return found if found >= 0 else None

    @property
    def stages(self) -> dict[str, Split]:
        """Stage -> its milliseconds, in the order of processing: decode, features, acoustic, ctc; may be empty."""
        found = [report.stages for report in self.stable if report.stages]
        names = found[0] if found else {}
        short = {name.removeprefix(f"{self.cell.model}_").removeprefix("audio_"): name for name in names}
        return {stage: Split.median([stages[short[stage]] for stages in found]) for stage in STAGES if stage in short}

    @property
    def stages_fit(self) -> bool:
        """Whether the stages' times are known, and parts of the request's own, not much longer than it."""
        total_ms = math.fsum(split.total for split in self.stages.values())
        return bool(self.stages) and total_ms <= _MOST_OF_REQUEST * self.latency_ms["avg"]

    @property
    def cpu_ms_per_clip(self) -> float | None:
        """CPU milliseconds of the server per clip, all cores, median of the stable rounds; None if not known."""
        found = [result.cpu_ms_per_clip for result in self._stable_rounds if result.cpu_ms_per_clip]
        return statistics.median(found) if found else None

    @property
    def acoustic_batches(self) -> dict[int, int]:
        """Batch size of the acoustic stage -> number of executions, over the stable rounds."""
        total: Counter[int] = Counter()
        for result in self._stable_rounds:
            total.update(result.batches.get("acoustic", {}))
        return dict(sorted(total.items()))

    @property
    def delayed_percent(self) -> float:
        """Percentage of an open loop's requests that perf_analyzer sent late."""
        return self._median(lambda report: report.delayed_percent)

    @property
    def mean_batch(self) -> float | None:
        """Mean number of clips per execution of the acoustic stage; None if not known."""
        batches = self.acoustic_batches
        return sum(size * count for size, count in batches.items()) / sum(batches.values()) if batches else None

    @property
    def wer(self) -> float | None:
        """Word error rate of the model on the sweep's manifest, as a fraction; None with random weights."""
        return self.results[-1].accuracy.get("wer")

    @property
    def _stable_rounds(self) -> list[Result]:
        return [result for result in self.results if result.status == "stable"]

    def _median(self, value: Callable[[Report], float]) -> float:
        return statistics.median(value(report) for report in self.stable)


STAGES = ("decode", "features", "acoustic", "ctc")


def make_rows(results: Sequence[Result]) -> list[Row]:
    """Combine the rounds of each cell into a row; rows are sorted by table, duration, batch and load.

    Raises:
        ValueError: Rounds of a cell were measured on two machines, or with two versions of a package; or cells of a
            model have different configurations, accuracies or speech, of which the page names one.
    """
    groups: dict[Cell, list[Result]] = {}
    firsts: dict[tuple[str, str, str], tuple[str, object]] = {}
    for result in results:
        name, cell = result.cell.name, dataclasses.replace(result.cell, round=1)
        groups.setdefault(cell, []).append(result)
        common = [("rounds of a cell", cell.name, *fact) for fact in result.origin.items()]
        common += [(f"cells of {cell.model}", "", *fact) for fact in result.served.items()]
        for which, of, key, found in common:
            first, before = firsts.setdefault((which, of, key), (name, found))
            if before != found:
                raise ValueError(
                    f"{which} must be alike in {key}, but {first} has {before} and {name} has {found}: the page would "
                    "be of neither; give each a folder of its own"
                )
    rows = [
        Row(cell=cell, results=sorted(rounds, key=lambda result: result.cell.round)) for cell, rounds in groups.items()
    ]
    rows.sort(key=lambda row: (row.group, row.cell.input, row.cell.duration_s, row.cell.batch, _load(row)))
    return rows


def _load(row: Row) -> tuple[float, float]:
    return row.cell.concurrency or 1e9, row.cell.poisson_share or 0.0
