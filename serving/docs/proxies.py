"""Measures servers behind nginx and HAProxy: python serving/docs/proxies.py.

Starts two servers with the demo model, and before them each proxy with its configuration in proxies.md. Writes
proxies.json beside this file and prints the tables of that page.
"""

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import soundfile
from carnelian_client import TLS, CarnelianClient, RetryPolicy, Transcript
from carnelian_perf import raw_file
from carnelian_perf.machine import measure_busy_cores
from carnelian_serving.addresses import held_ports
from carnelian_serving.launcher import Server

PAGE = Path(__file__).resolve().with_suffix(".md")
ROOT = PAGE.parents[2]
PROXIES = ("nginx", "haproxy")
CLIP = ROOT / "demo" / "clips" / "garden.opus"
START_TIMEOUT_S = 20
CHECKED_S = 5
"""After this time HAProxy has given up a server whose checks fail, two of them, each after a second at most."""
WINDOW = r".*(http2_body_preread_size|initial-window-size).*\n"
"""The lines that let a client send more before it waits for the proxy."""
ROUND_TRIP_S = 0.1
UPLOADS = {"1.9 MB": (16_000, 1, "PCM_16"), "16.7 MB": (48_000, 2, "PCM_24")}
"""58 s of noise as WAV: rate in Hz, channels and samples."""
ATTEMPTS = RetryPolicy().num_attempts
CONCURRENCY = 8


def find(program: str) -> str:
    """Return where a proxy is installed.

    Raises:
        RuntimeError: it is not.
    """
    folders = "/usr/local/sbin:/usr/sbin:/usr/local/bin:/usr/bin"  # a user's $PATH may lack the first two
    path = shutil.which(program, path=folders)
    if path is None:
        raise RuntimeError(f"{program} must be in one of {folders}, but is not: `apt-get install {program}`")
    return path


