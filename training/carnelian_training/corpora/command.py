"""The commands of `carnelian-train` that deal with data: `validate`."""

from pathlib import Path
from typing import Annotated

import typer


def validate(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="CONFIG_OR_MANIFEST...", help="A YAML file: its manifests, labels, limits."),
    ],
    write: Annotated[bool, typer.Option("--write", help="Write what is left to NAME.clean.jsonl.")] = False,
    min_rate: Annotated[int, typer.Option(help="Hz; files recorded below are reported.")] = 16_000,
    threads: Annotated[int | None, typer.Option(help="As many as there are cores by default.")] = None,
) -> None:
    """Decode every clip and report what cannot be learnt from, and why; exit status 1 if there is any."""
    from carnelian_training.validate import tasks
    from carnelian_training.validate import validate as look

    is_sound = True
    for task in tasks(paths):
        report = look(task, min_rate_hz=min_rate, num_threads=threads)
        for name, words in report.defects:
            typer.echo(f"{name}: {words}" if words else name)
        hours = sum(clip.duration for clip in report.sound) / 3600
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.kinds.items()))
        typer.echo(
            f"{task.manifest}: {len(report.sound)} clips without a defect, {hours:.2f} h; defects: {kinds or 'none'}"
        )
        if write:
            typer.echo(f"wrote {report.write_clean()}")
        is_sound = is_sound and not report.defects
    if not is_sound:
        raise typer.Exit(1)
