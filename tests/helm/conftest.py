"""Renders helm/carnelian with the real Helm, both majors; `setup/chart-tools` installs them."""

import functools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "helm" / "carnelian"
CASES = sorted(path.stem.removesuffix("-values") for path in (CHART / "ci").glob("*-values.yaml"))
HELMS = ("helm3", "helm4")
RELEASE = "speech-eu"
KUBE_VERSION = "1.33.0"

Manifest = dict[str, Any]


def find_tool(name: str) -> str | None:
    """Returns the path of a program of the virtual environment or of the system."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name)


@functools.cache
def run_helm(helm: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = find_tool(helm)
    if program is None:
        pytest.skip(f"{helm} is missing: run setup/chart-tools .venv/bin")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def render_arguments(case: str, sets: tuple[str, ...], kube_version: str) -> list[str]:
    arguments = ["template", RELEASE, str(CHART), "--namespace", "speech", "--kube-version", kube_version]
    if case != "default":
        arguments += ["--values", str(CHART / "ci" / f"{case}-values.yaml")]
    return [*arguments, *(f"--set={value}" for value in sets)]


class Rendered:
    """The manifests of one rendering."""

    def __init__(self, text: str) -> None:
        self.manifests: list[Manifest] = [document for document in yaml.safe_load_all(text) if document]

    def all(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> Manifest:
        """The only manifest of a kind, or the only one whose name ends so."""
        found = [m for m in self.all(kind) if name is None or m["metadata"]["name"].endswith(name)]
        (manifest,) = found
        return manifest

    @property
    def pod(self) -> Manifest:
        """The serving pods' spec."""
        return self.one("Deployment")["spec"]["template"]["spec"]

    @property
    def server(self) -> Manifest:
        """The serving container."""
        return next(container for container in self.pod["containers"] if container["name"] == "server")


def render_chart(*sets: str, case: str = "default", kube_version: str = KUBE_VERSION, helm: str = "helm3") -> Rendered:
    done = run_helm(helm, *render_arguments(case, sets, kube_version))
    assert done.returncode == 0, done.stderr
    return Rendered(done.stdout)


@pytest.fixture(scope="session")
def render() -> Callable[..., Rendered]:
    """Renders a case of ci/ with `--set` values on top.

    `helm3` by default: it starts in half the time. Tests that concern rendering itself walk both.
    """
    return render_chart


@pytest.fixture(scope="session")
def refusal() -> Callable[..., str]:
    """Returns what Helm says to values that must not be rendered."""

    def refusal(*sets: str, case: str = "default", kube_version: str = KUBE_VERSION, helm: str = "helm3") -> str:
        done = run_helm(helm, *render_arguments(case, sets, kube_version))
        assert done.returncode != 0, f"these values must be refused: {sets}"
        return done.stderr

    return refusal


@pytest.fixture(scope="session")
def chart() -> Path:
    return CHART


@pytest.fixture(scope="session", params=HELMS)
def helm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def call_helm(helm: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs one of the two Helms."""
    return functools.partial(run_helm, helm)


@pytest.fixture(scope="session", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def case_manifests(case: str) -> list[Manifest]:
    """What a case of ci/ renders to."""
    return render_chart(case=case).manifests
