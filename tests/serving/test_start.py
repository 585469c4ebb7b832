"""What keeps a server from starting, each told with what to do."""

import errno
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from carnelian_serving.addresses import find_address, first_on, held_ports
from carnelian_serving.errors import ServerError
from carnelian_serving.installation import (
    find_installation,
)
from carnelian_serving.shared_memory import check_room, describe_shortage


@pytest.fixture
def run_command(command_line):
    """Runs `carnelian-serve` to its end."""
    return lambda *arguments: subprocess.run(
        [*command_line, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_word_that_is_no_option_of_tritonserver_is_wrong_use(cut_repository, run_command):
    done = run_command(str(cut_repository))
    assert done.returncode == 2
    assert "must begin with" in done.stderr


def test_a_failure_is_not_told_on_the_standard_output_where_the_standard_error_is_closed(command_line):
    command = ["sh", "-c", 'exec "$0" "$@" 2>&-', *command_line, "--repository=nowhere"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_terminals_encoding_spells_a_path_and_escapes_the_rest(tmp_path, monkeypatch, command_line):
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    command = [*command_line, f"--repository={tmp_path}/mod els ünï ž"]
    done = subprocess.run(command, capture_output=True, check=False)
    spelt = "mod els ünï \\u017e".encode("latin-1")
    assert [spelt in line for line in done.stderr.splitlines()] == [True, True]


def test_a_value_apart_from_its_option_is_told_how_to_write_both(run_command):
    done = run_command("--", "--grpc-keepalive-time", "30000")
    assert done.returncode == 2
    assert "write `--grpc-keepalive-time=30000`" in " ".join(done.stderr.replace("│", "").split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["grpc-restricted-protocol=trace:a=hunter2"],
        ["--grpc-restricted-protocol", "trace:a=hunter2"],
        ["--http-restricted", "trace:hunter2"],
    ],
)
def test_a_key_in_a_wrong_place_is_not_shown(run_command, arguments):
    done = run_command("--", *arguments)
    assert done.returncode == 2
    assert "restricted" in done.stderr
    assert "hunter2" not in done.stderr


def test_an_empty_path_is_no_repository(run_command):
    done = run_command("--repository=")
    assert done.returncode == 2
    assert "must be a folder, but is empty" in done.stderr


def test_a_taken_port_is_named_with_its_option(cut_repository, run_command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = (f"--repository={cut_repository}", f"--grpc-port={port}")
        result = run_command(*arguments)
    assert result.returncode == 1
    assert f"`--grpc-port` must be a free port, but {port} on 127.0.0.1 cannot be had" in result.stderr
    assert "`--grpc-port 0` takes any" in result.stderr


def test_a_port_that_is_taken_elsewhere_than_was_looked_is_told_in_tritons_words(cut_repository, make_server):
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        server = make_server(cut_repository, grpc_port=port, triton_options=["--grpc-address=127.0.0.2"])
        with pytest.raises(ServerError) as error:
            server.start()
    words = f":\n  failed to start GRPC service: Unavailable - Socket '127.0.0.2:{port}' already in use"
    assert str(error.value).endswith(words)


def test_the_current_folder_holds_no_modules_of_the_models(cut_repository, make_server, tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text("raise RuntimeError('not the backend')")
    monkeypatch.chdir(tmp_path)
    with make_server(cut_repository, triton_options=["--log-file=triton.log"]):
        assert (tmp_path / "triton.log").stat().st_size > 0  # a relative path counts from there all the same


def test_a_second_start_takes_any_port_again(cut_repository, make_server):
    server = make_server(cut_repository)
    with pytest.raises(ServerError, match="must be started first"):
        _ = server.grpc_url
    with server:
        port = int(server.grpc_url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)), server:
        assert not server.grpc_url.endswith(f":{port}")


def test_a_server_says_whether_and_where_it_runs(cut_repository, make_server):
    server = make_server(cut_repository)
    assert repr(server) == f"<Server of {server.repository}, not running>"
    with server:
        assert repr(server) == f"<Server of {server.repository}, at {server.grpc_url}>"
    assert repr(server).endswith("not running>")


def test_ports_must_differ():
    with held_ports("127.0.0.1", {"--http-port": 0}) as ports:
        [port] = ports.values()
        with (
            pytest.raises(ServerError, match=f"`--grpc-port` is {port} as well"),
            held_ports("127.0.0.1", {"--http-port": port, "--grpc-port": port}),
        ):
            pass


def test_nobody_else_is_given_a_port_that_a_server_is_to_have(cut_repository, make_server):
    with held_ports("127.0.0.1", {"--http-port": 0, "--grpc-port": 0, "--metrics-port": 0}) as ports:
        port = ports["--grpc-port"]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        kinds = {option.removeprefix("--").replace("-", "_"): chosen for option, chosen in ports.items()}
        with make_server(cut_repository, **kinds) as server:  # but the server is
            assert server.grpc_url == f"127.0.0.1:{port}"


def test_of_two_starts_at_once_one_is_told_that_its_port_is_taken(cut_repository, make_server):
    with held_ports("127.0.0.1", {"--http-port": 0}) as ports, first_on("127.0.0.1", ports):
        port = ports["--http-port"]
        words = f"`--http-port` must be a free port, but another server that starts will have {port} on 127.0.0.1"
        with pytest.raises(ServerError, match=words):
            make_server(cut_repository, http_port=port).start()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "::x", "192.0.2.1", "a..b", "fe80::1", "fe80::1%lo"])
def test_a_host_that_is_not_this_machine_is_named(host):
    words = f"`--host` must be an address of this machine, but {host} is none: [^(]+$"
    with pytest.raises(ServerError, match=words), held_ports(find_address(host), {"--http-port": 0}):
        pass


def test_a_link_local_address_is_one_with_its_interface():
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.address.startswith("fe80:")
    ]
    if not found:
        pytest.skip("this machine has no link-local address")
    with held_ports(find_address(found[0]), {"--http-port": 0}) as ports:
        assert ports["--http-port"] > 0


