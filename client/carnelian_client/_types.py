"""What goes in and what comes out: clips, transcripts, and what the server says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Audio: TypeAlias = str | PathLike[str] | bytes | bytearray | memoryview | tuple["npt.NDArray[np.number[Any]]", int]
"""A path, the bytes of an audio file, or `(samples, rate)`: samples [samples] or [samples, channels], floating point
in [-1, 1], int16, int32 or uint8, whose silence is 128; rate in Hz. The server resamples and mixes down."""


@dataclass(frozen=True)
class Word:
    """One word of a transcript."""

    word: str
    start_s: float
    end_s: float
    confidence: float


@dataclass(frozen=True)
class Alternative:
    """Another reading of the clip, or the best one, with what speaks for it: natural logarithms."""

    text: str
    score: float
    """The sum of the others."""
    acoustic: float
    language: float
    hotwords: float
    neural: float = 0.0
    """What rescoring added."""


@dataclass(frozen=True)
class Transcript:
    """What the server understood in one clip."""

    text: str
    words: tuple[Word, ...]
    confidence: float
    duration_s: float
    """Length of the clip as the server decoded it, in whole frames of the model: up to 0.1 s off."""
    model: str
    model_version: str
    """Of `<model>_ctc`, the stage that decodes, not of the ensemble."""
    request_id: str
    decoder: str
    """greedy, beam or ngram."""
    alternatives: tuple[Alternative, ...]
    """The best first, which is `text`; `n_best` of them at most, none by greedy decoding."""
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    """The server's RESULT as it came, with fields that this version of the SDK may not know."""
    rescored: bool = False
    """Whether a neural language model chose among the readings."""


class DecodingOptions(TypedDict, total=False):
    """How to decode; what is left out is as the model's deployer chose. Scores are natural logarithms."""

    decoder: Literal["greedy", "beam", "ngram"]
    """beam searches without, ngram with the language model that is deployed with the model."""
    beam_width: int
    beam_threshold: float
    token_threshold: float
    lm_weight: float
    word_score: float
    unknown_score: float
    n_best: int
    """How many `alternatives` there may be."""
    hotwords: Sequence[str]
    """Words and phrases that are expected; for beam and ngram."""
    hotword_boost: float
    rescore: bool
    """Whether the neural language model that is deployed with the model rates the readings of beam or ngram."""
    rescore_weight: float
    rescore_depth: int
    """How many readings it rates."""


@dataclass(frozen=True)
class Health:
    """The server's own word on its state."""

    is_live: bool
    is_ready: bool
    """Every model that should be loaded is loaded."""
    server_version: str


@dataclass(frozen=True)
class Model:
    """One entry of the server's model repository; stages of an ensemble are entries too."""

    name: str
    version: str
    is_ready: bool
    state: str
    """Triton's word, such as READY, LOADING or UNAVAILABLE; empty if it was never loaded."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class TLS:
    """Encrypt the connection. `TLS()` trusts the authorities that gRPC ships; paths name PEM files."""

    ca_path: str | Path | None = None
    """Authorities to trust instead, for a private CA."""
    cert_path: str | Path | None = None
    """This client's certificate chain, for servers that want one (mutual TLS)."""
    key_path: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.cert_path is None) != (self.key_path is None):
            given, missing = ("key_path", "cert_path") if self.key_path else ("cert_path", "key_path")
            raise ValueError(f"a client certificate needs both files, but only `{given}` is given; add `{missing}`.")


@dataclass(frozen=True)
class Request:
    """One call, ready to be sent (and to be sent again)."""

    audio: bytes = field(repr=False)
    """A whole WAV, FLAC or Ogg file."""
    clip: str
    """What to call the clip in errors."""
    model: str
    request_id: str
    parameters: Mapping[str, str | int] = field(default_factory=dict, repr=False)
    """Triton's request parameters."""
