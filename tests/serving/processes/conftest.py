"""`carnelian-serve` in a process of its own, and what the kernel knows of it."""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from carnelian_serving.shared_memory import SHARED_MEMORY


@pytest.fixture
def start_command(command_line: list[str]) -> Iterator[Callable[..., tuple[Any, int]]]:
    """Starts `carnelian-serve`, perhaps by a `parent`; returns it once it is ready, and the pid of its tritonserver."""
    started = []

    def start(repository: Path, *options: str, parent: Sequence[str] = ()) -> tuple[subprocess.Popen[str], int]:
        command = [*parent, *command_line, f"--repository={repository}", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("carnelian-serve: ready; gRPC 127.0.0.1:")
        (server,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return process, int(server)

    yield start
    for process in started:  # of a test that has failed
        process.kill()
        process.communicate()


@pytest.fixture
def group_pids() -> Callable[[int], dict[int, str]]:
    """Finds the living processes of a process group, pid -> command."""
    return _group_pids


def _group_pids(group: int) -> dict[int, str]:
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, fields = status.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        state, _, group_of_process = fields.split()[:3]
        if int(group_of_process) == group and state != "Z":
            found[int(status.parent.name)] = name
    return found


@pytest.fixture
def regions_of() -> Callable[[int], set[Path]]:
    """Finds the shared memory regions of the servers of a launcher, by its pid."""
    return lambda launcher_pid: set(SHARED_MEMORY.glob(f"carnelian_{launcher_pid}_*"))