@pytest.mark.parametrize(("number", "kind"), [(errno.EPERM, ServerError), (errno.EMFILE, OSError)])
def test_only_a_port_that_is_refused_is_called_taken(monkeypatch, number, kind):
    def refuse(*_):
        raise OSError(number, "words")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(kind, match="words"), held_ports("127.0.0.1", {"--http-port": 0}):
        pass


@pytest.mark.parametrize(
    ("option", "words"),
    [("--nonsense=1", "unrecognized option '--nonsense=1'"), ("--log-verbose=x", 'Bad option: "--log-verbose".')],
)
def test_a_wrong_option_of_tritonserver_is_named(cut_repository, option, words, run_command):
    result = run_command(f"--repository={cut_repository}", "--", option)
    assert result.returncode == 1
    assert f"tritonserver ended with status 1 before it was ready:\n  {words}\n" in result.stderr


def test_the_help_of_tritonserver_is_no_failure_to_start(cut_repository, run_command):
    result = run_command(f"--repository={cut_repository}", "--", "--help")
    assert "  --log-verbose" in result.stderr
    assert result.stderr.endswith(":\n  its options were asked for (`--help`)\n")


def test_too_few_open_files_are_named(cut_repository, command_line):
    command = [*command_line, f"--repository={cut_repository}"]
    limited = ["sh", "-c", 'ulimit -n 40; exec "$0" "$@"', *command]
    result = subprocess.run(limited, capture_output=True, text=True, timeout=60, check=False)
    assert "\n  it ran out of open files; allow more (`ulimit -n`)\n" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--repository=nowhere",), "nowhere is not there"),
        (("--repository=models/cut/config.pbtxt",), "config.pbtxt is a file"),
        (("--repository=models/cut",), "models/cut is a model's own: give the folder that it is in, {root}/models\n"),
        (("--repository=empty",), "must hold at least one model folder"),
        (("--repository=odd",), "name must be of ASCII letters, digits, `_`, `-` and `.`, but 'my model' of"),
        (("--repository=models", "--model=cot"), "'cot' is not there; it has cut"),
    ],
)
def test_a_wrong_repository_is_named(cut_repository, monkeypatch, arguments, words, run_command):
    monkeypatch.chdir(cut_repository.parent)
    Path("empty").mkdir()
    Path("odd/my model").mkdir(parents=True)
    result = run_command(*arguments)
    assert result.returncode == 1
    assert words.replace("{root}", str(Path.cwd())) in result.stderr


