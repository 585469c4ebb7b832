"""Put a recogniser's folders into a Triton repository: whole or not at all, and never over another release."""

import ast
import fcntl
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from carnelian_training.config import Config
from carnelian_training.interruption import Interruption
from carnelian_training.models.network import CtcNetwork
from carnelian_training.replacement import written
from tritonclient.grpc import model_config_pb2 as pb

from carnelian_export.acoustic import write_acoustic
from carnelian_export.changes import warn_of_changes
from carnelian_export.model_configs import AUDIO_DECODE, SUFFIXES, read_config, to_text
from carnelian_export.stages import VERSION, Decoding, RepositoryError, write_stages
from carnelian_export.target import Target
from carnelian_export.tensorrt_configs import name_cached_engines

logger = logging.getLogger(__name__)

RELEASE_FILES = {"features": "features.json", "ctc": "ctc.json"}
"""The files that say the same in two exports of one release: a server may find one export in place of the other."""


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
    stages = {f"{name}{suffix}" for suffix in SUFFIXES} | ({AUDIO_DECODE} if "decode" in target.tuning else set())
    whole = repository.resolve()
    parent = next(place for place in whole.parents if place.exists())
    beside = not whole.exists() or _can_hold(parent, repository)
    # Another export could replace the model whose folder holds the temporary one, and delete both: they take turns.
    with (
        nullcontext() if beside else _held(repository),
        _scratch(parent if beside else _place_inside(whole, stages)) as staged,
    ):
        with written(repository / name, ", and is as it was before"):
            write_stages(staged, name, config, decoding or Decoding(), target)
            _check_release(repository, staged, name, config)
            acoustic = staged / f"{name}_acoustic"
            configuration = read_config(acoustic / "config.pbtxt")
            difference = write_acoustic(acoustic / VERSION, network, config, target, configuration.max_batch_size)
            if target.provider == "tensorrt":
                name_cached_engines(configuration, (acoustic / VERSION / "model.onnx").read_bytes())
                (acoustic / "config.pbtxt").write_text(to_text(configuration))
            _flush(staged)
        with _held(repository) if beside else nullcontext():
            _check_release(repository, staged, name, config)  # again: another export may have ended meanwhile
            _warn_of_other_features(repository, staged, name)
            if "decode" not in target.tuning and (repository / AUDIO_DECODE).exists():
                _warn_of_kept_decode(repository, staged)
                shutil.rmtree(staged / AUDIO_DECODE)
            folders = sorted(staged.iterdir())
            warn_of_changes(repository, folders)
            with written(repository / name, ", and is as it was before"):
                _put_in_place(repository, folders, staged / "replaced")
    return difference


@contextmanager
def _held(repository: Path) -> Iterator[None]:
    """Make other exports on this machine wait. The folder itself is locked, so that no lock file is left in it."""
    repository.mkdir(parents=True, exist_ok=True)  # only now, so that an export that fails leaves none
    handle = os.open(repository, os.O_RDONLY)
    try:
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.warning("another export writes into %s: waiting until it has ended", repository)
                fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks
            logger.warning("nothing keeps other exports out of %s meanwhile: %s", repository, error.strerror)
        yield
    finally:
        os.close(handle)


@contextmanager
def _scratch(place: Path) -> Iterator[Path]:
    """Make a temporary folder and delete it at the end; warn if another user's files cannot be deleted from it."""
    with written(place):
        scratch = Path(tempfile.mkdtemp("", ".carnelian-export-", place))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if scratch.exists():
            logger.warning("%s is left over, with files that this user may not delete: delete it as theirs", scratch)


