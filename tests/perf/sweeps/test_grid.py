import contextlib
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from carnelian_perf.sweeps.grid import GridError, check_files, check_same_subject, list_cells, read_grid
from carnelian_perf.sweeps.target import open_target
from carnelian_perf.yardsticks.published import choose

ROOT = Path(__file__).parents[3]
GRIDS = sorted((ROOT / "perf/grids").glob("*.yaml"))
SMALL = "name: small\nmodels: {quartznet_demo: {}}\n"


def read(tmp_path: Path, text: str):
    path = tmp_path / "grid.yaml"
    path.write_bytes(text.encode("latin-1"))
    return read_grid(path)


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_shipped_grids_are_read_and_have_distinct_cells(path):
    cells = list_cells(read_grid(path))
    assert len({cell.name for cell in cells}) == len(cells) > 0


def test_what_is_swept_on_a_gpu_is_reported_beside_published_rows():
    lines = subprocess.run(["make", "-n", "gpu-serving"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    commands = [shlex.split(line)[1:] for line in lines.splitlines() if "carnelian-perf " in line]
    assert len(commands) == 4
    for sweep, report in zip(commands[::2], commands[1::2], strict=True):
        assert sweep[:1] + report[:1] == ["sweep", "report"]
        (model,) = read_grid(ROOT / sweep[1]).models
        assert sweep[3] == report[1] == f"runs/{model}_gpu_sweep"
        assert report[2:] == ["--published-model", model]
        assert choose(model, "a100", "fp16")


def test_paths_may_begin_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    grid = read(tmp_path, SMALL + "static: {}\nmanifest: ~/clips.jsonl\nrepository: ~/models\n")
    assert (grid.manifest, grid.repository) == (tmp_path / "clips.jsonl", tmp_path / "models")


def test_cells_span_the_axes_and_closed_loops_come_before_their_open_ones(tmp_path):
    grid = read(
        tmp_path,
        SMALL + "durations_s: [2.5, 7]\nprotocols: [grpc, http]\nshared_memory: [none, system]\n"
        "static: {batches: [8, 1]}\nfiles: {concurrency: [4, 1], poisson: [0.9, 0.5]}\nrounds: 3\n",
    )
    cells = list_cells(grid)
    assert len(cells) == 2 * 2 * 2 * (2 + 2 + 2) * 3
    first = [cell.name for cell in cells[:6]]
    assert first == [
        "quartznet_demo_fp32_pcm_grpc_2.5s_b1_c1_r1",
        "quartznet_demo_fp32_pcm_grpc_2.5s_b8_c1_r1",
        "quartznet_demo_fp32_file_grpc_2.5s_b1_c1_r1",
        "quartznet_demo_fp32_file_grpc_2.5s_b1_c4_r1",
        "quartznet_demo_fp32_file_grpc_2.5s_b1_poisson0.5_r1",
        "quartznet_demo_fp32_file_grpc_2.5s_b1_poisson0.9_r1",
    ]
    assert {(cell.input, cell.served_model) for cell in cells} == {
        ("file", "quartznet_demo"),
        ("pcm", "quartznet_demo_pcm"),
    }


def test_a_merged_key_may_be_overridden(tmp_path):
    models = "models: {a: &a {precision: fp16, random_weights: a.yaml}, b: {<<: *a, random_weights: b.yaml}}\n"
    grid = read(tmp_path, f"name: small\n{models}static: {{}}\n")
    assert [(one.precision, one.random_weights.name) for one in grid.models.values()] == [
        ("fp16", "a.yaml"),
        ("fp16", "b.yaml"),
    ]


def test_repeated_values_are_one_cell(tmp_path):
    assert len(list_cells(read(tmp_path, SMALL + "durations_s: [2, 2.0]\nstatic: {batches: [1, 1]}\n"))) == 1


@pytest.mark.parametrize(
    ("more", "differing"),
    [
        ("durations_s: [2, 16.7, 16.700001]\n", "`duration_s` 16.7 and 16.700001"),
        (
            "models: {a: {precision: b_c}, a_b: {precision: c}}\n",
            "`model` a and a_b, `precision` b_c and c",
        ),
    ],
)
def test_cells_that_would_share_a_folder_are_refused(tmp_path, more, differing):
    models = "" if "models" in more else "models: {quartznet_demo: {}}\n"
    with pytest.raises(GridError) as raised:
        list_cells(read(tmp_path, f"name: small\n{models}{more}static: {{}}\n"))
    assert str(raised.value).startswith("cells of a grid must have names of their own, but ")
    assert str(raised.value).endswith(f"_r1 is that of {differing}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SMALL, "grid: at least one of `static` and `files` must be there; `static: {}` takes the defaults"),
        ("name: small\nmodel: {}\nstatic: {}\n", "\n  models: must be given\n  model: unknown key"),
        (SMALL + "static: {}\nduration_s: [2]\n", "duration_s: unknown key, found [2]"),
        (SMALL + "static: {batches: [0]}\n", "static.batches.0"),
        (SMALL + "static: {}\nclips: 100000000000\n", "clips: Input should be less than or equal to 1024"),
        (
            SMALL + "static: {}\nserver: {grpc: 'http://localhost:8001'}\n",
            "server.grpc: must be host:port",
        ),
        (SMALL + "static: {}\nserver: {grpc: '127.0.0.1:abc'}\n", "server.grpc: must be host:port"),
        (SMALL + "static: {}\nserver: {grpc: '127.0.0.1:'}\n", "server.grpc: must be host:port"),
        (SMALL + "static: {}\nserver: {grpc: '127.0.0.1:99999'}\n", "a port of 1 to 65535, found '127.0.0.1:99999'"),
        (SMALL + "static: {}\nserver: {grpc: 'a:0'}\n", "server.grpc: must be host:port"),
        (SMALL + "static: {}\nserver: {grpc: 'a:1', http: 'http://a:65536'}\n", "server.http: must be"),
        (SMALL + "static: {}\ntimeout_s: .inf\n", "timeout_s: Input should be a finite number"),
        (SMALL + "static: {batches: []}\n", "static.batches: List should have at least 1"),
        (SMALL + "static: {}\ndurations_s: [0.01]\n", "greater than or equal to 0.1"),
        ("name: small\nmodels: {a: {precision: fp32/x}}\nstatic: {}\n", "models.a.precision"),
        (SMALL + "static: {}\ndurations_s: [61]\n", "less than or equal to 60"),
        (SMALL + "static: {}\nprotocols: [carrier pigeon]\n", "protocols.0"),
        (SMALL + "static: {}\nprotocols: [http]\nserver: {grpc: 'a:1'}\n", "server.http"),
        (SMALL + "files: {concurrency: [], poisson: [0.5]}\n", "files.concurrency"),
        ("name: small\nmodels: {a: {random_weights: a.yaml}, b: {}}\nstatic: {}\n", "one repository"),
        ("name: small\nmodels: {a: {random_weights: a.yaml, precision: int8}}\nstatic: {}\n", "must be fp32 or fp16"),
        (
            "name: small\nmodels: {a: {random_weights: a.yaml}}\nserver: {grpc: 'a:1'}\nstatic: {}\n",
            "`server` must not be given where `models` have `random_weights`",
        ),
        ("name: small\nmodels: {a: {execution_provider: cuda}}\nstatic: {}\n", "must come with `random_weights`"),
        ("name: small\nmodels: {}\nstatic: {}\n", "models"),
        ("name: small\nmodels: {'': {}}\nstatic: {}\n", "models"),
        ("name: small\nmodels: {a/b: {}}\nstatic: {}\n", "models.a/b"),
        ("name: small\nmodels: {A b: {}}\nstatic: {}\n", "models.A b"),
        (SMALL + "static: {}\nrounds: true\n", "rounds: Input should be a valid integer, found True"),
        (SMALL + "static: {}\nrounds: 2.0\n", "rounds: Input should be a valid integer, found 2.0"),
        (SMALL + "static: {}\nrequests: '16'\n", "requests: Input should be a valid integer, found '16'"),
        (SMALL + "static: {}\ndurations_s: [2, yes]\n", "durations_s.1: Input should be a valid number, found True"),
        (SMALL + "static: {}\ntimeout_s: '60'\n", "timeout_s: Input should be a valid number, found '60'"),
        (SMALL + "static: {}\nmanifest: 1\n", "manifest: Input is not a valid path"),
        (SMALL + "static: {}\nrounds: 1\nrounds: 2\n", "a key must come once, but `rounds` does not"),
        (SMALL + "static: {batches: [1], batches: [2]}\n", "`batches` does not\n  in "),
        (SMALL + "static: {}\nrounds: 2026-99-99\n", "must be YAML, but is not: a value is no timestamp: month must"),
        (SMALL + "static: !!timestamp x\n", "must be YAML, but is not: a value is no timestamp: "),
        pytest.param(f"name: 0x{'f' * 5000}\n", "line 1, column 7", id="many digits"),
        (SMALL + "static: !!bool x\n", "must be YAML, but is not: a value is no bool: "),
        ('name: "\\U00110000"\n', "must be YAML"),
        ('name: "\\UFFFFFFFF"\n', "must be YAML"),
        ("[" * 10_000, "must be YAML"),
        ("- a list\n", "must be a grid"),
        ("name: [", "must be YAML"),
        ("name: größe\n", "must be YAML"),
    ],
)
def test_what_is_no_grid_is_named(tmp_path, text, words):
    with pytest.raises(GridError) as raised:
        read(tmp_path, text)
    assert words in str(raised.value)
    assert "grid.yaml" in str(raised.value)


def test_nested_aliases_that_stand_for_billions_of_values_are_named(tmp_path):
    lines = ["x0: &a0 [x]"]
    lines += [f"x{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    with pytest.raises(GridError, match="x9: unknown key"):
        read(tmp_path, "\n".join(lines))


def test_a_manifest_that_no_one_named_is_told_to_be_the_default(tmp_path, monkeypatch):
    grid = read(tmp_path, SMALL + "static: {}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GridError, match=r"manifest\.jsonl \(the default, .*\); name one with `manifest:`$"):
        check_files(grid)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("manifest", SMALL + "manifest: nowhere.jsonl\n"),
        ("repository", SMALL + "manifest: grid.yaml\nrepository: nowhere\n"),
        ("models.a.random_weights", "name: b\nmanifest: grid.yaml\nmodels: {a: {random_weights: nowhere.yaml}}\n"),
    ],
)
def test_what_a_grid_names_must_be_there(tmp_path, monkeypatch, key, text):
    grid = read(tmp_path, text + "static: {}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GridError, match=rf"`{key}` of the grid must be .* {tmp_path}/nowhere[^ ]*$"):
        check_files(grid)


@pytest.mark.parametrize(
    "of",
    [
        "models: {a: {}}\nserver: {grpc: 'a:1', http: 'http://a:2'}\nprotocols: [http]\n",
        "models: {a: {random_weights: grid.yaml}}\n",
    ],
)
def test_only_what_is_served_from_a_repository_needs_one(tmp_path, monkeypatch, of):
    manifest = ROOT / "demo/clips/manifest.jsonl"
    grid = read(tmp_path, f"name: small\n{of}manifest: {manifest}\nrepository: nowhere\nstatic: {{}}\n")
    monkeypatch.chdir(tmp_path)
    check_files(grid)


def test_a_clip_of_the_manifest_must_be_there(tmp_path, monkeypatch, write_rows):
    write_rows(tmp_path / "clips.jsonl", [{"audio_filepath": "gone.wav", "duration": 1}])
    grid = read(tmp_path, SMALL + "manifest: clips.jsonl\nrepository: .\nstatic: {}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^clips\.jsonl must name sound files .* gone\.wav cannot be: No such file"):
        check_files(grid)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("static: {batches: [1, 2]}\nfiles: {}\nrequests: 5\ndurations_s: [2]\n", None),
        ("static: {}\nclips: 3\n", "`clips` of the grid must be as it was .*, 16, but is 3"),
        ("static: {}\nmanifest: other.jsonl\n", "`manifest` .* but is other.jsonl"),
        ("static: {}\nserver: {grpc: 'a:1'}\n", "`server` .*, None, but is .*a:1"),
    ],
)
def test_results_of_another_server_or_of_other_clips_are_not_continued(tmp_path, more, words):
    earlier = read(tmp_path, SMALL + "static: {}\n")
    now = read(tmp_path, SMALL + more)
    with pytest.raises(GridError, match=words) if words else contextlib.nullcontext():
        check_same_subject(now, earlier)


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ("models: {a: {}}\nserver: {grpc: 'a:1'}\nrepository: x\n", "models: {a: {}}\nserver: {grpc: 'a:1'}\n"),
        ("models: {a: {random_weights: a.yaml}}\nrepository: x\n", "models: {a: {random_weights: a.yaml}}\n"),
        (
            "models: {a: {random_weights: a.yaml}, b: {random_weights: b.yaml}}\n",
            "models: {a: {random_weights: a.yaml}}\n",
        ),
    ],
)
def test_results_are_continued_whatever_else_there_was_that_is_not_measured(tmp_path, earlier, now):
    before, after = (read(tmp_path, f"name: small\nstatic: {{}}\n{text}") for text in (earlier, now))
    check_same_subject(after, before)


def test_results_of_another_graph_are_not_continued(tmp_path):
    models = "name: small\nmodels: {a: {random_weights: a.yaml%s}}\nstatic: {}\n"
    earlier, now = (read(tmp_path, models % more) for more in ("", ", execution_provider: cuda"))
    with pytest.raises(GridError, match=r"`models\.a\.execution_provider` .*, None, but is cuda"):
        check_same_subject(now, earlier)


def test_random_weights_are_exported_as_the_grid_says(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr("carnelian_perf.networks.export_random", lambda _, *rest: found.append(rest))
    server = SimpleNamespace(grpc_url="localhost:1", http_url="localhost:2", pid=1)
    monkeypatch.setattr("carnelian_perf.launch.quiet_server", lambda _: contextlib.nullcontext(server))
    models = "{a: {random_weights: a.yaml, precision: fp16}, b: {random_weights: b.yaml, execution_provider: cuda}}"
    with open_target(read(tmp_path, f"name: small\nmodels: {models}\nstatic: {{}}\n"), tmp_path):
        assert found == [("a", Path("a.yaml"), "fp16", None), ("b", Path("b.yaml"), "fp32", "cuda")]
