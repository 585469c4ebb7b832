"""The plots of a sweep's report."""

import dataclasses
import re
from itertools import pairwise
from unittest.mock import MagicMock

import pytest
from carnelian_perf.sweeps.plots import draw_all
from carnelian_perf.sweeps.report import render_html, write_report
from carnelian_perf.sweeps.results import RESULT
from carnelian_perf.sweeps.rows import make_rows


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


def test_plots_of_many_values_can_be_read(tmp_path, monkeypatch, static_cell, file_cell, make_result):
    drawn = {}
    monkeypatch.setattr(
        "carnelian_perf.sweeps.plots.write_plot", lambda path, figure: drawn.update({path.stem: figure})
    )
    durations = [float(duration) for duration in range(1, 13)]
    cells = [
        dataclasses.replace(cell, duration_s=duration) for cell in (static_cell, file_cell) for duration in durations
    ]
    cells += [dataclasses.replace(c, **({"batch": 2} if c.input == "pcm" else {"concurrency": 2})) for c in cells]
    draw_all(make_rows([make_result(cell, 40.0) for cell in cells]), {}, tmp_path / "a")
    for name in ("a_latency", "a_throughput"):
        lines = [line for line in drawn[name].axes[0].lines if line.get_linestyle() == "-"]
        assert len({(line.get_color(), line.get_marker()) for line in lines}) == len(lines) == 12
        assert all(axes.get_xscale() == "log" for axes in drawn[name].axes)
    for name in ("a_stages", "a_batches"):
        (axes,) = drawn[name].axes
        drawn[name].draw_without_rendering()
        boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert len(boxes) == 24
        assert all(upper.y0 > lower.y1 for upper, lower in pairwise(boxes))


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
