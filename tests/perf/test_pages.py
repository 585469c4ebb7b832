"""Every committed page is what its committed raw file says, by the public command."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from carnelian_perf.cli import main

ROOT = Path(__file__).parents[2]
RESULTS = Path("perf/results")
RAW_FILES = [path for path in sorted((ROOT / RESULTS).glob("*.json")) if path.with_suffix(".md").is_file()]
SWEEPS = sorted(path for path in (ROOT / RESULTS).glob("*_sweep") if path.is_dir())
ONE_OF_EACH = {path.stem.rpartition("_")[2]: path for path in RAW_FILES}.values()
PUBLISHED = re.compile(r"--published-\S+ \S+")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command line in a folder that has a copy of the raw files."""
    monkeypatch.chdir(tmp_path)
    RESULTS.mkdir(parents=True)

    def call(command: str, status: int = 0) -> None:
        monkeypatch.setattr("sys.argv", shlex.split(command))
        with pytest.raises(SystemExit) as done:
            main()
        assert (done.value.code or 0) == status

    return call


@pytest.mark.parametrize("path", RAW_FILES, ids=lambda path: path.stem)
def test_page_is_what_its_raw_file_says(path, run):
    content = json.loads(path.read_text())
    content = content.get("facts", content)
    shutil.copy(path, RESULTS)
    options = " ".join(PUBLISHED.findall(content["command"]))  # of `infer`, which older raw files do not hold apart
    run(f"carnelian-perf {content['subject']} --render {RESULTS / path.name} {options}")
    page = RESULTS / f"{path.stem}.md"
    assert (ROOT / page).read_text() == page.read_text()


@pytest.mark.parametrize("path", ONE_OF_EACH, ids=lambda path: path.stem)
def test_page_that_a_full_disk_has_no_room_for_stays_as_it_was(path, run, room):
    content = json.loads(path.read_text())
    shutil.copy(path, RESULTS)
    page = RESULTS / f"{path.stem}.md"
    page.write_text("old")
    with room(500):
        run(f"carnelian-perf {content.get('facts', content)['subject']} --render {RESULTS / path.name}", status=1)
    assert page.read_text() == "old"


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name)
def test_report_is_what_its_sweep_says(path, run):
    shutil.copytree(ROOT / RESULTS, RESULTS, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.md", "*.html"))
    page = RESULTS / f"{path.name}.md"
    committed = (ROOT / page).read_text()
    (command,) = re.findall(r"This page: `(.*)`", committed)
    run(command)
    assert page.read_text() == committed
    assert page.with_suffix(".html").is_file()
