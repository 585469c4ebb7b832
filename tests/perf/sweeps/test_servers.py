"""Servers that end, stand still, are replaced, or stand behind one address, while a sweep measures them."""

import itertools
import os
import re
import signal

import pytest
from carnelian_perf.accuracy.served import measure as measure_accuracy
from carnelian_perf.cuts import cut_equal
from carnelian_perf.launch import quiet_server
from carnelian_perf.load import LoadError
from carnelian_perf.stages import is_one_server
from carnelian_perf.sweeps import perf_analyzer
from carnelian_perf.sweeps.grid import GridError
from carnelian_perf.sweeps.perf_analyzer import PerfAnalyzerError
from carnelian_perf.sweeps.results import RESULT, read_results
from carnelian_perf.sweeps.run import run_grid
from carnelian_perf.sweeps.target import Target
from carnelian_perf.sweeps.transcripts import transcribe_file
from tritonclient import grpc


@pytest.fixture(scope="module")
def another(shipped):
    with quiet_server(shipped) as server:
        yield server


@pytest.mark.usefixtures("program")
def test_server_that_ends_in_a_cell_leaves_it_to_be_measured(make_grid, tmp_path, monkeypatch):
    def end(*_):
        monkeypatch.setattr(grpc.InferenceServerClient, "get_model_config", refuse)
        raise PerfAnalyzerError("perf_analyzer ended with 99")

    def refuse(*_, **__):
        raise grpc.InferenceServerException("failed to connect to all addresses")

    monkeypatch.setattr(perf_analyzer, "run", end)
    with pytest.raises(RuntimeError, match=r"the server at .* must answer.*failed to connect"):
        run_grid(make_grid(static={"batches": [1]}), tmp_path)
    assert not list(tmp_path.glob(f"*/{RESULT}"))


@pytest.mark.usefixtures("program")
def test_server_that_stands_still_ends_the_sweep(make_grid, another, tmp_path, monkeypatch):
    def stop(*_):
        os.kill(another.pid, signal.SIGSTOP)
        raise PerfAnalyzerError("perf_analyzer must end within `timeout_s`, 600 s")

    monkeypatch.setattr("carnelian_perf.sweeps.target.REQUEST_TIMEOUT_S", 10)
    monkeypatch.setattr(perf_analyzer, "run", stop)
    try:
        with pytest.raises(RuntimeError, match=f"the server at {another.grpc_url} must answer .*: Deadline Exceeded"):
            run_grid(make_grid(server={"grpc": another.grpc_url}, static={"batches": [1]}), tmp_path)
    finally:
        os.kill(another.pid, signal.SIGCONT)
    assert not list(tmp_path.glob(f"*/{RESULT}"))


@pytest.mark.usefixtures("program")
def test_stage_that_dies_ends_the_sweep(make_grid, shipped, tmp_path, monkeypatch, stubs_of):
    def kill(*given):
        if acoustic := stubs_of(server).get("quartznet_demo_acoustic_0_0"):
            acoustic.kill()
        return run(*given)

    run = perf_analyzer.run
    monkeypatch.setattr("carnelian_perf.sweeps.measure.RECOVERY_S", 1)
    monkeypatch.setattr(perf_analyzer, "run", kill)
    with quiet_server(shipped) as server:
        grid = make_grid(server={"grpc": server.grpc_url}, static={"batches": [1, 2]})
        with pytest.raises(RuntimeError, match=r"before .*_b1_c1_r1, which failed .* not healthy.*; start it") as error:
            run_grid(grid, tmp_path)
    (failed,) = read_results(tmp_path)
    assert failed.reason.startswith("perf_analyzer ended with")
    assert f"failed ({failed.reason}), but does not: " in str(error.value)


