"""Prefix trees as tables: the vocabulary of a language model, and the hot words of a request."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .spelling import quote

Table = npt.NDArray[np.int32]


def encode(words: Sequence[str], labels: Sequence[str]) -> Table:
    """Encode words as label numbers: [words, longest] int32, with -1 after each word's end.

    Raises:
        ValueError: A word has a character that is not a label; the message names the characters.
    """
    numbers = {label: i for i, label in enumerate(labels)}
    foreign: dict[str, str] = {}
    codes = np.full((len(words), max(map(len, words), default=0)), -1, np.int32)
    for row, word in enumerate(words):
        try:
            codes[row, : len(word)] = [numbers[character] for character in word]
        except KeyError:
            foreign |= {character: word for character in word if character not in numbers and character not in foreign}
    if foreign:
        # Shortened, because a server sends only short messages. Hot words stand between spaces.
        named = [f"{quote(character)} in {quote(word.strip(' ')):.32}" for character, word in sorted(foreign.items())]
        found = ", ".join(named[:20])
        raise ValueError(f"words must be of the model's labels, {''.join(labels)!r:.200}, but hold {found}")
    return codes


def build_tree(codes: Table, num_labels: int) -> tuple[Table, Table, Table]:
    """Build the prefix tree of words as a table.

    States are prefixes, in order of their length; state 0 is the empty prefix.

    Args:
        codes: [words, longest] int32, from :func:`encode`.
        num_labels: the number of labels.

    Returns:
        [states + 1, num_labels] int32, the state after each label, or -1; the last row, all -1, is what the index -1
        finds. [states] int32, the parent of each state, 0 for state 0. [words] int32, the state of each word.
    """
    ends = np.zeros(len(codes), np.int32)
    levels, num_states = [np.zeros(0, np.int64)], 1  # the cells of the flat table that lead to each length's states
    for column in codes.T:
        rows = np.flatnonzero(column >= 0)
        if not rows.size:
            break
        places, positions = np.unique(ends[rows].astype(np.int64) * num_labels + column[rows], return_inverse=True)
        ends[rows] = num_states + positions
        levels.append(places)
        num_states += len(places)
    places = np.concatenate(levels)
    tree = np.full((num_states + 1, num_labels), -1, np.int32)  # allocated only once: it is large with many labels
    tree.ravel()[places] = np.arange(1, num_states)
    parents = np.zeros(num_states, np.int32)
    parents[1:] = places // num_labels
    return tree, parents, ends
