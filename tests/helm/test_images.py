"""The Dockerfiles: hadolint, what they copy and install, and that the chart starts what they hold."""

import ast
import importlib.metadata
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from carnelian_serving.environment import FEW_THREADS, KEPT_MEMORY
from carnelian_serving.limits import THREAD_STACK_BYTES
from carnelian_serving.triton_options import RESTRICTIONS, trim_key
from packaging.requirements import Requirement

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; mypy brings it
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
IMAGES = sorted(path.parent.name for path in (ROOT / "images").glob("*/Dockerfile"))
# Image -> the distributions that it installs, with their extras; "-": the extra alone.
INSTALLED = {
    "client": {"client": ["audio", "cli"]},
    "perf": {"client": [], "perf": ["sweep"]},
    "serving": {"serving": ["-", "models"]},
    "serving-cpu": {"serving": []},
    "training": {"training": ["gpu"], "export": []},
}
VARIABLES = {**KEPT_MEMORY, **FEW_THREADS}


@pytest.fixture(params=IMAGES)
def image(request) -> str:
    return request.param


@pytest.fixture
def dockerfile(image) -> str:
    return (ROOT / "images" / image / "Dockerfile").read_text()


def pins(image: str) -> dict[str, str]:
    """Package -> version of an image's lock file."""
    text = (ROOT / "images" / image / "requirements.txt").read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.M))


