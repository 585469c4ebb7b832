"""The folder of a run: a lock that keeps other runs out, and the resolved configuration."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from carnelian_training.config_tree import config_to_dict
from carnelian_training.lock import locked
from carnelian_training.replacement import write_text, written
from carnelian_training.run_config import RunConfig

LOCK = ".lock"


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Create a folder and keep other runs out of it; remove a folder that is new if nothing was written.

    Raises:
        ValueError: Another run works in the folder.
        WriteError: The folder cannot be created or written to.
    """
    is_new = not directory.exists()
    with written(directory):
        directory.mkdir(parents=True, exist_ok=True)
    refusal = (
        f"{directory} must be the folder of one run, but another one works in it: wait for that, or take another --out"
    )
    with locked(directory / LOCK, refusal):
        try:
            yield
        finally:
            if is_new and [path.name for path in directory.iterdir()] == [LOCK]:
                with suppress(OSError):  # another run has just taken the folder
                    (directory / LOCK).unlink()
                    directory.rmdir()


def write_config(config: RunConfig, directory: Path, source: Path | None) -> None:
    """Write the resolved configuration as `<name>.yaml`, unless that is the file `source` that it was read from."""
    target = directory / f"{config.name}.yaml"
    if source is None or source.resolve() != target.resolve():
        write_text(target, yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True))
