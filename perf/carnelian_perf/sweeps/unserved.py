"""The speed of a sweep's models without a server, from raw files of `carnelian-perf infer`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from carnelian_perf.inference.results import AS_SERVED, Measurement, sum_up_served
from carnelian_perf.options import PRECISIONS
from carnelian_perf.pages import rendering
from carnelian_perf.raw_file import MACHINE, RawFileError, as_text
from carnelian_perf.sweeps.results import Result


@dataclass(frozen=True)
class Unserved:
    """The speed of a model without a server."""

    how: str = ""
    """How it was measured, in words: precision, threads, and the network or device if it is another one."""
    median_ms: Mapping[tuple[float, int], float] = field(default_factory=dict)
    """(duration, batch) -> median milliseconds of features, network and decoding; may be empty."""


def read_unserved(inference: Iterable[tuple[str | None, Path]], results: Sequence[Result]) -> dict[str, Unserved]:
    """Read raw files of `carnelian-perf infer`, see :func:`report.write_report`: model of the sweep -> its speed.

    Raises:
        RawFileError: A file is not such a raw file, is of no model of the sweep, of another precision or machine, or is
            the second one of a model.
    """
    models = sorted({result.cell.model for result in results})
    found: dict[str, Unserved] = {}
    for name, raw in inference:
        measurement = Measurement.read(raw)
        model = name or measurement.model
        if model not in models:
            raise RawFileError(
                f"{raw} must be of a model of the sweep, {', '.join(models)}, but is of {model}: run `carnelian-perf "
                f"infer` on one of them, or name the one that it is of, as in --infer {models[0]}={raw}"
            )
        if model in found:
            raise RawFileError(f"--infer must have one file for each model, but {raw} is another of {model}")
        with rendering(raw):
            _check_machine(raw, measurement, results)
            found[model] = _sum_up(raw, measurement, model, results)
    return found


def _check_machine(raw: Path, measurement: Measurement, results: Iterable[Result]) -> None:
    used = str(measurement.machine["accelerator"])
    for machine in [result.machine for result in results]:
        for key in MACHINE:
            # A sweep names all GPUs that there are, `infer` the one that it used.
            is_among = key == "accelerator" and (used == "none" or used in str(machine[key]))
            if measurement.machine[key] != machine[key] and not is_among:
                raise RawFileError(
                    f"{raw} must be of the sweep's machine, whose {key} is {machine[key]}, but is of "
                    f"{measurement.machine[key]}: run `carnelian-perf infer` there"
                )


def _sum_up(raw: Path, measurement: Measurement, model: str, results: Sequence[Result]) -> Unserved:
    precision = " and ".join(sorted({result.cell.precision for result in results if result.cell.model == model}))
    measured = measurement.plan.precision
    engine = "onnx_int8" if precision == "int8" else AS_SERVED
    if precision in PRECISIONS and precision != measured:  # others are free text
        raise RawFileError(
            f"{raw} must be in {model}'s precision in the sweep, {precision}, but is in {measured}: run "
            "`carnelian-perf infer` with that --precision, or name another model, MODEL=RAW"
        )
    if not (median_ms := sum_up_served(measurement, engine)):
        raise RawFileError(
            f"{raw} must have the engine that is served, {engine}, but has {', '.join(measurement.titles)}: "
            f"run `carnelian-perf infer` with --engines {engine}"
        )
    way = f"{measured if engine == AS_SERVED else precision}, {measurement.say_threads()}"
    if measurement.model != model:
        way = f"of {measurement.model}, {way}"
    used = measurement.machine["accelerator"]
    if any(result.machine["accelerator"] != used for result in results):
        way += ", on the CPU" if used == "none" else f", on {used}"
    return Unserved(as_text(way), median_ms)
