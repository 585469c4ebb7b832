"""Beam search over one clip, vectorised over the beam, with optional n-gram language model and hot words.

If there are more prefixes than the beam holds, prefixes with equal futures are recombined: the best of them continues
in place of the others. If more than one reading is wanted, the others are remembered.
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
    from .language_model import LanguageModel  # needs KenLM, which need not be installed

PATHS = 2
"""The number of paths to look at per wanted reading, because several may spell the same text."""


def beam_search(
    log_probs: npt.NDArray[np.float32],
    labels: Sequence[str],
    options: Options,
    hotwords: Hotwords,
    language_model: "LanguageModel | None",
) -> list[Alternative]:
    """Find the most probable texts; the probability of a text is the sum over its alignments.

    Args:
        log_probs: [frames, len(labels) + 1] float32; the last label is the blank.
        labels: one character each, one of them the space.
        options: widths and weights.
        hotwords: the automaton of `options.hotwords`.
        language_model: the word n-grams, or None.

    Returns:
        At least one reading and at most `options.depth`, the best first.
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
        if text in readings:  # one prefix ends in a space, the other does not
            acoustic = float(np.logaddexp(acoustic, readings[text].acoustic))
        readings[text] = Alternative(text, acoustic + language + boost, acoustic, language, boost)
    if options.depth > 1:
        for path, parts in beam.recombinations.best_paths(beam.nodes, scores, PATHS * options.depth):
            text = _spell(labels, path)
            if least_frames(text) <= len(log_probs):  # an exchanged part may make a path too long for the clip
                readings.setdefault(text, Alternative(text, sum(parts), *parts))
    return sorted(readings.values(), key=lambda reading: -reading.score)[: options.depth]


def _spell(labels: Sequence[str], path: Sequence[int]) -> str:
    return "".join(labels[label] for label in path).strip()


class _Beam:
    """The prefixes in the beam ("alive") after a frame.

    Attributes:
        nodes: [alive] the prefixes' numbers.
        blank: [alive] log-probability of each prefix's alignments that end in a blank.
        label: [alive] log-probability of each prefix's alignments that end in its last label.
        recombinations: prefixes that were recombined; filled only if more than the best reading is wanted.
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
        """The log-probability of all alignments of each prefix, [alive]."""
        return np.logaddexp(self.blank, self.label)

    def finds_worth_it(self, row: Floats) -> npt.NDArray[np.bool_]:
        """Return for each label whether a hot phrase continues with it, and is worth extending, [labels] bool.

        It is worth extending if the boost of a word makes up for the label's low probability. Without this, a phrase
        would wait in blanks for the next frame in which its last letter is probable, and the words until then would
        be lost.
        """
        return self._prefixes.expected_labels(self.nodes) & (row[:-1] >= self._least_expected)

    def advance(self, row: Floats, candidates: Integers) -> None:
        """Advance the beam by one frame.

        Args:
            row: [labels + 1] log-probabilities of the frame.
            candidates: the labels that may extend prefixes.
        """
        prefixes, last = self._prefixes, self._last
        children, parents, via = self._children, self._parents, self._via
        total = self.total
        stay_blank = total + row[-1]
        # Spaces at the start of a clip, which the root stands for, and repeated spaces leave a prefix as it is.
        stay_label = np.where(self._ends_in_space, total, self.label) + row[last]
        if children.size:
            source = np.where(self._is_repeat, self.blank[parents], total[parents]) + row[via]
            stay_label[children] = np.logaddexp(stay_label[children], source)
        if not candidates.size:
            self.blank, self.label = stay_blank, stay_label
            return

        stay_total = np.logaddexp(stay_blank, stay_label)
        stay = stay_total + prefixes.score[self.nodes]
        # A nearly complete hot phrase loses its boost in one frame if another word is spoken. So the threshold is
        # measured from the best score without such boosts: otherwise every prefix that continues from there would be
        # dropped, and the text would end before that word.
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
        """Update the arrays that depend on which prefixes are in the beam."""
        prefixes = self._prefixes
        prefixes.slot[self.nodes] = np.arange(len(self.nodes))
        self._last = prefixes.label[self.nodes]
        self._ends_in_space = self._last == self._space
        slots = prefixes.slot[prefixes.parent[self.nodes]]
        self._children = (slots >= 0).nonzero()[0]  # prefixes that can also be reached from a parent in the beam
        self._parents, self._via = slots[self._children], self._last[self._children]
        self._is_repeat = self._last[self._parents] == self._via

    def _recombine(self) -> None:
        prefixes, acoustic = self._prefixes, self.total
        others, best = find_equal_futures(prefixes, self.nodes, acoustic)
        if self._is_listing:
            self.recombinations.remember(self.nodes[others], self.nodes[best], acoustic[others] - acoustic[best])
        prefixes.slot[self.nodes[others]] = -1
        self.nodes, self.blank, self.label = (np.delete(old, others) for old in (self.nodes, self.blank, self.label))
