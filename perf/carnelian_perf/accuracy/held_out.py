"""What language models gain on clips that their weights were not chosen on.

Speakers are dealt into groups. The clips of each group are decoded with weights that were chosen on all other groups,
so that neither its sentences nor its speakers influence its weights. Out: one raw file with every clip.
"""

import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from carnelian_training import ctc
from carnelian_training.config import Config
from carnelian_training.data.manifest import Clip, clips_to_evaluate
from carnelian_training.evaluation.comparison import decode, ways_to_decode
from carnelian_training.evaluation.error_rates import count_errors
from carnelian_training.evaluation.evaluate import LogProbs, build_decoder, score_all
from carnelian_training.language_models.weights import choose_weights
from carnelian_training.models.network import CtcNetwork
from pydantic import Field

from carnelian_perf.accuracy.pairs import Difference, compare
from carnelian_perf.raw_file import Record, describe_origin

LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ClipErrors:
    """The word errors of one clip in every way of decoding."""

    clip: str
    speaker: str | None
    """The speaker that the manifest names; None if it names none, and the clip counts as a speaker of its own."""
    group: int
    words: int
    errors: dict[str, int]
    """Way of decoding -> number of word errors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gain(Difference):
    """The change of the word error rate from one way of decoding to the next."""

    before: Annotated[str, Field(alias="from")]
    """The way of decoding that `after` is compared with."""
    after: Annotated[str, Field(alias="to")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The results over all clips together."""

    words: int
    wer: dict[str, float]
    """Way of decoding -> word error rate, as a fraction."""
    gains: list[Gain]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf held-out`."""

    subject: Literal["held-out"] = "held-out"
    manifest: str
    language_models: list[str]
    """File names: n-grams and, if there is one, the neural model."""
    groups: int
    options: list[dict[str, float]]
    """For each group, the weights that it was decoded with; they were chosen on all other groups."""
    summary: Summary
    clips: list[ClipErrors]


def measure(
    config: Config,
    network: CtcNetwork,
    manifest: Path,
    language_model: Path,
    neural_language_model: Path | None,
    groups: int,
) -> Measurement:
    """For each group, choose weights on the other groups and decode it with them.

    Args:
        config: Configuration of the network.
        network: The network that gives the log-probabilities.
        manifest: NeMo JSON lines with references and, if there are several, speakers.
        language_model: File of the n-gram language model.
        neural_language_model: File of the neural language model that rescores; None leaves rescoring out.
        groups: Number of groups.

    Raises:
        ValueError: There are fewer speakers than groups.
    """
    origin = describe_origin()
    clips = clips_to_evaluate(manifest)
    of_clip = deal(clips, groups)
    log_probs = score_all(network, config, clips, manifest)
    decoder = build_decoder(config, language_model, neural_language_model=neural_language_model)
    chosen, heard = decode_with_weights_of_others(decoder, log_probs, clips, of_clip)
    rows = [
        ClipErrors(
            clip.audio_filepath.name,
            _speaker(clip),
            of_clip[i],
            len(clip.text.split()),
            {name: count_errors(clip.text, texts[i]) for name, texts in heard.items()},
        )
        for i, clip in enumerate(clips)
    ]
    return Measurement(
        model=config.name,
        **origin,
        manifest=str(manifest),
        language_models=[path.name for path in (language_model, neural_language_model) if path],
        groups=groups,
        options=chosen,
        summary=summarise(rows),
        clips=rows,
    )


def decode_with_weights_of_others(
    decoder: ctc.Decoder, log_probs: Sequence[LogProbs], clips: Sequence[Clip], of_clip: Sequence[int]
) -> tuple[list[dict[str, float]], dict[str, list[str]]]:
    """Choose the weights of each group on all others, and decode its clips with them.

    Args:
        decoder: The decoder with the language models.
        log_probs: Log-probabilities of each clip, [frames, labels + 1] float32.
        clips: The clips with their references.
        of_clip: The group of each clip.

    Returns:
        The weights of each group, and for each way of decoding the text of each clip.
    """
    chosen: list[dict[str, float]] = []
    ways = ways_to_decode(decoder)
    heard = {name: [""] * len(clips) for name in ways}
    for group in range(max(of_clip) + 1):
        others = [i for i, other in enumerate(of_clip) if other != group]
        mine = [i for i, other in enumerate(of_clip) if other == group]
        options = choose_weights([log_probs[i] for i in others], [clips[i].text for i in others], decoder)
        chosen.append(options)
        for name, way in ways.items():
            wanted = decoder.read_options(way, decoder.change_options(options))
            texts, _ = decode([log_probs[i] for i in mine], decoder, wanted)
            for i, text in zip(mine, texts, strict=True):
                heard[name][i] = text
    return chosen, heard


def deal(clips: Sequence[Clip], groups: int) -> list[int]:
    """Deal clips into groups of about equally many words, with no speaker and no sentence in two groups.

    Returns:
        The group of each clip.

    Raises:
        ValueError: There are fewer speakers than groups; speakers who read the same sentence count as one.
    """
    if nameless := sum(clip.extra.get("speaker") is None for clip in clips):
        LOGGER.warning(
            "%d of %d clips name no `speaker` and are dealt out as if each had its own: a voice may have chosen the "
            "weights that it is decoded with",
            nameless,
            len(clips),
        )
    of_clip = _join(clips)
    words: Counter[int] = Counter()
    for joined, clip in zip(of_clip, clips, strict=True):
        words[joined] += len(clip.text.split())
    if len(words) < groups:
        raise ValueError(
            f"each group must have its own speakers, but there are {len(words)} for {groups} groups: lower `--groups`, "
            "or give clips of more"
        )
    sizes = [0] * groups
    group_of: dict[int, int] = {}
    for joined, count in words.most_common():
        group_of[joined] = sizes.index(min(sizes))
        sizes[group_of[joined]] += count
    return [group_of[joined] for joined in of_clip]


def _join(clips: Sequence[Clip]) -> list[int]:
    """Return for each clip the index of the clip that represents its set: those with equal speakers or sentences."""
    leader = list(range(len(clips)))  # a union-find with path halving
    first: dict[tuple[str, str], int] = {}

    def find(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    for i, clip in enumerate(clips):
        leader[find(i)] = find(first.setdefault(("text", clip.text), i))
        if (speaker := _speaker(clip)) is not None:
            leader[find(i)] = find(first.setdefault(("speaker", speaker), i))
    return [find(i) for i in range(len(clips))]


def summarise(rows: Sequence[ClipErrors]) -> Summary:
    """Compute word error rates, and the gain of each way over the one before with its 95 % interval over speakers."""
    words = [row.words for row in rows]
    named = sorted({row.speaker for row in rows if row.speaker is not None})
    place = {speaker: i for i, speaker in enumerate(named)}
    speakers = [len(named) + i if row.speaker is None else place[row.speaker] for i, row in enumerate(rows)]
    ways = list(rows[0].errors)
    errors = {name: [row.errors[name] for row in rows] for name in ways}
    gains = [
        Gain(before=before, after=after, **dataclasses.asdict(compare(words, errors[before], errors[after], speakers)))
        for before, after in itertools.pairwise(ways)
    ]
    return Summary(words=sum(words), wer={name: sum(errors[name]) / sum(words) for name in ways}, gains=gains)


def _speaker(clip: Clip) -> str | None:
    speaker = clip.extra.get("speaker")
    return None if speaker is None else str(speaker)
