"""The commands `synthesise` and `surroundings` of `carnelian-train`."""

from pathlib import Path
from typing import Annotated

import typer

from carnelian_training.command_options import folder


def synthesise(
    out: Annotated[Path, typer.Argument(parser=folder, help="Folder of the corpus: made, or gone on with.")],
    hours: Annotated[float, typer.Option(help="Length of the corpus.")],
    voices: Annotated[
        str | None,
        typer.Option(
            help="Voices or engines, with commas between, of all speakers or of those that a pattern matches: "
            "'flite,espeak:en-gb*'. All that are installed by default."
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="austen, web, wordnet, or a text file; may be repeated. All packaged texts by default."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same corpus; more hours append to it.", min=0)] = 1,
    workers: Annotated[int, typer.Option(help="Processes.")] = 2,
) -> None:
    """Make a training corpus: public-domain sentences read out by every installed voice."""
    from carnelian_training.synthesis.corpus import synthesise as make_corpus

    names = None if voices is None else [name.strip() for name in voices.split(",") if name.strip()]
    clips = make_corpus(out, hours, voices=names, texts=text or None, seed=seed, workers=workers)
    length_h = sum(clip.duration for clip in clips) / 3600
    typer.echo(f"{out / 'manifest.jsonl'}: {len(clips)} clips, {length_h:.2f} hours")


def surroundings(
    directory: Annotated[
        Path, typer.Argument(parser=folder, help="Gets rooms/ and noise/, for `augment` in the configuration.")
    ],
    seed: Annotated[int, typer.Option(help="The same seed, the same sounds.", min=0)] = 1,
    rooms: Annotated[int, typer.Option(help="How many impulse responses.", min=0)] = 200,
    noises: Annotated[int, typer.Option(help="How many noises, half a minute each.", min=0)] = 60,
    babble: Annotated[
        Path | None, typer.Option(help="A manifest at 16 kHz: a third of the noises is its voices.")
    ] = None,
) -> None:
    """Synthesise noises and room impulse responses, to augment training data with."""
    from carnelian_training.data.manifest import read_manifest
    from carnelian_training.synthesis.surroundings import write_surroundings

    if not (rooms or noises):
        raise typer.BadParameter("--rooms or --noises must be above 0, but both are 0: there is nothing to make")
    voices = read_manifest(babble) if babble else []
    if babble and not voices:
        raise typer.BadParameter(f"--babble must name a manifest with clips, but {babble} has none")
    write_surroundings(directory, seed, rooms, noises, voices)
