"""Hot words: phrases that a caller expects, favoured while they are being spelled out.

An Aho-Corasick automaton over the labels recognises each phrase between spaces. A prefix of a phrase is worth its share
of the boost, so that the beam keeps it; what turns out to be another word loses that again. Its letters may be
less likely than others, and its words unknown.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .prefix_tree import Table, build_tree, encode


@dataclass(frozen=True)
class Hotwords:
    """The automaton; a search walks it with every label, from `start`."""

    next_state: Table
    """[states, labels] int32."""
    complete: npt.NDArray[np.float64]
    """[states]; boost for the phrases that end here, to keep."""
    partial: npt.NDArray[np.float64]
    """[states]; boost for the longest prefix that ends here, as long as the search is here."""
    start: int
    depth: npt.NDArray[np.int32]
    """[states]; labels of the longest prefix that ends here, the space before it included."""

    @cached_property
    def is_expected(self) -> npt.NDArray[np.bool_]:
        """[states]; whether a phrase or a prefix of one ends here."""
        return (self.complete > 0) | (self.partial > 0)


def build_hotwords(phrases: Sequence[str], boost: float, labels: Sequence[str]) -> Hotwords:
    """Build the automaton.

    Args:
        phrases: one or several words each, spelled with the labels.
        boost: natural logarithm, for each word of a phrase.
        labels: one character each, one of them the space.

    Raises:
        ValueError: A phrase holds a character that is no label; the message names both.
    """
    labels = list(labels)
    if not phrases:
        return Hotwords(np.zeros((1, len(labels)), np.int32), np.zeros(1), np.zeros(1), 0, np.zeros(1, np.int32))
    space = labels.index(" ")
    spelled = [f" {phrase} " for phrase in phrases]
    tree, _, ends = build_tree(encode(spelled, labels), len(labels))
    next_state = tree[:-1]
    lengths = np.array([len(phrase) for phrase in phrases])
    boosts = np.array([boost * len(phrase.split()) for phrase in phrases])

    complete = np.zeros(len(next_state))
    complete[ends] = boosts
    share = np.zeros(len(next_state))  # of a boost, for each character
    share[ends] = boosts / lengths
    ahead = np.zeros(len(next_state))  # the largest share of the phrases that go on from here
    levels = list(_levels(next_state))
    for parents, _, children in reversed(levels):
        np.maximum.at(ahead, parents, np.maximum(share, ahead)[children])
    partial = np.zeros(len(next_state))
    depths = np.zeros(len(next_state), np.int32)
    for depth, (_, _, children) in enumerate(levels):
        partial[children] = ahead[children] * depth  # the first level is the space before a phrase
        depths[children] = depth + 1

    # Where a prefix goes on as no phrase does, go on from its longest suffix that is a prefix too.
    fallback = np.zeros(len(next_state), np.int32)
    goto = next_state.copy()
    goto[0] = np.maximum(goto[0], 0)
    for depth, (parents, via, children) in enumerate(levels):
        if depth:
            fallback[children] = goto[fallback[parents], via]
        complete[children] += complete[fallback[children]]
        partial[children] = np.maximum(partial[children], partial[fallback[children]])
        goto[children] = np.where(next_state[children] >= 0, next_state[children], goto[fallback[children]])
    return Hotwords(goto, complete, partial, int(goto[0, space]), depths)


def _levels(tree: Table) -> Iterator[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Table]]:
    """Edges of a tree, level by level: parents, labels and children."""
    parents = np.zeros(1, np.int32)
    while True:
        rows, via = np.nonzero(tree[parents] >= 0)
        if not rows.size:
            return
        children = tree[parents[rows], via]
        yield parents[rows].astype(np.intp), via, children
        parents = children
