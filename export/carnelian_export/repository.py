"""A recogniser's folders put into a Triton repository: whole or not at all, and never over another release."""

import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from carnelian_training.config import Config
from carnelian_training.interruption import Interruption
from carnelian_training.models.network import CtcNetwork
from carnelian_training.replacement import written
from tritonclient.grpc import model_config_pb2 as pb

from carnelian_export.acoustic import write_acoustic
from carnelian_export.model_configs import (
    AUDIO_DECODE,
    ENGINE_PREFIX,
    SUFFIXES,
    name_cached_engines,
    read_config,
    to_text,
)
from carnelian_export.stages import CALIBRATION, VERSION, Decoding, RepositoryError, write_stages
from carnelian_export.target import Target

logger = logging.getLogger(__name__)

# What makes two exports the same release: a server that serves one may find the other in its place.
RELEASE_FILES = {"features": ("dali.py", "features.json"), "ctc": ("ctc.json",)}
EDIT = "an edit of config.pbtxt or another version of carnelian-export"
OPTIONS = {
    "language_model": "--lm",
    "neural_language_model": "--neural-lm",
    CALIBRATION: "--calibration",
    **dict.fromkeys(("intra_op_thread_count", "num_threads"), "--tuning"),
    "instance_group": "--tuning, --precision int8 or an edit of config.pbtxt",
    "dynamic_batching": "--tuning or an edit of config.pbtxt",
    **dict.fromkeys(("optimization", "batch_input"), "--execution-provider or an edit of config.pbtxt"),
}
"""What sets a parameter or field of a stage's configuration; of `_ctc`, --option and --lm-weights set the other
parameters."""
SHOWN = 160  # characters of a value; a warm-up has thousands


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
        repository: Made if it is not there. Other models in it stay as they are.
        name: The public ensemble's name.
        config: The network's configuration.
        network: In evaluation mode.
        decoding: Greedy without a language model if None.
        target: Format, precision and provider of the acoustic stage, and the tuning of all; ONNX in float32 if None.
            A tuning of `decode` replaces the `audio_decode` of all models; else one that is there stays.

    Returns:
        How far what was exported is from the network, see :func:`carnelian_export.acoustic.write_acoustic`.

    Raises:
        RepositoryError: The repository is no folder, or a model's own; the name cannot name a model, or is that of a
            model with other labels, features or format; or a language model's file is called as another file of the
            model, or not in ASCII.
        ParityError: What was exported and the network disagree; nothing was written.
        EngineError: TensorRT is not there, or does not build the engine; nothing was written.
        LanguageModelError, NeuralLanguageModelError, OptionError: The decoding does not fit the network's labels;
            nothing was written.
        TargetError: The network is too large for its format in this precision; nothing was written.
        TuningError: A stage has no such setting; nothing was written.
        WriteError: The disk has no room, or a folder that is there may not be moved; nothing was written.
    """
    _check_name(name)
    _check_repository(repository)
    target = target or Target()
    repository.mkdir(parents=True, exist_ok=True)
    stages = {f"{name}{suffix}" for suffix in SUFFIXES} | ({AUDIO_DECODE} if "decode" in target.tuning else set())
    with _scratch(_scratch_place(repository, stages)) as staged:
        with written(repository / name, ", and is as it was before"):
            write_stages(staged, name, config, decoding or Decoding(), target)
            _check_release(repository, staged, name)
            acoustic = staged / f"{name}_acoustic"
            configuration = read_config(acoustic / "config.pbtxt")
            difference = write_acoustic(acoustic / VERSION, network, config, target, configuration.max_batch_size)
            if target.provider == "tensorrt":
                name_cached_engines(configuration, (acoustic / VERSION / "model.onnx").read_bytes())
                (acoustic / "config.pbtxt").write_text(to_text(configuration))
            _flush(staged)
        with _held(repository):
            _check_release(repository, staged, name)  # again: another export may have ended meanwhile
            if "decode" not in target.tuning and (repository / AUDIO_DECODE).exists():
                _warn_of_kept_decode(repository, staged)
                shutil.rmtree(staged / AUDIO_DECODE)
            folders = sorted(staged.iterdir())
            _warn_of_changes(repository, folders)
            with written(repository / name, ", and is as it was before"):
                _put_in_place(repository, folders, staged / "replaced")
    return difference


@contextmanager
def _held(repository: Path) -> Iterator[None]:
    """Have other exports on this machine wait. The folder itself is locked, so that no file is left in it."""
    handle = os.open(repository, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks
            logger.warning("nothing keeps other exports out of %s meanwhile: %s", repository, error.strerror)
        yield
    finally:
        os.close(handle)


@contextmanager
def _scratch(place: Path) -> Iterator[Path]:
    """A folder that goes with this context, also when another user's files came into it with a replaced model."""
    scratch = Path(tempfile.mkdtemp("", ".carnelian-export-", place))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if scratch.exists():
            logger.warning("%s is left over, with files that this user may not delete: delete it as theirs", scratch)


def _put_in_place(repository: Path, folders: Sequence[Path], replaced: Path) -> None:
    """Exchange all folders, or none: another user's may not be moved, for example."""
    replaced.mkdir()
    with Interruption(), ExitStack() as undo:  # a signal would leave a name without its folder; this takes no time
        for folder in folders:
            place, old = repository / folder.name, replaced / folder.name
            if place.exists():
                place.rename(old)
                undo.callback(old.rename, place)
            folder.rename(place)
            undo.callback(place.rename, folder)
        undo.pop_all()


