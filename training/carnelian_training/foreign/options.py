"""Reading another toolkit's options: each is converted, has the only supported value, or is refused by name."""

import contextlib
from collections.abc import Mapping
from typing import Any

from carnelian_training.config_errors import shown
from carnelian_training.features import SAMPLE_RATE_HZ
from carnelian_training.weight_files import CheckpointError

Options = dict[str, Any]

NO_SPANS: Options = {"time_probability": 0.0, "channel_probability": 0.0}
"""The fields of `augment.spans` for a wav2vec 2.0 that was fine-tuned without masks."""
MOST = 2**31 - 1
"""The largest number that an option may have: larger than any real one, and small enough to multiply."""


def section(tree: Mapping[str, Any], name: str, where: str) -> Options:
    """Return a section of a configuration; merge `params` into it, as NeMo 1.0's first files have `{cls, params}`.

    Raises:
        CheckpointError: There is no such section.
    """
    found = tree.get(name)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where} must have a section `{name}`, but has {', '.join(map(str, tree)) or 'nothing'}")
    inner = found.get("params")
    outer = {key: value for key, value in found.items() if key not in ("params", "cls", "_target_")}
    return outer | dict(inner) if isinstance(inner, Mapping) else outer


def check(options: Options, *, fixed: Options, carried: set[str], ignored: set[str], where: str) -> None:
    """Check that every option is supported, so that none is lost.

    Args:
        options: the checkpoint's options.
        fixed: options with only one supported value, which is also their default.
        carried: options that the caller converts.
        ignored: options that do not affect the results of a trained network.
        where: the place, with which the message begins.

    Raises:
        CheckpointError: Options have other values than in `fixed`, or are unknown; the message names all.
    """
    mistakes = [
        f"  `{name}` must be {fixed[name]!r}, the only value supported, but is {shown(value)}"
        for name, value in options.items()
        if name in fixed and value != fixed[name]
    ]
    unknown = options.keys() - fixed.keys() - carried - ignored
    mistakes += [f"  `{name}` is not known (found {shown(options[name])})" for name in sorted(unknown, key=str)]
    if mistakes:
        raise CheckpointError("\n".join([f"{where}: {len(mistakes)} option(s) cannot be carried over:", *mistakes]))


def carry(table: Mapping[str, tuple[str, Any]], options: Options) -> Options:
    """Convert options to Carnelian's names.

    Args:
        table: Carnelian's name -> the other toolkit's name and default.
        options: options by the other toolkit's names; those not in the table are left out.
    """
    return {ours: options.get(theirs, default) for ours, (theirs, default) in table.items()}


def single(value: Any, where: str) -> Any:
    """Return a plain number, or the only entry of a list such as `kernel: [33]`.

    Raises:
        CheckpointError: The value is not a number up to `MOST`, or a list of one.
    """
    if isinstance(value, list):
        if len(value) != 1:
            raise CheckpointError(f"{where} must have one entry, but is {shown(value)}")
        value = value[0]
    if isinstance(value, str):  # PyYAML reads 1e-5 as a string
        with contextlib.suppress(ValueError):
            value = float(value)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:  # NaN
        raise CheckpointError(f"{where} must be a number, but is {shown(value)}")
    if abs(value) > MOST:
        raise CheckpointError(f"{where} must be at most {MOST}, but is {shown(value)}")
    return value


def whole(value: Any, where: str) -> int:
    """Return a whole number of at least 1, which may be the only entry of a list.

    Raises:
        CheckpointError: The value is not one.
    """
    number = single(value, where)
    if number < 1 or number % 1:
        raise CheckpointError(f"{where} must be a whole number of at least 1, but is {shown(value)}")
    return int(number)


def samples(seconds: float) -> int:
    """Convert the length of a window or hop to samples at 16 kHz, rounded down as in NeMo and DLE."""
    return int(seconds * SAMPLE_RATE_HZ)


def mel_features(options: Options, where: str) -> Options:
    """Convert the options of mel features that NeMo and DLE name alike, with the defaults of both.

    Raises:
        CheckpointError: The window or the hop is no number of seconds, or is less than a sample.
    """
    window = _in_samples(options, "window_size", 0.02, where)
    return {
        "window_samples": window,
        "hop_samples": _in_samples(options, "window_stride", 0.01, where),
        "fft_size": options.get("n_fft") or 1 << (window - 1).bit_length(),
        "low_hz": options.get("lowfreq") or 0.0,
        "high_hz": options.get("highfreq") or SAMPLE_RATE_HZ / 2,
        "preemphasis": options.get("preemph", 0.97) or 0.0,
    }


def _in_samples(options: Options, name: str, default_s: float, where: str) -> int:
    """Return the length of a window or hop in samples; `n_<name>` gives it in samples, `<name>` in seconds."""
    if options.get(f"n_{name}"):
        return whole(options[f"n_{name}"], f"{where}, `n_{name}`")
    seconds = single(options.get(name, default_s), f"{where}, `{name}`")
    return whole(samples(seconds), f"{where}, `{name}` in samples")
