"""How many hours of speech a voice of `carnelian-train synthesise` makes per hour of one CPU core.

`python -m carnelian_perf.training.voice_rates > rates.jsonl` measures each installed voice, in CPU time, so that other
work on the machine has little influence; `... voice_rates rates.jsonl` prints the records as a table.
"""

import importlib.metadata
import itertools
import json
import platform
import random
import resource
import subprocess
import sys
from pathlib import Path

from carnelian_training.synthesis.texts import choose_sources
from carnelian_training.synthesis.utterances import plan_utterances
from carnelian_training.synthesis.voices import SAMPLE_RATE_HZ, VOICES, choose_voices, render

from carnelian_perf.machine import name_cpu

SENTENCES = 24


def measure_rates() -> None:
    """Print a record per voice: hours of speech per CPU hour, CPU seconds to start, versions and processor."""
    sentences = [
        utterance.sentence.spoken
        for utterance in itertools.islice(
            plan_utterances(choose_sources(["austen"]), choose_voices(None), 1), SENTENCES
        )
    ]
    for voice in choose_voices(None):
        # The first sentence includes the engine's start, which the differences leave out.
        start_s, first_s = _measure(voice.name, sentences[:1])
        cpu_s, speech_s = _measure(voice.name, sentences)
        record = {
            "voice": voice.name,
            "hours_per_cpu_hour": round((speech_s - first_s) / (cpu_s - start_s), 1),
            "sentences": SENTENCES - 1,
            "cpu_s": round(cpu_s - start_s, 3),
            "speech_s": round(speech_s - first_s, 3),
            "start_cpu_s": round(start_s, 3),
            "python": platform.python_version(),
            "onnxruntime": importlib.metadata.version("onnxruntime"),
            "processor": name_cpu(Path("/proc/cpuinfo").read_text()),
        }
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()


def render_table(records: Path) -> str:
    """Render the records of `measure_rates` as a Markdown table."""
    rows = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    total = sum(voice.share for voice in VOICES)
    percent = {voice.name: 100 * voice.share / total for voice in VOICES}
    table = ["| voice | % of clips | hours of speech in a CPU-hour | CPU seconds to start |", "|---|---|---|---|"]
    table += [
        f"| {row['voice']} | {percent[row['voice']]:.0f} | {row['hours_per_cpu_hour']:.0f} | {row['start_cpu_s']:.1f} |"
        for row in rows
    ]
    return "\n".join(table)


def _measure(voice: str, sentences: list[str]) -> tuple[float, float]:
    """Synthesise sentences in a new process; return its CPU time and the duration of the speech, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", __spec__.name, voice]
    done = subprocess.run(command, input=json.dumps(sentences), capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return cpu_s, float(done.stdout)


def _say(name: str, sentences: list[str]) -> float:
    [voice] = choose_voices([name])
    rng = random.Random(name)
    samples = 0
    for sentence in sentences:
        speed, pitch = rng.uniform(*voice.speed), rng.uniform(*voice.pitch)
        samples += len(render(voice, sentence, rng.choice(voice.speakers), speed, pitch, 0))
    return samples / SAMPLE_RATE_HZ


if __name__ == "__main__":
    if len(sys.argv) == 1:
        measure_rates()
    elif Path(sys.argv[1]).is_file():
        sys.stdout.write(render_table(Path(sys.argv[1])) + "\n")
    else:
        sys.stdout.write(f"{_say(sys.argv[1], json.load(sys.stdin))}\n")
