"""Measures live audio: python client/docs/stream.py MANIFEST.

Joins the manifest's clips, all of 16 kHz, mono, with a second of silence between them, and transcribes them with the
demo model: as the clips, and by `transcribe_stream` at the speed at which they were spoken, with both decoders at the
same time. Writes stream.json beside this file and prints the table of stream.md.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from carnelian_client import CarnelianClient, Utterance
from carnelian_client._stream import DEFAULT_PAUSE_S, SPEECH_PAD_S
from carnelian_perf import raw_file
from carnelian_perf.machine import measure_busy_cores
from carnelian_serving.launcher import Server
from carnelian_training.evaluation.error_rates import count_errors
from long import DECODERS, RATE_HZ, ROOT, read_clips

if TYPE_CHECKING:
    from carnelian_client._stream import Block

BLOCK_S = 0.1


def main() -> None:
    """Measure, write stream.json and print the table."""
    busy, origin = measure_busy_cores(), raw_file.describe_origin()
    clips, reference = read_clips(Path(sys.argv[1]))
    samples = with_silence(clips)
    rows = []
    with (
        Server(ROOT / "model_repository", http_port=0, grpc_port=0, metrics_port=0) as server,
        CarnelianClient(server.grpc_url) as client,
    ):
        cpu_s = time.process_time()
        with ThreadPoolExecutor() as pool:
            heard = list(pool.map(lambda name: listen(client, samples, reference, name), DECODERS))
        cpu_s = time.process_time() - cpu_s
        for name, found in zip(DECODERS, heard, strict=True):
            transcripts = client.transcribe_many(
                [(clip, RATE_HZ) for clip in clips], decoder=name, return_exceptions=False
            )
            mistakes = count_errors(reference, " ".join(transcript.text for transcript in transcripts))
            rows.append({"decoder": name, "mistakes_clips": mistakes, **found})
    result = {
        **origin,
        "command": "python client/docs/stream.py MANIFEST",
        "others_busy_cores": busy,
        "clips": len(clips),
        "words": len(reference.split()),
        "seconds": len(samples) / RATE_HZ,
        "pause_s": DEFAULT_PAUSE_S,
        "client_cores_a_stream": round(cpu_s * RATE_HZ / len(samples) / len(DECODERS), 3),
        "rows": rows,
    }
    raw_file.write(Path(__file__).with_suffix(".json"), result)
    for row in rows:
        late = f"{row['late_median_s']:.2f} | {row['late_95_s']:.2f}"
        print(f"| {row['decoder']} | {row['mistakes_clips']} | {row['mistakes']} | {late} |")


def listen(client: CarnelianClient, samples: "Block", reference: str, decoder: str) -> dict[str, Any]:
    """Transcribe samples as fast as they are spoken; return how well and how late."""
    began_s = time.monotonic()
    finals: list[Utterance] = []
    late_s: list[float] = []
    num_interim = 0
    for heard in client.transcribe_stream(spoken(samples, began_s), RATE_HZ, decoder=decoder):
        if not isinstance(heard, Utterance):
            raise heard
        if heard.is_final:
            finals.append(heard)
            late_s.append(time.monotonic() - began_s - (heard.end_s - SPEECH_PAD_S))
        else:
            num_interim += 1
    return {
        "mistakes": count_errors(reference, " ".join(each.transcript.text for each in finals)),
        "utterances": len(finals),
        "interim": num_interim,
        "late_s": [round(each, 3) for each in late_s],
        **summarise(late_s),
    }


def summarise(late_s: list[float]) -> dict[str, float]:
    """Return the median and the 95th percentile of how late final results were, in seconds."""
    return {
        "late_median_s": round(statistics.median(late_s), 3),
        "late_95_s": round(float(np.percentile(late_s, 95)), 3),
    }


def with_silence(clips: list[npt.NDArray[np.int16]]) -> npt.NDArray[np.int16]:
    """Join clips, with a second of silence behind each."""
    silence = np.zeros(RATE_HZ, np.int16)
    return np.concatenate([part for clip in clips for part in (clip, silence)])


def spoken(samples: "Block", began_s: float) -> Iterator["Block"]:
    """Yield samples in blocks, each when its last one has been spoken."""
    size = round(BLOCK_S * RATE_HZ)
    for end in range(size, len(samples) + size, size):
        time.sleep(max(began_s + min(end, len(samples)) / RATE_HZ - time.monotonic(), 0))
        yield samples[end - size : end]


if __name__ == "__main__":
    main()
