"""Starts the server on model_repository/, transcribes clips through the SDK, prints what was said and how long it took.

Each clip is decoded greedily, and again with the language models that are deployed beside the model, a few times each:
times are medians.
`python demo/run.py [FILE...]`; without files, the clips of demo/clips with their references.
"""

import json
import statistics
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from carnelian_client import CarnelianClient, CarnelianClientError, Transcript
from carnelian_serving.errors import ServerError
from carnelian_serving.launcher import Server

ROOT = Path(__file__).resolve().parents[1]
MODEL = "quartznet_demo"
LANGUAGE_MODELS: dict[str, Any] = {"decoder": "ngram", "rescore": True}  # n-grams and Transformer-XL, deployed with it
STAGES = {
    "decode": "audio_decode",
    "features": f"{MODEL}_features",
    "acoustic": f"{MODEL}_acoustic",
    "ctc": f"{MODEL}_ctc",
}
RUNS = 5
"""How often each clip is transcribed: single runs vary, and Triton may still count a stage when the next has begun."""
COUNTED_WITHIN_S, POLL_S = 5.0, 0.005
"""The longest time to wait for Triton's statistics, and the time between two looks, in seconds: Triton counts a request
after it has answered it."""


def main(files: list[str]) -> int:
    """Run the demo; the exit status is 1 if the server could not start or a clip could not be transcribed."""
    try:
        return transcribe(files)
    except ServerError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # as shells do after Ctrl-C


def transcribe(files: list[str]) -> int:
    """Serve the models, transcribe the clips and print the results; return 1 if a clip failed, else 0.

    Files that cannot be opened are told before the server starts, which takes seconds.
    """
    references = read_references()
    given = [Path(file) for file in files] or list(references)
    clips = [clip for clip in given if is_readable(clip)]
    if not clips:
        return 1
    started = time.perf_counter()
    print("starting tritonserver on model_repository/ ...", flush=True)
    failures = len(given) - len(clips)
    with (
        Server(ROOT / "model_repository", http_port=0, grpc_port=0, metrics_port=0) as server,
        CarnelianClient(server.grpc_url, model=MODEL) as client,
    ):
        print(f"ready after {time.perf_counter() - started:.1f} s\n")
        for clip in clips:
            try:
                heard, seconds, stages = measure(server, client, clip)
                read, reading_s, _ = measure(server, client, clip, **LANGUAGE_MODELS)
            except (CarnelianClientError, OSError) as error:
                reason = error.message if isinstance(error, CarnelianClientError) else error
                print(f"{clip}: {reason}\n", file=sys.stderr)
                failures += 1
                continue
            split = ", ".join(f"{stage} {1e3 * stage_s:.1f}" for stage, stage_s in stages.items())
            print(f"{clip.name}, {heard.duration_s:.1f} s")
            print(f"  heard      {heard.text}")
            print(f"  with LMs   {read.text}")
            if reference := references.get(clip.resolve()):
                print(f"  reference  {reference}")
            print(f"  time       {1e3 * seconds:.0f} ms ({split}), real-time factor {seconds / heard.duration_s:.4f}")
            print(f"             {1e3 * reading_s:.0f} ms with LMs\n")
    return int(failures > 0)


def is_readable(clip: Path) -> bool:
    """Return whether a file can be opened; if it cannot, print why."""
    try:
        clip.open("rb").close()
    except OSError as error:
        print(f"{clip}: {error.strerror}\n", file=sys.stderr)
        return False
    return True


def measure(
    server: Server, client: CarnelianClient, clip: Path, **options: Any
) -> tuple[Transcript, float, dict[str, float]]:
    """Transcribe a clip several times; return the transcript, and the median seconds in all and of each stage."""
    runs = [measure_once(server, client, clip, **options) for _ in range(RUNS)]
    transcripts, elapsed_s, stages = zip(*runs, strict=True)
    split = {stage: statistics.median(times[stage] for times in stages) for stage in STAGES}
    return transcripts[0], statistics.median(elapsed_s), split


def measure_once(
    server: Server, client: CarnelianClient, clip: Path, **options: Any
) -> tuple[Transcript, float, dict[str, float]]:
    """Transcribe a clip once; return the transcript, and the seconds in all and that each stage computed."""
    before, began = stage_times(server), time.perf_counter()
    transcript = client.transcribe(clip, **options)
    elapsed_s = time.perf_counter() - began
    after = stage_times(server)
    deadline = time.monotonic() + COUNTED_WITHIN_S
    while uncounted := [stage for stage in STAGES if after[stage] == before[stage]]:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"tritonserver must count what each stage computes, but {', '.join(uncounted)} had nothing new "
                f"{COUNTED_WITHIN_S:g} s after the answer"
            )
        time.sleep(POLL_S)
        after = stage_times(server)
    return transcript, elapsed_s, {stage: after[stage] - before[stage] for stage in STAGES}


def read_references() -> dict[Path, str]:
    """Return the clips of demo/clips with their reference texts."""
    folder = ROOT / "demo" / "clips"
    rows = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    return {folder / row["audio_filepath"]: row["text"] for row in rows}


def stage_times(server: Server) -> dict[str, float]:
    """Return the seconds that each stage has computed since the server started, from Triton's own statistics."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for this machine's own address
    with opener.open(f"http://{server.http_url}/v2/models/stats") as answer:
        models: list[dict[str, Any]] = json.load(answer)["model_stats"]
    by_model = {row["name"]: row["inference_stats"] for row in models}
    parts = ("compute_input", "compute_infer", "compute_output")
    return {stage: sum(by_model[name][part]["ns"] for part in parts) / 1e9 for stage, name in STAGES.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
