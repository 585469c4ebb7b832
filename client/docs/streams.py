"""Measures many live streams at once: python client/docs/streams.py MANIFEST.

More and more streams of the manifest's clips, all of 16 kHz, mono, with a second of silence between them, are sent from
one process, each at the speed at which it was spoken, to the demo model on the same machine. Writes streams.json beside
this file and prints the table of stream.md.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from carnelian_client import CarnelianClient
from carnelian_perf import raw_file
from carnelian_perf.machine import measure_busy_cores, measure_cpu_s
from carnelian_serving.launcher import Server
from long import RATE_HZ, ROOT, read_clips
from stream import listen, summarise, with_silence

STREAMS = (1, 4, 8, 16)
STREAM_S = 60


def main() -> None:
    """Measure, write streams.json and print the table."""
    busy, origin = measure_busy_cores(), raw_file.describe_origin()
    clips, _ = read_clips(Path(sys.argv[1]))
    with (
        Server(ROOT / "model_repository", http_port=0, grpc_port=0, metrics_port=0) as server,
        CarnelianClient(server.grpc_url) as client,
    ):
        rows = [listen_to_many(client, server, clips, count) for count in STREAMS]
    result = {
        **origin,
        "command": "python client/docs/streams.py MANIFEST",
        "others_busy_cores": busy,
        "seconds": STREAM_S,
        "rows": rows,
    }
    raw_file.write(Path(__file__).with_suffix(".json"), result)
    for streams, *measured in (row.values() for row in rows):
        print(f"| {streams} | {' | '.join(f'{each:.2f}' for each in measured)} |")


def listen_to_many(
    client: CarnelianClient, server: Server, clips: list[npt.NDArray[np.int16]], count: int
) -> dict[str, Any]:
    """Listen to so many streams at once, each of which begins with another clip; return how late, and the CPU time."""
    firsts = [each * len(clips) // count for each in range(count)]
    streams = [with_silence(clips[first:] + clips[:first])[: STREAM_S * RATE_HZ] for first in firsts]
    for samples in streams:
        samples[-RATE_HZ:] = 0  # so that a pause ends the last utterance, too
    client_s, server_s = time.process_time(), measure_cpu_s(server.pid)
    with ThreadPoolExecutor(count) as pool:
        heard = list(pool.map(lambda samples: listen(client, samples, "", "greedy"), streams))
    client_s, server_s = time.process_time() - client_s, measure_cpu_s(server.pid) - server_s
    return {
        "streams": count,
        **summarise([each for found in heard for each in found["late_s"]]),
        "client_cores": round(client_s / STREAM_S, 3),
        "server_cores": round(server_s / STREAM_S, 3),
    }


if __name__ == "__main__":
    main()
