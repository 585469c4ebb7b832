"""Every raw file that is checked in is read by its command's own class, and written as it was."""

import json
import math
import re
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from unittest.mock import MagicMock

import carnelian_perf
import pytest
from carnelian_perf.output import RESULTS, write_each
from carnelian_perf.pages import scale_milliseconds
from carnelian_perf.raw_file import write
from carnelian_perf.traffic.batching_results import render_page
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config
from matplotlib.figure import Figure

PACKAGE = Path(carnelian_perf.__file__).parent
SOURCES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path.read_text() for path in PACKAGE.rglob("*.py")
}
"""Module -> its text."""
MODULES = {
    subject: module
    for module, text in SOURCES.items()
    for subject in re.findall(
        r'^class Measurement\(.*?^    subject: Literal\["(.+?)"\]', text, re.DOTALL | re.MULTILINE
    )
}
"""Subject -> where its class `Measurement` is."""
MEASURES = sorted(name for name, text in SOURCES.items() if "\ndef measure(" in text and "describe_origin(" in text)
RAW_FILES = [
    path
    for path in sorted((Path(__file__).parents[2] / "perf" / "results").glob("*.json"))
    if not path.stem.endswith("_tuning")  # `tune` writes it beside its raw file
]
ONE_OF_EACH = {json.loads(path.read_text())["subject"]: path for path in RAW_FILES}.values()
"""Of each command's."""

assert (len(MODULES), len(MEASURES)) == (14, 14), "every command with a raw file must be found, also once it is renamed"


def test_every_module_that_makes_a_page_is_found_by_its_command():
    pages = {MODULES[subject] for subject in RESULTS}
    assert {f"carnelian_perf.{module}" for module in RESULTS.values()} == pages
    assert pages == {name for name in MODULES.values() if "\ndef render_page(" in SOURCES[name]}


def class_of(content):
    return import_module(MODULES[content["subject"]]).Measurement


@pytest.mark.parametrize("path", RAW_FILES, ids=lambda path: path.stem)
def test_it_is_read_and_written_as_it_was(path, tmp_path):
    content = json.loads(path.read_text())
    class_of(content).read(path).write(tmp_path / "new" / "raw.json")
    again = json.loads((tmp_path / "new" / "raw.json").read_text())
    assert {key: again[key] for key in content} == content


