"""Recombination: prefixes that differ only in what lies behind them, of which one goes on for all.

A language model of n-grams sees the last n - 1 words, so two prefixes that end in these, and in the same beginning of a
word, are worth the same from there on, whatever follows. Carrying both along wastes the beam on choices made long ago.
"""

from bisect import insort
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from itertools import count

import numpy as np

from .prefixes import ROOT, Floats, Integers, Prefixes

Parts = tuple[float, float, float]
"""Acoustic score, language model's with word scores, boosts of hot words."""


def find_equal_futures(prefixes: Prefixes, nodes: Integers, acoustic: Floats) -> tuple[Integers, Integers]:
    """Find the prefixes whose futures are equal.

    Args:
        prefixes: the tree.
        nodes: [alive] prefixes.
        acoustic: [alive] their acoustic scores.

    Returns:
        Places in `nodes` of all that are not the best of their future, and of the one that is, [recombined] each.
    """
    futures = prefixes.futures(nodes)
    order = np.lexsort((-acoustic - prefixes.score[nodes], *futures))  # the best of each future first
    is_best = np.ones(len(order), np.bool_)
    is_best[1:] = np.any([future[order[1:]] != future[order[:-1]] for future in futures], axis=0)
    best = order[np.maximum.accumulate(np.where(is_best, np.arange(len(order)), 0))]
    return order[~is_best], best[~is_best]


class Recombinations:
    """The prefixes that were left, each with the one that goes on for it, and how far it was behind."""

    def __init__(self, prefixes: Prefixes) -> None:
        """There are none before the first frame."""
        self._prefixes = prefixes
        # One that goes on -> each that it stands for, the best first: how far behind in all, which, how far in what,
        # and the next prefix that there was.
        self._others: dict[int, list[tuple[float, int, Parts, int]]] = {}

    def remember(self, others: Integers, best: Integers, behind: Floats) -> None:
        """Take note of prefixes that were left.

        Args:
            others: [recombined] prefixes.
            best: [recombined] the prefix that goes on for each.
            behind: [recombined] acoustic scores less the other's.
        """
        (language, boost), (best_language, best_boost) = map(self._prefixes.kept_scores, (others, best))
        language, boost = language - best_language, boost - best_boost
        rows = zip(best.tolist(), others.tolist(), behind.tolist(), language.tolist(), boost.tolist(), strict=True)
        following = self._prefixes.count
        for node, other, *parts in rows:
            insort(self._others.setdefault(node, []), (-sum(parts), other, tuple(parts), following))

    def best_paths(self, nodes: Integers, scores: Floats, limit: int) -> Iterator[tuple[list[int], Parts]]:
        """What was heard, the best first: prefixes that are alive, and those for which they stand.

        Args:
            nodes: [alive] prefixes.
            scores: [alive, 3] float64, their :data:`Parts`.
            limit: paths to find, at most.

        Yields:
            Labels and scores. The acoustic score of what was recombined is an estimate: as far behind as it was then.
        """
        numbers = count()  # so that paths of equal scores need not be compared
        queue: list[tuple[float, int, int, list[int], Parts]] = []
        greatest = [-np.inf] * limit  # scores of paths, as a heap: nobody asks for what is below them all

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
            # What is exchanged next lies before what was exchanged last, so that each combination is found once.
            child: float = np.inf  # on the path; a prefix that is alive, or was until it was exchanged, has none
            while node != ROOT:
                for loss, other, behind, following in self._others.get(node, ()):
                    if sum(parts) - loss <= greatest[0]:
                        break
                    if child >= following:  # what is older came of `node` alone, perhaps `other` itself
                        acoustic, language, boost = (part + less for part, less in zip(parts, behind, strict=True))
                        add(other, after, (acoustic, language, boost))
                after.append(int(self._prefixes.label[node]))
                node, child = int(self._prefixes.parent[node]), node
            yield after[::-1], parts
