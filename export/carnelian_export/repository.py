"""Put a recogniser's folders into a Triton repository: whole or not at all, and never over another release."""

import re
from pathlib import Path

from carnelian_training.config import Config
from carnelian_training.models.network import CtcNetwork
from carnelian_training.replacement import written

from carnelian_export.acoustic import write_acoustic
from carnelian_export.changes import warn_of_changes
from carnelian_export.model_configs import AUDIO_DECODE, SUFFIXES, read_config, to_text
from carnelian_export.release import check_release, warn_of_other_programs
from carnelian_export.stages import VERSION, Decoding, RepositoryError, write_stages
from carnelian_export.staging import find_place, flush, held, put_in_place, scratch
from carnelian_export.target import Target
from carnelian_export.tensorrt_configs import name_cached_engines


def write_model(
    repository: Path,
    name: str,
    config: Config,
    network: CtcNetwork,
    decoding: Decoding | None = None,
    target: Target | None = None,
) -> float:
    """Export a network and write its folders; a folder is there whole or not at all.

    Folders of an earlier export with this name are replaced, version 1 by version 1: an ensemble calls the
    version that its stages' configurations choose, so beside a second version an old one calls new stages.

    Args:
        repository: The folder that tritonserver loads, made if it does not exist. Other models in it stay as they are.
        name: The public ensemble's name.
        config: The network's configuration.
        network: In evaluation mode.
        decoding: How the model decodes by default; greedily, without a language model, if None.
        target: Format, precision and provider of the acoustic stage, and the tuning of all; ONNX in float32 if None.
            A tuning of `decode` replaces the `audio_decode` of all models; without one, an existing one stays.

    Returns:
        The difference between the export and the network, see :func:`carnelian_export.acoustic.write_acoustic`.

    Raises:
        RepositoryError: The repository is no folder, a model's own, or `/`; the name cannot name a model, or is that of
            a model with other labels, features or format; or a language model's file is damaged, has the name of
            another file of the model, or has a name that is not ASCII.
        ParityError: The export and the network disagree; nothing was written.
        EngineError: TensorRT is not installed, or does not build the engine; nothing was written.
        LanguageModelError, NeuralLanguageModelError, OptionError: The decoding does not fit the network's labels;
            nothing was written.
        TargetError: The network is too large for its format in this precision; nothing was written.
        TuningError: A stage has no such setting, or must not have this value; nothing was written.
        TypeError: The network is of a class, or has blocks, that cannot be exported; nothing was written.
        ValueError: The network is in training mode; nothing was written.
        WriteError: The disk has no room, or an existing folder may not be moved; nothing was written.
    """
    _check_name(name)
    _check_repository(repository)
    target = target or Target()
    replaced = {f"{name}{suffix}" for suffix in SUFFIXES} | ({AUDIO_DECODE} if "decode" in target.tuning else set())
    with (
        held(repository),
        scratch(find_place(repository, replaced)) as staged,
        written(repository / name, ", and is as it was before"),
    ):
        write_stages(staged, name, config, decoding or Decoding(), target)
        check_release(repository, staged, name, config)
        acoustic = staged / f"{name}_acoustic"
        configuration = read_config(acoustic / "config.pbtxt")
        difference = write_acoustic(acoustic / VERSION, network, config, target, configuration.max_batch_size)
        if target.provider == "tensorrt":
            name_cached_engines(configuration, (acoustic / VERSION / "model.onnx").read_bytes())
            (acoustic / "config.pbtxt").write_text(to_text(configuration))
        flush(staged)
        # New ensembles come after their stages: without these Triton would not start. An `audio_decode` that is
        # there stays, unless it is tuned.
        staged_folders = sorted(staged.iterdir(), key=lambda new: (new.name in (name, f"{name}_pcm"), new.name))
        folders = [new for new in staged_folders if new.name in replaced or not (repository / new.name).exists()]
        warn_of_other_programs(repository, staged, name, keeps_decode=staged / AUDIO_DECODE not in folders)
        warn_of_changes(repository, folders)
        put_in_place(repository, folders, staged / "replaced")
    return difference


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise RepositoryError(f"a model's name must be of lower-case letters, digits and underscores, but is {name!r}")
    if name == AUDIO_DECODE or any(suffix and name.endswith(suffix) for suffix in SUFFIXES):
        taken = ", ".join(f"*{suffix}" for suffix in SUFFIXES if suffix)
        raise RepositoryError(
            f"a model's name must not be {AUDIO_DECODE} or {taken}, its stages' names, but is {name!r}"
        )


def _check_repository(repository: Path) -> None:
    if repository.exists() and not repository.is_dir():
        raise RepositoryError(f"a repository must be a folder of models' folders, but {repository} is no folder")
    if repository.resolve() == Path("/"):
        raise RepositoryError(
            f"a repository must be a folder of models' folders, but {repository} is the root of all files, of which "
            "Triton would take every folder for a model: give a folder in it"
        )
    if (repository / "config.pbtxt").exists():
        raise RepositoryError(
            f"a repository must be a folder of models' folders, but {repository} is a model's own: give the folder "
            f"that it is in, {repository.absolute().parent}"
        )
