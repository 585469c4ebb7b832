"""A server whose /dev/shm has no room for what its models answer."""

import shlex
import subprocess
import sysconfig

import numpy as np
import pytest

SIZE_MIB = 64


@pytest.fixture
def cramped_url(grown_repository):
    """gRPC address of a server with a /dev/shm of its own."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size={SIZE_MIB}m tmpfs /dev/shm"
    tried = subprocess.run([*unshare, mount], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")
    serve = [f"{sysconfig.get_path('scripts')}/carnelian-serve", f"--repository={grown_repository}"]
    # Triton (2.51) goes on waiting for requests that found no room.
    serve += ["--http-port=0", "--grpc-port=0", "--metrics-port=0", "--exit-timeout=1"]
    command = [*unshare, f"{mount} && exec {shlex.join(serve)}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("carnelian-serve: ready; gRPC ")
            yield line.partition("gRPC ")[2].partition(",")[0]
        finally:
            process.terminate()


@pytest.mark.parametrize("others", [2, 6])  # in one part with the long ones, and in two
def test_it_refuses_what_has_no_room_and_lives_on(cramped_url, connect, others):
    client = connect(cramped_url)

    def grow(*lengths):
        signal = np.ones((1, 10), np.float32)
        requests = [{"SIGNAL": signal, "LENGTH": np.array([[length]], np.int32)} for length in lengths]
        return [
            answer["CUT"].size if isinstance(answer, dict) else answer.status()
            for answer in client.infer_at_once("grown", requests)
        ]

    for _ in range(5):
        answers = grow(*[100] * others, *[17 * 2**20] * 2)  # a long answer takes 68 MiB
        assert answers == [100] * others + ["StatusCode.INTERNAL"] * 2
        assert grow(*[100] * 8) == [100] * 8
