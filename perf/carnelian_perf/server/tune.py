"""Finds the settings of a served model that fit a machine, by measuring: coordinate descent on real servers.

In: a model repository and clips. A step tries the values of one knob: each is served on a copy of the repository, all
at the same time, and in rounds they take turns with the best settings so far and the shipped ones. A value is kept if
it is a gain in the median round and in most rounds. At the end, the winner takes turns with the shipped settings once
more.
"""

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from carnelian_export.tuning import StageTuning, apply_tuning, describe_tuning
from carnelian_serving.launcher import Server
from tritonclient import grpc

from carnelian_perf import raw_file
from carnelian_perf.clips import WavClip, shuffle_order, shuffled
from carnelian_perf.launch import quiet_server
from carnelian_perf.load import LoadError, ask_clip, send_all
from carnelian_perf.machine import measure_busy_cores, measure_cpu_s
from carnelian_perf.repository import copy_model, list_stages, read_config, write_config
from carnelian_perf.server.tune_results import (
    CONFIRMATION,
    SHIPPED,
    Measurement,
    Objective,
    Run,
    Settings,
    compare,
    name_settings,
)

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Knob:
    """The values that one step tries for some settings of one stage."""

    name: str
    stage: str
    values: tuple[dict[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a search: what to tune, and for which objective."""

    repository: Path
    model: str
    clips: Sequence[WavClip]
    traffic: raw_file.Traffic
    objective: Objective
    target_ms: float
    """Limit for the 95th percentile of latency in milliseconds, for the objective `throughput`."""
    concurrency: int
    num_requests: int
    """Number of requests in each run."""
    rounds: int
    """Number of rounds in each step; the confirmation has twice as many."""
    knobs: Sequence[Knob]


def list_knobs(objective: Objective, cores: int) -> list[Knob]:
    """List the knobs that matter for an objective, those that matter most first.

    Args:
        objective: For `latency`, only ONNX Runtime's threads matter: one request at a time uses no batch and one
            instance, and one thread of DALI.
        cores: Number of cores that the server may use.
    """
    half = max(1, cores // 2)
    # 0 is the library's own choice: all cores for ONNX Runtime, one for the features' graph.
    acoustic, features = sorted({0, 1, half}), sorted({0, cores})
    if objective == "latency":
        return [Knob("acoustic threads", "acoustic", tuple({"threads": count} for count in acoustic))]
    shares: list[dict[str, float]] = [{"instances": 1, "threads": count} for count in acoustic]
    shares += [{"instances": 2, "threads": 0}, {"instances": 2, "threads": half}, {"instances": cores, "threads": 1}]
    # Threads take a clip of a batch each.
    extracts: list[dict[str, float]] = [{"instances": 1, "threads": count, "preferred_batch": 0} for count in features]
    extracts += [{"instances": 2}]
    return [
        Knob("acoustic instances and threads", "acoustic", tuple(shares)),
        Knob("acoustic batch", "acoustic", tuple({"preferred_batch": size} for size in (0, 1, 2, 4, 8))),
        Knob("acoustic queue delay", "acoustic", tuple({"queue_delay_ms": delay} for delay in (0, 1, 4))),
        Knob("features instances, threads and batch", "features", tuple(extracts)),
        Knob("ctc instances", "ctc", ({"instances": 1}, {"instances": 2})),
        Knob("decode instances", "decode", ({"instances": 2}, {"instances": 4}, {"instances": 8})),
    ]


def measure(plan: Plan) -> Iterator[Measurement]:
    """Search for the best settings, knob by knob.

    Yields:
        What was measured so far, after each step; the last one has the confirmation.

    Raises:
        ServerError: A tuning could not be served.
        LoadError: The best tuning so far or the shipped settings fail, so that there is nothing to compare with.
        ValueError: No knob has another value than the shipped one.
    """
    shipped = read_settings(plan.repository, plan.model)
    found = Measurement(
        model=plan.model,
        **raw_file.describe_origin(),
        objective=plan.objective,
        target_ms=plan.target_ms,
        concurrency=plan.concurrency,
        requests=plan.num_requests,
        traffic=plan.traffic,
        mismatches=[],
        tunings={SHIPPED: {}},
        shipped=shipped,
        kept={},
        runs=[],
    )
    largest = read_config(find_stages(plan.repository, plan.model)["acoustic"]).max_batch_size
    best: Settings = {}
    with _Servers(plan) as servers:
        search = _Search(plan, servers, found)
        for knob in plan.knobs:
            candidates = list_candidates(shipped, best, knob)
            if tried := [one for one in candidates if one.get("acoustic", {}).get("preferred_batch", 0) <= largest]:
                search.take_turns(knob.name, best, tried, plan.rounds)
                best = search.choose(knob.name, best, tried)
                servers.keep([{}, best])
                yield found
        if not found.runs:
            knobs = ", ".join(knob.name for knob in plan.knobs)
            raise ValueError(
                f"{plan.model} must have a setting that can be tuned for {plan.objective}, but its stages have none of "
                f"{knobs}"
            )
        if best:
            search.take_turns(CONFIRMATION, {}, [best], 2 * plan.rounds)
            search.choose(CONFIRMATION, {}, [best])
            yield found


def read_settings(repository: Path, model: str) -> Settings:
    """Read all settings of a recogniser's stages from its repository."""
    folders = find_stages(repository, model)
    return {stage: describe_tuning(read_config(folder)).settings() for stage, folder in folders.items()}


def find_stages(repository: Path, model: str) -> dict[str, Path]:
    """Find the folders of a recogniser's stages: the stage's name in a tuning -> its folder."""
    names = list_stages(repository, model)
    return {name.removeprefix(f"{model}_").removeprefix("audio_"): repository / name for name in names}


def list_candidates(shipped: Settings, best: Settings, knob: Knob) -> list[Settings]:
    """List the tunings that differ from the best one so far in one knob."""
    if knob.stage not in shipped:
        return []
    candidates: list[Settings] = []
    for value in knob.values:
        there = {name: new for name, new in value.items() if name in shipped[knob.stage]}  # TensorRT has no `threads`
        changed = {**best.get(knob.stage, {}), **there}
        different = {name: new for name, new in changed.items() if shipped[knob.stage].get(name) != new}
        settings: Settings = {stage: values for stage, values in {**best, knob.stage: different}.items() if values}
        if settings != best and settings not in candidates:
            candidates.append(settings)
    return candidates


def build_tuned(plan: Plan, target: Path, settings: Settings) -> None:
    """Write a copy of the recogniser with other settings."""
    copy_model(plan.repository, target, plan.model)
    for stage, folder in find_stages(target, plan.model).items():
        if stage in settings:
            config = read_config(folder)
            apply_tuning(config, StageTuning(**settings[stage]))  # type: ignore[arg-type]
            write_config(folder, config)


class _Servers:
    """Servers of tunings, each started when it is first asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._folder = tempfile.TemporaryDirectory(prefix="carnelian-perf-")
        self._running: dict[str, Server] = {}
        self._started = 0

    def __enter__(self) -> "_Servers":
        return self

    def __exit__(self, *_: object) -> None:
        self.keep([])
        self._folder.cleanup()

    def find(self, settings: Settings) -> Server:
        """Return the server of a tuning; start it if it does not run."""
        name = name_settings(settings)
        if name not in self._running:
            self._started += 1
            repository = Path(self._folder.name) / str(self._started)
            build_tuned(self._plan, repository, settings)
            server = quiet_server(repository)
            server.start()
            self._running[name] = server
        return self._running[name]

    def keep(self, tunings: Sequence[Settings]) -> None:
        """Stop all servers but those of these tunings."""
        names = {name_settings(settings) for settings in tunings}
        with contextlib.ExitStack() as stack:
            for name in [name for name in self._running if name not in names]:
                stack.callback(self._running.pop(name).stop)


class _Search:
    """Runs tunings in turns and decides between them; records both in the measurement `found`."""

    def __init__(self, plan: Plan, servers: _Servers, found: Measurement) -> None:
        self._plan = plan
        self._servers = servers
        self._found = found
        self._texts: dict[int, set[str]] = {}

    def take_turns(self, step: str, current: Settings, candidates: Sequence[Settings], rounds: int) -> None:
        """Run candidates, the current tuning and the shipped settings, once in each round, in another order in each.

        Raises:
            LoadError: The current tuning or the shipped settings fail, so that there is nothing to compare with.
        """
        cells = [settings for settings in (current, *candidates) if settings]
        cells.append({})
        self._found.tunings.update({name_settings(settings): settings for settings in cells})
        for settings in cells:  # all of them are up before the first turn
            self._servers.find(settings)
        for round_number in range(1, rounds + 1):
            for settings in shuffled(cells, round_number):
                run, texts = _measure_once(self._plan, self._servers.find(settings), step, settings, round_number)
                self._found.runs.append(run)
                for clip, text in texts:
                    self._texts.setdefault(clip, set()).add(text)
                LOGGER.info("%s, round %d: %s: %s", step, round_number, run.tuning, _say(run))
                if run.error and settings in ({}, current):
                    raise LoadError(f"{run.tuning}, which others are compared with, must answer, but: {run.error}")
        self._found.mismatches[:] = sorted(clip for clip, texts in self._texts.items() if len(texts) > 1)

    def choose(self, step: str, current: Settings, candidates: Sequence[Settings]) -> Settings:
        """Return the candidate that gains most over the current tuning, or the current one if none gains."""
        plan, name = self._plan, name_settings(current)
        best, most = current, 0.0
        for settings in candidates:
            comparison = compare(
                self._found.runs_of(step, name_settings(settings)),
                self._found.runs_of(step, name),
                plan.objective,
                plan.target_ms,
            )
            if comparison.is_gain and comparison.ratio.median > most:
                best, most = settings, comparison.ratio.median
        self._found.kept[step] = name_settings(best)
        LOGGER.info("%s: kept %s", step, self._found.kept[step])
        return best


def _measure_once(
    plan: Plan, server: Server, step: str, settings: Settings, round_number: int
) -> tuple[Run, list[tuple[int, str]]]:
    """Run a tuning once; return the run, and the clip and transcript of each answer."""
    order = shuffle_order(plan.num_requests, len(plan.clips), round_number)
    busy = measure_busy_cores(0.5)

    def send(index: int) -> tuple[int, float, str]:
        result, latency_s = ask_clip(client, plan.model, plan.clips, index, ("TRANSCRIPT",))
        return index, latency_s, result.as_numpy("TRANSCRIPT").item().decode()

    answers: list[tuple[int, float, str]] = []
    wall_s, cpu_s, error = 1.0, 0.0, None
    with grpc.InferenceServerClient(server.grpc_url) as client:
        try:
            send_all(send, order[: 2 * plan.concurrency], plan.concurrency)  # warms up
            before_s = measure_cpu_s(server.pid)
            answers, wall_s = send_all(send, order, plan.concurrency)
            cpu_s = measure_cpu_s(server.pid) - before_s
        except LoadError as failure:
            error = str(failure)
    run = Run(
        step=step,
        tuning=name_settings(settings),
        round=round_number,
        others_busy_cores=busy,
        wall_s=round(wall_s, 5),
        latencies_s=[round(latency_s, 5) for _, latency_s, _ in answers],
        error=error,
        server_cpu_s=round(cpu_s, 2),
    )
    return run, [(clip, text) for clip, _, text in answers]


def _say(run: Run) -> str:
    if run.error:
        return run.error
    return f"{run.clips_per_s:.1f} clips/s, p50 {run.percentile_ms(50):.1f}, p95 {run.percentile_ms(95):.1f} ms"