def test_a_repository_that_leads_nowhere_is_named(tmp_path, run_command, command_line):
    (tmp_path / "loop").symlink_to("loop")
    result = run_command(f"--repository={tmp_path / 'loop'}")
    assert (result.returncode, "loop leads nowhere" in result.stderr) == (1, True)
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f'cd "{gone}" && rmdir "{gone}" && "{command_line[0]}"'
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, "the working directory must be there" in result.stderr) == (1, True)


@pytest.fixture
def start_script(cut_repository, monkeypatch, make_server):
    """Starts a shell script in place of tritonserver and returns why it did not become ready."""

    def start(script, **options):
        def wrap(scratch):
            binary = scratch / "script"
            binary.write_text(f"#!/bin/sh\n{script}\n")
            binary.chmod(0o755)
            return replace(find_installation(scratch), binary=binary)

        monkeypatch.setattr("carnelian_serving.launcher.find_installation", wrap)
        with pytest.raises(ServerError) as error:
            make_server(cut_repository, **options).start()
        return str(error.value)

    return start


NO_GPU = 'E1126 13:48:34.559668 7384 server.cc:241] "CudaDriverHelper has not been initialized."'


@pytest.mark.parametrize(
    ("signal", "words"),
    [
        ("KILL", "SIGKILL is what the kernel sends where memory has run out"),
        (
            "SEGV",
            "the machine may have paused a second, its clock have jumped, or a model's process been killed, as where "
            "memory has run out",
        ),
    ],
)
def test_a_server_that_is_killed_while_it_loads_is_told_with_what_kills(start_script, signal, words):
    why = start_script(f"echo '{NO_GPU}'; printf 'no UTF-8: \\377\\n'; echo the last line; kill -{signal} $$")
    assert why.startswith(f"tritonserver was ended by SIG{signal} before it was ready:\n  ")
    assert why.endswith(f"{words}\n  last lines of its log:\n  no UTF-8: \ufffd\n  the last line")


NO_THREAD = (
    'E1126 13:45:45.266461 7 backend_model.cc:692] "ERROR: Failed to create instance: RuntimeError: Resource '
    'temporarily unavailable\\n\\nAt:\\n  /lib/nvidia/dali/pipeline.py(1808): deserialize"'
)
OUT_OF_THREADS = (
    "it ran out of threads, processes or memory; allow more (`pids.max` of the container, `ulimit -u`, `-v`, `-d`)"
)


@pytest.mark.parametrize(
    "line",
    [
        "OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 64: Resource temporarily unavailable",
        "terminate called after throwing an instance of 'std::system_error'",
        NO_THREAD,
    ],
)
def test_too_few_threads_are_named(start_script, line):
    assert f":\n  {OUT_OF_THREADS}" in start_script(f"cat <<'END'\n{line}\nEND\nexit 1")


def test_a_library_that_finds_no_place_is_told_what_may_be_the_cause(start_script):
    why = start_script(
        "echo 'ImportError: /lib/libdali_operators.so: failed to map segment from shared object'; exit 1"
    )
    assert ":\n  it could not load a library; allow more address space (`ulimit -v`), or " in why


@pytest.mark.parametrize(
    ("num_refused", "advice"), [((7, 8), OUT_OF_THREADS), ((7, 7), "allow more (`--start-timeout`, `ready_timeout_s`)")]
)
def test_a_server_that_waits_for_a_thread_in_silence_is_told_so(start_script, monkeypatch, num_refused, advice):
    monkeypatch.setattr("carnelian_serving.triton_process.num_refused_threads", iter(num_refused).__next__)
    why = start_script("exec sleep 60", ready_timeout_s=0.1)
    assert f" must be ready within 0.1 s, but are not; {advice}" in why
    assert "`pids.max`" in why
    assert why.endswith("; last lines of the log:\n(none)")


