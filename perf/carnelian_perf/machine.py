"""The machine that a measurement runs on: hardware, versions, and how busy it is."""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGES = (
    "nvidia-pytriton",
    "onnxruntime",
    "onnxruntime-gpu",
    "nvidia-dali-cuda120",
    "tritonclient",
    "torch",
    "onnx",
    "tensorrt",
    "tensorrt-rtx-cu12",
)
_JIFFIES_PER_S = os.sysconf("SC_CLK_TCK")
VECTORS = {
    "amx_int8": "AMX",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX2 VNNI",
    "avx2": "AVX2",
}
"""Flag in Linux's /proc/cpuinfo (x86) -> name of the vector instructions, the fastest first."""


def describe_machine() -> dict[str, str | int]:
    """Describe the machine: its CPU, the number of cores that this process may use, its GPUs and its system."""
    return {
        "cpu": name_cpu(Path("/proc/cpuinfo").read_text()),
        "cores": len(os.sched_getaffinity(0)),
        "accelerator": find_accelerators(),
        "system": platform.platform(),
    }


def name_cpu(cpuinfo: str) -> str:
    """Name the first CPU of /proc/cpuinfo and its widest vectors: "AMD EPYC (AVX2)".

    Clouds give CPUs of several generations the same name, but a network may take six times as long on one of them.
    """
    cpu: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        cpu.setdefault(key.strip(), value.strip())
    name = cpu.get("model name") or platform.machine()
    flags = cpu.get("flags", "").split()
    vectors = next((words for flag, words in VECTORS.items() if flag in flags), None)
    return f"{name} ({vectors})" if vectors else name


def find_accelerators() -> str:
    """Name the GPUs that NVIDIA's driver lists, or return `none`."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "none"
    counts = Counter(line.strip() for line in answer.splitlines() if line.strip())
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items()) or "none"


def find_versions() -> dict[str, str]:
    """Versions of Python, of the packages that the numbers depend on, and of a native tritonserver if there is one."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # not installed here
            versions[name] = importlib.metadata.version(name)
    if importlib.util.find_spec("carnelian_serving") is None:  # so nothing is served
        return versions
    from carnelian_serving.installation import NATIVE_ROOT, find_native

    if find_native(shutil.which("tritonserver"), NATIVE_ROOT):  # with an ONNX Runtime and a DALI of its own
        versions["tritonserver"] = f"native {os.environ.get('TRITON_SERVER_VERSION', '')}".strip()
    return versions


def find_commit() -> str | None:
    """Return the commit of this package's checkout, marked `-dirty` if files are changed; None outside a checkout."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        # A virtual environment may lie in the checkout of another project, which does not track it.
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True, check=True)
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def name_gpu(device_type: str) -> str:
    """Name the GPU that PyTorch uses; `none` for a device of type cpu."""
    import torch

    return "none" if device_type == "cpu" else str(torch.cuda.get_device_name())


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let PyTorch use `count` CPU threads inside the context; restore the previous number afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_busy_cores(seconds: float = 1.0) -> float:
    """Measure how many cores are busy, to 0.01: by other processes, if nothing of the measurement runs meanwhile."""
    started_s = time.monotonic()  # by the clock: on a busy machine, a sleep lasts longer than asked for
    before = _busy_jiffies()
    time.sleep(seconds)
    busy_s = (_busy_jiffies() - before) / _JIFFIES_PER_S
    return round(busy_s / (time.monotonic() - started_s), 2)


def measure_cpu_s(process_group: int) -> float:
    """Sum the CPU time that the living processes of a process group have used so far, in seconds of one core."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command's name stands in brackets and may itself contain spaces and brackets.
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[2]) == process_group:
            total += int(fields[11]) + int(fields[12])
    return total / _JIFFIES_PER_S


def _busy_jiffies() -> int:
    """Clock ticks that all cores were busy since boot: user, nice, system, irq, softirq, steal (not idle, iowait)."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return user + nice + system + irq + softirq + steal
