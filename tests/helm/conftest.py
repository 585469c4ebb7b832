"""Renders helm/carnelian with the real Helm, both majors, and runs what it starts.

`setup/chart-tools` installs Helm and Prometheus.
"""

import contextlib
import functools
import http
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from carnelian_client import TLS, CarnelianClient
from carnelian_serving.addresses import held_ports
from carnelian_serving.installation import prepare_wheel

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "carnelian"
ADMIN_KEY = "0123456789abcdef"
START_TIMEOUT_S = 240
CASES = sorted(path.stem.removesuffix("-values") for path in (CHART / "ci").glob("*-values.yaml"))
HELMS = ("helm3", "helm4")
RELEASE = "speech-eu"
KUBE_VERSION = "1.33.0"

Manifest = dict[str, Any]


def _find_tool(name: str) -> str | None:
    """Returns the path of a program of the virtual environment or of the system."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name)


@functools.cache
def run_helm(helm: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = _find_tool(helm)
    if program is None:
        pytest.skip(f"{helm} is missing: run setup/chart-tools .venv/bin")
    environment = os.environ | {"GOGC": "off"}  # it ends before collecting its garbage is worth the time
    command = [program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def render_arguments(case: str, sets: tuple[str, ...], kube_version: str) -> list[str]:
    arguments = ["template", RELEASE, str(CHART), "--namespace", "speech", "--kube-version", kube_version]
    if case != "default":
        arguments += ["--values", str(CHART / "ci" / f"{case}-values.yaml")]
    return [*arguments, *(f"--set={value}" for value in sets)]


class _StrictLoader(yaml.CSafeLoader):
    """Refuses a key that is there twice, as an API server does; libyaml reads eight times as fast as Python."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is there twice: {keys}"
        return super().construct_mapping(node, deep)


class Rendered:
    """The manifests of one rendering."""

    def __init__(self, text: str) -> None:
        self.manifests: list[Manifest] = [document for document in yaml.load_all(text, _StrictLoader) if document]

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

    def job(self, name: str) -> Manifest:
        """The spec of the pods of the only Job whose name ends so."""
        return self.one("Job", name)["spec"]["template"]["spec"]

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
def find_tool() -> Callable[[str], str]:
    """The path of a program that `setup/chart-tools` installs."""

    def find_tool(name: str) -> str:
        program = _find_tool(name)
        if program is None:
            pytest.skip(f"{name} is missing: run setup/chart-tools .venv/bin")
        return program

    return find_tool


@pytest.fixture(scope="session")
def chart() -> Path:
    return CHART


