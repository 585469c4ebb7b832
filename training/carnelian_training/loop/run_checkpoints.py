"""The checkpoints in a run's folder: write them, remove old ones, find the newest and resume it."""

import fnmatch
import glob
import logging
import math
import time
from pathlib import Path
from typing import Any

from carnelian_training import checkpoint
from carnelian_training.config_errors import ConfigError
from carnelian_training.config_tree import config_to_dict, flat
from carnelian_training.loop.state import PARTS, State
from carnelian_training.replacement import remove_partials
from carnelian_training.run_config import OF_TRAINING, SIZES_OF_PRETRAINING, RunConfig
from carnelian_training.weight_files import CheckpointError

logger = logging.getLogger(__name__)

STEP_SUFFIX = f"-{'[0-9]' * 8}.pt"  # pattern for `glob`: what follows the run's name in a checkpoint's name
# Keys that a resumed run may not change, because weights or optimiser state would not fit or would mean something else.
FIXED = (
    *("model.*", "labels.*", "features.*", "text.*", "optimizer.name", "init.stage_lr_decay"),
    *SIZES_OF_PRETRAINING,
)
# Keys that match `FIXED` but may change.
FREE = (
    *(f"model.*{word}" for word in OF_TRAINING),
    *("text.context_share", "text.device_streams"),
)


def write_checkpoint(state: State, config: RunConfig, directory: Path) -> None:
    """Write a checkpoint and remove old ones except milestones; every process has to call it.

    Partial files that a killed run left are removed too.
    """
    memory = state.whole_memory()
    state.saved_at = time.monotonic()
    state.milestones.update(config.loop.milestones)
    if not state.process.leads:
        return

    def path(step: int) -> Path:
        return directory / f"{config.name}-{step:08d}.pt"

    state.save(path(state.step), config, memory)
    # Checkpoints of later steps are left alone and not counted: the run did not resume them, so they are damaged.
    until_now = [found for found in checkpoints(directory, config) if found <= path(state.step)]
    milestones = set(map(path, state.milestones))
    for old in until_now[: -config.loop.keep_last]:
        if old not in milestones:
            old.unlink()
    remove_partials(directory, *(f"{glob.escape(config.name)}{suffix}" for suffix in (STEP_SUFFIX, ".pt", ".png")))


def resume(state: State, config: RunConfig, directory: Path) -> bool:
    """Restore `state` from the newest checkpoint of `directory` that can be resumed; return False if there is none.

    Raises:
        CheckpointError: There are checkpoints, but none can be resumed.
        ConfigError: Keys of the configuration have changed that may not; the message lists each.
    """
    found = newest(directory, config) if state.process.leads else None
    name = state.process.broadcast("" if found is None else found[0].name)
    if not name:
        return False
    path = directory / name
    before, content = checkpoint.load(path) if found is None else found[1:]
    check_resumable(before, config, path)
    state.restore(content)
    if config.init.checkpoint not in (None, before.init.checkpoint):
        logger.warning(
            "`init.checkpoint` changes nothing in a run that is under way: to start from it, take another --out"
        )
    logger.info("resuming %s at step %d", path, state.step)
    best = directory / f"{config.name}.pt"
    if state.process.leads and state.evaluated_step and not _is_whole(best):
        state.best_error = math.inf
        logger.warning(
            "%s is gone or damaged: the best weights are chosen anew, from the next evaluation on; until then, publish "
            "or export the checkpoint",
            best,
        )
    return True


def check_resumable(before: RunConfig, now: RunConfig, path: Path) -> None:
    """Check that a checkpoint's run may go on with the configuration `now`; log what has changed.

    Raises:
        ConfigError: Keys have changed that may not (`FIXED`, except `FREE`); the message lists each.
    """
    before_pretrains, now_pretrains = (getattr(config, "pretraining", None) is not None for config in (before, now))
    if before_pretrains != now_pretrains:
        raise ConfigError(
            f"{path} cannot be resumed, for `pretraining` may not {'go' if before_pretrains else 'come'}: take another "
            "--out, and `init.checkpoint` to start from these weights"
        )
    old, new = flat(config_to_dict(before)), flat(config_to_dict(now))
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    lines = {key: f"  {key}: {old.get(key)!r} -> {new.get(key)!r}" for key in changed}
    wrong = [key for key in changed if _matches(key, FIXED) and not _matches(key, FREE)]
    if wrong:
        advice = "take another --out, and `init.checkpoint` to start from these weights"
        message = f"{path} cannot be resumed, for these may not change ({advice}):"
        raise ConfigError("\n".join([message, *(lines[key] for key in wrong)]))
    if changed:
        logger.warning("\n".join(["the configuration has changed since the checkpoint:", *lines.values()]))


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(key, pattern) for pattern in patterns)


def newest(directory: Path, config: RunConfig) -> tuple[Path, RunConfig, dict[str, Any]] | None:
    """Return the newest checkpoint that can be resumed, with its configuration and its whole content.

    It is None if there are none; those that cannot be resumed are logged.

    Raises:
        CheckpointError: There are checkpoints, but none can be resumed.
        ConfigError: The folder holds only checkpoints of another run, or best weights under this run's name without
            a checkpoint; a new run would overwrite its files.
    """
    saved = checkpoints(directory, config)
    others = sorted(directory.glob(f"[!.]*{STEP_SUFFIX}"))  # a dot begins the partial file of a killed run
    if others and not saved:
        raise ConfigError(
            f"{directory} must be the folder of one run, but {others[-1].name} is not one of `{config.name}`: "
            "take another --out, or that `name` to resume it"
        )
    best = directory / f"{config.name}.pt"
    if best.exists() and not saved:
        raise ConfigError(
            f"{best} would be replaced, for there is no checkpoint beside it to go on from: take another --out or "
            "another `name`, or move it away"
        )
    for path in reversed(saved):
        try:
            before, content = checkpoint.load(path)
            if not content.get("training"):
                raise CheckpointError(f"{path} must hold the state of a run to be resumed, but has weights alone")
            if missing := [part for part in PARTS if part not in content["training"]]:
                raise CheckpointError(
                    f"{path} must hold the whole state of a run, but lacks {', '.join(missing)}: it is of another "
                    "version"
                )
        except CheckpointError as error:
            logger.warning("%s%s", error, "" if path == saved[0] else "\nfalling back to the checkpoint before it")
            continue
        return path, before, content
    if saved:
        whole = next(filter(_is_whole, (best, *reversed(saved))), None)
        advice = (
            f"take another --out, and `init.checkpoint={whole}` to start from its weights; a run of another version "
            "goes on with that version"
            if whole
            else "to start anew, remove them"
        )
        raise CheckpointError(f"none of {len(saved)} checkpoints in {directory} can be resumed; {advice}")
    return None


def _is_whole(path: Path) -> bool:
    try:
        checkpoint.load(path)
    except (CheckpointError, ConfigError):
        return False
    return True


def checkpoints(directory: Path, config: RunConfig) -> list[Path]:
    """List the checkpoints of a run by step, oldest first, without the best weights (`<name>.pt`)."""
    return sorted(directory.glob(f"{glob.escape(config.name)}{STEP_SUFFIX}"))
