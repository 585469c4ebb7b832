"""Mixed traffic in an open loop: how many clips a second are answered within a target, and at what padding.

Systems: the repository as it is, with clips as they are; the same with buckets; and a common practice elsewhere: the
client pads each clip to a multiple of 10 s, so that Triton's batcher can join clips and the network computes the
padding. For each system, a closed loop finds the capacity; from there, a bisection finds the highest rate of Poisson
arrivals whose 95th percentile meets the target. Systems take turns, step by step, with the same clips.
"""

import contextlib
import io
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import soundfile
from carnelian_serving.launcher import Server
from tqdm import tqdm
from tritonclient import grpc

from carnelian_perf import raw_file
from carnelian_perf.clips import NUM_CLIPS, SAMPLE_RATE_HZ, SEED, WavClip, encode_clip, shuffle_order, shuffled
from carnelian_perf.launch import quiet_server
from carnelian_perf.machine import measure_busy_cores, measure_cpu_s
from carnelian_perf.stages import await_statistics, read_statistics
from carnelian_perf.traffic.candidates import Candidate, build_variant
from carnelian_perf.traffic.loops import Outcome, draw_arrivals, drive_closed, drive_open
from carnelian_perf.traffic.mixed_results import Measurement, Run, meets

LOGGER = logging.getLogger(__name__)

CLIENT_PADDING_S = 10
CLOSED_LOOP_CLIENTS = 16
HIGHEST_SHARE = 1.4
"""Upper end of the search for a rate, as a share of the closed loop's throughput; the first rate is half of it."""


@dataclass(frozen=True)
class System:
    """A way to serve mixed traffic."""

    name: str
    title: str
    candidate: Candidate
    pads_at_client: bool = False