def _put_in_place(repository: Path, folders: Sequence[Path], replaced: Path) -> None:
    """Replace all folders or none: moving one may fail, for example because it belongs to another user."""
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
    """Flush all files to the disk: otherwise a power cut could leave empty files under a model's name."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _can_hold(place: Path, repository: Path) -> bool:
    """Try whether a temporary folder can be made in a place, and what is in it be moved into the repository.

    One disk may be mounted twice, and nothing is moved from mount to mount. Triton takes no file for a model.
    """
    try:
        with tempfile.TemporaryDirectory("", ".carnelian-export-", place) as folder:
            Path(folder, "tried").touch()
            Path(folder, "tried").replace(repository / Path(folder).name).unlink()
    except OSError:
        return False
    return True


def _place_inside(repository: Path, stages: set[str]) -> Path:
    """Choose where in the repository to make the temporary folder, if there can be none beside it.

    It is inside if the repository is a mounted volume, or if the folder around it may not be written to. Triton takes
    each folder of a repository for a model, even a hidden one, and starts without any model if one cannot be loaded.
    But in a model's folder it ignores all folders whose name is no number. So the folder of a model that stays is
    chosen, if there is one.
    """
    staying = [path.parent for path in sorted(repository.glob("*/config.pbtxt")) if path.parent.name not in stages]
    return next((place for place in staying if _can_hold(place, repository)), repository)


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


def _check_release(repository: Path, staged: Path, name: str, config: Config) -> None:
    """Refuse an export that would turn a released model into another one."""
    # A setting that an older version did not have was what its default is.
    defaults = {"features": asdict(type(config.features)()), "ctc": {}}
    for stage, file in RELEASE_FILES.items():
        there, new = (root / f"{name}_{stage}" / VERSION / file for root in (repository, staged))
        if not there.parent.exists():
            continue
        wanted, old = json.loads(new.read_text(encoding="utf-8")), _read_json(there)
        found = defaults[stage] | (old or {})
        changed = [key for key in sorted({*found, *wanted}) if found.get(key, ...) != wanted.get(key, ...)]
        if old is None or changed:
            why = "is missing or damaged" if old is None else f"has other values of {', '.join(changed)}"
            raise RepositoryError(
                f"{there} must be what this export would write, for a name keeps its labels and features, but {why}; "
                "choose another --name or --repository, or delete the old model's folders, "
                f"{', '.join(f'{name}{suffix}' for suffix in SUFFIXES)}"
            )
    for new in sorted(staged.iterdir()):
        there = repository / new.name
        if there.exists() and _interface(there) != _interface(new):
            raise RepositoryError(
                f"{there} must be a model as this export would write, with {_interface(new)}, but it has "
                f"{_interface(there)}; choose another --name or --repository"
            )


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return what an export has written; None if the file is missing or damaged."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _warn_of_other_features(repository: Path, staged: Path, name: str) -> None:
    """Warn if another version's program of the features is replaced. Its settings are checked to be the same."""
    there, new = (root / f"{name}_features" / VERSION / "dali.py" for root in (repository, staged))
    if there.exists() and _code(there) != _code(new):
        logger.warning(
            "%s differs from this version's program, which replaces it: features of the same settings, and so "
            "transcripts, may change a little; to have the old ones again, export with the version of carnelian-export "
            "that wrote it",
            there,
        )


def _warn_of_kept_decode(repository: Path, staged: Path) -> None:
    """Warn if an `audio_decode` with another program stays. Tuning and edits change only its configuration."""
    there, new = (root / AUDIO_DECODE / VERSION / "dali.py" for root in (repository, staged))
    if _code(there) != _code(new):
        logger.warning(
            "%s stays as it is, but its program differs from this version's, and may accept files that this one "
            "refuses or fail on files that this one reads: to have this one's, move the folder away and export again, "
            "this model or another one of the repository",
            repository / AUDIO_DECODE,
        )


def _code(program: Path) -> str | None:
    """Return what a program does, without comments, docstrings and line ends; None if it is missing or damaged."""
    try:
        tree = ast.parse(program.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    return ast.dump(_Docless().visit(tree))


class _Docless(ast.NodeTransformer):
    """Drop docstrings, of fields too."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def _interface(model: Path) -> str:
    """Describe the parts of a model's configuration that other models and clients rely on."""
    if not (model / "config.pbtxt").is_file():
        return "no config.pbtxt"
    config = read_config(model / "config.pbtxt")
    tensors = [
        (tensor.name, pb.DataType.Name(tensor.data_type), *tensor.dims) for tensor in (*config.input, *config.output)
    ]
    return f"backend {config.backend or config.platform}, max_batch_size {config.max_batch_size}, tensors {tensors}"
