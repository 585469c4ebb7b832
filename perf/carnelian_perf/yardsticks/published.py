"""Published numbers, as data: NVIDIA's tables of PyTorch inference and training, and of Jasper on Triton."""

import csv
from dataclasses import dataclass
from importlib import resources
from typing import TypeAlias

TRITON_T4 = "NVIDIA T4 (Triton 20.10, TensorRT 7.2.1, ensemble)"


@dataclass(frozen=True)
class PublishedLatency:
    """A cell of a published table: milliseconds of a batch; None where only the mean was published."""

    model: str
    hardware: str
    precision: str
    batch: int
    duration_s: float
    p90: float | None
    p95: float | None
    p99: float | None
    avg: float

    @property
    def title(self) -> str:
        """The published table's model, hardware and precision, in words."""
        return f"{self.model}, {self.hardware}, {self.precision}"


Published: TypeAlias = dict[tuple[float, int], PublishedLatency]
"""A published table: (duration, batch) -> its row."""


def read_published() -> list[PublishedLatency]:
    """Read all published latencies by batch and duration, except a column that contradicts its own throughput.

    That column is ONNX Runtime's in the Triton table. Latencies of wav2vec 2.0 are over clips of many lengths; the
    duration is their mean.
    """
    triton = {"model": "jasper_10x5dr", "hardware": TRITON_T4, "precision": "fp16"}
    rows = _read_table("inference_latency_ms.csv")
    rows += [triton | row | {"avg": row["tensorrt"]} for row in _read_table("triton_t4_latency_ms.csv")]
    return [
        PublishedLatency(
            row["model"],
            row["hardware"],
            row["precision"],
            int(row["batch"]),
            float(row["duration_s"].removesuffix(" s")),  # a mean ends in " s"
            **{name: float(row[name]) if row.get(name) else None for name in ("p90", "p95", "p99")},
            avg=float(row["avg"]),
        )
        for row in rows
    ]


def choose(model: str, hardware: str, precision: str) -> Published:
    """Choose one published table.

    Args:
        model: Name of the model, as published.
        hardware: Part of the hardware's name, in any case: "a100", "t4 (triton".
        precision: Precision, as published.

    Raises:
        ValueError: no table or several fit; the message lists what there is.
    """
    rows = [
        row
        for row in read_published()
        if row.model == model and hardware.lower() in row.hardware.lower() and row.precision == precision
    ]
    titles = list(dict.fromkeys(row.title for row in rows))
    if len(titles) != 1:
        there = "\n".join(f"  {title}" for title in dict.fromkeys(row.title for row in read_published()))
        raise ValueError(
            f"model {model!r}, machine {hardware!r} and precision {precision!r} must choose one published table, but "
            f"choose {len(titles)}; there are\n{there}"
        )
    return {(row.duration_s, row.batch): row for row in rows}


def read_throughput(model: str) -> list[dict[str, str]]:
    """Read the published rows of a model's training that hold a number."""
    rows = _read_table("training_throughput.csv")
    return [row for row in rows if row["model"] == model and row["throughput"][:1].isdigit()]


def read_hourglass() -> dict[int, tuple[str, str]]:
    """Read what is published of an Hourglass: factor -> times as fast as the plain transformer, share of its memory."""
    return {int(row["factor"]): (row["times_as_fast"], row["memory"]) for row in _read_table("hourglass.csv")}


def _read_table(name: str) -> list[dict[str, str]]:
    text = (resources.files("carnelian_perf.yardsticks") / "published" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
