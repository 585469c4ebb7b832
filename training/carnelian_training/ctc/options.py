"""The decoder's options, which every request may set, with their limits and error messages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

DECODERS = ("greedy", "beam", "ngram")
MAX_HOTWORDS = 10_000
MAX_PHRASE_CHARACTERS, MAX_HOTWORD_CHARACTERS = 200, 300_000
"""The most characters of a hot phrase, and of all phrases of a request. Each takes 4 bytes of memory per label."""
SHOWN = 80
"""The most characters of a wrong value in a message, because gRPC sends only short messages."""

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
"""Options of a model that no request may set, each with the option that it limits."""
RANGES |= {limit: RANGES[name] for limit, name in LIMITS.items()}
_NGRAM_ONLY = ("lm_weight", "word_score", "unknown_score")
_RESCORING_ONLY = ("rescore_weight", "rescore_depth")


class OptionError(ValueError):
    """An option does not exist or has a wrong value; the message says what is allowed."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of decoding one clip. Scores are natural logarithms.

    Make them with :func:`read_options` or :func:`change_options`; the class itself checks no types or ranges.
    """

    decoder: str = "greedy"
    """The decoder: `greedy`, `beam` (no language model) or `ngram` (beam search with the n-gram language model)."""
    beam_width: int = 100
    """The most prefixes kept after each frame."""
    beam_threshold: float = 12.0
    """The distance below the best score at which a prefix is dropped; in the best score, boosts of incomplete hot
    phrases do not count."""
    token_threshold: float = -5.0
    """The least log-probability of a label in a frame to extend prefixes. If a hot phrase continues with the label, the
    threshold is lower by `hotword_boost`."""
    lm_weight: float = 0.5
    """The factor on the n-gram language model's log-probability."""
    word_score: float = 1.0
    """The score added for each word, if there is a language model."""
    unknown_score: float = -5.0
    """The score added for each word that is neither known to the language model nor a hot word. The first words of a
    hot phrase count as hot words even if the phrase does not follow; its later words alone do not."""
    n_best: int = 1
    """The most readings to return."""
    hotwords: tuple[str, ...] = ()
    """The words and phrases to expect."""
    hotword_boost: float = 6.0
    """The score added for each word of a hot phrase."""
    rescore: bool = False
    """Whether a neural language model rescores the readings of the search."""
    rescore_weight: float = 0.3
    """The factor on the neural language model's log-probability."""
    rescore_depth: int = 20
    """The most readings to rescore; `n_best`, if that is more."""
    # The largest values that requests may set.
    max_beam_width: int = 500
    max_n_best: int = 100
    max_rescore_depth: int = 100

    def __post_init__(self) -> None:
        for limit, name in LIMITS.items():
            found, most = getattr(self, name), getattr(self, limit)
            if found > most:
                raise OptionError(
                    f"{name} must be at most {limit}, which is {most}, but is {found}; change one of them"
                )

    @property
    def depth(self) -> int:
        """The most readings that the search has to return."""
        return max(self.n_best, self.rescore_depth) if self.rescore else self.n_best


_NAMES = tuple(field.name for field in fields(Options))
_REQUESTED = tuple(name for name in _NAMES if name not in LIMITS)


def read_options(
    parameters: Mapping[str, Any], defaults: Options, decoders: Sequence[str], can_rescore: bool = False
) -> Options:
    """Apply a request's parameters to the model's defaults.

    Args:
        parameters: options by name; numbers may be strings, and `hotwords` is a list or a JSON list in a string.
        defaults: the values of all other options.
        decoders: the names in `DECODERS` that the model supports.
        can_rescore: whether the model has a neural language model.

    Raises:
        OptionError: A parameter does not exist, its value is not allowed, or the decoder does not use it.
    """
    options = change_options(parameters, defaults, decoders, can_rescore, _REQUESTED)
    free = {"decoder"} if options.rescore else {"decoder", "rescore"}  # `rescore=false` is always allowed
    for name in sorted(set(parameters) - free):
        users = [decoder for decoder in decoders[1:] if decoder == "ngram" or name not in _NGRAM_ONLY]
        if options.decoder not in users:
            wanted = f"must come with decoder {' or '.join(users)}" if users else "needs a decoder that is not there"
            raise OptionError(f"{name} {wanted}, but the decoder is {options.decoder}")
        if name == "hotword_boost" and not options.hotwords and "hotwords" not in parameters:
            raise OptionError("hotword_boost must come with hotwords, but there are none")
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
    """Change options, including those that the resulting decoder does not use (:func:`read_options` refuses these).

    So a model's defaults may set options of a decoder that is not its default decoder.

    Raises:
        OptionError: A parameter does not exist, or its value is not allowed.
    """
    changes: dict[str, Any] = {}
    for name, value in sorted(parameters.items()):  # Triton gives them in any order
        if name not in names:
            raise OptionError(f"an option must be one of {', '.join(names)}, but there is {name!r:.{SHOWN}}")
        if name == "decoder":
            changes[name] = _decoder(value, decoders)
        elif name == "hotwords":
            changes[name] = _hotwords(value)
        elif name == "rescore":
            changes[name] = _rescore(value, can_rescore)
        else:
            is_limited = f"max_{name}" in LIMITS and f"max_{name}" not in names
            changes[name] = _number(name, value, getattr(defaults, f"max_{name}") if is_limited else RANGES[name][1])
    return replace(defaults, **changes)


def split_assignments(assignments: Sequence[str]) -> dict[str, str]:
    """Split the `name=value` arguments of a command line into parameters.

    Raises:
        OptionError: An argument has no `=`, or a name has two values.
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
    except (TypeError, ValueError, RecursionError) as error:  # RecursionError: deeply nested lists
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
