"""What a caller may ask of the decoder, request by request, and the words for what nobody may."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

DECODERS = ("greedy", "beam", "ngram")
MAX_HOTWORDS = 10_000
MAX_PHRASE_CHARACTERS, MAX_HOTWORD_CHARACTERS = 200, 300_000
"""Of a hot word or phrase, and of all of a request: 4 bytes of the server's memory each for every label."""
SHOWN = 80
"""Characters of a wrong value in a message, which gRPC sends only if it is short."""

RANGES: dict[str, tuple[float, float]] = {
    "beam_width": (1, 500),
    "beam_threshold": (0, 100),
    "token_threshold": (-100, 0),
    "lm_weight": (0, 10),
    "word_score": (-20, 20),
    "unknown_score": (-100, 0),
    "n_best": (1, 100),
    "hotword_boost": (0, 50),
    "rescore_weight": (0, 10),
    "rescore_depth": (1, 500),
}
LIMITS = {f"max_{name}": name for name in ("beam_width", "n_best", "rescore_depth")}
"""An option that a model has and no request may give -> the option that it bounds."""
RANGES |= {limit: RANGES[name] for limit, name in LIMITS.items()}
_NGRAM_ONLY = ("lm_weight", "word_score", "unknown_score")
_RESCORING_ONLY = ("rescore_weight", "rescore_depth")


class OptionError(ValueError):
    """An option that does not exist or has a value it must not have; the message says what is allowed."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to decode one clip. Scores are natural logarithms."""

    decoder: str = "greedy"
    """greedy, beam (no language model) or ngram (beam with the language model)."""
    beam_width: int = 100
    """Prefixes kept from frame to frame."""
    beam_threshold: float = 12.0
    """A prefix is dropped if its score is further than this below the best one's, hot phrases that are only begun not
    counted."""
    token_threshold: float = -5.0
    """A label extends prefixes only in frames where its log-probability is above this; `hotword_boost` below it, where
    a hot phrase goes on with it."""
    lm_weight: float = 0.5
    """Times the language model's log-probability."""
    word_score: float = 1.0
    """Added for each word, beside the language model."""
    unknown_score: float = -5.0
    """Added for each word that the language model does not know and that is no hot word."""
    n_best: int = 1
    """Readings to return, at most."""
    hotwords: tuple[str, ...] = ()
    """Words and phrases that are expected."""
    hotword_boost: float = 6.0
    """Added for each word of a hot phrase."""
    rescore: bool = False
    """Whether a neural language model rates the readings of the search, too."""
    rescore_weight: float = 0.3
    """Times that model's log-probability."""
    rescore_depth: int = 20
    """Readings to rescore, at most; where `n_best` is more, that many."""
    # The most that requests may ask for.
    max_beam_width: int = 500
    max_n_best: int = 100
    max_rescore_depth: int = 500

    def __post_init__(self) -> None:
        for limit, name in LIMITS.items():
            found, most = getattr(self, name), getattr(self, limit)
            if found > most:
                raise OptionError(
                    f"{name} must be at most {limit}, which is {most}, but is {found}; change one of them"
                )

    @property
    def depth(self) -> int:
        """Readings that the search has to give, at most."""
        return max(self.n_best, self.rescore_depth) if self.rescore else self.n_best


_NAMES = tuple(field.name for field in fields(Options))
_REQUESTED = tuple(name for name in _NAMES if name not in LIMITS)


def read_options(
    parameters: Mapping[str, Any], defaults: Options, decoders: Sequence[str], can_rescore: bool = False
) -> Options:
    """Apply a request's parameters to the model's defaults.

    Args:
        parameters: numbers may be text; `hotwords` is a list, or a JSON list in a string.
        defaults: what the parameters do not say.
        decoders: those of `DECODERS` that are there.
        can_rescore: whether there is a neural language model.

    Raises:
        OptionError: A parameter does not exist, its value is not allowed, or the decoder does not use it.
    """
    options = change_options(parameters, defaults, decoders, can_rescore, _REQUESTED)
    free = {"decoder"} if options.rescore else {"decoder", "rescore"}  # `rescore=false` asks for nothing
    for name in sorted(set(parameters) - free):
        users = [decoder for decoder in decoders[1:] if decoder == "ngram" or name not in _NGRAM_ONLY]
        if options.decoder not in users:
            wanted = f"must come with decoder {' or '.join(users)}" if users else "needs a decoder that is not there"
            raise OptionError(f"{name} {wanted}, but the decoder is {options.decoder}")
        if name in _RESCORING_ONLY and not options.rescore:
            raise OptionError(f"{name} must come with rescore true, but rescore is false")
    return options


