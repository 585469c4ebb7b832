"""Comparison of decoders (greedy, n-gram, rescored), offline and through a server, which must give the same result.

Input: a checkpoint, test sets and language models. Output: a :class:`Row` for each test set and way to decode.
"""

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from carnelian_training import ctc
from carnelian_training.config import Config
from carnelian_training.data.manifest import Clip, clips_to_evaluate, warn_of_characters
from carnelian_training.evaluation.error_rates import ErrorRates, Evaluation, places_by_source
from carnelian_training.evaluation.evaluate import LogProbs, find_too_short, score_all
from carnelian_training.evaluation.served import DecodingClock, connect, transcribe_served
from carnelian_training.models.network import CtcNetwork
from carnelian_training.replacement import write_text

if TYPE_CHECKING:
    from carnelian_client import CarnelianClient

logger = logging.getLogger(__name__)

BATCH = 32
"""The number of clips decoded together, the most that a server decodes at once."""


@dataclass(frozen=True)
class Measured:
    """The error rates of a test set and the time that decoding took."""

    wer: float | None
    """The word error rate as a fraction; None if the references have no words."""
    cer: float | None
    """The character error rate as a fraction; None if the references have no words."""
    decode_s: float
    """The decoding time in seconds: of one CPU core offline, of the stage `<model>_ctc` on a server."""
    real_time_factor: float
    """The decoding time divided by the duration of the audio; the network's time is not included."""


@dataclass(frozen=True)
class Row:
    """The result of one test set, decoded in one way."""

    test_set: str
    decoder: str
    clips: int
    words: int
    offline: Measured
    served: Measured | None = None
    same: int | None = None
    """The number of clips with the same transcript from the server as offline."""
    failed: int = 0
    """The number of clips without a transcript, offline or served; their transcripts count as empty."""


def ways_to_decode(decoder: ctc.Decoder) -> dict[str, dict[str, str]]:
    """Return the ways to decode, row name -> decoder options: greedy, and one more for each language model."""
    ways = {"greedy": {"decoder": "greedy"}}
    if decoder.language_model:
        ways["n-gram"] = {"decoder": "ngram", "rescore": "false"}
    if decoder.neural_language_model:
        searched = "ngram" if decoder.language_model else "beam"
        ways[decoder.neural_language_model.name] = {"decoder": searched, "rescore": "true"}
    return ways


def compare(
    network: CtcNetwork,
    config: Config,
    manifests: Sequence[Path],
    decoder: ctc.Decoder,
    usual: ctc.Options,
    server: tuple[str, str] | None = None,
) -> Iterator[Row]:
    """Decode every test set in every way; yield a row for each.

    Each `source` of a manifest is a test set, and the whole manifest is another. Clips that fail are logged once. The
    decoder has the language models to compare, and `usual` are its default options. A server (host:port, and the name
    of its model) uses those of its export, and gives the same transcripts only if they are equal.

    Raises:
        ValueError: A file is not a manifest, or its transcripts have no words.
        RuntimeError: The server is not ready, or clips are bad.
        OptionError: The server does not know an option.
    """
    failed: set[Clip] = set()
    with contextlib.ExitStack() as stack:
        served = None
        if server is not None:
            served = stack.enter_context(connect(*server)), stack.enter_context(DecodingClock(*server))
        for manifest in manifests:
            clips = clips_to_evaluate(manifest)
            warn_of_characters(clips, config.labels)
            log_probs = score_all(network, config, clips, manifest)
            ways = ways_to_decode(decoder)
            parts: dict[str, list[_Part]] = {name: [] for name in ways}
            for source, places in _by_source(clips):
                chosen, rows = [clips[i] for i in places], [log_probs[i] for i in places]
                for name, way in ways.items():
                    heard, offline_s = decode(rows, decoder, decoder.read_options(way, usual))
                    part = _Part(Evaluation(chosen, heard, find_too_short(chosen, rows)), offline_s)
                    if served is not None:
                        part = _ask(part, *served, way)
                    _name_failures(part, failed)
                    parts[name].append(part)
                    if source is None:
                        yield _row(str(manifest), name, parts[name])
                    else:
                        yield _row(source or repr(source), name, [part])


@dataclass(frozen=True)
class _Part:
    """Some clips of a test set, decoded in one way, and the seconds that this took."""

    offline: Evaluation
    offline_s: float
    served: Evaluation | None = None
    served_s: float = 0.0


