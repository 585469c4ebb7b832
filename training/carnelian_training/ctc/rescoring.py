"""Rescoring: a neural language model scores whole readings, which are then ordered again.

The model is one ONNX file. Its inputs are TOKENS [rows, time] and TOKEN_LENGTH [rows], both int64; its output is
LOG_PROB [rows] float32, the natural log-probability of each row as a sentence, its end included. Its metadata contain
`format`, `name`, `tokenizer` (a sentencepiece model, base64) and `case` (lower or upper), so that no other file is
needed.
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
from .spelling import choose_cases

FORMAT = "carnelian-language-model-1"
MAX_TOKENS = 8192
"""The most tokens in one run, padding included, because the model's activations must fit into memory."""
_CASES = ("lower", "upper")
_BLANK = "▁"  # sentencepiece's space


class NeuralLanguageModelError(ValueError):
    """The neural language model cannot be used with this recogniser; the message says why."""


class NeuralLanguageModel:
    """A neural language model that scores sentences spelled in the recogniser's labels.

    Attributes:
        name: the name in the model's metadata, or the file's name without suffix.
    """

    def __init__(self, path: Path, labels: Sequence[str]) -> None:
        """Load an ONNX file as the module describes.

        Like the search, it runs on one thread, because instances of the server share the cores.

        Raises:
            NeuralLanguageModelError: The file cannot be read or is not such a model, its alphabet differs from the
                labels, or what it gives two texts is not finite.
        """
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = settings.inter_op_num_threads = 1
        try:
            self._session = onnxruntime.InferenceSession(
                path.read_bytes(), settings, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the base of ONNX Runtime's own exceptions
            raise NeuralLanguageModelError(f"{path} must be an ONNX file that ONNX Runtime loads: {error}") from error
        metadata = self._session.get_modelmeta().custom_metadata_map
        _check_format(metadata, path)
        self.name: str = metadata.get("name") or path.stem
        self._change_case = dict(zip(_CASES, choose_cases(labels), strict=True))[metadata["case"]]
        self._tokenizer = _load_tokenizer(metadata.get("tokenizer", ""), path)
        _check_alphabet(self._tokenizer, [self._change_case(label) for label in labels], path)
        try:
            log_probs = self.score(["", "".join(labels).strip()[:100]])
        except Exception as error:  # the base of ONNX Runtime's own exceptions
            raise NeuralLanguageModelError(
                f"{path} must compute LOG_PROB of TOKENS and TOKEN_LENGTH, as `carnelian-export` writes it: {error}"
            ) from error
        if not np.isfinite(log_probs).all():
            raise NeuralLanguageModelError(f"{path} must give finite log-probabilities, but gives {log_probs}")

    def score(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the natural log-probabilities of sentences, [texts] float32."""
        tokens = self._tokenizer.encode([self._change_case(text) for text in texts])
        lengths = np.array([len(row) for row in tokens], np.int64)
        log_probs = np.zeros(len(texts), np.float32)
        for rows in _split(lengths):
            batch = np.zeros((len(rows), max(1, int(lengths[rows].max()))), np.int64)
            for place, row in enumerate(rows):
                batch[place, : lengths[row]] = tokens[row]
            (found,) = self._session.run(["LOG_PROB"], {"TOKENS": batch, "TOKEN_LENGTH": lengths[rows]})
            if found.shape != rows.shape:
                raise ValueError(f"LOG_PROB must have the shape {rows.shape}, but has {found.shape}")
            log_probs[rows] = found
        return log_probs

    def rescore(self, readings: Sequence[Alternative], options: Options) -> list[Alternative]:
        """Add the model's weighted scores to the readings of one clip.

        Args:
            readings: the readings of one clip. Clips are not scored together: each has many readings of about equal
                length already, and in a larger batch the last digits of scores would change.
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
    """Yield groups of rows to run together, of about equal length and at most `MAX_TOKENS`, or a single longer row."""
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
    """Check that the model and the recogniser have the same alphabet.

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
