"""Measures a server's metrics at rising load: python helm/carnelian/docs/pressure.py, from the repository's root.

Serves model_repository/ and sends the demo's clips from 1 to 64 callers that never pause. Writes pressure.json beside
this file and prints the table of autoscaling.md.
"""

import asyncio
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import tritonclient.grpc.aio as triton_aio
from carnelian_perf import raw_file
from carnelian_perf.load import file_inputs, make_tensors
from carnelian_perf.machine import measure_busy_cores
from carnelian_perf.percentile import percentile
from carnelian_serving.launcher import Server

ROOT = Path(__file__).resolve().parents[3]
MODEL = "quartznet_demo"
CALLERS = (1, 2, 4, 8, 16, 32, 64)
SECONDS = 15.0
WARM_UP_SECONDS = 3.0
STAGE = re.compile(r"audio_decode|.+_(features|acoustic|ctc)")
COUNTER = re.compile(r'^(\w+)\{model="(\w+)"(?:,version="1")?\} (\S+)$', re.M)


def read_counters(url: str) -> dict[tuple[str, str], float]:
    """Read the counters of a metrics endpoint: (name, model) -> value."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return {(name, model): float(value) for name, model, value in COUNTER.findall(answer.read().decode())}


async def send(url: str, clips: list[list[Any]], callers: int, seconds: float) -> list[float]:
    """Send clips from `callers` callers, each one clip after the other, for `seconds`; return each answer's seconds."""
    took: list[float] = []
    end = time.monotonic() + seconds

    async def call(client: triton_aio.InferenceServerClient, number: int) -> None:
        while time.monotonic() < end:
            began = time.monotonic()
            await client.infer(MODEL, clips[number % len(clips)])
            number += 1
            took.append(time.monotonic() - began)

    async with triton_aio.InferenceServerClient(url) as client:
        await asyncio.gather(*(call(client, number) for number in range(callers)))
    return took


def measure(server: Server, clips: list[list[Any]], callers: int) -> dict[str, float]:
    """Measure one number of callers; return a row of the table: what callers saw, and what the metrics said."""
    before, began = read_counters(server.metrics_url), time.monotonic()
    took = asyncio.run(send(server.grpc_url, clips, callers, SECONDS))
    elapsed = time.monotonic() - began
    moved = {key: value - before[key] for key, value in read_counters(server.metrics_url).items()}

    def of_stages(name: str) -> float:
        return sum(value for (metric, model), value in moved.items() if metric == name and STAGE.fullmatch(model))

    audio_s = moved["carnelian_audio_seconds_total", MODEL]
    in_progress = moved["nv_inference_request_duration_us", MODEL] / 1e6 / elapsed
    batches = moved["nv_inference_exec_count", f"{MODEL}_acoustic"]
    return {
        "callers": callers,
        "clips_per_s": len(took) / elapsed,
        "p50_ms": percentile(took, 50) * 1e3,
        "p95_ms": percentile(took, 95) * 1e3,
        "audio_in_progress_s": in_progress * audio_s / moved["nv_inference_request_success", MODEL],
        "queue_over_compute": of_stages("nv_inference_queue_duration_us")
        / of_stages("nv_inference_compute_infer_duration_us"),
        "batch": moved["nv_inference_count", f"{MODEL}_acoustic"] / batches,
    }


def render_row(row: dict[str, float]) -> str:
    """Render a row as a line of the Markdown table."""
    return "| " + " | ".join(f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in row.values()) + " |"


def main() -> None:
    """Measure all numbers of callers, write pressure.json and print the table."""
    busy, origin = measure_busy_cores(), raw_file.describe_origin()
    paths = sorted(path for path in (ROOT / "demo" / "clips").iterdir() if path.suffix != ".jsonl")
    clips = [make_tensors(file_inputs(path.read_bytes())) for path in paths]
    with Server(ROOT / "model_repository", models=[MODEL], http_port=0, grpc_port=0, metrics_port=0) as server:
        asyncio.run(send(server.grpc_url, clips, 2, WARM_UP_SECONDS))
        rows = [measure(server, clips, callers) for callers in CALLERS]
    result = {
        **origin,
        "command": "python helm/carnelian/docs/pressure.py",
        "others_busy_cores": busy,
        "seconds_a_row": SECONDS,
        "rows": rows,
    }
    raw_file.write(Path(__file__).with_suffix(".json"), result)
    print(*map(render_row, rows), sep="\n")


if __name__ == "__main__":
    main()
