"""Measures what cutting costs: python client/docs/long.py MANIFEST.

Joins the manifest's clips, all of 16 kHz, mono, to one recording, and transcribes it with the demo model: as the clips,
cut at fixed times, and by `transcribe_long`. Writes long.json beside this file and prints the table of long.md.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
from carnelian_client import CarnelianClient
from carnelian_client._long import Recording
from carnelian_perf import raw_file
from carnelian_perf.machine import measure_busy_cores
from carnelian_serving.launcher import Server
from carnelian_training.evaluation.error_rates import count_errors

ROOT = Path(__file__).resolve().parents[2]
RATE_HZ = 16_000
DECODERS = ("greedy", "ngram")
EVERY_S = (20, 30, 50)


def main() -> None:
    """Measure, write long.json and print the table."""
    busy, origin = measure_busy_cores(), raw_file.describe_origin()
    clips, reference = read_clips(Path(sys.argv[1]))
    samples = np.concatenate(clips)
    recording = (samples, RATE_HZ)
    pieces = {"the clips themselves": clips}
    pieces |= {f"every {s} s": np.split(samples, range(s * RATE_HZ, len(samples), s * RATE_HZ)) for s in EVERY_S}
    rows = []
    with (
        Server(ROOT / "model_repository", http_port=0, grpc_port=0, metrics_port=0) as server,
        CarnelianClient(server.grpc_url) as client,
    ):
        for what, parts in pieces.items():
            row: dict[str, Any] = {"pieces": what, "number": len(parts)}
            for name in DECODERS:
                sent = [(part, RATE_HZ) for part in parts]
                transcripts = client.transcribe_many(sent, decoder=name, return_exceptions=False)
                row[name] = count_errors(reference, " ".join(transcript.text for transcript in transcripts))
            rows.append(row)
        row = {"pieces": "cut by `transcribe_long`", "number": sum(1 for _ in Recording(recording, {}).pieces())}
        for name in DECODERS:
            row[name] = count_errors(reference, client.transcribe_long(recording, decoder=name).text)
        rows.append(row)
    result = {
        **origin,
        "command": "python client/docs/long.py MANIFEST",
        "others_busy_cores": busy,
        "clips": len(clips),
        "words": len(reference.split()),
        "seconds": len(samples) / RATE_HZ,
        "rows": rows,
    }
    raw_file.write(Path(__file__).with_suffix(".json"), result)
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")


def read_clips(manifest: Path) -> tuple[list[npt.NDArray[np.int16]], str]:
    """Return the clips of a manifest, [samples] each, and their texts in a row; end if they are of another form."""
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    clips = []
    for line in lines:
        clip, rate = soundfile.read(manifest.parent / line["audio_filepath"], dtype="int16")
        if rate != RATE_HZ or clip.ndim > 1:
            sys.exit(f"{manifest} must name clips of 16 kHz, mono, but {line['audio_filepath']} is none")
        clips.append(clip)
    return clips, " ".join(line["text"] for line in lines)


if __name__ == "__main__":
    main()
