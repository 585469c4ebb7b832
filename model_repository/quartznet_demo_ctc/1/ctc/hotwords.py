"""Hot words: phrases that a caller expects, which get a boost while they are being spelled.

An Aho-Corasick automaton over the labels finds each phrase between spaces. A prefix of a phrase already gets its share
of the boost, so that the beam keeps it; if it turns out to be another word, it loses this share again. So a phrase is
found even if its letters are less probable than others or the language model does not know its words.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .prefix_tree import Table, build_tree, encode


@dataclass(frozen=True)
class Hotwords:
    """The Aho-Corasick automaton of hot phrases. A search begins at `start` and moves with every label."""

    next_state: Table
    """[states, labels] int32: the state after each label."""
    complete: npt.NDArray[np.float64]
    """[states] float64: the permanent boost for the phrases that end in each state."""
    partial: npt.NDArray[np.float64]
    """[states] float64: the temporary boost for the best phrase that is begun in each state, while the search is
    there."""
    start: int
    """The state at the start of a clip."""
    depth: npt.NDArray[np.int32]
    """[states] int32: the number of labels of the longest phrase prefix that ends in each state, with its first
    space."""

    @cached_property
    def is_expected(self) -> npt.NDArray[np.bool_]:
        """[states] bool: whether a phrase, or the beginning of one, ends in each state."""
        return (self.complete > 0) | (self.partial > 0)


def build_hotwords(phrases: Sequence[str], boost: float, labels: Sequence[str]) -> Hotwords:
    """Build the automaton of hot phrases.

    Args:
        phrases: phrases of one or more words, spelled with the labels.
        boost: the boost per word of a phrase, added to natural logarithms.
        labels: one character each, one of them the space.

    Raises:
        ValueError: A phrase has a character that is not a label; the message names both.
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
    share = np.zeros(len(next_state))  # the boost per character
    share[ends] = boosts / lengths
    ahead = np.zeros(len(next_state))  # the largest share of the phrases that continue from here
    levels = list(_levels(next_state))
    for parents, _, children in reversed(levels):
        np.maximum.at(ahead, parents, np.maximum(share, ahead)[children])
    partial = np.zeros(len(next_state))
    depths = np.zeros(len(next_state), np.int32)
    for depth, (_, _, children) in enumerate(levels):
        partial[children] = ahead[children] * depth  # depth 0 is the space before a phrase
        depths[children] = depth + 1

    # Where no phrase continues with a label, the state is that of the longest suffix that is a prefix of a phrase.
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
    """Yield the edges of a tree, level by level: parents, labels and children."""
    parents = np.zeros(1, np.int32)
    while True:
        rows, via = np.nonzero(tree[parents] >= 0)
        if not rows.size:
            return
        children = tree[parents[rows], via]
        yield parents[rows].astype(np.intp), via, children
        parents = children