@pytest.mark.parametrize("path", ONE_OF_EACH, ids=lambda path: path.stem)
def test_a_key_that_is_not_its_own_is_refused(path, tmp_path):
    content = json.loads(path.read_text())
    parts = {"": content} | {f"{name}.": content[name] for name in ("plan", "speech", "traffic") if name in content}
    for name, part in parts.items():
        part["colour"] = "red"
        (tmp_path / "raw.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"but is not: {name}colour: "):
            class_of(content).read(tmp_path / "raw.json")
        del part["colour"]


class AskedError(Exception):
    pass


@pytest.mark.parametrize("module", MEASURES)
def test_the_commit_is_asked_for_before_anything_is_measured(module, monkeypatch):
    monkeypatch.setattr("carnelian_perf.raw_file.find_commit", MagicMock(side_effect=AskedError))
    measure = import_module(module).measure
    given = [MagicMock(device="cpu", model=Wav2Vec2Config()) for _ in signature(measure).parameters]
    with pytest.raises(AskedError):
        list(measure(*given))


def test_it_is_unfinished_until_all_parts_are_there(measurement, tmp_path):
    path = tmp_path / "raw.json"
    seen = []

    def grow():
        for count in (1, 2):
            yield replace(measurement, runs=measurement.runs[:count])
            written = type(measurement).read(path)
            seen.append((written.finished, "**Not finished.**" in render_page(written, "raw.json")))

    write_each(grow(), path)
    assert seen == [(False, True), (False, True)]
    last = type(measurement).read(path)
    assert (last.finished, len(last.runs)) == (True, 2)
    assert "finished" not in path.read_text()
    assert "Not finished" not in render_page(last, "raw.json")


def test_a_finished_raw_file_stays_until_the_next_is_whole(measurement, tmp_path, capsys):
    path, part = tmp_path / "raw.json", tmp_path / "raw_unfinished.json"
    measurement.write(path)
    before = path.read_bytes()

    def interrupted():
        yield replace(measurement, runs=measurement.runs[:1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_each(interrupted(), path)
    assert path.read_bytes() == before
    assert not type(measurement).read(part).finished
    command = f"carnelian-perf report {part}"
    assert capsys.readouterr().err == f"{part} has what was measured so far; its page: {command}\n"
    write_each([replace(measurement, runs=measurement.runs[:1])], path)
    assert path.read_bytes() != before
    assert not part.exists()


def test_what_a_full_disk_had_no_room_for_is_not_said_to_be_there(measurement, tmp_path, capsys, room):
    path = tmp_path / "raw.json"
    with room(100), pytest.raises(OSError, match="could not be written"):
        write_each([measurement], path)
    assert capsys.readouterr().err == ""
    assert not path.exists()


def test_nothing_to_measure_leaves_what_is_there(measurement, tmp_path):
    path = tmp_path / "raw.json"
    measurement.write(path)
    with pytest.raises(ValueError, match=r"something to measure for .*raw\.json, but there was nothing"):
        write_each(iter(()), path)
    assert type(measurement).read(path) == measurement


def test_links_of_a_page_are_to_files_of_any_name(measurement):
    page = render_page(measurement, "my raw.json")
    assert "](my%20raw.png)" in page
    assert "[my raw.json](my%20raw.json)" in page


def test_a_page_names_no_commit_outside_a_checkout(measurement):
    assert ", commit none, by `" in render_page(replace(measurement, commit=None), "raw.json")


def test_one_without_runs_is_refused(measurement, tmp_path):
    replace(measurement, runs=[]).write(tmp_path / "raw.json")
    with pytest.raises(ValueError, match="but is not: runs: List should have at least 1 item"):
        type(measurement).read(tmp_path / "raw.json")


@pytest.mark.parametrize("cores", [math.nan, True, 1.5], ids=str)
def test_a_machine_has_a_number_of_cores(measurement, tmp_path, cores):
    replace(measurement, machine=measurement.machine | {"cores": cores}).write(tmp_path / "raw.json")
    with pytest.raises(ValueError, match=r"but is not: machine\.cores"):
        type(measurement).read(tmp_path / "raw.json")


def test_a_raw_file_of_another_command_is_refused(tmp_path):
    path = next(path for path in RAW_FILES if path.stem.endswith("_words"))
    content = json.loads(path.read_text())
    (tmp_path / "raw.json").write_text(json.dumps(content | {"subject": "int8"}))
    with pytest.raises(ValueError, match="`carnelian-perf words`, but is not: subject: "):
        class_of(content).read(tmp_path / "raw.json")


@pytest.mark.parametrize(
    ("command", "of_another_version"), [('["carnelian-perf", "batching"]', True), ('"carnelian-perf batching"}', False)]
)
def test_what_another_version_wrote_is_told_from_what_is_damaged(measurement, tmp_path, command, of_another_version):
    """What did not fit was named alone, as if the file were none of carnelian-perf's."""
    path = tmp_path / "raw.json"
    measurement.write(path)
    path.write_text(re.sub(r'(?<="command": )".*"', command, path.read_text()))
    with pytest.raises(ValueError, match="`carnelian-perf batching`, but is not: ") as caught:
        type(measurement).read(path)
    assert ("another version of carnelian-perf wrote it, or it was edited" in str(caught.value)) is of_another_version


def test_a_byte_order_mark_is_no_part_of_it(measurement, tmp_path):
    path = tmp_path / "raw.json"
    measurement.write(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as Windows' editors save it
    assert type(measurement).read(path) == measurement


@pytest.mark.parametrize("times_ms", [(34, 56), (5, 200), (30, 31), (2, 9000)])
def test_times_of_a_plot_have_plain_numbers(times_ms):
    axes = Figure().subplots()
    axes.plot((1, 2), times_ms)
    scale_milliseconds(axes)
    low, high = axes.get_ylim()
    labels = [label.get_text() for label in axes.get_yticklabels() if low <= label.get_position()[1] <= high]
    assert len(labels) >= 2
    assert all(float(label) > 0 for label in labels)


def test_a_disk_without_room_is_named_and_loses_nothing(room, tmp_path):
    path = tmp_path / "raw.json"
    path.write_text("old")
    with room(1000), pytest.raises(OSError, match=r"raw\.json could not be .* as it was before: File too large"):
        write(path, {"words": "a" * 10_000})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
