"""Beam search over one clip, vectorised over the beam: without a language model, or with one, and with hot words.

Where more prefixes compete than the beam holds, those that nothing can tell apart from now on are recombined: the best
of them goes on, and stands for the others. Where more than the best reading is wanted, these are remembered for it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .alignment import least_frames
from .hotwords import Hotwords
from .hypothesis import Alternative
from .options import Options
from .prefixes import ROOT, Floats, Integers, Prefixes, Scoring
from .recombination import Recombinations, find_equal_futures

if TYPE_CHECKING:
    from .language_model import LanguageModel  # needs KenLM, which is only there where it is used

PATHS = 2
"""Looked at for each reading that is wanted, as some spell the same text."""


def beam_search(
    log_probs: npt.NDArray[np.float32],
    labels: Sequence[str],
    options: Options,
    hotwords: Hotwords,
    language_model: "LanguageModel | None",
) -> list[Alternative]:
    """Find the likeliest texts, the alignments of each summed up.

    Args:
        log_probs: [frames, len(labels) + 1] float32; the last label is the blank.
        labels: one character each, one of them the space.
        options: widths and weights.
        hotwords: the automaton of `options.hotwords`.
        language_model: None for none.

    Returns:
        At most `options.depth`, the best first; at least one.
    """
    scoring = Scoring(options, hotwords, language_model, space=list(labels).index(" "))
    prefixes = Prefixes(scoring, capacity=2 + options.beam_width * len(log_probs))
    beam = _Beam(prefixes, options)
    rows = log_probs.astype(np.float64)
    likely = rows[:, :-1] >= np.minimum(rows.max(axis=1, keepdims=True, initial=-np.inf), options.token_threshold)
    for row, is_candidate in zip(rows, likely, strict=True):
        if scoring.has_hotwords:
            is_candidate |= beam.finds_worth_it(row)
        beam.advance(row, is_candidate.nonzero()[0])

    readings: dict[str, Alternative] = {}
    scores = np.stack((beam.total, *prefixes.finish(beam.nodes)), axis=1)
    for node, (acoustic, language, boost) in zip(beam.nodes.tolist(), scores.tolist(), strict=True):
        text = _spell(labels, prefixes.labels_of(node))
        if text in readings:  # once with, once without a space at its end
            acoustic = float(np.logaddexp(acoustic, readings[text].acoustic))
        readings[text] = Alternative(text, acoustic + language + boost, acoustic, language, boost)
    if options.depth > 1:
        for path, parts in beam.recombinations.best_paths(beam.nodes, scores, PATHS * options.depth):
            text = _spell(labels, path)
            if least_frames(text) <= len(log_probs):  # what was put together may be more than there is time for
                readings.setdefault(text, Alternative(text, sum(parts), *parts))
    return sorted(readings.values(), key=lambda reading: -reading.score)[: options.depth]


def _spell(labels: Sequence[str], path: Sequence[int]) -> str:
    return "".join(labels[label] for label in path).strip()


class _Beam:
    """The prefixes that are alive after a frame.

    Attributes:
        nodes: [alive] the prefixes.
        blank: [alive] log-probability of their alignments that end in a blank.
        label: [alive] the same, that end in their last label.
        recombinations: prefixes that were left, if more readings than the best are wanted.
    """

    def __init__(self, prefixes: Prefixes, options: Options) -> None:
        self._prefixes = prefixes
        self._space = prefixes.scoring.space
        self._width, self._threshold = options.beam_width, options.beam_threshold
        self._least_expected = options.token_threshold - options.hotword_boost
        self.nodes: Integers = np.array([ROOT])
        self.blank, self.label = np.zeros(1), np.full(1, -np.inf)
        self.recombinations, self._is_listing = Recombinations(prefixes), options.depth > 1
        self._enter()

    @property
    def total(self) -> Floats:
        """[alive] log-probability of all alignments."""
        return np.logaddexp(self.blank, self.label)

    def finds_worth_it(self, row: Floats) -> npt.NDArray[np.bool_]:
        """[labels]; whether a hot phrase goes on with it, and a word's boost makes up for how unlikely it is.

        Else a phrase that is begun would wait, in blanks, for the next frame that lets its last letter pass, and take
        the words until there with it.
        """
        return self._prefixes.expected_labels(self.nodes) & (row[:-1] >= self._least_expected)

    def advance(self, row: Floats, candidates: Integers) -> None:
        """Take in a frame.

        Args:
            row: [labels + 1] log-probabilities.
            candidates: labels that may extend prefixes.
        """
        prefixes, last = self._prefixes, self._last
        children, parents, via = self._children, self._parents, self._via
        total = self.total
        stay_blank = total + row[-1]
        # Spaces at the start of a clip, which the root stands for, and repeated ones change nothing.
        stay_label = np.where(self._ends_in_space, total, self.label) + row[last]
        if children.size:
            source = np.where(self._is_repeat, self.blank[parents], total[parents]) + row[via]
            stay_label[children] = np.logaddexp(stay_label[children], source)
        if not candidates.size:
            self.blank, self.label = stay_blank, stay_label
            return

        stay_total = np.logaddexp(stay_blank, stay_label)
        stay = stay_total + prefixes.score[self.nodes]
        # A hot phrase that is nearly spelled loses its points in one frame if another word is said. Measured by a best
        # score with them, all that goes on from there would be dropped, and the text would end before that word.
        best = (stay_total + prefixes.settled[self.nodes]).max()
        acoustic = np.where(last[:, None] == candidates, self.blank[:, None], total[:, None]) + row[candidates]
        for column in (candidates == self._space).nonzero()[0]:
            acoustic[self._ends_in_space, column] = -np.inf
        if children.size:
            known, columns = (via[:, None] == candidates).nonzero()
            acoustic[parents[known], columns] = -np.inf
        extensions = prefixes.extend(self.nodes, candidates, acoustic, best - self._threshold)
        scores = (acoustic + extensions.score).ravel()
        floor = max(best, (acoustic + extensions.settled).max()) - self._threshold
        is_new, is_old = scores >= floor, stay >= floor
        surplus = np.count_nonzero(is_new) + len(stay) - self._width
        if surplus > 0:
            floor = max(floor, np.partition(np.concatenate((stay, scores[is_new])), surplus)[surplus])
            is_new, is_old = scores >= floor, stay >= floor
        old = is_old.nonzero()[0][: self._width]
        new = is_new.nonzero()[0][: self._width - len(old)]
        if surplus <= 0 and not new.size and len(old) == len(stay):
            self.blank, self.label = stay_blank, stay_label
            return
        added = prefixes.append(extensions, *np.divmod(new, len(candidates)))

        prefixes.slot[self.nodes] = -1
        self.nodes = np.concatenate((self.nodes[old], added))
        self.blank = np.concatenate((stay_blank[old], np.full(len(added), -np.inf)))
        self.label = np.concatenate((stay_label[old], acoustic.ravel()[new]))
        if surplus > 0:
            self._recombine()
        self._enter()

    def _enter(self) -> None:
        """Take in which prefixes are alive now."""
        prefixes = self._prefixes
        prefixes.slot[self.nodes] = np.arange(len(self.nodes))
        self._last = prefixes.label[self.nodes]
        self._ends_in_space = self._last == self._space
        slots = prefixes.slot[prefixes.parent[self.nodes]]
        self._children = (slots >= 0).nonzero()[0]  # those whose parents are alive may come from them, too
        self._parents, self._via = slots[self._children], self._last[self._children]
        self._is_repeat = self._last[self._parents] == self._via

    def _recombine(self) -> None:
        prefixes, acoustic = self._prefixes, self.total
        others, best = find_equal_futures(prefixes, self.nodes, acoustic)
        if self._is_listing:
            self.recombinations.remember(self.nodes[others], self.nodes[best], acoustic[others] - acoustic[best])
        prefixes.slot[self.nodes[others]] = -1
        self.nodes, self.blank, self.label = (np.delete(old, others) for old in (self.nodes, self.blank, self.label))
