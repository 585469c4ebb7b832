"""Warn of settings that an export changes in the folders that it replaces, and say what sets each of them."""

import logging
from collections.abc import Sequence
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from carnelian_export.model_configs import read_config
from carnelian_export.stages import CALIBRATION, VERSION
from carnelian_export.tensorrt_configs import ENGINE_PREFIX

logger = logging.getLogger(__name__)

EDIT = "an edit of config.pbtxt or another version of carnelian-export"
OPTIONS = {
    "language_model": "--lm",
    "neural_language_model": "--neural-lm",
    CALIBRATION: "--calibration",
    "intra_op_thread_count": "--tuning",
    "num_threads": f"--tuning, {EDIT}",
    **dict.fromkeys(("instance_group", "dynamic_batching"), "--tuning or an edit of config.pbtxt"),
}
"""The command-line options that set each parameter or field of a stage's configuration. The other parameters of `_ctc`
are set by --option and --lm-weights."""
OPTIONS_OF_STAGES = {
    "acoustic": {
        "instance_group": "--tuning, --precision int8 or an edit of config.pbtxt",
        **dict.fromkeys(("optimization", "batch_input"), "--execution-provider or an edit of config.pbtxt"),
        "model_warmup": f"--execution-provider, {EDIT}",
    },
    # GPUs wait for it.
    "features": dict.fromkeys(
        ("num_threads", "dynamic_batching", "model_warmup"), f"--precision, --execution-provider, --tuning, {EDIT}"
    ),
}
"""Those of one stage."""
SHOWN = 160  # the most characters of a value in a message; a warm-up has thousands


def warn_of_changes(repository: Path, folders: Sequence[Path]) -> None:
    """Warn of settings of folders that will be replaced, by options or by edits, that differ in the new folders."""
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
                options = OPTIONS | OPTIONS_OF_STAGES.get(new.name.rpartition("_")[2], {})
                source = options.get(name, "--option, --lm-weights" if is_option else EDIT)
                was, now = _shorten(was, now)
                changes.append(f"  {new.name}: {name} was {was}, is {now} (it comes from {source})")
    if changes:
        logger.warning(
            "\n".join(["what is replaced was set up otherwise; each line ends with what sets it:", *changes])
        )


def _settings(model: Path) -> dict[str, str]:
    """Return a stage's settings by name: its parameters, and the fields that are not part of its interface."""
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
    """Cut long values to the part that a message shows, around the first place where they differ."""
    pairs = enumerate(zip(*values, strict=False))
    differ = next((place for place, pair in pairs if len(set(pair)) > 1), min(map(len, values)))
    start = max(0, differ - SHOWN // 2)
    return [
        f"{'... ' * (start > 0)}{value[start : start + SHOWN]}{' ...' * (start + SHOWN < len(value))}"
        if len(value) > SHOWN
        else value
        for value in values
    ]
