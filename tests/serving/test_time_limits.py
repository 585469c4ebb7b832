"""How long the launcher waits for models that start or end slowly."""

import subprocess

import numpy as np
import pytest
from carnelian_serving.errors import ServerError
from tritonclient import grpc as triton

CONFIG = """
backend: "python"
max_batch_size: 1
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
instance_group { kind: KIND_CPU }
"""
SLEEPER = """
import pathlib, time


class TritonPythonModel:
    def initialize(self, args):
        time.sleep({start_s})

    def execute(self, requests):
        pathlib.Path(__file__).with_name("busy").touch()
        time.sleep(60)
"""


@pytest.fixture
def sleeper(tmp_path, add_model, make_server):
    """Makes a server of a model that takes so long to start, and a minute to answer."""

    def sleeper(start_s, **options):
        add_model(tmp_path / "models", "sleeper", CONFIG, {"model.py": SLEEPER.format(start_s=start_s)})
        return make_server(tmp_path / "models", exit_timeout_s=1, **options)

    return sleeper


def test_models_that_are_not_ready_in_time_are_told(sleeper):
    server = sleeper(60, ready_timeout_s=3)
    with pytest.raises(ServerError, match=r"must be ready within 3 s, but are not; .*--start-timeout.*log:\n"):
        server.start()
    with pytest.raises(ServerError, match="must be started first"):
        assert server.pid


def test_the_command_waits_as_long_as_it_is_told(sleeper, command_line):
    command = [*command_line, f"--repository={sleeper(60).repository}", "--start-timeout=1", "--exit-timeout=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert " must be ready within 1 s, but are not; " in done.stderr


def test_a_server_that_does_not_end_in_time_is_killed_and_that_is_told(sleeper, wait_until):
    log = []
    with sleeper(0, on_log=log.append) as server:
        tensor = triton.InferInput("IN", [1, 1], "INT32")
        tensor.set_data_from_numpy(np.zeros((1, 1), np.int32))
        with triton.InferenceServerClient(server.grpc_url) as client:
            client.async_infer("sleeper", [tensor], callback=lambda result, error: None)
            wait_until((server.repository / "sleeper" / "1" / "busy").exists)
            server.stop()
    (told,) = [line for line in log if "was killed" in line]
    assert "6 s after it was asked to end; what its models were at is lost (`--exit-timeout` gives them longer)" in told
