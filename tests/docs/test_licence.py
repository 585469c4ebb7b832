"""Every wheel and sdist carries the licence, as Apache-2.0 wants it."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_distribution_has_a_copy():
    """Beside `pyproject.toml`, where hatchling takes it from; a link it leaves out of wheels."""
    folders = [path.parent for path in ROOT.glob("*/pyproject.toml")]
    assert len(folders) == 5
    for folder in folders:
        copy = folder / "LICENSE"
        assert copy.is_file(), folder.name
        assert not copy.is_symlink(), folder.name
        assert copy.read_bytes() == (ROOT / "LICENSE").read_bytes(), folder.name