def _flush(folder: Path) -> None:
    """Have the disk hold all files, or a power cut could leave a model's name on empty ones."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _scratch_place(repository: Path, stages: set[str]) -> Path:
    """Beside the repository, where no server looks; inside it if it is a mounted volume, or all that may be written to.

    Folders do not move from one file system to another. Triton takes each folder of a repository for a model, a hidden
    one too, and starts with none of them if that cannot be loaded; but in a model's folder it passes over all that are
    no number. So it is one of these, of a model that stays, where there is one.
    """
    repository = repository.resolve()
    staying = [path.parent for path in sorted(repository.glob("*/config.pbtxt")) if path.parent.name not in stages]
    for place in (repository.parent, *staying):
        if place.stat().st_dev == repository.stat().st_dev and os.access(place, os.W_OK | os.X_OK):
            return place
    return repository


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
    if (repository / "config.pbtxt").exists():
        raise RepositoryError(
            f"a repository must be a folder of models' folders, but {repository} is a model's own: give the folder "
            f"that it is in, {repository.absolute().parent}"
        )


def _check_release(repository: Path, staged: Path, name: str) -> None:
    """Refuse what would change a released model into another one."""
    for stage, files in RELEASE_FILES.items():
        for file in files:
            there, new = (root / f"{name}_{stage}" / VERSION / file for root in (repository, staged))
            if there.parent.exists() and not _same_text(there, new):
                raise RepositoryError(
                    f"{there} must be what this export would write, but differs: it is of a model with other labels or "
                    "features, which a name keeps, or of another version of carnelian-export; choose another --name "
                    "or --repository, or delete the old one"
                )
    for new in sorted(staged.iterdir()):
        there = repository / new.name
        if there.exists() and _interface(there) != _interface(new):
            raise RepositoryError(
                f"{there} must be a model as this export would write, with {_interface(new)}, but it has "
                f"{_interface(there)}; choose another --name or --repository"
            )


def _same_text(there: Path, new: Path) -> bool:
    """Whether the file is there and has these lines; Git on Windows gives them other ends."""
    return there.exists() and there.read_bytes().splitlines() == new.read_bytes().splitlines()


def _warn_of_changes(repository: Path, folders: Sequence[Path]) -> None:
    """Name what folders that will be replaced were deployed with, or edited to, and the new ones have otherwise."""
    changes = []
    for new in folders:
        there = repository / new.name
        if not there.exists():
            continue
        before, after = _settings(there), _settings(new)
        for name in sorted({**before, **after}):
            was, now = before.get(name, "not there"), after.get(name, "not there")
            if was != now:
                is_field = name in pb.ModelConfig.DESCRIPTOR.fields_by_name
                is_option = new.name.endswith("_ctc") and not is_field
                source = OPTIONS.get(name, "--option, --lm-weights" if is_option else EDIT)
                was, now = _shorten(was, now)
                changes.append(f"  {new.name}: {name} was {was}, is {now} (it comes from {source})")
    if changes:
        logger.warning(
            "\n".join(["what is replaced was set up otherwise; each line ends with what sets it:", *changes])
        )


def _warn_of_kept_decode(repository: Path, staged: Path) -> None:
    """Say that an `audio_decode` of another version stays. What is tuned or edited is not its program."""
    there, new = (root / AUDIO_DECODE / VERSION / "dali.py" for root in (repository, staged))
    if not _same_text(there, new):
        logger.warning(
            "%s stays as it is, but its program differs from this version's, and may accept files that this one "
            "refuses or fail on files that this one reads: to have this one's, move the folder away and export again",
            repository / AUDIO_DECODE,
        )


def _settings(model: Path) -> dict[str, str]:
    """What a stage was deployed with, by name: parameters, and the fields that are not part of its interface."""
    config = read_config(model / "config.pbtxt")
    for accelerator in config.optimization.execution_accelerators.gpu_execution_accelerator:
        accelerator.parameters.pop(ENGINE_PREFIX, None)  # it follows from the weights
    found = {name: parameter.string_value or "''" for name, parameter in config.parameters.items()}
    for field, value in config.ListFields():
        if field.name not in ("name", "input", "output", "parameters"):
            found[field.name] = " ".join(str(value).split()) or "{}"
    if (model / VERSION / CALIBRATION).exists():
        found[CALIBRATION] = "there"
    return found


def _shorten(*values: str) -> list[str]:
    """What is shown of values, around the first place where they differ."""
    pairs = enumerate(zip(*values, strict=False))
    differ = next((place for place, pair in pairs if len(set(pair)) > 1), min(map(len, values)))
    start = max(0, differ - SHOWN // 2)
    return [
        f"{'... ' * (start > 0)}{value[start : start + SHOWN]}{' ...' * (start + SHOWN < len(value))}"
        if len(value) > SHOWN
        else value
        for value in values
    ]


def _interface(model: Path) -> str:
    """What other models and clients rely on, in words."""
    if not (model / "config.pbtxt").is_file():
        return "no config.pbtxt"
    config = read_config(model / "config.pbtxt")
    tensors = [
        (tensor.name, pb.DataType.Name(tensor.data_type), *tensor.dims) for tensor in (*config.input, *config.output)
    ]
    return f"backend {config.backend or config.platform}, max_batch_size {config.max_batch_size}, tensors {tensors}"
