"""Rescoring: a neural language model rates whole readings, and the best of them all is taken.

The model is one ONNX file. It takes TOKENS [rows, time] and TOKEN_LENGTH [rows], both int64, and gives LOG_PROB [rows]
float32: the natural log-probability of each row as a sentence, its end included. Its metadata hold `format`, `name`,
`tokenizer` (a sentencepiece model, base64) and `case` (lower or upper), so that nothing else has to come with it.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import sentencepiece

from .hypothesis import Alternative
from .options import Options

FORMAT = "carnelian-language-model-1"
MAX_TOKENS = 8192
"""In one run, padding included: what the model keeps of each must fit into memory."""
_CASES = {"lower": str.lower, "upper": str.upper}
_BLANK = "▁"  # sentencepiece's space


class NeuralLanguageModelError(ValueError):
    """The neural language model cannot be used with this recogniser; the message says why."""


class NeuralLanguageModel:
    """Log-probabilities of sentences in the recogniser's labels.

    Attributes:
        name: as its metadata have it.
    """

    def __init__(self, path: Path, labels: Sequence[str]) -> None:
        """Load a model; it runs on one thread, as the search does, so that instances of the server share cores.

        Args:
            path: ONNX, as described above.
            labels: one character each.

        Raises:
            NeuralLanguageModelError: It is no such model, or its alphabet is not the labels'.
        """
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = settings.inter_op_num_threads = 1
        try:
            self._session = onnxruntime.InferenceSession(
                path.read_bytes(), settings, providers=["CPUExecutionProvider"]
            )
        except OSError:
            raise
        except Exception as error:  # ONNX Runtime's own have no other base
            raise NeuralLanguageModelError(f"{path} must be an ONNX file that ONNX Runtime loads: {error}") from error
        metadata = self._session.get_modelmeta().custom_metadata_map
        _check_format(metadata, path)
        self.name: str = metadata.get("name") or path.stem
        self._change_case = _CASES[metadata["case"]]
        self._tokenizer = _load_tokenizer(metadata.get("tokenizer", ""), path)
        _check_alphabet(self._tokenizer, [self._change_case(label) for label in labels], path)
        if not np.isfinite(self.score([""])).all():
            raise NeuralLanguageModelError(f"{path} must give finite log-probabilities, but gives {self.score([''])}")

    def score(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Natural log-probabilities of sentences, [texts]."""
        tokens = self._tokenizer.encode([self._change_case(text) for text in texts])
        lengths = np.array([len(row) for row in tokens], np.int64)
        log_probs = np.zeros(len(texts), np.float32)
        for rows in _split(lengths):
            batch = np.zeros((len(rows), max(1, int(lengths[rows].max()))), np.int64)
            for place, row in enumerate(rows):
                batch[place, : lengths[row]] = tokens[row]
            (log_probs[rows],) = self._session.run(["LOG_PROB"], {"TOKENS": batch, "TOKEN_LENGTH": lengths[rows]})
        return log_probs

    def rescore(self, readings: Sequence[Alternative], options: Options) -> list[Alternative]:
        """Weigh the model in.

        Args:
            readings: those of one clip. Clips are not scored together: the readings of each are many, and about equally
                long already; in each other's company they would differ in the last digits.
            options: the weights.

        Returns:
            The readings in their new order, the best first.
        """
        log_probs = self.score([reading.text for reading in readings]).tolist()
        rated = []
        for reading, log_prob in zip(readings, log_probs, strict=True):
            neural = options.rescore_weight * log_prob
            rated.append(replace(reading, score=reading.score + neural, neural=neural))
        return sorted(rated, key=lambda reading: -reading.score)


def _split(lengths: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.intp]]:
    """Rows that run together: of about equal lengths, and at most `MAX_TOKENS` unless one alone has more."""
    order = np.argsort(lengths, kind="stable")
    first = 0
    for place in range(1, len(order) + 1):
        if place == len(order) or (place + 1 - first) * lengths[order[place]] > MAX_TOKENS:
            yield order[first:place]
            first = place


def _check_format(metadata: Mapping[str, str], path: Path) -> None:
    if metadata.get("format") != FORMAT:
        raise NeuralLanguageModelError(
            f"{path} must say format {FORMAT!r} in its metadata, as `carnelian-export` writes it, "
            f"but says {metadata.get('format')!r}"
        )
    if metadata.get("case") not in _CASES:
        raise NeuralLanguageModelError(
            f"{path} must have case {' or '.join(_CASES)} in its metadata, but has {metadata.get('case')!r}"
        )


def _load_tokenizer(encoded: str, path: Path) -> Any:
    tokenizer = sentencepiece.SentencePieceProcessor()
    try:
        tokenizer.LoadFromSerializedProto(base64.b64decode(encoded))
    except (ValueError, RuntimeError) as error:
        raise NeuralLanguageModelError(
            f"{path} must hold a sentencepiece model as base64 in its metadata's `tokenizer`: {error}"
        ) from error
    return tokenizer


def _check_alphabet(tokenizer: Any, labels: Sequence[str], path: Path) -> None:
    """What the recogniser writes, the model must know, and the other way round.

    Raises:
        NeuralLanguageModelError: The alphabets differ; the message names the characters.
    """
    unknown = [label for label in labels if label != " " and tokenizer.unk_id() in tokenizer.encode(label)]
    pieces = (
        tokenizer.id_to_piece(i)
        for i in range(tokenizer.get_piece_size())
        if not (tokenizer.is_control(i) or tokenizer.is_unknown(i) or tokenizer.is_unused(i) or tokenizer.is_byte(i))
    )
    foreign = set("".join(pieces)) - set(labels) - {_BLANK}
    wrong = [
        f"{what} {', '.join(map(repr, sorted(characters)))}"
        for what, characters in (("does not know", unknown), ("has", foreign))
        if characters
    ]
    if wrong:
        raise NeuralLanguageModelError(
            f"{path} must be of the recogniser's alphabet, {''.join(labels)!r}, but {' and '.join(wrong)}"
        )
