"""Where the models come from: template by template, and the init container's script as a process."""

import functools
import hashlib
import http.server
import io
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest


def names(mounts: list[dict[str, Any]]) -> list[str]:
    return [mount["name"] for mount in mounts]


def test_models_of_the_image_need_no_volume(render):
    assert names(render().pod["volumes"]) == ["tmp", "shared-memory"]
    assert "initContainers" not in render().pod
    assert "--repository=/models" in render().server["args"]


def test_a_bucket_is_triton_s_own_repository(render):
    rendered = render(case="bucket")
    assert "--model-repository=s3://speech-models/releases/2026-11-21" in rendered.server["args"]
    assert rendered.server["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert "models" not in names(rendered.pod["volumes"])


def test_a_google_key_is_a_file(render):
    rendered = render(case="google")
    assert {"name": "GOOGLE_APPLICATION_CREDENTIALS", "value": "/google/credentials.json"} in rendered.server["env"]
    assert {"name": "google", "mountPath": "/google", "readOnly": True} in rendered.server["volumeMounts"]


def test_a_bucket_without_secrets_relies_on_the_service_account(render):
    url = "modelRepository.bucket.url=as://account/container/release"
    server = render("runtime=native", "modelRepository.source=bucket", url).server
    assert "envFrom" not in server
    assert "--model-repository=as://account/container/release" in server["args"]


def test_the_init_container_fetches_with_the_checksum(render):
    rendered = render(case="download")
    (init,) = rendered.pod["initContainers"]
    assert init["command"] == ["python3", "/scripts/download.py"]
    assert init["args"][1:] == ["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "/models"]
    assert init["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "models", "key": "authorization"}
    assert init["image"] == rendered.server["image"]
    assert init["resources"] == rendered.server["resources"]  # a pod with equal requests and limits stays Guaranteed


def test_the_init_container_goes_through_the_same_proxy_as_the_server(render):
    rendered = render("extraEnvFrom[0].secretRef.name=proxy", case="download")
    (init,) = rendered.pod["initContainers"]
    assert init["env"][1:] == rendered.server["env"][-2:]
    assert [variable["name"] for variable in init["env"]] == ["AUTHORIZATION", "HTTPS_PROXY", "SSL_CERT_FILE"]
    assert init["envFrom"] == rendered.server["envFrom"] == [{"secretRef": {"name": "proxy"}}]
    assert init["volumeMounts"][-1] == rendered.server["volumeMounts"][-1]
    assert init["volumeMounts"][-1]["name"] == "authorities"


def test_the_server_cannot_write_what_was_fetched(render):
    rendered = render(case="download")
    mount = next(mount for mount in rendered.server["volumeMounts"] if mount["name"] == "models")
    assert mount == {"name": "models", "mountPath": "/models", "readOnly": True}
    assert "readOnly" not in rendered.pod["initContainers"][0]["volumeMounts"][0]


def test_the_script_in_the_config_map_is_the_file(render, chart):
    script = render(case="download").one("ConfigMap", "-scripts")["data"]["download.py"]
    assert script.strip() == (chart / "files" / "download.py").read_text().strip()
    annotations = render(case="download").one("Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert len(annotations["checksum/scripts"]) == 64


def test_a_token_is_not_sent_in_the_clear(refusal, render):
    clear = "modelRepository.download.url=http://models.example.com/a.tar"
    assert "use https://, or leave secretName empty" in refusal(clear, case="download")
    # The archive's SHA-256 is compared, however it comes.
    (init,) = render(clear, "modelRepository.download.secretName=", case="download").pod["initContainers"]
    assert init["args"][0] == "http://models.example.com/a.tar"


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        (("modelRepository.source=bucket", "runtime=native"), "give s3://, gs:// or as://"),
        (("modelRepository.source=bucket", "modelRepository.bucket.url=s3://a/b"), "set runtime: native"),
        (("modelRepository.source=download",), "give both"),
        (("modelRepository.source=download", "modelRepository.download.url=https://a/b.tar"), "give both"),
        (("modelRepository.bucket.url=https://a/b",), "modelRepository"),
        (("modelRepository.download.sha256=abc",), "modelRepository"),
        (("modelRepository.path=/tmp",), "modelRepository.path"),
        (("modelRepository.path=/dev/shm/x",), "modelRepository.path"),
        (("modelRepository.path=/usr/bin",), "modelRepository.path"),
        (("modelRepository.path=//usr",), "modelRepository.path"),
        (("modelRepository.path=/opt",), "modelRepository.path"),
        (("modelRepository.path=/opt/tritonserver",), "modelRepository.path"),
        (("modelRepository.pvc.subPath=releases/../../x",), "modelRepository.pvc.subPath"),
        (("modelRepository.pvc.claimName=models",), "modelRepository.pvc.claimName is set, but"),
        (("modelRepository.pvc.subPath=releases/2",), "modelRepository.source is image, which does not read it"),
        (("modelRepository.bucket.url=s3://a/b",), "set source: bucket"),
        (("modelRepository.download.url=https://a/b.tar",), "set source: download"),
        (("modelRepository.download.sha256=" + "a" * 64,), "modelRepository.download.sha256 is set, but"),
    ],
)
def test_a_source_that_cannot_work_is_refused(values, advice, refusal):
    assert advice in refusal(*values)


@pytest.mark.parametrize("path", ["/opt/models", "/opt/carnelian-models", "/var/models", "/tmpmodels"])
def test_another_folder_of_models_is_taken(path, render):
    assert f"--repository={path}" in render(f"modelRepository.path={path}").server["args"]


class Archives(http.server.SimpleHTTPRequestHandler):
    """Serves archives to who has the key; fails once, or ends in the middle once, if the path asks for it."""

    failures = 0
    cuts = 0

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != "Bearer key":
            self.send_error(401)
        elif self.path == "/flaky.tar.gz" and not Archives.failures:
            Archives.failures += 1
            self.send_error(503)
        elif self.path == "/cut.tar.gz" and not Archives.cuts:
            Archives.cuts += 1
            archive = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(archive)))
            self.end_headers()
            self.wfile.write(archive[: len(archive) // 2])
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def archives(tmp_path):
    """A folder, and the address under which it is served."""
    served = tmp_path / "served"
    served.mkdir()
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Archives, directory=str(served))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield served, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def download(chart, tmp_path):
    """Runs the script on a folder, alone with Python as in the init container."""
    (tmp_path / "models").mkdir()

    def download(url, sha256, key="key", without_filters=False):
        script = str(chart / "files" / "download.py")
        command = [sys.executable, "-I", script, url, sha256, str(tmp_path / "models")]
        if without_filters:
            program = "import runpy, sys, tarfile; vars(tarfile).pop('data_filter', None)"
            program += "; runpy.run_path(sys.argv[0], {}, '__main__')"
            command[2:3] = ["-c", f"import sys; sys.argv = sys.argv[1:]; {program}", script]
        environment = {"AUTHORIZATION": f"Bearer {key}", "no_proxy": "127.0.0.1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    return download


def pack(path: Path, members: dict[str, str], link: str | None = None) -> str:
    """Writes an archive, with a symbolic link if that leads anywhere, and returns its SHA-256."""
    with tarfile.open(path, "w:gz") as tar:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
        if link is not None:
            info = tarfile.TarInfo("quartznet/2")
            info.type, info.linkname = tarfile.SYMTYPE, link
            tar.addfile(info)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_key_is_sent_without_the_end_of_its_line_and_never_shown(archives, download):
    served, url = archives
    sha256 = pack(served / "models.tar.gz", MODEL)
    assert download(f"{url}/models.tar.gz", sha256, "key\n").returncode == 0
    refused = download(f"{url}/models.tar.gz", "0" * 64, "s3cret\nX-Other: 1")
    assert refused.returncode == 1
    assert "`authorization` of the Secret must be one line of text" in refused.stderr
    assert "s3cret" not in refused.stderr


MODEL = {"quartznet/config.pbtxt": "name: ...", "quartznet/1/model.onnx": "weights"}


def test_an_archive_is_fetched_and_kept(archives, download, tmp_path):
    served, url = archives
    sha256 = pack(served / "models.tar.gz", MODEL)
    done = download(f"{url}/models.tar.gz", sha256)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "models" / "quartznet" / "1" / "model.onnx").read_text() == "weights"
    assert not (tmp_path / "models" / ".archive").exists()
    (served / "models.tar.gz").unlink()
    assert "already" in download(f"{url}/models.tar.gz", sha256).stdout


def test_an_archive_with_another_checksum_is_not_unpacked(archives, download, tmp_path):
    served, url = archives
    pack(served / "models.tar.gz", MODEL)
    done = download(f"{url}/models.tar.gz", "0" * 64)
    assert done.returncode == 1
    assert "nothing was unpacked" in done.stderr
    assert list((tmp_path / "models").iterdir()) == []


def test_an_archive_that_leads_out_of_the_folder_is_refused(archives, download, tmp_path):
    served, url = archives
    absolute = str(tmp_path / "absolute")
    for members, link in (({"../escaped": "x"}, None), ({absolute: "x"}, None), ({}, str(tmp_path))):
        sha256 = pack(served / "models.tar.gz", MODEL | members, link)
        for older in (False, True):  # Pythons without filters
            done = download(f"{url}/models.tar.gz", sha256, without_filters=older)
            if done.returncode == 0:  # the newer ones write `/a` as `a`, inside
                assert (members, older) == ({absolute: "x"}, False)
                (tmp_path / "models" / ".sha256").unlink()
            else:
                assert "must have files and folders alone, inside it, but" in done.stderr
            assert not (tmp_path / "escaped").exists()
            assert not Path(absolute).exists()


def test_an_archive_without_models_is_refused(archives, download):
    served, url = archives
    sha256 = pack(served / "models.tar.gz", {"release/quartznet/config.pbtxt": "one folder too deep"})
    assert "must have model folders at its top" in download(f"{url}/models.tar.gz", sha256).stderr


@pytest.mark.parametrize("cut", [lambda archive: archive[: len(archive) // 2], lambda _: b"PK\x03\x04 of another kind"])
def test_what_is_no_whole_archive_is_refused(cut, archives, download):
    served, url = archives
    pack(served / "models.tar.gz", MODEL)
    content = cut((served / "models.tar.gz").read_bytes())
    (served / "models.tar.gz").write_bytes(content)
    done = download(f"{url}/models.tar.gz", hashlib.sha256(content).hexdigest())
    assert done.returncode == 1
    assert done.stderr.startswith(f"download: {url}/models.tar.gz must be a whole tar archive")


def test_a_full_volume_is_said_at_once(archives, download, tmp_path, mount_tmpfs):
    served, url = archives
    (tmp_path / "models").rmdir()
    (tmp_path / "models").symlink_to(mount_tmpfs("size=64k"))
    sha256 = pack(served / "models.tar.gz", {"quartznet/1/model.onnx": os.urandom(200_000).hex()})
    done = download(f"{url}/models.tar.gz", sha256)
    assert done.returncode == 1
    assert "models must have room for the archive and its content, but: [Errno 28] No space left" in done.stderr


def test_half_a_download_is_begun_anew(archives, download, tmp_path):
    served, url = archives
    (tmp_path / "models" / "left").mkdir()
    (tmp_path / "models" / ".archive").write_text("half")
    (tmp_path / "models" / "linked").symlink_to("left", target_is_directory=True)
    assert download(f"{url}/models.tar.gz", pack(served / "models.tar.gz", MODEL)).returncode == 0
    assert not (tmp_path / "models" / "left").exists()


def test_a_failing_network_is_tried_again(archives, download):
    served, url = archives
    assert download(f"{url}/flaky.tar.gz", pack(served / "flaky.tar.gz", MODEL)).returncode == 0
    assert Archives.failures == 1


def test_an_answer_that_stays_the_same_is_said_at_once(archives, download):
    served, url = archives
    done = download(f"{url}/models.tar.gz", pack(served / "models.tar.gz", MODEL), key="another")
    assert (done.returncode, "must be readable, but after 1 attempt: HTTP Error 401" in done.stderr) == (1, True)


def test_a_connection_that_ends_in_the_middle_is_tried_again(archives, download):
    served, url = archives
    assert download(f"{url}/cut.tar.gz", pack(served / "cut.tar.gz", MODEL)).returncode == 0
    assert Archives.cuts == 1
