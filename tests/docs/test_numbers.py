"""What pages say of the models is what was measured."""

import json
import re
import statistics
from dataclasses import asdict
from pathlib import Path

import pytest
from carnelian_perf.yardsticks.published import choose, read_throughput
from carnelian_training.ctc.options import LIMITS, Options

ROOT = Path(__file__).parents[2]
HELD_OUT = json.loads((ROOT / "perf" / "results" / "quartznet_demo_held_out.json").read_text())["summary"]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def says(page: str, text: str) -> bool:
    """Whether it is on the page, and not as the end of a longer number."""
    return re.search(rf"(?<![-\d.,]){re.escape(text)}", page) is not None


@pytest.mark.parametrize("page", ["README.md", "demo/README.md"])
def test_error_rates_are_those_of_the_evaluation(page):
    rows = re.findall(r"^(.+?) +(\d+) clips +(\d+) words  WER +([\d.]+)%  CER +([\d.]+)%$", read("demo/wer.txt"), re.M)
    assert rows[-1][0] == "all"
    for row in rows:
        assert f"| {' | '.join(row)} |\n" in read(page)


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_gains_of_language_models_are_those_on_other_speakers(page):
    for decoder in ("greedy", "transformer_xl") if page == "CHANGELOG.md" else ("n-gram", "transformer_xl"):
        assert says(read(page), f"{100 * HELD_OUT['wer'][decoder]:.1f} %")


def test_the_cards_intervals_are_those_of_the_raw_file():
    card = read("demo/README.md")
    assert f"| greedy | {100 * HELD_OUT['wer']['greedy']:.2f} | | |\n" in card
    for gain in HELD_OUT["gains"]:
        points, low, high = (f"{100 * gain[part]:.2f}" for part in ("difference", "low", "high"))
        assert f" | {100 * HELD_OUT['wer'][gain['to']]:.2f} | {points} | {low} to {high} |\n" in card


def test_the_table_of_decoders_is_that_of_the_raw_file():
    page = read("training/docs/evaluation.md")
    rows = [json.loads(line) for line in read("perf/results/quartznet_demo_table.jsonl").splitlines()]
    overall = [row for row in rows if row["test_set"] == "dev.jsonl"]
    assert len(overall) == 3
    for row in overall:
        start = f"| dev.jsonl | {row['decoder']} | {row['clips']} | {row['words']} "
        offline, served = (
            " | ".join(f"{100 * row[side][rate]:.2f}" for rate in ("wer", "cer")) for side in ("offline", "served")
        )
        (shown,) = [line for line in page.splitlines() if line.startswith(start)]
        assert f"{start}| {offline} | " in shown
        assert f" | {served} | " in shown[len(start) + len(offline) :]
        assert shown.endswith(f"| {row['same']} of {row['clips']} |")


def test_gains_of_hot_words_are_those_of_the_raw_file():
    rows = json.loads(read("perf/results/quartznet_demo_decoding.json"))["hotwords"]
    found = {(row["decoder"], row["boost"]): row for row in rows}
    for decoder in ("ngram", "beam"):
        before, after = (found[decoder, boost] for boost in (0, 6))
        f1 = f"{before['f1']:.2f} -> {after['f1']:.2f}"
        wer = f"{100 * before['wer_of_others']:.2f} -> {100 * after['wer_of_others']:.2f}"
        assert f"| {decoder} | {f1} | {wer} |\n" in read("training/docs/decoding.md")


def test_the_defaults_of_the_decoders_options_are_those_of_the_code():
    shown = {cells[0].strip("`"): cells[1].strip("`") for cells in rows_of("training/docs/decoding.md", "| option | ")}
    defaults = asdict(Options())
    assert set(shown) == set(defaults) - set(LIMITS)
    words = {(): "none", False: "false"}
    for name, value in shown.items():
        default = defaults[name]
        assert value == (f"{default:g}" if isinstance(default, float) else words.get(default, str(default)))


def test_the_cost_of_int8_is_that_of_the_raw_file():
    found = json.loads(read("perf/results/quartznet_demo_int8.json"))["summary"]
    points, low, high = (f"{100 * found[part]:.2f}" for part in ("difference", "difference_low", "difference_high"))
    page = " ".join(read("export/docs/precision.md").split())
    assert says(page, f"{points} points, 95 % interval {low} to {high}. ")