SYSTEMS = (
    System("shipped", "the repository as it is: ragged batches, clips as they are", "ragged"),
    System("buckets", "buckets of 4, 8, 16, 60 s on the server", "buckets"),
    System(
        "padded",
        "client pads to multiples of 10 s, batches of equal shapes",
        "feature_batch",
        pads_at_client=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a measurement of mixed traffic."""

    repository: Path
    model: str
    padded: onnx.ModelProto
    """The model's network for padded batches."""
    clips: Sequence[WavClip]
    traffic: raw_file.Traffic
    target_ms: float
    """Limit for the 95th percentile of latency, in milliseconds."""
    seconds: float
    """Length of a run in seconds, about; an open loop at a low rate takes longer, so that every clip is sent."""
    steps: int
    """Number of steps of the bisection."""
    rounds: int
    systems: Sequence[System] = SYSTEMS


@dataclass
class _Search:
    """A bisection of the rate."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def narrow(self, *, is_met: bool) -> None:
        """Go on above the middle if the target was met there, else below it."""
        if is_met:
            self.low = self.middle
        else:
            self.high = self.middle


def measure(plan: Plan) -> Iterator[Measurement]:
    """Find each system's capacity and its rate at the target.

    Yields:
        What was measured so far, after each step, in which every system has had its turn.

    Raises:
        ServerError: a variant could not be served.
        LoadError: a request of the closed loop failed, or the server does not count what it answers.
    """
    found = Measurement(
        model=plan.model,
        **raw_file.describe_origin(),
        target_ms=plan.target_ms,
        seconds=plan.seconds,
        traffic=plan.traffic,
        systems={system.name: system.title for system in plan.systems},
        mismatches=[],
        runs=[],
    )
    runs: list[Run] = []
    transcripts: dict[str, dict[int, set[str]]] = {system.name: {} for system in plan.systems}
    clips = {
        system.name: [pad_clip(clip) for clip in plan.clips] if system.pads_at_client else plan.clips
        for system in plan.systems
    }
    total = plan.rounds * len(plan.systems) * (1 + plan.steps)
    with _serve(plan) as servers, tqdm(total=total, desc=Measurement.subject, unit="run", disable=None) as bar:
        for round_number in range(1, plan.rounds + 1):
            searches: dict[str, _Search] = {}
            for step in range(1 + plan.steps):
                for system in shuffled(plan.systems, 100 * round_number + step):
                    search = searches.get(system.name)
                    rate = search.middle if search else None
                    run, outcome = _measure_once(
                        plan, servers[system.name], system, clips[system.name], rate, round_number, step
                    )
                    runs.append(run)
                    for answer in outcome.answers:
                        transcripts[system.name].setdefault(answer.clip, set()).add(answer.transcript)
                    if search is None:
                        searches[system.name] = _Search(0.0, HIGHEST_SHARE * run.clips_per_s)
                    else:
                        search.narrow(is_met=meets(run, plan.target_ms))
                    _log(run)
                    bar.update()
                yield replace(found, mismatches=_find_mismatches(plan, transcripts), runs=list(runs))


def _find_mismatches(plan: Plan, transcripts: Mapping[str, Mapping[int, set[str]]]) -> list[int]:
    """Find the clips that did not get the same transcript in every run.

    Systems whose clients pad are left out: their clips differ, because they end in up to 10 s of silence.
    """
    seen = [transcripts[system.name] for system in plan.systems if not system.pads_at_client]
    return [index for index in range(len(plan.clips)) if len({t for found in seen for t in found.get(index, ())}) > 1]


def pad_clip(clip: WavClip) -> WavClip:
    """Add silence up to a multiple of :data:`CLIENT_PADDING_S`, for servers that batch only clips of equal length."""
    samples, _ = soundfile.read(io.BytesIO(clip.wav), dtype="int16")
    silence = -len(samples) % (CLIENT_PADDING_S * SAMPLE_RATE_HZ)
    return replace(clip, wav=encode_clip(np.pad(samples, (0, silence))).wav)


@contextlib.contextmanager
def _serve(plan: Plan) -> Iterator[dict[str, Server]]:
    with tempfile.TemporaryDirectory(prefix="carnelian-perf-") as folder, contextlib.ExitStack() as stack:
        servers = {}
        for system in plan.systems:
            repository = Path(folder) / system.name
            build_variant(plan.repository, repository, plan.model, system.candidate, 0.0, plan.padded)
            servers[system.name] = stack.enter_context(quiet_server(repository))
        yield servers


def _measure_once(
    plan: Plan,
    server: Server,
    system: System,
    clips: Sequence[WavClip],
    rate: float | None,
    round_number: int,
    step: int,
) -> tuple[Run, Outcome]:
    acoustic = f"{plan.model}_acoustic"
    with grpc.InferenceServerClient(server.grpc_url) as client:
        before = read_statistics(client, acoustic)
        if rate is None:
            warm_up = drive_closed(client, plan.model, clips, range(len(clips)), CLOSED_LOOP_CLIENTS)
            before = await_statistics(client, acoustic, before, len(clips))
        busy, cpu_s = measure_busy_cores(0.5), measure_cpu_s(server.pid)
        if rate is None:
            num_requests = max(round(plan.seconds * len(clips) / warm_up.wall_s), NUM_CLIPS)  # enough for all clients
            order = shuffle_order(num_requests, len(clips), round_number)
            outcome = drive_closed(client, plan.model, clips, order, CLOSED_LOOP_CLIENTS)
        else:
            order = shuffle_order(max(round(rate * plan.seconds), len(clips)), len(clips), round_number)
            due_s = draw_arrivals(rate, len(order), SEED + 100 * round_number + step)
            outcome = drive_open(client, plan.model, clips, order, due_s)
        cpu_s = measure_cpu_s(server.pid) - cpu_s
        statistics = await_statistics(client, acoustic, before, len(outcome.answers)).since(before)
    answered = [clips[answer.clip] for answer in outcome.answers]
    run = Run(
        system=system.name,
        round=round_number,
        rate_per_s=rate,
        others_busy_cores=busy,
        wall_s=outcome.wall_s,
        audio_s=sum(clip.duration_s for clip in answered),
        latencies_s=[round(answer.latency_s, 5) for answer in outcome.answers],
        errors=outcome.errors,
        acoustic_batches=statistics.batches,
        real_frames=sum(clip.frames for clip in answered),
        processed_frames=sum(answer.processed_frames for answer in outcome.answers),
        server_cpu_s=round(cpu_s, 2),
    )
    return run, outcome


def _log(run: Run) -> None:
    kind = "closed loop" if run.rate_per_s is None else f"{run.rate_per_s:.1f} clips/s due"
    percentile = f"p95 {run.percentile_ms(95):.0f} ms" if run.latencies_s else "no answer"
    LOGGER.info(
        "%s, round %d: %s: %.1f answered, %s, %d errors",
        run.system,
        run.round,
        kind,
        run.clips_per_s,
        percentile,
        len(run.errors),
    )
