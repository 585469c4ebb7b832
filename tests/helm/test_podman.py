"""The rendered serving container in a real one: podman, the chart's user, capabilities, mounts, memory and arguments.

CARNELIAN_IMAGE=localhost/carnelian-serving:0.1.0-cpu pytest tests/helm/test_podman.py; PODMAN is the command, if it
needs options. `podman kube play` is not used: its version in Debian 12 knows no fsGroup, no memory-backed emptyDir and
no $(VARIABLE) in arguments.
"""

import os
import shlex
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from carnelian_client import CarnelianClient
from carnelian_serving.addresses import held_ports

CLIP = Path(__file__).parents[2] / "demo" / "clips" / "letter.wav"
IMAGE = os.environ.get("CARNELIAN_IMAGE", "")
PODMAN = shlex.split(os.environ.get("PODMAN", "podman"))
KEY = "0123456789abcdef"
START_TIMEOUT_S = 120

pytestmark = pytest.mark.skipif(
    not IMAGE or shutil.which(PODMAN[0]) is None, reason="CARNELIAN_IMAGE must name a built image, and podman be there"
)


def podman(*arguments: str) -> str:
    command = [*PODMAN, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


class Container:
    """A running container; what Kubernetes would do with the pod's spec is done with podman's options."""

    def __init__(self, pod: dict[str, Any], server: dict[str, Any]) -> None:
        with held_ports("127.0.0.1", {"8000": 0, "8001": 0, "8002": 0}) as ports:
            pass
        self.http, self.grpc, _ = (f"127.0.0.1:{port}" for port in ports.values())
        self.name = f"carnelian-{ports['8000']}"
        self.probes = [server[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")]
        arguments = [argument.replace("$(CARNELIAN_ADMIN_KEY)", KEY) for argument in server["args"]]
        for port, chosen in ports.items():
            arguments = [argument.replace(f"-port={port}", f"-port={chosen}") for argument in arguments]
        context, security = pod["securityContext"], server["securityContext"]
        options = [
            f"--name={self.name}",
            "--network=host",
            f"--user={context['runAsUser']}:{context['runAsGroup']}",
            f"--read-only={str(security['readOnlyRootFilesystem']).lower()}",
            "--read-only-tmpfs=false",
            *(f"--cap-drop={name}" for name in security["capabilities"]["drop"]),
            f"--memory={server['resources']['limits']['memory'].replace('Gi', 'g')}",
            f"--env=CARNELIAN_ADMIN_KEY={KEY}",
            *(f"--env={item['name']}={item['value']}" for item in server["env"] if "value" in item),
            f"--entrypoint={server['command'][0]}",
        ]
        if not security["allowPrivilegeEscalation"]:
            options.append("--security-opt=no-new-privileges")
        volumes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"]}
        for mount in server["volumeMounts"]:
            size = volumes[mount["name"]]["sizeLimit"].removesuffix("i").lower()
            options.append(f"--tmpfs={mount['mountPath']}:rw,exec,mode=1777,size={size}")
        podman("run", "--detach", *options, IMAGE, *arguments)

    def get(self, path: str) -> int:
        with urllib.request.urlopen(f"http://{self.http}{path}", timeout=4) as answer:
            return answer.status

    def run(self, command: str) -> str:
        return podman("exec", self.name, "sh", "-c", command)


@pytest.fixture(scope="module")
def running(render):
    rendered = render()
    container = Container(rendered.pod, rendered.server)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "ready" not in podman("logs", container.name):
            is_running = podman("inspect", container.name, "--format={{.State.Running}}").split()[-1] == "true"
            assert is_running, podman("logs", container.name)
            assert time.monotonic() < deadline, podman("logs", container.name)
            time.sleep(0.5)
        yield container
    finally:
        podman("rm", "--force", container.name)


def test_probes_and_a_transcript(running):
    assert [running.get(path) for path in running.probes] == [200, 200, 200]
    with CarnelianClient(running.grpc) as client:
        assert client.transcribe(CLIP).text


def test_the_process_is_who_the_chart_says_and_may_nothing(running):
    assert running.run("id -u; id -g").split() == ["10001", "10001"]
    status = running.run("cat /proc/[0-9]*/status")
    assert {line.split()[1] for line in status.splitlines() if line.startswith(("CapEff", "CapBnd"))} == {"0" * 16}
    assert {line.split()[1] for line in status.splitlines() if line.startswith("NoNewPrivs")} == {"1"}


def test_only_tmp_and_shared_memory_can_be_written(running):
    folders = "/ /models /opt/carnelian /var/tmp /home /tmp /dev/shm"
    written = running.run(f"for folder in {folders}; do touch $folder/x 2>/dev/null && echo $folder; done; true")
    assert written.split() == ["/tmp", "/dev/shm"]


def test_what_it_uses_fits_the_limits_with_room(running):
    used = running.run("df -m /tmp /dev/shm --output=pcent").split()
    assert all(int(percent.rstrip("%")) < 50 for percent in used if percent.endswith("%") and percent != "Use%")


def test_it_ends_in_time_with_status_0(running):
    began = time.monotonic()
    podman("stop", "--time=40", running.name)
    assert time.monotonic() - began < 40
    assert podman("inspect", running.name, "--format={{.State.ExitCode}}").split()[-1] == "0"
