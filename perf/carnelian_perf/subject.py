"""What commands measure: the clips, and the recogniser in its repository; heavy modules are imported when needed."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from carnelian_perf.options import DEMO_MANIFEST, check_file

if TYPE_CHECKING:
    from carnelian_perf.clips import WavClip
    from carnelian_perf.raw_file import Traffic


def check_manifest(manifest: Path) -> None:
    """Refuse a manifest that is not there, or a clip of which cannot be opened."""
    check_file("--manifest", manifest)
    from carnelian_perf.clips import check_clips

    check_clips(manifest)


def check_model_and_clips(repository: Path, model: str, manifest: Path | None) -> None:
    """Refuse a recogniser, a manifest or a clip that is not there."""
    from carnelian_perf.repository import WrongModelError, check_model

    check_manifest(manifest or DEMO_MANIFEST)
    try:
        check_model(repository, model)
    except WrongModelError as error:
        raise typer.BadParameter(str(error)) from error


def choose_clips(manifest: Path | None) -> tuple[list["WavClip"], "Traffic"]:
    """Load the clips to send and describe them: those of a manifest or, by default, the demo's."""
    from carnelian_perf.clips import cut_clips, load_clips
    from carnelian_perf.raw_file import Traffic

    clips = load_clips(manifest) if manifest else cut_clips(DEMO_MANIFEST)
    source = f"those of {manifest}" if manifest else f"{DEMO_MANIFEST}, joined and cut to log-normal durations"
    return clips, Traffic.of(source, (clip.duration_s for clip in clips))


def served_name(model: str, random_weights: Path | None) -> str:
    """Name the recogniser under test: the given one, or the YAML's whose random weights are exported."""
    return random_weights.stem if random_weights else model


@contextlib.contextmanager
def served_repository(
    repository: Path, model: str, random_weights: Path | None, manifest: Path | None
) -> Iterator[tuple[Path, str]]:
    """Yield the repository and the recogniser under test: the given ones, or an export with random weights.

    Files that do not exist are refused first, the manifest and its clips included, because an export takes minutes.
    """
    if random_weights is None:
        check_model_and_clips(repository, model, manifest)
        yield repository, model
        return
    check_manifest(manifest or DEMO_MANIFEST)
    from carnelian_perf.networks import export_random

    with tempfile.TemporaryDirectory(prefix="carnelian-perf-") as scratch:
        exported, name = Path(scratch) / "models", served_name(model, random_weights)
        export_random(exported, name, random_weights)
        yield exported, name
