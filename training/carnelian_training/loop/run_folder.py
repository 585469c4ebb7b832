"""The folder of a run, which one run works in at a time."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from carnelian_training.config_errors import ConfigError
from carnelian_training.config_tree import config_to_dict
from carnelian_training.replacement import replaced
from carnelian_training.run_config import RunConfig

logger = logging.getLogger(__name__)


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep other runs out of a folder, which is made, and goes again if nothing was written.

    The system lets others in if this process is killed.

    Raises:
        ConfigError: Another run is in there.
    """
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{directory} must be the folder of one run, but another one works in it: wait for that, or take "
                "another --out"
            ) from None
        except OSError as error:  # a file system without locks
            logger.warning("nothing keeps other runs out of %s: %s", directory, error.strerror)
        yield
    finally:
        os.close(handle)
        if is_new and not any(directory.iterdir()):
            directory.rmdir()


def write_config(config: RunConfig, directory: Path, source: Path | None) -> None:
    """Write the resolved configuration as `<name>.yaml`, unless that is `source`, the file that it was read from."""
    target = directory / f"{config.name}.yaml"
    if source is None or source.resolve() != target.resolve():
        resolved = yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)
        with replaced(target) as partial:
            partial.write_text(resolved, encoding="utf-8")
