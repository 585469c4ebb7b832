"""The plots of a sweep's report."""

import dataclasses
import math
import re
from itertools import pairwise
from unittest.mock import MagicMock

import pytest
from carnelian_perf.raw_file import Split
from carnelian_perf.sweeps.plots import draw_all
from carnelian_perf.sweeps.report import render_html, write_report
from carnelian_perf.sweeps.results import RESULT
from carnelian_perf.sweeps.rows import make_rows


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Draws the plots of results; returns the figures by name."""

    def draw_figures(results):
        drawn = {}
        monkeypatch.setattr(
            "carnelian_perf.sweeps.plots.write_plot",
            lambda path, figure: drawn.update({path.stem.removeprefix("a_"): figure}),
        )
        draw_all(make_rows(results), {}, tmp_path / "a")
        return drawn

    return draw_figures


def read_bars(figure):
    """Read the length of each bar, and the words in the place of one."""
    (axes,) = figure.axes
    lengths = [
        sum(part.get_width() for part in parts) for parts in zip(*(bar.patches for bar in axes.containers), strict=True)
    ]
    words = {round(text.get_position()[1]): text.get_text() for text in axes.texts}
    labels = [label.get_text() for label in axes.get_yticklabels()]
    return {
        label: words.get(place, pytest.approx(length))
        for place, (label, length) in enumerate(zip(labels, lengths, strict=True))
    }


def test_fault_of_a_plot_is_not_of_the_sweep(sweep, monkeypatch):
    monkeypatch.setattr("carnelian_perf.sweeps.report.draw_all", MagicMock(side_effect=TypeError("of drawing")))
    with pytest.raises(TypeError, match="of drawing"):
        write_report(sweep, {})


def test_plots_that_a_full_disk_has_no_room_for_stay_as_they_were(sweep, room):
    plot = sweep.with_name("small_sweep_latency.png")
    plot.write_text("old")
    with room(500), pytest.raises(OSError, match="is as it was before"):
        write_report(sweep, {})
    assert plot.read_text() == "old"


def test_page_says_that_plots_leave_groups_out(sweep, static_cell, make_result):
    said = (
        "\nEach plot shows one model, precision and transport, which its title names; the tables have all.\n\n![small"
    )
    assert said not in write_report(sweep, {})[0].read_text()
    other = make_result(dataclasses.replace(static_cell, protocol="http"), 40.0)
    (sweep / other.cell.name).mkdir()
    other.write(sweep / other.cell.name / RESULT)
    assert said in write_report(sweep, {})[0].read_text()


def test_plots_of_many_values_can_be_read(draw, static_cell, file_cell, make_result):
    durations = [float(duration) for duration in range(1, 13)]
    cells = [
        dataclasses.replace(cell, duration_s=duration) for cell in (static_cell, file_cell) for duration in durations
    ]
    cells += [dataclasses.replace(c, **({"batch": 2} if c.input == "pcm" else {"concurrency": 2})) for c in cells]
    drawn = draw([make_result(cell, 40.0) for cell in cells])
    for name in ("latency", "throughput"):
        lines = [line for line in drawn[name].axes[0].lines if line.get_linestyle() == "-"]
        assert len({(line.get_color(), line.get_marker()) for line in lines}) == len(lines) == 12
        assert all(axes.get_xscale() == "log" for axes in drawn[name].axes)
    for name in ("stages", "batches"):
        (axes,) = drawn[name].axes
        drawn[name].draw_without_rendering()
        boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert len(boxes) == 24
        assert all(upper.y0 > lower.y1 for upper, lower in pairwise(boxes))


def test_cells_without_a_stable_round_are_gaps_with_a_reason(draw, static_cell, file_cell, make_result):
    batches = [dataclasses.replace(static_cell, batch=batch) for batch in (1, 2, 4)]
    clients = [dataclasses.replace(file_cell, concurrency=number) for number in (1, 8, 16)]
    arrivals = [dataclasses.replace(file_cell, concurrency=None, poisson_share=share) for share in (0.3, 0.6, 0.9)]
    results = [
        result
        for first, second, third in (batches, clients, arrivals)
        for result in (make_result(first, 30.0), make_result(second), make_result(third, 50.0))
    ]
    results[1] = make_result(batches[1], reason="no answer")
    drawn = draw(results)
    lines = [line for axes in drawn["latency"].axes[:1] + drawn["throughput"].axes for line in axes.lines]
    assert [[math.isnan(y) for y in line.get_ydata()] for line in lines] == [[False, True, False]] * 4
    assert all(line.get_marker() != "None" for line in lines)  # a point between gaps has no line that shows it
    assert drawn["latency"].get_supxlabel() == "Left out: 2 s, batch 2 (failed)"
    left_out = "Left out: 2 s, 8 clients (unstable); 2 s, Poisson, 60% asked for (unstable)"
    assert drawn["throughput"].get_supxlabel() == left_out
    assert read_bars(drawn["stages"]) == {"2 s x 1": 245 / 3, "2 s x 2": "failed", "2 s x 4": 79}
    assert read_bars(drawn["batches"]) == {
        **{"2 s, 1 client": 100, "2 s, 8 clients": "unstable", "2 s, 16 clients": 100},
        **{"2 s, Poisson, 30% asked for, 19% reached": 100, "2 s, Poisson, 60% asked for": "unstable"},
        "2 s, Poisson, 90% asked for, 11% reached": 100,
    }


def test_names_of_many_gaps_fit_beside_what_is_drawn(draw, static_cell, make_result):
    cells = [
        dataclasses.replace(static_cell, duration_s=float(duration), batch=batch)
        for duration in range(1, 13)
        for batch in (1, 2, 4)
    ]
    figure = draw([make_result(cell, 40.0 if cell.batch == 1 else None) for cell in cells])["latency"]
    assert figure.get_supxlabel().count("(unstable)") == 24
    figure.draw_without_rendering()
    (note,) = (text.get_window_extent() for text in figure.texts if text.get_text() == figure.get_supxlabel())
    assert note.x0 > 0
    assert note.x1 < figure.bbox.x1
    whole = [axes.yaxis.label.get_window_extent() for axes in figure.axes]
    assert all(label.y0 > note.y1 and label.y1 < figure.bbox.y1 for label in whole)


def test_stages_that_take_longer_than_the_request_have_no_bar(draw, static_cell, make_result):
    results = []
    for batch, infer_ms in ((1, 11.0), (2, 12.0)):  # three stages take 42 ms of 40, which may be chance, or 45
        result = make_result(dataclasses.replace(static_cell, batch=batch), 40.0)
        stages = {name: Split(1.0, 1.0, infer_ms, 1.0) for name in result.report.stages}
        client_ms = {"send": 0.5, "network": 1.0, "recv": 0.5}  # with the stages' queues, 3 ms
        report = dataclasses.replace(result.report, client_ms=client_ms, stages=stages)
        results.append(dataclasses.replace(result, report=report))
    figure = draw(results)["stages"]
    assert read_bars(figure) == {"2 s x 1": 105, "2 s x 2": "the stages take longer than the request"}


def test_cell_whose_stages_and_batches_are_not_known_has_no_bar(draw, static_cell, file_cell, make_result):
    results = []
    for cell in (static_cell, file_cell):
        result = make_result(dataclasses.replace(cell, duration_s=7.0), 40.0)
        report = dataclasses.replace(result.report, stages=None)
        results += [make_result(cell, 40.0), dataclasses.replace(result, batches={}, report=report)]
    drawn = draw(results)
    assert read_bars(drawn["stages"]) == {"2 s x 1": 80, "7 s x 1": "not known"}
    assert read_bars(drawn["batches"]) == {"2 s, 1 client": 100, "7 s, 1 client": "not known"}


def test_only_plots_of_the_report_are_images_of_its_html(tmp_path):
    for name in ("plot.png", "secret.png"):
        (tmp_path / name).write_bytes(b"x")
    page = "# x\n\n![](plot.png) ![](secret.png) ![](https://evil.example/b.png)\n"
    html = render_html(page, [tmp_path / "plot.png"])
    assert re.findall('src="([^"]*)"', html) == ["data:image/png;base64,eA==", "", ""]


@pytest.mark.parametrize(
    ("another_load", "has_throughput"),
    [({"concurrency": 2}, True), ({"concurrency": None, "poisson_share": 0.6}, True), ({"duration_s": 16.7}, False)],
    ids=["clients", "poisson", "none"],
)
def test_loads_and_batches_that_were_not_measured_are_left_out(
    tmp_path, file_cell, make_result, another_load, has_throughput
):
    folder = tmp_path / "files_sweep"
    results = [make_result(file_cell, 25.0), make_result(dataclasses.replace(file_cell, duration_s=7.0))]
    results.append(make_result(dataclasses.replace(file_cell, **another_load), 30.0))
    for result in results:
        (folder / result.cell.name).mkdir(parents=True)
        result.write(folder / result.cell.name / RESULT)
    written = write_report(folder, {})
    names = [*(["files_sweep_throughput.png"] if has_throughput else []), "files_sweep_batches.png"]
    assert [path.name for path in written[1:-1]] == names


def test_what_one_of_several_servers_counts_is_left_out(tmp_path, static_cell, file_cell, make_result, read_row):
    folder = tmp_path / "cluster_sweep"
    for cell in (static_cell, file_cell, dataclasses.replace(file_cell, concurrency=2)):
        result = make_result(cell, 25.0)
        result = dataclasses.replace(
            result, one_server=False, batches={}, report=dataclasses.replace(result.report, stages=None)
        )
        (folder / cell.name).mkdir(parents=True)
        result.write(folder / cell.name / RESULT)
    page, *plots, _ = write_report(folder, {})
    assert [path.name for path in plots] == ["cluster_sweep_latency.png", "cluster_sweep_throughput.png"]
    text = page.read_text()
    assert "- Several servers answered at one address: " in text
    assert "Where the mean request's milliseconds go" not in text
    assert read_row(text, "2", "1 client")[-3] == "-"