class Proxy:
    """nginx or HAProxy, running with the page's configuration before two servers; a context manager."""

    def __init__(self, program: str, servers: Sequence[Any], folder: Path, without: str = "") -> None:
        """Write its files into a folder; `without` matches lines of the configuration to leave out."""
        self.program = program
        self.folder = folder
        self.certificate = folder / "speech.crt"
        with held_ports("127.0.0.1", {"grpc": 0}) as ports:
            self.port = ports["grpc"]
        self.file = folder / "configuration"
        private_key = folder / "speech.key"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
        command += [
            "-addext",
            "subjectAltName=DNS:localhost",
            "-keyout",
            str(private_key),
            "-out",
            str(self.certificate),
        ]
        subprocess.run(command, check=True, capture_output=True)
        (folder / "speech.pem").write_text(self.certificate.read_text() + private_key.read_text())
        self.file.write_text(self._configuration(servers, without))

    def __enter__(self) -> "Proxy":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *options: str) -> None:
        """Start it, and wait until it takes connections."""
        own = ["-p", self.folder] if self.program == "nginx" else ["-db"]
        option = "-c" if self.program == "nginx" else "-f"
        log = self.folder / "log"
        with log.open("a") as sink:
            command = [find(self.program), *own, option, self.file, *options]
            self.process = subprocess.Popen(command, stdout=sink, stderr=sink)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                self.process.wait()
                raise RuntimeError(f"{self.program} must take connections, but: {log.read_text()}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it at once."""
        self.process.terminate()
        self.process.wait()

    def reload(self) -> None:
        """Let new processes read the configuration; the old ones end with their connections."""
        if self.program == "nginx":
            self.process.send_signal(signal.SIGHUP)
        else:
            old = self.process
            try:
                self.start("-sf", str(old.pid))
                old.wait(START_TIMEOUT_S)
            finally:
                old.kill()  # where the new one has not ended it

    def take_out(self, server: Any) -> None:
        """Give the second server no more requests, as the page says.

        Raises:
            RuntimeError: the proxy still has it.
        """
        if self.program == "nginx":
            text, count = re.subn(rf"(server {re.escape(server.grpc_url)})\b", r"\1 down", self.file.read_text())
            if count != 1:
                raise RuntimeError(f"the configuration must name {server.grpc_url} once, but does {count} times")
            self.file.write_text(text)
            self.reload()
            return
        with socket.socket(socket.AF_UNIX) as stats:
            stats.connect(str(self.folder / "stats"))
            stats.sendall(b"set server speech_grpc/b state drain\n")
            if said := stats.recv(1024).decode().strip():
                raise RuntimeError(f"HAProxy must take out speech_grpc/b, but says: {said}")

    def _configuration(self, servers: Sequence[Any], without: str) -> str:
        (text,) = re.findall(rf"^```{self.program}\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
        text = re.sub(without, "", text) if without else text
        for i, server in enumerate(servers, 1):
            http_port = server.http_url.rpartition(":")[2]
            text = re.sub(rf"10\.0\.0\.{i}:8001(.* port) 8000", rf"{server.grpc_url}\1 {http_port}", text)
            text = text.replace(f"10.0.0.{i}:8001", server.grpc_url).replace(f"10.0.0.{i}:8000", server.http_url)
        text = re.sub(r"/etc/(nginx|haproxy)/", f"{self.folder}/", text)
        if self.program == "haproxy":
            text = text.replace("global\n", f"global\n  stats socket {self.folder}/stats level admin\n", 1)
            return text.replace("bind :443", f"bind 127.0.0.1:{self.port}")
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        own = "".join(f"{kind}_temp_path {self.folder}/{kind};" for kind in kinds)
        text = text.replace("http {", f"http {{ access_log off; {own}", 1)
        text = text.replace("listen 443", f"listen 127.0.0.1:{self.port}")
        return f"daemon off; user root; pid {self.folder}/nginx.pid; error_log stderr; events {{ }}\n{text}"

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


def open_far_port(port: int) -> int:
    """Open a port that leads to another one, half of :data:`ROUND_TRIP_S` away in each direction, and return it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            here, there = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
            for source, target in ((here, there), (there, here)):
                target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=carry, args=(source, target), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def carry(source: socket.socket, target: socket.socket) -> None:
    """Deliver what comes from one socket to another, all of it equally late."""
    under_way: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

    def deliver() -> None:
        with suppress(OSError):
            while True:
                due, data = under_way.get()
                time.sleep(max(due - time.monotonic(), 0))
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)

    threading.Thread(target=deliver, daemon=True).start()
    with suppress(OSError):
        while data := source.recv(1 << 16):
            under_way.put((time.monotonic() + ROUND_TRIP_S / 2, data))
    under_way.put((time.monotonic() + ROUND_TRIP_S / 2, b""))


def measure_uploads(port: int, tls: TLS | None) -> dict[str, float]:
    """Seconds from a client that is far from a port to its transcript, by the size of the upload."""
    seconds = {}
    with CarnelianClient(f"localhost:{open_far_port(port)}", tls=tls) as client:
        for name, (rate, channels, subtype) in UPLOADS.items():
            wav = io.BytesIO()
            noise = np.random.default_rng(0).normal(0, 0.05, (58 * rate, channels))
            soundfile.write(wav, noise, rate, format="WAV", subtype=subtype)
            client.transcribe(CLIP)  # connects
            start = time.perf_counter()
            client.transcribe(wav.getvalue())
            seconds[name] = round(time.perf_counter() - start, 2)
    return seconds


def count_failures(
    proxy: Proxy, server: Server, event: Callable[[Proxy, Server], None], attempts: int
) -> dict[str, int]:
    """Send clips from 2 s before an event until 2 s after it, and count those that fail; a failed event is raised."""
    is_over = threading.Event()

    def clips() -> Iterator[Path]:
        while not is_over.is_set():
            yield CLIP

    def happen() -> None:
        try:
            time.sleep(2)
            event(proxy, server)
            time.sleep(2)
        finally:
            is_over.set()

    tls, retry = TLS(ca_path=proxy.certificate), RetryPolicy(num_attempts=attempts)
    with CarnelianClient(f"localhost:{proxy.port}", tls=tls, retry=retry) as client, ThreadPoolExecutor() as executor:
        happening = executor.submit(happen)
        sent = client.transcribe_many(clips(), concurrency=CONCURRENCY)
        outcomes = [isinstance(outcome, Transcript) for outcome in sent]
        happening.result()
    return {"clips": len(outcomes), "failed": outcomes.count(False)}


def take_out_and_stop(proxy: Proxy, server: Server) -> None:
    """Stop the server 2 s after the proxy has been told to spare it."""
    proxy.take_out(server)
    time.sleep(2)
    server.stop()


def restart(proxy: Proxy, _: Server) -> None:
    """Stop the proxy, and start it again a second later."""
    proxy.stop()
    time.sleep(1)
    proxy.start()


EVENTS: tuple[tuple[str, Callable[[Proxy, Server], None], int], ...] = (
    ("a server is taken out, and stopped 2 s later", take_out_and_stop, ATTEMPTS),
    ("a server is stopped", lambda _, server: server.stop(), ATTEMPTS),
    ("a server is stopped; 20 attempts", lambda _, server: server.stop(), 20),
    ("a server is killed", lambda _, server: os.kill(server.pid, signal.SIGKILL), ATTEMPTS),
    ("the proxy reloads", lambda proxy, _: proxy.reload(), ATTEMPTS),
    ("the proxy is away for a second", restart, ATTEMPTS),
    ("the proxy is away for a second; 20 attempts", restart, 20),
)
"""What happens while clips go through, by its name on the page, and how often the client tries."""


def describe_server() -> Server:
    """Describe a server whose ports stay the same when it is started again."""
    with held_ports("127.0.0.1", {"http": 0, "grpc": 0, "metrics": 0}) as ports:
        pass
    return Server(
        ROOT / "model_repository",
        models=["quartznet_demo"],
        http_port=ports["http"],
        grpc_port=ports["grpc"],
        metrics_port=ports["metrics"],
    )


@contextmanager
def running(program: str, servers: Sequence[Server], without: str = "") -> Iterator[Proxy]:
    """Run a proxy that has checked its servers."""
    with tempfile.TemporaryDirectory() as folder, Proxy(program, servers, Path(folder), without) as proxy:
        time.sleep(CHECKED_S)
        yield proxy


def main() -> None:
    """Measure, write proxies.json and print the tables."""
    busy, origin = measure_busy_cores(), raw_file.describe_origin()
    for program in PROXIES:
        said = subprocess.run([find(program), "-v"], capture_output=True, text=True, check=True)
        (origin["versions"][program],) = re.findall(r"ersion\D+([\d.]+\d)", (said.stdout + said.stderr).split("\n")[0])
    uploads: list[dict[str, Any]] = []
    happened: list[dict[str, Any]] = []
    a, b = describe_server(), describe_server()
    with a, b:
        port = int(a.grpc_url.rpartition(":")[2])
        uploads.append({"proxy": "none", "window": "", **measure_uploads(port, None)})
        for program in PROXIES:
            for window, without in (("default", WINDOW), ("1 MiB", "")):
                with running(program, (a, b), without) as proxy:
                    seconds = measure_uploads(proxy.port, TLS(ca_path=proxy.certificate))
                uploads.append({"proxy": program, "window": window, **seconds})
        for name, event, attempts in EVENTS:
            row: dict[str, Any] = {"event": name}
            for program in PROXIES:
                with running(program, (a, b)) as proxy:
                    row[program] = count_failures(proxy, b, event, attempts)
                b.stop()
                b.start()
            happened.append(row)
    result = {
        **origin,
        "command": "python serving/docs/proxies.py",
        "others_busy_cores": busy,
        "round_trip_s": ROUND_TRIP_S,
        "uploads_s": uploads,
        "events": happened,
    }
    raw_file.write(PAGE.with_suffix(".json"), result)
    for row in uploads:
        proxy, window, *seconds = row.values()
        cells = (proxy.replace("haproxy", "HAProxy"), window, *(f"{each:.2f}" for each in seconds))
        print(f"| {' | '.join(cells)} |")
    for row in happened:
        counts = (row[program] for program in PROXIES)
        print(f"| {row['event']} | " + " | ".join(f"{each['failed']} of {each['clips']}" for each in counts) + " |")


if __name__ == "__main__":
    main()
