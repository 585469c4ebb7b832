"""Keep a released model's promises: refuse an export that would make it another one; warn of other programs."""

import ast
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from carnelian_training.config import Config
from tritonclient.grpc import model_config_pb2 as pb

from carnelian_export.model_configs import AUDIO_DECODE, SUFFIXES, read_config
from carnelian_export.stages import VERSION, RepositoryError

logger = logging.getLogger(__name__)

RELEASE_FILES = {"features": "features.json", "ctc": "ctc.json"}
"""The files that say the same in two exports of one release: a server may find one export in place of the other."""


def check_release(repository: Path, staged: Path, name: str, config: Config) -> None:
    """Refuse an export that would turn a released model into another one."""
    # A setting that an older version did not have was what its default is.
    defaults = {"features": asdict(type(config.features)()), "ctc": {}}
    for stage, file in RELEASE_FILES.items():
        there, new = (root / f"{name}_{stage}" / VERSION / file for root in (repository, staged))
        if not there.parent.exists():
            continue
        wanted, old = json.loads(new.read_text(encoding="utf-8")), _read_json(there)
        found = defaults[stage] | (old or {})
        if stage == "ctc":
            found.pop("name", None)  # which older versions wrote
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


def warn_of_other_programs(repository: Path, staged: Path, name: str, *, keeps_decode: bool) -> None:
    """Warn if another version's program of the features is replaced, or an `audio_decode` with another program stays.

    The features' settings are checked to be the same. Tuning and edits change only the configuration of decoding.
    """
    features, decode = (Path(model, VERSION, "dali.py") for model in (f"{name}_features", AUDIO_DECODE))
    if (repository / features).exists() and _code(repository / features) != _code(staged / features):
        logger.warning(
            "%s differs from this version's program, which replaces it: features of the same settings, and so "
            "transcripts, may change a little; to have the old ones again, export with the version of carnelian-export "
            "that wrote it",
            repository / features,
        )
    if keeps_decode and _code(repository / decode) != _code(staged / decode):
        logger.warning(
            "%s stays as it is, but its program differs from this version's, and may accept files that this one "
            "refuses or fail on files that this one reads: to have this one's, move the folder away and export again, "
            "this model or another one of the repository",
            repository / AUDIO_DECODE,
        )


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return what an export has written; None if the file is missing or damaged."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


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
