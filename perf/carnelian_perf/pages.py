"""Pages: Markdown and plots beside the raw files that they are made of."""

import contextlib
import io
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from carnelian_perf.raw_file import RawFile, RawFileError
from carnelian_perf.whole_file import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUMBER = re.compile(r"[*+-]*\d[\d.,]*(?![\d.,]| [a-z]{3})")
"""Matches the beginning of a table cell that holds a number, also a bold one, but not words ("16 clients")."""


def page(title: str, measurement: RawFile, parts: Iterable[str], notes: Sequence[str] = ()) -> str:
    """Make a Markdown page; it says so if the command did not run to its end.

    Args:
        title: The heading of the page.
        measurement: The raw file that the page shows.
        parts: Tables and paragraphs, each ending with a newline.
        notes: Entries of the list at the end of the page.
    """
    content = [*parts, *(["".join(f"- {note}\n" for note in notes)] if notes else [])]
    return f"# {title}\n\n{measurement.say_unfinished()}" + "\n".join(content)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Make a Markdown table; short rows are filled with empty cells, columns with numbers are aligned right."""
    lines = [[*row, *[""] * (len(head) - len(row))] for row in rows]
    columns = [[line[place] for line in lines] for place in range(len(head))]
    rulers = ["--:" if any(map(NUMBER.match, column)) else "---" for column in columns]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rulers, *lines))


def show_plot(words: str, raw_name: str) -> str:
    """Make the Markdown line that shows a raw file's plot in its page; all three lie in one folder.

    Args:
        words: What the plot shows.
        raw_name: The raw file's name.
    """
    return f"![{words}]({quote(Path(raw_name).with_suffix('.png').name)})\n"


def say_busy(cores: Iterable[float]) -> str:
    """Say in words how many cores other processes kept busy: least, most and median of several readings."""
    found = list(cores)
    return f"kept {min(found):.1f} to {max(found):.1f} cores (median {statistics.median_high(found):.1f}) busy"


def scale_milliseconds(axes: "Axes") -> None:
    """Give a y axis of times a logarithmic scale, labelled with plain numbers even if its range is small."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def write_plot(path: Path, figure: "Figure") -> None:
    """Write a figure as a PNG file as :func:`write_whole` does; the same figure gives the same file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110, metadata={"Software": None})
    write_whole(path, content.getvalue())


@contextlib.contextmanager
def rendering(raw_path: Path) -> Iterator[None]:
    """Turn an error while a page is made into one that names the raw file: its valid parts may not fit together.

    Raises:
        RawFileError: A page cannot be made of the raw file.
    """
    try:
        yield
    except RawFileError:
        raise
    except (LookupError, StopIteration, ArithmeticError, TypeError, ValueError) as error:
        found = error if isinstance(error, ValueError) else repr(error)  # a KeyError's text is a key alone
        raise RawFileError(f"{raw_path} must hold all that its page shows, but does not: {found}") from error
