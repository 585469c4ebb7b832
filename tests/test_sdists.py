"""What a source distribution packs."""

import subprocess
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; mypy brings it
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
ALWAYS = {"LICENSE", "README.md", "pyproject.toml"}
LEFT_OUT = {"perf": {"results"}}  # megabytes, which the pages of a clone link to


@pytest.mark.parametrize("folder", ["client", "export", "perf", "serving", "training"])
def test_it_packs_what_git_keeps_and_nothing_that_lies_beside(folder):
    """Without a list it packed every file that git does not ignore: a `.env` with keys."""
    listing = ["git", "-C", str(ROOT / folder), "ls-files"]
    tracked = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    wanted = {path.partition("/")[0] for path in tracked} - ALWAYS - LEFT_OUT.get(folder, set())
    assert set(included) == {f"/{name}" for name in wanted}  # from the root: "docs" alone is a folder anywhere