@pytest.mark.usefixtures("program")
def test_full_queue_after_a_failed_cell_is_waited_for(make_grid, tmp_path, monkeypatch):
    def overload(*_):
        refusals.extend([LoadError("Exceeds maximum queue size")] * 2)
        raise PerfAnalyzerError("perf_analyzer ended with 99")

    def transcribe(*given):
        if refusals:
            raise refusals.pop()
        return transcribe_file(*given)

    refusals = []
    monkeypatch.setattr("carnelian_perf.sweeps.measure.transcribe_file", transcribe)
    monkeypatch.setattr(perf_analyzer, "run", overload)
    (result,) = run_grid(make_grid(static={"batches": [1]}), tmp_path)
    assert (result.reason, refusals) == ("perf_analyzer ended with 99", [])


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("cached", ["quartznet_demo_acoustic", "quartznet_demo_pcm"])
def test_server_that_caches_answers_is_refused(make_grid, tmp_path, monkeypatch, cached):
    def tell(client, model, **_):
        answer = get_config(client, model)
        answer.config.response_cache.enable = model == cached
        return answer

    get_config = grpc.InferenceServerClient.get_model_config
    monkeypatch.setattr(grpc.InferenceServerClient, "get_model_config", tell)
    monkeypatch.setattr("carnelian_perf.sweeps.target.measure_accuracy", None)  # which takes minutes: not before
    with pytest.raises(RuntimeError, match=f"{cached} must compute every answer, but has `response_cache` enabled"):
        run_grid(make_grid(static={"batches": [1]}), tmp_path)
    assert not list(tmp_path.glob(f"*/{RESULT}"))


@pytest.fixture
def replaced(monkeypatch) -> list[bool]:
    """The acoustic stage has another version as soon as this is not empty."""

    def tell(client, model, **_):
        answer = get_metadata(client, model)
        answer.versions[:] = ["2" if replaced and model == "quartznet_demo_acoustic" else "1"]
        return answer

    replaced = []
    get_metadata = grpc.InferenceServerClient.get_model_metadata
    monkeypatch.setattr(grpc.InferenceServerClient, "get_model_metadata", tell)
    return replaced


@pytest.mark.usefixtures("program")
def test_model_that_is_replaced_ends_the_sweep(make_grid, replaced, tmp_path, monkeypatch):
    """And the next one does not go on with it."""

    def replace(*_):
        replaced.append(True)
        raise PerfAnalyzerError("perf_analyzer ended with 99")

    (result,) = run_grid(make_grid(static={"batches": [1]}), tmp_path)
    assert result.status == "stable"
    with monkeypatch.context() as patch:
        patch.setattr(perf_analyzer, "run", replace)
        with pytest.raises(RuntimeError, match="must be served as it was when the sweep began, but has another"):
            run_grid(make_grid(static={"batches": [1, 2]}), tmp_path)
    assert len(list(tmp_path.glob(f"*/{RESULT}"))) == 1
    for batches in ([1, 2], [1]):  # with a cell to measure, and with none
        with pytest.raises(GridError, match="configuration of quartznet_demo must be as it was"):
            run_grid(make_grid(static={"batches": batches}), tmp_path)


@pytest.mark.usefixtures("program")
def test_model_that_is_replaced_before_the_first_cell_ends_the_sweep(make_grid, replaced, tmp_path, monkeypatch):
    """It had its predecessor's error rates."""

    def measure_and_replace(*given):
        found = measure_accuracy(*given)
        replaced.append(True)
        return found

    monkeypatch.setattr("carnelian_perf.sweeps.target.measure_accuracy", measure_and_replace)
    with pytest.raises(RuntimeError, match="must be served as it was when the sweep began, but has another"):
        run_grid(make_grid(static={"batches": [1]}), tmp_path)
    assert not list(tmp_path.glob(f"*/{RESULT}"))


