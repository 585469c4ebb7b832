"""Speed and accuracy of decoders, offline: on the same log-probabilities, in CPU seconds of one core.

In: a checkpoint, a manifest and a language model. The decoder is the one that is served (`carnelian_training.ctc`).
Beside it, where it is installed, runs pyctcdecode, with the same language model, weights, width and thresholds.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jiwer
import numpy as np
from carnelian_training import ctc
from carnelian_training.config import Config
from carnelian_training.ctc.language_model import read_ngrams
from carnelian_training.data.manifest import clips_to_evaluate
from carnelian_training.evaluation.error_rates import single_spaced
from carnelian_training.evaluation.evaluate import LogProbs, build_decoder, frame_duration_s, score_all
from carnelian_training.evaluation.served import connect
from carnelian_training.models.network import CtcNetwork

from carnelian_perf.accuracy.hot_words import HotwordRow, measure_hotwords, rare_words
from carnelian_perf.load import ask
from carnelian_perf.raw_file import Record, Split, describe_origin
from carnelian_perf.stages import await_statistics, read_statistics

ROUNDS = 3
BATCH, CLIP_S = 32, 16.7
CALLS = 31
Decode = Callable[[LogProbs], str]


@dataclasses.dataclass(frozen=True)
class Row:
    """The accuracy and speed of one decoder over all clips."""

    decoder: str
    wer: float
    cer: float
    cpu_s: float
    """CPU seconds for all clips together, median of the rounds."""
    clips_per_s: float
    """Clips per CPU second of one core."""
    real_time_factor: float
    """CPU seconds per second of audio."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GreedyBatch:
    """The time of greedy decoding of a batch in this process, words and their times included."""

    clips: int
    clip_s: float
    """Duration of each clip, in seconds."""
    median_cpu_ms: float
    """CPU milliseconds for the whole batch, median of :data:`CALLS` calls."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GreedyStage:
    """The time of a server's decoding stage for a batch in one request, by Triton: medians of :data:`CALLS` calls."""

    clips: int
    clip_s: float
    compute_infer_ms: float
    stage_ms: float
    """Milliseconds that the stage took, queue and copies of tensors included."""
    stage_least_ms: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf decoding`."""

    subject: Literal["decoding"] = "decoding"
    manifest: str
    language_model: str
    """File name of the language model."""
    options: dict[str, Any]
    """The options that all decoders share, without the hot words."""
    clips: int
    words: int
    """Number of words in the references."""
    audio_s: float
    rounds_cpu_s: dict[str, list[float]]
    """Decoder -> CPU seconds of each round, all clips together."""
    decoders: list[Row]
    greedy_batch: GreedyBatch
    greedy_stage: GreedyStage | None
    """None if no server was given."""
    rare_words: list[str]
    hotwords: list[HotwordRow]
    """Results with hot words; empty if no word is rare."""


def measure(
    config: Config,
    network: CtcNetwork,
    manifest: Path,
    language_model: Path,
    weights: Mapping[str, float],
    boosts: Sequence[float],
    url: str | None,
) -> Measurement:
    """Decode a manifest by every decoder.

    Args:
        config: Configuration of the network.
        network: The network that gives the log-probabilities.
        manifest: NeMo JSON lines with references.
        language_model: File of the language model, for the decoder `ngram`.
        weights: Weights of the language model, where they differ from the decoder's defaults.
        boosts: Boosts of hot words to try.
        url: host:port of a server of the same model, whose decoding stage is measured too; None for none.

    Raises:
        ValueError: The file is not a manifest, or has no words to compare with.
        RuntimeError: There is no such server, or it has no such model.
    """
    origin = describe_origin()
    clips = clips_to_evaluate(manifest)
    # Fail here rather than after the minutes that scoring takes.
    if url is not None:
        connect(url, config.name).close()
    decoder = build_decoder(config, language_model)
    usual = decoder.change_options(weights)
    for boost in boosts:
        decoder.read_options({"decoder": "beam", "hotwords": [], "hotword_boost": str(boost)}, usual)
    log_probs = score_all(network, config, clips, manifest)
    batch = make_batch(log_probs, frame_duration_s(config))
    references = single_spaced(clip.text for clip in clips)
    audio_s = sum(clip.duration for clip in clips)
    ways = {name: _way(decoder, {"decoder": name}, usual) for name in ("greedy", "beam", "ngram")}
    if (peer := _pyctcdecode(config.labels, language_model, usual)) is not None:
        ways["pyctcdecode"] = peer
    times, heard = decode_in_turns(ways, log_probs)
    rows = [
        Row(
            name,
            jiwer.wer(references, heard[name]),
            jiwer.cer(references, heard[name]),
            cpu_s := statistics.median(times[name]),
            len(clips) / cpu_s,
            cpu_s / audio_s,
        )
        for name in ways
    ]
    rare = rare_words(references, language_model)
    return Measurement(
        model=config.name,
        **origin,
        manifest=str(manifest),
        language_model=language_model.name,
        options={k: v for k, v in dataclasses.asdict(usual).items() if k != "hotwords"},
        clips=len(clips),
        words=sum(len(text.split()) for text in references),
        audio_s=round(audio_s, 2),
        rounds_cpu_s={name: [round(t, 4) for t in seconds] for name, seconds in times.items()},
        decoders=rows,
        greedy_batch=measure_greedy_batch(decoder, batch),
        greedy_stage=measure_stage(url, config.name, batch) if url else None,
        rare_words=rare,
        hotwords=measure_hotwords(decoder, usual, log_probs, references, rare, boosts) if rare else [],
    )


def decode_in_turns(
    ways: Mapping[str, Decode], log_probs: Sequence[LogProbs]
) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Decode all clips by all decoders in turns, so that other load on the machine affects all decoders alike.

    Returns:
        Decoder -> CPU seconds of each round, and decoder -> text of each clip.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    heard: dict[str, list[str]] = {}
    for _ in range(ROUNDS):
        for name, decode in ways.items():
            started = time.process_time()
            heard[name] = [decode(row) for row in log_probs]
            times[name].append(time.process_time() - started)
    return times, heard


def make_batch(log_probs: Sequence[LogProbs], frame_s: float) -> list[LogProbs]:
    """Cut :data:`BATCH` stretches of :data:`CLIP_S` seconds from the joined clips, starting again at their end."""
    frames = np.concatenate(log_probs)
    num_frames = round(CLIP_S / frame_s)
    starts = np.linspace(0, max(len(frames) - num_frames, 0), BATCH).astype(int)
    return [np.take(frames, range(start, start + num_frames), axis=0, mode="wrap") for start in starts]


def measure_greedy_batch(decoder: ctc.Decoder, batch: Sequence[LogProbs]) -> GreedyBatch:
    """Measure the median CPU time of greedy decoding of a batch, words and their times included."""
    times = []
    for _ in range(CALLS):
        started = time.process_time()
        decoder.decode(batch, [ctc.Options()] * len(batch))
        times.append(time.process_time() - started)
    return GreedyBatch(clips=len(batch), clip_s=CLIP_S, median_cpu_ms=round(1e3 * statistics.median(times), 3))


def measure_stage(url: str, model: str, batch: Sequence[LogProbs]) -> GreedyStage:
    """Measure how long a server's `<model>_ctc` takes to decode a batch greedily, by Triton's statistics.

    Args:
        url: host:port of the server's gRPC endpoint.
        model: Name of the ensemble.
        batch: Log-probabilities of equal lengths, which are sent as one request.
    """
    from tritonclient import grpc

    stage = f"{model}_ctc"
    inputs = {"LOG_PROBS": np.stack(batch), "LOG_PROB_LENGTH": np.array([[len(clip)] for clip in batch], np.int32)}
    each: list[Split] = []
    with grpc.InferenceServerClient(url) as client:
        before = read_statistics(client, stage)
        for _ in range(CALLS + 1):
            ask(client, stage, inputs, ("TRANSCRIPT", "RESULT"), f"a batch of {len(batch)}")
            now = await_statistics(client, stage, before)
            each, before = [*each, now.since(before).mean_request()], now
    each = each[1:]  # the first one warmed up
    return GreedyStage(
        clips=len(batch),
        clip_s=CLIP_S,
        compute_infer_ms=round(statistics.median(split.infer for split in each), 3),
        stage_ms=round(statistics.median(split.total for split in each), 3),
        stage_least_ms=round(min(split.total for split in each), 3),
    )


def _way(decoder: ctc.Decoder, parameters: dict[str, str], usual: ctc.Options) -> Decode:
    options = decoder.read_options(parameters, usual)
    return lambda row: decoder.decode([row], [options])[0].text


def _pyctcdecode(labels: Sequence[str], language_model: Path, options: ctc.Options) -> Decode | None:
    try:
        from pyctcdecode.alphabet import Alphabet
        from pyctcdecode.decoder import BeamSearchDecoderCTC
        from pyctcdecode.language_model import LanguageModel
    except ModuleNotFoundError:
        return None
    ngrams, words = read_ngrams(language_model)
    # In pyctcdecode, an unknown word's score is a decimal logarithm, multiplied by the weight; -10 by default.
    unknown_score = options.unknown_score / (options.lm_weight * math.log(10))
    weights = options.lm_weight, options.word_score, unknown_score
    decoder = BeamSearchDecoderCTC(Alphabet.build_alphabet([*labels, ""]), LanguageModel(ngrams, words, *weights))
    return lambda row: str(
        decoder.decode(
            row.astype(np.float64),
            beam_width=options.beam_width,
            beam_prune_logp=-options.beam_threshold,
            token_min_logp=options.token_threshold,
        )
    )
