"""The prefixes of a beam search as a tree, with their scores of language model, words and hot words."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .hotwords import Hotwords
from .options import Options

if TYPE_CHECKING:
    from .language_model import LanguageModel  # needs KenLM, which need not be installed

NOBODY, ROOT = 0, 1

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[Any]


class Scoring:
    """What prefixes are scored by, besides the network: options, hot words and language model."""

    def __init__(
        self, options: Options, hotwords: Hotwords, language_model: "LanguageModel | None", space: int
    ) -> None:
        self.options, self.hotwords, self.language_model, self.space = options, hotwords, language_model, space
        self.has_hotwords = len(hotwords.complete) > 1
        if language_model:
            # Until a word is complete, it gets the score of the most probable unigram with the same beginning. The
            # last element is for state -1: letters that begin no word.
            self.begun = options.lm_weight * language_model.best + options.word_score
            self.begun[-1] += options.unknown_score


class Extensions(NamedTuple):
    """Prefixes extended by one label: arrays [prefixes, labels], except the first two."""

    nodes: Integers
    """[prefixes] the prefixes that are extended."""
    labels: Integers
    """[labels] the labels that extend them."""
    hot: Integers
    """The state of the hot words' automaton after each extension, if there are hot words."""
    states: Integers
    """The state of the vocabulary's tree after each extension, if there is a language model."""
    score: Floats
    """`Prefixes.score` of each extension."""
    settled: Floats
    """`Prefixes.settled` of each extension."""


