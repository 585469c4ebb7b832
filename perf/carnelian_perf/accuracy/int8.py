"""What int8 costs in accuracy: the graph that is served and its int8 form on the same clips, in pairs.

In: a checkpoint, clips to calibrate on, other clips with transcripts. Out: a raw file with every clip.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from carnelian_export.graph.quantise import load_features, quantise, read_features
from carnelian_export.graph.to_onnx import export_ragged
from carnelian_export.parity import run
from carnelian_training.config import Config
from carnelian_training.ctc import Options
from carnelian_training.data.manifest import Clip, clips_to_evaluate, read_manifest
from carnelian_training.evaluation.error_rates import count_errors
from carnelian_training.evaluation.evaluate import build_decoder
from carnelian_training.models.network import CtcNetwork

from carnelian_perf.accuracy.pairs import compare
from carnelian_perf.inference.engines import ON_CPU, open_session
from carnelian_perf.raw_file import Record, describe_origin

REPEATS = 5
"""How often each clip is run in each form, in turns."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One clip in both forms, float32 and int8."""

    clip: str
    words: int
    errors_fp32: int
    errors_int8: int
    frames: int
    same_best: int
    """Number of frames whose best label is the same in both forms."""
    best_distance: float
    """Distance between the two forms' log-probabilities of float32's best label, summed over frames."""
    cpu_fp32_s: float
    """CPU seconds of a run in float32 on one thread, median of :data:`REPEATS` runs."""
    cpu_int8_s: float
    """CPU seconds of a run in int8 on one thread, median of :data:`REPEATS` runs."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The results over all clips together; rates are fractions."""

    wer_fp32: float
    wer_int8: float
    difference: float
    """Word error rate of int8 minus that of float32; negative if int8 is better."""
    difference_low: float
    """Lower end of the 95 % interval of `difference`, by bootstrap over clips."""
    difference_high: float
    same_best: float
    """Share of frames whose best label is the same in both forms."""
    best_distance: float
    """Mean distance over frames between the two forms' log-probabilities of float32's best label."""
    times_as_fast: float
    """CPU time of float32 divided by that of int8."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf int8`."""

    subject: Literal["int8"] = "int8"
    summary: Summary
    pairs: list[Pair]


def measure(config: Config, network: CtcNetwork, calibration: Path, manifest: Path) -> Measurement:
    """Transcribe a manifest in float32 and in int8.

    Raises:
        ValueError: A clip is in both manifests, or a file is no manifest.
    """
    origin = describe_origin()
    clips = clips_to_evaluate(manifest)
    check_others(read_manifest(calibration), clips)
    # Before anything is timed: threads that read ahead would be counted for the form that runs. Before the graphs are
    # made, too, which takes longer: a clip may not be there.
    inputs = load_features(clips, config, manifest)
    decoder = build_decoder(config)
    graphs = (export_ragged(network), quantise(network, read_features(calibration, config).calibration))
    # One thread: the CPU clock of a process counts a pool's threads late, and also their spinning after the work.
    sessions = [open_session(graph, ON_CPU, threads=1) for graph in graphs]
    pairs = []
    for session in sessions:
        run(session, inputs[:1], [inputs[0].shape[-1]])  # warms up
    for number, (clip, features) in enumerate(zip(clips, inputs, strict=True)):
        scores = [np.empty(0, np.float32)] * 2
        cpu_s: tuple[list[float], list[float]] = ([], [])
        for form in ((0, 1) if number % 2 else (1, 0)) * REPEATS:
            start = time.process_time()
            scores[form] = run(sessions[form], [features], [features.shape[-1]])[0][0]
            cpu_s[form].append(time.process_time() - start)
        best = scores[0].argmax(1)
        errors = [count_errors(clip.text, found.text) for found in decoder.decode(scores, [Options()] * 2)]
        distances = np.abs(scores[1] - scores[0])[np.arange(len(best)), best]
        pairs.append(
            Pair(
                clip=clip.audio_filepath.name,
                words=len(clip.text.split()),
                errors_fp32=errors[0],
                errors_int8=errors[1],
                frames=len(best),
                same_best=int((scores[1].argmax(1) == best).sum()),
                best_distance=float(distances.sum()),
                cpu_fp32_s=statistics.median(cpu_s[0]),
                cpu_int8_s=statistics.median(cpu_s[1]),
            )
        )
    return Measurement(model=config.name, **origin, summary=summarise(pairs), pairs=pairs)


def check_others(calibration: Sequence[Clip], clips: Sequence[Clip]) -> None:
    """Check that no clip to transcribe is also one to calibrate on, which would flatter int8; copies are not noticed.

    Raises:
        ValueError: A clip is in both; the message names it.
    """
    seen = {(clip.audio_filepath.resolve(), clip.offset or 0) for clip in calibration}
    for clip in clips:
        if (clip.audio_filepath.resolve(), clip.offset or 0) in seen:
            raise ValueError(f"--manifest must have other clips than --int8-clips, but {clip.title} is in both")


def summarise(pairs: Sequence[Pair]) -> Summary:
    """Compute error rates, their difference with its 95 % interval by bootstrap over clips, agreement and speed."""
    words, fp32, int8, frames, same, distance, slow, fast = np.array(
        [
            (p.words, p.errors_fp32, p.errors_int8, p.frames, p.same_best, p.best_distance, p.cpu_fp32_s, p.cpu_int8_s)
            for p in pairs
        ]
    ).T
    differences = compare(words, fp32, int8)
    return Summary(
        wer_fp32=float(fp32.sum() / words.sum()),
        wer_int8=float(int8.sum() / words.sum()),
        difference=differences.difference,
        difference_low=differences.low,
        difference_high=differences.high,
        same_best=float(same.sum() / frames.sum()),
        best_distance=float(distance.sum() / frames.sum()),
        times_as_fast=float(slow.sum() / fast.sum()),
    )
