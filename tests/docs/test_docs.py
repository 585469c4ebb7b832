"""The pages link to what exists and show commands that exist."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from carnelian_client._cli import app as transcribe
from carnelian_export.cli import app as export
from carnelian_perf.cli import app as perf
from carnelian_serving.cli import app as serve
from carnelian_training.cli import app as train

ROOT = Path(__file__).parents[2]
LISTING = ["git", "-C", str(ROOT), "ls-files", "-z", "*.md"]
PAGES = [ROOT / name for name in subprocess.check_output(LISTING, text=True).split("\0")[:-1]]
COMMANDS = {
    "carnelian-export": typer.main.get_command(export),
    "carnelian-perf": typer.main.get_command(perf),
    "carnelian-serve": typer.main.get_command(serve),
    "carnelian-train": typer.main.get_command(train),
    "carnelian-transcribe": typer.main.get_command(transcribe),
}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def shown_commands(page: Path) -> Iterator[list[str]]:
    """The words of each of our commands in a page's code."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    code = [*re.findall(r"^    [^`\n]*$", text, flags=re.MULTILINE), *re.findall(r"`([^`\n]+)`", text)]
    for line in code:
        for command in re.findall(rf"(?:{'|'.join(COMMANDS)}) [^#|;)]*", line):
            try:
                yield shlex.split(command)
            except ValueError:  # a quotation that ends in another part of the line
                yield command.split()


@each_page
def test_links_lead_somewhere(page):
    wrong = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        place = page.parent / target if target else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            wrong.append(f"{target}#{anchor}")
    assert not wrong


@each_page
def test_commands_and_their_options_exist(page):
    wrong = []
    for name, *words in shown_commands(page):
        command = COMMANDS[name]
        while (inner := getattr(command, "commands", None)) and words and words[0] in inner:
            command = inner[words.pop(0)]
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        if hasattr(command, "commands") and words and not words[0].startswith("-"):
            wrong.append(f"{name} {words[0]}")
        own = words[: words.index("--")] if "--" in words else words  # tritonserver's follow
        wrong += [
            f"{name} {word}"
            for word in own
            if re.match(r"--\w", word) and word.split("=")[0] not in {*options, "--help"}
        ]
    assert not wrong
