"""Finds `tritonserver`, and assembles the folders that it needs before it can start.

Two kinds of installation are known. A *native* one (`/opt/tritonserver`, as in the NGC container) brings its
own C++ backends and is used as it is. The *wheel* `nvidia-pytriton` brings the same binary with the Python
backend alone, so a backend directory is assembled for it, in which `dali` and `onnxruntime` are ours.
"""

from __future__ import annotations

import ctypes.util
import errno
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from carnelian_serving.errors import ServerError

NATIVE_ROOT = Path("/opt/tritonserver")
NATIVE_BACKENDS = ("dali", "onnxruntime", "python")
PYTHON_BASED_BACKENDS = ("dali", "onnxruntime")
WHEEL = "nvidia-pytriton"

_HERE = Path(__file__).parent


class InstallationError(ServerError):
    """A part of Triton is missing; the message says which, and how to get it."""


@dataclass(frozen=True)
class Installation:
    """A `tritonserver` that can be started."""

    binary: Path
    """The path of the executable."""
    backend_directory: Path | None
    """The value of `--backend-directory`; None for the installation's own."""
    environment: Mapping[str, str]
    """Variables to set for the server and its stubs."""

    @property
    def is_native(self) -> bool:
        """Whether the backends are Triton's own, written in C++."""
        return self.backend_directory is None


def find_installation(scratch: Path) -> Installation:
    """Return the native installation if there is a whole one, else the wheel's, made ready in `scratch`.

    Args:
        scratch: An empty folder that outlives the server; the backend directory is assembled in it.

    Raises:
        InstallationError: Neither is there, or the wheel lacks something for this Python.
    """
    native = find_native(shutil.which("tritonserver"), NATIVE_ROOT)
    if native is not None:
        return Installation(native, None, {})
    return prepare_wheel(scratch)


def find_native(on_path: str | None, root: Path) -> Path | None:
    """Return the `tritonserver` whose installation holds every native backend that the repository names.

    Args:
        on_path: What `PATH` says, or None.
        root: Where the container keeps Triton.
    """
    candidates = [Path(on_path).resolve()] if on_path else []
    candidates.append(root / "bin" / "tritonserver")
    for binary in candidates:
        backends = binary.parent.parent / "backends"
        libraries = [backends / name / f"libtriton_{name}.so" for name in NATIVE_BACKENDS]
        if binary.is_file() and all(library.is_file() for library in libraries):
            return binary
    return None


def prepare_wheel(scratch: Path) -> Installation:
    """Assemble the wheel's backend directory in `scratch` and return what starts it.

    Raises:
        InstallationError: The wheel, its stub for this Python, libpython, or room in TMPDIR is missing.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    package = find_wheel()
    _check_surroundings(scratch)
    triton = package / "tritonserver"
    backends = scratch / "backends"
    with _room_explained(scratch.parent):
        _copy_backends(backends, triton, _find_stub(triton, version))
    libraries = scratch / "lib"
    libraries.mkdir()
    libpython = find_libpython(version, library_directories())
    if libpython is not None:
        (libraries / libpython.name).symlink_to(libpython)
    library_path = [libraries, package.parent / "nvidia_pytriton.libs", os.environ.get("LD_LIBRARY_PATH", "")]
    return Installation(
        triton / "bin" / "tritonserver",
        backends,
        {
            "LD_LIBRARY_PATH": os.pathsep.join(str(path) for path in library_path if str(path)),
            # The stub embeds an isolated Python, which ignores PYTHONPATH: it takes the environment of the first
            # `python3` on PATH.
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))),
        },
    )


def find_wheel() -> Path:
    """Return the folder of the installed package `pytriton`, without importing it.

    Raises:
        InstallationError: It is not installed, or is an sdist without the binary.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise InstallationError(
            f"carnelian-serve needs tritonserver, but there is neither {NATIVE_ROOT} nor the wheel {WHEEL} "
            f"for this Python ({sys.version.split()[0]}, {sysconfig.get_platform()}); `pip install {WHEEL}` "
            "with Python 3.10 to 3.12 on Linux"
        )
    package = Path(spec.origin).parent
    binary = package / "tritonserver" / "bin" / "tritonserver"
    if not binary.is_file():
        raise InstallationError(
            f"{WHEEL} must carry a tritonserver, but {binary} is missing; reinstall it from its Linux wheel "
            f"(`pip install --force-reinstall --only-binary :all: {WHEEL}`)"
        )
    return package


