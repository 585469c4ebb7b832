"""Prefix trees as tables: the vocabulary of a language model, and the hot words of a request."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.int32]


def encode(words: Sequence[str], labels: Sequence[str]) -> Table:
    """Words as label numbers: [words, longest] int32, -1 after each word's end.

    Raises:
        ValueError: A word holds a character that is no label; the message names the characters.
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
        # Cut, for a server sends short messages alone.
        found = ", ".join(f"{character!r} in {word.strip()!r:.32}" for character, word in sorted(foreign.items())[:20])
        raise ValueError(f"words must be of the model's labels, {''.join(labels)!r:.200}, but hold {found}")
    return codes


def build_tree(codes: Table, num_labels: int) -> tuple[Table, Table, Table]:
    """Share the prefixes of words.

    Args:
        codes: [words, longest] int32, as of :func:`encode`.
        num_labels: how many labels there are.

    Returns:
        [states + 1, num_labels] int32, the state after each label or -1, state 0 being the empty prefix, in order of
        depth, and the last row that of no prefix, which -1 finds as an index; [states] int32, the state before each,
        0 of the first; and [words] int32, the state of each word.
    """
    ends = np.zeros(len(codes), np.int32)
    levels, num_states = [np.zeros(0, np.int64)], 1  # where in the table the states of each length stand
    for column in codes.T:
        rows = np.flatnonzero(column >= 0)
        if not rows.size:
            break
        places, positions = np.unique(ends[rows].astype(np.int64) * num_labels + column[rows], return_inverse=True)
        ends[rows] = num_states + positions
        levels.append(places)
        num_states += len(places)
    places = np.concatenate(levels)
    tree = np.full((num_states + 1, num_labels), -1, np.int32)  # made once: it is large where there are many labels
    tree.ravel()[places] = np.arange(1, num_states)
    parents = np.zeros(num_states, np.int32)
    parents[1:] = places // num_labels
    return tree, parents, ends