@pytest.mark.parametrize(
    ("raw", "n_gram", "row"),
    [
        ("english_perplexity", "english.klm", "`english.klm`, 30,000 words | 2.4"),
        ("full_perplexity", "full.klm", "`--prune 0,0,1`, 59,000 words | 6.1"),
    ],
)
def test_perplexities_are_those_of_the_raw_files(raw, n_gram, row):
    models = json.loads(read(f"training/docs/{raw}.json"))["models"]
    starts = {n_gram: row, "transformer_xl_small.pt": "Transformer-XL | 4.9"}
    lines = []
    for model, start in starts.items():
        rates = " | ".join(f"{models[model][words]:.1f}" for words in ("all_words", "known_words"))
        lines.append(f"| {start} | {rates} |\n")
    lines.append(f"| both together | | | **{models['together']['known_words']:.1f}** |\n")
    assert "".join(lines) in read("training/docs/language_models.md")


@pytest.mark.parametrize("machine", ["", "_xeon", "_avx2"])
def test_ratios_of_the_exported_graph_are_those_of_the_raw_files(machine):
    float32, int8 = f"quartznet_15x5{machine}_infer", f"quartznet_15x5{machine}_int8_infer"
    cells = [
        f"[{ratios(float32, 'plain', 'onnx')}](perf/results/{float32}.md)",
        ratios(float32, "onnx_conv1d", "onnx"),
        f"[{ratios(int8, 'onnx_conv1d', 'onnx_int8')}](perf/results/{int8}.md)",
    ]
    assert f" | {' | '.join(cells)} |\n" in read("README.md")


def test_speeds_of_wav2vec2_are_those_of_the_raw_file():
    raw = "wav2vec2_base_960h_infer"
    served, int8 = ratios(raw, "eager", "onnx"), ratios(raw, "onnx", "onnx_int8")
    assert f"as served is {served} times as fast as PyTorch" in " ".join(read("perf/docs/training.md").split())
    assert f"[{int8} times as fast as in float32](../../perf/results/{raw}.md)" in read("export/docs/precision.md")


def ratios(raw: str, baseline: str, engine: str) -> str:
    """How many times as fast an engine is as another, from and to, by CPU time."""
    cpu_ms: dict[str, list[float]] = {baseline: [], engine: []}
    for timing in json.loads(read(f"perf/results/{raw}.json"))["timings"]:
        if timing["engine"] in cpu_ms:
            cpu_ms[timing["engine"]].append(statistics.median(timing["network_cpu_ms"]))
    found = [slow / fast for slow, fast in zip(cpu_ms[baseline], cpu_ms[engine], strict=True)]
    return f"{min(found):.1f} to {max(found):.1f}"


def rows_of(page, heading):
    """The rows of the table whose first row begins so, as cells."""
    lines = read(page).split(f"\n{heading}", 1)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_latencies_of_the_served_network_are_those_of_the_raw_files():
    published = choose("quartznet_15x5", "a100", "fp16")
    rows = rows_of("README.md", "| clip s | batch | p95 ms | ")
    assert rows
    for duration_s, batch, *shown in rows:
        cell = f"quartznet_15x5_fp32_pcm_grpc_{duration_s}s_b{batch}_c1_r1"
        found = json.loads(read(f"perf/results/quartznet_15x5_sweep/{cell}/result.json"))["report"]["latency_ms"]
        audio_s_per_s = 1e3 * int(batch) * float(duration_s) / found["avg"]  # one request at a time
        cells = [f"{value:.0f}" for value in (found["p95"], found["avg"], audio_s_per_s)]
        assert shown == [*cells, f"{published[float(duration_s), int(batch)].avg:.1f}"]


MODELS = {"QuartzNet 15x5": "quartznet_15x5", "Jasper": "jasper_10x5dr"}


