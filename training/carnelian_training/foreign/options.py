"""Reading another toolkit's options: each is carried over, is as it is here, or is refused by name."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from carnelian_training.config_errors import shown
from carnelian_training.weight_files import CheckpointError

Options = dict[str, Any]

NO_SPANS: Options = {"time_probability": 0.0, "channel_probability": 0.0}
"""`augment.spans` of wav2vec 2.0 that is fine-tuned without masks."""


def section(tree: Mapping[str, Any], name: str, where: str) -> Options:
    """A part of a configuration; `{cls, params}`, as NeMo 1.0's first files have it, is unfolded.

    Raises:
        CheckpointError: It is not there.
    """
    found = tree.get(name)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where} must have a section `{name}`, but has {', '.join(map(str, tree)) or 'nothing'}")
    inner = found.get("params")
    outer = {key: value for key, value in found.items() if key not in ("params", "cls", "_target_")}
    return outer | dict(inner) if isinstance(inner, Mapping) else outer


def check(options: Options, *, fixed: Options, carried: set[str], ignored: set[str], where: str) -> None:
    """See that nothing is lost.

    Args:
        options: what the checkpoint says.
        fixed: options that Carnelian has one value of; absent means that value.
        carried: options that the caller reads.
        ignored: options without a bearing on what a trained network says.
        where: opens the message.

    Raises:
        CheckpointError: Options have other values than `fixed`, or are not known at all; all are named.
    """
    mistakes = [
        f"  `{name}` must be {fixed[name]!r}, the only value supported, but is {shown(value)}"
        for name, value in options.items()
        if name in fixed and value != fixed[name]
    ]
    unknown = options.keys() - fixed.keys() - carried - ignored
    mistakes += [f"  `{name}` is not known (found {shown(options[name])})" for name in sorted(unknown)]
    if mistakes:
        raise CheckpointError("\n".join([f"{where}: {len(mistakes)} option(s) cannot be carried over:", *mistakes]))


def carry(table: Mapping[str, tuple[str, Any]], options: Options) -> Options:
    """Options by our names.

    Args:
        table: our name -> theirs, and its default there.
        options: by theirs; what is not in the table is left out.
    """
    return {ours: options.get(theirs, default) for ours, (theirs, default) in table.items()}


def single(value: Any, where: str) -> Any:
    """The one entry of a list such as `kernel: [33]`, or a plain number.

    Raises:
        CheckpointError: It is no number.
    """
    if isinstance(value, list):
        if len(value) != 1:
            raise CheckpointError(f"{where} must have one entry, but is {shown(value)}")
        value = value[0]
    if isinstance(value, str):  # what PyYAML makes of 1e-5
        with contextlib.suppress(ValueError):
            value = float(value)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise CheckpointError(f"{where} must be a number, but is {shown(value)}")
    return value


def samples(seconds: float, rate_hz: int) -> int:
    """A window or a hop in samples, rounded as NeMo and DLE do: down."""
    return int(seconds * rate_hz)