def _by_source(clips: Sequence[Clip]) -> list[tuple[str | None, list[int]]]:
    """Return the positions of the clips of each `source`; the last entry, None, has those without a source."""
    places = places_by_source(clips)
    rest = set(range(len(clips))).difference(*places.values())
    return [*places.items(), (None, sorted(rest))]


def _ask(part: _Part, client: "CarnelianClient", clock: DecodingClock, way: Mapping[str, str]) -> _Part:
    """Add what a server transcribes of the same clips."""
    clock.restart()
    served = transcribe_served(client, part.offline.clips, way)
    return replace(part, served=served, served_s=clock.elapsed_s(len(served.clips) - len(served.failures)))


def _row(test_set: str, name: str, parts: Sequence[_Part]) -> Row:
    """Return the row of the clips of all parts together."""
    rates, measured = _measured([part.offline for part in parts], sum(part.offline_s for part in parts))
    served = [part.served for part in parts if part.served is not None]
    failed = sum(len({*part.offline.failures, *(part.served.failures if part.served else ())}) for part in parts)
    row = Row(test_set, name, rates.clips, rates.words, measured, failed=failed)
    if not served:
        return row
    same = sum(
        transcript == answer
        for part, answers in zip(parts, served, strict=True)
        for transcript, answer in zip(part.offline.transcripts, answers.transcripts, strict=True)
    )
    _, measured = _measured(served, sum(part.served_s for part in parts))
    return replace(row, served=measured, same=same)


def decode(log_probs: Sequence[LogProbs], decoder: ctc.Decoder, options: ctc.Options) -> tuple[list[str], float]:
    """Decode clips in batches of similar length; return their texts and the decoding time in seconds of one core.

    `log_probs` has [frames, labels + 1] float32 of each clip.
    """
    order = sorted(range(len(log_probs)), key=lambda i: len(log_probs[i]))
    heard: dict[int, str] = {}
    seconds = 0.0
    for first in range(0, len(order), BATCH):
        places = order[first : first + BATCH]
        batch = [log_probs[i] for i in places]
        started = time.thread_time()
        hypotheses = decoder.decode(batch, [options] * len(places))
        seconds += time.thread_time() - started
        heard |= {i: hypothesis.text for i, hypothesis in zip(places, hypotheses, strict=True)}
    return [heard[i] for i in range(len(log_probs))], seconds


def render_comparison(rows: Sequence[Row]) -> str:
    """Render the comparison as a Markdown table."""
    has_server = any(row.served for row in rows)
    heads = ["test set", "decoder", "clips", "words", "WER %", "CER %", "decode s", "RTF"]
    heads += ["served WER %", "CER %", "decode s", "RTF", "the same"] if has_server else []
    lines = [heads, ["---", "---", *["--:"] * (len(heads) - 2)]]
    for row in rows:
        lines.append([row.test_set, row.decoder, str(row.clips), str(row.words), *_columns(row.offline)])
        if row.served:
            lines[-1] += [*_columns(row.served), f"{row.same} of {row.clips}"]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_comparison(path: Path, rows: Sequence[Row]) -> None:
    """Write the comparison as JSON lines, one per row."""
    write_text(path, "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows))


def _columns(measured: Measured) -> list[str]:
    return [
        *("-" if rate is None else f"{rate:.2%}"[:-1] for rate in (measured.wer, measured.cer)),
        f"{measured.decode_s:.3g}",
        f"{measured.real_time_factor:.2g}",
    ]


def _measured(evaluations: Sequence[Evaluation], seconds: float) -> tuple[ErrorRates, Measured]:
    """Return the rates over the clips of all evaluations together."""
    clips = [clip for evaluation in evaluations for clip in evaluation.clips]
    transcripts = [transcript for evaluation in evaluations for transcript in evaluation.transcripts]
    rates, audio_s = Evaluation(clips, transcripts).error_rates(), sum(clip.duration for clip in clips)
    wer, cer = (rates.wer, rates.cer) if rates.words else (None, None)
    return rates, Measured(wer, cer, round(seconds, 6), round(seconds / audio_s, 8))


def _name_failures(part: _Part, named: set[Clip]) -> None:
    for evaluation in filter(None, (part.offline, part.served)):
        for i, reason in evaluation.failures.items():
            if evaluation.clips[i] not in named:
                named.add(evaluation.clips[i])
                logger.error("%s failed: %s", evaluation.clips[i].title, reason)