def change_options(
    parameters: Mapping[str, Any],
    defaults: Options,
    decoders: Sequence[str],
    can_rescore: bool = False,
    names: Sequence[str] = _NAMES,
) -> Options:
    """Change some options; unlike :func:`read_options`, also such as the decoder of the result has no use for.

    So a model's defaults may hold those of a decoder that is not its default one.

    Raises:
        OptionError: A parameter does not exist, or its value is not allowed.
    """
    changes: dict[str, Any] = {}
    for name, value in sorted(parameters.items()):  # Triton hands them over in any order
        if name not in names:
            raise OptionError(f"an option must be one of {', '.join(names)}, but there is {name!r:.{SHOWN}}")
        if name == "decoder":
            changes[name] = _decoder(value, decoders)
        elif name == "hotwords":
            changes[name] = _hotwords(value)
        elif name == "rescore":
            changes[name] = _rescore(value, can_rescore)
        else:
            changes[name] = _number(name, value, getattr(defaults, f"max_{name}", RANGES[name][1]))
    return replace(defaults, **changes)


def split_assignments(assignments: Sequence[str]) -> dict[str, str]:
    """`name=value` of a command line as parameters.

    Raises:
        OptionError: One has no `=`, or has two values.
    """
    parameters: dict[str, str] = {}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator:
            raise OptionError(f"an option must be given as name=value, but is {assignment!r}")
        if parameters.get(name, value) != value:
            raise OptionError(f"an option must come once, but {name} is given as {parameters[name]!r} and {value!r}")
        parameters[name] = value
    return parameters


def _decoder(value: Any, decoders: Sequence[str]) -> str:
    if value not in decoders:
        why = "; ngram needs a language model (`--lm`), beam a label for the space" if value in DECODERS else ""
        raise OptionError(f"decoder must be one of {', '.join(decoders)}, but is {value!r:.{SHOWN}}{why}")
    return str(value)


def _rescore(value: Any, can_rescore: bool) -> bool:
    known = {"true": True, "false": False}
    if str(value).lower() not in known:
        raise OptionError(f"rescore must be true or false, but is {value!r:.{SHOWN}}")
    if known[str(value).lower()] and not can_rescore:
        raise OptionError("rescore needs a neural language model, but the model has none; it can only be false")
    return known[str(value).lower()]


def _number(name: str, value: Any, high: float) -> float:
    low = RANGES[name][0]
    kind = type(getattr(Options, name))
    try:
        number = float(value)
        if isinstance(value, bool) or not low <= number <= high or kind(number) != number:
            raise ValueError
    except (TypeError, ValueError, OverflowError) as error:
        sort = "a whole number" if kind is int else "a number"
        raise OptionError(f"{name} must be {sort} from {low:g} to {high:g}, but is {value!r:.{SHOWN}}") from error
    return kind(number)  # type: ignore[no-any-return]


def _hotwords(value: Any) -> tuple[str, ...]:
    try:
        phrases = json.loads(value) if isinstance(value, str) else list(value)
        if not isinstance(phrases, list) or not all(isinstance(phrase, str) for phrase in phrases):
            raise TypeError
    except (TypeError, ValueError, RecursionError) as error:  # the last of lists in lists in lists
        raise OptionError(
            f'hotwords must be a JSON list of strings, such as ["ada"], but is {value!r:.{SHOWN}}'
        ) from error
    if len(phrases) > MAX_HOTWORDS:
        raise OptionError(f"hotwords must be at most {MAX_HOTWORDS:,} words and phrases, but are {len(phrases):,}")
    longest, total = max(phrases, key=len, default=""), sum(map(len, phrases))
    if len(longest) > MAX_PHRASE_CHARACTERS or total > MAX_HOTWORD_CHARACTERS:
        raise OptionError(
            f"hotwords must have at most {MAX_PHRASE_CHARACTERS} characters each, {MAX_HOTWORD_CHARACTERS:,} in all, "
            f"but {longest!r:.{SHOWN}} has {len(longest):,}, and all have {total:,}"
        )
    return tuple(normalised for phrase in phrases if (normalised := " ".join(phrase.split())))