def test_latencies_on_a_gpu_are_those_of_the_raw_files():
    rows = rows_of("README.md", "| model | clip s | batch | ")
    assert rows
    for title, duration_s, batch, graphs_fp16, graphs_tf32, eager_fp16, floor, a100 in rows:
        published = choose(MODELS[title], "a100", "fp16")[float(duration_s), int(batch)]
        assert a100 == f"{published.avg:.1f}"
        for precision, engine, shown in (
            ("fp16", "graphs", graphs_fp16),
            ("tf32", "graphs", graphs_tf32),
            ("fp16", "eager", eager_fp16),
        ):
            raw = json.loads(read(f"perf/results/{MODELS[title]}_infer_gpu_{precision}.json"))
            cell = (engine, float(duration_s), int(batch))
            (timing,) = [t for t in raw["timings"] if (t["engine"], t["duration_s"], t["batch"]) == cell]
            assert float(shown) == pytest.approx(statistics.median(timing["network_ms"]), rel=0.005)
            (common,) = [c for c in raw["common"] if (c["duration_s"], c["batch"]) == cell[1:]]
            if precision == "fp16":
                assert float(floor) == pytest.approx(1e3 * common["gflop"] / raw["gflop_per_s"], abs=0.05)


@pytest.mark.parametrize("title", MODELS)
def test_the_latency_that_is_served_on_a_gpu_is_that_of_the_raw_file(title):
    cell = f"{MODELS[title]}_fp16_pcm_grpc_2s_b1_c1_r1"
    found = json.loads(read(f"perf/results/{MODELS[title]}_gpu_sweep/{cell}/result.json"))["report"]["latency_ms"]
    link = f"[{title}](perf/results/{MODELS[title]}_gpu_sweep.md)"
    assert says(" ".join(read("README.md").split()), f"{found['avg']:.1f} ms with {link}")


@pytest.mark.parametrize("title", MODELS)
def test_half_precision_is_never_slower_than_tf32_on_a_gpu(title):
    half, tf32 = (
        {
            (t["duration_s"], t["batch"]): statistics.median(t["network_ms"])
            for t in json.loads(read(f"perf/results/{MODELS[title]}_infer_gpu_{precision}.json"))["timings"]
            if t["engine"] == "graphs"
        }
        for precision in ("fp16", "tf32")
    )
    assert len(half) == len(tf32) == 15
    assert all(half[cell] < tf32[cell] for cell in half)
    assert "fp16 is faster than TF32 in every cell." in " ".join(read("perf/docs/sweeps.md").split())


def test_training_on_a_gpu_is_as_fast_as_its_raw_files_say():
    rows = rows_of("perf/docs/training.md", "| model | batch | TF32 | ")
    assert rows
    for title, batch, *rates, floor, _, a100 in rows:
        for precision, rate in zip(("tf32", "fp16", "bf16"), rates, strict=True):
            found = training_rates(f"{MODELS[title]}_training_gpu", precision, int(batch))
            assert [f"{value:.0f}" for value in found] == ([rate] if rate else [])
        least_s = least_step_s(f"{MODELS[title]}_training_gpu", "fp16", int(batch))
        assert floor == f"{int(batch) / least_s:.0f}"
        published = [
            f"{float(row['throughput']):.1f}"
            for row in read_throughput(MODELS[title])
            if "A100" in row["hardware"] and row["precision"] == "amp"
            if (row["batch_per_gpu"], row["gpus"]) == (batch, "1")
        ]
        assert published == ([a100] if a100 else [])


@pytest.mark.parametrize(
    ("heading", "columns"),
    [
        (
            "| step of QuartzNet 15x5, clips of 7 s",
            [
                ("quartznet_15x5_training", "fp32", 4),
                ("quartznet_15x5_training", "bf16", 4),
                ("quartznet_15x5_batch16_training", "fp32", 16),
            ],
        ),
        (
            "| | 15x5, float32 | 15x5, bf16 | demo model",
            [
                (f"quartznet_{name}_amx_training", precision, 4)
                for name in ("15x5", "demo")
                for precision in ("fp32", "bf16")
            ],
        ),
    ],
)
def test_training_on_a_cpu_takes_as_long_as_its_raw_files_say(heading, columns):
    found = []
    for name, precision, batch in columns:
        plain, ours = (step_cpu_s(name, precision, batch, form) for form in ("Conv1d, eager", "Carnelian"))
        times_s = (plain, ours, least_step_s(name, precision, batch))
        plain_ms, ours_ms, least_ms = (f"{1e3 * time_s:.0f}" for time_s in times_s)
        found.append([plain_ms, ours_ms, f"{plain / ours:.2f}", least_ms])
    shown = [cells[1:] for cells in rows_of("perf/docs/training.md", heading)]
    assert shown == [list(row) for row in zip(*found, strict=True)]


