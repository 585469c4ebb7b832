from pathlib import Path
from typing import Any

import onnx
import pytest
from carnelian_perf.raw_file import Traffic
from carnelian_perf.traffic.batching_results import Measurement, Run
from carnelian_perf.traffic.graph import build_padded
from carnelian_training.checkpoint import load_model
from tritonclient import grpc

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def repository(shipped: Path) -> Path:
    return shipped


@pytest.fixture(scope="session")
def padded() -> onnx.ModelProto:
    """The demo model's network for padded batches."""
    return build_padded(*load_model(ROOT / "demo" / "quartznet_demo.pt"))


def make_run(candidate: str, delay_ms: float, round_number: int, wall_s: float) -> Run:
    return Run(
        candidate=candidate,
        queue_delay_ms=delay_ms,
        round=round_number,
        others_busy_cores=0.5,
        wall_s=wall_s,
        audio_s=20.0,
        latencies_s=[0.1, 0.2, 0.3, 0.4],
        acoustic_batches={1: 2, 2: 1},
        acoustic_compute_s=0.2,
        server_cpu_s=0.4,
        real_frames=2000,
        processed_frames=3000.0,
    )


@pytest.fixture
def origin() -> dict[str, Any]:
    """Where a raw file is from."""
    return {
        "model": "quartznet_demo",
        "date": "2026-01-01T00:00:00+00:00",
        "command": "carnelian-perf measure",
        "commit": "0123456789ab",
        "machine": {"cpu": "a CPU", "cores": 2, "accelerator": "none", "system": "Linux"},
        "versions": {"python": "3.11"},
    }


@pytest.fixture
def measurement(origin) -> Measurement:
    """Two candidates, three rounds, with two queue delays for the second."""
    walls_s = {("buckets", 0.0): (4.0, 2.0, 1.0), ("ragged", 0.0): (2.0, 2.0, 2.0), ("ragged", 2.0): (1.0, 0.5, 1.0)}
    return Measurement(
        **origin,
        concurrency=4,
        traffic=Traffic(source="some clips", durations_s=[1.0, 5.0, 16.0]),
        candidates={"buckets": "(a) buckets", "ragged": "(c) ragged"},
        mismatches=[],
        runs=[
            make_run(*cell, round_number, wall_s)
            for cell, walls in reversed(walls_s.items())
            for round_number, wall_s in enumerate(walls)
        ],
    )


@pytest.fixture
def late_counts(monkeypatch):
    """Triton counts a request a moment after its answer: here a stage tells what it had done when it was last asked."""

    def tell(client, model, **_):
        earlier, found[client, model] = found.get((client, model)), ask(client, model)
        return earlier or found[client, model]

    found: dict[tuple, Any] = {}
    ask = grpc.InferenceServerClient.get_inference_statistics
    monkeypatch.setattr(grpc.InferenceServerClient, "get_inference_statistics", tell)
