"""The commands of `carnelian-train` for data: `prepare`, `convert`, `validate` and `perturb`."""

from pathlib import Path
from typing import Annotated

import typer

from carnelian_training.command_options import Overrides, folder

prepare = typer.Typer(no_args_is_help=True, help="Fetch a corpus and write its manifests.")


@prepare.callback()
def _prepare() -> None:
    """Keep `librispeech` a subcommand: without a callback, typer would drop the name of an only command."""


@prepare.command()
def librispeech(
    directory: Annotated[Path, typer.Argument(parser=folder, help="Gets LibriSpeech/ and a manifest for each part.")],
    part: Annotated[
        list[str] | None, typer.Option(help="For example train-clean-100; repeatable. All seven by default, 60 GB.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="A mirror of https://www.openslr.org/resources.")] = None,
    jobs: Annotated[int, typer.Option(help="Parts fetched at a time.", min=1)] = 4,
) -> None:
    """Fetch LibriSpeech, check it, unpack it, write manifests; run it again to go on."""
    from carnelian_training.corpora import librispeech

    for manifest in librispeech.prepare(
        directory, part or librispeech.ALL, url=librispeech.URL if url is None else url, jobs=jobs
    ):
        typer.echo(f"wrote {manifest}")


def convert(
    manifest: Annotated[Path, typer.Argument(help="Where to write NeMo JSON lines.")],
    cuts: Annotated[Path | None, typer.Option(help="Lhotse's cuts, for example cuts.jsonl.gz.")] = None,
    recordings: Annotated[Path | None, typer.Option(help="Or Lhotse's recordings...")] = None,
    supervisions: Annotated[Path | None, typer.Option(help="...and supervisions.")] = None,
    lower: Annotated[bool, typer.Option("--lower", help="Put transcripts into lower case.")] = False,
    remove: Annotated[str, typer.Option(help="Characters to take out of transcripts, for example '.,?!'.")] = "",
    labels: Annotated[
        str | None,
        typer.Option(
            help="The recogniser's labels: transcripts get their case and lose the punctuation that they do not have. "
            "One with other characters stays as it is."
        ),
    ] = None,
) -> None:
    """Convert Lhotse's manifests to a NeMo manifest, without copying audio."""
    from dataclasses import replace

    from carnelian_training.corpora.lhotse import clips_of_cuts, clips_of_supervisions
    from carnelian_training.data.manifest import write_manifest
    from carnelian_training.replacement import check_apart
    from carnelian_training.text import to_given_labels

    if labels is not None and (lower or remove):
        raise typer.BadParameter("--labels must come without --lower and --remove: it does both")
    check_apart(manifest, cuts, recordings, supervisions)
    if cuts and not recordings and not supervisions:
        clips = clips_of_cuts(cuts)
    elif recordings and supervisions and not cuts:
        clips = clips_of_supervisions(recordings, supervisions)
    else:
        raise typer.BadParameter("give either --cuts, or --recordings and --supervisions")
    gone = dict.fromkeys(map(ord, remove))

    def text(found: str) -> str:
        if labels is not None:
            return to_given_labels(found, labels) or found
        kept = " ".join(found.translate(gone).split()) if remove else found
        return kept.lower() if lower else kept

    written = [replace(clip, text=text(clip.text)) for clip in clips]
    if not written:
        raise ValueError(f"{cuts or supervisions} must hold a supervision at least, but has none")
    write_manifest(manifest, written)


def perturb(
    manifest: Annotated[Path, typer.Argument(help="NeMo JSON lines.")],
    directory: Annotated[
        Path, typer.Argument(parser=folder, help="Gets manifest.jsonl, with the old clips and the new.")
    ],
    speed: Annotated[list[float], typer.Option(help="1.1 is ten per cent faster and higher; repeatable.")],
) -> None:
    """Write clips at other speeds, for other tools; training does so while it reads (`augment.speed_factors`)."""
    from carnelian_training.corpora.perturb import perturb as write

    typer.echo(f"wrote {write(manifest, directory, speed)}")


def validate(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="CONFIG_OR_MANIFEST...", help="A YAML file: its manifests, labels, limits."),
    ],
    overrides: Overrides = None,
    write: Annotated[bool, typer.Option("--write", help="Write what is left to NAME.clean.jsonl.")] = False,
    min_rate: Annotated[int, typer.Option(help="Hz; files recorded below are reported.", min=0)] = 16_000,
    threads: Annotated[int | None, typer.Option(help="As many as there are cores by default.", min=1, max=1024)] = None,
) -> None:
    """Decode every clip and report those that cannot be used, and why; exit status 1 if there are any."""
    from carnelian_training.data.validate import list_checks
    from carnelian_training.data.validate import validate as run

    is_clean = True
    for check in list_checks(paths, tuple(overrides or ())):
        report = run(check, min_rate_hz=min_rate, num_threads=threads)
        for _, name, words in report.defects:
            typer.echo(f"{name}: {words}" if words else name)
        for words, count in (+report.remarks).items():
            typer.echo(f"{check.manifest}: {count} clips {words}")
        hours = sum(clip.duration for clip in report.clean) / 3600
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.kinds.items()))
        typer.echo(
            f"{check.manifest}: {len(report.clean)} clips without a defect, {hours:.2f} h; defects: {kinds or 'none'}"
        )
        if report.kinds["text"] and check.manifest in paths:
            typer.echo(f"{check.manifest} was judged by the English labels: a YAML file that names it brings its own")
        if write:
            typer.echo(f"wrote {report.write_clean()}")
        is_clean = is_clean and not report.defects
    if not is_clean:
        raise typer.Exit(1)
