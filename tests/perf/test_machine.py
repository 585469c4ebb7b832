import pytest
from carnelian_perf.machine import describe_machine


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


def test_without_a_driver_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_machine()["accelerator"] == "none"
