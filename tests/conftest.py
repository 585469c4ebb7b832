"""A server for every test that speaks to one: carnelian-serve, or a container with `--triton-image`; models; a user."""

import base64
import collections
import contextlib
import functools
import io
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
import sentencepiece
from carnelian_serving.addresses import held_ports
from carnelian_serving.launcher import Server
from carnelian_serving.stubs import find_instance
from tritonclient import grpc as triton
from tritonclient.utils import np_to_triton_dtype

ROOT = Path(__file__).parents[1]
CONTAINER_READY_TIMEOUT_S = 300
ANSWER_TIMEOUT_S = 60
LANGUAGE_MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
tiny (int64[rows, time] TOKENS, int64[rows] TOKEN_LENGTH) => (float[rows] LOG_PROB)
<int64 zero = {0}, int64 one = {1}, int64[1] last = {1}, float nothing = {0}>
{
  each = Gather(table, TOKENS)
  shape = Shape(TOKENS)
  end_of_time = Gather(shape, one)
  places = Range(zero, end_of_time, one)
  lengths = Unsqueeze(TOKEN_LENGTH, last)
  is_real = Less(places, lengths)
  real = Where(is_real, each, nothing)
  sum = ReduceSum<keepdims = 0>(real, last)
  LOG_PROB = Add(sum, end)
}
"""
"""As ONNX writes graphs; `table` has what each token gets, and `end` what an end."""

Answer = dict[str, np.ndarray]

# Commands that are tested would inherit to ignore it, as under `nohup make test`. Workers do not inherit the handler.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN or "PYTEST_XDIST_WORKER" in os.environ:
    signal.signal(signal.SIGHUP, lambda *_: None)
# Many tests ask for equal bits, or for the words of a machine without a GPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# PyTorch's threads spin while they wait for one another, and the workers of pytest share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# typer colours the options in its messages where GITHUB_ACTIONS or FORCE_COLOR is set.
os.environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"
# gRPC and urllib would ask a proxy for this machine's own addresses.
os.environ["no_proxy"] = "*"


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
        with held_ports("127.0.0.1", {"http": 0, "grpc": 0, "metrics": 0}) as self._ports:
            pass  # docker takes none that is held
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
            if time.monotonic() > deadline or not self._is_running():
                log = "\n".join(self.log[-40:])
                self.__exit__()
                pytest.fail(f"{self._image} must be ready in {CONTAINER_READY_TIMEOUT_S} s; its log ends:\n{log}")
            time.sleep(1)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["docker", "rm", "--force", self._name], check=False)

    def _is_running(self) -> bool:
        command = ["docker", "container", "inspect", "--format={{.State.Running}}", self._name]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == "true"

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.http_url}/v2/health/ready", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


@pytest.fixture(scope="session")
def write_language_model() -> Callable[..., dict[str, float]]:
    """Writes a neural language model in its smallest form; returns what it gives each character, and "" the end."""
    return _write_language_model


def _write_language_model(
    path: Path,
    alphabet: str,
    case: str = "lower",
    log_prob: Callable[[str], float] | None = None,
    changes: Mapping[str, str] | None = None,
    **metadata: str,
) -> dict[str, float]:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(alphabet.replace(" ", ""))] * 3),
        model_writer=written,
        model_type="char",
        vocab_size=len(set(alphabet) | {" "}) + 3,  # and three marks
        minloglevel=2,
    )
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    pieces = [tokenizer.id_to_piece(i).replace("▁", " ") for i in range(tokenizer.get_piece_size())]
    log_prob = log_prob or (lambda character: -1.0 - ord(character) % 7 / 4)
    table = [log_prob(piece) if len(piece) == 1 else -100.0 for piece in pieces]
    end = math.log(0.25)
    graph = LANGUAGE_MODEL
    for old, new in (changes or {}).items():
        graph = graph.replace(old, new)
    model = onnx.parser.parse_model(graph)
    constants = {"table": np.float32(table), "end": np.float32(end)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items())
    said = {"format": "carnelian-language-model-1", "name": "tiny", "case": case}
    said["tokenizer"] = base64.b64encode(written.getvalue()).decode()
    onnx.helper.set_model_props(model, said | metadata)
    onnx.save(model, path)
    return dict(zip(pieces, table, strict=True)) | {"": end}


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git keeps of the model repository: models of one's own may lie beside the demo's."""
    folder = tmp_path_factory.mktemp("shipped")
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "model_repository"]
    listed = subprocess.run(listing, capture_output=True, text=True, check=False)
    assert listed.returncode == 0, f"the tests must run in a clone that git trusts, but: {listed.stderr}"
    for name in listed.stdout.split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder / "model_repository"


@pytest.fixture(scope="session")
def make_server() -> Callable[..., Server]:
    """Makes a server of a repository, on free ports, for tests that start one of their own."""
    return functools.partial(Server, http_port=0, grpc_port=0, metrics_port=0)


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, shipped: Path, make_server: Callable[..., Server]
) -> Iterator[Server | ContainerServer]:
    """A server on a copy of the model repository; `.grpc_url`, `.http_url`, `.metrics_url`, `.log`."""
    image = request.config.getoption("--triton-image")
    if image:
        with ContainerServer(shipped, image) as running:
            yield running
    else:
        with make_server(shipped) as running:
            yield running


