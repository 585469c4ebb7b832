"""Check the times and confidences of words in RESULT against references and another aligner.

Times are compared with PocketSphinx's forced alignment of the reference: hidden Markov models on features of its own.
Each half of the clips is corrected by a calibration that was measured on the other half; the calibration that is
written is measured on all clips.
"""

import dataclasses
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import jiwer
import numpy as np
import numpy.typing as npt
import soundfile
from carnelian_training import ctc
from carnelian_training.config import Config
from carnelian_training.ctc.calibration import log_odds
from carnelian_training.data.audio import encoded
from carnelian_training.data.manifest import Clip, clips_to_evaluate
from carnelian_training.evaluation.error_rates import single_spaced
from carnelian_training.evaluation.evaluate import build_decoder, score_all
from carnelian_training.models.network import CtcNetwork
from matplotlib.figure import Figure

from carnelian_perf.clips import SAMPLE_RATE_HZ, read_clip
from carnelian_perf.pages import write_plot
from carnelian_perf.raw_file import Record, describe_origin

ALIGNER_FRAMES_PER_S = 100
BINS = 10

Times = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Heard:
    """A word of a transcript, with its times in seconds and whether it is right."""

    clip: int
    decoder: str
    confidence: float
    is_right: bool
    times: tuple[float, float]
    reference: tuple[float, float] | None
    """Start and end by the other aligner; None where the word is wrong or the clip could not be aligned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bin:
    """A point of the calibration curve: words of about the same confidence."""

    words: int
    confidence: float
    """Mean confidence of the words."""
    right: float
    """Share of the words that are right."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The errors of one decoder's words, with or without calibration."""

    decoder: str
    calibrated: bool
    """Whether each half of the clips was calibrated by the other half."""
    words: int
    right: float
    """Share of the words that are right."""
    timed_words: int
    """Number of right words whose times the other aligner gave."""
    start_error_ms: float
    """Median distance from the other aligner's start."""
    end_error_ms: float
    """Median distance from the other aligner's end."""
    calibration_error: float
    """Expected calibration error: mean distance of confidence and share of right words over the bins of the curve,
    weighted by their words."""
    curve: list[Bin]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf words`."""

    subject: Literal["words"] = "words"
    manifest: str
    language_model: str
    """File name of the language model."""
    weights: dict[str, float]
    """Weights of the language model, where they differ from the decoder's defaults."""
    clips: int
    calibration: ctc.Calibration
    """The calibration that was measured on all clips."""
    decoders: list[Row]


def measure(
    config: Config, network: CtcNetwork, manifest: Path, language_model: Path, weights: Mapping[str, float]
) -> Measurement:
    """Measure words with and without calibration, and calibrate by all clips."""
    origin = describe_origin()
    clips = clips_to_evaluate(manifest)
    log_probs = score_all(network, config, clips, manifest)
    references = [align(clip) for clip in clips]

    def listen(corrections: Sequence[ctc.Calibration]) -> list[Heard]:
        """Decode every clip by every decoder into words; the corrections take turns from clip to clip."""
        decoders = [build_decoder(config, language_model, calibration=correction) for correction in corrections]
        return [
            word
            for name in ctc.DECODERS
            for i, (clip, row) in enumerate(zip(clips, log_probs, strict=True))
            for word in compare(
                i, name, clip.text, references[i], _decode(decoders[i % len(decoders)], row, name, weights)
            )
        ]

    plain = listen([ctc.Calibration()])
    halves = [calibrate([word for word in plain if word.clip % 2 != half]) for half in (0, 1)]
    corrected = listen(halves)
    return Measurement(
        model=config.name,
        **origin,
        manifest=str(manifest),
        language_model=language_model.name,
        weights=dict(weights),
        clips=len(clips),
        calibration=dataclasses.replace(calibrate(plain), model=config.name),
        decoders=[
            rate([word for word in words if word.decoder == name], name, words is corrected)
            for name in ctc.DECODERS
            for words in (plain, corrected)
        ],
    )


def align(clip: Clip) -> Times | None:
    """Find start and end of each reference word in seconds by PocketSphinx; None if it lacks a word or an alignment."""
    import pocketsphinx

    with soundfile.SoundFile(io.BytesIO(encoded(clip).tobytes())) as file:  # only the clip, if it is a part of a file
        sound = read_clip(file)
    samples = np.rint(sound * 2**15).clip(-(2**15), 2**15 - 1).astype(np.int16)
    words = clip.text.split()
    decoder = pocketsphinx.Decoder(samprate=SAMPLE_RATE_HZ, loglevel="FATAL")
    if any(decoder.lookup_word(word) is None for word in words):
        return None
    decoder.set_align_text(clip.text)
    decoder.start_utt()
    decoder.process_raw(samples.tobytes(), full_utt=True)
    decoder.end_utt()
    found = [segment for segment in decoder.seg() or () if segment.word[0] not in "<["]
    if [segment.word.partition("(")[0] for segment in found] != words:
        return None
    return [(s.start_frame / ALIGNER_FRAMES_PER_S, (s.end_frame + 1) / ALIGNER_FRAMES_PER_S) for s in found]


def compare(i: int, name: str, said: str, times: Times | None, heard: ctc.Hypothesis) -> list[Heard]:
    """Align a transcript with its reference to see which of its words are right, and when they were said.

    Args:
        i: Index of the clip.
        name: Name of the decoder.
        said: The reference.
        times: Start and end of each reference word by the other aligner; None if it could not align the clip.
        heard: The decoder's answer.
    """
    if not heard.words:
        return []
    matches: dict[int, int] = {}
    for chunk in jiwer.process_words(single_spaced([said]), single_spaced([heard.text])).alignments[0]:
        if chunk.type == "equal":
            first = range(chunk.hyp_start_idx, chunk.hyp_end_idx)
            matches |= dict(zip(first, range(chunk.ref_start_idx, chunk.ref_end_idx), strict=True))
    return [
        Heard(
            i,
            name,
            word.confidence,
            k in matches,
            (word.start, word.end),
            times[matches[k]] if times is not None and k in matches else None,
        )
        for k, word in enumerate(heard.words)
    ]


def calibrate(words: Sequence[Heard]) -> ctc.Calibration:
    """Fit a calibration: median delays, and for each decoder a logistic regression from log-odds to being right.

    Raises:
        ValueError: No word's times are known.
    """
    if all(word.reference is None for word in words):
        raise ValueError(
            "each half of the clips must have words that are heard right and that PocketSphinx aligns, which knows "
            "English alone, but one has none; take more clips"
        )
    late = [
        statistics.median(word.times[side] - word.reference[side] for word in words if word.reference is not None)
        for side in (0, 1)
    ]
    confidence = {}
    for name in dict.fromkeys(word.decoder for word in words):
        mine = [word for word in words if word.decoder == name]
        odds = log_odds(np.array([word.confidence for word in mine]))
        confidence[name] = fit_logistic(odds, np.array([word.is_right for word in mine], np.float64))
    return ctc.Calibration(round(late[0], 3), round(late[1], 3), confidence)


def fit_logistic(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Fit scale and offset of a logistic regression of y on x, with a unit normal prior at (1, 0); Newton's method."""
    design, prior = np.stack([x, np.ones_like(x)], axis=1), np.array([1.0, 0.0])

    def loss(weights: npt.NDArray[np.float64]) -> float:
        z = design @ weights
        return float((np.logaddexp(0, z) - y * z).sum() + ((weights - prior) ** 2).sum() / 2)

    weights = prior
    for _ in range(50):
        p = 1 / (1 + np.exp(-design @ weights))
        gradient = design.T @ (p - y) + weights - prior
        step = np.linalg.solve((design * (p * (1 - p))[:, None]).T @ design + np.eye(2), gradient)
        while loss(weights - step) > loss(weights) and np.abs(step).max() > 1e-9:
            step = step / 2
        weights = weights - step
    return round(float(weights[0]), 4), round(float(weights[1]), 4)


def rate(words: Sequence[Heard], name: str, calibrated: bool) -> Row:
    """Compute the errors of a decoder's times and confidences, and the points of its calibration curve.

    Raises:
        ValueError: No word's times are known.
    """
    timed = [word for word in words if word.reference is not None]
    if not timed:
        raise ValueError(f"{name} must hear a word right that PocketSphinx aligns, but heard none; take more clips")
    starts, ends = (
        [abs(word.times[side] - word.reference[side]) for word in timed if word.reference is not None]
        for side in (0, 1)
    )
    bins: list[Bin] = []
    for i in range(BINS):
        inside = [word for word in words if min(int(word.confidence * BINS), BINS - 1) == i]
        if inside:
            expected = statistics.fmean(word.confidence for word in inside)
            right = statistics.fmean(float(word.is_right) for word in inside)
            bins.append(Bin(words=len(inside), confidence=round(expected, 4), right=round(right, 4)))
    return Row(
        decoder=name,
        calibrated=calibrated,
        words=len(words),
        right=round(statistics.fmean(float(word.is_right) for word in words), 4),
        timed_words=len(timed),
        start_error_ms=round(1e3 * statistics.median(starts), 1),
        end_error_ms=round(1e3 * statistics.median(ends), 1),
        calibration_error=round(sum(b.words * abs(b.confidence - b.right) for b in bins) / len(words), 4),
        curve=bins,
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the calibration curves: the share of right words over confidence."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes = figure.subplots(1, len(ctc.DECODERS), sharey=True)
    for panel, name in zip(axes, ctc.DECODERS, strict=True):
        panel.plot([0, 1], [0, 1], color="0.8")
        for row in rows:
            if row.decoder == name:
                label = f"{'calibrated' if row.calibrated else 'as it is'}, ECE {row.calibration_error:.3f}"
                points = [(b.confidence, b.right) for b in row.curve]
                panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        panel.set(title=name, xlabel="confidence", ylabel="share of words that are right" if name == "greedy" else "")
        panel.legend(frameon=False, fontsize=8)
    write_plot(path, figure)


def _decode(
    decoder: ctc.Decoder, row: npt.NDArray[np.float32], name: str, weights: Mapping[str, float]
) -> ctc.Hypothesis:
    options = dataclasses.replace(decoder.change_options(weights), decoder=name)
    return decoder.decode([row], [options])[0]