def test_what_the_front_page_says_of_a_training_step_is_that_of_the_raw_file():
    raw = "quartznet_15x5_training"
    ours, half = (step_cpu_s(raw, precision, 4) for precision in ("fp32", "bf16"))
    plain = step_cpu_s(raw, "fp32", 4, "Conv1d, eager")
    assert (
        f"takes {ours:.1f} s of CPU time in float32, {plain / ours:.1f} times less than with plain `Conv1d`, "
        f"and {half:.1f} s in bf16"
    ) in " ".join(read("README.md").split())


def step_results(raw: str, precision: str, batch: int, form: str) -> list[dict[str, list[float]]]:
    """The results of a cell; none if it was not measured."""
    cell = {"form": form, "precision": precision, "batch": batch, "processes": 1}
    return [result for result in json.loads(read(f"perf/results/{raw}.json"))["results"] if result["cell"] == cell]


def step_cpu_s(raw: str, precision: str, batch: int, form: str = "Carnelian") -> float:
    (result,) = step_results(raw, precision, batch, form)
    return statistics.median(result["cpu_s"])


def least_step_s(name: str, precision: str, batch: int) -> float:
    raw = json.loads(read(f"perf/results/{name}.json"))
    (floor,) = [f for f in raw["floors"] if (f["precision"], f["batch"]) == (precision, batch)]
    return max(floor["gflop"] / raw["gflop_per_s"][precision], floor["gbyte"] / raw["gbyte_per_s"])


def training_rates(raw: str, precision: str, batch: int, form: str = "Carnelian") -> list[float]:
    """Clips a second in the median step; nothing if that was not measured."""
    return [batch / statistics.median(result["wall_s"]) for result in step_results(raw, precision, batch, form)]


def training_rate(raw: str, precision: str, batch: int, form: str = "Carnelian") -> float:
    (rate,) = training_rates(raw, precision, batch, form)
    return rate


def test_what_pages_say_of_training_on_a_gpu_is_that_of_the_raw_files():
    page = " ".join(read("perf/docs/training.md").split())
    fit, pretrain = "wav2vec2_base_960h_training_gpu", "wav2vec2_base_training_gpu"
    tuned, untuned = training_rate(fit, "fp16", 16), training_rate(pretrain, "fp16", 16)
    assert says(page, f"{tuned:.0f} utterances a second")
    assert f"and {untuned:.0f} in [pre-training]" in page
    for half, raw in ((tuned, fit), (untuned, pretrain)):
        assert says(page, f"{half / training_rate(raw, 'tf32', 16):.1f} times as many as in TF32")
    steps_ms = [1e3 * batch / training_rate(fit, "fp16", batch) for batch in (8, 16)]
    assert "takes {:.0f} ms, one of 16 clips {:.0f}. ".format(*steps_ms) in page
    forms = json.loads(read("perf/results/wav2vec2_base_hourglass_gpu.json"))["forms"]
    plain, pooled = (statistics.median(form["wall_s"]) for form in forms if form["factor"] in (1, 4))
    assert f"only {plain / pooled:.2f} times as fast" in page
    for precision, low, high in (("fp16", "2.0", "2.2"), ("tf32", "2.9", "3.0")):
        raw = "quartznet_15x5_training_gpu"
        gains = [
            training_rate(raw, precision, batch) / training_rate(raw, precision, batch, "Conv1d, eager")
            for batch in (72, 144)
        ]
        assert [f"{gain:.1f}" for gain in sorted(gains)] == [low, high]
        assert says(page, f"{low} to {high} times")
    rates = [
        training_rate(f"{model}_training_gpu", "fp16", batch)
        for model, batch in (("quartznet_15x5", 144), ("jasper_10x5dr", 64))
    ]
    assert "gets through {:.0f} clips of 16.7 s a second with QuartzNet 15x5, and {:.0f} with Jasper".format(
        *rates
    ) in " ".join(read("README.md").split())


