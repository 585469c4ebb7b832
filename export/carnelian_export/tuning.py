"""How a served model uses its machine: instances and threads of its stages, and how their batches form.

`carnelian-perf tune` measures a tuning and writes it as a JSON file, {stage: {field: value}}; `carnelian-export
--tuning` writes it into the configurations. A field that is not there stays as the export has it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from carnelian_training.config_errors import shown
from carnelian_training.replacement import replaced
from tritonclient.grpc import model_config_pb2 as pb

TUNED_STAGES = ("decode", "features", "acoustic", "ctc")
_THREADS_OF = {"onnxruntime": "intra_op_thread_count", "dali": "num_threads"}
"""Backend -> the parameter that says how many threads an instance has."""

LIMITS = {"instances": (1, 4096), "threads": (0, 4096), "preferred_batch": (0, 4096), "queue_delay_ms": (0, 60_000)}
"""Setting of a stage -> its least and largest value; no machine has more cores, and no request waits longer."""


class TuningError(ValueError):
    """A tuning has an unknown stage or field, or a value that is not allowed; the message names it."""


@dataclass(frozen=True, kw_only=True)
class StageTuning:
    """The settings of one stage that differ from machine to machine; None leaves a setting as it is."""

    instances: int | None = None
    """The number of the stage's model instances."""
    threads: int | None = None
    """The threads of each instance; 0 lets the library choose: one for each core."""
    preferred_batch: int | None = None
    """Triton's `preferred_batch_size`: the batch that the dynamic batcher forms if it can and, without a queue delay,
    does not exceed; 0 for none. `max_batch_size` is part of the model's interface, not a setting."""
    queue_delay_ms: float | None = None
    """The time for which the dynamic batcher waits for more requests, in milliseconds; 0 does not wait."""

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            kind, allowed = ("number", (int, float)) if name == "queue_delay_ms" else ("whole number", (int,))
            if value is not None and not (type(value) in allowed and least <= value <= most):
                raise TuningError(f"`{name}` must be a {kind} from {least} to {most}, but is {shown(value)}")

    def settings(self) -> dict[str, float]:
        """Return the settings that are given, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


Tuning = Mapping[str, StageTuning]
"""The settings of each stage of :data:`TUNED_STAGES`."""


def check_stages(stages: Iterable[str]) -> None:
    """Raise a :class:`TuningError` if a name is not of :data:`TUNED_STAGES`."""
    if unknown := sorted(set(stages) - set(TUNED_STAGES)):
        raise TuningError(f"stages must be of {', '.join(TUNED_STAGES)}, but there is {', '.join(unknown)}")


def read_tuning(path: Path) -> Tuning:
    """Read a file of `carnelian-perf tune`.

    Raises:
        TuningError: The file cannot be read, or is not a tuning.
    """
    known = [field.name for field in fields(StageTuning)]
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        check_stages(content)
        if unknown := sorted({name for stage in content.values() for name in stage} - set(known)):
            raise TuningError(f"settings must be of {', '.join(known)}, but there is {', '.join(unknown)}")
        return {stage: StageTuning(**settings) for stage, settings in content.items()}
    except TuningError as error:
        raise TuningError(f"{path}: {error}") from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TuningError(f"{path} must be JSON as `carnelian-perf tune` writes it, but is not: {error}") from error


def write_tuning(path: Path, tuning: Tuning) -> None:
    """Write a file for `carnelian-export --tuning`, and its folder where that is missing."""
    content = {stage: settings.settings() for stage, settings in tuning.items() if settings.settings()}
    with replaced(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def apply_tuning(config: pb.ModelConfig, tuning: StageTuning) -> None:
    """Change a stage's configuration, in place.

    Raises:
        TuningError: The stage's backend has no such setting, or `preferred_batch` is over its `max_batch_size`.
    """
    if tuning.instances is not None:
        for group in config.instance_group:
            group.count = tuning.instances
    if tuning.threads is not None:
        parameter = _THREADS_OF.get(config.backend)
        if parameter is None:
            raise TuningError(
                f"`threads` must not be set for {config.name}: backend {config.backend} has no such setting"
            )
        if tuning.threads:
            config.parameters[parameter].string_value = str(tuning.threads)
        else:
            config.parameters.pop(parameter, None)
    if tuning.preferred_batch is not None:
        if tuning.preferred_batch > config.max_batch_size:
            raise TuningError(
                f"`preferred_batch` of {config.name} must be at most its max_batch_size, {config.max_batch_size}, "
                f"but is {tuning.preferred_batch}"
            )
        config.dynamic_batching.preferred_batch_size[:] = [tuning.preferred_batch] if tuning.preferred_batch else []
    if tuning.queue_delay_ms is not None:
        config.dynamic_batching.max_queue_delay_microseconds = round(1e3 * tuning.queue_delay_ms)


def describe_tuning(config: pb.ModelConfig) -> StageTuning:
    """Return the settings that a stage's configuration has."""
    parameter = _THREADS_OF.get(config.backend)
    threads = None
    if parameter is not None:
        threads = int(config.parameters[parameter].string_value) if parameter in config.parameters else 0
    batching = config.dynamic_batching
    return StageTuning(
        instances=sum(group.count for group in config.instance_group),
        threads=threads,
        preferred_batch=max(batching.preferred_batch_size, default=0),
        queue_delay_ms=batching.max_queue_delay_microseconds / 1e3,
    )
