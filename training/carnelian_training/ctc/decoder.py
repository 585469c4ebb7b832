"""The decoder of one recogniser, with its labels and language models; each clip has its own options."""

from collections.abc import Mapping, Sequence
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
from .spelling import speller

if TYPE_CHECKING:
    from .language_model import LanguageModel
    from .rescoring import NeuralLanguageModel

KEPT_HOTWORDS = 32
"""The most hot word automata that are kept between requests: one for each clip of a batch."""
MAX_HOTWORD_CELLS = 10_000_000
"""The most cells of a hot word table, characters (with a space on either side of a phrase) times labels: 40 MB. It is
also the most of all tables that are kept, together."""


class MissingPackage(RuntimeError):  # noqa: N818  it describes the installation
    """A package that a language model needs is not installed; the message says how to install it."""

    def __init__(self, path: Path, module: str | None, packages: str) -> None:
        super().__init__(f"{path} needs the module {module}, which is not installed: pip install {packages}")
        self.path = path


class Decoder:
    """The decoder of one recogniser: log-probabilities to hypotheses. Clips of a batch may have different options.

    Only one thread may use a decoder at a time, because it keeps tables of hot words.

    Attributes:
        language_model: the word n-grams, or None.
        neural_language_model: the language model for rescoring, or None.
        decoders: the names in `DECODERS` that this recogniser supports.
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
            language_model: path of an ARPA file or KenLM binary.
            calibration: corrections of times and confidences; None: no corrections.
            neural_language_model: path of an ONNX file, see :mod:`.rescoring`.

        Raises:
            LanguageModelError, NeuralLanguageModelError: A language model does not fit the labels, or cannot be read.
            MissingPackage: A package that a language model needs is not installed.
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
        self._kept: dict[tuple[tuple[str, ...], float], Hotwords] = {}  # in the order of their last use

    def read_options(self, parameters: Mapping[str, Any], defaults: Options) -> Options:
        """Apply a request's parameters to the defaults, and check that this decoder supports the result.

        Raises:
            OptionError: A parameter is not allowed; the message says what is.
        """
        options = read_options(parameters, defaults, self.decoders, self.neural_language_model is not None)
        if options.decoder != "greedy":
            self._hotwords(options)
        return options

    def change_options(self, parameters: Mapping[str, Any]) -> Options:
        """Return a model's default options: the general defaults changed by `parameters`.

        Raises:
            OptionError: A parameter does not exist, or its value is not allowed.
        """
        options = change_options(parameters, Options(), self.decoders, self.neural_language_model is not None)
        if options.hotwords:
            self._hotwords(options)
        return options

    def decode(self, clips: Sequence[npt.NDArray[np.float32]], options: Sequence[Options]) -> list[Hypothesis]:
        """Decode a batch of clips.

        Args:
            clips: log-probabilities of each clip, [frames, labels + 1] float32, unpadded; the last label is the blank.
            options: one per clip.

        Returns:
            One hypothesis per clip, in order.

        Raises:
            OptionError: The options were not read by :meth:`read_options`, and this decoder does not support them.
            ValueError: There are not as many options as clips, or a clip is not of these labels.
        """
        self._check(clips, options)
        places = [i for i, wanted in enumerate(options) if wanted.decoder == "greedy"]
        found = greedy([clips[i] for i in places], self._labels, self._frame_s, self._calibration)
        hypotheses = dict(zip(places, found, strict=True))
        for i, wanted in enumerate(options):
            if wanted.decoder != "greedy":
                hypotheses[i] = self._search(clips[i], wanted)
        return [hypotheses[i] for i in range(len(options))]

    def _check(self, clips: Sequence[npt.NDArray[np.float32]], options: Sequence[Options]) -> None:
        if len(clips) != len(options):
            raise ValueError(f"`options` must be one for each of {len(clips)} clips, but are {len(options)}")
        row = (len(self._labels) + 1,)
        for clip, wanted in zip(clips, options, strict=True):
            if clip.shape[1:] != row:
                raise ValueError(
                    f"a clip must be of [frames, labels + 1], here [frames, {row[0]}], but is of {list(clip.shape)}"
                )
            if wanted.decoder not in self.decoders or (wanted.rescore and not self.neural_language_model):
                self.change_options({"decoder": wanted.decoder, "rescore": wanted.rescore})  # says what is allowed

    def _search(self, clip: npt.NDArray[np.float32], options: Options) -> Hypothesis:
        language_model = self.language_model if options.decoder == "ngram" else None
        readings = beam_search(clip, self._labels, options, self._hotwords(options), language_model)
        if options.rescore:
            assert self.neural_language_model is not None  # as _check sees to
            readings = self.neural_language_model.rescore(readings, options)
        returned = readings[: options.n_best]
        return time_words(clip, returned, self._labels, self._frame_s, self._calibration, options.decoder)

    def _build(self, phrases: tuple[str, ...], boost: float) -> Hotwords:
        labels = tuple(self._labels)
        spell = speller(labels)
        spelled = tuple(filter(None, (" ".join(spell(phrase).split()) for phrase in phrases)))
        found, most = sum(len(phrase) + 2 for phrase in spelled), MAX_HOTWORD_CELLS // len(labels)
        if found > most:
            raise ValueError(
                f"with the {len(labels):,} labels of this model they must have at most {most:,} characters in all, two "
                f"more for each among them, but have {found:,}; send fewer"
            )
        return build_hotwords(spelled, boost, labels)

    def _hotwords(self, options: Options) -> Hotwords:
        wanted = options.hotwords, options.hotword_boost
        try:
            hotwords = self._kept.pop(wanted, None) or self._build(*wanted)
        except ValueError as error:
            raise OptionError(f"hotwords cannot be heard: {error}") from error
        self._kept[wanted] = hotwords
        cells = sum(kept.next_state.size for kept in self._kept.values())
        while cells > MAX_HOTWORD_CELLS or len(self._kept) > KEPT_HOTWORDS:
            cells -= self._kept.pop(next(iter(self._kept))).next_state.size
        return hotwords

    def _load(self, path: Path) -> "LanguageModel":
        try:
            from .language_model import LanguageModel
        except ModuleNotFoundError as error:
            raise MissingPackage(path, error.name, "ufal-kenlm") from error
        return LanguageModel(path, self._labels)

    def _load_neural(self, path: Path) -> "NeuralLanguageModel":
        try:
            from .rescoring import NeuralLanguageModel, NeuralLanguageModelError
        except ModuleNotFoundError as error:
            raise MissingPackage(path, error.name, "onnxruntime sentencepiece") from error
        if " " not in self._labels:
            raise NeuralLanguageModelError(
                f"{path} rates readings of the beam search, which is of words, so one label must be the space, but the "
                f"labels are {''.join(self._labels)!r:.200}"
            )
        return NeuralLanguageModel(path, self._labels)
