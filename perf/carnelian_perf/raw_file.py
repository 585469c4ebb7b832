"""Raw files: what all of them say about their origin, and how they are written and read."""

import codecs
import datetime
import json
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar
from urllib.parse import quote

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from carnelian_perf.machine import describe_machine, find_commit, find_versions
from carnelian_perf.whole_file import write_whole

T = TypeVar("T")
Own = TypeVar("Own", bound="RawFile")

Filled: TypeAlias = Annotated[list[T], Field(min_length=1)]
"""A list that is never empty in a raw file."""
MACHINE = ("cpu", "cores", "accelerator")
"""Keys of :attr:`RawFile.machine` that every page shows."""
_CODE = re.compile(r"((?<!`)`[^`|]+`(?!`))")
_MARKUP = re.compile(r"[\\\[*|]|<(?=[a-zA-Z/!?])")
_WRITTEN_OTHERWISE = (
    " (another command or another version of carnelian-perf wrote it, or it was edited; what wrote it can still read "
    "it: see its `commit`)"
)


class RawFileError(ValueError):
    """A raw file is not what it must be; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The clips that requests sent."""

    source: str
    """Where the clips come from, in words."""
    durations_s: list[float]

    @classmethod
    def of(cls, source: str, durations_s: Iterable[float]) -> "Traffic":
        """Describe clips by their source and their durations, which are rounded to 0.01 s."""
        return cls(source=source, durations_s=[round(duration_s, 2) for duration_s in durations_s])

    def __str__(self) -> str:
        """Describe the clips in words: source, number, shortest, longest and median duration."""
        lengths = self.durations_s
        return (
            f"{self.source}: {len(lengths)} of {min(lengths):.1f} to {max(lengths):.1f} s, "
            f"median {statistics.median_high(lengths):.1f} s"
        )


@dataclass(frozen=True, kw_only=True)
class Speech:
    """The speech that is cut into clips of exact durations."""

    manifest: str
    format: str
    """Format of the audio files that are sent: flac or wav."""
    clips: int
    """Number of distinct clips of each duration."""


@dataclass(frozen=True)
class Split:
    """Where a stage's time went, in milliseconds, as Triton counts it."""

    queue: float
    input: float
    infer: float
    output: float

    @property
    def total(self) -> float:
        """The sum of the four parts, in milliseconds."""
        return self.queue + self.input + self.infer + self.output

    @classmethod
    def median(cls, splits: Sequence["Split"]) -> "Split":
        """Return the median of each part over several splits."""
        return cls(*(statistics.median(getattr(split, part.name) for split in splits) for part in fields(cls)))

    def __str__(self) -> str:
        """Format the parts in Markdown, as in the tables: "0.1 + 0.2 + **3.0** + 0.1"."""
        return f"{self.queue:.1f} + {self.input:.1f} + **{self.infer:.1f}** + {self.output:.1f}"