def test_hadolint_is_content(image, find_tool):
    command = [find_tool("hadolint"), str(ROOT / "images" / image / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_user_is_the_chart_s(dockerfile, render):
    context = render().pod["securityContext"]
    assert re.findall(r"^USER (\S+)$", dockerfile, re.M)[-1] == f"{context['runAsUser']}:{context['runAsGroup']}"


def test_the_base_is_an_argument_with_a_version(dockerfile):
    (base,) = re.findall(r"^ARG BASE_IMAGE=(\S+)$", dockerfile, re.M)
    assert re.search(r":\d+\.\d+", base)
    assert set(re.findall(r"^FROM (\S+)", dockerfile, re.M)) == {"${BASE_IMAGE}"}


@pytest.mark.parametrize("name", [*IMAGES, "build"])
def test_every_pin_has_a_hash(name):
    text = (ROOT / "images" / name / "requirements.txt").read_text()
    assert len(pins(name)) == len(re.findall(r"^\S+==\S+.*\\\n +--hash=sha256:", text, re.M)) > 0


def test_the_page_names_the_packages_without_a_fixed_version(image, dockerfile):
    page = (ROOT / "images" / "README.md").read_text()
    for packages in re.findall(r"apt-get install -y --no-install-recommends ([^&]+)", dockerfile):
        assert all(f"`{package}`" in page for package in packages.split()), image


SET_UP = [f"setup/{name}" for name in ("chart-tools", "kenlm", "lock-images", "perf-analyzer")]


@pytest.mark.parametrize("path", [*(f"images/{image}/Dockerfile" for image in IMAGES), *SET_UP])
def test_everything_that_is_installed_has_a_hash_or_is_built_here(path):
    commands = re.findall(r"\bpip\b.* (?:download|install|wheel) (.+)$", (ROOT / path).read_text(), re.M)
    assert commands
    for command in commands:
        ours = "--no-deps --no-build-isolation -w /src/wheels /src/" in command
        assert ours or "--require-hashes" in command or "--no-deps --no-index" in command, command


def test_the_dependencies_have_a_layer_of_their_own_without_pip(image, dockerfile):
    """Files deleted by hand left setuptools and pip's own commands behind."""
    if image == "serving":  # NVIDIA's own environment
        return
    names = "pip" if "setuptools" in pins(image) else "setuptools pip"
    build, _, final = dockerfile.rpartition("\nFROM ")
    dependencies, _, ours = build.partition(f" && /opt/carnelian/bin/pip uninstall -q -y {names}\n")
    copied = [f"COPY {folder} /src/{folder}" for folder in INSTALLED[image]]
    assert [line for line in ours.splitlines() if line.startswith("COPY ")] == copied
    assert not any(line in dependencies for line in copied)
    assert "/opt/carnelian/bin/pip" not in ours
    assert " --root /src/own " in ours
    assert re.findall(r"^COPY --from=build (.+)$", final, re.M) == [
        "/opt/carnelian /opt/carnelian",
        "/src/own/opt/carnelian /opt/carnelian",
    ]
    assert "pip" not in final


def test_arguments_after_the_cpu_image_s_name_come_on_top_of_its_own(tmp_path):
    text = (ROOT / "images" / "serving-cpu" / "Dockerfile").read_text()
    ((name, entry),) = re.findall(r"^(ENTRYPOINT|CMD) (\[.+)$", text, re.M)
    program, *options = json.loads(entry)
    assert (name, program) == ("ENTRYPOINT", "carnelian-serve")
    command = [str(Path(sys.executable).with_name(program)), *options]
    wrong = subprocess.run([*command, "--model=none"], capture_output=True, text=True, check=False)
    assert "/models" in wrong.stderr
    other = subprocess.run([*command, f"--repository={tmp_path}"], capture_output=True, text=True, check=False)
    assert f"{tmp_path} has none" in other.stderr
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("carnelian-serving ")


def normalise(name: str) -> str:
    return re.sub(r"[._]", "-", name.lower())


def read_project(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


def test_the_pins_are_what_the_distributions_ask_for(image):
    locked = pins(image)
    for folder, extras in INSTALLED[image].items():
        project = read_project(folder)
        wanted = [] if "-" in extras else project["dependencies"]
        wanted = wanted + [d for e in extras if e != "-" for d in project["optional-dependencies"][e]]
        for requirement in map(Requirement, wanted):
            name = normalise(requirement.name)
            if not name.startswith("carnelian-"):
                found = locked.get(name)
                assert found, f"images/{image} lacks {requirement}; run setup/lock-images .venv/bin"
                assert requirement.specifier.contains(found), f"images/{image}: {requirement}, locked {found}"


def test_images_with_onnxruntime_send_no_telemetry(image, dockerfile):
    if "onnxruntime" in pins(image):
        assert re.search(r"^ENV (?:.*\\\n)*.*\bORT_DISABLE_TELEMETRY=1\b", dockerfile.rpartition("\nFROM ")[2], re.M)


def test_the_images_are_locked_for_what_they_install():
    script = (ROOT / "setup" / "lock-images").read_text()
    for image, folders in INSTALLED.items():
        arguments = [",".join([folder, *extras]) for folder, extras in folders.items()]
        assert re.search(rf"^lock {image} 3\.\d+ {' '.join(arguments)}$", script, re.M), image


def find_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def test_the_native_image_has_what_the_models_import():
    project = read_project("serving")
    extra = project["optional-dependencies"]["models"]
    assert set(extra) <= set(project["dependencies"])
    distributions = importlib.metadata.packages_distributions()
    has = {normalise(Requirement(line).name) for line in extra}
    for path in ROOT.glob("model_repository/*_ctc/1/**/*.py"):
        for module in find_imports(path):
            needs = {normalise(name) for name in distributions.get(module.partition(".")[0], [])}
            assert not needs or needs & has, (
                f"{path.relative_to(ROOT)} imports {module}: name {' or '.join(sorted(needs))} in the extra `models` "
                "of serving/pyproject.toml as well, and run setup/lock-images .venv/bin"
            )


def test_what_is_copied_exists_and_is_not_ignored(dockerfile):
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignore[1] == "*"
    let_in = [line.removeprefix("!").replace("*", "[^/]+") for line in ignore if line.startswith("!")]
    for line in re.findall(r"^COPY (?!--from)(?:--ch\w+=\S+ )*(.+)$", dockerfile, re.M):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(re.fullmatch(rf"{pattern}(/.*)?", source) for pattern in let_in), f"{source} is ignored"


def test_any_user_may_read_what_is_copied_and_only_root_may_write_it(dockerfile):
    """OpenShift's user is not the image's, and a clone may have any umask."""
    copied = re.findall(r"^COPY (?!--from)(.+)$", dockerfile.rpartition("\nFROM ")[2].partition("USER ")[0], re.M)
    assert all(line.startswith("--chmod=755 ") or line.endswith(" /tmp/") for line in copied), copied


def test_the_chart_names_these_images(render):
    rendered = render(case="jobs")
    pods = [m["spec"]["template"]["spec"] for m in rendered.manifests if m["kind"] in ("Deployment", "Job")]
    used = {c["image"].split(":")[0] for pod in pods for c in pod["containers"]}
    used |= {c["image"].split(":")[0] for c in rendered.one("Pod")["spec"]["containers"]}
    assert used == {"carnelian-serving", "carnelian-training", "carnelian-perf", "carnelian-client"}


def test_commands_of_the_chart_are_in_the_images(render):
    rendered = render(case="jobs")
    assert rendered.server["command"][0] in read_project("serving")["scripts"]
    (sweep,) = rendered.job("-sweep")["containers"]
    commands = set(re.findall(r"\bcarnelian-\w+", " ".join(sweep["command"])))
    assert commands
    assert commands <= read_project("perf")["scripts"].keys()
    assert "torch" in pins("training")  # brings torchrun


@pytest.fixture
def start_tritonserver(tmp_path):
    """Runs a command that starts tritonserver after `ulimit LIMITS`.

    Returns its arguments, the number of files it may open, the KiB of its stacks and its :data:`VARIABLES`.
    """
    program = tmp_path / "tritonserver"
    program.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" "$(ulimit -n)" "$(ulimit -s)" {" ".join(f"${name}" for name in VARIABLES)}\n'
    )
    program.chmod(0o755)

    def start_tritonserver(command, limits="-Sn 1024", **environment):
        command = ["sh", "-c", f'ulimit {limits}; exec "$@"', "sh", *command]
        environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    return start_tritonserver


MAX_FILES = min(2**16, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
LIKE_CARNELIAN_SERVE = [str(MAX_FILES), str(THREAD_STACK_BYTES // 2**10), *VARIABLES.values()]


def test_the_native_image_starts_triton_as_carnelian_serve_does(start_tritonserver):
    text = (ROOT / "images" / "serving" / "Dockerfile").read_text()
    entry, command = (
        json.loads(re.findall(rf"^{name} (\[.+)$", text.replace("\\\n", ""), re.M)[-1])
        for name in ("ENTRYPOINT", "CMD")
    )
    assert entry[0] == "/opt/nvidia/nvidia_entrypoint.sh"  # the base image's own, which runs what follows
    variables = dict(re.findall(rf"\b({'|'.join(VARIABLES)})=(\d+)", text))
    (first, *limits), (second, *_) = (start_tritonserver(entry[1:] + command, **variables) for _ in range(2))
    assert limits == LIKE_CARNELIAN_SERVE
    assert first != second  # nobody knows the key
    repository, *closed = first.split()
    assert repository == "--model-repository=/models"
    pattern = r"(--grpc-restricted-protocol|--http-restricted-api)=shared-memory:closed-by-the-image=[0-9a-f-]{36}"
    assert [re.fullmatch(pattern, option)[1] for option in closed] == list(RESTRICTIONS.values())


def test_the_chart_starts_triton_as_carnelian_serve_does(render, start_tritonserver):
    server = render("runtime=native").server
    command = [word.replace("/dev/shm", "/nowhere") for word in server["command"] + server["args"]]
    assert start_tritonserver(command) == [" ".join(server["args"]), *LIKE_CARNELIAN_SERVE]
    own = {name: "2" for name in VARIABLES}  # of the image or of extraEnv
    assert start_tritonserver(command, **own)[3:] == [*own.values()]


def test_the_chart_trims_a_key_as_carnelian_serve_does(render, start_tritonserver):
    server = render("runtime=native").server
    command = [word.replace("/dev/shm", "/nowhere") for word in server["command"]]
    given = [argument.replace("$(CARNELIAN_ADMIN_KEY)", "k $HOME *\r\n") for argument in server["args"]]
    assert start_tritonserver([*command, *given])[0] == " ".join(map(trim_key, given))


@pytest.mark.parametrize(("limits", "files"), [("-Sn 1024; ulimit -Hn 2000", 2000), ("-Sn 70000", 70000)])
def test_a_limit_of_open_files_is_raised_as_far_as_it_goes_and_never_lowered(limits, files, render, start_tritonserver):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < files:
        pytest.skip("the hard limit of this machine is lower")
    command = [word.replace("/dev/shm", "/nowhere") for word in render("runtime=native").server["command"]]
    assert start_tritonserver(command, limits)[1] == str(files)


def test_the_chart_takes_back_the_shared_memory_of_a_container_that_was_killed(render, start_tritonserver, tmp_path):
    shell, option, script, *others = render("runtime=native").server["command"]
    left, other = (tmp_path / name for name in ("triton_python_backend_shm_region_1", "other"))
    left.touch()
    other.touch()
    start_tritonserver([shell, option, script.replace("/dev/shm", str(tmp_path)), *others])
    assert not left.exists()
    assert other.exists()
