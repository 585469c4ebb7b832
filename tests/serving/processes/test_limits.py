"""What the kernel lets a server take."""

import http.client
import json
import resource
from pathlib import Path

import pytest
from carnelian_serving.limits import OPEN_FILES, num_refused_threads, raised_limits


def test_a_server_reports_to_nobody_and_may_open_many_files(cut_repository, make_server):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    try:
        with make_server(cut_repository) as server:
            process = Path(f"/proc/{server.pid}")
            environment = (process / "environ").read_bytes().split(b"\0")
            assert {b"ORT_DISABLE_TELEMETRY=1", b"OPENBLAS_NUM_THREADS=1"} <= set(environment)
            (line,) = (line for line in (process / "limits").read_text().splitlines() if "open files" in line)
            assert int(line.split()[3]) == min(OPEN_FILES, limits[1])
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_large_body_that_curl_calls_a_form_does_not_end_the_server(cut_repository, make_server):
    limits = resource.getrlimit(resource.RLIMIT_STACK)
    with make_server(cut_repository) as server:
        connection = http.client.HTTPConnection(server.http_url, timeout=30)
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", "/v2/models/cut/infer", bytes(24_000_000), form)
        answer = connection.getresponse()
        assert (answer.status, "error" in json.loads(answer.read())) == (500, True)
        connection.close()
    assert resource.getrlimit(resource.RLIMIT_STACK) == limits


def test_stacks_are_left_as_they_are_where_address_space_is_limited():
    stack, space = resource.getrlimit(resource.RLIMIT_STACK), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**46, space[1]))
    try:
        with raised_limits():
            assert resource.getrlimit(resource.RLIMIT_STACK) == stack
    finally:
        resource.setrlimit(resource.RLIMIT_AS, space)


def test_a_limit_of_open_files_that_is_higher_already_is_kept(monkeypatch):
    monkeypatch.setattr("carnelian_serving.limits.OPEN_FILES", 64)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limits[0] > 64
    with raised_limits():
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/a.slice/b:c", "a.slice/b:c/pids.events"),
        ("0::/a.slice/b:c", "a.slice/pids.events.local"),
        ("0::/", "pids.events"),
        ("9:name=systemd:/\n8:pids:/docker/1\n0::/", "pids/docker/1/pids.events"),
        ("4:memory:/a\n8:pids:/docker/1", "pids/pids.events"),
    ],
)
def test_threads_that_a_cgroup_was_refused_are_counted(tmp_path, monkeypatch, own, file):
    monkeypatch.setattr("carnelian_serving.cgroups.OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr("carnelian_serving.cgroups.GROUPS", tmp_path)
    assert num_refused_threads() == 0
    (tmp_path / "own").write_text(f"{own}\n")
    assert num_refused_threads() == 0
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("max 3\n")
    assert num_refused_threads() == 3


def test_threads_that_others_in_a_cgroup_were_refused_are_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("carnelian_serving.cgroups.OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr("carnelian_serving.cgroups.GROUPS", tmp_path)
    (tmp_path / "own").write_text("0::/a\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "pids.events").write_text("max 3\n")
    (tmp_path / "a" / "pids.events.local").write_text("max 1\n")
    assert num_refused_threads() == 1
