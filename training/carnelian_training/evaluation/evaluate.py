"""Evaluation of a model: every clip of a manifest once, decoded as on a server.

Input: a model and a manifest, whose clips several processes share. Output: an :class:`Evaluation`, in every process. To
evaluate a running server, see `served.py`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from carnelian_training import ctc
from carnelian_training.config import Config
from carnelian_training.data.loading import load
from carnelian_training.data.manifest import Clip, clips_to_evaluate
from carnelian_training.data.plan import Item, group
from carnelian_training.distributed import Process
from carnelian_training.evaluation.error_rates import Evaluation
from carnelian_training.features import SAMPLE_RATE_HZ
from carnelian_training.models.network import CtcNetwork, evaluating
from carnelian_training.precision import full_precision
from carnelian_training.progress import clip_progress

LogProbs: TypeAlias = npt.NDArray[np.float32]
"""The log-probabilities of one clip, [frames, labels + 1]; the last label is the blank."""

MOST_S = 600.0
"""The most seconds of audio in a batch, padding included: a training step may be for many devices, this for a
laptop."""


def frame_duration_s(config: Config) -> float:
    """Return the seconds per output frame of a model."""
    return config.model.stride * config.features.hop_samples / SAMPLE_RATE_HZ


def build_decoder(
    config: Config,
    language_model: Path | None = None,
    *,
    neural_language_model: Path | None = None,
    calibration: ctc.Calibration | None = None,
) -> ctc.Decoder:
    """Build the decoder for a model's labels and frames; see :class:`carnelian_training.ctc.Decoder`."""
    return ctc.Decoder(
        config.labels,
        frame_duration_s(config),
        language_model=language_model,
        neural_language_model=neural_language_model,
        calibration=calibration,
    )


def batch_s(config: Config) -> float:
    """Return the seconds of audio, padding included, that a process evaluates at once."""
    return min(config.data.device_batch_s or config.data.batch_s, MOST_S)


def evaluate(
    model: CtcNetwork,
    config: Config,
    manifest: Path,
    process: Process | None = None,
    decoder: ctc.Decoder | None = None,
    options: ctc.Options | None = None,
) -> Evaluation:
    """Transcribe a manifest in batches of clips of about equal length; the result does not depend on the batches.

    All processes must call this, with equal weights, and each transcribes its own share of the batches. By default
    there is no language model, and options are the general ones.

    Raises:
        ValueError: The file is not a manifest, or its transcripts have no words.
        RuntimeError: Clips are bad; see :func:`.load`.
    """
    decoder = decoder or build_decoder(config)
    options = options or ctc.Options()
    process = process or Process(next(model.parameters()).device)
    clips = clips_to_evaluate(manifest)
    heard: dict[int, str] = {}
    too_short: dict[int, str] = {}
    for share, log_probs in score(model, config, clips, process, manifest):
        hypotheses = decoder.decode(log_probs, [options] * len(share))
        heard |= {i: hypothesis.text for i, hypothesis in zip(share, hypotheses, strict=True)}
        too_short |= {share[k]: why for k, why in find_too_short([clips[i] for i in share], log_probs).items()}
    heard, too_short = process.union(heard), process.union(too_short)
    return Evaluation(clips, [heard[i] for i in range(len(clips))], too_short, has_spaces=" " in config.labels)


def find_too_short(clips: Sequence[Clip], log_probs: Sequence[LogProbs]) -> dict[int, str]:
    """Return a message for each clip without an output frame, by the clip's position."""
    return {
        i: f"too short: the network makes no frame of {clip.duration:g} s"
        for i, (clip, rows) in enumerate(zip(clips, log_probs, strict=True))
        if not len(rows)
    }


@torch.inference_mode()
def score(
    model: CtcNetwork,
    config: Config,
    clips: Sequence[Clip],
    process: Process,
    manifest: Path | None,
    *,
    strict: bool = True,
) -> Iterator[tuple[list[int], list[LogProbs]]]:
    """Run the network on this process's share of the clips; yield positions and log-probabilities, batch by batch.

    A bad clip is an error, with the name of `manifest`, or, if not `strict`, logged and left out. The process of rank 0
    shows its progress.

    Raises:
        RuntimeError: Clips are bad, and `strict`; see :func:`.load`.
    """
    order = sorted(range(len(clips)), key=lambda i: clips[i].duration)
    batches = group([Item(clips[i]) for i in order], batch_s(config))
    positions = iter(order)
    shares = [[next(positions) for _ in batch] for batch in batches][process.rank :: process.size]
    loaded = load(
        batches[process.rank :: process.size],
        config.features,
        config.data.num_threads,
        strict=strict,
        manifest=manifest,
    )
    total = sum(map(len, shares))
    with clip_progress(total, is_shown=process.leads, leave=False) as progress:
        for share, batch in zip(shares, loaded, strict=True):
            bad = {item.clip for item, _ in batch.skipped}
            if kept := [i for i in share if clips[i] not in bad]:
                with evaluating(model), full_precision():
                    log_probs, lengths = model(batch.features.to(process.device), batch.lengths.to(process.device))
                rows = zip(log_probs.cpu().numpy(), lengths.tolist(), strict=True)
                yield kept, [row[:length] for row, length in rows]
            progress(len(share))


def score_all(model: CtcNetwork, config: Config, clips: Sequence[Clip], manifest: Path | None = None) -> list[LogProbs]:
    """Return the log-probabilities of each clip, [frames, labels + 1], to decode them more than once.

    `manifest`, that of the clips, is for the message of an error.

    Raises:
        RuntimeError: Clips are bad; see :func:`.load`.
    """
    found: dict[int, LogProbs] = {}
    for share, log_probs in score(model, config, clips, Process(next(model.parameters()).device), manifest):
        found |= {i: clip.copy() for i, clip in zip(share, log_probs, strict=True)}
    return [found[i] for i in range(len(clips))]
