"""Comparison of decoders (greedy, n-gram, rescored), offline and through a server, which must give the same result.

Input: a checkpoint, test sets and language models. Output: a :class:`Row` for each test set and way to decode.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carnelian_training import ctc
from carnelian_training.config import Config
from carnelian_training.data.manifest import Clip, clips_to_evaluate, warn_of_characters
from carnelian_training.evaluation.evaluate import Evaluation, LogProbs, find_too_short, score_all
from carnelian_training.evaluation.served import DecodingClock, connect, transcribe_served
from carnelian_training.models.network import CtcNetwork
from carnelian_training.replacement import replaced

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
    defaults: Mapping[str, Any],
    server: tuple[str, str] | None = None,
) -> Iterator[Row]:
    """Decode every test set in every way; yield a row for each.

    Each `source` of a manifest is a test set, and the whole manifest is another. Clips that fail are logged once.

    Args:
        network: the recogniser, in training or evaluation mode.
        config: the network's configuration.
        manifests: paths of NeMo manifests.
        decoder: the decoder, with the language models to compare.
        defaults: changed default options of the decoder. A server uses those of its export, and gives the same
            transcripts only if they are equal.
        server: host:port of a server and the name of its model, to compare with; or None.

    Raises:
        ValueError: A file is not a manifest, or its transcripts have no words; or the options are wrong.
        RuntimeError: The server is not ready.
    """
    usual = decoder.change_options(defaults)
    offline = _compare_offline(network, config, manifests, decoder, usual)
    named: set[Clip] = set()
    if server is None:
        for row, evaluation, _ in offline:
            _name_failures(evaluation, named)
            yield row
        return
    with connect(*server) as client, DecodingClock(*server) as clock:
        for row, evaluation, options in offline:
            _name_failures(evaluation, named)
            yield _with_served(row, evaluation, options, client, clock, named)


def _compare_offline(
    network: CtcNetwork, config: Config, manifests: Sequence[Path], decoder: ctc.Decoder, usual: ctc.Options
) -> Iterator[tuple[Row, Evaluation, Mapping[str, str]]]:
    """Yield rows without a server's figures, each with its evaluation and its decoder options."""
    for manifest in manifests:
        clips = clips_to_evaluate(manifest)
        warn_of_characters(clips, config.labels)
        log_probs = score_all(network, config, clips)
        everything = Evaluation(clips, [""] * len(clips))
        for source in [*everything.sources(), None]:
            places = everything.places(source)
            for name, options in ways_to_decode(decoder).items():
                wanted = decoder.read_options(options, usual)
                chosen, rows = [clips[i] for i in places], [log_probs[i] for i in places]
                heard, seconds = decode(rows, decoder, wanted)
                evaluation = Evaluation(chosen, heard, find_too_short(chosen, rows))
                rates, measured = evaluation.error_rates(), _measured(evaluation, seconds)
                test_set = str(manifest) if source is None else source or repr(source)
                failed = len(evaluation.failures)
                row = Row(test_set, name, rates.clips, rates.words, measured, failed=failed)
                yield row, evaluation, options


def decode(log_probs: Sequence[LogProbs], decoder: ctc.Decoder, options: ctc.Options) -> tuple[list[str], float]:
    """Decode clips in batches of similar length; return their texts and the decoding time in seconds of one core.

    Args:
        log_probs: log-probabilities of each clip, [frames, labels + 1] float32.
        decoder: the decoder of these labels.
        options: decoder options for all clips.
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
    with replaced(path) as partial:
        partial.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def _columns(measured: Measured) -> list[str]:
    return [
        *("-" if rate is None else f"{rate:.2%}"[:-1] for rate in (measured.wer, measured.cer)),
        f"{measured.decode_s:.3g}",
        f"{measured.real_time_factor:.2g}",
    ]


def _measured(evaluation: Evaluation, seconds: float) -> Measured:
    rates, audio_s = evaluation.error_rates(), sum(clip.duration for clip in evaluation.clips)
    wer, cer = (rates.wer, rates.cer) if rates.words else (None, None)
    return Measured(wer, cer, round(seconds, 6), round(seconds / audio_s, 8))


def _name_failures(evaluation: Evaluation, named: set[Clip]) -> None:
    for i, reason in evaluation.failures.items():
        if evaluation.clips[i] not in named:
            named.add(evaluation.clips[i])
            logger.error("%s failed: %s", evaluation.clips[i].title, reason)


def _with_served(
    row: Row,
    offline: Evaluation,
    options: Mapping[str, str],
    client: "CarnelianClient",
    clock: DecodingClock,
    named: set[Clip],
) -> Row:
    clock.restart()
    served = transcribe_served(client, offline.clips, options)
    seconds = clock.elapsed_s(len(offline.clips) - len(served.failures))
    _name_failures(served, named)
    same = sum(a == b for a, b in zip(offline.transcripts, served.transcripts, strict=True))
    failed = len({*offline.failures, *served.failures})
    return replace(row, served=_measured(served, seconds), same=same, failed=failed)
