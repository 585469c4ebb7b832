"""Measures a server that gets requests faster than it works: python helm/carnelian/docs/overload.py, from the root.

Serves model_repository/ with several limits on the requests that may wait for the stages after the features, and sends
each server the demo's speech, cut to 16.7 s, at 140 clips a second. Writes overload.json beside this file and prints
the table of sizing.md.
"""

import asyncio
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tritonclient.grpc.aio as triton_aio
from carnelian_perf import raw_file
from carnelian_perf.cuts import cut_equal
from carnelian_perf.load import file_inputs, make_tensors
from carnelian_perf.machine import measure_busy_cores
from carnelian_perf.percentile import percentile
from carnelian_perf.repository import copy_model, read_config, write_config
from carnelian_perf.server.memory import take_sample
from carnelian_serving.launcher import Server
from tritonclient.utils import InferenceServerException

ROOT = Path(__file__).resolve().parents[3]
MODEL = "quartznet_demo"
BOUNDS = (0, 128, 32)  # values of max_pending_requests; 0 is no limit
CLIPS = 2400
CLIPS_PER_S = 140.0
CLIP_S = 16.7


def write_repository(folder: Path, bound: int) -> Path:
    """Copy the models into `folder`, with `bound` as their max_pending_requests, and return their repository."""
    repository = folder / f"models_{bound}"
    copy_model(ROOT / "model_repository", repository, MODEL)
    features = repository / f"{MODEL}_features"
    config = read_config(features)
    if bound:
        config.parameters["max_pending_requests"].string_value = str(bound)
    else:
        del config.parameters["max_pending_requests"], config.parameters["pending_models"]
    write_config(features, config)
    return repository


async def send(url: str, clips: list[list[Any]], count: int) -> tuple[list[float], int]:
    """Send clips at a fixed rate, without waiting for answers; return each answer's seconds, and the number refused."""
    took: list[float] = []
    refused = 0

    async def call(client: triton_aio.InferenceServerClient, number: int) -> None:
        nonlocal refused
        began = time.monotonic()
        try:
            await client.infer(MODEL, clips[number % len(clips)])
        except InferenceServerException as error:
            if "Exceeds maximum queue size" not in str(error):
                raise
            refused += 1
        else:
            took.append(time.monotonic() - began)

    async with triton_aio.InferenceServerClient(url) as client:
        began, calls = time.monotonic(), []
        for number in range(count):
            await asyncio.sleep(began + number / CLIPS_PER_S - time.monotonic())
            calls.append(asyncio.create_task(call(client, number)))
        await asyncio.gather(*calls)
    return took, refused


class Memory:
    """Measures the most memory that a server holds within this context: the proportional set size of its processes."""

    def __init__(self, server: Server) -> None:
        """Prepare to look at the server's memory four times a second."""
        self._server = server
        self._done = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self.most_mib = 0.0

    def __enter__(self) -> "Memory":
        self._looking = self._pool.submit(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._pool.shutdown()
        self._looking.result()  # raises the error that ended the looking, if any

    def _look(self) -> None:
        while not self._done.wait(0.25):
            self.most_mib = max(self.most_mib, take_sample(self._server, 0).pss / 2**20)


def measure(folder: Path, bound: int, clips: list[list[Any]]) -> dict[str, float]:
    """Serve with one limit, send the clips and return a row of the table."""
    repository = write_repository(folder, bound)
    with Server(repository, models=[MODEL], http_port=0, grpc_port=0, metrics_port=0) as server:
        asyncio.run(send(server.grpc_url, clips, 30))
        with Memory(server) as memory:
            began = time.monotonic()
            took, refused = asyncio.run(send(server.grpc_url, clips, CLIPS))
            elapsed = time.monotonic() - began
    return {
        "bound": bound,
        "within_3_s": sum(seconds <= 3 for seconds in took),
        "within_10_s": sum(seconds <= 10 for seconds in took),
        "later": sum(seconds > 10 for seconds in took),
        "refused": refused,
        "p50_s": percentile(took, 50),
        "seconds": elapsed,
        "most_mib": memory.most_mib,
    }


def render_row(row: dict[str, Any]) -> str:
    """Render a row as a line of the Markdown table."""
    counts = (row[name] for name in ("within_3_s", "within_10_s", "later", "refused"))
    cells = (row["bound"] or "none", *counts, f"{row['p50_s']:.1f}", f"{row['seconds']:.0f}", f"{row['most_mib']:.0f}")
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Measure all limits, write overload.json and print the table."""
    busy, origin = measure_busy_cores(), raw_file.describe_origin()
    cuts = cut_equal(ROOT / "demo" / "clips" / "manifest.jsonl", CLIP_S, 8, "flac")
    clips = [make_tensors(file_inputs(cut.file)) for cut in cuts]
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(Path(folder), bound, clips) for bound in BOUNDS]
    result = {
        **origin,
        "command": "python helm/carnelian/docs/overload.py",
        "others_busy_cores": busy,
        "clips": CLIPS,
        "clips_per_s": CLIPS_PER_S,
        "clip_s": CLIP_S,
        "rows": rows,
    }
    raw_file.write(Path(__file__).with_suffix(".json"), result)
    print(*map(render_row, rows), sep="\n")


if __name__ == "__main__":
    main()