class Prefixes:
    """A tree of label sequences. A prefix is a number, its index in these arrays.

    Attributes:
        parent: the prefix without its last label; for the root, NOBODY.
        label: the last label; for the root, the space.
        slot: the index in the beam, -1 if the prefix is not in it.
        score: the whole score without the acoustic one, at the moment.
        settled: `score` without the temporary boosts of incomplete hot words.
        count: the end of the numbers that are in use; numbers are given in order of time.
    """

    def __init__(self, scoring: Scoring, capacity: int) -> None:
        """Start with the empty prefix.

        Args:
            scoring: what the prefixes are scored by.
            capacity: the most prefixes there can be; memory is used only as they are added.
        """
        self.scoring = scoring
        self._integers, self._floats = np.empty((7, capacity), np.int32), np.empty((5, capacity))
        self.parent, self.label, self.slot, self._tree, self._hot, self._context, self._next_context = self._integers
        # `_language` and `_boost` are permanent scores: of language model and words, and of hot words. `_word` caches
        # the language model's log-probability of the word that ends with the prefix.
        self.score, self.settled, self._language, self._boost, self._word = self._floats
        context = scoring.language_model.start() if scoring.language_model else 0
        self._integers[:, : ROOT + 1] = np.array(
            [[NOBODY, scoring.space, -1, 0, scoring.hotwords.start, context, context]]
        ).T
        self._floats[:, : ROOT + 1] = 0.0
        self.count = ROOT + 1

    def extend(self, nodes: Integers, labels: Integers, acoustic: Floats, floor: float) -> Extensions:
        """Score prefixes extended by one label.

        Args:
            nodes: [prefixes] the prefixes to extend.
            labels: [labels] the labels that extend them.
            acoustic: [prefixes, labels] acoustic scores of the extensions, -inf for those not wanted.
            floor: extensions with a total score below this need no exact score.
        """
        scoring, model = self.scoring, self.scoring.language_model
        kept = (self._language[nodes] + self._boost[nodes])[:, None] + np.zeros(len(labels))
        hot = states = np.zeros((1, 1), np.int32)
        expected: Any = np.False_
        provisional: Any = 0.0
        if scoring.has_hotwords:
            hot = scoring.hotwords.next_state[self._hot[nodes][:, None], labels]
            expected, provisional = scoring.hotwords.is_expected[hot], scoring.hotwords.partial[hot]
            kept += scoring.hotwords.complete[hot]
        if model is None:
            return Extensions(nodes, labels, hot, states, kept + provisional, kept)
        states = model.tree[self._tree[nodes][:, None], labels]
        settled = kept + scoring.begun[states]
        if scoring.has_hotwords:
            provisional[expected & (states < 0) & (labels != scoring.space)] -= scoring.options.unknown_score
        for column in (labels == scoring.space).nonzero()[0]:
            # The language model is slow and can only lower a score, so it is queried only for scores that may reach
            # the floor.
            most = (acoustic + kept + provisional)[:, column] + max(scoring.options.word_score, 0.0)
            rows = (most >= floor).nonzero()[0]
            settled[:, column] = -np.inf
            known = expected[rows, column] if scoring.has_hotwords else expected
            settled[rows, column] = kept[rows, column] + self._end_words(nodes[rows], known)
        return Extensions(nodes, labels, hot, states, settled + provisional, settled)

    def append(self, extensions: Extensions, rows: Integers, columns: Integers) -> Integers:
        """Add extended prefixes to the tree.

        Args:
            extensions: result of :meth:`extend`.
            rows: [new] the index of each new prefix's parent in `extensions.nodes`.
            columns: [new] the index of each new prefix's label in `extensions.labels`.

        Returns:
            [new] the numbers of the new prefixes.
        """
        scoring = self.scoring
        new = slice(self.count, self.count + len(rows))
        parents, labels = extensions.nodes[rows], extensions.labels[columns]
        self._integers[:, new], self._floats[:, new] = self._integers[:, parents], self._floats[:, parents]
        self.parent[new], self.label[new] = parents, labels
        self.score[new], self.settled[new] = extensions.score[rows, columns], extensions.settled[rows, columns]
        if scoring.has_hotwords:
            self._hot[new] = extensions.hot[rows, columns]
            self._boost[new] += scoring.hotwords.complete[self._hot[new]]
        if scoring.language_model:
            self._tree[new] = extensions.states[rows, columns]
            spaces = self.count + (labels == scoring.space).nonzero()[0]
            if spaces.size:
                self._tree[spaces], self._context[spaces] = 0, self._next_context[spaces]
                self._language[spaces] = self.settled[spaces] - self._boost[spaces]
            self._next_context[new], self._word[new] = self._context[new], np.nan
        self.count += len(rows)
        return np.arange(new.start, new.stop)

    def finish(self, nodes: Integers) -> tuple[Floats, Floats]:
        """Return the scores of prefixes as whole texts: language model and words, and hot words, [prefixes] each."""
        scoring, model = self.scoring, self.scoring.language_model
        language, boost = self._language[nodes].copy(), self._boost[nodes].copy()
        contexts = self._context[nodes].copy()
        open_words = np.flatnonzero(self.label[nodes] != scoring.space)
        hot = scoring.hotwords.next_state[self._hot[nodes[open_words]], scoring.space]
        boost[open_words] += scoring.hotwords.complete[hot]
        if model:
            language[open_words] += self._end_words(nodes[open_words], scoring.hotwords.is_expected[hot])
            contexts[open_words] = self._next_context[nodes[open_words]]
            language += scoring.options.lm_weight * np.array([model.end(context) for context in contexts.tolist()])
        return language, boost

    def expected_labels(self, nodes: Integers) -> npt.NDArray[np.bool_]:
        """Return for each label whether a hot phrase begun by one of `nodes` continues with it, [labels] bool."""
        hotwords = self.scoring.hotwords
        # A depth above 2 is at least a space and two letters; a phrase that only begins with this label has 2.
        goes_on = hotwords.depth[hotwords.next_state[np.unique(self._hot[nodes])]] > 2
        expected: npt.NDArray[np.bool_] = goes_on.any(axis=0)
        return expected

    def futures(self, nodes: Integers) -> tuple[Integers, ...]:
        """Return the states that decide all future scores of prefixes, [prefixes] each.

        They are last label, state of the hot words, state of the vocabulary's tree, and the language model's context.
        """
        return self.label[nodes], self._hot[nodes], self._tree[nodes], self._context[nodes]

    def kept_scores(self, nodes: Integers) -> tuple[Floats, Floats]:
        """Return the scores of complete words, from the language model and from hot words, [prefixes] each."""
        return self._language[nodes], self._boost[nodes]

    def labels_of(self, node: int) -> list[int]:
        """Return the labels of a prefix, in order."""
        labels = []
        while node != ROOT:
            labels.append(int(self.label[node]))
            node = int(self.parent[node])
        return labels[::-1]

    def _end_words(self, nodes: Integers, is_expected: npt.NDArray[np.bool_] | np.bool_) -> Floats:
        """Return the scores of language model and words for the words that end with `nodes`, [prefixes]."""
        scoring, model = self.scoring, self.scoring.language_model
        assert model is not None
        words = model.word[self._tree[nodes]]
        unasked = np.isnan(self._word[nodes]).nonzero()[0]
        if unasked.size:
            asked = nodes[unasked]
            pairs = zip(self._context[asked].tolist(), words[unasked].tolist(), strict=True)
            answers = [model.score(context, word) for context, word in pairs]
            self._word[asked], self._next_context[asked] = map(list, zip(*answers, strict=True))
        unknown = np.where((words < 0) & ~is_expected, scoring.options.unknown_score, 0.0)
        scores: Floats = scoring.options.lm_weight * self._word[nodes] + unknown + scoring.options.word_score
        return scores