def library_directories() -> list[Path]:
    """Return the folders that may hold this Python's shared library, the likeliest first."""
    variables = (sysconfig.get_config_var(name) for name in ("LIBDIR", "LIBPL"))
    return [Path(value) for value in variables if value] + [Path(sys.base_prefix) / "lib"]


def find_libpython(version: str, directories: Iterable[Path]) -> Path | None:
    """Find the shared library of Python that the stub is linked to.

    Args:
        version: `3.11`.
        directories: Searched first: a system library would bring its own standard library.

    Returns:
        The file, or None where the dynamic linker finds it by itself.

    Raises:
        InstallationError: It is nowhere.
    """
    name = f"libpython{version}.so.1.0"
    for directory in directories:
        if os.access(directory / name, os.R_OK):  # is_file() fails in a folder that may not be read
            return directory / name
    if ctypes.util.find_library(f"python{version}") is not None:
        return None
    raise InstallationError(
        f"Triton's Python backend needs {name}, but it is neither beside this Python nor known to ldconfig; "
        f"on Debian and Ubuntu run `apt-get install libpython{version}`, with pyenv rebuild Python with "
        "`PYTHON_CONFIGURE_OPTS=--enable-shared`"
    )


def _check_surroundings(scratch: Path) -> None:
    if not sys.prefix.isascii():
        raise InstallationError(
            f"Triton's Python stubs read paths as ASCII, but this environment is in {sys.prefix}; make it anew in a "
            "folder whose path has ASCII letters alone"
        )
    if not os.access("/tmp", os.W_OK):
        raise InstallationError(
            "Triton's Python backend writes to /tmp, whatever TMPDIR says, but it may not; mount a tmpfs there"
        )
    if os.statvfs(scratch).f_flag & os.ST_NOEXEC:
        raise InstallationError(
            f"Triton's Python backend is run from {scratch.parent}, but programs may not run there (noexec); set "
            "TMPDIR to a folder where they may"
        )


def _find_stub(triton: Path, version: str) -> Path:
    stubs = triton / "python_backend_stubs"
    stub = stubs / version / "triton_python_backend_stub"
    if not stub.is_file():
        found = ", ".join(sorted(path.name for path in stubs.glob("*"))) or "none"
        raise InstallationError(
            f"{WHEEL} must carry a Python backend stub for the running Python {version}, but has them for {found} "
            f"({triton}); use a Python from 3.10 to 3.12"
        )
    return stub


@contextmanager
def _room_explained(place: Path) -> Iterator[None]:
    """Say of errors in the context how files find room in a place."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise InstallationError(
                f"Triton's Python backend must be written to {place}, but no file may be so large (`ulimit -f`, "
                "systemd's LimitFSIZE); allow files of any size"
            ) from error
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InstallationError(
            f"Triton's Python backend, some 3 MB, must find room in {place}, but there is too little "
            f"({error.strerror}); set TMPDIR to a folder with more"
        ) from error


def _copy_backends(backends: Path, triton: Path, stub: Path) -> None:
    """Copy the Python backend and the Python-based ones; Triton refuses links that lead out of the folder."""
    python = backends / "python"
    python.mkdir(parents=True)
    source = triton / "backends" / "python"
    for file in (source / "libtriton_python.so", source / "triton_python_backend_utils.py", stub):
        shutil.copy(file, python)
    for name in PYTHON_BASED_BACKENDS:
        (backends / name).mkdir()
        shutil.copy(_HERE / "backends" / name / "model.py", backends / name)
