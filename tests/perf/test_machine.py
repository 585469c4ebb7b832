import os
import platform
import subprocess
import sys

import pytest
from carnelian_perf.machine import describe_machine, find_commit, find_versions, measure_busy_cores, name_cpu


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("fpu sse2 avx avx2 fma", "AMD EPYC (AVX2)"),
        ("avx2 avx512f avx512bw avx512_vnni", "AMD EPYC (AVX-512 VNNI)"),
        ("avx2 avx512f avx512bw", "AMD EPYC (AVX-512)"),
        ("avx2 avx_vnni", "AMD EPYC (AVX2 VNNI)"),
        ("fpu sse2", "AMD EPYC"),
    ],
)
def test_a_cpu_is_named_with_its_widest_vectors(flags, said):
    cpu = f"processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: {flags}\n"
    assert name_cpu(f"{cpu}\n{cpu}") == said


def test_a_cpu_without_a_name_is_called_by_its_architecture():
    assert name_cpu("processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n") == platform.machine()


@pytest.mark.parametrize(
    ("says", "accelerator"),
    [
        ("echo NVIDIA L4", "NVIDIA L4"),
        ("echo NVIDIA L4; echo NVIDIA L4; echo Tesla T4", "2 x NVIDIA L4, Tesla T4"),
        ("echo no devices were found; exit 6", "none"),
    ],
)
def test_accelerators_are_those_that_the_driver_tells_of(tmp_path, monkeypatch, says, accelerator):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_machine()["accelerator"] == accelerator


def test_a_commit_of_a_project_that_only_holds_the_environment_is_not_ours(tmp_path, monkeypatch):
    def git(*words):
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    git("init")
    git("commit", "--allow-empty", "-m", "theirs")
    module = tmp_path / "machine.py"
    module.touch()
    monkeypatch.setattr("carnelian_perf.machine.__file__", str(module))
    assert find_commit() is None
    git("add", module.name)
    git("commit", "-m", "ours")
    assert find_commit() == git("rev-parse", "--short=12", "HEAD").strip()


def test_no_more_cores_are_busy_than_there_are_if_a_sleep_lasts_too_long(monkeypatch):
    now_s = 0.0

    def oversleep(seconds):
        nonlocal now_s
        now_s += 4 * seconds

    monkeypatch.setattr("time.sleep", oversleep)
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    two_cores = 2 * os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr("carnelian_perf.machine._busy_jiffies", lambda: round(two_cores * now_s))
    assert measure_busy_cores(0.5) == 2.0


def test_without_a_driver_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_machine()["accelerator"] == "none"


def test_a_native_server_is_named_beside_the_environments_packages(tmp_path, monkeypatch):
    for name in ("dali", "onnxruntime", "python"):
        library = tmp_path / "backends" / name / f"libtriton_{name}.so"
        library.parent.mkdir(parents=True)
        library.touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_versions()["tritonserver"] == "native"
    monkeypatch.setenv("TRITON_SERVER_VERSION", "2.46.0")
    assert find_versions()["tritonserver"] == "native 2.46.0"
    monkeypatch.setitem(sys.modules, "carnelian_serving", None)  # as where only training is installed
    assert "tritonserver" not in find_versions()