@with_config(ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))  # of all parts, too: pydantic passes it down
@dataclass(frozen=True, kw_only=True)
class RawFile:
    """The base of all raw files: the origin of a measurement, as :func:`describe_origin` gives it."""

    subject: str = ""
    """Name of the command that wrote the file; each kind of raw file has its own."""
    date: str
    """Date and time of the measurement, UTC, ISO 8601."""
    command: str
    commit: str | None
    machine: dict[str, str | int]
    """The machine: at least the keys of :data:`MACHINE`."""
    versions: dict[str, str]
    finished: bool = True
    """Whether the command ran to its end; the file has this key only if it did not."""

    def __post_init__(self) -> None:
        """Refuse a machine that lacks a key of :data:`MACHINE`."""
        if missing := set(MACHINE) - self.machine.keys():
            raise ValueError(f"machine lacks {', '.join(sorted(missing))}")

    def as_text(self: Own) -> Own:
        """Escape all strings for Markdown pages: anyone may have written them, and a page must only show them."""
        command = " ".join(self.command.splitlines()).replace("`", "'")  # pages have it in a code span
        shown: Own = replace(_as_text(self), command=command)
        return shown

    def write(self, path: Path) -> None:
        """Write the raw file as JSON."""
        # By alias: a key may be a keyword of Python, such as `from`.
        content = TypeAdapter(type(self)).dump_python(self, by_alias=True, warnings=False)
        write(path, {key: value for key, value in content.items() if (key, value) != ("finished", True)})

    def say_machine(self) -> str:
        """Describe the machine in words."""
        machine = self.machine
        return f"{machine['cpu']}, {machine['cores']} cores, accelerator: {machine['accelerator']}"

    def say_versions(self) -> str:
        """List the versions in words."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())

    def say_sources(self, raw_name: str) -> list[str]:
        """Make the last notes of a page: the versions, and a link to the raw file with its date, commit and command."""
        return [
            f"Versions: {self.say_versions()}.",
            f"Raw file: [{raw_name}]({quote(raw_name)}), {self.date}, commit {self.commit or 'none'}, by "
            f"`{self.command}`.",
        ]

    def say_unfinished(self) -> str:
        """Return the warning below a page's title; empty if the command ran to its end."""
        return "" if self.finished else "**Not finished.** The command was interrupted: runs are missing.\n\n"

    @classmethod
    def read(cls: type[Own], path: Path) -> Own:
        """Read a raw file.

        Raises:
            RawFileError: The file is not a raw file of this command.
        """
        return read(path, cls.subject, TypeAdapter(cls).validate_json)


@dataclass(frozen=True, kw_only=True)
class Record(RawFile):
    """The base of raw files about one model."""

    model: str


def as_text(words: str) -> str:
    """Escape words for Markdown: no images, links, HTML or table cells; code in backticks stays."""
    parts = _CODE.split(" ".join(words.splitlines()))
    return "".join(
        part if place % 2 else _MARKUP.sub(r"\\\g<0>", part.replace("`", "'")) for place, part in enumerate(parts)
    )


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return as_text(value)
    if isinstance(value, dict):
        return {_as_text(key): _as_text(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_text, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _as_text(getattr(value, field.name)) for field in fields(value)})
    return value


def utc_now() -> str:
    """Return the current time in UTC, as ISO 8601, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def command_line() -> str:
    """Return the command line of this process, quoted so that a shell can run it again."""
    return shlex.join(["carnelian-perf", *sys.argv[1:]])


def describe_origin(accelerator: str | None = None) -> dict[str, Any]:
    """Collect a measurement's origin for its raw file: date, command, commit, machine and versions.

    Call this before anything is measured: the checkout may change meanwhile, if only by a tracked raw file.

    Args:
        accelerator: The accelerator that is used, if the command chooses one; by default all that the machine has.
    """
    return {
        "date": utc_now(),
        "command": command_line(),
        "commit": find_commit(),
        "machine": describe_machine() | ({"accelerator": accelerator} if accelerator else {}),
        "versions": find_versions(),
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a raw file as :func:`write_whole` does."""
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_subject(path: Path) -> str:
    """Return the name of the command that wrote a raw file.

    Raises:
        RawFileError: The file names none.
    """
    try:
        subject = json.loads(path.read_bytes().removeprefix(codecs.BOM_UTF8))["subject"]
    except (ValueError, RecursionError) as error:
        found = f"is no JSON: {error}"
    except (LookupError, TypeError):
        found = f"has no `subject`, the name of the command that wrote it{_WRITTEN_OTHERWISE}"
    else:
        return str(subject)
    raise RawFileError(f"{path} must be a raw file, which a command of carnelian-perf writes, but {found}")


def read(path: Path, subject: str, parse: Callable[[bytes], T]) -> T:
    """Read the raw file that the command `subject` wrote; `parse` is pydantic's validation of its JSON.

    Raises:
        RawFileError: The file is no raw file of that command.
    """
    try:
        return parse(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        reason = f"{where}: {first['msg']}"
        if first["type"] != "json_invalid":
            reason += _WRITTEN_OTHERWISE
        raise RawFileError(f"{path} must be a raw file of `carnelian-perf {subject}`, but is not: {reason}") from error