def test_what_a_gpu_waits_for_is_that_of_the_raw_files():
    """Features: a clip is one thread's work, so that of a batch of 16 each of eight threads has two."""
    clips_per_s, alone_ms, batch_ms = {}, [], []
    for title, model in MODELS.items():
        raw = json.loads(read(f"perf/results/{model}_infer_gpu_fp16.json"))
        cell = ("graphs", 16.7, 16)
        (timing,) = [t for t in raw["timings"] if (t["engine"], t["duration_s"], t["batch"]) == cell]
        clips_per_s[title] = round(16e3 / statistics.median(timing["network_ms"]), -2)
        features_ms = {
            common["batch"]: statistics.median(common["features_ms"])
            for common in raw["common"]
            if common["duration_s"] == 16.7
        }
        alone_ms.append(features_ms[1])
        batch_ms.append(features_ms[16])
    page = " ".join(read("helm/carnelian/docs/sizing.md").split())
    jasper, quartznet = clips_per_s["Jasper"], clips_per_s["QuartzNet 15x5"]
    assert says(page, f"{jasper:,.0f} (Jasper) to {quartznet:,.0f} (QuartzNet 15x5) such clips a second")
    alone, beside = statistics.mean(alone_ms), statistics.mean(batch_ms) / 2
    assert says(page, f"{alone:.0f} ms for the features of a clip of 16.7 s, and {beside:.0f} ms beside seven other")
    assert says(page, f"16 such clips in {min(batch_ms):.0f} to {max(batch_ms):.0f} ms")


def test_the_cost_of_cutting_recordings_is_that_of_the_raw_file():
    page, raw = read("client/docs/long.md"), json.loads(read("client/docs/long.json"))
    for row in raw["rows"]:
        assert f"| {row['pieces']} | {row['number']} | {row['greedy']} | {row['ngram']} |\n" in page
    assert says(page, f"{raw['clips']} clips")
    assert says(page, f"{raw['seconds']:.0f} s with {raw['words']:,} words")


def test_the_cost_of_live_audio_is_that_of_the_raw_file():
    page, raw = " ".join(read("client/docs/stream.md").split()), json.loads(read("client/docs/stream.json"))
    for row in raw["rows"]:
        late = f"{row['late_median_s']:.2f} | {row['late_95_s']:.2f}"
        assert statistics.median(row["late_s"]) == pytest.approx(row["late_median_s"], abs=0.001)
        assert f"| {row['decoder']} | {row['mistakes_clips']} | {row['mistakes']} | {late} |" in page
        assert says(page, f"{row['utterances']} utterances with {row['interim']} interim results")
    assert says(page, f"{raw['clips']} clips of strangers with {raw['words']:,} words")
    assert says(page, f"{raw['pause_s']} s of that are the pause")
    assert says(page, f"{100 * raw['client_cores_a_stream']:.0f} % of a core for each")
    many = json.loads(read("client/docs/streams.json"))
    for streams, *measured in (row.values() for row in many["rows"]):
        assert f"| {streams} | {' | '.join(f'{each:.2f}' for each in measured)} |" in page
    assert says(page, f"{many['seconds']} s each")


def test_what_proxies_cost_is_what_was_measured():
    page, raw = read("serving/docs/proxies.md"), json.loads(read("serving/docs/proxies.json"))
    for row in raw["uploads_s"]:
        proxy, window, *seconds = row.values()
        cells = (proxy.replace("haproxy", "HAProxy"), window, *(f"{each:.2f}" for each in seconds))
        assert f"| {' | '.join(cells)} |\n" in page
    for row in raw["events"]:
        counts = " | ".join(f"{row[program]['failed']} of {row[program]['clips']}" for program in ("nginx", "haproxy"))
        assert f"| {row['event']} | {counts} |\n" in page
    assert f"nginx {raw['versions']['nginx']} and HAProxy {raw['versions']['haproxy']} " in page
