"""The result of an evaluation: transcripts beside their references, with error rates by jiwer, and its rendering."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import numpy.typing as npt
from rich.cells import cell_len

from carnelian_training.data.manifest import Clip, write_manifest


@dataclass(frozen=True)
class ErrorRates:
    """The error rates over several clips together, as fractions; both are NaN if the references have no words."""

    wer: float
    cer: float
    clips: int
    words: int
    substitutions: int
    """The number of words that were replaced by others."""
    deletions: int
    """The number of words that are missing in the transcripts."""
    insertions: int
    """The number of words that are only in the transcripts."""


@dataclass(frozen=True)
class Mistakes:
    """The mistakes of an evaluation in words, or in characters; the most frequent first."""

    substitutions: list[tuple[tuple[str, str], int]]
    """Pairs of words, (in the reference, in the transcript), with their counts."""
    deletions: list[tuple[str, int]]
    """Words missing in transcripts, with their counts."""
    insertions: list[tuple[str, int]]
    """Words only in transcripts, with their counts."""
    worst: list[tuple[float, Clip, str]]
    """Error rate (infinite if only the transcript has words), clip and transcript of the clips with errors, the worst
    first."""
    totals: tuple[int, int, int]
    """The number of all substitutions, deletions and insertions."""


@dataclass(frozen=True)
class Evaluation:
    """The transcripts of a manifest's clips, in the order of the manifest."""

    clips: Sequence[Clip]
    transcripts: Sequence[str]
    failures: Mapping[int, str] = field(default_factory=dict)
    """The reason for each clip without a transcript, by the clip's position; its transcript counts as empty."""
    has_spaces: bool = True
    """False for a model without a space: mistakes are of characters, and CER stands alone. A server does not tell."""

    def error_rates(self, source: str | None = None) -> ErrorRates:
        """Compute the error rates over all clips, or over those whose manifest line has this `source`."""
        places = list(range(len(self.clips))) if source is None else self._places.get(source, [])
        hits, substitutions, deletions, insertions = self._word_counts[places].sum(0).tolist()
        character_hits, *character_errors = self._character_counts[places].sum(0).tolist()
        said = hits + substitutions + deletions
        characters = character_hits + sum(character_errors[:2])
        return ErrorRates(
            wer=(substitutions + deletions + insertions) / said if said else math.nan,
            cer=sum(character_errors) / characters if said else math.nan,
            clips=len(places),
            words=said,
            substitutions=substitutions,
            deletions=deletions,
            insertions=insertions,
        )

    def sources(self) -> list[str]:
        """Return the distinct `source` fields, in order of appearance."""
        return list(self._places)

    def mistakes(self, most: int) -> Mistakes:
        """Return the most frequent substitutions, deletions and insertions, and the worst clips: `most` of each."""
        substitutions: Counter[tuple[str, str]] = Counter()
        deletions: Counter[str] = Counter()
        insertions: Counter[str] = Counter()
        rated: list[tuple[float, Clip, str]] = []
        aligned = self._aligned_words if self.has_spaces else self._aligned_characters
        for pair, said, heard, chunks in zip(
            self._pairs(), aligned.references, aligned.hypotheses, aligned.alignments, strict=True
        ):
            errors = 0
            for chunk in chunks:
                words = said[chunk.ref_start_idx : chunk.ref_end_idx], heard[chunk.hyp_start_idx : chunk.hyp_end_idx]
                if chunk.type == "substitute":
                    substitutions.update(zip(*words, strict=True))
                elif chunk.type == "delete":
                    deletions.update(words[0])
                elif chunk.type == "insert":
                    insertions.update(words[1])
                errors += 0 if chunk.type == "equal" else max(map(len, words))
            if errors:
                rated.append((errors / len(said) if said else math.inf, *pair))
        worst = sorted(rated, key=lambda row: row[0], reverse=True)[:most]
        return Mistakes(
            substitutions.most_common(most),
            deletions.most_common(most),
            insertions.most_common(most),
            worst,
            totals=(substitutions.total(), deletions.total(), insertions.total()),
        )

    def write(self, path: Path) -> None:
        """Write the manifest's JSON lines with the transcript as `pred_text`, and `error` if a clip failed."""
        rows = []
        for i, (clip, transcript) in enumerate(self._pairs()):
            extra: dict[str, Any] = {**clip.extra, "pred_text": transcript}
            if i in self.failures:
                extra["error"] = self.failures[i]
            rows.append(replace(clip, extra=extra))
        write_manifest(path, rows)

    @cached_property
    def _places(self) -> dict[str, list[int]]:
        return places_by_source(self.clips)

    @cached_property
    def _aligned_words(self) -> jiwer.WordOutput:
        return jiwer.process_words(*self._texts())

    @cached_property
    def _word_counts(self) -> npt.NDArray[np.int64]:
        return _count(self._aligned_words.alignments)

    @cached_property
    def _aligned_characters(self) -> jiwer.CharacterOutput:
        return jiwer.process_characters(*self._texts())

    @cached_property
    def _character_counts(self) -> npt.NDArray[np.int64]:
        return _count(self._aligned_characters.alignments)

    def _texts(self) -> tuple[list[str], list[str]]:
        return single_spaced(clip.text for clip in self.clips), single_spaced(self.transcripts)

    def _pairs(self) -> list[tuple[Clip, str]]:
        return list(zip(self.clips, self.transcripts, strict=True))


