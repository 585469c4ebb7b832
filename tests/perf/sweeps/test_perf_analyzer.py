"""What perf_analyzer wrote, of programs that write it; the real one is in test_sweep.py."""

import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest
from carnelian_perf.raw_file import Split
from carnelian_perf.sweeps import perf_analyzer
from carnelian_perf.sweeps.perf_analyzer import PerfAnalyzerError

HEAD = "Inferences/Second,Avg latency,p50 latency,p90 latency,p95 latency,p99 latency"
CLIENT = "Client Send,Network+Server Send/Recv,Client Recv"
SERVER = "Server Queue,Server Compute Input,Server Compute Infer,Server Compute Output"


def write(path, **reports):
    """A program that writes these reports, as one line of columns and one of values each."""
    lines = [f"printf '{columns}\\n{values}\\n' > {name}" for name, (columns, values) in reports.items()]
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return [str(path)]


def test_report_and_stages_are_read_in_milliseconds(tmp_path):
    whole = (f"{HEAD},{CLIENT}", "12.5,80000,70000,90000,95000,99000,10,20,30")
    stage = (SERVER, "100,200,3000,400")
    command = write(tmp_path / "program", **{"report.csv": whole, "small_acoustic_v1.report.csv": stage})
    report = perf_analyzer.run(command, tmp_path, timeout_s=60)
    assert report.latency_ms == {"avg": 80.0, "p50": 70.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}
    assert (report.clips_per_s, report.client_ms) == (12.5, {"send": 0.01, "network": 0.02, "recv": 0.03})
    assert report.stages == {"small_acoustic": Split(0.1, 0.2, 3.0, 0.4)}


@pytest.mark.skipif(not shutil.which("setpriv", path=os.defpath), reason="needs setpriv, of util-linux")
def test_it_ends_with_a_sweep_that_is_killed(tmp_path):
    """It went on, and the next sweep measured its requests too."""
    program = "from carnelian_perf.sweeps import perf_analyzer as p; p.run(['sleep', '600'], p.Path(), 600)"
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path) as sweep:
        while not (started := psutil.Process(sweep.pid).children()) or started[0].name() != "sleep":
            assert sweep.poll() is None
            time.sleep(0.05)
        sweep.kill()
    assert not psutil.wait_procs(started, timeout=30)[1]


@pytest.mark.parametrize(
    "report", [(f"{HEAD}", "1,2,3,4,5,6"), (f"{HEAD},{CLIENT}", "1,2,3,4,5,6,7,8,"), (f"{HEAD},{CLIENT}", "1")]
)
def test_report_of_another_version_fails_the_cell_in_words(tmp_path, report):
    with pytest.raises(PerfAnalyzerError, match=r"must have numbers in .*Client Recv, as of perf_analyzer 2\.51"):
        perf_analyzer.run(write(tmp_path / "program", **{"report.csv": report}), tmp_path, timeout_s=60)
