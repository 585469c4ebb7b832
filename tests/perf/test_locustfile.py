"""The locustfile under the real Locust, on the real server."""

import importlib.util
import json
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import soundfile

ROOT = Path(__file__).parents[2]
ENDS_ONCE_ANSWERED = """
import gevent
from locust import events

@events.init.add_listener
def listen(environment, **_):
    environment.events.request.add_listener(lambda **_: gevent.spawn(environment.runner.quit))
"""

pytestmark = pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="needs carnelian-perf[locust]")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--manifest", "nowhere.jsonl"], "--manifest: a manifest must be a file, but nowhere.jsonl"),
        (["--host", "localhost"], "--host: `url` must be the host:port of Triton's gRPC endpoint"),
        (["--pause", "nan"], "--pause must be seconds, 0 or more, but is nan"),
        (["--pause=-1"], "--pause must be seconds, 0 or more, but is -1.0"),
    ],
)
def test_wrong_options_end_it_before_any_user(options, reason):
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "perf/locustfile.py"), "--headless"]
    options = ["-t", "3s", "--host", "localhost:9", *options]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(reason)


def test_web_page_does_not_ask_for_clips_that_are_there_already():
    code = (
        "import sys; from locust.util.load_locustfile import load_locustfile; load_locustfile(sys.argv[1]);"
        "from locust.argument_parser import ui_extra_args_dict; print(*sorted(ui_extra_args_dict([])))"
    )
    command = [sys.executable, "-c", code, str(ROOT / "perf/locustfile.py")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["model", "pause"]


@pytest.fixture
def run_until_answered(server, tmp_path):
    """Runs users on the server until one of them is answered."""

    def run(*options):
        (tmp_path / "end.py").write_text(ENDS_ONCE_ANSWERED)
        files = f"{tmp_path / 'end.py'},{ROOT / 'perf/locustfile.py'}"
        command = [sys.executable, "-m", "locust", "-f", files, "--headless", "--json", "--host", server.grpc_url]
        load = ["-t", "60s", "--stop-timeout", "20"]
        return subprocess.run([*command, *load, *options], capture_output=True, text=True, timeout=120, check=False)

    return run


def test_a_clip_of_hardly_more_than_the_longest_is_in_its_row(run_until_answered, tmp_path):
    soundfile.write(tmp_path / "long.wav", np.zeros(16_100 * 60), 16_000)
    (tmp_path / "m.jsonl").write_text('{"audio_filepath": "long.wav", "duration": 60.0}')
    result = run_until_answered("-u", "1", "--manifest", str(tmp_path / "m.jsonl"))
    assert {row["name"] for row in json.loads(result.stdout)} == {"up to 60 s"}, result.stderr


def test_a_run_is_as_long_as_it_was_told_to_be(server, tmp_path):
    busy = "from time import perf_counter as now\nfrom locust import events\n@events.init.add_listener\n"
    busy += "def work(**_):\n    end = now() + 6\n    while now() < end:\n        pass\n"
    (tmp_path / "busy.py").write_text(busy)
    files = f"{tmp_path / 'busy.py'},{ROOT / 'perf/locustfile.py'}"
    command = [sys.executable, "-m", "locust", "-f", files, "--headless", "-u", "1", "-t", "6s", "--stop-timeout", "20"]
    command += ["--host", f"http://{server.grpc_url}/", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    began, ended = (
        datetime.fromisoformat(".".join(re.search(rf"\[(.*),(\d+)\] .*{words}", result.stderr).groups()))
        for words in ("All users spawned", "limit reached")
    )
    assert (ended - began).total_seconds() >= 1  # of 6; none are left if the time that is lost before counts


def test_users_are_answered_and_the_process_ends(run_until_answered):
    result = run_until_answered("-u", "2", "-r", "2")
    assert result.returncode == 0, result.stderr
    assert "audio seconds per second" in result.stderr
    rows = json.loads(result.stdout)
    assert sum(row["num_requests"] for row in rows) > 0
    assert sum(row["num_failures"] for row in rows) == 0
    assert {row["name"] for row in rows} <= {"up to 4 s", "up to 8 s", "up to 16 s"}
