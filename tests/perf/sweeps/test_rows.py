"""The rounds of a sweep's cells, put together."""

import dataclasses

import pytest
from carnelian_perf.sweeps.report import render_page, render_split
from carnelian_perf.sweeps.rows import make_rows


def test_time_of_client_and_network_that_is_less_than_nothing_is_not_shown(static_cell, make_result, read_row):
    result = make_result(static_cell, 40.0)
    (row,) = make_rows([result])
    assert row.client_ms == 2.0
    (row,) = make_rows([dataclasses.replace(result, report=dataclasses.replace(result.report, client_ms={}))])
    assert row.client_ms is None
    assert read_row(render_split([row]), "2", "batch 1")[2] == "-"


def test_rounds_of_two_machines_are_refused(static_cell, make_result):
    one, two = (make_result(dataclasses.replace(static_cell, round=number), 40.0) for number in (1, 2))
    kernel = two.machine | {"system": "a newer kernel"}
    assert len(make_rows([one, dataclasses.replace(two, machine=kernel, versions={"onnx": "1.0"})])) == 1
    for change in ({"machine": two.machine | {"cpu": "another"}}, {"versions": {"tritonserver": "another"}}):
        with pytest.raises(ValueError, match=r"rounds of a cell must be alike in .*_r1 has .* and .*_r2 has another"):
            make_rows([one, dataclasses.replace(two, **change)])


def test_results_of_another_model_of_that_name_are_refused(static_cell, file_cell, make_result):
    one = make_result(static_cell, 40.0)
    for cell in (dataclasses.replace(static_cell, round=2), dataclasses.replace(static_cell, batch=8), file_cell):
        two = make_result(cell, 40.0)
        assert make_rows([one, dataclasses.replace(two, configuration="known")])
        for change in (
            {"backend": "tensorrt"},
            {"accuracy": {}},
            {"speech": dataclasses.replace(two.speech, clips=4)},
            {"speech": dataclasses.replace(two.speech, manifest="another.jsonl")},
        ):
            with pytest.raises(ValueError, match=f"cells of {one.cell.model} must be alike in .* and {cell.name} has "):
                make_rows([one, dataclasses.replace(two, **change)])
    unknown, second, third = (make_result(dataclasses.replace(static_cell, round=number)) for number in (1, 2, 3))
    rounds = [unknown, *(dataclasses.replace(r, configuration=f"of {r.cell.round}") for r in (second, third))]
    with pytest.raises(ValueError, match=r"alike in configuration, but .*_r2 has of 2 and .*_r3 has of 3"):
        make_rows(rounds)


def test_format_is_compared_of_files_alone(static_cell, file_cell, make_result):
    for cell in (static_cell, file_cell):
        one, two = (make_result(dataclasses.replace(cell, round=number), 40.0) for number in (1, 2))
        two = dataclasses.replace(two, speech=dataclasses.replace(two.speech, format="wav"))
        if cell is static_cell:
            assert len(make_rows([one, two])) == 1
            continue
        with pytest.raises(ValueError, match=r"alike in format, but .* has flac and .* has wav"):
            make_rows([one, two])


def test_share_of_the_throughput_is_that_of_each_round(file_cell, make_result):
    opened = [
        dataclasses.replace(
            make_result(dataclasses.replace(file_cell, concurrency=None, poisson_share=0.5, round=number), avg_ms),
            rate_per_s=rate,
        )
        for number, (avg_ms, rate) in enumerate(((30.0, 15), (30.0, 30), (None, 60), (45.0, 10)), 1)
    ]
    (row,) = make_rows(opened)
    assert row.load == "Poisson, 50% asked for, 100% reached"  # 30 of 30, 30 of 60, unstable, 20 of 20
    failed = dataclasses.replace(opened[0], status="failed", report=None)
    for one in (failed, opened[2], dataclasses.replace(opened[0], rate_per_s=None)):
        assert make_rows([one])[0].load == "Poisson, 50% asked for"


def test_rounds_that_failed_have_words_beside_those_that_did_not(static_cell, make_result):
    again = dataclasses.replace(static_cell, round=2)
    (row,) = make_rows([make_result(static_cell), make_result(again, reason="gone")])
    assert row.troubles == ["round 1 unstable: windows of 10.0 to 20.0 clips/s", "round 2 failed: gone"]
    (row,) = rows = make_rows([make_result(static_cell, 40.0), make_result(again, reason="gone")])
    assert row.troubles == ["round 2 failed: gone"]
    (one,) = make_rows([make_result(static_cell, 40.0), make_result(again)])
    assert one.troubles == ["round 2 unstable: windows of 10.0 to 20.0 clips/s"]
    page = render_page(rows, {}, "small", {})
    assert "- 2 s, batch 1: round 2 failed: gone\n" in page
    assert "- Runs: 1 stable, 0 unstable, 1 failed. Stable: " in page
    assert "0 failed. Each checked its transcripts. Stable: " in render_page(make_rows([row.results[0]]), {}, "a", {})
    over_http = make_rows([make_result(dataclasses.replace(static_cell, protocol="http"), 40.0)])
    assert "0 failed. Each checked its transcripts, over gRPC. Stable: " in render_page(over_http, {}, "a", {})


def test_cpu_time_and_batches_are_those_of_the_stable_rounds(static_cell, make_result):
    again = dataclasses.replace(static_cell, round=2)
    other = dataclasses.replace(make_result(again), cpu_ms_per_clip=99.0, batches={"acoustic": {1: 1, 8: 30}})
    (row,) = make_rows([make_result(static_cell, 40.0), other])
    assert (row.cpu_ms_per_clip, row.acoustic_batches) == (7.5, {1: 10})
    (row,) = make_rows([other])
    assert (row.cpu_ms_per_clip, row.mean_batch) == (None, None)


def test_cells_of_different_rounds_are_said_to_be(static_cell, file_cell, make_result):
    rows = make_rows([make_result(static_cell, 40.0), make_result(dataclasses.replace(static_cell, round=2), 40.0)])
    assert "over the stable rounds (of 2). " in render_page(rows, {}, "small", {})
    rows += make_rows([make_result(file_cell, 40.0)])
    assert "over the stable rounds (of 1 to 2). " in render_page(rows, {}, "small", {})
