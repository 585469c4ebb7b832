"""Choice of the weights of language models: those with the fewest word errors on a dev set.

Input: log-probabilities of clips with known words, and a decoder with language models. Output: options of the decoder.

A search lists readings of each clip, with the parts of their scores kept apart: the recogniser's, the language models',
the number of words. So every point of a grid of weights can be tried by sorting these lists again. The search is then
repeated with the best weights, its readings are added to the lists, and the grid is tried again, until the best weights
no longer change. A grid has thousands of points and a dev set often only hundreds of words, so the best single point is
mostly best by chance. So points are compared by the mean errors of their neighbourhood.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import numpy.typing as npt

from carnelian_training import ctc
from carnelian_training.ctc.options import change_options
from carnelian_training.evaluation.comparison import decode, ways_to_decode
from carnelian_training.evaluation.error_rates import count_errors, single_spaced
from carnelian_training.evaluation.evaluate import LogProbs
from carnelian_training.replacement import write_text

logger = logging.getLogger(__name__)

SEARCH_GRID = {
    "lm_weight": np.arange(0.1, 2.01, 0.1),
    "word_score": np.arange(-3.0, 5.01, 0.5),
    "unknown_score": np.arange(-18.0, 0.01, 3.0),
}
RESCORING_GRID = {"rescore_weight": np.arange(0.0, 1.51, 0.1)}
LISTED = 100
"""The most readings of a clip that a search adds."""
MOST_SEARCHES = 6

Floats = npt.NDArray[np.float64]


@dataclass
class Readings:
    """The readings of one clip that the searches have found."""

    reference: str
    rows: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """For each text, the parts of its score and its errors: log-probabilities of recogniser, n-gram model and neural
    language model, number of words, number of unknown words; and number of word errors."""

    def add(self, alternatives: Sequence[ctc.Alternative], decoder: ctc.Decoder, rescore: bool) -> None:
        """Add the readings of a search that are not there yet."""
        new = [reading for reading in alternatives if reading.text not in self.rows]
        neural = [0.0] * len(new)
        if rescore and decoder.neural_language_model and new:
            neural = decoder.neural_language_model.score([reading.text for reading in new]).tolist()
        for reading, log_prob in zip(new, neural, strict=True):
            ngram, unknown = decoder.language_model.rate(reading.text) if decoder.language_model else (0.0, 0)
            words, wrong = len(reading.text.split()), count_errors(self.reference, reading.text)
            self.rows[reading.text] = (reading.acoustic, ngram, log_prob, words, unknown, wrong)


def choose_weights(log_probs: Sequence[LogProbs], references: Sequence[str], decoder: ctc.Decoder) -> dict[str, float]:
    """Choose the weights of the decoder's language models.

    `log_probs` has [frames, labels + 1] float32 of each clip.

    Returns:
        Options of the decoder, only those of the language models that it has.

    Raises:
        ValueError: The decoder has no language model.
    """
    if not (decoder.language_model or decoder.neural_language_model):
        raise ValueError("there must be a language model to weigh, but there is none: give --lm or --neural-lm")
    options = ctc.Options(decoder="ngram" if decoder.language_model else "beam")
    chosen: dict[str, Any] = {}
    if decoder.language_model:
        chosen = _weigh_search(log_probs, references, decoder, options)
        options = replace(options, **chosen)
    if decoder.neural_language_model:
        lists = [Readings(reference) for reference in references]
        _search(log_probs, lists, decoder, replace(options, n_best=options.rescore_depth), rescore=True)
        chosen |= _best_point(lists, RESCORING_GRID, options)
    _warn_of_edges(chosen)
    return chosen


def word_error_rates(
    log_probs: Sequence[LogProbs], references: Sequence[str], decoder: ctc.Decoder, options: Mapping[str, float]
) -> dict[str, Any]:
    """Compute the word error rate of each way to decode, as a fraction, with the default weights and with `options`."""
    rates = {}
    for name, way in ways_to_decode(decoder).items():
        for weights, defaults in (("", {}), (", weighed", options)):
            if weights and name == "greedy":
                continue
            wanted = decoder.read_options(way, decoder.change_options(defaults))
            rates[name + weights] = jiwer.wer(single_spaced(references), decode(log_probs, decoder, wanted)[0])
    return rates


def write_weights(path: Path, options: Mapping[str, float], report: Mapping[str, Any]) -> None:
    """Write the options and the report on their choice as JSON."""
    content = {"options": dict(options), **report}
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_weights(path: Path | None, *language_models: Path | None) -> dict[str, Any]:
    """Read the options in a file of `carnelian-train weigh`.

    Args:
        path: The file; None gives no options.
        language_models: The language models to use the weights with, or None. If one has another file name than when
            the weights were chosen, a warning is logged.

    Raises:
        ValueError: The file is not of `weigh`, an option in it is wrong, or no language model is given.
    """
    if path is None:
        return {}
    wanted = f"{path} must be a file of `carnelian-train weigh`"
    try:
        report = json.loads(path.read_text(encoding="utf-8-sig"))
        options, weighed = dict(report["options"]), report.get("language_models", [])
        if not (isinstance(weighed, list) and all(isinstance(name, str) for name in weighed)):
            raise ValueError(f"language_models must be a list of names, but is {weighed!r:.100}")
        change_options(options, ctc.Options(), ctc.DECODERS, can_rescore=True)
    except OSError as error:
        raise ValueError(f"{wanted}, but it cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{wanted}, but it has other content") from error
    except ValueError as error:
        raise ValueError(f"{wanted}, but is none: {error}") from error
    used = [model.name for model in language_models if model]
    if not used:
        raise ValueError(f"weights must come with the language models, --lm or --neural-lm, but {path} comes alone")
    others = [name for name in used if name not in weighed]
    if weighed and others:
        names = map(" and ".join, (weighed, others))
        logger.warning("the weights in %s were chosen for %s, not for %s", path, *names)
    return options


def _weigh_search(
    log_probs: Sequence[LogProbs], references: Sequence[str], decoder: ctc.Decoder, options: ctc.Options
) -> dict[str, Any]:
    """Choose the weights of the search by repeated searches and grids, without the neural language model."""
    lists = [Readings(reference) for reference in references]
    chosen: dict[str, Any] = {}
    for number in range(1, MOST_SEARCHES + 1):
        _search(log_probs, lists, decoder, replace(options, n_best=LISTED, **chosen), rescore=False)
        before, chosen = chosen, _best_point(lists, SEARCH_GRID, options)
        logger.info("search %d of at most %d: %s", number, MOST_SEARCHES, chosen)
        if chosen == before:
            break
    return chosen


def _search(
    log_probs: Sequence[LogProbs],
    lists: Sequence[Readings],
    decoder: ctc.Decoder,
    options: ctc.Options,
    rescore: bool,
) -> None:
    for clip, readings in zip(log_probs, lists, strict=True):
        (hypothesis,) = decoder.decode([clip], [options])
        readings.add(hypothesis.alternatives, decoder, rescore)


def _best_point(lists: Sequence[Readings], grid: Mapping[str, Floats], options: ctc.Options) -> dict[str, Any]:
    """Return the point of a grid whose neighbourhood has the fewest word errors; `options` gives the other weights."""
    points: list[dict[str, Any]] = [
        dict(zip(grid, map(float, point), strict=True)) for point in product(*grid.values())
    ]
    weights = np.array([_weights(replace(options, **point), "rescore_weight" in grid) for point in points])
    errors = np.zeros(len(points))
    for readings in lists:
        table = np.array(list(readings.rows.values()))  # [readings, 6]
        errors += table[(table[:, :-1] @ weights.T).argmax(axis=0), -1]
    sides = (3,) * len(grid)
    padded = np.pad(errors.reshape([len(values) for values in grid.values()]), 1, mode="edge")
    smooth = np.lib.stride_tricks.sliding_window_view(padded, sides).mean(axis=tuple(range(-len(grid), 0)))
    return {name: round(value, 4) for name, value in points[int(smooth.argmin())].items()}


def _warn_of_edges(chosen: Mapping[str, float]) -> None:
    """Warn of weights at the edge of the grid; but the lowest `unknown_score` is as good as any below it."""
    at_edge = []
    for name, values in (SEARCH_GRID | RESCORING_GRID).items():
        least, most = round(float(values[0]), 4), round(float(values[-1]), 4)
        if name in chosen and chosen[name] in ((most,) if name == "unknown_score" else (least, most)):
            at_edge.append(f"{name} {chosen[name]:g} (of {least:g} to {most:g})")
    if at_edge:
        logger.warning(
            "weights should lie inside what was tried, but these lie at its edge: %s; the clips may be too few to "
            "tell, so choose on more of them",
            ", ".join(at_edge),
        )


def _weights(options: ctc.Options, rescore: bool) -> tuple[float, ...]:
    """Return the weights of the score columns of :attr:`Readings.rows`."""
    neural = options.rescore_weight if rescore else 0.0
    word_score = options.word_score if options.decoder == "ngram" else 0.0
    return 1.0, options.lm_weight, neural, word_score, options.unknown_score