class Models:
    """Every model of a server, stages included, as a function of arrays."""

    def __init__(self, client: triton.InferenceServerClient) -> None:
        self.client = client
        self._sent: collections.Counter[str] = collections.Counter()
        self._arrival = threading.Condition()

    def infer(
        self,
        model: str,
        *,
        outputs: Sequence[str] = (),
        parameters: Mapping[str, Any] | None = None,
        request_id: str = "",
        timeout: int | None = None,
        **tensors: np.ndarray,
    ) -> Answer:
        """Sends one request, which may wait for `timeout` microseconds; returns every output, or those asked for."""
        self._sent[model] += 1
        wanted = [triton.InferRequestedOutput(name) for name in outputs] or None
        options = {"parameters": parameters, "request_id": request_id, "timeout": timeout}
        return _outputs(
            self.client.infer(model, _inputs(tensors), outputs=wanted, client_timeout=ANSWER_TIMEOUT_S, **options)
        )

    def infer_at_once(self, model: str, requests: Sequence[Mapping[str, np.ndarray]]) -> list[Answer | Exception]:
        """Sends all requests before it takes an answer; returns answers or errors in the order of the requests."""
        self._sent[model] += len(requests)
        answers: dict[int, Answer | Exception] = {}
        with self._arrival:
            for position, tensors in enumerate(requests):
                self.client.async_infer(model, _inputs(tensors), functools.partial(self._keep, answers, position))
            assert self._arrival.wait_for(lambda: len(answers) == len(requests), ANSWER_TIMEOUT_S)
        return [answers[position] for position in range(len(requests))]

    def _keep(self, answers: dict[int, Any], position: int, result: Any, error: Exception | None) -> None:
        with self._arrival:
            answers[position] = error or _outputs(result)
            self._arrival.notify()

    def executions(self, model: str) -> int:
        """Returns how many batches the model has run, counting all that was sent from here."""
        deadline = time.monotonic() + 30  # Triton counts a request after it has answered it
        while True:
            statistics = self.client.get_inference_statistics(model).model_stats[0]
            counted = statistics.inference_stats.success.count + statistics.inference_stats.fail.count
            if counted >= self._sent[model] or time.monotonic() > deadline:
                return statistics.execution_count
            time.sleep(0.02)


def _inputs(tensors: Mapping[str, np.ndarray]) -> list[triton.InferInput]:
    inputs = []
    for name, array in tensors.items():
        inputs.append(triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def _outputs(result: triton.InferResult) -> Answer:
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


@pytest.fixture(scope="session")
def connect() -> Iterator[Callable[[str], Models]]:
    """Connects to the models of a server by its gRPC URL; the connections are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda url: Models(stack.enter_context(triton.InferenceServerClient(url)))


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Runs a command in this process: `call(main, *words)` returns its status, output, and errors with its log."""

    def run(main: Callable[[], None], *words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", [main.__module__, *map(str, words)])
        capsys.readouterr()
        caplog.clear()
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err + caplog.text

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield run
    for number, handler in handlers.items():  # commands set their own
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def stubs_of() -> Callable[[Server | ContainerServer], dict[str, psutil.Process]]:
    """Finds the processes of a server's Python instances, by the instances' names."""

    def find(server: Server | ContainerServer) -> dict[str, psutil.Process]:
        if isinstance(server, ContainerServer):
            pytest.skip("the server is in a container, where its processes cannot be seen")
        stubs = {}
        for child in psutil.Process(server.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended
                if (name := find_instance(child.cmdline())) is not None:
                    stubs[name] = child
        return stubs

    return find


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    """Waits until `holds()` is true, and fails where it is not in time."""

    def wait(holds: Callable[[], Any], timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"this must hold within {timeout_s} s"
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def write_rows() -> Callable[[Path, Iterable[Mapping[str, Any]]], Path]:
    """Writes a manifest, or another file of JSON lines; returns its path."""

    def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture(scope="session")
def read_rows() -> Callable[[Path], list[dict[str, Any]]]:
    """Reads a file of JSON lines."""
    return lambda path: list(map(json.loads, path.read_text().splitlines()))


@pytest.fixture
def mount_tmpfs(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a file system in memory, `mount_tmpfs("size=8k")` a small one; returns its folder."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def run(options: str = "size=50%") -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        return folder

    yield run
    if folder.is_mount():
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def room():
    """Within `room(n)` no file can grow beyond n bytes: to write more fails as on a full disk."""

    @contextlib.contextmanager
    def limit(num_bytes):
        most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, most[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, most)

    return limit


NOBODY = 65534


@pytest.fixture
def everyones() -> Iterator[Path]:
    """A folder that every user may reach and change."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)
        Path(folder).chmod(0o700)


@pytest.fixture
def another_user() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Root may read and write anywhere, so that its tests do this part as another user."""

    @contextlib.contextmanager
    def another_user() -> Iterator[None]:
        is_root = os.getuid() == 0
        if is_root:
            os.setresuid(NOBODY, NOBODY, 0)
        try:
            yield
        finally:
            if is_root:
                os.setresuid(0, 0, 0)

    return another_user