def test_a_server_that_hangs_for_want_of_open_files_is_told_so(start_script):
    line = "[warn] Error from accept() call: Too many open files"
    why = start_script(f"echo '{line}'; exec sleep 60", ready_timeout_s=2)
    assert " but are not; it ran out of open files; allow more (`ulimit -n`); " in why
    assert why.endswith(f"; last lines of the log:\n{line}")


def test_a_server_that_hangs_once_a_model_has_failed_is_ended(start_script, monkeypatch):
    monkeypatch.setattr("carnelian_serving.launcher.FAILED_WHILE_LOADING_S", 0.1)
    why = start_script(f"cat <<'END'\n{NO_THREAD}\nEND\nexec sleep 60")
    assert why == f"every model must load, but one cannot, and tritonserver hangs:\n  {OUT_OF_THREADS}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "every model must load, but one cannot, and tritonserver is ready without it only with `--strict-readin"),
        (["--strict-readiness=false"], "must be ready within 2 s, but are not"),
    ],
    ids=["strict", "not strict"],
)
def test_a_server_that_is_not_ready_without_a_model_is_ended(start_script, monkeypatch, options, words):
    monkeypatch.setattr("carnelian_serving.launcher.FAILED_WHILE_LOADING_S", 0.1)
    script = f"cat <<'END'\n{NO_THREAD}\nEND\nexec sleep 60"
    why = start_script(script, triton_options=["--exit-on-error=false", *options], ready_timeout_s=2)
    assert words in why


def test_a_server_that_hangs_as_it_gives_up_is_ended(start_script, monkeypatch):
    """Where a log file takes the rest of the log, this line is all that is seen."""
    monkeypatch.setattr("carnelian_serving.triton_process.TOLD_END_S", 0.1)
    failed = "error: creating server: Internal - failed to load all models"
    why = start_script(f"echo '{failed}'\nexec sleep 60")
    assert why == f"tritonserver ended with status 1 before it was ready:\n  {failed}"


@pytest.mark.parametrize(
    ("option", "words"), [("--log-format=ISO8601", "model 'typo' could not be"), ("--log-file={}", "its log is in {}")]
)
def test_the_reason_is_found_in_any_log(cut_repository, add_model, tmp_path, option, words, run_command):
    log = tmp_path / "triton.log"
    add_model(cut_repository, "typo", "max_batch_sise: 4", {})
    result = run_command(f"--repository={cut_repository}", "--", option.format(log))
    assert (result.returncode, words.format(log) in result.stderr) == (1, True)


def test_the_command_imports_nothing_heavy():
    heavy = "{'numpy', 'onnxruntime', 'nvidia.dali', 'pytriton'} & set(sys.modules)"
    script = f"import sys, carnelian_serving.cli; sys.exit(str({heavy}) if {heavy} else 0)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_wrong_use_ends_with_status_2(run_command):
    assert run_command("--log-level=loud").returncode == 2
    assert run_command("--threads=0").returncode == 2


def test_little_shared_memory_is_refused_with_the_remedy():
    with pytest.raises(ServerError, match=r"but 8\.0 MiB are free; in a container, start it with --shm-size"):
        check_room(8 * 2**20)


def test_shared_memory_that_long_clips_would_fill_is_said(cut_repository, monkeypatch, make_server):
    log = []
    monkeypatch.setattr("carnelian_serving.launcher.find_free_bytes", lambda: 48 * 2**20)  # one instance needs 50
    with make_server(cut_repository, on_log=log.append):
        pass
    assert any("/dev/shm should have 50 MiB for 1 Python-based instances" in line for line in log)
    assert describe_shortage(350 * 2**20, 7) == ""


def test_shared_memory_that_is_read_only_is_named_with_the_remedy(
    cut_repository, mount_tmpfs, monkeypatch, make_server
):
    monkeypatch.setattr("carnelian_serving.shared_memory.SHARED_MEMORY", mount_tmpfs("ro"))
    words = r"^the server must be able to write to .*, but is not \(Read-only file system\); mount a tmpfs"
    with pytest.raises(ServerError, match=words):
        make_server(cut_repository).start()
