"""Small sweeps: from result files alone, and of the real server with the real perf_analyzer."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from carnelian_perf.raw_file import Speech, Split
from carnelian_perf.sweeps.grid import Cell, Grid
from carnelian_perf.sweeps.perf_analyzer import PerfAnalyzerError, Report, find_perf_analyzer
from carnelian_perf.sweeps.results import RESULT, Result

STATIC = Cell(
    model="quartznet_15x5",
    precision="fp32",
    input="pcm",
    protocol="grpc",
    shared_memory="none",
    duration_s=2.0,
    batch=1,
    concurrency=1,
    poisson_share=None,
    round=1,
)
FILES = dataclasses.replace(STATIC, input="file")


@pytest.fixture(scope="module")
def program() -> Path:
    try:
        return find_perf_analyzer()
    except PerfAnalyzerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def manifest() -> Path:
    """The demo's clips."""
    return Path(__file__).parents[3] / "demo/clips/manifest.jsonl"


@pytest.fixture
def make_grid(server, manifest):
    def make(**fields):
        settings = {
            "name": "small",
            "server": {"grpc": server.grpc_url, "http": server.http_url},
            "models": {"quartznet_demo": {}},
            "manifest": manifest,
            "durations_s": [0.5],
            "clips": 4,
            "requests": 3,
            "windows": 3,
            "stability_percent": 1e6,
        }
        return Grid.model_validate({**settings, **fields})

    return make


@pytest.fixture
def static_cell() -> Cell:
    """Of batches of samples."""
    return STATIC


@pytest.fixture
def file_cell() -> Cell:
    """Of one file per request."""
    return FILES


@pytest.fixture
def make_result() -> Callable[..., Result]:
    """Makes a result: stable with a mean latency, failed with a reason, unstable without either."""
    return _make_result


def _make_result(cell: Cell, avg_ms: float | None = None, reason: str | None = None) -> Result:
    report = None
    if reason is None:
        names = ("features", "acoustic", "ctc")
        report = Report(
            status="stable" if avg_ms else "unstable",
            windows=[(10.0, 90.0), (20.0, 80.0)],
            latency_ms=avg_ms and {"avg": avg_ms, **{f"p{p}": avg_ms + p / 10 for p in (50, 90, 95, 99)}},
            clips_per_s=avg_ms and 900 * cell.batch / avg_ms,  # as perf_analyzer counts
            client_ms=avg_ms and {"send": 0.5, "network": 4.0, "recv": 0.5},  # with the stages' queues, 3 ms
            stages=avg_ms and {f"{cell.model}_{name}": Split(1.0, 1.0, avg_ms / 4 - 3, 1.0) for name in names},
            delayed_percent=0.0,
            requests=avg_ms and 10 * cell.round,
        )
    return Result(
        cell=cell,
        rate_per_s=None if cell.concurrency else cell.poisson_share * 160,
        least_requests=5,
        stability_percent=30,
        status=report.status if report else "failed",
        reason=reason,
        report=report,
        date="2026-01-01T00:00:00+00:00",
        command="perf_analyzer",
        commit="0123456789ab",
        machine={"cpu": "a CPU", "cores": 2, "accelerator": "none", "system": "Linux"},
        versions={"tritonserver": "2.51.0"},
        backend="onnxruntime",
        configuration=None,
        accuracy={"wer": 0.125, "cer": 0.05, "utterances": 6, "words": 80},
        speech=Speech(manifest="manifest.jsonl", format="flac", clips=16),
        others_busy_cores=0.1,
        batches={"acoustic": {cell.batch: 10}},
        one_server=True,
        cpu_ms_per_clip=7.5,
    )


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """The folder of a sweep: three rounds of a batch, others of one, and files."""
    folder = tmp_path / "small_sweep"
    results = [
        *(
            _make_result(dataclasses.replace(STATIC, round=number), ms)
            for number, ms in enumerate((30.0, 20.0, 10.0), 1)
        ),
        _make_result(dataclasses.replace(STATIC, batch=8), 40.0),
        _make_result(dataclasses.replace(STATIC, batch=16)),
        _make_result(dataclasses.replace(STATIC, batch=33), reason="batch-size must be <= 32"),
        _make_result(FILES, 25.0),
        _make_result(dataclasses.replace(FILES, concurrency=8), 50.0),
        _make_result(dataclasses.replace(FILES, concurrency=None, poisson_share=0.5), 30.0),
    ]
    for result in results:
        (folder / result.cell.name).mkdir(parents=True)
        result.write(folder / result.cell.name / RESULT)
    return folder


@pytest.fixture
def read_row() -> Callable[..., list[str]]:
    """Reads the first row of a Markdown page that starts with the given cells."""
    return _read_row


def _read_row(page: str, *starts: str) -> list[str]:
    lines = [[word.strip() for word in line.strip("|").split("|")] for line in page.splitlines()]
    return next(line for line in lines if line[: len(starts)] == list(starts))
