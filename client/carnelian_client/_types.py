"""What goes in and what comes out: clips, transcripts, and what the server says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from typing_extensions import TypedDict

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
    """Seconds from the beginning of the clip, as is `end_s`."""
    end_s: float
    confidence: float
    """From 0 to 1; if the model is calibrated, the probability that the word is right."""


@dataclass(frozen=True)
class Alternative:
    """One reading of the clip, the best one or another, with its scores in natural logarithms."""

    text: str
    score: float
    """The sum of the scores below, by which the readings are ordered."""
    acoustic: float
    """The acoustic model's log-probability of the text."""
    language: float
    """What the n-gram language model and `word_score` contributed."""
    hotwords: float
    """What `hotword_boost` contributed."""
    neural: float = 0.0
    """What rescoring by the neural language model contributed."""


@dataclass(frozen=True)
class Transcript:
    """What the server understood in one clip."""

    text: str
    words: tuple[Word, ...]
    confidence: float
    """The mean of the words' confidences, from 0 to 1."""
    duration_s: float
    """Length of the clip as the server decoded it, in whole frames of the model: up to 0.1 s off."""
    model: str
    model_version: str
    """The version of `<model>_ctc`, the stage that decodes. The ensemble has versions of its own."""
    request_id: str
    decoder: str
    """The decoder that was used: greedy, beam or ngram."""
    alternatives: tuple[Alternative, ...]
    """At most `n_best` readings, the best (`text`) first. Empty after greedy decoding."""
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    """The server's RESULT as it was sent; it may have fields that this version of the SDK does not know. Of a long
    recording, the first piece's with the fields above joined."""
    rescored: bool = False
    """Whether a neural language model chose among the readings."""


@dataclass(frozen=True)
class Utterance:
    """What the server understood of one utterance in live audio: so far, or of all of it."""

    index: int
    """How many utterances came before it."""
    start_s: float
    """Seconds from the beginning of the audio, as are `end_s` and the times in `transcript`."""
    end_s: float
    is_final: bool
    """Whether the utterance has ended. The texts before may differ from the final one in any word."""
    transcript: Transcript


class DecodingOptions(TypedDict, total=False):
    """How to decode; options that are left out keep the deployed model's defaults. Scores are natural logarithms."""

    decoder: Literal["greedy", "beam", "ngram"]
    """greedy takes the best label of each frame; beam searches; ngram searches with the deployed language model."""
    beam_width: int
    """How many prefixes the search keeps from frame to frame, 1 to 500."""
    beam_threshold: float
    """The search drops a prefix whose score is further than this below the best one's, 0 to 100."""
    token_threshold: float
    """A label can extend prefixes only in frames where its log-probability is above this, -100 to 0."""
    lm_weight: float
    """The factor of the language model's log-probability, 0 to 10 (ngram)."""
    word_score: float
    """Added to a reading's score for each word, -20 to 20 (ngram)."""
    unknown_score: float
    """Added for each word that the language model does not know and that is no hot word, -100 to 0 (ngram)."""
    n_best: int
    """The largest number of `alternatives` to return, 1 to 100."""
    hotwords: Sequence[str]
    """Words and phrases that are expected in the clip (beam, ngram)."""
    hotword_boost: float
    """Added to a reading's score for each word of a hot phrase, 0 to 50."""
    rescore: bool
    """Whether the deployed neural language model rates the readings too (beam, ngram)."""
    rescore_weight: float
    """The factor of the neural language model's log-probability, 0 to 10."""
    rescore_depth: int
    """The largest number of readings that the neural language model rates, 1 to 100; a model may be exported with
    another limit, of at most 500."""


@dataclass(frozen=True)
class Health:
    """The server's state, as it reports it."""

    is_live: bool
    is_ready: bool
    """Whether every model that should be loaded is loaded."""
    server_version: str


@dataclass(frozen=True)
class Model:
    """One entry of the server's model repository; stages of an ensemble are entries too."""

    name: str
    version: str
    is_ready: bool
    state: str
    """Triton's name for the state, such as READY, LOADING or UNAVAILABLE; empty if it was never loaded."""
    reason: str
    """Why the model is not ready, in Triton's words; empty if it is."""


@dataclass(frozen=True, kw_only=True)
class TLS:
    """Encrypt the connection. `TLS()` trusts the authorities that gRPC ships; paths name PEM files."""

    ca_path: str | Path | None = None
    """The certificate authorities to trust in place of those of gRPC, for a private CA."""
    cert_path: str | Path | None = None
    """This client's certificate chain, for servers that ask for one (mutual TLS)."""
    key_path: str | Path | None = None
    """The private key of `cert_path`."""

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
    """The name of the clip in errors."""
    model: str
    request_id: str
    parameters: Mapping[str, str | int] = field(default_factory=dict, repr=False)
    """The decoding options, as request parameters of Triton."""