@pytest.fixture(scope="session", params=HELMS)
def helm(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def call_helm(helm: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs one of the two Helms."""
    return functools.partial(run_helm, helm)


@pytest.fixture(scope="session", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def case_manifests(case: str) -> list[Manifest]:
    """What a case of ci/ renders to."""
    return render_chart(case=case).manifests


@pytest.fixture(scope="session")
def groups(render: Callable[..., Rendered]) -> list[Manifest]:
    return render(case="monitoring").one("PrometheusRule")["spec"]["groups"]


@pytest.fixture(scope="session")
def alerts(groups: list[Manifest]) -> list[Manifest]:
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@pytest.fixture(scope="session")
def dashboard(render: Callable[..., Rendered]) -> Manifest:
    return json.loads(render(case="monitoring").one("ConfigMap", "-dashboard")["data"]["carnelian.json"])


@pytest.fixture(scope="session")
def adapter_rule(render: Callable[..., Rendered]) -> dict[str, str]:
    (rule,) = yaml.safe_load(render(case="monitoring").one("ConfigMap", "-adapter-rules")["data"]["rules.yaml"])
    return rule


class Container:
    """The serving container, without a container: its command, arguments and environment on free ports."""

    def __init__(self, server: dict[str, Any], folder: Path, models: Path = ROOT / "model_repository") -> None:
        """Starts it; `folder` gets its log and has what Secrets would mount."""
        self.key = ADMIN_KEY
        self._until_started = contextlib.ExitStack()
        ports = self._until_started.enter_context(held_ports("127.0.0.1", {"8000": 0, "8001": 0, "8002": 0}))
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in ports.values())
        self.probes = {name: server[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
        environment = {"CARNELIAN_ADMIN_KEY": ADMIN_KEY, "HOME": "/tmp"}
        arguments = [argument.replace("$(CARNELIAN_ADMIN_KEY)", ADMIN_KEY) for argument in server["args"]]
        arguments = [argument.replace("=/models", f"={models}") for argument in arguments]
        arguments = [argument.replace("=/tls/", f"={folder}/") for argument in arguments]
        for port, chosen in ports.items():
            arguments = [argument.replace(f"-port={port}", f"-port={chosen}") for argument in arguments]
        command = list(server["command"])
        if "tritonserver" in command:  # the wheel's: the same core as the container's, with our backends
            wheel = prepare_wheel(folder)
            command = [part.replace("exec tritonserver", f"exec {wheel.binary}") for part in command]
            environment |= wheel.environment
            arguments.append(f"--backend-directory={wheel.backend_directory}")
        else:
            command = [str(Path(sys.executable).with_name(command[0]))]
        self.log = folder / "server.log"
        with self.log.open("w") as log:
            command += arguments
            self.process = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)

    def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> int:
        request = urllib.request.Request(f"http://{self.http}{path}", headers=headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    def wait_until_started(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if self.get(self.probes["startup"]) == 200:
                    self._until_started.close()
                    return
            except (OSError, http.client.HTTPException):
                time.sleep(0.2)
        pytest.fail(f"the startup probe must succeed in {START_TIMEOUT_S} s")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@pytest.fixture(scope="session")
def start() -> Callable[..., Container]:
    """Starts the serving container of a rendering and waits for its startup probe."""

    def start(server: dict[str, Any], folder: Path, models: Path) -> Container:
        folder.mkdir()
        running = Container(server, folder, models)
        try:
            running.wait_until_started()
        except BaseException:
            running.process.kill()
            raise
        return running

    return start


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tls.crt, tls.key and ca.crt, as in a Secret of kubernetes.io/tls; the certificate is its own authority."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "tls.key", "-out", folder / "tls.crt"),
        ],
        check=True,
        capture_output=True,
    )
    (folder / "ca.crt").write_bytes((folder / "tls.crt").read_bytes())
    return folder


@pytest.fixture(scope="session")
def container(render: Callable[..., Rendered], secrets: Path) -> Iterator[Container]:
    """As rendered with mutual TLS and one thread; everything else is the chart's default."""
    running = Container(render("tls.secretName=tls", "tls.mutual=true", "server.threads=1").server, secrets)
    try:
        running.wait_until_started()
        yield running
    finally:
        status = running.stop()
    assert status == 0


@pytest.fixture(scope="session")
def tls(secrets: Path) -> TLS:
    return TLS(ca_path=secrets / "ca.crt", cert_path=secrets / "tls.crt", key_path=secrets / "tls.key")


class Prometheus:
    """Prometheus with the chart's rules, scraping the server under the labels that the monitors give it."""

    window = "20s"
    """Of rates: there are two scrapes in it even where some come late; short enough for a test."""

    def __init__(self, program: str, folder: Path, target: str, rules: Manifest) -> None:
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
        labels = {"namespace": "speech", "pod": "server-0", "release": f"{RELEASE}-carnelian"}
        scrape = {"job_name": "server", "static_configs": [{"targets": [target], "labels": labels}]}
        intervals = {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"}
        settings = {"global": intervals, "rule_files": ["rules.yaml"], "scrape_configs": [scrape]}
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
        with held_ports("127.0.0.1", {"port": 0}) as ports:
            port = ports["port"]
        self._url = f"http://127.0.0.1:{port}"
        command = [program, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
        self.log = folder / "prometheus.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log, env={"GOMAXPROCS": "1"}
            )

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.SERVICE_UNAVAILABLE:  # it is still starting
                error.close()
                raise ConnectionError("Prometheus is not ready") from None
            # The body has Prometheus' own words.
            pytest.fail(f"{parameters}: {error.read().decode()}")

    def query(self, expression: str) -> list[Manifest]:
        return self._get("query", query=expression)["result"]

    def series(self, selector: str) -> list[dict[str, str]]:
        return self._get("series", **{"match[]": selector})

    def rules(self) -> list[Manifest]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def wait_for(self, expression: str) -> list[Manifest]:
        """Returns an expression's values once there is one: for a while after a late scrape there is none."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                if found := self.query(expression):
                    return found
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.2)
        pytest.fail(f"{expression} must have a value in {START_TIMEOUT_S} s")


@pytest.fixture(scope="session")
def prometheus(
    container: Container, tls: TLS, find_tool: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    rules = render_chart(case="monitoring").one("PrometheusRule")["spec"]
    folder = tmp_path_factory.mktemp("prometheus")
    running = Prometheus(find_tool("prometheus"), folder, container.metrics, rules)
    try:
        running.wait_for("carnelian_audio_seconds_total")
        with CarnelianClient(container.grpc, tls=tls) as client:
            client.transcribe(ROOT / "demo" / "clips" / "letter.wav")
        running.wait_for(f"rate(carnelian_audio_seconds_total[{running.window}]) > 0")
        running.wait_for("carnelian:audio_seconds:rate2m")
        yield running
    finally:
        running.process.terminate()
        running.process.wait(timeout=30)