@pytest.mark.usefixtures("program")
def test_cell_after_which_the_server_ends_is_kept(make_grid, tmp_path, monkeypatch):
    def end(*given, **options):
        patch.setattr(grpc.InferenceServerClient, "get_model_config", refuse)
        return run(*given, **options)

    def refuse(*_, **__):
        raise grpc.InferenceServerException("failed to connect to all addresses")

    run = perf_analyzer.run
    with monkeypatch.context() as patch:
        patch.setattr(perf_analyzer, "run", end)
        with pytest.raises(RuntimeError, match=r"the server at .* must answer.*failed to connect"):
            run_grid(make_grid(static={"batches": [1]}), tmp_path)
    assert [result.status for result in read_results(tmp_path)] == ["stable"]


@pytest.mark.parametrize("counts", [[(7, 1), (6, 1)], [(7, 1), (7, 2)], [(0, 0), (7, 1), (0, 0)]])
def test_several_servers_behind_one_address_are_told_from_one(server, monkeypatch, counts, manifest):
    client = grpc.InferenceServerClient(server.grpc_url)
    (cut,) = cut_equal(manifest, 0.5, 1, "flac")
    transcribe_file(client, "quartznet_demo", cut)
    assert is_one_server(server.grpc_url, "quartznet_demo")
    answer = client.get_inference_statistics("quartznet_demo")
    client.close()

    def tell(*_, **__):
        (stage,) = answer.model_stats
        stage.inference_stats.success.count, stage.last_inference = next(turns)
        return answer

    turns = itertools.cycle(counts)
    monkeypatch.setattr(grpc.InferenceServerClient, "get_inference_statistics", tell)
    assert not is_one_server(server.grpc_url, "quartznet_demo")


@pytest.mark.usefixtures("program")
def test_what_one_of_several_servers_counts_is_not_kept(make_grid, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("carnelian_perf.sweeps.run.is_one_server", lambda *_: False)
    (result,) = run_grid(make_grid(files={}), tmp_path)
    assert "Several servers answered at one address: " in caplog.text
    assert (result.one_server, result.batches, result.report.stages) == (False, {}, None)
    assert result.clips_per_s > 0


@pytest.mark.usefixtures("program")
def test_wrong_http_endpoint_is_named_before_anything_is_measured(make_grid, server, tmp_path):
    metrics = re.sub("http://|/metrics", "", server.metrics_url)  # it answers any path
    for wrong in ("127.0.0.1:9", server.grpc_url, metrics, "nowhere.invalid:1"):
        grid = make_grid(server={"grpc": server.grpc_url, "http": wrong}, protocols=["http"], static={})
        with pytest.raises(RuntimeError, match=f"`server.http` of the grid must be .*, but {wrong} does not"):
            run_grid(grid, tmp_path)
    assert not list(tmp_path.glob(f"*/{RESULT}"))


@pytest.mark.usefixtures("program")
def test_cell_that_another_server_answers_over_http_fails(make_grid, server, another, tmp_path):
    addresses = {"grpc": server.grpc_url, "http": another.http_url}
    one, two = run_grid(make_grid(server=addresses, protocols=["grpc", "http"], static={"batches": [2]}), tmp_path)
    assert one.status == "stable"
    assert (two.status, two.batches) == ("failed", {})
    both = f"{another.http_url} answered .* clips, and {server.grpc_url} counted 0; name both endpoints of one server"
    assert re.search(both, two.reason)


def test_server_that_the_sweep_starts_need_not_be_started_again():
    with grpc.InferenceServerClient("127.0.0.1:9") as client:
        target = Target(client=client, urls={"grpc": "127.0.0.1:9"}, pid=os.getpid())
        with pytest.raises(RuntimeError, match="; run the same command again: cells that are done"):
            target.ask(client.is_server_ready)


@pytest.mark.usefixtures("program")
def test_address_that_does_not_answer_over_grpc_is_named(make_grid, server, tmp_path):
    for wrong in ("127.0.0.1:9", server.http_url):
        with pytest.raises(
            RuntimeError, match=f"the server at {wrong} must answer `[a-z_]+` over gRPC, but: .* loaded, then"
        ):
            run_grid(make_grid(server={"grpc": wrong}, static={}), tmp_path)
