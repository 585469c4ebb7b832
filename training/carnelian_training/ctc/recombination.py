"""Recombination: of prefixes that differ only in their past, only the best one continues.

An n-gram language model sees the last n - 1 words, so two prefixes that end in the same n - 1 words and the same
beginning of a word get the same scores from there on, whatever follows. Keeping both in the beam wastes its width.
"""

from bisect import insort
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from itertools import count

import numpy as np

from .prefixes import ROOT, Floats, Integers, Prefixes

Parts = tuple[float, float, float]
"""The parts of a score: acoustic, language model with word scores, boosts of hot words."""


def find_equal_futures(prefixes: Prefixes, nodes: Integers, acoustic: Floats) -> tuple[Integers, Integers]:
    """Find the prefixes whose futures are equal.

    `nodes` are the prefixes in the beam, and `acoustic` their acoustic scores, [alive] each.

    Returns:
        The indices in `nodes` of the prefixes that are not the best with their future, and for each the index of the
        best one, [recombined] each.
    """
    futures = prefixes.futures(nodes)
    order = np.lexsort((-acoustic - prefixes.score[nodes], *futures))  # the best of each future first
    is_best = np.ones(len(order), np.bool_)
    is_best[1:] = np.any([future[order[1:]] != future[order[:-1]] for future in futures], axis=0)
    best = order[np.maximum.accumulate(np.where(is_best, np.arange(len(order)), 0))]
    return order[~is_best], best[~is_best]


class Recombinations:
    """The prefixes that were recombined, each with the prefix that continues for it and how much lower it scored."""

    def __init__(self, prefixes: Prefixes) -> None:
        """Start without any recombined prefixes."""
        self._prefixes = prefixes
        # For each prefix that continues, those that it stands for, the best first: the total difference, the prefix,
        # the difference of each part, and the number that the next new prefix got.
        self._others: dict[int, list[tuple[float, int, Parts, int]]] = {}

    def remember(self, others: Integers, best: Integers, behind: Floats) -> None:
        """Remember prefixes that were recombined.

        Args:
            others: [recombined] the prefixes that end.
            best: [recombined] the prefix that continues for each.
            behind: [recombined] the acoustic score of each, minus that of the prefix that continues.
        """
        (language, boost), (best_language, best_boost) = map(self._prefixes.kept_scores, (others, best))
        language, boost = language - best_language, boost - best_boost
        rows = zip(best.tolist(), others.tolist(), behind.tolist(), language.tolist(), boost.tolist(), strict=True)
        following = self._prefixes.count
        for node, other, *parts in rows:
            insort(self._others.setdefault(node, []), (-sum(parts), other, tuple(parts), following))

    def best_paths(self, nodes: Integers, scores: Floats, limit: int) -> Iterator[tuple[list[int], Parts]]:
        """Yield the best paths, the best first: prefixes in the beam, and variants with recombined parts.

        Args:
            nodes: [alive] the prefixes in the beam.
            scores: [alive, 3] float64, their :data:`Parts`.
            limit: the most paths to find.

        Yields:
            Labels and scores. The acoustic score of a recombined path is an estimate, which assumes the same
            difference as at recombination.
        """
        numbers = count()  # breaks ties, so that paths of equal scores are not compared
        queue: list[tuple[float, int, int, list[int], Parts]] = []
        greatest = [-np.inf] * limit  # the `limit` best scores so far, as a heap; lower ones are not needed

        def add(node: int, after: list[int], parts: Parts) -> None:
            heapreplace(greatest, sum(parts))
            heappush(queue, (-sum(parts), next(numbers), node, after.copy(), parts))

        for node, parts in zip(nodes.tolist(), scores.tolist(), strict=True):
            if sum(parts) > greatest[0]:
                add(node, [], tuple(parts))
        for _ in range(limit):
            if not queue:
                return
            _, _, node, after, parts = heappop(queue)
            # The next exchange lies before the last one on the path, so that each combination is found once.
            child: float = np.inf  # of `node` on the path; none if in the beam or just exchanged
            while node != ROOT:
                for loss, other, behind, following in self._others.get(node, ()):
                    if sum(parts) - loss <= greatest[0]:
                        break
                    if child >= following:  # an older child continues `node` alone, or is `other`
                        acoustic, language, boost = (part + less for part, less in zip(parts, behind, strict=True))
                        add(other, after, (acoustic, language, boost))
                after.append(int(self._prefixes.label[node]))
                node, child = int(self._prefixes.parent[node]), node
            yield after[::-1], parts