def places_by_source(clips: Sequence[Clip]) -> dict[str, list[int]]:
    """Return the positions of the clips of each `source`, in order of appearance; clips without one are left out."""
    places: dict[str, list[int]] = {}
    for i, clip in enumerate(clips):
        if (source := clip.extra.get("source")) is not None:
            places.setdefault(str(source), []).append(i)
    return places


def render(evaluation: Evaluation) -> str:
    """Render WER and CER for each source that the manifest names, and for all clips together."""
    lines = []
    for source in [*evaluation.sources(), None]:
        rates = evaluation.error_rates(source)
        counts = f"{rates.clips:>6} clips {rates.words:>7} words"
        rated = ({"WER": rates.wer} if evaluation.has_spaces else {}) | {"CER": rates.cer}
        shares = "  ".join(f"{name} {rate:7.2%}" if rates.words else f"{name} {'-':>7}" for name, rate in rated.items())
        shares += "" if rates.words else f"  {rates.insertions} words inserted"
        title = "all" if source is None else source or repr(source)
        # By cells of a terminal: a Chinese character takes two, a combining accent none.
        lines.append(f"{title}{' ' * (32 - cell_len(title))} {counts}  {shares}")
    return "\n".join(lines)


def render_mistakes(evaluation: Evaluation, most: int) -> str:
    """Render the most frequent substitutions, deletions and insertions, and the worst clips."""
    mistakes = evaluation.mistakes(most)
    lines = ["substitutions {}, deletions {}, insertions {}".format(*mistakes.totals)]
    lines += [f"{count:>6}  {said} -> {heard}" for (said, heard), count in mistakes.substitutions]
    lines += [f"{count:>6}  {word} -> (nothing)" for word, count in mistakes.deletions]
    lines += [f"{count:>6}  (nothing) -> {word}" for word, count in mistakes.insertions]
    rated_by = "WER" if evaluation.has_spaces else "CER"
    for rate, clip, heard in mistakes.worst:
        lines += ["", f"{rated_by} {rate:.0%}  {clip.title}", f"  reference  {clip.text}", f"  heard      {heard}"]
    return "\n".join(lines)


def single_spaced(texts: Iterable[str]) -> list[str]:
    """Replace all white space by single spaces, because jiwer treats a tab or a no-break space as a letter."""
    return [" ".join(text.split()) for text in texts]


def count_errors(reference: str, heard: str) -> int:
    """Return the number of word errors: substitutions, deletions and insertions."""
    reference, heard = single_spaced([reference, heard])
    words = jiwer.process_words(reference, heard)
    return words.substitutions + words.deletions + words.insertions


def _count(alignments: Sequence[Sequence[jiwer.AlignmentChunk]]) -> npt.NDArray[np.int64]:
    """Count the hits, substitutions, deletions and insertions of each clip: [clips, 4]."""
    counts = []
    for chunks in alignments:
        found = {"equal": 0, "substitute": 0, "delete": 0, "insert": 0}
        for chunk in chunks:
            found[chunk.type] += max(chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx)
        counts.append(list(found.values()))
    return np.array(counts, np.int64).reshape(-1, 4)
