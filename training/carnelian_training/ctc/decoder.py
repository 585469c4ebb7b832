"""The decoder of one recogniser: its labels, its language model, and each clip's own options."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .alignment import time_words
from .beam import beam_search
from .calibration import Calibration
from .greedy import greedy
from .hotwords import Hotwords, build_hotwords
from .hypothesis import Hypothesis
from .options import OptionError, Options, change_options, read_options
from .spelling import spell

if TYPE_CHECKING:
    from .language_model import LanguageModel
    from .rescoring import NeuralLanguageModel

KEPT_HOTWORDS = 16
"""Lists of hot words whose automata are kept for the next request: 8 MB for 10,000 words of 8 letters."""
MAX_HOTWORD_CELLS = 10_000_000
"""Characters of hot words, with a space on either side of each, times labels: 40 MB of the server's memory."""


class MissingPackage(RuntimeError):  # noqa: N818  it is a state of the installation
    """What a language model needs is not installed; the message says how to get it."""

    def __init__(self, path: Path, module: str | None, packages: str) -> None:
        super().__init__(f"{path} needs the module {module}, which is not installed: pip install {packages}")
        self.path = path


class Decoder:
    """Turns log-probabilities into hypotheses; clips with different options may share a batch.

    Attributes:
        language_model: word n-grams, or None.
        neural_language_model: for rescoring, or None.
        decoders: those of `DECODERS` that there are.
    """

    def __init__(
        self,
        labels: Sequence[str],
        frame_s: float,
        *,
        language_model: Path | None = None,
        calibration: Calibration | None = None,
        neural_language_model: Path | None = None,
    ) -> None:
        """Load the language models, if there are any.

        Args:
            labels: one character each.
            frame_s: seconds per frame.
            language_model: ARPA or KenLM binary.
            calibration: of times and confidences; None leaves them as the network has them.
            neural_language_model: ONNX, see :mod:`.rescoring`.

        Raises:
            LanguageModelError, NeuralLanguageModelError: A language model does not fit.
            MissingPackage: What one of them needs is not installed.
        """
        self._labels = list(labels)
        self._frame_s = frame_s
        self._calibration = calibration or Calibration()
        self.language_model = self._load(language_model) if language_model else None
        self.neural_language_model = self._load_neural(neural_language_model) if neural_language_model else None
        self.decoders = ["greedy"]
        if " " in self._labels:
            self.decoders.append("beam")
        if language_model:
            self.decoders.append("ngram")
        self._build_hotwords = lru_cache(KEPT_HOTWORDS)(self._build)

    def read_options(self, parameters: Mapping[str, Any], defaults: Options) -> Options:
        """Apply a request's parameters to the defaults, and see that the result can be done here.

        Raises:
            OptionError: It cannot; the message says what is allowed.
        """
        options = read_options(parameters, defaults, self.decoders, self.neural_language_model is not None)
        if options.decoder != "greedy":
            self._hotwords(options)
        return options

    def change_options(self, parameters: Mapping[str, Any]) -> Options:
        """Options that differ from the usual ones by these parameters: the defaults of a model.

        Raises:
            OptionError: A parameter does not exist, or its value is not allowed.
        """
        options = change_options(parameters, Options(), self.decoders, self.neural_language_model is not None)
        if options.hotwords:
            self._hotwords(options)
        return options

    def decode(self, clips: Sequence[npt.NDArray[np.float32]], options: Sequence[Options]) -> list[Hypothesis]:
        """Decode a batch.

        Args:
            clips: log-probabilities of each, [frames, labels + 1] float32, no padding; the last label is the blank.
            options: one for each clip.

        Raises:
            OptionError: The options were not read by :meth:`read_options` and do not fit.
        """
        places = [i for i, wanted in enumerate(options) if wanted.decoder == "greedy"]
        found = greedy([clips[i] for i in places], self._labels, self._frame_s, self._calibration)
        hypotheses = dict(zip(places, found, strict=True))
        for i, wanted in enumerate(options):
            if wanted.decoder != "greedy":
                hypotheses[i] = self._search(clips[i], wanted)
        return [hypotheses[i] for i in range(len(options))]

    def _search(self, clip: npt.NDArray[np.float32], options: Options) -> Hypothesis:
        language_model = self.language_model if options.decoder == "ngram" else None
        readings = beam_search(clip, self._labels, options, self._hotwords(options), language_model)
        if options.rescore:
            assert self.neural_language_model is not None
            readings = self.neural_language_model.rescore(readings, options)
        returned = readings[: options.n_best]
        return time_words(clip, returned, self._labels, self._frame_s, self._calibration, options.decoder)

    def _build(self, phrases: tuple[str, ...], boost: float) -> Hotwords:
        labels = tuple(self._labels)
        spelled = tuple(spell(phrase, labels) for phrase in phrases)
        found, most = sum(len(phrase) + 2 for phrase in spelled), MAX_HOTWORD_CELLS // len(labels)
        if found > most:
            raise ValueError(
                f"with the {len(labels):,} labels of this model they must have at most {most:,} characters in all, two "
                f"more for each among them, but have {found:,}; send fewer"
            )
        return build_hotwords(spelled, boost, labels)

    def _hotwords(self, options: Options) -> Hotwords:
        try:
            return self._build_hotwords(options.hotwords, options.hotword_boost)
        except ValueError as error:
            raise OptionError(f"hotwords cannot be heard: {error}") from error

    def _load(self, path: Path) -> "LanguageModel":
        try:
            from .language_model import LanguageModel
        except ModuleNotFoundError as error:
            raise MissingPackage(path, error.name, "ufal-kenlm") from error
        return LanguageModel(path, self._labels)

    def _load_neural(self, path: Path) -> "NeuralLanguageModel":
        try:
            from .rescoring import NeuralLanguageModel
        except ModuleNotFoundError as error:
            raise MissingPackage(path, error.name, "onnxruntime sentencepiece") from error
        return NeuralLanguageModel(path, self._labels)
