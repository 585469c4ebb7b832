"""What pages say of servers is what was measured."""

import itertools
import json
import statistics
from operator import attrgetter
from pathlib import Path

from carnelian_perf.ratio import Ratio
from carnelian_perf.raw_file import Split
from carnelian_perf.server import first_request_results, memory_results, overhead_results
from carnelian_perf.server.overhead_results import ACOUSTIC, FILE, FILE_CLIENTS, IN_PROCESS, PCM, PCM_CLIENTS, STATIC
from carnelian_perf.traffic import batching_results, mixed_results

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "perf" / "results"
DURATIONS_S = (2, 16.7)


def read(page):
    """The text of a page, with a space in the place of each end of a line."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_how_batches_form_is_that_of_the_raw_file():
    measurement = batching_results.Measurement.read(RESULTS / "quartznet_demo_batching.json")
    best = batching_results.choose_best(batching_results.summarise(measurement))
    assert len(best) == 4
    for candidate, found in best.items():
        title = measurement.candidates[candidate]
        p50, p95, _ = (f"{latency:.0f}" for latency in found.latency_ms)
        rate, delay = f"{found.clips_per_s:.1f}", f"{found.queue_delay_ms:g} ms"
        batches = f"{found.batches.mean_size:.1f} | {found.batches.padding_ratio:.2f}"
        assert f"| {title} | {rate} | {p50} | {p95} | {batches} |" in read("README.md")
        cells = f"| {title} | {delay} | {rate} | {p95} | {batches} | {found.cpu_ms_per_clip:.0f} |"
        assert cells in read("perf/docs/batching.md")
    # The last one is that which ships.
    assert f"16 callers | {found.audio_s_per_s:.0f} | {rate} | {p50}, {p95} |" in read("helm/carnelian/docs/sizing.md")


def test_clips_within_a_target_are_those_of_the_raw_files():
    page = read("perf/docs/batching.md")
    models = ("quartznet_15x5", "quartznet_demo", "quartznet_demo_tuned", "quartznet_demo_xeon", "quartznet_demo_avx2")
    for model in models:
        measurement = mixed_results.Measurement.read(RESULTS / f"{model}_mixed.json")
        shipped, _, padded = mixed_results.summarise(measurement)
        shown = page.split(f"results/{model}_mixed.md)")[1].split("|")[1]
        assert shown.strip() == str(Ratio.of(shipped.rates_per_s, padded.rates_per_s))


MACHINES = ("quartznet_15x5", "quartznet_15x5_xeon", "quartznet_15x5_avx2", "quartznet_15x5_amx")


def overhead(model):
    return overhead_results.Measurement.read(RESULTS / f"{model}_overhead.json")


def longer(measurement, than, measure=overhead_results.LATENCY):
    """How much longer files and samples take, in %, for each duration."""
    return [
        f"{100 * (measurement.ratio(way, than, duration_s, measure).median - 1):.0f}"
        for duration_s in DURATIONS_S
        for way in (FILE, PCM)
    ]


def test_what_serving_costs_is_that_of_the_raw_files():
    page = read("perf/docs/server.md")
    for model in MACHINES:
        shown = page.split(f"results/{model}_overhead.md)")[1].split("|")[1:5]
        assert [cell.strip() for cell in shown] == [f"{percent} %" for percent in longer(overhead(model), IN_PROCESS)]
    by_cpu = longer(overhead(MACHINES[0]), IN_PROCESS, overhead_results.CPU)
    assert f"| the same, CPU time | {' | '.join(f'{percent} %' for percent in by_cpu)} |" in page
    told = "the ensembles take {} and {} % longer at 2 s, {} and {} % at 16.7 s."
    assert told.format(*longer(overhead(MACHINES[1]), ACOUSTIC)) in page


def test_what_many_clients_get_is_that_of_the_raw_files():
    page = read("perf/docs/server.md")
    for machine, told in (
        (0, "get {} (samples) and {} (files) of the throughput of batches of 8 at 2 s, and {} and {} at 16.7 s"),
        (3, "get {} and {} at 2 s, {} and {} at 16.7 s"),
    ):
        shares = [
            f"{overhead(MACHINES[machine]).ratio(way, STATIC, duration_s, attrgetter('clips_per_s')).median:.2f}"
            for duration_s in DURATIONS_S
            for way in (PCM_CLIENTS, FILE_CLIENTS)
        ]
        assert told.format(*shares) in page


def test_what_stages_cost_on_other_machines_is_that_of_the_raw_files():
    page = read("perf/docs/server.md")

    def stages_ms(model, duration_s):
        """Of files: decoding and features."""
        runs = overhead(model).runs_of(FILE, duration_s)
        stages = ("audio_decode", "quartznet_15x5_features")
        return [Split.median([run.stages[stage] for run in runs]).infer for stage in stages]

    decode_ms, features_ms = stages_ms(MACHINES[1], 16.7)
    assert f"For 16.7 s, decoding takes {decode_ms:.1f} ms, features {features_ms:.1f} ms" in page
    network, around = [], []
    for duration_s in DURATIONS_S:
        slow, fast = (
            statistics.median(run.latency_ms for run in overhead(model).runs_of(IN_PROCESS, duration_s))
            for model in (MACHINES[2], MACHINES[0])
        )
        network.append(f"{slow / fast:.1f}")
        slow, fast = (sum(stages_ms(model, duration_s)) for model in (MACHINES[2], MACHINES[0]))
        around.append(f"{slow / fast:.1f}")
    assert f"the network takes {network[0]} to {network[1]} times as long as on the first" in page
    assert f"and the stages around it {around[0]} to {around[1]} times" in page
    assert f"Decoding and features of 16.7 s take {sum(stages_ms(MACHINES[2], 16.7)):.1f} ms." in page


def test_first_requests_are_those_of_the_raw_file():
    page = read("perf/docs/server.md")
    measurement = first_request_results.Measurement.read(RESULTS / "quartznet_demo_first_request.json")
    rests_ms = []
    for duration_s in measurement.durations_s():
        found = measurement.summarise([run.client_ms for run in measurement.runs if run.duration_s == duration_s])
        assert f"| {duration_s:g} | {found.over_rested.median:.2f} | {found.over_settled.median:.2f} |" in page
        rests_ms.append(f"{found.rested_ms - found.settled_ms:.0f}")
    assert f"a rest of 2 s adds {rests_ms[0]} ms to a clip of 2 s and {rests_ms[-1]} ms to one of 16.7 s" in page


def test_memory_is_that_of_the_raw_file():
    measurement = memory_results.Measurement.read(RESULTS / "quartznet_demo_memory.json")
    samples = {sample.requests: sample for sample in measurement.samples}
    rest, early, late = (samples[requests].pss / 2**20 for requests in (0, 2_000, 10_000))
    page = read("perf/docs/server.md")
    assert f"AVX-512: {rest:.0f} MiB (PSS of all processes) at rest, {early:.0f} MiB after 2,000 clips" in page
    assert f"and {late:.0f} MiB after 10,000" in page
    slope_kb = memory_results.trend_of(measurement).slope / 1e3
    assert f"the last 8,000 clips added {late - early:.0f} MiB, {slope_kb:.1f} kB a request" in page
    early, late = (samples[requests].processes["tritonserver"].pss / 2**20 for requests in (2_000, 10_000))
    assert f"tritonserver took {late - early:.0f} of them" in page


def test_the_growth_of_memory_is_that_of_the_raw_file():
    samples = json.loads((RESULTS / "quartznet_demo_60000_memory.json").read_text())["samples"]
    unique = [sum(p["uss"] for p in s["processes"].values()) / 2**20 for s in samples if s["requests"] % 10_000 == 0]
    *first, last = (f"{after - before:.1f}" for before, after in itertools.pairwise(unique[1:]))
    page = read("perf/docs/server.md")
    added = f"each 10,000 added {', '.join(first)} and {last} MiB to the unique sets"
    assert f"{added}, of {unique[-1]:.0f} MiB at the end" in page


def test_what_pages_say_of_a_gpus_server_is_that_of_the_raw_files():
    def cell(name):
        path = RESULTS / "jasper_10x5dr_gpu_sweep" / f"jasper_10x5dr_fp16_{name}_r1" / "result.json"
        return json.loads(path.read_text())

    one, eight = (cell(name)["report"] for name in ("pcm_grpc_2s_b1_c1", "pcm_grpc_16.7s_b8_c1"))
    network = [report["stages"]["jasper_10x5dr_acoustic"]["infer"] for report in (one, eight)]
    page = read("perf/docs/sweeps.md")
    assert f"takes {one['latency_ms']['avg']:.1f} ms for one clip of 2 s on average" in page
    assert f"but {eight['latency_ms']['avg']:.0f} ms for 8 clips" in page
    features_ms = eight["stages"]["jasper_10x5dr_features"]["infer"]
    assert f"ONNX Runtime has {network[0]:.0f} " in page
    assert f"it has {network[1]:.0f}, and {features_ms:.0f} are features" in page

    alone, many = cell("file_grpc_2s_b1_c1"), cell("file_grpc_2s_b1_c16")
    rates = [rate for rate, _ in many["report"]["windows"]]
    page = read("export/docs/precision.md")
    assert f"export of Jasper answered {alone['report']['clips_per_s']:.0f} clips a second of a single client" in page
    assert f"and {min(rates):.0f} to {max(rates):.0f} of 16 clients" in page
    raw = json.loads((RESULTS / "jasper_10x5dr_infer_gpu_fp16.json").read_text())["timings"]
    times_ms = {
        t["duration_s"]: statistics.median(t["network_ms"]) for t in raw if (t["engine"], t["batch"]) == ("graphs", 1)
    }
    assert f"takes {times_ms[2]:.1f} ms for 2 s and {times_ms[16.7]:.1f} ms for 16.7 s" in page
