"""A server for every test that speaks to one: carnelian-serve, or a container with `--triton-image`."""

import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from carnelian_serving.launcher import Server, choose_ports

ROOT = Path(__file__).parents[1]
CONTAINER_READY_TIMEOUT_S = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--triton-image",
        help="serve from `docker run` of this image, and run only the tests that need a server",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--triton-image"):
        return
    served = [item for item in items if "server" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in served])
    items[:] = served


class ContainerServer:
    """`docker run` of a Triton image on a repository, with the face of carnelian_serving's Server."""

    def __init__(self, repository: Path, image: str) -> None:
        self.repository = repository
        self._image = image
        self._ports = choose_ports("127.0.0.1", {"http": 0, "grpc": 0, "metrics": 0})
        self.http_url = f"127.0.0.1:{self._ports['http']}"
        self.grpc_url = f"127.0.0.1:{self._ports['grpc']}"
        self.metrics_url = f"http://127.0.0.1:{self._ports['metrics']}/metrics"
        self._name = f"carnelian-test-{self._ports['grpc']}"

    @property
    def log(self) -> list[str]:
        command = ["docker", "logs", self._name]
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        ).stdout.splitlines()

    def __enter__(self) -> "ContainerServer":
        ports = [f"--publish=127.0.0.1:{port}:{8000 + i}" for i, port in enumerate(self._ports.values())]
        volume = f"--volume={self.repository}:/models:ro"
        options = ["--detach", "--shm-size=1g", f"--name={self._name}", *ports, volume]
        serve = ["tritonserver", "--model-repository=/models"]
        subprocess.run(["docker", "run", *options, self._image, *serve], check=True)
        deadline = time.monotonic() + CONTAINER_READY_TIMEOUT_S
        while not self._is_ready():
            if time.monotonic() > deadline:
                log = "\n".join(self.log[-40:])
                self.__exit__()
                pytest.fail(f"{self._image} must be ready in {CONTAINER_READY_TIMEOUT_S} s; its log ends:\n{log}")
            time.sleep(1)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["docker", "rm", "--force", self._name], check=False)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.http_url}/v2/health/ready", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server | ContainerServer]:
    """A server on a copy of the model repository; `.grpc_url`, `.http_url`, `.metrics_url`, `.log`."""
    repository = tmp_path_factory.mktemp("served") / "model_repository"
    shutil.copytree(ROOT / "model_repository", repository)
    image = request.config.getoption("--triton-image")
    if image:
        with ContainerServer(repository, image) as running:
            yield running
    else:
        with Server(repository, http_port=0, grpc_port=0, metrics_port=0) as running:
            yield running
